//! The rules of the area, one test each: costs of changes, when blocks are used again, the effect of stamps, and the
//! behaviour without space.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod support;

use area::{Applied, Applying, Area, AreaError, Batch, LedgerPlace, Limits, Refused, Usage};
use format::ledger::{Unit, UnitKind};
use format::node::{ItemKind, Key, LifeItem, LogItem, NodeView};
use format::record::FileType;
use format::root::{NodePointer, Root};
use format::superblock::OWNER_DAEMON;
use format::{BLOCK_BYTES, Block, InodeNumber, LeaseVersion, Life, LogUid, PoolUid, Sequence};
use pmem::Medium;
use pmem::recorded::{Recorder, Verb};
use std::collections::BTreeSet;
use support::{
    ALICE, COLLIDING, Op, Step, VERSION, at, cases, commit, create, directory, file, findings, pool, rename,
    rmdir, state_of, step, tiny, truncate, unlink, write,
};
use zerocopy::FromBytes;

fn roomy() -> Limits {
    Limits { capacity_blocks: 20_000, segment_blocks: 5000, ..Limits::default() }
}

fn begin(area: &mut Area) -> Batch<'_> {
    area.begin().unwrap()
}

/// The cost of one batch: nodes and data blocks, then writes and syncs as the medium counted them.
fn cost(recorder: &Recorder, area: &mut Area, steps: &[Step]) -> (u32, u64, u64, u64) {
    let before = (recorder.calls(Verb::Persist), recorder.calls(Verb::Sync));
    let area_commit = area.commit().get();
    let mut batch = begin(area);
    for (step, sequence) in steps.iter().zip(1_000_000 * area_commit..) {
        step.apply(&mut batch, sequence).unwrap();
    }
    let committed = batch.commit(VERSION).unwrap();
    area.release(committed.commit).unwrap();
    let (writes, syncs) = (recorder.calls(Verb::Persist) - before.0, recorder.calls(Verb::Sync) - before.1);
    (committed.nodes, committed.data_blocks, writes, syncs)
}

#[test]
fn an_area_can_be_shared_by_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Area>();
}

#[test]
fn a_batch_costs_what_it_touches() {
    let recorder = Recorder::new();
    let mut area = pool(&recorder.medium(), 4000, roomy());
    commit(&mut area, &[file(2, 1, "first"), write(2, 0, 1, 4096)], 1).unwrap();
    let small = [file(3, 1, "a.tmp"), write(3, 0, 1, 4096), rename(3, at(1, "a.tmp"), at(1, "a"), 0)];
    // The only node, the block, a page of the map of each file, the root; synced: segment, tree, root.
    assert_eq!(cost(&recorder, &mut area, &small), (1, 1, 5, 3));
    let steps: Vec<Step> = (10..5010).map(|inode| file(inode, 1, format!("file-{inode}"))).collect();
    for (steps, number) in steps.chunks(500).zip(1..) {
        commit(&mut area, steps, 3_000_000 + number * 1000).unwrap();
    }
    // Three levels: root node, inner nodes and leaves of object 0 and the root directory, of the entry, of the inode.
    let again = [file(6000, 1, "b"), write(6000, 0, 1, 4096)];
    assert_eq!(cost(&recorder, &mut area, &again), (6, 1, 10, 3));
    // Small writes to one block are one block.
    let appends: Vec<Step> = (0..32).map(|index| write(6000, 4096 + index * 128, 1, 128)).collect();
    assert_eq!(cost(&recorder, &mut area, &appends).1, 1);
    // Nothing changed, nothing written.
    assert_eq!(cost(&recorder, &mut area, &[]), (0, 0, 0, 0));
    findings(&recorder.medium()).unwrap();
}

#[test]
fn items_in_order_cost_the_nodes_that_they_fill() {
    let recorder = Recorder::new();
    let mut area = pool(&recorder.medium(), 4000, roomy());
    let steps: Vec<Step> = (10..2010).map(|inode| file(inode, 1, format!("file-{inode}"))).collect();
    let (nodes, _, writes, _) = cost(&recorder, &mut area, &steps);
    let used = area.usage().nodes - area.usage().nodes_free;
    assert_eq!((nodes, writes), (used, u64::from(nodes) + 2), "each node of the tree is written once");
    assert!(nodes < 2000 * 200 / 4096 * 2, "{nodes} nodes for 2,000 files");
}

