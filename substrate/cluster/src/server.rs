//! The embedded manager: a [`Service`] behind a socket in its folder and, for nodes on other machines, behind a
//! listener of [`transport`]; with one thread for each connection.
//!
//! All input is checked before it has any effect: an invalid message ends its connection, and so does a message that
//! does not arrive completely in time. Connections beyond the limit are closed. No thread outlives [`Embedded::stop`].

use crate::client::IDLE_MAX;
use crate::core::Expeller;
use crate::error::Error;
use crate::line::{ConnectionError, ManagerConnection};
use crate::manager::Manager;
use crate::rules::Rules;
use crate::service::Service;
use crate::store::Store;
use crate::wire::{Reply, Request};
use format::cluster::ClusterHead;
use format::cluster::MEMBERS_MAX;
use ipc::sync::Ordering;
use ipc::{Host, Join, Time, WAKE_ALL, Word};
use pmem::Medium;
use std::io::ErrorKind;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use transport::Listener;

/// Name of the socket in the manager's folder.
pub const SOCKET_NAME: &str = "socket";

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Limit of concurrent connections, each with one thread.
    pub connections_max: u32,
    /// Time in which a message that has begun must arrive, and an answer must be taken.
    pub message: Duration,
    /// Limit of the wait of a watcher; after it, the answer is the current view.
    pub watch_max: Duration,
    /// Interval in which an idle connection checks for the end of the server.
    pub idle_slice: Duration,
}

/// Limit of concurrent connections: those that every member keeps, and some for operators and repeated requests.
const CONNECTIONS_MAX: usize = 512;
const _: () = assert!(MEMBERS_MAX * (1 + IDLE_MAX) + 128 <= CONNECTIONS_MAX);

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: CONNECTIONS_MAX as u32,
            message: Duration::from_secs(5),
            watch_max: Duration::from_secs(10),
            idle_slice: Duration::from_millis(500),
        }
    }
}

/// The embedded manager, running.
pub struct Embedded {
    shared: Arc<Shared>,
    socket: Arc<SocketName>,
    /// A copy of the listening socket: its shutdown wakes the thread that accepts, even if the socket's file is gone.
    listening: UnixStream,
    threads: Vec<Box<dyn Join>>,
}

struct Shared {
    host: Arc<dyn Host>,
    service: Arc<Service>,
    limits: Limits,
    /// Number of connections that are served.
    live: Word,
    /// 1 when the server stops.
    stopping: Word,
}

impl Embedded {
    /// Starts the manager of a folder, which is created if it is missing. A new folder becomes that of a new cluster
    /// with these rules; an existing one keeps its own rules. Nodes connect to `nodes`, if it is given: a listener of
    /// [`format::NodeId::MANAGER`], in [`crate::line::EPOCH`].
    ///
    /// # Errors
    /// `Media` (`Locked`: it runs already), `Damaged`, `Open`, `System`. Errors of the operating system occur before
    /// anything is written.
    pub fn start(
        host: Arc<dyn Host>,
        folder: &Path,
        rules: Rules,
        limits: Limits,
        nodes: Option<Listener>,
    ) -> Result<Self, Error> {
        let make = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
        make.map_err(|error| Error::of_io("mkdir", &error))?;
        check_private(folder)?;
        let medium = Medium::file(folder)?.guarded()?;
        let lock = medium.lock()?;
        let socket = folder.join(SOCKET_NAME);
        // This process holds the lock on the folder, so no other manager listens there any more.
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).map_err(|error| Error::of_io("bind", &error))?;
        let again = listener.try_clone().map_err(|error| Error::of_io("dup", &error))?;
        let listening = UnixStream::from(OwnedFd::from(again));
        let socket = Arc::new(SocketName::of(socket)?);
        let only_owner = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(&socket.path, only_owner).map_err(|error| Error::of_io("chmod", &error))?;
        let clock = Reserved::new(&host, "cluster-clock")?;
        let accepts = Reserved::new(&host, "cluster-accept")?;
        let reserve = |nodes| Reserved::new(&host, "cluster-nodes").map(|thread| (nodes, thread));
        let accepts_nodes = nodes.map(reserve).transpose()?;

