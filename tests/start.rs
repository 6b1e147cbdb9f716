//! Two starts of one node: there is one daemon at a time, and programs reach it, whichever process dies in the middle of a
//! start. `HEARTH_STARTS` says how often nodes are started, ended and killed by several commands at once.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
#[path = "prefix/mod.rs"]
#[allow(dead_code, reason = "its generator is used")]
mod prefix;

use harness::{Expect, Node, kill, limited, until};
use prefix::Random;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A library with which a process that is to be a daemon waits, before its first step, for as long as a file is there.
const WAITS: &str = r#"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
__attribute__((constructor)) static void wait_for_leave(int count, char **arguments) {
    const char *held = getenv("HEARTH_TEST_HELD");
    if (held && count > 1 && !strcmp(arguments[1], "daemon"))
        for (int looks = 0; looks < 12000 && !access(held, F_OK); looks++) usleep(5000);
}
"#;

/// A node whose daemons are held at their beginning for as long as [`HeldNode::hold`] wants it.
struct HeldNode {
    node: Node,
    file: PathBuf,
}

impl HeldNode {
    fn begin() -> Self {
        let node = Node::of_mib(64);
        let path = |name: &str| format!("{}/{name}", node.dir());
        let [source, library, file] = ["waits.c", "waits.so", "held"].map(path);
        fs::write(&source, WAITS).unwrap();
        limited(&["cc", "-shared", "-fPIC", "-o", &library], &[&source]).expect_success();
        node.hearth(&["down"]).expect_success();
        let variables = [format!("LD_PRELOAD={library}"), format!("HEARTH_TEST_HELD={file}")];
        let program = ["env", &variables[0], &variables[1], env!("CARGO_BIN_EXE_hearth"), "start"];
        limited(&program, &["--dir", node.dir()]).expect_success();
        Self { node, file: file.into() }
    }

    fn hold(&self) {
        fs::write(&self.file, "").unwrap();
    }

    fn let_go(&self) {
        fs::remove_file(&self.file).unwrap();
    }

    fn process(&self, name: &str) -> i32 {
        let text = fs::read_to_string(self.node.dir.path().join("node-1").join(name)).unwrap();
        text.split(' ').next().unwrap().parse().unwrap()
    }

    /// Kills the daemon, and the keeper once another daemon is held; returns that one.
    fn orphan(&self) -> i32 {
        self.hold();
        let keeper = self.process("keeper.pid");
        kill(self.process("serve.pid"));
        let mut begun = None;
        until("another daemon begins", || {
            begun = daemons_of(keeper).pop();
            begun.is_some()
        });
        kill(keeper);
        begun.unwrap()
    }

    /// A program reaches the daemon, and the node is as it should be.
    fn serves(&self) {
        assert_eq!(self.node.sh("echo more >> $T/log && tail -n 1 $T/log").expect_success(), "more\n");
        self.node.hearth(&["down"]).expect_success();
        self.node.check();
    }
}

fn processes() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").unwrap();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// The processes that run as daemons and were started by another one.
fn daemons_of(parent: i32) -> Vec<i32> {
    let is_one = |pid: &i32| {
        let stat = of_process(*pid, "stat");
        let Some((_, rest)) = stat.rsplit_once(") ") else { return false };
        let mut fields = rest.split(' ');
        fields.next() != Some("Z")
            && fields.next() == Some(&parent.to_string())
            && of_process(*pid, "cmdline").split('\0').nth(1) == Some("daemon")
    };
    processes().filter(is_one).collect()
}

/// The keepers, daemons and spares of a cluster.
fn processes_of(dir: &str) -> Vec<i32> {
    let is_one = |pid: &i32| {
        let text = of_process(*pid, "cmdline");
        let words: Vec<_> = text.split('\0').collect();
        words.len() > 1 && ["serve", "daemon"].contains(&words[1]) && words.contains(&dir)
    };
    processes().filter(is_one).collect()
}

/// A file of a process in /proc, which may be gone.
fn of_process(pid: i32, name: &str) -> String {
    fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default()
}

