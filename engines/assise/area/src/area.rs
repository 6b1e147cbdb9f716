//! A pool's shared area: made, opened, read, released.

use crate::AreaError;
use crate::gather::Page;
use crate::layout::{self, Layout};
use crate::node::{HEIGHT_MAX, KEY_MIN};
use crate::space::{FreeBlocks, Space};
use crate::store::NodeStore;
use crate::table::LedgerPlace;
use crate::tree::Tree;
use crate::view::{Entry, Extent, Item, View};
use format::checksum::{self, Salt};
use format::node::{InodeItem, ItemKind, Key, SegmentItem};
use format::record::FileType;
use format::root::Root;
use format::superblock::{FileKind, MAGIC, POOL_VERSION, Superblock};
use format::{
    BLOCK_BYTES, Block, ChainNumber, Cookie, FlipNumber, InodeNumber, Name, PoolUid, SegmentId, Sequence,
};
use pmem::alloc::BlockAllocator;
use pmem::{MediaError, Medium, Region};
use std::ops::{ControlFlow, Range};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{I64, U16, U32, U64};

/// What an area may use, of the medium and of memory. Nothing of it lies in the pool: another start may bring other
/// limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Data blocks of all segments together.
    pub capacity_blocks: u64,
    /// Data blocks of a segment that is made.
    pub segment_blocks: u32,
    /// Data blocks that only what was promised room may take.
    pub reserve_blocks: u64,
    /// Nodes that only what was promised room, or what gives room back, may take.
    pub reserve_nodes: u32,
    /// Nodes kept in memory.
    pub cached_nodes: usize,
    /// Nodes under change in one batch; about 4 KB of memory each.
    pub batch_nodes_max: u32,
    /// Partly written blocks that a batch keeps in memory before it writes them out.
    pub batch_blocks_max: usize,
    /// Items of an inode without a name that are removed at once; what has more is left for `reap`.
    pub reap_items_max: usize,
}

impl Default for Limits {
    /// 64 GB of data in segments of 1 GB, and about 64 MB of memory.
    fn default() -> Self {
        Self {
            capacity_blocks: 16 << 20,
            segment_blocks: 256 << 10,
            reserve_blocks: 8 << 10,
            reserve_nodes: 1 << 10,
            cached_nodes: 8 << 10,
            batch_nodes_max: 4 << 10,
            batch_blocks_max: 4 << 10,
            reap_items_max: 1 << 10,
        }
    }
}

/// What a new pool is made with.
#[derive(Clone, Copy, Debug)]
pub struct NewPool {
    /// The pool.
    pub pool: PoolUid,
    /// The largest number of nodes that the tree may ever have, those of the running batch included.
    pub tree_nodes_max: u32,
    /// Permission bits of the root directory.
    pub root_mode: u32,
    /// Owner of the root directory.
    pub root_uid: u32,
    /// Group of the root directory.
    pub root_gid: u32,
    /// Nanoseconds since 1970.
    pub time_ns: i64,
    /// Where its ledger begins.
    pub ledger: LedgerPlace,
}

/// How full an area is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Data blocks that the medium may hold.
    pub blocks: u64,
    /// Data blocks that can still be taken, the reserve included.
    pub blocks_free: u64,
    /// Nodes that the tree file holds.
    pub nodes: u32,
    /// Nodes that can be taken now.
    pub nodes_free: u32,
    /// Inodes, those without a name included.
    pub inodes: u64,
}

/// The shared area of one node.
///
/// Readers take a shared reference and see the last flip. A batch takes an exclusive one.
pub struct Area {
    pub(crate) store: NodeStore,
    pub(crate) tree: Tree,
    pub(crate) root: Root,
    pub(crate) node_map: BlockAllocator,
    pub(crate) layout: Layout,
    pub(crate) space: Space,
    pub(crate) limits: Limits,
    /// Memory for the pages of batches.
    pub(crate) pages: Vec<Page>,
    /// Nodes that only what was promised room may take.
    pub(crate) kept_nodes: u32,
    /// A commit failed half way.
    pub(crate) poisoned: bool,
    /// The slot of the next flip holds a part of a root that was cut off by a crash.
    pub(crate) torn_slot: bool,
}

