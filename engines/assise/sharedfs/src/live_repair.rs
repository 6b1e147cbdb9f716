//! Repair of the log of a session from a copy, before the session ends where its file does (`docs/replication.md`, C14).
//!
//! The file of a log belongs to a program, and its medium to the head. If either loses or changes records that a copy has synced,
//! they may have been acknowledged. So a log whose file lacks records, or has others than were sent, is digested to the end of the
//! records of the copies first. They are fetched into a new file, which no program has: the session is sealed, and its program has
//! the former file.
//!
//! Guarantees: a session does not end before a record that a copy has synced, for as long as the copy counts. A log is fetched when its
//! session ends, a bounded number of times. The head does not stop because of the file of a log.

use crate::copies::Copy;
use crate::copies::Listened;
use crate::copies::fetching::{CopiedRecords, NotFetched};
use crate::daemon::Daemon;
use crate::digest::Step;
use crate::error::Error;
use crate::level::LOOK;
use crate::repair::{Repaired, made_again};
use crate::replicate::STOP_PATIENCE;
use crate::state::Core;
use ccnvm::SessionId;
use format::{Incarnation, LogUid, NodeId, Sequence};
use ipc::Digested;
use ipc::host::Time;
use mirror::logs::LogFile;
use std::sync::Arc;

/// How often a log is fetched. Once is enough, unless another thread found the end of the former file just before.
const FETCHES_MAX: usize = 2;

/// The log of a session that ends.
struct EndingLog {
    life: (LogUid, Incarnation),
    file_bytes: u64,
    owner: u32,
    digested: Digested,
}

impl Daemon {
    /// Logs of sessions that were repaired from a copy while the daemon ran; only the newest are remembered.
    pub fn repaired(&self) -> Vec<Repaired> {
        self.core().state.lock().repaired.iter().copied().collect()
    }
}

impl Core {
    /// Digests the log of a session that ends. Where its file lacks records that a copy has, or has others, they are fetched.
    ///
    /// # Errors
    /// As [`Self::digest`].
    pub fn digest_last(&self, id: SessionId, up_to: Sequence) -> Result<Step, Error> {
        for _ in 0..FETCHES_MAX {
            match self.digest(id, up_to)? {
                Step::Cut(reason) if reason.is_of_the_file() && self.repair_log(id)? => {}
                step => return Ok(step),
            }
        }
        self.digest(id, up_to)
    }

    /// Replaces the file of a log by one with the records that a copy has; false if none has more than the tree.
    fn repair_log(&self, id: SessionId) -> Result<bool, Error> {
        let mut closing = None;
        loop {
            let Some(log) = self.ending_log(id)? else { return Ok(false) };
            let Some((copy, records)) = self.copy_with_more(&log) else { return Ok(false) };
            let seen = copy.look();
            match self.fetch_log(&copy, &log, records, &mut closing) {
                Ok(file) => {
                    self.replace_log(&log, file, (copy.node, records.synced));
                    return Ok(true);
                }
                Err(NotFetched::Lost) => {
                    self.wait_for_copy(&copy, seen, &mut closing)?;
                }
                Err(NotFetched::Stopped(error)) => return Err(error),
                Err(NotFetched::Medium(error)) => {
                    let why = format!("no room for the records that node {} has: {error}", copy.node);
                    self.state.lock().note_termination(id, log.owner, why);
                    return Ok(false);
                }
            }
        }
    }

    fn ending_log(&self, id: SessionId) -> Result<Option<EndingLog>, Error> {
        let state = self.state.lock();
        if state.is_stopped() {
            return Err(Error::Stopped);
        }
        let uid = LogUid::new(id.0);
        let open = state.copy.ledger.table().log(uid);
        Ok(open.map(|open| EndingLog {
            life: (uid, open.incarnation),
            file_bytes: open.file_bytes,
            owner: open.caller.uid,
            digested: state.copy.digested(uid),
        }))
    }

    /// A copy that has records of a log which are not digested; if several have, one that is connected, and has most.
    fn copy_with_more(&self, log: &EndingLog) -> Option<(Arc<Copy>, CopiedRecords)> {
        let (uid, incarnation) = log.life;
        let copies = self.copies.all().into_iter();
        let having =
            copies.filter_map(|copy| copy.records_of(uid, incarnation).map(|records| (copy, records)));
        having
            .filter(|(_, records)| records.synced > log.digested.sequence)
            .max_by_key(|(copy, records)| (copy.is_connected(), records.synced))
    }

    /// A new file with the records of a copy behind those that are digested.
    fn fetch_log(
        &self,
        copy: &Copy,
        log: &EndingLog,
        records: CopiedRecords,
        closing: &mut Option<Time>,
    ) -> Result<LogFile, NotFetched> {
        if !copy.is_connected() {
            return Err(NotFetched::Lost);
        }
        let file = made_again(&self.medium, self.pool, log.life, (log.file_bytes, log.owner))
            .map_err(NotFetched::Medium)?;
        let wait = |seen| self.wait_for_copy(copy, seen, closing);
        copy.fetch(&file, log.life, (log.digested, records.sent), wait)?;
        Ok(file)
    }

    /// Waits a while for what a copy says.
    fn wait_for_copy(&self, copy: &Copy, seen: u32, closing: &mut Option<Time>) -> Result<(), Error> {
        let now = self.host.now();
        {
            let state = self.state.lock();
            if state.is_stopped() {
                return Err(Error::Stopped);
            }
            if state.closing {
                closing.get_or_insert_with(|| now.after(STOP_PATIENCE));
            }
        }
        if closing.is_some_and(|last| now >= last) {
            return Err(self.stop_waiting(copy.node));
        }
        if copy.listen(seen, now.after(LOOK)) == Listened::Executed {
            self.note_executed();
        }
        Ok(())
    }

    fn replace_log(&self, log: &EndingLog, file: LogFile, (node, up_to): (NodeId, Sequence)) {
        let uid = log.life.0;
        {
            // No batch of the log is under way.
            let _area = self.area_for_other();
            let mut state = self.state.lock();
            state.copy.replace_file(uid, Arc::new(file));
            state.note_repaired(Repaired { log: uid, node, after: log.digested.sequence, up_to });
        }
        self.copies.all().iter().for_each(|copy| copy.forget_end(uid));
    }
}
