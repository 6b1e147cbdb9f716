//! The state of a LibFS under its one lock: session, caches, open files; and the only way in which a record is
//! committed (Assise §3.2.1, §3.3; schedules 1.2, 1.6, 2.3).
//!
//! An attempt takes its leases by [`State::hold`], decides by the state cached under them, and appends by
//! [`State::append`]: enter, check all lease words, store the frame and a fence, store the commit word, check the seal,
//! leave. The changes that it then makes in the caches cannot fail.

use crate::doubt::AttemptResources;
use crate::engine::Limits;
use crate::entry_cache::EntryCount;
use crate::error::Error;
use crate::files::OpenFile;
use crate::files_ahead::FilesAhead;
use crate::lease_cache::LeaseCount;
use crate::local_locks::LocalLocks;
use crate::log_memory::LogMemory;
use crate::losses::Losses;
use crate::need::{Need, RecordCost, Step, Stop};
use crate::nodes::{Mix, NodeIndex, Nodes};
use crate::outside::Outside;
use crate::overlay::Pool;
use crate::purging::DirtyNodes;
use crate::records::Header;
use crate::releases::PendingRelease;
use crate::session::{Attachment, Link};
use crate::words::{GrantedLease, SharedWords, open_places};
use format::call::LEASE_READ;
use format::checksum::Salt;
use format::envelope::frame_bytes;
use format::session::{WORD_OWN_RANGE, Welcome};
use format::{BLOCK_BYTES, InodeNumber, SegmentId, Sequence};
use ipc::Host;
use ipc::sync::LongWord;
use ipc::words::{FenceBy, Seal};
use pmem::ring::{AppendError, AppendRing, Appended, RingPosition};
use pmem::{ReadMapping, Region, Source};
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::sync::Arc;
use vfs::Caller;
use vfs::engine::Attributes;

/// One session: its parameters and its log.
pub(crate) struct Session {
    pub welcome: Welcome,
    pub credential: Caller,
    pub link: Arc<dyn Link>,
    pub words: Arc<SharedWords>,
    pub ring: AppendRing,
    /// The first record that is still in the log. Readers that copy without the lock compare it.
    pub released: Arc<LongWord>,
    /// Mapped segments; none for a segment that may not be mapped.
    pub segments: HashMap<SegmentId, Option<Arc<ReadMapping>>, BuildHasherDefault<Mix>>,
    /// The generation of the own-range word at which the list of ended inodes was last read.
    own_generation: Option<u32>,
    ended_seen: u64,
    pub next_inode: u64,
    pub inodes_left: u64,
    /// Reserved blocks that are left.
    pub room: u64,
    /// Those that are left only for records that replace blocks.
    pub room_to_replace: u64,
    /// A request for space for any record was refused: so many requests for records that replace blocks come before the next
    /// one.
    pub full_for: u32,
    /// All blocks reserved since the session began.
    pub room_granted: u64,
    /// The reservation may be used for other users' files too.
    pub room_is_shared: bool,
    /// The newest ledger entry on which a lease in use depends.
    pub ledger_newest: Sequence,
    /// The caches have no state of own records up to this one, once `purging` is over.
    pub purged: Sequence,
    /// The end of the log's space that is free once no cache has state of the records before it.
    pub purging: Option<RingPosition>,
    /// Bytes of the log's file that have space.
    pub log_bytes: u64,
    /// The most that it gets.
    pub log_bytes_max: u64,
    /// The last request for more space was refused.
    pub log_refused: bool,
    /// The last record up to which a digest was asked for; the next digest is asked for only after it.
    pub digest_asked: Sequence,
    /// A writer pauses when the log has less free space than this.
    pub pause_below: u64,
    /// How much of the log's memory is ready.
    pub memory: LogMemory,
}

