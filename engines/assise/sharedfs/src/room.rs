//! Space reservations: blocks are reserved before they are used, so that every record that a LibFS was allowed to
//! append can be digested.
//!
//! A session has a number of blocks reserved. A record that is digested takes [`format::record::room_blocks`] of them,
//! whatever it really used. A reservation is backed by the free blocks in segments of the session's user, and beyond
//! that by shared blocks (see `area::FreeBlocks`). The reservations of all sessions together never need more shared
//! blocks than there are, less a reserve for copy-on-write. Blocks of another user's file are not in a user's own
//! segments, so the whole reservation of a session that writes to such a file is backed by shared blocks.
//!
//! A part of the shared blocks is left by all reservations except those for records that replace blocks: after such a
//! record is digested, files have no more blocks than before, so that the part is there again. The blocks that it frees
//! may be in a user's own segments. Then the user's other records leave as many of those.
//!
//! Reservations need space of the medium, too: no more blocks are reserved than have some (`pool_space`). There, blocks of a user's
//! own segments do not count.
//!
//! While a batch is prepared, the free space is known as of the last commit. Blocks that the batch takes stay reserved
//! until the commit. Of the blocks that it leaves, no more are reserved meanwhile than it was told to keep.

use crate::pool_space::PoolSpace;
use area::{FreeBlocks, Usage};
use ccnvm::SessionId;
use std::collections::BTreeMap;

/// At most this part of the free space is reserved at once, so that a session that requests much, and may never use it,
/// leaves some to the others. A session that needs more requests again.
const SHARE: u64 = 8;
/// If little is free, this much is reserved all the same.
const SHARE_MIN: u64 = 64;
/// This part of the capacity stays shared, so that a user who comes late finds space.
const STAYS_SHARED: u64 = 8;
/// A session that has this many blocks reserved for records that replace blocks gets no more: it waits for a digest.
const REPLACING_MAX: u64 = 64;
/// The sessions of a user have this part of the reserve for such records reserved at most, or [`REPLACING_MIN`] blocks, or as
/// many as the user's own segments have: the blocks that their records free may be the user's own from then on.
const REPLACING_PART: u64 = 8;
/// Enough for a record that replaces four blocks, of which it covers the first and the last in part.
const REPLACING_MIN: u64 = 8;

/// Free space after a commit.
#[derive(Clone, Debug)]
pub(crate) struct Free {
    pub usage: Usage,
    pub blocks: FreeBlocks,
    /// Free blocks with space in the medium that files of all owners can take.
    pub provided: u64,
    /// The space that the pool holds; `None` if the medium is never full.
    pub space: Option<PoolSpace>,
}

impl Free {
    pub fn of(area: &area::Area, space: Option<PoolSpace>) -> Self {
        Self { usage: area.usage(), blocks: area.free_blocks(), provided: area.provided_blocks(), space }
    }

    /// Blocks that have space in the medium, or for which the pool holds some.
    fn backed(&self) -> u64 {
        self.space.as_ref().map_or(u64::MAX, |space| space.backed(self.provided))
    }

    fn own(&self, owner: u32) -> u64 {
        self.blocks.own.get(&owner).copied().unwrap_or(0)
    }
}

/// The reservation of a session.
#[derive(Clone, Copy, Debug)]
struct Promise {
    owner: u32,
    blocks: u64,
    /// No more of them than these were reserved for records that replace blocks, and are not taken.
    replacing: u64,
    /// It writes to other users' files.
    shared: bool,
}

/// The reservation of one session, while the records of a batch use it up. The count in [`Room`] is reduced when the
/// batch is part of the tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionRoom {
    blocks: u64,
    shared: bool,
    taken: u64,
}

impl SessionRoom {
    /// Takes a record's cost; `shared` is true for blocks that are not of the session's user. False if the session has
    /// not so much left, and then nothing is left; or if it never announced that it would write to such files.
    pub fn take(&mut self, blocks: u64, shared: bool) -> bool {
        let taken = blocks.min(self.blocks - self.taken);
        self.taken += taken;
        taken == blocks && (self.shared || !shared)
    }

    /// Blocks taken so far.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Gives back the blocks taken since [`Self::taken`] returned this number: the records will be digested again.
    pub fn restore(&mut self, taken: u64) {
        assert!(taken <= self.taken, "what was taken is given back");
        self.taken = taken;
    }
}

