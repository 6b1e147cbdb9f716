//! The reasons for which an attempt at an operation stops: it failed, or it lacks a thing that only SharedFS can give.
//! An attempt runs under the state's lock and waits for nothing. The missing thing is requested without the lock, and
//! then the attempt is repeated from its beginning. A stopped attempt has no visible effect.

use format::call::{LEASE_READ, LEASE_WRITE};
use format::pass::TOKEN_BYTES;
use format::{Cookie, InodeNumber, SegmentId, Sequence};

/// A token that proves the right to open a file that another process has open.
pub(crate) type Token = [u8; TOKEN_BYTES];

/// The reason for which an attempt stopped.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The operation failed.
    Failed(vfs::Error),
    /// The attempt is repeated after this need is met.
    Need(Need),
}

/// The result of an attempt.
pub(crate) type Step<T> = Result<T, Stop>;

/// A thing that an attempt lacks.
#[derive(Debug)]
pub(crate) enum Need {
    /// Only another attempt: a lease was lost meanwhile.
    Again,
    /// A session.
    Attach,
    /// The end of a release: the reference to this inode, or the lease on it, is being released.
    GivenBack(InodeNumber),
    /// These leases, all together: inode and `LEASE_READ` or `LEASE_WRITE`.
    Leases(Vec<(InodeNumber, u8)>),
    /// The inodes and leases on a path.
    Walk(Walk),
    /// A reference: access bits 1 read, 2 write; by a token, if there is one.
    Open(InodeNumber, u8, Option<Token>),
    /// Entries of a directory from a cookie on.
    Entries(InodeNumber, Cookie),
    /// All entries of a directory whose cookies have the same hash as this first one.
    SameHash(InodeNumber, Cookie),
    /// The extents of a file: first block and number of blocks.
    Extents(InodeNumber, u64, u64),
    /// A segment's mapping.
    Segment(SegmentId),
    /// Target of a symbolic link.
    Readlink(InodeNumber),
    /// A reservation for a record of this cost.
    Room(RecordCost),
    /// The same for a record that replaces blocks, on a pool that is full.
    RoomToReplace(RecordCost),
    /// A reservation that may also be used for other users' files.
    SharedRoom,
    /// Inode numbers.
    Inodes,
    /// Space in the log for a record of this number of bytes.
    LogSpace(u64),
    /// The digest of own records up to this one.
    Digested(Sequence),
}

/// The blocks that a record costs (see `format::record::room_blocks`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordCost {
    pub blocks: u64,
    /// After its digest files have no more blocks than before: there is some space for such records on a full pool, too.
    pub replaces: bool,
}

impl RecordCost {
    /// The cost of a record that adds data.
    pub fn adding(blocks: u64) -> Self {
        Self { blocks, replaces: false }
    }

    /// The cost of a record that only changes the tree, or replaces or removes data.
    pub fn replacing(blocks: u64) -> Self {
        Self { blocks, replaces: true }
    }
}

/// A walk from a directory, and the leases that it requests.
#[derive(Debug)]
pub(crate) struct Walk {
    pub start: InodeNumber,
    /// The names on the path; an empty one is the parent.
    pub names: Vec<Vec<u8>>,
    /// Mode of the lease on the directory that contains the last name.
    pub parent_mode: u8,
    /// Mode of the lease on the inode of the last name.
    pub last_mode: u8,
    /// Number of further entries, from the last name on, whose free leases are requested.
    pub ahead: u16,
    pub ahead_mode: u8,
    /// They are wanted only if another session has to give back the lease on the inode of the last name.
    pub ahead_if_taken: bool,
}

impl Walk {
    /// A walk that requests no leases ahead.
    pub fn new(start: InodeNumber, names: Vec<Vec<u8>>, parent_mode: u8) -> Self {
        Self {
            start,
            names,
            parent_mode,
            last_mode: LEASE_READ,
            ahead: 0,
            ahead_mode: LEASE_READ,
            ahead_if_taken: false,
        }
    }

    /// The same walk to an entry that is about to be removed.
    pub fn for_removal(self) -> Self {
        Self { last_mode: LEASE_WRITE, ..self }
    }

    /// The same walk, with leases requested ahead.
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
