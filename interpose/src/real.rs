//! Support for programs that let the kernel work on their descriptors by itself (`io_uring`, libaio). Before the first
//! such call returns, the library replaces the placeholders of files of the tree by descriptors of the same files on
//! the node's mount; it does the same for files that are opened later. Calls of the program on these numbers still go
//! through the library, which uses the mount for the contents.
//!
//! The kernel may also close a descriptor by itself, without the library's knowledge, and then reuse its number. So
//! before each call on such a number, the library compares the kernel's file with its own.
//!
//! **Locks.** None: the state is one flag and a bitmap.

use crate::calls::data::mount;
use crate::descriptors::{self, DescriptionRef, NUMBERS};
use crate::mount::Errno;
use crate::raw;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

static ON: AtomicBool = AtomicBool::new(false);
/// One bit for each number: set if the kernel has a descriptor of the file on the mount there.
static REAL: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];

/// Whether the kernel works on the process's descriptors by itself.
#[inline]
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// Prepares for this, from now on.
///
/// # Errors
/// `Errno::UNMOUNTED`: the tree is not mounted.
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

/// Replaces a placeholder by a descriptor of the file on the mount, if it is a regular file. Without a twin (see
/// `tree::mounted`), the placeholder stays.
pub fn make(fd: i32) {
    let Ok(held) = descriptors::get(fd) else { return };
    let Ok(twin) = mount().mapped_file(held.handle()) else { return };
    let Ok(flags) = raw::fcntl(fd, libc::F_GETFD, 0) else { return };
    let flags = if flags & libc::FD_CLOEXEC as u64 == 0 { 0 } else { libc::O_CLOEXEC };
    // SAFETY: takes no memory; the number belongs to the library.
    let made = unsafe { raw::try_call(libc::SYS_dup3, &[raw::number(twin), raw::number(fd), flags as u64]) };
    if let (Ok(_), Some((word, bit))) = (made, word(fd)) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Notes that the number stands for another file from now on.
#[inline]
pub fn forget(fd: i32) {
    if is_on()
        && let Some((word, bit)) = word(fd)
    {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Whether a number that is ours still stands for the same file in the kernel; if not, it is not ours any more.
#[cold]
pub fn is_unchanged(fd: i32) -> bool {
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

/// Whether the kernel's descriptor is the twin of an open file, by inode number and device, which the kernel answers
/// itself.
fn is_same(fd: i32, held: &DescriptionRef) -> bool {
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
