//! The tree of another node in the place of the own one: the whole tree, or the ranges in which the two differ.
//!
//! Items come in ranges of keys, and blocks of data behind the extents that hold them; each range replaces the items and
//! blocks that were there. All of it goes to nodes and blocks that the last commit does not name. One commit at the end makes
//! it the pool's tree, and frees what the pool held before and does not hold any more.
//!
//! Guarantees: until that commit the pool stays as it was, and an import that is given up leaves no trace but files of
//! segments that no tree names. The commit is made only of a tree that is as large as its sender says, with all its
//! data. All items of the tree have the form on which its readers rely; a message with any other item is refused.

use crate::AreaError;
use crate::area::Area;
use crate::export::{KeyRange, KeySpan};
use crate::layout;
use crate::runs::RunSet;
use crate::segment::Run;
use crate::snapshot::Snapshot;
use crate::space::CommitStamp;
use crate::store::NodeStore;
use crate::stored::{Contents, StoredExtent};
use crate::table::LedgerPlace;
use crate::tree::Tree;
use crate::view::{Extent, View};
use format::checksum::{self, Salt};
use format::node::{EXTENT_BLOCKS_MAX, EXTENT_UNWRITTEN, ExtentItem, InodeItem, ItemKind, Key};
use format::root::{IMPORTED, NodePointer, Root};
use format::{BLOCK_BYTES, Block, InodeNumber, SegmentId, Sequence};
use pmem::alloc::Fit;
use std::collections::{BTreeSet, VecDeque};
use std::ops::{ControlFlow, Range};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// Keys that are taken out at once.
const KEYS_AT_ONCE: usize = 1024;

/// Written blocks whose contents are still to come.
struct Awaited {
    run: Run,
    checksums: Vec<u32>,
    /// Blocks of it that came.
    came: u32,
}

/// See the module.
pub struct Import {
    pub(crate) area: Area,
    pub(crate) tree: Tree,
    made: CommitStamp,
    version: Sequence,
    pub(crate) inodes: u64,
    data_blocks: u64,
    /// The range that is being brought, and its last key that came.
    range: Option<(KeyRange, Option<Key>)>,
    awaited: VecDeque<Awaited>,
    /// Of an import into the tree that was there: the nodes and blocks that are not of that tree.
    made_here: Option<MadeHere>,
    /// The nodes and blocks that the commit frees: those of the tree that was there.
    old_nodes: Vec<Block>,
    old_data: Vec<Run>,
}

/// Nodes and blocks that an import has taken, and not given back yet.
#[derive(Default)]
struct MadeHere {
    nodes: BTreeSet<Block>,
    blocks: RunSet,
}

/// Why an import is refused.
fn refused<T>(why: &'static str) -> Result<T, AreaError> {
    Err(AreaError::Import(why))
}

impl Import {
    /// Begins with nothing. The import alone uses the area.
    ///
    /// # Errors
    /// `Poisoned`; `Node`, `Item`, `Medium` of the tree that is there.
    pub fn begin(area: Area) -> Result<Self, AreaError> {
        let mut import = Self::begin_with_own(area)?;
        let root = import.area.last.root;
        let level = u8::try_from(root.height.get() - 1).expect("the height was checked");
        collect(&import.area.last.store, &root.node, level, &mut import.old_nodes, &mut import.old_data)?;
        (import.tree, import.made_here) = (Tree::empty(), None);
        (import.inodes, import.data_blocks) = (0, 0);
        Ok(import)
    }

    /// Begins with the tree that is there. The ranges have to contain all keys and blocks in which it differs from the
    /// tree that comes.
    ///
    /// # Errors
    /// `Poisoned`; `Medium`.
    pub fn begin_with_own(mut area: Area) -> Result<Self, AreaError> {
        if area.poisoned {
            return Err(AreaError::Poisoned);
        }
        area.clear_torn_slot()?;
        // No user's own segment is made: the head may have reserved all blocks that are free for any user, and its own segments
        // are others.
        area.keep(u64::MAX, 0);
        let root = area.last.root;
        Ok(Self {
            made: CommitStamp { commit: root.commit.next(), time_ns: 0 },
            area,
            tree: Tree::committed(root.node, root.height.get()),
            version: Sequence::new(0),
            inodes: root.inodes.get(),
            data_blocks: root.data_blocks.get(),
            range: None,
            awaited: VecDeque::new(),
            made_here: Some(MadeHere::default()),
            old_nodes: Vec::new(),
            old_data: Vec::new(),
        })
    }

