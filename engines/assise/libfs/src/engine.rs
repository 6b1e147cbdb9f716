//! The engine: attempts under the lock, what they lack got without it.
//!
//! Lock order: the state's lock is held for an attempt, never across a call, nor a wait but for a seal that is under way,
//! and no other is taken under it. The lock of attachments is held across one, by threads that could do nothing else
//! than wait for it.

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

/// Bounds; a test makes them tiny.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Files open at once.
    pub files: usize,
    /// How often an operation is tried before it is given up with an error; each time it lost a race, or learned
    /// something.
    pub attempts: usize,
    /// Blocks of room asked for at once by a session that has had few; one that takes more and more asks for up to eight
    /// times as many.
    pub refill_blocks: u64,
    /// Inode numbers asked for at once.
    pub refill_inodes: u64,
    /// The log does not grow beyond this, whatever SharedFS would allow.
    pub log_bytes_max: u64,
    /// How long a thread waits for another that is about something with SharedFS.
    pub wait: Duration,
    /// Nodes that are kept in the cache when nobody uses them.
    pub nodes: usize,
    /// Entries of directories that are kept in the cache, beside those of the directory in use.
    pub entries: usize,
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
            nodes: 1 << 15,
            entries: 1 << 18,
        }
    }
}

/// How long a process that comes while nobody serves waits: a keeper has started the next daemon by then.
pub const FIRST_WAIT: Duration = Duration::from_secs(2);
/// First pause before a daemon that died is looked for again; each is twice as long as the one before.
const ATTACH_PAUSE: Duration = Duration::from_millis(1);
/// Longest such pause.
const ATTACH_PAUSE_MAX: Duration = Duration::from_millis(50);

/// The client half of Assise, for one process and one credential. An engine of `vfs`.
pub struct LibFs {
    pub(crate) host: Arc<dyn Host>,
    connector: Arc<dyn Connector>,
    pub(crate) limits: Limits,
    state: Lock<State>,
    /// Changes when a thread has ended what others wait for.
    pub(crate) turn: Word,
    /// One thread at a time attaches.
    attaching: Lock<()>,
    /// What is known here of locks.
    pub(crate) asked: Lock<Asked>,
    /// Calls to SharedFS, by kind.
    pub(crate) calls: [LongWord; KINDS],
}

impl LibFs {
    /// Attaches. A daemon that dies over the greeting, or does not answer it, is waited for, a moment: its keeper starts
    /// another.
    ///
    /// # Errors
    /// As the connector's.
    pub fn new(host: Arc<dyn Host>, connector: Arc<dyn Connector>, limits: Limits) -> Result<Self, Error> {
        let until = host.now().after(FIRST_WAIT);
        let attachment = loop {
            match connector.attach(0) {
                Err(Error::Disconnected | Error::TimedOut) if host.now() < until => {
                    host.wait(&Word::new(0), 0, Some(host.now().after(ATTACH_PAUSE)));
                }
                attached => break attached?,
            }
        };
        let session = Session::new(host.as_ref(), attachment)?;
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

    /// The last record of the session's log that counts, and of its log's order the last that is digested; none
    /// without a session.
    pub fn progress(&self) -> Option<(Sequence, Sequence)> {
        let state = self.state();
        state.session.as_ref().map(|session| (session.words.committed(), session.words.digested().0))
    }

    /// Begins a new session if there is none. A daemon that died is waited for until it was started again.
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
        let session = Session::new(self.host.as_ref(), attachment)?;
        self.state().begin_session(session);
        drop(attaching);
        Ok(())
    }

    fn expects_daemon(&self) -> bool {
        self.state().expects_daemon()
    }

    /// Whether a record counts that is in doubt because the daemon died: the one after it knows.
    #[cold]
    fn resolve(&self, doubt: &Doubt) -> vfs::engine::Result<bool> {
        loop {
            if let Some(counted) = self.state().counted(doubt) {
                return Ok(counted);
            }
            if self.state().session.is_some() {
                // A session that goes on from nothing: nobody knows any more.
                return Err(vfs::Error::Io);
            }
            self.attach()?;
        }
    }

    /// Attempts an operation until it is done. What an attempt lacks is got in between.
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
                    // What led to the error may not have been true at one instant.
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

    /// Forgets inodes that nobody uses. Only between operations: an attempt would learn them again and again.
    #[cold]
    fn trim(&self) {
        let given_back = self.state().trim(self.limits.nodes);
        self.close_calls(&given_back);
    }
}
