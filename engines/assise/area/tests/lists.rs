//! Files whose blocks lie apart: block lists are made, changed, cut and sent, and become extents again. Reads, before
//! and after an import, equal those of the naive model.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod support;

use area::{Area, Import, Limits};
use format::node::{ItemKind, Key};
use format::superblock::OWNER_DAEMON;
use format::{InodeNumber, Sequence};
use pmem::recorded::Recorder;
use std::collections::BTreeSet;
use support::{
    Draws, Step, VERSION, commit, commit_in, file, findings, lists_of, model, pool, proving, punch, state_of,
    truncate, write, write_apart,
};

const NODES: u32 = 2000;
const FILE: u64 = 40;
const BLOCKS: u64 = 300;

fn limits() -> Limits {
    let (capacity_blocks, segment_blocks) = (2000, 250);
    Limits { capacity_blocks, segment_blocks, batch_nodes_max: 512, cached_nodes: 64, ..support::tiny() }
}

/// One batch of what programs do to a large file.
fn draw(draws: &mut Draws) -> Vec<Step> {
    let (first, byte) = (draws.below(BLOCKS), draws.below(256) as u8);
    let below = |draws: &mut Draws, end: u64| draws.below(end.min(BLOCKS - first)) + 1;
    match draws.below(12) {
        // At random, as a database does.
        0..=5 => {
            let count = 1 + draws.below(60);
            let mut steps = write_apart(FILE, (0..count).map(|_| draws.below(BLOCKS)), byte);
            if draws.chance(30) {
                steps.push(write(FILE, first * 4096 + draws.below(4096), byte, 5000));
            }
            steps
        }
        // In order, whole.
        6 => write_apart(FILE, first..first + below(draws, 200), byte),
        7 => vec![write(FILE, first * 4096, byte, 4096 * below(draws, 90) as usize)],
        8 => vec![write(FILE, first * 4096 + 100, byte, 9000)],
        9 => vec![punch(FILE, first * 4096 + draws.below(5000), 1 + draws.below(60_000))],
        10 if draws.chance(40) => vec![truncate(FILE, first * 4096 + draws.below(5000))],
        _ => vec![support::allocate(FILE, first * 4096, 4096 * below(draws, 40), draws.chance(50))],
    }
}

/// Another pool with the same tree.
fn import_of(from: &Area, to: Area) -> Area {
    let mut import = Import::begin(to).unwrap();
    import.begin_round(from.version()).unwrap();
    import.begin_range(from.whole()).unwrap();
    let mut after: Option<Key> = None;
    loop {
        let items = from.items_of(&from.whole(), after.as_ref(), 7).unwrap();
        let Some((last, _)) = items.last() else { break };
        after = Some(*last);
        for (key, value) in &items {
            match key.kind() {
                Ok(ItemKind::Segment) => {}
                Ok(ItemKind::Extent) => {
                    let (extents, owner) = from.extents_of(key, value).unwrap();
                    import.put(*key, value, owner).unwrap();
                    for extent in extents.iter().filter(|extent| extent.checksums.is_some()) {
                        for block in extent.first..extent.end() {
                            let (bytes, is_whole) = from.block_as_is(extent, block).unwrap();
                            import.put_block(&bytes, !is_whole).unwrap();
                        }
                    }
                }
                _ => import.put(*key, value, 0).unwrap(),
            }
        }
    }
    import.sync().unwrap();
    import.finish(&from.ledger(), from.totals()).unwrap()
}

