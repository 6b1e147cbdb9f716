//! The program's messages and exit codes for a node in an unexpected state.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use harness::{Expect, Node, limited};
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output};

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

/// `hearth cluster` asks the manager of several nodes, `hearth status` the nodes: each names the other where it has nothing to ask.
#[test]
fn the_manager_and_the_nodes_are_not_taken_for_each_other() {
    let node = Node::of_mib(64);
    let asked = limited(&[&node.program(), "cluster", "status", "--dir"], &[node.dir()]);
    assert!(errors(&asked).contains("hearth status"), "{}", errors(&asked));
    let alone = tempfile::tempdir().unwrap();
    fs::create_dir(alone.path().join("manager")).unwrap();
    let asked = limited(&[&node.program(), "status", "--dir"], &[alone.path().to_str().unwrap()]);
    assert!(errors(&asked).contains("hearth cluster status"), "{}", errors(&asked));
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
    let gateway = fs::read_to_string(format!("{}/node-1/gateway.pid", node.dir())).unwrap();
    let named = format!("  the mount, process {}: update log of ", gateway.split(' ').next().unwrap());
    let said = String::from_utf8(node.hearth(&["status"]).stdout).unwrap();
    assert!(said.contains(&named), "{named} in {said}");
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

/// The commands that a program under `hearth run` starts do not use the library themselves.
#[test]
fn a_mount_is_made_and_taken_away_from_a_program_of_the_tree() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::up();
    let script = "for _ in 1 2; do $HEARTH mount --dir $DIR && $HEARTH umount --force --dir $DIR || exit 1; done; echo $?";
    let script = script.replace("$HEARTH", &node.program()).replace("$DIR", node.dir());
    let output = node.hearth(&["run", "--", "sh", "-c", &script]);
    output.expect_success();
    node.hearth(&["down"]).expect_success();
    let start = format!("{} start --dir {}", node.program(), node.dir());
    node.hearth(&["run", "--", "sh", "-c", &start]).expect_success();
    assert_eq!(node.sh("echo kept > $T/file; cat $T/file").expect_success(), "kept\n");
    let mapped = fs::read_to_string(format!("/proc/{}/maps", node.daemon())).unwrap();
    assert!(!mapped.contains("libhearth"), "a daemon does not use the library");
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

/// A program that writes at a mount until it is dropped, or a minute is over.
struct MountWriter(Child, String);

impl MountWriter {
    fn begin(node: &Node) -> Self {
        let goes_on = format!("{}/writes", node.dir());
        fs::write(&goes_on, "").unwrap();
        let script = "cd \"$1\" && exec 2>/dev/null && while [ -e \"$2\" ]; do echo more > file && echo more > other; done";
        let mut writer = Command::new("timeout");
        writer.args(["60", "bash", "-c", script, "writer", &node.path(""), &goes_on]);
        let writer = Self(writer.spawn().unwrap(), goes_on);
        harness::until("the program writes", || Path::new(&node.path("other")).exists());
        writer
    }
}

impl Drop for MountWriter {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.1);
        self.0.wait().unwrap();
    }
}

/// The process that a file of the node names.
fn process_of(node: &Node, file: &str) -> i32 {
    let named = fs::read_to_string(format!("{}/node-1/{file}", node.dir())).unwrap();
    named.split(' ').next().unwrap().parse().unwrap()
}

/// The gateway gives up its log as soon as it has noticed the end of the daemon, and waits for another daemon then.
#[test]
fn a_hard_end_takes_a_mount_away_at_which_a_program_writes() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::up();
    let up = node.hearth(&["up", "--mount"]);
    assert!(up.expect_success().contains("is mounted, for every program"));
    let writer = MountWriter::begin(&node);
    for _ in 0..2 {
        let gateway = process_of(&node, "gateway.pid");
        let down = node.hearth(&["down", "--hard"]);
        if !down.status.success() {
            // Else the calls of the writer, and of the removal of the folder, would wait for it.
            harness::kill(gateway);
        }
        assert_eq!(errors(&down), "");
        down.expect_success();
        // A zombie has no memory; its parent may not have asked for its end.
        let runs =
            fs::read_to_string(format!("/proc/{gateway}/status")).is_ok_and(|has| has.contains("VmRSS"));
        assert!(!runs, "the gateway has not ended");
        let lock = format!("{}/node-1/mount.lock", node.dir());
        limited(&["flock", "--nonblock", &lock, "true"], &[]).expect_success();
        assert!(!fs::read_to_string("/proc/self/mounts").unwrap().contains(node.dir()));
        assert!(!node.dir.path().join("n1").exists());
        let up = node.hearth(&["up"]);
        assert!(up.expect_success().contains("is mounted, for every program"), "{}", errors(&up));
        assert_eq!(json(&node.hearth(&["status", "--json"]))["mount"], "tree");
        node.sh_mounted("echo there > $T/file; cat $T/file").expect_success();
    }
    drop(writer);
}

