//! The scheduler: the threads of a simulation, the one that has the turn, the clock, and the end of the run.
//!
//! One lock over everything, held only for the choice. A thread without the turn sleeps on a condition of its own.

use crate::place::Places;
use crate::random::{Random, mix};
use ipc::{Time, Waited};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bounds and odds of a simulation.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Seams passed before it counts as never ending.
    pub steps_max: u64,
    /// Largest time that a step takes, in nanoseconds on the simulated clock.
    pub step_ns_max: u64,
    /// One wait in so many ends for no reason; 0 for none.
    pub spurious_one_in: u64,
    /// One wait in so many ends as if a signal handler had run; 0 for none.
    pub interrupted_one_in: u64,
    /// Real time in which the running thread must reach a seam.
    pub silence_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            steps_max: 1_000_000,
            step_ns_max: 400,
            spurious_one_in: 50,
            interrupted_one_in: 0,
            silence_max: Duration::from_secs(60),
        }
    }
}

/// How a simulation went that ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Seams passed.
    pub steps: u64,
    /// Which thread ran when: equal for equal runs.
    pub trace: u64,
    /// The simulated clock at the end.
    pub now: Time,
}

/// Where a thread stood when a simulation was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadReport {
    /// Its process and its name.
    pub name: String,
    /// Its state: ready, waiting for something, paused.
    pub state: String,
    /// The calls it stood in, innermost first; empty if it never ran again.
    pub calls: Vec<String>,
}

/// Why a simulation was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stuck {
    /// Every thread waits, and no time will come that ends a wait.
    Deadlock(Vec<ThreadReport>),
    /// [`Limits::steps_max`] seams passed.
    Endless(Vec<ThreadReport>),
    /// A thread panicked: its name and what it said.
    Panicked(String, String),
    /// A thread reached no seam for [`Limits::silence_max`] of real time: its name.
    Silent(String),
}

