//! Applies a plan: writes trampolines within reach of the library, then a jump over each window.
//!
//! Memory is never writable and executable at the same time. While the library's text is writable it cannot run, and
//! the library's `memcpy` is part of it. So everything is prepared before, and one block of assembly makes the text
//! writable, stores all jumps, and makes it executable again.

use super::image::Library;
use super::plan::{FixupTarget, JUMP_BYTES, Plan, Site, WINDOW_BYTES_MAX};
use crate::entry;
use crate::raw;

const PAGE: u64 = 4096;
/// Distance between the addresses that are tried for the trampolines, and number of tries on each side.
const STEP: u64 = 8 << 20;
const TRIES: u64 = 100;
/// Bytes before the first trampoline: the entry code's addresses.
const HEAD: usize = 64;
const TRAP: u8 = 0xcc;

/// How many `syscall` instructions were patched, and how many were not.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Patched.
    pub patched: u32,
    /// Not patched, although their call may concern the library.
    pub left: u32,
}

/// Bytes to be stored at an address; read by the assembly.
#[repr(C)]
struct Store {
    address: u64,
    length: u64,
    bytes: [u8; WINDOW_BYTES_MAX],
}

const _: () = assert!(size_of::<Store>() == 56);

/// Patches a library.
pub fn apply(library: &Library, plan: &Plan<'_>) -> Outcome {
    let all = plan.sites.len() as u32 + plan.left;
    let (start, text) = library.text;
    let same = |site: &&Site<'_>| {
        let at = (site.offset - start) as usize;
        text[at..at + site.original.len()] == site.original[..]
    };
    let sites: Vec<&Site<'_>> = plan.sites.iter().filter(same).collect();
    let bytes = HEAD + sites.iter().map(|site| site.code.len().next_multiple_of(16)).sum::<usize>();
    let bytes = (bytes as u64).next_multiple_of(PAGE);
    let Some(block) = map_near(library.base + start, bytes) else { return Outcome { patched: 0, left: all } };
    let stores = write_trampolines(library, &sites, block, bytes);
    let executable = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    // SAFETY: the block was mapped just now, for this.
    let ready = unsafe { raw::try_call(libc::SYS_mprotect, &[block, bytes, executable]) }.is_ok();
    let from = (library.base + start) / PAGE * PAGE;
    let length = (library.base + start + text.len() as u64 - from).next_multiple_of(PAGE);
    // SAFETY: the stores lie in the library's text, each a whole window of instructions that now live in a
    // trampoline, and no other thread exists that could run them.
    if ready && !stores.is_empty() && unsafe { write(from, length, &stores) } {
        return Outcome { patched: stores.len() as u32, left: all - stores.len() as u32 };
    }
    // SAFETY: nothing jumps there.
    let _ = unsafe { raw::try_call(libc::SYS_munmap, &[block, bytes]) };
    Outcome { patched: 0, left: all }
}

/// Stores another instruction of the length of a jump; false if the code cannot be made writable.
pub fn replace(address: u64, instruction: [u8; JUMP_BYTES]) -> bool {
    let mut bytes = [TRAP; WINDOW_BYTES_MAX];
    bytes[..JUMP_BYTES].copy_from_slice(&instruction);
    let store = Store { address, length: JUMP_BYTES as u64, bytes };
    let from = address / PAGE * PAGE;
    let length = (address + JUMP_BYTES as u64 - from).next_multiple_of(PAGE);
    // SAFETY: one whole instruction of the program, in code that no other thread runs.
    unsafe { write(from, length, &[store]) }
}

