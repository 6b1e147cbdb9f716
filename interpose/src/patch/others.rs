//! Checks all other code than that of libc, ld.so and this library. The library does not see system calls, including
//! clones, that this code makes by its own `syscall` instructions, except those that `rings` patches.
//!
//! The two bytes of a `syscall` are an instruction only if an instruction begins there, and x86 code can be decoded
//! from any address. A decoder that starts at a wrong address is usually in step after a few instructions. So the code
//! before the two bytes is decoded from several addresses, and they count as an instruction if any of these decodings
//! reaches them. In some fifty programs and libraries of Debian, none of which makes calls itself, this was wrong for
//! one of 100 such places, in a table within libcrypto's code. A wrong positive costs the process locks that it does
//! not need.

use super::{image, rings, searched};
use iced_x86::{Decoder, DecoderOptions};
use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;

const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Distances before the two bytes at which decoding starts.
const BEFORE: Range<usize> = 48..64;
/// Bytes that are searched in one step.
const BLOCK_BYTES: usize = 64;

/// A loaded object whose code is not patched.
pub struct Object {
    /// Its path; empty for the program itself.
    pub path: &'static CStr,
    pub build_id: Option<Vec<u8>>,
    /// Its code: offsets in the object, and contents.
    pub code: Vec<(u64, &'static [u8])>,
    /// The code can be written later, or cannot be read, so it cannot be checked.
    is_unknown: bool,
}

impl Object {
    /// An object whose code can be checked.
    pub fn new(path: &'static CStr, build_id: Option<Vec<u8>>, code: Vec<(u64, &'static [u8])>) -> Self {
        Self { path, build_id, code, is_unknown: false }
    }
}

/// The result of the search of a program's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Some object has a system call.
    pub calls: bool,
    /// One of these calls creates an `io_uring`.
    pub rings: bool,
}

impl Found {
    fn of<'a>(code: impl Iterator<Item = &'a [u8]>) -> Self {
        code.filter(|code| has_call(code)).fold(Self { calls: false, rings: false }, |found, code| Self {
            calls: true,
            rings: found.rings || rings::any(code),
        })
    }
}

/// Whether some loaded object makes system calls itself, or may do so. Patches those that create an `io_uring`.
pub fn any_calls() -> bool {
    let mut objects: Vec<Object> = Vec::new();
    // SAFETY: the callback gets back the vector, which lives across the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut objects).cast()) };
    let code = || objects.iter().flat_map(|object| &object.code).map(|(_, code)| *code);
    let is_large = code().map(<[u8]>::len).sum::<usize>() >= searched::BYTES_MIN;
    let program = if is_large { searched::Program::of(&objects) } else { None };
    let found = program.as_ref().and_then(searched::Program::found).unwrap_or_else(|| {
        let found = Found::of(code());
        if let Some(program) = program {
            program.remember(found);
        }
        found
    });
    if found.rings && super::threads() == Some(1) {
        code().for_each(|code| {
            // SAFETY: the code is that of a loaded object, and no other thread exists that could run it.
            unsafe { rings::patch(code) }
        });
    }
    found.calls || objects.iter().any(|object| object.is_unknown)
}

unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: libc::size_t, found: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker gives a valid structure of an object that stays loaded meanwhile; the pointer is that
    // of `any_calls`.
    unsafe {
        let info = &*info;
        if !image::is_patched(info) && !is_kernels(info) && !is_ours(info) {
            (*found.cast::<Vec<Object>>()).push(object(info));
        }
    }
    0
}

/// The object that the kernel maps (vDSO), whose few calls ask for the time.
fn is_kernels(info: &libc::dl_phdr_info) -> bool {
    // SAFETY: takes a number.
    let base = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    base != 0 && info.dlpi_addr == base
}

fn is_ours(info: &libc::dl_phdr_info) -> bool {
    segments(info).any(|(range, _)| range.contains(&(any_calls as *const () as u64)))
}

