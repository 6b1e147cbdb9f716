//! Open files of the kernel, and their locks.
//!
//! `fcntl` locks belong to an owner in the kernel's sense (a process's table of descriptors, or one open file for
//! `F_OFD_*`; a request does not distinguish them) and end when that owner closes any descriptor of the file. `flock`
//! locks belong to the open file and end with it. The kernel does not keep track of either for the gateway.

use format::InodeNumber;
use ipc::{Host, Lock};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use vfs::Caller;
use vfs::engine::{Handle, LockOwner};

/// An open file or directory.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) handle: Handle,
    pub(crate) inode: InodeNumber,
    pub(crate) opener: Caller,
    /// The file is counted as one that may write.
    pub(crate) is_writer: bool,
}

/// An owner of `fcntl` locks on one inode.
struct Holder {
    /// The first process that requested a lock for this owner.
    pid: u32,
    /// Open files through which the owner requested locks since it last closed a descriptor.
    through: BTreeSet<Handle>,
}

#[derive(Default)]
struct FilesState {
    files: BTreeMap<u64, Arc<OpenFile>>,
    of_inodes: BTreeSet<(InodeNumber, u64)>,
    holders: BTreeMap<(InodeNumber, u64), Holder>,
    flocked: BTreeSet<Handle>,
}

pub(crate) struct Files {
    state: Lock<FilesState>,
}

impl Files {
    pub(crate) fn new(host: Arc<dyn Host>) -> Self {
        Self { state: Lock::new(host, FilesState::default()) }
    }

    pub(crate) fn add(&self, file: OpenFile) {
        let mut state = self.state.lock();
        state.of_inodes.insert((file.inode, file.handle.get()));
        state.files.insert(file.handle.get(), Arc::new(file));
    }

    /// The open file with this number.
    ///
    /// # Errors
    /// `BadDescriptor`.
    pub(crate) fn get(&self, number: u64) -> Result<Arc<OpenFile>, vfs::Error> {
        self.state.lock().files.get(&number).cloned().ok_or(vfs::Error::BadDescriptor)
    }

    /// One of the open files of an inode.
    pub(crate) fn any_of(&self, inode: InodeNumber) -> Option<Arc<OpenFile>> {
        let state = self.state.lock();
        let (_, number) = state.of_inodes.range((inode, 0)..=(inode, u64::MAX)).next()?;
        state.files.get(number).cloned()
    }

    /// Removes an open file, and returns the owners whose locks end with it.
    ///
    /// # Errors
    /// `BadDescriptor`.
    pub(crate) fn remove(&self, number: u64) -> Result<(Arc<OpenFile>, Vec<LockOwner>), vfs::Error> {
        let mut state = self.state.lock();
        let file = state.files.remove(&number).ok_or(vfs::Error::BadDescriptor)?;
        state.of_inodes.remove(&(file.inode, number));
        let mut owners = Vec::new();
        if state.flocked.remove(&file.handle) {
            owners.push(LockOwner::Description(number));
        }
        // A process that locked through this file has closed its descriptor before, and its owner was removed then. An
        // owner that is left is the file itself.
        let range = (file.inode, 0)..=(file.inode, u64::MAX);
        let through = |holder: &Holder| holder.through.contains(&file.handle);
        let ended = state.holders.range(range).filter(|(_, holder)| through(holder));
        let ended: Vec<_> = ended.map(|(key, holder)| (*key, holder.pid)).collect();
        for (key, pid) in ended {
            state.holders.remove(&key);
            owners.push(LockOwner::Process { id: key.1, pid });
        }
        Ok((file, owners))
    }

    /// The owner of a `flock` lock.
    pub(crate) fn flock_owner(&self, file: &OpenFile, locks: bool) -> LockOwner {
        if locks {
            self.state.lock().flocked.insert(file.handle);
        }
        LockOwner::Description(file.handle.get())
    }

    /// The owner of `fcntl` locks; with `locks` the owner is remembered as one that may have some.
    pub(crate) fn range_owner(&self, file: &OpenFile, owner: u64, pid: u32, locks: bool) -> LockOwner {
        let mut state = self.state.lock();
        let key = (file.inode, owner);
        if !locks {
            let pid = state.holders.get(&key).map_or(pid, |holder| holder.pid);
            return LockOwner::Process { id: owner, pid };
        }
        let holder = state.holders.entry(key).or_insert(Holder { pid, through: BTreeSet::new() });
        holder.through.insert(file.handle);
        LockOwner::Process { id: owner, pid: holder.pid }
    }

    /// An owner closed a descriptor of the file; returns the owner if it may have locks on the file.
    pub(crate) fn closed_by(&self, file: &OpenFile, owner: u64) -> Option<LockOwner> {
        let holder = self.state.lock().holders.remove(&(file.inode, owner))?;
        Some(LockOwner::Process { id: owner, pid: holder.pid })
    }

    /// The numbers of all open files.
    pub(crate) fn numbers(&self) -> Vec<u64> {
        self.state.lock().files.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipc::SystemHost;

    fn files() -> Files {
        let files = Files::new(Arc::new(SystemHost));
        for number in [5, 6] {
            let (handle, inode) = (Handle::new(number), InodeNumber::new(9));
            files.add(OpenFile { handle, inode, opener: Caller::ROOT, is_writer: false });
        }
        files
    }

    #[test]
    fn locks_of_the_file_itself_end_with_it() {
        let files = files();
        let file = files.get(5).unwrap();
        assert_eq!(files.flock_owner(&file, true), LockOwner::Description(5));
        assert_eq!(files.range_owner(&file, 77, 1, true), LockOwner::Process { id: 77, pid: 1 });
        let (_, ended) = files.remove(5).unwrap();
        assert_eq!(ended, [LockOwner::Description(5), LockOwner::Process { id: 77, pid: 1 }]);
        assert_eq!(files.remove(5).unwrap_err(), vfs::Error::BadDescriptor);
    }

    #[test]
    fn a_process_that_closed_one_file_keeps_later_locks_through_another() {
        let files = files();
        let (one, other) = (files.get(5).unwrap(), files.get(6).unwrap());
        let any = || files.any_of(one.inode).map(|file| file.handle.get());
        assert_eq!((any(), files.any_of(InodeNumber::new(8)).is_none()), (Some(5), true));
        files.range_owner(&one, 77, 1, true);
        assert_eq!(files.closed_by(&one, 77), Some(LockOwner::Process { id: 77, pid: 1 }));
        assert_eq!(files.closed_by(&one, 77), None);
        files.range_owner(&other, 77, 2, true);
        assert_eq!(files.remove(5).unwrap().1, []);
        assert_eq!(any(), Some(6));
        assert_eq!(files.range_owner(&other, 77, 3, false), LockOwner::Process { id: 77, pid: 2 });
    }
}
