//! The table of file locks: a pure state machine, for the component of an engine that decides about locks.
//!
//! `fcntl` locks cover ranges: a new lock replaces the owner's earlier locks in its range, and adjacent locks of
//! one kind are merged. A `flock` lock covers the file: a change of its kind first releases the old lock, as Linux
//! does. Waiting requests are granted in the order of their arrival, as far as the held locks allow.

use crate::engine::{Lock, LockFamily, LockKind, LockOwner, Locked, Result, Ticket};
use crate::error::Error;
use format::InodeNumber;
use format::call::{
    FAMILY_RANGES, FAMILY_WHOLE, LOCK_EXCLUSIVE, LOCK_SHARED, OWNER_DESCRIPTION, OWNER_PROCESS,
};
use format::locks::HeldLock;
use std::collections::{BTreeMap, BTreeSet};
use std::task::Waker;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OwnedLock {
    lock: Lock,
    owner: LockOwner,
}

#[derive(Clone, Debug)]
struct LockWaiter {
    ticket: Ticket,
    inode: InodeNumber,
    wish: OwnedLock,
    waker: Waker,
}

/// All locks of a tree.
#[derive(Clone, Debug, Default)]
pub struct LockTable {
    held: BTreeMap<InodeNumber, Vec<OwnedLock>>,
    queue: Vec<LockWaiter>,
    /// Tickets that were granted, and on which inode.
    granted: BTreeMap<Ticket, InodeNumber>,
    tickets_given: u64,
    count_max: usize,
}

/// A lock as a lock table has it.
pub fn to_held(lock: Lock, owner: LockOwner) -> HeldLock {
    let (owner_kind, owner, pid) = match owner {
        LockOwner::Process { id, pid } => (OWNER_PROCESS, id, pid),
        LockOwner::Description(id) => (OWNER_DESCRIPTION, id, 0),
    };
    HeldLock {
        owner: owner.into(),
        first: lock.first.into(),
        last: lock.last.into(),
        pid: pid.into(),
        owner_kind,
        family: if lock.family == LockFamily::Ranges { FAMILY_RANGES } else { FAMILY_WHOLE },
        kind: if lock.kind == LockKind::Shared { LOCK_SHARED } else { LOCK_EXCLUSIVE },
        reserved: 0,
    }
}

/// The lock that an entry of a lock table says; none if no such lock can be.
pub fn of_held(held: &HeldLock) -> Option<(Lock, LockOwner)> {
    let owner = match held.owner_kind {
        OWNER_PROCESS => LockOwner::Process { id: held.owner.get(), pid: held.pid.get() },
        OWNER_DESCRIPTION => LockOwner::Description(held.owner.get()),
        _ => return None,
    };
    let family = match held.family {
        FAMILY_RANGES => LockFamily::Ranges,
        FAMILY_WHOLE => LockFamily::Whole,
        _ => return None,
    };
    let kind = match held.kind {
        LOCK_SHARED => LockKind::Shared,
        LOCK_EXCLUSIVE => LockKind::Exclusive,
        _ => return None,
    };
    let (first, last) = (held.first.get(), held.last.get());
    (first <= last).then_some((Lock { family, kind, first, last }, owner))
}

fn excludes(held: &OwnedLock, wish: &OwnedLock) -> bool {
    held.owner != wish.owner
        && held.lock.family == wish.lock.family
        && (held.lock.kind == LockKind::Exclusive || wish.lock.kind == LockKind::Exclusive)
        && held.lock.first <= wish.lock.last
        && wish.lock.first <= held.lock.last
}

impl LockTable {
    /// Makes a table for at most `count_max` locks of an inode and `count_max` waiting requests.
    pub fn new(count_max: usize) -> Self {
        Self { count_max, ..Self::default() }
    }

