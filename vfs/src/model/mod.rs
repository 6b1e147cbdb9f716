//! The model engine: a tree in memory under one lock. It is the reference of the tests: simple enough for a reader
//! to verify, compared with the kernel's own tmpfs call by call, and then with every other engine.
//!
//! Lock order: the only lock is held for the whole of each operation, and no operation waits under it. The clock is
//! read under it, so times never decrease if the clock does not.

mod contents;
mod engine;
mod names;

use crate::access::{self, Caller};
use crate::cache_leases::CacheLeases;
use crate::engine::{Access, Allocate, At, Attributes, Changes, Handle, Result, SetTime, Target, Written};
use crate::error::Error;
use crate::locks::LockTable;
use contents::Contents;
use format::record::{FILE_BYTES_MAX, FileType};
use format::{BLOCK_BYTES, InodeNumber};
use names::Entries;
use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A clock: nanoseconds since 1970.
pub type Clock = Arc<dyn Fn() -> i64 + Send + std::marker::Sync>;

/// Capacity of the model; tests make it tiny to provoke `NoSpace`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Blocks of all files together.
    pub blocks: u64,
    /// Inodes.
    pub inodes: u64,
    /// Open files.
    pub handles: usize,
    /// Locks of an inode, and lock requests.
    pub locks: usize,
    /// Names of one inode.
    pub links: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { blocks: 1 << 20, inodes: 1 << 20, handles: 1 << 16, locks: 1 << 16, links: 65_000 }
    }
}

/// Type-specific part of an inode.
#[derive(Clone, Debug)]
enum Body {
    File(Contents),
    Directory(Entries),
    Symlink(Vec<u8>),
    Special,
}

#[derive(Clone, Debug)]
struct Inode {
    attributes: Attributes,
    body: Body,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pins: u64,
    opens: u64,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    inode: InodeNumber,
    access: Access,
}

/// The whole state. A clone is independent of the original.
#[derive(Clone, Debug)]
struct TreeState {
    limits: Limits,
    inodes: BTreeMap<InodeNumber, Inode>,
    inode_last: InodeNumber,
    handles: BTreeMap<Handle, Open>,
    handle_last: u64,
    blocks_used: u64,
    locks: LockTable,
}

/// The model engine.
pub struct Model {
    clock: Clock,
    state: Mutex<TreeState>,
    leases: Option<Arc<dyn CacheLeases>>,
    /// Number of syncs.
    syncs: AtomicU64,
}

impl Clone for Model {
    fn clone(&self) -> Self {
        let state = Mutex::new(self.state().clone());
        Self { clock: self.clock.clone(), state, leases: self.leases.clone(), syncs: AtomicU64::new(0) }
    }
}

impl Model {
    /// Makes an empty tree whose root directory belongs to root, with mode 755.
    pub fn new(clock: Clock, limits: Limits) -> Self {
        let attributes = Attributes {
            inode: InodeNumber::ROOT,
            file_type: FileType::Directory,
            mode: 0o755,
            uid: 0,
            gid: 0,
            links: 2,
            size: 0,
            blocks: 0,
            rdev: 0,
            atime_ns: clock(),
            mtime_ns: clock(),
            ctime_ns: clock(),
            btime_ns: clock(),
            parent: InodeNumber::ROOT,
        };
        let root = Inode {
            attributes,
            body: Body::Directory(Entries::default()),
            xattrs: BTreeMap::new(),
            pins: 0,
            opens: 0,
        };
        let state = TreeState {
            limits,
            inodes: BTreeMap::from([(InodeNumber::ROOT, root)]),
            inode_last: InodeNumber::ROOT,
            handles: BTreeMap::new(),
            handle_last: 0,
            blocks_used: 0,
            locks: LockTable::new(limits.locks),
        };
        Self { clock, state: Mutex::new(state), leases: None, syncs: AtomicU64::new(0) }
    }

    /// The same model with leases to give for a cache outside of it, which are the caller's to decide about.
    #[must_use]
    pub fn with_leases(self, leases: Arc<dyn CacheLeases>) -> Self {
        Self { leases: Some(leases), ..self }
    }