/// Memory that a 32-bit displacement reaches from the whole library.
fn map_near(address: u64, bytes: u64) -> Option<u64> {
    const FIXED_NOREPLACE: i32 = 0x10_0000;
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | FIXED_NOREPLACE) as u64;
    let address = address / PAGE * PAGE;
    let above = (1..=TRIES).map(|step| address.checked_add(step * STEP));
    let below = (1..=TRIES).map(|step| address.checked_sub(step * STEP));
    for hint in above.chain(below).flatten() {
        // SAFETY: the flag makes the kernel refuse an address that is in use.
        match unsafe { raw::try_call(libc::SYS_mmap, &[hint, bytes, protection, flags, u64::MAX, 0]) } {
            Ok(got) if got == hint => return Some(got),
            // A kernel that does not know the flag took the address as a hint.
            Ok(other) => {
                // SAFETY: mapped just now.
                let _ = unsafe { raw::try_call(libc::SYS_munmap, &[other, bytes]) };
            }
            Err(_) => {}
        }
    }
    None
}

/// Fills the block with trampolines; returns the jumps to them.
fn write_trampolines(library: &Library, sites: &[&Site<'_>], block: u64, bytes: u64) -> Vec<Store> {
    // SAFETY: mapped just now, writable, and known to no other code.
    let memory = unsafe { std::slice::from_raw_parts_mut(block as *mut u8, bytes as usize) };
    for (index, address) in entry::addresses().into_iter().enumerate() {
        memory[index * 8..index * 8 + 8].copy_from_slice(&address.to_le_bytes());
    }
    let mut at = HEAD;
    let mut stores = Vec::with_capacity(sites.len());
    for site in sites {
        let code = block + at as u64;
        let bytes = site.code.len();
        if fill_trampoline(library, site, block, (code, &mut memory[at..at + bytes])).is_none() {
            continue;
        }
        at += bytes.next_multiple_of(16);
        let address = library.base + site.offset;
        let Some(distance) = displacement(address + JUMP_BYTES as u64, code) else { continue };
        let mut bytes = [TRAP; WINDOW_BYTES_MAX];
        bytes[0] = 0xe9;
        bytes[1..JUMP_BYTES].copy_from_slice(&distance.to_le_bytes());
        stores.push(Store { address, length: site.original.len() as u64, bytes });
    }
    stores
}

/// Writes the trampoline of a site to its address. None if it cannot run there.
fn fill_trampoline(
    library: &Library,
    site: &Site<'_>,
    block: u64,
    (address, code): (u64, &mut [u8]),
) -> Option<()> {
    code.copy_from_slice(&site.code);
    for fixup in &site.fixups {
        let to = match fixup.to {
            FixupTarget::Library(offset) => library.base.checked_add(offset)?,
            FixupTarget::Entry(entry) => block + 8 * u64::from(entry),
        };
        let distance = displacement(address + u64::from(fixup.from), to)?;
        let at = usize::from(fixup.at);
        code[at..at + 4].copy_from_slice(&distance.to_le_bytes());
    }
    Some(())
}

fn displacement(from: u64, to: u64) -> Option<i32> {
    i32::try_from(to.wrapping_sub(from).cast_signed()).ok()
}

/// Makes a range writable, stores the jumps, and makes it executable again. False if the range could not be made
/// writable; then nothing was stored.
///
/// # Safety
/// The stores are within the range, and no thread runs code in it.
unsafe fn write(from: u64, length: u64, stores: &[Store]) -> bool {
    let result: i64;
    // SAFETY: as the caller guarantees; the code between the two calls never leaves this block.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 3f",
            "2:",
            "mov rdi, [r8]",
            "mov rcx, [r8 + 8]",
            "lea rsi, [r8 + 16]",
            "rep movsb",
            "add r8, 56",
            "dec r9",
            "jnz 2b",
            "mov rdi, r12",
            "mov rsi, r13",
            "mov edx, {executable}",
            "mov eax, {mprotect}",
            "syscall",
            "3:",
            executable = const libc::PROT_READ | libc::PROT_EXEC,
            mprotect = const libc::SYS_mprotect,
            inlateout("rax") libc::SYS_mprotect => result,
            inout("rdi") from => _,
            inout("rsi") length => _,
            inout("rdx") (libc::PROT_READ | libc::PROT_WRITE) as u64 => _,
            inout("r8") stores.as_ptr() => _,
            inout("r9") stores.len() => _,
            in("r12") from,
            in("r13") length,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}
