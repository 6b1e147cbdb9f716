//! One data segment: its file, which of its blocks are taken, and which hold what this process wrote.

use crate::AreaError;
use crate::segment_file::SegmentFile;
use crate::store::byte_of;
use format::{BLOCK_BYTES, Block, SegmentId};
use pmem::alloc::{BlockAllocator, CHUNK_BLOCKS, Fit};
use pmem::{MediaError, Medium, Region};
use std::ops::Range;
use std::sync::Arc;

/// Blocks that lie together in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub segment: SegmentId,
    pub block: Block,
    pub blocks: u32,
}

/// Where a segment may get space from that its file lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Supply {
    /// Nowhere.
    Nothing,
    /// From what is free on the medium.
    Free,
    /// Also from what the pool holds. `is_short`: the medium is known to have no space for a step.
    Held { is_short: bool },
}

/// One data segment.
pub(crate) struct Segment {
    pub file: Arc<SegmentFile>,
    /// Blocks that can hold data.
    pub blocks: u32,
    pub allocator: BlockAllocator,
    /// The map's commits are counted from here.
    pub base: u64,
    /// Allocated and given up by one batch: no tree ever named them, so the batch may take them again.
    pub recycled: Vec<Run>,
    /// Behind the last allocation, where the next one should go on.
    pub cursor: Option<Block>,
    /// Writes to the file that are known to be synced.
    pub synced_writes: u64,
    /// Blocks that were written and are not noted as verified yet: an atomic change of a bit waits until the stores
    /// before it have left the processor.
    unnoted: Vec<(Block, u32)>,
    /// Blocks that were written as damaged since these are kept.
    damaged: Vec<Block>,
    /// Blocks for which the file gets space at once.
    step_blocks: u32,
}

impl Segment {
    /// A segment whose map's commits are counted from `base`. Its file lacks space for the chunks that the allocator withholds.
    pub fn new(
        (region, owner): (Region, u32),
        (blocks, step_blocks): (u32, u32),
        allocator: BlockAllocator,
        base: u64,
    ) -> Self {
        let file = Arc::new(SegmentFile::new(region, owner, allocator.blocks()));
        let (recycled, cursor, synced_writes) = (Vec::new(), None, 0);
        let (unnoted, damaged) = (Vec::new(), Vec::new());
        Self { file, blocks, allocator, base, recycled, cursor, synced_writes, unnoted, damaged, step_blocks }
    }

    /// Gets space for more blocks of the file, if it has not space for all: for a step, or for a chunk of 64 blocks where the
    /// medium has little.
    fn provide(&mut self, medium: &Medium, supply: Supply) -> Result<(), AreaError> {
        let step = self.allocator.withheld(self.step_blocks);
        if step.is_empty() {
            return Ok(());
        }
        let place = |blocks: &Range<u32>| byte_of(Block::new(blocks.start))..byte_of(Block::new(blocks.end));
        let region = &self.file.region;
        let mut got = Err(MediaError::NoSpace);
        if matches!(supply, Supply::Free | Supply::Held { is_short: false }) {
            got = region.reserve(place(&step)).map(|()| step);
        }
        if got == Err(MediaError::NoSpace) {
            let chunk = self.allocator.withheld(CHUNK_BLOCKS);
            let part = place(&chunk);
            got = match supply {
                Supply::Nothing => got,
                Supply::Free => region.reserve(part).map(|()| chunk),
                Supply::Held { .. } => {
                    let bytes = part.end - part.start;
                    medium.with_held(bytes, || region.reserve(part.clone())).map(|()| chunk)
                }
            };
        }
        self.allocator.provide(got?);
        Ok(())
    }

    /// Gives back the space of free blocks, of about `blocks_max` at most; returns the bytes. Blocks that became free only just
    /// now keep theirs, because a program that read them before may be in the middle of that.
    ///
    /// # Errors
    /// `Medium`: the file system cannot do that.
    pub fn give_back(&mut self, blocks_max: u32) -> Result<u64, AreaError> {
        let mut given = 0;
        while given < blocks_max && self.recycled.is_empty() {
            let Some(idle) = self.allocator.idle_chunks(blocks_max - given) else { break };
            self.file.region.give_back(byte_of(Block::new(idle.start))..byte_of(Block::new(idle.end)))?;
            idle.clone().for_each(|block| self.file.clear_verified(Block::new(block)));
            given += idle.end - idle.start;
            self.cursor = None;
            self.allocator.withhold(idle);
        }
        Ok(byte_of(Block::new(given)))
    }

