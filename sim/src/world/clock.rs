//! A node's clock, as its membership sees it: it began elsewhere than true time, and runs too fast or too slow.

use crate::host::SimHost;
use ipc::{Error, Host, Join, Time, Waited, Word};
use std::sync::Arc;

/// One million, of which a drift is so many parts.
const MILLION: i128 = 1_000_000;

/// See the module.
pub struct NodeClock {
    host: Arc<SimHost>,
    offset_ns: u64,
    drift_ppm: i64,
}

impl NodeClock {
    /// A clock that shows `offset_ns` at the beginning of true time.
    pub fn new(host: Arc<SimHost>, (offset_ns, drift_ppm): (u64, i64)) -> Self {
        Self { host, offset_ns, drift_ppm }
    }

    /// The time that it shows at a true time.
    pub fn shows(&self, truth: Time) -> Time {
        let ran = i128::from(truth.as_ns()) * (MILLION + i128::from(self.drift_ppm)) / MILLION;
        Time::from_ns(self.offset_ns + u64::try_from(ran).expect("a simulation is short"))
    }

    /// The true time at which it shows this, or a moment later.
    fn truth(&self, shown: Time) -> Time {
        let ran = i128::from(shown.as_ns().saturating_sub(self.offset_ns));
        let truth = ran * MILLION / (MILLION + i128::from(self.drift_ppm)) + 1;
        Time::from_ns(u64::try_from(truth).unwrap_or(u64::MAX))
    }
}

impl Host for NodeClock {
    fn now(&self) -> Time {
        self.shows(self.host.now())
    }

    fn wall(&self) -> i64 {
        self.host.wall()
    }

    fn random(&self) -> u64 {
        self.host.random()
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, Error> {
        self.host.spawn(name, body)
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        self.host.wait(word, expected, until.map(|until| self.truth(until)))
    }

    fn wake(&self, word: &Word, count: u32) {
        self.host.wake(word, count);
    }
}
