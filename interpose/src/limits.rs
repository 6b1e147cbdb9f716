//! The process's limits: that on the size of files, which is kept for files of the tree too, and that on descriptors, where
//! it meets the library's own.
//!
//! The kernel keeps the limits; that on sizes is remembered, so that a write need not ask for it. Another process that sets
//! it (`prlimit`) is not seen before the next program.
//!
//! A program whose limit on descriptors is low needs all of its numbers. So the library's own lie above that limit: for the
//! moment in which they are made the limit is higher. Who may not raise it (neither is the hard limit higher, nor is the
//! process root's) shares its numbers with the library.

use crate::mount::Errno;
use crate::raw;
use std::sync::atomic::{AtomicU64, Ordering};

/// A limit on descriptors below which the library's own lie above it.
const LOW: u64 = 1024;
/// By how much the limit is raised.
const ROOM: u64 = 4096;

/// The soft and the hard limit.
///
/// # Errors
/// Those of a sandbox.
pub fn of(resource: u32) -> Result<[u64; 2], Errno> {
    let mut limit = [0u64; 2];
    let arguments = [0, u64::from(resource), 0, limit.as_mut_ptr() as u64];
    // SAFETY: the kernel fills the two words.
    unsafe { raw::try_call(libc::SYS_prlimit64, &arguments) }?;
    Ok(limit)
}

/// Bytes that a file may have by this process's writes; all ones without a limit.
static FILE_BYTES: AtomicU64 = AtomicU64::new(u64::MAX);

/// Asks the kernel for the limit on the size of files: at the start, and when the process has set it.
pub fn learn_file_bytes() {
    let limit = of(libc::RLIMIT_FSIZE).map_or(u64::MAX, |limit| limit[0]);
    FILE_BYTES.store(limit, Ordering::Relaxed);
}

/// Bytes that a file may have by this process's writes, if there is a limit.
#[inline]
pub fn file_bytes() -> Option<u64> {
    let limit = FILE_BYTES.load(Ordering::Relaxed);
    (limit != u64::MAX).then_some(limit)
}

/// What a call answers that would make a file too large: the thread gets the signal that says so.
#[cold]
pub fn too_large() -> Errno {
    let thread = raw::number(raw::thread());
    let arguments = [raw::number(raw::process()), thread, libc::SIGXFSZ as u64];
    // SAFETY: takes no memory. A handler runs when the call has ended.
    let _ = unsafe { raw::try_call(libc::SYS_tgkill, &arguments) };
    Errno(libc::EFBIG)
}

fn set_descriptors(limit: &[u64; 2]) -> Result<(), Errno> {
    let arguments = [0, libc::RLIMIT_NOFILE.into(), limit.as_ptr() as u64, 0];
    // SAFETY: the kernel reads the two words.
    unsafe { raw::try_call(libc::SYS_prlimit64, &arguments) }.map(|_| ())
}

/// Runs something that makes descriptors of the library's own. It is told from which number on they are out of the program's
/// way; none if the limit stays as it is.
pub fn with_room<T>(act: impl FnOnce(Option<u64>) -> T) -> T {
    let before = match of(libc::RLIMIT_NOFILE) {
        Ok(limit) if limit[0] < LOW => limit,
        _ => return act(None),
    };
    let wanted = before[0] + ROOM;
    let raised = set_descriptors(&[wanted, before[1].max(wanted)]).is_ok()
        || (before[1] > before[0] && set_descriptors(&[before[1].min(wanted), before[1]]).is_ok());
    if !raised {
        return act(None);
    }
    let result = act(Some(before[0]));
    // Lowering a limit is always allowed.
    let _ = set_descriptors(&before);
    result
}
