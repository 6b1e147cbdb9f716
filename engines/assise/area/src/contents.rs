//! Records that change what is in a file: write, truncate, allocate, punch a hole.
//!
//! Bytes behind the end of a file are never kept: the rest of its last block is zeros, and what was allocated
//! behind it is unwritten. So a file that grows reads zeros, whatever stood there before.

use crate::AreaError;
use crate::Refused;
use crate::batch::{Applied, Applying, Batch, Need};
use crate::extents::{BlockPlacement, How, at_index};
use crate::view::FILE_BLOCKS_MAX;
use format::node::InodeItem;
use format::record::{FILE_BYTES_MAX, FileType};
use format::{BLOCK_BYTES, InodeNumber};
use std::ops::Range;
use zerocopy::little_endian::{I64, U64};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Old contents of the blocks at the edges of a change, loaded before anything is changed.
type Edges = Vec<(u64, Box<[u8; BLOCK_BYTES]>)>;

impl Batch<'_> {
    /// The inode that a record names, if it is there; `None` if it has seen the record.
    pub(crate) fn inode_for(
        &self,
        inode: InodeNumber,
        applying: &Applying<'_>,
    ) -> Result<Option<InodeItem>, AreaError> {
        let item = self.view().inode(inode)?.ok_or(Refused::NoInode(inode))?;
        Ok(applying.is_new_to(inode, &item).then_some(item))
    }

    pub(crate) fn file_for(
        &self,
        inode: InodeNumber,
        applying: &Applying<'_>,
    ) -> Result<Option<InodeItem>, AreaError> {
        let item = self.inode_for(inode, applying)?;
        match item.map(|item| FileType::of_mode(item.mode.get())) {
            None | Some(Some(FileType::Regular)) => Ok(item),
            Some(Some(FileType::Directory)) => Err(Refused::IsDirectory.into()),
            Some(_) => Err(Refused::WrongType.into()),
        }
    }

    /// Stores a file's inode after a change of its contents.
    fn put_changed(
        &mut self,
        inode: InodeNumber,
        mut item: InodeItem,
        grown: i64,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let time = I64::new(applying.time_after(&item));
        (item.mtime_ns, item.ctime_ns) = (time, time);
        item.stamp = applying.stamp(inode);
        item.blocks = grow(item.blocks, grown);
        self.root.data_blocks = grow(self.root.data_blocks, grown);
        self.put_inode(inode, &item)?;
        Ok(Applied::Done)
    }

    pub(crate) fn write(
        &mut self,
        inode: InodeNumber,
        offset: u64,
        bytes: &[u8],
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let end = end_of(offset, bytes.len() as u64)?;
        let Some(mut item) = self.file_for(inode, applying)? else { return Ok(Applied::Stale) };
        let mut grown = 0;
        if bytes.is_empty() {
            self.begin_change(1, 0, Need::Shrinking)?;
        } else {
            let edges = self.load_edges(inode, offset..end)?;
            let places = self.place(inode, blocks_touched(offset..end), applying.owner, applying.need())?;
            self.begin_places(&places, applying.need())?;
            grown = self.write_places(inode, offset, bytes, &places, edges)?;
            item.size = U64::new(item.size.get().max(end));
        }
        let applied = self.put_changed(inode, item, grown, applying)?;
        if self.pending.len() > self.area.limits.batch_blocks_max {
            self.flush()?;
        }
        Ok(applied)
    }

    /// Old contents of the first and the last block of a range of bytes, where it covers them in part.
    fn load_edges(&mut self, inode: InodeNumber, range: Range<u64>) -> Result<Edges, AreaError> {
        let mut edges = Vec::new();
        let blocks = blocks_touched(range.clone());
        let mut wanted = vec![blocks.start, blocks.end - 1];
        wanted.dedup();
        for block in wanted {
            let covered = range.start <= block * BLOCK && (block + 1) * BLOCK <= range.end;
            if !covered {
                let old = self.load_block(inode, block)?;
                edges.push((block, old.unwrap_or_else(|| Box::new([0; BLOCK_BYTES]))));
            }
        }
        Ok(edges)
    }

    /// Writes bytes to the places found for them. Gives by how much the file's blocks grew.
    fn write_places(
        &mut self,
        inode: InodeNumber,
        offset: u64,
        bytes: &[u8],
        places: &[BlockPlacement],
        mut edges: Edges,
    ) -> Result<i64, AreaError> {
        let mut grown = 0;
        for (block, edge) in &mut edges {
            let block_at = *block * BLOCK;
            let (from, to) = (offset.max(block_at), (offset + bytes.len() as u64).min(block_at + BLOCK));
            let source = &bytes[(from - offset) as usize..(to - offset) as usize];
            edge[(from - block_at) as usize..(to - block_at) as usize].copy_from_slice(source);
        }
        for place in places {
            let range = place.range();
            let mut checksums = vec![0; place.run.blocks as usize];
            let mut whole = range.clone();
            let mut kept = Vec::new();
            for (block, edge) in &edges {
                if range.contains(block) {
                    kept.push((*block, at_index(place.run, block - range.start), edge.clone()));
                    if *block == whole.start {
                        whole.start += 1;
                    } else {
                        whole.end -= 1;
                    }
                }
            }
            if !whole.is_empty() {
                let at = (whole.start * BLOCK - offset) as usize;
                let length = ((whole.end - whole.start) * BLOCK) as usize;
                let mut run = at_index(place.run, whole.start - range.start);
                run.blocks = (whole.end - whole.start) as u32;
                let sums = self.write_whole(inode, whole.start, run, &bytes[at..at + length]);
                let index = (whole.start - range.start) as usize;
                checksums[index..index + sums.len()].copy_from_slice(&sums);
            }
            grown += self.install(inode, place, &checksums)?;
            for (block, at, edge) in kept {
                self.keep(inode, block, at, edge);
            }
        }
        Ok(grown)
    }

    pub(crate) fn truncate(
        &mut self,
        inode: InodeNumber,
        size: u64,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        end_of(size, 0)?;
        let Some(mut item) = self.file_for(inode, applying)? else { return Ok(Applied::Stale) };
        let mut grown = 0;
        if size <= item.size.get() {
            let block_end = size.div_ceil(BLOCK);
            let zeroed = size..item.size.get().min(block_end * BLOCK);
            let zeroings = self.begin_zeroing(inode, std::slice::from_ref(&zeroed), applying)?;
            grown += self.zero(inode, zeroings)?;
            grown -= self.cut(inode, block_end..FILE_BLOCKS_MAX, true)?;
            self.heal(inode, block_end..FILE_BLOCKS_MAX);
        } else {
            self.begin_change(1, 0, Need::Shrinking)?;
        }
        item.size = U64::new(size);
        self.put_changed(inode, item, grown, applying)
    }

    /// Prepares to set ranges of bytes, each within a block of its own, to zero, and begins the change. A change that
    /// frees blocks may take from the reserve for the copies of these blocks.
    fn begin_zeroing(
        &mut self,
        inode: InodeNumber,
        ranges: &[Range<u64>],
        applying: &Applying<'_>,
    ) -> Result<Vec<Zeroing>, AreaError> {
        let mut zeroings: Vec<Zeroing> = Vec::new();
        let mut prepare = || {
            for range in ranges.iter().filter(|range| !range.is_empty()) {
                let block = range.start / BLOCK;
                if let Some(old) = self.load_block(inode, block)? {
                    let places = self.place(inode, block..block + 1, applying.owner, Need::Shrinking)?;
                    zeroings.push(Zeroing { range: range.clone(), places, old });
                }
            }
            self.begin_change(6, 6, Need::Shrinking)
        };
        if let Err(error) = prepare() {
            for zeroing in zeroings {
                self.give_back(&zeroing.places);
            }
            return Err(error);
        }
        Ok(zeroings)
    }

    fn zero(&mut self, inode: InodeNumber, zeroings: Vec<Zeroing>) -> Result<i64, AreaError> {
        let mut grown = 0;
        for Zeroing { range, places, old } in zeroings {
            let zeros = vec![0; (range.end - range.start) as usize];
            let block = range.start / BLOCK;
            grown += self.write_places(inode, range.start, &zeros, &places, vec![(block, old)])?;
        }
        Ok(grown)
    }

    pub(crate) fn punch(
        &mut self,
        inode: InodeNumber,
        offset: u64,
        bytes: u64,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let end = end_of(offset, bytes)?;
        let Some(item) = self.file_for(inode, applying)? else { return Ok(Applied::Stale) };
        // Behind the end of the file there is nothing that a partly covered block would have to keep.
        let end = if end >= item.size.get() { end.next_multiple_of(BLOCK) } else { end };
        let whole = offset.div_ceil(BLOCK)..end / BLOCK;
        let head_end = end.min(offset.next_multiple_of(BLOCK));
        let tail_start = head_end.max(end / BLOCK * BLOCK);
        let zeroings = self.begin_zeroing(inode, &[offset..head_end, tail_start..end], applying)?;
        let mut grown = self.zero(inode, zeroings)?;
        if !whole.is_empty() {
            grown -= self.cut(inode, whole.clone(), true)?;
            self.heal(inode, whole);
        }
        self.put_changed(inode, item, grown, applying)
    }

    pub(crate) fn allocate(
        &mut self,
        inode: InodeNumber,
        offset: u64,
        bytes: u64,
        keep_size: bool,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let end = end_of(offset, bytes)?;
        let Some(mut item) = self.file_for(inode, applying)? else { return Ok(Applied::Stale) };
        let blocks = blocks_touched(offset..end);
        let holes = self.holes(inode, blocks)?;
        let wanted = holes.iter().map(|hole| hole.end - hole.start).sum();
        self.check_room(wanted, applying.owner, applying.need())?;
        let mut places = Vec::new();
        for hole in holes {
            if let Err(error) = self.place_new(hole, applying.owner, &mut places) {
                self.give_back(&places);
                return Err(error);
            }
        }
        let leaves = u32::try_from(places.len() / 32).unwrap_or(u32::MAX / 4);
        if let Err(error) = self.begin_change(3, 2 * leaves + 2, applying.need()) {
            self.give_back(&places);
            return Err(error);
        }
        let mut grown = 0;
        for place in &places {
            assert!(place.how == How::New, "holes are filled with new blocks");
            self.install_unwritten(inode, place)?;
            grown += i64::from(place.run.blocks);
        }
        if !keep_size {
            item.size = U64::new(item.size.get().max(end));
        }
        self.put_changed(inode, item, grown, applying)
    }
}

/// Bytes within one block that become zeros: the places for the block, and what it held.
struct Zeroing {
    range: Range<u64>,
    places: Vec<BlockPlacement>,
    old: Box<[u8; BLOCK_BYTES]>,
}

/// The end of a range of bytes, if a file may reach so far.
pub(crate) fn end_of(offset: u64, bytes: u64) -> Result<u64, AreaError> {
    let end = offset.checked_add(bytes).filter(|end| *end <= FILE_BYTES_MAX);
    end.ok_or(Refused::TooLarge.into())
}

/// The blocks that hold any of these bytes.
pub(crate) fn blocks_touched(range: Range<u64>) -> Range<u64> {
    range.start / BLOCK..range.end.div_ceil(BLOCK)
}

pub(crate) fn grow(blocks: U64, by: i64) -> U64 {
    U64::new(blocks.get().checked_add_signed(by).expect("no more blocks are cut than were counted"))
}
