//! The library's own memory. The library never uses the program's malloc, which may be replaced, locked, or not ready.
//!
//! The arena has one region of address space, a pointer into it that only grows, and a free list for each size class.
//! Everything is lock-free, so a signal handler, a fork in the middle of another thread's allocation and a child
//! between vfork and exec find it consistent. Links are 32-bit indices of 16-byte units. A link has a count as its tag,
//! against reuse of a block between a load and its compare-and-swap. Allocations of at least [`LARGE_BYTES`] are
//! mappings of their own. Memory never moves from one size class to another.

use crate::raw;
use std::alloc::{GlobalAlloc, Layout};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// Bytes of address space that the arena requests first. If a limit prevents that, it halves the size until it may have twice as
/// much as it takes, down to [`REGION_BYTES_MIN`]: the program needs some, and so does the mapping of its log.
const REGION_BYTES: usize = 16 << 30;
const REGION_BYTES_MIN: usize = 4 << 20;
/// Smallest allocation with a mapping of its own.
const LARGE_BYTES: usize = 1 << 20;
const UNIT: usize = 16;
const STEPS: usize = 4;
const CLASSES: usize = 68;
const NO_UNIT: u64 = 0;
const PAGE: u64 = 4096;
/// The bits of [`Arena::used`] above the pointer: the pages of the region that are left, if it was cut; else 0.
const CUT_SHIFT: u32 = 40;
const USED_MASK: u64 = (1 << CUT_SHIFT) - 1;

/// The allocator of `libhearth.so`.
pub struct Arena {
    /// The region begins with its own length, in unit 0, which is in no list.
    region: AtomicPtr<u8>,
    used: AtomicU64,
    free: [AtomicU64; CLASSES],
}

impl Arena {
    /// An arena that maps its region at the first allocation.
    pub const fn new() -> Self {
        Self {
            region: AtomicPtr::new(null_mut()),
            // Unit 0 stays unused: it means "none" in the lists.
            used: AtomicU64::new(UNIT as u64),
            free: [const { AtomicU64::new(NO_UNIT) }; CLASSES],
        }
    }

    /// The region, which the first caller maps; null if there is no address space.
    fn region(&self) -> *mut u8 {
        let region = self.region.load(Ordering::Acquire);
        if !region.is_null() {
            return region;
        }
        let mut bytes = REGION_BYTES;
        while bytes >= REGION_BYTES_MIN {
            let is_limited = bytes < REGION_BYTES && bytes > REGION_BYTES_MIN;
            if let Some(fresh) = if is_limited { map_lazily_half(2 * bytes) } else { map_lazily(bytes) } {
                // SAFETY: fresh memory that no other thread knows yet.
                unsafe { fresh.cast::<u64>().write(bytes as u64) };
                return match self.region.compare_exchange(
                    null_mut(),
                    fresh,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                ) {
                    Ok(_) => fresh,
                    Err(other) => {
                        unmap(fresh, bytes);
                        other
                    }
                };
            }
            bytes /= 2;
        }
        null_mut()
    }

    fn pop(&self, class: usize) -> *mut u8 {
        let region = self.region.load(Ordering::Acquire);
        let head = &self.free[class];
        // Acquire pairs with the Release of the push that linked the block.
        let mut seen = head.load(Ordering::Acquire);
        loop {
            let unit = seen & 0xffff_ffff;
            if unit == NO_UNIT {
                return null_mut();
            }
            // SAFETY: a unit in a list lies in the region, which is never unmapped. If another thread took the
            // block meanwhile this reads its contents as a link, and the tag makes the exchange fail.
            let (block, next) = unsafe {
                let block = region.add(unit as usize * UNIT);
                (block, (*block.cast::<AtomicU64>()).load(Ordering::Relaxed) & 0xffff_ffff)
            };
            let tagged = (seen & !0xffff_ffff).wrapping_add(1 << 32) | next;
            match head.compare_exchange_weak(seen, tagged, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return block,
                Err(now) => seen = now,
            }
        }
    }

