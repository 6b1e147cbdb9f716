//! First block of every pool file: kind of the file, its pool, and its size.

use crate::checksum::{self, Salt};
use crate::ids::{ChainNumber, PoolUid};
use crate::{BLOCK_BYTES, DecodeError};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `HEARTHFS`, read as bytes.
pub const MAGIC: [u8; 8] = *b"HEARTHFS";

/// Version of the layout of the whole pool. A program does not open a pool of another version.
pub const POOL_VERSION: u16 = 5;

/// Kind of a pool file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum FileKind {
    /// The shared area's tree: root slots, allocation map, nodes.
    Tree = 1,
    /// A data segment: allocation map, blocks.
    Segment = 2,
    /// An update log.
    Log = 3,
    /// The ledger.
    Ledger = 4,
    /// A register: state of attached programs ([`crate::register`]).
    Register = 5,
}

/// The superblock. With zeros behind it, it fills the first block of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Superblock {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`POOL_VERSION`].
    pub version: U16,
    /// A [`FileKind`].
    pub kind: U16,
    /// CRC-32C of this structure with this field zero.
    pub checksum: U32,
    /// The pool.
    pub pool: PoolUid,
    /// Number of the file among those of its kind: segment id, log uid, number of the register; 0 for tree and
    /// ledger.
    pub id: U64,
    /// Bytes of the whole file.
    pub file_bytes: U64,
    /// Owner of the contents: for a segment the user whose files are in it, for a log the user who writes it;
    /// [`OWNER_DAEMON`] for files that only the daemon uses.
    pub owner: U32,
    /// The chain of the pool's subtree.
    pub chain: ChainNumber,
    /// Creation time of tree and segments, in nanoseconds since 1970; otherwise 0.
    pub created_ns: U64,
    /// Depends on the kind. Tree: the maximal number of nodes. Segment: the commit before the first one that may
    /// refer to it, from which the commits of its map are counted. Log: its incarnation. Register: the boot of the
    /// machine. Ledger: 0.
    pub geometry: U64,
}

const _: () = assert!(size_of::<Superblock>() == 64);

/// No user: only the daemon maps the file.
pub const OWNER_DAEMON: u32 = u32::MAX;

impl Superblock {
    /// Encodes the block with its checksum, to be written at offset 0.
    pub fn encode(mut self) -> [u8; BLOCK_BYTES] {
        self.checksum = U32::new(0);
        self.checksum = U32::new(checksum::of(Salt::NONE, self.as_bytes()));
        let mut block = [0; BLOCK_BYTES];
        block[..size_of::<Self>()].copy_from_slice(self.as_bytes());
        block
    }

    /// Decodes and checks the first bytes of a pool file.
    ///
    /// # Errors
    /// `Truncated`, `Kind` (not a pool file), `Version`, `Checksum`, `Field("kind")` (another kind of pool file).
    pub fn decode(bytes: &[u8], kind: FileKind) -> Result<Self, DecodeError> {
        let (found, _) = Self::read_from_prefix(bytes).map_err(|_| DecodeError::Truncated)?;
        if found.magic != MAGIC {
            return Err(DecodeError::Kind);
        }
        if found.version.get() != POOL_VERSION {
            return Err(DecodeError::Version(found.version.get()));
        }
        let mut unsummed = found;
        unsummed.checksum = U32::new(0);
        if checksum::of(Salt::NONE, unsummed.as_bytes()) != found.checksum.get() {
            return Err(DecodeError::Checksum);
        }
        if found.kind.get() != kind as u16 {
            return Err(DecodeError::Field("kind"));
        }
        Ok(found)
    }
}
