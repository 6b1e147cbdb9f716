//! The words that one LibFS and its SharedFS share, and the protocol over them: how an operation uses a lease
//! without a call, and how SharedFS takes the lease away without the holder's help (CC-NVM, Assise §3.3; schedules
//! 1.2, 1.6, 2.2, 2.3).
//!
//! Guarantees. After `LeaseWord::revoke`, then a [`Scan`] that is done *or* `SealWord::seal`, no operation that saw the
//! lease as it was counts any more, and the commit word read then, or the cut that the seal gave, covers all that
//! count. Either ends within the grace period that the caller gives the scan; a stopped or dead holder delays nobody
//! longer.
//!
//! Between what one side says and then looks at, on both sides, stands a full fence; that of the operations may be
//! left to the other side ([`FenceBy`]), which then fences for both, after [`LeaseWord::revoke`] and in [`SealWord::seal`].
//!
//! An operation: [`Inside::enter`]; [`LeaseWord::load`] must be what was granted; work; for a write
//! [`CommitWord::commit`] and [`SealWord::load`]; [`Inside::leave`]. If the seal was not open, the record counts if the
//! cut is it or behind it. Nobody waits while inside. A revocation: [`LeaseWord::revoke`]; a [`Scan`] polled until done,
//! else seal; then read the cut.
//!
//! `tests/loom.rs` compiles this file over loom's atomics and tries every interleaving of small cases.

use crate::sync::{LongWord, Ordering, fence};
use format::{InodeNumber, Sequence};

/// The largest sequence that is believed: what a broken LibFS writes is cut to it.
const LAST_MAX: u64 = u64::MAX >> 1;

/// Who puts the full fence between what an operation says, that it is inside or that its record counts, and what it
/// looks at next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceBy {
    /// The operation, by locked exchanges: each waits until all that was stored before has left the processor.
    Operation,
    /// Who revokes, seals or recovers, by [`crate::Host::fence_others`], which this process accepted.
    Revoker,
}

/// The last record of a log that counts, as long as the log is not sealed. Written by the LibFS alone; SharedFS takes
/// the value only as an upper bound.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct CommitWord(LongWord);

impl CommitWord {
    /// The word of a log whose last record is `last`.
    pub fn new(last: Sequence) -> Self {
        Self(LongWord::new(last.get()))
    }

    /// Begins a log at `last`. Only before a LibFS has the memory.
    pub fn begin(&self, last: Sequence) {
        // Release: pairs with the Acquire of `load` on the other side.
        self.0.store(last.get(), Ordering::Release);
    }

    /// The last record that was committed.
    pub fn load(&self) -> Sequence {
        // Acquire: pairs with the Release of `commit`: what it counts can be read from the log.
        Sequence::new(self.0.load(Ordering::Acquire).min(LAST_MAX))
    }

    /// Makes all records up to `last` count if the log is not sealed: the caller looks at the [`SealWord`], and at
    /// whether the daemon is alive, after this. The records' bytes were stored (and fenced, see `pmem`) before.
    #[inline]
    pub fn commit(&self, last: Sequence, fence: FenceBy) {
        match fence {
            FenceBy::Operation => drop(self.0.exchange_full(last.get())),
            FenceBy::Revoker => self.0.store_before_look(last.get()),
        }
    }
}

/// What a seal word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seal {
    /// What was committed before this was seen counts.
    Open,
    /// Being sealed: what counts is not known yet.
    Sealing,
    /// Sealed: records up to this one count, none after it ever will.
    Sealed(Sequence),
}

/// Whether a log is cut, and where. Written by SharedFS alone; the LibFS has its page mapped read-only.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct SealWord(LongWord);

const OPEN: u64 = 0;
const SEALING: u64 = 1;
/// A cut stands as its sequence behind this.
const CUT_FIRST: u64 = 2;

impl SealWord {
    /// The word of a log that is not sealed: zero, as fresh memory is.
    pub fn new() -> Self {
        Self(LongWord::new(OPEN))
    }

