//! Where files of the tree are mapped shared in this process, and so which files it uses through the mount of the node: a
//! store to memory is seen by whoever reads the file there, and by nobody else before it is written back.
//!
//! It is an upper bound: what the program maps over such a region by a call that is not looked at counts as mapped on.
//! A child has its parent's regions, as it has the mappings.
//!
//! **Locks.** [`TURN`] is held for each look at the list and each change of it. A change replaces the list as a whole, so
//! that a child which is forked meanwhile finds one that is whole, and the turn free.

use ipc::{Host, SystemHost, WAKE_ALL, Word};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::time::Duration;

/// A waiter looks this often: who had the turn may have been killed in a child on this memory.
const LOOK: Duration = Duration::from_millis(20);

/// A mapping of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Region {
    start: u64,
    end: u64,
    inode: u64,
}

/// The regions, in no order; none before the first.
static LIST: AtomicPtr<Vec<Region>> = AtomicPtr::new(std::ptr::null_mut());
/// Counts changes of the list; 0 before the first.
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// Number of regions.
static COUNT: AtomicU64 = AtomicU64::new(0);
/// 1 while a thread looks at the list or changes it.
static TURN: Word = Word::new(0);

struct Turn;

impl Turn {
    fn take() -> Self {
        // Acquire pairs with the Release below.
        while TURN.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            SystemHost.wait(&TURN, 1, Some(SystemHost.now().after(LOOK)));
        }
        Self
    }

    /// The regions as they are.
    fn regions(&self) -> &[Region] {
        // SAFETY: a list is freed only by who has the turn. Acquire pairs with the Release of `set`.
        unsafe { LIST.load(Ordering::Acquire).as_ref() }.map_or(&[], Vec::as_slice)
    }

    fn set(&self, regions: Vec<Region>) {
        COUNT.store(regions.len() as u64, Ordering::Relaxed);
        let before = LIST.swap(Box::into_raw(Box::new(regions)), Ordering::AcqRel);
        // Release: whoever sees the number sees the list.
        GENERATION.fetch_add(1, Ordering::Release);
        if !before.is_null() {
            // SAFETY: made by a call of this function; nobody looks at it, as the turn is ours.
            drop(unsafe { Box::from_raw(before) });
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        TURN.store(0, Ordering::Release);
        SystemHost.wake(&TURN, WAKE_ALL);
    }
}

/// The end of a mapping of so many bytes.
fn end_of(start: u64, bytes: u64) -> u64 {
    start.saturating_add(bytes.checked_next_multiple_of(4096).unwrap_or(bytes))
}

/// The regions less a part of memory.
fn without(regions: &[Region], start: u64, end: u64) -> Vec<Region> {
    let parts = regions.iter().flat_map(|region| {
        let below = Region { end: region.end.min(start), ..*region };
        let above = Region { start: region.start.max(end), ..*region };
        [below, above]
    });
    parts.filter(|region| region.start < region.end).collect()
}

/// Whether anything is mapped.
#[inline]
pub fn any() -> bool {
    COUNT.load(Ordering::Relaxed) > 0
}

/// Changes whenever the answer of [`has`] may; 0 before the first file is mapped.
#[inline]
pub fn generation() -> u64 {
    // Acquire pairs with the Release of `set`.
    GENERATION.load(Ordering::Acquire)
}

/// Whether a file is mapped.
pub fn has(inode: u64) -> bool {
    Turn::take().regions().iter().any(|region| region.inode == inode)
}

/// A file was mapped.
pub fn add(start: u64, bytes: u64, inode: u64) {
    let turn = Turn::take();
    let end = end_of(start, bytes);
    let mut regions = without(turn.regions(), start, end);
    regions.push(Region { start, end, inode });
    turn.set(regions);
}

/// A part of memory is not what it was.
pub fn remove(start: u64, bytes: u64) {
    let turn = Turn::take();
    let end = end_of(start, bytes);
    if turn.regions().iter().any(|region| region.start < end && start < region.end) {
        turn.set(without(turn.regions(), start, end));
    }
}

/// A part of memory is somewhere else, or (`stays`) there too.
pub fn moved(from: (u64, u64), to: (u64, u64), stays: bool) {
    let turn = Turn::take();
    let found = turn.regions().iter().find(|region| (region.start..region.end).contains(&from.0)).copied();
    let mut regions = turn.regions().to_vec();
    if !stays {
        regions = without(&regions, from.0, end_of(from.0, from.1));
    }
    regions = without(&regions, to.0, end_of(to.0, to.1));
    if let Some(found) = found {
        regions.push(Region { start: to.0, end: end_of(to.0, to.1), ..found });
    }
    if regions != turn.regions() {
        turn.set(regions);
    }
}

/// This process is a forked child.
pub fn note_child() {
    TURN.store(0, Ordering::Relaxed);
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
        let before = generation();
        assert!(any() && has(5) && has(6) && before > 0);
        remove(13 * PAGE, PAGE);
        assert_eq!(generation(), before, "nothing of a file's was there");
        remove(11 * PAGE, 1);
        remove(10 * PAGE, PAGE);
        assert!(has(5), "the last page is left");
        moved((12 * PAGE, PAGE), (40 * PAGE, 2 * PAGE), false);
        remove(12 * PAGE, PAGE);
        assert!(has(5), "it has moved");
        moved((40 * PAGE, 0), (50 * PAGE, PAGE), true);
        remove(40 * PAGE, 2 * PAGE);
        assert!(has(5), "there were two of it");
        add(50 * PAGE, PAGE, 7);
        assert!(!has(5) && has(7), "another file lies there");
        moved((90 * PAGE, PAGE), (20 * PAGE, PAGE), false);
        assert!(!has(6), "other memory lies there");
        remove(0, u64::MAX);
        assert!(!any());
    }
}
