//! Processes at the same files at once: creating in one folder, appending to one file, committing to one database,
//! stopped while another wants what they hold, and locks of one that is killed.
//!
//! `HEARTH_TOGETHER` says how many times the slice is done that stands here.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod processes;

use harness::Expect;
use processes::{Job, Node, count, job, say, spin};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The test that does the jobs.
const JOBS: &str = "appended_lines_are_whole_on_any_file_system";
/// Processes that append at once.
const APPENDERS: u64 = 8;
/// Processes that commit at once.
const WRITERS: u64 = 4;
/// Bytes of the file that a looping job overwrites at once.
const BIG_BYTES: usize = 1 << 20;
/// Rounds of stopping a process before it is given up that one was inside an operation.
const ROUNDS_MAX: u64 = 400;

fn times() -> u64 {
    count("HEARTH_TOGETHER", 1)
}

fn work(words: &[&str]) {
    match *words {
        ["create", dir, prefix, files] => create(Path::new(dir), prefix, files.parse().unwrap()),
        ["append", file, id, lines] => {
            let mut file = OpenOptions::new().append(true).create(true).open(file).unwrap();
            for number in 0..lines.parse().unwrap() {
                let line = line_of(id.parse().unwrap(), number);
                assert_eq!(file.write(line.as_bytes()).unwrap(), line.len());
            }
        }
        ["lock", file] => {
            let file = OpenOptions::new().write(true).create(true).truncate(false).open(file).unwrap();
            say(if file.try_lock().is_ok() { "free" } else { "busy" });
            file.lock().unwrap();
            say("locked");
            std::io::stdin().lines().next();
        }
        ["loop", dir, id] => Loop::new(Path::new(dir), id).run(),
        _ => panic!("no such job: {words:?}"),
    }
    say("done");
}

/// Processes that move, link and remove a few names under each other's feet: each call finds the tree before or after
/// another's, never one that an inode vanished from meanwhile.
const RACE: &str = r#"
import errno, os, random, sys
os.chdir(sys.argv[1]); random.seed(int(sys.argv[2]))
def file(a, b): os.close(os.open(a, os.O_CREAT | os.O_WRONLY))
calls = [os.rename, os.rename, os.link, file, file, lambda a, b: os.unlink(a), lambda a, b: os.rmdir(a),
         lambda a, b: os.mkdir(a), lambda a, b: os.chmod(a, 0o755), lambda a, b: os.stat(a)]
for n in range(4000):
    try: random.choice(calls)(random.choice("abcdef"), random.choice("abcdef"))
    except OSError as why:
        if why.errno == errno.ESTALE: print("ESTALE", why)
print("done")
"#;

#[test]
fn calls_by_path_under_races_are_never_stale() {
    let node = Node::up();
    let dir = node.path("");
    for round in 0..3 * times() {
        let begin = |id: u64| {
            let seed = (3 * round + id).to_string();
            node.begin_program(&["/usr/bin/python3", "-c", RACE, &dir, &seed])
        };
        for mut job in [0, 1, 2].map(begin) {
            assert_eq!(job.rest(), ["done"]);
        }
    }
    node.check();
}

fn create(dir: &Path, prefix: &str, files: u64) {
    for number in 0..files {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(dir.join(format!("{prefix}-{number}")))
            .unwrap();
        file.write_all(format!("{prefix} wrote {number}").as_bytes()).unwrap();
    }
}

/// A line whose length says whether it is whole.
fn line_of(id: u64, number: u64) -> String {
    let padding = "=".repeat((number * 37 + id * 11) as usize % 300);
    format!("{id} {number} {padding}{}\n", padding.len())
}

/// Two files that others change too: lines are appended to one, the other is overwritten whole.
struct Loop {
    lines: File,
    big: File,
    id: String,
    number: u64,
    buffer: Vec<u8>,
}

impl Loop {
    fn new(dir: &Path, id: &str) -> Self {
        let open = |name: &str| OpenOptions::new().read(true).write(true).open(dir.join(name)).unwrap();
        let lines = OpenOptions::new().read(true).append(true).open(dir.join("lines")).unwrap();
        Self { lines, big: open("big"), id: id.to_owned(), number: 0, buffer: vec![0; BIG_BYTES] }
    }

