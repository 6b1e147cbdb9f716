//! The block allocator against a naive model.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use format::map::MAP_PAGE_BLOCKS;
use format::{Block, CommitNumber};
use pmem::alloc::{self, BlockAllocator, Fit};
use pmem::{MediaError, Recorder};
use proptest::prelude::*;
use std::collections::BTreeSet;

#[derive(Clone, Debug)]
enum Step {
    Allocate(u32, Option<u32>, Fit),
    /// Frees the n-th block in use and up to so many after it.
    Free(usize, u32),
    Commit,
    /// Returns to the last commit, as a crash does.
    Crash,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (1u32..9, prop::option::of(0u32..100), any::<bool>()).prop_map(|(count, hint, lowest)| {
            Step::Allocate(count, hint, if lowest { Fit::Lowest } else { Fit::Run })
        }),
        3 => (0usize..100, 1u32..5).prop_map(|(nth, count)| Step::Free(nth, count)),
        3 => Just(Step::Commit),
        1 => Just(Step::Crash),
    ];
    prop::collection::vec(step, 1..120)
}

#[derive(Clone, Default)]
struct Model {
    used: BTreeSet<u32>,
    /// Freed, and not to be allocated yet.
    waiting: BTreeSet<u32>,
}

impl Model {
    fn is_free(&self, block: u32) -> bool {
        !self.used.contains(&block) && !self.waiting.contains(&block)
    }

    /// The runs of free blocks: first block and length.
    fn runs(&self, blocks: u32) -> Vec<(u32, u32)> {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for block in (0..blocks).filter(|block| self.is_free(*block)) {
            match runs.last_mut() {
                Some((start, count)) if *start + *count == block => *count += 1,
                _ => runs.push((block, 1)),
            }
        }
        runs
    }
}

fn used(map: &BlockAllocator) -> BTreeSet<u32> {
    map.used_runs().flat_map(|(block, count)| block.get()..block.get() + count).collect()
}

proptest! {
    #[test]
    fn the_map_holds_what_the_model_holds(blocks in 1u32..90, steps in steps()) {
        let region = Recorder::new().medium().create("file", 4096 + alloc::bytes_needed(blocks)).unwrap();
        let mut map = BlockAllocator::format(region.clone(), 4096, blocks);
        let mut commit = CommitNumber::new(1);
        map.write(commit);
        let mut model = Model::default();
        let mut synced = model.clone();
        for step in steps {
            match step {
                Step::Allocate(count_max, hint, fit) => {
                    let runs = model.runs(blocks);
                    match map.allocate(count_max, hint.map(Block::new), fit) {
                        None => prop_assert!(runs.is_empty()),
                        Some((block, count)) => {
                            let at_hint = hint == Some(block.get());
                            let (lowest, first) = runs[0];
                            // The allocator looks at 16 runs; a chunk of 64 blocks is longer than any request here.
                            let longest = runs.iter().take(16).map(|(_, count)| *count).max().unwrap();
                            let fits = match fit {
                                Fit::Lowest => (block.get(), count) == (lowest, count_max.min(first)),
                                Fit::Run => count >= count_max.min(longest),
                            };
                            prop_assert!(count <= count_max && (fits || at_hint));
                            prop_assert!(hint.is_none_or(|hint| hint >= blocks || at_hint || !model.is_free(hint)));
                            for block in block.get()..block.get() + count {
                                prop_assert!(model.is_free(block), "block {} is given twice", block);
                                model.used.insert(block);
                            }
                        }
                    }
                }
                Step::Free(nth, count) => {
                    let first = model.used.iter().nth(nth % model.used.len().max(1)).copied();
                    let run = first.map_or(0, |first| (first..first + count).take_while(|block| model.used.contains(block)).count() as u32);
                    if let Some(first) = first {
                        map.free(Block::new(first), run);
                        for block in first..first + run {
                            model.used.remove(&block);
                            model.waiting.insert(block);
                        }
                    }
                }
                Step::Commit => {
                    commit = commit.next();
                    map.write(commit);
                    map.release(commit);
                    model.waiting.clear();
                    synced = model.clone();
                }
                Step::Crash => {
                    map.write(commit.next());
                    map = BlockAllocator::open(region.clone(), 4096, blocks, commit).unwrap();
                    model = synced.clone();
                }
            }
            prop_assert_eq!(used(&map), model.used.clone());
            prop_assert_eq!(map.used(), model.used.len() as u32);
            prop_assert_eq!(map.allocatable(), blocks - (model.used.len() + model.waiting.len()) as u32);
        }
    }
}

fn formatted(blocks: u32) -> BlockAllocator {
    let region = Recorder::new().medium().create("file", alloc::bytes_needed(blocks)).unwrap();
    BlockAllocator::format(region, 0, blocks)
}

