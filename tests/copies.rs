//! Nodes of a cluster killed at any instant, in any order, under mixed operations: synced data is there, the rest is a
//! prefix closed under what each program had seen, and all trees are equal when the nodes are back.
//!
//! Two workers do operations from a seed, and print which they did and synced, and which they saw of each other. The
//! counts of each kind are variables; `make prove-copies` has the full ones.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod prefix;
mod processes;
mod several;

use ipc::{Host, SystemHost, Word};
use prefix::Random;
use processes::{count, job};
use several::cluster::Chain;
use several::database::{self, Database};
use several::worker::{self, Said};
use std::time::Duration;

/// The test that does the jobs.
const JOBS: &str = "a_worker_says_what_it_did";
/// A lease that a busy machine does not cost anybody, in ms.
const LONG: u64 = 4000;
/// The lease of full rounds.
const SHORT: u64 = 300;

#[test]
fn a_worker_says_what_it_did() {
    let Some(words) = job() else { return worker::the_oracle_refuses_what_is_lost() };
    worker::job(&words);
}

fn pause(milliseconds: u64) {
    let until = SystemHost.now().after(Duration::from_millis(milliseconds));
    SystemHost.wait(&Word::new(0), 0, Some(until));
}

/// The lease of a run of so many rounds: short only where a person wanted many.
fn lease(rounds: u64) -> u64 {
    if rounds > 10 { SHORT } else { LONG }
}

/// The fault of the nodes in a round, from the node that leads on; all are started again in the end.
type Fault = fn(&Chain, u32, &mut Random);

/// Rounds in which workers at the node that leads are ended by a fault, and others go on at the node that leads then. A round
/// in which the machine was so busy that this one was taken for dead as well shows no progress, and is done again.
fn rounds(what: &str, nodes: u32, rounds: u64, fault: Fault) {
    if rounds == 0 {
        return;
    }
    let chain = Chain::up(nodes, lease(rounds));
    let (mut there, mut beyond, mut leader) = (0, 0, chain.until_whole());
    let (mut counted, mut number) = (0, 0);
    while counted < rounds {
        let seed = count("HEARTH_COPIES_SEED", 1) * 1000 + number;
        let mut random = Random(seed);
        let root = format!("round-{number}");
        let jobs = chain.begin_workers(leader, &root, seed);
        let said = chain.during(jobs, &mut random.clone(), |chain, _| chain.cut(leader));
        random.next();
        fault(&chain, leader, &mut random);
        let more = format!("more-{number}");
        let (at, said_more) = go_on(&chain, &more, seed, &mut random);
        let [found, found_more] = [&root, &more].map(|root| chain.listing_at(at, root));
        let judged = worker::judge(&found, seed, &said);
        there += judged.iter().sum::<u64>();
        beyond += judged.iter().zip(&said).map(|(judged, said)| judged - said.synced).sum::<u64>();
        worker::judge(&found_more, seed, &said_more);
        leader = chain.compare(&[(&root, &found), (&more, &found_more)]);
        // The pools hold what a few rounds write.
        [&root, &more].iter().for_each(|root| chain.remove_at(leader, root));
        let goes_on = said_more.iter().all(|said| said.last.is_empty());
        if count("HEARTH_COPIES_TOLD", 0) != 0 {
            let synced = said_more.each_ref().map(|said| said.synced);
            println!(
                "{what}, {nodes} nodes, round {number}: {judged:?} there, then {synced:?}, goes on: {goes_on}"
            );
        }
        counted += u64::from(goes_on);
        number += 1;
        assert!(number <= counted + rounds / 10 + 2, "{what}: programs do not go on: {said_more:?}");
    }
    chain.close();
    println!("{what}, {nodes} nodes: {rounds} rounds, {there} operations there, {beyond} of them not synced");
}

/// Workers go on, at the node that leads already if there is one, and beyond the return of all others. Gives the node that
/// leads then, and what they said; they were ended by a kill, or by a call that failed.
fn go_on(chain: &Chain, root: &str, seed: u64, random: &mut Random) -> (u32, [Said; 2]) {
    let mut at = chain.leader().unwrap_or_else(|| chain.all_back());
    let begun = at;
    let jobs = chain.begin_workers(at, root, seed);
    let said = chain.during(jobs, random, |chain, live| {
        at = chain.all_back();
        if at == begun {
            live.until_they_go_on_or_fail();
        }
    });
    (at, said)
}

