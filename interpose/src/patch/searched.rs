//! Results of `others` for the code of programs: a table in the user's cache folder, so that the code of a large program is
//! searched at its first start only. A compiler has 20 to 100 MB of code.
//!
//! The key of a program contains for each of its objects the build id, the file (device, inode, size, times) and the
//! place of the code. If a file changes, so does the key. An object without a build id (those of Rust's toolchains have
//! none) has to be a mapping of the file that now has its path, by the kernel's list of mappings. A program with another
//! object without a build id, or with one without a file, is searched at each start. The table has a fixed number of places, and a program
//! replaces another one that has the same place. It is used only if it belongs to this user or to root and no other user
//! can write it.

use super::cache::{HASH_BEGIN, folder, hash, hash_word, make_folder, trusted_bytes};
use super::others::{Found, Object};
use crate::raw;
use std::cell::OnceCell;
use std::ffi::{CStr, CString};
use std::ops::Range;

/// Less code than this is searched at each start.
pub const BYTES_MIN: usize = 256 << 10;
/// Changes whenever the search does.
const VERSION: u64 = 3;
/// The possible results.
const RESULTS: [Found; 3] = [
    Found { calls: false, rings: false },
    Found { calls: true, rings: false },
    Found { calls: true, rings: true },
];
const PLACES: u64 = 4096;
const PLACE_BYTES: usize = 16;
/// Bytes of the list of mappings that are read at once, and at most.
const LIST_STEP: usize = 16 << 10;
const LIST_BYTES_MAX: usize = 1 << 20;

/// A program with its libraries.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    key: [u64; 2],
}

impl Program {
    /// The program that consists of these objects; none if one of them cannot be recognized.
    pub fn of(objects: &[Object]) -> Option<Self> {
        let mut key = [HASH_BEGIN, !HASH_BEGIN];
        let mut add = |word: u64| key.iter_mut().for_each(|half| *half = hash_word(*half, word));
        add(VERSION);
        let mappings = OnceCell::new();
        for object in objects {
            let own = c"/proc/self/exe";
            let file = file(if object.path.is_empty() { own } else { object.path })?;
            match &object.build_id {
                Some(build_id) => add(hash(build_id)),
                None if are_of(mappings.get_or_init(mappings_of_files), object, &file) => add(0),
                None => return None,
            }
            file.numbers.into_iter().for_each(&mut add);
            for (offset, code) in &object.code {
                add(*offset);
                add(code.len() as u64);
            }
        }
        Some(Self { key })
    }

    fn offset(&self) -> u64 {
        self.key[0] % PLACES * PLACE_BYTES as u64
    }

    /// The key, with the result in the last two bits.
    fn entry(&self, found: Found) -> [u8; PLACE_BYTES] {
        let result = u64::from(found.calls) | u64::from(found.rings) << 1;
        let mut entry = [0; PLACE_BYTES];
        entry[..8].copy_from_slice(&self.key[0].to_le_bytes());
        entry[8..].copy_from_slice(&(self.key[1] & !3 | result).to_le_bytes());
        entry
    }

    /// The result of an earlier search; none if there was no search.
    pub fn found(&self) -> Option<Found> {
        self.found_in(folder()?)
    }

    fn found_in(&self, folder: Vec<u8>) -> Option<Found> {
        let mut entry = [0; PLACE_BYTES];
        let read = with_table(folder, libc::O_RDONLY, |fd| raw::read_at(fd, &mut entry, self.offset()).ok());
        // A place that was never used contains zeros.
        if read != Some(PLACE_BYTES) || entry == [0; PLACE_BYTES] {
            return None;
        }
        RESULTS.into_iter().find(|found| entry == self.entry(*found))
    }

    /// Stores the result of a search, and ignores failures.
    pub fn remember(&self, found: Found) {
        if let Some(folder) = folder() {
            self.remember_in(folder, found);
        }
    }

    fn remember_in(&self, folder: Vec<u8>, found: Found) {
        if let Ok(folder) = CString::new(folder.clone()) {
            make_folder(&folder);
        }
        with_table(folder, libc::O_RDWR | libc::O_CREAT, |fd| {
            let entry = self.entry(found);
            let arguments = [raw::number(fd), entry.as_ptr() as u64, entry.len() as u64, self.offset()];
            // SAFETY: the entry lives across the call.
            unsafe { raw::try_call(libc::SYS_pwrite64, &arguments) }.ok()
        });
    }
}