    /// What it says.
    #[inline]
    pub fn load(&self) -> Seal {
        // Not before the commit before it, by whoever fences (see `seal`). Acquire: what SharedFS did before the cut is
        // seen.
        match self.0.load(Ordering::SeqCst) {
            OPEN => Seal::Open,
            SEALING => Seal::Sealing,
            cut => Seal::Sealed(Sequence::new(cut - CUT_FIRST)),
        }
    }

    /// Cuts the log and gives the cut. `fence_others` is a full fence in the threads of the LibFS, if they leave
    /// that to it. Not by two threads at once.
    pub fn seal(&self, commit: &CommitWord, fence_others: impl FnOnce()) -> Sequence {
        if let Seal::Sealed(cut) = self.load() {
            return cut;
        }
        self.0.store(SEALING, Ordering::SeqCst);
        // Full fences, here and in the LibFS between its commit and its look: either it sees this word changed, or
        // the load below sees its commit.
        fence(Ordering::SeqCst);
        fence_others();
        let cut = commit.load();
        // Release: pairs with the Acquire in `load`.
        self.0.store(CUT_FIRST + cut.get(), Ordering::Release);
        cut
    }
}

/// What a lease word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// Nothing is held under this number.
    None,
    /// Held for reading.
    Read,
    /// Held for writing.
    Write,
    /// Being taken away: nobody begins anything under it.
    Revoking,
}

/// State and generation of a lease word. The generation grows by one at each grant, so a word that was taken away
/// and granted to other ends is never mistaken for what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// What may be done.
    pub state: LeaseState,
    /// Which grant of this word; below 2^62.
    pub generation: u64,
}

impl Lease {
    fn to_raw(self) -> u64 {
        let state = match self.state {
            LeaseState::None => 0,
            LeaseState::Read => 1,
            LeaseState::Write => 2,
            LeaseState::Revoking => 3,
        };
        self.generation << 2 | state
    }

    #[inline]
    fn from_raw(raw: u64) -> Self {
        let state = match raw & 3 {
            0 => LeaseState::None,
            1 => LeaseState::Read,
            2 => LeaseState::Write,
            _ => LeaseState::Revoking,
        };
        Self { state, generation: raw >> 2 }
    }
}

/// One lease. Written by SharedFS alone; the LibFS has its page mapped read-only.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct LeaseWord(LongWord);

impl LeaseWord {
    /// A word under which nothing is held.
    pub fn new() -> Self {
        Self(LongWord::new(0))
    }

    /// What the word says. An operation calls this after [`Inside::enter`].
    #[inline]
    pub fn load(&self) -> Lease {
        // SeqCst: pairs with the store and fence of `revoke`; together with the full fence behind `enter`, either this
        // load sees `Revoking` or the scan sees the operation inside.
        Lease::from_raw(self.0.load(Ordering::SeqCst))
    }

    /// Grants: gives what the holder has to find from now on.
    pub fn grant(&self, state: LeaseState) -> Lease {
        // Relaxed: SharedFS is the only writer, and it holds its own lock over the word.
        let before = Lease::from_raw(self.0.load(Ordering::Relaxed));
        let lease = Lease { state, generation: before.generation + 1 };
        // Release: pairs with the SeqCst load in `load`; what the grant promises was made true before.
        self.0.store(lease.to_raw(), Ordering::Release);
        lease
    }

    /// Begins to take the lease away. A [`Scan`] begun after this, and after [`crate::Host::fence_others`] if operations
    /// leave that to us, finds every operation that still uses it.
    pub fn revoke(&self) {
        let before = Lease::from_raw(self.0.load(Ordering::Relaxed));
        let lease = Lease { state: LeaseState::Revoking, ..before };
        self.0.store(lease.to_raw(), Ordering::SeqCst);
        // Full fence: the store above comes before the loads of the scan. Pairs with the full fence that stands between
        // an entry and the load of this word.
        fence(Ordering::SeqCst);
    }

