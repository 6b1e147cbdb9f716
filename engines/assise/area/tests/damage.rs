//! Damaged pools: whatever the bytes are, every read gives a value or an error, and the check finds every defect; the
//! errors of opening files that are no pool; a medium that fails.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod support;

use area::{Area, AreaError, Limits};
use format::checksum::{self, Salt};
use format::node::{ItemKind, NodeView};
use format::root::{NodePointer, Root};
use format::{BLOCK_BYTES, Block, Cookie, DecodeError, InodeNumber, LogUid, Name, PoolUid};
use pmem::Medium;
use pmem::recorded::{Recorder, Verb};
use support::{
    Draws, Step, VERSION, cases, commit, file, findings, new_pool, pool, proving, tiny, truncate, write,
};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

type Node = [u8; BLOCK_BYTES];

/// A pool of three levels with something of every kind in it.
fn whole() -> Recorder {
    let recorder = Recorder::new();
    let limits = Limits { batch_nodes_max: 1000, ..tiny() };
    let mut area = pool(&recorder.medium(), 1000, limits);
    commit(&mut area, &cases::base(), 1).unwrap();
    let many: Vec<Step> = (100..4000).map(|inode| file(inode, 20, format!("many-{inode}"))).collect();
    commit(&mut area, &many, 100).unwrap();
    for (case, number) in cases::all().into_iter().zip(1..) {
        // Some rows only: those that the others do not stand in the way of.
        let steps = case.before.into_iter().flatten().chain(case.batch);
        for (step, sequence) in steps.zip(10_000 * number..) {
            let _ = commit(&mut area, std::slice::from_ref(&step), sequence);
        }
    }
    let last = [
        support::symlink(5000, 1, "a last link", &[b'x'; 3000]),
        file(5001, 1, "a last file"),
        support::write(5001, 100, 1, 9000),
        support::set_xattr(5001, "user.a", 1, 3000),
    ];
    commit(&mut area, &last, 1 << 40).unwrap();
    support::findings(&recorder.medium()).unwrap();
    recorder
}

/// Reads all there is by every reader, from places that may not be there.
fn read_all(medium: &Medium, draws: &mut Draws) -> Result<u64, AreaError> {
    let area = Area::open(medium, tiny())?;
    let mut errors = 0;
    let mut note = |failed: bool| errors += u64::from(failed);
    let items = area.range(None, usize::MAX);
    let mut inodes: Vec<u64> = (0..30).collect();
    match items {
        Ok(items) => inodes.extend(items.iter().map(|(key, _)| key.object()).filter(|_| draws.chance(2))),
        Err(_) => note(true),
    }
    for number in inodes {
        let inode = InodeNumber::new(number);
        note(area.inode(inode).is_err());
        note(area.symlink(inode).is_err());
        note(area.entries(inode, Cookie::START, 50).is_err());
        note(area.lookup(inode, Name::new(b"many-300").unwrap()).is_err());
        note(area.extents(inode, 0..u64::MAX, 50).is_err());
        note(area.xattr(inode, b"user.a").is_err());
        note(area.xattr_names(inode).is_err());
        note(area.grants(LogUid::new(number)).is_err());
        note(area.groups(LogUid::new(number)).is_err());
        let mut bytes = vec![0; 20_000];
        note(area.read(inode, draws.below(10_000), &mut bytes).is_err());
        note(area.read(inode, u64::MAX - draws.below(10_000), &mut bytes).is_err());
    }
    note(area.orphans(InodeNumber::NONE, 50).is_err());
    note(area.logs().is_err());
    note(area.segments().is_err());
    let mut lines = 0;
    note(area::inspect::items(&area, &mut |_| lines += 1).is_err());
    Ok(errors)
}

#[test]
fn any_bytes_give_a_value_or_an_error() {
    let image = whole().image();
    let rounds = if proving() { 20_000 } else { 150 };
    let (mut noticed, mut unopened) = (0, 0);
    for round in 0..rounds {
        let mut draws = Draws(round);
        let recorder = Recorder::of_image(image.clone());
        let medium = recorder.medium();
        let names = medium.list().unwrap();
        for _ in 0..1 + draws.below(40) {
            let region = medium.open(draws.of::<String>(&names)).unwrap();
            let mut bytes = [draws.below(256) as u8; 64];
            bytes.fill_with(|| draws.below(256) as u8);
            let length = 1 + draws.below(64);
            // The front of a file holds what everything hangs on: often only what is behind it.
            let from = if draws.chance(10) { 0 } else { 5 * BLOCK_BYTES as u64 };
            let at = from + draws.below(region.bytes() - from - length);
            region.write(at, &bytes[..length as usize]);
        }
        match read_all(&medium, &mut draws) {
            Ok(errors) => noticed += u64::from(errors > 0),
            Err(_) => unopened += 1,
        }
        let report = area::check::check(&medium);
        assert!(report.is_err() || report.unwrap().commit.get() < u64::MAX);
    }
    println!("{rounds} damaged pools: {unopened} do not open, {noticed} have errors");
    assert!(unopened > rounds / 20 && noticed > rounds / 10);
}

