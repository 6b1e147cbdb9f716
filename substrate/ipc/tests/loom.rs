//! Explores every interleaving, and every reordering that the memory model allows, of small cases of the protocol
//! in `words.rs`: the same source, compiled over loom's atomics. Planted bugs show that these tests can fail. The
//! simulator could not find those bugs, because it runs one thread at a time.

#[path = "loom/sync.rs"]
mod sync;
#[allow(dead_code, reason = "the whole file is compiled, the cases use a part")]
#[path = "../src/words.rs"]
mod words;

use format::Sequence;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use std::panic::{AssertUnwindSafe, catch_unwind};
use sync::{Bug, Ordering, plant};
use words::{
    CommitWord, FenceBy, Generation, Inside, Lease, LeaseState, LeaseWord, Overflow, Seal, SealWord, Slot,
};

/// One session, and the record that its log holds.
struct Session {
    slots: Vec<Slot>,
    overflow: Overflow,
    lease: LeaseWord,
    commit: CommitWord,
    seal: SealWord,
    /// The side that executes the writer's fences.
    fence: FenceBy,
    /// Loom fails the model if this is read while it may be written.
    record: UnsafeCell<u64>,
}

impl Session {
    fn new(slots: usize, fence: FenceBy) -> (Arc<Self>, Lease) {
        let session = Self {
            slots: (0..slots).map(|_| Slot::new()).collect(),
            overflow: Overflow::new(),
            lease: LeaseWord::new(),
            commit: CommitWord::new(Sequence::new(0)),
            seal: SealWord::new(),
            fence,
            record: UnsafeCell::new(0),
        };
        let granted = session.lease.grant(LeaseState::Write);
        (Arc::new(session), granted)
    }

    fn inside(&self) -> Inside<'_> {
        Inside { slots: &self.slots, overflow: &self.overflow }
    }

    /// A write under the lease; returns true if the record is valid.
    fn write(&self, slot: Option<usize>, granted: Lease) -> bool {
        let inside = self.inside();
        let entered = inside.enter(slot, self.fence);
        let mut seal = None;
        if self.lease.load() == granted && self.commit.load() == Sequence::new(0) {
            self.record.with_mut(|record| {
                // SAFETY: loom checks that no other thread reads or writes meanwhile.
                unsafe { *record = 7 };
            });
            self.commit.commit(Sequence::new(1), self.fence);
            seal = Some(self.seal.load());
        }
        inside.leave(entered);
        loop {
            match seal {
                None => return false,
                Some(Seal::Open) => return true,
                Some(Seal::Sealed(cut)) => return cut == Sequence::new(1),
                Some(Seal::Sealing) => {
                    thread::yield_now();
                    seal = Some(self.seal.load());
                }
            }
        }
    }

    /// Revokes the lease; returns the cut. With `force`, seals if the first poll finds an operation in progress.
    fn revoke(&self, force: bool) -> u64 {
        self.lease.revoke();
        let inside = self.inside();
        let mut scan = inside.scan();
        while !scan.done(&inside) {
            if force {
                return self.seal.seal(&self.commit, || ()).get();
            }
            thread::yield_now();
        }
        self.commit.load().get()
    }
}

fn writer_against_revoker(slot: Option<usize>, force: bool) {
    run_writer(slot, force, FenceBy::Operation);
}

fn run_writer(slot: Option<usize>, force: bool, fence: FenceBy) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(move || {
        let (session, granted) = Session::new(1, fence);
        let theirs = session.clone();
        let writer = thread::spawn(move || theirs.write(slot, granted));
        let cut = session.revoke(force);
        if cut == 1 {
            // SAFETY: loom checks that no thread writes meanwhile.
            session.record.with(|record| assert_eq!(unsafe { *record }, 7, "a committed record is whole"));
        }
        let wrote = writer.join().expect("the writer does not panic");
        assert_eq!(wrote, cut == 1, "a write counts if and only if it lies before the cut");
        let sealed = session.seal.load() != Seal::Open;
        assert!(sealed || session.commit.load().get() == cut, "nothing is committed after the cut was read");
    });
}

fn found(case: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(case)).is_err()
}

#[test]
fn no_write_is_lost_or_late() {
    writer_against_revoker(Some(0), false);
}

