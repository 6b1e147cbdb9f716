//! The listener of the daemon: clients connect to a socket, the kernel tells their credentials, and each client gets a
//! session with its descriptors. The death of a client is seen by its socket or its pidfd, whichever reports it first.
//!
//! One thread watches the listening socket and all connections. It never waits for a client, a log or a new file: a
//! client must greet before a deadline, each session begins on its own thread, and the thread that serves a session
//! also ends it.
//!
//! Sessions begin side by side, at most [`Config::greetings_max`](crate::config::Config) at a time, which users share
//! fairly. Greetings of one process are handled in order, so that a process that gave up one greeting and sends another
//! finds the state that the first one took over.

use crate::daemon::Attached;
use crate::error::Error;
use crate::fair::may_take;
use crate::state::Core;
use area::AreaError;
use ccnvm::SessionId;
use format::message::{
    Hello, MessageKind, Parcel, REFUSED_FULL, REFUSED_MEDIUM, REFUSED_SPACE, REFUSED_STANDBY, ROLE_GATEWAY,
    RingShape,
};
use ipc::host::Time;
use ipc::peer::{Peer, uid_of};
use ipc::ring::Link;
use ipc::shared::read_only;
use ipc::socket::{Connection, Listener, descriptors_left, descriptors_max, poll};
use ipc::sync::Ordering;
use ipc::sys::Descriptor;
use pmem::Region;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use vfs::Caller;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// How long a client may take to send its greeting.
const GREETING: Duration = Duration::from_secs(5);
/// The listener thread checks this often whether the daemon ends.
const LOOK: Duration = Duration::from_millis(100);
/// Pause before the listener accepts again after it ran out of descriptors.
const PAUSE: Duration = Duration::from_millis(50);
/// Connections that are kept without a session: clients that have not greeted yet, or have and wait for their turn.
const GREETING_MAX: usize = 256;
/// Descriptors that a session needs, with those that are closed once it has begun.
pub(crate) const SESSION_DESCRIPTORS: usize = 10;
/// Most descriptors that are reserved for segments and logs that grow.
const KEPT_DESCRIPTORS_MAX: usize = 64;

/// The reason that a client is told when it is refused for want of descriptors.
const NO_DESCRIPTOR: &str = "no descriptor is left for another session";

/// Settings of the listener.
pub struct ListenerSettings {
    /// The socket.
    pub listener: Listener,
    /// Version of the program; a library of another one is refused.
    pub library: String,
    /// User of the daemon: a gateway, which acts for all users, must run as this user or as root.
    pub uid: u32,
}

/// A connection without a session.
struct PendingConnection {
    uid: u32,
    stage: Stage,
}

/// How far the client has come.
enum Stage {
    /// It has sent nothing, and may do so until this time.
    Silent(Connection, Time),
    /// It has greeted, and waits for its turn.
    Greeted(Greeting),
}

/// The client behind a greeting.
struct Greeting {
    peer: Arc<Peer>,
    caller: Caller,
    former: u64,
    process: GreetingProcess,
}

/// The process whose session a greeting begins.
#[derive(Clone, Copy)]
struct GreetingProcess {
    /// Its number; 0 for a process that is not visible in this namespace.
    pid: u32,
    /// A child between vfork and exec has greeted in the memory of this process, its parent.
    by_child: bool,
}

/// The outcome of a greeting: a session, or none. Empty while the session is being set up.
type Arrival = OnceLock<Option<SessionId>>;

/// A client whose session is being set up or exists.
struct AdmittedClient {
    peer: Arc<Peer>,
    /// The process of the session; 0 for one that is not visible in this namespace.
    pid: u32,
    arrival: Arc<Arrival>,
    /// The client ended, or sent a message out of turn, while its session was being set up: its connection is polled no
    /// more.
    gone: bool,
}

impl AdmittedClient {
    fn is_under_way(&self) -> bool {
        self.arrival.get().is_none()
    }
}

/// The listener thread and its data.
struct ListenerThread {
    core: Arc<Core>,
    settings: ListenerSettings,
    /// Signalled when a greeting is over; `heard` is the end that the thread polls.
    bell: Arc<Connection>,
    heard: Connection,
    pending: Vec<PendingConnection>,
    admitted: Vec<AdmittedClient>,
}

