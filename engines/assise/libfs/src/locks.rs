//! Locks. Uncontended locks are decided in this process ([`crate::local_locks`]); SharedFS has the node's table of all
//! others, so that processes see each other's locks. LibFS has no thread that could be woken when a lock becomes free.
//! So the owner of a waiting request asks for its state by [`LibFs::redeem_lock`], whose answer SharedFS delays, and
//! the waker is woken at once so that the owner asks again.
//!
//! A new session of the process inherits the locks of its predecessor, but not its waiting requests: these are repeated
//! under the same tickets. A request whose answer was lost is repeated too; requesting a lock that is already held is
//! harmless.

use crate::calls::{Line, error_of};
use crate::engine::LibFs;
use crate::need::Step;
use crate::state::State;
use format::InodeNumber;
use format::call::{
    CallKind, FAMILY_RANGES, FAMILY_WHOLE, LOCK_EXCLUSIVE, LOCK_LEASE, LOCK_SHARED, LOCK_WAITS, LockRequest,
    LockResponse, OWNER_DESCRIPTION, OWNER_PROCESS, Status, TicketRequest, split,
};
use format::locks::LOCK_TABLE_BYTES;
use std::task::Waker;
use vfs::Error;
use vfs::engine::{Handle, Lock, LockFamily, LockKind, LockOwner, Locked, Ticket};
use vfs::locks::LockTable;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// How long SharedFS may delay the answer about a waiting request.
const REDEEM_MS: u32 = 100;

/// The process's requests to SharedFS's table of locks.
#[derive(Default)]
pub(crate) struct Asked {
    /// Waiting requests.
    waiting: Vec<Waiting>,
    /// Number of tickets issued.
    tickets: u64,
}

/// A waiting request.
struct Waiting {
    /// The ticket that the caller has.
    ticket: Ticket,
    /// SharedFS's ticket, in the session with number `era`.
    server: u64,
    era: u64,
    request: LockRequest,
    /// Woken so that the owner asks again.
    waker: Waker,
}

fn request(inode: InodeNumber, owner: LockOwner, lock: Lock, flags: u8) -> LockRequest {
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
        flags,
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
    let (answer, _) = split::<LockResponse>(response).map_err(|_| Error::Io)?;
    Ok(answer.ticket.get())
}

impl State {
    fn inode_of(&self, handle: Handle) -> Step<InodeNumber> {
        let file = self.file(handle)?;
        Ok(self.nodes.get(file.node).inode)
    }
}

