//! Calls by which a session reads the shared area: entries, extents, bytes, link targets, attributes.
//!
//! Every answer is given under a lease that the session holds (otherwise `Invalid`: the session lost it and acquires it
//! again), after the permission check of an open for reading, and is never longer than the request allows.

use crate::replay::authorize::attributes;
use crate::state::{Core, State};
use crate::walk::status_of;
use area::AreaError;
use ccnvm::{Mode, SessionId, Want};
use format::call::{
    EXTENT_BY_CALL, EXTENTS_AHEAD_MAX, EntriesRequest, EntriesResponse, EntryReply, ExtentReply,
    ExtentsResponse, InodeRequest, RangeRequest, Status, split,
};
use format::node::{EXTENT_UNWRITTEN, InodeItem};
use format::record::FileType;
use format::{Cookie, InodeNumber, Sequence};
use vfs::access;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// Entries and extents looked up at once.
const BATCH: usize = 1024;

/// Bytes that one Read gives at most: bounds the time under the lock.
const READ_BYTES_MAX: usize = 1 << 20;

/// Blocks that one Extents compares with their checksums at most, for the same reason.
const VERIFIED_BLOCKS_MAX: u32 = 1 << 10;

fn of_area(error: AreaError) -> Status {
    match error {
        AreaError::Refused(_) => Status::Invalid,
        _ => Status::Media,
    }
}

impl Core {
    /// [`format::call::CallKind::Entries`].
    pub fn entries(&self, id: SessionId, body: &[u8], room: usize) -> Result<Vec<u8>, Status> {
        let (request, _) = split::<EntriesRequest>(body).map_err(|_| Status::Invalid)?;
        let entries = self.with_own_records(id, |state| state.entries(id, &request, room));
        self.state.lock().trim_known(id, self.config.known_max);
        entries
    }

    /// [`format::call::CallKind::Extents`].
    pub fn extents(&self, id: SessionId, body: &[u8], room: usize) -> Result<Vec<u8>, Status> {
        let (request, mut rest) = split::<RangeRequest>(body).map_err(|_| Status::Invalid)?;
        let mut others: Vec<RangeRequest> = Vec::new();
        while !rest.is_empty() && others.len() < EXTENTS_AHEAD_MAX {
            let (other, after) = split(rest).map_err(|_| Status::Invalid)?;
            others.push(other);
            rest = after;
        }
        if !rest.is_empty() {
            return Err(Status::Invalid);
        }
        self.with_own_records(id, |state| {
            let mut verified_max = VERIFIED_BLOCKS_MAX;
            let mut answer = state.extents(self, id, &request, (room, &mut verified_max))?;
            for other in &others {
                let room = room.saturating_sub(answer.len());
                if room < size_of::<ExtentsResponse>() + size_of::<ExtentReply>() || verified_max == 0 {
                    break;
                }
                let more = state.extents(self, id, other, (room, &mut verified_max));
                answer.extend(more.unwrap_or_else(|_| nothing_of(other).as_bytes().to_vec()));
            }
            Ok(answer)
        })
    }

    /// [`format::call::CallKind::Read`].
    pub fn read(&self, id: SessionId, body: &[u8], room: usize) -> Result<Vec<u8>, Status> {
        let (request, _) = split::<RangeRequest>(body).map_err(|_| Status::Invalid)?;
        let length =
            usize::try_from(request.length.get()).unwrap_or(usize::MAX).min(room).min(READ_BYTES_MAX);
        self.with_own_records(id, |state| {
            state.readable_file(id, request.inode)?;
            let mut bytes = vec![0; length];
            let found =
                state.copy.tree.read(request.inode, request.offset.get(), &mut bytes).map_err(of_area)?;
            bytes.truncate(found);
            Ok(bytes)
        })
    }

