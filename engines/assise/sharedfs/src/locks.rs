//! Locks on files: one table for the node, so that processes see each other's (`vfs::LockTable` decides). Processes
//! choose the numbers of lock owners. Each number is bound to the user of the first session that named it, so that no
//! user can release or take over another user's lock, and ends with the last session that named it.

use crate::fair::may_take;
use crate::lock_requests::{
    entry_of, family_of, lock_of, owner_of, range_of, request, request_of, response, status_of,
};
use crate::register::speak_entry;
use crate::state::{Core, State};
use ccnvm::SessionId;
use format::InodeNumber;
use format::call::{
    CallKind, LOCK_LEASE, LOCK_SHARED, LOCK_WAITS, LockRequest, OWNER_DESCRIPTION, Status, TicketRequest,
    split,
};
use format::locks::LOCK_LIST_MAX;
use format::register::{RegisterEntry, RegisterKind};
use ipc::host::{Host, Time, WAKE_ALL};
use ipc::ring::Link;
use ipc::sync::{Ordering, Word};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Duration;
use vfs::engine::{Lock, LockFamily, LockOwner, Locked, Ticket};
use vfs::locks::LockTable;
use zerocopy::IntoBytes;

/// Longest time for which the answer to a question about a lock is kept back.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Signals that a waiting request for a lock was granted.
pub(crate) struct Bell {
    host: Arc<dyn Host>,
    word: Word,
}

impl Bell {
    pub fn new(host: Arc<dyn Host>) -> Arc<Self> {
        Arc::new(Self { host, word: Word::new(0) })
    }

    /// Signals.
    pub fn ring(&self) {
        // Release: pairs with the Acquire of waiting threads, which read the table then.
        self.word.fetch_add(1, Ordering::Release);
        self.host.wake(&self.word, WAKE_ALL);
    }

    /// How often it was signalled.
    pub fn rung(&self) -> u32 {
        // Acquire: pairs with the Release of `ring`.
        self.word.load(Ordering::Acquire)
    }

    /// Waits until it is signalled again.
    pub fn wait(&self, rung: u32, until: Option<Time>) {
        self.host.wait(&self.word, rung, until);
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }
}

/// The user of a lock owner, and the sessions that may act for it.
struct Speaker {
    uid: u32,
    sessions: BTreeSet<SessionId>,
}

/// All locks of the node.
pub(crate) struct Locks {
    table: LockTable,
    speakers: BTreeMap<LockOwner, Speaker>,
    /// How many owners each user has.
    of_user: BTreeMap<u32, usize>,
    /// Owners that a session named.
    named: BTreeMap<SessionId, BTreeSet<LockOwner>>,
    /// Requests that wait, with their sessions.
    tickets: BTreeMap<u64, (SessionId, LockRequest)>,
    /// Owners that are reserved for each user's lock tables, and their sum.
    reserved_of_user: BTreeMap<u32, usize>,
    reserved: usize,
    bell: Arc<Bell>,
    owners_max: usize,
}

impl Locks {
    pub fn new(bell: Arc<Bell>, locks_max: usize) -> Self {
        Self {
            table: LockTable::new(locks_max),
            speakers: BTreeMap::new(),
            of_user: BTreeMap::new(),
            named: BTreeMap::new(),
            tickets: BTreeMap::new(),
            reserved_of_user: BTreeMap::new(),
            reserved: 0,
            bell,
            owners_max: locks_max,
        }
    }

    /// Lets a session of this user act for the owner, if the user may; an owner that is new is this user's from now on.
    pub fn claim(&mut self, id: SessionId, uid: u32, owner: LockOwner) -> Result<(), Status> {
        let is_new = !self.speakers.contains_key(&owner);
        if is_new && !self.may_have_more(uid, 0) {
            return Err(Status::Limit);
        }
        self.claim_again(id, uid, owner)
    }

