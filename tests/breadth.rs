//! Calls that few programs make, through the library and through the mount: effects and refusals are those of a file
//! system of the kernel, except where docs/compatibility.md says otherwise.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node};

/// In a folder of its own, which is removed afterwards.
fn script(folder: &str) -> String {
    let calls = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/breadth/calls.py");
    format!("mkdir $T/{folder}; cd $T/{folder}; /usr/bin/python3 {calls}; cd $T; rm -r $T/{folder}; ls -A $T")
}

#[test]
fn through_the_library() {
    let node = Node::up();
    let printed = node.sh(&script("library")).expect_success();
    assert_eq!(
        printed,
        "copy_file_range works\nsendfile-out works\nsendfile-in works\nsplice EINVAL\nO_TMPFILE works\n\
         deep-path works\n"
    );
    node.hearth(&["down"]).expect_success();
    node.check();
}

#[test]
fn through_the_mount() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::up();
    node.hearth(&["mount"]).expect_success();
    let printed = node.sh_mounted(&script("mount")).expect_success();
    assert_eq!(
        printed,
        "copy_file_range works\nsendfile-out works\nsendfile-in works\nsplice works\nO_TMPFILE works\n\
         deep-path works\n"
    );
    node.hearth(&["umount"]).expect_success();
    node.hearth(&["down"]).expect_success();
    node.check();
}