    /// Requests a lock; see [`crate::Engine::lock`].
    ///
    /// # Errors
    /// `WouldBlock`, `Deadlock`, `NoLocks`.
    pub fn lock(
        &mut self,
        inode: InodeNumber,
        owner: LockOwner,
        lock: Lock,
        waker: Option<&Waker>,
    ) -> Result<Locked> {
        let wish = OwnedLock { lock, owner };
        if lock.family == LockFamily::Whole {
            let holds_it = |held: &OwnedLock| held.owner == owner && held.lock == lock;
            if self.on(inode).iter().any(holds_it) {
                return Ok(Locked::Granted);
            }
            self.unlock(inode, owner, lock.family, lock.first, lock.last)?;
        }
        if !self.on(inode).iter().any(|held| excludes(held, &wish)) {
            self.take(inode, wish)?;
            self.grant_waiting();
            return Ok(Locked::Granted);
        }
        let waker = waker.ok_or(Error::WouldBlock)?;
        if lock.family == LockFamily::Ranges && self.would_deadlock(inode, &wish) {
            return Err(Error::Deadlock);
        }
        if self.queue.len() >= self.count_max {
            return Err(Error::NoLocks);
        }
        self.tickets_given += 1;
        let ticket = Ticket::new(self.tickets_given);
        self.queue.push(LockWaiter { ticket, inode, wish, waker: waker.clone() });
        Ok(Locked::Queued(ticket))
    }

    /// See [`crate::Engine::redeem`].
    ///
    /// # Errors
    /// `Stale`.
    pub fn redeem(&mut self, ticket: Ticket) -> Result<Locked> {
        if self.granted.remove(&ticket).is_some() {
            return Ok(Locked::Granted);
        }
        let waits = self.queue.iter().any(|waiting| waiting.ticket == ticket);
        if waits { Ok(Locked::Queued(ticket)) } else { Err(Error::Stale) }
    }

