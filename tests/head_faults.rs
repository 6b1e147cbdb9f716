//! A node that leads, or is to lead, and cannot: its medium fails under its daemon or does not answer, a file of its pool is cut, replaced
//! or damaged. Another node in sync leads, programs go on there with all that was synced, and `hearth status` tells what
//! failed at which node. A node that has the only copy keeps it, says so, and asks the manager for nothing.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod prefix;
mod processes;
mod several;

use harness::{Expect, limited, until};
use ipc::{Host, SystemHost};
use prefix::Random;
use processes::{Job, job, say};
use rustix::process::Signal;
use several::alone::{give_own_disk, in_own_namespace};
use several::cluster::Chain;
use several::worker;
use std::fs::{OpenOptions, read_to_string};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The test that does the jobs.
const JOBS: &str = "a_worker_says_what_it_did";
/// A lease that a busy machine does not cost anybody, and the patience with a copy, in ms.
const LONG: (u64, u64) = (4000, 2500);
/// A lease that does not end within a test.
const VERY_LONG: u64 = 120_000;
/// A disk with room for a pool and two of its trees.
const DISK_MIB: u64 = 300;

#[test]
fn a_worker_says_what_it_did() {
    let Some(words) = job() else { return };
    match &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // Adds a line to a file in the tree, synced, and says its number; then does nothing.
        ["serve", path] => {
            let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
            writeln!(file, "{}", std::process::id()).unwrap();
            file.sync_all().unwrap();
            say(&std::process::id().to_string());
            // Until the writing end is closed.
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            std::process::exit(0);
        }
        _ => worker::job(&words),
    }
}

/// A fault of the pool of a node.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The device takes nothing: each sync of a file fails.
    Device,
    /// The device does not answer: no sync of a file returns.
    Hung,
    /// A file of the pool has no pages any more.
    Cut(&'static str),
    /// Another file has the place of a file of the pool.
    Replaced(&'static str),
    /// All nodes of the tree are damaged, and a daemon has to read them: the one before it dies.
    Damaged,
}

/// The maps and nodes of the tree begin here.
const NODES_FROM: u64 = 12 << 10;

fn pool(chain: &Chain, node: u32, file: &str) -> PathBuf {
    PathBuf::from(format!("{}/node-{node}/pool/{file}", chain.dir()))
}

/// A node leads.
fn lead(chain: &Chain, node: u32) {
    if chain.until_whole() != node {
        chain.hearth(&["move", "--to", &node.to_string()]);
    }
    assert_eq!(chain.until_whole(), node);
}

impl Fault {
    fn begin(self, chain: &Chain, node: u32) {
        match self {
            Self::Device => chain.set_device(node, "fails"),
            Self::Hung => chain.set_device(node, "hangs"),
            Self::Cut(file) => {
                OpenOptions::new().write(true).open(pool(chain, node, file)).unwrap().set_len(0).unwrap();
            }
            Self::Replaced(file) => {
                let other = pool(chain, node, "other");
                std::fs::copy(pool(chain, node, file), &other).unwrap();
                std::fs::rename(other, pool(chain, node, file)).unwrap();
            }
            Self::Damaged => {
                // It would write its next commit to other nodes.
                let daemon = chain.stop_process(&format!("node-{node}/serve.pid"));
                let tree = OpenOptions::new().write(true).open(pool(chain, node, "tree")).unwrap();
                let end = tree.metadata().unwrap().len();
                // The rest has no blocks.
                let end = end.min(NODES_FROM + (16 << 20));
                let junk = vec![0xa5; 4096];
                (NODES_FROM..end).step_by(4096).for_each(|at| tree.write_all_at(&junk, at).unwrap());
                daemon.kill();
            }
        }
    }

    /// It is over, and the node is started, if it does not run.
    fn mend(self, chain: &Chain, node: u32) {
        match self {
            Self::Device | Self::Hung => chain.mend_device(node),
            // The pool is of no use.
            Self::Cut(_) | Self::Damaged | Self::Replaced(_) => {
                chain.try_hearth(&["down", "--node", &node.to_string(), "--hard"]);
                std::fs::remove_dir_all(pool(chain, node, "")).unwrap();
            }
        }
        chain.start(node);
    }

    /// A part of what is said of the node's failure.
    fn says(self) -> &'static str {
        match self {
            Self::Device => "os error 5",
            Self::Hung => "has not answered for",
            Self::Cut(file) | Self::Replaced(file) => file,
            Self::Damaged => "area",
        }
    }
}

