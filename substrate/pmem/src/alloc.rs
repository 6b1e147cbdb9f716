//! Block allocator of one file.
//!
//! The allocation map stands twice in the file ([`format::map`]): commit N writes slot N mod 2, so the map of the
//! last commit stays intact until the root of the next one is synced. A crash at any point finds a map that matches
//! its root. Only pages that one of the last two commits changed are written. In memory, the blocks that can be allocated
//! are a set of bits (`crate::free`).
//!
//! A block freed in a commit is free in that commit's map, but it is allocated again only after
//! [`BlockAllocator::release`] of that commit: until its root is synced, a crash restores the previous owner.
//!
//! Chunks of [`CHUNK_BLOCKS`] blocks that are free whole may be withheld, because the file has no space there: nothing is allocated in
//! them until [`BlockAllocator::provide`]. The map does not contain which these are.
//!
//! For each commit the owner of the tree calls `allocate` and `free` as needed, then [`BlockAllocator::write`],
//! syncs the region, writes and syncs its root, then calls [`BlockAllocator::release`]. There is no lock: one
//! thread owns the allocator.
//!
//! Costs: `allocate` and `free` take time in proportion to the blocks; `write` writes 4 KB for each map page of 32,512
//! blocks that changed in this commit or the one before.

use crate::MediaError;
pub use crate::free::CHUNK_BLOCKS;
use crate::free::FreeBlocks;
use crate::region::Region;
use format::map::{MAP_PAGE_BLOCKS, MapPage};
use format::{BLOCK_BYTES, Block, CommitNumber, DecodeError};
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use zerocopy::IntoBytes;

/// Bytes of the map of `blocks` blocks in its file.
pub const fn bytes_needed(blocks: u32) -> u64 {
    2 * pages_of(blocks) as u64 * BLOCK_BYTES as u64
}

const fn pages_of(blocks: u32) -> u32 {
    blocks.div_ceil(MAP_PAGE_BLOCKS)
}

/// Which free blocks are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// The lowest ones, however few lie together.
    Lowest,
    /// Many that lie together, where there are some.
    Run,
}

/// Allocator of the blocks of one file.
pub struct BlockAllocator {
    region: Region,
    /// Offset of the map in the region.
    at: u64,
    blocks: u32,
    pages: Vec<PageState>,
    /// Number of blocks in use, as the next map will record.
    used: u32,
    free: FreeBlocks,
    /// Chunks of free blocks in which nothing is allocated, and the number of their blocks.
    withheld: BTreeSet<u32>,
    withheld_blocks: u32,
    /// Chunks with blocks that were released since [`Self::note_time`].
    released: BTreeSet<u32>,
    /// Blocks freed since the last commit was written.
    freed: Vec<(Block, u32)>,
    /// Blocks freed by commits that were written and not released, oldest first.
    unreleased: VecDeque<(CommitNumber, Vec<(Block, u32)>)>,
    /// The last commit written.
    commit: CommitNumber,
}

struct PageState {
    page: Box<MapPage>,
    /// Changed since the last commit was written.
    changed: bool,
    /// The slot of the next commit has other contents than the slot of the last one.
    stale: bool,
}

impl BlockAllocator {
    /// Makes a map of `blocks` free blocks, for offset `at`. The first commit, which must have number 1, writes it.
    ///
    /// # Panics
    /// If the map does not fit there, or `blocks` is zero.
    pub fn format(region: Region, at: u64, blocks: u32) -> Self {
        let pages = (0..pages_of(blocks))
            .map(|index| PageState {
                page: Box::new(MapPage::new(index, blocks)),
                changed: true,
                stale: true,
            })
            .collect();
        Self::new(region, at, blocks, pages, CommitNumber::new(0))
    }

