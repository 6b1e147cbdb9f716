//! Room promised before it is used, so that what a LibFS was allowed to append can always be digested (schedule
//! 2.7).
//!
//! A session has a number of blocks promised; a record that is digested takes
//! [`format::record::room_blocks`] of them, whatever it really used. A promise is backed by what the session's user has
//! free in segments of his own, and beyond that by shared blocks (see `area::FreeBlocks`), of which the promises of all
//! never need more than there are, less a reserve for copy-on-write. Blocks of another user's file are no part of any
//! user's own segments, so the whole promise of a session that writes to one is backed by shared blocks.

use area::{FreeBlocks, Usage};
use ccnvm::SessionId;
use std::collections::BTreeMap;

/// One part of so many of what is free is promised at once, so that a session that asks for a lot, and may never use
/// it, leaves some to the others. Who needs more asks again.
const SHARE: u64 = 8;
/// Where little is free, this much is promised all the same.
const SHARE_MIN: u64 = 64;
/// One part of so many of the capacity stays shared, so that a user who comes late finds room.
const STAYS_SHARED: u64 = 8;

/// What is free, now.
#[derive(Debug)]
pub(crate) struct Free {
    pub usage: Usage,
    pub blocks: FreeBlocks,
}

impl Free {
    pub fn of(area: &area::Area) -> Self {
        Self { usage: area.usage(), blocks: area.free_blocks() }
    }

    fn own(&self, owner: u32) -> u64 {
        self.blocks.own.get(&owner).copied().unwrap_or(0)
    }
}

/// What a session has left.
#[derive(Clone, Copy, Debug)]
struct Promise {
    owner: u32,
    blocks: u64,
    /// It writes to other users' files.
    shared: bool,
}

/// What was promised to one session, to be used up by the records of a digest.
pub(crate) struct SessionRoom<'a> {
    pub room: &'a mut Room,
    pub session: SessionId,
}

impl SessionRoom<'_> {
    /// [`Room::take`].
    pub fn take(&mut self, blocks: u64, shared: bool) -> bool {
        self.room.take(self.session, blocks, shared)
    }

    /// [`Room::left`].
    pub fn left(&self) -> u64 {
        self.room.left(self.session)
    }

    /// [`Room::restore`].
    pub fn restore(&mut self, left: u64) {
        self.room.restore(self.session, left);
    }
}

/// Promises of all sessions.
#[derive(Debug)]
pub(crate) struct Room {
    promised: BTreeMap<SessionId, Promise>,
    total: u64,
    /// Blocks never promised to anybody.
    reserve: u64,
}

impl Room {
    pub fn new(reserve: u64) -> Self {
        Self { promised: BTreeMap::new(), total: 0, reserve }
    }

    /// A session of this user, with nothing promised.
    pub fn begin(&mut self, session: SessionId, owner: u32) {
        self.promised.insert(session, Promise { owner, blocks: 0, shared: false });
    }

    /// Shared blocks that all promises need.
    fn needed(&self, free: &Free) -> u64 {
        let (mut shared, mut own) = (0, BTreeMap::<u32, u64>::new());
        for promise in self.promised.values() {
            match promise.shared {
                true => shared += promise.blocks,
                false => *own.entry(promise.owner).or_default() += promise.blocks,
            }
        }
        let beyond = own.iter().map(|(owner, blocks)| blocks.saturating_sub(free.own(*owner)));
        shared + beyond.sum::<u64>()
    }

    /// Shared blocks that have to stay so.
    pub fn kept(&self, free: &Free) -> u64 {
        self.needed(free) + self.reserve.max(free.usage.blocks / STAYS_SHARED)
    }

    /// Nodes of the tree that belong to promises.
    pub fn kept_nodes(&self) -> u32 {
        u32::try_from(self.total + self.reserve).unwrap_or(u32::MAX)
    }

    /// Blocks that can still be promised to a session. A block of room also stands for a share of the tree's nodes.
    pub fn free(&self, session: SessionId, free: &Free) -> u64 {
        let nodes = u64::from(free.usage.nodes_free).saturating_sub(self.total + self.reserve);
        self.free_blocks(session, free).min(nodes)
    }

    /// Blocks that a session can still have.
    pub fn free_blocks(&self, session: SessionId, free: &Free) -> u64 {
        match self.promised.get(&session) {
            Some(Promise { owner, shared: false, .. }) => self.free_blocks_of(*owner, free),
            _ => self.spare(free),
        }
    }

    /// The same for a session of this user that keeps to its own files.
    pub fn free_blocks_of(&self, owner: u32, free: &Free) -> u64 {
        let same = self.promised.values().filter(|promise| promise.owner == owner && !promise.shared);
        self.spare(free) + free.own(owner).saturating_sub(same.map(|promise| promise.blocks).sum())
    }

    /// Shared blocks that back no promise and are not reserved.
    fn spare(&self, free: &Free) -> u64 {
        free.blocks.shared.saturating_sub(self.needed(free) + self.reserve)
    }

    /// Promises up to `blocks` more; gives how many.
    pub fn promise(&mut self, session: SessionId, blocks: u64, free: &Free) -> u64 {
        let given = blocks.min(self.free(session, free));
        let Some(promise) = self.promised.get_mut(&session) else { return 0 };
        promise.blocks += given;
        self.total += given;
        given
    }

