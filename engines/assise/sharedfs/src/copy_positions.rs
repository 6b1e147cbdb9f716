//! The positions of a copy, as the copy itself reported them: how much it has received, synced and executed. They only
//! grow.
//!
//! Guarantees: the head detects a copy that reports more than it was sent, or a tree that contains entries that are not
//! synced.

use format::mirror::{DataPart, LEDGER_STREAM, LogMark, SyncedMark};
use format::{Incarnation, LogUid, NodeId, Sequence};
use ipc::Digested;
use ipc::host::Time;
use mirror::FetchedBytes;
use mirror::ledger::LedgerPosition;
use mirror::logs::RING_START;
use std::collections::BTreeMap;
use std::time::Duration;

/// The state of a copy, for status reports and for the decision whether the node stays a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyState {
    /// Where it is.
    pub node: NodeId,
    /// There is a connection to it.
    pub connected: bool,
    /// It had all that was acknowledged, digested or published when it was added.
    pub level: bool,
    /// It lacks something, or its connection ended, and it has said nothing for so long.
    pub stalled: Option<Duration>,
    /// Bytes of logs that were sent and that it has not said to have, about.
    pub behind_bytes: u64,
    /// Bytes of logs that its tree took in since it is counted.
    pub executed_bytes: u64,
    /// Last entry of the ledger that it has synced.
    pub ledger: Sequence,
    /// Last entry of the ledger that its tree contains.
    pub executed: Sequence,
}

/// A log of which a copy has a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopiedLog {
    pub incarnation: Incarnation,
    pub sent: Digested,
    pub synced: Sequence,
    pub executed: Digested,
    /// The log was found to end at the first record when it was to be sent up to the second.
    pub ends: Option<(Sequence, Sequence)>,
    /// The furthest position in the file up to which something was sent.
    end: u64,
}

impl CopiedLog {
    /// A log of which the copy has all that was sent.
    pub fn new(incarnation: Incarnation, sent: Digested, executed: Digested) -> Self {
        let (synced, end) = (sent.sequence, sent.position.max(executed.position));
        Self { incarnation, sent, synced, executed, ends: None, end }
    }

    /// Records were sent up to a place.
    pub fn note_sent(&mut self, sent: Digested) {
        self.end = self.end.max(sent.position);
        self.sent = sent;
    }

    /// Number of bytes between two places, about: without those that a pad skips.
    pub fn bytes_between(&self, from: Digested, to: Digested) -> u64 {
        mirror::logs::bytes_between((RING_START, self.end), from, to)
    }
}

/// How far a copy is.
pub(crate) struct Positions {
    pub ledger_sent: Sequence,
    pub ledger: Sequence,
    pub contained: LedgerPosition,
    pub logs: BTreeMap<LogUid, CopiedLog>,
    /// Bytes of logs that its tree took in.
    pub executed_bytes: u64,
    /// When it said something, or when something was sent after all that was sent had been synced, or when the connection ended
    /// while it lacked nothing.
    pub moved_at: Time,
    /// Its connection ended, and it has said nothing since. Another connection is no answer to a call that waits for it.
    pub lost: bool,
    pub level: bool,
    /// The question that it was asked about each log.
    pub fetches: BTreeMap<LogUid, Fetch>,
}

/// A question for bytes of a log's file.
#[derive(Debug)]
pub(crate) enum Fetch {
    Asked(DataPart),
    Answered(Vec<u8>),
}

impl Positions {
    /// Whether something was sent that is not synced, or was asked for and has not come.
    pub fn waits(&self) -> bool {
        self.ledger_sent > self.ledger
            || self.logs.values().any(|log| log.sent.sequence > log.synced)
            || self.fetches.values().any(|fetch| matches!(fetch, Fetch::Asked(_)))
    }
}

impl Positions {
    /// The connection is over.
    pub fn lose(&mut self, now: Time) {
        if !self.waits() && !self.lost {
            self.moved_at = now;
        }
        self.lost = true;
        // A thread that asked finds its question gone, and asks again.
        self.fetches.clear();
    }

    /// The copy said something, or it was found to lack nothing.
    pub fn hear(&mut self, now: Time) {
        (self.moved_at, self.lost) = (now, false);
    }

    pub fn take_synced(&mut self, mark: &SyncedMark) -> Result<(), mirror::Error> {
        let (synced, sent) = match self.logs.get_mut(&mark.log) {
            _ if mark.log == LEDGER_STREAM => (&mut self.ledger, self.ledger_sent),
            Some(log) => (&mut log.synced, log.sent.sequence),
            // It is over.
            None => return Ok(()),
        };
        if mark.sequence > sent {
            return Err(mirror::Error::Broken("a copy has more than was sent"));
        }
        *synced = mark.sequence.max(*synced);
        Ok(())
    }

    pub fn take_fetched(&mut self, fetched: FetchedBytes) -> Result<(), mirror::Error> {
        match self.fetches.get_mut(&fetched.part.log) {
            // Nothing waits for it any more.
            None => Ok(()),
            Some(fetch) => {
                let answers = matches!(&*fetch, Fetch::Asked(asked) if fetched.answers(asked));
                if !answers {
                    return Err(mirror::Error::Broken("other bytes than were asked for"));
                }
                *fetch = Fetch::Answered(fetched.bytes);
                Ok(())
            }
        }
    }

    pub fn take_executed(&mut self, ledger: LedgerPosition, logs: &[LogMark]) -> Result<(), mirror::Error> {
        if ledger.sequence > self.ledger {
            return Err(mirror::Error::Broken("a tree contains entries that are not synced"));
        }
        if ledger.sequence > self.contained.sequence {
            self.contained = ledger;
        }
        for mark in logs {
            let log = self.logs.get_mut(&mark.log).filter(|log| log.incarnation == mark.incarnation);
            let Some(log) = log else { continue };
            if mark.sequence > log.synced {
                return Err(mirror::Error::Broken("a tree contains entries that are not synced"));
            }
            if mark.sequence > log.executed.sequence {
                let executed = Digested { sequence: mark.sequence, position: mark.position.get() };
                log.end = log.end.max(executed.position);
                self.executed_bytes += log.bytes_between(log.executed, executed);
                log.executed = executed;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The program uses the first MiB of its log's file; a pad skips the rest.
    #[test]
    fn what_a_pad_skips_is_not_behind() {
        const MIB: u64 = 1 << 20;
        let at = |sequence, position| Digested { sequence: Sequence::new(sequence), position };
        let mut log = CopiedLog::new(Incarnation::new(1), at(0, RING_START), at(0, RING_START));
        for (sequence, position) in [(100, MIB / 2), (200, MIB), (300, RING_START + MIB / 4)] {
            log.note_sent(at(sequence, position));
        }
        let behind = |from| log.bytes_between(from, log.sent);
        assert_eq!(behind(at(200, MIB)), MIB / 4);
        assert_eq!(behind(at(100, MIB / 2)), 3 * MIB / 4);
        assert_eq!(log.bytes_between(at(100, MIB / 2), at(200, MIB)), MIB / 2);
    }
}
