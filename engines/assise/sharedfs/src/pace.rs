//! The pace of writers while the tree is sent to a member that joins (`docs/replication.md`, return and first join).
//!
//! A round sends a pinned commit, and what later commits free is not used again meanwhile. So a digest takes room that it does not
//! give back, and leaves something to send in the next round. Each round allows digests so much of both, in the proportion in
//! which it has been sent: a program that writes faster than that waits before its log is digested, and one that writes less
//! does not. So a pin is not lost to writers, and each round leaves at most half of what the one before it left.
//!
//! Guarantees: a member that takes nothing for [`PATIENCE`] slows down no program: the round goes on without a pace, and may lose
//! its pin. No lock is held while a digest waits.

use area::Usage;
use ipc::host::{Host, Time, WAKE_ALL};
use ipc::lock::Lock;
use ipc::sync::{Ordering, Word};
use std::sync::Arc;
use std::time::Duration;

/// How long a round may send nothing before digests go on without it.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long one wait is.
const LOOK: Duration = Duration::from_millis(20);
/// Digests use this part of the room that they could use before a pin is lost.
const ROOM_PART: (u64, u64) = (3, 4);
/// Items whose sending counts as that of one block.
const ITEMS_PER_BLOCK: u64 = 16;

/// Room for data and for the tree, in blocks and nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TreeRoom {
    pub blocks: u64,
    pub nodes: u64,
}

impl TreeRoom {
    pub fn free(usage: &Usage) -> Self {
        Self { blocks: usage.blocks_free, nodes: usage.nodes_free.into() }
    }

    fn less(self, other: Self) -> Self {
        Self {
            blocks: self.blocks.saturating_sub(other.blocks),
            nodes: self.nodes.saturating_sub(other.nodes),
        }
    }

    fn each(self, change: impl Fn(u64) -> u64) -> Self {
        Self { blocks: change(self.blocks), nodes: change(self.nodes) }
    }

    fn with(self, other: Self, choose: impl Fn(u64, u64) -> u64) -> Self {
        Self { blocks: choose(self.blocks, other.blocks), nodes: choose(self.nodes, other.nodes) }
    }

    /// Whether there is no more of either than in another one.
    pub fn is_within(self, other: Self) -> bool {
        self.blocks <= other.blocks && self.nodes <= other.nodes
    }
}

/// A round that is being sent.
#[derive(Debug)]
struct Round {
    /// The free space when it began.
    free: TreeRoom,
    /// The space that digests may take until it is sent.
    may: TreeRoom,
    /// The amount to send, and how much of it was sent, in blocks.
    total: u64,
    sent: u64,
    moved_at: Time,
}

impl Round {
    /// Whether a digest may begin.
    fn allows(&self, free: TreeRoom) -> bool {
        let part = |may: u64| {
            let part =
                u128::from(may) * u128::from(self.sent.min(self.total)) / u128::from(self.total.max(1));
            u64::try_from(part).unwrap_or(u64::MAX)
        };
        self.free.less(free).is_within(self.may.each(part))
    }
}

/// The pace of an area. See the module.
pub(crate) struct Pace {
    host: Arc<dyn Host>,
    round: Lock<Option<Round>>,
    /// 1 while there is a round: each record of a batch asks, without the lock.
    is_kept: Word,
    /// Grows when more was sent, and when a round ends.
    moved: Word,
}

impl Pace {
    /// Nothing is being sent.
    pub fn new(host: &Arc<dyn Host>) -> Self {
        let round = Lock::new(host.clone(), None);
        Self { round, is_kept: Word::new(0), moved: Word::new(0), host: host.clone() }
    }

    /// A round begins whose commit was pinned just now. Digests may take half of what they took in the round before, `least` at
    /// least, and not so much that the pin is lost.
    pub fn begin(&self, usage: &Usage, before: Option<TreeRoom>, least: TreeRoom, total: u64) {
        let free = TreeRoom::free(usage);
        let used = TreeRoom { blocks: usage.blocks, nodes: usage.nodes.into() }.less(free);
        let half = before.unwrap_or(used).each(|room| room / 2).with(least, u64::max);
        let room = free.less(limit_of(usage)).each(|room| room * ROOM_PART.0 / ROOM_PART.1);
        let may = half.with(room, u64::min);
        self.set_round(
            &mut self.round.lock(),
            Some(Round { free, may, total, sent: 0, moved_at: self.host.now() }),
        );
    }

