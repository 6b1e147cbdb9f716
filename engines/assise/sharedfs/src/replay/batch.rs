//! Digest: frames of one update log become part of the shared area by one commit, or end the log (Assise §3.2.1).
//!
//! The area is the batch's alone. Its copy, with ledger and table, is visited three times: for the rights of the log
//! and the changes that the ledger has noted; for the changes noted meanwhile and the entries that describe the batch;
//! and for the commit. In between records are read, judged and applied while other threads read the tree of the last
//! commit. Only the thread that holds the area's lock closes a log or replaces its file: none ends during its batch.
//!
//! Guarantees: a record is judged on a copy of its own, by the table as it is and the attributes that the records before
//! it left; the first one that does not count ends the log there. A batch is bounded, and one commit makes it real together
//! with "digested up to" and all that the ledger said before. A head writes the entries that say what the batch did before
//! the commit, so that a copy which has the commit's ledger can repeat it.

use super::apply::{Backing, CutReason, Halt, JudgedWrite, apply_record, created_by, victim_of};
use super::copy::{LocalCopy, Visit, contain_changes};
use super::table::OpenLog;
use crate::config::Config;
use crate::error::Error;
use crate::room::SessionRoom;
use area::{Applied, Area, AreaError, Batch};
use format::hash::{HashKey, RecordsHash};
use format::record::{self, Operation, Record};
use format::{InodeNumber, LogUid, Sequence};
use ipc::Digested;
use mirror::logs::{LogFile, TORN};
use std::sync::Arc;

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

/// A batch of long records ends with so many bytes. Such records fill blocks and leaves of the tree by themselves, so a longer
/// batch writes no less, and its program would wait for space in its log all the longer.
const LONG_RECORDS_BYTES: usize = 16 << 20;
/// The average bytes of long records, at least.
const LONG_RECORD: usize = 64 << 10;

/// Inputs that only the head knows, and by which it decides. A replica that repeats its decisions keeps every inode
/// that lost its last name until an entry removes it, and takes all space for reserved: the head noted how far it came
/// with less.
pub(crate) struct Decisions<'a> {
    /// Whether a process may have the inode open, so that it stays when it loses its last name.
    pub is_open: &'a dyn Fn(InodeNumber) -> bool,
    /// The log's reservation; none if all the space that it needs was reserved.
    pub room: Option<SessionRoom>,
    /// Whether the batch may take so many blocks without a promise.
    pub lend: &'a dyn Fn(u64) -> bool,
    /// Whether another call waits for the batch to end.
    pub is_awaited: &'a dyn Fn() -> bool,
    /// The first record behind the log's digested ones for whose digest a call waits, or one behind all.
    pub awaited: &'a dyn Fn() -> Sequence,
}

impl Decisions<'_> {
    /// Those of somebody else, repeated.
    pub const REPEATED: Self = Self {
        is_open: &|_| true,
        room: None,
        lend: &|_| true,
        is_awaited: &|| false,
        awaited: &|| Sequence::new(u64::MAX),
    };

    fn take_room(&mut self, blocks: u64, shared: bool) -> Backing {
        if self.room.as_mut().is_none_or(|room| room.take(blocks, shared)) {
            Backing::Promise
        } else if (self.lend)(blocks) {
            Backing::Spare
        } else {
            Backing::Nothing
        }
    }

    /// Blocks that were taken of the promise.
    pub fn taken(&self) -> u64 {
        self.room.as_ref().map_or(0, SessionRoom::taken)
    }

    /// Records that took from the room since [`Self::taken`] said so come again.
    fn restore_room(&mut self, taken: u64) {
        if let Some(room) = &mut self.room {
            room.restore(taken);
        }
    }
}

/// In which role a log is digested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The head: writes entries that describe the batch into the ledger.
    Head,
    /// Repeats an entry of the ledger.
    Entry(Repeated),
}

