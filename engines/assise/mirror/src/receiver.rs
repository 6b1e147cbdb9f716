//! The receiving side: writes the bytes from a head to the files of its own pool, syncs them, and reports how far
//! each stream is synced. It has no thread: [`Receiver::take`] processes one message.
//!
//! Guarantees: a byte is written only at the end of its stream, and never over a part that the copy's own tree still
//! needs. A stream advances only over complete frames with the right checksum and the next number. Everything that
//! [`Receiver::sync`] reports as synced is on the medium at that time.

use crate::arriving::Stream;
use crate::error::Error;
use crate::greeting::judge_terms;
use crate::ledger::{LEDGER_START, LedgerError, LedgerPosition, ledger_ring_end, next_entry};
use crate::logs::{BEGINNING, FIRST_SPACE, LOG_BYTES_MAX, LogFile, LogSize, RING_START};
use crate::stream::message;
use crate::unexecuted::Unexecuted;
use format::checksum::Salt;
use format::envelope::{check_frame, frame_bytes};
use format::ledger::{Entry, Event as EntryEvent, salt_of};
use format::mirror::{
    DataPart, DataParts, LEDGER_STREAM, LogEnds, LogMark, MirrorEnds, MirrorHead, MirrorHello, MirrorKind,
    MirrorMessage, MirrorOpen, MirrorRefusal, SyncedMark,
};
use format::record::data_blocks_of_header;
use format::{HEADER_BYTES, Incarnation, LogUid, PoolUid, Sequence};
use ipc::{Digested, Time};
use pmem::{MediaError, Medium, Region};
use std::collections::BTreeMap;
use std::ops::Range;
use transport::Connection;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

/// Limit of log files.
const LOGS_MAX: usize = 1 << 12;

/// The rules by which a copy accepts the greeting of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadTerms {
    /// The newest version of the subtree's chain that the copy knows.
    pub version: u64,
}

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stepped {
    /// No message has arrived.
    Nothing,
    /// A message was processed, without a sync.
    Taken,
    /// A message was processed, and the synced positions were reported.
    Synced,
}

/// Says whether the pool has space for the data blocks of records that are not executed, and gets some if there is too little.
pub type SpaceFor = Box<dyn Fn(u64) -> bool + Send>;

/// The file of a log.
struct MirroredLog {
    stream: Stream,
    salt: Salt,
}

/// The receiver of one copy.
pub struct Receiver {
    medium: Medium,
    pool: PoolUid,
    ledger: Stream,
    /// The end of the ledger's stream, and the position up to which the tree contains the ledger, each with its life.
    end: LedgerPosition,
    contained: LedgerPosition,
    /// Key of the life at the end.
    key: [u8; 16],
    logs: BTreeMap<(LogUid, Incarnation), MirroredLog>,
    /// Parts of logs that have got space since they were last taken.
    new_parts: Vec<(Region, Range<u64>)>,
    /// None: the medium is never full.
    space_for: Option<SpaceFor>,
}

impl Receiver {
    /// Opens the files of a pool: the ledger, which the tree contains up to `contained`, with the key of the life
    /// there; and the existing logs, each from the position up to which the tree contains it. Syncs everything that
    /// it finds.
    ///
    /// # Errors
    /// `Media`; `Message`: an entry of another version.
    pub fn open(
        medium: &Medium,
        pool: PoolUid,
        (ledger, contained, mut key): (Region, LedgerPosition, [u8; 16]),
        logs: impl Iterator<Item = (LogUid, Incarnation, Digested)>,
    ) -> Result<Self, Error> {
        let mut end = contained;
        while let Some(frame) = next_entry(&ledger, &end).map_err(|error| match error {
            LedgerError::Media(error) => Error::Media(error),
            LedgerError::Entry(error) => Error::Message(error),
        })? {
            if let EntryEvent::Life { body } = Entry::decode(&frame.bytes)?.event {
                key = body.key;
            }
            end = frame.after;
        }
        ledger.sync()?;
        let ring = (LEDGER_START, ledger_ring_end(&ledger));
        let ledger = Stream::of_ledger(ledger, ring, end.place(), contained.place());
        let logs_there = logs;
        let mut receiver = Self {
            medium: medium.clone(),
            pool,
            ledger,
            end,
            contained,
            key,
            logs: BTreeMap::new(),
            new_parts: Vec::new(),
            space_for: None,
        };
        for (log, incarnation, executed) in logs_there {
            receiver.find_log(log, incarnation, executed)?;
        }
        Ok(receiver)
    }