/// The address ranges of an object's segments, and their protection.
fn segments(info: &libc::dl_phdr_info) -> impl Iterator<Item = (Range<u64>, u32)> {
    // SAFETY: the dynamic linker's own table.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    headers.iter().filter(|header| header.p_type == libc::PT_LOAD).map(|header| {
        let start = info.dlpi_addr + header.p_vaddr;
        (start..start + header.p_filesz, header.p_flags)
    })
}

/// # Safety
/// The structure describes an object that stays loaded.
unsafe fn object(info: &libc::dl_phdr_info) -> Object {
    let executable = segments(info).filter(|(_, flags)| flags & libc::PF_X != 0);
    let (known, unknown): (Vec<_>, Vec<_>) =
        executable.partition(|(_, flags)| flags & libc::PF_W == 0 && flags & libc::PF_R != 0);
    let code = known.into_iter().map(|(range, _)| {
        let bytes = (range.end - range.start) as usize;
        // SAFETY: loaded segments are mapped as long as the object is, this one readable.
        let code = unsafe { std::slice::from_raw_parts(range.start as *const u8, bytes) };
        (range.start - info.dlpi_addr, code)
    });
    // SAFETY: the dynamic linker's own string, which exists as long as the object; the structure is as the caller
    // guarantees.
    let (path, build_id) = unsafe { (CStr::from_ptr(info.dlpi_name), image::build_id_of(info)) };
    Object { is_unknown: !unknown.is_empty(), ..Object::new(path, build_id, code.collect()) }
}

/// Whether there is a `syscall` in the code.
pub fn has_call(code: &[u8]) -> bool {
    places(code, SYSCALL).any(|at| reached(code, at) > 0)
}

/// The places of two bytes in the code.
pub fn places(code: &[u8], wanted: [u8; 2]) -> impl Iterator<Item = usize> {
    (0..code.len()).step_by(BLOCK_BYTES).flat_map(move |start| {
        let block = &code[start..code.len().min(start + BLOCK_BYTES + 1)];
        // Without a branch, so that the compiler vectorizes it.
        let near = block.iter().zip(&block[1..]).fold(0, |hit: u8, (one, next)| {
            hit | (u8::from(*one == wanted[0]) & u8::from(*next == wanted[1]))
        });
        let block = if near == 0 { &[] } else { block };
        let here = move |(index, two): (usize, &[u8])| (two == wanted).then_some(start + index);
        block.windows(2).enumerate().filter_map(here)
    })
}

/// Whether an instruction begins there, by most of the decodings.
pub fn is_instruction(code: &[u8], at: usize) -> bool {
    2 * reached(code, at) > BEFORE.len()
}

/// How many of the decodings that start before a place reach it.
fn reached(code: &[u8], at: usize) -> usize {
    let reaches = |from: &usize| {
        let mut decoder = Decoder::new(64, &code[*from..], DecoderOptions::NONE);
        while from + decoder.position() < at {
            let _ = decoder.decode();
        }
        from + decoder.position() == at
    };
    BEFORE.map(|before| at.saturating_sub(before)).filter(reaches).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_found_anywhere() {
        for before in [0, 1, 5, 61, 62, 63, 64, 65, 200] {
            for after in [0, 1, 70] {
                let code = [vec![0x90; before], SYSCALL.to_vec(), vec![0xc3; after]].concat();
                assert!(has_call(&code), "after {before} bytes, before {after}");
            }
        }
        assert!(!has_call(&[]) && !has_call(&[0x0f]) && !has_call(&[0xc3; 300]));
    }

    #[test]
    fn bytes_within_other_instructions_do_not_count() {
        let among = |bytes: &[u8]| [&[0x90; 20], bytes].concat().repeat(100);
        // mov eax, 0x50f
        assert!(!has_call(&among(&[0xb8, 0x0f, 0x05, 0, 0])));
        // lea rax, [rip + 0x50f00]
        assert!(!has_call(&among(&[0x48, 0x8d, 0x05, 0x00, 0x0f, 0x05, 0x00])));
        assert!(has_call(&among(&SYSCALL)));
    }

    #[test]
    fn libc_has_calls() {
        assert!(image::libraries().iter().all(|library| has_call(library.text.1)));
    }
}
