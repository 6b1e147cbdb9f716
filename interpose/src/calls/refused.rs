//! Calls that are refused, each with the errno of Linux for a file that lacks the operation.

use super::data::mount;
use crate::descriptors;
use crate::dispatch::{Answer, Call};
use crate::mount::Errno;
use crate::paths;
use crate::raw;
use crate::table::{self, PathArgument};

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

/// `inotify_add_watch`: the error of a kernel without free watches, after which programs poll. Errors of the arguments come
/// first, in the kernel's order: with an empty path the kernel checks all arguments but the path.
pub fn no_watch(call: &Call) -> Answer {
    let [watcher, _, mask, ..] = call.arguments;
    // SAFETY: the path is static.
    match unsafe { raw::try_call(libc::SYS_inotify_add_watch, &[watcher, c"".as_ptr() as u64, mask]) } {
        Err(Errno(libc::EBADF)) if descriptors::is_ours(call.int(0)) => {
            call.open_file(0)?;
            return refuse(libc::EINVAL);
        }
        Err(errno) if errno.0 != libc::ENOENT => return Err(errno.into()),
        _ => {}
    }
    let follow = mask as u32 & libc::IN_DONT_FOLLOW == 0;
    let path = PathArgument { follow, ..table::path(1) };
    paths::serve(call, path, |target| {
        let mode = u32::from(mount().attributes(target)?.stx_mode);
        if mask as u32 & libc::IN_ONLYDIR != 0 && mode & libc::S_IFMT != libc::S_IFDIR {
            return Err(Errno(libc::ENOTDIR));
        }
        mount().access(target, libc::R_OK, libc::AT_EACCESS)?;
        Err(Errno(libc::ENOSPC))
    })
}

/// `fanotify_mark`
pub fn no_mark(_call: &Call) -> Answer {
    refuse(libc::ENODEV)
}
