//! End to end: `hearth manager` as a process of its own, members that reach it over the network with the cluster's key,
//! `hearth cluster` beside them, and `kill -9` of the manager.

#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

#[cfg(feature = "zookeeper")]
#[path = "../substrate/cluster/tests/support/ensemble.rs"]
mod ensemble;
mod harness;
mod members;

use cluster::line::{EPOCH, settings};
use cluster::{
    Address, Change, Joining, Manager, Membership, Party, Path, Place, PoolReport, Record, Remote, Rules,
    Store,
};
use format::{ChangeNumber, NodeId};
use harness::{Expect, limited};
use ipc::{Host, SystemHost, Time, Word};
use members::{join, place, pool_of};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;
use transport::{Fabric, Secret};

const HEARTH: &str = env!("CARGO_BIN_EXE_hearth");

/// A folder with a manager that is started and killed.
struct ManagerProcess {
    /// Gone with all that is in it at the end.
    _place: tempfile::TempDir,
    dir: PathBuf,
    child: Child,
    address: String,
    /// Its output, beside its folder.
    log: PathBuf,
}

impl ManagerProcess {
    /// A new cluster with this lease.
    fn new(lease_ms: &str) -> Self {
        let place = tempfile::tempdir().unwrap();
        // It is not there yet.
        let dir = place.path().join("new/cluster");
        let log = place.path().join("log");
        let (child, address) = start(&dir, &log, &["--listen", "127.0.0.1", "--lease", lease_ms]);
        Self { _place: place, dir, child, address, log }
    }

    fn dir(&self) -> &str {
        self.dir.to_str().unwrap()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// How it ends, by itself.
    fn end(&mut self) -> ExitStatus {
        let end = soon();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(SystemHost.now() < end, "it does not end");
            pause(Duration::from_millis(5));
        }
    }

    /// Starts it again, where it was.
    fn restart(&mut self) {
        let (child, address) = start(&self.dir, &self.log, &["--listen", &self.address]);
        assert_eq!(address, self.address);
        self.child = child;
    }

    /// `hearth cluster COMMAND` over the network.
    fn ask(&self, arguments: &[&str]) -> Output {
        let (command, rest) = arguments.split_first().unwrap();
        limited(&[HEARTH, "cluster", command, "--dir", self.dir(), "--manager", &self.address], rest)
    }

    fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let output = self.ask(&[arguments, &["--json"]].concat());
        assert!(output.status.code() < Some(2), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// A node's own client.
    fn client(&self, node: u32) -> Arc<Remote> {
        let text = std::fs::read_to_string(self.dir.join("key")).unwrap();
        let identity = Secret::parse(&text).unwrap().identity(NodeId::new(node));
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        let endpoint = Fabric::tcp("127.0.0.1").endpoint(host.clone(), identity, EPOCH, settings()).unwrap();
        Arc::new(Remote::at(host, Place::Node { endpoint, address: self.address.clone() }))
    }

    fn join(&self, node: u32) -> Arc<Membership> {
        let address = Address::new(&format!("10.0.0.{node}:7")).unwrap();
        let pool = pool_of(node);
        let joining = Joining { node: NodeId::new(node), replaces: None, medium: 0, pool, address };
        Membership::join(Arc::new(SystemHost), self.client(node), &joining, soon()).unwrap()
    }
}

impl Drop for ManagerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a manager, and waits until it says where it serves.
fn start(dir: &std::path::Path, log: &std::path::Path, arguments: &[&str]) -> (Child, String) {
    let stderr = std::fs::OpenOptions::new().create(true).append(true).open(log).unwrap();
    start_with(dir, stderr.into(), arguments)
}

fn start_with(dir: &std::path::Path, stderr: Stdio, arguments: &[&str]) -> (Child, String) {
    let mut child = Command::new(HEARTH)
        .args(["manager", "--dir"])
        .arg(dir)
        .args(arguments)
        .env("HEARTH_LOG", "info")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
    let address = said.trim().strip_prefix("serving at ").unwrap_or_else(|| panic!("it said {said:?}"));
    (child, address.to_owned())
}

fn soon() -> Time {
    SystemHost.now().after(Duration::from_secs(30))
}

fn in_a_second() -> Time {
    SystemHost.now().after(Duration::from_secs(1))
}

fn terminate(manager: &ManagerProcess) {
    let process = rustix::process::Pid::from_child(&manager.child);
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
}

fn pause(span: Duration) {
    let _ = SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(span)));
}

