//! Faults end to end: a pool that is full, away, read-only, damaged or of another version, and too few descriptors.
//! Each is reported by an errno or a sentence with an exit code, or is repaired; acknowledged data stays. Nothing
//! hangs: every program has a time limit.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;

use format::BLOCK_BYTES;
use format::envelope::{Envelope, HEADER_BYTES};
use format::ledger::Kind;
use format::superblock::Superblock;
use harness::{Expect, Node, limited, until};
use ipc::{Host, SystemHost, Word};
use rustix::process::{Pid, WaitOptions, waitpid};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use zerocopy::FromBytes;

/// Exit code of a command that could not do what it was asked, or of a node that is down.
const FAILED: Option<i32> = Some(2);

fn pool(node: &Node) -> PathBuf {
    node.dir.path().join("node-1/pool")
}

fn check(node: &Node) -> Output {
    limited(&[env!("CARGO_BIN_EXE_hearth"), "check"], &[pool(node).to_str().unwrap()])
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A node that was taken down in order, with `kept` in its tree.
fn down_with_a_file() -> Node {
    let node = Node::of_mib(64);
    node.sh("echo kept > $T/kept; seq 3000 > $T/numbers").expect_success();
    node.hearth(&["down"]).expect_success();
    node
}

fn kept_is_there(node: &Node) {
    assert_eq!(node.sh("cat $T/kept").expect_success(), "kept\n");
}

/// Does something to a file of the pool, which is told by name at the start and by `check`; afterwards it is as before.
fn spoiled_is_told(node: &Node, name: &str, sentence: &str, spoil: impl FnOnce(&mut Vec<u8>)) {
    let path = pool(node).join(name);
    let whole = fs::read(&path).unwrap();
    let mut bytes = whole.clone();
    spoil(&mut bytes);
    fs::write(&path, &bytes).unwrap();
    let started = node.hearth(&["start"]);
    started.expect_failure(sentence);
    started.expect_failure(name);
    assert_eq!(started.status.code(), FAILED);
    let checked = check(node);
    assert!(!checked.status.success(), "{name}: check finds it too");
    let found = format!("{}{}", String::from_utf8_lossy(&checked.stdout), errors(&checked));
    assert!(found.contains(name), "{name} in: {found}");
    fs::write(&path, &whole).unwrap();
}

#[test]
fn a_full_pool_says_so_and_removing_makes_room() {
    let node = Node::of_mib(64);
    let script = "echo kept > $T/kept; ! head -c 100M /dev/zero > $T/big; cat $T/kept; rm $T/big
        head -c 32M /dev/zero > $T/again; stat -c %s $T/again; rm $T/again";
    let both = |output: Output| {
        assert!(errors(&output).contains("No space left on device"), "{}", errors(&output));
        assert_eq!(output.expect_success(), "kept\n33554432\n");
    };
    both(node.sh(script));
    if harness::can_mount() {
        node.hearth(&["mount"]).expect_success();
        both(node.sh_mounted(script));
        both(node.sh_mounted(script));
        node.hearth(&["umount"]).expect_success();
    }
    both(node.sh(script));
    node.hearth(&["down"]).expect_success();
    node.check();
    node.hearth(&["up"]).expect_success();
    kept_is_there(&node);
}

/// Targets of links stand in the tree: a node of it each.
#[test]
fn a_full_tree_says_so_and_removing_makes_room() {
    let node = Node::of_mib(16);
    let script = r#"cd $T; echo kept > kept; /usr/bin/python3 - <<'X'
import errno, os
made = 0
try:
    while made < 100000: os.symlink("x" * 4000, f"link{made}"); made += 1
except OSError as why: assert why.errno == errno.ENOSPC, why
assert 1000 < made < 100000, made
assert len(os.listdir(".")) == made + 1
for n in range(made): assert len(os.readlink(f"link{n}")) == 4000
for n in range(200): os.unlink(f"link{n}")
for n in range(50): os.symlink("y" * 4000, f"again{n}")
open("file", "w").write("there is room")
X
cat file; echo"#;
    assert_eq!(node.sh(script).expect_success(), "there is room\n");
    node.hearth(&["down"]).expect_success();
    node.check();
    node.hearth(&["up"]).expect_success();
    kept_is_there(&node);
}

#[test]
fn a_program_without_descriptors_is_told() {
    let node = Node::of_mib(64);
    let script = r#"cd $T; echo kept > kept; /usr/bin/python3 - <<'X'
import errno, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
for round in range(3):
    held = []
    try:
        while len(held) < 100: held.append(open("kept"))
    except OSError as why: assert why.errno == errno.EMFILE, why
    assert 0 < len(held) < 40, len(held)
    assert held[-1].read() == "kept\n"
    [file.close() for file in held]
X
# Too few to attach at all: an error that says so, if there are enough for the program itself; and the next one is served.
for n in 3 4 5 6 7 8 9; do ! (ulimit -n $n; exec cat kept) 2> said || echo $n; done
for n in 6 7 8 9; do ! (ulimit -n $n; exec cat kept) 2> said && grep -q 'Too many open files' said || cat said; done"#;
    assert_eq!(node.sh(script).expect_success(), "");
    kept_is_there(&node);
}

#[test]
fn a_daemon_without_descriptors_serves_those_that_it_has() {
    let node = down_with_a_file();
    node.hearth(&["start"]).expect_success();
    // A start under such a limit is refused.
    limited(&["prlimit", "--nofile=48:48", "--pid"], &[&node.daemon().to_string()]).expect_success();
    // The attached program writes more than the present segments can hold.
    let hold = format!(
        "exec 3>> {} && echo held >&3 || exit; echo in; read; printf '%*s' 6000000 >&3 && echo wrote; read",
        node.path("held")
    );
    let begin = || {
        Command::new("timeout")
            .args(["60", env!("CARGO_BIN_EXE_hearth"), "run", "--dir", node.dir(), "--", "bash", "-c", &hold])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut programs: Vec<_> = (0..24).map(|_| begin()).collect();
    let mut said: Vec<_> =
        programs.iter_mut().map(|program| BufReader::new(program.stdout.take().unwrap())).collect();
    // All at once: each step is waited for of all before the next.
    let mut count = |wanted: &str| {
        let lines = said.iter_mut().map(|said| {
            let mut line = String::new();
            said.read_line(&mut line).unwrap();
            line
        });
        lines.filter(|line| line == wanted).count()
    };
    let served = count("in\n");
    assert!(served > 0, "some are served");
    for program in &mut programs {
        // The program that was refused is gone.
        let _ = program.stdin.as_mut().unwrap().write_all(b"\n");
    }
    assert_eq!(count("wrote\n"), served, "who is served goes on being served");
    programs.into_iter().for_each(|mut program| drop(program.wait()));
    let lines = node.sh("wc -l < $T/held").expect_success();
    assert_eq!(lines.trim(), served.to_string(), "who was told that it wrote did, and nobody else");
    let restarts = node.hearth(&["status", "--json"]).expect_success();
    assert!(restarts.replace(' ', "").contains("\"restarts\":0"), "the daemon never stopped: {restarts}");
    kept_is_there(&node);
}

#[test]
fn a_read_only_pool_is_told() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    let node = down_with_a_file();
    let pool = pool(&node);
    let pool = pool.to_str().unwrap();
    limited(&["mount"], &["--bind", pool, pool]).expect_success();
    limited(&["mount"], &["-o", "remount,ro,bind", pool]).expect_success();
    let started = node.hearth(&["start"]);
    limited(&["umount"], &[pool]).expect_success();
    started.expect_failure("Read-only file system");
    assert_eq!(started.status.code(), FAILED);
    node.hearth(&["start"]).expect_success();
    kept_is_there(&node);
}

#[test]
fn a_pool_that_is_away_is_told() {
    let node = down_with_a_file();
    let (pool, aside) = (pool(&node), node.dir.path().join("aside"));
    fs::rename(&pool, &aside).unwrap();
    let started = node.hearth(&["start"]);
    started.expect_failure("is gone");
    started.expect_failure("begin anew");
    assert_eq!(started.status.code(), FAILED);
    assert_eq!(check(&node).status.code(), FAILED);
    fs::rename(&aside, &pool).unwrap();
    node.hearth(&["start"]).expect_success();
    kept_is_there(&node);
}

#[test]
fn damaged_pool_files_are_told_by_name() {
    let node = down_with_a_file();
    for name in ["tree", "ledger", "segment-1"] {
        spoiled_is_told(&node, name, "kind", |bytes| bytes[..8].fill(b'X'));
        spoiled_is_told(&node, name, "checksum", |bytes| bytes[40] ^= 1);
        // A file of a later version.
        spoiled_is_told(&node, name, "version", |bytes| {
            let (mut superblock, _) = Superblock::read_from_prefix(bytes).unwrap();
            superblock.version.set(999);
            let block = superblock.encode();
            bytes[..block.len()].copy_from_slice(&block);
        });
        spoiled_is_told(&node, name, "file_bytes", |bytes| bytes.truncate(8192));
        let (path, aside) = (pool(&node).join(name), node.dir.path().join("aside"));
        fs::rename(&path, &aside).unwrap();
        assert_eq!(node.hearth(&["start"]).status.code(), FAILED, "{name} is missing");
        assert!(!check(&node).status.success(), "{name} is missing");
        fs::rename(&aside, &path).unwrap();
    }
    node.check();
    node.hearth(&["start"]).expect_success();
    kept_is_there(&node);
}

/// A bit in a block that was digested: a read of it gets an error, never other data; the block is whole again when it
/// is written anew.
#[test]
fn a_flipped_bit_in_a_block_is_an_error_and_heals_when_it_is_written() {
    let node = down_with_a_file();
    let path = pool(&node).join("segment-1");
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(6).position(|window| window == b"\n2000\n").unwrap();
    bytes[at + 1] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let checked = check(&node);
    assert_eq!(checked.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&checked.stdout).contains("checksum mismatch"));
    node.hearth(&["start"]).expect_success();
    let read = node.sh("head -n 100 $T/numbers; ! tail -n 2000 $T/numbers; ! cat $T/numbers");
    assert!(errors(&read).contains("Input/output error"), "{}", errors(&read));
    assert!(!read.expect_success().contains("\n3000\n2001"), "other data");
    kept_is_there(&node);
    node.sh("seq 3000 > $T/numbers").expect_success();
    assert_eq!(node.sh("tail -n 1 $T/numbers").expect_success(), "3000\n");
    node.hearth(&["down"]).expect_success();
    node.check();
}