    fn push(&self, class: usize, block: *mut u8) {
        let region = self.region.load(Ordering::Acquire);
        let unit = (block as u64 - region as u64) / UNIT as u64;
        let head = &self.free[class];
        let mut seen = head.load(Ordering::Relaxed);
        loop {
            // SAFETY: the block is free and ours until the exchange publishes it.
            unsafe { (*block.cast::<AtomicU64>()).store(seen & 0xffff_ffff, Ordering::Relaxed) };
            let tagged = (seen & !0xffff_ffff).wrapping_add(1 << 32) | unit;
            match head.compare_exchange_weak(seen, tagged, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    fn bump(&self, bytes: usize, align: usize) -> *mut u8 {
        let region = self.region();
        if region.is_null() {
            return null_mut();
        }
        // SAFETY: written before the region was published, and never again.
        let room = unsafe { region.cast::<u64>().read() };
        let padded = (bytes + align - UNIT) as u64;
        // The pointer must not grow and shrink again: another thread's block could begin behind it in between.
        let end = |word: u64| {
            let end = (word & USED_MASK).checked_add(padded)?;
            (end <= left_of(word, room)).then_some(word & !USED_MASK | end)
        };
        let Ok(word) = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end) else {
            return null_mut();
        };
        let start = ((word & USED_MASK) as usize).next_multiple_of(align);
        // SAFETY: within the region, checked above; the region begins on a page, so offsets align as addresses do.
        unsafe { region.add(start) }
    }
}

impl Arena {
    /// Gives back address space that no allocation has used yet, because the process has set a limit on it. `mapped` is the
    /// address space of the process now. Half of the rest below the limit stays, as at the start, and
    /// [`REGION_BYTES_MIN`] at least.
    pub fn cut(&self, limit: u64, mapped: u64) {
        let region = self.region.load(Ordering::Acquire);
        if region.is_null() {
            return;
        }
        // SAFETY: written before the region was published, and never again.
        let room = unsafe { region.cast::<u64>().read() };
        let cut = |word: u64| {
            let (left, used) = (left_of(word, room), word & USED_MASK);
            let rest = limit.saturating_sub(mapped.saturating_sub(left) + used);
            let keeps = (used + (rest / 2).max(REGION_BYTES_MIN as u64)).next_multiple_of(PAGE);
            (keeps < left).then_some((keeps / PAGE) << CUT_SHIFT | used)
        };
        let mut word = self.used.load(Ordering::Relaxed);
        while let Some(next) = cut(word) {
            match self.used.compare_exchange(word, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    let (from, to) = (left_of(next, room), left_of(word, room));
                    // SAFETY: within the region. From here on no block lies there.
                    return unmap(unsafe { region.add(from as usize) }, (to - from) as usize);
                }
                Err(now) => word = now,
            }
        }
    }
}

/// The bytes of the region that are left, of `room` at first.
fn left_of(word: u64, room: u64) -> u64 {
    match word >> CUT_SHIFT {
        0 => room,
        pages => pages * PAGE,
    }
}

impl Default for Arena {
    fn default() -> Self {
        Self::new()
    }
}

/// Maps address space that uses memory only where it is touched, and that core files omit.
fn map_lazily(bytes: usize) -> Option<*mut u8> {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as u64;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let address =
        unsafe { raw::try_call(libc::SYS_mmap, &[0, bytes as u64, protection, flags, u64::MAX, 0]) }.ok()?;
    Some(address as *mut u8)
}

/// The same, for the first half of so many bytes that may be mapped.
fn map_lazily_half(bytes: usize) -> Option<*mut u8> {
    let all = map_lazily(bytes)?;
    // SAFETY: the address is in the middle of the mapping.
    unmap(unsafe { all.add(bytes / 2) }, bytes / 2);
    Some(all)
}

fn unmap(address: *mut u8, bytes: usize) {
    // SAFETY: the mapping was made here, and no reference to it exists.
    let _ = unsafe { raw::try_call(libc::SYS_munmap, &[address as u64, bytes as u64]) };
}

/// Size class of an allocation, and the bytes it takes: four steps to each power of two from 16 on.
fn class(bytes: usize) -> (usize, usize) {
    let bytes = bytes.max(UNIT).next_multiple_of(UNIT);
    if bytes <= UNIT * STEPS {
        return (bytes / UNIT - 1, bytes);
    }
    let power = (bytes - 1).ilog2() as usize;
    let step = (1usize << power) / STEPS;
    let rounded = bytes.next_multiple_of(step);
    let index = (rounded - (1 << power)) / step;
    (STEPS * (power - 5) + index - 1, rounded)
}

// SAFETY: blocks come from the growing pointer or from a free list that holds each block once, never overlap, and
// are as large and aligned as asked.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        crate::costs::count_allocation();
        if layout.size() >= LARGE_BYTES || layout.align() > 4096 {
            if layout.align() > 4096 {
                return null_mut();
            }
            return raw::map_anonymous(layout.size()).unwrap_or(null_mut());
        }
        let align = layout.align().max(UNIT);
        let (class, bytes) = class(layout.size().max(align));
        let block = self.pop(class);
        if block.is_null() {
            return self.bump(bytes, align);
        }
        if !(block as usize).is_multiple_of(align) {
            self.push(class, block);
            return self.bump(bytes, align);
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if layout.size() >= LARGE_BYTES {
            return unmap(block, layout.size());
        }
        let (class, _) = class(layout.size().max(layout.align()));
        self.push(class, block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_are_large_enough_and_waste_little() {
        let mut last = 0;
        for bytes in 1..LARGE_BYTES {
            let (index, rounded) = class(bytes);
            assert!(rounded >= bytes && rounded % UNIT == 0 && index < CLASSES, "{bytes}");
            assert!(rounded <= bytes + bytes / 4 + 16, "{bytes} takes {rounded}");
            assert!(index >= last, "{bytes}");
            assert_eq!(class(rounded), (index, rounded), "{bytes}");
            last = index;
        }
    }

    /// If a refused allocation moved the pointer for a moment, another thread's block could overlap with the next one.
    #[test]
    fn a_refused_allocation_never_moves_the_pointer() {
        const ROOM: usize = 1 << 20;
        let arena = Arena::new();
        let region = map_lazily(ROOM).unwrap();
        // SAFETY: fresh memory, as large as a region's length.
        unsafe { region.cast::<u64>().write(ROOM as u64) };
        arena.region.store(region, Ordering::Release);
        #[allow(clippy::disallowed_methods, reason = "the test is about real threads")]
        std::thread::scope(|scope| {
            let refused = scope.spawn(|| (0..1_000_000).all(|_| arena.bump(ROOM, UNIT).is_null()));
            while !refused.is_finished() {
                assert_eq!(arena.used.load(Ordering::Relaxed), UNIT as u64);
            }
            assert!(refused.join().unwrap());
        });
        assert!(!arena.bump(ROOM - UNIT, UNIT).is_null(), "the whole region is free");
        assert!(arena.bump(UNIT, UNIT).is_null());
        unmap(region, ROOM);
    }

    #[test]
    fn address_space_that_is_given_back_is_not_used_again() {
        const ROOM: usize = 64 << 20;
        let arena = Arena::new();
        let region = map_lazily(ROOM).unwrap();
        // SAFETY: fresh memory, as large as a region's length.
        unsafe { region.cast::<u64>().write(ROOM as u64) };
        arena.region.store(region, Ordering::Release);
        let first = arena.bump(1 << 20, UNIT);
        let mapped = 1 << 30;
        arena.cut(2 << 30, mapped);
        assert_eq!(left_of(arena.used.load(Ordering::Relaxed), ROOM as u64), ROOM as u64, "there is enough");
        arena.cut(mapped - (32 << 20), mapped);
        let left = left_of(arena.used.load(Ordering::Relaxed), ROOM as u64) as usize;
        assert!((16 << 20..20 << 20).contains(&left), "{left}");
        let mut end = first as usize + (1 << 20);
        loop {
            let block = arena.bump(1 << 20, UNIT);
            if block.is_null() {
                break;
            }
            // SAFETY: the block is this test's.
            unsafe { block.write_bytes(1, 1 << 20) };
            end = block as usize + (1 << 20);
        }
        assert!(end <= region as usize + left && end > region as usize + left - (1 << 20));
        unmap(region, left);
    }

    #[test]
    fn blocks_never_overlap_under_threads() {
        static ARENA: Arena = Arena::new();
        let threads: Vec<_> = (0..4u8)
            .map(|mark| {
                #[allow(clippy::disallowed_methods, reason = "the test is about real threads")]
                std::thread::spawn(move || {
                    let mut held: Vec<(*mut u8, Layout)> = Vec::new();
                    for round in 0..20_000usize {
                        let layout = Layout::from_size_align(1 + round * 37 % 3000, 8).unwrap();
                        // SAFETY: a layout that is not empty; each block is written within its size only.
                        unsafe {
                            let block = ARENA.alloc(layout);
                            assert!(!block.is_null());
                            block.write_bytes(mark, layout.size());
                            held.push((block, layout));
                        }
                        if held.len() > 50 {
                            let (block, layout) = held.swap_remove(round % 50);
                            // SAFETY: the block is held by this thread alone.
                            unsafe {
                                let bytes = std::slice::from_raw_parts(block, layout.size());
                                assert!(bytes.iter().all(|byte| *byte == mark));
                                ARENA.dealloc(block, layout);
                            }
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(ARENA.used.load(Ordering::Relaxed) < 4 << 20, "freed blocks are used again");
    }
}
