//! C cases of the preloaded library's own tests on the tree: those about what a mirror of a folder does not have, its
//! waits, its locks, and what it holds while a thread is inside.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, limited};

/// Runs cases, each in a directory of its own.
fn run(cases: &[&str]) {
    run_made(&[], cases);
}

/// The same, of a program that is made in a way of its own.
fn run_made(how: &[&str], cases: &[&str]) {
    let node = Node::up();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/interpose/tests/probe.c");
    let program = format!("{}/probe", node.dir());
    limited(&["cc"], &[&["-O1", "-w", "-pthread", "-DDYNAMIC", "-o", &program, source], how].concat())
        .expect_success();
    for case in cases {
        let folder = node.path(case);
        node.sh(&format!("mkdir $T/{case}")).expect_success();
        node.hearth(&["run", "--", "timeout", "-k5", "60", &program, case, &folder]).expect_success();
    }
    node.hearth(&["down"]).expect_success();
    node.check();
}

#[test]
fn signals_meet_children_and_the_next_program() {
    run(&["vfork_signals", "exec_signals"]);
}

#[test]
fn a_child_has_a_umask_of_its_own() {
    run(&["vfork_umask"]);
}

#[test]
fn the_first_call_is_that_of_a_child() {
    run(&["vfork_first"]);
}

#[test]
fn forks_by_a_number_are_seen() {
    run(&["forks_by_number", "threads_by_number"]);
}

#[test]
fn what_others_may_have_without_our_knowing_is_theirs() {
    run_made(&["-DOWN_CALL"], &["forks_by_number"]);
}

#[test]
fn a_thread_may_end_in_the_next_library() {
    let libraries = env!("CARGO_TARGET_TMPDIR");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/interpose/tests/next_open.c");
    let library = format!("{libraries}/libnext_open.so");
    limited(&["cc"], &["-O1", "-fPIC", "-shared", "-o", &library, source]).expect_success();
    run_made(&[&library, "-Wl,--no-as-needed"], &["ends_in_the_next_library"]);
}

#[test]
fn a_cancelled_thread_ends_between_calls_and_in_waits() {
    run(&["cancels_files", "cancels_waits"]);
}
