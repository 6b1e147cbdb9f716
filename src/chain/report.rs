//! The report of a node about itself, for `hearth status` and for the parents of standby programs. It is given also while the disk
//! of the node does not answer: then a thread of the daemon may hold the lock of its state without an end, and the report lacks what
//! is behind that lock.

use super::head::Head;
use super::member::Member;
use super::told::{ChainStatus, Role};
use crate::commands::daemon::{RESPONSIVE, daemon_status, process_status};
use crate::status::NodeStatus;
use cluster::{Path, View};
use format::NodeId;
use ipc::{Host, SystemHost, Time};

/// Why a node whose membership has run out waits, and the remedy.
const NOT_ANSWERED: &str = "the cluster manager has answered no heartbeat for a whole lease (hearth up starts it again if it is gone)";

impl Member {
    /// How the node is.
    pub fn status(&self) -> NodeStatus {
        // Before it is looked whether the node has failed: see `failed`.
        let valid_until = self.now.lock().membership.as_ref().and_then(|membership| membership.valid_until());
        let (membership, head, beginning, noted, chain) = {
            let now = self.now.lock();
            let (take_over, waits, mounting) = (now.take_over.clone(), now.waits.clone(), now.mounting);
            let chain = ChainStatus { take_over, waits, mounting, ..ChainStatus::default() };
            let moving_to = now.moving.map(|moving| moving.to);
            let moving_now = now.moving.is_some_and(|moving| moving.at_once);
            let chain = ChainStatus { moving_to, moving_now, needs_operator: now.needs_operator, ..chain };
            let noted = now.failure.as_ref().map(|failure| failure.why().to_owned());
            (now.membership.clone(), now.head.clone(), now.beginning, noted, chain)
        };
        let open = head.as_deref().filter(|head| head.daemon.is_responsive(RESPONSIVE));
        let own_failure = match (&head, open) {
            (Some(_), None) => noted,
            _ => self.own_failure(head.as_deref()),
        };
        let failed = own_failure.is_some();
        let node = (&self.begun.cluster, &self.begun.node);
        let mut status = match (&head, open) {
            (Some(_), Some(head)) => daemon_status(node, &head.daemon, &head.losses, &head.pool),
            (Some(_), None) => process_status(node.0, node.1, own_failure.clone()),
            (None, _) => self.standby_status(),
        };
        status.disk_stalled_ms = self.begun.disk.told_ms();
        let role = match (&head, beginning, &membership) {
            (Some(_), ..) if !failed => Role::Leads,
            // It answers no call.
            (Some(_), ..) | (None, Some(_), _) => Role::Beginning,
            (None, None, Some(_)) => Role::Follows,
            (None, None, None) => Role::Joining,
        };
        let mut chain = ChainStatus { role, failed, valid_until_ns: valid_until.map(Time::as_ns), ..chain };
        chain.expired = valid_until.is_some_and(|until| SystemHost.now() > until);
        if chain.expired && chain.waits.is_none() {
            chain.waits = Some(NOT_ANSWERED.to_owned());
        }
        let state = self.begun.standby.state();
        (chain.ledger, chain.executed) = (state.ledger.get(), state.executed.get());
        chain.follows = state.head.map(NodeId::get);
        chain.follow_end = self.links.follow_end();
        if let Some(view) = membership.and_then(|membership| membership.view()) {
            self.tell_view(&mut chain, open, &view);
        }
        status.copies = u32::try_from(chain.in_sync.len()).unwrap_or(u32::MAX);
        status.chain = Some(chain);
        status.stopped |= failed;
        status.failure = own_failure.or(status.failure);
        status
    }

    fn tell_view(&self, chain: &mut ChainStatus, head: Option<&Head>, view: &View) {
        chain.epoch = view.epoch.get();
        let Some(subtree) = view.subtrees.get(&Path::root()) else { return };
        chain.version = subtree.version.get();
        chain.leader = subtree.manager.map(NodeId::get);
        chain.nodes = subtree.chain.iter().map(|replica| replica.node.get()).collect();
        chain.min_copies = self.begun.chain.min_copies;
        chain.in_sync = subtree.in_sync().map(NodeId::get).collect();
        chain.copies = head.map(|head| head.told(self.id, view, subtree)).unwrap_or_default();
    }

    fn standby_status(&self) -> NodeStatus {
        let (cluster, node) = (&self.begun.cluster, &self.begun.node);
        let status = process_status(cluster, node, self.begun.standby.failure());
        let Some((usage, commit)) = self.begun.standby.usage() else { return status };
        NodeStatus {
            blocks: usage.blocks,
            blocks_free: usage.blocks_free,
            blocks_available: Some(usage.blocks_free),
            medium_is_full: self.begun.standby.lacks_space(),
            inodes: usage.inodes,
            commits: commit.get(),
            ..status
        }
    }
}
