//! The update log of a program is damaged in the pool of the node that leads, while the program runs: truncated, emptied or
//! overwritten. The session ends, the node goes on, and all that an fsync acknowledged is there and at the copies. If the tree is
//! truncated with it, another node leads, with all that was acknowledged.
//!
//! `make prove-copies` does more rounds.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod prefix;
mod processes;
mod several;

use harness::until;
use prefix::Random;
use processes::{Job, count, job};
use several::cluster::Chain;
use several::worker;
use std::fs::{File, OpenOptions, read_to_string};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The test that does the jobs.
const JOBS: &str = "a_worker_says_what_it_did";
/// A lease that a busy machine does not cost anybody, and the patience with a copy, in ms.
const LONG: (u64, u64) = (4000, 2500);
/// The ring of a log begins there.
const RING_START: u64 = 4096;

#[test]
fn a_worker_says_what_it_did() {
    let Some(words) = job() else { return };
    worker::job(&words);
}

/// Damage to a log.
#[derive(Clone, Copy, Debug)]
enum Damage {
    /// The file has no pages any more.
    Cut,
    /// It has its length, and nothing of what it contained.
    Emptied,
    /// Other bytes stand in the place of all records.
    Overwritten,
    /// The same in the second half of each page.
    HalfOverwritten,
}

impl Damage {
    fn of_round(number: u64) -> Self {
        [Self::Cut, Self::Emptied, Self::Overwritten, Self::HalfOverwritten][(number + count("HEARTH_TEMP", 0)) as usize % 4]
    }

    /// The log may be over already.
    fn begin(self, log: &Path) {
        let Ok(file) = OpenOptions::new().write(true).open(log) else { return };
        let bytes = file.metadata().unwrap().len();
        match self {
            Self::Cut => file.set_len(0).unwrap(),
            Self::Emptied => {
                file.set_len(0).unwrap();
                file.set_len(bytes).unwrap();
            }
            Self::Overwritten => overwrite(&file, bytes, 0),
            Self::HalfOverwritten => overwrite(&file, bytes, 2048),
        }
    }
}

/// Writes other bytes over each page of a log, from this byte of it on.
fn overwrite(file: &File, bytes: u64, from: u64) {
    let junk = vec![0xa5; 4096 - from as usize];
    // Records of the workers are near its beginning.
    let end = bytes.min(8 << 20);
    (RING_START..end).step_by(4096).for_each(|page| file.write_all_at(&junk, page + from).unwrap());
}

/// The logs that these processes have mapped: one of each.
fn logs_of(pids: [u32; 2]) -> [PathBuf; 2] {
    pids.map(|pid| {
        let maps = read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let mut paths = maps.lines().filter_map(|line| Some(Path::new(&line[line.find('/')?..])));
        let is_log = |path: &&Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("log-") && !name.ends_with("-locks")
        };
        paths.find(is_log).expect("a program that syncs has a log").to_owned()
    })
}

/// The seed of a round.
fn seed(round: u64) -> u64 {
    count("HEARTH_COPIES_SEED", 1) * 1000 + round
}

/// The logs of programs that sync are damaged at the node that leads.
fn damaged(chain: &Chain, damage: Damage, seed: u64) {
    let root = format!("round-{seed}");
    let head = chain.until_whole();
    let daemon = chain.daemon_of(head);
    let jobs = chain.begin_workers(head, &root, seed);
    let pids = jobs.each_ref().map(Job::pid);
    let said = chain.during(jobs, &mut Random(seed), |_, live| {
        live.until_they_go_on();
        let logs = logs_of(pids);
        until("the sessions have ended", || {
            logs.iter().for_each(|log| damage.begin(log));
            !logs.iter().any(|log| log.exists())
        });
    });
    let found = chain.listing_at(head, &root);
    let judged = worker::judge(&found, seed, &said);
    println!("{damage:?}: {judged:?} of {:?} are there", said.each_ref().map(|said| said.synced));
    assert_eq!((chain.until_whole(), chain.daemon_of(head)), (head, daemon), "{damage:?}: the node went on");
    chain.until_equal();
    chain.remove_at(head, &root);
}

/// The same, and the tree is truncated with them.
fn damaged_with_the_tree(chain: &Chain, damage: Damage, seed: u64) {
    let root = format!("round-{seed}");
    let head = chain.until_whole();
    let jobs = chain.begin_workers(head, &root, seed);
    let pids = jobs.each_ref().map(Job::pid);
    let mut next = 0;
    let said = chain.during(jobs, &mut Random(seed), |chain, live| {
        live.until_they_go_on();
        let logs = logs_of(pids);
        let pool = logs[0].parent().unwrap();
        logs.iter().for_each(|log| damage.begin(log));
        OpenOptions::new().write(true).open(pool.join("tree")).unwrap().set_len(0).unwrap();
        next = chain.until_leads_but(&[head]);
    });
    let found = chain.listing_at(next, &root);
    let judged = worker::judge(&found, seed, &said);
    println!("{damage:?} with the tree: {judged:?} of {:?} are there", said.each_ref().map(|said| said.synced));
    chain.try_hearth(&["down", "--node", &head.to_string(), "--hard"]);
    std::fs::remove_dir_all(format!("{}/node-{head}/pool", chain.dir())).unwrap();
    chain.start(head);
    assert_eq!(chain.until_whole(), next, "{damage:?}");
    chain.remove_at(next, &root);
    chain.until_equal();
}

#[test]
fn a_log_that_is_damaged_at_the_head_keeps_what_was_acknowledged() {
    let (lease, patience) = LONG;
    let chain = Chain::on("memory", 2, lease, patience);
    for number in 0..count("HEARTH_COPIES_LOGS", 4) {
        damaged(&chain, Damage::of_round(number), seed(800 + number));
    }
    chain.close();
}

#[test]
fn logs_and_tree_of_the_head_that_are_damaged_together_cost_nothing() {
    let (lease, patience) = LONG;
    let chain = Chain::on("memory", 2, lease, patience);
    for number in 0..count("HEARTH_COPIES_LOGS", 2) {
        damaged_with_the_tree(&chain, Damage::of_round(number), seed(900 + number));
    }
    chain.close();
}
