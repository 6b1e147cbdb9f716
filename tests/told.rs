//! What the program says, and with which exit code, of a node that is as a person did not expect it.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, limited};
use std::fs;
use std::io::Write;
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
    // By a child: one that is being started for another test would have the copy open for writing.
    limited(&["cp", env!("CARGO_BIN_EXE_hearth")], &[&hearth]).expect_success();
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

#[test]
fn a_program_in_the_tree_is_run() {
    let node = Node::up();
    let link = node.dir.path().join("link");
    std::os::unix::fs::symlink(node.path(""), &link).unwrap();
    let script = "cp /bin/echo $T/echo; printf '#!/bin/sh\\necho script $1\\n' > $T/script; chmod 755 $T/script; cp $T/script $T/in-the-tree; echo > $T/no";
    node.sh(script).expect_success();
    let run = |program: &str| node.hearth(&["run", "--", program, "-n", "--json"]);
    assert_eq!(run(&node.path("echo")).expect_success(), "--json");
    assert_eq!(run(&node.path("script")).expect_success(), "script -n\n");
    assert_eq!(run(link.join("echo").to_str().unwrap()).expect_success(), "--json");
    let by_name = format!(
        "PATH=$PATH:{} {} run --dir {} -- in-the-tree",
        node.path(""),
        env!("CARGO_BIN_EXE_hearth"),
        node.dir()
    );
    assert_eq!(limited(&["sh", "-c"], &[&by_name]).expect_success(), "script\n");
    for (name, code) in [("absent", 127), ("no", 126)] {
        let output = run(&node.path(name));
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let said = errors(&output);
        assert!(said.starts_with("hearth: cannot run ") && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn a_mount_in_use_is_not_taken_away_unless_by_force() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::up();
    node.hearth(&["mount"]).expect_success();
    assert_eq!(json(&node.hearth(&["status", "--json"]))["mount"], "tree");
    let mut writer = fs::File::create(node.path("file")).unwrap();
    let busy = node.hearth(&["umount"]);
    assert_eq!(busy.status.code(), Some(1));
    let this = format!("is busy, used by process {} (", std::process::id());
    assert!(errors(&busy).contains(&this), "{}", errors(&busy));
    writer.write_all(b"still").unwrap();
    let down = node.hearth(&["down"]);
    down.expect_success();
    let said = errors(&down);
    assert!(said.contains("stays, as it is in use") && said.contains("umount --force"), "{said}");
    assert_eq!(json(&node.hearth(&["status", "--json"]))["mount"], "tree");
    node.hearth(&["start"]).expect_success();
    assert_eq!(fs::read_to_string(node.path("file")).unwrap(), "still");
    node.hearth(&["umount", "--force"]).expect_success();
    assert!(writer.write_all(b"late").is_err());
    assert_eq!(json(&node.hearth(&["status", "--json"]))["mount"], "nothing");
}

#[test]
fn down_takes_a_mount_away_that_nobody_uses() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::up();
    for how in [&["down"][..], &["down", "--hard"]] {
        node.hearth(&["mount"]).expect_success();
        // By a child: one that is being started for another test would have a file of this process open.
        node.sh_mounted("printf kept > $T/file").expect_success();
        let down = node.hearth(how);
        down.expect_success();
        assert_eq!(errors(&down), "");
        assert!(!node.dir.path().join("n1").exists(), "{how:?}");
        node.hearth(&["start"]).expect_success();
        assert_eq!(node.sh("cat $T/file").expect_success(), "kept");
    }
}

#[test]
fn a_mount_whose_gateway_was_killed_is_told_and_taken_away() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::up();
    node.hearth(&["mount"]).expect_success();
    let pid = fs::read_to_string(format!("{}/node-1/gateway.pid", node.dir())).unwrap();
    harness::kill(pid.split(' ').next().unwrap().parse().unwrap());
    let dead = || json(&node.hearth(&["status", "--json"]))["mount"] == "dead-mount";
    assert!(dead());
    let run = node.hearth(&["run", "--", "true"]);
    run.expect_success();
    assert!(errors(&run).contains("a mount whose gateway is gone") && dead(), "{}", errors(&run));
    node.hearth(&["umount"]).expect_success();
    assert!(!node.dir.path().join("n1").exists());
}

