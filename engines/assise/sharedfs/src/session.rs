//! One LibFS, as SharedFS knows it: its log, its leases, the inodes that it has met. The memory that is shared with it
//! is in [`Shared`]; every value on which a decision depends is in the daemon's own memory.

use crate::config::Config;
use crate::error::Error;
use crate::large_pages::LogPieces;
use crate::lock_leases::LockTable;
use crate::passes::Passes;
use crate::register::Identity;
use ccnvm::{Mode, SessionId};
use format::register::{KNOWN_MADE, KNOWN_READABLE};
use format::session::{SESSION_BYTES, WORD_OWN_RANGE, lease_bytes};
use format::{InodeNumber, LeaseVersion, LogUid, Sequence};
use ipc::host::Host;
use ipc::peer::Peer;
use ipc::ring::RingServer;
use ipc::shared::{self, Access, Mapping};
use ipc::sync::{LongWord, Ordering, Word};
use ipc::sys::Descriptor;
use ipc::words::{LeaseState, Seal};
use ipc::{ClientPages, DaemonPages};
use mirror::logs::BEGINNING;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use vfs::Caller;

/// One piece of memory that is shared with a LibFS.
pub(crate) struct Piece {
    pub memory: Descriptor,
    pub mapping: Arc<Mapping>,
}

impl Piece {
    fn new(name: &std::ffi::CStr, bytes: usize) -> Result<Self, Error> {
        let memory = shared::create(name, bytes)?;
        let mapping = Mapping::new(&memory, bytes, Access::Write)?;
        Ok(Self { memory, mapping })
    }
}

/// The memory that is shared with one LibFS.
pub(crate) struct Shared {
    pub session_words: Piece,
    pub lease_words: Piece,
    pub ring_memory: Piece,
    pub client: ClientPages,
    pub daemon: DaemonPages,
    pub ring: RingServer,
    /// 1 once the session has ended: it is not served any more.
    pub gone: Word,
    /// The first record for whose digest a call waits, or [`NOT_AWAITED`].
    pub awaited: LongWord,
}

/// No call waits for a digest of the log.
const NOT_AWAITED: u64 = u64::MAX;

impl Shared {
    pub fn new(host: &Arc<dyn Host>, config: &Config) -> Result<Self, Error> {
        let words = config.lease_words as usize;
        let session_words = Piece::new(c"hearth-session", SESSION_BYTES)?;
        let lease_words = Piece::new(c"hearth-leases", lease_bytes(words))?;
        let ring_memory = Piece::new(c"hearth-ring", config.ring.bytes()?)?;
        let client = ClientPages::new(&session_words.mapping)?;
        let daemon = DaemonPages::new(&lease_words.mapping, words)?;
        let ring = RingServer::new(host.clone(), ring_memory.mapping.clone(), config.ring, config.spin_ns)?;
        let (gone, awaited) = (Word::new(0), LongWord::new(NOT_AWAITED));
        Ok(Self { session_words, lease_words, ring_memory, client, daemon, ring, gone, awaited })
    }

    /// The last committed record as the LibFS claims it: an upper bound, and after the seal the cut. The caller holds
    /// the state's lock, or the log is sealed.
    pub fn committed(&self) -> Sequence {
        // A record that was committed after this load came after the seal, which the second check then sees.
        let said = self.client.commit().load();
        match self.daemon.seal().load() {
            Seal::Open => said,
            Seal::Sealing => Sequence::default(),
            Seal::Sealed(cut) => cut,
        }
    }
}

/// A lease that a session holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldLease {
    pub mode: Mode,
    pub version: LeaseVersion,
    /// Its word, or [`WORD_OWN_RANGE`].
    pub word: u32,
    /// Lower half of the word's generation.
    pub expected: u32,
    /// The grant in the ledger; 0 for none.
    pub ledger: Sequence,
    /// It is being revoked or given back.
    pub leaving: bool,
}

/// An inode that a session has met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MetInode {
    /// It could have been opened for reading when a lease on it was granted.
    pub readable: bool,
    /// The process made it, and had it open when it lost the lease that came with its number, or when a session of it began or
    /// ended since. It may read and write it as before, even if the owner or the mode changes.
    pub made: bool,
}

impl MetInode {
    /// The bits that the register stores.
    pub fn bits(self) -> u8 {
        (u8::from(self.readable) * KNOWN_READABLE) | (u8::from(self.made) * KNOWN_MADE)
    }

