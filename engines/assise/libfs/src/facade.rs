//! `vfs::Engine` for [`LibFs`]: each operation is an attempt (see `engine`) or a call.

use crate::calls::error_of;
use crate::directory::Target as EntryTarget;
use crate::engine::LibFs;
use crate::need::{Need, Step};
use crate::nodes::Body;
use crate::state::State;
use crate::write::bytes_of;
use format::call::{CallKind, DigestRequest, LEASE_READ, LEASE_WRITE, StatfsResponse, Status};
use format::pass::PassName;
use format::session::SyncRequest;
use format::{BLOCK_BYTES, Cookie, InodeNumber, Name};
use pmem::Counters;
use std::io::{IoSlice, IoSliceMut};
use std::task::Waker;
use vfs::access;
use vfs::engine::{
    Access, Allocate, At, Attributes, Changes, Created, Engine, Entry, Extent, Handle, Lock, LockFamily,
    LockOwner, Locked, New, NewUnnamed, Removal, RenameMode, SetXattr, Space, Step as WalkStep, Sync, Target,
    Ticket, Written,
};
use vfs::{CacheLeases, Caller, Error, engine::Result};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

/// Entries that one attempt lists.
const LIST_BATCH: usize = 128;

impl State {
    fn open(
        &mut self,
        caller: &Caller,
        node: InodeNumber,
        access: Access,
        truncate: bool,
    ) -> Step<(Handle, Attributes)> {
        if access.write || truncate {
            // The records of the open file will be written in the session's name.
            self.acts_as(caller)?;
        }
        let index = self.pinned(node)?;
        self.hold(index, LEASE_READ)?;
        access::open(caller, &self.attributes(index), access, truncate)?;
        self.check_files()?;
        if self.is_given_back(node) {
            return Err(Need::GivenBack(node).into());
        }
        if self.needs_reference(index, access.write || truncate)? {
            let bits = u8::from(access.read) | u8::from(access.write || truncate) << 1;
            return Err(Need::Open(node, bits, None).into());
        }
        if truncate {
            self.hold(index, LEASE_WRITE)?;
            access::open(caller, &self.attributes(index), access, truncate)?;
        }
        let handle = self.add_file(index, access);
        // Only after the open table contains the file: a session that removes the last name then either sees that the
        // file is open, or has already ended this session's lease.
        let done = if truncate { self.truncate(caller, index, 0) } else { self.validate() };
        if let Err(stop) = done {
            self.remove_file(handle);
            return Err(if truncate { stop } else { Need::Again.into() });
        }
        // `append` clears `taken`, but the file belongs to this attempt.
        self.taken.0 = Some(handle);
        Ok((handle, self.attributes(index)))
    }
}

impl Engine for LibFs {
    fn root(&self) -> Result<Attributes> {
        self.run(|state| {
            let index = state.nodes.enter(InodeNumber::ROOT);
            state.hold(index, LEASE_READ)?;
            Ok(state.pin(index))
        })
    }

