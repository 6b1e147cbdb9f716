//! Tests with two real processes over the socket, the ring and the words: the test program starts itself again as
//! the other side, which is killed in the middle of a request, stopped inside an operation, of another version, or
//! hostile.
//!
//! Steps between the processes are lines on the child's standard input and output; nothing sleeps.

#![allow(clippy::unwrap_used, reason = "everything here is a test; clippy knows tests by their attribute")]

use format::message::{MESSAGE_BODY_MAX, MessageHeader, MessageKind, REFUSED_VERSION};
use format::{DecodeError, Sequence};
use ipc::shared::{create, read_only};
use ipc::socket::{accept_peer, hello, poll};
use ipc::words::{CommitWord, FenceBy, Inside, LeaseState, LeaseWord, Overflow, Seal, SealWord, Slot};
use ipc::{
    Access, Alive, AliveView, Call, Connection, Descriptor, Error, Host, Life, Link, Listener, Mapping, Peer,
    RingClient, RingLimits, RingServer, SystemHost, Time,
};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

const VERSION: &str = "0.1.0-test";
const RING: RingLimits = RingLimits { slots: 4, inline_bytes: 256, bulk_buffers: 1, bulk_bytes: 8192 };
/// Offsets of the session's words.
const SLOTS_AT: usize = 64;
const OVERFLOW_AT: usize = 128;
/// Offset of the seal among the lease words.
const SEAL_AT: usize = 64;
/// Longest wait for the other process; only a failure takes it.
const PATIENCE: Duration = Duration::from_secs(20);

fn soon() -> Option<Time> {
    Some(SystemHost.now().after(PATIENCE))
}

/// The memory of one session, as the daemon has it.
struct Session {
    ring: Descriptor,
    words: Descriptor,
    leases: Descriptor,
}

impl Session {
    fn new() -> Self {
        Self {
            ring: create(c"ring", RING.bytes().unwrap()).unwrap(),
            words: create(c"words", 4096).unwrap(),
            leases: create(c"leases", 4096).unwrap(),
        }
    }

    fn server(&self) -> Arc<RingServer> {
        let memory = Mapping::new(&self.ring, RING.bytes().unwrap(), Access::Write).unwrap();
        Arc::new(RingServer::new(Arc::new(SystemHost), memory, RING, 20_000).unwrap())
    }

    /// Accepts the next connection, and sends it all descriptors.
    fn welcome(&self, listener: &Listener) -> Peer {
        let peer = accepted(listener);
        let greeting = wait_for(peer.connection(), || peer.connection().hello(VERSION)).unwrap();
        assert_eq!(greeting.role.get(), 0);
        let leases = read_only(&self.leases).unwrap();
        let shape = format::message::RingShape::from(RING);
        let descriptors = [&self.ring, &self.words, &leases];
        peer.connection().send(MessageKind::Welcome, &[shape.as_bytes(), b"and more"], &descriptors).unwrap();
        peer
    }
}

fn readable(descriptor: &Descriptor) -> bool {
    let mut asked = [libc::pollfd { fd: descriptor.raw(), events: libc::POLLIN, revents: 0 }];
    poll(&mut asked, Some(PATIENCE)).unwrap();
    asked[0].revents != 0
}

fn accepted(listener: &Listener) -> Peer {
    assert!(readable(listener.descriptor()), "nobody knocked");
    accept_peer(listener).unwrap().unwrap()
}

fn wait_for<T>(connection: &Connection, look: impl Fn() -> Result<Option<T>, Error>) -> Result<T, Error> {
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        assert!(readable(connection.descriptor()), "nothing came");
    }
}

