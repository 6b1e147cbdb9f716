//! A copy in trouble while programs go on at the node that leads: its disk is full, its medium fails, its daemon is slow. No
//! call of a program fails, `hearth status` says how it is, the copy is in sync again when it can be, and then it takes over
//! with all that was synced; while it is not in sync it never leads.
//!
//! `make prove-copies` does more rounds of each.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod prefix;
mod processes;
mod several;

use harness::{Expect, limited, until};
use ipc::{Host, SystemHost};
use prefix::Random;
use processes::{Job, count, job};
use several::alone::{give_own_disk, in_own_namespace};
use several::cluster::Chain;
use several::pour::Pouring;
use several::worker;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The test that does the jobs.
const JOBS: &str = "a_worker_says_what_it_did";
/// A lease that a busy machine does not cost anybody, in ms.
const LONG: u64 = 4000;
/// The lease of full rounds, and the patience with a copy: those of a new cluster.
const DEFAULTS: (u64, u64) = (1000, 250);
/// A disk with room for a pool and two of its trees.
const DISK_MIB: u64 = 300;
/// So soon a fault is told, in full rounds.
const TOLD: Duration = Duration::from_secs(2);

#[test]
fn a_worker_says_what_it_did() {
    let Some(words) = job() else { return };
    worker::job(&words);
}

/// A fault of a copy.
trait Fault {
    /// It happens to the copy at a node. How often a member had left or come back then.
    fn begin(&mut self, chain: &Chain, copy: u32) -> usize;

    /// It is over, and the node goes on by itself or is started.
    fn mend(&mut self, chain: &Chain, copy: u32);

    /// The copy keeps its place in the set in sync meanwhile.
    fn stays(&self) -> bool {
        false
    }

    /// The copy is slow, and programs wait for it until it is none.
    fn slows(&self) -> bool {
        false
    }

    /// A part of what is said of the node's failure meanwhile.
    fn says(&self) -> &'static str {
        ""
    }
}

/// Rounds of faults on one cluster.
struct Rounds<'a> {
    what: &'a str,
    chain: Chain,
    is_full: bool,
    patience: Duration,
}

impl Rounds<'_> {
    /// A cluster of two with the settings of so many rounds.
    fn of<'a>(what: &'a str, rounds: u64, medium: &str) -> Rounds<'a> {
        let is_full = rounds > 4;
        let (lease, patience) = if is_full { DEFAULTS } else { (LONG, LONG * 5 / 8) };
        let chain = Chain::on(medium, 2, lease, patience);
        Rounds { what, chain, is_full, patience: Duration::from_millis(patience) }
    }

    /// One round.
    fn round(&self, number: u64, fault: &mut dyn Fault) {
        let (chain, what) = (&self.chain, self.what);
        let seed = count("HEARTH_COPIES_SEED", 1) * 1000 + 300 + number;
        let (root, file) = (format!("round-{number}"), format!("poured-{number}"));
        let leader = chain.until_whole();
        let copy = 3 - leader;
        let jobs = chain.begin_workers(leader, &root, seed);
        let (mut told, mut pouring) = (Duration::ZERO, None);
        let said = chain.during(jobs, &mut Random(seed), |chain, live| {
            live.until_they_go_on();
            let before = fault.begin(chain, copy);
            let begun = SystemHost.now();
            // Its log is a new one, which grows.
            pouring = Some(Pouring::begin(chain, leader, &file));
            // One that finds a remedy by itself is back soon.
            let has_left = || chain.changes_in_sync() > before;
            let is_out = || has_left() || !chain.in_sync(leader).contains(&copy.into());
            until("the status says how it is", || is_out() || fault.slows() && chain.lacks(leader, copy));
            told = SystemHost.now().since(begun);
            until("the copy is none", || is_out() || fault.stays());
            until("the node says what it has", || chain.failure(copy).contains(fault.says()));
            if fault.slows() && !fault.stays() {
                // The copy may be in sync again before that, and then programs wait for it again.
                let (before, back) = (live.synced(), || chain.in_sync(leader).contains(&copy.into()));
                until("programs go on without the copy", || live.are_beyond(before) || back());
            } else {
                live.until_they_go_on();
            }
            if number % 2 == 1 {
                return self.leader_dies_meanwhile(leader, copy, fault);
            }
            fault.mend(chain, copy);
            assert_eq!(chain.until_whole(), leader, "{what}, round {number}");
            // No call failed before, or they would not.
            live.until_they_go_on();
            chain.cut(leader);
        });
        let poured = pouring.unwrap().end();
        let at = if number % 2 == 1 && !fault.stays() { leader } else { copy };
        assert_eq!(chain.until_leads_but(&[3 - at]), at, "{what}, round {number}");
        let found = chain.listing_at(at, &root);
        let judged = worker::judge(&found, seed, &said);
        poured.check(chain, at);
        chain.all_back();
        chain.compare(&[(&root, &found)]);
        [root, file].iter().for_each(|name| chain.remove_at(chain.until_whole(), name));
        let stall = said[0].stall.max(said[1].stall);
        println!(
            "{what}, round {number}: told after {told:?}, the longest wait {stall:?}; {judged:?} and {} passes there",
            poured.synced
        );
        // Until a copy is given up, or until one that comes back has the last of what it gets.
        let is_short = fault.slows() || stall <= self.patience * 2;
        assert!(!self.is_full || told <= TOLD && is_short, "{what}, round {number}: {told:?}, {stall:?}");
    }

    /// The node that leads dies meanwhile. A copy that is not in sync lacks what was synced since, and never leads.
    fn leader_dies_meanwhile(&self, leader: u32, copy: u32, fault: &mut dyn Fault) {
        let chain = &self.chain;
        chain.cut(leader);
        if fault.stays() {
            assert_eq!(chain.until_leads_but(&[leader]), copy);
            return fault.mend(chain, copy);
        }
        fault.mend(chain, copy);
        until("the copy waits for the node that led", || {
            chain.role(copy) == "follows" && chain.waits(copy).contains(&format!("node {leader}"))
        });
        assert_eq!(chain.leader(), None);
        chain.start(leader);
        assert_eq!(chain.until_whole(), leader);
    }
}

