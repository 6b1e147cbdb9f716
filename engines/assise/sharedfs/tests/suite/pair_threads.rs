//! Two nodes with threads of their own, over tcp on the loopback: fsyncs of several programs at once, a copy that hangs and
//! is removed, a copy whose daemon is restarted, and take-over.

use crate::client::{Client, FILE, ROOT, user};
use crate::pair::{COPY, HEAD, config, format_for, identity, sync, term};
use format::{Epoch, InodeNumber, NodeId};
use ipc::{Host, SystemHost, Word};
use pmem::Medium;
use sharedfs::{Config, Daemon, Standby};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;
use transport::{Connection, Endpoint, Fabric, Listener};

/// No single wait takes longer.
pub const LIMIT: Duration = Duration::from_secs(20);

fn host() -> Arc<dyn Host> {
    Arc::new(SystemHost)
}

fn medium(folder: &Path, node: u32) -> Medium {
    let path = folder.join(format!("n{node}"));
    std::fs::create_dir_all(&path).unwrap();
    Medium::memory(&path).unwrap()
}

fn endpoint(node: u32) -> Endpoint {
    let settings = transport::Settings { silence: Some(LIMIT), ..mirror::settings() };
    Fabric::tcp("127.0.0.1").endpoint(host(), identity(node), Epoch::new(1), settings).unwrap()
}

/// A thread, and what it gives.
pub struct Program<T> {
    result: mpsc::Receiver<T>,
    thread: Box<dyn ipc::host::Join>,
}

pub fn spawn<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> Program<T> {
    let (sender, result) = mpsc::channel();
    let thread = SystemHost.spawn("program", Box::new(move || sender.send(body()).unwrap())).unwrap();
    Program { result, thread }
}

impl<T> Program<T> {
    pub fn end(self) -> T {
        self.try_end().expect("it ends in time")
    }

    /// `None` if it does not end in time, or panics.
    pub fn try_end(self) -> Option<T> {
        let result = self.result.recv_timeout(LIMIT).ok()?;
        self.thread.join().ok()?;
        Some(result)
    }
}

/// A standby that follows each head that connects.
pub struct Follower {
    pub standby: Standby,
    pub listener: Arc<Listener>,
    ending: Arc<AtomicBool>,
    thread: Option<Program<()>>,
}

impl Follower {
    fn start(standby: Standby, listener: Arc<Listener>) -> Self {
        Self::start_slowed(standby, listener, Duration::ZERO)
    }

    /// One that takes so long for each message.
    fn start_slowed(standby: Standby, listener: Arc<Listener>, pause: Duration) -> Self {
        standby.start().unwrap();
        let ending = Arc::new(AtomicBool::new(false));
        let thread = {
            let (standby, listener, ending) = (standby.clone(), listener.clone(), ending.clone());
            spawn(move || {
                while !ending.load(Ordering::Acquire) {
                    let until = SystemHost.now().after(Duration::from_millis(20));
                    if let Ok(connection) = listener.accept(Some(until)) {
                        match pause {
                            Duration::ZERO => drop(standby.follow(&connection)),
                            pause => follow_slowly(&standby, &connection, pause),
                        }
                    }
                }
            })
        };
        Self { standby, listener, ending, thread: Some(thread) }
    }

    pub fn end(&mut self) {
        self.ending.store(true, Ordering::Release);
        self.standby.fence(u64::MAX);
        self.thread.take().unwrap().end();
    }
}

fn follow_slowly(standby: &Standby, connection: &Connection, pause: Duration) {
    let Ok(link) = standby.greet(connection) else { return connection.close() };
    loop {
        let until = SystemHost.now().after(Duration::from_millis(20));
        match standby.receive(connection, link, until) {
            Ok(mirror::Stepped::Taken) => {
                SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(pause)));
            }
            Ok(_) => {}
            Err(_) => return connection.close(),
        }
    }
}

pub struct Nodes {
    pub daemon: Arc<Daemon>,
    /// The head's standby before it led.
    head: Standby,
    pub follower: Follower,
    endpoint: Endpoint,
    /// Of the copy.
    other: Endpoint,
    // After what uses it.
    pub folder: tempfile::TempDir,
}

