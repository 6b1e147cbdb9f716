//! Programs that harm what a copy holds: a commit word that promises more than the log has, and records over those that the
//! copy has not executed. Neither keeps other programs waiting, nor costs the chain its copy.

use crate::client::{Client, DIRECTORY, FILE, ROOT, user};
use crate::pair::{COPY, HEAD, Pair, sync, term};
use crate::second_copy::{difference, items};
use format::checksum::Salt;
use format::{Incarnation, InodeNumber, NodeId, Sequence};
use ipc::words::FenceBy;
use mirror::logs::{RING_START, log_file};
use pmem::ring::{AppendRing, RingPosition};
use pmem::{Recorder, Region};
use sharedfs::{Repaired, Standby};
use std::sync::Arc;

pub fn assert_level(pair: &Pair, recorders: &[Recorder; 2]) {
    for id in pair.daemon.sessions() {
        pair.daemon.end(id);
    }
    pair.quiesce();
    assert!(pair.daemon.copies()[0].connected);
    let (ours, theirs) = (items(&recorders[0].medium(), false), items(&recorders[1].medium(), false));
    assert!(ours == theirs, "{:#?}", difference(&ours.0, &theirs.0));
}

#[test]
fn a_commit_word_beyond_the_log_holds_nobody_up() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let mut hostile = Client::attach_as(&pair.daemon, user(0), 1);
    let mut other = Client::attach_as(&pair.daemon, user(0), 2);
    hostile.write_lease(ROOT);
    let (folder, _) = hostile.create(ROOT, b"folder", DIRECTORY | 0o777);
    hostile.create(folder, b"whole", FILE | 0o644);
    hostile.pages.commit().commit(Sequence::new(1 << 40), FenceBy::Operation);
    // It gets the folder, with what counts.
    let folder = other.walk("folder").unwrap().inode;
    other.write_lease(folder);
    assert!(other.walk("folder/whole").is_ok());
    let (file, _) = other.create(folder, b"of the other", FILE | 0o644);
    sync(&other, &[(file, 1)]).unwrap();
    assert_eq!(pair.daemon.terminations().len(), 1);
    assert_level(&pair, &recorders);
}

/// The log of a client, with what is appended next in the place of the record at `from`.
fn again_from(client: &Client, region: Region, from: RingPosition) -> AppendRing {
    let welcome = &client.attached.welcome;
    let begin = RingPosition { position: RING_START, sequence: Sequence::new(1) };
    AppendRing::new(region, RING_START, Salt::of_log(welcome.log, welcome.incarnation), begin, from)
}

/// R.10: the program puts another complete record, of the same length, in the place of one that the copy has. Both trees get the
/// record that the copy has, and the session ends.
#[test]
fn a_record_that_changes_after_it_was_sent_is_that_of_the_copy() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let mut hostile = Client::attach_as(&pair.daemon, user(0), 1);
    let mut other = Client::attach_as(&pair.daemon, user(0), 2);
    hostile.write_lease(ROOT);
    let (folder, _) = hostile.create(ROOT, b"folder", DIRECTORY | 0o777);
    hostile.digest(true).unwrap();
    hostile.write_lease(folder);
    hostile.create(folder, b"before", FILE | 0o644);
    let place = hostile.ring.tail();
    let inode = hostile.next_inode;
    hostile.create(folder, b"one", FILE | 0o644);
    sync(&hostile, &[(folder, 1)]).unwrap();
    hostile.next_inode = inode;
    hostile.ring = again_from(&hostile, hostile.attached.log.clone(), place);
    hostile.create(folder, b"two", FILE | 0o644);
    // Its checksum is right, and the copy has the record of "one".
    let folder = other.walk("folder").unwrap().inode;
    other.write_lease(folder);
    assert!(other.walk("folder/before").is_ok());
    assert!(other.walk("folder/one").is_ok() && other.walk("folder/two").is_err());
    other.create(folder, b"two", FILE | 0o644);
    sync(&other, &[(folder, 1)]).unwrap();
    assert_eq!(pair.daemon.terminations().len(), 1);
    assert_level(&pair, &recorders);
}

/// A pair whose copy has synced an entry that names a record, and not executed it. Its own file of the log contains another
/// complete record in that place.
fn differing(recorders: &[Recorder; 2]) -> (Pair, Client, InodeNumber) {
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let mut client = Client::attach_as(&pair.daemon, user(0), 1);
    client.write_lease(ROOT);
    let (file, _) = client.create(ROOT, b"file", FILE | 0o644);
    client.digest(true).unwrap();
    pair.quiesce();
    client.write_lease(file);
    let place = client.ring.tail();
    assert!(client.write(file, 0, b"the record that was synced"));
    sync(&client, &[(file, 1)]).unwrap();
    pair.follows.borrow_mut().paused = u32::MAX;
    // The head digests for another program.
    let other = Client::attach_as(&pair.daemon, user(0), 2);
    other.walk("file").unwrap();
    let name = log_file(client.attached.welcome.log, Incarnation::new(1));
    let mut ring = again_from(&client, recorders[1].medium().open(&name).unwrap(), place);
    let mut header = client.header(format::record::Kind::Write, file);
    header.envelope.payload_bytes.set(26);
    ring.append(zerocopy::transmute!(header), &[b"another of the same length".as_slice().into()]).unwrap();
    pair.daemon.feed_copies().unwrap();
    while pair.follows.borrow_mut().step() {}
    (pair, client, file)
}