impl Area {
    /// Makes the tree of a new pool: a root directory and nothing else. The superblock's magic number is written last,
    /// when all that it promises is settled: a crash before leaves a folder that holds no pool and can be formatted
    /// again.
    ///
    /// # Errors
    /// `AlreadyFormatted`, `Geometry`, `Medium`.
    pub fn format(medium: &Medium, new: &NewPool) -> Result<(), AreaError> {
        match Self::read_superblock(medium) {
            Ok(_) => return Err(AreaError::AlreadyFormatted),
            Err(AreaError::Missing) => {}
            Err(error) => return Err(error),
        }
        let layout = Layout::of_nodes(new.tree_nodes_max).ok_or(AreaError::Geometry("tree_nodes_max"))?;
        match medium.remove(layout::TREE_FILE) {
            Ok(()) | Err(MediaError::NotFound) => {}
            Err(error) => return Err(error.into()),
        }
        let region = medium.create(layout::TREE_FILE, layout.file_bytes())?;
        Self::write_first_root(&region, &layout, new)?;
        let superblock = Superblock {
            magic: MAGIC,
            version: U16::new(POOL_VERSION),
            kind: U16::new(FileKind::Tree as u16),
            checksum: U32::new(0),
            pool: new.pool,
            id: U64::new(0),
            file_bytes: U64::new(layout.file_bytes()),
            owner: U32::new(format::superblock::OWNER_DAEMON),
            chain: ChainNumber::ONLY,
            created_ns: U64::new(u64::try_from(new.time_ns).unwrap_or(0)),
            geometry: U64::new(u64::from(new.tree_nodes_max)),
        };
        let block = superblock.encode();
        let (magic, rest) = block.split_at(MAGIC.len());
        region.write(MAGIC.len() as u64, rest);
        region.settle()?;
        // One word, which never tears: with it the file is a pool. All that it promises was settled just now.
        region.write(0, magic);
        region.settle()?;
        Ok(())
    }

    fn write_first_root(region: &Region, layout: &Layout, new: &NewPool) -> Result<(), AreaError> {
        let mut map = BlockAllocator::format(region.clone(), layout.map_at(), layout.blocks);
        map.allocate_at(Block::new(0), layout.first_node);
        let store = NodeStore::new(region.clone(), layout.nodes(), 1);
        let mut tree = Tree::empty();
        let inode = InodeItem {
            mode: U32::new(FileType::Directory.mode_bits() | (new.root_mode & 0o7777)),
            uid: U32::new(new.root_uid),
            gid: U32::new(new.root_gid),
            links: U32::new(2),
            atime_ns: I64::new(new.time_ns),
            mtime_ns: I64::new(new.time_ns),
            ctime_ns: I64::new(new.time_ns),
            btime_ns: I64::new(new.time_ns),
            parent: InodeNumber::ROOT,
            ..InodeItem::default()
        };
        let key = Key::new(InodeNumber::ROOT.get(), ItemKind::Inode, 0);
        tree.put(&store, key, inode.as_bytes())?;
        let written = tree.write(&store, new.ledger.sequence, &mut || {
            map.allocate(1, None).map(|(block, _)| block).ok_or(AreaError::NoSpace)
        })?;
        let flip = FlipNumber::new(1);
        map.write(flip);
        let root = Root {
            pool: new.pool,
            height: U32::new(written.height),
            flip,
            node: written.root,
            inodes: U64::new(1),
            nodes: U64::new(1),
            next_segment: SegmentId::new(1),
            ..Root::default()
        };
        region.write(layout::root_at(flip), &new.ledger.in_root(root).encode());
        Ok(())
    }