fn kinds(history: &serde_json::Value) -> Vec<&str> {
    history.as_array().unwrap().iter().map(|change| change["kind"].as_str().unwrap()).collect()
}

#[test]
fn members_come_and_go_under_the_eyes_of_an_operator() {
    let manager = ManagerProcess::new("6000");
    let status = manager.json(&["status"]);
    assert_eq!((status["members"].as_u64(), status["lease_ms"].as_u64()), (Some(0), Some(6000)));
    let (one, two) = (manager.join(1), manager.join(2));
    let path = Path::new(b"/mail").unwrap();
    let version = manager.client(9).propose(&place(path.clone(), &[1, 2]), soon()).unwrap().number;
    let by = one.party().unwrap();
    let join = Change::SetSync { path, version, by, node: NodeId::new(2), in_sync: true };
    manager.client(9).propose(&join, soon()).unwrap();

    let members = manager.json(&["members"]);
    assert_eq!(members[0]["node"].as_u64(), Some(1));
    assert_eq!(members[1]["address"].as_str(), Some("10.0.0.2:7"));
    assert_eq!(members[0]["manages"][0].as_str(), Some("/mail"));
    let status = manager.ask(&["status"]).expect_success();
    assert!(
        status.contains("well") && status.contains("chain 1 (hot, in sync), 2 (hot, in sync)"),
        "{status}"
    );

    // A member that is alive cannot be expelled; a silent one is, at the latest when its lease is over.
    manager.ask(&["expel", "1"]).expect_failure("node 1 is alive");
    manager.ask(&["expel", "7"]).expect_failure("node 7 is no member");
    two.stop();
    let expelled = manager.ask(&["expel", "2"]);
    // On a machine that is busy the manager may have been faster.
    if !String::from_utf8_lossy(&expelled.stderr).contains("node 2 is no member") {
        assert_eq!(expelled.expect_success(), "node 2 is expelled\n");
    }
    assert_eq!(manager.json(&["members"]).as_array().unwrap().len(), 1);
    let status = manager.ask(&["status"]);
    assert_eq!(status.status.code(), Some(1), "{status:?}");
    let said = String::from_utf8(status.stdout).unwrap();
    assert!(said.contains("degraded") && said.contains("chain 1 (hot, in sync), 2 (hot, gone)"), "{said}");
    one.leave(soon()).unwrap();
    let is_warned = |line: &str| line.contains("WARN") && line.contains("node 2 was expelled: it was silent");
    let limit = soon();
    while !std::fs::read_to_string(&manager.log).unwrap().lines().any(is_warned) {
        assert!(SystemHost.now() < limit, "the log has no expulsion");
        pause(Duration::from_millis(5));
    }

    let history = manager.json(&["history"]);
    let expected = ["start", "join", "join", "set_subtree", "set_sync", "expel", "leave"];
    assert_eq!(kinds(&history), expected, "{history}");
    assert_eq!(history[5]["node"].as_u64(), Some(2));
    assert_eq!(kinds(&manager.json(&["history", "--last", "2"])), ["expel", "leave"]);
    // By the socket of this machine it is the same manager.
    let local = limited(&[HEARTH, "cluster", "members", "--dir", manager.dir()], &[]);
    assert_eq!(local.expect_success(), "");
}

