//! New processes: children that fork, vfork and clone create.
//!
//! **fork**: the kernel clears a certain page in every forked child, however it was created. By this page a child
//! learns at its first call that concerns the library that it is a child. It is then a new client of the mount. Before
//! a fork by patched code, the mount shares the open files with the child; after a fork in another way, the child opens
//! them anew.
//!
//! **vfork** and `posix_spawn`: the child runs in its parent's memory, with a descriptor table of its own. The
//! `syscall` of clone, clone3 and vfork stays in place (the kernel may return from it on another stack), and the
//! patched code calls `hearth_before` and `hearth_after` around it. Until the parent continues, the child runs on the
//! parent's thread block, and its changes go to an overlay. While the overlay exists the parent's signals are blocked,
//! so that no handler of the parent runs with it; the child has the mask that the program has set.
//!
//! **A process beside its parent**: a clone with CLONE_VM, without CLONE_VFORK and CLONE_THREAD, creates a process that
//! runs in its parent's memory at the same time, with a descriptor table of its own, and mostly on the thread block of the
//! thread that created it. The library cannot tell their states apart, so it serves only the parent. The calls of the
//! other process on the tree fail with EOPNOTSUPP and one line on standard error, and all its other calls go to the kernel.

use crate::descriptors::{self, Overlay};
use crate::dispatch;
use crate::local::{BORROWED, Local, local};
use crate::memory;
use crate::mount::Errno;
use crate::raw;
use crate::signals;
use crate::start::site;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};

/// A word in the page that a fork clears: 1 in the process that wrote it.
static SEEN: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
const PAGE: usize = 4096;
/// The process whose memory this is, after it has created a process beside it; 0 before.
pub static SERVED: AtomicI32 = AtomicI32::new(0);
/// The other process may have the same descriptors (CLONE_FILES).
static SHARES_NUMBERS: AtomicBool = AtomicBool::new(false);
/// [`crate::local::Local::cloning`]: the clone in progress creates a child in this thread's memory.
const VFORK: u32 = 1;
/// The same: a child with its own memory, with which files are shared.
const FORK: u32 = 2;
/// The same: this thread is the child in its parent's memory.
const CHILD: u32 = 3;
/// The same: the child has left this thread's memory, and the thread closes the child's files.
pub const ENDING: u32 = 4;

/// Maps the page.
///
/// # Errors
/// ENOMEM; EINVAL from kernels before 4.14.
pub fn watch() -> Result<(), Errno> {
    let page = raw::map_anonymous(PAGE).ok_or(Errno(libc::ENOMEM))?;
    // SAFETY: the page was mapped just now.
    unsafe { raw::try_call(libc::SYS_madvise, &[page as u64, PAGE as u64, libc::MADV_WIPEONFORK as u64]) }?;
    let word = page.cast::<AtomicU32>();
    // SAFETY: mapped, aligned, zero: a valid atomic.
    unsafe { (*word).store(1, Ordering::Relaxed) };
    SEEN.store(word, Ordering::Release);
    Ok(())
}

/// Called inside, before anything else: notices that this process is a new child.
#[inline]
pub fn notice() {
    // SAFETY: the page is never unmapped.
    let Some(seen) = (unsafe { SEEN.load(Ordering::Acquire).as_ref() }) else { return };
    if seen.load(Ordering::Relaxed) == 1 {
        return;
    }
    noticed(seen);
}

/// Makes this process a client of its own, after a fork.
#[cold]
fn noticed(seen: &AtomicU32) {
    seen.store(1, Ordering::Relaxed);
    SERVED.store(0, Ordering::Relaxed);
    if let Some(site) = site() {
        site.mount.after_fork_child();
    }
}

/// Whether the caller is a process beside the one that the library serves.
#[inline]
pub fn is_beside() -> bool {
    SERVED.load(Ordering::Relaxed) != 0 && is_not_served()
}

#[cold]
fn is_not_served() -> bool {
    // SAFETY: the page is never unmapped.
    let seen = unsafe { SEEN.load(Ordering::Acquire).as_ref() };
    let is_forked = seen.is_some_and(|seen| seen.load(Ordering::Relaxed) != 1);
    !is_forked && local().borrowed().is_none() && raw::process() != SERVED.load(Ordering::Relaxed)
}

/// Whether a process beside the one that the library serves may have the same descriptors.
pub fn shares_numbers() -> bool {
    SHARES_NUMBERS.load(Ordering::Relaxed)
}

/// From now on, processes and threads may be created that the library does not see. They may share this memory and the
/// open files.
pub fn note_unseen() {
    ipc::note_sharing();
    crate::slots::note_unseen();
}

