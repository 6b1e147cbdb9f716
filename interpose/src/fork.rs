//! New processes.
//!
//! **fork**: a page that the kernel wipes in every forked child tells the child, at its first call that concerns us,
//! that it is one, however it was made. It is then a new client of the mount. Before a fork that the patched code makes
//! the mount gives the open files to the child; one made in another way opens them anew.
//!
//! **vfork** and `posix_spawn`: the child runs on its parent's memory, with a descriptor table of its own. The
//! `syscall` of clone, clone3 and vfork stays in place (the kernel may return from it on another stack); around it
//! the parent is asked what it is about to make. Until it goes on, whoever runs on its thread block is that child,
//! and works on an overlay. From the overlay's first moment to its last the parent's signals are blocked, so that no
//! handler of the parent's finds it; the child has the mask that the program set.

use crate::descriptors::{self, Overlay};
use crate::dispatch;
use crate::local::{BORROWED, Local, local};
use crate::memory;
use crate::mount::Errno;
use crate::raw;
use crate::signals;
use crate::start::site;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// A word in the page that a fork wipes: 1 in the process that wrote it.
static SEEN: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
const PAGE: usize = 4096;
/// [`crate::local::Local::cloning`]: a child on this thread's memory is under way.
const VFORK: u32 = 1;
/// The same: one with memory of its own that was given files.
const FORK: u32 = 2;
/// The same: this is the child on its parent's memory, under way.
const CHILD: u32 = 3;

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

/// Called inside, before anything else: is this a child that has not noticed yet?
#[inline]
pub fn notice() {
    // SAFETY: the page is never unmapped.
    let Some(seen) = (unsafe { SEEN.load(Ordering::Acquire).as_ref() }) else { return };
    if seen.load(Ordering::Relaxed) == 1 {
        return;
    }
    noticed(seen);
}

/// This process is a child that had not noticed.
#[cold]
fn noticed(seen: &AtomicU32) {
    seen.store(1, Ordering::Relaxed);
    if let Some(site) = site() {
        site.mount.after_fork_child();
    }
}

/// From now on somebody may make processes and threads that come by nobody: they may run on this memory, and have the
/// files that are open.
pub fn note_unseen() {
    ipc::note_sharing();
    crate::openings::note_unseen();
}

/// Before a clone: `number` and its first argument, the flags or a structure that begins with them. A plain fork has none.
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
    if !shares {
        crate::openings::note_fork();
    } else if flags & libc::CLONE_VFORK as u64 == 0 {
        ipc::note_sharing();
    }
    let local = local();
    let thread = flags & libc::CLONE_THREAD as u64 != 0;
    if thread || local.is_inside() || local.borrowed().is_some() || site().is_none() {
        return;
    }
    if descriptors::any() {
        local.inside(give);
        // Before the child is made: it would have the signal, too.
        signals::deliver(local);
    }
    if !shares {
        let given = local.given.load(Ordering::Relaxed) != 0;
        local.cloning.store(if given { FORK } else { 0 }, Ordering::Relaxed);
        return;
    }
    // A parent that does not sleep meanwhile may be the first to go on: there the mask stays as it is.
    let sleeps = flags & libc::CLONE_VFORK as u64 != 0;
    let mask = if sleeps { signals::block() } else { signals::mask() };
    local.maker_mask.store(mask, Ordering::Relaxed);
    local.maker.store(raw::process().cast_unsigned(), Ordering::Relaxed);
    local.inside(|| {
        let overlay = Box::into_raw(Box::new(Overlay::snapshot()));
        local.overlay.store(overlay, Ordering::Relaxed);
        local.cloning.store(VFORK, Ordering::Relaxed);
    });
    local.mode.fetch_or(BORROWED, Ordering::Relaxed);
}

/// Gives the child that is about to be made the open files. A failure is the mount's affair: the call goes on.
fn give() {
    notice();
    if let Some(site) = site().filter(|_| !dispatch::poisoned()) {
        let _ = catch_unwind(AssertUnwindSafe(|| site.mount.before_fork()));
    }
}

/// After a clone, in parent and child: its result.
pub unsafe extern "C" fn hearth_after(result: u64, _first: u64) {
    crate::openings::note_fork();
    let local = local();
    match local.cloning.load(Ordering::Relaxed) {
        FORK => {
            local.cloning.store(0, Ordering::Relaxed);
            if result == 0 {
                local.inside(notice);
            } else {
                let_go(local, result);
            }
        }
        VFORK if result == 0 => {
            local.cloning.store(CHILD, Ordering::Relaxed);
            signals::set_mask(local.maker_mask.load(Ordering::Relaxed));
        }
        // A child may make children of its own: what it has is not theirs to end.
        VFORK | CHILD if result != 0 && is_maker(local) => {
            local.cloning.store(0, Ordering::Relaxed);
            end_overlay(local);
            let_go(local, result);
            signals::set_mask(local.maker_mask.load(Ordering::Relaxed));
        }
        _ => {}
    }
}

/// In the parent: what the child was given is its own now.
fn let_go(local: &Local, result: u64) {
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

/// The child on this thread's memory is gone from it.
fn end_overlay(local: &Local) {
    // An exec of the child's never came back, or it was killed: what it left here is not the parent's, which could
    // have no signal meanwhile.
    local.mode.store(0, Ordering::Relaxed);
    local.deferred.store(0, Ordering::Relaxed);
    local.interrupted.store(0, Ordering::Relaxed);
    let overlay = local.overlay.swap(std::ptr::null_mut(), Ordering::Relaxed);
    // SAFETY: made by `hearth_before` on this thread; the child has exec'ed or ended.
    local.inside(|| drop(unsafe { Box::from_raw(overlay) }));
}