impl Session {
    /// Creates a session from an attachment.
    ///
    /// # Errors
    /// `Ipc`: a mapping is too small. `Response`: the log has no space for records.
    pub fn new(host: &dyn Host, limits: &Limits, attachment: Attachment) -> Result<Self, Error> {
        let Attachment { welcome, credential, log, session, leases, generations, link } = attachment;
        let fences = welcome.fences.get() == 1 && host.accept_fences();
        let fence = if fences { FenceBy::Revoker } else { FenceBy::Operation };
        let words = SharedWords::new(&session, &leases, &generations, welcome.lease_words.get(), fence)?;
        let log_bytes = welcome.log_bytes.get().min(log.bytes());
        let log_bytes_max = welcome.log_bytes_max.get().min(limits.log_bytes_max).min(log.bytes());
        let log_bytes_max = log_bytes_max.max(log_bytes);
        let memory = LogMemory::begin(&log, log_bytes);
        let ring = empty_ring(log, &welcome, log_bytes)?;
        Ok(Self {
            own_generation: words.own_range(),
            ended_seen: 0,
            words: Arc::new(words),
            credential,
            link,
            ring,
            released: Arc::new(LongWord::new(1)),
            segments: HashMap::default(),
            next_inode: welcome.first_inode.get(),
            inodes_left: welcome.inodes.get(),
            room: welcome.room_blocks.get(),
            room_to_replace: 0,
            full_for: 0,
            room_granted: 0,
            room_is_shared: welcome.uid.get() == 0,
            ledger_newest: Sequence::new(welcome.ledger.get()),
            purged: Sequence::new(0),
            purging: None,
            digest_asked: Sequence::new(0),
            pause_below: 0,
            memory,
            log_bytes,
            log_bytes_max,
            log_refused: false,
            welcome,
        })
    }

    /// Whether a request for space for any record was refused a short time ago. A refusal takes tens of milliseconds.
    pub fn is_full(&self) -> bool {
        self.full_for > 0
    }

    /// Whether the reservation is enough for a record.
    #[inline]
    pub fn has_room(&self, cost: RecordCost) -> bool {
        self.room >= cost.blocks || (cost.replaces && self.room + self.room_to_replace >= cost.blocks)
    }

    /// Takes the cost of a record from the reservation, which is enough.
    #[inline]
    fn take_room(&mut self, cost: RecordCost) {
        let from_room = if self.room >= cost.blocks {
            cost.blocks
        } else {
            cost.blocks.saturating_sub(self.room_to_replace)
        };
        self.room -= from_room;
        self.room_to_replace -= cost.blocks - from_room;
    }

    /// The lease on a new inode of the preallocated range; none if the whole range was revoked.
    fn own_lease(&self) -> Option<GrantedLease> {
        self.own_generation.map(|_| GrantedLease { word: WORD_OWN_RANGE, generation: 0, write: true })
    }

    /// Whether a lease is held now. A lease of the preallocated range is held as long as the list of ended inodes has
    /// not grown; otherwise the list is read.
    #[inline]
    pub fn holds(&self, held: &GrantedLease) -> bool {
        if held.word == WORD_OWN_RANGE {
            self.own_generation.is_some() && self.words.own_range() == self.own_generation
        } else {
            self.words.holds(held)
        }
    }
}

/// The ring of a log file without frames, of which the first `log_bytes` bytes have space.
///
/// # Errors
/// `Response`: the file is too short.
fn empty_ring(log: Region, welcome: &Welcome, log_bytes: u64) -> Result<AppendRing, Error> {
    if log_bytes < 2 * BLOCK_BYTES as u64 {
        return Err(Error::Response);
    }
    let salt = Salt::of_log(welcome.log, welcome.incarnation);
    let mut ring = AppendRing::empty(log, BLOCK_BYTES as u64, salt, Sequence::new(1));
    ring.use_up_to(log_bytes);
    Ok(ring)
}

/// The need of an attempt without a session.
#[cold]
fn no_session() -> Stop {
    Need::Attach.into()
}

