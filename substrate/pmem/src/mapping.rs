//! A shared mapping of a whole file. It lends no references: all access is by copies, checked against its bounds.

use crate::copy::{self, Fault, Sink, Source};
use crate::fold::{FoldState, Folder, STRIDE};
use crate::guard::{CopyGuard, Guard, Watch};
use crate::primitives;
use crate::read_mapping::CopyError;
use crate::{LINE_BYTES, MediaError};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// Bytes of the pages that mappings consist of.
const PAGE_BYTES: usize = 4096;
/// From this size on, mappings ask for huge pages.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;
/// The largest file that is mapped: half of the addresses that a process has.
const MAPPED_BYTES_MAX: usize = 1 << 46;
/// Limit of the bytes that are mapped ahead: the largest update log, by default.
const READY_BYTES_MAX: usize = 64 << 20;

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
    /// Maps a file, of a longer one the first `bytes_max` bytes. Another process may have chosen the length of the file.
    pub fn new(file: BorrowedFd<'_>, writable: bool, bytes_max: u64) -> Result<Self, MediaError> {
        let bytes = mapped_bytes(file, bytes_max)?;
        let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        let (place, fixed) =
            if bytes >= HUGE_PAGE_BYTES { (place_for(bytes)?, libc::MAP_FIXED) } else { (null_mut(), 0) };
        // SAFETY: a new mapping, where the kernel chooses or where `place_for` reserved as many bytes for us alone.
        let start =
            unsafe { libc::mmap(place, bytes, protection, libc::MAP_SHARED | fixed, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            let error = MediaError::last_os();
            if !place.is_null() {
                // SAFETY: the range that `place_for` reserved, in which no other mapping was made since.
                unsafe { libc::munmap(place, bytes) };
            }
            return Err(error);
        }
        if bytes >= HUGE_PAGE_BYTES {
            // SAFETY: the range is the new mapping. A hint: that a file system has no huge pages is no error.
            unsafe { libc::madvise(start, bytes, libc::MADV_HUGEPAGE) };
        }
        let start = NonNull::new(start.cast()).expect("the kernel maps nothing at address zero unasked");
        Ok(Self { start, bytes, writable })
    }

    /// Excludes the mapping from children that this process forks, because a child may change its user.
    pub fn not_for_children(self) -> Result<Self, MediaError> {
        // SAFETY: the range is the mapping; it stays as it is in this process.
        if unsafe { libc::madvise(self.start.as_ptr().cast(), self.bytes, libc::MADV_DONTFORK) } != 0 {
            return Err(MediaError::last_os());
        }
        Ok(self)
    }

    /// Maps the pages of the file now, as large pages where the kernel can form them, so that no store waits for a page
    /// fault. Takes about half a millisecond for each megabyte, and is limited to the first [`READY_BYTES_MAX`] bytes.
    pub fn make_ready(&self) {
        let range = 0..self.bytes().min(READY_BYTES_MAX as u64);
        self.form_large_pages(range.clone());
        self.touch(range);
    }

    /// Forms large pages of a part, as far as the kernel can.
    pub fn form_large_pages(&self, range: Range<u64>) {
        let huge = HUGE_PAGE_BYTES as u64;
        let (first, behind) = (range.start.next_multiple_of(huge), range.end / huge * huge);
        if first < behind {
            let bytes = (behind - first) as usize;
            let start = self.at_writable(first, bytes);
            // SAFETY: the range is within the mapping, and its bytes stay as they are.
            unsafe { libc::madvise(start.cast(), bytes, libc::MADV_COLLAPSE) };
        }
    }

    /// Makes the kernel map the pages of a part of a file in memory now.
    pub fn touch(&self, range: Range<u64>) {
        let bytes =
            usize::try_from(range.end - range.start).expect("a part of a mapping fits an address space");
        let start = self.at_writable(range.start, bytes);
        // SAFETY: the range is within the mapping, and its bytes stay as they are. Where the kernel cannot, the pages
        // come as they are touched.
        unsafe {
            libc::madvise(start.cast(), bytes, libc::MADV_POPULATE_WRITE);
        }
    }

    /// Writes all stores to the medium, and waits.
    pub fn sync(&self) -> Result<(), MediaError> {
        // SAFETY: the range is the mapping; its bytes stay as they are.
        if unsafe { libc::msync(self.start.as_ptr().cast(), self.bytes, libc::MS_SYNC) } != 0 {
            return Err(MediaError::last_os());
        }
        Ok(())
    }

    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Guards the pages under a name. The guard must be dropped before the mapping.
    pub fn guard(&self, watch: &Arc<Watch>, name: &str) -> Result<Guard, MediaError> {
        Guard::new(watch, name, self.start.as_ptr() as usize, self.bytes.next_multiple_of(PAGE_BYTES))
    }

    /// Lets copies from the pages end where the file is gone. The guard must be dropped before the mapping.
    pub fn guard_copies(&self) -> Result<CopyGuard, MediaError> {
        CopyGuard::new(self.start.as_ptr() as usize, self.bytes.next_multiple_of(PAGE_BYTES))
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
            .expect("the pages of this mapping stay, or a guard replaces them");
    }

    pub fn read_to(&self, offset: u64, sink: &mut Sink<'_>, bytes: usize) -> Result<(), CopyError> {
        let source = self.at(offset, bytes);
        // SAFETY: the source is within the mapping.
        let copied = unsafe { sink.put_raw(source, bytes) };
        copied.map_err(|fault| {
            let there = self.is_there(offset, bytes);
            if there { CopyError::Fault(fault) } else { CopyError::Media(MediaError::Unreadable) }
        })
    }

    /// True if a range can be read. Its pages are gone if the file was truncated or the medium failed there.
    fn is_there(&self, offset: u64, bytes: usize) -> bool {
        let last = bytes.saturating_sub(1);
        let mut offsets = (0..bytes).step_by(PAGE_BYTES).chain([last]);
        offsets.all(|within| {
            let mut byte = 0;
            // SAFETY: the source is within the mapping, the target is ours.
            unsafe { copy::copy(&raw mut byte, self.at(offset + within as u64, 1), 1) }.is_ok()
        })
    }

    #[inline]
    pub fn write(&self, offset: u64, source: &[u8]) {
        let target = self.at_writable(offset, source.len());
        // SAFETY: the target is within the mapping, which lends no references.
        unsafe { primitives::write(target, source) };
    }

    /// Writes whole lines, given as words. The offset is on a line.
    #[inline]
    pub fn write_words(&self, offset: u64, words: &[u64]) {
        let bytes = size_of_val(words);
        assert!(offset.is_multiple_of(LINE_BYTES as u64) && bytes.is_multiple_of(LINE_BYTES), "whole lines");
        let target = self.at_writable(offset, bytes);
        // SAFETY: the target is within the mapping, which lends no references and begins on a page; whole lines of it
        // were asserted.
        unsafe { primitives::write_words(target, words) };
    }

    /// Writes whole lines of a source, which `keep` gets too. The offset is on a line.
    #[inline]
    pub fn write_lines(
        &self,
        offset: u64,
        source: &mut Source<'_>,
        keep: &mut [MaybeUninit<u8>],
    ) -> Result<(), Fault> {
        assert!(
            offset.is_multiple_of(LINE_BYTES as u64) && keep.len().is_multiple_of(LINE_BYTES),
            "whole lines"
        );
        let target = self.at_writable(offset, keep.len());
        // SAFETY: the target is within the mapping, which lends no references and begins on a page; whole lines of it
        // were asserted.
        unsafe { source.take_lines(keep, target) }
    }

    /// Writes whole strides of a source, folded into a state. The offset is on a line.
    #[inline]
    pub fn write_folded(
        &self,
        _proof: Folder,
        offset: u64,
        (source, bytes): (&mut Source<'_>, usize),
        state: &mut FoldState,
    ) -> Result<(), Fault> {
        assert!(offset.is_multiple_of(LINE_BYTES as u64) && bytes.is_multiple_of(STRIDE), "whole strides");
        let target = self.at_writable(offset, bytes);
        // SAFETY: the target is within the mapping, which lends no references and begins on a page; whole strides of it
        // were asserted; the proof says that the processor folds, and it was asked how.
        unsafe { source.take_folded(state, target, bytes, copy::folds_by_lines()) }
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
        // SAFETY: the range is the one that `new` mapped, and no reference into it exists. The call writes nothing: it only
        // ends the view.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Reserves address space that begins on the boundary of a huge page.
fn place_for(bytes: usize) -> Result<*mut libc::c_void, MediaError> {
    let reserved = bytes.checked_add(HUGE_PAGE_BYTES).ok_or(MediaError::Length)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
    let start = unsafe { libc::mmap(null_mut(), reserved, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(MediaError::last_os());
    }
    let before = start.align_offset(HUGE_PAGE_BYTES);
    let end = (before + bytes).next_multiple_of(PAGE_BYTES);
    // SAFETY: both ranges are of the mapping made just now, and what lies between them is kept.
    unsafe {
        let place = start.byte_add(before);
        if before > 0 {
            libc::munmap(start, before);
        }
        if end < reserved {
            libc::munmap(start.byte_add(end), reserved - end);
        }
        Ok(place)
    }
}

/// Length of a file that can be mapped.
fn mapped_bytes(file: BorrowedFd<'_>, bytes_max: u64) -> Result<usize, MediaError> {
    // SAFETY: stat is plain old data.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and the structure is ours.
    if unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) } != 0 {
        return Err(MediaError::last_os());
    }
    let bytes = u64::try_from(stat.st_size).map(|bytes| bytes.min(bytes_max));
    match bytes.map(usize::try_from) {
        Ok(Ok(bytes)) if (1..=MAPPED_BYTES_MAX).contains(&bytes) => Ok(bytes),
        _ => Err(MediaError::Length),
    }
}
