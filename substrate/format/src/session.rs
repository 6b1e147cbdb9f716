//! State that a LibFS and its SharedFS share in addition to the request ring: the Welcome, and the offsets of the
//! words in the two pieces of shared memory of a session. The protocol over the words is `ipc::words`.
//!
//! Session words, written by the LibFS: the commit word, slots of threads that are inside an operation, the table of
//! open inodes. Lease words, written by SharedFS and read-only for the LibFS: up to where the log may be overwritten,
//! up to where the ledger is synced, whether the log is sealed, how much the copies have, the lease of the session's
//! preallocated inode range with the inodes taken from it, one word for each lock lease, then one word for each
//! lease.

use crate::ids::{Incarnation, InodeNumber, LeaseVersion, LogUid, PoolUid, Sequence};
use crate::locks::LOCK_SLOTS;
use crate::pass::TOKEN_BYTES;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Session words: the commit word.
pub const COMMIT_OFFSET: usize = 0;
/// Session words: count of the threads inside an operation that have no slot; three lines.
pub const OVERFLOW_OFFSET: usize = 64;
/// Session words: slots of threads that are inside an operation, one line each.
pub const SLOTS_OFFSET: usize = 256;
/// Number of these slots.
pub const SLOTS: usize = 64;
/// Session words: inodes that the process has open, eight bytes each, in any order; 0 is a free slot. SharedFS reads
/// the table when a name is removed. An inode that finds no free slot is opened by a call.
pub const OPEN_TABLE_OFFSET: usize = SLOTS_OFFSET + SLOTS * 64;
/// Number of slots for open inodes.
pub const OPEN_TABLE: usize = 4096;
/// Bit of a word of this table: the process does not use the inode any more, and SharedFS may end the session's
/// reference to it as soon as it has digested every record of the session.
pub const OPEN_RELEASED: u64 = 1 << 63;
/// Bytes of the session words.
pub const SESSION_BYTES: usize = OPEN_TABLE_OFFSET + OPEN_TABLE * size_of::<u64>();

/// Lease words: number of updates of the digest position. Its parity selects the words that are current.
pub const DIGEST_TURN_OFFSET: usize = 0;
/// Lease words, in even turns: the last record of the log that is digested here and at all copies, then the offset in
/// the log file of the record after it. Everything before may be overwritten.
pub const DIGESTED_EVEN_OFFSET: usize = 8;
/// Lease words: the last entry of the ledger that is synced.
pub const LEDGER_SYNCED_OFFSET: usize = 24;
/// Lease words: the lease of all inodes of the preallocated range, except those whose lease has ended.
pub const OWN_RANGE_OFFSET: usize = 32;
/// Lease words: number of these exceptions so far. The word of the range changes after each exception is listed.
pub const ENDED_COUNT_OFFSET: usize = 40;
/// Lease words, in odd turns: as [`DIGESTED_EVEN_OFFSET`].
pub const DIGESTED_ODD_OFFSET: usize = 48;
/// Lease words: whether the log is sealed, and where it is cut; on a line of its own, which every write reads.
pub const SEAL_OFFSET: usize = 64;
/// Lease words: 1 if an fsync needs copies on other nodes. The next two words tell what these have.
pub const REPLICATES_OFFSET: usize = 128;
/// Lease words: the last record of the log that all copies have, together with all entries that its rights depend on.
pub const REPLICATED_RECORD_OFFSET: usize = 136;
/// Lease words: the last entry of the ledger that all copies have, as far as SharedFS has told the session.
pub const REPLICATED_ENTRY_OFFSET: usize = 144;
/// Lease words: the first [`ENDED_MAX`] inodes whose lease has ended. If there are more, the lease of the whole range
/// has.
pub const ENDED_OFFSET: usize = 192;
/// Number of inodes of the preallocated range whose lease can end individually.
pub const ENDED_MAX: usize = 4096;
/// Lease words: the words of lock leases, one for each slot of the lock table ([`crate::locks`]).
pub const LOCK_WORDS_OFFSET: usize = ENDED_OFFSET + ENDED_MAX * size_of::<u64>();
/// Lease words: the words that [`crate::call::NodeReply::word`] counts from.
pub const LEASE_WORDS_OFFSET: usize = LOCK_WORDS_OFFSET + LOCK_SLOTS * size_of::<u64>();

