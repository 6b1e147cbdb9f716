//! Calls after which the kernel works on descriptors by itself.

use crate::dispatch::{Answer, Call, Refusal};
use crate::local::local;
use crate::mount::Errno;
use crate::{descriptors, real, tell};

/// `io_uring_setup`: refused without a mount, as on a kernel without io_uring.
pub fn io_uring_setup(_call: &Call) -> Answer {
    if local().borrowed().is_some() {
        return Err(Errno(libc::ENOSYS).into());
    }
    match real::begin() {
        Ok(()) => Err(Refusal::Pass),
        Err(_) => {
            tell::needs_mount("io_uring cannot be used");
            Err(Errno(libc::ENOSYS).into())
        }
    }
}

/// `io_setup`: without a mount, requests on files of the tree get EBADF.
pub fn io_setup(_call: &Call) -> Answer {
    if local().borrowed().is_none() && real::begin().is_err() && descriptors::any() {
        tell::needs_mount("asynchronous IO (io_submit) cannot be used on files of the tree");
    }
    Err(Refusal::Pass)
}
