//! The sending side: bytes of logs and of the ledger, for one copy, in one order.
//!
//! Guarantees: of a log only whole frames are sent that follow each other, with the right checksum, read once into memory
//! of our own, none of them onto a place that the copy's tree does not contain yet; of the ledger only entries. Nothing
//! here waits: what the connection does not take now is sent later, in the same order.

use crate::error::Error;
use crate::ledger::{LedgerError, LedgerPosition, next_entry};
use crate::logs::{LogFile, RING_START, bytes_between};
use crate::stream::{DataQueue, Target, message};
use format::mirror::{
    LEDGER_STREAM, LogEnds, LogMark, MirrorEnds, MirrorHello, MirrorKind, MirrorMessage, MirrorOpen,
    MirrorRefusal, RULES, SettledMark,
};
use format::{ChainNumber, Incarnation, LogUid, Sequence};
use ipc::{Digested, Time};
use pmem::{MediaError, Region};
use std::collections::BTreeMap;
use transport::{Connection, Event};
use zerocopy::little_endian::{U32, U64};

/// What is there now, and no later.
const NOW: Option<Time> = Some(Time::from_ns(0));

/// Marks of logs that one `Ends` may bring, and those of all of them.
const MARKS_MAX: usize = 1 << 16;

/// What a copy has, as it says itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyEnds {
    /// End of its ledger, settled.
    pub end: LedgerPosition,
    /// What its tree contains.
    pub contained: LedgerPosition,
    /// Key of the life at that end; zeros before the first.
    pub key: [u8; 16],
    /// The logs' files that it has.
    pub logs: Vec<LogEnds>,
}

/// How a push of a log went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogPush {
    /// As far as was asked, which is here.
    Done(Digested),
    /// There is more behind this.
    More(Digested),
    /// No whole frame stands behind this: here the log ends.
    Ends(Digested),
}

/// What a copy said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// How far streams are settled.
    Settled(Vec<SettledMark>),
    /// How far its tree is.
    Executed(LedgerPosition, Vec<LogMark>),
}

/// A log of which bytes are sent.
#[derive(Clone, Copy, Debug)]
struct SentLog {
    incarnation: Incarnation,
    sent: Digested,
}

/// See the module.
pub struct Sender {
    connection: Connection,
    queue: DataQueue,
    ledger: LedgerPosition,
    logs: BTreeMap<LogUid, SentLog>,
    /// Something is sent that the copy was not asked to settle.
    unasked: bool,
}

impl Sender {
    /// Says who leads, and hears what the copy has.
    ///
    /// # Errors
    /// `Refused`, `Connection`, `Message`, `Broken`.
    pub fn greet(
        connection: Connection,
        (version, ledger_bytes): (u64, u64),
        until: Time,
    ) -> Result<(Self, CopyEnds), Error> {
        let hello = MirrorHello {
            version: U64::new(version),
            ledger_bytes: U64::new(ledger_bytes),
            chain: ChainNumber::ONLY,
            rules: U32::new(RULES),
        };
        connection.send(&message(MirrorKind::Hello, false, &hello, &[] as &[u8]), Some(until))?;
        let ends = hear_ends(&connection, until)?;
        let queue = DataQueue::new(connection.message_bytes_max());
        let sender = Self { connection, queue, ledger: ends.end, logs: BTreeMap::new(), unasked: false };
        Ok((sender, ends))
    }

    /// The connection.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// How far the ledger is sent.
    pub fn ledger(&self) -> LedgerPosition {
        self.ledger
    }

    /// The copy has a log's file up to here.
    pub fn resume_log(&mut self, log: LogUid, incarnation: Incarnation, has: Digested) {
        self.logs.insert(log, SentLog { incarnation, sent: has });
    }

    /// How far a log's file is sent; `None` if the copy has not been told of it.
    pub fn sent(&self, log: LogUid, incarnation: Incarnation) -> Option<Digested> {
        self.logs.get(&log).filter(|sent| sent.incarnation == incarnation).map(|sent| sent.sent)
    }

    /// Has the copy make a log's file, whose first record follows `before`. Nothing happens if it was told of it.
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

    /// A log is over.
    pub fn forget_log(&mut self, log: LogUid) {
        self.logs.remove(&log);
    }

    /// Sends frames of a log up to record `up_to`, at most about so many bytes. `executed` is how far the copy's tree
    /// contains this file: what lies behind must not be overwritten.
    ///
    /// # Errors
    /// What the medium said.
    ///
    /// # Panics
    /// If the copy was not told of the log.
    pub fn push_log(
        &mut self,
        (log, file): (LogUid, &LogFile),
        up_to: Sequence,
        executed: Digested,
        bytes_max: usize,
    ) -> Result<LogPush, MediaError> {
        let entry = self.logs.get_mut(&log).expect("the copy was told of the log");
        let (incarnation, ring) = (entry.incarnation, (RING_START, file.ring_end()));
        let mut frames = file.few_frames(entry.sent);
        let mut bytes = 0;
        loop {
            let sent = entry.sent;
            if sent.sequence >= up_to {
                return Ok(LogPush::Done(sent));
            }
            if bytes >= bytes_max {
                return Ok(LogPush::More(sent));
            }
            let Some(frame) = frames.next()? else { return Ok(LogPush::Ends(sent)) };
            // A log that goes round over what the copy has not executed breaks the rule: it ends before that.
            let taken = bytes_between(ring, sent, frame.after);
            if bytes_between(ring, executed, sent) + taken > file.ring_bytes() {
                return Ok(LogPush::Ends(sent));
            }
            self.queue.put(Target { log, incarnation, position: sent.position }, frame.bytes);
            bytes += frame.bytes.len();
            entry.sent = frame.after;
            self.unasked = true;
        }
    }

    /// Sends entries of the ledger up to a place.
    ///
    /// # Errors
    /// `Media`; `Broken`: the ledger does not reach back to what the copy has.
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

    /// Asks the copy to settle what was sent since the last time, and to say so. Nothing happens if that is nothing.
    pub fn ask(&mut self) {
        if std::mem::take(&mut self.unasked) {
            self.queue.finish(true);
        }
    }

    /// Gives the connection what it takes now; true if nothing is left.
    ///
    /// # Errors
    /// `Connection`.
    pub fn pump(&mut self) -> Result<bool, Error> {
        while let Some(message) = self.queue.ready().front() {
            match self.connection.send(message, NOW) {
                Ok(_) => drop(self.queue.ready().pop_front()),
                Err(transport::Error::TimedOut | transport::Error::Interrupted) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// What a message of the copy says.
    ///
    /// # Errors
    /// `Message`, `Broken`.
    pub fn hear(message: &[u8]) -> Result<Heard, Error> {
        match MirrorMessage::decode(message)? {
            MirrorMessage::Settled(marks) => Ok(Heard::Settled(marks.to_vec())),
            MirrorMessage::Executed { ledger, logs } => {
                Ok(Heard::Executed(LedgerPosition::of_mark(&ledger), logs.to_vec()))
            }
            _ => Err(Error::Broken("a copy says how far it is, and nothing else")),
        }
    }
}

/// Hears the answer to a greeting.
fn hear_ends(connection: &Connection, until: Time) -> Result<CopyEnds, Error> {
    let mut logs = Vec::new();
    loop {
        let answer = match connection.take(Some(until))? {
            Event::Message(answer) => answer,
            Event::Immediate(_) => return Err(Error::Broken("an immediate")),
            Event::Ended(why) => return Err(transport::Error::Ended(why).into()),
        };
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
