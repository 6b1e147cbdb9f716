//! Digest: frames of one update log become part of the shared area by one flip, or end the log (Assise §3.2.1; schedules
//! 1.1, 1.13, 1.21, 2.1).
//!
//! Guarantees: a record is judged on a copy of its own, by the table as it is and the attributes that the records before
//! it left; the first one that does not count ends the log there. A batch is bounded, and one flip makes it real together
//! with "digested up to" and all that the ledger said before. A head writes the entries that say what the batch did before
//! the flip, so that a copy which has the flip's ledger can repeat it.

use super::apply::{CutReason, Halt, apply_record, victim_of};
use super::copy::LocalCopy;
use super::table::OpenLog;
use crate::config::Config;
use crate::error::Error;
use crate::logs::{LogFile, TORN};
use crate::room::SessionRoom;
use area::{Applied, AreaError, Batch};
use format::record::{self, Operation, Record};
use format::{InodeNumber, LogUid, Sequence};
use ipc::Digested;

/// Bounds of one batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchLimits {
    pub records: usize,
    pub bytes: usize,
}

impl BatchLimits {
    pub fn of(config: &Config) -> Self {
        Self { records: config.batch_records, bytes: config.batch_bytes }
    }
}

/// A batch that another call waits for ends when it has one of these.
const SHORT_BATCH: BatchLimits = BatchLimits { records: 1024, bytes: 4 << 20 };

/// What only the head knows, and decides by. Whoever repeats its decisions keeps every inode that lost its last name until
/// an entry removes it, and takes all room for promised: the head wrote down how far it came with less.
pub(crate) struct Decisions<'a> {
    /// Whether a process may have the inode open, so that it stays when it loses its last name.
    pub is_open: &'a dyn Fn(InodeNumber) -> bool,
    /// What was promised to the log; none if all that it needs was.
    pub room: Option<SessionRoom<'a>>,
    /// Whether another call waits for the batch to end.
    pub is_awaited: &'a dyn Fn() -> bool,
}

impl Decisions<'_> {
    /// Those of somebody else, repeated.
    pub const REPEATED: Self = Self { is_open: &|_| true, room: None, is_awaited: &|| false };

    fn take_room(&mut self, blocks: u64, shared: bool) -> bool {
        self.room.as_mut().is_none_or(|room| room.take(blocks, shared))
    }

    fn room_left(&self) -> u64 {
        self.room.as_ref().map_or(0, SessionRoom::left)
    }

    /// Records that took from the room since it had `left` come again.
    fn restore_room(&mut self, left: u64) {
        if let Some(room) = &mut self.room {
            room.restore(left);
        }
    }
}

/// In which role a log is digested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// As the head: what the batch did is written into the ledger.
    Head,
    /// Because this entry of the ledger says so.
    Entry(Sequence),
}

/// How a batch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// As far as was asked.
    Done,
    /// There is more.
    More,
    /// No whole frame stands where the next record would.
    NoFrame,
    /// The log ends here, whatever stands behind.
    Cut(CutReason),
}

/// What a batch did.
pub(crate) struct Digest {
    /// How far the log is digested.
    pub at: Digested,
    pub end: End,
    /// Records, pads included.
    pub records: usize,
    /// Inodes that lost their last name and stay for now, and whether the log keeps them open.
    pub orphans: Vec<(InodeNumber, bool)>,
}

/// Records of one log on their way into one batch.
struct Work<'a> {
    log: LogUid,
    open: &'a OpenLog,
    orphans: Vec<(InodeNumber, bool)>,
    /// Inodes that lost their last name and are gone.
    removed: Vec<InodeNumber>,
    /// No more of them than one entry can name.
    removed_max: usize,
    records: usize,
    bytes: usize,
    at: Digested,
}

impl LocalCopy {
    /// One flip: records of a log, up to `up_to` at most.
    ///
    /// # Errors
    /// `Area`, `Media`, `LedgerFull`.
    pub fn digest_batch(
        &mut self,
        uid: LogUid,
        up_to: Sequence,
        limits: BatchLimits,
        decisions: &mut Decisions<'_>,
        role: Role,
    ) -> Result<Digest, Error> {
        let mut limits = limits;
        let left = decisions.room_left();
        loop {
            let result = self.try_batch(uid, up_to, limits, decisions, role);
            if result.is_err() {
                decisions.restore_room(left);
            }
            match result {
                // The batch had no place left for the note of how far it came, or for all that was written: half of it has.
                Err(Error::Area(AreaError::BatchFull | AreaError::Overfull)) if limits.records > 1 => {
                    limits.records /= 2;
                }
                result => return result,
            }
        }
    }

