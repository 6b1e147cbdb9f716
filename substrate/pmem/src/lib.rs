//! Files of a pool on a medium: makes stores durable, and builds a block allocator and an append ring on that.
//!
//! A pool is a folder of named files ([`Medium`]); each file is mapped as a whole ([`Region`]). Three operations
//! make stores durable, independent of the kind of medium: [`Region::persist`] moves bytes towards the medium,
//! [`Region::fence`] orders them, and [`Region::sync`] (a sync) returns once all persisted bytes survive
//! everything that this medium can survive. The [`ring`] for logs and the [`alloc`] for blocks are built on these.
//! [`recorded`] and [`crash`] are the test medium, on which every structure above is crashed at every point.
//!
//! Memory that another process can write is never lent out as a slice: it is copied once, and the copy is checked.

pub mod alloc;
pub mod copy;
pub mod crash;
pub mod held;
pub mod medium;
pub mod primitives;
pub mod progress;
pub mod read_mapping;
pub mod recorded;
pub mod region;
pub mod ring;

mod choices;
mod counted_space;
mod counters;
mod file_space;
mod filled;
mod fold;
mod footprint;
mod free;
mod guard;
pub mod image;
mod mapping;
mod outstanding;
mod replay;
pub mod seen;
mod short;
pub mod skipped;

pub use copy::{Fault, Sink, Source};
pub use counters::Counters;
pub use image::Image;
pub use medium::{Class, Medium, PoolLock};
pub use outstanding::StallMeter;
pub use read_mapping::ReadMapping;
pub use recorded::Recorder;
pub use region::Region;

/// Bytes of a cache line: the unit in which persistent memory accepts stores.
pub const LINE_BYTES: usize = 64;

/// Failure of an operation on a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediaError {
    /// A file of this name exists.
    Exists,
    /// No file of this name exists.
    NotFound,
    /// The medium has no space for the file.
    NoSpace,
    /// Not a valid name of a pool file: empty, too long, hidden, with a slash, or the name of the lock file.
    Name,
    /// The file is empty or larger than an address space.
    Length,
    /// Another process has the pool open.
    Locked,
    /// The medium cannot read the bytes.
    Unreadable,
    /// The bytes differ from those that were written.
    Damaged(format::DecodeError),
    /// An earlier sync of this region failed, so the contents on the medium are unknown.
    Poisoned,
    /// The file was truncated under this process, or its medium failed, where it was read or written.
    Lost,
    /// Any other error of the operating system.
    Os(i32),
}

impl MediaError {
    /// True for a lack of space or descriptors, which may end. The contents of the medium are unchanged.
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
            Self::Poisoned => write!(f, "an earlier sync failed"),
            Self::Lost => {
                write!(f, "a file was truncated, or its medium failed, where it was read or written")
            }
            Self::Os(code) => write!(f, "{}", std::io::Error::from_raw_os_error(*code)),
        }
    }
}

impl std::error::Error for MediaError {}
