//! A cluster in a simulated world with one seed: every process has its own clock, which runs too fast or too slow;
//! processes pause and die, links are cut in one direction, messages are lost, late, or repeated. The rules are the
//! shipped ones: [`ManagerCore`], [`Agent`] and [`Detector`]; the world only transports their messages.
//!
//! After every event it counts the nodes that believe that they may serve each subtree.

use crate::parts::{Chance, Clock, Counts, DRIFT_PPM, Plant, drift};
use cluster::{
    Address, Agent, Answer, Change, Detector, Event, Expeller, ManagerCore, Party, Path, Placement, PoolCopy,
    PoolReport, Record, Refusal, Rules, Ticket, View,
};
use format::{BeatVersion, NodeId, PoolGeneration, PoolUid};
use ipc::Time;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

const MS: u64 = 1_000_000;
const LEASE_MS: u64 = 1000;
pub const NODES: u32 = 3;

#[derive(Clone, Debug)]
enum Request {
    Beat(Ticket, Party),
    Propose(Change),
    Look,
}

#[derive(Clone, Debug)]
enum Message {
    Request(Request),
    Beaten(Ticket),
    BeatRefused(Party, Refusal),
    /// With the generation of the pool in the request.
    Joined(cluster::Done, PoolGeneration),
    View(Arc<View>, BTreeMap<NodeId, BeatVersion>),
}

#[derive(Clone, Debug)]
enum What {
    /// To a node or, as 0, to the manager; only to the process that had this number when the message was sent.
    Deliver { to: usize, from: usize, process: u64, message: Message },
    /// A process does its regular work.
    Turn { who: usize, process: u64 },
    /// A fault happens.
    Mischief,
}

struct Node {
    agent: Agent,
    detector: Detector,
    clock: Clock,
    /// Number of the process; odd while none runs.
    process: u64,
    paused_until: u64,
    /// The last life in its pool.
    last_life: Option<Party>,
    /// The generation of its pool.
    generation: PoolGeneration,
    former: PoolGeneration,
    instance: u64,
}

/// The world.
pub struct World {
    chance: Chance,
    plant: Plant,
    expeller: Expeller,
    rules: Rules,
    now: u64,
    order: u64,
    queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
    pending: BTreeMap<usize, What>,
    nodes: Vec<Node>,
    core: Option<ManagerCore>,
    durable: (View, VecDeque<Record>),
    /// Earlier views, for a manager that loses its last changes.
    past: VecDeque<(View, VecDeque<Record>)>,
    manager_clock: Clock,
    manager_process: u64,
    manager_paused_until: u64,
    /// Cut links: from, to.
    cuts: BTreeMap<(usize, usize), u64>,
    healing: bool,
    paths: Vec<Path>,
    pub counts: Counts,
}

impl World {
    pub fn new(seed: u64, plant: Plant) -> Self {
        let mut chance = Chance(seed);
        let expeller = if seed.is_multiple_of(2) { Expeller::Core } else { Expeller::Member };
        let rules = Rules::new(Duration::from_millis(LEASE_MS), DRIFT_PPM).unwrap();
        let paths = [&b"/"[..], b"/mail"].into_iter().map(|path| Path::new(path).unwrap()).collect();
        let clock = |chance: &mut Chance| {
            let shown = chance.below(1 << 40);
            Clock { real: 0, shown, ppm: drift(chance, plant) }
        };
        let nodes = (0..NODES)
            .map(|index| Node {
                agent: Agent::new(NodeId::new(index + 1), rules),
                detector: Detector::default(),
                clock: clock(&mut chance),
                process: 0,
                paused_until: 0,
                last_life: None,
                generation: PoolGeneration::NONE,
                former: PoolGeneration::NONE,
                instance: 0,
            })
            .collect();
        let manager_clock = clock(&mut chance);
        let durable = (View::new(1, rules), VecDeque::new());
        let mut world = Self {
            chance,
            plant,
            expeller,
            rules,
            now: 0,
            order: 0,
            queue: BinaryHeap::new(),
            pending: BTreeMap::new(),
            nodes,
            core: None,
            past: VecDeque::from([durable.clone()]),
            durable,
            manager_clock,
            manager_process: 0,
            manager_paused_until: 0,
            cuts: BTreeMap::new(),
            healing: false,
            paths,
            counts: Counts::default(),
        };
        world.start_manager();
        for who in 0..=NODES as usize {
            world.at(MS, What::Turn { who, process: 0 });
        }
        world.at(20 * MS, What::Mischief);
        world
    }

