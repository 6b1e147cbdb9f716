//! Carries out the decisions of `ccnvm` about lock leases: where the locks on a file are decided (CC-NVM, Assise §3.3;
//! [`format::locks`]).
//!
//! A session that holds the lock lease on a file keeps the list of its locks in its lock table, a file of the pool. To
//! take the lease back, SharedFS marks its word, fences, waits at most for the grace period until every operation that
//! was inside has left once, and imports the locks from the table. A session that does not leave in time is terminated,
//! which imports all of its locks. None of this needs the holder's help or a living holder: the list that was last
//! written whole counts. The table is hostile input. Its lists count only for files whose lease the session holds, and
//! are checked as if the session had requested the locks by calls.
//!
//! Guarantees: while a session holds a lease, SharedFS has no lock on the file in its own table and decides nothing
//! about it. After the death of a daemon, register and lock table give the next daemon the same locks. An owner that
//! several sessions may act for has no locks in a lock table, so that the end of one session, or a close in one, ends
//! only the locks that it should.

use crate::leases::LOOK;
use crate::lock_requests::{entry_of, owner_of_file, request};
use crate::session_end::TerminationReason;
use crate::state::{Core, State};
use ccnvm::{Asked, SessionId};
use format::InodeNumber;
use format::Sequence;
use format::call::{LOCK_LEASE, LockRequest, LockResponse, OWNER_DESCRIPTION, OWNER_PROCESS, Status};
use format::locks::{
    LOCK_LIST_BYTES, LOCK_LIST_MAX, LOCK_SLOT_BYTES, LOCK_SLOTS, LOCK_TABLE_BYTES, LockList, list_offset,
};
use format::register::{RegisterEntry, RegisterKind};
use format::share::SharedFile;
use ipc::Guard;
use ipc::sync::Ordering;
use ipc::words::LeaseState;
use mirror::logs::lock_table_file;
use pmem::{Medium, Region};
use std::collections::{BTreeMap, BTreeSet};
use vfs::engine::{Lock, LockOwner};
use vfs::locks::{of_held, to_held};
use zerocopy::little_endian::{U32, U64};

/// A file with more locks is not leased to a process, whose list would soon be full.
const OFFERED_MAX: usize = LOCK_LIST_MAX / 2;

/// Pause after a slot was freed for another file before the next one is: a process that locks more files than there are
/// slots, in turns, uses calls for most of them.
const EVICTION_PAUSE_NS: u64 = 1_000_000;

/// The lock table of one session.
pub(crate) struct LockTable {
    region: Region,
    /// Which slot has the locks on which inode.
    slots: BTreeMap<InodeNumber, u32>,
    free: Vec<u32>,
    /// The process has it.
    is_sent: bool,
    /// From when on a slot may be made free, and the file that was looked at last for that.
    evicts_from: u64,
    looked_at: InodeNumber,
    /// Files among those in `slots` that lost their last name while a process had them open.
    nameless: BTreeSet<InodeNumber>,
}

impl LockTable {
    fn new(region: Region) -> Self {
        let free = (0..LOCK_SLOTS as u32).rev().collect();
        let (slots, looked_at, nameless) = (BTreeMap::new(), InodeNumber::NONE, BTreeSet::new());
        Self { region, slots, free, is_sent: false, evicts_from: 0, looked_at, nameless }
    }

    /// Opens the lock table that a session of a dead daemon left, if it is whole.
    pub fn open(medium: &Medium, id: SessionId) -> Option<Self> {
        let region = medium.open_at_most(&lock_table_file(id.0), LOCK_TABLE_BYTES as u64).ok()?;
        (region.bytes() == LOCK_TABLE_BYTES as u64).then(|| Self::new(region))
    }

    /// Reads the locks on an inode from a slot. None for an empty or invalid slot.
    pub fn list(&self, slot: u64, inode: InodeNumber) -> Option<Vec<(Lock, LockOwner)>> {
        let slot = usize::try_from(slot).ok().filter(|slot| *slot < LOCK_SLOTS)?;
        let mut bytes = [0; LOCK_SLOT_BYTES];
        self.region.read((slot * LOCK_SLOT_BYTES) as u64, &mut bytes).ok()?;
        let list = LockList::of_slot(&bytes).filter(|list| list.inode == inode)?;
        Some(list.locks.iter().filter_map(of_held).collect())
    }

