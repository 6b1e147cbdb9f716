//! The error type of this crate. Programs on the mount get errors of `vfs`.

use std::fmt;
use std::path::PathBuf;

/// The reasons for which a mount failed, or ended other than by unmounting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A system call failed.
    System {
        /// Name of the call.
        call: &'static str,
        /// Its path.
        path: PathBuf,
        /// The errno.
        errno: i32,
    },
    /// The output of the program `fusermount3`, which users other than root need for `/dev/fuse`.
    Helper(String),
    /// That program is not installed.
    HelperMissing,
    /// The kernel uses another version of the protocol.
    Protocol {
        /// Major version.
        major: u32,
        /// Minor version.
        minor: u32,
    },
    /// The engine has no root directory, or its number is not the one that the kernel expects.
    Root(Option<vfs::Error>),
    /// A thread could not be started.
    Host(ipc::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System { call, path, errno } => {
                write!(f, "{call} {}: {}", path.display(), std::io::Error::from_raw_os_error(*errno))
            }
            Self::Helper(said) => write!(f, "fusermount3: {said}"),
            Self::HelperMissing => {
                write!(f, "fusermount3 is not installed: install the package fuse3, or mount as root")
            }
            Self::Protocol { major, minor } => {
                write!(f, "the kernel speaks FUSE {major}.{minor}; 7.31 (Linux 5.4) or newer is needed")
            }
            Self::Root(Some(error)) => write!(f, "no root directory: {error}"),
            Self::Root(None) => write!(f, "the root directory is not inode 1"),
            Self::Host(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Error {}