impl LibFs {
    /// Makes a call, and repeats it in the next session if its session ends. Also returns the connection of the session
    /// that answered.
    fn lock_call(&self, kind: CallKind, body: &[u8]) -> vfs::engine::Result<(Status, Vec<u8>, Line)> {
        for _ in 0..self.limits.attempts {
            let line = self.line()?;
            let mut response = Vec::new();
            match self.call(&line, kind, &[body], &mut response)? {
                Status::Sealed => {}
                status => return Ok((status, response, line)),
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
        let (inode, decided) = self.run(|state| {
            let inode = state.inode_of(handle)?;
            let decide = |locks: &mut LockTable| locks.lock(inode, owner, lock, None);
            Ok((inode, state.decide_lock(inode, owner, true, decide)))
        })?;
        match decided {
            // SharedFS queues the request.
            Some(Err(Error::WouldBlock)) if waker.is_some() => {}
            Some(decided) => return decided,
            None => {}
        }
        let lease = {
            let mut state = self.state();
            state.locks.note_told(owner, inode);
            state.locks.lease_flag(owner)
        };
        let waits = if waker.is_some() { LOCK_WAITS } else { 0 };
        let request = request(inode, owner, lock, waits | lease);
        let (server, era) = self.ask_lock(&request)?;
        let Some(waker) = waker.filter(|_| server != 0) else { return Ok(Locked::Granted) };
        let mut asked = self.asked.lock();
        asked.tickets += 1;
        let ticket = Ticket::new(asked.tickets);
        asked.waiting.push(Waiting { ticket, server, era, request, waker: waker.clone() });
        waker.wake_by_ref();
        Ok(Locked::Queued(ticket))
    }

    /// Sends a request; returns SharedFS's ticket, 0 if the lock was granted, and the number of the session.
    fn ask_lock(&self, request: &LockRequest) -> vfs::engine::Result<(u64, u64)> {
        match self.lock_call(CallKind::Lock, request.as_bytes())? {
            (Status::Ok, response, line) => {
                Ok((self.learn_offer(&line, request.inode, &response)?, line.era))
            }
            (Status::Limit, ..) => Err(Error::NoLocks),
            (refused, ..) => Err(error_of(refused)),
        }
    }

    /// Takes the lock lease that an answer offers, if any; returns the answer's ticket.
    fn learn_offer(&self, line: &Line, inode: InodeNumber, response: &[u8]) -> vfs::engine::Result<u64> {
        let (answer, _) = split::<LockResponse>(response).map_err(|_| Error::Io)?;
        if let Some(slot) = answer.slot.get().checked_sub(1) {
            self.take_lock_lease(line, inode, (slot, answer.expected.get()));
        }
        Ok(answer.ticket.get())
    }

    /// Begins to decide the locks on a file in this process, if the lock table can be mapped.
    fn take_lock_lease(&self, line: &Line, inode: InodeNumber, (slot, expected): (u32, u32)) {
        let session = {
            let state = self.state();
            let session = state.session.as_ref().filter(|_| state.era == line.era);
            session.filter(|_| state.locks.table.is_none()).map(|session| session.welcome.session.get())
        };
        // If several threads try, one of them gets the table.
        let table = session.and_then(|session| line.link.lock_table(session).ok());
        let mut state = self.state();
        if state.era == line.era {
            if let Some(table) = table.filter(|table| table.bytes() >= LOCK_TABLE_BYTES as u64) {
                state.locks.table = Some(table);
            }
            state.learn_lock_lease(inode, slot, expected);
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

    /// Asks for the state of a request, or repeats the request in a new session.
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
        // A request without a ticket in this list ended with its session.
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
        let (inode, decided) = self.run(|state| {
            let inode = state.inode_of(handle)?;
            let decide = |locks: &mut LockTable| locks.unlock(inode, owner, family, first, last);
            Ok((inode, state.decide_lock(inode, owner, true, decide)))
        })?;
        if let Some(decided) = decided {
            return decided;
        }
        let lock = Lock { family, kind: LockKind::Shared, first, last };
        match self.lock_call(CallKind::Unlock, request(inode, owner, lock, 0).as_bytes())?.0 {
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
        let (inode, decided) = self.run(|state| {
            let inode = state.inode_of(handle)?;
            let decide = |locks: &mut LockTable| locks.conflict(inode, owner, lock);
            Ok((inode, state.decide_lock(inode, owner, false, decide)))
        })?;
        if let Some(decided) = decided {
            return Ok(decided);
        }
        // A program that tests a lock often takes it next, so the lock lease is requested here already.
        let request = request(inode, owner, lock, LOCK_LEASE);
        match self.lock_call(CallKind::TestLock, request.as_bytes())? {
            (Status::Ok, response, line) if response.len() == size_of::<LockResponse>() => {
                self.learn_offer(&line, inode, &response)?;
                Ok(None)
            }
            (Status::Ok, response, _) => {
                let (found, _) = split::<LockRequest>(&response).map_err(|_| Error::Io)?;
                lock_of(&found).map(Some).ok_or(Error::Io)
            }
            (refused, ..) => Err(error_of(refused)),
        }
    }

    pub(crate) fn release_locks(&self, owner: LockOwner, node: Option<InodeNumber>) {
        let told = {
            let mut state = self.state();
            state.begin();
            for inode in state.locks.files_of(owner, node) {
                let released =
                    state.decide_lock(inode, owner, true, |locks| locks.release(owner, Some(inode)));
                // SharedFS decides whether another process still has a shared owner.
                if released.is_none() {
                    state.locks.lose(inode);
                }
            }
            state.locks.take_told(owner, node)
        };
        if !told {
            return;
        }
        let all = Lock { family: LockFamily::Ranges, kind: LockKind::Shared, first: 0, last: u64::MAX };
        let body = request(node.unwrap_or(InodeNumber::NONE), owner, all, 0);
        // If the daemon has ended for good, so have its locks.
        let _ = self.lock_call(CallKind::ReleaseLocks, body.as_bytes());
    }
}
