//! The shared parts of the area's tests: owned operations, small pools, and the state of an area as plain values.

#![allow(dead_code, reason = "each test uses a part of it")]

pub mod cases;
pub mod model;

use area::{Applied, Applying, Area, AreaError, Batch, LedgerPlace, Limits, NewPool};
use format::record::{CreateBody, FileType, Operation, RenameBody, SET_ALL, SetAttrBody, WhiteoutBody};
use format::{Cookie, InodeNumber, LeaseVersion, Life, LogUid, Name, PoolUid, Sequence};
use pmem::Medium;
use std::collections::BTreeMap;
use zerocopy::little_endian::{I64, U16, U32, U64};

/// Two names of one hash, found by search.
pub const COLLIDING: [&[u8]; 2] = [b"28168170", b"42126996"];

/// A second pair.
pub const COLLIDING_TOO: [&[u8]; 2] = [b"31112753", b"48992690"];

/// A user with own segments.
pub const ALICE: u32 = 1000;

/// A place for a name: directory, slot of its hash, name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At {
    pub parent: u64,
    pub slot: u64,
    pub name: Vec<u8>,
}

/// A place in slot 0.
pub fn at(parent: u64, name: impl AsRef<[u8]>) -> At {
    At { parent, slot: 0, name: name.as_ref().to_vec() }
}

impl At {
    pub fn name(&self) -> Name<'_> {
        Name::new(&self.name).expect("tests use good names")
    }

    pub fn cookie(&self) -> Cookie {
        Cookie::from_raw(Cookie::of_name(self.name()).get() + self.slot)
    }
}

/// An operation that owns its operands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    Write {
        offset: u64,
        bytes: Vec<u8>,
    },
    Truncate {
        size: u64,
    },
    Allocate {
        offset: u64,
        bytes: u64,
        keep_size: bool,
        punch_hole: bool,
    },
    Create {
        at: At,
        file_type: FileType,
        target: Vec<u8>,
    },
    /// A file without a name; `parent` is the directory that gives rights and group.
    CreateUnnamed {
        parent: u64,
        linkable: bool,
    },
    Link {
        at: At,
    },
    Unlink {
        at: At,
        directory: bool,
        keep_open: bool,
    },
    Rename {
        old: At,
        new: At,
        replaced: u64,
        exchange: bool,
        keep_open: bool,
        /// The inode that takes the old name, or 0.
        whiteout: u64,
    },
    SetAttr {
        mask: u32,
        mode: u32,
        uid: u32,
        gid: u32,
        atime_ns: i64,
        mtime_ns: i64,
    },
    SetXattr {
        name: Vec<u8>,
        value: Vec<u8>,
    },
    RemoveXattr {
        name: Vec<u8>,
    },
    /// Not a record: reaps an inode without a name, in steps of so many items.
    Reap {
        items_max: usize,
    },
}

/// An operation on an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub inode: u64,
    pub op: Op,
}

pub fn step(inode: u64, op: Op) -> Step {
    Step { inode, op }
}

pub fn file(inode: u64, parent: u64, name: impl AsRef<[u8]>) -> Step {
    create(inode, at(parent, name), FileType::Regular)
}

pub fn directory(inode: u64, parent: u64, name: impl AsRef<[u8]>) -> Step {
    create(inode, at(parent, name), FileType::Directory)
}

pub fn create(inode: u64, at: At, file_type: FileType) -> Step {
    step(inode, Op::Create { at, file_type, target: Vec::new() })
}

pub fn symlink(inode: u64, parent: u64, name: &str, target: &[u8]) -> Step {
    let file_type = FileType::Symlink;
    step(inode, Op::Create { at: at(parent, name), file_type, target: target.to_vec() })
}

pub fn write(inode: u64, offset: u64, byte: u8, bytes: usize) -> Step {
    // No two blocks alike, so that a block in the wrong place shows.
    let bytes = (0..bytes).map(|index| byte.wrapping_add((index / 509) as u8)).collect();
    step(inode, Op::Write { offset, bytes })
}

/// Whole blocks of a file, each a write of its own: if they are gathered they lie apart.
pub fn write_apart(inode: u64, blocks: impl IntoIterator<Item = u64>, byte: u8) -> Vec<Step> {
    let of_block = |block| write(inode, block * 4096, byte.wrapping_add(block as u8), 4096);
    blocks.into_iter().map(of_block).collect()
}

