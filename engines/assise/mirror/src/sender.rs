//! The sending side: sends the bytes of logs and of the ledger to one copy, in one order.
//!
//! Guarantees: of a log, only complete consecutive frames with the right checksum are sent. Each is read once into
//! memory of this process, and none overwrites a part that the copy's tree does not contain yet. Of the ledger only
//! entries are sent. No call waits: bytes that the connection does not accept now are sent later, in the same order.

use crate::error::Error;
use crate::greeting::{take_answer, terms};
use crate::ledger::{LedgerError, LedgerPosition, next_entry};
use crate::logs::{LogFile, RING_START, bytes_between};
use crate::records::FetchedBytes;
use crate::stream::{DataQueue, Target, message};
use format::mirror::{
    LEDGER_STREAM, LogEnds, LogMark, MirrorEnds, MirrorKind, MirrorMessage, MirrorOpen, MirrorRefusal,
    SyncedMark,
};
use format::{Incarnation, LogUid, Sequence};
use ipc::{Digested, Time};
use pmem::{MediaError, Region};
use std::collections::BTreeMap;
use transport::Connection;
use zerocopy::little_endian::{U32, U64};

/// A deadline that is already over: take only messages that have arrived.
const NOW: Option<Time> = Some(Time::from_ns(0));

/// Limit of log marks in one `Ends` message, and in all of them.
const MARKS_MAX: usize = 1 << 16;

/// Bytes of memory for reading logs that are kept from one call to the next.
const WINDOW_KEPT: usize = 256 << 10;

/// The state of a copy, as the copy reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyEnds {
    /// The synced end of its ledger.
    pub end: LedgerPosition,
    /// The ledger position up to which its tree contains the ledger.
    pub contained: LedgerPosition,
    /// Key of the life at the end of its ledger; zeros before the first life.
    pub key: [u8; 16],
    /// The log files that it has.
    pub logs: Vec<LogEnds>,
}

impl CopyEnds {
    /// Notes what the copy reports about its tree.
    pub(crate) fn note_executed(&mut self, contained: LedgerPosition, marks: &[LogMark]) {
        self.contained = contained;
        for mark in marks {
            let of_mark = |log: &&mut LogEnds| (log.log, log.incarnation) == (mark.log, mark.incarnation);
            if let Some(log) = self.logs.iter_mut().find(of_mark) {
                (log.executed, log.executed_position) = (mark.sequence, mark.position);
            }
        }
    }
}

/// The result of pushing a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogPush {
    /// Everything up to the requested record was pushed, up to this position.
    Done(Digested),
    /// The byte limit was reached; more frames follow this position.
    More(Digested),
    /// No complete frame follows this position: the log ends here.
    Ends(Digested),
}

/// A report of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyReport {
    /// The positions up to which streams are synced.
    Synced(Vec<SyncedMark>),
    /// The positions up to which its tree contains ledger and logs.
    Executed(LedgerPosition, Vec<LogMark>),
    /// Bytes that it was asked for by [`Sender::ask_for`].
    Fetched(FetchedBytes),
}

/// The state of a log that is being sent.
#[derive(Clone, Copy, Debug)]
struct SentLog {
    incarnation: Incarnation,
    sent: Digested,
}

/// The sender of one copy.
pub struct Sender {
    connection: Connection,
    queue: DataQueue,
    ledger: LedgerPosition,
    logs: BTreeMap<LogUid, SentLog>,
    /// Memory in which logs are read.
    window: Vec<u8>,
    /// True if bytes were sent since the last request to sync.
    unasked: bool,
}

impl Sender {
    /// Sends a greeting with the head's terms, and receives the state of the copy.
    ///
    /// # Errors
    /// `Refused`, `Connection`, `Message`, `Broken`.
    pub fn greet(
        connection: Connection,
        (version, ledger_bytes): (u64, u64),
        until: Time,
    ) -> Result<(Self, CopyEnds), Error> {
        let hello = terms(version, ledger_bytes);
        connection.send(&message(MirrorKind::Hello, false, &hello, &[] as &[u8]), Some(until))?;
        let ends = hear_ends(&connection, until)?;
        Ok((Self::of(connection, ends.end), ends))
    }

    /// For a copy whose ledger ends there.
    pub(crate) fn of(connection: Connection, ledger: LedgerPosition) -> Self {
        let queue = DataQueue::new(connection.message_bytes_max());
        let (logs, window) = (BTreeMap::new(), Vec::new());
        Self { connection, queue, ledger, logs, window, unasked: false }
    }

    /// The connection.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// The ledger position up to which the ledger was sent.
    pub fn ledger(&self) -> LedgerPosition {
        self.ledger
    }

    /// Continues a log file from the position that the copy has.
    pub fn resume_log(&mut self, log: LogUid, incarnation: Incarnation, has: Digested) {
        self.logs.insert(log, SentLog { incarnation, sent: has });
    }

    /// The position up to which a log file was sent; `None` if the copy does not know the file.
    pub fn sent(&self, log: LogUid, incarnation: Incarnation) -> Option<Digested> {
        self.logs.get(&log).filter(|sent| sent.incarnation == incarnation).map(|sent| sent.sent)
    }

    /// Makes the copy create a log file, whose first record follows `before`. No effect if the copy knows the file.
    pub fn open_log(
        &mut self,
        (log, incarnation): (LogUid, Incarnation),
        before: Sequence,
        file_bytes: u64,
        owner: u32,
    ) {
        if self.sent(log, incarnation).is_some() {
            return;
        }
        let open =
            MirrorOpen { log, before, file_bytes: U64::new(file_bytes), incarnation, owner: U32::new(owner) };
        self.queue.push(message(MirrorKind::Open, false, &open, &[] as &[u8]));
        let sent = Digested { sequence: before, position: RING_START };
        self.logs.insert(log, SentLog { incarnation, sent });
    }

