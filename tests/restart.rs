//! The daemon dies, and its keeper starts another: programs that run go on, with what they had open and locked, and
//! nothing that had returned is lost or done twice. `HEARTH_RESTARTS_EACH` says how often a daemon is killed under each
//! of them.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod processes;

use processes::{Job, Node, count, job, say, spin};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, Read, Seek, SeekFrom, Write};
use std::path::Path;

/// The test that does the jobs.
const JOBS: &str = "what_is_asked_of_hearth_holds_on_the_kernels_own";
/// Processes that commit at once.
const WRITERS: u64 = 4;

fn kills() -> u64 {
    count("HEARTH_RESTARTS_EACH", 5)
}

fn work(words: &[&str]) {
    match *words {
        ["obey", dir] => Obedient::new(Path::new(dir)).run(),
        ["lines", file, lines] => lines_to(Path::new(file), lines.parse().unwrap()),
        _ => panic!("no such job: {words:?}"),
    }
}

/// Appends lines, each with one write and an fsync now and then; makes a file and renames it between.
fn lines_to(file: &Path, lines: u64) {
    let mut log = OpenOptions::new().append(true).create(true).open(file).unwrap();
    for number in 0..lines {
        let line = format!("line {number}\n");
        assert_eq!(log.write(line.as_bytes()).unwrap(), line.len());
        if number % 8 == 0 {
            log.sync_all().unwrap();
        }
        let (new, old) = (file.with_extension("new"), file.with_extension("old"));
        fs::write(&new, &line).unwrap();
        fs::rename(&new, &old).unwrap();
        assert_eq!(fs::read_to_string(&old).unwrap(), line);
        say(&format!("did {number}"));
    }
    say("done");
}

/// A program that has things open and does what it is told.
struct Obedient {
    nameless: File,
    log: File,
    lock: File,
}

impl Obedient {
    fn new(dir: &Path) -> Self {
        let open = |name: &str| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(dir.join(name))
                .unwrap()
        };
        let mut nameless = open("nameless");
        fs::remove_file(dir.join("nameless")).unwrap();
        nameless.write_all(b"before\n").unwrap();
        let log = OpenOptions::new().append(true).create(true).open(dir.join("log")).unwrap();
        Self { nameless, log, lock: open("lock") }
    }

    fn run(&mut self) {
        say("ready");
        for told in std::io::stdin().lock().lines() {
            match told.unwrap().as_str() {
                "lock" => self.lock.lock().unwrap(),
                "try" => say(if self.lock.try_lock().is_ok() { "free" } else { "busy" }),
                "unlock" => self.lock.unlock().unwrap(),
                "more" => self.nameless.write_all(b"more\n").unwrap(),
                "look" => {
                    let mut text = String::new();
                    self.nameless.seek(SeekFrom::Start(0)).unwrap();
                    self.nameless.read_to_string(&mut text).unwrap();
                    say(&text.replace('\n', " "));
                }
                line => self.log.write_all(format!("{line}\n").as_bytes()).unwrap(),
            }
            say("over");
        }
    }
}

/// One that runs, and has open what it has open: each makes its nameless file under the same name.
fn obedient(node: &Node) -> Job {
    let mut job = node.begin(JOBS, &["obey", &node.path("")]);
    job.expect("ready");
    job
}

/// Sends a job a line; returns its output.
fn ask(job: &mut Job, what: &str) -> Vec<String> {
    job.tell(what);
    let lines = std::iter::from_fn(|| job.line()).take_while(|line| line != "over").collect();
    assert!(job.is_running(), "it goes on: {lines:?}");
    lines
}

/// The daemon dies; the next one serves before this ends.
fn kill_daemon(node: &Node) {
    let daemon = node.daemon();
    daemon.kill();
    daemon.wait();
    node.wait_until_up();
}

#[test]
fn what_is_asked_of_hearth_holds_on_the_kernels_own() {
    if let Some(words) = job() {
        work(&words.iter().map(String::as_str).collect::<Vec<_>>());
        std::process::exit(0);
    }
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = dir.path().join("lines");
    let mut lines = Job::plain(JOBS, &["lines", file.to_str().unwrap(), "20"]);
    assert_eq!(lines.rest().last().map(String::as_str), Some("done"));
    let mut job = Job::plain(JOBS, &["obey", dir.path().to_str().unwrap()]);
    job.expect("ready");
    ask(&mut job, "more");
    assert_eq!(ask(&mut job, "look"), ["before more "]);
    assert_eq!(ask(&mut job, "try"), ["free"]);
}

