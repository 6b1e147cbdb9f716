//! A node, and programs on it with which a test communicates: the test's own binary again, under `hearth run`, doing a
//! job.
//!
//! A job prints lines on its standard output and reads lines from its standard input. Nothing waits without a limit,
//! and jobs that are left at the end of a test are killed. A test binary that uses this has one test that does the jobs
//! ([`job`]) and is named by [`Node::begin`].

#![allow(dead_code, reason = "each test binary uses a part of it")]

use crate::harness::{self, Expect};
use ipc::{Host, SystemHost};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, waitpid};
use rustix::process::{pidfd_open, pidfd_send_signal};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Seconds that a line of a job may be waited for.
const LIMIT_S: i64 = 120;

/// Lines of the daemon's log that a test shows when it fails.
const LOG_LINES: usize = 20;

/// The task of a job: words, one a line.
const JOB: &str = "HEARTH_TEST_JOB";

/// A cluster of one node that shows what its daemon said if a test fails.
pub struct Node(harness::Node);

/// The process of a daemon, which cannot be mistaken for a later one.
pub struct Daemon(OwnedFd);

impl Node {
    /// A new one, its pool in memory.
    pub fn up() -> Self {
        Self(harness::Node::up())
    }

    /// A new one whose pool may hold so many MiB.
    pub fn of_mib(mib: u64) -> Self {
        Self(harness::Node::of_mib(mib))
    }

    /// A cluster of several, whose first is meant where none is named.
    pub fn several(count: u32) -> Self {
        Self(harness::Node::of_nodes(count))
    }

    /// The same with this lease and patience, in ms.
    pub fn several_with(count: u32, lease: u64, patience: u64) -> Self {
        Self(harness::Node::of_nodes_with(count, lease, patience))
    }

    /// The same, whose pools may hold so many MiB.
    pub fn several_of(count: u32, lease: u64, patience: u64, mib: u64) -> Self {
        Self(harness::Node::of_nodes_of(count, lease, patience, mib))
    }

    /// A cluster of several with pools on a medium of a kind.
    pub fn several_on(medium: &str, count: u32, lease: u64, patience: u64) -> Self {
        Self(harness::Node::of_nodes_on(medium, count, lease, patience, 64))
    }

    /// The cluster's folder.
    pub fn dir(&self) -> &str {
        self.0.dir()
    }

    /// The result of `hearth COMMAND --dir DIR REST`.
    pub fn try_hearth(&self, arguments: &[&str]) -> std::process::Output {
        self.0.hearth(arguments)
    }

    /// The pool of one of several nodes is as it should be.
    pub fn check_of(&self, number: u32) {
        self.0.check_of(number);
    }

    /// The `hearth status` of all nodes.
    pub fn statuses(&self) -> Vec<serde_json::Value> {
        serde_json::from_slice(&self.0.hearth(&["status", "--json"]).stdout).unwrap()
    }

    /// A path in the tree.
    pub fn path(&self, name: &str) -> String {
        self.0.path(name)
    }

    /// `hearth COMMAND --dir DIR REST`, which has to succeed; returns its output.
    pub fn hearth(&self, arguments: &[&str]) -> String {
        self.0.hearth(arguments).expect_success()
    }

    /// A program on the tree, which has to succeed.
    pub fn run(&self, program: &[&str]) -> String {
        self.hearth(&[&["run", "--"], program].concat())
    }

    /// The `hearth status` of the node.
    pub fn status(&self) -> serde_json::Value {
        let answers: serde_json::Value = serde_json::from_str(&self.hearth(&["status", "--json"])).unwrap();
        answers[0].clone()
    }

    /// Its daemon.
    pub fn daemon(&self) -> Daemon {
        let pid = i32::try_from(self.status()["pid"].as_i64().unwrap()).unwrap();
        Daemon(pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap())
    }

    /// The keeper of its daemons.
    pub fn keeper(&self) -> Daemon {
        self.process("node-1/keeper.pid")
    }

    /// The process that serves its mount.
    pub fn gateway(&self) -> Daemon {
        self.process("node-1/gateway.pid")
    }

