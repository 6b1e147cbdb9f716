//! Requests that wait for a lock. Each has its own thread, so that serving threads are never used up; an interrupt of
//! the kernel, after a signal, ends a wait.
//!
//! An interrupt may be taken before its request is known here, because threads serve messages concurrently. So it is
//! kept for a while. Requests that never wait are answered in any case, and newer interrupts replace theirs.

use ipc::sync::Ordering;
use ipc::{Host, Lock, Waited, Word};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::task::Wake;

/// The request should ask the engine again.
const WOKEN: u32 = 1;
/// A signal came.
const INTERRUPTED: u32 = 2;
/// Limit of interrupts that are kept for later requests.
const EARLY_MAX: usize = 256;

/// A waiting request.
pub(crate) struct Waiter {
    host: Arc<dyn Host>,
    word: Word,
}

/// The reason for which a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Woken,
    Interrupted,
}

impl Waiter {
    fn set(&self, bit: u32) {
        // Release: pairs with the swap in `sleep`.
        self.word.fetch_or(bit, Ordering::Release);
        self.host.wake(&self.word, 1);
    }

    /// Sleeps until the request is woken or interrupted.
    pub(crate) fn sleep(&self) -> Reason {
        loop {
            // Acquire: pairs with the fetch_or in `set`.
            let bits = self.word.swap(0, Ordering::Acquire);
            if bits & INTERRUPTED != 0 {
                return Reason::Interrupted;
            }
            if bits & WOKEN != 0 {
                return Reason::Woken;
            }
            // The swap above decides, whatever the reason for which the wait ended.
            let (Waited::Woken | Waited::TimedOut | Waited::Interrupted) =
                self.host.wait(&self.word, 0, None);
        }
    }
}

impl Wake for Waiter {
    fn wake(self: Arc<Self>) {
        self.set(WOKEN);
    }
}

#[derive(Default)]
struct WaitsState {
    waiting: BTreeMap<u64, Arc<Waiter>>,
    early: VecDeque<u64>,
    over: bool,
}

/// All waiting requests of a mount.
pub(crate) struct Waits {
    host: Arc<dyn Host>,
    state: Lock<WaitsState>,
    count: Word,
    count_max: usize,
}

impl Waits {
    pub(crate) fn new(host: Arc<dyn Host>, count_max: usize) -> Self {
        let state = Lock::new(host.clone(), WaitsState::default());
        Self { host, state, count: Word::new(0), count_max }
    }

    /// Registers a request that may wait; none if there are too many.
    pub(crate) fn enter(&self, unique: u64) -> Option<Arc<Waiter>> {
        let mut state = self.state.lock();
        if state.over || state.waiting.len() >= self.count_max {
            return None;
        }
        let early = state.early.iter().any(|early| *early == unique);
        let word = Word::new(if early { INTERRUPTED } else { 0 });
        let waiter = Arc::new(Waiter { host: self.host.clone(), word });
        state.waiting.insert(unique, waiter.clone());
        // Relaxed: under the lock, and only `end` reads it.
        self.count.fetch_add(1, Ordering::Relaxed);
        Some(waiter)
    }

    /// A registered request was answered.
    pub(crate) fn leave(&self, unique: u64) {
        if self.state.lock().waiting.remove(&unique).is_some() {
            // Release: pairs with the load in `end`.
            self.count.fetch_add(u32::MAX, Ordering::Release);
            self.host.wake(&self.count, ipc::WAKE_ALL);
        }
    }

    /// A signal interrupts a request.
    pub(crate) fn interrupt(&self, unique: u64) {
        let mut state = self.state.lock();
        if let Some(waiter) = state.waiting.get(&unique) {
            waiter.set(INTERRUPTED);
            return;
        }
        if state.early.len() >= EARLY_MAX {
            state.early.pop_front();
        }
        state.early.push_back(unique);
    }

    /// Interrupts all waiting requests, and waits for their threads.
    pub(crate) fn end(&self) {
        {
            let mut state = self.state.lock();
            state.over = true;
            state.waiting.values().for_each(|waiter| waiter.set(INTERRUPTED));
        }
        loop {
            // Acquire: pairs with the fetch_add in `leave`.
            match self.count.load(Ordering::Acquire) {
                0 => return,
                count => {
                    let (Waited::Woken | Waited::TimedOut | Waited::Interrupted) =
                        self.host.wait(&self.count, count, None);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipc::SystemHost;

    fn waits(count_max: usize) -> Waits {
        Waits::new(Arc::new(SystemHost), count_max)
    }

    #[test]
    fn a_signal_counts_more_than_a_wake_and_may_come_early() {
        let waits = waits(2);
        let waiter = waits.enter(4).unwrap();
        waiter.clone().wake();
        assert_eq!(waiter.sleep(), Reason::Woken);
        waiter.clone().wake();
        waits.interrupt(4);
        assert_eq!(waiter.sleep(), Reason::Interrupted);
        waits.interrupt(6);
        assert_eq!(waits.enter(6).unwrap().sleep(), Reason::Interrupted);
        assert!(waits.enter(8).is_none(), "there is a bound");
        waits.leave(4);
        assert!(waits.enter(8).is_some());
    }

    #[test]
    fn the_end_waits_for_everybody() {
        let waits = Arc::new(waits(4));
        let waiter = waits.enter(2).unwrap();
        let theirs = waits.clone();
        let thread = SystemHost
            .spawn(
                "waits",
                Box::new(move || {
                    assert_eq!(waiter.sleep(), Reason::Interrupted);
                    theirs.leave(2);
                }),
            )
            .unwrap();
        waits.end();
        assert!(waits.enter(4).is_none());
        thread.join().unwrap();
    }
}
