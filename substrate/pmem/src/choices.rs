//! The images that a crash at one moment may leave: every combination of the versions of its units, within limits. A
//! unit is a cache line or a page ([`crate::crash::Model`]).

use crate::crash::Limits;
use crate::image::Image;
use crate::replay::Moment;

/// The choices of a moment. An image is described by a list with one version number for each unit; if a file is being
/// created or removed, a last number says whether the file system has done it (1) or not (0).
pub(crate) struct Choices<'a> {
    pub moment: &'a Moment<'a>,
    /// Versions of each unit.
    pub versions: Vec<Versions<'a>>,
}

/// The versions that one unit may have in an image.
pub(crate) struct Versions<'a> {
    /// Number of versions, including torn ones.
    pub all: usize,
    /// Numbers of the versions that are not torn.
    whole: &'a [usize],
}

impl<'a> Choices<'a> {
    pub fn of(moment: &'a Moment<'a>) -> Self {
        let of_units = moment.choices.iter();
        let of_units = of_units.map(|choice| Versions { all: choice.versions.len(), whole: &choice.whole });
        let of_entry = moment.entry.iter().map(|_| Versions { all: 2, whole: &[0, 1] });
        Self { moment, versions: of_units.chain(of_entry).collect() }
    }

    pub fn image(&self, chosen: &[usize]) -> Image {
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

    /// Draws one image at random: the oldest or the newest versions, with up to one unit drawn apart, or all units
    /// drawn.
    pub fn by_chance(&self, chances: &mut SeededRandom) -> Vec<usize> {
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

    pub fn describe(&self, chosen: &[usize]) -> String {
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

    /// Calls with choices, within the limits; returns true if these were all that exist.
    pub fn each<E>(
        &self,
        limits: &Limits,
        chances: &mut SeededRandom,
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
            // Counts like an odometer: the digit of a unit has as many values as the unit has versions.
            let Some(unit) =
                (0..indexes.len()).find(|unit| indexes[*unit] + 1 < count(&self.versions[*unit]))
            else {
                return Ok(());
            };
            indexes[unit] += 1;
            indexes[..unit].fill(0);
        }
    }

    /// Calls with the oldest versions, the newest versions, and all choices that differ from either in one or two
    /// units. Torn versions are left out.
    fn each_near<E>(&self, near_max: u64, call: &mut impl FnMut(&[usize]) -> Result<(), E>) -> Result<(), E> {
        let none = vec![0; self.versions.len()];
        let all: Vec<usize> = self.versions.iter().map(|versions| versions.all - 1).collect();
        call(&none)?;
        call(&all)?;
        let (ones, twos) = self.near_counts();
        let mut ones = EvenSample::new(ones, near_max);
        let mut twos = EvenSample::new(twos, near_max.saturating_sub(ones.of));
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

    /// Number of choices that differ from the oldest or newest versions in one unit, and in two units.
    fn near_counts(&self) -> (u64, u64) {
        let others = self.versions.iter().map(|versions| versions.whole.len() as u64 - 1);
        let (sum, squares) = others.fold((0, 0), |(sum, squares), n| (sum + n, squares + n * n));
        (2 * sum, sum * sum - squares)
    }
}

/// Selects a given number of items from a sequence of known length, evenly spread.
struct EvenSample {
    of: u64,
    /// One in this many items is selected; 0 selects none.
    every: u64,
    seen: u64,
}

impl EvenSample {
    fn new(of: u64, taken_max: u64) -> Self {
        let every = if taken_max == 0 { 0 } else { of.div_ceil(taken_max).max(1) };
        Self { of, every, seen: 0 }
    }

    fn takes(&mut self) -> bool {
        self.seen += 1;
        self.every > 0 && self.seen.is_multiple_of(self.every)
    }
}

/// A random number generator whose output depends only on its seed (splitmix64).
pub(crate) struct SeededRandom(pub u64);

impl SeededRandom {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        ((u128::from(mixed) * bound as u128) >> 64) as usize
    }
}
