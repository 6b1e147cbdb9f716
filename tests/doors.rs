//! The mount and the library at the same files at once: changes that one program makes through the mount, which keeps
//! pages, attributes and names in the kernel, and those that another makes through the library, are neither lost nor
//! seen too late (`docs/mount.md` numbers the schedules).
//!
//! `HEARTH_DOORS` says how often this slice is repeated.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
#[path = "doors/mapped.rs"]
mod mapped;
mod processes;
#[path = "doors/removed.rs"]
mod removed;
#[path = "doors/stress.rs"]
mod stress;
#[path = "doors/survivors.rs"]
mod survivors;
#[path = "doors/ways.rs"]
mod ways;

use processes::{Job, Node, count};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

fn times() -> u64 {
    count("HEARTH_DOORS", 1)
}

/// A program that is told what to do.
struct Actor(Job);

impl Actor {
    fn ask(&mut self, line: &str) -> String {
        self.0.tell(line);
        self.0.line().expect("it goes on")
    }

    /// The same for what has to succeed.
    #[track_caller]
    fn does(&mut self, line: &str) -> String {
        let answer = self.ask(line);
        assert!(!answer.contains("Error"), "{line}: {answer}");
        answer
    }

    #[track_caller]
    fn says(&mut self, line: &str, wanted: &str) {
        assert_eq!(self.ask(line), wanted, "{line}");
    }
}

/// A mounted node with a program at the mount and one at the library.
struct MountAndLibrary {
    mount: Actor,
    library: Actor,
    node: Node,
}

fn script() -> String {
    script_of("actor.py")
}

fn script_of(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doors").join(name).to_str().unwrap().to_owned()
}

impl MountAndLibrary {
    fn new() -> Option<Self> {
        if !harness::can_mount() {
            return None;
        }
        let node = Node::up();
        node.hearth(&["mount"]);
        let library = Actor(node.begin_program(&["/usr/bin/python3", &script()]));
        Some(Self { mount: through_mount(), library, node })
    }

    fn path(&self, name: &str) -> String {
        self.node.path(name)
    }

    /// A file that a program at the mount has mapped and stored to, so that the kernel has a page that is not written back.
    fn mapped(&mut self, name: &str) -> String {
        let file = self.path(name);
        self.library.does(&format!("open {file} O_RDWR|O_CREAT"));
        self.library.does(&format!("fill {file} - 8192"));
        self.mount.does(&format!("open {file} O_RDWR"));
        self.mount.does(&format!("map {file} 8192"));
        self.mount.does(&format!("store {file} 100 STORED"));
        file
    }

    /// The library writes to a file that is mapped through a mount that is gone: the process that mapped it is told
    /// before the write is granted, and the next mount has the library's data.
    fn write_beside_a_mount_that_is_gone(mut self, file: &str) {
        self.library.does(&format!("write {file} 200 WRITTEN"));
        self.mount.0.tell(&format!("load {file} 200 7"));
        assert_eq!(self.mount.0.line(), None, "a page that was mapped is there still");
        self.library.says(&format!("read {file} 200 7"), "WRITTEN");
        self.node.hearth(&["mount"]);
        self.mount = through_mount();
        self.mount.does(&format!("open {file} O_RDWR"));
        self.mount.says(&format!("read {file} 200 7"), "WRITTEN");
        self.end();
    }

    fn end(self) {
        self.end_with(|_| ());
    }

    /// The same; the last output of the gateway is checked.
    fn end_with(self, look: impl FnOnce(&str)) {
        let Self { mount, library, node } = self;
        drop((mount, library));
        node.hearth(&["umount"]);
        let log = std::fs::read_to_string(format!("{}/node-1/gateway.log", node.dir())).unwrap();
        look(&log);
        node.check();
    }
}

/// How many messages of each kind a gateway served, and how many calls it made, by the last line of its log.
fn counts(log: &str) -> [BTreeMap<String, u64>; 2] {
    let line = log.lines().rev().find(|line| line.contains("messages=")).expect("it says what it served");
    let pair = |text: &str| {
        let (many, kind) = text.split_once(' ')?;
        Some((kind.to_owned(), many.parse().expect("a number")))
    };
    ["messages=\"", "calls=\""].map(|field| {
        let (_, rest) = line.split_once(field).unwrap();
        rest.split_once('"').unwrap().0.split(", ").filter_map(pair).collect()
    })
}