    /// [`format::call::CallKind::Readlink`].
    pub fn readlink(&self, id: SessionId, body: &[u8]) -> Result<Vec<u8>, Status> {
        let (request, _) = split::<InodeRequest>(body).map_err(|_| Status::Invalid)?;
        self.with_own_records(id, |state| {
            let item = state.held_item(id, request.inode)?;
            if FileType::of_mode(item.mode.get()) != Some(FileType::Symlink) {
                return Err(Status::Invalid);
            }
            state.copy.tree.symlink(request.inode).map_err(of_area)
        })
    }

    /// [`format::call::CallKind::GetXattr`].
    pub fn get_xattr(&self, id: SessionId, body: &[u8]) -> Result<Vec<u8>, Status> {
        let (request, name) = split::<InodeRequest>(body).map_err(|_| Status::Invalid)?;
        self.with_own_records(id, |state| {
            let item = state.held_item(id, request.inode)?;
            let caller = &state.live(id)?.caller;
            access::read_xattr(caller, &attributes(request.inode, &item), name).map_err(status_of)?;
            state.copy.tree.xattr(request.inode, name).map_err(of_area)?.ok_or(Status::NoAttribute)
        })
    }

    /// [`format::call::CallKind::ListXattr`].
    pub fn list_xattr(&self, id: SessionId, body: &[u8]) -> Result<Vec<u8>, Status> {
        let (request, _) = split::<InodeRequest>(body).map_err(|_| Status::Invalid)?;
        self.with_own_records(id, |state| {
            state.held_item(id, request.inode)?;
            let names = state.copy.tree.xattr_names(request.inode).map_err(of_area)?;
            let caller = &state.live(id)?.caller;
            let shown = names.iter().filter(|name| access::lists_xattr(caller, name));
            Ok(shown.flat_map(|name| name.iter().copied().chain([0])).collect())
        })
    }
}

/// The answer that describes no block of a file.
fn nothing_of(request: &RangeRequest) -> ExtentsResponse {
    ExtentsResponse {
        digested: Sequence::default(),
        generation: U32::new(0),
        count: U32::new(0),
        covered_to: request.offset,
    }
}

impl State {
    /// An inode on which the session holds a lease.
    fn held_item(&mut self, id: SessionId, inode: InodeNumber) -> Result<InodeItem, Status> {
        self.live(id)?;
        if !self.holds(id, Want { unit: inode, mode: Mode::Read }) {
            return Err(Status::Invalid);
        }
        self.item(inode)
    }

    fn readable_file(&mut self, id: SessionId, inode: InodeNumber) -> Result<InodeItem, Status> {
        let item = self.held_item(id, inode)?;
        if FileType::of_mode(item.mode.get()) != Some(FileType::Regular) {
            return Err(Status::NotRegular);
        }
        if self.may_read(id, inode, &item) { Ok(item) } else { Err(Status::Access) }
    }

    fn entries(&mut self, id: SessionId, request: &EntriesRequest, room: usize) -> Result<Vec<u8>, Status> {
        let item = self.held_item(id, request.inode)?;
        if FileType::of_mode(item.mode.get()) != Some(FileType::Directory) {
            return Err(Status::NotDirectory);
        }
        let from = Cookie::from_raw(request.from.get());
        let mut found = self.copy.tree.entries(request.inode, from, BATCH).map_err(of_area)?;
        let whole = found.len() < BATCH;
        let same_hash = request.same_hash.get() == 1;
        // A session that may add names but not list them is only shown entries with one name's hash.
        let shown =
            self.may_read(id, request.inode, &item) || (same_hash && self.may_add(id, request.inode, &item));
        if !shown {
            return Err(Status::Access);
        }
        let ended = whole || found.last().is_some_and(|entry| !entry.cookie.same_hash(from));
        if same_hash {
            found.retain(|entry| entry.cookie.same_hash(from));
        }
        let mut bytes = vec![0; size_of::<EntriesResponse>()];
        let mut count = 0;
        for entry in &found {
            let reply = EntryReply {
                inode: entry.inode,
                cookie: U64::new(entry.cookie.get()),
                file_type: entry.file_type as u8,
                name_bytes: u8::try_from(entry.name.len()).expect("the area holds names that fit"),
                reserved: [0; 6],
            };
            if bytes.len() + size_of::<EntryReply>() + entry.name.len() > room {
                break;
            }
            bytes.extend_from_slice(reply.as_bytes());
            bytes.extend_from_slice(&entry.name);
            count += 1;
        }
        if count == 0 && !found.is_empty() {
            return Err(Status::Invalid);
        }
        let end = count == found.len() && if same_hash { ended } else { whole };
        // A user who may list and search the directory counts as having walked to each entry that is shown.
        let session = self.live(id)?;
        if access::search(&session.caller, &attributes(request.inode, &item)).is_ok() {
            for entry in &found[..count] {
                session.known.entry(entry.inode).or_default();
            }
        }
        let head = EntriesResponse {
            digested: self.digested_of(id).sequence,
            count: U32::new(u32::try_from(count).expect("a batch is bounded")),
            end: U32::new(end.into()),
        };
        bytes[..size_of::<EntriesResponse>()].copy_from_slice(head.as_bytes());
        Ok(bytes)
    }