/// A program that writes into a damaged block, and goes on with other files: its write counts, and the block stays an
/// error, which is reported, until it is written whole.
#[test]
fn a_damaged_block_that_is_written_in_part_costs_nothing_else() {
    let node = down_with_a_file();
    let path = pool(&node).join("segment-1");
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(6).position(|window| window == b"\n2000\n").unwrap();
    bytes[at + 1] ^= 1;
    fs::write(&path, &bytes).unwrap();
    node.hearth(&["start"]).expect_success();
    // The block of line 2000 begins before line 1900.
    let line_at = (1..1990).map(|line: u32| line.to_string().len() + 1).sum::<usize>();
    let script = format!(
        "printf X | dd of=$T/numbers bs=1 seek={line_at} conv=notrunc status=none; seq 5 > $T/after; sync"
    );
    node.sh(&script).expect_success();
    node.hearth(&["down"]).expect_success();
    node.hearth(&["start"]).expect_success();
    assert_eq!(node.sh("cat $T/after").expect_success(), "1\n2\n3\n4\n5\n");
    let read = node.sh("! cat $T/numbers >/dev/null");
    assert!(errors(&read).contains("Input/output error"), "{}", errors(&read));
    kept_is_there(&node);
    // The daemon reports damage that a digest finds while the node is up.
    node.sh(&script).expect_success();
    until("the status says it", || {
        let status = node.hearth(&["status"]);
        let said = String::from_utf8_lossy(&status.stdout).into_owned();
        status.status.code() == Some(1) && said.contains("LOST: inode ") && said.contains("4096 bytes from ")
    });
    node.hearth(&["down"]).expect_success();
    assert_eq!(check(&node).status.code(), Some(1));
    node.hearth(&["start"]).expect_success();
    node.sh("seq 3000 > $T/numbers").expect_success();
    node.hearth(&["down"]).expect_success();
    node.check();
}

