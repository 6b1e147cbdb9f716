//! Every case of the table, crashed at every moment under both models of a medium: the recovered state is that before
//! the batch or that after it, and sound; a batch that has returned is there. The batch is then applied again to the
//! recovered state, and that is crashed too.
//!
//! A slice of the images is made unless HEARTH_PROVE=1 asks for all within the driver's limits.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod support;

use area::Area;
use pmem::crash::{Counts, Failure, Limits, Model, Point, Violation, each_distinct, enumerate};
use pmem::progress;
use pmem::recorded::{Recorder, Verb};
use pmem::seen::JudgedImages;
use support::cases::{self, Case};
use support::{
    AreaState, commit, commit_in, findings, model, new_pool, pool, proving, state_of, text, tiny, write,
};

/// Nodes of the trees that are crashed.
const NODES: u32 = 256;

fn limits() -> Limits {
    if proving() {
        return Limits::default();
    }
    Limits { complete_max: 256, near_max: 96, sampled: 32, recovery_images: 0, recovery_every: 1, seed: 3 }
}

/// Images of what is done again after a crash: a sample of each, for a sample of them.
fn limits_again() -> Limits {
    Limits { complete_max: 4, near_max: 2, sampled: 2, recovery_images: 0, recovery_every: 1, seed: 5 }
}

/// A case, ready to be crashed.
struct Crashed {
    /// The medium on which the batch was recorded.
    recorder: Recorder,
    before: AreaState,
    after: AreaState,
}

/// Runs a case, recording only its batch. `damage` may tell the recorder to leave something out.
fn record(case: &Case, damage: impl FnOnce(&Recorder)) -> Crashed {
    let first = Recorder::new();
    let mut area = pool(&first.medium(), NODES, tiny());
    commit(&mut area, &cases::base(), 1).unwrap();
    for (steps, number) in case.before.iter().zip(1..) {
        commit_in(&mut area, steps, 1000 * number, case.gathers).unwrap();
    }
    let before = state_of(&area).unwrap();
    drop(area);
    let recorder = Recorder::of_image(first.image());
    let mut area = Area::open(&recorder.medium(), tiny()).unwrap();
    damage(&recorder);
    commit_in(&mut area, &case.batch, 10_000, case.gathers).unwrap();
    recorder.returned(1);
    let after = state_of(&area).unwrap();
    Crashed { recorder, before, after }
}

/// Opens what a crash left and judges it. True if the batch is in it.
fn judge(crashed: &Crashed, recorder: &Recorder, returned: bool) -> Result<bool, String> {
    let medium = recorder.medium();
    let area = Area::open(&medium, tiny()).map_err(text)?;
    let state = state_of(&area).map_err(text)?;
    findings(&medium)?;
    if state == crashed.after {
        return Ok(true);
    }
    if state != crashed.before {
        return Err("neither the state before nor the one after".to_owned());
    }
    if returned { Err("what returned is lost".to_owned()) } else { Ok(false) }
}

/// Crashes a case under one model. Every `again_every`th image is worked on, and that crashed again.
fn crash(case: &Case, crashed: &Crashed, model: Model, again_every: u64) -> Result<Counts, Box<Violation>> {
    let (mut seen, mut seen_again) = (JudgedImages::default(), JudgedImages::default());
    let (mut number, mut again) = (0, Counts::default());
    let recorded = &crashed.recorder;
    let mut counts = each_distinct(recorded, model, &limits(), &mut seen, |point: &Point, recorder| {
        let done = judge(crashed, recorder, !point.returned.is_empty())?;
        // An open writes nothing: to be interrupted in it changes nothing.
        if recorder.calls(Verb::Persist) + recorder.calls(Verb::Sync) > 0 {
            return Err("recovery wrote to the medium".to_owned().into());
        }
        number += 1;
        if done || number % again_every != 0 {
            return Ok(());
        }
        let mut area = Area::open(&recorder.medium(), tiny()).map_err(text)?;
        commit_in(&mut area, &case.batch, 10_000, case.gathers).map_err(text)?;
        recorder.returned(1);
        let judge_again = |point: &Point, recorder: &Recorder| {
            judge(crashed, recorder, !point.returned.is_empty()).map(|_| ()).map_err(Failure::from)
        };
        let counted = each_distinct(recorder, model, &limits_again(), &mut seen_again, judge_again);
        again += counted.map_err(|violation| violation.of_recovery())?;
        Ok(())
    })?;
    counts.recovery_images = again.images;
    counts.same += again.same;
    Ok(counts)
}

