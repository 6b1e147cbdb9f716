//! A SharedFS and its LibFSes in one process: the real parts over memory of this process alone, calls made directly.
//! From there on it is the same as for a program that uses socket and ring.

#![allow(dead_code, reason = "each test takes what it needs")]

pub mod histories;
pub mod operations;
pub mod stamped;
pub mod trees;

use format::call::{CallKind, InodeRequest, Status};
use format::session::ALIVE_OFFSET;
use format::{PoolUid, SegmentId, Sequence};
use ipc::{AliveWord, Host, Join, SystemHost, Time, Waited, Word};
use libfs::{Attachment, Connector, Error, LibFs, Limits, Link};
use pmem::{Medium, ReadMapping, Region};
use sharedfs::{Config, Daemon, Format, Recovered, format_pool};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use vfs::Caller;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Calls of each kind, by number.
pub const KINDS: usize = 32;

/// How often each call was made.
#[derive(Default)]
pub struct Counts([AtomicU64; KINDS]);

impl Counts {
    pub fn of(&self, kind: CallKind) -> u64 {
        self.0[kind as usize].load(Ordering::SeqCst)
    }

    /// Those that were made, of each kind.
    pub fn kinds(&self) -> Vec<(CallKind, u64)> {
        let kinds = (1..KINDS as u16).filter_map(|raw| CallKind::from_raw(raw).ok());
        kinds.map(|kind| (kind, self.of(kind))).filter(|(_, count)| *count > 0).collect()
    }

    pub fn all(&self) -> u64 {
        self.0.iter().map(|count| count.load(Ordering::SeqCst)).sum()
    }
}

/// A pool and the daemon that has it open, if one runs.
pub struct Node {
    pub host: Arc<dyn Host>,
    pub medium: Medium,
    pub config: Config,
    daemon: Mutex<Option<Arc<Daemon>>>,
    /// Generations of the daemon that runs, once a LibFS has attached.
    generations: Mutex<Option<Arc<ipc::Mapping>>>,
    folder: Option<tempfile::TempDir>,
}

/// Nodes of a pool's tree: its file is allocated whole.
const TREE_NODES: u32 = 4096;

/// Small enough that digest, wrap and growth happen all the time.
pub fn tiny() -> Config {
    Config {
        log_bytes: 16 << 10,
        log_bytes_max: 64 << 10,
        ledger_bytes: 64 << 10,
        own_range: 1 << 12,
        room_blocks: 64,
        room_reserve: 64,
        lease_words: 512,
        hold_min: std::time::Duration::ZERO,
        spin_ns: 0,
        area: sharedfs_area(1 << 13),
        ..Config::default()
    }
}

/// An area of so many data blocks in segments of a quarter of that.
pub fn sharedfs_area(blocks: u32) -> area::Limits {
    area::Limits {
        capacity_blocks: blocks.into(),
        segment_blocks: blocks / 4,
        reserve_blocks: 64,
        reserve_nodes: 64,
        cached_nodes: 512,
        ..area::Limits::default()
    }
}

/// A folder in memory.
pub fn folder() -> tempfile::TempDir {
    let shm = std::path::Path::new("/dev/shm");
    let folder = if shm.is_dir() { tempfile::tempdir_in(shm) } else { tempfile::tempdir() };
    folder.expect("a folder for a pool")
}

/// This machine, with processes that are only numbers: those live that were not said to be dead.
#[derive(Default)]
pub struct Machine {
    dead: Mutex<BTreeSet<u32>>,
}

impl Machine {
    /// A process is gone.
    pub fn bury(&self, pid: u32) {
        self.dead.lock().unwrap_or_else(PoisonError::into_inner).insert(pid);
    }
}

impl Host for Machine {
    fn now(&self) -> Time {
        SystemHost.now()
    }

    fn wall(&self) -> i64 {
        SystemHost.wall()
    }

    fn random(&self) -> u64 {
        SystemHost.random()
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, ipc::Error> {
        SystemHost.spawn(name, body)
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        SystemHost.wait(word, expected, until)
    }

    fn wake(&self, word: &Word, count: u32) {
        SystemHost.wake(word, count);
    }

    fn started(&self, process: u32) -> Option<u64> {
        let dead = self.dead.lock().unwrap_or_else(PoisonError::into_inner);
        (!dead.contains(&process)).then_some(0)
    }
}

impl Node {
    /// A new pool in memory.
    pub fn new(config: Config) -> Arc<Self> {
        let folder = folder();
        let medium = Medium::memory(folder.path()).expect("the folder is there");
        Self::on(Arc::new(Machine::default()), medium, config, Some(folder))
    }

