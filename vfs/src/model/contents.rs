//! Contents of a file of the model engine: blocks by number; an absent block is a hole.

use crate::engine::Extent;
use format::BLOCK_BYTES;
use std::collections::BTreeMap;
use std::sync::Arc;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// A block in use.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Block {
    /// Reserved, never written: reads as zeros, and counts as a hole.
    Reserved,
    /// Written.
    Data(Arc<[u8; BLOCK_BYTES]>),
}

/// Contents of a file. All bytes beyond the size are zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Contents {
    blocks: BTreeMap<u64, Block>,
}

impl Contents {
    /// Number of blocks in use.
    pub(super) fn block_count(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Fills `into` from `offset` on; the range must end within the file.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) {
        for (block, start, piece) in pieces(offset, into.len()) {
            let target = &mut into[piece.clone()];
            match self.blocks.get(&block) {
                Some(Block::Data(bytes)) => target.copy_from_slice(&bytes[start..start + piece.len()]),
                Some(Block::Reserved) | None => target.fill(0),
            }
        }
    }

    /// Number of blocks that a range needs beyond those in use.
    pub(super) fn blocks_missing(&self, offset: u64, bytes: u64) -> u64 {
        let (first, after) = (offset / BLOCK, (offset + bytes).div_ceil(BLOCK));
        (after - first) - self.blocks.range(first..after).count() as u64
    }

    /// Writes.
    pub(super) fn write(&mut self, offset: u64, from: &[u8]) {
        for (block, start, piece) in pieces(offset, from.len()) {
            let bytes = self.block_mut(block);
            bytes[start..start + piece.len()].copy_from_slice(&from[piece]);
        }
    }

    /// Reserves a range.
    pub(super) fn reserve(&mut self, offset: u64, bytes: u64) {
        for block in offset / BLOCK..(offset + bytes).div_ceil(BLOCK) {
            self.blocks.entry(block).or_insert(Block::Reserved);
        }
    }

    /// Makes a range a hole; the parts of blocks at its edges become zeros.
    pub(super) fn punch(&mut self, offset: u64, bytes: u64) {
        let end = offset + bytes;
        let (first_whole, after_whole) = (offset.div_ceil(BLOCK), end / BLOCK);
        if first_whole < after_whole {
            let mut inside = self.blocks.split_off(&first_whole);
            let mut behind = inside.split_off(&after_whole);
            self.blocks.append(&mut behind);
        }
        if !offset.is_multiple_of(BLOCK) {
            self.zero(offset, end.min(first_whole * BLOCK));
        }
        if !end.is_multiple_of(BLOCK) && after_whole >= first_whole {
            self.zero(after_whole * BLOCK, end);
        }
    }

    /// Drops everything from `size` on.
    pub(super) fn truncate(&mut self, size: u64) {
        self.blocks.split_off(&size.div_ceil(BLOCK));
        if !size.is_multiple_of(BLOCK) {
            self.zero(size, size.next_multiple_of(BLOCK));
        }
    }

    /// The first offset from `offset` on that is data or hole, in a file of this size.
    pub(super) fn extent(&self, offset: u64, size: u64, what: Extent) -> Option<u64> {
        if offset >= size {
            return None;
        }
        let is_data = |block: &u64| matches!(self.blocks.get(block), Some(Block::Data(_)));
        let first = offset / BLOCK;
        let found = match what {
            Extent::Data => {
                let (block, _) = self.blocks.range(first..).find(|(block, _)| is_data(block))?;
                *block
            }
            Extent::Hole => {
                let mut block = first;
                while is_data(&block) {
                    block += 1;
                }
                block
            }
        };
        let at = offset.max(found * BLOCK);
        match what {
            Extent::Data => (at < size).then_some(at),
            Extent::Hole => Some(at.min(size)),
        }
    }

    /// Zeros a part of one block, if it was written.
    fn zero(&mut self, from: u64, to: u64) {
        if let Some(Block::Data(bytes)) = self.blocks.get_mut(&(from / BLOCK)) {
            let start = (from % BLOCK) as usize;
            Arc::make_mut(bytes)[start..start + (to - from) as usize].fill(0);
        }
    }

    fn block_mut(&mut self, block: u64) -> &mut [u8; BLOCK_BYTES] {
        let slot = self.blocks.entry(block).or_insert(Block::Reserved);
        if *slot == Block::Reserved {
            *slot = Block::Data(Arc::new([0; BLOCK_BYTES]));
        }
        match slot {
            Block::Data(bytes) => Arc::make_mut(bytes),
            Block::Reserved => unreachable!("it was made data above"),
        }
    }
}

/// Cuts a range at the borders of blocks: block number, where in it, and which part of the buffer.
fn pieces(offset: u64, bytes: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == bytes {
            return None;
        }
        let at = offset + done as u64;
        let start = (at % BLOCK) as usize;
        let count = (BLOCK_BYTES - start).min(bytes - done);
        let piece = done..done + count;
        done += count;
        Some((at / BLOCK, start, piece))
    })
}
