//! Copy loops of x86-64: machine code between two labels; a fault in between continues at a landing address.

use crate::fold::FoldState;
use crate::fold::multipliers::MULTIPLIERS;

// Whole lines by 16-byte moves (by 32-byte moves where the processor has them; by moves of a line reads of 4 KB took twice
// as long on a Zen 5), the rest by overlapping moves. It keeps nothing on the stack, so the landing is a plain return;
// result 0 is done, 1 a fault.
std::arch::global_asm!(
    ".pushsection .text.hearth_copy,\"ax\",@progbits",
    ".p2align 6",
    ".hidden hearth_copy_start",
    ".globl hearth_copy_start",
    ".hidden hearth_copy_end",
    ".globl hearth_copy_end",
    ".hidden hearth_copy_landing",
    ".globl hearth_copy_landing",
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
    "hearth_copy_avx:",
    "hearth_copy_start:",
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
    fn hearth_copy_avx(target: *mut u8, source: *const u8, bytes: usize) -> usize;
    fn hearth_copy_sse(target: *mut u8, source: *const u8, bytes: usize) -> usize;
    fn hearth_copy_lines(target: *mut u8, keep: *mut u8, source: *const u8, bytes: usize) -> usize;
    fn hearth_copy_folded(
        target: *mut u8,
        source: *const u8,
        bytes: usize,
        state: *mut FoldState,
        multipliers: *const u64,
    ) -> usize;
    fn hearth_copy_folded_wide(
        target: *mut u8,
        source: *const u8,
        bytes: usize,
        state: *mut FoldState,
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
        if std::arch::is_x86_feature_detected!("avx") {
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
    (state, by_lines): (&mut FoldState, bool),
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