impl Nodes {
    pub fn new(config_of: impl Fn(u32) -> Config) -> Self {
        Self::slowed(config_of, Duration::ZERO)
    }

    /// The copy takes so long for each message.
    pub fn slowed(config_of: impl Fn(u32) -> Config, pause: Duration) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let media = [medium(folder.path(), HEAD), medium(folder.path(), COPY)];
        format_for(&media[0], HEAD);
        format_for(&media[1], COPY);
        let standby = Standby::open(host(), &media[0], config_of(HEAD)).unwrap();
        standby.start().unwrap();
        let daemon = Arc::new(standby.lead(term(HEAD, 1), Vec::new()).unwrap().0);
        daemon.start().unwrap();
        let other = endpoint(COPY);
        let listener = Arc::new(other.listen("").unwrap());
        let copy = Standby::open(host(), &media[1], config_of(COPY)).unwrap();
        let follower = Follower::start_slowed(copy, listener, pause);
        let endpoint = endpoint(HEAD);
        let nodes = Self { daemon, head: standby, follower, endpoint, other, folder };
        nodes.daemon.add_copy(nodes.connect()).unwrap();
        nodes
    }

    pub fn connect(&self) -> Connection {
        let until = SystemHost.now().after(LIMIT);
        self.endpoint.connect(&self.follower.listener.address(), NodeId::new(COPY), until).unwrap()
    }
}

pub fn wait_for(what: &str, mut ready: impl FnMut() -> bool) {
    let until = SystemHost.now().after(LIMIT);
    while !ready() {
        assert!(SystemHost.now() < until, "waited for: {what}");
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(Duration::from_millis(1))));
    }
}

/// A program that writes to a file of its own and syncs each time; gives the file and the last write.
fn write_and_sync(daemon: &Arc<Daemon>, pid: u32, rounds: u64) -> (InodeNumber, u64) {
    let (client, file) = begin_program(daemon, pid);
    go_on(client, file, rounds)
}

/// A program with a file of its own. Programs begin one after the other: this client does not look whether the lease on the
/// folder is taken from it while it makes the file.
pub fn begin_program(daemon: &Arc<Daemon>, pid: u32) -> (Client, InodeNumber) {
    let mut client = Client::attach_as(daemon, user(0), pid);
    client.write_lease(ROOT);
    let (file, _) = client.create(ROOT, format!("file{pid}").as_bytes(), FILE | 0o644);
    (client, file)
}

fn go_on(mut client: Client, file: InodeNumber, rounds: u64) -> (InodeNumber, u64) {
    for round in 1..=rounds {
        assert!(client.write(file, 0, &round.to_le_bytes()));
        let size = 100 * (round as usize % 30);
        assert!(client.write(file, 8, &vec![round as u8; size]));
        sync(&client, &[(file, 1)]).unwrap();
    }
    (file, rounds)
}

/// A file, and its first bytes.
fn read_first(daemon: &Arc<Daemon>, path: &str) -> (InodeNumber, Vec<u8>) {
    let client = Client::attach(daemon, user(0));
    let file = client.walk(path).unwrap().inode;
    (file, client.read(file, 0, 8).unwrap())
}

#[test]
fn programs_that_sync_at_once_are_on_both() {
    let mut nodes = Nodes::new(config);
    let programs: Vec<_> = (1..=3)
        .map(|pid| begin_program(&nodes.daemon, pid))
        .collect::<Vec<_>>()
        .into_iter()
        .map(|(client, file)| spawn(move || go_on(client, file, 200)))
        .collect();
    let written: Vec<_> = programs.into_iter().map(|program| program.end()).collect();
    // The head says nothing any more.
    nodes.follower.end();
    let daemon = Arc::new(nodes.follower.standby.lead(term(COPY, 2), Vec::new()).unwrap().0);
    let client = Client::attach(&daemon, user(0));
    for ((file, last), pid) in written.into_iter().zip(1..) {
        assert_eq!(client.walk(&format!("file{pid}")).unwrap().inode, file);
        assert_eq!(client.read(file, 0, 8).unwrap(), last.to_le_bytes());
    }
    assert!(daemon.terminations().is_empty() && nodes.daemon.failure().is_none());
}