    fn walk(
        &self,
        caller: &Caller,
        start: InodeNumber,
        steps: &[WalkStep<'_>],
        found: &mut Vec<Attributes>,
    ) -> Result<()> {
        let ended = self.run(|state| {
            let (met, ended) = state.walk(caller, start, steps)?;
            if let Some(last) = met.last() {
                state.know_blocks(*last)?;
            }
            for index in met {
                let attributes = state.pin(index);
                found.push(attributes);
            }
            Ok(ended)
        })?;
        ended.map_or(Ok(()), Err)
    }

    fn forget(&self, nodes: &[InodeNumber]) {
        let (give_back, unlisted) = {
            let mut state = self.state();
            for inode in nodes {
                let Some(index) = state.nodes.find(*inode) else {
                    state.nodes.unpin_apart(*inode);
                    continue;
                };
                let node = state.nodes.get_mut(index);
                node.pins = node.pins.saturating_sub(1);
                state.drop_if_unused(index);
            }
            state.ready_releases()
        };
        self.close_calls(&give_back);
        if unlisted {
            self.release_closed();
        }
    }

    fn open(
        &self,
        caller: &Caller,
        node: InodeNumber,
        access: Access,
        truncate: bool,
    ) -> Result<(Handle, Attributes)> {
        self.run(|state| state.open(caller, node, access, truncate))
    }

    fn open_passed(&self, pass: &PassName, access: Access) -> Result<(Handle, Attributes)> {
        self.adopt_by(pass.inode, access, Some(pass.token))
    }

    fn close(&self, handle: Handle) {
        let (give_back, unlisted) = {
            let mut state = self.state();
            let Some(index) = state.remove_file(handle) else { return };
            state.drop_if_unused(index);
            state.ready_releases()
        };
        self.close_calls(&give_back);
        if unlisted {
            self.release_closed();
        }
    }

    fn getattr(&self, target: Target) -> Result<Attributes> {
        self.run(|state| state.getattr(target))
    }

    fn setattr(&self, caller: &Caller, target: Target, changes: &Changes) -> Result<Attributes> {
        self.run(|state| state.setattr(caller, target, changes))
    }

    fn create(&self, caller: &Caller, parent: InodeNumber, name: Name<'_>, new: &New<'_>) -> Result<Created> {
        self.run(|state| state.create(caller, parent, name, new))
    }

    fn create_unnamed(
        &self,
        caller: &Caller,
        parent: InodeNumber,
        new: &NewUnnamed,
    ) -> Result<(Attributes, Handle)> {
        self.run(|state| state.create_unnamed(caller, parent, new))
    }

    fn link(
        &self,
        caller: &Caller,
        node: InodeNumber,
        parent: InodeNumber,
        name: Name<'_>,
    ) -> Result<Attributes> {
        self.run(|state| state.link(caller, node, parent, name))
    }

    fn unlink(&self, caller: &Caller, parent: InodeNumber, name: Name<'_>, removal: Removal) -> Result<()> {
        self.run(|state| state.unlink(caller, parent, name, removal))
    }

    fn rename(
        &self,
        caller: &Caller,
        from: (InodeNumber, Name<'_>),
        to: (InodeNumber, Name<'_>),
        mode: RenameMode,
    ) -> Result<()> {
        self.run(|state| state.rename(caller, from, to, mode))
    }

    fn readlink(&self, node: InodeNumber) -> Result<Vec<u8>> {
        self.run(|state| {
            let index = state.pinned(node)?;
            if !matches!(state.nodes.get(index).body, Body::Symlink(Some(_))) {
                state.hold(index, LEASE_READ)?;
            }
            match &state.nodes.get(index).body {
                Body::Symlink(Some(target)) => Ok(target.to_vec()),
                Body::Symlink(None) => Err(Need::Readlink(node).into()),
                _ => Err(Error::Invalid.into()),
            }
        })
    }

    fn read(&self, handle: Handle, offset: u64, into: &mut [IoSliceMut<'_>]) -> Result<usize> {
        self.read_file(handle, offset, into)
    }

    fn write(&self, caller: &Caller, handle: Handle, at: At, from: &[IoSlice<'_>]) -> Result<Written> {
        let all = bytes_of(from);
        let one = |at, skip| match self.run(|state| state.write(caller, (handle, at), (from, skip), false)) {
            Err(Error::NoSpace) => self.run(|state| state.write(caller, (handle, at), (from, skip), true)),
            written => written,
        };
        let mut written = one(at, 0)?;
        // Data that does not fit one record is written by several records, each atomic.
        while written.bytes < all {
            let at = if let At::Within(_) = at { At::Within(written.end) } else { At::Offset(written.end) };
            match one(at, written.bytes) {
                Ok(more) if more.bytes > 0 => {
                    written = Written { bytes: written.bytes + more.bytes, end: more.end };
                }
                _ => break,
            }
        }
        Ok(written)
    }

    fn allocate(
        &self,
        caller: &Caller,
        handle: Handle,
        what: Allocate,
        offset: u64,
        bytes: u64,
    ) -> Result<()> {
        self.allocate_range(caller, handle, what, offset..offset + bytes)
    }

    fn extents(&self, handle: Handle, offset: u64, what: Extent) -> Result<u64> {
        self.run(|state| state.seek(handle, offset, what))
    }

    fn readdir(
        &self,
        handle: Handle,
        after: Option<Cookie>,
        sink: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Result<()> {
        let mut from = after.map_or(Cookie::START, |cookie| Cookie::from_raw(cookie.get() + 1));
        let mut batch: Vec<(Cookie, Box<[u8]>, EntryTarget)> = Vec::new();
        loop {
            batch.clear();
            let end = self.run(|state| {
                let file = state.file(handle)?;
                if !file.access.read {
                    return Err(Error::BadDescriptor.into());
                }
                if !matches!(state.nodes.get(file.node).body, Body::Directory(_)) {
                    return Err(Error::NotDirectory.into());
                }
                batch.clear();
                state.list(file.node, from, LIST_BATCH, &mut batch)
            })?;
            for (cookie, name, target) in &batch {
                let name = Name::new(name).map_err(|_| Error::Io)?;
                let EntryTarget { inode, file_type } = *target;
                if !sink(Entry { name, inode, file_type, cookie: *cookie }) {
                    return Ok(());
                }
                from = Cookie::from_raw(cookie.get() + 1);
            }
            if end {
                return Ok(());
            }
        }
    }

    fn statfs(&self) -> Result<Space> {
        for _ in 0..self.limits.attempts {
            let line = self.line()?;
            let mut response = Vec::new();
            match self.call(&line, CallKind::Statfs, &[], &mut response)? {
                Status::Ok => {}
                Status::Sealed => continue,
                refused => return Err(error_of(refused)),
            }
            let (found, _) = format::call::split::<StatfsResponse>(&response).map_err(|_| Error::Io)?;
            let id = self.state().session.as_ref().map_or(0, |session| session.welcome.pool.get());
            return Ok(Space {
                block_bytes: BLOCK_BYTES as u64,
                blocks: found.blocks.get(),
                blocks_free: found.blocks_free.get(),
                blocks_available: found.blocks_free.get(),
                inodes: found.inodes.get(),
                inodes_free: found.inodes_free.get(),
                id,
            });
        }
        Err(Error::Io)
    }

    fn sync(&self, what: Sync) -> Result<()> {
        match what {
            Sync::Data(node) | Sync::File(node) => self.sync_node(node),
            Sync::Everything => self.sync_everything().and_then(|()| self.tell_losses()),
            Sync::EverythingUntold => self.sync_everything(),
            // Under a lease that other programs do not want.
            Sync::Process => self.persist(InodeNumber::ROOT).and_then(|()| self.tell_losses()),
            Sync::Own => self.persist(InodeNumber::ROOT),
            // Without the inode's lease: the other engine needs it for its next write.
            Sync::OwnBeside(node) => {
                self.persist(InodeNumber::ROOT)?;
                self.tell_losses_of(node)
            }
        }
    }

    fn get_xattr(&self, caller: &Caller, node: InodeNumber, name: &[u8]) -> Result<Vec<u8>> {
        self.get_xattr_value(caller, node, name)
    }

    fn set_xattr(
        &self,
        caller: &Caller,
        node: InodeNumber,
        name: &[u8],
        value: &[u8],
        how: SetXattr,
    ) -> Result<()> {
        self.set_xattr_value(caller, node, name, value, how)
    }

    fn list_xattrs(&self, caller: &Caller, node: InodeNumber) -> Result<Vec<u8>> {
        self.list_xattr_names(caller, node)
    }

    fn remove_xattr(&self, caller: &Caller, node: InodeNumber, name: &[u8]) -> Result<()> {
        self.remove_xattr_value(caller, node, name)
    }

    fn lock(&self, handle: Handle, owner: LockOwner, lock: Lock, waker: Option<&Waker>) -> Result<Locked> {
        self.take_lock(handle, owner, lock, waker)
    }

    fn redeem(&self, ticket: Ticket) -> Result<Locked> {
        self.redeem_lock(ticket)
    }

    fn cancel(&self, ticket: Ticket) -> bool {
        self.cancel_lock(ticket)
    }

    fn unlock(
        &self,
        handle: Handle,
        owner: LockOwner,
        family: LockFamily,
        first: u64,
        last: u64,
    ) -> Result<()> {
        self.drop_lock(handle, owner, family, (first, last))
    }

    fn conflict(&self, handle: Handle, owner: LockOwner, lock: Lock) -> Result<Option<(Lock, LockOwner)>> {
        self.test_lock(handle, owner, lock)
    }

    fn release(&self, owner: LockOwner, node: Option<InodeNumber>) {
        self.release_locks(owner, node);
    }

    fn cache_leases(&self) -> Option<&dyn CacheLeases> {
        Some(self)
    }
}

impl LibFs {
    /// Counters of the operations on the session's log; none without a session.
    pub fn log_counters(&self) -> Option<Counters> {
        self.state().session.as_ref().map(|session| session.ring.region().counters())
    }

    /// Syncs the session's log, and the ledger up to the newest grant used, under a lease on the inode. Earlier changes
    /// by other sessions were digested before the grant, and digests are synced.
    fn sync_node(&self, node: InodeNumber) -> Result<()> {
        self.persist(node)?;
        self.tell_losses_of(node)
    }

    /// An error if records of the inode were lost, once.
    fn tell_losses_of(&self, node: InodeNumber) -> Result<()> {
        if self.state().losses.take(node) { Err(Error::Io) } else { Ok(()) }
    }

    /// An error if records of any file were lost, and no sync has failed since.
    fn tell_losses(&self) -> Result<()> {
        if self.state().losses.take_any() { Err(Error::Io) } else { Ok(()) }
    }

    /// [`Self::sync_node`] that says nothing of losses.
    fn persist(&self, node: InodeNumber) -> Result<()> {
        for _ in 0..self.limits.attempts {
            if self.sync_in_session(node)? {
                return Ok(());
            }
        }
        Err(Error::Io)
    }

    /// False if the session ended meanwhile. After the death of a daemon, this says nothing about the data yet.
    fn sync_in_session(&self, node: InodeNumber) -> Result<bool> {
        let (log, era, ledger, synced, copies) = self.run(|state| {
            let index = state.pinned(node)?;
            state.hold(index, LEASE_READ)?;
            let era = state.era;
            let session = state.session()?;
            let synced = session.words.ledger_synced();
            let ledger = session.ledger_newest;
            let last = session.last();
            let copies = session.words.needs_copies(last, ledger).then_some(last);
            Ok((session.ring.region().clone(), era, ledger, synced, copies))
        })?;
        if log.syncs_slowly() {
            self.host.will_block();
        }
        log.sync().map_err(|_| Error::Io)?;
        if let Some(record) = copies {
            let line = self.line()?;
            if line.era == era {
                let request = SyncRequest { record, entry: ledger };
                match self.call(&line, CallKind::Sync, &[request.as_bytes()], &mut Vec::new())? {
                    Status::Ok => {}
                    Status::Sealed => return Ok(false),
                    refused => return Err(error_of(refused)),
                }
            }
        } else if ledger > synced {
            let line = self.line()?;
            if line.era == era {
                let request = DigestRequest { up_to: ledger, wait: U32::new(1), reserved: U32::new(0) };
                match self.call(&line, CallKind::SyncLedger, &[request.as_bytes()], &mut Vec::new())? {
                    Status::Ok => {}
                    Status::Sealed => return Ok(false),
                    refused => return Err(error_of(refused)),
                }
            }
        }
        Ok(true)
    }

    fn sync_everything(&self) -> Result<()> {
        for _ in 0..self.limits.attempts {
            let line = self.line()?;
            match self.call(&line, CallKind::SyncAll, &[], &mut Vec::new())? {
                Status::Ok => return Ok(()),
                Status::Sealed => {}
                refused => return Err(error_of(refused)),
            }
        }
        Err(Error::Io)
    }
}
