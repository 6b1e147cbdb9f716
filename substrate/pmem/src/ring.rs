//! Append ring: a log of frames that validate themselves (Assise §3.2.1).
//!
//! A frame is a 64-byte header with an [`Envelope`] and a payload. It begins and ends on a cache line and never
//! wraps around: where a frame does not fit before the end of the ring, a pad frame (kind 1, no payload) tells that
//! the next one begins at the start. Pads have sequence numbers too. The medium has no tail pointer: a frame
//! continues the log if its sequence, checksum (salted with the log's incarnation) and lengths are right. So one
//! fence makes an append durable, and a torn or old frame ends the log.
//!
//! The owner advances the start of the live frames ([`AppendRing::release_to`]); live frames are never overwritten.
//! The owner may use a first part of the ring only, and more of it later ([`AppendRing::use_up_to`]): a pad stands before the
//! end of that part then, as it does before the end of the ring, so a reader needs not know of it.
//! The bytes behind the live frames are arbitrary: after a crash the log must continue with the salt of a new incarnation,
//! since otherwise an intact frame behind a torn one could become valid.
//!
//! An append makes no system call and allocates nothing. The stored bytes are those of the checksum: sources are
//! loaded once. Cost: header and payload rounded up to lines, one fence, and a number of writes that depends on the
//! payload:
//!
//! - at most 256 bytes: one write (`short`);
//! - one longer piece of memory: checksummed while it is copied, with one write for it, one for an end of less than
//!   128 bytes, and one for the header (`fold`);
//! - several pieces, or a processor that cannot do this: in pieces of about 4 KB, kept for the checksum in a buffer
//!   in the first-level cache, with one write for each, one for an end that fills no line, and one for the header.
//!
//! `cargo run --release -p pmem --example floors` compares the cost with its lower bound.

use crate::copy::{Fault, Source};
use crate::fold::{self, Folder, STRIDE};
use crate::primitives::Summer;
use crate::region::Region;
use crate::short;
use crate::{LINE_BYTES, MediaError};
use format::checksum::{Running, Salt};
use format::envelope::{FRAME_ALIGN, FRAME_VERSION, checksum_header, frame_bytes};
use format::{Envelope, HEADER_BYTES, Sequence};
use std::mem::MaybeUninit;
use zerocopy::{FromBytes, IntoBytes};

/// Kind of a pad frame, the same for records and ledger entries.
pub const PAD_KIND: u8 = 1;

const _: () = assert!(format::record::Kind::Pad as u8 == PAD_KIND);
const _: () = assert!(format::ledger::Kind::Pad as u8 == PAD_KIND);
const _: () = assert!(FRAME_ALIGN == LINE_BYTES && HEADER_BYTES == LINE_BYTES);

/// Bytes that are copied, checksummed and stored at a time.
const PIECE_BYTES: usize = 4096 + HEADER_BYTES;

/// A position between two frames: the offset in the region where the next one begins, and its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPosition {
    /// Offset in the region.
    pub position: u64,
    /// Sequence of the frame at this position.
    pub sequence: Sequence,
}

/// Position of an appended frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended {
    /// Offset of the frame in the region.
    pub position: u64,
    /// Sequence of the frame; a pad before it has the previous one.
    pub sequence: Sequence,
}

/// Reason why no frame was appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppendError {
    /// The ring has no space for the frame now.
    Full,
    /// A source could not be read.
    Fault,
}

impl From<Fault> for AppendError {
    fn from(_: Fault) -> Self {
        Self::Fault
    }
}

/// The appending side of a log.
pub struct AppendRing {
    region: Region,
    /// Offset of the first byte of the ring in its region.
    start: u64,
    /// Offset of the byte after the ring.
    end: u64,
    /// Offset behind which no frame reaches. If it is not the end of the ring, the header of a pad fits behind it.
    frames_end: u64,
    salt: Salt,
    /// Checksum of no bytes with the salt: each frame's checksum begins with a copy.
    empty_sum: Running,
    head: RingPosition,
    tail: RingPosition,
    /// Bytes of the whole ring from head to tail, which a pad fills up to its end.
    live: u64,
}

