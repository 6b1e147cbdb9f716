//! `hearth run --standby`: a program that runs where its node leads, and nowhere else at the same time.
//!
//! This process is the program's parent. It asks the daemon again and again whether the node leads, and until when that holds for
//! certain; the program is killed, with all its descendants, before that time passes without a later answer. So a daemon that hangs
//! does not matter: by the clock no other node leads before the program is gone. When only the daemon dies and is started again
//! within the lease, the program goes on.
//!
//! A program that ends by itself ends this process, with its exit code. One that was ended because the node leads no more, or
//! that failed when its calls did, is started again when the node leads again. If this process is killed the program is killed
//! too.

use crate::chain::waiting::Lead;
use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use crate::process::descendants;
use crate::say;
use crate::standby_lock::StandbyProgramLock;
use ipc::{Host, SystemHost, Time, Word};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, getppid, kill_process, kill_process_group, set_child_subreaper,
    set_parent_process_death_signal, wait as wait_for_any,
};
use rustix::thread::set_name;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::ffi::CString;
use std::io::IsTerminal;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// How long a daemon may take to answer.
const PATIENCE: Duration = Duration::from_millis(100);
/// How often it is asked while the program runs.
const LOOK: Duration = Duration::from_millis(20);
/// How often the lock is tried while the lead moves.
const BUSY_LOOK: Duration = Duration::from_millis(5);
/// The program is killed so long before another node may lead.
const MARGIN: Duration = Duration::from_millis(10);
/// How long descendants that were killed are waited for before that is told, and how often they are looked at.
const KILLED: Duration = Duration::from_secs(2);
const KILLED_LOOK: Duration = Duration::from_millis(2);
/// The name of this process, by which `hearth move` knows that its descendants end when they are asked to.
pub(super) const STANDBY_NAME: &str = "hearth-standby";
/// Part of an exit code that stands for a signal.
const SIGNALLED: i32 = 128;

/// An event for which this process waits.
enum Event {
    Signal(i32),
    /// The program is gone.
    Ended(std::io::Result<ExitStatus>),
}

/// The parent.
struct Parent<'a> {
    cluster: &'a Cluster,
    node: &'a Node,
    sender: Sender<Event>,
    events: Receiver<Event>,
    /// The last message.
    said: String,
    /// A signal told the program to end.
    is_ending: bool,
}

/// A program that runs.
struct Program {
    pid: Pid,
    /// It has a process group of its own. In a terminal it has not: it would not be in the foreground.
    has_group: bool,
    /// No other node leads before this time.
    until: Time,
    /// It was told to end, because the lead moves.
    was_asked: bool,
    /// The lead moves now, as far as this process knows.
    is_moving: bool,
}

/// Runs what `command` makes, each time that the node leads.
///
/// # Errors
/// This user may not ask the node; no program can be started.
pub(super) fn run(cluster: &Cluster, node: &Node, command: impl Fn() -> Result<Command>) -> Result<ExitCode> {
    let mut parent = Parent::new(cluster, node)?;
    let cannot =
        |why: Errno| Error::new(format!("cannot become the parent of all that the program starts: {why}"));
    // A process that leaves the program's process group, and its parent, is still found.
    set_child_subreaper(Some(getpid())).map_err(cannot)?;
    set_name(&CString::new(STANDBY_NAME).expect("no zero byte")).map_err(cannot)?;
    loop {
        // Held until the program and its descendants are gone.
        let (_lock, until) = parent.wait_until_it_may_run()?;
        parent.say(format!("node {} leads: starting the program", node.number));
        if let Some(code) = parent.run_once(&mut command()?, until)? {
            return Ok(code);
        }
    }
}

/// Waits until the node serves; signals end this process.
///
/// # Errors
/// This user may not ask the node.
pub(super) fn wait(cluster: &Cluster, node: &Node) -> Result<()> {
    Parent::new(cluster, node)?.wait_until_served().map(drop)
}