    /// Whether a user may have this many owners more, and one.
    fn may_have_more(&self, uid: u32, more: usize) -> bool {
        let of = |users: &BTreeMap<u32, usize>| users.get(&uid).copied().unwrap_or(0);
        let mine = of(&self.of_user) + of(&self.reserved_of_user) + more;
        may_take(uid, mine, self.speakers.len() + self.reserved + more, self.owners_max)
    }

    /// Reserves owners for one list of a lock table; false if the user has too many.
    pub fn reserve(&mut self, uid: u32) -> bool {
        if !self.may_have_more(uid, LOCK_LIST_MAX) {
            return false;
        }
        *self.reserved_of_user.entry(uid).or_default() += LOCK_LIST_MAX;
        self.reserved += LOCK_LIST_MAX;
        true
    }

    /// Ends a reservation, whether its owners are in use or not.
    pub fn unreserve(&mut self, uid: u32) {
        let left = self.reserved_of_user.remove(&uid).unwrap_or(0).saturating_sub(LOCK_LIST_MAX);
        if left > 0 {
            self.reserved_of_user.insert(uid, left);
        }
        self.reserved = self.reserved.saturating_sub(LOCK_LIST_MAX);
    }

    /// Whether only this session holds or requests locks on an inode, and at most so many are held.
    pub fn is_alone_at(&self, id: SessionId, unit: InodeNumber, held_max: usize) -> bool {
        let only = |owner: LockOwner| {
            self.speakers.get(&owner).is_some_and(|speaker| speaker.sessions.iter().eq([&id]))
        };
        let mut held = self.table.held_on(unit);
        held.len() <= held_max && held.all(|(_, owner)| only(owner)) && !self.table.is_asked_for(unit)
    }

    /// Removes all locks on an inode from the table: a session's lock table has them.
    pub fn take_out(&mut self, unit: InodeNumber) -> Vec<(Lock, LockOwner)> {
        self.table.take_out(unit)
    }

    /// Imports a lock that a session decided. False if it may not have it: then the session is hostile.
    pub fn import(
        &mut self,
        id: SessionId,
        uid: u32,
        unit: InodeNumber,
        (lock, owner): (Lock, LockOwner),
    ) -> bool {
        self.claim_again(id, uid, owner).is_ok()
            && self.table.lock(unit, owner, lock, None) == Ok(Locked::Granted)
    }

    /// The same for an owner that was claimed under an earlier daemon, when others had fewer.
    fn claim_again(&mut self, id: SessionId, uid: u32, owner: LockOwner) -> Result<(), Status> {
        let is_new = !self.speakers.contains_key(&owner);
        if is_new && self.speakers.len() >= self.owners_max {
            return Err(Status::Limit);
        }
        if is_new {
            *self.of_user.entry(uid).or_default() += 1;
        }
        let speaker =
            self.speakers.entry(owner).or_insert_with(|| Speaker { uid, sessions: BTreeSet::new() });
        // A session that was given the owner may be of another user.
        if speaker.uid != uid && !speaker.sessions.contains(&id) {
            return Err(Status::Invalid);
        }
        speaker.sessions.insert(id);
        self.named.entry(id).or_default().insert(owner);
        Ok(())
    }

    /// A session that may act for an owner lets another session do so, of whatever user.
    pub fn speak_for(&mut self, giver: SessionId, successor: SessionId, owner: LockOwner) {
        let speaker = self.speakers.get_mut(&owner);
        if let Some(speaker) = speaker.filter(|speaker| speaker.sessions.contains(&giver)) {
            speaker.sessions.insert(successor);
            self.named.entry(successor).or_default().insert(owner);
        }
    }

    /// Whether a session of this user may act for the owner, without claiming it.
    fn speaks(&self, id: SessionId, uid: u32, owner: LockOwner) -> bool {
        let speaker = self.speakers.get(&owner);
        speaker.is_some_and(|speaker| speaker.uid == uid || speaker.sessions.contains(&id))
    }

