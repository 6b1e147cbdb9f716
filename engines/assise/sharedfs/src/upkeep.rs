//! Calls that maintain the session itself: digest, reservation of space, space of the log, segments to map, syncs.

use crate::pool_space::HoldStep;
use crate::state::Core;
use ccnvm::SessionId;
use format::call::{
    DigestRequest, DigestResponse, GrowRequest, InodeRequest, RefillRequest, RefillResponse, StatfsResponse,
    Status, split,
};
use format::{BLOCK_BYTES, InodeNumber, SegmentId};
use ipc::Word;
use pmem::{MediaError, Region};
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// How often free space is searched for before the answer is that there is none.
const MAKE_ROOM_TRIES: u32 = 3;
/// The same if space of the medium comes soon.
const SPACE_TRIES: u32 = 60;
/// A session that gets fewer blocks than these asks again soon.
const FEW_BLOCKS: u64 = 256;
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
        let (blocks, replaces) = (request.room_blocks.get(), request.replaces.get() == 1);
        let mut given = self.promise_room(id, blocks, replaces)?;
        let (mut tries, mut tries_max) = (0, MAKE_ROOM_TRIES);
        while given == 0 && blocks > 0 && tries < tries_max {
            tries += 1;
            // Inodes that others removed free space when the removal is digested and no reference is left; sessions
            // that ended just now are waited for.
            self.tidy_wanted(true);
            // Free blocks give their space back to a full medium, after some time.
            if self.hold_step(false) == HoldStep::ShortForNow {
                tries_max = SPACE_TRIES;
            }
            given = self.promise_room(id, blocks, replaces)?;
            if given == 0 {
                self.host.wait(&Word::new(0), 0, Some(self.host.now().after(MAKE_ROOM_PAUSE)));
            }
        }
        if given == 0 && blocks > 0 {
            return Err(Status::NoSpace);
        }
        let response = RefillResponse {
            first_inode: InodeNumber::NONE,
            inodes: U64::new(0),
            room_blocks: U64::new(given),
        };
        Ok(response.as_bytes().to_vec())
    }

    /// Reserves blocks. If the pool has more of them than space is held for, some is held at once, so that a program which writes
    /// faster than the background thread holds space gets little at a time, but not nothing.
    fn promise_room(&self, id: SessionId, blocks: u64, replaces: bool) -> Result<u64, Status> {
        let (given, missing) = self.promise_held(id, blocks, replaces)?;
        if missing == 0 {
            return Ok(given);
        }
        // The background thread goes on with it.
        self.announce_work();
        if given >= FEW_BLOCKS.min(blocks) || !self.hold_for_call(missing) {
            return Ok(given);
        }
        Ok(given + self.promise_held(id, blocks - given, replaces)?.0)
    }

    /// Reserves blocks for which space is held; gives also for how many more none is.
    fn promise_held(&self, id: SessionId, blocks: u64, replaces: bool) -> Result<(u64, u64), Status> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.live(id)?;
        let free = &state.copy.free;
        Ok(match replaces {
            true => (state.room.promise_to_replace(id, blocks, free), 0),
            false => {
                let given = state.room.promise_share(id, blocks, free);
                (given, state.room.missing_in_medium(id, blocks - given, free))
            }
        })
    }

    /// Makes a session's reservation valid for other users' files, too.
    fn share_room(&self, id: SessionId) -> Result<(), Status> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.live(id)?;
        if state.room.share(id, &state.copy.free) { Ok(()) } else { Err(Status::NoSpace) }
    }

    /// [`format::call::CallKind::GrowLog`].
    pub fn grow_log(&self, id: SessionId, body: &[u8]) -> Result<Vec<u8>, Status> {
        let (request, _) = split::<GrowRequest>(body).map_err(|_| Status::Invalid)?;
        let (file, had, promised) = {
            let mut state = self.state.lock();
            let (log, had) = state.live(id).map(|session| (session.log, session.log_bytes))?;
            let file = state.copy.file(log).map_err(|_| Status::Media)?;
            (file.ok_or(Status::Media)?, had, state.copy.free.usage.blocks_unmade * BLOCK_BYTES as u64)
        };
        let whole_blocks = request.bytes.get().checked_next_multiple_of(BLOCK_BYTES as u64);
        let largest = file.region().bytes();
        let bytes = whole_blocks.filter(|bytes| *bytes <= largest).ok_or(Status::Invalid)?;
        if bytes > had {
            let free = self.medium.free_bytes();
            if free.is_some_and(|free| !may_take(bytes - had, free, promised)) {
                return Err(Status::NoSpace);
            }
            file.region().reserve(had..bytes).map_err(|error| match error {
                MediaError::NoSpace => Status::NoSpace,
                _ => Status::Media,
            })?;
        }
        let mut state = self.state.lock();
        let session = state.live(id)?;
        session.log_bytes = session.log_bytes.max(bytes);
        Ok(Vec::new())
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

/// Whether a log may take so many bytes of those that are free on the medium, of which some are promised to data. A log that took
/// them would keep the data from being digested, so that nothing could be removed any more. Where more is promised than there is,
/// a log takes a small part at a time.
fn may_take(bytes: u64, free: u64, promised: u64) -> bool {
    bytes <= free.saturating_sub(promised).max(free / SMALL_PART)
}

/// This fraction of the free bytes is a small part.
const SMALL_PART: u64 = 64;

/// About how many inodes, with their entries, a node of the tree holds.
const INODES_A_NODE: u64 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_leave_the_space_that_is_promised_to_data() {
        const MIB: u64 = 1 << 20;
        assert!(may_take(4 * MIB, 40 * MIB, 36 * MIB) && !may_take(4 * MIB, 39 * MIB, 36 * MIB));
        // More is promised than there is.
        assert!(may_take(4 * MIB, 256 * MIB, 4096 * MIB) && !may_take(4 * MIB, 255 * MIB, 4096 * MIB));
        assert!(!may_take(1, 0, 0));
    }
}
