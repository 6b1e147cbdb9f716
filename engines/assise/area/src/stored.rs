//! Extents as they stand in the tree: adjacent blocks with their checksums, or a list of blocks that lie apart.
//!
//! A list takes 12 bytes for a block, an extent of one block 44 with its key. So a file of which blocks were overwritten at
//! random needs a quarter of the nodes, of which each batch writes those that it touches ([`crate::merge`] makes the lists).

use crate::AreaError;
use crate::view::{Extent, FILE_BLOCKS_MAX};
use format::node::{EXTENT_LISTED, EXTENT_UNWRITTEN, ExtentItem, Key, LISTED_BLOCKS_MAX, ListedBlock};
use format::{Block, SegmentId};
use std::ops::Range;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

/// A checked extent of the tree.
#[derive(Clone, Copy)]
pub(crate) struct StoredExtent<'a> {
    /// First block of the file.
    pub first: u64,
    pub blocks: u32,
    pub contents: Contents<'a>,
}

/// Where its blocks lie.
#[derive(Clone, Copy)]
pub(crate) enum Contents<'a> {
    /// Together, from this block on; none of them was written.
    Unwritten(SegmentId, Block),
    /// Together, from this block on; their checksums.
    Written(SegmentId, Block, &'a [U32]),
    /// Each for itself.
    Listed(&'a [ListedBlock]),
}

impl<'a> StoredExtent<'a> {
    /// Takes an item apart.
    ///
    /// # Errors
    /// `Item`: a value that no writer produces.
    pub fn decode(key: &Key, value: &'a [u8]) -> Result<Self, AreaError> {
        let wrong = |what| AreaError::Item(*key, what);
        let (item, rest) = ExtentItem::ref_from_prefix(value).map_err(|_| wrong("length"))?;
        let ExtentItem { segment, block, blocks, flags } = *item;
        let (first, blocks) = (key.sub(), blocks.get());
        if blocks == 0 || first.checked_add(blocks.into()).is_none_or(|end| end > FILE_BLOCKS_MAX) {
            return Err(wrong("blocks"));
        }
        if block.get().checked_add(blocks).is_none() {
            return Err(wrong("block"));
        }
        let contents = match flags.get() {
            0 => {
                let sums = <[U32]>::ref_from_bytes(rest).map_err(|_| wrong("checksums"))?;
                Contents::Written(segment, block, sums)
            }
            EXTENT_UNWRITTEN => Contents::Unwritten(segment, block),
            EXTENT_LISTED => {
                let list = <[ListedBlock]>::ref_from_bytes(rest).map_err(|_| wrong("list"))?;
                if blocks > LISTED_BLOCKS_MAX || segment.get() != 0 || block.get() != 0 {
                    return Err(wrong("blocks"));
                }
                // All of them, without a branch for each.
                let is_beyond = |listed: &ListedBlock| listed.block.get() == u32::MAX;
                if list.iter().fold(false, |found, listed| found | is_beyond(listed)) {
                    return Err(wrong("block"));
                }
                Contents::Listed(list)
            }
            _ => return Err(wrong("flags")),
        };
        let found = Self { first, blocks, contents };
        if found.described() == rest.len() { Ok(found) } else { Err(wrong("checksums")) }
    }

    /// Bytes behind the head of the item.
    fn described(&self) -> usize {
        let blocks = self.blocks as usize;
        match self.contents {
            Contents::Unwritten(..) => 0,
            Contents::Written(..) => blocks * size_of::<U32>(),
            Contents::Listed(_) => blocks * size_of::<ListedBlock>(),
        }
    }

    /// The block of the file after its last.
    pub fn end(&self) -> u64 {
        self.first + u64::from(self.blocks)
    }

    /// Its blocks as extents of blocks that lie together: those that cover any of these blocks of the file.
    pub fn extents(&self, range: Range<u64>) -> impl Iterator<Item = Extent> + use<'a> {
        let Self { first, blocks, contents } = *self;
        let (mut together, mut list) = (None, &[][..]);
        let extent = |segment, block, checksums| Extent { first, blocks, segment, block, checksums };
        match contents {
            Contents::Unwritten(segment, block) => together = Some(extent(segment, block, None)),
            Contents::Written(segment, block, sums) => {
                let sums = sums.iter().map(|sum| sum.get()).collect();
                together = Some(extent(segment, block, Some(sums)));
            }
            Contents::Listed(listed) => list = listed,
        }
        let covers = move |of: &Range<u64>| of.start < range.end && range.start < of.end;
        let is_whole = covers(&(first..first + u64::from(blocks)));
        let apart = adjacent(list).filter_map(move |part| {
            let numbers = first + part.start as u64..first + part.end as u64;
            covers(&numbers).then(|| {
                let ListedBlock { segment, block, .. } = list[part.start];
                let sums = list[part.clone()].iter().map(|listed| listed.checksum.get()).collect();
                Extent {
                    first: numbers.start,
                    blocks: (part.end - part.start) as u32,
                    segment,
                    block,
                    checksums: Some(sums),
                }
            })
        });
        together.filter(|_| is_whole).into_iter().chain(apart)
    }

    /// The value of an item for some of its blocks, by their numbers in the file.
    pub fn value_of(&self, range: Range<u64>) -> Vec<u8> {
        assert!(self.first <= range.start && range.end <= self.end(), "the extent covers the blocks");
        let within = (range.start - self.first) as usize..(range.end - self.first) as usize;
        let blocks = U32::new(within.len() as u32);
        let moved = |block: Block| Block::new(block.get() + within.start as u32);
        let head = |segment, block, flags| ExtentItem { segment, block, blocks, flags: U32::new(flags) };
        let (head, rest) = match self.contents {
            Contents::Unwritten(segment, block) => (head(segment, moved(block), EXTENT_UNWRITTEN), &[][..]),
            Contents::Written(segment, block, sums) => {
                (head(segment, moved(block), 0), sums[within.clone()].as_bytes())
            }
            Contents::Listed(list) => (list_head(blocks), list[within.clone()].as_bytes()),
        };
        [head.as_bytes(), rest].concat()
    }

    /// The same extent with other checksums of some of its blocks, from one on.
    pub fn value_with_sums(&self, first: u64, checksums: &[u32]) -> Vec<u8> {
        let mut value = self.value_of(self.first..self.end());
        let (each, of_sum) = match self.contents {
            Contents::Unwritten(..) => panic!("the blocks are written"),
            Contents::Written(..) => (size_of::<U32>(), 0),
            Contents::Listed(_) => (size_of::<ListedBlock>(), size_of::<ListedBlock>() - size_of::<U32>()),
        };
        let mut at = size_of::<ExtentItem>() + (first - self.first) as usize * each + of_sum;
        for checksum in checksums {
            value[at..at + size_of::<U32>()].copy_from_slice(&checksum.to_le_bytes());
            at += each;
        }
        value
    }
}

/// The head of a list of so many blocks.
pub(crate) fn list_head(blocks: U32) -> ExtentItem {
    let (segment, block) = (SegmentId::new(0), Block::new(0));
    ExtentItem { segment, block, blocks, flags: U32::new(EXTENT_LISTED) }
}

/// Parts of a list whose blocks lie together, by their places in it.
pub(crate) fn adjacent(list: &[ListedBlock]) -> impl Iterator<Item = Range<usize>> + '_ {
    let follows = |last: &ListedBlock, next: &ListedBlock| {
        last.segment == next.segment && last.block.get() + 1 == next.block.get()
    };
    let mut end = 0;
    std::iter::from_fn(move || {
        let start = end;
        let mut last = list.get(start)?;
        end += 1;
        while let Some(next) = list.get(end).filter(|next| follows(last, next)) {
            (last, end) = (next, end + 1);
        }
        Some(start..end)
    })
}
