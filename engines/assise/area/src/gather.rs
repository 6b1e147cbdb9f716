//! Writes of a batch, gathered by file: their blocks go to new places at once, the extents come to the tree once a file,
//! in the order of its blocks. So a block that later records overwrite takes one place, neighbouring blocks become one
//! extent, and a file's item is read and stored once (Assise §3.2.1).
//!
//! A whole block is written where it will lie while the record is still in the processor's cache; a block that is written
//! in part is a page in memory until its file comes to the tree. The places are taken from a stock that is allocated ahead.
//!
//! Guarantees: records are judged and refused as if each were applied at once; whatever else is done to a file of which
//! writes are gathered finds them in the tree. Where there is no place for a block the record is applied to the tree,
//! which may write it where it lies. Room in the tree is looked for only when the extents come there: if there is too
//! little, the batch is [`AreaError::Overfull`], and is to be made again with fewer records, or without gathering.

use crate::AreaError;
use crate::batch::{Applied, Applying, Batch, Need};
use crate::contents::{blocks_touched, end_of, grow};
use crate::extents::write_page;
use crate::merge::StoredBlock;
use crate::segment::Run;
use format::checksum::{self, Salt};
use format::node::InodeItem;
use format::{BLOCK_BYTES, Block, InodeNumber, SegmentId};
use pmem::alloc::Fit;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use zerocopy::little_endian::{I64, U64};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// A longer write is not gathered: it is one extent by itself.
const BLOCKS_MAX: u64 = 16;

/// Blocks that are so far apart are looked up one by one: the extents between them would be read in vain. A leaf of the tree
/// describes about as many blocks.
const GAP_BLOCKS: u64 = 256;

/// Blocks of a file whose extents are held in memory at once, about.
const GROUP_BLOCKS: u64 = 4096;

/// Blocks that are allocated at once.
const STOCK_BLOCKS: u32 = 64;

/// The contents of one block.
pub(crate) type Page = [u8; BLOCK_BYTES];

/// Writes to one file.
pub(crate) struct Gathered {
    /// The file's item as the last of them leaves it, but for the number of its blocks.
    pub item: InodeItem,
    /// Blocks with new contents.
    blocks: NewBlocks,
    owner: u32,
    need: Need,
}

/// A block with new contents.
#[derive(Clone, Copy)]
struct NewBlock {
    segment: SegmentId,
    block: Block,
    content: Content,
}

/// The known contents of a new block.
#[derive(Clone, Copy)]
enum Content {
    /// Which of the batch's pages.
    Page(u32),
    /// It is written; its checksum.
    Written(u32),
}

/// New blocks of a file, in the order in which they came, and where each stands.
#[derive(Default)]
struct NewBlocks {
    blocks: Vec<(u64, NewBlock)>,
    /// A program chooses the numbers: the key of the hash is random.
    places: HashMap<u64, u32, foldhash::fast::RandomState>,
}

impl NewBlocks {
    fn get(&self, number: u64) -> Option<NewBlock> {
        match self.blocks.last() {
            Some((last, block)) if *last == number => Some(*block),
            _ => self.places.get(&number).map(|place| self.blocks[*place as usize].1),
        }
    }

    /// The block with this number; made by `make` if there is none yet.
    fn entry(&mut self, number: u64, make: impl FnOnce() -> NewBlock) -> &mut NewBlock {
        let last = self.blocks.len().wrapping_sub(1);
        let place = match self.blocks.last() {
            Some((found, _)) if *found == number => last,
            _ => {
                let next = u32::try_from(self.blocks.len()).expect("a batch has fewer blocks");
                let place = *self.places.entry(number).or_insert(next);
                if place == next {
                    self.blocks.push((number, make()));
                }
                place as usize
            }
        };
        &mut self.blocks[place].1
    }

    /// All of them, in the order of their numbers.
    fn in_order(self) -> Vec<(u64, NewBlock)> {
        let mut blocks = self.blocks;
        if !blocks.is_sorted_by_key(|(number, _)| *number) {
            blocks.sort_unstable_by_key(|(number, _)| *number);
        }
        blocks
    }
}

impl Gathered {
    fn new(item: InodeItem, applying: &Applying<'_>) -> Self {
        Self { item, blocks: NewBlocks::default(), owner: applying.owner, need: applying.need() }
    }
}

/// Blocks that were allocated and have no contents yet.
#[derive(Default)]
pub(crate) struct Stock {
    runs: VecDeque<Run>,
    blocks: u64,
    owner: u32,
    /// Taken without a promise.
    unpromised: bool,
}

impl Stock {
    /// The next block of the run that was allocated first.
    fn take(&mut self) -> (SegmentId, Block) {
        let run = self.runs.front_mut().expect("as many were allocated as are taken");
        let taken = (run.segment, run.block);
        run.block = Block::new(run.block.get() + 1);
        run.blocks -= 1;
        self.blocks -= 1;
        if run.blocks == 0 {
            self.runs.pop_front();
        }
        taken
    }
}

fn add_page(pages: &mut Vec<Page>, page: &Page) -> u32 {
    pages.push(*page);
    u32::try_from(pages.len() - 1).expect("a batch has fewer pages than a number has values")
}

