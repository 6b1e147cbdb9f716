//! Leases of sessions that must answer: such a session keeps things under its leases elsewhere (the gateway of a mount, in the
//! kernel), and is asked for a lease that others want, goes on under it, and gives it back by `Release` once there is nothing
//! elsewhere any more. Its words are marked only then.
//!
//! Guarantees: a question is asked once for each version of a lease, in the answer of a `Recalls` call. A session of which
//! nothing is heard for [`Config::recall_patience`](crate::config::Config), neither an answer nor a record in its log, is ended, so that nobody waits for longer.
//! When such a session ends, what it kept may be there still: if [`crate::Daemon::watch_caches`] says so, leases are withheld from all
//! others until it is gone, or until the session after it says that nothing of it is left. So does a daemon that starts.
//! While it is asked, the session's other calls are served: one that has to wait for a lease is put aside, with a thread of
//! its own, so that the session's answers are never behind it.

use crate::leases::Reason;
use crate::serve::Request;
use crate::session::Shared;
use crate::state::{Core, State};
use ccnvm::{Event, SessionId};
use format::call::{CallKind, RECALLS_MAX, RecallsRequest, Status, split};
use format::{InodeNumber, LeaseVersion, Sequence};
use ipc::host::Time;
use ipc::ring::Taken;
use ipc::sync::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// A call that is answered in this process looks this often without being told.
const LOOK: Duration = Duration::from_millis(200);

/// What is done when a call finds that it has to wait for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// It waits.
    Waits,
    /// It ends with `WouldBlock`, and is made again aside.
    Refuses,
}

/// A question that has no answer yet.
struct Asked {
    version: LeaseVersion,
    /// Since when nothing was heard of the session; none before the first look.
    since: Option<Time>,
    /// The last record of its log then.
    heard: Sequence,
}

/// One session that must answer.
#[derive(Default)]
struct Answering {
    /// What it is to be asked for.
    pending: VecDeque<InodeNumber>,
    /// What it was asked for and holds still.
    asked: BTreeMap<InodeNumber, Asked>,
    /// Its calls whose answers are kept back.
    kept: Vec<(Arc<Shared>, Taken)>,
    /// Grows with each call that wants those answers at once.
    hurried: u64,
    /// It has said that nothing is left of what was kept under leases of an earlier session.
    is_clean: bool,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Recalls {
    sessions: BTreeMap<SessionId, Answering>,
    /// There is something to be asked that nobody was told to look for.
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

    /// A lease is on its way back, or is over.
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

    /// Whether another session has said that nothing is left of what was kept under leases of sessions before it.
    pub fn is_followed(&self, id: SessionId) -> bool {
        self.sessions.iter().any(|(other, session)| *other != id && session.is_clean)
    }

    /// The session is gone. Calls that were kept back end with its ring.
    pub fn end(&mut self, id: SessionId) {
        self.sessions.remove(&id);
    }
}

impl Answering {
    fn take_pending(&mut self) -> Vec<InodeNumber> {
        let count = self.pending.len().min(RECALLS_MAX);
        self.pending.drain(..count).collect()
    }
}

impl State {
    /// Notes that a session must answer from now on; `dropped` says that it has nothing that an earlier one kept.
    fn begin_answering(
        &mut self,
        id: SessionId,
        now_ns: u64,
        dropped: bool,
    ) -> Result<&mut Answering, Status> {
        let session = self.live(id)?;
        // Others would wait for it at each of its leases.
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

    /// Withholds leases from all sessions that need not answer, or does so no more. Whoever waits for some is told by the tick
    /// that is due now.
    pub fn withhold(&mut self, now_ns: u64, withheld: bool) {
        if self.leases.are_withheld() != withheld {
            let event = if withheld { Event::Withhold } else { Event::Resume };
            let effects = self.leases.step(now_ns, event);
            assert!(effects.is_empty(), "nothing follows from it before a tick");
            self.wake_at = Some(now_ns);
        }
    }
}

impl Core {
    /// A question after recalls is kept until there is one; any other call comes back.
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
        self.carry_out();
        if dropped {
            self.announce_events();
        }
        kept
    }

    /// Whether something may be kept under leases of a session that has ended.
    pub fn is_kept_elsewhere(&self) -> bool {
        self.caches.get().is_some_and(|watch| watch())
    }

    /// Leases that are withheld are so no more once what was kept under others is gone.
    pub fn look_at_caches(&self) {
        if self.state.lock().leases.are_withheld() && !self.is_kept_elsewhere() {
            self.state.lock().withhold(self.host.now().as_ns(), false);
            self.announce_events();
        }
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
                // What was to be taken from it before is taken now, so that it holds nothing that it is not asked for.
                self.carry_out();
                self.announce_events();
                return Ok(units.as_bytes().to_vec());
            }
            self.host.wait(&self.events, seen, Some(self.host.now().after(LOOK)));
        }
    }

    /// Asks sessions for what others want of them, where a call of theirs waits for it.
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

    /// Ends sessions that were asked and of which nothing is heard.
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
            self.eject(id, Reason::Silent);
        }
    }

    /// Serves a call that has to wait for a lease, beside the others of its session.
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

    /// Answers a call of a session's ring; gives it back if it has to wait for a lease, which its `patience` refuses.
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
        // Too large cannot be: the room was kept. A client that took its slot back gets nothing.
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
