//! The daemon's interface: a pool is opened, sessions attach, are served, and end.
//!
//! Threads: one for each session that is served through its ring, which begins with the client's greeting if there was
//! one; one for the listener; and one in the background that digests logs which asked for it or are idle, and removes
//! inodes without a name. All are started through [`Host`] and end with [`Daemon::stop`].

use crate::accept::ListenerSettings;
use crate::compare::Compared;
use crate::config::Config;
use crate::copies::CopyState;
use crate::error::Error;
use crate::generations::Generations;
use crate::import::TreeSent;
use crate::imported::make_files_anew;
use crate::ledger::{LEDGER_BEGINNING, Ledger};
use crate::lock_questions::Questions;
use crate::locks::{Bell, Locks};
use crate::pace::Pace;
use crate::pool_space::{Holding, PoolSpace};
use crate::recalls::Patience;
use crate::register::Register;
use crate::replay::copy::LocalCopy;
use crate::serve::{Answer, Request};
use crate::session_end::TerminationReason;
use crate::standby::Term;
use crate::state::{CacheWatch, Core, State, Termination};
use crate::sync::Parking;
use crate::take_over::{FormerDaemon, Recovered, take_over};
use area::{Area, NewPool, Usage};
use ccnvm::SessionId;
use format::session::Welcome;
use format::{Epoch, NodeId, PoolUid};
use ipc::host::{FENCE_PAUSE, Host, WAKE_ALL};
use ipc::lock::Lock;
use ipc::ring::RingLimits;
use ipc::shared::Mapping;
use ipc::sync::{LongWord, Ordering, Word};
use mirror::logs::is_log_file;
use pmem::{Medium, PoolLock, Region};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use transport::Connection;
use vfs::Caller;

/// Parameters of a new pool.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// The pool.
    pub pool: PoolUid,
    /// The largest number of nodes that the tree may ever have.
    pub tree_nodes_max: u32,
    /// Permission bits of the root directory.
    pub root_mode: u32,
    /// Owner of the root directory.
    pub root_uid: u32,
    /// Group of the root directory.
    pub root_gid: u32,
    /// Nanoseconds since 1970.
    pub time_ns: i64,
    /// Bytes of the ledger's file.
    pub ledger_bytes: u64,
}

/// Makes a pool. The tree's superblock comes last: a crash before leaves a folder that can be formatted again.
///
/// # Errors
/// `Area` (`AlreadyFormatted`), `Media`.
pub fn format_pool(medium: &Medium, new: &Format) -> Result<(), Error> {
    match Area::open(medium, area::Limits::default()) {
        Err(area::AreaError::Missing) => {}
        Ok(_) => return Err(area::AreaError::AlreadyFormatted.into()),
        Err(error) => return Err(error.into()),
    }
    Ledger::format(medium, new.pool, new.ledger_bytes)?;
    let new = NewPool {
        pool: new.pool,
        tree_nodes_max: new.tree_nodes_max,
        root_mode: new.root_mode,
        root_uid: new.root_uid,
        root_gid: new.root_gid,
        time_ns: new.time_ns,
        ledger: LEDGER_BEGINNING,
    };
    Ok(Area::format(medium, &new)?)
}

/// Whether a medium holds a pool, whole or not: there is none yet if the making of one was interrupted.
pub fn is_pool(medium: &Medium) -> bool {
    !matches!(Area::open(medium, area::Limits::default()), Err(area::AreaError::Missing))
}

/// The parameters with which the pool of a medium was made, so that another one can be made like it. Those of the root
/// directory are the present ones.
///
/// # Errors
/// `Area` (`Missing`: there is none), `File`, `Media`.
pub fn format_of(medium: &Medium) -> Result<Format, Error> {
    let area = Area::open(medium, area::Limits::default())?;
    let NewPool { pool, tree_nodes_max, root_mode, root_uid, root_gid, time_ns, .. } =
        area.made_with(medium)?;
    let ledger_bytes = Ledger::file_bytes(medium, pool)?;
    Ok(Format { pool, tree_nodes_max, root_mode, root_uid, root_gid, time_ns, ledger_bytes })
}

