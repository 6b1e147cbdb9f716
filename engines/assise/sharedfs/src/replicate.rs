//! The head's side of replication: calls wait for copies, and meanwhile send to them (Assise §3.2.1; the rules are
//! numbered in `docs/replication.md`).
//!
//! Guarantees: an fsync is answered when every copy has synced the log to where the program wrote it and the ledger to the
//! newest entry that gave the log a right. Nothing is digested before all copies have that much. Space of a log is used
//! again when all trees contain what stood there; so is space of the ledger. No lock is held while a copy is waited for.

use crate::copies::{Copy, CopyState, Has, Listened, LogToSend, ledger_to_send};
use crate::error::Error;
use crate::level::{
    LEVEL_PATIENCE, LOOK, TURN_BYTES, begin_copy, first_other_entry, greet, lives_of, log_to_send, wait,
};
use crate::replay::batch::NO_FRAME;
use crate::session_end::TerminationReason;
use crate::state::{Core, State};
use ccnvm::SessionId;
use format::call::{Status, split};
use format::session::SyncRequest;
use format::{NodeId, Sequence};
use ipc::Digested;
use ipc::host::Time;
use ipc::sync::Ordering;
use mirror::logs::{BEGINNING, RING_START};
use std::sync::Arc;
use std::time::Duration;
use transport::Connection;

/// How long a daemon that stops waits for a copy that says nothing.
pub(crate) const STOP_PATIENCE: Duration = Duration::from_secs(1);
/// Pause between two rounds of the background stream. It is doubled after each round that found nothing to send, up to
/// [`IDLE_ROUND`]: records that no fsync follows are in memory that all programs share, so nothing announces them.
const ROUND: Duration = Duration::from_millis(5);
const IDLE_ROUND: Duration = Duration::from_millis(20);
/// Bytes of a log that the background stream sends in a round.
const BACKGROUND_BYTES: usize = 1 << 20;

/// How far copies have a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reached {
    /// As far as was asked.
    All,
    /// As far as it goes: no whole record stands behind this one.
    Until(Sequence),
}

/// For which copies a call waits.
#[derive(Clone, Copy)]
struct Waiting {
    /// This one alone, as long as it is connected; else all of them.
    alone: Option<NodeId>,
    until: Option<Time>,
}

impl Waiting {
    fn for_all(until: Option<Time>) -> Self {
        Self { alone: None, until }
    }
}

/// The positions that copies must reach.
struct Wanted {
    item: Option<LogToSend>,
    ledger: crate::copies::LedgerToSend,
    /// The newest entry that is wanted.
    entry: Sequence,
}

impl Core {
    /// Counts a member as a copy and brings it to what is here. The tree of a member that did not count, and that lacks what
    /// is here no more or is of another history, is made equal to this one first.
    ///
    /// # Errors
    /// `Copy`, `CopyIsAhead`, `NeedsImport`: it does not count, unless it did before.
    pub fn add_copy(self: &Arc<Self>, connection: Connection) -> Result<(), Error> {
        let counts = self.copies.of(connection.node()).is_some();
        let added = self.bring_in(connection);
        // Such a copy can take this node's place. Else only what depends on the damaged part fails.
        if counts { self.stop_if_failed(added) } else { added }
    }

    fn bring_in(self: &Arc<Self>, connection: Connection) -> Result<(), Error> {
        let (node, link) = (connection.node(), connection.clone());
        let ledger_bytes = self.state.lock().copy.ledger.region().bytes();
        let greeted = greet(&self.host, connection, self.copies.version(), ledger_bytes)?;
        let known = self.copies.of(node);
        let (lives, since) = {
            let area = self.area_for_other();
            let state = self.state.lock();
            let lives = lives_of(&area, &state.copy)?;
            let since = first_other_entry(&lives, state.copy.ledger.last(), &greeted.1);
            (lives.into_iter().map(|(life, item)| (life, item.key)).collect(), since)
        };
        let begun = {
            // No batch is under way that was judged by what copies had before.
            let area = self.area_for_other();
            let mut guard = self.state.lock();
            let state = &mut *guard;
            let begun = begin_copy(&self.host, &mut state.copy, &lives, greeted).map(|copy| match &known {
                Some(known) => {
                    known.reconnect(&copy);
                    state.copy.ledger.hold(self.copies.contained());
                    known.clone()
                }
                None => {
                    self.count(state, copy.clone());
                    copy
                }
            });
            drop((guard, area));
            begun
        };
        let copy = match begun {
            // A copy that counts may have records that were acknowledged: it is never replaced.
            Err(Error::NeedsImport(_) | Error::CopyIsAhead(_)) if known.is_none() => {
                self.import(&link, since)?
            }
            begun => begun?,
        };
        if known.is_none() {
            self.send_digested(&copy).inspect_err(|_| self.remove_copy(node))?;
        }
        let ready: Vec<_> =
            self.state.lock().ready.iter().map(|ready| (ready.log, ready.file.clone())).collect();
        ready.iter().for_each(|(log, file)| copy.prepare_log(*log, file));
        let levelled = self.bring_up(node);
        if let (Err(_), None) = (&levelled, &known) {
            self.remove_copy(node);
        }
        levelled?;
        copy.set_level();
        // Acquire: pairs with the Release of `Daemon::start`.
        if known.is_none() && self.started.load(Ordering::Acquire) != 0 {
            let feeder = self.clone();
            self.spawn("copy", move || feeder.feed(node))?;
        }
        Ok(())
    }