/// This program, started again as `role`.
struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(role: &str, path: &Path) -> Self {
        let program = std::env::current_exe().unwrap();
        let mut command = Command::new(program);
        command.arg("--other").arg(role).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn go(&mut self) {
        self.input.write_all(b"go\n").unwrap();
    }

    fn signal(&self, signal: i32) {
        // SAFETY: kill uses no memory; the child is ours and not yet waited for, so the number is still its.
        assert_eq!(unsafe { libc::kill(self.child.id().cast_signed(), signal) }, 0);
    }

    fn ends_well(mut self) {
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder of its own with a listener in it.
fn listener() -> (tempfile::TempDir, PathBuf, Listener) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = Listener::bind(&path).unwrap();
    (folder, path, listener)
}

// ---------------------------------------------------------------- the other process

/// The memory and connection that the other process receives with its Welcome.
struct Attached {
    connection: Arc<Connection>,
    client: RingClient,
    words: Arc<Mapping>,
    leases: Arc<Mapping>,
}

fn attach(path: &Path) -> Attached {
    let connection = Arc::new(Connection::connect(path).unwrap());
    let mut message = connection.greet(&SystemHost, &hello(VERSION, 0, 0), soon()).unwrap();
    assert_eq!(&message.body[16..], b"and more");
    assert_eq!(message.descriptors.len(), 3);
    assert!(
        message.descriptors.iter().all(|descriptor| descriptor.raw() >= 700),
        "above the program's numbers"
    );
    let leases = message.descriptors.pop().unwrap();
    let words = message.descriptors.pop().unwrap();
    let ring = message.descriptors.pop().unwrap();
    assert!(Mapping::new(&leases, 4096, Access::Write).is_err(), "leases are for reading");
    let ring = Mapping::new(&ring, RING.bytes().unwrap(), Access::Write).unwrap();
    let link = Box::new(connection.clone());
    Attached {
        client: RingClient::new(Arc::new(SystemHost), link, ring, RING, 20_000).unwrap(),
        words: Mapping::new(&words, 4096, Access::Write).unwrap(),
        leases: Mapping::new(&leases, 4096, Access::Read).unwrap(),
        connection,
    }
}

fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().unwrap();
}

fn wait_for_go() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

fn call(id: u64, body: &[u8]) -> Call<'_> {
    Call { id, kind: 9, body, response_bytes_max: 4000 }
}

fn other(role: &str, path: &Path) {
    match role {
        "owner" => owner(path),
        "calls" => {
            let attached = attach(path);
            for id in 0..200u64 {
                let body = vec![id as u8; (id * 40) as usize % 4000];
                let response = attached.client.call(&call(id, &body), soon()).unwrap();
                assert_eq!((response.status, response.body), (9, body));
            }
            say("done");
        }
        "asks" => {
            let attached = attach(path);
            let answer = attached.client.call(&call(1, b"stays unanswered"), None);
            assert_eq!(answer, Err(Error::Disconnected));
            say("disconnected");
        }
        "stands-inside" => {
            let attached = attach(path);
            let slots = attached.words.words::<Slot>(SLOTS_AT, 1).unwrap();
            let overflow = attached.words.words::<Overflow>(OVERFLOW_AT, 1).unwrap();
            let commit = attached.words.words::<CommitWord>(0, 1).unwrap();
            let inside = Inside { slots: &slots, overflow: &overflow[0] };
            let entered = inside.enter(Some(0), FenceBy::Operation);
            assert_eq!(attached.leases.reads::<LeaseWord>(0, 1).unwrap().read(0).state, LeaseState::Write);
            let seal = attached.leases.reads::<SealWord>(SEAL_AT, 1).unwrap();
            commit[0].commit(Sequence::new(1), FenceBy::Operation);
            assert_eq!(seal.read(0), Seal::Open);
            say("inside");
            wait_for_go();
            commit[0].commit(Sequence::new(2), FenceBy::Operation);
            assert_eq!(seal.read(0), Seal::Sealed(Sequence::new(1)));
            inside.leave(entered);
            say("sealed");
        }
        "runs" => {
            let _attached = attach(path);
            say("runs");
            loop {
                std::hint::spin_loop();
            }
        }
        "wrong-version" => {
            let connection = Connection::connect(path).unwrap();
            let refused = connection.greet(&SystemHost, &hello("0.0.9", 0, 0), soon()).unwrap_err();
            say(&refused.to_string());
        }
        "serves" => {
            let listener = Listener::bind(path).unwrap();
            say("listening");
            let session = Session::new();
            let _peer = session.welcome(&listener);
            let _taken = session.server().next(soon()).unwrap();
            say("taken");
            wait_for_go();
        }
        "leaves-a-child" => {
            let attached = attach(path);
            // SAFETY: the child calls nothing but read and _exit.
            if unsafe { libc::fork() } == 0 {
                let mut byte = [0u8; 1];
                // SAFETY: one byte of ours; the parent's end of the pipe stays open until the test ends.
                unsafe {
                    libc::read(0, byte.as_mut_ptr().cast(), 1);
                    libc::_exit(0);
                }
            }
            assert!(attached.connection.is_up());
        }
        "forks" => {
            let mapping = attach(path).words;
            // The child touches the mapping and has none.
            // SAFETY: the child only loads a word and exits.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let word = mapping.reads::<ipc::Word>(0, 1).unwrap();
                let _ = std::hint::black_box(word.read(0));
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(0) };
            }
            let mut status = 0;
            // SAFETY: the kernel writes one int.
            unsafe { libc::waitpid(child, &mut status, 0) };
            assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status:#x}");
            say("gone in the child");
        }
        _ => panic!("no such role"),
    }
}

