//! Sync calls of programs: the ledger is synced up to an entry, or everything is synced (Assise §3.2.1).
//!
//! Guarantees: an answer comes when all that it says is synced. One sync is good for every call whose entries were there
//! when it began. A session whose medium takes milliseconds goes on with its other calls meanwhile: its question is parked,
//! and answered by a thread that does nothing else. The state's lock is held across no sync.

use crate::error::Error;
use crate::session::Shared;
use crate::short::SHORT;
use crate::state::Core;
use ccnvm::SessionId;
use format::Sequence;
use format::call::{CallKind, DigestRequest, Status, split};
use format::session::SyncRequest;
use ipc::ring::Taken;
use ipc::sync::Ordering;
use pmem::{Class, MediaError};
use std::sync::Arc;

/// The target of a sync call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// The ledger up to an entry.
    Ledger(Sequence),
    /// The ledger and all logs.
    All,
    /// The ledger up to an entry, and then what a session asked of the copies.
    Copies(Sequence),
}

/// A call whose answer waits for the medium, or for copies.
pub(crate) struct ParkedCall {
    pub session: SessionId,
    pub shared: Arc<Shared>,
    pub taken: Taken,
}

/// Calls that wait for the thread that syncs.
#[derive(Default)]
pub(crate) struct Parking {
    calls: Vec<ParkedCall>,
    /// The thread runs, or is about to: no call waits for one that does not.
    is_open: bool,
}

impl Core {
    /// A call that has to wait for the medium is parked, if there is a thread that answers it; else it comes back.
    pub fn park_sync(&self, session: SessionId, shared: &Arc<Shared>, taken: Taken) -> Option<Taken> {
        let syncs = [CallKind::SyncLedger, CallKind::SyncAll, CallKind::Sync].map(|kind| kind as u16);
        if !syncs.contains(&taken.kind) || self.medium.class() == Class::Memory {
            return Some(taken);
        }
        {
            let mut parking = self.parking.lock();
            if !parking.is_open {
                return Some(taken);
            }
            parking.calls.push(ParkedCall { session, shared: shared.clone(), taken });
        }
        // Release: pairs with the Acquire of the thread, which takes the lock anyway.
        self.parked.fetch_add(1, Ordering::Release);
        self.host.wake(&self.parked, ipc::host::WAKE_ALL);
        None
    }

    /// From now on sync calls are parked: the thread that answers them is about to begin.
    pub fn begin_parking(&self) {
        self.parking.lock().is_open = true;
    }

    /// Answers parked calls until the daemon ends: all that are there with one sync of each file.
    pub fn answer_parked(self: &Arc<Self>) {
        loop {
            // Acquire: pairs with the Release of `park_sync` and of `stop_parking`.
            let seen = self.parked.load(Ordering::Acquire);
            let calls = std::mem::take(&mut self.parking.lock().calls);
            if calls.is_empty() {
                if self.ending.load(Ordering::Acquire) != 0 {
                    break;
                }
                self.host.wait(&self.parked, seen, None);
            } else {
                self.answer_all(calls);
            }
        }
        let left = {
            let mut parking = self.parking.lock();
            parking.is_open = false;
            std::mem::take(&mut parking.calls)
        };
        self.answer_all(left);
    }

    /// The daemon ends.
    pub fn stop_parking(&self) {
        // Release: pairs with the Acquire of the thread.
        self.parked.fetch_add(1, Ordering::Release);
        self.host.wake(&self.parked, ipc::host::WAKE_ALL);
    }

    pub fn answer_all(self: &Arc<Self>, calls: Vec<ParkedCall>) {
        let wanted = calls.into_iter().map(|call| {
            let wanted = self.wanted_by(call.session, call.taken.kind, &call.taken.body);
            (call, wanted)
        });
        let wanted: Vec<_> = wanted.collect();
        let synced = self.sync_wanted(wanted.iter().filter_map(|(_, wanted)| wanted.ok()));
        for (ParkedCall { shared, taken, session }, wanted) in wanted {
            let result = wanted.and_then(|wanted| {
                synced?;
                self.copy_out(session, wanted, &taken.body)
            });
            if result == Err(SHORT) {
                self.keep_call(ParkedCall { session, shared, taken });
                continue;
            }
            let result = result.map(|()| Vec::new());
            let (status, body) = self.answer(result, usize::MAX);
            // A session that ended meanwhile gets nothing.
            let _ = shared.ring.respond(taken, status as u16, &body);
        }
    }

