//! Digest: records of an update log become part of the shared area, or cut the log (Assise §3.2.1; schedules 1.1,
//! 1.13, 1.21, 2.1).
//!
//! Guarantees: a record is judged on a copy of its own, by the ledger's table and the attributes that the records
//! before it left; the first one that does not count cuts the log there. A batch is bounded, and one flip makes it
//! real together with "digested up to" and the ledger's table. Readers of what a flip freed are told before it is
//! used again, and the log's owner is told last.

use crate::entitle::{self, Allowed, Refusal};
use crate::error::Error;
use crate::logs::TORN;
use crate::references::Rights;
use crate::room::Free;
use crate::state::{Core, State};
use crate::table::OpenLog;
use area::{Applied, Applying, AreaError, Batch, Refused};
use ccnvm::SessionId;
use format::node::InodeItem;
use format::record::{self, Operation, Record};
use format::session::OPEN_TABLE;
use format::superblock::OWNER_DAEMON;
use format::{DecodeError, InodeNumber, LogUid, Sequence};
use ipc::Digested;

/// Why a log was cut before its commit word said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutReason {
    /// What stands there is no record.
    Decode(DecodeError),
    /// The record is not the log's or its user's to make.
    Refused(Refusal),
    /// The record does not fit the tree.
    Contradiction(Refused),
    /// More than was promised, and there is no room.
    NoRoom,
    /// A block that the record keeps in part is damaged.
    Damaged,
}

impl CutReason {
    /// Whether another entry in the ledger might have made the record count.
    pub(crate) fn is_of_the_ledger(self) -> bool {
        matches!(self, Self::Refused(_) | Self::Contradiction(_))
    }
}

/// How far a step of a digest came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// As far as was asked.
    Done,
    /// There is more.
    More,
    /// The log ends here, whatever its commit word says.
    Cut(CutReason),
}

impl State {
    /// One batch: records of a session's log up to `up_to` at most, in one flip.
    pub fn digest_step(&mut self, core: &Core, id: SessionId, up_to: Sequence) -> Result<Step, Error> {
        if self.is_stopped() {
            return Err(Error::Stopped);
        }
        let mut records_max = core.config.batch_records;
        loop {
            match self.digest_batch(core, id, up_to, records_max) {
                // The batch had no place left for the note of how far it came: half of it has.
                Err(Error::Area(AreaError::BatchFull)) if records_max > 1 => records_max /= 2,
                result => return self.guard(result),
            }
        }
    }

    /// What was promised is kept from the batch that comes next.
    fn keep_promised(&mut self) {
        let free = Free::of(&self.area);
        self.area.keep(self.room.kept(&free), self.room.kept_nodes());
    }

    fn digest_batch(
        &mut self,
        core: &Core,
        id: SessionId,
        up_to: Sequence,
        records_max: usize,
    ) -> Result<Step, Error> {
        let Some(session) = self.sessions.get(&id).filter(|session| session.digested.sequence < up_to) else {
            return Ok(Step::Done);
        };
        let (log, before) = (session.log, session.digested);
        let file = session.file.clone();
        // So that what is pending fits the flip beside the records.
        self.contain_changes(core, core.config.batch_changes / 2)?;
        self.keep_promised();
        let mut batch = self.area.begin(self.epoch)?;
        let changes = Self::put_changes(&mut batch, &self.ledger, &self.sessions, core.config.batch_changes)?;
        let open = self.ledger.table().log(log).expect("a session's log is open until the session is gone");
        let mut work = Work { log, open, orphans: Vec::new(), at: before };
        let mut frames = file.frames(before);
        let (mut records, mut bytes) = (0, 0);
        let sessions = &self.sessions;
        let (references, heirs) = (&self.references, &self.heirs);
        let is_open = |inode: InodeNumber| {
            references.any(inode)
                || sessions.values().any(|session| {
                    session.knows(inode) && (session.unsettled || session.shared.client.is_open(inode))
                })
                || heirs.may_have_open(inode)
        };
        let promised = self.room.left(id);
        let room = &mut self.room;
        let step = loop {
            if work.at.sequence >= up_to {
                break Step::Done;
            }
            if records >= records_max || bytes >= core.config.batch_bytes {
                break Step::More;
            }
            // An unreadable record ends the log like one that is none.
            let Ok(Some(frame)) = frames.next() else { break Step::Cut(CutReason::Decode(TORN)) };
            let left = room.left(id);
            match work.apply(&mut batch, &frame.bytes, &is_open, &mut |blocks, shared| {
                room.take(id, blocks, shared)
            }) {
                Ok(()) => {}
                Err(Halt::Full) if records > 0 || changes > 0 => {
                    // The record comes again, and pays then.
                    room.restore(id, left);
                    break Step::More;
                }
                Err(Halt::Full) => break Step::Cut(CutReason::NoRoom),
                Err(Halt::Cut(reason)) => break Step::Cut(reason),
                Err(Halt::Failed(error)) => return Err(error.into()),
            }
            work.at = frame.after;
            records += 1;
            bytes += frame.bytes.len();
        };
        let Work { orphans, at, .. } = work;
        let noted = match at == before {
            true => Ok(()),
            false => batch.put_log(log, &open.item(at.sequence, at.position)),
        };
        batch.set_counters(&Self::counters(&self.numbers, &self.leases, &self.ledger, changes));
        let committed = match noted.and_then(|()| batch.commit()) {
            Ok(committed) => committed,
            Err(error) => {
                self.room.restore(id, promised);
                return Err(error.into());
            }
        };
        self.after_flip(core, &committed, changes)?;
        self.note_orphans(core, id, &orphans)?;
        let session = self.sessions.get_mut(&id).expect("looked up above");
        session.digested = at;
        session.shared.daemon.publish_digested(at);
        Ok(step)
    }