fn through_mount() -> Actor {
    let mut command = Command::new("/usr/bin/python3");
    command.arg(script());
    Actor(Job::of(command))
}

/// M.2: a page that a map made dirty holds what the library wrote before, beside what was stored.
#[test]
fn what_the_library_wrote_is_not_undone_by_a_page_of_a_map() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    for round in 0..20 * times() {
        let file = doors.path(&format!("file-{round}"));
        doors.library.does(&format!("open {file} O_RDWR|O_CREAT"));
        doors.library.does(&format!("fill {file} - 8192"));
        doors.mount.does(&format!("open {file} O_RDWR"));
        doors.mount.does(&format!("map {file} 8192"));
        doors.mount.does(&format!("store {file} 100 STORED"));
        doors.library.does(&format!("write {file} 200 WRITTEN"));
        doors.library.does(&format!("sync {file}"));
        doors.library.says(&format!("read {file} 100 6"), "STORED");
        doors.mount.says(&format!("load {file} 200 7"), "WRITTEN");
        doors.mount.does(&format!("store {file} 300 AGAIN"));
        doors.mount.does(&format!("flush {file}"));
        doors.library.says(&format!("read {file} 200 7"), "WRITTEN");
        doors.library.says(&format!("read {file} 300 5"), "AGAIN");
        doors.mount.does(&format!("close {file}"));
        doors.library.does(&format!("close {file}"));
    }
    doors.end();
}

/// Locks, writes, fsyncs, attributes: for files that no other session wants, the gateway makes no call to the daemon,
/// which could not answer.
#[test]
fn what_nobody_else_wants_is_done_without_the_daemon() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    let file = doors.path("file");
    doors.mount.does(&format!("open {file} O_RDWR|O_CREAT"));
    // Leases and room are fetched once.
    doors.mount.says(&format!("alone {file} 0 2"), "2");
    let daemon = doors.node.daemon();
    daemon.stop();
    doors.mount.says(&format!("alone {file} 2 50"), "50");
    daemon.go_on();
    doors.library.says(&format!("size {file}"), "8");
    doors.end();
}

/// The messages of the kernel while a program works with files that no other session wants; the gateway prints them at
/// its end.
#[test]
fn a_file_costs_so_many_messages_and_less_than_a_call() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    let dir = doors.path("dir");
    doors.library.does(&format!("mkdir {dir}"));
    doors.mount.says(&format!("churn {dir} 200"), "200");
    doors.mount.says(&format!("stats {dir} 200"), "200");
    let mut served = None;
    doors.end_with(|log| served = Some(counts(log)));
    let [messages, calls] = served.unwrap();
    let of = |kind: &str| messages.get(kind).copied().unwrap_or(0);
    // A name that is not there, one to be replaced, and the directory's attributes, as each change makes them old.
    for (kind, least, most) in [
        ("CREATE", 200, 200),
        ("WRITE", 200, 200),
        ("FLUSH", 200, 200),
        ("RELEASE", 200, 200),
        ("RENAME2", 0, 200),
        ("GETXATTR", 0, 200),
        ("LOOKUP", 400, 420),
        ("GETATTR", 200, 620),
        ("OPEN", 0, 0),
        ("READ", 0, 0),
    ] {
        assert!((least..=most).contains(&of(kind)), "{kind}: {messages:?}");
    }
    assert!(calls.values().sum::<u64>() < 200, "calls to the daemon: {calls:?}");
}

/// M.16: a gateway that stands still is killed, and what it had in the kernel is gone before others get its leases.
#[test]
fn a_map_fails_before_others_get_the_leases_of_a_gateway_that_stands_still() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    let file = doors.mapped("file");
    doors.node.stop_gateway();
    doors.write_beside_a_mount_that_is_gone(&file);
}

/// M.16, M.17: the same for one that was killed.
#[test]
fn a_map_fails_before_others_get_the_leases_of_a_gateway_that_was_killed() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    let file = doors.mapped("file");
    doors.node.gateway().kill();
    doors.write_beside_a_mount_that_is_gone(&file);
}

#[test]
fn a_map_fails_before_others_get_the_leases_of_a_mount_that_was_taken_away() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    let file = doors.mapped("file");
    doors.node.hearth(&["umount", "--force"]);
    doors.write_beside_a_mount_that_is_gone(&file);
}

