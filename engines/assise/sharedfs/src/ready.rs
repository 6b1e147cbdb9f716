//! Logs that are made before a program needs them. Where a sync takes milliseconds, a program would otherwise wait for
//! three syncs at its start: of the log's file, of its name and of its first block. The entry of the ledger that opens
//! its log is synced with its first fsync.
//!
//! A ready log is durable and empty, and its number is not given out again. The ledger does not contain it: after a
//! crash the next start removes its file, like that of any log that was not begun.

use crate::accept::{SESSION_DESCRIPTORS, has_descriptors};
use crate::state::Core;
use format::superblock::OWNER_DAEMON;
use format::{Incarnation, LogUid};
use mirror::logs::{LogFile, LogSize};
use pmem::MediaError;
use std::sync::Arc;

/// Logs are made ready while descriptors for so many further sessions are free, and removed when fewer than half of
/// that are.
const SESSIONS_TO_COME: usize = 8;

/// A log that waits for its session.
pub(crate) struct ReadyLog {
    pub log: LogUid,
    pub file: Arc<LogFile>,
}

impl Core {
    /// Makes an empty log with the space that a session begins with. Where a file may not have the largest size of a log, because
    /// the process has a limit for the size of files, it keeps this one.
    ///
    /// # Errors
    /// The error of the medium.
    pub fn make_log(&self, life: (LogUid, Incarnation), owner: u32) -> Result<LogFile, MediaError> {
        let space = self.config.log_bytes;
        let make =
            |file_bytes| LogFile::create(&self.medium, self.pool, life, LogSize { file_bytes, space }, owner);
        match make(self.config.log_bytes_max) {
            Err(MediaError::NoSpace) => make(space),
            made => made,
        }
    }

    /// The same for a session that begins: on a full medium the log takes the space that the pool holds for a few logs.
    ///
    /// # Errors
    /// The error of the medium.
    pub fn make_needed_log(&self, life: (LogUid, Incarnation), owner: u32) -> Result<LogFile, MediaError> {
        match self.make_log(life, owner) {
            Err(MediaError::NoSpace) if self.may_take_log() => {
                let bytes = self.config.log_bytes;
                self.medium.with_held(bytes, || self.make_log(life, owner))
            }
            made => made,
        }
    }

    fn may_take_log(&self) -> bool {
        let state = self.state.lock();
        let free = &state.copy.free;
        let blocks = (state.room.reserved(), free.provided);
        free.space.as_ref().is_some_and(|space| space.has_log(self.config.log_bytes, blocks))
    }

    /// Makes as many logs ready as there should be. Called by the background thread; no lock is held meanwhile.
    pub fn make_ready_logs(&self) {
        if !has_descriptors(SESSION_DESCRIPTORS * SESSIONS_TO_COME / 2) {
            return self.remove_ready_logs();
        }
        while has_descriptors(SESSION_DESCRIPTORS * SESSIONS_TO_COME) {
            let log = {
                let mut state = self.state.lock();
                if state.is_stopped() || state.closing || state.ready.len() >= self.config.ready_logs {
                    return;
                }
                state.numbers.take_log()
            };
            let life = (log, Incarnation::new(1));
            // If there is no space for it now, the next session that begins makes its own log, and reports the error.
            let made = self.make_log(life, OWNER_DAEMON);
            let Ok(file) = made else { return };
            self.copies.all().iter().for_each(|copy| copy.prepare_log(log, &file));
            self.state.lock().ready.push_back(ReadyLog { log, file: Arc::new(file) });
        }
    }

    /// Removes the files of ready logs.
    pub fn remove_ready_logs(&self) {
        let ready = std::mem::take(&mut self.state.lock().ready);
        for log in ready {
            // A file that stays is removed by the next start.
            let _ = self.medium.remove(&log.file.name);
        }
    }
}
