//! Calls of a LibFS to its SharedFS: what stands in a request and a response of the shared-memory ring, after the
//! ring's own headers. Both sides copy a message out of shared memory once and decode the copy; SharedFS takes
//! every request for hostile.
//!
//! Steady-state reads and writes make no call. Calls are for what only SharedFS may do or know: walks, leases,
//! references, contents of the shared area, room, digest.

use crate::DecodeError;
use crate::ids::{Block, Incarnation, InodeNumber, LeaseVersion, LogUid, SegmentId, Sequence};
use crate::node::InodeItem;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use crate::session::{PassResponse, RECALLS_MAX, RecallsRequest};

/// Components of a path that one walk takes.
pub const WALK_NAMES_MAX: usize = 64;

/// The unit of the lease that renames of directories between directories need, in calls: no inode has this number.
pub const RENAME_UNIT: InodeNumber = InodeNumber::new(u64::MAX);

/// Units that one lease request takes: a rename between directories touches five.
pub const LEASE_UNITS_MAX: usize = 8;

/// Leases that a walk brings beside those on its way, at most.
pub const AHEAD_MAX: usize = 256;

/// Leases that one call gives back.
pub const RELEASE_UNITS_MAX: usize = 512;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum CallKind {
    /// [`WalkRequest`], then names (a length byte each). Response: [`WalkResponse`], then [`NodeReply`]s: those on the way,
    /// and of entries from the last one on.
    Walk = 1,
    /// [`LeaseRequest`]. Response: as many [`NodeReply`]s.
    Lease = 2,
    /// [`OpenRequest`], then nothing or the token of a [`CallKind::Pass`], by which it is opened once. Response: a
    /// [`NodeReply`]; a reference is held from now on.
    Open = 3,
    /// [`InodeRequest`]. No response body; the reference and, if `flags` is 1, the lease are given back.
    Close = 4,
    /// [`EntriesRequest`]. Response: [`EntriesResponse`], then [`EntryReply`]s with their names.
    Entries = 5,
    /// [`RangeRequest`] in blocks. Response: [`ExtentsResponse`], then [`ExtentReply`]s.
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
    /// [`GrowRequest`]. Response: [`GrowResponse`]; the log must be wholly committed and its lock held.
    GrowLog = 13,
    /// [`InodeRequest`] with the segment in `inode`: its descriptor follows on the socket. No response body.
    MapSegment = 14,
    /// No body. Every log of the node and the ledger are settled before the response.
    SyncAll = 15,
    /// No body. Response: [`StatfsResponse`].
    Statfs = 16,
    /// [`DigestRequest`] with a ledger sequence: settled up to it before the response. No response body.
    SettleLedger = 17,
    /// [`LockRequest`]. Response: [`LockResponse`]; with the first lock lease the lock table follows on the socket.
    Lock = 18,
    /// [`LockRequest`], its `kind` and `flags` meaningless. No response body.
    Unlock = 19,
    /// [`LockRequest`]. Response: the [`LockRequest`] by which a lock in the way was taken; nothing if none is.
    TestLock = 20,
    /// [`LockRequest`], of which the owner counts: all its locks and requests on the inode (0: on all) end.
    ReleaseLocks = 21,
    /// [`TicketRequest`]: whether it was granted, after at most the time given. Response: [`LockResponse`].
    RedeemLock = 22,
    /// [`TicketRequest`]: takes it back. Response: [`LockResponse`], its ticket 0 if it was granted before.
    CancelLock = 23,
    /// [`crate::share::ShareRequest`]. Response: [`crate::share::ShareResponse`]; the lifeline follows on the socket.
    Share = 24,
    /// Inode numbers, at most [`RELEASE_UNITS_MAX`]. The leases on them are given back before the response, which has no
    /// body; one that is not held is no error.
    Release = 25,
    /// [`OpenRequest`], whose lease does not count: a right to an open file, for the gateway. Response: [`PassResponse`].
    Pass = 26,
    /// [`crate::session::SyncRequest`]: the ledger is settled, and log and ledger are at every copy, before the response. No response body.
    Sync = 27,
    /// [`RecallsRequest`]. From the first of these calls on the session's leases are not taken from it: it is asked for them,
    /// and answers with `Release`. Response: the inode numbers asked for, at most [`RECALLS_MAX`]; none if nothing is, and the
    /// call does not wait.
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
            CallKind::SettleLedger,
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

/// A lease for reading: nobody changes the unit meanwhile.
pub const LEASE_READ: u8 = 1;
/// A lease for writing: nobody else reads or changes the unit meanwhile.
pub const LEASE_WRITE: u8 = 2;

/// Walk from a directory that the session holds (or the root).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WalkRequest {
    /// Where it begins.
    pub start: InodeNumber,
    /// Number of names that follow; each a length byte, then the bytes. An empty name is the parent.
    pub names: U16,
    /// `LEASE_READ` or `LEASE_WRITE`: the lease wanted on what the last name stands for.
    pub last_mode: u8,
    /// Same for the directory that holds the last name.
    pub parent_mode: u8,
    /// Leases wanted on entries of that directory from the last name on, at most [`AHEAD_MAX`]: those that are free, so that
    /// a program that goes through the directory makes no call for each.
    pub ahead: U16,
    /// `LEASE_READ` or `LEASE_WRITE`: those leases.
    pub ahead_mode: u8,
    /// Zero.
    pub reserved: u8,
}

