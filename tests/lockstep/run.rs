//! Plays a sequence of calls in two runs at the same time: three processes on the kernel's file system in memory, and three
//! on a tree of Hearth, two of these under `hearth run` and one at the mount. Each call returns in both runs before the next
//! one is made, and both have to answer alike.

use super::generate::MOUNTED;
use crate::harness::{Expect, Node, limited};
use crate::processes::Job;
use std::collections::HashMap;
use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// Processes of a run.
pub const PROCESSES: usize = 3;
/// Folders between the root and that of a run, so that a few `..` do not leave what the run has for itself.
const DEPTH: &str = "0/0/0/0/0/0";
/// Time that an answer may take, in thirds of a second.
const PATIENCE: u32 = 100;
/// Beginning of the answer of a process that gave none.
const NO_LINE: &str = "no answer";
/// A process is killed, and another one starts in its place.
pub const KILL: &str = "kill";
/// The daemon is killed, and its keeper starts another one.
pub const DAEMON: &str = "daemon";

/// A call of one of the processes.
#[derive(Clone, PartialEq, Eq)]
pub struct Call {
    pub process: usize,
    pub text: String,
}

impl Call {
    /// Of a line as a difference prints it, with or without an answer.
    pub fn parse(line: &str) -> Self {
        let line = line.split(" -> ").next().unwrap_or(line);
        let (process, text) = line.trim().split_once(' ').expect("a process and a call");
        let process = ["library-1", "library-2", "mount"].iter().position(|name| *name == process);
        Self { process: process.expect("a name of a process"), text: text.to_owned() }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{} {}", ["library-1", "library-2", "mount"][self.process], self.text)
    }
}

/// The first call that two runs answer differently.
pub struct Difference {
    /// Calls before it.
    pub index: usize,
    /// The answers to the calls before it, of either run.
    before: Vec<String>,
    expected: String,
    got: String,
}

impl Difference {
    /// The calls with their answers.
    pub fn show(&self, calls: &[Call]) -> String {
        let mut text = String::new();
        for (call, answer) in calls.iter().zip(&self.before) {
            text += &format!("    {call} -> {answer}\n");
        }
        text + &format!("    {}\n  tmpfs:  {}\n  Hearth: {}\n", calls[self.index], self.expected, self.got)
    }
}

/// A node with its mount, a folder on a tmpfs, and the program of the processes.
pub struct Bench {
    node: Node,
    memory: tempfile::TempDir,
    program: String,
    runs: std::cell::Cell<u32>,
}

impl Bench {
    pub fn new() -> Self {
        let node = Node::up();
        // As a tmpfs opens whiteouts.
        node.hearth(&["mount", "--dev"]).expect_success();
        let memory = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
        for folder in [node.dir.path(), memory.path()] {
            // Processes become another user.
            std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let program = format!("{}/actor", node.dir());
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/lockstep/actor.c");
        limited(&["cc"], &["-O1", "-w", "-o", &program, source]).expect_success();
        Self { node, memory, program, runs: 0.into() }
    }

    /// No session was ended by force, and nothing was lost.
    fn assert_status(&self) {
        let status = self.node.hearth(&["status", "--json"]).expect_success();
        let answers: serde_json::Value = serde_json::from_str(&status).unwrap();
        for list in ["forced_ends", "losses"] {
            assert_eq!(answers[0][list], serde_json::json!([]), "{list} of {answers}");
        }
    }

    /// Kills the daemon; the next one serves before this ends.
    fn kill_daemon(&self) {
        self.assert_status();
        self.node.kill_daemon();
        self.node.hearth(&["start"]).expect_success();
    }

    pub fn end(self) {
        self.assert_status();
        self.node.hearth(&["umount"]).expect_success();
        self.node.hearth(&["down"]).expect_success();
        self.node.check();
    }

    /// Plays calls in new folders, up to the first difference.
    pub fn play(&self, calls: &[Call]) -> Option<Difference> {
        let name = format!("run-{}", self.runs.replace(self.runs.get() + 1));
        // Paths of the same length, as they are targets of links.
        let memory = made(&self.memory.path().join("n1").join(&name));
        let tree = made(Path::new(&self.node.path(&name)));
        let mut theirs = Run::new(|_| self.actor(None, &memory));
        let mut ours = Run::new(|process| self.actor((process != MOUNTED).then_some(&self.node), &tree));
        let mut before = Vec::new();
        for (index, call) in calls.iter().enumerate() {
            if call.text == DAEMON {
                // docs/semantics.md, "A process changes its user": a change is not between the same calls of a process as this.
                let call_each = |ours: &mut Run<'_>| {
                    (0..MOUNTED).for_each(|process| drop(ours.tell(process, "stat . FOLDER 0")));
                };
                call_each(&mut ours);
                self.kill_daemon();
                call_each(&mut ours);
                before.push("killed".to_owned());
                continue;
            }
            let expected = theirs.answer(call);
            assert!(!expected.starts_with(NO_LINE), "{call}: {expected}: {}", self.said());
            let got = ours.answer(call);
            if expected != got {
                return Some(Difference { index, before, expected, got });
            }
            before.push(expected);
        }
        None
    }

