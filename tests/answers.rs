//! The answers of calls, through the library and through the mount, beside those of the kernel's own file system in
//! memory: each case of `answers/calls.c` prints the answers to its calls, and has to print the same everywhere, except
//! for the lines that a test names.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, limited};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// The program of the cases, compiled once.
fn program() -> String {
    static DONE: OnceLock<String> = OnceLock::new();
    DONE.get_or_init(|| compiled("calls")).clone()
}

/// The program of the calls by users, compiled once: its runs execute it again, by its path.
fn program_of_users() -> String {
    static DONE: OnceLock<String> = OnceLock::new();
    DONE.get_or_init(|| compiled("users")).clone()
}

/// A program of `answers`, compiled.
fn compiled(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("answers-{name}"));
    let fresh = path.with_extension(std::process::id().to_string());
    let source = format!("{}/tests/answers/{name}.c", env!("CARGO_MANIFEST_DIR"));
    limited(&["cc"], &["-O1", "-w", "-o", fresh.to_str().unwrap(), &source]).expect_success();
    std::fs::rename(fresh, &path).unwrap();
    path.to_str().unwrap().to_owned()
}

fn printed(door: &str, output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{door}: {}\nstdout: {out}\nstderr: {err}", output.status);
    assert!(err.is_empty(), "{door}: {err}");
    out.into_owned()
}

/// The output of a case on a file system of the kernel.
fn on_tmpfs(case: &str) -> String {
    let folder = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
    printed("tmpfs", &limited(&[&program(), case], &[folder.path().to_str().unwrap()]))
}

/// Lines that differ, as pairs: the answer of the file system in memory, and ours.
type Own<'a> = &'a [(&'a str, &'a str)];

/// Compares line by line; each difference has to be among the named ones, and each of those has to occur.
fn compare(case: &str, door: &str, theirs: &str, ours: &str, own: Own<'_>) {
    let mut wrong = Vec::new();
    let mut met = vec![false; own.len()];
    let (mut one, mut other) = (theirs.lines(), ours.lines());
    loop {
        let (theirs, ours) = (one.next(), other.next());
        if theirs.is_none() && ours.is_none() {
            break;
        }
        if theirs == ours {
            continue;
        }
        let pair = (theirs.unwrap_or("(nothing)"), ours.unwrap_or("(nothing)"));
        match own.iter().position(|own| *own == pair) {
            Some(index) => met[index] = true,
            None => wrong.push(format!("Linux: {}\n{door}: {}", pair.0, pair.1)),
        }
    }
    let unmet = own.iter().zip(met).filter(|(_, met)| !met).map(|(own, _)| format!("not met: {own:?}"));
    wrong.extend(unmet);
    assert!(wrong.is_empty(), "{case}, {door}:\n{}", wrong.join("\n"));
}

/// Plays cases through the library, through the mount and on the kernel's file system in memory.
fn same(cases: &[&str]) {
    for case in cases {
        same_but(case, &[], &[]);
    }
}

/// The same, but for the own answers of the library and of the mount.
fn same_but(case: &str, library: Own<'_>, mount: Own<'_>) {
    as_expected(case, &on_tmpfs(case), library, Some(mount));
}

