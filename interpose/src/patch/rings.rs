//! Patches the calls that create an `io_uring` in other code than that of libc and ld.so. Such code is in liburing, which
//! several distributions build without libc's functions, and in programs that contain a copy of it. Of its calls the
//! library has to see only this one (see `real`).
//!
//! A compiler loads the number by `mov eax, 425`, and the `syscall` follows a few instructions later. Only this `mov`, which
//! is as long as a jump, becomes a jump; the trampoline contains the instructions from there up to the call. All other
//! instructions stay, so code that jumps to one of them finds it. The code is not decoded as a whole: the decodings of
//! `others` tell whether an instruction begins at the five bytes.
//!
//! If no trampoline can be written, the number becomes one that the kernel does not have: a program that gets ENOSYS uses
//! other calls, while one that gets a ring of which the library does not know would wait in vain.

use super::apply::{apply, replace};
use super::image::Library;
use super::others::{is_instruction, places};
use super::plan::{Assembler, JUMP_BYTES, Plan, Site};
use crate::entry;
use iced_x86::{Decoder, DecoderOptions, FlowControl, Mnemonic, OpKind, Register};

/// `mov eax, 425`
const LOAD: [u8; JUMP_BYTES] = [0xb8, 0xa9, 0x01, 0, 0];
/// `mov eax` with a number that no kernel has.
const LOAD_NONE: [u8; JUMP_BYTES] = [0xb8, 0xff, 0xff, 0xff, 0x0f];
/// Instructions after the `mov` that are considered.
const REACH: usize = 12;

/// Whether the code creates an `io_uring`.
pub fn any(code: &[u8]) -> bool {
    sites(code).next().is_some()
}

/// Patches the code.
///
/// # Safety
/// The code is a private mapping, which stays, and no other thread runs it.
pub unsafe fn patch(code: &[u8]) {
    for site in sites(code) {
        let address = site.offset;
        // SAFETY: as the caller guarantees; the bytes are those of the site, which lie in the code.
        let text = unsafe { std::slice::from_raw_parts(address as *const u8, JUMP_BYTES) };
        let library = Library { base: 0, text: (address, text), build_id: Vec::new() };
        if apply(&library, &Plan { sites: vec![site], left: 0 }).patched == 0 {
            replace(address, LOAD_NONE);
        }
    }
}

/// The sites of the code; offsets are addresses.
fn sites(code: &[u8]) -> impl Iterator<Item = Site<'static>> {
    places(code, [LOAD[0], LOAD[1]])
        .filter(|at| code[*at..].starts_with(&LOAD))
        .filter_map(|at| site(code, at))
        .filter(|site| is_instruction(code, (site.offset - code.as_ptr() as u64) as usize))
}

fn site(code: &[u8], at: usize) -> Option<Site<'static>> {
    let bytes = &code[at..];
    let offset = bytes.as_ptr() as u64;
    let mut decoder = Decoder::with_ip(64, bytes, offset, DecoderOptions::NONE);
    let mut out = Assembler::default();
    for _ in 0..=REACH {
        let from = decoder.position();
        let instruction = decoder.decode();
        if instruction.is_invalid() {
            return None;
        }
        if instruction.mnemonic() == Mnemonic::Syscall {
            out.enter(entry::WIDE);
            out.jump(instruction.next_ip());
            return Some(Site {
                offset,
                original: LOAD.as_slice().into(),
                code: out.code.into(),
                fixups: out.fixups,
            });
        }
        let goes_on =
            matches!(instruction.flow_control(), FlowControl::Next | FlowControl::ConditionalBranch);
        let into_rax = instruction.op_count() > 0
            && instruction.op0_kind() == OpKind::Register
            && instruction.op0_register().full_register() == Register::RAX;
        if !goes_on || into_rax && from > 0 {
            return None;
        }
        out.moved(&instruction, &bytes[from..decoder.position()], &decoder)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw;

    /// Code in memory of its own, which stays.
    fn executable(code: &[u8]) -> &'static [u8] {
        let memory = raw::map_anonymous(code.len()).unwrap();
        // SAFETY: mapped just now, for at least this length.
        unsafe {
            std::ptr::copy_nonoverlapping(code.as_ptr(), memory, code.len());
            let protection = (libc::PROT_READ | libc::PROT_EXEC) as u64;
            raw::try_call(libc::SYS_mprotect, &[memory as u64, code.len() as u64, protection]).unwrap();
            std::slice::from_raw_parts(memory, code.len())
        }
    }

    /// Calls the code as a function.
    fn run(code: &'static [u8], first: u64, second: u64) -> i64 {
        // SAFETY: the code is a function of two words, as each test writes it.
        unsafe {
            let function: unsafe extern "C" fn(u64, u64) -> i64 = std::mem::transmute(code.as_ptr());
            function(first, second)
        }
    }

    /// push rbx; mov eax, 425; xor edx, edx; test rdi, rdi; je over the call; syscall; pop rbx; ret; mov eax, 7; the same
    const SETUP: &[u8] = &[
        0x53, 0xb8, 0xa9, 0x01, 0, 0, 0x31, 0xd2, 0x48, 0x85, 0xff, 0x74, 0x04, 0x0f, 0x05, 0x5b, 0xc3, 0xb8,
        7, 0, 0, 0, 0x5b, 0xc3,
    ];

    #[test]
    fn a_patched_setup_does_what_the_code_says() {
        let code = executable(SETUP);
        assert!(any(code));
        // The kernel refuses a ring without a structure.
        let kernels = run(code, 1, 0);
        assert!(kernels < 0, "{kernels}");
        // SAFETY: the mapping is this test's.
        unsafe { patch(code) };
        // SAFETY: the code has changed meanwhile, so it is read again.
        let now = unsafe { std::slice::from_raw_parts(std::hint::black_box(code.as_ptr()), code.len()) };
        assert_eq!((now[1], &now[6..]), (0xe9, &SETUP[6..]), "only the load is a jump");
        assert_eq!((run(code, 1, 0), run(code, 0, 0)), (kernels, 7));
        assert!(!any(now));
    }

    #[test]
    fn without_a_trampoline_there_is_no_such_call() {
        let code = executable(SETUP);
        assert!(replace(code.as_ptr() as u64 + 1, LOAD_NONE));
        assert_eq!((run(code, 1, 0), run(code, 0, 0)), (-i64::from(libc::ENOSYS), 7));
    }

    #[test]
    fn other_uses_of_the_number_are_no_setups() {
        let any = |code: &[u8]| any(&[&[0x90; 70], code, &[0xc3]].concat());
        assert!(any(&[0xb8, 0xa9, 0x01, 0, 0, 0x0f, 0x05]));
        // mov r8d, 425
        assert!(!any(&[0x41, 0xb8, 0xa9, 0x01, 0, 0, 0x0f, 0x05]));
        // mov eax, 425; ret; syscall
        assert!(!any(&[0xb8, 0xa9, 0x01, 0, 0, 0xc3, 0x0f, 0x05]));
        // mov eax, 425; mov eax, edi; syscall
        assert!(!any(&[0xb8, 0xa9, 0x01, 0, 0, 0x89, 0xf8, 0x0f, 0x05]));
        assert!(!any(&[0xb8, 0xa9, 0x01, 0, 0]));
        // mov eax, 426; syscall
        assert!(!any(&[0xb8, 0xaa, 0x01, 0, 0, 0x0f, 0x05]));
    }
}
