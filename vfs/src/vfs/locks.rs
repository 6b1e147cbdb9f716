//! `fcntl` and `flock`: status flags, and locks with and without waiting.

use super::Vfs;
use crate::engine::{Engine, Lock, LockFamily, LockKind, LockOwner, Locked, Target, Ticket};
use crate::error::Error;
use crate::file::File;
use format::record::{FILE_BYTES_MAX, FileType};
use libc::c_int;
use std::task::Waker;

/// Status flags that `F_SETFL` changes; `O_ASYNC` only for files that send signals.
const CHANGEABLE: c_int = libc::O_APPEND | libc::O_NONBLOCK | libc::O_DIRECT | libc::O_NOATIME;

/// Kind of owner of a range lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeKind {
    /// The process: `F_SETLK`.
    Process,
    /// Another process that uses this view: a child that shares the memory of the view's process.
    Other(LockOwner),
    /// The description: `F_OFD_SETLK`.
    Description,
}

/// A lock as `struct flock` describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRequest {
    /// Kind of the lock; `None` unlocks.
    pub kind: Option<LockKind>,
    /// `SEEK_SET`, `SEEK_CUR` or `SEEK_END`.
    pub whence: c_int,
    /// Offset from there.
    pub start: i64,
    /// Number of bytes; 0: to the end of the file, wherever it moves; negative: the bytes before `start`.
    pub bytes: i64,
}

/// A conflicting lock, as `F_GETLK` returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeAnswer {
    /// Kind of the lock.
    pub kind: LockKind,
    /// First byte.
    pub start: i64,
    /// Number of bytes; 0: to the end of the file.
    pub bytes: i64,
    /// The process that holds it, or -1 if a description does.
    pub pid: i32,
}

/// Reason why a waiter's pause ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// The waker was woken, or spuriously: the waiter checks again.
    Over,
    /// A signal arrived.
    Interrupted,
}

/// The way in which a front end waits.
pub struct Patience<'a> {
    /// Woken when the lock may be available.
    pub waker: &'a Waker,
    /// Waits until the waker was woken, which may have happened already, or a signal arrived.
    pub pause: &'a mut dyn FnMut() -> Pause,
}

impl<E: Engine> Vfs<E> {
    /// `F_SETFL`
    ///
    /// # Errors
    /// `BadDescriptor`; `NotPermitted` for `O_NOATIME` on a file of another user, `Invalid` for `O_DIRECT` on a directory.
    pub fn set_flags(&self, file: &File, flags: c_int) -> Result<(), Error> {
        let handle = file.handle()?;
        let old = file.flags();
        if flags & !old & libc::O_NOATIME != 0
            && !self.caller().owns(&self.engine.getattr(Target::Open(handle))?)
        {
            return Err(Error::NotPermitted);
        }
        if flags & libc::O_DIRECT != 0 && file.file_type == FileType::Directory {
            return Err(Error::Invalid);
        }
        file.set_flags(old & !CHANGEABLE | flags & CHANGEABLE);
        Ok(())
    }

    /// `flock`; `None` unlocks. Without patience the call does not wait.
    ///
    /// # Errors
    /// `BadDescriptor`, `WouldBlock`, `Interrupted`, `NoLocks`.
    pub fn flock(
        &self,
        file: &File,
        kind: Option<LockKind>,
        wait: Option<Patience<'_>>,
    ) -> Result<(), Error> {
        self.set_lock(file, file.owner, LockFamily::Whole, kind, (0, u64::MAX), wait)
    }

    /// `F_SETLK`, `F_SETLKW` and their `F_OFD_` forms.
    ///
    /// # Errors
    /// `BadDescriptor`, also for a file that is not open for reading (shared) or writing (exclusive); `Invalid`,
    /// `Overflow`; `WouldBlock`, `Interrupted`, `Deadlock`, `NoLocks`.
    pub fn set_range(
        &self,
        file: &File,
        whose: RangeKind,
        request: &LockRequest,
        wait: Option<Patience<'_>>,
    ) -> Result<(), Error> {
        file.handle()?;
        let range = self.range(file, request)?;
        match request.kind {
            Some(LockKind::Shared) if !file.access.read => return Err(Error::BadDescriptor),
            Some(LockKind::Exclusive) if !file.access.write => return Err(Error::BadDescriptor),
            _ => {}
        }
        self.set_lock(file, self.lock_owner(file, whose), LockFamily::Ranges, request.kind, range, wait)
    }