impl Core {
    /// Starts the listener thread, which ends when the daemon does.
    ///
    /// # Errors
    /// `Ipc`: no thread or descriptor is free for it.
    pub fn start_listener(self: &Arc<Self>, settings: ListenerSettings) -> Result<(), Error> {
        let (bell, heard) = Connection::pair()?;
        let (core, bell) = (self.clone(), Arc::new(bell));
        // Only the first listener of a daemon is woken when the daemon ends; a second one finds out within [`LOOK`].
        let _ = self.listener_bell.set(bell.clone());
        let mut thread =
            ListenerThread { core, settings, bell, heard, pending: Vec::new(), admitted: Vec::new() };
        self.spawn("listener", move || thread.run())
    }

    /// Makes the listener thread check at once whether the daemon ends.
    pub fn wake_listener(&self) {
        if let Some(bell) = self.listener_bell.get() {
            // If the socket's queue is full, the thread is about to be woken anyway.
            let _ = bell.send(MessageKind::Note, &[], &[]);
        }
    }

    /// Creates the session of a client that has greeted. Runs on the session's own thread, so that waiting for its
    /// predecessor never blocks the listener. `None` if the client gets no session.
    fn begin_session(self: &Arc<Self>, greeting: Greeting) -> Option<SessionId> {
        let Greeting { peer, caller, former, process: GreetingProcess { pid, by_child } } = greeting;
        self.end_former(&caller, pid, former);
        if !peer.is_up() {
            // A client that gave up meanwhile finds the state of its former session when it greets again.
            return None;
        }
        let attached = match self.begin(caller, pid, former) {
            Ok(attached) => attached,
            Err(error) => {
                let (is_full, is_stopped) = {
                    let state = self.state.lock();
                    (state.is_full, state.is_stopped())
                };
                let reason =
                    if is_full || error.is_no_space() || matches!(error, Error::Area(AreaError::NoSpace)) {
                        REFUSED_SPACE
                    } else if is_stopped || error.is_failure() {
                        REFUSED_MEDIUM
                    } else {
                        REFUSED_FULL
                    };
                peer.connection().refuse(reason, &error.to_string());
                return None;
            }
        };
        let session = SessionId(attached.welcome.session.get());
        if let Some(session) = self.state.lock().sessions.get_mut(&session) {
            session.peer = Some(peer.clone());
            session.is_by_child = by_child;
        }
        if self.welcome(&peer, &attached, session).is_err() {
            self.terminate(session, crate::session_end::TerminationReason::Left);
            return None;
        }
        Some(session)
    }

    /// Sends a client everything that its session shares with it.
    fn welcome(&self, peer: &Peer, attached: &Attached, session: SessionId) -> Result<(), Error> {
        let shared = self.state.lock().sessions.get(&session).map(|session| session.shared.clone());
        let shared = shared.ok_or(Error::Stopped)?;
        let log = descriptor_of(&attached.log)?;
        let leases = read_only(&shared.lease_words.memory)?;
        let generations = self.generations.read_only()?;
        let descriptors =
            [&log, &shared.session_words.memory, &leases, &shared.ring_memory.memory, &generations];
        let shape = RingShape::from(attached.ring_limits);
        let parts = [shape.as_bytes(), attached.welcome.as_bytes()];
        Ok(peer.connection().send(MessageKind::Welcome, &parts, &descriptors)?)
    }

    /// Sends a descriptor that a request asked for. A LibFS in the same process gets none: it has no connection.
    pub fn send_parcel(&self, id: SessionId, request: u64, what: u64, region: &Region) -> Result<(), Error> {
        let peer = self.state.lock().sessions.get(&id).and_then(|session| session.peer.clone());
        let Some(peer) = peer else { return Ok(()) };
        let parcel =
            Parcel { request: U64::new(request), what: U64::new(what), bytes: U64::new(region.bytes()) };
        let descriptor = descriptor_of(region)?;
        Ok(peer.connection().send(MessageKind::Parcel, &[parcel.as_bytes()], &[&descriptor])?)
    }
}

