//! The machine as the rest of the code sees it: clock, randomness, threads, waiting. The simulator implements the
//! same trait.
//!
//! All waiting in the project is waiting for a [`Word`] to change. On a real machine that is a futex (shared, not
//! private, because the word may lie in memory of several processes); in the simulator a waiting thread is not
//! scheduled until another thread wakes the word. The idea of stepping real threads comes from neon's `desim`.

use crate::alive::AliveWord;
use crate::error::Error;
use crate::shared::Words;
use crate::sync::{Ordering, Word, fence, relax};
use crate::sys::{argument, check, syscall};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// A point on the machine's clock, which continues while the machine sleeps (CLOCK_BOOTTIME). Processes of one
/// machine can compare their points; processes of different machines cannot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// From nanoseconds since the machine started.
    pub const fn from_ns(ns: u64) -> Self {
        Self(ns)
    }

    /// Nanoseconds since the machine started.
    pub const fn as_ns(self) -> u64 {
        self.0
    }

    /// The point `span` later, saturating at the end of time.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Time from `earlier` to this point; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Reason why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The thread was woken, or the word had changed already, or the wakeup was spurious: the caller tests the word
    /// again.
    Woken,
    /// The deadline has passed.
    TimedOut,
    /// A signal handler ran.
    Interrupted,
}

/// A started thread.
pub trait Join: Send {
    /// Waits until the thread has ended.
    ///
    /// # Errors
    /// `Panicked`.
    fn join(self: Box<Self>) -> Result<(), Error>;
}

/// After this pause every earlier store of any processor is visible to all: a store buffer drains within
/// microseconds.
pub const FENCE_PAUSE: Duration = Duration::from_millis(10);

/// Count for [`Host::wake`] that wakes every waiter.
pub const WAKE_ALL: u32 = i32::MAX as u32;

/// The machine, real ([`SystemHost`]) or simulated.
pub trait Host: Send + Sync {
    /// Current time on the clock that [`Self::wait`] uses.
    fn now(&self) -> Time;

    /// Wall clock time, nanoseconds since 1970; may jump.
    fn wall(&self) -> i64;

    /// Wall clock time for the timestamps of files, nanoseconds since 1970, as of the last tick of the machine's
    /// clock (a few milliseconds ago). Linux's own file systems take their times from there; reading it costs a few
    /// loads. May jump.
    fn wall_tick(&self) -> i64 {
        self.wall()
    }

    /// 64 random bits.
    fn random(&self) -> u64;

    /// Starts a thread that runs `body`.
    ///
    /// # Errors
    /// `System`: the kernel starts no further thread.
    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, Error>;

    /// Blocks while `word` holds `expected`, until the word is woken or `until` has passed. The test and the sleep
    /// are atomic against [`Self::wake`]. Spurious wakeups are possible.
    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited;

    /// Lets another thread run that waits for this processor, if there is one.
    fn yield_now(&self) {}

    /// Number of the processor that runs this thread, if the host knows it.
    fn processor(&self) -> Option<u32> {
        None
    }

    /// This thread may block in a moment where the host does not see it.
    fn will_block(&self) {}

    /// Wakes at most `count` threads, of any process, that wait on `word`.
    fn wake(&self, word: &Word, count: u32);

    /// Registers this process, so that [`Self::fence_others`] of any process reaches its threads from now on.
    /// Returns false if the machine cannot do that, or not quickly: then each thread executes its own fences.
    fn accept_fences(&self) -> bool {
        false
    }

    /// Executes a full fence in this thread and in every thread of the registered processes. Returns false if the
    /// machine has no such operation: then the caller must pause for [`FENCE_PAUSE`].
    fn fence_others(&self) -> bool {
        fence(Ordering::SeqCst);
        true
    }

    /// Ties a word to the life of this process, until the returned value is dropped: see [`crate::alive`]. The
    /// default is for the simulator, which marks the word itself when it ends a simulated process.
    ///
    /// # Errors
    /// `System`.
    fn tie(&self, word: Words<AliveWord>) -> Result<Box<dyn Send + Sync>, Error> {
        word[0].set_alive();
        Ok(Box::new(()))
    }

    /// Start time of a process of this machine. Process number, start time and [`Self::boot`] identify a process
    /// for ever. `None` if the process is gone. The default is for simulated machines without processes, where all
    /// count as alive.
    fn started(&self, process: u32) -> Option<u64> {
        let _ = process;
        Some(0)
    }

    /// The parent of a process, if the process runs in its parent's memory: a child between vfork and exec. `None` also if
    /// the kernel does not say so.
    fn lender(&self, process: u32) -> Option<u32> {
        let _ = process;
        None
    }

    /// A number that changes each time the machine boots.
    fn boot(&self) -> u64 {
        0
    }
}