    /// Reads the map of commit `commit`, which must be that of the valid root.
    ///
    /// # Errors
    /// `Damaged` (a page of that commit's slot is invalid), `Unreadable`.
    ///
    /// # Panics
    /// If the map does not fit there, or `blocks` is zero.
    pub fn open(region: Region, at: u64, blocks: u32, commit: CommitNumber) -> Result<Self, MediaError> {
        let mut pages = Vec::new();
        for index in 0..pages_of(blocks) {
            let page = read_page(&region, at, blocks, index, commit)?;
            // The slot that the next commit overwrites: an older state, or the remains of an abandoned attempt.
            let other = read_page(&region, at, blocks, index, commit.next());
            let stale = other.map_or(true, |other| other.bits != page.bits);
            pages.push(PageState { page: Box::new(page), changed: false, stale });
        }
        Ok(Self::new(region, at, blocks, pages, commit))
    }

    fn new(region: Region, at: u64, blocks: u32, pages: Vec<PageState>, commit: CommitNumber) -> Self {
        assert!(blocks > 0, "a map of no blocks");
        assert!(at + bytes_needed(blocks) <= region.bytes(), "a map stands within its region");
        let (freed, unreleased) = (Vec::new(), VecDeque::new());
        let free = FreeBlocks::new(blocks);
        let mut new = Self {
            region,
            at,
            blocks,
            pages,
            used: 0,
            free,
            withheld: BTreeSet::new(),
            withheld_blocks: 0,
            released: BTreeSet::new(),
            freed,
            unreleased,
            commit,
        };
        let mut next = 0;
        let in_use: Vec<_> = new.used_runs().collect();
        for (block, count) in in_use {
            new.free.insert(next, block.get() - next);
            new.used += count;
            next = block.get() + count;
        }
        new.free.insert(next, blocks - next);
        new
    }

    /// Withholds the chunks from a block on, all of which are free: of a chunk that begins before it nothing.
    ///
    /// # Panics
    /// If one is not free, or withheld already.
    pub fn withhold_from(&mut self, from: Block) {
        let first = from.get().div_ceil(CHUNK_BLOCKS);
        self.withhold(first.saturating_mul(CHUNK_BLOCKS).min(self.blocks)..self.blocks);
    }

    /// Withholds all chunks of which no block is in use.
    pub fn withhold_unused(&mut self) {
        for chunk in 0..self.blocks.div_ceil(CHUNK_BLOCKS) {
            if self.is_free_chunk(chunk) {
                self.withhold(self.blocks_of(chunk));
            }
        }
    }

    /// Withholds whole chunks, which are free.
    ///
    /// # Panics
    /// If one is not.
    pub fn withhold(&mut self, range: Range<u32>) {
        if range.is_empty() {
            return;
        }
        self.free.remove(range.start, range.end - range.start);
        self.withheld_blocks += range.end - range.start;
        self.withheld.extend(range.start / CHUNK_BLOCKS..range.end.div_ceil(CHUNK_BLOCKS));
    }

    /// The first of the withheld chunks, and those that follow it: at most so many blocks, but a chunk.
    pub fn withheld(&self, blocks_max: u32) -> Range<u32> {
        let Some(first) = self.withheld.first().copied() else { return 0..0 };
        let follow = self.withheld.iter().zip(first..).take_while(|(chunk, next)| *chunk == next);
        let chunks = follow.take((blocks_max / CHUNK_BLOCKS).max(1) as usize).count() as u32;
        first * CHUNK_BLOCKS..self.blocks_of(first + chunks - 1).end
    }

    /// Number of withheld blocks.
    pub fn withheld_blocks(&self) -> u32 {
        self.withheld_blocks
    }

    /// There is space for chunks that were withheld.
    ///
    /// # Panics
    /// If one was not.
    pub fn provide(&mut self, range: Range<u32>) {
        for chunk in range.start / CHUNK_BLOCKS..range.end.div_ceil(CHUNK_BLOCKS) {
            assert!(self.withheld.remove(&chunk), "chunk {chunk} is provided twice");
        }
        self.withheld_blocks -= range.end - range.start;
        self.free.insert(range.start, range.end - range.start);
    }

    /// Chunks that lie together, are free, and have been since [`Self::note_time`]: about so many blocks at most.
    pub fn idle_chunks(&self, blocks_max: u32) -> Option<Range<u32>> {
        let is_idle = |chunk: &u32| self.is_free_chunk(*chunk) && !self.released.contains(chunk);
        let mut chunks = (0..self.blocks.div_ceil(CHUNK_BLOCKS)).skip_while(|chunk| !is_idle(chunk));
        let first = chunks.next()?;
        let more =
            chunks.take((blocks_max / CHUNK_BLOCKS).saturating_sub(1) as usize).take_while(is_idle).count()
                as u32;
        Some(first * CHUNK_BLOCKS..self.blocks_of(first + more).end)
    }

