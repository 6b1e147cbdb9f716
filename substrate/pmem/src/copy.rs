//! Copies from and to memory of other owners: another thread may change it meanwhile, and it may not be mapped.
//!
//! The copy is a loop in machine code that the compiler cannot change, so that each byte is loaded exactly once (a
//! plain copy may be optimised into two loads of the source). A fault inside the loop can be turned into an error
//! value: a SIGSEGV or SIGBUS handler calls [`landing_of`] with the address of the instruction and continues at the
//! returned address; the copy then returns [`Fault`]. Without such a handler a fault ends the process, as usual.

#[cfg_attr(target_arch = "x86_64", path = "copy/x86_64.rs")]
#[cfg_attr(not(target_arch = "x86_64"), path = "copy/portable.rs")]
mod machine;

use crate::fold::{FoldState, STRIDE};
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// The memory given by a caller is not mapped, or not with the needed right (EFAULT).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// Bytes to be copied from, which may change or be unmapped at any time.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    start: *const u8,
    bytes: usize,
    lifetime: PhantomData<&'a [u8]>,
}

// SAFETY: a source is only an address and a length; every access goes through the copy loop, which tolerates
// concurrent change.
unsafe impl Send for Source<'_> {}

impl<'a> From<&'a [u8]> for Source<'a> {
    fn from(slice: &'a [u8]) -> Self {
        Self { start: slice.as_ptr(), bytes: slice.len(), lifetime: PhantomData }
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Source<'a> {
    fn from(array: &'a [u8; N]) -> Self {
        Self::from(array.as_slice())
    }
}

impl Source<'_> {
    /// A source at an address that a program gave.
    ///
    /// # Safety
    /// Either the range is readable while the source is used, or a fault handler that calls [`landing_of`] is
    /// installed.
    pub const unsafe fn from_raw(start: *const u8, bytes: usize) -> Self {
        Self { start, bytes, lifetime: PhantomData }
    }

    /// Number of bytes.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies the first bytes of the source into all of `target`, and moves the source's start behind them.
    ///
    /// # Errors
    /// `Fault`: an unknown part of `target` was overwritten.
    ///
    /// # Panics
    /// If the source is shorter than `target`.
    #[inline]
    pub fn take(&mut self, target: &mut [u8]) -> Result<(), Fault> {
        let bytes = target.len();
        // SAFETY: the target is a valid exclusive slice.
        unsafe { self.take_raw(target.as_mut_ptr(), bytes) }
    }

    /// [`Source::take`] into memory that need not be initialised.
    ///
    /// # Safety
    /// `bytes` bytes at `target` are writable by us alone.
    #[inline]
    pub(crate) unsafe fn take_raw(&mut self, target: *mut u8, bytes: usize) -> Result<(), Fault> {
        assert!(bytes <= self.bytes, "a copy stays within its source");
        // SAFETY: `from_raw` promised that the source is readable or its faults are caught; the caller vouches for
        // the target.
        unsafe { copy(target, self.start, bytes)? };
        self.start = self.start.wrapping_add(bytes);
        self.bytes -= bytes;
        Ok(())
    }
}

impl Source<'_> {
    /// Copies whole lines from the start of the source to `keep` and, in the same pass and past the caches, to
    /// `target`, and advances the source. Each byte is loaded once: both copies are equal.
    ///
    /// # Errors
    /// `Fault`: an unknown part of both was overwritten.
    ///
    /// # Safety
    /// `target` is aligned to a line, writable for the length of `keep`, which is whole lines, and no Rust
    /// reference to it lives.
    ///
    /// # Panics
    /// If the source is shorter than `keep`.
    #[inline]
    pub(crate) unsafe fn take_lines(
        &mut self,
        keep: &mut [MaybeUninit<u8>],
        target: *mut u8,
    ) -> Result<(), Fault> {
        let bytes = keep.len();
        assert!(bytes <= self.bytes, "a copy stays within its source");
        // SAFETY: `from_raw` promised that the source is readable or its faults are caught; `keep` is exclusive,
        // and the caller vouches for the target.
        if unsafe { machine::copy_lines(target, keep.as_mut_ptr().cast(), self.start, bytes) } != 0 {
            return Err(Fault);
        }
        self.start = self.start.wrapping_add(bytes);
        self.bytes -= bytes;
        Ok(())
    }
}