    /// The ranges of keys that changed in the tree that was there, from an entry of the ledger on.
    ///
    /// # Errors
    /// `Node`, `Item`, `Medium`.
    pub fn changed_from(&self, from: Sequence) -> Result<Vec<KeySpan>, AreaError> {
        self.area.last.changed_spans(from)
    }

    /// The following ranges are of a tree that this entry of the ledger changed last.
    ///
    /// # Errors
    /// `Import`: it is older than that of the ranges before.
    pub fn begin_round(&mut self, version: Sequence) -> Result<(), AreaError> {
        self.end_range()?;
        if version < self.version {
            return refused("an older tree");
        }
        self.version = version;
        Ok(())
    }

    fn view(&self) -> View<'_> {
        View { store: &self.area.last.store, tree: &self.tree }
    }

    fn end_range(&mut self) -> Result<(), AreaError> {
        if !self.awaited.is_empty() {
            return refused("blocks are missing");
        }
        self.range = None;
        Ok(())
    }

    /// Begins a range: the items and blocks of it that are there are removed.
    ///
    /// # Errors
    /// `Import`: the range before is not whole. `NoSpace`, `Node`, `Item`, `Medium`.
    pub fn begin_range(&mut self, range: KeyRange) -> Result<(), AreaError> {
        self.end_range()?;
        self.clear(&range)?;
        self.range = Some((range, None));
        Ok(())
    }

    fn clear(&mut self, range: &KeyRange) -> Result<(), AreaError> {
        self.cut_at_start(range)?;
        let mut from = range.first;
        loop {
            let mut found = Vec::new();
            let mut next = None;
            self.view().scan(&from, &crate::snapshot::KEY_MAX, &mut |key, value| {
                let beyond = range.end.filter(|end| key >= end);
                let is_piece =
                    beyond.is_some_and(|end| is_extent_of(key, &end) && key.sub() < range.blocks_to);
                if beyond.is_some() && !is_piece {
                    return Ok(ControlFlow::Break(()));
                }
                if found.len() == KEYS_AT_ONCE {
                    next = Some(*key);
                    return Ok(ControlFlow::Break(()));
                }
                let is_before = is_extent_of(key, &range.first) && key.sub() < range.blocks_from;
                if !is_before {
                    found.push((*key, Box::<[u8]>::from(value)));
                }
                Ok(ControlFlow::Continue(()))
            })?;
            for (key, value) in found {
                self.take_out(&key, &value, 0..end_within(range, &key))?;
            }
            match next {
                Some(next) => from = next,
                None => return Ok(()),
            }
        }
    }

    /// An extent that begins before the first block of the range and reaches into it keeps only its blocks before the
    /// range, and those behind it.
    fn cut_at_start(&mut self, range: &KeyRange) -> Result<(), AreaError> {
        if range.first.kind() != Ok(ItemKind::Extent) || range.blocks_from == 0 {
            return Ok(());
        }
        let (inode, from) = (InodeNumber::new(range.first.object()), range.blocks_from);
        let to = end_within(range, &range.first);
        let reaching = self.view().extent_items(inode, from..from + 1, 1)?;
        match reaching.first().filter(|(key, _)| key.sub() < from) {
            Some((key, value)) => self.take_out(key, value, from..to.max(from)),
            None => Ok(()),
        }
    }

    /// Removes an item; of an extent only these blocks of the file.
    fn take_out(&mut self, key: &Key, value: &[u8], blocks: Range<u64>) -> Result<(), AreaError> {
        match key.kind() {
            Ok(ItemKind::Extent) => {
                let stored = StoredExtent::decode(key, value)?;
                let (first, end) = (stored.first, stored.end());
                let cut = blocks.start.clamp(first, end)..blocks.end.clamp(first, end);
                if cut.is_empty() {
                    return Ok(());
                }
                self.tree.remove(&self.area.last.store, key)?;
                for kept in [first..cut.start, cut.end..end].into_iter().filter(|kept| !kept.is_empty()) {
                    let key = Key::new(key.object(), ItemKind::Extent, kept.start);
                    self.tree.put(&self.area.last.store, key, &stored.value_of(kept))?;
                }
                for extent in stored.extents(cut.clone()) {
                    let covered = extent.first.max(cut.start)..extent.end().min(cut.end);
                    let Extent { segment, block, blocks, .. } = extent.part(covered);
                    self.give_back(Run { segment, block, blocks });
                }
            }
            kind => {
                self.tree.remove(&self.area.last.store, key)?;
                self.inodes -= u64::from(kind == Ok(ItemKind::Inode));
            }
        }
        self.spill_some()
    }

    /// Blocks that the tree does not name any more: those that the last commit names stay until the next one.
    fn give_back(&mut self, run: Run) {
        self.data_blocks -= u64::from(run.blocks);
        let Some(made_here) = &mut self.made_here else { return self.area.space.recycle(run) };
        for (part, is_made_here) in made_here.blocks.remove(run) {
            if is_made_here {
                self.area.space.recycle(part);
            } else {
                self.old_data.push(part);
            }
        }
    }

    /// The next item of the range. Of an extent `owner` is the owner key of the segment in which it lies at the sender; if its
    /// blocks are written they are awaited.
    ///
    /// # Errors
    /// `Import`: it does not belong there. `Item`: a value that no writer produces. `NoSpace`, `Medium`.
    pub fn put(&mut self, key: Key, value: &[u8], owner: u32) -> Result<(), AreaError> {
        let Some((range, last)) = &mut self.range else { return refused("an item of no range") };
        let is_within = key >= range.first && range.end.is_none_or(|end| key < end);
        if !is_within || last.is_some_and(|last| last >= key) {
            return refused("an item out of its place");
        }
        *last = Some(key);
        match key.kind().map_err(|_| AreaError::Item(key, "kind"))? {
            ItemKind::Segment => return refused("a segment of another node"),
            ItemKind::Extent => self.put_extent(&key, value, owner)?,
            ItemKind::Inode => {
                let item = InodeItem::read_from_bytes(value).map_err(|_| AreaError::Item(key, "length"))?;
                if format::record::FileType::of_mode(item.mode.get()).is_none() {
                    return Err(AreaError::Item(key, "mode"));
                }
                self.tree.put(&self.area.last.store, key, value)?;
                self.inodes += 1;
            }
            _ => self.tree.put(&self.area.last.store, key, value)?,
        }
        self.spill_some()
    }

    fn put_extent(&mut self, key: &Key, value: &[u8], owner: u32) -> Result<(), AreaError> {
        let stored = StoredExtent::decode(key, value)?;
        // Blocks of a list need not lie apart here.
        let checksums: Option<Vec<u32>> = match stored.contents {
            Contents::Unwritten(..) => None,
            Contents::Written(_, _, sums) => Some(sums.iter().map(|sum| sum.get()).collect()),
            Contents::Listed(list) => Some(list.iter().map(|listed| listed.checksum.get()).collect()),
        };
        let (segment, block) = (SegmentId::new(0), Block::new(0));
        let extent = Extent { first: stored.first, blocks: stored.blocks, segment, block, checksums };
        if extent.checksums.is_some() && extent.blocks > EXTENT_BLOCKS_MAX {
            return Err(AreaError::Item(*key, "blocks"));
        }
        let mut first = extent.first;
        while first < extent.end() {
            let left = u32::try_from(extent.end() - first).expect("a part of an extent");
            let run = self.area.space.allocate(owner, left, Fit::Run, self.made)?;
            self.data_blocks += u64::from(run.blocks);
            if let Some(made_here) = &mut self.made_here {
                made_here.blocks.add(run);
            }
            let end = first + u64::from(run.blocks);
            let part = extent.part(first..end);
            let item = ExtentItem {
                segment: run.segment,
                block: run.block,
                blocks: U32::new(run.blocks),
                flags: U32::new(if extent.checksums.is_some() { 0 } else { EXTENT_UNWRITTEN }),
            };
            let sums: Vec<U32> = part.checksums.iter().flatten().map(|sum| U32::new(*sum)).collect();
            let value = [item.as_bytes(), sums.as_bytes()].concat();
            let key = Key::new(key.object(), ItemKind::Extent, first);
            self.tree.put(&self.area.last.store, key, &value)?;
            if let Some(checksums) = part.checksums {
                self.awaited.push_back(Awaited { run, checksums, came: 0 });
            }
            first = end;
        }
        Ok(())
    }

    /// Whether blocks are awaited.
    pub fn awaits_blocks(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// The contents of the next block that is awaited. If it is damaged at the sender it is damaged here.
    ///
    /// # Errors
    /// `Import`: none is awaited, or it has another checksum.
    pub fn put_block(&mut self, bytes: &[u8; BLOCK_BYTES], damaged: bool) -> Result<(), AreaError> {
        let Some(awaited) = self.awaited.front_mut() else { return refused("a block of nothing") };
        let expected = awaited.checksums[awaited.came as usize];
        if (checksum::of(Salt::NONE, bytes) != expected) != damaged {
            return refused("a block that differs from its checksum");
        }
        let (segment, block) = (awaited.run.segment, Block::new(awaited.run.block.get() + awaited.came));
        awaited.came += 1;
        if awaited.came == awaited.run.blocks {
            self.awaited.pop_front();
        }
        self.write_block((segment, block), bytes, damaged);
        Ok(())
    }

    fn write_block(&mut self, at: (SegmentId, Block), bytes: &[u8; BLOCK_BYTES], damaged: bool) {
        let space = &mut self.area.space;
        if damaged { space.write_damaged(at.0, at.1, bytes) } else { space.write(at.0, at.1, bytes) }
    }

    /// Writes nodes if many wait in memory.
    fn spill_some(&mut self) -> Result<(), AreaError> {
        if self.tree.changed() < self.area.limits.batch_nodes_max { Ok(()) } else { self.spill() }
    }

    /// Writes the nodes that wait in memory.
    fn spill(&mut self) -> Result<(), AreaError> {
        let tree = std::mem::replace(&mut self.tree, Tree::empty());
        let (store, map, made_here) = (&self.area.last.store, &mut self.area.node_map, &mut self.made_here);
        let written = tree.write(store, self.version, &mut || {
            let (block, _) = map.allocate(1, None, Fit::Lowest).ok_or(AreaError::NoSpace)?;
            made_here.as_mut().map(|made_here| made_here.nodes.insert(block));
            Ok(block)
        })?;
        for block in written.freed {
            if self.made_here.as_mut().is_none_or(|made_here| made_here.nodes.remove(&block)) {
                // No commit named it.
                map.unallocate(block, 1);
            } else {
                self.old_nodes.push(block);
            }
        }
        self.tree = Tree::committed(written.root, written.height);
        Ok(())
    }

    /// Syncs all that came, so that the commit has little to wait for.
    ///
    /// # Errors
    /// `Import`: a range is not whole. `NoSpace`, `Medium`.
    pub fn sync(&mut self) -> Result<(), AreaError> {
        self.end_range()?;
        self.spill()?;
        self.area.space.sync_data()?;
        self.area.last.store.region().sync()?;
        Ok(())
    }

    /// Makes what came the pool's tree, in one commit. It contains the ledger up to `ledger`, and the ledger and the logs beside
    /// it do not belong to it ([`Area::is_imported`]). `totals` are those of the sender's tree: inodes, and blocks of data.
    ///
    /// # Errors
    /// `Import`: not all came. `NoSpace`, `Medium`.
    pub fn finish(mut self, ledger: &LedgerPlace, totals: (u64, u64)) -> Result<Area, AreaError> {
        self.end_range()?;
        if (self.inodes, self.data_blocks) != totals {
            return refused("a tree of another size than was sent");
        }
        for run in std::mem::take(&mut self.old_data) {
            self.area.space.free(run);
        }
        self.area.space.free_recycled();
        self.commit(ledger, IMPORTED)
    }

    /// Makes the tree the pool's, in one commit, and releases what the pool held before. `imported` is [`Root::imported`].
    pub(crate) fn commit(mut self, ledger: &LedgerPlace, imported: u32) -> Result<Area, AreaError> {
        let commit = self.made.commit;
        let items: Vec<_> = self.area.space.items().collect();
        for (id, item) in items {
            let key = Key::new(0, ItemKind::Segment, u64::from(id.get()));
            self.tree.put(&self.area.last.store, key, item.as_bytes())?;
        }
        self.spill()?;
        for block in std::mem::take(&mut self.old_nodes) {
            self.area.node_map.free(block, 1);
        }
        let (inodes, data_blocks) = (self.inodes, self.data_blocks);
        let (mut area, tree) = (self.area, self.tree);
        let (node, height) = tree.committed_root().expect("it was just written");
        let root = Root {
            node,
            height: U32::new(height),
            commit,
            inodes: U64::new(inodes),
            data_blocks: U64::new(data_blocks),
            nodes: U64::new(u64::from(area.node_map.used() - area.layout.first_node)),
            next_segment: area.space.next(),
            imported: U32::new(imported),
            ..area.last.root
        };
        let root = ledger.in_root(root);
        area.node_map.write(commit);
        area.space.sync(commit)?;
        let region = area.last.store.region();
        region.sync()?;
        region.write(layout::root_at(commit), &root.encode());
        region.sync()?;
        area.space.finish_retiring(commit);
        let (store, segments) = (area.last.store.clone(), area.space.files(&area.last.segments));
        area.last = Snapshot::of_root(store, root, segments);
        area.release(commit)?;
        Ok(area)
    }
}