const _: () = assert!(size_of::<WalkRequest>() == 16);

/// How a walk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WalkResponse {
    /// Nodes of the way: the start, then one for each name that was found. All others lie ahead.
    pub nodes: U16,
    /// Why it stopped: 0 at the end, else an [`crate::call::Status`].
    pub stopped: U16,
    /// If it stopped with `NotFound`: entries of the directory whose cookies have the hash of the name. With none,
    /// whoever creates the name knows its cookie; else it reads those entries first.
    pub same_hash: U32,
}

const _: () = assert!(size_of::<WalkResponse>() == 8);

/// A lease with the state of its unit in the area: what a LibFS caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NodeReply {
    /// The unit.
    pub inode: InodeNumber,
    /// Version of its lease.
    pub version: LeaseVersion,
    /// Sequence of the grant in the ledger: an fsync that used it waits until it is settled.
    pub ledger: Sequence,
    /// Last record of the session's own log that `item` contains.
    pub digested: Sequence,
    /// Index of its lease word.
    pub word: U32,
    /// The word's generation as long as the lease lasts, its lower half.
    pub expected: U32,
    /// `LEASE_READ` or `LEASE_WRITE`.
    pub mode: u8,
    /// 1 if the session holds the right to write the file's contents from an open.
    pub writable: u8,
    /// Of a walk's node that a name led to: the slot in the cookie of its entry (see [`crate::Cookie`]).
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
    /// An inode that the session met on a walk, or created.
    pub inode: InodeNumber,
    /// `LEASE_READ` or `LEASE_WRITE`.
    pub mode: u8,
    /// Zero.
    pub reserved: [u8; 7],
}

const _: () = assert!(size_of::<LeaseUnit>() == 16);

/// Leases that are granted together or not at all: `count` units follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LeaseRequest {
    /// Number of [`LeaseUnit`]s, at most [`LEASE_UNITS_MAX`].
    pub count: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<LeaseRequest>() == 8);

/// Open: the right is checked now and kept until the close.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OpenRequest {
    /// What is opened.
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
    /// Meaning given by the kind.
    pub flags: U64,
}

const _: () = assert!(size_of::<InodeRequest>() == 16);

/// Entries of a directory from a cookie on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EntriesRequest {
    /// The directory.
    pub inode: InodeNumber,
    /// First cookie wanted.
    pub from: U64,
    /// 1: only entries whose cookies have the hash of `from`, which a session may see that may add names to the
    /// directory; 0: all, which a session may see that may list the directory.
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
    /// 1 if the directory, or the hash that was asked for, ends with this batch.
    pub end: U32,
}

const _: () = assert!(size_of::<EntriesResponse>() == 16);

/// An entry; its name follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EntryReply {
    /// What it stands for.
    pub inode: InodeNumber,
    /// Its place.
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
    /// Where the part begins.
    pub offset: U64,
    /// How long it is.
    pub length: U64,
}

const _: () = assert!(size_of::<RangeRequest>() == 24);

/// Head of a batch of extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExtentsResponse {
    /// Last record of the session's own log that the batch contains.
    pub digested: Sequence,
    /// The file's generation word when the batch was made: as long as it stands, no block of it was reused.
    pub generation: U32,
    /// Number of extents that follow.
    pub count: U32,
    /// The batch says all about blocks before this one.
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

/// The session may not map the extent's segment: it reads by call.
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

/// How far a log is digested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DigestResponse {
    /// Last record contained in the area.
    pub digested: Sequence,
    /// Where in the ring the record after it begins.
    pub position: U64,
}

