//! Calls to SharedFS, and the caching of their answers. No lock is held during a call. An answer is used only if the
//! session and the lease are still those under which the call was made.

use crate::directory::Target;
use crate::engine::LibFs;
use crate::error::Error;
use crate::need::{Need, Walk};
use crate::nodes::{Body, NodeIndex};
use crate::session::Link;
use crate::state::State;
use crate::words::GrantedLease;
use format::call::{
    CallKind, DigestRequest, EntriesRequest, EntriesResponse, EntryReply, ExtentReply, ExtentsResponse,
    InodeRequest, LEASE_WRITE, LeaseRequest, LeaseUnit, NodeReply, RENAME_UNIT, RangeRequest, Status,
    WALK_NAMES_MAX, WalkRequest, WalkResponse,
};
use format::record::FileType;
use format::session::WORD_OWN_RANGE;
use format::{Cookie, InodeNumber, Name, SegmentId, Sequence};
use ipc::sync::Ordering;
use std::sync::Arc;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Minimum of blocks of a file for which one call requests extents.
const EXTENT_BLOCKS: u64 = 4096;

/// An upper bound for the numbers of the kinds of calls.
pub(crate) const KINDS: usize = 32;

/// The connection to SharedFS in one session.
pub(crate) struct Line {
    pub link: Arc<dyn Link>,
    pub era: u64,
}

/// The error that a program gets for a refused call.
pub(crate) fn error_of(status: Status) -> vfs::Error {
    match status {
        Status::NotFound => vfs::Error::NotFound,
        Status::NotDirectory => vfs::Error::NotDirectory,
        Status::Symlink => vfs::Error::Loop,
        Status::Access => vfs::Error::Denied,
        Status::NoSpace => vfs::Error::NoSpace,
        Status::Limit => vfs::Error::TooManyFiles,
        Status::NoAttribute => vfs::Error::NoData,
        Status::NotRegular => vfs::Error::Invalid,
        Status::WouldBlock => vfs::Error::WouldBlock,
        Status::Deadlock => vfs::Error::Deadlock,
        Status::Invalid => vfs::Error::Stale,
        Status::Ok | Status::Media | Status::Sealed => vfs::Error::Io,
    }
}

/// Takes one value from the front of the bytes.
pub(crate) fn take<T: FromBytes + KnownLayout + Immutable>(bytes: &mut &[u8]) -> Result<T, Error> {
    let (value, rest) = format::call::split(bytes).map_err(|_| Error::Response)?;
    *bytes = rest;
    Ok(value)
}

impl LibFs {
    /// The connection to SharedFS; attaches if there is no session.
    pub(crate) fn line(&self) -> vfs::engine::Result<Line> {
        for _ in 0..self.limits.attempts {
            let state = self.state();
            if let Some(session) = state.session.as_ref() {
                return Ok(Line { link: session.link.clone(), era: state.era });
            }
            drop(state);
            self.attach()?;
        }
        Err(vfs::Error::Io)
    }

    /// Makes a call. If the session is over, ends it here too; the answer is `Sealed` then.
    pub(crate) fn call(
        &self,
        line: &Line,
        kind: CallKind,
        request: &[&[u8]],
        response: &mut Vec<u8>,
    ) -> vfs::engine::Result<Status> {
        // Relaxed: a count that orders nothing.
        self.calls[kind as usize].fetch_add(1, Ordering::Relaxed);
        let called = line.link.call(kind, request, response);
        let over = matches!(called, Ok(Status::Sealed) | Err(Error::Disconnected));
        if over {
            self.end_of(line)?;
            return Ok(Status::Sealed);
        }
        called.map_err(vfs::Error::from)
    }

    /// The kinds of calls to SharedFS that were made, and how often.
    pub fn calls_made(&self) -> Vec<(CallKind, u64)> {
        let of = |kind: CallKind| (kind, self.calls[kind as usize].load(Ordering::Relaxed));
        let kinds = (0..KINDS as u16).filter_map(|raw| CallKind::from_raw(raw).ok());
        kinds.map(of).filter(|(_, count)| *count > 0).collect()
    }

    /// Ends the session of this connection.
    pub(crate) fn end_of(&self, line: &Line) -> vfs::engine::Result<()> {
        let mut state = self.state();
        if state.era == line.era && state.session.is_some() {
            state.end_session();
        }
        Ok(())
    }