#[test]
fn what_a_commit_freed_is_not_used_before_its_release() {
    let recorder = Recorder::new();
    let mut area = pool(&recorder.medium(), 256, tiny());
    commit(&mut area, &[file(2, 1, "f"), write(2, 0, 1, 10 * 4096)], 1).unwrap();
    let places = |area: &Area| -> BTreeSet<(u32, u32)> {
        let extents = area.extents(InodeNumber::new(2), 0..100, 100).unwrap();
        let blocks = extents.iter().flat_map(|extent| {
            (extent.block.get()..extent.block.get() + extent.blocks)
                .map(|block| (extent.segment.get(), block))
        });
        blocks.collect()
    };
    let mut seen = places(&area);
    let mut commits = Vec::new();
    for round in 0..3 {
        let mut batch = begin(&mut area);
        write(2, 0, round, 10 * 4096).apply(&mut batch, 10 + u64::from(round)).unwrap();
        let committed = batch.commit(VERSION).unwrap();
        assert_eq!(committed.freed_of, [InodeNumber::new(2)]);
        commits.push(committed.commit);
        let now = places(&area);
        assert!(seen.is_disjoint(&now), "a block was used again before its commit was released");
        seen.extend(now);
    }
    assert!(area.release(commits[2].next()).is_err(), "a commit that was not made");
    area.release(commits[2]).unwrap();
    commit(&mut area, &[write(2, 0, 9, 10 * 4096)], 20).unwrap();
    assert!(!seen.is_disjoint(&places(&area)), "released blocks are used again");
    findings(&recorder.medium()).unwrap();
}

#[test]
fn a_dropped_batch_changes_nothing_and_takes_nothing() {
    let recorder = Recorder::new();
    let mut area = pool(&recorder.medium(), 256, tiny());
    commit(&mut area, &cases::base(), 1).unwrap();
    let (before, usage, writes) = (state_of(&area).unwrap(), area.usage(), area.commit());
    let mut batch = begin(&mut area);
    write(10, 0, 7, 9000).apply(&mut batch, 100).unwrap();
    unlink(22, 20, "g").apply(&mut batch, 101).unwrap();
    drop(batch);
    assert_eq!((state_of(&area).unwrap(), area.commit()), (before.clone(), writes));
    // The blocks that it had taken are free again after the next commit.
    commit(&mut area, &[support::set_attr(10, 1)], 102).unwrap();
    // Space that the medium has provided for it stays.
    let unmade = area.usage().blocks_unmade;
    assert_eq!(Usage { blocks_unmade: unmade, ..usage }, area.usage());
    assert!(unmade <= usage.blocks_unmade);
    findings(&recorder.medium()).unwrap();
}

/// Applies with chosen versions of the leases.
fn apply_at(
    batch: &mut Batch<'_>,
    step: &Step,
    sequence: u64,
    version_of: &dyn Fn(InodeNumber) -> LeaseVersion,
) -> Result<Applied, AreaError> {
    let applying = Applying {
        log: LogUid::new(7),
        sequence: Sequence::new(sequence),
        time_ns: support::time_of(sequence),
        version_of,
        owner: ALICE,
        keep_open: false,
        promised: false,
        block_sum: None,
    };
    step.with_operation(|operation| batch.apply(InodeNumber::new(step.inode), operation, &applying))
}

#[test]
fn a_record_counts_for_an_inode_that_has_not_seen_it() {
    let recorder = Recorder::new();
    let mut area = pool(&recorder.medium(), 256, tiny());
    commit(&mut area, &cases::base(), 1).unwrap();
    let before = state_of(&area).unwrap();
    let mut batch = begin(&mut area);
    for (step, sequence) in cases::base().iter().zip(1..) {
        assert_eq!(step.apply(&mut batch, sequence).unwrap(), Applied::Stale, "{step:?}");
    }
    let older = |_| LeaseVersion::new(0);
    assert_eq!(apply_at(&mut batch, &write(10, 0, 1, 10), 999, &older).unwrap(), Applied::Stale);
    batch.commit(VERSION).unwrap();
    assert_eq!(state_of(&area).unwrap(), before);
    let newer = |_| LeaseVersion::new(2);
    let mut batch = begin(&mut area);
    assert_eq!(apply_at(&mut batch, &write(10, 0, 1, 10), 1, &newer).unwrap(), Applied::Done);
}

