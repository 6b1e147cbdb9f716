//! Calls after which the kernel works on descriptors by itself.

use crate::dispatch::{Answer, Call, Refusal};
use crate::local::local;
use crate::mount::Errno;
use crate::{real, tell};

/// `io_uring_setup`, and `io_setup` of libaio: refused without a mount, as on a kernel without them. Programs use other
/// calls then; many of them repeat a request that fails for ever.
fn set_up(what: &str) -> Answer {
    if local().borrowed().is_some() {
        return Err(Errno(libc::ENOSYS).into());
    }
    match real::begin() {
        Ok(()) => Err(Refusal::Pass),
        Err(_) => {
            tell::needs_mount(what);
            Err(Errno(libc::ENOSYS).into())
        }
    }
}

/// `io_uring_setup`.
pub fn io_uring_setup(_call: &Call) -> Answer {
    set_up("io_uring cannot be used")
}

/// `io_setup`.
pub fn io_setup(_call: &Call) -> Answer {
    set_up("asynchronous IO (libaio) cannot be used")
}
