//! The decisions of a node that leads a chain about the other nodes of that chain: to which one it connects, and which one
//! it calls in sync or gives up. No thread and no clock is used here: the caller reads the clock, the view and the state of
//! its copies, and executes each decision.
//!
//! Guarantees (`docs/replication.md`, C8): a node is called in sync only while the daemon counts it, so that every fsync
//! waits for it. It counts before the view is asked to say so, and until a view says that it is no copy any more; if the
//! answer to that question was lost it counts until a newer version of the chain shows how it ended.

use crate::view::Subtree;
use format::{ChangeNumber, Epoch, NodeId};
use ipc::Time;
use std::collections::BTreeMap;
use std::time::Duration;

/// Pause before a node that could not be made a copy is tried again.
const PAUSE: Duration = Duration::from_millis(200);
/// The same for a node that was a copy and did not keep up.
const PAUSE_AFTER_STALL: Duration = Duration::from_secs(2);
/// A caller that has its processor in time decides so many times less often than it could.
const LOOKS_PART: u32 = 2;

/// The part that the newest view gives a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The tree is not placed yet.
    Found,
    /// It is to lead, and does not yet.
    Begin,
    /// It leads, and goes on.
    Lead,
    /// It led, and another node leads or may lead: it ends at once.
    End,
    /// Another node leads, or none does.
    Follow,
}

impl Part {
    /// The part of a node in a view of the tree. `leads`: its daemon serves.
    pub fn of(subtree: Option<&Subtree>, own: NodeId, leads: bool) -> Self {
        let Some(subtree) = subtree else { return Self::Found };
        match (subtree.manager == Some(own), leads) {
            (true, true) => Self::Lead,
            (true, false) => Self::Begin,
            (false, true) => Self::End,
            (false, false) => Self::Follow,
        }
    }
}

/// How another node of the chain is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerFacts {
    /// Its life, if it is a member.
    pub life: Option<Epoch>,
    /// The view says so.
    pub in_sync: bool,
    /// The version of the chain in that view.
    pub version: ChangeNumber,
    /// How the daemon's copy there is; none if the daemon does not count it.
    pub copy: Option<CopyFacts>,
}

/// How a copy is that the daemon counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyFacts {
    /// There is a connection to it.
    pub connected: bool,
    /// It had everything when it was added.
    pub level: bool,
    /// It lacks something, and none of its positions has moved for so long.
    pub stalled: Option<Duration>,
}

/// A decision about another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerStep {
    /// Nothing.
    Nothing,
    /// Connect, count it, bring it up; then say how that went: [`Peers::added`].
    Add,
    /// Ask the view to call it in sync.
    SaySync,
    /// Ask the view to call it in sync no more.
    SayLost,
    /// Ask for a new version of the chain, which shows how an open question ended.
    AskAnew,
    /// It counts no more.
    Forget,
}

/// The state of another node beside the view and the daemon's copy.
#[derive(Clone, Debug, Default)]
struct Peer {
    /// A thread connects to it and brings it up.
    is_busy: bool,
    next_try: Option<Time>,
    /// The life in which it was tried last.
    tried: Option<Epoch>,
    /// Since when there is no connection to it.
    lost_at: Option<Time>,
    /// How long it had kept programs waiting at the last decision, and at how many decisions in a row it had not moved.
    waited: Duration,
    waited_looks: u32,
    /// The version at which the view was asked to call it in sync.
    proposed: Option<ChangeNumber>,
    /// The life in which its pool was found to be of no use.
    refused: Option<Epoch>,
    problem: Option<String>,
}

/// The other nodes, as the node that leads knows them.
#[derive(Clone, Debug)]
pub struct Peers {
    patience: Duration,
    /// How often the caller decides.
    look: Duration,
    peers: BTreeMap<NodeId, Peer>,
}

/// The input of a decision about another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PeerView {
    is_member: bool,
    /// The view says so.
    in_sync: bool,
    /// A question whether it is in sync may still be answered with yes.
    is_open: bool,
    /// It counts, and how it is.
    copy: Option<CopyView>,
    /// It may be tried to connect to it and bring it up.
    may_try: bool,
    is_busy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CopyView {
    is_connected: bool,
    is_level: bool,
    /// It kept programs waiting for too long.
    is_stuck: bool,
}

