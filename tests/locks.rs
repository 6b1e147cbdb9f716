//! Locks of real programs: those that a program decides by itself are those that POSIX wants, and other programs see them,
//! wait for them and get them when their holder is killed.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod processes;

use harness::until;
use processes::{Job, Node, count, spin};
use std::process::Command;

/// Does what it is told: a lock of one of three kinds on a file that stands behind a number, or a look at what is in the way.
const OBEDIENT: &str = r#"
import fcntl, os, struct, sys
files = {}
WANTED = {"shared": 0, "exclusive": 1, "none": 2}
def flock(fd, kind, start, length, command):
    data = struct.pack("hhqqi4x", WANTED[kind], 0, start, length, 0)
    return struct.unpack("hhqqi4x", fcntl.fcntl(fd, command, data))
def answer(words):
    match words:
        case ["open", number, path]:
            files[number] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600); return "open"
        case ["dup", number, other]:
            files[number] = os.dup(files[other]); return "open"
        case ["close", number]:
            os.close(files.pop(number)); return "closed"
        case ["whole", number, kind]:
            how = {"shared": fcntl.LOCK_SH, "exclusive": fcntl.LOCK_EX, "none": fcntl.LOCK_UN}[kind]
            fcntl.flock(files[number], how | fcntl.LOCK_NB); return kind
        case ["wait", number]:
            fcntl.lockf(files[number], fcntl.LOCK_EX); return "got it"
        case [family, number, kind, start, length]:
            fcntl_of, ofd = {"own": (fcntl.F_SETLK, 0), "ofd": (37, 0)}[family]
            flock(files[number], kind, int(start), int(length), fcntl_of); return kind
        case ["test", family, number, kind, start, length]:
            command = {"own": fcntl.F_GETLK, "ofd": 36}[family]
            found = flock(files[number], kind, int(start), int(length), command)
            return "free" if found[0] == 2 else "%s %d %d" % ("shared exclusive".split()[found[0]], found[2], found[3])
        case ["fork", *rest]:
            read, write = os.pipe()
            if os.fork() == 0:
                os.write(write, guarded(rest).encode()); os._exit(0)
            os.close(write); said = os.read(read, 99).decode(); os.close(read); os.wait(); return said
def guarded(words):
    try:
        return answer(words)
    except OSError as why:
        return os.strerror(why.errno)
print("ready", flush=True)
for line in sys.stdin:
    print(guarded(line.split()), flush=True)
"#;

/// The answers to two programs, each line to the first or the second. Most of it is decided by one of them.
const TOLD: &str = "
1 open a f
1 own a exclusive 0 10
1 own a none 0 10
1 own a exclusive 0 100
1 own a none 40 20
1 own a shared 10 5
1 test own a exclusive 0 0
1 test ofd a exclusive 0 10
1 test ofd a shared 12 1
1 test ofd a shared 0 0
1 test ofd a shared 45 5
1 fork own a shared 0 10
1 fork own a shared 45 5
1 test ofd a exclusive 45 5
2 open a f
2 own a shared 0 5
2 own a shared 10 5
2 test own a exclusive 45 5
2 own a none 0 0
1 open b f
1 close b
2 own a exclusive 0 0
2 own a none 0 0
1 whole a exclusive
1 open b f
1 whole b shared
1 whole a shared
1 whole b shared
1 whole b exclusive
1 whole b none
1 whole a exclusive
1 dup c a
1 close a
2 whole a shared
1 whole c none
2 whole a shared
2 whole a none
1 open d g
1 ofd d exclusive 5 5
1 ofd d none 5 5
1 ofd d exclusive 0 10
1 open e g
1 ofd e shared 9 1
1 ofd e shared 10 1
1 own e exclusive 0 1
1 test ofd e exclusive 0 9
1 close e
1 fork test own d shared 0 10
1 ofd d shared 4 2
1 fork test own d shared 3 3
2 open g g
2 own g exclusive 4 1
2 own g shared 4 1
1 close d
2 own g exclusive 0 0
1 open h h
1 whole h exclusive
1 whole h none
1 whole h exclusive
1 fork whole h none
1 open i h
1 whole i exclusive
2 open h h
2 whole h exclusive
2 close h
1 whole i none
";

fn said(jobs: &mut [Job; 2]) -> Vec<String> {
    jobs.iter_mut().for_each(|job| job.expect("ready"));
    let told = TOLD.lines().filter(|line| !line.is_empty());
    let answers = told.map(|line| {
        let (who, what) = line.split_once(' ').unwrap();
        let job = &mut jobs[who.parse::<usize>().unwrap() - 1];
        job.tell(what);
        format!("{line}: {}", job.line().unwrap())
    });
    answers.collect()
}

#[test]
fn locks_answer_as_those_of_the_kernel_do() {
    let node = Node::up();
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let plain = [(); 2].map(|()| {
        let mut command = Command::new("timeout");
        command.args(["60", "python3", "-uc", OBEDIENT]).current_dir(dir.path());
        Job::of(command)
    });
    let wanted = said(&mut { plain });
    let tree = node.path("");
    let script = format!("import os; os.chdir({tree:?})\n{OBEDIENT}");
    let found = said(&mut [(); 2].map(|()| node.begin_program(&["python3", "-uc", &script])));
    assert_eq!(found.len(), wanted.len());
    for (found, wanted) in found.iter().zip(&wanted) {
        assert_eq!(found, wanted);
    }
    node.check();
}

