//! Files that programs under `hearth run` map shared: they go through the mount of the node, and what such programs rely on
//! holds beside all that the library does. Needs root and `/dev/fuse`, but for what is told without a mount.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, can_mount, limited};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

const PYTHON: &str = "/usr/bin/python3";
const SHARED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/maps/shared.py");
const WAL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/maps/wal.py");

/// A node with its mount, if there can be one.
fn mounted() -> Option<Node> {
    can_mount().then(|| {
        let node = Node::up();
        node.hearth(&["mount"]).expect_success();
        node
    })
}

fn end(node: &Node) {
    node.hearth(&["umount"]).expect_success();
    node.hearth(&["down"]).expect_success();
    node.check();
}

/// A program of this folder's.
fn compiled(node: &Node, name: &str) -> String {
    let program = format!("{}/{name}", node.dir());
    let source = format!("{}/tests/maps/{name}.c", env!("CARGO_MANIFEST_DIR"));
    limited(&["cc"], &["-O1", "-w", "-o", &program, &source]).expect_success();
    program
}

/// The commands of programs that create their ring by system calls of their own: in a library with which the program is
/// linked, in one that it loads later, in one that it loads from the tree, and in the program itself.
fn programs_with_inline_calls(node: &Node) -> [Vec<String>; 4] {
    let source = |name: &str| format!("{}/tests/maps/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let (library, of_tree) = (format!("{}/liburing.so.2", node.dir()), node.path("liburing.so.2"));
    let inline = source("inline");
    let shared = ["-O1", "-shared", "-fPIC", "-Wl,-soname,liburing.so.2", "-o", &library, &inline];
    limited(&["cc"], &shared).expect_success();
    node.sh(&format!("cp {library} {of_tree}")).expect_success();
    let build = |name: &str, with: &[&str]| {
        let program = format!("{}/{name}", node.dir());
        let rings = source("rings");
        let all = [&["-O1", "-w", "-o", &program, &rings], with].concat();
        limited(&["cc"], &all).expect_success();
        vec![program, "io_uring".to_owned(), node.path("")]
    };
    let path = format!("-Wl,-rpath,{}", node.dir());
    let later = build("later", &["-ldl"]);
    [
        build("linked", &["-DINLINE", &library, &path, "-ldl"]),
        [later.clone(), vec![library.clone()]].concat(),
        [later, vec![of_tree]].concat(),
        build("contained", &["-DINLINE", &inline, "-ldl"]),
    ]
}

/// Checks that the script came to its end: it made enough checks, and all of them held as POSIX says.
fn all_right(printed: &str) {
    let asked = printed.strip_suffix(" asked\n").and_then(|asked| asked.parse::<u32>().ok());
    assert!(asked.is_some_and(|asked| asked > 30), "{printed}");
}

#[test]
fn shared_maps_are_what_they_are_on_a_file_system_of_the_kernels() {
    let Some(node) = mounted() else { return };
    let kernel = tempfile::tempdir_in("/dev/shm").unwrap();
    all_right(&limited(&[PYTHON, SHARED], &[kernel.path().to_str().unwrap()]).expect_success());
    let tree = node.path("");
    all_right(&node.hearth(&["run", "--", PYTHON, SHARED, &tree]).expect_success());
    // Elsewhere, where the mount is not.
    let elsewhere = "/hearth-test-elsewhere";
    let run = ["run", "--at", elsewhere, "--", PYTHON, SHARED, elsewhere];
    all_right(&node.hearth(&run).expect_success());
    all_right(&node.sh_mounted(&format!("{PYTHON} {SHARED} $T")).expect_success());
    end(&node);
}

#[test]
fn without_a_mount_a_map_to_be_written_to_is_refused_and_told_once() {
    let node = Node::up();
    let script = "import mmap, os, sys
fd = os.open(sys.argv[1] + '/f', os.O_RDWR | os.O_CREAT)
os.write(fd, b'contents')
for _ in range(2):
    try:
        mmap.mmap(fd, 8)
    except OSError as why:
        print(why.errno)
print(mmap.mmap(os.open(sys.argv[1] + '/f', os.O_RDONLY), 8, prot=mmap.PROT_READ)[:])
";
    let run = node.hearth(&["run", "--", PYTHON, "-c", script, &node.path("")]);
    assert_eq!(
        run.expect_success(),
        format!("{0}\n{0}\nb'contents'\n", rustix::io::Errno::NODEV.raw_os_error())
    );
    let told = String::from_utf8(run.stderr).unwrap();
    let wanted = format!("mount --dir {}", node.dir());
    assert!(told.lines().count() == 1 && told.contains("cannot be mapped shared"), "{told}");
    assert!(told.contains(&wanted), "{told}");
    node.hearth(&["down"]).expect_success();
}

/// A writer of rows, through the library or the mount.
fn writer(node: &Node, library: bool, name: &str, rows: std::ops::Range<u32>) -> Child {
    let acknowledged = format!("{}/acknowledged-{name}", node.dir());
    let (first, last) = (rows.start.to_string(), rows.end.to_string());
    let database = node.path("wal.db");
    let writes = [PYTHON, WAL, &database, name, &first, &last, &acknowledged];
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "120"]);
    if library {
        command.args([&node.program(), "run", "--dir", node.dir(), "--"]);
    }
    command.args(writes).stdin(Stdio::null()).spawn().unwrap()
}