        let cluster = host.random() | 1;
        let (store, kept) = Store::open_locked(medium, lock, cluster, rules)?;
        let service = Service::new(host.clone(), store, kept, Expeller::Core)?;
        let (live, stopping) = (Word::new(0), Word::new(0));
        let shared = Arc::new(Shared { host, service, limits, live, stopping });
        let (timed, theirs) = (shared.service.clone(), shared.clone());
        let name = socket.clone();
        let place = move || match name.is_ours() {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::Displaced("its socket")),
            Err(error) => Err(Error::of_io("stat", &error)),
        };
        let mut threads =
            vec![clock.run(move || timed.run_clock(&place)), accepts.run(move || accept(&theirs, &listener))];
        if let Some((nodes, thread)) = accepts_nodes {
            let theirs = shared.clone();
            threads.push(thread.run(move || accept_nodes(&theirs, &nodes)));
        }
        Ok(Self { shared, socket, listening, threads })
    }

    /// The rules of the cluster whose manager has this folder; `None` if none was ever started there. Changes nothing.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn rules(folder: &Path) -> Result<Option<Rules>, Error> {
        if !folder.exists() {
            return Ok(None);
        }
        check_private(folder)?;
        Store::rules(&Medium::file(folder)?)
    }

    /// The path of the socket for clients of this machine.
    pub fn socket(&self) -> &Path {
        &self.socket.path
    }

    /// The manager inside.
    pub fn service(&self) -> &Arc<Service> {
        &self.shared.service
    }

    /// Stops the manager: it answers no request any more, and all threads and the socket are gone when this returns.
    pub fn stop(self) {
        let Shared { host, service, live, stopping, .. } = &*self.shared;
        // Release: pairs with the Acquire of the threads that check for the end.
        stopping.store(1, Ordering::Release);
        service.stop();
        // The thread that accepts waits in the kernel.
        let _ = self.listening.shutdown(Shutdown::Both);
        for thread in self.threads {
            // A thread that panicked has ended as well.
            let _ = thread.join();
        }
        loop {
            // Acquire: pairs with the Release of the connection that ends.
            let count = live.load(Ordering::Acquire);
            if count == 0 {
                break;
            }
            let _ = host.wait(live, count, None);
        }
        // The folder is still locked. The next start removes what remains.
        if self.socket.is_ours().unwrap_or(false) {
            let _ = std::fs::remove_file(&self.socket.path);
        }
    }
}

/// The name of the socket.
struct SocketName {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

impl SocketName {
    fn of(path: PathBuf) -> Result<Self, Error> {
        let identity = Self::identity(&path).map_err(|error| Error::of_io("stat", &error))?;
        Ok(Self { path, identity })
    }

    fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
        std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
    }

    /// Whether the path still leads to the socket.
    fn is_ours(&self) -> std::io::Result<bool> {
        match Self::identity(&self.path) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
            found => found.map(|found| found == self.identity),
        }
    }
}

/// A user who may write in the manager's folder could put a forged log there, or take the lock.
fn check_private(folder: &Path) -> Result<(), Error> {
    let found = std::fs::metadata(folder).map_err(|error| Error::of_io("stat", &error))?;
    let is_private = found.uid() == rustix::process::geteuid().as_raw() && found.mode() & 0o077 == 0;
    is_private.then_some(()).ok_or(Error::Open)
}

fn spawn(
    host: &Arc<dyn Host>,
    name: &str,
    body: impl FnOnce() + Send + 'static,
) -> Result<Box<dyn Join>, Error> {
    host.spawn(name, Box::new(body)).map_err(Error::of_host)
}