    /// A copy that counts since just now gets all records that are digested here. Only then it gets the entries that name
    /// them, as a copy gets each that is written from now on.
    fn send_digested(&self, copy: &crate::copies::Copy) -> Result<(), Error> {
        let until = self.host.now().after(LEVEL_PATIENCE);
        for (log, up_to) in copy.lacking() {
            loop {
                let seen = copy.look();
                match copy.has(log, up_to, Sequence::new(0)) {
                    Has::All => break,
                    // The program was told before the copy counted that it may overwrite these records, and has done it: the
                    // next attempt finds them gone, and sends the tree.
                    Has::Until(_) => {
                        let overwritten = mirror::Error::Broken("a log whose records are overwritten");
                        return Err(Error::Copy(copy.node, overwritten));
                    }
                    Has::Less => {}
                }
                let item = {
                    let mut state = self.state.lock();
                    if state.is_stopped() {
                        return Err(Error::Stopped);
                    }
                    log_to_send(&mut state.copy, log, up_to)?
                };
                // It is over, and its file is gone: the next attempt finds that out before anything is sent.
                let Some(item) = item else {
                    return Err(Error::Copy(copy.node, transport::Error::TimedOut.into()));
                };
                copy.push_digested(&item, TURN_BYTES)?;
                wait(&self.host, copy, seen, until)?;
            }
        }
        copy.set_lacks_nothing();
        Ok(())
    }

    /// Waits until one copy has all that is committed now. Calls wait for it meanwhile: it is not waited for here beyond the end
    /// of its connection, so that it may be connected again, or forgotten.
    fn bring_up(&self, node: NodeId) -> Result<(), Error> {
        let until = Some(self.host.now().after(LEVEL_PATIENCE));
        self.reach_all_by(Waiting { alone: Some(node), until })?;
        match self.copies.of(node) {
            Some(_) => Ok(()),
            None => Err(Error::Copy(node, transport::Error::TimedOut.into())),
        }
    }

    /// Waits until the copies have all that is committed now. Gives the sessions whose logs have fewer records than their programs have
    /// committed: the copies cannot get the others.
    fn reach_all_by(&self, waiting: Waiting) -> Result<Vec<SessionId>, Error> {
        let mut short = Vec::new();
        let sessions: Vec<(SessionId, Sequence)> = {
            let state = self.state.lock();
            state.sessions.iter().map(|(id, session)| (*id, session.shared.committed())).collect()
        };
        for (id, up_to) in sessions {
            if let Reached::Until(_) = self.reach_log(id, up_to, Sequence::new(0), waiting)? {
                short.push(id);
            }
        }
        let last = self.state.lock().copy.ledger.last();
        self.reach_entry(last, waiting)?;
        Ok(short)
    }

    /// A member counts as a copy no more.
    pub fn remove_copy(&self, node: NodeId) {
        if !self.copies.remove(node) {
            return;
        }
        self.note_executed();
        let state = self.state.lock();
        let asked = self.copies.are_asked();
        for session in state.sessions.values().filter(|_| !asked) {
            session.shared.daemon.publish_replication(false, Default::default());
        }
        drop(state);
        self.announce_events();
        self.announce_work();
    }

    /// How the copies are.
    pub fn copy_states(&self) -> Vec<CopyState> {
        self.copies.all().iter().map(|copy| copy.state()).collect()
    }

