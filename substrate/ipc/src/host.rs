//! What the machine gives: clock, randomness, threads, waiting. The seam behind which the simulator stands.
//!
//! All waiting of the project is waiting for a [`Word`] to change: in the real world a futex (shared, not private:
//! the word may lie in memory of several processes), in the simulator a thread that is not chosen until somebody
//! wakes the word. Idea of stepping real threads: neon's `desim`.

use crate::alive::AliveWord;
use crate::error::Error;
use crate::shared::Words;
use crate::sync::{Ordering, Word, fence, relax};
use crate::sys::{argument, check, syscall};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// A point on the machine's clock that runs on while it sleeps (CLOCK_BOOTTIME). Comparable between processes of
/// one machine, not between machines.
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

    /// The point `span` later; the end of time if there is none.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// How long after `earlier` this is; nothing if it is not.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// Woken, or the word was another already, or for no reason: look again.
    Woken,
    /// The point in time has come.
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

/// After so long every store that was made before is seen by all, whatever the processor: it leaves within microseconds.
pub const FENCE_PAUSE: Duration = Duration::from_millis(10);

/// [`Host::wake`]: everybody.
pub const WAKE_ALL: u32 = i32::MAX as u32;

/// The machine, real ([`SystemHost`]) or simulated.
pub trait Host: Send + Sync {
    /// Now, on the clock that [`Self::wait`] uses.
    fn now(&self) -> Time;

    /// Nanoseconds since 1970; may jump.
    fn wall(&self) -> i64;

    /// Nanoseconds since 1970 for the times of files, as the last tick of the machine's clock had it, a few
    /// milliseconds ago: what Linux's own file systems take, and it costs a few loads; may jump.
    fn wall_tick(&self) -> i64 {
        self.wall()
    }

    /// 64 random bits.
    fn random(&self) -> u64;

    /// Starts a thread that runs `body`.
    ///
    /// # Errors
    /// `System`: no thread to be had.
    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, Error>;

    /// Blocks while `word` is `expected`, until it is woken or `until` has come. The look at the word and the
    /// falling asleep are one step against [`Self::wake`]. May return early for no reason.
    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited;

    /// Wakes at most `count` threads of any process that wait for `word`.
    fn wake(&self, word: &Word, count: u32);

    /// Makes [`Self::fence_others`] of any process reach the threads of this one from now on. False if that is not to be
    /// had, or not at once: then each thread fences for itself.
    fn accept_fences(&self) -> bool {
        false
    }

    /// A full fence in this thread, and in every thread of the processes that accept it. False if the machine has
    /// none: then a pause of [`FENCE_PAUSE`] has to do.
    fn fence_others(&self) -> bool {
        fence(Ordering::SeqCst);
        true
    }

    /// Ties a word to the life of this process, until what is given back goes: see [`crate::alive`]. A machine whose
    /// processes are simulated says itself when one dies.
    ///
    /// # Errors
    /// `System`.
    fn tie(&self, word: Words<AliveWord>) -> Result<Box<dyn Send + Sync>, Error> {
        word[0].set_alive();
        Ok(Box::new(()))
    }

    /// When a process of this machine started: with its number and [`Self::boot`] what no other process ever is.
    /// None if it is gone. Without processes to tell apart, all live.
    fn started(&self, process: u32) -> Option<u64> {
        let _ = process;
        Some(0)
    }

    /// A number that the machine has only until it is started anew.
    fn boot(&self) -> u64 {
        0
    }
}

/// The machine this process runs on.
///
/// `now`, `wall`, `wall_tick`, `random`, `wait` and `wake` neither allocate nor touch `errno`. `spawn` is for the daemons: inside
/// other people's programs nobody calls it.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemHost;

/// Longest sleep in the kernel at once. A futex counts on a clock that stands still while the machine sleeps: after
/// a resume a deadline is seen this much late at most.
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
            // SAFETY: the kernel writes at most eight bytes there.
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

    fn wake(&self, word: &Word, count: u32) {
        let count = count.min(WAKE_ALL) as usize;
        // SAFETY: FUTEX_WAKE uses the address as a name only.
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

    fn boot(&self) -> u64 {
        crate::alive::boot()
    }
}