/// In the program's process, before it becomes the program: it is killed when its parent is gone.
///
/// # Errors
/// The parent is gone already.
pub(super) fn die_with(parent: u32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|why| Error::new(format!("cannot be bound to process {parent}: {why}")))?;
    // One that was gone before that sends nothing.
    match getppid() {
        Some(pid) if pid.as_raw_nonzero().get().unsigned_abs() == parent => Ok(()),
        _ => Err(Error::new(format!("process {parent} is gone"))),
    }
}

impl<'a> Parent<'a> {
    fn new(cluster: &'a Cluster, node: &'a Node) -> Result<Self> {
        if cluster.settings.chain.is_none() {
            return Err(Error::new("--standby is for a cluster of several nodes: one node always leads"));
        }
        let (sender, events) = channel();
        forward_signals(sender.clone())?;
        Ok(Self { cluster, node, sender, events, said: String::new(), is_ending: false })
    }

    /// Says it, unless it was said last.
    fn say(&mut self, sentence: String) {
        if self.said != sentence {
            say::aside(format_args!("hearth: {sentence}"));
            self.said = sentence;
        }
    }

    /// Waits until a program may run at the node; until when that holds without a later answer. While the lock is held, the node
    /// does not give the lead away.
    ///
    /// # Errors
    /// Those of [`Self::wait_until_served`]; the lock cannot be taken.
    fn wait_until_it_may_run(&mut self) -> Result<(StandbyProgramLock, Time)> {
        loop {
            self.wait_until_served()?;
            // The answer may be of a time before the lock: the lead may have moved meanwhile.
            if let Some(lock) = StandbyProgramLock::take(self.cluster, self.node)?
                && let Lead::Serves(until) = Lead::ask(self.cluster, self.node, PATIENCE)?
            {
                return Ok((lock, until));
            }
            SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(BUSY_LOOK)));
        }
    }

    /// Waits until the node leads; until when that holds.
    ///
    /// # Errors
    /// This user may not ask the node; the cluster was removed.
    fn wait_until_served(&mut self) -> Result<Time> {
        let number = self.node.number;
        loop {
            let lead = Lead::ask(self.cluster, self.node, PATIENCE)?;
            let next = lead.next_look();
            match lead {
                Lead::Serves(until) => return Ok(until),
                Lead::Begins(_) => {}
                Lead::Gives(_, other) | Lead::GivesNow(other) | Lead::Other(other) => {
                    self.say(format!("waiting until node {number} leads: node {other} does"));
                }
                Lead::Unknown(_) if !self.cluster.exists() => {
                    let dir = say::quoted(&self.cluster.dir);
                    return Err(Error::new(format!(
                        "the cluster in {dir} was removed: node {number} never leads"
                    )));
                }
                Lead::Failed(why) | Lead::Unknown(why) => {
                    self.say(format!("waiting until node {number} leads: {why}"));
                }
            }
            if let Ok(Event::Signal(signal)) = self.next_until(next)
                && ![SIGUSR1, SIGUSR2].contains(&signal)
            {
                // As if there were no handler: a supervisor sees the usual end.
                let _ = emulate_default_handler(signal);
            }
        }
    }

    fn next_until(&self, until: Time) -> std::result::Result<Event, RecvTimeoutError> {
        self.events.recv_timeout(until.since(SystemHost.now()))
    }

    /// Runs the program until it ends: its exit code, or none if it has ended because the node leads no more.
    fn run_once(&mut self, command: &mut Command, until: Time) -> Result<Option<ExitCode>> {
        let mut program = self.start(command, until)?;
        let mut next = SystemHost.now();
        loop {
            match self.next_until(next) {
                Ok(Event::Ended(how)) => {
                    let how = how.map_err(|why| Error::new(format!("cannot wait for the program: {why}")))?;
                    if program.was_asked && !self.is_ending {
                        self.kill_rest();
                        self.say("the program has ended, as the lead moves".to_owned());
                        return Ok(None);
                    }
                    if !how.success()
                        && let Some(why) = self.why_it_leads_no_more(&program)?
                    {
                        self.kill_rest();
                        self.say(format!("{why}: the program has ended ({how})"));
                        return Ok(None);
                    }
                    match program.was_asked || self.is_ending {
                        // This process guards nothing any more.
                        true => self.kill_rest(),
                        false => self.tell_of_rest(),
                    }
                    return Ok(Some(ExitCode::from(exit_code(how))));
                }
                Ok(Event::Signal(signal)) => {
                    self.is_ending |= [SIGTERM, SIGINT, SIGQUIT].contains(&signal);
                    program.pass_on(signal);
                }
                Err(_) => {
                    if let Some(why) = self.look(&mut program)? {
                        return self.kill(&program, &why);
                    }
                    next = SystemHost.now().after(LOOK.min(program.left() / 3));
                }
            }
        }
    }

    /// After a program failed: whether its node leads no more, which is why its calls failed, as a sentence. If the daemon has
    /// died, that is known when it leads again, or when another node may.
    fn why_it_leads_no_more(&mut self, program: &Program) -> Result<Option<String>> {
        let number = self.node.number;
        while !self.is_ending {
            match Lead::ask(self.cluster, self.node, PATIENCE.min(program.left().max(MARGIN / 2)))? {
                Lead::Serves(_) => break,
                Lead::Gives(_, other) | Lead::GivesNow(other) | Lead::Other(other) => {
                    return Ok(Some(format!("node {other} leads, not node {number}")));
                }
                Lead::Failed(why) => return Ok(Some(format!("node {number} leads no more: {why}"))),
                Lead::Unknown(why) if program.left().is_zero() => {
                    return Ok(Some(format!("another node may lead from now on: {why}")));
                }
                Lead::Begins(_) | Lead::Unknown(_) => {}
            }
            let next = SystemHost.now().after(LOOK.min(program.left() / 3));
            if let Ok(Event::Signal(signal)) = self.next_until(next) {
                self.is_ending |= [SIGTERM, SIGINT, SIGQUIT].contains(&signal);
            }
        }
        Ok(None)
    }

    /// Why the program may run no longer.
    fn look(&mut self, program: &mut Program) -> Result<Option<String>> {
        let number = self.node.number;
        let mut silent = "its heartbeat is not answered".to_owned();
        match Lead::ask(self.cluster, self.node, PATIENCE.min(program.left().max(MARGIN / 2)))? {
            Lead::Serves(until) | Lead::Begins(until) => (program.until, program.is_moving) = (until, false),
            Lead::Gives(until, to) => {
                (program.until, program.was_asked) = (until, true);
                if !std::mem::replace(&mut program.is_moving, true) {
                    self.say(format!("the lead moves to node {to}: the program is told to end"));
                    program.send(Signal::TERM);
                }
            }
            Lead::GivesNow(to) => return Ok(Some(format!("the lead moves to node {to}"))),
            Lead::Other(other) => return Ok(Some(format!("node {other} leads, not node {number}"))),
            // It waits with leaving the lead for the end of the program.
            Lead::Failed(why) => return Ok(Some(format!("node {number} leads no more: {why}"))),
            // Until the time that was named last it is this node that leads, or no node.
            Lead::Unknown(why) => silent = why,
        }
        Ok(program.left().is_zero().then(|| format!("another node may lead from now on: {silent}")))
    }

    fn kill(&mut self, program: &Program, why: &str) -> Result<Option<ExitCode>> {
        program.send(Signal::KILL);
        for process in descendants(&[getpid()]) {
            let _ = kill_process(process.raw(), Signal::KILL);
        }
        loop {
            match self.events.recv().expect("this process holds a sender itself") {
                Event::Ended(how) => {
                    let how = how.map_err(|why| Error::new(format!("cannot wait for the program: {why}")))?;
                    self.kill_rest();
                    self.say(format!("{why}: the program was killed"));
                    return Ok(self.is_ending.then(|| ExitCode::from(exit_code(how))));
                }
                Event::Signal(signal) => self.is_ending |= [SIGTERM, SIGINT, SIGQUIT].contains(&signal),
            }
        }
    }

    /// After the program is gone: kills its descendants, also those in process groups of their own, and returns when they are gone.
    /// Those that this user may not kill are told, and go on.
    fn kill_rest(&mut self) {
        let mut tell_at = Some(SystemHost.now().after(KILLED));
        loop {
            let mut rest = descendants(&[getpid()]);
            rest.retain(|process| kill_process(process.raw(), Signal::KILL) != Err(Errno::PERM));
            let Some(first) = rest.first() else { break };
            if tell_at.is_some_and(|at| SystemHost.now() >= at) {
                tell_at = None;
                self.say(format!("waiting until process {} ends, which the program started", first.pid()));
            }
            SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(KILLED_LOOK)));
        }
        // They have become children of this process.
        while let Ok(Some(_)) = wait_for_any(WaitOptions::NOHANG) {}
        self.tell_of_rest();
    }

    /// Processes that the program leaves behind continue without this process.
    fn tell_of_rest(&mut self) {
        if let Some(process) = descendants(&[getpid()]).first() {
            self.say(format!(
                "process {}, which the program started, goes on, and is not ended when another node leads",
                process.pid()
            ));
        }
    }

    /// Starts the program, and the thread that tells when it is gone.
    fn start(&self, command: &mut Command, until: Time) -> Result<Program> {
        let has_group = !std::io::stdin().is_terminal();
        if has_group {
            command.process_group(0);
        }
        let cannot = |why: std::io::Error| Error::new(format!("cannot start the program: {why}"));
        let pid = Pid::from_child(&command.spawn().map_err(cannot)?);
        let sender = self.sender.clone();
        let waits = move || {
            // The receiver is gone when this process ends.
            let _ = sender.send(Event::Ended(wait_for(pid)));
        };
        SystemHost.spawn("program", Box::new(waits)).map_err(|why| {
            let _ = kill_process(pid, Signal::KILL);
            Error::new(format!("cannot start a thread: {why}"))
        })?;
        Ok(Program { pid, has_group, until, was_asked: false, is_moving: false })
    }
}

