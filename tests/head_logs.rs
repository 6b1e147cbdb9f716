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

use harness::{can_mount, until};
use prefix::Random;
use processes::{Job, count, job, say};
use rustix::process::{Pid, Signal, kill_process};
use several::alone::in_own_namespace;
use several::cluster::Chain;
use several::worker::{self, Said};
use std::fs::{File, OpenOptions, read_to_string};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const PYTHON: &str = "/usr/bin/python3";
const SYNCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/head_logs/syncs.py");
/// The test that does the jobs.
const JOBS: &str = "a_worker_says_what_it_did";
/// A lease that a busy machine does not cost anybody, and the patience with a copy, in ms.
const LONG: (u64, u64) = (4000, 2500);
/// How often a log is damaged before it is looked whether its session has ended.
const DAMAGES: u32 = 20;
/// The ring of a log begins there.
const RING_START: u64 = 4096;

#[test]
fn a_worker_says_what_it_did() {
    let Some(words) = job() else { return };
    match &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["append", folder] => append(Path::new(folder)),
        ["appended", folder, synced] => appended(Path::new(folder), synced.parse().unwrap()),
        _ => worker::job(&words),
    }
    std::process::exit(0);
}

/// Bytes of a piece that a program appends.
const PIECE_BYTES: usize = 600;
/// It makes a file with the number of so many pieces, too.
const PIECES_A_FILE: u64 = 8;

/// A program that syncs each piece and reads nothing: its own log is damaged. It ends with the first call that fails.
fn append(folder: &Path) {
    let file = File::create(folder.join("pieces")).unwrap();
    for number in 1_u64.. {
        let appended = file.write_all_at(&piece(number), (number - 1) * PIECE_BYTES as u64).and_then(|()| {
            say(&format!("did {number}"));
            if number.is_multiple_of(PIECES_A_FILE) {
                File::create(folder.join(number.to_string()))?;
                File::open(folder)?.sync_all()?;
            }
            file.sync_all()
        });
        match appended {
            Ok(()) => say(&format!("synced {number}")),
            Err(why) => return say(&format!("failed {number}: {why}")),
        }
    }
}

fn piece(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(PIECE_BYTES / 8)
}

/// All that was synced is there, and nothing is wrong behind it.
fn appended(folder: &Path, synced: u64) {
    let pieces = std::fs::read(folder.join("pieces")).unwrap();
    let there: Vec<_> = pieces.chunks(PIECE_BYTES).collect();
    let wrong = there.iter().zip(1..).find(|(found, number)| **found != piece(*number));
    assert_eq!(wrong.map(|(_, number)| number), None, "of {} pieces, {synced} of them synced", there.len());
    assert!(there.len() as u64 >= synced, "{} pieces of {synced} that were synced", there.len());
    let files = (PIECES_A_FILE..=synced).step_by(PIECES_A_FILE as usize);
    let missing: Vec<u64> = files.filter(|number| !folder.join(number.to_string()).exists()).collect();
    assert_eq!(missing, [0; 0], "files that were synced");
    say(&format!("there {}", there.len()));
}

/// Two programs at the node that leads, each in a folder of its own that is on all copies.
fn begin(chain: &Chain, head: u32, root: &str) -> [Job; 2] {
    [0, 1].map(|number| {
        let folder = chain.path_at(head, &format!("{root}-{number}"));
        assert_eq!(chain.begin_at(head, JOBS, &["make", &folder]).line().as_deref(), Some("made"));
        chain.begin_at(head, JOBS, &["append", &folder])
    })
}

/// All that they synced is at the node that leads now.
fn judge(chain: &Chain, at: u32, root: &str, said: &[Said; 2]) -> [String; 2] {
    [0, 1].map(|number| {
        let folder = format!("{root}-{number}");
        let synced = said[number].synced.to_string();
        let mut job = chain.begin_at(at, JOBS, &["appended", &chain.path_at(at, &folder), &synced]);
        let lines = job.rest();
        assert!(lines.last().is_some_and(|line| line.starts_with("there ")), "{lines:?}: {:?}", said[number]);
        chain.remove_at(at, &folder);
        format!("{} of {synced}, {:?}", lines.last().unwrap(), said[number].last)
    })
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
        [Self::Cut, Self::Emptied, Self::Overwritten, Self::HalfOverwritten][number as usize % 4]
    }

    fn begin(self, log: &Log) {
        match self {
            Self::Cut => log.file.set_len(0).unwrap(),
            Self::Emptied => {
                log.file.set_len(0).unwrap();
                log.file.set_len(log.bytes).unwrap();
            }
            Self::Overwritten => log.overwrite(0),
            Self::HalfOverwritten => log.overwrite(2048),
        }
    }
}

/// The log of a program.
struct Log {
    path: PathBuf,
    /// The file that the program has, whatever has its name later.
    file: File,
    bytes: u64,
}

impl Log {
    /// Writes other bytes over each page, from this byte of it on.
    fn overwrite(&self, from: u64) {
        let junk = vec![0xa5; 4096 - from as usize];
        // The records of the programs are near its beginning.
        let end = self.bytes.min(8 << 20);
        (RING_START..end).step_by(4096).for_each(|page| self.file.write_all_at(&junk, page + from).unwrap());
    }
}