#[test]
#[should_panic(expected = "block 4 is freed or allocated twice")]
fn a_double_free_is_a_broken_invariant() {
    let mut map = formatted(10);
    map.allocate_at(Block::new(3), 2);
    map.free(Block::new(3), 2);
    map.free(Block::new(4), 1);
}

#[test]
fn a_commit_writes_only_the_pages_of_the_last_two() {
    let blocks = 3 * MAP_PAGE_BLOCKS;
    let region = Recorder::new().medium().create("file", alloc::bytes_needed(blocks)).unwrap();
    let mut map = BlockAllocator::format(region.clone(), 0, blocks);
    let pages_of_commit = |map: &mut BlockAllocator, commit| {
        let before = region.counters();
        map.write(CommitNumber::new(commit));
        let cost = region.counters().since(&before);
        assert_eq!(cost.bytes, cost.writes * 4096);
        cost.writes
    };
    assert_eq!(pages_of_commit(&mut map, 1), 3);
    map.allocate_at(Block::new(MAP_PAGE_BLOCKS + 1), 1);
    assert_eq!(pages_of_commit(&mut map, 2), 3, "the other slot was never written");
    map.allocate_at(Block::new(2 * MAP_PAGE_BLOCKS), 1);
    assert_eq!(pages_of_commit(&mut map, 3), 2);
    assert_eq!(pages_of_commit(&mut map, 4), 1);
    assert_eq!(pages_of_commit(&mut map, 5), 0);
}

#[test]
fn a_damaged_page_is_an_error() {
    let region = Recorder::new().medium().create("file", alloc::bytes_needed(100)).unwrap();
    let mut map = BlockAllocator::format(region.clone(), 0, 100);
    map.write(CommitNumber::new(1));
    let open = |commit| BlockAllocator::open(region.clone(), 0, 100, CommitNumber::new(commit)).map(|_| ());
    assert_eq!(open(1), Ok(()));
    assert_eq!(open(2), Err(MediaError::Damaged(format::DecodeError::Kind)));
    region.write(4096 + 1000, &[1]);
    assert_eq!(open(1), Err(MediaError::Damaged(format::DecodeError::Checksum)));
}

/// Chunks that are withheld count as free, and nothing is allocated in them before they are provided.
#[test]
fn nothing_is_allocated_in_chunks_that_are_withheld() {
    let mut map = formatted(300);
    map.allocate_at(Block::new(0), 3);
    map.withhold_from(Block::new(60));
    assert_eq!((map.allocatable(), map.withheld_blocks()), (297, 300 - 64));
    assert_eq!((map.withheld(1), map.withheld(130), map.withheld(u32::MAX)), (64..128, 64..192, 64..300));
    let all = |map: &mut BlockAllocator| -> u32 {
        std::iter::from_fn(|| map.allocate(40, None, Fit::Run)).map(|(_, count)| count).sum()
    };
    assert_eq!((all(&mut map), map.allocatable(), map.has_free()), (61, 236, false));
    map.provide(64..128);
    map.allocate_at(Block::new(64), 64);
    assert_eq!(map.withheld(u32::MAX), 128..300);
    map.provide(128..300);
    assert_eq!((map.withheld(1), map.withheld_blocks(), map.allocatable()), (0..0, 0, 172));
    // Blocks that were released just now stay as they are.
    map.free(Block::new(64), 64);
    map.write(CommitNumber::new(1));
    assert_eq!(map.idle_chunks(64), Some(128..192));
    map.release(CommitNumber::new(1));
    assert_eq!(map.idle_chunks(1000), Some(128..300));
    map.note_time();
    assert_eq!((map.idle_chunks(1000), map.idle_chunks(1)), (Some(64..300), Some(64..128)));
    map.withhold(64..128);
    assert_eq!((map.idle_chunks(1000), map.withheld(1000)), (Some(128..300), 64..128));
    map.allocate_at(Block::new(299), 1);
    assert_eq!(map.idle_chunks(1000), Some(128..256), "the last chunk is a short one");
}

/// After a start it is not known which chunks without a used block have space.
#[test]
fn chunks_without_a_used_block_are_withheld_after_a_start() {
    let region = Recorder::new().medium().create("file", alloc::bytes_needed(300)).unwrap();
    let mut map = BlockAllocator::format(region.clone(), 0, 300);
    [3, 130, 299].iter().for_each(|block| map.allocate_at(Block::new(*block), 1));
    map.write(CommitNumber::new(1));
    let mut map = BlockAllocator::open(region, 0, 300, CommitNumber::new(1)).unwrap();
    map.withhold_unused();
    assert_eq!((map.withheld(1000), map.withheld_blocks(), map.allocatable()), (64..128, 128, 297));
    map.provide(64..128);
    assert_eq!(map.withheld(1000), 192..256);
}
