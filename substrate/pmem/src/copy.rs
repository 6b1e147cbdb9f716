//! Copies from and to memory that is not ours: another thread may change it meanwhile, and it may not be mapped.
//!
//! The copy is one machine-code loop that the compiler cannot look into, so that no byte is fetched a second time
//! behind our back (a plain copy may be optimised into two loads of the source). A fault inside the loop can be
//! turned into an error value: a SIGSEGV or SIGBUS handler asks [`landing_of`] with the instruction's address and
//! continues where it says; the copy then returns [`Fault`]. Without such a handler a fault kills the process, as
//! it does everywhere else.

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
    /// [`folds`], and for `by_lines` [`folds_by_lines`]; `target` is aligned to a line and writable for so many bytes, and no Rust reference to it lives.
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

#[cfg(target_arch = "x86_64")]
mod machine {
    use crate::fold::State;
    use crate::fold::multipliers::MULTIPLIERS;

    // Whole lines by 16-byte moves (by moves of 32 bytes or a line where the processor has them), the rest by overlapping
    // moves. It
    // keeps nothing on the stack, so the landing is a plain return; result 0 is done, 1 a fault.
    std::arch::global_asm!(
        ".pushsection .text.hearth_copy,\"ax\",@progbits",
        ".p2align 6",
        ".hidden hearth_copy_start",
        ".globl hearth_copy_start",
        ".hidden hearth_copy_end",
        ".globl hearth_copy_end",
        ".hidden hearth_copy_landing",
        ".globl hearth_copy_landing",
        ".hidden hearth_copy_wide",
        ".globl hearth_copy_wide",
        ".hidden hearth_copy_avx",
        ".globl hearth_copy_avx",
        ".hidden hearth_copy_lines",
        ".globl hearth_copy_lines",
        ".hidden hearth_copy_folded",
        ".globl hearth_copy_folded",
        ".hidden hearth_copy_folded_wide",
        ".globl hearth_copy_folded_wide",
        ".hidden hearth_copy_sse",
        ".globl hearth_copy_sse",
        "hearth_copy_wide:",
        "hearth_copy_start:",
        "cmp rdx, 256",
        "jb 16f",
        "15:",
        "vmovups zmm0, [rsi]",
        "vmovups zmm1, [rsi + 64]",
        "vmovups zmm2, [rsi + 128]",
        "vmovups zmm3, [rsi + 192]",
        "vmovups [rdi], zmm0",
        "vmovups [rdi + 64], zmm1",
        "vmovups [rdi + 128], zmm2",
        "vmovups [rdi + 192], zmm3",
        "add rsi, 256",
        "add rdi, 256",
        "sub rdx, 256",
        "cmp rdx, 256",
        "jae 15b",
        "vzeroupper",
        "16:",
        "hearth_copy_avx:",
        "cmp rdx, 128",
        "jb 9f",
        "1:",
        "vmovups ymm0, [rsi]",
        "vmovups ymm1, [rsi + 32]",
        "vmovups ymm2, [rsi + 64]",
        "vmovups ymm3, [rsi + 96]",
        "vmovups [rdi], ymm0",
        "vmovups [rdi + 32], ymm1",
        "vmovups [rdi + 64], ymm2",
        "vmovups [rdi + 96], ymm3",
        "add rsi, 128",
        "add rdi, 128",
        "sub rdx, 128",
        "cmp rdx, 128",
        "jae 1b",
        "vzeroupper",
        ".p2align 4",
        "hearth_copy_sse:",
        "9:",
        "cmp rdx, 64",
        "jb 3f",
        "2:",
        "movups xmm0, [rsi]",
        "movups xmm1, [rsi + 16]",
        "movups xmm2, [rsi + 32]",
        "movups xmm3, [rsi + 48]",
        "movups [rdi], xmm0",
        "movups [rdi + 16], xmm1",
        "movups [rdi + 32], xmm2",
        "movups [rdi + 48], xmm3",
        "add rsi, 64",
        "add rdi, 64",
        "sub rdx, 64",
        "cmp rdx, 64",
        "jae 2b",
        "3:",
        "cmp rdx, 32",
        "jb 4f",
        "movups xmm0, [rsi]",
        "movups xmm1, [rsi + 16]",
        "movups xmm2, [rsi + rdx - 32]",
        "movups xmm3, [rsi + rdx - 16]",
        "movups [rdi], xmm0",
        "movups [rdi + 16], xmm1",
        "movups [rdi + rdx - 32], xmm2",
        "movups [rdi + rdx - 16], xmm3",
        "xor eax, eax",
        "ret",
        "4:",
        "cmp rdx, 16",
        "jb 5f",
        "movups xmm0, [rsi]",
        "movups xmm1, [rsi + rdx - 16]",
        "movups [rdi], xmm0",
        "movups [rdi + rdx - 16], xmm1",
        "xor eax, eax",
        "ret",
        "5:",
        "cmp rdx, 8",
        "jb 6f",
        "mov rax, [rsi]",
        "mov rcx, [rsi + rdx - 8]",
        "mov [rdi], rax",
        "mov [rdi + rdx - 8], rcx",
        "xor eax, eax",
        "ret",
        "6:",
        "test rdx, rdx",
        "jz 8f",
        "7:",
        "mov al, [rsi + rdx - 1]",
        "mov [rdi + rdx - 1], al",
        "dec rdx",
        "jnz 7b",
        "8:",
        "xor eax, eax",
        "ret",
        // (target, keep, source, bytes): whole lines, to the target past the caches.
        ".p2align 5",
        "hearth_copy_lines:",
        "test rcx, rcx",
        "jz 8b",
        "10:",
        "vmovups ymm0, [rdx]",
        "vmovups ymm1, [rdx + 32]",
        "vmovntdq [rdi], ymm0",
        "vmovntdq [rdi + 32], ymm1",
        "vmovups [rsi], ymm0",
        "vmovups [rsi + 32], ymm1",
        "add rdx, 64",
        "add rdi, 64",
        "add rsi, 64",
        "sub rcx, 64",
        "jnz 10b",
        "vzeroupper",
        "xor eax, eax",
        "ret",
        // (target, source, bytes, state, multipliers): whole strides, to the target past the caches.
        ".p2align 5",
        "hearth_copy_folded:",
        "vmovups ymm8, [r8]",
        "vmovups ymm0, [rsi]",
        "vmovups ymm1, [rsi + 32]",
        "vmovups ymm2, [rsi + 64]",
        "vmovups ymm3, [rsi + 96]",
        "vmovntdq [rdi], ymm0",
        "vmovntdq [rdi + 32], ymm1",
        "vmovntdq [rdi + 64], ymm2",
        "vmovntdq [rdi + 96], ymm3",
        "vpxor ymm0, ymm0, [rcx]",
        "sub rdx, 128",
        "jz 12f",
        "11:",
        "add rsi, 128",
        "add rdi, 128",
        "vmovups ymm4, [rsi]",
        "vmovups ymm5, [rsi + 32]",
        "vmovups ymm6, [rsi + 64]",
        "vmovups ymm7, [rsi + 96]",
        "vmovntdq [rdi], ymm4",
        "vmovntdq [rdi + 32], ymm5",
        "vmovntdq [rdi + 64], ymm6",
        "vmovntdq [rdi + 96], ymm7",
        "vpclmulqdq ymm9, ymm0, ymm8, 0x00",
        "vpclmulqdq ymm10, ymm1, ymm8, 0x00",
        "vpclmulqdq ymm11, ymm2, ymm8, 0x00",
        "vpclmulqdq ymm12, ymm3, ymm8, 0x00",
        "vpclmulqdq ymm0, ymm0, ymm8, 0x11",
        "vpclmulqdq ymm1, ymm1, ymm8, 0x11",
        "vpclmulqdq ymm2, ymm2, ymm8, 0x11",
        "vpclmulqdq ymm3, ymm3, ymm8, 0x11",
        "vpxor ymm4, ymm4, ymm9",
        "vpxor ymm5, ymm5, ymm10",
        "vpxor ymm6, ymm6, ymm11",
        "vpxor ymm7, ymm7, ymm12",
        "vpxor ymm0, ymm0, ymm4",
        "vpxor ymm1, ymm1, ymm5",
        "vpxor ymm2, ymm2, ymm6",
        "vpxor ymm3, ymm3, ymm7",
        "sub rdx, 128",
        "jnz 11b",
        "12:",
        "vmovups [rcx], ymm0",
        "vmovups [rcx + 32], ymm1",
        "vmovups [rcx + 64], ymm2",
        "vmovups [rcx + 96], ymm3",
        "vzeroupper",
        "xor eax, eax",
        "ret",
        // The same by registers of a line: half as many stores wait for their turn, and others have room behind them.
        ".p2align 5",
        "hearth_copy_folded_wide:",
        "vbroadcasti64x4 zmm8, [r8]",
        "vmovups zmm0, [rsi]",
        "vmovups zmm1, [rsi + 64]",
        "vmovntdq [rdi], zmm0",
        "vmovntdq [rdi + 64], zmm1",
        "vpxorq zmm0, zmm0, [rcx]",
        "sub rdx, 128",
        "jz 14f",
        "13:",
        "add rsi, 128",
        "add rdi, 128",
        "vmovups zmm4, [rsi]",
        "vmovups zmm5, [rsi + 64]",
        "vmovntdq [rdi], zmm4",
        "vmovntdq [rdi + 64], zmm5",
        "vpclmulqdq zmm9, zmm0, zmm8, 0x00",
        "vpclmulqdq zmm10, zmm1, zmm8, 0x00",
        "vpclmulqdq zmm0, zmm0, zmm8, 0x11",
        "vpclmulqdq zmm1, zmm1, zmm8, 0x11",
        "vpternlogq zmm0, zmm4, zmm9, 0x96",
        "vpternlogq zmm1, zmm5, zmm10, 0x96",
        "sub rdx, 128",
        "jnz 13b",
        "14:",
        "vmovups [rcx], zmm0",
        "vmovups [rcx + 64], zmm1",
        "vzeroupper",
        "xor eax, eax",
        "ret",
        "hearth_copy_end:",
        "hearth_copy_landing:",
        "mov eax, 1",
        "ret",
        ".popsection",
    );

