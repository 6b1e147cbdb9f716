//! The regions of memory in which this process has mapped files of the tree shared. The process uses these files
//! through the node's mount, because only readers there see its stores to memory before they are written back.
//!
//! The list is an upper bound: if the program maps other memory over a region by a call that the library does not see,
//! the file still counts as mapped. A child has the regions of its parent, as it has the mappings.
//!
//! **Locks.** [`LOCK`] is held for each read and each change of the list. A change replaces the whole list, so that a
//! child which is forked meanwhile finds a complete list. A forked child finds the lock free.

use crate::process_lock::{ProcessGuard, ProcessLock};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// A mapping of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Region {
    start: u64,
    end: u64,
    inode: u64,
}

/// The regions, in no particular order; null before the first.
static LIST: AtomicPtr<Vec<Region>> = AtomicPtr::new(std::ptr::null_mut());
/// Counts changes of the list; 0 before the first.
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// Number of regions.
static COUNT: AtomicU64 = AtomicU64::new(0);
/// Held while a thread reads or changes the list.
static LOCK: ProcessLock = ProcessLock::new();

struct RegionsLock(#[expect(dead_code, reason = "dropped to free the lock")] ProcessGuard<'static>);

impl RegionsLock {
    fn take() -> Self {
        Self(LOCK.take())
    }

    /// The current regions.
    fn regions(&self) -> &[Region] {
        // SAFETY: only a thread that holds the lock frees a list. Acquire pairs with the Release of `set`.
        unsafe { LIST.load(Ordering::Acquire).as_ref() }.map_or(&[], Vec::as_slice)
    }

    fn set(&self, regions: Vec<Region>) {
        COUNT.store(regions.len() as u64, Ordering::Relaxed);
        let before = LIST.swap(Box::into_raw(Box::new(regions)), Ordering::AcqRel);
        // Release: a thread that sees the number sees the list.
        GENERATION.fetch_add(1, Ordering::Release);
        if !before.is_null() {
            // SAFETY: made by an earlier call of this function; no other thread reads it, because this one holds the
            // lock.
            drop(unsafe { Box::from_raw(before) });
        }
    }
}

/// The end of a mapping of this length.
fn end_of(start: u64, bytes: u64) -> u64 {
    start.saturating_add(bytes.checked_next_multiple_of(4096).unwrap_or(bytes))
}

/// The regions without a range of memory.
fn without(regions: &[Region], start: u64, end: u64) -> Vec<Region> {
    let parts = regions.iter().flat_map(|region| {
        let below = Region { end: region.end.min(start), ..*region };
        let above = Region { start: region.start.max(end), ..*region };
        [below, above]
    });
    parts.filter(|region| region.start < region.end).collect()
}

/// Whether any file is mapped.
#[inline]
pub fn any() -> bool {
    COUNT.load(Ordering::Relaxed) > 0
}

/// Changes whenever the result of [`has`] may change; 0 before the first file is mapped.
#[inline]
pub fn generation() -> u64 {
    // Acquire pairs with the Release of `set`.
    GENERATION.load(Ordering::Acquire)
}

/// Whether a file is mapped.
pub fn has(inode: u64) -> bool {
    RegionsLock::take().regions().iter().any(|region| region.inode == inode)
}

/// Whether a file is mapped somewhere in a range of memory.
pub fn overlaps(start: u64, bytes: u64) -> bool {
    let end = end_of(start, bytes);
    RegionsLock::take().regions().iter().any(|region| region.start < end && start < region.end)
}

/// Notes that a file was mapped.
pub fn add(start: u64, bytes: u64, inode: u64) {
    let lock = RegionsLock::take();
    let end = end_of(start, bytes);
    let mut regions = without(lock.regions(), start, end);
    regions.push(Region { start, end, inode });
    lock.set(regions);
}

/// Notes that a range of memory was unmapped.
pub fn remove(start: u64, bytes: u64) {
    if overlaps(start, bytes) {
        let lock = RegionsLock::take();
        let end = end_of(start, bytes);
        lock.set(without(lock.regions(), start, end));
    }
}

/// Notes that a range of memory was moved, or (`stays`) mapped a second time.
pub fn moved(from: (u64, u64), to: (u64, u64), stays: bool) {
    let lock = RegionsLock::take();
    let found = lock.regions().iter().find(|region| (region.start..region.end).contains(&from.0)).copied();
    let mut regions = lock.regions().to_vec();
    if !stays {
        regions = without(&regions, from.0, end_of(from.0, from.1));
    }
    regions = without(&regions, to.0, end_of(to.0, to.1));
    if let Some(found) = found {
        regions.push(Region { start: to.0, end: end_of(to.0, to.1), ..found });
    }
    if regions != lock.regions() {
        lock.set(regions);
    }
}

/// This process is a forked child.
pub fn note_child() {
    LOCK.free_in_child();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test: there is one list.
    #[test]
    fn a_file_is_mapped_until_its_last_part_is_gone() {
        const PAGE: u64 = 4096;
        assert!(!any() && !has(5));
        add(10 * PAGE, 3 * PAGE - 1, 5);
        add(20 * PAGE, PAGE, 6);
        assert!(overlaps(12 * PAGE, 1) && overlaps(0, 10 * PAGE + 1) && !overlaps(13 * PAGE, 7 * PAGE));
        let before = generation();
        assert!(any() && has(5) && has(6) && before > 0);
        remove(13 * PAGE, PAGE);
        assert_eq!(generation(), before, "no file was mapped there");
        remove(11 * PAGE, 1);
        remove(10 * PAGE, PAGE);
        assert!(has(5), "the last page is left");
        moved((12 * PAGE, PAGE), (40 * PAGE, 2 * PAGE), false);
        remove(12 * PAGE, PAGE);
        assert!(has(5), "it has moved");
        moved((40 * PAGE, 0), (50 * PAGE, PAGE), true);
        remove(40 * PAGE, 2 * PAGE);
        assert!(has(5), "the file was mapped twice");
        add(50 * PAGE, PAGE, 7);
        assert!(!has(5) && has(7), "another file replaced it");
        moved((90 * PAGE, PAGE), (20 * PAGE, PAGE), false);
        assert!(!has(6), "other memory replaced it");
        remove(0, u64::MAX);
        assert!(!any());
    }
}