impl ListenerThread {
    fn run(&mut self) {
        let mut is_open = true;
        // Acquire: pairs with the Release in `Daemon::stop`.
        while self.core.ending.load(Ordering::Acquire) == 0 {
            self.watch(is_open);
            is_open = self.admit();
            self.hear();
            self.begin_greetings();
            self.admitted.retain_mut(|guest| is_there(&self.core, guest));
            self.core.state.lock().drop_detached_of_dead(&self.core);
        }
    }

    /// Waits until something happens at any of the descriptors. With `is_open` false the listening socket is not
    /// polled, and new connections wait in its backlog.
    fn watch(&self, is_open: bool) {
        let asked_for = |descriptor: &Descriptor, events| libc::pollfd {
            fd: descriptor.raw(),
            events: events | libc::POLLRDHUP,
            revents: 0,
        };
        let asked = |descriptor: &Descriptor| asked_for(descriptor, libc::POLLIN);
        let mut all = vec![asked(self.heard.descriptor())];
        all.extend(is_open.then(|| asked(self.settings.listener.descriptor())));
        for guest in &self.pending {
            all.push(match &guest.stage {
                Stage::Silent(connection, _) => asked(connection.descriptor()),
                // A message before its turn is read when its session is set up.
                Stage::Greeted(Greeting { peer, .. }) => asked_for(peer.connection().descriptor(), 0),
            });
        }
        for guest in self.admitted.iter().filter(|guest| !guest.gone) {
            all.push(asked(guest.peer.connection().descriptor()));
            all.push(asked(guest.peer.process()));
        }
        let liveness_sockets = self.core.state.lock().detached.liveness_sockets();
        all.extend(liveness_sockets.iter().map(|(_, liveness_socket)| asked(liveness_socket.descriptor())));
        // However the wait ends, all connections are checked.
        let _ = poll(&mut all, Some(if is_open { LOOK } else { PAUSE }));
        for _ in 0..GREETING_MAX {
            if !matches!(self.heard.receive(), Ok(Some(_))) {
                break;
            }
        }
    }

    /// Accepts new connections; false if no descriptor is free for one.
    fn admit(&mut self) -> bool {
        // A client that has greeted makes room as soon as its session begins. So the connection that is dropped here is
        // of a client that has sent nothing, or of a user for whom many sessions are being set up.
        for _ in 0..GREETING_MAX {
            let connection = match accept(&self.settings) {
                Ok(Some(connection)) => connection,
                Ok(None) => return true,
                Err(_) => return false,
            };
            let Ok(uid) = uid_of(&connection) else { continue };
            if self.pending.len() >= GREETING_MAX {
                self.hear();
                self.begin_greetings();
            }
            if self.pending.len() >= GREETING_MAX {
                let uids: Vec<u32> = self.pending.iter().map(|one| one.uid).collect();
                self.pending.remove(oldest_of_most(&uids));
            }
            let until = self.core.host.now().after(GREETING);
            self.pending.push(PendingConnection { uid, stage: Stage::Silent(connection, until) });
        }
        true
    }

    /// Reads greetings. Keeps the clients that have greeted and those that still may.
    fn hear(&mut self) {
        for PendingConnection { uid, stage } in std::mem::take(&mut self.pending) {
            let stage = match stage {
                Stage::Silent(connection, until) => match connection.hello(&self.settings.library) {
                    Ok(None) if self.core.host.now() < until => Some(Stage::Silent(connection, until)),
                    Ok(None) | Err(_) => None,
                    Ok(Some(hello)) => self.greeted(connection, &hello).map(Stage::Greeted),
                },
                Stage::Greeted(greeting) => greeting.peer.is_up().then_some(Stage::Greeted(greeting)),
            };
            self.pending.extend(stage.map(|stage| PendingConnection { uid, stage }));
        }
    }