    /// So much more was sent; gives it in blocks. `left`: items that are not counted yet.
    pub fn note_sent(&self, items: u64, blocks: u64, left: &mut u64) -> u64 {
        *left += items;
        let sent = blocks + *left / ITEMS_PER_BLOCK;
        *left %= ITEMS_PER_BLOCK;
        if let Some(round) = self.round.lock().as_mut() {
            (round.sent, round.moved_at) = (round.sent + sent, self.host.now());
        }
        self.announce();
        sent
    }

    /// Ends the round; returns the space that digests took meanwhile.
    pub fn end(&self, usage: &Usage) -> TreeRoom {
        let round = self.set_round(&mut self.round.lock(), None);
        let taken = round.map(|round| round.free.less(TreeRoom::free(usage)));
        self.announce();
        taken.unwrap_or_default()
    }

    /// Whether a round is being sent.
    pub fn is_kept(&self) -> bool {
        // Relaxed: a hint that makes a batch shorter; a thread that must know reads the round itself.
        self.is_kept.load(Ordering::Relaxed) != 0
    }

    /// Replaces the round; the one before.
    fn set_round(&self, round: &mut Option<Round>, new: Option<Round>) -> Option<Round> {
        self.is_kept.store(new.is_some().into(), Ordering::Relaxed);
        std::mem::replace(round, new)
    }

    /// Waits until a digest may begin. `free` says what is free.
    pub fn wait(&self, free: impl Fn() -> TreeRoom) {
        loop {
            // Acquire: pairs with the Release of `announce`.
            let seen = self.moved.load(Ordering::Acquire);
            if !self.is_kept() {
                return;
            }
            let (now, free) = (self.host.now(), free());
            {
                let mut guard = self.round.lock();
                match guard.as_ref() {
                    Some(round) if now.since(round.moved_at) > PATIENCE => {
                        self.set_round(&mut guard, None);
                    }
                    Some(round) if !round.allows(free) => {}
                    _ => return,
                }
            }
            self.host.wait(&self.moved, seen, Some(now.after(LOOK)));
        }
    }

    fn announce(&self) {
        // Release: pairs with the Acquire of `wait`.
        self.moved.fetch_add(1, Ordering::Release);
        self.host.wake(&self.moved, WAKE_ALL);
    }
}

/// The amount to send for so many items and blocks, in blocks.
pub(crate) fn total(items: u64, blocks: u64) -> u64 {
    blocks + items / ITEMS_PER_BLOCK
}

/// Where pins are lost.
fn limit_of(usage: &Usage) -> TreeRoom {
    TreeRoom {
        blocks: usage.blocks / area::PIN_FREE_PART,
        nodes: u64::from(usage.nodes) / area::PIN_FREE_PART,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(blocks_free: u64, nodes_free: u32) -> Usage {
        Usage { blocks: 16_000, blocks_free, blocks_unmade: 0, nodes: 16_000, nodes_free, inodes: 1 }
    }

    #[test]
    fn a_round_allows_what_it_has_sent_in_proportion_and_half_of_the_one_before() {
        let pace = Pace::new(&(Arc::new(ipc::SystemHost) as Arc<dyn Host>));
        let least = TreeRoom { blocks: 10, nodes: 10 };
        let allows = |free: (u64, u32)| {
            pace.round.lock().as_ref().unwrap().allows(TreeRoom::free(&usage(free.0, free.1)))
        };
        // 4,000 of 16,000 are used: half of that is what the first round allows.
        pace.begin(&usage(12_000, 12_000), None, least, 100);
        assert!(allows((12_000, 12_000)) && !allows((11_999, 12_000)) && !allows((12_000, 11_999)));
        pace.note_sent(0, 50, &mut 0);
        assert!(allows((11_000, 11_000)) && !allows((10_999, 11_000)));
        let taken = pace.end(&usage(10_400, 11_500));
        assert_eq!(taken, TreeRoom { blocks: 1600, nodes: 500 });
        pace.begin(&usage(12_000, 12_000), Some(taken), least, 100);
        pace.note_sent(0, 100, &mut 0);
        assert!(allows((11_200, 11_750)) && !allows((11_199, 12_000)) && !allows((12_000, 11_749)));
        // Less than `least` is never asked for, and never so much that the pin is lost.
        pace.begin(&usage(1010, 12_000), Some(TreeRoom::default()), least, 1);
        pace.note_sent(ITEMS_PER_BLOCK, 0, &mut 0);
        assert!(allows((1003, 11_990)) && !allows((1002, 12_000)) && !allows((1010, 11_989)));
    }
}
