//! One world of several nodes under one seed: real LibFS, SharedFS, replay and mirrors on recorded media, the in-process
//! transport, the rules of the cluster manager, and clocks of which each runs as it likes within the bound. Nodes die with or
//! without their power, links are cut, slow or broken, the manager goes and comes; programs go on at whichever node leads.
//!
//! The invariants of a world are in [`invariants`], one file each. A seed is a schedule: the same seed gives the same
//! trace.
//!
//! The world's own thread is the keeper of all nodes, and does the faults. Its locks are the standard library's and are never
//! held where another thread may get the turn.

mod clock;
mod faults;
pub mod invariants;
mod manager;
mod node;
mod program;

use self::clock::NodeClock;
use self::invariants::Invariants;
use self::manager::SimManager;
use self::node::Life;
use crate::host::{SimHost, Simulation};
use crate::random::Random;
use crate::step::{Ended, Limits};
use cluster::{LagBound, Rules};
use format::{NodeId, PoolUid};
use ipc::sync::Ordering;
use ipc::{Host, Time, Word};
use pmem::crash::Model;
use pmem::{Image, Recorder};
use sharedfs::{Config, Daemon, Format, format_pool};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use transport::{ClusterKey, Identity, Network};

/// For how long a heartbeat counts.
pub(crate) const LEASE: Duration = Duration::from_millis(60);
/// How long a copy may keep programs waiting.
pub(crate) const PATIENCE: Duration = Duration::from_millis(20);
/// How slow a copy may be.
pub(crate) const LAG: LagBound = LagBound { bytes: 64 << 10, time: Duration::from_millis(100) };
/// The bound on how wrong a clock runs.
const DRIFT_PPM: u32 = 20_000;
/// How long the nodes may take to be level when nothing goes wrong any more.
const HEALING: Duration = Duration::from_secs(10);
/// How often the keeper looks.
const LOOK: Duration = Duration::from_millis(2);
/// Nodes of a pool's tree.
const TREE_NODES: u32 = 1024;

/// Parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Nodes of the chain.
    pub nodes: u32,
    /// Things that go wrong.
    pub faults: u32,
}

/// How a run went in which nothing was violated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// With the trace of the run.
    pub ended: Ended,
    /// The counts of events.
    pub counts: Counts,
}

/// Counts of events, so that a run in which none happened is noticed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Lives of the chain that served.
    pub served: u64,
    /// Operations of programs.
    pub operations: u64,
    /// Their fsyncs.
    pub syncs: u64,
    /// Processes that died.
    pub deaths: u64,
    /// Of these with their machine's power.
    pub power_cuts: u64,
    /// Members that were made copies.
    pub added: u64,
    /// Attempts that failed.
    pub not_added: u64,
    /// Nodes that were to lead and had less than a copy.
    pub ahead: u64,
    /// Other faults.
    pub others: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        self.served += more.served;
        self.operations += more.operations;
        self.syncs += more.syncs;
        self.deaths += more.deaths;
        self.power_cuts += more.power_cuts;
        self.added += more.added;
        self.not_added += more.not_added;
        self.ahead += more.ahead;
        self.others += more.others;
    }
}

/// A node, whether or not it runs.
struct Node {
    id: NodeId,
    clock: (u64, i64),
    recorder: Recorder,
    life: Option<Arc<Life>>,
    /// When its keeper starts it, if it does not run.
    start_at: Option<Time>,
    /// Its pool survived a power cut, and it has not led since: of what was not synced any part may be left.
    is_torn: bool,
}

/// See the module.
pub struct World {
    pub(crate) host: Arc<SimHost>,
    pub(crate) network: Network,
    pub(crate) manager: SimManager,
    plan: Plan,
    seed: u64,
    model: Model,
    nodes: Mutex<Vec<Node>>,
    pub(crate) invariants: Invariants,
    pub(crate) counts: Mutex<Counts>,
    violation: Mutex<Option<String>>,
    /// Why the last attempt to make a node a copy failed.
    problem: Mutex<String>,
    /// 1 when programs end; 2 when everything does.
    over: Word,
}

