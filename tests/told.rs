//! What the program says, and with which exit code, of a node that is as a person did not expect it.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, limited};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(output: &Output) -> serde_json::Value {
    let answers: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    answers[0].clone()
}

#[test]
fn a_user_who_may_not_ask_is_not_told_that_the_node_is_down() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let node = Node::up();
    let open = |mode| fs::set_permissions(node.dir(), fs::Permissions::from_mode(mode)).unwrap();
    let hearth = format!("{}/hearth", node.dir());
    fs::copy(env!("CARGO_BIN_EXE_hearth"), &hearth).unwrap();
    open(0o755);
    let status = |rest: &[&str]| {
        let user = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups"];
        limited(&[&user[..], &[&hearth, "status", "--dir", node.dir()]].concat(), rest)
    };
    let said = status(&[]);
    assert_eq!(said.status.code(), Some(3));
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(text.contains("not known") && text.contains("Permission denied"), "{text}");
    let said = status(&["--json"]);
    assert_eq!(said.status.code(), Some(3));
    assert!(json(&said)["unknown"].as_str().unwrap().contains("may not ask"), "{said:?}");
    fs::set_permissions(format!("{}/hearth.toml", node.dir()), fs::Permissions::from_mode(0o600)).unwrap();
    let said = status(&[]);
    assert_eq!(said.status.code(), Some(3));
    said.expect_failure("may not read");
}
