//! Locks that this process decides, under lock leases: no other process has or requests a lock on the file. Each change
//! is written completely to the session's lock table ([`format::locks`]) before it is valid, and SharedFS reads the
//! locks from there.
//!
//! A lock for which the program has to wait for another owner in the same process is requested from SharedFS, which
//! revokes the lease for that; no request waits here. Other cases that cannot be decided here are also decided by a
//! call.

use crate::state::State;
use format::InodeNumber;
use format::Sequence;
use format::call::LOCK_LEASE;
use format::locks::{
    LOCK_LIST_BYTES, LOCK_LIST_MAX, LOCK_SLOT_BYTES, LOCK_TABLE_BYTES, LockList, list_offset,
};
use pmem::Region;
use std::collections::{BTreeMap, BTreeSet};
use vfs::engine::LockOwner;
use vfs::locks::{LockTable, of_held, to_held};

/// The state of locks in this process.
#[derive(Default)]
pub(crate) struct LocalLocks {
    /// The session's lock table.
    pub table: Option<Region>,
    /// Files whose locks this process decides.
    files: BTreeMap<InodeNumber, LocalFile>,
    /// Owners and files that SharedFS may know. The end of any other owner needs no call.
    told: BTreeSet<(LockOwner, InodeNumber)>,
    /// Owners that other processes share: their locks are decided by SharedFS.
    shared: BTreeSet<LockOwner>,
}

/// A file whose locks this process decides.
struct LocalFile {
    slot: u32,
    /// Lower half of the generation of its lock lease.
    expected: u32,
    /// Number of the last change written.
    sequence: Sequence,
    locks: LockTable,
}

impl LocalFile {
    fn owners(&self, inode: InodeNumber) -> impl Iterator<Item = LockOwner> {
        self.locks.held_on(inode).map(|(_, owner)| owner)
    }

    /// Writes the locks over the older of the two lists in their slot.
    fn write(&mut self, table: &Region, inode: InodeNumber) {
        self.sequence = self.sequence.next();
        let locks = self.locks.held_on(inode).map(|(lock, owner)| to_held(lock, owner)).collect();
        let list = LockList { inode, sequence: self.sequence, locks };
        let mut bytes = [0; LOCK_LIST_BYTES];
        let length = list.encode(&mut bytes);
        let at = self.slot as usize * LOCK_SLOT_BYTES + list_offset(self.sequence);
        table.store(at as u64, &bytes[..length]);
    }
}

impl LocalLocks {
    /// Notes that SharedFS knows an owner on a file, or will.
    pub fn note_told(&mut self, owner: LockOwner, inode: InodeNumber) {
        self.told.insert((owner, inode));
    }

    /// Notes that other processes share an owner.
    pub fn note_shared(&mut self, owner: LockOwner) {
        self.shared.insert(owner);
    }

    /// The flag of a request that asks for the lock lease. Not for an owner that other processes share: SharedFS would take
    /// the lease back for its next lock.
    pub fn lease_flag(&self, owner: LockOwner) -> u8 {
        if self.shared.contains(&owner) { 0 } else { LOCK_LEASE }
    }

    /// The session is over, and SharedFS has the locks.
    pub fn end_session(&mut self) {
        let inodes: Vec<InodeNumber> = self.files.keys().copied().collect();
        inodes.into_iter().for_each(|inode| self.lose(inode));
        self.table = None;
    }

    /// From now on SharedFS decides about the locks on a file.
    pub fn lose(&mut self, inode: InodeNumber) {
        if let Some(file) = self.files.remove(&inode) {
            self.told.extend(file.owners(inode).map(|owner| (owner, inode)));
        }
    }

    /// Whether an owner has locks on a file that this process decides.
    fn has_locks(&self, owner: LockOwner, inode: InodeNumber) -> bool {
        self.files.get(&inode).is_some_and(|file| file.owners(inode).any(|other| other == owner))
    }

    /// Whether SharedFS has to be informed of the end of an owner, on one file or on all. Forgets that SharedFS knows
    /// it.
    pub fn take_told(&mut self, owner: LockOwner, node: Option<InodeNumber>) -> bool {
        let before = self.told.len();
        self.told.retain(|(other, inode)| *other != owner || node.is_some_and(|node| node != *inode));
        if node.is_none() || matches!(owner, LockOwner::Description(_)) {
            self.shared.remove(&owner);
        }
        self.told.len() < before
    }

    /// Files on which this process decides locks that the owner has; only `node`, or all.
    pub fn files_of(&self, owner: LockOwner, node: Option<InodeNumber>) -> Vec<InodeNumber> {
        let concerned = |inode: &InodeNumber| node.is_none_or(|node| node == *inode);
        let files = self.files.keys().copied().filter(concerned);
        files.filter(|inode| self.has_locks(owner, *inode)).collect()
    }
}

impl State {
    /// Begins to decide the locks on a file under a new lock lease; reads the present ones from the table.
    pub fn learn_lock_lease(&mut self, inode: InodeNumber, slot: u32, expected: u32) {
        let (Some(session), Some(table)) = (self.session.as_ref(), self.locks.table.as_ref()) else { return };
        let at = u64::from(slot) * LOCK_SLOT_BYTES as u64;
        if at >= LOCK_TABLE_BYTES as u64 || !session.words.holds_locks(slot, expected) {
            return;
        }
        let mut bytes = [0; LOCK_SLOT_BYTES];
        let list = table.read(at, &mut bytes).ok().and_then(|()| LockList::of_slot(&bytes));
        let Some(list) = list.filter(|list| list.inode == inode) else { return };
        let mut locks = LockTable::new(LOCK_LIST_MAX + 2);
        for (lock, owner) in list.locks.iter().filter_map(of_held) {
            if locks.lock(inode, owner, lock, None).is_err() {
                return;
            }
        }
        // SharedFS no longer knows locks of this process's own owners on the file.
        self.locks
            .told
            .retain(|(owner, other)| *other != inode || matches!(owner, LockOwner::Description(_)));
        self.locks.files.insert(inode, LocalFile { slot, expected, sequence: list.sequence, locks });
    }

    /// Decides about an owner's locks on a file, if the session holds the lock lease. None: the caller has to ask
    /// SharedFS. A change that was decided here but may not be valid is decided again there, with the same result.
    pub fn decide_lock<T>(
        &mut self,
        inode: InodeNumber,
        owner: LockOwner,
        changes: bool,
        decide: impl FnOnce(&mut LockTable) -> T,
    ) -> Option<T> {
        let LocalLocks { table, files, shared, .. } = &mut self.locks;
        let (session, table, file) = (self.session.as_ref()?, table.as_ref()?, files.get_mut(&inode)?);
        // A change adds two locks at most.
        if shared.contains(&owner) || file.locks.held_on(inode).len() + 2 > LOCK_LIST_MAX {
            return None;
        }
        let entered = session.words.enter();
        if !session.words.holds_locks(file.slot, file.expected) {
            session.words.leave(entered);
            self.locks.lose(inode);
            return None;
        }
        let decided = decide(&mut file.locks);
        if changes {
            file.write(table, inode);
        }
        let counts = session.words.counts();
        session.words.leave(entered);
        if !counts {
            self.locks.lose(inode);
            self.locks.note_told(owner, inode);
            return None;
        }
        Some(decided)
    }
}