    /// Waits until all copies have a session's log up to a record, and the ledger up to `entry` and to the newest entry that
    /// gave the log a right.
    ///
    /// # Errors
    /// `Stopped`; `Copy`: not until then.
    pub fn reach(
        &self,
        id: SessionId,
        up_to: Sequence,
        entry: Sequence,
        until: Option<Time>,
    ) -> Result<Reached, Error> {
        self.reach_log(id, up_to, entry, Waiting::for_all(until))
    }

    fn reach_log(
        &self,
        id: SessionId,
        up_to: Sequence,
        entry: Sequence,
        waiting: Waiting,
    ) -> Result<Reached, Error> {
        self.reach_by(waiting, |state| {
            let Some(session) = state.sessions.get(&id) else { return Ok(None) };
            let (log, right) = (session.log, session.right);
            let item = log_to_send(&mut state.copy, log, up_to)?;
            let ledger = ledger_to_send(&state.copy.ledger);
            Ok(Some(Wanted { item, ledger, entry: entry.max(right) }))
        })
    }

    /// Waits until all copies have the ledger up to an entry.
    ///
    /// # Errors
    /// As [`Self::reach`].
    pub fn reach_ledger(&self, entry: Sequence, until: Option<Time>) -> Result<(), Error> {
        self.reach_entry(entry, Waiting::for_all(until))
    }

    fn reach_entry(&self, entry: Sequence, waiting: Waiting) -> Result<(), Error> {
        self.reach_by(waiting, |state| {
            let ledger = ledger_to_send(&state.copy.ledger);
            Ok(Some(Wanted { item: None, ledger, entry }))
        })?;
        Ok(())
    }

    fn reach_by(
        &self,
        Waiting { alone, until }: Waiting,
        mut wanted: impl FnMut(&mut State) -> Result<Option<Wanted>, Error>,
    ) -> Result<Reached, Error> {
        let mut closing = None;
        loop {
            let mut copies = self.copies.all();
            copies.retain(|copy| alone.is_none_or(|node| node == copy.node));
            if copies.is_empty() {
                return Ok(Reached::All);
            }
            let looks: Vec<u32> = copies.iter().map(|copy| copy.look()).collect();
            let wanted = {
                let mut state = self.state.lock();
                if state.is_stopped() {
                    return Err(Error::Stopped);
                }
                if state.closing {
                    closing.get_or_insert_with(|| self.host.now().after(STOP_PATIENCE));
                }
                let asked = wanted(&mut state);
                match asked.inspect_err(|error| state.stop_if_failed(error))? {
                    Some(wanted) => wanted,
                    None => return Ok(Reached::All),
                }
            };
            let has = |copy: &crate::copies::Copy| match &wanted.item {
                Some(item) => copy.has(item.log, item.up_to, wanted.entry),
                None if copy.has_ledger(wanted.entry) => Has::All,
                None => Has::Less,
            };
            let lacks = |copy: &crate::copies::Copy| has(copy) == Has::Less && !copy.is_removed();
            let mut lacking = copies.iter().filter(|copy| lacks(copy));
            let pushed =
                lacking.try_for_each(|copy| copy.push(wanted.item.as_ref(), &wanted.ledger, TURN_BYTES));
            self.stop_if_failed(pushed)?;
            let behind = copies.iter().zip(&looks).find(|(copy, _)| lacks(copy));
            let Some((copy, seen)) = behind else {
                let ends = copies.iter().filter_map(|copy| match has(copy) {
                    Has::Until(at) => Some(at),
                    Has::All | Has::Less => None,
                });
                return Ok(ends.min().map_or(Reached::All, Reached::Until));
            };
            if alone.is_some() && !copy.is_connected() {
                return Err(Error::Copy(copy.node, transport::Error::Ended(transport::Ended::Lost).into()));
            }
            let now = self.host.now();
            let last = [until, closing].into_iter().flatten().min();
            if last.is_some_and(|last| now >= last) {
                return Err(match closing {
                    Some(_) => self.stop_waiting(copy.node),
                    None => Error::Copy(copy.node, transport::Error::TimedOut.into()),
                });
            }
            let wake = now.after(LOOK);
            if copy.listen(*seen, last.map_or(wake, |last| last.min(wake))) == Listened::Executed {
                self.note_executed();
            }
        }
    }

    /// The daemon is to end, and waits for a copy no more: the records in the logs are for the next life.
    pub fn stop_waiting(&self, node: NodeId) -> Error {
        let error = Error::Copy(node, transport::Error::TimedOut.into());
        self.state.lock().stop(&error);
        self.tell_failure();
        error
    }