    fn find_log(&mut self, log: LogUid, incarnation: Incarnation, executed: Digested) -> Result<(), Error> {
        let Some(file) = LogFile::open(&self.medium, (log, incarnation), LOG_BYTES_MAX)? else {
            return Ok(());
        };
        // The head brings what is missing.
        if !file.is_as_made((log, incarnation), file.region().bytes())? {
            return Ok(());
        }
        let (mut frames, mut end) = (file.frames(executed), executed);
        let mut unexecuted = Unexecuted::default();
        while let Some(frame) = frames.next()? {
            end = frame.after;
            let header = frame.bytes.first_chunk().expect("a frame begins with its header");
            unexecuted.add(end.sequence, data_blocks_of_header(header));
        }
        file.sync()?;
        self.add_log((log, incarnation), &file, end, executed);
        if let Some(log) = self.logs.get_mut(&(log, incarnation)) {
            log.stream.unexecuted = unexecuted;
        }
        Ok(())
    }

    fn add_log(&mut self, key: (LogUid, Incarnation), file: &LogFile, end: Digested, executed: Digested) {
        let ring = (RING_START, file.ring_end());
        let stream = Stream::new(file.region().clone(), ring, end, executed);
        self.logs.insert(key, MirroredLog { stream, salt: file.salt() });
    }

    /// From here on nothing is received that this says there is no space for.
    pub fn set_space_for(&mut self, space_for: SpaceFor) {
        self.space_for = Some(space_for);
    }

    /// Data blocks of the records that were received and are not executed.
    pub fn unexecuted_blocks(&self) -> u64 {
        self.logs.values().map(|log| log.stream.unexecuted.blocks()).sum()
    }

    /// Whether there is space for those, and for `more`.
    pub fn has_space(&self, more: u64) -> bool {
        let blocks = self.unexecuted_blocks().saturating_add(more);
        self.space_for.as_ref().is_none_or(|space_for| space_for(blocks))
    }

    /// The parts of logs that have got space since the last call: their memory is untouched.
    pub fn take_new_parts(&mut self) -> Vec<(Region, Range<u64>)> {
        std::mem::take(&mut self.new_parts)
    }

    /// The last synced entry of the ledger: the copy may execute entries up to it.
    pub fn synced(&self) -> Sequence {
        self.ledger.synced
    }

    /// The end of the last complete entry of the ledger.
    pub fn end(&self) -> LedgerPosition {
        self.end
    }

    /// Records the positions up to which the tree contains the ledger and the logs.
    pub fn note_executed(&mut self, contained: LedgerPosition, logs: &[LogMark]) {
        self.contained = contained;
        self.ledger.executed = contained.place();
        for mark in logs {
            if let Some(log) = self.logs.get_mut(&(mark.log, mark.incarnation)) {
                log.stream.executed = Digested { sequence: mark.sequence, position: mark.position.get() };
                log.stream.unexecuted.executed(mark.sequence);
            }
        }
    }

    /// Drops the records of a log's file that the tree does not contain, because some are missing or wrong. The head sends
    /// them again.
    pub fn rewind_log(&mut self, uid: LogUid, incarnation: Incarnation) {
        if let Some(log) = self.logs.get_mut(&(uid, incarnation)) {
            log.stream.rewind();
        }
    }

    /// The last synced record of a log's file.
    pub fn synced_record(&self, uid: LogUid, incarnation: Incarnation) -> Option<Sequence> {
        self.logs.get(&(uid, incarnation)).map(|log| log.stream.synced)
    }

    /// A log's file, opened to read records, and the last synced one.
    ///
    /// # Errors
    /// The error of the medium.
    pub(crate) fn synced_log(
        &self,
        uid: LogUid,
        incarnation: Incarnation,
    ) -> Result<Option<(LogFile, Sequence)>, MediaError> {
        let Some(synced) = self.synced_record(uid, incarnation) else { return Ok(None) };
        let file = LogFile::open(&self.medium, (uid, incarnation), LOG_BYTES_MAX)?;
        Ok(file.map(|file| (file, synced)))
    }

    /// The bytes of a log's file, and its ring.
    pub(crate) fn log_bytes(&self, uid: LogUid, incarnation: Incarnation) -> Option<(&Region, (u64, u64))> {
        self.logs.get(&(uid, incarnation)).map(|log| (&log.stream.region, log.stream.ring))
    }

    /// Forgets a log whose file is removed because the tree contains all of it.
    pub fn remove_log(&mut self, log: LogUid, incarnation: Incarnation) {
        self.logs.remove(&(log, incarnation));
    }

    /// Answers the greeting of a head, on its connection.
    ///
    /// # Errors
    /// `Refused`, after a refusal was sent; `Connection`.
    pub fn greet(
        &mut self,
        connection: &Connection,
        hello: &MirrorHello,
        terms: &HeadTerms,
        until: Time,
    ) -> Result<(), Error> {
        let refusal = judge_terms(hello, terms.version, self.ledger.region.bytes());
        if refusal != MirrorRefusal::None {
            refuse(connection, refusal, until)?;
            return Err(Error::Refused(refusal));
        }
        self.answer(connection, until)
    }