#[test]
fn a_copy_that_comes_back_goes_on_where_it_was() {
    let mut nodes = Nodes::new(config);
    write_and_sync(&nodes.daemon, 1, 50);
    nodes.follower.end();
    nodes.follower.standby.stop();
    wait_for("the head sees that the connection is over", || !nodes.daemon.copies()[0].connected);
    // From now on an fsync waits for the copy.
    let daemon = nodes.daemon.clone();
    let program = spawn(move || write_and_sync(&daemon, 2, 50));
    wait_for("it is told", || nodes.daemon.copies()[0].stalled.is_some());
    assert!(program.result.try_recv().is_err());
    let again = Standby::open(host(), &medium(nodes.folder.path(), COPY), config(COPY)).unwrap();
    nodes.follower = Follower::start(again, nodes.follower.listener.clone());
    nodes.daemon.add_copy(nodes.connect()).unwrap();
    let (file, last) = program.end();
    nodes.follower.end();
    let daemon = Arc::new(nodes.follower.standby.lead(term(COPY, 2), Vec::new()).unwrap().0);
    assert_eq!(read_first(&daemon, "file2"), (file, last.to_le_bytes().to_vec()));
}

#[test]
fn whoever_waits_for_a_copy_that_is_removed_goes_on() {
    let mut nodes = Nodes::new(config);
    nodes.follower.end();
    let daemon = nodes.daemon.clone();
    let program = spawn(move || write_and_sync(&daemon, 1, 50));
    wait_for("the copy is missed", || {
        nodes.daemon.copies()[0].stalled.is_some_and(|stalled| stalled > Duration::from_millis(50))
    });
    assert!(program.result.try_recv().is_err());
    nodes.daemon.remove_copy(NodeId::new(COPY));
    program.end();
    assert!(nodes.daemon.copies().is_empty());
    nodes.daemon.stop();
}

/// A copy whose daemon answers the greeting and dies, and so again and again, has said nothing to a program that waits.
#[test]
fn an_attempt_to_reach_a_copy_ends_with_its_connection_and_is_no_answer() {
    let mut nodes = Nodes::new(config);
    nodes.follower.end();
    nodes.follower.standby.stop();
    wait_for("the head sees that the connection is over", || !nodes.daemon.copies()[0].connected);
    let daemon = nodes.daemon.clone();
    let program = spawn(move || write_and_sync(&daemon, 1, 50));
    wait_for("something waits", || nodes.daemon.copies()[0].stalled > Some(Duration::from_millis(50)));
    let again = Standby::open(host(), &medium(nodes.folder.path(), COPY), config(COPY)).unwrap();
    let stalled = nodes.daemon.copies()[0].stalled;
    let listener = nodes.follower.listener.clone();
    let dies = spawn(move || {
        let connection = listener.accept(Some(SystemHost.now().after(LIMIT))).unwrap();
        again.greet(&connection).unwrap();
        connection.close();
    });
    let (daemon, connection) = (nodes.daemon.clone(), nodes.connect());
    let attempt = spawn(move || daemon.add_copy(connection));
    dies.end();
    // Sooner than it would be given up.
    let ended = attempt.result.recv_timeout(LIMIT / 4).expect("the attempt ends with the connection");
    assert!(ended.is_err());
    let copy = nodes.daemon.copies()[0];
    assert!(!copy.connected && copy.stalled > stalled, "{copy:?}, before {stalled:?}");
    assert!(program.result.try_recv().is_err());
    nodes.daemon.remove_copy(NodeId::new(COPY));
    program.end();
    nodes.daemon.stop();
}

