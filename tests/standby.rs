//! Programs that run where their node leads (`hearth run --standby`): started at a take-over and at a move, told to end before a
//! move, killed before another node leads, and gone with their parent.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod processes;

use harness::{Expect, until};
use ipc::{Host, SystemHost};
use processes::{Job, Node, job, say};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{File, OpenOptions, read_to_string};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;

/// The test that does the jobs.
const JOBS: &str = "a_program_says_who_it_is";

#[test]
fn a_program_says_who_it_is() {
    let Some(words) = job() else { return };
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        // Adds a line to a file in the tree, synced, and says its number; then does nothing.
        ["serve", path] => {
            let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
            writeln!(file, "{}", std::process::id()).unwrap();
            file.sync_all().unwrap();
            say(&std::process::id().to_string());
            // Until the writing end is closed.
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            std::process::exit(0);
        }
        ["end", code] => std::process::exit(code.parse().unwrap()),
        _ => panic!("no such job: {words:?}"),
    }
}

fn leads(node: &Node, number: u32) -> bool {
    node.statuses()[number as usize - 1]["chain"]["role"] == "leads"
}

/// The output of the parent of a job at a node.
fn said(node: &Node, number: u32) -> PathBuf {
    PathBuf::from(format!("{}/said-{number}", node.dir()))
}

fn until_said(node: &Node, number: u32, sentence: &str) {
    let file = said(node, number);
    until(sentence, || read_to_string(&file).unwrap().contains(sentence));
}

/// A program at a node that serves where the node leads.
fn standby(node: &Node, number: u32) -> Job {
    let path = format!("{}/n{number}/served", node.dir());
    node.begin_standby(number, JOBS, &["serve", &path], &said(node, number))
}

/// The number of the program's process, once it has begun.
fn begun(job: &mut Job) -> u32 {
    job.until_begun();
    job.line().unwrap().parse().unwrap()
}

/// A program at a node that serves where the node leads, with a file mapped shared.
fn mapping(node: &Node, number: u32) -> Job {
    const SCRIPT: &str = "import mmap, os, signal, sys
file = open(os.environ['HEARTH_TREE'] + '/mapped', 'w+b'); file.truncate(4096)
mapped = mmap.mmap(file.fileno(), 4096); mapped[:2] = b'OK'
print(os.getpid(), flush=True)
signal.pause()";
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
    command.args(["run", "--dir", node.dir(), "--node", &number.to_string(), "--standby"]);
    command.args(["--", "python3", "-c", SCRIPT]);
    command.stderr(File::create(said(node, number)).unwrap());
    Job::of(command)
}

/// The number of that process, once it has begun.
fn mapped(job: &mut Job) -> u32 {
    job.line().unwrap().parse().unwrap()
}

