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
    /// It lacks something, or its connection ended, and it has said nothing for so long.
    pub stalled: Option<Duration>,
    /// Bytes that were sent, and that it has not said to have.
    pub behind_bytes: u64,
    /// Bytes of logs that its tree took in since the daemon counts it.
    pub executed_bytes: u64,
}

/// How slow a copy may be. One that gets on in this time by as much as it lacked at the beginning is never too slow: else a busy
/// machine would give up its copies in turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LagBound {
    /// It may lack so many bytes for any time.
    pub bytes: u64,
    /// More than these only for so long.
    pub time: Duration,
}

/// Since when a copy lacks too much, and how it was then.
#[derive(Clone, Copy, Debug)]
struct Lag {
    since: Time,
    behind_bytes: u64,
    executed_bytes: u64,
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
    lag: Option<Lag>,
    /// It was too slow for too long: it counts no more, however it is when the view shows that, and is then tried anew.
    is_too_slow: bool,
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
    lag: LagBound,
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
    /// It kept programs waiting for too long, or was too slow.
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
        // One that gets the tree counts while the last part of it is sent, and that ends by itself. Programs wait for no other
        // attempt to reach a copy.
        let gets_tree = self.is_busy && !copy.is_connected && !copy.is_level;
        match (self.in_sync, self.is_open) {
            (true, _) if copy.is_stuck => PeerStep::SayLost,
            (false, true) if is_lost => PeerStep::AskAnew,
            (false, false) if is_lost && !gets_tree => PeerStep::Forget,
            _ if !copy.is_connected && adds => PeerStep::Add,
            (false, _) if copy.is_connected && copy.is_level && !self.is_busy => PeerStep::SaySync,
            _ => PeerStep::Nothing,
        }
    }
}

