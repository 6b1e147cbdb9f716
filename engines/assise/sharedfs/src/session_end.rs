//! The end of a session: when its process has left, or by force if it does not keep to the protocol (Assise §3.3).
//!
//! Its log and its leases are sealed first, so that no operation counts from then on; then its records are digested, its
//! leases end, and its log is closed and its file removed.

use crate::commits::Entries;
use crate::daemon::fence_others;
use crate::digest::Step;
use crate::error::Error;
use crate::leases::LOOK;
use crate::register::{note_recovered, recovered_entry};
use crate::replay::apply::CutReason;
use crate::session::Phase;
use crate::state::{Core, State};
use ccnvm::{Event, SessionId};
use format::LogUid;
use format::session::WORD_OWN_RANGE;
use ipc::sync::Ordering;

/// Why a session was ended by force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TerminationReason {
    /// Its process is gone, or closed the session.
    Left,
    /// An operation stayed inside for longer than the grace period.
    Grace,
    /// It was asked for a lease and showed no sign of giving it back.
    Silent,
    /// Its log is not valid up to its last committed record.
    Cut(CutReason),
    /// The bytes in its request ring are no message.
    Malformed,
    /// More inodes of its own range were taken away than its table can record.
    OwnRange,
    /// Its process goes on in another session.
    HandedOver,
    /// The daemon stops.
    Stopping,
}

impl Core {
    /// Terminates a session: seals its log, digests the records that count, and ends everything that it held. Returns
    /// when the session is gone, whichever thread did it.
    pub fn terminate(&self, id: SessionId, reason: TerminationReason) {
        self.end(id, reason);
        self.run_revocations();
    }

    pub fn end(&self, id: SessionId, reason: TerminationReason) {
        if self.begin_end(id, reason) {
            self.finish_end(id);
        } else {
            self.wait_gone(id);
        }
    }

    /// Seals the log and every lease. False if another thread did it before.
    fn begin_end(&self, id: SessionId, reason: TerminationReason) -> bool {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(session) = state.sessions.get_mut(&id) else { return false };
        if session.phase == Phase::Ending {
            return false;
        }
        session.phase = Phase::Ending;
        let shared = &session.shared;
        shared.daemon.seal().seal(shared.client.commit(), || {
            // Without these fences each commit executes one by itself.
            let _ = self.fences && fence_others(&*self.host);
        });
        session.shared.daemon.own_range().revoke();
        for held in session.held.values().filter(|held| held.word != WORD_OWN_RANGE) {
            session.shared.daemon.leases()[held.word as usize].revoke();
        }
        for unit in state.lock_leases.end_session(id) {
            state.import_locks(id, unit);
        }
        let session = state.sessions.get_mut(&id).expect("looked up above");
        let uid = session.caller.uid;
        session.returns = match reason {
            TerminationReason::Stopping => false,
            // Its process may have given up the greeting, and may come back for its state. After a child, it does.
            TerminationReason::Left => session.resume_unacknowledged || session.is_by_child,
            _ => true,
        };
        if !matches!(
            reason,
            TerminationReason::Left | TerminationReason::HandedOver | TerminationReason::Stopping
        ) {
            state.note_termination(id, uid, format!("{reason:?}"));
        }
        true
    }

    fn finish_end(&self, id: SessionId) {
        let shared = self.state.lock().sessions.get(&id).map(|session| session.shared.clone());
        let Some(shared) = shared else { return };
        self.remove_lock_table(id);
        // The word's value is an upper bound: the log may hold fewer records, or records that do not count.
        let cut = shared.committed();
        let digested = self.digest_last(id, cut);
        if let Ok(Step::Cut(reason)) = digested {
            self.state.lock().note_last_cut(id, reason);
        }
        let removed = digested.and_then(|_| self.close_session(id));
        shared.ring.close();
        // Release: pairs with the Acquire of threads that check whether the session is gone.
        shared.gone.store(1, Ordering::Release);
        self.host.wake(&shared.gone, ipc::host::WAKE_ALL);
        self.copies.all().iter().for_each(|copy| copy.forget_log(LogUid::new(id.0)));
        if let Ok(Some(name)) = removed {
            // A file that stays is removed by the next start.
            let _ = self.medium.remove(&name);
        }
        self.announce_events();
        self.announce_work();
        // Questions about locks that the session waits for end with it.
        self.bell.ring();
    }