/// Opens the table, if it can be trusted.
fn with_table<T>(folder: Vec<u8>, flags: i32, act: impl FnOnce(i32) -> Option<T>) -> Option<T> {
    let path = CString::new([folder.as_slice(), b"/searched"].concat()).ok()?;
    let flags = flags | libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let fd = raw::open_at(libc::AT_FDCWD, &path, flags, 0o600).ok()?;
    let done = trusted_bytes(fd).and_then(|_| act(fd));
    raw::close(fd);
    done
}

/// The identity of the present contents of a file.
struct FileIdentity {
    device: (u32, u32),
    inode: u64,
    numbers: [u64; 7],
}

fn file(path: &CStr) -> Option<FileIdentity> {
    // SAFETY: a structure of integers, which the kernel fills.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    let dir = raw::number(libc::AT_FDCWD);
    let buffer = (&raw mut status) as u64;
    let mask = libc::STATX_BASIC_STATS.into();
    // SAFETY: path and structure live across the call.
    unsafe { raw::try_call(libc::SYS_statx, &[dir, path.as_ptr() as u64, 0, mask, buffer]) }.ok()?;
    let device = (status.stx_dev_major, status.stx_dev_minor);
    let (changed, written) = (status.stx_ctime, status.stx_mtime);
    let numbers = [
        u64::from(device.0) << 32 | u64::from(device.1),
        status.stx_ino,
        status.stx_size,
        changed.tv_sec.cast_unsigned(),
        changed.tv_nsec.into(),
        written.tv_sec.cast_unsigned(),
        written.tv_nsec.into(),
    ];
    Some(FileIdentity { device, inode: status.stx_ino, numbers })
}

/// A mapping of a file.
#[derive(Debug, PartialEq, Eq)]
struct FileMapping {
    place: Range<u64>,
    device: (u32, u32),
    inode: u64,
}

/// Whether all of an object's code is mapped from this file.
fn are_of(mappings: &[FileMapping], object: &Object, file: &FileIdentity) -> bool {
    object.code.iter().all(|(_, code)| {
        let place = code.as_ptr() as u64..code.as_ptr() as u64 + code.len() as u64;
        mappings.iter().any(|mapping| {
            mapping.place.start <= place.start
                && place.end <= mapping.place.end
                && (mapping.device, mapping.inode) == (file.device, file.inode)
        })
    })
}

/// The mappings of files in this process; none if the list cannot be read.
fn mappings_of_files() -> Vec<FileMapping> {
    let Ok(fd) = raw::open_at(libc::AT_FDCWD, c"/proc/self/maps", libc::O_RDONLY | libc::O_CLOEXEC, 0) else {
        return Vec::new();
    };
    let (mut list, mut bytes) = (Vec::new(), 0);
    while bytes < LIST_BYTES_MAX {
        list.resize(bytes + LIST_STEP, 0);
        match raw::read_at(fd, &mut list[bytes..], bytes as u64) {
            Ok(0) | Err(_) => break,
            Ok(read) => bytes += read,
        }
    }
    raw::close(fd);
    list.truncate(bytes);
    list.split(|byte| *byte == b'\n').filter_map(mapping_of_line).collect()
}