/// An entry that is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Repeated {
    pub sequence: Sequence,
    /// The hash of all records that the entry names from here on; `None` if they were compared already, or if the entry
    /// has no hash.
    pub expected: Option<ExpectedHash>,
}

/// The hash of records under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpectedHash {
    pub key: HashKey,
    pub hash: RecordsHash,
}

impl Role {
    fn expected(self) -> Option<ExpectedHash> {
        match self {
            Self::Head => None,
            Self::Entry(repeated) => repeated.expected,
        }
    }
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
    /// The records are not those that the entry names. Nothing was digested.
    Differs,
}

/// The results of a batch.
pub(crate) struct Digest {
    /// How far the log is digested.
    pub at: Digested,
    pub end: End,
    /// Records, pads included.
    pub records: usize,
    /// Inodes that lost their last name and stay for now, and whether the log keeps them open.
    pub orphans: Vec<(InodeNumber, bool)>,
}

/// The part of the copy that a batch needs.
struct Prepared {
    before: Digested,
    open: Arc<OpenLog>,
    /// None: it has no file any more.
    file: Option<Arc<LogFile>>,
    removed_max: usize,
    /// Changes of the ledger that may stay out of the tree.
    changes_left: usize,
}

/// Records of one log on their way into one batch.
struct BatchWork<'a> {
    log: LogUid,
    open: &'a OpenLog,
    orphans: Vec<(InodeNumber, bool)>,
    /// Inodes that lost their last name and are gone.
    removed: Vec<InodeNumber>,
    /// No more of them than one entry can name.
    removed_max: usize,
    records: usize,
    bytes: usize,
    judged: Option<JudgedWrite>,
    /// Hash of these records, if they were read with hashes.
    hash: Option<RecordsHash>,
    at: Digested,
}

/// One commit: records of a log, up to `up_to` at most.
///
/// # Errors
/// `Area`, `Media`, `LedgerFull`.
pub(crate) fn digest_batch(
    area: &mut Area,
    copy: &mut impl Visit,
    (uid, up_to): (LogUid, Sequence),
    limits: BatchLimits,
    decisions: &mut Decisions<'_>,
    role: Role,
) -> Result<Digest, Error> {
    let mut limits = limits;
    let taken = decisions.taken();
    loop {
        let mut tried = 0;
        let result = try_batch(area, copy, (uid, up_to), (limits, &mut tried), decisions, role);
        if result.is_err() {
            decisions.restore_room(taken);
        }
        match result {
            // The tree has no nodes left for the note of how far the batch came, or for all that was written: half of it has.
            Err(Error::Area(AreaError::BatchFull | AreaError::Overfull)) if limits.records > 1 => {
                limits.records = (limits.records.min(tried) / 2).max(1);
            }
            result => return result,
        }
    }
}

