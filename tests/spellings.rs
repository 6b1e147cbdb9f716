//! Without a mount nothing of the kernel's stands where the tree is seen: however a program spells a path into the tree,
//! it comes there or is told that there is nothing, and never writes beside it.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, limited};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Where the kernel would have the tree.
fn folder(node: &Node) -> PathBuf {
    node.dir.path().join("n1")
}

#[test]
fn every_spelling_leads_into_the_tree() {
    let node = Node::up();
    assert!(!folder(&node).exists(), "a cluster that is not mounted has no folder there");
    let beside = tempfile::tempdir().unwrap();
    symlink(folder(&node), beside.path().join("link")).unwrap();
    symlink(node.dir(), beside.path().join("dir")).unwrap();
    let script = format!(
        r#"
        D={} B={}
        echo absolute > $D/n1/absolute
        (cd $D && cat n1/absolute && echo below > n1/below)
        (cd $D; cd n1; echo down > down; cat down)
        echo link > $B/link/link; cat $B/link/link; echo over > $B/link/link; cat $D/n1/link
        mkdir $B/link/folder; mkdir -p $B/link/a/b; mkdir -p $B/dir/n1/c/d; mkdir -p $D/../$(basename $D)/n1/e/f
        (cd $B/link; echo new > new; cat $D/n1/new; cd folder; echo deeper > deeper)
        echo slashes > /$D//n1//slashes; cat $D/n1/slashes
        echo dots > /tmp/../$D/n1/dots; cat $D/n1/dots
        echo dir > $B/dir/n1/dir; cat $D/n1/dir
        for root in $B/dir/n1 /$D//n1 $D/./n1/ $D/../$(basename $D)/n1; do ! mkdir $root 2> /dev/null; done
        cp /bin/true $D/n1/true
        $B/link/true; (cd $D; n1/true); (cd $B; dir/n1/true)
        ls $D/n1
        "#,
        node.dir(),
        beside.path().display()
    );
    assert_eq!(
        node.sh(&script).expect_success(),
        "absolute\ndown\nlink\nover\nnew\nslashes\ndots\ndir\n\
         a\nabsolute\nbelow\nc\ndir\ndots\ndown\ne\nfolder\nlink\nnew\nslashes\ntrue\n"
    );
    assert!(!folder(&node).exists(), "something was made beside the tree");
}

#[test]
fn a_descriptor_of_the_folder_above_leads_into_the_tree() {
    let node = Node::up();
    let script = "
import os, sys
above = os.open(sys.argv[1], os.O_RDONLY)
made = os.open('n1/f', os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=above)
os.write(made, b'written')
os.mkdir('n1/d', dir_fd=above)
os.rename('n1/f', 'n1/d/f', src_dir_fd=above, dst_dir_fd=above)
print(os.read(os.open('n1/d/f', os.O_RDONLY, dir_fd=above), 99).decode(), os.listdir(sys.argv[1] + '/n1'))
for make in [lambda: os.mkdir('n1', dir_fd=above), lambda: os.symlink('x', 'n1', dir_fd=above)]:
    try: make()
    except FileExistsError: print('exists')
";
    let run = node.hearth(&["run", "--", "/usr/bin/python3", "-c", script, node.dir()]);
    assert_eq!(run.expect_success(), "written ['d']\nexists\nexists\n");
    assert!(!folder(&node).exists(), "something was made beside the tree");
}

#[test]
fn a_cluster_may_be_named_by_a_link() {
    let node = Node::up();
    let beside = tempfile::tempdir().unwrap();
    let link = beside.path().join("cluster");
    symlink(node.dir(), &link).unwrap();
    let link = link.to_str().unwrap();
    let script = format!("echo there > {link}/n1/file; cat {link}/n1/file; cd {link}/n1; cat file");
    let hearth = [env!("CARGO_BIN_EXE_hearth"), "run", "--dir", link, "--"];
    assert_eq!(limited(&hearth, &["sh", "-ec", &script]).expect_success(), "there\nthere\n");
    assert_eq!(node.sh("cat $T/file").expect_success(), "there\n");
}

#[test]
fn a_program_that_the_library_does_not_see_is_told_that_there_is_nothing() {
    let node = Node::up();
    let file = node.path("file");
    let write = format!("echo astray > {file}");
    assert!(!limited(&["sh", "-c"], &[&write]).status.success());
    let beside = tempfile::tempdir().unwrap();
    let source = beside.path().join("static.c");
    fs::write(
        &source,
        "#include <stdio.h>\nint main(int n, char **a) { return fopen(a[n - 1], \"w\") == 0; }\n",
    )
    .unwrap();
    let program = beside.path().join("static");
    let program = program.to_str().unwrap();
    limited(&["cc", "-static", "-o", program], &[source.to_str().unwrap()]).expect_success();
    assert_eq!(node.hearth(&["run", "--", program, &file]).status.code(), Some(1));
    assert!(!folder(&node).exists());
}

#[test]
fn what_stands_where_the_tree_is_seen_is_removed_or_told() {
    let node = Node::up();
    let told = |arguments: &[&str]| {
        let output = node.hearth(arguments);
        output.expect_success();
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let astray = folder(&node).join("astray");
    for command in [&["run", "--", "true"][..], &["start"]] {
        fs::create_dir(folder(&node)).unwrap();
        assert_eq!(told(command), "");
        assert!(!folder(&node).exists(), "{command:?} removes an empty one");
        fs::create_dir(folder(&node)).unwrap();
        fs::write(&astray, "kept").unwrap();
        let said = told(command);
        assert!(said.contains(folder(&node).to_str().unwrap()) && said.contains("move them away"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert_eq!(fs::read_to_string(&astray).unwrap(), "kept");
        fs::remove_dir_all(folder(&node)).unwrap();
    }
    let elsewhere = tempfile::tempdir().unwrap();
    let at = elsewhere.path().to_str().unwrap();
    let said = told(&["run", "--at", at, "--", "true"]);
    assert!(said.contains("exists outside of the tree") && said.lines().count() == 1, "{said}");
    assert_eq!(told(&["run", "--at", &format!("{at}/absent"), "--", "true"]), "");
    assert!(Path::new(at).exists(), "only the cluster's own folder is removed");
}

#[test]
fn the_folder_is_there_for_as_long_as_the_mount() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::up();
    let said = |output: std::process::Output| String::from_utf8_lossy(&output.stderr).into_owned();
    for _ in 0..2 {
        node.hearth(&["mount"]).expect_success();
        node.sh_mounted("echo there > $T/file").expect_success();
        assert_eq!(said(node.hearth(&["run", "--", "true"])), "");
        assert_eq!(said(node.hearth(&["run", "--at", &node.path(""), "--", "true"])), "");
        node.hearth(&["umount"]).expect_success();
        assert!(!folder(&node).exists(), "it goes with the mount");
    }
}
