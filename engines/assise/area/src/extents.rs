//! The extents of a file under change: where new blocks lie, what old ones give way, partly written blocks.

use crate::AreaError;
use crate::batch::{Batch, Need, Pending};
use crate::segment::Run;
use crate::snapshot::read_as_is;
use crate::space::Space;
use crate::stored::{Contents, StoredExtent};
use crate::view::Extent;
use format::checksum::{self, Salt};
use format::node::{EXTENT_BLOCKS_MAX, EXTENT_UNWRITTEN, ExtentItem, ItemKind, Key};
use format::{BLOCK_BYTES, Block, InodeNumber, SegmentId};
use pmem::alloc::Fit;
use std::ops::Range;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

/// Blocks of a file with the place where their new contents go.
pub(crate) struct BlockPlacement {
    /// First block of the file.
    pub first: u64,
    /// Where they go.
    pub run: Run,
    pub how: How,
}

/// The state of the blocks before.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// The blocks were just allocated.
    New,
    /// The file's own blocks, allocated and never written.
    Unwritten,
    /// The file's own blocks, written by this batch.
    Again,
}

impl BlockPlacement {
    /// The blocks of the file.
    pub fn range(&self) -> Range<u64> {
        self.first..self.first + u64::from(self.run.blocks)
    }
}

/// Extents that a change may find in the range that it touches before it is taken in several leaves.
const EXTENTS_A_LEAF: u64 = 6;

/// Data blocks that only a change which gives room back may take, for the copies of blocks that it cuts.
const SHRINKING_BLOCKS: u64 = 2;

/// Extents of a large file that are held in memory at once.
const EXTENTS_AT_ONCE: usize = 64;