impl Batch<'_> {
    /// From here on writes are gathered. An error `Overfull` of the batch may be for want of room that it would not need
    /// without.
    pub fn gather_writes(&mut self) {
        self.gathers = true;
    }

    /// Whether a write of so many bytes is gathered.
    pub(crate) fn gathers(&self, offset: u64, bytes: &[u8]) -> bool {
        let blocks = || offset.checked_add(bytes.len() as u64).map(|end| blocks_touched(offset..end));
        self.gathers
            && !bytes.is_empty()
            && blocks().is_some_and(|blocks| blocks.end - blocks.start <= BLOCKS_MAX)
    }

    /// Brings what was gathered for a file to the tree if a record takes its room from elsewhere.
    pub(crate) fn sync_unlike(
        &mut self,
        inode: InodeNumber,
        applying: &Applying<'_>,
    ) -> Result<(), AreaError> {
        let (owner, need) = (applying.owner, applying.need());
        match self.gathered.get(&inode) {
            Some(gathered) if (gathered.owner, gathered.need) != (owner, need) => self.sync_file(inode),
            _ => Ok(()),
        }
    }

    /// Takes a write.
    ///
    /// # Errors
    /// `NoSpace`, `BatchFull`: there is no place for a block; those of a record that is refused.
    pub(crate) fn gather(
        &mut self,
        inode: InodeNumber,
        offset: u64,
        bytes: &[u8],
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        let end = end_of(offset, bytes.len() as u64)?;
        let mut item = match self.gathered.get(&inode) {
            Some(gathered) if !applying.is_new_to(inode, &gathered.item) => return Ok(Applied::Stale),
            Some(gathered) => gathered.item,
            None => match self.file_for(inode, applying)? {
                Some(item) => item,
                None => return Ok(Applied::Stale),
            },
        };
        let blocks = blocks_touched(offset..end);
        let mut bases = [self.base(inode, blocks.start, (offset, end))?, None];
        if blocks.end - blocks.start > 1 {
            bases[1] = self.base(inode, blocks.end - 1, (offset, end))?;
        }
        self.stock_for(inode, blocks.clone(), end <= item.size.get(), applying)?;
        // Nothing can fail from here on.
        let time = I64::new(applying.time_after(&item));
        (item.mtime_ns, item.ctime_ns) = (time, time);
        item.stamp = applying.stamp(inode);
        item.size = U64::new(item.size.get().max(end));
        let gathered = self.gathered.entry(inode).or_insert_with(|| Gathered::new(item, applying));
        gathered.item = item;
        let [first_base, last_base] = bases;
        for block in blocks.clone() {
            let block_at = block * BLOCK;
            let (from, to) = (offset.max(block_at), end.min(block_at + BLOCK));
            let source = &bytes[(from - offset) as usize..(to - offset) as usize];
            let stock = &mut self.stock;
            let new = gathered.blocks.entry(block, || {
                let (segment, block) = stock.take();
                NewBlock { segment, block, content: Content::Written(0) }
            });
            if to - from == BLOCK {
                // Not a call of `heal`, which would borrow all of the batch.
                if let Some(is_damaged) = self.damaged.get_mut(&(inode, block)) {
                    *is_damaged = false;
                }
                self.area.space.write(new.segment, new.block, source);
                self.data_blocks += 1;
                let known = applying.block_sum.filter(|_| bytes.len() == BLOCK_BYTES);
                new.content = Content::Written(known.unwrap_or_else(|| checksum::of(Salt::NONE, source)));
                continue;
            }
            let page = match new.content {
                Content::Page(page) => page,
                Content::Written(_) => {
                    let base = if block == blocks.start { &first_base } else { &last_base };
                    add_page(&mut self.pages, base.as_deref().unwrap_or(&[0; BLOCK_BYTES]))
                }
            };
            let page_bytes = &mut self.pages[page as usize];
            page_bytes[(from - block_at) as usize..(to - block_at) as usize].copy_from_slice(source);
            new.content = Content::Page(page);
        }
        Ok(Applied::Done)
    }

    /// The present contents of a block that a write from an offset to an end covers in part, if they are in no page.
    /// None if they are zeros.
    fn base(
        &mut self,
        inode: InodeNumber,
        block: u64,
        (offset, end): (u64, u64),
    ) -> Result<Option<Box<Page>>, AreaError> {
        if offset <= block * BLOCK && (block + 1) * BLOCK <= end {
            return Ok(None);
        }
        match self.gathered.get(&inode).and_then(|gathered| gathered.blocks.get(block)) {
            None => self.load_block(inode, block),
            Some(NewBlock { content: Content::Page(_), .. }) => Ok(None),
            Some(new) => {
                let mut page = Box::new([0; BLOCK_BYTES]);
                let segment = self.area.space.file(new.segment);
                let found = segment.map_or(Ok(false), |segment| segment.read(new.block, &mut page[..]))?;
                assert!(found, "the block was written by this batch");
                Ok(Some(page))
            }
        }
    }

    /// Sees to it that there are as many blocks in stock as a write takes that was not gathered before.
    fn stock_for(
        &mut self,
        inode: InodeNumber,
        blocks: Range<u64>,
        replaces: bool,
        applying: &Applying<'_>,
    ) -> Result<(), AreaError> {
        let (count, need) = (blocks.end - blocks.start, applying.need());
        let stock = &self.stock;
        let fits = (stock.owner, stock.unpromised) == (applying.owner, need == Need::Growing);
        if fits && stock.blocks >= count {
            return Ok(());
        }
        let known = self.gathered.get(&inode).map_or(0, |gathered| {
            blocks.filter(|block| gathered.blocks.get(*block).is_some()).count() as u64
        });
        // Blocks that take the place of others lie apart anyway: each may go where others were freed.
        let fit = if replaces { Fit::Lowest } else { Fit::Run };
        self.stock_up(count - known, applying.owner, need, fit)
    }

    /// Sees to it that so many blocks are in stock, and some more. If there is no room for them nothing changes.
    fn stock_up(&mut self, wanted: u64, owner: u32, need: Need, fit: Fit) -> Result<(), AreaError> {
        let unpromised = need == Need::Growing;
        if (self.stock.owner, self.stock.unpromised) != (owner, unpromised) {
            self.end_stock();
            (self.stock.owner, self.stock.unpromised) = (owner, unpromised);
        }
        while self.stock.blocks < wanted {
            let missing = wanted - self.stock.blocks;
            let ahead = missing.max(STOCK_BLOCKS.into());
            let some = match self.check_room(ahead, owner, need) {
                Ok(()) => ahead,
                Err(_) => {
                    self.check_room(missing, owner, need)?;
                    missing
                }
            };
            let (mut left, mut failed) = (some, None);
            // The lowest blocks lie in short runs, of which some are taken for one look at the room.
            while left > 0 && failed.is_none() && (self.stock.blocks < wanted || fit == Fit::Lowest) {
                let blocks_max = u32::try_from(left).expect("a record touches few blocks");
                match self.area.space.allocate(owner, blocks_max, fit, self.made) {
                    Ok(run) => {
                        self.allocated.add(run);
                        left -= u64::from(run.blocks);
                        self.stock.blocks += u64::from(run.blocks);
                        self.stock.runs.push_back(run);
                    }
                    Err(error) => failed = Some(error),
                }
            }
            if unpromised {
                self.area.space.return_unpromised(left);
            }
            if let Some(error) = failed.filter(|_| self.stock.blocks < wanted) {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives back what is in stock.
    pub(crate) fn end_stock(&mut self) {
        if self.stock.unpromised {
            self.area.space.return_unpromised(self.stock.blocks);
        }
        for run in std::mem::take(&mut self.stock).runs.into_iter().rev() {
            self.allocated.remove(run);
            self.area.space.unallocate(run);
        }
    }

    /// Brings all writes that were gathered to the tree.
    ///
    /// # Errors
    /// `Overfull`; `Poisoned`; `Node`, `Item`, `Medium`.
    pub fn sync_writes(&mut self) -> Result<(), AreaError> {
        while let Some(inode) = self.gathered.keys().next().copied() {
            self.sync_file(inode)?;
        }
        Ok(())
    }

    /// Brings what was gathered for one file to the tree. If that fails the batch is broken.
    pub(crate) fn sync_file(&mut self, inode: InodeNumber) -> Result<(), AreaError> {
        let Some(gathered) = self.gathered.remove(&inode) else { return Ok(()) };
        // A batch that has as many nodes as it may takes what it took already.
        self.unbounded(|batch| batch.put_gathered(inode, gathered)).map_err(|error| {
            self.give_up();
            match error {
                AreaError::NoSpace | AreaError::BatchFull => AreaError::Overfull,
                error => error,
            }
        })
    }

    fn put_gathered(&mut self, inode: InodeNumber, gathered: Gathered) -> Result<(), AreaError> {
        let Gathered { mut item, blocks, owner: _, need } = gathered;
        let (mut grown, mut group) = (0, Vec::new());
        for (number, new) in blocks.in_order() {
            let checksum = match new.content {
                Content::Written(checksum) => checksum,
                Content::Page(page) => {
                    let (place, is_damaged) = ((new.segment, new.block), self.is_damaged(inode, number));
                    self.data_blocks += 1;
                    write_page(&mut self.area.space, place, &self.pages[page as usize], is_damaged)
                }
            };
            self.pending.remove(&(inode, number));
            let first = group.first().map_or(number, |first: &StoredBlock| first.number);
            let last = group.last().map_or(number, |last: &StoredBlock| last.number);
            if number - last > GAP_BLOCKS || number - first >= GROUP_BLOCKS {
                grown += self.put_group(inode, &group, need)?;
                group.clear();
            }
            group.push(StoredBlock { number, segment: new.segment, block: new.block, checksum });
        }
        grown += self.put_group(inode, &group, need)?;
        item.blocks = grow(item.blocks, grown);
        self.root.data_blocks = grow(self.root.data_blocks, grown);
        self.put_inode(inode, &item)
    }
}
