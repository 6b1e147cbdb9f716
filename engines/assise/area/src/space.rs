//! The data segments of a pool and the blocks in them.
//!
//! A block is kept by an owner key: a segment holds blocks of files of one owner only, so that it can be mapped by
//! that user and nobody else, and a block is reused only within its key. The key [`OWNER_DAEMON`] is nobody's: its
//! segments are never mapped, so they also take what finds no room elsewhere.
//!
//! Blocks in segments of a user that hold something are that user's own; all others are *shared*: blocks in no segment
//! yet, in empty segments, and in the daemon's. Any file can have any of those, at worst in a segment of the daemon's.
//! A segment becomes a user's own only if the shared blocks that are kept stay shared: so many are reserved.
//!
//! Blocks need space of the medium, too, which another program may have filled. A segment of a user takes what is free there.
//! Segments of the daemon take what the pool holds ([`pmem::held`]) if nothing is free, so that the held space is for all users;
//! a user's own take it only where the daemon's have no block left. [`Space::provided_shared`] counts the blocks for which no
//! space is needed any more.
//!
//! A segment comes to be in two steps: its file is made, then a commit names it in the tree, and syncs it before.
//! When all capacity is given to segments and one of another key is empty, it goes the other way: a commit names it
//! no more, and after that commit's release its file is removed. A crash between leaves a file that no tree names; it is
//! removed when the next segment is made. Its map is counted from the commit before the first that names it, which its
//! superblock says.

use crate::AreaError;
use crate::area::Limits;
use crate::segment::{Run, Segment, Supply};
use crate::segment_file::{
    SegmentFile, SegmentFiles, create_file, file_blocks, open_file, segment_file, segment_of_file,
};
use format::node::SegmentItem;
use format::superblock::{FileKind, MAGIC, OWNER_DAEMON, POOL_VERSION, Superblock};
use format::{BLOCK_BYTES, Block, ChainNumber, CommitNumber, PoolUid, SegmentId};
use pmem::alloc::{BlockAllocator, Fit};
use pmem::{MediaError, Medium};
use std::collections::BTreeMap;
use std::sync::Arc;
use zerocopy::little_endian::{U16, U32, U64};

/// Data blocks that can still be taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FreeBlocks {
    /// By files with any owner key.
    pub shared: u64,
    /// By files with this key alone.
    pub own: BTreeMap<u32, u64>,
}

/// When something is made: the commit that will name it, and the time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommitStamp {
    pub commit: CommitNumber,
    pub time_ns: u64,
}

/// Data blocks of a user's first segment.
const FIRST_BLOCKS: u32 = 2 << 10;

/// All segments.
pub(crate) struct Space {
    medium: Medium,
    pool: PoolUid,
    pub segments: BTreeMap<SegmentId, Segment>,
    /// Data blocks of all segments together, at most.
    capacity_blocks: u64,
    /// Data blocks of a segment, at most.
    segment_blocks: u32,
    /// Data blocks for which a segment gets space at once: the kernel takes a millisecond to provide 8 MiB of memory.
    step_blocks: u32,
    /// There was no space in the medium for blocks of the segments that the present allocation looked at.
    shortage: Option<MediaError>,
    /// The medium had no space since the last commit: it is not asked again for every block.
    is_short: bool,
    /// Shared blocks that no segment of a user's own may take.
    kept: u64,
    /// Blocks that were taken since without a promise.
    unpromised: u64,
    /// The next one: a number is never used again, because a process that has mapped a segment knows it by its number.
    next: SegmentId,
    /// Empty segments that the running batch takes out of the pool.
    retiring: BTreeMap<SegmentId, Segment>,
    /// Segments that are out of the pool since a commit which was not released.
    retired: Vec<(CommitNumber, SegmentId)>,
    /// Files of segments that no tree names: a crash cut off their making or their removal.
    leftover: Vec<SegmentId>,
}

