//! A counter of events that threads of one process can wait for.
//!
//! The notifier increments the counter, then checks for sleepers; the sleeper registers itself, then compares the
//! counter (inside the kernel's wait). SeqCst keeps both orders, so at least one of the two sees the other, and a
//! notifier without sleepers makes no system call.

use crate::host::{Host, Time, WAKE_ALL, Waited};
use crate::sync::{Ordering, Word};
use std::sync::Arc;

/// See the module.
#[derive(Debug, Default)]
pub struct EventCounter {
    count: Word,
    sleepers: Word,
    /// Notified with this one until [`Self::detach`]: a listener waits for all its half-open connections at once.
    parent: Option<Arc<EventCounter>>,
    /// 1 after [`Self::detach`].
    detached: Word,
}

impl EventCounter {
    /// Makes a counter that notifies its parent, if it has one.
    pub fn new(parent: Option<Arc<EventCounter>>) -> Arc<Self> {
        Arc::new(Self { parent, ..Self::default() })
    }

    /// The parent is not notified from now on: a later event does not concern the threads that wait for it.
    pub fn detach(&self) {
        // Relaxed: one notification more wakes a thread for nothing, and causes no error.
        self.detached.store(1, Ordering::Relaxed);
    }

    /// The current value. A thread reads it before it checks for work, and passes it to [`Self::wait`].
    pub fn value(&self) -> u32 {
        // SeqCst: pairs with the addition of the notifier; a thread that sleeps elsewhere says so before it reads the value.
        self.count.load(Ordering::SeqCst)
    }

    /// Counts an event, and wakes all sleepers.
    pub fn notify(&self, host: &dyn Host) {
        // SeqCst: pairs with the addition of a sleeper.
        self.count.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            host.wake(&self.count, WAKE_ALL);
        }
        if let Some(parent) = &self.parent
            && self.detached.load(Ordering::Relaxed) == 0
        {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::SystemHost;

    #[test]
    fn a_parent_is_notified_until_it_is_left() {
        let parent = EventCounter::new(None);
        let child = EventCounter::new(Some(parent.clone()));
        child.notify(&SystemHost);
        assert_eq!((child.value(), parent.value()), (1, 1));
        child.detach();
        child.notify(&SystemHost);
        assert_eq!((child.value(), parent.value()), (2, 1));
    }
}
