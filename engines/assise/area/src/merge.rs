//! New blocks of a file merged with the extents that are in the tree: those that lie near each other are brought there at
//! once, so that old extents are read once, in order, and new ones stored leaf by leaf.
//!
//! Guarantees: the extents that result are those that single changes, one block after the other, would leave; an extent
//! that does not change is not stored again.

use crate::AreaError;
use crate::batch::{Batch, Need};
use crate::space::Run;
use crate::view::decode_extent;
use format::node::{EXTENT_BLOCKS_MAX, EXTENT_UNWRITTEN, ExtentItem, ItemKind, Key};
use format::{BLOCK_BYTES, Block, InodeNumber, SegmentId};
use std::ops::{ControlFlow, Range};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

/// Bytes of items in a leaf of the tree, at least, but for leaves at the edges: sparse ones are joined.
const LEAF_BYTES_MIN: usize = BLOCK_BYTES / 4;

/// A block of a file that was written to its place.
#[derive(Clone, Copy)]
pub(crate) struct StoredBlock {
    /// Its number in the file.
    pub number: u64,
    pub segment: SegmentId,
    pub block: Block,
    pub checksum: u32,
}

/// An extent, or a part of one, whose checksums stand in a list of [`Pieces`].
#[derive(Clone, Copy)]
struct Piece {
    first: u64,
    blocks: u32,
    segment: SegmentId,
    block: Block,
    /// Where its checksums begin; none if it was allocated and never written.
    sums: Option<usize>,
    changed: bool,
}

impl Piece {
    fn end(&self) -> u64 {
        self.first + u64::from(self.blocks)
    }

    fn block_of(&self, number: u64) -> Block {
        Block::new(self.block.get() + (number - self.first) as u32)
    }

    /// The part that covers these blocks of the file.
    fn part(&self, range: Range<u64>) -> Self {
        Self {
            first: range.start,
            blocks: (range.end - range.start) as u32,
            block: self.block_of(range.start),
            sums: self.sums.map(|at| at + (range.start - self.first) as usize),
            ..*self
        }
    }

    /// Whether another goes on where it ends, in the file and in the segment, and both fit one extent.
    fn takes_in(&self, after: &Self) -> bool {
        let blocks_max = if self.sums.is_some() { EXTENT_BLOCKS_MAX } else { u32::MAX };
        self.end() == after.first
            && self.segment == after.segment
            && self.block.get() + self.blocks == after.block.get()
            && self.sums.is_some() == after.sums.is_some()
            && self.blocks.checked_add(after.blocks).is_some_and(|blocks| blocks <= blocks_max)
    }
}

/// Pieces in order, with their checksums one after the other.
#[derive(Default)]
struct Pieces {
    pieces: Vec<Piece>,
    sums: Vec<U32>,
}

impl Pieces {
    /// Adds an extent as it stands in the tree.
    fn push_item(&mut self, key: &Key, value: &[u8]) -> Result<(), AreaError> {
        let (item, sums) = decode_extent(key, value)?;
        let written = item.flags.get() & EXTENT_UNWRITTEN == 0;
        let at = written.then_some(self.sums.len());
        self.sums.extend(sums);
        let ExtentItem { segment, block, blocks, .. } = item;
        let piece =
            Piece { first: key.sub(), blocks: blocks.get(), segment, block, sums: at, changed: false };
        self.pieces.push(piece);
        Ok(())
    }

    /// Adds a piece with copies of its checksums, joined to the one before where they are one and either has changed.
    fn push(&mut self, piece: Piece, sums: &[U32]) {
        let at = self.sums.len();
        if piece.sums.is_some() {
            self.sums.extend_from_slice(sums);
        }
        match self.pieces.last_mut() {
            Some(last) if (last.changed || piece.changed) && last.takes_in(&piece) => {
                last.blocks += piece.blocks;
                last.changed = true;
            }
            _ => self.pieces.push(Piece { sums: piece.sums.map(|_| at), ..piece }),
        }
    }

    /// Adds a part of a piece of another list.
    fn push_part(&mut self, other: &Self, part: Piece) {
        let sums = part.sums.map_or(&[][..], |at| &other.sums[at..at + part.blocks as usize]);
        self.push(part, sums);
    }

    fn push_block(&mut self, new: &StoredBlock) {
        let StoredBlock { number: first, segment, block, checksum } = *new;
        let piece = Piece { first, blocks: 1, segment, block, sums: Some(0), changed: true };
        self.push(piece, &[U32::new(checksum)]);
    }

