//! Other processes: this program starts itself again with a task in its environment.

use crate::{SOON, eventually};
use nix::fcntl::{FcntlArg, fcntl};
use std::fs::{File, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const TASK: &str = "GATEWAY_TEST_TASK";

/// Another process with a task. It ends when this is dropped.
pub struct Process {
    child: Child,
    /// The folder with its program, if that is a copy.
    _program: Option<tempfile::TempDir>,
}

/// A folder that every user may read, with this program in it as `child`.
fn readable_copy(program: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    // Copied by a child process: otherwise a process that is being started for another test would have the copy open
    // for writing.
    let copied = Command::new("cp").arg(program).arg(folder.path().join("child")).status().unwrap();
    assert!(copied.success(), "{copied}");
    folder
}

impl Process {
    /// Starts it for root: `task` is a word, then what it needs.
    pub fn start(task: &str, path: &Path) -> Self {
        Self::start_as(0, task, path)
    }

    /// The same for another user.
    pub fn start_as(uid: u32, task: &str, path: &Path) -> Self {
        let built = std::env::current_exe().unwrap();
        // The built program may be in the home folder of a user.
        let copy = (uid != 0).then(|| readable_copy(&built));
        let mut command = Command::new(copy.as_ref().map_or(built, |folder| folder.path().join("child")));
        command.args(["--exact", "child::this_is_a_child_if_it_has_a_task", "--nocapture"]);
        command.env(TASK, format!("{task} {}", path.display())).uid(uid).gid(uid);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self { child: command.spawn().unwrap(), _program: copy }
    }

    /// Waits until the process has printed this.
    pub fn said(&mut self, what: &str) {
        let output = self.child.stdout.take().unwrap();
        let mut lines = BufReader::new(output);
        let mut line = String::new();
        // The first word may come after output of the test harness on the same line.
        while !line.trim_end().ends_with(what) {
            line.clear();
            assert_ne!(lines.read_line(&mut line).unwrap(), 0, "it ended without saying {what}");
        }
        self.child.stdout = Some(lines.into_inner());
    }

    /// Sends a signal, and waits for the end of the process.
    pub fn killed_by(mut self, signal: rustix::process::Signal) {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, signal).unwrap();
        self.ends();
    }

    /// Lets the process continue and end.
    pub fn finish(mut self) {
        self.let_go();
        assert!(self.ends(), "it failed");
    }

    /// Lets the process continue as soon as it has got what it waits for.
    pub fn let_go(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Waits for the end of the process; true if it succeeded.
    pub fn ends(&mut self) -> bool {
        let mut status = None;
        let child = std::cell::RefCell::new((&mut self.child, &mut status));
        eventually(&format!("a process ends within {SOON:?}"), || {
            let (child, status) = &mut *child.borrow_mut();
            **status = child.try_wait().unwrap();
            status.is_some()
        });
        status.is_some_and(|status| status.success())
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already. If a broken gateway keeps it in the kernel, it ends only with the mount.
        let _ = self.child.kill();
        let _ = self.child.try_wait();
    }
}

/// An exclusive `fcntl` lock on the whole of a file.
pub fn whole_file() -> libc::flock {
    let kind = libc::F_WRLCK as i16;
    libc::flock { l_type: kind, l_whence: libc::SEEK_SET as i16, l_start: 0, l_len: 0, l_pid: 0 }
}

fn say(what: &str) {
    println!("\n{what}");
    std::io::stdout().flush().unwrap();
}

fn wait_for_the_end() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

fn open(path: &str) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

#[test]
fn this_is_a_child_if_it_has_a_task() {
    let Ok(task) = std::env::var(TASK) else { return };
    let (what, path) = task.split_once(' ').unwrap();
    match what {
        "append" => {
            let mut file = File::options().append(true).open(path).unwrap();
            say("ready");
            for number in 0..500 {
                file.write_all(format!("{} {number:06}\n", std::process::id()).as_bytes()).unwrap();
            }
        }
        "range-lock" => {
            let file = open(path);
            say("asks");
            fcntl(&file, FcntlArg::F_SETLKW(&whole_file())).unwrap();
            say("has it");
            wait_for_the_end();
        }
        "flock" => {
            let file = open(path);
            say("asks");
            rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
            say("has it");
            wait_for_the_end();
        }
        "serve" => {
            crate::failing::serve_until_the_end(Path::new(path), || {
                say("serves");
                wait_for_the_end();
            });
        }
        other => panic!("no such task: {other}"),
    }
}
