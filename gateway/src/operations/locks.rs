//! Locks, with and without waiting.

use crate::abi::{Body, FileLock, InHeader, LOCK_FLOCK, LockIn};
use crate::files::OpenFile;
use crate::gateway::{Answer, Gateway};
use crate::reply::Reply;
use crate::waits::{Reason, Waiter};
use format::record::FILE_BYTES_MAX;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;
use vfs::Error;
use vfs::engine::{Handle, Lock, LockFamily, LockKind, LockOwner, Locked, Ticket};

/// Converts the last byte of a range: the kernel's largest offset means the end of the file, for which the engine has
/// its largest number.
fn last_of(kernel: u64) -> u64 {
    if kernel >= FILE_BYTES_MAX { u64::MAX } else { kernel }
}

/// None: unlock.
fn kind_of(kernel: i32) -> Result<Option<LockKind>, Error> {
    match kernel {
        libc::F_RDLCK => Ok(Some(LockKind::Shared)),
        libc::F_WRLCK => Ok(Some(LockKind::Exclusive)),
        libc::F_UNLCK => Ok(None),
        _ => Err(Error::Invalid),
    }
}

/// A decoded request.
struct Wanted {
    handle: Handle,
    owner: LockOwner,
    family: LockFamily,
    kind: Option<LockKind>,
    first: u64,
    last: u64,
}

impl Gateway {
    fn wanted(&self, fields: &LockIn, file: &OpenFile, asks: bool) -> Result<Wanted, Error> {
        let kind = kind_of(fields.lock.kind)?;
        let locks = kind.is_some() && !asks;
        let handle = file.handle;
        if fields.flags & LOCK_FLOCK != 0 {
            let owner = self.files.flock_owner(file, locks);
            return Ok(Wanted { handle, owner, family: LockFamily::Whole, kind, first: 0, last: u64::MAX });
        }
        let owner = self.files.range_owner(file, fields.owner, fields.lock.pid, locks);
        let (first, last) = (fields.lock.first, last_of(fields.lock.last));
        Ok(Wanted { handle, owner, family: LockFamily::Ranges, kind, first, last })
    }

    /// Reports a conflicting lock.
    pub(crate) fn get_lock(&self, body: &mut Body<'_>, reply: &mut Reply) -> Result<Answer, Error> {
        let fields: LockIn = body.take()?;
        let file = self.files.get(fields.handle)?;
        let Wanted { handle, owner, family, kind, first, last } = self.wanted(&fields, &file, true)?;
        let lock = Lock { family, kind: kind.ok_or(Error::Invalid)?, first, last };
        let met = |conflict: &Result<Option<_>, Error>| matches!(conflict, Ok(Some(_)));
        let conflict = self.arrivals.after_closings(met, || self.engine.conflict(handle, owner, lock))?;
        reply.put(&match conflict {
            None => FileLock { kind: libc::F_UNLCK, ..fields.lock },
            Some((held, whose)) => FileLock {
                first: held.first,
                last: held.last.min(FILE_BYTES_MAX),
                kind: if held.kind == LockKind::Shared { libc::F_RDLCK } else { libc::F_WRLCK },
                pid: match whose {
                    LockOwner::Process { pid, .. } => pid,
                    LockOwner::Description(_) => 0,
                },
            },
        });
        Ok(Answer::Ready)
    }

    /// Locks or unlocks. A request that has to wait does so in its own thread, which sends the answer.
    pub(crate) fn set_lock(
        self: &Arc<Self>,
        header: &InHeader,
        body: &mut Body<'_>,
        waits: bool,
    ) -> Result<Answer, Error> {
        let fields: LockIn = body.take()?;
        let file = self.files.get(fields.handle)?;
        let Wanted { handle, owner, family, kind, first, last } = self.wanted(&fields, &file, false)?;
        let Some(kind) = kind else {
            self.engine.unlock(handle, owner, family, first, last)?;
            return Ok(Answer::Ready);
        };
        let lock = Lock { family, kind, first, last };
        if !waits {
            let met = |locked: &Result<Locked, Error>| *locked == Err(Error::WouldBlock);
            self.arrivals.after_closings(met, || self.engine.lock(handle, owner, lock, None))?;
            return Ok(Answer::Ready);
        }
        let waiter = self.waits.enter(header.unique).ok_or(Error::NoLocks)?;
        let waker = Waker::from(waiter.clone());
        let asked = catch_unwind(AssertUnwindSafe(|| self.engine.lock(handle, owner, lock, Some(&waker))));
        if let Ok(Ok(Locked::Queued(ticket))) = asked {
            return self.wait_aside(header.unique, ticket, waiter);
        }
        self.waits.leave(header.unique);
        asked.unwrap_or(Err(Error::Io)).map(|_| Answer::Ready)
    }

    fn wait_aside(
        self: &Arc<Self>,
        unique: u64,
        ticket: Ticket,
        waiter: Arc<Waiter>,
    ) -> Result<Answer, Error> {
        let gateway = self.clone();
        let body = Box::new(move || {
            let ended = catch_unwind(AssertUnwindSafe(|| gateway.wait_for(ticket, &waiter)));
            let result = ended.unwrap_or(Err(Error::Io)).map_err(vfs::errno::number);
            (gateway.send)(Reply::new(0).finish(unique, result));
            gateway.waits.leave(unique);
        });
        if self.host.spawn("waits for a lock", body).is_ok() {
            return Ok(Answer::Later);
        }
        let taken_back = self.engine.cancel(ticket);
        self.waits.leave(unique);
        if taken_back { Err(Error::NoLocks) } else { Ok(Answer::Ready) }
    }

    fn wait_for(&self, ticket: Ticket, waiter: &Waiter) -> Result<(), Error> {
        loop {
            if waiter.sleep() == Reason::Interrupted {
                return if self.engine.cancel(ticket) { Err(Error::Interrupted) } else { Ok(()) };
            }
            match self.engine.redeem(ticket) {
                Ok(Locked::Granted) => return Ok(()),
                Ok(Locked::Queued(_)) => {}
                // The descriptor was closed meanwhile, which ended the owner's requests.
                Err(Error::Stale) => return Err(Error::BadDescriptor),
                Err(error) => return Err(error),
            }
        }
    }
}
