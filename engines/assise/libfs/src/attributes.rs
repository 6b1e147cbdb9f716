//! Attributes and extended attributes: the session's own changes, on top of the contents of the area.

use crate::apply;
use crate::calls::error_of;
use crate::engine::LibFs;
use crate::need::{Need, Step};
use crate::nodes::{Body, NodeIndex};
use crate::records;
use crate::state::State;
use crate::words::GrantedLease;
use format::call::{CallKind, InodeRequest, LEASE_READ, LEASE_WRITE, Status};
use format::record::{
    FILE_BYTES_MAX, Operation, SET_ATIME, SET_GID, SET_MODE, SET_MTIME, SET_UID, SetAttrBody,
    XATTR_BYTES_MAX, room_blocks,
};
use format::{BLOCK_BYTES, InodeNumber, Sequence};
use pmem::Source;
use vfs::access;
use vfs::engine::{Attributes, Changes, SetTime, SetXattr, Target};
use vfs::{Caller, Error};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{I64, U32, U64};

impl State {
    /// Makes sure that a program may get the attributes of a node on which a lease is held. Once written data of a file
    /// is in the area, only the area knows how many blocks the file has.
    pub fn know_blocks(&self, index: NodeIndex) -> Step<()> {
        let node = self.nodes.get(index);
        let moved =
            node.blocks_moved && matches!(&node.body, Body::File { overlay, .. } if overlay.is_empty());
        let digested = self.session.as_ref().is_some_and(|session| node.changed <= session.purged);
        match node.lease {
            Some(held) if moved && digested => {
                let mode = if held.write { LEASE_WRITE } else { LEASE_READ };
                Err(Need::Leases(vec![(node.inode, mode)]).into())
            }
            _ => Ok(()),
        }
    }

    /// The attributes of a node, with an upper bound for the blocks that are not digested yet.
    pub fn attributes(&self, index: NodeIndex) -> Attributes {
        let node = self.nodes.get(index);
        let mut attributes = apply::attributes(node.inode, &node.item);
        // Before the digest it is unknown which blocks the area will use. Holes use none, and writes to ranges that
        // already have blocks in the area may be counted twice, so the sum is limited by the size.
        if let Body::File { overlay, .. } = &node.body {
            let blocks = node.item.blocks.get() + overlay.blocks_beside_area(&self.pool);
            let blocks = blocks.min(attributes.size.div_ceil(BLOCK_BYTES as u64));
            attributes.blocks = attributes.blocks.max(blocks * (BLOCK_BYTES as u64 / 512));
        }
        attributes
    }

    pub(crate) fn getattr(&mut self, target: Target) -> Step<Attributes> {
        let index = match target {
            Target::Node(inode) => self.pinned(inode)?,
            Target::Open(handle) => self.file(handle)?.node,
        };
        self.hold(index, LEASE_READ)?;
        self.know_blocks(index)?;
        Ok(self.attributes(index))
    }

    pub(crate) fn setattr(&mut self, caller: &Caller, target: Target, changes: &Changes) -> Step<Attributes> {
        self.acts_as(caller)?;
        let (index, may_write) = match target {
            Target::Node(inode) => (self.pinned(inode)?, false),
            Target::Open(handle) => {
                let file = self.file(handle)?;
                if changes.size.is_some() && !file.access.write {
                    return Err(Error::BadDescriptor.into());
                }
                (file.node, true)
            }
        };
        self.hold(index, LEASE_WRITE)?;
        let old = self.attributes(index);
        let mode = access::change(caller, &old, changes, may_write)?;
        if changes.size.is_some_and(|size| size > FILE_BYTES_MAX) {
            return Err(Error::FileTooBig.into());
        }
        if let Some(size) = changes.size {
            self.truncate(caller, index, size)?;
        }
        let time_ns = self.time(&[index]);
        let body = set_attr_body(&self.attributes(index), mode, changes, time_ns);
        if changes.size.is_none() || body.mask.get() != 0 {
            self.append_set_attr(index, &body, time_ns)?;
        }
        Ok(self.attributes(index))
    }

    /// Identifies the state of a node's extended attributes. If it is the same before and after a call, the answer of
    /// the call is current.
    fn xattr_view(&mut self, index: NodeIndex) -> XattrView {
        let purged = self.session.as_ref().map_or(Sequence::new(0), |session| session.purged);
        let node = self.nodes.get(index);
        XattrView { era: self.era, lease: node.lease, purged, changed: node.changed }
    }

