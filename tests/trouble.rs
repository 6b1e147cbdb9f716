//! Clusters of two nodes in trouble: a node killed in the middle of a planned move, a node that comes back with another
//! pool, a manager that is away. Synced data is there, and the node that may lead does.
//!
//! `make prove-copies` does more rounds of the tests that have rounds.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod prefix;
mod processes;
mod several;

use harness::{Expect, limited, until};
use ipc::{Host, SystemHost, Word};
use prefix::{Listing, Random};
use processes::{Job, count, job, spin};
use several::cluster::Chain;
use several::worker;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The test that does the jobs.
const JOBS: &str = "a_worker_says_what_it_did";
/// A lease that a busy machine does not cost anybody, in ms.
const LONG: u64 = 4000;

#[test]
fn a_worker_says_what_it_did() {
    let Some(words) = job() else { return };
    worker::job(&words);
}

/// Workers do something at the node that leads, and are killed; returns the listing then.
fn some_work(chain: &Chain, leader: u32, root: &str, seed: u64) -> Listing {
    let jobs = chain.begin_workers(leader, root, seed);
    let said = chain.during(jobs, &mut Random(seed), |_, _| ());
    let found = chain.listing_at(leader, root);
    worker::judge(&found, seed, &said);
    // All that a listing reads was digested, and is at every copy.
    found
}

/// The process that is killed in the middle of a move.
#[derive(Clone, Copy, Debug)]
enum Victim {
    /// All of the node that leads.
    Leader,
    /// All of the node that is to lead.
    Next,
    LeadersDaemon,
    NextsDaemon,
}

/// So many instants of a move are tried, one after the other.
const INSTANTS: u64 = 16;

#[test]
fn a_node_that_is_killed_in_the_middle_of_a_move_costs_nothing() {
    let rounds = count("HEARTH_TROUBLE_MOVES", 2);
    if rounds == 0 {
        return;
    }
    let chain = Chain::up(2, LONG);
    let mut leader = chain.until_whole();
    let move_to = |to: u32| {
        let mut command = Command::new("timeout");
        command.args(["60", env!("CARGO_BIN_EXE_hearth"), "move", "--dir", chain.dir(), "--to"]);
        command.arg(to.to_string());
        Job::of(command)
    };
    let begin = SystemHost.now();
    assert!(move_to(3 - leader).wait().success());
    let whole = SystemHost.now().since(begin).as_nanos() as u64;
    leader = chain.until_leads_but(&[leader]);
    let (mut made, mut victims) = (0, [0; 4]);
    for number in 0..rounds {
        let seed = count("HEARTH_COPIES_SEED", 1) * 1000 + number;
        let root = format!("round-{number}");
        let found = some_work(&chain, leader, &root, seed);
        let next = 3 - leader;
        let order = [Victim::Leader, Victim::LeadersDaemon, Victim::Next, Victim::NextsDaemon];
        let which = (number % 4) as usize;
        victims[which] += 1;
        let daemons = [leader, next].map(|node| chain.daemon_of(node).unwrap());
        let mut moved = move_to(next);
        spin(whole * (number * 5 % INSTANTS) / INSTANTS + Random(seed).below(whole / INSTANTS));
        match order[which] {
            Victim::Leader => chain.cut(leader),
            Victim::Next => chain.cut(next),
            Victim::LeadersDaemon => harness::kill(daemons[0]),
            Victim::NextsDaemon => harness::kill(daemons[1]),
        }
        made += u64::from(moved.wait().success());
        let at = chain.all_back();
        let there = chain.listing_at(at, &root);
        assert_eq!(worker::differences(&there, &found), "", "{:?} killed in a move", order[which]);
        leader = chain.compare(&[(&root, &found)]);
        // The cluster goes on.
        some_work(&chain, leader, &format!("more-{number}"), seed + 1);
    }
    chain.close();
    println!("moves: {rounds} rounds, killed {victims:?}, {made} moves were made all the same");
}

/// The content of the pool that a node finds in the place of its own.
#[derive(Clone, Copy, Debug)]
enum Other {
    Nothing,
    /// Its own of an earlier life.
    Older,
    /// The other node's.
    Foreign,
}

