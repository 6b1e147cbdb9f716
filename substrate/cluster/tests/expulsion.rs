//! Never two members believe at one instant that they may serve the same subtree: over many seeds, with wrong clocks,
//! pauses, one-way cuts, late and doubled messages, deaths, and managers that start anew; half of the seeds with the
//! manager as expeller, half with the members (a store that only keeps, as ZooKeeper does). Then faults end, and each
//! subtree is served by exactly one.
//!
//! HEARTH_PROVE=1 runs 10,000 seeds.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

#[path = "expulsion/parts.rs"]
mod parts;
#[path = "expulsion/world.rs"]
mod world;

use parts::{Counts, Plant};
use world::World;

/// Leases that the faults of a run last.
const LEASES: u64 = 20;

fn seeds() -> u64 {
    if std::env::var_os("HEARTH_PROVE").is_some() { 10_000 } else { 400 }
}

#[test]
fn never_two_serve_the_same_subtree() {
    let mut counts = Counts::default();
    for seed in 0..seeds() {
        match World::new(seed, Plant::None).run(LEASES) {
            Ok(more) => counts += more,
            Err(message) => panic!("seed {seed}: {message}"),
        }
    }
    println!("{} seeds: {counts:?}", seeds());
    let many = seeds();
    assert!(counts.expulsions > many && counts.moves > many && counts.restarts > many && counts.late > many);
    assert!(counts.refused_beats > many, "complaints were never followed");
    assert!(counts.served_ms > many * 1000, "hardly anybody served: nothing was shown");
}

fn found(plant: Plant) {
    let of = 2000;
    let violated =
        |seed| World::new(seed, plant).run(LEASES).err().filter(|message| message.contains("all serve"));
    let first = (0..of).find_map(|seed| violated(seed).map(|message| (seed, message)));
    let (seed, message) = first.unwrap_or_else(|| panic!("{plant:?} was not found in {of} seeds"));
    println!("{plant:?} found by seed {seed}: {message}");
}

#[test]
fn a_heartbeat_that_counts_from_its_answer_is_found() {
    found(Plant::BeatFromReply);
}

#[test]
fn an_expulsion_without_the_version_is_found() {
    found(Plant::ExpelWithoutVersion);
}

#[test]
fn an_epoch_that_is_not_durable_is_found() {
    found(Plant::EpochNotDurable);
}

#[test]
fn drift_beyond_the_bound_is_found() {
    found(Plant::DriftBeyond);
}

#[test]
fn a_role_given_away_without_stopping_is_found() {
    found(Plant::GiveWithoutStopping);
}

#[test]
fn a_manager_that_does_not_wait_after_its_start_is_found() {
    found(Plant::RestartForgetsToWait);
}