/// A bit in a record that was not digested when everything died: the records before it are there, whole and in order.
#[test]
fn a_flipped_bit_in_a_log_leaves_a_prefix() {
    // Now and then all or a part was digested before the daemon was killed.
    assert!((0..10).any(|_| a_bit_in_a_log_counts()));
}

fn a_bit_in_a_log_counts() -> bool {
    let node = Node::of_mib(64);
    let script = "for i in $(seq 100 199); do echo \"line $i\" >> $T/lines; done; kill -STOP $$";
    let mut program = Command::new(env!("CARGO_BIN_EXE_hearth"))
        .args(["run", "--dir", node.dir(), "--", "bash", "-ec"])
        .arg(format!("T={}\n{script}", node.path("")))
        .spawn()
        .unwrap();
    waitpid(Some(Pid::from_child(&program)), WaitOptions::UNTRACED).unwrap();
    node.hearth(&["down", "--hard"]).expect_success();
    program.wait().unwrap();
    let mut committed = false;
    for entry in fs::read_dir(pool(&node)).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        let is_log = path.file_name().unwrap().to_str().unwrap().starts_with("log-");
        let found = bytes.windows(8).position(|window| window == b"line 150");
        if let (true, Some(at)) = (is_log, found) {
            bytes[at] ^= 1;
            fs::write(&path, &bytes).unwrap();
            committed = true;
        }
    }
    let checked = check(&node);
    let counts = !checked.status.success();
    assert!(committed || !counts);
    assert_eq!(checked.status.code(), Some(i32::from(counts)));
    assert_eq!(String::from_utf8_lossy(&checked.stdout).contains("wrong: file log-"), counts);
    node.hearth(&["start"]).expect_success();
    let wanted: String = (100..if counts { 150 } else { 200 }).map(|i| format!("line {i}\n")).collect();
    assert_eq!(node.sh("cat $T/lines").expect_success(), wanted);
    node.hearth(&["down"]).expect_success();
    node.check();
    counts
}