#[test]
fn a_mount_that_is_about_to_end_is_not_taken_for_one_that_stays() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::up();
    node.hearth(&["up", "--mount"]).expect_success();
    let writer = MountWriter::begin(&node);
    for file in ["keeper.pid", "serve.pid"] {
        harness::kill(process_of(&node, file));
    }
    // The gateway has calls to answer, which wait for another daemon.
    let gateway = process_of(&node, "gateway.pid");
    limited(&["kill", &gateway.to_string()], &[]).expect_success();
    let up = node.hearth(&["up"]);
    assert!(up.expect_success().contains("is mounted, for every program"), "{}", errors(&up));
    assert_ne!(process_of(&node, "gateway.pid"), gateway);
    drop(writer);
    assert_eq!(node.sh_mounted("echo there > $T/third; cat $T/third").expect_success(), "there\n");
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

/// A program with another loader, whose name is no longer.
fn with_loader(program: &[u8], loader: &[u8]) -> Vec<u8> {
    let glibc = b"/lib64/ld-linux-x86-64.so.2";
    let at = program.windows(glibc.len()).position(|part| part == glibc).unwrap();
    let mut changed = program.to_vec();
    changed[at..at + glibc.len()].fill(0);
    changed[at..at + loader.len()].copy_from_slice(loader);
    changed
}