fn lives(pid: i32) -> bool {
    of_process(pid, "stat").rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[test]
fn a_second_daemon_is_refused_and_takes_nothing_from_the_first() {
    let node = Node::of_mib(64);
    let daemon = node.daemon();
    for _ in 0..2 {
        let refused = node.hearth(&["daemon", "--node", "1"]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success(), "{said}");
        assert!(
            said.contains(&format!("node 1 has a daemon or a keeper already (process {daemon})")),
            "{said}"
        );
        assert_eq!(node.sh("echo kept > $T/file && cat $T/file").expect_success(), "kept\n");
    }
    assert_eq!(node.daemon(), daemon);
    node.hearth(&["down"]).expect_success();
    node.check();
}

#[test]
fn a_daemon_that_begins_as_its_keeper_dies_is_taken_over() {
    let held = HeldNode::begin();
    let daemon = held.orphan();
    std::thread::scope(|scope| {
        let started = scope.spawn(|| held.node.hearth(&["start"]));
        until("the next keeper is there", || lives(held.process("keeper.pid")));
        held.let_go();
        started.join().unwrap().expect_success();
    });
    assert_eq!(held.node.daemon(), daemon, "the one that began");
    held.serves();
}

#[test]
fn a_hard_end_reaches_a_daemon_that_begins() {
    for orderly in [false, true] {
        let held = HeldNode::begin();
        let daemon = held.orphan();
        let down: &[&str] = if orderly { &["down"] } else { &["down", "--hard"] };
        held.node.hearth(down).expect_success();
        assert!(!lives(daemon), "{down:?}");
        held.let_go();
        held.node.hearth(&["start"]).expect_success();
        held.serves();
    }
}

/// One step of a process that starts, ends or kills parts of a cluster of two.
fn meddle(node: &Node, random: &mut Random) {
    let number = (1 + random.below(2)).to_string();
    let send = |pid: i32, signal: Signal| {
        // It may have ended.
        let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, signal));
    };
    let all = processes_of(node.dir());
    let any = (!all.is_empty()).then(|| all[random.below(all.len() as u64) as usize]);
    match (random.below(6), any) {
        (0 | 1, _) => drop(node.hearth(&["start", "--node", &number])),
        (2, _) => drop(node.hearth(&["down", "--node", &number])),
        (3, _) => drop(node.hearth(&["down", "--node", &number, "--hard"])),
        (_, None) => {}
        (4, Some(pid)) => send(pid, if random.below(3) == 0 { Signal::TERM } else { Signal::KILL }),
        (_, Some(pid)) => {
            send(pid, Signal::STOP);
            node.hearth(&["status"]);
            send(pid, Signal::CONT);
        }
    }
}

/// Commands and kills at once, at any moment of the others' work: after that the nodes are up, each has one daemon, and all that
/// was synced is there.
#[test]
fn nodes_that_are_started_ended_and_killed_at_once_serve_afterwards() {
    let rounds = std::env::var("HEARTH_STARTS").map_or(5, |text| text.parse().unwrap());
    let node = Node::of_nodes_with(2, 1000, 600);
    let mut random = Random(39);
    let mut synced: Vec<String> = Vec::new();
    for round in 0..rounds {
        std::thread::scope(|scope| {
            for _ in 0..1 + random.below(3) {
                let (node, mut random) = (&node, Random(random.next()));
                scope.spawn(move || (0..1 + random.below(4)).for_each(|_| meddle(node, &mut random)));
            }
        });
        for number in ["1", "2"] {
            until(&format!("node {number} is up in round {round}"), || {
                node.hearth(&["start", "--node", number]).status.success()
            });
        }
        synced.push(round.to_string());
        let script = format!("echo {round} >> $HEARTH_TREE/log; sync $HEARTH_TREE/log; cat $HEARTH_TREE/log");
        let mut found = Vec::new();
        until(&format!("a program is served in round {round}"), || {
            let run = node.hearth(&["run", "--", "sh", "-ec", &script]);
            found = String::from_utf8_lossy(&run.stdout).lines().map(str::to_owned).collect();
            run.status.success()
        });
        // One that was told of an error may have written all the same.
        found.dedup();
        assert_eq!(found, synced, "round {round}");
        for number in ["1", "2"] {
            let lock = fs::canonicalize(node.dir.path().join(format!("node-{number}/serve.lock"))).unwrap();
            let count = |word: &str, is_one: &dyn Fn(&i32) -> bool| {
                let runs_it = |pid: &i32| {
                    let text = of_process(*pid, "cmdline");
                    let words: Vec<_> = text.split('\0').collect();
                    words.len() > 1 && words[1] == word && words.contains(&number)
                };
                processes_of(node.dir()).into_iter().filter(runs_it).filter(is_one).count()
            };
            // A spare does not have it yet.
            until(&format!("node {number} has one daemon in round {round}"), || {
                count("daemon", &|pid| has_open(*pid, &lock)) == 1 && count("serve", &|_| true) == 1
            });
        }
    }
}

