//! Typed views of the two pieces of memory that one LibFS and its SharedFS share, at the places that
//! [`format::session`] names: one that the LibFS writes ([`ClientPages`]), one that it only reads ([`DaemonPages`],
//! seen by the LibFS as [`DaemonView`]).
//!
//! Of what the LibFS writes SharedFS believes nothing: the commit word is an upper bound, slots only delay, and the
//! table of open inodes only keeps files that the session was allowed to see.

use crate::error::Error;
use crate::shared::{Mapping, Reads, Words};
use crate::sync::{LongWord, Ordering, fence, relax};
use crate::words::{CommitWord, Inside, Lease, LeaseState, LeaseWord, Overflow, Seal, SealWord, Slot};
use format::session::{
    COMMIT_OFFSET, DIGEST_TURN_OFFSET, DIGESTED_EVEN_OFFSET, DIGESTED_ODD_OFFSET, ENDED_COUNT_OFFSET,
    ENDED_MAX, ENDED_OFFSET, LEASE_WORDS_OFFSET, LEDGER_SETTLED_OFFSET, OPEN_TABLE, OPEN_TABLE_OFFSET,
    OVERFLOW_OFFSET, OWN_RANGE_OFFSET, SEAL_OFFSET, SLOTS, SLOTS_OFFSET,
};
use format::{InodeNumber, Sequence};
use std::collections::BTreeSet;
use std::sync::Arc;

const _: () = assert!(OVERFLOW_OFFSET + size_of::<Overflow>() <= SLOTS_OFFSET);
const _: () = assert!(SLOTS_OFFSET + SLOTS * size_of::<Slot>() <= OPEN_TABLE_OFFSET);

/// The memory that the LibFS writes: commit word, places to be inside at, table of open inodes.
#[derive(Debug)]
pub struct ClientPages {
    commit: Words<CommitWord>,
    overflow: Words<Overflow>,
    slots: Words<Slot>,
    open: Words<LongWord>,
}

impl ClientPages {
    /// The views.
    ///
    /// # Errors
    /// `Memory` if the mapping is too small or for reading only.
    pub fn new(mapping: &Arc<Mapping>) -> Result<Self, Error> {
        Ok(Self {
            commit: mapping.words(COMMIT_OFFSET, 1)?,
            overflow: mapping.words(OVERFLOW_OFFSET, 1)?,
            slots: mapping.words(SLOTS_OFFSET, SLOTS)?,
            open: mapping.words(OPEN_TABLE_OFFSET, OPEN_TABLE)?,
        })
    }

    /// The log's commit word.
    #[inline]
    pub fn commit(&self) -> &CommitWord {
        &self.commit[0]
    }

    /// The places to be inside at.
    #[inline]
    pub fn inside(&self) -> Inside<'_> {
        Inside { slots: &self.slots, overflow: &self.overflow[0] }
    }

    /// The table of open inodes: 0 is a free place. The LibFS changes it under a lease on the inode.
    pub fn open(&self) -> &[LongWord] {
        &self.open
    }

    /// Whether the LibFS says that it has this inode open. For SharedFS, which took every lease on the inode away
    /// before: who opened it under one is seen.
    pub fn is_open(&self, inode: InodeNumber) -> bool {
        // Acquire: pairs with the Release by which the LibFS stored it or left.
        self.open.iter().any(|word| word.load(Ordering::Acquire) == inode.get())
    }

    /// The numbers of all inodes that the LibFS says it has open.
    pub fn open_inodes(&self) -> BTreeSet<u64> {
        // Acquire: as above.
        self.open.iter().map(|word| word.load(Ordering::Acquire)).filter(|inode| *inode != 0).collect()
    }
}

/// How far a log is digested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digested {
    /// Last record that the area contains.
    pub sequence: Sequence,
    /// Offset in the log's file where the record after it begins.
    pub position: u64,
}

/// Places among the head's words.
const TURN: usize = DIGEST_TURN_OFFSET / size_of::<LongWord>();
/// Two words, of even and of odd turns.
const DIGESTED: [usize; 2] =
    [DIGESTED_EVEN_OFFSET / size_of::<LongWord>(), DIGESTED_ODD_OFFSET / size_of::<LongWord>()];
const SETTLED: usize = LEDGER_SETTLED_OFFSET / size_of::<LongWord>();
const ENDED: usize = ENDED_COUNT_OFFSET / size_of::<LongWord>();
const HEAD_WORDS: usize = SEAL_OFFSET / size_of::<LongWord>();

/// The memory that SharedFS writes, as SharedFS sees it. Whoever calls holds SharedFS's lock: one writer at a time.
#[derive(Debug)]
pub struct DaemonPages {
    head: Words<LongWord>,
    seal: Words<SealWord>,
    own_range: Words<LeaseWord>,
    ended: Words<LongWord>,
    leases: Words<LeaseWord>,
}

impl DaemonPages {
    /// The views.
    ///
    /// # Errors
    /// `Memory` if the mapping is too small or for reading only.
    pub fn new(mapping: &Arc<Mapping>, lease_words: usize) -> Result<Self, Error> {
        Ok(Self {
            head: mapping.words(0, HEAD_WORDS)?,
            seal: mapping.words(SEAL_OFFSET, 1)?,
            own_range: mapping.words(OWN_RANGE_OFFSET, 1)?,
            ended: mapping.words(ENDED_OFFSET, ENDED_MAX)?,
            leases: mapping.words(LEASE_WORDS_OFFSET, lease_words)?,
        })
    }

