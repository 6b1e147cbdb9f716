//! The block allocator, crashed at every moment: recovery opens the map of the valid root, and no block that this root
//! uses has been given to another owner.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod owner;

use format::{Block, CommitNumber};
use owner::{Root, RootPair};
use pmem::alloc::{self, BlockAllocator, Fit};
use pmem::crash::{self, Counts, Limits, Model, Point, Violation};
use pmem::progress;
use pmem::recorded::Verb;
use pmem::{MediaError, Medium, Recorder, Region};
use std::cell::RefCell;
use std::collections::BTreeMap;

const FILE: &str = "segment";
/// More than one page of map, so that pages differ in when they were last written.
const BLOCKS: u32 = format::map::MAP_PAGE_BLOCKS + 60;
/// Blocks that the owner keeps for itself at either end of the map's pages.
const FIRST_BLOCKS: [u32; 2] = [0, format::map::MAP_PAGE_BLOCKS];
/// A block's content is one line here; only the numbers matter.
const CONTENT_BYTES: u64 = 64;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Bug {
    None,
    LeftOut(Verb, u64),
    MapInPlace,
    ReleaseBeforeSync,
    IgnoredRootChecksum,
}

#[derive(Clone, Copy)]
struct Plan {
    model: Model,
    bug: Bug,
}

impl Plan {
    fn slot_bytes(self) -> u64 {
        if self.model == Model::Pages { 4096 } else { 64 }
    }

    fn map_at(self) -> u64 {
        8192
    }

    fn content_at(self) -> u64 {
        self.map_at() + alloc::bytes_needed(BLOCKS)
    }

    fn bytes(self) -> u64 {
        self.content_at() + u64::from(BLOCKS) * CONTENT_BYTES
    }
}

// Words of the root: the step of the workload that committed it (recovery makes commits of its own).
const STEP: usize = 0;

/// The blocks in use, each with the step that allocated it: the information that a tree would hold.
type Owned = BTreeMap<u32, u64>;

struct Pool {
    region: Region,
    roots: RootPair,
    root: Root,
    map: BlockAllocator,
}

fn text(error: MediaError) -> String {
    error.to_string()
}

impl Pool {
    /// Opens the pool, or formats it if it has no root.
    fn open(medium: &Medium, plan: Plan) -> Result<(Self, bool), String> {
        let region = match medium.open(FILE) {
            Err(MediaError::NotFound) => medium.create(FILE, plan.bytes()),
            opened => opened,
        };
        let region = region.map_err(text)?;
        let roots = RootPair::new(region.clone(), plan.slot_bytes(), plan.bug == Bug::IgnoredRootChecksum);
        if let Some(root) = roots.read()? {
            let commit = CommitNumber::new(root.commit);
            let map = BlockAllocator::open(region.clone(), plan.map_at(), BLOCKS, commit).map_err(text)?;
            return Ok((Self { region, roots, root, map }, true));
        }
        let map = BlockAllocator::format(region.clone(), plan.map_at(), BLOCKS);
        let mut pool = Self { region, roots, root: Root::default(), map };
        for block in FIRST_BLOCKS {
            pool.map.allocate_at(Block::new(block), 1);
        }
        pool.commit(0, Bug::None);
        Ok((pool, false))
    }

    fn content_at(&self, block: u32) -> u64 {
        self.region.bytes() - u64::from(BLOCKS - block) * CONTENT_BYTES
    }

    fn put(&self, block: u32, step: u64) {
        self.region.write(self.content_at(block), &[step as u8 + 1; CONTENT_BYTES as usize]);
    }

