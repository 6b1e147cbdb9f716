//! Status reports of a standby.

use super::contents::Contents;
use super::{Inner, Standby};
use area::Usage;
use format::{CommitNumber, Life, NodeId, PoolUid, Sequence};
use ipc::sync::Ordering;
use transport::Connection;

/// How far a standby is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StandbyState {
    /// The node that sends to it.
    pub head: Option<NodeId>,
    /// The last entry of the ledger that is synced.
    pub ledger: Sequence,
    /// The last entry that was executed.
    pub executed: Sequence,
    /// The life of the chain at that entry.
    pub life: Life,
}

/// How full an area is, and at which commit; none of one that is not there.
pub(super) type NotedUsage = Option<(Usage, CommitNumber)>;

impl Standby {
    /// The pool; none once the standby leads or has stopped.
    pub fn pool(&self) -> Option<PoolUid> {
        self.0.contents.lock().as_ref().map(|contents| contents.area.pool())
    }

    /// How full the area is, and at which commit; none once the standby leads or has stopped. While entries are executed, which
    /// may take seconds on a slow medium, the answer is that after the entries before.
    pub fn usage(&self) -> Option<(Usage, CommitNumber)> {
        if let Some(contents) = self.0.contents.try_lock() {
            self.0.note_usage(contents.as_ref());
        }
        *self.0.usage.lock()
    }

    /// The standby's progress.
    pub fn state(&self) -> StandbyState {
        let head = self
            .0
            .head
            .lock()
            .connection
            .as_ref()
            .filter(|link| link.ended().is_none())
            .map(Connection::node);
        // Acquire: pairs with the Release of `announce`.
        let ledger = Sequence::new(self.0.synced.load(Ordering::Acquire));
        let executed = Sequence::new(self.0.executed.load(Ordering::Relaxed));
        StandbyState { head, ledger, executed, life: Life::new(self.0.life.load(Ordering::Relaxed)) }
    }
}

impl Inner {
    /// Notes it for status reports, which do not wait for the contents.
    pub(super) fn note_usage(&self, contents: Option<&Contents>) {
        *self.usage.lock() = contents.map(|contents| (contents.area.usage(), contents.area.commit()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Format, format_pool};
    use ipc::SystemHost;
    use pmem::Recorder;
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[test]
    fn a_status_report_does_not_wait_for_entries_that_are_executed() {
        let recorder = Recorder::new();
        let new = Format {
            pool: PoolUid::new(70),
            tree_nodes_max: 2048,
            root_mode: 0o755,
            root_uid: 0,
            root_gid: 0,
            time_ns: 1,
            ledger_bytes: 1 << 20,
        };
        format_pool(&recorder.medium(), &new).unwrap();
        let host = Arc::new(SystemHost);
        let standby = Standby::open(host.clone(), &recorder.medium(), Config::default()).unwrap();
        let executes = standby.0.contents.lock();
        let (gives, answers) = channel();
        let asked = standby.clone();
        let ask = Box::new(move || {
            let _ = gives.send(asked.usage().map(|(usage, _)| usage.inodes));
        });
        let asking = ipc::Host::spawn(&*host, "ask", ask).unwrap();
        let answer = answers.recv_timeout(Duration::from_secs(20));
        drop(executes);
        asking.join().unwrap();
        assert_eq!(answer, Ok(Some(1)));
        standby.stop();
        assert_eq!(standby.usage(), None);
    }
}
