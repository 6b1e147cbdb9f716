//! The libraries to be patched, in the memory of this process.

use std::ffi::{CStr, c_int, c_void};

/// A loaded library.
pub struct Library {
    /// Address of its offset 0.
    pub base: u64,
    /// Offset of its code, and the code.
    pub text: (u64, &'static [u8]),
    /// Its build id.
    pub build_id: Vec<u8>,
}

/// Number of libraries that [`libraries`] returns, if all of them have a build id.
pub const COUNT: usize = 2;

/// libc and ld.so of this process.
pub fn libraries() -> Vec<Library> {
    let mut found: Vec<Library> = Vec::new();
    // SAFETY: the callback gets back the vector, which lives across the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut found).cast()) };
    found
}

unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: libc::size_t, found: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker gives a valid structure; the vector is `libraries`'s.
    unsafe {
        let info = &*info;
        if is_patched(info)
            && let Some(library) = library(info)
        {
            (*found.cast::<Vec<Library>>()).push(library);
        }
    }
    0
}

/// Whether an object is one of these libraries, by its name.
///
/// # Safety
/// The structure is the dynamic linker's.
pub unsafe fn is_patched(info: &libc::dl_phdr_info) -> bool {
    // SAFETY: as the caller guarantees, the name is a string.
    let name = unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes();
    let name = name.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    name == b"libc.so.6" || name.starts_with(b"ld-linux")
}

/// # Safety
/// The structure describes a library that stays loaded.
unsafe fn library(info: &libc::dl_phdr_info) -> Option<Library> {
    // SAFETY: the dynamic linker's own table.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let code =
        headers.iter().find(|header| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_X != 0)?;
    // SAFETY: loaded segments are mapped readable as long as the library is.
    let text = unsafe { contents(info, code) };
    // SAFETY: as the caller guarantees.
    let build_id = unsafe { build_id_of(info) }?;
    Some(Library { base: info.dlpi_addr, text: (code.p_vaddr, text), build_id })
}

/// # Safety
/// The header is of a segment that is mapped readable and stays so.
unsafe fn contents(info: &libc::dl_phdr_info, header: &libc::Elf64_Phdr) -> &'static [u8] {
    let start = (info.dlpi_addr + header.p_vaddr) as *const u8;
    // SAFETY: as the caller guarantees.
    unsafe { std::slice::from_raw_parts(start, header.p_memsz as usize) }
}

/// The build id of an object, if it has one in memory.
///
/// # Safety
/// The structure describes an object that stays loaded.
pub unsafe fn build_id_of(info: &libc::dl_phdr_info) -> Option<Vec<u8>> {
    // SAFETY: the dynamic linker's own table.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let loaded = |note: &&libc::Elf64_Phdr| {
        headers
            .iter()
            .filter(|header| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_R != 0)
            .any(|header| {
                let end = header.p_vaddr + header.p_filesz;
                (header.p_vaddr..end).contains(&note.p_vaddr) && note.p_vaddr + note.p_memsz <= end
            })
    };
    let notes = headers.iter().filter(|header| header.p_type == libc::PT_NOTE).filter(loaded);
    // SAFETY: the notes are part of a loaded segment, which is mapped as long as the object is.
    notes.filter_map(|note| build_id(unsafe { contents(info, note) })).next()
}

/// The build-id among a segment's notes.
fn build_id(mut notes: &[u8]) -> Option<Vec<u8>> {
    const NT_GNU_BUILD_ID: u32 = 3;
    while let Some((head, rest)) = notes.split_first_chunk::<12>() {
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (name_bytes, bytes) = (word(0) as usize, word(4) as usize);
        let name = rest.get(..name_bytes)?;
        let start = name_bytes.next_multiple_of(4);
        let contents = rest.get(start..start.checked_add(bytes)?)?;
        if word(8) == NT_GNU_BUILD_ID && name == b"GNU\0" && !contents.is_empty() {
            return Some(contents.to_vec());
        }
        notes = rest.get(start + bytes.next_multiple_of(4)..)?;
    }
    None
}
