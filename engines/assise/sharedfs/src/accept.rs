//! The door: processes knock at a socket, the kernel says who they are, and each gets a session with its
//! descriptors. A process's death is seen by its socket or its pidfd, whichever tells first.
//!
//! One thread looks after the listener and all peers, and never waits for any of them: a greeting has a deadline,
//! and a session that is to end is ended by the thread that serves it.

use crate::daemon::Attached;
use crate::error::Error;
use crate::state::Core;
use ccnvm::SessionId;
use format::message::{Hello, MessageKind, Parcel, REFUSED_FULL, ROLE_GATEWAY, RingShape};
use ipc::host::Time;
use ipc::peer::{Peer, uid_of};
use ipc::shared::read_only;
use ipc::socket::{Connection, Listener, descriptors_left, descriptors_max, poll};
use ipc::sync::Ordering;
use ipc::sys::Descriptor;
use pmem::Region;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use vfs::Caller;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// How long a process may take to say its first words.
const GREETING: Duration = Duration::from_secs(5);
/// The door looks this often whether the daemon ends.
const LOOK: Duration = Duration::from_millis(100);
/// So long, without a descriptor for another process, the door does not look who knocks.
const PAUSE: Duration = Duration::from_millis(50);
/// Processes that knocked and have not said their first words.
const GREETING_MAX: usize = 256;
/// Descriptors that a session takes, with those that are gone once it has begun.
const SESSION_DESCRIPTORS: usize = 10;
/// Most descriptors that are kept from sessions: for segments, and logs that grow.
const KEPT_DESCRIPTORS_MAX: usize = 64;

/// What the door is told.
pub struct Door {
    /// Where it listens.
    pub listener: Listener,
    /// Version of the program; a library of another one is refused.
    pub library: String,
    /// The daemon's own user: the gateway, which acts for everybody, must be of it or root's.
    pub uid: u32,
}

/// A process that knocked.
struct Knocked {
    connection: Connection,
    uid: u32,
    until: Time,
}

/// A process with a session.
struct Inside {
    peer: Arc<Peer>,
    session: SessionId,
}

impl Core {
    /// The door's thread: ends when the daemon does. `serve` starts a thread for a new session.
    pub fn keep_door(self: &Arc<Self>, door: &Door, serve: &dyn Fn(SessionId) -> Result<(), Error>) {
        let (mut knocked, mut inside): (Vec<Knocked>, Vec<Inside>) = (Vec::new(), Vec::new());
        // Acquire: pairs with the Release in `Daemon::stop`.
        let mut is_open = true;
        while self.ending.load(Ordering::Acquire) == 0 {
            self.watch(door, is_open, &knocked, &inside);
            is_open = true;
            // Those who greet leave a place, so only who says nothing is ever sent away for another.
            for _ in 0..GREETING_MAX {
                let connection = match accept(door) {
                    Ok(Some(connection)) => connection,
                    Ok(None) => break,
                    Err(_) => {
                        is_open = false;
                        break;
                    }
                };
                let Ok(uid) = uid_of(&connection) else { continue };
                if knocked.len() >= GREETING_MAX {
                    inside.extend(self.hear(door, &mut knocked, serve));
                }
                if knocked.len() >= GREETING_MAX {
                    knocked.remove(who_gives_way(&knocked.iter().map(|one| one.uid).collect::<Vec<_>>()));
                }
                knocked.push(Knocked { connection, uid, until: self.host.now().after(GREETING) });
            }
            inside.extend(self.hear(door, &mut knocked, serve));
            inside.retain(|guest| self.is_there(guest));
            self.state.lock().drop_estates_of_dead(self);
        }
    }

    /// Lets in who has greeted; keeps those who still may.
    fn hear(
        self: &Arc<Self>,
        door: &Door,
        knocked: &mut Vec<Knocked>,
        serve: &dyn Fn(SessionId) -> Result<(), Error>,
    ) -> Vec<Inside> {
        let mut come = Vec::new();
        for guest in std::mem::take(knocked) {
            match guest.connection.hello(&door.library) {
                Ok(None) if self.host.now() < guest.until => knocked.push(guest),
                Ok(None) | Err(_) => {}
                Ok(Some(hello)) => come.extend(self.let_in(door, guest.connection, &hello, serve)),
            }
        }
        come
    }

    /// Waits until something happens at the door. While it is not open, whoever knocks waits in the backlog, and is nothing
    /// that happens.
    fn watch(&self, door: &Door, is_open: bool, knocked: &[Knocked], inside: &[Inside]) {
        let asked = |descriptor: &Descriptor| libc::pollfd {
            fd: descriptor.raw(),
            events: libc::POLLIN | libc::POLLRDHUP,
            revents: 0,
        };
        let mut all = Vec::new();
        all.extend(is_open.then(|| asked(door.listener.descriptor())));
        all.extend(knocked.iter().map(|guest| asked(guest.connection.descriptor())));
        for guest in inside {
            all.push(asked(guest.peer.connection().descriptor()));
            all.push(asked(guest.peer.process()));
        }
        let lifelines = self.state.lock().heirs.lifelines();
        all.extend(lifelines.iter().map(|(_, lifeline)| asked(lifeline.descriptor())));
        // Whatever the wait ends with, the door looks at everything.
        let _ = poll(&mut all, Some(if is_open { LOOK } else { PAUSE }));
    }

