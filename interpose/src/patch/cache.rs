//! A cache of plans, in one file for each build of a library, in the user's cache folder: decoding a libc takes longer
//! than most programs run.
//!
//! A file is used only if it belongs to this user or to root and no other user can write it, if its checksum is right,
//! and if it was made for this build, this table of calls and this code. It is written under a temporary name and
//! renamed, so several processes can write it at once. Every site is compared with the library's bytes again before it
//! is used.

use super::image::Library;
use super::plan::{Fixup, FixupTarget, Plan, Site, WINDOW_BYTES_MAX};
use crate::dispatch::KINDS;
use crate::raw;
use std::ffi::CString;

const MAGIC: &[u8; 8] = b"HEARTHPL";
/// Changes whenever the trampolines or the checksum change.
const VERSION: u64 = 3;
const FILE_BYTES_MAX: usize = 1 << 20;
const CODE_BYTES_MAX: usize = 200;

pub(super) const HASH_BEGIN: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a over words of 64 bits, with a rotation so that high bits also reach the low ones; the last word is padded.
/// Each start of a program computes it over a whole plan.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let hash = words.iter().fold(HASH_BEGIN, |hash, word| hash_word(hash, u64::from_le_bytes(*word)));
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    hash_word(hash_word(hash, u64::from_le_bytes(last)), bytes.len() as u64)
}

pub(super) fn hash_word(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

/// `$XDG_CACHE_HOME/hearth` or `~/.cache/hearth`.
pub(super) fn folder() -> Option<Vec<u8>> {
    use std::os::unix::ffi::OsStringExt;
    let from = |name: &str, rest: &[u8]| {
        let value = std::env::var_os(name)?.into_vec();
        (value.first() == Some(&b'/')).then(|| [&value, rest].concat())
    };
    from("XDG_CACHE_HOME", b"/hearth").or_else(|| from("HOME", b"/.cache/hearth"))
}

fn file_name(library: &Library) -> Vec<u8> {
    let hex: String = library.build_id.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("/patch-{hex}").into_bytes()
}

/// Reads the plan for a library into a buffer, if there is a valid one.
pub fn load<'a>(library: &Library, contents: &'a mut Vec<u8>) -> Option<Plan<'a>> {
    let path = CString::new([folder()?, file_name(library)].concat()).ok()?;
    let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let fd = raw::open_at(libc::AT_FDCWD, &path, flags, 0).ok()?;
    let whole = trusted_bytes(fd).filter(|bytes| *bytes <= FILE_BYTES_MAX).is_some_and(|bytes| {
        contents.resize(bytes, 0);
        raw::read_at(fd, contents, 0) == Ok(bytes)
    });
    raw::close(fd);
    if whole { decode(contents, library) } else { None }
}

/// Length of an open file that only this user and root can have written.
pub(super) fn trusted_bytes(fd: i32) -> Option<usize> {
    // SAFETY: a structure of integers, which the kernel fills.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the structure lives across the call.
    unsafe { raw::try_call(libc::SYS_fstat, &[raw::number(fd), (&raw mut status) as u64]) }.ok()?;
    let bytes = usize::try_from(status.st_size).ok()?;
    trusted(&status, user()).then_some(bytes)
}

fn trusted(status: &libc::stat, user: u32) -> bool {
    let regular = status.st_mode & libc::S_IFMT == libc::S_IFREG;
    let owner = status.st_uid == user || status.st_uid == 0;
    regular && owner && status.st_mode & 0o022 == 0
}

fn user() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { raw::call(libc::SYS_geteuid as u64, &[0; 6]) as u32 }
}

/// Stores a plan for the next process, and ignores failures.
pub fn store(library: &Library, plan: &Plan<'_>) {
    let Some(folder) = folder() else { return };
    let name = [folder.as_slice(), &file_name(library)].concat();
    let beside = [name.as_slice(), format!(".{}", raw::process()).as_bytes()].concat();
    let (Ok(folder), Ok(name), Ok(beside)) = (CString::new(folder), CString::new(name), CString::new(beside))
    else {
        return;
    };
    make_folder(&folder);
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    let Ok(fd) = raw::open_at(libc::AT_FDCWD, &beside, flags, 0o600) else { return };
    let bytes = encode(library, plan);
    let whole = raw::write(fd, &bytes).is_ok_and(|written| written == bytes.len());
    raw::close(fd);
    let (from, to) = (beside.as_ptr() as u64, name.as_ptr() as u64);
    // SAFETY: the strings live across the calls.
    unsafe {
        let here = raw::number(libc::AT_FDCWD);
        if !whole || raw::try_call(libc::SYS_renameat2, &[here, from, here, to, 0]).is_err() {
            let _ = raw::try_call(libc::SYS_unlinkat, &[here, from, 0]);
        }
    }
}

/// Creates the folder and its parent.
pub(super) fn make_folder(folder: &CString) {
    let bytes = folder.as_bytes();
    let parent = bytes.iter().rposition(|byte| *byte == b'/').map(|end| &bytes[..end]);
    for path in
        [parent.and_then(|parent| CString::new(parent).ok()), Some(folder.clone())].into_iter().flatten()
    {
        let here = raw::number(libc::AT_FDCWD);
        // SAFETY: the string lives across the call; the folder may exist already.
        let _ = unsafe { raw::try_call(libc::SYS_mkdirat, &[here, path.as_ptr() as u64, 0o700]) };
    }
}