impl Batch<'_> {
    /// Finds places for new contents of a range of a file: blocks of its own that no committed tree names as
    /// written, else new ones. If there is no room nothing is taken.
    pub(crate) fn place(
        &mut self,
        inode: InodeNumber,
        range: Range<u64>,
        owner: u32,
        need: Need,
    ) -> Result<Vec<BlockPlacement>, AreaError> {
        let mut places = Vec::new();
        let mut missing: Vec<Range<u64>> = Vec::new();
        let mut at = range.start;
        for extent in self.view().extents(inode, range.clone(), usize::MAX)? {
            let part = extent.part(extent.first.max(range.start)..extent.end().min(range.end));
            note_missing(&mut missing, at..part.first);
            at = part.end();
            self.split_part(&part, owner, &mut places, &mut missing);
        }
        note_missing(&mut missing, at..range.end);
        let wanted: u64 = missing.iter().map(|range| range.end - range.start).sum();
        self.check_room(wanted, owner, need)?;
        for range in missing {
            if let Err(error) = self.place_new(range, owner, &mut places) {
                self.give_back(&places);
                return Err(error);
            }
        }
        places.sort_by_key(|place| place.first);
        Ok(places)
    }

    /// Sorts the blocks of an extent by whether they can be written where they lie.
    fn split_part(
        &self,
        part: &Extent,
        owner: u32,
        places: &mut Vec<BlockPlacement>,
        missing: &mut Vec<Range<u64>>,
    ) {
        let whole = Run { segment: part.segment, block: part.block, blocks: part.blocks };
        let same_key = self.area.space.owner(part.segment) == Some(owner);
        let parts = match &part.checksums {
            None => vec![(whole, true)],
            Some(_) => self.written_here(whole),
        };
        let how = if part.checksums.is_none() { How::Unwritten } else { How::Again };
        for (run, may) in parts {
            let first = part.first + u64::from(run.block.get() - part.block.get());
            if may && same_key {
                places.push(BlockPlacement { first, run, how });
            } else {
                note_missing(missing, first..first + u64::from(run.blocks));
            }
        }
    }

    /// Which blocks of a run this batch may write where they lie, because no committed tree reads them.
    fn written_here(&self, run: Run) -> Vec<(Run, bool)> {
        let mut parts = Vec::new();
        for (part, allocated) in self.allocated.split(run) {
            if allocated {
                parts.push((part, true));
            } else {
                parts.extend(self.filled.split(part));
            }
        }
        parts
    }

    /// Refuses a change that would use the reserve of data blocks. Blocks that the batch itself has freed can be taken
    /// after its release.
    pub(crate) fn check_room(&mut self, wanted: u64, owner: u32, need: Need) -> Result<(), AreaError> {
        if wanted == 0 {
            return Ok(());
        }
        let space = &mut self.area.space;
        let reserve = match need {
            Need::Growing => self.area.limits.reserve_blocks.max(SHRINKING_BLOCKS),
            Need::Promised => SHRINKING_BLOCKS,
            Need::Shrinking => 0,
        };
        let fits = |room: u64| wanted.checked_add(reserve).is_some_and(|sum| sum <= room);
        if fits(space.room(owner)) && (need != Need::Growing || space.take_unpromised(wanted)) {
            return Ok(());
        }
        Err(if self.freed.is_empty() { AreaError::NoSpace } else { AreaError::BatchFull })
    }

    /// Allocates blocks for a range of a file.
    pub(crate) fn place_new(
        &mut self,
        range: Range<u64>,
        owner: u32,
        places: &mut Vec<BlockPlacement>,
    ) -> Result<(), AreaError> {
        let mut first = range.start;
        while first < range.end {
            let blocks_max = u32::try_from(range.end - first).unwrap_or(u32::MAX);
            let run = self.area.space.allocate(owner, blocks_max, Fit::Run, self.made)?;
            self.allocated.add(run);
            places.push(BlockPlacement { first, run, how: How::New });
            first += u64::from(run.blocks);
        }
        Ok(())
    }

    /// Gives back what was allocated for a change that does not happen.
    pub(crate) fn give_back(&mut self, places: &[BlockPlacement]) {
        for place in places.iter().filter(|place| place.how == How::New) {
            self.allocated.remove(place.run);
            self.area.space.recycle(place.run);
        }
    }

    /// Checks that there are nodes for new contents at these places, near each other; on an error they are given back.
    pub(crate) fn begin_places(&mut self, places: &[BlockPlacement], need: Need) -> Result<(), AreaError> {
        let blocks: u64 = places.iter().map(|place| u64::from(place.run.blocks)).sum();
        let extents = blocks.div_ceil(u64::from(EXTENT_BLOCKS_MAX)) + 2 * places.len() as u64;
        let begun = self.begin_extents(extents, 1, need);
        if begun.is_err() {
            self.give_back(places);
        }
        begun
    }

    /// Checks that there are nodes for so many more extents, which lie in so many parts of the tree.
    pub(crate) fn begin_extents(&mut self, extents: u64, parts: u32, need: Need) -> Result<(), AreaError> {
        let leaves = u32::try_from(extents.div_ceil(EXTENTS_A_LEAF)).unwrap_or(u32::MAX / 2);
        self.begin_change(2 + parts, 2 * leaves, need)
    }

    /// Makes a place part of the file with the given checksums, which are those of its blocks in order. Gives by
    /// how much the file's blocks grew.
    pub(crate) fn install(
        &mut self,
        inode: InodeNumber,
        place: &BlockPlacement,
        checksums: &[u32],
    ) -> Result<i64, AreaError> {
        let grown = match place.how {
            How::Again => {
                self.set_checksums(inode, place.first, checksums)?;
                return Ok(0);
            }
            How::Unwritten => {
                self.cut(inode, place.range(), false)?;
                self.fill(place.run);
                0
            }
            How::New => i64::from(place.run.blocks) - self.cut(inode, place.range(), true)?,
        };
        self.add_extent(inode, place, Some(checksums))?;
        Ok(grown)
    }

    /// Notes that blocks which were allocated and not written are written where they lie.
    pub(crate) fn fill(&mut self, blocks: Run) {
        for (run, allocated) in self.allocated.split(blocks) {
            if !allocated {
                self.filled.add(run);
            }
        }
    }

    /// Makes blocks that were allocated, and are not written, part of a file where it has a hole.
    pub(crate) fn install_unwritten(
        &mut self,
        inode: InodeNumber,
        place: &BlockPlacement,
    ) -> Result<(), AreaError> {
        self.add_extent(inode, place, None)
    }

    /// Adds an extent where there is none, and joins it to the one before if they are one.
    fn add_extent(
        &mut self,
        inode: InodeNumber,
        place: &BlockPlacement,
        checksums: Option<&[u32]>,
    ) -> Result<(), AreaError> {
        let run = place.run;
        let mut extent = Extent {
            first: place.first,
            blocks: run.blocks,
            segment: run.segment,
            block: run.block,
            checksums: checksums.map(<[u32]>::to_vec),
        };
        let before = match place.first.checked_sub(1) {
            None => Vec::new(),
            Some(last) => self.view().extent_items(inode, last..place.first, 1)?,
        };
        if let Some((key, value)) = before.first() {
            let before = StoredExtent::decode(key, value)?;
            // A list stays what it is.
            let is_list = matches!(before.contents, Contents::Listed(_));
            let before = before.extents(0..u64::MAX).next().filter(|_| !is_list);
            if let Some(joined) = before.and_then(|before| join(&before, &extent)) {
                extent = joined;
            }
        }
        let mut first = extent.first;
        while first < extent.end() {
            let blocks_max = if extent.checksums.is_some() { EXTENT_BLOCKS_MAX } else { u32::MAX };
            let end = extent.end().min(first + u64::from(blocks_max));
            self.put_extent(inode, &extent.part(first..end))?;
            first = end;
        }
        Ok(())
    }

    pub(crate) fn put_extent(&mut self, inode: InodeNumber, extent: &Extent) -> Result<(), AreaError> {
        let item = ExtentItem {
            segment: extent.segment,
            block: extent.block,
            blocks: U32::new(extent.blocks),
            flags: U32::new(if extent.checksums.is_some() { 0 } else { EXTENT_UNWRITTEN }),
        };
        let mut value = item.as_bytes().to_vec();
        for checksum in extent.checksums.iter().flatten() {
            value.extend_from_slice(&checksum.to_le_bytes());
        }
        self.put(Key::new(inode.get(), ItemKind::Extent, extent.first), &value)
    }

    /// Sets checksums of blocks that are part of the file and written.
    fn set_checksums(&mut self, inode: InodeNumber, first: u64, checksums: &[u32]) -> Result<(), AreaError> {
        let end = first + checksums.len() as u64;
        for (key, value) in self.view().extent_items(inode, first..end, usize::MAX)? {
            let extent = StoredExtent::decode(&key, &value)?;
            let (from, to) = (extent.first.max(first), extent.end().min(end));
            let sums = &checksums[(from - first) as usize..(to - first) as usize];
            self.put(key, &extent.value_with_sums(from, sums))?;
        }
        Ok(())
    }

    /// Makes a range of a file a hole; its blocks are freed if `free` says so, else they are the caller's. Gives how
    /// many there were.
    pub(crate) fn cut(
        &mut self,
        inode: InodeNumber,
        range: Range<u64>,
        free: bool,
    ) -> Result<i64, AreaError> {
        let mut blocks = 0;
        if free {
            let pending: Vec<_> = self.pending.range((inode, range.start)..(inode, range.end)).collect();
            let keys: Vec<_> = pending.into_iter().map(|(key, _)| *key).collect();
            for key in keys {
                self.pending.remove(&key);
            }
        }
        loop {
            let items = self.view().extent_items(inode, range.clone(), EXTENTS_AT_ONCE)?;
            let last = items.len() < EXTENTS_AT_ONCE;
            for (key, value) in items {
                let extent = StoredExtent::decode(&key, &value)?;
                let part = extent.first.max(range.start)..extent.end().min(range.end);
                self.cut_part(&key, &extent, &part)?;
                if free {
                    for found in extent.extents(part.clone()) {
                        let found = found.part(found.first.max(part.start)..found.end().min(part.end));
                        let Extent { segment, block, blocks, .. } = found;
                        self.free_run(inode, Run { segment, block, blocks });
                    }
                }
                blocks += (part.end - part.start) as i64;
            }
            if last {
                return Ok(blocks);
            }
        }
    }

    /// Leaves of an extent what lies before and behind a part.
    fn cut_part(&mut self, key: &Key, extent: &StoredExtent<'_>, part: &Range<u64>) -> Result<(), AreaError> {
        if extent.first < part.start {
            self.put(*key, &extent.value_of(extent.first..part.start))?;
        } else {
            self.remove(key)?;
        }
        if part.end < extent.end() {
            let behind = Key::new(key.object(), ItemKind::Extent, part.end);
            self.put(behind, &extent.value_of(part.end..extent.end()))?;
        }
        Ok(())
    }

    /// The holes of a file in a range.
    pub(crate) fn holes(&self, inode: InodeNumber, range: Range<u64>) -> Result<Vec<Range<u64>>, AreaError> {
        let mut holes = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let extents = self.view().extents(inode, at..range.end, EXTENTS_AT_ONCE)?;
            if extents.is_empty() {
                break;
            }
            for extent in extents {
                note_missing(&mut holes, at..extent.first.max(at));
                at = extent.end();
            }
        }
        note_missing(&mut holes, at..range.end.max(at));
        Ok(holes)
    }

    /// Frees blocks of a file: those that this batch allocated can be taken again by it.
    pub(crate) fn free_run(&mut self, inode: InodeNumber, run: Run) {
        if self.allocated.is_disjoint(run) && self.filled.is_disjoint(run) {
            self.freed.push(run);
            if self.freed_last != inode {
                (self.freed_last, _) = (inode, self.freed_of.insert(inode));
            }
            return;
        }
        for (run, allocated) in self.allocated.remove(run) {
            if allocated {
                self.area.space.recycle(run);
                continue;
            }
            self.filled.remove(run);
            self.freed.push(run);
            self.freed_of.insert(inode);
        }
    }

    /// The contents of a block of a file as the batch has left it; `None` if it reads as zeros. A damaged one is given
    /// as it is, and noted: a block that is made of it is written as damaged.
    pub(crate) fn load_block(
        &mut self,
        inode: InodeNumber,
        block: u64,
    ) -> Result<Option<Box<[u8; BLOCK_BYTES]>>, AreaError> {
        if let Some(pending) = self.pending.get(&(inode, block)) {
            return Ok(Some(pending.bytes.clone()));
        }
        let extents = self.view().extents(inode, block..block + 1, 1)?;
        match extents.first() {
            Some(extent) if extent.checksums.is_some() => {
                let (bytes, is_whole) = read_as_is(self.area.space.file(extent.segment), extent, block)?;
                if !is_whole {
                    self.damaged.insert((inode, block), true);
                }
                Ok(Some(bytes))
            }
            _ => Ok(None),
        }
    }

    /// Blocks of a file are replaced as a whole, or are no more.
    pub(crate) fn heal(&mut self, inode: InodeNumber, blocks: Range<u64>) {
        for is_damaged in self.damaged.range_mut((inode, blocks.start)..(inode, blocks.end)) {
            *is_damaged.1 = false;
        }
    }

    /// Whether a block of a file is made of one that is damaged.
    pub(crate) fn is_damaged(&self, inode: InodeNumber, block: u64) -> bool {
        self.damaged.get(&(inode, block)) == Some(&true)
    }

    /// Writes whole blocks where they belong; gives their checksums.
    pub(crate) fn write_whole(&mut self, inode: InodeNumber, first: u64, run: Run, bytes: &[u8]) -> Vec<u32> {
        self.heal(inode, first..first + u64::from(run.blocks));
        self.area.space.write(run.segment, run.block, bytes);
        self.data_blocks += u64::from(run.blocks);
        let blocks = bytes.chunks_exact(BLOCK_BYTES).zip(first..);
        let sums = blocks.map(|(block, number)| {
            self.pending.remove(&(inode, number));
            checksum::of(Salt::NONE, block)
        });
        sums.collect()
    }

    /// Keeps a partly written block in memory; its checksum follows when it is written out.
    pub(crate) fn keep(&mut self, inode: InodeNumber, block: u64, at: Run, bytes: Box<[u8; BLOCK_BYTES]>) {
        self.pending.insert((inode, block), Pending { segment: at.segment, block: at.block, bytes });
    }

    /// Writes out all partly written blocks.
    pub(crate) fn flush(&mut self) -> Result<(), AreaError> {
        for ((inode, number), pending) in std::mem::take(&mut self.pending) {
            let (place, is_damaged) = ((pending.segment, pending.block), self.is_damaged(inode, number));
            let checksum = write_page(&mut self.area.space, place, &pending.bytes, is_damaged);
            self.data_blocks += 1;
            self.set_checksums(inode, number, &[checksum])?;
        }
        Ok(())
    }
}

