//! Changes of the contents of a file (Assise §3.2.1): one record for each operation. The bytes are copied once, from
//! the program's memory into the log.

use crate::apply;
use crate::need::{Need, RecordCost, Step};
use crate::nodes::NodeIndex;
use crate::overlay::{Origin, Piece};
use crate::records;
use crate::state::{Session, State};
use format::call::LEASE_WRITE;
use format::record::{
    FILE_BYTES_MAX, Operation, ROOM_OF_TREE, SET_MODE, SetAttrBody, is_own_file, room_blocks, room_of_range,
    room_of_size,
};
use format::{BLOCK_BYTES, HEADER_BYTES, Sequence};
use pmem::Source;
use pmem::ring::Appended;
use std::io::IoSlice;
use vfs::engine::{Allocate, At, Handle, Written};
use vfs::{Caller, Error};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{I64, U32};

/// Most bytes that one record writes on a full pool: the reserve for such records is small, and all programs use it.
const REPLACED_BYTES_MAX: usize = 16 << 10;
/// Slices that are appended without allocating; more of them need a list.
const SLICES_ON_STACK: usize = 8;

impl State {
    /// The node of a file that is open for writing.
    pub(crate) fn writable(&mut self, handle: Handle) -> Step<NodeIndex> {
        let file = self.file(handle)?;
        if !file.access.write {
            return Err(Error::BadDescriptor.into());
        }
        Ok(file.node)
    }

