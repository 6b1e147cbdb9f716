//! Calls that are refused, each with the errno of Linux for a file that lacks the operation.

use crate::descriptors;
use crate::dispatch::{Answer, Call};
use crate::mount::Errno;

const fn refuse(number: i32) -> Answer {
    Err(crate::dispatch::Refusal::Errno(Errno(number)))
}

/// The refusal of a call on descriptors; EBADF if one of them is only a path (`O_PATH`).
fn refuse_open(call: &Call, descriptors: &[usize], number: i32) -> Answer {
    for argument in descriptors {
        if descriptors::is_ours(call.int(*argument)) {
            call.open_file(*argument)?;
        }
    }
    refuse(number)
}

/// Calls on sockets.
pub fn not_a_socket(call: &Call) -> Answer {
    // The program must see the library's own descriptors as closed.
    refuse_open(call, &[0], libc::ENOTSOCK)
}

/// `epoll_ctl`
pub fn epoll_ctl(call: &Call) -> Answer {
    refuse_open(call, &[2], libc::EPERM)
}

/// `acct` on the mount.
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

/// `getdents`, which no C library calls any more.
pub fn getdents(call: &Call) -> Answer {
    refuse_open(call, &[0], libc::EOPNOTSUPP)
}

/// `splice`
pub fn splice(call: &Call) -> Answer {
    refuse_open(call, &[0, 2], libc::EINVAL)
}

/// `tee`
pub fn tee(call: &Call) -> Answer {
    refuse_open(call, &[0, 1], libc::EINVAL)
}

/// `vmsplice`
pub fn vmsplice(call: &Call) -> Answer {
    refuse_open(call, &[0], libc::EINVAL)
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
