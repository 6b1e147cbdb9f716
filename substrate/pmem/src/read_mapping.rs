//! A data segment as a client sees it: mapped read-only, from a descriptor that SharedFS passed over its socket.
//!
//! SharedFS itself maps long logs in this way ([`Region::map_for_reading`]).
//!
//! SharedFS may reuse the blocks at any moment, so the reader compares generation words before and after its copy
//! (the read path of Assise §3.2.2, with the check that block reuse needs).

use crate::copy::{Fault, Sink};
use crate::guard::{CopyGuard, Watch};
use crate::mapping::Mapping;
use crate::outstanding::Operation;
use crate::region::Region;
use crate::{MediaError, copy};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A file mapped for reading.
pub struct ReadMapping(Backing);

enum Backing {
    Mapped(Mapping),
    /// Fields are dropped in this order: the guard first.
    Guarded {
        _guard: CopyGuard,
        mapping: Mapping,
        watch: Arc<Watch>,
    },
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

    /// Maps a file, of a longer one the first `bytes_max` bytes, in a process whose handler ends copies where the file is
    /// gone.
    ///
    /// # Errors
    /// `Length` (an empty file), `Os`.
    pub(crate) fn guarded(
        file: BorrowedFd<'_>,
        bytes_max: u64,
        watch: &Arc<Watch>,
    ) -> Result<Self, MediaError> {
        let mapping = Mapping::new(file, false, bytes_max)?.not_for_children()?;
        let watch = watch.clone();
        Ok(Self(Backing::Guarded { _guard: mapping.guard_copies()?, mapping, watch }))
    }

    /// The same view without a descriptor: for test media, and for clients in the daemon's own process.
    pub fn from_region(region: Region) -> Self {
        Self(Backing::Region(region))
    }

    /// Bytes of the file when it was mapped.
    pub fn bytes(&self) -> u64 {
        match &self.0 {
            Backing::Mapped(mapping) | Backing::Guarded { mapping, .. } => mapping.bytes(),
            Backing::Region(region) => region.bytes(),
        }
    }

    /// Copies `bytes` bytes to memory of a program.
    ///
    /// # Errors
    /// `Media`, or `Fault` if the program's memory cannot be written.
    ///
    /// # Panics
    /// If the range is not within the file, or the sink is shorter.
    pub fn copy_to(&self, offset: u64, sink: &mut Sink<'_>, bytes: usize) -> Result<(), CopyError> {
        match &self.0 {
            Backing::Mapped(mapping) => mapping.read_to(offset, sink, bytes),
            Backing::Guarded { mapping, watch, .. } => {
                let _operation = Operation::begin(watch);
                mapping.read_to(offset, sink, bytes)
            }
            Backing::Region(region) => region.read_to(offset, sink, bytes),
        }
    }
}

/// Reason why a copy failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyError {
    /// The medium failed.
    Media(MediaError),
    /// The target memory is not accessible.
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