    /// Processes an answer if the session is still the one that asked.
    pub(crate) fn learn<T>(
        &self,
        line: &Line,
        learn: impl FnOnce(&mut State) -> Result<T, Error>,
    ) -> vfs::engine::Result<()> {
        let mut state = self.state();
        if state.era == line.era && state.session.is_some() {
            learn(&mut state)?;
        }
        Ok(())
    }

    pub(crate) fn get_leases(&self, units: &[(InodeNumber, u8)]) -> vfs::engine::Result<()> {
        let line = self.line()?;
        let request = LeaseRequest { count: U32::new(units.len() as u32), reserved: U32::new(0) };
        let wanted: Vec<LeaseUnit> = units
            .iter()
            .map(|(inode, mode)| LeaseUnit { inode: *inode, mode: *mode, reserved: [0; 7] })
            .collect();
        let mut response = Vec::new();
        match self.call(&line, CallKind::Lease, &[request.as_bytes(), wanted.as_bytes()], &mut response)? {
            Status::Ok => self.learn(&line, |state| {
                let mut rest = response.as_slice();
                for _ in units {
                    state.learn_node(&take(&mut rest)?)?;
                }
                Ok(())
            }),
            Status::Sealed => Ok(()),
            Status::NotFound => Err(vfs::Error::Stale),
            refused => Err(error_of(refused)),
        }
    }

    pub(crate) fn walk_call(&self, walk: &Walk) -> vfs::engine::Result<()> {
        let names = &walk.names[..walk.names.len().min(WALK_NAMES_MAX)];
        let line = self.line()?;
        let request = WalkRequest {
            start: walk.start,
            names: U16::new(names.len() as u16),
            last_mode: walk.last_mode,
            parent_mode: walk.parent_mode,
            ahead: U16::new(walk.ahead),
            ahead_mode: walk.ahead_mode,
            ahead_if_taken: walk.ahead_if_taken.into(),
        };
        let mut encoded = Vec::new();
        for name in names {
            encoded.push(name.len() as u8);
            encoded.extend_from_slice(name);
        }
        let mut response = Vec::new();
        match self.call(&line, CallKind::Walk, &[request.as_bytes(), &encoded], &mut response)? {
            Status::Ok => {}
            Status::Sealed => return Ok(()),
            Status::Invalid if walk.ahead > 0 => return Ok(()),
            refused => return Err(error_of(refused)),
        }
        let mut rest = response.as_slice();
        let head: WalkResponse = take(&mut rest)?;
        self.learn(&line, |state| {
            let mut nodes: Vec<NodeReply> = Vec::new();
            for _ in 0..head.nodes.get() {
                nodes.push(take(&mut rest)?);
            }
            state.learn_walk(&nodes, names, &head)?;
            // These are the entries after the last one in its directory, in the order of the directory.
            if let ([.., directory, last], false) = (nodes.as_slice(), rest.is_empty()) {
                state.add_file_ahead(directory.inode, last.inode);
                while !rest.is_empty() {
                    let reply: NodeReply = take(&mut rest)?;
                    let index = state.learn_node(&reply)?;
                    state.add_file_ahead(directory.inode, reply.inode);
                    // A lease that was granted ahead is the first to go back if the program does not use it.
                    state.nodes.get_mut(index).recent = false;
                }
            }
            Ok(())
        })?;
        match Status::from_raw(head.stopped.get()) {
            Status::Ok | Status::NotFound | Status::Symlink => Ok(()),
            // The next attempt walks as far, and decides by the cached nodes. If it needs only the lease on an inode that
            // it has already, it requests none ahead then, and that lease by itself.
            _ if head.nodes.get() > 1 || walk.ahead > 0 => Ok(()),
            refused => Err(error_of(refused)),
        }
    }

    /// The present lease of a node, to be compared when an answer arrives.
    fn lease_of(&self, inode: InodeNumber) -> Option<GrantedLease> {
        let state = self.state();
        state.nodes.find(inode).and_then(|index| state.nodes.get(index).lease)
    }

