//! Serving a session: one thread takes requests from its ring, answers each, and terminates the session when the bytes
//! in the ring are no valid message. Every request is hostile: it is decoded by `format`, checked against the leases
//! that the session holds, and its cost is bounded.

use crate::recalls::Patience;
use crate::session_end::TerminationReason;
use crate::state::Core;
use ccnvm::SessionId;
use format::call::{CallKind, Status};
use ipc::Error as IpcError;
use ipc::sync::Ordering;
use std::sync::Arc;

/// The answer to a call: a status, and the body of the response.
pub type Answer = (Status, Vec<u8>);

/// One call as it came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    /// The client's number of the call.
    pub number: u64,
    /// A [`CallKind`], if it is one.
    pub kind: u16,
    pub body: &'a [u8],
    /// Longest body of the answer, in bytes.
    pub room: usize,
    /// Whether it waits for leases.
    pub patience: Patience,
}

impl Core {
    /// One call.
    pub fn call(&self, id: SessionId, request: Request<'_>) -> Answer {
        let result = match CallKind::from_raw(request.kind) {
            Ok(kind) => self.dispatch(id, kind, request),
            Err(_) => Err(Status::Invalid),
        };
        self.answer(result, request.room)
    }

    /// The answer to a call, as its program gets it.
    pub fn answer(&self, result: Result<Vec<u8>, Status>, room: usize) -> Answer {
        match result {
            _ if !self.goes_on() => (Status::Media, Vec::new()),
            Ok(body) if body.len() <= room => (Status::Ok, body),
            Ok(_) => (Status::Invalid, Vec::new()),
            Err(status) => (self.told(status), Vec::new()),
        }
    }

    /// The status that a program is told: if the daemon stopped because the medium of the pool is full, that is the
    /// reason.
    fn told(&self, status: Status) -> Status {
        if status == Status::Media && self.state.lock().is_full { Status::NoSpace } else { status }
    }

    fn dispatch(&self, id: SessionId, kind: CallKind, request: Request<'_>) -> Result<Vec<u8>, Status> {
        let Request { number, body, room, patience, .. } = request;
        match kind {
            CallKind::Walk => self.walk(id, body, patience),
            CallKind::Lease => self.lease(id, body, patience),
            CallKind::Open => self.open(id, body, patience),
            CallKind::Close => self.close(id, body),
            CallKind::Entries => self.entries(id, body, room),
            CallKind::Extents => self.extents(id, body, room),
            CallKind::Read => self.read(id, body, room),
            CallKind::Readlink => self.readlink(id, body),
            CallKind::GetXattr => self.get_xattr(id, body),
            CallKind::ListXattr => self.list_xattr(id, body),
            CallKind::Digest => self.digest_call(id, body),
            CallKind::Refill => self.refill(id, body),
            CallKind::GrowLog => self.grow_log(id, body),
            CallKind::MapSegment => self.send_segment(id, number, body),
            CallKind::Statfs => self.statfs(id),
            CallKind::SyncLedger | CallKind::SyncAll | CallKind::Sync => self.sync(id, kind, body),
            CallKind::Share => self.share(id, number, body),
            CallKind::Release => self.release_call(id, body),
            CallKind::Pass => self.pass(id, body),
            CallKind::Recalls => self.recalls_call(id, body),
            CallKind::RedeemLock => self.redeem_lock(id, body),
            CallKind::Lock
            | CallKind::Unlock
            | CallKind::TestLock
            | CallKind::ReleaseLocks
            | CallKind::CancelLock => self.lock_call(id, number, kind, body),
        }
    }

    /// For a session that is served through its ring: answers until it ends.
    pub fn serve(self: &Arc<Self>, id: SessionId) {
        let (shared, mut patience) = {
            let state = self.state.lock();
            let Some(session) = state.sessions.get(&id) else { return };
            // Its first call may announce that it must answer recalls, and must not wait for leases that are withheld
            // until it has.
            let waits = !(state.leases.are_withheld() && session.is_trusted());
            (session.shared.clone(), if waits { Patience::Waits } else { Patience::Refuses })
        };
        loop {
            match shared.ring.next(None) {
                Ok(taken) => {
                    self.requests.fetch_add(1, Ordering::Relaxed);
                    if taken.kind == CallKind::Recalls as u16 {
                        patience = Patience::Refuses;
                    }
                    let left = self.park_sync(id, &shared, taken);
                    let left = left.and_then(|taken| self.keep_question(id, &shared, taken));
                    let left = left.and_then(|taken| self.keep_recalls(id, &shared, taken));
                    let left = left.and_then(|taken| self.serve_sync(id, &shared, taken));
                    let waits = left.and_then(|taken| self.serve_one(id, &shared, taken, patience));
                    if let Some(taken) = waits {
                        self.serve_aside(id, &shared, taken);
                    }
                }
                Err(IpcError::Interrupted | IpcError::TimedOut) => {}
                // The listener closed the ring because the process is gone, or the session has ended already.
                Err(IpcError::Disconnected) => return self.terminate(id, TerminationReason::Left),
                Err(_) => return self.terminate(id, TerminationReason::Malformed),
            }
        }
    }
}