/// `tried` counts the records that the batch took, even if they do not fit it.
fn try_batch(
    area: &mut Area,
    copy: &mut impl Visit,
    (uid, up_to): (LogUid, Sequence),
    (limits, tried): (BatchLimits, &mut usize),
    decisions: &mut Decisions<'_>,
    role: Role,
) -> Result<Digest, Error> {
    let nothing = |at, end| Digest { at, end, records: 0, orphans: Vec::new() };
    let prepared = copy.visit(|copy| copy.prepare(uid, up_to, role))?;
    let Prepared { before, open, file, removed_max, changes_left } = match prepared {
        Ok(prepared) => prepared,
        Err(before) => return Ok(nothing(before, End::Done)),
    };
    let Some(file) = file else { return Ok(nothing(before, End::NoFrame)) };
    contain_changes(area, copy, changes_left)?;
    let mut batch = area.begin()?;
    let changes = copy.visit(|copy| {
        let changes = copy.put_changes(&mut batch, 0, copy.batch_changes)?;
        Ok::<_, AreaError>((changes == copy.ledger.pending().count()).then_some(changes))
    })?;
    let Some(changes) = changes else {
        // They need a commit of their own.
        drop(batch);
        contain_changes(area, copy, 0)?;
        return Ok(nothing(before, End::More));
    };
    // One record alone is judged by the room that it takes itself.
    if limits.records > 1 {
        batch.gather_writes();
    }
    let mut work = BatchWork {
        log: uid,
        open: &open,
        orphans: Vec::new(),
        removed: Vec::new(),
        removed_max,
        records: 0,
        bytes: 0,
        judged: None,
        hash: Some(RecordsHash::default()),
        at: before,
    };
    let end = work.take_frames(&mut batch, &file, up_to, limits, decisions, (role, changes > 0));
    *tried = work.records;
    let end = end?;
    if let Some(expected) = role.expected() {
        // Nothing is committed before all records that the entry names were compared.
        let end = match end {
            End::Done | End::More if work.is_as_expected(&file, up_to, expected)? => None,
            End::Done | End::More => Some(End::Differs),
            end => Some(end),
        };
        if let Some(end) = end {
            drop(batch);
            return Ok(nothing(before, end));
        }
    }
    let BatchWork { orphans, removed, records, at, hash, .. } = work;
    if at == before {
        drop(batch);
        return Ok(nothing(before, end));
    }
    batch.sync_writes()?;
    batch.take_notes();
    batch.put_log(uid, &open.item(at.sequence, at.position))?;
    let (changes, version) =
        copy.visit(|copy| copy.enter(&mut batch, changes, (uid, at, hash), &removed, role))?;
    let committed = batch.commit(version)?;
    copy.visit(|copy| {
        copy.logs.get_mut(&uid).expect("a log is closed by whoever has the area").digested = at;
        copy.after_commit(area, &committed, changes)
    })?;
    Ok(Digest { at, end, records, orphans })
}

impl LocalCopy {
    /// The part of the copy that a batch of a log needs. `Err`: there is nothing to do, and this is how far the log is in the
    /// tree.
    fn prepare(
        &mut self,
        uid: LogUid,
        up_to: Sequence,
        role: Role,
    ) -> Result<Result<Prepared, Digested>, Error> {
        let before = self.digested(uid);
        if before.sequence >= up_to || !self.logs.contains_key(&uid) {
            return Ok(Err(before));
        }
        let file = self.file(uid)?;
        let fits = role != Role::Head || self.ledger.has_room_for_batch();
        let changes_left = if fits { self.changes_beside() } else { 0 };
        let open = self.ledger.table().log_now(uid).expect("each log of a copy is in the table");
        Ok(Ok(Prepared { before, open, file, removed_max: self.ledger.reap_max(), changes_left }))
    }

    /// Notes in the ledger what a batch did, with all that was noted since it began before it. Gives the changes that its
    /// commit contains, and its version.
    fn enter(
        &mut self,
        batch: &mut Batch<'_>,
        changes: usize,
        (uid, at, hash): (LogUid, Digested, Option<RecordsHash>),
        removed: &[InodeNumber],
        role: Role,
    ) -> Result<(usize, Sequence), Error> {
        let mut changes = self.put_changes(batch, changes, usize::MAX)?;
        if changes < self.ledger.pending().count() {
            return Err(AreaError::BatchFull.into());
        }
        // The entries come first: a copy that has the commit has the entries that led to it.
        if role == Role::Head {
            self.ledger.digest(uid, at.sequence, hash)?;
            changes += 1;
            if !removed.is_empty() {
                self.ledger.reap(removed)?;
                changes += 1;
            }
        }
        let place = self.ledger.place_after(changes);
        batch.set_ledger(&place);
        let version = match role {
            Role::Head => place.sequence,
            Role::Entry(repeated) => repeated.sequence,
        };
        Ok((changes, version))
    }
}