#[test]
fn a_manager_that_is_killed_has_lost_nothing_and_members_stay() {
    let rounds = if std::env::var_os("HEARTH_PROVE").is_some() { 50 } else { 4 };
    let mut manager = ManagerProcess::new("10000");
    let member = manager.join(1);
    let party = member.party();
    let operator = manager.client(9);
    let mut acknowledged = Vec::new();
    for round in 0..rounds {
        for number in 0..3 {
            let path = Path::new(format!("/r{round}-{number}").as_bytes()).unwrap();
            let change = place(path, &[1]);
            acknowledged.push(operator.propose(&change, soon()).unwrap().number);
        }
        manager.kill();
        if round == 0 {
            manager.ask(&["status"]).expect_failure("does not answer");
        }
        manager.restart();
        let history = manager.json(&["history"]);
        let numbers: Vec<u64> =
            history.as_array().unwrap().iter().map(|change| change["number"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
        assert!(
            acknowledged.iter().all(|number| numbers.contains(&number.get())),
            "{acknowledged:?}: {history}"
        );
    }
    let until = member.valid_until().unwrap();
    let limit = soon();
    while member.valid_until().unwrap() <= until {
        pause(Duration::from_millis(20));
        assert!(SystemHost.now() < limit, "the member does not reach the manager any more");
    }
    assert_eq!(member.party(), party, "the manager only restarted");
    member.leave(soon()).unwrap();
    println!("{rounds} kills, {} acknowledged changes found again", acknowledged.len());
}

/// A manager that starts anew gives every member another version, and no heartbeat was written by that.
#[test]
fn a_manager_that_starts_anew_makes_nobody_look_alive() {
    let mut manager = ManagerProcess::new("3000");
    manager.join(1).stop();
    let expel = Command::new(HEARTH)
        .args(["cluster", "expel", "1", "--dir", manager.dir(), "--manager", &manager.address])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // By now it has looked once.
    pause(Duration::from_millis(500));
    manager.kill();
    manager.restart();
    let output = expel.wait_with_output().unwrap();
    assert_eq!(output.expect_success(), "node 1 is expelled\n");
}

#[test]
fn who_has_not_the_key_is_told_so() {
    let manager = ManagerProcess::new("5000");
    let other = tempfile::tempdir().unwrap();
    let ask = |key: &std::path::Path| {
        let key = key.to_str().unwrap();
        limited(&[HEARTH, "cluster", "status", "--manager", &manager.address, "--key", key], &[])
    };
    ask(&other.path().join("key")).expect_failure("there is no cluster key");
    // One of another cluster, and one of this cluster with another key.
    let own = std::fs::read_to_string(manager.dir.join("key")).unwrap();
    let stranger = Secret::generate(&SystemHost).text();
    let mixed = format!("{}\n{}\n", own.lines().next().unwrap(), stranger.lines().nth(1).unwrap());
    for (text, why) in
        [(stranger.as_str(), "another cluster"), (&mixed, "another key"), ("key", "is no cluster key")]
    {
        let file = other.path().join("key");
        std::fs::write(&file, text).unwrap();
        ask(&file).expect_failure("others can use the cluster key");
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        ask(&file).expect_failure(why);
        std::fs::remove_file(&file).unwrap();
    }
}

#[test]
fn a_manager_says_why_it_does_not_start() {
    let manager = ManagerProcess::new("5000");
    let start = |dir: &str, rest: &[&str]| limited(&[HEARTH, "manager", "--dir", dir], rest);
    start(manager.dir(), &[]).expect_failure("another cluster manager runs");
    let other = tempfile::tempdir().unwrap();
    let other = other.path().to_str().unwrap();
    start(other, &["--lease", "1"]).expect_failure("impossible rules");
    start(other, &["--listen", "somewhere"]).expect_failure("'somewhere' is no address");
    start(other, &["--lease", "9"]).expect_failure("and not 9 ms");
    start(other, &["--drift", "100001"]).expect_failure("and not 100001");
    start(other, &["--listen", &manager.address]).expect_failure("Address already in use");
    // No node could reach it there.
    start(other, &["--listen", "0.0.0.0:0"]).expect_failure("by which they reach it");
    start(other, &["--listen", "[::]:0"]).expect_failure("by which they reach it");
    start(other, &["--listen", "127.0.0.1", "--key", manager.dir()]).expect_failure("it is no file");
    // None of them began a cluster.
    assert_eq!(std::fs::read_dir(other).unwrap().count(), 0);
    let mut private = std::fs::DirBuilder::new();
    private.recursive(true).mode(0o700).create(format!("{other}/manager/manager-9")).unwrap();
    start(other, &[]).expect_failure("what has the name of a log is no file");
    let long = format!("{other}/{}", "x".repeat(100));
    start(&long, &[]).expect_failure("too long for a socket's path");
    let changes = || manager.json(&["history"]).as_array().unwrap().len();
    let before = changes();
    start(manager.dir(), &["--lease", "70"]).expect_failure("another cluster manager runs");
    assert_eq!(changes(), before);
    let ask = limited(&[HEARTH, "cluster", "status", "--dir", "/nonexistent"], &[]);
    ask.expect_failure("there is no cluster manager at /nonexistent/manager/socket");
    let ask = limited(&[HEARTH, "cluster", "status", "--manager", "nonsense"], &[]);
    ask.expect_failure("'nonsense' is no manager");
    let ask = limited(&[HEARTH, "cluster", "status", "--manager", manager.dir()], &[]);
    ask.expect_failure("it is no socket");
    let ask = limited(&[HEARTH, "cluster", "status", "--manager", "127.0.0.1:0"], &[]);
    ask.expect_failure("no port is 0");
}

#[test]
fn a_start_that_is_refused_changes_nothing() {
    let mut manager = ManagerProcess::new("5000");
    manager.kill();
    let start = |rest: &[&str]| limited(&[HEARTH, "manager", "--dir", manager.dir()], rest);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    start(&["--lease", "70"]).expect_failure("was made with a lease of 5000 ms");
    start(&["--listen", &taken.local_addr().unwrap().to_string()]).expect_failure("Address already in use");
    // No socket, no descriptor, no thread.
    let socket = manager.dir.join("manager/socket");
    let _ = std::fs::remove_file(&socket);
    std::fs::create_dir(&socket).unwrap();
    start(&[]).expect_failure("bind: Address already in use");
    std::fs::remove_dir(&socket).unwrap();
    // How many descriptors it needs differs from machine to machine, and the loader needs some before it.
    let mut refused = 0;
    for limit in 4.. {
        let script = format!("ulimit -n {limit}; exec {HEARTH} manager --dir {} 2>&1", manager.dir());
        let mut child = Command::new("bash").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let mut is_refused = |line: &String| refused += u32::from(line.contains("Too many open files"));
        let serves = said.by_ref().inspect(&mut is_refused).any(|line| line.starts_with("serving at "));
        child.kill().unwrap();
        child.wait().unwrap();
        if serves {
            break;
        }
    }
    assert!(refused >= 2, "{refused} starts were refused by the manager");
    manager.restart();
    // One for each start that was none of these.
    assert_eq!(kinds(&manager.json(&["history"])), ["start", "start", "start"]);
}

/// A panic leaves nothing behind that is half changed and goes on: here of a cluster that has had all its changes.
#[test]
fn a_broken_invariant_ends_the_manager_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("manager");
    std::fs::DirBuilder::new().mode(0o700).create(&folder).unwrap();
    let medium = pmem::Medium::file(&folder).unwrap();
    let rules = Rules::new(Duration::from_secs(5), 1000).unwrap();
    let (mut store, mut kept) = Store::open(medium.clone(), 7, rules).unwrap();
    kept.view.number = ChangeNumber::new(1 << 32);
    // Until the log is full, and the next one begins with this view.
    let path = Path::new(&[&b"/"[..], &[b'a'; 1000]].concat()).unwrap();
    let change = place(path, &[]);
    let record =
        Record { number: ChangeNumber::new(1), wall_ns: 0, epoch: kept.view.epoch, change, refused: None };
    while medium.list().unwrap().contains(&"manager-1".to_owned()) {
        store.append(&vec![record.clone(); 500], &kept.view, &kept.history).unwrap();
    }
    drop(store);
    let output = limited(&[HEARTH, "manager", "--dir", dir.path().to_str().unwrap()], &[]);
    assert_eq!(output.status.signal(), Some(rustix::process::Signal::ABORT.as_raw()), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("fewer than 2^32 changes"), "{output:?}");
}

/// Libraries below libfabric take over SIGTERM, and end the process in their handler.
#[test]
fn a_manager_that_listens_ends_in_order() {
    let mut manager = ManagerProcess::new("5000");
    terminate(&manager);
    assert_eq!(manager.end().code(), Some(0));
    let ask = limited(&[HEARTH, "cluster", "status", "--dir", manager.dir()], &[]);
    ask.expect_failure("there is no cluster manager at");
    manager.restart();
    manager.kill();
    let ask = limited(&[HEARTH, "cluster", "status", "--dir", manager.dir()], &[]);
    ask.expect_failure("the cluster manager has ended that listened at");
}

/// A reader of the log may have stopped: that keeps the manager neither from serving nor from ending.
#[test]
fn a_manager_whose_log_nobody_reads_ends_in_order() {
    let mut manager = ManagerProcess::new("5000");
    manager.kill();
    let (reader, writer) = std::io::pipe().unwrap();
    (manager.child, _) = start_with(&manager.dir, writer.into(), &["--listen", &manager.address]);
    let operator = manager.client(9);
    // More lines than a pipe holds.
    for instance in 1..=500 {
        let node = NodeId::new(1);
        let life = operator.propose(&join(instance), soon()).unwrap().epoch;
        operator.propose(&Change::Leave { party: Party { node, life } }, soon()).unwrap();
    }
    terminate(&manager);
    assert_eq!(manager.end().code(), Some(0));
    drop(reader);
}

/// A manager that is stopped accepts nobody: a command waits no longer than it says.
#[test]
fn a_manager_that_accepts_nobody_is_not_waited_for_without_end() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("manager")).unwrap();
    let socket = dir.path().join("manager/socket");
    let listener = UnixListener::bind(&socket).unwrap();
    // A backlog of none has room for one.
    rustix::net::listen(&listener, 0).unwrap();
    let _first = UnixStream::connect(&socket).unwrap();
    let dir = dir.path().to_str().unwrap();
    limited(&[HEARTH, "cluster", "status", "--dir", dir], &[]).expect_failure("does not answer");
}

