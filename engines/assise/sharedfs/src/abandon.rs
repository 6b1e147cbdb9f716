//! A daemon that is stopped by its caller. If its medium does not answer, a thread that waits for the medium may hold any lock, so
//! [`Daemon::abandon`] waits for none.

use crate::daemon::Daemon;
use crate::error::Error;
use ipc::sync::Word;
use std::time::Duration;

/// How long the state may be locked before the daemon is abandoned without it. No thread holds the lock for so long, unless
/// it waits for the medium.
const STATE_PATIENCE: Duration = Duration::from_millis(50);
/// How often the lock is tried.
const LOOK: Duration = Duration::from_millis(1);

impl Daemon {
    /// Stops the daemon for a reason that the caller found. Every session ends, since a program could otherwise commit
    /// records to a log that no daemon will read. From here on every call and every new session is refused.
    pub fn give_up(&self, why: &Error) {
        self.core().state.lock().stop(why);
        self.core().generations.end();
        self.core().tell_failure();
    }

    /// Whether the state can be read within this time: false if a thread holds its lock all the time, as one does that waits
    /// for a medium which does not answer.
    pub fn is_responsive(&self, patience: Duration) -> bool {
        self.try_state(patience, |_| ()).is_some()
    }

    /// Stops the daemon for a reason that the caller found, although its threads may hold locks and wait for the medium without
    /// an end. When this returns, no program takes the daemon for one that lives: every session has ended, and each call and
    /// each new session is refused. Work that a thread of the daemon still does changes nothing for a program. The threads
    /// end with the process.
    pub fn abandon(&self, why: &Error) {
        // First: programs look at this word before and after each operation.
        self.core().generations.end();
        // A second reason does not replace the first.
        let _ = self.core().abandoned.set(why.to_string());
        // Without it calls that wait go on to wait; none of them succeeds for a program.
        self.try_state(STATE_PATIENCE, |state| state.stop(why));
        self.core().tell_failure();
    }

    fn try_state<T>(
        &self,
        patience: Duration,
        look: impl FnOnce(&mut crate::state::State) -> T,
    ) -> Option<T> {
        let host = self.host();
        let until = host.now().after(patience);
        loop {
            if let Some(mut state) = self.core().state.try_lock() {
                return Some(look(&mut state));
            }
            if host.now() >= until {
                return None;
            }
            host.wait(&Word::new(0), 0, Some(host.now().after(LOOK)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Format, format_pool};
    use format::PoolUid;
    use format::session::ALIVE_OFFSET;
    use ipc::{AliveView, Life, SystemHost};
    use pmem::Recorder;
    use std::sync::Arc;
    use vfs::Caller;

    fn daemon() -> Daemon {
        let recorder = Recorder::new();
        let new = Format {
            pool: PoolUid::new(70),
            tree_nodes_max: 2048,
            root_mode: 0o755,
            root_uid: 0,
            root_gid: 0,
            time_ns: 1,
            ledger_bytes: 1 << 20,
        };
        format_pool(&recorder.medium(), &new).unwrap();
        Daemon::open(Arc::new(SystemHost), &recorder.medium(), Config::default()).unwrap().0
    }

    #[test]
    fn a_daemon_is_abandoned_while_a_thread_holds_its_state() {
        let daemon = daemon();
        let attached = daemon.attach(Caller::ROOT, 1).unwrap();
        let alive = AliveView::new(&attached.generations, ALIVE_OFFSET).unwrap();
        let patience = Duration::from_millis(1);
        assert!(daemon.is_responsive(patience) && alive.is_alive());
        let held = daemon.core().state.lock();
        assert!(!daemon.is_responsive(patience));
        daemon.abandon(&Error::NoAnswer(3));
        assert_eq!(alive.life(), Life::Ended, "its programs take it for one that lives");
        assert_eq!(daemon.failure().as_deref(), Some("the disk of its pool has not answered for 3 s"));
        assert!(!daemon.core().goes_on(), "a call is answered");
        drop(held);
        assert!(daemon.attach(Caller::ROOT, 1).is_err(), "a session begins");
    }

    #[test]
    fn a_daemon_whose_state_is_free_stops_at_once() {
        let daemon = daemon();
        daemon.abandon(&Error::NoAnswer(3));
        daemon.abandon(&Error::NoAnswer(9));
        assert!(daemon.core().state.lock().is_stopped());
        assert_eq!(daemon.failure().as_deref(), Some("the disk of its pool has not answered for 3 s"));
    }
}