// ---------------------------------------------------------------- the tests

fn two_processes_greet_and_call() {
    let (_folder, path, listener) = listener();
    let mut child = Other::start("calls", &path);
    let session = Session::new();
    let peer = session.welcome(&listener);
    let credentials = peer.credentials();
    assert_eq!(credentials.pid, child.child.id().cast_signed());
    // SAFETY: both only give numbers.
    assert_eq!((credentials.uid, credentials.gid), unsafe { (libc::geteuid(), libc::getegid()) });
    let server = session.server();
    for _ in 0..200 {
        let taken = server.next(soon()).unwrap();
        let (kind, body) = (taken.kind, taken.body.clone());
        server.respond(taken, kind, &body).unwrap();
    }
    assert_eq!(child.line(), "done");
    child.ends_well();
    assert!(readable(peer.process()));
    assert!(!peer.is_up());
}

fn a_client_killed_in_a_request_harms_nobody() {
    let (_folder, path, listener) = listener();
    let child = Other::start("asks", &path);
    let session = Session::new();
    let peer = session.welcome(&listener);
    let server = session.server();
    let taken = server.next(soon()).unwrap();
    assert_eq!(taken.body, b"stays unanswered");
    assert!(peer.is_up());
    child.signal(libc::SIGKILL);
    assert!(readable(peer.process()) && readable(peer.connection().descriptor()));
    assert!(!peer.is_up());
    assert_eq!(peer.connection().receive().unwrap_err(), Error::Disconnected);
    server.respond(taken, 0, b"to nobody").unwrap();
    assert_eq!(server.next(Some(SystemHost.now())).unwrap_err(), Error::TimedOut);
    drop(child);
    two_processes_greet_and_call();
}

fn a_server_killed_in_a_request_is_told() {
    let (_folder, path, _) = listener();
    let path = path.with_extension("served");
    let mut child = Other::start("serves", &path);
    assert_eq!(child.line(), "listening");
    let attached = attach(&path);
    let caller = SystemHost
        .spawn(
            "caller",
            Box::new(move || {
                let answer = attached.client.call(&call(1, b"x"), soon());
                assert_eq!(answer, Err(Error::Disconnected));
            }),
        )
        .unwrap();
    assert_eq!(child.line(), "taken");
    child.signal(libc::SIGKILL);
    caller.join().unwrap();
    assert_eq!(Connection::connect(&path).unwrap_err(), Error::Disconnected);
}

fn a_client_stopped_while_inside_is_cut_after_the_grace_period() {
    let (_folder, path, listener) = listener();
    let mut child = Other::start("stands-inside", &path);
    let session = Session::new();
    let leases =
        Mapping::new(&session.leases, 4096, Access::Write).unwrap().words::<LeaseWord>(0, 1).unwrap();
    leases[0].grant(LeaseState::Write);
    let words = Mapping::new(&session.words, 4096, Access::Write).unwrap();
    let peer = session.welcome(&listener);
    assert_eq!(child.line(), "inside");
    child.signal(libc::SIGSTOP);
    assert!(peer.is_up(), "stopped is not dead");
    leases[0].revoke();
    let slots = words.words::<Slot>(SLOTS_AT, 1).unwrap();
    let overflow = words.words::<Overflow>(OVERFLOW_AT, 1).unwrap();
    let inside = Inside { slots: &slots, overflow: &overflow[0] };
    let mut scan = inside.scan();
    let grace = SystemHost.now().after(Duration::from_millis(5));
    while SystemHost.now() < grace {
        assert!(!scan.done(&inside), "it cannot leave");
    }
    let commit = words.words::<CommitWord>(0, 1).unwrap();
    let leases = Mapping::new(&session.leases, 4096, Access::Write).unwrap();
    let seal = leases.words::<SealWord>(SEAL_AT, 1).unwrap();
    assert_eq!(seal[0].seal(&commit[0], || ()), Sequence::new(1));
    child.signal(libc::SIGCONT);
    child.go();
    assert_eq!(child.line(), "sealed");
    child.ends_well();
    assert!(scan.done(&inside));
    assert_eq!(seal[0].seal(&commit[0], || ()), Sequence::new(1), "once and for all");
}

