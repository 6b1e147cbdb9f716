//! What one node has of the chain: the tree, the ledger with its table, and the update logs.
//!
//! Guarantees: a flip contains the ledger up to one entry, and its table as of that entry; readers of what a flip freed
//! are told before it is used again. No lock is taken here, and nothing is waited for.

use super::table::{Change, Table};
use crate::config::Config;
use crate::error::Error;
use crate::generations::Generations;
use crate::ledger::Ledger;
use crate::logs::{BEGINNING, LogFile};
use area::{Area, AreaError, Batch, Committed};
use format::{InodeNumber, LogUid, Sequence};
use ipc::Digested;
use pmem::Medium;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Damaged blocks that are remembered.
const DAMAGED_MAX: usize = 1024;

/// An update log: its file, and how far it is in the tree.
pub(crate) struct UpdateLog {
    /// None until it is read for the first time, and if there is no such file.
    pub file: Option<Arc<LogFile>>,
    pub digested: Digested,
}

/// The table that the tree's last flip holds, and how far its logs are in the tree.
pub(crate) fn table_of(area: &Area) -> Result<(Table, BTreeMap<LogUid, Digested>), Error> {
    let (mut table, mut progress) = (Table::default(), BTreeMap::new());
    for (uid, item) in area.logs()? {
        table.restore(uid, &item, area.groups(uid)?, &area.grants(uid)?);
        progress.insert(uid, Digested { sequence: item.digested, position: item.position.get() });
    }
    Ok((table, progress))
}

/// What one node has of the chain.
pub(crate) struct LocalCopy {
    pub medium: Medium,
    pub area: Area,
    pub ledger: Ledger,
    /// The logs of the table.
    pub logs: BTreeMap<LogUid, UpdateLog>,
    pub generations: Arc<Generations>,
    /// Damaged blocks of files, by their number in the file, of which records replaced a part since this process began.
    pub damaged: BTreeSet<(InodeNumber, u64)>,
    /// A larger file is no log that was made.
    log_bytes_max: u64,
    /// Changes of the ledger in one flip.
    pub(super) batch_changes: usize,
}

impl LocalCopy {
    /// What a pool holds, at its last flip. Nothing is written.
    ///
    /// # Errors
    /// `Area`, `Media`, `File`.
    pub fn open(
        area: Area,
        medium: &Medium,
        config: &Config,
        generations: Arc<Generations>,
    ) -> Result<Self, Error> {
        let (table, progress) = table_of(&area)?;
        let of_progress = |(uid, digested)| (uid, UpdateLog { file: None, digested });
        let logs = progress.into_iter().map(of_progress).collect();
        let ledger = Ledger::open(medium, area.pool(), area.ledger(), table)?;
        let log_bytes_max = config.log_bytes_max.max(config.log_bytes);
        let (medium, batch_changes) = (medium.clone(), config.batch_changes);
        let damaged = BTreeSet::new();
        Ok(Self { medium, area, ledger, logs, generations, damaged, log_bytes_max, batch_changes })
    }

    /// The file of a log that lives; `None` if its owner made something else of it.
    ///
    /// # Errors
    /// `Media`.
    pub fn file(&mut self, uid: LogUid) -> Result<Option<Arc<LogFile>>, Error> {
        let Some(log) = self.logs.get_mut(&uid) else { return Ok(None) };
        if log.file.is_none() {
            let incarnation =
                self.ledger.table().log(uid).expect("each log of a copy is in the table").incarnation;
            log.file = LogFile::open(&self.medium, (uid, incarnation), self.log_bytes_max)?.map(Arc::new);
        }
        Ok(log.file.clone())
    }

    /// How far a log is in the tree.
    pub fn digested(&self, uid: LogUid) -> Digested {
        self.logs.get(&uid).map_or(BEGINNING, |log| log.digested)
    }

    /// A log begins: `entry` of the ledger opened it.
    pub fn begin_log(&mut self, uid: LogUid, file: Option<Arc<LogFile>>) {
        self.logs.insert(uid, UpdateLog { file, digested: BEGINNING });
    }

