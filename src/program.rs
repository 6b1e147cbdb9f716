//! Whether a program can have the library loaded before its own: if the loader ignores the library for it, the user is
//! told before it starts, since its calls would find nothing where the tree is.

use object::Endianness;
use object::elf::{EM_X86_64, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use std::env;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Bytes in which the headers of a program, or the first line of a script, are looked for.
const HEAD_BYTES: u64 = 64 << 10;

/// Why the program will not see the tree; none if it will, or if that cannot be known from here.
pub fn cannot_see_the_tree(program: &OsStr) -> Option<String> {
    let path = find(program)?;
    let (path, head) = interpreted(path)?;
    let found = path.metadata().ok()?;
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let mode = found.permissions().mode();
    let changes = (mode & 0o4000 != 0 && found.uid() != uid) || (mode & 0o2000 != 0 && found.gid() != gid);
    let why = if changes {
        "runs as another user or group than the one that starts it"
    } else if head.starts_with(b"\x7fELF\x01") {
        "is a 32-bit program"
    } else {
        misfit(&head)?
    };
    Some(format!("{} {why}", path.display()))
}

/// The file that is run for a word of a command.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let folders = env::var_os("PATH")?;
    let runs = |path: &PathBuf| {
        path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    env::split_paths(&folders).map(|folder| folder.join(program)).find(runs)
}

fn head_of(path: &Path) -> Option<Vec<u8>> {
    // Another kind of file may not answer.
    path.metadata().ok().filter(std::fs::Metadata::is_file)?;
    let mut head = Vec::new();
    File::open(path).ok()?.take(HEAD_BYTES).read_to_end(&mut head).ok()?;
    Some(head)
}

/// The program itself, or the one that runs it if it is a script, and how that begins.
fn interpreted(path: PathBuf) -> Option<(PathBuf, Vec<u8>)> {
    let head = head_of(&path)?;
    let Some(line) = head.strip_prefix(b"#!") else { return Some((path, head)) };
    let line = line.split(|byte| *byte == b'\n').next()?.trim_ascii();
    let interpreter = PathBuf::from(OsStr::from_bytes(line.split(u8::is_ascii_whitespace).next()?));
    let head = head_of(&interpreter)?;
    Some((interpreter, head))
}

/// The loader of the C library for which the library is made.
const LOADER: &[u8] = b"ld-linux-x86-64.so.2";

/// Why the library cannot be loaded into a 64-bit program; none if it can, or if the file is no such program.
fn misfit(head: &[u8]) -> Option<&'static str> {
    let header = FileHeader64::<Endianness>::parse(head).ok()?;
    let endian = header.endian().ok()?;
    if header.e_machine(endian) != EM_X86_64 {
        return Some("is for another processor");
    }
    let segments = header.program_headers(endian, head).ok()?;
    let loader = segments.iter().find_map(|segment| segment.interpreter(endian, head).transpose());
    match loader.transpose().ok()? {
        None => Some("is statically linked"),
        Some(loader) if !loader.ends_with(LOADER) => Some("is for another C library than glibc"),
        // The library is loaded into it, and sees none of its calls.
        Some(_) if is_go(segments, endian, head) => Some("is a Go program, which calls the kernel by itself"),
        Some(_) => None,
    }
}

/// The owner of a note that the linker of Go leaves.
const GO: &[u8] = b"Go";

fn is_go(
    segments: &[<FileHeader64<Endianness> as FileHeader>::ProgramHeader],
    endian: Endianness,
    head: &[u8],
) -> bool {
    segments.iter().any(|segment| {
        let Ok(Some(mut notes)) = segment.notes(endian, head) else { return false };
        std::iter::from_fn(|| notes.next().ok().flatten()).any(|note| note.name() == GO)
    })
}
