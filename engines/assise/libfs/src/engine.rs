//! The engine: attempts run under the state's lock. The calls for leases, entries or space that an attempt lacks are
//! made without it.
//!
//! Lock order: the state's lock is held for an attempt, but never during a call, and during no wait except the short
//! one for a seal in progress; no other lock is taken under it. The lock of attachments is held during an attachment,
//! by threads that have to wait for it in any case.

use crate::calls::KINDS;
use crate::doubt::Doubt;
use crate::error::Error;
use crate::locks::Asked;
use crate::need::{Need, Step, Stop};
use crate::session::Connector;
use crate::state::{Session, State};
use format::Sequence;
use ipc::{Guard, Host, Lock, LongWord, Word};
use std::sync::Arc;
use std::time::Duration;

/// Limits; tests use tiny ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Open files.
    pub files: usize,
    /// Attempts of one operation before it fails; each attempt lost a race or added to the cache.
    pub attempts: usize,
    /// Blocks that a session requests at first for its reservation. A session that uses many requests up to eight times
    /// as many.
    pub refill_blocks: u64,
    /// Inode numbers in one request.
    pub refill_inodes: u64,
    /// Maximum size of the log, even if SharedFS would allow more.
    pub log_bytes_max: u64,
    /// How long a thread waits for another thread's communication with SharedFS.
    pub wait: Duration,
    /// How long a new process waits for its first session.
    pub first_wait: Duration,
    /// Nodes that are kept in the cache while unused.
    pub nodes: usize,
    /// Entries of directories that are kept in the cache, in addition to those of the directory in use.
    pub entries: usize,
    /// Steps of a purge with one call of a writer, at least two: a node, or a name of a directory. All of a digest at once
    /// would take milliseconds.
    pub purge_steps: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            files: 1 << 16,
            attempts: 4096,
            refill_blocks: 4096,
            refill_inodes: 4096,
            log_bytes_max: 64 << 20,
            wait: Duration::from_secs(90),
            first_wait: FIRST_WAIT,
            nodes: 1 << 15,
            entries: 1 << 18,
            purge_steps: 256,
        }
    }
}

/// How long a new process without inherited files waits if no daemon serves: by then a keeper has started the next one.
pub const FIRST_WAIT: Duration = Duration::from_secs(2);
/// First pause before a dead daemon is contacted again; each pause is twice as long as the one before.
const ATTACH_PAUSE: Duration = Duration::from_millis(1);
/// Longest such pause.
const ATTACH_PAUSE_MAX: Duration = Duration::from_millis(50);

/// The client half of Assise, for one process and one credential. Implements `vfs::Engine`.
pub struct LibFs {
    pub(crate) host: Arc<dyn Host>,
    connector: Arc<dyn Connector>,
    pub(crate) limits: Limits,
    state: Lock<State>,
    /// Changes when a thread has finished something that other threads wait for.
    pub(crate) turn: Word,
    /// Serializes attachments.
    attaching: Lock<()>,
    /// Pending requests for locks.
    pub(crate) asked: Lock<Asked>,
    /// Number of calls to SharedFS, by kind.
    pub(crate) calls: [LongWord; KINDS],
}

impl LibFs {
    /// Attaches. If the daemon dies during the greeting, or does not answer it, waits for a moment, in which the keeper
    /// starts another one.
    ///
    /// # Errors
    /// Those of the connector.
    pub fn new(host: Arc<dyn Host>, connector: Arc<dyn Connector>, limits: Limits) -> Result<Self, Error> {
        let until = host.now().after(limits.first_wait);
        let attachment = loop {
            match connector.attach(0) {
                Err(Error::Disconnected | Error::TimedOut) if host.now() < until => {
                    host.wait(&Word::new(0), 0, Some(host.now().after(ATTACH_PAUSE)));
                }
                attached => break attached?,
            }
        };
        let session = Session::new(host.as_ref(), &limits, attachment)?;
        let mut state = State::new(host.clone(), limits.files);
        state.begin_session(session);
        Ok(Self {
            state: Lock::new(host.clone(), state),
            attaching: Lock::new(host.clone(), ()),
            asked: Lock::new(host.clone(), Asked::default()),
            calls: [const { LongWord::new(0) }; KINDS],
            turn: Word::new(0),
            host,
            connector,
            limits,
        })
    }

