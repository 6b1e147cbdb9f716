//! The output and the exit code of `hearth status` for a node of which a part is gone, stands still or is full; and the
//! effects of `start` and `down` there.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, kill, limited, until};
use ipc::{Host, SystemHost, Word};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(node: &Node) -> serde_json::Value {
    let output = node.hearth(&["status", "--json"]);
    let answers: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    answers[0].clone()
}

fn state(node: &Node) -> String {
    json(node)["state"].as_str().unwrap_or("no state is said").to_owned()
}

/// The process that a pid file names.
fn process_of(file: &Path) -> i32 {
    fs::read_to_string(file).unwrap().split(' ').next().unwrap().parse().unwrap()
}

fn keeper(node: &Node) -> i32 {
    process_of(&node.dir.path().join("node-1/keeper.pid"))
}

/// Whether a process lives; one that only waits to be reaped does not.
fn lives(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim().starts_with('Z'))
}

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    if signal == Signal::STOP {
        // A thread that runs elsewhere goes on until it is told.
        until("all of its threads stand still", || {
            let mut threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
            threads.all(|thread| {
                let state = fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
                state.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
            })
        });
    }
}

/// A program on the tree that appends to a file, with an fsync, for each line that it is told, and says how that went.
struct Writer {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Writer {
    fn begin(node: &Node) -> Self {
        let script = r#"
import errno, os, sys
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
print("ready", flush=True)
for line in sys.stdin:
    try: os.write(file, line.encode()); os.fsync(file); print("wrote", flush=True)
    except OSError as why: print(errno.errorcode[why.errno], flush=True)
"#;
        let mut child = Command::new("timeout")
            .args(["120", &node.program(), "run", "--dir", node.dir(), "--"])
            .args(["/usr/bin/python3", "-c", script, &node.path("log")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        let mut writer = Self { child, said };
        assert_eq!(writer.line(), "ready");
        writer
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn write(&mut self) -> String {
        self.child.stdin.as_mut().unwrap().write_all(b"line\n").unwrap();
        self.line()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_node_that_was_taken_down_is_down_and_nothing_else() {
    let node = Node::of_mib(64);
    assert_eq!((state(&node).as_str(), node.hearth(&["status"]).status.code()), ("up", Some(0)));
    node.hearth(&["down"]).expect_success();
    let said = node.hearth(&["status"]);
    assert_eq!(said.status.code(), Some(2));
    assert_eq!(text(&said).lines().next(), Some("node 1: down"));
    assert_eq!((state(&node).as_str(), json(&node)["down"].as_str()), ("down", Some("down")));
}

#[test]
fn a_pool_that_is_removed_under_the_daemon_is_told_and_nothing_is_acknowledged_any_more() {
    let node = Node::of_mib(64);
    let pool = node.dir.path().join("node-1/pool");
    let mut writer = Writer::begin(&node);
    assert_eq!(writer.write(), "wrote");
    // The daemon may make a file meanwhile.
    until("the pool is gone", || fs::remove_dir_all(&pool).is_ok() || !pool.exists());
    until("the status says it", || state(&node) == "failed");
    let said = node.hearth(&["status"]);
    assert_eq!(said.status.code(), Some(1));
    let sentence = format!("FAILED: {} was removed", pool.display());
    assert!(text(&said).contains(&sentence), "{}", text(&said));
    for _ in 0..3 {
        assert_eq!(writer.write(), "EIO");
        let read = node.sh("cat $T/log");
        read.expect_failure("Input/output error");
    }
    assert!(fs::read_to_string(node.dir.path().join("node-1/serve.log")).unwrap().contains("was removed"));
    node.hearth(&["down"]).expect_success();
    node.hearth(&["start"]).expect_failure("is gone");
}

/// Only a part of it, and not the folder.
#[test]
fn a_pool_without_its_tree_is_told() {
    let node = Node::of_mib(64);
    let tree = node.dir.path().join("node-1/pool/tree");
    fs::remove_file(&tree).unwrap();
    until("the status says it", || state(&node) == "failed");
    let said = text(&node.hearth(&["status"]));
    assert!(said.contains(&format!("FAILED: {} was removed", tree.display())), "{said}");
}

/// A new pool in the place of one that was lost would look as if the files had never been.
#[test]
fn no_pool_is_made_where_one_was_emptied() {
    let node = Node::of_mib(64);
    let (pool, aside) = (node.dir.path().join("node-1/pool"), node.dir.path().join("aside"));
    node.sh("echo kept > $T/file").expect_success();
    node.hearth(&["down"]).expect_success();
    fs::rename(&pool, &aside).unwrap();
    fs::create_dir(&pool).unwrap();
    node.hearth(&["start"]).expect_failure("is empty");
    assert_eq!(fs::read_dir(&pool).unwrap().count(), 0, "nothing was made");
    fs::remove_dir(&pool).unwrap();
    fs::rename(&aside, &pool).unwrap();
    node.hearth(&["start"]).expect_success();
    assert_eq!(node.sh("cat $T/file").expect_success(), "kept\n");
}

#[test]
fn a_node_without_its_keeper_is_degraded_and_start_gives_it_another() {
    let node = Node::of_mib(64);
    let mut writer = Writer::begin(&node);
    assert_eq!(writer.write(), "wrote");
    let daemon = node.daemon();
    kill(keeper(&node));
    let said = node.hearth(&["status"]);
    assert_eq!((said.status.code(), state(&node).as_str()), (Some(1), "degraded"));
    assert!(text(&said).contains("its keeper is gone: nothing starts the daemon again"), "{}", text(&said));
    assert!(text(&said).contains("hearth start --dir"), "{}", text(&said));
    assert!(text(&node.hearth(&["start"])).contains("has a keeper again"));
    assert_eq!((state(&node).as_str(), node.daemon()), ("up", daemon));
    assert!(text(&node.hearth(&["up"])).contains("is up already"));
    for _ in 0..2 {
        let daemon = node.daemon();
        kill(daemon);
        assert_eq!(writer.write(), "wrote");
        until("another daemon serves", || state(&node) == "up" && node.daemon() != daemon);
    }
    assert_eq!(node.sh("cat $T/log").expect_success(), "line\n".repeat(3));
    // Taken down in order by the keeper that took it over, also before it started one itself.
    kill(keeper(&node));
    node.hearth(&["start"]).expect_success();
    let processes = [keeper(&node), node.daemon()];
    node.hearth(&["down"]).expect_success();
    assert!(processes.iter().all(|pid| !lives(*pid)));
    drop(writer);
    node.check();
}

#[test]
fn a_keeper_that_stands_still_is_told() {
    let node = Node::of_mib(64);
    let keeper = keeper(&node);
    signal(keeper, Signal::STOP);
    until("the status says it", || state(&node) == "degraded");
    let said = text(&node.hearth(&["status"]));
    signal(keeper, Signal::CONT);
    assert!(said.contains(&format!("its keeper (process {keeper}) is stopped")), "{said}");
    until("it is well again", || state(&node) == "up");
}

#[test]
fn a_daemon_that_does_not_answer_is_told_with_the_way_out() {
    let node = Node::of_mib(64);
    node.sh("echo kept > $T/file").expect_success();
    let daemon = node.daemon();
    signal(daemon, Signal::STOP);
    let silent = format!("process {daemon} does not answer");
    // More often than the socket has places for those who wait.
    for _ in 0..3 {
        let said = node.hearth(&["status"]);
        assert_eq!(said.status.code(), Some(2));
        assert!(
            text(&said).contains(&silent) && text(&said).contains("hearth down --hard"),
            "{}",
            text(&said)
        );
    }
    assert_eq!(state(&node), "silent");
    let run = node.hearth(&["run", "--", "true"]);
    assert!(errors(&run).contains(&silent), "{}", errors(&run));
    // An orderly end goes on as soon as it can, and says meanwhile what it waits for.
    let mut down = Command::new("timeout")
        .args(["120", &node.program(), "down", "--dir", node.dir()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = String::new();
    BufReader::new(down.stderr.take().unwrap()).read_line(&mut told).unwrap();
    assert!(told.contains(&format!("process {daemon} is stopped")), "{told}");
    assert!(told.contains("hearth down --hard --dir"), "{told}");
    signal(daemon, Signal::CONT);
    assert!(down.wait().unwrap().success());
    node.hearth(&["start"]).expect_success();
    signal(node.daemon(), Signal::STOP);
    // While it stands, an orderly end is given up long before one that waits for a digest.
    let down = node.hearth(&["down"]);
    assert_eq!(down.status.code(), Some(2));
    assert!(errors(&down).contains("did not end within 3 s: hearth down --hard"), "{}", errors(&down));
    node.hearth(&["down", "--hard"]).expect_success();
    node.hearth(&["start"]).expect_success();
    assert_eq!(node.sh("cat $T/file").expect_success(), "kept\n");
}

/// So many that the socket has no place for one more.
#[test]
fn a_daemon_that_stands_still_for_long_is_told_however_often_it_is_asked() {
    let node = Node::of_mib(64);
    let daemon = node.daemon();
    let control = format!("{}/node-1/socket.control", node.dir());
    signal(daemon, Signal::STOP);
    let script = format!(
        "import socket\nheld = []\nfor _ in range(10000):\n  one = socket.socket(socket.AF_UNIX); one.setblocking(False)\n  \
         try: one.connect('{control}')\n  except BlockingIOError: break\n  held.append(one)\n"
    );
    limited(&["/usr/bin/python3", "-c", &script], &[]).expect_success();
    let said = node.hearth(&["status"]);
    assert!(text(&said).contains(&format!("process {daemon} does not answer")), "{}", text(&said));
    node.hearth(&["run", "--", "true"]).expect_success();
    node.hearth(&["down", "--hard"]).expect_success();
}

#[test]
fn a_daemon_that_is_being_started_again_is_told_with_the_reason_that_it_is_not() {
    let node = Node::of_mib(64);
    node.sh("echo kept > $T/file").expect_success();
    let (pool, aside) = (node.dir.path().join("node-1/pool"), node.dir.path().join("node-1/aside"));
    fs::rename(&pool, &aside).unwrap();
    kill(node.daemon());
    until("the reason is known", || json(&node)["failure"].is_string());
    let said = node.hearth(&["status"]);
    assert_eq!((said.status.code(), state(&node).as_str()), (Some(1), "starting"));
    assert!(text(&said).starts_with("node 1: being started again\n"), "{}", text(&said));
    assert!(text(&said).contains("is gone"), "{}", text(&said));
    fs::rename(&aside, &pool).unwrap();
    until("it serves", || state(&node) == "up");
    assert_eq!(node.sh("cat $T/file").expect_success(), "kept\n");
}

/// The folder of a cluster whose pool lies elsewhere, and one with all that it has: its processes end, and a new cluster has
/// its place.
#[test]
fn a_cluster_whose_folder_is_removed_ends_and_another_may_be_made_there() {
    let program = env!("CARGO_BIN_EXE_hearth");
    for medium in ["file", "memory"] {
        let above = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let dir = above.path().join("cluster");
        let hearth =
            |command: &str, rest: &[&str]| limited(&[program, command, "--dir", dir.to_str().unwrap()], rest);
        let up = || hearth("up", &["--no-mount", "--medium", medium, "--capacity", "64"]);
        let pool = || {
            let answers: serde_json::Value =
                serde_json::from_slice(&hearth("status", &["--json"]).stdout).unwrap();
            PathBuf::from(answers[0]["pool"].as_str().unwrap())
        };
        up().expect_success();
        let first = pool();
        let processes = ["keeper.pid", "serve.pid"].map(|name| process_of(&dir.join("node-1").join(name)));
        until("the folder is gone", || fs::remove_dir_all(&dir).is_ok() || !dir.exists());
        until("its processes have ended", || !processes.iter().any(|pid| lives(*pid)));
        up().expect_success();
        let second = pool();
        hearth("run", &["--", "sh", "-c", &format!("echo there > {}/n1/file", dir.display())])
            .expect_success();
        hearth("down", &[]).expect_success();
        limited(&[program, "check"], &[second.to_str().unwrap()]).expect_success();
        for pool in [first, second] {
            let _ = fs::remove_dir_all(pool);
        }
    }
}

/// A cluster that was moved is another matter: a user who knows where it is may take it down.
#[test]
fn a_cluster_whose_folder_is_moved_goes_on() {
    let above = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
    let (one, two) = (above.path().join("one"), above.path().join("two"));
    let hearth = |command: &str, dir: &Path, rest: &[&str]| {
        limited(&[env!("CARGO_BIN_EXE_hearth"), command, "--dir", dir.to_str().unwrap()], rest)
    };
    hearth("up", &one, &["--no-mount", "--capacity", "64"]).expect_success();
    let keeper = process_of(&one.join("node-1/keeper.pid"));
    fs::rename(&one, &two).unwrap();
    // A whole round of looks, and more.
    SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(Duration::from_millis(1500))));
    assert!(lives(keeper));
    hearth("status", &two, &[]).expect_success();
    hearth("down", &two, &[]).expect_success();
    assert!(!lives(keeper));
}

/// The figure of `df`, which leaves out what is kept for the daemon's own work.
#[test]
fn a_full_pool_is_told_with_the_figure_of_df() {
    let node = Node::of_mib(64);
    let script = r#"
import os, sys
try:
    with open(sys.argv[1] + "big", "wb", 0) as file:
        while True: file.write(bytes(1 << 16))
except OSError as why: print(why.strerror, flush=True)
sys.stdin.readline()
found = os.statvfs(sys.argv[1])
print(found.f_blocks, found.f_bfree, found.f_bavail, flush=True)
sys.stdin.readline()
"#;
    let mut child = Command::new("timeout")
        .args(["120", &node.program(), "run", "--dir", node.dir(), "--"])
        .args(["/usr/bin/python3", "-c", script, &node.path("")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "No space left on device");
    child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    let df: Vec<u64> = lines.next().unwrap().unwrap().split(' ').map(|word| word.parse().unwrap()).collect();
    let known = json(&node);
    let said = node.hearth(&["status"]);
    child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    child.wait().unwrap();
    assert_eq!((known["blocks"].as_u64(), known["blocks_available"].as_u64()), (Some(df[0]), Some(df[2])));
    assert_eq!(df[2], 0);
    assert_eq!((said.status.code(), known["state"].as_str()), (Some(1), Some("degraded")));
    assert!(text(&said).contains("the pool is full"), "{}", text(&said));
    assert!(text(&said).contains("64 of 64 MiB used"), "{}", text(&said));
    // The reservation of the program is free again, and another program gets not much more.
    until("its reservation is free", || json(&node)["blocks_available"].as_u64() > Some(0));
    assert!(text(&node.hearth(&["status"])).contains("the pool is full"));
    node.sh("rm $T/big").expect_success();
    until("there is room again", || state(&node) == "up");
}

/// The pool of a node that is up belongs to its daemon alone.
#[test]
fn a_check_of_a_pool_in_use_names_the_node_that_uses_it() {
    let node = Node::of_mib(64);
    let pool = format!("{}/node-1/pool", node.dir());
    let daemon = node.daemon();
    for command in ["check", "inspect"] {
        let refused = limited(&[&node.program(), command], &[&pool]);
        refused.expect_failure(&format!(
            "node 1 is up and uses it (process {daemon}): hearth down --dir {} first",
            node.dir()
        ));
        assert_eq!(refused.status.code(), Some(2));
    }
    node.hearth(&["down"]).expect_success();
    // Another process that has taken it.
    let mut other = Command::new("flock")
        .args(["-x", &pool, "sh", "-c", "echo locked; read end"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(other.stdout.take().unwrap()).read_line(&mut line).unwrap();
    limited(&[&node.program(), "check"], &[&pool]).expect_failure("the pool is open in another process");
    drop(other.stdin.take());
    other.wait().unwrap();
    node.check();
}

#[test]
fn a_check_says_what_the_blocks_are_that_have_no_contents_to_verify() {
    let node = Node::of_mib(64);
    node.sh("printf 1234 > $T/file; fallocate -l 1M $T/reserved").expect_success();
    node.hearth(&["down"]).expect_success();
    let pool = format!("{}/node-1/pool", node.dir());
    let said = limited(&[&node.program(), "check"], &[&pool]).expect_success();
    assert!(
        said.contains("257 data blocks in 1 segment: 1 verified, 256 reserved and never written"),
        "{said}"
    );
    let known = limited(&[&node.program(), "check", "--json"], &[&pool]).expect_success();
    let known: serde_json::Value = serde_json::from_str(&known).unwrap();
    let figures = ["data_blocks", "blocks_verified", "blocks_unwritten"].map(|name| known[name].as_u64());
    assert_eq!(figures, [Some(257), Some(1), Some(256)]);
    let inspected = limited(&[&node.program(), "inspect"], &[&pool]).expect_success();
    let head = inspected.lines().next().unwrap();
    // A thirty-second part of the pool, and no less than 4 MiB, with the blocks that describe it.
    let (_, blocks) = head.split_once("data blocks 257 of ").unwrap();
    let blocks: u64 = blocks.strip_suffix(" in 1 segment").unwrap().parse().unwrap();
    assert!((900..=1024).contains(&blocks), "{head}");
}