#[test]
fn a_manager_whose_folder_was_moved_ends_in_order() {
    let mut manager = ManagerProcess::new("3600000");
    std::fs::rename(&manager.dir, manager.dir.with_file_name("elsewhere")).unwrap();
    terminate(&manager);
    assert_eq!(manager.end().code(), Some(0));
}

/// Else it would acknowledge what no start finds, and another one might begin in its place.
#[test]
fn a_manager_whose_log_is_not_where_it_was_ends() {
    type Way = fn(&ManagerProcess);
    let log: Way = |manager| std::fs::remove_file(manager.dir.join("manager/manager-1")).unwrap();
    let folder: Way = |manager| std::fs::remove_dir_all(&manager.dir).unwrap();
    let place: Way = |manager| {
        std::fs::rename(&manager.dir, manager.dir.with_file_name("elsewhere")).unwrap();
        std::fs::create_dir_all(manager.dir.join("manager")).unwrap();
    };
    let begun: Way = |manager| std::fs::remove_file(manager.dir.join("manager/begun")).unwrap();
    let socket: Way = |manager| std::fs::remove_file(manager.dir.join("manager/socket")).unwrap();
    for lose in [log, folder, place, begun, socket] {
        // Without a client that asks.
        let mut manager = ManagerProcess::new("100");
        lose(&manager);
        assert_eq!(manager.end().code(), Some(2));
    }
    // Asked before it looks by itself.
    let mut manager = ManagerProcess::new("3600000");
    let client = manager.client(1);
    log(&manager);
    assert_eq!(client.propose(&join(5), soon()), Err(cluster::Error::Unknown), "it is not acknowledged");
    assert_eq!(manager.end().code(), Some(2));
}

