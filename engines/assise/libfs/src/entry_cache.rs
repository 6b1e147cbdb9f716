//! Entries of directories as a cache: bounded over all directories, so that a process that goes through a large tree keeps
//! only a part of what it saw.
//!
//! Guarantees: entries that own records made, or removed, stay until the area holds them; the directories of the operation
//! at hand stay whole, however large they are.

use crate::nodes::Body;
use crate::state::State;

/// One part of so many is forgotten beyond what has to be.
const PART: usize = 8;

/// What is known of the number of entries.
#[derive(Debug, Default)]
pub(crate) struct EntryCount {
    /// Those counted last, and those learned since: no fewer than there are.
    at_most: usize,
    /// With so many the next search is worth it.
    search_above: usize,
    /// Where the next search begins.
    hand: usize,
}

impl EntryCount {
    /// So many were learned.
    #[inline]
    pub fn add(&mut self, count: usize) {
        self.at_most += count;
    }

    /// Whether there may be more than so many, which are not all in use.
    #[inline]
    pub fn exceeds(&self, entries_max: usize) -> bool {
        self.at_most > entries_max.max(self.search_above)
    }
}

impl State {
    /// Forgets entries of directories that the present operation does not use, until there are so many and some fewer.
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
        // What cannot be forgotten now is not looked for again at once.
        self.entries.search_above = if count > goal { count + count / PART } else { 0 };
    }
}
