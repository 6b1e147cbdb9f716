//! The embedded manager: a [`Service`] behind a socket in its folder, and for nodes of other machines behind a listener
//! of [`transport`]; one thread a connection.
//!
//! Whatever comes in is checked before anything is done: a message that is none ends its connection, one that does not
//! come whole in time too, and so does one connection more than there may be. Nothing outlives [`Embedded::stop`].

use crate::client::IDLE_MAX;
use crate::core::Expeller;
use crate::error::Error;
use crate::line::{Line, LineError};
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

/// Bounds of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at once: one a thread.
    pub connections_max: u32,
    /// Time in which a message that has begun must be there, and an answer taken.
    pub message: Duration,
    /// Longest wait of a watcher; then it is answered with what there is.
    pub watch_max: Duration,
    /// How often an idle connection looks whether it is the end.
    pub idle_slice: Duration,
}

/// Connections at once: those that every member keeps, and some for people and for what is sent twice.
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
    /// The socket that listens once more: who accepts is woken by its end, whatever became of its name.
    listening: UnixStream,
    threads: Vec<Box<dyn Join>>,
}

struct Shared {
    host: Arc<dyn Host>,
    service: Arc<Service>,
    limits: Limits,
    /// Connections that are served.
    live: Word,
    /// 1 when it stops.
    stopping: Word,
}

impl Embedded {
    /// Starts the manager of a folder, which is made if it is missing. A new folder becomes that of a new cluster with
    /// these rules; an old one keeps its own. Nodes come by `nodes`, if it is there: a listener of
    /// [`format::NodeId::MANAGER`], in [`crate::line::EPOCH`].
    ///
    /// # Errors
    /// `Media` (`Locked`: it runs already), `Damaged`, `Open`, `System`. What the machine refuses it refuses before anything
    /// is written.
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
        // The lock on the folder is ours, so nobody listens there any more.
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

    /// The rules of the cluster whose manager has this folder; none if it was never started there. Nothing of it is changed.
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

    /// Where clients of this machine connect.
    pub fn socket(&self) -> &Path {
        &self.socket.path
    }

    /// The manager inside.
    pub fn service(&self) -> &Arc<Service> {
        &self.shared.service
    }

    /// Ends it: nothing is answered any more, and every thread, and the socket, has gone when this returns.
    pub fn stop(self) {
        let Shared { host, service, live, stopping, .. } = &*self.shared;
        // Release: pairs with the Acquire of those who look whether it is the end.
        stopping.store(1, Ordering::Release);
        service.stop();
        // Who accepts sits in the kernel.
        let _ = self.listening.shutdown(Shutdown::Both);
        for thread in self.threads {
            // One that panicked has ended as well.
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
        // The folder is locked still. What stays, the next start takes.
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

    /// Whether the name leads to the socket still.
    fn is_ours(&self) -> std::io::Result<bool> {
        match Self::identity(&self.path) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
            found => found.map(|found| found == self.identity),
        }
    }
}

/// Who else may write in the manager's folder could put a log of his own there, or take the lock.
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

/// A thread that waits for what it is to do: whether the machine has one more is known before anything is changed. Dropped,
/// it does nothing and ends.
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
        // It waits for this alone.
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

/// A place among the connections that are served, free again however its thread ends.
struct Seat(Arc<Shared>);

impl Seat {
    fn take(shared: &Arc<Shared>) -> Self {
        shared.live.fetch_add(1, Ordering::Relaxed);
        Self(shared.clone())
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // Release: pairs with the Acquire of `stop`.
        self.0.live.fetch_add(u32::MAX, Ordering::Release);
        self.0.host.wake(&self.0.live, WAKE_ALL);
    }
}

/// Takes connections until the end.
fn accept(shared: &Arc<Shared>, listener: &UnixListener) {
    loop {
        let accepted = listener.accept();
        if shared.is_stopping() {
            return;
        }
        let Ok((stream, _)) = accepted else {
            // No descriptors left, most likely: those that end make room.
            let until = shared.host.now().after(shared.limits.idle_slice);
            let _ = shared.host.wait(&shared.stopping, 0, Some(until));
            continue;
        };
        let_in(shared, Line::accepted(shared.host.clone(), stream));
    }
}

/// Takes nodes that have proved the key, until the end.
fn accept_nodes(shared: &Arc<Shared>, listener: &Listener) {
    while !shared.is_stopping() {
        let slice = shared.host.now().after(shared.limits.idle_slice);
        match listener.accept(Some(slice)) {
            Ok(connection) => let_in(shared, Line::of_node(shared.host.clone(), connection)),
            Err(transport::Error::TimedOut | transport::Error::Interrupted) => {}
            // As above.
            Err(_) => {
                let _ = shared.host.wait(&shared.stopping, 0, Some(slice));
            }
        }
    }
}

/// Has a connection served, if there is room for one more.
fn let_in(shared: &Arc<Shared>, line: Line) {
    // Relaxed: two that add at once may let in one more than there may be.
    if shared.live.load(Ordering::Relaxed) >= shared.limits.connections_max {
        return;
    }
    let seat = Seat::take(shared);
    // Without a thread the line ends here, and its place is free.
    let _ = spawn(&shared.host, "cluster-line", move || serve(&seat.0, line));
}

/// Answers one connection until it ends. Who asks nothing in the time of a message makes room; who has asked may be silent
/// from then on.
fn serve(shared: &Shared, mut line: Line) {
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

fn answer(shared: &Shared, line: &mut Line, first: u8, deadline: impl Fn() -> Time) -> Result<(), LineError> {
    let (head, kind, body) = line.receive(first, deadline())?;
    let cluster = shared.service.cluster();
    let reply = match Request::decode(kind, &body) {
        // Somebody of another cluster reads ours in the answer.
        Ok(_) if ![0, cluster].contains(&head.cluster.get()) => Reply::Failed,
        Ok(request) => perform(shared, request)?,
        Err(_) => return Err(LineError::Broken),
    };
    let (kind, body) = reply.encode();
    line.send(&ClusterHead::encode(kind, head.id.get(), cluster, &body), deadline())
}

/// What a request is answered with; a connection that ends without an answer says that nobody knows.
fn perform(shared: &Shared, request: Request) -> Result<Reply, LineError> {
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
        Err(Error::Unknown) => Err(LineError::Broken),
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
    fn a_client_learns_that_nobody_knows_of_its_change() {
        let (recorder, folder) = (Recorder::new(), tempfile::tempdir().unwrap());
        let (shared, thread) = serve_one(&recorder, folder.path());
        let socket = folder.path().join(SOCKET_NAME);
        let client = Remote::new(Arc::new(SystemHost), &socket);
        recorder.fail_settle(recorder.calls(Verb::Settle));
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
