//! The state that one lock protects, and the steps under it: changes of tables, entries of the ledger, grants of leases
//! and their ends.
//!
//! Lock order: the area's lock, held by the thread that prepares a commit, then the state's ([`ipc::Lock`]). Under the
//! state's, only locks of the medium are taken (the test medium's, and those of the guard over mapped files). No lock
//! is held across a wait for another call; the state's is held across no commit and no sync either while the daemon
//! serves ([`crate::commits`]).

use crate::config::Config;
use crate::counted_copies::Copies;
use crate::detached::DetachedSessions;
use crate::error::Error;
use crate::generations::Generations;
use crate::import::TreeSent;
use crate::lock_questions::Questions;
use crate::locks::{Bell, Locks};
use crate::pace::Pace;
use crate::pool_space::Holding;
use crate::ready::ReadyLog;
use crate::recalls::Recalls;
use crate::references::References;
use crate::register::Register;
use crate::repair::Repaired;
use crate::replay::copy::LocalCopy;
use crate::replay::table::Grant;
use crate::room::Room;
use crate::session::{HeldLease, Phase, Session};
use crate::sync::{ParkedCall, Parking};
use mirror::logs::is_log_file;

use area::Area;
use ccnvm::{Effect, Event, Leases, Limits, LockLeases, Mode, Nanoseconds, SessionId, Ticket, Want};
use format::call::RENAME_UNIT;
use format::call::Status;
use format::ledger::{RIGHT_CONTENTS, RIGHT_WRITE, Unit};
use format::session::WORD_OWN_RANGE;
use format::{InodeNumber, LeaseVersion, Life, LogUid, PoolUid};
use ipc::Digested;
use ipc::host::{Host, WAKE_ALL};
use ipc::lock::Lock;
use ipc::socket::Connection;
use ipc::sync::{LongWord, Ordering, Word};
use pmem::Medium;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, OnceLock};

/// Numbers that are given out once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbers {
    pub next_inode: InodeNumber,
    pub next_log: LogUid,
}

impl Numbers {
    /// The first ones of a life.
    pub fn of_life(life: Life) -> Self {
        Self { next_inode: InodeNumber::first_of(life), next_log: LogUid::first_of(life) }
    }

    /// A log's number.
    pub fn take_log(&mut self) -> LogUid {
        let log = self.next_log;
        self.next_log = log.next();
        log
    }
}

/// A lease to be revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Revocation {
    pub session: SessionId,
    pub unit: InodeNumber,
    pub version: LeaseVersion,
}

/// A session that was terminated, and why: for status and tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Termination {
    /// The session.
    pub session: u64,
    /// Its user.
    pub uid: u32,
    /// The reason, for people to read.
    pub reason: String,
}

/// Terminations that are remembered.
const TERMINATIONS_MAX: usize = 64;

/// The state that the lock protects.
pub(crate) struct State {
    /// The tree, the ledger and the logs.
    pub copy: LocalCopy,
    pub leases: Leases,
    pub sessions: BTreeMap<SessionId, Session>,
    /// Users of sessions that are being made and not in the table yet, by the logs that were drawn for them.
    pub coming: BTreeMap<LogUid, u32>,
    /// Logs for future sessions.
    pub ready: VecDeque<ReadyLog>,
    /// Sessions by the first inode of their range.
    pub ranges: BTreeMap<InodeNumber, SessionId>,
    pub references: References,
    pub room: Room,
    pub numbers: Numbers,
    pub revocations: VecDeque<Revocation>,
    /// Leases that sessions are asked for that must answer.
    pub recalls: Recalls,
    /// Requests for leases that were answered, and whose answers were not fetched yet.
    pub outcomes: BTreeMap<Ticket, Result<(), Status>>,
    pub next_ticket: u64,
    /// When the table of leases must be called again.
    pub wake_at: Option<Nanoseconds>,
    /// Inodes without a name and without references.
    pub reapable: VecDeque<InodeNumber>,
    /// Inodes that the next commits remove.
    pub reaping: BTreeSet<InodeNumber>,
    pub terminations: VecDeque<Termination>,
    /// Logs of sessions that were repaired from a copy; only the newest.
    pub repaired: VecDeque<Repaired>,
    /// The state of former sessions, kept for their successors.
    pub detached: DetachedSessions,
    pub locks: Locks,
    /// Which sessions decide the locks on which inodes.
    pub lock_leases: LockLeases,
    /// The entries for the next daemon.
    pub register: Register,
    /// Inodes without a name that a successor may have open and has not reported yet.
    pub kept: Vec<InodeNumber>,
    /// The failure of medium or tree that stopped the daemon.
    pub failure: Option<String>,
    /// The cause was a lack of space on the medium, or of descriptors.
    pub lacks: bool,
    /// The cause was a lack of space: the medium of the pool is full.
    pub is_full: bool,
    /// The daemon ends: no session begins any more.
    pub closing: bool,
}