#[test]
fn no_write_is_lost_or_late_when_the_log_is_sealed() {
    writer_against_revoker(Some(0), true);
}

#[test]
fn no_write_is_lost_or_late_without_a_slot() {
    writer_against_revoker(None, false);
    writer_against_revoker(None, true);
}

/// A lock that is decided under a lock lease: it stands outside of the words, and the revoker that took the lease or sealed
/// the log reads it there.
fn lock_against_import(force: bool, fence: FenceBy) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(move || {
        let (session, granted) = Session::new(1, fence);
        let list = Arc::new(AtomicU64::new(0));
        let (theirs, written) = (session.clone(), list.clone());
        let program = thread::spawn(move || {
            let inside = theirs.inside();
            let entered = inside.enter(Some(0), theirs.fence);
            let mut counts = false;
            if theirs.lease.load() == granted {
                written.store(7, Ordering::Relaxed);
                theirs.fence.hold_back();
                counts = theirs.seal.load() == Seal::Open;
            }
            inside.leave(entered);
            counts
        });
        session.revoke(force);
        let imported = list.load(Ordering::Relaxed);
        let counts = program.join().expect("the program does not panic");
        assert!(!counts || imported == 7, "a lock that counts is imported");
        assert!(imported == list.load(Ordering::Relaxed) || !counts, "what counts changes no more");
    });
}

#[test]
fn no_lock_that_counts_is_lost_by_an_import() {
    lock_against_import(false, FenceBy::Operation);
    lock_against_import(true, FenceBy::Operation);
    assert!(found(|| lock_against_import(true, FenceBy::Revoker)), "nobody fences");
}

/// Leaving the fence to a revoker that executes none is an error, and loom, which has no fence in other threads,
/// finds it.
#[test]
fn operations_that_leave_the_fence_to_nobody_are_found() {
    assert!(found(|| run_writer(Some(0), false, FenceBy::Revoker)));
    assert!(found(|| run_writer(Some(0), true, FenceBy::Revoker)));
}

#[test]
fn a_plain_entry_is_found() {
    plant(Bug::PlainEntry);
    assert!(found(|| writer_against_revoker(Some(0), false)));
    assert!(found(|| writer_against_revoker(None, false)));
}

#[test]
fn a_scan_without_fence_is_found() {
    plant(Bug::NoFence);
    assert!(found(|| writer_against_revoker(Some(0), false)));
}

#[test]
fn two_readers_on_either_side_of_the_overflow_are_waited_for() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(|| {
        let (session, granted) = Session::new(0, FenceBy::Operation);
        let busy = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (session, busy) = (session.clone(), busy.clone());
                thread::spawn(move || {
                    let entered = session.inside().enter(None, FenceBy::Operation);
                    if session.lease.load() == granted {
                        busy.fetch_add(1, Ordering::Relaxed);
                        busy.fetch_sub(1, Ordering::Relaxed);
                    }
                    session.inside().leave(entered);
                })
            })
            .collect();
        session.revoke(false);
        assert_eq!(busy.load(Ordering::Relaxed), 0, "nobody works under the lease after the scan");
        for thread in threads {
            thread.join().expect("a reader does not panic");
        }
        assert_eq!(busy.load(Ordering::Relaxed), 0);
    });
}

fn copy_against_reuse() {
    loom::model(|| {
        let shared = Arc::new((Generation::new(), [AtomicU64::new(0), AtomicU64::new(0)]));
        let theirs = shared.clone();
        let daemon = thread::spawn(move || {
            theirs.0.raise();
            for block in &theirs.1 {
                block.store(9, Ordering::Relaxed);
            }
        });
        let before = shared.0.before_copy();
        let copy = [shared.1[0].load(Ordering::Relaxed), shared.1[1].load(Ordering::Relaxed)];
        if before == 0 && shared.0.still(before) {
            assert_eq!(copy, [0, 0], "a copy that was confirmed is of the old contents");
        }
        daemon.join().expect("the daemon does not panic");
    });
}

#[test]
fn a_confirmed_copy_is_never_of_blocks_used_again() {
    copy_against_reuse();
}

#[test]
fn a_confirmation_without_fence_is_found() {
    plant(Bug::NoFence);
    assert!(found(copy_against_reuse));
}
