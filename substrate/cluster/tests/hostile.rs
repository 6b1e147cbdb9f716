//! The listener of the embedded manager against hostile clients: garbage, truncated and oversized messages, other
//! versions and clusters, senders that never finish, and too many connections. Legitimate clients keep working.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

use cluster::wire::Request;
use cluster::{Embedded, Error, Limits, Manager, Party, Refusal, Remote, Rules};
use format::cluster::{CLUSTER_BODY_MAX, ClusterHead, ClusterKind};
use format::{ChangeNumber, Epoch, NodeId};
use ipc::sync::Ordering;
use ipc::{Host, Join, SystemHost, Time, WAKE_ALL, Waited, Word};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

const CONNECTIONS_MAX: u32 = 8;

fn limits() -> Limits {
    Limits {
        connections_max: CONNECTIONS_MAX,
        message: Duration::from_millis(300),
        idle_slice: Duration::from_millis(20),
        ..Limits::default()
    }
}

fn soon() -> Time {
    SystemHost.now().after(Duration::from_secs(20))
}

fn beat() -> (ClusterKind, Vec<u8>) {
    Request::Beat(Party { node: NodeId::new(1), life: Epoch::new(1) }).encode()
}

/// Sends bytes; true if the manager ended the connection without an answer.
fn is_thrown_out(embedded: &Embedded, bytes: &[u8]) -> bool {
    let mut stream = UnixStream::connect(embedded.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    // The manager may close the connection during the sending.
    let _ = stream.write_all(bytes);
    let mut answer = [0];
    matches!(stream.read(&mut answer), Ok(0) | Err(_))
}

#[test]
fn hostile_connections_do_not_disturb_others() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    let rules = Rules::new(Duration::from_secs(60), 1000).unwrap();
    let embedded =
        Embedded::start(host.clone(), &folder.path().join("manager"), rules, limits(), None).unwrap();
    let client = Remote::new(host.clone(), embedded.socket());
    let works = || {
        let view = client.watch(ChangeNumber::new(0), SystemHost.now()).unwrap();
        assert_eq!(view.number, ChangeNumber::new(1));
    };
    works();
    let cluster = embedded.service().cluster();
    let (kind, body) = beat();
    let right = ClusterHead::encode(kind, 1, cluster, &body);
    assert!(!is_thrown_out(&embedded, &right), "a valid message is answered");
    let mut wrong: Vec<(&str, Vec<u8>)> = vec![
        ("text", b"GET / HTTP/1.1\r\nHost: manager.example.org\r\n\r\n".to_vec()),
        ("zeros", vec![0; 4096]),
        ("nothing behind the head", right[..32].to_vec()),
        ("half a head", right[..9].to_vec()),
        ("an answer", ClusterHead::encode(ClusterKind::Failed, 1, cluster, &[])),
        ("a body of another kind", ClusterHead::encode(ClusterKind::Propose, 1, cluster, &body)),
        ("an empty change", ClusterHead::encode(ClusterKind::Propose, 1, cluster, &[])),
        ("a long heartbeat", ClusterHead::encode(ClusterKind::Beat, 1, cluster, &[1; 500])),
    ];
    for (name, at, value) in
        [("another version", 8, 2u8), ("a wrong sum", 4, 0x77), ("a huge body", 15, 0xff)]
    {
        let mut message = right.clone();
        message[at] ^= value;
        wrong.push((name, message));
    }
    let largest = ClusterHead::encode(ClusterKind::Propose, 1, cluster, &vec![7; CLUSTER_BODY_MAX]);
    wrong.push(("the largest body, of zeros", largest));
    for (name, message) in wrong {
        assert!(is_thrown_out(&embedded, &message), "{name} was answered");
        works();
    }
    // Random bytes, and valid messages with one wrong bit.
    for turn in 0..300usize {
        let mut message = right.clone();
        let bit = (SystemHost.random() as usize) % (message.len() * 8);
        message[bit / 8] ^= 1 << (bit % 8);
        if turn % 2 == 0 {
            message = (0..100).map(|_| SystemHost.random() as u8).collect();
        }
        assert!(is_thrown_out(&embedded, &message), "turn {turn}");
    }
    works();
    embedded.stop();
}

