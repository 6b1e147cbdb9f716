//! `fcntl` and `flock` on files of the tree.
//!
//! `fcntl` locks belong to the process and survive an exec, except those on files of which the exec closes a
//! descriptor. An exec can fail, so the next program ends these locks before its first instruction; the token of the
//! exec names the files.
//!
//! A child between vfork and exec uses its parent's client, but owns its `fcntl` locks itself: they conflict with those of
//! its parent, and a close in the child ends only them. At the exec they are shared like the child's files (`given`), and
//! the parent, when it continues, ends its own part in them.

use super::answers::errno_of;
use super::{Open, Tree, open_of};
use crate::local::local;
use crate::mount::{ChildLocks, Errno, Handle, Result};
use format::InodeNumber;
use ipc::{Host, SystemHost};
use libfs::LibFs;
use libfs::share::Given;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::task::Waker;
use vfs::engine::{Access, Engine, LockKind, LockOwner};
use vfs::vfs::{LockRequest, Patience, Pause, RangeKind};
use vfs::{File, Vfs};

/// State about the process's own `fcntl` locks.
#[derive(Debug, Default)]
pub(super) struct RangeLocks {
    /// The process may have such locks.
    asked: AtomicBool,
    /// Inodes whose locks have ended with the exec that started this program.
    ended: AtomicPtr<Vec<InodeNumber>>,
}

impl RangeLocks {
    /// Whether the process may have such locks.
    pub fn may_hold(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// Notes a request for a lock.
    pub fn note(&self, command: i32) {
        if matches!(command, libc::F_SETLK | libc::F_SETLKW) {
            self.asked.store(true, Ordering::Relaxed);
        }
    }

    /// The process is a forked child, which has no locks of its parent.
    pub fn forget(&self) {
        self.asked.store(false, Ordering::Relaxed);
    }
}

impl Tree {
    /// Whether the process's own locks may be on this file: this program has used it, or an earlier program of the
    /// process has.
    pub(super) fn may_have_locked(&self, open: &Open) -> bool {
        // SAFETY: freed only at the close, which comes later. Acquire pairs with the Release of the thread that opened
        // it.
        let current = unsafe { open.current.load(Ordering::Acquire).as_ref() };
        // SAFETY: a client is never freed.
        let client = unsafe { self.attached.load(Ordering::Acquire).as_ref() };
        current.is_some_and(|current| current.era == self.era())
            || client.is_none_or(|client| client.owner.is_some())
    }

    /// Adds the files whose locks end at the exec to the token for the next program.
    pub(super) fn locks_that_end(&self, closing: &[Handle], token: &mut Vec<u8>) {
        let may_hold = match local().borrowed() {
            // SAFETY: only this child uses the overlay until its exec.
            Some(overlay) => unsafe { (*overlay).locks }.is_some(),
            None => self.ranges.may_hold(),
        };
        if !may_hold {
            return;
        }
        for handle in closing {
            token.extend_from_slice(&open_of(handle).inode.get().to_le_bytes());
        }
    }

    /// In the next program: takes over these files. A process with an owner from before the exec may have locks.
    pub(super) fn locks_ended(&self, inodes: &[u8]) {
        self.ranges.asked.store(self.owner.load(Ordering::Relaxed) != 0, Ordering::Relaxed);
        let (inodes, _) = inodes.as_chunks::<8>();
        if !inodes.is_empty() {
            let inodes = inodes.iter().map(|number| InodeNumber::new(u64::from_le_bytes(*number))).collect();
            self.ranges.ended.store(Box::into_raw(Box::new(inodes)), Ordering::Relaxed);
        }
    }

    /// Ends the locks on files that the exec has closed.
    pub(super) fn end_locks_of_closed(&self) {
        let ended = self.ranges.ended.swap(std::ptr::null_mut(), Ordering::Relaxed);
        if ended.is_null() {
            return;
        }
        // SAFETY: made by `locks_ended`, and taken out by the swap.
        let inodes = unsafe { Box::from_raw(ended) };
        // Without a daemon there are no locks.
        let Ok(vfs) = self.client() else { return };
        let id = self.owner.load(Ordering::Relaxed);
        let owner = LockOwner::Process { id, pid: crate::raw::process().unsigned_abs() };
        for inode in *inodes {
            vfs.engine().speaks_for(&Given { inode, access: Access::default(), owner: Some(owner) });
            vfs.engine().release(owner, Some(inode));
        }
    }
}

/// The owner of a child's own locks.
pub(super) fn owner_of(locks: ChildLocks) -> LockOwner {
    LockOwner::Process { id: locks.owner, pid: locks.process }
}

/// The owner of the calling child's own locks, if the caller is a child between vfork and exec.
pub(super) fn childs_owner() -> Option<LockOwner> {
    // SAFETY: only this child uses the overlay until its exec.
    let overlay = local().borrowed().map(|overlay| unsafe { &mut *overlay })?;
    let fresh = || ChildLocks { owner: SystemHost.random(), process: crate::raw::process().unsigned_abs() };
    Some(owner_of(*overlay.locks.get_or_insert_with(fresh)))
}

/// Ends the calling child's own locks on a file. In the parent, which closes the child's files, they are kept:
/// [`crate::mount::Mount::child_left`] ends them.
pub(super) fn end_childs_locks(vfs: &Vfs<LibFs>, inode: InodeNumber) {
    // SAFETY: only this child uses the overlay until its exec.
    let locks = local().borrowed().and_then(|overlay| unsafe { (*overlay).locks });
    if let Some(locks) = locks {
        vfs.engine().release(owner_of(locks), Some(inode));
    }
}

fn lock_kind(kind: i32) -> Result<Option<LockKind>> {
    match kind {
        libc::F_RDLCK => Ok(Some(LockKind::Shared)),
        libc::F_WRLCK => Ok(Some(LockKind::Exclusive)),
        libc::F_UNLCK => Ok(None),
        _ => Err(Errno(libc::EINVAL)),
    }
}

/// The pause between two attempts to get a lock: each attempt waits by itself, so this only checks for a signal.
fn pause() -> Pause {
    let local = local();
    if local.deferred.load(Ordering::Relaxed) == 0 {
        return Pause::Over;
    }
    local.interrupted.store(1, Ordering::Relaxed);
    Pause::Interrupted
}

/// A request for a lock of the description, or of `process`, as the command says.
pub fn range_lock(
    vfs: &Vfs<LibFs>,
    file: &File,
    process: RangeKind,
    command: i32,
    range: &mut libc::flock,
) -> Result<()> {
    let whose = match command {
        libc::F_OFD_GETLK | libc::F_OFD_SETLK | libc::F_OFD_SETLKW => {
            if range.l_pid != 0 {
                return Err(Errno(libc::EINVAL));
            }
            RangeKind::Description
        }
        _ => process,
    };
    let kind = lock_kind(range.l_type.into());
    let asks = matches!(command, libc::F_GETLK | libc::F_OFD_GETLK);
    let of_kind =
        |kind| LockRequest { kind, whence: range.l_whence.into(), start: range.l_start, bytes: range.l_len };
    if kind.is_err() && !asks {
        // An error of the range comes first.
        vfs.get_range(file, whose, &of_kind(Some(LockKind::Shared))).map_err(errno_of)?;
    }
    let request = of_kind(kind?);
    if !asks {
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