    fn try_batch(
        &mut self,
        uid: LogUid,
        up_to: Sequence,
        limits: BatchLimits,
        decisions: &mut Decisions<'_>,
        role: Role,
    ) -> Result<Digest, Error> {
        let nothing = |at, end| Digest { at, end, records: 0, orphans: Vec::new() };
        let before = self.digested(uid);
        if before.sequence >= up_to || !self.logs.contains_key(&uid) {
            return Ok(nothing(before, End::Done));
        }
        let Some(file) = self.file(uid)? else { return Ok(nothing(before, End::NoFrame)) };
        let removed_max = self.ledger.reap_max();
        let fits =
            role != Role::Head || self.ledger.has_room(2, (removed_max * size_of::<InodeNumber>()) as u64);
        self.contain_changes(if fits { self.changes_beside() } else { 0 })?;
        let mut batch = self.area.begin()?;
        let changes = Self::put_changes(&mut batch, &self.ledger, &self.logs, self.batch_changes)?;
        if changes < self.ledger.pending().count() {
            // They need a flip of their own.
            drop(batch);
            self.contain_changes(0)?;
            return Ok(nothing(before, End::More));
        }
        // One record alone is judged by the room that it takes itself.
        if limits.records > 1 {
            batch.gather_writes();
        }
        let open = self.ledger.table().log(uid).expect("each log of a copy is in the table");
        let mut work = Work {
            log: uid,
            open,
            orphans: Vec::new(),
            removed: Vec::new(),
            removed_max,
            records: 0,
            bytes: 0,
            at: before,
        };
        let end = work.take_frames(&mut batch, &file, up_to, limits, decisions, (role, changes > 0))?;
        let Work { orphans, removed, records, at, .. } = work;
        if at == before {
            drop(batch);
            return Ok(nothing(before, end));
        }
        batch.settle_writes()?;
        batch.put_log(uid, &open.item(at.sequence, at.position))?;
        // The entries come first: whoever has the flip has what it was made by.
        let entries = match role {
            Role::Head => {
                self.ledger.digest(uid, at.sequence)?;
                if removed.is_empty() {
                    1
                } else {
                    self.ledger.reap(&removed)?;
                    2
                }
            }
            Role::Entry(_) => 0,
        };
        let changes = changes + entries;
        let place = self.ledger.place_after(changes);
        batch.set_ledger(&place);
        let version = match role {
            Role::Head => place.sequence,
            Role::Entry(sequence) => sequence,
        };
        let committed = batch.commit(version)?;
        self.after_flip(&committed, changes)?;
        self.logs.get_mut(&uid).expect("looked up above").digested = at;
        Ok(Digest { at, end, records, orphans })
    }
}

impl Work<'_> {
    fn take_frames(
        &mut self,
        batch: &mut Batch<'_>,
        file: &LogFile,
        up_to: Sequence,
        limits: BatchLimits,
        decisions: &mut Decisions<'_>,
        (role, changes): (Role, bool),
    ) -> Result<End, Error> {
        let mut frames = file.frames(self.at);
        loop {
            if self.at.sequence >= up_to {
                return Ok(End::Done);
            }
            let has = |limits: BatchLimits| self.records >= limits.records || self.bytes >= limits.bytes;
            if has(limits) || (has(SHORT_BATCH) && (decisions.is_awaited)()) {
                return Ok(End::More);
            }
            let frame = match (frames.next(), role) {
                (Ok(Some(frame)), _) => frame,
                // To the head an unreadable record is like none.
                (Ok(None), _) | (Err(_), Role::Head) => return Ok(End::NoFrame),
                (Err(error), Role::Entry(_)) => return Err(error.into()),
            };
            let left = decisions.room_left();
            match self.apply(batch, frame.bytes, decisions) {
                Ok(()) => {}
                Err(Halt::Full) if self.records > 0 || changes => {
                    // The record comes again, and pays then.
                    decisions.restore_room(left);
                    return Ok(End::More);
                }
                Err(Halt::Full) => return Ok(End::Cut(CutReason::NoRoom)),
                Err(Halt::Cut(reason)) => return Ok(End::Cut(reason)),
                Err(Halt::Failed(error)) => return Err(error.into()),
            }
            self.at = frame.after;
            self.records += 1;
            self.bytes += frame.bytes.len();
        }
    }

    fn apply(
        &mut self,
        batch: &mut Batch<'_>,
        frame: &[u8],
        decisions: &mut Decisions<'_>,
    ) -> Result<(), Halt> {
        let record = Record::decode(frame).map_err(|error| Halt::Cut(CutReason::Decode(error)))?;
        if record.operation == Operation::Pad {
            return Ok(());
        }
        // A log that gives out a number twice: elsewhere the inode stays until the entry behind this batch removes it.
        if matches!(record.operation, Operation::Create { .. }) && self.removed.contains(&record.inode) {
            return Err(Halt::Full);
        }
        let is_open = decisions.is_open;
        let mut take_room = |blocks, shared| decisions.take_room(blocks, shared);
        let no_more = self.removed.len() >= self.removed_max;
        let keeps = || no_more || record::keeps_open(frame) || victim_of(&record).is_some_and(is_open);
        match apply_record(batch, (self.log, self.open), &record, keeps, &mut take_room)? {
            Applied::Orphaned(inode) => self.orphans.push((inode, record::keeps_open(frame))),
            Applied::Removed(inode) => self.removed.push(inode),
            Applied::Done | Applied::Stale => {}
        }
        Ok(())
    }
}

/// Why a log ends where no frame stands.
pub(crate) const NO_FRAME: CutReason = CutReason::Decode(TORN);
