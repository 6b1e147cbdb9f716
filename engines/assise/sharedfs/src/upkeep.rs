//! Calls that maintain the session itself: digest, reservation of space, a larger log, segments to map, syncs.

use crate::commits::Entries;
use crate::error::Error;
use crate::session::session_of;
use crate::state::{Core, State};
use ccnvm::SessionId;
use format::call::{
    DigestRequest, DigestResponse, GrowRequest, GrowResponse, InodeRequest, RefillRequest, RefillResponse,
    StatfsResponse, Status, split,
};
use format::ledger::RenewBody;
use format::{BLOCK_BYTES, Incarnation, InodeNumber, LogUid, SegmentId};
use ipc::Word;
use mirror::logs::LogFile;
use pmem::Region;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// How often free space is searched for before the answer is that there is none.
const MAKE_ROOM_TRIES: u32 = 3;
/// Pause between two searches.
const MAKE_ROOM_PAUSE: Duration = Duration::from_millis(10);

impl Core {
    /// [`format::call::CallKind::Digest`].
    pub fn digest_call(&self, id: SessionId, body: &[u8]) -> Result<Vec<u8>, Status> {
        let (request, _) = split::<DigestRequest>(body).map_err(|_| Status::Invalid)?;
        let up_to = {
            let mut state = self.state.lock();
            let session = state.live(id)?;
            // Only committed records count, whatever number the request has.
            let up_to = request.up_to.min(session.shared.committed());
            let wants = request.wait.get() == 0 && up_to > state.digested_of(id).sequence;
            state.live(id)?.wants_digest |= wants;
            up_to
        };
        if request.wait.get() == 0 {
            self.announce_work();
        } else {
            self.digest_own(id, up_to)?;
            self.wait_until_reusable(id, up_to);
        }
        let digested = {
            let mut state = self.state.lock();
            state.live(id)?;
            state.digested_of(id)
        };
        let response = DigestResponse { digested: digested.sequence, position: U64::new(digested.position) };
        Ok(response.as_bytes().to_vec())
    }

    /// [`format::call::CallKind::Refill`]. Inode numbers are not refilled: a session that has used up its range
    /// attaches anew.
    pub fn refill(&self, id: SessionId, body: &[u8]) -> Result<Vec<u8>, Status> {
        let (request, _) = split::<RefillRequest>(body).map_err(|_| Status::Invalid)?;
        if request.shared.get() == 1 {
            self.share_room(id)?;
        }
        let mut given = self.promise_room(id, request.room_blocks.get())?;
        for _ in 0..MAKE_ROOM_TRIES {
            if given > 0 || request.room_blocks.get() == 0 {
                break;
            }
            // Inodes that others removed free space when the removal is digested and no reference is left; sessions
            // that ended just now are waited for.
            self.tidy_wanted(true);
            given = self.promise_room(id, request.room_blocks.get())?;
            if given == 0 {
                self.host.wait(&Word::new(0), 0, Some(self.host.now().after(MAKE_ROOM_PAUSE)));
            }
        }
        if given == 0 && request.room_blocks.get() > 0 {
            return Err(Status::NoSpace);
        }
        let response = RefillResponse {
            first_inode: InodeNumber::NONE,
            inodes: U64::new(0),
            room_blocks: U64::new(given),
        };
        Ok(response.as_bytes().to_vec())
    }