    pub(crate) fn entries_call(
        &self,
        inode: InodeNumber,
        from: Cookie,
        same_hash: bool,
    ) -> vfs::engine::Result<()> {
        let line = self.line()?;
        let asked_under = self.lease_of(inode);
        let request = EntriesRequest {
            inode,
            from: U64::new(from.get()),
            same_hash: U32::new(same_hash.into()),
            reserved: U32::new(0),
        };
        let mut response = Vec::new();
        match self.call(&line, CallKind::Entries, &[request.as_bytes()], &mut response)? {
            Status::Ok => {}
            // The lease ended meanwhile; the next attempt requests it again.
            Status::Sealed | Status::Invalid => return Ok(()),
            refused => return Err(error_of(refused)),
        }
        self.learn(&line, |state| state.learn_entries(inode, (from, same_hash), asked_under, &response))
    }

    pub(crate) fn extents_call(
        &self,
        inode: InodeNumber,
        block: u64,
        blocks: u64,
    ) -> vfs::engine::Result<()> {
        let line = self.line()?;
        let asked_under = self.lease_of(inode);
        let length = U64::new(blocks.max(EXTENT_BLOCKS));
        let mut requests = vec![RangeRequest { inode, offset: U64::new(block), length }];
        let others = self.state().files_after(inode);
        let ahead = |(inode, _): &(InodeNumber, GrantedLease)| RangeRequest {
            inode: *inode,
            offset: U64::new(0),
            length: U64::new(EXTENT_BLOCKS),
        };
        requests.extend(others.iter().map(ahead));
        let mut response = Vec::new();
        match self.call(&line, CallKind::Extents, &[requests.as_bytes()], &mut response)? {
            Status::Ok => {}
            Status::Sealed | Status::Invalid => return Ok(()),
            refused => return Err(error_of(refused)),
        }
        self.learn(&line, |state| {
            let mut rest = response.as_slice();
            if !state.learn_extents(inode, block, asked_under, &mut rest)? {
                return Err(Error::Response);
            }
            for (inode, asked_under) in others {
                if rest.is_empty() {
                    break;
                }
                state.learn_extents(inode, 0, Some(asked_under), &mut rest)?;
            }
            Ok(())
        })
    }

    pub(crate) fn segment_call(&self, segment: SegmentId) -> vfs::engine::Result<()> {
        let line = self.line()?;
        let inode = InodeNumber::new(u64::from(segment.get()));
        let request = InodeRequest { inode, flags: U64::new(0) };
        let status = self.call(&line, CallKind::MapSegment, &[request.as_bytes()], &mut Vec::new())?;
        let mapping = match status {
            Status::Ok => match line.link.segment(segment) {
                Err(Error::Disconnected) => return self.end_of(&line),
                // A program without free descriptors continues to read by calls.
                mapping => mapping.ok().map(Arc::new),
            },
            Status::Sealed => return Ok(()),
            Status::Access => None,
            refused => return Err(error_of(refused)),
        };
        self.learn(&line, |state| {
            if let Some(session) = state.session.as_mut() {
                session.segments.insert(segment, mapping);
            }
            Ok(())
        })
    }

    pub(crate) fn readlink_call(&self, inode: InodeNumber) -> vfs::engine::Result<()> {
        let line = self.line()?;
        let request = InodeRequest { inode, flags: U64::new(0) };
        let mut response = Vec::new();
        match self.call(&line, CallKind::Readlink, &[request.as_bytes()], &mut response)? {
            // A target never changes, so it is kept without a lease.
            Status::Ok => self.learn(&line, |state| {
                if let Some(index) = state.nodes.find(inode)
                    && let Body::Symlink(target) = &mut state.nodes.get_mut(index).body
                {
                    *target = Some(response.into_boxed_slice());
                }
                Ok(())
            }),
            Status::Sealed | Status::Invalid => Ok(()),
            refused => Err(error_of(refused)),
        }
    }

    /// Requests a digest of the session's log up to a record; with `wait` returns after the digest.
    pub(crate) fn digest_call(&self, line: &Line, up_to: Sequence, wait: bool) -> vfs::engine::Result<()> {
        let request = DigestRequest { up_to, wait: U32::new(wait.into()), reserved: U32::new(0) };
        match self.call(line, CallKind::Digest, &[request.as_bytes()], &mut Vec::new())? {
            Status::Ok | Status::Sealed => Ok(()),
            refused => Err(error_of(refused)),
        }
    }
}