    /// Ends it: nothing is held.
    pub fn end(&self) {
        let before = Lease::from_raw(self.0.load(Ordering::Relaxed));
        // Release: pairs with `load`.
        self.0.store(Lease { state: LeaseState::None, ..before }.to_raw(), Ordering::Release);
    }
}

/// Where one thread says that it is inside: odd while it is. On a line of its own. Written by that thread alone.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Slot(LongWord);

/// Where threads that found no slot say it: a count of those inside for each of two sides. SharedFS chooses the
/// side that they enter on, so that the other one empties.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Overflow {
    side: LongWord,
    inside: [Slot; 2],
}

impl Slot {
    /// A slot that nobody is inside at.
    pub fn new() -> Self {
        Self(LongWord::new(0))
    }
}

impl Overflow {
    /// Nobody inside.
    pub fn new() -> Self {
        Self { side: LongWord::new(0), inside: [Slot::new(), Slot::new()] }
    }
}

/// Proof of being inside, to be given back to [`Inside::leave`]. Not left on drop: a killed thread leaves nothing.
#[derive(Debug)]
#[must_use = "a thread that stays inside holds up every revocation for the whole grace period"]
pub enum Entered {
    /// At this slot.
    Slot(usize),
    /// On this side of the overflow.
    Overflow(usize),
}

/// All places of one session to be inside at.
#[derive(Clone, Copy, Debug)]
pub struct Inside<'a> {
    /// One a thread.
    pub slots: &'a [Slot],
    /// For the threads beyond.
    pub overflow: &'a Overflow,
}

impl Inside<'_> {
    /// Goes inside at the thread's own slot, or beside the others if it has none. The lease word is read after it:
    /// without a slot this is a full fence, with one it is or it is not.
    #[inline]
    pub fn enter(&self, slot: Option<usize>, fence: FenceBy) -> Entered {
        match slot {
            Some(index) => {
                let word = &self.slots[index].0;
                // Relaxed: only this thread writes the slot.
                let count = word.load(Ordering::Relaxed);
                assert!(count & 1 == 0, "a thread goes inside once, and a slot has one thread");
                // Full fence, here or there: pairs with the fence in `revoke`.
                match fence {
                    FenceBy::Operation => drop(word.exchange_full(count.wrapping_add(1))),
                    FenceBy::Revoker => word.store_before_look(count.wrapping_add(1)),
                }
                Entered::Slot(index)
            }
            None => {
                // Relaxed: either side is right, the choice only helps the scan to end.
                let side = (self.overflow.side.load(Ordering::Relaxed) & 1) as usize;
                // Full fence: pairs with the fence in `revoke`.
                self.overflow.inside[side].0.fetch_add_full(1);
                Entered::Overflow(side)
            }
        }
    }

    /// Goes outside. What was done inside, the commit too, is seen by a scan that sees this.
    #[inline]
    pub fn leave(&self, entered: Entered) {
        match entered {
            Entered::Slot(index) => {
                let word = &self.slots[index].0;
                let count = word.load(Ordering::Relaxed);
                // Release: pairs with the Acquire in the scan.
                word.store(count.wrapping_add(1), Ordering::Release);
            }
            Entered::Overflow(side) => {
                // Release: pairs with the Acquire in the scan.
                self.overflow.inside[side].0.fetch_add(u64::MAX, Ordering::Release);
            }
        }
    }

    /// Begins to wait for everybody who is inside now. For SharedFS, after [`LeaseWord::revoke`] of one or many
    /// words; one scan at a time a session (two would send the overflow to and fro).
    pub fn scan(&self) -> Scan {
        // Acquire: pairs with the Release in `leave`.
        let odd = self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let count = slot.0.load(Ordering::Acquire);
            (count & 1 == 1).then_some((index, count))
        });
        let inside = odd.collect();
        // Relaxed: a hint for those who enter.
        let side = self.overflow.side.load(Ordering::Relaxed) & 1;
        let mut scan = Scan { inside, drained: [false; 2] };
        if !scan.drain(self) && scan.drained == [false; 2] {
            self.overflow.side.store(1 - side, Ordering::Relaxed);
        }
        scan
    }
}