impl std::fmt::Debug for AppendRing {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { start, end, frames_end, head, tail, .. } = self;
        write!(
            formatter,
            "a ring {start}..{end}, used to {frames_end}, with frames from {head:?} to {tail:?}"
        )
    }
}

impl AppendRing {
    /// A ring from `start` to the end of the region, with live frames from `head` to `tail`. A new ring has both at
    /// `start` with sequence 1.
    ///
    /// # Panics
    /// If `start` is not on a line, no frame fits, or the positions are not two positions of the ring, in order.
    pub fn new(region: Region, start: u64, salt: Salt, head: RingPosition, tail: RingPosition) -> Self {
        let end = ring_end(&region, start);
        let live = live_between(start, end, head, tail);
        Self { region, start, end, frames_end: end, salt, empty_sum: Running::new(salt), head, tail, live }
    }

    /// An empty ring whose next frame is written at its start.
    ///
    /// # Panics
    /// If `start` is not on a line, or no frame fits.
    pub fn empty(region: Region, start: u64, salt: Salt, next: Sequence) -> Self {
        let place = RingPosition { position: start, sequence: next };
        Self::new(region, start, salt, place, place)
    }

    /// Only the part of the ring before this offset in the region is written to from now on, or all of it if it ends there.
    ///
    /// # Panics
    /// If a frame was appended behind that, or none fits.
    pub fn use_up_to(&mut self, offset: u64) {
        let lines_end = offset / FRAME_ALIGN as u64 * FRAME_ALIGN as u64;
        let frames_end = if lines_end >= self.end { self.end } else { lines_end - HEADER_BYTES as u64 };
        let live_end = if self.is_wrapped() { self.head.position } else { self.tail.position };
        assert!(self.start < frames_end && live_end <= frames_end, "{self:?} is used up to {offset}");
        self.frames_end = frames_end;
    }

    /// Whether the live frames go on at the start of the ring.
    pub fn is_wrapped(&self) -> bool {
        self.live > 0 && self.tail.position <= self.head.position
    }