/// The shared resources of a session, for a LibFS in the same process; `crate::accept` sends the same to other
/// processes as descriptors.
pub struct Attached {
    /// The first message of SharedFS.
    pub welcome: Welcome,
    /// The user on whose behalf the log's records act.
    pub caller: Caller,
    /// The log's file.
    pub log: Region,
    /// Session words.
    pub session: Arc<Mapping>,
    /// Lease words.
    pub leases: Arc<Mapping>,
    /// Request ring.
    pub ring: Arc<Mapping>,
    /// The ring's dimensions.
    pub ring_limits: RingLimits,
    /// Generations of the node.
    pub generations: Arc<Mapping>,
}

/// Locks the pool. A daemon that is dying may hold the lock for a moment longer.
pub(crate) fn lock_pool(host: &dyn Host, medium: &Medium, config: &Config) -> Result<PoolLock, Error> {
    let until = host.now().after(config.lock_patience);
    loop {
        match medium.lock() {
            Err(pmem::MediaError::Locked) if host.now() < until => {
                host.wait(&Word::new(0), 0, Some(host.now().after(LOCK_LOOK)));
            }
            locked => return Ok(locked?),
        }
    }
}

/// A full memory fence in all threads of all programs; true if the machine has it.
pub(crate) fn fence_others(host: &dyn Host) -> bool {
    let fences = host.fence_others();
    let until = host.now().after(FENCE_PAUSE);
    while !fences && host.now() < until {
        host.wait(&Word::new(0), 0, Some(until));
    }
    fences
}

/// A daemon that waits for the pool's lock tries again after so long.
const LOCK_LOOK: Duration = Duration::from_millis(2);

/// A running SharedFS.
pub struct Daemon {
    core: Arc<Core>,
    /// None once the pool is a standby's again.
    pool: Lock<Option<PoolLock>>,
}

impl Daemon {
    /// Opens a pool and brings it up to date. Nothing runs yet in the background. The medium is guarded from here on
    /// ([`Medium::guarded`]): a file of the pool that is lost stops the daemon.
    ///
    /// # Errors
    /// `Settings`; `Media` (`Locked`: another daemon has it); `Area`; `File`; `Lost`.
    pub fn open(host: Arc<dyn Host>, medium: &Medium, config: Config) -> Result<(Self, Recovered), Error> {
        let medium = medium.guarded()?;
        let opened = Self::open_guarded(host, &medium, config);
        match medium.lost(|name| !is_log_file(name)) {
            Some(name) => Err(Error::Lost(name)),
            None => opened,
        }
    }

    fn open_guarded(
        host: Arc<dyn Host>,
        medium: &Medium,
        config: Config,
    ) -> Result<(Self, Recovered), Error> {
        config.check()?;
        let pool_lock = lock_pool(&*host, medium, &config)?;
        medium.open_held()?;
        let mut area = Area::open(medium, config.area)?;
        make_files_anew(medium, &mut area)?;
        let generations = Arc::new(Generations::new(&*host)?);
        let copy = LocalCopy::open(&area, medium, &config, generations)?;
        let term = Term { node: config.node, epoch: Epoch::default(), version: 0 };
        let (core, recovered) = Self::begin(host, medium, config, (area, copy), (term, Vec::new()))?;
        PoolSpace::of(medium, &config).hold_at_start((0, 0));
        Ok((Self::of(core, pool_lock), recovered))
    }

    /// A daemon over a pool that it has the lock of.
    pub(crate) fn of(core: Arc<Core>, pool: PoolLock) -> Self {
        let pool = Lock::new(core.host.clone(), Some(pool));
        Self { core, pool }
    }

    /// Gives up the lock of the pool, for its next holder.
    pub(crate) fn take_pool(&self) -> Option<PoolLock> {
        self.pool.lock().take()
    }