    /// Writes the bytes of the slices after `skip`, as many as one record can contain, as one record. `is_full`: the pool has no
    /// space for more data. Then a record replaces a few blocks that the file has, or the write fails.
    pub(crate) fn write(
        &mut self,
        caller: &Caller,
        (handle, at): (Handle, At),
        (from, skip): (&[IoSlice<'_>], usize),
        is_full: bool,
    ) -> Step<Written> {
        self.acts_as(caller)?;
        let index = self.writable(handle)?;
        self.hold(index, LEASE_WRITE)?;
        let size = self.nodes.get(index).item.size.get();
        let start = match at {
            At::Offset(offset) | At::Within(offset) => offset,
            At::End => size,
        };
        let left = (bytes_of(from) - skip) as u64;
        let asked = if let At::Within(_) = at { left.min(size.saturating_sub(start)) } else { left };
        if asked == 0 {
            return Ok(Written { bytes: 0, end: start });
        }
        if start >= FILE_BYTES_MAX {
            return Err(Error::FileTooBig.into());
        }
        let largest = self.record_bytes_max()?;
        let mut bytes = asked.min(FILE_BYTES_MAX - start).min(largest) as usize;
        self.clear_set_ids(caller, index)?;
        self.hold_room_for(index)?;
        let mut cost = RecordCost::adding(room_of_range(start, bytes as u64));
        if self.session.as_ref().is_some_and(|session| !session.has_room(cost)) {
            (bytes, cost) = self.cost_to_replace(index, start, bytes, is_full)?;
        }

        let inode = self.nodes.get(index).inode;
        let time_ns = self.time(&[index]);
        let header = records::write(inode, start, bytes, time_ns);
        let end = start + bytes as u64;
        let apply = |state: &mut Self, appended: &Appended| {
            let sequence = appended.sequence;
            state.change_item(index, sequence, |item, credential| {
                apply::write(item, credential, end, time_ns);
            });
            let origin = Origin::Log(appended.position + HEADER_BYTES as u64);
            state.change_contents(index, Piece { start, end, origin, sequence });
        };
        let (one, mut few, mut many);
        let sources = match from {
            [slice] => {
                one = [Source::from(&slice[skip..skip + bytes])];
                &one[..]
            }
            _ if from.len() <= SLICES_ON_STACK => {
                few = [Source::from(&[]); SLICES_ON_STACK];
                let count = gather(from, skip, bytes, &mut few);
                &few[..count]
            }
            _ => {
                many = vec![Source::from(&[]); from.len()];
                let count = gather(from, skip, bytes, &mut many);
                &many[..count]
            }
        };
        self.append_and(header, sources, cost, apply)?;
        Ok(Written { bytes, end })
    }

    /// How many bytes a record writes for which there is no space as for more data, and its cost.
    #[cold]
    fn cost_to_replace(
        &mut self,
        index: NodeIndex,
        start: u64,
        bytes: usize,
        is_full: bool,
    ) -> Step<(usize, RecordCost)> {
        let may_be_full = is_full || self.session.as_ref().is_some_and(Session::is_full);
        let few = if may_be_full { bytes.min(REPLACED_BYTES_MAX) } else { bytes };
        let cost = RecordCost::replacing(room_of_range(start, few as u64));
        let is_there = self.session.as_ref().is_some_and(|session| session.has_room(cost));
        if (may_be_full || is_there) && self.has_blocks(index, start, start + few as u64)? {
            return if is_there { Ok((few, cost)) } else { Err(Need::RoomToReplace(cost).into()) };
        }
        if is_full {
            return Err(Error::NoSpace.into());
        }
        Ok((bytes, RecordCost::adding(room_of_range(start, bytes as u64))))
    }

    /// Limit of bytes in one record: a quarter of the largest log, so that every operation of that size is atomic; of the log
    /// as it is where there is no space for more of it.
    fn record_bytes_max(&mut self) -> Step<u64> {
        let session = self.session()?;
        let largest = if session.log_refused { session.log_bytes } else { session.log_bytes_max };
        Ok((largest / 4).saturating_sub(HEADER_BYTES as u64).clamp(1, u64::from(u32::MAX)))
    }

    /// Requires that the session's reservation may be used for blocks of a file.
    #[inline]
    fn hold_room_for(&self, index: NodeIndex) -> Step<()> {
        let Some(session) = self.session.as_ref() else { return Err(Need::Attach.into()) };
        let owner = self.nodes.get(index).item.uid.get();
        if session.room_is_shared || is_own_file(session.credential.uid, owner) {
            return Ok(());
        }
        Err(Need::SharedRoom.into())
    }

    /// A digest decides about set-id bits by the log's credential. If the operation's caller is another user (of a
    /// gateway), a separate record before the write clears the bits.
    #[inline]
    fn clear_set_ids(&mut self, caller: &Caller, index: NodeIndex) -> Step<()> {
        if apply::has_set_ids(&self.nodes.get(index).item) {
            self.append_set_ids(caller, index)
        } else {
            Ok(())
        }
    }

    #[cold]
    fn append_set_ids(&mut self, caller: &Caller, index: NodeIndex) -> Step<()> {
        let item = &self.nodes.get(index).item;
        let credential = &self.session.as_ref().expect("a lease is held").credential;
        let wanted = apply::mode_after_write(caller, item);
        if wanted == apply::mode_after_write(credential, item) {
            return Ok(());
        }
        let time_ns = self.time(&[index]);
        self.append_set_attr(index, &set_mode(wanted), time_ns)
    }

    /// Appends and applies a change of attributes; the leases are held.
    pub(crate) fn append_set_attr(&mut self, index: NodeIndex, body: &SetAttrBody, time_ns: i64) -> Step<()> {
        let header = records::set_attr(self.nodes.get(index).inode, time_ns);
        let sequence = self.append(header, &[Source::from(body.as_bytes())], ROOM_OF_TREE)?.sequence;
        self.change_item(index, sequence, |item, _| apply::set_attr(item, body, time_ns));
        Ok(())
    }

    /// Applies a record to a node's item.
    #[inline]
    fn change_item(
        &mut self,
        index: NodeIndex,
        sequence: Sequence,
        change: impl FnOnce(&mut format::node::InodeItem, &Caller),
    ) {
        let session = self.session.as_ref().expect("a record was just appended to its log");
        change(&mut self.nodes.get_mut(index).item, &session.credential);
        self.mark(index, sequence);
    }

    #[inline]
    fn change_contents(&mut self, index: NodeIndex, piece: Piece) {
        let node = self.nodes.get_mut(index);
        node.contents_version += 1;
        let (overlay, _) = node.file();
        overlay.insert(&mut self.pool, piece);
    }

    /// Sets the size; the write lease is held.
    pub(crate) fn truncate(&mut self, caller: &Caller, index: NodeIndex, size: u64) -> Step<()> {
        if size > FILE_BYTES_MAX {
            return Err(Error::FileTooBig.into());
        }
        self.clear_set_ids(caller, index)?;
        let room = room_of_size(size);
        if room > 0 {
            self.hold_room_for(index)?;
        }
        let old_size = self.nodes.get(index).item.size.get();
        let time_ns = self.time(&[index]);
        let header = records::truncate(self.nodes.get(index).inode, size, time_ns);
        let sequence = self.append(header, &[], room)?.sequence;
        self.change_item(index, sequence, |item, credential| {
            apply::truncate(item, credential, size, time_ns)
        });
        if size < old_size {
            let piece = Piece { start: size, end: old_size.max(size), origin: Origin::Zero, sequence };
            self.change_contents(index, piece);
        } else {
            // Blocks that are reserved beyond the end may be free then.
            self.nodes.get_mut(index).blocks_moved |= size == old_size;
        }
        Ok(())
    }

    /// Reserves a range, or punches a hole. `is_full`: the pool has no space for more data. Then it reserves a range of which the
    /// file has all blocks, or fails.
    pub(crate) fn allocate(
        &mut self,
        caller: &Caller,
        handle: Handle,
        what: Allocate,
        (mut offset, mut bytes): (u64, u64),
        is_full: bool,
    ) -> Step<()> {
        self.acts_as(caller)?;
        let index = self.writable(handle)?;
        self.hold(index, LEASE_WRITE)?;
        self.clear_set_ids(caller, index)?;
        self.hold_room_for(index)?;
        let (keep_size, punch_hole) = match what {
            Allocate::Extend => (false, false),
            Allocate::KeepSize | Allocate::KeepSizeAndReplace => (true, false),
            Allocate::PunchHole => (true, true),
        };
        let end = offset + bytes;
        let room = room_blocks(&Operation::Allocate { offset, bytes, keep_size, punch_hole });
        let mut cost = RecordCost { blocks: room, replaces: punch_hole };
        let has_no_room = self.session.as_ref().is_some_and(|session| !session.has_room(cost));
        if has_no_room && matches!(what, Allocate::Extend | Allocate::KeepSize) {
            if self.has_blocks(index, offset, end)? {
                // A record for the last block alone changes the size and the times.
                offset = offset.max((end - 1) / BLOCK_BYTES as u64 * BLOCK_BYTES as u64);
                bytes = end - offset;
                cost = RecordCost::replacing(room_of_range(offset, bytes));
            } else if is_full {
                return Err(Error::NoSpace.into());
            }
        }
        let time_ns = self.time(&[index]);
        let inode = self.nodes.get(index).inode;
        let header = records::allocate(inode, (offset, bytes), keep_size, punch_hole, time_ns);
        let sequence = self.append_and(header, &[], cost, |_, _| ())?.sequence;
        let grown = (!keep_size).then_some(end);
        self.change_item(index, sequence, |item, credential| {
            apply::allocate(item, credential, grown, time_ns);
        });
        if punch_hole {
            self.change_contents(index, Piece { start: offset, end, origin: Origin::Zero, sequence });
        } else {
            let node = self.nodes.get_mut(index);
            node.file().0.note_reserved(offset, end);
            node.blocks_moved = true;
        }
        Ok(())
    }

    /// Whether the right to write a file needs a reference: the present mode may change later, and the session is not
    /// root's and did not create the inode. Also if the open table is full.
    pub(crate) fn needs_reference(&mut self, index: NodeIndex, writes: bool) -> Step<bool> {
        let full = self.open_table_full();
        let root = self.session()?.credential.is_root();
        let node = self.nodes.get(index);
        let own = node.lease.is_some_and(|held| held.word == format::session::WORD_OWN_RANGE);
        let for_right = writes && !root && !own && !node.referenced_to_write;
        let for_place = full && node.open_place.is_none() && !node.referenced;
        Ok(for_right || for_place)
    }
}

/// Bytes of all slices.
#[inline]
pub(crate) fn bytes_of(slices: &[IoSlice<'_>]) -> usize {
    match slices {
        [slice] => slice.len(),
        slices => slices.iter().map(|slice| slice.len()).sum(),
    }
}

/// A change of only the permission bits.
pub(crate) fn set_mode(mode: u32) -> SetAttrBody {
    SetAttrBody {
        mask: U32::new(SET_MODE),
        mode: U32::new(mode),
        uid: U32::new(0),
        gid: U32::new(0),
        atime_ns: I64::new(0),
        mtime_ns: I64::new(0),
    }
}

/// Collects `bytes` bytes of the slices from `skip` on; returns the number of sources filled.
fn gather<'a>(
    from: &'a [IoSlice<'_>],
    mut skip: usize,
    mut bytes: usize,
    sources: &mut [Source<'a>],
) -> usize {
    let mut count = 0;
    for slice in from {
        let part: &[u8] = slice;
        if skip >= part.len() {
            skip -= part.len();
            continue;
        }
        let part = &part[skip..];
        skip = 0;
        let part = &part[..part.len().min(bytes)];
        bytes -= part.len();
        if !part.is_empty() {
            sources[count] = Source::from(part);
            count += 1;
        }
    }
    count
}