#[test]
fn a_program_goes_on_when_its_daemon_dies_again_and_again() {
    let node = Node::up();
    let (file, lines) = (node.path("lines"), 400 * kills());
    let mut job = node.begin(JOBS, &["lines", &file, &lines.to_string()]);
    for round in 0..kills() {
        for _ in 0..20 {
            job.line().unwrap();
        }
        spin(round * 104_729 % 3_000_000);
        kill_daemon(&node);
    }
    assert_eq!(job.rest().last().map(String::as_str), Some("done"));
    let wanted: String = (0..lines).map(|number| format!("line {number}\n")).collect();
    assert!(node.run(&["cat", &file]) == wanted, "every line once and in order");
    assert_eq!(node.status()["restarts"].as_u64(), Some(kills()));
    node.check();
}

#[test]
fn what_a_program_has_open_and_locked_stays_so_over_a_restart() {
    let node = Node::up();
    let [mut one, mut two] = [(); 2].map(|()| obedient(&node));
    ask(&mut one, "lock");
    for round in 0..kills() {
        kill_daemon(&node);
        if round % 2 == 0 {
            // Whichever comes back first.
            assert_eq!(ask(&mut two, "try"), ["busy"]);
        }
        ask(&mut one, "more");
        assert_eq!(ask(&mut one, "look"), [format!("before {}", "more ".repeat(round as usize + 1))]);
        assert_eq!(ask(&mut two, "try"), ["busy"]);
    }
    one.kill();
    ask(&mut two, "lock");
    kill_daemon(&node);
    assert_eq!(ask(&mut two, "look"), ["before "]);
    drop((one, two));
    node.check();
}

#[test]
fn a_program_that_is_stopped_meanwhile_delays_nobody_and_keeps_its_lock() {
    let node = Node::up();
    let [mut one, mut two] = [(); 2].map(|()| obedient(&node));
    ask(&mut one, "lock");
    let mut wanted = String::new();
    for round in 0..kills() {
        ask(&mut one, &format!("one {round}"));
        one.stop();
        kill_daemon(&node);
        assert_eq!(ask(&mut two, "try"), ["busy"]);
        ask(&mut two, &format!("two {round}"));
        if round % 2 == 1 {
            kill_daemon(&node);
        }
        one.go_on();
        ask(&mut one, &format!("one again {round}"));
        assert_eq!(ask(&mut one, "look"), ["before "]);
        wanted += &format!("one {round}\ntwo {round}\none again {round}\n");
    }
    assert_eq!(node.run(&["cat", &node.path("log")]), wanted);
    // A process that dies while it is stopped, and that no daemon knows any more, keeps nothing.
    one.stop();
    kill_daemon(&node);
    one.kill();
    ask(&mut two, "lock");
    drop((one, two));
    node.check();
}

/// A lock that the program took by itself, under a lock lease: no daemon was told of it, and the program makes no call when
/// the daemon dies.
#[test]
fn a_lock_that_no_daemon_was_told_of_stays_whatever_dies_but_its_program() {
    let node = Node::up();
    let [mut one, mut two] = [(); 2].map(|()| obedient(&node));
    for round in 0..kills() {
        // The first lock brings the lease, unless two took turns a moment ago: then a later one does.
        for _ in 0..100 {
            assert_eq!(ask(&mut one, "try"), ["free"]);
            ask(&mut one, "unlock");
            spin(2_000_000);
        }
        assert_eq!(ask(&mut one, "try"), ["free"]);
        let stopped = round % 2 == 0;
        if stopped {
            one.stop();
        }
        kill_daemon(&node);
        assert_eq!(ask(&mut two, "try"), ["busy"], "round {round}");
        if round % 3 == 0 {
            kill_daemon(&node);
            assert_eq!(ask(&mut two, "try"), ["busy"], "round {round}, from the register");
        }
        if stopped {
            one.go_on();
        }
        ask(&mut one, "unlock");
        assert_eq!(ask(&mut two, "try"), ["free"], "round {round}");
        ask(&mut two, "unlock");
    }
    drop((one, two));
    node.check();
}

