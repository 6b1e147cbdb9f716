//! Sync calls while there are fewer copies than required: they are kept, and answered when there are enough again.
//!
//! Guarantees: while [`Core::set_short`] is in force no sync call is answered with success, whatever copies there are;
//! the later calls of a session whose call is kept are served meanwhile. The caller sets it before it stops counting a
//! copy.

use crate::session::Shared;
use crate::state::Core;
use crate::sync::ParkedCall;
use ccnvm::SessionId;
use format::call::{CallKind, Status};
use ipc::ring::Taken;
use std::sync::Arc;

/// The status of a sync call that has to be kept; it never reaches a program.
pub(crate) const SHORT: Status = Status::WouldBlock;

impl Core {
    /// Sets whether there are fewer copies than required.
    pub fn set_short(self: &Arc<Self>, short: bool) {
        if !self.copies.set_short(short) {
            return;
        }
        {
            let state = self.state.lock();
            let asks = self.copies.are_asked();
            for session in state.sessions.values() {
                session.shared.daemon.publish_replication(asks, Default::default());
            }
        }
        if !short {
            self.answer_kept();
        }
    }

    /// Serves a sync call if a least number of copies is required; gives other calls back.
    pub fn serve_sync(self: &Arc<Self>, id: SessionId, shared: &Arc<Shared>, taken: Taken) -> Option<Taken> {
        let kind = match CallKind::from_raw(taken.kind) {
            Ok(kind @ (CallKind::Sync | CallKind::SyncAll)) => kind,
            _ => return Some(taken),
        };
        let result = self.sync(id, kind, &taken.body);
        if result == Err(SHORT) {
            self.keep_call(ParkedCall { session: id, shared: shared.clone(), taken });
            return None;
        }
        let (status, body) = self.answer(result, usize::MAX);
        // A client that took its slot back gets no answer.
        let _ = shared.ring.respond(taken, status as u16, &body);
        None
    }

    /// Keeps a call until there are enough copies.
    pub fn keep_call(self: &Arc<Self>, call: ParkedCall) {
        self.kept_calls.lock().push(call);
        // There may be enough since it was tried.
        if !self.copies.is_short() {
            self.answer_kept();
        }
    }

    /// Answers the kept calls on a thread of its own, because it waits for the copies.
    fn answer_kept(self: &Arc<Self>) {
        let calls = std::mem::take(&mut *self.kept_calls.lock());
        if calls.is_empty() {
            return;
        }
        let core = self.clone();
        // A daemon that cannot start a thread cannot serve its sessions either, and each session learns that.
        let _ = self.spawn("kept-syncs", move || core.answer_all(calls));
    }
}