impl Source<'_> {
    /// Copies whole strides from the start of the source past the caches to `target`, folds the same bytes into
    /// `state`, whose first word is the register with which the checksum begins, and advances the source. Each byte
    /// is loaded once. `by_lines` selects registers of a line instead of half a line.
    ///
    /// # Errors
    /// `Fault`: an unknown part of the target was overwritten.
    ///
    /// # Safety
    /// [`folds`], and for `by_lines` [`folds_by_lines`], returned true; `target` is aligned to a line and writable
    /// for `bytes` bytes, and no Rust reference to it lives.
    ///
    /// # Panics
    /// If the source is shorter, or `bytes` is zero or not a multiple of a stride.
    #[inline]
    pub(crate) unsafe fn take_folded(
        &mut self,
        state: &mut FoldState,
        target: *mut u8,
        bytes: usize,
        by_lines: bool,
    ) -> Result<(), Fault> {
        assert!(bytes <= self.bytes, "a copy stays within its source");
        assert!(bytes > 0 && bytes.is_multiple_of(STRIDE), "whole strides");
        // SAFETY: `from_raw` promised that the source is readable or its faults are caught; the caller vouches for
        // the target and the processor.
        if unsafe { machine::copy_folded(target, self.start, bytes, (state, by_lines)) } != 0 {
            return Err(Fault);
        }
        self.start = self.start.wrapping_add(bytes);
        self.bytes -= bytes;
        Ok(())
    }
}

/// True if the processor has the instructions for [`Source::take_folded`].
#[inline]
pub(crate) fn folds() -> bool {
    machine::folds()
}

/// True if it has them for registers of a line.
#[inline]
pub(crate) fn folds_by_lines() -> bool {
    machine::folds_by_lines()
}

/// Memory to copy to, which other threads may read, change or unmap at any time.
#[derive(Debug)]
pub struct Sink<'a> {
    start: *mut u8,
    bytes: usize,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: as for `Source`.
unsafe impl Send for Sink<'_> {}

impl<'a> From<&'a mut [u8]> for Sink<'a> {
    fn from(slice: &'a mut [u8]) -> Self {
        Self { start: slice.as_mut_ptr(), bytes: slice.len(), lifetime: PhantomData }
    }
}

impl Sink<'_> {
    /// A sink at an address that a program gave.
    ///
    /// # Safety
    /// No Rust reference to the range lives while the sink is used, and either it is writable or a fault handler
    /// that calls [`landing_of`] is installed.
    pub const unsafe fn from_raw(start: *mut u8, bytes: usize) -> Self {
        Self { start, bytes, lifetime: PhantomData }
    }

    /// Number of bytes left.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies all of `source` to the start of the sink, and moves the sink's start behind it.
    ///
    /// # Errors
    /// `Fault`: an unknown part was overwritten.
    ///
    /// # Panics
    /// If the sink is shorter than `source`.
    pub fn put(&mut self, source: &[u8]) -> Result<(), Fault> {
        // SAFETY: a slice is readable.
        unsafe { self.put_raw(source.as_ptr(), source.len()) }
    }

    /// [`Sink::put`] from memory that other threads may change.
    ///
    /// # Safety
    /// `bytes` bytes at `source` are readable.
    pub(crate) unsafe fn put_raw(&mut self, source: *const u8, bytes: usize) -> Result<(), Fault> {
        assert!(bytes <= self.bytes, "a copy stays within its sink");
        // SAFETY: `from_raw` promised that the sink is writable or its faults are caught; the caller vouches for
        // the source.
        unsafe { copy(self.start, source, bytes)? };
        self.start = self.start.wrapping_add(bytes);
        self.bytes -= bytes;
        Ok(())
    }
}

/// Copies memory; other threads may change either side meanwhile.
///
/// # Safety
/// `source` is readable and `target` writable for `bytes` bytes, or a handler that calls [`landing_of`] catches the
/// faults; the two do not overlap; no Rust reference depends on the changed memory.
#[inline]
pub(crate) unsafe fn copy(target: *mut u8, source: *const u8, bytes: usize) -> Result<(), Fault> {
    // SAFETY: as the caller promised.
    if unsafe { machine::copy_loop(target, source, bytes) } == 0 { Ok(()) } else { Err(Fault) }
}

/// Address at which a fault handler continues if `instruction` lies in the copy loop; `None` for any other fault. A
/// signal handler may call this: it only compares numbers.
pub fn landing_of(instruction: usize) -> Option<usize> {
    machine::landing_of(instruction)
}
