//! What lies where in the pages that one LibFS and its SharedFS share: one memory that the LibFS writes
//! ([`ClientPages`]), one that it only reads ([`DaemonPages`], seen by the LibFS as [`DaemonView`]).
//!
//! Guarantees: both sides compute the same places from the same [`PageLimits`], which SharedFS says at the
//! handshake. Of what the LibFS writes SharedFS believes nothing: the commit word is an upper bound, slots only
//! delay, and the open table only keeps files of the LibFS's own.

use crate::error::Error;
use crate::shared::{Mapping, Reads, Words};
use crate::sync::{LongWord, Ordering, fence, relax};
use crate::words::{CommitWord, Inside, Lease, LeaseState, LeaseWord, Overflow, Slot};
use format::{InodeNumber, Sequence};
use std::sync::Arc;

/// How many of each there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageLimits {
    /// Threads with a slot of their own to be inside at.
    pub slots: u32,
    /// Entries of the open table.
    pub open_entries: u32,
    /// Leases that the session can hold beside its own range.
    pub lease_words: u32,
    /// Inodes of the own range that can be taken away one by one; after that the whole range is over.
    pub ended_entries: u32,
}

/// Largest number of any of them: bounds what a handshake can make either side map.
pub const PAGE_LIMIT_MAX: u32 = 1 << 20;

const LINE: usize = 64;
const WORD: usize = size_of::<LongWord>();

impl PageLimits {
    fn check(&self) -> Result<(), Error> {
        let all = [self.slots, self.open_entries, self.lease_words, self.ended_entries];
        if all.iter().all(|count| (1..=PAGE_LIMIT_MAX).contains(count)) {
            Ok(())
        } else {
            Err(Error::Limits("entries of the session's pages"))
        }
    }

    fn slots_at() -> usize {
        LINE + size_of::<Overflow>()
    }

    fn open_at(&self) -> usize {
        Self::slots_at() + self.slots as usize * size_of::<Slot>()
    }

    /// Bytes of the memory that the LibFS writes.
    ///
    /// # Errors
    /// `Limits`.
    pub fn client_bytes(&self) -> Result<usize, Error> {
        self.check()?;
        Ok(self.open_at() + self.open_entries as usize * WORD)
    }

    fn ended_at() -> usize {
        2 * LINE
    }

    fn leases_at(&self) -> usize {
        (Self::ended_at() + self.ended_entries as usize * WORD).next_multiple_of(LINE)
    }

    /// Bytes of the memory that SharedFS writes.
    ///
    /// # Errors
    /// `Limits`.
    pub fn daemon_bytes(&self) -> Result<usize, Error> {
        self.check()?;
        Ok(self.leases_at() + self.lease_words as usize * WORD)
    }
}