    /// Makes a pool that was brought up to date lead, with these connections to its copies.
    pub(crate) fn begin(
        host: Arc<dyn Host>,
        medium: &Medium,
        config: Config,
        (mut area, copy): (Area, LocalCopy),
        (term, copies): (Term, Vec<Connection>),
    ) -> Result<(Arc<Core>, Recovered), Error> {
        // Before any log is read: records that programs committed before they could see that the former daemon had died
        // are visible from here on.
        let fences = fence_others(&*host);
        let bell = Bell::new(host.clone());
        let mut locks = Locks::new(bell.clone(), config.locks_max);
        let pool = area.pool();
        let (mut register, mut remembered) = Register::load(&*host, medium, pool, &mut locks)?;
        let mut left = FormerDaemon { register: &mut register, remembered: &mut remembered, locks: &locks };
        let generations = copy.generations.clone();
        let taken = take_over(&mut area, copy, &config, &host, &mut left, (term, copies))?;
        let (detached, references) = remembered.into_detached();
        let left = State::new(taken.copy, &config, (detached, references), (locks, register), taken.kept);
        let core = Core {
            bell,
            state: Lock::new(host.clone(), left),
            area: Lock::new(host.clone(), area),
            batch_of: LongWord::new(0),
            batches: Word::new(0),
            requests: LongWord::new(0),
            batch_awaited: Word::new(0),
            questions: Lock::new(host.clone(), Questions::default()),
            parking: Lock::new(host.clone(), Parking::default()),
            parked: Word::new(0),
            syncing: Lock::new(host.clone(), ()),
            copies: taken.copies,
            holding: Lock::new(host.clone(), Holding::default()),
            importing: Lock::new(host.clone(), Default::default()),
            tree_sent: Lock::new(host.clone(), None),
            kept_calls: Lock::new(host.clone(), Vec::new()),
            pace: Pace::new(&host),
            medium: medium.clone(),
            pool,
            config,
            generations,
            fences,
            events: Word::new(0),
            work: Word::new(0),
            failed: Word::new(0),
            ending: Word::new(0),
            threads: Word::new(0),
            started: Word::new(0),
            caches: OnceLock::new(),
            listener_bell: OnceLock::new(),
            abandoned: OnceLock::new(),
            host,
        };
        Ok((Arc::new(core), taken.recovered))
    }

    /// Starts the threads of the background.
    ///
    /// # Errors
    /// `Ipc`.
    pub fn start(&self) -> Result<(), Error> {
        let core = self.core.clone();
        self.core.begin_parking();
        self.core.spawn("sync", move || core.answer_parked())?;
        for copy in self.core.copies.all() {
            let core = self.core.clone();
            self.core.spawn("copy", move || core.feed(copy.node))?;
        }
        self.core.started.store(1, Ordering::Release);
        let core = self.core.clone();
        self.core.spawn("locks", move || core.answer_questions())?;
        let core = self.core.clone();
        self.core.spawn("digest", move || core.background())
    }

    /// From now on, when a session that must answer recalls ends, `watch` is asked whether data that it cached
    /// elsewhere under its leases may still be there. While it may, leases are granted only to sessions that must
    /// answer. The same holds at once if `watch` says so now, since the data may be of a session with an earlier
    /// daemon. Must be called once, before the first client is accepted.
    pub fn watch_caches(&self, watch: CacheWatch) {
        let withheld = watch();
        let first = self.core.caches.set(watch);
        assert!(first.is_ok(), "caches are watched by one");
        if withheld {
            self.core.state.lock().withhold(self.core.host.now().as_ns(), true);
        }
    }

    /// Starts the listener thread.
    ///
    /// # Errors
    /// `Ipc`.
    pub fn listen(&self, door: ListenerSettings) -> Result<(), Error> {
        self.core.start_listener(door)
    }

    /// Begins a session for a user's process. Its ring is not served yet: see [`Self::serve`].
    ///
    /// # Errors
    /// `Sessions`, `Media`, `LedgerFull`, `Stopped`; `Area` (`NoSpace`): the tree has no node for a session.
    pub fn attach(&self, caller: Caller, pid: u32) -> Result<Attached, Error> {
        self.core.attach(caller, pid, 0)
    }

    /// The same for a process that had session `former`, whose state the new session takes over.
    ///
    /// # Errors
    /// As [`Self::attach`].
    pub fn attach_again(&self, caller: Caller, pid: u32, former: u64) -> Result<Attached, Error> {
        self.core.attach(caller, pid, former)
    }

