//! Two nodes on one thread: a head with a session, and a standby that follows it. A wait at the head drives the
//! standby, so each run is the same, and every fence, sync, creation and removal at either side is a moment at which
//! the machines can die.
//!
//! The oracle is that of the crash proofs of one node: all operations are in one folder, so the operations that a pool
//! recovers must be a prefix of their order. The copy's pool, recovered without the head, has every operation that an
//! fsync acknowledged.

use crate::client::{Client, DIRECTORY, FILE, ROOT, cookie, tiny, user};
use crate::crash::{Opened, Run, check_pool, grow, judge, limits, prove_on_both, recover_by};
use crate::second_copy::{difference, items};
use crate::still::{StillHost, drive_by};
use format::call::{CallKind, DigestRequest};
use format::record::Kind;
use format::session::SyncRequest;
use format::{Epoch, InodeNumber, NodeId, PoolUid, Sequence};
use ipc::Host;
use pmem::crash::{Counts, Limits, crash_recorded};
use pmem::recorded::Verb;
use pmem::{Medium, Recorder};
use sharedfs::{Config, Daemon, Format, Standby, Term, format_pool};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use transport::{ClusterKey, Connection, Endpoint, Identity, Listener, Network, Traffic};
use zerocopy::IntoBytes;

pub const HEAD: u32 = 1;
pub const COPY: u32 = 2;

const MESSAGE_BYTES: u32 = 16 << 10;

pub fn term(node: u32, version: u64) -> Term {
    Term { node: NodeId::new(node), epoch: Epoch::new(1), version }
}

pub fn format_for(medium: &Medium, node: u32) {
    let new = Format {
        pool: PoolUid::new(70 + u64::from(node)),
        tree_nodes_max: 2048,
        root_mode: 0o755,
        root_uid: 0,
        root_gid: 0,
        time_ns: 1,
        ledger_bytes: tiny().ledger_bytes,
    };
    format_pool(medium, &new).unwrap();
}

pub fn config(node: u32) -> Config {
    Config { node: NodeId::new(node), ..tiny() }
}

/// The copy's side of a connection on its way.
enum Follower {
    Waiting,
    Accepted(Connection),
    Linked(Connection, u64),
    Over,
}

/// The standby with what a machine of its own would do for it.
pub struct Follows {
    pub standby: Standby,
    listener: Listener,
    follower: Follower,
    /// So many times nothing is executed where something could be.
    pub paused: u32,
    /// Synced entries are executed, and reported, before the next message is read.
    pub eager: bool,
    /// An action of programs at the head when the copy has received so many messages.
    pub meanwhile: Option<(u32, Box<dyn FnMut()>)>,
    /// Why the copy ended a link last.
    pub link_end: Option<mirror::Error>,
}

impl Follows {
    /// One step; false if there was nothing to do.
    pub fn step(&mut self) -> bool {
        let stepped = self.take_step();
        if stepped && let Some((left, act)) = &mut self.meanwhile {
            *left = left.saturating_sub(1);
            if *left == 0 {
                act();
                self.meanwhile = None;
            }
        }
        stepped
    }

    fn take_step(&mut self) -> bool {
        let now = Some(ipc::Time::from_ns(0));
        match std::mem::replace(&mut self.follower, Follower::Over) {
            Follower::Waiting => {
                let accepted = self.listener.accept(now).ok();
                let came = accepted.is_some();
                self.follower = accepted.map_or(Follower::Waiting, Follower::Accepted);
                came
            }
            // The head says hello only when its connect has returned: see `greet`.
            Follower::Accepted(connection) => {
                self.follower = Follower::Accepted(connection);
                false
            }
            Follower::Linked(connection, link) => {
                match self.standby.receive(&connection, link, ipc::Time::from_ns(0)) {
                    Ok(mirror::Stepped::Nothing) => {
                        self.follower = Follower::Linked(connection, link);
                        self.paused = self.paused.saturating_sub(1);
                        self.paused == 0 && self.standby.execute().unwrap()
                    }
                    Ok(_) => {
                        self.follower = Follower::Linked(connection, link);
                        while self.eager && self.standby.execute().unwrap() {}
                        true
                    }
                    Err(why) => {
                        connection.close();
                        self.link_end = Some(why);
                        true
                    }
                }
            }
            Follower::Over => false,
        }
    }

