//! Children between vfork and exec: their files and locks in the program that they execute, beside a file system of the
//! kernel.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, limited};

/// Compiles the cases; returns the path of the program.
fn compiled(node: &Node) -> String {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/interpose/tests/vfork.c");
    let program = format!("{}/vfork", node.dir());
    limited(&["cc"], &["-O1", "-Wall", "-Werror", "-pthread", "-o", &program, source]).expect_success();
    program
}

/// Runs a case on the kernel's tmpfs and in the tree; returns what it has printed there on standard error.
fn run(node: &Node, program: &str, case: &[&str]) -> String {
    let [case, how @ ..] = case else { panic!("a case") };
    let plain = tempfile::tempdir_in("/dev/shm").unwrap();
    let within = ["-k5", "60", program, case];
    limited(&["timeout"], &[&within[..], &[plain.path().to_str().unwrap()], how].concat()).expect_success();
    let name = [&[*case], how].concat().join("-");
    node.sh(&format!("mkdir $T/{name}")).expect_success();
    let folder = node.path(&name);
    let daemon = format!("DAEMON={}", node.daemon());
    let told = [&["run", "--", "env", &daemon, "timeout"][..], &within, &[&folder], how].concat();
    let done = node.hearth(&told);
    done.expect_success();
    String::from_utf8_lossy(&done.stderr).into_owned()
}

/// Detached sessions and references, as the daemon counts them.
fn left(node: &Node) -> (u64, u64) {
    let status = node.hearth(&["status", "--json"]);
    let answers: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    let count = |name: &str| answers[0][name].as_u64().unwrap();
    (count("estates"), count("references"))
}

fn cases(cases: &[&[&str]]) -> Vec<String> {
    let node = Node::up();
    let program = compiled(&node);
    let said = cases.iter().map(|case| run(&node, &program, case)).collect();
    harness::until("nothing is left of programs that have ended", || left(&node) == (0, 0));
    node.hearth(&["down"]).expect_success();
    node.check();
    said
}

#[test]
fn a_lock_of_a_child_goes_on_with_its_program() {
    cases(&[&["whole"], &["whole", "cold"], &["both"]]);
}

#[test]
fn a_child_owns_its_ranges_as_every_process_does() {
    cases(&[&["ranges"], &["ranges", "cold"], &["apart"]]);
}

#[test]
fn files_of_a_child_go_on_with_its_program() {
    cases(&[&["offsets"], &["offsets", "cold"], &["names"], &["names", "cold"]]);
}

#[test]
fn threads_of_a_parent_go_on_meanwhile() {
    cases(&[&["long_stay"], &["long_stay", "cold"], &["keeps_its_own"], &["keeps_its_own", "cold"]]);
}

#[test]
fn the_daemon_may_die_before_the_exec() {
    cases(&[&["killed_with_own"], &["killed_with_inherited"]]);
}

#[test]
fn a_process_beside_its_parent_ends_nothing_of_it() {
    let said = cases(&[&["beside"]]).concat();
    let lines = said.lines().filter(|line| line.contains("shares the memory of its running parent"));
    assert_eq!(lines.count(), 1, "{said}");
}

#[test]
fn a_program_with_many_descriptors_creates_others() {
    cases(&[&["many"]]);
}

#[test]
fn a_program_may_limit_its_memory() {
    let node = Node::up();
    let program = compiled(&node);
    run(&node, &program, &["narrow"]);
    run(&node, &program, &["little_data"]);
    node.sh("mkdir $T/none").expect_success();
    let none = node.path("none");
    let refused = node.hearth(&["run", "--", "env", "ROOM=70", "timeout", "60", &program, "narrow", &none]);
    refused.expect_failure("a limit leaves no address space for the update log of the tree");
    node.hearth(&["down"]).expect_success();
    node.check();
}