    fn let_in(
        self: &Arc<Self>,
        door: &Door,
        connection: Connection,
        hello: &Hello,
        serve: &dyn Fn(SessionId) -> Result<(), Error>,
    ) -> Option<Inside> {
        let wanted = kept_descriptors() + SESSION_DESCRIPTORS;
        if descriptors_left(wanted) < wanted {
            connection.refuse(REFUSED_FULL, "no descriptor is left for another session");
            return None;
        }
        let peer = Arc::new(Peer::new(connection).ok()?);
        let credentials = peer.credentials();
        let gateway = hello.role.get() == ROLE_GATEWAY;
        let trusted = gateway && (credentials.uid == 0 || credentials.uid == door.uid);
        let caller = if trusted {
            Caller::ROOT
        } else {
            Caller { uid: credentials.uid, gid: credentials.gid, groups: credentials.groups.clone() }
        };
        let attached = match self.attach(caller, credentials.pid.unsigned_abs(), hello.session.get()) {
            Ok(attached) => attached,
            Err(error) => {
                peer.connection().refuse(REFUSED_FULL, &error.to_string());
                return None;
            }
        };
        let session = SessionId(attached.welcome.session.get());
        if let Some(session) = self.state.lock().sessions.get_mut(&session) {
            session.peer = Some(peer.clone());
        }
        let welcomed = self.welcome(&peer, &attached, session).and_then(|()| serve(session));
        if welcomed.is_err() {
            self.eject(session, crate::leases::Reason::Left);
            return None;
        }
        Some(Inside { peer, session })
    }

    /// Hands a process everything that its session shares.
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

    /// Whether a process goes on; if not, its serving thread is told.
    fn is_there(&self, guest: &Inside) -> bool {
        let shared = {
            let state = self.state.lock();
            state.sessions.get(&guest.session).map(|session| session.shared.clone())
        };
        let Some(shared) = shared else { return false };
        // After its greeting a LibFS says nothing here: a message is a broken process, as much as no process.
        let silent = matches!(guest.peer.connection().receive(), Ok(None));
        if silent && ipc::ring::Link::is_up(&*guest.peer) {
            return true;
        }
        shared.ring.close();
        false
    }

    /// Sends a descriptor that a request asked for; in process there is nobody to send it to.
    pub fn send_parcel(&self, id: SessionId, request: u64, what: u64, region: &Region) -> Result<(), Error> {
        let peer = self.state.lock().sessions.get(&id).and_then(|session| session.peer.clone());
        let Some(peer) = peer else { return Ok(()) };
        let parcel =
            Parcel { request: U64::new(request), what: U64::new(what), bytes: U64::new(region.bytes()) };
        let descriptor = descriptor_of(region)?;
        Ok(peer.connection().send(MessageKind::Parcel, &[parcel.as_bytes()], &[&descriptor])?)
    }
}

/// Whoever knocks.
///
/// # Errors
/// No descriptor is free for him, but for what is kept.
fn accept(door: &Door) -> Result<Option<Connection>, ipc::Error> {
    // Who greets is told that there is no session for him: for that more are free than for a session.
    let kept = kept_descriptors() / 2;
    if descriptors_left(kept + 1) <= kept {
        return Err(ipc::Error::System { call: "accept4", errno: libc::EMFILE });
    }
    door.listener.accept()
}

/// Descriptors that no session and nobody at the door is given.
fn kept_descriptors() -> usize {
    let part = descriptors_max().map(|most| usize::try_from(most / 8).unwrap_or(usize::MAX));
    part.unwrap_or(0).min(KEPT_DESCRIPTORS_MAX)
}

/// Who of those that say nothing, by their users, makes room for the next one: the longest there of the user who has
/// most of them. So a user who fills the door keeps nobody out but himself.
fn who_gives_way(uids: &[u32]) -> usize {
    let mut of_user = HashMap::new();
    for uid in uids {
        *of_user.entry(uid).or_insert(0) += 1;
    }
    let most = of_user.values().max().copied().unwrap_or(0);
    uids.iter().position(|uid| of_user[uid] == most).expect("somebody is at a full door")
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
    fn the_longest_there_of_who_has_most_gives_way() {
        assert_eq!(who_gives_way(&[7]), 0);
        assert_eq!(who_gives_way(&[7, 8, 8]), 1);
        assert_eq!(who_gives_way(&[8, 7, 7, 8, 8]), 0);
        assert_eq!(who_gives_way(&[7, 8]), 0);
    }

    #[test]
    fn a_user_who_fills_the_door_keeps_another_in_his_place() {
        let (crowd, one) = (1000, 1001);
        let mut door = vec![one];
        for _ in 0..3 * GREETING_MAX {
            if door.len() >= GREETING_MAX {
                door.remove(who_gives_way(&door));
            }
            door.push(crowd);
        }
        assert_eq!((door.len(), door[0]), (GREETING_MAX, one));
    }
}
