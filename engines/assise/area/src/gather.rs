//! Writes of a batch, gathered by file: they come to the tree once a file, in the order of its blocks. So what a later
//! record overwrites is never written to the medium, neighbouring blocks become one extent, and a file's item is read and
//! stored once (Assise §3.2.1).
//!
//! Guarantees: records are judged and refused as if each were applied at once; whatever else is done to a file of which
//! writes are gathered finds them in the tree. Room is looked for only when they come there: if there is too little, the
//! batch is [`AreaError::Overfull`], and is to be made again with fewer records, or with writes that are not gathered.

use crate::AreaError;
use crate::batch::{Applied, Applying, Batch, Need};
use crate::contents::{blocks_touched, end_of, grow};
use crate::extents::{How, Place, at_index, join};
use crate::space::Run;
use crate::view::Extent;
use format::node::{EXTENT_BLOCKS_MAX, ExtentItem, InodeItem, ItemKind, Key};
use format::{BLOCK_BYTES, InodeNumber};
use std::collections::BTreeMap;
use zerocopy::little_endian::{I64, U64};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// A longer write is not gathered: it is one extent by itself.
const BLOCKS_MAX: u64 = 16;

/// Pages that are so far apart are looked up one by one.
const GAP_BLOCKS: u64 = 4;

/// Blocks of a file whose extents are held in memory at once, about.
const GROUP_BLOCKS: u64 = 4096;

/// Bytes of items in a leaf of the tree, at least, but for leaves at the edges: sparse ones are joined.
const LEAF_BYTES_MIN: usize = BLOCK_BYTES / 4;

/// The contents of one block.
pub(crate) type Page = [u8; BLOCK_BYTES];

/// Writes to one file.
pub(crate) struct Gathered {
    /// The file's item as the last of them leaves it, but for the number of its blocks.
    pub item: InodeItem,
    /// New contents of whole blocks: which of the batch's pages.
    pages: BTreeMap<u64, u32>,
    owner: u32,
    need: Need,
}

impl Gathered {
    fn new(item: InodeItem, applying: &Applying<'_>) -> Self {
        Self { item, pages: BTreeMap::new(), owner: applying.owner, need: applying.need() }
    }
}

fn add_page(pages: &mut Vec<Page>, page: &Page) -> u32 {
    pages.push(*page);
    u32::try_from(pages.len() - 1).expect("a batch has fewer pages than a number has values")
}

/// Pages that follow each other.
struct Pages {
    first: u64,
    pages: Vec<u32>,
}

impl Pages {
    /// The block after the last.
    fn end(&self) -> u64 {
        self.first + self.pages.len() as u64
    }
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
    pub(crate) fn settle_unlike(
        &mut self,
        inode: InodeNumber,
        applying: &Applying<'_>,
    ) -> Result<(), AreaError> {
        let (owner, need) = (applying.owner, applying.need());
        match self.gathered.get(&inode) {
            Some(gathered) if (gathered.owner, gathered.need) != (owner, need) => self.settle_file(inode),
            _ => Ok(()),
        }
    }

