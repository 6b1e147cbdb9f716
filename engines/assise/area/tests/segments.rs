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