    /// Adds rights, by the bits of the register; true if one is new.
    pub fn add(&mut self, bits: u8) -> bool {
        let before = *self;
        self.readable |= bits & KNOWN_READABLE != 0;
        self.made |= bits & KNOWN_MADE != 0;
        *self != before
    }
}

/// Whether a session is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Live,
    /// Its log is sealed; the records that count are being digested.
    Ending,
}

/// Numbers of the words that no lease has. Most sessions use few, so only those that were used are listed.
struct LeaseWords {
    unused: Range<u32>,
    freed: Vec<u32>,
}

impl LeaseWords {
    fn take(&mut self) -> Option<u32> {
        self.freed.pop().or_else(|| self.unused.next())
    }
}

/// One LibFS.
pub(crate) struct Session {
    pub log: LogUid,
    /// Bytes of its file that have space.
    pub log_bytes: u64,
    pub caller: Caller,
    pub version: LeaseVersion,
    /// Entry of the ledger that opened the log.
    pub opened: Sequence,
    /// The newest entry of the ledger that gave the log a right.
    pub right: Sequence,
    pub first_inode: InodeNumber,
    pub inodes: u64,
    /// Its user is root or the daemon's.
    trusted: bool,
    pub shared: Arc<Shared>,
    pub held: BTreeMap<InodeNumber, HeldLease>,
    pub known: BTreeMap<InodeNumber, MetInode>,
    words: LeaseWords,
    /// A thread is revoking leases of it.
    pub busy: bool,
    pub phase: Phase,
    /// Its process, as the kernel numbers it.
    pub pid: u32,
    /// When its process started, if that is known.
    pub started: Option<u64>,
    /// It is terminated, and its process may come back.
    pub returns: bool,
    /// It goes on from another session, and its process has made no call in it, so that it may never have received the
    /// welcome. Or its process has said that it goes on from this session, and has made no call since.
    pub resume_unacknowledged: bool,
    /// A child between vfork and exec has begun it in the memory of its process.
    pub is_by_child: bool,
    /// It goes on from a session of a dead daemon, and has not reported yet which files it has open.
    pub open_files_unknown: bool,
    /// How far the logs of the sessions before it were recovered.
    pub recovered: Vec<(u64, Sequence)>,
    /// Own ranges of the sessions before it.
    pub former_ranges: Vec<(InodeNumber, u64)>,
    /// It requested a digest for which it does not wait.
    pub wants_digest: bool,
    /// The records that are not digested and for whose digest calls wait.
    awaited: Vec<Sequence>,
    /// The pieces of its log that have large pages.
    pub pieces: LogPieces,
    /// Its process, if it is another one.
    pub peer: Option<Arc<Peer>>,
    /// Rights to open files that it passes on.
    pub passes: Passes,
    /// The locks that it decides under lock leases; none before the first.
    pub lock_table: Option<LockTable>,
}

/// A session is known by the number of its log, which is never used again.
pub(crate) fn session_of(log: LogUid) -> SessionId {
    SessionId(log.get())
}

/// The data that a session begins with.
pub(crate) struct Beginning {
    pub log: LogUid,
    pub caller: Caller,
    pub version: LeaseVersion,
    pub opened: Sequence,
    pub first_inode: InodeNumber,
    pub inodes: u64,
    pub pid: u32,
    pub started: Option<u64>,
}

impl Session {
    pub fn new(beginning: Beginning, shared: Arc<Shared>, config: &Config) -> Self {
        let Beginning { log, caller, version, opened, first_inode, inodes, pid, started } = beginning;
        let trusted = caller.is_root() || caller.uid == config.trusted_uid;
        shared.client.commit().begin(BEGINNING.sequence);
        shared.daemon.publish_digested(BEGINNING);
        shared.daemon.own_range().grant(LeaseState::Write);
        Self {
            log,
            log_bytes: config.log_bytes,
            caller,
            version,
            opened,
            right: opened,
            first_inode,
            inodes,
            trusted,
            shared,
            held: BTreeMap::new(),
            known: BTreeMap::new(),
            words: LeaseWords { unused: 0..config.lease_words, freed: Vec::new() },
            busy: false,
            phase: Phase::Live,
            pid,
            started,
            returns: false,
            resume_unacknowledged: false,
            is_by_child: false,
            open_files_unknown: false,
            recovered: Vec::new(),
            former_ranges: Vec::new(),
            wants_digest: false,
            awaited: Vec::new(),
            pieces: LogPieces::default(),
            peer: None,
            passes: Passes::default(),
            lock_table: None,
        }
    }

