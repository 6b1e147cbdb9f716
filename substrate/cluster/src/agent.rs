//! The member's side as a state machine: until when its membership is valid, and whether it may serve a subtree now.
//!
//! A heartbeat counts from the instant before it was sent, never from its answer: the manager, or any expeller, can
//! only see it later. The state of a member has three parts, and each of them may be late without harm: `valid_until`,
//! which only heartbeats of this life move; a view, which must not be older than this life; and, for a subtree whose
//! management it gave away, a view with a newer version than the one at which it did so.

use crate::change::{Done, Party};
use crate::rules::Rules;
use crate::view::{Path, View};
use format::{ChangeNumber, Epoch, NodeId};
use ipc::Time;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Limit of heartbeats without an answer; a further one forgets the oldest.
const SENT_MAX: usize = 8;

/// A heartbeat that has no answer yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// A life of this node in the cluster.
#[derive(Clone, Debug)]
struct Life {
    party: Party,
    /// The change that began it, or a later one; older views belong to another life.
    since: ChangeNumber,
    valid_until: Option<Time>,
    sent: BTreeMap<Ticket, Time>,
    last_sent: Option<Time>,
    /// The time of the first heartbeat since the last message from the manager.
    unheard_since: Option<Time>,
    /// Subtrees whose management it gave away, with their versions.
    given: BTreeMap<Path, ChangeNumber>,
}

/// The state of a node's own membership.
#[derive(Clone, Debug)]
pub struct Agent {
    node: NodeId,
    rules: Rules,
    life: Option<Life>,
    /// Its newest life so far: a late answer to an old join does not bring an old life back.
    newest: Epoch,
    view: Option<Arc<View>>,
    next_ticket: u64,
}

impl Agent {
    /// A node that is not a member.
    pub fn new(node: NodeId, rules: Rules) -> Self {
        Self { node, rules, life: None, newest: Epoch::new(0), view: None, next_ticket: 0 }
    }

    /// Notes the answer to a join. The node serves nothing before a heartbeat was answered and a view has arrived.
    /// Returns false, and changes nothing, for a late answer: if the node has this life, has had it, or has left it. It
    /// may have asked to leave that life, and this may take effect at any time.
    pub fn joined(&mut self, done: Done) -> bool {
        if done.epoch <= self.newest {
            return false;
        }
        self.newest = done.epoch;
        let party = Party { node: self.node, life: done.epoch };
        let (sent, given) = (BTreeMap::new(), BTreeMap::new());
        let (valid_until, last_sent, unheard_since) = (None, None, None);
        self.life =
            Some(Life { party, since: done.number, valid_until, sent, last_sent, unheard_since, given });
        true
    }

    /// Notes that the node has ended its membership, or knows that it has ended.
    pub fn leave(&mut self) {
        self.life = None;
    }

    /// Its current life.
    pub fn party(&self) -> Option<Party> {
        self.life.as_ref().map(|life| life.party)
    }

    /// The newest view that it has seen.
    pub fn view(&self) -> Option<&Arc<View>> {
        self.view.as_ref()
    }

    /// True if a heartbeat is useful now. If requests arrive at the manager and answers do not arrive here, heartbeats
    /// would keep a member forever that cannot serve. So after a lease without an answer the member is silent until it
    /// can be expelled, if another node can take over, and then tries again.
    pub fn wants_beat(&self, now: Time) -> bool {
        let Some(life) = &self.life else { return false };
        match (life.unheard_since, life.last_sent) {
            (Some(since), Some(last)) if now >= since.after(self.rules.lease()) => {
                now >= last.after(self.rules.expel_after()).after(self.rules.lease())
            }
            _ => true,
        }
    }

    /// The time of the next heartbeat, whether earlier ones were answered or not; `None` if it is due at once.
    pub fn next_beat(&self) -> Option<Time> {
        let last = self.life.as_ref().and_then(|life| life.last_sent);
        last.map(|last| last.after(self.rules.beat_every()))
    }

    /// Notes a message from the manager: its answers reach this node.
    pub fn heard(&mut self) {
        if let Some(life) = &mut self.life {
            life.unheard_since = None;
        }
    }

    /// Notes that a heartbeat is about to be sent; the caller has read `now` before. Returns its ticket.
    ///
    /// # Panics
    /// If the node is not a member.
    pub fn send_beat(&mut self, now: Time) -> (Ticket, Party) {
        let life = self.life.as_mut().expect("only a member sends heartbeats");
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        life.sent.insert(ticket, now);
        life.last_sent = Some(now);
        life.unheard_since.get_or_insert(now);
        if life.sent.len() > SENT_MAX {
            life.sent.pop_first();
        }
        (ticket, life.party)
    }

    /// Notes that the heartbeat was written. A second answer, or an answer to an earlier life, changes nothing.
    pub fn beaten(&mut self, ticket: Ticket) {
        self.heard();
        let Some(life) = &mut self.life else { return };
        let Some(sent) = life.sent.remove(&ticket) else { return };
        let until = sent.after(self.rules.valid_for());
        life.valid_until = life.valid_until.max(Some(until));
    }

    /// Notes that a heartbeat of this life was refused because the node is not a member. True if this was its current
    /// life, which has ended.
    pub fn not_member(&mut self, party: Party) -> bool {
        let ended = self.party() == Some(party);
        if ended {
            self.life = None;
        }
        ended
    }

    /// Takes a view. True if it is newer than the known one.
    pub fn see(&mut self, view: Arc<View>) -> bool {
        if self.view.as_ref().is_some_and(|known| known.number >= view.number) {
            return false;
        }
        if let Some(life) = &mut self.life
            && view.number >= life.since
        {
            life.given.retain(|path, version| !is_over(&view, path, *version));
            if !view.is_member(life.party) {
                self.life = None;
            }
        }
        self.view = Some(view);
        true
    }

