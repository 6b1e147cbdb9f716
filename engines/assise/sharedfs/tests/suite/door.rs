//! The listener: a process connects, receives its session, calls through its ring, and its end is noticed.

use crate::client::{DIRECTORY, ROOT, new_pool, tiny};
use format::call::{CallKind, LEASE_READ, NodeReply, Status, WalkRequest, WalkResponse, split};
use format::message::{MessageKind, RingShape};
use format::session::{Welcome, lease_bytes};
use ipc::host::Host;
use ipc::ring::{Call, RingClient};
use ipc::shared::{Access, Mapping};
use ipc::socket::{Connection, Listener, hello};
use ipc::words::{GENERATIONS, Seal};
use ipc::{DaemonView, SystemHost, Word};
use pmem::Medium;
use sharedfs::{Config, Daemon, ListenerSettings};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

pub const LIBRARY: &str = "1.2.3";

fn host() -> Arc<dyn Host> {
    Arc::new(SystemHost)
}

/// Waits until something holds, ten seconds at most.
pub fn eventually(what: &str, holds: impl Fn() -> bool) {
    let (never, end) = (Word::new(0), SystemHost.now().after(Duration::from_secs(10)));
    while !holds() {
        assert!(SystemHost.now() < end, "{what}");
        SystemHost.wait(&never, 0, Some(SystemHost.now().after(Duration::from_millis(2))));
    }
}

pub fn daemon_of(folder: &Path, config: Config) -> Daemon {
    let medium = Medium::file(folder).unwrap();
    new_pool(&medium);
    let daemon = Daemon::open(host(), &medium, config).unwrap().0;
    let listener = Listener::bind(&folder.join("socket")).unwrap();
    daemon.start().unwrap();
    daemon.listen(ListenerSettings { listener, library: LIBRARY.to_owned(), uid: 0 }).unwrap();
    daemon
}

pub struct Guest {
    pub connection: Arc<Connection>,
    welcome: Welcome,
    ring: RingClient,
    view: DaemonView,
}

pub fn knock(folder: &Path) -> Guest {
    knock_for(folder, 0)
}

/// As one who goes on from session `former`.
pub fn knock_for(folder: &Path, former: u64) -> Guest {
    let connection = Connection::connect(&folder.join("socket")).unwrap();
    let until = SystemHost.now().after(Duration::from_secs(10));
    let message = connection.greet(&SystemHost, &hello(LIBRARY, former, 0), Some(until)).unwrap();
    let (shape, rest) = split::<RingShape>(&message.body).unwrap();
    let (welcome, rest) = split::<Welcome>(rest).unwrap();
    assert!(rest.is_empty());
    let [_log, _session, leases, ring, generations] = &message.descriptors[..] else {
        panic!("five descriptors")
    };
    let words = welcome.lease_words.get() as usize;
    let limits = ipc::ring::RingLimits::from(shape);
    let map = |memory, bytes, access| Mapping::new(memory, bytes, access).unwrap();
    let view = DaemonView::new(&map(leases, lease_bytes(words), Access::Read), words).unwrap();
    assert!(Mapping::new(leases, lease_bytes(words), Access::Write).is_err(), "leases can only be read");
    assert!(Mapping::new(generations, GENERATIONS * 8, Access::Write).is_err());
    let memory = map(ring, limits.bytes().unwrap(), Access::Write);
    let connection = Arc::new(connection);
    let ring = RingClient::new(host(), Box::new(connection.clone()), memory, limits, 0).unwrap();
    Guest { connection, welcome, ring, view }
}

impl Guest {
    pub fn call(&self, kind: CallKind, body: &[u8]) -> (Status, Vec<u8>) {
        let call = Call { id: 1, kind: kind as u16, body, response_bytes_max: 8_000 };
        let until = SystemHost.now().after(Duration::from_secs(10));
        let response = self.ring.call(&call, Some(until)).unwrap();
        (Status::from_raw(response.status), response.body)
    }

    pub fn root(&self) -> NodeReply {
        let request = WalkRequest {
            start: ROOT,
            names: 0.into(),
            last_mode: LEASE_READ,
            parent_mode: 0,
            ahead: 0.into(),
            ahead_mode: 0,
            ahead_if_taken: 0,
        };
        let (status, body) = self.call(CallKind::Walk, request.as_bytes());
        assert_eq!(status, Status::Ok);
        let (_, rest) = split::<WalkResponse>(&body).unwrap();
        split(rest).unwrap().0
    }
}

#[test]
fn who_knocks_is_served_until_it_goes() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let daemon = daemon_of(folder.path(), tiny());
    let (one, two) = (knock(folder.path()), knock(folder.path()));
    assert_eq!(daemon.sessions().len(), 2);
    let reply = one.root();
    assert_eq!(reply.item.mode.get(), DIRECTORY | 0o755);
    assert_eq!(one.view.lease(reply.word.get()).generation as u32, reply.expected.get());
    assert!(one.view.seal() == Seal::Open);
    two.root();
    // It closes its end of the socket, which its death does too.
    let gone = one.welcome.session.get();
    drop(one);
    eventually("the session ends with its process", || !daemon.sessions().contains(&gone));
    two.root();
    two.connection.send(MessageKind::Hello, &[b"again"], &[]).unwrap();
    eventually("who talks out of turn is put out", || daemon.sessions().is_empty());
    assert!(two.view.seal() != Seal::Open);
    daemon.stop();
}

#[test]
fn a_library_of_another_version_and_one_session_too_many_are_refused() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let daemon = daemon_of(folder.path(), Config { sessions_max: 1, ..tiny() });
    let until = Some(SystemHost.now().after(Duration::from_secs(10)));
    let refused = |hello| {
        let connection = Connection::connect(&folder.path().join("socket")).unwrap();
        match connection.greet(&SystemHost, &hello, until) {
            Err(ipc::Error::Refused(_, why)) => why,
            other => panic!("{other:?}"),
        }
    };
    assert!(refused(hello("0.9", 0, 0)).contains("0.9"));
    let one = knock(folder.path());
    assert!(refused(hello(LIBRARY, 0, 0)).contains("sessions"));
    one.root();
    daemon.stop();
}
