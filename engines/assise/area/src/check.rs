//! Offline verification of a pool's shared area: reads everything, trusts nothing, changes nothing.
//!
//! It does not use the reading code of the area for the tree: it walks the nodes by itself, so that an error there
//! does not hide itself here.

use crate::AreaError;
use crate::area::Area;
use crate::facts::Facts;
use crate::layout::{self, Layout};
use crate::node::{KEY_MIN, Page};
use crate::space;
use crate::store::byte_of;
use crate::tree::keys_within;
use format::checksum::{self, Salt};
use format::node::{ItemKind, Key, SegmentItem};
use format::root::{GIVEN_UP, NodePointer, Root};
use format::{BLOCK_BYTES, Block, CommitNumber, DecodeError, SegmentId};
use pmem::alloc::BlockAllocator;
use pmem::{Medium, Region};
use zerocopy::FromBytes;

/// Findings that are kept as sentences; more are only counted.
const FINDINGS_MAX: usize = 1000;

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Defects, a sentence each; at most 1,000.
    pub findings: Vec<String>,
    /// Findings beyond those.
    pub findings_more: u64,
    /// Observations that are not defects: the traces of a crash.
    pub notes: Vec<String>,
    /// The commit that was checked.
    pub commit: CommitNumber,
    /// Nodes of the tree.
    pub nodes: u64,
    /// Items of the tree.
    pub items: u64,
    /// Inodes, those without a name included.
    pub inodes: u64,
    /// Directory entries.
    pub entries: u64,
    /// Inodes without a name.
    pub orphans: u64,
    /// Data blocks in use.
    pub data_blocks: u64,
    /// Data blocks whose contents were compared with their checksums.
    pub blocks_verified: u64,
    /// Data blocks that were reserved and never written: no checksum is kept of them, and they are read as zeros.
    pub blocks_unwritten: u64,
    /// Data segments.
    pub segments: u64,
}

impl Report {
    /// True if nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty() && self.findings_more == 0
    }

    pub(crate) fn find(&mut self, finding: String) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        } else {
            self.findings_more += 1;
        }
    }
}

/// Verifies a pool. A pool that cannot even be begun with (no tree file, no superblock, no root) gives a report with
/// that finding.
///
/// # Errors
/// `Missing` (nothing to check), `Medium`.
pub fn check(medium: &Medium) -> Result<Report, AreaError> {
    let mut report = Report::default();
    match begin(medium, &mut report) {
        Ok((region, layout, root)) => Checker::new(region, layout, root, &mut report).run(medium)?,
        Err(error @ (AreaError::Missing | AreaError::Medium(_))) => return Err(error),
        Err(error) => report.find(error.to_string()),
    }
    Ok(report)
}

fn begin(medium: &Medium, report: &mut Report) -> Result<(Region, Layout, Root), AreaError> {
    let (region, superblock) = Area::read_superblock(medium)?;
    let layout = layout::of_superblock(&superblock, region.bytes())?;
    for (slot, found) in layout::read_roots(&region, superblock.pool)?.iter().enumerate() {
        match found {
            // A slot that was never written, before the second commit.
            Ok(_) | Err(DecodeError::Kind) => {}
            Err(error) => report.notes.push(format!("root slot {slot}: {error}: a commit was cut off")),
        }
    }
    let root = layout::read_root(&region, superblock.pool)?;
    if root.imported.get() == GIVEN_UP {
        let note =
            "the pool gave up its tree to make room for that of another node, and does not have that yet";
        report.notes.push(note.to_owned());
    }
    Ok((region, layout, root))
}

struct Checker<'a> {
    region: Region,
    layout: Layout,
    root: Root,
    report: &'a mut Report,
    /// Which blocks of the tree file the walk has reached.
    reached: Vec<bool>,
    facts: Facts,
}

/// The bounds of the keys in a node.
struct Bounds {
    first: Key,
    end: Option<Key>,
}

