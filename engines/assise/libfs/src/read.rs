//! Reads (Assise §3.2.2), from the log index, and then from the shared area through read-only mappings. The locations
//! of the bytes are found under the lock, and the bytes are copied without it. Then the copy is checked: the log must
//! not have been reused, and the file's generation must be unchanged. The locations were valid at the instant of the
//! lookup, so the copy is of that instant.

use crate::engine::LibFs;
use crate::extents::Area;
use crate::need::{Need, Step};
use crate::nodes::{Body, NodeIndex};
use crate::overlay::Origin;
use crate::state::State;
use crate::words::SharedWords;
use format::call::{CallKind, LEASE_READ, RangeRequest, Status};
use format::{BLOCK_BYTES, InodeNumber, SegmentId, Sequence};
use ipc::LongWord;
use ipc::sync::{Ordering, fence};
use pmem::read_mapping::CopyError;
use pmem::{ReadMapping, Region, Sink};
use std::io::IoSliceMut;
use std::sync::Arc;
use vfs::Error;
use vfs::engine::{Extent, Handle};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Reads up to this length are copied under the lock.
const SMALL_BYTES: usize = 8 << 10;
/// A longer read is planned again this many times if another thread writes to the file; then it is copied under the
/// lock too.
const PLANS_MAX: usize = 16;

/// The location of a run of bytes.
enum Where {
    Log(u64, Sequence),
    Segment(SegmentId, u64),
    ByCall,
    Zero,
}

/// Pieces that are copied after one lookup.
const PLAN_MAX: usize = 16;

enum From {
    Log(u64),
    Segment(Arc<ReadMapping>, u64),
    ByCall,
    Zero,
}

struct Part {
    from: From,
    bytes: usize,
}

/// The pieces of a copy.
struct Plan {
    inode: InodeNumber,
    parts: [Option<Part>; PLAN_MAX],
    count: usize,
    /// Bytes of all parts.
    bytes: usize,
    /// The plan reaches the end of the requested range, or of the file.
    whole: bool,
    log: Option<Region>,
    /// The oldest record from which bytes are copied.
    oldest: Sequence,
    generation: Option<u64>,
    words: Arc<SharedWords>,
    released: Arc<LongWord>,
    contents_version: u64,
}

impl Plan {
    fn add(&mut self, from: From, bytes: usize) {
        self.parts[self.count] = Some(Part { from, bytes });
        self.count += 1;
        self.bytes += bytes;
    }

    /// Whether all copied bytes were still valid after the copy.
    fn still(&self) -> bool {
        // Acquire: the copies come before these loads. Pairs with the fence after the store of `released`.
        fence(Ordering::Acquire);
        let log_stands = self.log.is_none() || self.released.load(Ordering::Relaxed) <= self.oldest.get();
        log_stands
            && self.words.is_alive()
            && self.generation.is_none_or(|before| self.words.generation_still(self.inode, before))
    }
}

impl State {
    /// The first offset of data or of a hole. Own records of the file are digested first, because only the area knows
    /// which blocks have data.
    pub(crate) fn seek(&mut self, handle: Handle, offset: u64, what: Extent) -> Step<u64> {
        let index = self.file(handle)?.node;
        self.hold(index, LEASE_READ)?;
        let size = self.nodes.get(index).item.size.get();
        if !matches!(self.nodes.get(index).body, Body::File { .. }) || offset >= size {
            return Err(Error::NoDevice.into());
        }
        let node = self.nodes.get(index);
        let (inode, changed, dirty) = (node.inode, node.changed, node.dirty);
        let session = self.session.as_ref().ok_or(Need::Attach)?;
        if changed > session.purged || (dirty && session.purging.is_some()) {
            return Err(Need::Digested(changed).into());
        }
        let generation = session.words.generation(inode) as u32;
        let (_, extents) = self.nodes.get_mut(index).file();
        if extents.generation.is_some_and(|known| known != generation) {
            extents.clear();
        }
        let mut at = offset;
        while at < size {
            let (area, together) = extents.find(at);
            match (area, what) {
                (Area::Unknown, _) => {
                    let block = at / BLOCK_BYTES as u64;
                    let blocks = size.div_ceil(BLOCK_BYTES as u64) - block;
                    return Err(Need::Extents(inode, block, blocks).into());
                }
                (Area::Zero, Extent::Hole) | (Area::Segment(..) | Area::ByCall, Extent::Data) => {
                    return Ok(at);
                }
                _ => at = at.saturating_add(together),
            }
        }
        match what {
            Extent::Hole => Ok(size),
            Extent::Data => Err(Error::NoDevice.into()),
        }
    }

