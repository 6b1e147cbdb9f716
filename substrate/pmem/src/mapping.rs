//! A file mapped whole, shared. It lends no references: all access is by copies, checked against its bounds.

use crate::MediaError;
use crate::copy::{self, Fault, Sink};
use crate::primitives;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// From this size on huge pages are asked for.
const HUGE_PAGE_BYTES: usize = 2 << 20;

pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    writable: bool,
}

// SAFETY: the mapping is an address range that stays until drop; it is accessed by copies which tolerate concurrent
// change, so any thread may use it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps all of a file.
    pub fn new(file: BorrowedFd<'_>, writable: bool) -> Result<Self, MediaError> {
        let bytes = file_bytes(file)?;
        let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if start == libc::MAP_FAILED {
            return Err(MediaError::last_os());
        }
        if bytes >= HUGE_PAGE_BYTES {
            // SAFETY: the range is the new mapping. A hint: that a file system has no huge pages is no error.
            unsafe { libc::madvise(start, bytes, libc::MADV_HUGEPAGE) };
        }
        let start = NonNull::new(start.cast()).expect("the kernel maps nothing at address zero unasked");
        Ok(Self { start, bytes, writable })
    }

    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// The address of a range within the mapping.
    #[inline]
    fn at(&self, offset: u64, bytes: usize) -> *mut u8 {
        let offset = usize::try_from(offset).expect("an offset within a mapping fits an address");
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(fits, "access of {bytes} bytes at {offset} within a mapping of {} bytes", self.bytes);
        // SAFETY: the offset is within the mapping or at its end.
        unsafe { self.start.as_ptr().add(offset) }
    }

    #[inline]
    fn at_writable(&self, offset: u64, bytes: usize) -> *mut u8 {
        assert!(self.writable, "a store into a region that was opened for reading");
        self.at(offset, bytes)
    }

    pub fn read(&self, offset: u64, target: &mut [u8]) {
        let source = self.at(offset, target.len());
        // SAFETY: the source is within the mapping, the target is ours, and no slice overlaps a mapping that lends
        // none.
        unsafe { copy::copy(target.as_mut_ptr(), source, target.len()) }
            .expect("a fault handler catches only faults of a caller's memory");
    }

    pub fn read_to(&self, offset: u64, sink: &mut Sink<'_>, bytes: usize) -> Result<(), Fault> {
        let source = self.at(offset, bytes);
        // SAFETY: the source is within the mapping.
        unsafe { sink.put_raw(source, bytes) }
    }

    #[inline]
    pub fn write(&self, offset: u64, source: &[u8]) {
        let target = self.at_writable(offset, source.len());
        // SAFETY: the target is within the mapping, which lends no references.
        unsafe { primitives::write(target, source) };
    }

    pub fn store(&self, offset: u64, source: &[u8]) {
        let target = self.at_writable(offset, source.len());
        // SAFETY: the target is within the mapping, which lends no references.
        unsafe { primitives::store(target, source) };
    }

    pub fn write_back(&self, range: Range<u64>) {
        let bytes = usize::try_from(range.end.saturating_sub(range.start)).expect("a range fits an address");
        // SAFETY: the range is within the mapping.
        unsafe { primitives::write_back(self.at(range.start, bytes), bytes) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is what `new` mapped, and nobody holds a reference into it. Nothing is written: it only
        // ends the view.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Length of a file that can be mapped.
fn file_bytes(file: BorrowedFd<'_>) -> Result<usize, MediaError> {
    // SAFETY: stat is plain old data.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and the structure is ours.
    if unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) } != 0 {
        return Err(MediaError::last_os());
    }
    match usize::try_from(stat.st_size) {
        Ok(bytes) if bytes > 0 && isize::try_from(bytes).is_ok() => Ok(bytes),
        _ => Err(MediaError::Length),
    }
}
