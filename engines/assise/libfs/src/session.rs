//! How a LibFS comes to a session: what it is given, and the way its calls and descriptors go.
//!
//! A [`Connector`] attaches; by socket in a program, within the process in the simulator and in tests. Both give the
//! same: the pages described by [`format::session`], the log, and a [`Link`]. After a session has ended (its log was
//! sealed, or the daemon died and was started again), the LibFS attaches anew through the same connector.

use crate::error::Error;
use format::SegmentId;
use format::call::{CallKind, GrowResponse, Status};
use format::session::Welcome;
use ipc::{Descriptor, Mapping};
use pmem::{ReadMapping, Region};
use std::sync::Arc;
use vfs::Caller;

/// Attaches to the SharedFS of this node.
pub trait Connector: Send + Sync {
    /// Begins a session, with a new log; it goes on from session `former` if that is not 0.
    ///
    /// # Errors
    /// `Disconnected`: nobody is there, now. `TimedOut`: who is there does not answer. `Refused`.
    fn attach(&self, former: u64) -> Result<Attachment, Error>;
}

/// What a session shares.
pub struct Attachment {
    /// What SharedFS said.
    pub welcome: Welcome,
    /// Whose records they are, as the kernel vouched for it.
    pub credential: Caller,
    /// The log file; its ring begins behind the superblock.
    pub log: Region,
    /// Session words, mapped for writing.
    pub session: Arc<Mapping>,
    /// Lease words.
    pub leases: Arc<Mapping>,
    /// Generations of the node.
    pub generations: Arc<Mapping>,
    /// For calls.
    pub link: Arc<dyn Link>,
}

/// The way to SharedFS. Calls wait; no lock of the LibFS is held meanwhile.
pub trait Link: Send + Sync {
    /// Sends a request, made of these pieces, and waits for its response, which replaces `response`.
    ///
    /// # Errors
    /// `Disconnected`, `TimedOut` (the daemon is dead or does not answer within the bound), `Interrupted`.
    fn call(&self, kind: CallKind, request: &[&[u8]], response: &mut Vec<u8>) -> Result<Status, Error>;

    /// The data segment that the last `MapSegment` call asked for, mapped for reading.
    ///
    /// # Errors
    /// `Disconnected`, `Refused`, `Media`.
    fn segment(&self, segment: SegmentId) -> Result<ReadMapping, Error>;

    /// The log after a `GrowLog` call, mapped at its new length.
    ///
    /// # Errors
    /// `Disconnected`, `Media`.
    fn grown_log(&self, grown: &GrowResponse) -> Result<Region, Error>;

    /// The session's lock table, which came with its first lock lease.
    ///
    /// # Errors
    /// `Disconnected`, `Media`; `Refused` where there is none: then all locks go by calls.
    fn lock_table(&self, session: u64) -> Result<Region, Error> {
        let _ = session;
        Err(Error::Refused)
    }

    /// The lifeline that a `Share` call made.
    ///
    /// # Errors
    /// `Disconnected`; `Refused` where there are no processes that something could be given to.
    fn lifeline(&self, number: u64) -> Result<Descriptor, Error> {
        let _ = number;
        Err(Error::Refused)
    }
}
