//! Crashes a structure at every moment and asks whether it recovers.
//!
//! [`enumerate`] runs a workload once on a recorded medium. Then, at every fence, settle, creation and removal and
//! after every call that returned, it makes the images that a crash there may leave ([`Model`]), recovers each on a
//! recorded medium of its own, has it checked, and crashes the recovery itself in the same way.
//!
//! A moment is *complete* if all its images were made: torn words and all, or, if those are more than
//! [`Limits::complete_max`], every combination of whole stores with a sample of torn ones. Else it is *capped*: all
//! images that differ from none or from all of the stores in up to two units, and a sample by seed.
//!
//! An image of which another one had every byte that recovery, its crashes and the judge read is not judged again: it
//! is *the same* ([`crate::seen`]), and counted.

use crate::choices::{Chances, Choices};
use crate::image::Image;
use crate::medium::Medium;
use crate::recorded::Recorder;
pub use crate::replay::Model;
use crate::replay::Replay;
use crate::seen::{Alike, Seen};
use std::collections::{BTreeSet, HashMap};
use std::panic::AssertUnwindSafe;

/// How much is enumerated.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// All images of a moment are made if they are no more than this.
    pub complete_max: u64,
    /// Of a capped moment, images that differ from none or all in up to two units are made if they are no more than
    /// this; else as many of them, evenly spread, those that differ in one unit before those that differ in two.
    pub near_max: u64,
    /// Images by chance at a moment where not all with torn words are made.
    pub sampled: u64,
    /// Images at each moment of a recovery: none, all, and the rest by chance. 0: recovery is not crashed.
    pub recovery_images: u64,
    /// Of a moment's images whose recoveries stored, persisted and fenced the same, recovery of the first is crashed,
    /// and then that of one in so many. 1: each.
    pub recovery_every: u64,
    /// Start of the chances.
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
    /// Few enough for a test of every day on a structure that pends many lines at once.
    pub fn quick() -> Self {
        Self { complete_max: 256, near_max: 256, sampled: 64, recovery_images: 4, recovery_every: 1, seed: 1 }
    }

    /// Of each moment of a recovery none, all, and the rest by chance.
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

/// What was enumerated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Moments of which all images were made.
    pub complete: u64,
    /// Moments of which a part was made.
    pub capped: u64,
    /// Images recovered and checked.
    pub images: u64,
    /// Images of crashed recoveries, recovered again and checked.
    pub recovery_images: u64,
    /// Of both, those of which an image before had every byte that recovery and check read of it ([`crate::seen`]).
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

/// The moment of a crash, as far as the one who judges needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// The operations that had returned ([`Recorder::returned`]), in order.
    pub returned: Vec<u64>,
    /// Events of the log before it.
    pub event: usize,
    /// The model of the crash.
    pub model: Model,
}

/// A crash that was not survived.
#[derive(Clone, Debug)]
pub struct Violation {
    /// When.
    pub point: Point,
    /// What was on the medium of the pending stores, one unit a piece.
    pub image: String,
    /// If recovery was crashed: what was on the medium of its stores.
    pub recovery: Option<String>,
    /// What recovery or judge said, or their panic.
    pub message: String,
}

impl Violation {
    /// As a fault of the image whose recovery was crashed.
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

/// Runs `workload` once, crashes it everywhere, recovers with `recover`, which must bring back something from every
/// image, and judges with `check`, which may go on to use what was recovered. Recovery is crashed as well, and what it
/// left recovered and judged by the same.
///
/// # Errors
/// The first crash that was not survived.
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

/// As [`enumerate`], for what was recorded already: one recording serves both models.
///
/// # Errors
/// The first crash that was not survived.
pub fn crash_recorded<R>(
    recorder: &Recorder,
    model: Model,
    limits: &Limits,
    mut recover: impl FnMut(&Medium) -> Result<R, String>,
    mut check: impl FnMut(R, &Medium, &Point) -> Result<(), String>,
) -> Result<Counts, Box<Violation>> {
    let (mut seen, mut seen_again) = (Seen::default(), Seen::default());
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

/// Recovers an image and judges it; gives the recorder with recovery's own log, without what the judge did after it.
fn recover_and_check<R>(
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

/// Runs a step; its panic is an error like those it returns.
fn caught<T>(step: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    std::panic::catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or("without a message")))
    })
}

/// Why an image was not good.
pub struct Failure {
    /// What the judge said.
    pub message: String,
    /// The crash of recovery that it took, if any.
    pub recovery: Option<String>,
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Self { message, recovery: None }
    }
}

/// Calls `judge` with every image that a crash of what was recorded so far may leave, within the limits.
///
/// # Errors
/// The first image that the judge refused.
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

/// Of those that were the same, one in so many is judged nonetheless: it shows that the judge keeps to the medium.
const SAME_JUDGED_EVERY: u64 = 4096;

/// At moments of up to so many images, each is made before it is asked whether it is new.
const FEW_IMAGES: u64 = 64;

/// Calls `judge` with a recorder of every image, as [`each_image`]; but of images that agree in all that the judge read
/// of them through the recorder, and in how many calls had returned, with one. What the judge says must not depend
/// on anything else. What he enumerates himself of a crash of that recorder counts as read of it.
///
/// # Errors
/// The first image that the judge refused.
pub fn each_distinct(
    recorder: &Recorder,
    model: Model,
    limits: &Limits,
    seen: &mut Seen,
    judge: impl FnMut(&Point, &Recorder) -> Result<(), Failure>,
) -> Result<Counts, Box<Violation>> {
    each_distinct_of(recorder, recorder, 0, model, limits, seen, judge)
}

/// The same for what follows on `before`, in which `returned` calls had returned: what is read counts as read there.
fn each_distinct_of(
    recorder: &Recorder,
    before: &Recorder,
    returned: usize,
    model: Model,
    limits: &Limits,
    seen: &mut Seen,
    mut judge: impl FnMut(&Point, &Recorder) -> Result<(), Failure>,
) -> Result<Counts, Box<Violation>> {
    let many = limits.complete_max.max(limits.near_max) > FEW_IMAGES;
    let (mut moment, mut alike, mut same) = (0, Alike::new(many), 0);
    each_choice(recorder, model, limits, |point, choices, chosen, number| {
        if number != moment {
            (moment, alike) = (number, Alike::new(many));
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

/// Calls `judge` with every image of every moment; he says whether he looked at it or knew it. The last argument is the
/// number of the moment.
fn each_choice(
    recorder: &Recorder,
    model: Model,
    limits: &Limits,
    mut judge: impl FnMut(&Point, &Choices<'_>, &[usize], u64) -> Result<bool, Failure>,
) -> Result<Counts, Box<Violation>> {
    let mut replay = Replay::new(recorder, model);
    let mut counts = Counts::default();
    let mut chances = Chances(limits.seed);
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

/// A few crashes of a long run.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Moments by chance; fewer if there are fewer.
    pub moments: u64,
    /// Images of each.
    pub images: u64,
    /// Moments of each recovery at which it is crashed, one image each.
    pub recovery_images: u64,
    /// Start of the chances.
    pub seed: u64,
}

/// Crashes a run that was recorded, at a few moments by chance; else as [`enumerate`].
///
/// # Errors
/// The first crash that was not survived.
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
    let mut chances = Chances(sample.seed);
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
