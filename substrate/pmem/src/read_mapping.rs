//! A data segment as a client sees it: mapped for reading, from a descriptor that SharedFS passed over its socket.
//!
//! What lies there may be reused at any moment; the reader compares generations after its copy (§3.2.2 of the
//! paper's read path, with the check that our daemon's block reuse needs).

use crate::copy::{Fault, Sink};
use crate::mapping::Mapping;
use crate::region::Region;
use crate::{MediaError, copy};
use std::os::fd::{AsFd, OwnedFd};

/// A file mapped for reading.
pub struct ReadMapping(Backing);

enum Backing {
    Mapped(Mapping),
    Region(Region),
}

impl ReadMapping {
    /// Maps the whole file; the descriptor is closed, and children of this process do not have the mapping.
    ///
    /// # Errors
    /// `Length` (an empty file), `Os`.
    pub fn from_fd(file: OwnedFd) -> Result<Self, MediaError> {
        Ok(Self(Backing::Mapped(Mapping::new(file.as_fd(), false, u64::MAX)?.not_for_children()?)))
    }

    /// The same view where no descriptor can be passed: media of tests, and clients in the daemon's own process.
    pub fn from_region(region: Region) -> Self {
        Self(Backing::Region(region))
    }

    /// Bytes of the file when it was mapped.
    pub fn bytes(&self) -> u64 {
        match &self.0 {
            Backing::Mapped(mapping) => mapping.bytes(),
            Backing::Region(region) => region.bytes(),
        }
    }

    /// Copies `bytes` bytes to memory that a program gave.
    ///
    /// # Errors
    /// `Media`, or `Fault` if the program's memory cannot be written.
    ///
    /// # Panics
    /// If the range is not within the file, or the sink is shorter.
    pub fn copy_to(&self, offset: u64, sink: &mut Sink<'_>, bytes: usize) -> Result<(), CopyError> {
        match &self.0 {
            Backing::Mapped(mapping) => mapping.read_to(offset, sink, bytes),
            Backing::Region(region) => region.read_to(offset, sink, bytes),
        }
    }
}

/// Why bytes did not come out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyError {
    /// The medium.
    Media(MediaError),
    /// The memory to copy to.
    Fault(copy::Fault),
}

impl From<Fault> for CopyError {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<MediaError> for CopyError {
    fn from(error: MediaError) -> Self {
        Self::Media(error)
    }
}