/// The logs that these processes have mapped: one of each.
fn logs_of(pids: [u32; 2]) -> [Log; 2] {
    pids.map(|pid| {
        let maps = read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let mut paths = maps.lines().filter_map(|line| Some(Path::new(&line[line.find('/')?..])));
        let is_log = |path: &&Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("log-") && !name.ends_with("-locks")
        };
        let path = paths.find(is_log).expect("a program that syncs has a log").to_owned();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let bytes = file.metadata().unwrap().len();
        Log { path, file, bytes }
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
    let jobs = begin(chain, head, &root);
    let pids = jobs.each_ref().map(Job::pid);
    let said = chain.during(jobs, &mut Random(seed), |_, live| {
        live.until_they_go_on();
        let logs = logs_of(pids);
        until("the sessions have ended", || {
            logs.iter().for_each(|log| damage.begin(log));
            !logs.iter().any(|log| log.path.exists())
        });
    });
    println!("{damage:?}: {:?}", judge(chain, head, &root, &said));
    assert_eq!((chain.until_whole(), chain.daemon_of(head)), (head, daemon), "{damage:?}: the node went on");
    chain.until_equal();
}

/// The daemon is killed, and the logs are damaged until the next one of this node has ended their sessions.
fn damaged_over_a_restart(chain: &Chain, damage: Damage, seed: u64) {
    let root = format!("round-{seed}");
    let head = chain.until_whole();
    let jobs = begin(chain, head, &root);
    let pids = jobs.each_ref().map(Job::pid);
    let said = chain.during(jobs, &mut Random(seed), |chain, live| {
        live.until_they_go_on();
        let logs = logs_of(pids);
        let daemon = chain.daemon_of(head).and_then(Pid::from_raw).unwrap();
        kill_process(daemon, Signal::KILL).unwrap();
        until("the sessions have ended", || {
            let mut is_there = true;
            for _ in 0..DAMAGES {
                logs.iter().for_each(|log| damage.begin(log));
                is_there = logs.iter().any(|log| log.path.exists());
            }
            !is_there
        });
    });
    println!("{damage:?} over a restart: {:?}", judge(chain, head, &root, &said));
    assert_eq!(chain.until_whole(), head, "{damage:?}: the node went on");
    chain.until_equal();
}

/// The same, and the tree is truncated with them.
fn damaged_with_the_tree(chain: &Chain, damage: Damage, seed: u64) {
    let root = format!("round-{seed}");
    let head = chain.until_whole();
    let jobs = begin(chain, head, &root);
    let pids = jobs.each_ref().map(Job::pid);
    let mut next = 0;
    let said = chain.during(jobs, &mut Random(seed), |chain, live| {
        live.until_they_go_on();
        let logs = logs_of(pids);
        let pool = logs[0].path.parent().unwrap();
        logs.iter().for_each(|log| damage.begin(log));
        OpenOptions::new().write(true).open(pool.join("tree")).unwrap().set_len(0).unwrap();
        next = chain.until_leads_but(&[head]);
    });
    println!("{damage:?} with the tree: {:?}", judge(chain, next, &root, &said));
    chain.try_hearth(&["down", "--node", &head.to_string(), "--hard"]);
    std::fs::remove_dir_all(format!("{}/node-{head}/pool", chain.dir())).unwrap();
    chain.start(head);
    assert_eq!(chain.until_whole(), next, "{damage:?}");
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

#[test]
fn a_log_that_is_damaged_while_the_daemon_starts_again_keeps_what_was_acknowledged() {
    let (lease, patience) = LONG;
    let chain = Chain::on("memory", 2, lease, patience);
    for number in 0..count("HEARTH_COPIES_LOGS", 4) {
        damaged_over_a_restart(&chain, Damage::of_round(number + 1), seed(700 + number));
    }
    chain.close();
}

/// A program whose log loses the record of one file, and that syncs in this way then.
fn lose_and_sync(chain: &Chain, kinds: &[&str]) {
    let head = chain.until_whole();
    let node = head.to_string();
    let folder = chain.path_at(head, "folder");
    assert_eq!(chain.begin_at(head, JOBS, &["make", &folder]).line().as_deref(), Some("made"));
    for kind in kinds {
        let run = |program: &[&str]| chain.hearth(&[&["run", "--node", &node, "--"], program].concat());
        let synced = run(&[PYTHON, SYNCS, &folder, kind]);
        for (number, synced) in synced.lines().enumerate() {
            // The session of the program has ended: if the copy has the record, it is there.
            let there = run(&["head", "-c", "6", &format!("{folder}/{kind}-{number}-changed")]);
            assert!(synced == "False" || there == "latter", "{kind} acknowledges what is lost: {there}");
        }
        assert_eq!(synced.lines().count(), 4, "{kind}");
    }
}

#[test]
fn a_sync_of_another_file_or_of_all_does_not_succeed_after_a_record_is_lost() {
    let (lease, patience) = LONG;
    let chain = Chain::on("memory", 2, lease, patience);
    lose_and_sync(&chain, &["fsync", "syncfs", "sync"]);
    chain.close();
}

#[test]
fn an_msync_does_not_succeed_after_a_record_is_lost() {
    if !can_mount() || !in_own_namespace("an_msync_does_not_succeed_after_a_record_is_lost") {
        return;
    }
    let (lease, patience) = LONG;
    let chain = Chain::on("memory", 2, lease, patience);
    let head = chain.until_whole();
    chain.hearth(&["mount", "--node", &head.to_string()]);
    lose_and_sync(&chain, &["msync"]);
    chain.close();
}
