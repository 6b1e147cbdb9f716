//! How often the operations of a region were called.

use std::sync::atomic::{AtomicU64, Ordering};

/// Operations on a region by this process: the costs that tests assert. Exact while one thread uses the region.
/// Concurrent threads may lose counts, because a locked addition would cost as much as a small write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Calls of `write` and `store`.
    pub writes: u64,
    /// Bytes that those calls wrote.
    pub bytes: u64,
    /// Calls of `persist`.
    pub persists: u64,
    /// Calls of `fence`.
    pub fences: u64,
    /// Calls of `sync`, including failed ones.
    pub syncs: u64,
}

impl Counters {
    /// Operations since an earlier reading of the counters.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            writes: self.writes - earlier.writes,
            bytes: self.bytes - earlier.bytes,
            persists: self.persists - earlier.persists,
            fences: self.fences - earlier.fences,
            syncs: self.syncs - earlier.syncs,
        }
    }
}

#[derive(Default)]
pub(crate) struct Counts {
    writes: AtomicU64,
    bytes: AtomicU64,
    pub persists: AtomicU64,
    pub fences: AtomicU64,
    pub syncs: AtomicU64,
}

impl Counts {
    #[inline]
    pub fn wrote(&self, bytes: usize) {
        add(&self.writes, 1);
        add(&self.bytes, bytes as u64);
    }

    pub fn get(&self) -> Counters {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counters {
            writes: get(&self.writes),
            bytes: get(&self.bytes),
            persists: get(&self.persists),
            fences: get(&self.fences),
            syncs: get(&self.syncs),
        }
    }
}

/// Relaxed, and not one atomic step: see [`Counters`].
#[inline]
pub(crate) fn add(count: &AtomicU64, more: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}
