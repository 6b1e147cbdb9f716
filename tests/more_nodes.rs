//! Clusters that get more nodes, and the copies that these have, with real processes.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod processes;

use harness::{Expect, until};
use processes::Node;
use std::path::Path;
use std::process::{Command, Stdio};

/// The report of a node about the chain.
fn chain(node: &Node, number: u32) -> serde_json::Value {
    node.statuses().get(number as usize - 1).map(|status| status["chain"].clone()).unwrap_or_default()
}

fn until_in_sync(node: &Node, leader: u32, wanted: &[u32]) {
    until(&format!("{wanted:?} are in sync"), || {
        chain(node, leader)["in_sync"] == serde_json::Value::from(wanted)
    });
}

/// Some folders, files, links and attributes of a tree, and how they are told.
const FILL: &str = "mkdir -p $T/a/b; i=0; while [ $i -lt 50 ]; do echo file $i > $T/a/f$i; i=$((i+1)); done; \
                    ln -s f1 $T/a/link; ln $T/a/f2 $T/a/b/hard; chmod 640 $T/a/f3; \
                    dd if=/dev/zero bs=65536 count=40 status=none | tr '\\0' x > $T/a/b/large; : > $T/empty";
const TELL: &str =
    "cd $T; find . -printf '%p %m %n %s %l %T@\\n' | sort; find . -type f | sort | xargs sha1sum";

/// A shell script on the tree as one node shows it.
fn sh(node: &Node, number: u32, script: &str) -> String {
    let script = format!("T={}/n{number}\n{script}", node.dir());
    node.hearth(&["run", "--node", &number.to_string(), "--", "sh", "-ec", &script])
}

#[test]
fn a_cluster_of_one_node_with_files_gets_a_second_and_a_third() {
    let node = Node::of_mib(64);
    sh(&node, 1, FILL);
    let told = sh(&node, 1, TELL);
    let refused = node.try_hearth(&["up", "--nodes", "2"]);
    assert_eq!(refused.status.code(), Some(2));
    refused.expect_failure("stays one of --nodes 1: its node runs");
    assert_eq!(sh(&node, 1, TELL), told);
    node.hearth(&["down"]);
    node.try_hearth(&["up", "--nodes", "2", "--medium", "file"])
        .expect_failure("exists with --medium memory");
    node.hearth(&["up", "--nodes", "2", "--lease", "4000", "--patience", "2500"]);
    until_in_sync(&node, 1, &[1, 2]);
    assert_eq!(sh(&node, 1, TELL), told);
    // Programs go on while another node is added.
    node.hearth(&["up", "--nodes", "3"]);
    until_in_sync(&node, 1, &[1, 2, 3]);
    node.try_hearth(&["up", "--nodes", "2"]).expect_failure("it can get more nodes, and not fewer");
    node.hearth(&["down", "--node", "1"]);
    until("node 2 leads", || chain(&node, 2)["role"] == "leads");
    assert_eq!(sh(&node, 2, TELL), told);
    node.hearth(&["down", "--node", "2"]);
    until("node 3 leads", || chain(&node, 3)["role"] == "leads");
    assert_eq!(sh(&node, 3, TELL), told);
    node.hearth(&["down"]);
    [1, 2, 3].iter().for_each(|number| node.check_of(*number));
}

/// Begins to add a node, kills what does it as soon as `reached` is, or lets it end; the processes that it started stay.
fn add_until(node: &Node, reached: impl Fn(&Path) -> bool) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
    command.args(["up", "--dir", node.dir(), "--nodes", "2", "--lease", "4000", "--patience", "2500"]);
    let mut up = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until("the node is being added", || reached(Path::new(node.dir())) || up.try_wait().unwrap().is_some());
    let _ = up.kill();
    let _ = up.wait();
}

#[test]
fn adding_a_node_can_be_interrupted_and_is_done_again() {
    let node = Node::of_mib(64);
    sh(&node, 1, FILL);
    let told = sh(&node, 1, TELL);
    node.hearth(&["down"]);
    add_until(&node, |dir| dir.join("node-2").exists());
    // A cluster of one node still, or one of two: the data is there.
    add_until(&node, |dir| {
        std::fs::read_to_string(dir.join("hearth.toml")).unwrap_or_default().contains("[chain]")
    });
    add_until(&node, |dir| dir.join("manager.pid").exists());
    add_until(&node, |dir| dir.join("node-2/pool/ledger").exists());
    node.hearth(&["up", "--nodes", "2"]);
    until_in_sync(&node, 1, &[1, 2]);
    assert_eq!(sh(&node, 1, TELL), told);
    node.hearth(&["down", "--node", "1"]);
    until("node 2 leads", || chain(&node, 2)["role"] == "leads");
    assert_eq!(sh(&node, 2, TELL), told);
    node.hearth(&["down"]);
    [1, 2].iter().for_each(|number| node.check_of(*number));
}