    /// The items of what has changed: their keys, and where in the bytes their values stand.
    fn changed_items(&self, inode: InodeNumber) -> (Vec<(Key, Range<usize>)>, Vec<u8>) {
        let (mut items, mut bytes) = (Vec::new(), Vec::new());
        for piece in self.pieces.iter().filter(|piece| piece.changed) {
            let item = ExtentItem {
                segment: piece.segment,
                block: piece.block,
                blocks: U32::new(piece.blocks),
                flags: U32::new(if piece.sums.is_some() { 0 } else { EXTENT_UNWRITTEN }),
            };
            let start = bytes.len();
            bytes.extend_from_slice(item.as_bytes());
            if let Some(at) = piece.sums {
                bytes.extend_from_slice(self.sums[at..at + piece.blocks as usize].as_bytes());
            }
            items.push((Key::new(inode.get(), ItemKind::Extent, piece.first), start..bytes.len()));
        }
        (items, bytes)
    }
}

impl Batch<'_> {
    /// Brings new blocks that lie near each other, in order, to the tree, in the place of what is there. Gives by how much
    /// the file's blocks grew.
    pub(crate) fn put_group(
        &mut self,
        inode: InodeNumber,
        group: &[StoredBlock],
        need: Need,
    ) -> Result<i64, AreaError> {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { return Ok(0) };
        // With the one before, which may go on in the first.
        let range = first.number.saturating_sub(1)..last.number + 1;
        let mut old = Pieces::default();
        self.view().scan_extents(inode, range.clone(), &mut |key, value| {
            old.push_item(key, value)?;
            if old.pieces.len() == 1 && old.pieces[0].end() <= range.start {
                old = Pieces::default();
            }
            Ok(ControlFlow::Continue(()))
        })?;
        let items = size_of::<Key>() + size_of::<ExtentItem>();
        let old_bytes = old.pieces.len() * items + size_of_val(&old.sums[..]);
        let leaves = group.len().min(old_bytes / LEAF_BYTES_MIN + 2);
        self.begin_extents(2 * group.len() as u64, u32::try_from(leaves).unwrap_or(u32::MAX / 8), need)?;
        let (merged, freed) = merge(&old, group);
        let mut replaced = 0;
        for run in freed {
            replaced += i64::from(run.blocks);
            self.free_run(inode, run);
        }
        self.replace(inode, &old, &merged)?;
        Ok(group.len() as i64 - replaced)
    }

    /// Stores the pieces that have changed, and takes out what begins where none of them does.
    fn replace(&mut self, inode: InodeNumber, old: &Pieces, merged: &Pieces) -> Result<(), AreaError> {
        let (items, bytes) = merged.changed_items(inode);
        let mut items = items.iter().map(|(key, range)| (*key, &bytes[range.clone()])).peekable();
        self.tree.put_in_order(&self.area.last.store, &mut items)?;
        let mut kept = merged.pieces.iter().map(|piece| piece.first).peekable();
        for first in old.pieces.iter().map(|piece| piece.first) {
            while kept.next_if(|kept| *kept < first).is_some() {}
            if kept.peek() != Some(&first) {
                self.remove(&Key::new(inode.get(), ItemKind::Extent, first))?;
            }
        }
        Ok(())
    }
}

/// The extents of a part of a file with new blocks in the place of old ones, and the blocks that gave way.
fn merge(old: &Pieces, group: &[StoredBlock]) -> (Pieces, Vec<Run>) {
    let (mut merged, mut freed) = (Pieces::default(), Vec::<Run>::new());
    let mut new = group.iter().peekable();
    for piece in &old.pieces {
        while let Some(new) = new.next_if(|new| new.number < piece.first) {
            merged.push_block(new);
        }
        let mut at = piece.first;
        while let Some(new) = new.next_if(|new| new.number < piece.end()) {
            if at < new.number {
                merged.push_part(old, Piece { changed: true, ..piece.part(at..new.number) });
            }
            merged.push_block(new);
            let block = piece.block_of(new.number);
            match freed.last_mut() {
                Some(run) if run.segment == piece.segment && run.block.get() + run.blocks == block.get() => {
                    run.blocks += 1;
                }
                _ => freed.push(Run { segment: piece.segment, block, blocks: 1 }),
            }
            at = new.number + 1;
        }
        if at < piece.end() {
            merged.push_part(old, Piece { changed: at > piece.first, ..piece.part(at..piece.end()) });
        }
    }
    new.for_each(|new| merged.push_block(new));
    (merged, freed)
}