    unsafe extern "C" {
        fn hearth_copy_wide(target: *mut u8, source: *const u8, bytes: usize) -> usize;
        fn hearth_copy_avx(target: *mut u8, source: *const u8, bytes: usize) -> usize;
        fn hearth_copy_sse(target: *mut u8, source: *const u8, bytes: usize) -> usize;
        fn hearth_copy_lines(target: *mut u8, keep: *mut u8, source: *const u8, bytes: usize) -> usize;
        fn hearth_copy_folded(
            target: *mut u8,
            source: *const u8,
            bytes: usize,
            state: *mut State,
            multipliers: *const u64,
        ) -> usize;
        fn hearth_copy_folded_wide(
            target: *mut u8,
            source: *const u8,
            bytes: usize,
            state: *mut State,
            multipliers: *const u64,
        ) -> usize;
        fn hearth_copy_start();
        fn hearth_copy_end();
        fn hearth_copy_landing();
    }

    #[inline]
    pub unsafe fn copy_loop(target: *mut u8, source: *const u8, bytes: usize) -> usize {
        // SAFETY: as the caller promised; the wide loop runs only where the processor has it.
        unsafe {
            if std::arch::is_x86_feature_detected!("avx512f") {
                hearth_copy_wide(target, source, bytes)
            } else if std::arch::is_x86_feature_detected!("avx") {
                hearth_copy_avx(target, source, bytes)
            } else {
                hearth_copy_sse(target, source, bytes)
            }
        }
    }