    /// Opens a pool at its last flip. Writes nothing: an open that is interrupted leaves what it found.
    ///
    /// # Errors
    /// `Missing`, `Superblock`, `Roots`, `Map`, `Node`, `Item`, `Geometry`, `Medium`.
    pub fn open(medium: &Medium, limits: Limits) -> Result<Self, AreaError> {
        let (region, superblock) = Self::read_superblock(medium)?;
        let layout = layout::of_superblock(&superblock, region.bytes())?;
        let root = layout::read_root(&region, superblock.pool)?;
        if limits.segment_blocks == 0 {
            return Err(AreaError::Geometry("segment_blocks"));
        }
        let torn_slot = layout::slot_is_torn(&region, superblock.pool, root.flip.next())?;
        let node_map = BlockAllocator::open(region.clone(), layout.map_at(), layout.blocks, root.flip);
        let node_map = node_map.map_err(|error| match error {
            MediaError::Damaged(_) => AreaError::Map(layout::TREE_FILE.to_owned()),
            error => AreaError::Medium(error),
        })?;
        let store = NodeStore::new(region, layout.nodes(), limits.cached_nodes);
        let tree = Tree::committed(root.node, root.height.get());
        let mut space = Space::new(medium.clone(), superblock.pool, &limits, root.next_segment);
        for (id, item) in (View { store: &store, tree: &tree }).segments()? {
            space.open(id, &item, root.flip)?;
        }
        space.note_leftover()?;
        Ok(Self {
            store,
            tree,
            root,
            node_map,
            layout,
            space,
            limits,
            pages: Vec::new(),
            kept_nodes: 0,
            poisoned: false,
            torn_slot,
        })
    }

    /// The tree file with its superblock; `Missing` also if the file was never finished.
    pub(crate) fn read_superblock(medium: &Medium) -> Result<(Region, Superblock), AreaError> {
        let wrong = |error| AreaError::Superblock(layout::TREE_FILE.to_owned(), error);
        let region = match medium.open(layout::TREE_FILE) {
            Ok(region) => region,
            Err(MediaError::NotFound) => return Err(AreaError::Missing),
            Err(MediaError::Length) => return Err(wrong(format::DecodeError::Field("file_bytes"))),
            Err(error) => return Err(error.into()),
        };
        if region.bytes() < BLOCK_BYTES as u64 {
            return Err(wrong(format::DecodeError::Truncated));
        }
        let mut bytes = [0; BLOCK_BYTES];
        region.read(0, &mut bytes)?;
        if layout::is_unfinished(&bytes) {
            return Err(AreaError::Missing);
        }
        let superblock = Superblock::decode(&bytes, FileKind::Tree).map_err(wrong)?;
        Ok((region, superblock))
    }

    /// Clears what a cut-off flip left in the slot of the next one, before anything is written to the blocks that it
    /// names: a part of that root, completed by a part of the next, could be whole again when its nodes are not.
    pub(crate) fn clear_torn_slot(&mut self) -> Result<(), AreaError> {
        if self.torn_slot {
            let region = self.store.region();
            region.write(layout::root_at(self.root.flip.next()), &[0; size_of::<Root>()]);
            region.settle()?;
            self.torn_slot = false;
        }
        Ok(())
    }

