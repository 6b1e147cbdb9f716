//! Files without a name (`O_TMPFILE`) through the library and the mount: such a file ends with the last process that has it
//! open, by whatever death, also if it was synced; if it has got a name before, it stays; and a daemon that dies meanwhile
//! changes neither.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, until};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

/// Ten files of a megabyte, synced. One of them gets a name when a line comes, and then the process is killed, by itself.
const SCRIPT: &str = r"
import os, signal, sys
tree = sys.argv[1]
for _ in range(10):
    fd = os.open(tree, os.O_TMPFILE | os.O_RDWR, 0o600)
    assert os.write(fd, b'x' * 1000000) == 1000000
    os.fsync(fd)
assert os.listdir(tree) == []
print('ready', flush=True)
sys.stdin.readline()
assert os.fstat(fd).st_nlink == 0 and os.pread(fd, 5, 999998) == b'xx'
os.link(f'/proc/self/fd/{fd}', f'{tree}/named', src_dir_fd=fd)
os.kill(os.getpid(), signal.SIGKILL)
";

/// Starts the script, and waits until its files are there.
fn start(node: &Node, mounted: bool) -> Child {
    let tree = node.path("");
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "60"]);
    if !mounted {
        command.args([&node.program(), "run", "--dir", node.dir(), "--"]);
    }
    command.args(["/usr/bin/python3", "-c", SCRIPT, &tree]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    child
}

/// Number of inodes in use.
fn used(node: &Node) -> u64 {
    let told = node.sh("stat -f -c '%c %d' $T").expect_success();
    let numbers: Vec<u64> = told.split_whitespace().map(|number| number.parse().unwrap()).collect();
    numbers[0] - numbers[1]
}

fn files_end(mounted: bool, daemon_dies: bool) {
    let node = Node::up();
    if mounted {
        node.hearth(&["mount"]).expect_success();
    }
    let inodes = used(&node);
    let mut child = start(&node, mounted);
    if daemon_dies {
        node.kill_daemon();
    }
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(!child.wait().unwrap().success(), "it was killed");
    let sizes = || node.sh("cd $T; stat -c '%n %s %h' *").expect_success();
    assert_eq!(sizes(), "named 1000000 1\n");
    until("the other files are gone", || used(&node) == inodes + 1);
    node.sh("rm $T/named").expect_success();
    if mounted {
        node.hearth(&["umount"]).expect_success();
    }
    until("no file is left", || used(&node) == inodes);
    node.hearth(&["down"]).expect_success();
    node.check();
    let pool = format!("{}/node-1/pool", node.dir());
    let found = harness::limited(&[&node.program(), "check"], &[&pool]).expect_success();
    assert!(found.contains("0 orphans") && found.contains("\n0 data blocks"), "{found}");
}

#[test]
fn they_end_with_their_process() {
    files_end(false, false);
    if harness::can_mount() {
        files_end(true, false);
    }
}

#[test]
fn they_outlive_a_daemon() {
    files_end(false, true);
    if harness::can_mount() {
        files_end(true, true);
    }
}

/// Uses files that lose their names or never had one, in the way that its argument says, and waits without another call
/// on the tree.
const IDLE: &str = r"
import os, sys
tree, how = sys.argv[1:]
count = 5000 if how == 'many' else 1
if how == 'unnamed' or how == 'many':
    files = [os.open(tree, os.O_TMPFILE | os.O_RDWR, 0o600) for _ in range(count)]
    for fd in files:
        os.write(fd, b'x' * 10000)
    for fd in files:
        os.close(fd)
else:
    fd = os.open(f'{tree}/file', os.O_CREAT | os.O_RDWR, 0o600)
    os.write(fd, b'x' * 10000)
    if how == 'closed':
        os.close(fd)
    os.unlink(f'{tree}/file')
    if how == 'removed':
        os.write(fd, b'x')
        os.close(fd)
print('ready', flush=True)
sys.stdin.readline()
";

fn idle_gives_back(node: &Node, mounted: bool, how: &str) {
    let before = used(node);
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "60"]);
    if !mounted {
        command.args([&node.program(), "run", "--dir", node.dir(), "--"]);
    }
    let tree = node.path("");
    let limit = "ulimit -n 6000; exec /usr/bin/python3 -c \"$@\"";
    command.args(["sh", "-c", limit, "sh", IDLE, tree.trim_end_matches('/'), how]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    until(&format!("nothing is left of what was {how}, mounted: {mounted}"), || used(node) == before);
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success(), "it has ended by itself: {how}, mounted: {mounted}");
}