    /// The session does not act for the owner any more; if no other session does, the owner's locks end. False if it
    /// never did.
    pub fn fall_silent(&mut self, id: SessionId, owner: LockOwner) -> bool {
        let Some(named) = self.named.get_mut(&id) else { return false };
        if !named.remove(&owner) {
            return false;
        }
        if named.is_empty() {
            self.named.remove(&id);
        }
        self.remove_speaker(id, owner);
        true
    }

    fn remove_speaker(&mut self, id: SessionId, owner: LockOwner) {
        let Some(speaker) = self.speakers.get_mut(&owner) else { return };
        speaker.sessions.remove(&id);
        if speaker.sessions.is_empty() {
            let uid = speaker.uid;
            self.speakers.remove(&owner);
            self.table.release(owner, None);
            let left = self.of_user.remove(&uid).unwrap_or(0).saturating_sub(1);
            if left > 0 {
                self.of_user.insert(uid, left);
            }
        }
    }

    /// Whether a process has neither locks nor requests: then no session needs to act for it.
    pub fn is_idle(&self, owner: LockOwner) -> bool {
        let asks = |(_, request): &(SessionId, LockRequest)| owner_of(request) == Ok(owner);
        matches!(owner, LockOwner::Process { .. })
            && !self.table.knows(owner)
            && !self.tickets.values().any(asks)
    }

    /// The sessions that act for an owner.
    fn speakers_of(&self, owner: LockOwner) -> Vec<SessionId> {
        let speaker = self.speakers.get(&owner);
        speaker.map_or(Vec::new(), |speaker| speaker.sessions.iter().copied().collect())
    }

    /// Adds the owners that a session acts for, with their locks, for the register.
    pub fn put_entries_of(&self, id: SessionId, entries: &mut Vec<RegisterEntry>) {
        let owners: Vec<LockOwner> = self.named.get(&id).into_iter().flatten().copied().collect();
        entries.extend(owners.iter().map(|owner| speak_entry(id, *owner)));
        let locks = self.table.all().filter(|(_, _, owner)| owners.contains(owner));
        entries.extend(
            locks.map(|(inode, lock, owner)| entry_of(RegisterKind::Lock, id, &request(inode, lock, owner))),
        );
    }

    /// Cancels the session's waiting requests. A lock that was granted and not reported yet is released.
    pub fn leave(&mut self, id: SessionId) {
        let of_session = self.tickets.iter().filter(|(_, (session, _))| *session == id);
        let tickets: Vec<(u64, LockRequest)> =
            of_session.map(|(ticket, (_, request))| (*ticket, *request)).collect();
        for (ticket, request) in tickets {
            self.tickets.remove(&ticket);
            let granted = !self.table.cancel(Ticket::new(ticket));
            if granted && let (Ok(owner), Ok(lock)) = (owner_of(&request), lock_of(&request)) {
                // Restores the lock that was held before, which is part of one that was granted: that cannot exceed a
                // limit.
                let _ = self.table.unlock(request.inode, owner, lock.family, lock.first, lock.last);
            }
        }
    }

    /// Moves everything of one session to another.
    pub fn hand_over(&mut self, from: SessionId, to: SessionId) {
        self.leave(from);
        for owner in self.named.remove(&from).unwrap_or_default() {
            if let Some(speaker) = self.speakers.get_mut(&owner) {
                speaker.sessions.remove(&from);
                speaker.sessions.insert(to);
                self.named.entry(to).or_default().insert(owner);
            }
        }
    }

    /// Repeats an action of a session from the register. Impossible ones are skipped: they are from a damaged register.
    pub fn replay(&mut self, id: SessionId, uid: u32, kind: RegisterKind, entry: &RegisterEntry) {
        let request = request_of(entry);
        let Ok(owner) = owner_of(&request) else { return };
        match (kind, lock_of(&request)) {
            (RegisterKind::Lock, Ok(lock)) if self.claim_again(id, uid, owner).is_ok() => {
                let _ = self.table.lock(request.inode, owner, lock, None);
            }
            (RegisterKind::Speak, _) => drop(self.claim_again(id, uid, owner)),
            (RegisterKind::Silent, _) => drop(self.fall_silent(id, owner)),
            (RegisterKind::Unlock, Ok(lock)) => {
                let _ = self.table.unlock(request.inode, owner, lock.family, lock.first, lock.last);
            }
            (RegisterKind::Release, _) => {
                let node = (request.inode != InodeNumber::NONE).then_some(request.inode);
                self.table.release(owner, node);
            }
            _ => {}
        }
    }