    /// Starts a thread that serves the session's ring until it ends.
    ///
    /// # Errors
    /// `Ipc`.
    pub fn serve(&self, session: u64) -> Result<(), Error> {
        self.core.serve_apart(SessionId(session))
    }

    /// Counts a member as a copy, over a connection that was made to it, and brings it up to date: when this returns,
    /// it has everything that was acknowledged, digested or published before. If the member counts already, its
    /// connection is replaced.
    ///
    /// A member that did not count, and either lacks records that are no longer here or has another history, gets the
    /// whole tree in place of its own, which may take long. Only the end of that makes fsyncs wait for it.
    ///
    /// # Errors
    /// `Copy`, `NoRoomToSend`: it does not count, unless it did before, and may be added again. `NeedsImport`, `CopyIsAhead`:
    /// so it is with a member that counts already, whose pool is never replaced.
    pub fn add_copy(&self, connection: Connection) -> Result<(), Error> {
        self.core.add_copy(connection)
    }

    /// The member is no longer a copy, since a view shows that it is none. Calls that wait for it go on.
    pub fn remove_copy(&self, node: NodeId) {
        self.core.remove_copy(node);
    }

    /// Sets whether there are fewer copies than required: while there are, fsyncs are not answered, and other calls
    /// are. Must be called before [`Self::remove_copy`], and before the first client is accepted.
    pub fn set_short(&self, short: bool) {
        self.core.set_short(short);
    }

    /// The version of the subtree in a later view in which this node still leads: connections to copies are made under
    /// it from now on.
    pub fn lead_on(&self, version: u64) {
        self.core.copies.set_version(version);
    }

    /// Compares the tree with that of a copy, over a connection of its own that was made to it, while both go on.
    /// Reports from time to time how many of how many inodes were compared.
    ///
    /// # Errors
    /// `Copy`: the copy is none, or cannot compare its tree now; `NoRoomToSend`; `Stopped`; failures of the medium.
    pub fn compare(&self, connection: Connection, told: &mut dyn FnMut(u64, u64)) -> Result<Compared, Error> {
        self.core.compare(connection, told)
    }

    /// The state of each copy.
    pub fn copies(&self) -> Vec<CopyState> {
        self.core.copy_states()
    }

    /// How far the tree is on its way to a member that joins.
    pub fn tree_sent(&self) -> Option<TreeSent> {
        *self.core.tree_sent.lock()
    }

    /// Feeds the copies once, as the threads in the background do.
    ///
    /// # Errors
    /// Failures of the medium, which stop the daemon.
    pub fn feed_copies(&self) -> Result<(), Error> {
        self.core.copies.all().iter().try_for_each(|copy| {
            let fed = self.core.feed_round(copy);
            self.core.stop_if_failed(fed).map(drop)
        })
    }

    /// Processes messages of the copies, as the threads in the background do; false if there were none.
    pub fn hear_copies(&self) -> bool {
        self.core.hear_copies()
    }

    /// Makes one call directly. `room` is the longest body of the answer, in bytes.
    pub fn call(&self, session: u64, kind: u16, body: &[u8], room: usize) -> Answer {
        self.core.call(SessionId(session), Request { number: 0, kind, body, room, patience: Patience::Waits })
    }

    /// The region of a segment that the session may map, for a LibFS in the same process.
    ///
    /// # Errors
    /// The status that the call would give.
    pub fn segment(&self, session: u64, body: &[u8]) -> Result<Region, format::call::Status> {
        self.core.map_segment(SessionId(session), body)
    }

    /// The session's lock table, if it has one, for a LibFS in the same process.
    pub fn lock_table(&self, session: u64) -> Option<Region> {
        self.core.lock_table(SessionId(session))
    }

    /// Ends a session whose process is gone, and waits until all committed records of its log are digested.
    pub fn end(&self, session: u64) {
        self.core.terminate(SessionId(session), TerminationReason::Left);
    }

