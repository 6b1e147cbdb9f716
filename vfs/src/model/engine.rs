//! The model's implementation of `Engine`: each operation takes the lock and calls the state.

use super::{Body, Model};
use crate::access::{self, Caller};
use crate::cache_leases::CacheLeases;
use crate::engine::{
    Access, Allocate, At, Attributes, Changes, Created, Engine, Entry, Extent, Handle, Lock, LockFamily,
    LockOwner, Locked, New, NewUnnamed, Removal, RenameMode, Result, SetXattr, Space, Step, Sync, Target,
    Ticket, Written,
};
use crate::error::Error;
use format::{BLOCK_BYTES, Cookie, InodeNumber, Name};
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::Ordering;
use std::task::Waker;

impl Engine for Model {
    fn root(&self) -> Result<Attributes> {
        Ok(self.state().pin(InodeNumber::ROOT))
    }

    fn walk(
        &self,
        caller: &Caller,
        start: InodeNumber,
        steps: &[Step<'_>],
        found: &mut Vec<Attributes>,
    ) -> Result<()> {
        self.state().walk(caller, start, steps, found)
    }

    fn forget(&self, nodes: &[InodeNumber]) {
        let mut state = self.state();
        for number in nodes {
            let inode = state.pinned(*number).expect("only what is pinned is forgotten");
            inode.pins -= 1;
            state.drop_if_unused(*number);
        }
    }

    fn open(
        &self,
        caller: &Caller,
        node: InodeNumber,
        access: Access,
        truncate: bool,
    ) -> Result<(Handle, Attributes)> {
        let mut state = self.state();
        let attributes = state.pinned(node)?.attributes;
        access::open(caller, &attributes, access, truncate)?;
        let handle = state.open(node, access)?;
        if truncate {
            state.set_size(node, 0);
            state.after_write(caller, node, self.now());
        }
        Ok((handle, state.attributes(node)))
    }

    fn close(&self, handle: Handle) {
        let mut state = self.state();
        let open = state.handles.remove(&handle).expect("only what is open is closed");
        state.inode(open.inode).opens -= 1;
        state.drop_if_unused(open.inode);
    }

    fn getattr(&self, target: Target) -> Result<Attributes> {
        let mut state = self.state();
        match target {
            Target::Node(number) => Ok(state.pinned(number)?.attributes),
            Target::Open(handle) => {
                let open = state.opened(handle)?;
                Ok(state.attributes(open.inode))
            }
        }
    }

    fn setattr(&self, caller: &Caller, target: Target, changes: &Changes) -> Result<Attributes> {
        let mut state = self.state();
        state.setattr(caller, target, changes, self.now())
    }

    fn create(&self, caller: &Caller, parent: InodeNumber, name: Name<'_>, new: &New<'_>) -> Result<Created> {
        let mut state = self.state();
        state.create(caller, parent, name, new, self.now())
    }

    fn create_unnamed(
        &self,
        caller: &Caller,
        parent: InodeNumber,
        new: &NewUnnamed,
    ) -> Result<(Attributes, Handle)> {
        let mut state = self.state();
        state.create_unnamed(caller, parent, new, self.now())
    }

    fn link(
        &self,
        caller: &Caller,
        node: InodeNumber,
        parent: InodeNumber,
        name: Name<'_>,
    ) -> Result<Attributes> {
        let mut state = self.state();
        state.link(caller, node, parent, name, self.now())
    }

    fn unlink(&self, caller: &Caller, parent: InodeNumber, name: Name<'_>, removal: Removal) -> Result<()> {
        let mut state = self.state();
        state.unlink(caller, parent, name, removal, self.now())
    }

    fn rename(
        &self,
        caller: &Caller,
        from: (InodeNumber, Name<'_>),
        to: (InodeNumber, Name<'_>),
        mode: RenameMode,
    ) -> Result<()> {
        let mut state = self.state();
        state.rename(caller, from, to, mode, self.now())
    }

    fn readlink(&self, node: InodeNumber) -> Result<Vec<u8>> {
        match &self.state().pinned(node)?.body {
            Body::Symlink(target) => Ok(target.clone()),
            _ => Err(Error::Invalid),
        }
    }

    fn read(&self, handle: Handle, offset: u64, into: &mut [IoSliceMut<'_>]) -> Result<usize> {
        self.state().read(handle, offset, into)
    }

    fn write(&self, caller: &Caller, handle: Handle, at: At, from: &[IoSlice<'_>]) -> Result<Written> {
        let mut state = self.state();
        state.write(caller, handle, at, from, self.now())
    }

    fn allocate(
        &self,
        caller: &Caller,
        handle: Handle,
        what: Allocate,
        offset: u64,
        bytes: u64,
    ) -> Result<()> {
        let mut state = self.state();
        let number = state.allocate(handle, what, offset, bytes)?;
        state.after_write(caller, number, self.now());
        Ok(())
    }

    fn extents(&self, handle: Handle, offset: u64, what: Extent) -> Result<u64> {
        let mut state = self.state();
        let open = state.opened(handle)?;
        let inode = state.inode(open.inode);
        let Body::File(contents) = &inode.body else { return Err(Error::NoDevice) };
        contents.extent(offset, inode.attributes.size, what).ok_or(Error::NoDevice)
    }

    fn readdir(
        &self,
        handle: Handle,
        after: Option<Cookie>,
        sink: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Result<()> {
        self.state().readdir(handle, after, sink)
    }

    fn statfs(&self) -> Result<Space> {
        let state = self.state();
        let blocks_free = state.limits.blocks - state.blocks_used;
        Ok(Space {
            block_bytes: BLOCK_BYTES as u64,
            blocks: state.limits.blocks,
            blocks_free,
            blocks_available: blocks_free,
            inodes: state.limits.inodes,
            inodes_free: state.limits.inodes - state.inodes.len() as u64,
            id: 0,
        })
    }

    fn sync(&self, what: Sync) -> Result<()> {
        match what {
            Sync::Data(node) | Sync::File(node) => self.state().pinned(node).map(|_| ())?,
            Sync::Everything | Sync::EverythingUntold | Sync::Process | Sync::Own | Sync::OwnBeside(_) => {}
        }
        self.syncs.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn get_xattr(&self, caller: &Caller, node: InodeNumber, name: &[u8]) -> Result<Vec<u8>> {
        let mut state = self.state();
        let inode = state.pinned(node)?;
        access::read_xattr(caller, &inode.attributes, name)?;
        inode.xattrs.get(name).cloned().ok_or(Error::NoData)
    }

    fn set_xattr(
        &self,
        caller: &Caller,
        node: InodeNumber,
        name: &[u8],
        value: &[u8],
        how: SetXattr,
    ) -> Result<()> {
        let mut state = self.state();
        let inode = state.pinned(node)?;
        access::write_xattr(caller, &inode.attributes, name)?;
        how.check(inode.xattrs.contains_key(name))?;
        inode.xattrs.insert(name.to_vec(), value.to_vec());
        inode.attributes.ctime_ns = self.now();
        Ok(())
    }

    fn list_xattrs(&self, caller: &Caller, node: InodeNumber) -> Result<Vec<u8>> {
        let mut state = self.state();
        let names = state.pinned(node)?.xattrs.keys().filter(|name| access::lists_xattr(caller, name));
        Ok(names.flat_map(|name| name.iter().chain(&[0])).copied().collect())
    }

    fn remove_xattr(&self, caller: &Caller, node: InodeNumber, name: &[u8]) -> Result<()> {
        let mut state = self.state();
        let inode = state.pinned(node)?;
        access::write_xattr(caller, &inode.attributes, name)?;
        inode.xattrs.remove(name).ok_or(Error::NoData)?;
        inode.attributes.ctime_ns = self.now();
        Ok(())
    }

    fn lock(&self, handle: Handle, owner: LockOwner, lock: Lock, waker: Option<&Waker>) -> Result<Locked> {
        let mut state = self.state();
        let inode = state.opened(handle)?.inode;
        state.locks.lock(inode, owner, lock, waker)
    }

    fn redeem(&self, ticket: Ticket) -> Result<Locked> {
        self.state().locks.redeem(ticket)
    }

    fn cancel(&self, ticket: Ticket) -> bool {
        self.state().locks.cancel(ticket)
    }

    fn unlock(
        &self,
        handle: Handle,
        owner: LockOwner,
        family: LockFamily,
        first: u64,
        last: u64,
    ) -> Result<()> {
        let mut state = self.state();
        let inode = state.opened(handle)?.inode;
        state.locks.unlock(inode, owner, family, first, last)
    }

    fn conflict(&self, handle: Handle, owner: LockOwner, lock: Lock) -> Result<Option<(Lock, LockOwner)>> {
        let state = self.state();
        let inode = state.opened(handle)?.inode;
        Ok(state.locks.conflict(inode, owner, lock))
    }

    fn release(&self, owner: LockOwner, node: Option<InodeNumber>) {
        self.state().locks.release(owner, node);
    }

    fn cache_leases(&self) -> Option<&dyn CacheLeases> {
        self.leases.as_deref()
    }
}
