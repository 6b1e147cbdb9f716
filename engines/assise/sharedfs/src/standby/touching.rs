//! The memory of new logs, touched before records arrive for it.
//!
//! The first store to a page of a file in memory waits until the kernel has provided the page: in the first pass over a
//! new log, a record of 64 KB, and the fsync with it, would wait for 16 pages, twice as long as it takes otherwise. A thread
//! of its own touches them, because a log of 64 MB takes tens of milliseconds. On other media there is nothing to do.

use super::Inner;
use ipc::host::WAKE_ALL;
use ipc::lock::Lock;
use ipc::sync::{Ordering, Word};
use pmem::region::READY_PIECE_BYTES;
use pmem::{Class, Region};

/// The logs whose memory is not touched yet.
pub(super) struct Untouched {
    logs: Lock<Vec<Region>>,
    /// Grows when there are more, and when the standby ends.
    arrived: Word,
}

impl Untouched {
    pub fn new(logs: Lock<Vec<Region>>) -> Self {
        Self { logs, arrived: Word::new(0) }
    }
}

impl Inner {
    /// Whether the thread has anything to do on this medium.
    pub(super) fn touches(&self) -> bool {
        self.medium.class() == Class::Memory
    }

    /// Has the thread touch the memory of logs.
    pub(super) fn touch_later(&self, logs: Vec<Region>) {
        if !logs.is_empty() && self.touches() {
            self.untouched.logs.lock().extend(logs);
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
            let logs = std::mem::take(&mut *self.untouched.logs.lock());
            let ended = || self.ending.load(Ordering::Acquire) != 0;
            for log in &logs {
                let starts = (0..log.bytes()).step_by(READY_PIECE_BYTES as usize);
                for start in starts.take_while(|_| !ended()) {
                    log.touch(start..log.bytes().min(start + READY_PIECE_BYTES));
                }
            }
            if ended() {
                return;
            }
            if logs.is_empty() {
                self.host.wait(&self.untouched.arrived, seen, None);
            }
        }
    }
}