/// A full disk: that of the pool alone, or of all that the node has.
struct FullDisk {
    /// The file that fills it.
    full: PathBuf,
    is_of_node: bool,
}

impl Fault for FullDisk {
    fn begin(&mut self, chain: &Chain, copy: u32) -> usize {
        let folder = if self.is_of_node { "" } else { "pool/" };
        self.full = PathBuf::from(format!("{}/node-{copy}/{folder}full", chain.dir()));
        let fill = format!("dd if=/dev/zero of={} bs=4096 2>/dev/null || true", self.full.display());
        let before = chain.changes_in_sync();
        limited(&["sh", "-c"], &[&fill]).expect_success();
        before
    }

    fn mend(&mut self, chain: &Chain, copy: u32) {
        std::fs::remove_file(&self.full).unwrap();
        // Its keeper may have given up.
        chain.start(copy);
    }

    fn says(&self) -> &'static str {
        "no space"
    }
}

#[test]
fn a_copy_whose_disk_is_full_costs_the_copy_only() {
    let rounds = count("HEARTH_TROUBLE_DISKS", 2);
    if rounds == 0 || !in_own_namespace("a_copy_whose_disk_is_full_costs_the_copy_only") {
        return;
    }
    for is_of_node in [false, true] {
        let what = if is_of_node { "disk of a node full" } else { "disk of a pool full" };
        let all = Rounds::of(what, rounds, "memory");
        for node in [1, 2] {
            all.chain.end(node);
            let folder = if is_of_node { "" } else { "/pool" };
            give_own_disk(&format!("{}/node-{node}{folder}", all.chain.dir()), DISK_MIB);
            all.chain.all_back();
        }
        for number in 0..rounds.div_ceil(2) {
            // The longer part of `make test` is once.
            let number = if rounds > 2 { number } else { number + u64::from(is_of_node) };
            all.round(number, &mut FullDisk { full: PathBuf::new(), is_of_node });
        }
        all.chain.close();
    }
}

/// A daemon that gets its processor for a part of the time.
struct Slow {
    /// Stops and continues it.
    job: Option<Job>,
    off_ms: u64,
    on_ms: u64,
    stays: bool,
}

/// Lets the daemon that a pid file names stand, and go on, each for so long. No process is started meanwhile.
const STOP_AND_GO: &str = "exec 9<> <(:)
    while read pid rest < $0; do
        kill -STOP $pid; read -t $1 -u 9; kill -CONT $pid; read -t $2 -u 9
    done 2> /dev/null";

impl Fault for Slow {
    fn begin(&mut self, chain: &Chain, copy: u32) -> usize {
        let pid_file = format!("{}/node-{copy}/serve.pid", chain.dir());
        let mut command = Command::new("bash");
        command.args(["-c", STOP_AND_GO, &pid_file]);
        command.args([self.off_ms, self.on_ms].map(|ms| format!("{}.{:03}", ms / 1000, ms % 1000)));
        self.job = Some(Job::of(command));
        chain.changes_in_sync()
    }

    fn mend(&mut self, chain: &Chain, copy: u32) {
        self.job = None;
        chain.process(&format!("node-{copy}/serve.pid")).go_on();
    }

    fn stays(&self) -> bool {
        self.stays
    }

    fn slows(&self) -> bool {
        true
    }
}

/// A copy that is ten times as slow is waited for, because it gets on; one that is a hundred times as slow is not, once it lacked
/// more than `lag_bytes` for `lag_seconds`.
#[test]
fn a_slow_copy_is_waited_for_as_long_as_it_gets_on() {
    let rounds = count("HEARTH_TROUBLE_SLOW", 2);
    if rounds == 0 {
        return;
    }
    let all = Rounds::of("slow", rounds, "memory");
    for (key, value) in [("lag_bytes", 1 << 20), ("lag_seconds", 1)] {
        all.chain.set(key, value);
    }
    for number in 0..rounds {
        let stays = if rounds > 2 { number / 2 % 2 == 1 } else { number == 1 };
        // Never silent for longer than the patience.
        let (off_ms, on_ms) = match (stays, all.is_full) {
            (true, _) => (45, 5),
            (false, true) => (180, 2),
            (false, false) => (400, 4),
        };
        all.round(number, &mut Slow { job: None, off_ms, on_ms, stays });
    }
    all.chain.close();
}

