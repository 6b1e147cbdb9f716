//! The bytes of one file, the ledger or a log, as they arrive at a copy: where they are written, and over which frames the
//! file advances.
//!
//! Guarantees: a byte is written only behind what came before, and never over a part that the copy's own tree still needs.
//! The end moves only over complete frames with the next number; over those of a log only with the right checksum. An entry
//! of the ledger becomes valid as a whole.

use crate::error::Error;
use crate::logs::bytes_between;
use crate::unexecuted::Unexecuted;
use format::checksum::{Running, Salt};
use format::envelope::{Envelope, checksum_header};
use format::record::data_blocks_of_header;
use format::{DecodeError, FRAME_ALIGN, HEADER_BYTES, Sequence};
use ipc::Digested;
use pmem::ring::PAD_KIND;
use pmem::{MediaError, Medium, Region};
use std::ops::Range;

/// A log's file gets space for so many bytes more than arrive, if there is so much.
const RESERVE_STEP: u64 = 2 << 20;

/// The frames received for one file.
pub(crate) struct Stream {
    pub region: Region,
    /// Start and end of its ring.
    pub ring: (u64, u64),
    /// The end of its last complete frame.
    pub end: Digested,
    /// Number of bytes received behind `end`, of an incomplete frame.
    pending: u64,
    /// The sequence that was last reported as synced.
    pub synced: Sequence,
    /// The bytes of the file before this have space.
    pub reserved: u64,
    /// True if bytes were written since the last sync.
    pub touched: bool,
    /// The position up to which this copy's tree contains the stream.
    pub executed: Digested,
    /// For the ledger only. An entry becomes valid as a whole, and only after all earlier ones, as at the head.
    unfinished: Option<UnfinishedEntry>,
    /// For logs only: the frame of which a part has arrived. It is checked while it arrives, and not read again.
    arriving: Option<ArrivingFrame>,
    /// For logs only: data blocks that the records need which the tree does not contain.
    pub unexecuted: Unexecuted,
}

/// A partly received frame of a log.
struct ArrivingFrame {
    checksum: Running,
    expected: u32,
    /// Length of the frame.
    bytes: u64,
    /// Bytes of its payload, and of the whole frame, that are missing.
    payload_left: u64,
    left: u64,
    after: Digested,
    /// Data blocks that its record needs.
    data_blocks: u64,
}

impl ArrivingFrame {
    /// Takes bytes that follow; returns those behind the frame.
    fn take<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let at_most = |left: u64| usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
        let (payload, taken) = (at_most(self.payload_left), at_most(self.left));
        self.checksum.update(&bytes[..payload]);
        self.payload_left -= payload as u64;
        self.left -= taken as u64;
        &bytes[taken..]
    }
}

/// A partly received entry. Its first line, which makes it valid, is written last.
#[derive(Default)]
struct UnfinishedEntry {
    /// The first line and its position.
    first: Option<(u64, Vec<u8>)>,
    /// Number of bytes behind the first line that are missing.
    left: u64,
}

impl UnfinishedEntry {
    fn write(&mut self, region: &Region, position: u64, bytes: &[u8]) -> Result<(), Error> {
        for (line, at) in bytes.chunks(FRAME_ALIGN).zip((position..).step_by(FRAME_ALIGN)) {
            if self.first.is_none() {
                self.left = Envelope::decode(line)?.frame_bytes() - FRAME_ALIGN as u64;
                self.first = Some((at, line.to_vec()));
            } else {
                region.write(at, line);
                self.left -= FRAME_ALIGN as u64;
            }
            if self.left == 0
                && let Some((at, line)) = self.first.take()
            {
                region.fence();
                region.write(at, &line);
                region.fence();
            }
        }
        Ok(())
    }
}

impl Stream {
    pub fn new(region: Region, ring: (u64, u64), end: Digested, executed: Digested) -> Self {
        let synced = end.sequence;
        let (reserved, unfinished, arriving) = (0, None, None);
        Self {
            region,
            ring,
            end,
            pending: 0,
            synced,
            reserved,
            touched: false,
            executed,
            unfinished,
            arriving,
            unexecuted: Unexecuted::default(),
        }
    }