/// Blocks and nodes that a batch must leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchReserve {
    /// Shared blocks that have to stay so.
    pub blocks: u64,
    /// Nodes of the tree that belong to reservations.
    pub nodes: u32,
}

/// Blocks and nodes that may still be reserved while a batch is prepared; blocks of the reserve for replacing included.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    blocks: u64,
    nodes: u64,
}

/// Reservations of all sessions.
#[derive(Debug)]
pub(crate) struct Room {
    promised: BTreeMap<SessionId, Promise>,
    total: u64,
    /// Blocks that were reserved since the start.
    granted: u64,
    /// Blocks that are never reserved for a session.
    reserve: u64,
    /// Further blocks that are reserved only for records that replace blocks.
    replace_reserve: u64,
    /// While a batch is prepared: blocks and nodes that may still be reserved.
    ahead: Option<Ahead>,
    /// Blocks that the batch takes without a reservation.
    lent: u64,
}

impl Room {
    /// Nothing is reserved. `reserve` blocks never are, and `replace_reserve` further ones only for records that replace
    /// blocks.
    pub fn new(reserve: u64, replace_reserve: u64) -> Self {
        let (promised, ahead) = (BTreeMap::new(), None);
        Self { promised, total: 0, granted: 0, reserve, replace_reserve, ahead, lent: 0 }
    }

    /// Begins a batch, which may have to make a user's segment of so many blocks. Returns the blocks and nodes that it
    /// must leave.
    pub fn begin_batch(&mut self, free: &Free, segment_blocks: u64) -> BatchReserve {
        let reserve = self.reserve + self.replace_reserve;
        let needed = self.needed(free) + reserve.max(free.usage.blocks / STAYS_SHARED);
        let nodes_needed = self.total + self.reserve;
        // Half of the rest, and a segment at least, is for the batch; the remainder is for reservations meanwhile.
        let left = free.blocks.shared.saturating_sub(needed);
        let blocks = needed + (left - (left / 2).max(segment_blocks.min(left)));
        let nodes = nodes_needed + u64::from(free.usage.nodes_free).saturating_sub(nodes_needed) / 2;
        let backed = blocks - self.needed(free) - self.reserve;
        self.ahead = Some(Ahead { blocks: backed, nodes: nodes - nodes_needed });
        BatchReserve { blocks, nodes: u32::try_from(nodes).unwrap_or(u32::MAX) }
    }

    /// Takes blocks for the batch that were not reserved. False if they might be reserved for sessions.
    pub fn lend(&mut self, blocks: u64, free: &Free) -> bool {
        let fits = blocks <= self.spare(free);
        if fits {
            self.lent += blocks;
        }
        fits
    }

    /// The batch is part of the tree, or was given up; its records have taken so many blocks of the session's
    /// reservation.
    pub fn end_batch(&mut self, session: SessionId, taken: u64) {
        (self.ahead, self.lent) = (None, 0);
        if let Some(promise) = self.promised.get_mut(&session) {
            promise.blocks -= taken;
            promise.replacing = promise.replacing.min(promise.blocks);
            self.total -= taken;
        }
    }

    /// The reservation of a session, for a batch of its records.
    pub fn of(&self, session: SessionId) -> SessionRoom {
        let promise = self.promised.get(&session);
        let (blocks, shared) = promise.map_or((0, false), |promise| (promise.blocks, promise.shared));
        SessionRoom { blocks, shared, taken: 0 }
    }

    /// Adds a session of this user, with nothing reserved.
    pub fn begin(&mut self, session: SessionId, owner: u32) {
        self.promised.insert(session, Promise { owner, blocks: 0, replacing: 0, shared: false });
    }

    /// Shared blocks that all reservations need.
    fn needed(&self, free: &Free) -> u64 {
        let (mut shared, mut own) = (0, BTreeMap::<u32, u64>::new());
        for promise in self.promised.values() {
            match promise.shared {
                true => shared += promise.blocks,
                false => *own.entry(promise.owner).or_default() += promise.blocks,
            }
        }
        let beyond = own.iter().map(|(owner, blocks)| blocks.saturating_sub(free.own(*owner)));
        shared + beyond.sum::<u64>() + self.lent
    }

    /// Blocks that need space of the medium.
    pub fn reserved(&self) -> u64 {
        self.total + self.lent
    }

    /// Blocks that were reserved since the start.
    pub fn granted(&self) -> u64 {
        self.granted
    }

    /// Blocks with space in the medium that are neither reserved nor in the reserve for replacing.
    fn in_medium(&self, free: &Free) -> u64 {
        self.in_medium_to_replace(free).saturating_sub(self.replace_reserve)
    }

