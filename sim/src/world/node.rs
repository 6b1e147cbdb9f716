//! One life of a node: its pool opened as a standby, its membership, and the part that the view gives it, as in the
//! program's daemon (`src/chain`): the decisions about the other nodes are made by the same code, [`cluster::Part`] and
//! [`cluster::Peers`].

use super::clock::NodeClock;
use super::manager::ManagerLink;
use super::{LAG, LEASE, PATIENCE, World, config, lock};
use crate::host::SimHost;
use cluster::{
    Address, Change, CopyFacts, Manager, Membership, Part, Party, Path, PeerFacts, PeerStep, Peers,
    Placement, PoolIdentity, Subtree, View,
};
use format::{ChangeNumber, Epoch, NodeId, PoolUid};
use ipc::sync::Ordering;
use ipc::{Host, Lock, Time, Word};
use pmem::Recorder;
use sharedfs::{CopyState, Daemon, Standby, Term};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use transport::{Connection, Endpoint, Listener};

/// How often a node looks at how it is.
const LOOK: Duration = Duration::from_millis(3);
/// How long one attempt to connect is.
const CONNECT: Duration = Duration::from_millis(20);
/// How long the manager may take to answer.
const PROPOSE: Duration = Duration::from_millis(40);
/// A node that leads ends so long before its heartbeat does not hold any more.
const MARGIN: Duration = Duration::from_millis(2);

/// One process of a node, from its start to its death.
pub struct Life {
    pub node: NodeId,
    /// Which process of the world's it is, from 1.
    pub number: u64,
    pub host: Arc<SimHost>,
    pub recorder: Recorder,
    pub clock: (u64, i64),
    /// The daemon, once it serves.
    pub daemon: Mutex<Option<Arc<Daemon>>>,
    /// Programs that run there.
    pub programs: Word,
}

/// A life at work.
struct Member {
    world: Arc<World>,
    life: Arc<Life>,
    standby: Standby,
    endpoint: Endpoint,
    membership: Arc<Membership>,
    manager: ManagerLink,
    peers: Lock<Peers>,
    version: Mutex<ChangeNumber>,
    /// Since when it is to lead.
    beginning: Mutex<Option<Time>>,
}

fn address(node: NodeId, life: u64) -> String {
    format!("n{}/{life}", node.get())
}

/// The name of a node on the network.
pub fn name(node: NodeId) -> String {
    format!("n{}", node.get())
}

impl Life {
    fn host(&self) -> Arc<dyn Host> {
        self.host.clone()
    }

    /// Runs it to its end.
    pub fn run(self: Arc<Self>, world: Arc<World>) {
        let opened = Standby::open(self.host(), &self.recorder.medium(), config(self.node));
        let Some(standby) = world.expect("a pool opens", opened) else { return };
        world.expect("a thread starts", standby.start());
        let pool = standby.pool().unwrap_or(PoolUid::NONE);
        let settings = mirror_settings();
        let endpoint =
            world.network.endpoint(&name(self.node), world.identity(self.node), Epoch::new(0), settings);
        let Some(endpoint) = world.expect("an endpoint", endpoint) else { return };
        let listened = endpoint.listen(&address(self.node, self.number));
        let Some(listener) = world.expect("a listener", listened) else { return };
        self.spawn("links", {
            let (life, standby) = (self.clone(), standby.clone());
            move || accept(&life, &listener, &standby)
        });
        let clock: Arc<dyn Host> = Arc::new(NodeClock::new(self.host.clone(), self.clock));
        let link = |host| ManagerLink { world: world.clone(), node: self.node, host };
        let at = Address::new(&address(self.node, self.number)).unwrap_or_default();
        let membership = loop {
            let identity = PoolIdentity::open(&self.recorder.medium(), pool, self.node);
            let Some(identity) = world.expect("an identity", identity) else { return };
            let until = clock.now().after(LEASE);
            let manager = Arc::new(link(clock.clone()));
            match Membership::join_pool(clock.clone(), manager, identity, (0, at.clone()), until) {
                Ok(membership) => break membership,
                Err(_) => world.pause(&self.host, LOOK),
            }
        };
        let peers = Lock::new(self.host(), Peers::new(PATIENCE, LAG, PATIENCE));
        let manager = link(self.host());
        let (version, beginning) = (Mutex::default(), Mutex::default());
        let member =
            Member { world, life: self, standby, endpoint, membership, manager, peers, version, beginning };
        Arc::new(member).run();
    }

    fn spawn(&self, name: &str, body: impl FnOnce() + Send + 'static) {
        drop(self.host.spawn(name, Box::new(body)).expect("a simulated thread"));
    }
}

fn mirror_settings() -> transport::Settings {
    transport::Settings {
        spin_ns: 0,
        silence: Some(2 * LEASE),
        message_bytes: 8 << 10,
        window: 8,
        ..mirror::settings()
    }
}