/// The space of a file is free soon after the last process has closed it, though no process makes a call.
#[test]
fn an_idle_process_keeps_no_file() {
    let node = Node::up();
    for how in ["unnamed", "removed", "closed", "many"] {
        idle_gives_back(&node, false, how);
    }
    if harness::can_mount() {
        node.hearth(&["mount"]).expect_success();
        for how in ["unnamed", "closed"] {
            idle_gives_back(&node, true, how);
        }
        node.hearth(&["umount"]).expect_success();
    }
    node.hearth(&["down"]).expect_success();
    node.check();
}

/// Has more files open than the open table lists, removes them by the way that its argument names, and reads them.
const MANY_OPEN: &str = r"
import os, subprocess, sys
tree, how = sys.argv[1:]
files = []
for number in range(4500):
    if how != 'unnamed':
        files.append(os.open(f'{tree}/file-{number}', os.O_CREAT | os.O_RDWR, 0o600))
    else:
        files.append(os.open(tree, os.O_TMPFILE | os.O_RDWR, 0o600))
    os.write(files[-1], b'%d' % number)
if how == 'removed':
    for number in range(len(files)):
        os.unlink(f'{tree}/file-{number}')
elif how == 'removed by another':
    subprocess.run(['sh', '-c', 'rm file-*'], cwd=tree, check=True)
os.sync()
for number, fd in enumerate(files):
    os.pwrite(fd, b'!', 10)
os.sync()
lost = [number for number, fd in enumerate(files) if os.pread(fd, 20, 0) != (b'%d' % number).ljust(10, bytes(1)) + b'!']
assert not lost, (len(lost), lost[:5])
";

/// No file that a process has open is lost with its name, however many it has open.
#[test]
fn many_open_files_are_kept_without_names() {
    let node = Node::up();
    let before = used(&node);
    for how in ["removed", "removed by another", "unnamed"] {
        let limit = "ulimit -n 6000; exec /usr/bin/python3 -c \"$@\"";
        let (program, tree) = (node.program(), node.path(""));
        let run = ["timeout", "60", &program, "run", "--dir", node.dir(), "--"];
        let command =
            [&run[..], &["sh", "-c", limit, "sh", MANY_OPEN, tree.trim_end_matches('/'), how]].concat();
        let output = Command::new(command[0]).args(&command[1..]).output().unwrap();
        assert!(output.status.success(), "{how}: {}", String::from_utf8_lossy(&output.stderr));
        until("no file is left", || used(&node) == before);
    }
    node.hearth(&["down"]).expect_success();
    node.check();
}

/// Files without a name that a program had open through the mount end with a gateway that is killed.
#[test]
fn they_end_with_a_gateway_that_is_killed() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::up();
    let before = used(&node);
    node.hearth(&["mount"]).expect_success();
    let script = r"
import errno, os, sys
tree, gateway = sys.argv[1:]
unnamed = os.open(tree, os.O_TMPFILE | os.O_RDWR, 0o600)
removed = os.open(f'{tree}/removed', os.O_CREAT | os.O_RDWR, 0o600)
os.unlink(f'{tree}/removed')
for fd in (unnamed, removed):
    os.write(fd, b'x' * 3000000)
    os.fsync(fd)
os.kill(int(open(gateway).read().split()[0]), 9)
for fd in (unnamed, removed):
    for call in (lambda: os.pwrite(fd, b'y', 0), lambda: os.fsync(fd), lambda: os.pread(fd, 10, 0) and os.fstat(fd)):
        try:
            call()
            sys.exit('a call succeeds without a gateway')
        except OSError as error:
            assert error.errno in (errno.EIO, errno.ENOTCONN, errno.ECONNABORTED), error
";
    let gateway = format!("{}/node-1/gateway.pid", node.dir());
    let tree = node.path("");
    let command = ["timeout", "60", "python3", "-c", script, tree.trim_end_matches('/'), &gateway];
    let output = Command::new(command[0]).args(&command[1..]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    node.hearth(&["umount"]).expect_success();
    until("no file is left", || used(&node) == before);
    node.hearth(&["down"]).expect_success();
    node.check();
    let pool = format!("{}/node-1/pool", node.dir());
    let found = harness::limited(&[&node.program(), "check"], &[&pool]).expect_success();
    assert!(found.contains("0 orphans") && found.contains("\n0 data blocks"), "{found}");
}
