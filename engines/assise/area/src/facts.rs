//! The facts that a check has learned of the inodes of a tree, and whether they fit together.

use crate::AreaError;
use crate::check::Report;
use crate::stored::StoredExtent;
use crate::view::{Extent, decode_entry, split_xattr};
use format::node::{GrantItem, InodeItem, ItemKind, Key, LifeItem, LogItem, SegmentItem};
use format::record::FileType;
use format::{BLOCK_BYTES, Block, Cookie, InodeNumber, Name, SegmentId};
use std::collections::{BTreeMap, BTreeSet};
use zerocopy::FromBytes;

/// An extent, by where it lies.
pub(crate) struct Found {
    pub inode: InodeNumber,
    pub first: u64,
    pub blocks: u32,
    /// Of the blocks; none if they are unwritten.
    pub checksums: Vec<u32>,
}

/// The facts about an inode.
#[derive(Default)]
pub(crate) struct InodeFacts {
    item: Option<InodeItem>,
    /// Entries that name it.
    names: u64,
    /// Directories whose entries name it.
    parents: Vec<InodeNumber>,
    /// Types that these entries say.
    types: Vec<FileType>,
    /// Entries it has, as a directory.
    entries: u64,
    /// Of these, directories.
    directories: u64,
    blocks: u64,
    /// Block after the last written one, and after the last one.
    written_end: u64,
    end: u64,
    target_bytes: u64,
    /// Bytes of an attribute's value that pieces are still to bring.
    xattr_left: u64,
}

/// Everything.
#[derive(Default)]
pub(crate) struct Facts {
    pub inodes: BTreeMap<InodeNumber, InodeFacts>,
    pub orphans: BTreeSet<InodeNumber>,
    pub segments: BTreeMap<SegmentId, SegmentItem>,
    /// Extents by place.
    pub extents: BTreeMap<(SegmentId, Block), Found>,
    /// The names of the directory that is being read, of one hash.
    names: Vec<Box<[u8]>>,
    last_entry: Option<(u64, Cookie)>,
}

impl Facts {
    fn of(&mut self, inode: InodeNumber) -> &mut InodeFacts {
        self.inodes.entry(inode).or_default()
    }

    pub(crate) fn take_in_inode(&mut self, key: &Key, value: &[u8]) -> Result<(), AreaError> {
        let wrong = |what| AreaError::Item(*key, what);
        let inode = InodeNumber::new(key.object());
        match key.kind().map_err(|_| wrong("kind"))? {
            ItemKind::Inode => {
                let item = InodeItem::read_from_bytes(value).map_err(|_| wrong("length"))?;
                FileType::of_mode(item.mode.get()).ok_or(wrong("mode"))?;
                self.of(inode).item = Some(item);
            }
            ItemKind::Symlink => self.of(inode).target_bytes += value.len() as u64,
            ItemKind::Xattr => {
                let (item, name, piece) = split_xattr(key, value)?;
                let facts = self.of(inode);
                if name.is_empty() != (key.sub() & 0xffff != 0) {
                    return Err(wrong("name"));
                }
                let left = if name.is_empty() { facts.xattr_left } else { item.value_bytes.get().into() };
                facts.xattr_left = left.checked_sub(piece.len() as u64).ok_or(wrong("length"))?;
            }
            ItemKind::Entry => self.take_in_entry(key, value)?,
            ItemKind::Extent => self.take_in_extent(key, value)?,
            ItemKind::Orphan => {
                self.orphans.insert(InodeNumber::new(key.sub()));
            }
            ItemKind::Log if key.object() == 0 => {
                LogItem::read_from_bytes(value).map_err(|_| wrong("length"))?;
            }
            ItemKind::Log => {}
            ItemKind::Grant | ItemKind::RenameGrant | ItemKind::LocksGrant | ItemKind::SubtreeGrant => {
                GrantItem::read_from_bytes(value).map_err(|_| wrong("length"))?;
            }
            ItemKind::Life => {
                LifeItem::read_from_bytes(value).map_err(|_| wrong("length"))?;
            }
            ItemKind::Segment => {}
        }
        Ok(())
    }

    fn take_in_entry(&mut self, key: &Key, value: &[u8]) -> Result<(), AreaError> {
        let wrong = |what| AreaError::Item(*key, what);
        let entry = decode_entry(key, value)?;
        let name = Name::new(&entry.name).map_err(|_| wrong("name"))?;
        if !entry.cookie.same_hash(Cookie::of_name(name)) {
            return Err(wrong("cookie"));
        }
        let same = |(object, cookie): (u64, Cookie)| object == key.object() && cookie.same_hash(entry.cookie);
        if !self.last_entry.is_some_and(same) {
            self.names.clear();
        }
        self.last_entry = Some((key.object(), entry.cookie));
        if self.names.contains(&entry.name) {
            return Err(wrong("name stands twice"));
        }
        let directory = InodeNumber::new(key.object());
        let facts = self.of(directory);
        facts.entries += 1;
        facts.directories += u64::from(entry.file_type == FileType::Directory);
        let facts = self.of(entry.inode);
        facts.names += 1;
        if facts.parents.is_empty() || entry.file_type == FileType::Directory {
            facts.parents.push(directory);
        }
        if !facts.types.contains(&entry.file_type) {
            facts.types.push(entry.file_type);
        }
        self.names.push(entry.name);
        Ok(())
    }