    /// Number of syncs.
    pub fn syncs(&self) -> u64 {
        self.syncs.load(Ordering::SeqCst)
    }

    fn state(&self) -> MutexGuard<'_, TreeState> {
        // A panic in a test's thread leaves the state as far as its operation came.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> i64 {
        (self.clock)()
    }
}

impl TreeState {
    /// An inode that the caller has pinned.
    fn pinned(&mut self, number: InodeNumber) -> Result<&mut Inode> {
        match self.inodes.get_mut(&number) {
            Some(inode) if inode.pins > 0 => Ok(inode),
            _ => Err(Error::Stale),
        }
    }

    /// An inode that something in the tree refers to.
    fn inode(&mut self, number: InodeNumber) -> &mut Inode {
        self.inodes.get_mut(&number).expect("an inode lives as long as a name, a pin or an open file")
    }

    fn attributes(&self, number: InodeNumber) -> Attributes {
        self.inodes.get(&number).expect("an inode lives as long as a name, a pin or an open file").attributes
    }

    fn pin(&mut self, number: InodeNumber) -> Attributes {
        let inode = self.inode(number);
        inode.pins += 1;
        inode.attributes
    }

    fn opened(&self, handle: Handle) -> Result<Open> {
        self.handles.get(&handle).copied().ok_or(Error::BadDescriptor)
    }

    fn open(&mut self, inode: InodeNumber, access: Access) -> Result<Handle> {
        if self.handles.len() >= self.limits.handles {
            return Err(Error::TooManyFiles);
        }
        self.handle_last += 1;
        let handle = Handle::new(self.handle_last);
        self.inode(inode).opens += 1;
        self.handles.insert(handle, Open { inode, access });
        Ok(handle)
    }

    /// Frees an inode that is no longer referred to.
    fn drop_if_unused(&mut self, number: InodeNumber) {
        let Some(inode) = self.inodes.get(&number) else { return };
        if inode.attributes.links == 0 && inode.pins == 0 && inode.opens == 0 {
            if let Body::File(contents) = &inode.body {
                self.blocks_used -= contents.block_count();
            }
            self.inodes.remove(&number);
        }
    }

    /// The inode of an open file, for a change of its contents.
    fn writable(&mut self, handle: Handle) -> Result<InodeNumber> {
        let open = self.opened(handle)?;
        if open.access.write { Ok(open.inode) } else { Err(Error::BadDescriptor) }
    }

    /// Changes the contents of a file and updates the count of blocks.
    fn change_contents<T>(
        &mut self,
        number: InodeNumber,
        change: impl FnOnce(&mut Contents, &mut u64) -> T,
    ) -> T {
        let inode = self.inode(number);
        let Body::File(contents) = &mut inode.body else { unreachable!("only files are opened for writing") };
        let before = contents.block_count();
        let result = change(contents, &mut inode.attributes.size);
        let after = contents.block_count();
        inode.attributes.blocks = after * (BLOCK_BYTES as u64 / 512);
        self.blocks_used = self.blocks_used - before + after;
        result
    }

    fn set_size(&mut self, number: InodeNumber, new_size: u64) {
        self.change_contents(number, |contents, size| {
            // Blocks that are reserved beyond the end do not stay, also if the size does.
            if new_size <= *size {
                contents.truncate(new_size);
            }
            *size = new_size;
        });
    }

    /// Number of bytes, of those requested, for which there is space: all, or up to the border of a block.
    fn room(&self, number: InodeNumber, offset: u64, bytes: u64) -> u64 {
        let Some(Inode { body: Body::File(contents), .. }) = self.inodes.get(&number) else { return 0 };
        let free = self.limits.blocks - self.blocks_used;
        if contents.blocks_missing(offset, bytes) <= free {
            return bytes;
        }
        let block = BLOCK_BYTES as u64;
        let (mut fits, mut step) = (0, block - offset % block);
        while fits + step <= bytes && contents.blocks_missing(offset, fits + step) <= free {
            fits += step;
            step = block;
        }
        fits
    }

    fn after_write(&mut self, caller: &Caller, number: InodeNumber, now: i64) {
        let attributes = &mut self.inode(number).attributes;
        attributes.mode = access::after_write(caller, attributes);
        attributes.mtime_ns = now;
        attributes.ctime_ns = now;
    }