/// A line of the kernel's list: `start-end rights offset device inode path`, all numbers but the inode's in hexadecimal.
fn mapping_of_line(line: &[u8]) -> Option<FileMapping> {
    let mut words = line.split(|byte| *byte == b' ').map(str::from_utf8);
    let mut word = |skipped| words.nth(skipped)?.ok();
    let (start, end) = word(0)?.split_once('-')?;
    let (major, minor) = word(2)?.split_once(':')?;
    let inode = word(0)?.parse().ok().filter(|inode| *inode != 0)?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let device = |text| u32::from_str_radix(text, 16).ok();
    let device = (device(major)?, device(minor)?);
    Some(FileMapping { place: number(start)?..number(end)?, device, inode })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::PermissionsExt;

    const CODE: &[u8] = &[0xc3; 100];

    fn object(path: &std::path::Path, build_id: Option<Vec<u8>>) -> Object {
        let path = Box::leak(CString::new(path.as_os_str().as_bytes()).unwrap().into_boxed_c_str());
        Object::new(path, build_id, vec![(0x1000, CODE)])
    }

    #[test]
    fn a_program_is_known_until_one_of_its_files_changes() {
        let folder = tempfile::tempdir().unwrap();
        let cache = || folder.path().join("cache").as_os_str().as_bytes().to_vec();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        std::fs::write(&one, "one").unwrap();
        std::fs::write(&two, "two").unwrap();
        let program = || Program::of(&[object(&one, Some(vec![1])), object(&two, Some(vec![2]))]).unwrap();
        let first = program();
        assert_eq!(first.found_in(cache()), None);
        for found in RESULTS {
            first.remember_in(cache(), found);
            assert_eq!((first.found_in(cache()), program().found_in(cache())), (Some(found), Some(found)));
        }
        std::fs::write(&two, "more").unwrap();
        assert_eq!(program().found_in(cache()), None, "a file has changed");
        assert_eq!(Program::of(&[object(&one, Some(vec![1]))]).unwrap().found_in(cache()), None);
        let other = Program::of(&[object(&one, Some(vec![1])), object(&two, Some(vec![3]))]).unwrap();
        assert_eq!(other.found_in(cache()), None, "another build");
        assert_eq!(Program::of(&[object(&one, None)]), None, "no build id, and not mapped from the file");
        assert_eq!(Program::of(&[object(&folder.path().join("none"), Some(vec![1]))]), None, "no file");
        let table = folder.path().join("cache/searched");
        std::fs::set_permissions(&table, std::fs::Permissions::from_mode(0o622)).unwrap();
        assert_eq!(first.found_in(cache()), None, "another user may have written it");
    }

    /// Maps a file as the dynamic linker maps code.
    fn mapped(path: &std::path::Path) -> &'static [u8] {
        use std::os::fd::AsRawFd;
        let file = std::fs::File::open(path).unwrap();
        let bytes = file.metadata().unwrap().len() as usize;
        // SAFETY: a new private mapping, which stays.
        unsafe {
            let rights = libc::PROT_READ | libc::PROT_EXEC;
            let start =
                libc::mmap(std::ptr::null_mut(), bytes, rights, libc::MAP_PRIVATE, file.as_raw_fd(), 0);
            assert_ne!(start, libc::MAP_FAILED);
            std::slice::from_raw_parts(start.cast(), bytes)
        }
    }

    #[test]
    fn a_program_without_build_ids_is_known_while_its_files_are_those_that_are_mapped() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("library");
        std::fs::write(&library, vec![0xc3; 10_000]).unwrap();
        let code = mapped(&library);
        let program = || {
            let Object { path, .. } = object(&library, None);
            Program::of(&[Object::new(path, None, vec![(0x1000, &code[100..9_000])])])
        };
        let first = program().unwrap();
        assert_eq!(program().as_ref(), Some(&first));
        // Another build takes its place.
        let next = folder.path().join("next");
        std::fs::copy(&library, &next).unwrap();
        std::fs::rename(&next, &library).unwrap();
        assert_eq!(program(), None);
    }

    #[test]
    fn the_kernels_list_is_read() {
        let line = b"7f00a000-7f00c000 r-xp 00001000 fd:1f 4711                       /lib/\xff a.so";
        let expected = FileMapping { place: 0x7f00_a000..0x7f00_c000, device: (0xfd, 0x1f), inode: 4711 };
        assert_eq!(mapping_of_line(line), Some(expected));
        assert_eq!(mapping_of_line(b"7ffc0000-7ffc1000 rw-p 00000000 00:00 0    [stack]"), None);
        for bytes in 0..line.len() - 30 {
            let cut = mapping_of_line(&line[..bytes]);
            assert!(cut.is_none_or(|mapping| mapping.place.start == 0x7f00_a000), "{bytes}");
        }
        let own = mappings_of_files();
        let here = mapping_of_line as *const () as u64;
        assert!(own.iter().any(|mapping| mapping.place.contains(&here)), "{own:?}");
    }
}