fn a_process_is_runnable_while_a_thread_of_it_runs() {
    let (_folder, path, listener) = listener();
    let mut child = Other::start("runs", &path);
    let session = Session::new();
    let peer = session.welcome(&listener);
    assert_eq!(child.line(), "runs");
    assert!(peer.is_runnable());
    child.signal(libc::SIGSTOP);
    let end = SystemHost.now().after(Duration::from_secs(60));
    while peer.is_runnable() {
        assert!(SystemHost.now() < end, "a stopped process does not run");
    }
    child.signal(libc::SIGCONT);
    while !peer.is_runnable() {
        assert!(SystemHost.now() < end, "it goes on");
    }
    child.signal(libc::SIGKILL);
    while peer.is_runnable() {
        assert!(SystemHost.now() < end, "a dead process does not run");
    }
}

fn another_version_is_refused_with_both_named() {
    let (_folder, path, listener) = listener();
    let mut child = Other::start("wrong-version", &path);
    let peer = accepted(&listener);
    let refused = wait_for(peer.connection(), || peer.connection().hello(VERSION)).unwrap_err();
    assert!(matches!(refused, Error::Refused(REFUSED_VERSION, _)));
    let told = child.line();
    assert!(told.contains("0.0.9") && told.contains(VERSION), "{told}");
    child.ends_well();
}

fn a_dead_process_whose_child_holds_the_socket_is_dead() {
    let (_folder, path, listener) = listener();
    let mut child = Other::start("leaves-a-child", &path);
    let session = Session::new();
    let peer = session.welcome(&listener);
    assert!(child.child.wait().unwrap().success());
    assert!(readable(peer.process()));
    assert!(peer.connection().is_up(), "the grandchild holds it");
    assert!(!peer.is_up());
    child.go();
}

fn a_forked_child_has_no_mapping() {
    let (_folder, path, listener) = listener();
    let mut child = Other::start("forks", &path);
    let session = Session::new();
    let _peer = session.welcome(&listener);
    assert_eq!(child.line(), "gone in the child");
    child.ends_well();
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn hostile_messages_are_errors_and_leave_no_descriptor() {
    let (_folder, path, listener) = listener();
    let memory = create(c"passed", 4096).unwrap();
    let mut packets: Vec<(Vec<u8>, usize)> = vec![
        (vec![0], 0),
        (vec![0xff; 16], 1),
        (vec![0; MESSAGE_BODY_MAX + 16], 0),
        (vec![0; MESSAGE_BODY_MAX + 17], 2),
        (vec![0; 3 * MESSAGE_BODY_MAX], 16),
        (MessageHeader::new(MessageKind::Hello, 0, 3).as_bytes().to_vec(), 2),
        (MessageHeader::new(MessageKind::Hello, 0, 0).as_bytes().to_vec(), 16),
        (MessageHeader::new(MessageKind::Hello, 0, u32::MAX).as_bytes().to_vec(), 0),
        (MessageHeader::new(MessageKind::Hello, 1, 0).as_bytes().to_vec(), 0),
        (MessageHeader::new(MessageKind::Welcome, 0, 0).as_bytes().to_vec(), 0),
        (MessageHeader::new(MessageKind::Hello, 0, 0).as_bytes().to_vec(), 0),
    ];
    // Every byte of a good greeting changed once.
    let good =
        [MessageHeader::new(MessageKind::Hello, 48, 0).as_bytes(), hello(VERSION, 0, 0).as_bytes()].concat();
    packets.extend((0..16 + VERSION.len()).map(|index| {
        let mut packet = good.clone();
        packet[index] ^= 0x80;
        (packet, index % 3)
    }));
    let before = open_descriptors();
    for (packet, descriptors) in &packets {
        let client = Connection::connect(&path).unwrap();
        let peer = accepted(&listener);
        client.send_packet(packet, &vec![&memory; *descriptors]).unwrap();
        let refused = wait_for(peer.connection(), || peer.connection().hello(VERSION)).unwrap_err();
        assert!(matches!(refused, Error::Message(_) | Error::Refused(..)), "{packet:?}: {refused}");
    }
    assert_eq!(open_descriptors(), before);
    let client = Connection::connect(&path).unwrap();
    let peer = accepted(&listener);
    let mut header = MessageHeader::new(MessageKind::Hello, 0, 0);
    header.protocol = 99.into();
    client.send_packet(header.as_bytes(), &[]).unwrap();
    let refused = wait_for(peer.connection(), || peer.connection().hello(VERSION)).unwrap_err();
    assert_eq!(refused, Error::Message(DecodeError::Version(99)));
}

fn a_long_path_is_reached() {
    let folder = tempfile::tempdir().unwrap();
    let mut deep = folder.path().to_owned();
    (0..6).for_each(|_| deep.push("a-folder-with-a-rather-long-name"));
    std::fs::create_dir_all(&deep).unwrap();
    let path = deep.join("socket");
    let listener = Listener::bind(&path).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o666, "every user may knock");
    let client = Connection::connect(&path).unwrap();
    let peer = accepted(&listener);
    client.send(MessageKind::Parcel, &[b"a", b"bc"], &[]).unwrap();
    assert_eq!(wait_for(peer.connection(), || peer.connection().receive()).unwrap().body, b"abc");
    assert!(Listener::bind(&path).is_err());
}

