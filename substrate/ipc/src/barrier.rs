//! A full fence in the threads of other processes, by the kernel (`membarrier(2)`): who does something a million times a
//! second leaves the fence to who looks now and then, and does not wait for its own stores.
//!
//! A process accepts such fences once; a forked child inherits that, an exec ends it. The kernel takes some 13 ms to
//! make a process with threads accept, and nothing for one with a single thread: so it is done when a process begins,
//! and one that has threads already does without.

use crate::alone::has_one_thread;
use crate::sys::{argument, syscall};
use std::sync::atomic::{AtomicBool, Ordering};

/// This process accepted, or the one that it is a child of: memory goes the same way as the kernel's note.
static ACCEPTED: AtomicBool = AtomicBool::new(false);

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: a command and no memory.
    unsafe { syscall(libc::SYS_membarrier, [argument(command), 0, 0, 0, 0, 0]) == 0 }
}

/// Makes [`fence_others`] of any process reach the threads of this one; false if it does not, and making it so would
/// take long.
pub fn accept() -> bool {
    let accepted = ACCEPTED.load(Ordering::Relaxed)
        || (has_one_thread() && membarrier(libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED));
    ACCEPTED.store(accepted, Ordering::Relaxed);
    accepted
}

/// A full fence in this thread, and in each thread of every process that accepted it: what it did before is seen
/// when this returns. False if the kernel has none (before 4.16) or allows none.
pub fn fence_others() -> bool {
    membarrier(libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_fences() {
        assert!(fence_others());
        // The tests' process has threads: what it says is what holds, at once.
        assert_eq!(accept(), accept());
    }
}
