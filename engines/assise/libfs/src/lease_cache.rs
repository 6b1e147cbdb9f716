//! The leases of a session as a cache. The number of lease words of a session is fixed, whatever the number of inodes
//! that a program uses. Before the words run out, LibFS releases the leases that were not used for the longest time,
//! many in one call (Assise §3.3: a lease is kept until another process requests it, or until there are too many).
//!
//! Guarantees: only leases on inodes without undigested records are released, so no change is lost with the cached
//! state. The inode itself stays known, open files and pins stay valid, and the next use requests the lease again. If
//! SharedFS refuses a lease because no word is free, LibFS releases leases, and the operation does not fail as long as
//! one can be released.

use crate::engine::LibFs;
use crate::nodes::NodeIndex;
use crate::state::State;
use format::InodeNumber;
use format::call::{AHEAD_MAX, CallKind, LEASE_UNITS_MAX, RELEASE_UNITS_MAX, WALK_NAMES_MAX};
use format::session::WORD_OWN_RANGE;
use std::collections::{BTreeSet, VecDeque};
use zerocopy::IntoBytes;

/// Words that stay free for the leases of one call: a walk, and a lease request of another thread.
const SPARE: usize = WALK_NAMES_MAX + AHEAD_MAX + LEASE_UNITS_MAX;

/// The fraction `1 / PART` of the leases is released at once.
const PART: usize = 8;

/// An estimate of the words in use.
#[derive(Debug, Default)]
pub(crate) struct LeaseCount {
    /// The last count, plus the leases with words granted since: an upper bound.
    at_most: usize,
    /// Nodes with such leases, the last visited or granted ones at the end. Some may have lost their lease, or were
    /// forgotten.
    held: VecDeque<(NodeIndex, InodeNumber)>,
    /// Inodes on which the session holds a lease that no node needs: the first to be released.
    stray: Vec<InodeNumber>,
}

impl LeaseCount {
    /// Counts a lease with a word of its own.
    pub fn add(&mut self, index: NodeIndex, inode: InodeNumber) {
        self.at_most += 1;
        self.held.push_back((index, inode));
    }

    /// Counts a lease that no node needs.
    pub fn add_stray(&mut self, inode: InodeNumber) {
        self.at_most += 1;
        self.stray.push(inode);
    }

    /// Begins a session without leases.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
}

impl State {
    /// Number of leases that the session may hold before some are released.
    pub(crate) fn words_max(&self) -> usize {
        let words = self.session.as_ref().map_or(0, |session| session.welcome.lease_words.get() as usize);
        words - SPARE.min(words / 2)
    }

    /// Drops the state cached under a node's lease, which is no longer needed; the lease is released with the next
    /// ones.
    pub fn drop_lease(&mut self, index: NodeIndex) {
        let node = self.nodes.get_mut(index);
        if node.lease.is_some_and(|lease| lease.word != WORD_OWN_RANGE) {
            self.leases.stray.push(node.inode);
        }
        node.lose(&mut self.pool);
    }

    /// Removes a node and its lease.
    pub fn forget_node(&mut self, index: NodeIndex) {
        self.drop_lease(index);
        self.nodes.remove(index, &mut self.pool);
    }

    /// Whether leases should be released before more are requested.
    pub fn words_run_out(&self) -> bool {
        self.leases.at_most >= self.words_max()
    }

    /// Drops the state cached under the leases that were not used for the longest time, and returns the inodes to be
    /// released. The second value is true if more leases could be released after a digest. Returns none if there are
    /// fewer leases than estimated, unless `refused`: SharedFS reported that there are too many.
    fn give_leases_back(&mut self, refused: bool) -> (Vec<InodeNumber>, bool) {
        self.count_leases();
        if !refused && !self.words_run_out() {
            return (Vec::new(), false);
        }
        let wanted = (self.words_max() / PART).clamp(1, RELEASE_UNITS_MAX);
        let mut given_back = std::mem::take(&mut self.leases.stray);
        // An inode that is used again keeps the lease.
        given_back.retain(|inode| {
            self.nodes.find(*inode).is_none_or(|index| self.nodes.get(index).lease.is_none())
        });
        // Two rounds: the first one spares nodes that were used since the last search.
        for _ in 0..2 {
            self.choose(wanted, &mut given_back);
        }
        self.leases.at_most = self.leases.at_most.saturating_sub(given_back.len());
        // They cannot be held for an outside cache before they are released.
        self.giving_back.extend(&given_back);
        let short = given_back.len() < wanted;
        (given_back, short)
    }

    /// Keeps each node that still holds a lease once, and counts them.
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

    /// Makes one round. Nodes to which the process has no reference are chosen first, others only if there are too few
    /// of these.
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
    /// Releases leases between attempts: before more are requested, or because SharedFS `refused` another one. False if
    /// there are none to release.
    #[cold]
    pub(crate) fn make_lease_room(&self, refused: bool) -> vfs::engine::Result<bool> {
        let (mut given_back, short) = self.state().give_leases_back(refused);
        let mut digested = Ok(());
        if short {
            // Too many inodes have undigested records.
            let last = self.state().session.as_ref().map(|session| session.last());
            digested = last.map_or(Ok(()), |last| self.get_digested(last));
            let (more, _) = self.state().give_leases_back(refused);
            given_back.extend(more);
        }
        self.release_all(&given_back)?;
        digested.map(|()| !given_back.is_empty())
    }

    /// Releases leases that are in the list of those being released.
    pub(crate) fn release_all(&self, units: &[InodeNumber]) -> vfs::engine::Result<()> {
        let released = units.chunks(RELEASE_UNITS_MAX).try_for_each(|units| self.release_call(units));
        let back: BTreeSet<InodeNumber> = units.iter().copied().collect();
        self.state().giving_back.retain(|inode| !back.contains(inode));
        self.turn();
        released
    }

    /// Releases at most [`RELEASE_UNITS_MAX`] leases.
    pub(crate) fn release_call(&self, units: &[InodeNumber]) -> vfs::engine::Result<()> {
        let line = self.line()?;
        // The status is irrelevant: a lease that was not released is requested again, or ends with the session.
        self.call(&line, CallKind::Release, &[units.as_bytes()], &mut Vec::new()).map(|_| ())
    }
}
