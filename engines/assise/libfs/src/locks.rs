//! Locks: SharedFS keeps the table of the node, so that processes see each other's. A LibFS has no thread that could
//! be woken when a lock comes free; so a request that waits is asked after by [`LibFs::redeem_lock`], which answers
//! late rather than at once, and the waker is woken right away: its owner asks again.

use crate::calls::error_of;
use crate::engine::LibFs;
use format::InodeNumber;
use format::call::{
    CallKind, FAMILY_RANGES, FAMILY_WHOLE, LOCK_EXCLUSIVE, LOCK_SHARED, LockRequest, LockResponse,
    OWNER_DESCRIPTION, OWNER_PROCESS, Status, TicketRequest,
};
use std::collections::BTreeSet;
use std::task::Waker;
use vfs::Error;
use vfs::engine::{Handle, Lock, LockFamily, LockKind, LockOwner, Locked, Ticket};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// How long SharedFS may keep the answer to a question after a lock.
const REDEEM_MS: u32 = 100;

/// What this process asked of the table of locks.
#[derive(Default)]
pub(crate) struct Asked {
    /// Requests that wait, and who is woken to ask after them again.
    waiting: Vec<(Ticket, Waker)>,
    /// Who may hold a lock on what: an owner that is not here is released without a call.
    owners: BTreeSet<(LockOwner, InodeNumber)>,
}

fn request(inode: InodeNumber, owner: LockOwner, lock: Lock, wait: bool) -> LockRequest {
    let (owner_kind, owner, pid) = match owner {
        LockOwner::Process { id, pid } => (OWNER_PROCESS, id, pid),
        LockOwner::Description(id) => (OWNER_DESCRIPTION, id, 0),
    };
    LockRequest {
        inode,
        owner: U64::new(owner),
        pid: U32::new(pid),
        owner_kind,
        family: match lock.family {
            LockFamily::Ranges => FAMILY_RANGES,
            LockFamily::Whole => FAMILY_WHOLE,
        },
        kind: match lock.kind {
            LockKind::Shared => LOCK_SHARED,
            LockKind::Exclusive => LOCK_EXCLUSIVE,
        },
        wait: wait.into(),
        first: U64::new(lock.first),
        last: U64::new(lock.last),
    }
}

fn lock_of(request: &LockRequest) -> Option<(Lock, LockOwner)> {
    let family = match request.family {
        FAMILY_RANGES => LockFamily::Ranges,
        FAMILY_WHOLE => LockFamily::Whole,
        _ => return None,
    };
    let kind = match request.kind {
        LOCK_SHARED => LockKind::Shared,
        LOCK_EXCLUSIVE => LockKind::Exclusive,
        _ => return None,
    };
    let owner = match request.owner_kind {
        OWNER_PROCESS => LockOwner::Process { id: request.owner.get(), pid: request.pid.get() },
        OWNER_DESCRIPTION => LockOwner::Description(request.owner.get()),
        _ => return None,
    };
    Some((Lock { family, kind, first: request.first.get(), last: request.last.get() }, owner))
}

fn locked(response: &[u8]) -> vfs::engine::Result<Locked> {
    let (answer, _) = format::call::split::<LockResponse>(response).map_err(|_| Error::Io)?;
    Ok(match answer.ticket.get() {
        0 => Locked::Granted,
        ticket => Locked::Queued(Ticket::new(ticket)),
    })
}

impl LibFs {
    fn file_of(&self, handle: Handle) -> vfs::engine::Result<InodeNumber> {
        self.run(|state| {
            let file = state.file(handle)?;
            Ok(state.nodes.get(file.node).inode)
        })
    }

    fn lock_call(&self, kind: CallKind, body: &[u8]) -> vfs::engine::Result<(Status, Vec<u8>)> {
        let line = self.line()?;
        let mut response = Vec::new();
        let status = self.call(&line, kind, &[body], &mut response)?;
        Ok((status, response))
    }