    /// Answers the hello that is on its way.
    fn greet(&mut self) -> bool {
        let Follower::Accepted(connection) = &self.follower else { return false };
        let connection = connection.clone();
        match self.standby.greet(&connection) {
            Ok(link) => {
                self.follower = Follower::Linked(connection, link);
                while self.eager && self.standby.execute().unwrap() {}
            }
            Err(_) => {
                connection.close();
                self.follower = Follower::Over;
            }
        }
        true
    }
}

/// Both nodes.
pub struct Pair {
    pub copy: Recorder,
    pub daemon: Arc<Daemon>,
    /// Which became the daemon.
    leader: Standby,
    pub follows: Rc<RefCell<Follows>>,
    endpoint: Endpoint,
    /// The node that follows.
    other: NodeId,
    host: Arc<StillHost>,
    /// The head's side of the last connection.
    link: RefCell<Option<Connection>>,
}

pub fn identity(node: u32) -> Identity {
    Identity { cluster: [1; 16], key: ClusterKey::new([42; 32]), node: NodeId::new(node) }
}

impl Pair {
    /// New pools, a head that leads, and a copy that counts.
    pub fn on(head: &Recorder, copy: &Recorder) -> Self {
        let host = StillHost::first();
        format_for(&head.medium(), HEAD);
        format_for(&copy.medium(), COPY);
        let pair = Self::apart(host, head, copy, config(COPY));
        let connection = pair.connect();
        pair.daemon.add_copy(connection).unwrap();
        pair
    }

    /// Pools that are there, of which the first leads and the second does not count yet. Messages are short, and few are
    /// under way.
    pub fn apart(host: Arc<StillHost>, head: &Recorder, copy: &Recorder, of_copy: Config) -> Self {
        Self::apart_with(host, [head, copy], [config(HEAD), of_copy], MESSAGE_BYTES)
    }

    /// The same with settings of the head, and with messages of at most so many bytes.
    pub fn apart_with(
        host: Arc<StillHost>,
        [head, copy]: [&Recorder; 2],
        [of_head, of_copy]: [Config; 2],
        message_bytes: u32,
    ) -> Self {
        let standby = Standby::open(host.clone(), &head.medium(), of_head).unwrap();
        let daemon = Arc::new(standby.lead(term(HEAD, 1), Vec::new()).unwrap().0);
        let follower = Standby::open(host.clone(), &copy.medium(), of_copy).unwrap();
        Self::of((host, copy), (standby, daemon), follower, [HEAD, COPY], message_bytes)
    }

    /// The head dies, the copy leads, and the former head is there again as a standby that does not count yet.
    pub fn change_places(self, head: &Recorder) -> Self {
        let standby = self.follows.borrow().standby.clone();
        self.stop_head();
        let daemon = Arc::new(standby.lead(term(COPY, 2), Vec::new()).unwrap().0);
        let follower = self.restart_head();
        Self::of((self.host, head), (standby, daemon), follower, [COPY, HEAD], MESSAGE_BYTES)
    }

    /// The head dies, and is there again as a standby, which the former copy does not lead yet. The daemon is the former one.
    pub fn begin_to_change_places(self, head: &Recorder) -> (Self, Standby) {
        let standby = self.follows.borrow().standby.clone();
        self.stop_head();
        let follower = self.restart_head();
        let former = (standby.clone(), self.daemon);
        let pair = Self::of((self.host, head), former, follower, [COPY, HEAD], MESSAGE_BYTES);
        (pair, standby)
    }