/// The daemon: the parts that need no lock, and the lock.
pub(crate) struct Core {
    pub host: Arc<dyn Host>,
    pub medium: Medium,
    pub pool: PoolUid,
    pub config: Config,
    pub generations: Arc<Generations>,
    /// The machine can fence the threads of other processes: a commit needs no fence of its own.
    pub fences: bool,
    pub state: Lock<State>,
    /// The area, for the thread that prepares its next commit. Only the thread that holds this lock closes a log or
    /// replaces its file.
    pub area: Lock<Area>,
    /// The session whose log is in the batch in preparation; 0 for none.
    pub batch_of: LongWord,
    /// Grows when a batch of a log ends, for the calls that wait for the digest of that log.
    pub batches: Word,
    /// Requests that came through rings.
    pub requests: LongWord,
    /// Calls that wait for the area, except for the digest of that log: the batch ends soon for them.
    pub batch_awaited: Word,
    /// Calls that wait for a lock.
    pub questions: Lock<Questions>,
    /// Calls that wait for the medium.
    pub parking: Lock<Parking>,
    /// Grows when a call begins to wait for the medium.
    pub parked: Word,
    /// Held by the thread that syncs the ledger. A thread that waited for it may find the ledger synced.
    pub syncing: Lock<()>,
    /// The copies on other nodes.
    pub copies: Copies,
    /// How the pool holds space. The locks of the state and of the area are not taken under it, except by trying.
    pub holding: Lock<Holding>,
    /// Held by the thread that sends the tree to a member: the members that need the whole tree next time.
    pub importing: Lock<BTreeSet<format::NodeId>>,
    /// Sync calls that wait until there are enough copies.
    pub kept_calls: Lock<Vec<ParkedCall>>,
    /// The pace of writers meanwhile.
    pub pace: Pace,
    /// How far that is, for status reports.
    pub tree_sent: Lock<Option<TreeSent>>,
    /// Signalled when a lock was granted.
    pub bell: Arc<Bell>,
    /// Grows whenever a request for leases may have been answered or a session ended.
    pub events: Word,
    /// Grows when there is work for the background thread; [`crate::daemon`] says how it ends.
    pub work: Word,
    /// 1 when [`State::failure`] must be reported.
    pub failed: Word,
    /// 1 when the daemon is to end.
    pub ending: Word,
    /// Threads that run.
    pub threads: Word,
    /// 1 once there are threads in the background.
    pub started: Word,
    /// Tells whether data may be cached elsewhere under leases whose session has ended.
    pub caches: OnceLock<CacheWatch>,
    /// Wakes the listener thread, once there is one.
    pub listener_bell: OnceLock<Arc<Connection>>,
    /// Why the daemon was abandoned: see [`crate::Daemon::abandon`].
    pub abandoned: OnceLock<String>,
}

/// Tells whether data may be cached elsewhere under leases of this node: see [`crate::Daemon::watch_caches`].
pub type CacheWatch = Box<dyn Fn() -> bool + Send + Sync>;

impl Core {
    /// Makes every waiting thread check again.
    pub fn announce_events(&self) {
        // Release: pairs with the Acquire of the waiting threads, which take the lock anyway.
        self.events.fetch_add(1, Ordering::Release);
        self.host.wake(&self.events, WAKE_ALL);
    }

    /// Tells the background thread that there is work.
    pub fn announce_work(&self) {
        // Release: as above.
        self.work.fetch_add(1, Ordering::Release);
        self.host.wake(&self.work, WAKE_ALL);
    }

    /// The first file of the pool that was lost while the daemon ran. A user may cut their own log, which only ends its
    /// session.
    pub fn lost(&self) -> Option<String> {
        self.medium.lost(|name| !is_log_file(name))
    }

    /// Whether the daemon still runs. If a file of the pool was lost it stops. The ledger and the register are not
    /// synced otherwise, so this is checked before every answer that depends on their entries.
    pub fn goes_on(&self) -> bool {
        if self.abandoned.get().is_some() {
            return false;
        }
        let Some(name) = self.lost() else { return true };
        self.state.lock().stop(&Error::Lost(name));
        self.tell_failure();
        false
    }

    /// Notifies the thread that waits for the daemon to stop.
    pub fn tell_failure(&self) {
        // Release: pairs with the Acquire in `Daemon::until_failure`.
        self.failed.store(1, Ordering::Release);
        self.host.wake(&self.failed, WAKE_ALL);
        self.announce_events();
    }
}