#[test]
fn connections_that_never_finish_are_closed() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    let rules = Rules::new(Duration::from_secs(60), 1000).unwrap();
    let embedded =
        Embedded::start(host.clone(), &folder.path().join("manager"), rules, limits(), None).unwrap();
    let client = Remote::new(host, embedded.socket());
    client.watch(ChangeNumber::new(0), SystemHost.now()).unwrap();
    // Ten times the limit of connections: each sends one byte, or none, and waits.
    let mut slow: Vec<UnixStream> = Vec::new();
    for number in 0..10 * CONNECTIONS_MAX {
        let mut stream = UnixStream::connect(embedded.socket()).unwrap();
        // A connection beyond the limit is closed at once.
        let _ = stream.write_all(&b"H"[number as usize % 2..]);
        slow.push(stream);
    }
    let party = Party { node: NodeId::new(1), life: Epoch::new(1) };
    assert_eq!(
        client.beat(party, soon()),
        Err(Error::Refused(Refusal::NotMember)),
        "its own connection still works"
    );
    let other = Remote::new(Arc::new(SystemHost), embedded.socket());
    assert_eq!(
        other.beat(party, soon()),
        Err(Error::Refused(Refusal::NotMember)),
        "the slow connections were closed"
    );
    embedded.stop();
}

#[test]
fn a_manager_of_another_cluster_is_recognised() {
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    let rules = Rules::new(Duration::from_secs(60), 1000).unwrap();
    let folders = [tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()];
    let [first, second] = folders.each_ref().map(|folder| {
        Embedded::start(host.clone(), &folder.path().join("manager"), rules, limits(), None).unwrap()
    });
    let place = tempfile::tempdir_in("/dev/shm").unwrap();
    let link = place.path().join("socket");
    std::os::unix::fs::symlink(first.socket(), &link).unwrap();
    let client = Remote::new(host.clone(), &link);
    client.watch(ChangeNumber::new(0), SystemHost.now()).unwrap();
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(second.socket(), &link).unwrap();
    let cluster = second.service().cluster();
    first.stop();
    assert_eq!(client.watch(ChangeNumber::new(0), soon()), Err(Error::OtherCluster(cluster)));
    let change = cluster::Change::Leave { party: Party { node: NodeId::new(1), life: Epoch::new(1) } };
    assert_eq!(client.propose(&change, soon()), Err(Error::OtherCluster(cluster)));
    second.stop();
}

/// The machine, except for its wall clock, which panics in a thread that makes a change.
struct NoCalendar;

impl Host for NoCalendar {
    fn now(&self) -> Time {
        SystemHost.now()
    }

    fn wall(&self) -> i64 {
        match std::thread::current().name() {
            Some("cluster-line") => std::panic::resume_unwind(Box::new("no calendar")),
            _ => SystemHost.wall(),
        }
    }

    fn random(&self) -> u64 {
        SystemHost.random()
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, ipc::Error> {
        SystemHost.spawn(name, body)
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        SystemHost.wait(word, expected, until)
    }

    fn wake(&self, word: &Word, count: u32) {
        SystemHost.wake(word, count);
    }
}

#[test]
fn a_connection_whose_thread_panicked_is_not_waited_for() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let rules = Rules::new(Duration::from_secs(60), 1000).unwrap();
    let embedded =
        Embedded::start(Arc::new(NoCalendar), &folder.path().join("manager"), rules, limits(), None).unwrap();
    let client = Remote::new(Arc::new(SystemHost), embedded.socket());
    let change = cluster::Change::Leave { party: Party { node: NodeId::new(1), life: Epoch::new(1) } };
    // More than the limit of concurrent connections: each one is closed again.
    for _ in 0..2 * CONNECTIONS_MAX {
        assert_eq!(client.propose(&change, soon()), Err(Error::Unknown));
    }
    within_time(move || embedded.stop());
}

/// Runs a function that could wait without end, and waits for it within a limit.
fn within_time(body: impl FnOnce() + Send + 'static) {
    let done = Arc::new(Word::new(0));
    let theirs = done.clone();
    let body = move || {
        body();
        theirs.store(1, Ordering::Release);
        SystemHost.wake(&theirs, WAKE_ALL);
    };
    SystemHost.spawn("waits", Box::new(body)).unwrap();
    let until = soon();
    while done.load(Ordering::Acquire) == 0 {
        assert!(SystemHost.now() < until, "the call did not return");
        let _ = SystemHost.wait(&done, 0, Some(until));
    }
}

/// Like a manager that a signal has stopped: it listens, and accepts no connection.
#[test]
fn a_manager_that_accepts_nobody_is_waited_for_no_longer_than_asked() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let socket = folder.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    // A backlog of zero has space for one connection.
    rustix::net::listen(&listener, 0).unwrap();
    let _first = UnixStream::connect(&socket).unwrap();
    let client = Remote::new(Arc::new(SystemHost), &socket);
    let party = Party { node: NodeId::new(1), life: Epoch::new(1) };
    within_time(move || {
        let until = SystemHost.now().after(Duration::from_millis(200));
        assert_eq!(client.beat(party, until), Err(Error::Unreachable));
    });
}
