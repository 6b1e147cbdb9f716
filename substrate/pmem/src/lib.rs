//! Regions on a medium; makes stores durable; block allocator and append ring.
//!
//! A pool is a folder of named files ([`Medium`]); each is mapped whole ([`Region`]). Three verbs make stores durable,
//! and nobody asks which medium it is: [`Region::persist`] moves towards the medium, [`Region::fence`] orders,
//! [`Region::settle`] makes what was persisted survive all that this medium can survive. On top of these stand the
//! [`ring`] for logs and the [`alloc`] for blocks; [`recorded`] and [`crash`] are the medium on which every structure
//! above is crashed at every point.
//!
//! Memory that another process can write is never lent out as a slice: it is copied once, then judged.

pub mod alloc;
pub mod copy;
pub mod crash;
pub mod medium;
pub mod primitives;
pub mod progress;
pub mod read_mapping;
pub mod recorded;
pub mod region;
pub mod ring;

mod choices;
mod fold;
mod footprint;
mod guard;
pub mod image;
mod mapping;
mod replay;
pub mod seen;
mod short;

pub use copy::{Fault, Sink, Source};
pub use image::Image;
pub use medium::{Class, Medium, PoolLock};
pub use read_mapping::ReadMapping;
pub use recorded::Recorder;
pub use region::{Counters, Region};

/// Bytes of a cache line: the unit in which persistent memory takes stores.
pub const LINE_BYTES: usize = 64;

/// Why a medium did not do what was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaError {
    /// The name is taken.
    Exists,
    /// No file of this name.
    NotFound,
    /// The medium has no room for the file.
    NoSpace,
    /// Not the name of a pool file: empty, too long, hidden, with a slash, or the lock's own.
    Name,
    /// The file is empty or larger than an address space holds.
    Length,
    /// Another process has the pool open.
    Locked,
    /// The medium could not give back what was written there.
    Unreadable,
    /// What lies there is not what was written.
    Damaged(format::DecodeError),
    /// An earlier settle of this region failed; what it holds on the medium is unknown.
    Poisoned,
    /// The file was cut under this process, or its medium failed, where it was read or written.
    Lost,
    /// The operating system's word for anything else.
    Os(i32),
}

impl MediaError {
    /// Whether something lacks that may be there again: space, or descriptors. What the medium holds is as it was.
    pub const fn is_shortage(self) -> bool {
        matches!(self, Self::NoSpace | Self::Os(libc::EMFILE | libc::ENFILE))
    }

    /// The last error of a system call.
    fn last_os() -> Self {
        Self::of_io(&std::io::Error::last_os_error())
    }

    fn of_io(error: &std::io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EEXIST) => Self::Exists,
            Some(libc::ENOENT) => Self::NotFound,
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Self::NoSpace,
            Some(code) => Self::Os(code),
            None => Self::Os(libc::EIO),
        }
    }
}

impl std::fmt::Display for MediaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exists => write!(f, "the file exists"),
            Self::NotFound => write!(f, "no such file"),
            Self::NoSpace => write!(f, "no space on the medium"),
            Self::Name => write!(f, "not a name for a pool file"),
            Self::Length => write!(f, "impossible length of a pool file"),
            Self::Locked => write!(f, "the pool is open in another process"),
            Self::Unreadable => write!(f, "the medium cannot be read here"),
            Self::Damaged(error) => write!(f, "damaged: {error}"),
            Self::Poisoned => write!(f, "an earlier settle failed"),
            Self::Lost => write!(f, "a file was cut, or its medium failed, where it was read or written"),
            Self::Os(code) => write!(f, "{}", std::io::Error::from_raw_os_error(*code)),
        }
    }
}

impl std::error::Error for MediaError {}
