//! The simulated machine as the code under test sees it: [`ipc::Host`].

use crate::step::{Ended, Killed, Limits, Scheduler, Stuck};
use ipc::{Error, Host, Join, Link, Time, Waited, Word};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

thread_local! {
    /// The simulated thread that this real thread is; none outside of simulations.
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

#[derive(Clone)]
struct Current {
    core: Arc<Scheduler>,
    thread: usize,
}

/// The current simulated thread, if its seams count: a thread that unwinds passes them without stopping.
fn current() -> Option<Current> {
    if std::thread::panicking() { None } else { CURRENT.with_borrow(Clone::clone) }
}

/// Runs before every access to a shared word.
fn step() {
    if let Some(current) = current() {
        current.core.step(current.thread);
    }
}

/// Does what is another process's work, though a thread of this one does it here: [`SimHost::pause_at`] counts none of
/// its seams.
pub fn elsewhere<T>(work: impl FnOnce() -> T) -> T {
    let Some(Current { core, thread }) = current() else { return work() };
    core.set_elsewhere(thread, true);
    let done = work();
    core.set_elsewhere(thread, false);
    done
}

/// One machine with its processes, run by one seed.
pub struct Simulation {
    core: Arc<Scheduler>,
    threads: Arc<Mutex<Vec<std::thread::JoinHandle<()>>>>,
}

impl Simulation {
    /// A machine without processes.
    pub fn new(seed: u64, limits: Limits) -> Self {
        ipc::sync::install_step(step);
        Self { core: Arc::new(Scheduler::new(seed, limits)), threads: Arc::default() }
    }

    /// A new process without threads: [`Host::spawn`] starts them, before [`Self::run`] or while it runs.
    pub fn process(&self, name: &str) -> Arc<SimHost> {
        let process = self.core.add_process(name);
        Arc::new(SimHost { core: self.core.clone(), threads: self.threads.clone(), process })
    }

    /// Runs until every thread of every process has ended.
    ///
    /// # Errors
    /// See [`Stuck`]. The threads have ended all the same, except after `Silent`.
    pub fn run(&self) -> Result<Ended, Stuck> {
        let ended = self.core.run();
        if matches!(ended, Err(Stuck::Silent(_))) {
            return ended;
        }
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            thread.join().expect("what a simulated thread throws is caught");
        }
        ended
    }
}

/// A simulated process: its machine, and the power over its life.
pub struct SimHost {
    core: Arc<Scheduler>,
    threads: Arc<Mutex<Vec<std::thread::JoinHandle<()>>>>,
    process: usize,
}

impl SimHost {
    /// Like SIGKILL: no thread of the process does anything any more; each unwinds at the seam where it stands.
    pub fn kill(&self) {
        step();
        self.core.kill(self.process);
        step();
    }

    /// Like SIGSTOP: its threads stand at the seam they have reached; time goes on.
    pub fn pause(&self) {
        step();
        self.core.set_paused(self.process, true);
        step();
    }

    /// The same when the threads of the process have passed so many seams from here, unless it was resumed before.
    pub fn pause_at(&self, seams: u64) {
        self.core.pause_at(self.process, seams);
    }

    /// True from [`Self::pause`] to [`Self::resume`].
    pub fn is_paused(&self) -> bool {
        self.core.is_paused(self.process)
    }

    /// Like SIGCONT.
    pub fn resume(&self) {
        step();
        self.core.set_paused(self.process, false);
    }

    /// False after [`Self::kill`].
    pub fn is_alive(&self) -> bool {
        self.core.is_alive(self.process)
    }

    /// A seam of its own, for threads that only do mischief.
    pub fn step(&self) {
        step();
    }

    /// The process as the other end of a ring.
    pub fn link(self: &Arc<Self>) -> Box<dyn Link> {
        Box::new(ProcessLink(self.clone()))
    }
}

struct ProcessLink(Arc<SimHost>);

impl Link for ProcessLink {
    fn is_up(&self) -> bool {
        step();
        self.0.is_alive()
    }
}

impl Host for SimHost {
    fn now(&self) -> Time {
        step();
        self.core.now()
    }

    fn wall(&self) -> i64 {
        const START_NS: i64 = 1_700_000_000_000_000_000;
        step();
        START_NS + i64::try_from(self.core.now().as_ns()).expect("a simulation lasts less than 292 years")
    }

    fn random(&self) -> u64 {
        step();
        self.core.random()
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, Error> {
        let thread = self.core.add_thread(self.process, name);
        let core = self.core.clone();
        let started = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            // Without it the simulation is only slower.
            let _ = ipc::pin_to_one_core();
            CURRENT.set(Some(Current { core: core.clone(), thread }));
            let panic = if core.first_turn(thread) { caught(body) } else { None };
            CURRENT.set(None);
            core.finish(thread, panic);
        });
        let handle = started.expect("the machine that runs simulations has room for their threads");
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
        step();
        Ok(Box::new(SimThread { thread }))
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        let Some(current) = current() else {
            // A thread that unwinds waits for what others have to do first.
            if let Some(Current { core, thread }) = CURRENT.with_borrow(Clone::clone) {
                core.let_others_run(thread);
            }
            return Waited::Interrupted;
        };
        // A switch comes before the load and none comes after it, so load and sleep are one step.
        if word.load(Ordering::SeqCst) != expected {
            return Waited::Woken;
        }
        current.core.wait_word(current.thread, word.address(), until)
    }

    fn wake(&self, word: &Word, count: u32) {
        // First: a thread that is killed here has freed what others wait for.
        self.core.wake(word.address(), count);
        step();
    }
}

/// Runs a thread's body; gives what it said if it panicked of its own.
fn caught(body: Box<dyn FnOnce() + Send>) -> Option<String> {
    let payload = catch_unwind(AssertUnwindSafe(body)).err()?;
    if payload.is::<Killed>() {
        return None;
    }
    let text = payload.downcast_ref::<String>().cloned();
    let text = text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    Some(text.unwrap_or_else(|| "something that is no text".to_owned()))
}

struct SimThread {
    thread: usize,
}

impl Join for SimThread {
    /// A thread that panicked ends the whole simulation, so this never tells of one.
    fn join(self: Box<Self>) -> Result<(), Error> {
        let current = current().ok_or(Error::Panicked)?;
        current.core.wait_thread(current.thread, self.thread);
        Ok(())
    }
}
