//! A lock between the threads of this process. Locking and unlocking it is no system call as long as no thread waits.

use ipc::sync::Ordering;
use ipc::{Host, SystemHost, WAKE_ALL, Word};
use std::time::Duration;

/// Interval in which a waiter checks the lock: a child that runs in this memory may have been killed after it freed the
/// lock, before it woke a waiter.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and another thread may sleep until the lock is free.
const WANTED: u32 = 2;

/// The lock.
#[derive(Debug)]
pub struct ProcessLock(Word);

impl ProcessLock {
    /// A free lock.
    pub const fn new() -> Self {
        Self(Word::new(FREE))
    }

    /// Locks, and waits as long as that takes.
    pub fn take(&self) -> ProcessGuard<'_> {
        // Acquire, here and below: pairs with the Release of the holder before.
        if self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            while self.0.swap(WANTED, Ordering::Acquire) != FREE {
                SystemHost.wait(&self.0, WANTED, Some(SystemHost.now().after(CHECK_INTERVAL)));
            }
        }
        ProcessGuard(self)
    }

    /// Frees the lock in a forked child, in which the thread that may have held it does not exist.
    pub fn free_in_child(&self) {
        self.0.store(FREE, Ordering::Relaxed);
    }
}

/// The lock is free again when this is dropped.
#[derive(Debug)]
#[must_use = "the lock is free again when this is dropped"]
pub struct ProcessGuard<'a>(&'a ProcessLock);

impl Drop for ProcessGuard<'_> {
    fn drop(&mut self) {
        if self.0.0.swap(FREE, Ordering::Release) == WANTED {
            SystemHost.wake(&self.0.0, WAKE_ALL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    #[test]
    fn one_thread_at_a_time_and_all_of_them_in_the_end() {
        static LOCK: ProcessLock = ProcessLock::new();
        static COUNT: AtomicU64 = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let _guard = LOCK.take();
                        let count = COUNT.load(Relaxed);
                        std::hint::spin_loop();
                        COUNT.store(count + 1, Relaxed);
                    }
                });
            }
        });
        assert_eq!(COUNT.load(Relaxed), 80_000);
        assert_eq!(LOCK.0.load(Ordering::Relaxed), FREE);
    }

    #[test]
    fn a_thread_that_waits_is_woken() {
        static LOCK: ProcessLock = ProcessLock::new();
        let guard = LOCK.take();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| drop(LOCK.take()));
            while LOCK.0.load(Ordering::Relaxed) != WANTED {
                std::hint::spin_loop();
            }
            drop(guard);
            waiter.join().unwrap();
        });
        assert_eq!(LOCK.0.load(Ordering::Relaxed), FREE);
    }
}
