//! Worlds of two and three nodes under seeds: see `sim::world`. `HEARTH_WORLD_SEEDS` says how many, `HEARTH_SEED` which one alone.

use sim::world::{Counts, Outcome, Plan, run};
use std::sync::Mutex;

/// Seeds in `make test`.
const SEEDS: u64 = 5;

/// A longer run prints how far it is after each so many seeds.
const PROGRESS: u64 = 100;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

fn plan(seed: u64) -> Plan {
    Plan { nodes: if seed.is_multiple_of(3) { 2 } else { 3 }, faults: 12 }
}

/// The results of the seeds so far.
#[derive(Default)]
struct Results {
    total: Counts,
    done: u64,
    failed: u64,
}

/// Worlds are independent of each other, so each processor runs one.
#[test]
fn nothing_that_was_synced_is_lost_whatever_one_copy_survives() {
    let only = number("HEARTH_SEED");
    let seeds = only.map_or(0..number("HEARTH_WORLD_SEEDS").unwrap_or(SEEDS), |seed| seed..seed + 1);
    let count = seeds.end - seeds.start;
    let (left, results) = (Mutex::new(seeds), Mutex::new(Results::default()));
    let next = || left.lock().unwrap().next();
    let work = || {
        while let Some(seed) = next() {
            let outcome = run(seed, plan(seed));
            let mut results = results.lock().unwrap();
            match outcome {
                Ok(Outcome { counts, .. }) => results.total += counts,
                Err(why) => {
                    results.failed += 1;
                    println!("seed {seed}: {why}");
                    println!("again: HEARTH_SEED={seed} cargo test -p sim --test world");
                }
            }
            results.done += 1;
            if results.done.is_multiple_of(PROGRESS) {
                println!("worlds: {} of {count} seeds, {} failed", results.done, results.failed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let Results { total, failed, .. } = results.into_inner().unwrap();
    println!("worlds: {count} seeds, {total:?}; {failed} failed");
    assert_eq!(failed, 0, "see above");
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let once = || run(4, plan(4));
    assert_eq!(once(), once());
}