    /// The same with the reserve for replacing.
    fn in_medium_to_replace(&self, free: &Free) -> u64 {
        free.backed().saturating_sub(self.reserved())
    }

    /// Blocks that a session could have of so many if more space was held, and cannot have now.
    pub fn missing_in_medium(&self, session: SessionId, blocks: u64, free: &Free) -> u64 {
        let ahead = self.ahead.map_or(u64::MAX, |ahead| ahead.blocks.min(ahead.nodes));
        self.free_in_pool(session, free).min(ahead).min(blocks).saturating_sub(self.in_medium(free))
    }

    /// Blocks that can still be reserved for a session. A reserved block also stands for a share of the tree's nodes.
    pub fn free(&self, session: SessionId, free: &Free) -> u64 {
        self.free_in_pool(session, free).min(self.in_medium(free))
    }

    /// The same, if the medium has space for all.
    fn free_in_pool(&self, session: SessionId, free: &Free) -> u64 {
        self.blocks_in_pool(session, free).min(self.free_nodes(free))
    }

    fn blocks_in_pool(&self, session: SessionId, free: &Free) -> u64 {
        match self.promised.get(&session) {
            Some(Promise { owner, shared: false, .. }) => self.free_of_pool(*owner, free),
            _ => self.spare_of_pool(free),
        }
    }

    /// Nodes of the tree that belong to no reservation.
    fn free_nodes(&self, free: &Free) -> u64 {
        u64::from(free.usage.nodes_free).saturating_sub(self.total + self.reserve)
    }

    /// Blocks that a session can still have, with the space that is free on the medium.
    pub fn free_blocks(&self, session: SessionId, free: &Free) -> u64 {
        self.blocks_in_pool(session, free).min(self.come_in_medium(free))
    }

    /// The same for a session of this user that keeps to its own files.
    pub fn free_blocks_of(&self, owner: u32, free: &Free) -> u64 {
        self.free_of_pool(owner, free).min(self.come_in_medium(free))
    }

    /// [`Self::in_medium`] with the blocks for which space can be held.
    fn come_in_medium(&self, free: &Free) -> u64 {
        let come = free.space.as_ref().map_or(0, PoolSpace::free_blocks);
        self.in_medium(free).saturating_add(come)
    }

    fn free_of_pool(&self, owner: u32, free: &Free) -> u64 {
        // For blocks taken from the reserve for replacing, others came free in users' own segments.
        let reserve = self.needed(free) + self.reserve + self.replace_reserve;
        let missing = reserve.saturating_sub(free.blocks.shared).min(self.replace_reserve);
        let own = free.own(owner).saturating_sub(self.promised_of(owner) + missing);
        self.spare_of_pool(free) + own
    }

    /// Blocks reserved for sessions of this user that keep to its own files.
    fn promised_of(&self, owner: u32) -> u64 {
        let same = self.promised.values().filter(|promise| promise.owner == owner && !promise.shared);
        same.map(|promise| promise.blocks).sum()
    }

    /// Shared blocks that back no reservation and are in no reserve.
    fn spare(&self, free: &Free) -> u64 {
        self.spare_of_pool(free).min(self.in_medium(free))
    }

    /// The same, if the medium has space for all.
    fn spare_of_pool(&self, free: &Free) -> u64 {
        self.spare_to_replace(free).saturating_sub(self.replace_reserve)
    }

    /// The same with the reserve for replacing.
    fn spare_to_replace(&self, free: &Free) -> u64 {
        free.blocks.shared.saturating_sub(self.needed(free) + self.reserve)
    }

    /// Reserves up to `blocks` more; returns how many.
    pub fn promise(&mut self, session: SessionId, blocks: u64, free: &Free) -> u64 {
        let given = blocks.min(self.can_promise(session, free));
        self.add(session, given)
    }

    /// Blocks that can be reserved for a session now, for any record.
    fn can_promise(&self, session: SessionId, free: &Free) -> u64 {
        let ahead = |ahead: Ahead| ahead.blocks.saturating_sub(self.replace_reserve).min(ahead.nodes);
        self.free(session, free).min(self.ahead.map_or(u64::MAX, ahead))
    }

