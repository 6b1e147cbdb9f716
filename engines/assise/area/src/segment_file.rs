//! The file of one data segment, as readers share it: its bytes, whose it is, and which of its blocks this process has
//! compared with their checksums.

use crate::AreaError;
use crate::segment::Supply;
use crate::store::byte_of;
use format::node::SegmentItem;
use format::superblock::{FileKind, Superblock};
use format::{BLOCK_BYTES, Block, PoolUid, SegmentId};
use pmem::alloc::{self, CHUNK_BLOCKS};
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

/// Name of a segment's file.
pub fn segment_file(segment: SegmentId) -> String {
    format!("segment-{segment}")
}

/// The segment whose file has this name.
pub(crate) fn segment_of_file(name: &str) -> Option<SegmentId> {
    let id = name.strip_prefix("segment-")?.parse().ok()?;
    (segment_file(SegmentId::new(id)) == name).then_some(SegmentId::new(id))
}

/// Blocks of superblock and map before the data of a segment with so many blocks in all.
pub(crate) fn blocks_before_data(file_blocks: u32) -> u32 {
    let map = alloc::bytes_needed(file_blocks) / BLOCK_BYTES as u64;
    1 + u32::try_from(map).expect("a map is smaller than its file")
}

/// Blocks of the whole file of a segment with so many data blocks.
pub(crate) fn file_blocks(data_blocks: u32) -> Option<u32> {
    // The map grows with the file that it stands in: a page for each 32,512 blocks, so two rounds are enough.
    let first = data_blocks.checked_add(blocks_before_data(data_blocks))?;
    let second = data_blocks.checked_add(blocks_before_data(first))?;
    data_blocks.checked_add(blocks_before_data(second))
}

/// Makes the file of a segment of so many blocks, of which so many stand before the data; gives the number of blocks that have space:
/// those of a step, or of few chunks where the medium has little.
pub(crate) fn create_file(
    medium: &Medium,
    name: &str,
    (in_file, before_data, step_blocks): (u32, u32, u32),
    supply: Supply,
) -> Result<(Region, u32), AreaError> {
    let bytes = |blocks: u32| u64::from(blocks) * BLOCK_BYTES as u64;
    let first = |step: u32| before_data.checked_next_multiple_of(step).unwrap_or(in_file).min(in_file);
    let (step, few) = (first(step_blocks.next_multiple_of(CHUNK_BLOCKS)), first(CHUNK_BLOCKS));
    let make = |provided| medium.create_in_steps(name, bytes(in_file), bytes(provided));
    if matches!(supply, Supply::Free | Supply::Held { is_short: false }) {
        match make(step) {
            Err(MediaError::NoSpace) => {}
            made => return Ok((made?, step)),
        }
    }
    let made = match supply {
        Supply::Held { .. } => medium.with_held(bytes(few), || make(few)),
        Supply::Free | Supply::Nothing => make(few),
    };
    Ok((made?, few))
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