/// Reads a clock through the vdso.
fn clock(id: libc::clockid_t) -> libc::timespec {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec of ours. Both clocks exist on every kernel we run on, so errno is not set.
    let result = unsafe { libc::clock_gettime(id, &mut time) };
    assert!(result == 0, "clock {id} exists on Linux since 2.6.39");
    time
}

/// The kernel's answer to one FUTEX_WAIT as an errno, 0 when woken.
fn futex_wait(word: &Word, expected: u32, slice: Option<Duration>) -> i32 {
    let time = slice
        .map(|left| libc::timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
    let time = time.as_ref().map_or(0, |time| std::ptr::from_ref(time) as usize);
    // SAFETY: the word is mapped and aligned while `word` is borrowed; `time` is null or a timespec of ours.
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

/// How long a waiter polls before it sleeps. It learns: an answer while polling doubles the time up to the limit, a
/// sleep halves it down to a sixteenth. One per kind of wait, shared by its threads.
#[derive(Debug)]
pub struct Spin {
    limit_ns: u32,
    now_ns: AtomicU32,
    /// Whether the processor rests between two polls.
    rests: bool,
}

/// A wake of a sleeping thread costs 30 to 60 us; polling longer than this beside others that work costs more.
pub const SPIN_NS_MAX: u32 = 20_000;

/// Polls between two looks at the clock.
const SPIN_ROUND: u32 = 16;

impl Spin {
    /// Polls for at most `limit_ns` nanoseconds; 0 sleeps at once.
    pub const fn new(limit_ns: u32) -> Self {
        Self { limit_ns, now_ns: AtomicU32::new(limit_ns), rests: true }
    }

    /// The same where a poll is a system call, after which there is no need to rest.
    pub const fn by_calls(limit_ns: u32) -> Self {
        Self { rests: false, ..Self::new(limit_ns) }
    }

    /// Polls until `ready` or until the time is used up; true if ready.
    pub fn poll(&self, host: &dyn Host, mut ready: impl FnMut() -> bool) -> bool {
        if self.limit_ns == 0 {
            return ready();
        }
        // Relaxed: a hint; nothing else is read by it.
        let span_ns = self.now_ns.load(Ordering::Relaxed);
        let grown_ns = span_ns.saturating_mul(2).min(self.limit_ns);
        // What is there at once costs no look at the clock.
        if ready() {
            self.now_ns.store(grown_ns, Ordering::Relaxed);
            return true;
        }
        let end = host.now().after(Duration::from_nanos(span_ns.into()));
        loop {
            for _ in 0..SPIN_ROUND {
                if ready() {
                    self.now_ns.store(grown_ns, Ordering::Relaxed);
                    return true;
                }
                if self.rests {
                    relax();
                }
            }
            if host.now() >= end {
                self.now_ns.store((span_ns / 2).max(self.limit_ns / 16).max(1), Ordering::Relaxed);
                return false;
            }
        }
    }
}

/// Waits until `predicate` holds for the word's value: polls first, then sleeps. Gives the value. Whoever changes
/// the word must wake it.
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
    // Acquire: pairs with the store, of whatever strength, by which the other side published what it waited for.
    let mut value = word.load(Ordering::Acquire);
    spin.poll(host, || {
        value = word.load(Ordering::Acquire);
        predicate(value)
    });
    loop {
        if predicate(value) {
            return Ok(value);
        }
        match host.wait(word, value, until) {
            Waited::Woken => value = word.load(Ordering::Acquire),
            Waited::TimedOut => {
                // The answer may have come together with the end.
                let last = word.load(Ordering::Acquire);
                return if predicate(last) { Ok(last) } else { Err(Error::TimedOut) };
            }
            Waited::Interrupted => return Err(Error::Interrupted),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

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