#[test]
fn of_a_node_that_is_down_it_is_told_where_its_pool_is_and_how_to_start_it() {
    let node = Node::up();
    let pool = json(&node.hearth(&["status", "--json"]))["pool"].clone();
    node.hearth(&["down"]).expect_success();
    assert_eq!(json(&node.hearth(&["status", "--json"]))["pool"], pool);
    let said = node.hearth(&["status"]);
    assert!(String::from_utf8_lossy(&said.stdout).contains(pool.as_str().unwrap()), "{said:?}");
    let mount = node.hearth(&["mount"]);
    mount.expect_failure("hearth start --dir");
    assert_eq!(errors(&mount).matches("hearth: ").count(), 1, "{}", errors(&mount));
    assert!(!node.dir.path().join("n1").exists());
    fs::write(node.dir.path().join("node-1/pool/tree"), "nothing of a tree").unwrap();
    let start = node.hearth(&["start"]);
    start.expect_failure("node 1 did not start: cannot open");
    assert_eq!(errors(&start).matches("hearth: ").count(), 1, "{}", errors(&start));
}

/// The loader says only that it ignores a library that it cannot reach.
#[test]
fn a_library_that_other_users_cannot_reach_is_told() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let node = Node::up();
    let warned = |node: &Node| {
        let run = node.hearth(&["run", "--", "true"]);
        run.expect_success();
        errors(&run).contains("other users cannot reach")
    };
    assert!(!warned(&node), "every user reaches it");
    let home = node.dir.path().join("home");
    fs::create_dir_all(home.join("bin")).unwrap();
    fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).unwrap();
    for name in ["hearth", "libhearth.so"] {
        let built = std::path::Path::new(env!("CARGO_BIN_EXE_hearth")).with_file_name(name);
        limited(&["cp", built.to_str().unwrap()], &[home.join("bin").to_str().unwrap()]).expect_success();
    }
    fs::set_permissions(node.dir(), fs::Permissions::from_mode(0o755)).unwrap();
    let hearth = home.join("bin/hearth");
    let run = limited(&[hearth.to_str().unwrap(), "run", "--dir", node.dir(), "--"], &["true"]);
    run.expect_success();
    assert!(errors(&run).contains(&format!("cannot reach {},", home.display())), "{}", errors(&run));
}

/// A program into which the library is not loaded would find nothing where the tree is.
#[test]
fn a_program_that_cannot_see_the_tree_is_told() {
    let node = Node::up();
    let source = node.dir.path().join("program.c");
    fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let built = |name: &str, flag: &str| {
        let program = node.dir.path().join(name).to_str().unwrap().to_owned();
        limited(&["cc", "-o", &program, flag], &[source.to_str().unwrap()]).expect_success();
        program
    };
    let (fixed, usual) = (built("fixed", "-static"), built("usual", "-O1"));
    let script = node.dir.path().join("script").to_str().unwrap().to_owned();
    fs::write(&script, format!("#!{fixed} -x\n")).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let said = |program: &str| {
        let run = node.hearth(&["run", "--", program]);
        run.expect_success();
        errors(&run).lines().filter(|line| line.contains("does not see the tree")).collect::<String>()
    };
    for program in [&fixed, &script] {
        let warning = said(program);
        assert!(warning.contains(&format!("{fixed} is statically linked")), "{warning}");
        assert!(warning.contains("hearth mount"), "{warning}");
    }
    assert_eq!(said(&usual), "");
    assert_eq!(said("true"), "", "found by PATH");
    if rustix::process::geteuid().is_root() {
        rustix::fs::chown(&*usual, Some(rustix::fs::Uid::from_raw(1)), None).unwrap();
        fs::set_permissions(&usual, fs::Permissions::from_mode(0o4755)).unwrap();
        assert!(said(&usual).contains("runs as another user"), "{}", said(&usual));
    }
}