/// A process of the cluster of several nodes that is there once its start has got so far.
const STEPS: [&str; 4] =
    ["manager-keeper.pid", "node-1/keeper.pid", "node-2/keeper.pid", "node-3/keeper.pid"];

/// The processes of a cluster that `hearth down` ends.
fn all_processes_of(dir: &str) -> Vec<i32> {
    let is_one = |pid: &i32| {
        let text = of_process(*pid, "cmdline");
        let words: Vec<_> = text.split('\0').collect();
        words.len() > 1 && ["serve", "daemon", "manager"].contains(&words[1]) && words.contains(&dir)
    };
    processes().filter(is_one).collect()
}

/// Begins to start the nodes, in a process of its own, and waits until it got as far as this step.
fn up_until(node: &Node, step: &str) -> Child {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "120", &node.program(), "up", "--dir", node.dir()]);
    let up = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until(step, || node.dir.path().join(step).exists());
    up
}

/// A `hearth down` beside a `hearth up` leaves no daemon without a manager: all nodes are up, or none.
#[test]
fn a_cluster_that_is_started_and_ended_at_once_is_whole_or_down() {
    let node = Node::of_nodes_with(3, 1000, 600);
    for step in STEPS {
        node.hearth(&["down"]).expect_success();
        let mut up = up_until(&node, step);
        let down = node.hearth(&["down"]);
        let up = up.wait().unwrap();
        down.expect_success();
        // `up` had the lock first. A spare daemon ends by itself, soon after its keeper.
        until(&format!("nothing is left of a start that got to {step}"), || {
            !all_processes_of(node.dir()).into_iter().any(lives)
        });
        // It says that no node leads, unless one did for a moment.
        assert!(matches!(up.code(), Some(0 | 2)), "{step}: {up:?}");
        let status = node.hearth(&["status"]);
        assert!(!status.status.success(), "{status:?}");
    }
    node.hearth(&["up"]).expect_success();
}

/// Without one the death of the manager, later, would stop all nodes.
#[test]
fn a_manager_whose_keeper_died_gets_another_one() {
    let node = Node::of_nodes(2);
    let process = |name: &str| -> i32 {
        let text = fs::read_to_string(node.dir.path().join(name)).unwrap();
        text.split(' ').next().unwrap().parse().unwrap()
    };
    let program = node.program();
    let ask = |json: &[&str]| limited(&[&program, "cluster", "status", "--dir", node.dir()], json);
    for again in [&["up"][..], &["start", "--node", "2"]] {
        until("all is well", || node.hearth(&["status"]).status.success() && ask(&[]).status.success());
        let manager = process("manager.pid");
        kill(process("manager-keeper.pid"));
        let gone = "the keeper of the cluster manager is gone";
        for told in [node.hearth(&["status"]), ask(&[]), ask(&["--json"])] {
            assert_eq!(told.status.code(), Some(1), "{told:?}");
            assert!(String::from_utf8_lossy(&told.stdout).contains(gone), "{told:?}");
        }
        let told = node.hearth(again).expect_success();
        assert!(told.contains("the cluster manager has a keeper again"), "{told}");
        assert_eq!(process("manager.pid"), manager, "the one that runs");
        node.hearth(&["status"]).expect_success();
        kill(manager);
        until("another manager runs", || process("manager.pid") != manager && lives(process("manager.pid")));
    }
    kill(process("manager-keeper.pid"));
    node.hearth(&["up"]).expect_success();
    let processes = [process("manager.pid"), process("manager-keeper.pid")];
    node.hearth(&["down"]).expect_success();
    assert!(!processes.into_iter().any(lives));
}

