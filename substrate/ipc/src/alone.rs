//! Whether this process has one thread: then what only its own threads reach needs no locked instruction, each of
//! which waits for all stores before it.
//!
//! The C library knows (its own locks go by the same word), and whoever sees memory being shared in a way that the C
//! library does not know of says so by [`note_sharing`]. The answer changes only by what the one thread does itself,
//! never in the middle of something that asked.

use std::sync::atomic::{AtomicBool, Ordering};

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    /// `<sys/single_threaded.h>`: not 0 while nobody else runs on this memory.
    static __libc_single_threaded: std::sync::atomic::AtomicU8;
}

/// Somebody else may run on this memory whom the C library did not make.
static SHARING: AtomicBool = AtomicBool::new(false);

/// From now on the process counts as one of several threads: a thread or a process is about to run on its memory,
/// beside the one that calls.
pub fn note_sharing() {
    SHARING.store(true, Ordering::Relaxed);
}

/// True while the calling thread is the only one that runs on this memory.
#[inline]
pub fn is_alone() -> bool {
    is_alone_for_libc() && !SHARING.load(Ordering::Relaxed)
}

#[cfg(target_env = "gnu")]
#[inline]
fn is_alone_for_libc() -> bool {
    // SAFETY: a byte of the C library's, always there, which only the one thread changes from not 0.
    unsafe { __libc_single_threaded.load(Ordering::Relaxed) != 0 }
}

#[cfg(not(target_env = "gnu"))]
#[inline]
fn is_alone_for_libc() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{Host, SystemHost};

    #[test]
    fn a_process_with_threads_is_not_alone() {
        let look = || assert!(!is_alone());
        SystemHost.spawn("second", Box::new(look)).unwrap().join().unwrap();
        look();
    }
}
