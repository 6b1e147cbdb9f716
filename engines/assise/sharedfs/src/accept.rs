//! The door: processes knock at a socket, the kernel says who they are, and each gets a session with its
//! descriptors. A process's death is seen by its socket or its pidfd, whichever tells first.
//!
//! One thread looks after the listener and all peers, and never waits for any of them, nor for a log or a new file:
//! a greeting has a deadline; who has greeted is let in by the thread that serves him from then on; and a session that is
//! to end is ended by the thread that serves it.
//!
//! Greetings are let in side by side, a bounded number, which users share fairly; those of one process one after the
//! other, so that a process which gave one up and greets again finds what the first one took over.

use crate::daemon::Attached;
use crate::error::Error;
use crate::fair::may_take;
use crate::state::Core;
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

/// How long a process may take to say its first words.
const GREETING: Duration = Duration::from_secs(5);
/// The door looks this often whether the daemon ends.
const LOOK: Duration = Duration::from_millis(100);
/// So long, without a descriptor for another process, the door does not look who knocks.
const PAUSE: Duration = Duration::from_millis(50);
/// Processes that knocked and have not said their first words, or have and wait for their turn.
const GREETING_MAX: usize = 256;
/// Descriptors that a session takes, with those that are gone once it has begun.
pub(crate) const SESSION_DESCRIPTORS: usize = 10;
/// Most descriptors that are kept from sessions: for segments, and logs that grow.
const KEPT_DESCRIPTORS_MAX: usize = 64;

/// What who is refused for want of them is told.
const NO_DESCRIPTOR: &str = "no descriptor is left for another session";

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
    uid: u32,
    stage: Stage,
}

/// How far it came.
enum Stage {
    /// It has said nothing, and may until then.
    Silent(Connection, Time),
    /// It has greeted, and waits for its turn.
    Greeted(Greeting),
}

/// What is known of who has greeted.
struct Greeting {
    peer: Arc<Peer>,
    caller: Caller,
    former: u64,
}

/// How a greeting ended: with a session or without. Nothing stands there while it is under way.
type Arrival = OnceLock<Option<SessionId>>;

/// A process that is being let in, or has a session.
struct Inside {
    peer: Arc<Peer>,
    arrival: Arc<Arrival>,
    /// It ended, or spoke out of turn, while it was being let in: nobody listens to it any more.
    gone: bool,
}

impl Inside {
    fn is_under_way(&self) -> bool {
        self.arrival.get().is_none()
    }
}

/// The door's thread at work.
struct Keeper {
    core: Arc<Core>,
    door: Door,
    /// Rung when a greeting is over, and where that is heard.
    bell: Arc<Connection>,
    heard: Connection,
    knocked: Vec<Knocked>,
    inside: Vec<Inside>,
}

impl Core {
    /// Starts the door's thread, which ends when the daemon does.
    ///
    /// # Errors
    /// `Ipc`: no thread or descriptor is free for it.
    pub fn open_door(self: &Arc<Self>, door: Door) -> Result<(), Error> {
        let (bell, heard) = Connection::pair()?;
        let (core, bell) = (self.clone(), Arc::new(bell));
        // A second door of the same daemon looks by itself whether the daemon ends.
        let _ = self.door_bell.set(bell.clone());
        let mut keeper = Keeper { core, door, bell, heard, knocked: Vec::new(), inside: Vec::new() };
        self.spawn("door", move || keeper.keep())
    }

    /// Has the door look at once whether the daemon ends.
    pub fn ring_at_door(&self) {
        if let Some(bell) = self.door_bell.get() {
            // A bell that was rung so often that it cannot be rung again is heard anyway.
            let _ = bell.send(MessageKind::Note, &[], &[]);
        }
    }

