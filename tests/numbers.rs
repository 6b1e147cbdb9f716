//! Descriptors that the library itself keeps open in a program, and programs that close or replace whatever number they
//! like: neither notices the other.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node};

/// A script of Python in the tree, of a program that may have so many descriptors.
fn python(node: &Node, script: &str) {
    let script = format!("ulimit -n 1024; cd $T; export DAEMON={}\n/usr/bin/python3 - <<'X'\n{script}\nX", {
        node.daemon()
    });
    node.sh(&script).expect_success();
}

/// Number 3 has a lock, 4 is a file without a name, 5 is of the kernel's; all other numbers the program does away with.
const HOLDS: &str = r#"
import ctypes, fcntl, os, subprocess
libc = ctypes.CDLL(None, use_errno=True)

def at(number, fd):
    if fd != number: os.dup2(fd, number); os.close(fd)

at(3, os.open("lock", os.O_RDWR | os.O_CREAT, 0o600))
at(4, os.open("nameless", os.O_RDWR | os.O_CREAT, 0o600))
at(5, os.open("/dev/null", os.O_RDWR))
os.unlink("nameless")
os.write(4, b"still here")
fcntl.lockf(3, fcntl.LOCK_EX)

def excluded():
    child = os.fork()
    if child == 0:
        try: fcntl.lockf(os.open("lock", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB); os._exit(1)
        except BlockingIOError: os._exit(0)
        finally: os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def check(after):
    os.fsync(4)
    open("new", "w").write(after)
    assert os.pread(4, 99, 0) == b"still here", after
    assert excluded(), f"the lock is gone after {after}"

check("nothing")
"#;

fn holds(and: &str) {
    let node = Node::up();
    python(&node, &format!("{HOLDS}{and}"));
}

#[test]
fn a_program_may_close_ranges_of_numbers() {
    holds(
        r#"
for flags in 4, 2, 6, 0:
    assert libc.close_range(6, ctypes.c_uint(0xffffffff), flags) == 0, ctypes.get_errno()
    check(f"close_range with {flags}")
"#,
    );
}

#[test]
fn a_program_may_close_every_number() {
    holds(
        r#"
for number in range(6, 1024):
    try: os.close(number)
    except OSError: pass
check("close")
"#,
    );
}

#[test]
fn a_program_may_put_its_files_onto_every_number() {
    holds(
        r#"
for of, inheritable in (5, True), (5, False), (4, True), (4, False):
    for number in range(6, 1024):
        os.dup2(of, number, inheritable)
        assert os.fstat(number).st_ino == os.fstat(of).st_ino, number
        assert os.get_inheritable(number) == inheritable, number
        assert os.pread(number, 99, 0) == (b"" if of == 5 else b"still here"), number
        os.close(number)
    check(f"dup2 of {of}, {inheritable}")
# And keeps them there, as many as there is room for.
for number in range(6, 900): os.dup2(5, number)
check("dup2 onto almost all")
for number in range(6, 900): assert os.write(number, b"x") == 1; os.close(number)
check("close")
"#,
    );
}

/// A child between vfork and exec has numbers of its own, and its parent's memory.
#[test]
fn a_new_program_may_get_every_number() {
    holds(
        r#"
onto = [(os.POSIX_SPAWN_DUP2, 5, number) for number in range(6, 900)]
child = os.posix_spawn("/bin/bash", ["bash", "-c", "echo child >&899 && echo child > by_child"], os.environ, file_actions=onto)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
check("posix_spawn")
subprocess.run(["true"], close_fds=True, check=True)
check("vfork and close_range")
assert open("by_child").read() == "child\n"
"#,
    );
}

/// Descriptors that the library had opened and closed again are free.
#[test]
fn numbers_that_the_library_gave_back_are_the_programs() {
    let node = Node::up();
    python(
        &node,
        r#"
import os

def nine_hundred(after):
    files = [os.open("/etc/passwd", os.O_RDONLY) for _ in range(900)]
    for fd in files:
        assert os.pread(fd, 4, 0) == b"root", (fd, after)
        os.close(fd)

nine_hundred("nothing")
big = os.open("big", os.O_RDWR | os.O_CREAT, 0o600)
for turn in range(48): os.write(big, b"x" * (1 << 20))
os.fsync(big)
nine_hundred("the log grew")
os.kill(int(os.environ["DAEMON"]), 9)
os.pwrite(big, b"y", 0)
os.fsync(big)
open("small", "w").write("a call")
nine_hundred("the daemon was restarted")
assert os.pread(big, 2, 0) == b"yx"
"#,
    );
}
