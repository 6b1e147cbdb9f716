//! The records of logs, compared between the next head and a copy before a life begins (`docs/replication.md`, C13).
//!
//! The file of a log belongs to a program, which may change it while no daemon is there that would notice, and the medium
//! may lose a part of it. The file at a copy belongs to the copy's daemon. So where a copy has a record, the copy's counts:
//! the head says which records it has, with a hash; the copy answers where it has others; and the head fetches these.
//!
//! Each question is answered by one message, and neither side holds more than that in memory.

use crate::error::Error;
use crate::greeting::take_message;
use crate::ledger::LedgerPosition;
use crate::logs::{Frames, LogFile};
use crate::receiver::Receiver;
use crate::sender::{CopyEnds, Sender};
use crate::stream::message;
use format::hash::{HashKey, RecordsHash};
use format::mirror::{DataPart, DataParts, LogMark, MirrorHead, MirrorKind, MirrorMessage, RecordsOfLog};
use format::{FRAME_ALIGN, Incarnation, LogUid, Sequence};
use ipc::{Digested, Time};
use pmem::MediaError;
use transport::Connection;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Limit of ranges in a message.
const RANGES_MAX: usize = 64;

/// The records of a log behind `from`, up to `up_to` at most, with their hash. An unreadable record ends them as a missing
/// one does.
pub fn records_of(
    file: &LogFile,
    (log, incarnation): (LogUid, Incarnation),
    from: Digested,
    up_to: Sequence,
    key: &[u8; 16],
) -> (RecordsOfLog, Digested) {
    let (mut end, mut sum) = (from, RecordsHash::default());
    let mut frames = file.frames(from).hashed_by(HashKey::of_life(key));
    while end.sequence < up_to
        && let Ok(Some((after, hash))) = next_hash(&mut frames)
    {
        end = after;
        sum.add(hash);
    }
    let none = no_records((log, incarnation), from);
    (RecordsOfLog { end: end.sequence, hash: sum.to_bytes(), ..none }, end)
}

/// No record of a log behind `from`.
pub fn no_records((log, incarnation): (LogUid, Incarnation), from: Digested) -> RecordsOfLog {
    RecordsOfLog {
        log,
        from: from.sequence,
        from_position: U64::new(from.position),
        end: from.sequence,
        hash: RecordsHash::default().to_bytes(),
        incarnation,
        reserved: U32::new(0),
    }
}

fn next_hash(frames: &mut Frames<'_>) -> Result<Option<(Digested, RecordsHash)>, MediaError> {
    Ok(frames.next()?.and_then(|frame| Some((frame.after, frame.hash?))))
}

impl Sender {
    /// Says to the copy which records the head has. Gives the ranges in which the copy has other or more records, and where
    /// each ends there.
    ///
    /// # Errors
    /// `Connection`, `Message`, `Broken`.
    pub fn check_records(
        &self,
        ends: &mut CopyEnds,
        key: &[u8; 16],
        logs: &[RecordsOfLog],
        mut until: impl FnMut() -> Time,
    ) -> Result<Vec<(RecordsOfLog, Digested)>, Error> {
        let mut other = Vec::new();
        for logs in logs.chunks(RANGES_MAX) {
            let until = until();
            self.connection().send(&message(MirrorKind::CheckRecords, false, key, logs), Some(until))?;
            let answer = self.next_answer(ends, until)?;
            let MirrorMessage::Checked(marks) = MirrorMessage::decode(&answer)? else {
                return Err(Error::Broken("records are answered with marks"));
            };
            for mark in marks {
                let of_mark =
                    |log: &&RecordsOfLog| (log.log, log.incarnation) == (mark.log, mark.incarnation);
                let range = logs.iter().find(of_mark).ok_or(Error::Broken("a mark of another log"))?;
                let end = Digested { sequence: mark.sequence, position: mark.position.get() };
                other.push((*range, end));
            }
        }
        Ok(other)
    }

    /// Fetches bytes of a log's file from the copy: at least a line, at most `bytes`.
    ///
    /// # Errors
    /// `Connection`, `Message`, `Broken`.
    pub fn fetch(
        &self,
        ends: &mut CopyEnds,
        (log, incarnation): (LogUid, Incarnation),
        (position, bytes): (u64, u64),
        until: Time,
    ) -> Result<Vec<u8>, Error> {
        let asked = part_of((log, incarnation), (position, bytes))?;
        self.connection().send(&fetch_of(&asked), Some(until))?;
        let answer = self.next_answer(ends, until)?;
        let MirrorMessage::Data { parts, .. } = MirrorMessage::decode(&answer)? else {
            return Err(Error::Broken("a fetch is answered with data"));
        };
        let fetched = FetchedBytes::of(parts)?;
        if !fetched.answers(&asked) {
            return Err(Error::Broken("other bytes than were asked for"));
        }
        Ok(fetched.bytes)
    }

    /// Asks a copy that is fed for bytes of a log's file, behind everything that was sent to it. [`Self::hear`] gives the answer
    /// among its reports.
    ///
    /// # Errors
    /// `Connection`.
    pub fn ask_for(&mut self, part: &DataPart) -> Result<(), Error> {
        self.send_behind(fetch_of(part))
    }