impl State {
    /// Stores SharedFS's answer about an inode and its lease.
    pub(crate) fn learn_node(&mut self, reply: &NodeReply) -> Result<NodeIndex, Error> {
        let file_type = FileType::of_mode(reply.item.mode.get());
        let is_unit = reply.inode == RENAME_UNIT;
        if (file_type.is_none() && !is_unit) || reply.inode == InodeNumber::NONE {
            return Err(Error::Response);
        }
        let Some(session) = self.session.as_mut() else { return Err(Error::Response) };
        session.ledger_newest = session.ledger_newest.max(reply.ledger);
        let older_than_caches = reply.digested < session.purged;
        let own = reply.word.get() == WORD_OWN_RANGE;
        let generation = if own { 0 } else { reply.expected.get() };
        let lease = GrantedLease { word: reply.word.get(), generation, write: reply.mode == LEASE_WRITE };
        let index = self.nodes.enter(reply.inode);
        let node = self.nodes.get_mut(index);
        if let Body::Unknown = node.body {
            match file_type {
                Some(file_type) => node.set_body(file_type, false),
                None => node.body = Body::Special,
            }
        }
        if reply.digested < node.changed || older_than_caches {
            // Own records that the answer does not contain changed the inode since, so the cached state is newer. An
            // attempt that lacks something asks again.
            if !own && node.lease.is_none_or(|held| held.word != lease.word) {
                self.leases.add_stray(reply.inode);
            }
            return Ok(index);
        }
        // A lease that was raised has another generation. An equal stamp shows that no other session changed the inode
        // in between.
        let same = node.lease == Some(lease)
            || (node.lease.is_some()
                && node.item.stamp == reply.item.stamp
                && node.changed == Sequence::new(0));
        if !own && node.lease.is_none_or(|held| held.word != lease.word) {
            self.leases.add(index, reply.inode);
        }
        if !same {
            node.lose(&mut self.pool);
        }
        (node.lease, node.recent) = (Some(lease), true);
        node.item = reply.item;
        node.bare = reply.has_xattrs == 0;
        node.blocks_moved = false;
        if let Body::File { overlay, .. } = &mut node.body {
            overlay.note_area_known();
        }
        Ok(index)
    }