#[test]
fn a_program_goes_on_when_keeper_and_daemon_were_killed() {
    let node = Node::up();
    let mut job = obedient(&node);
    ask(&mut job, "lock");
    for round in 0..kills() {
        let (keeper, daemon) = (node.keeper(), node.daemon());
        keeper.kill();
        keeper.wait();
        daemon.kill();
        daemon.wait();
        job.tell(&format!("line {round}"));
        node.hearth(&["start"]);
        job.expect("over");
        ask(&mut job, "more");
    }
    assert_eq!(ask(&mut job, "look"), [format!("before {}", "more ".repeat(kills() as usize))]);
    let wanted: String = (0..kills()).map(|round| format!("line {round}\n")).collect();
    assert_eq!(node.run(&["cat", &node.path("log")]), wanted);
    drop(job);
    node.check();
}

/// It has no session when the daemon is killed, and a program that gives up sees a folder of the kernel's or an error for good. A
/// program without inherited files gives up after a while, which shows that the time is over.
#[test]
fn a_program_that_begins_while_no_daemon_is_there_goes_on_with_its_inherited_files() {
    const SCRIPT: &str = "cd $HEARTH_TREE; echo kept > file; exec 5< file
        (echo ready; read line; exec sh -c 'cat file; cat <&5; echo made > other; pwd'); true";
    let node = Node::up();
    let mut job = node.begin_program(&["sh", "-c", SCRIPT]);
    job.expect("ready");
    let (keeper, daemon) = (node.keeper(), node.daemon());
    keeper.kill();
    keeper.wait();
    daemon.kill();
    daemon.wait();
    job.tell("go");
    let others_give_up = || {
        for _ in 0..2 {
            assert_eq!(node.try_hearth(&["run", "--", "cat", &node.path("file")]).status.code(), Some(1));
        }
    };
    others_give_up();
    assert!(!job.says_something(), "it waits");
    node.hearth(&["start"]);
    assert_eq!(job.rest(), ["kept", "kept", &node.path("")[..node.path("").len() - 1]]);
    assert_eq!(node.run(&["cat", &node.path("other")]), "made\n");
    // No daemon is to come.
    let script = "cd $HEARTH_TREE; (echo ready; read line; exec cat file || true); echo over";
    let mut job = node.begin_program(&["sh", "-c", script]);
    job.expect("ready");
    node.hearth(&["down"]);
    job.tell("go");
    others_give_up();
    node.hearth(&["up"]);
    assert_eq!(job.rest(), ["over"]);
}

#[test]
fn four_sqlite_processes_commit_while_the_daemon_dies() {
    let node = Node::up();
    let commits = 50 * kills();
    let database = node.path("rows.db");
    node.run(&["sqlite3", &database, "create table t(writer, number, primary key(writer, number))"]);
    // In files: an argument has 128 KiB at most.
    let scripts = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (node, database, scripts) = (&node, &database, scripts.path());
                scope.spawn(move || {
                    let insert = |number| format!("insert into t values({writer}, {number});\n");
                    let script = scripts.join(format!("{writer}.sql"));
                    fs::write(&script, (0..commits).map(insert).collect::<String>()).unwrap();
                    let read = format!(".read {}", script.display());
                    node.run(&["sqlite3", "-bail", "-cmd", ".timeout 100000", database, &read]);
                })
            })
            .collect();
        let mut killed = 0;
        while killed < kills() && !writers.iter().all(|writer| writer.is_finished()) {
            spin(20_000_000);
            kill_daemon(&node);
            killed += 1;
        }
        println!("{killed} daemons killed under the writers");
    });
    let answer = node.run(&["sqlite3", &database, "pragma integrity_check; select count(*) from t"]);
    assert_eq!(answer, format!("ok\n{}\n", WRITERS * commits));
    node.check();
}

#[test]
fn a_mount_goes_on_when_the_daemon_dies() {
    if !Path::new("/dev/fuse").exists() || !rustix::process::geteuid().is_root() {
        println!("skipped: needs root and /dev/fuse");
        return;
    }
    let node = Node::up();
    node.hearth(&["mount"]);
    let file = node.path("lines");
    let mut log = OpenOptions::new().append(true).create(true).open(&file).unwrap();
    let mut wanted = String::new();
    for round in 0..kills() {
        let line = format!("line {round}\n");
        log.write_all(line.as_bytes()).unwrap();
        kill_daemon(&node);
        log.write_all(line.as_bytes()).unwrap();
        wanted += &line;
        wanted += &line;
        assert_eq!(fs::read_to_string(&file).unwrap(), wanted);
    }
    drop(log);
    assert_eq!(node.run(&["cat", &file]), wanted);
    node.hearth(&["umount"]);
    node.check();
}
