//! The root record of the shared area. One atomic write of it commits a batch of a digest.
//!
//! Blocks 1 and 2 of the tree file are two slots for roots. Commit N writes slot N mod 2, so the other slot always
//! contains a complete root. The root is the valid slot with the larger commit number.

use crate::DecodeError;
use crate::checksum::{self, Salt};
use crate::ids::{Block, CommitNumber, Life, PoolUid, SegmentId, Sequence};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `HROOT`, read as bytes.
pub const ROOT_MAGIC: [u8; 8] = *b"HROOT\0\0\0";

/// Position and checksum of a node, and the entry of the ledger that last changed anything in the range of keys that the
/// node covers. The versions replace the paper's per-epoch bitmap of changed inodes (§3.4).
///
/// The version may be newer than that in the node's header. In this case the node after it became empty, and this node took
/// over its range of keys: the node itself did not change, but the range of its last child became larger.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct NodePointer {
    /// Block of the tree file; 0 is no node (block 0 is the superblock).
    pub block: Block,
    /// CRC-32C of the whole node.
    pub checksum: U32,
    /// Entry of the ledger that last changed the range of keys below.
    pub version: Sequence,
}

const _: () = assert!(size_of::<NodePointer>() == 16);

/// The root record.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Root {
    /// [`ROOT_MAGIC`].
    pub magic: [u8; 8],
    /// The pool.
    pub pool: PoolUid,
    /// CRC-32C of this structure with this field zero.
    pub checksum: U32,
    /// Levels of the tree: 1 if the root node is a leaf.
    pub height: U32,
    /// Number of this commit.
    pub commit: CommitNumber,
    /// The root node.
    pub node: NodePointer,
    /// Last entry of the ledger that is contained in the tree, by sequence.
    pub ledger_sequence: Sequence,
    /// Where in the ledger's ring the entry after it begins.
    pub ledger_position: U64,
    /// Inodes in the tree, orphans included.
    pub inodes: U64,
    /// Blocks of data segments that are in use.
    pub data_blocks: U64,
    /// Nodes of the tree.
    pub nodes: U64,
    /// Life of the chain in which the entry after `ledger_sequence` was written, if it does not begin a life.
    pub life: Life,
    /// Number of the next data segment. Numbers are never reused, because processes identify mapped segments by them.
    pub next_segment: SegmentId,
    /// 1 if an import made this commit, so that the ledger and the logs of the pool still belong to its former contents. The
    /// daemon that opens the pool creates them anew before it reads them. 2 if the pool gave its tree up to make room for an
    /// import: the tree is empty, ledger and logs are created anew in the same way, and no daemon leads with the pool before an
    /// import has replaced the tree. Otherwise 0.
    pub imported: U32,
    /// Zero.
    pub reserved: [u8; 28],
}

/// Value of [`Root::imported`]: an import made the commit.
pub const IMPORTED: u32 = 1;

/// Value of [`Root::imported`]: the pool gave its tree up, and an import has to replace it.
pub const GIVEN_UP: u32 = 2;

const _: () = assert!(size_of::<Root>() == 128);

impl Root {
    /// The bytes with magic and checksum, ready to be written into a slot.
    pub fn encode(mut self) -> [u8; size_of::<Root>()] {
        self.magic = ROOT_MAGIC;
        self.checksum = U32::new(0);
        self.checksum = U32::new(checksum::of(Salt::NONE, self.as_bytes()));
        zerocopy::transmute!(self)
    }

    /// Reads and checks a slot.
    ///
    /// # Errors
    /// `Truncated`, `Kind` (an empty slot), `Checksum`, `Field("pool")` (a root of another pool).
    pub fn decode(bytes: &[u8], pool: PoolUid) -> Result<Self, DecodeError> {
        let (found, _) = Self::read_from_prefix(bytes).map_err(|_| DecodeError::Truncated)?;
        if found.magic != ROOT_MAGIC {
            return Err(DecodeError::Kind);
        }
        let mut unsummed = found;
        unsummed.checksum = U32::new(0);
        if checksum::of(Salt::NONE, unsummed.as_bytes()) != found.checksum.get() {
            return Err(DecodeError::Checksum);
        }
        if found.pool != pool {
            return Err(DecodeError::Field("pool"));
        }
        Ok(found)
    }
}
