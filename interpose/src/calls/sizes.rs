//! The limit on the size of files, as in Linux: a write ends at the limit. A write that begins there, or a change to a
//! larger size, gets SIGXFSZ and EFBIG.

use super::data::mount;
use crate::limits;
use crate::mount::{Errno, Handle, Target};

/// Number of the bytes that may be written, at an offset or at the file's own.
///
/// # Errors
/// EFBIG: no byte may be written.
#[inline]
pub fn room(file: Handle, at: Option<u64>, bytes: usize) -> Result<usize, Errno> {
    room_with(file, at, bytes, 0)
}

/// The same for a write with the flags `RWF_APPEND` or `RWF_NOAPPEND`.
///
/// # Errors
/// EFBIG.
#[inline]
pub fn room_with(file: Handle, at: Option<u64>, bytes: usize, flags: i32) -> Result<usize, Errno> {
    match limits::file_bytes() {
        Some(limit) if bytes > 0 => room_below(limit, file, at, bytes, flags),
        _ => Ok(bytes),
    }
}

#[cold]
fn room_below(limit: u64, file: Handle, at: Option<u64>, bytes: usize, write: i32) -> Result<usize, Errno> {
    let flags = mount().flags(file);
    if flags & libc::O_PATH != 0 || flags & libc::O_ACCMODE == libc::O_RDONLY {
        // The write itself reports the error.
        return Ok(bytes);
    }
    let begin = match at {
        _ if appends(flags, write) => mount().attributes(Target::Open(file))?.stx_size,
        Some(offset) => offset,
        None => mount().seek(file, 0, libc::SEEK_CUR)?,
    };
    let room = limit.checked_sub(begin).filter(|room| *room > 0).ok_or_else(limits::too_large)?;
    Ok(usize::try_from(room).map_or(bytes, |room| room.min(bytes)))
}

/// Whether a write appends to a file with these status flags.
pub fn appends(status: i32, write: i32) -> bool {
    write & libc::RWF_NOAPPEND == 0 && (status & libc::O_APPEND != 0 || write & libc::RWF_APPEND != 0)
}

/// Whether a file may get this size.
///
/// # Errors
/// EFBIG. The change itself reports other errors.
pub fn check(target: Target<'_>, size: i64) -> Result<(), Errno> {
    let Some(limit) = limits::file_bytes() else { return Ok(()) };
    let Ok(size) = u64::try_from(size) else { return Ok(()) };
    if size <= limit || !may_write(target) {
        return Ok(());
    }
    match mount().attributes(target) {
        Ok(status) if status.stx_size < size => Err(limits::too_large()),
        _ => Ok(()),
    }
}

fn may_write(target: Target<'_>) -> bool {
    match target {
        Target::Open(file) => mount().flags(file) & libc::O_ACCMODE != libc::O_RDONLY,
        Target::Named(..) => mount().access(target, libc::W_OK, libc::AT_EACCESS).is_ok(),
    }
}