    /// Reserves so many more, or none, for records that replace blocks; the session may get some of the reserve for these. If
    /// each of several sessions had a part of what it needs, none of them could go on.
    pub fn promise_to_replace(&mut self, session: SessionId, blocks: u64, free: &Free) -> u64 {
        if blocks <= self.can_promise(session, free) {
            return self.add(session, blocks);
        }
        let Some(Promise { owner, replacing, shared, .. }) = self.promised.get(&session).copied() else {
            return 0;
        };
        let (own, of_user) = match shared {
            true => (0, u64::MAX),
            false => {
                let same = self.promised.values().filter(|promise| promise.owner == owner && !promise.shared);
                let part = (self.replace_reserve / REPLACING_PART).max(REPLACING_MIN).max(free.own(owner));
                let reserved = same.map(|promise| promise.replacing).sum();
                (free.own(owner).saturating_sub(self.promised_of(owner)), part.saturating_sub(reserved))
            }
        };
        let left = (own + self.spare_to_replace(free)).min(self.free_nodes(free));
        let left = left.min(self.in_medium_to_replace(free));
        let few = REPLACING_MAX.saturating_sub(replacing).min(of_user);
        let ahead = self.ahead.map_or(u64::MAX, |ahead| ahead.blocks.min(ahead.nodes));
        if blocks > few.min(left).min(ahead) {
            return 0;
        }
        let given = self.add(session, blocks);
        if let Some(promise) = self.promised.get_mut(&session) {
            promise.replacing += given;
        }
        given
    }

    /// Reserves blocks that are there; returns how many.
    fn add(&mut self, session: SessionId, given: u64) -> u64 {
        let Some(promise) = self.promised.get_mut(&session) else { return 0 };
        promise.blocks += given;
        self.total += given;
        self.granted += given;
        let less = |ahead: Ahead| Ahead { blocks: ahead.blocks - given, nodes: ahead.nodes - given };
        self.ahead = self.ahead.map(less);
        given
    }

    /// Reserves up to `blocks` more, and no more than a share of the free space; returns how many.
    pub fn promise_share(&mut self, session: SessionId, blocks: u64, free: &Free) -> u64 {
        let share = (self.free_in_pool(session, free) / SHARE).max(SHARE_MIN);
        self.promise(session, blocks.min(share), free)
    }

    /// The session is about to write to other users' files. False if there are not enough shared blocks.
    pub fn share(&mut self, session: SessionId, free: &Free) -> bool {
        let Some(promise) = self.promised.get_mut(&session) else { return false };
        let before = std::mem::replace(&mut promise.shared, true);
        // At worst the whole reservation was backed by the user's own blocks.
        let more = promise.blocks;
        let is_ahead = self.ahead.is_none_or(|ahead| more <= ahead.blocks.min(ahead.nodes));
        let backed = before || (is_ahead && self.needed(free) + self.reserve <= free.blocks.shared);
        if let Some(ahead) = self.ahead.as_mut().filter(|_| backed && !before) {
            *ahead = Ahead { blocks: ahead.blocks - more, nodes: ahead.nodes - more };
        }
        if let Some(promise) = self.promised.get_mut(&session).filter(|_| !backed) {
            promise.shared = false;
        }
        backed
    }