    /// Runs `leases` leases with faults, then long enough to recover. The error is the violated property.
    pub fn run(mut self, leases: u64) -> Result<Counts, String> {
        let end = leases * LEASE_MS * MS;
        self.run_until(end)?;
        self.healing = true;
        self.cuts.clear();
        self.manager_paused_until = self.now;
        if self.core.is_none() {
            self.start_manager();
        }
        for who in 1..=self.nodes.len() {
            self.nodes[who - 1].paused_until = self.now;
            if self.nodes[who - 1].process % 2 == 1 {
                self.start_node(who);
            }
        }
        // The time of the last late message, then a whole expulsion and another one after it.
        self.run_until(end + 16 * LEASE_MS * MS)?;
        let core = self.core.as_ref().expect("it was started");
        for (path, subtree) in &core.view().subtrees {
            let serving = self.believers(path).len();
            if serving != 1 {
                return Err(format!("after healing {serving} nodes serve {path}: {subtree:?}"));
            }
        }
        Ok(self.counts)
    }

    fn run_until(&mut self, end: u64) -> Result<(), String> {
        while let Some(Reverse((time, _, id))) = self.queue.peek().copied()
            && time < end
        {
            self.queue.pop();
            let what = self.pending.remove(&id).expect("what is queued is kept");
            let before = self.now;
            self.now = time;
            if !self.believers(&self.paths[0]).is_empty() {
                self.counts.served_ms += (time - before) / MS;
            }
            self.happen(what);
            self.counts.events += 1;
            for path in &self.paths {
                let believers = self.believers(path);
                if believers.len() > 1 {
                    return Err(format!("at {} ms nodes {believers:?} all serve {path}", self.now / MS));
                }
            }
        }
        self.now = end;
        Ok(())
    }

    /// The nodes whose process, running or paused, believes that it may serve.
    fn believers(&self, path: &Path) -> Vec<usize> {
        let believes = |who: &usize| {
            let node = &self.nodes[who - 1];
            node.process.is_multiple_of(2) && node.agent.may_serve(node.clock.at(self.now), path)
        };
        (1..=self.nodes.len()).filter(believes).collect()
    }

    fn at(&mut self, after: u64, what: What) {
        self.order += 1;
        let id = self.order as usize;
        self.queue.push(Reverse((self.now + after, self.order, id)));
        self.pending.insert(id, what);
    }

    fn process_of(&self, who: usize) -> u64 {
        if who == 0 { self.manager_process } else { self.nodes[who - 1].process }
    }

    /// Sends a message through the network with its faults.
    fn send(&mut self, from: usize, to: usize, message: Message) {
        let cut = self.cuts.contains_key(&(from, to));
        // A cut link loses messages, or keeps them and delivers them later.
        if cut && self.chance.one_in(2) {
            return;
        }
        let quick = self.chance.below(4 * MS);
        let late = !self.healing && (cut || self.chance.one_in(40));
        let delay = if late { self.chance.below(4 * LEASE_MS * MS) } else { quick };
        self.counts.late += u64::from(late);
        let process = self.process_of(to);
        if !self.healing && self.chance.one_in(50) {
            let again = self.chance.below(3 * LEASE_MS * MS);
            // The manager accepts messages that were sent to its former process: clients connect again and repeat their
            // requests.
            self.at(again, What::Deliver { to, from, process, message: message.clone() });
        }
        self.at(delay, What::Deliver { to, from, process, message });
    }

