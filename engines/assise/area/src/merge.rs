//! New blocks of a file merged with the extents that are in the tree: those that lie near each other are brought there at
//! once, so that old extents are read once, in order, and new ones stored leaf by leaf.
//!
//! Where that takes less of a leaf, written blocks that follow each other in the file and lie apart become a block
//! list, of at most [`LISTED_BLOCKS_MAX`] blocks from a multiple of that number to the next one; blocks of a list that
//! are overwritten are replaced in the list. A list becomes extents again where these take less than half of it.
//!
//! Guarantees: the tree describes each block as if the changes had been made one by one; an extent that does not change
//! is not stored again.

use crate::AreaError;
use crate::batch::{Batch, Need};
use crate::segment::Run;
use crate::stored::{Contents, StoredExtent, adjacent, list_head};
use format::node::{
    EXTENT_BLOCKS_MAX, EXTENT_UNWRITTEN, ExtentItem, ItemKind, Key, LISTED_BLOCKS_MAX, ListedBlock, Slot,
};
use format::{BLOCK_BYTES, Block, InodeNumber, SegmentId};
use std::ops::{ControlFlow, Range};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of items in a leaf of the tree, at least, but for leaves at the edges: sparse ones are joined.
const LEAF_BYTES_MIN: usize = BLOCK_BYTES / 4;

/// Fewer blocks that lie apart are no list.
const LISTED_BLOCKS_MIN: u64 = 16;
const LISTED_MAX: u64 = LISTED_BLOCKS_MAX as u64;

/// A block of a file that was written to its place.
#[derive(Clone, Copy)]
pub(crate) struct StoredBlock {
    /// Its number in the file.
    pub number: u64,
    pub segment: SegmentId,
    pub block: Block,
    pub checksum: u32,
}

/// An extent, or a part of one, of a list of [`Pieces`].
#[derive(Clone, Copy)]
struct Piece {
    first: u64,
    blocks: u32,
    /// Of blocks that lie together.
    segment: SegmentId,
    block: Block,
    about: About,
    changed: bool,
}

/// The known state of the blocks of a piece, and its index in the list of pieces.
#[derive(Clone, Copy, PartialEq, Eq)]
enum About {
    /// They were allocated and never written.
    Nothing,
    /// Where their checksums begin.
    Sums(usize),
    /// Where their places begin: they lie apart.
    Places(usize),
}

impl Piece {
    fn end(&self) -> u64 {
        self.first + u64::from(self.blocks)
    }

    fn sums(&self) -> Option<usize> {
        match self.about {
            About::Sums(at) => Some(at),
            About::Nothing | About::Places(_) => None,
        }
    }

    fn block_of(&self, number: u64) -> Block {
        Block::new(self.block.get() + (number - self.first) as u32)
    }

    /// The part that covers these blocks of the file. The blocks lie together.
    fn part(&self, range: Range<u64>) -> Self {
        let about = match self.about {
            About::Sums(at) => About::Sums(at + (range.start - self.first) as usize),
            about => about,
        };
        let (blocks, block) = ((range.end - range.start) as u32, self.block_of(range.start));
        Self { first: range.start, blocks, block, about, ..*self }
    }

    /// Whether another goes on where it ends, in the file and in the segment, and both fit one extent.
    fn takes_in(&self, after: &Self) -> bool {
        let blocks_max = match (self.about, after.about) {
            (About::Sums(_), About::Sums(_)) => EXTENT_BLOCKS_MAX,
            (About::Nothing, About::Nothing) => u32::MAX,
            _ => return false,
        };
        self.end() == after.first
            && self.segment == after.segment
            && self.block.get() + self.blocks == after.block.get()
            && self.blocks.checked_add(after.blocks).is_some_and(|blocks| blocks <= blocks_max)
    }
}

/// Pieces in order, with their checksums one after the other, and the places of those that lie apart.
#[derive(Default)]
struct Pieces {
    pieces: Vec<Piece>,
    sums: Vec<U32>,
    places: Vec<ListedBlock>,
}

impl Pieces {
    /// Adds an extent as it stands in the tree.
    fn push_stored(&mut self, stored: &StoredExtent<'_>) {
        let (segment, block, about) = match stored.contents {
            Contents::Unwritten(segment, block) => (segment, block, About::Nothing),
            Contents::Written(segment, block, sums) => {
                self.sums.extend_from_slice(sums);
                (segment, block, About::Sums(self.sums.len() - sums.len()))
            }
            Contents::Listed(list) => {
                self.places.extend_from_slice(list);
                (SegmentId::new(0), Block::new(0), About::Places(self.places.len() - list.len()))
            }
        };
        let (first, blocks) = (stored.first, stored.blocks);
        self.pieces.push(Piece { first, blocks, segment, block, about, changed: false });
    }

