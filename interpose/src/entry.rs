//! The code to which a patched `syscall` instruction jumps. The test of the bitmap is in assembly, so that a call that
//! does not concern the library costs a few nanoseconds and touches no register. All other calls continue in Rust.
//!
//! Like the kernel, the entry changes only rax, rcx and r11. It restores the flags, the general registers, and xmm0 to
//! xmm15, which Rust code may use. It does not save the upper halves of the ymm registers: its callers are libc and
//! ld.so, which are compiled without AVX, and for their callers these halves are dead across a call. The wide entry, for
//! all other code, saves them, and what later processors have added to them. The trampolines reach the entry by `call`,
//! with the red zone of the interrupted code already skipped.

use crate::descriptors::{BITMAP, NUMBERS};
use crate::dispatch::KINDS;
use crate::local::INSIDE;
use crate::raw::Arguments;

std::arch::global_asm!(
    ".text",
    ".globl hearth_entry", ".hidden hearth_entry", ".type hearth_entry, @function",
    ".p2align 5",
    "hearth_entry:",
    "pushfq",
    "cmp rax, {kinds_count}",
    "jae 9f",
    "lea r11, [rip + {kinds}]",
    "movzx ecx, byte ptr [r11 + rax]",
    "test ecx, ecx",
    "jz 9f",
    "mov r11, qword ptr [rip + hearth_local@GOTTPOFF]",
    "mov r11d, dword ptr fs:[r11]",
    "test r11d, r11d",
    "jnz 5f",
    "cmp ecx, 1",
    "jne 6f",
    "cmp edi, {numbers}",
    "jae 9f",
    "mov ecx, edi",
    "shr ecx, 6",
    "lea r11, [rip + {bitmap}]",
    "mov r11, qword ptr [r11 + rcx*8]",
    "bt r11, rdi",
    "jc 6f",
    "9:",
    "popfq",
    "syscall",
    "ret",
    "5:",
    "test r11d, {inside}",
    "jz 6f",
    // A process beside this one has the same thread block.
    "lea r11, [rip + {served}]",
    "cmp dword ptr [r11], 0",
    "je 9b",
    "6:",
    "push rbp",
    "mov rbp, rsp",
    "push r9",
    "push r8",
    "push r10",
    "push rdx",
    "push rsi",
    "push rdi",
    "mov rdi, rax",
    "mov rsi, rsp",
    "sub rsp, 256",
    "and rsp, -16",
    "movaps [rsp], xmm0", "movaps [rsp + 16], xmm1", "movaps [rsp + 32], xmm2", "movaps [rsp + 48], xmm3",
    "movaps [rsp + 64], xmm4", "movaps [rsp + 80], xmm5", "movaps [rsp + 96], xmm6", "movaps [rsp + 112], xmm7",
    "movaps [rsp + 128], xmm8", "movaps [rsp + 144], xmm9", "movaps [rsp + 160], xmm10",
    "movaps [rsp + 176], xmm11", "movaps [rsp + 192], xmm12", "movaps [rsp + 208], xmm13",
    "movaps [rsp + 224], xmm14", "movaps [rsp + 240], xmm15",
    "cld",
    "call {dispatch}",
    "movaps xmm0, [rsp]", "movaps xmm1, [rsp + 16]", "movaps xmm2, [rsp + 32]", "movaps xmm3, [rsp + 48]",
    "movaps xmm4, [rsp + 64]", "movaps xmm5, [rsp + 80]", "movaps xmm6, [rsp + 96]", "movaps xmm7, [rsp + 112]",
    "movaps xmm8, [rsp + 128]", "movaps xmm9, [rsp + 144]", "movaps xmm10, [rsp + 160]",
    "movaps xmm11, [rsp + 176]", "movaps xmm12, [rsp + 192]", "movaps xmm13, [rsp + 208]",
    "movaps xmm14, [rsp + 224]", "movaps xmm15, [rsp + 240]",
    "lea rsp, [rbp - 48]",
    "pop rdi",
    "pop rsi",
    "pop rdx",
    "pop r10",
    "pop r8",
    "pop r9",
    "pop rbp",
    "popfq",
    "ret",
    // These two surround the `syscall` of clone, clone3 and vfork, which stays in its place because the kernel may
    // return from it on another stack. Both preserve every register.
    ".globl hearth_before_clone", ".hidden hearth_before_clone", ".type hearth_before_clone, @function",
    "hearth_before_clone:",
    "lea r11, [rip + {before_clone}]",
    "jmp 7f",
    ".globl hearth_after_clone", ".hidden hearth_after_clone", ".type hearth_after_clone, @function",
    "hearth_after_clone:",
    "lea r11, [rip + {after_clone}]",
    "7:",
    "pushfq",
    "push rbp",
    "mov rbp, rsp",
    "push rax",
    "push rdi",
    "push rsi",
    "push rdx",
    "push r10",
    "push r8",
    "push r9",
    "push r9",
    "mov rsi, rdi",
    "mov rdi, rax",
    "sub rsp, 256",
    "and rsp, -16",
    "movaps [rsp], xmm0", "movaps [rsp + 16], xmm1", "movaps [rsp + 32], xmm2", "movaps [rsp + 48], xmm3",
    "movaps [rsp + 64], xmm4", "movaps [rsp + 80], xmm5", "movaps [rsp + 96], xmm6", "movaps [rsp + 112], xmm7",
    "movaps [rsp + 128], xmm8", "movaps [rsp + 144], xmm9", "movaps [rsp + 160], xmm10",
    "movaps [rsp + 176], xmm11", "movaps [rsp + 192], xmm12", "movaps [rsp + 208], xmm13",
    "movaps [rsp + 224], xmm14", "movaps [rsp + 240], xmm15",
    "cld",
    "call r11",
    "movaps xmm0, [rsp]", "movaps xmm1, [rsp + 16]", "movaps xmm2, [rsp + 32]", "movaps xmm3, [rsp + 48]",
    "movaps xmm4, [rsp + 64]", "movaps xmm5, [rsp + 80]", "movaps xmm6, [rsp + 96]", "movaps xmm7, [rsp + 112]",
    "movaps xmm8, [rsp + 128]", "movaps xmm9, [rsp + 144]", "movaps xmm10, [rsp + 160]",
    "movaps xmm11, [rsp + 176]", "movaps xmm12, [rsp + 192]", "movaps xmm13, [rsp + 208]",
    "movaps xmm14, [rsp + 224]", "movaps xmm15, [rsp + 240]",
    "lea rsp, [rbp - 56]",
    "pop r9",
    "pop r8",
    "pop r10",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "pop rax",
    "pop rbp",
    "popfq",
    "ret",
    kinds_count = const crate::dispatch::KINDS_COUNT,
    kinds = sym KINDS,
    numbers = const NUMBERS,
    bitmap = sym BITMAP,
    inside = const INSIDE,
    served = sym crate::fork::SERVED,
    dispatch = sym hearth_dispatch,
    before_clone = sym crate::fork::hearth_before,
    after_clone = sym crate::fork::hearth_after,
);