    /// The locks on an inode whose lease the session holds.
    fn locks_on(&self, inode: InodeNumber) -> Vec<(Lock, LockOwner)> {
        let slot = self.slots.get(&inode);
        slot.and_then(|slot| self.list((*slot).into(), inode)).unwrap_or_default()
    }

    /// If all slots are used: a file on which there were no locks a moment ago, so that its slot can be another file's.
    /// Files are examined in turn, first those without a name, which are not locked in turns with others for long.
    fn victim(&mut self, now: u64) -> Option<InodeNumber> {
        if !self.free.is_empty() {
            return None;
        }
        let gone = self.nameless.iter().copied().find(|inode| self.locks_on(*inode).is_empty());
        if gone.is_some() || now < self.evicts_from {
            return gone;
        }
        self.evicts_from = now.saturating_add(EVICTION_PAUSE_NS);
        let (before, after): (Vec<_>, Vec<_>) =
            self.slots.keys().partition(|inode| **inode <= self.looked_at);
        let victim =
            after.into_iter().chain(before).copied().find(|inode| self.locks_on(*inode).is_empty())?;
        self.looked_at = victim;
        Some(victim)
    }

    /// Writes an unused slot: both lists, so that nothing of another lease is left.
    fn begin(&self, slot: u32, inode: InodeNumber, locks: &[(Lock, LockOwner)]) {
        let locks = locks.iter().map(|(lock, owner)| to_held(*lock, *owner)).collect();
        let list = LockList { inode, sequence: Sequence::new(1), locks };
        let (mut slot_bytes, mut bytes) = ([0; LOCK_SLOT_BYTES], [0; LOCK_LIST_BYTES]);
        let length = list.encode(&mut bytes);
        slot_bytes[list_offset(list.sequence)..][..length].copy_from_slice(&bytes[..length]);
        self.region.store(slot as u64 * LOCK_SLOT_BYTES as u64, &slot_bytes);
    }

    /// Leases that are out, for the register.
    fn put_entries(&self, id: SessionId, entries: &mut Vec<RegisterEntry>) {
        entries.extend(self.slots.iter().map(|(inode, slot)| lease_entry(id, *inode, *slot)));
    }
}

fn lease_entry(id: SessionId, inode: InodeNumber, slot: u32) -> RegisterEntry {
    let first = U64::new(slot.into());
    RegisterEntry { inode, first, ..RegisterEntry::new(RegisterKind::LockLease, id.0) }
}

