//! Records that the daemon did not count, although this process has heard that their operations were done: the log was damaged, and the
//! session was ended by force before them. The next sync of such a file fails, as one does after a failed write-back. So does the
//! next sync of any file, because a sync says that all earlier operations of the process are persisted.
//!
//! Guarantees: of a file of which records of an ended session did not count, one sync fails before a sync succeeds; and one sync of
//! the process fails before any succeeds.

use crate::state::State;
use format::{InodeNumber, Sequence};
use ipc::words::Seal;
use std::collections::BTreeSet;

/// Files with lost records.
#[derive(Default)]
pub(crate) struct Losses {
    /// The files that the session changed which ended last, each with its last record, if they were not digested when it ended.
    ended: Vec<(InodeNumber, Sequence)>,
    /// The last record of an operation that was done by then. Those behind it are in doubt: their operation is repeated.
    done: Sequence,
    /// Files of which records are lost, and no sync has failed yet.
    lost: BTreeSet<InodeNumber>,
    /// No sync has failed since files came to these.
    is_untold: bool,
}

impl Losses {
    /// A session ended after it had changed these files. Its records up to `done` are of operations that were done.
    fn note_end(&mut self, changed: Vec<(InodeNumber, Sequence)>, done: Sequence) {
        (self.ended, self.done) = (changed, done);
    }

    /// The log of that session counted up to `counted`. If it was sealed, that was behind record `sealed`.
    fn note_counted(&mut self, sealed: Option<Sequence>, counted: Sequence) {
        let end = sealed.unwrap_or(Sequence::new(u64::MAX));
        // If a daemon died, the records of the last operation may not be there. Then it is repeated, and no file has lost anything.
        let all_are_there = sealed.is_none() && counted >= self.done;
        let lost = self.ended.drain(..).filter(|(_, last)| !all_are_there && (*last).min(end) > counted);
        let before = self.lost.len();
        self.lost.extend(lost.map(|(inode, _)| inode));
        self.is_untold |= self.lost.len() > before;
    }

    /// Whether a sync of a file has to fail, once.
    pub fn take(&mut self, inode: InodeNumber) -> bool {
        let is_lost = self.lost.remove(&inode);
        self.take_any() || is_lost
    }

    /// Whether a sync of everything has to fail, once.
    pub fn take_any(&mut self) -> bool {
        std::mem::take(&mut self.is_untold)
    }
}

impl State {
    /// The session ends with these files changed.
    pub fn note_changed(&mut self) {
        let changed = self.nodes.indices().map(|index| self.nodes.get(index));
        let changed = changed.filter(|node| node.dirty).map(|node| (node.inode, node.last));
        let done = if self.appended == Sequence::new(0) { Sequence::new(u64::MAX) } else { self.before };
        self.losses.note_end(changed.collect(), done);
    }

    /// A session begins that continues the former one, of which the records up to `counted` count. A log that no daemon sealed was
    /// read by the next daemon.
    pub fn note_losses(&mut self, counted: Sequence) {
        let seal = self.last.as_ref().map(|(words, _)| words.seal());
        let sealed = match seal {
            Some(Seal::Sealed(sealed)) => Some(sealed),
            _ => None,
        };
        self.losses.note_counted(sealed, counted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No operation is in doubt.
    const ALL: Sequence = Sequence::new(u64::MAX);

    fn file(number: u64) -> InodeNumber {
        InodeNumber::new(number)
    }

    #[test]
    fn one_sync_of_a_file_with_lost_records_fails() {
        let mut losses = Losses::default();
        losses.note_end(
            vec![(file(1), Sequence::new(7)), (file(2), Sequence::new(8)), (file(3), Sequence::new(12))],
            ALL,
        );
        losses.note_counted(Some(Sequence::new(10)), Sequence::new(7));
        // The first one is of a file without lost records.
        let told = [1, 1, 2, 3].map(|number| losses.take(file(number)));
        assert_eq!(told, [true, false, true, true]);
        assert!(!losses.take(file(2)) && !losses.take_any());
        losses.note_end(vec![(file(2), Sequence::new(12))], ALL);
        losses.note_counted(Some(Sequence::new(12)), Sequence::new(11));
        assert!(losses.take_any() && !losses.take_any() && losses.take(file(2)) && !losses.take(file(1)));
    }

    /// A record behind the seal is made again by the next session.
    #[test]
    fn a_record_behind_the_seal_is_not_lost() {
        let mut losses = Losses::default();
        losses.note_end(vec![(file(1), Sequence::new(11))], ALL);
        losses.note_counted(Some(Sequence::new(10)), Sequence::new(10));
        assert!(!losses.take(file(1)) && !losses.take_any());
    }

    /// Records 11 and 12 are of an operation that was under way when the daemon died.
    #[test]
    fn of_a_log_that_no_daemon_sealed_the_records_of_operations_that_were_done_are_lost() {
        for (counted, lost) in [(9, true), (10, false), (11, false), (12, false)] {
            let mut losses = Losses::default();
            losses.note_end(
                vec![(file(1), Sequence::new(10)), (file(2), Sequence::new(12))],
                Sequence::new(10),
            );
            losses.note_counted(None, Sequence::new(counted));
            assert_eq!(losses.take(file(1)), lost, "{counted}");
        }
        // None was under way.
        let mut losses = Losses::default();
        losses.note_end(vec![(file(1), Sequence::new(10))], ALL);
        losses.note_counted(None, Sequence::new(9));
        assert!(losses.take_any() && losses.take(file(1)));
    }
}
