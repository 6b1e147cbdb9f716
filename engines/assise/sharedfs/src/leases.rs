//! Carries out the decisions of `ccnvm` about leases (CC-NVM, Assise §3.3).
//!
//! A revocation marks the words; waits, without the lock and at most for the grace period, until every operation that
//! was inside has left once; digests the holder's log; writes the end into the ledger; and reports. If the holder does
//! not leave in time, its session is terminated: its log is sealed, which is the cut, and its operations are not waited
//! for any more. Any thread that finds a revocation carries it out: no thread is dedicated to leases, so a request
//! never waits for a busy one.

use crate::commits::Entries;
use crate::daemon::fence_others;
use crate::digest::Step;
use crate::error::Error;
use crate::pace::TreeRoom;
use crate::recalls::Patience;
use crate::replay::batch::NO_FRAME;
use crate::replicate::Reached;
use crate::session::{HeldLease, Phase, Shared};
use crate::session_end::TerminationReason;
use crate::state::{Core, Revocation, State};
use ccnvm::{Event, Mode, SessionId, Ticket, Want};
use format::call::{RELEASE_UNITS_MAX, Status};
use format::session::{ENDED_MAX, WORD_OWN_RANGE};
use format::{InodeNumber, LeaseVersion, Sequence};
use ipc::host::{Spin, Time};
use ipc::sync::{Ordering, Word, fence};
use ipc::words::{LeaseState, Scan};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::FromBytes;

/// First pause between two checks for operations inside; each is twice as long as the one before.
const PAUSE_FIRST: Duration = Duration::from_micros(20);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_millis(2);
/// Leases that end in one step: the state's lock is held meanwhile.
const ENDS_AT_ONCE: usize = 64;
/// How long a digest stays away from the locks when another thread sleeps until they are free.
const LET_IN: Duration = Duration::from_micros(50);
/// A waiting thread checks this often without a notification: the daemon may have stopped.
pub(crate) const LOOK: Duration = Duration::from_millis(200);
/// How long beyond the grace period a session waits for leases that it gives back.
const RELEASE_PATIENCE: Duration = Duration::from_secs(1);
/// Polling before the first pause.
const POLL_NS: u32 = 5_000;

/// Leases to be taken from one session at once.
struct SessionRevocations {
    id: SessionId,
    shared: Arc<Shared>,
    revocations: Vec<Revocation>,
    /// One of them is for writing: there may be records under it.
    writes: bool,
    /// More of the own range was taken than the session's table can record.
    overflow: bool,
}

impl Core {
    pub fn now_ns(&self) -> u64 {
        self.host.now().as_ns()
    }

    /// Acquires all of the leases for a session, and waits for them if `patience` says so. True if others had to give some
    /// back.
    ///
    /// # Errors
    /// `Sealed`, `Limit`, `Media`; `WouldBlock`: it has not.
    pub fn acquire(&self, id: SessionId, wants: &[Want], patience: Patience) -> Result<bool, Status> {
        let Some((ticket, is_free)) = self.request(id, wants)? else { return Ok(false) };
        loop {
            self.run_revocations();
            let withheld_until = self.look_at_caches();
            // Acquire: pairs with the Release of `announce_events`; read before the state is looked at.
            let seen = self.events.load(Ordering::Acquire);
            let wake_at = {
                let mut state = self.state_with_room(|state| Entries::plain(state.leases.wants_waiting()));
                if let Some(outcome) = state.outcomes.remove(&ticket) {
                    return outcome.map(|()| !is_free);
                }
                if let Err(status) = state.live(id) {
                    self.withdraw(&mut state, ticket);
                    return Err(status);
                }
                self.tick(&mut state)?;
                state.wake_at
            };
            self.end_silent();
            if !self.has_work() {
                if patience == Patience::Refuses {
                    let mut state =
                        self.state_with_room(|state| Entries::plain(state.leases.wants_waiting()));
                    self.withdraw(&mut state, ticket);
                    return Err(Status::WouldBlock);
                }
                let look = withheld_until.unwrap_or_else(|| self.host.now().after(LOOK));
                self.host.wait(
                    &self.events,
                    seen,
                    Some(wake_at.map_or(look, |at| look.min(Time::from_ns(at)))),
                );
            }
        }
    }

