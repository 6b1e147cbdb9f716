//! Programs in whose code `others` has found no system call: a table in the user's cache folder, so that the code of a
//! large program is searched at its first start only. A compiler has 20 MB of code.
//!
//! The key of a program contains for each of its objects the build id, the file (device, inode, size, times) and the
//! place of the code. If a file changes, so does the key. A program that has an object without a build id or a file is
//! searched at each start. The table has a fixed number of places, and a program replaces another one that has the same
//! place. It is used only if it belongs to this user or to root and no other user can write it.

use super::cache::{HASH_BEGIN, folder, hash, hash_word, make_folder, trusted_bytes};
use super::others::Object;
use crate::raw;
use std::ffi::{CStr, CString};

/// Less code than this is searched at each start.
pub const BYTES_MIN: usize = 256 << 10;
/// Changes whenever the search does.
const VERSION: u64 = 1;
const PLACES: u64 = 4096;
const PLACE_BYTES: usize = 16;

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
        for object in objects {
            let own = c"/proc/self/exe";
            let file = file(if object.path.is_empty() { own } else { object.path })?;
            add(hash(object.build_id.as_deref()?));
            file.into_iter().for_each(&mut add);
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

    fn entry(&self) -> [u8; PLACE_BYTES] {
        let mut entry = [0; PLACE_BYTES];
        entry[..8].copy_from_slice(&self.key[0].to_le_bytes());
        entry[8..].copy_from_slice(&self.key[1].to_le_bytes());
        entry
    }

    /// Whether an earlier search found no system call.
    pub fn is_known(&self) -> bool {
        folder().is_some_and(|folder| self.is_known_in(folder))
    }

    fn is_known_in(&self, folder: Vec<u8>) -> bool {
        let mut entry = [0; PLACE_BYTES];
        let read = with_table(folder, libc::O_RDONLY, |fd| raw::read_at(fd, &mut entry, self.offset()).ok());
        // A place that was never used contains zeros.
        read == Some(PLACE_BYTES) && entry == self.entry() && entry != [0; PLACE_BYTES]
    }

    /// Stores the result of a search that found no system call, and ignores failures.
    pub fn remember(&self) {
        if let Some(folder) = folder() {
            self.remember_in(folder);
        }
    }

    fn remember_in(&self, folder: Vec<u8>) {
        if let Ok(folder) = CString::new(folder.clone()) {
            make_folder(&folder);
        }
        with_table(folder, libc::O_RDWR | libc::O_CREAT, |fd| {
            let entry = self.entry();
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

/// Numbers that identify the present contents of a file.
fn file(path: &CStr) -> Option<[u64; 7]> {
    // SAFETY: a structure of integers, which the kernel fills.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    let dir = raw::number(libc::AT_FDCWD);
    let buffer = (&raw mut status) as u64;
    let mask = libc::STATX_BASIC_STATS.into();
    // SAFETY: path and structure live across the call.
    unsafe { raw::try_call(libc::SYS_statx, &[dir, path.as_ptr() as u64, 0, mask, buffer]) }.ok()?;
    let device = u64::from(status.stx_dev_major) << 32 | u64::from(status.stx_dev_minor);
    let (changed, written) = (status.stx_ctime, status.stx_mtime);
    Some([
        device,
        status.stx_ino,
        status.stx_size,
        changed.tv_sec.cast_unsigned(),
        changed.tv_nsec.into(),
        written.tv_sec.cast_unsigned(),
        written.tv_nsec.into(),
    ])
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
        assert!(!first.is_known_in(cache()));
        first.remember_in(cache());
        assert!(first.is_known_in(cache()) && program().is_known_in(cache()));
        std::fs::write(&two, "more").unwrap();
        assert!(!program().is_known_in(cache()), "a file has changed");
        assert!(!Program::of(&[object(&one, Some(vec![1]))]).unwrap().is_known_in(cache()));
        let other = Program::of(&[object(&one, Some(vec![1])), object(&two, Some(vec![3]))]).unwrap();
        assert!(!other.is_known_in(cache()), "another build");
        assert_eq!(Program::of(&[object(&one, None)]), None, "no build id");
        assert_eq!(Program::of(&[object(&folder.path().join("none"), Some(vec![1]))]), None, "no file");
        let table = folder.path().join("cache/searched");
        std::fs::set_permissions(&table, std::fs::Permissions::from_mode(0o622)).unwrap();
        assert!(!first.is_known_in(cache()), "another user may have written it");
    }
}
