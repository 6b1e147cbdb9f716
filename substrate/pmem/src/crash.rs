//! Crash explorer for tests: crashes a structure at every point of a workload and checks that it recovers.
//!
//! [`enumerate`] runs a workload once on a recorded medium. A crash can differ from the previous one before each
//! fence, sync, file creation and file removal, and after each call that returned; these are the *moments*. For each
//! moment the explorer builds the images that a crash there may leave on the medium ([`Model`]). It recovers each
//! image on a new recorded medium, calls the check of the test, and crashes the recovery itself in the same way.
//!
//! A moment is *complete* if all its images were built, including images with torn words. If there are more than
//! [`Limits::complete_max`] of these, a moment still counts as complete if every combination of whole stores was
//! built and torn ones were sampled. Every other moment is *capped*: the explorer builds the images in which up to
//! two units differ from none or from all of the pending stores, and a random sample.
//!
//! An image is not recovered again if another image had the same contents in every byte that recovery, its own
//! crashes and the check have read ([`crate::seen`]). Such an image is counted as *the same*.
//! is *the same* ([`crate::seen`]), and counted.

use crate::choices::{Choices, SeededRandom};
use crate::image::Image;
use crate::medium::Medium;
use crate::recorded::Recorder;
pub use crate::replay::Model;
use crate::replay::Replay;
use crate::seen::{JudgedChoices, JudgedImages};
use std::collections::{BTreeSet, HashMap};
use std::panic::AssertUnwindSafe;

/// Limits on the number of images.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// All images of a moment are built if there are at most this many.
    pub complete_max: u64,
    /// At a capped moment: the images that differ from none or from all stores in up to two units are built if there
    /// are at most this many. Otherwise this many of them are selected evenly; images that differ in one unit come
    /// first.
    pub near_max: u64,
    /// Number of random images at a moment where not all images with torn words are built.
    pub sampled: u64,
    /// Images at each moment of a recovery: none of its stores, all of them, and random ones. 0: recovery is not
    /// crashed.
    pub recovery_images: u64,
    /// Among the images of a moment whose recoveries did exactly the same, recovery is crashed for the first one and
    /// for one in this many of the others. 1: for each.
    pub recovery_every: u64,
    /// Seed of the random choices.
    pub seed: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            complete_max: 4096,
            near_max: u64::MAX,
            sampled: 500,
            recovery_images: 8,
            recovery_every: 1,
            seed: 1,
        }
    }
}

impl Limits {
    /// Limits for the tests of every day, for a structure with many pending lines at once.
    pub fn quick() -> Self {
        Self { complete_max: 256, near_max: 256, sampled: 64, recovery_images: 4, recovery_every: 1, seed: 1 }
    }

    /// Limits for crashes of a recovery: none of its stores, all of them, and random choices.
    fn of_recovery(&self, point: &Point) -> Self {
        Self {
            complete_max: 0,
            near_max: 0,
            sampled: self.recovery_images.saturating_sub(2),
            recovery_images: 0,
            recovery_every: 1,
            seed: self.seed ^ point.event as u64,
        }
    }
}

/// Numbers of moments and images that a run has checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Moments of which all images were built.
    pub complete: u64,
    /// Moments of which only some images were built.
    pub capped: u64,
    /// Images recovered and checked.
    pub images: u64,
    /// Images of crashed recoveries, recovered again and checked.
    pub recovery_images: u64,
    /// Images of both kinds that were skipped because an earlier image had the same bytes wherever recovery and check
    /// read ([`crate::seen`]).
    pub same: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        self.complete += more.complete;
        self.capped += more.capped;
        self.images += more.images;
        self.recovery_images += more.recovery_images;
        self.same += more.same;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} points complete, {} capped, {} images, {} of crashed recoveries; {} the same as one before in all that is read",
            self.complete, self.capped, self.images, self.recovery_images, self.same
        )
    }
}

/// A crash, as the check of a test sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// The operations that had returned before the crash ([`Recorder::returned`]), in order.
    pub returned: Vec<u64>,
    /// Number of events in the recorder's log before the crash.
    pub event: usize,
    /// The crash model.
    pub model: Model,
}