fn acknowledged(node: &Node, name: &str) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("{}/acknowledged-{name}", node.dir())).unwrap_or_default();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

/// Every row that was acknowledged is there, once.
fn compare(node: &Node, names: &[&str]) {
    let query = "pragma integrity_check; select name || ' ' || number from rows";
    let script = format!(
        "import sqlite3\ndb = sqlite3.connect('{}')\nfor query in '''{query}'''.split(';'):\n for row in \
         db.execute(query):\n  print(row[0])",
        node.path("wal.db")
    );
    let printed = node.hearth(&["run", "--", PYTHON, "-c", &script]).expect_success();
    let mut lines = printed.lines();
    assert_eq!(lines.next(), Some("ok"));
    let rows: Vec<&str> = lines.collect();
    let distinct: BTreeSet<&str> = rows.iter().copied().collect();
    assert_eq!(rows.len(), distinct.len(), "a row is there twice");
    for name in names {
        for number in acknowledged(node, name) {
            assert!(distinct.contains(format!("{name} {number}").as_str()), "{name} {number} is lost");
        }
    }
}

fn make_table(node: &Node) {
    node.hearth(&["run", "--", PYTHON, WAL, &node.path("wal.db")]).expect_success();
}

#[test]
fn sqlite_writes_ahead_from_four_processes_two_thousand_rows() {
    let Some(node) = mounted() else { return };
    make_table(&node);
    let names = ["a", "b", "c", "d"];
    let writers: Vec<Child> = names.iter().map(|name| writer(&node, true, name, 0..500)).collect();
    for mut child in writers {
        assert!(child.wait().unwrap().success());
    }
    assert!(names.iter().all(|name| acknowledged(&node, name).len() == 500));
    compare(&node, &names);
    end(&node);
}

#[test]
fn sqlite_writes_ahead_through_both_doors_while_writers_are_killed() {
    let Some(node) = mounted() else { return };
    make_table(&node);
    let mut steady = writer(&node, false, "mount", 0..150);
    let mut other = writer(&node, true, "library", 0..150);
    for round in 0..3 {
        let library = round != 1;
        let mut killed = writer(&node, library, "killed", round * 1000..round * 1000 + 900);
        harness::until("some rows are there", || {
            acknowledged(&node, "killed").len() as u32 >= 15 * (round + 1)
        });
        // `timeout` is not the program: its children are killed by their group.
        let group = rustix::process::Pid::from_child(&killed);
        kill_tree(group.as_raw_nonzero().get());
        killed.wait().unwrap();
    }
    assert!(steady.wait().unwrap().success() && other.wait().unwrap().success());
    compare(&node, &["mount", "library", "killed"]);
    end(&node);
}

/// `kill -9` of a `timeout` and of what it runs.
fn kill_tree(pid: i32) {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    for child in children.split_whitespace() {
        harness::kill(child.parse().unwrap());
    }
}

/// The file system that the kernel has at a path.
fn file_system(path: &str) -> String {
    limited(&["stat", "-f", "-c", "%T"], &[path]).expect_success()
}