    /// Same for the ledger.
    pub fn of_ledger(region: Region, ring: (u64, u64), end: Digested, executed: Digested) -> Self {
        let unfinished = Some(UnfinishedEntry::default());
        Self { unfinished, ..Self::new(region, ring, end, executed) }
    }

    /// Gets space for the file up to a position in its ring, and for some more; gives the part that has got it.
    ///
    /// # Errors
    /// The error of the medium.
    pub fn reserve(&mut self, medium: &Medium, up_to: u64) -> Result<Option<Range<u64>>, MediaError> {
        if up_to <= self.reserved || up_to > self.ring.1 {
            return Ok(None);
        }
        let more = up_to.saturating_add(RESERVE_STEP).min(self.region.bytes());
        let mut part = self.reserved..more;
        if self.region.reserve(part.clone()).is_err() {
            part.end = up_to;
            medium.with_held(part.end - part.start, || self.region.reserve(part.clone()))?;
        }
        self.reserved = part.end;
        Ok(Some(part))
    }

    /// Goes back to what the tree contains: the rest arrives again.
    pub fn rewind(&mut self) {
        self.drop_unfinished();
        (self.end, self.synced) = (self.executed, self.executed.sequence);
        self.unexecuted.drop_behind(self.executed.sequence);
    }

    /// Goes back to an end that it had before the last bytes arrived, which are not synced.
    pub fn go_back(&mut self, end: Digested) {
        self.drop_unfinished();
        self.end = end;
        self.unexecuted.drop_behind(end.sequence);
    }

    /// Forgets what has arrived of a frame that is not complete.
    pub fn drop_unfinished(&mut self) {
        (self.pending, self.arriving) = (0, None);
        self.unfinished = self.unfinished.take().map(|_| UnfinishedEntry::default());
    }

    /// Writes received bytes if they belong to the end of the stream.
    pub fn write(&mut self, position: u64, bytes: &[u8]) -> Result<(), Error> {
        let next = self.end.position + self.pending;
        if position != next {
            return Err(Error::Broken("bytes that do not follow what came before"));
        }
        let count = bytes.len() as u64;
        let live = bytes_between(self.ring, self.executed, self.end) + self.pending;
        if next + count > self.ring.1 || live + count > self.ring.1 - self.ring.0 {
            return Err(Error::Broken("bytes beyond the ring, or onto what is not executed"));
        }
        match &mut self.unfinished {
            Some(unfinished) => unfinished.write(&self.region, position, bytes)?,
            None => self.region.write(position, bytes),
        }
        self.pending += count;
        self.touched = true;
        Ok(())
    }

    /// [`Self::write`] for a log: advances over the frames that are complete now.
    pub fn write_frames(&mut self, salt: Salt, position: u64, bytes: &[u8]) -> Result<(), Error> {
        self.write(position, bytes)?;
        let mut rest = bytes;
        while !rest.is_empty() {
            let mut frame = match self.arriving.take() {
                Some(frame) => frame,
                None => {
                    let (header, behind) = rest.split_first_chunk().ok_or(DecodeError::Truncated)?;
                    rest = behind;
                    self.begin_frame(salt, header)?
                }
            };
            rest = frame.take(rest);
            if frame.left > 0 {
                self.arriving = Some(frame);
            } else if frame.checksum.finish() == frame.expected {
                self.advance(frame.bytes, frame.after);
                self.unexecuted.add(frame.after.sequence, frame.data_blocks);
            } else {
                return Err(DecodeError::Checksum.into());
            }
        }
        Ok(())
    }

    fn begin_frame(&self, salt: Salt, header: &[u8; HEADER_BYTES]) -> Result<ArrivingFrame, Error> {
        let (envelope, after) = self.next_frame(header)?;
        Ok(ArrivingFrame {
            checksum: checksum_header(salt, header),
            expected: envelope.checksum.get(),
            bytes: envelope.frame_bytes(),
            payload_left: envelope.payload_bytes.get().into(),
            left: envelope.frame_bytes() - HEADER_BYTES as u64,
            after,
            data_blocks: data_blocks_of_header(header),
        })
    }