    /// Does what it is told, line by line.
    fn run(&mut self) {
        say("ready");
        for told in std::io::stdin().lock().lines() {
            let told = told.unwrap();
            match told.split_once(' ') {
                Some(("go", rounds)) => (0..rounds.parse().unwrap()).for_each(|_| self.step()),
                _ => {
                    let bytes = self.lines.metadata().unwrap().len();
                    say(&format!("sees {bytes} {}", self.look()));
                }
            }
            say("over");
        }
    }

    fn step(&mut self) {
        self.number += 1;
        let line = format!("{} {}\n", self.id, self.number);
        assert_eq!(self.lines.write(line.as_bytes()).unwrap(), line.len());
        say(&format!("did {}", self.number));
        self.buffer.fill(self.number as u8);
        assert_eq!(self.big.write_at(&self.buffer, 0).unwrap(), BIG_BYTES);
        self.look();
    }

    /// The byte of which the overwritten file consists.
    fn look(&mut self) -> u8 {
        self.big.read_exact_at(&mut self.buffer, 0).unwrap();
        assert!(self.buffer[1..] == self.buffer[..BIG_BYTES - 1], "a write is there whole or not at all");
        self.buffer[0]
    }
}

/// Where jobs work.
enum World {
    /// A node: all come through the library, or every other one through the mount.
    Node { node: Node, both_doors: bool },
    /// The kernel's own: all checks have to hold there, too.
    Plain(tempfile::TempDir),
}

impl World {
    fn library() -> Self {
        Self::Node { node: Node::up(), both_doors: false }
    }

    /// None where nothing can be mounted, which is said.
    fn both_doors() -> Option<Self> {
        if !harness::can_mount() {
            return None;
        }
        let node = Node::up();
        node.hearth(&["mount"]);
        Some(Self::Node { node, both_doors: true })
    }

    fn path(&self, name: &str) -> String {
        match self {
            Self::Node { node, .. } => node.path(name),
            Self::Plain(dir) => dir.path().join(name).to_str().unwrap().to_owned(),
        }
    }

    /// The node, if the process with this index comes through the library.
    fn node_of(&self, index: u64) -> Option<&Node> {
        match self {
            Self::Node { node, both_doors } => (!both_doors || index.is_multiple_of(2)).then_some(node),
            Self::Plain(_) => None,
        }
    }

    fn begin(&self, index: u64, words: &[&str]) -> Job {
        self.node_of(index).map_or_else(|| Job::plain(JOBS, words), |node| node.begin(JOBS, words))
    }

    /// The output of a program, which has to succeed.
    fn run(&self, index: u64, program: &[&str]) -> String {
        self.node_of(index).map_or_else(
            || harness::limited(&program[..1], &program[1..]).expect_success(),
            |node| node.run(program),
        )
    }

    /// Down, and verified.
    fn check(&self) {
        let Self::Node { node, both_doors } = self else { return };
        if *both_doors {
            node.hearth(&["umount"]);
        }
        node.check();
    }
}

fn finish(jobs: impl IntoIterator<Item = Job>) {
    for mut job in jobs {
        let said = job.rest();
        assert_eq!(said.last().map(String::as_str), Some("done"), "{said:?}");
    }
}

/// Processes that append whole lines to one file.
fn appenders(world: &World, lines: u64) {
    let file = world.path("lines");
    let begin = |id: u64| world.begin(id, &["append", &file, &id.to_string(), &lines.to_string()]);
    finish((0..APPENDERS).map(begin).collect::<Vec<_>>());
    for door in 0..2 {
        let text = world.run(door, &["cat", &file]);
        let mut next = [0; APPENDERS as usize];
        for line in text.lines() {
            let id: usize = line.split(' ').next().unwrap().parse().unwrap();
            assert_eq!(format!("{line}\n"), line_of(id as u64, next[id]), "in order, and none is torn");
            next[id] += 1;
        }
        assert_eq!(next, [lines; APPENDERS as usize], "none is missing");
    }
    world.check();
}