    /// A call waits for the digest of a record.
    pub fn begin_wait(&mut self, up_to: Sequence) {
        self.awaited.push(up_to);
        self.tell_awaited();
    }

    /// Only calls for these records wait any longer.
    pub fn end_waits(&mut self, mut waits: impl FnMut(Sequence) -> bool) {
        self.awaited.retain(|awaited| waits(*awaited));
        self.tell_awaited();
    }

    /// Whether a call waits for the digest of a record.
    pub fn is_awaited(&self) -> bool {
        !self.awaited.is_empty()
    }

    fn tell_awaited(&self) {
        let first = self.awaited.iter().min().map_or(NOT_AWAITED, |first| first.get());
        // Relaxed: a hint that makes a batch shorter.
        self.shared.awaited.store(first, Ordering::Relaxed);
    }

    /// Whether the number belongs to its own range, taken away or not.
    pub fn in_range(&self, inode: InodeNumber) -> bool {
        in_range(inode, (self.first_inode, self.inodes))
    }

    /// Whether it met the inode on a walk, or may have made it.
    pub fn knows(&self, inode: InodeNumber) -> bool {
        inode == InodeNumber::ROOT || self.known.contains_key(&inode) || self.may_have_made(inode)
    }

    /// Whether the number belongs to its own range, or to that of a session before it.
    pub fn may_have_made(&self, inode: InodeNumber) -> bool {
        self.in_range(inode) || self.former_ranges.iter().any(|range| in_range(inode, *range))
    }

    /// Whether its process may use the inode by its number.
    pub fn may_use(&self, inode: InodeNumber) -> bool {
        self.trusted || self.knows(inode)
    }

    /// Whether its user is root or the daemon's.
    pub fn is_trusted(&self) -> bool {
        self.trusted
    }

    /// Whether it is of this user and of this process, of which the time of its start is known.
    pub fn is_of(&self, caller: &Caller, pid: u32, started: Option<u64>) -> bool {
        let user = (self.caller.uid, self.caller.gid) == (caller.uid, caller.gid);
        user && self.pid == pid && self.started == started && started.is_some()
    }

    /// Its process and user; none if its process cannot be told from a later one.
    pub fn identity(&self) -> Option<Identity> {
        let (uid, gid) = (self.caller.uid, self.caller.gid);
        Some(Identity { pid: self.pid, started: self.started?, uid, gid })
    }

    /// Lower half of the own-range word's generation.
    pub fn own_expected(&self) -> u32 {
        low_half(self.shared.daemon.own_range().load().generation)
    }

    /// Gives a lease its word, or strengthens it in place; the caller notes the lease.
    pub fn grant_word(&mut self, inode: InodeNumber, mode: Mode) -> (u32, u32) {
        let word = match self.held.get(&inode).filter(|held| held.word != WORD_OWN_RANGE) {
            Some(held) => held.word,
            None => self.words.take().expect("the table of leases grants no more than there are words"),
        };
        let state = match mode {
            Mode::Read => LeaseState::Read,
            Mode::Write => LeaseState::Write,
        };
        let lease = self.shared.daemon.leases()[word as usize].grant(state);
        (word, low_half(lease.generation))
    }

    /// How many more leases with words it may hold.
    pub fn words_left(&self) -> usize {
        self.words.unused.len() + self.words.freed.len()
    }

    /// Frees the word of a lease that ended.
    pub fn end_word(&mut self, word: u32) {
        if word != WORD_OWN_RANGE {
            self.shared.daemon.leases()[word as usize].end();
            self.words.freed.push(word);
        }
    }

    /// Forgets inodes that it neither leases, refers to nor has open, when too many are known.
    pub fn trim_known(&mut self, known_max: usize, referred: impl Fn(InodeNumber) -> bool) {
        if self.known.len() > known_max {
            let (held, open) = (&self.held, self.shared.client.open_inodes());
            let used = |inode: &InodeNumber| held.contains_key(inode) || open.contains(&inode.get());
            self.known.retain(|inode, _| used(inode) || referred(*inode));
        }
    }
}

/// Whether a range of inode numbers has this one.
pub(crate) fn in_range(inode: InodeNumber, (first, count): (InodeNumber, u64)) -> bool {
    inode.get().checked_sub(first.get()).is_some_and(|index| index < count)
}

/// Lower half of a generation.
fn low_half(generation: u64) -> u32 {
    (generation & u64::from(u32::MAX)) as u32
}