    /// Whether the log is sealed.
    pub fn seal(&self) -> &SealWord {
        &self.seal[0]
    }

    /// The word of the own range.
    pub fn own_range(&self) -> &LeaseWord {
        &self.own_range[0]
    }

    /// The words of single leases.
    pub fn leases(&self) -> &[LeaseWord] {
        &self.leases
    }

    /// Says how far the log is digested.
    pub fn publish_digested(&self, digested: Digested) {
        // The pair of the other parity is written, and then is the one that counts: whenever the daemon dies, there is a
        // whole one, and nobody waits for it. The fence keeps the stores behind the turn before, so that who reads one
        // of them sees that turn; the Release store keeps them before the next. Both pair with `digested`.
        let turn = self.head[TURN].load(Ordering::Relaxed).wrapping_add(1);
        let pair = DIGESTED[(turn % 2) as usize];
        fence(Ordering::Release);
        self.head[pair].store(digested.sequence.get(), Ordering::Relaxed);
        self.head[pair + 1].store(digested.position, Ordering::Relaxed);
        self.head[TURN].store(turn, Ordering::Release);
    }

    /// Says up to which entry the ledger is settled.
    pub fn publish_settled(&self, ledger: Sequence) {
        // Release: pairs with the Acquire of the reader.
        self.head[SETTLED].store(ledger.get(), Ordering::Release);
    }

    /// Puts an inode of the own range on the list of those that are over; the word of the own range is raised
    /// afterwards. Beyond the list's length only the count grows, which says that all are over.
    pub fn push_ended(&self, inode: InodeNumber) {
        let count = self.head[ENDED].load(Ordering::Relaxed);
        if let Some(entry) = usize::try_from(count).ok().and_then(|index| self.ended.get(index)) {
            entry.store(inode.get(), Ordering::Relaxed);
        }
        // Release: pairs with the Acquire of the reader: entries below the count are there.
        self.head[ENDED].store(count + 1, Ordering::Release);
    }

    /// Number of inodes that were put on the list.
    pub fn ended_count(&self) -> u64 {
        self.head[ENDED].load(Ordering::Relaxed)
    }
}

/// The memory that SharedFS writes, as the LibFS sees it.
#[derive(Debug)]
pub struct DaemonView {
    head: Reads<LongWord>,
    seal: Reads<SealWord>,
    own_range: Reads<LeaseWord>,
    ended: Reads<LongWord>,
    leases: Reads<LeaseWord>,
}

impl DaemonView {
    /// The views.
    ///
    /// # Errors
    /// `Memory` if the mapping is too small.
    pub fn new(mapping: &Arc<Mapping>, lease_words: usize) -> Result<Self, Error> {
        Ok(Self {
            head: mapping.reads(0, HEAD_WORDS)?,
            seal: mapping.reads(SEAL_OFFSET, 1)?,
            own_range: mapping.reads(OWN_RANGE_OFFSET, 1)?,
            ended: mapping.reads(ENDED_OFFSET, ENDED_MAX)?,
            leases: mapping.reads(LEASE_WORDS_OFFSET, lease_words)?,
        })
    }

    /// Whether the log is sealed. To be read after a commit.
    #[inline]
    pub fn seal(&self) -> Seal {
        self.seal.read(0)
    }

    /// The lease on the own range.
    #[inline]
    pub fn own_range(&self) -> Lease {
        self.own_range.read(0)
    }

    /// A single lease; none for an index that SharedFS never gives.
    #[inline]
    pub fn lease(&self, index: u32) -> Lease {
        let index = index as usize;
        let outside = Lease { state: LeaseState::None, generation: 0 };
        if index < self.leases.count() { self.leases.read(index) } else { outside }
    }

    /// How far the log is digested. Looks again only if it was said anew meanwhile.
    pub fn digested(&self) -> Digested {
        loop {
            // The words are read with Acquire: the pair is read between the two looks. It is written again only two
            // turns later.
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

    /// Up to which entry the ledger is settled.
    pub fn settled(&self) -> Sequence {
        Sequence::new(self.head.read(SETTLED))
    }

    /// Number of inodes of the own range that are over.
    pub fn ended_count(&self) -> u64 {
        self.head.read(ENDED)
    }

    /// The inode at a place of that list; `None` beyond its length: then all of the range is over.
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
        daemon.publish_settled(Sequence::new(9));
        let granted = daemon.leases()[4].grant(LeaseState::Read);
        let own = daemon.own_range().grant(LeaseState::Write);
        let count = ENDED_MAX as u64 + 1;
        for inode in 0..count {
            daemon.push_ended(InodeNumber::new(11 + inode));
        }
        assert_eq!((view.digested(), view.settled()), (digested, Sequence::new(9)));
        assert_eq!((view.lease(4), view.own_range()), (granted, own));
        assert_eq!(view.lease(5).state, LeaseState::None);
        assert_eq!((view.ended_count(), daemon.ended_count()), (count, count));
        let list = [view.ended(0), view.ended(count - 2), view.ended(count - 1)];
        assert_eq!(list, [Some(InodeNumber::new(11)), Some(InodeNumber::new(9 + count)), None]);
        assert!(DaemonView::new(&map(4096), 5).is_err());
    }

    thread_local! {
        /// Accesses that this thread may still make; 0: any number.
        static LEFT: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    }

    /// What happens if a thread stops at one of its accesses; none if it comes to the end before.
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
            // Of either parity.
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
        client.commit().begin(Sequence::new(3));
        assert_eq!(client.commit().load(), Sequence::new(3));
        assert_eq!(client.inside().slots.len(), SLOTS);
    }
}