    fn take_in_extent(&mut self, key: &Key, value: &[u8]) -> Result<(), AreaError> {
        let mut all = StoredExtent::decode(key, value)?.extents(0..u64::MAX);
        all.try_for_each(|extent| self.take_in_run(key, extent))
    }

    fn take_in_run(&mut self, key: &Key, extent: Extent) -> Result<(), AreaError> {
        let wrong = |what| AreaError::Item(*key, what);
        let inode = InodeNumber::new(key.object());
        let facts = self.of(inode);
        if extent.first < facts.end {
            return Err(wrong("overlaps the extent before"));
        }
        facts.end = extent.end();
        facts.blocks += u64::from(extent.blocks);
        if extent.checksums.is_some() {
            facts.written_end = extent.end();
        }
        let found = Found {
            inode,
            first: extent.first,
            blocks: extent.blocks,
            checksums: extent.checksums.unwrap_or_default(),
        };
        match self.extents.insert((extent.segment, extent.block), found) {
            None => Ok(()),
            Some(_) => Err(wrong("another extent lies there")),
        }
    }

    /// Finds what does not fit together.
    pub(crate) fn judge(&self, report: &mut Report) {
        if !self.inodes.contains_key(&InodeNumber::ROOT) {
            report.find("there is no root directory".to_owned());
        }
        for (inode, facts) in &self.inodes {
            match &facts.item {
                None => report.find(format!("inode {inode} is named or has contents, and is not there")),
                Some(item) => self.judge_inode(*inode, item, facts, &mut |what| {
                    report.find(format!("inode {inode}: {what}"));
                }),
            }
        }
        for orphan in &self.orphans {
            if !self.inodes.contains_key(orphan) {
                report.find(format!("inode {orphan} has no name and is not there"));
            }
        }
    }

    fn judge_inode(
        &self,
        inode: InodeNumber,
        item: &InodeItem,
        facts: &InodeFacts,
        find: &mut dyn FnMut(String),
    ) {
        let file_type = FileType::of_mode(item.mode.get()).expect("it was checked when it was taken in");
        let orphan = self.orphans.contains(&inode);
        if facts.types.iter().any(|found| *found != file_type) {
            find(format!("an entry says {:?}, it is {file_type:?}", facts.types));
        }
        if orphan != (item.links.get() == 0) {
            find(format!("{} links, and {}an orphan", item.links, if orphan { "" } else { "not " }));
        }
        if facts.blocks != item.blocks.get() {
            find(format!("it says {} blocks and has {}", item.blocks, facts.blocks));
        }
        if facts.xattr_left != 0 {
            find("the end of an attribute is missing".to_owned());
        }
        match file_type {
            FileType::Directory => self.judge_directory(inode, item, facts, find),
            _ => {
                if facts.names != u64::from(item.links.get()) {
                    find(format!("{} links and {} names", item.links, facts.names));
                }
                if facts.entries > 0 {
                    find("entries in an inode that is no directory".to_owned());
                }
                if !orphan && item.parent != InodeNumber::NONE {
                    find(format!("it says it is in {}, and is no directory", item.parent));
                }
            }
        }
        let size = item.size.get();
        match file_type {
            // An inode that is half reaped has lost its length first.
            FileType::Regular if facts.written_end > size.div_ceil(BLOCK_BYTES as u64) && !orphan => {
                find(format!("written blocks behind the end at {size}"));
            }
            FileType::Regular => {}
            FileType::Symlink if facts.target_bytes != size && !orphan => {
                find(format!("it says {size} bytes of a target and has {}", facts.target_bytes));
            }
            _ if facts.end > 0 => find("contents in an inode that is no file".to_owned()),
            _ => {}
        }
    }

    fn judge_directory(
        &self,
        inode: InodeNumber,
        item: &InodeItem,
        facts: &InodeFacts,
        find: &mut dyn FnMut(String),
    ) {
        if item.size.get() != facts.entries {
            find(format!("it says {} entries and has {}", item.size, facts.entries));
        }
        let links = u64::from(item.links.get());
        if links != 0 && links != 2 + facts.directories {
            find(format!("{links} links and {} directories in it", facts.directories));
        }
        let names = u64::from(links > 0 && inode != InodeNumber::ROOT);
        if facts.names != names {
            find(format!("a directory with {} names", facts.names));
        }
        if facts.parents.first().is_some_and(|parent| *parent != item.parent) {
            find(format!("it says it is in {}, and is in {}", item.parent, facts.parents[0]));
        }
        if inode == InodeNumber::ROOT && item.parent != InodeNumber::ROOT {
            find("the root is in another directory".to_owned());
        }
        if links > 0 && !self.reaches_root(inode) {
            find("no way leads from it to the root".to_owned());
        }
    }

    fn reaches_root(&self, inode: InodeNumber) -> bool {
        let mut at = inode;
        for _ in 0..=self.inodes.len() {
            if at == InodeNumber::ROOT {
                return true;
            }
            match self.inodes.get(&at).and_then(|facts| facts.item) {
                Some(item) => at = item.parent,
                None => return false,
            }
        }
        false
    }
}