    /// A new pool in memory whose tree has room for more nodes.
    pub fn with_nodes(config: Config, nodes: u32) -> Arc<Self> {
        let folder = folder();
        let medium = Medium::memory(folder.path()).expect("the folder is there");
        Self::made(Arc::new(Machine::default()), medium, config, (Some(folder), nodes))
    }

    /// A new pool on a medium.
    pub fn on(
        host: Arc<dyn Host>,
        medium: Medium,
        config: Config,
        folder: Option<tempfile::TempDir>,
    ) -> Arc<Self> {
        Self::made(host, medium, config, (folder, TREE_NODES))
    }

    fn made(
        host: Arc<dyn Host>,
        medium: Medium,
        config: Config,
        (folder, tree_nodes_max): (Option<tempfile::TempDir>, u32),
    ) -> Arc<Self> {
        let format = Format {
            pool: PoolUid::new(77),
            tree_nodes_max,
            root_mode: 0o755,
            root_uid: 0,
            root_gid: 0,
            time_ns: host.wall(),
            ledger_bytes: config.ledger_bytes,
        };
        format_pool(&medium, &format).expect("an empty medium takes a pool");
        let node = Self::of_pool(host, medium, config, folder);
        node.start();
        node
    }

    /// A pool that is there, not yet opened.
    pub fn of_pool(
        host: Arc<dyn Host>,
        medium: Medium,
        config: Config,
        folder: Option<tempfile::TempDir>,
    ) -> Arc<Self> {
        let (daemon, generations) = (Mutex::new(None), Mutex::new(None));
        Arc::new(Self { host, medium, config, daemon, generations, folder })
    }

    /// Starts the daemon if the pool can be recovered.
    ///
    /// # Errors
    /// The error of the recovery.
    pub fn try_start(&self) -> Result<Recovered, sharedfs::Error> {
        let (daemon, recovered) = Daemon::open(self.host.clone(), &self.medium, self.config)?;
        *self.slot() = Some(Arc::new(daemon));
        Ok(recovered)
    }

    /// Starts the daemon, which recovers what it finds.
    pub fn start(&self) -> Recovered {
        self.try_start().expect("a pool that was formatted opens")
    }

    /// The daemon dies: nothing is ended, nothing digested.
    pub fn kill(&self) {
        if let Some(generations) = self.generations.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // The kernel does this before it gives the pool free.
            let word = generations.words::<AliveWord>(ALIVE_OFFSET, 1).expect("it stands there");
            word[0].set_died();
        }
        *self.slot() = None;
    }

    fn slot(&self) -> std::sync::MutexGuard<'_, Option<Arc<Daemon>>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The daemon.
    pub fn daemon(&self) -> Option<Arc<Daemon>> {
        self.slot().clone()
    }

    /// A process of this user attaches.
    pub fn attach(self: &Arc<Self>, caller: Caller, limits: Limits) -> (LibFs, Arc<Local>) {
        self.attach_on(self.host.clone(), caller, limits)
    }

    /// The same, for a process with a host of its own.
    pub fn attach_on(
        self: &Arc<Self>,
        host: Arc<dyn Host>,
        caller: Caller,
        limits: Limits,
    ) -> (LibFs, Arc<Local>) {
        let local = Arc::new(Local::new(self.clone(), caller));
        let libfs = LibFs::new(host, local.clone(), limits).expect("the daemon runs");
        (libfs, local)
    }
}

/// A log that is being sealed.
pub struct Sealing {
    word: ipc::Words<ipc::words::SealWord>,
    cut: Sequence,
}

impl Sealing {
    /// Ends it, at the cut that was read.
    pub fn end(self) {
        self.word[0].seal(&ipc::words::CommitWord::new(self.cut), || ());
    }
}

/// Attaches within the process.
pub struct Local {
    node: Arc<Node>,
    caller: Caller,
    pub counts: Arc<Counts>,
    pid: u32,
    session: AtomicU64,
    log: Mutex<Option<Region>>,
    words: Mutex<Option<Arc<ipc::Mapping>>>,
    /// Lease words, as the daemon has them.
    leases: Mutex<Option<Arc<ipc::Mapping>>>,
}

/// Processes of this run, so that each has a number of its own.
static PIDS: AtomicU32 = AtomicU32::new(1);

impl Local {
    pub fn new(node: Arc<Node>, caller: Caller) -> Self {
        let counts = Arc::new(Counts::default());
        let pid = PIDS.fetch_add(1, Ordering::SeqCst);
        Self {
            node,
            caller,
            counts,
            pid,
            session: AtomicU64::new(0),
            log: Mutex::new(None),
            words: Mutex::new(None),
            leases: Mutex::new(None),
        }
    }

    /// Number of its process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Number of the present session.
    pub fn session(&self) -> u64 {
        self.session.load(Ordering::SeqCst)
    }