    fn happen(&mut self, what: What) {
        let (who, process) = match &what {
            What::Deliver { to, process, .. } => (*to, *process),
            What::Turn { who, process } => (*who, *process),
            What::Mischief => return self.mischief(),
        };
        let paused_until =
            if who == 0 { self.manager_paused_until } else { self.nodes[who - 1].paused_until };
        let present = self.process_of(who);
        let requests_go_on = who == 0 && matches!(what, What::Deliver { .. });
        if process != present && !requests_go_on || (who == 0 && self.core.is_none()) {
            return;
        }
        if paused_until > self.now {
            return self.at(paused_until - self.now, what);
        }
        match what {
            What::Deliver { to: 0, from, message: Message::Request(request), .. } => {
                self.serve(from, request)
            }
            What::Deliver { to, message, .. } if to > 0 => self.receive(to, message),
            What::Deliver { .. } => unreachable!("the manager gets requests only"),
            What::Turn { who: 0, .. } => {
                let now = self.manager_clock.at(self.now);
                let core = self.core.as_mut().expect("it runs");
                let effects = core.step(now, Event::Tick { wall_ns: 0 });
                self.persist(&effects.records);
                let process = self.manager_process;
                let pause = 1 + self.chance.below(LEASE_MS / 10);
                self.at(pause * MS, What::Turn { who: 0, process });
            }
            What::Turn { who, process } => {
                self.turn(who);
                let pause = LEASE_MS / 8 + self.chance.below(LEASE_MS / 8);
                self.at(pause * MS, What::Turn { who, process });
            }
            What::Mischief => unreachable!("handled above"),
        }
    }

    /// Makes records durable, then sends the view to all nodes.
    fn persist(&mut self, records: &[Record]) {
        let expelled = |record: &&Record| matches!(record.change, Change::Expel { .. });
        self.counts.expulsions += records.iter().filter(expelled).count() as u64;
        if records.is_empty() {
            return;
        }
        let core = self.core.as_ref().expect("it runs");
        self.durable = (core.view().clone(), core.history().clone());
        self.past.push_back(self.durable.clone());
        if self.past.len() > 4 {
            self.past.pop_front();
        }
        let message = Message::View(Arc::new(core.view().clone()), core.beats().clone());
        for to in 1..=self.nodes.len() {
            self.send(0, to, message.clone());
        }
    }

    fn start_manager(&mut self) {
        let (view, history) = match self.plant {
            Plant::EpochNotDurable => self.past.front().expect("there is a past").clone(),
            _ => self.durable.clone(),
        };
        let mut now = self.manager_clock.at(self.now);
        if self.plant == Plant::RestartForgetsToWait {
            now = Time::from_ns(now.as_ns().saturating_sub(2 * LEASE_MS * MS));
        }
        let (core, record) = ManagerCore::start(view, history, self.expeller, now, 0);
        self.core = Some(core);
        self.persist(&[record]);
        let process = self.manager_process;
        self.at(MS, What::Turn { who: 0, process });
    }

    fn serve(&mut self, from: usize, request: Request) {
        let now = self.manager_clock.at(self.now);
        let core = self.core.as_mut().expect("it runs");
        match request {
            Request::Beat(ticket, party) => {
                let answer = match core.step(now, Event::Beat(party)).answer {
                    Answer::Beaten(_) => Message::Beaten(ticket),
                    Answer::Refused(refusal) => {
                        self.counts.refused_beats += 1;
                        Message::BeatRefused(party, refusal)
                    }
                    other => unreachable!("a heartbeat is answered by {other:?}"),
                };
                self.send(0, from, answer);
            }
            Request::Propose(mut change) => {
                if self.plant == Plant::ExpelWithoutVersion
                    && let Change::Expel { party, beat, .. } = &mut change
                    && let Some(present) = core.beats().get(&party.node)
                {
                    *beat = *present;
                }
                let joins = match &change {
                    Change::Join { pool, .. } => Some(pool.copy.generation),
                    _ => None,
                };
                let is_move = matches!(change, Change::SetManager { .. });
                let effects = core.step(now, Event::Propose { change, wall_ns: 0 });
                self.persist(&effects.records);
                if let Answer::Done(done) = effects.answer {
                    self.counts.moves += u64::from(is_move);
                    if let Some(generation) = joins {
                        self.send(0, from, Message::Joined(done, generation));
                    }
                }
            }
            Request::Look => {
                let (view, beats) = (Arc::new(core.view().clone()), core.beats().clone());
                self.send(0, from, Message::View(view, beats));
            }
        }
    }

