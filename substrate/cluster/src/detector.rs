//! Detects silent members, by the clock of one expeller: of the manager, or of a member if the backend only stores the
//! view. Its state is not durable: an expeller that has just started has seen no heartbeat yet, and waits longer.

use crate::change::Party;
use crate::rules::Rules;
use format::{BeatVersion, NodeId};
use ipc::Time;
use std::collections::BTreeMap;

/// The last heartbeat that was seen of one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sighting {
    party: Party,
    beat: BeatVersion,
    first_seen: Time,
}

/// The state of one expeller.
#[derive(Clone, Debug, Default)]
pub struct Detector {
    seen: BTreeMap<NodeId, Sighting>,
}

impl Detector {
    /// Notes the current version of the member's heartbeat. The time at which a version was first seen stays.
    pub fn see(&mut self, now: Time, party: Party, beat: BeatVersion) {
        let known = self.seen.get(&party.node).is_some_and(|seen| (seen.party, seen.beat) == (party, beat));
        if !known {
            self.seen.insert(party.node, Sighting { party, beat, first_seen: now });
        }
    }

    /// Forgets all nodes that are not members any more.
    pub fn retain(&mut self, is_member: impl Fn(Party) -> bool) {
        self.seen.retain(|_, seen| is_member(seen.party));
    }

    /// True if the member has had this version for the time that the rules require.
    pub fn may_expel(&self, now: Time, rules: &Rules, party: Party, beat: BeatVersion) -> bool {
        let fits = |seen: &&Sighting| (seen.party, seen.beat) == (party, beat);
        self.seen
            .get(&party.node)
            .filter(fits)
            .is_some_and(|seen| seen.first_seen.after(rules.expel_after()) <= now)
    }

    /// The members that may be expelled now, each with the heartbeat that is the condition.
    pub fn silent(&self, now: Time, rules: &Rules) -> Vec<(Party, BeatVersion)> {
        let silent = self.seen.values().filter(|seen| seen.first_seen.after(rules.expel_after()) <= now);
        silent.map(|seen| (seen.party, seen.beat)).collect()
    }

    /// The time at which the next member may be expelled, if no heartbeat arrives until then.
    pub fn next(&self, rules: &Rules) -> Option<Time> {
        self.seen.values().map(|seen| seen.first_seen.after(rules.expel_after())).min()
    }
}