/// How many block lists stand in a tree.
pub fn lists_of(area: &Area) -> usize {
    let (mut from, mut lists) = (None, 0);
    loop {
        let items = area.range(from.as_ref(), 50).expect("the tree is sound");
        let is_list = |(key, value): &&area::Item| {
            key.kind() == Ok(format::node::ItemKind::Extent)
                && value[12..16] == format::node::EXTENT_LISTED.to_le_bytes()
                && Some(*key) != from
        };
        lists += items.iter().filter(is_list).count();
        match items.last() {
            Some((last, _)) if items.len() == 50 => from = Some(*last),
            _ => return lists,
        }
    }
}

pub fn truncate(inode: u64, size: u64) -> Step {
    step(inode, Op::Truncate { size })
}

pub fn allocate(inode: u64, offset: u64, bytes: u64, keep_size: bool) -> Step {
    step(inode, Op::Allocate { offset, bytes, keep_size, punch_hole: false })
}

pub fn punch(inode: u64, offset: u64, bytes: u64) -> Step {
    step(inode, Op::Allocate { offset, bytes, keep_size: true, punch_hole: true })
}

pub fn link(inode: u64, parent: u64, name: impl AsRef<[u8]>) -> Step {
    step(inode, Op::Link { at: at(parent, name) })
}

pub fn unlink(inode: u64, parent: u64, name: impl AsRef<[u8]>) -> Step {
    step(inode, Op::Unlink { at: at(parent, name), directory: false, keep_open: false })
}

pub fn rmdir(inode: u64, parent: u64, name: impl AsRef<[u8]>) -> Step {
    step(inode, Op::Unlink { at: at(parent, name), directory: true, keep_open: false })
}

pub fn rename(inode: u64, old: At, new: At, replaced: u64) -> Step {
    step(inode, Op::Rename { old, new, replaced, exchange: false, keep_open: false, whiteout: 0 })
}

pub fn rename_with_whiteout(inode: u64, old: At, new: At, replaced: u64, whiteout: u64) -> Step {
    step(inode, Op::Rename { old, new, replaced, exchange: false, keep_open: false, whiteout })
}

pub fn unnamed(inode: u64, parent: u64, linkable: bool) -> Step {
    step(inode, Op::CreateUnnamed { parent, linkable })
}

pub fn exchange(inode: u64, old: At, new: At, replaced: u64) -> Step {
    step(inode, Op::Rename { old, new, replaced, exchange: true, keep_open: false, whiteout: 0 })
}

pub fn set_attr(inode: u64, mask: u32) -> Step {
    assert_eq!(mask & !SET_ALL, 0);
    step(inode, Op::SetAttr { mask, mode: 0o4711, uid: 77, gid: 78, atime_ns: -5, mtime_ns: 1 << 60 })
}

pub fn set_xattr(inode: u64, name: &str, byte: u8, bytes: usize) -> Step {
    let value = (0..bytes).map(|index| byte.wrapping_add((index / 100) as u8)).collect();
    step(inode, Op::SetXattr { name: name.into(), value })
}

