//! A disk that stops answering: no operation on it returns, and none fails. A node that leads gives the lead to a copy, and does
//! nothing as its head when the disk answers again; without a copy it waits, and `hearth status` says so. A copy costs the copy
//! only. A pause of a process is no fault of its disk.
//!
//! `tests/head_faults.rs` has the same under two workers, with an oracle.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

mod harness;
mod prefix;
mod processes;
mod several;

use harness::{Expect, limited, until};
use ipc::{Host, SystemHost, Word};
use processes::{Job, job, say};
use several::alone::in_own_namespace;
use several::cluster::Chain;
use several::device::device_variables;
use several::worker;
use std::fs::OpenOptions;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The test that does the jobs.
const JOBS: &str = "a_worker_says_what_it_did";
/// A lease that a busy machine does not cost anybody, and the patience with a copy, in ms.
const LONG: (u64, u64) = (4000, 2500);
/// How long a disk may not answer, in these clusters.
const DISK_SECONDS: u64 = 2;

#[test]
fn a_worker_says_what_it_did() {
    let Some(words) = job() else { return };
    match &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // Adds lines to a file, each synced, and says the number of each.
        ["append", path] => {
            let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
            for number in 1_u64.. {
                if let Err(why) = writeln!(file, "{number}").and_then(|()| file.sync_all()) {
                    say(&format!("failed after {}: {why}", number - 1));
                    std::process::exit(0);
                }
                say(&number.to_string());
            }
        }
        // Adds a line to each file, synced, to the next one when it is told so.
        ["each", paths @ ..] => {
            let mut file = None;
            for (number, path) in paths.iter().enumerate() {
                if number == 0 || path != &paths[number - 1] {
                    file = Some(OpenOptions::new().create(true).append(true).open(path).unwrap());
                }
                let file = file.as_mut().unwrap();
                writeln!(file, "{}", number + 1).and_then(|()| file.sync_all()).unwrap();
                say(&(number + 1).to_string());
                std::io::stdin().read_line(&mut String::new()).unwrap();
            }
            std::process::exit(0);
        }
        _ => worker::job(&words),
    }
}

/// A cluster whose nodes 1 to `devices` have a device that can fail, and whose node 1 leads.
fn cluster(count: u32, devices: u32) -> Chain {
    let (lease, patience) = LONG;
    let chain = Chain::on("file", count, lease, patience);
    chain.set("disk_seconds", DISK_SECONDS);
    (1..=devices).for_each(|node| chain.give_device(node));
    lead(&chain, 1);
    chain
}

fn lead(chain: &Chain, node: u32) {
    if chain.until_whole() != node {
        chain.hearth(&["move", "--to", &node.to_string()]);
    }
    assert_eq!(chain.until_whole(), node);
}

/// The last line that a job has said by now.
fn last_of(job: &mut Job, last: &mut u64) {
    while job.says_something() {
        let Some(line) = job.line() else { return };
        *last = line.parse().unwrap_or(*last);
    }
}

/// Hears a job until it has synced so many lines more.
fn hear(job: &mut Job, last: &mut u64, more: u64) {
    let wanted = *last + more;
    while *last < wanted {
        *last = job.line().expect("it goes on").parse().expect("no call failed");
    }
}

/// For how long the disk of a node has not answered, as the node says, in ms.
fn stalled(chain: &Chain, node: u32) -> Option<u64> {
    chain.statuses()[node as usize - 1]["disk_stalled_ms"].as_u64()
}

fn problems(chain: &Chain, node: u32) -> String {
    chain.statuses()[node as usize - 1]["problems"].to_string()
}

/// All lines are there up to one that was synced.
fn has_lines(chain: &Chain, node: u32, synced: u64) {
    let there =
        chain.hearth(&["run", "--node", &node.to_string(), "--", "cat", &chain.path_at(node, "file")]);
    let numbers: Vec<u64> = there.lines().map(|line| line.parse().unwrap()).collect();
    assert!(numbers.len() as u64 >= synced, "{} lines of {synced}", numbers.len());
    assert!(numbers.iter().copied().eq(1..=numbers.len() as u64), "{numbers:?}");
}

/// The daemon of node 1 has nothing to do.
fn until_idle(chain: &Chain) {
    let (mut before, mut same) = (0, 0);
    until("the daemon has nothing to do", || {
        let commits = chain.statuses()[0]["commits"].as_u64().unwrap();
        same = if commits == before { same + 1 } else { 0 };
        before = commits;
        same == 50
    });
}