/// A folder that others own or may write to is no manager's folder, and a file like that is no cluster's key.
#[test]
fn a_folder_or_key_of_others_is_refused() {
    use std::os::unix::fs::{PermissionsExt, chown};
    let mut manager = ManagerProcess::new("5000");
    manager.kill();
    let start = || limited(&[HEARTH, "manager", "--dir", manager.dir(), "--listen", "127.0.0.1"], &[]);
    let mode = |mode| std::fs::set_permissions(manager.dir.join("manager"), PermissionsExt::from_mode(mode));
    for open in [0o755, 0o1777, 0o2770] {
        mode(open).unwrap();
        start().expect_failure("open to others");
    }
    mode(0o700).unwrap();
    if rustix::process::geteuid().is_root() {
        let key = manager.dir.join("key");
        chown(&key, Some(65534), None).unwrap();
        start().expect_failure("is that of another user");
        chown(&key, Some(0), None).unwrap();
        chown(manager.dir.join("manager"), Some(65534), None).unwrap();
        start().expect_failure("is another user's");
        chown(manager.dir.join("manager"), Some(0), None).unwrap();
    } else {
        println!("skipped: needs root");
    }
    // A file that a start left, which was killed while it made the key, is removed; a file of the user's stays.
    let (left, own) = (manager.dir.join("key.0123456789abcdef"), manager.dir.join("key.old"));
    for file in [&left, &own] {
        std::fs::write(file, "a key").unwrap();
    }
    manager.restart();
    assert_eq!((left.exists(), own.exists()), (false, true));
}