impl<'a> Checker<'a> {
    fn new(region: Region, layout: Layout, root: Root, report: &'a mut Report) -> Self {
        let reached = vec![false; layout.blocks as usize];
        Self { region, layout, root, report, reached, facts: Facts::default() }
    }

    fn run(mut self, medium: &Medium) -> Result<(), AreaError> {
        let root = self.root;
        self.report.commit = root.commit;
        let level = (root.height.get() - 1) as u8;
        self.node(&root.node, level, &Bounds { first: KEY_MIN, end: None })?;
        self.node_map()?;
        self.segments(medium)?;
        self.facts.judge(self.report);
        self.totals();
        Ok(())
    }

    /// Checks one node and all below it. Nodes are visited in the order of their keys.
    fn node(&mut self, pointer: &NodePointer, level: u8, bounds: &Bounds) -> Result<(), AreaError> {
        let block = pointer.block;
        let page = match self.read_node(pointer, level) {
            Ok(page) => page,
            Err(AreaError::Medium(error)) => return Err(AreaError::Medium(error)),
            Err(error) => {
                self.report.find(error.to_string());
                return Ok(());
            }
        };
        self.report.nodes += 1;
        if page.version() > pointer.version {
            self.report.find(format!("node in block {block}: later than the pointer to it"));
        }
        if !keys_within(&page, &bounds.first, bounds.end.as_ref()) {
            self.report.find(format!("node in block {block}: keys that belong elsewhere"));
        }
        for (index, slot) in page.slots().iter().enumerate() {
            if level == 0 {
                self.report.items += 1;
                self.facts.add(&slot.key, page.value(index), self.report);
                continue;
            }
            let child = page.child(index);
            if child.version > pointer.version {
                self.report.find(format!("node in block {block}: a child of a later version"));
            }
            let end = page.slots().get(index + 1).map(|next| next.key).or(bounds.end);
            self.node(&child, level - 1, &Bounds { first: slot.key, end })?;
        }
        Ok(())
    }

    fn read_node(&mut self, pointer: &NodePointer, level: u8) -> Result<Page, AreaError> {
        let block = pointer.block;
        let wrong = |field| AreaError::Node(block, DecodeError::Field(field));
        if !self.layout.nodes().contains(&block.get()) {
            return Err(wrong("block"));
        }
        if std::mem::replace(&mut self.reached[block.get() as usize], true) {
            return Err(wrong("reached twice"));
        }
        let mut bytes = Box::new([0; BLOCK_BYTES]);
        self.region.read(byte_of(block), &mut bytes[..])?;
        if checksum::of(Salt::NONE, &bytes[..]) != pointer.checksum.get() {
            return Err(AreaError::Node(block, DecodeError::Checksum));
        }
        Page::decode(bytes, block, level).map_err(|error| AreaError::Node(block, error))
    }

    fn node_map(&mut self) -> Result<(), AreaError> {
        let (map_at, blocks) = (self.layout.map_at(), self.layout.blocks);
        let map = match BlockAllocator::open(self.region.clone(), map_at, blocks, self.root.commit) {
            Ok(map) => map,
            Err(error) => {
                self.report.find(format!("allocation map of the tree: {error}"));
                return Ok(());
            }
        };
        self.reached[..self.layout.first_node as usize].fill(true);
        compare_map(&map, &self.reached, "tree", self.report);
        Ok(())
    }

    fn segments(&mut self, medium: &Medium) -> Result<(), AreaError> {
        let items = std::mem::take(&mut self.facts.segments);
        for (id, item) in &items {
            self.report.segments += 1;
            if *id >= self.root.next_segment {
                self.report.find(format!(
                    "segment {id} is not made yet: the next one is {}",
                    self.root.next_segment
                ));
            }
            self.segment(medium, *id, item)?;
        }
        for (id, _) in self.facts.extents.keys() {
            if !items.contains_key(id) {
                self.report.find(format!("data in segment {id}, which the tree does not have"));
            }
        }
        for name in medium.list()? {
            if crate::segment_file::segment_of_file(&name).is_some_and(|id| !items.contains_key(&id)) {
                self.report
                    .notes
                    .push(format!("file {name} is of no use: its making or removal was cut off"));
            }
        }
        Ok(())
    }

