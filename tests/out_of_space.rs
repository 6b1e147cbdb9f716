//! Random calls of programs of two users and at the mount on a pool that is full: a call fails with ENOSPC only if it adds
//! blocks to a file, and then it has done nothing, or wrote a part. Programs and the daemon are killed meanwhile. At the end
//! all files are removed, and the pool is as free as it was.
//!
//! Each program has a folder of its own, so that the answers to its calls depend on it alone, while all of them use the
//! space of the pool at the same time. `HEARTH_SPACE=SEED` plays one seed, `HEARTH_PROVE=1` new seeds for ten minutes.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
#[path = "out_of_space/model.rs"]
mod model;
mod processes;
#[path = "lockstep/random.rs"]
mod random;
#[path = "out_of_space/worker.rs"]
mod worker;

use harness::{Expect, Node, limited, until};
use ipc::{Host, SystemHost};
use processes::Job;
use random::Random;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use worker::{StartProgram, Worker};

/// The seed that every run plays.
const FIXED: u64 = 1;
/// Time for new seeds, if `HEARTH_PROVE` is set.
const FRESH: Duration = Duration::from_secs(600);
/// MiB that the pool may hold.
const POOL_MIB: u64 = 32;
/// After each round all programs end, and all contents are compared. Programs are killed in every second one.
const ROUNDS: u64 = 2;
const FRESH_ROUNDS: u64 = 4;
/// Calls of a program in a round.
const CALLS: u64 = 80;
const FRESH_CALLS: u64 = 250;
/// The programs: the user, and whether it uses the library.
const PROGRAMS: [(u32, bool); 4] = [(1000, true), (1000, true), (1001, true), (0, false)];

/// Compiles the program that makes calls.
fn compiled(folder: &str) -> String {
    let program = format!("{folder}/actor");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/lockstep/actor.c");
    limited(&["cc"], &["-O1", "-w", "-o", &program, source]).expect_success();
    program
}

/// A folder of a user.
fn made(folder: &Path, user: u32) -> String {
    std::fs::create_dir_all(folder).unwrap();
    rustix::fs::chown(folder, Some(rustix::fs::Uid::from_raw(user)), Some(rustix::fs::Gid::from_raw(user)))
        .unwrap();
    folder.to_str().unwrap().to_owned()
}

/// The status of the node.
fn status(node: &Node) -> serde_json::Value {
    let answers: serde_json::Value =
        serde_json::from_slice(&node.hearth(&["status", "--json"]).stdout).unwrap();
    answers[0].clone()
}

/// No session was ended by force, and nothing was lost.
fn assert_status(node: &Node) {
    let status = status(node);
    for list in ["forced_ends", "losses"] {
        assert_eq!(status[list], serde_json::json!([]), "{list} of {status}");
    }
}

/// Starts programs of a folder on the node.
fn start_on(node: &Node, actor: &str, folder: &str, by_library: bool) -> StartProgram {
    let (actor, folder) = (actor.to_owned(), folder.to_owned());
    let (hearth, dir) = (node.program(), node.dir().to_owned());
    Box::new(move || {
        let mut command = Command::new(if by_library { &hearth } else { &actor });
        if by_library {
            command.args(["run", "--dir", &dir, "--", &actor]);
        }
        command.arg(&folder);
        Job::of(command)
    })
}

/// All workers at the same time make calls; the daemon is killed in the middle.
fn round(node: &Node, workers: &mut [Worker], calls: u64, kills: bool) {
    let counted = AtomicU64::new(0);
    // Held while a program starts, or the daemon is away.
    let starts = Mutex::new(());
    let starts = &starts;
    let all = calls * workers.len() as u64;
    std::thread::scope(|scope| {
        for worker in workers.iter_mut() {
            let count = || {
                counted.fetch_add(1, Ordering::Relaxed);
            };
            let thread = std::thread::Builder::new().name(worker.name.clone());
            thread
                .spawn_scoped(scope, move || {
                    worker.fill();
                    worker.go_on(calls, kills.then_some(starts), count);
                })
                .unwrap();
        }
        if kills {
            until("half of the calls are made", || counted.load(Ordering::Relaxed) > all / 2);
            assert_status(node);
            let _none_starts = starts.lock().unwrap();
            node.kill_daemon();
            node.hearth(&["start"]).expect_success();
        }
    });
}

/// Plays a seed: rounds of so many calls.
fn play(seed: u64, rounds: u64, calls: u64) {
    let node = Node::of_mib(POOL_MIB);
    let before = status(&node)["blocks_available"].clone();
    node.hearth(&["mount"]).expect_success();
    std::fs::set_permissions(node.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let actor = compiled(node.dir());
    let mut random = Random::new(seed);
    let folders: Vec<String> = PROGRAMS
        .iter()
        .enumerate()
        .map(|(number, (user, _))| made(Path::new(&node.path(&number.to_string())), *user))
        .collect();
    let mut workers: Vec<Worker> = Vec::new();
    for (number, (user, by_library)) in PROGRAMS.into_iter().enumerate() {
        let start = start_on(&node, &actor, &folders[number], by_library);
        let door = if by_library { "library" } else { "mount" };
        let name = format!("seed {seed}, program {number} of user {user} by the {door}");
        workers.push(Worker::new(
            name,
            ((user > 0).then_some(user), by_library),
            random.below(u64::MAX),
            start,
        ));
    }
    for number in 0..rounds {
        round(&node, &mut workers, calls, number % 2 == 1);
        workers.iter_mut().for_each(|worker| worker.end(random.one_in(2)));
        node.hearth(&["umount"]).expect_success();
        until("all programs have ended", || status(&node)["programs"] == serde_json::json!([]));
        node.hearth(&["mount"]).expect_success();
        workers.iter_mut().for_each(Worker::compare);
        assert_status(&node);
    }
    let refused: Vec<u64> = workers.iter().map(|worker| worker.refused).collect();
    println!("seed {seed}: ENOSPC or a short write {refused:?} times");
    assert!(refused.iter().all(|refused| *refused > 0), "the pool was full: {refused:?}");
    workers.iter_mut().for_each(Worker::remove_all);
    drop(workers);
    node.hearth(&["umount"]).expect_success();
    until("all programs have ended", || status(&node)["programs"] == serde_json::json!([]));
    assert_eq!(status(&node)["blocks_available"], before);
    assert_status(&node);
    node.hearth(&["down"]).expect_success();
    let pool = format!("{}/node-1/pool", node.dir());
    let checked = limited(&[&node.program(), "check", "--json"], &[&pool]).expect_success();
    let checked: serde_json::Value = serde_json::from_str(&checked).unwrap();
    assert_eq!((&checked["data_blocks"], &checked["findings"]), (&0.into(), &serde_json::json!([])));
}

#[test]
fn on_a_full_pool_only_calls_that_add_blocks_fail() {
    if !harness::can_mount() {
        return;
    }
    match std::env::var("HEARTH_SPACE") {
        Ok(seed) => play(seed.parse().unwrap(), FRESH_ROUNDS, FRESH_CALLS),
        Err(_) => play(FIXED, ROUNDS, CALLS),
    }
    if std::env::var_os("HEARTH_PROVE").is_some() {
        let mut bytes = [0; 4];
        std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
        let first = u64::from(u32::from_le_bytes(bytes));
        let until = SystemHost.now().after(FRESH);
        (first..)
            .take_while(|_| SystemHost.now() < until)
            .for_each(|seed| play(seed, FRESH_ROUNDS, FRESH_CALLS));
    }
}