    fn setattr(
        &mut self,
        caller: &Caller,
        target: Target,
        changes: &Changes,
        now: i64,
    ) -> Result<Attributes> {
        let (number, may_write) = match target {
            Target::Node(number) => (self.pinned(number)?.attributes.inode, false),
            Target::Open(handle) => {
                let open = self.opened(handle)?;
                if changes.size.is_some() && !open.access.write {
                    return Err(Error::BadDescriptor);
                }
                (open.inode, true)
            }
        };
        let old = self.attributes(number);
        let mode = access::change(caller, &old, changes, may_write)?;
        if let Some(size) = changes.size {
            if size > FILE_BYTES_MAX {
                return Err(Error::FileTooBig);
            }
            self.set_size(number, size);
        }
        let at = |time| match time {
            SetTime::Now => now,
            SetTime::To(time) => time,
        };
        let new = &mut self.inode(number).attributes;
        new.mode = mode;
        new.uid = changes.uid.unwrap_or(old.uid);
        new.gid = changes.gid.unwrap_or(old.gid);
        new.atime_ns = changes.atime.map_or(old.atime_ns, at);
        new.mtime_ns = match changes.mtime {
            Some(time) => at(time),
            None if changes.size.is_some() => now,
            None => old.mtime_ns,
        };
        new.ctime_ns = now;
        Ok(*new)
    }

    fn write(
        &mut self,
        caller: &Caller,
        handle: Handle,
        at: At,
        from: &[IoSlice<'_>],
        now: i64,
    ) -> Result<Written> {
        let number = self.writable(handle)?;
        let size = self.attributes(number).size;
        let start = match at {
            At::Offset(offset) | At::Within(offset) => offset,
            At::End => size,
        };
        let all: u64 = from.iter().map(|slice| slice.len() as u64).sum();
        let asked = if let At::Within(_) = at { all.min(size.saturating_sub(start)) } else { all };
        if asked == 0 {
            return Ok(Written { bytes: 0, end: start });
        }
        if start >= FILE_BYTES_MAX {
            return Err(Error::FileTooBig);
        }
        let bytes = self.room(number, start, asked.min(FILE_BYTES_MAX - start));
        if bytes == 0 {
            return Err(Error::NoSpace);
        }
        let end = start + bytes;
        self.change_contents(number, |contents, size| {
            let mut offset = start;
            for slice in from {
                let count = (slice.len() as u64).min(end - offset) as usize;
                contents.write(offset, &slice[..count]);
                offset += count as u64;
            }
            *size = end.max(*size);
        });
        self.after_write(caller, number, now);
        Ok(Written { bytes: bytes as usize, end })
    }

    fn allocate(&mut self, handle: Handle, what: Allocate, offset: u64, bytes: u64) -> Result<InodeNumber> {
        let number = self.writable(handle)?;
        let reserves = what != Allocate::PunchHole;
        if reserves {
            let Body::File(contents) = &self.inode(number).body else { return Err(Error::NoDevice) };
            if contents.blocks_missing(offset, bytes) > self.limits.blocks - self.blocks_used {
                return Err(Error::NoSpace);
            }
        }
        self.change_contents(number, |contents, size| {
            match what {
                Allocate::PunchHole => contents.punch(offset, bytes),
                _ => contents.reserve(offset, bytes),
            }
            if what == Allocate::Extend {
                *size = (offset + bytes).max(*size);
            }
        });
        Ok(number)
    }

    fn read(&self, handle: Handle, offset: u64, into: &mut [IoSliceMut<'_>]) -> Result<usize> {
        let open = self.opened(handle)?;
        if !open.access.read {
            return Err(Error::BadDescriptor);
        }
        let inode = &self.inodes[&open.inode];
        let Body::File(contents) = &inode.body else { return Err(Error::IsDirectory) };
        let mut at = offset;
        for slice in into {
            let left = inode.attributes.size.saturating_sub(at);
            let count = (slice.len() as u64).min(left) as usize;
            contents.read(at, &mut slice[..count]);
            at += count as u64;
        }
        Ok((at - offset) as usize)
    }
}
