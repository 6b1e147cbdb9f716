//! A pool's shared area: made, opened, read, released.

use crate::AreaError;
use crate::gather::Page;
use crate::layout::{self, Layout};
use crate::node::HEIGHT_MAX;
use crate::pin::Pins;
use crate::snapshot::Snapshot;
use crate::space::{FreeBlocks, Space};
use crate::store::NodeStore;
use crate::table::LedgerPlace;
use crate::tree::Tree;
use format::node::{InodeItem, ItemKind, Key};
use format::record::FileType;
use format::root::Root;
use format::superblock::{FileKind, MAGIC, POOL_VERSION, Superblock};
use format::{BLOCK_BYTES, Block, ChainNumber, CommitNumber, InodeNumber, PoolUid, SegmentId};
use pmem::alloc::{BlockAllocator, Fit};
use pmem::{MediaError, Medium, Region};
use std::ops::Deref;
use std::sync::Arc;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{I64, U16, U32, U64};

/// The resources that an area may use, of the medium and of memory. The pool does not contain them: another start may
/// have other limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Data blocks of all segments together.
    pub capacity_blocks: u64,
    /// Data blocks of a segment that is made, at most.
    pub segment_blocks: u32,
    /// Data blocks for which a segment gets space at once.
    pub step_blocks: u32,
    /// Data blocks that only what was promised room may take.
    pub reserve_blocks: u64,
    /// Nodes that only what was promised room, or what gives room back, may take.
    pub reserve_nodes: u32,
    /// Lives of the chain that the tree names, the newest ones.
    pub lives_max: u32,
    /// Nodes kept in memory.
    pub cached_nodes: usize,
    /// Nodes under change in one batch; about 4 KB of memory each.
    pub batch_nodes_max: u32,
    /// Partly written blocks that a batch keeps in memory before it writes them out.
    pub batch_blocks_max: usize,
    /// Items of an inode without a name that are removed at once; if it has more, the rest is left for `reap`.
    pub reap_items_max: usize,
}

impl Default for Limits {
    /// 64 GB of data in segments of 1 GB, and about 64 MB of memory.
    fn default() -> Self {
        Self {
            capacity_blocks: 16 << 20,
            segment_blocks: 256 << 10,
            step_blocks: 2 << 10,
            reserve_blocks: 8 << 10,
            reserve_nodes: 1 << 10,
            lives_max: 1 << 10,
            cached_nodes: 8 << 10,
            batch_nodes_max: 4 << 10,
            batch_blocks_max: 4 << 10,
            reap_items_max: 1 << 10,
        }
    }
}

/// Parameters of a new pool.
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
    /// Those among them for which the medium has to provide space yet.
    pub blocks_unmade: u64,
    /// Nodes that the tree file holds.
    pub nodes: u32,
    /// Nodes that can be taken now.
    pub nodes_free: u32,
    /// Inodes, those without a name included.
    pub inodes: u64,
}

/// The shared area of one node.
///
/// It is read as its last commit; readers that are not to wait for a batch take a [`Snapshot`] of that. A batch has the area
/// for itself.
pub struct Area {
    /// The last commit.
    pub(crate) last: Snapshot,
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
    /// The slot of the next commit holds a part of a root that was cut off by a crash.
    pub(crate) torn_slot: bool,
    /// The pins that readers hold on commits.
    pub(crate) pins: Pins,
}

