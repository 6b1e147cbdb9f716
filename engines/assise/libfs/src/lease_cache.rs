//! The leases of a session as a cache. A session has so many lease words, however many inodes a program meets: before
//! they run out, leases that were not used for longest go back to SharedFS, many in one call (Assise §3.3: leases are kept
//! until somebody else asks, or until there are too many).
//!
//! Guarantees: only what has no records that are not digested goes back, so that nothing is lost with what was cached
//! under it; the inode itself stays known, open files and pins stay good, and the next use asks for the lease again. A
//! refusal for want of words is a reason to give back, and never the answer of an operation, as long as anything can go
//! back.

use crate::engine::LibFs;
use crate::nodes::NodeIndex;
use crate::state::State;
use format::InodeNumber;
use format::call::{AHEAD_MAX, CallKind, LEASE_UNITS_MAX, RELEASE_UNITS_MAX, WALK_NAMES_MAX};
use format::session::WORD_OWN_RANGE;
use std::collections::{BTreeSet, VecDeque};
use zerocopy::IntoBytes;

/// Words that stay free for what one call may bring: a walk, and a lease request of another thread.
const SPARE: usize = WALK_NAMES_MAX + AHEAD_MAX + LEASE_UNITS_MAX;

/// One part of so many goes back at once.
const PART: usize = 8;

/// What is known of the words in use.
#[derive(Debug, Default)]
pub(crate) struct LeaseCount {
    /// Leases with words that were granted since the count was made, and those counted then: no fewer than are held.
    at_most: usize,
    /// Nodes with such leases, those that were looked at or granted last at the end. Some have lost theirs, or were forgotten.
    held: VecDeque<(NodeIndex, InodeNumber)>,
    /// Inodes of which the session holds a lease that nothing here needs: the first to go back.
    stray: Vec<InodeNumber>,
}

impl LeaseCount {
    /// A lease with a word of its own came.
    pub fn add(&mut self, index: NodeIndex, inode: InodeNumber) {
        self.at_most += 1;
        self.held.push_back((index, inode));
    }

    /// A lease came that nothing here needs.
    pub fn add_stray(&mut self, inode: InodeNumber) {
        self.at_most += 1;
        self.stray.push(inode);
    }

    /// A session without leases begins.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
}

impl State {
    /// Leases that the session may hold before some go back.
    pub(crate) fn words_max(&self) -> usize {
        let words = self.session.as_ref().map_or(0, |session| session.welcome.lease_words.get() as usize);
        words - SPARE.min(words / 2)
    }

    /// Drops what is cached of a node under its lease, which is not needed any more; it goes back with the next ones.
    pub fn drop_lease(&mut self, index: NodeIndex) {
        let node = self.nodes.get_mut(index);
        if node.lease.is_some_and(|lease| lease.word != WORD_OWN_RANGE) {
            self.leases.stray.push(node.inode);
        }
        node.lose(&mut self.pool);
    }

    /// Forgets a node.
    pub fn forget_node(&mut self, index: NodeIndex) {
        self.drop_lease(index);
        self.nodes.remove(index, &mut self.pool);
    }

    /// Whether leases should go back before more are asked for.
    pub fn words_run_out(&self) -> bool {
        self.leases.at_most >= self.words_max()
    }

    /// Drops what was cached under leases that were not used for longest, and gives the inodes whose leases go back; and
    /// whether there should be more of them, if records that are not digested did not stand in the way. None if there are
    /// fewer leases than were thought, unless `refused`: SharedFS said that there are too many.
    fn give_leases_back(&mut self, refused: bool) -> (Vec<InodeNumber>, bool) {
        self.count_leases();
        if !refused && !self.words_run_out() {
            return (Vec::new(), false);
        }
        let wanted = (self.words_max() / PART).clamp(1, RELEASE_UNITS_MAX);
        let mut given_back = std::mem::take(&mut self.leases.stray);
        // Met again meanwhile, under the lease that was there.
        given_back.retain(|inode| {
            self.nodes.find(*inode).is_none_or(|index| self.nodes.get(index).lease.is_none())
        });
        // Once round, and once more: what was used since the last time stays for another round.
        for _ in 0..2 {
            self.choose(wanted, &mut given_back);
        }
        self.leases.at_most = self.leases.at_most.saturating_sub(given_back.len());
        // Not held for a cache outside until they are back.
        self.giving_back.extend(&given_back);
        let short = given_back.len() < wanted;
        (given_back, short)
    }

