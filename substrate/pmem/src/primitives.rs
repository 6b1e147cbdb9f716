//! Store instructions that reach the medium: non-temporal copies, write-back of cache lines, the store fence. The
//! variant is chosen once, by the capabilities of the processor.
//!
//! Non-temporal stores were the fastest at every size that was measured, so whole lines are stored that way; the
//! edges of a range are stored as usual and written back.

use crate::LINE_BYTES;
use format::checksum::{Salt, of_register};

/// Stores all of `source` at `target` and moves it towards the medium; durable after the next [`fence`].
///
/// # Safety
/// `target` is writable for the length of the source, and no Rust reference to it lives.
pub(crate) unsafe fn write(target: *mut u8, source: &[u8]) {
    let to_line = target.align_offset(LINE_BYTES).min(source.len());
    let (edge, rest) = source.split_at(to_line);
    let (lines, tail) = rest.split_at(rest.len() / LINE_BYTES * LINE_BYTES);
    // SAFETY: the three parts lie one after the other within the target's range; `lines` starts on a line, since
    // either `edge` led up to one or there are no lines.
    unsafe {
        if !edge.is_empty() {
            store(target, edge);
            write_back(target, edge.len());
        }
        if !lines.is_empty() {
            machine::stream(target.add(edge.len()), lines);
        }
        if !tail.is_empty() {
            let target = target.add(edge.len() + lines.len());
            store(target, tail);
            write_back(target, tail.len());
        }
    }
}

/// Stores whole lines, given as words, at `target`, which is aligned to a line; as [`write`].
///
/// # Safety
/// `target` is aligned to a line and writable for the length of the words, and no Rust reference to it lives.
#[inline]
pub(crate) unsafe fn write_words(target: *mut u8, words: &[u64]) {
    // SAFETY: as the caller promised.
    unsafe { machine::stream_words(target, words) };
}

/// Proof that the processor has an instruction for the checksum.
#[derive(Clone, Copy)]
pub(crate) struct Summer(());

impl Summer {
    /// Returns the proof, if the processor has the instruction.
    #[inline]
    pub fn get() -> Option<Self> {
        machine::sums().then_some(Self(()))
    }

    /// The checksum (`format::checksum`) of `first` and then `bytes` bytes of the words, starting from a salt.
    ///
    /// # Panics
    /// If there are fewer words.
    #[inline]
    pub fn sum(self, salt: Salt, first: u32, words: &[u64], bytes: usize) -> u32 {
        let (whole, rest) = split(words, bytes);
        // SAFETY: the proof says that the processor has the instruction.
        of_register(unsafe { machine::sum(salt.register(), first, whole, rest) })
    }

    /// The register of an unfinished checksum of four bytes and whole words, starting from a salt.
    #[inline]
    pub fn begin(self, salt: Salt, first: u32, words: &[u64]) -> u32 {
        // SAFETY: the proof says that the processor has the instruction.
        unsafe { machine::sum(salt.register(), first, words, (0, 0)) }
    }

    /// The register of a checksum continued with `bytes` bytes of the words.
    ///
    /// # Panics
    /// If there are fewer words.
    #[inline]
    pub fn go_on(self, register: u32, words: &[u64], bytes: usize) -> u32 {
        let (whole, rest) = split(words, bytes);
        // SAFETY: the proof says that the processor has the instruction.
        unsafe { machine::add(register, whole, rest) }
    }
}

/// The whole words of `bytes` bytes, and the partial word after them.
#[inline]
fn split(words: &[u64], bytes: usize) -> (&[u64], (u64, usize)) {
    let (whole, rest) = words[..bytes.div_ceil(size_of::<u64>())].split_at(bytes / size_of::<u64>());
    (whole, rest.first().map_or((0, 0), |word| (*word, bytes % size_of::<u64>())))
}

/// Stores all of `source` at `target` without writing it back.
///
/// # Safety
/// `target` is writable for the length of the source, and no Rust reference to it lives.
pub(crate) unsafe fn store(target: *mut u8, source: &[u8]) {
    // SAFETY: as the caller promised; a slice is readable and cannot overlap memory without references.
    unsafe { crate::copy::copy(target, source.as_ptr(), source.len()) }
        .expect("neither side of a store within a region can fault and be caught");
}

/// Moves the lines of a range towards the medium; durable after the next [`fence`].
///
/// # Safety
/// The range is mapped.
pub(crate) unsafe fn write_back(start: *const u8, bytes: usize) {
    let mut line = start as usize & !(LINE_BYTES - 1);
    let end = start as usize + bytes;
    while line < end {
        // SAFETY: the line holds at least one byte of the range, so it is mapped.
        unsafe { machine::write_back_line(line as *const u8) };
        line += LINE_BYTES;
    }
}

/// Orders the earlier stores and write-backs of this thread before its later ones, on the medium. It pairs with the
/// medium only: the shared words of a protocol order other threads.
#[inline]
pub(crate) fn fence() {
    machine::fence();
}

#[cfg(target_arch = "x86_64")]
mod machine {
    use crate::LINE_BYTES;
    use std::arch::asm;
    use std::arch::x86_64::{
        __cpuid_count, __m128i, __m256i, _mm_clflush, _mm_crc32_u8, _mm_crc32_u32, _mm_crc32_u64,
        _mm_loadu_si128, _mm_sfence, _mm_stream_si64, _mm_stream_si128, _mm256_loadu_si256,
        _mm256_stream_si256,
    };
    use std::sync::atomic::{AtomicU8, Ordering};