    /// A process, through the library of a node if one is given.
    fn actor(&self, node: Option<&Node>, folder: &str) -> Job {
        let mut command = match node {
            None => Command::new(&self.program),
            Some(node) => {
                let mut command = Command::new(node.program());
                command.args(["run", "--dir", node.dir(), "--", &self.program]);
                command
            }
        };
        let said =
            std::fs::File::options().append(true).create(true).open(format!("{}/said", self.node.dir()));
        command.arg(folder).stderr(said.unwrap());
        Job::of(command)
    }

    /// The messages of all processes so far.
    pub fn said(&self) -> String {
        std::fs::read_to_string(format!("{}/said", self.node.dir())).unwrap_or_default()
    }
}

/// Makes the folder of a run, below one that the run has for itself.
fn made(above: &Path) -> String {
    let folder = above.join(DEPTH);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777)).unwrap();
    folder.to_str().unwrap().to_owned()
}

/// The processes of one run.
struct Run<'a> {
    start: Box<dyn Fn(usize) -> Job + 'a>,
    jobs: Vec<Job>,
    /// Inodes in the order in which they were first seen.
    inodes: HashMap<String, usize>,
}

impl<'a> Run<'a> {
    fn new(start: impl Fn(usize) -> Job + 'a) -> Self {
        let mut run = Self {
            jobs: (0..PROCESSES).map(&start).collect(),
            start: Box::new(start),
            inodes: HashMap::new(),
        };
        (0..PROCESSES).for_each(|process| run.begins(process));
        run
    }

    fn begins(&mut self, process: usize) {
        assert_eq!(self.line(process), "0", "a process that begins");
    }

    fn answer(&mut self, call: &Call) -> String {
        if call.text == KILL {
            return self.kill(call.process);
        }
        let line = self.tell(call.process, &call.text);
        self.with_inodes_by_age(&line)
    }

    /// The child of a process ends before it, because it would end at some time after it.
    fn kill(&mut self, process: usize) -> String {
        self.tell(process, "killchild");
        self.jobs[process].kill();
        self.jobs[process].wait();
        self.jobs[process] = (self.start)(process);
        self.begins(process);
        "killed".to_owned()
    }

    fn tell(&mut self, process: usize, call: &str) -> String {
        self.jobs[process].tell(call);
        self.line(process)
    }

    fn line(&mut self, process: usize) -> String {
        let job = &mut self.jobs[process];
        if !(0..PATIENCE).any(|_| job.says_something()) {
            return format!("{NO_LINE} in time");
        }
        job.line().unwrap_or_else(|| format!("{NO_LINE}, and the process ended"))
    }

    /// Numbers of inodes differ between two runs; which of them are the same does not.
    fn with_inodes_by_age(&mut self, line: &str) -> String {
        let mut pieces = line.split("i=");
        let mut text = pieces.next().unwrap_or_default().to_owned();
        for piece in pieces {
            let end = piece.find(|c: char| !c.is_ascii_digit()).unwrap_or(piece.len());
            let (number, rest) = piece.split_at(end);
            let next = self.inodes.len();
            let age = *self.inodes.entry(number.to_owned()).or_insert(next);
            text += &format!("i={age}{rest}");
        }
        text
    }
}
