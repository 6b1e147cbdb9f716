//! A batch: changes in memory, made real together by one root commit (Assise §3.2.1, digest).
//!
//! Records are applied one after the other. Each is checked against the tree as the batch has changed it so far; a
//! record that contradicts it is refused and changes nothing. Data goes to blocks that no committed tree names, whole
//! blocks at once, parts of blocks by way of memory, so that small writes to one block cost one block. Dropping a batch
//! leaves the area as it was.
//!
//! A commit writes data, nodes and allocation maps to places that the last commit does not name, syncs them, writes the
//! root into the slot of the commit before the last, and syncs that. Blocks that the commit freed are not allocated
//! again before [`Area::release`].

use crate::AreaError;
use crate::area::Area;
use crate::gather::{Gathered, Page, Stock};
use crate::layout;
use crate::runs::RunSet;
use crate::segment::Run;
use crate::snapshot::Snapshot;
use crate::space::CommitStamp;
use crate::table::LedgerPlace;
use crate::tree::Tree;
use crate::view::View;
use format::node::{InodeItem, ItemKind, Key};
use format::record::Operation;
use format::root::Root;
use format::{
    BLOCK_BYTES, Block, CommitNumber, InodeNumber, LeaseVersion, LogUid, SegmentId, Sequence, Stamp,
};
use pmem::alloc::Fit;
use std::collections::{BTreeMap, BTreeSet};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// The context of a record beside its operation: all values on which its replicas agree without reading them from the
/// log.
#[derive(Clone, Copy)]
pub struct Applying<'a> {
    /// The log.
    pub log: LogUid,
    /// The record.
    pub sequence: Sequence,
    /// When: nanoseconds since 1970. An inode's time of change never goes back, whatever is said here.
    pub time_ns: i64,
    /// The version of the lease under which the log changes an inode. A record that touches several inodes is
    /// judged for each of them.
    pub version_of: &'a dyn Fn(InodeNumber) -> LeaseVersion,
    /// Owner key of the segment that new blocks go to.
    pub owner: u32,
    /// If the record takes the last name of an inode: a process has it open, so that it stays without a name.
    pub keep_open: bool,
    /// Room was promised for it: it may take from the reserves.
    pub promised: bool,
    /// The checksum of the bytes that it writes, where these are one block and the checksum is known.
    pub block_sum: Option<u32>,
}

impl Applying<'_> {
    /// The stamp that it leaves in an inode.
    pub(crate) fn stamp(&self, inode: InodeNumber) -> Stamp {
        Stamp { version: (self.version_of)(inode), log: self.log, sequence: self.sequence }
    }

    /// True if an inode has not seen it.
    pub(crate) fn is_new_to(&self, inode: InodeNumber, item: &InodeItem) -> bool {
        self.stamp(inode).is_newer_than(&item.stamp)
    }

    pub(crate) fn need(&self) -> Need {
        if self.promised { Need::Promised } else { Need::Growing }
    }

    /// The time it leaves in an inode.
    pub(crate) fn time_after(&self, item: &InodeItem) -> i64 {
        self.time_ns.max(item.ctime_ns.get())
    }
}

/// How far into the reserves a change may reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// Not at all, nor into what is promised.
    Growing,
    /// Room was promised for it, or the daemon itself notes what it has decided: up to what giving back needs.
    Promised,
    /// It gives room back, or keeps what there is: all of it.
    Shrinking,
}

/// Paths of the tree whose copies are kept for changes that give room back.
const SHRINKING_PATHS: u32 = 16;

/// Blocks that were written in part, of gathered writes: no more are held in memory.
const PAGES_MAX: usize = 4096;

/// The effect of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// It is in the tree.
    Done,
    /// Every inode that it names had seen it, or something later.
    Stale,
    /// It took the last name of this inode, which waits to be reaped, or created it without one.
    Orphaned(InodeNumber),
    /// It took the last name of this inode, and removed it.
    Removed(InodeNumber),
}

