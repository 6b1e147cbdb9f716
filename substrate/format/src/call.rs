//! Calls of a LibFS to its SharedFS: the requests and responses in the shared-memory ring, after the ring's own headers. Both sides
//! copy a message out of shared memory once and decode the copy. SharedFS treats every request as hostile.
//!
//! Reads and writes of cached files make no calls. Calls are for operations that only SharedFS may execute or that need its state:
//! walks, leases, references, contents of the shared area, space, digest.

use crate::DecodeError;
use crate::ids::{Block, InodeNumber, LeaseVersion, SegmentId, Sequence};
use crate::node::InodeItem;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use crate::session::{PassResponse, RECALLS_MAX, RecallsRequest};

/// Limit of path components in one walk.
pub const WALK_NAMES_MAX: usize = 64;

/// The unit number, in calls, of the lease for renames of directories between directories: no inode has this number.
pub const RENAME_UNIT: InodeNumber = InodeNumber::new(u64::MAX);

/// Limit of units in one lease request: a rename between directories needs five.
pub const LEASE_UNITS_MAX: usize = 8;

/// Limit of leases ahead that a walk returns, in addition to those on its path.
pub const AHEAD_MAX: usize = 256;

/// Limit of files of which one call asks for extents, in addition to the one that it is about.
pub const EXTENTS_AHEAD_MAX: usize = 64;

/// Limit of leases, or of references, released by one call.
pub const RELEASE_UNITS_MAX: usize = 512;

/// Kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum CallKind {
    /// [`WalkRequest`], then names (a length byte each). Response: [`WalkResponse`], then [`NodeReply`]s: of the path, then of
    /// directory entries from the last name on, in the order of the directory.
    Walk = 1,
    /// [`LeaseRequest`]. Response: as many [`NodeReply`]s.
    Lease = 2,
    /// [`OpenRequest`], then the token of a [`CallKind::Pass`], if any. Response: a [`NodeReply`], with a reference.
    Open = 3,
    /// [`InodeRequest`]s, at most [`RELEASE_UNITS_MAX`]. No response body. Ends the references; if `flags` is 1, the lease too.
    Close = 4,
    /// [`EntriesRequest`]. Response: [`EntriesResponse`], then [`EntryReply`]s with their names.
    Entries = 5,
    /// [`RangeRequest`]s in blocks. Response: for each an [`ExtentsResponse`], then [`ExtentReply`]s. If the first one fails, the call
    /// fails; a later one that fails covers nothing, and the last ones are left out if there is no room.
    Extents = 6,
    /// [`RangeRequest`] in bytes. Response: bytes, fewer only at the end of the file.
    Read = 7,
    /// [`InodeRequest`]. Response: the target.
    Readlink = 8,
    /// [`InodeRequest`], then the name. Response: the value.
    GetXattr = 9,
    /// [`InodeRequest`]. Response: names, each ended by a zero byte.
    ListXattr = 10,
    /// [`DigestRequest`]. Response: [`DigestResponse`].
    Digest = 11,
    /// [`RefillRequest`]. Response: [`RefillResponse`].
    Refill = 12,
    /// [`GrowRequest`]. No response body.
    GrowLog = 13,
    /// [`InodeRequest`] with the segment in `inode`. No response body; its descriptor follows on the socket.
    MapSegment = 14,
    /// No body. Every log of the node and the ledger are synced before the response.
    SyncAll = 15,
    /// No body. Response: [`StatfsResponse`].
    Statfs = 16,
    /// [`DigestRequest`] with a ledger sequence: the ledger is synced up to it before the response. No response body.
    SyncLedger = 17,
    /// [`LockRequest`]. Response: [`LockResponse`]; with the first lock lease the lock table follows on the socket.
    Lock = 18,
    /// [`LockRequest`]; `kind` and `flags` are ignored. No response body.
    Unlock = 19,
    /// [`LockRequest`]. Response: the [`LockRequest`] of a conflicting lock; if there is none, nothing, or a
    /// [`LockResponse`] if the request has the flag `LOCK_LEASE`.
    TestLock = 20,
    /// [`LockRequest`], of which only the owner counts: ends all its locks and requests on the inode (0: on all inodes; if
    /// another session acts for the owner too, only this session's part in it).
    ReleaseLocks = 21,
    /// [`TicketRequest`]: waits at most the given time for the grant. Response: [`LockResponse`].
    RedeemLock = 22,
    /// [`TicketRequest`]: cancels the request. Response: [`LockResponse`], with ticket 0 if it was granted before.
    CancelLock = 23,
    /// [`crate::share::ShareRequest`]. Response: [`crate::share::ShareResponse`]; the liveness socket follows on the socket.
    Share = 24,
    /// Inode numbers, at most [`RELEASE_UNITS_MAX`], whose leases, if any, are released. No response body.
    Release = 25,
    /// [`OpenRequest`], whose lease is ignored. Creates a right to open a file at the gateway. Response:
    /// [`PassResponse`].
    Pass = 26,
    /// [`crate::session::SyncRequest`]: syncs the ledger, and waits until every copy has both. No response body.
    Sync = 27,
    /// [`RecallsRequest`]. From then on SharedFS asks the session for its leases instead of taking them, and the session
    /// answers with `Release`. Response: the inode numbers of these leases, at most [`RECALLS_MAX`]; it does not wait.
    Recalls = 28,
}

