//! Segments in memory: how large they are, when they get their space, and what new blocks cost.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod support;

use area::{Area, AreaError, Limits};
use format::BLOCK_BYTES;
use pmem::recorded::Recorder;
use pmem::{MediaError, Medium};
use support::{Step, commit, file, findings, pool, write};

fn roomy() -> Limits {
    Limits { capacity_blocks: 20_000, segment_blocks: 5000, ..Limits::default() }
}

/// Blocks for which a segment gets space at once.
const STEP: u64 = 128;

/// One segment, which gets its space in steps.
fn in_steps() -> Limits {
    Limits {
        capacity_blocks: 1000,
        segment_blocks: 1000,
        step_blocks: STEP as u32,
        reserve_blocks: 0,
        ..Limits::default()
    }
}

/// Page faults of this thread for which nothing was read.
fn faults() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    text.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(7).unwrap().parse().unwrap()
}

/// The first store to a page of memory takes longer than all else that a batch does for a block.
#[test]
fn new_blocks_in_memory_cost_no_page_fault_each() {
    const BLOCKS: u64 = 4000;
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut area = pool(&Medium::memory(folder.path()).unwrap(), 4000, roomy());
    commit(&mut area, &[file(2, 1, "first")], 1).unwrap();
    let steps: Vec<Step> = (0..BLOCKS).map(|block| write(2, block * 4096, block as u8, 4096)).collect();
    let before = faults();
    commit(&mut area, &steps, 100).unwrap();
    let faults = faults() - before;
    assert!(faults < BLOCKS / 4, "{faults} faults for {BLOCKS} blocks");
}

/// Blocks of 4 KiB for which the files of all segments have space.
fn provided(folder: &std::path::Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let segments = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("segment-"));
    segments.map(|entry| entry.metadata().unwrap().blocks() / 8).sum()
}

/// The kernel takes long to provide a whole segment, and the batch waits for that.
#[test]
fn a_segment_gets_its_space_step_by_step() {
    const BEFORE_DATA: u64 = 3;
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let medium = Medium::memory(folder.path()).unwrap();
    let limits = in_steps();
    let mut area = pool(&medium, 4000, limits);
    commit(&mut area, &[file(2, 1, "first")], 1).unwrap();
    let (mut written, mut sequence) = (0, 100);
    let fill = |area: &mut Area, written: &mut u64, sequence: &mut u64, up_to: u64| {
        while *written < up_to {
            let steps = (*written..up_to.min(*written + 10)).map(|block| write(2, block * 4096, 1, 4096));
            commit(area, &steps.collect::<Vec<_>>(), *sequence).unwrap();
            (*written, *sequence) = (up_to.min(*written + 10), *sequence + 100);
            let ahead = provided(folder.path()).checked_sub(*written).expect("there is space for each block");
            // A step is too short once no chunk of 64 blocks is left in it.
            assert!(ahead <= STEP + 64 + BEFORE_DATA, "space for {ahead} blocks ahead of {written}");
        }
    };
    fill(&mut area, &mut written, &mut sequence, 250);
    let known = |area: &Area| 1000 - area.usage().blocks_unmade + BEFORE_DATA;
    assert_eq!(known(&area), provided(folder.path()));
    // A start knows of no space behind the step in use.
    drop(area);
    let mut area = Area::open(&medium, limits).unwrap();
    assert_eq!(known(&area), 2 * STEP);
    fill(&mut area, &mut written, &mut sequence, 950);
    assert_eq!((area.usage().blocks_unmade, area.usage().blocks_free), (0, 50));
    findings(&medium).unwrap();
}

/// The pool has room and its medium has none: that is no fault of the program that wrote, and nothing is lost.
#[test]
fn a_step_that_gets_no_space_is_an_error_of_the_medium() {
    let recorder = Recorder::new();
    let limits = in_steps();
    let mut area = pool(&recorder.medium(), 4000, limits);
    commit(&mut area, &[file(2, 1, "first")], 1).unwrap();
    let some = |from: u64, mark: u8| -> Vec<Step> {
        (from..from + 50).map(|block| write(2, block * 4096, mark, 4096)).collect()
    };
    commit(&mut area, &some(0, 1), 100).unwrap();
    assert!(area.usage().blocks_unmade > 0 && area.usage().blocks_free > 900);
    recorder.set_full(true);
    let mut from = 50;
    let refused = loop {
        match commit(&mut area, &some(from, 1), 100 + from) {
            Ok(_) => from += 50,
            Err(why) => break why,
        }
    };
    assert!(matches!(refused, AreaError::Medium(MediaError::NoSpace)), "{refused:?}");
    // All that was committed is there, and so is the rest of the step.
    drop(area);
    findings(&recorder.medium()).unwrap();
    let mut area = Area::open(&recorder.medium(), limits).unwrap();
    assert!((50..=STEP + 64).contains(&from), "{from}");
    commit(&mut area, &[write(2, 0, 7, 4096)], 5000).unwrap();
    recorder.set_full(false);
    for from in (from..900).step_by(50) {
        commit(&mut area, &some(from, 1), 10_000 + from).unwrap();
    }
    findings(&recorder.medium()).unwrap();
}