/// Another node leads before the first is back.
fn taken_over(chain: &Chain, leader: u32, _: &mut Random) {
    chain.until_leads_but(&[leader]);
}

#[test]
fn the_node_that_leads_is_killed_and_nothing_that_was_synced_is_lost() {
    rounds("head killed", 2, count("HEARTH_COPIES_HEADS", 1), taken_over);
}

/// Each journal mode of SQLite that survives a power cut.
const MODES: [&str; 4] = ["delete", "wal", "truncate", "persist"];

#[test]
fn databases_go_on_at_the_next_node_with_all_that_they_committed() {
    let rounds = count("HEARTH_COPIES_DATABASES", 1);
    if rounds == 0 {
        return;
    }
    // Programs that go on are ended by no lease that a busy machine let pass.
    let chain = Chain::for_databases(if rounds > 10 { 1000 } else { LONG });
    let (mut leader, mut commits) = (chain.until_whole(), 0);
    for number in 0..rounds {
        let mut random = Random(count("HEARTH_COPIES_SEED", 1) * 1000 + 900 + number);
        let mode = |at: u64| Database::Sqlite(MODES[((number * 2 + at) % 4) as usize]);
        let databases = [mode(0), mode(1), Database::Rocks];
        let root = format!("databases-{number}");
        let (committed, leads) =
            database::round(&chain, leader, &root, &databases, random.below(200_000_000));
        chain.remove_at(leads, &root);
        (leader, commits) = (leads, commits + committed);
        if count("HEARTH_COPIES_TOLD", 0) != 0 {
            println!("databases, round {number}: {committed} commits of {databases:?}, node {leader} leads");
        }
    }
    chain.close();
    println!("databases: {rounds} rounds, {commits} commits acknowledged and there");
}

/// The node that took over is killed while the first one joins again.
fn donor_killed(chain: &Chain, leader: u32, random: &mut Random) {
    let donor = chain.until_leads_but(&[leader]);
    chain.start(leader);
    pause(random.below(400));
    chain.cut(donor);
}

/// The node that takes over is killed while it does.
fn successor_killed(chain: &Chain, leader: u32, random: &mut Random) {
    pause(random.below(700));
    let successor = if leader == 1 { 2 } else { 1 };
    chain.cut(successor);
}

/// A copy is killed while the first node joins again.
fn copy_killed(chain: &Chain, leader: u32, random: &mut Random) {
    let now = chain.until_leads_but(&[leader]);
    chain.start(leader);
    pause(random.below(400));
    if let Some(copy) = (1..=3).find(|number| ![leader, now].contains(number)) {
        chain.cut(copy);
    }
}

#[test]
fn two_faults_at_once_lose_nothing_that_was_synced() {
    let wanted = count("HEARTH_COPIES_DOUBLES", 1);
    rounds("donor killed during a join", 2, wanted, donor_killed);
    let wanted = if wanted > 1 { wanted } else { 0 };
    rounds("donor killed during a join", 3, wanted, donor_killed);
    rounds("new head killed during take-over", 2, wanted, successor_killed);
    rounds("new head killed during take-over", 3, wanted, successor_killed);
    rounds("copy killed while the head returns", 3, wanted, copy_killed);
}

/// The disturbances that programs may notice, in rounds in which they go on.
struct Bounds {
    /// The lease and the patience, in ms.
    times: [u64; 2],
    /// Nothing that a program calls takes longer, where it is judged.
    stall: Option<Duration>,
    /// No member leaves the set in sync.
    stays: bool,
}

/// How often a round is done again in which something took too long.
const AGAIN: u64 = 2;