    fn commit(&mut self, step: u64, bug: Bug) {
        let commit = CommitNumber::new(self.root.commit + 1);
        self.map.write(commit);
        if bug == Bug::MapInPlace {
            self.write_other_slot_too(commit);
        }
        if bug == Bug::ReleaseBeforeSync {
            // Gives away the blocks that this step frees before the next root is written.
            self.map.release(commit);
            let (block, _) = self.map.allocate(1, Some(Block::new(1)), Fit::Run).unwrap();
            self.put(block.get(), step + 100);
            self.map.free(block, 1);
        }
        self.region.sync().unwrap();
        self.root.commit = commit.get();
        self.root.words[STEP] = step;
        self.roots.write(&self.root);
        self.region.sync().unwrap();
        self.map.release(commit);
    }

    /// The planted bug: overwrites the map of the valid root.
    fn write_other_slot_too(&self, commit: CommitNumber) {
        let slot_bytes = alloc::bytes_needed(BLOCKS) / 2;
        let mut pages = vec![0; slot_bytes as usize];
        let at = |commit: u64| 8192 + commit % 2 * slot_bytes;
        self.region.read(at(commit.get()), &mut pages).unwrap();
        self.region.write(at(commit.get() + 1), &pages);
    }
}

/// Runs the workload, and appends to `steps` the blocks in use after each step; step 0 is the format.
fn workload(recorder: &Recorder, plan: Plan, steps: &RefCell<Vec<Owned>>) {
    if let Bug::LeftOut(verb, call) = plan.bug {
        recorder.leave_out(verb, call);
    }
    let (mut pool, _) = Pool::open(&recorder.medium(), plan).unwrap();
    let mut owned: Owned = FIRST_BLOCKS.iter().map(|block| (*block, 0)).collect();
    steps.borrow_mut().push(owned.clone());
    recorder.returned(0);
    let second_page = format::map::MAP_PAGE_BLOCKS;
    // For each step: hint and length of the allocation, and the number of the oldest blocks that are freed.
    let plan_of_steps = [
        (1, 3, 0),
        (1, 2, 2),
        (second_page + 1, 2, 1),
        (1, 3, 2),
        (1, 1, 3),
        (1, 2, 0),
        (1, 3, 2),
        (1, 2, 1),
        (1, 3, 3),
        (1, 1, 2),
    ];
    for (step, (hint, count, freed)) in (1..).zip(plan_of_steps) {
        let oldest: Vec<u32> =
            owned.keys().copied().filter(|block| !FIRST_BLOCKS.contains(block)).take(freed).collect();
        for block in oldest {
            owned.remove(&block);
            pool.map.free(Block::new(block), 1);
        }
        let (block, got) = pool.map.allocate(count, Some(Block::new(hint)), Fit::Run).unwrap();
        for block in block.get()..block.get() + got {
            assert!(owned.insert(block, step).is_none(), "block {block} has two owners");
            pool.put(block, step);
        }
        steps.borrow_mut().push(owned.clone());
        pool.commit(step, plan.bug);
        recorder.returned(step);
    }
}

/// Recovery makes a commit of its own, which overwrites the remains of an abandoned commit.
fn recover(medium: &Medium, plan: Plan) -> Result<(Pool, bool), String> {
    let (mut pool, found) = Pool::open(medium, plan)?;
    let (block, count) = pool.map.allocate(2, Some(Block::new(40)), Fit::Run).ok_or("nothing is free")?;
    pool.map.free(block, count);
    let step = pool.root.words[STEP];
    pool.commit(step, Bug::None);
    Ok((pool, found))
}

