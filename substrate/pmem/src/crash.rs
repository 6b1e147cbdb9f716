//! Crashes a structure at every moment and asks whether it recovers.
//!
//! [`enumerate`] runs a workload once on a recorded medium. Then, at every fence, settle, creation and removal and
//! after every call that returned, it makes the images that a crash there may leave ([`Model`]), recovers each on a
//! recorded medium of its own, has it checked, and crashes the recovery itself in the same way.
//!
//! A moment is *complete* if all its images were made: torn words and all, or, if those are more than
//! [`Limits::complete_max`], every combination of whole stores with a sample of torn ones. Else it is *capped*: all
//! images that differ from none or from all of the stores in up to two units, and a sample by seed.

use crate::image::Image;
use crate::medium::Medium;
use crate::recorded::Recorder;
pub use crate::replay::Model;
use crate::replay::{Moment, Replay};
use std::collections::BTreeSet;
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
    /// Start of the chances.
    pub seed: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { complete_max: 4096, near_max: u64::MAX, sampled: 500, recovery_images: 8, seed: 1 }
    }
}

impl Limits {
    /// Few enough for a test of every day on a structure that pends many lines at once.
    pub fn quick() -> Self {
        Self { complete_max: 256, near_max: 256, sampled: 64, recovery_images: 4, seed: 1 }
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
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        self.complete += more.complete;
        self.capped += more.capped;
        self.images += more.images;
        self.recovery_images += more.recovery_images;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} points complete, {} capped, {} images, {} of crashed recoveries",
            self.complete, self.capped, self.images, self.recovery_images
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
    let mut again = 0;
    let mut counts = each_image(recorder, model, limits, |point, image| {
        let failed = |message| Failure { message, recovery: None };
        let (recovery, judged) = recover_and_check(image, point, &mut recover, &mut check);
        judged.map_err(failed)?;
        if limits.recovery_images == 0 || !recovery.has_changes() {
            return Ok(());
        }
        let nested = Limits {
            complete_max: 0,
            near_max: 0,
            sampled: limits.recovery_images.saturating_sub(2),
            recovery_images: 0,
            seed: limits.seed ^ point.event as u64,
        };
        let counted = each_image(&recovery, model, &nested, |_, image| {
            recover_and_check(image, point, &mut recover, &mut check).1.map_err(failed)
        });
        match counted {
            Ok(counted) => {
                again += counted.images;
                Ok(())
            }
            Err(violation) => Err(Failure { message: violation.message, recovery: Some(violation.image) }),
        }
    })?;
    counts.recovery_images = again;
    Ok(counts)
}

