//! A counter of events that a thread can wait for: it wakes threads that wait for a connection or for a listener.
//!
//! The notifier increments the counter, then checks for sleepers; the sleeper registers itself, then compares the
//! counter (inside the kernel's wait). SeqCst keeps both orders, so at least one of the two sees the other, and a
//! notifier without sleepers makes no system call.

use ipc::sync::{Ordering, Word};
use ipc::{Host, Time, WAKE_ALL, Waited};
use std::sync::Arc;

#[derive(Debug, Default)]
pub(crate) struct EventCounter {
    count: Word,
    sleepers: Word,
    /// Notified with this one: a listener waits for all its half-open connections at once.
    parent: Option<Arc<EventCounter>>,
}

impl EventCounter {
    pub fn new(parent: Option<Arc<EventCounter>>) -> Arc<Self> {
        Arc::new(Self { count: Word::new(0), sleepers: Word::new(0), parent })
    }

    /// The current value. A thread reads it before it checks for work, and passes it to [`Self::wait`].
    pub fn value(&self) -> u32 {
        // Acquire: pairs with the SeqCst addition of the notifier.
        self.count.load(Ordering::Acquire)
    }

    /// Counts an event, and wakes all sleepers.
    pub fn notify(&self, host: &dyn Host) {
        // SeqCst: pairs with the addition of a sleeper.
        self.count.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            host.wake(&self.count, WAKE_ALL);
        }
        if let Some(parent) = &self.parent {
            parent.notify(host);
        }
    }

    /// Sleeps until the value differs from `seen`.
    pub fn wait(&self, host: &dyn Host, seen: u32, until: Option<Time>) -> Waited {
        let _sleeper = Sleeper::new(self);
        host.wait(&self.count, seen, until)
    }
}

/// Counts a sleeper, also if its thread unwinds.
struct Sleeper<'a>(&'a EventCounter);

impl<'a> Sleeper<'a> {
    fn new(counter: &'a EventCounter) -> Self {
        // SeqCst: pairs with the load in `notify`.
        counter.sleepers.fetch_add(1, Ordering::SeqCst);
        Self(counter)
    }
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        self.0.sleepers.fetch_add(u32::MAX, Ordering::SeqCst);
    }
}
