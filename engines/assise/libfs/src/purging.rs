//! Purging: records that were digested are dropped from the caches, and then their space in the log is freed. The nodes
//! with undigested records are listed in the order of the first of these records, so a purge visits only nodes with
//! a record that was digested, and not all that were changed since. A program that writes many files does this in parts,
//! because all of a digest at once would take milliseconds.

use crate::nodes::{NodeIndex, Purged};
use crate::state::State;
use format::Sequence;
use ipc::sync::{Ordering, fence};
use std::collections::VecDeque;

/// The nodes with undigested records.
#[derive(Debug, Default)]
pub(crate) struct DirtyNodes {
    nodes: VecDeque<(Sequence, NodeIndex)>,
    /// Number of nodes at the front that the present purge has visited, and that stay.
    visited: usize,
}

impl DirtyNodes {
    /// Adds a node that is not among them, whose first undigested record this is.
    pub fn add(&mut self, index: NodeIndex, first: Sequence) {
        debug_assert!(self.nodes.back().is_none_or(|(before, _)| *before <= first), "records come in order");
        self.nodes.push_back((first, index));
    }

    /// Visits nodes with a record up to `digested`, each in one step or more, and removes those that are clean. Until it
    /// returns true, all calls have the same `digested`, and visit each node until it is purged.
    pub fn purge(
        &mut self,
        digested: Sequence,
        steps: &mut usize,
        mut purge: impl FnMut(NodeIndex, &mut usize) -> Purged,
    ) -> bool {
        let all = self.nodes.partition_point(|(first, _)| *first <= digested);
        let (mut kept, mut end) = (self.visited, self.visited);
        while end < all && *steps > 0 {
            *steps -= 1;
            let (first, index) = self.nodes[end];
            match purge(index, steps) {
                Purged::InPart => break,
                Purged::Clean => {}
                Purged::Dirty => {
                    self.nodes[kept] = (first, index);
                    kept += 1;
                }
            }
            end += 1;
        }
        self.nodes.drain(kept..end);
        let is_done = end == all;
        self.visited = if is_done { 0 } else { kept };
        is_done
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

impl State {
    /// Drops digested state from the caches, and then frees its log space.
    pub fn purge(&mut self) {
        // The rest of a purge that has begun.
        self.purge_some(usize::MAX);
        self.purge_some(usize::MAX);
    }

    /// Does a part of this, in so many steps. The space is freed when all parts are done.
    pub fn purge_some(&mut self, steps: usize) {
        let Some(session) = self.session.as_mut() else { return };
        let (digested, place) = match session.purging {
            Some(place) => (session.purged, place),
            None => session.words.digested(),
        };
        if digested > session.last() {
            return;
        }
        if session.purging.is_some() || digested > session.purged {
            (session.purged, session.purging) = (digested, Some(place));
            if !self.purge_caches(digested, steps) {
                return;
            }
        }
        let Some(session) = self.session.as_mut() else { return };
        session.purging = None;
        if session.ring.head().sequence < place.sequence {
            // Before the space is reused. Pairs with the fence of a reader without the lock.
            session.released.store(place.sequence.get(), Ordering::SeqCst);
            fence(Ordering::SeqCst);
            session.ring.release_to(place);
            session.has_more_space();
        }
    }

    /// True if no cache has state of records up to `digested` any more.
    fn purge_caches(&mut self, digested: Sequence, mut steps: usize) -> bool {
        let mut dirty = std::mem::take(&mut self.dirty);
        let is_done = dirty.purge(digested, &mut steps, |index, steps| {
            let node = self.nodes.get_mut(index);
            let purged = node.purge(&mut self.pool, digested, steps);
            if purged == Purged::Clean {
                node.dirty = false;
                if node.nameless && !node.in_use() {
                    self.forget_node(index);
                }
            }
            purged
        });
        self.dirty = dirty;
        is_done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::Nodes;
    use format::InodeNumber;

    #[test]
    fn only_nodes_with_digested_records_are_visited_and_those_with_more_records_stay() {
        let mut dirty = DirtyNodes::default();
        let sequence = Sequence::new;
        let mut all = Nodes::default();
        let nodes: Vec<NodeIndex> = (1..=1000).map(|number| all.enter(InodeNumber::new(number))).collect();
        for (first, index) in (1..).zip(&nodes) {
            dirty.add(*index, sequence(first));
        }
        let visited = |dirty: &mut DirtyNodes, digested, mut steps: usize, stays: usize| {
            let mut visited = Vec::new();
            let is_done = dirty.purge(sequence(digested), &mut steps, |index, _| {
                visited.push(index);
                if index == nodes[stays] { Purged::Dirty } else { Purged::Clean }
            });
            (visited, is_done)
        };
        let all = usize::MAX;
        assert_eq!(visited(&mut dirty, 0, all, 2), (vec![], true));
        assert_eq!(visited(&mut dirty, 5, all, 2), (nodes[..5].to_vec(), true));
        assert_eq!(visited(&mut dirty, 5, all, 2), (vec![nodes[2]], true));
        assert_eq!(visited(&mut dirty, 6, all, 2), (vec![nodes[2], nodes[5]], true));
        dirty.add(nodes[0], sequence(1001));
        // In parts, while nodes are added.
        assert_eq!(visited(&mut dirty, 10, 2, 2), (vec![nodes[2], nodes[6]], false));
        dirty.add(nodes[1], sequence(1002));
        assert_eq!(visited(&mut dirty, 10, 2, 7), (nodes[7..9].to_vec(), false));
        assert_eq!(visited(&mut dirty, 10, 2, 2), (vec![nodes[9]], true));
        assert_eq!(visited(&mut dirty, 10, all, 0), (vec![nodes[2], nodes[7]], true));
        assert_eq!(visited(&mut dirty, 1001, all, 0).0.len(), 991);
        assert_eq!(visited(&mut dirty, 2000, all, 2), (nodes[..2].to_vec(), true));
    }

    #[test]
    fn a_node_that_takes_many_steps_is_visited_until_it_is_purged() {
        let mut dirty = DirtyNodes::default();
        let mut all = Nodes::default();
        let nodes: Vec<NodeIndex> = (1..=3).map(|number| all.enter(InodeNumber::new(number))).collect();
        nodes.iter().for_each(|index| dirty.add(*index, Sequence::new(1)));
        let (mut left, mut visited) = (10, Vec::new());
        loop {
            let mut steps = 4;
            let is_done = dirty.purge(Sequence::new(1), &mut steps, |index, steps| {
                visited.push(index);
                if index != nodes[1] {
                    return Purged::Clean;
                }
                let taken = left.min(*steps);
                (left, *steps) = (left - taken, *steps - taken);
                if left > 0 { Purged::InPart } else { Purged::Dirty }
            });
            if is_done {
                break;
            }
        }
        let [first, second, third] = nodes[..] else { unreachable!("there are three") };
        assert_eq!(visited, [first, second, second, second, second, third]);
        assert_eq!(dirty.nodes, [(Sequence::new(1), second)]);
    }
}
