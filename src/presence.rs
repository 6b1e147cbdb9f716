//! Whether a file or a folder that a process uses has been removed. A descriptor keeps it usable after that, so the
//! process would go on with a file that no other process can find, and that is lost when the process ends.

use crate::error::{Error, Result};
use rustix::fs::{CWD, Mode, OFlags, Stat, fstat, openat, readlinkat, stat};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The text that the kernel appends to the path of a file that has no name any more.
const REMOVED: &[u8] = b" (deleted)";

/// A file or a folder, however it is called by now.
#[derive(Debug)]
pub struct Presence {
    descriptor: OwnedFd,
    /// Its path at the beginning.
    pub path: PathBuf,
}

impl Presence {
    /// Of what is there at a path now.
    ///
    /// # Errors
    /// It is not there.
    pub fn of(path: &Path) -> Result<Self> {
        let descriptor = openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        Ok(Self { descriptor: descriptor.map_err(Error::at("look at", path))?, path: path.to_owned() })
    }

    /// Whether it is what its path leads to.
    pub fn is_in_place(&self) -> bool {
        let same = |held: Stat, there: Stat| (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino);
        matches!((fstat(&self.descriptor), stat(&self.path)), (Ok(held), Ok(there)) if same(held, there))
    }

    /// Whether it was removed. A moved file is there, and so is one that cannot be examined.
    pub fn is_removed(&self) -> bool {
        let own = format!("/proc/self/fd/{}", self.descriptor.as_raw_fd());
        let Ok(now) = readlinkat(CWD, &own, Vec::new()) else { return false };
        if !now.as_bytes().ends_with(REMOVED) {
            return false;
        }
        // It may be called so.
        match (fstat(&self.descriptor), stat(OsStr::from_bytes(now.as_bytes()))) {
            (Ok(held), Ok(there)) => (held.st_dev, held.st_ino) != (there.st_dev, there.st_ino),
            (_, Err(Errno::NOENT | Errno::NOTDIR)) => true,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn what_was_removed_is_gone_and_what_was_moved_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, other) = (dir.path().join("folder"), dir.path().join("other (deleted)"));
        fs::create_dir(&folder).unwrap();
        let file = folder.join("file");
        fs::write(&file, "contents").unwrap();
        let (folder_is, file_is) = (Presence::of(&folder).unwrap(), Presence::of(&file).unwrap());
        assert!(!folder_is.is_removed() && !file_is.is_removed());
        assert!(folder_is.is_in_place() && file_is.is_in_place());
        fs::rename(&folder, &other).unwrap();
        assert!(!folder_is.is_removed() && !file_is.is_removed(), "it has another name");
        assert!(!folder_is.is_in_place() && !file_is.is_in_place());
        fs::create_dir(&folder).unwrap();
        assert!(!folder_is.is_in_place(), "it is another one");
        fs::remove_dir(&folder).unwrap();
        // Another one with its name is not it.
        fs::remove_file(other.join("file")).unwrap();
        fs::write(other.join("file"), "other").unwrap();
        assert!(!folder_is.is_removed() && file_is.is_removed());
        fs::remove_dir_all(&other).unwrap();
        assert!(folder_is.is_removed());
        assert!(Presence::of(&folder).is_err());
    }
}