    /// Adds a piece with copies of its checksums, joined to the one before where they are one and either has changed.
    fn push(&mut self, piece: Piece, sums: &[U32]) {
        let about = match piece.about {
            About::Sums(_) => About::Sums(self.sums.len()),
            about => about,
        };
        self.sums.extend_from_slice(sums);
        match self.pieces.last_mut() {
            Some(last) if (last.changed || piece.changed) && last.takes_in(&piece) => {
                last.blocks += piece.blocks;
                last.changed = true;
            }
            _ => self.pieces.push(Piece { about, ..piece }),
        }
    }

    /// Adds a part of a piece of another list, whose blocks lie together.
    fn push_part(&mut self, other: &Self, part: Piece) {
        let sums = part.sums().map_or(&[][..], |at| &other.sums[at..at + part.blocks as usize]);
        self.push(part, sums);
    }

    fn push_block(&mut self, new: &StoredBlock) {
        let StoredBlock { number: first, segment, block, checksum } = *new;
        let piece = Piece { first, blocks: 1, segment, block, about: About::Sums(0), changed: true };
        self.push(piece, &[U32::new(checksum)]);
    }

    /// Adds the blocks of a list as extents.
    fn push_apart(&mut self, first: u64, list: &[ListedBlock]) {
        for (number, listed) in (first..).zip(list) {
            let ListedBlock { segment, block, checksum } = *listed;
            self.push_block(&StoredBlock { number, segment, block, checksum: checksum.get() });
        }
    }

    /// Makes lists of blocks that lie apart, where something has changed and that takes less of a leaf.
    fn list_blocks(&mut self) {
        if !self.pieces.iter().any(|piece| piece.changed) {
            return;
        }
        let pieces = std::mem::take(&mut self.pieces);
        let (mut index, mut rest) = (0, None);
        while let Some(piece) = rest.or_else(|| pieces.get(index).copied()) {
            let end = (piece.first / LISTED_MAX + 1) * LISTED_MAX;
            let span = Span::of(piece, &pieces[index + 1..], end);
            if !span.is_list() {
                self.pieces.push(piece);
                (index, rest) = (index + 1, None);
                continue;
            }
            let about = About::Places(self.places.len());
            let parts = std::iter::once(piece).chain(pieces[index + 1..].iter().copied()).take(span.pieces);
            for part in parts {
                let at = part.sums().expect("only written blocks are listed");
                for number in part.first..part.end().min(span.end) {
                    let checksum = self.sums[at + (number - part.first) as usize];
                    let (segment, block) = (part.segment, part.block_of(number));
                    self.places.push(ListedBlock { segment, block, checksum });
                }
                rest = Some(part);
            }
            let blocks = (span.end - piece.first) as u32;
            let (segment, block) = (SegmentId::new(0), Block::new(0));
            self.pieces.push(Piece { first: piece.first, blocks, segment, block, about, changed: true });
            index += span.pieces;
            // Of the last one some may reach further: it is what comes next.
            rest = rest.filter(|last| last.end() > span.end).map(|last| {
                index -= 1;
                Piece { changed: true, ..last.part(span.end..last.end()) }
            });
        }
    }

    /// The items of what has changed: their keys, and where in the bytes their values stand.
    fn changed_items(&self, inode: InodeNumber) -> (Vec<(Key, Range<usize>)>, Vec<u8>) {
        let (mut items, mut bytes) = (Vec::new(), Vec::new());
        for piece in self.pieces.iter().filter(|piece| piece.changed) {
            let (blocks, length) = (U32::new(piece.blocks), piece.blocks as usize);
            let head = |flags| ExtentItem {
                segment: piece.segment,
                block: piece.block,
                blocks,
                flags: U32::new(flags),
            };
            let (head, behind) = match piece.about {
                About::Nothing => (head(EXTENT_UNWRITTEN), &[][..]),
                About::Sums(at) => (head(0), self.sums[at..at + length].as_bytes()),
                About::Places(at) => (list_head(blocks), self.places[at..at + length].as_bytes()),
            };
            let start = bytes.len();
            bytes.extend_from_slice(head.as_bytes());
            bytes.extend_from_slice(behind);
            items.push((Key::new(inode.get(), ItemKind::Extent, piece.first), start..bytes.len()));
        }
        (items, bytes)
    }

    /// Bytes of its items in leaves.
    fn bytes(&self) -> usize {
        let items = size_of::<Slot>() + size_of::<ExtentItem>();
        self.pieces.len() * items + size_of_val(&self.sums[..]) + size_of_val(&self.places[..])
    }
}

/// Written blocks that follow each other in a file, up to a bound.
struct Span {
    pieces: usize,
    first: u64,
    end: u64,
    changed: bool,
}

