//! Worlds of two and three nodes under seeds: see `sim::world`. `HEARTH_WORLD_SEEDS` says how many, `HEARTH_SEED` which one alone.

use sim::world::{Counts, Outcome, Plan, run};

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

#[test]
fn nothing_that_was_synced_is_lost_whatever_one_copy_survives() {
    let only = number("HEARTH_SEED");
    let seeds = only.map_or(0..number("HEARTH_WORLD_SEEDS").unwrap_or(SEEDS), |seed| seed..seed + 1);
    let (mut total, mut failed) = (Counts::default(), 0);
    for seed in seeds.clone() {
        match run(seed, plan(seed)) {
            Ok(Outcome { counts, .. }) => total += counts,
            Err(why) => {
                failed += 1;
                println!("seed {seed}: {why}");
                println!("again: HEARTH_SEED={seed} cargo test -p sim --test world");
            }
        }
        let done = seed + 1 - seeds.start;
        if done.is_multiple_of(PROGRESS) {
            println!("worlds: {done} of {} seeds, {failed} failed", seeds.end - seeds.start);
        }
    }
    println!("worlds: {} seeds, {total:?}; {failed} failed", seeds.end - seeds.start);
    assert_eq!(failed, 0, "see above");
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let once = || run(4, plan(4));
    assert_eq!(once(), once());
}