    fn may_add(&self, id: SessionId, inode: InodeNumber, item: &InodeItem) -> bool {
        let Some(session) = self.sessions.get(&id) else { return false };
        access::permits(&session.caller, &attributes(inode, item), access::EXECUTE | access::WRITE)
    }

    fn extents(
        &mut self,
        core: &Core,
        id: SessionId,
        request: &RangeRequest,
        (room, verified_max): (usize, &mut u32),
    ) -> Result<Vec<u8>, Status> {
        self.readable_file(id, request.inode)?;
        let fits = room.saturating_sub(size_of::<ExtentsResponse>()) / size_of::<ExtentReply>();
        if fits == 0 {
            return Err(Status::Invalid);
        }
        let start = request.offset.get();
        let end = start.saturating_add(request.length.get());
        // Read before the extents: a thread that frees one of their blocks afterwards raises the generation.
        let generation = core.generations.of(request.inode);
        let extents_max = fits.min(BATCH);
        let found = self.copy.tree.extents(request.inode, start..end, extents_max).map_err(of_area)?;
        let mut covered_to = match found.last() {
            Some(last) if found.len() == extents_max => last.end().max(start),
            _ => end,
        };
        let (uid, digested) = (self.live(id)?.caller.uid, self.digested_of(id).sequence);
        let mut replies = Vec::with_capacity(found.len());
        for extent in &found {
            let mapped = self.copy.tree.segment_owner(extent.segment) == Some(uid);
            let unwritten = if extent.checksums.is_none() { EXTENT_UNWRITTEN } else { 0 };
            let first = extent.first.max(start);
            // Reads through a mapping are not compared with checksums later.
            let whole_to =
                match mapped.then(|| self.copy.tree.verify(request.inode, extent, first, verified_max)) {
                    None => extent.end(),
                    Some(Ok(whole_to)) => whole_to,
                    Some(Err(AreaError::Data { .. })) if first > start => first,
                    Some(Err(error)) => return Err(of_area(error)),
                };
            if whole_to > first {
                replies.push(ExtentReply {
                    file_block: U64::new(first),
                    segment: extent.segment,
                    block: extent.block_of(first),
                    blocks: U32::new(
                        u32::try_from(whole_to - first).expect("an extent has 2^32 blocks at most"),
                    ),
                    flags: U32::new(unwritten | if mapped { 0 } else { EXTENT_BY_CALL }),
                });
            }
            if whole_to < extent.end() {
                covered_to = covered_to.min(whole_to);
                break;
            }
        }
        let head = ExtentsResponse {
            digested,
            generation: U32::new(generation),
            count: U32::new(u32::try_from(replies.len()).expect("a batch is bounded")),
            covered_to: U64::new(covered_to),
        };
        Ok([head.as_bytes(), replies.as_bytes()].concat())
    }
}