/// A program at a node that never uses the tree, so it has no session. When it is told to end it says so, and ends with its input.
fn idle(node: &Node, number: u32) -> Job {
    const SCRIPT: &str = "import os, signal, sys
def asked(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print('asked', flush=True)
    sys.stdin.read()
    os._exit(0)
signal.signal(signal.SIGTERM, asked)
print(os.getpid(), flush=True)
while True:
    signal.pause()";
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
    command.args(["run", "--dir", node.dir(), "--node", &number.to_string(), "--standby"]);
    command.args(["--", "python3", "-c", SCRIPT]).current_dir("/");
    command.stderr(File::create(said(node, number)).unwrap());
    Job::of(command)
}

/// A command about the cluster that is being carried out.
fn ordered(node: &Node, name: &str, rest: &[&str]) -> Job {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
    command.args([name, "--dir", node.dir()]).args(rest);
    Job::of(command)
}

/// Node 1 leads and is mounted when this returns, and each node that leads later is mounted, too.
fn mount_from_now_on(node: &Node) {
    node.hearth(&["down"]);
    let settings = format!("{}/hearth.toml", node.dir());
    let text = read_to_string(&settings).unwrap();
    std::fs::write(&settings, text.replace("mount = false", "mount = true")).unwrap();
    node.hearth(&["up"]);
    node.hearth(&["move", "--to", "1"]);
}

/// A program that shows a title of its own in place of its arguments and environment, as PostgreSQL and Redis do, and that has a
/// child in a session of its own. Both change the tree again and again.
fn titled(node: &Node, number: u32, is_standby: bool) -> Job {
    const SCRIPT: &str = "import ctypes, os, time
library = ctypes.CDLL(None)
for name, value in list(os.environ.items()):
    library.setenv(name.encode(), value.encode(), 1)
stat = open('/proc/self/stat').read().rsplit(')', 1)[1].split()
begin, end = int(stat[47]), int(stat[48])
ctypes.memset(begin, 0, end - begin)
ready = os.pipe()
child = os.fork()
if child == 0:
    os.setsid()
path = os.environ['HEARTH_TREE'] + '/titled'
open(path, 'a').close()
if child == 0:
    os.write(ready[1], b'1')
else:
    os.read(ready[0], 1)
    print(os.getpid(), child, flush=True)
while True:
    time.sleep(0.005)
    try:
        os.utime(path)
    except OSError:
        pass";
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
    command.args(["run", "--dir", node.dir(), "--node", &number.to_string()]);
    command.args(is_standby.then_some("--standby")).args(["--", "python3", "-c", SCRIPT]);
    command.stderr(File::create(said(node, number)).unwrap());
    Job::of(command)
}

/// The numbers of the program's processes, once they have begun.
fn both(job: &mut Job) -> Vec<u32> {
    let line = job.line().unwrap();
    line.split(' ').map(|number| number.parse().unwrap()).collect()
}

fn is_gone(pid: u32) -> bool {
    SystemHost.started(pid).is_none()
}

#[test]
fn a_program_follows_the_lead() {
    let node = Node::several(2);
    let (mut first, mut second) = (standby(&node, 1), standby(&node, 2));
    let one = begun(&mut first);
    until_said(&node, 2, "waiting until node 2 leads: node 1 does");
    // Told to end, since the lead moves; and started again when it comes back.
    node.hearth(&["move", "--to", "2"]);
    let two = begun(&mut second);
    assert!(is_gone(one));
    until_said(&node, 1, "waiting until node 1 leads: node 2 does");
    node.hearth(&["down", "--node", "2", "--hard"]);
    let one = begun(&mut first);
    assert!(is_gone(two));
    until_said(&node, 2, "the program has ended (signal: 9");
    let served = node.run(&["cat", &node.path("served")]);
    assert_eq!(served.lines().last(), Some(one.to_string().as_str()));
    assert_eq!(served.lines().count(), 3);
    // A signal is the program's, and then it is over.
    first.signal(Signal::TERM);
    assert_eq!(first.wait().code(), Some(143));
    assert!(is_gone(one));
    // While no program runs it is its parent's.
    until_said(&node, 2, "waiting until node 2 leads: it is down");
    second.signal(Signal::TERM);
    assert_eq!(second.wait().signal(), Some(15));
}

/// The daemon does not know of a program without a session; its parent holds a lock.
#[test]
fn the_lead_moves_when_a_program_that_has_not_used_the_tree_has_ended() {
    let node = Node::several(2);
    let (mut first, mut second) = (idle(&node, 1), standby(&node, 2));
    let one: u32 = first.line().unwrap().parse().unwrap();
    assert_eq!(node.status()["programs"], serde_json::json!([]), "it has no session");
    let mut command = ordered(&node, "move", &["--to", "2"]);
    first.expect("asked");
    assert!(leads(&node, 1) && command.is_running() && !is_gone(one));
    assert_eq!(node.status()["chain"]["moving_to"], 2);
    first.end_input();
    assert_eq!(command.wait().code(), Some(0));
    begun(&mut second);
    assert!(is_gone(one));
    until_said(&node, 1, "waiting until node 1 leads: node 2 does");
    assert!(!read_to_string(said(&node, 1)).unwrap().contains("killed"));
}

/// The other node leads as soon as the daemon of this one has left.
#[test]
fn a_node_that_ends_in_order_leads_until_its_standby_programs_have_ended() {
    let node = Node::several(2);
    let (mut first, mut second) = (idle(&node, 1), standby(&node, 2));
    let one: u32 = first.line().unwrap().parse().unwrap();
    let mut command = ordered(&node, "down", &["--node", "1"]);
    first.expect("asked");
    assert!(leads(&node, 1) && command.is_running() && !is_gone(one));
    assert_eq!(node.status()["chain"]["moving_to"], 2);
    first.end_input();
    assert_eq!(command.wait().code(), Some(0));
    begun(&mut second);
    assert!(is_gone(one));
    assert!(!read_to_string(said(&node, 1)).unwrap().contains("killed"));
    // No other node is in sync, so none leads.
    drop(second);
    let mut third = idle(&node, 2);
    let two: u32 = third.line().unwrap().parse().unwrap();
    node.hearth(&["down", "--node", "2"]);
    until("its parent kills it", || is_gone(two));
}

#[test]
fn a_program_that_does_not_end_is_killed_before_a_node_that_ends_in_order_leaves() {
    let node = Node::several(2);
    let (mut first, mut second) = (idle(&node, 1), standby(&node, 2));
    let one: u32 = first.line().unwrap().parse().unwrap();
    let mut command = ordered(&node, "down", &["--node", "1"]);
    first.expect("asked");
    begun(&mut second);
    assert!(is_gone(one));
    assert_eq!(command.wait().code(), Some(0));
    until_said(&node, 1, "the lead moves to node 2: the program was killed");
}

#[test]
fn a_program_without_a_session_that_does_not_end_keeps_the_lead_or_is_killed_before_it_moves() {
    let node = Node::several(2);
    let (mut first, mut second) = (idle(&node, 1), standby(&node, 2));
    let one: u32 = first.line().unwrap().parse().unwrap();
    let refused = node.try_hearth(&["move", "--to", "2", "--grace", "1"]);
    assert_eq!(refused.status.code(), Some(1));
    refused.expect_failure(&format!("standby programs run (process {})", first.pid()));
    first.expect("asked");
    assert!(leads(&node, 1) && !is_gone(one));
    node.hearth(&["move", "--to", "2", "--grace", "1", "--force"]);
    begun(&mut second);
    assert!(is_gone(one));
    until_said(&node, 1, "the lead moves to node 2: the program was killed");
}

/// The daemon kills both, since the parent does not see that the lead moves.
#[test]
fn a_program_whose_parent_is_stopped_has_ended_before_another_node_leads() {
    let node = Node::several(2);
    for order in [&["move", "--to", "2", "--grace", "1", "--force"][..], &["down", "--node", "1"]] {
        let (mut first, mut second) = (idle(&node, 1), standby(&node, 2));
        let one: u32 = first.line().unwrap().parse().unwrap();
        first.signal(Signal::STOP);
        node.hearth(order);
        begun(&mut second);
        let state = read_to_string(format!("/proc/{one}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "{order:?}: {state}");
        assert_eq!(first.wait().code(), None, "it was killed");
        drop(second);
        node.hearth(&["up"]);
        node.hearth(&["move", "--to", "1"]);
    }
}

#[test]
fn a_program_that_ends_by_itself_ends_its_parent_and_one_whose_parent_is_killed_is_gone() {
    let node = Node::several(2);
    let mut job = node.begin_standby(1, JOBS, &["end", "7"], &said(&node, 1));
    assert_eq!(job.wait().code(), Some(7));
    let mut job = standby(&node, 1);
    let pid = begun(&mut job);
    job.kill();
    until("the program is gone", || is_gone(pid));
    // Only the daemon dies: the program goes on.
    let mut job = standby(&node, 1);
    let pid = begun(&mut job);
    node.daemon().kill();
    until("the daemon leads again", || leads(&node, 1));
    until("all is well", || node.try_hearth(&["status"]).status.code() == Some(0));
    assert!(!is_gone(pid));
    let refused = node.try_hearth(&["run", "--standby", "--", "true"]);
    refused.expect_failure("--node <K>");
}

/// The daemon hangs: no view reaches anybody at the node, and the parent ends the program by the clock.
#[test]
fn a_program_is_gone_before_another_node_leads_though_the_daemon_hangs() {
    let node = Node::several(2);
    let (mut first, mut second) = (standby(&node, 1), standby(&node, 2));
    let one = begun(&mut first);
    let daemon = node.stop_process("node-1/serve.pid");
    begun(&mut second);
    assert!(is_gone(one), "it ran while node 2 led");
    assert!(read_to_string(said(&node, 1)).unwrap().contains("another node may lead from now on"));
    daemon.go_on();
    until("node 1 follows", || node.statuses()[1]["chain"]["in_sync"] == serde_json::json!([1, 2]));
}

/// Neither its environment nor its process group says whose processes these are.
#[test]
fn no_process_of_a_program_that_shows_a_title_outlives_the_lead_of_its_node() {
    let node = Node::several(2);
    let (mut first, mut second) = (titled(&node, 1, true), standby(&node, 2));
    let before = both(&mut first);
    node.hearth(&["move", "--to", "2"]);
    begun(&mut second);
    assert!(before.iter().all(|pid| is_gone(*pid)), "{before:?} while node 2 led");
    node.hearth(&["move", "--to", "1"]);
    let before = both(&mut first);
    let daemon = node.stop_process("node-1/serve.pid");
    begun(&mut second);
    assert!(before.iter().all(|pid| is_gone(*pid)), "{before:?} while node 2 led");
    daemon.go_on();
    until("node 1 follows", || node.statuses()[1]["chain"]["in_sync"] == serde_json::json!([1, 2]));
    let mut plain = titled(&node, 2, false);
    let before = both(&mut plain);
    node.hearth(&["down", "--node", "2", "--hard"]);
    assert!(before.iter().all(|pid| is_gone(*pid)), "{before:?} after their node was killed");
}

/// It is a descendant of the shell, with a part of the shell's environment.
#[test]
fn a_standby_program_that_a_program_of_another_node_has_started_outlives_that_node() {
    let node = Node::several(2);
    let (hearth, dir) = (env!("CARGO_BIN_EXE_hearth"), node.dir());
    for place in ["/", "$HEARTH_TREE"] {
        node.hearth(&["start", "--node", "1"]);
        until("all is well", || node.try_hearth(&["status"]).status.code() == Some(0));
        node.hearth(&["move", "--to", "1"]);
        File::create(said(&node, 2)).unwrap();
        let script = format!(
            "cd {place}; {hearth} run --dir {dir} --node 2 --standby -- sh -c 'echo begun; exec sleep 1000' 2> {} & \
             echo $$ $!; wait",
            said(&node, 2).display()
        );
        let mut shell = node.begin_program_at(1, &["sh", "-c", &script]);
        let pids = both(&mut shell);
        until_said(&node, 2, "waiting until node 2 leads: node 1 does");
        node.hearth(&["down", "--node", "1", "--hard"]);
        shell.expect("begun");
        assert!(is_gone(pids[0]) && !is_gone(pids[1]), "in {place}");
        let parent = Pid::from_raw(pids[1].cast_signed()).unwrap();
        kill_process(parent, Signal::TERM).unwrap();
        until("the parent ends", || is_gone(pids[1]));
    }
}

/// It is a descendant, too; its own environment names the other cluster.
#[test]
fn a_program_of_another_cluster_outlives_the_node_of_the_program_that_has_started_it() {
    let (node, other) = (Node::up(), Node::up());
    let (hearth, dir) = (env!("CARGO_BIN_EXE_hearth"), other.dir());
    let script = format!(
        "{hearth} run --dir {dir} -- sh -c 'echo $$; read line; echo $line > $HEARTH_TREE/said; echo done' <&3 & \
         echo $$; wait"
    );
    let mut shell = node.begin_program(&["sh", "-c", &format!("exec 3<&0; {script}")]);
    let mut pids: Vec<u32> = (0..2).map(|_| shell.line().unwrap().parse().unwrap()).collect();
    node.hearth(&["down", "--hard"]);
    pids.retain(|pid| is_gone(*pid));
    assert_eq!(pids.len(), 1, "the shell, and not the program");
    shell.tell("alive");
    shell.expect("done");
    assert_eq!(other.run(&["cat", &other.path("said")]), "alive\n");
}

/// When another node leads, no process would end them.
#[test]
fn a_parent_that_is_told_to_end_leaves_no_process_of_its_program() {
    let node = Node::several(2);
    let mut parent = titled(&node, 1, true);
    let before = both(&mut parent);
    parent.signal(Signal::TERM);
    assert_eq!(parent.wait().code(), Some(143));
    assert!(before.iter().all(|pid| is_gone(*pid)), "{before:?}");
}

#[test]
fn a_program_that_waits_for_a_cluster_that_is_removed_ends() {
    let node = Node::several(2);
    let mut waiting = standby(&node, 2);
    until_said(&node, 2, "waiting until node 2 leads: node 1 does");
    node.hearth(&["down"]);
    until_said(&node, 2, "waiting until node 2 leads: it is down");
    let settings = PathBuf::from(format!("{}/hearth.toml", node.dir()));
    let aside = settings.with_extension("aside");
    std::fs::rename(&settings, &aside).unwrap();
    assert_eq!(waiting.wait().code(), Some(2));
    until_said(&node, 2, "was removed: node 2 never leads");
    std::fs::rename(&aside, &settings).unwrap();
}

#[test]
fn a_mount_that_waits_is_there_when_its_node_leads_and_goes_with_the_lead() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::several(2);
    node.run(&["sh", "-c", &format!("echo before > {}", node.path("file"))]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
    command.args(["mount", "--dir", node.dir(), "--node", "2", "--standby"]);
    let mut waiting = Job::of({
        command.stderr(File::create(said(&node, 2)).unwrap());
        command
    });
    until_said(&node, 2, "waiting until node 2 leads: node 1 does");
    node.hearth(&["move", "--to", "2"]);
    assert_eq!(waiting.wait().code(), Some(0));
    let file = format!("{}/n2/file", node.dir());
    let open = File::open(&file).unwrap();
    assert_eq!(read_to_string(&file).unwrap(), "before\n");
    let refused = node.try_hearth(&["move", "--to", "1"]);
    assert_eq!(refused.status.code(), Some(1));
    refused.expect_failure("is busy");
    drop(open);
    node.hearth(&["move", "--to", "1"]);
    assert!(File::open(&file).is_err(), "the mount is gone");
    assert_eq!(node.run(&["cat", &node.path("file")]), "before\n");
}

/// A program that goes on there at once would find a plain folder.
#[test]
fn a_move_returns_when_the_mount_is_there() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::several(2);
    mount_from_now_on(&node);
    for to in ["2", "1", "2", "1", "2", "1"] {
        node.hearth(&["move", "--to", to]);
        let file = format!("{}/n{to}/at {to}", node.dir());
        std::fs::write(&file, "moved").unwrap();
        node.hearth(&["run", "--node", to, "--", "test", "-e", &file]);
    }
    node.hearth(&["down"]);
}

/// The library has a descriptor of the mount for a file that a program maps.
#[test]
fn a_standby_program_that_maps_a_file_ends_before_the_mount_is_taken_away() {
    if !harness::can_mount() {
        return;
    }
    let node = Node::several(2);
    mount_from_now_on(&node);
    let (mut first, mut second) = (mapping(&node, 1), mapping(&node, 2));
    let one = mapped(&mut first);
    node.hearth(&["move", "--to", "2"]);
    let two = mapped(&mut second);
    assert!(is_gone(one));
    until_said(&node, 1, "the program has ended, as the lead moves");
    node.hearth(&["move", "--to", "1", "--force"]);
    mapped(&mut first);
    assert!(is_gone(two));
    until_said(&node, 2, "the program has ended, as the lead moves");
    [first, second].iter_mut().for_each(|job| {
        job.signal(Signal::TERM);
        job.wait();
    });
    node.hearth(&["down"]);
}