/// Locks; a thread that was killed left nothing half-made.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Settings of a node's daemon, small enough that logs and ledger go round.
pub(crate) fn config(node: NodeId) -> Config {
    Config {
        node,
        grace: Duration::from_secs(3600),
        grace_starved: Duration::from_secs(3600),
        log_bytes: 16 << 10,
        log_bytes_max: 64 << 10,
        ledger_bytes: 32 << 10,
        own_range: 1 << 12,
        room_blocks: 64,
        room_reserve: 64,
        lease_words: 64,
        ready_logs: 1,
        // An entry of one node takes several batches at another one, or one.
        batch_records: match node.get() % 3 {
            0 => 16,
            1 => Config::default().batch_records,
            _ => 2,
        },
        hold_min: Duration::from_micros(50),
        idle_digest: Duration::from_millis(20),
        lock_patience: Duration::ZERO,
        spin_ns: 0,
        area: area::Limits {
            capacity_blocks: 1 << 11,
            segment_blocks: 1 << 9,
            step_blocks: 64,
            reserve_blocks: 64,
            reserve_nodes: 64,
            cached_nodes: 512,
            ..area::Limits::default()
        },
        ..Config::default()
    }
}

/// A new pool; made once for each node.
fn new_pool(node: NodeId) -> Image {
    static POOLS: OnceLock<Mutex<Vec<(NodeId, Image)>>> = OnceLock::new();
    let mut pools = lock(POOLS.get_or_init(Mutex::default));
    if let Some((_, image)) = pools.iter().find(|(other, _)| *other == node) {
        return image.clone();
    }
    let recorder = Recorder::new();
    let new = Format {
        pool: PoolUid::new(70 + u64::from(node.get())),
        tree_nodes_max: TREE_NODES,
        root_mode: 0o755,
        root_uid: 0,
        root_gid: 0,
        time_ns: 1,
        ledger_bytes: config(node).ledger_bytes,
    };
    format_pool(&recorder.medium(), &new).expect("an empty medium takes a pool");
    pools.push((node, recorder.image()));
    recorder.image()
}

/// Runs one seed.
///
/// # Errors
/// The violation, or why the run never ended.
pub fn run(seed: u64, plan: Plan) -> Result<Outcome, String> {
    let limits = Limits { steps_max: 100_000_000, ..Limits::default() };
    let simulation = Arc::new(Simulation::new(seed, limits));
    let mut random = Random::new(!seed);
    let host = simulation.process("world");
    let drift = |random: &mut Random| {
        let bound = i64::from(DRIFT_PPM);
        [bound, -bound, 0, random.below(2 * DRIFT_PPM as u64) as i64 - bound][random.below(4) as usize]
    };
    let mut clock = || (random.below(1 << 40), drift(&mut random));
    let managers = simulation.process("manager");
    let rules = Rules::new(LEASE, DRIFT_PPM).expect("rules that there can be");
    let manager = SimManager::new(managers.clone(), NodeClock::new(managers.clone(), clock()), rules);
    let nodes = (1..=plan.nodes).map(NodeId::new).map(|id| Node {
        id,
        clock: clock(),
        recorder: Recorder::of_image(new_pool(id)),
        life: None,
        start_at: Some(Time::from_ns(0)),
        is_torn: false,
    });
    let nodes = Mutex::new(nodes.collect());
    let world = Arc::new(World {
        network: Network::new(host.clone()),
        manager,
        plan,
        seed,
        model: if seed.is_multiple_of(2) { Model::Lines } else { Model::Pages },
        nodes,
        invariants: Invariants::new(),
        counts: Mutex::default(),
        violation: Mutex::default(),
        problem: Mutex::default(),
        over: Word::new(0),
        host: host.clone(),
    });
    let body = {
        let (world, machines) = (world.clone(), simulation.clone());
        move || world.keep(&machines, random, &managers)
    };
    drop(host.spawn("keeper", Box::new(body)).expect("a simulated thread"));
    let ended = simulation.run().map_err(|stuck| stuck.to_string());
    world.invariants.one_head.clear();
    if let Some(violation) = lock(&world.violation).take() {
        return Err(violation);
    }
    let counts = *lock(&world.counts);
    Ok(Outcome { ended: ended?, counts })
}

impl World {
    /// No thread goes on.
    pub(crate) fn is_over(&self) -> bool {
        // Acquire: pairs with the Release of the keeper.
        self.over.load(Ordering::Acquire) == 2
    }

