//! Asymmetric fences: one thread executes a full fence in the threads of other processes (`membarrier(2)`). A
//! frequent operation then needs no fence of its own, and does not wait for its own stores; the rare counterpart
//! fences for both.
//!
//! A process must register once to be reached by such fences. A forked child inherits the registration, an exec
//! ends it. The kernel needs about 13 ms to register a process with several threads, and no time for a process with
//! one. So a process registers when it starts, and a process that has several threads already goes without.

use crate::alone::has_one_thread;
use crate::sys::{argument, syscall};
use std::sync::atomic::{AtomicBool, Ordering};

/// True once this process, or the process from which it was forked, has registered: the flag is inherited with
/// memory, as the kernel's registration is.
static ACCEPTED: AtomicBool = AtomicBool::new(false);

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the call takes a command and no memory.
    unsafe { syscall(libc::SYS_membarrier, [argument(command), 0, 0, 0, 0, 0]) == 0 }
}

/// Registers this process, so that [`fence_others`] of any process reaches its threads. Returns false if it is not
/// registered and registration would be slow.
pub fn accept() -> bool {
    let accepted = ACCEPTED.load(Ordering::Relaxed)
        || (has_one_thread() && membarrier(libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED));
    ACCEPTED.store(accepted, Ordering::Relaxed);
    accepted
}

/// Executes a full fence in this thread and in each thread of every registered process: their earlier stores are
/// visible when this returns. Returns false if the kernel has no such call (before 4.16) or forbids it.
pub fn fence_others() -> bool {
    membarrier(libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_fences() {
        assert!(fence_others());
        // The test process has several threads: it accepts at once or never.
        assert_eq!(accept(), accept());
    }
}