#[test]
fn a_directory_copied_later_than_its_files_is_left_alone() {
    let recorder = Recorder::new();
    let mut area = pool(&recorder.medium(), 256, tiny());
    commit(&mut area, &[directory(2, 1, "d")], 50).unwrap();
    // The directory is as it was after record 50; the records 10 and 11 of its files come now.
    let mut batch = begin(&mut area);
    assert_eq!(file(3, 2, "gone").apply(&mut batch, 10).unwrap(), Applied::Done);
    assert_eq!(unlink(3, 2, "gone").apply(&mut batch, 11).unwrap(), Applied::Removed(InodeNumber::new(3)));
    batch.commit(VERSION).unwrap();
    assert_eq!(state_of(&area).unwrap()[&2].entries.len(), 0);
    assert!(area.inode(InodeNumber::new(3)).unwrap().is_none());
    findings(&recorder.medium()).unwrap();
}

#[test]
fn what_contradicts_the_tree_is_refused_with_a_reason() {
    let recorder = Recorder::new();
    let mut area = pool(&recorder.medium(), 256, tiny());
    commit(&mut area, &cases::base(), 1).unwrap();
    commit(&mut area, &[create(40, at(1, COLLIDING[0]), FileType::Regular)], 50).unwrap();
    let before = state_of(&area).unwrap();
    let wrong_hash = {
        let mut place = at(1, "x");
        place.slot = 1 << 15;
        place
    };
    let far = 1 << 62;
    let table: Vec<(Step, Refused)> = vec![
        (write(99, 0, 1, 1), Refused::NoInode(InodeNumber::new(99))),
        (write(20, 0, 1, 1), Refused::IsDirectory),
        (write(12, 0, 1, 1), Refused::WrongType),
        (step(10, Op::Truncate { size: u64::MAX }), Refused::TooLarge),
        (
            step(10, Op::Allocate { offset: far, bytes: far + far / 2, keep_size: true, punch_hole: true }),
            Refused::TooLarge,
        ),
        (file(10, 1, "new"), Refused::InodeInUse),
        (file(41, 10, "new"), Refused::NotDirectory),
        (file(41, 99, "new"), Refused::NoInode(InodeNumber::new(99))),
        (file(41, 1, "f"), Refused::NameExists),
        (create(41, wrong_hash, FileType::Regular), Refused::CookieHash),
        (create(41, at(1, COLLIDING[1]), FileType::Regular), Refused::CookieTaken),
        (file(0, 1, "zero"), Refused::Field("inode")),
        (support::link(20, 1, "new"), Refused::IsDirectory),
        (unlink(10, 1, "nothing"), Refused::NoEntry),
        (unlink(11, 1, "f"), Refused::EntryNamesOther),
        (unlink(20, 1, "d"), Refused::IsDirectory),
        (rmdir(10, 1, "f"), Refused::NotDirectory),
        (rmdir(20, 1, "d"), Refused::NotEmpty),
        (rename(20, at(1, "d"), at(21, "in"), 0), Refused::Cycle),
        (rename(20, at(1, "d"), at(20, "in"), 0), Refused::Cycle),
        (support::exchange(20, at(1, "d"), at(20, "e"), 21), Refused::Cycle),
        (rename(10, at(1, "f"), at(1, "empty"), 30), Refused::IsDirectory),
        (rename(30, at(1, "empty"), at(1, "f"), 10), Refused::NotDirectory),
        (rename(30, at(1, "empty"), at(1, "d"), 20), Refused::NotEmpty),
        (rename(10, at(1, "f"), at(1, "h"), 0), Refused::NameExists),
        (rename(10, at(1, "f"), at(1, "h"), 22), Refused::EntryNamesOther),
        (step(10, Op::RemoveXattr { name: b"user.none".to_vec() }), Refused::NoXattr),
    ];
    let mut batch = begin(&mut area);
    for (step, expected) in &table {
        match step.apply(&mut batch, 100) {
            Err(AreaError::Refused(refused)) => assert_eq!(refused, *expected, "{step:?}"),
            other => panic!("{step:?}: {other:?}"),
        }
    }
    batch.commit(VERSION).unwrap();
    assert_eq!(state_of(&area).unwrap(), before);
    findings(&recorder.medium()).unwrap();
}