fn prove(model: Model) {
    let name = |case: &Case| format!("area, {model:?}, {}", case.name);
    let proved = progress::cases(&cases::all(), name, |case| crash(case, &record(case, |_| {}), model, 1));
    let total = proved.unwrap_or_else(|violation| panic!("{violation}"));
    println!("area, {model:?}: {total}");
    assert!(total.images > 1000 && total.recovery_images > 500, "{total}");
}

#[test]
fn every_case_survives_a_crash_in_persistent_memory() {
    prove(Model::Lines);
}

#[test]
fn every_case_survives_a_crash_in_a_file() {
    prove(Model::Pages);
}

#[test]
fn a_pool_is_there_or_not_and_can_be_made_again() {
    for model in [Model::Lines, Model::Pages] {
        let limits = if proving() { Limits::default() } else { Limits::quick() };
        let format = || {
            enumerate(
                model,
                &limits,
                |recorder| {
                    Area::format(&recorder.medium(), &new_pool(NODES)).unwrap();
                    recorder.returned(1);
                },
                |medium| match Area::open(medium, tiny()) {
                    Err(area::AreaError::Missing) => {
                        Area::format(medium, &new_pool(NODES)).map_err(text)?;
                        Ok((Area::open(medium, tiny()).map_err(text)?, true))
                    }
                    found => Ok((found.map_err(text)?, false)),
                },
                |(mut area, made_again), medium, point| {
                    if made_again && !point.returned.is_empty() {
                        return Err("a pool that was made is gone".to_owned());
                    }
                    findings(medium)?;
                    if state_of(&area).map_err(text)? != model::new() {
                        return Err("not a new pool".to_owned());
                    }
                    commit(&mut area, &cases::base(), 1).map_err(text)?;
                    findings(medium)
                },
            )
        };
        let counts = progress::case(&format!("area, the making of a pool, {model:?}"), format);
        let counts = counts.unwrap_or_else(|violation| panic!("{violation}"));
        println!("area, the making of a pool, {model:?}: {counts}");
        let crashed = counts.recovery_images + counts.same;
        assert!(counts.images > 10 && counts.recovery_images > 30 && crashed > 100, "{counts}");
    }
}

/// A batch that makes a segment, moves nodes, frees and allocates.
fn rich() -> Case {
    Case {
        name: "rich",
        before: vec![vec![write(11, 0, 7, 10 * 4096)]],
        batch: vec![write(11, 0, 8, 14 * 4096), write(10, 10, 9, 5000), support::file(40, 20, "new")],
        gathers: false,
    }
}

/// True if some crash shows what the recorder left out.
fn is_found(case: &Case, verb: Verb, call: u64) -> bool {
    let crashed = record(case, |recorder| recorder.leave_out(verb, call));
    [Model::Lines, Model::Pages].into_iter().any(|model| crash(case, &crashed, model, u64::MAX).is_err())
}

#[test]
fn each_sync_and_each_flush_that_is_left_out_is_found() {
    let case = rich();
    for verb in [Verb::Sync, Verb::Persist] {
        let calls = record(&case, |_| {}).recorder.calls(verb);
        assert!(calls >= 4, "{calls} calls");
        for call in 0..calls {
            assert!(is_found(&case, verb, call), "{verb:?} {call} of {calls} can be left out");
        }
        println!("{verb:?}: {calls} left out, {calls} found");
    }
}
