//! Status reports of a standby.

use super::Standby;
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

impl Standby {
    /// The pool; none once the standby leads or has stopped.
    pub fn pool(&self) -> Option<PoolUid> {
        self.0.contents.lock().as_ref().map(|contents| contents.area.pool())
    }

    /// How full the area is, and at which commit; none once the standby leads or has stopped.
    pub fn usage(&self) -> Option<(Usage, CommitNumber)> {
        self.0.contents.lock().as_ref().map(|contents| (contents.area.usage(), contents.area.commit()))
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