fn encode(library: &Library, plan: &Plan<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    let mut word = |value: u64| out.extend_from_slice(&value.to_le_bytes());
    word(VERSION);
    word(hash(&KINDS));
    word(hash(&library.build_id));
    word(library.text.0);
    word(library.text.1.len() as u64);
    word(plan.left.into());
    word(plan.sites.len() as u64);
    for site in &plan.sites {
        out.extend_from_slice(&site.offset.to_le_bytes());
        out.extend_from_slice(&[site.original.len() as u8, site.code.len() as u8, site.fixups.len() as u8]);
        out.extend_from_slice(&site.original);
        out.extend_from_slice(&site.code);
        for fixup in &site.fixups {
            let (kind, value) = match fixup.to {
                FixupTarget::Library(offset) => (0, offset),
                FixupTarget::Entry(entry) => (1, entry.into()),
            };
            out.extend_from_slice(&[fixup.at, fixup.from, kind]);
            out.extend_from_slice(&value.to_le_bytes());
        }
    }
    [MAGIC.as_slice(), &hash(&out).to_le_bytes(), &out].concat()
}

/// Reads from the start of a slice.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(head)
    }

    fn word(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|byte| byte[0])
    }
}

/// Decodes a plan; `None` unless it is complete and made for this library and this code. Any input is safe: all writes
/// of the result are within the text and the trampolines.
fn decode<'a>(bytes: &'a [u8], library: &Library) -> Option<Plan<'a>> {
    let mut reader = Reader(bytes.strip_prefix(MAGIC)?);
    if reader.word()? != hash(reader.0) {
        return None;
    }
    let (start, text) = library.text;
    let expected = [VERSION, hash(&KINDS), hash(&library.build_id), start, text.len() as u64];
    for value in expected {
        if reader.word()? != value {
            return None;
        }
    }
    let left = u32::try_from(reader.word()?).ok()?;
    let count = reader.word()?;
    let mut sites = Vec::new();
    for _ in 0..count {
        let offset = reader.word()?;
        let (original, code, fixups) = (reader.byte()?, reader.byte()?, reader.byte()?);
        let (original, code) = (reader.take(original.into())?, reader.take(code.into())?);
        let at = usize::try_from(offset.checked_sub(start)?).ok()?;
        let fits = at.checked_add(original.len()).is_some_and(|end| end <= text.len());
        if !fits || original.len() > WINDOW_BYTES_MAX || code.len() > CODE_BYTES_MAX {
            return None;
        }
        let mut relative = Vec::with_capacity(fixups.into());
        for _ in 0..fixups {
            relative.push(fixup(&mut reader).filter(|fixup| usize::from(fixup.at) + 4 <= code.len())?);
        }
        sites.push(Site { offset, original: original.into(), code: code.into(), fixups: relative });
    }
    reader.0.is_empty().then_some(Plan { sites, left })
}

fn fixup(reader: &mut Reader<'_>) -> Option<Fixup> {
    let (at, from, kind, value) = (reader.byte()?, reader.byte()?, reader.byte()?, reader.word()?);
    let to = match kind {
        0 => FixupTarget::Library(value),
        1 => FixupTarget::Entry(u8::try_from(value).ok().filter(|entry| *entry < 3)?),
        _ => return None,
    };
    Some(Fixup { at, from, to })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::patch::image;

    #[test]
    fn a_plan_comes_back_and_damage_is_noticed() {
        let library = image::libraries().into_iter().next().unwrap();
        let plan = Plan::of(&library);
        let bytes = encode(&library, &plan);
        assert!(bytes.len() < FILE_BYTES_MAX);
        assert_eq!(decode(&bytes, &library), Some(plan));
        for at in (0..bytes.len()).step_by(97).chain([0, 8, 16, 24, 32]) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert_eq!(decode(&damaged, &library), None, "byte {at}");
            assert_eq!(decode(&bytes[..at], &library), None, "cut at {at}");
        }
        let other = Library { build_id: vec![1, 2, 3], ..library };
        assert_eq!(decode(&bytes, &other), None, "another build");
    }

    #[test]
    fn lengths_are_checked_even_with_a_valid_checksum() {
        let library = image::libraries().into_iter().next().unwrap();
        let plan = Plan::of(&library);
        let good = encode(&library, &plan);
        for at in 16..good.len().min(600) {
            for value in [0, 0xff] {
                let mut bytes = good.clone();
                bytes[at] = value;
                let sum = hash(&bytes[16..]).to_le_bytes();
                bytes[8..16].copy_from_slice(&sum);
                // Any answer, but no panic and nothing outside the text.
                for site in decode(&bytes, &library).unwrap_or_default().sites {
                    let end = site.offset + site.original.len() as u64;
                    assert!(end <= library.text.0 + library.text.1.len() as u64);
                    assert!(site.fixups.iter().all(|fixup| usize::from(fixup.at) + 4 <= site.code.len()));
                }
            }
        }
    }

    #[test]
    fn files_of_other_users_are_not_trusted() {
        // SAFETY: a structure of integers.
        let mut status: libc::stat = unsafe { std::mem::zeroed() };
        status.st_mode = libc::S_IFREG | 0o600;
        status.st_uid = 1000;
        assert!(trusted(&status, 1000) && !trusted(&status, 1001));
        status.st_mode = libc::S_IFREG | 0o622;
        assert!(!trusted(&status, 1000));
        status.st_mode = libc::S_IFIFO | 0o600;
        assert!(!trusted(&status, 1000));
    }
}