#[test]
fn an_fsync_waits_while_there_are_fewer_copies_than_there_have_to_be() {
    let node = Node::several(2);
    node.hearth(&["down"]);
    let file = format!("{}/hearth.toml", node.dir());
    let settings = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, settings.replace("min_copies = 1", "min_copies = 3")).unwrap();
    node.try_hearth(&["up"]).expect_failure("min_copies = 3 in [chain], and the cluster has 2 nodes");
    std::fs::write(&file, settings.replace("min_copies = 1", "min_copies = 2")).unwrap();
    node.hearth(&["up"]);
    let leader = if chain(&node, 1)["role"] == "leads" { 1 } else { 2 };
    until_in_sync(&node, leader, &[1, 2]);
    let other = (3 - leader).to_string();
    node.hearth(&["down", "--hard", "--node", &other]);
    until_in_sync(&node, leader, &[leader]);
    let told = node.try_hearth(&["status"]);
    assert_eq!(told.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&told.stdout).contains("each fsync waits: 1 of the 2 nodes"));
    // The program's fsync waits, and its other calls do not.
    let script = format!(
        "cd {}/n{leader}; echo synced > a; (sync a && echo done) & echo other > b; cat b; wait",
        node.dir()
    );
    let mut job = node.begin_program(&["sh", "-c", &script]);
    job.expect("other");
    assert_eq!(sh(&node, leader, "echo more > $T/c; cat $T/a $T/c"), "synced\nmore\n");
    assert!(!job.says_something(), "an fsync returned");
    node.hearth(&["start", "--node", &other]);
    job.expect("done");
    until_in_sync(&node, leader, &[1, 2]);
}

/// No node can join while the manager hangs: `up` says so before it gives up, and continues when the manager does.
#[test]
fn a_start_says_for_which_event_it_waits() {
    let node = Node::several_with(2, 1000, 600);
    node.hearth(&["down", "--node", "2"]);
    node.hearth(&["down", "--node", "1"]);
    let manager = node.stop_process("manager.pid");
    let said = format!("{}/said", node.dir());
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "120", env!("CARGO_BIN_EXE_hearth"), "up", "--dir", node.dir()]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(std::fs::File::create(&said).unwrap());
    let mut up = command.spawn().unwrap();
    until("it says for which event it waits", || {
        let said = std::fs::read_to_string(&said).unwrap();
        assert!(up.try_wait().unwrap().is_none(), "it waits: {said}");
        said.contains("hearth: waiting until a node leads, at most 60 s")
            && said.contains("node 1: it cannot join the cluster: the cluster manager cannot be reached")
    });
    manager.go_on();
    assert!(up.wait().unwrap().success(), "{}", std::fs::read_to_string(&said).unwrap());
}

/// Nearly all files of a nearly full tree are there, each of this round.
fn fill(node: &Node, round: u32) {
    for file in 0..6 {
        let script =
            format!("rm -f $T/f{file}; sync; head -c 9000000 /dev/urandom > $T/f{file}; sync $T/f{file}");
        sh(node, 1, &format!("{script}; : round {round}"));
    }
}

/// Node 2 is away while they are replaced, and is started again: its pool has no room for the old and the new ones.
fn replace_beside_a_copy_that_is_away(node: &Node) {
    fill(node, 0);
    until_in_sync(node, 1, &[1, 2]);
    node.hearth(&["down", "--node", "2"]);
    (1..3).for_each(|round| fill(node, round));
    node.hearth(&["start", "--node", "2"]);
}

fn log_of(node: &Node) -> String {
    std::fs::read_to_string(format!("{}/node-2/serve.log", node.dir())).unwrap()
}

/// The reason that a copy gives when it has given up its tree.
const GAVE_UP: &str = "it gave up its own, and gets that of the head";

/// A copy that is not in sync makes room by itself, and is in sync again with the tree of the node that leads.
#[test]
fn a_copy_whose_pool_has_no_room_for_both_trees_gets_the_new_one() {
    for medium in ["memory", "file"] {
        let node = Node::several_on(medium, 2, 4000, 2500);
        replace_beside_a_copy_that_is_away(&node);
        until_in_sync(&node, 1, &[1, 2]);
        assert!(log_of(&node).contains(GAVE_UP));
        assert!(node.try_hearth(&["status"]).status.success());
        node.hearth(&["check", "--against", "2"]);
        // It leads with all of it.
        let told = sh(&node, 1, TELL);
        node.hearth(&["move", "--to", "2"]);
        assert_eq!(sh(&node, 2, TELL), told);
        node.hearth(&["down"]);
        [1, 2].iter().for_each(|number| node.check_of(*number));
    }
}

/// The node that leads stands still just after the copy has made room for its tree: the copy says for which node it waits, also
/// after a start of its own, and never leads.
#[test]
fn a_copy_that_gave_up_its_tree_waits_for_the_node_that_has_one() {
    let node = Node::several_with(2, 4000, 2500);
    let mut tries = 0;
    let leader = loop {
        let before = std::fs::read_to_string(format!("{}/node-2/serve.log", node.dir())).unwrap().len();
        replace_beside_a_copy_that_is_away(&node);
        until("it gives up its tree", || log_of(&node)[before..].contains(GAVE_UP));
        let leader = node.stop_process("node-1/serve.pid");
        if chain(&node, 2)["in_sync"] == serde_json::Value::from([1]) {
            break leader;
        }
        // On a machine that is busy it may have the tree already.
        leader.go_on();
        tries += 1;
        assert!(tries < 5, "it has the tree each time");
        node.hearth(&["start"]);
    };
    let says_so = || {
        until("it says for which node it waits", || {
            let told = chain(&node, 2);
            assert!(told["role"] == "follows" || told["role"] == "joining" || told.is_null(), "{told}");
            let waits = told["waits"].as_str().unwrap_or_default();
            waits.contains("only node 1 has all acknowledged data")
                && waits.contains("it gave up its own tree to make room for that of node 1")
        });
    };
    says_so();
    let status = node.try_hearth(&["status"]);
    let said = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(!status.status.success() && said.contains("it gave up its own tree to make room"), "{said}");
    node.hearth(&["down", "--hard", "--node", "2"]);
    let _ = node.try_hearth(&["start", "--node", "2"]);
    says_so();
    leader.go_on();
    until_in_sync(&node, 1, &[1, 2]);
    node.hearth(&["check", "--against", "2"]);
    node.hearth(&["down"]);
    [1, 2].iter().for_each(|number| node.check_of(*number));
}