    /// The process that a pid file in the cluster's folder names.
    pub fn process(&self, file: &str) -> Daemon {
        let text = std::fs::read_to_string(self.0.dir.path().join(file)).unwrap();
        let pid = text.split_whitespace().next().unwrap().parse().unwrap();
        Daemon(pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap())
    }

    /// Stops the process that serves its mount, and waits until each of its threads stands.
    pub fn stop_gateway(&self) {
        self.stop_process("node-1/gateway.pid");
    }

    /// The same with the process that a pid file names, which is given.
    pub fn stop_process(&self, file: &str) -> Daemon {
        let text = std::fs::read_to_string(self.0.dir.path().join(file)).unwrap();
        let pid = text.split_whitespace().next().unwrap();
        let process = self.process(file);
        process.stop();
        let stands = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
            stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
        };
        let until = SystemHost.now().after(std::time::Duration::from_secs(60));
        while !std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().all(stands) {
            assert!(SystemHost.now() < until, "it does not stand still");
            spin(1_000_000);
        }
        process
    }

    /// Waits for the daemon that its keeper starts again.
    pub fn wait_until_up(&self) {
        self.hearth(&["start"]);
    }

    /// Down, verified, and up again.
    pub fn check(&self) {
        self.hearth(&["down"]);
        self.0.check();
        self.hearth(&["up"]);
    }

    /// Starts a job on the tree; `test` is the test of this binary that does jobs.
    pub fn begin(&self, test: &str, words: &[&str]) -> Job {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
        command.args(["run", "--dir", self.0.dir(), "--"]).arg(std::env::current_exe().unwrap());
        Job::spawn(command, test, words)
    }

    /// The same at one of several nodes.
    pub fn begin_at(&self, number: u32, test: &str, words: &[&str]) -> Job {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
        command.args(["run", "--dir", self.0.dir(), "--node", &number.to_string(), "--"]);
        command.arg(std::env::current_exe().unwrap());
        Job::spawn(command, test, words)
    }

    /// A job that starts each time that a node leads; it begins when [`Job::until_begun`] returns. The output of its
    /// parent goes into a file.
    pub fn begin_standby(&self, number: u32, test: &str, words: &[&str], said: &std::path::Path) -> Job {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
        command.args(["run", "--dir", self.0.dir(), "--node", &number.to_string(), "--standby", "--"]);
        command.arg(std::env::current_exe().unwrap()).stderr(std::fs::File::create(said).unwrap());
        Job::of(Job::command(command, test, words))
    }

    /// Starts a program on the tree, at one of several nodes.
    pub fn begin_program_at(&self, number: u32, program: &[&str]) -> Job {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
        command.args(["run", "--dir", self.0.dir(), "--node", &number.to_string(), "--"]).args(program);
        Job::of(command)
    }

    /// Starts a program on the tree.
    pub fn begin_program(&self, program: &[&str]) -> Job {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
        command.args(["run", "--dir", self.0.dir(), "--"]).args(program);
        Job::of(command)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let logs = ["node-1/serve.log", "node-2/serve.log", "node-3/serve.log", "manager.log"];
            for log in logs {
                let Ok(text) = std::fs::read_to_string(self.0.dir.path().join(log)) else { continue };
                let last: Vec<&str> = text.lines().rev().take(LOG_LINES).collect();
                eprintln!("the last words of {log}, the last first:\n{}", last.join("\n"));
            }
        }
    }
}

impl Daemon {
    /// `kill -9`.
    pub fn kill(&self) {
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
    }

    /// From now on it does nothing.
    pub fn stop(&self) {
        pidfd_send_signal(&self.0, Signal::STOP).unwrap();
    }

    /// It does again what it did.
    pub fn go_on(&self) {
        pidfd_send_signal(&self.0, Signal::CONT).unwrap();
    }

    /// Waits until it is gone.
    pub fn wait(&self) {
        let limit = Timespec { tv_sec: LIMIT_S, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&limit)), Ok(1), "it does not die");
    }
}

/// A job that runs. Killed when it is dropped.
pub struct Job {
    child: Child,
    /// None after its end.
    input: Option<ChildStdin>,
    output: ChildStdout,
    heard: Vec<u8>,
}

impl Job {
    /// Starts a job without a node.
    pub fn plain(test: &str, words: &[&str]) -> Self {
        Self::spawn(Command::new(std::env::current_exe().unwrap()), test, words)
    }