    fn segment(&mut self, medium: &Medium, id: SegmentId, item: &SegmentItem) -> Result<(), AreaError> {
        let (region, superblock) = match crate::segment_file::open_file(medium, id, self.root.pool, item) {
            Ok(found) => found,
            Err(AreaError::Medium(error)) => return Err(AreaError::Medium(error)),
            Err(error) => {
                self.report.find(error.to_string());
                return Ok(());
            }
        };
        let blocks = (region.bytes() / BLOCK_BYTES as u64) as u32;
        let first = blocks - item.blocks.get();
        let mut reached = vec![false; blocks as usize];
        reached[..first as usize].fill(true);
        let extents = self.facts.extents.range((id, Block::new(0))..=(id, Block::new(u32::MAX)));
        for ((_, block), extent) in extents {
            let inode = extent.inode;
            let end = block.get().checked_add(extent.blocks).filter(|end| *end <= blocks);
            let Some(end) = end.filter(|_| block.get() >= first) else {
                self.report.find(format!("inode {inode}: blocks at {block} beyond segment {id}"));
                continue;
            };
            if extent.checksums.is_empty() {
                self.report.blocks_unwritten += u64::from(extent.blocks);
            }
            for number in block.get()..end {
                self.report.data_blocks += 1;
                if std::mem::replace(&mut reached[number as usize], true) {
                    self.report.find(format!("inode {inode}: block {number} of segment {id} is used twice"));
                }
            }
            for (index, expected) in extent.checksums.iter().enumerate() {
                let at = Block::new(block.get() + index as u32);
                let mut bytes = [0; BLOCK_BYTES];
                self.report.blocks_verified += 1;
                let read = region.read(byte_of(at), &mut bytes);
                if read.is_err() || checksum::of(Salt::NONE, &bytes) != *expected {
                    let offset = (extent.first + index as u64) * BLOCK_BYTES as u64;
                    self.report.find(format!(
                        "inode {inode}, offset {offset}: block {at} of segment {id}: checksum mismatch"
                    ));
                }
            }
        }
        let commit = space::map_commit(superblock.geometry.get(), self.root.commit);
        let map = commit.map(|commit| BlockAllocator::open(region, BLOCK_BYTES as u64, blocks, commit));
        match map {
            Some(Ok(map)) => {
                compare_map(&map, &reached, &format!("segment {id}"), self.report);
                if map.used() - first != item.used.get() {
                    self.report.find(format!("segment {id}: the tree says {} blocks in use", item.used));
                }
            }
            Some(Err(error)) => self.report.find(format!("allocation map of segment {id}: {error}")),
            None => self.report.find(format!("segment {id} is younger than the tree")),
        }
        Ok(())
    }

    fn totals(&mut self) {
        let report = &mut *self.report;
        report.inodes = self.facts.inodes.len() as u64;
        report.orphans = self.facts.orphans.len() as u64;
        let totals = [
            ("inodes", self.root.inodes.get(), report.inodes),
            ("data blocks", self.root.data_blocks.get(), report.data_blocks),
            ("nodes", self.root.nodes.get(), report.nodes),
        ];
        for (what, stated, found) in totals {
            if stated != found {
                report.find(format!("the root says {stated} {what}, there are {found}"));
            }
        }
    }
}

/// Compares a map with what was reached, block by block.
fn compare_map(map: &BlockAllocator, reached: &[bool], what: &str, report: &mut Report) {
    for (number, reached) in (0..).zip(reached) {
        match (map.is_used(Block::new(number)), *reached) {
            (true, false) => report.find(format!("{what}: block {number} is taken and has no owner")),
            (false, true) => report.find(format!("{what}: block {number} is in use and free in the map")),
            _ => {}
        }
    }
}

