//! Whether this process has one thread: then what only its own threads reach needs no locked instruction, each of
//! which waits for all stores before it.
//!
//! The C library knows (its own locks go by the same word), and whoever sees memory being shared in a way that the C
//! library does not know of, or cannot see that, says so by [`note_sharing`]. In a program, `interpose` does: each
//! `syscall` of the C library and its loader that makes a process or a thread is seen, whatever its number comes from. All
//! other code, programs' and libraries', is looked through before it runs; if there is a `syscall` in it, or if it can be
//! written or made later, the process counts as one of several threads from then on. Not seen is code in memory that became
//! executable by none of the C library's `mmap` and `mprotect` (by `shmat`, or a personality that makes all memory so), one
//! that changes in its file while it is mapped, `int 0x80`, and another process that maps or writes this memory.
//!
//! The answer changes only by what the one thread does itself, never in the middle of something that asked. Signal handlers
//! of that thread come between two instructions, not into one: [`compare_exchange`] is one.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    /// `<sys/single_threaded.h>`: not 0 while nobody else runs on this memory.
    static __libc_single_threaded: std::sync::atomic::AtomicU8;
}

/// Somebody else may run on this memory whom the C library did not make.
static SHARING: AtomicBool = AtomicBool::new(false);

/// From now on the process counts as one of several threads: a thread or a process may run on its memory, beside the
/// one that calls.
pub fn note_sharing() {
    SHARING.store(true, Ordering::Relaxed);
}

/// True while the calling thread is the only one that runs on this memory. Where an exchange without a lock is no
/// instruction of its own it is never asked for, nor whether that may be.
#[inline]
pub fn is_alone() -> bool {
    cfg!(target_arch = "x86_64") && has_one_thread() && !SHARING.load(Ordering::Relaxed)
}

/// True while the C library knows of no second thread.
#[cfg(target_env = "gnu")]
#[inline]
pub fn has_one_thread() -> bool {
    // SAFETY: a byte of the C library's, always there, which only the one thread changes from not 0.
    unsafe { __libc_single_threaded.load(Ordering::Relaxed) != 0 }
}

/// True while the C library knows of no second thread; here it does not say.
#[cfg(not(target_env = "gnu"))]
#[inline]
pub fn has_one_thread() -> bool {
    false
}

/// Writes `new` if `current` is there, in one step against all threads of this process, and acquires and releases; for a
/// word that no other process reaches.
///
/// # Errors
/// What is there instead.
#[inline]
pub fn compare_exchange(word: &AtomicU32, current: u32, new: u32) -> Result<u32, u32> {
    if is_alone() { unlocked(word, current, new) } else { locked(word, current, new) }
}

#[inline]
fn locked(word: &AtomicU32, current: u32, new: u32) -> Result<u32, u32> {
    word.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
}

/// The instruction without its lock: one step against what interrupts this thread.
#[cfg(target_arch = "x86_64")]
#[inline]
fn unlocked(word: &AtomicU32, current: u32, new: u32) -> Result<u32, u32> {
    let found: u32;
    // SAFETY: the word is a word of ours; what is not an atomic access to others is none of theirs, for there are none.
    unsafe {
        std::arch::asm!(
            "cmpxchg dword ptr [{word}], {new:e}",
            word = in(reg) word.as_ptr(),
            new = in(reg) new,
            inout("eax") current => found,
            options(nostack),
        );
    }
    if found == current { Ok(found) } else { Err(found) }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn unlocked(word: &AtomicU32, current: u32, new: u32) -> Result<u32, u32> {
    locked(word, current, new)
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

    #[test]
    fn with_a_lock_and_without_it_is_the_same_to_one_thread() {
        for exchange in [locked, unlocked] {
            let word = AtomicU32::new(5);
            assert_eq!(exchange(&word, 4, 7), Err(5));
            assert_eq!(exchange(&word, 5, 7), Ok(5));
            assert_eq!(word.load(Ordering::Relaxed), 7);
        }
    }
}