    /// A tree is further, or a copy counts no more: space that it held back may be used again.
    pub fn note_executed(&self) {
        let mut state = self.state.lock();
        state.copy.ledger.hold(self.copies.contained());
        let ids: Vec<SessionId> = state.sessions.keys().copied().collect();
        for id in ids {
            state.publish_reusable(self, id);
        }
        drop(state);
        // Wakes the calls that wait for space.
        self.announce_events();
    }

    /// The last record of a session's log that may be digested: all copies have it, with what gave the log its rights.
    pub fn digestible(&self, state: &State, id: SessionId, up_to: Sequence) -> Sequence {
        let Some(session) = state.sessions.get(&id) else { return up_to };
        let watermark = self.copies.watermark(session.log, session.right);
        watermark.map_or(up_to, |watermark| watermark.min(up_to))
    }

    /// Waits, if copies hold the ledger back, until it has room for the entries of a batch.
    ///
    /// # Errors
    /// As [`Self::reach`].
    pub fn wait_for_batch_room(&self) -> Result<(), Error> {
        loop {
            let furthest = self.furthest_behind(|copy| Some(copy.contained().sequence));
            let held = {
                let state = self.state.lock();
                if state.is_stopped() {
                    return Err(Error::Stopped);
                }
                let ledger = &state.copy.ledger;
                !ledger.has_room_for_batch() && ledger.is_held_back()
            };
            if !held {
                return Ok(());
            }
            self.wait_for_tree(furthest);
        }
    }

    /// The copy whose tree is furthest behind, and what was seen of it.
    fn furthest_behind(&self, place: impl Fn(&Copy) -> Option<Sequence>) -> Option<(Arc<Copy>, u32)> {
        let copies = self.copies.all();
        let placed = copies.into_iter().filter_map(|copy| Some((place(&copy)?, copy)));
        let (_, copy) = placed.min_by_key(|(place, _)| *place)?;
        let seen = copy.look();
        Some((copy, seen))
    }

    /// Waits a while for the tree of the copy that is furthest behind.
    pub fn wait_for_trees(&self) {
        self.wait_for_tree(self.furthest_behind(|copy| Some(copy.contained().sequence)));
    }

    /// Waits a while for the tree of a copy, if it has said nothing since it was looked at.
    fn wait_for_tree(&self, copy: Option<(Arc<Copy>, u32)>) {
        if let Some((copy, seen)) = copy {
            let ledger = ledger_to_send(&self.state.lock().copy.ledger);
            // A failure stops the daemon, which the caller's next look sees.
            if self.stop_if_failed(copy.push(None, &ledger, TURN_BYTES)).is_ok() {
                copy.listen(seen, self.host.now().after(LOOK));
            }
        }
        self.note_executed();
    }

    /// Waits until space of a session's log up to a record may be used again, if a copy holds it back.
    pub fn wait_until_reusable(&self, id: SessionId, up_to: Sequence) {
        loop {
            let log = {
                let state = self.state.lock();
                let Some(session) = state.sessions.get(&id) else { return };
                let open = state.copy.ledger.table().log(session.log);
                open.map(|open| (session.log, open.incarnation))
            };
            let furthest = self.furthest_behind(|copy| {
                let (log, incarnation) = log?;
                Some(copy.executed(log, incarnation)?.sequence)
            });
            let reusable = {
                let state = self.state.lock();
                if state.is_stopped() || state.closing || !state.sessions.contains_key(&id) {
                    return;
                }
                // The answer says that there is space: the program's word says it before that.
                state.publish_reusable(self, id).sequence
            };
            if reusable >= up_to || !self.copies.any() {
                return;
            }
            self.wait_for_tree(furthest);
        }
    }

    /// [`format::call::CallKind::Sync`], whose ledger is synced here. A session ends whose log has fewer records than the program has
    /// committed: the copies cannot get the others.
    pub fn sync_copies(&self, id: SessionId, body: &[u8]) -> Result<(), Status> {
        let Ok((request, _)) = split::<SyncRequest>(body) else { return Ok(()) };
        let up_to = {
            let mut state = self.state.lock();
            request.record.min(state.live(id)?.shared.committed())
        };
        match self.reach(id, up_to, request.entry, None) {
            Ok(Reached::All) => {}
            Ok(Reached::Until(_)) => {
                self.terminate(id, TerminationReason::Cut(NO_FRAME));
                return Err(Status::Sealed);
            }
            Err(_) => return Err(Status::Media),
        }
        let mut state = self.state.lock();
        // If the session ended meanwhile, the next one says which records counted.
        let session = state.live(id)?;
        let asked = self.copies.are_asked();
        session.shared.daemon.publish_replication(asked, (up_to, request.entry.max(session.right)));
        Ok(())
    }