#[test]
fn without_room_files_can_be_cut_and_removed() {
    let recorder = Recorder::new();
    let mut area = pool(&recorder.medium(), 256, tiny());
    commit(&mut area, &[file(2, 1, "big")], 1).unwrap();
    let mut sequence = 10;
    let mut blocks = 0;
    // Fill all data blocks.
    loop {
        sequence += 1;
        match commit(&mut area, &[write(2, blocks * 4096, 1, 4096)], sequence) {
            Ok(()) => blocks += 1,
            Err(AreaError::NoSpace) => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(blocks, tiny().capacity_blocks - tiny().reserve_blocks);
    // Records with a reservation go on into the reserve.
    let mut batch = begin(&mut area);
    let applying = Applying {
        log: LogUid::new(7),
        sequence: Sequence::new(sequence + 1),
        time_ns: 1,
        version_of: &|_| LeaseVersion::new(1),
        owner: ALICE,
        keep_open: false,
        promised: true,
        block_sum: None,
    };
    let promised = write(2, blocks * 4096, 1, 4096);
    promised.with_operation(|operation| batch.apply(InodeNumber::new(2), operation, &applying)).unwrap();
    let made = batch.commit(VERSION).unwrap().commit;
    area.release(made).unwrap();
    // Then all nodes.
    let mut names = 0;
    loop {
        sequence += 2;
        match commit(&mut area, &[file(100 + names, 1, format!("{names:0>200}"))], sequence) {
            Ok(()) => names += 1,
            Err(AreaError::NoSpace) => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(names > 500, "{names}");
    findings(&recorder.medium()).unwrap();
    // A copy of one block, and everything after it, must still go.
    commit(&mut area, &[truncate(2, 5000)], sequence + 1).unwrap();
    for name in 0..names {
        commit(&mut area, &[unlink(100 + name, 1, format!("{name:0>200}"))], sequence + 2 + name).unwrap();
    }
    let last = sequence + 2 + names;
    commit(&mut area, &[unlink(2, 1, "big")], last).unwrap();
    assert_eq!(area.usage().inodes, 1);
    commit(&mut area, &[file(3, 1, "again"), write(3, 0, 1, 4096)], last + 1).unwrap();
    findings(&recorder.medium()).unwrap();
}

#[test]
fn a_full_batch_says_so_and_changes_nothing() {
    let recorder = Recorder::new();
    let limits = Limits { batch_nodes_max: 6, ..tiny() };
    let mut area = pool(&recorder.medium(), 512, limits);
    let mut batch = begin(&mut area);
    let mut made = 0;
    while !batch.is_full() {
        file(10 + made, 1, format!("{made:0>100}")).apply(&mut batch, 1 + made).unwrap();
        made += 1;
        assert!(made < 1000);
    }
    let more = file(9, 1, "more").apply(&mut batch, 5000);
    assert!(matches!(more, Err(AreaError::BatchFull)), "{more:?}");
    // The set-id bits that a write clears go with the write, even if the batch is full since then.
    batch.set_mode(InodeNumber::new(10), 0o600).unwrap();
    // How far the log came is part of the same commit: a full batch need not be made again with fewer records.
    let item = LogItem { digested: Sequence::new(made), ..LogItem::read_from_bytes(&[0; 72]).unwrap() };
    let noted = batch.put_log(LogUid::new(7), &item);
    assert!(matches!(noted, Err(AreaError::BatchFull)), "{noted:?}");
    batch.take_notes();
    batch.put_log(LogUid::new(7), &item).unwrap();
    batch.commit(VERSION).unwrap();
    assert_eq!(state_of(&area).unwrap()[&1].entries.len() as u64, made);
    assert_eq!(area.logs().unwrap(), [(LogUid::new(7), item)]);
}

#[test]
fn blocks_are_kept_by_owner() {
    let recorder = Recorder::new();
    let mut area = pool(&recorder.medium(), 256, tiny());
    let mut sequence = 0;
    let mut apply = |area: &mut Area, step: Step, owner| {
        sequence += 1;
        let mut batch = begin(area);
        let applying = Applying {
            log: LogUid::new(7),
            sequence: Sequence::new(sequence),
            time_ns: 1,
            version_of: &|_| LeaseVersion::new(1),
            owner,
            keep_open: false,
            promised: false,
            block_sum: None,
        };
        step.with_operation(|operation| batch.apply(InodeNumber::new(step.inode), operation, &applying))?;
        let made = batch.commit(VERSION)?.commit;
        area.release(made)
    };
    let owners = [ALICE, 2000, OWNER_DAEMON];
    for (inode, owner) in (2..).zip(owners) {
        apply(&mut area, file(inode, 1, inode.to_string()), owner).unwrap();
        apply(&mut area, write(inode, 0, 1, 3 * 4096), owner).unwrap();
        // Written again they move within the key.
        apply(&mut area, write(inode, 5, 1, 4096), owner).unwrap();
    }
    let owner_of = |area: &Area, inode: u64, block| {
        let extents = area.extents(InodeNumber::new(inode), block..block + 1, 1).unwrap();
        let segments = area.segments().unwrap();
        let found = segments.iter().find(|(id, _)| *id == extents[0].segment).unwrap();
        found.1.owner.get()
    };
    for (inode, owner) in (2..).zip(owners) {
        assert_eq!(owner_of(&area, inode, 0), owner);
    }
    assert_eq!(area.segments().unwrap().len(), 3);
    // With no room for another segment, a user's blocks go to the daemon's, never to another user's.
    apply(&mut area, file(9, 1, "9"), 3000).unwrap();
    apply(&mut area, write(9, 0, 1, 20 * 4096), 3000).unwrap();
    apply(&mut area, file(8, 1, "8"), 4000).unwrap();
    apply(&mut area, write(8, 0, 1, 4096), 4000).unwrap();
    assert_eq!((owner_of(&area, 9, 0), owner_of(&area, 8, 0)), (3000, OWNER_DAEMON));
    findings(&recorder.medium()).unwrap();
}

#[test]
fn an_emptied_pool_serves_another_user() {
    let recorder = Recorder::new();
    let medium = recorder.medium();
    let mut area = pool(&medium, 256, tiny());
    let segments = |medium: &Medium| -> Vec<String> {
        medium.list().unwrap().into_iter().filter(|name| name.starts_with("segment-")).collect()
    };
    commit(&mut area, &[file(2, 1, "hers"), write(2, 0, 1, 90 * 4096), file(9000, 1, "his")], 1).unwrap();
    let his = write(9000, 0, 1, 60 * 4096);
    assert!(matches!(commit(&mut area, std::slice::from_ref(&his), 10), Err(AreaError::NoSpace)));
    assert_eq!(segments(&medium), ["segment-1", "segment-2", "segment-3", "segment-4"]);
    commit(&mut area, &[truncate(2, 4096)], 20).unwrap();
    // Given up, the batch leaves the segments where they were.
    let mut batch = begin(&mut area);
    his.apply(&mut batch, 30).unwrap();
    drop(batch);
    commit(&mut area, &[support::set_attr(2, 1)], 25).unwrap();
    assert_eq!(area.segments().unwrap().len(), 4);
    findings(&medium).unwrap();
    let mut batch = begin(&mut area);
    his.apply(&mut batch, 30).unwrap();
    let made = batch.commit(VERSION).unwrap().commit;
    let before = segments(&medium).len();
    findings(&medium).unwrap();
    area.release(made).unwrap();
    assert!(segments(&medium).len() < before, "files go with the release");
    let ids: Vec<u32> = area.segments().unwrap().iter().map(|(id, _)| id.get()).collect();
    assert_eq!(segments(&medium).len(), ids.len());
    // The emptied ones had the numbers 2 to 4; none of them comes again, whichever commits follow.
    assert!(ids.iter().filter(|id| **id > 4).count() >= 3, "{ids:?}");
    let mut area = Area::open(&medium, tiny()).unwrap();
    commit(&mut area, &[truncate(9000, 0)], 40).unwrap();
    commit(&mut area, &[write(2, 0, 1, 80 * 4096)], 50).unwrap();
    let again: Vec<u32> = area.segments().unwrap().iter().map(|(id, _)| id.get()).collect();
    let new: Vec<&u32> = again.iter().filter(|id| !ids.contains(id)).collect();
    assert!(!new.is_empty() && new.iter().all(|id| **id > *ids.last().unwrap()), "{ids:?}, then {again:?}");
    findings(&medium).unwrap();
}

#[test]
fn tables_and_the_ledgers_place_travel_with_the_commit() {
    let recorder = Recorder::new();
    let medium = recorder.medium();
    let mut area = pool(&medium, 256, tiny());
    let item = LogItem { digested: Sequence::new(9), ..LogItem::read_from_bytes(&[0; 72]).unwrap() };
    let groups: Vec<u32> = (0..1000).collect();
    let mut batch = begin(&mut area);
    let place = LedgerPlace { sequence: Sequence::new(78), position: 4711, life: Life::new(3) };
    batch.set_ledger(&place);
    let life = LifeItem { first: Sequence::new(77), ..LifeItem::read_from_bytes(&[0; 32]).unwrap() };
    batch.put_life(Life::new(3), &life).unwrap();
    let locks = Unit { kind: UnitKind::Locks, inode: InodeNumber::new(1) };
    for log in [LogUid::new(5), LogUid::new(6)] {
        batch.put_log(log, &item).unwrap();
        batch.put_groups(log, &groups).unwrap();
        let grant = format::node::GrantItem::read_from_bytes(&[1; 24]).unwrap();
        for unit in [Unit::inode(InodeNumber::new(1)), Unit::inode(InodeNumber::new(2)), locks, Unit::RENAME]
        {
            batch.put_grant(log, unit, &grant).unwrap();
        }
    }
    batch.commit(VERSION).unwrap();
    let mut area = Area::open(&medium, tiny()).unwrap();
    assert_eq!((area.ledger(), area.version()), (place, VERSION));
    assert_eq!(area.lives().unwrap(), [(Life::new(3), life)]);
    assert_eq!(area.logs().unwrap().len(), 2);
    assert_eq!(area.groups(LogUid::new(6)).unwrap(), groups);
    assert_eq!(area.grants(LogUid::new(6)).unwrap().len(), 4);
    let mut batch = begin(&mut area);
    batch.remove_log(LogUid::new(5)).unwrap();
    batch.remove_grant(LogUid::new(6), locks).unwrap();
    batch.commit(VERSION).unwrap();
    assert_eq!(area.logs().unwrap().len(), 1);
    assert!(
        area.groups(LogUid::new(5)).unwrap().is_empty() && area.grants(LogUid::new(5)).unwrap().is_empty()
    );
    let units: Vec<Unit> = area.grants(LogUid::new(6)).unwrap().iter().map(|(unit, _)| *unit).collect();
    assert_eq!(units, [Unit::inode(InodeNumber::new(1)), Unit::inode(InodeNumber::new(2)), Unit::RENAME]);
    findings(&medium).unwrap();
}

/// However many lives there are, the tree has the newest ones, also if an earlier daemon kept more.
#[test]
fn old_lives_are_forgotten() {
    let medium = Recorder::new().medium();
    let life = LifeItem::read_from_bytes(&[7; 32]).unwrap();
    let live = |lives: std::ops::RangeInclusive<u32>, lives_max: u32| {
        let mut area = match Area::open(&medium, Limits { lives_max, ..tiny() }) {
            Err(AreaError::Missing) => pool(&medium, 256, Limits { lives_max, ..tiny() }),
            area => area.unwrap(),
        };
        for number in lives {
            let mut batch = begin(&mut area);
            batch.put_life(Life::new(number), &life).unwrap();
            batch.commit(VERSION).unwrap();
        }
        let kept: Vec<u32> = area.lives().unwrap().iter().map(|(life, _)| life.get()).collect();
        kept
    };
    assert_eq!(live(1..=40, 32), (9..=40).collect::<Vec<_>>());
    assert_eq!(live(41..=50, 16), (29..=50).collect::<Vec<_>>());
    assert_eq!(live(51..=60, 16), (45..=60).collect::<Vec<_>>());
    findings(&medium).unwrap();
}

/// Versions of the root's pointer and of those in the root node.
fn versions(medium: &Medium) -> (Sequence, Vec<Sequence>) {
    let region = medium.open("tree").unwrap();
    let mut roots = Vec::new();
    for slot in [1, 2] {
        let mut bytes = [0; 128];
        region.read(slot * 4096, &mut bytes).unwrap();
        roots.extend(Root::decode(&bytes, PoolUid::new(0x1234)));
    }
    let root = roots.into_iter().max_by_key(|root| root.commit).unwrap();
    let mut bytes = [0; BLOCK_BYTES];
    region.read(u64::from(root.node.block.get()) * 4096, &mut bytes).unwrap();
    let view = NodeView::decode(&bytes, Block::new(root.node.block.get())).unwrap();
    let pointers =
        view.slots().iter().map(|slot| NodePointer::read_from_bytes(view.value(slot)).unwrap().version);
    (root.node.version, pointers.collect())
}

#[test]
fn pointers_say_which_entry_changed_something_below() {
    let recorder = Recorder::new();
    let medium = recorder.medium();
    let mut area = pool(&medium, 512, tiny());
    let steps: Vec<Step> = (10..150).map(|inode| file(inode, 1, format!("file-{inode}"))).collect();
    commit(&mut area, &steps, 1).unwrap();
    let mut batch = begin(&mut area);
    support::set_attr(149, 1).apply(&mut batch, 1000).unwrap();
    batch.commit(Sequence::new(3)).unwrap();
    let (root, below) = versions(&medium);
    let of = |version| below.iter().filter(|found| **found == Sequence::new(version)).count();
    assert_eq!((root, of(3)), (Sequence::new(3), 1), "{below:?}");
    assert!(below.len() > 3 && of(1) == below.len() - 1, "{below:?}");
    let mut batch = begin(&mut area);
    support::set_attr(149, 2).apply(&mut batch, 1001).unwrap();
    assert!(matches!(batch.commit(Sequence::new(2)), Err(AreaError::Version)));
    assert_eq!(area.get(&Key::new(149, ItemKind::Inode, 0)).unwrap().map(|value| value.len()), Some(104));
}

#[test]
fn large_files_without_a_name_are_reaped_in_steps() {
    let recorder = Recorder::new();
    let medium = recorder.medium();
    let mut area = pool(&medium, 512, Limits { reap_items_max: 4, ..tiny() });
    let mut steps = vec![file(2, 1, "holes")];
    steps.extend((0..30).map(|index| write(2, index * 8192, 1, 4096)));
    commit(&mut area, &steps, 1).unwrap();
    let mut batch = begin(&mut area);
    let unlinked = unlink(2, 1, "holes").apply(&mut batch, 100).unwrap();
    assert_eq!(unlinked, Applied::Orphaned(InodeNumber::new(2)));
    batch.commit(VERSION).unwrap();
    let mut area = Area::open(&medium, tiny()).unwrap();
    assert_eq!(area.orphans(InodeNumber::NONE, 10).unwrap(), [InodeNumber::new(2)]);
    let mut steps = 0;
    loop {
        findings(&medium).unwrap();
        let mut batch = begin(&mut area);
        let gone = batch.reap(InodeNumber::new(2), 4).unwrap();
        batch.commit(VERSION).unwrap();
        steps += 1;
        if gone {
            break;
        }
    }
    assert!((7..10).contains(&steps), "{steps} steps for 26 extents");
    assert_eq!(area.usage().inodes, 1);
    findings(&medium).unwrap();
}