impl Core {
    /// Locks the state, with the locks on an inode decided here: if another session holds the lease, it is taken back
    /// for the session that asks.
    ///
    /// # Errors
    /// `Sealed`, `Media`.
    pub fn decide_locks(&self, asks: SessionId, unit: InodeNumber) -> Result<Guard<'_, State>, Status> {
        loop {
            // Acquire: pairs with the Release of `announce_events`; read before the state is looked at.
            let seen = self.events.load(Ordering::Acquire);
            let mut state = self.state.lock();
            state.live(asks)?;
            match state.lock_leases.ask(self.now_ns(), asks, unit) {
                Asked::Decide => return Ok(state),
                Asked::TakeBack(holder) => {
                    drop(state);
                    self.take_lock_lease_back(asks, unit, holder);
                }
                Asked::Wait => {
                    drop(state);
                    self.host.wait(&self.events, seen, Some(self.host.now().after(LOOK)));
                }
            }
        }
    }

    fn take_lock_lease_back(&self, asks: SessionId, unit: InodeNumber, holder: SessionId) {
        let shared = {
            let state = self.state.lock();
            // A session that ended meanwhile has given back everything.
            let session = state.sessions.get(&holder);
            let slot = session.and_then(|session| session.lock_table.as_ref()?.slots.get(&unit).copied());
            session.zip(slot).map(|(session, slot)| {
                session.shared.daemon.locks()[slot as usize].revoke();
                session.shared.clone()
            })
        };
        if let Some(shared) = shared {
            // Other scans of the session may run beside this one: a LibFS has a counter of its own to be inside at, and
            // never shares the overflow counter with others.
            if !self.wait_until_left(holder, &shared) {
                self.end(holder, TerminationReason::Grace);
            }
            let mut state = self.state.lock();
            if state.lock_leases.holder(unit) == Some(holder) {
                state.import_locks(holder, unit);
                state.lock_leases.taken_back(self.now_ns(), unit, (holder, asks));
            }
        }
        self.announce_events();
    }

    /// Called before open files are given away: locks of owners that another session may act for from now on are
    /// decided here.
    pub fn take_back_given(&self, id: SessionId, files: &[SharedFile], own: bool) -> Result<(), Status> {
        let units = {
            let mut state = self.state.lock();
            state.live(id)?;
            state.units_with_given(id, files, own)?
        };
        for unit in units {
            drop(self.decide_locks(id, unit)?);
        }
        Ok(())
    }

    /// Called before all locks of an owner end: those that its session decides are decided here.
    pub fn take_all_back(&self, id: SessionId) -> Result<(), Status> {
        let units: Vec<InodeNumber> = self.state.lock().lock_leases.held(id).collect();
        for unit in units {
            drop(self.decide_locks(id, unit)?);
        }
        Ok(())
    }

    /// Answers a lock request that was granted, or a test that found no other lock. The session also gets the lease, if it
    /// wants it and no other session holds or requests a lock on the file.
    pub fn with_lock_lease(&self, id: SessionId, number: u64, request: &LockRequest) -> LockResponse {
        let none = LockResponse { ticket: U64::new(0), slot: U32::new(0), expected: U32::new(0) };
        if request.flags & LOCK_LEASE == 0 || !self.may_have_lock_lease(id, request.inode) {
            return none;
        }
        self.make_room_for_lock_lease(id);
        let (offered, first) = {
            let mut state = self.state.lock();
            let offered = state.offer_lock_lease(self.now_ns(), id, request.inode);
            let table = state.sessions.get_mut(&id).and_then(|session| session.lock_table.as_mut());
            let first = table.filter(|table| offered.is_some() && !table.is_sent).map(|table| {
                table.is_sent = true;
                table.region.clone()
            });
            (offered, first)
        };
        if let Some(region) = first {
            // A process that does not receive the table cannot use the lease, and makes calls instead.
            let _ = self.send_parcel(id, number, id.0, &region);
        }
        offered.map_or(none, |(slot, expected)| LockResponse {
            slot: U32::new(slot + 1),
            expected: U32::new(expected),
            ..none
        })
    }

    /// Frees a slot: a program that has locked many files, such as a mount, does not keep the leases on files that it
    /// no longer locks.
    fn make_room_for_lock_lease(&self, id: SessionId) {
        let victim = {
            let mut state = self.state.lock();
            let table = state.sessions.get_mut(&id).and_then(|session| session.lock_table.as_mut());
            table.and_then(|table| table.victim(self.now_ns()))
        };
        if let Some(unit) = victim {
            // A session that ended meanwhile needs no slot.
            drop(self.decide_locks(id, unit));
        }
    }

    /// Whether the session should get the lease; if so, it has a lock table from here on.
    fn may_have_lock_lease(&self, id: SessionId, unit: InodeNumber) -> bool {
        {
            let state = self.state.lock();
            if !state.is_alone_at(id, unit) {
                return false;
            }
            if state.sessions.get(&id).is_some_and(|session| session.lock_table.is_some()) {
                return true;
            }
        }
        let made = self.medium.create_transient(&lock_table_file(id.0), LOCK_TABLE_BYTES as u64);
        let Ok(region) = made else { return false };
        let mut state = self.state.lock();
        match state.live(id) {
            Ok(session) => {
                session.lock_table = Some(LockTable::new(region));
                true
            }
            Err(_) => {
                drop(state);
                let _ = self.medium.remove_transient(&lock_table_file(id.0));
                false
            }
        }
    }

    /// Removes the table of a session that ends; its locks were imported.
    pub fn remove_lock_table(&self, id: SessionId) {
        let table = self.state.lock().sessions.get_mut(&id).and_then(|session| session.lock_table.take());
        if let Some(table) = table {
            // A file that stays is removed by the next start.
            let _ = self.medium.remove_transient(table.region.name());
        }
    }

    /// A session's lock table, for a LibFS in the same process.
    pub fn lock_table(&self, id: SessionId) -> Option<Region> {
        let state = self.state.lock();
        Some(state.sessions.get(&id)?.lock_table.as_ref()?.region.clone())
    }
}

impl State {
    /// Whether only this session holds or requests locks on an inode, and few are held.
    fn is_alone_at(&self, id: SessionId, unit: InodeNumber) -> bool {
        self.lock_leases.holder(unit).is_none() && self.locks.is_alone_at(id, unit, OFFERED_MAX)
    }