    /// Forgets a log that has ended.
    pub fn forget_log(&mut self, log: LogUid) {
        self.logs.remove(&log);
    }

    /// Sends frames of a log up to record `up_to`, at most about `bytes_max` bytes. `executed` is the position up to
    /// which the copy's tree contains this file: later parts must not be overwritten. A frame that would overwrite one is
    /// sent later if the head's own tree contains more, up to record `digested`; otherwise the log ends before it.
    ///
    /// # Errors
    /// The error of the medium.
    ///
    /// # Panics
    /// If the copy does not know the log.
    pub fn push_log(
        &mut self,
        (log, file): (LogUid, &LogFile),
        up_to: Sequence,
        (executed, digested): (Digested, Sequence),
        bytes_max: usize,
    ) -> Result<LogPush, MediaError> {
        let entry = self.logs.get_mut(&log).expect("the copy was told of the log");
        let (incarnation, ring) = (entry.incarnation, (RING_START, file.ring_end()));
        let mut frames = file.few_frames(entry.sent, std::mem::take(&mut self.window));
        let mut bytes = 0;
        let pushed = loop {
            let sent = entry.sent;
            if sent.sequence >= up_to {
                break LogPush::Done(sent);
            }
            if bytes >= bytes_max {
                break LogPush::More(sent);
            }
            let Some(frame) = frames.next()? else { break LogPush::Ends(sent) };
            let taken = bytes_between(ring, sent, frame.after);
            if bytes_between(ring, executed, sent) + taken > file.ring_bytes() {
                // The program may have been told of this room before the copy counted. Once the copy has executed all
                // that the head has digested, a log that wraps onto more violates the rule, so it ends here.
                let waits = executed.sequence < digested;
                break if waits { LogPush::More(sent) } else { LogPush::Ends(sent) };
            }
            self.queue.put(Target { log, incarnation, position: sent.position }, frame.bytes);
            bytes += frame.bytes.len();
            entry.sent = frame.after;
            self.unasked = true;
        };
        self.window = frames.into_window();
        self.window.truncate(WINDOW_KEPT);
        self.window.shrink_to(WINDOW_KEPT);
        Ok(pushed)
    }

    /// Sends entries of the ledger up to a position.
    ///
    /// # Errors
    /// `Media`; `Broken`: the ledger no longer contains the entries that the copy lacks.
    pub fn push_ledger(&mut self, region: &Region, up_to: &LedgerPosition) -> Result<(), Error> {
        while self.ledger.sequence < up_to.sequence {
            let read = next_entry(region, &self.ledger).map_err(|error| match error {
                LedgerError::Media(error) => Error::Media(error),
                LedgerError::Entry(error) => Error::Message(error),
            })?;
            let frame = read.ok_or(Error::Broken("the ledger does not reach back to what the copy has"))?;
            let (log, incarnation) = (LEDGER_STREAM, Incarnation::default());
            self.queue.put(Target { log, incarnation, position: self.ledger.position }, &frame.bytes);
            self.ledger = frame.after;
            self.unasked = true;
        }
        Ok(())
    }

    /// Asks the copy to sync everything sent since the last request, and to report it. No effect if nothing was sent.
    pub fn ask(&mut self) {
        if std::mem::take(&mut self.unasked) {
            self.queue.finish(true);
        }
    }

    /// Sends a message behind everything that was put before it.
    ///
    /// # Errors
    /// `Connection`.
    pub(crate) fn send_behind(&mut self, message: Vec<u8>) -> Result<(), Error> {
        self.queue.push(message);
        self.pump()?;
        Ok(())
    }

    /// Sends as much as the connection accepts; true if the queue is empty.
    ///
    /// # Errors
    /// `Connection`.
    pub fn pump(&mut self) -> Result<bool, Error> {
        while let Some(message) = self.queue.first() {
            match self.connection.send(message, NOW) {
                Ok(_) => self.queue.remove_first(),
                Err(transport::Error::TimedOut | transport::Error::Interrupted) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// Decodes a report of the copy.
    ///
    /// # Errors
    /// `Message`, `Broken`.
    pub fn hear(message: &[u8]) -> Result<CopyReport, Error> {
        match MirrorMessage::decode(message)? {
            MirrorMessage::Synced(marks) => Ok(CopyReport::Synced(marks.to_vec())),
            MirrorMessage::Executed { ledger, logs } => {
                Ok(CopyReport::Executed(LedgerPosition::of_mark(&ledger), logs.to_vec()))
            }
            MirrorMessage::Data { parts, .. } => Ok(CopyReport::Fetched(FetchedBytes::of(parts)?)),
            _ => Err(Error::Broken("a copy says how far it is, or answers")),
        }
    }
}

/// Receives the answer to a greeting.
pub(crate) fn hear_ends(connection: &Connection, until: Time) -> Result<CopyEnds, Error> {
    let mut logs = Vec::new();
    loop {
        let answer = take_answer(connection, until)?;
        let MirrorMessage::Ends { ends, refusal, logs: marks, more } = MirrorMessage::decode(&answer)? else {
            return Err(Error::Broken("a greeting is answered by what the copy has"));
        };
        if refusal != MirrorRefusal::None {
            return Err(Error::Refused(refusal));
        }
        logs.extend_from_slice(marks);
        if logs.len() > MARKS_MAX {
            return Err(Error::Broken("more logs than there can be"));
        }
        if !more {
            let MirrorEnds { end, contained, key, .. } = ends;
            let (end, contained) = (LedgerPosition::of_mark(&end), LedgerPosition::of_mark(&contained));
            return Ok(CopyEnds { end, contained, key, logs });
        }
    }
}