/// A crash from which the structure did not recover correctly.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The crash.
    pub point: Point,
    /// The pending stores that had reached the medium, listed by unit.
    pub image: String,
    /// If recovery was crashed: its pending stores that had reached the medium.
    pub recovery: Option<String>,
    /// The error or panic message of recovery or check.
    pub message: String,
}

impl Violation {
    /// Converts a violation in a crashed recovery into a failure of the image that was being recovered.
    pub fn of_recovery(self) -> Failure {
        Failure { message: self.message, recovery: Some(self.image) }
    }
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}; crash {:?} with {}", self.message, self.point, self.image)?;
        match &self.recovery {
            Some(recovery) => write!(f, "; recovery crashed with {recovery}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Violation {}

/// Runs `workload` once and crashes it at every moment. `recover` must succeed on every image; `check` receives the
/// recovered structure and may continue to use it. Each recovery is crashed as well, and the resulting images are
/// recovered and checked in the same way.
///
/// # Errors
/// The first violation.
pub fn enumerate<R>(
    model: Model,
    limits: &Limits,
    workload: impl FnOnce(&Recorder),
    recover: impl FnMut(&Medium) -> Result<R, String>,
    check: impl FnMut(R, &Medium, &Point) -> Result<(), String>,
) -> Result<Counts, Box<Violation>> {
    let recorder = Recorder::new();
    workload(&recorder);
    crash_recorded(&recorder, model, limits, recover, check)
}

/// [`enumerate`] for a finished recording, so that one recording serves both models.
///
/// # Errors
/// The first violation.
pub fn crash_recorded<R>(
    recorder: &Recorder,
    model: Model,
    limits: &Limits,
    mut recover: impl FnMut(&Medium) -> Result<R, String>,
    mut check: impl FnMut(R, &Medium, &Point) -> Result<(), String>,
) -> Result<Counts, Box<Violation>> {
    let (mut seen, mut seen_again) = (JudgedImages::default(), JudgedImages::default());
    let (mut again, mut recoveries) = (Counts::default(), HashMap::new());
    let mut counts = each_distinct(recorder, model, limits, &mut seen, |point, crashed| {
        let (recovery, judged) = recover_and_check(crashed, point, &mut recover, &mut check);
        judged?;
        if limits.recovery_images == 0 || !recovery.has_changes() {
            return Ok(());
        }
        let alike = recoveries.entry((point.event, recovery.log_hash())).or_insert(0_u64);
        *alike += 1;
        if *alike != 1 && !alike.is_multiple_of(limits.recovery_every) {
            return Ok(());
        }
        let (nested, returned) = (limits.of_recovery(point), point.returned.len());
        let counted =
            each_distinct_of(&recovery, crashed, returned, model, &nested, &mut seen_again, |_, crashed| {
                recover_and_check(crashed, point, &mut recover, &mut check).1.map_err(Failure::from)
            });
        again += counted.map_err(|violation| violation.of_recovery())?;
        Ok(())
    })?;
    counts.recovery_images = again.images;
    counts.same += again.same;
    Ok(counts)
}

/// Recovers and checks an image. Returns a recorder with the log of the recovery alone, without what the check did
/// after it.
pub(crate) fn recover_and_check<R>(
    crashed: &Recorder,
    point: &Point,
    recover: &mut impl FnMut(&Medium) -> Result<R, String>,
    check: &mut impl FnMut(R, &Medium, &Point) -> Result<(), String>,
) -> (Recorder, Result<(), String>) {
    let medium = crashed.medium();
    let recovered = caught(|| recover(&medium));
    let recovery = crashed.snapshot();
    let judged = recovered.and_then(|recovered| caught(|| check(recovered, &medium, point)));
    (recovery, judged)
}

/// Runs a step, and turns its panic into an error.
fn caught<T>(step: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    std::panic::catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or("without a message")))
    })
}