    /// Says what is there, to a head that was greeted, or whose tree was taken in.
    ///
    /// # Errors
    /// `Connection`, `Media`.
    pub fn answer(&mut self, connection: &Connection, until: Time) -> Result<(), Error> {
        self.drop_unfinished()?;
        let ends = MirrorEnds {
            end: self.end.to_mark(),
            contained: self.contained.to_mark(),
            key: self.key,
            refusal: U32::new(MirrorRefusal::None as u32),
            reserved: U32::new(0),
        };
        let marks: Vec<LogEnds> = self.logs.iter().map(|(key, log)| ends_of(*key, &log.stream)).collect();
        let room = connection.message_bytes_max() - size_of::<MirrorHead>() - size_of::<MirrorEnds>();
        let mut left = &marks[..];
        loop {
            let (part, rest) = left.split_at(left.len().min(room / size_of::<LogEnds>()));
            left = rest;
            let more = !left.is_empty();
            connection.send(&message(MirrorKind::Ends, more, &ends, part), Some(until))?;
            if !more {
                return Ok(());
            }
        }
    }

    /// Drops incomplete frames of the former head; the new one sends them again from the end of each stream. Syncs
    /// all complete frames of the former head.
    fn drop_unfinished(&mut self) -> Result<(), Error> {
        for stream in self.streams() {
            stream.drop_unfinished();
            stream.sync()?;
        }
        Ok(())
    }

    fn streams(&mut self) -> impl Iterator<Item = &mut Stream> {
        std::iter::once(&mut self.ledger).chain(self.logs.values_mut().map(|log| &mut log.stream))
    }

