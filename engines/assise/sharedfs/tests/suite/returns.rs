//! A copy that was away for a moment returns while programs go on: the stream brings what it lacks, in an order in which no
//! entry names a record that it has not got.

use crate::client::{Client, FILE, ROOT, user};
use crate::pair::{COPY, HEAD, Pair, sync, term};
use crate::second_copy::{difference, items};
use format::{InodeNumber, NodeId};
use pmem::Recorder;
use std::sync::Arc;

fn assert_level(pair: &Pair, recorders: &[Recorder; 2]) {
    for id in pair.daemon.sessions() {
        pair.daemon.end(id);
    }
    pair.quiesce();
    let (ours, theirs) = (items(&recorders[0].medium(), false), items(&recorders[1].medium(), false));
    assert!(ours == theirs, "{:#?}", difference(&ours.0, &theirs.0));
    assert_eq!(pair.daemon.terminations(), []);
}

/// A program with a file of its own, which the copy has.
fn begin(pair: &Pair, pid: u32) -> (Client, InodeNumber) {
    let mut client = Client::attach_as(&pair.daemon, user(0), pid);
    client.write_lease(ROOT);
    let (file, _) = client.create(ROOT, format!("file{pid}").as_bytes(), FILE | 0o644);
    client.digest(true).unwrap();
    client.write_lease(file);
    (client, file)
}

/// All of the ledger is sent before the logs of the second and the third program.
#[test]
fn a_copy_gets_digested_records_before_the_entries_that_name_them() {
    for new in [false, true] {
        let recorders = [Recorder::new(), Recorder::new()];
        let pair = Pair::on(&recorders[0], &recorders[1]);
        let mut programs: Vec<_> =
            if new { Vec::new() } else { (1..4).map(|pid| begin(&pair, pid)).collect() };
        pair.quiesce();
        pair.daemon.remove_copy(NodeId::new(COPY));
        if new {
            programs.extend((1..4).map(|pid| begin(&pair, pid)));
        }
        for (client, file) in &mut programs {
            assert!(client.write(*file, 0, &[7; 5_000]));
            client.digest(true).unwrap();
            assert!(client.write(*file, 5_000, &[8; 500]));
        }
        let connection = pair.connect();
        pair.follows.borrow_mut().eager = true;
        pair.daemon.add_copy(connection).unwrap();
        assert!(pair.daemon.copies()[0].level);
        assert_level(&pair, &recorders);
    }
}

/// A program was told of room in its log before the copy counted again, which had not executed what stood there. Its log does
/// not end where the copy has no room yet.
#[test]
fn a_log_does_not_end_where_the_copy_has_not_executed_yet() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let (mut client, file) = begin(&pair, 1);
    let write = |client: &mut Client, round: u64| {
        assert!(client.write(file, round * 2_000, &[round as u8; 2_000]), "round {round}");
    };
    (0..12).for_each(|round| write(&mut client, round));
    // It has the bytes, and no entry that says how far they count.
    pair.quiesce();
    pair.daemon.remove_copy(NodeId::new(COPY));
    client.digest(true).unwrap();
    client.release();
    // Over the place where the first ones stood.
    (12..36).for_each(|round| write(&mut client, round));
    pair.daemon.add_copy(pair.connect()).unwrap();
    sync(&client, &[(file, 1)]).unwrap();
    assert_eq!(pair.daemon.terminations(), []);
    let (daemon, _) = pair.take_over();
    let client = Client::attach(&daemon, user(0));
    let file = client.walk("file1").unwrap().inode;
    for round in 0..36u64 {
        assert_eq!(client.read(file, round * 2_000, 10).unwrap(), [round as u8; 10], "round {round}");
    }
}

/// A program attached and wrote nothing, and its log was not sent before the daemon died: the tree names the log, and the copy
/// does not have its file. The daemon leads again, with the copy.
#[test]
fn a_log_without_records_that_the_copy_does_not_have_is_sent() {
    let recorders = [Recorder::new(), Recorder::new()];
    let mut pair = Pair::on(&recorders[0], &recorders[1]);
    let (mut client, file) = begin(&pair, 1);
    assert!(client.write(file, 0, b"digested"));
    sync(&client, &[(file, 1)]).unwrap();
    let silent = Client::attach_as(&pair.daemon, user(0), 2);
    // The file is digested before, and the commit contains the entry of the log.
    silent.walk("file1").unwrap();
    client.write_lease(file);
    assert!(client.write(file, 0, b"synced"));
    sync(&client, &[(file, 1)]).unwrap();
    drop((client, silent));
    pair.stop_head();
    let standby = pair.restart_head();
    let (daemon, recovered) = standby.lead(term(HEAD, 2), vec![pair.connect()]).unwrap();
    assert_eq!(recovered.logs.len(), 2);
    pair.daemon = Arc::new(daemon);
    assert_level(&pair, &recorders);
}
