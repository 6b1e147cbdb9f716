//! R.8, R.13: the daemon of the head is down, and records of a log change that the copy has: its program puts others in their
//! place, or the medium loses them. The next life begins with those of the copy, and nothing that was synced is lost.

use crate::client::{Client, FILE, ROOT, user};
use crate::hostile_copies::assert_level;
use crate::pair::{COPY, HEAD, Pair, sync, term};
use format::checksum::Salt;
use format::record::Kind;
use format::{InodeNumber, NodeId};
use mirror::logs::{RING_START, log_file};
use pmem::Recorder;
use pmem::ring::{AppendRing, RingPosition};
use sharedfs::{Error, Recovered};
use std::sync::Arc;

/// The contents of a file that was synced, in undigested records.
pub const SYNCED: [&[u8]; 3] = [b"first", b"second", b"third"];

/// Where the records are in the file that they write.
pub const APART: u64 = 100;

/// A program with records that both nodes have synced and not digested.
pub struct Undigested {
    pub pair: Pair,
    pub recorders: [Recorder; 2],
    pub client: Client,
    pub file: InodeNumber,
    /// Where the second of them begins.
    pub second: RingPosition,
}

impl Undigested {
    pub fn new() -> Self {
        Self::of(&[], false)
    }

    /// The ring has taken records of these lengths before. The copy may not have executed all entries of the ledger.
    pub fn of(lengths: &[usize], executes_late: bool) -> Self {
        let recorders = [Recorder::new(), Recorder::new()];
        let pair = Pair::on(&recorders[0], &recorders[1]);
        let mut client = Client::attach_as(&pair.daemon, user(0), 1);
        client.write_lease(ROOT);
        let (file, _) = client.create(ROOT, b"file", FILE | 0o644);
        for length in lengths {
            assert!(client.write(file, 0, &vec![1; *length]));
            client.digest(true).unwrap();
            pair.quiesce();
            client.release();
        }
        client.digest(true).unwrap();
        pair.quiesce();
        if executes_late {
            pair.follows.borrow_mut().paused = u32::MAX;
            client.write_lease(file);
            assert!(client.write(file, 0, b"digested"));
            // Its read lease ends that of the client, whose record is digested before.
            Client::attach_as(&pair.daemon, user(0), 3).walk("file").unwrap();
        }
        client.write_lease(file);
        assert!(client.write(file, 0, SYNCED[0]));
        let second = client.ring.tail();
        assert!(client.write(file, APART, SYNCED[1]) && client.write(file, 2 * APART, SYNCED[2]));
        sync(&client, &[(file, 1)]).unwrap();
        Self { pair, recorders, client, file, second }
    }

    /// Puts another record in the place of the second.
    pub fn rewrite_second(&mut self, bytes: &[u8]) {
        let welcome = &self.client.attached.welcome;
        let (region, salt) =
            (self.client.attached.log.clone(), Salt::of_log(welcome.log, welcome.incarnation));
        let mut ring = AppendRing::new(region, RING_START, salt, self.second, self.second);
        let mut header = self.client.header(Kind::Write, self.file);
        header.offset.set(APART);
        header.envelope.payload_bytes.set(bytes.len() as u32);
        ring.append(zerocopy::transmute!(header), &[bytes.into()]).unwrap();
    }

    /// The head's daemon is started again, with these changes while it was down, and leads beside the copy.
    fn restart(&mut self, meanwhile: impl FnOnce(&mut Self)) -> Recovered {
        self.pair.stop_head();
        meanwhile(self);
        let standby = self.pair.restart_head();
        let (daemon, recovered) = standby.lead(term(HEAD, 2), vec![self.pair.connect()]).unwrap();
        self.pair.daemon = Arc::new(daemon);
        recovered
    }

    /// Everything that was synced is there, the copy is in sync with it, and the program goes on with a new log.
    fn assert_synced(&self) {
        self.assert_records();
        assert_eq!(self.pair.daemon.terminations(), []);
    }

    /// The same, however the session ended.
    pub fn assert_records(&self) {
        let mut other = Client::attach_as(&self.pair.daemon, user(0), 2);
        let inode = other.walk("file").unwrap().inode;
        for (bytes, at) in SYNCED.iter().zip((0..).step_by(APART as usize)) {
            assert_eq!(other.read(inode, at, bytes.len() as u64).unwrap(), *bytes);
        }
        other.write_lease(inode);
        assert!(other.write(inode, 1_000, b"more"));
        sync(&other, &[(inode, 1)]).unwrap();
        assert_level(&self.pair, &self.recorders);
    }

    fn log(&self) -> String {
        let welcome = &self.client.attached.welcome;
        log_file(welcome.log, welcome.incarnation)
    }
}

fn repaired(recovered: &Recovered) -> usize {
    assert!(recovered.repaired.iter().all(|repaired| repaired.node == NodeId::new(COPY)));
    recovered.repaired.len()
}

/// The copy does not have the last record.
#[test]
fn equal_records_are_not_fetched() {
    let mut both = Undigested::new();
    assert!(both.client.write(both.file, 3 * APART, b"not synced"));
    let recovered = both.restart(|_| {});
    assert_eq!((repaired(&recovered), recovered.cuts.len()), (0, 0));
    both.assert_synced();
}

/// One of the same length, a shorter one, and a longer one: then the third record is gone too.
#[test]
fn records_that_a_program_rewrites_are_those_of_the_copy() {
    for bytes in [&b"SECOND"[..], b"S", &[9; 300]] {
        let mut both = Undigested::new();
        let recovered = both.restart(|both| both.rewrite_second(bytes));
        assert_eq!(repaired(&recovered), 1, "{bytes:?}");
        both.assert_synced();
    }
}

