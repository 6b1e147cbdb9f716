//! Clusters that are started with the pools of their nodes in wrong places, or with an older copy of the manager's folder. Such a start
//! changes nothing: when the mistake is undone, the cluster continues. A pool that the manager does not know any more is accepted by an
//! operator only.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod processes;

use harness::{Expect, limited, until};
use processes::Node;
use std::path::{Path, PathBuf};
use std::process::Output;

/// Files that an fsync has acknowledged.
const WRITE: &str = "echo first > $HEARTH_TREE/$0 && sync $HEARTH_TREE/$0";

fn write(node: &Node, name: &str) {
    node.run(&["sh", "-ec", WRITE, name]);
}

/// All nodes are in sync, and show these files.
fn is_whole(node: &Node, count: u32, names: &[&str]) {
    until("all nodes are in sync", || {
        let statuses = node.statuses();
        let leads = statuses.iter().find(|status| status["chain"]["role"] == "leads");
        let in_sync = leads.and_then(|status| status["chain"]["in_sync"].as_array().map(Vec::len));
        in_sync == Some(count as usize)
    });
    for name in names {
        assert_eq!(node.run(&["sh", "-ec", "cat $HEARTH_TREE/$0", name]), "first\n");
    }
}

/// The result of `hearth cluster COMMAND --dir DIR REST`.
fn cluster(node: &Node, command: &str, rest: &[&str]) -> Output {
    let program = [env!("CARGO_BIN_EXE_hearth"), "cluster", command, "--dir", node.dir()];
    limited(&program, rest)
}

fn settings(node: &Node) -> PathBuf {
    Path::new(node.dir()).join("hearth.toml")
}

/// The lines of the settings that name the pools, in the order of the nodes.
fn lines(node: &Node) -> Vec<String> {
    let text = std::fs::read_to_string(settings(node)).unwrap();
    text.lines().filter(|line| line.starts_with("pool = ")).map(str::to_owned).collect()
}

/// The folders of the pools, in the order of the nodes.
fn pools(node: &Node) -> Vec<PathBuf> {
    let name = |line: String| line.trim_start_matches("pool = ").trim_matches('"').to_owned();
    lines(node).into_iter().map(|line| Path::new(node.dir()).join(name(line))).collect()
}

fn identities(pools: &[PathBuf]) -> Vec<Vec<u8>> {
    pools.iter().map(|pool| std::fs::read(pool.join("identity")).unwrap()).collect()
}

