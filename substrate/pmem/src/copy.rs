//! Copies from and to memory that is not ours: another thread may change it meanwhile, and it may not be mapped.
//!
//! The copy is one machine-code loop that the compiler cannot look into, so that no byte is fetched a second time
//! behind our back (a plain copy may be optimised into two loads of the source). A fault inside the loop can be
//! turned into an error value: a SIGSEGV or SIGBUS handler asks [`landing_of`] with the instruction's address and
//! continues where it says; the copy then returns [`Fault`]. Without such a handler a fault kills the process, as
//! it does everywhere else.

#[cfg_attr(target_arch = "x86_64", path = "copy/x86_64.rs")]
#[cfg_attr(not(target_arch = "x86_64"), path = "copy/portable.rs")]
mod machine;

use crate::fold::{STRIDE, State};
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// The memory given by a caller is not mapped, or not with this right (EFAULT).
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
    /// Memory at an address that a program gave.
    ///
    /// # Safety
    /// Either the range is readable while the source is used, or a fault handler that asks [`landing_of`] is
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
        // SAFETY: the target is ours and initialised.
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
    /// Copies whole lines of the source's start to `keep` and, in the same pass and past the caches, to `target`, and
    /// moves the source's start behind them. Each byte is fetched once: both get the same.
    ///
    /// # Errors
    /// `Fault`: an unknown part of both was overwritten.
    ///
    /// # Safety
    /// `target` is aligned to a line, writable for as many bytes as `keep` has, whole lines, and no Rust reference to
    /// it lives.
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
        // SAFETY: `from_raw` promised that the source is readable or its faults are caught; `keep` is ours, and the
        // caller vouches for the target.
        if unsafe { machine::copy_lines(target, keep.as_mut_ptr().cast(), self.start, bytes) } != 0 {
            return Err(Fault);
        }
        self.start = self.start.wrapping_add(bytes);
        self.bytes -= bytes;
        Ok(())
    }
}

impl Source<'_> {
    /// Copies whole strides of the source's start past the caches to `target`, folds the same bytes into `state`, whose
    /// first word is the register that the sum begins with, and moves the source's start behind them. Each byte is
    /// fetched once. `by_lines`: by registers of a line, else of half of one.
    ///
    /// # Errors
    /// `Fault`: an unknown part of the target was overwritten.
    ///
    /// # Safety
    /// [`folds`], and for `by_lines` [`folds_by_lines`]; `target` is aligned to a line and writable for so many bytes, and
    /// no Rust reference to it lives.
    ///
    /// # Panics
    /// If the source is shorter, or `bytes` is none or not of whole strides.
    #[inline]
    pub(crate) unsafe fn take_folded(
        &mut self,
        state: &mut State,
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

/// Whether the processor has what [`Source::take_folded`] needs.
#[inline]
pub(crate) fn folds() -> bool {
    machine::folds()
}

/// Whether it does so by registers of a line.
#[inline]
pub(crate) fn folds_by_lines() -> bool {
    machine::folds_by_lines()
}

/// Memory to be copied to, which may be read, changed or unmapped by others at any time.
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
    /// Memory at an address that a program gave.
    ///
    /// # Safety
    /// No Rust reference to the range lives while the sink is used, and either it is writable or a fault handler
    /// that asks [`landing_of`] is installed.
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

    /// [`Sink::put`] from memory that others may change.
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

/// Copies memory, of which either side may be changed by others meanwhile.
///
/// # Safety
/// `source` is readable and `target` writable for `bytes` bytes, or faults there are caught by a handler that asks
/// [`landing_of`]; the two do not overlap; no Rust reference is confused by the change.
#[inline]
pub(crate) unsafe fn copy(target: *mut u8, source: *const u8, bytes: usize) -> Result<(), Fault> {
    // SAFETY: as the caller promised.
    if unsafe { machine::copy_loop(target, source, bytes) } == 0 { Ok(()) } else { Err(Fault) }
}

/// Where a fault handler continues if `instruction` lies in the copy loop; `None` if the fault is none of ours. To
/// be called from a signal handler: it only compares numbers.
pub fn landing_of(instruction: usize) -> Option<usize> {
    machine::landing_of(instruction)
}