/// The effects of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The commit: blocks that it freed are allocated again after [`Area::release`] of it.
    pub commit: CommitNumber,
    /// Inodes of which blocks were freed: their generations are raised before the release.
    pub freed_of: Vec<InodeNumber>,
    /// Nodes written.
    pub nodes: u32,
    /// Data blocks written, those included that the records brought whole.
    pub data_blocks: u64,
    /// Damaged blocks of files, by their number in the file, of which records replaced a part: they stay damaged.
    pub damaged: Vec<(InodeNumber, u64)>,
}

/// A partly written block, in memory until the commit or until there are too many.
pub(crate) struct Pending {
    pub segment: SegmentId,
    pub block: Block,
    pub bytes: Box<[u8; BLOCK_BYTES]>,
}

/// Where a batch stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BatchState {
    /// Between two records.
    Whole,
    /// A change was begun; if it fails, the batch is broken.
    Changing,
    /// A change failed half way. Nothing more is accepted.
    Broken,
    /// The commit came to its end.
    Committed,
}

/// Changes on their way into the area.
pub struct Batch<'a> {
    pub(crate) area: &'a mut Area,
    pub(crate) tree: Tree,
    /// The root as the commit will write it, except for node, map and commit.
    pub(crate) root: Root,
    pub(crate) pending: BTreeMap<(InodeNumber, u64), Pending>,
    /// Writes that are not in the tree yet.
    pub(crate) gathered: BTreeMap<InodeNumber, Gathered>,
    /// Blocks of theirs that were written in part.
    pub(crate) pages: Vec<Page>,
    /// Blocks allocated for them and not taken yet.
    pub(crate) stock: Stock,
    pub(crate) gathers: bool,
    /// Only notes follow, which a full batch takes too.
    takes_notes: bool,
    /// Allocated by this batch, and part of its tree.
    pub(crate) allocated: RunSet,
    /// Unwritten in the committed tree, and written by this batch where they lie.
    pub(crate) filled: RunSet,
    /// Freed by this batch, but part of the committed tree.
    pub(crate) freed: Vec<Run>,
    pub(crate) freed_of: BTreeSet<InodeNumber>,
    /// Of which inode blocks were freed last.
    pub(crate) freed_last: InodeNumber,
    /// Damaged blocks of files that were to be kept in part, and whether they are damaged still.
    pub(crate) damaged: BTreeMap<(InodeNumber, u64), bool>,
    pub(crate) data_blocks: u64,
    pub(crate) made: CommitStamp,
    state: BatchState,
}

impl Area {
    /// Begins a batch.
    ///
    /// # Errors
    /// `Poisoned`, `Medium`.
    pub fn begin(&mut self) -> Result<Batch<'_>, AreaError> {
        if self.poisoned {
            return Err(AreaError::Poisoned);
        }
        self.clear_torn_slot()?;
        let root = self.last.root;
        let tree = Tree::committed(root.node, root.height.get());
        let made = CommitStamp { commit: root.commit.next(), time_ns: 0 };
        let pages = std::mem::take(&mut self.pages);
        Ok(Batch {
            area: self,
            tree,
            root,
            pending: BTreeMap::new(),
            gathered: BTreeMap::new(),
            pages,
            stock: Stock::default(),
            gathers: false,
            takes_notes: false,
            allocated: RunSet::default(),
            filled: RunSet::default(),
            freed: Vec::new(),
            freed_of: BTreeSet::new(),
            freed_last: InodeNumber::NONE,
            damaged: BTreeMap::new(),
            data_blocks: 0,
            made,
            state: BatchState::Whole,
        })
    }
}