/// Before a clone: `number` and the first argument, which is the flags or a structure that begins with them. A plain
/// fork has no flags.
pub unsafe extern "C" fn hearth_before(number: u64, first: u64) {
    // The kernel takes the number as an int.
    let flags = match i64::from(number as u32) {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_vfork => (libc::CLONE_VM | libc::CLONE_VFORK) as u64,
        libc::SYS_clone => first,
        libc::SYS_clone3 => memory::read_value(first).unwrap_or(0),
        _ => 0,
    };
    let shares = flags & libc::CLONE_VM as u64 != 0;
    let sleeps = flags & libc::CLONE_VFORK as u64 != 0;
    let thread = flags & libc::CLONE_THREAD as u64 != 0;
    if is_beside() {
        return;
    }
    if !shares {
        crate::slots::note_fork();
    } else if !sleeps {
        ipc::note_sharing();
        if !thread {
            SHARES_NUMBERS.fetch_or(flags & libc::CLONE_FILES as u64 != 0, Ordering::Relaxed);
            return SERVED.store(local().process(), Ordering::Relaxed);
        }
    }
    let local = local();
    if thread || local.is_inside() || local.borrowed().is_some() || site().is_none() {
        return;
    }
    if descriptors::any() {
        local.inside(share_files);
        // Before the child exists, which would otherwise receive the signal too.
        signals::deliver(local);
    }
    if !shares {
        let given = local.given.load(Ordering::Relaxed) != 0;
        local.cloning.store(if given { FORK } else { 0 }, Ordering::Relaxed);
        return;
    }
    local.maker_mask.store(signals::block(), Ordering::Relaxed);
    local.maker.store(raw::process().cast_unsigned(), Ordering::Relaxed);
    local.inside(|| {
        descriptors::prepare_for_child();
        crate::slots::prepare_for_child();
        let overlay = Box::into_raw(Box::new(Overlay::snapshot()));
        local.overlay.store(overlay, Ordering::Relaxed);
        local.cloning.store(VFORK, Ordering::Relaxed);
    });
    local.mode.fetch_or(BORROWED, Ordering::Relaxed);
}

/// Shares the open files with the child that is about to be created. If that fails, the call continues nevertheless.
fn share_files() {
    notice();
    if let Some(site) = site().filter(|_| !dispatch::poisoned()) {
        let _ = catch_unwind(AssertUnwindSafe(|| site.mount.before_fork()));
    }
}

/// After a clone, in parent and child, with its result.
pub unsafe extern "C" fn hearth_after(result: u64, _first: u64) {
    crate::slots::note_fork();
    if is_beside() {
        return;
    }
    let local = local();
    match local.cloning.load(Ordering::Relaxed) {
        FORK => {
            local.cloning.store(0, Ordering::Relaxed);
            if result == 0 {
                local.inside(notice);
            } else {
                release_child(local, result);
            }
        }
        VFORK if result == 0 => {
            local.cloning.store(CHILD, Ordering::Relaxed);
            signals::set_mask(local.maker_mask.load(Ordering::Relaxed));
        }
        // A child may create children itself, which must not end the state of their parent.
        VFORK | CHILD if result != 0 && is_maker(local) => {
            local.cloning.store(ENDING, Ordering::Relaxed);
            end_overlay(local);
            local.cloning.store(0, Ordering::Relaxed);
            release_child(local, result);
            signals::set_mask(local.maker_mask.load(Ordering::Relaxed));
        }
        _ => {}
    }
}

/// In the parent: keeps nothing of the state that was shared with the child.
fn release_child(local: &Local, result: u64) {
    if local.given.load(Ordering::Relaxed) == 0 {
        return;
    }
    local.inside(|| {
        if let Some(site) = site() {
            site.mount.after_fork(u32::try_from(result.cast_signed()).ok());
        }
    });
    signals::deliver(local);
}

fn is_maker(local: &Local) -> bool {
    local.maker.load(Ordering::Relaxed) == raw::process().cast_unsigned()
}

/// Ends the overlay, after the child has left this thread's memory.
fn end_overlay(local: &Local) {
    // The child may have left state here, if its exec did not return or if it was killed. The parent had no signal
    // meanwhile.
    local.mode.store(0, Ordering::Relaxed);
    local.deferred.store(0, Ordering::Relaxed);
    local.interrupted.store(0, Ordering::Relaxed);
    let overlay = local.overlay.swap(std::ptr::null_mut(), Ordering::Relaxed);
    local.inside(|| {
        // SAFETY: made by `hearth_before` on this thread; the child has executed a program or ended.
        let overlay = unsafe { Box::from_raw(overlay) };
        let (locks, has_connected) = (overlay.locks, descriptors::has_connected(&overlay));
        drop(overlay);
        if (locks.is_some() || has_connected)
            && let Some(site) = site().filter(|_| !dispatch::poisoned())
        {
            let _ = catch_unwind(AssertUnwindSafe(|| site.mount.child_left(locks, has_connected)));
        }
    });
}