    fn receive(&mut self, who: usize, message: Message) {
        let node = &mut self.nodes[who - 1];
        let now = node.clock.at(self.now);
        node.agent.heard();
        match message {
            Message::Beaten(ticket) if self.plant == Plant::BeatFromReply => {
                node.agent.beaten(ticket);
                if node.agent.party().is_some() {
                    let (ticket, _) = node.agent.send_beat(now);
                    node.agent.beaten(ticket);
                }
            }
            Message::Beaten(ticket) => node.agent.beaten(ticket),
            Message::BeatRefused(party, Refusal::NotMember) => {
                if node.agent.not_member(party) {
                    node.instance = 0;
                }
            }
            Message::BeatRefused(..) => {}
            Message::Joined(done, generation) => {
                // An answer to an older request is ignored.
                if generation == node.generation && node.agent.joined(done) {
                    node.former = std::mem::take(&mut node.generation);
                    node.instance = 0;
                    node.last_life = node.agent.party();
                }
            }
            Message::View(view, beats) => {
                for (id, member) in &view.members {
                    if let Some(beat) = beats.get(id) {
                        node.detector.see(now, Party { node: *id, life: member.life }, *beat);
                    }
                }
                node.agent.see(view);
            }
            Message::Request(_) => unreachable!("nodes get no requests"),
        }
    }

    /// The regular work of a node: it joins, sends heartbeats, reads views, and sometimes makes a change.
    fn turn(&mut self, who: usize) {
        let me = NodeId::new(who as u32);
        let now = self.nodes[who - 1].clock.at(self.now);
        self.send(who, 0, Message::Request(Request::Look));
        let Some(party) = self.nodes[who - 1].agent.party() else {
            let fresh = self.chance.bits() | 1;
            let node = &mut self.nodes[who - 1];
            if node.instance == 0 {
                node.instance = fresh;
            }
            if node.generation == PoolGeneration::NONE {
                node.generation = PoolGeneration::new(fresh);
            }
            let copy = PoolCopy { uid: PoolUid::new(who as u64), generation: node.generation };
            let former = node.former;
            let change = Change::Join {
                node: me,
                instance: node.instance,
                replaces: node.last_life.map(|party| party.life),
                medium: 1,
                pool: PoolReport { copy, former, ..PoolReport::default() },
                address: Address::default(),
            };
            return self.propose(who, change);
        };
        if self.nodes[who - 1].agent.wants_beat(now) {
            let (ticket, _) = self.nodes[who - 1].agent.send_beat(now);
            self.send(who, 0, Message::Request(Request::Beat(ticket, party)));
        }
        for (path, version) in self.nodes[who - 1].agent.undecided_roles() {
            self.propose(who, Change::SetManager { path, version, by: party, to: me });
        }
        let Some(view) = self.nodes[who - 1].agent.view().cloned() else { return };
        if self.expeller == Expeller::Member {
            for (silent, beat) in self.nodes[who - 1].detector.silent(now, &self.rules) {
                if silent.node != me && view.is_member(silent) {
                    self.propose(who, Change::Expel { party: silent, beat, epoch: view.epoch });
                }
            }
        }
        self.ask_for_changes(who, party, &view);
    }