#[test]
fn whoever_waits_gets_the_lock_of_a_program_that_decided_by_itself_and_is_killed() {
    let node = Node::up();
    let rounds = count("HEARTH_LOCK_KILLS", 5);
    let path = node.path("lock");
    // Locks, so that the lease comes, and then without a call to anybody.
    let holder = format!(
        "import fcntl, sys\nf = open({path:?}, 'w')\nfor i in range(20000):\n    fcntl.lockf(f, fcntl.LOCK_EX); \
         fcntl.lockf(f, fcntl.LOCK_UN)\nfcntl.lockf(f, fcntl.LOCK_EX); print('mine', flush=True); sys.stdin.read()"
    );
    let waiter = format!(
        "import fcntl, sys\nf = open({path:?}, 'w')\ntry: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB); \
         print('free', flush=True)\nexcept OSError: print('busy', flush=True)\nfcntl.lockf(f, fcntl.LOCK_EX); \
         print('got it', flush=True)"
    );
    for round in 0..rounds {
        let mut one = node.begin_program(&["python3", "-c", &holder]);
        one.expect("mine");
        let mut others = [(); 3].map(|()| node.begin_program(&["python3", "-c", &waiter]));
        others.iter_mut().for_each(|other| other.expect("busy"));
        spin(round * 104_729 % 2_000_000);
        one.kill();
        others.iter_mut().for_each(|other| other.expect("got it"));
    }
    node.check();
}

/// The end of a process is seen by its parent before SharedFS has ended its session.
#[test]
fn a_process_that_was_waited_for_holds_no_lock() {
    let node = Node::up();
    let path = node.path("lock");
    let program = format!(
        "import fcntl, os, struct\nf = open({path:?}, 'w')\n\
         wanted = lambda kind: struct.pack('hhqqi4x', kind, 0, 0, 0, 0)\n\
         for i in range(300):\n    \
             if os.fork() == 0:\n        fcntl.lockf(f, fcntl.LOCK_EX); os._exit(0)\n    \
             os.wait()\n    \
             found = struct.unpack('hhqqi4x', fcntl.fcntl(f, fcntl.F_GETLK, wanted(1)))\n    \
             assert found[0] == fcntl.F_UNLCK, (i, found)\n    \
             if i % 2 == 0: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB); fcntl.lockf(f, fcntl.LOCK_UN)\n\
         print('all free')"
    );
    assert_eq!(node.run(&["python3", "-c", &program]), "all free\n");
    node.check();
}

/// As SQLite does with the index of its WAL. The lock lease comes with the answer to the test.
#[test]
fn a_program_that_begins_with_a_test_of_a_lock_decides_its_locks_by_itself() {
    let node = Node::up();
    let path = node.path("lock");
    let program = format!(
        "import fcntl, struct, sys\nf = open({path:?}, 'w')\n\
         fcntl.fcntl(f, fcntl.F_GETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0))\n\
         print('tested', flush=True); sys.stdin.readline()\n\
         for i in range(1000):\n    fcntl.lockf(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_UN)\n\
         print('locked', flush=True); sys.stdin.read()"
    );
    let requests = || node.status()["requests"].as_u64().unwrap();
    let mut job = node.begin_program(&["python3", "-c", &program]);
    job.expect("tested");
    let before = requests();
    job.tell("go on");
    job.expect("locked");
    let made = requests() - before;
    assert!(made < 20, "{made} requests for 1000 locks");
    job.kill();
    node.check();
}

/// A child has had the open file description, too, and has ended: SharedFS decides about the locks of such a description, and
/// the close of the last descriptor ends them. The second description gets the lock lease while the first has a lock.
#[test]
fn a_description_that_a_child_had_keeps_no_lock_after_its_close() {
    let node = Node::up();
    let path = node.path("lock");
    let ways = [
        "fcntl.flock(fd, fcntl.LOCK_EX)",
        "ofd(fd, 0, 10)",
        "ofd(fd, 0, 10); other = os.open(path, os.O_RDWR); ofd(other, 20, 1); ofd(other, 30, 1)",
    ];
    for way in ways {
        let program = format!(
            "import fcntl, os, struct, sys\npath = {path:?}\n\
             def ofd(fd, start, length): \
             fcntl.fcntl(fd, 37, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, start, length, 0))\n\
             fd = os.open(path, os.O_RDWR | os.O_CREAT)\n\
             if os.fork() == 0: os.fstat(fd); os._exit(0)\n\
             os.wait(); print('waited', flush=True); sys.stdin.readline()\n\
             {way}\nos.close(fd); print('closed', flush=True); sys.stdin.read()"
        );
        let mut job = node.begin_program(&["python3", "-c", &program]);
        job.expect("waited");
        // The child's session ends when SharedFS notices the end of the child.
        until("the session of the child ends", || {
            node.status()["programs"].as_array().is_some_and(|programs| programs.len() == 1)
        });
        job.tell("go on");
        job.expect("closed");
        let other = format!(
            "import fcntl; f = open({path:?}, 'r+'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 10)\n\
             if 'other' not in {way:?}: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\nprint('free')"
        );
        assert_eq!(node.run(&["python3", "-c", &other]), "free\n", "{way}");
        job.kill();
    }
    node.check();
}
