//! The words shared with SharedFS, as LibFS uses them. `format::session` has their positions, `ipc::words` their
//! meaning.

use crate::error::Error;
use format::session::{ALIVE_OFFSET, OPEN_RELEASED, OPEN_TABLE};
use format::{InodeNumber, Sequence};
use ipc::sync::{Ordering, fence};
use ipc::words::{Entered, FenceBy, GENERATIONS, Generation, LeaseState, Seal};
use ipc::{AliveView, ClientPages, DaemonView, Life, Mapping, Reads};
use pmem::ring::RingPosition;
use std::sync::Arc;

/// A lease as it was granted: it is held while its word has this value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GrantedLease {
    /// Index of its word, or [`format::session::WORD_OWN_RANGE`].
    pub word: u32,
    /// Lower half of the word's generation; 0 for the own range.
    pub generation: u32,
    /// For writing, or only for reading.
    pub write: bool,
}

/// All words of a session.
pub(crate) struct SharedWords {
    client: ClientPages,
    daemon: DaemonView,
    generations: Reads<Generation>,
    alive: AliveView,
    fence: FenceBy,
}

impl SharedWords {
    /// Views into the three mappings of a session.
    ///
    /// # Errors
    /// `Ipc`: a mapping is too small.
    pub fn new(
        session: &Arc<Mapping>,
        leases: &Arc<Mapping>,
        generations: &Arc<Mapping>,
        lease_words: u32,
        fence: FenceBy,
    ) -> Result<Self, Error> {
        Ok(Self {
            client: ClientPages::new(session)?,
            daemon: DaemonView::new(leases, lease_words as usize)?,
            generations: generations.reads(0, GENERATIONS)?,
            alive: AliveView::new(generations, ALIVE_OFFSET)?,
            fence,
        })
    }

    /// Whether the session's daemon is alive. If so, it was alive during all earlier operations of this thread.
    #[inline]
    pub fn is_alive(&self) -> bool {
        self.alive.is_alive()
    }

    /// Whether that daemon is alive, has died or has ended in order.
    pub fn life(&self) -> Life {
        self.alive.life()
    }

    /// The last committed record.
    pub fn committed(&self) -> Sequence {
        self.client.commit().load()
    }

    /// Commits all records up to this one. If the log is not open, the seal determines which of them are valid.
    #[inline]
    pub fn commit(&self, last: Sequence) -> Seal {
        self.client.commit().commit(last, self.fence);
        self.daemon.seal()
    }

    /// Whether the log is sealed.
    pub fn seal(&self) -> Seal {
        self.daemon.seal()
    }

    /// Enters an operation. The state's lock is held, so one slot serves all threads.
    #[inline]
    pub fn enter(&self) -> Entered {
        self.client.inside().enter(Some(0), self.fence)
    }

    /// Leaves the operation.
    #[inline]
    pub fn leave(&self, entered: Entered) {
        self.client.inside().leave(entered);
    }

    /// Whether a lease with a word of its own is still held.
    #[inline]
    pub fn holds(&self, held: &GrantedLease) -> bool {
        let lease = self.daemon.lease(held.word);
        let state = if held.write { LeaseState::Write } else { LeaseState::Read };
        // The lower half is sufficient to distinguish generations: a word is not granted four billion times during one
        // operation.
        lease.state == state && lease.generation as u32 == held.generation
    }

    /// Whether a lock lease is still held.
    #[inline]
    pub fn holds_locks(&self, slot: u32, expected: u32) -> bool {
        let lease = self.daemon.lock_lease(slot);
        lease.state == LeaseState::Write && lease.generation as u32 == expected
    }

    /// Whether the changes in the lock table up to now are valid: no daemon has sealed the log or died. Otherwise it is
    /// unknown whether SharedFS has read them.
    #[inline]
    pub fn counts(&self) -> bool {
        // Before the loads. Pairs with the fence of a daemon that seals or recovers the log and then reads the table.
        self.fence.hold_back();
        self.daemon.seal() == Seal::Open && self.is_alive()
    }

    /// The generation of the preallocated range, if any lease of it is held.
    #[inline]
    pub fn own_range(&self) -> Option<u32> {
        let lease = self.daemon.own_range();
        (lease.state == LeaseState::Write).then_some(lease.generation as u32)
    }

    /// Number of inodes of the preallocated range whose leases have ended. Must be read after [`Self::own_range`].
    pub fn ended_count(&self) -> u64 {
        self.daemon.ended_count()
    }

    /// One of these inodes; none if the list was too short for it.
    pub fn ended(&self, index: u64) -> Option<InodeNumber> {
        self.daemon.ended(index)
    }

    /// The last digested record, and the position of the next one.
    pub fn digested(&self) -> (Sequence, RingPosition) {
        let digested = self.daemon.digested();
        (digested.sequence, RingPosition { position: digested.position, sequence: digested.sequence.next() })
    }

    /// The last synced entry of the ledger.
    pub fn ledger_synced(&self) -> Sequence {
        self.daemon.synced()
    }

    /// Whether an fsync up to a record, which depends on the ledger up to an entry, has to make a call because of
    /// copies.
    pub fn needs_copies(&self, record: Sequence, entry: Sequence) -> bool {
        self.daemon.needs_copies(record, entry)
    }

    /// A file's generation, before its blocks are copied.
    #[inline]
    pub fn generation(&self, inode: InodeNumber) -> u64 {
        self.generations.read(Generation::index_of(inode))
    }

    /// Whether a copy made since then is valid.
    #[inline]
    pub fn generation_still(&self, inode: InodeNumber, before: u64) -> bool {
        self.generations.still(Generation::index_of(inode), before)
    }

    /// Stores at a position of the open table which inode is open; none frees the position. The store comes before any
    /// later check of the lease word under which the inode is used, so SharedFS either sees the entry, or has not begun
    /// to revoke the lease.
    pub fn set_open(&self, place: u16, inode: InodeNumber) {
        self.client.open()[usize::from(place)].store(inode.get(), Ordering::Release);
        // Pairs with the fence of a revocation.
        fence(Ordering::SeqCst);
    }

    /// Stores at a position of the open table that the reference to the inode may end.
    pub fn set_released(&self, place: u16, inode: InodeNumber) {
        // Release: pairs with the Acquire of a daemon that then finds the last record of the inode digested.
        self.client.open()[usize::from(place)].store(inode.get() | OPEN_RELEASED, Ordering::Release);
    }
}

/// All positions of the open table, free.
pub(crate) fn open_places() -> Vec<u16> {
    (0..u16::try_from(OPEN_TABLE).expect("the table is small")).rev().collect()
}