#[test]
fn a_hard_end_ends_a_start_that_hangs() {
    let node = Node::of_nodes_with(2, 1000, 600);
    node.hearth(&["down"]).expect_success();
    let mut up = up_until(&node, "node-1/keeper.pid");
    // `timeout` runs it as a child.
    let is_up = |pid: &i32| {
        let text = of_process(*pid, "cmdline");
        let words: Vec<_> = text.split('\0').collect();
        words.len() > 1 && words[1] == "up" && words.contains(&node.dir())
    };
    let starter = processes().find(is_up).unwrap();
    kill_process(Pid::from_raw(starter).unwrap(), Signal::STOP).unwrap();
    let down = node.hearth(&["down", "--hard"]);
    down.expect_success();
    let said = String::from_utf8_lossy(&down.stderr);
    assert!(said.contains(&format!("killing process {starter}, which starts or ends nodes")), "{said}");
    assert!(!up.wait().unwrap().success());
    until("nothing is left", || !all_processes_of(node.dir()).into_iter().any(lives));
    node.hearth(&["up"]).expect_success();
}

fn has_open(pid: i32, file: &Path) -> bool {
    !descriptors_of(pid, file).is_empty()
}

/// The numbers of a process's descriptors of a file.
fn descriptors_of(pid: i32, file: &Path) -> Vec<String> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let of_file = open.filter(|entry| fs::read_link(entry.path()).is_ok_and(|target| target == file));
    of_file.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

/// The process of a mount outlives the daemon that started it. With the lock it would be taken for a daemon that begins.
#[test]
fn a_daemon_of_several_nodes_passes_its_lock_on_to_no_process() {
    const CLOSES_AT_EXEC: u32 = 0o2_000_000;
    let node = Node::of_nodes(2);
    let daemon = node.daemon();
    let held = descriptors_of(daemon, &node.dir.path().join("node-1/serve.lock"));
    assert_eq!(held.len(), 1);
    let told = of_process(daemon, &format!("fdinfo/{}", held[0]));
    let flags = told.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
    assert!(u32::from_str_radix(flags.trim(), 8).unwrap() & CLOSES_AT_EXEC != 0, "{told}");
}

/// A library that is loaded to look for devices would otherwise end the process in its own way, which may hang.
#[test]
fn a_process_that_loads_libraries_leaves_the_signal_to_end_to_the_kernel() {
    let node = Node::of_nodes(2);
    let keeper = fs::read_to_string(node.dir.path().join("node-2/keeper.pid")).unwrap();
    let keeper = keeper.split(' ').next().unwrap().parse().unwrap();
    let daemon = fs::read_to_string(node.dir.path().join("node-2/serve.pid")).unwrap();
    let daemon: i32 = daemon.split(' ').next().unwrap().parse().unwrap();
    let mut spares = Vec::new();
    until("there is a spare", || {
        spares = daemons_of(keeper);
        // The daemon was a spare, too.
        spares.retain(|pid| *pid != daemon && of_process(*pid, "cmdline").contains("--spare"));
        !spares.is_empty()
    });
    let spare = spares[0];
    assert!(of_process(spare, "environ").split('\0').any(|variable| variable == "IPATH_NO_BACKTRACE=1"));
    let catches = |signal: u32| {
        let status = of_process(spare, "status");
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(caught.trim(), 16).unwrap() & 1 << (signal - 1) != 0
    };
    let read = || of_process(spare, "io").lines().next().unwrap().to_owned();
    // It reads the files of the libraries, and waits then.
    let (mut before, mut same) = (String::new(), 0);
    until("it has loaded them", || {
        assert!(!catches(15), "it handles SIGTERM");
        let now = read();
        same = if now == before { same + 1 } else { 0 };
        before = now;
        same == 25
    });
}
