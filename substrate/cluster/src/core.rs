//! The manager as a state machine: `step(now, event)` returns effects, without a clock, IO or randomness. Every backend
//! with a process of its own runs this code. The driver makes records durable, in order, before it shows them or sends
//! the answer, and never shows a view that is not durable.
//!
//! Heartbeats are not durable. Their versions begin with the number of the manager's start, which is a durable change,
//! so that a version never repeats. A manager that has just started has seen no heartbeat yet, so it expels no member
//! before a whole lease has passed.

use crate::change::{Change, Done, Party, Record, Refusal};
use crate::detector::Detector;
use crate::view::View;
use format::{BeatVersion, NodeId};
use ipc::Time;
use std::collections::{BTreeMap, VecDeque};

/// Limit of records in the audit trail.
pub const HISTORY_MAX: usize = 1024;

/// The process that measures the time for which a heartbeat was not renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expeller {
    /// This core, by the time of its steps; it expels by itself.
    Core,
    /// The member that asks for the expulsion, with a [`Detector`] of its own; the core only compares versions.
    Member,
}

/// An event for the manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A member writes its heartbeat.
    Beat(Party),
    /// A request for a change. `wall_ns` is the manager's wall clock.
    Propose {
        /// The change.
        change: Change,
        /// For the record.
        wall_ns: i64,
    },
    /// Time has passed.
    Tick {
        /// For the records.
        wall_ns: i64,
    },
}

/// The answer of a step to the sender of its event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A tick has no answer.
    Nothing,
    /// The heartbeat is written, as this version.
    Beaten(BeatVersion),
    /// The change is made.
    Done(Done),
    /// Nothing was changed.
    Refused(Refusal),
}

/// The effects of a step, which the driver executes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effects {
    /// Records to be made durable, in this order, before anything of them is shown.
    pub records: Vec<Record>,
    /// The answer, which is sent after that.
    pub answer: Answer,
}

/// The manager.
#[derive(Clone, Debug)]
pub struct ManagerCore {
    view: View,
    history: VecDeque<Record>,
    expeller: Expeller,
    /// The number of the change by which this run of the manager started.
    run: u32,
    beats: BTreeMap<NodeId, BeatVersion>,
    detector: Detector,
}

impl ManagerCore {
    /// Starts a manager on the durable state; the record of the start is the first one to be made durable.
    pub fn start(
        view: View,
        history: VecDeque<Record>,
        expeller: Expeller,
        now: Time,
        wall_ns: i64,
    ) -> (Self, Record) {
        let run = u32::try_from(view.number.next().get()).expect("a cluster has fewer than 2^32 changes");
        let (beats, detector) = (BTreeMap::new(), Detector::default());
        let mut core = Self { view, history, expeller, run, beats, detector };
        let record = core.change(now, Change::Start, wall_ns).map(|(record, _)| record);
        let record = record.ok().flatten().expect("a start is conditional on nothing");
        (core, record)
    }

    /// The view with everything that was decided, durable or not.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// The last records, oldest first.
    pub fn history(&self) -> &VecDeque<Record> {
        &self.history
    }

    /// The heartbeats of the members.
    pub fn beats(&self) -> &BTreeMap<NodeId, BeatVersion> {
        &self.beats
    }

    /// The latest time for the next tick.
    pub fn next_tick(&self) -> Option<Time> {
        match self.expeller {
            Expeller::Core => self.detector.next(&self.view.rules),
            Expeller::Member => None,
        }
    }

    /// Executes one event.
    pub fn step(&mut self, now: Time, event: Event) -> Effects {
        match event {
            Event::Beat(party) => Effects { records: Vec::new(), answer: self.beat(now, party) },
            Event::Propose { change: Change::Start, .. } => {
                Effects { records: Vec::new(), answer: Answer::Refused(Refusal::Internal) }
            }
            Event::Propose { change, wall_ns } => match self.change(now, change, wall_ns) {
                Ok((record, done)) => {
                    Effects { records: record.into_iter().collect(), answer: Answer::Done(done) }
                }
                Err(refusal) => Effects { records: Vec::new(), answer: Answer::Refused(refusal) },
            },
            Event::Tick { wall_ns } => Effects { records: self.tick(now, wall_ns), answer: Answer::Nothing },
        }
    }

    fn beat(&mut self, now: Time, party: Party) -> Answer {
        if !self.view.is_member(party) {
            return Answer::Refused(Refusal::NotMember);
        }
        if self.view.members[&party.node].refused {
            return Answer::Refused(Refusal::HeartbeatRefused);
        }
        let beat = self.beats.get_mut(&party.node).expect("every member has a heartbeat");
        *beat = beat.next();
        self.detector.see(now, party, *beat);
        Answer::Beaten(*beat)
    }

    fn tick(&mut self, now: Time, wall_ns: i64) -> Vec<Record> {
        if self.expeller == Expeller::Member {
            return Vec::new();
        }
        let silent = self.detector.silent(now, &self.view.rules);
        let expel = |(party, beat)| {
            let change = Change::Expel { party, beat, epoch: self.view.epoch };
            let (record, _) =
                self.change(now, change, wall_ns).expect("who is silent by our own count is expelled");
            record
        };
        silent.into_iter().filter_map(expel).collect()
    }

    /// Makes a change if its conditions hold; returns no record if it was made before.
    fn change(&mut self, now: Time, change: Change, wall_ns: i64) -> Result<(Option<Record>, Done), Refusal> {
        if let Change::Expel { party, beat, .. } = &change {
            self.check_silence(now, *party, *beat)?;
        }
        let (before, epoch) = (self.view.number, self.view.epoch);
        let refused = self.view.refused_by(&change);
        let done = self.view.apply(&change)?;
        assert!(self.view.epoch >= epoch, "an epoch never goes back");
        if self.view.number == before {
            return Ok((None, done));
        }
        self.follow_members(now);
        let record = Record { number: self.view.number, wall_ns, epoch: self.view.epoch, change, refused };
        self.history.push_back(record.clone());
        if self.history.len() > HISTORY_MAX {
            self.history.pop_front();
        }
        Ok((Some(record), done))
    }

    /// Checks the condition of an expulsion on the heartbeat.
    fn check_silence(&self, now: Time, party: Party, beat: BeatVersion) -> Result<(), Refusal> {
        if !self.view.is_member(party) {
            return Err(Refusal::NotMember);
        }
        let present = self.beats[&party.node];
        if present != beat {
            return Err(Refusal::StaleBeat(present));
        }
        let silent = match self.expeller {
            Expeller::Core => self.detector.may_expel(now, &self.view.rules, party, beat),
            Expeller::Member => true,
        };
        if silent { Ok(()) } else { Err(Refusal::TooEarly) }
    }

    /// After a change: keeps a heartbeat for each member. A life that replaces another one continues its version.
    fn follow_members(&mut self, now: Time) {
        let Self { view, beats, detector, .. } = self;
        beats.retain(|node, _| view.members.contains_key(node));
        detector.retain(|party| view.is_member(party));
        let first = BeatVersion::new(u64::from(self.run) << 32);
        for (node, member) in &view.members {
            let beat = *beats.entry(*node).or_insert(first);
            detector.see(now, Party { node: *node, life: member.life }, beat);
        }
    }
}