    /// Cancels a request: its thread waits no more.
    fn withdraw(&self, state: &mut State, ticket: Ticket) {
        let effects = state.leases.step(self.now_ns(), Event::Cancelled { ticket });
        let absorbed = state.absorb(effects);
        // A failure stops the daemon, which the next call reports.
        let _ = state.guard(absorbed);
        state.outcomes.remove(&ticket);
        self.announce_events();
    }

    /// Always requests the complete set, including leases that the session holds already. Otherwise two sessions that
    /// each hold what the other one needs would take it from each other forever. `None` if the session holds
    /// everything; else the ticket, and whether it is answered already.
    fn request(&self, id: SessionId, wants: &[Want]) -> Result<Option<(Ticket, bool)>, Status> {
        let mut guard =
            self.state_with_room(|state| Entries::plain(state.leases.wants_waiting() + wants.len()));
        let state = &mut *guard;
        state.live(id)?;
        if wants.iter().all(|want| state.holds(id, *want)) {
            return Ok(None);
        }
        // A unit that the session made and that no other session requested is not in the table. If one requests it now,
        // the next try finds it there.
        let in_table = |want: &Want| state.is_in_table(id, want.unit) || !state.holds(id, *want);
        let wants: Vec<Want> = wants.iter().copied().filter(in_table).collect();
        if !state.may_have_leases(&self.config, id, &wants) {
            return Err(Status::Limit);
        }
        let now = self.now_ns();
        for want in &wants {
            state.introduce(now, want.unit);
        }
        let ticket = Ticket(state.next_ticket);
        state.next_ticket += 1;
        let effects = state.leases.step(now, Event::Request { ticket, session: id, wants });
        let absorbed = state.absorb(effects);
        state.guard(absorbed).map_err(|_| Status::Media)?;
        Ok(Some((ticket, state.outcomes.contains_key(&ticket))))
    }

    /// Tells the table of leases that a time at which it wanted to be called has come.
    fn tick(&self, state: &mut State) -> Result<(), Status> {
        let now = self.now_ns();
        if state.wake_at.is_some_and(|at| at <= now) {
            state.wake_at = None;
            let effects = state.leases.step(now, Event::Tick);
            let absorbed = state.absorb(effects);
            state.guard(absorbed).map_err(|_| Status::Media)?;
            self.announce_events();
        }
        Ok(())
    }

    fn has_work(&self) -> bool {
        let state = self.state.lock();
        let free = |revocation: &Revocation| {
            state.sessions.get(&revocation.session).is_none_or(|session| !session.busy)
        };
        state.revocations.iter().any(free)
    }

    /// Carries out revocations until none is left that no other thread carries out already.
    pub fn run_revocations(&self) {
        self.tell_recalls();
        while let Some(work) = self.next_revocations() {
            self.revoke(work);
        }
    }