    /// The value of an attribute if own records determine it: `Some(None)` if they show that there is none.
    fn own_xattr(&self, index: NodeIndex, name: &[u8]) -> Option<Option<Vec<u8>>> {
        let node = self.nodes.get(index);
        if let Some((value, _)) = node.xattrs.get(name) {
            return Some(value.as_ref().map(|value| value.to_vec()));
        }
        node.bare.then_some(None)
    }
}

fn set_attr_body(now: &Attributes, mode: u32, changes: &Changes, time_ns: i64) -> SetAttrBody {
    let at = |time: Option<SetTime>| match time {
        Some(SetTime::To(time)) => time,
        Some(SetTime::Now) | None => time_ns,
    };
    let masks = [
        (SET_MODE, mode != now.mode),
        (SET_UID, changes.uid.is_some()),
        (SET_GID, changes.gid.is_some()),
        (SET_ATIME, changes.atime.is_some()),
        (SET_MTIME, changes.mtime.is_some()),
    ];
    let mask = masks.iter().filter(|(_, set)| *set).map(|(bit, _)| bit).sum();
    SetAttrBody {
        mask: U32::new(mask),
        mode: U32::new(mode),
        uid: U32::new(changes.uid.unwrap_or(now.uid)),
        gid: U32::new(changes.gid.unwrap_or(now.gid)),
        atime_ns: I64::new(at(changes.atime)),
        mtime_ns: I64::new(at(changes.mtime)),
    }
}

/// See [`State::xattr_view`].
#[derive(Clone, Copy, PartialEq, Eq)]
struct XattrView {
    era: u64,
    lease: Option<GrantedLease>,
    purged: Sequence,
    changed: Sequence,
}

/// The result of looking an attribute up without a call.
enum XattrAnswer {
    Value(Option<Vec<u8>>),
    Ask(XattrView),
}

impl LibFs {
    /// The value of an attribute, and the view for which it is valid.
    fn xattr(
        &self,
        node: InodeNumber,
        name: &[u8],
        mode: u8,
        allowed: impl Fn(&Attributes) -> vfs::engine::Result<()>,
    ) -> vfs::engine::Result<(Option<Vec<u8>>, XattrView)> {
        for _ in 0..self.limits.attempts {
            let (known, view) = self.run(|state| {
                let index = state.pinned(node)?;
                state.hold(index, mode)?;
                allowed(&state.attributes(index))?;
                let view = state.xattr_view(index);
                Ok((state.own_xattr(index, name).map_or(XattrAnswer::Ask(view), XattrAnswer::Value), view))
            })?;
            let view_of_call = match known {
                XattrAnswer::Value(value) => return Ok((value, view)),
                XattrAnswer::Ask(view) => view,
            };
            let line = self.line()?;
            let request = InodeRequest { inode: node, flags: U64::new(0) };
            let mut response = Vec::new();
            let value =
                match self.call(&line, CallKind::GetXattr, &[request.as_bytes(), name], &mut response)? {
                    Status::Ok => Some(response),
                    Status::NoAttribute => None,
                    // A caller who may only write the file asks whether there is the attribute.
                    Status::Access if mode == LEASE_WRITE => {
                        let Some(names) = self.xattr_names_in_area(node)? else { continue };
                        names.split(|byte| *byte == 0).any(|one| one == name).then(Vec::new)
                    }
                    Status::Sealed | Status::Invalid => continue,
                    // The inode was removed meanwhile; the caller repeats the walk.
                    Status::NotFound => return Err(Error::Stale),
                    refused => return Err(error_of(refused)),
                };
            if self.xattr_view_now(node, mode)? == view_of_call {
                return Ok((value, view_of_call));
            }
        }
        Err(Error::Io)
    }

    fn xattr_view_now(&self, node: InodeNumber, mode: u8) -> vfs::engine::Result<XattrView> {
        self.run(|state| {
            let index = state.pinned(node)?;
            state.hold(index, mode)?;
            Ok(state.xattr_view(index))
        })
    }

    pub(crate) fn get_xattr_value(
        &self,
        caller: &Caller,
        node: InodeNumber,
        name: &[u8],
    ) -> vfs::engine::Result<Vec<u8>> {
        let allowed = |attributes: &Attributes| access::read_xattr(caller, attributes, name);
        self.xattr(node, name, LEASE_READ, allowed)?.0.ok_or(Error::NoData)
    }

    pub(crate) fn set_xattr_value(
        &self,
        caller: &Caller,
        node: InodeNumber,
        name: &[u8],
        value: &[u8],
        how: SetXattr,
    ) -> vfs::engine::Result<()> {
        if value.len() > XATTR_BYTES_MAX {
            return Err(Error::TooBig);
        }
        self.change_xattr(caller, node, name, Some(value), |exists| how.check(exists))
    }