    /// Appends a frame, behind a fence when this returns. The call fills in sequence and checksum of the header;
    /// the envelope contains the length of the payload.
    ///
    /// # Errors
    /// `Full`, `Fault`; the ring is unchanged then.
    ///
    /// # Panics
    /// If the envelope's length is not that of the payload.
    #[inline]
    pub fn append(
        &mut self,
        mut header: [u8; HEADER_BYTES],
        payload: &[Source<'_>],
    ) -> Result<Appended, AppendError> {
        let payload_bytes = match payload {
            [source] => source.bytes() as u64,
            sources => sources.iter().map(|source| source.bytes() as u64).sum(),
        };
        let place = self.place_for(frame_bytes(payload_bytes)).ok_or(AppendError::Full)?;
        match Summer::get() {
            Some(summer) if payload_bytes <= short::PAYLOAD_BYTES_MAX as u64 => {
                let place = (self.salt, place.sequence, place.position);
                short::write(summer, &self.region, place, &header, (payload, payload_bytes as usize))?;
            }
            _ => self.append_long(place, &mut header, (payload, payload_bytes))?,
        }
        if place.position != self.tail.position {
            self.pad();
        }
        // Orders the frame, and the pad before it, before the commit word that makes the frame valid and before any
        // later frame. Pairs with the scan of recovery.
        self.region.fence();
        let bytes = frame_bytes(payload_bytes);
        self.live += bytes;
        self.tail =
            RingPosition { position: self.wrapped(place.position + bytes), sequence: place.sequence.next() };
        Ok(Appended { position: place.position, sequence: place.sequence })
    }

    /// Stores a frame with a long payload; it is durable after the next fence.
    #[inline]
    fn append_long(
        &self,
        place: RingPosition,
        header: &mut [u8; HEADER_BYTES],
        (payload, payload_bytes): (&[Source<'_>], u64),
    ) -> Result<(), Fault> {
        match (Folder::get(), payload) {
            (Some(folder), [source]) if source.bytes() >= STRIDE => fold::write(
                folder,
                &self.region,
                (self.salt, place.sequence, place.position),
                header,
                *source,
            ),
            _ => {
                set_envelope(header, place.sequence, payload_bytes);
                write_frame(&self.region, self.empty_sum.clone(), place.position, header, payload)
            }
        }
    }

    /// Position of a frame of `bytes` bytes, behind a pad if necessary; `None` if it does not fit.
    #[inline]
    fn place_for(&self, bytes: u64) -> Option<RingPosition> {
        let before_end = self.frames_end - self.tail.position;
        if bytes <= before_end {
            return (bytes <= self.free_bytes()).then_some(self.tail);
        }
        let with_pad = bytes.checked_add(before_end)?;
        let behind_pad = RingPosition { position: self.start, sequence: self.tail.sequence.next() };
        (with_pad <= self.free_bytes()).then_some(behind_pad)
    }

    /// Writes a pad up to the end of the ring. The frame after it is stored already, and one fence covers both.
    fn pad(&mut self) {
        let mut header = [0; HEADER_BYTES];
        let envelope = Envelope::new(PAD_KIND, 0, 0);
        header[..size_of::<Envelope>()].copy_from_slice(envelope.as_bytes());
        set_envelope(&mut header, self.tail.sequence, 0);
        let sum = checksum_header(self.salt, &header).finish();
        header[..CHECKSUM_BYTES].copy_from_slice(&sum.to_le_bytes());
        self.region.write(self.tail.position, &header);
        self.live += self.end - self.tail.position;
        self.tail = RingPosition { position: self.start, sequence: self.tail.sequence.next() };
    }

    fn wrapped(&self, position: u64) -> u64 {
        if position == self.end { self.start } else { position }
    }

    /// Releases the frames before `place`: their bytes may be overwritten.
    ///
    /// # Panics
    /// If the numbers of `place` show that it is not a position between live frames.
    pub fn release_to(&mut self, place: RingPosition) {
        assert!(self.head.sequence <= place.sequence, "a release to {place:?} from {:?}", self.head);
        let live = live_between(self.start, self.end, place, self.tail);
        assert!(live <= self.live, "a release to {place:?} brings frames back, live are {:?}", self.head);
        self.head = place;
        self.live = live;
    }

    /// Start of the live frames.
    pub fn head(&self) -> RingPosition {
        self.head
    }

    /// Position of the next frame, if no pad is needed.
    pub fn tail(&self) -> RingPosition {
        self.tail
    }

    /// Bytes of the part of the ring that is used.
    pub fn bytes(&self) -> u64 {
        self.frames_end - self.start
    }

    /// Bytes of that part from head to tail.
    pub fn live_bytes(&self) -> u64 {
        self.bytes() - self.free_bytes()
    }

    /// Number of bytes that are not live. A frame that must begin at the start also needs space for the pad.
    #[inline]
    pub fn free_bytes(&self) -> u64 {
        if self.is_wrapped() { self.head.position - self.tail.position } else { self.bytes() - self.live }
    }

    /// The region of the ring.
    pub fn region(&self) -> &Region {
        &self.region
    }
}

fn ring_end(region: &Region, start: u64) -> u64 {
    let end = region.bytes() / FRAME_ALIGN as u64 * FRAME_ALIGN as u64;
    assert!(start.is_multiple_of(FRAME_ALIGN as u64) && start < end, "a ring from {start} to {end}");
    end
}

fn check_place(start: u64, end: u64, place: RingPosition) {
    let on_line = place.position.is_multiple_of(FRAME_ALIGN as u64);
    assert!(on_line && (start..end).contains(&place.position), "{place:?} is not in the ring {start}..{end}");
}

/// Number of bytes of the live frames.
fn live_between(start: u64, end: u64, head: RingPosition, tail: RingPosition) -> u64 {
    check_place(start, end, head);
    check_place(start, end, tail);
    assert!(head.sequence <= tail.sequence, "live frames from {head:?} to {tail:?}");
    if head.sequence == tail.sequence {
        assert!(head == tail, "no live frames, yet from {head:?} to {tail:?}");
        return 0;
    }
    match tail.position.checked_sub(head.position) {
        Some(0) => end - start,
        Some(between) => between,
        None => end - start - (head.position - tail.position),
    }
}

fn set_envelope(header: &mut [u8; HEADER_BYTES], sequence: Sequence, payload_bytes: u64) {
    let (envelope, _) =
        Envelope::mut_from_prefix(header.as_mut_slice()).expect("a header begins with an envelope");
    assert!(u64::from(envelope.payload_bytes.get()) == payload_bytes, "a header that fits its payload");
    envelope.version = FRAME_VERSION;
    envelope.sequence = sequence;
}

/// Bytes of the checksum, which is the first field of the envelope and covers all bytes after it.
const CHECKSUM_BYTES: usize = size_of::<u32>();

/// Buffer on the stack for a piece of a frame. Not cleared, since clearing would cost as much as a small append.
#[repr(align(64))]
struct Piece([MaybeUninit<u8>; PIECE_BYTES]);

/// Copies, checksums and stores a frame; it is durable after the next fence. `sum` is the start of the frame's
/// checksum.
fn write_frame(
    region: &Region,
    mut sum: Running,
    position: u64,
    header: &mut [u8; HEADER_BYTES],
    payload: &[Source<'_>],
) -> Result<(), Fault> {
    let mut piece = Piece([MaybeUninit::uninit(); PIECE_BYTES]);
    let mut gather = Gather { sources: payload, current: Source::from(&[]) };
    // Each piece is stored before it is checksummed. The header stands before the first one for the checksum, and
    // is stored last.
    piece.0[..HEADER_BYTES].write_copy_of_slice(header);
    let bytes = gather.store(region, position + HEADER_BYTES as u64, &mut piece.0[HEADER_BYTES..])?.len();
    // SAFETY: the header and the bytes stored behind it have just been filled.
    sum.update(unsafe { piece.0[CHECKSUM_BYTES..HEADER_BYTES + bytes].assume_init_ref() });
    let mut stored = HEADER_BYTES + bytes;
    while !gather.is_empty() {
        let part = gather.store(region, position + stored as u64, &mut piece.0)?;
        sum.update(part);
        stored += part.len();
    }
    header[..CHECKSUM_BYTES].copy_from_slice(&sum.finish().to_le_bytes());
    region.write(position, header);
    Ok(())
}

/// Sources as one sequence of bytes.
struct Gather<'a, 'b> {
    sources: &'b [Source<'a>],
    current: Source<'a>,
}

impl Gather<'_, '_> {
    fn is_empty(&self) -> bool {
        self.current.bytes() == 0 && self.sources.iter().all(|source| source.bytes() == 0)
    }

    /// Fills `target`, whole lines, as far as there are bytes. Stores that part with zeros up to the end of its
    /// last line, and returns the part.
    #[inline]
    fn store<'t>(
        &mut self,
        region: &Region,
        position: u64,
        target: &'t mut [MaybeUninit<u8>],
    ) -> Result<&'t [u8], Fault> {
        let (mut filled, mut stored) = (0, 0);
        while filled < target.len() {
            if self.current.bytes() == 0 {
                let Some((next, rest)) = self.sources.split_first() else { break };
                (self.current, self.sources) = (*next, rest);
                continue;
            }
            let bytes = self.current.bytes().min(target.len() - filled);
            // Whole lines are stored directly in the region if no bytes before them wait for the rest of their
            // line.
            let lines = if stored == filled { bytes / LINE_BYTES * LINE_BYTES } else { 0 };
            if lines > 0 {
                let part = &mut target[filled..filled + lines];
                region.write_lines(position + filled as u64, &mut self.current, part)?;
                (filled, stored) = (filled + lines, filled + lines);
                continue;
            }
            let part = &mut target[filled..filled + bytes];
            // SAFETY: the part is exclusive to this call and has this length.
            unsafe { self.current.take_raw(part.as_mut_ptr().cast(), bytes)? };
            filled += bytes;
        }
        let end = filled.next_multiple_of(LINE_BYTES);
        target[filled..end].fill(MaybeUninit::new(0));
        // SAFETY: the copies above filled all bytes before `filled`, and the rest of the line was filled after
        // them.
        let lines = unsafe { target[..end].assume_init_ref() };
        if stored < end {
            region.write(position + stored as u64, &lines[stored..]);
        }
        Ok(&lines[..filled])
    }
}

/// A frame that a scan found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Offset of the frame in the region.
    pub position: u64,
    /// Header and payload, without the filling: the input of `Record::decode`.
    pub bytes: Vec<u8>,
    /// Envelope of the frame, checked.
    pub envelope: Envelope,
}