    /// The envelope of the frame behind the end, and the position after the frame.
    fn next_frame(&self, header: &[u8]) -> Result<(Envelope, Digested), Error> {
        let envelope = Envelope::decode(header)?;
        let is_pad = envelope.kind == PAD_KIND;
        let sequence = self.end.sequence.next();
        let end = self.end.position + envelope.frame_bytes();
        if envelope.sequence != sequence || end > self.ring.1 || (is_pad && envelope.payload_bytes.get() != 0)
        {
            return Err(Error::Broken("a frame that does not follow"));
        }
        let after = if is_pad || end == self.ring.1 { self.ring.0 } else { end };
        Ok((envelope, Digested { sequence, position: after }))
    }

    /// The entry behind the end of the ledger if all of it has arrived: its bytes, and the position after it.
    pub fn whole_entry(&self) -> Result<Option<(Vec<u8>, Digested)>, Error> {
        if self.pending < HEADER_BYTES as u64 || self.is_unfinished() {
            return Ok(None);
        }
        let mut frame = vec![0; HEADER_BYTES];
        self.region.read(self.end.position, &mut frame)?;
        let (envelope, after) = self.next_frame(&frame)?;
        if self.pending < envelope.frame_bytes() {
            return Ok(None);
        }
        let payload = usize::try_from(envelope.payload_bytes.get()).expect("a ring fits an address space");
        frame.resize(HEADER_BYTES + payload, 0);
        self.region.read(self.end.position + HEADER_BYTES as u64, &mut frame[HEADER_BYTES..])?;
        Ok(Some((frame, after)))
    }

    /// True if the first line of the frame behind the end is held back.
    fn is_unfinished(&self) -> bool {
        let first = self.unfinished.as_ref().and_then(|entry| entry.first.as_ref());
        first.is_some_and(|(at, _)| *at == self.end.position)
    }

    /// Advances over a checked frame.
    pub fn advance(&mut self, bytes: u64, after: Digested) {
        self.pending -= bytes;
        self.end = after;
    }

