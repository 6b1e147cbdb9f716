//! The cached extents of a file in the shared area: one window of the file, as SharedFS described it. The window is
//! valid while the lease is held, the file's generation is unchanged, and all records that were dropped from the log
//! index are contained in it.

use format::call::{EXTENT_BY_CALL, ExtentReply};
use format::node::EXTENT_UNWRITTEN;
use format::{BLOCK_BYTES, Block, SegmentId, Sequence};
use std::ops::Range;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Limit of extents that are cached for one file.
const EXTENTS_MAX: usize = 4096;

/// The location of a run of a file's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Area {
    /// In a segment, from this byte on.
    Segment(SegmentId, u64),
    /// In a segment that the process may not map; read by calls.
    ByCall,
    /// Never written.
    Zero,
    /// Outside the window.
    Unknown,
}

#[derive(Clone, Copy, Debug)]
struct Extent {
    file_block: u64,
    blocks: u64,
    segment: SegmentId,
    block: Block,
    by_call: bool,
}

/// The window of cached extents.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    /// The window contains the blocks from this one to before `to`.
    from: u64,
    to: u64,
    extents: Vec<Extent>,
    /// Blocks that are reserved and not written, in order.
    unwritten: Vec<Range<u64>>,
    /// Lower half of the generation at which SharedFS described the window; none while the file has no data in the
    /// area.
    pub generation: Option<u32>,
    /// When its first part was described: the era, and how far own records were in the area by then. A reservation of blocks
    /// changes the window without another generation.
    pub as_of: (u64, Sequence),
}

impl Extents {
    /// The window of a file that is not in the area.
    pub fn nothing() -> Self {
        Self { to: u64::MAX, ..Self::default() }
    }

    /// Drops all extents.
    pub fn clear(&mut self) {
        (self.from, self.to, self.generation) = (0, 0, None);
        self.extents.clear();
        self.unwritten.clear();
    }

    /// Whether the file has this block, written or not; none if it is outside the window.
    pub fn has(&self, block: u64) -> Option<bool> {
        if block < self.from || block >= self.to {
            return None;
        }
        let written = self.extents.partition_point(|extent| extent.file_block + extent.blocks <= block);
        let unwritten = self.unwritten.partition_point(|range| range.end <= block);
        let is_written = self.extents.get(written).is_some_and(|extent| extent.file_block <= block);
        Some(is_written || self.unwritten.get(unwritten).is_some_and(|range| range.start <= block))
    }

    /// Adds a description of the blocks from `from` on.
    pub fn learn(
        &mut self,
        from: u64,
        covered_to: u64,
        (generation, as_of): (u32, (u64, Sequence)),
        replies: impl Iterator<Item = ExtentReply>,
    ) {
        let joins = self.generation == Some(generation)
            && from == self.to
            && self.extents.len() < EXTENTS_MAX
            && self.unwritten.len() < EXTENTS_MAX;
        if !joins {
            self.clear();
            (self.from, self.as_of) = (from, as_of);
        }
        self.generation = Some(generation);
        self.to = covered_to.max(from);
        for reply in replies {
            if reply.flags.get() & EXTENT_UNWRITTEN != 0 {
                let first = reply.file_block.get();
                self.unwritten.push(first..first + u64::from(reply.blocks.get()));
            } else {
                self.extents.push(Extent {
                    file_block: reply.file_block.get(),
                    blocks: u64::from(reply.blocks.get()),
                    segment: reply.segment,
                    block: reply.block,
                    by_call: reply.flags.get() & EXTENT_BY_CALL != 0,
                });
            }
        }
    }

    /// The location of the byte at `offset`, and the number of contiguous bytes from it on.
    pub fn find(&self, offset: u64) -> (Area, u64) {
        let block = offset / BLOCK;
        if block < self.from || block >= self.to {
            return (Area::Unknown, 0);
        }
        let bytes_to = |block: u64| block.saturating_mul(BLOCK) - offset;
        let index = self.extents.partition_point(|extent| extent.file_block + extent.blocks <= block);
        match self.extents.get(index) {
            Some(extent) if extent.file_block <= block => {
                let bytes = bytes_to(extent.file_block + extent.blocks);
                let within = offset - extent.file_block * BLOCK;
                let area = if extent.by_call {
                    Area::ByCall
                } else {
                    Area::Segment(extent.segment, u64::from(extent.block.get()) * BLOCK + within)
                };
                (area, bytes)
            }
            Some(extent) => (Area::Zero, bytes_to(extent.file_block.min(self.to))),
            None => (Area::Zero, bytes_to(self.to)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::little_endian::{U32, U64};

    const THEN: (u64, Sequence) = (1, Sequence::new(5));
    const LATER: (u64, Sequence) = (1, Sequence::new(9));

    fn reply(file_block: u64, block: u32, blocks: u32, flags: u32) -> ExtentReply {
        ExtentReply {
            file_block: U64::new(file_block),
            segment: SegmentId::new(3),
            block: Block::new(block),
            blocks: U32::new(blocks),
            flags: U32::new(flags),
        }
    }

    #[test]
    fn a_window_says_where_bytes_are() {
        let mut extents = Extents::default();
        assert_eq!(extents.find(0), (Area::Unknown, 0));
        let replies =
            [reply(2, 10, 2, 0), reply(5, 20, 1, EXTENT_UNWRITTEN), reply(6, 30, 1, EXTENT_BY_CALL)];
        extents.learn(1, 8, (7, THEN), replies.into_iter());
        assert_eq!(extents.find(0), (Area::Unknown, 0));
        assert_eq!(extents.find(BLOCK + 1), (Area::Zero, BLOCK - 1));
        assert_eq!(
            extents.find(3 * BLOCK + 5),
            (Area::Segment(SegmentId::new(3), 11 * BLOCK + 5), BLOCK - 5)
        );
        assert_eq!(extents.find(4 * BLOCK), (Area::Zero, 2 * BLOCK));
        assert_eq!(extents.find(6 * BLOCK), (Area::ByCall, BLOCK));
        assert_eq!(extents.find(7 * BLOCK), (Area::Zero, BLOCK));
        assert_eq!(extents.find(8 * BLOCK), (Area::Unknown, 0));
        assert_eq!(
            [1, 2, 4, 5, 6, 7].map(|block| extents.has(block)),
            [false, true, false, true, true, false].map(Some)
        );
        assert_eq!((extents.has(0), extents.has(8)), (None, None));
        extents.learn(8, u64::MAX, (7, LATER), [reply(9, 1, 1, 0)].into_iter());
        assert_eq!(extents.find(3 * BLOCK).0, Area::Segment(SegmentId::new(3), 11 * BLOCK), "it was joined");
        assert_eq!(extents.as_of, THEN, "the first part is as old as before");
        assert_eq!(extents.find(8 * BLOCK), (Area::Zero, BLOCK));
        extents.learn(0, 2, (8, LATER), [].into_iter());
        assert_eq!(extents.find(3 * BLOCK).0, Area::Unknown, "another generation begins anew");
        assert_eq!(extents.as_of, LATER);
    }
}
