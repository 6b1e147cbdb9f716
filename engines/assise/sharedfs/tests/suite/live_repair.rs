//! R.8, R.10: records of a log change, or are lost, at the head while its program runs, and the copy has them. The session ends by
//! force, behind all records of the copy.

use crate::client::{Client, FILE, ROOT, user};
use crate::hostile_copies::assert_level;
use crate::pair::{COPY, Pair, sync};
use crate::repair::{APART, SYNCED, Undigested};
use format::NodeId;
use format::call::{CallKind, Status};
use pmem::Recorder;
use pmem::ring::RingPosition;

/// Zeros stand in the place of the first line of the record there.
fn lose(client: &Client, record: RingPosition) {
    client.attached.log.write(record.position, &[0; 64]);
}

/// The session ended by force, and the log was fetched.
fn assert_ended(both: &Undigested) {
    both.assert_records();
    let [ended] = &both.pair.daemon.terminations()[..] else { panic!("one session ended by force") };
    assert!(ended.reason.starts_with("Cut("), "{ended:?}");
    let [repaired] = both.pair.daemon.repaired()[..] else { panic!("one log was fetched once") };
    let log = both.client.attached.welcome.log;
    assert_eq!((repaired.node, repaired.log), (NodeId::new(COPY), log));
}

/// One of the same length, a shorter one, and a longer one: then the third record is gone too.
#[test]
fn records_that_a_program_rewrites_while_it_runs_are_those_of_the_copy() {
    for bytes in [&b"SECOND"[..], b"S", &[9; 300]] {
        let mut both = Undigested::new();
        both.rewrite_second(bytes);
        assert_ended(&both);
    }
}

#[test]
fn records_that_are_lost_while_a_program_runs_are_those_of_the_copy() {
    let both = Undigested::new();
    lose(&both.client, both.second);
    assert_ended(&both);
}

/// The records go over the end of the ring after some of these.
#[test]
fn a_log_that_is_fetched_while_its_program_runs_may_go_over_the_end_of_the_ring() {
    let mut wrapped = 0;
    for length in (64..2_100).step_by(64) {
        let mut lengths = [2_000; 29];
        lengths[28] = length;
        let both = Undigested::of(&lengths, false);
        wrapped += u64::from(both.client.ring.tail().position < both.second.position);
        lose(&both.client, both.second);
        assert_ended(&both);
    }
    assert!(wrapped > 0, "none went over the end");
}

/// The copy has not got the last record, and cannot get it: the fsync that waits for it fails.
#[test]
fn an_fsync_of_records_that_are_lost_before_the_copy_has_them_fails() {
    let mut both = Undigested::new();
    let last = both.client.ring.tail();
    assert!(both.client.write(both.file, 3 * APART, b"lost"));
    lose(&both.client, last);
    assert_eq!(sync(&both.client, &[(both.file, 1)]), Err(Status::Sealed));
    both.assert_records();
    assert_eq!(both.pair.daemon.terminations().len(), 1);
    assert_eq!(both.pair.daemon.repaired(), [], "the copy has no more than is here");
}

/// No call of the program fails after that: the node says it.
#[test]
fn records_of_a_program_that_ends_and_are_lost_before_the_copy_has_them_are_reported() {
    let mut both = Undigested::new();
    let last = both.client.ring.tail();
    assert!(both.client.write(both.file, 3 * APART, b"lost"));
    lose(&both.client, last);
    both.pair.daemon.end(both.client.session);
    let [ended] = &both.pair.daemon.terminations()[..] else { panic!("it is reported once") };
    assert!(ended.reason.starts_with("Cut("), "{ended:?}");
    both.assert_records();
    // Without damage nothing is.
    let both = Undigested::new();
    both.pair.daemon.end(both.client.session);
    assert_eq!(both.pair.daemon.terminations(), []);
}

/// A sync of everything fails in the same way. That of another program succeeds: the loss is told to the program whose log it is.
#[test]
fn a_sync_of_everything_ends_sessions_whose_records_are_lost_before_the_copy_has_them() {
    for is_of_other in [false, true] {
        let mut both = Undigested::new();
        let last = both.client.ring.tail();
        assert!(both.client.write(both.file, 3 * APART, b"lost"));
        lose(&both.client, last);
        let other = Client::attach_as(&both.pair.daemon, user(0), 2);
        let (calls, answer) = match is_of_other {
            true => (&other, Ok(Vec::new())),
            false => (&both.client, Err(Status::Sealed)),
        };
        assert_eq!(calls.call(CallKind::SyncAll, &[]), answer);
        assert_eq!(both.pair.daemon.terminations().len(), 1);
        both.assert_records();
    }
}

/// The program goes on writing over its log while it is fetched: it has the former file.
#[test]
fn a_program_that_goes_on_writing_over_its_log_changes_nothing() {
    let mut both = Undigested::new();
    // Several messages of 16 KiB.
    assert!(both.client.write(both.file, 8_192, &[5; 40_000]));
    sync(&both.client, &[(both.file, 1)]).unwrap();
    lose(&both.client, both.second);
    let (log, second) = (both.client.attached.log.clone(), both.second);
    let writes = Box::new(move || {
        (0..SYNCED.len() as u64).for_each(|line| log.write(second.position + line * 64, &[7; 64]))
    });
    both.pair.follows.borrow_mut().meanwhile = Some((2, writes));
    assert_ended(&both);
    assert!(both.pair.follows.borrow().meanwhile.is_none(), "it was fetched meanwhile");
}

/// The copy counts no more before it has sent what was asked: the session ends as it does on one node, and no other program waits.
#[test]
fn a_copy_that_is_removed_while_a_log_is_fetched_holds_nobody_up() {
    let mut both = Undigested::new();
    // Several messages of 16 KiB.
    assert!(both.client.write(both.file, 8_192, &[5; 40_000]));
    sync(&both.client, &[(both.file, 1)]).unwrap();
    lose(&both.client, both.second);
    let daemon = both.pair.daemon.clone();
    both.pair.follows.borrow_mut().meanwhile =
        Some((2, Box::new(move || daemon.remove_copy(NodeId::new(COPY)))));
    let other = Client::attach_as(&both.pair.daemon, user(0), 2);
    let inode = other.walk("file").unwrap().inode;
    assert_eq!(other.read(inode, 0, SYNCED[0].len() as u64).unwrap(), SYNCED[0]);
    assert_eq!(both.pair.daemon.terminations().len(), 1);
    assert_eq!(both.pair.daemon.repaired(), []);
}

/// The copy has the same bytes as the head: the log ends where it would, and is fetched a bounded number of times.
#[test]
fn records_that_never_were_any_end_the_log_at_both() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let mut hostile = Client::attach_as(&pair.daemon, user(0), 1);
    hostile.write_lease(ROOT);
    let (file, _) = hostile.create(ROOT, b"file", FILE | 0o644);
    // The checksum of the frame is right, and its kind is none.
    let mut header = hostile.header(format::record::Kind::Write, file);
    header.envelope.kind = 0xee;
    hostile.ring.append(zerocopy::transmute!(header), &[]).unwrap();
    let last = format::Sequence::new(hostile.ring.tail().sequence.get() - 1);
    hostile.pages.commit().commit(last, ipc::words::FenceBy::Operation);
    let _ = sync(&hostile, &[(file, 1)]);
    let other = Client::attach_as(&pair.daemon, user(0), 2);
    assert!(other.walk("file").is_ok());
    assert_eq!(pair.daemon.terminations().len(), 1);
    assert!(pair.daemon.repaired().len() <= 2);
    assert_level(&pair, &recorders);
}