#[test]
fn a_node_is_mounted_when_it_starts_unless_that_was_not_chosen() {
    if !can_mount() {
        return;
    }
    // The cluster of the other tests is one that was made with --no-mount.
    let node = Node::up();
    let is_mounted = || std::path::Path::new(&node.path("")).exists();
    let status = || node.hearth(&["status"]).expect_success();
    assert!(!is_mounted() && status().contains("(--no-mount was chosen)"), "{}", status());
    node.hearth(&["down"]).expect_success();
    node.hearth(&["up"]).expect_success();
    assert!(!is_mounted(), "it is remembered");
    assert!(node.hearth(&["up", "--mount"]).expect_success().contains("node 1 is mounted"));
    assert!(is_mounted() && status().contains("  mounted\n"), "{}", status());
    // One tree, for every observer.
    node.sh("echo library > $T/one").expect_success();
    assert_eq!(node.sh_mounted("cat $T/one; echo mount > $T/two").expect_success(), "library\n");
    assert_eq!(node.sh("cat $T/two; ls $T").expect_success(), "mount\none\ntwo\n");
    assert_eq!(file_system(&node.path("")), "fuseblk\n", "as coreutils call it");
    node.hearth(&["up"]).expect_success();
    node.hearth(&["umount"]).expect_success();
    assert!(!is_mounted());
    node.hearth(&["mount"]).expect_success();
    node.hearth(&["down"]).expect_success();
    assert!(!is_mounted(), "down takes it away");
    node.hearth(&["start"]).expect_success();
    assert!(is_mounted(), "it is remembered");
    node.hearth(&["down"]).expect_success();
    node.hearth(&["up", "--no-mount"]).expect_success();
    assert!(!is_mounted());
    node.hearth(&["down"]).expect_success();
    node.check();
}

#[test]
fn rings_work_on_files_that_were_open_before_and_are_opened_later() {
    let Some(node) = mounted() else { return };
    let program = compiled(&node, "rings");
    for kind in ["libaio", "io_uring"] {
        let kernel = tempfile::tempdir_in("/dev/shm").unwrap();
        let there = limited(&[&program, kind], &[kernel.path().to_str().unwrap()]);
        if there.status.code() == Some(2) {
            println!("skipped: needs {kind}");
            continue;
        }
        there.expect_success();
        node.hearth(&["run", "--", &program, kind, &node.path("")]).expect_success();
        node.sh_mounted(&format!("{program} {kind} $T")).expect_success();
    }
    end(&node);
}

#[test]
fn rings_of_programs_with_inline_system_calls_work() {
    let Some(node) = mounted() else { return };
    for command in programs_with_inline_calls(&node) {
        let kernel = tempfile::tempdir_in("/dev/shm").unwrap();
        if !command[3..].iter().any(|library| library.starts_with(&node.path(""))) {
            let mut there: Vec<&str> = command[1..].iter().map(String::as_str).collect();
            there[1] = kernel.path().to_str().unwrap();
            let there = limited(&[&command[0]], &there);
            if there.status.code() == Some(2) {
                println!("skipped: needs io_uring");
                return end(&node);
            }
            there.expect_success();
        }
        let run: Vec<&str> = ["run", "--"].into_iter().chain(command.iter().map(String::as_str)).collect();
        node.hearth(&run).expect_success();
    }
    end(&node);
}

#[test]
fn without_a_mount_a_ring_by_inline_system_calls_is_refused_and_told() {
    let node = Node::up();
    for command in programs_with_inline_calls(&node) {
        let run: Vec<&str> = ["run", "--"].into_iter().chain(command.iter().map(String::as_str)).collect();
        let run = node.hearth(&run);
        let told = String::from_utf8(run.stderr).unwrap();
        assert_eq!(run.status.code(), Some(2), "there is no ring: {command:?} {told}");
        assert!(told.lines().count() == 1 && told.contains("io_uring cannot be used"), "{command:?} {told}");
    }
    node.hearth(&["down"]).expect_success();
}

#[test]
fn without_a_mount_a_ring_is_refused_and_told() {
    let node = Node::up();
    let program = compiled(&node, "rings");
    for (kind, what) in [("io_uring", "io_uring"), ("libaio", "asynchronous IO (libaio)")] {
        let run = node.hearth(&["run", "--", &program, kind, &node.path("")]);
        assert_eq!(run.status.code(), Some(2), "there is no ring");
        let told = String::from_utf8(run.stderr).unwrap();
        let wanted = format!("{what} cannot be used, as the tree is not mounted");
        assert!(told.lines().count() == 1 && told.contains(&wanted), "{told}");
    }
}

/// Whether a command of this machine succeeds; says what is missing if not.
fn has(what: &str, command: &[&str]) -> bool {
    let has = limited(command, &[]).status.success();
    if !has {
        println!("skipped: needs {what}");
    }
    has
}

#[test]
fn lmdb_is_written_by_four_processes() {
    if !has("python3-lmdb", &[PYTHON, "-c", "import lmdb"]) {
        return;
    }
    let Some(node) = mounted() else { return };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/maps/lightning.py");
    let printed = node.hearth(&["run", "--", PYTHON, script, &node.path("")]).expect_success();
    assert_eq!(printed, "[0, 0, 0, 0] 400\n");
    end(&node);
}