    /// Adds all locks that are held, for the register.
    pub fn put_entries(&self, entries: &mut Vec<RegisterEntry>) {
        for (id, owners) in &self.named {
            entries.extend(owners.iter().map(|owner| speak_entry(*id, *owner)));
        }
        for (inode, lock, owner) in self.table.all() {
            let Some(speaker) = self.speakers.get(&owner) else { continue };
            let request = request(inode, lock, owner);
            let sessions = speaker.sessions.iter();
            entries.extend(sessions.map(|id| entry_of(RegisterKind::Lock, *id, &request)));
        }
    }

    /// Ends a session: locks of owners that no other session acts for end.
    pub fn end(&mut self, id: SessionId) {
        self.leave(id);
        for owner in self.named.remove(&id).unwrap_or_default() {
            self.remove_speaker(id, owner);
        }
    }
}

impl Core {
    /// Calls about locks that are answered at once.
    pub fn lock_call(
        &self,
        id: SessionId,
        number: u64,
        kind: CallKind,
        body: &[u8],
    ) -> Result<Vec<u8>, Status> {
        if kind == CallKind::CancelLock {
            let (request, _) = split::<TicketRequest>(body).map_err(|_| Status::Invalid)?;
            let cancelled = self.state.lock().cancel_lock(id, request.ticket.get());
            // A waiting question about it can be answered now.
            self.bell.ring();
            return cancelled;
        }
        let (request, _) = split::<LockRequest>(body).map_err(|_| Status::Invalid)?;
        let unit = request.inode;
        if kind != CallKind::ReleaseLocks {
            // A session that may not use the file must not take the lock lease from another one.
            self.state.lock().locker(id, unit)?;
        }
        match kind {
            CallKind::Lock => {
                let locked = {
                    let mut state = self.decide_locks(id, unit)?;
                    match state.take_lock(id, &request) {
                        Err(Status::WouldBlock) => {
                            state.end_locks_of_dead(self, &request);
                            state.take_lock(id, &request)
                        }
                        answer => answer,
                    }
                };
                match locked? {
                    Locked::Granted => Ok(self.with_lock_lease(id, number, &request).as_bytes().to_vec()),
                    Locked::Queued(ticket) => {
                        self.state.lock().lock_leases.keep(self.now_ns(), unit, id);
                        Ok(response(ticket.get()))
                    }
                }
            }
            CallKind::Unlock => self.decide_locks(id, unit)?.unlock(id, &request),
            CallKind::TestLock => self.test_lock(id, number, &request),
            CallKind::ReleaseLocks => self.release_locks(id, &request),
            _ => Err(Status::Invalid),
        }
    }

    fn test_lock(&self, id: SessionId, number: u64, request: &LockRequest) -> Result<Vec<u8>, Status> {
        let found = {
            let mut state = self.decide_locks(id, request.inode)?;
            let mut found = state.test_lock(id, request)?;
            if !found.is_empty() {
                state.end_locks_of_dead(self, request);
                found = state.test_lock(id, request)?;
            }
            found
        };
        if found.is_empty() && request.flags & LOCK_LEASE != 0 {
            return Ok(self.with_lock_lease(id, number, request).as_bytes().to_vec());
        }
        Ok(found)
    }

