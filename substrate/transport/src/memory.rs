//! Memory that one-sided operations touch. All of it is a [`Region`] of `pmem`: a pool file, or plain memory from
//! [`dram`].
//!
//! A peer's writes are plain stores: they survive nothing until the owner of the region has persisted and settled
//! them. They may come at any time while the grant stands, so nobody lends such memory out as a slice.

use crate::error::Error;
use pmem::Region;
use std::any::Any;
use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

/// What is sent inline at most: what every fabric takes without registered memory.
pub const INLINE_BYTES_MAX: usize = 64;

/// What a peer may do with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Write it.
    Write,
    /// Read it.
    Read,
    /// Both.
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

/// Memory registered for operations of this side: the source of writes, the target of reads.
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

    /// The memory.
    pub fn region(&self) -> &Region {
        &self.0.region
    }

    pub(crate) fn endpoint(&self) -> u64 {
        self.0.endpoint
    }

    /// What the provider made of it.
    pub(crate) fn handle<T: 'static>(&self) -> &T {
        self.0.handle.downcast_ref().expect("the endpoint was compared, so the provider is the same")
    }
}

impl std::fmt::Debug for Local {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Local({:?})", self.0.region)
    }
}

/// What is written to a peer.
#[derive(Clone, Debug)]
pub enum Bytes<'a> {
    /// At most [`INLINE_BYTES_MAX`] bytes, copied at once.
    Inline(&'a [u8]),
    /// Bytes of registered memory, which stay as they are until the write is done.
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

/// Checks that a range lies in a region.
pub(crate) fn check_range(region: &Region, range: &Range<u64>) -> Result<(), Error> {
    if range.start > range.end || range.end > region.bytes() {
        return Err(Error::Range);
    }
    Ok(())
}

/// Plain memory, zeros at first, that ends with the process.
///
/// # Errors
/// `Host`: the machine has none.
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