fn read_node(medium: &Medium, pointer: &NodePointer) -> Box<Node> {
    let mut bytes = Box::new([0; BLOCK_BYTES]);
    medium.open("tree").unwrap().read(u64::from(pointer.block.get()) * 4096, &mut bytes[..]).unwrap();
    bytes
}

/// Changes one node somewhere below `pointer` and makes every checksum above it right again.
fn damage_and_seal(medium: &Medium, pointer: &mut NodePointer, level: u32, draws: &mut Draws, stop: u32) {
    let mut bytes = read_node(medium, pointer);
    let block = Block::new(pointer.block.get());
    if level <= stop {
        damage_node(&mut bytes, draws);
    } else {
        let (at, mut child) = {
            let view = NodeView::decode(&bytes, block).unwrap();
            let slot = draws.of(view.slots());
            (usize::from(slot.offset.get()), NodePointer::read_from_bytes(view.value(slot)).unwrap())
        };
        damage_and_seal(medium, &mut child, level - 1, draws, stop);
        bytes[at..at + size_of::<NodePointer>()].copy_from_slice(child.as_bytes());
    }
    medium.open("tree").unwrap().write(u64::from(block.get()) * 4096, &bytes[..]);
    pointer.checksum = U32::new(checksum::of(Salt::NONE, &bytes[..]));
}

fn damage_node(bytes: &mut Node, draws: &mut Draws) {
    let count = u64::from(u16::from_le_bytes([bytes[4], bytes[5]])).max(1);
    for _ in 0..1 + draws.below(4) {
        // Half of the damage goes to values, the rest to header and slots.
        let at = match draws.below(4) {
            0 => draws.below(16),
            1 => 16 + draws.below(24 * count),
            _ => 4096 - 1 - draws.below(4096 - 16 - 24 * count),
        } as usize;
        match draws.below(3) {
            0 => bytes[at] = draws.below(256) as u8,
            1 => bytes[at] ^= 1 << draws.below(8),
            _ => bytes[at] = *draws.of(&[0, 1, 0x7f, 0xff]),
        }
    }
}

#[test]
fn damage_that_checksums_do_not_show_gives_a_value_or_an_error() {
    let image = whole().image();
    let rounds = if proving() { 100_000 } else { 400 };
    let (mut noticed, mut found) = (0, 0);
    for round in 0..rounds {
        let mut draws = Draws(round);
        let recorder = Recorder::of_image(image.clone());
        let medium = recorder.medium();
        let region = medium.open("tree").unwrap();
        let mut roots = Vec::new();
        for slot in [1, 2] {
            let mut bytes = [0; size_of::<Root>()];
            region.read(slot * 4096, &mut bytes).unwrap();
            roots.extend(Root::decode(&bytes, PoolUid::new(0x1234)));
        }
        let mut root = roots.into_iter().max_by_key(|root| root.commit).unwrap();
        let level = root.height.get() - 1;
        assert_eq!(level, 2, "the tree has three levels");
        let stop = if draws.chance(70) { 0 } else { draws.below(3) as u32 };
        damage_and_seal(&medium, &mut root.node, level, &mut draws, stop);
        region.write((1 + root.commit.get() % 2) * 4096, &root.encode());
        noticed += u64::from(read_all(&medium, &mut draws).is_ok_and(|errors| errors > 0));
        found += u64::from(!area::check::check(&medium).unwrap().is_clean());
    }
    println!("{rounds} trees: {noticed} give errors to readers, the check finds {found}");
    assert!(found > rounds / 3 && noticed > rounds / 10);
}

#[test]
fn a_dump_shows_every_item_of_every_kind() {
    let recorder = whole();
    let area = Area::open(&recorder.medium(), tiny()).unwrap();
    let mut lines = Vec::new();
    area::inspect::items(&area, &mut |line| lines.push(line)).unwrap();
    let items = area.range(None, usize::MAX).unwrap();
    assert_eq!(lines.len(), items.len());
    for kind in [ItemKind::Inode, ItemKind::Entry, ItemKind::Extent, ItemKind::Xattr, ItemKind::Symlink] {
        assert!(items.iter().any(|(key, _)| key.kind() == Ok(kind)), "{kind:?}");
    }
    assert!(lines.iter().any(|line| line.contains("entry") && line.contains("\"many-300\"")));
    assert!(!lines.iter().any(|line| line.contains("unreadable")));
    assert!(area::inspect::headline(&area).starts_with("pool 4660 commit "));
}

