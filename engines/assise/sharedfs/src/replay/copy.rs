//! A node's copy of the chain's state: the tree, the ledger with its table, and the update logs.
//!
//! The thread that holds the [`Area`]'s lock prepares a batch beside the copy. It visits the copy where the batch
//! begins, where it writes the batch's entries into the ledger, and where its commit becomes visible to readers.
//!
//! Guarantees: a commit contains the ledger up to one entry, and its table as of that entry; readers of what a commit freed
//! are told before it is used again. No lock is taken here, and nothing is waited for.

use super::table::{Change, Table};
use crate::config::Config;
use crate::error::Error;
use crate::generations::Generations;
use crate::ledger::Ledger;
use crate::pool_space::PoolSpace;
use crate::room::Free;
use area::{Area, AreaError, Batch, Committed, Snapshot};
use format::hash::HashKey;
use format::{InodeNumber, Life, LogUid, Sequence};
use ipc::Digested;
use mirror::logs::{BEGINNING, LogFile};
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
    /// The record before the first that its file held; `None` if the file was begun before this process, and the tree contains
    /// records of it.
    pub before: Option<Sequence>,
}

/// The table that the tree's last commit holds, and how far its logs are in the tree.
pub(crate) fn table_of(area: &Area) -> Result<(Table, BTreeMap<LogUid, Digested>), Error> {
    let (mut table, mut progress) = (Table::default(), BTreeMap::new());
    for (uid, item) in area.logs()? {
        table.restore(uid, &item, area.groups(uid)?, &area.grants(uid)?);
        progress.insert(uid, Digested { sequence: item.digested, position: item.position.get() });
    }
    Ok((table, progress))
}

/// The key of a life, as the tree has it; zeros before the first life.
pub(crate) fn key_of_life(area: &Area, life: Life) -> Result<[u8; 16], Error> {
    let lives = area.lives()?;
    Ok(lives.iter().find(|(other, _)| *other == life).map_or([0; 16], |(_, item)| item.key))
}

/// Access to a copy while a batch is prepared. A shared copy is locked for each visit, and for no longer.
pub(crate) trait Visit {
    /// Looks at the copy, or changes it.
    fn visit<T>(&mut self, look: impl FnOnce(&mut LocalCopy) -> T) -> T;
}

impl Visit for LocalCopy {
    fn visit<T>(&mut self, look: impl FnOnce(&mut LocalCopy) -> T) -> T {
        look(self)
    }
}

/// A node's copy of the chain's state.
pub(crate) struct LocalCopy {
    pub medium: Medium,
    /// The tree of the last commit.
    pub tree: Snapshot,
    /// Free space after that commit.
    pub free: Free,
    pub ledger: Ledger,
    /// The logs of the table.
    pub logs: BTreeMap<LogUid, UpdateLog>,
    /// Key of the hashes of their records at a head that has copies, or may get some.
    hash_key: Option<HashKey>,
    pub generations: Arc<Generations>,
    /// Damaged blocks of files, by their number in the file, of which records replaced a part since this process began.
    pub damaged: BTreeSet<(InodeNumber, u64)>,
    /// A larger file is no log that was made.
    /// Changes of the ledger in one commit.
    pub(super) batch_changes: usize,
}

impl LocalCopy {
    /// Opens a pool at its last commit. Nothing is written.
    ///
    /// # Errors
    /// `Area`, `Media`, `File`.
    pub fn open(
        area: &Area,
        medium: &Medium,
        config: &Config,
        generations: Arc<Generations>,
    ) -> Result<Self, Error> {
        let (table, progress) = table_of(area)?;
        let of_progress = |(uid, digested): (LogUid, Digested)| {
            let before = (digested == BEGINNING).then_some(BEGINNING.sequence);
            (uid, UpdateLog { file: None, digested, before })
        };
        let logs = progress.into_iter().map(of_progress).collect();
        let ledger = Ledger::open(
            medium,
            area.pool(),
            (area.ledger(), key_of_life(area, area.ledger().life)?),
            table,
        )?;
        let space = medium.held_bytes().map(|_| PoolSpace::of(medium, config));
        let (medium, batch_changes) = (medium.clone(), config.batch_changes);
        let (tree, free, damaged) = (area.snapshot(), Free::of(area, space), BTreeSet::new());
        let hash_key = None;
        Ok(Self { medium, tree, free, ledger, logs, hash_key, generations, damaged, batch_changes })
    }

    /// From now on all readings of a record give the same bytes, and each `Digest` entry gets the hash of its records.
    pub fn keep_hashes(&mut self, key: HashKey) {
        let key = *self.hash_key.get_or_insert(key);
        self.logs.values().filter_map(|log| log.file.as_ref()).for_each(|file| file.keep_hashes(key));
    }

    fn with_hashes(&self, file: Option<Arc<LogFile>>) -> Option<Arc<LogFile>> {
        if let (Some(file), Some(key)) = (&file, self.hash_key) {
            file.keep_hashes(key);
        }
        file
    }