    /// Lets in who has greeted, in the thread of his session: whoever it has to wait for, the door does not. `None` if he
    /// gets no session.
    fn let_in(self: &Arc<Self>, greeting: Greeting) -> Option<SessionId> {
        let Greeting { peer, caller, former } = greeting;
        let pid = number_of(&peer);
        self.end_former(&caller, pid, former);
        if !peer.is_up() {
            // Who gave up meanwhile and comes again finds what there is for him.
            return None;
        }
        let attached = match self.begin(caller, pid, former) {
            Ok(attached) => attached,
            Err(error) => {
                let (is_full, is_stopped) = {
                    let state = self.state.lock();
                    (state.is_full, state.is_stopped())
                };
                let reason = if is_full || error.is_no_space() {
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
        }
        if self.welcome(&peer, &attached, session).is_err() {
            self.eject(session, crate::leases::Reason::Left);
            return None;
        }
        Some(session)
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

impl Keeper {
    fn keep(&mut self) {
        let mut is_open = true;
        // Acquire: pairs with the Release in `Daemon::stop`.
        while self.core.ending.load(Ordering::Acquire) == 0 {
            self.watch(is_open);
            is_open = self.admit();
            self.hear();
            self.begin_greetings();
            self.inside.retain_mut(|guest| is_there(&self.core, guest));
            self.core.state.lock().drop_estates_of_dead(&self.core);
        }
    }

    /// Waits until something happens at the door. While it is not open, whoever knocks waits in the backlog, and is
    /// nothing that happens.
    fn watch(&self, is_open: bool) {
        let asked_for = |descriptor: &Descriptor, events| libc::pollfd {
            fd: descriptor.raw(),
            events: events | libc::POLLRDHUP,
            revents: 0,
        };
        let asked = |descriptor: &Descriptor| asked_for(descriptor, libc::POLLIN);
        let mut all = vec![asked(self.heard.descriptor())];
        all.extend(is_open.then(|| asked(self.door.listener.descriptor())));
        for guest in &self.knocked {
            all.push(match &guest.stage {
                Stage::Silent(connection, _) => asked(connection.descriptor()),
                // What it says before its turn is read when it is inside.
                Stage::Greeted(Greeting { peer, .. }) => asked_for(peer.connection().descriptor(), 0),
            });
        }
        for guest in self.inside.iter().filter(|guest| !guest.gone) {
            all.push(asked(guest.peer.connection().descriptor()));
            all.push(asked(guest.peer.process()));
        }
        let lifelines = self.core.state.lock().heirs.lifelines();
        all.extend(lifelines.iter().map(|(_, lifeline)| asked(lifeline.descriptor())));
        // Whatever the wait ends with, the door looks at everything.
        let _ = poll(&mut all, Some(if is_open { LOOK } else { PAUSE }));
        for _ in 0..GREETING_MAX {
            if !matches!(self.heard.receive(), Ok(Some(_))) {
                break;
            }
        }
    }

    /// Takes in who knocks; false if there is no descriptor for him.
    fn admit(&mut self) -> bool {
        // Those who greet and are let in leave a place, so only who says nothing, or of whose user many others are let in,
        // is ever sent away for another.
        for _ in 0..GREETING_MAX {
            let connection = match accept(&self.door) {
                Ok(Some(connection)) => connection,
                Ok(None) => return true,
                Err(_) => return false,
            };
            let Ok(uid) = uid_of(&connection) else { continue };
            if self.knocked.len() >= GREETING_MAX {
                self.hear();
                self.begin_greetings();
            }
            if self.knocked.len() >= GREETING_MAX {
                let uids: Vec<u32> = self.knocked.iter().map(|one| one.uid).collect();
                self.knocked.remove(who_gives_way(&uids));
            }
            let until = self.core.host.now().after(GREETING);
            self.knocked.push(Knocked { uid, stage: Stage::Silent(connection, until) });
        }
        true
    }

    /// Keeps who has greeted, who still may, and who waits for his turn.
    fn hear(&mut self) {
        for Knocked { uid, stage } in std::mem::take(&mut self.knocked) {
            let stage = match stage {
                Stage::Silent(connection, until) => match connection.hello(&self.door.library) {
                    Ok(None) if self.core.host.now() < until => Some(Stage::Silent(connection, until)),
                    Ok(None) | Err(_) => None,
                    Ok(Some(hello)) => self.greeted(connection, &hello).map(Stage::Greeted),
                },
                Stage::Greeted(greeting) => greeting.peer.is_up().then_some(Stage::Greeted(greeting)),
            };
            self.knocked.extend(stage.map(|stage| Knocked { uid, stage }));
        }
    }

    /// Takes a greeting.
    fn greeted(&self, connection: Connection, hello: &Hello) -> Option<Greeting> {
        // One for its process; whether there are enough for a session is seen when its turn comes.
        if !has_descriptors(1) {
            connection.refuse(REFUSED_FULL, NO_DESCRIPTOR);
            return None;
        }
        let peer = Arc::new(Peer::new(connection).ok()?);
        let credentials = peer.credentials();
        let gateway = hello.role.get() == ROLE_GATEWAY;
        let trusted = gateway && (credentials.uid == 0 || credentials.uid == self.door.uid);
        let caller = if trusted {
            Caller::ROOT
        } else {
            Caller { uid: credentials.uid, gid: credentials.gid, groups: credentials.groups.clone() }
        };
        let former = hello.session.get();
        // Seen to hang up before its turn comes, the former session leaves what it has all the same.
        self.core.expect_heir(&caller, number_of(&peer), former);
        Some(Greeting { peer, caller, former })
    }

    /// Starts the threads of those whose turn it is.
    fn begin_greetings(&mut self) {
        if !self.knocked.iter().any(|one| matches!(one.stage, Stage::Greeted(_))) {
            return;
        }
        let (mut all, mut of_user, mut busy) = (0, HashMap::new(), BTreeSet::new());
        for guest in self.inside.iter().filter(|guest| guest.is_under_way()) {
            all += 1;
            *of_user.entry(guest.peer.credentials().uid).or_insert(0) += 1;
            busy.insert(number_of(&guest.peer));
        }
        let max = self.core.config.greetings_max;
        for Knocked { uid, stage } in std::mem::take(&mut self.knocked) {
            let Stage::Greeted(greeting) = stage else {
                self.knocked.push(Knocked { uid, stage });
                continue;
            };
            let (number, mine) = (number_of(&greeting.peer), of_user.entry(uid).or_insert(0));
            // A process that has no number here is nobody's heir: its greetings have no order. One that waits, those behind
            // it wait for, too.
            let is_first = busy.insert(number) || number == 0;
            let has_turn = is_first && may_take(uid, *mine, all, max);
            // Those under way will have theirs, and may leave some.
            if has_turn && has_descriptors(SESSION_DESCRIPTORS * (1 + all)) {
                (*mine, all) = (*mine + 1, all + 1);
                self.begin_greeting(greeting);
            } else if has_turn && all == 0 {
                greeting.peer.connection().refuse(REFUSED_FULL, NO_DESCRIPTOR);
            } else {
                self.knocked.push(Knocked { uid, stage: Stage::Greeted(greeting) });
            }
        }
    }

    fn begin_greeting(&mut self, greeting: Greeting) {
        let (peer, arrival) = (greeting.peer.clone(), Arc::new(Arrival::new()));
        let (core, bell, arrives) = (self.core.clone(), self.bell.clone(), arrival.clone());
        let begun = self.core.spawn("session", move || {
            let session = core.let_in(greeting);
            // Nobody else sets it.
            let _ = arrives.set(session);
            // A bell that cannot be rung because it was rung so often is heard anyway.
            let _ = bell.send(MessageKind::Note, &[], &[]);
            // What only a greeting needs is not kept for as long as the session.
            drop((bell, arrives));
            if let Some(session) = session {
                core.serve(session);
            }
        });
        match begun {
            Ok(()) => self.inside.push(Inside { peer, arrival, gone: false }),
            Err(_) => peer.connection().refuse(REFUSED_FULL, "no thread is left for another session"),
        }
    }
}

/// Whether a process goes on; if not, its serving thread is told, as soon as there is a session.
fn is_there(core: &Core, guest: &mut Inside) -> bool {
    // After its greeting a LibFS says nothing here: a message is a broken process, as much as no process.
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

/// A process as the kernel numbers it; 0 for one that is not seen from here.
fn number_of(peer: &Peer) -> u32 {
    peer.credentials().pid.unsigned_abs()
}

/// More than wait at the door at once.
const TURNED_AWAY_MAX: u32 = 8192;

/// Tells all who wait at the door that what holds the pool is full: no daemon lets them in before somebody makes room,
/// and they would wait for a minute and a half.
pub fn turn_away(listener: &Listener, why: &Error) {
    turn_all_away(listener, REFUSED_SPACE, &why.to_string());
}

/// Tells all who wait at the door of a node that does not lead why there is no session for them.
pub fn turn_away_from_standby(listener: &Listener, why: &str) {
    turn_all_away(listener, REFUSED_STANDBY, why);
}

fn turn_all_away(listener: &Listener, reason: u32, why: &str) {
    // Those who come back at once would else keep this process from its end. An error is the end of those who can be told.
    for _ in 0..TURNED_AWAY_MAX {
        let Ok(Some(waiting)) = listener.accept() else { return };
        // With a greeting that nobody has read its sender would hear of a broken connection, and not what was said.
        let _ = waiting.receive();
        waiting.refuse(reason, why);
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

/// Whether there are so many descriptors, beside those that are kept.
pub(crate) fn has_descriptors(count: usize) -> bool {
    let wanted = kept_descriptors() + count;
    descriptors_left(wanted) >= wanted
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