    fn of(
        (host, copy): (Arc<StillHost>, &Recorder),
        (leader, daemon): (Standby, Arc<Daemon>),
        follower: Standby,
        [leads, follows]: [u32; 2],
        message_bytes: u32,
    ) -> Self {
        let network = Network::new(host.clone());
        let settings =
            transport::Settings { spin_ns: 0, silence: None, message_bytes, window: 4, ..mirror::settings() };
        let of =
            |node| network.endpoint(&format!("n{node}"), identity(node), Epoch::new(1), settings.clone());
        let (endpoint, peer) = (of(leads).unwrap(), of(follows).unwrap());
        let listener = peer.listen("copy").unwrap();
        let other = NodeId::new(follows);
        let follows = Rc::new(RefCell::new(Follows {
            standby: follower,
            listener,
            follower: Follower::Waiting,
            paused: 0,
            eager: false,
            meanwhile: None,
            link_end: None,
        }));
        Self { copy: copy.clone(), daemon, leader, follows, endpoint, other, host, link: RefCell::new(None) }
    }

    /// A connection from the head to the copy; the copy answers its hello.
    pub fn connect(&self) -> Connection {
        self.follows.borrow_mut().follower = Follower::Waiting;
        let connection = self.dial();
        *self.link.borrow_mut() = Some(connection.clone());
        connection
    }

    /// A further connection, which the copy has not looked at: the head's end, and the copy's.
    pub fn connect_beside(&self) -> [Connection; 2] {
        let linked = std::mem::replace(&mut self.follows.borrow_mut().follower, Follower::Waiting);
        let connection = self.dial();
        match std::mem::replace(&mut self.follows.borrow_mut().follower, linked) {
            Follower::Accepted(accepted) => [connection, accepted],
            _ => panic!("it was accepted"),
        }
    }

    /// Connects; the copy accepts.
    fn dial(&self) -> Connection {
        let follows = self.follows.clone();
        // A step of the handshake is not told.
        let mut steps = 0;
        drive_by(Box::new(move || {
            steps += 1;
            let _ = follows.try_borrow_mut().map(|mut follows| follows.step());
            steps < 1_000
        }));
        let until = self.host.now().after(Duration::from_secs(5));
        let connection = self.endpoint.connect("copy", self.other, until).unwrap();
        while matches!(self.follows.borrow().follower, Follower::Waiting) {
            self.follows.borrow_mut().step();
        }
        self.drive();
        connection
    }

    /// Makes waits on this thread drive the copy.
    pub fn drive(&self) {
        let follows = self.follows.clone();
        drive_by(Box::new(move || {
            follows.try_borrow_mut().is_ok_and(|mut follows| follows.greet() || follows.step())
        }));
    }

    /// The bytes that head and copy have handed to the transport on their connection.
    pub fn traffic(&self) -> [Traffic; 2] {
        let head = self.link.borrow().as_ref().map(Connection::traffic).unwrap_or_default();
        let copy = match &self.follows.borrow().follower {
            Follower::Accepted(connection) | Follower::Linked(connection, _) => connection.traffic(),
            Follower::Waiting | Follower::Over => Traffic::default(),
        };
        [head, copy]
    }

    pub fn attach(&self) -> Client {
        Client::attach(&self.daemon, user(0))
    }

    /// Everything that is under way arrives and is executed.
    pub fn quiesce(&self) {
        loop {
            self.daemon.feed_copies().unwrap();
            let mut moved = false;
            while self.follows.borrow_mut().step() {
                moved = true;
            }
            // Messages of the copy.
            moved |= self.daemon.hear_copies();
            if !moved {
                return;
            }
        }
    }

    /// The daemon of the copy is started again. It is not connected yet.
    pub fn restart_copy(&self) {
        drive_by(Box::new(|| false));
        let mut follows = self.follows.borrow_mut();
        follows.follower = Follower::Over;
        follows.standby.stop();
        follows.standby = Standby::open(self.host.clone(), &self.copy.medium(), config(COPY)).unwrap();
    }