fn check(pool: &mut Pool, found: bool, steps: &[Owned], promised: Option<u64>) -> Result<(), String> {
    let step = pool.root.words[STEP];
    if promised.is_some_and(|promised| step < promised || !found) {
        return Err(format!("step {step} came back, step {promised:?} was promised"));
    }
    let owned = steps.get(step as usize).ok_or("a step that nobody made")?;
    let used: Vec<u32> =
        pool.map.used_runs().flat_map(|(block, count)| block.get()..block.get() + count).collect();
    if used != owned.keys().copied().collect::<Vec<_>>() || pool.map.used() != used.len() as u32 {
        return Err(format!("the map says {used:?}, step {step} has {owned:?}"));
    }
    if pool.map.allocatable() != BLOCKS - pool.map.used() {
        return Err(format!("{} blocks can be allocated, {} are used", pool.map.allocatable(), used.len()));
    }
    for (block, since) in owned.iter().filter(|(_, since)| **since > 0) {
        let mut content = [0; CONTENT_BYTES as usize];
        pool.region.read(pool.content_at(*block), &mut content).map_err(text)?;
        if content != [*since as u8 + 1; CONTENT_BYTES as usize] {
            return Err(format!("block {block} of step {since} holds {}", content[0]));
        }
    }
    Ok(())
}

fn enumerate(plan: Plan, limits: &Limits) -> Result<Counts, Box<Violation>> {
    let steps = RefCell::new(Vec::new());
    crash::enumerate(
        plan.model,
        limits,
        |recorder| workload(recorder, plan, &steps),
        |medium| recover(medium, plan),
        |(mut pool, found), _, point: &Point| {
            check(&mut pool, found, &steps.borrow(), point.returned.last().copied())
        },
    )
}

fn limits() -> Limits {
    match std::env::var("HEARTH_PROVE") {
        Ok(_) => Limits::default(),
        Err(_) => Limits {
            complete_max: 256,
            near_max: 200,
            sampled: 50,
            recovery_images: 3,
            recovery_every: 1,
            seed: 1,
        },
    }
}

fn left_out_unnoticed(model: Model, verb: Verb) -> Vec<u64> {
    let recorder = Recorder::new();
    workload(&recorder, Plan { model, bug: Bug::None }, &RefCell::new(Vec::new()));
    let limits = Limits { recovery_images: 0, ..limits() };
    let goes_unnoticed =
        |call: &u64| enumerate(Plan { model, bug: Bug::LeftOut(verb, *call) }, &limits).is_ok();
    (0..recorder.calls(verb)).filter(goes_unnoticed).collect()
}

#[test]
fn lines() {
    let plan = Plan { model: Model::Lines, bug: Bug::None };
    let counts = progress::case("allocator, lines", || enumerate(plan, &limits()));
    let counts = counts.unwrap_or_else(|violation| panic!("{violation}"));
    println!("allocator, lines: {counts}");
    let crashed = counts.recovery_images + counts.same;
    assert!(counts.images > 500 && counts.recovery_images > 500 && crashed > 2000, "{counts}");
}

#[test]
fn pages() {
    let plan = Plan { model: Model::Pages, bug: Bug::None };
    let counts = progress::case("allocator, pages", || enumerate(plan, &limits()));
    let counts = counts.unwrap_or_else(|violation| panic!("{violation}"));
    println!("allocator, pages: {counts}");
    assert!(counts.images > 50 && counts.recovery_images > 50, "{counts}");
}

#[test]
fn every_persist_and_sync_that_is_left_out_is_found() {
    for (model, verb) in
        [(Model::Lines, Verb::Persist), (Model::Lines, Verb::Sync), (Model::Pages, Verb::Sync)]
    {
        assert_eq!(left_out_unnoticed(model, verb), Vec::<u64>::new(), "{model:?}, {verb:?}");
    }
}

#[test]
fn planted_bugs_are_found() {
    for (name, bug, models) in [
        ("map written in place", Bug::MapInPlace, vec![Model::Lines, Model::Pages]),
        ("release before sync", Bug::ReleaseBeforeSync, vec![Model::Lines, Model::Pages]),
        ("root checksum ignored", Bug::IgnoredRootChecksum, vec![Model::Lines]),
    ] {
        for model in models {
            let found = enumerate(Plan { model, bug }, &limits());
            println!("{name}, {model:?}: {:?}", found.as_ref().map_err(|violation| &violation.message));
            assert!(found.is_err(), "{name} is not found under {model:?}");
        }
    }
}