    pub fn sync(&mut self) -> Result<(), MediaError> {
        if self.touched {
            self.region.sync()?;
            (self.touched, self.synced) = (false, self.end.sequence);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logs::{BEGINNING, LogFile, LogSize, RING_START};
    use format::record::Kind;
    use format::{Incarnation, LogUid, PoolUid};
    use pmem::Recorder;
    use pmem::ring::{AppendRing, RingPosition};

    const LOG: (LogUid, Incarnation) = (LogUid::new(7), Incarnation::new(1));
    const FILE_BYTES: u64 = RING_START + (256 << 10);

    fn log(medium: &Medium) -> LogFile {
        LogFile::create(
            medium,
            PoolUid::new(1),
            LOG,
            LogSize { file_bytes: FILE_BYTES, space: FILE_BYTES },
            0,
        )
        .unwrap()
    }

    fn stream(log: &LogFile) -> Stream {
        Stream::new(log.region().clone(), (RING_START, log.ring_end()), BEGINNING, BEGINNING)
    }

    /// Bytes of a ring's part.
    fn bytes(log: &LogFile, from: u64, to: u64) -> Vec<u8> {
        let mut bytes = vec![0; (to - from) as usize];
        log.region().read(from, &mut bytes).unwrap();
        bytes
    }

    /// A log with frames of all sizes up to behind the end of the ring, and the places of its frames' ends.
    fn full(medium: &Medium) -> (LogFile, Vec<Digested>) {
        let log = log(medium);
        let mut ring = AppendRing::empty(log.region().clone(), RING_START, log.salt(), Sequence::new(1));
        let mut ends = vec![BEGINNING];
        for length in [0, 10, 64, 4096, 70_000, 1, 150_000] {
            let mut header = [0; HEADER_BYTES];
            header[..24].copy_from_slice(zerocopy::IntoBytes::as_bytes(&Envelope::new(
                Kind::Write as u8,
                0,
                length as u32,
            )));
            ring.append(header, &[vec![length as u8; length].as_slice().into()]).unwrap();
            let end = log.frames(*ends.last().unwrap()).next().unwrap().unwrap().after;
            ends.push(end);
        }
        (log, ends)
    }

    /// Feeds what is between two places, in pieces.
    fn feed(stream: &mut Stream, log: &LogFile, (from, to): (u64, u64), piece: usize) -> Result<(), Error> {
        for (part, at) in bytes(log, from, to).chunks(piece).zip((from..).step_by(piece)) {
            stream.write_frames(log.salt(), at, part)?;
        }
        Ok(())
    }

    #[test]
    fn frames_arrive_in_pieces_of_any_length() {
        let (from, to) = (Recorder::new().medium(), Recorder::new());
        let (source, ends) = full(&from);
        let end = *ends.last().unwrap();
        for piece in [64, 128, 4096, 65_536, 1 << 20] {
            let target = log(&to.medium());
            let mut stream = stream(&target);
            feed(&mut stream, &source, (RING_START, end.position), piece).unwrap();
            assert_eq!((stream.end, stream.pending), (end, 0), "pieces of {piece}");
            let both = [&source, &target].map(|log| bytes(log, RING_START, end.position));
            assert!(both[0] == both[1], "pieces of {piece}");
            to.medium().remove(&target.name).unwrap();
        }
    }

    /// A frame of which a byte is wrong ends the arrival before it. A part of a frame is dropped, and arrives again.
    #[test]
    fn only_whole_and_right_frames_count() {
        let (from, to) = (Recorder::new().medium(), Recorder::new().medium());
        let (source, ends) = full(&from);
        let target = log(&to);
        let mut stream = stream(&target);
        let [before, after] = [ends[4], ends[5]];
        feed(&mut stream, &source, (RING_START, after.position - 64), 65_536).unwrap();
        assert_eq!(stream.end, before);
        stream.drop_unfinished();
        assert!(stream.pending == 0 && stream.end == before);
        let wrong = after.position - 70_000 / 2;
        let [right] = bytes(&source, wrong, wrong + 1)[..] else { panic!("one byte") };
        source.region().write(wrong, &[!right]);
        let fed = feed(&mut stream, &source, (before.position, after.position), 4096);
        assert!(matches!(fed, Err(Error::Message(DecodeError::Checksum))), "{fed:?}");
        assert_eq!(stream.end, before);
        stream.rewind();
        assert_eq!(stream.end, BEGINNING);
        source.region().write(wrong, &[right]);
        feed(&mut stream, &source, (RING_START, after.position), 4096).unwrap();
        assert_eq!(stream.end, after);
    }

    /// The ring's end: a pad has the bytes of its header only, and the frame behind it stands at the start.
    #[test]
    fn frames_go_on_at_the_start_of_the_ring() {
        let (from, to) = (Recorder::new().medium(), Recorder::new().medium());
        let (source, target) = (log(&from), log(&to));
        let mut ring =
            AppendRing::empty(source.region().clone(), RING_START, source.salt(), Sequence::new(1));
        let mut stream = stream(&target);
        let mut at = BEGINNING;
        for length in [100_000, 100_000, 100_000] {
            let mut header = [0; HEADER_BYTES];
            let envelope = Envelope::new(Kind::Write as u8, 0, length);
            header[..24].copy_from_slice(zerocopy::IntoBytes::as_bytes(&envelope));
            ring.append(header, &[vec![7; length as usize].as_slice().into()]).unwrap();
            let mut frames = source.frames(at);
            while let Some(frame) = frames.next().unwrap() {
                let length = (frame.bytes.len() as u64).next_multiple_of(FRAME_ALIGN as u64);
                let piece = bytes(&source, at.position, at.position + length);
                stream.write_frames(source.salt(), at.position, &piece).unwrap();
                at = frame.after;
                assert_eq!((stream.end, stream.pending), (at, 0));
            }
            stream.executed = at;
            ring.release_to(RingPosition { position: at.position, sequence: at.sequence.next() });
        }
        assert!(at.sequence == Sequence::new(4) && at.position < RING_START + 110_000, "{at:?}");
    }
}