/// The reason for which an image was rejected.
pub struct Failure {
    /// The message of the check.
    pub message: String,
    /// The pending stores of the recovery, if recovery had to be crashed to show the fault.
    pub recovery: Option<String>,
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Self { message, recovery: None }
    }
}

/// Calls `judge` with every image that a crash of the recorded workload may leave, within the limits.
///
/// # Errors
/// The first image that `judge` rejects.
pub fn each_image(
    recorder: &Recorder,
    model: Model,
    limits: &Limits,
    mut judge: impl FnMut(&Point, Image) -> Result<(), Failure>,
) -> Result<Counts, Box<Violation>> {
    each_choice(recorder, model, limits, |point, choices, chosen, _| {
        judge(point, choices.image(chosen)).map(|()| true)
    })
}

/// One in this many skipped images is checked nevertheless. A failure shows that the check depends on something other
/// than the medium.
const SAME_JUDGED_EVERY: u64 = 4096;

/// At a moment with at most this many images, each image is built before the explorer looks it up.
const FEW_IMAGES: u64 = 64;

/// Like [`each_image`], but skips an image if `judge` accepted an earlier one that has the same bytes wherever
/// `judge` read, after the same number of returned calls. `judge` receives a recorder of the image and must read the
/// image through it; its result must depend on nothing else. If `judge` enumerates crashes of that recorder itself,
/// the reads of those runs are included.
///
/// # Errors
/// The first image that `judge` rejects.
pub fn each_distinct(
    recorder: &Recorder,
    model: Model,
    limits: &Limits,
    seen: &mut JudgedImages,
    judge: impl FnMut(&Point, &Recorder) -> Result<(), Failure>,
) -> Result<Counts, Box<Violation>> {
    each_distinct_of(recorder, recorder, 0, model, limits, seen, judge)
}

/// [`each_distinct`] for a run that started from the image of `before`, after `returned` calls had returned. Reads of
/// the images count as reads of the image of `before`.
fn each_distinct_of(
    recorder: &Recorder,
    before: &Recorder,
    returned: usize,
    model: Model,
    limits: &Limits,
    seen: &mut JudgedImages,
    mut judge: impl FnMut(&Point, &Recorder) -> Result<(), Failure>,
) -> Result<Counts, Box<Violation>> {
    let many = limits.complete_max.max(limits.near_max) > FEW_IMAGES;
    let (mut moment, mut alike, mut same) = (0, JudgedChoices::new(many), 0);
    each_choice(recorder, model, limits, |point, choices, chosen, number| {
        if number != moment {
            (moment, alike) = (number, JudgedChoices::new(many));
        }
        let audited = |same: &mut u64| {
            *same += 1;
            same.is_multiple_of(SAME_JUDGED_EVERY)
        };
        let known = alike.knows(chosen);
        if known && !audited(&mut same) {
            return Ok(false);
        }
        let image = choices.image(chosen);
        let returned = returned + point.returned.len();
        if !known && let Some(parts) = seen.find(returned, &image) {
            before.absorb(&parts, &image);
            alike.add(choices, chosen, &image, &parts);
            if !audited(&mut same) {
                return Ok(false);
            }
        }
        let crashed = Recorder::of_watched_image(image.clone());
        judge(point, &crashed)?;
        let parts = crashed.parts();
        before.absorb(&parts, &image);
        alike.add(choices, chosen, &image, &parts);
        seen.add(returned, &image, &parts);
        Ok(true)
    })
}

