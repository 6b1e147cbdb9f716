//! A daemon that gives up the lead: it accepts no new session, ends its sessions, and brings its copies to the end of
//! its ledger.
//!
//! Guarantee: after [`Daemon::stop_level`] every copy has what this pool has, and the ledger is equal byte for byte. So
//! each of them may lead with this pool as its copy, and no data is sent twice.

use crate::daemon::Daemon;
use crate::error::Error;
use ipc::host::Time;
use ipc::sync::Ordering;

impl Daemon {
    /// Accepts no new session from now on, unless there is a session; false if there is one.
    pub fn close_if_unused(&self) -> bool {
        let mut state = self.core().state.lock();
        state.closing |= state.sessions.is_empty();
        state.closing
    }

    /// Digests and ends every session and ends all threads, as [`Self::stop`] does; then sends every copy the ledger to
    /// its end, for which it waits until the given time.
    ///
    /// # Errors
    /// `Copy`, `Stopped`: the daemon has ended, and a copy may lack records of the last sessions.
    pub fn stop_level(&self, until: Time) -> Result<(), Error> {
        self.stop();
        let core = self.core();
        let last = {
            let mut state = core.state.lock();
            let synced = state.copy.ledger.sync();
            state.guard(synced)?;
            state.copy.ledger.last()
        };
        core.reach_ledger(last, Some(until))
    }

    /// Whether no thread of the daemon works any more, or soon none will.
    pub fn has_ended(&self) -> bool {
        // Acquire: pairs with the Release in `Daemon::stop`.
        self.core().ending.load(Ordering::Acquire) != 0
    }
}