    /// A thread of the process goes inside and is stopped there.
    pub fn stop_inside(&self) {
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner).clone().expect("it attached");
        let pages = ipc::ClientPages::new(&words).expect("they are large enough");
        let _ = pages.inside().enter(Some(format::session::SLOTS - 1), ipc::words::FenceBy::Operation);
    }

    /// The log of the present session is sealed, as by a daemon that begins to end it.
    pub fn seal(&self) {
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner).clone().expect("it attached");
        let commits = ipc::ClientPages::new(&words).expect("they are large enough");
        self.seal_word()[0].seal(commits.commit(), || ());
    }

    /// The same, but the daemon stops in the middle of it. Returns the values that it has read for the cut.
    pub fn begin_to_seal(&self) -> Sealing {
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner).clone().expect("it attached");
        let cut = ipc::ClientPages::new(&words).expect("they are large enough").commit().load();
        let stopped = || std::panic::resume_unwind(Box::new("stopped in the middle"));
        let word = self.seal_word();
        let sealed = || word[0].seal(&ipc::words::CommitWord::default(), stopped);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(sealed)).expect_err("it stops");
        Sealing { word, cut }
    }

    fn seal_word(&self) -> ipc::Words<ipc::words::SealWord> {
        let words = self.leases.lock().unwrap_or_else(PoisonError::into_inner).clone().expect("it attached");
        words.words(format::session::SEAL_OFFSET, 1).expect("they are large enough")
    }

    /// Whether a thread of the process is inside of its words now.
    pub fn is_inside(&self) -> bool {
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner).clone().expect("it attached");
        let pages = ipc::ClientPages::new(&words).expect("they are large enough");
        let inside = pages.inside();
        !inside.scan().done(&inside)
    }

    /// The log of the present session, as it was at its beginning.
    pub fn log(&self) -> Region {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone().expect("it attached")
    }
}

impl Connector for Local {
    fn attach(&self, former: u64) -> Result<Attachment, Error> {
        let daemon = self.node.daemon().ok_or(Error::Disconnected)?;
        let attached = daemon.attach_again(self.caller.clone(), self.pid, former);
        let attached = attached.map_err(|_| Error::Refused)?;
        let session = attached.welcome.session.get();
        self.session.store(session, Ordering::SeqCst);
        *self.log.lock().unwrap_or_else(PoisonError::into_inner) = Some(attached.log.clone());
        *self.words.lock().unwrap_or_else(PoisonError::into_inner) = Some(attached.session.clone());
        *self.leases.lock().unwrap_or_else(PoisonError::into_inner) = Some(attached.leases.clone());
        *self.node.generations.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(attached.generations.clone());
        let daemon = Arc::downgrade(&daemon);
        let link = LocalLink { node: self.node.clone(), daemon, session, counts: self.counts.clone() };
        Ok(Attachment {
            welcome: attached.welcome,
            credential: attached.caller,
            log: attached.log,
            session: attached.session,
            leases: attached.leases,
            generations: attached.generations,
            link: Arc::new(link),
        })
    }
}

struct LocalLink {
    node: Arc<Node>,
    /// A process has no hold on its daemon.
    daemon: Weak<Daemon>,
    session: u64,
    counts: Arc<Counts>,
}

impl LocalLink {
    /// The daemon, unless it died.
    fn daemon(&self) -> Result<Arc<Daemon>, Error> {
        let daemon = self.node.daemon().filter(|daemon| Weak::ptr_eq(&Arc::downgrade(daemon), &self.daemon));
        daemon.ok_or(Error::Disconnected)
    }
}

/// Bytes of an answer, as a ring's large buffers would take them.
const ROOM: usize = 256 << 10;

impl Link for LocalLink {
    fn call(&self, kind: CallKind, request: &[&[u8]], response: &mut Vec<u8>) -> Result<Status, Error> {
        self.counts.0[kind as usize].fetch_add(1, Ordering::SeqCst);
        let daemon = self.daemon()?;
        let called = || daemon.call(self.session, kind as u16, &request.concat(), ROOM);
        let (status, body) = sim::elsewhere(called);
        *response = body;
        Ok(status)
    }

    fn segment(&self, segment: SegmentId) -> Result<ReadMapping, Error> {
        let inode = format::InodeNumber::new(u64::from(segment.get()));
        let request = InodeRequest { inode, flags: U64::new(0) };
        let region = self.daemon()?.segment(self.session, request.as_bytes()).map_err(|_| Error::Refused)?;
        Ok(ReadMapping::from_region(region))
    }

    fn lock_table(&self, session: u64) -> Result<Region, Error> {
        self.daemon()?.lock_table(session).ok_or(Error::Refused)
    }
}