    /// Whether a file on which a lease is held has all blocks of a range: a write replaces them, and adds none. In doubt it has
    /// not.
    pub(crate) fn has_blocks(&mut self, index: NodeIndex, start: u64, end: u64) -> Step<bool> {
        const BLOCK: u64 = BLOCK_BYTES as u64;
        let as_of = self.purged();
        let session = self.session.as_ref().ok_or(Need::Attach)?;
        let node = self.nodes.get_mut(index);
        let inode = node.inode;
        if !matches!(node.body, Body::File { .. }) {
            return Ok(false);
        }
        let (overlay, extents) = node.file();
        if extents.generation.is_some_and(|known| known != session.words.generation(inode) as u32) {
            extents.clear();
        }
        let blocks = start / BLOCK..end.div_ceil(BLOCK);
        for block in blocks.clone() {
            match overlay.in_block(&self.pool, block * BLOCK) {
                Some(Origin::Log(_)) => {}
                Some(Origin::Zero) => return Ok(false),
                None => match extents.has(block).filter(|has| *has || extents.as_of == as_of) {
                    Some(true) => {}
                    Some(false) => return Ok(false),
                    None => return Err(Need::Extents(inode, block, blocks.end - block).into()),
                },
            }
        }
        Ok(true)
    }

    /// A file that is open for reading, with a lease on it.
    #[inline]
    fn readable(&mut self, handle: Handle) -> Step<NodeIndex> {
        let file = self.file(handle)?;
        if !file.access.read {
            return Err(Error::BadDescriptor.into());
        }
        self.hold(file.node, LEASE_READ)?;
        match self.nodes.get(file.node).body {
            Body::File { .. } => Ok(file.node),
            _ => Err(Error::IsDirectory.into()),
        }
    }

    /// The location of the byte at `at` of a file on which a lease is held, and the number of contiguous bytes, not
    /// beyond `end`.
    #[inline]
    fn locate(&mut self, index: NodeIndex, at: u64, end: u64) -> Step<(Where, u64)> {
        let session = self.session.as_ref().ok_or(Need::Attach)?;
        let node = self.nodes.get_mut(index);
        let inode = node.inode;
        let (overlay, extents) = node.file();
        let newer = overlay.first_after(&self.pool, at);
        if let Some(piece) = newer.filter(|piece| piece.start <= at) {
            let found = match piece.origin {
                Origin::Log(position) => Where::Log(position + (at - piece.start), piece.sequence),
                Origin::Zero => Where::Zero,
            };
            return Ok((found, piece.end.min(end) - at));
        }
        let to = newer.map_or(end, |piece| piece.start.min(end));
        if extents.generation.is_some_and(|known| known != session.words.generation(inode) as u32) {
            extents.clear();
        }
        let (area, together) = extents.find(at);
        let bytes = together.min(to - at);
        let found = match area {
            Area::Unknown => {
                let block = at / BLOCK_BYTES as u64;
                let blocks = to.div_ceil(BLOCK_BYTES as u64) - block;
                return Err(Need::Extents(inode, block, blocks).into());
            }
            Area::Zero => Where::Zero,
            Area::ByCall => Where::ByCall,
            Area::Segment(segment, position) => {
                let mapping = session.segments.get(&segment).ok_or(Need::Segment(segment))?;
                match mapping {
                    Some(mapping) if position + bytes <= mapping.bytes() => Where::Segment(segment, position),
                    _ => Where::ByCall,
                }
            }
        };
        Ok((found, bytes))
    }

    /// The locations of at most `bytes` bytes from `offset` on, of a file on which a lease is held.
    fn plan(&mut self, index: NodeIndex, offset: u64, bytes: usize) -> Step<Plan> {
        let node = self.nodes.get(index);
        let end = offset.saturating_add(bytes as u64).min(node.item.size.get());
        let session = self.session.as_ref().ok_or(Need::Attach)?;
        let generation = session.words.generation(node.inode);
        let mut plan = Plan {
            inode: node.inode,
            parts: [const { None }; PLAN_MAX],
            count: 0,
            bytes: 0,
            whole: false,
            log: None,
            oldest: Sequence::new(u64::MAX),
            generation: None,
            words: session.words.clone(),
            released: session.released.clone(),
            contents_version: node.contents_version,
        };
        let mut at = offset;
        while at < end && plan.count < PLAN_MAX {
            let (found, bytes) = self.locate(index, at, end)?;
            let session = self.session.as_ref().ok_or(Need::Attach)?;
            let from = match found {
                Where::Log(position, sequence) => {
                    plan.oldest = plan.oldest.min(sequence);
                    plan.log.get_or_insert_with(|| session.ring.region().clone());
                    From::Log(position)
                }
                Where::Zero => From::Zero,
                Where::ByCall => From::ByCall,
                Where::Segment(segment, position) => {
                    plan.generation = Some(generation);
                    let mapping = session.segments.get(&segment).cloned().flatten();
                    From::Segment(mapping.ok_or(Need::Segment(segment))?, position)
                }
            };
            plan.add(from, bytes as usize);
            at += bytes;
        }
        plan.whole = at >= end;
        Ok(plan)
    }