/// The head of a program for ARM. The kernel does not run it, and a shell that reads it instead ends at its last line.
fn of_another_processor() -> Vec<u8> {
    let mut head = vec![0; 64];
    head[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    head[18] = 183;
    head.extend(b"\nexit 0\n");
    head
}

/// A program that the library does not reach would find nothing where the tree is.
#[test]
fn a_program_that_cannot_see_the_tree_is_told() {
    let node = Node::up();
    let source = node.dir.path().join("program.c");
    // The note of a program that Go's linker has made.
    let go = r#"asm(".pushsection .note.go.buildid,\"a\",@note; .long 4,4,4; .asciz \"Go\\0\"; .long 0; .popsection");"#;
    let text = format!("#ifdef GO\n{go}\n#endif\nint main(void) {{ return 0; }}\n");
    fs::write(&source, text).unwrap();
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
    let go = built("go", "-DGO");
    assert!(said(&go).contains(&format!("{go} is a Go program")), "{}", said(&go));
    assert_eq!(said("true"), "", "found by PATH");
    for (name, contents, why) in [
        ("musl", with_loader(&fs::read(&usual).unwrap(), b"/lib/ld-musl-x86_64.so.1"), "another C library"),
        ("arm", of_another_processor(), "another processor"),
    ] {
        let program = node.dir.path().join(name);
        fs::write(&program, contents).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let said = errors(&node.hearth(&["run", "--", program.to_str().unwrap()]));
        assert!(said.contains(&format!("{} is for {why}", program.display())), "{said}");
    }
    if rustix::process::geteuid().is_root() {
        rustix::fs::chown(&*usual, Some(rustix::fs::Uid::from_raw(1)), None).unwrap();
        fs::set_permissions(&usual, fs::Permissions::from_mode(0o4755)).unwrap();
        assert!(said(&usual).contains("runs as another user"), "{}", said(&usual));
    }
}

/// The file systems by which the kernel shows itself are needed by every program; other folders are hidden with a
/// warning.
#[test]
fn a_tree_in_the_place_of_a_file_system_of_the_kernel_is_refused() {
    let node = Node::up();
    let run = |at: &str| node.hearth(&["run", "--at", at, "--", "true"]);
    for at in ["/proc", "/proc/", "/proc/self/there", "/sys", "/sys/kernel", "/dev", "/dev/pts"] {
        let refused = run(at);
        refused.expect_failure("a file system of the kernel");
        assert_eq!(refused.status.code(), Some(2), "{at}");
    }
    let link = node.dir.path().join("link");
    std::os::unix::fs::symlink("/proc", &link).unwrap();
    run(link.to_str().unwrap()).expect_failure("a file system of the kernel");
    for at in ["/dev/shm/there", "/there", "/there/proc", "/etc"] {
        run(at).expect_success();
    }
}

/// A program sees one tree.
#[test]
fn a_run_within_another_says_which_tree_is_not_seen() {
    let (one, two) = (Node::of_mib(64), Node::of_mib(64));
    one.sh("echo outer > $T/file").expect_success();
    two.sh("echo inner > $T/file").expect_success();
    let within = |node: &Node, rest: &[&str]| {
        let inner = [node.program(), "run".into(), "--dir".into(), node.dir().into(), "--".into()];
        let inner: Vec<&str> = inner.iter().map(String::as_str).collect();
        one.hearth(&[&["run", "--"], &inner[..], rest].concat())
    };
    let other = within(&two, &["cat", &two.path("file")]);
    let sentence = format!("the program does not see the tree at {}", one.path("").trim_end_matches('/'));
    assert!(errors(&other).contains(&sentence), "{}", errors(&other));
    assert_eq!(other.expect_success(), "inner\n");
    let same = within(&one, &["cat", &one.path("file")]);
    assert_eq!(errors(&same), "");
    assert_eq!(same.expect_success(), "outer\n");
}

#[test]
fn a_hint_can_be_typed_as_it_is_also_for_a_folder_with_spaces() {
    let above = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
    let dir = above.path().join("my 'own' cluster");
    let program = env!("CARGO_BIN_EXE_hearth");
    let hearth = |rest: &[&str]| limited(&[program, rest[0], "--dir", dir.to_str().unwrap()], &rest[1..]);
    let typed = |text: &str, from: &str| {
        let hint = text.split_once(from).unwrap_or_else(|| panic!("{from} in {text}")).1;
        let line = hint.lines().next().unwrap().replace("COMMAND", "true");
        let folder = std::path::Path::new(program).parent().unwrap().display().to_string();
        let output = limited(&["sh", "-c"], &[&format!("PATH={folder}:$PATH\nhearth {line}")]);
        output.expect_success();
    };
    let up = hearth(&["up", "--capacity", "64"]).expect_success();
    typed(&up, "Run programs with: hearth ");
    hearth(&["down"]).expect_success();
    let run = hearth(&["run", "--", "true"]);
    run.expect_success();
    let (_, hint) = errors(&run).split_once("(hearth ").map(|(_, hint)| ((), hint.to_owned())).unwrap();
    typed(&format!("(hearth {}", hint.replace(")\n", "\n")), "(hearth ");
    hearth(&["down", "--hard"]).expect_success();
}

#[test]
fn a_new_cluster_says_how_much_room_it_takes() {
    let above = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
    let dir = above.path().join("cluster");
    let up = || {
        limited(
            &[env!("CARGO_BIN_EXE_hearth"), "up", "--no-mount", "--dir", dir.to_str().unwrap()],
            &["--capacity", "64"],
        )
    };
    let said = up().expect_success();
    let pool = dir.join("node-1/pool");
    let du = limited(&["du", "-s", "--block-size=1M"], &[pool.to_str().unwrap()]).expect_success();
    let mib: u64 = du.split_whitespace().next().unwrap().parse().unwrap();
    let line = said.lines().find(|line| line.contains("MiB")).unwrap();
    assert!(line.contains("may hold 64 MiB of data"), "{line}");
    let (_, taken) = line.split_once(" takes ").unwrap();
    let taken: u64 = taken.split(' ').next().unwrap().parse().unwrap();
    // Logs for the next programs come and go.
    assert!(taken > 0 && taken.abs_diff(mib) <= 128, "{taken} and {mib}");
    assert!(!up().expect_success().contains("MiB"), "it is not new any more");
    limited(&[env!("CARGO_BIN_EXE_hearth"), "down", "--hard", "--dir", dir.to_str().unwrap()], &[])
        .expect_success();
}

/// A folder where any user may run the program, and may make a cluster.
fn folder_of_all_users() -> (tempfile::TempDir, String) {
    let folder = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let hearth = folder.path().join("hearth").to_str().unwrap().to_owned();
    // By a child: one that is being started for another test would have the copy open for writing.
    limited(&["cp", env!("CARGO_BIN_EXE_hearth")], &[&hearth]).expect_success();
    (folder, hearth)
}

#[test]
fn a_mount_of_an_ordinary_user_without_its_tool_says_what_to_install() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let (folder, hearth) = folder_of_all_users();
    let dir = folder.path().join("cluster").to_str().unwrap().to_owned();
    let as_user = |command: &str, rest: &[&str]| {
        let user =
            ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", "env", "PATH=/nowhere"];
        limited(&[&user[..], &[&hearth, command, "--dir", &dir]].concat(), rest)
    };
    as_user("up", &["--capacity", "64"]).expect_success();
    let mount = as_user("mount", &[]);
    as_user("down", &[]).expect_success();
    mount.expect_failure("fusermount3 is not installed: install the package fuse3, or mount as root");
    assert_eq!(errors(&mount).lines().count(), 1, "{}", errors(&mount));
}