type Test = (&'static str, fn());

/// Rounds of the test below.
const DEATHS: usize = 100;

/// The other process: a daemon with the word of a folder's memory and a lock on its file, until it is killed.
fn owner(path: &Path) {
    let file = lock_file(path);
    assert!(flock(&file), "nobody else has it");
    let listener = Listener::bind(&path.join("socket")).unwrap();
    let memory = create(c"alive", 4096).unwrap();
    let mapping = Mapping::new(&memory, 4096, Access::Write).unwrap();
    let alive = Alive::claim(&SystemHost, &mapping, 64).unwrap();
    say("owned");
    let peer = accepted(&listener);
    peer.connection().send(MessageKind::Welcome, &[], &[&read_only(&memory).unwrap()]).unwrap();
    let (_kept, never) = (alive, ipc::Word::new(0));
    SystemHost.wait(&never, 0, soon());
}

fn lock_file(path: &Path) -> std::fs::File {
    std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(path.join("lock")).unwrap()
}

fn flock(file: &std::fs::File) -> bool {
    // SAFETY: the descriptor is open.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}

/// From the instant on at which the lock of a killed process can be taken, its word says that it died.
fn a_lock_is_free_only_when_the_word_says_died() {
    for round in 0..DEATHS {
        let folder = tempfile::tempdir().unwrap();
        let mut owner = Other::start("owner", folder.path());
        assert_eq!(owner.line(), "owned");
        let connection = Connection::connect(&folder.path().join("socket")).unwrap();
        let message = connection.receive_until(&SystemHost, soon()).unwrap();
        let mapping = Mapping::new(&message.descriptors[0], 4096, Access::Read).unwrap();
        let view = AliveView::new(&mapping, 64).unwrap();
        let file = lock_file(folder.path());
        assert!(view.is_alive() && !flock(&file), "round {round}: it lives");
        owner.child.kill().unwrap();
        // No pause: the first instant at which the lock is free is the one that counts.
        while !flock(&file) {}
        assert_eq!(view.life(), Life::Died, "round {round}");
        owner.child.wait().unwrap();
    }
}

const TESTS: [Test; 11] = [
    ("two_processes_greet_and_call", two_processes_greet_and_call),
    ("a_client_killed_in_a_request_harms_nobody", a_client_killed_in_a_request_harms_nobody),
    ("a_server_killed_in_a_request_is_told", a_server_killed_in_a_request_is_told),
    ("a_process_is_runnable_while_a_thread_of_it_runs", a_process_is_runnable_while_a_thread_of_it_runs),
    (
        "a_client_stopped_while_inside_is_cut_after_the_grace_period",
        a_client_stopped_while_inside_is_cut_after_the_grace_period,
    ),
    ("another_version_is_refused_with_both_named", another_version_is_refused_with_both_named),
    (
        "a_dead_process_whose_child_holds_the_socket_is_dead",
        a_dead_process_whose_child_holds_the_socket_is_dead,
    ),
    ("a_forked_child_has_no_mapping", a_forked_child_has_no_mapping),
    (
        "hostile_messages_are_errors_and_leave_no_descriptor",
        hostile_messages_are_errors_and_leave_no_descriptor,
    ),
    ("a_long_path_is_reached", a_long_path_is_reached),
    ("a_lock_is_free_only_when_the_word_says_died", a_lock_is_free_only_when_the_word_says_died),
];

/// One after the other: some count the descriptors of this process.
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.get(1).is_some_and(|argument| argument == "--other") {
        other(&arguments[2], Path::new(&arguments[3]));
        return ExitCode::SUCCESS;
    }
    let filter = arguments.get(1).filter(|argument| !argument.starts_with('-'));
    let chosen = TESTS.iter().filter(|(name, _)| filter.is_none_or(|filter| name.contains(filter.as_str())));
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in chosen {
        let outcome = std::panic::catch_unwind(test);
        println!("test {name} ... {}", if outcome.is_ok() { "ok" } else { "FAILED" });
        if outcome.is_ok() { passed += 1 } else { failed += 1 }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
