//! Bytes of a log's file that a copy sends back while it is fed.
//!
//! A question ends with the connection: the caller finds it gone, and asks again over the next one. While an answer is due the
//! copy keeps the head waiting, as one does that does not sync.

use super::Copy;
use crate::copy_positions::Fetch;
use crate::error::Error;
use crate::repair::FetchedRange;
use format::mirror::DataPart;
use format::{Incarnation, LogUid, Sequence};
use ipc::Digested;
use mirror::logs::LogFile;
use pmem::MediaError;

/// How much of a log's file a copy has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopiedRecords {
    /// The last record that it has synced.
    pub synced: Sequence,
    /// Up to where the file was sent.
    pub sent: Digested,
}

/// The state of a question.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// The copy sent these bytes, from the position on that was asked for.
    Bytes(Vec<u8>),
    /// It has not answered yet.
    Due,
    /// The connection ended, or there is none.
    Lost,
}

/// Why records did not come.
pub(crate) enum NotFetched {
    /// The connection is over: it may come back, and another copy may have them.
    Lost,
    /// The wait ended.
    Stopped(Error),
    /// The own medium did not take them.
    Medium(MediaError),
}

impl Copy {
    /// Puts the records that the copy has of a log, between two places, into a file of this node, and syncs it. `wait` waits a while
    /// for what the copy says.
    pub fn fetch(
        &self,
        file: &LogFile,
        life: (LogUid, Incarnation),
        (from, to): (Digested, Digested),
        mut wait: impl FnMut(u32) -> Result<(), Error>,
    ) -> Result<(), NotFetched> {
        let mut range = FetchedRange::new(file, from, to);
        while let Some(part) = range.next() {
            self.ask_for(life, part);
            let bytes = loop {
                let seen = self.look();
                match self.answer_of(life.0) {
                    Answer::Bytes(bytes) => break bytes,
                    Answer::Lost => return Err(NotFetched::Lost),
                    Answer::Due => {}
                }
                self.pump();
                wait(seen).map_err(NotFetched::Stopped)?;
            };
            range.put(&bytes).map_err(NotFetched::Medium)?;
        }
        file.sync().map_err(NotFetched::Medium)
    }

    /// How much the copy has of a log's file; `None` if it has no such file.
    pub fn records_of(&self, log: LogUid, incarnation: Incarnation) -> Option<CopiedRecords> {
        let positions = self.positions.lock();
        let log = positions.logs.get(&log).filter(|log| log.incarnation == incarnation)?;
        Some(CopiedRecords { synced: log.synced, sent: log.sent })
    }

    /// Asks for bytes of a log's file, at most so many from a position on. One question about each log at a time.
    fn ask_for(&self, (log, incarnation): (LogUid, Incarnation), part: (u64, u64)) {
        let asked = {
            let mut guard = self.sender.lock();
            let Some(sender) = guard.as_mut() else { return };
            mirror::part_of((log, incarnation), part).and_then(|asked| {
                self.note_asked(asked);
                sender.ask_for(&asked)
            })
        };
        if let Err(error) = asked {
            self.lose(&error);
        }
    }

    /// The answer may come before the question is sent to its end.
    fn note_asked(&self, asked: DataPart) {
        let mut positions = self.positions.lock();
        if !positions.waits() && !positions.lost {
            positions.moved_at = self.host.now();
        }
        positions.fetches.insert(asked.log, Fetch::Asked(asked));
    }

    /// The state of the question about a log. Bytes are given once.
    fn answer_of(&self, log: LogUid) -> Answer {
        let mut positions = self.positions.lock();
        match positions.fetches.remove(&log) {
            Some(Fetch::Answered(bytes)) => Answer::Bytes(bytes),
            Some(asked) => {
                positions.fetches.insert(log, asked);
                Answer::Due
            }
            None => Answer::Lost,
        }
    }

    /// A log's file has other records than when it was found to end: they are to be sent.
    pub fn forget_end(&self, log: LogUid) {
        if let Some(log) = self.positions.lock().logs.get_mut(&log) {
            log.ends = None;
        }
    }

    /// Sends the rest of a question that the connection did not accept at once.
    fn pump(&self) {
        let pumped = self.sender.lock().as_mut().map(mirror::Sender::pump);
        if let Some(Err(error)) = pumped {
            self.lose(&error);
        }
    }
}
