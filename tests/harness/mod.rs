//! A cluster of one node for the end-to-end tests: in a folder of its own on a tmpfs, with the real program, daemon and
//! library, gone at the end of its test. Every program that is started has a time limit.

#![allow(dead_code, reason = "each test takes what it needs")]

use ipc::{Host, SystemHost, Word};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// Seconds that any program of these tests may take.
const LIMIT_S: &str = "120";

/// A cluster of one node, taken down hard at the end.
pub struct Node {
    pub dir: tempfile::TempDir,
    /// The program and its library where every user may read them, if those that were built stand in somebody's home.
    programs: Option<tempfile::TempDir>,
}

impl Node {
    pub fn up() -> Self {
        Self::of_mib(256)
    }

    /// One whose pool may hold so many MiB.
    pub fn of_mib(mib: u64) -> Self {
        Self::of(mib, "memory")
    }

    /// One whose medium is said to be files, in a folder that is in memory all the same.
    pub fn in_memory_as_files() -> Self {
        Self::of(64, "file")
    }

    /// A cluster of several nodes, whose lease and patience are so long that no node is expelled on a busy machine.
    pub fn of_nodes(count: u32) -> Self {
        Self::of_nodes_with(count, 4000, 2500)
    }

    /// A cluster of several nodes with this lease and patience, in ms.
    pub fn of_nodes_with(count: u32, lease: u64, patience: u64) -> Self {
        Self::of_nodes_of(count, lease, patience, 64)
    }

    /// The same, whose pools may hold so many MiB.
    pub fn of_nodes_of(count: u32, lease: u64, patience: u64, mib: u64) -> Self {
        Self::of_nodes_on("memory", count, lease, patience, mib)
    }

    /// The same, on a medium of a kind.
    pub fn of_nodes_on(medium: &str, count: u32, lease: u64, patience: u64, mib: u64) -> Self {
        let numbers = [count.into(), lease, patience, mib];
        let [count, lease, patience, mib] = numbers.map(|number| number.to_string());
        let nodes = ["--nodes", &count, "--lease", &lease, "--patience", &patience];
        Self::with(&[&["--medium", medium, "--capacity", &mib], &nodes[..]].concat())
    }

    fn of(mib: u64, medium: &str) -> Self {
        Self::with(&["--medium", medium, "--capacity", &mib.to_string()])
    }

    fn with(chosen: &[&str]) -> Self {
        let library = Path::new(env!("CARGO_BIN_EXE_hearth")).with_file_name("libhearth.so");
        assert!(library.exists(), "{} is missing: cargo build -p interpose", library.display());
        let dir = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
        let node = Self { dir, programs: (!everybody_reaches(&library)).then(|| copies_of(&library)) };
        node.hearth(&[&["up", "--no-mount"], chosen].concat()).expect_success();
        node
    }

    pub fn dir(&self) -> &str {
        self.dir.path().to_str().unwrap()
    }

    /// A path in the tree.
    pub fn path(&self, name: &str) -> String {
        format!("{}/n1/{name}", self.dir())
    }

    /// The program.
    pub fn program(&self) -> String {
        match &self.programs {
            None => env!("CARGO_BIN_EXE_hearth").to_owned(),
            Some(copies) => copies.path().join("hearth").to_str().unwrap().to_owned(),
        }
    }

    /// `hearth COMMAND --dir DIR REST`.
    pub fn hearth(&self, arguments: &[&str]) -> Output {
        let (command, rest) = arguments.split_first().unwrap();
        limited(&[&self.program(), command, "--dir", self.dir()], rest)
    }

    /// A shell script under `hearth run`; `$T` is the tree.
    pub fn sh(&self, script: &str) -> Output {
        let script = format!("T={}\n{script}", self.path(""));
        self.hearth(&["run", "--", "sh", "-ec", &script])
    }

    /// The same, through the mount.
    pub fn sh_mounted(&self, script: &str) -> Output {
        let script = format!("T={}\n{script}", self.path(""));
        limited(&["sh", "-ec"], &[&script])
    }

    pub fn daemon(&self) -> i32 {
        let status = self.hearth(&["status", "--json"]);
        let answers: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        i32::try_from(answers[0]["pid"].as_i64().unwrap()).unwrap()
    }

    /// `kill -9`, and until it is gone.
    pub fn kill_daemon(&self) {
        kill(self.daemon());
    }

    pub fn check(&self) {
        self.check_of(1);
    }

    /// The pool of one of several nodes is as it should be.
    pub fn check_of(&self, number: u32) {
        let pool = format!("{}/node-{number}/pool", self.dir());
        limited(&[env!("CARGO_BIN_EXE_hearth"), "check"], &[&pool]).expect_success();
    }
}

/// Whether every user may search all folders above a file.
fn everybody_reaches(file: &Path) -> bool {
    let open = |folder: &Path| folder.metadata().unwrap().permissions().mode() & 0o001 != 0;
    file.ancestors().skip(1).all(open)
}

/// A folder with the program and its library that every user may read.
fn copies_of(library: &Path) -> tempfile::TempDir {
    let copies = tempfile::Builder::new().prefix("hearth-test-").tempdir().unwrap();
    std::fs::set_permissions(copies.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    for from in [Path::new(env!("CARGO_BIN_EXE_hearth")), library] {
        // By a child: one that is being started for another test would have the copy open for writing.
        limited(&["cp", from.to_str().unwrap()], &[copies.path().to_str().unwrap()]).expect_success();
    }
    copies
}

impl Drop for Node {
    fn drop(&mut self) {
        self.hearth(&["umount", "--force"]);
        self.hearth(&["down", "--hard"]);
    }
}

/// `kill -9`, and until the process is gone.
pub fn kill(pid: i32) {
    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
    let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    pidfd_send_signal(&pidfd, Signal::KILL).unwrap();
    let limit = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit)), Ok(1), "it does not die");
}

/// Looks, at most for two minutes, until something is as it should be.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    // Counted in time: one look at a node that does not answer takes seconds.
    let limit = SystemHost.now().after(Duration::from_secs(120));
    while !holds() {
        assert!(SystemHost.now() < limit, "never: {what}");
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(Duration::from_millis(20))));
    }
}

/// Whether this machine lets us mount; says so if not.
pub fn can_mount() -> bool {
    let can = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !can {
        println!("skipped: needs root and /dev/fuse");
    }
    can
}

pub fn limited(program: &[&str], rest: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", LIMIT_S]).args(program).args(rest).stdin(Stdio::null());
    command.output().expect("timeout is part of coreutils")
}

pub trait Expect {
    fn expect_success(&self) -> String;
    fn expect_failure(&self, sentence: &str);
}

impl Expect for Output {
    fn expect_success(&self) -> String {
        let (out, err) = (String::from_utf8_lossy(&self.stdout), String::from_utf8_lossy(&self.stderr));
        assert!(self.status.success(), "{}\nstdout: {out}\nstderr: {err}", self.status);
        out.into_owned()
    }

    fn expect_failure(&self, sentence: &str) {
        let err = String::from_utf8_lossy(&self.stderr);
        assert!(!self.status.success(), "it should have failed");
        assert!(err.contains(sentence), "expected '{sentence}' in: {err}");
    }
}
