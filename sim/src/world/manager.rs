//! The cluster manager of a world: the rules that ship ([`cluster::ManagerCore`]), on a clock of its own, reached over
//! links that are slow, cut, or lose an answer. Its decisions are durable before they are seen; it dies and starts
//! again from them.

use super::clock::NodeClock;
use super::{World, lock};
use crate::host::SimHost;
use cluster::{
    Answer, Change, Done, Error, Event, Expeller, Manager, ManagerCore, Party, Record, Rules, View,
};
use format::{BeatVersion, ChangeNumber, NodeId};
use ipc::sync::Ordering;
use ipc::{Host, Time, WAKE_ALL, Word};
use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How often it looks at its clock.
const TICK: Duration = Duration::from_millis(4);
/// Longest way of a request or an answer.
const WAY_NS: u64 = 300_000;

/// The running manager, and its durable state.
struct ManagerState {
    core: Option<ManagerCore>,
    durable: (View, VecDeque<Record>),
    /// Nodes that it does not hear, and nodes that do not hear it.
    deaf: BTreeSet<NodeId>,
    unheard: BTreeSet<NodeId>,
}

/// The manager's process.
pub struct SimManager {
    clock: NodeClock,
    host: Arc<SimHost>,
    state: Mutex<ManagerState>,
    /// Grows with every view.
    changed: Word,
}

impl SimManager {
    /// A manager without a cluster, which does not run yet.
    pub fn new(host: Arc<SimHost>, clock: NodeClock, rules: Rules) -> Self {
        let durable = (View::new(1, rules), VecDeque::new());
        let (deaf, unheard) = (BTreeSet::new(), BTreeSet::new());
        let state = Mutex::new(ManagerState { core: None, durable, deaf, unheard });
        Self { clock, host, state, changed: Word::new(0) }
    }

    /// Starts it on what is durable.
    pub fn start(&self) {
        let now = self.clock.now();
        {
            let mut state = lock(&self.state);
            let (view, history) = state.durable.clone();
            let (core, _) = ManagerCore::start(view, history, Expeller::Core, now, 0);
            state.durable = (core.view().clone(), core.history().clone());
            state.core = Some(core);
        }
        self.announce();
    }

    /// Nothing is left of it but what is durable.
    pub fn die(&self) {
        lock(&self.state).core = None;
        self.announce();
    }

    /// Requests of a node are lost from now on, or answers to it, or neither.
    pub fn cut(&self, node: NodeId, (requests, answers): (bool, bool)) {
        let mut state = lock(&self.state);
        let ManagerState { deaf, unheard, .. } = &mut *state;
        for (set, cut) in [(deaf, requests), (unheard, answers)] {
            if cut {
                set.insert(node);
            } else {
                set.remove(&node);
            }
        }
    }

    /// The newest view.
    pub fn view(&self) -> View {
        lock(&self.state).durable.0.clone()
    }

    /// Looks at the clock until the world is over.
    pub fn run(&self, world: &World) {
        while !world.is_over() {
            self.step(Event::Tick { wall_ns: 0 });
            world.pause(&self.host, TICK);
        }
    }

    fn announce(&self) {
        // Release: pairs with the Acquire of those who watch.
        self.changed.fetch_add(1, Ordering::Release);
        self.host.wake(&self.changed, WAKE_ALL);
    }

    fn step(&self, event: Event) -> Option<Answer> {
        let now = self.clock.now();
        let (answer, records) = {
            let mut state = lock(&self.state);
            let core = state.core.as_mut()?;
            let effects = core.step(now, event);
            let durable = (core.view().clone(), core.history().clone());
            state.durable = durable;
            (effects.answer, effects.records)
        };
        if !records.is_empty() {
            self.announce();
        }
        Some(answer)
    }

    fn is_reached_by(&self, node: NodeId) -> bool {
        let state = lock(&self.state);
        state.core.is_some() && !state.deaf.contains(&node)
    }

    fn reaches(&self, node: NodeId) -> bool {
        !lock(&self.state).unheard.contains(&node)
    }
}

/// The manager as one life of a node reaches it.
pub struct ManagerLink {
    pub world: Arc<World>,
    pub node: NodeId,
    /// The clock by which the node says how long it waits.
    pub host: Arc<dyn Host>,
}

impl ManagerLink {
    fn manager(&self) -> &SimManager {
        &self.world.manager
    }

    fn way(&self) {
        let way = Duration::from_nanos(self.host.random() % WAY_NS);
        let never = Word::new(0);
        let _ = self.host.wait(&never, 0, Some(self.host.now().after(way)));
    }

    /// A request and its answer.
    fn ask(&self, event: Event, until: Time) -> Result<Answer, Error> {
        self.way();
        if !self.manager().is_reached_by(self.node) {
            return self.hear_nothing(until, Error::Unreachable);
        }
        let answer = self.manager().step(event);
        self.way();
        match answer {
            None => self.hear_nothing(until, Error::Unreachable),
            Some(_) if !self.manager().reaches(self.node) => self.hear_nothing(until, Error::Unknown),
            Some(Answer::Refused(refusal)) => Err(Error::Refused(refusal)),
            Some(answer) => Ok(answer),
        }
    }

    fn hear_nothing<T>(&self, until: Time, error: Error) -> Result<T, Error> {
        let never = Word::new(0);
        while self.host.now() < until {
            let _ = self.host.wait(&never, 0, Some(until));
        }
        Err(error)
    }
}

impl Manager for ManagerLink {
    fn watch(&self, after: ChangeNumber, until: Time) -> Result<Arc<View>, Error> {
        loop {
            // Acquire: pairs with the Release of `announce`.
            let seen = self.manager().changed.load(Ordering::Acquire);
            if !self.manager().is_reached_by(self.node) || !self.manager().reaches(self.node) {
                return self.hear_nothing(until.min(self.host.now().after(TICK)), Error::Unreachable);
            }
            let view = self.manager().view();
            if view.number > after || self.host.now() >= until {
                self.way();
                return Ok(Arc::new(view));
            }
            let _ = self.host.wait(&self.manager().changed, seen, Some(until));
        }
    }

    fn propose(&self, change: &Change, until: Time) -> Result<Done, Error> {
        match self.ask(Event::Propose { change: change.clone(), wall_ns: 0 }, until)? {
            Answer::Done(done) => Ok(done),
            _ => Err(Error::Failed),
        }
    }

    fn beat(&self, party: Party, until: Time) -> Result<BeatVersion, Error> {
        match self.ask(Event::Beat(party), until)? {
            Answer::Beaten(beat) => Ok(beat),
            _ => Err(Error::Failed),
        }
    }

    fn beat_of(&self, _: Party, _: Time) -> Result<BeatVersion, Error> {
        Err(Error::Failed)
    }

    fn history(&self, _: ChangeNumber, _: u32, _: Time) -> Result<Vec<Record>, Error> {
        Ok(lock(&self.manager().state).durable.1.iter().cloned().collect())
    }
}
