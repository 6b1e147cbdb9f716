//! A daemon that gives the lead away: it lets nobody in any more, ends its sessions, and brings its copies to its own end.
//!
//! Guarantee: after [`Daemon::stop_level`] every copy has what this pool has, byte for byte of the ledger. So each of them may
//! lead with this pool as its copy, and nothing is sent twice.

use crate::daemon::Daemon;
use crate::error::Error;
use ipc::host::Time;
use ipc::sync::Ordering;

impl Daemon {
    /// Lets nobody in from now on, unless there is a session; false if there is one.
    pub fn close_if_unused(&self) -> bool {
        let mut state = self.core().state.lock();
        state.closing |= state.sessions.is_empty();
        state.closing
    }

    /// Ends every session, digested, and all threads, as [`Self::stop`] does; then gives every copy the ledger to its end, which
    /// may take until then.
    ///
    /// # Errors
    /// `Copy`, `Stopped`: the daemon has ended, and a copy may lack what the last sessions left.
    pub fn stop_level(&self, until: Time) -> Result<(), Error> {
        self.stop();
        let core = self.core();
        let last = {
            let ledger = &mut core.state.lock().copy.ledger;
            ledger.sync()?;
            ledger.last()
        };
        core.reach_ledger(last, Some(until))
    }

    /// Whether no thread of the daemon does anything any more, or soon none does.
    pub fn has_ended(&self) -> bool {
        // Acquire: pairs with the Release in `Daemon::stop`.
        self.core().ending.load(Ordering::Acquire) != 0
    }
}
