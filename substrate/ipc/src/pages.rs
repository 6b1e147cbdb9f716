//! Typed views of the two memory regions that one LibFS and its SharedFS share, with the layout of
//! [`format::session`]: the region that the LibFS writes ([`ClientPages`]), and the region that only SharedFS
//! writes ([`DaemonPages`], which the LibFS sees as [`DaemonView`]).
//!
//! SharedFS does not trust the region of the LibFS: it uses the commit word as an upper bound; slots can only
//! delay; and the table of open inodes can only keep files alive that the session was allowed to see.

use crate::error::Error;
use crate::shared::{Mapping, Reads, Words};
use crate::sync::{LongWord, Ordering, fence, relax};
use crate::words::{CommitWord, Inside, Lease, LeaseState, LeaseWord, Overflow, Seal, SealWord, Slot};
use format::locks::LOCK_SLOTS;
use format::session::{
    COMMIT_OFFSET, DIGEST_TURN_OFFSET, DIGESTED_EVEN_OFFSET, DIGESTED_ODD_OFFSET, ENDED_COUNT_OFFSET,
    ENDED_MAX, ENDED_OFFSET, LEASE_WORDS_OFFSET, LEDGER_SYNCED_OFFSET, LOCK_WORDS_OFFSET, OPEN_RELEASED,
    OPEN_TABLE, OPEN_TABLE_OFFSET, OVERFLOW_OFFSET, OWN_RANGE_OFFSET, REPLICATED_ENTRY_OFFSET,
    REPLICATED_RECORD_OFFSET, REPLICATES_OFFSET, SEAL_OFFSET, SLOTS, SLOTS_OFFSET,
};
use format::{InodeNumber, Sequence};
use std::collections::BTreeSet;
use std::sync::Arc;

const _: () = assert!(OVERFLOW_OFFSET + size_of::<Overflow>() <= SLOTS_OFFSET);
const _: () = assert!(SLOTS_OFFSET + SLOTS * size_of::<Slot>() <= OPEN_TABLE_OFFSET);

/// The region that the LibFS writes: commit word, operation slots, table of open inodes.
#[derive(Debug)]
pub struct ClientPages {
    commit: Words<CommitWord>,
    overflow: Words<Overflow>,
    slots: Words<Slot>,
    open: Words<LongWord>,
}

impl ClientPages {
    /// Makes the views.
    ///
    /// # Errors
    /// `Memory` if the mapping is too small or read-only.
    pub fn new(mapping: &Arc<Mapping>) -> Result<Self, Error> {
        Ok(Self {
            commit: mapping.words(COMMIT_OFFSET, 1)?,
            overflow: mapping.words(OVERFLOW_OFFSET, 1)?,
            slots: mapping.words(SLOTS_OFFSET, SLOTS)?,
            open: mapping.words(OPEN_TABLE_OFFSET, OPEN_TABLE)?,
        })
    }

    /// Commit word of the log.
    #[inline]
    pub fn commit(&self) -> &CommitWord {
        &self.commit[0]
    }

    /// Operation slots and overflow counters.
    #[inline]
    pub fn inside(&self) -> Inside<'_> {
        Inside { slots: &self.slots, overflow: &self.overflow[0] }
    }

    /// Table of open inodes; 0 is a free entry. The LibFS changes the table while it holds a lease on the inode.
    pub fn open(&self) -> &[LongWord] {
        &self.open
    }

    /// True if the LibFS has this inode open, as it says. SharedFS revokes every lease on the inode first, so it
    /// sees each open that was made under a lease.
    pub fn is_open(&self, inode: InodeNumber) -> bool {
        // Acquire: pairs with the Release with which the LibFS stored the entry or left its operation.
        self.open.iter().any(|word| word.load(Ordering::Acquire) == inode.get())
    }

    /// Numbers of all inodes that the LibFS has open, as it says.
    pub fn open_inodes(&self) -> BTreeSet<u64> {
        // Acquire: as above.
        let words = self.open.iter().map(|word| word.load(Ordering::Acquire));
        words.filter(|word| *word != 0 && *word & OPEN_RELEASED == 0).collect()
    }

    /// Inodes whose references the LibFS releases. A record of the LibFS for such an inode is committed before.
    pub fn released(&self) -> Vec<InodeNumber> {
        // Acquire: as above.
        let words = self.open.iter().map(|word| word.load(Ordering::Acquire));
        words
            .filter(|word| word & OPEN_RELEASED != 0)
            .map(|word| InodeNumber::new(word & !OPEN_RELEASED))
            .collect()
    }
}

