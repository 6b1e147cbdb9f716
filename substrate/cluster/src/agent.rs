//! The member's side as a state machine: until when its membership holds, and whether it may serve a subtree now.
//!
//! A heartbeat counts from the instant before it was sent, never from its answer: the manager, or any expeller, can
//! only see it later. What the member believes rests on three things, each of which can come late without harm:
//! `valid until` (only heartbeats of this life move it), a view no older than this life, and, for a subtree whose
//! management it gave away or may have, a version newer than the one it gave away.

use crate::change::{Done, Party};
use crate::rules::Rules;
use crate::view::{Path, View};
use format::{ChangeNumber, Epoch, NodeId};
use ipc::Time;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Heartbeats on their way at once; one more forgets the oldest.
const SENT_MAX: usize = 8;

/// A heartbeat on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// A life of this node in the cluster.
#[derive(Clone, Debug)]
struct Life {
    party: Party,
    /// The change that began it, or a later one: views before it are of another life.
    since: ChangeNumber,
    valid_until: Option<Time>,
    sent: BTreeMap<Ticket, Time>,
    last_sent: Option<Time>,
    /// The first heartbeat since the manager was last heard.
    unheard_since: Option<Time>,
    /// Subtrees given away at these versions.
    given: BTreeMap<Path, ChangeNumber>,
}

/// What a node knows of its own membership.
#[derive(Clone, Debug)]
pub struct Agent {
    node: NodeId,
    rules: Rules,
    life: Option<Life>,
    /// The newest life it ever had: the answer to an old join, come late, brings none back.
    newest: Epoch,
    view: Option<Arc<View>>,
    next_ticket: u64,
}

impl Agent {
    /// A node that is no member.
    pub fn new(node: NodeId, rules: Rules) -> Self {
        Self { node, rules, life: None, newest: Epoch::new(0), view: None, next_ticket: 0 }
    }

    /// It joined; the answer to its join. It serves nothing before a heartbeat was answered and a view has come.
    /// False, and nothing is changed, if that is a life that it has, had, or left: a late answer. It may have asked to
    /// leave that life, and be taken at its word at any time.
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

    /// It ended its membership, or learned that it has ended.
    pub fn leave(&mut self) {
        self.life = None;
    }

    /// Its present life.
    pub fn party(&self) -> Option<Party> {
        self.life.as_ref().map(|life| life.party)
    }

    /// The newest view that it has seen.
    pub fn view(&self) -> Option<&Arc<View>> {
        self.view.as_ref()
    }

    /// True if a heartbeat is of use now. Where requests arrive and answers do not, a member would be kept for ever by
    /// heartbeats that never let it serve: after a lease without an answer it is silent for long enough to be expelled,
    /// if anybody can take over, and then tries again.
    pub fn wants_beat(&self, now: Time) -> bool {
        let Some(life) = &self.life else { return false };
        match (life.unheard_since, life.last_sent) {
            (Some(since), Some(last)) if now >= since.after(self.rules.lease()) => {
                now >= last.after(self.rules.expel_after()).after(self.rules.lease())
            }
            _ => true,
        }
    }

    /// When the next heartbeat is to go out, whether or not those before it were answered; at once if none was sent.
    pub fn next_beat(&self) -> Option<Time> {
        let last = self.life.as_ref().and_then(|life| life.last_sent);
        last.map(|last| last.after(self.rules.beat_every()))
    }

    /// Something came from the manager: answers reach this node.
    pub fn heard(&mut self) {
        if let Some(life) = &mut self.life {
            life.unheard_since = None;
        }
    }

    /// A heartbeat goes out after this, and `now` was read before: gives what names it.
    ///
    /// # Panics
    /// If it is no member.
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

    /// The heartbeat was written. An answer that comes twice, or to an earlier life, changes nothing.
    pub fn beaten(&mut self, ticket: Ticket) {
        self.heard();
        let Some(life) = &mut self.life else { return };
        let Some(sent) = life.sent.remove(&ticket) else { return };
        let until = sent.after(self.rules.valid_for());
        life.valid_until = life.valid_until.max(Some(until));
    }

    /// The heartbeat of this party was refused because it is no member: true if that was its present life, which has
    /// ended then.
    pub fn not_member(&mut self, party: Party) -> bool {
        let ended = self.party() == Some(party);
        if ended {
            self.life = None;
        }
        ended
    }

    /// A view has come. True if it is newer than what was known.
    pub fn see(&mut self, view: Arc<View>) -> bool {
        if self.view.as_ref().is_some_and(|known| known.number >= view.number) {
            return false;
        }
        if let Some(life) = &mut self.life
            && view.number >= life.since
        {
            life.given.retain(|path, version| {
                view.subtrees.get(path).is_some_and(|subtree| subtree.version <= *version)
            });
            if !view.is_member(life.party) {
                self.life = None;
            }
        }
        self.view = Some(view);
        true
    }

    /// It is about to send a change of this version of a subtree that gives its management away: from now on it does
    /// not serve it, until a view shows that the subtree went another way.
    pub fn give(&mut self, path: &Path, version: ChangeNumber) {
        if let Some(life) = &mut self.life {
            let given = life.given.entry(path.clone()).or_insert(version);
            *given = version.max(*given);
        }
    }

    /// Until when its membership holds, if it does. Checked before and after every piece of work: what ends later is
    /// an error, never a success.
    pub fn valid_until(&self) -> Option<Time> {
        self.life.as_ref().and_then(|life| life.valid_until)
    }

    /// True if it is this subtree's lease manager, and nobody else can be now.
    pub fn may_serve(&self, now: Time, path: &Path) -> bool {
        let (Some(life), Some(view)) = (&self.life, &self.view) else { return false };
        let valid = life.valid_until.is_some_and(|until| now < until);
        let own = view.subtrees.get(path).is_some_and(|subtree| subtree.manager == Some(self.node));
        valid && own && view.number >= life.since && !life.given.contains_key(path)
    }

    /// Its subtrees whose management it gave away without hearing how that ended, with their versions: asking for
    /// itself once more settles it.
    pub fn unsettled(&self) -> Vec<(Path, ChangeNumber)> {
        let given = self.life.iter().flat_map(|life| &life.given);
        given.map(|(path, version)| (path.clone(), *version)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
    fn who_hears_nothing_falls_silent() {
        let mut agent = agent();
        let at = |ms: u64| Time::from_ns(ms * 1_000_000);
        for ms in [0, 300, 600, 900] {
            assert!(agent.wants_beat(at(ms)));
            agent.send_beat(at(ms));
        }
        assert!(!agent.wants_beat(at(1000)));
        assert!(!agent.wants_beat(at(1000 + 1000)), "it would be kept by what arrives");
        assert!(agent.wants_beat(at(900 + 2000)));
        agent.heard();
        assert!(agent.wants_beat(at(1000)));
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