    /// Digests all logs and removes all inodes that wait for it, as the background thread does.
    pub fn tidy(&self) {
        self.core.tidy_wanted(true);
    }

    /// Makes logs ready for sessions to come, as the background thread does.
    pub fn make_ready_logs(&self) {
        self.core.make_ready_logs();
    }

    /// Numbers of the sessions that live.
    pub fn sessions(&self) -> Vec<u64> {
        self.core.state.lock().sessions.keys().map(|id| id.0).collect()
    }

    /// Sessions that were ended by force; only the newest are remembered.
    pub fn terminations(&self) -> Vec<Termination> {
        self.core.state.lock().terminations.iter().cloned().collect()
    }

    /// Why the daemon stopped; `None` while it runs.
    pub fn failure(&self) -> Option<String> {
        if let Some(why) = self.core.abandoned.get() {
            return Some(why.clone());
        }
        // The first error that was noticed may be a consequence that names no file.
        let lost = self.lost().map(|name| Error::Lost(name).to_string());
        lost.or_else(|| self.core.state.lock().failure.clone())
    }

    /// The file of the pool that was lost while the daemon ran, if that is why it stopped.
    pub fn lost(&self) -> Option<String> {
        self.core.lost()
    }

    /// Whether a daemon that is started after the failure finds the whole pool: true if a file was lost, the medium had
    /// no space for a segment, or this process had no free descriptor. After other failures of the medium the state of
    /// the pool is unknown.
    pub fn may_be_followed(&self) -> bool {
        self.lost().is_some() || self.core.state.lock().lacks
    }

    /// Whether the medium lacks space that the pool should hold: writes that need new blocks may get `NoSpace`.
    pub fn lacks_space(&self) -> bool {
        self.core.lacks_space()
    }

    /// Waits until the daemon has stopped, possibly for ever; gives the reason.
    pub fn until_failure(&self) -> String {
        loop {
            // Acquire: pairs with the Release of `tell_failure`.
            if self.core.failed.load(Ordering::Acquire) != 0
                && let Some(failure) = self.failure()
            {
                return failure;
            }
            self.core.host.wait(&self.core.failed, 0, None);
        }
    }

    /// How full the area is.
    pub fn usage(&self) -> Usage {
        self.core.state.lock().copy.free.usage
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// The host that everything runs on.
    pub fn host(&self) -> &Arc<dyn Host> {
        &self.core.host
    }

    /// Digests and ends every session, then ends all threads.
    pub fn stop(&self) {
        // A session that began after the list below is read would count as digested without being it.
        self.core.state.lock().closing = true;
        for session in self.sessions() {
            self.core.terminate(SessionId(session), TerminationReason::Stopping);
        }
        self.core.generations.end();
        // Release: pairs with the Acquire in `background` and in the listener thread.
        self.core.ending.store(1, Ordering::Release);
        self.core.copies.all().iter().for_each(|copy| copy.wake());
        self.core.announce_work();
        self.core.stop_parking();
        self.core.bell.ring();
        self.core.wake_listener();
        loop {
            // Acquire: pairs with the Release of a thread's end.
            let running = self.core.threads.load(Ordering::Acquire);
            if running == 0 {
                return self.core.remove_ready_logs();
            }
            self.core.host.wait(&self.core.threads, running, None);
        }
    }
}

/// Counts a thread for as long as it runs, however it ends.
struct Running(Arc<Core>);

impl Drop for Running {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `Daemon::stop`.
        self.0.threads.fetch_add(u32::MAX, Ordering::Release);
        self.0.host.wake(&self.0.threads, WAKE_ALL);
    }
}

impl Core {
    /// Starts a thread; [`Daemon::stop`] waits for its end.
    pub fn spawn(self: &Arc<Self>, name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        self.threads.fetch_add(1, Ordering::Relaxed);
        let running = Running(self.clone());
        self.host.spawn(
            name,
            Box::new(move || {
                let _running = running;
                body();
            }),
        )?;
        Ok(())
    }

    fn serve_apart(self: &Arc<Self>, session: SessionId) -> Result<(), Error> {
        let core = self.clone();
        self.spawn("session", move || core.serve(session))
    }
}