    fn learn_walk(
        &mut self,
        nodes: &[NodeReply],
        names: &[Vec<u8>],
        head: &WalkResponse,
    ) -> Result<(), Error> {
        let mut indices = Vec::with_capacity(nodes.len());
        for reply in nodes {
            indices.push(self.learn_node(reply)?);
        }
        let purged = self.session.as_ref().map_or(Sequence::new(0), |session| session.purged);
        for (step, name) in names.iter().enumerate() {
            let Some(parent) = nodes.get(step) else { break };
            let Ok(name) = Name::new(name) else { continue };
            if parent.digested < purged || !self.is_current(indices[step], parent) {
                continue;
            }
            let Body::Directory(directory) = &mut self.nodes.get_mut(indices[step]).body else { continue };
            match nodes.get(step + 1) {
                Some(child) => {
                    let cookie = Cookie::of_name(name).get() + u64::from(child.slot.get());
                    let file_type = FileType::of_mode(child.item.mode.get()).ok_or(Error::Response)?;
                    let target = Target { inode: child.inode, file_type };
                    directory.learn(Cookie::from_raw(cookie), name, target, parent.digested);
                    self.entries.add(1);
                }
                None if Status::from_raw(head.stopped.get()) == Status::NotFound => {
                    directory.learn_absent(name, head.same_hash.get());
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Whether a node's present lease is the one of this answer.
    fn is_current(&self, index: NodeIndex, reply: &NodeReply) -> bool {
        let own = reply.word.get() == WORD_OWN_RANGE;
        self.nodes.get(index).lease.is_some_and(|held| {
            held.word == reply.word.get() && (own || held.generation == reply.expected.get())
        })
    }

    /// The node that a call was about, if the lease under which the call was made is still held and the answer contains
    /// all records that were dropped from the caches.
    fn still(
        &mut self,
        inode: InodeNumber,
        asked_under: Option<GrantedLease>,
        digested: Sequence,
    ) -> Option<NodeIndex> {
        let index = self.nodes.find(inode)?;
        let session = self.session.as_ref()?;
        let held = self.nodes.get(index).lease?;
        let still = Some(held) == asked_under && session.holds(&held) && digested >= session.purged;
        still.then_some(index)
    }

    fn learn_entries(
        &mut self,
        inode: InodeNumber,
        (from, same_hash): (Cookie, bool),
        asked_under: Option<GrantedLease>,
        response: &[u8],
    ) -> Result<(), Error> {
        let mut rest = response;
        let head: EntriesResponse = take(&mut rest)?;
        let Some(index) = self.still(inode, asked_under, head.digested) else { return Ok(()) };
        let Body::Directory(directory) = &mut self.nodes.get_mut(index).body else {
            return Err(Error::Response);
        };
        let mut to = from.get();
        for _ in 0..head.count.get() {
            let entry: EntryReply = take(&mut rest)?;
            let (name, after) = rest.split_at_checked(entry.name_bytes.into()).ok_or(Error::Response)?;
            rest = after;
            let name = Name::new(name).map_err(|_| Error::Response)?;
            let file_type = FileType::from_raw(entry.file_type).ok_or(Error::Response)?;
            let cookie = entry.cookie.get();
            if cookie < to {
                return Err(Error::Response);
            }
            to = cookie + 1;
            let target = Target { inode: entry.inode, file_type };
            directory.learn(Cookie::from_raw(cookie), name, target, head.digested);
        }
        let ended = head.end.get() == 1;
        match (same_hash, ended) {
            (true, true) => directory.learn_hash(from),
            (false, true) => directory.learn_range(from, None),
            (false, false) if to > from.get() => directory.learn_range(from, Some(Cookie::from_raw(to))),
            _ => return Err(Error::Response),
        }
        self.entries.add(head.count.get() as usize);
        Ok(())
    }

    /// Stores one file's extents from the front of an answer; false if the answer does not describe the requested
    /// block.
    fn learn_extents(
        &mut self,
        inode: InodeNumber,
        block: u64,
        asked_under: Option<GrantedLease>,
        rest: &mut &[u8],
    ) -> Result<bool, Error> {
        let head: ExtentsResponse = take(rest)?;
        let mut extents = Vec::new();
        for _ in 0..head.count.get() {
            extents.push(take::<ExtentReply>(rest)?);
        }
        if head.covered_to.get() <= block {
            return Ok(false);
        }
        let Some(index) = self.still(inode, asked_under, head.digested) else { return Ok(true) };
        let as_of = self.purged();
        if let Body::File { extents: window, .. } = &mut self.nodes.get_mut(index).body {
            let described = (head.generation.get(), as_of);
            window.learn(block, head.covered_to.get(), described, extents.into_iter());
        }
        Ok(true)
    }
}

impl LibFs {
    /// Requests leases, after releasing others if the words run out. If SharedFS still refuses because there are too
    /// many, releases leases so that the attempt can be repeated.
    fn with_lease_room(&self, ask: impl FnOnce(&Self) -> vfs::engine::Result<()>) -> vfs::engine::Result<()> {
        if self.state().words_run_out() {
            self.make_lease_room(false)?;
        }
        match ask(self) {
            Err(vfs::Error::TooManyFiles) if self.make_lease_room(true)? => Ok(()),
            asked => asked,
        }
    }

    /// Gets what a stopped attempt needs.
    pub(crate) fn get(&self, need: Need) -> vfs::engine::Result<()> {
        match need {
            Need::Again => Ok(()),
            Need::Attach => self.attach(),
            Need::GivenBack(inode) => self.wait_while(|state| state.is_given_back(inode)),
            Need::Leases(units) => self.with_lease_room(|libfs| libfs.get_leases(&units)),
            Need::Walk(walk) => self.with_lease_room(|libfs| libfs.walk_call(&walk)),
            Need::Open(inode, access, token) => {
                self.with_lease_room(|libfs| libfs.open_call(inode, access, token))
            }
            Need::Entries(inode, from) => self.entries_call(inode, from, false),
            Need::SameHash(inode, first) => self.entries_call(inode, first, true),
            Need::Extents(inode, block, blocks) => self.extents_call(inode, block, blocks),
            Need::Segment(segment) => self.segment_call(segment),
            Need::Readlink(inode) => self.readlink_call(inode),
            Need::Room(cost) => self.get_room(cost),
            Need::RoomToReplace(cost) => self.get_room_to_replace(cost),
            Need::SharedRoom => self.share_room(),
            Need::Inodes => self.get_inodes(),
            Need::LogSpace(bytes) => self.get_log_space(bytes),
            Need::Digested(sequence) => self.get_digested(sequence),
        }
    }
}
