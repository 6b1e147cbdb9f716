//! Memory for one-sided operations. It always belongs to a [`Region`] of `pmem`: a pool file, or plain memory from
//! [`dram`].
//!
//! A peer's writes are plain stores: they are durable only after the owner of the region has persisted and synced
//! them. They may arrive at any time while the memory is granted, so such memory is never accessed as a slice.

use crate::error::Error;
use pmem::Region;
use std::any::Any;
use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

/// Limit of bytes that are sent inline: the number that every fabric accepts without registered memory.
pub const INLINE_BYTES_MAX: usize = 64;

/// The access that a peer has to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Write only.
    Write,
    /// Read only.
    Read,
    /// Read and write.
    Both,
}

impl Rights {
    pub(crate) fn may_write(self) -> bool {
        matches!(self, Self::Write | Self::Both)
    }

    pub(crate) fn may_read(self) -> bool {
        matches!(self, Self::Read | Self::Both)
    }
}

/// Memory registered for operations of this side: a source of writes or a target of reads.
#[derive(Clone)]
pub struct Local(Arc<Inner>);

struct Inner {
    endpoint: u64,
    region: Region,
    handle: Box<dyn Any + Send + Sync>,
}

impl Local {
    pub(crate) fn new(endpoint: u64, region: Region, handle: Box<dyn Any + Send + Sync>) -> Self {
        Self(Arc::new(Inner { endpoint, region, handle }))
    }

    /// The registered region.
    pub fn region(&self) -> &Region {
        &self.0.region
    }

    pub(crate) fn endpoint(&self) -> u64 {
        self.0.endpoint
    }

    /// The provider's registration.
    pub(crate) fn handle<T: 'static>(&self) -> &T {
        self.0.handle.downcast_ref().expect("the endpoint was compared, so the provider is the same")
    }
}

impl std::fmt::Debug for Local {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Local({:?})", self.0.region)
    }
}

/// The bytes of a write.
#[derive(Clone, Debug)]
pub enum Bytes<'a> {
    /// At most [`INLINE_BYTES_MAX`] bytes, copied during the call.
    Inline(&'a [u8]),
    /// A range of registered memory, which must not change until the write is complete.
    Registered(&'a Local, Range<u64>),
}

impl Bytes<'_> {
    pub(crate) fn count(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::Registered(_, range) => range.end.saturating_sub(range.start),
        }
    }
}

/// Checks that a range lies within a region.
pub(crate) fn check_range(region: &Region, range: &Range<u64>) -> Result<(), Error> {
    if range.start > range.end || range.end > region.bytes() {
        return Err(Error::Range);
    }
    Ok(())
}

/// Allocates zeroed memory that ends with the process.
///
/// # Errors
/// `Host`: the machine has no memory.
pub fn dram(bytes: u64) -> Result<Region, Error> {
    let last = || ipc::Error::System {
        call: "memfd",
        errno: std::io::Error::last_os_error().raw_os_error().unwrap_or(0),
    };
    // SAFETY: the name is a string that ends with a zero byte.
    let raw = unsafe { libc::memfd_create(c"hearth transport".as_ptr(), libc::MFD_CLOEXEC) };
    if raw < 0 {
        return Err(Error::Host(last()));
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let file = unsafe { OwnedFd::from_raw_fd(raw) };
    let length = libc::off_t::try_from(bytes).map_err(|_| Error::Range)?;
    // SAFETY: ftruncate uses no memory.
    if unsafe { libc::ftruncate(raw, length) } != 0 {
        return Err(Error::Host(last()));
    }
    Region::own(file).map_err(|_| Error::Memory("the machine has not so much"))
}
