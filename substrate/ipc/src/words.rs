//! The words shared by one LibFS and its SharedFS, and the protocol over them: an operation uses a lease without a
//! call, and SharedFS revokes a lease without the holder's cooperation (CC-NVM, Assise §3.3).
//!
//! An operation: [`Inside::enter`]; [`LeaseWord::load`] must equal the granted lease; the work; for a write
//! [`CommitWord::commit`] and [`SealWord::load`]; [`Inside::leave`]. The operation never waits between enter and
//! leave. If the seal is not open, the record is valid if it is not behind the cut.
//!
//! A revocation: [`LeaseWord::revoke`]; then a [`Scan`], polled until it is done, or else [`SealWord::seal`]; then
//! SharedFS reads the cut (the commit word, or the result of the seal).
//!
//! Guarantee. After the scan is done, or after the seal, every valid record that an operation wrote under the
//! revoked lease lies at or before the cut, and no later one becomes valid. The scan ends within the grace period
//! of its caller, which seals otherwise; a stopped or dead holder delays a revocation no longer than that.
//!
//! Both sides store a word and then load another one, with a full fence in between. The fence of the operations may
//! be left to the other side ([`FenceBy`]), which then executes both fences, after [`LeaseWord::revoke`] and in
//! [`SealWord::seal`].
//!
//! `tests/loom.rs` compiles this file over loom's atomics and explores every interleaving of small cases.

use crate::sync::{LongWord, Ordering, fence, hold_compiler_back};
use format::{InodeNumber, Sequence};

/// Largest accepted sequence number; a greater one, from a defective LibFS, is reduced to it.
const LAST_MAX: u64 = u64::MAX >> 1;

/// The side that executes the full fence between an operation's announcement (it has entered, or its record is
/// committed) and its next load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceBy {
    /// The operation, by locked exchanges: each waits until all earlier stores have left the processor.
    Operation,
    /// The thread that revokes, seals or recovers, by [`crate::Host::fence_others`], for which this process is
    /// registered.
    Revoker,
}

impl FenceBy {
    /// Between what an operation stored outside of these words and what it looks at next.
    #[inline]
    pub fn hold_back(self) {
        match self {
            Self::Operation => fence(Ordering::SeqCst),
            // The revoker's fence holds the processor back.
            Self::Revoker => hold_compiler_back(),
        }
    }
}

/// Sequence of the last committed record of a log, valid while the log is not sealed. Only the LibFS writes it;
/// SharedFS treats the value as an upper bound.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct CommitWord(LongWord);

impl CommitWord {
    /// Makes the word of a log whose last record is `last`.
    pub fn new(last: Sequence) -> Self {
        Self(LongWord::new(last.get()))
    }

    /// Starts a log at `last`, before any LibFS has the memory.
    pub fn begin(&self, last: Sequence) {
        // Release: pairs with the Acquire of `load` on the other side.
        self.0.store(last.get(), Ordering::Release);
    }

    /// Sequence of the last committed record.
    pub fn load(&self) -> Sequence {
        // Acquire: pairs with the Release of `commit`, so that the committed records can be read from the log.
        Sequence::new(self.0.load(Ordering::Acquire).min(LAST_MAX))
    }

    /// Commits all records up to `last`, which is final if the log is not sealed. After this the caller checks the
    /// [`SealWord`], and that the daemon is alive. The bytes of the records were stored (and fenced, see `pmem`)
    /// before.
    #[inline]
    pub fn commit(&self, last: Sequence, fence: FenceBy) {
        match fence {
            FenceBy::Operation => drop(self.0.exchange_full(last.get())),
            FenceBy::Revoker => self.0.store_before_look(last.get()),
        }
    }
}

/// State of a seal word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seal {
    /// Not sealed: a record that was committed before this was read is valid.
    Open,
    /// Being sealed: the cut is not known yet.
    Sealing,
    /// Sealed: records up to this one are valid, none behind it ever becomes valid.
    Sealed(Sequence),
}

/// The seal of a log: whether the log is cut, and where. Only SharedFS writes it; the LibFS maps its page
/// read-only.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct SealWord(LongWord);

const OPEN: u64 = 0;
const SEALING: u64 = 1;
/// A cut is stored as its sequence plus this.
const CUT_FIRST: u64 = 2;

impl SealWord {
    /// Makes the word of a log that is not sealed: zero, like fresh memory.
    pub fn new() -> Self {
        Self(LongWord::new(OPEN))
    }

    /// Decodes the word.
    #[inline]
    pub fn load(&self) -> Seal {
        // Ordered after the commit before it by the fence of either side (see `seal`). Acquire: stores of SharedFS
        // before the cut are visible.
        match self.0.load(Ordering::SeqCst) {
            OPEN => Seal::Open,
            SEALING => Seal::Sealing,
            cut => Seal::Sealed(Sequence::new(cut - CUT_FIRST)),
        }
    }

