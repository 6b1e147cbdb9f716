//! Calls that are refused, each with the errno of Linux for a file that lacks the operation.

use crate::dispatch::{Answer, Call};
use crate::mount::Errno;

const fn refuse(number: i32) -> Answer {
    Err(crate::dispatch::Refusal::Errno(Errno(number)))
}

/// Calls on sockets.
pub fn not_a_socket(call: &Call) -> Answer {
    // The program must see the library's own descriptors as closed.
    call.file(0)?;
    refuse(libc::ENOTSOCK)
}

/// `epoll_ctl` on a regular file; `acct` on the mount.
pub fn not_permitted(_call: &Call) -> Answer {
    refuse(libc::EPERM)
}

/// Operations that files of this kind do not have; mount calls on the mount.
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

/// `inotify_add_watch`: the error of a kernel without free watches, after which programs poll.
pub fn no_watch(_call: &Call) -> Answer {
    refuse(libc::ENOSPC)
}

/// `fanotify_mark`
pub fn no_mark(_call: &Call) -> Answer {
    refuse(libc::ENODEV)
}
