//! Nodes of the tree for what the daemon itself notes there: logs with the groups of their processes, grants, lives. On a full tree
//! only those of the reserve are left (`area::Limits::reserve_nodes`).
//!
//! Guarantee: before the reserve is used up, a session that has many leases for writing gets no more of them until it has
//! given others back, and no session begins. So the daemon never stops because a note finds no node. Sessions that end give their
//! nodes back.

use crate::config::Config;
use crate::replay::table::Change;
use crate::state::State;
use ccnvm::{Mode, SessionId, Want};
use format::node::LOG_GROUPS_PIECE;
use format::session::WORD_OWN_RANGE;

/// Leases for writing that a session may have when less than this part of the reserve is left.
const FEW_LEASES: [(u64, usize); 2] = [(1, 128), (2, 16)];
/// No session begins when less than this part is left.
const SESSIONS_PART: u64 = 4;
/// Free nodes that are not counted: those that the area keeps for changes that give room back, and those of one commit.
const KEPT_NODES: u64 = 128;
/// Pending changes of one node, at least, that are no groups.
const CHANGES_A_NODE: u64 = 16;

impl State {
    /// Free nodes of the reserve, without those that the commit of pending changes takes. These are counted only where nodes are few.
    fn nodes_for_notes(&self, reserve: u64) -> u64 {
        let free = u64::from(self.copy.free.usage.nodes_free).saturating_sub(KEPT_NODES);
        if free >= 2 * reserve {
            return free;
        }
        let (mut groups, mut count) = (0, 0);
        for pending in self.copy.ledger.pending() {
            count += 1;
            if let Change::Open(uid) = &pending.change
                && let Some(log) = self.copy.ledger.table().log(*uid)
            {
                groups += pieces(&log.caller.groups);
            }
        }
        free.saturating_sub(groups + count / CHANGES_A_NODE)
    }

    /// Whether a session may get these leases now, or has to give others back first.
    pub fn may_have_leases(&self, config: &Config, id: SessionId, wants: &[Want]) -> bool {
        let reserve = u64::from(config.area.reserve_nodes);
        let new = wants.iter().filter(|want| want.mode == Mode::Write && !self.holds(id, **want)).count();
        let left = if new > 0 { self.nodes_for_notes(reserve) } else { u64::MAX };
        let few = FEW_LEASES.iter().rev().find(|(part, _)| left < reserve / part);
        let (Some((_, most)), Some(session)) = (few, self.sessions.get(&id)) else { return true };
        let noted =
            session.held.values().filter(|held| held.mode == Mode::Write && held.word != WORD_OWN_RANGE);
        noted.count() + new <= *most
    }

    /// Whether a session of a process with these groups may begin.
    pub fn may_begin(&self, config: &Config, groups: &[u32]) -> bool {
        let reserve = u64::from(config.area.reserve_nodes);
        self.nodes_for_notes(reserve) >= reserve / SESSIONS_PART + pieces(groups)
    }
}

/// Items, and so at most nodes, of the groups of a process.
fn pieces(groups: &[u32]) -> u64 {
    groups.len().div_ceil(LOG_GROUPS_PIECE) as u64
}