/// Overwrites bytes of a file of the pool.
fn spoil(medium: &Medium, name: &str, offset: u64, bytes: &[u8]) {
    medium.open(name).unwrap().write(offset, bytes);
}

#[test]
fn an_open_says_what_is_wrong() {
    let open = |medium: &Medium| Area::open(medium, tiny()).map(|_| ());
    let fresh = || {
        let recorder = Recorder::new();
        let medium = recorder.medium();
        let mut area = pool(&medium, 256, tiny());
        commit(&mut area, &cases::base(), 1).unwrap();
        medium
    };
    let empty = Recorder::new().medium();
    assert!(matches!(open(&empty), Err(AreaError::Missing)));
    assert!(matches!(area::check::check(&empty), Err(AreaError::Missing)));
    assert!(matches!(Area::format(&fresh(), &new_pool(256)), Err(AreaError::AlreadyFormatted)));
    assert!(matches!(Area::format(&empty, &new_pool(10)), Err(AreaError::Geometry(_))));
    let medium = fresh();
    spoil(&medium, "tree", 8, &[9]);
    assert!(matches!(open(&medium), Err(AreaError::Superblock(_, DecodeError::Version(9)))));
    let medium = fresh();
    spoil(&medium, "tree", 20, &[9]);
    assert!(matches!(open(&medium), Err(AreaError::Superblock(_, DecodeError::Checksum))));
    let medium = fresh();
    spoil(&medium, "tree", 4096 + 40, &[9]);
    spoil(&medium, "tree", 8192 + 40, &[9]);
    assert!(matches!(open(&medium), Err(AreaError::Roots(DecodeError::Checksum, DecodeError::Checksum))));
    assert!(!area::check::check(&medium).unwrap().is_clean());
    let medium = fresh();
    medium.remove("segment-1").unwrap();
    assert!(matches!(open(&medium), Err(AreaError::Superblock(_, DecodeError::Field("file")))));
    let medium = fresh();
    spoil(&medium, "segment-1", 4096 + 100, &[9]);
    spoil(&medium, "segment-1", 8192 + 100, &[9]);
    assert!(matches!(open(&medium), Err(AreaError::Map(_))));
    assert!(!area::check::check(&medium).unwrap().is_clean());
}

/// An older copy of a segment does not know which blocks are in use, and would give out blocks with data.
#[test]
fn a_segment_of_another_commit_is_refused() {
    let recorder = Recorder::new();
    let medium = recorder.medium();
    let mut area = pool(&medium, 256, tiny());
    commit(&mut area, &cases::base(), 1).unwrap();
    let segment = medium.open("segment-1").unwrap();
    let mut older = vec![0; segment.bytes() as usize];
    segment.read(0, &mut older).unwrap();
    for commits in 0..8 {
        commit(&mut area, &[write(10, 40_960 + commits * 8192, 7, 8192)], 100 + commits).unwrap();
    }
    drop(area);
    segment.write(0, &older);
    let opened = Area::open(&medium, tiny()).map(|_| ());
    assert!(matches!(&opened, Err(AreaError::OtherMap(name)) if name == "segment-1"), "{opened:?}");
    assert!(!area::check::check(&medium).unwrap().is_clean());
}