/// Copies a pool. Files may go meanwhile, if its daemon runs: then it is copied again.
fn copy(from: &Path, to: &Path) {
    until("the pool stays as it is while it is copied", || {
        let _ = std::fs::remove_dir_all(to);
        limited(&["cp", "-a"], &[from.to_str().unwrap(), to.to_str().unwrap()]).status.success()
    });
}

/// The node that leads is killed, and is back within its lease, as the same node with another pool.
#[test]
fn a_node_that_comes_back_with_another_pool_never_leads_with_it_and_gets_the_tree() {
    let chain = Chain::up(2, LONG);
    let mut leader = chain.until_whole();
    let pool = |node: u32| PathBuf::from(format!("{}/node-{node}/pool", chain.dir()));
    let aside = PathBuf::from(format!("{}/aside", chain.dir()));
    let kinds = [Other::Nothing, Other::Older, Other::Foreign];
    for number in 0..count("HEARTH_TROUBLE_POOLS", 1) {
        let pool_then = kinds[(number % 3) as usize];
        let next = 3 - leader;
        if matches!(pool_then, Other::Older) {
            chain.end(leader);
            copy(&pool(leader), &aside);
            leader = chain.all_back();
            assert_eq!(leader, next);
            chain.end(next);
            leader = chain.all_back();
        }
        let (root, next) = (format!("round-{number}"), 3 - leader);
        let found = some_work(&chain, leader, &root, 700 + number);
        chain.cut(leader);
        match pool_then {
            Other::Nothing => std::fs::remove_dir_all(pool(leader)).unwrap(),
            Other::Older => copy(&aside, &pool(leader)),
            Other::Foreign => copy(&pool(next), &pool(leader)),
        }
        if matches!(pool_then, Other::Foreign) {
            let number = leader.to_string();
            let refused = chain.try_hearth(&["start", "--node", &number]);
            refused.expect_failure(&format!("belongs to node {next}, so node {number} does not start"));
            std::fs::remove_dir_all(pool(leader)).unwrap();
        }
        chain.start(leader);
        assert_eq!(chain.until_leads_but(&[leader]), next, "{pool_then:?}");
        assert_eq!(worker::differences(&chain.listing_at(next, &root), &found), "", "{pool_then:?}");
        assert_eq!(chain.until_whole(), next, "{pool_then:?}");
        let was = leader;
        leader = chain.compare(&[(&root, &found)]);
        println!("{pool_then:?}: node {was} got the tree");
    }
    chain.close();
}

/// Workers go on while the manager is away for a moment, and go on after it was away for a lease, or more.
#[test]
fn a_manager_that_is_away_costs_time_and_nothing_else() {
    let chain = Chain::up(2, LONG);
    let leader = chain.until_whole();
    let jobs = chain.begin_workers(leader, "work", 900);
    let said = chain.during(jobs, &mut Random(900), |chain, live| {
        let before = chain.changes_in_sync();
        let named = || std::fs::read_to_string(format!("{}/manager.pid", chain.dir())).unwrap_or_default();
        let (manager, first) = (chain.process("manager.pid"), named());
        manager.kill();
        manager.wait();
        until("its keeper starts another one", || named().split(' ').count() > 1 && named() != first);
        live.until_they_go_on();
        assert_eq!(chain.until_whole(), leader, "killed for a moment");
        assert_eq!(chain.changes_in_sync(), before, "a member left");
        let daemons = [1, 2].map(|node| chain.daemon_of(node));
        let manager = chain.stop_process("manager.pid");
        until("no node leads without the manager", || chain.leader().is_none());
        until("each node says for what it waits", || {
            [1, 2].iter().all(|node| chain.waits(*node).contains("the cluster"))
        });
        // One lease has passed.
        let more = (count("HEARTH_TROUBLE_LEASES", 1) - 1) * LONG;
        let then = SystemHost.now().after(Duration::from_millis(more));
        SystemHost.wait(&Word::new(0), 0, Some(then));
        assert_eq!(chain.leader(), None, "no node leads without the manager");
        manager.go_on();
        let leads = chain.until_whole();
        println!(
            "daemons {daemons:?}, then {:?}; node {leads} leads",
            [1, 2].map(|node| chain.daemon_of(node))
        );
        if leads == leader {
            live.until_they_go_on();
        }
    });
    let at = chain.until_whole();
    let found = chain.listing_at(at, "work");
    worker::judge(&found, 900, &said);
    chain.compare(&[("work", &found)]);
    chain.close();
}