impl PeerView {
    fn step(&self) -> PeerStep {
        let adds = self.is_member && self.may_try && !self.is_busy;
        let Some(copy) = self.copy else {
            return match self.in_sync {
                // No fsync waits for it, so it must not be called in sync.
                true => PeerStep::SayLost,
                false if adds => PeerStep::Add,
                false => PeerStep::Nothing,
            };
        };
        let is_lost = copy.is_stuck || !self.is_member;
        match (self.in_sync, self.is_open) {
            (true, _) if copy.is_stuck => PeerStep::SayLost,
            (false, true) if is_lost => PeerStep::AskAnew,
            (false, false) if is_lost && !self.is_busy => PeerStep::Forget,
            _ if !copy.is_connected && adds => PeerStep::Add,
            (false, _) if copy.is_connected && copy.is_level && !self.is_busy => PeerStep::SaySync,
            _ => PeerStep::Nothing,
        }
    }
}

impl Peers {
    /// No other node is known yet. A copy may keep programs waiting for `patience`. The caller decides every `look`, if it gets
    /// its processor in time.
    pub fn new(patience: Duration, look: Duration) -> Self {
        Self { patience, look, peers: BTreeMap::new() }
    }

    /// Decides what is done about a node now, and takes it as begun.
    pub fn step(&mut self, now: Time, node: NodeId, facts: &PeerFacts) -> PeerStep {
        let step = self.see(now, node, facts).step();
        let peer = self.peers.entry(node).or_default();
        match step {
            PeerStep::Nothing | PeerStep::AskAnew => {}
            PeerStep::Add => (peer.is_busy, peer.tried) = (true, facts.life),
            PeerStep::SaySync => peer.proposed = Some(facts.version),
            PeerStep::SayLost => {
                peer.problem = Some("it did not answer in time".to_owned());
                peer.next_try = Some(now.after(PAUSE_AFTER_STALL));
            }
            PeerStep::Forget => {
                // Its pool is replaced when it joins again.
                (peer.proposed, peer.lost_at, peer.refused) = (None, None, None);
                peer.next_try.get_or_insert(now.after(PAUSE));
            }
        }
        step
    }

    fn see(&mut self, now: Time, node: NodeId, facts: &PeerFacts) -> PeerView {
        let peer = self.peers.entry(node).or_default();
        let copy = facts.copy.map(|copy| {
            let lost = (!copy.connected).then(|| now.since(*peer.lost_at.get_or_insert(now)));
            if copy.connected {
                peer.lost_at = None;
            }
            let waited = if copy.connected { copy.stalled } else { lost };
            let goes_on = waited.is_some_and(|waited| waited > peer.waited);
            peer.waited_looks = if goes_on { peer.waited_looks.saturating_add(1) } else { 0 };
            peer.waited = waited.unwrap_or_default();
            // A node that gets too little of its processor to decide in time does not blame another one for it.
            let is_stuck = waited.is_some_and(|waited| waited > self.patience)
                && self.look.saturating_mul(peer.waited_looks).saturating_mul(LOOKS_PART) >= self.patience;
            CopyView { is_connected: copy.connected, is_level: copy.level, is_stuck }
        });
        let is_refused = facts.life.is_some() && peer.refused == facts.life;
        // A daemon that took the place of one that died is another one: what failed before says nothing of it.
        let is_new = facts.life.is_some() && peer.tried != facts.life;
        let is_time = is_new || peer.next_try.is_none_or(|next| now >= next);
        PeerView {
            is_member: facts.life.is_some(),
            in_sync: facts.in_sync,
            is_open: !facts.in_sync && peer.proposed.is_some_and(|proposed| facts.version <= proposed),
            copy,
            may_try: is_time && !is_refused,
            is_busy: peer.is_busy,
        }
    }

    /// An attempt to add a node ended: why it failed, and, if its pool is of no use, the life in which that is so. True if
    /// the reason is a new one.
    pub fn added(&mut self, now: Time, node: NodeId, result: Result<(), (String, Option<Epoch>)>) -> bool {
        let peer = self.peers.entry(node).or_default();
        peer.is_busy = false;
        match result {
            Ok(()) => {
                (peer.problem, peer.refused, peer.next_try) = (None, None, None);
                false
            }
            Err((why, refused)) => {
                let is_new = peer.problem.as_ref() != Some(&why);
                (peer.problem, peer.refused) = (Some(why), refused);
                peer.next_try = Some(now.after(PAUSE));
                is_new
            }
        }
    }

