//! Room promised before it is used, so that what a LibFS was allowed to append can always be digested (schedule
//! 2.7).
//!
//! A session has a number of blocks promised; a record that is digested takes
//! [`format::record::room_blocks`] of them, whatever it really used. The sum of all promises never exceeds what is
//! free beyond a reserve for copy-on-write.

use area::Usage;
use ccnvm::SessionId;
use std::collections::BTreeMap;

/// One part of so many of what is free is promised at once, so that a session that asks for a lot, and may never use
/// it, leaves some to the others. Who needs more asks again.
const SHARE: u64 = 8;
/// Where little is free, this much is promised all the same.
const SHARE_MIN: u64 = 64;

/// Promises of all sessions.
#[derive(Debug)]
pub(crate) struct Room {
    promised: BTreeMap<SessionId, u64>,
    total: u64,
    /// Blocks never promised to anybody.
    reserve: u64,
}

impl Room {
    pub fn new(reserve: u64) -> Self {
        Self { promised: BTreeMap::new(), total: 0, reserve }
    }

    /// Blocks that can still be promised. A block of room also stands for a share of the tree's nodes.
    pub fn free(&self, usage: &Usage) -> u64 {
        usage.blocks_free.min(u64::from(usage.nodes_free)).saturating_sub(self.total + self.reserve)
    }

    /// Promises up to `blocks` more; gives how many.
    pub fn promise(&mut self, session: SessionId, blocks: u64, usage: &Usage) -> u64 {
        let given = blocks.min(self.free(usage));
        *self.promised.entry(session).or_default() += given;
        self.total += given;
        given
    }

    /// Promises up to `blocks` more, and no more than a share of what is free; gives how many.
    pub fn promise_share(&mut self, session: SessionId, blocks: u64, usage: &Usage) -> u64 {
        let share = (self.free(usage) / SHARE).max(SHARE_MIN);
        self.promise(session, blocks.min(share), usage)
    }

    /// Takes a record's cost from a session's promise. False if it has not so much left: it is used up then.
    pub fn take(&mut self, session: SessionId, blocks: u64) -> bool {
        let Some(left) = self.promised.get_mut(&session) else { return blocks == 0 };
        let taken = blocks.min(*left);
        *left -= taken;
        self.total -= taken;
        taken == blocks
    }

    /// What a session has left of its promise.
    pub fn left(&self, session: SessionId) -> u64 {
        self.promised.get(&session).copied().unwrap_or(0)
    }

    /// Gives back what was taken since [`Self::left`] said so: the records come again.
    pub fn restore(&mut self, session: SessionId, left: u64) {
        if let Some(now) = self.promised.get_mut(&session) {
            assert!(*now <= left, "what was taken is given back");
            self.total += left - *now;
            *now = left;
        }
    }

    /// The session is gone.
    pub fn end(&mut self, session: SessionId) {
        self.total -= self.promised.remove(&session).unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_for_everything_leaves_something() {
        let usage = Usage { blocks: 9000, blocks_free: 8000, nodes: 9000, nodes_free: 9000, inodes: 1 };
        let mut room = Room::new(0);
        for session in 1..=24 {
            assert!(
                room.promise_share(SessionId(session), u64::MAX, &usage) >= SHARE_MIN,
                "session {session}"
            );
        }
        while room.promise_share(SessionId(25), u64::MAX, &usage) > 0 {}
        assert_eq!(room.free(&usage), 0);
    }

    #[test]
    fn no_more_is_promised_than_there_is() {
        let usage = Usage { blocks: 100, blocks_free: 50, nodes: 90, nodes_free: 80, inodes: 1 };
        let mut room = Room::new(10);
        let (one, two) = (SessionId(1), SessionId(2));
        assert_eq!(room.promise(one, 30, &usage), 30);
        assert_eq!(room.promise(two, 30, &usage), 10);
        assert_eq!(room.free(&usage), 0);
        let left = room.left(one);
        assert!(room.take(one, 25) && !room.take(one, 6));
        assert_eq!(room.free(&usage), 30);
        room.restore(one, left);
        assert_eq!(room.free(&usage), 0);
        assert!(room.take(one, 30));
        room.end(two);
        assert_eq!(room.free(&usage), 40);
    }
}
