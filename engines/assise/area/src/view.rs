//! Reading the tree: items become inodes, entries, extents, attributes. The same code reads what was committed
//! and what a batch has changed so far.

use crate::AreaError;
use crate::store::NodeStore;
use crate::stored::StoredExtent;
use crate::tree::Tree;
use format::node::{EntryItem, InodeItem, ItemKind, Key, SegmentItem, VALUE_BYTES_MAX, XattrItem, xattr_sub};
use format::record::{FileType, SYMLINK_BYTES_MAX, XATTR_BYTES_MAX};
use format::{Block, Cookie, InodeNumber, Name, SegmentId};
use std::ops::{ControlFlow, Range};
use zerocopy::FromBytes;

/// A key with its value.
pub type Item = (Key, Box<[u8]>);

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its place in the order of the directory.
    pub cookie: Cookie,
    /// The inode of the entry.
    pub inode: InodeNumber,
    /// The type of that.
    pub file_type: FileType,
    /// The name.
    pub name: Box<[u8]>,
}

/// Blocks of a file that lie together in a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First block of the file that it covers.
    pub first: u64,
    /// Number of blocks.
    pub blocks: u32,
    /// The segment.
    pub segment: SegmentId,
    /// First block in the segment.
    pub block: Block,
    /// CRC-32C of each block; `None` if they were allocated but never written and read as zeros.
    pub checksums: Option<Vec<u32>>,
}

impl Extent {
    /// The block of the file after its last.
    pub fn end(&self) -> u64 {
        self.first + u64::from(self.blocks)
    }

    /// The block of the segment in which a block of the file lies.
    pub fn block_of(&self, file_block: u64) -> Block {
        Block::new(self.block.get() + self.index_of(file_block))
    }

    pub(crate) fn index_of(&self, file_block: u64) -> u32 {
        assert!((self.first..self.end()).contains(&file_block), "the extent covers the block");
        u32::try_from(file_block - self.first).expect("an extent has at most 2^32 blocks")
    }

    /// The part of it that covers these blocks of the file.
    pub(crate) fn part(&self, range: Range<u64>) -> Self {
        let skipped = self.index_of(range.start);
        let blocks = u32::try_from(range.end - range.start).expect("a part is not larger than the whole");
        let sums = |sums: &Vec<u32>| sums[skipped as usize..(skipped + blocks) as usize].to_vec();
        Self {
            first: range.start,
            blocks,
            segment: self.segment,
            block: Block::new(self.block.get() + skipped),
            checksums: self.checksums.as_ref().map(sums),
        }
    }
}

/// Blocks of the largest file.
pub(crate) const FILE_BLOCKS_MAX: u64 = format::record::FILE_BYTES_MAX.div_ceil(format::BLOCK_BYTES as u64);

/// Called for each item of a scan: goes on, breaks or fails.
pub(crate) type Visit<'a> = dyn FnMut(&Key, &[u8]) -> Result<ControlFlow<()>, AreaError> + 'a;

/// A tree with the nodes that it is made of.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub store: &'a NodeStore,
    pub tree: &'a Tree,
}

