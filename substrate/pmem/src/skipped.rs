//! Skips single fences and syncs of a finished recording, to show that a crash test notices a missing one.
//!
//! Skipping a call does not change the run itself, so one recording serves for all of its calls. The skipped call can
//! only matter until the next call that makes the same stores durable, so only crashes between the two are built.
//! Random moments of the whole run would rarely lie there.

use crate::choices::{Choices, SeededRandom};
use crate::crash::{Counts, Limits, Model, Point, Violation, recover_and_check};
use crate::medium::Medium;
use crate::recorded::{Event, Recorder, Verb};
use crate::replay::Replay;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// A fence or a sync of a recording.
#[derive(Clone, Debug)]
pub struct SkippableCall {
    /// The file.
    pub file: Arc<str>,
    /// Its position in the log.
    event: usize,
    /// Numbers of events in the log without it after which its absence can matter; empty if another one follows at once.
    window: RangeInclusive<usize>,
}

/// All calls of `verb` in a recording, in order: fences under [`Model::Lines`], syncs under either model.
///
/// # Panics
/// If `verb` is `Persist`, whose calls have no effect of their own.
pub fn calls(recorder: &Recorder, model: Model, verb: Verb) -> Vec<SkippableCall> {
    let (_, mut names, log) = recorder.history();
    let mut found = Vec::new();
    for (event, at) in log.iter().enumerate() {
        match (at, verb) {
            (_, Verb::Persist) => panic!("a persist is not skipped alone"),
            (Event::Create { file, name, .. }, _) => drop(names.insert(*file, name.clone())),
            (Event::Fence { file, .. }, Verb::Fence) | (Event::Sync { file, .. }, Verb::Sync) => {
                let covers = |later: &Event| covers(later, at, model);
                let next = log[event + 1..].iter().position(covers).unwrap_or(log.len() - event - 1);
                found.push(SkippableCall {
                    file: names[file].clone(),
                    event,
                    window: event + 1..=event + next,
                });
            }
            _ => {}
        }
    }
    found
}

/// True if `later` makes all stores durable that `call` does, or removes them.
fn covers(later: &Event, call: &Event, model: Model) -> bool {
    let (Event::Fence { file, thread } | Event::Sync { file, thread }) = call else { return false };
    match later {
        Event::Fence { file: other, thread: by } => model == Model::Lines && (other, by) == (file, thread),
        Event::Sync { file: other, thread: by } => other == file && (model == Model::Pages || by == thread),
        Event::Remove { file: other } => other == file,
        _ => false,
    }
}

/// Crashes a recorded run in which one call is skipped, at every moment at which that can matter. Recoveries are not
/// crashed.
///
/// # Errors
/// The first violation.
pub fn crash_without<R>(
    recorder: &Recorder,
    (model, call): (Model, &SkippableCall),
    limits: &Limits,
    mut recover: impl FnMut(&Medium) -> Result<R, String>,
    mut check: impl FnMut(R, &Medium, &Point) -> Result<(), String>,
) -> Result<Counts, Box<Violation>> {
    let recorder = recorder.without(call.event);
    let mut replay = Replay::new(&recorder, model);
    let (mut counts, mut random) = (Counts::default(), SeededRandom(limits.seed ^ call.event as u64));
    while replay.advance() && replay.events() <= *call.window.end() {
        if !call.window.contains(&replay.events()) {
            continue;
        }
        let moment = replay.moment();
        let point = Point { returned: moment.returned.to_vec(), event: moment.event, model };
        let choices = Choices::of(&moment);
        let complete = choices.each(limits, &mut random, |chosen| {
            counts.images += 1;
            let crashed = Recorder::of_image(choices.image(chosen));
            let (_, judged) = recover_and_check(&crashed, &point, &mut recover, &mut check);
            judged.map_err(|message| {
                let (point, image) = (point.clone(), choices.describe(chosen));
                Box::new(Violation { point, image, recovery: None, message })
            })
        })?;
        counts.complete += u64::from(complete);
        counts.capped += u64::from(!complete);
    }
    Ok(counts)
}