/// The ledger's entry of a log, without which nothing says whose the log is: the check finds it, the start says it, and what
/// was fsynced lies in the pool still.
#[test]
fn a_flipped_bit_in_the_ledger_is_told_and_the_log_is_kept() {
    // Now and then everything was digested before the daemon was killed.
    assert!((0..10).any(|_| a_bit_in_the_ledger_counts()));
}

/// Where in the ledger's file the last log's entry begins.
fn last_open_log(ledger: &[u8]) -> usize {
    // The ring begins behind the block with the place of its head.
    let mut at = BLOCK_BYTES;
    let mut found = None;
    while let Ok(envelope) = Envelope::decode(&ledger[at..at + HEADER_BYTES]) {
        if envelope.kind == Kind::OpenLog as u8 {
            found = Some(at);
        }
        at += envelope.frame_bytes() as usize;
    }
    found.expect("a program wrote")
}

/// A node that was killed with 40 files in it that were fsynced; its tree may lack them.
fn killed_with_fsynced_files() -> Node {
    let node = Node::in_memory_as_files();
    let script = r#"exec /usr/bin/python3 - <<'X'
import os, signal
for number in range(40):
    file = os.open(os.environ["T"] + "f%d" % number, os.O_CREAT | os.O_WRONLY)
    os.write(file, b"a line that was fsynced")
    os.fsync(file)
os.kill(os.getpid(), signal.SIGSTOP)
X"#;
    let mut program = Command::new(env!("CARGO_BIN_EXE_hearth"))
        .args(["run", "--dir", node.dir(), "--", "bash", "-ec"])
        .arg(format!("export T={}\n{script}", node.path("")))
        .spawn()
        .unwrap();
    waitpid(Some(Pid::from_child(&program)), WaitOptions::UNTRACED).unwrap();
    node.hearth(&["down", "--hard"]).expect_success();
    program.wait().unwrap();
    node
}

/// The file of a log with fsynced records is removed: the check finds it, and the start says it.
#[test]
fn a_log_that_is_gone_is_told() {
    let node = killed_with_fsynced_files();
    let files = fs::read_dir(pool(&node)).unwrap().map(|entry| entry.unwrap().path());
    let is_log = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        name.starts_with("log-") && !name.ends_with("-locks")
    };
    files.filter(is_log).for_each(|path| fs::remove_file(path).unwrap());
    let checked = check(&node);
    assert_eq!(checked.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&checked.stdout).contains("is missing, or not as it was made"));
    node.hearth(&["start"]).expect_success();
    let status = node.hearth(&["status"]);
    assert_eq!(status.status.code(), Some(1));
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("LOST: log ") && status.contains("its file is missing"), "{status}");
    node.sh("echo kept > $T/kept").expect_success();
    node.hearth(&["down"]).expect_success();
    node.check();
}

fn a_bit_in_the_ledger_counts() -> bool {
    let node = killed_with_fsynced_files();
    let ledger = pool(&node).join("ledger");
    let mut bytes = fs::read(&ledger).unwrap();
    let entry = last_open_log(&bytes);
    bytes[entry + HEADER_BYTES] ^= 1;
    fs::write(&ledger, &bytes).unwrap();
    let checked = check(&node);
    if checked.status.success() {
        node.hearth(&["start"]).expect_success();
        assert_eq!(node.sh("cat $T/f* | wc -c").expect_success().trim(), "920");
        return false;
    }
    assert_eq!(checked.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&checked.stdout).contains("file ledger: the entry after"));
    node.hearth(&["start"]).expect_success();
    let there: usize = node.sh("ls $T | wc -l").expect_success().trim().parse().unwrap();
    if there > 0 {
        // A part was digested before.
        assert_eq!(node.sh("cat $T/f* | wc -c").expect_success().trim(), (there * 23).to_string());
        return false;
    }
    let status = String::from_utf8(node.hearth(&["status"]).stdout).unwrap();
    assert!(status.contains("LOST: the ledger: the entry after"), "{status}");
    let files = fs::read_dir(pool(&node)).unwrap().map(|entry| entry.unwrap().path());
    let kept = files.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("kept-"));
    let holds =
        |path: &PathBuf| fs::read(path).unwrap().windows(8).filter(|at| at == b"a line t").count() == 40;
    assert!(kept.collect::<Vec<_>>().iter().any(holds));
    node.sh("echo kept > $T/kept").expect_success();
    node.hearth(&["down"]).expect_success();
    node.check();
    true
}