    /// The daemon of the head dies.
    pub fn stop_head(&self) {
        drive_by(Box::new(|| false));
        self.daemon.give_up(&sharedfs::Error::Stopped);
        self.daemon.stop();
    }

    /// The daemon of the head is started again on its pool. It does not lead yet.
    pub fn restart_head(&self) -> Standby {
        self.leader.resume(&self.daemon).unwrap();
        self.leader.clone()
    }

    /// The head is gone, and the copy leads.
    pub fn take_over(self) -> (Arc<Daemon>, Recorder) {
        drive_by(Box::new(|| false));
        let Self { daemon, follows, copy, .. } = self;
        // A machine that died says nothing any more.
        std::mem::forget(daemon);
        let standby = follows.borrow().standby.clone();
        (Arc::new(standby.lead(term(COPY, 2), Vec::new()).unwrap().0), copy)
    }
}

/// An fsync as LibFS makes it.
pub fn sync(client: &Client, units: &[(InodeNumber, u8)]) -> Result<(), format::call::Status> {
    client.attached.log.sync().unwrap();
    let held = client.lease(units)?;
    let entry = held.iter().map(|reply| reply.ledger).max().unwrap().max(opened(client));
    let record = client.pages.commit().load();
    if client.view.needs_copies(record, entry) {
        let request = SyncRequest { record, entry };
        client.call(CallKind::Sync, &[request.as_bytes()])?;
    } else {
        let request = DigestRequest { up_to: entry, wait: 0.into(), reserved: 0.into() };
        client.call(CallKind::SyncLedger, &[request.as_bytes()])?;
    }
    Ok(())
}

fn opened(client: &Client) -> Sequence {
    Sequence::new(client.attached.welcome.ledger.get())
}

/// Operations with fsyncs on two nodes: a folder goes to and fro between two sessions, one of them grows its log and ends.
fn workload(recorders: [&Recorder; 2]) -> Pair {
    let pair = Pair::on(recorders[0], recorders[1]);
    let mut one = pair.attach();
    one.write_lease(ROOT);
    let (folder, _) = one.create(ROOT, b"folder", DIRECTORY | 0o755);
    let (shared, _) = one.create(folder, b"shared", FILE | 0o644);
    let mut run = Run { recorders: recorders.map(Recorder::clone).to_vec(), folder, shared, done: 0 };
    let synced = |run: &Run, client: &Client| {
        sync(client, &[(run.folder, 1), (run.shared, 1)]).unwrap();
        run.mark_synced();
    };
    run.operate(&mut one);
    synced(&run, &one);
    run.operate(&mut one);
    synced(&run, &one);
    pair.daemon.make_ready_logs();
    let mut two = pair.attach();
    // The second session goes on from what the first one did not sync.
    run.operate(&mut one);
    two.walk("folder/shared").unwrap();
    run.operate(&mut two);
    run.operate(&mut two);
    synced(&run, &two);
    run.operate(&mut one);
    one.digest(true).unwrap();
    run.operate(&mut one);
    synced(&run, &one);
    grow(&mut one);
    run.operate(&mut one);
    synced(&run, &one);
    run.operate(&mut two);
    pair.daemon.end(one.session);
    run.operate(&mut two);
    synced(&run, &two);
    pair
}

/// A recovery of a node of the pair, from its index.
pub fn recover_node(node: usize) -> impl Fn(&Medium) -> Result<Opened, String> {
    move |medium| recover_by(medium, config([HEAD, COPY][node]))
}

fn prove(limits: &Limits, node: usize) -> Counts {
    let recorders = [Recorder::new(), Recorder::new()];
    workload([&recorders[0], &recorders[1]]);
    drive_by(Box::new(|| false));
    prove_on_both(
        |model| format!("sharedfs, pair, node {}, {model:?}, {limits:?}", node + 1),
        |model| {
            crash_recorded(&recorders[node], model, limits, recover_node(node), |opened, medium, point| {
                // At the copy only what was synced is there, on either model.
                let on_own = node == 0;
                judge(opened, medium, point, on_own)
            })
        },
    )
}

