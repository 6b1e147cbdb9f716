//! Programs and daemons killed at any instant: operations that had returned are there, in order, and nothing lies in
//! between.
//!
//! A worker does operations from a seed and prints the number of each that has returned. It is killed, or its daemon,
//! or both; then a new process lists the whole tree, and for some k the listing is that of the first k operations,
//! where k is the last number that the worker printed, or one more. A worker whose daemon alone is killed goes on to
//! its end, and sees no error. Of two workers, each with files in the other's folder, each has its own k.
//! `HEARTH_KILLS` says how often.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod prefix;
mod processes;

use prefix::{HOMES, Listing, Plan, Random, Worker, list, owner};
use processes::{Daemon, Job, Node, count, job, say, spin};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The test that does the jobs.
const JOBS: &str = "a_worker_does_what_the_oracle_says";
/// Operations of a worker that is to be killed: more than it ever does.
const OPERATIONS_MAX: u64 = 4000;
/// Operations of a worker whose daemon is killed.
const OPERATIONS: u64 = 600;
/// Operations before a kill, at most.
const KILL_MAX: u64 = 500;
/// Nanoseconds between an operation and the kill, at most.
const DELAY_MAX: u64 = 2_000_000;
/// Rounds between two checks of the pool.
const CHECKED: u64 = 10;

#[test]
fn a_worker_does_what_the_oracle_says() {
    if let Some(words) = job() {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words[..] {
            ["work", root, seed, who, pair, operations] => {
                let operations = operations.parse().unwrap();
                work(
                    Path::new(root),
                    seed.parse().unwrap(),
                    who.parse().unwrap(),
                    pair == "true",
                    operations,
                );
            }
            ["list", root] => tell_listing(Path::new(root)),
            ["turn", old, new] => turn(Path::new(old), Path::new(new)),
            _ => panic!("no such job: {words:?}"),
        }
        std::process::exit(0);
    }
    for seed in 0..20 {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut plans = [0, 1].map(|who| Plan::new(seed, who, true));
        let mut workers = [Worker::default(), Worker::default()];
        make_homes(dir.path());
        for _ in 0..200 {
            for (plan, worker) in plans.iter_mut().zip(&mut workers) {
                let operation = plan.next();
                worker
                    .play(dir.path(), &operation, plan)
                    .unwrap_or_else(|why| panic!("{operation:?}: {why}"));
            }
        }
        let found = list(dir.path()).unwrap();
        for (who, plan) in plans.iter().enumerate() {
            assert_eq!(part(&found, who), plan.tree.listing(), "seed {seed}");
        }
    }
}

/// A worker's life, until it is killed, or fails, or has done enough.
fn work(root: &Path, seed: u64, who: usize, pair: bool, operations: u64) {
    let mut plan = Plan::new(seed, who, pair);
    let mut worker = Worker::default();
    let others = root.join(Plan::count_file(HOMES[1 - who]));
    let mut seen = 0;
    while plan.number() < operations {
        let operation = plan.next();
        if let Err(why) = worker.play(root, &operation, &plan) {
            let what = if why.raw_os_error().is_some() { "failed" } else { "wrong" };
            return say(&format!("{what} {} {operation:?}: {why}", plan.number()));
        }
        say(&format!("did {}", plan.number()));
        let mut number = [0; 8];
        let looked = pair && plan.number().is_multiple_of(4);
        if looked && std::fs::File::open(&others).is_ok_and(|file| file.read_exact_at(&mut number, 0).is_ok())
        {
            let number = u64::from_le_bytes(number);
            if number < seen {
                return say(&format!(
                    "wrong {} the other's count went from {seen} to {number}",
                    plan.number()
                ));
            }
            seen = number;
            say(&format!("saw {seen}"));
        }
    }
    say("done");
}

fn tell_listing(root: &Path) {
    for (path, line) in list(root).unwrap() {
        say(&format!("{path}: {line}"));
    }
    say("listed");
}

/// Removes what a round left, and makes the next one's folders.
fn turn(old: &Path, new: &Path) {
    if old.exists() {
        std::fs::remove_dir_all(old).unwrap();
    }
    make_homes(new);
    say("turned");
}

fn make_homes(root: &Path) {
    for home in HOMES {
        std::fs::create_dir_all(root.join(home)).unwrap();
    }
}

/// The process that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Program,
    Daemon,
    Both,
}

/// The output of a worker.
#[derive(Clone, Debug, Default)]
struct Said {
    did: u64,
    saw: u64,
    last: String,
}

impl Said {
    fn take_in(&mut self, line: String) {
        match line.split_once(' ') {
            Some(("did", number)) => self.did = number.parse().unwrap(),
            Some(("saw", number)) => self.saw = number.parse().unwrap(),
            _ => {
                assert!(!line.starts_with("wrong"), "{line}, after {}", self.did);
                self.last = line;
            }
        }
    }
}

/// One worker and its end: after some number of operations, and a little later, a process is killed.
fn end_of(mut job: Job, mut random: Random, victim: Option<(Victim, &Daemon)>) -> Said {
    let (at, delay) = (random.below(KILL_MAX), random.below(DELAY_MAX));
    let mut said = Said::default();
    while said.did < at {
        let Some(line) = job.line() else { break };
        said.take_in(line);
    }
    if let Some((victim, daemon)) = victim {
        spin(delay);
        let program_first = random.below(2) == 0;
        if victim == Victim::Program || (victim == Victim::Both && program_first) {
            job.kill();
        }
        if victim != Victim::Program {
            daemon.kill();
        }
        if victim == Victim::Both && !program_first {
            job.kill();
        }
    }
    for line in job.rest() {
        // A line that was cut off by the kill cannot be: each is one write to a pipe.
        said.take_in(line);
    }
    said
}