/// Calls `judge` with every image of every moment, and with the number of the moment. `judge` returns true if it
/// checked the image, and false if it skipped it.
fn each_choice(
    recorder: &Recorder,
    model: Model,
    limits: &Limits,
    mut judge: impl FnMut(&Point, &Choices<'_>, &[usize], u64) -> Result<bool, Failure>,
) -> Result<Counts, Box<Violation>> {
    let mut replay = Replay::new(recorder, model);
    let mut counts = Counts::default();
    let mut chances = SeededRandom(limits.seed);
    while let Some(moment) = replay.next_moment() {
        let point = Point { returned: moment.returned.to_vec(), event: moment.event, model };
        let choices = Choices::of(&moment);
        let number = counts.complete + counts.capped + 1;
        let complete = choices.each(limits, &mut chances, |chosen| {
            counts.images += 1;
            let judged = judge(&point, &choices, chosen, number).map_err(|failure| {
                let (point, image) = (point.clone(), choices.describe(chosen));
                Box::new(Violation { point, image, recovery: failure.recovery, message: failure.message })
            });
            counts.same += u64::from(!judged?);
            Ok::<_, Box<Violation>>(())
        })?;
        if complete {
            counts.complete += 1;
        } else {
            counts.capped += 1;
        }
    }
    Ok(counts)
}

/// Limits for a random sample of crashes of a long run.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Number of random moments; fewer if the run has fewer.
    pub moments: u64,
    /// Images of each moment.
    pub images: u64,
    /// Number of random moments of each recovery at which it is crashed, with one image each.
    pub recovery_images: u64,
    /// Seed of the random choices.
    pub seed: u64,
}

/// A medium as a loss of power now may leave it, drawn by `seed`.
pub fn lose_power(recorder: &Recorder, model: Model, seed: u64) -> Image {
    let mut replay = Replay::new(recorder, model);
    while replay.advance() {}
    let moment = replay.moment();
    let choices = Choices::of(&moment);
    choices.image(&choices.by_chance(&mut SeededRandom(seed)))
}

/// Crashes a recorded run at a few random moments; otherwise like [`enumerate`].
///
/// # Errors
/// The first violation.
pub fn sample<R>(
    recorder: &Recorder,
    model: Model,
    sample: &Sample,
    mut recover: impl FnMut(&Medium) -> Result<R, String>,
    mut check: impl FnMut(R, &Medium, &Point) -> Result<(), String>,
) -> Result<Counts, Box<Violation>> {
    let mut again = 0;
    let mut counts = each_sampled(recorder, model, sample, |point, image| {
        let failed = |message| Failure { message, recovery: None };
        let (recovery, judged) =
            recover_and_check(&Recorder::of_image(image), point, &mut recover, &mut check);
        judged.map_err(failed)?;
        let seed = sample.seed ^ (point.event as u64) << 32;
        let nested = Sample { moments: sample.recovery_images, images: 1, recovery_images: 0, seed };
        let counted = each_sampled(&recovery, model, &nested, |_, image| {
            recover_and_check(&Recorder::of_image(image), point, &mut recover, &mut check).1.map_err(failed)
        });
        let counted = counted
            .map_err(|violation| Failure { message: violation.message, recovery: Some(violation.image) })?;
        again += counted.images;
        Ok(())
    })?;
    counts.recovery_images = again;
    Ok(counts)
}

fn each_sampled(
    recorder: &Recorder,
    model: Model,
    sample: &Sample,
    mut judge: impl FnMut(&Point, Image) -> Result<(), Failure>,
) -> Result<Counts, Box<Violation>> {
    let mut counts = Counts::default();
    if sample.moments == 0 {
        return Ok(counts);
    }
    let mut replay = Replay::new(recorder, model);
    let moments = std::iter::from_fn(|| replay.advance().then_some(())).count();
    let mut chances = SeededRandom(sample.seed);
    let chosen: BTreeSet<usize> = (0..sample.moments).map(|_| chances.below(moments)).collect();
    let mut replay = Replay::new(recorder, model);
    for number in 0..=*chosen.last().expect("at least one moment is chosen") {
        replay.advance();
        if !chosen.contains(&number) {
            continue;
        }
        let moment = replay.moment();
        let point = Point { returned: moment.returned.to_vec(), event: moment.event, model };
        let choices = Choices::of(&moment);
        for _ in 0..sample.images {
            let chosen = choices.by_chance(&mut chances);
            counts.images += 1;
            judge(&point, choices.image(&chosen)).map_err(|failure| {
                let (image, Failure { message, recovery }) = (choices.describe(&chosen), failure);
                Box::new(Violation { point: point.clone(), image, recovery, message })
            })?;
        }
        counts.capped += 1;
    }
    Ok(counts)
}