    /// Judges a greeting.
    fn greeted(&self, connection: Connection, hello: &Hello) -> Option<Greeting> {
        // One descriptor for the process. Whether there are enough for a session is checked when its turn comes.
        if !has_descriptors(1) {
            connection.refuse(REFUSED_FULL, NO_DESCRIPTOR);
            return None;
        }
        let peer = Arc::new(Peer::new(connection).ok()?);
        let credentials = peer.credentials();
        let gateway = hello.role.get() == ROLE_GATEWAY;
        let trusted = gateway && (credentials.uid == 0 || credentials.uid == self.settings.uid);
        let caller = if trusted {
            Caller::ROOT
        } else {
            Caller { uid: credentials.uid, gid: credentials.gid, groups: credentials.groups.clone() }
        };
        let former = hello.session.get();
        let number = number_of(&peer);
        let lender = self.core.host.lender(number);
        let process = GreetingProcess { pid: lender.unwrap_or(number), by_child: lender.is_some() };
        // The former session is marked now, so that it is kept even if its process hangs up before the turn of this
        // greeting.
        self.core.expect_successor(&caller, process.pid, former);
        Some(Greeting { peer, caller, former, process })
    }

    /// Starts the threads of the greetings whose turn it is.
    fn begin_greetings(&mut self) {
        if !self.pending.iter().any(|one| matches!(one.stage, Stage::Greeted(_))) {
            return;
        }
        let (mut all, mut of_user, mut busy) = (0, HashMap::new(), BTreeSet::new());
        for guest in self.admitted.iter().filter(|guest| guest.is_under_way()) {
            all += 1;
            *of_user.entry(guest.peer.credentials().uid).or_insert(0) += 1;
            busy.insert(guest.pid);
        }
        let max = self.core.config.greetings_max;
        for PendingConnection { uid, stage } in std::mem::take(&mut self.pending) {
            let Stage::Greeted(greeting) = stage else {
                self.pending.push(PendingConnection { uid, stage });
                continue;
            };
            let (number, mine) = (greeting.process.pid, of_user.entry(uid).or_insert(0));
            // A process without a number here cannot be a successor, so its greetings need no order. A greeting that
            // waits holds back the later ones of its process.
            let is_first = busy.insert(number) || number == 0;
            let has_turn = is_first && may_take(uid, *mine, all, max);
            // Greetings under way will have their descriptors, and may leave some.
            if has_turn && has_descriptors(SESSION_DESCRIPTORS * (1 + all)) {
                (*mine, all) = (*mine + 1, all + 1);
                self.begin_greeting(greeting);
            } else if has_turn && all == 0 {
                greeting.peer.connection().refuse(REFUSED_FULL, NO_DESCRIPTOR);
            } else {
                self.pending.push(PendingConnection { uid, stage: Stage::Greeted(greeting) });
            }
        }
    }

    fn begin_greeting(&mut self, greeting: Greeting) {
        let (peer, pid, arrival) = (greeting.peer.clone(), greeting.process.pid, Arc::new(Arrival::new()));
        let (core, bell, arrives) = (self.core.clone(), self.bell.clone(), arrival.clone());
        let begun = self.core.spawn("session", move || {
            let session = core.begin_session(greeting);
            // Only this thread sets it.
            let _ = arrives.set(session);
            // If the socket's queue is full, the thread is about to be woken anyway.
            let _ = bell.send(MessageKind::Note, &[], &[]);
            // Resources that only a greeting needs are not kept for as long as the session.
            drop((bell, arrives));
            if let Some(session) = session {
                core.serve(session);
            }
        });
        match begun {
            Ok(()) => self.admitted.push(AdmittedClient { peer, pid, arrival, gone: false }),
            Err(_) => peer.connection().refuse(REFUSED_FULL, "no thread is left for another session"),
        }
    }
}

/// Whether a client lives and is silent. If not, the ring of its session is closed, as soon as there is a session, which
/// ends the serving thread.
fn is_there(core: &Core, guest: &mut AdmittedClient) -> bool {
    // After its greeting a LibFS sends nothing over this connection: a message is treated like the end of the process.
    let is_silent = || matches!(guest.peer.connection().receive(), Ok(None));
    let arrival = guest.arrival.get().copied();
    if arrival == Some(None) {
        return false;
    }
    let gone = guest.gone || !(is_silent() && guest.peer.is_up());
    let Some(Some(session)) = arrival else {
        guest.gone = gone;
        return true;
    };
    let shared = core.state.lock().sessions.get(&session).map(|session| session.shared.clone());
    let Some(shared) = shared else { return false };
    if gone {
        shared.ring.close();
    }
    !gone
}