    pub(crate) fn take_lock(
        &self,
        handle: Handle,
        owner: LockOwner,
        lock: Lock,
        waker: Option<&Waker>,
    ) -> vfs::engine::Result<Locked> {
        let inode = self.file_of(handle)?;
        self.asked.lock().owners.insert((owner, inode));
        let body = request(inode, owner, lock, waker.is_some());
        match self.lock_call(CallKind::Lock, body.as_bytes())? {
            (Status::Ok, response) => {
                let locked = locked(&response)?;
                if let (Locked::Queued(ticket), Some(waker)) = (locked, waker) {
                    waker.wake_by_ref();
                    self.asked.lock().waiting.push((ticket, waker.clone()));
                }
                Ok(locked)
            }
            (Status::Limit, _) => Err(Error::NoLocks),
            // The locks of a session that is over are gone: no lock can be promised in the same call.
            (Status::Sealed, _) => Err(Error::Io),
            (refused, _) => Err(error_of(refused)),
        }
    }

    pub(crate) fn redeem_lock(&self, ticket: Ticket) -> vfs::engine::Result<Locked> {
        let body = TicketRequest {
            ticket: U64::new(ticket.get()),
            wait_ms: U32::new(REDEEM_MS),
            reserved: U32::new(0),
        };
        let result = match self.lock_call(CallKind::RedeemLock, body.as_bytes())? {
            (Status::Ok, response) => locked(&response),
            (Status::NotFound, _) => Err(Error::Stale),
            (refused, _) => Err(error_of(refused)),
        };
        let mut asked = self.asked.lock();
        if matches!(result, Ok(Locked::Queued(_))) {
            asked.waiting.iter().filter(|(of, _)| *of == ticket).for_each(|(_, waker)| waker.wake_by_ref());
        } else {
            asked.waiting.retain(|(of, _)| *of != ticket);
        }
        result
    }

    pub(crate) fn cancel_lock(&self, ticket: Ticket) -> bool {
        self.asked.lock().waiting.retain(|(of, _)| *of != ticket);
        let body =
            TicketRequest { ticket: U64::new(ticket.get()), wait_ms: U32::new(0), reserved: U32::new(0) };
        match self.lock_call(CallKind::CancelLock, body.as_bytes()) {
            Ok((Status::Ok, response)) => !matches!(locked(&response), Ok(Locked::Granted)),
            // With its session the request is gone.
            _ => true,
        }
    }

    pub(crate) fn drop_lock(
        &self,
        handle: Handle,
        owner: LockOwner,
        family: LockFamily,
        (first, last): (u64, u64),
    ) -> vfs::engine::Result<()> {
        let inode = self.file_of(handle)?;
        let lock = Lock { family, kind: LockKind::Shared, first, last };
        match self.lock_call(CallKind::Unlock, request(inode, owner, lock, false).as_bytes())?.0 {
            Status::Ok | Status::Sealed => Ok(()),
            Status::Limit => Err(Error::NoLocks),
            refused => Err(error_of(refused)),
        }
    }

    pub(crate) fn test_lock(
        &self,
        handle: Handle,
        owner: LockOwner,
        lock: Lock,
    ) -> vfs::engine::Result<Option<(Lock, LockOwner)>> {
        let inode = self.file_of(handle)?;
        match self.lock_call(CallKind::TestLock, request(inode, owner, lock, false).as_bytes())? {
            (Status::Ok, response) if response.is_empty() => Ok(None),
            (Status::Ok, response) => {
                let (found, _) = format::call::split::<LockRequest>(&response).map_err(|_| Error::Io)?;
                lock_of(&found).map(Some).ok_or(Error::Io)
            }
            (Status::Sealed, _) => Err(Error::Io),
            (refused, _) => Err(error_of(refused)),
        }
    }

    pub(crate) fn release_locks(&self, owner: LockOwner, node: Option<InodeNumber>) {
        let mut asked = self.asked.lock();
        let concerned =
            |held: &(LockOwner, InodeNumber)| held.0 == owner && node.is_none_or(|node| node == held.1);
        if !asked.owners.iter().any(concerned) {
            return;
        }
        asked.owners.retain(|held| !concerned(held));
        drop(asked);
        let all = Lock { family: LockFamily::Ranges, kind: LockKind::Shared, first: 0, last: u64::MAX };
        let body = request(node.unwrap_or(InodeNumber::NONE), owner, all, false);
        // If the daemon is gone, so are its locks.
        let _ = self.lock_call(CallKind::ReleaseLocks, body.as_bytes());
    }
}