impl Batch<'_> {
    pub(crate) fn view(&self) -> View<'_> {
        View { store: &self.area.last.store, tree: &self.tree }
    }

    /// True if the batch should be committed before more is applied.
    pub fn is_full(&self) -> bool {
        self.tree.changed() >= self.area.limits.batch_nodes_max || self.pages.len() >= PAGES_MAX
    }

    /// The attributes of an inode, as the batch has changed them so far.
    ///
    /// # Errors
    /// `Node`, `Item`, `Medium`.
    pub fn inode(&self, inode: InodeNumber) -> Result<Option<InodeItem>, AreaError> {
        match self.gathered.get(&inode) {
            Some(gathered) => Ok(Some(gathered.item)),
            None => self.view().inode(inode),
        }
    }

    /// Applies one record. An error other than those of a failed medium or a damaged tree changes nothing.
    ///
    /// # Errors
    /// `Refused`, `NoSpace`, `BatchFull` (commit, release, and apply it again), `Overfull` (drop the batch and make it
    /// again), `Poisoned` after an earlier record broke the batch; `Node`, `Item`, `Medium`.
    pub fn apply(
        &mut self,
        inode: InodeNumber,
        operation: &Operation<'_>,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        self.made.time_ns = u64::try_from(applying.time_ns).unwrap_or(0);
        if let Operation::Write { offset, bytes } = *operation
            && self.gathers(offset, bytes)
        {
            self.sync_unlike(inode, applying)?;
            match self.guarded(|batch| batch.gather(inode, offset, bytes, applying)) {
                // There is no place for a new block; the file may have one.
                Err(AreaError::NoSpace | AreaError::BatchFull) if !self.is_full() => {}
                done => return done,
            }
        }
        self.sync_file(inode)?;
        if let Operation::Rename { body, .. } = operation {
            self.sync_file(body.replaced)?;
        }
        self.guarded(|batch| batch.apply_synced(inode, operation, applying))
    }

    /// Applies a record to what is in the tree.
    fn apply_synced(
        &mut self,
        inode: InodeNumber,
        operation: &Operation<'_>,
        applying: &Applying<'_>,
    ) -> Result<Applied, AreaError> {
        match *operation {
            Operation::Pad => Ok(Applied::Stale),
            Operation::Write { offset, bytes } => self.write(inode, offset, bytes, applying),
            Operation::Truncate { size } => self.truncate(inode, size, applying),
            Operation::Allocate { offset, bytes, keep_size: _, punch_hole: true } => {
                self.punch(inode, offset, bytes, applying)
            }
            Operation::Allocate { offset, bytes, keep_size, punch_hole: false } => {
                self.allocate(inode, offset, bytes, keep_size, applying)
            }
            Operation::Create { parent, cookie, name, body, target } => {
                self.create(inode, parent, (cookie, name), &body, target, applying)
            }
            Operation::Link { parent, cookie, name } => self.link(inode, parent, (cookie, name), applying),
            Operation::Unlink { parent, cookie, name, directory } => {
                self.unlink(inode, parent, (cookie, name), directory, applying)
            }
            Operation::Rename { body, old_name, new_name, exchange, whiteout } => {
                self.rename(inode, &body, (old_name, new_name), exchange, whiteout.as_ref(), applying)
            }
            Operation::CreateUnnamed { parent, body, linkable } => {
                self.create_unnamed(inode, parent, &body, linkable, applying)
            }
            Operation::SetAttr { body } => self.set_attr(inode, &body, applying),
            Operation::SetXattr { name, value } => self.set_xattr(inode, name, value, applying),
            Operation::RemoveXattr { name } => self.remove_xattr(inode, name, applying),
        }
    }

    /// No record follows. Changes of the table of logs and grants are taken from here on even if the batch is full: these are
    /// few, and the batch would have to be made again without them.
    pub fn take_notes(&mut self) {
        self.takes_notes = true;
    }

    /// Runs a change; remembers if it failed half way.
    pub(crate) fn guarded<T>(
        &mut self,
        change: impl FnOnce(&mut Self) -> Result<T, AreaError>,
    ) -> Result<T, AreaError> {
        if self.state != BatchState::Whole {
            return Err(AreaError::Poisoned);
        }
        if self.is_full() && !self.takes_notes {
            return Err(AreaError::BatchFull);
        }
        self.unbounded(change)
    }

    /// Nothing more is accepted: something that was taken cannot be done.
    pub(crate) fn give_up(&mut self) {
        self.state = BatchState::Broken;
    }

    /// The same of a change that may not be put off to the next batch.
    pub(crate) fn unbounded<T>(
        &mut self,
        change: impl FnOnce(&mut Self) -> Result<T, AreaError>,
    ) -> Result<T, AreaError> {
        if self.state != BatchState::Whole {
            return Err(AreaError::Poisoned);
        }
        let result = change(self);
        self.state = match (&result, self.state) {
            (Err(_), BatchState::Changing) => BatchState::Broken,
            _ => BatchState::Whole,
        };
        result
    }

    /// From here on the running change modifies the tree: checks that nodes for it are there. `paths` is the
    /// number of places in the tree that it touches, `items` the number of leaves' worth that it may add.
    pub(crate) fn begin_change(&mut self, paths: u32, items: u32, need: Need) -> Result<(), AreaError> {
        let path = self.tree.height() + 2;
        let segments = u32::try_from(self.area.space.count()).unwrap_or(u32::MAX) / 16;
        // A commit also writes the items of the segments, of which all may have changed.
        let wanted = (paths + 2).saturating_mul(path).saturating_add(items).saturating_add(segments);
        let shrinking = SHRINKING_PATHS * path;
        let reserve = match need {
            Need::Growing => shrinking + self.area.limits.reserve_nodes.max(self.area.kept_nodes),
            Need::Promised => shrinking,
            Need::Shrinking => 0,
        };
        let room = u64::from(self.area.node_map.allocatable());
        if u64::from(self.tree.changed()) + u64::from(wanted) + u64::from(reserve) > room {
            let nothing_changed = self.tree.changed() == 0;
            return Err(if nothing_changed { AreaError::NoSpace } else { AreaError::BatchFull });
        }
        self.state = BatchState::Changing;
        Ok(())
    }

    pub(crate) fn put(&mut self, key: Key, value: &[u8]) -> Result<(), AreaError> {
        self.tree.put(&self.area.last.store, key, value)
    }

    pub(crate) fn remove(&mut self, key: &Key) -> Result<bool, AreaError> {
        self.tree.remove(&self.area.last.store, key)
    }

    pub(crate) fn put_inode(&mut self, inode: InodeNumber, item: &InodeItem) -> Result<(), AreaError> {
        self.put(Key::new(inode.get(), ItemKind::Inode, 0), item.as_bytes())
    }

    /// The version of the last commit that changed the tree: the commit's is not smaller.
    pub fn version(&self) -> Sequence {
        self.area.version()
    }

    /// Where the ledger stands with all that the batch contains.
    pub fn set_ledger(&mut self, place: &LedgerPlace) {
        self.root = place.in_root(self.root);
    }

    /// Takes out all items of one object and kind.
    pub(crate) fn remove_kind(&mut self, object: u64, kind: ItemKind) -> Result<(), AreaError> {
        for key in self.keys(object, kind, 0, usize::MAX)? {
            self.remove(&key)?;
        }
        Ok(())
    }

    /// Up to `keys_max` keys of one object and kind from `sub` on.
    pub(crate) fn keys(
        &self,
        object: u64,
        kind: ItemKind,
        sub: u64,
        keys_max: usize,
    ) -> Result<Vec<Key>, AreaError> {
        use std::ops::ControlFlow;
        let mut keys = Vec::new();
        self.view().scan_kind(object, kind, sub, &mut |key, _| {
            if keys.len() == keys_max {
                return Ok(ControlFlow::Break(()));
            }
            keys.push(*key);
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(keys)
    }

    /// Makes the batch real. `version` is the entry of the ledger that it executes, whole or in part; every pointer to
    /// what it changed carries it. If the commit fails half way, the area is poisoned: only another [`Area::open`] tells
    /// whether the commit came about.
    ///
    /// # Errors
    /// `Version` (before that of an earlier commit), `Overfull`, `Poisoned`, `Medium`, `Node`.
    pub fn commit(mut self, version: Sequence) -> Result<Committed, AreaError> {
        self.sync_writes()?;
        self.end_stock();
        if self.state != BatchState::Whole {
            return Err(AreaError::Poisoned);
        }
        if version < self.area.last.root.node.version {
            return Err(AreaError::Version);
        }
        if self.tree.is_committed_as(&self.area.last.root.node) && self.root == self.area.last.root {
            self.state = BatchState::Committed;
            let commit = self.root.commit;
            return Ok(Committed {
                commit,
                freed_of: Vec::new(),
                nodes: 0,
                data_blocks: 0,
                damaged: Vec::new(),
            });
        }
        self.area.poisoned = true;
        self.flush()?;
        for run in std::mem::take(&mut self.freed) {
            self.area.space.free(run);
        }
        self.area.space.free_recycled();
        self.put_segments()?;
        let commit = self.made.commit;
        let nodes = self.write_nodes(version)?;
        self.area.node_map.write(commit);
        // Everything that the root will name is synced before the root is written.
        self.area.space.sync(commit)?;
        let region = self.area.last.store.region();
        region.sync()?;
        region.write(layout::root_at(commit), &self.root.encode());
        region.sync()?;
        self.area.space.finish_retiring(commit);
        let Snapshot { store, segments, .. } = &self.area.last;
        let (store, segments) = (store.clone(), self.area.space.files(segments));
        self.area.last = Snapshot::of_root(store, self.root, segments);
        self.area.poisoned = false;
        self.state = BatchState::Committed;
        let freed_of = std::mem::take(&mut self.freed_of).into_iter().collect();
        let damaged = self.damaged.iter().filter(|(_, is_damaged)| **is_damaged).map(|(block, _)| *block);
        let (damaged, data_blocks) = (damaged.collect(), self.data_blocks);
        Ok(Committed { commit, freed_of, nodes, data_blocks, damaged })
    }

    /// Brings the items of the segments up to date.
    fn put_segments(&mut self) -> Result<(), AreaError> {
        let retiring: Vec<_> = self.area.space.retiring().collect();
        for id in retiring {
            self.remove(&Key::new(0, ItemKind::Segment, u64::from(id.get())))?;
        }
        let items: Vec<_> = self.area.space.items().collect();
        for (id, item) in items {
            let key = Key::new(0, ItemKind::Segment, u64::from(id.get()));
            if self.view().get(&key)?.as_deref() != Some(item.as_bytes()) {
                self.put(key, item.as_bytes())?;
            }
        }
        Ok(())
    }

    /// Writes the changed nodes and frees those they replace.
    fn write_nodes(&mut self, version: Sequence) -> Result<u32, AreaError> {
        let area = &mut *self.area;
        let tree = std::mem::replace(&mut self.tree, Tree::empty());
        let (store, map) = (&area.last.store, &mut area.node_map);
        let written = tree.write(store, version, &mut || {
            map.allocate(1, None, Fit::Lowest).map(|(block, _)| block).ok_or(AreaError::NoSpace)
        })?;
        for block in &written.freed {
            map.free(*block, 1);
        }
        self.root.node = written.root;
        self.root.height = U32::new(written.height);
        self.root.commit = self.made.commit;
        self.root.next_segment = area.space.next();
        self.root.nodes = U64::new(u64::from(map.used() - area.layout.first_node));
        Ok(written.nodes)
    }
}

impl Drop for Batch<'_> {
    /// Gives back in memory what the batch had taken. After a failed commit nothing is touched: the area is poisoned.
    fn drop(&mut self) {
        // Their memory is used again.
        self.pages.clear();
        self.area.pages = std::mem::take(&mut self.pages);
        if self.state == BatchState::Committed || self.area.poisoned {
            return;
        }
        self.end_stock();
        self.area.space.abandon(self.made.commit, self.allocated.take());
    }
}