fn accept(life: &Arc<Life>, listener: &Listener, standby: &Standby) {
    loop {
        if let Ok(connection) = listener.accept(None) {
            let standby = standby.clone();
            life.spawn("follow", move || drop(standby.follow(&connection)));
        }
    }
}

impl Member {
    fn now(&self) -> Time {
        self.life.host.now()
    }

    fn run(self: Arc<Self>) {
        loop {
            // Acquire: pairs with the Release of the membership.
            let seen = self.membership.news().load(Ordering::Acquire);
            self.look();
            self.life.host.wait(self.membership.news(), seen, Some(self.now().after(LOOK)));
        }
    }

    /// Ends the process as a kill does; its keeper starts another.
    fn end(&self) {
        self.life.host.kill();
    }

    fn look(self: &Arc<Self>) {
        let Some(party) = self.membership.party() else { return self.end() };
        let Some(view) = self.membership.view() else { return };
        if self.endpoint.epoch() != view.epoch {
            self.endpoint.advance(view.epoch, Some(view.lives()));
        }
        let daemon = lock(&self.life.daemon).clone();
        let subtree = view.subtrees.get(&Path::root());
        match (Part::of(subtree, self.life.node, daemon.is_some()), subtree, daemon) {
            (Part::Lead, Some(subtree), Some(daemon)) => self.lead_on(party, &view, subtree, &daemon),
            (Part::Begin, Some(subtree), _) => self.begin(party, &view, subtree),
            (Part::Follow, Some(subtree), _) => self.follow(subtree),
            (Part::End, ..) => self.end(),
            _ => self.found(),
        }
    }

    fn found(&self) {
        if self.life.node != NodeId::new(1) {
            return;
        }
        let chain = self.world.nodes().map(|node| Placement { node, hot: true }).collect();
        let (path, version) = (Path::root(), ChangeNumber::default());
        let founder = self.standby.pool();
        self.propose(Change::SetSubtree { path, version, chain, copies_min: 1, founder });
    }

    fn follow(&self, subtree: &Subtree) {
        let leader = subtree.manager.unwrap_or(NodeId::NONE);
        self.standby.fence_but(subtree.version.get(), leader);
        *lock(&self.beginning) = None;
        if let Some(why) = self.standby.failure() {
            self.world.violate(&format!("the copy of node {} stopped: {why}", self.life.node));
        }
    }

    fn propose(&self, change: Change) {
        // The next view says what came of it.
        let _ = self.manager.propose(&change, self.now().after(PROPOSE));
    }

    fn set_sync(&self, party: Party, subtree: &Subtree, node: NodeId, in_sync: bool) {
        let (path, version) = (Path::root(), subtree.version);
        let change = Change::SetSync { path, version, by: party, node, in_sync };
        if node == self.life.node {
            let _ = self.membership.give(&Path::root(), version, &change, self.now().after(PROPOSE));
        } else {
            self.propose(change);
        }
    }

    fn begin(self: &Arc<Self>, party: Party, view: &Arc<View>, subtree: &Subtree) {
        let now = self.now();
        self.standby.fence(subtree.version.get());
        let since = *lock(&self.beginning).get_or_insert(now);
        if !self.membership.may_serve(&Path::root()) {
            return;
        }
        let is_patient = || self.now().since(since) < PATIENCE;
        let others =
            subtree.living(&view.members).map(|replica| replica.node).filter(|node| *node != self.life.node);
        let mut copies = Vec::new();
        for node in others {
            match self.connect(view, node) {
                Some(connection) => copies.push(connection),
                None if is_patient() => return,
                None => return self.set_sync(party, subtree, node, false),
            }
        }
        let term = Term { node: self.life.node, epoch: view.epoch, version: subtree.version.get() };
        match self.standby.lead(term, copies) {
            Ok((daemon, recovered)) => {
                // Behind the synced bytes a power cut leaves any part of the others, which looks like damage; the
                // programs' histories judge whether the synced ones are there.
                let is_damaged = !recovered.damaged.is_empty()
                    || !recovered.incomplete.is_empty()
                    || recovered.kept.is_some();
                if is_damaged && !self.world.is_torn(self.life.node) {
                    self.world.violate(&format!("a copy that leads lost something: {recovered:?}"));
                }
                self.world.set_torn(self.life.node, false);
                self.serve(daemon, subtree);
            }
            Err(why) => {
                match why {
                    sharedfs::Error::CopyIsAhead(_) => {
                        lock(&self.world.counts).ahead += 1;
                        self.set_sync(party, subtree, self.life.node, false);
                    }
                    sharedfs::Error::NeedsImport(node) => self.set_sync(party, subtree, node, false),
                    sharedfs::Error::Copy(node, _) if !is_patient() => {
                        self.set_sync(party, subtree, node, false);
                    }
                    sharedfs::Error::Copy(..) => {}
                    why => {
                        return self.world.violate(&format!("node {} cannot lead: {why}", self.life.node));
                    }
                }
                self.world.expect("a thread starts", self.standby.start());
            }
        }
    }

