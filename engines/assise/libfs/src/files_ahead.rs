//! Small files that a program is likely to read next, so that LibFS requests the extents of several files in one call:
//! files whose leases were granted ahead, in the order of their directory, and files that the program itself created
//! and whose records were digested since, in the order of their numbers.
//!
//! This is only a hint; an answer is used only under the lease under which the request was made.

use crate::extents::Area;
use crate::nodes::{Body, Node};
use crate::state::State;
use crate::words::GrantedLease;
use format::call::EXTENTS_AHEAD_MAX;
use format::{BLOCK_BYTES, InodeNumber};
use std::collections::VecDeque;

/// Limit of remembered files.
const FILES_MAX: usize = 1024;

/// The extents of a larger file are requested separately, because the daemon verifies the checksums of all of its
/// blocks.
const BLOCKS_MAX: u64 = 16;

/// Limit of the blocks of a request, per file: of many files that are larger than this, fewer are requested.
const BLOCKS_EACH: u64 = 4;

/// The number of files in the first request. It doubles each time for a program that follows the order of the
/// directory.
const FIRST: usize = 8;

/// How far the number of a file may be from the one that is read, for its extents to be requested too.
const NEIGHBOURS: u64 = 64;

/// A file whose extents were not requested yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileAhead {
    directory: InodeNumber,
    inode: InodeNumber,
    blocks: u64,
}

/// The numbers of files and blocks that a request may still include.
#[derive(Debug)]
struct Budget {
    files: usize,
    blocks: u64,
}

impl Budget {
    fn of(files: usize) -> Self {
        Self { files, blocks: files as u64 * BLOCKS_EACH }
    }

    /// Whether a file with so many blocks is still included; counts it if so.
    fn takes(&mut self, blocks: u64) -> bool {
        let takes = self.files > 0 && blocks <= self.blocks;
        if takes {
            (self.files, self.blocks) = (self.files - 1, self.blocks - blocks);
        }
        takes
    }
}

/// Files whose extents were not requested yet, and the number of other files in the last request.
#[derive(Debug, Default)]
pub(crate) struct FilesAhead {
    /// The files after the last requested one are in front.
    files: VecDeque<FileAhead>,
    count: usize,
}

impl FilesAhead {
    fn add(&mut self, file: FileAhead) {
        if self.files.len() >= FILES_MAX {
            self.files.pop_front();
        }
        self.files.push_back(file);
    }

    /// Removes a file, and the files of its directory that a program is likely to read next; returns the latter. None
    /// if the file is not in the list.
    fn take_after(&mut self, inode: InodeNumber) -> Option<Vec<InodeNumber>> {
        let Some(at) = self.files.iter().position(|file| file.inode == inode) else {
            self.count = 0;
            return None;
        };
        let directory = self.files[at].directory;
        let in_order = self.files.iter().take(at).all(|file| file.directory != directory);
        self.count = if in_order { (self.count * 2).clamp(FIRST, EXTENTS_AHEAD_MAX) } else { FIRST };
        self.files.rotate_left(at);
        self.files.pop_front();
        let mut budget = Budget::of(self.count);
        let mut taken = Vec::with_capacity(self.count);
        self.files.retain(|file| {
            let takes = file.directory == directory && budget.takes(file.blocks);
            if takes {
                taken.push(file.inode);
            }
            !takes
        });
        Some(taken)
    }
}

/// The number of blocks of a small file that has contents.
fn blocks_of(node: &Node) -> Option<u64> {
    let blocks = node.item.size.get().div_ceil(BLOCK_BYTES as u64);
    (matches!(node.body, Body::File { .. }) && (1..=BLOCKS_MAX).contains(&blocks)).then_some(blocks)
}

/// The lease of a small file whose extents are not cached.
fn lease_to_ask(node: &Node) -> Option<GrantedLease> {
    let Body::File { overlay, extents } = &node.body else { return None };
    let is_unknown = overlay.is_empty() && extents.find(0).0 == Area::Unknown;
    node.lease.filter(|_| is_unknown)
}

impl State {
    /// A lease on a file of this directory was granted together with the lease on an earlier entry.
    pub(crate) fn add_file_ahead(&mut self, directory: InodeNumber, inode: InodeNumber) {
        let Some(index) = self.nodes.find(inode) else { return };
        if let Some(blocks) = blocks_of(self.nodes.get(index)) {
            self.files_ahead.add(FileAhead { directory, inode, blocks });
        }
    }

    /// Files that a program is likely to read after this one and whose extents are not cached, with their leases.
    pub(crate) fn files_after(&mut self, inode: InodeNumber) -> Vec<(InodeNumber, GrantedLease)> {
        let Some(files) = self.files_ahead.take_after(inode) else { return self.neighbours_of(inode) };
        let of = |inode| Some((inode, lease_to_ask(self.nodes.get(self.nodes.find(inode)?))?));
        files.into_iter().filter_map(of).collect()
    }

    /// The files next to a small one by number, the following ones first. A program numbers the files that it creates one
    /// after the other.
    fn neighbours_of(&self, inode: InodeNumber) -> Vec<(InodeNumber, GrantedLease)> {
        let is_small = self.nodes.find(inode).is_some_and(|index| blocks_of(self.nodes.get(index)).is_some());
        if !is_small {
            return Vec::new();
        }
        let number = inode.get();
        let numbers = (1..=NEIGHBOURS)
            .map(|far| number.checked_add(far))
            .chain((1..=NEIGHBOURS).map(|far| number.checked_sub(far)));
        let mut budget = Budget::of(FIRST);
        let of = |inode| {
            let node = self.nodes.get(self.nodes.find(inode)?);
            let (blocks, lease) = (blocks_of(node)?, lease_to_ask(node)?);
            budget.takes(blocks).then_some((inode, lease))
        };
        numbers.flatten().map(InodeNumber::new).filter_map(of).take(FIRST).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(directory: u64, inode: u64) -> FileAhead {
        FileAhead { directory: InodeNumber::new(directory), inode: InodeNumber::new(inode), blocks: 1 }
    }

    fn ahead() -> FilesAhead {
        let mut ahead = FilesAhead::default();
        for file in 0..100 {
            ahead.add(small(1, 100 + file));
            ahead.add(small(2, 200 + file));
        }
        ahead
    }

    fn taken(ahead: &mut FilesAhead, file: u64) -> Vec<u64> {
        let taken = ahead.take_after(InodeNumber::new(file)).unwrap_or_default();
        taken.into_iter().map(InodeNumber::get).collect()
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
        assert!(ahead.files.iter().all(|file| file.directory.get() == 2));
    }

    #[test]
    fn few_are_remembered() {
        let mut ahead = FilesAhead::default();
        for file in 0..2 * FILES_MAX as u64 {
            ahead.add(small(1, file));
        }
        assert_eq!(ahead.files.len(), FILES_MAX);
        assert_eq!(taken(&mut ahead, 0), []);
    }

    #[test]
    fn of_larger_files_fewer_come_along() {
        let mut ahead = FilesAhead::default();
        for file in 0..20 {
            ahead.add(FileAhead { blocks: 1 + file % 2 * 15, ..small(1, 100 + file) });
        }
        // 1 + 16 + 1 blocks of the files after the first; no other file of 16 blocks fits into 32.
        assert_eq!(taken(&mut ahead, 100), [101, 102, 104, 106, 108, 110, 112, 114]);
        assert_eq!(taken(&mut ahead, 103), [105, 107, 109, 111], "twice as many blocks");
    }
}