    /// [`format::call::CallKind::SyncLedger`] and [`format::call::CallKind::SyncAll`], by the thread that has the call.
    pub fn sync(&self, id: SessionId, kind: CallKind, body: &[u8]) -> Result<Vec<u8>, Status> {
        let wanted = self.wanted_by(id, kind as u16, body)?;
        self.sync_wanted([wanted].into_iter())?;
        self.copy_out(id, wanted, body)?;
        Ok(Vec::new())
    }

    /// Waits until the copies have what is synced here.
    fn copy_out(&self, id: SessionId, wanted: Wanted, body: &[u8]) -> Result<(), Status> {
        if matches!(wanted, Wanted::Ledger(_)) || !self.copies.are_asked() {
            return Ok(());
        }
        if self.copies.is_short() {
            return Err(SHORT);
        }
        match wanted {
            Wanted::All => self.sync_copies_of_all(id)?,
            _ => self.sync_copies(id, body)?,
        }
        // A copy that counts no more was waited for by nobody; that there are too few was said before.
        if self.copies.is_short() { Err(SHORT) } else { Ok(()) }
    }

    fn wanted_by(&self, id: SessionId, kind: u16, body: &[u8]) -> Result<Wanted, Status> {
        let mut state = self.state.lock();
        state.live(id)?;
        if kind == CallKind::SyncAll as u16 {
            return Ok(Wanted::All);
        }
        if kind == CallKind::Sync as u16 {
            let (request, _) = split::<SyncRequest>(body).map_err(|_| Status::Invalid)?;
            if request.entry > state.copy.ledger.last() {
                return Err(Status::Invalid);
            }
            return Ok(Wanted::Copies(request.entry));
        }
        let (request, _) = split::<DigestRequest>(body).map_err(|_| Status::Invalid)?;
        if request.up_to > state.copy.ledger.last() {
            return Err(Status::Invalid);
        }
        Ok(Wanted::Ledger(request.up_to))
    }

    /// Syncs all that is wanted.
    fn sync_wanted(&self, wanted: impl Iterator<Item = Wanted> + Clone) -> Result<(), Status> {
        let everything = wanted.clone().any(|wanted| wanted == Wanted::All);
        let entries = wanted.filter_map(|wanted| match wanted {
            Wanted::Ledger(up_to) | Wanted::Copies(up_to) => Some(up_to),
            Wanted::All => None,
        });
        let (up_to, files) = {
            let state = self.state.lock();
            let logs = state.copy.logs.values().filter(|_| everything);
            let files: Vec<_> = logs.filter_map(|log| log.file.clone()).collect();
            let all = everything.then(|| state.copy.ledger.last());
            (entries.chain(all).max(), files)
        };
        if let Some(up_to) = up_to {
            self.sync_ledger(up_to)?;
        }
        for file in files {
            file.sync().map_err(|error| self.note_sync_failure(error))?;
        }
        Ok(())
    }

    /// A medium that does not sync a log syncs nothing else. A program may cut its own log, which concerns that log alone.
    fn note_sync_failure(&self, error: MediaError) -> Status {
        if error != MediaError::Lost {
            self.state.lock().stop_if_failed(&error.into());
        }
        Status::Media
    }

    /// Syncs the ledger at least up to an entry, and tells every session. One caller at a time does; those that waited
    /// find nothing left to do.
    fn sync_ledger(&self, up_to: Sequence) -> Result<(), Status> {
        let _turn = self.syncing.lock();
        let (region, last) = {
            let state = self.state.lock();
            if state.copy.ledger.synced() >= up_to {
                return Ok(());
            }
            (state.copy.ledger.region().clone(), state.copy.ledger.last())
        };
        let synced = region.sync();
        let mut state = self.state.lock();
        state.guard(synced.map_err(Error::from)).map_err(|_| Status::Media)?;
        state.copy.ledger.note_synced(last);
        for session in state.sessions.values() {
            session.shared.daemon.publish_synced(last);
        }
        Ok(())
    }
}