/// A thread that waits for its function. It exists before anything is changed, so that a start without threads fails
/// early. If it is dropped, it ends without running anything.
struct Reserved {
    thread: Box<dyn Join>,
    gives: Sender<Box<dyn FnOnce() + Send>>,
}

impl Reserved {
    fn new(host: &Arc<dyn Host>, name: &str) -> Result<Self, Error> {
        let (gives, given) = channel::<Box<dyn FnOnce() + Send>>();
        let body = move || {
            if let Ok(body) = given.recv() {
                body();
            }
        };
        Ok(Self { thread: spawn(host, name, body)?, gives })
    }

    fn run(self, body: impl FnOnce() + Send + 'static) -> Box<dyn Join> {
        // The thread waits only for this.
        let _ = self.gives.send(Box::new(body));
        self.thread
    }
}

impl Shared {
    fn is_stopping(&self) -> bool {
        // Acquire: pairs with the Release of `stop`.
        self.stopping.load(Ordering::Acquire) != 0
    }
}

/// A served connection in the count, which is given back in any case when its thread ends.
struct ServedConnection(Arc<Shared>);

impl ServedConnection {
    fn take(shared: &Arc<Shared>) -> Self {
        shared.live.fetch_add(1, Ordering::Relaxed);
        Self(shared.clone())
    }
}

impl Drop for ServedConnection {
    fn drop(&mut self) {
        // Release: pairs with the Acquire of `stop`.
        self.0.live.fetch_add(u32::MAX, Ordering::Release);
        self.0.host.wake(&self.0.live, WAKE_ALL);
    }
}

/// Accepts connections until the end.
fn accept(shared: &Arc<Shared>, listener: &UnixListener) {
    loop {
        let accepted = listener.accept();
        if shared.is_stopping() {
            return;
        }
        let Ok((stream, _)) = accepted else {
            // Probably no descriptor is left; connections that end will free some.
            let until = shared.host.now().after(shared.limits.idle_slice);
            let _ = shared.host.wait(&shared.stopping, 0, Some(until));
            continue;
        };
        start_serving(shared, ManagerConnection::accepted(shared.host.clone(), stream));
    }
}

/// Accepts nodes that have proved the key, until the end.
fn accept_nodes(shared: &Arc<Shared>, listener: &Listener) {
    while !shared.is_stopping() {
        let slice = shared.host.now().after(shared.limits.idle_slice);
        match listener.accept(Some(slice)) {
            Ok(connection) => {
                start_serving(shared, ManagerConnection::of_node(shared.host.clone(), connection))
            }
            Err(transport::Error::TimedOut | transport::Error::Interrupted) => {}
            // As above.
            Err(_) => {
                let _ = shared.host.wait(&shared.stopping, 0, Some(slice));
            }
        }
    }
}

/// Serves a connection on a new thread, if the limit allows one more.
fn start_serving(shared: &Arc<Shared>, line: ManagerConnection) {
    // Relaxed: two concurrent calls may exceed the limit by one.
    if shared.live.load(Ordering::Relaxed) >= shared.limits.connections_max {
        return;
    }
    let seat = ServedConnection::take(shared);
    // Without a thread the connection is closed here, and its slot is free again.
    let _ = spawn(&shared.host, "cluster-line", move || serve(&seat.0, line));
}

/// Answers the requests of one connection until it ends. The connection is closed if the client sends no request in the
/// time for a message; after its first request it may be silent.
fn serve(shared: &Shared, mut line: ManagerConnection) {
    let mut asks_by = Some(shared.host.now().after(shared.limits.message));
    while !shared.is_stopping() {
        let now = shared.host.now();
        let first = match line.first_byte(now.after(shared.limits.idle_slice)) {
            Ok(Some(first)) => first,
            Ok(None) if asks_by.is_some_and(|by| now >= by) => return,
            Ok(None) => continue,
            Err(_) => return,
        };
        asks_by = None;
        let deadline = || shared.host.now().after(shared.limits.message);
        if answer(shared, &mut line, first, deadline).is_err() {
            return;
        }
    }
}

