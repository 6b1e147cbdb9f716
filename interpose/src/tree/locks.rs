//! `fcntl` and `flock` on files of the tree.

use super::answers::errno_of;
use crate::local::local;
use crate::mount::{Errno, Result};
use libfs::LibFs;
use std::sync::atomic::Ordering;
use std::task::Waker;
use vfs::engine::LockKind;
use vfs::vfs::{LockRequest, Patience, Pause, RangeKind};
use vfs::{File, Vfs};

fn lock_kind(kind: i32) -> Result<Option<LockKind>> {
    match kind {
        libc::F_RDLCK => Ok(Some(LockKind::Shared)),
        libc::F_WRLCK => Ok(Some(LockKind::Exclusive)),
        libc::F_UNLCK => Ok(None),
        _ => Err(Errno(libc::EINVAL)),
    }
}

/// One look at a lock that is waited for took its time already: between two looks only a signal is asked for.
fn pause() -> Pause {
    let local = local();
    if local.deferred.load(Ordering::Relaxed) == 0 {
        return Pause::Over;
    }
    local.interrupted.store(1, Ordering::Relaxed);
    Pause::Interrupted
}

pub fn range_lock(vfs: &Vfs<LibFs>, file: &File, command: i32, range: &mut libc::flock) -> Result<()> {
    let whose = match command {
        libc::F_OFD_GETLK | libc::F_OFD_SETLK | libc::F_OFD_SETLKW => {
            if range.l_pid != 0 {
                return Err(Errno(libc::EINVAL));
            }
            RangeKind::Description
        }
        _ => RangeKind::Process,
    };
    let kind = lock_kind(range.l_type.into())?;
    let request =
        LockRequest { kind, whence: range.l_whence.into(), start: range.l_start, bytes: range.l_len };
    if !matches!(command, libc::F_GETLK | libc::F_OFD_GETLK) {
        let waits = matches!(command, libc::F_SETLKW | libc::F_OFD_SETLKW);
        let mut pause = pause;
        let patience = waits.then_some(Patience { waker: Waker::noop(), pause: &mut pause });
        return vfs.set_range(file, whose, &request, patience).map_err(errno_of);
    }
    match vfs.get_range(file, whose, &request).map_err(errno_of)? {
        None => range.l_type = libc::F_UNLCK as i16,
        Some(found) => {
            range.l_type = match found.kind {
                LockKind::Shared => libc::F_RDLCK as i16,
                LockKind::Exclusive => libc::F_WRLCK as i16,
            };
            range.l_whence = libc::SEEK_SET as i16;
            range.l_start = found.start;
            range.l_len = found.bytes;
            range.l_pid = found.pid;
        }
    }
    Ok(())
}

/// `flock` with its operation.
pub fn whole_lock(vfs: &Vfs<LibFs>, file: &File, operation: i32) -> Result<()> {
    let kind = match operation & !libc::LOCK_NB {
        libc::LOCK_SH => Some(LockKind::Shared),
        libc::LOCK_EX => Some(LockKind::Exclusive),
        libc::LOCK_UN => None,
        _ => return Err(Errno(libc::EINVAL)),
    };
    let mut pause = pause;
    let waits = operation & libc::LOCK_NB == 0;
    let patience = waits.then_some(Patience { waker: Waker::noop(), pause: &mut pause });
    vfs.flock(file, kind, patience).map_err(errno_of)
}