/// A wait, without waiting in itself, until each thread that was inside at its beginning has been outside once.
#[derive(Debug)]
pub struct Scan {
    /// Slots that were inside and have not changed since.
    inside: Vec<(usize, u64)>,
    /// Sides of the overflow that were empty at some moment since.
    drained: [bool; 2],
}

impl Scan {
    /// Looks again; true when nobody of them is inside any more. What they did is seen then.
    pub fn done(&mut self, inside: &Inside<'_>) -> bool {
        // Acquire: pairs with the Release in `leave`.
        self.inside.retain(|&(index, count)| inside.slots[index].0.load(Ordering::Acquire) == count);
        self.drain(inside) && self.inside.is_empty()
    }

    fn drain(&mut self, inside: &Inside<'_>) -> bool {
        for (drained, side) in self.drained.iter_mut().zip(&inside.overflow.inside) {
            // Acquire: pairs with the Release in `leave`.
            *drained = *drained || side.0.load(Ordering::Acquire) == 0;
        }
        match self.drained {
            [true, true] => return true,
            // Relaxed: a hint for those who enter: the side that still has to empty gets nobody new.
            [true, false] => inside.overflow.side.store(0, Ordering::Relaxed),
            [false, true] => inside.overflow.side.store(1, Ordering::Relaxed),
            [false, false] => {}
        }
        false
    }
}

/// Until when this node may serve, nanoseconds on the clock of [`crate::Host::now`]. Written by SharedFS.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct ValidUntil(LongWord);

impl ValidUntil {
    /// A node that may serve until `ns`.
    pub fn new(ns: u64) -> Self {
        Self(LongWord::new(ns))
    }

    /// The end of validity.
    pub fn load_ns(&self) -> u64 {
        // Acquire: pairs with the Release below; who sees a longer validity sees what was agreed for it.
        self.0.load(Ordering::Acquire)
    }

    /// Moves the end.
    pub fn store_ns(&self, ns: u64) {
        // Release: pairs with the Acquire above.
        self.0.store(ns, Ordering::Release);
    }
}

/// Words in the page of generations.
pub const GENERATIONS: usize = 4096;

/// Generation of the blocks of all files that share this word: raised before any of their blocks is used again.
/// Written by SharedFS, mapped read-only by every LibFS of the node.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Generation(LongWord);

impl Generation {
    /// A generation's first value.
    pub fn new() -> Self {
        Self(LongWord::new(0))
    }

    /// Which of the words is an inode's.
    #[inline]
    pub fn index_of(inode: InodeNumber) -> usize {
        // Multiplication by the golden ratio spreads neighbours; the upper bits are the well mixed ones.
        const SHIFT: u32 = u64::BITS - GENERATIONS.ilog2();
        (inode.get().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> SHIFT) as usize
    }

    /// The generation, to be read before a copy.
    #[inline]
    pub fn before_copy(&self) -> u64 {
        // Acquire: the copy's loads come after it.
        self.0.load(Ordering::Acquire)
    }

    /// True if what was copied since [`Self::before_copy`] gave `before` was not used for something else meanwhile.
    #[inline]
    pub fn still(&self, before: u64) -> bool {
        // Acquire fence: the copy's loads come before the load below. Pairs with the fence in `raise`: who copied
        // a byte stored after it sees the raised word.
        fence(Ordering::Acquire);
        self.0.load(Ordering::Relaxed) == before
    }

    /// Ends every copy's validity; blocks may be used again when this returns.
    pub fn raise(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
        // Full fence: the new word comes before every store into the blocks. Pairs with the fence in `still`.
        fence(Ordering::SeqCst);
    }
}
