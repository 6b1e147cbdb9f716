//! Identifiers and layouts: the only definition of every structure that lies on a medium or passes from one process to
//! another.
//!
//! All integers are little-endian; no structure has implicit padding; decoding is total (any input gives a value
//! or an error). `docs/media-format.md` shows the same layouts, and a test compares it with these structs.

#![forbid(unsafe_code)]

mod attributes;
pub mod call;
pub mod checksum;
pub mod cluster;
pub mod envelope;
pub mod hash;
pub mod identity;
pub mod ids;
pub mod ledger;
pub mod locks;
pub mod map;
pub mod message;
pub mod mirror;
mod mirror_lists;
pub mod name;
pub mod node;
pub mod pass;
pub mod record;
pub mod register;
pub mod root;
pub mod session;
pub mod share;
pub mod superblock;
pub mod wire;

pub use envelope::{Envelope, FRAME_ALIGN, HEADER_BYTES};
pub use ids::{
    BeatVersion, Block, ChainNumber, ChangeNumber, CommitNumber, Epoch, Incarnation, InodeNumber,
    LeaseVersion, Life, LogUid, NodeId, PoolGeneration, PoolUid, SegmentId, Sequence, Stamp,
};
pub use name::{Cookie, Name, NameError};

/// Bytes of a block: the unit of data segments and of area nodes.
pub const BLOCK_BYTES: usize = 4096;

/// The reason for which bytes could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// Fewer bytes than the structure has, or than a length inside it requires.
    Truncated,
    /// The magic number or the kind is unknown.
    Kind,
    /// A version that this program does not know; the version found.
    Version(u16),
    /// The checksum does not match the bytes.
    Checksum,
    /// A field holds a value that no writer produces; the field's name.
    Field(&'static str),
}

impl std::fmt::Display for DecodeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Truncated => write!(f, "truncated"),
            Self::Kind => write!(f, "wrong magic or kind"),
            Self::Version(found) => write!(f, "unknown version {found}"),
            Self::Checksum => write!(f, "checksum mismatch"),
            Self::Field(name) => write!(f, "impossible value in field {name}"),
        }
    }
}

impl std::error::Error for DecodeError {}