    /// Copies under the lock, which for a small read costs less than a plan. None if some bytes have to be read by a
    /// call.
    fn read_locked(
        &mut self,
        index: NodeIndex,
        offset: u64,
        into: &mut [IoSliceMut<'_>],
        bytes: usize,
    ) -> Step<Option<usize>> {
        let node = self.nodes.get(index);
        let (inode, end) = (node.inode, offset.saturating_add(bytes as u64).min(node.item.size.get()));
        let generation = self.session()?.words.generation(inode);
        let mut target = Target::at(into, 0);
        let (mut at, mut from_area) = (offset, false);
        while at < end {
            let (found, bytes) = self.locate(index, at, end)?;
            let session = self.session.as_ref().ok_or(Need::Attach)?;
            match found {
                Where::ByCall => return Ok(None),
                Where::Zero => target.fill(bytes as usize, |_, sink, bytes| put_zeros(sink, bytes))?,
                // Log space is released only under the lock, so no check is needed afterwards.
                Where::Log(position, _) => target.fill(bytes as usize, |within, sink, bytes| {
                    copied(session.ring.region().read_to(position + within as u64, sink, bytes))
                })?,
                Where::Segment(segment, position) => {
                    from_area = true;
                    let Some(Some(mapping)) = session.segments.get(&segment) else { return Ok(None) };
                    target.fill(bytes as usize, |within, sink, bytes| {
                        copied(mapping.copy_to(position + within as u64, sink, bytes))
                    })?;
                }
            }
            at += bytes;
        }
        let session = self.session.as_ref().ok_or(Need::Attach)?;
        // A dead daemon no longer raises generations, and the next one may reuse the blocks.
        if from_area && !(session.words.generation_still(inode, generation) && session.words.is_alive()) {
            return Err(Need::Again.into());
        }
        Ok(Some(end.saturating_sub(offset) as usize))
    }
}

/// The memory of a program, filled from a position on.
struct Target<'a, 'b> {
    slices: &'a mut [IoSliceMut<'b>],
    slice: usize,
    within: usize,
}

impl<'a, 'b> Target<'a, 'b> {
    /// The position after so many bytes.
    fn at(slices: &'a mut [IoSliceMut<'b>], mut bytes: usize) -> Self {
        let mut slice = 0;
        while slice < slices.len() && bytes >= slices[slice].len() {
            bytes -= slices[slice].len();
            slice += 1;
        }
        Self { slices, slice, within: bytes }
    }

    /// Fills `bytes` bytes piece by piece: `copy` gets the offset of the piece in the part, and a sink for the piece.
    fn fill(
        &mut self,
        bytes: usize,
        mut copy: impl FnMut(usize, &mut Sink<'_>, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut done = 0;
        while done < bytes {
            let Some(slice) = self.slices.get_mut(self.slice) else { return Err(Error::Io) };
            let room = slice.len() - self.within;
            let count = room.min(bytes - done);
            if count > 0 {
                let mut sink = Sink::from(&mut slice[self.within..self.within + count]);
                copy(done, &mut sink, count)?;
            }
            done += count;
            self.within += count;
            if self.within == slice.len() {
                self.slice += 1;
                self.within = 0;
            }
        }
        Ok(())
    }
}

const ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

fn put_zeros(sink: &mut Sink<'_>, bytes: usize) -> Result<(), Error> {
    let mut left = bytes;
    while left > 0 {
        let count = left.min(ZEROS.len());
        sink.put(&ZEROS[..count]).map_err(|_| Error::BadAddress)?;
        left -= count;
    }
    Ok(())
}

fn copied(result: Result<(), CopyError>) -> Result<(), Error> {
    result.map_err(|error| match error {
        CopyError::Media(_) => Error::Io,
        CopyError::Fault(_) => Error::BadAddress,
    })
}