    fn promise_room(&self, id: SessionId, blocks: u64) -> Result<u64, Status> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.live(id)?;
        Ok(state.room.promise_share(id, blocks, &state.copy.free))
    }

    /// Makes a session's reservation valid for other users' files, too.
    fn share_room(&self, id: SessionId) -> Result<(), Status> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.live(id)?;
        if state.room.share(id, &state.copy.free) { Ok(()) } else { Err(Status::NoSpace) }
    }

    /// [`format::call::CallKind::GrowLog`]. All records are digested, a new file replaces the log's in one commit, then
    /// the old one is removed.
    pub fn grow_log(&self, id: SessionId, number: u64, body: &[u8]) -> Result<Vec<u8>, Status> {
        let (request, _) = split::<GrowRequest>(body).map_err(|_| Status::Invalid)?;
        let granted = self.config.log_bytes..=self.config.log_bytes_max;
        let whole_blocks = request.file_bytes.get().checked_next_multiple_of(BLOCK_BYTES as u64);
        let file_bytes = whole_blocks.filter(|bytes| granted.contains(bytes)).ok_or(Status::Invalid)?;
        let (log, uid, incarnation, up_to) = {
            let mut state = self.state.lock();
            let session = state.live(id)?;
            let (log, uid, up_to) = (session.log, session.caller.uid, session.shared.committed());
            let open = state.copy.ledger.table().log(log).expect("a live session's log is open");
            (log, uid, open.incarnation.next(), up_to)
        };
        self.digest_own(id, up_to)?;
        // A file of this name can only be left from an attempt that did not reach its commit.
        let _ = self.medium.remove(&mirror::logs::log_file(log, incarnation));
        let made = LogFile::create(&self.medium, self.pool, (log, incarnation), file_bytes, uid);
        let file = Arc::new(made.map_err(|_| Status::NoSpace)?);
        let old = {
            let mut area = self.area_for_other();
            let old = {
                let entries = |_: &State| Entries { count: 1, payload_bytes: size_of::<RenewBody>() };
                let mut guard = self.state_with_room_beside(&mut area, entries);
                let state = &mut *guard;
                state.live(id)?;
                if state.digested_of(id).sequence != up_to {
                    return Err(Status::Invalid);
                }
                let replaced = state.replace_log(log, file.clone(), (incarnation, file_bytes));
                state.guard(replaced).map_err(|_| Status::Media)?
            };
            self.contain_changes(&mut area).map_err(|_| Status::Media)?;
            old
        };
        {
            // The new file contained nothing that a copy could lack.
            let mut state = self.state.lock();
            state.live(id)?;
            state.publish_reusable(self, id);
        }
        // A file that stays is removed by the next start.
        let _ = old.map(|old| self.medium.remove(&old));
        let region = self.log_region(id)?;
        self.send_parcel(id, number, log.get(), &region).map_err(|_| Status::Media)?;
        let response =
            GrowResponse { log, file_bytes: U64::new(file_bytes), incarnation, reserved: U32::new(0) };
        Ok(response.as_bytes().to_vec())
    }

    /// The log's file, to be handed to its LibFS after it grew.
    pub fn log_region(&self, id: SessionId) -> Result<Region, Status> {
        let mut state = self.state.lock();
        let log = state.live(id)?.log;
        let file = state.copy.file(log).map_err(|_| Status::Media)?;
        Ok(file.ok_or(Status::Media)?.region().clone())
    }

    /// The region for [`format::call::CallKind::MapSegment`]: the segment, read-only, if the session's user may map it.
    pub fn map_segment(&self, id: SessionId, body: &[u8]) -> Result<Region, Status> {
        let (request, _) = split::<InodeRequest>(body).map_err(|_| Status::Invalid)?;
        let segment = u32::try_from(request.inode.get()).map(SegmentId::new).map_err(|_| Status::Invalid)?;
        {
            let mut state = self.state.lock();
            let uid = state.live(id)?.caller.uid;
            if state.copy.tree.segment_owner(segment) != Some(uid) {
                return Err(Status::Access);
            }
        }
        self.medium.open_read_only(&area::segment_file(segment)).map_err(|_| Status::Media)
    }

    /// [`format::call::CallKind::MapSegment`] of a LibFS in another process.
    pub fn send_segment(&self, id: SessionId, number: u64, body: &[u8]) -> Result<Vec<u8>, Status> {
        let region = self.map_segment(id, body)?;
        let (request, _) = split::<InodeRequest>(body).map_err(|_| Status::Invalid)?;
        self.send_parcel(id, number, request.inode.get(), &region).map_err(|_| Status::Media)?;
        Ok(Vec::new())
    }

    /// [`format::call::CallKind::Statfs`].
    pub fn statfs(&self, id: SessionId) -> Result<Vec<u8>, Status> {
        let mut state = self.state.lock();
        state.live(id)?;
        let usage = state.copy.free.usage;
        let free = state.room.free_blocks(id, &state.copy.free);
        let inodes_free = u64::from(usage.nodes_free) * INODES_A_NODE;
        let response = StatfsResponse {
            blocks: U64::new(usage.blocks),
            blocks_free: U64::new(free),
            inodes: U64::new(usage.inodes.saturating_add(inodes_free)),
            inodes_free: U64::new(inodes_free),
        };
        Ok(response.as_bytes().to_vec())
    }
}

/// About how many inodes, with their entries, a node of the tree holds.
const INODES_A_NODE: u64 = 8;

impl State {
    /// Replaces the log, which is digested to its end, by a new, empty file; returns the old one's name. The caller
    /// holds the area's lock.
    fn replace_log(
        &mut self,
        log: LogUid,
        file: Arc<LogFile>,
        (incarnation, file_bytes): (Incarnation, u64),
    ) -> Result<Option<String>, Error> {
        let last = self.copy.digested(log).sequence;
        let body = RenewBody { file_bytes: U64::new(file_bytes), incarnation, reserved: U32::new(0) };
        let entry = self.copy.ledger.renew(log, last, &body)?;
        if let Some(session) = self.sessions.get_mut(&session_of(log)) {
            session.right = entry;
        }
        let old = self.copy.renew_log(log, last, Some(file));
        Ok(old.map(|old| old.name.clone()))
    }
}