    /// Programs end.
    pub(crate) fn programs_end(&self) -> bool {
        self.over.load(Ordering::Acquire) != 0
    }

    pub(crate) fn pause(&self, host: &SimHost, span: Duration) {
        let never = Word::new(0);
        let until = host.now().after(span);
        while host.now() < until {
            let _ = host.wait(&never, 0, Some(until));
        }
    }

    /// Something does not hold: the first of these is what the run ends with.
    pub(crate) fn violate(&self, what: &str) {
        lock(&self.violation).get_or_insert_with(|| what.to_owned());
    }

    pub(crate) fn expect<T, E: std::fmt::Display>(&self, what: &str, result: Result<T, E>) -> Option<T> {
        result.inspect_err(|why| self.violate(&format!("{what}: {why}"))).ok()
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = NodeId> {
        (1..=self.plan.nodes).map(NodeId::new)
    }

    pub(crate) fn identity(&self, node: NodeId) -> Identity {
        Identity { cluster: [1; 16], key: ClusterKey::new([42; 32]), node }
    }

    /// An attempt to make a node a copy ended.
    pub(crate) fn attempted(&self, node: NodeId, problem: Option<&str>) {
        let mut counts = lock(&self.counts);
        match problem {
            None => counts.added += 1,
            Some(problem) => {
                counts.not_added += 1;
                *lock(&self.problem) = format!("node {node}: {problem}");
            }
        }
    }

    /// A life begins to serve.
    pub(crate) fn serves(&self, life: &Arc<Life>, version: u64, believes: invariants::Believes) {
        lock(&self.counts).served += 1;
        self.invariants.one_head.begins(life.clone(), version, believes);
        self.look_at_heads();
    }

    pub(crate) fn look_at_heads(&self) {
        let truth = self.host.now();
        if let Err(why) = self.invariants.one_head.check(truth) {
            self.violate(&why);
        }
    }

    /// The keeper: starts what does not run, does the faults, and at the end heals and compares.
    fn keep(self: &Arc<Self>, machines: &Simulation, mut random: Random, managers: &Arc<SimHost>) {
        self.manager.start();
        let world = self.clone();
        drop(managers.spawn("ticks", Box::new(move || world.manager.run(&world))).expect("a thread"));
        let mut faults = faults::Faults::new(self.plan.faults);
        while !faults.are_over() && lock(&self.violation).is_none() {
            self.look(machines);
            faults.step(self, &mut random);
            self.pause(&self.host, LOOK);
        }
        faults.heal(self);
        if lock(&self.violation).is_none() {
            self.heal(machines);
        }
        self.over.store(2, Ordering::Release);
        let lives: Vec<_> = lock(&self.nodes).iter().filter_map(|node| node.life.clone()).collect();
        lives.iter().for_each(|life| life.host.kill());
    }

    /// Starts what does not run and is to.
    fn look(self: &Arc<Self>, machines: &Simulation) {
        self.look_at_heads();
        let now = self.host.now();
        for index in 0..self.plan.nodes as usize {
            let life = lock(&self.nodes)[index].life.clone();
            if life.is_some_and(|life| !life.host.is_alive()) {
                // It ended by itself; its stored bytes stay.
                let pause = Duration::from_millis(5);
                self.bury(index, |recorder| recorder.after_kill(), now.after(pause));
            }
            let starts = lock(&self.nodes)[index].start_at.is_some_and(|at| at <= now);
            if starts {
                self.start(machines, index);
            }
        }
    }

    /// Notes that a process is dead, with the rest of its pool, and when it is started again.
    fn bury(&self, index: usize, left: impl FnOnce(&Recorder) -> Recorder, again: Time) {
        let name = {
            let mut nodes = lock(&self.nodes);
            let node = &mut nodes[index];
            node.life = None;
            node.recorder = left(&node.recorder);
            node.start_at = Some(again);
            node::name(node.id)
        };
        lock(&self.counts).deaths += 1;
        for other in self.nodes().map(node::name).filter(|other| *other != name) {
            self.network.disconnect(&name, &other);
        }
    }

    /// A node's power was cut; or it has taken over, after which none of its logs is from before.
    fn set_torn(&self, node: NodeId, is_torn: bool) {
        lock(&self.nodes).iter_mut().filter(|other| other.id == node).for_each(|node| node.is_torn = is_torn);
    }

    fn is_torn(&self, node: NodeId) -> bool {
        lock(&self.nodes).iter().any(|other| other.id == node && other.is_torn)
    }

    fn start(self: &Arc<Self>, machines: &Simulation, index: usize) {
        let (id, clock, recorder) = {
            let nodes = lock(&self.nodes);
            let node = &nodes[index];
            (node.id, node.clock, node.recorder.clone())
        };
        let host = machines.process(&node::name(id));
        let number = self.host.random();
        let daemon = Mutex::new(None);
        let programs = Word::new(0);
        let life = Life { node: id, number, host: host.clone(), recorder, clock, daemon, programs };
        let life = Arc::new(life);
        {
            let mut nodes = lock(&self.nodes);
            (nodes[index].life, nodes[index].start_at) = (Some(life.clone()), None);
        }
        let world = self.clone();
        drop(host.spawn("member", Box::new(move || life.run(world))).expect("a simulated thread"));
    }

    /// Nothing goes wrong any more: all nodes become level, and are compared.
    fn heal(self: &Arc<Self>, machines: &Simulation) {
        let until = self.host.now().after(HEALING);
        let mut quiet = 0;
        loop {
            self.look(machines);
            if lock(&self.violation).is_some() {
                return;
            }
            if self.host.now() >= until {
                return self.violate(&self.not_level());
            }
            match self.level_head() {
                Some((life, daemon)) if self.programs_end() => {
                    if life.programs.load(Ordering::Acquire) == 0 {
                        daemon.sessions().into_iter().for_each(|id| daemon.end(id));
                        quiet = if self.has_executed(&daemon) { quiet + 1 } else { 0 };
                    }
                    if quiet == 60 {
                        return self.compare();
                    }
                }
                // Programs go on for a while where nothing goes wrong.
                Some(_) if quiet == 10 => self.over.store(1, Ordering::Release),
                Some(_) => quiet += 1,
                None => quiet = 0,
            }
            if self.programs_end() && quiet > 60 {
                quiet = 0;
            }
            self.pause(&self.host, LOOK);
        }
    }

    /// The daemon that leads, if all others are level and in sync.
    fn level_head(&self) -> Option<(Arc<Life>, Arc<Daemon>)> {
        let view = self.manager.view();
        let subtree = view.subtrees.get(&cluster::Path::root())?;
        let head = subtree.manager?;
        let all = subtree.living(&view.members).count() == self.plan.nodes as usize;
        let life = lock(&self.nodes).iter().find(|node| node.id == head)?.life.clone()?;
        let daemon = lock(&life.daemon).clone()?;
        let copies = daemon.copies();
        let level = copies.iter().filter(|copy| copy.connected && copy.level).count();
        (all && level + 1 == self.plan.nodes as usize).then_some((life, daemon))
    }

    fn not_level(&self) -> String {
        let view = self.manager.view();
        let chain = view.subtrees.get(&cluster::Path::root()).map(|subtree| {
            let in_sync: Vec<_> = subtree.in_sync().collect();
            (subtree.manager, in_sync)
        });
        let members: Vec<_> = view.members.keys().collect();
        let copies: Vec<_> =
            lock(&self.nodes).iter().filter_map(|node| lock(&node.life.as_ref()?.daemon).clone()).collect();
        let copies: Vec<_> = copies.iter().flat_map(|daemon| daemon.copies()).collect();
        let problem = lock(&self.problem).clone();
        format!("the nodes are not level in time: {chain:?} of {members:?}, {copies:?}; last {problem}")
    }

    fn has_executed(&self, daemon: &Daemon) -> bool {
        let copies = daemon.copies();
        let first = copies.first().map(|copy| copy.ledger);
        copies.iter().all(|copy| copy.executed == copy.ledger && Some(copy.ledger) == first)
    }

    fn compare(&self) {
        let images: Vec<_> = lock(&self.nodes).iter().map(|node| (node.id, node.recorder.image())).collect();
        if let Err(why) = invariants::equal::check(&images) {
            self.violate(&why);
        }
    }
}
