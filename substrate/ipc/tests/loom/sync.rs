//! The types of `ipc::sync` over loom's atomics, with bugs that the tests plant in them.

use loom::sync::atomic::AtomicU64;
use std::cell::Cell;

pub use loom::sync::atomic::{Ordering, fence as real_fence};

/// Planted bug.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    None,
    /// Threads enter an operation by a plain store.
    PlainEntry,
    /// SharedFS scans without a fence after its store; readers validate without a fence after their copy.
    NoFence,
}

thread_local! {
    // Loom runs all threads of a model on the thread that started the model.
    static BUG: Cell<Bug> = const { Cell::new(Bug::None) };
}

/// Breaks everything that runs on this thread from now on.
pub fn plant(bug: Bug) {
    BUG.set(bug);
}

pub fn fence(order: Ordering) {
    if BUG.get() != Bug::NoFence {
        real_fence(order);
    }
}

/// Loom has no fence in other threads.
pub fn hold_compiler_back() {}

#[derive(Debug, Default)]
pub struct LongWord(AtomicU64);

impl LongWord {
    pub fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    pub fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    pub fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }

    pub fn store_before_look(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }

    pub fn exchange_full(&self, value: u64) -> u64 {
        if BUG.get() == Bug::PlainEntry {
            let before = self.0.load(Ordering::Relaxed);
            self.0.store(value, Ordering::Release);
            return before;
        }
        let before = self.0.swap(value, Ordering::AcqRel);
        real_fence(Ordering::SeqCst);
        before
    }

    pub fn fetch_add_full(&self, value: u64) -> u64 {
        let before = self.0.fetch_add(value, Ordering::AcqRel);
        if BUG.get() != Bug::PlainEntry {
            real_fence(Ordering::SeqCst);
        }
        before
    }

    pub fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_add(value, order)
    }
}