    /// Notes that the node is about to send a change at this version of a subtree that gives its management away. From
    /// now on it does not serve the subtree, until a newer view shows that it is the lease manager again. A change at a
    /// version that is known to be over is refused, and gives nothing away; possibly no newer view would follow.
    pub fn give(&mut self, path: &Path, version: ChangeNumber) {
        if let Some(life) = &mut self.life {
            let known = self.view.as_ref().filter(|view| view.number >= life.since);
            if known.is_some_and(|view| is_over(view, path, version)) {
                return;
            }
            let given = life.given.entry(path.clone()).or_insert(version);
            *given = version.max(*given);
        }
    }

    /// The time until which its membership is valid. Checked before and after every piece of work: work that ends later
    /// is an error, never a success.
    pub fn valid_until(&self) -> Option<Time> {
        self.life.as_ref().and_then(|life| life.valid_until)
    }

    /// True if it is the lease manager of this subtree, and no other node can be now.
    pub fn may_serve(&self, now: Time, path: &Path) -> bool {
        let (Some(life), Some(view)) = (&self.life, &self.view) else { return false };
        let valid = life.valid_until.is_some_and(|until| now < until);
        let own = view.subtrees.get(path).is_some_and(|subtree| subtree.manager == Some(self.node));
        valid && own && view.number >= life.since && !life.given.contains_key(path)
    }

    /// Its subtrees whose management it gave away without knowing the outcome, with their versions. A request for
    /// itself makes the outcome known.
    pub fn undecided_roles(&self) -> Vec<(Path, ChangeNumber)> {
        let given = self.life.iter().flat_map(|life| &life.given);
        given.map(|(path, version)| (path.clone(), *version)).collect()
    }
}

/// True if a view shows that a subtree has no longer this version.
fn is_over(view: &View, path: &Path, version: ChangeNumber) -> bool {
    view.subtrees.get(path).is_none_or(|subtree| subtree.version > version)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{Address, Member, PoolCopy, Subtree};
    use std::time::Duration;

    const NODE: NodeId = NodeId::new(1);

    fn agent() -> Agent {
        let mut agent = Agent::new(NODE, Rules::new(Duration::from_secs(1), 0).unwrap());
        assert!(agent.joined(Done { number: ChangeNumber::new(3), epoch: Epoch::new(2) }));
        agent
    }

    #[test]
    fn a_heartbeat_counts_from_its_sending() {
        let mut agent = agent();
        let (first, _) = agent.send_beat(Time::from_ns(5));
        let (second, _) = agent.send_beat(Time::from_ns(9));
        assert_eq!(agent.valid_until(), None);
        agent.beaten(second);
        assert_eq!(agent.valid_until(), Some(Time::from_ns(1_000_000_009)));
        agent.beaten(first);
        agent.beaten(second);
        assert_eq!(agent.valid_until(), Some(Time::from_ns(1_000_000_009)));
    }

    #[test]
    fn a_member_without_answers_stops_its_heartbeats() {
        let mut agent = agent();
        let at = |ms: u64| Time::from_ns(ms * 1_000_000);
        for ms in [0, 300, 600, 900] {
            assert!(agent.wants_beat(at(ms)));
            agent.send_beat(at(ms));
        }
        assert!(!agent.wants_beat(at(1000)));
        assert!(!agent.wants_beat(at(1000 + 1000)), "its heartbeats would keep it a member");
        assert!(agent.wants_beat(at(900 + 2000)));
        agent.heard();
        assert!(agent.wants_beat(at(1000)));
    }

    /// A node gives its role away at the version that it knew, while a view with a newer version arrives.
    #[test]
    fn a_change_at_a_version_that_is_over_gives_nothing_away() {
        let number = ChangeNumber::new;
        let view = |agent: &Agent, version: ChangeNumber| {
            let mut view = View::new(1, agent.rules);
            (view.number, view.epoch) = (version, Epoch::new(2));
            let (pool, address) = (PoolCopy::default(), Address::default());
            let life = agent.newest;
            let member = Member { life, instance: 1, medium: 0, pool, refused: false, address };
            view.members.insert(NODE, member);
            let subtree = Subtree { version, chain: Vec::new(), copies_min: 1, manager: Some(NODE) };
            view.subtrees.insert(Path::root(), subtree);
            Arc::new(view)
        };
        for newer_comes_first in [false, true] {
            let mut agent = agent();
            let (ticket, _) = agent.send_beat(Time::from_ns(5));
            agent.beaten(ticket);
            let serves = |agent: &Agent| agent.may_serve(Time::from_ns(6), &Path::root());
            agent.see(view(&agent, number(4)));
            if newer_comes_first {
                agent.see(view(&agent, number(5)));
            }
            agent.give(&Path::root(), number(4));
            assert_eq!(serves(&agent), newer_comes_first);
            agent.see(view(&agent, number(5)));
            assert!(serves(&agent));
            agent.give(&Path::root(), number(5));
            assert!(!serves(&agent));
        }
    }

    #[test]
    fn an_answer_to_an_earlier_life_counts_for_nothing() {
        let mut agent = agent();
        let (ticket, party) = agent.send_beat(Time::from_ns(5));
        let next = Done { number: ChangeNumber::new(9), epoch: Epoch::new(4) };
        assert!(agent.joined(next));
        agent.beaten(ticket);
        assert_eq!(agent.valid_until(), None);
        assert!(!agent.not_member(party));
        assert!(agent.party().is_some());
        agent.leave();
        assert!(!agent.joined(next), "it asked to leave that life");
        assert_eq!(agent.party(), None);
    }
}
