//! Limits of the process: on the size of files, which the library enforces for files of the tree, and on descriptors,
//! where the library's own descriptors matter.
//!
//! The kernel keeps both limits. The library caches the limit on sizes, so that a write need not ask for it. If another
//! process changes it (`prlimit`), only the next program notices.
//!
//! A program whose limit on descriptors is low needs all of its numbers. So the library's own descriptors have numbers
//! above that limit: the library raises the limit while it creates them. If the process may not raise it (the hard
//! limit is not higher, and the process is not root), its descriptors share the numbers with those of the library.

use crate::mount::Errno;
use crate::raw;
use std::sync::atomic::{AtomicU64, Ordering};

/// If the limit on descriptors is below this number, the library's own descriptors are above the limit.
const LOW: u64 = 1024;
/// The number by which the limit is raised.
const ROOM: u64 = 4096;

/// The soft and the hard limit.
///
/// # Errors
/// Those of a sandbox that refuses the call.
pub fn of(resource: u32) -> Result<[u64; 2], Errno> {
    let mut limit = [0u64; 2];
    let arguments = [0, u64::from(resource), 0, limit.as_mut_ptr() as u64];
    // SAFETY: the kernel fills the two words.
    unsafe { raw::try_call(libc::SYS_prlimit64, &arguments) }?;
    Ok(limit)
}

/// Limit of bytes of a file that this process writes; all ones without a limit.
static FILE_BYTES: AtomicU64 = AtomicU64::new(u64::MAX);

/// Asks the kernel for the limit on the size of files: at the start, and when the process has changed it.
pub fn learn_file_bytes() {
    let limit = of(libc::RLIMIT_FSIZE).map_or(u64::MAX, |limit| limit[0]);
    FILE_BYTES.store(limit, Ordering::Relaxed);
}

/// Called when the process has set a limit. If it limits the address space (`RLIMIT_AS`), or the private memory that can be
/// written (`RLIMIT_DATA`), most of the library's own, which is only kept in reserve, counts and is given back.
pub fn heed_memory(resource: u32) {
    // Words of `statm`: the sixth also has the stack, which the kernel does not count. So a little more is given back.
    let word = match resource {
        libc::RLIMIT_AS => 0,
        libc::RLIMIT_DATA => 5,
        _ => return,
    };
    let Ok([limit, _]) = of(resource) else { return };
    if limit == u64::MAX {
        return;
    }
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    let Ok(fd) = with_room(|_| raw::open_at(libc::AT_FDCWD, c"/proc/self/statm", flags, 0)) else { return };
    let mut text = [0; 160];
    let bytes = raw::read_at(fd, &mut text, 0).unwrap_or(0);
    raw::close(fd);
    let pages =
        text[..bytes].split(|byte| *byte == b' ').nth(word).and_then(|word| std::str::from_utf8(word).ok());
    if let Some(pages) = pages.and_then(|pages| pages.parse::<u64>().ok()) {
        crate::start::give_back_memory(limit, pages * 4096);
    }
}

/// Limit of bytes of a file that this process writes, if there is one.
#[inline]
pub fn file_bytes() -> Option<u64> {
    let limit = FILE_BYTES.load(Ordering::Relaxed);
    (limit != u64::MAX).then_some(limit)
}

/// The error of a call that would make a file too large. Sends SIGXFSZ to the thread.
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

/// Runs a function that creates descriptors of the library. Its argument is the first number that the program does not
/// need; `None` if the limit stays as it is.
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