/// Writes a block that was made of an older one; gives its checksum. The rest of a damaged block may be anything: the
/// block gets a checksum that matches no contents.
pub(crate) fn write_page(
    space: &mut Space,
    (segment, block): (SegmentId, Block),
    page: &[u8; BLOCK_BYTES],
    is_damaged: bool,
) -> u32 {
    let checksum = checksum::of(Salt::NONE, page);
    if is_damaged {
        space.write_damaged(segment, block, page);
        return !checksum;
    }
    space.write(segment, block, page);
    checksum
}

/// Two extents as one, if the second goes on where the first ends, in the file and in the segment.
pub(crate) fn join(before: &Extent, after: &Extent) -> Option<Extent> {
    let follows = before.end() == after.first
        && before.segment == after.segment
        && before.block.get() + before.blocks == after.block.get();
    let blocks = before.blocks.checked_add(after.blocks)?;
    let checksums = match (&before.checksums, &after.checksums) {
        (None, None) => None,
        (Some(before), Some(after)) => Some([&before[..], &after[..]].concat()),
        _ => return None,
    };
    follows.then(|| Extent { blocks, checksums, ..before.clone() })
}

/// Adds a range to a list of ranges in order, joined to the last one where they touch.
fn note_missing(missing: &mut Vec<Range<u64>>, range: Range<u64>) {
    match missing.last_mut() {
        _ if range.is_empty() => {}
        Some(last) if last.end == range.start => last.end = range.end,
        _ => missing.push(range),
    }
}

/// A block of the segment within a run.
pub(crate) fn at_index(run: Run, index: u64) -> Run {
    let index = u32::try_from(index).expect("a run has at most 2^32 blocks");
    Run { block: Block::new(run.block.get() + index), blocks: 1, ..run }
}