    pub(crate) fn state(&self) -> Guard<'_, State> {
        self.state.lock()
    }

    /// The last committed record of the session's log, and the last digested one; none without a session.
    pub fn progress(&self) -> Option<(Sequence, Sequence)> {
        let state = self.state();
        state.session.as_ref().map(|session| (session.words.committed(), session.words.digested().0))
    }

    /// Begins a new session if there is none. Waits for the restart of a daemon that died.
    pub(crate) fn attach(&self) -> vfs::engine::Result<()> {
        let attaching = self.attaching.lock();
        let former = {
            let state = self.state();
            if state.session.is_some() {
                return Ok(());
            }
            state.former
        };
        let until = self.host.now().after(self.limits.wait);
        let mut pause = ATTACH_PAUSE;
        let attachment = loop {
            match self.connector.attach(former) {
                Err(Error::Disconnected | Error::TimedOut)
                    if self.expects_daemon() && self.host.now() < until =>
                {
                    self.host.wait(&Word::new(0), 0, Some(self.host.now().after(pause)));
                    pause = (pause * 2).min(ATTACH_PAUSE_MAX);
                }
                attached => break attached?,
            }
        };
        let session = Session::new(self.host.as_ref(), &self.limits, attachment)?;
        self.state().begin_session(session);
        drop(attaching);
        Ok(())
    }

    fn expects_daemon(&self) -> bool {
        self.state().expects_daemon()
    }

    /// Whether a record that is in doubt because the daemon died is valid: attaches to the next daemon, which knows.
    #[cold]
    fn resolve(&self, doubt: &Doubt) -> vfs::engine::Result<bool> {
        loop {
            if let Some(counted) = self.state().counted(doubt) {
                return Ok(counted);
            }
            if self.state().session.is_some() {
                // The new session does not continue the old one, so the fate of the record is unknown.
                return Err(vfs::Error::Io);
            }
            self.attach()?;
        }
    }

    /// Repeats attempts until the operation is done. Between attempts, requests what they lacked.
    #[inline]
    pub(crate) fn run<T>(&self, mut attempt: impl FnMut(&mut State) -> Step<T>) -> vfs::engine::Result<T> {
        for _ in 0..self.limits.attempts {
            let mut state = self.state();
            state.begin();
            let attempted = attempt(&mut state);
            if let Some(doubt) = state.doubt() {
                drop(state);
                let counted = self.resolve(&doubt);
                match (counted, attempted) {
                    (Ok(true), Ok(done)) => return Ok(done),
                    _ => self.state().undo(doubt.taken),
                }
                counted?;
                continue;
            }
            match attempted {
                Ok(done) => {
                    let (half_full, many) =
                        (state.half_full, state.nodes.count() > state.trim_above.max(self.limits.nodes));
                    if state.entries.exceeds(self.limits.entries) {
                        state.forget_entries(self.limits.entries);
                    }
                    drop(state);
                    if half_full {
                        self.relieve();
                    }
                    if many {
                        self.trim();
                    }
                    return Ok(done);
                }
                Err(Stop::Failed(error)) => match state.validate() {
                    Ok(()) => return Err(error),
                    // The state that led to the error may not have existed at one instant.
                    Err(_) => continue,
                },
                Err(Stop::Need(need)) => {
                    drop(state);
                    self.get_for(need)?;
                }
            }
        }
        Err(vfs::Error::Io)
    }

    #[cold]
    fn get_for(&self, need: Need) -> vfs::engine::Result<()> {
        self.get(need)
    }

    /// Forgets unused inodes. Called only between operations, because an attempt would load them again and again.
    #[cold]
    fn trim(&self) {
        let given_back = self.state().trim(self.limits.nodes);
        self.close_calls(&given_back);
    }
}
