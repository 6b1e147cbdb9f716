//! Small files whose leases were granted ahead, in the order of their directory. A program that reads one of them
//! usually reads the next ones too, so LibFS requests the extents of several files in one call.
//!
//! The list is only a hint; an answer is used only under the lease under which the request was made.

use crate::extents::Area;
use crate::nodes::Body;
use crate::state::State;
use crate::words::Held;
use format::call::EXTENTS_AHEAD_MAX;
use format::{BLOCK_BYTES, InodeNumber};
use std::collections::VecDeque;

/// Limit of remembered files.
const FILES_MAX: usize = 1024;

/// The extents of a larger file are requested separately, because the daemon verifies the checksums of all of its
/// blocks.
const BYTES_MAX: u64 = 4 * BLOCK_BYTES as u64;

/// The number of files in the first request. It doubles each time for a program that follows the order of the
/// directory.
const FIRST: usize = 8;

/// Files whose extents were not requested yet, and the number of other files in the last request.
#[derive(Debug, Default)]
pub(crate) struct FilesAhead {
    /// Each file with its directory. The files after the last requested one are in front.
    files: VecDeque<(InodeNumber, InodeNumber)>,
    count: usize,
}

impl FilesAhead {
    fn add(&mut self, directory: InodeNumber, file: InodeNumber) {
        if self.files.len() >= FILES_MAX {
            self.files.pop_front();
        }
        self.files.push_back((directory, file));
    }

    /// Removes a file, and the files of its directory that a program is likely to read next; returns the latter.
    fn take_after(&mut self, file: InodeNumber) -> Vec<InodeNumber> {
        let Some(at) = self.files.iter().position(|(_, other)| *other == file) else {
            self.count = 0;
            return Vec::new();
        };
        let (directory, _) = self.files[at];
        let in_order = self.files.iter().take(at).all(|(other, _)| *other != directory);
        self.count = if in_order { (self.count * 2).clamp(FIRST, EXTENTS_AHEAD_MAX) } else { FIRST };
        self.files.rotate_left(at);
        self.files.pop_front();
        let mut taken = Vec::with_capacity(self.count);
        self.files.retain(|(other, next)| {
            let takes = *other == directory && taken.len() < self.count;
            if takes {
                taken.push(*next);
            }
            !takes
        });
        taken
    }
}

impl State {
    /// A lease on a file of this directory was granted together with the lease on an earlier entry.
    pub(crate) fn add_file_ahead(&mut self, directory: InodeNumber, inode: InodeNumber) {
        let Some(index) = self.nodes.find(inode) else { return };
        let node = self.nodes.get(index);
        if matches!(node.body, Body::File { .. }) && (1..=BYTES_MAX).contains(&node.item.size.get()) {
            self.files_ahead.add(directory, inode);
        }
    }

    /// Files that a program is likely to read after this one and whose extents are not cached, with their leases.
    pub(crate) fn files_after(&mut self, inode: InodeNumber) -> Vec<(InodeNumber, Held)> {
        let files = self.files_ahead.take_after(inode);
        let of = |inode| {
            let node = self.nodes.get(self.nodes.find(inode)?);
            let Body::File { extents, .. } = &node.body else { return None };
            let is_unknown = node.item.size.get() > 0 && extents.find(0).0 == Area::Unknown;
            node.lease.filter(|_| is_unknown).map(|lease| (inode, lease))
        };
        files.into_iter().filter_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ahead() -> FilesAhead {
        let mut ahead = FilesAhead::default();
        for file in 0..100 {
            ahead.add(InodeNumber::new(1), InodeNumber::new(100 + file));
            ahead.add(InodeNumber::new(2), InodeNumber::new(200 + file));
        }
        ahead
    }

    fn taken(ahead: &mut FilesAhead, file: u64) -> Vec<u64> {
        ahead.take_after(InodeNumber::new(file)).into_iter().map(InodeNumber::get).collect()
    }

    #[test]
    fn more_come_along_each_time_as_long_as_a_program_keeps_to_the_order() {
        let mut ahead = ahead();
        assert_eq!(taken(&mut ahead, 100), (101..109).collect::<Vec<_>>());
        assert_eq!(taken(&mut ahead, 109), (110..126).collect::<Vec<_>>());
        assert_eq!(taken(&mut ahead, 126), (127..159).collect::<Vec<_>>());
        assert_eq!(taken(&mut ahead, 126), [], "a file that is asked for again comes alone");
        assert_eq!(taken(&mut ahead, 159), (160..168).collect::<Vec<_>>());
    }

    #[test]
    fn a_program_with_an_order_of_its_own_gets_all_of_them_and_of_no_other_directory() {
        let mut ahead = ahead();
        assert_eq!(taken(&mut ahead, 150), (151..159).collect::<Vec<_>>());
        assert_eq!(taken(&mut ahead, 195), [196, 197, 198, 199, 100, 101, 102, 103]);
        assert_eq!(taken(&mut ahead, 120), (121..129).collect::<Vec<_>>());
        assert_eq!(taken(&mut ahead, 205).len(), FIRST);
        let mut calls = 4;
        for file in (100..200).rev() {
            calls += usize::from(!taken(&mut ahead, file).is_empty());
        }
        assert!(calls <= 12, "{calls} calls for 100 files");
        assert!(ahead.files.iter().all(|(directory, _)| directory.get() == 2));
    }

    #[test]
    fn few_are_remembered() {
        let mut ahead = FilesAhead::default();
        for file in 0..2 * FILES_MAX as u64 {
            ahead.add(InodeNumber::new(1), InodeNumber::new(file));
        }
        assert_eq!(ahead.files.len(), FILES_MAX);
        assert_eq!(taken(&mut ahead, 0), []);
    }
}