/// The commit of a segment's map that belongs to a commit of the tree; `None` if the segment is younger.
pub(crate) fn map_commit(base: u64, commit: CommitNumber) -> Option<CommitNumber> {
    commit.get().checked_sub(base).filter(|commit| *commit > 0).map(CommitNumber::new)
}

impl Space {
    /// No segments yet, of a pool whose next one is `next`.
    pub fn new(medium: Medium, pool: PoolUid, limits: &Limits, next: SegmentId) -> Self {
        let Limits { capacity_blocks, segment_blocks, step_blocks, .. } = *limits;
        Self {
            medium,
            pool,
            segments: BTreeMap::new(),
            capacity_blocks,
            segment_blocks,
            step_blocks,
            shortage: None,
            is_short: false,
            kept: 0,
            unpromised: 0,
            next,
            retiring: BTreeMap::new(),
            retired: Vec::new(),
            leftover: Vec::new(),
        }
    }

    /// Notes the files of segments that the tree does not name, when all it names are open.
    pub fn note_leftover(&mut self) -> Result<(), AreaError> {
        let named = self.medium.list()?.into_iter().filter_map(|name| segment_of_file(&name));
        self.leftover = named.filter(|id| !self.segments.contains_key(id)).collect();
        Ok(())
    }

    /// Opens a segment that the tree of `commit` names.
    pub fn open(&mut self, id: SegmentId, item: &SegmentItem, commit: CommitNumber) -> Result<(), AreaError> {
        let (region, superblock) = open_file(&self.medium, id, self.pool, item)?;
        let name = segment_file(id);
        let base = superblock.geometry.get();
        let blocks = region.bytes() / BLOCK_BYTES as u64;
        let blocks = u32::try_from(blocks).map_err(|_| AreaError::Map(name.clone()))?;
        let commit = map_commit(base, commit).ok_or_else(|| AreaError::Map(name.clone()))?;
        let allocator = BlockAllocator::open(region.clone(), BLOCK_BYTES as u64, blocks, commit);
        let mut allocator = allocator.map_err(|error| match error {
            MediaError::Damaged(_) => AreaError::Map(name),
            error => AreaError::Medium(error),
        })?;
        // To get space that is there already takes little time.
        allocator.withhold_unused();
        let (owner, blocks) = (item.owner.get(), item.blocks.get());
        let segment = Segment::new((region, owner), (blocks, self.step_blocks), allocator, base);
        if segment.used() != item.used.get() {
            return Err(AreaError::OtherMap(segment_file(id)));
        }
        self.segments.insert(id, segment);
        Ok(())
    }

    /// The file of a segment.
    pub fn file(&self, segment: SegmentId) -> Option<&SegmentFile> {
        self.segments.get(&segment).map(|found| &*found.file)
    }

    /// The files of all segments; those that were there before, if there are no others. No number is used twice.
    pub fn files(&self, before: &Arc<SegmentFiles>) -> Arc<SegmentFiles> {
        if self.segments.keys().eq(before.keys()) {
            return before.clone();
        }
        Arc::new(self.segments.iter().map(|(id, found)| (*id, found.file.clone())).collect())
    }

    /// Writes data into blocks that no committed tree names as written. Durable once the segment is synced.
    pub fn write(&mut self, segment: SegmentId, block: Block, bytes: &[u8]) {
        self.get_mut(segment).write(block, bytes);
    }

    /// Writes a block of which a part was lost: readers compare it with its checksum, which it does not have.
    pub fn write_damaged(&mut self, segment: SegmentId, block: Block, bytes: &[u8]) {
        self.get_mut(segment).write_damaged(block, bytes);
    }

    /// Owner key of a segment.
    pub fn owner(&self, segment: SegmentId) -> Option<u32> {
        self.file(segment).map(|file| file.owner)
    }

    /// Blocks that the medium may hold beside the segments that there are.
    pub fn uncreated(&self) -> u64 {
        self.capacity_blocks.saturating_sub(self.made().1)
    }

