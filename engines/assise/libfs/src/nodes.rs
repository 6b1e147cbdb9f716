//! The cached state of each inode: its lease, its attributes with the session's own changes, its log index or its
//! entries, and the references that this process has to it.

use crate::directory::Directory;
use crate::extents::Extents;
use crate::overlay::{Overlay, Pool};
use crate::words::GrantedLease;
use format::node::InodeItem;
use format::record::FileType;
use format::{BLOCK_BYTES, Cookie, InodeNumber, Sequence};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// Position of a node in its table, while the node exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeIndex(u32);

/// The part of a node that depends on the type of the inode.
#[derive(Debug)]
pub(crate) enum Body {
    /// The type is not known yet.
    Unknown,
    /// Contents.
    File { overlay: Overlay, extents: Extents },
    /// Entries.
    Directory(Directory),
    /// Target.
    Symlink(Option<Box<[u8]>>),
    /// Device, pipe or socket.
    Special,
}

/// An own change of an extended attribute: value (none: removed) and record.
pub(crate) type OwnXattr = (Option<Box<[u8]>>, Sequence);

/// An inode.
#[derive(Debug)]
pub(crate) struct Node {
    pub inode: InodeNumber,
    /// The attributes with own changes; valid while the lease is held.
    pub item: InodeItem,
    pub lease: Option<GrantedLease>,
    /// An attempt has relied on the lease since the last search for leases to release.
    pub recent: bool,
    /// The lease is held for a cache outside the engine, and released after that cache has dropped its data of the
    /// inode.
    pub held_outside: bool,
    /// The present count of leases has visited the node.
    pub counted: bool,
    pub body: Body,
    /// The last own record that changed the item under the present lease.
    pub changed: Sequence,
    /// The own record that created the inode, until it is digested; then 0.
    pub created: Sequence,
    /// The inode has no extended attributes except those that undigested own records set.
    pub bare: bool,
    /// Undigested own changes of extended attributes.
    pub xattrs: BTreeMap<Box<[u8]>, OwnXattr>,
    /// The directory and the entry by which the last walk came here.
    pub place: Option<(InodeNumber, Cookie)>,
    /// Number of walks that led here and were not forgotten yet.
    pub pins: u64,
    /// Number of open files.
    pub opens: u32,
    /// Position in the open table, if the node is listed there.
    pub open_place: Option<u16>,
    /// SharedFS keeps a reference for the session, from an `Open` call.
    pub referenced: bool,
    /// That reference is one with the right to write.
    pub referenced_to_write: bool,
    /// The last record of the session that changed the inode, under any lease.
    pub last: Sequence,
    /// SharedFS may keep the inode for the session, because its last name was removed while it was in use.
    pub orphaned: bool,
    /// An own record removed its last name.
    pub nameless: bool,
    /// The node is in the list of those with undigested records.
    pub dirty: bool,
    /// Grows with each change of the contents.
    pub contents_version: u64,
    /// Own records changed the number of blocks; after their digest only the area knows the number.
    pub blocks_moved: bool,
}

impl Node {
    fn new(inode: InodeNumber) -> Self {
        Self {
            inode,
            item: InodeItem::default(),
            lease: None,
            recent: false,
            held_outside: false,
            counted: false,
            body: Body::Unknown,
            changed: Sequence::new(0),
            created: Sequence::new(0),
            bare: false,
            xattrs: BTreeMap::new(),
            place: None,
            pins: 0,
            opens: 0,
            open_place: None,
            referenced: false,
            referenced_to_write: false,
            last: Sequence::new(0),
            orphaned: false,
            nameless: false,
            dirty: false,
            contents_version: 0,
            blocks_moved: false,
        }
    }

    /// Whether this process has an open file or a pin of the inode.
    pub fn in_use(&self) -> bool {
        self.pins > 0 || self.opens > 0
    }

    /// The entries.
    ///
    /// # Panics
    /// If the inode is not a directory, which the caller has checked.
    pub fn directory(&mut self) -> &mut Directory {
        match &mut self.body {
            Body::Directory(directory) => directory,
            _ => unreachable!("a node's body is that of its type"),
        }
    }

    /// The log index and the window of cached extents.
    ///
    /// # Panics
    /// If the inode is not a regular file, which the caller has checked.
    pub fn file(&mut self) -> (&mut Overlay, &mut Extents) {
        match &mut self.body {
            Body::File { overlay, extents } => (overlay, extents),
            _ => unreachable!("a node's body is that of its type"),
        }
    }

    /// Sets the body for a type. If `new`, the inode is known to be empty.
    pub fn set_body(&mut self, file_type: FileType, new: bool) {
        self.body = match file_type {
            FileType::Regular => {
                let extents = if new { Extents::nothing() } else { Extents::default() };
                Body::File { overlay: Overlay::default(), extents }
            }
            FileType::Directory => {
                Body::Directory(if new { Directory::empty() } else { Directory::unknown() })
            }
            FileType::Symlink => Body::Symlink(None),
            _ => Body::Special,
        };
    }

    /// Drops all state that was cached under the lease. The target of a symbolic link stays, because it never changes.
    pub fn lose(&mut self, pool: &mut Pool) {
        self.lease = None;
        self.changed = Sequence::new(0);
        self.created = Sequence::new(0);
        self.bare = false;
        self.xattrs.clear();
        self.contents_version += 1;
        match &mut self.body {
            Body::File { overlay, extents } => {
                overlay.clear(pool);
                extents.clear();
            }
            Body::Directory(directory) => *directory = Directory::unknown(),
            Body::Unknown | Body::Symlink(_) | Body::Special => {}
        }
    }