#[test]
fn damaged_data_is_named_and_never_returned() {
    let recorder = Recorder::new();
    let medium = recorder.medium();
    let mut area = pool(&medium, 256, tiny());
    commit(&mut area, &cases::base(), 1).unwrap();
    let extent = &area.extents(InodeNumber::new(10), 1..2, 1).unwrap()[0];
    let block = extent.block_of(1);
    spoil(&medium, "segment-1", u64::from(block.get()) * 4096 + 17, &[0xff]);
    let mut bytes = [0; 8192];
    match area.read(InodeNumber::new(10), 0, &mut bytes) {
        Err(AreaError::Data { inode, offset, segment, block: found }) => {
            assert_eq!((inode.get(), offset, segment, found), (10, 4096, extent.segment, block));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(area.read(InodeNumber::new(10), 0, &mut bytes[..4096]).unwrap(), 4096);
    // A process that opened the pool since shows no block that it has not compared; the process that wrote it knows its
    // contents.
    let extent = area.extents(InodeNumber::new(10), 0..1, 1).unwrap().remove(0);
    let verify = |area: &mut Area, from, mut blocks_max| {
        area.verify(InodeNumber::new(10), &extent, from, &mut blocks_max)
    };
    assert_eq!(verify(&mut area, 0, 0).unwrap(), extent.end());
    drop(area);
    let mut area = Area::open(&medium, tiny()).unwrap();
    assert_eq!(verify(&mut area, 0, 0).unwrap(), 0, "none is compared if none may be");
    assert_eq!(verify(&mut area, 0, 9).unwrap(), 1, "up to the damaged one");
    assert_eq!(verify(&mut area, 0, 1).unwrap(), 1, "the first one was compared before");
    assert!(matches!(verify(&mut area, 1, 9), Err(AreaError::Data { .. })));
}

/// A record that keeps a part of a damaged block is done, and what is left of the block stays damaged, whatever else the
/// batch and later ones do to the file; a record that replaces the block, or cuts it off, heals it.
#[test]
fn what_is_written_into_a_damaged_block_stays_damaged_until_all_of_it_is() {
    const FILE: InodeNumber = InodeNumber::new(10);
    let damaged = |area: &Area| {
        let mut bytes = [0; 4096];
        match area.read(FILE, 4096, &mut bytes) {
            Ok(_) => false,
            Err(AreaError::Data { inode, offset, .. }) => (inode, offset) == (FILE, 4096),
            Err(error) => panic!("{error}"),
        }
    };
    let cases: [(&[Step], bool); 8] = [
        (&[write(10, 5000, 1, 10)], true),
        (&[write(10, 5000, 1, 10), write(10, 4096, 2, 1)], true),
        (&[write(10, 100, 1, 5000)], true),
        // The bytes that it has from then on were written whole.
        (&[write(10, 5000, 1, 10), write(10, 4096, 2, 4096)], false),
        (&[write(10, 4096, 2, 4096), write(10, 5000, 1, 10)], false),
        (&[write(10, 5000, 1, 10), truncate(10, 4096)], false),
        (&[write(10, 5000, 1, 10), truncate(10, 5000)], true),
        (&[write(10, 5000, 1, 10), truncate(10, 4000), write(10, 5000, 1, 10)], false),
    ];
    for ((steps, stays), gathers) in cases.iter().flat_map(|case| [(case, false), (case, true)]) {
        let recorder = Recorder::new();
        let medium = recorder.medium();
        let mut area = pool(&medium, 256, tiny());
        commit(&mut area, &[file(10, 1, "f"), write(10, 0, 3, 3 * 4096)], 1).unwrap();
        let block = area.extents(FILE, 1..2, 1).unwrap()[0].block_of(1);
        spoil(&medium, "segment-1", u64::from(block.get()) * 4096 + 17, &[0xee]);
        let mut batch = area.begin().unwrap();
        if gathers {
            batch.gather_writes();
        }
        for (step, sequence) in steps.iter().zip(100..) {
            step.apply(&mut batch, sequence).unwrap();
        }
        let committed = batch.commit(VERSION).unwrap();
        assert_eq!(committed.damaged, if *stays { vec![(FILE, 1)] } else { vec![] }, "{steps:?}");
        area.release(committed.commit).unwrap();
        for _ in 0..2 {
            assert_eq!(damaged(&area), *stays, "{steps:?}, gathers: {gathers}");
            let extent = area.extents(FILE, 1..2, 1).unwrap().first().cloned();
            let shown = extent.is_none_or(|extent| area.verify(FILE, &extent, 1, &mut 1).is_ok());
            assert_eq!(shown, !stays, "readers by a map");
            drop(area);
            assert_eq!(findings(&medium).is_err(), *stays, "{steps:?}: the check");
            area = Area::open(&medium, tiny()).unwrap();
        }
        // Another batch keeps a part again, and the next replaces it.
        commit(&mut area, &[write(10, 4096 + 7, 4, 1), write(10, 0, 4, 1)], 200).unwrap();
        assert_eq!(damaged(&area), *stays);
        commit(&mut area, &[write(10, 4096, 5, 4096)], 300).unwrap();
        assert!(!damaged(&area));
        drop(area);
        findings(&medium).unwrap();
    }
}

#[test]
fn a_failed_sync_poisons_until_the_pool_is_opened_again() {
    for call in 0..3 {
        let recorder = Recorder::new();
        let medium = recorder.medium();
        let mut area = pool(&medium, 256, tiny());
        commit(&mut area, &cases::base(), 1).unwrap();
        recorder.fail_sync(recorder.calls(Verb::Sync) + call);
        let failed = commit(&mut area, &[write(10, 0, 7, 100)], 100);
        assert!(matches!(failed, Err(AreaError::Medium(_))), "{failed:?}");
        assert!(matches!(area.begin(), Err(AreaError::Poisoned)));
        let mut area = Area::open(&medium, tiny()).unwrap();
        commit(&mut area, &[write(10, 0, 7, 100)], 101).unwrap();
        findings(&medium).unwrap();
    }
}