    /// Blocks for which there is no space in the medium yet.
    pub fn unprovided(&self) -> u64 {
        let withheld = self.segments.values().map(|segment| u64::from(segment.unprovided()));
        self.uncreated() + withheld.sum::<u64>()
    }

    /// Segments.
    pub fn count(&self) -> usize {
        self.segments.len()
    }

    /// Segments, and data blocks that they hold.
    pub fn made(&self) -> (u64, u64) {
        let blocks = self.segments.values().map(|segment| u64::from(segment.blocks)).sum();
        (self.segments.len() as u64, blocks)
    }

    /// So many shared blocks are kept from becoming a user's own, and from what comes without a promise.
    pub fn keep(&mut self, blocks: u64) {
        (self.kept, self.unpromised) = (blocks, 0);
    }

    /// Takes blocks of any owner for records without a reservation; false if those might be reserved. A user's own
    /// blocks, too, may back a reservation, so as many shared ones have to be there.
    pub fn take_unpromised(&mut self, blocks: u64) -> bool {
        if self.kept == 0 {
            return true;
        }
        let taken = self.unpromised.saturating_add(blocks);
        let fits = taken.checked_add(self.kept).is_some_and(|sum| sum <= self.shared());
        if fits {
            self.unpromised = taken;
        }
        fits
    }

    /// Blocks that were taken without a promise are not used.
    pub fn return_unpromised(&mut self, blocks: u64) {
        self.unpromised = self.unpromised.saturating_sub(blocks);
    }

    /// Blocks that files with any key can still take.
    pub fn shared(&self) -> u64 {
        let of = |segment: &Segment| match segment.file.owner {
            OWNER_DAEMON => u64::from(segment.allocatable()),
            _ if segment.is_empty() => u64::from(segment.blocks),
            _ => 0,
        };
        self.uncreated() + self.segments.values().map(of).sum::<u64>()
    }

    /// Blocks that only files with a user's key can take, for each key that has some.
    pub fn own(&self) -> BTreeMap<u32, u64> {
        let mut own = BTreeMap::new();
        let used =
            self.segments.values().filter(|found| found.file.owner != OWNER_DAEMON && !found.is_empty());
        for segment in used {
            *own.entry(segment.file.owner).or_default() += u64::from(segment.allocatable());
        }
        own
    }

    /// Takes an empty segment out of the pool, if there is one that may go.
    fn retire(&mut self, may_go: impl Fn(&Segment) -> bool) {
        let mut empty = self.segments.iter().filter(|(_, found)| found.is_empty() && may_go(found));
        let found = empty.next().map(|(id, _)| *id);
        if let Some((id, segment)) = found.and_then(|id| self.segments.remove_entry(&id)) {
            self.retiring.insert(id, segment);
        }
    }

    /// Takes all segments out of the pool, with all that they hold.
    pub fn retire_all(&mut self) {
        self.retiring.append(&mut self.segments);
    }

    /// The number of the next segment, for the root.
    pub fn next(&self) -> SegmentId {
        self.next
    }