    /// Why a node is no copy, or was none last.
    pub fn problem(&self, node: NodeId) -> Option<String> {
        self.peers.get(&node).and_then(|peer| peer.problem.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy() -> CopyView {
        CopyView { is_connected: true, is_level: true, is_stuck: false }
    }

    fn seen() -> PeerView {
        PeerView {
            is_member: true,
            in_sync: true,
            is_open: false,
            copy: Some(copy()),
            may_try: true,
            is_busy: false,
        }
    }

    /// Every state that there can be.
    fn all() -> impl Iterator<Item = PeerView> + Clone {
        (0..1 << 9).filter_map(|bits: u32| {
            let bit = |number: u32| bits >> number & 1 == 1;
            let copy = CopyView { is_connected: bit(0), is_level: bit(1), is_stuck: bit(2) };
            let seen = PeerView {
                copy: bit(3).then_some(copy),
                is_member: bit(4),
                in_sync: bit(5),
                is_open: bit(6),
                may_try: bit(7),
                is_busy: bit(8),
            };
            // A view that calls it in sync has answered.
            (!(seen.in_sync && seen.is_open)).then_some(seen)
        })
    }

    #[test]
    fn a_node_is_called_in_sync_only_while_it_counts_and_is_level() {
        let asked = all().filter(|seen| seen.step() == PeerStep::SaySync);
        let counts = |copy: CopyView| copy.is_connected && copy.is_level && !copy.is_stuck;
        assert!(asked.clone().count() > 0);
        assert!(asked.clone().all(|seen| seen.copy.is_some_and(counts) && seen.is_member && !seen.is_busy));
    }

    #[test]
    fn a_node_counts_until_a_view_shows_that_it_is_no_copy() {
        for seen in all().filter(|seen| seen.step() == PeerStep::Forget) {
            assert!(!seen.in_sync && !seen.is_open, "{seen:?}");
        }
    }

    #[test]
    fn nobody_waits_for_ever_for_a_node_that_is_lost() {
        let stuck = all().filter(|seen| seen.copy.is_some_and(|copy| copy.is_stuck));
        // An attempt to make it a copy ends by itself.
        for seen in stuck.filter(|seen| seen.in_sync || seen.is_open || !seen.is_busy) {
            assert!(
                matches!(seen.step(), PeerStep::SayLost | PeerStep::AskAnew | PeerStep::Forget),
                "{seen:?}"
            );
        }
    }

    #[test]
    fn a_connection_that_ended_is_made_again_and_a_copy_that_is_well_is_left_alone() {
        assert_eq!(seen().step(), PeerStep::Nothing);
        let lost = PeerView { copy: Some(CopyView { is_connected: false, ..copy() }), ..seen() };
        assert_eq!(lost.step(), PeerStep::Add);
        assert_eq!(PeerView { is_busy: true, ..lost }.step(), PeerStep::Nothing);
        assert_eq!(PeerView { copy: None, in_sync: false, ..seen() }.step(), PeerStep::Add);
        assert_eq!(PeerView { copy: None, ..seen() }.step(), PeerStep::SayLost);
    }

    #[test]
    fn a_node_whose_daemon_was_replaced_is_tried_without_a_pause() {
        let (node, start) = (NodeId::new(2), Time::from_ns(0));
        let facts = |life: u32, connected: bool| PeerFacts {
            life: Some(Epoch::new(life)),
            in_sync: true,
            version: ChangeNumber::new(1),
            copy: Some(CopyFacts { connected, level: true, stalled: None }),
        };
        let mut peers = Peers::new(Duration::from_millis(250), Duration::from_millis(10));
        assert_eq!(peers.step(start, node, &facts(4, true)), PeerStep::Nothing);
        // It died. The address that is known is that of the dead daemon.
        assert_eq!(peers.step(start, node, &facts(4, false)), PeerStep::Add);
        peers.added(start, node, Err(("refused".to_owned(), None)));
        assert_eq!(peers.step(start, node, &facts(4, false)), PeerStep::Nothing, "a pause");
        assert_eq!(peers.step(start, node, &facts(5, false)), PeerStep::Add, "another daemon is there");
        peers.added(start, node, Err(("it is busy".to_owned(), None)));
        assert_eq!(peers.step(start, node, &facts(5, false)), PeerStep::Nothing);
        assert_eq!(peers.step(start.after(PAUSE), node, &facts(5, false)), PeerStep::Add);
    }
}