/// A medium that fails under the daemon of a copy.
enum Failing {
    /// The pool's folder is removed.
    Removed,
    /// Files of the pool have no pages any more: those whose names begin so.
    Cut(&'static str),
    /// The device takes nothing: each sync of a file fails.
    Device(Device),
}

/// A library that makes each sync fail while a file is there.
struct Device {
    library: String,
    fails: String,
}

const DEVICE: &str = "
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
static int go(long call, int fd) {
    const char *fails = getenv(\"HEARTH_TEST_FAILS\");
    if (fails && access(fails, F_OK) == 0) { errno = EIO; return -1; }
    return syscall(call, fd);
}
int fsync(int fd) { return go(SYS_fsync, fd); }
int fdatasync(int fd) { return go(SYS_fdatasync, fd); }
";

impl Device {
    /// A unique one: daemons of earlier rounds may live.
    fn new(chain: &Chain, number: u64) -> Self {
        let [source, library, fails] =
            ["c", "so", "fails"].map(|end| format!("{}/device-{number}.{end}", chain.dir()));
        std::fs::write(&source, DEVICE).unwrap();
        limited(&["cc", "-shared", "-fPIC", "-o", &library], &[&source]).expect_success();
        Self { library, fails }
    }
}

impl Fault for Failing {
    fn begin(&mut self, chain: &Chain, copy: u32) -> usize {
        let pool = format!("{}/node-{copy}/pool", chain.dir());
        let mut before = chain.changes_in_sync();
        match self {
            Self::Removed => until("the pool is gone", || {
                std::fs::remove_dir_all(&pool).is_ok() || !PathBuf::from(&pool).exists()
            }),
            Self::Cut(name) => {
                let files = std::fs::read_dir(&pool).unwrap().map(|file| file.unwrap().path());
                let is_one = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with(*name);
                for path in files.filter(is_one) {
                    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap();
                }
            }
            Self::Device(device) => {
                chain.end(copy);
                let variables =
                    [format!("LD_PRELOAD={}", device.library), format!("HEARTH_TEST_FAILS={}", device.fails)];
                let program = ["env", &variables[0], &variables[1], env!("CARGO_BIN_EXE_hearth"), "start"];
                limited(&program, &["--dir", chain.dir(), "--node", &copy.to_string()]).expect_success();
                chain.until_whole();
                before = chain.changes_in_sync();
                std::fs::write(&device.fails, "").unwrap();
            }
        }
        before
    }

    fn mend(&mut self, chain: &Chain, copy: u32) {
        match self {
            Self::Removed => {}
            // The rest is of no use.
            Self::Cut(_) => {
                let number = copy.to_string();
                chain.try_hearth(&["down", "--node", &number, "--hard"]);
                std::fs::remove_dir_all(format!("{}/node-{copy}/pool", chain.dir())).unwrap();
            }
            Self::Device(device) => std::fs::remove_file(&device.fails).unwrap(),
        }
        chain.start(copy);
    }

    fn says(&self) -> &'static str {
        match self {
            // It gets what it lacks meanwhile.
            Self::Removed | Self::Cut("log-") => "",
            Self::Cut(name) => name,
            Self::Device(_) => "os error 5",
        }
    }
}

#[test]
fn a_copy_whose_medium_fails_costs_the_copy_only() {
    let rounds = count("HEARTH_TROUBLE_MEDIA", 3);
    let in_memory = rounds - rounds / 3;
    if rounds == 0 {
        return;
    }
    let all = Rounds::of("medium in memory", rounds, "memory");
    for number in 0..in_memory {
        let mut failing = match (number % 2, number / 2 % 4) {
            (0, 0) => Failing::Removed,
            (0, 1) => Failing::Cut("log-"),
            (_, kind) => Failing::Cut(if kind % 2 == 0 { "tree" } else { "ledger" }),
        };
        all.round(number, &mut failing);
    }
    all.chain.close();
    let all = Rounds::of("device", rounds, "file");
    for number in in_memory..rounds {
        all.round(number, &mut Failing::Device(Device::new(&all.chain, number)));
    }
    all.chain.close();
}

/// No program writes: only the copy itself can find that.
#[test]
fn a_copy_whose_pool_is_removed_while_nothing_happens_is_none() {
    let chain = Chain::up(2, LONG);
    let leader = chain.until_whole();
    let copy = 3 - leader;
    let before = chain.changes_in_sync();
    std::fs::remove_dir_all(format!("{}/node-{copy}/pool", chain.dir())).unwrap();
    until("the copy left", || chain.changes_in_sync() > before);
    assert_eq!(chain.until_whole(), leader);
    chain.close();
}