impl CallKind {
    /// The kind with this number.
    ///
    /// # Errors
    /// `Kind`.
    pub fn from_raw(raw: u16) -> Result<Self, DecodeError> {
        const ALL: [CallKind; 28] = [
            CallKind::Walk,
            CallKind::Lease,
            CallKind::Open,
            CallKind::Close,
            CallKind::Entries,
            CallKind::Extents,
            CallKind::Read,
            CallKind::Readlink,
            CallKind::GetXattr,
            CallKind::ListXattr,
            CallKind::Digest,
            CallKind::Refill,
            CallKind::GrowLog,
            CallKind::MapSegment,
            CallKind::SyncAll,
            CallKind::Statfs,
            CallKind::SyncLedger,
            CallKind::Lock,
            CallKind::Unlock,
            CallKind::TestLock,
            CallKind::ReleaseLocks,
            CallKind::RedeemLock,
            CallKind::CancelLock,
            CallKind::Share,
            CallKind::Release,
            CallKind::Pass,
            CallKind::Sync,
            CallKind::Recalls,
        ];
        usize::from(raw).checked_sub(1).and_then(|index| ALL.get(index)).copied().ok_or(DecodeError::Kind)
    }
}

/// A lease for reading: no session changes the unit.
pub const LEASE_READ: u8 = 1;
/// A lease for writing: no other session reads or changes the unit.
pub const LEASE_WRITE: u8 = 2;

/// Walks from a directory that the session holds, or from the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WalkRequest {
    /// The start of the walk.
    pub start: InodeNumber,
    /// Number of names that follow; each a length byte, then the bytes. An empty name is the parent.
    pub names: U16,
    /// `LEASE_READ` or `LEASE_WRITE`: the wanted lease on the inode of the last name.
    pub last_mode: u8,
    /// The wanted lease on the directory with the last name.
    pub parent_mode: u8,
    /// Number of wanted leases on entries of that directory from the last name on, at most [`AHEAD_MAX`]. Only ones that are free, or that others give back at once,
    /// are granted. They save a program that reads a directory one call for each entry.
    pub ahead: U16,
    /// `LEASE_READ` or `LEASE_WRITE`: the mode of those leases.
    pub ahead_mode: u8,
    /// 1: they are wanted only if another session has to give back the lease on the inode of the last name. Else 0.
    pub ahead_if_taken: u8,
}

const _: () = assert!(size_of::<WalkRequest>() == 16);

/// The result of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WalkResponse {
    /// Number of nodes of the path: the start, then one for each name that was found. All later nodes are entries ahead.
    pub nodes: U16,
    /// 0 at the end of the path, else the [`crate::call::Status`] at which the walk stopped.
    pub stopped: U16,
    /// With `NotFound`: number of the directory's entries whose cookies have the hash of the name. Unless it is 0, the
    /// creator of the name reads those entries first to choose its cookie.
    pub same_hash: U32,
}

const _: () = assert!(size_of::<WalkResponse>() == 8);

/// A lease, and the state of its unit in the area, for the cache of a LibFS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NodeReply {
    /// The unit.
    pub inode: InodeNumber,
    /// Version of its lease.
    pub version: LeaseVersion,
    /// Sequence of the grant in the ledger. An fsync of an operation under this lease waits until that entry is synced.
    pub ledger: Sequence,
    /// Last record of the session's own log that `item` contains.
    pub digested: Sequence,
    /// Index of its lease word.
    pub word: U32,
    /// The lower half of the word's generation, which is constant while the lease lasts.
    pub expected: U32,
    /// `LEASE_READ` or `LEASE_WRITE`.
    pub mode: u8,
    /// 1 if the session may write the file's contents because it has the file open.
    pub writable: u8,
    /// For the node of a name: the slot in the cookie of its entry (see [`crate::Cookie`]).
    pub slot: U16,
    /// 1 if the inode has extended attributes in the area.
    pub has_xattrs: u8,
    /// Zero.
    pub reserved: [u8; 3],
    /// The inode in the area.
    pub item: InodeItem,
}

const _: () = assert!(size_of::<NodeReply>() == 152);

/// One unit of a [`LeaseRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LeaseUnit {
    /// An inode that the session has found on a walk, or created.
    pub inode: InodeNumber,
    /// `LEASE_READ` or `LEASE_WRITE`.
    pub mode: u8,
    /// Zero.
    pub reserved: [u8; 7],
}