/// A file of the pool that is cut off under all who have mapped it: no program is killed by it, and all end.
#[test]
fn a_medium_that_goes_away_under_programs_is_an_error() {
    let node = Node::of_mib(64);
    node.sh("seq 300000 > $T/numbers").expect_success();
    node.hearth(&["down"]).expect_success();
    node.hearth(&["start"]).expect_success();
    let cut = pool(&node).join("segment-1");
    let script = r#"cd $T; /usr/bin/python3 - <<'X'
import errno, os
file = open("numbers", "rb", 0)
assert len(os.pread(file.fileno(), 1 << 20, 0)) == 1 << 20
os.truncate(os.environ["CUT"], 8192)
for offset in range(0, 1 << 20, 1 << 16):
    try: os.pread(file.fileno(), 4096, offset); print("read")
    except OSError as why: print(errno.errorcode[why.errno])
X"#;
    let said = node.sh(&format!("export CUT={}\n{script}", cut.display())).expect_success();
    assert!(said.lines().all(|line| line == "EIO"), "{said}");
    node.hearth(&["down", "--hard"]).expect_success();
    let started = node.hearth(&["start"]);
    started.expect_failure("segment-1");
    assert_eq!(started.status.code(), FAILED);
    assert_eq!(check(&node).status.code(), Some(1));
}

/// A file of the pool that is cut while the daemon runs: the daemon reports the file, and ends where it needs the lost
/// part. So do its keeper, the next one, and the status; acknowledged data is there once the file is whole.
#[test]
fn a_pool_file_cut_under_the_daemon_is_told_by_its_keeper() {
    let node = down_with_a_file();
    node.hearth(&["start"]).expect_success();
    let tree = pool(&node).join("tree");
    let whole = fs::read(&tree).unwrap();
    fs::OpenOptions::new().write(true).open(&tree).unwrap().set_len(8192).unwrap();
    // The program is killed when it has waited for long enough; it is the daemon that matters.
    let script = format!("echo more > {}; sync", node.path("more"));
    let program = Command::new(env!("CARGO_BIN_EXE_hearth"))
        .args(["run", "--dir", node.dir(), "--", "sh", "-c", &script])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut program = program.unwrap();
    let log = node.dir.path().join("node-1/serve.log");
    let said = |sentence: &str| fs::read_to_string(&log).unwrap().contains(sentence);
    for _ in 0..600 {
        if said("died before it served") {
            break;
        }
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(Duration::from_millis(100))));
    }
    program.kill().unwrap();
    program.wait().unwrap();
    assert!(said("file tree of the pool was cut") && said("exit status: 1") && said("file_bytes"));
    assert!(!said("SIGBUS"));
    let status = String::from_utf8(node.hearth(&["status"]).stdout).unwrap();
    assert!(status.contains("FAILED") && status.contains("tree"), "{status}");
    node.hearth(&["down", "--hard"]).expect_success();
    node.hearth(&["start"]).expect_failure("tree");
    fs::write(&tree, whole).unwrap();
    node.hearth(&["start"]).expect_success();
    kept_is_there(&node);
}

/// A file of the pool that is empty, short or gone: the start names it, and so does the check.
#[test]
fn a_pool_file_that_is_not_whole_is_named() {
    let node = down_with_a_file();
    for name in ["tree", "ledger", "segment-1"] {
        let path = pool(&node).join(name);
        let whole = fs::read(&path).unwrap();
        for bytes in [0, 8192] {
            fs::write(&path, &whole[..bytes]).unwrap();
            node.hearth(&["start"]).expect_failure(name);
            let checked = check(&node);
            let said = String::from_utf8_lossy(&checked.stdout).into_owned() + &errors(&checked);
            assert!(checked.status.code() == Some(1) && said.contains(name), "{name} of {bytes}: {said}");
        }
        fs::remove_file(&path).unwrap();
        // Without a tree there is no pool.
        node.hearth(&["start"]).expect_failure(if name == "tree" { "pool" } else { name });
        fs::write(&path, whole).unwrap();
    }
    node.hearth(&["start"]).expect_success();
    kept_is_there(&node);
}
