//! Clusters of several nodes, with real processes: data that a program synced on one node is on the next one when the
//! first is killed; a copy that dies delays the others only briefly; a node that comes back is a copy again; and no
//! program is served by a node while another one leads.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod processes;

use harness::{Expect, can_mount, until};
use ipc::{Host, SystemHost};
use processes::{Job, Node, job, say};
use std::fs::{File, OpenOptions, read};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// The test that does the jobs.
const JOBS: &str = "a_program_syncs_what_it_writes";
/// Bytes of a record of the file that a program writes.
const RECORD: usize = 8;
/// Records before something is done to a node.
const SOME: u64 = 40;

#[test]
fn a_program_syncs_what_it_writes() {
    let Some(words) = job() else { return };
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["write", path] => write(Path::new(path)),
        ["read", path] => say(&records(&read(path).unwrap()).to_string()),
        _ => panic!("no such job: {words:?}"),
    }
    std::process::exit(0);
}

/// Else it would try for ever, or begin a new cluster where the old one was.
#[test]
fn the_keeper_of_a_manager_whose_folder_was_removed_ends() {
    for whole in [true, false] {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("cluster");
        std::fs::create_dir(&dir).unwrap();
        let log = place.path().join("log");
        let mut keeper = Command::new(env!("CARGO_BIN_EXE_hearth"))
            .args(["manager", "--keep", "--lease", "100", "--dir"])
            .arg(&dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(keeper.stdout.take().unwrap()).read_line(&mut said).unwrap();
        assert!(dir.join("manager/socket").exists(), "it said {said:?}");
        std::fs::remove_dir_all(if whole { dir.clone() } else { dir.join("manager") }).unwrap();
        let mut status = None;
        until("the keeper ends", || {
            status = keeper.try_wait().unwrap();
            status.is_some()
        });
        assert_eq!(status.and_then(|status| status.code()), Some(2));
        let said = std::fs::read_to_string(log).unwrap();
        assert!(said.contains("it is not started again"), "{said}");
        assert!(!dir.join("manager").exists(), "a new cluster began");
    }
}

/// Writes one number after the other, each synced before it is said.
fn write(path: &Path) {
    let file: File = OpenOptions::new().create(true).truncate(true).write(true).open(path).unwrap();
    for number in 1u64.. {
        let done = file
            .write_all_at(&number.to_le_bytes(), (number - 1) * RECORD as u64)
            .and_then(|()| file.sync_all());
        match done {
            Ok(()) => say(&number.to_string()),
            Err(why) => return say(&format!("failed: {why}")),
        }
    }
}

/// How many numbers a file holds, which are those from 1 on.
fn records(bytes: &[u8]) -> u64 {
    let numbers = bytes.chunks(RECORD).map(|number| u64::from_le_bytes(number.try_into().unwrap()));
    let wrong = numbers.clone().zip(1..).find(|(number, expected)| number != expected);
    assert_eq!(wrong, None, "it is a prefix of what was written");
    numbers.count() as u64
}

/// The number that a program said last, of the next so many.
fn some(job: &mut Job) -> u64 {
    (0..SOME).map(|_| job.line().unwrap().parse().unwrap()).last().unwrap()
}

/// The report of all nodes about the chain.
fn chain(node: &Node, number: u32) -> serde_json::Value {
    node.statuses()[number as usize - 1]["chain"].clone()
}

fn until_leads(node: &Node, number: u32) {
    until(&format!("node {number} leads"), || chain(node, number)["role"] == "leads");
}

fn until_in_sync(node: &Node, leader: u32, wanted: &[u32]) {
    until(&format!("{wanted:?} are in sync"), || {
        chain(node, leader)["in_sync"] == serde_json::Value::from(wanted)
    });
}

/// A node that was started again is a copy again.
fn until_back(node: &Node, leader: u32, number: u32) {
    until(&format!("node {number} is a copy again"), || {
        let copies = chain(node, leader)["copies"].clone();
        let copy = copies.as_array().and_then(|copies| copies.iter().find(|copy| copy["node"] == number));
        copy.is_some_and(|copy| copy["in_sync"] == true)
    });
}

/// How many numbers are in a file, as a node has it.
fn read_at(node: &Node, number: u32, file: &str) -> u64 {
    let path = format!("{}/n{number}/{file}", node.dir());
    node.begin_at(number, JOBS, &["read", &path]).line().unwrap().parse().unwrap()
}

/// Kills all nodes while a program writes. Gives the last number that was synced.
fn written_until_all_are_killed(node: &Node) -> u64 {
    let mut job = node.begin(JOBS, &["write", &node.path("file")]);
    some(&mut job);
    node.hearth(&["down", "--hard"]);
    job.rest().iter().rev().find_map(|line| line.parse().ok()).unwrap_or(SOME)
}

/// The first node to start waits for the other one, which has what was damaged.
#[test]
fn records_that_are_damaged_at_the_first_node_are_there_when_all_nodes_were_killed_and_start() {
    let node = Node::several(2);
    let last = written_until_all_are_killed(&node);
    let pool = format!("{}/node-1/pool", node.dir());
    let mut damaged = 0;
    for file in std::fs::read_dir(pool).unwrap().map(Result::unwrap) {
        if file.file_name().to_string_lossy().starts_with("log-") {
            let file = OpenOptions::new().append(true).open(file.path()).unwrap();
            std::io::Write::write_all(&mut &file, b"x").unwrap();
            damaged += 1;
        }
    }
    assert!(damaged > 0, "the writer had a log");
    // Shorter than the start of a node.
    let settings = format!("{}/hearth.toml", node.dir());
    let text = std::fs::read_to_string(&settings).unwrap();
    let lines =
        text.lines().map(|line| if line.starts_with("patience_ms") { "patience_ms = 1" } else { line });
    std::fs::write(settings, lines.collect::<Vec<_>>().join("\n")).unwrap();
    node.hearth(&["up"]);
    let leads = [1, 2].into_iter().find(|number| chain(&node, *number)["role"] == "leads").unwrap();
    assert!(read_at(&node, leads, "file") >= last);
}

#[test]
fn a_node_that_cannot_start_keeps_no_other_one_from_it() {
    let node = Node::several(2);
    let last = written_until_all_are_killed(&node);
    let tree = OpenOptions::new().write(true).open(format!("{}/node-1/pool/tree", node.dir())).unwrap();
    tree.set_len(100_000).unwrap();
    let up = node.try_hearth(&["up"]);
    up.expect_failure("the other nodes were started");
    until_leads(&node, 2);
    assert!(read_at(&node, 2, "file") >= last);
}

#[test]
fn what_was_synced_at_a_node_that_is_killed_is_at_the_next_one() {
    let node = Node::several(2);
    let mut job = node.begin(JOBS, &["write", &node.path("file")]);
    some(&mut job);
    node.hearth(&["down", "--node", "1", "--hard"]);
    let said = job.rest();
    // The line that was under way when it was killed may be cut.
    let last: u64 = said.iter().rev().find_map(|line| line.parse().ok()).unwrap_or(SOME);
    // A program that is started now waits for the next one; it finds the tree by its variable.
    let script = ["-c", "echo $HEARTH_TREE"];
    let told = node.hearth(&[&["run", "--", "sh"], &script[..]].concat());
    assert_eq!(told.trim(), format!("{}/n2", node.dir()));
    until_leads(&node, 2);
    let found = read_at(&node, 2, "file");
    assert!((last..=last + 1).contains(&found), "{last} were said to be synced, and {found} are there");
    // It leads alone until the other one is back.
    assert_eq!(node.try_hearth(&["status"]).status.code(), Some(1));
    let mut job = node.begin_at(2, JOBS, &["write", &format!("{}/n2/other", node.dir())]);
    some(&mut job);
    node.hearth(&["start", "--node", "1"]);
    until_back(&node, 2, 1);
    some(&mut job);
    job.kill();
    node.hearth(&["down"]);
    [1, 2].iter().for_each(|number| node.check_of(*number));
}

#[test]
fn a_copy_that_is_killed_holds_a_program_up_for_a_while_only() {
    let node = Node::several(2);
    let mut job = node.begin(JOBS, &["write", &node.path("file")]);
    some(&mut job);
    node.hearth(&["down", "--node", "2", "--hard"]);
    some(&mut job);
    until_in_sync(&node, 1, &[1]);
    node.hearth(&["start", "--node", "2"]);
    until_back(&node, 1, 2);
    some(&mut job);
    job.kill();
    node.hearth(&["down"]);
    [1, 2].iter().for_each(|number| node.check_of(*number));
}

#[test]
fn a_node_that_ends_in_order_hands_over() {
    let node = Node::several(2);
    let mut job = node.begin(JOBS, &["write", &node.path("file")]);
    let last = some(&mut job);
    job.kill();
    node.hearth(&["down", "--node", "1"]);
    until_leads(&node, 2);
    assert!(read_at(&node, 2, "file") >= last);
    node.hearth(&["start", "--node", "1"]);
    until_back(&node, 2, 1);
    node.hearth(&["down"]);
    [1, 2].iter().for_each(|number| node.check_of(*number));
    // In whichever order they come up: the one leads that has everything.
    node.hearth(&["start", "--node", "1"]);
    node.hearth(&["up"]);
    until_leads(&node, 2);
    assert!(read_at(&node, 2, "file") >= last);
}

/// A planned move there and back: nothing is lost, and each node is a copy as soon as it does not lead.
#[test]
fn the_lead_moves_and_moves_back() {
    let node = Node::several(2);
    let daemons =
        |node: &Node| node.statuses().iter().map(|status| status["pid"].clone()).collect::<Vec<_>>();
    let before = daemons(&node);
    let mut job = node.begin(JOBS, &["write", &node.path("file")]);
    some(&mut job);
    let refused = node.try_hearth(&["move", "--to", "2"]);
    assert_eq!(refused.status.code(), Some(1));
    refused.expect_failure("programs are attached to node 1");
    // It changed nothing.
    let last = some(&mut job);
    job.kill();
    job.wait();
    let begin = SystemHost.now();
    node.hearth(&["move", "--to", "2"]);
    let mut job = node.begin_at(2, JOBS, &["write", &format!("{}/n2/other", node.dir())]);
    job.line().unwrap();
    println!("from the command to the first fsync: {:?}", SystemHost.now().since(begin));
    assert_eq!(chain(&node, 1)["role"], "follows");
    assert_eq!(chain(&node, 2)["in_sync"], serde_json::json!([1, 2]));
    let other = some(&mut job);
    job.kill();
    job.wait();
    assert!(read_at(&node, 2, "file") >= last);
    let told: serde_json::Value =
        serde_json::from_str(&node.hearth(&["move", "--to", "1", "--json"])).unwrap();
    assert_eq!((&told["from"], &told["to"]), (&2.into(), &1.into()));
    assert!(read_at(&node, 1, "file") >= last && read_at(&node, 1, "other") >= other);
    until("all is well", || node.try_hearth(&["status"]).status.code() == Some(0));
    assert_eq!(daemons(&node), before, "no daemon was started again");
    assert!(node.hearth(&["move", "--to", "1"]).contains("node 1 leads already"));
    node.try_hearth(&["move", "--to", "3"]).expect_failure("node 3 does not exist");
    node.hearth(&["down", "--node", "2"]);
    let refused = node.try_hearth(&["move", "--to", "2"]);
    assert_eq!(refused.status.code(), Some(1));
    refused.expect_failure("node 2 is not in sync");
    node.hearth(&["down"]);
    [1, 2].iter().for_each(|number| node.check_of(*number));
}

/// A move that cannot be made: to a node whose daemon hangs, and while the manager does not answer. Programs run again soon, at
/// one node, and nothing is lost.
#[test]
fn a_move_that_fails_leaves_one_node_that_leads() {
    let node = Node::several(2);
    let mut job = node.begin(JOBS, &["write", &node.path("file")]);
    let last = some(&mut job);
    job.kill();
    job.wait();
    // The manager answers too late, or not at all: a view says who leads.
    let manager = node.stop_process("manager.pid");
    let refused = node.try_hearth(&["move", "--to", "2"]);
    manager.go_on();
    assert_eq!(refused.status.code(), Some(1));
    refused.expect_failure("sessions were ended, and the cluster manager did not let node 2 lead");
    until("one node leads", || [1, 2].iter().any(|number| chain(&node, *number)["role"] == "leads"));
    let bytes: u64 = node.run(&["sh", "-c", "wc -c < $HEARTH_TREE/file"]).trim().parse().unwrap();
    assert!(bytes >= last * RECORD as u64);
    until("all is well", || node.try_hearth(&["status"]).status.code() == Some(0));
    node.hearth(&["move", "--to", "1"]);
    // The other node's daemon hangs: it gets nothing, and does not lead.
    let other = node.stop_process("node-2/serve.pid");
    let refused = node.try_hearth(&["move", "--to", "2"]);
    assert_eq!(refused.status.code(), Some(1));
    until_leads(&node, 1);
    assert!(read_at(&node, 1, "file") >= last);
    other.go_on();
    until_back(&node, 1, 2);
    node.hearth(&["move", "--to", "2"]);
    assert!(read_at(&node, 2, "file") >= last);
}

#[test]
fn a_move_by_force_keeps_what_programs_wrote_and_their_calls_fail_from_then_on() {
    let node = Node::several(2);
    let mut job = node.begin(JOBS, &["write", &node.path("file")]);
    some(&mut job);
    node.hearth(&["move", "--to", "2", "--force"]);
    let said = job.rest();
    let (last, numbers) = said.split_last().unwrap();
    assert!(last.starts_with("failed: Input/output error"), "{last}");
    let last: u64 = numbers.last().map_or(SOME, |line| line.parse().unwrap());
    let found = read_at(&node, 2, "file");
    assert!((last..=last + 1).contains(&found), "{last} were said to be synced, and {found} are there");
    node.try_hearth(&["run", "--node", "1", "--", "true"]).expect_failure("node 2 leads, not node 1");
}

#[test]
fn programs_go_on_when_only_a_daemon_dies() {
    let node = Node::several(2);
    let mut job = node.begin(JOBS, &["write", &node.path("file")]);
    for number in [1, 2, 1] {
        some(&mut job);
        let daemon = node.statuses()[number - 1]["pid"].as_i64().unwrap();
        harness::kill(i32::try_from(daemon).unwrap());
        some(&mut job);
        until("all is well again", || node.try_hearth(&["status"]).status.code() == Some(0));
        assert_eq!(chain(&node, 1)["role"], "leads");
    }
}

#[test]
fn programs_are_turned_away_where_another_node_leads() {
    let node = Node::several(2);
    let refused = node.try_hearth(&["run", "--node", "2", "--", "true"]);
    assert_eq!(refused.status.code(), Some(1));
    refused.expect_failure("node 1 leads, not node 2");
    let refused = node.try_hearth(&["mount", "--node", "2"]);
    assert_eq!(refused.status.code(), Some(1));
    refused.expect_failure("node 1 leads, not node 2");
    // A program that does not ask before finds that no node serves it.
    let socket = format!("HEARTH_SOCKET={}/node-2/socket", node.dir());
    let script = ["run", "--", "env", &socket, "ls", &node.path("")];
    node.try_hearth(&script).expect_failure("Input/output error");
    node.run(&["ls", &node.path("")]);
}

#[test]
fn three_nodes_and_all_ways_to_name_how_many_there_are() {
    let node = Node::several(3);
    node.try_hearth(&["up", "--nodes", "2"]).expect_failure("exists with --nodes 3");
    node.hearth(&["up", "--nodes", "3"]);
    until_in_sync(&node, 1, &[1, 2, 3]);
    let mut job = node.begin(JOBS, &["write", &node.path("file")]);
    some(&mut job);
    node.hearth(&["down", "--node", "1", "--hard"]);
    until_leads(&node, 2);
    until_in_sync(&node, 2, &[2, 3]);
    assert!(read_at(&node, 2, "file") >= SOME);
    node.hearth(&["down"]);
    [1, 2, 3].iter().for_each(|number| node.check_of(*number));
}

#[test]
fn a_mount_whose_process_was_killed_is_made_anew() {
    if !can_mount() {
        return;
    }
    for node in [Node::of_mib(64), Node::several(2)] {
        node.hearth(&["up", "--mount"]);
        let (file, tree) = (node.path("file"), node.path(""));
        let tree = tree.trim_end_matches('/');
        let mounts = || {
            let all = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
            all.lines().filter(|line| line.split(' ').nth(4) == Some(tree)).count()
        };
        for (again, said) in [
            (&["up"][..], "node 1 is mounted, for every program"),
            (&["start", "--node", "1"], "node 1 is mounted, for every program"),
            (&["mount"], "node 1 is mounted at"),
        ] {
            let gateway = node.gateway();
            gateway.kill();
            gateway.wait();
            let status = node.statuses()[0].clone();
            assert_eq!(status["state"], "degraded", "{status}");
            assert!(status["problems"].to_string().contains("hearth mount --node 1 --dir"), "{status}");
            let told = node.hearth(again);
            assert!(told.contains(said), "{again:?}: {told}");
            harness::limited(&["sh", "-c"], &[&format!("echo {} > {file}", again[0])]).expect_success();
            assert_eq!(node.run(&["cat", &file]).trim(), again[0]);
            assert_eq!(mounts(), 1, "the dead one is not below it");
        }
        node.hearth(&["umount"]);
        assert!(!std::path::Path::new(tree).exists());
    }
}

#[test]
fn up_returns_when_the_tree_of_the_node_that_leads_is_mounted() {
    if !can_mount() {
        return;
    }
    let node = Node::several(2);
    node.hearth(&["down"]);
    node.hearth(&["up", "--mount"]);
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(mounts.contains(&format!("{}/n1 ", node.dir())), "{mounts}");
    let status = node.hearth(&["status"]);
    assert!(!status.contains("degraded"), "{status}");
    std::fs::write(node.path("file"), "seen").unwrap();
    assert_eq!(node.run(&["cat", &node.path("file")]), "seen");
    node.hearth(&["umount"]);
}

/// A process whose command line has these words, other than one.
fn process_with(words: &[&str], other: i32) -> Option<i32> {
    let of = |pid: i32| {
        let line = read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        words.iter().all(|word| line.contains(&word.as_bytes()))
    };
    let numbers = std::fs::read_dir("/proc").unwrap().flatten();
    let mut numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.find(|pid| *pid != other && of(*pid))
}

/// Slow libraries are loaded before they are needed, so that a copy whose daemon died is silent for milliseconds.
#[test]
fn a_daemon_of_several_that_dies_is_replaced_by_one_that_was_ready() {
    let node = Node::several(2);
    // One that has begun is called so still.
    let spare =
        |number: &str, begun: i32| process_with(&["daemon", node.dir(), "--node", number, "--spare"], begun);
    let daemon = |number: &str| -> i32 {
        let file = std::fs::read_to_string(format!("{}/node-{number}/serve.pid", node.dir()));
        file.ok().and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or_default()
    };
    for number in ["2", "1"] {
        let mut before = daemon(number);
        for round in 1..=3 {
            let mut ready = None;
            until("a spare is there", || {
                ready = spare(number, before);
                ready.is_some()
            });
            if round == 3 {
                harness::kill(ready.unwrap());
            }
            harness::kill(before);
            until("another daemon serves", || ![before, 0].contains(&daemon(number)));
            if round < 3 {
                assert_eq!(Some(daemon(number)), ready, "node {number}, round {round}");
            }
            before = daemon(number);
        }
    }
    node.hearth(&["down"]);
    until("no spare is left", || spare("1", 0).is_none() && spare("2", 0).is_none());
}

/// Damages one byte of the block of a pool that begins with a text.
fn damage(node: &Node, number: u32, text: &str) {
    let pool = node.statuses()[number as usize - 1]["pool"].as_str().unwrap().to_owned();
    let files = std::fs::read_dir(pool).unwrap().map(|entry| entry.unwrap().path());
    let segments = files.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("segment-"));
    let mut found = 0;
    for path in segments {
        let bytes = read(&path).unwrap();
        for block in bytes.chunks(4096).enumerate().filter(|(_, block)| block.starts_with(text.as_bytes())) {
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            file.write_all_at(b"!", block.0 as u64 * 4096 + 100).unwrap();
            found += 1;
        }
    }
    assert_eq!(found, 1, "the block with {text} is in the pool of node {number}");
}