const _: () = assert!(size_of::<LeaseUnit>() == 16);

/// Requests leases that are granted as a whole or not at all; `count` units follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LeaseRequest {
    /// Number of [`LeaseUnit`]s, at most [`LEASE_UNITS_MAX`].
    pub count: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<LeaseRequest>() == 8);

/// Opens an inode: the right is checked now, and valid until the close.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OpenRequest {
    /// The inode to open.
    pub inode: InodeNumber,
    /// Bits: 1 read, 2 write, 4 execute.
    pub access: u8,
    /// Lease wanted with it; 0 for none.
    pub mode: u8,
    /// Zero.
    pub reserved: [u8; 6],
}

const _: () = assert!(size_of::<OpenRequest>() == 16);

/// A request about one inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct InodeRequest {
    /// The inode.
    pub inode: InodeNumber,
    /// Depends on the kind.
    pub flags: U64,
}

const _: () = assert!(size_of::<InodeRequest>() == 16);

/// Lists a directory from a cookie on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EntriesRequest {
    /// The directory.
    pub inode: InodeNumber,
    /// First cookie wanted.
    pub from: U64,
    /// 1: only entries whose cookies have the hash of `from`, if the session may add names; 0: all, if it may list.
    pub same_hash: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<EntriesRequest>() == 24);

/// Head of a batch of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EntriesResponse {
    /// Last record of the session's own log that the batch contains.
    pub digested: Sequence,
    /// Number of entries that follow.
    pub count: U32,
    /// 1 if this batch is the last one of the directory, or of the requested hash.
    pub end: U32,
}

const _: () = assert!(size_of::<EntriesResponse>() == 16);

/// An entry; its name follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EntryReply {
    /// Its inode.
    pub inode: InodeNumber,
    /// Its cookie.
    pub cookie: U64,
    /// A `FileType`.
    pub file_type: u8,
    /// Bytes of the name that follows.
    pub name_bytes: u8,
    /// Zero.
    pub reserved: [u8; 6],
}

const _: () = assert!(size_of::<EntryReply>() == 24);

/// A part of a file, in blocks or in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RangeRequest {
    /// The file.
    pub inode: InodeNumber,
    /// Start of the part.
    pub offset: U64,
    /// Length of the part.
    pub length: U64,
}

const _: () = assert!(size_of::<RangeRequest>() == 24);

/// Head of a batch of extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExtentsResponse {
    /// Last record of the session's own log that the batch contains.
    pub digested: Sequence,
    /// The file's generation word at the time of the batch: while it is unchanged, no block of the file was reused.
    pub generation: U32,
    /// Number of extents that follow.
    pub count: U32,
    /// The batch describes all blocks before this one.
    pub covered_to: U64,
}

const _: () = assert!(size_of::<ExtentsResponse>() == 24);

/// An extent, without checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExtentReply {
    /// First block of the file.
    pub file_block: U64,
    /// The segment.
    pub segment: SegmentId,
    /// First block in it.
    pub block: Block,
    /// Number of blocks.
    pub blocks: U32,
    /// `EXTENT_UNWRITTEN`; [`EXTENT_BY_CALL`].
    pub flags: U32,
}

const _: () = assert!(size_of::<ExtentReply>() == 24);

/// The session may not map the extent's segment, and has to read by calls.
pub const EXTENT_BY_CALL: u32 = 0x8000_0000;

/// Digest of the session's own log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DigestRequest {
    /// Up to this record.
    pub up_to: Sequence,
    /// 1 to wait until it is done.
    pub wait: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<DigestRequest>() == 16);

/// Progress of a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DigestResponse {
    /// Last record contained in the area.
    pub digested: Sequence,
    /// Offset in the ring of the record after it.
    pub position: U64,
}

const _: () = assert!(size_of::<DigestResponse>() == 16);

/// Requests inode numbers and space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RefillRequest {
    /// Inode numbers wanted; 0 for none.
    pub inodes: U64,
    /// Wanted blocks of space; 0 for none.
    pub room_blocks: U64,
    /// 1: the session is about to write to files of other users.
    pub shared: U32,
    /// 1: the space is for records after which files have no more blocks than before. On a full pool there is some for these.
    pub replaces: U32,
}

const _: () = assert!(size_of::<RefillRequest>() == 24);

/// The result of a [`RefillRequest`]. Less space than wanted means that the pool is nearly full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RefillResponse {
    /// First number of the new range.
    pub first_inode: InodeNumber,
    /// Numbers in it.
    pub inodes: U64,
    /// Blocks added to the session's reservation.
    pub room_blocks: U64,
}

const _: () = assert!(size_of::<RefillResponse>() == 24);