    #[inline]
    pub unsafe fn copy_lines(target: *mut u8, keep: *mut u8, source: *const u8, bytes: usize) -> usize {
        // SAFETY: as the caller promised; the wide loop runs only where the processor has it.
        unsafe {
            if std::arch::is_x86_feature_detected!("avx") {
                return hearth_copy_lines(target, keep, source, bytes);
            }
            let fault = copy_loop(keep, source, bytes);
            if fault == 0 {
                crate::primitives::write(target, std::slice::from_raw_parts(keep, bytes));
            }
            fault
        }
    }

    #[inline]
    pub fn folds() -> bool {
        std::arch::is_x86_feature_detected!("vpclmulqdq") && std::arch::is_x86_feature_detected!("avx2")
    }

    #[inline]
    pub fn folds_by_lines() -> bool {
        folds() && std::arch::is_x86_feature_detected!("avx512f")
    }

    #[inline]
    pub unsafe fn copy_folded(
        target: *mut u8,
        source: *const u8,
        bytes: usize,
        (state, by_lines): (&mut State, bool),
    ) -> usize {
        // SAFETY: as the caller promised; the wide loop runs only where the processor has it.
        unsafe {
            if by_lines {
                hearth_copy_folded_wide(target, source, bytes, state, MULTIPLIERS.as_ptr())
            } else {
                hearth_copy_folded(target, source, bytes, state, MULTIPLIERS.as_ptr())
            }
        }
    }

    pub fn landing_of(instruction: usize) -> Option<usize> {
        let start = hearth_copy_start as *const () as usize;
        let end = hearth_copy_end as *const () as usize;
        (start..end).contains(&instruction).then_some(hearth_copy_landing as *const () as usize)
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod machine {
    use crate::fold::State;

    /// One volatile byte at a time; faults are not caught here.
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

    pub unsafe fn copy_folded(_: *mut u8, _: *const u8, _: usize, _: (&mut State, bool)) -> usize {
        unreachable!("this processor folds by no instruction that is used here")
    }

    pub fn landing_of(_instruction: usize) -> Option<usize> {
        None
    }
}
