//! Open files of the tree that go from process to process: by fork, by exec, by both. Calls on them behave as on a file
//! system of the kernel, whatever became of names, modes and of the process that opened them.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

#[path = "harness/mod.rs"]
mod harness;

use harness::{Expect, Node};
use ipc::{Host, SystemHost, Word};
use std::io::{BufRead, BufReader};

/// A script of bash in the tree; its lines.
fn lines(node: &Node, script: &str) -> Vec<String> {
    let script = format!("T={}\ncd $T\n{script}", node.path(""));
    let text = node.hearth(&["run", "--", "bash", "-ec", &script]).expect_success();
    text.lines().map(str::to_owned).collect()
}

/// Detached sessions and references, as the daemon counts them.
fn left(node: &Node) -> (u64, u64) {
    let status = node.hearth(&["status", "--json"]);
    let answers: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    let count = |name: &str| answers[0][name].as_u64().unwrap_or_else(|| panic!("{name} in {answers}"));
    (count("estates"), count("references"))
}

/// Whether it comes to be so, in five seconds at most.
fn within_bound(is_so: impl Fn() -> bool) -> bool {
    for _ in 0..500 {
        if is_so() {
            return true;
        }
        let until = SystemHost.now().after(std::time::Duration::from_millis(10));
        SystemHost.wait(&Word::new(0), 0, Some(until));
    }
    false
}

/// Nothing is left of programs that have ended.
fn nothing_is_left(node: &Node) {
    assert!(within_bound(|| left(node) == (0, 0)), "estates and references are left: {:?}", left(node));
}

#[test]
fn a_lock_is_the_descriptions() {
    let node = Node::up();
    let found = lines(
        &node,
        r#"
        other() { flock -n lock true && echo free || echo held; }
        exec 9>lock
        flock -n 9 && echo mine
        other
        flock -n 9 && echo still
        exec 9>&-
        other
        ( flock 9; other ) 9>lock
        other
        # A child keeps it when the shell has closed its own.
        exec 9>lock; flock 9; sleep 1000 & exec 9>&-
        other
        kill -9 $!; wait $! || true
        other
        # One that closes it does not.
        exec 9>lock; flock 9; sleep 1000 9>&- &
        exec 9>&-
        until [ $(other) = free ]; do :; done
        kill $!
        # A program that takes the shell's place has it.
        ( exec 9>lock; flock 9; exec sleep 1000 ) &
        until [ $(other) = held ]; do :; done
        kill -9 $!; wait $! || true
        other
        "#,
    );
    let expected = "mine held still free held free held free free";
    assert_eq!(found.join(" "), expected);
    nothing_is_left(&node);
}

#[test]
fn files_without_a_name_or_with_another_go_on() {
    let node = Node::up();
    let found = lines(
        &node,
        r#"
        exec 8<>gone; echo one >&8; rm gone
        (echo two >&8)
        sh -c 'echo three >&8'
        bash -c '(sh -c "echo four >&8")'
        python3 -c 'import os; print(os.fstat(8).st_size, os.fstat(8).st_nlink, os.pread(8, 99, 0).split())'
        exec 8>&-
        exec 7>log; mv log log.1; (echo a >&7; rm log.1; echo b >&7; exec cat /proc/self/fd/7 </dev/null >/dev/null) || true
        python3 -c 'import os; print(os.fstat(7).st_size)'
        exec 7>&-
        mkdir d; cd d; mv ../d ../e; touch here; sh -c 'ls; touch there'; ls; cd ..
        cat <<END
$(cat <<IN
inner
IN
)
END
        python3 - <<'END'
import os, subprocess, tempfile
f = tempfile.TemporaryFile(dir=".")
f.write(b"parent"); f.flush()
os.set_inheritable(f.fileno(), True)
for how in [dict(close_fds=False), dict(pass_fds=[f.fileno()]), dict(pass_fds=[f.fileno()], preexec_fn=lambda: None)]:
    subprocess.run(["sh", "-c", f"echo child >&{f.fileno()}"], check=True, **how)
if os.fork() == 0:
    os.write(f.fileno(), b"forked"); os._exit(0)
os.wait(); f.seek(0); print(f.read())
END
        "#,
    );
    let expected = [
        "19 0 [b'one', b'two', b'three', b'four']",
        "4",
        "here",
        "here",
        "there",
        "inner",
        "b'parentchild\\nchild\\nchild\\nforked'",
    ];
    assert_eq!(found, expected);
    nothing_is_left(&node);
}

