//! The inodes that the kernel knows, and the number of lookups of each. A node of the kernel is an inode number, and
//! stays valid until the kernel has forgotten it as often as it was looked up. The engine keeps one pin of each. Only of
//! inodes that were open does it keep more than that: contents, after the last name was removed.
//!
//! The kernel keeps an inode as long as the kernel itself has memory, but each inode also takes memory in the gateway
//! and the engine. So beyond a limit the kernel is asked to forget some, in the order of their numbers, starting again
//! after the last one. It keeps the inodes that programs use, and directories as long as it has inodes below them.

use format::InodeNumber;
use ipc::sync::Ordering;
use ipc::{Host, Lock, Waited, Word};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use vfs::Engine;

/// Besides the excess, the kernel is asked to forget `1 / PART` of the limit.
const PART: usize = 8;

/// States of [`Nodes::crowded`].
const ROOM: u32 = 0;
const CROWDED: u32 = 1;
const OVER: u32 = 2;

/// An inode that the kernel knows.
#[derive(Default)]
struct KnownInode {
    lookups: u64,
    /// Number of open files.
    opens: u32,
    /// It was open since the kernel knows it.
    was_open: bool,
}

#[derive(Default)]
struct LookupCounts {
    counts: BTreeMap<InodeNumber, KnownInode>,
    /// The largest number of inodes so far.
    most: usize,
    /// The last inode that the kernel was asked to forget.
    hand: Option<InodeNumber>,
    /// After a request, the kernel is asked again only above this number: it may be using all of its inodes.
    again_above: usize,
}

impl KnownInode {
    fn was_closed(&self) -> bool {
        self.was_open && self.opens == 0
    }
}

pub(crate) struct Nodes {
    host: Arc<dyn Host>,
    told: Lock<LookupCounts>,
    /// Above this number the kernel is asked to forget some.
    count_max: usize,
    /// Whether a thread has to ask the kernel.
    crowded: Word,
}

impl Nodes {
    pub(crate) fn new(host: Arc<dyn Host>, count_max: usize) -> Self {
        let told = Lock::new(host.clone(), LookupCounts::default());
        Self { host, told, count_max, crowded: Word::new(ROOM) }
    }

    /// Counts a lookup of an inode that the engine has just pinned. Only the first pin is kept. True if the kernel did not
    /// know the inode.
    pub(crate) fn tell(&self, engine: &dyn Engine, inode: InodeNumber) -> bool {
        let (is_new, is_crowded) = {
            let mut told = self.told.lock();
            let known = told.counts.entry(inode).or_default();
            known.lookups += 1;
            let is_new = known.lookups == 1;
            let all = told.counts.len();
            told.most = told.most.max(all);
            (is_new, is_new && all > self.count_max.max(told.again_above))
        };
        if !is_new {
            engine.forget(&[inode]);
        }
        // Release: pairs with the Acquire of `wait_crowded`. `OVER`, which ends the thread, is not overwritten.
        if is_crowded
            && self.crowded.compare_exchange(ROOM, CROWDED, Ordering::Release, Ordering::Relaxed).is_ok()
        {
            self.host.wake(&self.crowded, ipc::WAKE_ALL);
        }
        is_new
    }

    /// Whether the kernel knows an inode: it was looked up, and not forgotten.
    pub(crate) fn knows(&self, inode: InodeNumber) -> bool {
        self.told.lock().counts.contains_key(&inode)
    }

    /// A file was opened.
    pub(crate) fn opened(&self, inode: InodeNumber) {
        if let Some(known) = self.told.lock().counts.get_mut(&inode) {
            (known.opens, known.was_open) = (known.opens + 1, true);
        }
    }

    /// A file was closed.
    pub(crate) fn closed(&self, inode: InodeNumber) {
        if let Some(known) = self.told.lock().counts.get_mut(&inode) {
            known.opens = known.opens.saturating_sub(1);
        }
    }

    /// Whether the kernel knows an inode that is not open.
    pub(crate) fn is_closed(&self, inode: InodeNumber) -> bool {
        self.told.lock().counts.get(&inode).is_some_and(|known| known.opens == 0)
    }

    /// The same for an inode that was open.
    pub(crate) fn was_closed(&self, inode: InodeNumber) -> bool {
        self.told.lock().counts.get(&inode).is_some_and(KnownInode::was_closed)
    }

    /// All inodes that were open and are not.
    pub(crate) fn all_closed(&self) -> Vec<InodeNumber> {
        let told = self.told.lock();
        told.counts.iter().filter(|(_, known)| known.was_closed()).map(|(inode, _)| *inode).collect()
    }

    /// The number of inodes that the kernel knows, and the largest number so far.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let told = self.told.lock();
        (told.counts.len(), told.most)
    }

    /// The kernel forgets a number of lookups; true if it no longer knows the inode.
    pub(crate) fn forget(&self, engine: &dyn Engine, inode: InodeNumber, times: u64) -> bool {
        let gone = {
            let mut told = self.told.lock();
            match told.counts.get_mut(&inode) {
                Some(known) if known.lookups > times => {
                    known.lookups -= times;
                    false
                }
                _ => {
                    let gone = told.counts.remove(&inode).is_some();
                    let left = told.counts.len();
                    let above = told.again_above.min(left + self.part() / 2);
                    told.again_above = if left <= self.count_max { 0 } else { above };
                    gone
                }
            }
        };
        if gone {
            engine.forget(&[inode]);
        }
        gone
    }

    /// The kernel has ended the connection and forgotten all inodes.
    pub(crate) fn forget_all(&self, engine: &dyn Engine) {
        let told = std::mem::take(&mut self.told.lock().counts);
        engine.forget(&told.into_keys().collect::<Vec<_>>());
    }

    /// Waits until the kernel knows too many inodes; false at the end.
    pub(crate) fn wait_crowded(&self) -> bool {
        loop {
            if let Some(goes_on) = self.take_crowded() {
                return goes_on;
            }
            let (Waited::Woken | Waited::TimedOut | Waited::Interrupted) =
                self.host.wait(&self.crowded, ROOM, None);
        }
    }

    /// The same without waiting; none if there are not too many.
    pub(crate) fn take_crowded(&self) -> Option<bool> {
        // Acquire: pairs with the Release in `tell` and `end`.
        match self.crowded.compare_exchange(CROWDED, ROOM, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => Some(true),
            Err(OVER) => Some(false),
            Err(_) => None,
        }
    }

    /// Ends the thread in [`Self::wait_crowded`].
    pub(crate) fn end(&self) {
        self.crowded.store(OVER, Ordering::Release);
        self.host.wake(&self.crowded, ipc::WAKE_ALL);
    }

    fn part(&self) -> usize {
        (self.count_max / PART).max(1)
    }

    /// The inodes that the kernel is asked to forget next.
    pub(crate) fn next_to_forget(&self) -> Vec<InodeNumber> {
        let mut told = self.told.lock();
        let (all, part) = (told.counts.len(), self.part());
        // The kernel's messages about earlier ones may not have arrived yet.
        let wanted = all.saturating_sub(self.count_max) + part;
        let from = told.hand.map_or(Bound::Unbounded, Bound::Excluded);
        let behind = told.counts.range((from, Bound::Unbounded));
        let before = told.counts.iter();
        let chosen =
            behind.chain(before).map(|(inode, _)| *inode).filter(|inode| *inode != InodeNumber::ROOT);
        let chosen: Vec<InodeNumber> = chosen.take(wanted.min(all)).collect();
        told.hand = chosen.last().copied();
        told.again_above = all + part / 2;
        chosen
    }
}
