//! Random calls of three processes on the same files, one call at a time: two processes under `hearth run` and one at the
//! mount have to get the answers that three processes get on the kernel's file system in memory.
//!
//! A difference is reduced and printed with the seed of its sequence. `HEARTH_LOCKSTEP=FIRST-LAST` plays the sequences of
//! these seeds and prints every difference, `HEARTH_LOCKSTEP=FILE` plays calls as a difference prints them, either
//! `HEARTH_LOCKSTEP_TIMES` times; `HEARTH_PROVE=1` plays new seeds for ten minutes.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

#[path = "lockstep/generate.rs"]
mod generate;
mod harness;
#[path = "lockstep/mended.rs"]
mod mended;
mod processes;
#[path = "lockstep/reduce.rs"]
mod reduce;
#[path = "lockstep/run.rs"]
mod run;

use ipc::{Host, SystemHost};
use run::{Bench, Call};
use std::io::Read;
use std::time::Duration;

/// Sequences that every run plays.
const FIXED: std::ops::Range<u64> = 0..48;
/// Time for sequences with new seeds, if `HEARTH_PROVE` is set.
const FRESH: Duration = Duration::from_secs(600);
/// Differences that a run prints before it gives up.
const DIFFERENCES_MAX: usize = 40;

/// Plays the sequence of a seed; the difference, reduced.
fn try_seed(bench: &Bench, seed: u64) -> Option<String> {
    let calls = generate::sequence(seed);
    let first = bench.play(&calls)?;
    let shown = match reduce::reduced(bench, calls[..=first.index].to_vec()) {
        Some((calls, difference)) => difference.show(&calls),
        None => format!("(only once)\n{}", first.show(&calls)),
    };
    Some(format!("seed {seed}:\n{shown}"))
}

/// New seeds, for a time from the first one on.
fn fresh_seeds() -> impl Iterator<Item = u64> {
    let mut bytes = [0; 4];
    std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
    let first = u64::from(u32::from_le_bytes(bytes));
    println!("new seeds: from {first}");
    let mut until = None;
    (first..)
        .take_while(move |_| SystemHost.now() < *until.get_or_insert_with(|| SystemHost.now().after(FRESH)))
}

/// Plays the sequences of these seeds; the differences.
fn differences(bench: &Bench, seeds: impl Iterator<Item = u64>) -> Vec<String> {
    let mut found = Vec::new();
    let (mut first, mut last, mut count) = (None, 0, 0);
    for seed in seeds {
        first.get_or_insert(seed);
        (last, count) = (seed, count + 1);
        if let Some(difference) = try_seed(bench, seed) {
            println!("{difference}");
            found.push(difference);
            if found.len() == DIFFERENCES_MAX {
                break;
            }
        }
    }
    println!("{count} sequences, the first of seed {}, the last of seed {last}", first.unwrap_or(0));
    found
}

/// Plays calls, one a line; the difference.
fn difference_of(bench: &Bench, calls: &str) -> Option<String> {
    let calls: Vec<Call> = calls.lines().map(Call::parse).collect();
    bench.play(&calls).map(|difference| difference.show(&calls))
}

#[test]
fn sequences_that_once_differed() {
    if !harness::can_mount() {
        return;
    }
    let bench = Bench::new();
    for (name, calls) in mended::SEQUENCES {
        if let Some(difference) = difference_of(&bench, calls) {
            panic!("{name}:\n{difference}");
        }
    }
    bench.end();
}

#[test]
fn three_processes_get_the_answers_of_the_kernels_file_system() {
    if !harness::can_mount() {
        return;
    }
    let bench = Bench::new();
    let times = processes::count("HEARTH_LOCKSTEP_TIMES", 1) as usize;
    let found = match std::env::var("HEARTH_LOCKSTEP") {
        Ok(file) if std::path::Path::new(&file).exists() => {
            let calls = std::fs::read_to_string(file).unwrap();
            (0..times).filter_map(|_| difference_of(&bench, &calls)).collect()
        }
        Ok(range) => {
            let (first, last) = range.split_once('-').unwrap_or((&range, &range));
            let seeds = first.parse().unwrap()..=last.parse().unwrap();
            differences(&bench, seeds.flat_map(|seed: u64| std::iter::repeat_n(seed, times)))
        }
        Err(_) if std::env::var_os("HEARTH_PROVE").is_some() => {
            differences(&bench, FIXED.chain(fresh_seeds()))
        }
        Err(_) => differences(&bench, FIXED),
    };
    assert!(
        found.is_empty(),
        "{} differences:\n{}\nmessages: {}",
        found.len(),
        found.join("\n"),
        bench.said()
    );
    bench.end();
}