/// The real machine.
///
/// `now`, `wall`, `wall_tick`, `random`, `processor`, `wait` and `wake` neither allocate nor change `errno`. Only daemons call
/// `spawn`, never code inside a user's program.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemHost;

/// Longest single sleep in the kernel. The futex clock stops while the machine sleeps, so after a resume a deadline
/// is noticed late by at most this much.
const SLICE: Duration = Duration::from_secs(1);

impl Host for SystemHost {
    fn now(&self) -> Time {
        let time = clock(libc::CLOCK_BOOTTIME);
        Time(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
    }

    fn wall(&self) -> i64 {
        let time = clock(libc::CLOCK_REALTIME);
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    }

    fn wall_tick(&self) -> i64 {
        let time = clock(libc::CLOCK_REALTIME_COARSE);
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    }

    fn random(&self) -> u64 {
        let mut bytes = [0u8; 8];
        loop {
            // SAFETY: the kernel writes at most eight bytes to `bytes`.
            let result = unsafe {
                syscall(libc::SYS_getrandom, [bytes.as_mut_ptr() as usize, bytes.len(), 0, 0, 0, 0])
            };
            if result == bytes.len() as isize {
                return u64::from_ne_bytes(bytes);
            }
            assert!(
                result == -(libc::EINTR as isize),
                "getrandom gives eight bytes or is interrupted: {result}"
            );
        }
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, Error> {
        match std::thread::Builder::new().name(name.to_owned()).spawn(body) {
            Ok(handle) => Ok(Box::new(SystemThread(handle))),
            Err(error) => {
                Err(Error::System { call: "clone", errno: error.raw_os_error().unwrap_or(libc::EAGAIN) })
            }
        }
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        loop {
            let slice = match until {
                Some(until) => {
                    let left = until.since(self.now());
                    if left.is_zero() {
                        return Waited::TimedOut;
                    }
                    Some(left.min(SLICE))
                }
                None => None,
            };
            match futex_wait(word, expected, slice) {
                libc::ETIMEDOUT => {}
                libc::EINTR => return Waited::Interrupted,
                _ => return Waited::Woken,
            }
        }
    }

    fn yield_now(&self) {
        // SAFETY: sched_yield uses no memory, and does not fail.
        let _ = unsafe { syscall(libc::SYS_sched_yield, [0; 6]) };
    }

    fn processor(&self) -> Option<u32> {
        // SAFETY: sched_getcpu uses no memory of its caller; it reads what the kernel shares with the thread.
        u32::try_from(unsafe { libc::sched_getcpu() }).ok()
    }

    fn wake(&self, word: &Word, count: u32) {
        let count = count.min(WAKE_ALL) as usize;
        // SAFETY: FUTEX_WAKE uses the address only as a key.
        let result =
            unsafe { syscall(libc::SYS_futex, [word.address(), libc::FUTEX_WAKE as usize, count, 0, 0, 0]) };
        check("futex", result).expect("waking a mapped, aligned word cannot fail");
    }

    fn accept_fences(&self) -> bool {
        crate::barrier::accept()
    }

    fn fence_others(&self) -> bool {
        crate::barrier::fence_others()
    }

    fn tie(&self, word: Words<AliveWord>) -> Result<Box<dyn Send + Sync>, Error> {
        crate::alive::tie_to_process(word)
    }

    fn started(&self, process: u32) -> Option<u64> {
        crate::alive::started(process)
    }

    fn lender(&self, process: u32) -> Option<u32> {
        crate::alive::lender(process)
    }

    fn boot(&self) -> u64 {
        crate::alive::boot()
    }
}

/// Reads a clock through the vDSO.
fn clock(id: libc::clockid_t) -> libc::timespec {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a local timespec. These clocks exist on every supported kernel, so errno is not set.
    let result = unsafe { libc::clock_gettime(id, &mut time) };
    assert!(result == 0, "clock {id} exists on Linux since 2.6.39");
    time
}

/// Errno of one FUTEX_WAIT, 0 when woken.
fn futex_wait(word: &Word, expected: u32, slice: Option<Duration>) -> i32 {
    let time = slice
        .map(|left| libc::timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
    let time = time.as_ref().map_or(0, |time| std::ptr::from_ref(time) as usize);
    // SAFETY: the word is mapped and aligned while `word` is borrowed; `time` is null or points to a local
    // timespec.
    let result = unsafe {
        syscall(libc::SYS_futex, [word.address(), argument(libc::FUTEX_WAIT), expected as usize, time, 0, 0])
    };
    i32::try_from(-result).expect("an errno is an int")
}

struct SystemThread(std::thread::JoinHandle<()>);

impl Join for SystemThread {
    fn join(self: Box<Self>) -> Result<(), Error> {
        self.0.join().map_err(|_| Error::Panicked)
    }
}

/// Adaptive polling: the time for which a waiter polls before it sleeps. A wait that ended within the limit, polling or
/// asleep, doubles the time up to the limit; a longer one halves it down to a sixteenth of the limit. All threads with
/// the same kind of wait share one.
///
/// A waiter that polls for longer than `OWN_NS` yields its processor between two polls: the thread whose answer it
/// waits for, or the next one in the chain, may have no other.
#[derive(Debug)]
pub struct Spin {
    limit_ns: u32,
    now_ns: AtomicU32,
    /// Time for which a waiter keeps its processor.
    own_ns: u32,
}

/// Default limit. Waking a sleeping thread costs 30 to 60 us; longer polling on a busy machine costs more than
/// that.
pub const SPIN_NS_MAX: u32 = 20_000;

/// An answer of a thread on another processor is there within this time; see [`Spin`].
const OWN_NS: u32 = 3_000;

/// Polls between two reads of the clock, while the waiter keeps its processor.
const SPIN_ROUND: u32 = 16;

impl Spin {
    /// Polls for at most `limit_ns` nanoseconds; 0 sleeps at once.
    pub const fn new(limit_ns: u32) -> Self {
        Self { limit_ns, now_ns: AtomicU32::new(limit_ns), own_ns: OWN_NS }
    }

    /// Same for polls that are system calls: a waiter yields after each.
    pub const fn by_calls(limit_ns: u32) -> Self {
        Self { own_ns: 0, ..Self::new(limit_ns) }
    }

    /// Polls until `ready` returns true or the time is over; returns whether it was ready.
    pub fn poll(&self, host: &dyn Host, mut ready: impl FnMut() -> bool) -> bool {
        if self.limit_ns == 0 {
            return ready();
        }
        // An immediate success does not read the clock, and shows nothing: the waiter may have slept before.
        if ready() {
            return true;
        }
        // Relaxed: a hint that orders nothing.
        let span_ns = self.now_ns.load(Ordering::Relaxed);
        let begin = host.now();
        let end = begin.after(Duration::from_nanos(span_ns.into()));
        let own_end = begin.after(Duration::from_nanos(self.own_ns.into()));
        let mut now = begin;
        while now < end {
            if now >= own_end {
                host.yield_now();
            }
            for _ in 0..if now < own_end { SPIN_ROUND } else { 1 } {
                if ready() {
                    self.learn(Duration::ZERO);
                    return true;
                }
                relax();
            }
            now = host.now();
        }
        false
    }

    /// To be told how long a wait took whose waiter slept after [`Self::poll`].
    pub fn learn(&self, waited: Duration) {
        // Relaxed: a hint that orders nothing.
        let span_ns = self.now_ns.load(Ordering::Relaxed);
        let next_ns = if waited <= Duration::from_nanos(self.limit_ns.into()) {
            span_ns.saturating_mul(2).min(self.limit_ns)
        } else {
            (span_ns / 2).max(self.limit_ns / 16).max(1)
        };
        if next_ns != span_ns {
            self.now_ns.store(next_ns, Ordering::Relaxed);
        }
    }
}

/// Waits until `predicate` holds for the word's value, and returns that value: polls first, then sleeps. The thread
/// that changes the word must wake it.
///
/// # Errors
/// `TimedOut`, `Interrupted`.
pub fn wait_until(
    host: &dyn Host,
    word: &Word,
    spin: &Spin,
    until: Option<Time>,
    predicate: impl Fn(u32) -> bool,
) -> Result<u32, Error> {
    // Acquire: pairs with the store, of whatever strength, by which the other side published its data.
    let mut value = word.load(Ordering::Acquire);
    let polled = spin.poll(host, || {
        value = word.load(Ordering::Acquire);
        predicate(value)
    });
    let slept = (!polled).then(|| host.now());
    loop {
        if predicate(value) {
            slept.inspect(|begin| spin.learn(host.now().since(*begin)));
            return Ok(value);
        }
        match host.wait(word, value, until) {
            Waited::Woken => value = word.load(Ordering::Acquire),
            Waited::TimedOut => {
                // The change may have come together with the deadline.
                let last = word.load(Ordering::Acquire);
                return if predicate(last) { Ok(last) } else { Err(Error::TimedOut) };
            }
            Waited::Interrupted => return Err(Error::Interrupted),
        }
    }
}

/// A yield that takes longer has let another thread run.
const YIELD_MAX: Duration = Duration::from_micros(50);

/// Waits for a time that is not much longer than a wake-up takes. The thread keeps its processor as long as no other thread
/// wants it: a sleeper of 0.4 ms may wake milliseconds later, because a processor without work sleeps, too. Otherwise it sleeps.
pub fn pause(host: &dyn Host, time: Duration) {
    let mut now = host.now();
    let until = now.after(time);
    while now < until {
        let before = now;
        host.yield_now();
        now = host.now();
        // On a simulated machine time passes only while a thread sleeps.
        if now.since(before) > YIELD_MAX || host.processor().is_none() {
            host.wait(&Word::new(0), 0, Some(until));
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    /// The time that a waiter would poll for now.
    fn span(spin: &Spin) -> u32 {
        spin.now_ns.load(Ordering::Relaxed)
    }

    #[test]
    fn a_waiter_polls_for_as_long_as_its_last_waits_took() {
        let (spin, host) = (Spin::new(16_000), SystemHost);
        assert!(!spin.poll(&host, || false));
        assert_eq!(span(&spin), 16_000);
        for expected in [8_000, 4_000, 2_000, 1_000, 1_000] {
            spin.learn(Duration::from_millis(1));
            assert_eq!(span(&spin), expected);
        }
        // The waiter slept, and polling up to the limit would have been enough.
        spin.learn(Duration::from_micros(15));
        assert_eq!(span(&spin), 2_000);
        assert!(spin.poll(&host, || true));
        assert_eq!(span(&spin), 2_000);
        let mut polls = 0;
        let third = || {
            polls += 1;
            polls == 3
        };
        assert!(spin.poll(&host, third));
        assert_eq!(span(&spin), 4_000);
    }

    /// A host on which each yield takes so many microseconds, with the time and how often a thread slept.
    struct Yields(u64, AtomicU64, AtomicU32);

    impl Host for Yields {
        fn now(&self) -> Time {
            Time::from_ns(self.1.load(Ordering::Relaxed) * 1000)
        }

        fn wall(&self) -> i64 {
            0
        }

        fn random(&self) -> u64 {
            0
        }

        fn spawn(&self, _: &str, _: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, Error> {
            unreachable!("nothing here starts a thread")
        }

        fn wait(&self, _: &Word, _: u32, until: Option<Time>) -> Waited {
            self.1.store(until.unwrap().as_ns() / 1000, Ordering::Relaxed);
            self.2.fetch_add(1, Ordering::Relaxed);
            Waited::TimedOut
        }

        fn yield_now(&self) {
            self.1.fetch_add(self.0, Ordering::Relaxed);
        }

        fn processor(&self) -> Option<u32> {
            Some(0)
        }

        fn wake(&self, _: &Word, _: u32) {}
    }

    #[test]
    fn a_pause_keeps_the_processor_until_another_thread_wants_it() {
        for (yield_us, sleeps) in [(1, 0), (40, 0), (60, 1)] {
            let host = Yields(yield_us, AtomicU64::new(0), AtomicU32::new(0));
            pause(&host, Duration::from_micros(400));
            assert_eq!(host.now().as_ns(), 400_000, "{yield_us}");
            assert_eq!(host.2.into_inner(), sleeps, "{yield_us}");
        }
    }

    #[test]
    fn a_wait_ends_by_value_wake_or_time() {
        let host = SystemHost;
        let word = Word::new(1);
        assert_eq!(host.wait(&word, 2, None), Waited::Woken);
        let until = host.now().after(Duration::from_millis(2));
        assert_eq!(host.wait(&word, 1, Some(until)), Waited::TimedOut);
        assert!(host.now() >= until);
    }

    #[test]
    fn a_sleeping_waiter_is_woken() {
        let word = Arc::new(Word::new(0));
        let theirs = word.clone();
        let thread = SystemHost
            .spawn(
                "changer",
                Box::new(move || {
                    theirs.store(7, Ordering::Release);
                    SystemHost.wake(&theirs, WAKE_ALL);
                }),
            )
            .unwrap();
        let seen = wait_until(&SystemHost, &word, &Spin::new(0), None, |value| value != 0);
        assert_eq!(seen, Ok(7));
        thread.join().unwrap();
    }

    #[test]
    fn a_panic_is_seen_by_who_joins() {
        let body = Box::new(|| std::panic::resume_unwind(Box::new("ends here")));
        assert_eq!(SystemHost.spawn("ends", body).unwrap().join(), Err(Error::Panicked));
    }

    #[test]
    fn errno_stays_as_it_was() {
        // SAFETY: errno is this thread's own int.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: as above.
        unsafe { *errno = 4242 };
        let word = Word::new(1);
        let _ = SystemHost.wait(&word, 2, None);
        let _ = SystemHost.wait(&word, 1, Some(SystemHost.now().after(Duration::from_micros(50))));
        SystemHost.wake(&word, 1);
        let _ = (SystemHost.random(), SystemHost.wall());
        // SAFETY: as above.
        assert_eq!(unsafe { *errno }, 4242);
    }

    #[test]
    fn random_words_differ() {
        assert_ne!(SystemHost.random(), SystemHost.random());
    }
}