impl View<'_> {
    /// The value of a key.
    pub fn get(&self, key: &Key) -> Result<Option<Box<[u8]>>, AreaError> {
        self.tree.get(self.store, key, |value| Box::from(value))
    }

    /// Shows the items between two keys, both included, until `visit` breaks or fails.
    pub fn scan(&self, from: &Key, to: &Key, visit: &mut Visit<'_>) -> Result<(), AreaError> {
        let mut failed = None;
        self.tree.scan(self.store, from, to, &mut |key, value| match visit(key, value) {
            Ok(flow) => flow,
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        })?;
        failed.map_or(Ok(()), Err)
    }

    /// Shows all items of one object and kind from `sub` on.
    pub fn scan_kind(
        &self,
        object: u64,
        kind: ItemKind,
        sub: u64,
        visit: &mut Visit<'_>,
    ) -> Result<(), AreaError> {
        self.scan(&Key::new(object, kind, sub), &Key::new(object, kind, u64::MAX), visit)
    }

    fn fixed<T: FromBytes>(&self, key: Key) -> Result<Option<T>, AreaError> {
        let found = self.tree.get(self.store, &key, |value| T::read_from_bytes(value).map_err(|_| ()))?;
        found.transpose().map_err(|()| AreaError::Item(key, "length"))
    }

    pub fn inode(&self, inode: InodeNumber) -> Result<Option<InodeItem>, AreaError> {
        let key = Key::new(inode.get(), ItemKind::Inode, 0);
        let item: Option<InodeItem> = self.fixed(key)?;
        match item {
            Some(item) if FileType::of_mode(item.mode.get()).is_none() => Err(AreaError::Item(key, "mode")),
            item => Ok(item),
        }
    }

    /// The entry at exactly this cookie.
    pub fn entry(&self, directory: InodeNumber, cookie: Cookie) -> Result<Option<Entry>, AreaError> {
        let key = Key::new(directory.get(), ItemKind::Entry, cookie.get());
        self.get(&key)?.map(|value| decode_entry(&key, &value)).transpose()
    }

    pub fn lookup(&self, directory: InodeNumber, name: Name<'_>) -> Result<Option<Entry>, AreaError> {
        let first = Cookie::of_name(name);
        let mut found = None;
        self.scan_kind(directory.get(), ItemKind::Entry, first.get(), &mut |key, value| {
            if !Cookie::from_raw(key.sub()).same_hash(first) {
                return Ok(ControlFlow::Break(()));
            }
            let entry = decode_entry(key, value)?;
            if *entry.name != *name.bytes() {
                return Ok(ControlFlow::Continue(()));
            }
            found = Some(entry);
            Ok(ControlFlow::Break(()))
        })?;
        Ok(found)
    }

    pub fn entries(
        &self,
        directory: InodeNumber,
        from: Cookie,
        entries_max: usize,
    ) -> Result<Vec<Entry>, AreaError> {
        let mut found = Vec::new();
        if entries_max == 0 {
            return Ok(found);
        }
        self.scan_kind(directory.get(), ItemKind::Entry, from.get(), &mut |key, value| {
            found.push(decode_entry(key, value)?);
            Ok(if found.len() < entries_max { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        Ok(found)
    }

    /// The extents that cover any of these blocks of the file, whole, in order.
    pub fn extents(
        &self,
        inode: InodeNumber,
        blocks: Range<u64>,
        extents_max: usize,
    ) -> Result<Vec<Extent>, AreaError> {
        let mut found = Vec::new();
        if extents_max == 0 {
            return Ok(found);
        }
        self.scan_extents(inode, blocks.clone(), &mut |key, value| {
            let stored = StoredExtent::decode(key, value)?;
            found.extend(stored.extents(blocks.clone()).take(extents_max - found.len()));
            Ok(if found.len() < extents_max { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        Ok(found)
    }

    /// Up to `items_max` items of extents that cover any of these blocks of the file, in order.
    pub fn extent_items(
        &self,
        inode: InodeNumber,
        blocks: Range<u64>,
        items_max: usize,
    ) -> Result<Vec<Item>, AreaError> {
        let mut found = Vec::new();
        self.scan_extents(inode, blocks.clone(), &mut |key, value| {
            if StoredExtent::decode(key, value)?.end() > blocks.start {
                found.push((*key, Box::from(value)));
            }
            Ok(if found.len() < items_max { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        Ok(found)
    }

    /// Shows the items of the extents that cover any of these blocks of the file, in order, and perhaps the one before.
    pub fn scan_extents(
        &self,
        inode: InodeNumber,
        blocks: Range<u64>,
        visit: &mut Visit<'_>,
    ) -> Result<(), AreaError> {
        if blocks.is_empty() {
            return Ok(());
        }
        let key = |block| Key::new(inode.get(), ItemKind::Extent, block);
        let mut start = key(blocks.start);
        if let Some(floor) = self.tree.floor(self.store, &key(0), &start)? {
            start = floor;
        }
        self.scan(&start, &key(blocks.end - 1), visit)
    }

    pub fn symlink(&self, inode: InodeNumber) -> Result<Vec<u8>, AreaError> {
        let mut target = Vec::new();
        self.scan_kind(inode.get(), ItemKind::Symlink, 0, &mut |key, value| {
            target.extend_from_slice(value);
            if target.len() > SYMLINK_BYTES_MAX {
                return Err(AreaError::Item(*key, "length"));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(target)
    }

    /// The slot of an attribute, and its value.
    pub fn xattr(&self, inode: InodeNumber, name: &[u8]) -> Result<Option<(u8, Vec<u8>)>, AreaError> {
        for slot in 0..=XATTR_SLOT_MAX {
            let key = Key::new(inode.get(), ItemKind::Xattr, xattr_sub(name, slot, 0));
            let Some(first) = self.get(&key)? else { continue };
            let (item, found, _) = split_xattr(&key, &first)?;
            if found != name {
                continue;
            }
            let value_bytes = item.value_bytes.get() as usize;
            let mut value = Vec::new();
            let last = Key::new(inode.get(), ItemKind::Xattr, xattr_sub(name, slot, u16::MAX));
            self.scan(&key, &last, &mut |key, piece| {
                value.extend_from_slice(split_xattr(key, piece)?.2);
                if value.len() > value_bytes {
                    return Err(AreaError::Item(*key, "length"));
                }
                Ok(ControlFlow::Continue(()))
            })?;
            if value.len() != value_bytes {
                return Err(AreaError::Item(key, "length"));
            }
            return Ok(Some((slot, value)));
        }
        Ok(None)
    }

    pub fn xattr_names(&self, inode: InodeNumber) -> Result<Vec<Box<[u8]>>, AreaError> {
        let mut names = Vec::new();
        self.scan_kind(inode.get(), ItemKind::Xattr, 0, &mut |key, value| {
            let (item, name, _) = split_xattr(key, value)?;
            if item.name_bytes.get() > 0 {
                names.push(Box::from(name));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(names)
    }

    pub fn has_xattrs(&self, inode: InodeNumber) -> Result<bool, AreaError> {
        let mut found = false;
        self.scan_kind(inode.get(), ItemKind::Xattr, 0, &mut |_, _| {
            found = true;
            Ok(ControlFlow::Break(()))
        })?;
        Ok(found)
    }

    /// Up to `inodes_max` inodes without a name, after `after`.
    pub fn orphans(&self, after: InodeNumber, inodes_max: usize) -> Result<Vec<InodeNumber>, AreaError> {
        let mut found = Vec::new();
        let Some(from) = after.get().checked_add(1) else { return Ok(found) };
        self.scan_kind(0, ItemKind::Orphan, from, &mut |key, _| {
            if found.len() == inodes_max {
                return Ok(ControlFlow::Break(()));
            }
            found.push(InodeNumber::new(key.sub()));
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }

    pub fn is_orphan(&self, inode: InodeNumber) -> Result<bool, AreaError> {
        Ok(self.get(&Key::new(0, ItemKind::Orphan, inode.get()))?.is_some())
    }

    pub fn segments(&self) -> Result<Vec<(SegmentId, SegmentItem)>, AreaError> {
        let mut found = Vec::new();
        self.scan_kind(0, ItemKind::Segment, 0, &mut |key, value| {
            let item = SegmentItem::read_from_bytes(value).map_err(|_| AreaError::Item(*key, "length"))?;
            let id = u32::try_from(key.sub()).map_err(|_| AreaError::Item(*key, "segment"))?;
            found.push((SegmentId::new(id), item));
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }
}

/// Attributes with names of one hash in one inode.
pub(crate) const XATTR_SLOT_MAX: u8 = 15;

/// Takes a directory entry apart.
pub(crate) fn decode_entry(key: &Key, value: &[u8]) -> Result<Entry, AreaError> {
    let wrong = |what| AreaError::Item(*key, what);
    let (item, name) = EntryItem::read_from_prefix(value).map_err(|_| wrong("length"))?;
    if name.len() != usize::from(item.name_bytes) || Name::new(name).is_err() {
        return Err(wrong("name"));
    }
    Ok(Entry {
        cookie: Cookie::from_raw(key.sub()),
        inode: item.inode,
        file_type: FileType::from_raw(item.file_type).ok_or(wrong("file_type"))?,
        name: Box::from(name),
    })
}

/// Takes a piece of an attribute apart: its head, the name, and the bytes of the value.
pub(crate) fn split_xattr<'a>(
    key: &Key,
    value: &'a [u8],
) -> Result<(XattrItem, &'a [u8], &'a [u8]), AreaError> {
    let wrong = || AreaError::Item(*key, "length");
    let (item, rest) = XattrItem::read_from_prefix(value).map_err(|_| wrong())?;
    let (name, piece) = rest.split_at_checked(item.name_bytes.get().into()).ok_or_else(wrong)?;
    let fits = piece.len() == usize::from(item.piece_bytes.get())
        && item.value_bytes.get() as usize <= XATTR_BYTES_MAX;
    if fits { Ok((item, name, piece)) } else { Err(wrong()) }
}

/// Bytes of an attribute's value that fit beside a name of so many bytes.
pub(crate) const fn xattr_room(name_bytes: usize) -> usize {
    VALUE_BYTES_MAX - size_of::<XattrItem>() - name_bytes
}