    /// The next message that answers a question. The copy may report meanwhile how far its tree is.
    fn next_answer(&self, ends: &mut CopyEnds, until: Time) -> Result<Vec<u8>, Error> {
        loop {
            let came = take_message(self.connection(), until)?;
            match MirrorMessage::decode(&came)? {
                MirrorMessage::Executed { ledger, logs } => {
                    ends.note_executed(LedgerPosition::of_mark(&ledger), logs);
                }
                _ => return Ok(came),
            }
        }
    }
}

/// A part of a log's file, in whole lines.
///
/// # Errors
/// `Broken`: no position in a file.
pub fn part_of(
    (log, incarnation): (LogUid, Incarnation),
    (position, bytes): (u64, u64),
) -> Result<DataPart, Error> {
    let line = u32::try_from(position / FRAME_ALIGN as u64).map_err(|_| Error::Broken("no position"))?;
    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX) / FRAME_ALIGN as u32 * FRAME_ALIGN as u32;
    Ok(DataPart { log, incarnation, line: U32::new(line), bytes: U32::new(bytes) })
}

fn fetch_of(part: &DataPart) -> Vec<u8> {
    message(MirrorKind::Fetch, false, part, &[] as &[u8])
}

/// Bytes of a log's file that a copy sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchedBytes {
    /// The part of the file that they are.
    pub part: DataPart,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl FetchedBytes {
    /// # Errors
    /// `Broken`: not one part.
    pub(crate) fn of(mut parts: DataParts<'_>) -> Result<Self, Error> {
        match (parts.next(), parts.next()) {
            (Some((part, bytes)), None) => Ok(Self { part, bytes: bytes.to_vec() }),
            _ => Err(Error::Broken("a fetch is answered with one part")),
        }
    }

    /// Whether they are the beginning of this part, or all of it.
    pub fn answers(&self, asked: &DataPart) -> bool {
        let place = |part: &DataPart| (part.log, part.incarnation, part.line);
        place(&self.part) == place(asked) && self.part.bytes.get() <= asked.bytes.get()
    }
}

/// Whether a message is a question of a head about the records of a copy.
pub fn asks_for_records(message: &[u8]) -> bool {
    let kinds = [MirrorKind::CheckRecords as u8, MirrorKind::Fetch as u8];
    message.first().is_some_and(|kind| kinds.contains(kind))
}

impl Receiver {
    /// Answers a question of a head about the records of this copy. Reading long logs may take longer than a greeting may, so
    /// the answer has no deadline of its own: it is sent unless the connection ends.
    ///
    /// # Errors
    /// `Message`, `Broken`: the head violates the protocol. `Media`, `Connection`.
    pub fn answer_records(&self, connection: &Connection, came: &[u8]) -> Result<(), Error> {
        let answer = match MirrorMessage::decode(came)? {
            MirrorMessage::CheckRecords { key, logs } => {
                let mut marks = Vec::new();
                for range in logs {
                    marks.extend(self.other_records(&key, range)?);
                }
                message(MirrorKind::Checked, false, &[] as &[u8], &marks)
            }
            MirrorMessage::Fetch(part) => self.bytes_of(&part, connection.message_bytes_max())?,
            _ => return Err(Error::Broken("a head asks for records")),
        };
        connection.send(&answer, None)?;
        Ok(())
    }

    /// Where the synced records in a range end, if the head does not have all of them as they are here.
    fn other_records(&self, key: &[u8; 16], range: &RecordsOfLog) -> Result<Option<LogMark>, Error> {
        let Some((file, synced)) = self.synced_log(range.log, range.incarnation)? else { return Ok(None) };
        let from = Digested { sequence: range.from, position: range.from_position.get() };
        let (own, end) = records_of(&file, (range.log, range.incarnation), from, synced, key);
        // Records that cannot be read here, or were overwritten since the tree contains them, are none that count.
        let differs = own != *range && own.end == synced && synced > range.from;
        Ok(differs.then_some(LogMark {
            log: range.log,
            sequence: end.sequence,
            position: U64::new(end.position),
            incarnation: range.incarnation,
            reserved: U32::new(0),
        }))
    }

    /// A message with bytes of a log's file.
    fn bytes_of(&self, part: &DataPart, message_bytes: usize) -> Result<Vec<u8>, Error> {
        let (region, ring) = self
            .log_bytes(part.log, part.incarnation)
            .ok_or(Error::Broken("bytes of a log that is not there"))?;
        let left = ring.1.checked_sub(part.position()).filter(|_| part.position() >= ring.0);
        let room = (message_bytes - size_of::<MirrorHead>() - size_of::<DataPart>()) as u64;
        let bytes = left.unwrap_or(0).min(room).min(part.bytes.get().into()) / FRAME_ALIGN as u64;
        if bytes == 0 {
            return Err(Error::Broken("bytes beyond the ring"));
        }
        let mut data = vec![0; bytes as usize * FRAME_ALIGN];
        region.read_by_kernel(part.position(), &mut data)?;
        let part = DataPart { bytes: U32::new(data.len() as u32), ..*part };
        let head = MirrorHead { kind: MirrorKind::Data as u8, flags: 0, count: U16::new(1) };
        Ok([head.as_bytes(), part.as_bytes(), &data].concat())
    }
}