/// Two processes that create files in one folder.
fn creators(world: &World, files: u64) {
    let dir = world.path("folder");
    world.run(0, &["mkdir", &dir]);
    let begin = |index: u64, prefix: &str| world.begin(index, &["create", &dir, prefix, &files.to_string()]);
    finish([begin(0, "a"), begin(1, "b")]);
    let wanted: BTreeSet<String> = ["a", "b"]
        .iter()
        .flat_map(|prefix| (0..files).map(move |number| format!("{prefix}-{number}")))
        .collect();
    let told = |name: &str| name.replacen('-', " wrote ", 1);
    let expected: BTreeSet<String> = wanted.iter().map(|name| told(name)).collect();
    for door in 0..2 {
        let listed = world.run(door, &["ls", "-U", &dir]);
        assert_eq!(listed.lines().count(), wanted.len(), "each once");
        assert_eq!(listed.lines().map(str::to_owned).collect::<BTreeSet<_>>(), wanted);
        // All contents, in the order of a sorted listing.
        let script = format!("cd {dir} && for f in *; do read -r line < $f || echo $line; done");
        let contents = world.run(door, &["bash", "-ec", &script]);
        assert_eq!(contents.lines().map(str::to_owned).collect::<BTreeSet<_>>(), expected);
    }
    world.check();
}

/// Processes that commit to one database.
fn committers(world: &World, commits: u64) {
    let database = world.path("rows.db");
    world.run(0, &["sqlite3", &database, "create table t(writer, number, primary key(writer, number))"]);
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (world, database) = (&world, &database);
            scope.spawn(move || {
                let insert = |number| format!("insert into t values({writer}, {number});\n");
                let script: String = (0..commits).map(insert).collect();
                world.run(writer, &["sqlite3", "-bail", "-cmd", ".timeout 100000", database, &script]);
            });
        }
    });
    for door in 0..2 {
        let ask = "pragma integrity_check; select count(*) from t";
        assert_eq!(world.run(door, &["sqlite3", &database, ask]), format!("ok\n{}\n", WRITERS * commits));
    }
    world.check();
}

#[test]
fn appended_lines_are_whole_on_any_file_system() {
    if let Some(words) = job() {
        work(&words.iter().map(String::as_str).collect::<Vec<_>>());
        std::process::exit(0);
    }
    appenders(&World::Plain(tempfile::tempdir_in("/dev/shm").unwrap()), 20);
}

#[test]
fn eight_processes_append_to_one_file() {
    appenders(&World::library(), 100 * times());
}

#[test]
fn two_processes_create_in_one_folder() {
    creators(&World::library(), 500 * times());
}

#[test]
fn four_sqlite_processes_commit_to_one_database() {
    committers(&World::library(), 50 * times());
}

#[test]
fn processes_at_both_doors_append_to_one_file() {
    if let Some(world) = World::both_doors() {
        appenders(&world, 100 * times());
    }
}

#[test]
fn processes_at_both_doors_create_in_one_folder() {
    if let Some(world) = World::both_doors() {
        creators(&world, 500 * times());
    }
}

#[test]
fn sqlite_processes_at_both_doors_commit_to_one_database() {
    if let Some(world) = World::both_doors() {
        committers(&world, 50 * times());
    }
}

/// Number of the log of a process, which changes when it is shut out and comes back.
fn log_of(node: &Node, job: &Job) -> Option<u64> {
    let status = node.status();
    let programs = status["programs"].as_array().unwrap();
    let own = programs.iter().find(|program| program["pid"].as_u64() == Some(u64::from(job.pid())));
    own.map(|program| program["log"].as_u64().unwrap())
}

/// The output of a job until it was done with its task.
fn until_over(job: &mut Job) -> Vec<String> {
    let lines = std::iter::from_fn(|| job.line()).take_while(|line| line != "over").collect();
    assert!(job.is_running(), "it goes on: {lines:?}");
    lines
}