    /// The file of a log that lives; `None` if its owner made something else of it.
    ///
    /// # Errors
    /// `Media`.
    pub fn file(&mut self, uid: LogUid) -> Result<Option<Arc<LogFile>>, Error> {
        let Some(log) = self.logs.get(&uid) else { return Ok(None) };
        if log.file.is_some() {
            return Ok(log.file.clone());
        }
        let open = self.ledger.table().log(uid).expect("each log of a copy is in the table");
        let opened = LogFile::open(&self.medium, (uid, open.incarnation), open.file_bytes)?;
        let file = self.with_hashes(opened.map(Arc::new));
        self.logs.get_mut(&uid).expect("it was there before").file.clone_from(&file);
        Ok(file)
    }

    /// The file of a log is opened again when it is needed, because other records were put into it.
    pub fn reopen(&mut self, uid: LogUid) {
        if let Some(log) = self.logs.get_mut(&uid) {
            log.file = None;
        }
    }

    /// Another file takes the place of a log's. It has the records behind those that the tree contains.
    pub fn replace_file(&mut self, uid: LogUid, file: Arc<LogFile>) {
        let file = self.with_hashes(Some(file));
        if let Some(log) = self.logs.get_mut(&uid) {
            log.before = log.before.filter(|before| *before == log.digested.sequence);
            log.file = file;
        }
    }

    /// How far a log is in the tree.
    pub fn digested(&self, uid: LogUid) -> Digested {
        self.logs.get(&uid).map_or(BEGINNING, |log| log.digested)
    }

    /// A log begins: `entry` of the ledger opened it.
    pub fn begin_log(&mut self, uid: LogUid, file: Option<Arc<LogFile>>) {
        let file = self.with_hashes(file);
        self.logs.insert(uid, UpdateLog { file, digested: BEGINNING, before: Some(BEGINNING.sequence) });
    }

    /// Puts what the ledger said since the last commit into a batch, from the change with this number on and as far as fits,
    /// which may be nothing; gives how many changes the batch has then.
    pub fn put_changes(
        &self,
        batch: &mut Batch<'_>,
        from: usize,
        changes_max: usize,
    ) -> Result<usize, AreaError> {
        for (index, pending) in self.ledger.pending().enumerate().take(changes_max).skip(from) {
            match put_change(batch, &self.ledger, &self.logs, &pending.change) {
                Ok(()) => {}
                Err(AreaError::BatchFull) => return Ok(index),
                Err(error) => return Err(error),
            }
        }
        Ok(self.ledger.pending().count().min(changes_max))
    }

    /// Changes of the ledger that a commit takes beside something else.
    pub fn changes_beside(&self) -> usize {
        (self.batch_changes / 2).max(1)
    }

    /// Follows a commit: readers get its tree, the generations of files whose blocks it freed are raised, then the blocks may be
    /// used again.
    pub fn after_commit(
        &mut self,
        area: &mut Area,
        committed: &Committed,
        changes: usize,
    ) -> Result<(), Error> {
        self.tree = area.snapshot();
        self.generations.raise(&committed.freed_of);
        area.release(committed.commit)?;
        self.free = Free::of(area, self.free.space.take());
        let left = DAMAGED_MAX.saturating_sub(self.damaged.len());
        self.damaged.extend(committed.damaged.iter().take(left));
        self.ledger.contained(changes);
        Ok(())
    }
}

/// Commits until at most `left` changes of the ledger are not contained in the tree.
pub(crate) fn contain_changes(area: &mut Area, copy: &mut impl Visit, left: usize) -> Result<(), Error> {
    while copy.visit(|copy| copy.ledger.pending().count() > left) {
        let mut batch = area.begin()?;
        let (changes, place) = copy.visit(|copy| {
            let changes = copy.put_changes(&mut batch, 0, copy.batch_changes)?;
            Ok::<_, AreaError>((changes, copy.ledger.place_after(changes)))
        })?;
        if changes == 0 {
            return Err(Error::LedgerFull);
        }
        batch.set_ledger(&place);
        // The entries that these changes are of are the last that the commit contains.
        let version = place.sequence.max(batch.version());
        let committed = batch.commit(version)?;
        copy.visit(|copy| copy.after_commit(area, &committed, changes))?;
    }
    Ok(())
}

fn put_change(
    batch: &mut Batch<'_>,
    ledger: &Ledger,
    logs: &BTreeMap<LogUid, UpdateLog>,
    change: &Change,
) -> Result<(), AreaError> {
    // Changes of a log that ended meanwhile are skipped: only its end matters.
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
        Change::Grant(uid, unit, grant) if living(uid).is_some() => {
            batch.put_grant(*uid, *unit, &grant.to_item())
        }
        Change::End(uid, unit) if living(uid).is_some() => batch.remove_grant(*uid, *unit),
        Change::Grant(..) | Change::End(..) => Ok(()),
        Change::Life(life, item) => batch.put_life(*life, item),
    }
}