/// The records go over the end of the ring after some of these.
#[test]
fn a_range_may_go_over_the_end_of_the_ring() {
    let mut wrapped = 0;
    for length in (64..2_100).step_by(64) {
        let mut lengths = [2_000; 29];
        lengths[28] = length;
        let mut both = Undigested::of(&lengths, false);
        wrapped += u64::from(both.client.ring.tail().position < both.second.position);
        let recovered = both.restart(|both| both.rewrite_second(b"SECOND"));
        assert_eq!(repaired(&recovered), 1, "{length}");
        both.assert_synced();
    }
    assert!(wrapped > 0, "none went over the end");
}

#[test]
fn a_log_that_its_program_removed_is_made_again() {
    let mut both = Undigested::new();
    let name = both.log();
    let recovered = both.restart(|both| both.recorders[0].medium().remove(&name).unwrap());
    assert_eq!(repaired(&recovered), 1);
    both.assert_synced();
}

/// The medium has lost a line of a record.
#[test]
fn records_that_the_medium_lost_are_those_of_the_copy() {
    let mut both = Undigested::new();
    let recovered = both.restart(|both| {
        let region = both.client.attached.log.clone();
        region.write(both.second.position, &[0; 64]);
        region.sync().unwrap();
    });
    assert_eq!((repaired(&recovered), recovered.damaged.len()), (1, 0));
    both.assert_synced();
}

/// Records behind those of the copy stay: the program made them, and nothing says that they are wrong.
#[test]
fn records_that_only_the_head_has_stay() {
    let mut both = Undigested::new();
    let (file, client) = (both.file, &mut both.client);
    assert!(client.write(file, 3 * APART, b"not synced"));
    let recovered = both.restart(|both| {
        let tail = both.second;
        let mut line = [0; 64];
        both.client.attached.log.read(tail.position, &mut line).unwrap();
        line[40] ^= 1;
        both.client.attached.log.write(tail.position, &line);
    });
    assert_eq!(repaired(&recovered), 1);
    let other = Client::attach_as(&both.pair.daemon, user(0), 3);
    let inode = other.walk("file").unwrap().inode;
    assert_eq!(other.read(inode, 3 * APART, 10).unwrap(), b"not synced");
    both.assert_synced();
}

/// Reports of how far the copy's tree is come between the answers. The head needs them before it leads.
#[test]
fn a_copy_may_execute_entries_meanwhile() {
    let mut both = Undigested::of(&[], true);
    let recovered = both.restart(|both| {
        both.rewrite_second(b"SECOND");
        both.pair.follows.borrow_mut().paused = 0;
        both.pair.follows.borrow_mut().eager = true;
    });
    assert_eq!(repaired(&recovered), 1);
    both.assert_synced();
}

/// The connection to the copy ends after any number of its messages. The next attempt begins anew.
#[test]
fn an_interrupted_repair_is_done_again() {
    let mut both = Undigested::new();
    // Several messages of 16 KiB.
    let long = vec![5; 40_000];
    assert!(both.client.write(both.file, 8_192, &long));
    sync(&both.client, &[(both.file, 1)]).unwrap();
    both.pair.stop_head();
    both.rewrite_second(b"SECOND");
    let standby = both.pair.restart_head();
    let mut interrupted = 0;
    let daemon = loop {
        let connection = both.pair.connect();
        let closing = connection.clone();
        both.pair.follows.borrow_mut().meanwhile = Some((interrupted + 1, Box::new(move || closing.close())));
        match standby.lead(term(HEAD, 2 + u64::from(interrupted)), vec![connection]) {
            // The last attempt that failed may have digested them.
            Ok((daemon, _)) => break daemon,
            Err(error) => assert!(matches!(error, Error::Copy(..)), "{error:?}"),
        }
        interrupted += 1;
        // If the fetch had begun, the record was right again.
        both.rewrite_second(b"Second");
        assert!(interrupted < 100);
    };
    // One question, and three fetches.
    assert!(interrupted > 3, "{interrupted}");
    both.pair.follows.borrow_mut().meanwhile = None;
    both.pair.daemon = Arc::new(daemon);
    let other = Client::attach_as(&both.pair.daemon, user(0), 3);
    let inode = other.walk("file").unwrap().inode;
    assert_eq!(other.read(inode, 8_192, 40_000).unwrap(), long);
    both.assert_synced();
}

/// The program writes over its log again while the next life begins, after any number of messages of the copy: it has the file
/// that was compared with the copy, and that was repaired.
#[test]
fn records_that_a_program_rewrites_during_a_take_over_are_those_of_the_copy() {
    for was_wrong in [false, true] {
        let mut in_time = 0;
        for messages in 1.. {
            // The copy has entries to execute after the repair, before the head digests.
            let mut both = Undigested::of(&[], was_wrong);
            let (log, second) = (both.client.attached.log.clone(), both.second);
            both.pair.stop_head();
            if was_wrong {
                both.rewrite_second(b"SECOND");
            }
            let standby = both.pair.restart_head();
            let connection = both.pair.connect();
            let writes = Box::new(move || log.write(second.position, &[7; 64]));
            both.pair.follows.borrow_mut().paused = 0;
            both.pair.follows.borrow_mut().meanwhile = Some((messages, writes));
            let (daemon, recovered) = standby.lead(term(HEAD, 2), vec![connection]).unwrap();
            both.pair.daemon = Arc::new(daemon);
            let is_over = both.pair.follows.borrow_mut().meanwhile.take().is_some();
            in_time += usize::from(repaired(&recovered) > usize::from(was_wrong));
            assert_eq!((recovered.damaged.len(), recovered.cuts.len()), (0, 0), "after {messages} messages");
            both.assert_synced();
            if is_over {
                break;
            }
        }
        assert!(in_time > 0, "it was never between the comparison and the digest");
    }
}