    /// Writes data into blocks that no committed tree names as written.
    pub fn write(&mut self, block: Block, bytes: &[u8]) {
        let blocks = bytes.len().div_ceil(BLOCK_BYTES) as u32;
        let written = || (block.get()..block.get() + blocks).map(Block::new);
        // A block that is verified was written or read by this process.
        if written().any(|block| self.file.is_verified(block)) {
            self.file.region.overwrite(byte_of(block), bytes);
        } else {
            self.file.region.fill(byte_of(block), bytes);
        }
        if written().all(|block| self.file.is_verified(block)) {
            return;
        }
        match self.unnoted.last_mut() {
            Some((first, count)) if first.get() + *count == block.get() => *count += blocks,
            _ => self.unnoted.push((block, blocks)),
        }
    }

    /// Writes a block of which a part was lost: readers compare it with its checksum, which it does not have.
    pub fn write_damaged(&mut self, block: Block, bytes: &[u8]) {
        self.file.region.write(byte_of(block), bytes);
        self.file.clear_verified(block);
        self.damaged.push(block);
    }

    /// Notes which blocks hold what was written there. A block that was ever written as damaged is left to its readers.
    pub fn note_verified(&mut self) {
        for (first, count) in self.unnoted.drain(..) {
            (first.get()..first.get() + count)
                .map(Block::new)
                .for_each(|block| self.file.set_verified(block));
        }
        self.damaged.drain(..).for_each(|block| self.file.clear_verified(block));
    }

    /// Whether there are blocks that lie together, or behind the last ones that were taken.
    pub fn has_run(&self) -> bool {
        !self.recycled.is_empty()
            || self.allocator.has_run(self.cursor)
            || self.allocator.withheld_blocks() > 0
    }

    /// Takes a run of at most so many blocks; none if all are taken.
    ///
    /// # Errors
    /// `Medium`: there is no space for more blocks of the file.
    pub fn allocate(
        &mut self,
        (blocks_max, fit): (u32, Fit),
        (medium, supply): (&Medium, Supply),
    ) -> Result<Option<(Block, u32)>, AreaError> {
        if let Some(run) = self.recycled.pop() {
            let blocks = run.blocks.min(blocks_max);
            if blocks < run.blocks {
                let block = Block::new(run.block.get() + blocks);
                self.recycled.push(Run { block, blocks: run.blocks - blocks, ..run });
            }
            return Ok(Some((run.block, blocks)));
        }
        let is_found = match fit {
            Fit::Run => self.allocator.has_run(self.cursor),
            Fit::Lowest => self.allocator.has_free(),
        };
        if !is_found {
            match self.provide(medium, supply) {
                // Short runs are left, perhaps.
                Err(AreaError::Medium(error)) if error.is_shortage() && self.allocator.has_free() => {}
                provided => provided?,
            }
        }
        let hint = if fit == Fit::Run { self.cursor } else { None };
        let Some((block, blocks)) = self.allocator.allocate(blocks_max, hint, fit) else { return Ok(None) };
        self.cursor = block.get().checked_add(blocks).map(Block::new);
        Ok(Some((block, blocks)))
    }

    /// Holds nothing, and nothing that a commit to come gives up.
    pub fn is_empty(&self) -> bool {
        self.recycled.is_empty() && self.allocatable() == self.blocks
    }

    /// Data blocks that can be taken.
    pub fn allocatable(&self) -> u32 {
        let recycled: u32 = self.recycled.iter().map(|run| run.blocks).sum();
        self.allocator.allocatable() + recycled
    }

    /// Data blocks for which the file has no space.
    pub fn unprovided(&self) -> u32 {
        self.allocator.withheld_blocks()
    }

    /// Data blocks in use.
    pub fn used(&self) -> u32 {
        let recycled: u32 = self.recycled.iter().map(|run| run.blocks).sum();
        let before_data = self.allocator.blocks() - self.blocks;
        self.allocator.used() - before_data - recycled
    }
}
