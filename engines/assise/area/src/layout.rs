//! Where things stand in the tree file: superblock, two root slots, allocation map, nodes.

use crate::AreaError;
use crate::node::HEIGHT_MAX;
use format::root::Root;
use format::superblock::{MAGIC, Superblock};
use format::{BLOCK_BYTES, CommitNumber, DecodeError, PoolUid};
use pmem::{Region, alloc};
use std::ops::Range;

/// Name of the tree's file.
pub const TREE_FILE: &str = "tree";

/// Superblock and root slots.
const BLOCKS_BEFORE_MAP: u32 = 3;

/// The smallest tree that can work: room for what is kept for giving back, and some.
const NODES_MIN: u32 = 128;

/// Sizes of a tree file, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Of the whole file.
    pub blocks: u32,
    /// The first block of nodes.
    pub first_node: u32,
}

impl Layout {
    /// The layout of a file for so many nodes.
    pub fn of_nodes(nodes: u32) -> Option<Self> {
        if nodes < NODES_MIN {
            return None;
        }
        // The map speaks of itself too: two rounds are enough, a page speaks of 32,512 blocks.
        let mut before = BLOCKS_BEFORE_MAP;
        for _ in 0..3 {
            let map = alloc::bytes_needed(nodes.checked_add(before)?) / BLOCK_BYTES as u64;
            before = BLOCKS_BEFORE_MAP + u32::try_from(map).ok()?;
        }
        Some(Self { blocks: nodes.checked_add(before)?, first_node: before })
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        u64::from(self.blocks) * BLOCK_BYTES as u64
    }

    /// Where the map begins, in bytes.
    pub fn map_at(&self) -> u64 {
        u64::from(BLOCKS_BEFORE_MAP) * BLOCK_BYTES as u64
    }

    /// The blocks of nodes.
    pub fn nodes(&self) -> Range<u32> {
        self.first_node..self.blocks
    }
}

/// Where the root of a commit stands, in bytes.
pub(crate) fn root_at(commit: CommitNumber) -> u64 {
    (1 + commit.get() % 2) * BLOCK_BYTES as u64
}

/// True if the file has no magic number yet, which is the last thing written when it is made.
pub(crate) fn is_unfinished(block: &[u8; BLOCK_BYTES]) -> bool {
    block[..MAGIC.len()].iter().all(|byte| *byte == 0)
}

/// The layout that a superblock states, compared with the file.
pub(crate) fn of_superblock(superblock: &Superblock, file_bytes: u64) -> Result<Layout, AreaError> {
    let wrong = |field| AreaError::Superblock(TREE_FILE.to_owned(), DecodeError::Field(field));
    let nodes = u32::try_from(superblock.geometry.get()).map_err(|_| wrong("geometry"))?;
    let layout = Layout::of_nodes(nodes).ok_or(wrong("geometry"))?;
    if layout.file_bytes() != file_bytes || superblock.file_bytes.get() != file_bytes {
        return Err(wrong("file_bytes"));
    }
    Ok(layout)
}

/// Reads the two root slots.
pub(crate) fn read_roots(
    region: &Region,
    pool: PoolUid,
) -> Result<[Result<Root, DecodeError>; 2], AreaError> {
    let mut roots = [Err(DecodeError::Kind); 2];
    for (slot, root) in roots.iter_mut().enumerate() {
        let mut bytes = [0; size_of::<Root>()];
        region.read((1 + slot as u64) * BLOCK_BYTES as u64, &mut bytes)?;
        *root = Root::decode(&bytes, pool).and_then(|root| check_root(root, slot as u64));
    }
    Ok(roots)
}

/// True if the slot of this commit holds neither a root nor nothing: the traces of a commit that was cut off.
pub(crate) fn slot_is_torn(region: &Region, pool: PoolUid, commit: CommitNumber) -> Result<bool, AreaError> {
    let mut bytes = [0; size_of::<Root>()];
    region.read(root_at(commit), &mut bytes)?;
    let root = Root::decode(&bytes, pool).and_then(|root| check_root(root, commit.get() % 2));
    Ok(root.is_err() && bytes.iter().any(|byte| *byte != 0))
}

fn check_root(root: Root, slot: u64) -> Result<Root, DecodeError> {
    if root.commit.get() % 2 != slot || root.commit.get() == 0 {
        return Err(DecodeError::Field("commit"));
    }
    if !(1..=HEIGHT_MAX).contains(&root.height.get()) {
        return Err(DecodeError::Field("height"));
    }
    Ok(root)
}

/// The root that counts: the valid one with the larger commit.
pub(crate) fn read_root(region: &Region, pool: PoolUid) -> Result<Root, AreaError> {
    match read_roots(region, pool)? {
        [Ok(first), Ok(second)] if first.commit > second.commit => Ok(first),
        [Ok(_), Ok(root)] | [Ok(root), Err(_)] | [Err(_), Ok(root)] => Ok(root),
        [Err(first), Err(second)] => Err(AreaError::Roots(first, second)),
    }
}