    const UNKNOWN: u8 = 0;
    const CLWB: u8 = 1;
    const CLFLUSHOPT: u8 = 2;
    const CLFLUSH: u8 = 3;

    /// Variant of the write-back. Relaxed: every thread that finds it unknown computes the same value.
    static WRITE_BACK: AtomicU8 = AtomicU8::new(UNKNOWN);

    #[cold]
    fn choose_write_back() -> u8 {
        let found = if __cpuid_count(0, 0).eax < 7 { 0 } else { __cpuid_count(7, 0).ebx };
        let choice = match (found & (1 << 24) != 0, found & (1 << 23) != 0) {
            (true, _) => CLWB,
            (false, true) => CLFLUSHOPT,
            (false, false) => CLFLUSH,
        };
        WRITE_BACK.store(choice, Ordering::Relaxed);
        choice
    }

    #[inline]
    pub unsafe fn write_back_line(line: *const u8) {
        let mut choice = WRITE_BACK.load(Ordering::Relaxed);
        if choice == UNKNOWN {
            choice = choose_write_back();
        }
        // SAFETY: the line is mapped, and the processor has reported the instruction.
        unsafe {
            match choice {
                CLWB => asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)),
                CLFLUSHOPT => asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)),
                _ => _mm_clflush(line),
            }
        }
    }

    /// `target` is aligned to a line and `lines` is a multiple of lines.
    #[inline]
    pub unsafe fn stream(target: *mut u8, lines: &[u8]) {
        // SAFETY: as the caller promised; AVX2 was detected.
        unsafe {
            if std::arch::is_x86_feature_detected!("avx2") {
                stream_avx2(target, lines);
            } else {
                stream_sse2(target, lines);
            }
        }
    }

    #[target_feature(enable = "avx2")]
    unsafe fn stream_avx2(target: *mut u8, lines: &[u8]) {
        for (index, line) in lines.chunks_exact(LINE_BYTES).enumerate() {
            // SAFETY: the target has room for all lines and is aligned to a line, so to 32 bytes.
            unsafe {
                let source = line.as_ptr().cast::<__m256i>();
                let target = target.add(index * LINE_BYTES).cast::<__m256i>();
                _mm256_stream_si256(target, _mm256_loadu_si256(source));
                _mm256_stream_si256(target.add(1), _mm256_loadu_si256(source.add(1)));
            }
        }
    }

    unsafe fn stream_sse2(target: *mut u8, lines: &[u8]) {
        for (index, part) in lines.chunks_exact(16).enumerate() {
            // SAFETY: the target has room for all lines and is aligned to a line, so to 16 bytes.
            unsafe {
                let target = target.add(index * 16).cast::<__m128i>();
                _mm_stream_si128(target, _mm_loadu_si128(part.as_ptr().cast::<__m128i>()));
            }
        }
    }

    /// `target` is aligned to a line and has room for the words.
    #[inline]
    pub unsafe fn stream_words(target: *mut u8, words: &[u64]) {
        for (index, line) in words.as_chunks::<{ LINE_BYTES / size_of::<u64>() }>().0.iter().enumerate() {
            // SAFETY: as the caller promised.
            let target = unsafe { target.add(index * LINE_BYTES).cast::<i64>() };
            for (index, word) in line.iter().enumerate() {
                // SAFETY: as the caller promised.
                unsafe { _mm_stream_si64(target.add(index), word.cast_signed()) };
            }
        }
    }

    #[inline]
    pub fn sums() -> bool {
        std::arch::is_x86_feature_detected!("sse4.2")
    }

    /// Goes on from `register` with four bytes, whole words, and some bytes of another word.
    #[target_feature(enable = "sse4.2")]
    pub fn sum(register: u32, first: u32, words: &[u64], rest: (u64, usize)) -> u32 {
        add(_mm_crc32_u32(register, first), words, rest)
    }

    /// Goes on from `register` with whole words, and some bytes of another word.
    #[target_feature(enable = "sse4.2")]
    pub fn add(register: u32, words: &[u64], (last, bytes): (u64, usize)) -> u32 {
        let mut register = u64::from(register);
        for word in words {
            register = _mm_crc32_u64(register, *word);
        }
        let mut register = register as u32;
        for byte in &last.to_le_bytes()[..bytes] {
            register = _mm_crc32_u8(register, *byte);
        }
        register
    }

    #[inline]
    pub fn fence() {
        // SAFETY: every x86-64 processor has SSE.
        unsafe { _mm_sfence() };
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod machine {
    /// Plain stores: every medium on such a machine is synced by system calls.
    pub unsafe fn stream(target: *mut u8, lines: &[u8]) {
        // SAFETY: as the caller promised.
        unsafe { super::store(target, lines) };
    }

    /// Plain stores.
    pub unsafe fn stream_words(target: *mut u8, words: &[u64]) {
        // SAFETY: as the caller promised.
        unsafe { super::store(target, zerocopy::IntoBytes::as_bytes(words)) };
    }

    pub fn sums() -> bool {
        false
    }

    pub unsafe fn sum(_register: u32, _first: u32, _words: &[u64], _last: (u64, usize)) -> u32 {
        unreachable!("this processor sums by no instruction that is used here")
    }

    pub unsafe fn add(_register: u32, _words: &[u64], _last: (u64, usize)) -> u32 {
        unreachable!("this processor sums by no instruction that is used here")
    }

    pub unsafe fn write_back_line(_line: *const u8) {}

    pub fn fence() {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}
