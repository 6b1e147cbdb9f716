//! The memory of new parts of logs, touched before records arrive for it.
//!
//! The first store to a page of a file in memory waits until the kernel has provided the page: in the first pass over a
//! new log, a record of 64 KB, and the fsync with it, would wait for 16 pages, twice as long as it takes otherwise. A thread
//! of its own touches them, because a log of 64 MB takes tens of milliseconds in all. On other media there is nothing to do.

use super::Inner;
use ipc::host::WAKE_ALL;
use ipc::lock::Lock;
use ipc::sync::{Ordering, Word};
use pmem::region::READY_PIECE_BYTES;
use pmem::{Class, Region};
use std::ops::Range;

/// The parts of logs whose memory is not touched yet.
pub(super) struct Untouched {
    parts: Lock<Vec<(Region, Range<u64>)>>,
    /// Grows when there are more, and when the standby ends.
    arrived: Word,
}

impl Untouched {
    pub fn new(parts: Lock<Vec<(Region, Range<u64>)>>) -> Self {
        Self { parts, arrived: Word::new(0) }
    }
}

impl Inner {
    /// Whether the thread has anything to do on this medium.
    pub(super) fn touches(&self) -> bool {
        self.medium.class() == Class::Memory
    }

    /// Has the thread touch the memory of parts of logs.
    pub(super) fn touch_later(&self, parts: Vec<(Region, Range<u64>)>) {
        if !parts.is_empty() && self.touches() {
            self.untouched.parts.lock().extend(parts);
            self.wake_toucher();
        }
    }

    pub(super) fn wake_toucher(&self) {
        // Release: pairs with the Acquire of the thread.
        self.untouched.arrived.fetch_add(1, Ordering::Release);
        self.host.wake(&self.untouched.arrived, WAKE_ALL);
    }

    /// The thread that touches memory.
    pub(super) fn touch_all(&self) {
        loop {
            // Acquire: pairs with the Release of `wake_toucher`.
            let seen = self.untouched.arrived.load(Ordering::Acquire);
            let parts = std::mem::take(&mut *self.untouched.parts.lock());
            let ended = || self.ending.load(Ordering::Acquire) != 0;
            for (log, part) in &parts {
                let starts = part.clone().step_by(READY_PIECE_BYTES as usize);
                for start in starts.take_while(|_| !ended()) {
                    log.touch(start..part.end.min(start + READY_PIECE_BYTES));
                }
            }
            if ended() {
                return;
            }
            if parts.is_empty() {
                self.host.wait(&self.untouched.arrived, seen, None);
            }
        }
    }
}