    /// Whether chunks are free that are no idle ones yet.
    pub fn has_resting_chunks(&self) -> bool {
        self.released.iter().any(|chunk| self.is_free_chunk(*chunk))
    }

    /// From here on time is measured for [`Self::idle_chunks`].
    pub fn note_time(&mut self) {
        self.released.clear();
    }

    fn blocks_of(&self, chunk: u32) -> Range<u32> {
        chunk * CHUNK_BLOCKS..self.blocks.min((chunk + 1).saturating_mul(CHUNK_BLOCKS))
    }

    /// Whether all blocks of a chunk can be allocated.
    fn is_free_chunk(&self, chunk: u32) -> bool {
        let Range { start, end } = self.blocks_of(chunk);
        self.free.at(start, end - start) == Some((start, end - start))
    }

    /// Allocates a run of at most `count_max` blocks: at `hint` if that block is free, else where it fits. `None` if no
    /// block is free.
    ///
    /// # Panics
    /// If `count_max` is zero.
    pub fn allocate(&mut self, count_max: u32, hint: Option<Block>, fit: Fit) -> Option<(Block, u32)> {
        assert!(count_max > 0, "an allocation of no blocks");
        let (start, count) = hint
            .and_then(|hint| self.free.at(hint.get(), count_max))
            .or_else(|| self.free.find(count_max, fit))?;
        self.take(start, count);
        Some((Block::new(start), count))
    }

    /// Allocates exactly these blocks, for the fixed structures of a new file.
    ///
    /// # Panics
    /// If one of them is not free.
    pub fn allocate_at(&mut self, block: Block, count: u32) {
        let found = self.free.at(block.get(), count);
        assert!(found == Some((block.get(), count)), "{count} blocks at {block} are not all free");
        self.take(block.get(), count);
    }

    fn take(&mut self, start: u32, count: u32) {
        self.free.remove(start, count);
        self.set_bits(start, count, true);
        self.used += count;
    }

    /// Frees blocks; they are allocated again after the release of the next commit.
    ///
    /// # Panics
    /// If one of them is not in use.
    pub fn free(&mut self, block: Block, count: u32) {
        let end = block.get().checked_add(count).filter(|end| *end <= self.blocks);
        assert!(end.is_some(), "blocks beyond the map are freed: {count} at {block}");
        self.set_bits(block.get(), count, false);
        self.used -= count;
        self.freed.push((block, count));
    }

    /// Frees blocks that were allocated since the last commit was written and have no contents: they can be
    /// allocated again at once.
    ///
    /// # Panics
    /// If one of them is not in use.
    pub fn unallocate(&mut self, block: Block, count: u32) {
        self.set_bits(block.get(), count, false);
        self.used -= count;
        self.free.insert(block.get(), count);
    }

    /// Inverts bits, all of which must have the other value.
    fn set_bits(&mut self, start: u32, count: u32, in_use: bool) {
        for block in start..start + count {
            let state = &mut self.pages[(block / MAP_PAGE_BLOCKS) as usize];
            let bit = block % MAP_PAGE_BLOCKS;
            let byte = &mut state.page.bits[(bit / 8) as usize];
            let mask = 1 << (bit % 8);
            assert!((*byte & mask != 0) != in_use, "block {block} is freed or allocated twice");
            *byte ^= mask;
            state.changed = true;
        }
    }

    /// Writes the map of a commit. The caller must sync the region before it writes the commit's root.
    ///
    /// # Panics
    /// If `commit` does not follow the last commit.
    pub fn write(&mut self, commit: CommitNumber) {
        assert!(commit == self.commit.next(), "commit {commit} is written after commit {}", self.commit);
        for (index, state) in self.pages.iter_mut().enumerate() {
            if state.changed || state.stale {
                state.page.seal(commit);
                let at = page_at(self.at, self.blocks, index as u32, commit);
                self.region.write(at, state.page.as_bytes());
            }
            state.stale = std::mem::take(&mut state.changed);
        }
        self.unreleased.push_back((commit, std::mem::take(&mut self.freed)));
        self.commit = commit;
    }