    pub(crate) fn view(&self) -> View<'_> {
        View { store: &self.store, tree: &self.tree }
    }

    /// The pool.
    pub fn pool(&self) -> PoolUid {
        self.root.pool
    }

    /// The last flip.
    pub fn flip(&self) -> FlipNumber {
        self.root.flip
    }

    /// Where the ledger stood in the last flip.
    pub fn ledger(&self) -> LedgerPlace {
        LedgerPlace::of_root(&self.root)
    }

    /// The entry of the ledger that the last flip which changed the tree executed.
    pub fn version(&self) -> Sequence {
        self.root.node.version
    }

    /// How full it is.
    pub fn usage(&self) -> Usage {
        let (blocks_free, blocks) = self.space.totals();
        Usage {
            blocks,
            blocks_free,
            nodes: self.layout.blocks - self.layout.first_node,
            nodes_free: self.node_map.allocatable(),
            inodes: self.root.inodes.get(),
        }
    }

    /// Segments that were made, and data blocks that they hold.
    pub fn segment_totals(&self) -> (u64, u64) {
        self.space.made()
    }

    /// Data blocks by whose files can still take them.
    pub fn free_blocks(&self) -> FreeBlocks {
        FreeBlocks { shared: self.space.shared(), own: self.space.own() }
    }

    /// Keeps what was promised for the batch that comes next: so many shared blocks from becoming a user's own, and them and so
    /// many nodes from what nobody promised room for. Until the first time nothing is kept.
    pub fn keep(&mut self, shared_blocks: u64, nodes: u32) {
        self.space.keep(shared_blocks);
        self.kept_nodes = nodes;
    }

    /// Lets the blocks that flips up to `flip` freed be allocated again. The caller has raised the generations of
    /// the files they belonged to, so that no reader takes new bytes for old ones.
    ///
    /// # Errors
    /// `Flip`, if no such flip was made; `Medium`, if the file of a segment that is not needed cannot be removed.
    pub fn release(&mut self, flip: FlipNumber) -> Result<(), AreaError> {
        if flip > self.root.flip {
            return Err(AreaError::Flip(flip));
        }
        self.node_map.release(flip);
        self.space.release(flip)
    }

    /// The attributes of an inode.
    ///
    /// # Errors
    /// `Node`, `Item`, `Medium`, as every reader.
    pub fn inode(&self, inode: InodeNumber) -> Result<Option<InodeItem>, AreaError> {
        self.view().inode(inode)
    }

    /// The entry with this name.
    ///
    /// # Errors
    /// As [`Area::inode`].
    pub fn lookup(&self, directory: InodeNumber, name: Name<'_>) -> Result<Option<Entry>, AreaError> {
        self.view().lookup(directory, name)
    }

    /// Up to `entries_max` entries from a cookie on, in the order of their cookies.
    ///
    /// # Errors
    /// As [`Area::inode`].
    pub fn entries(
        &self,
        directory: InodeNumber,
        from: Cookie,
        entries_max: usize,
    ) -> Result<Vec<Entry>, AreaError> {
        self.view().entries(directory, from, entries_max)
    }

    /// Up to `extents_max` extents that cover any of these blocks of a file, in order. What lies between them
    /// is a hole.
    ///
    /// # Errors
    /// As [`Area::inode`].
    pub fn extents(
        &self,
        inode: InodeNumber,
        blocks: Range<u64>,
        extents_max: usize,
    ) -> Result<Vec<Extent>, AreaError> {
        self.view().extents(inode, blocks, extents_max)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// As [`Area::inode`].
    pub fn symlink(&self, inode: InodeNumber) -> Result<Vec<u8>, AreaError> {
        self.view().symlink(inode)
    }

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// As [`Area::inode`].
    pub fn xattr(&self, inode: InodeNumber, name: &[u8]) -> Result<Option<Vec<u8>>, AreaError> {
        Ok(self.view().xattr(inode, name)?.map(|(_, value)| value))
    }

    /// The names of all extended attributes.
    ///
    /// # Errors
    /// As [`Area::inode`].
    pub fn xattr_names(&self, inode: InodeNumber) -> Result<Vec<Box<[u8]>>, AreaError> {
        self.view().xattr_names(inode)
    }

    /// Whether an inode has extended attributes.
    ///
    /// # Errors
    /// As [`Area::inode`].
    pub fn has_xattrs(&self, inode: InodeNumber) -> Result<bool, AreaError> {
        self.view().has_xattrs(inode)
    }

    /// Up to `inodes_max` inodes that have no name but were open, after `after`.
    ///
    /// # Errors
    /// As [`Area::inode`].
    pub fn orphans(&self, after: InodeNumber, inodes_max: usize) -> Result<Vec<InodeNumber>, AreaError> {
        self.view().orphans(after, inodes_max)
    }

    /// The data segments.
    ///
    /// # Errors
    /// As [`Area::inode`].
    pub fn segments(&self) -> Result<Vec<(SegmentId, SegmentItem)>, AreaError> {
        self.view().segments()
    }

    /// Whose files a data segment holds, or nobody's but the daemon's; `None` if there is no such segment.
    pub fn segment_owner(&self, segment: SegmentId) -> Option<u32> {
        self.space.owner(segment)
    }

    /// The value of a key, whatever it is.
    ///
    /// # Errors
    /// As [`Area::inode`].
    pub fn get(&self, key: &Key) -> Result<Option<Box<[u8]>>, AreaError> {
        self.view().get(key)
    }

    /// Up to `items_max` items from a key on, whatever they are.
    ///
    /// # Errors
    /// As [`Area::inode`].
    pub fn range(&self, from: Option<&Key>, items_max: usize) -> Result<Vec<Item>, AreaError> {
        let mut found = Vec::new();
        self.view().scan(from.unwrap_or(&KEY_MIN), &KEY_MAX, &mut |key, value| {
            if found.len() == items_max {
                return Ok(ControlFlow::Break(()));
            }
            found.push((*key, Box::from(value)));
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }

    /// Reads bytes of a file, each block compared with its checksum; holes are zeros. Gives how many there were
    /// before the end of the file.
    ///
    /// # Errors
    /// `Data`, and as [`Area::inode`].
    pub fn read(&self, inode: InodeNumber, offset: u64, target: &mut [u8]) -> Result<usize, AreaError> {
        let Some(item) = self.inode(inode)? else { return Ok(0) };
        let bytes = item.size.get().saturating_sub(offset).min(target.len() as u64);
        let target = &mut target[..usize::try_from(bytes).expect("at most the length of a slice")];
        target.fill(0);
        if target.is_empty() {
            return Ok(0);
        }
        let end = offset + bytes;
        let blocks = offset / BLOCK_BYTES as u64..end.div_ceil(BLOCK_BYTES as u64);
        for extent in self.extents(inode, blocks.clone(), usize::MAX)? {
            if extent.checksums.is_none() {
                continue;
            }
            for block in extent.first.max(blocks.start)..extent.end().min(blocks.end) {
                let found = read_block(&self.space, inode, &extent, block)?;
                let block_at = block * BLOCK_BYTES as u64;
                let (from, to) = (offset.max(block_at), end.min(block_at + BLOCK_BYTES as u64));
                let within = (from - block_at) as usize..(to - block_at) as usize;
                target[(from - offset) as usize..(to - offset) as usize].copy_from_slice(&found[within]);
            }
        }
        Ok(target.len())
    }

    /// Compares blocks of an extent, from one of the file on, with their checksums, so that others may read them where
    /// they lie: not those that this process wrote or compared before, and of the rest at most `blocks_max`, which it
    /// counts down. Gives the block of the file before which all are what was written.
    ///
    /// # Errors
    /// `Data` if the first is not, and as [`Area::inode`].
    ///
    /// # Panics
    /// If the extent does not cover the block.
    pub fn verify(
        &mut self,
        inode: InodeNumber,
        extent: &Extent,
        from: u64,
        blocks_max: &mut u32,
    ) -> Result<u64, AreaError> {
        assert!((extent.first..extent.end()).contains(&from), "the extent covers the block");
        if extent.checksums.is_none() {
            return Ok(extent.end());
        }
        for file_block in from..extent.end() {
            let block = extent.block_of(file_block);
            if self.space.is_verified(extent.segment, block) {
                continue;
            }
            if *blocks_max == 0 {
                return Ok(file_block);
            }
            *blocks_max -= 1;
            match read_block(&self.space, inode, extent, file_block) {
                Ok(_) => self.space.set_verified(extent.segment, block),
                Err(AreaError::Data { .. }) if file_block > from => return Ok(file_block),
                Err(error) => return Err(error),
            }
        }
        Ok(extent.end())
    }
}

/// The largest key.
const KEY_MAX: Key = Key::new(u64::MAX, ItemKind::SubtreeGrant, u64::MAX);

/// Reads one block of a written extent and compares it with its checksum.
pub(crate) fn read_block(
    space: &Space,
    inode: InodeNumber,
    extent: &Extent,
    file_block: u64,
) -> Result<Box<[u8; BLOCK_BYTES]>, AreaError> {
    let (bytes, is_whole) = read_as_is(space, extent, file_block)?;
    if is_whole {
        return Ok(bytes);
    }
    let (segment, block) = (extent.segment, extent.block_of(file_block));
    Err(AreaError::Data { inode, offset: file_block * BLOCK_BYTES as u64, segment, block })
}

/// Reads one block of a written extent, and says whether it has its checksum.
pub(crate) fn read_as_is(
    space: &Space,
    extent: &Extent,
    file_block: u64,
) -> Result<(Box<[u8; BLOCK_BYTES]>, bool), AreaError> {
    let checksums = extent.checksums.as_ref().expect("only written blocks are read");
    let expected = checksums[extent.index_of(file_block) as usize];
    let mut bytes = Box::new([0; BLOCK_BYTES]);
    let there = space.read(extent.segment, extent.block_of(file_block), &mut bytes[..])?;
    let is_whole = there && checksum::of(Salt::NONE, &bytes[..]) == expected;
    Ok((bytes, is_whole))
}

const _: () = assert!(HEIGHT_MAX <= u8::MAX as u32);