/// Progress of the digest of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digested {
    /// Last record that the shared area contains.
    pub sequence: Sequence,
    /// Offset in the log's file at which the next record begins.
    pub position: u64,
}

/// Indexes of words in the head of the region.
const TURN: usize = DIGEST_TURN_OFFSET / size_of::<LongWord>();
/// Two pairs of words, used by even and by odd turns.
const DIGESTED: [usize; 2] =
    [DIGESTED_EVEN_OFFSET / size_of::<LongWord>(), DIGESTED_ODD_OFFSET / size_of::<LongWord>()];
const SYNCED: usize = LEDGER_SYNCED_OFFSET / size_of::<LongWord>();
const ENDED: usize = ENDED_COUNT_OFFSET / size_of::<LongWord>();
/// Places among the words about copies.
const REPLICATED_RECORD: usize = (REPLICATED_RECORD_OFFSET - REPLICATES_OFFSET) / size_of::<LongWord>();
const REPLICATED_ENTRY: usize = (REPLICATED_ENTRY_OFFSET - REPLICATES_OFFSET) / size_of::<LongWord>();
const COPIES_WORDS: usize = REPLICATED_ENTRY + 1;
const HEAD_WORDS: usize = SEAL_OFFSET / size_of::<LongWord>();

/// The region that SharedFS writes, as SharedFS sees it. The caller holds SharedFS's lock: one writer at a time.
#[derive(Debug)]
pub struct DaemonPages {
    head: Words<LongWord>,
    seal: Words<SealWord>,
    copies: Words<LongWord>,
    own_range: Words<LeaseWord>,
    ended: Words<LongWord>,
    locks: Words<LeaseWord>,
    leases: Words<LeaseWord>,
}

impl DaemonPages {
    /// Makes the views.
    ///
    /// # Errors
    /// `Memory` if the mapping is too small or read-only.
    pub fn new(mapping: &Arc<Mapping>, lease_words: usize) -> Result<Self, Error> {
        Ok(Self {
            head: mapping.words(0, HEAD_WORDS)?,
            seal: mapping.words(SEAL_OFFSET, 1)?,
            copies: mapping.words(REPLICATES_OFFSET, COPIES_WORDS)?,
            own_range: mapping.words(OWN_RANGE_OFFSET, 1)?,
            ended: mapping.words(ENDED_OFFSET, ENDED_MAX)?,
            locks: mapping.words(LOCK_WORDS_OFFSET, LOCK_SLOTS)?,
            leases: mapping.words(LEASE_WORDS_OFFSET, lease_words)?,
        })
    }

    /// Seal of the log.
    pub fn seal(&self) -> &SealWord {
        &self.seal[0]
    }

    /// Lease word of the preallocated inode range.
    pub fn own_range(&self) -> &LeaseWord {
        &self.own_range[0]
    }

    /// Words of the leases on single inodes.
    pub fn leases(&self) -> &[LeaseWord] {
        &self.leases
    }

    /// The words of lock leases, by slot of the lock table.
    pub fn locks(&self) -> &[LeaseWord] {
        &self.locks
    }

    /// Publishes the progress of the digest.
    pub fn publish_digested(&self, digested: Digested) {
        // The stores go to the pair that is not in use; the turn then selects it. So a daemon that dies at any
        // point leaves a consistent pair, and no reader waits. The fence keeps the stores of the pair behind the
        // store of the previous turn, so that a reader of either sees that turn; the Release store keeps them
        // before the next turn. Both pair with the loads in `digested`.
        let turn = self.head[TURN].load(Ordering::Relaxed).wrapping_add(1);
        let pair = DIGESTED[(turn % 2) as usize];
        fence(Ordering::Release);
        self.head[pair].store(digested.sequence.get(), Ordering::Relaxed);
        self.head[pair + 1].store(digested.position, Ordering::Relaxed);
        self.head[TURN].store(turn, Ordering::Release);
    }

    /// Publishes the sequence up to which the ledger is synced.
    pub fn publish_synced(&self, ledger: Sequence) {
        // Release: pairs with the Acquire of the reader.
        self.head[SYNCED].store(ledger.get(), Ordering::Release);
    }

    /// Says whether an fsync needs copies, and which record of the log and entry of the ledger all of them have.
    pub fn publish_replication(&self, replicates: bool, (record, entry): (Sequence, Sequence)) {
        // Release: pairs with the Acquire of the reader. The word that says whether comes last when it is raised: a reader
        // that finds it set finds nothing that only earlier copies had.
        self.copies[REPLICATED_RECORD].store(record.get(), Ordering::Release);
        self.copies[REPLICATED_ENTRY].store(entry.get(), Ordering::Release);
        self.copies[0].store(replicates.into(), Ordering::Release);
    }