std::arch::global_asm!(
    ".text",
    ".globl hearth_entry_wide", ".hidden hearth_entry_wide", ".type hearth_entry_wide, @function",
    ".p2align 5",
    "hearth_entry_wide:",
    "pushfq",
    "push rbp",
    "mov rbp, rsp",
    "sub rsp, {bytes}",
    "and rsp, -64",
    "mov r11, rax",
    "mov rcx, rdx",
    // The header of the area has to be zero.
    "xor eax, eax",
    ".irp n,0,1,2,3,4,5,6,7",
    "mov [rsp + 512 + 8 * \\n], rax",
    ".endr",
    "mov eax, {parts}",
    "xor edx, edx",
    "xsave64 [rsp]",
    "mov rax, r11",
    "mov rdx, rcx",
    "call hearth_entry",
    "mov r11, rax",
    "mov rcx, rdx",
    "mov eax, {parts}",
    "xor edx, edx",
    "xrstor64 [rsp]",
    "mov rax, r11",
    "mov rdx, rcx",
    "mov rsp, rbp",
    "pop rbp",
    "popfq",
    "ret",
    bytes = const WIDE_BYTES,
    parts = const WIDE_PARTS,
);

/// The parts of a processor's state that the wide entry saves: SSE, AVX, and the three of AVX-512.
const WIDE_PARTS: u32 = 1 << 1 | 1 << 2 | 1 << 5 | 1 << 6 | 1 << 7;
/// Bytes of the area for them, at their fixed places, on every processor.
const WIDE_BYTES: u32 = 2688;

/// The position of the wide entry among the [`addresses`].
pub const WIDE: u8 = 3;

unsafe extern "C" {
    fn hearth_entry();
    fn hearth_entry_wide();
    fn hearth_before_clone();
    fn hearth_after_clone();
}