const _: () = assert!(size_of::<DigestResponse>() == 16);

/// More inode numbers and room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RefillRequest {
    /// Inode numbers wanted; 0 for none.
    pub inodes: U64,
    /// Blocks of room wanted; 0 for none.
    pub room_blocks: U64,
    /// 1: the session is about to write to files of other users.
    pub shared: U32,
    /// 0.
    pub reserved: U32,
}

const _: () = assert!(size_of::<RefillRequest>() == 24);

/// What was granted; less room than wanted means that the pool is nearly full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RefillResponse {
    /// First number of the new range.
    pub first_inode: InodeNumber,
    /// Numbers in it.
    pub inodes: U64,
    /// Blocks added to the session's room.
    pub room_blocks: U64,
}

const _: () = assert!(size_of::<RefillResponse>() == 24);

/// A larger log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct GrowRequest {
    /// Bytes of the whole log file.
    pub file_bytes: U64,
}

const _: () = assert!(size_of::<GrowRequest>() == 8);

/// The log begins anew, empty, with more room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct GrowResponse {
    /// The log.
    pub log: LogUid,
    /// Bytes of the whole log file.
    pub file_bytes: U64,
    /// Its new incarnation: a new salt.
    pub incarnation: Incarnation,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<GrowResponse>() == 24);

/// Sizes of the file system, in blocks of 4096 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct StatfsResponse {
    /// Blocks for data.
    pub blocks: U64,
    /// Blocks neither used nor promised.
    pub blocks_free: U64,
    /// Inodes that there may be.
    pub inodes: U64,
    /// Inodes that may still be made.
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
/// [`LockRequest::kind`]: many may hold it.
pub const LOCK_SHARED: u8 = 1;
/// [`LockRequest::kind`]: one may.
pub const LOCK_EXCLUSIVE: u8 = 2;

/// [`LockRequest::flags`]: to be queued if another's lock is in the way.
pub const LOCK_WAITS: u8 = 1;
/// [`LockRequest::flags`]: the program takes a lock lease on the file, if there may be one.
pub const LOCK_LEASE: u8 = 2;

/// A lock on a range of a file. Owners are told apart on the whole node by kind and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LockRequest {
    /// The file.
    pub inode: InodeNumber,
    /// Number of the owner.
    pub owner: U64,
    /// Process id, for people to read.
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
    /// Last byte; all ones is the end of the file, wherever it comes to be.
    pub last: U64,
}

const _: () = assert!(size_of::<LockRequest>() == 40);

/// What became of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LockResponse {
    /// 0 if it was granted, else the ticket of the request that waits.
    pub ticket: U64,
    /// 0, or one more than the slot where all locks on the file stand from now on: the session holds their lock lease.
    pub slot: U32,
    /// The lease word's generation as long as the lease lasts, its lower half.
    pub expected: U32,
}

const _: () = assert!(size_of::<LockResponse>() == 16);

/// A request for a lock that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TicketRequest {
    /// Its ticket.
    pub ticket: U64,
    /// How long the answer may take.
    pub wait_ms: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<TicketRequest>() == 16);

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The request could not be decoded, or names what the session does not hold.
    Invalid = 1,
    /// No such entry or inode.
    NotFound = 2,
    /// A component that is walked through is not a directory.
    NotDirectory = 3,
    /// A symbolic link stands before the last name.
    Symlink = 4,
    /// Permission denied.
    Access = 5,
    /// No space for the room wanted.
    NoSpace = 6,
    /// No more units, references or words for this session.
    Limit = 7,
    /// Data or metadata could not be read: a media error or a wrong checksum.
    Media = 8,
    /// The session's log is sealed: attach anew.
    Sealed = 9,
    /// No such attribute.
    NoAttribute = 10,
    /// The operation needs a regular file.
    NotRegular = 11,
    /// Another's lock is in the way.
    WouldBlock = 12,
    /// Waiting for this lock would never end.
    Deadlock = 13,
}

impl Status {
    /// The status with this number; one that is unknown counts as `Invalid`.
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

/// Reads a fixed-size body at the start of a message and gives the rest.
///
/// # Errors
/// `Truncated`.
pub fn split<T: FromBytes + KnownLayout + Immutable>(message: &[u8]) -> Result<(T, &[u8]), DecodeError> {
    T::read_from_prefix(message).map_err(|_| DecodeError::Truncated)
}