    fn ask_for_changes(&mut self, who: usize, party: Party, view: &View) {
        let now = self.nodes[who - 1].clock.at(self.now);
        let other = NodeId::new(1 + (who as u32 + self.chance.below(2) as u32) % NODES);
        for path in self.paths.clone() {
            let Some(subtree) = view.subtrees.get(&path) else {
                let chain = (0..NODES)
                    .map(|n| Placement { node: NodeId::new((n + who as u32) % NODES + 1), hot: n < 2 });
                let (chain, version) = (chain.collect(), Default::default());
                let founder = Some(PoolUid::new(who as u64));
                self.propose(who, Change::SetSubtree { path, version, chain, copies_min: 1, founder });
                continue;
            };
            let version = subtree.version;
            if !self.nodes[who - 1].agent.may_serve(now, &path) {
                continue;
            }
            let joining = subtree
                .chain
                .iter()
                .find(|replica| !replica.in_sync && view.members.contains_key(&replica.node));
            match self.chance.below(12) {
                0..4 if joining.is_some() => {
                    let node = joining.expect("just seen").node;
                    self.propose(who, Change::SetSync { path, version, by: party, node, in_sync: true });
                }
                4 if !self.healing => {
                    self.give(who, &path, version);
                    self.propose(who, Change::SetManager { path, version, by: party, to: other });
                }
                5 if !self.healing => {
                    self.give(who, &path, version);
                    self.propose(
                        who,
                        Change::SetSync { path, version, by: party, node: party.node, in_sync: false },
                    );
                }
                6 if !self.healing => {
                    self.propose(
                        who,
                        Change::SetSync { path, version, by: party, node: other, in_sync: false },
                    );
                }
                _ => {}
            }
        }
        if !self.healing && self.chance.one_in(40) {
            let path = self.paths[0].clone();
            self.propose(who, Change::Complain { by: party, about: other, path, epoch: view.epoch });
        }
        if !self.healing && self.chance.one_in(60) {
            let node = &mut self.nodes[who - 1];
            node.agent.leave();
            self.propose(who, Change::Leave { party });
        }
    }

    fn give(&mut self, who: usize, path: &Path, version: format::ChangeNumber) {
        if self.plant != Plant::GiveWithoutStopping {
            self.nodes[who - 1].agent.give(path, version);
        }
    }

    fn propose(&mut self, who: usize, change: Change) {
        self.send(who, 0, Message::Request(Request::Propose(change)));
    }

    fn start_node(&mut self, who: usize) {
        let node = &mut self.nodes[who - 1];
        node.process += 1;
        assert_eq!(node.process % 2, 0);
        node.agent = Agent::new(NodeId::new(who as u32), self.rules);
        node.detector = Detector::default();
        node.instance = 0;
        let process = node.process;
        self.at(MS, What::Turn { who, process });
    }

    fn mischief(&mut self) {
        if self.healing {
            return;
        }
        let who = 1 + self.chance.below(u64::from(NODES)) as usize;
        let span = self.chance.below(3 * LEASE_MS) * MS;
        match self.chance.below(10) {
            0 | 1 => {
                let link = if self.chance.one_in(2) { (who, 0) } else { (0, who) };
                let cut = self.cuts.remove(&link).is_none() && self.cuts.len() < 4;
                if cut {
                    self.cuts.insert(link, self.now);
                }
            }
            2 => self.cuts.clear(),
            3 => self.nodes[who - 1].paused_until = self.now + span,
            4 => self.manager_paused_until = self.now + span / 2,
            5 | 6 => {
                // The manager's process ends; when the next one starts, it has only the durable state.
                self.manager_process += 1;
                self.counts.restarts += 1;
                self.core = None;
                self.start_manager();
            }
            7 if self.nodes[who - 1].process.is_multiple_of(2) => {
                self.nodes[who - 1].process += 1;
                self.nodes[who - 1].paused_until = 0;
            }
            7 => self.start_node(who),
            _ => {
                let ppm = drift(&mut self.chance, self.plant);
                let now = self.now;
                self.nodes[who - 1].clock.change(now, ppm);
                let ppm = drift(&mut self.chance, self.plant);
                self.manager_clock.change(now, ppm);
            }
        }
        let pause = 20 + self.chance.below(LEASE_MS / 2);
        self.at(pause * MS, What::Mischief);
    }
}
