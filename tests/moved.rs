//! A cluster's folder may be moved, and copied: the copy is a cluster of its own, and never touches the original.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, limited};
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Output;

/// Clusters in a folder on a disk, where a pool in memory has to lie elsewhere.
struct Clusters(tempfile::TempDir);

impl Clusters {
    fn new() -> Self {
        Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    fn dir(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn hearth(&self, name: &str, arguments: &[&str]) -> Output {
        let (command, rest) = arguments.split_first().unwrap();
        limited(&[env!("CARGO_BIN_EXE_hearth"), command, "--dir", self.dir(name).to_str().unwrap()], rest)
    }

    fn up(&self, name: &str, medium: &str) {
        self.hearth(name, &["up", "--no-mount", "--medium", medium, "--capacity", "64"]).expect_success();
    }

    /// A shell script that sees the tree at `$T`.
    fn sh(&self, name: &str, script: &str) -> String {
        let script = format!("T={}/n1\n{script}", self.dir(name).display());
        self.hearth(name, &["run", "--", "sh", "-ec", &script]).expect_success()
    }

    fn copy(&self, from: &str, to: &str) {
        self.copied(from, to).expect_success();
    }

    fn copied(&self, from: &str, to: &str) -> Output {
        let path = |name| self.dir(name).to_str().unwrap().to_owned();
        limited(&["cp", "-r"], &[&path(from), &path(to)])
    }
}

impl Drop for Clusters {
    fn drop(&mut self) {
        for entry in fs::read_dir(self.0.path()).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            let pool = self.pool(&name);
            self.hearth(&name, &["down", "--hard"]);
            if let Some(pool) = pool {
                let _ = fs::remove_dir_all(pool);
            }
        }
    }
}

impl Clusters {
    /// A pool that lies in memory elsewhere.
    fn pool(&self, name: &str) -> Option<PathBuf> {
        let text = fs::read_to_string(self.dir(name).join("hearth.toml")).ok()?;
        let pool = text.lines().find_map(|line| line.strip_prefix("pool = "))?.trim_matches('"').to_owned();
        pool.starts_with("/dev/shm/").then(|| pool.into())
    }
}

#[test]
fn a_copy_is_a_cluster_of_its_own() {
    let clusters = Clusters::new();
    clusters.up("one", "file");
    clusters.sh("one", "echo both > $T/file");
    clusters.hearth("one", &["down"]).expect_success();
    clusters.copy("one", "two");
    clusters.up("two", "file");
    clusters.up("one", "file");
    clusters.sh("two", "echo copy > $T/file");
    assert_eq!(clusters.sh("one", "cat $T/file"), "both\n");
    // A copy that was made of one that is up has its pid files; logs may go while it is made.
    clusters.copied("one", "three");
    assert!(clusters.dir("three").join("node-1/serve.pid").exists());
    assert_eq!(clusters.hearth("three", &["status"]).status.code(), Some(2));
    clusters.hearth("three", &["down"]).expect_success();
    assert_eq!(clusters.sh("one", "cat $T/file"), "both\n");
}

#[test]
fn a_cluster_may_be_moved() {
    let clusters = Clusters::new();
    for medium in ["file", "memory"] {
        clusters.up(medium, medium);
        clusters.sh(medium, "echo kept > $T/file");
        clusters.hearth(medium, &["down"]).expect_success();
        let moved = format!("moved-{medium}");
        fs::rename(clusters.dir(medium), clusters.dir(&moved)).unwrap();
        clusters.hearth(&moved, &["start"]).expect_success();
        assert_eq!(clusters.sh(&moved, "cat $T/file"), "kept\n");
    }
}

#[test]
fn a_copy_does_not_use_a_pool_in_memory() {
    let clusters = Clusters::new();
    clusters.up("one", "memory");
    if clusters.pool("one").is_none() {
        println!("skipped: the target folder is in memory");
        return;
    }
    clusters.copied("one", "two");
    for command in ["up", "start", "down", "status"] {
        clusters.hearth("two", &[command]).expect_failure("is a copy of a cluster whose pool in memory");
    }
    clusters.hearth("one", &["down"]).expect_success();
    clusters.hearth("two", &["up"]).expect_failure("is a copy of a cluster whose pool in memory");
}

/// A user who removes a cluster by its folder leaves its pool; a new cluster there gets a new pool, and the old one
/// stays.
#[test]
fn a_new_cluster_takes_no_pool_of_one_that_is_gone() {
    let clusters = Clusters::new();
    clusters.up("one", "memory");
    let Some(left) = clusters.pool("one") else {
        println!("skipped: the target folder is in memory");
        return;
    };
    clusters.sh("one", "echo old > $T/file");
    clusters.hearth("one", &["down"]).expect_success();
    fs::remove_dir_all(clusters.dir("one")).unwrap();
    let again = clusters.hearth("one", &["up", "--no-mount", "--medium", "memory", "--capacity", "64"]);
    let told = String::from_utf8_lossy(&again.stderr).into_owned();
    again.expect_success();
    assert!(told.contains(left.to_str().unwrap()) && told.contains("remove it"), "{told}");
    assert_eq!(clusters.sh("one", "ls $T"), "");
    assert!(fs::read_dir(&left).unwrap().count() > 0, "it stays");
    fs::remove_dir_all(left).unwrap();
}

#[test]
fn absolute_paths_in_settings_of_before_are_read_where_the_cluster_lies() {
    let clusters = Clusters::new();
    clusters.up("one", "file");
    clusters.sh("one", "echo kept > $T/file");
    clusters.hearth("one", &["down"]).expect_success();
    let node = clusters.dir("one").join("node-1");
    let text = format!(
        "medium = \"file\"\ncapacity_bytes = {}\n\n[[nodes]]\nnumber = 1\npool = \"{node}/pool\"\nsocket = \"{node}/socket\"\n",
        64 << 20,
        node = node.display()
    );
    fs::write(clusters.dir("one").join("hearth.toml"), text).unwrap();
    clusters.copy("one", "two");
    for name in ["one", "two"] {
        clusters.up(name, "file");
        assert_eq!(clusters.sh(name, "cat $T/file"), "kept\n");
        let socket = fs::metadata(clusters.dir(name).join("node-1/socket")).unwrap();
        assert!(socket.file_type().is_socket());
    }
}

#[test]
fn a_socket_with_a_long_path_moves_with_its_cluster_and_goes_with_its_end() {
    let clusters = Clusters::new();
    let long = "a-name-so-long-that-no-socket-may-have-it-in-its-path".repeat(2);
    clusters.up(&long, "file");
    clusters.hearth(&long, &["down"]).expect_success();
    let moved = format!("{long}-moved");
    clusters.copy(&long, &moved);
    clusters.hearth(&moved, &["start"]).expect_success();
    clusters.hearth(&long, &["start"]).expect_success();
    clusters.sh(&moved, "echo moved > $T/file");
    assert_eq!(clusters.sh(&long, "ls $T"), "");
    for name in [&long, &moved] {
        let text = fs::read_to_string(clusters.dir(name).join("hearth.toml")).unwrap();
        let socket = text.lines().find_map(|line| line.strip_prefix("socket = ")).unwrap().trim_matches('"');
        let private = Path::new(socket).parent().unwrap();
        assert!(private.is_dir() && !private.starts_with(clusters.0.path()));
        for how in [&["down"][..], &["down", "--hard"]] {
            clusters.hearth(name, &["start"]).expect_success();
            clusters.hearth(name, how).expect_success();
            assert!(!private.exists(), "{how:?} leaves nothing outside of the cluster's folder");
        }
    }
}
