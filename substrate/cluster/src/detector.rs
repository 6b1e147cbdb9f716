//! Who has not been heard for how long, by the clock of one expeller: the manager, or with a store that only keeps, a
//! member. Nothing of it is durable: an expeller that starts anew has seen nothing yet, and waits longer.

use crate::change::Party;
use crate::rules::Rules;
use format::{BeatVersion, NodeId};
use ipc::Time;
use std::collections::BTreeMap;

/// What was last seen of one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sighting {
    party: Party,
    beat: BeatVersion,
    first_seen: Time,
}

/// The sightings of one expeller.
#[derive(Clone, Debug, Default)]
pub struct Detector {
    seen: BTreeMap<NodeId, Sighting>,
}

impl Detector {
    /// The member's heartbeat is at this version now. The time of the first sight of a version stands.
    pub fn see(&mut self, now: Time, party: Party, beat: BeatVersion) {
        let known = self.seen.get(&party.node).is_some_and(|seen| (seen.party, seen.beat) == (party, beat));
        if !known {
            self.seen.insert(party.node, Sighting { party, beat, first_seen: now });
        }
    }

    /// Forgets everybody who is not a member any more.
    pub fn retain(&mut self, is_member: impl Fn(Party) -> bool) {
        self.seen.retain(|_, seen| is_member(seen.party));
    }

    /// True if this member has been at this version for as long as the rules ask.
    pub fn may_expel(&self, now: Time, rules: &Rules, party: Party, beat: BeatVersion) -> bool {
        let fits = |seen: &&Sighting| (seen.party, seen.beat) == (party, beat);
        self.seen
            .get(&party.node)
            .filter(fits)
            .is_some_and(|seen| seen.first_seen.after(rules.expel_after()) <= now)
    }

    /// The members that may be expelled now, each with the heartbeat that it is conditional on.
    pub fn silent(&self, now: Time, rules: &Rules) -> Vec<(Party, BeatVersion)> {
        let silent = self.seen.values().filter(|seen| seen.first_seen.after(rules.expel_after()) <= now);
        silent.map(|seen| (seen.party, seen.beat)).collect()
    }

    /// When the next one may be expelled, if nobody is heard until then.
    pub fn next(&self, rules: &Rules) -> Option<Time> {
        self.seen.values().map(|seen| seen.first_seen.after(rules.expel_after())).min()
    }
}
