//! What a LibFS and its SharedFS share beyond the request ring: what the Welcome says, and where the words stand in
//! the two pieces of shared memory of a session. The protocol over the words is `ipc::words`.
//!
//! Session words (the LibFS writes): commit word, places to be inside at, table of open inodes. Lease words (SharedFS
//! writes, the LibFS only reads): up to where the log may be written over, how far the ledger is settled, whether the log is
//! sealed, what copies have, the lease of the log's own range with the inodes taken from it, a word a lock lease,
//! then one word a lease.

use crate::ids::{Incarnation, InodeNumber, LeaseVersion, LogUid, PoolUid, Sequence};
use crate::locks::LOCK_SLOTS;
use crate::pass::TOKEN_BYTES;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Session words: the commit word.
pub const COMMIT_OFFSET: usize = 0;
/// Session words: where threads without a place of their own are inside; three lines.
pub const OVERFLOW_OFFSET: usize = 64;
/// Session words: places to be inside at, a line each.
pub const SLOTS_OFFSET: usize = 256;
/// Number of these places.
pub const SLOTS: usize = 64;
/// Session words: inodes that are open here, eight bytes each, in any order; 0 is a free place. SharedFS reads it
/// when a name is removed. What finds no place is opened by a call.
pub const OPEN_TABLE_OFFSET: usize = SLOTS_OFFSET + SLOTS * 64;
/// Number of places for open inodes.
pub const OPEN_TABLE: usize = 4096;
/// Bytes of the session words.
pub const SESSION_BYTES: usize = OPEN_TABLE_OFFSET + OPEN_TABLE * size_of::<u64>();

/// Lease words: how often was said how far the log is digested; where that stands, its parity says.
pub const DIGEST_TURN_OFFSET: usize = 0;
/// Lease words: in even turns the last record of the log that is digested, here and at all copies, then where in the log
/// file the record after it begins: what lies before may be written over.
pub const DIGESTED_EVEN_OFFSET: usize = 8;
/// Lease words: last entry of the ledger that is settled.
pub const LEDGER_SETTLED_OFFSET: usize = 24;
/// Lease words: the lease of all inodes of the own range, but those that were ended.
pub const OWN_RANGE_OFFSET: usize = 32;
/// Lease words: how many were ended, ever. The own-range word changes after each was listed.
pub const ENDED_COUNT_OFFSET: usize = 40;
/// Lease words: as [`DIGESTED_EVEN_OFFSET`], in odd turns.
pub const DIGESTED_ODD_OFFSET: usize = 48;
/// Lease words: whether the log is sealed, and where it is cut; on a line of its own, which every write reads.
pub const SEAL_OFFSET: usize = 64;
/// Lease words: 1 if an fsync needs copies at other nodes, which the two words behind it are about.
pub const REPLICATES_OFFSET: usize = 128;
/// Lease words: last record of the log that all copies have, with all that gave the log its rights.
pub const REPLICATED_RECORD_OFFSET: usize = 136;
/// Lease words: last entry of the ledger that all copies have, as far as the session was told.
pub const REPLICATED_ENTRY_OFFSET: usize = 144;
/// Lease words: the first [`ENDED_MAX`] of the inodes that were ended. When there are more, the whole range has ended.
pub const ENDED_OFFSET: usize = 192;
/// Inodes of the own range that can be ended one by one.
pub const ENDED_MAX: usize = 4096;
/// Lease words: the words of lock leases, one for each slot of the lock table ([`crate::locks`]).
pub const LOCK_WORDS_OFFSET: usize = ENDED_OFFSET + ENDED_MAX * size_of::<u64>();
/// Lease words: the words that [`crate::call::NodeReply::word`] counts from.
pub const LEASE_WORDS_OFFSET: usize = LOCK_WORDS_OFFSET + LOCK_SLOTS * size_of::<u64>();

/// [`crate::call::NodeReply::word`] of an inode of the own range that was not ended.
pub const WORD_OWN_RANGE: u32 = u32::MAX;

/// Bytes of lease words for so many leases.
pub const fn lease_bytes(words: usize) -> usize {
    LEASE_WORDS_OFFSET + words * size_of::<u64>()
}

/// Generations: where, behind them, the word stands that says whether the daemon lives (`ipc::alive`).
pub const ALIVE_OFFSET: usize = 4096 * size_of::<u64>();
/// Bytes of the generations with that word.
pub const GENERATIONS_BYTES: usize = ALIVE_OFFSET + 64;

/// What SharedFS tells a LibFS that it lets in. The descriptors come in this order: log file, session words, lease
/// words, request ring, generations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Welcome {
    /// Number of the session, for people to read.
    pub session: U64,
    /// The pool.
    pub pool: PoolUid,
    /// The session's log; its ring begins behind the superblock, its first record has sequence 1.
    pub log: LogUid,
    /// Bytes of the log file.
    pub log_bytes: U64,
    /// The largest that it may grow to.
    pub log_bytes_max: U64,
    /// Under which version the inodes of the own range are held.
    pub version: LeaseVersion,
    /// Sequence of the log's opening in the ledger.
    pub ledger: U64,
    /// First inode number of the own range.
    pub first_inode: InodeNumber,
    /// Numbers in it.
    pub inodes: U64,
    /// Blocks of room.
    pub room_blocks: U64,
    /// The log's incarnation.
    pub incarnation: Incarnation,
    /// Number of lease words.
    pub lease_words: U32,
    /// 1 if the log needs fdatasync to survive all that its medium survives; 0 if a fence is enough.
    pub settles_file: U32,
    /// User that the session's records are judged by, as the kernel vouched for it.
    pub uid: U32,
    /// Its group.
    pub gid: U32,
    /// 1 if the session goes on from the one that the Hello named; else nothing is known of that.
    pub goes_on: U32,
    /// 1 if who revokes a lease, or seals or recovers the log, has the kernel fence the threads of the LibFS for it
    /// (`ipc::barrier`); 0 if going inside and a commit have to be full fences by themselves.
    pub fences: U32,
    /// The last record that counts of the log of that session; none after it ever will.
    pub recovered: Sequence,
}

const _: () = assert!(size_of::<Welcome>() == 116);

/// What an fsync rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SyncRequest {
    /// Up to this record of the session's own log.
    pub record: Sequence,
    /// Up to this entry of the ledger.
    pub entry: Sequence,
}

const _: () = assert!(size_of::<SyncRequest>() == 16);

/// A right to open a file once, whatever became of its names and its mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PassResponse {
    /// Random, and known to nobody else.
    pub token: [u8; TOKEN_BYTES],
}

const _: () = assert!(size_of::<PassResponse>() == 16);

/// Leases that one answer asks a session to give back.
pub const RECALLS_MAX: usize = 64;

/// A question after leases that others want.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RecallsRequest {
    /// 1: the answer is kept back until there is one. 0: it comes at once and asks for nothing, and so do those that were kept
    /// back.
    pub wait: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<RecallsRequest>() == 8);