    /// Segments that the next commit must not name.
    pub fn retiring(&self) -> impl Iterator<Item = SegmentId> + '_ {
        self.retiring.keys().copied()
    }

    /// The running batch, which would have made `commit`, is given up with all that it allocated: the segments it made
    /// go, those it took out of the pool are in it again.
    pub fn abandon(&mut self, commit: CommitNumber, allocated: impl Iterator<Item = Run>) {
        let made = |segment: &Segment| segment.base + 1 == commit.get();
        let ids = self.segments.iter().filter(|(_, segment)| made(segment)).map(|(id, _)| *id);
        self.leftover.extend(ids);
        self.segments.retain(|_, segment| !made(segment));
        self.is_short = false;
        self.segments.append(&mut self.retiring);
        self.segments.values_mut().for_each(Segment::note_verified);
        for run in allocated.filter(|run| !self.leftover.contains(&run.segment)).collect::<Vec<_>>() {
            self.free(run);
        }
        self.free_recycled();
    }

    /// The commit that takes segments out of the pool is synced.
    pub fn finish_retiring(&mut self, commit: CommitNumber) {
        let retiring = std::mem::take(&mut self.retiring);
        self.retired.extend(retiring.into_keys().map(|id| (commit, id)));
    }

    /// Blocks that files with this key can still take.
    pub fn room(&self, owner: u32) -> u64 {
        let is_own =
            |found: &&Segment| owner != OWNER_DAEMON && found.file.owner == owner && !found.is_empty();
        let own: u64 =
            self.segments.values().filter(is_own).map(|segment| u64::from(segment.allocatable())).sum();
        own + self.shared()
    }

    /// Blocks that could be taken by anybody, and blocks of the whole capacity.
    pub fn totals(&self) -> (u64, u64) {
        let free: u64 = self.segments.values().map(|segment| u64::from(segment.allocatable())).sum();
        (free + self.uncreated(), self.capacity_blocks)
    }

    /// Takes a run of at most `blocks_max` blocks for a file with this key.
    ///
    /// # Errors
    /// `NoSpace`: the pool has no room. `Medium`: it has some, and its medium has none: no program that was promised room
    /// is at fault.
    pub fn allocate(
        &mut self,
        owner: u32,
        blocks_max: u32,
        fit: Fit,
        made: CommitStamp,
    ) -> Result<Run, AreaError> {
        self.shortage = None;
        let run = self.find_run(owner, (blocks_max, fit), made)?;
        run.ok_or_else(|| self.shortage.map_or(AreaError::NoSpace, AreaError::Medium))
    }

    fn find_run(
        &mut self,
        owner: u32,
        wanted: (u32, Fit),
        made: CommitStamp,
    ) -> Result<Option<Run>, AreaError> {
        let is_own = |segment: &Segment| !segment.is_empty();
        if owner != OWNER_DAEMON {
            if let Some(run) = self.allocate_within(owner, wanted, self.free_supply(), is_own)? {
                return Ok(Some(run));
            }
            if let Some(run) = self.allocate_as_own(owner, wanted, made)? {
                return Ok(Some(run));
            }
        }
        if let Some(run) = self.allocate_within(OWNER_DAEMON, wanted, self.held_supply(), |_| true)? {
            return Ok(Some(run));
        }
        if self.uncreated() == 0 {
            self.retire(|_| true);
        }
        if self.uncreated() > 0 {
            self.create(OWNER_DAEMON, self.held_supply(), made)?;
            return self.allocate_within(OWNER_DAEMON, wanted, self.held_supply(), |_| true);
        }
        if owner != OWNER_DAEMON {
            return self.allocate_within(owner, wanted, self.held_supply(), is_own);
        }
        Ok(None)
    }

    /// Space for what may be done without.
    fn free_supply(&self) -> Supply {
        if self.is_short { Supply::Nothing } else { Supply::Free }
    }

    /// Space for what has to be done.
    fn held_supply(&self) -> Supply {
        Supply::Held { is_short: self.is_short }
    }

    /// Takes a run of a segment that becomes a user's own; none if the shared blocks have to stay so.
    fn allocate_as_own(
        &mut self,
        owner: u32,
        wanted: (u32, Fit),
        made: CommitStamp,
    ) -> Result<Option<Run>, AreaError> {
        let Some(spare) = self.shared().checked_sub(self.kept) else { return Ok(None) };
        let fits = |segment: &Segment| u64::from(segment.blocks) <= spare;
        if let Some(run) = self.allocate_within(owner, wanted, self.free_supply(), fits)? {
            return Ok(Some(run));
        }
        if self.is_short {
            return Ok(None);
        }
        // Free blocks in a segment of the daemon's may back reservations.
        if self.uncreated() == 0 {
            self.retire(|segment| ![owner, OWNER_DAEMON].contains(&segment.file.owner) && fits(segment));
        }
        let blocks = u64::from(self.next_blocks(owner));
        if blocks == 0 || blocks > spare {
            return Ok(None);
        }
        match self.create(owner, Supply::Free, made) {
            Err(AreaError::Medium(error)) if error.is_shortage() => {
                self.note_shortage(error);
                Ok(None)
            }
            created => {
                created.and_then(|()| self.allocate_within(owner, wanted, self.free_supply(), |_| true))
            }
        }
    }

    fn note_shortage(&mut self, error: MediaError) {
        self.shortage = Some(error);
        self.is_short = true;
    }

    fn allocate_within(
        &mut self,
        owner: u32,
        (blocks_max, fit): (u32, Fit),
        supply: Supply,
        may_take: impl Fn(&Segment) -> bool,
    ) -> Result<Option<Run>, AreaError> {
        let (mut short, mut shortage) = (None, None);
        let medium = self.medium.clone();
        // The oldest first: the youngest has the most memory that was never written.
        let segments = self.segments.iter_mut();
        for (id, segment) in segments.filter(|(_, segment)| segment.file.owner == owner && may_take(segment))
        {
            if fit == Fit::Run && !segment.has_run() {
                short = short.or_else(|| (segment.allocatable() > 0).then_some(*id));
                continue;
            }
            match segment.allocate((blocks_max, fit), (&medium, supply)) {
                Ok(Some((block, blocks))) => return Ok(Some(Run { segment: *id, block, blocks })),
                Ok(None) => {}
                Err(AreaError::Medium(error)) if error.is_shortage() => shortage = Some(error),
                Err(error) => return Err(error),
            }
        }
        if let Some(error) = shortage {
            self.note_shortage(error);
        }
        let Some(id) = short else { return Ok(None) };
        let found = self.get_mut(id).allocate((blocks_max, fit), (&medium, supply))?;
        Ok(found.map(|(block, blocks)| Run { segment: id, block, blocks }))
    }

    /// Takes back blocks that the running batch allocated: it may use them again at once.
    pub fn recycle(&mut self, run: Run) {
        self.get_mut(run.segment).recycled.push(run);
    }

    /// Takes back blocks that the running batch allocated last and never wrote: they are free at once.
    pub fn unallocate(&mut self, run: Run) {
        let segment = self.get_mut(run.segment);
        segment.allocator.unallocate(run.block, run.blocks);
        segment.cursor = Some(run.block);
    }

    /// Frees blocks that the committed tree names, or that an abandoned batch took. They can be allocated again
    /// after the release of the next commit.
    pub fn free(&mut self, run: Run) {
        self.get_mut(run.segment).allocator.free(run.block, run.blocks);
    }

    /// Ends a batch: blocks that it recycled and did not take again are freed.
    pub fn free_recycled(&mut self) {
        for segment in self.segments.values_mut() {
            for run in std::mem::take(&mut segment.recycled) {
                segment.allocator.free(run.block, run.blocks);
            }
        }
    }

    fn get_mut(&mut self, segment: SegmentId) -> &mut Segment {
        self.segments
            .get_mut(&segment)
            .expect("blocks are written and freed in the segment they were allocated in")
    }

    /// Data blocks of the next segment for files with this key: as many as there are, so that little is made for few files, and
    /// the batch that makes it does not wait long for the kernel.
    fn next_blocks(&self, owner: u32) -> u32 {
        let own = self.segments.values().filter(|segment| segment.file.owner == owner);
        let there: u64 = own.map(|segment| u64::from(segment.blocks)).sum();
        let first = FIRST_BLOCKS.min(self.segment_blocks);
        let wanted = u32::try_from(there).unwrap_or(u32::MAX).clamp(first, self.segment_blocks);
        u32::try_from(self.uncreated()).unwrap_or(u32::MAX).min(wanted)
    }

    /// Makes a segment for files with this key. It is part of the pool once a commit names it.
    fn create(&mut self, owner: u32, supply: Supply, made: CommitStamp) -> Result<(), AreaError> {
        let blocks = self.next_blocks(owner);
        for id in std::mem::take(&mut self.leftover) {
            self.remove_file(id)?;
        }
        let id = self.next;
        let next = SegmentId::new(id.get().checked_add(1).ok_or(AreaError::NoSpace)?);
        let name = segment_file(id);
        let in_file = file_blocks(blocks).ok_or(AreaError::Geometry("segment_blocks"))?;
        let file_bytes = u64::from(in_file) * BLOCK_BYTES as u64;
        let before_data = in_file - blocks;
        let (region, provided) =
            create_file(&self.medium, &name, (in_file, before_data, self.step_blocks), supply)?;
        self.next = next;
        let base = made.commit.get().checked_sub(1).expect("commits are counted from 1");
        let superblock = Superblock {
            magic: MAGIC,
            version: U16::new(POOL_VERSION),
            kind: U16::new(FileKind::Segment as u16),
            checksum: U32::new(0),
            pool: self.pool,
            id: U64::new(id.get().into()),
            file_bytes: U64::new(file_bytes),
            owner: U32::new(owner),
            chain: ChainNumber::ONLY,
            created_ns: U64::new(made.time_ns),
            geometry: U64::new(base),
        };
        // Synced with the map, before the root that names the segment.
        region.write(0, &superblock.encode());
        let mut allocator = BlockAllocator::format(region.clone(), BLOCK_BYTES as u64, in_file);
        allocator.allocate_at(Block::new(0), before_data);
        allocator.withhold_from(Block::new(provided));
        let blocks = (blocks, self.step_blocks);
        self.segments.insert(id, Segment::new((region, owner), blocks, allocator, base));
        Ok(())
    }

    /// The items of all segments as the next commit should name them.
    pub fn items(&self) -> impl Iterator<Item = (SegmentId, SegmentItem)> + '_ {
        self.segments.iter().map(|(id, segment)| {
            let item = SegmentItem {
                owner: U32::new(segment.file.owner),
                used: U32::new(segment.used()),
                blocks: U32::new(segment.blocks),
                reserved: U32::new(0),
            };
            (*id, item)
        })
    }

    /// Writes the maps of a commit and syncs what was written to the segments.
    pub fn sync(&mut self, commit: CommitNumber) -> Result<(), AreaError> {
        for segment in self.segments.values_mut() {
            segment.note_verified();
            let commit = map_commit(segment.base, commit).expect("a segment is not younger than the commit");
            segment.allocator.write(commit);
            let writes = segment.file.region.counters().writes;
            if writes != segment.synced_writes {
                segment.file.region.sync()?;
                segment.synced_writes = writes;
            }
        }
        Ok(())
    }

    /// Syncs what was written to the segments; their maps stay as they are.
    pub fn sync_data(&mut self) -> Result<(), AreaError> {
        for segment in self.segments.values_mut() {
            let writes = segment.file.region.counters().writes;
            if writes != segment.synced_writes {
                segment.file.region.sync()?;
                segment.synced_writes = writes;
            }
        }
        Ok(())
    }

    fn remove_file(&self, id: SegmentId) -> Result<(), AreaError> {
        match self.medium.remove(&segment_file(id)) {
            Ok(()) | Err(MediaError::NotFound) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Allows blocks that the commits up to this one freed to be allocated again; removes the files of segments that
    /// they took out of the pool.
    pub fn release(&mut self, commit: CommitNumber) -> Result<(), AreaError> {
        for segment in self.segments.values_mut() {
            if let Some(commit) = map_commit(segment.base, commit) {
                segment.allocator.release(commit);
                // The next allocations use the freed blocks, whose memory was written before.
                segment.cursor = None;
            }
        }
        let (gone, kept) = self.retired.drain(..).partition(|(retired_in, _)| *retired_in <= commit);
        self.retired = kept;
        self.is_short = false;
        let gone: Vec<(CommitNumber, SegmentId)> = gone;
        for (_, id) in gone {
            self.remove_file(id)?;
        }
        Ok(())
    }
}