/// Reads frames from a ring, in order, up to the first invalid one. No contents of the ring can make it panic, load
/// a byte twice, or allocate more than the largest permitted frame.
pub struct Scan {
    region: Region,
    start: u64,
    end: u64,
    salt: Salt,
    next: RingPosition,
    frame_bytes_max: u64,
    /// Bytes of the ring not yet scanned: a scan covers the ring once.
    left: u64,
}

/// Scans the ring that begins at `start` of the region, from a position on. Frames of more than `frame_bytes_max`
/// bytes count as invalid. Pads are yielded as well: they have sequences.
///
/// # Panics
/// If the position is not within the ring.
pub fn scan(region: &Region, start: u64, salt: Salt, from: RingPosition, frame_bytes_max: u64) -> Scan {
    let end = ring_end(region, start);
    check_place(start, end, from);
    Scan { region: region.clone(), start, end, salt, next: from, frame_bytes_max, left: end - start }
}

impl Scan {
    /// Position after the last frame that was yielded.
    pub fn place(&self) -> RingPosition {
        self.next
    }

    fn read_next(&mut self) -> Result<Option<Frame>, MediaError> {
        let room = self.left.min(self.end - self.next.position);
        if room < HEADER_BYTES as u64 {
            return Ok(None);
        }
        let mut header = [0; HEADER_BYTES];
        self.region.read(self.next.position, &mut header)?;
        let Ok(envelope) = Envelope::decode(&header) else { return Ok(None) };
        let bytes = envelope.frame_bytes();
        let is_pad = envelope.kind == PAD_KIND;
        let expected = envelope.sequence == self.next.sequence
            && bytes <= room
            && bytes <= self.frame_bytes_max
            && !(is_pad && envelope.payload_bytes.get() != 0);
        if !expected {
            return Ok(None);
        }
        // A frame that is longer than an address does not fit the ring.
        let payload_bytes = envelope.payload_bytes.get() as usize;
        let mut frame = vec![0; HEADER_BYTES + payload_bytes];
        let (frame_header, payload) = frame.split_at_mut(HEADER_BYTES);
        frame_header.copy_from_slice(&header);
        self.region.read(self.next.position + HEADER_BYTES as u64, payload)?;
        if format::envelope::check_frame(self.salt, &frame).is_err() {
            return Ok(None);
        }
        let position = self.next.position;
        let taken = if is_pad { self.end - position } else { bytes };
        let after = position + taken;
        self.left -= taken.min(self.left);
        self.next.position = if after == self.end { self.start } else { after };
        self.next.sequence = self.next.sequence.next();
        Ok(Some(Frame { position, bytes: frame, envelope }))
    }
}

impl Iterator for Scan {
    type Item = Result<Frame, MediaError>;

    /// The next frame; an `Unreadable` error ends the log as an invalid frame does, unless the caller stops before.
    fn next(&mut self) -> Option<Self::Item> {
        let read = self.read_next();
        if !matches!(read, Ok(Some(_))) {
            self.left = 0;
        }
        read.transpose()
    }
}