/// The addresses that trampolines call: the common entry, the entries before and after a clone, and the wide entry.
pub fn addresses() -> [u64; 4] {
    // A processor without `xsave` has no wide registers.
    let is_wide = std::arch::is_x86_feature_detected!("xsave");
    [
        hearth_entry as *const () as u64,
        hearth_before_clone as *const () as u64,
        hearth_after_clone as *const () as u64,
        if is_wide { hearth_entry_wide as *const () as u64 } else { hearth_entry as *const () as u64 },
    ]
}

/// Serves the call, or passes it to the kernel; returns a result as the kernel would.
///
/// # Safety
/// `arguments` points to six words; the caller is the entry code.
unsafe extern "C" fn hearth_dispatch(number: u64, arguments: *const Arguments) -> i64 {
    // SAFETY: the entry code has just pushed them on the stack.
    let arguments = unsafe { *arguments };
    crate::dispatch::system_call(number, &arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything that the kernel preserves, before and after one call of the entry.
    #[repr(C, align(16))]
    #[derive(Clone, PartialEq, Debug)]
    struct Machine {
        /// rbx, rdx, rsi, rdi, r8, r9, r10, r12, r13, r14, r15, flags.
        words: [u64; 12],
        vectors: [[u8; 16]; 16],
    }

    std::arch::global_asm!(
        ".text",
        ".globl hearth_test_entry",
        ".hidden hearth_test_entry",
        // hearth_test_entry(machine, number, entry) -> rax: loads the machine, calls the entry, stores the machine.
        "hearth_test_entry:",
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "push rdi",
        "mov rax, rsi",
        "mov rbp, rdx",
        "mov r11, rdi",
        ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
        "movaps xmm\\n, [r11 + 96 + 16 * \\n]",
        ".endr",
        "mov rbx, [r11]",
        "mov rdx, [r11 + 8]",
        "mov rsi, [r11 + 16]",
        "mov rdi, [r11 + 24]",
        "mov r8, [r11 + 32]",
        "mov r9, [r11 + 40]",
        "mov r10, [r11 + 48]",
        "mov r12, [r11 + 56]",
        "mov r13, [r11 + 64]",
        "mov r14, [r11 + 72]",
        "mov r15, [r11 + 80]",
        "push qword ptr [r11 + 88]",
        "popfq",
        "call rbp",
        "mov r11, [rsp]",
        "mov rcx, [rsp]",
        "pushfq",
        "pop qword ptr [r11 + 88]",
        "mov [r11], rbx",
        "mov [r11 + 8], rdx",
        "mov [r11 + 16], rsi",
        "mov [r11 + 24], rdi",
        "mov [r11 + 32], r8",
        "mov [r11 + 40], r9",
        "mov [r11 + 48], r10",
        "mov [r11 + 56], r12",
        "mov [r11 + 64], r13",
        "mov [r11 + 72], r14",
        "mov [r11 + 80], r15",
        ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
        "movaps [r11 + 96 + 16 * \\n], xmm\\n",
        ".endr",
        "pop rdi",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbp",
        "pop rbx",
        "ret",
    );

    unsafe extern "C" {
        fn hearth_test_entry(machine: *mut Machine, number: u64, entry: u64) -> i64;
    }

    /// The carry flag and the zero flag, and the flags that are always set.
    const FLAGS: u64 = 0x247;

    #[test]
    fn registers_flags_and_vectors_come_back() {
        let vectors = std::array::from_fn(|index| [index as u8 + 0xa0; 16]);
        // getpid never concerns the library; the bitmap decides about close(-1); poll without entries is decided in
        // Rust.
        for (number, first, expected) in
            [(39, 0, i64::from(std::process::id())), (3, u64::MAX, -9), (7, 0, 0)]
        {
            // rbx, then the arguments in their registers (rdi is the fourth word), then the rest.
            let words = [1, 0, 0, first, 5, 6, 7, 8, 9, 10, 11, FLAGS];
            let before = Machine { words, vectors };
            let mut after = before.clone();
            for entry in [0, usize::from(WIDE)] {
                // SAFETY: the calls take no memory.
                let result = unsafe { hearth_test_entry(&raw mut after, number, addresses()[entry]) };
                assert_eq!(result, expected, "{number}");
                assert_eq!(after, before, "{number}");
            }
        }
        for entry in &addresses()[1..3] {
            let before = Machine { words: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, FLAGS], vectors };
            let mut after = before.clone();
            // SAFETY: the entries before and after a clone do nothing for a number that is no clone.
            let result = unsafe { hearth_test_entry(&raw mut after, 999, *entry) };
            assert_eq!((result, after), (999, before));
        }
    }
}