/// A program that serves where a node leads; its parent's words go into a file.
fn standby(chain: &Chain, node: u32) -> Job {
    chain.begin_standby(node, JOBS, &["serve", &chain.path_at(node, "served")], &said(chain, node))
}

fn said(chain: &Chain, node: u32) -> PathBuf {
    PathBuf::from(format!("{}/said-{node}", chain.dir()))
}

/// The number of the program's process, once it has begun.
fn begun(job: &mut Job) -> u32 {
    job.until_begun();
    job.line().unwrap().parse().unwrap()
}

/// The node that leads fails while programs work there and sync; another one of so many leads then.
fn fails(chain: &Chain, head: u32, fault: Fault, seed: u64) {
    let root = format!("round-{seed}");
    lead(chain, head);
    let mut first = standby(chain, head);
    let one = begun(&mut first);
    let jobs = chain.begin_workers(head, &root, seed);
    let mut next = 0;
    let said_by = chain.during(jobs, &mut Random(seed), |chain, live| {
        live.until_they_go_on();
        fault.begin(chain, head);
        next = chain.until_leads_but(&[head]);
        assert!(SystemHost.started(one).is_none(), "{fault:?}: it ran while node {next} led");
    });
    // A pool with an equal file in the place of the other one is a copy again soon.
    let may_be_copy = matches!(fault, Fault::Replaced(_));
    assert!(may_be_copy || !chain.in_sync(next).contains(&head.into()), "{fault:?}");
    until("the status says what failed", || chain.failure(head).contains(fault.says()));
    // Programs go on there.
    let mut second = standby(chain, next);
    begun(&mut second);
    let served =
        chain.hearth(&["run", "--node", &next.to_string(), "--", "cat", &chain.path_at(next, "served")]);
    assert!(served.lines().any(|line| line == one.to_string()), "{fault:?}: {served}");
    let found = chain.listing_at(next, &root);
    let judged = worker::judge(&found, seed, &said_by);
    println!("{fault:?}: node {next} leads with {judged:?}");
    until("the program's parent waits", || {
        let said = read_to_string(said(chain, head)).unwrap();
        said.contains("the program was killed") || said.contains("the program has ended")
    });
    fault.mend(chain, head);
    // It has the tree, and the other one leads still.
    assert_eq!(chain.until_whole(), next, "{fault:?}");
    drop((first, second));
    ["served", &root].iter().for_each(|name| chain.remove_at(next, name));
    chain.until_equal();
}

#[test]
fn a_head_whose_medium_fails_gives_the_lead_to_a_copy() {
    let (lease, patience) = LONG;
    let chain = Chain::on("memory", 2, lease, patience);
    for (number, fault) in
        [Fault::Cut("tree"), Fault::Replaced("ledger"), Fault::Damaged].into_iter().enumerate()
    {
        fails(&chain, 1 + number as u32 % 2, fault, 500 + number as u64);
    }
    chain.close();
}

#[test]
fn a_head_whose_device_fails_gives_the_lead_to_a_copy() {
    let (lease, patience) = LONG;
    let chain = Chain::on("file", 3, lease, patience);
    chain.give_device(1);
    fails(&chain, 1, Fault::Device, 600);
    chain.close();
}

#[test]
fn a_head_whose_device_does_not_answer_gives_the_lead_to_a_copy() {
    let (lease, patience) = LONG;
    let chain = Chain::on("file", 2, lease, patience);
    chain.set("disk_seconds", 2);
    chain.give_device(1);
    fails(&chain, 1, Fault::Hung, 650);
    chain.close();
}