#[test]
fn a_crash_of_the_copy_leaves_all_that_was_synced() {
    assert!(prove(&limits(), 1).images > 300);
}

#[test]
fn a_crash_of_the_head_leaves_all_that_it_had() {
    assert!(prove(&limits(), 0).images > 300);
}

/// The copy applies each record in a commit of its own. After a crash between two of them it goes on behind the first one, and
/// does not compare the rest of the records with the hash of all.
#[test]
fn a_crash_in_the_middle_of_an_entry_costs_the_copy_nothing() {
    let recorders = [Recorder::new(), Recorder::new()];
    let host = StillHost::first();
    format_for(&recorders[0].medium(), HEAD);
    format_for(&recorders[1].medium(), COPY);
    let small = Config { batch_records: 1, ..config(COPY) };
    let pair = Pair::apart(host, &recorders[0], &recorders[1], small);
    pair.daemon.add_copy(pair.connect()).unwrap();
    let mut client = pair.attach();
    client.write_lease(ROOT);
    for name in [b"one", b"two", b"six"] {
        client.create(ROOT, name, FILE | 0o644);
    }
    sync(&client, &[(ROOT, 1)]).unwrap();
    client.digest(true).unwrap();
    pair.quiesce();
    drive_by(Box::new(|| false));
    let open = |medium: &Medium| match Standby::open(StillHost::again(), medium, small) {
        Ok(standby) => Ok(Some(standby.state())),
        Err(sharedfs::Error::Area(area::AreaError::Missing)) => Ok(None),
        Err(error) => Err(error.to_string()),
    };
    let counts = prove_on_both(
        |model| format!("sharedfs, in the middle of an entry, {model:?}"),
        |model| {
            crash_recorded(&recorders[1], model, &limits(), open, |state, _, _| match state {
                Some(state) if state.executed != state.ledger => Err(format!("it stopped: {state:?}")),
                _ => Ok(()),
            })
        },
    );
    assert!(counts.images > 100);
}

#[test]
fn both_trees_are_equal() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = workload([&recorders[0], &recorders[1]]);
    for id in pair.daemon.sessions() {
        pair.daemon.end(id);
    }
    pair.quiesce();
    let (ours, theirs) = (items(&recorders[0].medium(), false), items(&recorders[1].medium(), false));
    assert!(ours == theirs, "{:#?}", difference(&ours.0, &theirs.0));
    assert!(ours.0.len() > 10);
    for recorder in &recorders {
        assert_eq!(area::check::check(&recorder.medium()).unwrap().findings, Vec::<String>::new());
    }
}

#[test]
fn the_copy_leads_when_the_head_is_gone() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = workload([&recorders[0], &recorders[1]]);
    let (daemon, copy) = pair.take_over();
    let done = check_pool(&daemon, &copy.medium()).unwrap();
    assert_eq!(done, 10, "all was synced");
}

/// Logs and ledger go round many times while the copy executes late: nothing that its tree lacks is written over.
#[test]
fn a_copy_that_executes_late_loses_nothing() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let mut one = pair.attach();
    let mut two = Client::attach_as(&pair.daemon, user(0), 2);
    one.write_lease(ROOT);
    let (file, _) = one.create(ROOT, b"file", FILE | 0o644);
    two.walk("file").unwrap();
    for round in 0..500u64 {
        // Each hand-over writes entries, and each write takes a part of a log of 60 KB.
        let client = if round % 2 == 0 { &mut one } else { &mut two };
        client.write_lease(file);
        assert!(client.write(file, round * 8, &vec![round as u8; 3_000]), "round {round}");
        if round % 5 == 0 {
            sync(client, &[(file, 1)]).unwrap();
        }
        if round % 50 == 7 {
            pair.follows.borrow_mut().paused = 40;
        }
    }
    assert_eq!(pair.daemon.terminations(), []);
    for id in pair.daemon.sessions() {
        pair.daemon.end(id);
    }
    pair.quiesce();
    let (ours, theirs) = (items(&recorders[0].medium(), false), items(&recorders[1].medium(), false));
    assert!(ours == theirs, "{:#?}", difference(&ours.0, &theirs.0));
    let ledger = recorders[1].medium().open("ledger").unwrap().bytes();
    assert!(pair.daemon.copies()[0].ledger.get() * 64 > 2 * ledger, "the ledger went round");
}