    /// Promises up to `blocks` more, and no more than a share of what is free; gives how many.
    pub fn promise_share(&mut self, session: SessionId, blocks: u64, free: &Free) -> u64 {
        let share = (self.free(session, free) / SHARE).max(SHARE_MIN);
        self.promise(session, blocks.min(share), free)
    }

    /// The session is about to write to other users' files. False if there are not so many shared blocks.
    pub fn share(&mut self, session: SessionId, free: &Free) -> bool {
        let Some(promise) = self.promised.get_mut(&session) else { return false };
        let before = std::mem::replace(&mut promise.shared, true);
        let backed = before || self.needed(free) + self.reserve <= free.blocks.shared;
        if let Some(promise) = self.promised.get_mut(&session).filter(|_| !backed) {
            promise.shared = false;
        }
        backed
    }

    /// Takes a record's cost from a session's promise; `shared`: for blocks that are not its user's. False if it has not so
    /// much left: it is used up then; or never said that it would write there.
    pub fn take(&mut self, session: SessionId, blocks: u64, shared: bool) -> bool {
        let Some(promise) = self.promised.get_mut(&session) else { return blocks == 0 };
        let taken = blocks.min(promise.blocks);
        promise.blocks -= taken;
        self.total -= taken;
        taken == blocks && (promise.shared || !shared)
    }

    /// What a session has left of its promise.
    pub fn left(&self, session: SessionId) -> u64 {
        self.promised.get(&session).map_or(0, |promise| promise.blocks)
    }

    /// Gives back what was taken since [`Self::left`] said so: the records come again.
    pub fn restore(&mut self, session: SessionId, left: u64) {
        if let Some(now) = self.promised.get_mut(&session) {
            assert!(now.blocks <= left, "what was taken is given back");
            self.total += left - now.blocks;
            now.blocks = left;
        }
    }

    /// The session is gone.
    pub fn end(&mut self, session: SessionId) {
        self.total -= self.promised.remove(&session).map_or(0, |promise| promise.blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(shared: u64, own: &[(u32, u64)], nodes_free: u32) -> Free {
        let blocks_free = shared + own.iter().map(|(_, blocks)| blocks).sum::<u64>();
        let usage = Usage { blocks: 9000, blocks_free, nodes: 9000, nodes_free, inodes: 1 };
        Free { usage, blocks: FreeBlocks { shared, own: own.iter().copied().collect() } }
    }

    fn room(reserve: u64, owners: &[u32]) -> Room {
        let mut room = Room::new(reserve);
        for (index, owner) in owners.iter().enumerate() {
            room.begin(SessionId(index as u64 + 1), *owner);
        }
        room
    }

    #[test]
    fn who_asks_for_everything_leaves_something() {
        let free = free(8000, &[], 9000);
        let mut room = room(0, &[7; 25]);
        for session in 1..=24 {
            let given = room.promise_share(SessionId(session), u64::MAX, &free);
            assert!(given >= SHARE_MIN, "session {session}");
        }
        while room.promise_share(SessionId(25), u64::MAX, &free) > 0 {}
        assert_eq!(room.free(SessionId(25), &free), 0);
    }

    #[test]
    fn no_more_is_promised_than_there_is() {
        let free = free(50, &[], 80);
        let mut room = room(10, &[7, 8]);
        let (one, two) = (SessionId(1), SessionId(2));
        assert_eq!(room.promise(one, 30, &free), 30);
        assert_eq!(room.promise(two, 30, &free), 10);
        assert_eq!(room.free(one, &free), 0);
        let left = room.left(one);
        assert!(room.take(one, 25, false) && !room.take(one, 6, false));
        assert_eq!(room.free(one, &free), 30);
        room.restore(one, left);
        assert_eq!(room.free(one, &free), 0);
        assert!(room.take(one, 30, false));
        room.end(two);
        assert_eq!(room.free(one, &free), 40);
    }

    #[test]
    fn what_is_one_users_own_backs_no_promise_to_another() {
        let free = free(50, &[(7, 100)], 9000);
        let mut room = room(0, &[7, 8, 7]);
        let [one, two, three] = [1, 2, 3].map(SessionId);
        assert_eq!((room.free(one, &free), room.free(two, &free)), (150, 50));
        assert_eq!(room.promise(one, 120, &free), 120);
        assert_eq!((room.free(two, &free), room.free(three, &free)), (30, 30));
        assert_eq!(room.promise(two, u64::MAX, &free), 30);
        assert_eq!((room.free(three, &free), room.needed(&free)), (0, 50));
    }

    #[test]
    fn who_writes_to_others_files_needs_shared_blocks() {
        let free = free(50, &[(7, 100)], 9000);
        let mut room = room(0, &[7]);
        let one = SessionId(1);
        room.promise(one, 60, &free);
        assert!(!room.share(one, &free) && !room.take(one, 1, true));
        assert!(room.take(one, 20, false) && room.share(one, &free) && room.take(one, 1, true));
        assert_eq!(room.free(one, &free), 12);
    }
}
