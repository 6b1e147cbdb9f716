//! What a LibFS keeps of each inode: its lease, its attributes with the session's own changes, its log index or its
//! entries, and who in this process refers to it.

use crate::directory::Directory;
use crate::extents::Extents;
use crate::overlay::{Overlay, Pool};
use crate::words::Held;
use format::node::InodeItem;
use format::record::FileType;
use format::{BLOCK_BYTES, InodeNumber, Sequence};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// Place of a node in its table, for as long as the node stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeIndex(u32);

/// By type of inode.
#[derive(Debug)]
pub(crate) enum Body {
    /// Nothing known yet.
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

/// Value of an extended attribute that an own record set (none: removed), and the record.
pub(crate) type OwnXattr = (Option<Box<[u8]>>, Sequence);

/// An inode.
#[derive(Debug)]
pub(crate) struct Node {
    pub inode: InodeNumber,
    /// With own changes; good while the lease is held.
    pub item: InodeItem,
    pub lease: Option<Held>,
    /// An attempt relied on the lease since the last search for leases to give back.
    pub recent: bool,
    /// The lease is held for a cache outside: it goes back when that has nothing of the inode any more.
    pub held_outside: bool,
    /// It was met in the present count of leases.
    pub counted: bool,
    pub body: Body,
    /// Last own record that changed the item under the present lease.
    pub changed: Sequence,
    /// Own record that created it, until it is digested; else 0.
    pub created: Sequence,
    /// There are no extended attributes but those that own records that are not digested set.
    pub bare: bool,
    /// Own changes of extended attributes that are not digested.
    pub xattrs: BTreeMap<Box<[u8]>, OwnXattr>,
    /// How often a walk led here that was not forgotten.
    pub pins: u64,
    /// Open files.
    pub opens: u32,
    /// Where the open table says so.
    pub open_place: Option<u16>,
    /// SharedFS keeps a reference of the session, by an `Open` call.
    pub referenced: bool,
    /// Last record of the session that changed it, under whatever lease.
    pub last: Sequence,
    /// SharedFS may keep it for the session, as its last name went while it was in use.
    pub orphaned: bool,
    /// An own record removed its last name.
    pub nameless: bool,
    /// It stands in the list of those with records that are not digested.
    pub dirty: bool,
    /// Grows when its contents are changed.
    pub contents_version: u64,
    /// Own records were digested that changed how many blocks it has: only the area knows that number now.
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
            pins: 0,
            opens: 0,
            open_place: None,
            referenced: false,
            last: Sequence::new(0),
            orphaned: false,
            nameless: false,
            dirty: false,
            contents_version: 0,
            blocks_moved: false,
        }
    }

    /// Whether this process refers to it by an open file or a pin.
    pub fn in_use(&self) -> bool {
        self.pins > 0 || self.opens > 0
    }

    /// Its entries.
    ///
    /// # Panics
    /// If it is no directory, which the caller has seen.
    pub fn directory(&mut self) -> &mut Directory {
        match &mut self.body {
            Body::Directory(directory) => directory,
            _ => unreachable!("a node's body is that of its type"),
        }
    }

    /// Its log index and its window into the area.
    ///
    /// # Panics
    /// If it is no file, which the caller has seen.
    pub fn file(&mut self) -> (&mut Overlay, &mut Extents) {
        match &mut self.body {
            Body::File { overlay, extents } => (overlay, extents),
            _ => unreachable!("a node's body is that of its type"),
        }
    }

    /// Makes a body for a type, of an inode of which nothing (`new`: that it holds nothing) is known.
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

    /// Drops everything that was known under the lease. The target of a link stays: it never changes.
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

    /// Drops what records up to `digested` left in the caches; true if some of its records remain.
    pub fn purge(&mut self, pool: &mut Pool, digested: Sequence) -> bool {
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
                        // Written as a whole and without a hole: the area need not be asked.
                        Some(blocks) if overlay.is_empty() && blocks == full => self.item.blocks.set(full),
                        _ => self.blocks_moved |= purged || self.item.size.get() > 0,
                    }
                }
            }
            Body::Directory(directory) => directory.purge(digested),
            Body::Unknown | Body::Symlink(_) | Body::Special => {}
        }
        if self.created <= digested {
            self.created = Sequence::new(0);
        }
        let own = self.xattrs.len();
        self.xattrs.retain(|_, (_, sequence)| *sequence > digested);
        self.bare &= self.xattrs.len() == own;
        self.changed > digested
    }
}

/// Inode numbers come from counters: one multiplication spreads them.
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
    /// Pins of inodes that have no node: a mount's kernel keeps many more than anybody uses.
    pins_apart: HashMap<u64, u64, BuildHasherDefault<Mix>>,
}

impl Nodes {
    pub fn find(&self, inode: InodeNumber) -> Option<NodeIndex> {
        self.by_inode.get(&inode.get()).copied().map(NodeIndex)
    }

    /// The node of an inode, made if there is none.
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

    /// The node of an inode, if it stays where it was.
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

    /// Removes a node of which nothing but its pins is needed; these are kept.
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

    /// One pin less of an inode that has no node.
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

    /// Number of places, used or not.
    pub fn places(&self) -> usize {
        self.nodes.len()
    }

    /// The nodes of so many places from one on, going round, and the place after them.
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