    /// Drops the state of records up to `digested` from the caches, in at most so many steps.
    pub fn purge(&mut self, pool: &mut Pool, digested: Sequence, steps: &mut usize) -> Purged {
        match &mut self.body {
            Body::File { overlay, extents } => {
                let created = self.created > Sequence::new(0) && self.created <= digested;
                let area_has_none = self.item.blocks.get() == 0 && !self.blocks_moved;
                let blocks = if area_has_none { overlay.blocks_of_new_file(pool) } else { None };
                let purged = overlay.purge(pool, digested);
                if purged || created {
                    extents.clear();
                    let full = self.item.size.get().div_ceil(BLOCK_BYTES as u64);
                    match blocks {
                        Some(_) if !purged => {}
                        // The file was written completely and without a hole, so the number of blocks is known without
                        // asking.
                        Some(blocks) if overlay.is_empty() && blocks == full => self.item.blocks.set(full),
                        _ => self.blocks_moved |= purged || self.item.size.get() > 0,
                    }
                }
            }
            Body::Directory(directory) => {
                if !directory.purge(digested, steps) {
                    return Purged::InPart;
                }
            }
            Body::Unknown | Body::Symlink(_) | Body::Special => {}
        }
        if self.created <= digested {
            self.created = Sequence::new(0);
        }
        let own = self.xattrs.len();
        self.xattrs.retain(|_, (_, sequence)| *sequence > digested);
        self.bare &= self.xattrs.len() == own;
        if self.changed > digested { Purged::Dirty } else { Purged::Clean }
    }
}

/// The result of [`Node::purge`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purged {
    /// The node has no undigested records.
    Clean,
    /// It has later records.
    Dirty,
    /// The steps were not enough: it has state of these records.
    InPart,
}

/// A hasher for inode numbers. They come from counters, and one multiplication spreads them.
#[derive(Default)]
pub(crate) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

/// All nodes.
#[derive(Default)]
pub(crate) struct Nodes {
    nodes: Vec<Option<Node>>,
    free: Vec<u32>,
    by_inode: HashMap<u64, u32, BuildHasherDefault<Mix>>,
    /// Pins of inodes without a node: a mount's kernel pins many more inodes than programs use.
    pins_apart: HashMap<u64, u64, BuildHasherDefault<Mix>>,
}

impl Nodes {
    pub fn find(&self, inode: InodeNumber) -> Option<NodeIndex> {
        self.by_inode.get(&inode.get()).copied().map(NodeIndex)
    }

    /// The node of an inode; creates it if there is none.
    pub fn enter(&mut self, inode: InodeNumber) -> NodeIndex {
        if let Some(found) = self.find(inode) {
            return found;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            u32::try_from(self.nodes.len() - 1).expect("fewer nodes than a number has values")
        });
        let pins = self.pins_apart.remove(&inode.get()).unwrap_or(0);
        self.nodes[index as usize] = Some(Node { pins, ..Node::new(inode) });
        self.by_inode.insert(inode.get(), index);
        NodeIndex(index)
    }

    #[inline]
    pub fn get(&self, index: NodeIndex) -> &Node {
        self.nodes[index.0 as usize].as_ref().expect("an index is used while its node stays")
    }

    #[inline]
    pub fn get_mut(&mut self, index: NodeIndex) -> &mut Node {
        self.nodes[index.0 as usize].as_mut().expect("an index is used while its node stays")
    }

    /// The node at an index, if it is still that of the inode.
    pub fn get_if_there(&mut self, index: NodeIndex, inode: InodeNumber) -> Option<&mut Node> {
        self.nodes[index.0 as usize].as_mut().filter(|node| node.inode == inode)
    }

    pub fn remove(&mut self, index: NodeIndex, pool: &mut Pool) {
        if let Some(mut node) = self.nodes[index.0 as usize].take() {
            node.lose(pool);
            self.by_inode.remove(&node.inode.get());
            self.free.push(index.0);
        }
    }

    /// Removes a node of which only the pins are needed; these are kept.
    pub fn set_aside(&mut self, index: NodeIndex, pool: &mut Pool) {
        let Node { inode, pins, .. } = *self.get(index);
        self.remove(index, pool);
        if pins > 0 {
            self.pins_apart.insert(inode.get(), pins);
        }
    }

    /// Whether an inode that has no node is pinned.
    pub fn is_pinned_apart(&self, inode: InodeNumber) -> bool {
        self.pins_apart.contains_key(&inode.get())
    }

    /// Removes one pin of an inode that has no node.
    pub fn unpin_apart(&mut self, inode: InodeNumber) {
        if let Entry::Occupied(mut pins) = self.pins_apart.entry(inode.get()) {
            *pins.get_mut() -= 1;
            if *pins.get() == 0 {
                pins.remove();
            }
        }
    }

    /// Number of nodes.
    pub fn count(&self) -> usize {
        self.by_inode.len()
    }

    /// Number of positions, used or not.
    pub fn places(&self) -> usize {
        self.nodes.len()
    }

    /// The nodes at so many positions from one on, wrapping around, and the position after them.
    pub fn round(&self, from: usize, places: usize) -> (Vec<NodeIndex>, usize) {
        let all = self.nodes.len().max(1);
        let indices = (from..from + places.min(all)).map(|place| place % all);
        let used = indices.filter(|place| self.nodes.get(*place).is_some_and(Option::is_some));
        (used.map(|place| NodeIndex(place as u32)).collect(), (from + places) % all)
    }

    /// The indices of all nodes.
    pub fn indices(&self) -> impl Iterator<Item = NodeIndex> + use<> {
        let indices: Vec<u32> = self.by_inode.values().copied().collect();
        indices.into_iter().map(NodeIndex)
    }
}
