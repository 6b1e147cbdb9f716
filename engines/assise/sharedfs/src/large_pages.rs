//! Large pages for the memory of logs: pages of 2 MB, which the kernel forms of small ones.
//!
//! They let a program that overwrites without a pause write a quarter more. The kernel takes 1 to 8 ms to form one, so the daemon
//! has it done: of pieces of a log that were just digested, to which the writer comes last. Only a log that is written
//! through several times gets them, because most programs write little.
//!
//! Guarantees: hints only. The contents of the log stay as they are.

use crate::state::{Core, State};
use ipc::Digested;
use mirror::logs::LogFile;
use pmem::medium::Class;
use pmem::region::LARGE_PAGE_BYTES;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// A log gets large pages once so many times its bytes were digested.
const ROUNDS: u64 = 4;

/// The pieces of a session's log that have large pages, or the kernel was asked for them.
#[derive(Debug, Default)]
pub(crate) struct LogPieces {
    /// How far the log was digested at the last call, and how large it was.
    last: (u64, u64),
    /// Bytes that were digested since the log has this size.
    digested: u64,
    large: BTreeSet<u64>,
}

impl LogPieces {
    /// The piece that is due now that the log, of so many bytes, is digested up to a position: the last one before it.
    fn next(&mut self, position: u64, log_bytes: u64) -> Option<Range<u64>> {
        let (last, last_bytes) = std::mem::replace(&mut self.last, (position, log_bytes));
        if last_bytes != log_bytes {
            self.digested = 0;
            return None;
        }
        let rest_of_ring = if position < last { log_bytes } else { 0 };
        self.digested += (rest_of_ring + position).saturating_sub(last);
        if self.digested < ROUNDS * log_bytes {
            return None;
        }
        let piece = (position / LARGE_PAGE_BYTES).checked_sub(1)?;
        self.large.insert(piece).then(|| piece * LARGE_PAGE_BYTES..(piece + 1) * LARGE_PAGE_BYTES)
    }
}

impl Core {
    /// Has large pages formed of pieces that were digested since the last call, on a thread of its own. Called by the background
    /// thread.
    pub fn form_large_pages(self: &Arc<Self>) {
        if self.medium.class() != Class::Memory {
            return;
        }
        let due = self.state.lock().due_for_large_pages();
        if due.is_empty() {
            return;
        }
        let form = move || due.into_iter().for_each(|(log, piece)| log.region().form_large_pages(piece));
        // Without a thread the pages stay as they are.
        let _ = self.spawn("pages", form);
    }
}

impl State {
    fn due_for_large_pages(&mut self) -> Vec<(Arc<LogFile>, Range<u64>)> {
        let copy = &self.copy;
        let due = self.sessions.values_mut().filter_map(|session| {
            let Digested { position, .. } = copy.digested(session.log);
            let piece = session.pieces.next(position, session.log_bytes)?;
            Some((copy.logs.get(&session.log)?.file.clone()?, piece))
        });
        due.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// The pieces that are due while the log is digested to its end, a step at a time, by their starts in MiB.
    fn round(pieces: &mut LogPieces, log_bytes: u64) -> Vec<u64> {
        let steps = (1..=4).map(|step| step * log_bytes / 4);
        steps.filter_map(|position| pieces.next(position, log_bytes)).map(|piece| piece.start / MIB).collect()
    }

    #[test]
    fn each_piece_gets_large_pages_once_after_some_rounds() {
        let mut pieces = LogPieces::default();
        for _ in 0..ROUNDS {
            assert_eq!(round(&mut pieces, 16 * MIB), []);
        }
        assert_eq!(round(&mut pieces, 16 * MIB), [2, 6, 10, 14]);
        assert_eq!(round(&mut pieces, 16 * MIB), []);
        assert_eq!(pieces.next(5 * MIB + 1, 16 * MIB), None);
        assert_eq!(pieces.next(6 * MIB + 1, 16 * MIB), Some(4 * MIB..6 * MIB));
    }

    #[test]
    fn a_log_that_grows_begins_anew() {
        let mut pieces = LogPieces::default();
        for log_bytes in [8 * MIB, 16 * MIB] {
            for _ in 0..ROUNDS {
                assert_eq!(round(&mut pieces, log_bytes), []);
            }
        }
        assert_eq!(round(&mut pieces, 16 * MIB), [2, 6, 10, 14]);
    }

    #[test]
    fn a_log_of_less_than_a_piece_has_none() {
        let mut pieces = LogPieces::default();
        for _ in 0..3 * ROUNDS {
            assert_eq!(round(&mut pieces, MIB), []);
        }
    }
}