    /// `F_GETLK` and `F_OFD_GETLK`: a conflicting lock of another owner, if any.
    ///
    /// # Errors
    /// `BadDescriptor`, `Invalid`, `Overflow`.
    pub fn get_range(
        &self,
        file: &File,
        whose: RangeKind,
        request: &LockRequest,
    ) -> Result<Option<RangeAnswer>, Error> {
        let handle = file.handle()?;
        let kind = request.kind.ok_or(Error::Invalid)?;
        let (first, last) = self.range(file, request)?;
        let lock = Lock { family: LockFamily::Ranges, kind, first, last };
        let conflict = self.engine.conflict(handle, self.lock_owner(file, whose), lock)?;
        Ok(conflict.map(|(held, owner)| RangeAnswer {
            kind: held.kind,
            start: held.first as i64,
            bytes: if held.last == u64::MAX { 0 } else { (held.last - held.first + 1) as i64 },
            pid: match owner {
                LockOwner::Process { pid, .. } => pid as i32,
                LockOwner::Description(_) => -1,
            },
        }))
    }

    fn lock_owner(&self, file: &File, whose: RangeKind) -> LockOwner {
        match whose {
            RangeKind::Process => self.owner,
            RangeKind::Other(owner) => owner,
            RangeKind::Description => file.owner,
        }
    }

    fn set_lock(
        &self,
        file: &File,
        owner: LockOwner,
        family: LockFamily,
        kind: Option<LockKind>,
        (first, last): (u64, u64),
        wait: Option<Patience<'_>>,
    ) -> Result<(), Error> {
        let handle = file.handle()?;
        let Some(kind) = kind else {
            return self.engine.unlock(handle, owner, family, first, last);
        };
        let lock = Lock { family, kind, first, last };
        let waker = wait.as_ref().map(|patience| patience.waker);
        match (self.engine.lock(handle, owner, lock, waker)?, wait) {
            (Locked::Granted, _) => Ok(()),
            (Locked::Queued(ticket), Some(patience)) => self.await_lock(ticket, patience),
            (Locked::Queued(ticket), None) => {
                self.engine.cancel(ticket);
                Err(Error::WouldBlock)
            }
        }
    }

    fn await_lock(&self, ticket: Ticket, patience: Patience<'_>) -> Result<(), Error> {
        loop {
            let pause = (patience.pause)();
            if self.engine.redeem(ticket)? == Locked::Granted {
                return Ok(());
            }
            if pause == Pause::Interrupted {
                // A request that was granted meanwhile holds its lock.
                return if self.engine.cancel(ticket) { Err(Error::Interrupted) } else { Ok(()) };
            }
        }
    }

    /// First and last byte.
    fn range(&self, file: &File, request: &LockRequest) -> Result<(u64, u64), Error> {
        let base = match request.whence {
            libc::SEEK_SET => 0,
            libc::SEEK_CUR => file.with_offset(|offset| *offset) as i64,
            libc::SEEK_END => self.engine.getattr(Target::Open(file.handle()?))?.size as i64,
            _ => return Err(Error::Invalid),
        };
        let start = base.checked_add(request.start).ok_or(Error::Overflow)?;
        let (first, last) = match request.bytes {
            0 => (start, None),
            1.. => (start, Some(start.checked_add(request.bytes - 1).ok_or(Error::Overflow)?)),
            _ => (start.checked_add(request.bytes).ok_or(Error::Invalid)?, Some(start.saturating_sub(1))),
        };
        let first = u64::try_from(first).map_err(|_| Error::Invalid)?;
        // A lock up to the largest offset extends to the end of the file.
        let last = last.map(|last| last as u64).filter(|last| *last < FILE_BYTES_MAX);
        Ok((first, last.unwrap_or(u64::MAX)))
    }
}