    /// Adds an inode of the preallocated range to the list of ended leases; the caller increments the range's lease
    /// word afterwards. Beyond the capacity of the list only the count grows, which means that the lease on the
    /// whole range has ended.
    pub fn push_ended(&self, inode: InodeNumber) {
        let count = self.head[ENDED].load(Ordering::Relaxed);
        if let Some(entry) = usize::try_from(count).ok().and_then(|index| self.ended.get(index)) {
            entry.store(inode.get(), Ordering::Relaxed);
        }
        // Release: pairs with the Acquire of the reader: entries below the count are stored.
        self.head[ENDED].store(count + 1, Ordering::Release);
    }

    /// Number of inodes added to the list.
    pub fn ended_count(&self) -> u64 {
        self.head[ENDED].load(Ordering::Relaxed)
    }
}

/// The region that SharedFS writes, as the LibFS sees it.
#[derive(Debug)]
pub struct DaemonView {
    head: Reads<LongWord>,
    seal: Reads<SealWord>,
    copies: Reads<LongWord>,
    own_range: Reads<LeaseWord>,
    ended: Reads<LongWord>,
    locks: Reads<LeaseWord>,
    leases: Reads<LeaseWord>,
}

impl DaemonView {
    /// Makes the views.
    ///
    /// # Errors
    /// `Memory` if the mapping is too small.
    pub fn new(mapping: &Arc<Mapping>, lease_words: usize) -> Result<Self, Error> {
        Ok(Self {
            head: mapping.reads(0, HEAD_WORDS)?,
            seal: mapping.reads(SEAL_OFFSET, 1)?,
            copies: mapping.reads(REPLICATES_OFFSET, COPIES_WORDS)?,
            own_range: mapping.reads(OWN_RANGE_OFFSET, 1)?,
            ended: mapping.reads(ENDED_OFFSET, ENDED_MAX)?,
            locks: mapping.reads(LOCK_WORDS_OFFSET, LOCK_SLOTS)?,
            leases: mapping.reads(LEASE_WORDS_OFFSET, lease_words)?,
        })
    }

    /// State of the log's seal. To be read after a commit.
    #[inline]
    pub fn seal(&self) -> Seal {
        self.seal.read(0)
    }

    /// Lease on the preallocated inode range.
    #[inline]
    pub fn own_range(&self) -> Lease {
        self.own_range.read(0)
    }

    /// A lease on a single inode; no lease for an index that SharedFS never assigns.
    #[inline]
    pub fn lease(&self, index: u32) -> Lease {
        let index = index as usize;
        let outside = Lease { state: LeaseState::None, generation: 0 };
        if index < self.leases.count() { self.leases.read(index) } else { outside }
    }

    /// A lock lease; none for a slot that there is not.
    #[inline]
    pub fn lock_lease(&self, slot: u32) -> Lease {
        let slot = slot as usize;
        let outside = Lease { state: LeaseState::None, generation: 0 };
        if slot < self.locks.count() { self.locks.read(slot) } else { outside }
    }

    /// Progress of the digest. Reads again only if SharedFS published a newer value meanwhile.
    pub fn digested(&self) -> Digested {
        loop {
            // The loads are Acquire, so the pair is read between the two loads of the turn. The writer changes this
            // pair again only two turns later.
            let turn = self.head.read(TURN);
            let pair = DIGESTED[(turn % 2) as usize];
            let found = Digested {
                sequence: Sequence::new(self.head.read(pair)),
                position: self.head.read(pair + 1),
            };
            if self.head.read(TURN) == turn {
                return found;
            }
            relax();
        }
    }

    /// Sequence up to which the ledger is synced.
    pub fn synced(&self) -> Sequence {
        Sequence::new(self.head.read(SYNCED))
    }

    /// Whether an fsync of the log up to a record, which rests on the ledger up to an entry, needs to ask for copies.
    pub fn needs_copies(&self, record: Sequence, entry: Sequence) -> bool {
        self.copies.read(0) != 0
            && (self.copies.read(REPLICATED_RECORD) < record.get()
                || self.copies.read(REPLICATED_ENTRY) < entry.get())
    }

    /// Number of inodes of the preallocated range whose lease has ended.
    pub fn ended_count(&self) -> u64 {
        self.head.read(ENDED)
    }