    fn serve(self: &Arc<Self>, daemon: Daemon, subtree: &Subtree) {
        self.world.expect("threads start", daemon.start());
        let daemon = Arc::new(daemon);
        *lock(&self.version) = subtree.version;
        self.life.spawn("valid", {
            let member = self.clone();
            move || member.end_when_over()
        });
        if !self.membership.may_serve(&Path::root()) {
            return self.end();
        }
        *lock(&self.life.daemon) = Some(daemon.clone());
        self.world.serves(&self.life, subtree.version.get(), self.valid());
        self.world.begin_programs(&self.life, &daemon);
    }

    /// A function that tells, at any true time, whether the node believes that it may serve.
    fn valid(self: &Arc<Self>) -> Box<dyn Fn(Time) -> bool + Send + Sync> {
        let clock = NodeClock::new(self.life.host.clone(), self.life.clock);
        let member = self.clone();
        Box::new(move |truth| member.membership.valid_until().is_some_and(|until| clock.shows(truth) < until))
    }

    fn end_when_over(&self) {
        let clock = NodeClock::new(self.life.host.clone(), self.life.clock);
        let never = Word::new(0);
        loop {
            let now = clock.now();
            let left = self.membership.valid_until().map(|until| until.since(now)).unwrap_or_default();
            if left <= MARGIN {
                return self.end();
            }
            let _ = clock.wait(&never, 0, Some(now.after(left - MARGIN)));
        }
    }

    fn connect(&self, view: &View, node: NodeId) -> Option<Connection> {
        let member = view.members.get(&node)?;
        let until = self.now().after(CONNECT);
        loop {
            match self.endpoint.connect(member.address.as_str(), node, until) {
                Ok(connection) => return Some(connection),
                Err(transport::Error::Refused { .. }) if self.now() < until => {
                    self.world.pause(&self.life.host, Duration::from_millis(1));
                }
                Err(_) => return None,
            }
        }
    }

    fn lead_on(self: &Arc<Self>, party: Party, view: &Arc<View>, subtree: &Subtree, daemon: &Arc<Daemon>) {
        if let Some(why) = daemon.failure() {
            return self.world.violate(&format!("the daemon of node {} stopped: {why}", self.life.node));
        }
        let version = subtree.version;
        if std::mem::replace(&mut *lock(&self.version), version) != version {
            daemon.lead_on(version.get());
        }
        let copies = daemon.copies();
        for replica in subtree.chain.iter().filter(|replica| replica.node != self.life.node) {
            let node = replica.node;
            let copy = copies.iter().find(|copy| copy.node == node).map(facts_of);
            let life = view.members.get(&node).map(|member| member.life);
            let facts = PeerFacts { life, in_sync: replica.in_sync, version, copy };
            let step = self.peers.lock().step(self.now(), node, &facts);
            match step {
                PeerStep::Nothing => {}
                PeerStep::Add => {
                    let (member, view, daemon) = (self.clone(), view.clone(), daemon.clone());
                    self.life.spawn("add", move || member.add(&view, node, &daemon));
                }
                PeerStep::SaySync => self.set_sync(party, subtree, node, true),
                PeerStep::SayLost => self.set_sync(party, subtree, node, false),
                PeerStep::AskAnew => {
                    self.propose(Change::SetManager {
                        path: Path::root(),
                        version,
                        by: party,
                        to: party.node,
                    });
                }
                PeerStep::Forget => daemon.remove_copy(node),
            }
        }
    }

    fn add(&self, view: &View, node: NodeId, daemon: &Daemon) {
        let added = match self.connect(view, node) {
            None => Err(("it cannot be reached".to_owned(), None)),
            Some(connection) => daemon.add_copy(connection).map_err(|why| {
                let useless =
                    matches!(why, sharedfs::Error::NeedsImport(_) | sharedfs::Error::CopyIsAhead(_));
                let life = view.members.get(&node).map(|member| member.life);
                (why.to_string(), life.filter(|_| useless))
            }),
        };
        let problem = added.as_ref().err().map(|(why, _)| why.as_str());
        self.world.attempted(node, problem);
        self.peers.lock().added(self.now(), node, added);
    }
}

fn facts_of(copy: &CopyState) -> CopyFacts {
    CopyFacts {
        connected: copy.connected,
        level: copy.level,
        stalled: copy.stalled,
        behind_bytes: copy.behind_bytes,
        executed_bytes: copy.executed_bytes,
    }
}