/// Waits until a child is gone. Descendants of it that have become children meanwhile are waited for, too.
fn wait_for(program: Pid) -> std::io::Result<ExitStatus> {
    loop {
        match wait_for_any(WaitOptions::empty()) {
            Ok(Some((pid, how))) if pid == program => return Ok(ExitStatus::from_raw(how.as_raw())),
            Ok(_) | Err(Errno::INTR) => {}
            Err(why) => return Err(why.into()),
        }
    }
}

impl Program {
    /// How long it may run without another answer.
    fn left(&self) -> Duration {
        self.until.since(SystemHost.now()).saturating_sub(MARGIN)
    }

    /// One that is gone, and was not waited for yet, is sent nothing.
    fn send(&self, signal: Signal) {
        let _ = if self.has_group {
            kill_process_group(self.pid, signal)
        } else {
            kill_process(self.pid, signal)
        };
    }

    /// Those of a terminal come to all of its foreground by themselves.
    fn pass_on(&self, signal: i32) {
        let of_terminal = [SIGINT, SIGQUIT].contains(&signal);
        if let Some(signal) = Signal::from_named_raw(signal).filter(|_| self.has_group || !of_terminal) {
            self.send(signal);
        }
    }
}

/// Signals become events.
fn forward_signals(sender: Sender<Event>) -> Result<()> {
    let all = [SIGTERM, SIGINT, SIGQUIT, SIGHUP, SIGUSR1, SIGUSR2];
    let mut signals =
        Signals::new(all).map_err(|why| Error::new(format!("cannot wait for signals: {why}")))?;
    let body = move || {
        for signal in signals.forever() {
            if sender.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    };
    let thread = SystemHost.spawn("signals", Box::new(body));
    thread.map_err(|why| Error::new(format!("cannot start a thread: {why}"))).map(drop)
}

/// As shells give it.
fn exit_code(how: ExitStatus) -> u8 {
    let code = how.code().or_else(|| how.signal().map(|signal| SIGNALLED + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(super::FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        let code = |raw| exit_code(ExitStatus::from_raw(raw));
        assert_eq!([code(0), code(3 << 8), code(SIGTERM), code(9)], [0, 3, 143, 137]);
    }
}