/// Blocks of the space that is held in the tests below.
const HELD: u64 = 300;

/// Another program has filled the medium: the pool's segments take what is held, in chunks, and not a block is missing at the end.
#[test]
fn held_space_is_for_blocks_of_all_users_on_a_full_medium() {
    let recorder = Recorder::new();
    recorder.limit_space(64 << 20);
    let medium = recorder.medium();
    let mut area = pool(&medium, 4000, in_steps());
    commit(&mut area, &[file(2, 1, "first")], 1).unwrap();
    commit(&mut area, &[write(2, 0, 1, 4096)], 50).unwrap();
    medium.hold(HELD * 4096).unwrap();
    recorder.fill_space();
    let (mut from, before) = (1, area.usage().blocks_unmade);
    let refused = loop {
        match commit(&mut area, &[write(2, from * 4096, 1, 4096)], 100 + from) {
            Ok(_) => from += 1,
            Err(why) => break why,
        }
    };
    assert!(matches!(refused, AreaError::Medium(MediaError::NoSpace)), "{refused:?}");
    // A chunk that is begun and the header of a segment are all that is lost.
    let provided = before - area.usage().blocks_unmade;
    assert!((HELD - 64 - 3..=HELD).contains(&provided), "{provided}");
    assert!(from > STEP - 3 + HELD - 64 - 3 && medium.held_bytes() < Some(64 * 4096), "{from}");
    // The pool is whole, also for the next process, and goes on with little space.
    drop(area);
    let mut area = Area::open(&medium, in_steps()).unwrap();
    commit(&mut area, &[support::unlink(2, 1, "first")], 5000).unwrap();
    commit(&mut area, &[file(3, 1, "second")], 5001).unwrap();
    commit(&mut area, &[write(3, 0, 7, 40_960)], 5002).unwrap();
    findings(&medium).unwrap();
}

/// Free blocks of a user's segments give their space back, but not as soon as they are free.
#[test]
fn free_blocks_give_their_space_back() {
    let recorder = Recorder::new();
    recorder.limit_space(64 << 20);
    let medium = recorder.medium();
    let mut area = pool(&medium, 4000, in_steps());
    commit(&mut area, &[file(2, 1, "first"), file(3, 1, "second")], 1).unwrap();
    let blocks = |inode: u64, count: u64| -> Vec<Step> {
        (0..count).map(|block| write(inode, block * 4096, 1, 4096)).collect()
    };
    commit(&mut area, &blocks(2, 300), 100).unwrap();
    commit(&mut area, &blocks(3, 10), 500).unwrap();
    recorder.fill_space();
    area.note_time();
    commit(&mut area, &[support::unlink(2, 1, "first")], 600).unwrap();
    commit(&mut area, &[write(3, 0, 2, 4096)], 700).unwrap();
    let freed = area.give_back(u64::MAX).unwrap();
    assert!(area.has_resting_blocks() && freed < 100 * 4096, "{freed}");
    area.note_time();
    let freed = freed + area.give_back(u64::MAX).unwrap();
    assert!((300 - 2 * 64..=STEP * 3).contains(&(freed / 4096)), "{freed}");
    assert_eq!((recorder.space_left(), area.has_resting_blocks()), (Some(freed), false));
    // The recorder finds a store to a block without space.
    commit(&mut area, &[file(4, 1, "third")], 800).unwrap();
    commit(&mut area, &blocks(4, 250), 900).unwrap();
    findings(&medium).unwrap();
}

/// A pool with few files takes little memory, and no batch waits long for the kernel.
#[test]
fn segments_are_as_large_as_those_before_together() {
    let recorder = Recorder::new();
    let limits = Limits { capacity_blocks: 30_000, segment_blocks: 6000, ..Limits::default() };
    let mut area = pool(&recorder.medium(), 4000, limits);
    commit(&mut area, &[file(2, 1, "first")], 1).unwrap();
    for first in (0..15_000).step_by(500) {
        let steps: Vec<Step> = (first..first + 500).map(|block| write(2, block * 4096, 1, 4096)).collect();
        commit(&mut area, &steps, 1000 + first).unwrap();
    }
    let medium = recorder.medium();
    let names = medium.list().unwrap().into_iter().filter(|name| name.starts_with("segment-"));
    let blocks: Vec<u64> =
        names.map(|name| medium.open(&name).unwrap().bytes() / BLOCK_BYTES as u64).collect();
    // Each has a header and a map.
    assert_eq!(blocks, [2048, 2048, 4096, 6000, 6000].map(|blocks| blocks + 3));
}