    /// Makes the blocks freed up to commit `commit`, whose root is synced, available.
    ///
    /// # Panics
    /// If `commit` was not written.
    pub fn release(&mut self, commit: CommitNumber) {
        assert!(commit <= self.commit, "commit {commit} is released before it was written");
        while self.unreleased.front().is_some_and(|(freed_in, _)| *freed_in <= commit) {
            let (_, runs) = self.unreleased.pop_front().expect("there is a first one");
            for (block, count) in runs {
                self.free.insert(block.get(), count);
                let end = block.get() + count;
                self.released.extend(block.get() / CHUNK_BLOCKS..end.div_ceil(CHUNK_BLOCKS));
            }
        }
    }

    /// Number of blocks that the map covers.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Number of blocks in use.
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Number of blocks that can be allocated now, or once they are provided: neither in use nor waiting for a release.
    pub fn allocatable(&self) -> u32 {
        self.free.blocks + self.withheld_blocks
    }

    /// Whether blocks can be allocated without more being provided.
    pub fn has_free(&self) -> bool {
        self.free.blocks > 0
    }

    /// Whether a run that is asked for begins at `hint`, or in many free blocks that lie together.
    pub fn has_run(&self, hint: Option<Block>) -> bool {
        hint.is_some_and(|hint| self.free.at(hint.get(), 1).is_some()) || self.free.has_chunk()
    }

    /// True if the block is in use.
    ///
    /// # Panics
    /// If the map does not cover it.
    pub fn is_used(&self, block: Block) -> bool {
        assert!(block.get() < self.blocks, "block {block} is beyond the map");
        self.bit(block.get())
    }

    fn bit(&self, block: u32) -> bool {
        self.byte(block) & 1 << (block % 8) != 0
    }

    /// The byte with the bit of a block; pages hold a whole number of bytes.
    fn byte(&self, block: u32) -> u8 {
        let page = &self.pages[(block / MAP_PAGE_BLOCKS) as usize].page;
        page.bits[(block % MAP_PAGE_BLOCKS / 8) as usize]
    }

    /// The first block from `next` on whose state is `in_use`; compares eight blocks at a time where they are
    /// equal.
    fn find(&self, mut next: u32, in_use: bool) -> Option<u32> {
        let none = if in_use { 0 } else { u8::MAX };
        while next < self.blocks {
            if next.is_multiple_of(8) && self.byte(next) == none {
                next += 8;
            } else if self.bit(next) == in_use {
                return Some(next);
            } else {
                next += 1;
            }
        }
        None
    }

    /// Runs of blocks in use, in ascending order.
    pub fn used_runs(&self) -> impl Iterator<Item = (Block, u32)> + '_ {
        let mut next = 0;
        std::iter::from_fn(move || {
            let start = self.find(next, true)?;
            let end = self.find(start, false).unwrap_or(self.blocks);
            next = end;
            Some((Block::new(start), end - start))
        })
    }
}

fn page_at(map_at: u64, blocks: u32, index: u32, commit: CommitNumber) -> u64 {
    let slot = commit.get() % 2;
    map_at + (slot * u64::from(pages_of(blocks)) + u64::from(index)) * BLOCK_BYTES as u64
}

/// Reads the page of the slot of commit `commit`.
fn read_page(
    region: &Region,
    map_at: u64,
    blocks: u32,
    index: u32,
    commit: CommitNumber,
) -> Result<MapPage, MediaError> {
    let mut bytes = [0; BLOCK_BYTES];
    region.read(page_at(map_at, blocks, index, commit), &mut bytes)?;
    let page = MapPage::decode(&bytes, index, blocks).map_err(MediaError::Damaged)?;
    let found = page.commit;
    if found > commit || found.get() % 2 != commit.get() % 2 {
        return Err(MediaError::Damaged(DecodeError::Field("commit")));
    }
    Ok(page)
}
