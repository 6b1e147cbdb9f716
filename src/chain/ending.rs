//! The end of a process that must not go on: it is killed, so that from then on it does nothing at all, and its keeper starts it
//! again. The kernel ends its threads at once, except for one that waits for a disk without an end; that one runs no instruction
//! of the program any more when the disk answers.

use super::member::Member;
use ipc::sync::Ordering;
use ipc::{Host, SystemHost, WAKE_ALL, Word};
use rustix::process::{Signal, getpid, kill_process};
use std::time::Duration;
use tracing::error;

/// So long the last line of the log may take: shorter than the time by which a node that leads ends before another one may lead.
pub(super) const LAST_LINE: Duration = Duration::from_millis(5);

/// The thread that ends the process if the thread that decided so does not get to it.
pub(super) struct Ending(Word);

impl Default for Ending {
    fn default() -> Self {
        Self(Word::new(0))
    }
}

impl Member {
    /// Ends this process, with the reason in the log. If the log cannot be written, because its disk does not answer, the end
    /// waits no longer for it than [`LAST_LINE`].
    pub(super) fn end_at_once(&self, why: &str) -> ! {
        // Release: pairs with the Acquire of the thread.
        self.ending.0.store(1, Ordering::Release);
        SystemHost.wake(&self.ending.0, WAKE_ALL);
        error!("{why}: ending at once");
        kill_this_process()
    }

    /// The thread that ends the process when it is told so.
    pub fn end_when_told(&self) {
        // Acquire: pairs with the Release above.
        while self.ending.0.load(Ordering::Acquire) == 0 {
            SystemHost.wait(&self.ending.0, 0, None);
        }
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LAST_LINE)));
        kill_this_process()
    }
}

fn kill_this_process() -> ! {
    loop {
        let _ = kill_process(getpid(), Signal::KILL);
    }
}