impl Peers {
    /// No other node is known yet. A copy may keep programs waiting for `patience`, and be as slow as `lag` says. The caller
    /// decides every `look`, if it gets its processor in time.
    pub fn new(patience: Duration, lag: LagBound, look: Duration) -> Self {
        Self { patience, lag, look, peers: BTreeMap::new() }
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
                let lacked = peer.lag.filter(|lag| now.since(lag.since) >= self.lag.time);
                peer.problem = Some(lacked.map_or_else(
                    || "it did not answer in time".to_owned(),
                    |lag| {
                        let (mib, seconds) = (lag.behind_bytes >> 20, self.lag.time.as_secs());
                        format!("it lacked {mib} MiB of logs and did not get on by as much in {seconds} s")
                    },
                ));
                (peer.next_try, peer.tried) = (Some(now.after(PAUSE_AFTER_STALL)), facts.life);
            }
            PeerStep::Forget => {
                // Its pool is replaced when it joins again.
                (peer.proposed, peer.refused) = (None, None);
                peer.next_try.get_or_insert(now.after(PAUSE));
            }
        }
        step
    }

    /// Whether a copy in sync was too slow for too long.
    fn lags(&self, peer: &mut Peer, now: Time, copy: &CopyFacts) -> bool {
        let begin = Lag { since: now, behind_bytes: copy.behind_bytes, executed_bytes: copy.executed_bytes };
        if !copy.connected || copy.behind_bytes <= self.lag.bytes {
            peer.lag = None;
            return false;
        }
        let lag = peer.lag.get_or_insert(begin);
        if now.since(lag.since) < self.lag.time {
            return false;
        }
        if copy.executed_bytes.saturating_sub(lag.executed_bytes) >= lag.behind_bytes {
            *lag = begin;
            return false;
        }
        true
    }

    fn see(&mut self, now: Time, node: NodeId, facts: &PeerFacts) -> PeerView {
        let mut peer = self.peers.remove(&node).unwrap_or_default();
        let copy = facts.copy.map(|copy| {
            let waited = copy.stalled;
            let goes_on = waited.is_some_and(|waited| waited > peer.waited);
            peer.waited_looks = if goes_on { peer.waited_looks.saturating_add(1) } else { 0 };
            peer.waited = waited.unwrap_or_default();
            // A node that gets too little of its processor to decide in time does not blame another one for it.
            let is_stuck = waited.is_some_and(|waited| waited > self.patience)
                && self.look.saturating_mul(peer.waited_looks).saturating_mul(LOOKS_PART) >= self.patience;
            // One that is brought up lacks as much as it lacks.
            peer.is_too_slow |= facts.in_sync && self.lags(&mut peer, now, &copy);
            let is_stuck = is_stuck || peer.is_too_slow;
            CopyView { is_connected: copy.connected, is_level: copy.level, is_stuck }
        });
        if copy.is_none() || !facts.in_sync {
            peer.lag = None;
        }
        peer.is_too_slow &= copy.is_some();
        let is_refused = facts.life.is_some() && peer.refused == facts.life;
        // A daemon that took the place of one that died is another one, whatever failed before.
        let is_new = facts.life.is_some() && peer.tried != facts.life;
        let is_time = is_new || peer.next_try.is_none_or(|next| now >= next);
        let seen = PeerView {
            is_member: facts.life.is_some(),
            in_sync: facts.in_sync,
            is_open: !facts.in_sync && peer.proposed.is_some_and(|proposed| facts.version <= proposed),
            copy,
            may_try: is_time && !is_refused,
            is_busy: peer.is_busy,
        };
        self.peers.insert(node, peer);
        seen
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
        let gets_tree =
            |copy: CopyView, seen: &PeerView| seen.is_busy && !copy.is_connected && !copy.is_level;
        for seen in stuck.filter(|seen| seen.copy.is_some_and(|copy| !gets_tree(copy, seen))) {
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

    const LAG: LagBound = LagBound { bytes: 1 << 20, time: Duration::from_secs(5) };

    fn facts(life: u32, copy: CopyFacts) -> PeerFacts {
        PeerFacts {
            life: Some(Epoch::new(life)),
            in_sync: true,
            version: ChangeNumber::new(1),
            copy: Some(copy),
        }
    }

    const WELL: CopyFacts =
        CopyFacts { connected: true, level: true, stalled: None, behind_bytes: 0, executed_bytes: 0 };

    #[test]
    fn a_copy_that_lacks_too_much_for_too_long_is_given_up_unless_it_gets_on_by_as_much() {
        let node = NodeId::new(2);
        let mib = |count: u64| count << 20;
        // Seconds, MiB that it lacks, and MiB that it has taken in.
        let run = |looks: &[(u64, u64, u64)], in_sync: bool| {
            let mut peers = Peers::new(Duration::from_millis(250), LAG, Duration::from_millis(10));
            let lost = looks.iter().position(|(seconds, behind, executed)| {
                let copy = CopyFacts { behind_bytes: mib(*behind), executed_bytes: mib(*executed), ..WELL };
                let now = Time::from_ns(0).after(Duration::from_secs(*seconds));
                let facts = PeerFacts { in_sync, ..facts(4, copy) };
                peers.step(now, node, &facts) == PeerStep::SayLost
            });
            (lost, peers.problem(node))
        };
        let slow = [(0, 0, 0), (1, 4, 0), (4, 5, 1), (6, 6, 3), (7, 6, 3)];
        let (lost, why) = run(&slow, true);
        assert_eq!(lost, Some(3), "it lacked 4 MiB, and took in 3 of them in 5 s");
        assert_eq!(why.as_deref(), Some("it lacked 4 MiB of logs and did not get on by as much in 5 s"));
        assert_eq!(run(&slow, false).0, None, "one that is brought up");
        assert_eq!(run(&[(1, 4, 0), (6, 6, 4), (10, 6, 4)], true).0, None, "it got on");
        assert_eq!(run(&[(1, 4, 0), (6, 6, 4), (11, 9, 9)], true).0, Some(2), "and then did not");
        assert_eq!(run(&[(1, 4, 0), (5, 1, 0), (6, 4, 0), (10, 4, 0)], true).0, None, "it had come near");
        assert_eq!(run(&[(1, 1, 0), (60, 1, 0)], true).0, None, "so much it may lack");
    }

    #[test]
    fn a_copy_that_was_too_slow_is_forgotten_and_tried_anew_after_a_pause() {
        let (node, start) = (NodeId::new(2), Time::from_ns(0));
        let after = |ms: u64| start.after(Duration::from_millis(ms));
        let mut peers = Peers::new(Duration::from_millis(250), LAG, Duration::from_millis(10));
        let slow = CopyFacts { behind_bytes: 2 << 20, ..WELL };
        assert_eq!(peers.step(after(0), node, &facts(4, slow)), PeerStep::Nothing);
        assert_eq!(peers.step(after(5000), node, &facts(4, slow)), PeerStep::SayLost);
        // The question was lost, and the copy has less to do meanwhile.
        assert_eq!(peers.step(after(5010), node, &facts(4, WELL)), PeerStep::SayLost);
        let out = PeerFacts { in_sync: false, ..facts(4, WELL) };
        assert_eq!(peers.step(after(5020), node, &out), PeerStep::Forget);
        let forgotten = PeerFacts { copy: None, ..out };
        assert_eq!(peers.step(after(5030), node, &forgotten), PeerStep::Nothing);
        assert_eq!(peers.step(after(5020).after(PAUSE_AFTER_STALL), node, &forgotten), PeerStep::Add);
        peers.added(after(8000), node, Ok(()));
        assert_eq!(peers.step(after(8000), node, &out), PeerStep::SaySync);
    }

    /// A daemon that dies again and again answers nothing, however often it is connected to.
    #[test]
    fn an_attempt_to_reach_a_copy_keeps_no_program_waiting() {
        let (node, start) = (NodeId::new(2), Time::from_ns(0));
        let after = |ms: u64| start.after(Duration::from_millis(ms));
        let mut peers = Peers::new(Duration::from_millis(250), LAG, Duration::from_millis(40));
        let waits = |ms: u64, connected: bool| {
            facts(4, CopyFacts { connected, stalled: Some(Duration::from_millis(ms)), ..WELL })
        };
        assert_eq!(peers.step(after(0), node, &waits(0, false)), PeerStep::Add);
        for ms in [40, 80, 120, 160, 200, 240] {
            let connected = ms % 80 == 0;
            assert_eq!(peers.step(after(ms), node, &waits(ms, connected)), PeerStep::Nothing);
        }
        assert_eq!(peers.step(after(280), node, &waits(280, false)), PeerStep::SayLost);
        let out = PeerFacts { in_sync: false, ..waits(290, false) };
        assert_eq!(peers.step(after(290), node, &out), PeerStep::Forget, "the attempt has not ended");
    }

    #[test]
    fn a_node_whose_daemon_was_replaced_is_tried_without_a_pause() {
        let (node, start) = (NodeId::new(2), Time::from_ns(0));
        let facts = |life: u32, connected: bool| facts(life, CopyFacts { connected, ..WELL });
        let mut peers = Peers::new(Duration::from_millis(250), LAG, Duration::from_millis(10));
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
