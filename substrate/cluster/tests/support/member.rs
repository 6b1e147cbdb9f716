//! A member in its own process: it joins, and writes each change of its state to its standard output.

use cluster::{Address, Joining, Membership, Path, PoolCopy, PoolReport, Remote};
use format::{NodeId, PoolGeneration, PoolUid};
use ipc::sync::Ordering;
use ipc::{Host, SystemHost, Time};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path as FilePath;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const SOCKET: &str = "HEARTH_TEST_MEMBER_SOCKET";
const NODE: &str = "HEARTH_TEST_MEMBER_NODE";
const SUBTREE: &str = "HEARTH_TEST_MEMBER_SUBTREE";

/// The process, for its parent.
pub struct MemberProcess {
    child: Child,
    output: BufReader<ChildStdout>,
    last_valid_until: u64,
}

impl MemberProcess {
    pub fn start(socket: &FilePath, node: NodeId, path: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "member_process", "--nocapture", "--test-threads=1"])
            .env(SOCKET, socket)
            .env(NODE, node.get().to_string())
            .env(SUBTREE, std::ffi::OsStr::from_bytes(path.as_bytes()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output, last_valid_until: 0 }
    }

    /// Reads its output up to this line; false if it ended first.
    pub fn wait_for(&mut self, word: &str) -> bool {
        while let Some(line) = self.next_line() {
            if line == word || line == "ended" {
                return line == word;
            }
        }
        false
    }

    fn next_line(&mut self) -> Option<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line).unwrap() == 0 {
            return None;
        }
        if let Some(until) = line.trim().strip_prefix("valid ") {
            self.last_valid_until = self.last_valid_until.max(until.parse().unwrap());
        }
        Some(line.trim().to_owned())
    }

    /// The latest time up to which it has reported its membership as valid. For a killed process, reads all its output.
    pub fn last_valid_until(&mut self) -> Time {
        if self.child.try_wait().unwrap().is_some() {
            while self.next_line().is_some() {}
        }
        Time::from_ns(self.last_valid_until)
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([format!("-{name}"), self.child.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for MemberProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(line: &str) {
    let mut output = std::io::stdout().lock();
    // The reader may be gone.
    let _ = writeln!(output, "{line}");
    let _ = output.flush();
}

/// The state of the pool of a node in a test, for its first join.
pub fn pool_of(node: NodeId) -> PoolReport {
    let copy = PoolCopy { uid: PoolUid::new(node.get().into()), generation: PoolGeneration::new(1) };
    PoolReport { copy, ..PoolReport::default() }
}

/// The member, if this process was started as one: until its life ends, or it is killed.
pub fn serve_if_requested() {
    let Some(socket) = std::env::var_os(SOCKET) else {
        return println!("no test: what a child process runs");
    };
    let node = NodeId::new(std::env::var(NODE).unwrap().parse().unwrap());
    let path = Path::new(std::env::var_os(SUBTREE).unwrap().as_bytes()).unwrap();
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    let end = host.now().after(Duration::from_secs(60));
    let manager = Arc::new(Remote::new(host.clone(), socket.as_ref()));
    let (pool, address) = (pool_of(node), Address::default());
    let joining = Joining { node, replaces: None, medium: 2, pool, address };
    let member = Membership::join(host.clone(), manager, &joining, end).unwrap();
    say("\njoined");
    let (mut valid_until, mut serves) = (None, false);
    while host.now() < end {
        let seen = member.news().load(Ordering::Acquire);
        if member.valid_until() != valid_until {
            valid_until = member.valid_until().or(valid_until);
            valid_until.iter().for_each(|until| say(&format!("valid {}", until.as_ns())));
        }
        if !serves && member.may_serve(&path) {
            serves = true;
            say("serves");
        }
        // If it is cut off, it never gets the answer that it is not a member: its time ends nevertheless.
        let over = valid_until.is_some_and(|until| until <= host.now()) && !member.may_serve(&path);
        if member.party().is_none() || (serves && over) {
            say("ended");
            break;
        }
        let slice = host.now().after(Duration::from_millis(5));
        let _ = host.wait(member.news(), seen, Some(slice));
    }
    // Until it is killed or its parent goes.
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}