/// Whether a key is that of an extent of the same file as the other one.
fn is_extent_of(key: &Key, other: &Key) -> bool {
    key.object() == other.object() && [key, other].iter().all(|key| key.kind() == Ok(ItemKind::Extent))
}

/// The block of an extent's file before which its blocks belong to the range: behind the last key of the range, those before
/// the first block that an extent behind it covers.
fn end_within(range: &KeyRange, key: &Key) -> u64 {
    range.end.filter(|end| is_extent_of(key, end)).map_or(u64::MAX, |_| range.blocks_to)
}

/// Where the blocks of an extent of the tree lie.
fn runs_of<'a>(key: &Key, value: &'a [u8]) -> Result<impl Iterator<Item = Run> + use<'a>, AreaError> {
    let run = |Extent { segment, block, blocks, .. }| Run { segment, block, blocks };
    Ok(StoredExtent::decode(key, value)?.extents(0..u64::MAX).map(run))
}

/// All nodes and all data below a pointer.
fn collect(
    store: &NodeStore,
    pointer: &NodePointer,
    level: u8,
    nodes: &mut Vec<Block>,
    data: &mut Vec<Run>,
) -> Result<(), AreaError> {
    nodes.push(pointer.block);
    let page = store.load(pointer, level)?;
    for (index, slot) in page.slots().iter().enumerate() {
        if level > 0 {
            collect(store, &page.child(index), level - 1, nodes, data)?;
        } else if slot.key.kind() == Ok(ItemKind::Extent) {
            data.extend(runs_of(&slot.key, page.value(index))?);
        }
    }
    Ok(())
}

impl Area {
    /// Whether an import made the last commit, so that the ledger and the logs beside the tree do not belong to it.
    pub fn is_imported(&self) -> bool {
        self.last.root.imported.get() != 0
    }

    /// The ledger and the logs were made anew: a commit says so.
    ///
    /// # Errors
    /// As [`crate::Batch::commit`].
    pub fn end_import(&mut self) -> Result<(), AreaError> {
        let mut batch = self.begin()?;
        batch.root.imported = U32::new(0);
        let version = batch.version();
        let committed = batch.commit(version)?;
        self.release(committed.commit)
    }
}