fn copy(from: &Path, to: &Path) {
    limited(&["cp", "-a"], &[from.to_str().unwrap(), to.to_str().unwrap()]).expect_success();
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

/// The pools of two nodes are swapped by `swap`, and a second time, which puts them back.
fn swapped(swap: impl Fn(&Node, &[PathBuf])) {
    let node = Node::several(2);
    is_whole(&node, 2, &[]);
    write(&node, "a");
    node.hearth(&["down"]);
    let places = pools(&node);
    let mut before = identities(&places);
    before.sort();
    swap(&node, &places);
    for _ in 0..2 {
        let up = node.try_hearth(&["up"]);
        assert_eq!(up.status.code(), Some(2));
        let now = pools(&node);
        for (number, other) in [(1, 2), (2, 1)] {
            let (here, there) = (now[number - 1].display(), now[other - 1].display());
            up.expect_failure(&format!(
                "the pool {here} belongs to node {other}, so node {number} does not start"
            ));
            up.expect_failure(&format!("that of node {number} is {there} now"));
        }
        assert!(!said(&up).contains("remove all files"), "a pool that is needed: {}", said(&up));
        let status = said(&node.try_hearth(&["status"]));
        assert!(status.contains("belongs to node 2") && status.contains("put each pool back"), "{status}");
        node.hearth(&["down"]);
    }
    let mut after = identities(&places);
    after.sort();
    assert_eq!(before, after, "a wrong start changed a pool");
    swap(&node, &pools(&node));
    node.hearth(&["up"]);
    is_whole(&node, 2, &["a"]);
    node.hearth(&["down"]);
    [1, 2].iter().for_each(|number| node.check_of(*number));
}

#[test]
fn pools_whose_folders_were_swapped_are_refused_and_go_on_when_they_are_back() {
    swapped(|_, places| {
        let aside = places[0].with_file_name("aside");
        std::fs::rename(&places[0], &aside).unwrap();
        std::fs::rename(&places[1], &places[0]).unwrap();
        std::fs::rename(&aside, &places[1]).unwrap();
    });
}

#[test]
fn pools_whose_settings_were_swapped_are_refused_and_go_on_when_they_are_back() {
    swapped(|node, _| {
        let text = std::fs::read_to_string(settings(node)).unwrap();
        let lines = lines(node);
        let text = text.replace(&lines[0], "FIRST").replace(&lines[1], &lines[0]).replace("FIRST", &lines[1]);
        std::fs::write(settings(node), text).unwrap();
    });
}

/// One of three nodes is started with a copy of another one's pool: the others continue, and it returns with its own.
#[test]
fn one_wrong_pool_of_three_is_refused_while_the_others_lead() {
    let node = Node::several(3);
    is_whole(&node, 3, &[]);
    write(&node, "a");
    node.hearth(&["down", "--node", "1"]);
    write(&node, "b");
    let places = pools(&node);
    let aside = places[0].with_file_name("aside");
    std::fs::rename(&places[0], &aside).unwrap();
    // A pool that changes while it is copied could be damaged in the copy.
    node.hearth(&["down", "--node", "3"]);
    copy(&places[2], &places[0]);
    node.hearth(&["start", "--node", "3"]);
    let start = node.try_hearth(&["start", "--node", "1"]);
    start.expect_failure("belongs to node 3, so node 1 does not start");
    write(&node, "c");
    std::fs::remove_dir_all(&places[0]).unwrap();
    std::fs::rename(&aside, &places[0]).unwrap();
    node.hearth(&["start", "--node", "1"]);
    is_whole(&node, 3, &["a", "b", "c"]);
}

#[test]
fn an_older_copy_of_the_managers_folder_is_refused_and_the_right_one_goes_on() {
    let node = Node::several(2);
    is_whole(&node, 2, &[]);
    write(&node, "a");
    node.hearth(&["down"]);
    let [manager, older, right] = ["manager", "older", "right"].map(|name| Path::new(node.dir()).join(name));
    copy(&manager, &older);
    node.hearth(&["up"]);
    write(&node, "b");
    is_whole(&node, 2, &["a", "b"]);
    node.hearth(&["down"]);
    let before = identities(&pools(&node));
    std::fs::rename(&manager, &right).unwrap();
    copy(&older, &manager);
    // With each start of the manager its number grows, and passes that of the right one.
    for _ in 0..12 {
        let up = node.try_hearth(&["up"]);
        assert_eq!(up.status.code(), Some(2));
        up.expect_failure("no node leads: it does not join the cluster, and its pool is unchanged");
        up.expect_failure("the cluster manager was set back to an older state");
        node.hearth(&["down"]);
    }
    node.try_hearth(&["up"]).expect_failure("the cluster manager was set back to an older state");
    let status = said(&node.try_hearth(&["status"]));
    assert!(status.contains("put the newest copy of the folder"), "{status}");
    let status = said(&cluster(&node, "status", &[]));
    assert!(status.contains("PROBLEM: the manager was set back"), "{status}");
    node.hearth(&["down"]);
    assert_eq!(identities(&pools(&node)), before, "a wrong start changed a pool");
    std::fs::remove_dir_all(&manager).unwrap();
    std::fs::rename(&right, &manager).unwrap();
    node.hearth(&["up"]);
    is_whole(&node, 2, &["a", "b"]);
}

/// Pools that have lost their identities, as those that earlier versions started in a wrong place.
#[test]
fn a_last_copy_that_the_manager_does_not_know_is_accepted_by_an_operator_only() {
    let node = Node::several(2);
    is_whole(&node, 2, &[]);
    write(&node, "a");
    node.hearth(&["down"]);
    for pool in pools(&node) {
        std::fs::remove_file(pool.join("identity")).unwrap();
    }
    let up = node.try_hearth(&["up"]);
    assert_eq!(up.status.code(), Some(2));
    let status: serde_json::Value =
        serde_json::from_slice(&cluster(&node, "status", &["--json"]).stdout).unwrap();
    let chain = status["subtrees"][0]["chain"].as_array().unwrap();
    let last = chain.iter().find(|replica| replica["in_sync"] == true).unwrap()["node"].as_u64().unwrap();
    let (last, other) = (last.to_string(), (3 - last).to_string());
    up.expect_failure(&format!("only the pool of node {last} ("));
    up.expect_failure(&format!("accept-pool {last}"));
    let told = said(&cluster(&node, "status", &[]));
    assert!(told.contains("the pool of the last copy in a state that the manager does not know"), "{told}");
    let accept = |number: &str, rest: &[&str]| cluster(&node, "accept-pool", &[&[number], rest].concat());
    let refused = accept(&other, &["--yes"]);
    assert_eq!(refused.status.code(), Some(1));
    refused.expect_failure(&format!("node {last} has the last copy, not node {other}; nothing was changed"));
    let asked = accept(&last, &[]);
    assert_eq!(asked.status.code(), Some(1));
    asked.expect_failure("nothing was changed");
    assert!(said(&asked).contains("RISK: "), "{}", said(&asked));
    let leads = || node.statuses().iter().any(|status| status["chain"]["role"] == "leads");
    assert!(!leads(), "a node leads before an operator has accepted its pool");
    accept(&last, &["--yes"]).expect_success();
    is_whole(&node, 2, &["a"]);
    accept(&last, &["--yes"]).expect_failure("leads, so no pool has to be accepted");
    node.hearth(&["down"]);
    node.hearth(&["up"]);
    is_whole(&node, 2, &["a"]);
}

/// The pool of the last copy is gone, and its node makes an empty one: no node leads, and this one is not accepted.
#[test]
fn an_empty_pool_in_the_place_of_the_last_copy_never_leads() {
    let node = Node::several(2);
    is_whole(&node, 2, &[]);
    write(&node, "a");
    node.hearth(&["down", "--node", "2"]);
    write(&node, "b");
    node.hearth(&["down"]);
    let (pool, aside) = (pools(&node).remove(0), Path::new(node.dir()).join("aside"));
    std::fs::rename(&pool, &aside).unwrap();
    let up = node.try_hearth(&["up"]);
    assert_eq!(up.status.code(), Some(2));
    up.expect_failure("no node leads: only the pool that node 1 had has all acknowledged data, and node 1 is up with another one");
    let refused = cluster(&node, "accept-pool", &["1", "--yes"]);
    assert_eq!(refused.status.code(), Some(1));
    refused.expect_failure("node 1 is up with another pool than the last copy");
    node.hearth(&["down"]);
    std::fs::remove_dir_all(&pool).unwrap();
    std::fs::rename(&aside, &pool).unwrap();
    node.hearth(&["up"]);
    is_whole(&node, 2, &["a", "b"]);
}