/// An older copy of the manager's folder: a member that has seen what is lost believes in nothing any more.
#[test]
fn a_member_whose_manager_has_lost_changes_ends() {
    let mut manager = ManagerProcess::new("10000");
    let member = manager.join(1);
    let (kept, folder) = (manager.dir.with_file_name("copy"), manager.dir.join("manager"));
    let copy = |from: &std::path::Path, to: &std::path::Path| {
        limited(&["cp", "-a", "-T"], &[from.to_str().unwrap(), to.to_str().unwrap()]).expect_success();
    };
    manager.kill();
    copy(&folder, &kept);
    manager.restart();
    let operator = manager.client(9);
    let mut last = ChangeNumber::new(0);
    for number in 0..5 {
        let path = Path::new(format!("/{number}").as_bytes()).unwrap();
        let change = place(path, &[1]);
        last = operator.propose(&change, soon()).unwrap().number;
    }
    let limit = soon();
    let wait_until = |fits: &dyn Fn() -> bool, what: &str| {
        while !fits() {
            assert!(SystemHost.now() < limit, "{what}");
            pause(Duration::from_millis(5));
        }
    };
    wait_until(&|| member.view().is_some_and(|view| view.number >= last), "it does not see the changes");
    assert!(member.party().is_some());
    manager.kill();
    std::fs::remove_dir_all(&folder).unwrap();
    copy(&kept, &folder);
    manager.restart();
    wait_until(&|| member.party().is_none(), "it goes on");
    assert_eq!(member.valid_until(), None);
    assert_eq!(manager.json(&["members"])[0]["node"].as_u64(), Some(1), "the manager does not know it yet");
}

#[test]
fn a_manager_whose_log_is_cut_says_so() {
    let mut manager = ManagerProcess::new("5000");
    let log = std::fs::OpenOptions::new().write(true).open(manager.dir.join("manager/manager-1")).unwrap();
    log.set_len(0).unwrap();
    // Something is to be written there.
    let client = manager.client(1);
    let (pool, address) = (PoolReport::default(), Address::default());
    let joining = Joining { node: NodeId::new(1), replaces: None, medium: 0, pool, address };
    assert!(Membership::join(Arc::new(SystemHost), client, &joining, in_a_second()).is_err());
    assert_eq!(manager.end().code(), Some(2));
}

/// On ZooKeeper every node is an expeller, and so is `hearth cluster expel`; a command that only reads is none, however
/// long it takes.
#[cfg(feature = "zookeeper")]
#[test]
fn a_command_that_reads_expels_nobody() {
    use cluster::zookeeper::ZooKeeper;
    if !ensemble::is_there() {
        return;
    }
    let ensemble = ensemble::Ensemble::new(1);
    let rules = Rules::new(Duration::from_millis(10), 1000).unwrap();
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    let zoo = ZooKeeper::connect(host, &ensemble.addresses(), "/hearth", rules, soon()).unwrap();
    // Silent from the first, and so many changes that to read them takes many leases.
    zoo.propose(&join(1), soon()).unwrap();
    for number in 0..100 {
        let path = Path::new(format!("/{number}").as_bytes()).unwrap();
        zoo.propose(&place(path, &[1]), soon()).unwrap();
    }
    let ensemble_at = format!("zookeeper://{}/hearth", ensemble.addresses());
    let ask =
        |command: &[&str]| limited(&[HEARTH, "cluster"], &[command, &["--manager", &ensemble_at]].concat());
    for command in ["status", "members", "history"].repeat(5) {
        assert!(ask(&[command]).status.code() < Some(2), "{command}");
    }
    assert!(ask(&["history"]).expect_success().lines().count() > 100);
    assert_eq!(ask(&["members"]).expect_success().lines().count(), 1);
    assert_eq!(ask(&["expel", "1"]).expect_success(), "node 1 is expelled\n");
    zoo.stop();
}
