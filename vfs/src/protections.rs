//! The checks that Linux makes above all file systems, if the machine's settings `fs.protected_*` ask for them: they
//! refuse hard links to files of other users, and links and files that another user has placed in a directory to which
//! many users may write.
//!
//! A process checks itself. The daemon does not repeat these checks, because they protect a process from other users,
//! and not the tree from a process.

use crate::access::{self, Caller, READ, SET_GID, SET_UID, STICKY, WRITE};
use crate::engine::{Attributes, Result};
use crate::error::Error;
use format::record::FileType;

/// Execute permission of the group.
const GROUP_EXECUTE: u32 = 0o010;
/// Write permission of the group.
const GROUP_WRITE: u32 = 0o020;
/// Write permission of all others.
const OTHERS_WRITE: u32 = 0o002;

/// The settings of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Protections {
    /// `fs.protected_hardlinks`: 0 or 1.
    pub hardlinks: u8,
    /// `fs.protected_symlinks`: 0 or 1.
    pub symlinks: u8,
    /// `fs.protected_fifos`: 0; 1 for directories to which everyone may write, 2 also for those of a group.
    pub fifos: u8,
    /// `fs.protected_regular`: as for pipes.
    pub regular: u8,
}

impl Protections {
    /// No restriction: the settings of a kernel to which nothing was told.
    pub const NONE: Self = Self { hardlinks: 0, symlinks: 0, fifos: 0, regular: 0 };

    /// Whether a caller may give the inode another name.
    pub fn permit_link(self, caller: &Caller, inode: &Attributes) -> bool {
        self.hardlinks == 0 || caller.owns(inode) || is_safe_to_link(caller, inode)
    }

    /// Check for following a symbolic link at the end of a path, in this directory.
    ///
    /// # Errors
    /// `Denied`.
    pub fn follow(self, caller: &Caller, directory: &Attributes, link: &Attributes) -> Result<()> {
        let shared = directory.mode & (STICKY | OTHERS_WRITE) == STICKY | OTHERS_WRITE;
        let trusted = link.uid == caller.uid || link.uid == directory.uid;
        if self.symlinks != 0 && shared && !trusted { Err(Error::Denied) } else { Ok(()) }
    }

    /// Check for opening an existing file in this directory with `O_CREAT`. Devices and sockets are checked whatever
    /// the settings are, as in Linux.
    ///
    /// # Errors
    /// `Denied`.
    pub fn open_to_create(self, caller: &Caller, directory: &Attributes, file: &Attributes) -> Result<()> {
        let level = match file.file_type {
            FileType::Regular => self.regular,
            FileType::Fifo => self.fifos,
            _ => 1,
        };
        let trusted = file.uid == directory.uid || file.uid == caller.uid;
        if directory.mode & STICKY == 0 || level == 0 || trusted {
            return Ok(());
        }
        let shared = directory.mode & OTHERS_WRITE != 0 || (level >= 2 && directory.mode & GROUP_WRITE != 0);
        if shared { Err(Error::Denied) } else { Ok(()) }
    }
}

/// Whether a user who does not own the file may link it: a regular file that the user may read and write, and that
/// gives a program no rights of its owner or group.
fn is_safe_to_link(caller: &Caller, file: &Attributes) -> bool {
    let runs_as_group = file.mode & (SET_GID | GROUP_EXECUTE) == SET_GID | GROUP_EXECUTE;
    file.file_type == FileType::Regular
        && file.mode & SET_UID == 0
        && !runs_as_group
        && access::permits(caller, file, READ | WRITE)
}
