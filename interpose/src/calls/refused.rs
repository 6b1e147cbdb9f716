//! Calls that cannot be served, each with the errno by which Linux says so for a file that lacks the operation.

use crate::dispatch::{Answer, Call};
use crate::mount::Errno;

const fn refuse(number: i32) -> Answer {
    Err(crate::dispatch::Refusal::Errno(Errno(number)))
}

/// Calls on sockets.
pub fn not_a_socket(call: &Call) -> Answer {
    // The library's own are no descriptors at all for the program.
    call.file(0)?;
    refuse(libc::ENOTSOCK)
}

/// `epoll_ctl` on a regular file; `acct` on the mount.
pub fn not_permitted(_call: &Call) -> Answer {
    refuse(libc::EPERM)
}

/// Operations that files of this kind do not take; mounts on the mount.
pub fn invalid(_call: &Call) -> Answer {
    refuse(libc::EINVAL)
}

/// Operations that this file system does not have.
pub fn not_supported(_call: &Call) -> Answer {
    refuse(libc::EOPNOTSUPP)
}

/// `splice` and `tee`.
pub fn splice(_call: &Call) -> Answer {
    refuse(libc::EINVAL)
}

/// `quotactl`
pub fn no_block_device(_call: &Call) -> Answer {
    refuse(libc::ENOTBLK)
}

/// `inotify_add_watch`: programs poll when the kernel has no watch left.
pub fn no_watch(_call: &Call) -> Answer {
    refuse(libc::ENOSPC)
}

/// `fanotify_mark`
pub fn no_mark(_call: &Call) -> Answer {
    refuse(libc::ENODEV)
}