    /// Inode at an index of that list; `None` beyond its capacity: then the lease on the whole range has ended.
    pub fn ended(&self, index: u64) -> Option<InodeNumber> {
        let index = usize::try_from(index).ok().filter(|index| *index < self.ended.count())?;
        Some(InodeNumber::new(self.ended.read(index)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::{self, Access};

    fn map(bytes: usize) -> Arc<Mapping> {
        let memory = shared::create(c"pages", bytes).unwrap();
        Mapping::new(&memory, bytes, Access::Write).unwrap()
    }

    #[test]
    fn both_sides_see_the_same() {
        let mapping = map(format::session::lease_bytes(5));
        let (daemon, view) = (DaemonPages::new(&mapping, 5).unwrap(), DaemonView::new(&mapping, 5).unwrap());
        let digested = Digested { sequence: Sequence::new(7), position: 8192 };
        daemon.publish_digested(digested);
        daemon.publish_synced(Sequence::new(9));
        let granted = daemon.leases()[4].grant(LeaseState::Read);
        let own = daemon.own_range().grant(LeaseState::Write);
        let count = ENDED_MAX as u64 + 1;
        for inode in 0..count {
            daemon.push_ended(InodeNumber::new(11 + inode));
        }
        assert_eq!((view.digested(), view.synced()), (digested, Sequence::new(9)));
        let (record, entry) = (Sequence::new(20), Sequence::new(30));
        assert!(!view.needs_copies(record, entry));
        daemon.publish_replication(true, (record, entry));
        assert!(!view.needs_copies(record, entry));
        assert!(view.needs_copies(record.next(), entry) && view.needs_copies(record, entry.next()));
        assert_eq!((view.lease(4), view.own_range()), (granted, own));
        assert_eq!(view.lease(5).state, LeaseState::None);
        let locks = daemon.locks()[LOCK_SLOTS - 1].grant(LeaseState::Write);
        assert_eq!(view.lock_lease(LOCK_SLOTS as u32 - 1), locks);
        assert_eq!(view.lock_lease(LOCK_SLOTS as u32).state, LeaseState::None);
        assert_eq!((view.ended_count(), daemon.ended_count()), (count, count));
        let list = [view.ended(0), view.ended(count - 2), view.ended(count - 1)];
        assert_eq!(list, [Some(InodeNumber::new(11)), Some(InodeNumber::new(9 + count)), None]);
        assert!(DaemonView::new(&map(4096), 5).is_err());
    }

    thread_local! {
        /// Number of accesses that this thread may still make; 0 means any number.
        static LEFT: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    }

    /// Runs `act` and stops the thread at one of its accesses; `None` if it was stopped before its end.
    fn stopped_after<T>(accesses: u32, act: impl FnOnce() -> T) -> Option<T> {
        crate::sync::install_step(|| {
            let left = LEFT.get();
            LEFT.set(left.saturating_sub(1));
            assert!(left != 1, "stopped here");
        });
        LEFT.set(accesses);
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
        LEFT.set(0);
        done.ok()
    }

    #[test]
    fn a_daemon_that_dies_while_it_says_how_far_leaves_a_whole_answer() {
        let said = |number: u64| Digested { sequence: Sequence::new(number), position: number * 64 };
        let (mut before, mut after) = (0, 0);
        for round in 0..20 {
            let mapping = map(format::session::lease_bytes(5));
            let (daemon, view) =
                (DaemonPages::new(&mapping, 5).unwrap(), DaemonView::new(&mapping, 5).unwrap());
            // Start with an even and with an odd turn.
            let last = 3 + round % 2;
            (1..=last).for_each(|number| daemon.publish_digested(said(number)));
            let survived = stopped_after(1 + round as u32 / 2, || daemon.publish_digested(said(last + 1)));
            let found = stopped_after(100, || view.digested()).expect("whoever asks is not kept waiting");
            assert!(found == said(last) || found == said(last + 1), "{found:?} after {last}");
            assert!(survived.is_none() || found == said(last + 1));
            if found == said(last) { before += 1 } else { after += 1 }
        }
        assert!(before >= 4 && after >= 4, "{before} before, {after} after");
    }

    #[test]
    fn what_the_client_wrote_is_found() {
        let client = ClientPages::new(&map(format::session::SESSION_BYTES)).unwrap();
        client.open()[17].store(5, Ordering::Release);
        assert!(client.is_open(InodeNumber::new(5)) && !client.is_open(InodeNumber::new(6)));
        client.open()[4].store(OPEN_RELEASED | 6, Ordering::Release);
        assert!(!client.is_open(InodeNumber::new(6)) && !client.open_inodes().contains(&6));
        assert_eq!(client.released(), [InodeNumber::new(6)]);
        client.commit().begin(Sequence::new(3));
        assert_eq!(client.commit().load(), Sequence::new(3));
        assert_eq!(client.inside().slots.len(), SLOTS);
    }
}