#[test]
fn pages_of_a_file_that_grows_while_others_open_it_are_there_and_keep_what_is_stored() {
    let Some(node) = mounted() else { return };
    let program = compiled(&node, "growing");
    let kernel = tempfile::tempdir_in("/dev/shm").unwrap();
    assert_eq!(limited(&[&program], &[kernel.path().to_str().unwrap()]).expect_success(), "0 lost\n");
    let tree = node.path("");
    for how in [&["privately"][..], &[]] {
        let run = [&["run", "--", &program, &tree], how].concat();
        assert_eq!(node.hearth(&run).expect_success(), "0 lost\n", "{how:?}");
    }
    node.sh_mounted(&format!("{program} $T")).expect_success();
    end(&node);
}

#[test]
fn the_last_byte_that_a_map_has_changed_stays_when_others_open_the_file() {
    let Some(node) = mounted() else { return };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/maps/last_byte.py");
    let kernel = tempfile::tempdir_in("/dev/shm").unwrap();
    let there = kernel.path().to_str().unwrap();
    assert_eq!(limited(&[PYTHON, script], &[there]).expect_success(), "kept\n");
    assert_eq!(node.hearth(&["run", "--", PYTHON, script, &node.path("")]).expect_success(), "kept\n");
    node.sh_mounted(&format!("rm $T/last-*; {PYTHON} {script} $T")).expect_success();
    end(&node);
}

#[test]
fn the_last_page_of_a_file_that_grows_is_there_for_those_that_open_and_map_it() {
    let Some(node) = mounted() else { return };
    let program = compiled(&node, "extended");
    for (number, maps_by_library) in [false, true, false, true].into_iter().enumerate() {
        let file = node.path(&format!("extended-{number}"));
        let counter = format!("{}/counter-{number}", node.dir());
        let appends = ["run", "--dir", node.dir(), "--", &program, &file, &counter, "appends"];
        let mut appender = Command::new(node.program()).args(appends).stdin(Stdio::null()).spawn().unwrap();
        let maps = format!("{program} {file} {counter} maps");
        let printed = if maps_by_library { node.sh(&maps) } else { node.sh_mounted(&maps) };
        assert_eq!(printed.expect_success(), "", "by library: {maps_by_library}");
        assert!(appender.wait().unwrap().success());
    }
    end(&node);
}

#[test]
fn java_maps_a_file_to_write_to_it() {
    if !has("javac", &["javac", "-version"]) {
        return;
    }
    let Some(node) = mounted() else { return };
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/maps/Maps.java");
    limited(&["javac", "-d", node.dir()], &[source]).expect_success();
    let run = ["run", "--", "java", "-Xshare:auto", "-cp", node.dir(), "Maps", &node.path("java")];
    assert_eq!(node.hearth(&run).expect_success(), "1000\n77\n524288\n");
    end(&node);
}

#[test]
fn a_process_in_another_root_maps_and_one_whose_mount_is_taken_away_goes_on_by_the_library() {
    let Some(node) = mounted() else { return };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/maps/elsewhere.py");
    let program = node.program();
    let umount = ["env", "LD_PRELOAD=", &program, "umount", "--force", "--dir", node.dir()];
    let tree = node.path("");
    let run = [&["run", "--", PYTHON, script, &tree][..], &umount].concat();
    let printed = node.hearth(&run).expect_success();
    assert_eq!(printed, "0 behind the root\nwithin the root 7 15\nENODEV\n");
    node.hearth(&["down"]).expect_success();
    node.check();
}

#[test]
fn sockets_and_pipes_are_reached_at_the_mount() {
    let Some(node) = mounted() else { return };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/maps/special.py");
    let kernel = tempfile::tempdir_in("/dev/shm").unwrap();
    let there = kernel.path().to_str().unwrap();
    assert_eq!(limited(&[PYTHON, script], &[there]).expect_success(), "all\n");
    assert_eq!(node.hearth(&["run", "--", PYTHON, script, &node.path("")]).expect_success(), "all\n");
    end(&node);
}

/// A program that waits for an answer of its mount ends only after the process that serves it.
#[test]
fn a_hard_end_of_a_node_ends_programs_that_wait_for_its_mount() {
    let Some(node) = mounted() else { return };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/maps/syncing.py");
    let mut program = Command::new("timeout");
    program.args(["60", &node.program(), "run", "--dir", node.dir(), "--", PYTHON, script, &node.path("")]);
    let mut program = program.stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(program.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "begun\n");
    node.hearth(&["down", "--hard"]).expect_success();
    assert!(!program.wait().unwrap().success(), "it was killed");
}