/// The daemon of the head dies and is started again while the copy counts: the copy gets what the logs held before anything
/// is decided.
#[test]
fn a_head_that_is_started_again_brings_its_copy_along() {
    let mut nodes = Nodes::new(config);
    let (file, last) = {
        let mut client = Client::attach_as(&nodes.daemon, user(0), 1);
        client.write_lease(ROOT);
        let (file, _) = client.create(ROOT, b"file1", FILE | 0o644);
        sync(&client, &[(file, 1)]).unwrap();
        // Records that were not synced are in the log, and the program relies on them.
        assert!(client.write(file, 0, b"unsynced"));
        (file, *b"unsynced")
    };
    // It has no time to end its sessions; its pool is free when it is gone.
    nodes.daemon.give_up(&sharedfs::Error::Stopped);
    nodes.daemon.stop();
    let other = Arc::try_unwrap(std::mem::replace(&mut nodes.daemon, {
        let folder = nodes.folder.path().join("spare");
        std::fs::create_dir_all(&folder).unwrap();
        let spare = Medium::memory(&folder).unwrap();
        format_for(&spare, 9);
        Arc::new(Daemon::open(host(), &spare, config(9)).unwrap().0)
    }));
    drop(other.ok().expect("nobody else has the daemon"));
    let standby = Standby::open(host(), &medium(nodes.folder.path(), HEAD), config(HEAD)).unwrap();
    let (daemon, recovered) = standby.lead(term(HEAD, 1), vec![nodes.connect()]).unwrap();
    assert!(recovered.records > 0, "the tail of the log was digested");
    let daemon = Arc::new(daemon);
    daemon.start().unwrap();
    assert!(daemon.copies()[0].level);
    assert_eq!(read_first(&daemon, "file1"), (file, last.to_vec()));
    // The head dies for good at once.
    nodes.follower.end();
    let copy = Arc::new(nodes.follower.standby.lead(term(COPY, 2), Vec::new()).unwrap().0);
    assert_eq!(read_first(&copy, "file1"), (file, last.to_vec()));
}

/// A head gives the lead away and follows in the same process: its copy leads with it as a copy at once, and back.
#[test]
fn a_head_that_gives_the_lead_away_is_a_copy_at_once() {
    let mut nodes = Nodes::new(config);
    write_and_sync(&nodes.daemon, 1, 50);
    let (mut client, file) = begin_program(&nodes.daemon, 2);
    assert!(client.write(file, 0, b"unsynced"));
    assert!(!nodes.daemon.close_if_unused(), "a program is attached");
    let soon = || SystemHost.now().after(LIMIT);
    nodes.daemon.stop_level(soon()).unwrap();
    assert!(nodes.daemon.close_if_unused(), "its session is over");
    nodes.head.resume(&nodes.daemon).unwrap();
    let listener = Arc::new(nodes.endpoint.listen("").unwrap());
    let mut former = Follower::start(nodes.head.clone(), listener.clone());
    nodes.follower.end();
    let connection = nodes.other.connect(&listener.address(), NodeId::new(HEAD), soon()).unwrap();
    let led = nodes.follower.standby.lead(term(COPY, 2), vec![connection]);
    let daemon = Arc::new(led.expect("the former head has nothing that its copy lacks").0);
    daemon.start().unwrap();
    assert!(daemon.copies()[0].level);
    assert_eq!(read_first(&daemon, "file2"), (file, b"unsynced".to_vec()));
    let (file, last) = write_and_sync(&daemon, 3, 50);
    former.end();
    let again = Arc::new(nodes.head.lead(term(HEAD, 3), Vec::new()).unwrap().0);
    assert_eq!(read_first(&again, "file3"), (file, last.to_le_bytes().to_vec()));
    daemon.remove_copy(NodeId::new(HEAD));
}

/// A program that overwrites a file without a pause, until it is told to end.
pub fn overwrite(mut client: Client, file: InodeNumber, ending: &AtomicBool) -> u64 {
    let mut rounds = 0;
    while !ending.load(Ordering::Acquire) {
        assert!(client.write(file, rounds % 30 * 3_000, &[rounds as u8; 3_000]));
        rounds += 1;
    }
    client.daemon.end(client.session);
    rounds
}

