//! Leases of sessions that must answer recalls: such a session caches data elsewhere under its leases (the gateway of a
//! mount, in the kernel). When another session wants one of its leases, it is asked for the lease, goes on under it,
//! and gives it back by `Release` once the cached data is gone. Its words are marked only then.
//!
//! Guarantees: a session is asked once for each version of a lease, in the answer of a `Recalls` call. A session that
//! stays silent for [`Config::recall_patience`](crate::config::Config), with neither an answer nor a record in its log,
//! is terminated, which bounds the wait of the others. After the end of such a session its cached data may still be
//! there: if [`crate::Daemon::watch_caches`] says so, leases are withheld from all other sessions until it is gone, or
//! until the next session of the kind reports that nothing is left of it. A daemon that starts does the same. The locks of
//! the ended session are kept as long, because programs that hold them still read the cached data. While a session is asked, its other calls are served: a call that has to wait for a lease gets a thread of its own, so that
//! it never delays the session's answers.

use crate::serve::Request;
use crate::session::Shared;
use crate::session_end::TerminationReason;
use crate::state::{Core, State};
use ccnvm::{Event, SessionId};
use format::call::{CallKind, RECALLS_MAX, RecallsRequest, Status, split};
use format::register::{RegisterEntry, RegisterKind};
use format::{InodeNumber, LeaseVersion, Sequence};
use ipc::host::Time;
use ipc::ring::Taken;
use ipc::sync::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// A call that is answered in this process checks this often without a notification.
const LOOK: Duration = Duration::from_millis(200);
/// Interval of the checks whether data that was cached elsewhere is gone.
const LOOK_WITHHELD: Duration = Duration::from_millis(5);

/// Reaction of a call that has to wait for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// It waits.
    Waits,
    /// The call ends with `WouldBlock`, and is repeated on a thread of its own.
    Refuses,
}

/// A lease that a session was asked for and has not given back.
struct Asked {
    version: LeaseVersion,
    /// Since when the session is silent; none before the first check.
    since: Option<Time>,
    /// The last record of its log at that time.
    heard: Sequence,
}

/// One session that must answer.
#[derive(Default)]
struct Answering {
    /// Leases that it is still to be asked for.
    pending: VecDeque<InodeNumber>,
    /// Leases that it was asked for and still holds.
    asked: BTreeMap<InodeNumber, Asked>,
    /// Its `Recalls` calls whose answers are kept back.
    kept: Vec<(Arc<Shared>, Taken)>,
    /// Grows with each call that requires those answers at once.
    hurried: u64,
    /// It has reported that nothing is left of the data that an earlier session cached.
    is_clean: bool,
}

/// All sessions that must answer.
#[derive(Default)]
pub(crate) struct Recalls {
    sessions: BTreeMap<SessionId, Answering>,
    /// Sessions that have ended, and whose cached data may still be there.
    ended: BTreeSet<SessionId>,
    /// There are new leases to ask for, and no thread was notified of them.
    is_fresh: bool,
}

impl Recalls {
    /// The table of leases wants a lease back.
    pub fn ask(&mut self, id: SessionId, unit: InodeNumber, version: LeaseVersion) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.asked.insert(unit, Asked { version, since: None, heard: Sequence::default() });
        session.pending.push_back(unit);
        self.is_fresh = true;
    }

    /// Whether a session was asked for a lease.
    pub fn is_asked(&self, id: SessionId, unit: InodeNumber) -> bool {
        self.sessions.get(&id).is_some_and(|session| session.asked.contains_key(&unit))
    }

    /// A lease is being given back, or has ended.
    pub fn answered(&mut self, id: SessionId, unit: InodeNumber, version: LeaseVersion) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.asked.get(&unit).is_some_and(|asked| asked.version <= version) {
            session.asked.remove(&unit);
        }
    }

    /// Whether a session must answer.
    pub fn must_answer(&self, id: SessionId) -> bool {
        self.sessions.contains_key(&id)
    }

    /// Whether another session has reported that nothing is left of the data that earlier sessions cached.
    pub fn is_followed(&self, id: SessionId) -> bool {
        self.sessions.iter().any(|(other, session)| *other != id && session.is_clean)
    }

    /// The session has ended. Calls that were kept back end with its ring. `leaves` says that the data which it cached may
    /// still be there.
    pub fn end(&mut self, id: SessionId, leaves: bool) {
        self.sessions.remove(&id);
        if leaves {
            self.ended.insert(id);
        }
    }

    /// Whether the locks of an ended session are kept until its cached data is gone.
    pub fn keep_locks_of(&self, id: SessionId) -> bool {
        self.ended.contains(&id)
    }
}