/// M.19: a daemon that is started again grants no lease on files of which the kernel has pages before these are written
/// back.
#[test]
fn a_page_that_is_not_written_back_outlives_the_daemon() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    for round in 0..3 * times() {
        let file = doors.mapped(&format!("file-{round}"));
        doors.node.daemon().kill();
        doors.library.does(&format!("write {file} 200 WRITTEN"));
        doors.library.says(&format!("read {file} 100 6"), "STORED");
        doors.mount.says(&format!("load {file} 200 7"), "WRITTEN");
        doors.mount.does(&format!("store {file} 300 AGAIN"));
        doors.library.says(&format!("read {file} 200 7"), "WRITTEN");
        doors.library.says(&format!("read {file} 300 5"), "AGAIN");
        doors.mount.does(&format!("close {file}"));
        doors.library.does(&format!("close {file}"));
        doors.node.wait_until_up();
    }
    doors.end();
}

/// M.12: root has looked a name up; another user may not use it who may not search the directory.
#[test]
fn a_kept_name_is_only_for_users_who_may_search_its_directory() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    let dir = doors.path("private");
    doors.library.does(&format!("mkdir {dir} 0o700"));
    doors.mount.does(&format!("open {dir}/file O_RDWR|O_CREAT"));
    doors.mount.does(&format!("chmod {dir}/file 0o666"));
    doors.mount.says(&format!("size {dir}/file"), "0");
    doors.mount.says(&format!("another {dir}/file"), "13");
    doors.library.does(&format!("chmod {dir} 0o711"));
    doors.mount.says(&format!("another {dir}/file"), "0");
    doors.library.does(&format!("chmod {dir} 0o700"));
    doors.mount.says(&format!("another {dir}/file"), "13");
    doors.end();
}

/// M.21: a recall of more dirty pages than the log has room for.
#[test]
fn a_map_larger_than_the_log_is_written_back() {
    let Some(MountAndLibrary { mount, library, node }) = MountAndLibrary::new() else { return };
    drop((mount, library));
    node.hearth(&["down"]);
    let settings = format!("{}/hearth.toml", node.dir());
    let text = std::fs::read_to_string(&settings).unwrap();
    std::fs::write(&settings, format!("{text}\n[limits]\nlog_mib = 1\n")).unwrap();
    node.hearth(&["up"]);
    node.hearth(&["mount"]);
    let library = Actor(node.begin_program(&["/usr/bin/python3", &script()]));
    let mut doors = MountAndLibrary { mount: through_mount(), library, node };
    let file = doors.path("large");
    doors.mount.does(&format!("open {file} O_RDWR|O_CREAT"));
    doors.mount.does(&format!("cut {file} 8388608"));
    doors.mount.does(&format!("map {file} 8388608"));
    doors.library.does(&format!("open {file} O_RDWR"));
    for round in 0..2 * times() {
        doors.mount.does(&format!("store_all {file} 8388608 {round:03}"));
        doors.library.says(&format!("check_all {file} 8388608 {round:03}"), "0");
    }
    doors.end();
}

/// A file that the library refuses, and that a mount shows only if it is asked to: a device.
#[test]
fn device_files_open_if_the_mount_was_asked_to() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    let null = doors.path("null");
    doors.mount.does(&format!("mknod {null} 0o20666 0x103"));
    doors.mount.says(&format!("open {null} O_RDWR"), "PermissionError 13");
    let MountAndLibrary { mount, library, node } = doors;
    drop((mount, library));
    let refused = node.try_hearth(&["mount", "--dev"]);
    assert!(!refused.status.success(), "it is mounted otherwise");
    node.hearth(&["umount"]);
    node.hearth(&["mount", "--dev", "--suid"]);
    assert_eq!(through_mount().ask(&format!("open {null} O_RDWR")), "ok");
    node.hearth(&["umount"]);
    node.check();
}

/// M.1: a write and stores of another thread to the same pages.
#[test]
fn a_write_is_not_undone_by_stores_of_another_thread() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    for round in 0..20 * times() {
        let file = doors.path(&format!("race-{round}"));
        doors.mount.says(&format!("race {file} 256"), "0");
    }
    doors.end();
}