    /// Ends the reservation of a session.
    pub fn end(&mut self, session: SessionId) {
        self.total -= self.promised.remove(&session).map_or(0, |promise| promise.blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(shared: u64, own: &[(u32, u64)], nodes_free: u32) -> Free {
        let blocks_free = shared + own.iter().map(|(_, blocks)| blocks).sum::<u64>();
        let usage = Usage { blocks: 9000, blocks_free, blocks_unmade: 0, nodes: 9000, nodes_free, inodes: 1 };
        let blocks = FreeBlocks { shared, own: own.iter().copied().collect() };
        Free { usage, blocks, provided: 0, space: None }
    }

    fn room(reserve: u64, owners: &[u32]) -> Room {
        let mut room = Room::new(reserve, 0);
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
        let mut batch = room.of(one);
        assert!(batch.take(25, false) && !batch.take(6, false));
        assert_eq!((batch.taken(), room.free(one, &free)), (30, 0));
        batch.restore(0);
        assert!(batch.take(30, false) && !batch.take(1, false));
        room.end_batch(one, batch.taken());
        assert_eq!(room.free(one, &free), 30);
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
        assert!(!room.share(one, &free) && !room.of(one).take(1, true));
        room.end_batch(one, 20);
        assert!(room.share(one, &free) && room.of(one).take(1, true));
        room.end_batch(one, 1);
        assert_eq!(room.free(one, &free), 11);
    }

    #[test]
    fn beside_a_batch_no_more_is_promised_than_it_keeps() {
        let free = free(1600, &[(7, 100)], 2000);
        let mut room = room(125, &[7, 8]);
        let (one, two) = (SessionId(1), SessionId(2));
        assert_eq!(room.promise(one, 300, &free), 300);
        // An eighth of 9,000 blocks stays shared, the reserve of 125 among them; half of what is left then, and of the nodes.
        let (blocks, nodes) = (200 + 1125, 300 + 125);
        let kept =
            BatchReserve { blocks: blocks + (1600 + 1 - blocks) / 2, nodes: nodes + (2000 - nodes) / 2 };
        assert_eq!(room.begin_batch(&free, 100), kept);
        // Of nodes, which are fewer, 787 are for promises.
        assert_eq!(room.promise(two, 600, &free), 600);
        assert!(!room.share(one, &free), "that would need 300 shared blocks");
        assert_eq!(room.promise(two, 600, &free), 187);
        assert_eq!(room.promise(two, 1, &free), 0);
        room.end_batch(one, 300);
        assert!(room.share(one, &free));
        assert_eq!(room.promise(two, 600, &free), 600);
    }

    #[test]
    fn records_that_replace_blocks_get_what_others_leave() {
        let mut room = Room::new(10, 64);
        for (session, owner) in [(1, 7), (2, 8), (3, 7)] {
            room.begin(SessionId(session), owner);
        }
        let [one, two, three] = [1, 2, 3].map(SessionId);
        let full = free(84, &[], 9000);
        assert_eq!((room.promise(one, 100, &full), room.promise(two, 1, &full)), (10, 0));
        room.end_batch(one, 10);
        // The records of one are digested: they took 10 of the blocks, and 8 more for those that replaced others.
        let full = free(74, &[], 9000);
        assert_eq!(room.promise(one, 1, &full), 0);
        assert_eq!(room.promise_to_replace(one, 9, &full), 0, "a part is for each user");
        assert_eq!(room.promise_to_replace(one, 8, &full), 8);
        assert_eq!(room.promise_to_replace(three, 1, &full), 0, "who has it already");
        assert_eq!(room.promise_to_replace(two, 6, &full), 6);
        room.end_batch(one, 8);
        // Those that they freed are the user's own. They are for what replaces blocks, and for nothing else.
        let full = free(66, &[(7, 8)], 9000);
        assert_eq!((room.promise(one, 1, &full), room.promise(three, 1, &full)), (0, 0));
        assert_eq!(room.promise_to_replace(three, 7, &full), 7);
        assert_eq!(room.promise_to_replace(one, 2, &full), 0, "all, or nothing");
        assert_eq!(room.promise_to_replace(one, 1, &full), 1, "its own");
        // After a removal there is space for everything.
        let freed = free(66, &[(7, 108)], 9000);
        assert_eq!(
            room.promise(one, 1000, &freed),
            108 - 8 - 14,
            "14 are missing of those that others may use"
        );
    }

    #[test]
    fn a_batch_leaves_what_replaces_blocks() {
        let free = free(200, &[], 9000);
        let mut room = Room::new(10, 64);
        room.begin(SessionId(1), 7);
        room.begin_batch(&free, 100);
        assert!(!room.lend(200 - 73, &free) && room.lend(200 - 74, &free));
        assert_eq!(room.promise(SessionId(1), 1, &free), 0);
        assert_eq!(room.promise_to_replace(SessionId(1), 9, &free), 0);
        assert_eq!(room.promise_to_replace(SessionId(1), 8, &free), 8);
        room.end_batch(SessionId(1), 8);
    }

    #[test]
    fn a_batch_may_take_a_segment_where_little_is_left() {
        let free = free(1600, &[], 9000);
        let mut room = room(0, &[7]);
        assert_eq!(room.begin_batch(&free, 400).blocks, 1600 - 400);
        assert_eq!(room.begin_batch(&free, 1000).blocks, 9000 / 8);
    }

    #[test]
    fn what_a_batch_takes_without_a_promise_is_promised_to_nobody() {
        let free = free(50, &[], 9000);
        let mut room = room(0, &[7]);
        let one = SessionId(1);
        room.begin_batch(&free, 10);
        assert!(room.lend(30, &free) && !room.lend(21, &free));
        assert_eq!(room.promise(one, 100, &free), 20);
        assert!(!room.lend(1, &free));
        room.end_batch(one, 0);
        assert_eq!(room.promise(one, 100, &free), 30);
    }
}