/// All state that the lock protects.
pub(crate) struct State {
    pub host: Arc<dyn Host>,
    pub session: Option<Session>,
    /// The former session, or the last one if there is none now, which a new one continues; 0 for none.
    pub former: u64,
    /// The last valid records of the logs of dead daemons; later records are not valid.
    pub recovered: VecDeque<(u64, Sequence)>,
    /// Files with records that were lost.
    pub losses: Losses,
    /// That session. Its words show whether its daemon will be restarted. Its connection stays open, so that the
    /// session does not end before another one continues it.
    pub last: Option<(Arc<SharedWords>, Arc<dyn Link>)>,
    /// The last record of the present attempt; 0 for none.
    pub appended: Sequence,
    /// The last record before those of the present attempt, if it has any.
    pub before: Sequence,
    /// The log was still being sealed when the wait for the cut ended: the next session learns whether the record is
    /// valid.
    pub cut_unknown: bool,
    /// The file and the pin that the present attempt took with that record or after it.
    pub taken: AttemptResources,
    /// Number of the session. Answers to calls of an earlier session are dropped.
    pub era: u64,
    pub nodes: Nodes,
    pub pool: Pool,
    pub files: Vec<Option<OpenFile>>,
    pub files_free: Vec<u32>,
    pub files_max: usize,
    pub serial: u32,
    /// Number of changes of the process's user.
    pub user: u32,
    pub open_places: Vec<u16>,
    /// Position in `files` at which the next search for a listed file begins.
    pub listed_hand: usize,
    pub dirty: DirtyNodes,
    /// References to release.
    pub releases: Vec<PendingRelease>,
    /// Inodes whose reference or lease is being released.
    pub giving_back: Vec<InodeNumber>,
    /// Leases that are held for a cache outside the engine.
    pub outside: Outside,
    /// Position at which the next search for unused nodes begins.
    pub hand: usize,
    /// The next search begins only above this number of nodes.
    pub trim_above: usize,
    /// Leases on which the present attempt relies.
    pub(crate) used: Vec<NodeIndex>,
    /// An upper bound for the number of leases with words.
    pub leases: LeaseCount,
    /// Locks that this process decides.
    pub locks: LocalLocks,
    /// An upper bound for the number of directory entries.
    pub entries: EntryCount,
    pub(crate) files_ahead: FilesAhead,
    /// More than half of the log is in use, or so much that the writer pauses; or more of its memory has to be made ready.
    pub half_full: bool,
    last_time_ns: i64,
}

impl State {
    pub fn new(host: Arc<dyn Host>, files_max: usize) -> Self {
        Self {
            host,
            session: None,
            former: 0,
            recovered: VecDeque::new(),
            losses: Losses::default(),
            last: None,
            taken: (None, None),
            appended: Sequence::new(0),
            before: Sequence::new(0),
            cut_unknown: false,
            era: 0,
            nodes: Nodes::default(),
            pool: Pool::default(),
            files: Vec::new(),
            files_free: Vec::new(),
            files_max,
            serial: 0,
            user: 0,
            open_places: open_places(),
            listed_hand: 0,
            dirty: DirtyNodes::default(),
            releases: Vec::new(),
            giving_back: Vec::new(),
            outside: Outside::default(),
            hand: 0,
            trim_above: 0,
            used: Vec::new(),
            leases: LeaseCount::default(),
            locks: LocalLocks::default(),
            entries: EntryCount::default(),
            files_ahead: FilesAhead::default(),
            half_full: false,
            last_time_ns: 0,
        }
    }

    /// Begins an attempt. While the daemon is alive, state cached under held leases is current, so an attempt that
    /// appends nothing may return it. Ends a session whose daemon is dead.
    #[inline]
    pub fn begin(&mut self) {
        self.used.clear();
        self.appended = Sequence::new(0);
        self.cut_unknown = false;
        if self.session.as_ref().is_some_and(|session| !session.words.is_alive()) {
            self.end_session();
        }
    }

    /// The session.
    #[inline]
    pub fn session(&mut self) -> Step<&mut Session> {
        self.session.as_mut().ok_or_else(no_session)
    }

    /// An inode to which the caller has walked.
    pub fn pinned(&mut self, inode: InodeNumber) -> Step<NodeIndex> {
        match self.nodes.find(inode) {
            Some(index) if self.nodes.get(index).pins > 0 => Ok(index),
            None if self.nodes.is_pinned_apart(inode) => Ok(self.nodes.enter(inode)),
            _ => Err(vfs::Error::Stale.into()),
        }
    }

    /// Requires a lease; the attempt is valid only while it is held.
    #[inline]
    pub fn hold(&mut self, index: NodeIndex, mode: u8) -> Step<()> {
        if self.holds(index, mode)? {
            self.used.push(index);
            self.nodes.get_mut(index).recent = true;
            return Ok(());
        }
        Err(self.lacks(index, mode))
    }

