//! Two members never believe at the same instant that they may serve the same subtree: for many seeds, with wrong
//! clocks, pauses, cuts in one direction, late and repeated messages, deaths, and restarts of the manager. In half of
//! the seeds the manager is the expeller, in the other half the members are (with a store like ZooKeeper). After that
//! the faults end, and exactly one member serves each subtree.
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

/// Leases for which the faults of a run last.
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
    assert!(counts.served_ms > many * 1000, "almost no member served, so the runs show nothing");
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
