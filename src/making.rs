//! The files and folders of which a new cluster is made, remembered, so that a cluster whose first start fails can be
//! removed again: only what existed before stays.

use crate::error::{Error, Result};
use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The files and folders that were made.
#[derive(Debug, Default)]
pub struct CreatedFiles {
    /// Folders that others may use too, in the order in which they were made.
    shared: Vec<PathBuf>,
    /// Folders and files of the cluster alone, with their contents.
    own: Vec<PathBuf>,
}

impl CreatedFiles {
    /// Makes a folder, and those that it lies in.
    ///
    /// # Errors
    /// One cannot be made.
    pub fn shared(&mut self, folder: &Path) -> Result<()> {
        let missing = |above: &&Path| !above.as_os_str().is_empty() && fs::symlink_metadata(above).is_err();
        let missing: Vec<&Path> = folder.ancestors().take_while(missing).collect();
        for path in missing.into_iter().rev() {
            if made(path, 0o777)? {
                self.shared.push(path.to_owned());
            }
        }
        // Something else may stand there.
        fs::create_dir_all(folder).map_err(Error::at("make", folder))
    }

    /// Makes a folder of the cluster's own with these permissions; it may be there already.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn own(&mut self, folder: &Path, mode: u32) -> Result<()> {
        if made(folder, mode)? {
            self.own.push(folder.to_owned());
        }
        Ok(())
    }

    /// A file of the cluster's own, which was not there before.
    pub fn file(&mut self, file: PathBuf) {
        self.own.push(file);
    }

    /// Takes all of it away, as far as it can be.
    pub fn take_away(self) {
        for path in self.own.iter().rev() {
            let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        }
        for folder in self.shared.iter().rev() {
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Makes a folder; false if it was there.
fn made(folder: &Path, mode: u32) -> Result<bool> {
    match DirBuilder::new().mode(mode).create(folder) {
        Ok(()) => Ok(true),
        Err(why) if why.kind() == ErrorKind::AlreadyExists && folder.is_dir() => Ok(false),
        Err(why) => Err(Error::at("make", folder)(why)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_there_before_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (there, new) = (dir.path().join("there"), dir.path().join("there/new/folder"));
        fs::create_dir(&there).unwrap();
        let mut made = CreatedFiles::default();
        made.shared(&new).unwrap();
        made.own(&there, 0o700).unwrap();
        made.own(&new.join("own"), 0o700).unwrap();
        fs::write(new.join("own/file"), "gone with it").unwrap();
        made.take_away();
        assert!(there.is_dir() && !there.join("new").exists());
    }
}