/// [`crate::call::NodeReply::word`] of an inode that is covered by the lease of the preallocated range.
pub const WORD_OWN_RANGE: u32 = u32::MAX;

/// Bytes of the lease words for `leases` leases.
pub const fn lease_bytes(words: usize) -> usize {
    LEASE_WORDS_OFFSET + words * size_of::<u64>()
}

/// Generations: offset of the word behind them that tells whether the daemon lives (`ipc::alive`).
pub const ALIVE_OFFSET: usize = 4096 * size_of::<u64>();
/// Bytes of the generations with that word.
pub const GENERATIONS_BYTES: usize = ALIVE_OFFSET + 64;

/// The answer of SharedFS to an accepted Hello. The descriptors follow in this order: log file, session words, lease
/// words, request ring, generations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Welcome {
    /// Number of the session, for information.
    pub session: U64,
    /// The pool.
    pub pool: PoolUid,
    /// The session's log; its ring begins behind the superblock, its first record has sequence 1.
    pub log: LogUid,
    /// Bytes of the log's file that have space.
    pub log_bytes: U64,
    /// Bytes of the log's file: the most that gets space.
    pub log_bytes_max: U64,
    /// Version under which the session holds its preallocated inode range.
    pub version: LeaseVersion,
    /// Sequence of the log's opening in the ledger.
    pub ledger: U64,
    /// First number of the preallocated inode range.
    pub first_inode: InodeNumber,
    /// Numbers in it.
    pub inodes: U64,
    /// Blocks of the space reservation.
    pub room_blocks: U64,
    /// The log's incarnation.
    pub incarnation: Incarnation,
    /// Number of lease words.
    pub lease_words: U32,
    /// 1 if the log needs fdatasync to survive every failure that its medium survives; 0 if a fence is enough.
    pub syncs_file: U32,
    /// User by whose rights the session's records are checked, as the kernel has reported it.
    pub uid: U32,
    /// Its group.
    pub gid: U32,
    /// 1 if the session continues the one that the Hello named; otherwise that session is unknown.
    pub goes_on: U32,
    /// 1 if SharedFS makes the kernel fence the threads of the LibFS when it revokes a lease, or seals or recovers
    /// the log (`ipc::barrier`); 0 if the LibFS has to execute full fences when it enters an operation and when it
    /// commits.
    pub fences: U32,
    /// The last valid record in the log of that session. No later one will become valid.
    pub recovered: Sequence,
}

const _: () = assert!(size_of::<Welcome>() == 116);

/// The positions that must be durable before an fsync returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SyncRequest {
    /// A record of the session's own log.
    pub record: Sequence,
    /// An entry of the ledger.
    pub entry: Sequence,
}

const _: () = assert!(size_of::<SyncRequest>() == 16);

/// A right to open a file once, independent of later changes of its names and mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PassResponse {
    /// Random and secret.
    pub token: [u8; TOKEN_BYTES],
}

const _: () = assert!(size_of::<PassResponse>() == 16);

/// Limit of leases in one answer to [`RecallsRequest`].
pub const RECALLS_MAX: usize = 64;

/// Asks for the leases that other sessions want.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RecallsRequest {
    /// 1: the answer waits until there are any. 0: the answer comes at once and is empty, and so do the answers that
    /// wait.
    pub wait: U32,
    /// 1: of what was kept elsewhere under leases of an earlier session, which is over, nothing is left.
    pub dropped: U32,
}

const _: () = assert!(size_of::<RecallsRequest>() == 8);
