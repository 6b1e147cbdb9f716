//! Makes a sequence of calls that shows a difference shorter.

use super::run::{Bench, Call, Difference};

/// Runs for one reduction.
const RUNS_MAX: u32 = 400;

/// A shorter sequence with a difference, which need not be the first one: calls are left out, ever fewer at a time, as long
/// as a difference remains. Nothing, if the calls show none when they are played again.
pub fn reduced(bench: &Bench, mut calls: Vec<Call>) -> Option<(Vec<Call>, Difference)> {
    let mut difference = bench.play(&calls)?;
    calls.truncate(difference.index + 1);
    let mut runs = 0;
    let mut step = calls.len().div_ceil(2);
    loop {
        let mut from = calls.len();
        let mut is_shorter = false;
        while from > 0 && runs < RUNS_MAX {
            let start = from.saturating_sub(step);
            let fewer = [&calls[..start], &calls[from..]].concat();
            runs += 1;
            if let Some(remaining) = bench.play(&fewer) {
                calls = fewer;
                calls.truncate(remaining.index + 1);
                difference = remaining;
                is_shorter = true;
            }
            from = start.min(calls.len());
        }
        if runs >= RUNS_MAX || step == 1 && !is_shorter {
            return Some((calls, difference));
        }
        step = step.div_ceil(2);
    }
}