    fn spawn(command: Command, test: &str, words: &[&str]) -> Self {
        let mut job = Self::of(Self::command(command, test, words));
        job.until_begun();
        job
    }

    fn command(mut command: Command, test: &str, words: &[&str]) -> Command {
        command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(JOB, words.join("\n"));
        command
    }

    /// Waits until a job begins, or begins again.
    pub fn until_begun(&mut self) {
        while self.line().expect("a job that begins says so") != BEGUN {}
    }

    /// Sends a signal to its process.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for the end of its process.
    pub fn wait(&mut self) -> std::process::ExitStatus {
        self.child.wait().unwrap()
    }

    /// Starts a program.
    pub fn of(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, input: Some(input), output, heard: Vec::new() }
    }

    /// The next line that the job says, none when it has ended.
    pub fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.heard.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.heard.drain(..=end).collect();
                return Some(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            let limit = Timespec { tv_sec: LIMIT_S, tv_nsec: 0 };
            let ready = poll(&mut [PollFd::new(&self.output, PollFlags::IN)], Some(&limit));
            assert_eq!(ready, Ok(1), "nothing from a job for {LIMIT_S} s");
            let mut bytes = [0; 4096];
            match self.output.read(&mut bytes).unwrap() {
                0 => return None,
                count => self.heard.extend_from_slice(&bytes[..count]),
            }
        }
    }

    /// The lines that are still to come, until it ends.
    pub fn rest(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.line()).collect()
    }

    /// Whether something is there to be heard now, or in a moment.
    pub fn says_something(&self) -> bool {
        let moment = Timespec { tv_sec: 0, tv_nsec: 300_000_000 };
        !self.heard.is_empty()
            || poll(&mut [PollFd::new(&self.output, PollFlags::IN)], Some(&moment)) != Ok(0)
    }

    /// Waits for a line.
    pub fn expect(&mut self, wanted: &str) {
        assert_eq!(self.line().as_deref(), Some(wanted));
    }

    /// Says a line to the job.
    pub fn tell(&mut self, line: &str) {
        let input = self.input.as_mut().expect("its input has not ended");
        input.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// The job gets no further line.
    pub fn end_input(&mut self) {
        self.input = None;
    }

    /// `kill -9`. Its output until then can still be read.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Number of its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGSTOP, and until it stands.
    pub fn stop(&self) {
        kill_process(Pid::from_child(&self.child), Signal::STOP).unwrap();
        waitpid(Some(Pid::from_child(&self.child)), WaitOptions::UNTRACED).unwrap();
    }

    /// SIGCONT.
    pub fn go_on(&self) {
        kill_process(Pid::from_child(&self.child), Signal::CONT).unwrap();
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kills jobs that others hear, now or when a test fails meanwhile. They are not dropped before.
pub struct Killer(Vec<u32>);

impl Killer {
    pub fn of<'a>(jobs: impl IntoIterator<Item = &'a Job>) -> Self {
        Self(jobs.into_iter().map(Job::pid).collect())
    }
}

impl Drop for Killer {
    fn drop(&mut self) {
        for pid in &self.0 {
            let pid = i32::try_from(*pid).ok().and_then(Pid::from_raw);
            let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
        }
    }
}

/// The first line of a job. Before it the test's runner speaks.
const BEGUN: &str = "begun";

/// In a process that was started for a job: its words.
pub fn job() -> Option<Vec<String>> {
    let words = std::env::var(JOB).ok()?;
    say(&format!("\n{BEGUN}"));
    Some(words.lines().map(str::to_owned).collect())
}

/// Says a line to the test. One that is gone is none to go on for.
pub fn say(line: &str) {
    if std::io::stdout().write_all(format!("{line}\n").as_bytes()).is_err() {
        std::process::exit(1);
    }
}

/// Spins: an instant that is not the one after a line.
pub fn spin(ns: u64) {
    let begin = SystemHost.now();
    while (SystemHost.now().since(begin).as_nanos() as u64) < ns {
        std::hint::spin_loop();
    }
}

/// How often something is done: a slice, or what the variable says.
pub fn count(variable: &str, slice: u64) -> u64 {
    std::env::var(variable).map_or(slice, |text| text.parse().expect("a number"))
}