impl State {
    /// A state without sessions, with the data that former ones left.
    pub fn new(
        copy: LocalCopy,
        config: &Config,
        (detached, references): (DetachedSessions, References),
        (locks, register): (Locks, Register),
        kept: Vec<InodeNumber>,
    ) -> Self {
        let limits = Limits {
            hold_min_ns: u64::try_from(config.hold_min.as_nanos()).unwrap_or(u64::MAX),
            leases_max: config.lease_words as usize,
            ..Limits::default()
        };
        let life = copy.ledger.life();
        Self {
            copy,
            leases: Leases::new(limits, LeaseVersion::first_of(life)),
            sessions: BTreeMap::new(),
            coming: BTreeMap::new(),
            ready: VecDeque::new(),
            ranges: BTreeMap::new(),
            references,
            room: Room::new(config.room_reserve, config.replace_reserve()),
            numbers: Numbers::of_life(life),
            revocations: VecDeque::new(),
            recalls: Recalls::default(),
            outcomes: BTreeMap::new(),
            next_ticket: 1,
            wake_at: None,
            reapable: VecDeque::new(),
            reaping: BTreeSet::new(),
            detached,
            locks,
            lock_leases: LockLeases::new(config.lock_limits),
            register,
            kept,
            terminations: VecDeque::new(),
            repaired: VecDeque::new(),
            failure: None,
            lacks: false,
            is_full: false,
            closing: false,
        }
    }

    /// A session that is alive.
    ///
    /// # Errors
    /// `Sealed`; `Media` if the daemon stopped.
    pub fn live(&mut self, id: SessionId) -> Result<&mut Session, Status> {
        if self.is_stopped() {
            return Err(Status::Media);
        }
        if self.sessions.get(&id).is_some_and(|session| session.open_files_unknown) {
            self.sync_successor(id);
        }
        let session = self.sessions.get_mut(&id).filter(|session| session.phase == Phase::Live);
        let session = session.ok_or(Status::Sealed)?;
        session.resume_unacknowledged = false;
        Ok(session)
    }