    /// A log goes on in another file after `last`; the file that it had.
    pub fn renew_log(
        &mut self,
        uid: LogUid,
        last: Sequence,
        file: Option<Arc<LogFile>>,
    ) -> Option<Arc<LogFile>> {
        let log = self.logs.get_mut(&uid)?;
        log.digested = Digested { sequence: last, ..BEGINNING };
        std::mem::replace(&mut log.file, file)
    }

    /// Puts what the ledger said since the last flip into a batch, as far as fits, which may be nothing; gives how
    /// many changes.
    pub fn put_changes(
        batch: &mut Batch<'_>,
        ledger: &Ledger,
        logs: &BTreeMap<LogUid, UpdateLog>,
        changes_max: usize,
    ) -> Result<usize, AreaError> {
        for (index, pending) in ledger.pending().take(changes_max).enumerate() {
            match put_change(batch, ledger, logs, &pending.change) {
                Ok(()) => {}
                Err(AreaError::BatchFull) => return Ok(index),
                Err(error) => return Err(error),
            }
        }
        Ok(ledger.pending().count().min(changes_max))
    }

    /// Changes of the ledger that a flip takes beside something else.
    pub fn changes_beside(&self) -> usize {
        (self.batch_changes / 2).max(1)
    }

    /// What follows a flip: readers of what it freed are told, then it may be used again.
    pub fn after_flip(&mut self, committed: &Committed, changes: usize) -> Result<(), Error> {
        self.generations.raise(&committed.freed_of);
        self.area.release(committed.flip)?;
        let left = DAMAGED_MAX.saturating_sub(self.damaged.len());
        self.damaged.extend(committed.damaged.iter().take(left));
        self.ledger.contained(changes);
        Ok(())
    }

    /// Flips until at most `left` changes of the ledger are not contained in the tree.
    pub fn contain_changes(&mut self, left: usize) -> Result<(), Error> {
        while self.ledger.pending().count() > left {
            let mut batch = self.area.begin()?;
            let changes = Self::put_changes(&mut batch, &self.ledger, &self.logs, self.batch_changes)?;
            if changes == 0 {
                return Err(Error::LedgerFull);
            }
            let place = self.ledger.place_after(changes);
            batch.set_ledger(&place);
            // The entries that these changes are of are the last that the flip contains.
            let version = place.sequence.max(batch.version());
            let committed = batch.commit(version)?;
            self.after_flip(&committed, changes)?;
        }
        Ok(())
    }
}

fn put_change(
    batch: &mut Batch<'_>,
    ledger: &Ledger,
    logs: &BTreeMap<LogUid, UpdateLog>,
    change: &Change,
) -> Result<(), AreaError> {
    // What is said of a log that ended meanwhile goes with it: only its end matters.
    let living = |uid: &LogUid| ledger.table().log(*uid);
    let item = |uid: &LogUid| {
        let digested = logs.get(uid).map_or(BEGINNING, |log| log.digested);
        living(uid).map(|log| log.item(digested.sequence, digested.position))
    };
    match change {
        Change::Nothing => Ok(()),
        Change::Close(uid) => batch.remove_log(*uid),
        Change::Open(uid) => {
            let (Some(log), Some(item)) = (living(uid), item(uid)) else { return Ok(()) };
            batch.put_log(*uid, &item)?;
            batch.put_groups(*uid, &log.caller.groups)
        }
        Change::Renew(uid) => item(uid).map_or(Ok(()), |item| batch.put_log(*uid, &item)),
        Change::Grant(uid, unit, grant) if living(uid).is_some() => {
            batch.put_grant(*uid, *unit, &grant.to_item())
        }
        Change::End(uid, unit) if living(uid).is_some() => batch.remove_grant(*uid, *unit),
        Change::Grant(..) | Change::End(..) => Ok(()),
        Change::Life(life, item) => batch.put_life(*life, item),
    }
}