/// A full disk is no failure: writes that need new space fail, and the node leads on.
#[test]
fn a_head_whose_disk_is_full_leads_on() {
    if !in_own_namespace("a_head_whose_disk_is_full_leads_on") {
        return;
    }
    let (lease, patience) = LONG;
    let chain = Chain::on("memory", 2, lease, patience);
    chain.end(1);
    give_own_disk(&format!("{}/node-1/pool", chain.dir()), DISK_MIB);
    chain.all_back();
    lead(&chain, 1);
    let full = pool(&chain, 1, "full");
    let fill = format!("dd if=/dev/zero of={} bs=4096 2>/dev/null || true", full.display());
    limited(&["sh", "-c"], &[&fill]).expect_success();
    let run = |script: &str| chain.hearth(&["run", "--node", "1", "--", "sh", "-c", script]);
    let [kept, poured] = ["kept", "poured"].map(|name| chain.path_at(1, name));
    run(&format!("echo kept > {kept}; sync {kept}"));
    let pour = format!("dd if=/dev/zero of={poured} bs=65536 conv=fsync");
    assert_eq!(run(&format!("LC_ALL=C {pour} 2>&1 | grep -c 'No space left'")).trim(), "1");
    assert_eq!((chain.leader(), chain.failure(1).trim()), (Some(1), ""));
    run(&format!("mv {kept} {kept}-moved; mv {kept}-moved {kept}; sync {kept}; rm {poured}"));
    std::fs::remove_file(full).unwrap();
    until("there is space again", || run(&format!("echo more >> {kept} && echo done")).contains("done"));
    assert_eq!(chain.until_whole(), 1);
    chain.until_equal();
    chain.close();
}

/// A parent that does not go on cannot end its program: no other node leads before the time until which it may let the program run.
#[test]
fn a_head_that_fails_waits_for_a_standby_program_until_its_promise_ends() {
    let (lease, patience) = LONG;
    let chain = Chain::on("file", 2, lease, patience);
    chain.give_device(1);
    lead(&chain, 1);
    let mut first = standby(&chain, 1);
    begun(&mut first);
    let promised = || chain.statuses()[0]["chain"]["valid_until_ns"].as_u64().unwrap_or_default();
    let mut before = promised();
    first.signal(Signal::STOP);
    Fault::Device.begin(&chain, 1);
    let mut write = 0;
    until("its daemon has failed", || {
        let leads = chain.role(1) == "leads";
        before = if leads { promised().max(before) } else { before };
        let file = chain.path_at(1, &format!("file-{write}"));
        write += 1;
        let make = format!("echo more > {file}; sync {file}");
        chain.try_hearth(&["run", "--node", "1", "--wait", "0", "--", "sh", "-c", &make]);
        chain.failure(1).contains(Fault::Device.says()) || chain.leader() == Some(2)
    });
    assert_eq!(chain.until_leads_but(&[1]), 2);
    let led: serde_json::Value = chain.statuses()[1]["chain"]["take_over"]["at_ns"].clone();
    let since_ns = SystemHost.wall() - led.as_i64().unwrap();
    let led_at = SystemHost.now().as_ns().saturating_sub(since_ns.unsigned_abs());
    // Both clocks are read one after the other.
    assert!(led_at + 50_000_000 >= before, "node 2 led {} ms before that", (before - led_at) / 1_000_000);
    drop(first);
    Fault::Device.mend(&chain, 1);
    assert_eq!(chain.until_whole(), 2);
    chain.until_equal();
    chain.close();
}

/// The parent of a standby program ends it when it reads that the node has failed, and the node waits for no more than that.
#[test]
fn a_head_that_fails_leaves_before_its_promise_ends_if_no_standby_program_runs() {
    let chain = Chain::on("file", 2, VERY_LONG, LONG.1);
    chain.give_device(1);
    lead(&chain, 1);
    let mut first = standby(&chain, 1);
    let one = begun(&mut first);
    let promised = || chain.statuses()[0]["chain"]["valid_until_ns"].as_u64().unwrap();
    let (mut before, mut write) = (promised(), 0);
    Fault::Device.begin(&chain, 1);
    until("its daemon has failed", || {
        before = promised().max(before);
        let file = chain.path_at(1, &format!("file-{write}"));
        write += 1;
        let make = format!("echo more > {file}; sync {file}");
        chain.try_hearth(&["run", "--node", "1", "--wait", "0", "--", "sh", "-c", &make]);
        chain.failure(1).contains(Fault::Device.says()) || chain.leader() == Some(2)
    });
    assert_eq!(chain.until_leads_but(&[1]), 2);
    assert!(SystemHost.started(one).is_none(), "it ran while node 2 led");
    assert!(SystemHost.now().as_ns() < before, "node 2 did not lead before node 1 had promised");
    drop(first);
    Fault::Device.mend(&chain, 1);
    assert_eq!(chain.until_whole(), 2);
    chain.until_equal();
    chain.close();
}