/// Programs write more than can be kept beside a tree that is sent, and change all of it again while it is sent. They are
/// slowed, and the member joins while they go on.
#[test]
fn a_member_joins_while_programs_write_without_a_pause() {
    let small = |node| {
        let area = area::Limits { capacity_blocks: 1024, segment_blocks: 128, ..config(node).area };
        Config { area, ..config(node) }
    };
    let mut nodes = Nodes::new(small);
    nodes.follower.end();
    nodes.follower.standby.stop();
    nodes.daemon.remove_copy(NodeId::new(COPY));
    let ending = Arc::new(AtomicBool::new(false));
    let programs: Vec<_> = (1..=2).map(|pid| begin_program(&nodes.daemon, pid)).collect();
    let begin = |(client, file)| {
        let ending = ending.clone();
        spawn(move || overwrite(client, file, &ending))
    };
    let programs: Vec<_> = programs.into_iter().map(begin).collect();
    std::fs::remove_dir_all(nodes.folder.path().join(format!("n{COPY}"))).unwrap();
    let medium = medium(nodes.folder.path(), COPY);
    format_for(&medium, COPY);
    let new = Standby::open(host(), &medium, small(COPY)).unwrap();
    let listener = nodes.follower.listener.clone();
    nodes.follower = Follower::start_slowed(new, listener, Duration::from_millis(20));
    // A member that gets no processor for long is waited for by no program, so more than one attempt may be needed.
    let mut attempts = (0..10).map(|_| nodes.daemon.add_copy(nodes.connect()));
    let joined = attempts.find_map(|added| added.map_err(|why| println!("{why}")).ok());
    assert_eq!(joined, Some(()), "programs kept it from joining");
    ending.store(true, Ordering::Release);
    let rounds: u64 = programs.into_iter().map(|program| program.end()).sum();
    assert!(rounds > 0 && nodes.daemon.copies()[0].level && nodes.daemon.terminations().is_empty());
    let contents = |daemon: &Arc<Daemon>| {
        let client = Client::attach(daemon, user(0));
        let read =
            |pid: u32| client.read(client.walk(&format!("file{pid}")).unwrap().inode, 0, 90_000).unwrap();
        [read(1), read(2)]
    };
    let ours = contents(&nodes.daemon);
    nodes.follower.end();
    let daemon = Arc::new(nodes.follower.standby.lead(term(COPY, 2), Vec::new()).unwrap().0);
    assert!(contents(&daemon) == ours, "the member has what the head has");
}

/// Two programs digest while no copy counts. While a copy that begins to count gets the records of the first one, the second one
/// overwrites its own: no entry that names these is sent to the copy. The next attempt sends the tree.
#[test]
fn records_that_are_overwritten_before_they_are_sent_are_not_named() {
    let mut nodes = Nodes::new(config);
    nodes.daemon.remove_copy(NodeId::new(COPY));
    nodes.follower.end();
    nodes.follower.standby.stop();
    let mut programs: Vec<_> = (1..=2).map(|pid| begin_program(&nodes.daemon, pid)).collect();
    for (client, file) in &mut programs {
        assert!(client.write(*file, 0, &[7; 30_000]));
        client.digest(true).unwrap();
        client.release();
    }
    let standby = Standby::open(host(), &medium(nodes.folder.path(), COPY), config(COPY)).unwrap();
    let (greets, listener) = (standby.clone(), nodes.follower.listener.clone());
    let accept = spawn(move || {
        let connection = listener.accept(Some(SystemHost.now().after(LIMIT))).unwrap();
        let link = greets.greet(&connection).unwrap();
        (connection, link)
    });
    let (daemon, connection) = (nodes.daemon.clone(), nodes.connect());
    let adding = spawn(move || daemon.add_copy(connection));
    let (connection, link) = accept.end();
    wait_for("the copy counts", || !nodes.daemon.copies().is_empty());
    // The copy acknowledges the records of the first program only when the second one has written.
    let (second, file) = programs.last_mut().unwrap();
    let mut wrote = 0;
    while second.ring.free_bytes() > 2_000 {
        assert!(second.write(*file, wrote % 30_000, &[8; 1_000]));
        wrote += 1_000;
    }
    assert!(wrote > 30_000, "its first record is overwritten");
    wait_for("the attempt is over", || {
        drop(standby.receive(&connection, link, SystemHost.now().after(Duration::from_millis(1))));
        nodes.daemon.copies().is_empty()
    });
    let added = adding.end();
    assert!(matches!(&added, Err(sharedfs::Error::Copy(..))), "{added:?}");
    nodes.follower = Follower::start(standby, nodes.follower.listener.clone());
    nodes.daemon.add_copy(nodes.connect()).unwrap();
    for (client, file) in &programs {
        sync(client, &[(*file, 1)]).unwrap();
    }
    assert_eq!(nodes.follower.standby.failure(), None);
}