    /// Processes a message of a greeted head. If the message requests it, syncs everything and passes the reports to
    /// `say`.
    ///
    /// # Errors
    /// `Message`, `Broken`: the head violates the protocol. `Media`. Errors of `say`. The caller closes the
    /// connection.
    pub fn take(
        &mut self,
        came: &[u8],
        mut say: impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<Stepped, Error> {
        match MirrorMessage::decode(came)? {
            MirrorMessage::Open(open) => self.open_log(&open).map(|()| Stepped::Taken),
            MirrorMessage::Data { parts, sync } => {
                self.write(parts)?;
                if !sync {
                    return Ok(Stepped::Taken);
                }
                for answer in self.sync()? {
                    say(&answer)?;
                }
                Ok(Stepped::Synced)
            }
            _ => Err(Error::Broken("a head sends data")),
        }
    }

    fn open_log(&mut self, open: &MirrorOpen) -> Result<(), Error> {
        let key = (open.log, open.incarnation);
        let bytes = open.file_bytes.get();
        let fits = bytes <= LOG_BYTES_MAX && bytes >= RING_START + HEADER_BYTES as u64;
        // The file exists from an earlier connection of which this head does not know.
        let is_empty = |log: &MirroredLog| {
            log.stream.end == Digested { sequence: open.before, ..BEGINNING }
                && log.stream.region.bytes() == bytes
        };
        if self.logs.get(&key).is_some_and(is_empty) {
            return Ok(());
        }
        if self.logs.contains_key(&key) || self.logs.len() >= LOGS_MAX || !fits {
            return Err(Error::Broken("a log that is there, or cannot be"));
        }
        // A removal that a crash interrupted has left a file of this name.
        match self.medium.remove(&crate::logs::log_file(key.0, key.1)) {
            Ok(()) | Err(MediaError::NotFound) => {}
            Err(error) => return Err(error.into()),
        }
        let size = LogSize { file_bytes: bytes, space: FIRST_SPACE };
        let create = || LogFile::create(&self.medium, self.pool, key, size, open.owner.get());
        let file = self.medium.with_held(FIRST_SPACE, create)?;
        let before = Digested { sequence: open.before, ..BEGINNING };
        self.add_log(key, &file, before, before);
        let first = 0..FIRST_SPACE.min(bytes);
        if let Some(log) = self.logs.get_mut(&key) {
            log.stream.reserved = first.end;
        }
        self.new_parts.push((file.region().clone(), first));
        Ok(())
    }

    fn write(&mut self, parts: DataParts<'_>) -> Result<(), Error> {
        for (part, bytes) in parts {
            if part.log == LEDGER_STREAM {
                self.ledger.write(part.position(), bytes)?;
                self.follow_ledger()?;
            } else {
                self.write_log(&part, bytes)?;
            }
        }
        Ok(())
    }

    fn write_log(&mut self, part: &DataPart, bytes: &[u8]) -> Result<(), Error> {
        let log = self.logs.get_mut(&(part.log, part.incarnation));
        let MirroredLog { stream, salt } = log.ok_or(Error::Broken("bytes of a log that is not there"))?;
        let new = stream.reserve(&self.medium, part.position() + bytes.len() as u64)?;
        self.new_parts.extend(new.map(|range| (stream.region.clone(), range)));
        let (end, blocks) = (stream.end, stream.unexecuted.blocks());
        stream.write_frames(*salt, part.position(), bytes)?;
        let needs_more = stream.unexecuted.blocks() > blocks;
        if needs_more && !self.has_space(0) {
            if let Some(log) = self.logs.get_mut(&(part.log, part.incarnation)) {
                log.stream.go_back(end);
            }
            return Err(MediaError::NoSpace.into());
        }
        Ok(())
    }

    /// Advances the end of the ledger over complete entries, also into a new life.
    fn follow_ledger(&mut self) -> Result<(), Error> {
        while let Some((frame, after)) = self.ledger.whole_entry()? {
            let of_life = check_frame(salt_of(self.end.life), &frame).is_ok();
            if !of_life {
                check_frame(salt_of(self.end.life.next()), &frame)?;
            }
            let mut life = self.end.life;
            match Entry::decode(&frame)?.event {
                EntryEvent::Life { body } if !of_life && body.life == life.next() => {
                    (life, self.key) = (body.life, body.key);
                }
                EntryEvent::Pad => {}
                _ if of_life => {}
                _ => return Err(Error::Broken("an entry of a life that did not begin")),
            }
            self.ledger.advance(frame_bytes(frame.len() as u64 - HEADER_BYTES as u64), after);
            self.end = LedgerPosition { sequence: after.sequence, position: after.position, life };
        }
        Ok(())
    }

    /// Syncs all received bytes, and returns the messages that report it.
    ///
    /// # Errors
    /// `Media`: the contents of the medium are unknown, and no message is returned.
    pub fn sync(&mut self) -> Result<Vec<Vec<u8>>, Error> {
        let mut marks = Vec::new();
        for (key, log) in &mut self.logs {
            if log.stream.touched {
                log.stream.sync()?;
                marks.push(SyncedMark { log: key.0, sequence: log.stream.synced });
            }
        }
        if self.ledger.touched {
            self.ledger.sync()?;
            marks.push(SyncedMark { log: LEDGER_STREAM, sequence: self.ledger.synced });
        }
        let messages = marks.chunks(MARKS_IN_MESSAGE);
        Ok(messages.map(|marks| message(MirrorKind::Synced, false, &[] as &[u8], marks)).collect())
    }
}

/// Marks in one message: fewer than any limit.
const MARKS_IN_MESSAGE: usize = 64;

/// The state of a log file, as a part of a message.
fn ends_of((log, incarnation): (LogUid, Incarnation), stream: &Stream) -> LogEnds {
    LogEnds {
        log,
        end: stream.end.sequence,
        end_position: stream.end.position.into(),
        executed: stream.executed.sequence,
        executed_position: stream.executed.position.into(),
        incarnation,
        reserved: U32::new(0),
    }
}

/// Sends a refusal to a head.
///
/// # Errors
/// `Connection`.
pub fn refuse(connection: &Connection, refusal: MirrorRefusal, until: Time) -> Result<(), Error> {
    let mut ends: MirrorEnds = zerocopy::FromZeros::new_zeroed();
    ends.refusal = U32::new(refusal as u32);
    connection.send(&message(MirrorKind::Ends, false, &ends, &[] as &[u8]), Some(until))?;
    Ok(())
}

/// Reports the positions up to which a tree contains ledger and logs.
///
/// # Errors
/// `Connection`.
pub fn say_executed(
    connection: &Connection,
    contained: &LedgerPosition,
    logs: &[LogMark],
) -> Result<(), Error> {
    let mark = contained.to_mark();
    let mut chunks = logs.chunks(MARKS_IN_MESSAGE);
    loop {
        let part = chunks.next().unwrap_or_default();
        connection.send(&message(MirrorKind::Executed, false, mark.as_bytes(), part), None)?;
        if chunks.len() == 0 {
            return Ok(());
        }
    }
}

/// Tells the head how far the tree is with one log. The head learns that from the next report, too: this one is left out,
/// and the result false, if the head is slow to take messages, or gone.
pub fn say_progress(connection: &Connection, contained: &LedgerPosition, log: &LogMark) -> bool {
    let report =
        message(MirrorKind::Executed, false, contained.to_mark().as_bytes(), std::slice::from_ref(log));
    connection.send_optional(&report).is_ok_and(|sent| sent)
}