    /// Takes a write.
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
        self.load_bases(inode, (offset, end), item, applying)?;
        let time = I64::new(applying.time_after(&item));
        (item.mtime_ns, item.ctime_ns) = (time, time);
        item.stamp = applying.stamp(inode);
        item.size = U64::new(item.size.get().max(end));
        let gathered = self.gathered.entry(inode).or_insert_with(|| Gathered::new(item, applying));
        gathered.item = item;
        for block in blocks_touched(offset..end) {
            let block_at = block * BLOCK;
            let (from, to) = (offset.max(block_at), end.min(block_at + BLOCK));
            let source = &bytes[(from - offset) as usize..(to - offset) as usize];
            match gathered.pages.get(&block) {
                Some(page) => {
                    let page = &mut self.pages[*page as usize];
                    page[(from - block_at) as usize..(to - block_at) as usize].copy_from_slice(source);
                }
                None => {
                    let page = source.try_into().expect("only a whole block has no base");
                    gathered.pages.insert(block, add_page(&mut self.pages, page));
                }
            }
        }
        Ok(Applied::Done)
    }

    /// Takes the present contents of the blocks at the edges of a write that covers them in part, if they are not gathered
    /// yet.
    fn load_bases(
        &mut self,
        inode: InodeNumber,
        (offset, end): (u64, u64),
        item: InodeItem,
        applying: &Applying<'_>,
    ) -> Result<(), AreaError> {
        let blocks = blocks_touched(offset..end);
        let last = Some(blocks.end - 1).filter(|last| *last != blocks.start);
        let mut bases = Vec::new();
        for block in [Some(blocks.start), last].into_iter().flatten() {
            let covered = offset <= block * BLOCK && (block + 1) * BLOCK <= end;
            let known = self.gathered.get(&inode).is_some_and(|gathered| gathered.pages.contains_key(&block));
            if !covered && !known {
                bases.push((block, self.load_block(inode, block)?));
            }
        }
        // Nothing can fail from here on.
        for (block, base) in bases {
            let page = add_page(&mut self.pages, base.as_deref().unwrap_or(&[0; BLOCK_BYTES]));
            let gathered = self.gathered.entry(inode).or_insert_with(|| Gathered::new(item, applying));
            gathered.pages.insert(block, page);
        }
        Ok(())
    }

    /// Brings all writes that were gathered to the tree.
    ///
    /// # Errors
    /// `Overfull`; `Poisoned`; `Node`, `Item`, `Medium`.
    pub fn settle_writes(&mut self) -> Result<(), AreaError> {
        while let Some(inode) = self.gathered.keys().next().copied() {
            self.settle_file(inode)?;
        }
        Ok(())
    }

    /// Brings what was gathered for one file to the tree. If that fails the batch is broken.
    pub(crate) fn settle_file(&mut self, inode: InodeNumber) -> Result<(), AreaError> {
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
        let Gathered { mut item, pages, owner, need } = gathered;
        let (mut grown, mut group) = (0, Vec::new());
        for (block, page) in pages {
            let last = group.last().map(Pages::end);
            let apart = last.is_some_and(|end| block - end >= GAP_BLOCKS);
            if apart || group.first().is_some_and(|first: &Pages| block - first.first >= GROUP_BLOCKS) {
                grown += self.put_group(inode, &std::mem::take(&mut group), owner, need)?;
            }
            match group.last_mut() {
                Some(pages) if pages.end() == block => pages.pages.push(page),
                _ => group.push(Pages { first: block, pages: vec![page] }),
            }
        }
        grown += self.put_group(inode, &group, owner, need)?;
        item.blocks = grow(item.blocks, grown);
        self.root.data_blocks = grow(self.root.data_blocks, grown);
        self.put_inode(inode, &item)
    }

    /// Brings pages that lie near each other to the tree, whose extents there are read once. Gives by how much the file's
    /// blocks grew.
    fn put_group(
        &mut self,
        inode: InodeNumber,
        group: &[Pages],
        owner: u32,
        need: Need,
    ) -> Result<i64, AreaError> {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { return Ok(0) };
        // With the one before, which may go on in the first page.
        let old = self.view().extents(inode, first.first.saturating_sub(1)..last.end(), usize::MAX)?;
        let mut places = Vec::new();
        for pages in group {
            let at = old.partition_point(|extent| extent.end() <= pages.first);
            let covering = old[at..].iter().take_while(|extent| extent.first < pages.end());
            match self.place_among(covering, pages.first..pages.end(), owner, need) {
                Ok(found) => places.extend(found),
                Err(error) => {
                    self.give_back(&places);
                    return Err(error);
                }
            }
        }
        let checksums = |extent: &Extent| extent.checksums.as_ref().map_or(0, |sums| size_of_val(&sums[..]));
        let item = |extent| size_of::<Key>() + size_of::<ExtentItem>() + checksums(extent);
        let leaves = places.len().min(old.iter().map(item).sum::<usize>() / LEAF_BYTES_MIN + 2);
        self.begin_extents(&places, u32::try_from(leaves).unwrap_or(u32::MAX / 8), need)?;
        let (mut extents, grown) = self.remains(inode, &old, &places);
        for place in &places {
            let pages = &group[group.partition_point(|pages| pages.end() <= place.first)];
            let skipped = (place.first - pages.first) as usize;
            let blocks = &pages.pages[skipped..skipped + place.run.blocks as usize];
            let mut checksums = Vec::with_capacity(blocks.len());
            for (index, page) in (0..).zip(blocks) {
                let at = at_index(place.run, index);
                checksums.push(self.write_block(inode, place.first + index, at, *page));
            }
            let Run { segment, block, blocks } = place.run;
            let extent = Extent { first: place.first, blocks, segment, block, checksums: Some(checksums) };
            extents.push((extent, true));
        }
        self.replace(inode, &old, extents)?;
        Ok(grown)
    }

    /// What is left of extents where new places take over, and whether that is less than there was; what gave way is freed.
    /// And by how much the blocks grow.
    fn remains(
        &mut self,
        inode: InodeNumber,
        old: &[Extent],
        places: &[Place],
    ) -> (Vec<(Extent, bool)>, i64) {
        let mut left = Vec::with_capacity(old.len() + places.len());
        let mut grown = 0;
        for place in places {
            match place.how {
                How::New => grown += i64::from(place.run.blocks),
                How::Unwritten => self.fill(place.run),
                How::Again => {}
            }
        }
        for extent in old {
            let mut at = extent.first;
            let from = places.partition_point(|place| place.range().end <= extent.first);
            for place in places[from..].iter().take_while(|place| place.first < extent.end()) {
                let taken = place.first.max(extent.first)..place.range().end.min(extent.end());
                if at < taken.start {
                    left.push((extent.part(at..taken.start), true));
                }
                at = taken.end;
                if place.how == How::New {
                    let part = extent.part(taken);
                    grown -= i64::from(part.blocks);
                    self.free_part(inode, &part);
                }
            }
            if at < extent.end() {
                left.push((extent.part(at..extent.end()), at > extent.first));
            }
        }
        (left, grown)
    }

    /// Stores extents in the place of others. Those that are marked have changed; they are joined where they touch.
    fn replace(
        &mut self,
        inode: InodeNumber,
        old: &[Extent],
        mut extents: Vec<(Extent, bool)>,
    ) -> Result<(), AreaError> {
        extents.sort_unstable_by_key(|(extent, _)| extent.first);
        let mut joined: Vec<(Extent, bool)> = Vec::with_capacity(extents.len());
        for (extent, changed) in extents {
            match joined.last_mut() {
                Some((before, before_changed))
                    if (changed || *before_changed) && before.blocks < EXTENT_BLOCKS_MAX =>
                {
                    match join(before, &extent) {
                        Some(both) => (*before, *before_changed) = (both, true),
                        None => joined.push((extent, changed)),
                    }
                }
                _ => joined.push((extent, changed)),
            }
        }
        let mut firsts = Vec::with_capacity(joined.len());
        for (extent, changed) in &joined {
            if !changed {
                firsts.push(extent.first);
                continue;
            }
            let blocks_max = if extent.checksums.is_some() { EXTENT_BLOCKS_MAX } else { u32::MAX };
            let mut first = extent.first;
            while first < extent.end() {
                let end = extent.end().min(first + u64::from(blocks_max));
                self.put_extent(inode, &extent.part(first..end))?;
                firsts.push(first);
                first = end;
            }
        }
        for extent in old {
            if firsts.binary_search(&extent.first).is_err() {
                self.remove(&Key::new(inode.get(), ItemKind::Extent, extent.first))?;
            }
        }
        Ok(())
    }
}
