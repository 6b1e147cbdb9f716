//! A member whose tree is of the history of the head, up to an entry of the ledger: it gets only what changed since, at the head or
//! in its own tree, and everything else stays where it is.

use crate::client::{Client, FILE, ROOT, user};
use crate::join::{assert_equal, fill, go_round};
use crate::pair::{COPY, HEAD, Pair, config, sync};
use crate::still::StillHost;
use area::{Area, Extent};
use format::{InodeNumber, NodeId};
use pmem::Recorder;
use sharedfs::{Daemon, Standby};
use std::sync::Arc;

/// Where the blocks of a file are in a pool.
fn places(recorder: &Recorder, inode: InodeNumber) -> Vec<Extent> {
    let area = Area::open(&recorder.medium(), config(COPY).area).unwrap();
    area.extents(inode, 0..u64::MAX, usize::MAX).unwrap()
}

fn inode_of(pair: &Pair, name: &str) -> InodeNumber {
    let client = Client::attach_as(&pair.daemon, user(0), 77);
    let inode = client.walk(name).unwrap().inode;
    pair.daemon.end(client.session);
    inode
}

/// Overwrites a part of a file.
fn overwrite(pair: &Pair, name: &str, byte: u8) {
    let mut client = Client::attach_as(&pair.daemon, user(0), 78);
    let inode = client.walk(name).unwrap().inode;
    client.write_lease(inode);
    assert!(client.write(inode, 9_000, &[byte; 30_000]));
    client.digest(true).unwrap();
    pair.daemon.end(client.session);
}

#[test]
fn a_member_that_was_away_gets_only_what_changed() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    fill(&pair, 0..30, 150_000);
    pair.quiesce();
    let (still, changed) = (inode_of(&pair, "file-12"), inode_of(&pair, "file-27"));
    pair.quiesce();
    pair.daemon.remove_copy(NodeId::new(COPY));
    let before = [still, changed].map(|inode| places(&recorders[1], inode));
    overwrite(&pair, "file-27", 99);
    go_round(&pair, 300);
    pair.daemon.add_copy(pair.connect()).unwrap();
    pair.quiesce();
    assert_equal([&recorders[0], &recorders[1]]);
    assert_eq!(before[0], places(&recorders[1], still), "it was sent, though nothing in it changed");
    assert_ne!(before[1], places(&recorders[1], changed));
}

/// The former head executed entries that the copy never got, which leads by then, and wrote others in their place.
#[test]
fn a_former_head_with_entries_of_its_own_gets_what_differs() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    fill(&pair, 0..30, 150_000);
    pair.quiesce();
    let [still, here, there] = ["file-12", "file-3", "file-27"].map(|name| inode_of(&pair, name));
    pair.quiesce();
    pair.daemon.remove_copy(NodeId::new(COPY));
    overwrite(&pair, "file-3", 98);
    fill(&pair, 40..42, 40_000);
    let pair = pair.change_places(&recorders[0]);
    overwrite(&pair, "file-27", 97);
    fill(&pair, 50..53, 50_000);
    let before = [still, here, there].map(|inode| places(&recorders[0], inode));
    pair.daemon.add_copy(pair.connect()).unwrap();
    pair.quiesce();
    assert_equal([&recorders[1], &recorders[0]]);
    let after = [still, here, there].map(|inode| places(&recorders[0], inode));
    assert_eq!(before[0], after[0], "it was sent, though it is equal");
    assert!(before[1] != after[1] && before[2] != after[2]);
}

/// A member that led by itself since a common entry has a last life that the head does not know.
#[test]
fn a_member_with_a_life_of_its_own_gets_the_whole_tree() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    fill(&pair, 0..3, 100_000);
    pair.quiesce();
    let still = inode_of(&pair, "file-1");
    pair.quiesce();
    pair.daemon.remove_copy(NodeId::new(COPY));
    pair.follows.borrow().standby.stop();
    {
        let host = StillHost::again();
        let daemon = Arc::new(Daemon::open(host, &recorders[1].medium(), config(COPY)).unwrap().0);
        let mut own = Client::attach(&daemon, user(0));
        own.write_lease(ROOT);
        own.create(ROOT, b"of its own", FILE | 0o644);
        own.digest(true).unwrap();
    }
    let standby = Standby::open(StillHost::again(), &recorders[1].medium(), config(COPY)).unwrap();
    pair.follows.borrow_mut().standby = standby;
    let before = places(&recorders[1], still);
    pair.daemon.add_copy(pair.connect()).unwrap();
    pair.quiesce();
    assert_equal([&recorders[0], &recorders[1]]);
    assert_ne!(before, places(&recorders[1], still));
}

/// A head remembers so many lives of its history.
#[test]
fn a_member_whose_last_life_is_forgotten_gets_the_whole_tree() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    fill(&pair, 0..3, 100_000);
    pair.quiesce();
    let still = inode_of(&pair, "file-1");
    pair.quiesce();
    pair.follows.borrow().standby.stop();
    drop(pair);
    let before = places(&recorders[1], still);
    for _ in 0..config(HEAD).area.lives_max + 1 {
        drop(Daemon::open(StillHost::again(), &recorders[0].medium(), config(HEAD)).unwrap());
    }
    let pair = Pair::apart(StillHost::again(), &recorders[0], &recorders[1], config(COPY));
    pair.daemon.add_copy(pair.connect()).unwrap();
    pair.quiesce();
    assert_equal([&recorders[0], &recorders[1]]);
    assert_ne!(before, places(&recorders[1], still), "its history was taken for a known one");
}

/// A member that still executes what it received from a former link reports that while the head waits for the first answer.
#[test]
fn a_member_may_report_before_it_answers() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    fill(&pair, 0..30, 150_000);
    pair.quiesce();
    let still = inode_of(&pair, "file-12");
    pair.quiesce();
    let before = places(&recorders[1], still);
    pair.follows.borrow_mut().paused = u32::MAX;
    let mut client = Client::attach_as(&pair.daemon, user(0), 79);
    client.write_lease(ROOT);
    let (file, _) = client.create(ROOT, b"received", FILE | 0o644);
    sync(&client, &[(file, 1)]).unwrap();
    pair.daemon.remove_copy(NodeId::new(COPY));
    client.digest(true).unwrap();
    pair.daemon.end(client.session);
    go_round(&pair, 300);
    pair.follows.borrow_mut().eager = true;
    pair.daemon.add_copy(pair.connect()).unwrap();
    pair.follows.borrow_mut().paused = 0;
    pair.quiesce();
    assert_equal([&recorders[0], &recorders[1]]);
    assert_eq!(before, places(&recorders[1], still), "it was sent, though nothing in it changed");
}