    fn release_locks(&self, id: SessionId, request: &LockRequest) -> Result<Vec<u8>, Status> {
        let owner = owner_of(request)?;
        let concerned = {
            let mut state = self.state.lock();
            let uid = state.live(id)?.caller.uid;
            if request.owner_kind == OWNER_DESCRIPTION {
                // Locks that the session has not released itself, because other processes had the open file description.
                if state.has_listed(id, request.inode, owner) {
                    drop(state);
                    state = self.decide_locks(id, request.inode)?;
                }
                // Other processes may still have it.
                state.fall_silent(id, owner);
                return Ok(Vec::new());
            }
            state.locks.speaks(id, uid, owner) || state.lock_leases.holder(request.inode) == Some(id)
        };
        if request.inode == InodeNumber::NONE {
            self.take_all_back(id)?;
            self.state.lock().release_locks(id, request)?;
        } else if concerned {
            self.decide_locks(id, request.inode)?.release_locks(id, request)?;
        }
        Ok(Vec::new())
    }

    /// Whether a request for a lock was granted; `None` if it still waits.
    pub fn look_at_lock(&self, id: SessionId, body: &[u8]) -> Option<Result<Vec<u8>, Status>> {
        let Ok((request, _)) = split::<TicketRequest>(body) else { return Some(Err(Status::Invalid)) };
        self.state.lock().redeem_lock(id, request.ticket.get()).transpose()
    }

    /// How long the answer to a question about a waiting request may be kept back.
    pub fn lock_patience(&self, body: &[u8]) -> Duration {
        let asked = split::<TicketRequest>(body).map_or(0, |(request, _)| request.wait_ms.get());
        Duration::from_millis(asked.into()).min(WAIT_MAX)
    }

    /// The answer when that time is over: the request still waits.
    pub fn still_waiting(body: &[u8]) -> Result<Vec<u8>, Status> {
        let (request, _) = split::<TicketRequest>(body).map_err(|_| Status::Invalid)?;
        Ok(response(request.ticket.get()))
    }

    /// [`CallKind::RedeemLock`], waited for.
    pub fn redeem_lock(&self, id: SessionId, body: &[u8]) -> Result<Vec<u8>, Status> {
        let until = self.host.now().after(self.lock_patience(body));
        loop {
            let withheld_until = self.look_at_caches();
            // Read before the table.
            let seen = self.bell.rung();
            if let Some(answer) = self.look_at_lock(id, body) {
                return answer;
            }
            if self.host.now() >= until {
                return Self::still_waiting(body);
            }
            self.bell.wait(seen, Some(withheld_until.map_or(until, |look| look.min(until))));
        }
    }
}

impl State {
    /// The user of a live session that has met the inode.
    fn locker(&mut self, id: SessionId, inode: InodeNumber) -> Result<u32, Status> {
        let session = self.live(id)?;
        if session.may_use(inode) { Ok(session.caller.uid) } else { Err(Status::Invalid) }
    }

    fn take_lock(&mut self, id: SessionId, request: &LockRequest) -> Result<Locked, Status> {
        let uid = self.locker(id, request.inode)?;
        let (owner, lock) = (owner_of(request)?, lock_of(request)?);
        self.locks.claim(id, uid, owner)?;
        let waker = Waker::from(self.locks.bell.clone());
        let waker = (request.flags & LOCK_WAITS != 0).then_some(&waker);
        let locked = self.locks.table.lock(request.inode, owner, lock, waker);
        if locked == Ok(Locked::Granted) {
            self.register.note(entry_of(RegisterKind::Lock, id, request));
        } else if lock.family == LockFamily::Whole {
            // The lock was released to change its kind, whatever came of that.
            self.register.note(entry_of(RegisterKind::Unlock, id, request));
        }
        if let Ok(Locked::Queued(ticket)) = locked {
            self.locks.tickets.insert(ticket.get(), (id, *request));
        }
        locked.map_err(status_of)
    }