#[test]
fn rights_are_those_of_the_opening() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: acts as another user, for which it needs root");
        return;
    }
    let node = Node::up();
    let found = lines(
        &node,
        r#"
        chmod 777 .
        python3 -u - <<'END'
import os, subprocess
def drop():
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
# Opened as root: what the user may not touch he was given.
f = os.open("secret", os.O_RDWR | os.O_CREAT, 0o600)
if os.fork() == 0:
    drop(); os.write(f, b"by nobody\n"); os._exit(0)
print(os.wait()[1], os.pread(f, 99, 0))
# Opened by the user, whose mode is gone since.
if os.fork() == 0:
    drop()
    w = os.open("own", os.O_WRONLY | os.O_CREAT, 0o600)
    os.set_inheritable(w, True)
    os.chmod("own", 0)
    subprocess.run(["sh", "-c", f"echo written >&{w}; cat <&{w} || echo not readable"], close_fds=False, stderr=subprocess.DEVNULL)
    os._exit(0)
os.wait(); print(open("own").read())
END
        "#,
    );
    assert_eq!(found, ["0 b'by nobody\\n'", "not readable", "written", ""]);
    nothing_is_left(&node);
}

#[test]
fn locks_of_a_process_stay_over_an_exec() {
    let node = Node::up();
    let found = lines(
        &node,
        r#"
        cat > look.py <<'END'
import fcntl, sys
try:
    fcntl.lockf(open("ranges", "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB); print("free")
except OSError: print("held")
END
        python3 - <<'END'
import fcntl, os, subprocess
f = open("ranges", "w"); fcntl.lockf(f, fcntl.LOCK_EX)
if os.fork() == 0:
    os.close(f.fileno()); os._exit(0)
os.wait(); subprocess.run(["python3", "look.py"])
os.set_inheritable(f.fileno(), True)
os.execvp("sh", ["sh", "-c", f"python3 look.py; exec {f.fileno()}>&-; python3 look.py"])
END
        "#,
    );
    assert_eq!(found, ["held", "held", "free"]);
    nothing_is_left(&node);
}

#[test]
fn killed_at_any_moment_they_leave_nothing() {
    let node = Node::up();
    let kills = std::env::var("HEARTH_KILLS").map_or(12, |count| count.parse::<u32>().unwrap());
    let script = r#"
        for round in 1 2 3 4 5 6; do
            bash -c 'exec 9>lock 8>gone; rm -f gone; flock -n 9 || exit 1
                while :; do (echo x >&8; sh -c "echo y >&8"); (exec sh -c :) ; done' &
            sleep 0.$((RANDOM % 3))$((RANDOM % 9))
            kill -9 $!; wait $! || true
            until flock -n lock true; do sleep 0.01; done
        done
        echo done
    "#;
    // A few at a time, for the time that a script may take.
    for _ in 0..kills.div_ceil(6) {
        assert_eq!(lines(&node, script), ["done"]);
        nothing_is_left(&node);
    }
}

#[test]
fn a_child_that_does_not_use_the_tree_does_not_attach() {
    let node = Node::up();
    let script = r#"
        exec 9>file
        sleep 1000 & one=$!
        (exec sleep 1000) & two=$!
        echo $one $two
        read answer || true
        kill $one $two
    "#;
    let script = format!("T={}\ncd $T\n{script}", node.path(""));
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_hearth"));
    command.args(["run", "--dir", node.dir(), "--", "bash", "-ec", &script]);
    let piped = command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut shell = piped.spawn().unwrap();
    let mut said = String::new();
    let mut out = BufReader::new(shell.stdout.take().unwrap());
    out.read_line(&mut said).unwrap();
    let children: Vec<u64> = said.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    // Both are what they will be, and who they were before has left: the shell's child looks for the program in the
    // tree before it becomes that.
    let is_sleep = |pid: &u64| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap() == "sleep\n";
    assert!(within_bound(|| children.iter().all(is_sleep)), "{children:?} are not begun");
    let attached = || -> Vec<u64> {
        let status = node.hearth(&["status", "--json"]);
        let answers: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        let programs = answers[0]["programs"].as_array().unwrap();
        programs.iter().map(|program| program["pid"].as_u64().unwrap()).collect()
    };
    let nobody = || !attached().iter().any(|pid| children.contains(pid));
    assert!(within_bound(nobody), "{children:?} in {:?}", attached());
    assert_eq!(left(&node).0, 2, "each was given the file");
    drop(shell.stdin.take());
    shell.wait().unwrap();
    assert!(within_bound(|| attached().is_empty()), "{:?} are left", attached());
    // A process that has no file of the tree open makes no call, whatever it starts.
    let script = format!("cd /; (true); sh -c true; {} status --json", env!("CARGO_BIN_EXE_hearth"));
    let script = format!("{script} --dir {}", node.dir());
    let said = node.hearth(&["run", "--", "bash", "-ec", &script]).expect_success();
    let answers: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(answers[0]["programs"].as_array().map(Vec::len), Some(0), "{said}");
    nothing_is_left(&node);
}

#[test]
fn they_are_there_after_a_restart_of_the_daemon() {
    let node = Node::up();
    let found = lines(
        &node,
        &format!(
            r#"
            other() {{ flock -n lock true && echo free || echo held; }}
            exec 9>lock 8<>gone; rm gone; flock 9
            (until [ -e /dev/shm/$$.go ]; do sleep 0.05; done; echo late >&8; exec 9>&-) &
            old=$({hearth} status --json --dir {dir} | tr , '\n' | sed -n 's/.*"pid"://p' | head -1)
            kill -9 $old
            other
            touch /dev/shm/$$.go; wait $!; rm /dev/shm/$$.go
            other
            python3 -c 'import os; print(os.pread(8, 99, 0))'
            exec 9>&-
            other
            "#,
            hearth = env!("CARGO_BIN_EXE_hearth"),
            dir = node.dir(),
        ),
    );
    assert_eq!(found, ["held", "held", "b'late\\n'", "free"]);
    nothing_is_left(&node);
}

#[test]
fn an_offset_whose_user_was_killed_and_not_reaped_is_free() {
    let node = Node::up();
    let found = lines(
        &node,
        r#"
        timeout 60 python3 - <<'END'
import os, signal, time
f = os.open("file", os.O_RDWR | os.O_CREAT)
for round in range(60):
    child = os.fork()
    if child == 0:
        data = bytes(1 << 20)
        while True: os.pwrite(f, b"x", 0); os.lseek(f, 0, os.SEEK_SET); os.write(f, data)
    time.sleep(0.02 + round % 7 / 1000)
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    os.write(f, b"hello")
    os.waitpid(child, 0)
print("done")
END
        "#,
    );
    assert_eq!(found, ["done"]);
    nothing_is_left(&node);
}

#[test]
fn offsets_are_shared_however_many_files_were_opened() {
    let node = Node::up();
    let found = lines(
        &node,
        r#"
        # Each fork may have had what was open; the last file's offset is shared all the same.
        ulimit -n "$(ulimit -Hn)"
        exec 9<>first; echo 1 >&9; /bin/true
        for ((i = 0; i < 66000; i++)); do : >x; done
        (/bin/echo a; /bin/echo b) >f
        { echo c; (echo d); } >g
        cat f g
        (echo 2) >&9; /bin/echo 3 >&9; cat first
        python3 - <<'END'
import os
def fork():
    child = os.fork()
    if child: os.waitpid(child, 0)
    return child
files = []
for index in range(3000):
    files.append(os.open("many%d" % (index % 100), os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    if index % 1000 == 0 and fork() == 0: os._exit(0)
for index in range(2900, 3000):
    os.write(files[index], b"parent")
    os.set_inheritable(files[index], True)
if fork() == 0:
    for index in range(2900, 3000): os.write(files[index], b"child")
    os.execv("/bin/bash", ["bash", "-c", "".join("echo next >&%d;" % files[index] for index in range(2990, 3000))])
print({os.pread(files[index], 99, 0) for index in range(2900, 2990)}, {os.pread(files[index], 99, 0) for index in range(2990, 3000)})
maps = lambda: open("/proc/self/maps").read().count("hearth-openings")
before = maps()
for file in files: os.close(file)
# The shell's, and the one that files are opened in.
print(before, maps())
END
        "#,
    );
    let expected = ["a", "b", "c", "d", "1", "2", "3", "{b'parentchild'} {b'parentchildnext\\n'}", "4 2"];
    assert_eq!(found, expected);
    nothing_is_left(&node);
}

#[test]
fn a_limit_on_the_size_of_files_ends_nobody() {
    let node = Node::up();
    // In blocks of 512 bytes: less than a page, a page, more.
    for blocks in [1, 8, 1000] {
        let found = lines(
            &node,
            &format!(r#"dash -c 'ulimit -f {blocks}; (echo a; (echo b); dash -c : ) >limited; cat limited'"#),
        );
        assert_eq!(found, ["a", "b"], "{blocks}");
    }
    let script = format!(
        "sh -c 'ulimit -f 1000; exec {} run --dir {} -- sh -c \"(echo a; /bin/echo b) > {}; cat {}\"'",
        env!("CARGO_BIN_EXE_hearth"),
        node.dir(),
        node.path("a"),
        node.path("a"),
    );
    let said = harness::limited(&["sh", "-c"], &[&script]).expect_success();
    assert_eq!(said, "a\nb\n");
    nothing_is_left(&node);
}

#[test]
fn who_comes_later_moves_no_offset() {
    let node = Node::up();
    let found = lines(
        &node,
        r#"
        python3 - <<'END'
import os
f = os.open("file", os.O_RDWR | os.O_CREAT)
written = 0
for round in range(150):
    child = os.fork()
    if child == 0:
        os.write(f, b"c"); os._exit(0)
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        os.write(f, b"p"); written += 1
    written += 1
print(os.fstat(f).st_size == written, os.lseek(f, 0, os.SEEK_CUR) == written)
END
        "#,
    );
    assert_eq!(found, ["True True"]);
    nothing_is_left(&node);
}