impl std::fmt::Display for Stuck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (what, threads) = match self {
            Self::Deadlock(threads) => ("everybody waits", threads),
            Self::Endless(threads) => ("too many steps", threads),
            Self::Panicked(name, message) => return write!(f, "{name} panicked: {message}"),
            Self::Silent(name) => return write!(f, "{name} reached no seam"),
        };
        writeln!(f, "{what}:")?;
        for thread in threads {
            writeln!(f, "  {} is {}", thread.name, thread.state)?;
            for call in &thread.calls {
                writeln!(f, "      in {call}")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for Stuck {}

/// The value with which a killed thread unwinds.
pub(crate) struct Killed;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThreadState {
    Ready,
    /// Waits for the word at this address.
    Word(usize, Option<Time>),
    /// Waits for a thread to end.
    Thread(usize),
    Done,
}

#[derive(Debug)]
struct Thread {
    process: usize,
    name: String,
    state: ThreadState,
    /// How its last wait ended.
    waited: Waited,
    killed: bool,
    /// It does another process's work: its seams are not counted.
    elsewhere: bool,
    turn: Arc<Condvar>,
    calls: Vec<String>,
}

#[derive(Debug)]
struct Process {
    name: String,
    alive: bool,
    paused: bool,
    /// Seams that its threads pass until it is paused.
    paused_in: Option<u64>,
}

#[derive(Debug)]
struct Inner {
    limits: Limits,
    random: Random,
    /// A thread keeps the turn at a seam unless one in so many.
    switch_one_in: u64,
    now: u64,
    steps: u64,
    trace: u64,
    processes: Vec<Process>,
    threads: Vec<Thread>,
    running: Option<usize>,
    stuck: Option<Stuck>,
}

/// The machine that all processes of a simulation share.
#[derive(Debug)]
pub(crate) struct Scheduler {
    inner: Mutex<Inner>,
    ended: Condvar,
}

impl Scheduler {
    pub fn new(seed: u64, limits: Limits) -> Self {
        let mut random = Random::new(seed);
        // Some bugs want many switches, some want long runs with few.
        let switch_one_in = [1, 2, 4, 16, 64][random.below(5) as usize];
        let inner = Inner {
            limits,
            random,
            switch_one_in,
            now: 1_000_000_000,
            steps: 0,
            trace: mix(seed),
            processes: Vec::new(),
            threads: Vec::new(),
            running: None,
            stuck: None,
        };
        Self { inner: Mutex::new(inner), ended: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A thread that panics holds no half-made change: every change under the lock is finished before.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add_process(&self, name: &str) -> usize {
        let mut inner = self.lock();
        inner.processes.push(Process { name: name.to_owned(), alive: true, paused: false, paused_in: None });
        inner.processes.len() - 1
    }

    pub fn add_thread(&self, process: usize, name: &str) -> usize {
        let mut inner = self.lock();
        let name = format!("{}/{name}", inner.processes[process].name);
        let killed = !inner.processes[process].alive || inner.stuck.is_some();
        inner.threads.push(Thread {
            process,
            name,
            state: ThreadState::Ready,
            waited: Waited::Woken,
            killed,
            elsewhere: false,
            turn: Arc::new(Condvar::new()),
            calls: Vec::new(),
        });
        inner.threads.len() - 1
    }

    /// A new thread waits here for its first turn; false if it was killed before.
    pub fn first_turn(&self, me: usize) -> bool {
        let inner = self.sleep(self.lock(), me);
        !inner.threads[me].killed
    }

    /// A seam: perhaps others run first. Unwinds if the thread was killed.
    pub fn step(&self, me: usize) {
        let mut inner = self.lock();
        inner.tick();
        inner.count_down(me);
        self.hand_over(inner, me);
    }

    /// Waits for a word that is as the caller expects.
    pub fn wait_word(&self, me: usize, address: usize, until: Option<Time>) -> Waited {
        let mut inner = self.lock();
        inner.tick();
        if until.is_some_and(|until| until.as_ns() <= inner.now) {
            return Waited::TimedOut;
        }
        let Limits { spurious_one_in, interrupted_one_in, .. } = inner.limits;
        if inner.one_in(spurious_one_in) {
            return Waited::Woken;
        }
        if inner.one_in(interrupted_one_in) {
            return Waited::Interrupted;
        }
        inner.threads[me].state = ThreadState::Word(address, until);
        self.hand_over(inner, me)
    }

    /// A thread that unwinds lets others run, and unwinds on when it has the turn again.
    pub fn let_others_run(&self, me: usize) {
        let mut inner = self.lock();
        inner.tick();
        self.pass_turn(&mut inner, Some(me));
        drop(self.sleep(inner, me));
    }

    pub fn wait_thread(&self, me: usize, other: usize) {
        let mut inner = self.lock();
        if inner.threads[other].state != ThreadState::Done {
            inner.threads[me].state = ThreadState::Thread(other);
            self.hand_over(inner, me);
        }
    }

    pub fn wake(&self, address: usize, count: u32) {
        let mut inner = self.lock();
        let mut waiting: Vec<_> = (0..inner.threads.len())
            .filter_map(|thread| match inner.threads[thread].state {
                ThreadState::Word(theirs, _) if Places::may_be_same(theirs, address) => {
                    Some((thread, theirs))
                }
                _ => None,
            })
            .collect();
        if waiting.iter().any(|&(_, theirs)| theirs != address) {
            let places = Places::now();
            waiting.retain(|&(_, theirs)| places.same(theirs, address));
        }
        for _ in 0..count {
            if waiting.is_empty() {
                break;
            }
            let choice = inner.random.below(waiting.len() as u64) as usize;
            let (thread, _) = waiting.swap_remove(choice);
            inner.ready(thread, Waited::Woken);
        }
    }

    /// Every thread of the process unwinds when it is its turn next.
    pub fn kill(&self, process: usize) {
        let mut inner = self.lock();
        inner.processes[process].alive = false;
        inner.processes[process].paused = false;
        inner.kill_threads(|thread| thread.process == process);
    }

    pub fn is_alive(&self, process: usize) -> bool {
        self.lock().processes[process].alive
    }

    pub fn set_paused(&self, process: usize, paused: bool) {
        let mut inner = self.lock();
        inner.processes[process].paused = paused && inner.processes[process].alive;
        inner.processes[process].paused_in = None;
    }

    pub fn pause_at(&self, process: usize, seams: u64) {
        self.lock().processes[process].paused_in = Some(seams);
    }

    pub fn set_elsewhere(&self, me: usize, elsewhere: bool) {
        self.lock().threads[me].elsewhere = elsewhere;
    }

    pub fn is_paused(&self, process: usize) -> bool {
        self.lock().processes[process].paused
    }

    pub fn now(&self) -> Time {
        Time::from_ns(self.lock().now)
    }

    pub fn random(&self) -> u64 {
        self.lock().random.bits()
    }

    /// A thread has ended, with what it said if it panicked of its own.
    pub fn finish(&self, me: usize, panic: Option<String>) {
        let mut inner = self.lock();
        inner.threads[me].state = ThreadState::Done;
        if let Some(message) = panic {
            let name = inner.threads[me].name.clone();
            inner.give_up(Stuck::Panicked(name, message));
        }
        for thread in 0..inner.threads.len() {
            if inner.threads[thread].state == ThreadState::Thread(me) {
                inner.ready(thread, Waited::Woken);
            }
        }
        self.pass_turn(&mut inner, None);
    }

    /// Runs until every thread has ended.
    pub fn run(&self) -> Result<Ended, Stuck> {
        let mut inner = self.lock();
        assert!(inner.running.is_none(), "a simulation is run by one thread at a time");
        self.pass_turn(&mut inner, None);
        while let Some(running) = inner.running {
            let before = inner.steps;
            let silence = inner.limits.silence_max;
            let wait = self.ended.wait_timeout(inner, silence);
            let (woken, timeout) = wait.unwrap_or_else(PoisonError::into_inner);
            inner = woken;
            if timeout.timed_out() && inner.steps == before && inner.running == Some(running) {
                return Err(Stuck::Silent(inner.threads[running].name.clone()));
            }
        }
        if let Some(stuck) = inner.stuck.take() {
            return Err(inner.with_calls(stuck));
        }
        Ok(Ended { steps: inner.steps, trace: inner.trace, now: Time::from_ns(inner.now) })
    }

    /// Chooses who goes on; when it is the caller's turn again, says how its wait ended.
    fn hand_over(&self, mut inner: MutexGuard<'_, Inner>, me: usize) -> Waited {
        self.pass_turn(&mut inner, Some(me));
        let mut inner = self.sleep(inner, me);
        if inner.threads[me].killed {
            if inner.stuck.is_some() {
                inner.threads[me].calls = calls();
            }
            drop(inner);
            std::panic::resume_unwind(Box::new(Killed));
        }
        inner.threads[me].waited
    }

    fn sleep<'a>(&self, mut inner: MutexGuard<'a, Inner>, me: usize) -> MutexGuard<'a, Inner> {
        let turn = inner.threads[me].turn.clone();
        while inner.running != Some(me) {
            inner = turn.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        inner
    }

    fn pass_turn(&self, inner: &mut Inner, me: Option<usize>) {
        let next = inner.choose(me);
        inner.running = next;
        match next {
            Some(next) if Some(next) != me => inner.threads[next].turn.notify_one(),
            Some(_) => {}
            None => self.ended.notify_all(),
        }
    }
}

impl Inner {
    /// Counts a step and lets time pass.
    fn tick(&mut self) {
        self.steps += 1;
        self.now += 1 + self.random.below(self.limits.step_ns_max.max(1));
        if self.steps > self.limits.steps_max {
            self.give_up(Stuck::Endless(Vec::new()));
        }
    }

    /// A thread passes a seam, at which its process may have to be paused.
    fn count_down(&mut self, thread: usize) {
        let Thread { process, elsewhere, .. } = self.threads[thread];
        let process = &mut self.processes[process];
        match process.paused_in.filter(|_| !elsewhere) {
            Some(0) => {
                process.paused_in = None;
                process.paused = process.alive;
            }
            Some(seams) => process.paused_in = Some(seams - 1),
            None => {}
        }
    }

    /// True once in so many times; never for 0.
    fn one_in(&mut self, odds: u64) -> bool {
        odds > 0 && self.random.below(odds) == 0
    }

    fn ready(&mut self, thread: usize, waited: Waited) {
        self.threads[thread].state = ThreadState::Ready;
        self.threads[thread].waited = waited;
    }

    /// Whose turn it is next; none when all have ended.
    fn choose(&mut self, me: Option<usize>) -> Option<usize> {
        self.end_waits();
        let stays = me.is_some_and(|me| self.can_run(me));
        if stays && self.random.below(self.switch_one_in) != 0 {
            return me;
        }
        loop {
            let ready: Vec<_> = (0..self.threads.len()).filter(|&thread| self.can_run(thread)).collect();
            if !ready.is_empty() {
                let next = ready[self.random.below(ready.len() as u64) as usize];
                self.trace = mix(self.trace ^ (self.now << 8 ^ next as u64));
                return Some(next);
            }
            if self.threads.iter().all(|thread| thread.state == ThreadState::Done) {
                return None;
            }
            match self.next_end() {
                Some(end) => self.now = end,
                None => self.give_up(Stuck::Deadlock(Vec::new())),
            }
            self.end_waits();
        }
    }

    fn can_run(&self, thread: usize) -> bool {
        let thread = &self.threads[thread];
        thread.state == ThreadState::Ready && (thread.killed || !self.processes[thread.process].paused)
    }

    /// Ends the waits whose time has come, also in paused processes.
    fn end_waits(&mut self) {
        for thread in 0..self.threads.len() {
            if let ThreadState::Word(_, Some(until)) = self.threads[thread].state
                && until.as_ns() <= self.now
            {
                self.ready(thread, Waited::TimedOut);
            }
        }
    }

    /// The next time at which a wait of a process that is not paused ends.
    fn next_end(&self) -> Option<u64> {
        let ends = self.threads.iter().filter_map(|thread| match thread.state {
            ThreadState::Word(_, Some(until)) if !self.processes[thread.process].paused => {
                Some(until.as_ns())
            }
            _ => None,
        });
        ends.min()
    }

    fn kill_threads(&mut self, which: impl Fn(&Thread) -> bool) {
        for thread in
            self.threads.iter_mut().filter(|thread| which(thread) && thread.state != ThreadState::Done)
        {
            thread.killed = true;
            thread.state = ThreadState::Ready;
        }
    }

    /// Ends the simulation: notes the state of each thread, and makes every thread unwind.
    fn give_up(&mut self, stuck: Stuck) {
        if self.stuck.is_some() {
            return;
        }
        let reports = self.threads.iter().map(|thread| ThreadReport {
            name: thread.name.clone(),
            state: self.describe(thread),
            calls: Vec::new(),
        });
        let reports = reports.collect();
        self.stuck = Some(match stuck {
            Stuck::Deadlock(_) => Stuck::Deadlock(reports),
            Stuck::Endless(_) => Stuck::Endless(reports),
            other => other,
        });
        self.kill_threads(|_| true);
    }

    fn describe(&self, thread: &Thread) -> String {
        let paused = if self.processes[thread.process].paused { ", its process paused" } else { "" };
        match thread.state {
            ThreadState::Ready => format!("ready{paused}"),
            ThreadState::Word(address, None) => format!("waiting for the word at {address:#x}{paused}"),
            ThreadState::Word(address, Some(until)) => {
                format!("waiting for the word at {address:#x} until {} ns{paused}", until.as_ns())
            }
            ThreadState::Thread(other) => {
                format!("waiting for the end of {}{paused}", self.threads[other].name)
            }
            ThreadState::Done => "done".to_owned(),
        }
    }

    /// Puts what the unwound threads said about their calls into the reports; threads that were done are left out.
    fn with_calls(&self, stuck: Stuck) -> Stuck {
        let fill = |reports: Vec<ThreadReport>| {
            let reports = reports.into_iter().zip(&self.threads);
            let reports =
                reports.map(|(report, thread)| ThreadReport { calls: thread.calls.clone(), ..report });
            reports.filter(|report| report.state != "done").collect()
        };
        match stuck {
            Stuck::Deadlock(reports) => Stuck::Deadlock(fill(reports)),
            Stuck::Endless(reports) => Stuck::Endless(fill(reports)),
            other => other,
        }
    }
}

/// Calls shown of a thread.
const CALLS_MAX: usize = 8;

/// The calls that this thread stands in, without those of the simulator and the standard library.
fn calls() -> Vec<String> {
    let trace = std::backtrace::Backtrace::force_capture().to_string();
    let names = trace.lines().filter_map(|line| line.trim().split_once(": ").map(|(_, name)| name));
    let foreign = ["std::", "core::", "<std::", "<core::", "alloc::", "<alloc::", "sim::", "<sim::", "__"];
    let names = names.filter(|name| !foreign.iter().any(|prefix| name.starts_with(prefix)));
    names.take(CALLS_MAX).map(str::to_owned).collect()
}
