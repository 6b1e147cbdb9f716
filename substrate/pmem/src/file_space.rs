//! Space of files: allocated before the first store, and given back.
//!
//! Guarantees: where space was allocated no store finds the medium full, until it is given back.

use crate::MediaError;
use crate::medium::Class;
use crate::outstanding::note_progress;
use crate::region::LARGE_PAGE_BYTES;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// The part of a file that gets space with this one, on a file system with a page cache: a large page of the cache may have several
/// blocks, and a store to one of them fails on a full disk if another has no space.
pub(crate) fn whole_pages(class: Class, range: Range<u64>, file_bytes: u64) -> Range<u64> {
    match class {
        Class::Memory | Class::Recorded => range,
        Class::File => {
            range.start / LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
                ..range.end.next_multiple_of(LARGE_PAGE_BYTES).min(file_bytes).max(range.end)
        }
    }
}

/// The whole pages within a part.
pub(crate) fn pages_within(class: Class, range: Range<u64>) -> Range<u64> {
    match class {
        Class::Memory | Class::Recorded => range,
        Class::File => {
            range.start.next_multiple_of(LARGE_PAGE_BYTES)..range.end / LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
        }
    }
}

/// Sets the length of a new file, and allocates space for its first `reserved` bytes.
pub(crate) fn allocate(file: &OwnedFd, (bytes, reserved): (u64, u64)) -> Result<(), MediaError> {
    reserve(file.as_fd(), 0..reserved)?;
    let length = libc::off_t::try_from(bytes).map_err(|_| MediaError::Length)?;
    // SAFETY: the descriptor is open.
    match unsafe { libc::ftruncate(file.as_raw_fd(), length) } {
        0 => Ok(()),
        _ => Err(MediaError::last_os()),
    }
}

/// Allocates space for a part of a file, and leaves what the part contains.
pub(crate) fn reserve(file: BorrowedFd<'_>, range: Range<u64>) -> Result<(), MediaError> {
    let offset = |bytes: u64| libc::off_t::try_from(bytes).map_err(|_| MediaError::Length);
    let (start, length) = (offset(range.start)?, offset(range.end.saturating_sub(range.start))?);
    loop {
        // SAFETY: the descriptor is open.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, start, length) } == 0 {
            return Ok(());
        }
        match MediaError::last_os() {
            MediaError::Os(libc::EINTR) => {}
            MediaError::Os(libc::EOPNOTSUPP | libc::ENOSYS) => return write_again(file, range),
            error => return Err(error),
        }
    }
}

/// Gives back the space of a part of a file, which reads as zeros from then on.
pub(crate) fn give_back(file: BorrowedFd<'_>, range: Range<u64>) -> Result<(), MediaError> {
    let offset = |bytes: u64| libc::off_t::try_from(bytes).map_err(|_| MediaError::Length);
    let (start, length) = (offset(range.start)?, offset(range.end.saturating_sub(range.start))?);
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: the descriptor is open.
    match unsafe { libc::fallocate(file.as_raw_fd(), mode, start, length) } {
        0 => Ok(()),
        _ => Err(MediaError::last_os()),
    }
}

/// Bytes for which a file has space.
pub(crate) fn space_of(file: BorrowedFd<'_>) -> Result<u64, MediaError> {
    const UNIT: u64 = 512;
    let mut found = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the descriptor is open, and the structure has its size.
    if unsafe { libc::fstat(file.as_raw_fd(), found.as_mut_ptr()) } != 0 {
        return Err(MediaError::last_os());
    }
    // SAFETY: the call above filled it.
    let found = unsafe { found.assume_init() };
    let units = u64::try_from(found.st_blocks).map_err(|_| MediaError::Length)?;
    Ok(units.saturating_mul(UNIT))
}

/// For file systems without `fallocate`: writes what the part contains.
fn write_again(file: BorrowedFd<'_>, range: Range<u64>) -> Result<(), MediaError> {
    const CHUNK: usize = 1 << 16;
    let of_io = |error: std::io::Error| MediaError::of_io(&error);
    let writer = File::from(file.try_clone_to_owned().map_err(of_io)?);
    let mut chunk = vec![0; CHUNK];
    for start in range.clone().step_by(CHUNK) {
        let part = &mut chunk[..usize::try_from(range.end - start).map_or(CHUNK, |left| left.min(CHUNK))];
        let there = read_at(file, start, part)?;
        part[there..].fill(0);
        writer.write_all_at(part, start).map_err(of_io)?;
        note_progress();
    }
    Ok(())
}

/// Reads a part of a file; fewer bytes at its end.
pub(crate) fn read_at(file: BorrowedFd<'_>, offset: u64, target: &mut [u8]) -> Result<usize, MediaError> {
    let mut done = 0;
    while done < target.len() {
        let from = libc::off_t::try_from(offset + done as u64).map_err(|_| MediaError::Length)?;
        let left = &mut target[done..];
        // SAFETY: the descriptor is open, and the rest of the target is ours.
        match unsafe { libc::pread(file.as_raw_fd(), left.as_mut_ptr().cast(), left.len(), from) } {
            0 => break,
            bytes if bytes > 0 => done += bytes.unsigned_abs(),
            _ => match MediaError::last_os() {
                MediaError::Os(libc::EINTR) => {}
                error => return Err(error),
            },
        }
    }
    Ok(done)
}
