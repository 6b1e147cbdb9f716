//! Directory entries as a cache: the number of entries over all directories is bounded, so that a process that reads a
//! large tree keeps only a part of it.
//!
//! Guarantees: entries that own records added or removed stay until the area contains them; the directories of the
//! current operation stay complete, whatever their size.

use crate::nodes::Body;
use crate::state::State;

/// Beyond the excess, the fraction `1 / PART` of the limit is forgotten too.
const PART: usize = 8;

/// An estimate of the number of cached entries.
#[derive(Debug, Default)]
pub(crate) struct EntryCount {
    /// The last count, plus the entries cached since: an upper bound.
    at_most: usize,
    /// The next search begins only above this number.
    search_above: usize,
    /// Position at which the next search begins.
    hand: usize,
}

impl EntryCount {
    /// Adds newly cached entries.
    #[inline]
    pub fn add(&mut self, count: usize) {
        self.at_most += count;
    }

    /// Whether there may be more entries than the limit, and enough of them unused for a search.
    #[inline]
    pub fn exceeds(&self, entries_max: usize) -> bool {
        self.at_most > entries_max.max(self.search_above)
    }
}

impl State {
    /// Forgets entries of directories that the current operation does not use, until the number is below the limit by a
    /// fraction.
    #[cold]
    pub fn forget_entries(&mut self, entries_max: usize) {
        let directories: Vec<_> = self
            .nodes
            .indices()
            .filter_map(|index| match &self.nodes.get(index).body {
                Body::Directory(directory) => Some((index, directory.len())),
                _ => None,
            })
            .collect();
        let mut count: usize = directories.iter().map(|(_, entries)| entries).sum();
        let goal = entries_max - entries_max / PART;
        let start = self.entries.hand % directories.len().max(1);
        for step in 0..directories.len() {
            let place = (start + step) % directories.len();
            if count <= goal {
                self.entries.hand = place;
                break;
            }
            let (index, before) = directories[place];
            if self.used.contains(&index) {
                continue;
            }
            let directory = self.nodes.get_mut(index).directory();
            directory.forget_digested();
            count -= before - directory.len();
        }
        self.entries.at_most = count;
        // Entries that cannot be forgotten now do not cause another search at once.
        self.entries.search_above = if count > goal { count + count / PART } else { 0 };
    }
}
