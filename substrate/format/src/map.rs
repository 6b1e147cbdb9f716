//! Allocation maps: the blocks of a pool file that are in use, one bit for each block, in pages of their own.
//!
//! A file contains its map twice. Commit N writes the pages of slot N mod 2, so the map of the last synced root stays
//! intact until the next root is synced. A page that neither of the last two commits has changed is not written
//! again: the pages of a slot may come from different commits, all with the parity of the slot.

use crate::checksum::{self, Salt};
use crate::ids::CommitNumber;
use crate::{BLOCK_BYTES, DecodeError};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `HMAP`, read as bytes.
pub const MAP_MAGIC: [u8; 8] = *b"HMAP\0\0\0\0";

/// Version of the map pages.
pub const MAP_VERSION: u16 = 1;

/// Bytes of bits in a page.
pub const MAP_BITS_BYTES: usize = BLOCK_BYTES - 32;

/// Number of blocks that a page describes.
pub const MAP_PAGE_BLOCKS: u32 = MAP_BITS_BYTES as u32 * 8;

/// A page of an allocation map.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MapPage {
    /// [`MAP_MAGIC`].
    pub magic: [u8; 8],
    /// CRC-32C of this page with this field zero.
    pub checksum: U32,
    /// [`MAP_VERSION`].
    pub version: U16,
    /// Zero.
    pub reserved: U16,
    /// The commit that wrote the page.
    pub commit: CommitNumber,
    /// Index of the page in the map.
    pub page: U32,
    /// Number of blocks that the whole map describes.
    pub blocks: U32,
    /// Bit `b % 8` of byte `b / 8` is set if the page's block `b` is in use; bits beyond the last block are zero.
    pub bits: [u8; MAP_BITS_BYTES],
}

const _: () = assert!(size_of::<MapPage>() == BLOCK_BYTES);

impl MapPage {
    /// A page with no block in use, without a checksum.
    pub fn new(page: u32, blocks: u32) -> Self {
        let mut empty = Self::new_zeroed();
        empty.magic = MAP_MAGIC;
        empty.version = U16::new(MAP_VERSION);
        empty.page = U32::new(page);
        empty.blocks = U32::new(blocks);
        empty
    }

    /// Stamps the page with commit `commit`, and computes its checksum.
    pub fn seal(&mut self, commit: CommitNumber) {
        self.commit = commit;
        self.checksum = U32::new(0);
        self.checksum = U32::new(checksum::of(Salt::NONE, self.as_bytes()));
    }

    /// Decodes and checks a page.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Version`, `Checksum`, `Field("page")`, `Field("blocks")` (not the page or map expected).
    pub fn decode(bytes: &[u8], page: u32, blocks: u32) -> Result<Self, DecodeError> {
        let (mut found, _) = Self::read_from_prefix(bytes).map_err(|_| DecodeError::Truncated)?;
        if found.magic != MAP_MAGIC {
            return Err(DecodeError::Kind);
        }
        if found.version.get() != MAP_VERSION {
            return Err(DecodeError::Version(found.version.get()));
        }
        let stated = std::mem::replace(&mut found.checksum, U32::new(0));
        if checksum::of(Salt::NONE, found.as_bytes()) != stated.get() {
            return Err(DecodeError::Checksum);
        }
        found.checksum = stated;
        if found.page.get() != page {
            return Err(DecodeError::Field("page"));
        }
        if found.blocks.get() != blocks {
            return Err(DecodeError::Field("blocks"));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_comes_back_and_a_changed_one_does_not() {
        let mut page = MapPage::new(3, 100_000);
        page.bits[17] = 0xa5;
        page.seal(CommitNumber::new(9));
        assert_eq!(MapPage::decode(page.as_bytes(), 3, 100_000), Ok(page.clone()));
        assert_eq!(MapPage::decode(page.as_bytes(), 2, 100_000), Err(DecodeError::Field("page")));
        assert_eq!(MapPage::decode(page.as_bytes(), 3, 99_999), Err(DecodeError::Field("blocks")));
        page.bits[4000] ^= 1;
        assert_eq!(MapPage::decode(page.as_bytes(), 3, 100_000), Err(DecodeError::Checksum));
        assert_eq!(MapPage::decode(&[0; BLOCK_BYTES], 0, 1), Err(DecodeError::Kind));
        assert_eq!(MapPage::decode(&[], 0, 1), Err(DecodeError::Truncated));
    }
}