fn append(chain: &Chain, node: u32) -> Job {
    chain.begin_at(node, JOBS, &["append", &chain.path_at(node, "file")])
}

#[test]
fn a_head_that_is_alone_waits_for_its_disk_and_says_so() {
    let chain = cluster(2, 1);
    chain.cut(2);
    until("node 2 is expelled", || chain.statuses()[0]["chain"]["copies"][0]["member"] == false);
    let (mut job, mut last) = (append(&chain, 1), 0);
    hear(&mut job, &mut last, 5);
    let daemon = chain.daemon_of(1);
    chain.set_device(1, "hangs");
    until("its disk has not answered for longer than a head with a copy waits", || {
        stalled(&chain, 1).is_some_and(|stalled_ms| stalled_ms > DISK_SECONDS * 2000)
    });
    let said = problems(&chain, 1);
    assert!(
        said.contains("the disk of its pool has not answered for") && said.contains("no other"),
        "{said}"
    );
    assert_eq!((chain.role(1).as_str(), chain.daemon_of(1)), ("leads", daemon));
    chain.mend_device(1);
    // The calls that waited succeed.
    hear(&mut job, &mut last, 5);
    until("nothing is said of its disk", || stalled(&chain, 1).is_none() && chain.failure(1).is_empty());
    chain.start(2);
    assert_eq!(chain.until_whole(), 1);
    hear(&mut job, &mut last, 5);
    drop(job);
    has_lines(&chain, 1, last);
    chain.close();
}

#[test]
fn a_copy_whose_disk_does_not_answer_costs_the_copy_only() {
    let chain = cluster(2, 2);
    let (mut job, mut last) = (append(&chain, 1), 0);
    hear(&mut job, &mut last, 5);
    let daemon = chain.daemon_of(2);
    chain.set_device(2, "hangs");
    until("the copy is none", || chain.in_sync(1) == [1]);
    hear(&mut job, &mut last, 5);
    until("the copy says why", || problems(&chain, 2).contains("the disk of its pool has not answered for"));
    assert_eq!((chain.role(1).as_str(), stalled(&chain, 1)), ("leads", None));
    chain.mend_device(2);
    assert_eq!(chain.until_whole(), 1);
    assert_eq!((chain.daemon_of(2), stalled(&chain, 2)), (daemon, None), "its daemon went on");
    hear(&mut job, &mut last, 5);
    drop(job);
    chain.until_equal();
    chain.cut(1);
    assert_eq!(chain.until_leads_but(&[1]), 2);
    has_lines(&chain, 2, last);
    chain.start(1);
    chain.until_whole();
    chain.close();
}

/// The next node in sync leads in place of one that was named and whose disk does not answer.
#[test]
fn a_node_that_is_to_lead_and_whose_disk_does_not_answer_leaves_it_to_the_next() {
    let chain = cluster(3, 2);
    let (mut job, mut last) = (append(&chain, 1), 0);
    hear(&mut job, &mut last, 5);
    drop(job);
    chain.until_equal();
    chain.set_device(2, "hangs");
    chain.cut(1);
    assert_eq!(chain.until_leads_but(&[1]), 3);
    until("the status says why", || chain.failure(2).contains("has not answered for"));
    has_lines(&chain, 3, last);
    chain.mend_device(2);
    (1..=2).for_each(|node| chain.start(node));
    assert_eq!(chain.until_whole(), 3);
    chain.until_equal();
    chain.close();
}

/// A sync takes 600 ms, and the daemon stands for longer than its disk may not answer, several times.
#[test]
fn a_pause_of_the_daemon_is_no_fault_of_its_disk() {
    let chain = cluster(2, 1);
    let (mut job, mut last) = (append(&chain, 1), 0);
    hear(&mut job, &mut last, 5);
    chain.set_device(1, "slow");
    let daemon = chain.daemon_of(1);
    for _ in 0..3 {
        // Somewhere in a sync.
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(Duration::from_millis(300))));
        let stopped = chain.stop_process("node-1/serve.pid");
        let pause = Duration::from_millis(DISK_SECONDS * 1000 + 500);
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(pause)));
        stopped.go_on();
        hear(&mut job, &mut last, 2);
    }
    assert_eq!((chain.leader(), chain.daemon_of(1)), (Some(1), daemon));
    assert_eq!(chain.failure(1), "");
    chain.mend_device(1);
    chain.until_whole();
    drop(job);
    has_lines(&chain, 1, last);
    chain.close();
}