/// Executes until the copy finds the difference.
fn find_difference(standby: &Standby) {
    let failed = loop {
        match standby.execute() {
            Ok(true) => {}
            done => break done,
        }
    };
    assert!(matches!(failed, Err(sharedfs::Error::Differs(..))), "{failed:?}");
    assert!(standby.failure().is_some());
}

/// A copy with another record than the head digested. It applies nothing of the entry, ends, and gets the records again when
/// its daemon is started.
#[test]
fn a_copy_with_other_records_than_the_head_gets_them_again() {
    let recorders = [Recorder::new(), Recorder::new()];
    let (pair, mut client, file) = differing(&recorders);
    find_difference(&pair.follows.borrow().standby.clone());
    pair.restart_copy();
    pair.follows.borrow_mut().paused = 0;
    pair.daemon.add_copy(pair.connect()).unwrap();
    client.write_lease(file);
    assert!(client.write(file, 100, b"more"));
    sync(&client, &[(file, 1)]).unwrap();
    assert_eq!(pair.daemon.terminations(), []);
    assert_level(&pair, &recorders);
}

/// The same, while the log ends at the head, which has its file no more: the copy gets the tree.
#[test]
fn a_copy_with_other_records_of_a_log_that_ended_gets_the_tree() {
    let recorders = [Recorder::new(), Recorder::new()];
    let (pair, client, _) = differing(&recorders);
    pair.daemon.end(client.session);
    while pair.follows.borrow_mut().step() {}
    find_difference(&pair.follows.borrow().standby.clone());
    pair.restart_copy();
    pair.follows.borrow_mut().paused = 0;
    let added = pair.daemon.add_copy(pair.connect());
    assert!(matches!(added, Err(sharedfs::Error::NeedsImport(_))), "{added:?}");
    pair.daemon.remove_copy(NodeId::new(COPY));
    pair.daemon.add_copy(pair.connect()).unwrap();
    assert_eq!(pair.daemon.terminations(), []);
    assert_level(&pair, &recorders);
}

/// A node whose pool has other records than an entry names gets them from a node that has the right ones, and leads.
#[test]
fn a_node_with_other_records_than_an_entry_names_gets_them_before_it_leads() {
    let recorders = [Recorder::new(), Recorder::new()];
    let (pair, client, _) = differing(&recorders);
    let log = client.attached.welcome.log;
    drop(client);
    let (mut pair, standby) = pair.begin_to_change_places(&recorders[0]);
    let (daemon, recovered) = standby.lead(term(COPY, 2), vec![pair.connect()]).unwrap();
    assert!(matches!(recovered.repaired[..], [Repaired { node, .. }] if node == NodeId::new(HEAD)));
    pair.daemon = Arc::new(daemon);
    let client = Client::attach(&pair.daemon, user(0));
    let file = client.walk("file").unwrap().inode;
    assert_eq!(client.read(file, 0, 26).unwrap(), b"the record that was synced");
    assert!(recovered.cuts.iter().all(|(cut, _)| *cut != log), "{:?}", recovered.cuts);
    assert_level(&pair, &[recorders[1].clone(), recorders[0].clone()]);
}

/// It leads alone with what it has.
#[test]
fn a_node_with_other_records_than_an_entry_names_leads_alone() {
    let recorders = [Recorder::new(), Recorder::new()];
    let (pair, _client, _) = differing(&recorders);
    let standby = pair.follows.borrow().standby.clone();
    let (daemon, _) = standby.lead(term(COPY, 2), Vec::new()).unwrap();
    let client = Client::attach(&Arc::new(daemon), user(0));
    assert!(client.walk("file").is_ok());
}

#[test]
fn a_program_that_ignores_how_much_is_reusable_is_cut() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let mut hostile = Client::attach_as(&pair.daemon, user(0), 1);
    hostile.write_lease(ROOT);
    let (file, _) = hostile.create(ROOT, b"file", FILE | 0o644);
    hostile.digest(true).unwrap();
    pair.quiesce();
    hostile.release();
    // Twice the ring at once, without a look at what others have.
    let mut sent = 0;
    for round in 0..60u64 {
        if hostile.ring.free_bytes() < 4_000 {
            let RingPosition { position, sequence } = hostile.ring.tail();
            hostile.ring.release_to(RingPosition { position, sequence });
        }
        sent += u64::from(hostile.write(file, round * 2_000, &[round as u8; 2_000]));
    }
    assert!(sent > 30);
    let mut other = Client::attach_as(&pair.daemon, user(0), 2);
    other.walk("file").unwrap();
    other.write_lease(file);
    assert!(other.write(file, 0, b"of the other"));
    sync(&other, &[(file, 1)]).unwrap();
    assert_eq!(pair.daemon.terminations().len(), 1);
    assert_level(&pair, &recorders);
}