/// M.9, M.26, M.29: attributes and names that the kernel has are dropped when they change through the library.
#[test]
fn what_the_kernel_keeps_is_what_the_library_left() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    let [file, other, dir] = ["file", "other", "dir"].map(|name| doors.path(name));
    doors.library.does(&format!("open {file} O_RDWR|O_CREAT|O_APPEND"));
    doors.mount.does(&format!("open {file} O_RDONLY"));
    for round in 1..50 * times() {
        doors.library.does(&format!("append {file} abc"));
        doors.mount.says(&format!("size {file}"), &(round * 3).to_string());
        doors.mount.says(&format!("read {file} {} 9", round * 3 - 3), "abc");
        let mode = if round % 2 == 0 { "0o600" } else { "0o640" };
        doors.library.does(&format!("chmod {file} {mode}"));
        doors.mount.says(&format!("mode {file}"), mode);
        doors.mount.says(&format!("there {other}"), "False");
        doors.library.does(&format!("rename {file} {other}"));
        doors.mount.says(&format!("there {other}"), "True");
        doors.mount.says(&format!("there {file}"), "False");
        doors.library.does(&format!("rename {other} {file}"));
        doors.mount.says(&format!("there {file}"), "True");
        doors.library.does(&format!("mkdir {dir}"));
        doors.mount.says(&format!("list {dir}"), "");
        doors.mount.does(&format!("mkdir {dir}/in"));
        doors.library.says(&format!("list {dir}"), "in");
        doors.mount.does(&format!("rmdir {dir}/in"));
        doors.library.does(&format!("rmdir {dir}"));
        doors.mount.says(&format!("there {dir}"), "False");
    }
    doors.end();
}

/// M.6: the kernel puts what is appended where it takes the end of the file to be.
#[test]
fn both_doors_append_at_the_end_that_there_is() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    for bytes in [4, 4096] {
        let file = doors.path(&format!("log-{bytes}"));
        doors.mount.does(&format!("open {file} O_RDWR|O_CREAT|O_APPEND"));
        doors.library.does(&format!("open {file} O_RDWR|O_APPEND"));
        let mut expected = String::new();
        for round in 0..30 * times() {
            let letters = ["M", "L"].map(|door| format!("{door}{round}").repeat(bytes)[..bytes].to_owned());
            let by_whom = if round % 3 == 2 { [1, 0] } else { [0, 1] };
            for door in by_whom {
                let actor = if door == 0 { &mut doors.mount } else { &mut doors.library };
                actor.says(&format!("append {file} {}", letters[door]), &bytes.to_string());
                expected += &letters[door];
            }
            if round % 2 == 0 {
                doors.mount.says(&format!("whole {file}"), &expected);
            }
            doors.library.says(&format!("whole {file}"), &expected);
        }
        // A row of its own, as without other sessions.
        for _ in 0..5 {
            doors.mount.does(&format!("append {file} row"));
            expected += "row";
        }
        doors.mount.says(&format!("size {file}"), &expected.len().to_string());
        doors.mount.says(&format!("whole {file}"), &expected);
        doors.library.says(&format!("whole {file}"), &expected);
    }
    doors.end();
}

/// M.13: pages that are written back after the file was cut make it no longer.
#[test]
fn a_file_that_was_cut_stays_cut() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    let file = doors.path("file");
    doors.mount.does(&format!("open {file} O_RDWR|O_CREAT"));
    for round in 0..20 * times() {
        doors.mount.does(&format!("cut {file} 16384"));
        doors.mount.does(&format!("map {file} 16384"));
        for page in 0..4 {
            doors.mount.does(&format!("store {file} {} STORED", page * 4096));
        }
        let door = if round % 2 == 0 { &mut doors.library } else { &mut doors.mount };
        if round % 2 == 0 {
            door.does(&format!("open {file} O_RDWR"));
        }
        door.does(&format!("cut {file} 5000"));
        doors.library.says(&format!("size {file}"), "5000");
        doors.mount.says(&format!("size {file}"), "5000");
        doors.mount.does(&format!("cut {file} 16384"));
        doors.library.says(&format!("size {file}"), "16384");
        doors.mount.says(&format!("read {file} 4096 6"), "STORED");
        doors.mount.says(&format!("read {file} 8192 6"), "......");
    }
    doors.end();
}

