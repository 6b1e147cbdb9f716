//! A mutex that waits through [`Host`], for all code that runs under the simulator. The simulator runs one thread
//! at a time: a thread that blocked in the standard library's mutex would never give the turn back.
//!
//! The mutex is not fair. A guard that is dropped by a panic unlocks, and the value may be inconsistent then; the
//! caller deals with that (the daemon aborts, a mount is poisoned). A thread never holds a lock while it waits for
//! anything else.

use crate::host::{Host, Waited};
use crate::sync::{Ordering, Word};
use std::cell::UnsafeCell;
use std::sync::Arc;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and another thread may sleep until the lock is free.
const WANTED: u32 = 2;

/// Attempts before a thread sleeps. Few are enough, since no thread waits for anything while it holds a lock.
const TRIES: u32 = 64;

/// A value that one thread at a time can access.
pub struct Lock<T> {
    host: Arc<dyn Host>,
    state: Word,
    value: UnsafeCell<T>,
}

// SAFETY: only the thread that has changed `state` from `FREE` accesses the value.
unsafe impl<T: Send> Send for Lock<T> {}
// SAFETY: as above; threads pass the value on to each other, so it must be `Send`.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    /// Makes an unlocked mutex.
    pub fn new(host: Arc<dyn Host>, value: T) -> Self {
        Self { host, state: Word::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Locks the mutex, and waits as long as that takes.
    #[inline]
    pub fn lock(&self) -> Guard<'_, T> {
        for _ in 0..TRIES {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            crate::sync::relax();
        }
        // Acquire: pairs with the Release of the holder before.
        while self.state.swap(WANTED, Ordering::Acquire) != FREE {
            // The swap above tests the state again, for whatever reason the wait ended.
            let (Waited::Woken | Waited::TimedOut | Waited::Interrupted) =
                self.host.wait(&self.state, WANTED, None);
        }
        Guard { lock: self, unshared: std::marker::PhantomData }
    }

    /// Locks the mutex if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        // Acquire: pairs with the Release of the holder before.
        self.state.compare_exchange_here(FREE, HELD).ok()?;
        Some(Guard { lock: self, unshared: std::marker::PhantomData })
    }

    /// Frees the lock; true if a thread may sleep until it is free.
    #[inline]
    fn free(&self) -> bool {
        // Release: pairs with the Acquire of the next holder.
        let is_wanted = self.state.compare_exchange_here(HELD, FREE).is_err();
        if is_wanted {
            self.state.store(FREE, Ordering::Release);
        }
        is_wanted
    }

    /// True if a thread sleeps until the lock is free, as far as the holder can tell.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        // Relaxed: a hint.
        self.state.load(Ordering::Relaxed) == WANTED
    }

    /// Takes the value out of a mutex that is no longer shared.
    pub fn into_inner(self) -> T {
        self.value.into_inner()
    }
}

impl<T> std::fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lock").field("state", &self.state).finish_non_exhaustive()
    }
}

/// Exclusive access to a mutex's value until the guard is dropped.
#[derive(Debug)]
#[must_use = "the lock is free again when this is dropped"]
pub struct Guard<'a, T> {
    lock: &'a Lock<T>,
    /// Makes the guard `Sync` only if the value is.
    unshared: std::marker::PhantomData<&'a mut T>,
}

impl<T> std::ops::Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> std::ops::DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one, and borrowed for writing.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // The simulator ends a killed thread at an access to a word: the lock is free then, too.
        let unwinding = FreeOnUnwind(self.lock);
        let is_wanted = self.lock.free();
        std::mem::forget(unwinding);
        if is_wanted {
            self.lock.host.wake(&self.lock.state, 1);
        }
    }
}

/// Frees a lock whose guard is unwound while it frees it.
struct FreeOnUnwind<'a, T>(&'a Lock<T>);

impl<T> Drop for FreeOnUnwind<'_, T> {
    #[cold]
    fn drop(&mut self) {
        if self.0.free() {
            self.0.host.wake(&self.0.state, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::SystemHost;

    #[test]
    fn one_thread_at_a_time_has_the_value() {
        let lock = Arc::new(Lock::new(Arc::new(SystemHost), (0u64, 0u64)));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let lock = lock.clone();
                let body = move || {
                    for _ in 0..2000 {
                        let mut value = lock.lock();
                        value.0 += 1;
                        value.1 += 1;
                        assert_eq!(value.0, value.1);
                    }
                };
                SystemHost.spawn("adder", Box::new(body)).unwrap()
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(*lock.lock(), (8000, 8000));
        let held = lock.lock();
        assert!(lock.try_lock().is_none());
        drop(held);
        assert!(lock.try_lock().is_some());
    }
}