    /// See [`crate::Engine::cancel`].
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        if self.granted.remove(&ticket).is_some() {
            return false;
        }
        self.queue.retain(|waiting| waiting.ticket != ticket);
        true
    }

    /// Unlocks a range.
    ///
    /// # Errors
    /// `NoLocks`: splitting a lock in two would exceed the limit.
    pub fn unlock(
        &mut self,
        inode: InodeNumber,
        owner: LockOwner,
        family: LockFamily,
        first: u64,
        last: u64,
    ) -> Result<()> {
        let splits = self.on(inode).iter().any(|held| {
            held.owner == owner
                && held.lock.family == family
                && held.lock.first < first
                && last < held.lock.last
        });
        if splits && self.on(inode).len() >= self.count_max {
            return Err(Error::NoLocks);
        }
        self.cut(inode, owner, family, first, last);
        self.grant_waiting();
        Ok(())
    }

    /// The first conflicting lock of another owner.
    pub fn conflict(&self, inode: InodeNumber, owner: LockOwner, lock: Lock) -> Option<(Lock, LockOwner)> {
        let wish = OwnedLock { lock, owner };
        let in_the_way = self.on(inode).iter().filter(|held| excludes(held, &wish));
        in_the_way.min_by_key(|held| held.lock.first).map(|held| (held.lock, held.owner))
    }

    /// Releases all locks and cancels all requests of an owner, on one inode or on all.
    pub fn release(&mut self, owner: LockOwner, node: Option<InodeNumber>) {
        let concerned = |inode: InodeNumber| node.is_none_or(|node| node == inode);
        for (_, locks) in self.held.iter_mut().filter(|(inode, _)| concerned(**inode)) {
            locks.retain(|held| held.owner != owner);
        }
        self.held.retain(|_, locks| !locks.is_empty());
        self.queue.retain(|waiting| waiting.wish.owner != owner || !concerned(waiting.inode));
        self.grant_waiting();
    }

    /// The locks that are held on one inode.
    pub fn held_on(&self, inode: InodeNumber) -> impl ExactSizeIterator<Item = (Lock, LockOwner)> {
        self.on(inode).iter().map(|held| (held.lock, held.owner))
    }

    /// Whether a request for a lock on the inode waits, or one was granted whose ticket has not ended.
    pub fn is_asked_for(&self, inode: InodeNumber) -> bool {
        self.queue.iter().any(|waiting| waiting.inode == inode)
            || self.granted.values().any(|on| *on == inode)
    }

    /// Whether an owner has a lock anywhere, or waits for one.
    pub fn knows(&self, owner: LockOwner) -> bool {
        self.held.values().flatten().any(|held| held.owner == owner)
            || self.queue.iter().any(|waiting| waiting.wish.owner == owner)
    }

    /// Takes all locks on an inode out, for a table that decides about them from now on.
    pub fn take_out(&mut self, inode: InodeNumber) -> Vec<(Lock, LockOwner)> {
        let held = self.held.remove(&inode).unwrap_or_default();
        held.into_iter().map(|held| (held.lock, held.owner)).collect()
    }

    /// All held locks.
    pub fn all(&self) -> impl Iterator<Item = (InodeNumber, Lock, LockOwner)> {
        let each = |(inode, locks): (&InodeNumber, &Vec<OwnedLock>)| {
            let inode = *inode;
            locks.clone().into_iter().map(move |held| (inode, held.lock, held.owner))
        };
        self.held.iter().flat_map(each)
    }

    fn on(&self, inode: InodeNumber) -> &[OwnedLock] {
        self.held.get(&inode).map_or(&[], Vec::as_slice)
    }

    /// Adds a lock that conflicts with none.
    fn take(&mut self, inode: InodeNumber, wish: OwnedLock) -> Result<()> {
        // A lock inside another lock of its owner splits that lock in two.
        if self.on(inode).len() + 2 > self.count_max {
            return Err(Error::NoLocks);
        }
        let Lock { family, kind, mut first, mut last } = wish.lock;
        self.cut(inode, wish.owner, family, first, last);
        let locks = self.held.entry(inode).or_default();
        locks.retain(|held| {
            let same = held.owner == wish.owner && held.lock.family == family && held.lock.kind == kind;
            let touches_before = held.lock.last.checked_add(1) == Some(first);
            let touches_after = last.checked_add(1) == Some(held.lock.first);
            if same && touches_before {
                first = held.lock.first;
            }
            if same && touches_after {
                last = held.lock.last;
            }
            !(same && (touches_before || touches_after))
        });
        locks.push(OwnedLock { lock: Lock { family, kind, first, last }, owner: wish.owner });
        Ok(())
    }

    /// Removes a range from an owner's locks.
    fn cut(&mut self, inode: InodeNumber, owner: LockOwner, family: LockFamily, first: u64, last: u64) {
        let Some(locks) = self.held.get_mut(&inode) else { return };
        let mut left = Vec::with_capacity(locks.len() + 1);
        for held in locks.drain(..) {
            let Lock { first: held_first, last: held_last, .. } = held.lock;
            let apart = held_last < first || last < held_first;
            if held.owner != owner || held.lock.family != family || apart {
                left.push(held);
                continue;
            }
            if held_first < first {
                left.push(OwnedLock { lock: Lock { last: first - 1, ..held.lock }, owner });
            }
            if held_last > last {
                left.push(OwnedLock { lock: Lock { first: last + 1, ..held.lock }, owner });
            }
        }
        *locks = left;
        if locks.is_empty() {
            self.held.remove(&inode);
        }
    }

    /// Grants the requests that no lock conflicts with, oldest first.
    fn grant_waiting(&mut self) {
        let mut index = 0;
        while index < self.queue.len() {
            let LockWaiter { inode, wish, .. } = self.queue[index];
            let free = !self.on(inode).iter().any(|held| excludes(held, &wish));
            if free && self.take(inode, wish).is_ok() {
                let waiting = self.queue.remove(index);
                self.granted.insert(waiting.ticket, inode);
                waiting.waker.wake();
                // The new lock may replace a stronger lock of the same owner.
                index = 0;
            } else {
                index += 1;
            }
        }
    }

    /// True if an owner that this request would wait for is itself waiting, directly or through others, for this
    /// request's owner. Only processes are considered: several processes may share an open file, so the holder of
    /// such a lock need not be the waiter.
    fn would_deadlock(&self, inode: InodeNumber, wish: &OwnedLock) -> bool {
        if !matches!(wish.owner, LockOwner::Process { .. }) {
            return false;
        }
        let blockers = |inode, wish: OwnedLock| {
            self.on(inode).iter().filter(move |held| excludes(held, &wish)).map(|held| held.owner)
        };
        let mut seen: BTreeSet<LockOwner> = BTreeSet::new();
        let mut next: Vec<LockOwner> = blockers(inode, *wish).collect();
        while let Some(owner) = next.pop() {
            if owner == wish.owner {
                return true;
            }
            if !matches!(owner, LockOwner::Process { .. }) || !seen.insert(owner) {
                continue;
            }
            for waiting in self.queue.iter().filter(|waiting| waiting.wish.owner == owner) {
                next.extend(blockers(waiting.inode, waiting.wish));
            }
        }
        false
    }
}
