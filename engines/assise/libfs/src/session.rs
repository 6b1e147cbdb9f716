//! The attachment of a LibFS to SharedFS: the shared memory and files of a session, and the interface for calls and
//! descriptors.
//!
//! A [`Connector`] attaches: over a socket in a program, inside the process in the simulator and in tests. Both give
//! the same: the pages described by [`format::session`], the log, and a [`Link`]. After a session has ended (its log
//! was sealed, or the daemon died and was restarted), LibFS attaches again through the same connector.

use crate::error::Error;
use format::SegmentId;
use format::call::{CallKind, Status};
use format::session::Welcome;
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