/// M.15: pages that were read under a lease for reading, then stored to.
#[test]
fn a_file_that_was_read_before_it_was_mapped_is_one_file() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    let file = doors.path("file");
    doors.library.does(&format!("open {file} O_RDWR|O_CREAT"));
    doors.library.does(&format!("fill {file} - 4096"));
    for round in 0..20 * times() {
        doors.mount.does(&format!("open {file} O_RDONLY"));
        doors.mount.does(&format!("read {file} 0 10"));
        doors.library.does(&format!("read {file} 0 10"));
        doors.mount.does(&format!("close {file}"));
        doors.mount.does(&format!("open {file} O_RDWR"));
        doors.mount.does(&format!("map {file} 4096"));
        doors.mount.does(&format!("store {file} 0 M{round:03}"));
        doors.library.says(&format!("read {file} 0 4"), &format!("M{round:03}"));
        doors.library.does(&format!("write {file} 0 L{round:03}"));
        doors.mount.says(&format!("load {file} 0 4"), &format!("L{round:03}"));
        doors.mount.does(&format!("close {file}"));
    }
    doors.end();
}

/// A program that runs through the mount and through the library at the same counters, in turns, and each sees the
/// other's.
const TURNS: &str = r#"
import os, sys
file = os.open(sys.argv[1], os.O_RDWR); mine, rounds = int(sys.argv[2]), int(sys.argv[3])
at = lambda: int(os.pread(file, 8, 0))
for n in range(rounds):
    while at() % 2 != mine: pass
    os.pwrite(file, b"%08d" % (at() + 1), 0)
    os.pwrite(file, b"%08d" % n, 4096 * (1 + mine))
print("done")
"#;

/// M.5: writes of one side between reads of it, and recalls by the other all the time.
#[test]
fn two_doors_count_in_turns() {
    let Some(doors) = MountAndLibrary::new() else { return };
    let file = doors.path("file");
    std::fs::write(&file, b"00000000").unwrap();
    let rounds = (100 * times()).to_string();
    let words = |mine: &'static str| ["-c", TURNS, &file, mine, &rounds].map(str::to_owned);
    let mut command = Command::new("/usr/bin/python3");
    command.args(words("0"));
    let mut mount = Job::of(command);
    let words = words("1");
    let program: Vec<&str> =
        ["/usr/bin/python3"].into_iter().chain(words.iter().map(String::as_str)).collect();
    let mut library = doors.node.begin_program(&program);
    assert_eq!(mount.rest(), ["done"]);
    assert_eq!(library.rest(), ["done"]);
    let counted = std::fs::read_to_string(&file).unwrap();
    assert_eq!(counted[..8], format!("{:08}", 200 * times()));
    drop((mount, library));
    doors.end();
}

/// Renames that cross, and other calls that take the locks of two directories, through both.
const CROSS: &str = r#"
import errno, os, random, sys
os.chdir(sys.argv[1]); random.seed(int(sys.argv[2]))
def file(a, b): os.close(os.open(a, os.O_CREAT | os.O_WRONLY))
def copy(a, b):
    f = os.open(a, os.O_RDONLY); g = os.open(b, os.O_WRONLY)
    try: os.write(g, b"x" * 5000); os.copy_file_range(f, g, 4096)
    except OSError as e:
        if e.errno not in (errno.EXDEV, errno.EINVAL): raise
    finally: os.close(f); os.close(g)
calls = [copy, os.rename, os.rename, os.rename, os.link, file, lambda a, b: os.unlink(a), lambda a, b: os.stat(b),
         lambda a, b: os.listdir(os.path.dirname(a))]
name = lambda: random.choice(["d", "e"]) + "/" + random.choice("abc")
for n in range(int(sys.argv[3])):
    try: random.choice(calls)(name(), name())
    except FileNotFoundError: pass
    except FileExistsError: pass
print("done")
"#;

/// M.10.
#[test]
fn renames_that_cross_end() {
    let Some(doors) = MountAndLibrary::new() else { return };
    let dir = doors.path("");
    for name in ["d", "e"] {
        std::fs::create_dir(doors.path(name)).unwrap();
    }
    let rounds = (400 * times()).to_string();
    let plain = |seed: &str| {
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-c", CROSS, &dir, seed, &rounds]);
        Job::of(command)
    };
    let library =
        |seed: &str| doors.node.begin_program(&["/usr/bin/python3", "-c", CROSS, &dir, seed, &rounds]);
    for mut job in [plain("1"), plain("2"), library("3"), library("4")] {
        assert_eq!(job.rest(), ["done"]);
    }
    doors.end();
}