/// Both copies are compared while a program writes; then one of them is damaged below the file system.
#[test]
fn the_copies_of_two_nodes_are_compared() {
    let node = Node::several(2);
    let mut job = node.begin(JOBS, &["write", &node.path("file")]);
    node.run(&["mkdir", &node.path("folder")]);
    for _ in 0..3 {
        some(&mut job);
        let told = node.hearth(&["check", "--against", "2"]);
        assert!(
            told.starts_with("nodes 1 and 2 at entry ") && told.ends_with("3 inodes, all equal\n"),
            "{told}"
        );
    }
    job.kill();
    job.wait();
    let script = format!("yes pattern | head -c 100000 > {}", node.path("folder/file"));
    node.run(&["sh", "-c", &script]);
    let told = node.hearth(&["check", "--against", "2", "--json"]);
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!((&told["leader"], &told["copy"], &told["different"]), (&1.into(), &2.into(), &0.into()));
    assert_eq!((&told["inodes"], told["differences"].as_array().unwrap().len()), (&4.into(), 0));
    let unique =
        format!("printf 'only here' | dd of={} bs=1 seek=40960 conv=notrunc", node.path("folder/file"));
    node.run(&["sh", "-c", &unique]);
    node.hearth(&["check", "--against", "2"]);
    damage(&node, 2, "only here");
    let differ = node.try_hearth(&["check", "--against", "2"]);
    assert_eq!(differ.status.code(), Some(1));
    let told = String::from_utf8(differ.stdout).unwrap();
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines[0], "folder/file: contents differ, a block is damaged at node 2");
    assert!(lines.len() == 2 && lines[1].ends_with("4 inodes, 1 different"), "{told}");
    for (words, why) in [
        (&["--against", "1"][..], "node 1 leads"),
        (&["--against", "3"], "node 3"),
        (&[], "required"),
        (&["--against", "2", "pool"], "cannot be used with"),
    ] {
        let refused = node.try_hearth(&[&["check"], words].concat());
        assert_eq!(refused.status.code(), Some(2), "{words:?}");
        refused.expect_failure(why);
    }
    node.hearth(&["down", "--node", "2", "--hard"]);
    let refused = node.try_hearth(&["check", "--against", "2"]);
    assert_eq!(refused.status.code(), Some(2));
    refused.expect_failure("node 2");
}
