//! The file of one data segment, as readers share it: its bytes, whose it is, and which of its blocks this process has
//! compared with their checksums.

use crate::AreaError;
use crate::space::{file_blocks, segment_file};
use crate::store::byte_of;
use format::node::SegmentItem;
use format::superblock::{FileKind, Superblock};
use format::{BLOCK_BYTES, Block, PoolUid, SegmentId};
use pmem::{MediaError, Medium, Region};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The segments that one commit names, with those that were made since.
pub(crate) type SegmentFiles = BTreeMap<SegmentId, Arc<SegmentFile>>;

/// The file of a segment.
pub(crate) struct SegmentFile {
    pub region: Region,
    /// Owner key of the files whose blocks it holds.
    pub owner: u32,
    /// A bit a block: this process wrote it, or compared it with its checksum. A bit says nothing of other memory, so
    /// that all accesses are relaxed.
    verified: Vec<AtomicU64>,
}

impl SegmentFile {
    /// A file of so many blocks, none of which was compared.
    pub fn new(region: Region, owner: u32, blocks: u32) -> Self {
        let words = (blocks as usize).div_ceil(u64::BITS as usize);
        Self { region, owner, verified: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Reads a data block; false if it lies outside of the file.
    pub fn read(&self, block: Block, bytes: &mut [u8]) -> Result<bool, AreaError> {
        if byte_of(block) + bytes.len() as u64 > self.region.bytes() {
            return Ok(false);
        }
        self.region.read(byte_of(block), bytes)?;
        Ok(true)
    }

    fn bit(&self, block: Block) -> Option<(&AtomicU64, u64)> {
        let word = self.verified.get((block.get() / u64::BITS) as usize)?;
        Some((word, 1 << (block.get() % u64::BITS)))
    }

    /// Whether a block holds what was written there, as far as this process knows.
    pub fn is_verified(&self, block: Block) -> bool {
        self.bit(block).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }

    /// A block was written, or compared with its checksum.
    pub fn set_verified(&self, block: Block) {
        if let Some((word, bit)) = self.bit(block) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Readers are to compare a block with its checksum.
    pub fn clear_verified(&self, block: Block) {
        if let Some((word, bit)) = self.bit(block) {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

/// Opens the file of a segment and compares it with what the tree says of it.
pub(crate) fn open_file(
    medium: &Medium,
    id: SegmentId,
    pool: PoolUid,
    item: &SegmentItem,
) -> Result<(Region, Superblock), AreaError> {
    let name = segment_file(id);
    let wrong = |field| AreaError::Superblock(name.clone(), format::DecodeError::Field(field));
    let region = match medium.open(&name) {
        Ok(region) => region,
        Err(MediaError::NotFound) => return Err(wrong("file")),
        Err(MediaError::Length) => return Err(wrong("file_bytes")),
        Err(error) => return Err(error.into()),
    };
    if region.bytes() < BLOCK_BYTES as u64 {
        return Err(AreaError::Superblock(name, format::DecodeError::Truncated));
    }
    let mut bytes = [0; BLOCK_BYTES];
    region.read(0, &mut bytes)?;
    let superblock = Superblock::decode(&bytes, FileKind::Segment)
        .map_err(|error| AreaError::Superblock(name.clone(), error))?;
    if superblock.pool != pool {
        return Err(wrong("pool"));
    }
    if superblock.id.get() != u64::from(id.get()) {
        return Err(wrong("id"));
    }
    if superblock.owner != item.owner {
        return Err(wrong("owner"));
    }
    let blocks = file_blocks(item.blocks.get()).map_or(0, u64::from);
    if superblock.file_bytes.get() != region.bytes() || region.bytes() != blocks * BLOCK_BYTES as u64 {
        return Err(wrong("file_bytes"));
    }
    Ok((region, superblock))
}