    pub(crate) fn remove_xattr_value(
        &self,
        caller: &Caller,
        node: InodeNumber,
        name: &[u8],
    ) -> vfs::engine::Result<()> {
        self.change_xattr(caller, node, name, None, |exists| if exists { Ok(()) } else { Err(Error::NoData) })
    }

    /// Sets or removes an attribute if `check`, which gets whether it exists, agrees.
    fn change_xattr(
        &self,
        caller: &Caller,
        node: InodeNumber,
        name: &[u8],
        value: Option<&[u8]>,
        check: impl Fn(bool) -> vfs::engine::Result<()>,
    ) -> vfs::engine::Result<()> {
        let allowed = |attributes: &Attributes| access::write_xattr(caller, attributes, name);
        for _ in 0..self.limits.attempts {
            let (old, view) = self.xattr(node, name, LEASE_WRITE, allowed)?;
            check(old.is_some())?;
            let changed = self.run(|state| {
                state.acts_as(caller)?;
                let index = state.pinned(node)?;
                state.hold(index, LEASE_WRITE)?;
                if state.xattr_view(index) != view {
                    return Ok(false);
                }
                allowed(&state.attributes(index))?;
                let time_ns = state.time(&[index]);
                let (header, room) = match value {
                    Some(value) => (
                        records::set_xattr(node, name.len(), value.len(), time_ns),
                        room_blocks(&Operation::SetXattr { name, value }),
                    ),
                    None => (records::remove_xattr(node, name.len(), time_ns), 0),
                };
                let payload = [Source::from(name), Source::from(value.unwrap_or(&[]))];
                let sequence = state.append(header, &payload, room)?.sequence;
                let changed = state.nodes.get_mut(index);
                apply::xattr(&mut changed.item, time_ns);
                changed.xattrs.insert(name.into(), (value.map(Box::from), sequence));
                state.mark(index, sequence);
                Ok(true)
            })?;
            if changed {
                return Ok(());
            }
        }
        Err(Error::Io)
    }

    /// The names of a node's attributes in the area, each ended by a zero byte; `None` if the call is to be repeated.
    fn xattr_names_in_area(&self, node: InodeNumber) -> vfs::engine::Result<Option<Vec<u8>>> {
        let line = self.line()?;
        let request = InodeRequest { inode: node, flags: U64::new(0) };
        let mut names = Vec::new();
        match self.call(&line, CallKind::ListXattr, &[request.as_bytes()], &mut names)? {
            Status::Ok => Ok(Some(names)),
            Status::Sealed | Status::Invalid => Ok(None),
            // The inode was removed meanwhile; the caller repeats the walk.
            Status::NotFound => Err(Error::Stale),
            refused => Err(error_of(refused)),
        }
    }

    pub(crate) fn list_xattr_names(
        &self,
        caller: &Caller,
        node: InodeNumber,
    ) -> vfs::engine::Result<Vec<u8>> {
        for _ in 0..self.limits.attempts {
            let (view, in_area) = self.run(|state| {
                let index = state.pinned(node)?;
                state.hold(index, LEASE_READ)?;
                Ok((state.xattr_view(index), !state.nodes.get(index).bare))
            })?;
            let found = if in_area { self.xattr_names_in_area(node)? } else { Some(Vec::new()) };
            let Some(found) = found else { continue };
            let merged = self.run(|state| {
                let index = state.pinned(node)?;
                state.hold(index, LEASE_READ)?;
                let current = state.xattr_view(index) == view;
                Ok(current.then(|| merge_names(&found, state, index)))
            })?;
            if let Some(names) = merged {
                let seen = names.iter().filter(|name| access::lists_xattr(caller, name));
                return Ok(seen.flat_map(|name| name.iter().chain(&[0])).copied().collect());
            }
        }
        Err(Error::Io)
    }
}

/// The names in the area, each ended by a zero byte, merged with own changes.
fn merge_names(area: &[u8], state: &State, index: NodeIndex) -> std::collections::BTreeSet<Vec<u8>> {
    let named = area.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut names: std::collections::BTreeSet<Vec<u8>> = named.map(<[u8]>::to_vec).collect();
    for (name, (value, _)) in &state.nodes.get(index).xattrs {
        if value.is_some() {
            names.insert(name.to_vec());
        } else {
            names.remove(&**name);
        }
    }
    names
}