    /// Seals the log and returns the cut. `fence_others` executes a full fence in the threads of the LibFS, if they
    /// leave their fence to this side. Two threads must not seal at once.
    pub fn seal(&self, commit: &CommitWord, fence_others: impl FnOnce()) -> Sequence {
        if let Seal::Sealed(cut) = self.load() {
            return cut;
        }
        self.0.store(SEALING, Ordering::SeqCst);
        // Full fences, here and in the LibFS between its commit and its load of this word: either the LibFS sees
        // this word changed, or the load below sees the commit.
        fence(Ordering::SeqCst);
        fence_others();
        let cut = commit.load();
        // Release: pairs with the Acquire in `load`.
        self.0.store(CUT_FIRST + cut.get(), Ordering::Release);
        cut
    }
}

/// State of a lease word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// No lease is granted under this number.
    None,
    /// Granted for reading.
    Read,
    /// Granted for writing.
    Write,
    /// Being revoked: no operation may begin under it.
    Revoking,
}

/// State and generation of a lease word. Each grant increments the generation, so a lease that was revoked and
/// granted for something else is never mistaken for the earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Permitted access.
    pub state: LeaseState,
    /// Number of the grant; below 2^62.
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

/// One lease. Only SharedFS writes it; the LibFS maps its page read-only.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct LeaseWord(LongWord);

impl LeaseWord {
    /// Makes a word without a lease.
    pub fn new() -> Self {
        Self(LongWord::new(0))
    }

    /// Decodes the word. An operation calls this after [`Inside::enter`].
    #[inline]
    pub fn load(&self) -> Lease {
        // SeqCst: pairs with the store and fence of `revoke`. With the full fence after `enter`, either this load
        // sees `Revoking` or the scan sees the operation inside.
        Lease::from_raw(self.0.load(Ordering::SeqCst))
    }

    /// Grants the lease and returns the value that the holder's loads must equal from now on.
    pub fn grant(&self, state: LeaseState) -> Lease {
        // Relaxed: SharedFS is the only writer, and its own lock protects the word.
        let before = Lease::from_raw(self.0.load(Ordering::Relaxed));
        let lease = Lease { state, generation: before.generation + 1 };
        // Release: pairs with the SeqCst load in `load`; everything that the grant implies was stored before.
        self.0.store(lease.to_raw(), Ordering::Release);
        lease
    }

    /// Begins the revocation. A [`Scan`] that begins after this, and after [`crate::Host::fence_others`] if
    /// operations leave their fence to this side, finds every operation that still uses the lease.
    pub fn revoke(&self) {
        let before = Lease::from_raw(self.0.load(Ordering::Relaxed));
        let lease = Lease { state: LeaseState::Revoking, ..before };
        self.0.store(lease.to_raw(), Ordering::SeqCst);
        // Full fence: the store above precedes the loads of the scan. Pairs with the full fence between an entry
        // and the load of this word.
        fence(Ordering::SeqCst);
    }

    /// Ends the revocation: no lease is granted.
    pub fn end(&self) {
        let before = Lease::from_raw(self.0.load(Ordering::Relaxed));
        // Release: pairs with `load`.
        self.0.store(Lease { state: LeaseState::None, ..before }.to_raw(), Ordering::Release);
    }
}

/// Operation marker of one thread: odd while the thread executes an operation. On a cache line of its own; only
/// that thread writes it.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Slot(LongWord);

/// Operation counters for threads without a slot, one for each of two sides. SharedFS chooses the side on which
/// threads enter, so that the other side drains.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Overflow {
    side: LongWord,
    inside: [Slot; 2],
}

impl Slot {
    /// Makes a slot whose thread is outside.
    pub fn new() -> Self {
        Self(LongWord::new(0))
    }
}

impl Overflow {
    /// Makes counters that are zero.
    pub fn new() -> Self {
        Self { side: LongWord::new(0), inside: [Slot::new(), Slot::new()] }
    }
}

/// Proof that an operation is in progress, to be passed to [`Inside::leave`]. Dropping it does not leave: the
/// session of a killed thread stays inside.
#[derive(Debug)]
#[must_use = "a thread that stays inside holds up every revocation for the whole grace period"]
pub enum Entered {
    /// In the slot with this index.
    Slot(usize),
    /// On this side of the overflow counters.
    Overflow(usize),
}

/// All operation markers of one session.
#[derive(Clone, Copy, Debug)]
pub struct Inside<'a> {
    /// One slot a thread.
    pub slots: &'a [Slot],
    /// Counters for threads that got no slot.
    pub overflow: &'a Overflow,
}

