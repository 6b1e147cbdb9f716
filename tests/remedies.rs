//! The way out that a node which does not start names: to remove the files of its pool only where these are damaged.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, limited};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

/// The advice that costs data where no other node has them.
const REMOVES: &str = "remove all files";

/// A start that fails gives this sentence, and only with `removes` the way to an empty pool.
fn refused(node: &Node, start: &Output, sentence: &str, removes: bool) {
    let told = String::from_utf8_lossy(&start.stderr).into_owned();
    assert!(!start.status.success(), "{told}");
    let status = node.hearth(&["status", "--json"]);
    let nodes: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    let nodes = nodes.as_array().unwrap();
    let failure = nodes.iter().find_map(|node| node["failure"].as_str()).unwrap_or_default();
    for told in [&told, failure] {
        assert!(told.contains(sentence), "expected '{sentence}' in: {told}");
        assert_eq!(told.contains(REMOVES), removes, "{told}");
        assert!(!removes || told.contains("shows that another node leads"), "{told}");
    }
}

fn started_within(node: &Node, limits: &str) -> Output {
    let script =
        format!("{limits}; exec {} start --node 1 --dir {}", env!("CARGO_BIN_EXE_hearth"), node.dir());
    limited(&["bash", "-c"], &[&script])
}

#[test]
fn a_pool_is_to_be_emptied_only_if_it_is_damaged() {
    let node = Node::of_nodes_on("file", 2, 4000, 2500, 64);
    node.hearth(&["down"]).expect_success();
    let path = |name: &str| -> PathBuf { node.dir.path().join(name) };
    let start = |number: &str| node.hearth(&["start", "--node", number]);
    let changed = |file: &Path, text: &str, check: &dyn Fn()| {
        let before = fs::read(file).unwrap();
        fs::write(file, text).unwrap();
        check();
        fs::write(file, before).unwrap();
    };
    let settings = fs::read_to_string(path("hearth.toml")).unwrap();
    let elsewhere = settings.replace("address = \"127.0.0.1\"", "address = \"192.0.2.1\"");
    changed(&path("hearth.toml"), &elsewhere, &|| {
        refused(&node, &start("1"), "has to be an address of this machine", false);
    });
    changed(&path("key"), "no key", &|| refused(&node, &start("1"), "put it back from a copy", false));
    refused(&node, &started_within(&node, "ulimit -n 20"), "", false);
    start("1").expect_success();
    changed(&path("hearth.toml"), &settings.replace("node-2/pool", "node-1/pool"), &|| {
        refused(&node, &start("2"), "belongs to node 1, so node 2 does not start", false);
        // A pool that names no node is not known as that of another one.
        fs::rename(path("node-1/pool/identity"), path("identity")).unwrap();
        let pid = fs::read_to_string(path("node-1/serve.pid")).unwrap();
        refused(&node, &start("2"), &format!("(process {})", pid.split(' ').next().unwrap()), false);
        fs::rename(path("identity"), path("node-1/pool/identity")).unwrap();
    });
    node.hearth(&["down"]).expect_success();
    let tree = fs::OpenOptions::new().write(true).open(path("node-2/pool/tree")).unwrap();
    tree.set_len(100_000).unwrap();
    refused(&node, &start("2"), "hearth check", true);
    for file in fs::read_dir(path("node-2/pool")).unwrap() {
        fs::remove_file(file.unwrap().path()).unwrap();
    }
    refused(&node, &start("2"), "bring its files back", true);
}