/// A file system of its own in the place of a folder, with what is in the folder, that can be frozen: a process that writes to it is
/// in a sleep that no signal ends. It thaws when this test has ended, however that is.
struct OwnFileSystem {
    folder: String,
    thaws: Child,
}

impl OwnFileSystem {
    /// None if this machine cannot mount such a file system.
    fn at(folder: &str) -> Option<Self> {
        let image = format!("{folder}.image");
        let script = "truncate -s 400M $1 && mkfs.ext4 -q $1 && cp -a $0 $0.aside && mount -o loop $1 $0 && chmod 711 $0 \
                      && cp -a $0.aside/. $0 && rm -r $0.aside";
        if !limited(&["sh", "-c", script], &[folder, &image]).status.success() {
            return None;
        }
        let mut thaws = Command::new("timeout");
        thaws.args(["600", "sh", "-c", "read never; fsfreeze -u $0 2>/dev/null", folder]);
        let thaws = thaws.stdin(Stdio::piped()).spawn().unwrap();
        Some(Self { folder: folder.to_owned(), thaws })
    }

    /// It is frozen until the result is dropped. Jobs end only after that.
    fn freeze(&self) -> Frozen<'_> {
        assert!(limited(&["fsfreeze", "-f"], &[&self.folder]).status.success());
        Frozen(self)
    }
}

struct Frozen<'a>(&'a OwnFileSystem);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        limited(&["fsfreeze", "-u"], &[&self.0.folder]);
    }
}

impl Drop for OwnFileSystem {
    fn drop(&mut self) {
        drop(self.thaws.stdin.take());
        let _ = self.thaws.wait();
    }
}

/// A cluster whose node 1 leads and has a disk of its own for a folder.
fn on_own_disk(folder: &str) -> Option<(Chain, OwnFileSystem)> {
    let chain = cluster(2, 0);
    chain.end(1);
    let Some(disk) = OwnFileSystem::at(&format!("{}/{folder}", chain.dir())) else {
        println!("skipped: needs a loop device and ext4");
        return None;
    };
    chain.start(1);
    lead(&chain, 1);
    Some((chain, disk))
}

/// The disk of the pool, or of all that the node has: its log and its notes, too.
fn freezes(folder: &str) {
    let Some((chain, disk)) = on_own_disk(folder) else { return };
    let (mut job, mut last) = (append(&chain, 1), 0);
    hear(&mut job, &mut last, 20);
    let pid = chain.daemon_of(1).unwrap().unsigned_abs();
    let frozen = disk.freeze();
    assert_eq!(chain.until_leads_but(&[1]), 2);
    last_of(&mut job, &mut last);
    has_lines(&chain, 2, last);
    let more = chain.path_at(2, "more");
    chain.hearth(&["run", "--node", "2", "--", "sh", "-c", &format!("echo more > {more}; sync {more}")]);
    // Its process is there still, if a thread of it is in that sleep.
    if SystemHost.started(pid).is_some() {
        let status = String::from_utf8_lossy(&chain.try_hearth(&["status"]).stdout).into_owned();
        assert!(status.contains("a thread that waits for its disk"), "{status}");
        println!("{folder}: its process has ended but for a thread");
    }
    assert_eq!(chain.leader(), Some(2));
    drop(frozen);
    until("the former daemon is gone", || SystemHost.started(pid).is_none());
    chain.start(1);
    assert_eq!(chain.until_whole(), 2);
    last_of(&mut job, &mut last);
    drop(job);
    has_lines(&chain, 2, last);
    chain.until_equal();
    chain.close();
    drop(disk);
}

#[test]
fn a_head_whose_pool_is_on_a_disk_that_freezes_gives_the_lead_to_a_copy() {
    if in_own_namespace("a_head_whose_pool_is_on_a_disk_that_freezes_gives_the_lead_to_a_copy") {
        freezes("node-1/pool");
    }
}

#[test]
fn a_head_whose_folder_is_on_a_disk_that_freezes_gives_the_lead_to_a_copy() {
    if in_own_namespace("a_head_whose_folder_is_on_a_disk_that_freezes_gives_the_lead_to_a_copy") {
        freezes("node-1");
    }
}

