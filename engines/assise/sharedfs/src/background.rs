//! The background thread: digests logs which asked for it or are idle, removes inodes without a name, makes logs ready, and holds
//! space.

use crate::pool_space::HoldStep;
use crate::session_end::TerminationReason;
use crate::state::Core;
use ccnvm::SessionId;
use format::Sequence;
use ipc::sync::Ordering;
use std::sync::Arc;

impl Core {
    /// The background thread.
    pub fn background(self: &Arc<Self>) {
        let mut next_look = self.host.now().after(self.config.idle_digest);
        let mut is_idle = false;
        loop {
            // Acquire: pairs with the Release of `announce_work` and of `stop`.
            let seen = self.work.load(Ordering::Acquire);
            if self.ending.load(Ordering::Acquire) != 0 {
                return;
            }
            // However busy other processes are, an idle one does not keep the files that it has closed.
            if self.host.now() >= next_look {
                next_look = self.host.now().after(self.config.idle_digest);
                self.end_released();
            }
            self.tidy_wanted(false);
            self.form_large_pages();
            self.make_ready_logs();
            let held = self.hold_step(is_idle);
            is_idle = false;
            if !self.goes_on() || self.state.lock().is_stopped() {
                self.tell_failure();
            }
            if held == HoldStep::More {
                continue;
            }
            let until = self.host.now().after(self.config.idle_digest);
            if self.host.wait(&self.work, seen, Some(until)) == ipc::Waited::TimedOut {
                self.tidy_wanted(true);
                is_idle = true;
            }
        }
    }

    /// Digests logs that asked for it, or all logs that have records; removes inodes without a name.
    pub fn tidy_wanted(&self, all: bool) {
        let wanted: Vec<(SessionId, Sequence)> = {
            let mut state = self.state.lock();
            state.drop_detached_of_dead(self);
            let tended = state.tend_register();
            if state.guard(tended).is_err() {
                return;
            }
            let state = &mut *state;
            let copy = &state.copy;
            let wants = state.sessions.iter_mut().filter_map(|(id, session)| {
                let committed = session.shared.committed();
                let watermark = self.copies.watermark(session.log, session.right);
                // Records that the copies lack are digested when the copies have them: this thread does not wait for
                // copies.
                let up_to = watermark.map_or(committed, |watermark| watermark.min(committed));
                let behind = up_to > copy.digested(session.log).sequence;
                let wants = session.wants_digest || all;
                session.wants_digest &= up_to < committed;
                (wants && behind).then_some((*id, up_to))
            });
            wants.collect::<Vec<_>>()
        };
        for (id, up_to) in wanted {
            if let Ok(crate::digest::Step::Cut(reason)) = self.digest_and_go_on(id, up_to) {
                self.terminate(id, TerminationReason::Cut(reason));
            }
        }
        if all {
            self.end_released();
        }
        while matches!(self.reap_step(), Ok(true)) {}
    }
}