impl LibFs {
    /// See `vfs::Engine::read`.
    pub(crate) fn read_file(
        &self,
        handle: Handle,
        offset: u64,
        into: &mut [IoSliceMut<'_>],
    ) -> vfs::engine::Result<usize> {
        let asked: usize = into.iter().map(|slice| slice.len()).sum();
        let plans = if asked <= SMALL_BYTES { 0 } else { PLANS_MAX };
        'again: for number in 0..self.limits.attempts {
            if number == plans {
                let read = self.run(|state| {
                    let index = state.readable(handle)?;
                    state.read_locked(index, offset, into, asked)
                })?;
                if let Some(read) = read {
                    return Ok(read);
                }
            }
            let mut done = 0;
            let mut version = None;
            loop {
                let plan = self.run(|state| {
                    let index = state.readable(handle)?;
                    state.plan(index, offset + done as u64, asked - done)
                })?;
                // A read that takes several lookups is one operation: the contents must not change between them.
                if version.is_some_and(|version| version != plan.contents_version) {
                    continue 'again;
                }
                let by_call = self.copy(&plan, offset + done as u64, into, done)?;
                if !plan.still() {
                    continue 'again;
                }
                done += plan.bytes;
                // Bytes that were read by a call may be newer than the lookup, so the contents must not have changed
                // since.
                if (by_call || !plan.whole) && version.is_none() {
                    version = Some(plan.contents_version);
                }
                if plan.whole {
                    if by_call && !self.contents_still(handle, plan.contents_version)? {
                        continue 'again;
                    }
                    return Ok(done);
                }
            }
        }
        Err(Error::Io)
    }

    fn contents_still(&self, handle: Handle, version: u64) -> vfs::engine::Result<bool> {
        self.run(|state| {
            let file = state.file(handle)?;
            state.hold(file.node, LEASE_READ)?;
            Ok(state.nodes.get(file.node).contents_version == version)
        })
    }

    /// Copies the parts of a plan; true if some were read by a call.
    fn copy(
        &self,
        plan: &Plan,
        offset: u64,
        into: &mut [IoSliceMut<'_>],
        done: usize,
    ) -> vfs::engine::Result<bool> {
        let mut target = Target::at(into, done);
        let mut at = offset;
        let mut by_call = false;
        for part in plan.parts.iter().take(plan.count).flatten() {
            match &part.from {
                From::Zero => target.fill(part.bytes, |_, sink, bytes| put_zeros(sink, bytes))?,
                From::Log(position) => {
                    let log = plan.log.as_ref().ok_or(Error::Io)?;
                    target.fill(part.bytes, |within, sink, bytes| {
                        copied(log.read_to(position + within as u64, sink, bytes))
                    })?;
                }
                From::Segment(mapping, position) => target.fill(part.bytes, |within, sink, bytes| {
                    copied(mapping.copy_to(position + within as u64, sink, bytes))
                })?,
                From::ByCall => {
                    by_call = true;
                    let bytes = self.read_call(plan.inode, at, part.bytes)?;
                    target.fill(part.bytes, |within, sink, count| {
                        sink.put(&bytes[within..within + count]).map_err(|_| Error::BadAddress)
                    })?;
                }
            }
            at += part.bytes as u64;
        }
        Ok(by_call)
    }

    /// Reads bytes of the area by calls, as much as one response can contain in each; zeros after its end.
    fn read_call(&self, inode: InodeNumber, offset: u64, bytes: usize) -> vfs::engine::Result<Vec<u8>> {
        let mut read = Vec::with_capacity(bytes);
        let mut response = Vec::new();
        while read.len() < bytes {
            let line = self.line()?;
            let at = offset + read.len() as u64;
            let length = (bytes - read.len()).min(READ_BYTES_MAX) as u64;
            let request = RangeRequest { inode, offset: U64::new(at), length: U64::new(length) };
            match self.call(&line, CallKind::Read, &[request.as_bytes()], &mut response)? {
                Status::Ok if response.is_empty() => break,
                Status::Ok => read.extend_from_slice(&response[..response.len().min(bytes - read.len())]),
                // The lease ended: the caller checks the bytes that were read so far, and finds that they are out of
                // date.
                Status::Sealed | Status::Invalid => break,
                refused => return Err(crate::calls::error_of(refused)),
            }
        }
        read.resize(bytes, 0);
        Ok(read)
    }
}

/// Limit of bytes that one call reads.
const READ_BYTES_MAX: usize = 128 << 10;