/// The part of a listing that belongs to one worker.
fn part(listing: &Listing, who: usize) -> Listing {
    listing
        .iter()
        .filter(|(path, _)| owner(path) == who)
        .map(|(path, line)| (path.clone(), line.clone()))
        .collect()
}

fn listing_of(node: &Node, root: &str) -> Listing {
    let mut job = node.begin(JOBS, &["list", root]);
    let mut lines = job.rest();
    assert_eq!(lines.pop().as_deref(), Some("listed"), "the listing ends well: {lines:?}");
    lines
        .iter()
        .map(|line| line.split_once(": ").unwrap())
        .map(|(path, line)| (path.into(), line.into()))
        .collect()
}

/// How two listings differ.
fn differences(found: &Listing, wanted: &Listing) -> String {
    let paths: std::collections::BTreeSet<_> = found.keys().chain(wanted.keys()).collect();
    let differ = paths.into_iter().filter(|path| found.get(*path) != wanted.get(*path));
    let line = |path| format!("\n    {path}: found {:?}, wanted {:?}", found.get(path), wanted.get(path));
    differ.map(line).collect()
}

/// The oracle: after how many of its operations a worker's part of the tree is what was found.
fn judge(found: &Listing, mut plan: Plan, said: &Said, seen: u64) -> u64 {
    while plan.number() < said.did {
        plan.next();
    }
    let acknowledged = plan.tree.listing();
    let next = if said.last == "done" { None } else { Some(plan.next()) };
    let fits_next = next.is_some() && *found == plan.tree.listing();
    let exact = *found == acknowledged;
    // Where both fit, the operation changes nothing that a listing shows.
    let fits = (exact && said.did >= seen) || (fits_next && said.did < u64::MAX && said.did + 1 >= seen);
    assert!(
        fits,
        "{} returned, the other saw {seen} ({}); next was {next:?}\n  from {}:{}\n  from the next:{}",
        said.did,
        said.last,
        said.did,
        differences(found, &acknowledged),
        differences(found, &plan.tree.listing())
    );
    if exact { said.did } else { said.did + 1 }
}

/// Rounds of one kind, on one node.
fn rounds(victim: Victim, rounds: u64) {
    let node = Node::up();
    let (mut operations, mut further) = (0, 0);
    let limit = if victim == Victim::Daemon { OPERATIONS } else { OPERATIONS_MAX };
    let mut old = node.path("none");
    for number in 0..rounds {
        let seed = number * 3 + victim as u64;
        let mut random = Random(seed);
        let pair = number % 2 == 1;
        let root = node.path(&format!("round-{number}"));
        let mut turn = node.begin(JOBS, &["turn", &old, &root]);
        assert_eq!(turn.rest().pop().as_deref(), Some("turned"));
        old.clone_from(&root);
        let daemon = node.daemon();
        let begin = |who: usize| {
            node.begin(
                JOBS,
                &["work", &root, &seed.to_string(), &who.to_string(), &pair.to_string(), &limit.to_string()],
            )
        };
        let workers: Vec<Job> = (0..1 + usize::from(pair)).map(begin).collect();
        let randoms: Vec<Random> = workers.iter().map(|_| Random(random.next())).collect();
        let said: Vec<Said> = std::thread::scope(|scope| {
            let ends = workers.into_iter().zip(randoms).enumerate().map(|(who, (job, random))| {
                // One daemon is killed once.
                let victim =
                    if who == 1 && victim == Victim::Daemon { None } else { Some((victim, &daemon)) };
                scope.spawn(move || end_of(job, random, victim))
            });
            let ends: Vec<_> = ends.collect();
            ends.into_iter().map(|end| end.join().unwrap()).collect()
        });
        if victim != Victim::Program {
            daemon.wait();
            node.wait_until_up();
        }
        let found = listing_of(&node, &root);
        for (who, said_by) in said.iter().enumerate() {
            let seen = said.get(1 - who).map_or(0, |other| other.saw);
            let told = format!("{victim:?}, round {number}, worker {who}");
            let plan = Plan::new(seed, who, pair);
            let judged = std::panic::catch_unwind(|| judge(&part(&found, who), plan, said_by, seen));
            let k = judged.unwrap_or_else(|_| panic!("{told}: no prefix; {said:?}"));
            operations += k;
            further += k - said_by.did;
            let wanted = if victim == Victim::Daemon { "done" } else { "" };
            assert!(said_by.last == wanted || said_by.last == "done", "{told}: {}", said_by.last);
        }
        if number % CHECKED == CHECKED - 1 || number == rounds - 1 {
            node.check();
            assert_eq!(
                differences(&listing_of(&node, &root), &found),
                "",
                "{victim:?}, round {number}: down and up"
            );
        }
    }
    println!("{victim:?}: {rounds} kills, {operations} operations there, {further} that had not returned");
}

#[test]
fn a_program_that_is_killed_leaves_all_that_had_returned() {
    rounds(Victim::Program, count("HEARTH_KILLS", 12));
}

#[test]
fn programs_go_on_when_their_daemon_is_killed_and_nothing_that_had_returned_is_lost() {
    rounds(Victim::Daemon, count("HEARTH_KILLS", 12));
}

#[test]
fn program_and_daemon_killed_at_once_lose_nothing_that_had_returned() {
    rounds(Victim::Both, count("HEARTH_KILLS", 12) / 3);
}