impl Span {
    /// Those of a piece and of the pieces behind it, up to a block of the file.
    fn of(piece: Piece, behind: &[Piece], end: u64) -> Self {
        let mut span = Self { pieces: 0, first: piece.first, end: piece.first, changed: false };
        for part in std::iter::once(&piece).chain(behind) {
            if part.sums().is_none() || part.first != span.end || part.first >= end {
                break;
            }
            span.pieces += 1;
            span.changed |= part.changed;
            span.end = part.end().min(end);
        }
        span
    }

    fn is_list(&self) -> bool {
        let blocks = self.end - self.first;
        self.changed
            && blocks >= LISTED_BLOCKS_MIN
            && bytes_apart(self.pieces as u64, blocks) > bytes_listed(blocks)
    }
}

/// Bytes of a leaf that so many extents of so many blocks take.
fn bytes_apart(extents: u64, blocks: u64) -> u64 {
    let item = (size_of::<Slot>() + size_of::<ExtentItem>()) as u64;
    extents * item + blocks * size_of::<U32>() as u64
}

/// The same of a list.
fn bytes_listed(blocks: u64) -> u64 {
    let item = (size_of::<Slot>() + size_of::<ExtentItem>()) as u64;
    item + blocks * size_of::<ListedBlock>() as u64
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
        // With the one before, which may go on in the first, and all that may be in a list with one of them.
        let start = first.number.saturating_sub(1) / LISTED_MAX * LISTED_MAX;
        let range = start..(last.number + 1).next_multiple_of(LISTED_MAX);
        let (mut old, mut left, mut lists) =
            (Pieces::default(), Vec::new(), Vec::<(Key, Range<usize>)>::new());
        let (mut next, mut passed) = (0, 0);
        let mut before = |end: u64| {
            let first = next;
            next += group[first..].iter().take_while(|new| new.number < end).count();
            first..next
        };
        self.view().scan_extents(inode, range.clone(), &mut |key, value| {
            let stored = StoredExtent::decode(key, value)?;
            if !matches!(stored.contents, Contents::Listed(_)) {
                if stored.end() > range.start {
                    old.push_stored(&stored);
                }
                return Ok(ControlFlow::Continue(()));
            }
            left.extend_from_slice(&group[before(stored.first)]);
            passed += value.len();
            // A list in which nothing is replaced stays as it is.
            let within = before(stored.end());
            if !within.is_empty() {
                lists.push((*key, within));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        left.extend_from_slice(&group[before(u64::MAX)]);
        self.change_lists(inode, &lists, group, need)?;
        self.put_apart(inode, (&old, passed), &left, need)
    }

    /// Changes block lists where they stand: each gets a range of the blocks.
    fn change_lists(
        &mut self,
        inode: InodeNumber,
        lists: &[(Key, Range<usize>)],
        blocks: &[StoredBlock],
        need: Need,
    ) -> Result<(), AreaError> {
        if lists.is_empty() {
            return Ok(());
        }
        self.begin_extents(0, u32::try_from(lists.len()).unwrap_or(u32::MAX / 8), need)?;
        let (mut freed, mut dense) = (Vec::new(), Vec::new());
        let mut keys = lists.iter().map(|(key, within)| (*key, (*key, within.clone()))).peekable();
        self.tree.change_in_order(&self.area.last.store, &mut keys, &mut |(key, within), value| {
            let list = <[ListedBlock]>::mut_from_bytes(&mut value[size_of::<ExtentItem>()..]);
            let list = list.expect("the item was decoded before");
            let mut touches = false;
            for new in &blocks[within] {
                let at = (new.number - key.sub()) as usize;
                give_way(&mut freed, list[at].segment, list[at].block);
                let StoredBlock { segment, block, checksum, .. } = *new;
                list[at] = ListedBlock { segment, block, checksum: U32::new(checksum) };
                let around = &list[at.saturating_sub(1)..list.len().min(at + 2)];
                touches |= adjacent(around).count() < around.len();
            }
            if touches && is_extents(list) {
                dense.push(key);
            }
        })?;
        freed.into_iter().for_each(|run| self.free_run(inode, run));
        for key in dense {
            let value = self.view().get(&key)?.expect("it was just changed");
            let stored = StoredExtent::decode(&key, &value)?;
            let Contents::Listed(list) = stored.contents else { continue };
            let (mut old, mut extents) = (Pieces::default(), Pieces::default());
            old.push_stored(&stored);
            extents.push_apart(stored.first, list);
            self.replace(inode, &old, &extents)?;
        }
        Ok(())
    }

    /// Brings blocks to the tree that are in no list there, in the place of what is, between lists of so many bytes. Gives by
    /// how much the file's blocks grew.
    fn put_apart(
        &mut self,
        inode: InodeNumber,
        (old, list_bytes): (&Pieces, usize),
        group: &[StoredBlock],
        need: Need,
    ) -> Result<i64, AreaError> {
        if group.is_empty() {
            return Ok(0);
        }
        let leaves = (4 * group.len()).min((old.bytes() + list_bytes) / LEAF_BYTES_MIN + 2);
        self.begin_extents(2 * group.len() as u64, u32::try_from(leaves).unwrap_or(u32::MAX / 8), need)?;
        let (mut merged, freed) = merge(old, group);
        merged.list_blocks();
        let mut replaced = 0;
        for run in freed {
            replaced += i64::from(run.blocks);
            self.free_run(inode, run);
        }
        self.replace(inode, old, &merged)?;
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
            give_way(&mut freed, piece.segment, piece.block_of(new.number));
            at = new.number + 1;
        }
        if at < piece.end() {
            merged.push_part(old, Piece { changed: at > piece.first, ..piece.part(at..piece.end()) });
        }
    }
    new.for_each(|new| merged.push_block(new));
    (merged, freed)
}

/// Whether the blocks of a list take less than half of it as extents.
fn is_extents(list: &[ListedBlock]) -> bool {
    2 * bytes_apart(adjacent(list).count() as u64, list.len() as u64) <= bytes_listed(list.len() as u64)
}

/// Notes a block that gave way.
fn give_way(freed: &mut Vec<Run>, segment: SegmentId, block: Block) {
    match freed.last_mut() {
        Some(run) if run.segment == segment && run.block.get() + run.blocks == block.get() => run.blocks += 1,
        _ => freed.push(Run { segment, block, blocks: 1 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces of one block each, at these places.
    fn pieces(first: u64, places: impl IntoIterator<Item = u32>, changed: bool) -> Pieces {
        let mut pieces = Pieces::default();
        for (number, block) in (first..).zip(places) {
            let (segment, block, about) = (SegmentId::new(3), Block::new(block), About::Sums(0));
            let piece = Piece { first: number, blocks: 1, segment, block, about, changed };
            pieces.push(piece, &[U32::new(1000 + number as u32)]);
        }
        pieces
    }

    fn shape(pieces: &Pieces) -> Vec<(u64, u32, bool)> {
        let is_list = |piece: &Piece| matches!(piece.about, About::Places(_));
        pieces.pieces.iter().map(|piece| (piece.first, piece.blocks, is_list(piece))).collect()
    }

    #[test]
    fn changed_blocks_that_lie_apart_are_listed_up_to_a_multiple() {
        let apart = |count: u32| (0..count).map(|index| 500 - 2 * index);
        let mut found = pieces(40, apart(50), true);
        found.list_blocks();
        assert_eq!(shape(&found), [(40, 24, true), (64, 26, true)]);
        let listed = found.places[25];
        assert_eq!((listed.block.get(), listed.checksum.get()), (500 - 2 * 25, 1000 + 40 + 25));
        for (few, changed) in [(LISTED_BLOCKS_MIN as u32 - 1, true), (50, false)] {
            let mut left = pieces(0, apart(few), changed);
            left.list_blocks();
            assert_eq!(left.pieces.len(), few as usize);
        }
    }

    #[test]
    fn of_an_extent_that_reaches_further_the_rest_stays_one() {
        let mut found = pieces(64, (0..60).map(|index| 500 - 2 * index), true);
        let (segment, block, about) = (SegmentId::new(3), Block::new(9), About::Sums(0));
        let long = Piece { first: 124, blocks: 30, segment, block, about, changed: false };
        let sums: Vec<U32> = (0..30).map(U32::new).collect();
        found.push(long, &sums);
        found.list_blocks();
        assert_eq!(shape(&found), [(64, 64, true), (128, 26, false)]);
        let rest = found.pieces[1];
        assert!(rest.changed && rest.block.get() == 13);
        let at = rest.sums().unwrap();
        assert_eq!(found.sums[at].get(), 4);
    }

    #[test]
    fn a_list_whose_blocks_lie_together_becomes_an_extent() {
        let listed = |block: u32| {
            let (segment, checksum) = (SegmentId::new(3), U32::new(block));
            ListedBlock { segment, block: Block::new(block), checksum }
        };
        let together: Vec<_> = (100..164).map(listed).collect();
        let apart: Vec<_> = (0..64).map(|index| listed(300 - index)).collect();
        let pairs: Vec<_> = (0..64).map(|index| listed(3 * (index / 2) + index % 2)).collect();
        assert!(is_extents(&together) && !is_extents(&apart) && !is_extents(&pairs));
        let mut found = Pieces::default();
        found.push_apart(64, &together);
        assert_eq!(shape(&found), [(64, 64, false)]);
    }
}