impl Answering {
    fn take_pending(&mut self) -> Vec<InodeNumber> {
        let count = self.pending.len().min(RECALLS_MAX);
        self.pending.drain(..count).collect()
    }
}

impl State {
    /// Notes that a session must answer from now on; `dropped` says that nothing is left of the data that an earlier
    /// one cached.
    fn begin_answering(
        &mut self,
        id: SessionId,
        now_ns: u64,
        dropped: bool,
    ) -> Result<&mut Answering, Status> {
        let session = self.live(id)?;
        // Only a trusted session may: others wait for it at each of its leases.
        if !session.is_trusted() {
            return Err(Status::Access);
        }
        if !self.recalls.must_answer(id) {
            let effects = self.leases.step(now_ns, Event::MustAnswer { session: id });
            assert!(effects.is_empty(), "nothing follows from it yet");
            if self.leases.are_withheld() {
                self.wake_at = Some(now_ns);
            }
        }
        if dropped {
            self.withhold(now_ns, false);
        }
        let session = self.recalls.sessions.entry(id).or_default();
        session.is_clean |= dropped;
        Ok(session)
    }

    /// Withholds leases from all sessions that need not answer, or stops doing so, and ends the locks of the sessions whose
    /// cached data is gone. Waiting calls are notified by the
    /// tick that is due now.
    pub fn withhold(&mut self, now_ns: u64, withheld: bool) {
        if self.leases.are_withheld() != withheld {
            let event = if withheld { Event::Withhold } else { Event::Resume };
            let effects = self.leases.step(now_ns, event);
            assert!(effects.is_empty(), "nothing follows from it before a tick");
            self.wake_at = Some(now_ns);
        }
        if !withheld {
            for id in std::mem::take(&mut self.recalls.ended) {
                // The locks of a detached session wait for its process.
                if self.detached.find(id).is_none() {
                    self.end_locks(id);
                }
            }
        }
    }

    /// The locks of a session that has ended, and will not be continued, end.
    pub fn end_locks(&mut self, id: SessionId) {
        if !self.recalls.keep_locks_of(id) {
            self.locks.end(id);
            self.register.note(RegisterEntry::new(RegisterKind::End, id.0));
        }
    }
}

impl Core {
    /// Keeps a `Recalls` call until there is a recall; gives any other call back.
    pub fn keep_recalls(&self, id: SessionId, shared: &Arc<Shared>, taken: Taken) -> Option<Taken> {
        let request = split::<RecallsRequest>(&taken.body);
        match request {
            Ok((request, _)) if taken.kind == CallKind::Recalls as u16 && request.wait.get() == 1 => {}
            _ => return Some(taken),
        }
        let dropped = request.is_ok_and(|(request, _)| request.dropped.get() == 1);
        let kept = {
            let mut state = self.state.lock();
            match state.begin_answering(id, self.host.now().as_ns(), dropped) {
                Ok(session) => {
                    session.kept.push((shared.clone(), taken));
                    None
                }
                // It is refused like any other call.
                Err(_) => Some(taken),
            }
        };
        self.run_revocations();
        if dropped {
            self.announce_events();
        }
        kept
    }

    /// Whether data may be cached elsewhere under leases of a session that has ended.
    pub fn is_kept_elsewhere(&self) -> bool {
        self.caches.get().is_some_and(|watch| watch())
    }

    /// Stops withholding leases once the data that was cached under others is gone. If it is not, returns when to check
    /// again: that it is gone is not notified.
    pub fn look_at_caches(&self) -> Option<Time> {
        if !self.state.lock().leases.are_withheld() {
            return None;
        }
        if self.is_kept_elsewhere() {
            return Some(self.host.now().after(LOOK_WITHHELD));
        }
        self.state.lock().withhold(self.host.now().as_ns(), false);
        self.announce_events();
        None
    }