/// The write of the program waits for the disk, in the process of the program; the daemon has nothing to do.
#[test]
fn a_head_gives_the_lead_to_a_copy_when_only_a_program_waits_for_the_disk() {
    if !in_own_namespace("a_head_gives_the_lead_to_a_copy_when_only_a_program_waits_for_the_disk") {
        return;
    }
    let Some((chain, disk)) = on_own_disk("node-1/pool") else { return };
    let file = chain.path_at(1, "file");
    let mut job = chain.begin_at(1, JOBS, &["each", &file, &file]);
    assert_eq!(job.line().as_deref(), Some("1"));
    until_idle(&chain);
    let frozen = disk.freeze();
    job.tell("");
    assert_eq!(chain.until_leads_but(&[1]), 2);
    has_lines(&chain, 2, 1);
    drop(frozen);
    drop(job);
    chain.start(1);
    assert_eq!(chain.until_whole(), 2);
    chain.until_equal();
    chain.close();
    drop(disk);
}

/// A thread of the daemon holds the lock of its state while it waits for the disk.
#[test]
fn the_status_of_a_head_on_a_frozen_disk_is_given() {
    if !in_own_namespace("the_status_of_a_head_on_a_frozen_disk_is_given") {
        return;
    }
    let Some((chain, disk)) = on_own_disk("node-1/pool") else { return };
    chain.cut(2);
    until("node 2 is expelled", || chain.statuses()[0]["chain"]["copies"][0]["member"] == false);
    let [first, second] = ["first", "second"].map(|name| chain.path_at(1, name));
    // Another program made it: to write to it takes an entry of the ledger.
    chain.hearth(&["run", "--node", "1", "--", "touch", &second]);
    let mut job = chain.begin_at(1, JOBS, &["each", &first, &second]);
    assert_eq!(job.line().as_deref(), Some("1"));
    let said = std::path::PathBuf::from(format!("{}/said", chain.dir()));
    let mut standby = chain.begin_standby(1, JOBS, &["each", &chain.path_at(1, "third")], &said);
    standby.until_begun();
    assert_eq!(standby.line().as_deref(), Some("1"));
    let daemon = chain.daemon_of(1);
    until_idle(&chain);
    let frozen = disk.freeze();
    job.tell("");
    let mut silent = 0;
    until("the node says that its disk does not answer", || {
        let told = &chain.statuses()[0];
        silent += u32::from(told["state"] == "silent");
        assert!(silent < 5, "it says nothing");
        // For longer than a parent lets its program run without a report.
        told["disk_stalled_ms"].as_u64().is_some_and(|stalled_ms| stalled_ms > LONG.0 + 1000)
    });
    for _ in 0..5 {
        assert_eq!((chain.role(1).as_str(), chain.daemon_of(1)), ("leads", daemon));
    }
    drop(frozen);
    assert_eq!(job.line().as_deref(), Some("2"), "its calls return");
    let said = std::fs::read_to_string(said).unwrap();
    assert!(!said.contains("killed"), "{said}");
    drop((job, standby));
    assert_eq!(chain.hearth(&["run", "--node", "1", "--", "cat", &second]), "2\n");
    chain.start(2);
    chain.until_equal();
    chain.close();
    drop(disk);
}

#[test]
fn a_node_of_one_says_that_its_disk_does_not_answer() {
    let node = harness::Node::in_memory_as_files();
    let device = format!("{}/device", node.dir());
    node.hearth(&["down"]).expect_success();
    let variables = device_variables(node.dir(), &device);
    let variables: Vec<&str> = variables.iter().map(String::as_str).collect();
    limited(&variables, &[&node.program(), "up", "--no-mount", "--dir", node.dir()]).expect_success();
    std::fs::write(&device, "hangs").unwrap();
    let mut writes = Command::new(node.program());
    writes.args([
        "run",
        "--dir",
        node.dir(),
        "--",
        "sh",
        "-c",
        "echo kept > $0; sync $0",
        &node.path("file"),
    ]);
    let mut writes = Job::of(writes);
    until("the status says it", || {
        let status = node.hearth(&["status", "--json"]);
        let told: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        let is_told = told[0]["disk_stalled_ms"].as_u64().is_some_and(|stalled_ms| stalled_ms >= 2000);
        assert!(!is_told || status.status.code() == Some(1), "it is degraded");
        is_told
    });
    let said = String::from_utf8_lossy(&node.hearth(&["status"]).stdout).into_owned();
    assert!(said.contains("the disk of its pool has not answered for"), "{said}");
    std::fs::remove_file(&device).unwrap();
    assert!(writes.wait().success());
    until("it is well again", || node.hearth(&["status"]).status.success());
    assert_eq!(node.sh("cat $T/file").expect_success(), "kept\n");
    node.hearth(&["down"]).expect_success();
    node.check();
}