    /// Removes a session from all tables, and its log from the tree; gives the name of the log's file.
    fn close_session(&self, id: SessionId) -> Result<Option<String>, Error> {
        let mut area = self.area_for_other();
        let name = {
            let waiting = |state: &State| Entries::plain(1 + state.leases.wants_waiting());
            let mut guard = self.state_with_room_beside(&mut area, waiting);
            let result = guard.end_session(self, id, self.now_ns());
            guard.guard(result)?
        };
        // The file is removed once the tree does not name the log any more.
        self.contain_changes(&mut area)?;
        Ok(name)
    }

    fn wait_gone(&self, id: SessionId) {
        loop {
            // Acquire: pairs with the Release of `announce_events`.
            let seen = self.events.load(Ordering::Acquire);
            {
                let state = self.state.lock();
                if state.is_stopped() || !state.sessions.contains_key(&id) {
                    return;
                }
            }
            self.host.wait(&self.events, seen, Some(self.host.now().after(LOOK)));
        }
    }
}

impl State {
    /// Notes that the last records of a session do not count, unless the session was ended by force, which is noted already. The process
    /// had committed them: if it was interrupted in a record, that record is behind the commit word.
    fn note_last_cut(&mut self, id: SessionId, reason: CutReason) {
        if self.terminations.iter().any(|told| told.session == id.0) {
            return;
        }
        let uid = self.sessions.get(&id).map_or(0, |session| session.caller.uid);
        self.note_termination(id, uid, format!("{:?}", TerminationReason::Cut(reason)));
    }

    /// Removes a session that is digested to its end from all tables; gives the name of its log's file.
    fn end_session(&mut self, core: &Core, id: SessionId, now: u64) -> Result<Option<String>, Error> {
        let Some(session) = self.sessions.get(&id) else { return Ok(None) };
        let (log, first) = (session.log, session.first_inode);
        let (cut, name) =
            (self.copy.digested(log).sequence, self.copy.file(log)?.map(|file| file.name.clone()));
        // Must happen before the log is gone, because the log tells its process which records count.
        let session = self.sessions.get_mut(&id).expect("looked up above");
        note_recovered(&mut session.recovered, id.0, cut);
        self.register.note(recovered_entry(id, id.0, cut));
        self.copy.ledger.close_log(log, cut)?;
        self.copy.logs.remove(&log);
        let leaves =
            self.recalls.must_answer(id) && !self.recalls.is_followed(id) && core.is_kept_elsewhere();
        if leaves {
            self.withhold(now, true);
        }
        let effects = self.leases.step(now, Event::Ended { session: id });
        self.absorb(effects)?;
        let mut session = self.sessions.remove(&id).expect("looked up above");
        self.ranges.remove(&first);
        self.room.end(id);
        self.recalls.end(id, leaves);
        // A process whose session was terminated may come back for its state.
        let unreferred = if session.returns && session.started.is_some() {
            self.locks.leave(id);
            self.detach_session(core, id, &mut session);
            Vec::new()
        } else {
            self.end_locks(id);
            self.references.end(id)
        };
        if session.open_files_unknown {
            self.reapable.extend(std::mem::take(&mut self.kept));
        }
        for inode in unreferred {
            if self.copy.tree.inode(inode)?.is_some_and(|item| item.links.get() == 0) {
                self.reapable.push_back(inode);
            }
        }
        Ok(name)
    }
}