    /// Inodes that lost their last name: whoever has one open refers to it from now on, with the rights that its
    /// user has; what nobody has open goes.
    fn note_orphans(
        &mut self,
        core: &Core,
        id: SessionId,
        orphans: &[(InodeNumber, bool)],
    ) -> Result<(), Error> {
        for (inode, kept) in orphans {
            let Some(item) = self.area.inode(*inode)? else { continue };
            let by_table = self.sessions.iter().filter(|(holder, session)| {
                (*kept && **holder == id) || (session.knows(*inode) && session.shared.client.is_open(*inode))
            });
            let holders: Vec<SessionId> = by_table.map(|(holder, _)| *holder).collect();
            for holder in holders {
                // More than a session may refer to are not kept for it.
                let bounded = self.references.count(holder) < core.config.references_max.max(OPEN_TABLE);
                if bounded && self.references.rights(holder, *inode).is_none() {
                    let rights = self.rights_of_user(holder, *inode, &item);
                    self.refer_to(holder, *inode, rights);
                }
            }
            if !self.references.any(*inode) {
                self.reapable.push_back(*inode);
            }
        }
        Ok(())
    }

    /// What a session's user may do with an inode that it has open.
    pub fn rights_of_user(&self, id: SessionId, inode: InodeNumber, item: &InodeItem) -> Rights {
        Rights {
            read: self.may_read(id, inode, item),
            write: self.may_write(id, inode) || self.permits_write(id, inode, item),
        }
    }

    fn permits_write(&self, id: SessionId, inode: InodeNumber, item: &InodeItem) -> bool {
        let found = entitle::attributes(inode, item);
        self.sessions
            .get(&id)
            .is_some_and(|session| vfs::access::permits(&session.caller, &found, vfs::access::WRITE))
    }
}

/// Records of one log on their way into one batch.
struct Work<'a> {
    log: LogUid,
    open: &'a OpenLog,
    /// Inodes that lost their last name, and whether the log keeps them open.
    orphans: Vec<(InodeNumber, bool)>,
    at: Digested,
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
            AreaError::Data { .. } => Self::Cut(CutReason::Damaged),
            error => Self::Failed(error),
        }
    }
}

impl Work<'_> {
    fn apply(
        &mut self,
        batch: &mut Batch<'_>,
        frame: &[u8],
        is_open: &dyn Fn(InodeNumber) -> bool,
        take_room: &mut dyn FnMut(u64, bool) -> bool,
    ) -> Result<(), Halt> {
        let record = Record::decode(frame).map_err(|error| Halt::Cut(CutReason::Decode(error)))?;
        if record.operation == Operation::Pad {
            return Ok(());
        }
        let applied = apply_record(
            batch,
            (self.log, self.open),
            &record,
            || record::keeps_open(frame) || victim_of(&record).is_some_and(is_open),
            take_room,
        )?;
        if let Applied::Orphaned(inode) = applied {
            self.orphans.push((inode, record::keeps_open(frame)));
        }
        Ok(())
    }
}

/// What a record may take the last name of.
fn victim_of(record: &Record<'_>) -> Option<InodeNumber> {
    match &record.operation {
        Operation::Unlink { .. } => Some(record.inode),
        Operation::Rename { body, exchange: false, .. } if body.replaced != InodeNumber::NONE => {
            Some(body.replaced)
        }
        _ => None,
    }
}

/// Judges one record and applies it, with what follows for the mode.
pub(crate) fn apply_record(
    batch: &mut Batch<'_>,
    (uid, open): (LogUid, &OpenLog),
    record: &Record<'_>,
    keep_open: impl FnOnce() -> bool,
    take_room: &mut dyn FnMut(u64, bool) -> bool,
) -> Result<Applied, Halt> {
    let decision = entitle::decide(open, record, &mut |inode| batch.inode(inode))?;
    let allowed = decision.map_err(|refusal| Halt::Cut(CutReason::Refused(refusal)))?;
    let version = |inode: InodeNumber| entitle::version_of(open, inode, record.sequence);
    let owner = owner_key(open, batch.inode(record.inode)?.as_ref());
    let shared = owner == OWNER_DAEMON && record::takes_blocks(&record.operation);
    let applying = Applying {
        log: uid,
        sequence: record.sequence,
        time_ns: record.time_ns,
        version_of: &version,
        owner,
        keep_open: keep_open(),
        promised: take_room(record::room_blocks(&record.operation), shared),
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
            // If this finds the batch full, the record comes again: stale then, and its mode still to be set.
            batch.set_mode(record.inode, mode)?;
            Ok(applied)
        }
        (Allowed::AsIs, operation) => Ok(batch.apply(record.inode, operation, &applying)?),
    }
}

/// Whose segment new blocks of a file go to. The log's user reached the file by a permitted walk, or made it in a
/// directory that it reached so; if the file is its own, every folder above let its owner through, and it may map
/// the blocks. Root may map what it wrote to any file. Everybody else's blocks are the daemon's, and read by call.
fn owner_key(open: &OpenLog, item: Option<&InodeItem>) -> u32 {
    match item {
        Some(item) if record::is_own_file(open.caller.uid, item.uid.get()) => open.caller.uid,
        _ => OWNER_DAEMON,
    }
}