    /// [`format::call::CallKind::SyncAll`], whose logs and ledger are synced here. Sessions end as in [`Self::sync_copies`], those of
    /// other programs, too.
    pub fn sync_copies_of_all(&self, id: SessionId) -> Result<(), Status> {
        let short = self.reach_all_by(Waiting::for_all(None)).map_err(|_| Status::Media)?;
        for short in short {
            self.terminate(short, TerminationReason::Cut(NO_FRAME));
        }
        self.state.lock().live(id).map(|_| ())
    }

    /// One round of the background stream to a copy: something of each log that it lacks, and the ledger. Returns whether it
    /// lacked anything.
    pub fn feed_round(&self, copy: &crate::copies::Copy) -> Result<bool, Error> {
        let mut lacked = false;
        let sessions: Vec<SessionId> = self.state.lock().sessions.keys().copied().collect();
        for id in sessions {
            let item = {
                let mut guard = self.state.lock();
                let state = &mut *guard;
                let Some(session) = state.sessions.get(&id) else { continue };
                let (log, up_to) = (session.log, session.shared.committed());
                let item = log_to_send(&mut state.copy, log, up_to)?;
                item.map(|item| (item, ledger_to_send(&state.copy.ledger)))
            };
            if let Some((item, ledger)) = item
                && copy.has(item.log, item.up_to, Sequence::new(0)) == Has::Less
            {
                copy.push(Some(&item), &ledger, BACKGROUND_BYTES)?;
                lacked = true;
            }
        }
        let (last, ledger) = {
            let state = self.state.lock();
            (state.copy.ledger.last(), ledger_to_send(&state.copy.ledger))
        };
        if !copy.has_ledger(last) {
            copy.push(None, &ledger, 0)?;
            lacked = true;
        }
        Ok(lacked)
    }

    /// Takes what the copies have said; false if that is nothing.
    pub fn hear_copies(&self) -> bool {
        let mut heard = false;
        for copy in self.copies.all() {
            match copy.listen(copy.look(), Time::from_ns(0)) {
                Listened::Executed => {
                    self.note_executed();
                    heard = true;
                }
                Listened::Synced | Listened::Fetched => heard = true,
                Listened::Nothing => {}
            }
        }
        heard
    }

    /// Passes a result on; a failure of the pool stops the daemon. An error that has another cause does not.
    ///
    /// # Errors
    /// That of the result.
    pub fn stop_if_failed<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        result.inspect_err(|error| {
            self.state.lock().stop_if_failed(error);
            self.announce_work();
        })
    }

    /// The thread that feeds one copy in the background, until it counts no more or the daemon has stopped.
    pub fn feed(&self, node: NodeId) {
        let mut pause = ROUND;
        while let Some(copy) = self.copies.of(node) {
            // Acquire: pairs with the Release of `Daemon::stop`.
            if self.ending.load(Ordering::Acquire) != 0 || self.state.lock().is_stopped() {
                return;
            }
            pause = match self.stop_if_failed(self.feed_round(&copy)) {
                Ok(false) => IDLE_ROUND.min(pause * 2),
                // An error that passes, as a lack of descriptors does, costs a round.
                Ok(true) | Err(_) => ROUND,
            };
            if self.state.lock().is_stopped() {
                return;
            }
            let until = self.host.now().after(pause);
            match copy.listen_behind(until) {
                Listened::Executed => self.note_executed(),
                Listened::Synced => self.announce_work(),
                Listened::Nothing | Listened::Fetched => {}
            }
        }
    }
}

impl State {
    /// Up to where a session's log may be written over: all trees contain it.
    fn reusable_of(&self, core: &Core, id: SessionId) -> Digested {
        let own = self.digested_of(id);
        let Some(session) = self.sessions.get(&id).filter(|_| core.copies.any()) else { return own };
        let log = session.log;
        let Some(open) = self.copy.ledger.table().log(log) else { return own };
        let before = self.copy.logs.get(&log).and_then(|log| log.before).unwrap_or(BEGINNING.sequence);
        let before = Digested { sequence: before, position: RING_START };
        core.copies.reusable(log, open.incarnation, before, own)
    }

    /// Tells a session up to where its log may be written over; returns what it was told.
    pub fn publish_reusable(&self, core: &Core, id: SessionId) -> Digested {
        let reusable = self.reusable_of(core, id);
        if let Some(session) = self.sessions.get(&id) {
            session.shared.daemon.publish_digested(reusable);
        }
        reusable
    }
}
