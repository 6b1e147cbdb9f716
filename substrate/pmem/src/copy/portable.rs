//! Copy loops for other processors: byte by byte; faults are not caught here.

use crate::fold::FoldState;

/// One volatile byte at a time.
pub unsafe fn copy_loop(target: *mut u8, source: *const u8, bytes: usize) -> usize {
    for index in 0..bytes {
        // SAFETY: as the caller promised for the whole range.
        unsafe { target.add(index).write_volatile(source.add(index).read_volatile()) };
    }
    0
}

pub unsafe fn copy_lines(target: *mut u8, keep: *mut u8, source: *const u8, bytes: usize) -> usize {
    // SAFETY: as the caller promised.
    unsafe {
        copy_loop(keep, source, bytes);
        crate::primitives::write(target, std::slice::from_raw_parts(keep, bytes));
    }
    0
}

pub fn folds() -> bool {
    false
}

pub fn folds_by_lines() -> bool {
    false
}

pub unsafe fn copy_folded(_: *mut u8, _: *const u8, _: usize, _: (&mut FoldState, bool)) -> usize {
    unreachable!("this processor folds by no instruction that is used here")
}

pub fn landing_of(_instruction: usize) -> Option<usize> {
    None
}