impl Inside<'_> {
    /// Begins an operation in the thread's slot, or in the overflow counters if it has none. The lease word is
    /// loaded after this. With a slot, `fence` decides which side executes the full fence in between; without a
    /// slot this call does.
    #[inline]
    pub fn enter(&self, slot: Option<usize>, fence: FenceBy) -> Entered {
        match slot {
            Some(index) => {
                let word = &self.slots[index].0;
                // Relaxed: only this thread writes the slot.
                let count = word.load(Ordering::Relaxed);
                assert!(count & 1 == 0, "a thread goes inside once, and a slot has one thread");
                // Full fence, by this side or the other: pairs with the fence in `revoke`.
                match fence {
                    FenceBy::Operation => drop(word.exchange_full(count.wrapping_add(1))),
                    FenceBy::Revoker => word.store_before_look(count.wrapping_add(1)),
                }
                Entered::Slot(index)
            }
            None => {
                // Relaxed: either side is correct; the choice only helps the scan to end.
                let side = (self.overflow.side.load(Ordering::Relaxed) & 1) as usize;
                // Full fence: pairs with the fence in `revoke`.
                self.overflow.inside[side].0.fetch_add_full(1);
                Entered::Overflow(side)
            }
        }
    }

    /// Ends an operation. A scan that sees this sees all stores of the operation, its commit included.
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

    /// Begins to wait for all operations that are in progress now. SharedFS calls this after [`LeaseWord::revoke`]
    /// of one or many words, and runs one scan at a time per session, because two would alternate the overflow's
    /// side.
    pub fn scan(&self) -> Scan {
        // Acquire: pairs with the Release in `leave`.
        let odd = self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let count = slot.0.load(Ordering::Acquire);
            (count & 1 == 1).then_some((index, count))
        });
        let inside = odd.collect();
        // Relaxed: a hint for entering threads.
        let side = self.overflow.side.load(Ordering::Relaxed) & 1;
        let mut scan = Scan { inside, drained: [false; 2] };
        if !scan.drain(self) && scan.drained == [false; 2] {
            self.overflow.side.store(1 - side, Ordering::Relaxed);
        }
        scan
    }
}

/// A wait, by polling, until each operation that was in progress at its beginning has ended.
#[derive(Debug)]
pub struct Scan {
    /// Slots that were odd at the beginning and have not changed since.
    inside: Vec<(usize, u64)>,
    /// Sides of the overflow whose counter has been zero at some moment since.
    drained: [bool; 2],
}

impl Scan {
    /// Polls; true once all those operations have ended. Their stores are visible then.
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
            // Relaxed: a hint for entering threads, which then stay away from the side that has to drain.
            [true, false] => inside.overflow.side.store(0, Ordering::Relaxed),
            [false, true] => inside.overflow.side.store(1, Ordering::Relaxed),
            [false, false] => {}
        }
        false
    }
}

/// Time until which this node may serve, in nanoseconds on the clock of [`crate::Host::now`]. SharedFS writes it.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct ValidUntil(LongWord);

impl ValidUntil {
    /// Makes the word of a node that may serve until `ns`.
    pub fn new(ns: u64) -> Self {
        Self(LongWord::new(ns))
    }

    /// End of the validity.
    pub fn load_ns(&self) -> u64 {
        // Acquire: pairs with the Release below; a reader that sees a longer validity sees the state that was
        // agreed for it.
        self.0.load(Ordering::Acquire)
    }

    /// Changes the end.
    pub fn store_ns(&self, ns: u64) {
        // Release: pairs with the Acquire above.
        self.0.store(ns, Ordering::Release);
    }
}

/// Words in the page of generations.
pub const GENERATIONS: usize = 4096;

/// Generation of the blocks of all files that share this word. SharedFS increments it before it reuses a block of
/// any of them; every LibFS of the node maps the page read-only.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Generation(LongWord);

impl Generation {
    /// Makes a word with generation zero.
    pub fn new() -> Self {
        Self(LongWord::new(0))
    }

    /// Index of an inode's word.
    #[inline]
    pub fn index_of(inode: InodeNumber) -> usize {
        // Multiplication by the golden ratio spreads neighbours; the upper bits are the well mixed ones.
        const SHIFT: u32 = u64::BITS - GENERATIONS.ilog2();
        (inode.get().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> SHIFT) as usize
    }

    /// Generation, to be read before a copy.
    #[inline]
    pub fn before_copy(&self) -> u64 {
        // Acquire: the loads of the copy come after this.
        self.0.load(Ordering::Acquire)
    }

    /// True if no block of the copy was reused since [`Self::before_copy`] returned `before`.
    #[inline]
    pub fn still(&self, before: u64) -> bool {
        // Acquire fence: the loads of the copy come before the load below. Pairs with the fence in `raise`: a copy
        // that contains a byte stored after the raise also sees the new generation.
        fence(Ordering::Acquire);
        self.0.load(Ordering::Relaxed) == before
    }

    /// Invalidates all copies that are in progress; the caller may reuse blocks once this returns.
    pub fn raise(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
        // Full fence: the new generation becomes visible before every store into the blocks. Pairs with the fence
        // in `still`.
        fence(Ordering::SeqCst);
    }
}