    /// Passes a result on; a failure of medium or tree stops the daemon.
    pub fn guard<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &result {
            self.stop(error);
        }
        result
    }

    /// Stops the daemon; the first reason is kept.
    pub fn stop(&mut self, why: &Error) {
        if self.failure.is_none() {
            self.failure = Some(why.to_string());
            self.lacks = why.is_shortage();
            self.is_full = why.is_no_space();
        }
    }

    /// Stops the daemon if the error is a failure of its pool, and not of a copy or of a lack that passes.
    pub fn stop_if_failed(&mut self, why: &Error) {
        if why.is_failure() {
            self.stop(why);
        }
    }

    /// Whether the daemon has stopped.
    pub fn is_stopped(&self) -> bool {
        self.failure.is_some()
    }

    pub fn note_termination(&mut self, session: SessionId, uid: u32, reason: String) {
        if self.terminations.len() == TERMINATIONS_MAX {
            self.terminations.pop_front();
        }
        self.terminations.push_back(Termination { session: session.0, uid, reason });
    }

    pub fn note_repaired(&mut self, repaired: Repaired) {
        if self.repaired.len() == TERMINATIONS_MAX {
            self.repaired.pop_front();
        }
        self.repaired.push_back(repaired);
    }

    /// How far a session's log is digested into the area.
    pub fn digested_of(&self, id: SessionId) -> Digested {
        self.copy.digested(LogUid::new(id.0))
    }

    /// The session whose own range holds the inode.
    pub fn owner_of(&self, inode: InodeNumber) -> Option<SessionId> {
        let (_, id) = self.ranges.range(..=inode).next_back()?;
        self.sessions.get(id).is_some_and(|session| session.in_range(inode)).then_some(*id)
    }

    /// Whether the session holds the inode because it made it.
    pub fn is_own(&self, id: SessionId, inode: InodeNumber) -> bool {
        let log = LogUid::new(id.0);
        self.copy.ledger.table().log(log).is_some_and(|log| log.is_own(inode))
    }

    /// Whether a session holds a lease that is at least as strong, and is not about to lose it.
    pub fn holds(&self, id: SessionId, want: Want) -> bool {
        let Some(session) = self.sessions.get(&id) else { return false };
        match session.held.get(&want.unit) {
            Some(held) => held.mode >= want.mode && !held.leaving,
            None => self.is_own(id, want.unit),
        }
    }

    /// Whether the table of leases says that a session holds a unit, or held it until just now.
    pub fn is_in_table(&self, id: SessionId, unit: InodeNumber) -> bool {
        self.sessions.get(&id).is_some_and(|session| session.held.contains_key(&unit))
    }

    /// Adds an inode to the table of leases as held by the session that made it. The session may be ending, with its
    /// last records digested only now: a request waits for its end, as for any lease of a session that ends.
    pub fn introduce(&mut self, now: Nanoseconds, unit: InodeNumber) {
        let Some(owner) = self.owner_of(unit).filter(|owner| self.is_own(*owner, unit)) else { return };
        let session = self.sessions.get_mut(&owner).expect("the owner of a range lives");
        if session.held.contains_key(&unit) {
            return;
        }
        let version = session.version;
        let held = HeldLease {
            mode: Mode::Write,
            version,
            word: WORD_OWN_RANGE,
            expected: session.own_expected(),
            ledger: session.opened,
            leaving: false,
        };
        session.held.insert(unit, held);
        let effects = self.leases.step(now, Event::Created { session: owner, unit, version });
        assert!(effects.is_empty(), "what nobody knew of nobody waits for");
    }

    /// Applies the decisions of the table of leases, except for revocations and recalls, which are queued. The ledger
    /// has room for the entries.
    pub fn absorb(&mut self, effects: Vec<Effect>) -> Result<(), Error> {
        for effect in effects {
            match effect {
                Effect::Grant { ticket, session, grants } => {
                    for (want, version) in grants {
                        self.grant(session, want, version)?;
                    }
                    self.outcomes.insert(ticket, Ok(()));
                }
                Effect::Refuse { ticket } => {
                    self.outcomes.insert(ticket, Err(Status::Limit));
                }
                Effect::Revoke { session, unit, version } => {
                    self.revocations.push_back(Revocation { session, unit, version });
                }
                Effect::Recall { session, unit, version } => self.recalls.ask(session, unit, version),
                Effect::End { session, unit, version } => {
                    self.recalls.answered(session, unit, version);
                    self.end_lease(session, unit, version)?;
                }
                Effect::WakeAt(at) => {
                    self.wake_at = Some(self.wake_at.map_or(at, |other| other.min(at)));
                }
            }
        }
        Ok(())
    }

    fn grant(&mut self, id: SessionId, want: Want, version: LeaseVersion) -> Result<(), Error> {
        let unit = want.unit;
        let Some(session) = self.sessions.get(&id) else { return Ok(()) };
        if session.held.get(&unit).is_some_and(|held| held.version == version) {
            return Ok(());
        }
        // A session's claims about its log are believed only to its own disadvantage.
        let log = session.log;
        let from = session.shared.committed().max(self.copy.digested(log).sequence);
        let mut ledger = format::Sequence::default();
        if want.mode == Mode::Write {
            let writes = self.may_write_next(id, unit);
            let rights = RIGHT_WRITE | if writes { RIGHT_CONTENTS } else { 0 };
            ledger = self.copy.ledger.grant(log, unit_of(unit), Grant { version, from, rights })?;
        }
        let session = self.sessions.get_mut(&id).expect("looked up above");
        session.right = session.right.max(ledger);
        let (word, expected) = session.grant_word(unit, want.mode);
        let held = HeldLease { mode: want.mode, version, word, expected, ledger, leaving: false };
        session.held.insert(unit, held);
        Ok(())
    }

    fn end_lease(&mut self, id: SessionId, unit: InodeNumber, version: LeaseVersion) -> Result<(), Error> {
        let Some(session) = self.sessions.get_mut(&id) else { return Ok(()) };
        let Some(held) = session.held.remove(&unit) else { return Ok(()) };
        session.end_word(held.word);
        let (log, live) = (session.log, session.phase == Phase::Live);
        if held.word == WORD_OWN_RANGE
            && (session.shared.client.is_open(unit) || self.references.rights(id, unit).is_some())
        {
            self.keep_made(id, unit);
        }
        // When a session ends, the end of its log in the ledger also ends its leases.
        if held.mode == Mode::Write && live {
            let digested = self.copy.digested(log).sequence;
            self.copy.ledger.end(log, unit_of(unit), version, digested)?;
        }
        Ok(())
    }

    /// Whether the caller may read the contents of an inode of the area.
    pub fn may_read(&self, id: SessionId, inode: InodeNumber, item: &format::node::InodeItem) -> bool {
        let Some(session) = self.sessions.get(&id) else { return false };
        let found = crate::replay::authorize::attributes(inode, item);
        session.caller.owns(&found)
            || vfs::access::permits(&session.caller, &found, vfs::access::READ)
            || session.known.get(&inode).is_some_and(|known| known.readable || known.made)
            || self.references.rights(id, inode).is_some_and(|rights| rights.read)
    }
}

/// The ledger's name for a unit of leases.
pub(crate) fn unit_of(unit: InodeNumber) -> Unit {
    if unit == RENAME_UNIT { Unit::RENAME } else { Unit::inode(unit) }
}