/// The memory that the LibFS writes, mapped for writing: commit word, places to be inside at, open table.
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
    /// `Limits`; `Memory` if the mapping is too small or for reading only.
    pub fn new(mapping: &Arc<Mapping>, limits: &PageLimits) -> Result<Self, Error> {
        limits.check()?;
        Ok(Self {
            commit: mapping.words(0, 1)?,
            overflow: mapping.words(LINE, 1)?,
            slots: mapping.words(PageLimits::slots_at(), limits.slots as usize)?,
            open: mapping.words(limits.open_at(), limits.open_entries as usize)?,
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

    /// Notes that a file of the own range is open, while inside: if the file is taken away, SharedFS makes a
    /// reference of it. False if the table is full: open it by call. One thread at a time changes the table.
    pub fn note_open(&self, inode: InodeNumber) -> bool {
        let free = |word: &&LongWord| word.load(Ordering::Relaxed) == 0;
        let Some(word) = self.open.iter().find(free) else { return false };
        // Release: pairs with the Acquire in `is_open`; leaving orders it as well.
        word.store(inode.get(), Ordering::Release);
        true
    }

    /// Takes the note back.
    pub fn note_closed(&self, inode: InodeNumber) {
        if let Some(word) = self.open.iter().find(|word| word.load(Ordering::Relaxed) == inode.get()) {
            word.store(0, Ordering::Release);
        }
    }

    /// Whether the LibFS noted this file as open. For SharedFS, after a scan.
    pub fn is_open(&self, inode: InodeNumber) -> bool {
        // Acquire: pairs with the Release in `note_open`.
        self.open.iter().any(|word| word.load(Ordering::Acquire) == inode.get())
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

/// Indices of the words on the first line of the daemon's memory.
const VERSION: usize = 0;
const DIGESTED: usize = 1;
const POSITION: usize = 2;
const SETTLED: usize = 3;
const ENDED: usize = 4;
const HEAD_WORDS: usize = 5;

/// The memory that SharedFS writes, as SharedFS sees it. Whoever calls holds SharedFS's lock: one writer at a time.
#[derive(Debug)]
pub struct DaemonPages {
    head: Words<LongWord>,
    own_range: Words<LeaseWord>,
    ended: Words<LongWord>,
    leases: Words<LeaseWord>,
}

impl DaemonPages {
    /// The views.
    ///
    /// # Errors
    /// `Limits`; `Memory` if the mapping is too small or for reading only.
    pub fn new(mapping: &Arc<Mapping>, limits: &PageLimits) -> Result<Self, Error> {
        limits.check()?;
        Ok(Self {
            head: mapping.words(0, HEAD_WORDS)?,
            own_range: mapping.words(LINE, 1)?,
            ended: mapping.words(PageLimits::ended_at(), limits.ended_entries as usize)?,
            leases: mapping.words(limits.leases_at(), limits.lease_words as usize)?,
        })
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
        // Relaxed loads and stores between two counts: odd while the pair is being changed. The fence keeps the
        // stores behind the first count, the Release store keeps them before the second; both pair with `digested`.
        let version = self.head[VERSION].load(Ordering::Relaxed);
        self.head[VERSION].store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.head[DIGESTED].store(digested.sequence.get(), Ordering::Relaxed);
        self.head[POSITION].store(digested.position, Ordering::Relaxed);
        self.head[VERSION].store(version.wrapping_add(2), Ordering::Release);
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
    own_range: Reads<LeaseWord>,
    ended: Reads<LongWord>,
    leases: Reads<LeaseWord>,
}

impl DaemonView {
    /// The views.
    ///
    /// # Errors
    /// `Limits`; `Memory` if the mapping is too small.
    pub fn new(mapping: &Arc<Mapping>, limits: &PageLimits) -> Result<Self, Error> {
        limits.check()?;
        Ok(Self {
            head: mapping.reads(0, HEAD_WORDS)?,
            own_range: mapping.reads(LINE, 1)?,
            ended: mapping.reads(PageLimits::ended_at(), limits.ended_entries as usize)?,
            leases: mapping.reads(limits.leases_at(), limits.lease_words as usize)?,
        })
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

    /// How far the log is digested.
    pub fn digested(&self) -> Digested {
        loop {
            // The words are read with Acquire: the pair is read between the two counts.
            let before = self.head.read(VERSION);
            let found = Digested {
                sequence: Sequence::new(self.head.read(DIGESTED)),
                position: self.head.read(POSITION),
            };
            if before.is_multiple_of(2) && self.head.read(VERSION) == before {
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

    const LIMITS: PageLimits = PageLimits { slots: 3, open_entries: 2, lease_words: 5, ended_entries: 2 };

    fn map(bytes: usize) -> Arc<Mapping> {
        let memory = shared::create(c"pages", bytes).unwrap();
        Mapping::new(&memory, bytes, Access::Write).unwrap()
    }

    #[test]
    fn both_sides_see_the_same() {
        let mapping = map(LIMITS.daemon_bytes().unwrap());
        let (daemon, view) =
            (DaemonPages::new(&mapping, &LIMITS).unwrap(), DaemonView::new(&mapping, &LIMITS).unwrap());
        let digested = Digested { sequence: Sequence::new(7), position: 8192 };
        daemon.publish_digested(digested);
        daemon.publish_settled(Sequence::new(9));
        let granted = daemon.leases()[4].grant(LeaseState::Read);
        let own = daemon.own_range().grant(LeaseState::Write);
        for inode in 11..14 {
            daemon.push_ended(InodeNumber::new(inode));
        }
        assert_eq!((view.digested(), view.settled()), (digested, Sequence::new(9)));
        assert_eq!((view.lease(4), view.own_range()), (granted, own));
        assert_eq!(view.lease(5).state, LeaseState::None);
        assert_eq!(view.ended_count(), 3);
        let list = [view.ended(0), view.ended(1), view.ended(2)];
        assert_eq!(list, [Some(InodeNumber::new(11)), Some(InodeNumber::new(12)), None]);
    }

    #[test]
    fn what_is_open_is_noted_until_the_table_is_full() {
        let client = ClientPages::new(&map(LIMITS.client_bytes().unwrap()), &LIMITS).unwrap();
        let inode = InodeNumber::new;
        assert!(client.note_open(inode(5)) && client.note_open(inode(6)) && !client.note_open(inode(7)));
        assert!(client.is_open(inode(6)) && !client.is_open(inode(7)));
        client.note_closed(inode(5));
        assert!(!client.is_open(inode(5)) && client.note_open(inode(7)));
        client.commit().begin(Sequence::new(3));
        assert_eq!(client.commit().load(), Sequence::new(3));
        assert_eq!(client.inside().slots.len(), 3);
    }

    #[test]
    fn impossible_limits_are_refused() {
        let zero = PageLimits { slots: 0, ..LIMITS };
        let huge = PageLimits { lease_words: PAGE_LIMIT_MAX + 1, ..LIMITS };
        for limits in [zero, huge] {
            assert!(limits.client_bytes().is_err() && limits.daemon_bytes().is_err());
        }
        let small = map(64);
        let many = PageLimits { lease_words: 5000, ..LIMITS };
        assert!(DaemonView::new(&small, &many).is_err());
    }
}