    /// [`CallKind::Recalls`].
    pub fn recalls_call(&self, id: SessionId, body: &[u8]) -> Result<Vec<u8>, Status> {
        let (request, _) = split::<RecallsRequest>(body).map_err(|_| Status::Invalid)?;
        let mut hurried = None;
        loop {
            // Acquire: pairs with the Release of `announce_events`; read before the state is looked at.
            let seen = self.events.load(Ordering::Acquire);
            let (units, kept) = {
                let mut state = self.state.lock();
                let dropped = request.dropped.get() == 1;
                let session = state.begin_answering(id, self.host.now().as_ns(), dropped)?;
                if request.wait.get() == 0 {
                    session.hurried += 1;
                    (Some(Vec::new()), std::mem::take(&mut session.kept))
                } else {
                    let is_hurried = *hurried.get_or_insert(session.hurried) != session.hurried;
                    let units = session.take_pending();
                    ((is_hurried || !units.is_empty()).then_some(units), Vec::new())
                }
            };
            for (shared, taken) in kept {
                // A session that ended meanwhile gets nothing.
                let _ = shared.ring.respond(taken, Status::Ok as u16, &[]);
            }
            if let Some(units) = units {
                // Revocations that were due before are carried out now, so that the session holds no lease that it will
                // not be asked for.
                self.run_revocations();
                self.announce_events();
                return Ok(units.as_bytes().to_vec());
            }
            self.host.wait(&self.events, seen, Some(self.host.now().after(LOOK)));
        }
    }

    /// Asks sessions for the leases that others want, by answering a call of theirs that waits for it.
    pub fn tell_recalls(&self) {
        let told = {
            let mut state = self.state.lock();
            if !std::mem::take(&mut state.recalls.is_fresh) && !state.recalls.has_to_tell() {
                return;
            }
            state.recalls.take_told()
        };
        for (shared, taken, units) in told {
            // A session that ended meanwhile gets nothing.
            let _ = shared.ring.respond(taken, Status::Ok as u16, units.as_bytes());
        }
        self.announce_events();
    }

    /// Terminates sessions that were asked and stay silent.
    pub fn end_silent(&self) {
        let silent: Vec<SessionId> = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            let (now, sessions) = (self.host.now(), &state.sessions);
            let patience = self.config.recall_patience;
            let is_silent = |id: &SessionId, answering: &mut Answering| {
                let last = sessions.get(id).map_or(Sequence::default(), |session| session.shared.committed());
                let mut oldest = now;
                for asked in answering.asked.values_mut() {
                    if asked.heard != last || asked.since.is_none() {
                        (asked.heard, asked.since) = (last, Some(now));
                    }
                    oldest = oldest.min(asked.since.unwrap_or(now));
                }
                now.since(oldest) >= patience
            };
            let all = state.recalls.sessions.iter_mut();
            all.filter_map(|(id, answering)| is_silent(id, answering).then_some(*id)).collect()
        };
        for id in silent {
            self.terminate(id, TerminationReason::Silent);
        }
    }

    /// Serves a call that has to wait for a lease, on a thread of its own.
    pub fn serve_aside(self: &Arc<Self>, id: SessionId, shared: &Arc<Shared>, taken: Taken) {
        let (core, theirs) = (self.clone(), shared.clone());
        let taken = Arc::new(ipc::Lock::new(self.host.clone(), Some(taken)));
        let aside = taken.clone();
        let body = move || {
            let call = aside.lock().take();
            if let Some(call) = call {
                core.serve_one(id, &theirs, call, Patience::Waits);
            }
        };
        if self.spawn("aside", body).is_err() {
            let call = taken.lock().take();
            if let Some(call) = call {
                self.serve_one(id, shared, call, Patience::Waits);
            }
        }
    }

    /// Answers a call from a session's ring; gives it back if it has to wait for a lease and `patience` refuses that.
    pub fn serve_one(
        &self,
        id: SessionId,
        shared: &Arc<Shared>,
        taken: Taken,
        patience: Patience,
    ) -> Option<Taken> {
        let room = shared.ring.body_room(&taken);
        let request = Request { number: taken.id, kind: taken.kind, body: &taken.body, room, patience };
        let (status, body) = self.call(id, request);
        let takes_leases = [CallKind::Walk, CallKind::Lease, CallKind::Open].map(|kind| kind as u16);
        if status == Status::WouldBlock && patience == Patience::Refuses && takes_leases.contains(&taken.kind)
        {
            return Some(taken);
        }
        // The body cannot be too large: its space was reserved. A client that took its slot back gets no answer.
        let _ = shared.ring.respond(taken, status as u16, &body);
        None
    }
}

impl Recalls {
    fn has_to_tell(&self) -> bool {
        self.sessions.values().any(|session| !session.pending.is_empty() && !session.kept.is_empty())
    }

    fn take_told(&mut self) -> Vec<(Arc<Shared>, Taken, Vec<InodeNumber>)> {
        let mut told = Vec::new();
        for session in self.sessions.values_mut() {
            while !session.pending.is_empty() {
                let Some((shared, taken)) = session.kept.pop() else { break };
                told.push((shared, taken, session.take_pending()));
            }
        }
        told
    }
}