/// Another user, who knows the name of a folder in /tmp beforehand, would be asked in the daemon's place.
#[test]
fn a_folder_of_another_user_is_no_place_for_the_socket() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let above = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
    let runtime = above.path().join("runtime");
    fs::create_dir(&runtime).unwrap();
    let dir = above.path().join("a-name-so-long-that-no-socket-may-have-it-in-its-path".repeat(2));
    let hearth = |command: &str, rest: &[&str]| {
        let runtime = format!("XDG_RUNTIME_DIR={}", runtime.display());
        let program =
            ["env", &runtime, env!("CARGO_BIN_EXE_hearth"), command, "--dir", dir.to_str().unwrap()];
        limited(&program, rest)
    };
    hearth("up", &["--no-mount", "--capacity", "64"]).expect_success();
    let private = fs::read_dir(&runtime).unwrap().next().unwrap().unwrap().path();
    hearth("down", &[]).expect_success();
    assert_eq!(fs::read_dir(&runtime).unwrap().count(), 0);
    fs::create_dir(&private).unwrap();
    rustix::fs::chown(&private, Some(rustix::fs::Uid::from_raw(12345)), None).unwrap();
    hearth("start", &[]).expect_failure("belongs to another user");
    fs::remove_dir(&private).unwrap();
    std::os::unix::fs::symlink(above.path(), &private).unwrap();
    hearth("start", &[]).expect_failure("belongs to another user");
    fs::remove_file(&private).unwrap();
    hearth("start", &[]).expect_success();
    hearth("down", &[]).expect_success();
}

/// `hearth COMMAND` in a shell with limits or in a folder of its own.
fn shell(script: &str, folder: &std::path::Path) -> std::process::Output {
    let script = format!("hearth={} dir={}\n{script}", env!("CARGO_BIN_EXE_hearth"), folder.display());
    limited(&["bash", "-c"], &[&script])
}

#[test]
fn a_folder_without_a_pool_stays_as_it_is() {
    let folder = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
    for command in ["check", "inspect"] {
        shell(&format!("$hearth {command} $dir"), folder.path()).expect_failure("there is no pool in");
        assert!(fs::read_dir(folder.path()).unwrap().next().is_none(), "{command}");
    }
}

#[test]
fn a_start_that_fails_names_the_limit_of_its_process() {
    for (limit, named) in [
        ("-f 0", "the limit on file sizes of this process is 0 bytes"),
        ("-f 5000", "5000 KiB for a file (ulimit -f)"),
        ("-n 12", "12 descriptors (ulimit -n)"),
        ("-n 16", "16 descriptors (ulimit -n)"),
        ("-n 64", "64 descriptors (ulimit -n)"),
        ("-v 50000", "50000 KiB of address space (ulimit -v)"),
        ("-v 1000000", "1000000 KiB of address space (ulimit -v)"),
    ] {
        let folder = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
        let script = format!("ulimit {limit}; $hearth up --no-mount --capacity 64 --dir $dir/c");
        shell(&script, folder.path()).expect_failure(named);
        assert!(!folder.path().join("c").exists(), "{limit}: nothing is left");
    }
}

/// Limits that a process may raise do not count: those of its node are as high as they may be.
#[test]
fn a_start_raises_the_limits_that_it_may_raise() {
    let folder = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
    let hard = shell("ulimit -Hn", folder.path()).expect_success();
    let script = "ulimit -Sn 64; ulimit -Sv 1000000
        trap '$hearth down --dir $dir/c --hard >/dev/null' EXIT
        $hearth up --no-mount --medium memory --capacity 64 --dir $dir/c >/dev/null || exit 1
        read pid rest < $dir/c/node-1/serve.pid
        awk '/Max open files/ { print $4 } /Max address space/ { print $4 }' /proc/$pid/limits";
    let found = shell(script, folder.path()).expect_success();
    let found: Vec<&str> = found.lines().collect();
    assert!(found.contains(&hard.trim()) && !found.contains(&"1024000000"), "{found:?}");
}

#[test]
fn a_path_at_which_no_cluster_can_be_is_named() {
    let folder = tempfile::Builder::new().prefix("hearth-test-").tempdir_in("/dev/shm").unwrap();
    let up = "$hearth up --no-mount --capacity 64 --dir";
    shell(&format!("{up} $dir/$'a\\xff'"), folder.path()).expect_failure("has to be UTF-8");
    shell(&format!("ln -s nowhere $dir/link; {up} $dir/link"), folder.path())
        .expect_failure("link is a symbolic link to nowhere, which does not exist");
    let names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["link"]);
}

#[test]
fn a_folder_in_the_place_of_a_pool_file_is_named() {
    let node = Node::of_mib(64);
    node.hearth(&["down"]).expect_success();
    let pool = fs::canonicalize(node.dir.path().join("node-1/pool")).unwrap();
    fs::rename(pool.join("tree"), pool.join("kept")).unwrap();
    fs::create_dir(pool.join("tree")).unwrap();
    let named = format!("{} is a folder, in the place of a file", pool.join("tree").display());
    node.hearth(&["up"]).expect_failure(&named);
    limited(&[env!("CARGO_BIN_EXE_hearth"), "check"], &[pool.to_str().unwrap()]).expect_failure(&named);
}