/// Requests space for more of the log's file. The session may use the file up to there once the call has succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct GrowRequest {
    /// Bytes from the start of the file.
    pub bytes: U64,
}

const _: () = assert!(size_of::<GrowRequest>() == 8);

/// Sizes of the file system, in blocks of 4096 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct StatfsResponse {
    /// Blocks for data.
    pub blocks: U64,
    /// Blocks neither used nor reserved.
    pub blocks_free: U64,
    /// Limit of inodes.
    pub inodes: U64,
    /// Number of inodes that may still be created.
    pub inodes_free: U64,
}

const _: () = assert!(size_of::<StatfsResponse>() == 32);

/// [`LockRequest::owner_kind`]: a process (`fcntl` locks of the old kind).
pub const OWNER_PROCESS: u8 = 1;
/// [`LockRequest::owner_kind`]: an open file description.
pub const OWNER_DESCRIPTION: u8 = 2;
/// [`LockRequest::family`]: ranges (`fcntl`).
pub const FAMILY_RANGES: u8 = 1;
/// [`LockRequest::family`]: the whole file (`flock`).
pub const FAMILY_WHOLE: u8 = 2;
/// [`LockRequest::kind`]: a shared lock.
pub const LOCK_SHARED: u8 = 1;
/// [`LockRequest::kind`]: an exclusive lock.
pub const LOCK_EXCLUSIVE: u8 = 2;

/// [`LockRequest::flags`]: the request waits if another lock conflicts.
pub const LOCK_WAITS: u8 = 1;
/// [`LockRequest::flags`]: the program accepts a lock lease on the file.
pub const LOCK_LEASE: u8 = 2;

/// A lock on a range of a file. Kind and number identify the owner on the whole node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LockRequest {
    /// The file.
    pub inode: InodeNumber,
    /// Number of the owner.
    pub owner: U64,
    /// Process id, for information.
    pub pid: U32,
    /// `OWNER_*`.
    pub owner_kind: u8,
    /// `FAMILY_*`.
    pub family: u8,
    /// `LOCK_*`.
    pub kind: u8,
    /// `LOCK_WAITS`, `LOCK_LEASE`.
    pub flags: u8,
    /// First byte.
    pub first: U64,
    /// Last byte; all ones is the end of the file, also when it moves.
    pub last: U64,
}

const _: () = assert!(size_of::<LockRequest>() == 40);

/// The result of a lock request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LockResponse {
    /// 0 if the lock was granted, else the ticket of the waiting request.
    pub ticket: U64,
    /// 0, or, with a lock lease, one more than the slot that contains all locks on the file from now on.
    pub slot: U32,
    /// The lower half of the lease word's generation, which is constant while the lease lasts.
    pub expected: U32,
}

const _: () = assert!(size_of::<LockResponse>() == 16);

/// Refers to a waiting request for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TicketRequest {
    /// Its ticket.
    pub ticket: U64,
    /// Time for which the response may wait.
    pub wait_ms: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<TicketRequest>() == 16);

/// The result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// The request could not be decoded, or refers to an object that the session does not hold.
    Invalid = 1,
    /// No such entry or inode.
    NotFound = 2,
    /// A component inside the path is not a directory.
    NotDirectory = 3,
    /// A component before the last one is a symbolic link.
    Symlink = 4,
    /// Permission denied.
    Access = 5,
    /// No space for the requested reservation.
    NoSpace = 6,
    /// The session has reached its limit of units, references or words.
    Limit = 7,
    /// Data or metadata cannot be read: a media error or a wrong checksum.
    Media = 8,
    /// The session's log is sealed: the process must attach again.
    Sealed = 9,
    /// No such attribute.
    NoAttribute = 10,
    /// The operation needs a regular file.
    NotRegular = 11,
    /// Another lock conflicts.
    WouldBlock = 12,
    /// Waiting for this lock would be a deadlock.
    Deadlock = 13,
}

impl Status {
    /// The status with this number; an unknown number becomes `Invalid`.
    pub fn from_raw(raw: u16) -> Self {
        match raw {
            0 => Self::Ok,
            2 => Self::NotFound,
            3 => Self::NotDirectory,
            4 => Self::Symlink,
            5 => Self::Access,
            6 => Self::NoSpace,
            7 => Self::Limit,
            8 => Self::Media,
            9 => Self::Sealed,
            10 => Self::NoAttribute,
            11 => Self::NotRegular,
            12 => Self::WouldBlock,
            13 => Self::Deadlock,
            _ => Self::Invalid,
        }
    }
}

/// Reads a fixed-size body at the start of a message, and returns the rest.
///
/// # Errors
/// `Truncated`.
pub fn split<T: FromBytes + KnownLayout + Immutable>(message: &[u8]) -> Result<(T, &[u8]), DecodeError> {
    T::read_from_prefix(message).map_err(|_| DecodeError::Truncated)
}
