//! A word that says "look again": how whoever waits for a connection, or for the door of a listener, is woken.
//!
//! The teller changes the word, then looks whether somebody sleeps; the sleeper says that it sleeps, then looks at the
//! word (inside the kernel's wait). Both orders are kept by SeqCst, so one of the two sees the other, and a teller
//! whom nobody waits for makes no call.

use ipc::sync::{Ordering, Word};
use ipc::{Host, Time, WAKE_ALL, Waited};
use std::sync::Arc;

#[derive(Debug, Default)]
pub(crate) struct News {
    told: Word,
    sleepers: Word,
    /// Hears everything that this one hears: a listener waits for all its half-open connections at once.
    listener: Option<Arc<News>>,
}

impl News {
    pub fn heard_by(listener: Option<Arc<News>>) -> Arc<Self> {
        Arc::new(Self { told: Word::new(0), sleepers: Word::new(0), listener })
    }

    /// To be taken before one looks, and given to [`Self::sleep`].
    pub fn seen(&self) -> u32 {
        // Acquire: pairs with the SeqCst addition of the teller.
        self.told.load(Ordering::Acquire)
    }

    /// Something changed.
    pub fn tell(&self, host: &dyn Host) {
        // SeqCst: pairs with the addition in `sleep`.
        self.told.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            host.wake(&self.told, WAKE_ALL);
        }
        if let Some(listener) = &self.listener {
            listener.tell(host);
        }
    }

    /// Sleeps until something is told after `seen`.
    pub fn sleep(&self, host: &dyn Host, seen: u32, until: Option<Time>) -> Waited {
        let _awake = Sleeper::new(self);
        host.wait(&self.told, seen, until)
    }
}

/// Counts a sleeper, also if it is unwound.
struct Sleeper<'a>(&'a News);

impl<'a> Sleeper<'a> {
    fn new(news: &'a News) -> Self {
        // SeqCst: pairs with the load in `tell`.
        news.sleepers.fetch_add(1, Ordering::SeqCst);
        Self(news)
    }
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        self.0.sleepers.fetch_add(u32::MAX, Ordering::SeqCst);
    }
}