    /// Ends conflicting locks whose owners' processes are dead: so other processes see the end of a program no later
    /// than the process that waited for it. The locks of a session whose cached data may be there still are kept.
    fn end_locks_of_dead(&mut self, core: &Core, request: &LockRequest) {
        if self.leases.are_withheld() && !core.is_kept_elsewhere() {
            self.withhold(core.now_ns(), false);
        }
        self.drop_detached_of_dead(core);
        let (Ok(owner), Ok(lock)) = (owner_of(request), lock_of(request)) else { return };
        while let Some((_, other)) = self.locks.table.conflict(request.inode, owner, lock) {
            let dead = self.locks.speakers_of(other).into_iter().filter(|id| {
                let peer = self.sessions.get(id).and_then(|session| session.peer.as_ref());
                let is_dead = peer.is_some_and(|peer| !peer.is_up());
                is_dead && !(self.recalls.must_answer(*id) && core.is_kept_elsewhere())
            });
            let dead: Vec<SessionId> = dead.collect();
            dead.iter().for_each(|id| self.fall_silent(*id, other));
            if dead.is_empty() || !self.locks.speakers_of(other).is_empty() {
                return;
            }
        }
    }

    fn unlock(&mut self, id: SessionId, request: &LockRequest) -> Result<Vec<u8>, Status> {
        let uid = self.locker(id, request.inode)?;
        let (owner, family, (first, last)) = (owner_of(request)?, family_of(request)?, range_of(request)?);
        // A session that never locked anything has nothing to unlock.
        if self.locks.speaks(id, uid, owner) {
            self.locks.table.unlock(request.inode, owner, family, first, last).map_err(status_of)?;
            let request = LockRequest { kind: LOCK_SHARED, ..*request };
            self.register.note(entry_of(RegisterKind::Unlock, id, &request));
        }
        Ok(Vec::new())
    }

    fn test_lock(&mut self, id: SessionId, request: &LockRequest) -> Result<Vec<u8>, Status> {
        self.locker(id, request.inode)?;
        let conflict = self.locks.table.conflict(request.inode, owner_of(request)?, lock_of(request)?);
        let Some((lock, owner)) = conflict else { return Ok(Vec::new()) };
        Ok(crate::lock_requests::request(request.inode, lock, owner).as_bytes().to_vec())
    }

    fn release_locks(&mut self, id: SessionId, request: &LockRequest) -> Result<(), Status> {
        let uid = self.live(id)?.caller.uid;
        let owner = owner_of(request)?;
        let node = (request.inode != InodeNumber::NONE).then_some(request.inode);
        if node.is_none() && self.locks.speakers_of(owner).iter().any(|other| *other != id) {
            // The process goes on in the other session.
            self.fall_silent(id, owner);
        } else if self.locks.speaks(id, uid, owner) {
            self.locks.table.release(owner, node);
            self.register.note(entry_of(RegisterKind::Release, id, request));
            self.silence_idle(id, owner);
        }
        Ok(())
    }

    fn redeem_lock(&mut self, id: SessionId, ticket: u64) -> Result<Option<Vec<u8>>, Status> {
        self.live(id)?;
        let request = self.locks.tickets.get(&ticket).filter(|(session, _)| *session == id);
        let request = request.ok_or(Status::Invalid)?.1;
        match self.locks.table.redeem(Ticket::new(ticket)) {
            Ok(Locked::Queued(_)) => Ok(None),
            Ok(Locked::Granted) => {
                self.locks.tickets.remove(&ticket);
                // A lock that was not reported is not held, so this is early enough.
                self.register.note(entry_of(RegisterKind::Lock, id, &request));
                Ok(Some(response(0)))
            }
            Err(error) => {
                self.locks.tickets.remove(&ticket);
                Err(status_of(error))
            }
        }
    }

    fn cancel_lock(&mut self, id: SessionId, ticket: u64) -> Result<Vec<u8>, Status> {
        self.live(id)?;
        let request = self.locks.tickets.get(&ticket).filter(|(session, _)| *session == id);
        let request = request.ok_or(Status::Invalid)?.1;
        self.locks.tickets.remove(&ticket);
        let cancelled = self.locks.table.cancel(Ticket::new(ticket));
        if !cancelled {
            self.register.note(entry_of(RegisterKind::Lock, id, &request));
        }
        Ok(response(if cancelled { ticket } else { 0 }))
    }
}