/// Gives the most lists that stood in the tree at once.
fn run(seed: u64, batches: u64) -> usize {
    let (mut draws, recorder) = (Draws(seed), Recorder::new());
    let medium = recorder.medium();
    let mut area = pool(&medium, NODES, limits());
    let (mut expected, mut sequence, mut most) = (model::new(), 1, 0);
    for number in 0..batches {
        let steps = if number == 0 { vec![file(FILE, 1, "f")] } else { draw(&mut draws) };
        let gathers = draws.chance(90);
        commit_in(&mut area, &steps, sequence, gathers)
            .unwrap_or_else(|error| panic!("seed {seed}, batch {number}: {error}"));
        for step in &steps {
            model::apply(&mut expected, step, sequence).unwrap();
            sequence += 1;
        }
        most = most.max(lists_of(&area));
        if draws.chance(20) {
            area = Area::open(&medium, limits()).unwrap();
        }
        if number % 8 == 0 || number + 1 == batches {
            assert!(state_of(&area).unwrap() == expected, "seed {seed}, batch {number}");
            findings(&medium).unwrap_or_else(|error| panic!("seed {seed}, batch {number}: {error}"));
        }
    }
    let other = Recorder::new();
    let copy = import_of(&area, pool(&other.medium(), NODES, limits()));
    assert!(state_of(&copy).unwrap() == expected, "seed {seed}: the import");
    findings(&other.medium()).unwrap();
    // All of it, with what the last steps may have written behind those blocks: a long write puts extents in their place.
    let whole = write(FILE, 0, 1, (BLOCKS as usize + 8) * 4096);
    commit(&mut area, &[whole], sequence).unwrap();
    assert_eq!(lists_of(&area), 0, "seed {seed}");
    findings(&medium).unwrap();
    most
}

#[test]
fn a_file_whose_blocks_lie_apart_agrees_with_the_model() {
    let (seeds, batches) = if proving() { (4000, 120) } else { (40, 60) };
    let most: Vec<usize> = (1..=seeds).map(|seed| run(seed, batches)).collect();
    assert!(most.iter().filter(|most| **most > 1).count() > most.len() / 2, "{most:?}");
}

/// The nodes that a batch writes: 2048 blocks that lie apart take 23 full leaves as extents, and 7 as lists.
#[test]
fn blocks_that_lie_apart_cost_few_nodes() {
    const LARGE: u32 = 2048;
    let recorder = Recorder::new();
    let (capacity_blocks, segment_blocks) = (3 * u64::from(LARGE), LARGE);
    let mut area = pool(&recorder.medium(), NODES, Limits { capacity_blocks, segment_blocks, ..limits() });
    let whole = write(FILE, 0, 3, LARGE as usize * 4096);
    commit(&mut area, &[file(FILE, 1, "f"), whole], 1).unwrap();
    let (mut draws, mut sequence, mut nodes) = (Draws(7), 10, 0);
    for _ in 0..12 {
        let steps = write_apart(FILE, (0..600).map(|_| draws.below(LARGE.into())), 5);
        let mut batch = area.begin().unwrap();
        batch.gather_writes();
        for step in &steps {
            step.apply(&mut batch, sequence).unwrap();
            sequence += 1;
        }
        let committed = batch.commit(VERSION).unwrap();
        area.release(committed.commit).unwrap();
        nodes = committed.nodes;
    }
    assert!(nodes <= 16, "{nodes} nodes");
    assert!(area.extents(InodeNumber::new(FILE), 0..LARGE.into(), usize::MAX).unwrap().len() > 1500);
    assert!(area.version() >= Sequence::new(1));
}

/// Blocks that another user owned when they were written stay in segments that this user maps. In a copy of the tree a
/// list is filed under one key: no user may map new blocks there because of old ones.
#[test]
fn a_list_of_two_owners_is_nobodys_to_map_in_a_copy() {
    let (recorder, other) = (Recorder::new(), Recorder::new());
    let mut area = pool(&recorder.medium(), NODES, limits());
    commit(&mut area, &[file(FILE, 1, "f"), write(FILE, 0, 3, 40 * 4096)], 1).unwrap();
    let mut batch = area.begin().unwrap();
    batch.gather_writes();
    for (block, sequence) in (1..40).step_by(2).zip(100..) {
        let step = write(FILE, block * 4096, 9, 4096);
        step.apply_as(2000, &mut batch, sequence).unwrap();
    }
    let committed = batch.commit(VERSION).unwrap();
    area.release(committed.commit).unwrap();
    assert_eq!(lists_of(&area), 1);
    let owners = |area: &Area| -> BTreeSet<u32> {
        let extents = area.extents(InodeNumber::new(FILE), 0..40, usize::MAX).unwrap();
        extents.iter().map(|extent| area.segment_owner(extent.segment).unwrap()).collect()
    };
    assert_eq!(owners(&area), BTreeSet::from([support::ALICE, 2000]));
    let copy = import_of(&area, pool(&other.medium(), NODES, limits()));
    assert_eq!(owners(&copy), BTreeSet::from([OWNER_DAEMON]));
    assert!(state_of(&copy).unwrap() == state_of(&area).unwrap());
    findings(&other.medium()).unwrap();
}