impl Step {
    /// Calls `take` with the operation as a record would bring it.
    pub fn with_operation<T>(&self, take: impl FnOnce(&Operation<'_>) -> T) -> T {
        match &self.op {
            Op::Write { offset, bytes } => take(&Operation::Write { offset: *offset, bytes }),
            Op::Truncate { size } => take(&Operation::Truncate { size: *size }),
            Op::Allocate { offset, bytes, keep_size, punch_hole } => take(&Operation::Allocate {
                offset: *offset,
                bytes: *bytes,
                keep_size: *keep_size,
                punch_hole: *punch_hole,
            }),
            Op::Create { at, file_type, target } => {
                let body = create_body(*file_type);
                let (parent, cookie, name) = (InodeNumber::new(at.parent), at.cookie(), at.name());
                take(&Operation::Create { parent, cookie, name, body, target })
            }
            Op::CreateUnnamed { parent, linkable } => take(&Operation::CreateUnnamed {
                parent: InodeNumber::new(*parent),
                body: create_body(FileType::Regular),
                linkable: *linkable,
            }),
            Op::Link { at } => take(&Operation::Link {
                parent: InodeNumber::new(at.parent),
                cookie: at.cookie(),
                name: at.name(),
            }),
            Op::Unlink { at, directory, .. } => take(&Operation::Unlink {
                parent: InodeNumber::new(at.parent),
                cookie: at.cookie(),
                name: at.name(),
                directory: *directory,
            }),
            Op::Rename { old, new, replaced, exchange, whiteout, .. } => take(&Operation::Rename {
                body: RenameBody {
                    old_parent: InodeNumber::new(old.parent),
                    new_parent: InodeNumber::new(new.parent),
                    old_cookie: U64::new(old.cookie().get()),
                    new_cookie: U64::new(new.cookie().get()),
                    replaced: InodeNumber::new(*replaced),
                    old_name_bytes: U16::new(old.name.len() as u16),
                    new_name_bytes: U16::new(new.name.len() as u16),
                    reserved: U32::new(0),
                },
                old_name: old.name(),
                new_name: new.name(),
                exchange: *exchange,
                whiteout: (*whiteout != 0).then(|| whiteout_body(InodeNumber::new(*whiteout))),
            }),
            Op::SetAttr { mask, mode, uid, gid, atime_ns, mtime_ns } => take(&Operation::SetAttr {
                body: SetAttrBody {
                    mask: U32::new(*mask),
                    mode: U32::new(*mode),
                    uid: U32::new(*uid),
                    gid: U32::new(*gid),
                    atime_ns: I64::new(*atime_ns),
                    mtime_ns: I64::new(*mtime_ns),
                },
            }),
            Op::SetXattr { name, value } => take(&Operation::SetXattr { name, value }),
            Op::RemoveXattr { name } => take(&Operation::RemoveXattr { name }),
            Op::Reap { .. } => unreachable!("not a record"),
        }
    }

    fn keep_open(&self) -> bool {
        matches!(
            self.op,
            Op::CreateUnnamed { .. }
                | Op::Unlink { keep_open: true, .. }
                | Op::Rename { keep_open: true, .. }
        )
    }

    /// Applies it as record `sequence` of log 7.
    pub fn apply(&self, batch: &mut Batch<'_>, sequence: u64) -> Result<Applied, AreaError> {
        self.apply_as(owner_of(self.inode), batch, sequence)
    }

    /// The same, with its data under an owner key.
    pub fn apply_as(&self, owner: u32, batch: &mut Batch<'_>, sequence: u64) -> Result<Applied, AreaError> {
        if let Op::Reap { items_max } = self.op {
            while !batch.reap(InodeNumber::new(self.inode), items_max)? {}
            return Ok(Applied::Done);
        }
        let applying = Applying {
            log: LogUid::new(7),
            sequence: Sequence::new(sequence),
            time_ns: time_of(sequence),
            version_of: &|_| LeaseVersion::new(1),
            owner,
            keep_open: self.keep_open(),
            promised: false,
            block_sum: None,
        };
        self.with_operation(|operation| batch.apply(InodeNumber::new(self.inode), operation, &applying))
    }
}

/// Owner key of an inode's data: those from 9,000 on are another user's.
pub fn owner_of(inode: u64) -> u32 {
    if inode < 9000 { ALICE } else { 2000 }
}

pub fn time_of(sequence: u64) -> i64 {
    1_000_000 + sequence as i64
}

pub fn mode_of(file_type: FileType) -> u32 {
    file_type.mode_bits() | 0o640
}

fn create_body(file_type: FileType) -> CreateBody {
    CreateBody {
        mode: U32::new(mode_of(file_type)),
        uid: U32::new(ALICE),
        gid: U32::new(100),
        name_bytes: U16::new(0),
        target_bytes: U16::new(0),
        rdev: U64::new(0x0103),
    }
}

/// The device that a rename leaves under the old name.
pub fn whiteout_body(inode: InodeNumber) -> WhiteoutBody {
    WhiteoutBody { inode, uid: U32::new(ALICE), gid: U32::new(100) }
}

/// Limits that are reached in a test: segments of 24 blocks.
pub fn tiny() -> Limits {
    Limits {
        capacity_blocks: 96,
        segment_blocks: 24,
        step_blocks: 8,
        reserve_blocks: 4,
        reserve_nodes: 8,
        lives_max: 16,
        cached_nodes: 16,
        batch_nodes_max: 64,
        batch_blocks_max: 3,
        reap_items_max: 64,
    }
}

/// The entry of a ledger that the batches of most tests execute.
pub const VERSION: Sequence = Sequence::new(1);

pub fn new_pool(tree_nodes_max: u32) -> NewPool {
    NewPool {
        pool: PoolUid::new(0x1234),
        tree_nodes_max,
        root_mode: 0o755,
        root_uid: 0,
        root_gid: 0,
        time_ns: 5,
        ledger: LedgerPlace { sequence: Sequence::new(0), position: 0, life: Life::new(0) },
    }
}

/// Makes a pool with room for so many nodes, and opens it.
pub fn pool(medium: &Medium, tree_nodes_max: u32, limits: Limits) -> Area {
    Area::format(medium, &new_pool(tree_nodes_max)).expect("an empty folder can be formatted");
    Area::open(medium, limits).expect("a new pool opens")
}

/// Applies steps in one batch, commits and releases.
pub fn commit(area: &mut Area, steps: &[Step], first_sequence: u64) -> Result<(), AreaError> {
    commit_in(area, steps, first_sequence, false)
}

/// The same; the batch may gather writes.
pub fn commit_in(
    area: &mut Area,
    steps: &[Step],
    first_sequence: u64,
    gathers: bool,
) -> Result<(), AreaError> {
    let mut batch = area.begin()?;
    if gathers {
        batch.gather_writes();
    }
    for (step, sequence) in steps.iter().zip(first_sequence..) {
        step.apply(&mut batch, sequence)?;
    }
    let commit = batch.commit(VERSION)?.commit;
    area.release(commit)
}

/// An inode as plain values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inode {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub links: u32,
    pub size: u64,
    pub atime_ns: i64,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
    pub btime_ns: i64,
    pub rdev: u64,
    pub parent: u64,
    pub orphan: bool,
    pub contents: Vec<u8>,
    pub target: Vec<u8>,
    /// Name to inode, cookie, type.
    pub entries: BTreeMap<Vec<u8>, (u64, u64, u8)>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Bytes of a file that are compared.
const CONTENTS_MAX: u64 = 4 << 20;

/// A tree as plain values.
pub type AreaState = BTreeMap<u64, Inode>;

/// Reads everything through the public readers.
pub fn state_of(area: &Area) -> Result<AreaState, AreaError> {
    use format::node::ItemKind;
    let mut inodes = Vec::new();
    let mut from = None;
    loop {
        let items = area.range(from.as_ref(), 50)?;
        let last = items.last().map(|(key, _)| *key);
        for (key, _) in &items {
            if key.kind() == Ok(ItemKind::Inode) && inodes.last() != Some(&key.object()) {
                inodes.push(key.object());
            }
        }
        if items.len() < 50 {
            break;
        }
        from = last;
    }
    let orphans = area.orphans(InodeNumber::NONE, usize::MAX)?;
    let mut state = AreaState::new();
    for number in inodes {
        let inode = InodeNumber::new(number);
        let item = area.inode(inode)?.expect("its key was seen");
        let mut contents = Vec::new();
        if FileType::of_mode(item.mode.get()) == Some(FileType::Regular) {
            // Of what is larger than any test makes on purpose, the beginning.
            contents = vec![0xee; item.size.get().min(CONTENTS_MAX) as usize + 10];
            let read = area.read(inode, 0, &mut contents)?;
            contents.truncate(read);
        }
        let entries = area.entries(inode, Cookie::START, usize::MAX)?;
        for entry in &entries {
            let name = Name::new(&entry.name).expect("names of a tree are good");
            assert_eq!(area.lookup(inode, name)?.as_ref(), Some(entry));
        }
        let mut xattrs = BTreeMap::new();
        for name in area.xattr_names(inode)? {
            let value = area.xattr(inode, &name)?.expect("a name that is listed is there");
            xattrs.insert(name.to_vec(), value);
        }
        let entry = |entry: &area::Entry| {
            (entry.name.to_vec(), (entry.inode.get(), entry.cookie.get(), entry.file_type as u8))
        };
        state.insert(
            number,
            Inode {
                mode: item.mode.get(),
                uid: item.uid.get(),
                gid: item.gid.get(),
                links: item.links.get(),
                size: item.size.get(),
                atime_ns: item.atime_ns.get(),
                mtime_ns: item.mtime_ns.get(),
                ctime_ns: item.ctime_ns.get(),
                btime_ns: item.btime_ns.get(),
                rdev: item.rdev.get(),
                parent: item.parent.get(),
                orphan: orphans.contains(&inode),
                contents,
                target: area.symlink(inode)?,
                entries: entries.iter().map(entry).collect(),
                xattrs,
            },
        );
    }
    Ok(state)
}

/// A small generator, so that a test's draws are its own.
pub struct Draws(pub u64);

impl Draws {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub fn of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }
}

/// True if every image and every draw is wanted, however long it takes.
pub fn proving() -> bool {
    std::env::var_os("HEARTH_PROVE").is_some_and(|value| value == "1")
}

/// Turns an error into the text that the crash driver wants.
pub fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The findings of a check as one text; nothing if it is clean.
pub fn findings(medium: &Medium) -> Result<(), String> {
    let report = area::check::check(medium).map_err(text)?;
    if report.is_clean() { Ok(()) } else { Err(format!("check: {}", report.findings.join("; "))) }
}
