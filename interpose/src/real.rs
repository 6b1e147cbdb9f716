//! Programs that let the kernel work on their descriptors by itself (`io_uring`, libaio): before the first such call returns,
//! the numbers of files of the tree are made descriptors of the files on the mount, and so are those opened later. They stay
//! ours: a call on one is served as ever, its contents through the mount.
//!
//! A ring closes descriptors, too, which nobody sees; the kernel then gives the number away. So a number that was made real
//! is compared with the file that it stood for before each call on it.
//!
//! **Locks.** None: two words and a bitmap.

use crate::calls::data::mount;
use crate::descriptors::{self, Held, NUMBERS};
use crate::mount::Errno;
use crate::raw;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

static ON: AtomicBool = AtomicBool::new(false);
/// One bit a number: is it the kernel's descriptor of a file on the mount?
static REAL: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];

/// Whether the kernel works on the process's descriptors by itself.
#[inline]
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// From now on it does.
///
/// # Errors
/// `Errno::UNMOUNTED`: files of the tree would have to be on a mount.
pub fn begin() -> Result<(), Errno> {
    if !is_on() {
        if !mount().is_mounted() {
            return Err(Errno::UNMOUNTED);
        }
        ON.store(true, Ordering::Relaxed);
        descriptors::ours().into_iter().for_each(make);
    }
    Ok(())
}

fn word(fd: i32) -> Option<(&'static AtomicU64, u64)> {
    let index = usize::try_from(fd).ok()?;
    Some((REAL.get(index / 64)?, 1 << (index % 64)))
}

/// Puts the file on the mount in a placeholder's place, if it is one of contents. What has no twin stays as it is.
pub fn make(fd: i32) {
    let Ok(held) = descriptors::get(fd) else { return };
    let Ok(twin) = mount().mapped_file(held.handle()) else { return };
    let Ok(flags) = raw::fcntl(fd, libc::F_GETFD, 0) else { return };
    let flags = if flags & libc::FD_CLOEXEC as u64 == 0 { 0 } else { libc::O_CLOEXEC };
    // SAFETY: takes no memory; the number is one of ours.
    let made = unsafe { raw::try_call(libc::SYS_dup3, &[raw::number(twin), raw::number(fd), flags as u64]) };
    if let (Ok(_), Some((word, bit))) = (made, word(fd)) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// The number stands for something else from now on.
#[inline]
pub fn forget(fd: i32) {
    if is_on()
        && let Some((word, bit)) = word(fd)
    {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Whether a number that is ours is still what it was made; else it is not ours any more.
#[cold]
pub fn is_still(fd: i32) -> bool {
    let made = word(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0);
    if !made {
        return true;
    }
    let Ok(held) = descriptors::get(fd) else { return true };
    if is_same(fd, &held) {
        return true;
    }
    if let Some(held) = descriptors::take(fd) {
        held.close();
    }
    false
}

/// Whether the kernel's descriptor is the twin of an open file: by number and device, of which the kernel knows itself.
fn is_same(fd: i32, held: &Held) -> bool {
    let Ok(twin) = mount().mapped_file(held.handle()) else { return false };
    let place = |fd: i32| {
        // SAFETY: a structure of integers.
        let mut status: libc::statx = unsafe { std::mem::zeroed() };
        let flags = (libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC) as u64;
        let asked = u64::from(libc::STATX_INO);
        let arguments = [raw::number(fd), c"".as_ptr() as u64, flags, asked, (&raw mut status) as u64];
        // SAFETY: path and structure live across the call.
        unsafe { raw::try_call(libc::SYS_statx, &arguments) }.ok()?;
        Some((status.stx_dev_major, status.stx_dev_minor, status.stx_ino))
    };
    place(fd).is_some_and(|found| Some(found) == place(twin))
}