    /// Picks a session with all leases that are to be taken from it, and marks their words.
    fn next_revocations(&self) -> Option<SessionRevocations> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let sessions = &state.sessions;
        // A session that ends needs no revocation: its end is one.
        state.revocations.retain(|revocation| {
            sessions.get(&revocation.session).is_some_and(|session| session.phase == Phase::Live)
        });
        let picked = state.revocations.iter().find(|revocation| !sessions[&revocation.session].busy);
        let id = picked?.session;
        let session = state.sessions.get_mut(&id).expect("found above");
        session.busy = true;
        let mut work = SessionRevocations {
            id,
            shared: session.shared.clone(),
            revocations: Vec::new(),
            writes: false,
            overflow: false,
        };
        state.revocations.retain(|revocation| {
            if revocation.session != id {
                return true;
            }
            let held = session.held.get_mut(&revocation.unit);
            let held = held.filter(|held| held.version == revocation.version && !held.leaving);
            if let Some(held) = held {
                held.leaving = true;
                work.writes |= held.mode == Mode::Write;
                mark(&session.shared, held.word, revocation.unit);
                work.revocations.push(*revocation);
            }
            false
        });
        work.overflow = session.shared.daemon.ended_count() > ENDED_MAX as u64;
        Some(work)
    }

    fn revoke(&self, work: SessionRevocations) {
        if work.overflow {
            self.end(work.id, TerminationReason::OwnRange);
            return;
        }
        if !work.revocations.is_empty() && !self.wait_until_left(work.id, &work.shared) {
            self.end(work.id, TerminationReason::Grace);
            return;
        }
        let up_to = match work.writes {
            true => self.committed(&work.shared),
            false => Sequence::default(),
        };
        match self.digest(work.id, up_to) {
            Ok(Step::Cut(reason)) => {
                self.end(work.id, TerminationReason::Cut(reason));
                return;
            }
            Ok(_) => {}
            // The daemon stopped: waiting calls learn that from the state.
            Err(_) => return self.announce_events(),
        }
        for revocations in work.revocations.chunks(ENDS_AT_ONCE) {
            self.report_revoked(work.id, revocations);
        }
        if let Some(session) = self.state.lock().sessions.get_mut(&work.id) {
            session.busy = false;
        }
        self.announce_events();
    }

    /// Tells the table of leases that some are free for others, unless all of the session's leases are about to be.
    fn report_revoked(&self, id: SessionId, revocations: &[Revocation]) {
        let mut guard =
            self.state_with_room(|state| Entries::plain(revocations.len() + state.leases.wants_waiting()));
        let state = &mut *guard;
        for revocation in revocations {
            if !state.sessions.get(&id).is_some_and(|session| session.phase == Phase::Live) {
                return;
            }
            let event = Event::Revoked { session: id, unit: revocation.unit };
            let effects = state.leases.step(self.now_ns(), event);
            let absorbed = state.absorb(effects);
            if state.guard(absorbed).is_err() {
                return;
            }
        }
    }

    /// [`Shared::committed`] of a session that another thread may be sealing.
    fn committed(&self, shared: &Shared) -> Sequence {
        let _state = self.state.lock();
        shared.committed()
    }

    /// Waits until every operation that is inside now has left once; false if the grace period ends before. A process that
    /// cannot leave because other processes have the processors gets more time than one that stands still.
    pub fn wait_until_left(&self, id: SessionId, shared: &Shared) -> bool {
        // Commits of operations inside are visible from here on. Without this fence each commit executes one by itself.
        let _ = self.fences && fence_others(&*self.host);
        let inside = shared.client.inside();
        let mut scan: Scan = inside.scan();
        let begin = self.host.now();
        let (end, last) = (begin.after(self.config.grace), begin.after(self.config.grace_starved));
        if Spin::new(POLL_NS).poll(self.host.as_ref(), || scan.done(&inside)) {
            return true;
        }
        let (never, mut pause) = (Word::new(0), PAUSE_FIRST);
        loop {
            let now = self.host.now();
            if now >= end && (now >= last || !self.is_runnable(id)) {
                return scan.done(&inside);
            }
            let until = if now < end { end } else { last };
            self.host.wait(&never, 0, Some(now.after(pause).min(until)));
            if scan.done(&inside) {
                return true;
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Whether a thread of the session's process runs or waits for a processor.
    fn is_runnable(&self, id: SessionId) -> bool {
        let peer = self.state.lock().sessions.get(&id).and_then(|session| session.peer.clone());
        peer.is_some_and(|peer| peer.is_runnable())
    }

    /// Digests a session's log up to a record, for a call that waits for it: a batch of the log ends with this record, whichever
    /// thread makes the batch.
    ///
    /// # Errors
    /// As [`Self::digest_to`].
    pub fn digest(&self, id: SessionId, up_to: Sequence) -> Result<Step, Error> {
        self.state.lock().await_digest(id, up_to);
        let step = self.digest_to(id, up_to);
        self.state.lock().await_digest_no_more(id, up_to);
        step
    }

    /// Digests a session's log up to a record, batch by batch, the locks free between them.
    ///
    /// # Errors
    /// Failures of medium or tree, after which the daemon has stopped.
    pub fn digest_to(&self, id: SessionId, up_to: Sequence) -> Result<Step, Error> {
        let asked = up_to;
        loop {
            // A log that is digested already does not wait for the batch of another one.
            if self.state.lock().is_digested(id, up_to)? {
                return Ok(Step::Done);
            }
            let reachable = match self.reach(id, up_to, Sequence::default(), None)? {
                Reached::All => up_to,
                Reached::Until(last) => last,
            };
            if self.state.lock().is_digested(id, reachable)? {
                // The copies have everything that is there.
                return Ok(if reachable < up_to { Step::Cut(NO_FRAME) } else { Step::Done });
            }
            self.wait_for_batch_room()?;
            self.pace.wait(|| TreeRoom::free(&self.state.lock().copy.free.usage));
            let up_to = reachable;
            let Some(mut area) = self.area_for_batch(id, up_to)? else { continue };
            let step = self.digest_step(&mut area, id, up_to);
            let wanted = self.is_batch_awaited();
            self.end_batch(area);
            let step = step?;
            match step {
                // The copies may lack records behind.
                Step::Done if up_to < asked => {}
                Step::More => {}
                step => return Ok(step),
            }
            // The lock is not fair: a call that slept until it was free would find it taken again.
            if wanted {
                self.host.wait(&Word::new(0), 0, Some(self.host.now().after(LET_IN)));
            }
        }
    }

    /// Gives a lease back for its holder, which requested that. Does nothing if the lease is being given back already.
    pub fn release(&self, id: SessionId, unit: InodeNumber) -> Result<(), Status> {
        self.begin_release(id, &[unit])?;
        self.run_revocations();
        Ok(())
    }

    /// [`format::call::CallKind::Release`]. Returns when all of them are free for others, and their words for the session.
    pub fn release_call(&self, id: SessionId, body: &[u8]) -> Result<Vec<u8>, Status> {
        let units = <[InodeNumber]>::ref_from_bytes(body).map_err(|_| Status::Invalid)?;
        if units.is_empty() || units.len() > RELEASE_UNITS_MAX {
            return Err(Status::Invalid);
        }
        let mut left = self.begin_release(id, units)?;
        let until = self.host.now().after(self.config.grace_starved + RELEASE_PATIENCE);
        loop {
            self.run_revocations();
            // Acquire: pairs with the Release of `announce_events`; read before the state is looked at.
            let seen = self.events.load(Ordering::Acquire);
            {
                let mut state = self.state.lock();
                let session = state.live(id)?;
                left.retain(|(unit, version)| {
                    session.held.get(unit).is_some_and(|held| held.version == *version)
                });
            }
            // Another thread carries out the rest, also without this call.
            if left.is_empty() || self.host.now() >= until {
                return Ok(Vec::new());
            }
            if !self.has_work() {
                self.host.wait(&self.events, seen, Some(until));
            }
        }
    }

    /// Marks leases as leaving at their holder's request; returns them with their versions.
    fn begin_release(
        &self,
        id: SessionId,
        units: &[InodeNumber],
    ) -> Result<Vec<(InodeNumber, LeaseVersion)>, Status> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.live(id)?;
        let mut leaving = Vec::with_capacity(units.len());
        for unit in units {
            let held = state.sessions.get(&id).and_then(|session| session.held.get(unit));
            // A lease in the own range needs no word: it is given up only if another session requested it.
            let stays = |held: &HeldLease| held.word == WORD_OWN_RANGE && !state.recalls.is_asked(id, *unit);
            let Some(held) = held.filter(|held| !held.leaving && !stays(held)) else { continue };
            let version = held.version;
            // A session that requests it from here on, this one included, waits until it has ended.
            let effects = state.leases.step(self.now_ns(), Event::Leaving { session: id, unit: *unit });
            assert!(effects.is_empty(), "a lease that leaves gives nothing to anybody yet");
            state.recalls.answered(id, *unit, version);
            state.revocations.push_back(Revocation { session: id, unit: *unit, version });
            leaving.push((*unit, version));
        }
        Ok(leaving)
    }
}

/// Tells a session that a lease is over, in the words that its operations read. A scan follows.
fn mark(shared: &Shared, word: u32, unit: InodeNumber) {
    if word == WORD_OWN_RANGE {
        shared.daemon.push_ended(unit);
        shared.daemon.own_range().grant(LeaseState::Write);
        // Full fence: the new generation comes before the loads of the scan. Pairs with the full fence
        // behind `Inside::enter`, as the one in `LeaseWord::revoke`.
        fence(Ordering::SeqCst);
    } else {
        shared.daemon.leases()[word as usize].revoke();
    }
}