#[test]
fn a_stopped_process_holds_nobody_up_and_wakes_to_what_is() {
    let node = Node::up();
    node.run(&[
        "sh",
        "-ec",
        &format!("cd {} && : > lines && head -c {BIG_BYTES} /dev/zero > big", node.path("")),
    ]);
    let root = node.path("");
    let [mut one, mut two] = ["one", "two"].map(|id| node.begin(JOBS, &["loop", &root, id]));
    one.expect("ready");
    two.expect("ready");
    let (mut inside, mut outside, mut done) = (0, 0, [0, 0]);
    let mut round = 0;
    while round < 20 * times() || (inside == 0 && round < ROUNDS_MAX) {
        // More than it does until it is stopped: then it is stopped at work, not where it waits to be told.
        let steps = 64;
        let asleep = round % 4 == 3;
        let log = log_of(&node, &one);
        if asleep {
            one.tell("look");
            until_over(&mut one);
            one.stop();
        } else {
            one.tell(&format!("go {steps}"));
            for _ in 0..=round % 3 {
                one.line().unwrap();
            }
            spin(round * 104_729 % 3_000_000);
            one.stop();
        }
        // The other works on; its own checks make sure that its data stays.
        two.tell("go 3");
        until_over(&mut two);
        two.tell("look");
        let seen = until_over(&mut two);
        let last = done[1] + 3;
        assert!(seen[0].ends_with(&format!(" {}", last as u8)), "{seen:?} after {last}");
        done[1] = last;
        one.go_on();
        if asleep {
            one.tell("look");
            assert_eq!(until_over(&mut one), seen, "nothing stale, and nothing came back");
        } else {
            until_over(&mut one);
            done[0] += steps;
        }
        if log.is_some() && log_of(&node, &one) == log {
            outside += 1
        } else {
            inside += 1
        }
        check_lines(&node, done);
        round += 1;
    }
    println!("{inside} rounds in which it was shut out, {outside} in which it was not");
    assert!(inside > 0 && outside > 0, "stopped inside of an operation, and outside");
    drop((one, two));
    node.check();
}

/// Every line of both is there once and in order; those of the second, three at a time, stand together, since the
/// first was stopped meanwhile.
fn check_lines(node: &Node, done: [u64; 2]) {
    let text = node.run(&["cat", &node.path("lines")]);
    let lines: Vec<(&str, u64)> = text
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(id, number)| (id, number.parse().unwrap()))
        .collect();
    for (id, count) in ["one", "two"].iter().zip(done) {
        let numbers: Vec<u64> =
            lines.iter().filter(|(other, _)| other == id).map(|(_, number)| *number).collect();
        assert_eq!(numbers, (1..=count).collect::<Vec<_>>(), "lines of {id}");
    }
    for (at, (id, number)) in lines.iter().enumerate() {
        if *id == "two" && number % 3 == 1 {
            let group: Vec<_> = lines[at..].iter().take(3).map(|(id, _)| *id).collect();
            assert_eq!(group, ["two"; 3], "nothing of a stopped process lies between");
        }
    }
}

#[test]
fn a_lock_goes_with_its_owner_who_is_killed() {
    let node = Node::up();
    let file = node.path("lock");
    let mut owner = node.begin(JOBS, &["lock", &file]);
    owner.expect("free");
    owner.expect("locked");
    let mut next = node.begin(JOBS, &["lock", &file]);
    next.expect("busy");
    owner.kill();
    next.expect("locked");
    next.tell("that is all");
    next.expect("done");

    // Ranges, as sqlite3 locks its database.
    let database = node.path("rows.db");
    node.run(&["sqlite3", &database, "create table t(number)"]);
    let mut owner = node.begin_program(&["sqlite3", &database]);
    owner.tell("begin exclusive; insert into t values(1); select 'locked';");
    owner.expect("locked");
    let insert = "insert into t values(2); select 'in';";
    let mut next = node.begin_program(&["sqlite3", &database]);
    next.tell(&format!(".timeout 0\n{insert}\nselect 'refused';"));
    next.expect("refused");
    next.tell(&format!(".timeout 100000\n{insert}"));
    owner.kill();
    next.expect("in");
    drop(next);
    assert_eq!(node.run(&["sqlite3", &database, "select number from t"]), "2\n");
    node.check();
}
