//! Locks: SharedFS keeps the table of the node, so that processes see each other's. A LibFS has no thread that could
//! be woken when a lock comes free; so a request that waits is asked after by [`LibFs::redeem_lock`], which answers
//! late rather than at once, and the waker is woken right away: its owner asks again.
//!
//! A new session of the process has the locks of the one before it, and none of its requests: those are made again
//! under the tickets that were given here. A request whose answer was lost is made again, too; having what is asked
//! for already is no harm.

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
    /// Requests that wait.
    waiting: Vec<Waiting>,
    /// Tickets given here.
    tickets: u64,
    /// Who may hold a lock on what: an owner that is not here is released without a call.
    owners: BTreeSet<(LockOwner, InodeNumber)>,
}

impl Asked {
    /// An owner may hold a lock there.
    pub fn note(&mut self, owner: LockOwner, inode: InodeNumber) {
        self.owners.insert((owner, inode));
    }
}

/// A request that waits.
struct Waiting {
    /// As it is called here.
    ticket: Ticket,
    /// As SharedFS calls it, in the session of this number.
    server: u64,
    era: u64,
    request: LockRequest,
    /// Is woken to ask after it again.
    waker: Waker,
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

/// SharedFS's ticket; 0 if the lock was granted.
fn ticket_of(response: &[u8]) -> vfs::engine::Result<u64> {
    let (answer, _) = format::call::split::<LockResponse>(response).map_err(|_| Error::Io)?;
    Ok(answer.ticket.get())
}

impl LibFs {
    fn file_of(&self, handle: Handle) -> vfs::engine::Result<InodeNumber> {
        self.run(|state| {
            let file = state.file(handle)?;
            Ok(state.nodes.get(file.node).inode)
        })
    }

    /// A call that is made again in a new session if the one it was made in ends; with the number of the session that
    /// answered.
    fn lock_call(&self, kind: CallKind, body: &[u8]) -> vfs::engine::Result<(Status, Vec<u8>, u64)> {
        for _ in 0..self.limits.attempts {
            let line = self.line()?;
            let mut response = Vec::new();
            match self.call(&line, kind, &[body], &mut response)? {
                Status::Sealed => {}
                status => return Ok((status, response, line.era)),
            }
        }
        Err(Error::Io)
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
        let request = request(inode, owner, lock, waker.is_some());
        let (server, era) = self.ask_lock(&request)?;
        let Some(waker) = waker.filter(|_| server != 0) else { return Ok(Locked::Granted) };
        let mut asked = self.asked.lock();
        asked.tickets += 1;
        let ticket = Ticket::new(asked.tickets);
        asked.waiting.push(Waiting { ticket, server, era, request, waker: waker.clone() });
        waker.wake_by_ref();
        Ok(Locked::Queued(ticket))
    }

    /// SharedFS's ticket for a request, 0 if it was granted; and the session's number.
    fn ask_lock(&self, request: &LockRequest) -> vfs::engine::Result<(u64, u64)> {
        match self.lock_call(CallKind::Lock, request.as_bytes())? {
            (Status::Ok, response, era) => Ok((ticket_of(&response)?, era)),
            (Status::Limit, ..) => Err(Error::NoLocks),
            (refused, ..) => Err(error_of(refused)),
        }
    }

    pub(crate) fn redeem_lock(&self, ticket: Ticket) -> vfs::engine::Result<Locked> {
        let found = {
            let asked = self.asked.lock();
            let found = asked.waiting.iter().find(|waiting| waiting.ticket == ticket);
            found.map(|waiting| (waiting.server, waiting.era, waiting.request))
        };
        let (server, era, request) = found.ok_or(Error::Stale)?;
        let result = self.ask_after_lock(server, era, &request);
        let mut asked = self.asked.lock();
        match result {
            Ok((server, era)) if server != 0 => {
                for waiting in asked.waiting.iter_mut().filter(|waiting| waiting.ticket == ticket) {
                    (waiting.server, waiting.era) = (server, era);
                    waiting.waker.wake_by_ref();
                }
                Ok(Locked::Queued(ticket))
            }
            result => {
                asked.waiting.retain(|waiting| waiting.ticket != ticket);
                result.map(|_| Locked::Granted)
            }
        }
    }

    /// Asks after a request, or makes it again in a new session.
    fn ask_after_lock(
        &self,
        server: u64,
        era: u64,
        request: &LockRequest,
    ) -> vfs::engine::Result<(u64, u64)> {
        let line = self.line()?;
        if line.era != era {
            return self.ask_lock(request);
        }
        let body =
            TicketRequest { ticket: U64::new(server), wait_ms: U32::new(REDEEM_MS), reserved: U32::new(0) };
        let mut response = Vec::new();
        match self.call(&line, CallKind::RedeemLock, &[body.as_bytes()], &mut response)? {
            Status::Ok => Ok((ticket_of(&response)?, era)),
            Status::Sealed => self.ask_lock(request),
            Status::NotFound => Err(Error::Stale),
            refused => Err(error_of(refused)),
        }
    }

    pub(crate) fn cancel_lock(&self, ticket: Ticket) -> bool {
        let found = {
            let mut asked = self.asked.lock();
            let index = asked.waiting.iter().position(|waiting| waiting.ticket == ticket);
            index.map(|index| asked.waiting.swap_remove(index))
        };
        // A request that nobody was told of is gone with its session.
        let Some(Waiting { server, era, .. }) = found else { return true };
        let Ok(line) = self.line() else { return true };
        if line.era != era {
            return true;
        }
        let body = TicketRequest { ticket: U64::new(server), wait_ms: U32::new(0), reserved: U32::new(0) };
        let mut response = Vec::new();
        match self.call(&line, CallKind::CancelLock, &[body.as_bytes()], &mut response) {
            Ok(Status::Ok) => !matches!(ticket_of(&response), Ok(0)),
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
            Status::Ok => Ok(()),
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
            (Status::Ok, response, _) if response.is_empty() => Ok(None),
            (Status::Ok, response, _) => {
                let (found, _) = format::call::split::<LockRequest>(&response).map_err(|_| Error::Io)?;
                lock_of(&found).map(Some).ok_or(Error::Io)
            }
            (refused, ..) => Err(error_of(refused)),
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
        // If the daemon is gone for good, so are its locks.
        let _ = self.lock_call(CallKind::ReleaseLocks, body.as_bytes());
    }
}