/// Rounds in which programs go on: something happens to another process than they and their daemon's node.
fn undisturbed(what: &str, rounds: u64, bounds: &Bounds, fault: fn(&Chain, u32, u64)) {
    if rounds == 0 {
        return;
    }
    let chain = Chain::patient(2, bounds.times[0], bounds.times[1]);
    let leader = chain.until_whole();
    let (mut stalls, mut number, mut again) = (Vec::new(), 0, 0);
    while (stalls.len() as u64) < rounds {
        let seed = count("HEARTH_COPIES_SEED", 1) * 1000 + 500 + number;
        let root = format!("round-{number}");
        let jobs = chain.begin_workers(leader, &root, seed);
        let said = chain.during(jobs, &mut Random(seed), |chain, live| {
            let before = chain.changes_in_sync();
            fault(chain, leader, number);
            live.until_they_go_on();
            assert_eq!(chain.until_whole(), leader, "{what}: the same node leads");
            live.until_they_go_on();
            assert_eq!(chain.until_equal(), leader, "{what}: the same node leads");
            if bounds.stays {
                assert_eq!(chain.changes_in_sync(), before, "{what}, round {number}: a member left");
            }
        });
        for Said { last, .. } in &said {
            assert_eq!(last, "", "{what}, round {number}");
        }
        worker::judge(&chain.listing_at(leader, &root), seed, &said);
        // A copy that joins again has room for what it had and for what it gets.
        chain.remove_at(leader, &root);
        let stall = said[0].stall.max(said[1].stall);
        if count("HEARTH_COPIES_TOLD", 0) != 0 {
            println!("{what}, round {number}: {} and {} synced, {stall:?}", said[0].synced, said[1].synced);
        }
        number += 1;
        if bounds.stall.is_some_and(|bound| stall > bound) {
            again += 1;
            assert!(again <= AGAIN, "{what}: a program waited for {stall:?}");
        } else {
            again = 0;
            stalls.push(stall);
        }
    }
    chain.close();
    stalls.sort();
    let (median, worst) = (stalls[stalls.len() / 2], stalls[stalls.len() - 1]);
    let over = number - rounds;
    println!(
        "{what}: {rounds} rounds; the longest wait: median {median:?}, worst {worst:?}; {over} done again"
    );
}

#[test]
fn a_copy_that_is_killed_is_no_error_for_programs() {
    let rounds = count("HEARTH_COPIES_REPLICAS", 1);
    let patience = if rounds > 10 { 250 } else { LONG * 5 / 8 };
    let stall = (rounds > 10).then(|| Duration::from_millis(patience + 100));
    let bounds = Bounds { times: [if rounds > 10 { 1000 } else { LONG }, patience], stall, stays: false };
    undisturbed("copy killed", rounds, &bounds, |chain, leader, _| {
        chain.cut(3 - leader);
        chain.start(3 - leader);
    });
}

#[test]
fn programs_go_on_when_daemons_die_at_either_node() {
    let rounds = count("HEARTH_COPIES_DAEMONS", 1);
    let times = if rounds > 10 { [1000, 625] } else { [LONG, LONG * 5 / 8] };
    undisturbed("daemon killed", rounds, &Bounds { times, stall: None, stays: true }, |chain, _, number| {
        let node = 1 + (number % 2) as u32;
        let before = chain.daemon_of(node);
        harness::kill(before.unwrap());
        harness::until("its keeper starts another daemon", || {
            chain.daemon_of(node).is_some_and(|pid| Some(pid) != before)
        });
    });
}

/// All nodes end and come back in some order: the one leads that has everything, and nothing is lost.
#[test]
fn three_nodes_that_were_all_down_come_back_in_any_order() {
    let orders = [[1, 2, 3], [3, 1, 2], [2, 3, 1], [1, 3, 2], [3, 2, 1], [2, 1, 3]];
    let wanted = count("HEARTH_COPIES_ORDERS", 1);
    let chain = Chain::up(3, lease(wanted));
    let mut leader = chain.until_whole();
    for number in 0..wanted {
        let (down, up) = (orders[(number % 6) as usize], orders[(number / 6 % 6) as usize]);
        let seed = count("HEARTH_COPIES_SEED", 1) * 1000 + 800 + number;
        let root = format!("round-{number}");
        let jobs = chain.begin_workers(leader, &root, seed);
        let said = chain.during(jobs, &mut Random(seed), |chain, _| {
            down.iter().for_each(|node| chain.cut(*node));
        });
        up.iter().for_each(|node| chain.start(*node));
        let at = chain.until_whole();
        let found = chain.listing_at(at, &root);
        worker::judge(&found, seed, &said);
        leader = chain.compare(&[(&root, &found)]);
        if count("HEARTH_COPIES_TOLD", 0) != 0 {
            println!("down {down:?}, up {up:?}: node {leader} leads");
        }
    }
    chain.close();
    println!("all down and up: {wanted} rounds");
}
