//! Detects a single-threaded process, in which a word that only this process reaches can be changed without a
//! locked instruction. A locked instruction waits for all earlier stores of the processor.
//!
//! The answer combines two sources. The C library maintains `__libc_single_threaded` for its own locks. Code that
//! creates shared memory or threads outside the C library's view reports that by [`note_sharing`]. In a program
//! `interpose` makes the report: it sees every `syscall` instruction of the C library and its loader that creates a
//! process or a thread. It searches all other code, of the program and of its libraries, before that code runs; if
//! the code contains a `syscall` instruction, or if the code can be written or generated later, the process counts
//! as multi-threaded from then on. The search misses memory that became executable by other means than the C
//! library's `mmap` and `mprotect` (`shmat`, or a personality that makes all memory executable), code that changes
//! in its file while it is mapped, `int 0x80`, and another process that maps or writes this memory.
//!
//! Only the single thread itself can change the answer, and never in the middle of an operation that asked for it.
//! A signal handler of that thread runs between two instructions, never within one, and [`compare_exchange`] is one
//! instruction.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    /// `<sys/single_threaded.h>`: nonzero while no other thread runs on this memory.
    static __libc_single_threaded: std::sync::atomic::AtomicU8;
}

/// Set when another thread or process that the C library did not create may run on this memory.
static SHARING: AtomicBool = AtomicBool::new(false);

/// Counts the process as multi-threaded from now on: another thread or process may run on its memory beside the
/// caller.
pub fn note_sharing() {
    SHARING.store(true, Ordering::Relaxed);
}

/// True while the calling thread is the only one that runs on this memory. Always false on machines where an
/// unlocked exchange is not a single instruction.
#[inline]
pub fn is_alone() -> bool {
    cfg!(target_arch = "x86_64") && has_one_thread() && !SHARING.load(Ordering::Relaxed)
}

/// True while the C library knows of no second thread.
#[cfg(target_env = "gnu")]
#[inline]
pub fn has_one_thread() -> bool {
    // SAFETY: the C library always has this byte, and only the single thread changes it to zero.
    unsafe { __libc_single_threaded.load(Ordering::Relaxed) != 0 }
}

/// Always false: this C library does not publish how many threads there are.
#[cfg(not(target_env = "gnu"))]
#[inline]
pub fn has_one_thread() -> bool {
    false
}

/// Writes `new` if the word holds `current`, atomically against all threads of this process, with acquire and
/// release ordering. No other process may reach the word.
///
/// # Errors
/// The value that the word holds instead.
#[inline]
pub fn compare_exchange(word: &AtomicU32, current: u32, new: u32) -> Result<u32, u32> {
    if is_alone() { unlocked(word, current, new) } else { locked(word, current, new) }
}

#[inline]
fn locked(word: &AtomicU32, current: u32, new: u32) -> Result<u32, u32> {
    word.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
}

/// The instruction without its lock prefix: atomic against signal handlers of this thread only.
#[cfg(target_arch = "x86_64")]
#[inline]
fn unlocked(word: &AtomicU32, current: u32, new: u32) -> Result<u32, u32> {
    let found: u32;
    // SAFETY: `word` is a valid word, and no other thread exists to which this access would be a data race.
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