/// The same beside what a case is known to print; through the mount only if its own answers are given.
fn as_expected(case: &str, expected: &str, library: Own<'_>, mount: Option<Own<'_>>) {
    let node = Node::up();
    // Programs become other users, who have to come as far as the tree.
    std::fs::set_permissions(node.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let folder = node.path(case);
    node.sh(&format!("mkdir -m 777 {folder}")).expect_success();
    let output = node.hearth(&["run", "--", &program(), case, &folder]);
    compare(case, "library", expected, &printed("library", &output), library);
    node.sh(&format!("rm -r {folder}")).expect_success();
    if let Some(own) = mount.filter(|_| harness::can_mount()) {
        node.hearth(&["mount"]).expect_success();
        node.sh_mounted(&format!("mkdir -m 777 {folder}")).expect_success();
        let output = limited(&[&program(), case], &[&folder]);
        compare(case, "mount", expected, &printed("mount", &output), own);
        node.sh_mounted(&format!("rm -r {folder}")).expect_success();
        node.hearth(&["umount"]).expect_success();
    }
    node.hearth(&["down"]).expect_success();
    node.check();
}

#[test]
fn an_empty_path_reads_the_link_that_is_open() {
    same(&["empty_links"]);
}

#[test]
fn locks_of_a_process_end_with_any_descriptor() {
    same(&["locks_end_with_any_descriptor"]);
}

#[test]
fn locks_of_a_process_end_at_the_exec_that_closes_the_file() {
    same(&["locks_at_exec"]);
}

#[test]
fn a_path_is_no_open_file() {
    same(&["paths_only", "fchdir_asks_for_search"]);
}

#[test]
fn restricted_walks() {
    same(&["restricted_walks"]);
}

#[test]
fn arguments() {
    same(&["arguments", "order_of_errors"]);
}

#[test]
fn writes_without_appending() {
    // The kernel does not tell a mount that a write does not append.
    let appended = ("0xxxx56789", "0123456789xxxx");
    same_but("writes_without_appending", &[], &[appended]);
}

#[test]
fn names_that_are_empty_or_wrong() {
    same(&["order_of_names"]);
}

#[test]
fn watches_of_wrong_descriptors() {
    same(&["watches"]);
}

#[test]
fn descriptors_open_again_by_their_paths() {
    same(&["reopened"]);
}

#[test]
fn names_that_are_links_to_open_files() {
    same(&["names_of_descriptors"]);
}

#[test]
fn requests_to_files() {
    same(&["requests"]);
}

/// At the mount the kernel reads the memory before it asks for the write.
#[test]
fn writes_from_memory_that_cannot_be_read() {
    let case = "unreadable_memory";
    as_expected(case, &on_tmpfs(case), &[], None);
}

/// The kernel opens a pipe for a program of the library, at the node's mount.
#[test]
fn pipes_open_again_by_the_paths_of_their_descriptors() {
    if !harness::can_mount() {
        println!("skipped: needs /dev/fuse");
        return;
    }
    let (case, node) = ("reopened_pipes", Node::up());
    let folder = node.path(case);
    node.hearth(&["mount"]).expect_success();
    node.sh(&format!("mkdir {folder}")).expect_success();
    let output = node.hearth(&["run", "--", &program(), case, &folder]);
    compare(case, "library", &on_tmpfs(case), &printed("library", &output), &[]);
    node.hearth(&["umount"]).expect_success();
    node.hearth(&["down"]).expect_success();
    node.check();
}

#[test]
fn few_descriptors() {
    same(&["few_descriptors", "few_from_the_start", "few_for_good"]);
}

#[test]
fn limit_of_file_size() {
    same(&["limit_of_file_size"]);
}

#[test]
fn files_without_a_name() {
    same(&["unnamed_files"]);
}

#[test]
fn links_by_users_who_did_not_open_or_do_not_own_the_file() {
    same(&["links_of_open_files", "links_of_others_files"]);
}

#[test]
fn shared_directories() {
    same(&["shared_directories"]);
}

/// The answers of the kernel with `fs.protected_symlinks` 1 and `fs.protected_regular` 2.
const PROTECTED: &str = include_str!("answers/protected.txt");

/// The settings belong to the whole machine, so the test puts others in their place for the program alone.
#[test]
fn shared_directories_as_the_settings_say() {
    let root = rustix::process::geteuid().is_root();
    if !root || !limited(&["unshare", "-m", "--propagation", "unchanged", "true"], &[]).status.success() {
        println!("skipped: needs root and unshare");
        return;
    }
    let node = Node::up();
    std::fs::set_permissions(node.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let folder = node.path("protected");
    node.sh(&format!("mkdir -m 777 {folder}")).expect_success();
    let script = format!(
        "mount --make-rprivate /; cd {dir}; echo 1 > one; echo 2 > two
        mount --bind one /proc/sys/fs/protected_symlinks
        mount --bind two /proc/sys/fs/protected_regular
        exec {hearth} run --dir {dir} -- {program} shared_directories {folder}",
        dir = node.dir(),
        hearth = node.program(),
        program = program()
    );
    let output = limited(&["unshare", "-m", "--propagation", "unchanged", "sh", "-ec"], &[&script]);
    compare("shared_directories", "library", PROTECTED, &printed("library", &output), &[]);
    node.hearth(&["down"]).expect_success();
    node.check();
}

#[test]
fn whiteouts() {
    // The kernel opens no device on a mount without the option.
    let opened = ("open(\"a\", O_RDONLY): ENXIO", "open(\"a\", O_RDONLY): EACCES");
    same_but("whiteouts", &[], &[opened]);
}

#[test]
fn copies() {
    same(&["copies"]);
}

/// A program that Python reads from its standard input imports from the working directory, which it asks for as a link that
/// has an empty name.
#[test]
fn python_imports_from_the_working_directory() {
    let node = Node::up();
    let script =
        "cd $T; echo 'value = 7' > beside.py; echo 'import beside; print(beside.value)' | /usr/bin/python3 -";
    assert_eq!(node.sh(script).expect_success(), "7\n");
    node.hearth(&["down"]).expect_success();
    node.check();
}

/// Runs a case on a node's tree, through the mount or the library.
fn start(node: &Node, mounted: bool, case: &str, folder: &str) -> std::process::Child {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "60"]);
    if !mounted {
        command.args([&node.program(), "run", "--dir", node.dir(), "--"]);
    }
    command.args([&program(), case, folder]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// A name that always exists is found, whatever is renamed over it meanwhile.
fn meet(node: &Node, doors: &[(bool, bool)]) {
    for (renamer, caller) in doors {
        let folder = node.path(&format!("{renamer}-{caller}"));
        node.sh(&format!("mkdir {folder}; echo text > {folder}/always")).expect_success();
        let renames = start(node, *renamer, "renames_over", &folder);
        let meets = start(node, *caller, "meets_renames", &folder).wait_with_output().unwrap();
        node.sh(&format!("touch {folder}/enough")).expect_success();
        let renames = renames.wait_with_output().unwrap();
        assert_eq!(printed("the caller", &meets), "met\n", "renamer, caller mounted: {renamer}, {caller}");
        assert_eq!(printed("the renamer", &renames), "");
    }
}

#[test]
fn a_name_that_is_renamed_over_is_always_there() {
    let node = Node::up();
    meet(&node, &[(false, false)]);
    if harness::can_mount() {
        node.hearth(&["mount"]).expect_success();
        meet(&node, &[(true, false), (false, true), (true, true)]);
        node.hearth(&["umount"]).expect_success();
    }
    node.hearth(&["down"]).expect_success();
    node.check();
}

#[test]
fn holes_are_no_blocks() {
    same(&["blocks"]);
}

/// Also after one that fails, other programs find space.
#[test]
fn large_ranges_are_reserved() {
    same(&["large_allocations"]);
}

/// The kernel's file system in memory has no such mode: this is what its others print.
const ZEROED: &str = "\
fallocate(fd, FALLOC_FL_ZERO_RANGE, 1000, 5000): 0
pread(fd, got, sizeof got, 0): 10000
wrong: 0
fallocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, 9000, 5000): 0
(fstat(fd, &status), status.st_size): 10000
fallocate(fd, FALLOC_FL_ZERO_RANGE, 9000, 5000): 0
(fstat(fd, &status), status.st_size): 14000
pread(fd, got, sizeof got, 0): 14000
wrong: 0
fallocate(fd, FALLOC_FL_ZERO_RANGE, 0, 0): EINVAL
fallocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_PUNCH_HOLE, 0, 10): EOPNOTSUPP
fallocate(open(\"f\", O_RDONLY), FALLOC_FL_ZERO_RANGE, 0, 10): EBADF
";

#[test]
fn ranges_are_zeroed() {
    as_expected("zeroed_ranges", ZEROED, &[], Some(&[]));
}

/// Plays a case of calls by users of all kinds, through the library, perhaps the mount, and on the kernel's file system in
/// memory.
fn same_for_users(case: &str, more: &[&str], mounts: bool) {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let node = Node::of_mib(1024);
    std::fs::set_permissions(node.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    // Where every user may execute it.
    let users = node.dir.path().join("users");
    std::fs::copy(program_of_users(), &users).unwrap();
    let users = users.to_str().unwrap();
    let memory = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
    let play = |before: &[&str], folder: &str| limited(&[before, &[users, case, folder], more].concat(), &[]);
    let expected = printed("tmpfs", &play(&[], memory.path().to_str().unwrap()));
    let folder = node.path(case);
    node.sh(&format!("mkdir -m 777 {folder}")).expect_success();
    let output = play(&[&node.program(), "run", "--dir", node.dir(), "--"], &folder);
    compare(case, "library", &expected, &printed("library", &output), &[]);
    node.sh(&format!("rm -r {folder}")).expect_success();
    if mounts && harness::can_mount() {
        node.hearth(&["mount"]).expect_success();
        node.sh_mounted(&format!("mkdir -m 777 {folder}")).expect_success();
        compare(case, "mount", &expected, &printed("mount", &play(&[], &folder)), &[]);
        node.hearth(&["umount"]).expect_success();
    }
    node.hearth(&["down"]).expect_success();
    node.check();
}

#[test]
fn users_and_files_of_others() {
    same_for_users("files", &[], true);
}

#[test]
fn users_and_directories_of_others() {
    same_for_users("few_directories", &[], true);
}

#[test]
fn programs_of_other_users() {
    same_for_users("files", &["exec"], false);
    same_for_users("few_directories", &["exec"], false);
}

/// Answers of the library to walks without links that leave the tree.
const WITHOUT_LINKS: [(&str, &str); 2] = [
    (
        "open2(root, \"../outside\", O_RDONLY, RESOLVE_NO_SYMLINKS): 0",
        "open2(root, \"../outside\", O_RDONLY, RESOLVE_NO_SYMLINKS): ENOSYS",
    ),
    (
        "open2(AT_FDCWD, \"../n1/f\", O_RDONLY, RESOLVE_NO_SYMLINKS): 0",
        "open2(AT_FDCWD, \"../n1/f\", O_RDONLY, RESOLVE_NO_SYMLINKS): ENOSYS",
    ),
];

/// The same for a walk that begins outside, while the kernel does not know the tree.
const FROM_OUTSIDE: (&str, &str) = (
    "open2(up, \"n1/up/outside\", O_RDONLY, RESOLVE_NO_SYMLINKS): ELOOP",
    "open2(up, \"n1/up/outside\", O_RDONLY, RESOLVE_NO_SYMLINKS): ENOENT",
);

/// Beside a file system in memory that is mounted in a folder of another one.
#[test]
fn out_of_the_root_of_the_tree_and_back() {
    let root = rustix::process::geteuid().is_root();
    if !root || !limited(&["unshare", "-m", "--propagation", "unchanged", "true"], &[]).status.success() {
        println!("skipped: needs root and unshare");
        return;
    }
    let memory = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
    let script = format!(
        "cd {dir}; mount -t tmpfs none {dir}; mkdir {dir}/n1; mount -t tmpfs none {dir}/n1
        chmod 755 {dir} {dir}/n1; exec {program} borders {dir}/n1",
        dir = memory.path().to_str().unwrap(),
        program = program()
    );
    let expected = printed("tmpfs", &limited(&["unshare", "-m", "sh", "-ec"], &[&script]));
    let node = Node::up();
    std::fs::set_permissions(node.dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let tree = node.path("");
    let tree = tree.trim_end_matches('/');
    let by_library = |own: Own<'_>| {
        let output = node.hearth(&["run", "--", &program(), "borders", tree]);
        compare("borders", "library", &expected, &printed("library", &output), own);
        node.sh(&format!("find {tree} -mindepth 1 -delete")).expect_success();
    };
    by_library(&[WITHOUT_LINKS[0], WITHOUT_LINKS[1], FROM_OUTSIDE]);
    if harness::can_mount() {
        node.hearth(&["mount"]).expect_success();
        by_library(&WITHOUT_LINKS);
        let output = limited(&[&program(), "borders"], &[tree]);
        compare("borders", "mount", &expected, &printed("mount", &output), &[]);
        node.hearth(&["umount"]).expect_success();
    }
    node.hearth(&["down"]).expect_success();
    node.check();
}
