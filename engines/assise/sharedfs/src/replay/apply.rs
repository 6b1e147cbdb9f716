//! One record into a batch: judged, applied, with what follows for the mode (Assise §3.2.3).

use super::authorize::{self, Allowed, Refusal};
use super::table::OpenLog;
use area::{Applied, Applying, AreaError, Batch, Refused};
use format::node::InodeItem;
use format::record::{self, Operation, Record};
use format::superblock::OWNER_DAEMON;
use format::{DecodeError, InodeNumber, LeaseVersion, LogUid};

/// Why a log was cut before its commit word said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutReason {
    /// The bytes are no record.
    Decode(DecodeError),
    /// The record is not the log's or its user's to make.
    Refused(Refusal),
    /// The record does not fit the tree.
    Contradiction(Refused),
    /// More than was promised, and there is no room.
    NoRoom,
    /// The record has changed since it was read before, to be sent to a copy or to be digested.
    Changed,
}

impl CutReason {
    /// Whether records are missing, or are not those that were read before: a copy may have them.
    pub(crate) fn is_of_the_file(self) -> bool {
        matches!(self, Self::Decode(_) | Self::Changed)
    }

    /// Whether another entry in the ledger might have made the record count.
    pub(crate) fn is_of_the_ledger(self) -> bool {
        matches!(self, Self::Refused(_) | Self::Contradiction(_))
    }
}

/// Why a record was not applied.
pub(crate) enum Halt {
    /// The batch is full.
    Full,
    Cut(CutReason),
    Failed(AreaError),
}

impl From<AreaError> for Halt {
    fn from(error: AreaError) -> Self {
        match error {
            AreaError::BatchFull => Self::Full,
            AreaError::NoSpace => Self::Cut(CutReason::NoRoom),
            AreaError::Refused(refused) => Self::Cut(CutReason::Contradiction(refused)),
            error => Self::Failed(error),
        }
    }
}

/// Backing of the room that a record takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    /// It was promised.
    Promise,
    /// It was promised to no session.
    Spare,
    /// There is none.
    Nothing,
}

/// The judgement of a write that counted. It holds for the next write of the log to the same inode, if only such writes lie
/// between the two: they change nothing by which a write is judged, and rights do not end within a batch.
#[derive(Clone, Copy)]
pub(crate) struct JudgedWrite {
    inode: InodeNumber,
    version: LeaseVersion,
    owner: u32,
}

/// The inode whose last name a record may remove.
pub(crate) fn victim_of(record: &Record<'_>) -> Option<InodeNumber> {
    match &record.operation {
        Operation::Unlink { .. } => Some(record.inode),
        Operation::Rename { body, exchange: false, .. } if body.replaced != InodeNumber::NONE => {
            Some(body.replaced)
        }
        _ => None,
    }
}

/// The inode that a record creates.
pub(crate) fn created_by(record: &Record<'_>) -> Option<InodeNumber> {
    match &record.operation {
        Operation::Create { .. } | Operation::CreateUnnamed { .. } => Some(record.inode),
        Operation::Rename { whiteout, .. } => whiteout.map(|whiteout| whiteout.inode),
        _ => None,
    }
}

/// Judges one record and applies it, with what follows for the mode. `block_sum` is the checksum of a payload that is one
/// block; `judged` is kept from one record of the batch to the next.
pub(crate) fn apply_record(
    batch: &mut Batch<'_>,
    (uid, open): (LogUid, &OpenLog),
    (record, block_sum): (&Record<'_>, Option<u32>),
    keep_open: impl FnOnce() -> bool,
    take_room: &mut dyn FnMut(u64, bool) -> Backing,
    judged: &mut Option<JudgedWrite>,
) -> Result<Applied, Halt> {
    let is_write = matches!(record.operation, Operation::Write { .. });
    let before = judged.take().filter(|before| is_write && before.inode == record.inode);
    let (allowed, owner) = match before {
        Some(before) => (Allowed::AsIs, before.owner),
        None => {
            let decision = authorize::decide(open, record, &mut |inode| batch.inode(inode))?;
            let allowed = decision.map_err(|refusal| Halt::Cut(CutReason::Refused(refusal)))?;
            (allowed, owner_key(open, batch.inode(record.inode)?.as_ref()))
        }
    };
    let version = |inode: InodeNumber| match before {
        Some(before) if before.inode == inode => before.version,
        _ => authorize::version_of(open, inode, record.sequence),
    };
    let shared = owner == OWNER_DAEMON && record::takes_blocks(&record.operation);
    let backing = take_room(record::room_blocks(&record.operation), shared);
    if backing == Backing::Nothing {
        return Err(Halt::Cut(CutReason::NoRoom));
    }
    let applying = Applying {
        log: uid,
        sequence: record.sequence,
        time_ns: record.time_ns,
        version_of: &version,
        owner,
        keep_open: keep_open(),
        promised: backing == Backing::Promise,
        block_sum,
    };
    match (allowed, &record.operation) {
        (Allowed::WithMode(mode), Operation::SetAttr { body }) => {
            let mut body = *body;
            body.mask.set(body.mask.get() | record::SET_MODE);
            body.mode.set(mode);
            Ok(batch.apply(record.inode, &Operation::SetAttr { body }, &applying)?)
        }
        (Allowed::WithMode(mode), operation) => {
            let applied = batch.apply(record.inode, operation, &applying)?;
            // The batch does not end between the two: it is made again with fewer records.
            batch.set_mode(record.inode, mode).map_err(|error| match error {
                AreaError::BatchFull => Halt::Failed(error),
                error => error.into(),
            })?;
            Ok(applied)
        }
        (Allowed::AsIs, operation) => {
            let applied = batch.apply(record.inode, operation, &applying)?;
            let inode = record.inode;
            *judged = is_write.then(|| JudgedWrite { inode, version: version(inode), owner });
            Ok(applied)
        }
    }
}

/// Whose segment new blocks of a file go to. The log's user reached the file by a permitted walk, or made it in a
/// directory that it reached so; if the file is its own, every folder above let its owner through, and it may map the
/// blocks. Root may map the blocks that it wrote to any file. All other users' blocks are the daemon's, and are read by
/// call.
fn owner_key(open: &OpenLog, item: Option<&InodeItem>) -> u32 {
    match item {
        Some(item) if record::is_own_file(open.caller.uid, item.uid.get()) => open.caller.uid,
        _ => OWNER_DAEMON,
    }
}
