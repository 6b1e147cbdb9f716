//! A machine of one thread that behaves equally in each run: its clock moves when it is read, waits return when their
//! time has come, and random numbers are a counter. Crash proofs run their daemons on it, each case on a thread of its
//! own: no number is drawn twice within a case, also by the daemons that recover.

use ipc::host::{Host, Join, Time, Waited};
use ipc::{Error, Word};
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How far a look moves the clock.
const LOOK: Duration = Duration::from_micros(1);

/// 2020-09-13, so that times of files are none of 1970's.
const WALL_NS: i64 = 1_600_000_000_000_000_000;

/// Work of another role on the same thread: true if there was some.
type Drive = Box<dyn FnMut() -> bool>;

thread_local! {
    static DRAWN: Cell<u64> = const { Cell::new(0) };
    static DRIVE: RefCell<Option<Drive>> = const { RefCell::new(None) };
}

/// From now on, each wait on this thread runs this first, and checks again as long as it did some work.
pub fn drive_by(drive: Drive) {
    DRIVE.with(|slot| *slot.borrow_mut() = Some(drive));
}

/// Does it; not within itself.
fn drive() -> bool {
    DRIVE.with(|slot| {
        let Ok(mut slot) = slot.try_borrow_mut() else { return false };
        slot.as_mut().is_some_and(|drive| drive())
    })
}

/// See the module.
pub struct StillHost {
    now_ns: AtomicU64,
    wakes: AtomicU64,
}

impl StillHost {
    /// The machine at the beginning of a case.
    pub fn first() -> Arc<Self> {
        DRAWN.set(0);
        Self::again()
    }

    /// The machine after it died.
    pub fn again() -> Arc<Self> {
        Arc::new(Self { now_ns: AtomicU64::new(0), wakes: AtomicU64::new(0) })
    }

    /// Number of calls that wake threads.
    pub fn wakes(&self) -> u64 {
        self.wakes.load(Ordering::Relaxed)
    }
}

impl Host for StillHost {
    fn now(&self) -> Time {
        Time::from_ns(self.now_ns.fetch_add(LOOK.as_nanos() as u64, Ordering::Relaxed))
    }

    fn wall(&self) -> i64 {
        WALL_NS
    }

    fn random(&self) -> u64 {
        // Spread over all bits (Weyl's sequence by the golden ratio), never twice the same.
        DRAWN.set(DRAWN.get() + 1);
        DRAWN.get().wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn spawn(&self, name: &str, _: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, Error> {
        panic!("a thread on a machine of one: {name}")
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        if word.load(Ordering::Acquire) != expected {
            return Waited::Woken;
        }
        if drive() {
            return Waited::Woken;
        }
        let until = until.expect("an end of what nobody else can end");
        self.now_ns.fetch_max(until.as_ns(), Ordering::Relaxed);
        Waited::TimedOut
    }

    fn wake(&self, _: &Word, _: u32) {
        self.wakes.fetch_add(1, Ordering::Relaxed);
    }
}
