//! The host of a program in a history, by which the order of its changes is known.

use ipc::{Error as IpcError, Host, Join, Time, Waited, Word};
use sim::SimHost;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// A program's host, which notes when its LibFS last asked for the time of a record.
pub struct Stamped {
    host: Arc<SimHost>,
    last: AtomicI64,
}

impl Stamped {
    pub fn new(host: Arc<SimHost>) -> Arc<Self> {
        Arc::new(Self { host, last: AtomicI64::new(0) })
    }

    /// When that was.
    pub fn last(&self) -> i64 {
        self.last.load(Ordering::SeqCst)
    }
}

impl Host for Stamped {
    fn now(&self) -> Time {
        self.host.now()
    }

    fn wall(&self) -> i64 {
        let wall = self.host.wall();
        self.last.store(wall, Ordering::SeqCst);
        wall
    }

    fn random(&self) -> u64 {
        self.host.random()
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, IpcError> {
        self.host.spawn(name, body)
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        self.host.wait(word, expected, until)
    }

    fn wake(&self, word: &Word, count: u32) {
        self.host.wake(word, count);
    }
}