/// Recovers an image and judges it; gives the recorder with recovery's own log, without what the judge did after it.
fn recover_and_check<R>(
    image: Image,
    point: &Point,
    recover: &mut impl FnMut(&Medium) -> Result<R, String>,
    check: &mut impl FnMut(R, &Medium, &Point) -> Result<(), String>,
) -> (Recorder, Result<(), String>) {
    let recorder = Recorder::of_image(image);
    let medium = recorder.medium();
    let recovered = caught(|| recover(&medium));
    let recovery = recorder.snapshot();
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
    let mut replay = Replay::new(recorder, model);
    let mut counts = Counts::default();
    let mut chances = Chances(limits.seed);
    while let Some(moment) = replay.next_moment() {
        let point = Point { returned: moment.returned.to_vec(), event: moment.event, model };
        let choices = Choices::of(&moment);
        let complete = choices.each(limits, &mut chances, |chosen| {
            counts.images += 1;
            judge(&point, choices.image(chosen)).map_err(|failure| {
                Box::new(Violation {
                    point: point.clone(),
                    image: choices.describe(chosen),
                    recovery: failure.recovery,
                    message: failure.message,
                })
            })
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
        let (recovery, judged) = recover_and_check(image, point, &mut recover, &mut check);
        judged.map_err(failed)?;
        let seed = sample.seed ^ (point.event as u64) << 32;
        let nested = Sample { moments: sample.recovery_images, images: 1, recovery_images: 0, seed };
        let counted = each_sampled(&recovery, model, &nested, |_, image| {
            recover_and_check(image, point, &mut recover, &mut check).1.map_err(failed)
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

/// The choices of a moment. An image is chosen by one version a unit; the last number, if a file is being made or
/// removed, says whether that has happened.
struct Choices<'a> {
    moment: &'a Moment<'a>,
    /// Versions of each unit.
    versions: Vec<Versions<'a>>,
}

/// What one unit may hold.
struct Versions<'a> {
    /// How many there are, torn ones included.
    all: usize,
    /// Those not torn.
    whole: &'a [usize],
}

impl<'a> Choices<'a> {
    fn of(moment: &'a Moment<'a>) -> Self {
        let of_units = moment.choices.iter();
        let of_units = of_units.map(|choice| Versions { all: choice.versions.len(), whole: &choice.whole });
        let of_entry = moment.entry.iter().map(|_| Versions { all: 2, whole: &[0, 1] });
        Self { moment, versions: of_units.chain(of_entry).collect() }
    }

    fn image(&self, chosen: &[usize]) -> Image {
        let mut image = self.moment.durable.clone();
        for (choice, version) in self.moment.choices.iter().zip(chosen) {
            if *version > 0 {
                image.write(&choice.name, choice.offset, &choice.versions[*version]);
            }
        }
        if let Some(entry) = &self.moment.entry
            && chosen.last() == Some(&1)
        {
            match entry.made {
                Some(bytes) => image.create(entry.name.clone(), bytes),
                None => image.remove(&entry.name),
            }
        }
        image
    }

    /// Of all units none, or all, or all but one, or one alone, or of each what comes.
    fn by_chance(&self, chances: &mut Chances) -> Vec<usize> {
        let last = |versions: &Versions<'_>| versions.all - 1;
        let shape = chances.below(6);
        let mut chosen: Vec<usize> = match shape {
            0 | 3 => vec![0; self.versions.len()],
            1 | 2 => self.versions.iter().map(last).collect(),
            _ => self.versions.iter().map(|versions| chances.below(versions.all)).collect(),
        };
        if matches!(shape, 2 | 3) && !chosen.is_empty() {
            let odd = chances.below(chosen.len());
            chosen[odd] = chances.below(self.versions[odd].all);
        }
        chosen
    }

    fn describe(&self, chosen: &[usize]) -> String {
        let mut text = format!("{} units pending:", self.moment.choices.len());
        for (choice, version) in self.moment.choices.iter().zip(chosen) {
            let last = choice.versions.len() - 1;
            text += &format!(" {}+{}:{version}/{last}", choice.name, choice.offset);
        }
        if let Some(entry) = &self.moment.entry {
            let what = if entry.made.is_some() { "made" } else { "removed" };
            let done = if chosen.last() == Some(&1) { "" } else { "not " };
            text += &format!(" {} {done}{what}", entry.name);
        }
        text
    }

    /// Calls with the choices within the limits; true if they were all there are.
    fn each<E>(
        &self,
        limits: &Limits,
        chances: &mut Chances,
        mut call: impl FnMut(&[usize]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let product = |count: fn(&Versions<'_>) -> usize| {
            self.versions
                .iter()
                .try_fold(1u64, |product, versions| product.checked_mul(count(versions) as u64))
        };
        let within = |count: Option<u64>| count.is_some_and(|count| count <= limits.complete_max.max(1));
        if within(product(|versions| versions.all)) {
            self.each_combination(|_, index| index, |v| v.all, &mut call)?;
            return Ok(true);
        }
        let complete = within(product(|versions| versions.whole.len()));
        if complete {
            self.each_combination(|versions, index| versions.whole[index], |v| v.whole.len(), &mut call)?;
        } else {
            self.each_near(limits.near_max, &mut call)?;
        }
        let mut chosen = vec![0; self.versions.len()];
        for _ in 0..limits.sampled {
            for (chosen, versions) in chosen.iter_mut().zip(&self.versions) {
                *chosen = chances.below(versions.all);
            }
            call(&chosen)?;
        }
        Ok(complete)
    }

    fn each_combination<E>(
        &self,
        version: impl Fn(&Versions<'_>, usize) -> usize,
        count: impl Fn(&Versions<'_>) -> usize,
        call: &mut impl FnMut(&[usize]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut indexes = vec![0; self.versions.len()];
        let mut chosen = vec![0; self.versions.len()];
        loop {
            for (unit, index) in indexes.iter().enumerate() {
                chosen[unit] = version(&self.versions[unit], *index);
            }
            call(&chosen)?;
            // The next number in a system whose digits have as many values as the units have versions.
            let Some(unit) =
                (0..indexes.len()).find(|unit| indexes[*unit] + 1 < count(&self.versions[*unit]))
            else {
                return Ok(());
            };
            indexes[unit] += 1;
            indexes[..unit].fill(0);
        }
    }

    /// None and all, and what differs from them in up to two units, by whole stores.
    fn each_near<E>(&self, near_max: u64, call: &mut impl FnMut(&[usize]) -> Result<(), E>) -> Result<(), E> {
        let none = vec![0; self.versions.len()];
        let all: Vec<usize> = self.versions.iter().map(|versions| versions.all - 1).collect();
        call(&none)?;
        call(&all)?;
        let (ones, twos) = self.near_counts();
        let mut ones = Evenly::new(ones, near_max);
        let mut twos = Evenly::new(twos, near_max.saturating_sub(ones.of));
        for base in [&none, &all] {
            let mut chosen = base.clone();
            for first in 0..self.versions.len() {
                for &one in self.versions[first].whole.iter().filter(|one| **one != base[first]) {
                    chosen[first] = one;
                    if ones.takes() {
                        call(&chosen)?;
                    }
                    if twos.every == 0 {
                        continue;
                    }
                    for second in first + 1..self.versions.len() {
                        for &two in self.versions[second].whole.iter().filter(|two| **two != base[second]) {
                            chosen[second] = two;
                            if twos.takes() {
                                call(&chosen)?;
                            }
                        }
                        chosen[second] = base[second];
                    }
                }
                chosen[first] = base[first];
            }
        }
        Ok(())
    }

    /// How many choices differ from none or all in one unit, and in two.
    fn near_counts(&self) -> (u64, u64) {
        let others = self.versions.iter().map(|versions| versions.whole.len() as u64 - 1);
        let (sum, squares) = others.fold((0, 0), |(sum, squares), n| (sum + n, squares + n * n));
        (2 * sum, sum * sum - squares)
    }
}

/// Takes so many of a row, evenly spread.
struct Evenly {
    of: u64,
    /// One in so many is taken; 0: none.
    every: u64,
    seen: u64,
}

impl Evenly {
    fn new(of: u64, taken_max: u64) -> Self {
        let every = if taken_max == 0 { 0 } else { of.div_ceil(taken_max).max(1) };
        Self { of, every, seen: 0 }
    }

    fn takes(&mut self) -> bool {
        self.seen += 1;
        self.every > 0 && self.seen.is_multiple_of(self.every)
    }
}

/// Numbers by chance that are the same for the same seed (splitmix64).
struct Chances(u64);

impl Chances {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        ((u128::from(mixed) * bound as u128) >> 64) as usize
    }
}