impl Area {
    /// Makes the tree of a new pool: a root directory and nothing else. The superblock's magic number is written last,
    /// when all that it promises is synced: a crash before leaves a folder that holds no pool and can be formatted
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
        region.sync()?;
        // One word, which never tears: with it the file is a pool. All that it promises was synced just now.
        region.write(0, magic);
        region.sync()?;
        Ok(())
    }

    /// The parameters with which the tree on this medium, which is this area's, was made; those of the root directory
    /// are the present ones.
    ///
    /// # Errors
    /// Those of reading.
    pub fn made_with(&self, medium: &Medium) -> Result<NewPool, AreaError> {
        let (_, superblock) = Self::read_superblock(medium)?;
        let nodes = u32::try_from(superblock.geometry.get());
        let root = self.last.inode(InodeNumber::ROOT)?.ok_or(AreaError::Missing)?;
        Ok(NewPool {
            pool: superblock.pool,
            tree_nodes_max: nodes.map_err(|_| AreaError::Geometry("tree_nodes_max"))?,
            root_mode: root.mode.get() & 0o7777,
            root_uid: root.uid.get(),
            root_gid: root.gid.get(),
            time_ns: i64::try_from(superblock.created_ns.get()).unwrap_or(0),
            ledger: self.last.ledger(),
        })
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
            map.allocate(1, None, Fit::Lowest).map(|(block, _)| block).ok_or(AreaError::NoSpace)
        })?;
        let commit = CommitNumber::new(1);
        map.write(commit);
        let root = Root {
            pool: new.pool,
            height: U32::new(written.height),
            commit,
            node: written.root,
            inodes: U64::new(1),
            nodes: U64::new(1),
            next_segment: SegmentId::new(1),
            ..Root::default()
        };
        region.write(layout::root_at(commit), &new.ledger.in_root(root).encode());
        Ok(())
    }

    /// Opens a pool at its last commit. Writes nothing: an open that is interrupted leaves what it found.
    ///
    /// # Errors
    /// `Missing`, `Superblock`, `Roots`, `Map`, `Node`, `Item`, `Geometry`, `Medium`.
    pub fn open(medium: &Medium, limits: Limits) -> Result<Self, AreaError> {
        let (region, superblock) = Self::read_superblock(medium)?;
        let layout = layout::of_superblock(&superblock, region.bytes())?;
        let root = layout::read_root(&region, superblock.pool)?;
        if limits.segment_blocks == 0 || limits.step_blocks == 0 {
            return Err(AreaError::Geometry("segment_blocks"));
        }
        let torn_slot = layout::slot_is_torn(&region, superblock.pool, root.commit.next())?;
        let node_map = BlockAllocator::open(region.clone(), layout.map_at(), layout.blocks, root.commit);
        let node_map = node_map.map_err(|error| match error {
            MediaError::Damaged(_) => AreaError::Map(layout::TREE_FILE.to_owned()),
            error => AreaError::Medium(error),
        })?;
        let store = NodeStore::new(region, layout.nodes(), limits.cached_nodes);
        let mut space = Space::new(medium.clone(), superblock.pool, &limits, root.next_segment);
        let mut last = Snapshot::of_root(Arc::new(store), root, Arc::default());
        for (id, item) in last.segments()? {
            space.open(id, &item, root.commit)?;
        }
        space.note_leftover()?;
        last.segments = space.files(&last.segments);
        Ok(Self {
            last,
            node_map,
            layout,
            space,
            limits,
            pages: Vec::new(),
            kept_nodes: 0,
            poisoned: false,
            torn_slot,
            pins: Pins::default(),
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

    /// Clears what a cut-off commit left in the slot of the next one, before anything is written to the blocks that it
    /// names: a part of that root, completed by a part of the next, could be whole again when its nodes are not.
    pub(crate) fn clear_torn_slot(&mut self) -> Result<(), AreaError> {
        if self.torn_slot {
            let region = self.last.store.region();
            region.write(layout::root_at(self.last.root.commit.next()), &[0; size_of::<Root>()]);
            region.sync()?;
            self.torn_slot = false;
        }
        Ok(())
    }

    /// The last commit, to be read beside the next batch. Its reader lets go of it before the release of that batch's commit.
    pub fn snapshot(&self) -> Snapshot {
        self.last.clone()
    }

    /// How full it is.
    pub fn usage(&self) -> Usage {
        let (blocks_free, blocks) = self.space.totals();
        Usage {
            blocks,
            blocks_free,
            blocks_unmade: self.space.unprovided(),
            nodes: self.layout.blocks - self.layout.first_node,
            nodes_free: self.node_map.allocatable(),
            inodes: self.last.root.inodes.get(),
        }
    }

    /// Segments that were made, and data blocks that they hold.
    pub fn segment_totals(&self) -> (u64, u64) {
        self.space.made()
    }

    /// Gives back to the medium the space of free blocks that only their users can take, up to so many bytes; returns how many.
    /// Blocks that were freed since the last call of [`Self::note_time`] keep theirs.
    ///
    /// # Errors
    /// `Medium`: the file system cannot do that.
    pub fn give_back(&mut self, bytes_max: u64) -> Result<u64, AreaError> {
        self.space.give_back(bytes_max)
    }

    /// Whether [`Self::give_back`] could give back more if time had passed.
    pub fn has_resting_blocks(&self) -> bool {
        self.space.has_resting_blocks()
    }

    /// From here on time is measured for [`Self::give_back`].
    pub fn note_time(&mut self) {
        self.space.note_time();
    }

    /// Free data blocks for which there is space in the medium, and which files of all owners can take.
    pub fn provided_blocks(&self) -> u64 {
        self.space.provided_shared()
    }

    /// Data blocks by whose files can still take them.
    pub fn free_blocks(&self) -> FreeBlocks {
        FreeBlocks { shared: self.space.shared(), own: self.space.own() }
    }

    /// Sets the reserves for the next batch: `shared_blocks` may not become a user's own; neither they nor `nodes` may
    /// be used by records without a reservation. Until the first call nothing is reserved.
    pub fn keep(&mut self, shared_blocks: u64, nodes: u32) {
        self.space.keep(shared_blocks);
        self.kept_nodes = nodes;
    }

    /// Lets the blocks that commits up to `commit` freed be allocated again, as far as no [`crate::Pin`] keeps them. The caller has
    /// raised the generations of the files they belonged to, so that no reader takes new bytes for old ones.
    ///
    /// # Errors
    /// `Commit`, if no such commit was made; `Medium`, if the file of a segment that is not needed cannot be removed.
    pub fn release(&mut self, commit: CommitNumber) -> Result<(), AreaError> {
        if commit > self.last.root.commit {
            return Err(AreaError::Commit(commit));
        }
        let commit = self.bound_by_pins(commit);
        self.node_map.release(commit);
        self.space.release(commit)
    }
}

impl Deref for Area {
    type Target = Snapshot;

    fn deref(&self) -> &Snapshot {
        &self.last
    }
}

const _: () = assert!(HEIGHT_MAX <= u8::MAX as u32);
