//! The tree of one commit, to be read while a batch prepares the next one.
//!
//! Guarantees: blocks and nodes that a commit names keep their contents until the release of a later commit that freed them. A
//! reader that drops its snapshot before that release never reads reused blocks. A block that one reader compared with its
//! checksum is noted for all.

use crate::AreaError;
use crate::node::KEY_MIN;
use crate::segment_file::{SegmentFile, SegmentFiles};
use crate::store::NodeStore;
use crate::table::LedgerPlace;
use crate::tree::Tree;
use crate::view::{Entry, Extent, Item, View};
use format::checksum::{self, Salt};
use format::node::{InodeItem, ItemKind, Key, SegmentItem};
use format::root::Root;
use format::{BLOCK_BYTES, CommitNumber, Cookie, InodeNumber, Name, PoolUid, SegmentId, Sequence};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

/// The tree of one commit. A clone copies no node.
#[derive(Clone)]
pub struct Snapshot {
    pub(crate) store: Arc<NodeStore>,
    tree: Arc<Tree>,
    pub(crate) root: Root,
    pub(crate) segments: Arc<SegmentFiles>,
}

impl Snapshot {
    /// The tree that this root names.
    pub(crate) fn of_root(store: Arc<NodeStore>, root: Root, segments: Arc<SegmentFiles>) -> Self {
        let tree = Arc::new(Tree::committed(root.node, root.height.get()));
        Self { store, tree, root, segments }
    }

    pub(crate) fn view(&self) -> View<'_> {
        View { store: &self.store, tree: &self.tree }
    }

    /// The pool.
    pub fn pool(&self) -> PoolUid {
        self.root.pool
    }

    /// The last commit.
    pub fn commit(&self) -> CommitNumber {
        self.root.commit
    }

    /// Where the ledger stood in the last commit.
    pub fn ledger(&self) -> LedgerPlace {
        LedgerPlace::of_root(&self.root)
    }

    /// The entry of the ledger that the last commit which changed the tree executed.
    pub fn version(&self) -> Sequence {
        self.root.node.version
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
    /// As [`Snapshot::inode`].
    pub fn lookup(&self, directory: InodeNumber, name: Name<'_>) -> Result<Option<Entry>, AreaError> {
        self.view().lookup(directory, name)
    }

    /// Up to `entries_max` entries from a cookie on, in the order of their cookies.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn entries(
        &self,
        directory: InodeNumber,
        from: Cookie,
        entries_max: usize,
    ) -> Result<Vec<Entry>, AreaError> {
        self.view().entries(directory, from, entries_max)
    }

    /// Up to `extents_max` extents that cover any of these blocks of a file, in order. A gap between them is a hole.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
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
    /// As [`Snapshot::inode`].
    pub fn symlink(&self, inode: InodeNumber) -> Result<Vec<u8>, AreaError> {
        self.view().symlink(inode)
    }

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn xattr(&self, inode: InodeNumber, name: &[u8]) -> Result<Option<Vec<u8>>, AreaError> {
        Ok(self.view().xattr(inode, name)?.map(|(_, value)| value))
    }

    /// The names of all extended attributes.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn xattr_names(&self, inode: InodeNumber) -> Result<Vec<Box<[u8]>>, AreaError> {
        self.view().xattr_names(inode)
    }

    /// Whether an inode has extended attributes.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn has_xattrs(&self, inode: InodeNumber) -> Result<bool, AreaError> {
        self.view().has_xattrs(inode)
    }

    /// Up to `inodes_max` inodes that have no name but were open, after `after`.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn orphans(&self, after: InodeNumber, inodes_max: usize) -> Result<Vec<InodeNumber>, AreaError> {
        self.view().orphans(after, inodes_max)
    }

    fn segment(&self, segment: SegmentId) -> Option<&SegmentFile> {
        self.segments.get(&segment).map(|found| &**found)
    }

    /// The data segments.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn segments(&self) -> Result<Vec<(SegmentId, SegmentItem)>, AreaError> {
        self.view().segments()
    }

    /// Whose files a data segment holds, or nobody's but the daemon's; `None` if there is no such segment.
    pub fn segment_owner(&self, segment: SegmentId) -> Option<u32> {
        self.segments.get(&segment).map(|found| found.owner)
    }

    /// The value of a key, whatever it is.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
    pub fn get(&self, key: &Key) -> Result<Option<Box<[u8]>>, AreaError> {
        self.view().get(key)
    }

    /// Up to `items_max` items from a key on, whatever they are.
    ///
    /// # Errors
    /// As [`Snapshot::inode`].
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
    /// `Data`, and as [`Snapshot::inode`].
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
                let found = read_block(self.segment(extent.segment), inode, &extent, block)?;
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
    /// `Data` if the first is not, and as [`Snapshot::inode`].
    ///
    /// # Panics
    /// If the extent does not cover the block.
    pub fn verify(
        &self,
        inode: InodeNumber,
        extent: &Extent,
        from: u64,
        blocks_max: &mut u32,
    ) -> Result<u64, AreaError> {
        assert!((extent.first..extent.end()).contains(&from), "the extent covers the block");
        if extent.checksums.is_none() {
            return Ok(extent.end());
        }
        let segment = self.segment(extent.segment);
        for file_block in from..extent.end() {
            let block = extent.block_of(file_block);
            if segment.is_some_and(|segment| segment.is_verified(block)) {
                continue;
            }
            if *blocks_max == 0 {
                return Ok(file_block);
            }
            *blocks_max -= 1;
            match read_block(segment, inode, extent, file_block) {
                Ok(_) => segment.into_iter().for_each(|segment| segment.set_verified(block)),
                Err(AreaError::Data { .. }) if file_block > from => return Ok(file_block),
                Err(error) => return Err(error),
            }
        }
        Ok(extent.end())
    }
}

/// The largest key.
pub(crate) const KEY_MAX: Key = Key::new(u64::MAX, ItemKind::SubtreeGrant, u64::MAX);

/// Reads one block of a written extent and compares it with its checksum.
pub(crate) fn read_block(
    segment: Option<&SegmentFile>,
    inode: InodeNumber,
    extent: &Extent,
    file_block: u64,
) -> Result<Box<[u8; BLOCK_BYTES]>, AreaError> {
    let (bytes, is_whole) = read_as_is(segment, extent, file_block)?;
    if is_whole {
        return Ok(bytes);
    }
    let (segment, block) = (extent.segment, extent.block_of(file_block));
    Err(AreaError::Data { inode, offset: file_block * BLOCK_BYTES as u64, segment, block })
}

/// Reads one block of a written extent, and says whether it has its checksum.
pub(crate) fn read_as_is(
    segment: Option<&SegmentFile>,
    extent: &Extent,
    file_block: u64,
) -> Result<(Box<[u8; BLOCK_BYTES]>, bool), AreaError> {
    let checksums = extent.checksums.as_ref().expect("only written blocks are read");
    let expected = checksums[extent.index_of(file_block) as usize];
    let mut bytes = Box::new([0; BLOCK_BYTES]);
    let there = match segment {
        Some(segment) => segment.read(extent.block_of(file_block), &mut bytes[..])?,
        None => false,
    };
    let is_whole = there && checksum::of(Salt::NONE, &bytes[..]) == expected;
    Ok((bytes, is_whole))
}
