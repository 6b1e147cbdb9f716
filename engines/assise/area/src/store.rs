//! Where nodes lie: the tree file, and a bounded cache of the nodes that were read from it.
//!
//! A cached node counts only for the checksum that the pointer to it names, so that a block which was freed and
//! written again is never taken for what it held before. Lock order: the cache's lock is taken last and held over
//! no other call.

use crate::AreaError;
use crate::node::Page;
use format::checksum::{self, Salt};
use format::root::NodePointer;
use format::{BLOCK_BYTES, Block, DecodeError};
use pmem::Region;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use zerocopy::little_endian::U32;

/// The blocks of nodes in the tree file.
pub(crate) struct NodeStore {
    region: Region,
    blocks: Range<u32>,
    cache: Mutex<Cache>,
}

impl NodeStore {
    /// The nodes in these blocks of a tree file; of them at most `cached_max` are kept in memory.
    pub fn new(region: Region, blocks: Range<u32>, cached_max: usize) -> Self {
        Self { region, blocks, cache: Mutex::new(Cache::new(cached_max.max(1))) }
    }

    /// The tree file.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The node behind a pointer, checked.
    pub fn load(&self, pointer: &NodePointer, level: u8) -> Result<Arc<Page>, AreaError> {
        let block = pointer.block;
        if let Some(page) = self.lock().get(block, pointer.checksum.get())
            && page.level() == level
        {
            return Ok(page);
        }
        if !self.blocks.contains(&block.get()) {
            return Err(AreaError::Node(block, DecodeError::Field("block")));
        }
        let mut bytes = Box::new([0; BLOCK_BYTES]);
        self.region.read(byte_of(block), &mut bytes[..])?;
        if checksum::of(Salt::NONE, &bytes[..]) != pointer.checksum.get() {
            return Err(AreaError::Node(block, DecodeError::Checksum));
        }
        let page = Page::decode(bytes, block, level).map_err(|error| AreaError::Node(block, error))?;
        let page = Arc::new(page);
        self.lock().put(block, pointer.checksum.get(), Arc::clone(&page));
        Ok(page)
    }

    /// Writes a node; it is durable when the tree file is synced. Gives the pointer to it.
    pub fn write(&self, bytes: Box<[u8; BLOCK_BYTES]>, block: Block, level: u8) -> NodePointer {
        self.write_page(Page::decode(bytes, block, level).expect("what was just encoded is sound"), block)
    }

    /// The same of a node that is a page.
    pub fn write_page(&self, page: Page, block: Block) -> NodePointer {
        assert!(self.blocks.contains(&block.get()), "the allocator gives blocks of nodes");
        let (checksum, version) = (checksum::of(Salt::NONE, page.bytes()), page.version());
        self.region.write(byte_of(block), page.bytes());
        self.lock().put(block, checksum, Arc::new(page));
        NodePointer { block, checksum: U32::new(checksum), version }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Cache> {
        // A panic elsewhere leaves at worst an entry missing: the cache is valid at every step.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Offset of a block in its file.
pub(crate) fn byte_of(block: Block) -> u64 {
    u64::from(block.get()) * BLOCK_BYTES as u64
}

struct Cached {
    block: Block,
    checksum: u32,
    page: Arc<Page>,
    used: bool,
}

/// Nodes by block; the one that was not used for longest, about, makes room (a clock).
struct Cache {
    entries: Vec<Cached>,
    index: HashMap<Block, usize>,
    hand: usize,
    entries_max: usize,
}

impl Cache {
    fn new(entries_max: usize) -> Self {
        Self { entries: Vec::new(), index: HashMap::new(), hand: 0, entries_max }
    }

    fn get(&mut self, block: Block, checksum: u32) -> Option<Arc<Page>> {
        let entry = &mut self.entries[*self.index.get(&block)?];
        if entry.checksum != checksum {
            return None;
        }
        entry.used = true;
        Some(Arc::clone(&entry.page))
    }

    fn put(&mut self, block: Block, checksum: u32, page: Arc<Page>) {
        let entry = Cached { block, checksum, page, used: true };
        if let Some(&at) = self.index.get(&block) {
            self.entries[at] = entry;
            return;
        }
        if self.entries.len() < self.entries_max {
            self.index.insert(block, self.entries.len());
            self.entries.push(entry);
            return;
        }
        while std::mem::take(&mut self.entries[self.hand].used) {
            self.hand = (self.hand + 1) % self.entries.len();
        }
        self.index.remove(&self.entries[self.hand].block);
        self.index.insert(block, self.hand);
        self.entries[self.hand] = entry;
        self.hand = (self.hand + 1) % self.entries.len();
    }
}