fn answer(
    shared: &Shared,
    line: &mut ManagerConnection,
    first: u8,
    deadline: impl Fn() -> Time,
) -> Result<(), ConnectionError> {
    let (head, kind, body) = line.receive(first, deadline())?;
    let cluster = shared.service.cluster();
    let reply = match Request::decode(kind, &body) {
        // A client of another cluster sees this cluster's number in the answer.
        Ok(_) if ![0, cluster].contains(&head.cluster.get()) => Reply::Failed,
        Ok(request) => perform(shared, request)?,
        Err(_) => return Err(ConnectionError::Broken),
    };
    let (kind, body) = reply.encode();
    line.send(&ClusterHead::encode(kind, head.id.get(), cluster, &body), deadline())
}

/// Executes a request. If a connection ends without an answer, the outcome is unknown.
fn perform(shared: &Shared, request: Request) -> Result<Reply, ConnectionError> {
    let service = &*shared.service;
    let now = shared.host.now();
    let result = match request {
        Request::Watch { after, wait_ms } => {
            let wait = Duration::from_millis(wait_ms.into()).min(shared.limits.watch_max);
            service.watch(after, now.after(wait)).map(|view| Reply::View((*view).clone()))
        }
        Request::Propose(change) => service.propose(&change, now).map(Reply::Done),
        Request::Beat(party) => service.beat(party, now).map(Reply::Beaten),
        Request::BeatOf(party) => service.beat_of(party, now).map(Reply::Beaten),
        Request::History { from, count } => service.history(from, count, now).map(Reply::Records),
    };
    match result {
        Ok(reply) => Ok(reply),
        Err(Error::Refused(refusal)) => Ok(Reply::Refused(refusal)),
        Err(Error::Unknown) => Err(ConnectionError::Broken),
        Err(_) => Ok(Reply::Failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::change::{Change, PoolReport};
    use crate::client::Remote;
    use crate::view::Address;
    use format::NodeId;
    use ipc::SystemHost;
    use pmem::recorded::{Recorder, Verb};

    /// The manager of a recorded medium, behind a socket.
    fn serve_one(recorder: &Recorder, folder: &Path) -> (Arc<Shared>, Box<dyn Join>) {
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        let rules = Rules::new(Duration::from_secs(60), 1000).unwrap();
        let (store, kept) = Store::open(recorder.medium(), 7, rules).unwrap();
        let service = Service::new(host.clone(), store, kept, Expeller::Core).unwrap();
        let (live, stopping) = (Word::new(0), Word::new(0));
        let shared = Arc::new(Shared { host, service, limits: Limits::default(), live, stopping });
        let listener = UnixListener::bind(folder.join(SOCKET_NAME)).unwrap();
        let theirs = shared.clone();
        let thread = spawn(&shared.host, "cluster-accept", move || accept(&theirs, &listener)).unwrap();
        (shared, thread)
    }

    #[test]
    fn a_client_learns_that_the_outcome_of_its_change_is_unknown() {
        let (recorder, folder) = (Recorder::new(), tempfile::tempdir().unwrap());
        let (shared, thread) = serve_one(&recorder, folder.path());
        let socket = folder.path().join(SOCKET_NAME);
        let client = Remote::new(Arc::new(SystemHost), &socket);
        recorder.fail_sync(recorder.calls(Verb::Sync));
        let (node, address) = (NodeId::new(1), Address::default());
        let join = Change::Join {
            node,
            instance: 5,
            replaces: None,
            medium: 0,
            pool: PoolReport::default(),
            address,
        };
        let until = SystemHost.now().after(Duration::from_secs(20));
        assert_eq!(client.propose(&join, until), Err(Error::Unknown));
        assert_eq!(client.propose(&join, until), Err(Error::Failed), "it was never taken up");
        shared.stopping.store(1, Ordering::Release);
        let _ = UnixStream::connect(&socket);
        thread.join().unwrap();
    }
}