/// The process number that the kernel reports; 0 for a process that is not visible in this namespace.
fn number_of(peer: &Peer) -> u32 {
    peer.credentials().pid.unsigned_abs()
}

/// More connections than can wait in the backlog.
const REJECTED_MAX: u32 = 8192;

/// Rejects all connections in the backlog because the medium of the pool is full: no daemon can serve them before space
/// is freed, and they would wait for a minute and a half.
pub fn reject_all(listener: &Listener, why: &Error) {
    reject_all_waiting(listener, REFUSED_SPACE, &why.to_string());
}

/// Rejects all connections in the backlog of a node that does not lead, with the reason.
pub fn reject_all_on_standby(listener: &Listener, why: &str) {
    reject_all_waiting(listener, REFUSED_STANDBY, why);
}

fn reject_all_waiting(listener: &Listener, reason: u32, why: &str) {
    // Clients that come back at once would else keep this process from ending. After an error no more of them can be
    // told.
    for _ in 0..REJECTED_MAX {
        let Ok(Some(waiting)) = listener.accept() else { return };
        // If the greeting stayed unread, the client would see a broken connection instead of the reason.
        let _ = waiting.receive();
        waiting.refuse(reason, why);
    }
}

/// Accepts the next connection of the backlog, if there is one.
///
/// # Errors
/// No descriptor is free beside the reserved ones.
fn accept(settings: &ListenerSettings) -> Result<Option<Connection>, ipc::Error> {
    // A client that greets is told that there is no session for it: for that, more descriptors may be used than for a
    // session.
    let kept = kept_descriptors() / 2;
    if descriptors_left(kept + 1) <= kept {
        return Err(ipc::Error::System { call: "accept4", errno: libc::EMFILE });
    }
    settings.listener.accept()
}

/// Whether so many descriptors are free beside those that are reserved.
pub(crate) fn has_descriptors(count: usize) -> bool {
    let wanted = kept_descriptors() + count;
    descriptors_left(wanted) >= wanted
}

/// Descriptors that neither sessions nor pending connections get.
fn kept_descriptors() -> usize {
    let part = descriptors_max().map(|most| usize::try_from(most / 8).unwrap_or(usize::MAX));
    part.unwrap_or(0).min(KEPT_DESCRIPTORS_MAX)
}

/// Picks the connection to drop when the list of pending connections is full, given their users: the oldest one of the
/// user with the most. So a user who fills the list only keeps out their own processes.
fn oldest_of_most(uids: &[u32]) -> usize {
    let mut of_user = HashMap::new();
    for uid in uids {
        *of_user.entry(uid).or_insert(0) += 1;
    }
    let most = of_user.values().max().copied().unwrap_or(0);
    uids.iter().position(|uid| of_user[uid] == most).expect("a full list is not empty")
}

/// A second descriptor of a pool file.
fn descriptor_of(region: &Region) -> Result<Descriptor, Error> {
    let descriptor =
        region.descriptor().ok_or(Error::Settings("a medium that exists in one process only"))?;
    let owned = descriptor.try_clone_to_owned().map_err(|error| {
        Error::Ipc(ipc::Error::System { call: "fcntl", errno: error.raw_os_error().unwrap_or(0) })
    })?;
    Ok(Descriptor::from(owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_the_user_with_most_gives_way() {
        assert_eq!(oldest_of_most(&[7]), 0);
        assert_eq!(oldest_of_most(&[7, 8, 8]), 1);
        assert_eq!(oldest_of_most(&[8, 7, 7, 8, 8]), 0);
        assert_eq!(oldest_of_most(&[7, 8]), 0);
    }

    #[test]
    fn a_user_who_fills_the_list_keeps_out_no_other_user() {
        let (crowd, one) = (1000, 1001);
        let mut list = vec![one];
        for _ in 0..3 * GREETING_MAX {
            if list.len() >= GREETING_MAX {
                list.remove(oldest_of_most(&list));
            }
            list.push(crowd);
        }
        assert_eq!((list.len(), list[0]), (GREETING_MAX, one));
    }
}