    /// Grants the lease, with all locks on the file; returns its slot and the lower half of its word's generation.
    fn offer_lock_lease(&mut self, now: u64, id: SessionId, unit: InodeNumber) -> Option<(u32, u32)> {
        if !self.is_alone_at(id, unit) {
            return None;
        }
        let session = self.live(id).ok()?;
        let uid = session.caller.uid;
        let slot = session.lock_table.as_ref()?.free.last().copied()?;
        if !self.locks.reserve(uid) {
            return None;
        }
        if !self.lock_leases.offer(now, id, unit) {
            self.locks.unreserve(uid);
            return None;
        }
        let locks = self.locks.take_out(unit);
        let session = self.sessions.get_mut(&id)?;
        let table = session.lock_table.as_mut()?;
        table.free.pop();
        table.slots.insert(unit, slot);
        table.begin(slot, unit, &locks);
        // From here on the table has the locks, before the process can change anything there.
        self.register.note(lease_entry(id, unit, slot));
        let lease = session.shared.daemon.locks()[slot as usize].grant(LeaseState::Write);
        // Only now: if the register ends before the lease's entry, the locks are still there as those of their owners.
        locks.iter().for_each(|(_, owner)| self.silence_idle(id, *owner));
        Some((slot, lease.generation as u32))
    }

    /// Notes that an inode that a process has open has lost its last name.
    pub fn note_nameless(&mut self, unit: InodeNumber) {
        let holder = self.lock_leases.holder(unit).and_then(|holder| self.sessions.get_mut(&holder));
        if let Some(table) = holder.and_then(|session| session.lock_table.as_mut())
            && table.slots.contains_key(&unit)
        {
            table.nameless.insert(unit);
        }
    }

    /// Whether a session decides about the locks on an inode, and an owner has some.
    pub fn has_listed(&self, id: SessionId, unit: InodeNumber, owner: LockOwner) -> bool {
        let table = self.sessions.get(&id).and_then(|session| session.lock_table.as_ref());
        table.is_some_and(|table| table.locks_on(unit).iter().any(|(_, other)| *other == owner))
    }

    /// Imports the locks on an inode that a session decided. Its lease is over, and the session is outside or sealed.
    pub fn import_locks(&mut self, id: SessionId, unit: InodeNumber) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let uid = session.caller.uid;
        let Some(table) = session.lock_table.as_mut() else { return };
        let locks = table.locks_on(unit);
        let Some(slot) = table.slots.remove(&unit) else { return };
        table.nameless.remove(&unit);
        table.free.push(slot);
        session.shared.daemon.locks()[slot as usize].end();
        self.locks.unreserve(uid);
        for (lock, owner) in locks {
            if self.locks.import(id, uid, unit, (lock, owner)) {
                self.register.note(entry_of(RegisterKind::Lock, id, &request(unit, lock, owner)));
            }
        }
        // Until this entry is written, the table counts.
        self.register
            .note(RegisterEntry { inode: unit, ..RegisterEntry::new(RegisterKind::LockLeaseEnd, id.0) });
    }

    /// The inodes, of files that a session gives away, on which it has decided locks of owners that it gives away too,
    /// or of its process if that goes on in another program.
    fn units_with_given(
        &self,
        id: SessionId,
        files: &[SharedFile],
        own: bool,
    ) -> Result<Vec<InodeNumber>, Status> {
        let held = self.lock_leases.held(id);
        if own {
            return Ok(held.collect());
        }
        let table = self.sessions.get(&id).and_then(|session| session.lock_table.as_ref());
        let Some(table) = table else { return Ok(Vec::new()) };
        let mut units = Vec::new();
        for unit in held {
            let locks = table.locks_on(unit);
            // The locks of a process may be on any file.
            let may_be = |file: &&SharedFile| match file.owner_kind {
                OWNER_DESCRIPTION => file.inode == unit,
                kind => kind == OWNER_PROCESS,
            };
            let given = files.iter().filter(may_be);
            for file in given {
                let owner = owner_of_file(file)?;
                if !units.contains(&unit) && locks.iter().any(|(_, other)| Some(*other) == owner) {
                    units.push(unit);
                }
            }
        }
        Ok(units)
    }

    /// Adds the lock leases that sessions hold, for the register.
    pub fn put_lock_leases(&self, entries: &mut Vec<RegisterEntry>) {
        for (id, session) in &self.sessions {
            if let Some(table) = &session.lock_table {
                table.put_entries(*id, entries);
            }
        }
    }
}