/// A node that is to lead cannot write: the next one in sync leads.
#[test]
fn a_node_that_cannot_begin_to_lead_leaves_it_to_the_next() {
    let (lease, patience) = LONG;
    let chain = Chain::on("file", 3, lease, patience);
    (1..=2).for_each(|node| chain.give_device(node));
    lead(&chain, 1);
    let file = chain.path_at(1, "file");
    chain.run(&["sh", "-c", &format!("echo kept > {file}; sync {file}")]);
    chain.until_equal();
    Fault::Device.begin(&chain, 2);
    chain.cut(1);
    assert_eq!(chain.until_leads_but(&[1]), 3);
    until("the status says what failed", || chain.failure(2).contains(Fault::Device.says()));
    assert_eq!(chain.in_sync(3), [3]);
    let there = chain.path_at(3, "file");
    assert_eq!(chain.hearth(&["run", "--node", "3", "--", "cat", &there]), "kept\n");
    Fault::Device.mend(&chain, 2);
    chain.start(1);
    assert_eq!(chain.until_whole(), 3);
    chain.until_equal();
    chain.close();
}

/// Number of the changes that the daemon of a node has proposed to the manager.
fn proposals(chain: &Chain, node: u32) -> usize {
    let log = read_to_string(Path::new(chain.dir()).join(format!("node-{node}/serve.log"))).unwrap();
    log.lines().filter(|line| line.contains("proposed")).count()
}

/// The node that leads has the only copy when its device fails.
#[test]
fn a_head_that_fails_alone_keeps_its_copy_and_says_so() {
    let (lease, patience) = LONG;
    let chain = Chain::on("file", 2, lease, patience);
    chain.give_device(1);
    lead(&chain, 1);
    let file = chain.path_at(1, "file");
    chain.cut(2);
    // No view comes after that, which node 1 could not note in its pool.
    until("node 2 is expelled", || chain.statuses()[0]["chain"]["copies"][0]["member"] == false);
    assert_eq!(chain.in_sync(1), [1]);
    chain.run(&["sh", "-c", &format!("echo kept > {file}; sync {file}")]);
    Fault::Device.begin(&chain, 1);
    let write = format!("echo more > {file}.more; sync {file}.more");
    until("its daemon has failed", || {
        chain.try_hearth(&["run", "--node", "1", "--wait", "0", "--", "sh", "-c", &write]);
        chain.failure(1).contains(Fault::Device.says())
    });
    until("the status says what to do", || chain.waits(1).contains("hearth start --node 1"));
    assert_eq!(chain.leader(), None);
    let (before, mut looks) = (proposals(&chain, 1), 0);
    until("it was looked at often", || {
        looks += 1;
        let status = chain.try_hearth(&["status"]);
        assert_eq!(status.status.code(), Some(1));
        let said = String::from_utf8_lossy(&status.stdout).into_owned();
        assert!(said.contains("no other node has all acknowledged data"), "{said}");
        looks == 20
    });
    assert_eq!(proposals(&chain, 1), before);
    chain.start(2);
    until("node 2 follows", || chain.role(2) == "follows" && chain.in_sync(2) == [1]);
    until("the status says what failed", || chain.failure(1).contains(Fault::Device.says()));
    assert_eq!(chain.leader(), None);
    // As it says.
    chain.try_hearth(&["down", "--node", "1"]);
    Fault::Device.mend(&chain, 1);
    assert_eq!(chain.until_whole(), 1);
    assert_eq!(chain.run(&["cat", &file]), "kept\n");
    chain.until_equal();
    chain.close();
}