    /// Requires several leases, which are requested together.
    pub fn hold_all(&mut self, wanted: &[(NodeIndex, u8)]) -> Step<()> {
        let mut all = true;
        for (index, mode) in wanted {
            all &= self.holds(*index, *mode)?;
        }
        if all {
            for (index, _) in wanted {
                self.used.push(*index);
                self.nodes.get_mut(*index).recent = true;
            }
            return Ok(());
        }
        let units = wanted.iter().map(|(index, mode)| (self.nodes.get(*index).inode, *mode));
        Err(Need::Leases(units.collect()).into())
    }

    /// Whether a lease is held now; drops the state that was cached under a lost one.
    #[inline]
    pub fn holds(&mut self, index: NodeIndex, mode: u8) -> Step<bool> {
        let session = self.session.as_ref().ok_or_else(no_session)?;
        match self.nodes.get(index).lease {
            Some(held) if session.holds(&held) => Ok(held.write || mode == LEASE_READ),
            Some(held) => self.holds_still(index, &held, mode),
            None => Ok(false),
        }
    }

    /// The same, after dropping the state that was cached under the lost lease.
    #[cold]
    fn holds_still(&mut self, index: NodeIndex, lost: &GrantedLease, mode: u8) -> Step<bool> {
        if lost.word == WORD_OWN_RANGE {
            self.take_in_ended();
        } else {
            self.nodes.get_mut(index).lose(&mut self.pool);
        }
        let session = self.session.as_ref().ok_or_else(no_session)?;
        Ok(match self.nodes.get(index).lease {
            Some(held) => session.holds(&held) && (held.write || mode == LEASE_READ),
            None => false,
        })
    }

    /// The own-range word has changed: some or all leases on inodes of the range have ended.
    fn take_in_ended(&mut self) {
        let Some(session) = self.session.as_mut() else { return };
        // The word is read before the list: a later addition to the list changes the word again.
        let generation = session.words.own_range();
        let count = session.words.ended_count();
        let mut all = generation.is_none();
        for index in session.ended_seen..count {
            match session.words.ended(index) {
                Some(inode) => {
                    if let Some(index) = self.nodes.find(inode) {
                        let node = self.nodes.get_mut(index);
                        if node.lease.is_some_and(|held| held.word == WORD_OWN_RANGE) {
                            node.lose(&mut self.pool);
                        }
                    }
                }
                None => all = true,
            }
        }
        session.ended_seen = count;
        session.own_generation = if all { None } else { generation };
        if all {
            for index in self.nodes.indices() {
                let node = self.nodes.get_mut(index);
                if node.lease.is_some_and(|held| held.word == WORD_OWN_RANGE) {
                    node.lose(&mut self.pool);
                }
            }
        }
    }

    /// Whether all leases of the attempt are still held; then its result was true at this instant.
    pub fn validate(&self) -> Step<()> {
        if self.used.is_empty() {
            return Ok(());
        }
        let session = self.session.as_ref().ok_or(Stop::Need(Need::Attach))?;
        let held = |index: &NodeIndex| self.nodes.get(*index).lease.is_some_and(|held| session.holds(&held));
        if self.used.iter().all(held) { Ok(()) } else { Err(Need::Again.into()) }
    }

    /// The time of a record on these nodes: not earlier than any change that they contain.
    #[inline]
    pub fn time(&mut self, nodes: &[NodeIndex]) -> i64 {
        let seen = nodes.iter().map(|index| self.nodes.get(*index).item.ctime_ns.get());
        let time = seen.fold(self.host.wall_tick().max(self.last_time_ns), i64::max);
        self.last_time_ns = time;
        time
    }

    /// The era, and how far own records are in the area and in no cache.
    pub fn purged(&self) -> (u64, Sequence) {
        (self.era, self.session.as_ref().map_or(Sequence::new(0), |session| session.purged))
    }