    /// Keeps of the nodes with leases those that hold one still, each once, and counts them.
    fn count_leases(&mut self) {
        let mut held = std::mem::take(&mut self.leases.held);
        for (index, inode) in &held {
            if let Some(node) = self.nodes.get_if_there(*index, *inode) {
                node.counted = false;
            }
        }
        held.retain(|(index, inode)| {
            let Some(node) = self.nodes.get_if_there(*index, *inode) else { return false };
            let lease = node.lease.filter(|lease| lease.word != WORD_OWN_RANGE && !node.counted);
            let holds =
                lease.is_some_and(|lease| self.session.as_ref().is_some_and(|session| session.holds(&lease)));
            node.counted |= holds;
            holds
        });
        self.leases.at_most = held.len() + self.leases.stray.len();
        self.leases.held = held;
    }

    /// Goes round once: what nothing in the process refers to goes back first, the rest only if there is too little of that.
    fn choose(&mut self, wanted: usize, given_back: &mut Vec<InodeNumber>) {
        let purged = self.session.as_ref().map_or(format::Sequence::new(0), |session| session.purged);
        let mut in_use = Vec::new();
        for _ in 0..self.leases.held.len() {
            if given_back.len() >= wanted {
                return;
            }
            let Some((index, inode)) = self.leases.held.pop_front() else { break };
            let node = self.nodes.get_mut(index);
            if node.lease.is_none() {
                continue;
            }
            if node.held_outside {
                self.leases.held.push_back((index, inode));
                continue;
            }
            let clean = !node.dirty && node.last <= purged;
            let recent = clean && std::mem::take(&mut node.recent);
            if clean && !recent && !node.in_use() {
                given_back.push(inode);
                node.lose(&mut self.pool);
                continue;
            }
            if clean && !recent {
                in_use.push(index);
            }
            self.leases.held.push_back((index, inode));
        }
        for index in in_use.into_iter().take(wanted.saturating_sub(given_back.len())) {
            let node = self.nodes.get_mut(index);
            given_back.push(node.inode);
            node.lose(&mut self.pool);
        }
    }
}

impl LibFs {
    /// Gives leases back, between attempts: before SharedFS is asked for more if they run out, or because it `refused` one
    /// more. False if there is nothing to give back.
    #[cold]
    pub(crate) fn make_lease_room(&self, refused: bool) -> vfs::engine::Result<bool> {
        let (mut given_back, short) = self.state().give_leases_back(refused);
        let mut digested = Ok(());
        if short {
            // Too many inodes have records that are not digested.
            let last = self.state().session.as_ref().map(|session| session.last());
            digested = last.map_or(Ok(()), |last| self.get_digested(last));
            let (more, _) = self.state().give_leases_back(refused);
            given_back.extend(more);
        }
        self.release_all(&given_back)?;
        digested.map(|()| !given_back.is_empty())
    }

    /// Gives back leases that stand in the list of those on their way.
    pub(crate) fn release_all(&self, units: &[InodeNumber]) -> vfs::engine::Result<()> {
        let released = units.chunks(RELEASE_UNITS_MAX).try_for_each(|units| self.release_call(units));
        let back: BTreeSet<InodeNumber> = units.iter().copied().collect();
        self.state().giving_back.retain(|inode| !back.contains(inode));
        self.turn();
        released
    }

    /// Gives leases back, at most [`RELEASE_UNITS_MAX`].
    pub(crate) fn release_call(&self, units: &[InodeNumber]) -> vfs::engine::Result<()> {
        let line = self.line()?;
        // Whatever comes of it: a lease that did not go back is asked for again, or ends with the session.
        self.call(&line, CallKind::Release, &[units.as_bytes()], &mut Vec::new()).map(|_| ())
    }
}
