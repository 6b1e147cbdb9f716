//! Why an attempt at an operation stopped: it failed, or it lacks something that only SharedFS can give. An attempt
//! runs under the state's lock and waits for nothing; what it needs is got without the lock, and then it is made
//! again, from its beginning. It leaves nothing behind that anybody could see.

use format::call::LEASE_READ;
use format::pass::TOKEN_BYTES;
use format::{Cookie, InodeNumber, SegmentId, Sequence};

/// What shows the right to open a file that another process has open.
pub(crate) type Token = [u8; TOKEN_BYTES];

/// Why an attempt stopped.
#[derive(Debug)]
pub(crate) enum Stop {
    /// This is its result.
    Failed(vfs::Error),
    /// Get this and try again.
    Need(Need),
}

/// What an attempt gives.
pub(crate) type Step<T> = Result<T, Stop>;

/// What an attempt lacks.
#[derive(Debug)]
pub(crate) enum Need {
    /// A lease was lost meanwhile: only a new look.
    Again,
    /// A session.
    Attach,
    /// The log is being replaced by a larger one.
    LogReplaced,
    /// What was kept for this inode is being given back: nobody opens it meanwhile.
    GivenBack(InodeNumber),
    /// These leases, together: inode and `LEASE_READ` or `LEASE_WRITE`.
    Leases(Vec<(InodeNumber, u8)>),
    /// What names lead to.
    Walk(Walk),
    /// A reference: access bits 1 read, 2 write; by a token that was given for it, if there is one.
    Open(InodeNumber, u8, Option<Token>),
    /// Entries of a directory from a cookie on.
    Entries(InodeNumber, Cookie),
    /// All entries of a directory whose cookies have the hash of this one, which is the first with it.
    SameHash(InodeNumber, Cookie),
    /// Where a file's blocks lie, from one on.
    Extents(InodeNumber, u64, u64),
    /// A segment's mapping.
    Segment(SegmentId),
    /// Target of a symbolic link.
    Readlink(InodeNumber),
    /// So many blocks of room.
    Room(u64),
    /// That room is good for other users' files, too.
    SharedRoom,
    /// Inode numbers.
    Inodes,
    /// So many bytes of log for one record.
    LogSpace(u64),
    /// The own records up to this one in the area.
    Digested(Sequence),
}

/// A walk from a directory, and the leases that it brings.
#[derive(Debug)]
pub(crate) struct Walk {
    pub start: InodeNumber,
    /// An empty one is the parent.
    pub names: Vec<Vec<u8>>,
    /// On the directory with the last name.
    pub parent_mode: u8,
    /// On so many of the entries from the last name on, as far as they are free.
    pub ahead: u16,
    pub ahead_mode: u8,
}

impl Walk {
    /// One that does not look ahead.
    pub fn new(start: InodeNumber, names: Vec<Vec<u8>>, parent_mode: u8) -> Self {
        Self { start, names, parent_mode, ahead: 0, ahead_mode: LEASE_READ }
    }

    /// The same with leases ahead.
    pub fn ahead(self, ahead: u16, ahead_mode: u8) -> Self {
        Self { ahead, ahead_mode, ..self }
    }
}

impl From<vfs::Error> for Stop {
    fn from(error: vfs::Error) -> Self {
        Self::Failed(error)
    }
}

impl From<Need> for Stop {
    fn from(need: Need) -> Self {
        Self::Need(need)
    }
}