    /// Appends and commits a record that adds no data and costs so many blocks. An error means that it had no effect.
    #[inline]
    pub fn append(&mut self, header: Header, payload: &[Source<'_>], blocks: u64) -> Step<Appended> {
        self.append_and(header, payload, RecordCost::replacing(blocks), |_, _| ())
    }

    /// [`Self::append`], and changes the caches before the commit, so before another process can see the record. If it
    /// fails, the session is over; its cached state and the taken file and pin are dropped.
    #[inline]
    pub fn append_and(
        &mut self,
        header: Header,
        payload: &[Source<'_>],
        cost: RecordCost,
        apply: impl FnOnce(&mut Self, &Appended),
    ) -> Step<Appended> {
        let session = self.session.as_mut().ok_or_else(no_session)?;
        if !session.has_room(cost) {
            return Err(Need::Room(cost).into());
        }
        let entered = session.words.enter();
        let held = |index: &NodeIndex| self.nodes.get(*index).lease.is_some_and(|held| session.holds(&held));
        if !self.used.iter().all(held) {
            session.words.leave(entered);
            return Err(Need::Again.into());
        }
        let before = session.last();
        let appended = match session.ring.append(header, payload) {
            Ok(appended) => appended,
            Err(error) => {
                session.words.leave(entered);
                return Err(match error {
                    AppendError::Full => {
                        let payload_bytes: u64 = payload.iter().map(|part| part.bytes() as u64).sum();
                        Need::LogSpace(frame_bytes(payload_bytes)).into()
                    }
                    AppendError::Fault => vfs::Error::BadAddress.into(),
                });
            }
        };
        if self.appended == Sequence::new(0) {
            self.before = before;
        }
        (self.appended, self.taken) = (appended.sequence, (None, None));
        apply(self, &appended);
        let session = self.session.as_mut().expect("what is applied to the caches ends no session");
        // This also commits a pad before the record, which has a sequence too.
        let seal = session.words.commit(appended.sequence);
        session.words.leave(entered);
        if seal != Seal::Open {
            return self.sealed(appended, seal);
        }
        session.take_room(cost);
        let memory_due = session.memory.is_due(session.ring.tail().position);
        let is_scarce = session.ring.free_bytes() < session.pause_below;
        if session.is_half_full() || memory_due || is_scarce || session.purging.is_some() {
            self.half_full = true;
        }
        Ok(appended)
    }

    /// Notes that an own record changed a node's item.
    #[inline]
    pub fn mark(&mut self, index: NodeIndex, sequence: Sequence) {
        let node = self.nodes.get_mut(index);
        (node.changed, node.last) = (sequence, sequence);
        if !node.dirty {
            node.dirty = true;
            self.dirty.add(index, sequence);
        }
    }

    /// Returns a number of the preallocated range, with its lease.
    pub fn draw_inode(&mut self) -> Step<(InodeNumber, GrantedLease)> {
        // A changed own-range word is processed first, so that the lease is current.
        self.look_at_own_range();
        let session = self.session()?;
        if session.inodes_left == 0 {
            return Err(Need::Inodes.into());
        }
        let Some(lease) = session.own_lease() else {
            // All leases of the range have ended; a new range has a new lease.
            session.inodes_left = 0;
            return Err(Need::Inodes.into());
        };
        Ok((InodeNumber::new(session.next_inode), lease))
    }

    /// Uses the number that [`Self::draw_inode`] returned.
    pub fn use_inode(&mut self) {
        if let Some(session) = self.session.as_mut() {
            session.next_inode += 1;
            session.inodes_left -= 1;
        }
    }

    fn look_at_own_range(&mut self) {
        let changed = self.session.as_ref().is_some_and(|session| {
            session.own_generation.is_some() && session.words.own_range() != session.own_generation
        });
        if changed {
            self.take_in_ended();
        }
    }

    /// Notes new numbers.
    pub fn refilled_inodes(&mut self, first: InodeNumber, count: u64) {
        if let Some(session) = self.session.as_mut() {
            (session.next_inode, session.inodes_left) = (first.get(), count);
            if session.own_generation.is_none() {
                session.own_generation = session.words.own_range();
                session.ended_seen = session.words.ended_count();
            }
        }
    }

    /// Adds a pin.
    pub fn pin(&mut self, index: NodeIndex) -> Attributes {
        self.nodes.get_mut(index).pins += 1;
        self.taken.1 = Some(index);
        self.attributes(index)
    }
}
