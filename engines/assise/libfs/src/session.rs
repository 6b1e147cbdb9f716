//! The attachment of a LibFS to SharedFS: the shared memory and files of a session, and the interface for calls and
//! descriptors.
//!
//! A [`Connector`] attaches: over a socket in a program, inside the process in the simulator and in tests. Both give
//! the same: the pages described by [`format::session`], the log, and a [`Link`]. After a session has ended (its log
//! was sealed, or the daemon died and was restarted), LibFS attaches again through the same connector.

use crate::error::Error;
use crate::state::{Session, State};
use crate::words::open_places;
use format::call::{CallKind, Status};
use format::session::Welcome;
use format::{SegmentId, Sequence};
use ipc::{Descriptor, Mapping};
use pmem::{ReadMapping, Region};
use std::sync::Arc;
use vfs::Caller;

/// Attaches to the SharedFS of this node.
pub trait Connector: Send + Sync {
    /// Begins a session with a new log; it continues session `former` if that is not 0.
    ///
    /// # Errors
    /// `Disconnected`: no daemon serves now. `TimedOut`: the daemon does not answer. `Refused`.
    fn attach(&self, former: u64) -> Result<Attachment, Error>;
}

/// The resources of a session.
pub struct Attachment {
    /// The session's parameters from SharedFS.
    pub welcome: Welcome,
    /// The user whose records the log contains, as the kernel reported it.
    pub credential: Caller,
    /// The log file; its ring begins after the superblock.
    pub log: Region,
    /// Session words, mapped for writing.
    pub session: Arc<Mapping>,
    /// Lease words.
    pub leases: Arc<Mapping>,
    /// Generations of the node's files, and the alive word.
    pub generations: Arc<Mapping>,
    /// The connection for calls.
    pub link: Arc<dyn Link>,
}

/// A connection to SharedFS. Calls wait; LibFS holds no lock meanwhile.
pub trait Link: Send + Sync {
    /// Sends a request, whose body is the concatenation of these pieces, and waits for its response, which replaces
    /// `response`.
    ///
    /// # Errors
    /// `Disconnected`, `TimedOut` (the daemon is dead or does not answer within the time limit), `Interrupted`.
    fn call(&self, kind: CallKind, request: &[&[u8]], response: &mut Vec<u8>) -> Result<Status, Error>;

    /// False once the other end has closed, or if this process does not have the connection: a child between vfork and exec
    /// had made it.
    fn is_up(&self) -> bool {
        true
    }

    /// Maps the data segment of the last `MapSegment` call for reading.
    ///
    /// # Errors
    /// `Disconnected`, `Refused`, `Media`.
    fn segment(&self, segment: SegmentId) -> Result<ReadMapping, Error>;

    /// Maps the session's lock table, which arrives with its first lock lease.
    ///
    /// # Errors
    /// `Disconnected`, `Media`; `Refused` if there is none: then all locks are decided by calls.
    fn lock_table(&self, session: u64) -> Result<Region, Error> {
        let _ = session;
        Err(Error::Refused)
    }

    /// The liveness socket from a `Share` call.
    ///
    /// # Errors
    /// `Disconnected`; `Refused` if there are no processes with which files can be shared.
    fn lifeline(&self, number: u64) -> Result<Descriptor, Error> {
        let _ = number;
        Err(Error::Refused)
    }
}

impl State {
    /// Ends the session. Inodes to which this process refers stay, by number; their cached state is dropped.
    pub fn end_session(&mut self) {
        if let Some(session) = self.session.take() {
            self.former = session.welcome.session.get();
            self.last = Some((session.words, session.link));
            self.note_changed();
        }
        self.outside.end_session();
        self.era += 1;
        for index in self.nodes.indices() {
            let node = self.nodes.get_mut(index);
            node.lose(&mut self.pool);
            node.dirty = false;
            node.last = Sequence::new(0);
            node.open_place = None;
            node.held_outside = false;
        }
        self.dirty.clear();
        self.reset_releases();
        self.open_places = open_places();
        self.locks.end_session();
        self.half_full = false;
    }

    /// Ends the session; the next one continues the detached session with this number.
    pub fn leave_for(&mut self, number: u64) {
        self.end_session();
        self.former = number;
    }

    /// Begins a session. All open files are in its open table before its first call, by which SharedFS knows that there
    /// are no more. Files without a reference are entered first.
    pub fn begin_session(&mut self, session: Session) {
        let goes_on = session.welcome.goes_on.get() == 1;
        if goes_on {
            self.note_recovered(session.welcome.recovered);
        } else {
            self.releases.clear();
        }
        self.last = None;
        self.leases.reset();
        self.session = Some(session);
        let mut referenced = Vec::new();
        for index in self.nodes.indices() {
            let node = self.nodes.get_mut(index);
            node.referenced &= goes_on;
            node.referenced_to_write &= goes_on;
            if node.opens > 0 && node.referenced {
                referenced.push(index);
            } else if node.opens > 0 {
                self.enter_open_table(index);
            }
        }
        for index in referenced {
            self.enter_open_table(index);
        }
        self.list_releases();
    }
}