impl BatchWork<'_> {
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
        if let Some(expected) = role.expected() {
            frames = frames.hashed_by(expected.key);
        }
        loop {
            if self.at.sequence >= up_to {
                return Ok(End::Done);
            }
            let has = |limits: BatchLimits| self.records >= limits.records || self.bytes >= limits.bytes;
            let are_long = self.bytes >= LONG_RECORDS_BYTES && self.bytes / self.records >= LONG_RECORD;
            if are_long || has(limits) || (has(SHORT_BATCH) && (decisions.is_awaited)()) {
                return Ok(End::More);
            }
            if self.records > 0 && self.at.sequence >= (decisions.awaited)() {
                return Ok(End::More);
            }
            let frame = match (frames.next(), role) {
                (Ok(Some(frame)), _) => frame,
                (Ok(None), Role::Head) if file.has_changed() => return Ok(End::Cut(CutReason::Changed)),
                // To the head an unreadable record is like none.
                (Ok(None), _) | (Err(_), Role::Head) => return Ok(End::NoFrame),
                (Err(error), Role::Entry(_)) => return Err(error.into()),
            };
            let taken = decisions.taken();
            match self.apply(batch, (frame.bytes, frame.block_sum), decisions) {
                Ok(()) => {}
                Err(Halt::Full) if self.records > 0 || changes => {
                    // The record comes again, and pays then.
                    decisions.restore_room(taken);
                    return Ok(End::More);
                }
                Err(Halt::Full) => return Ok(End::Cut(CutReason::NoRoom)),
                Err(Halt::Cut(reason)) => return Ok(End::Cut(reason)),
                Err(Halt::Failed(error)) => return Err(error.into()),
            }
            self.at = frame.after;
            self.records += 1;
            self.bytes += frame.bytes.len();
            self.note_hash(frame.hash);
        }
    }

    fn note_hash(&mut self, hash: Option<RecordsHash>) {
        self.hash = self.hash.zip(hash).map(|(mut sum, hash)| {
            sum.add(hash);
            sum
        });
    }

    /// True if these records, with those behind them up to `up_to`, have this hash.
    fn is_as_expected(&self, file: &LogFile, up_to: Sequence, expected: ExpectedHash) -> Result<bool, Error> {
        let (mut frames, mut at) = (file.frames(self.at).hashed_by(expected.key), self.at.sequence);
        let mut sum = self.hash;
        while at < up_to {
            let Some(frame) = frames.next()? else { return Ok(false) };
            at = frame.after.sequence;
            if let (Some(sum), Some(hash)) = (&mut sum, frame.hash) {
                sum.add(hash);
            }
        }
        Ok(sum == Some(expected.hash))
    }

    fn apply(
        &mut self,
        batch: &mut Batch<'_>,
        (frame, block_sum): (&[u8], Option<u32>),
        decisions: &mut Decisions<'_>,
    ) -> Result<(), Halt> {
        let record = Record::decode(frame).map_err(|error| Halt::Cut(CutReason::Decode(error)))?;
        if record.operation == Operation::Pad {
            return Ok(());
        }
        // A log that gives out a number twice: elsewhere the inode stays until the entry behind this batch removes it.
        if created_by(&record).is_some_and(|inode| self.removed.contains(&inode)) {
            return Err(Halt::Full);
        }
        let is_open = decisions.is_open;
        let mut take_room = |blocks, shared| decisions.take_room(blocks, shared);
        let no_more = self.removed.len() >= self.removed_max;
        let keeps = || no_more || record::keeps_open(frame) || victim_of(&record).is_some_and(is_open);
        let (of_log, judged) = ((self.log, self.open), &mut self.judged);
        match apply_record(batch, of_log, (&record, block_sum), keeps, &mut take_room, judged)? {
            Applied::Orphaned(inode) => self.orphans.push((inode, record::keeps_open(frame))),
            Applied::Removed(inode) => self.removed.push(inode),
            Applied::Done | Applied::Stale => {}
        }
        Ok(())
    }
}

/// Why a log ends where no frame stands.
pub(crate) const NO_FRAME: CutReason = CutReason::Decode(TORN);
