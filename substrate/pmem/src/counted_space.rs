//! The space of a test medium that has only so much: which blocks of which file have some, and how much is held.

use crate::MediaError;
use crate::recorded::FileId;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Space is counted in blocks of so many bytes.
const UNIT: u64 = 4096;

/// See the module; without a limit nothing is counted.
#[derive(Clone, Default)]
pub(crate) struct CountedSpace(Option<Limited>);

#[derive(Clone)]
struct Limited {
    /// Blocks that no file has.
    left: u64,
    held: u64,
    files: BTreeMap<FileId, BTreeSet<u64>>,
}

fn units(range: &Range<u64>) -> Range<u64> {
    range.start / UNIT..range.end.div_ceil(UNIT)
}

impl CountedSpace {
    /// So many bytes.
    pub fn of(bytes: u64) -> Self {
        Self(Some(Limited { left: bytes / UNIT, held: 0, files: BTreeMap::new() }))
    }

    /// Bytes that no file has.
    pub fn left(&self) -> Option<u64> {
        self.0.as_ref().map(|limited| limited.left * UNIT)
    }

    /// Nothing is left.
    pub fn fill(&mut self) {
        if let Some(limited) = &mut self.0 {
            limited.left = 0;
        }
    }

    pub fn held(&self) -> Option<u64> {
        self.0.as_ref().map(|limited| limited.held * UNIT)
    }

    /// A part of a file gets space.
    pub fn take(&mut self, file: FileId, range: Range<u64>) -> Result<(), MediaError> {
        let Some(limited) = &mut self.0 else { return Ok(()) };
        let has = limited.files.entry(file).or_default();
        let new: Vec<u64> = units(&range).filter(|unit| !has.contains(unit)).collect();
        limited.left = limited.left.checked_sub(new.len() as u64).ok_or(MediaError::NoSpace)?;
        has.extend(new);
        Ok(())
    }

    /// A part of a file has no space any more.
    pub fn give_back(&mut self, file: FileId, range: Range<u64>) {
        let Some(limited) = &mut self.0 else { return };
        let has = limited.files.entry(file).or_default();
        limited.left += units(&range).filter(|unit| has.remove(unit)).count() as u64;
    }

    /// A file is gone.
    pub fn forget(&mut self, file: FileId) {
        let Some(limited) = &mut self.0 else { return };
        limited.left += limited.files.remove(&file).map_or(0, |has| has.len() as u64);
    }

    /// False if a part of a file that was made since the limit has no space.
    pub fn covers(&self, file: FileId, range: &Range<u64>) -> bool {
        let has = self.0.as_ref().and_then(|limited| limited.files.get(&file));
        has.is_none_or(|has| units(range).all(|unit| has.contains(&unit)))
    }

    pub fn hold(&mut self, more: u64) -> Result<(), MediaError> {
        let Some(limited) = &mut self.0 else { return Ok(()) };
        let more = more.div_ceil(UNIT);
        limited.left = limited.left.checked_sub(more).ok_or(MediaError::NoSpace)?;
        limited.held += more;
        Ok(())
    }

    /// Gives up so many held bytes, or all if that is less; returns how many.
    pub fn take_held(&mut self, bytes: u64) -> u64 {
        let Some(limited) = &mut self.0 else { return 0 };
        let taken = bytes.div_ceil(UNIT).min(limited.held);
        limited.held -= taken;
        limited.left += taken;
        taken * UNIT
    }
}
