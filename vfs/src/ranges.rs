//! Translates the modes of `fallocate` to operations of an engine.

use crate::engine::Allocate;
use libc::c_int;

const KEEP_SIZE: c_int = libc::FALLOC_FL_KEEP_SIZE;
const PUNCH_HOLE: c_int = libc::FALLOC_FL_PUNCH_HOLE | KEEP_SIZE;
const ZERO_RANGE: c_int = libc::FALLOC_FL_ZERO_RANGE;
const ZERO_WITHIN: c_int = libc::FALLOC_FL_ZERO_RANGE | KEEP_SIZE;

/// The operations of a mode, in order; `None` for a mode that is not supported. Where there is no space to reserve a range
/// again, it is not cleared either.
pub const fn allocations(mode: c_int) -> Option<&'static [Allocate]> {
    match mode {
        0 => Some(&[Allocate::Extend]),
        KEEP_SIZE => Some(&[Allocate::KeepSize]),
        PUNCH_HOLE => Some(&[Allocate::PunchHole]),
        ZERO_RANGE => Some(&[Allocate::KeepSizeAndReplace, Allocate::PunchHole, Allocate::Extend]),
        ZERO_WITHIN => Some(&[Allocate::KeepSizeAndReplace, Allocate::PunchHole, Allocate::KeepSize]),
        _ => None,
    }
}