impl Facts {
    /// Takes an item in. Keys arrive in order.
    pub(crate) fn add(&mut self, key: &Key, value: &[u8], report: &mut Report) {
        if let Err(error) = self.take_in(key, value, report) {
            report.find(error.to_string());
        }
    }

    fn take_in(&mut self, key: &Key, value: &[u8], report: &mut Report) -> Result<(), AreaError> {
        let wrong = |what| AreaError::Item(*key, what);
        match key.kind().map_err(|_| wrong("kind"))? {
            ItemKind::Entry => report.entries += 1,
            ItemKind::Segment => {
                let item = SegmentItem::read_from_bytes(value).map_err(|_| wrong("length"))?;
                let id = u32::try_from(key.sub()).map_err(|_| wrong("segment"))?;
                self.segments.insert(SegmentId::new(id), item);
                return Ok(());
            }
            _ => {}
        }
        self.take_in_inode(key, value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::area::{Limits, NewPool};
    use crate::batch::Batch;
    use format::node::{EntryItem, InodeItem};
    use format::record::FileType;
    use format::{Cookie, InodeNumber, Life, Name, PoolUid, Sequence};
    use pmem::recorded::Recorder;
    use zerocopy::IntoBytes;
    use zerocopy::little_endian::{U32, U64};

    fn file() -> InodeItem {
        InodeItem {
            mode: U32::new(FileType::Regular.mode_bits() | 0o644),
            links: U32::new(1),
            ..InodeItem::default()
        }
    }

    fn entry(inode: u64, name: &[u8]) -> (Key, Vec<u8>) {
        let item = EntryItem {
            inode: InodeNumber::new(inode),
            file_type: FileType::Regular as u8,
            name_bytes: name.len() as u8,
            reserved: [0; 6],
        };
        let cookie = Cookie::of_name(Name::new(name).unwrap()).get();
        (Key::new(1, ItemKind::Entry, cookie), [item.as_bytes(), name].concat())
    }

    /// The findings of the check for a pool with the file 2 in the root, changed by `damage` as no record would.
    fn findings_after(damage: impl FnOnce(&mut Batch<'_>) -> Result<(), AreaError>) -> String {
        let recorder = Recorder::new();
        let medium = recorder.medium();
        let version = Sequence::new(1);
        let new = NewPool {
            pool: PoolUid::new(1),
            tree_nodes_max: 128,
            root_mode: 0o755,
            root_uid: 0,
            root_gid: 0,
            time_ns: 0,
            ledger: crate::LedgerPlace { sequence: Sequence::new(0), position: 0, life: Life::new(0) },
        };
        Area::format(&medium, &new).unwrap();
        let limits = Limits { capacity_blocks: 40, segment_blocks: 20, ..Limits::default() };
        let mut area = Area::open(&medium, limits).unwrap();
        let mut batch = area.begin().unwrap();
        let mut root = batch.view().inode(InodeNumber::ROOT).unwrap().unwrap();
        root.size = U64::new(1);
        batch.put_inode(InodeNumber::ROOT, &root).unwrap();
        batch.put_inode(InodeNumber::new(2), &file()).unwrap();
        let (key, value) = entry(2, b"name");
        batch.put(key, &value).unwrap();
        batch.root.inodes = U64::new(2);
        batch.commit(version).unwrap();
        assert_eq!(check(&medium).unwrap().findings, Vec::<String>::new());
        let mut batch = area.begin().unwrap();
        damage(&mut batch).unwrap();
        batch.commit(version).unwrap();
        check(&medium).unwrap().findings.join("; ")
    }

    fn put_item(
        batch: &mut Batch<'_>,
        inode: u64,
        change: impl FnOnce(&mut InodeItem),
    ) -> Result<(), AreaError> {
        let mut item = batch.view().inode(InodeNumber::new(inode))?.unwrap_or_else(file);
        change(&mut item);
        batch.put_inode(InodeNumber::new(inode), &item)
    }

    type Damage = fn(&mut Batch<'_>) -> Result<(), AreaError>;

    #[test]
    fn whatever_does_not_fit_together_is_found() {
        let table: Vec<(&str, Damage)> = vec![
            ("2 links and 1 names", |batch| put_item(batch, 2, |item| item.links = U32::new(2))),
            ("0 links, and not an orphan", |batch| put_item(batch, 2, |item| item.links = U32::new(0))),
            ("1 links, and an orphan", |batch| batch.put(Key::new(0, ItemKind::Orphan, 2), &[])),
            ("has no name and is not there", |batch| batch.put(Key::new(0, ItemKind::Orphan, 9), &[])),
            ("is not there", |batch| batch.remove(&Key::new(2, ItemKind::Inode, 0)).map(|_| ())),
            ("it says it is in 1, and is no directory", |batch| {
                put_item(batch, 2, |item| item.parent = InodeNumber::ROOT)
            }),
            ("1 links and 0 names", |batch| put_item(batch, 3, |_| ())),
            ("it says 1 entries and has 2", |batch| {
                let (key, value) = entry(2, b"other");
                batch.put(key, &value)
            }),
            ("cookie", |batch| {
                let (_, value) = entry(2, b"other");
                batch.put(Key::new(1, ItemKind::Entry, 1 << 20), &value)
            }),
            ("an entry says", |batch| {
                put_item(batch, 2, |item| item.mode = U32::new(FileType::Fifo.mode_bits()))
            }),
            ("it says 5 blocks and has 0", |batch| put_item(batch, 2, |item| item.blocks = U64::new(5))),
            ("3 links and 0 directories", |batch| put_item(batch, 1, |item| item.links = U32::new(3))),
            ("the root is in another directory", |batch| {
                put_item(batch, 1, |item| item.parent = InodeNumber::new(2))
            }),
            ("the root says 7 inodes, there are 2", |batch| {
                batch.root.inodes = U64::new(7);
                put_item(batch, 2, |_| ())
            }),
            ("which the tree does not have", |batch| {
                let extent = format::node::ExtentItem {
                    segment: SegmentId::new(9),
                    block: Block::new(9),
                    blocks: U32::new(1),
                    flags: U32::new(1),
                };
                batch.put(Key::new(2, ItemKind::Extent, 0), extent.as_bytes())
            }),
            ("segment-9", |batch| {
                let item = SegmentItem {
                    owner: U32::new(0),
                    used: U32::new(0),
                    blocks: U32::new(9),
                    reserved: U32::new(0),
                };
                batch.put(Key::new(0, ItemKind::Segment, 9), item.as_bytes())
            }),
            ("is taken and has no owner", |batch| {
                let _leaked = batch.area.node_map.allocate(1, None, pmem::alloc::Fit::Lowest);
                put_item(batch, 2, |_| ())
            }),
        ];
        for (expected, damage) in table {
            let findings = findings_after(damage);
            assert!(findings.contains(expected), "{expected:?} is not in {findings:?}");
        }
    }

    #[test]
    fn blocks_used_twice_and_beyond_a_segment_are_found() {
        let extent = |block: u32, blocks: u32| format::node::ExtentItem {
            segment: SegmentId::new(1),
            block: Block::new(block),
            blocks: U32::new(blocks),
            flags: U32::new(1),
        };
        let findings = findings_after(|batch| {
            let made = batch.made;
            let run = batch.area.space.allocate(7, 4, pmem::alloc::Fit::Run, made)?;
            let block = run.block.get();
            for (at, item) in
                [(0, extent(block, 3)), (5, extent(block + 2, 2)), (9, extent(100, 2)), (20, extent(1, 1))]
            {
                batch.put(Key::new(2, ItemKind::Extent, at), item.as_bytes())?;
            }
            Ok(())
        });
        for expected in ["is used twice", "blocks at 100 beyond segment 1", "blocks at 1 beyond segment 1"] {
            assert!(findings.contains(expected), "{expected:?} is not in {findings:?}");
        }
    }
}