/// Files without a name, one digested and one not, that a program had open when its node died. The next node removes them,
/// with their contents, and keeps the one that got a name.
#[test]
fn files_without_a_name_end_with_their_node() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let mut one = pair.attach();
    one.write_lease(ROOT);
    let [digested, named, last] = [(); 3].map(|()| {
        let (file, made) = one.create_unnamed(ROOT);
        assert!(made && one.write(file, 0, &[1; 10_000]));
        file
    });
    one.digest(true).unwrap();
    let mut link = one.header(Kind::Link, named);
    link.parent = ROOT;
    link.extra.set(cookie(b"named"));
    assert!(one.append(link, &[b"named"]) && one.write(last, 0, &[2; 5_000]));
    sync(&one, &[(ROOT, 1), (digested, 1), (last, 1)]).unwrap();
    drop(one);
    let standby = pair.follows.borrow().standby.clone();
    pair.stop_head();
    let (daemon, recovered) = standby.lead(term(COPY, 2), Vec::new()).unwrap();
    assert_eq!((recovered.orphans, recovered.cuts.len()), (2, 0));
    let client = Client::attach(&Arc::new(daemon), user(0));
    let kept = client.walk("named").unwrap().inode;
    assert_eq!(client.read(kept, 0, 10_000).unwrap(), [1; 10_000]);
    let report = area::check::check(&recorders[1].medium()).unwrap();
    assert!(report.is_clean(), "{:?}", report.findings);
    assert_eq!(report.data_blocks, 3);
}

/// A write of 128 B and its fsync hand at most 256 B to the transport in both directions, in one message each way. The copy
/// makes one write durable and syncs one file, and only the thread that waits for its answer is woken.
#[test]
fn an_fsync_hands_little_to_the_transport() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let mut one = pair.attach();
    one.write_lease(ROOT);
    let (file, _) = one.create(ROOT, b"file", FILE | 0o644);
    sync(&one, &[(file, 1)]).unwrap();
    pair.quiesce();
    let counts = || {
        let calls = [Verb::Persist, Verb::Fence, Verb::Sync].map(|verb| recorders[1].calls(verb));
        (pair.traffic(), calls, pair.host.wakes())
    };
    for round in 0..40 {
        let (traffic, calls, wakes) = counts();
        assert!(one.write(file, round * 128, &[7; 128]));
        assert!(one.view.needs_copies(one.pages.commit().load(), opened(&one)));
        sync(&one, &[(file, 1)]).unwrap();
        // Nothing is asked again for what the copies have.
        assert!(!one.view.needs_copies(one.pages.commit().load(), opened(&one)));
        let (later, later_calls, later_wakes) = counts();
        let operations = later.map(|side| side.operations);
        assert_eq!(operations, traffic.map(|side| side.operations + 1), "round {round}");
        let bytes: u64 = (0..2).map(|side| later[side].bytes - traffic[side].bytes).sum();
        assert!(bytes <= 256, "{bytes} in round {round}");
        let done: Vec<u64> = later_calls.iter().zip(&calls).map(|(later, before)| later - before).collect();
        assert_eq!((done, later_wakes - wakes), (vec![1, 0, 1], 1), "round {round}");
    }
}
