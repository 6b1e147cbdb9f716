//! The one error type of this crate. What programs on the mount see are errors of `vfs`.

use std::fmt;
use std::path::PathBuf;

/// Why there is no mount, or why it ended otherwise than by being unmounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A system call failed: which, on what, and its errno.
    System {
        /// Name of the call.
        call: &'static str,
        /// What it was about.
        path: PathBuf,
        /// The errno.
        errno: i32,
    },
    /// `/dev/fuse` needs root, or the program `fusermount3` for everybody else: what that said.
    Helper(String),
    /// That program is not installed.
    HelperMissing,
    /// The kernel speaks another protocol: its version.
    Protocol {
        /// Major version.
        major: u32,
        /// Minor version.
        minor: u32,
    },
    /// The engine has no root directory, or not under the number that the kernel expects.
    Root(Option<vfs::Error>),
    /// A thread could not be had.
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
