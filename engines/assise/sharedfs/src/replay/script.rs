//! Executes the ledger: entry after entry from where the last commit stands, with the records that they name.
//!
//! Guarantees: it decides nothing and appends nothing; executing an entry twice, after a crash in the middle, comes to the
//! same. A record that an entry names and the log does not have is reported: after a crash of the machine that is how far
//! the log came, if no entry stands behind; else the log is damaged.

use super::apply::CutReason;
use super::batch::{BatchLimits, Decisions, End, ExpectedHash, Repeated, Role, digest_batch};
use super::copy::{LocalCopy, Visit, contain_changes};
use crate::config::Config;
use crate::error::Error;
use crate::generations::Generations;
use crate::imported::make_files_anew;
use crate::ledger::ReadEntry;
use area::{Area, AreaError};
use format::hash::RecordsHash;
use format::ledger::{Entry, Event};
use format::{Incarnation, InodeNumber, LogUid, Sequence};
use ipc::host::Host;
use pmem::Medium;
use std::sync::Arc;

/// The results of executing a ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Executed {
    /// The last entry.
    pub last: Sequence,
    /// Records that were digested, pads included.
    pub records: u64,
    /// Inodes that were removed.
    pub reaped: u64,
    /// Logs that end before the record that an entry names, though the ledger goes on: the record after this one is lost.
    pub damaged: Vec<(LogUid, Sequence)>,
}

/// Brings a pool that no daemon serves to the end of its ledger, as a copy does that does not lead: no log is closed, and
/// nothing is decided.
///
/// # Errors
/// `Settings`; `Media` (`Locked`: a daemon has it); `Area`; `File`.
pub fn execute_ledger(host: &dyn Host, medium: &Medium, config: &Config) -> Result<Executed, Error> {
    config.check()?;
    let _lock = medium.lock()?;
    let mut area = Area::open(medium, config.area)?;
    make_files_anew(medium, &mut area)?;
    let generations = Arc::new(Generations::new(host)?);
    let mut copy = LocalCopy::open(&area, medium, config, generations)?;
    let executed = Script::new(&mut area, &mut copy, config).run(None, &mut |_| {})?;
    contain_changes(&mut area, &mut copy, 0)?;
    Ok(executed)
}

/// Gets the records of a log from another copy; false if none has others.
pub(crate) type RepairLog<'a> = dyn FnMut(&mut LocalCopy, LogUid) -> Result<bool, Error> + 'a;

/// Is told of the log of which the tree has more records since just now.
pub(crate) type BatchDone<'a> = dyn FnMut(&LocalCopy, LogUid) + 'a;

/// The ledger's script on its way.
pub(crate) struct Script<'a> {
    area: &'a mut Area,
    copy: &'a mut LocalCopy,
    config: &'a Config,
    executed: Executed,
    /// A log that ends before the record that the last entry names: so it does if the machine died before the commit.
    short: Option<(LogUid, Sequence)>,
    /// A log whose records are not those that the last entry names.
    differs: Option<(LogUid, Sequence)>,
    /// True if the part of an entry's records that is there is digested although the others are missing: no other copy has
    /// them.
    takes_parts: bool,
    /// Files of logs that no entry names any more.
    over: Vec<(LogUid, Incarnation)>,
}

impl<'a> Script<'a> {
    pub fn new(area: &'a mut Area, copy: &'a mut LocalCopy, config: &'a Config) -> Self {
        let (executed, over) = (Executed::default(), Vec::new());
        Self { area, copy, config, executed, short: None, differs: None, takes_parts: false, over }
    }

    /// Executes all entries that are there. `repair` gets the records of a log that an entry names and this copy lacks; `None`
    /// if no other copy has them.
    ///
    /// # Errors
    /// `Area`, `Media`, `File`; `Short`, `Differs`: another copy has to lead. Errors of `repair`.
    pub fn run(
        mut self,
        mut repair: Option<&mut RepairLog<'_>>,
        seen: &mut dyn FnMut(&Entry<'_>),
    ) -> Result<Executed, Error> {
        self.takes_parts = repair.is_none();
        let mut repaired = None;
        while self.next(Sequence::new(u64::MAX), seen, &mut |_, _| ())? {
            let (Some(repair), Err(lacking)) = (&mut repair, self.check_records()) else { continue };
            let (Error::Short(log, _) | Error::Differs(log, _)) = lacking else { return Err(lacking) };
            // The entry is executed again, once.
            let entry = Some(self.copy.ledger.last());
            if repaired == entry || !repair(self.copy, log)? {
                return Err(lacking);
            }
            (repaired, self.short, self.differs) = (entry, None, None);
        }
        self.executed.last = self.copy.ledger.last();
        Ok(self.executed)
    }

    /// Executes the next entry, if it is not behind `up_to` and its log has the records that it names; gives the files that
    /// no entry names any more once the next commit is made, and whether there was such an entry. `batch_done` is called when the
    /// tree has more records of a log.
    ///
    /// # Errors
    /// `Area`, `Media`, `File`; `Short`: the log does not have them; `Differs`: it has others.
    pub fn run_one(
        mut self,
        up_to: Sequence,
        batch_done: &mut BatchDone<'_>,
    ) -> Result<(bool, Vec<(LogUid, Incarnation)>), Error> {
        let done = self.next(up_to, &mut |_| {}, batch_done)?;
        self.check_records()?;
        Ok((done, self.over))
    }

    /// The log of the last entry has the records that the entry names.
    fn check_records(&self) -> Result<(), Error> {
        match (self.differs, self.short) {
            (Some((log, last)), _) => Err(Error::Differs(log, last)),
            (None, Some((log, last))) => Err(Error::Short(log, last)),
            (None, None) => Ok(()),
        }
    }

    fn next(
        &mut self,
        up_to: Sequence,
        seen: &mut dyn FnMut(&Entry<'_>),
        batch_done: &mut BatchDone<'_>,
    ) -> Result<bool, Error> {
        // All that was promised is there as long as nothing shared becomes anybody's own.
        self.area.keep(u64::MAX, 0);
        if self.copy.ledger.last() >= up_to {
            return Ok(false);
        }
        let Some(read) = self.copy.ledger.next_entry()? else { return Ok(false) };
        seen(&read.entry()?);
        self.step(&read, batch_done)?;
        if self.copy.ledger.wants_commit(self.config.batch_changes) {
            contain_changes(self.area, self.copy, 0)?;
        }
        Ok(true)
    }

    /// Executes one entry.
    fn step(&mut self, read: &ReadEntry, batch_done: &mut BatchDone<'_>) -> Result<(), Error> {
        let entry = read.entry()?;
        // The inodes that a digest removed are in the entries behind it, before the commit.
        if !matches!(entry.event, Event::Reap { .. } | Event::Pad) {
            let is_known = |log: LogUid| self.executed.damaged.iter().any(|(known, _)| *known == log);
            let short = self.short.take().filter(|(log, _)| !is_known(*log));
            self.executed.damaged.extend(short);
        }
        // An entry that needs records, or removes inodes, is noted when that is done: a commit in the middle of it stands
        // before it.
        match entry.event {
            Event::Digest { up_to, hash } => {
                let expected = self.expected(entry.sequence, hash);
                let repeated = Repeated { sequence: entry.sequence, expected };
                self.digest((entry.log, up_to), repeated, batch_done)?;
            }
            Event::Reap { inodes } => self.reap(inodes, entry.sequence)?,
            _ => {}
        }
        // The entry is executed later, when its records are there.
        if !self.takes_parts && self.short.is_some() {
            return Ok(());
        }
        let ends = matches!(entry.event, Event::CloseLog { .. });
        let file = self.copy.ledger.table().log(entry.log).filter(|_| ends).map(|log| log.incarnation);
        self.over.extend(file.map(|incarnation| (entry.log, incarnation)));
        self.copy.ledger.note(read)?;
        match entry.event {
            Event::OpenLog { .. } => self.copy.begin_log(entry.log, None),
            Event::CloseLog { .. } => drop(self.copy.logs.remove(&entry.log)),
            _ => {}
        }
        Ok(())
    }

    /// The hash with which the records of an entry are compared. A tree that contains a part of them contains it because
    /// they were compared before.
    fn expected(&self, entry: Sequence, hash: [u8; 8]) -> Option<ExpectedHash> {
        let is_new = entry > self.area.snapshot().version();
        let key = self.copy.ledger.hash_key();
        RecordsHash::from_bytes(hash).filter(|_| is_new).map(|hash| ExpectedHash { key, hash })
    }

    fn digest(
        &mut self,
        (log, up_to): (LogUid, Sequence),
        mut entry: Repeated,
        batch_done: &mut BatchDone<'_>,
    ) -> Result<(), Error> {
        let limits = BatchLimits::of(self.config);
        loop {
            let role = Role::Entry(entry);
            let mut decisions = Decisions::REPEATED;
            let digest = digest_batch(self.area, self.copy, (log, up_to), limits, &mut decisions, role)?;
            self.executed.records += digest.records as u64;
            match digest.end {
                End::Done => return Ok(()),
                End::More if digest.records > 0 => {
                    entry.expected = None;
                    batch_done(self.copy, log);
                }
                End::More => {}
                End::NoFrame | End::Cut(_) if self.takes_parts && entry.expected.is_some() => {
                    entry.expected = None;
                }
                // The head had blocks for it: this pool has them where records of the log's user cannot go.
                End::Cut(CutReason::NoRoom) if !self.takes_parts => return Err(AreaError::NoSpace.into()),
                End::NoFrame | End::Cut(_) => {
                    self.short = Some((log, digest.at.sequence));
                    return Ok(());
                }
                End::Differs => {
                    let last = Some((log, digest.at.sequence));
                    (self.short, self.differs) = (last, last);
                    return Ok(());
                }
            }
        }
    }

    /// Removes inodes; one that has a name, or is not there, stays as it is.
    fn reap(&mut self, inodes: &[InodeNumber], entry: Sequence) -> Result<(), Error> {
        self.executed.reaped += reap_all(self.area, self.copy, inodes, self.config.reap_items, entry)?;
        Ok(())
    }
}

/// Removes inodes without a name, in as many commits as it takes; gives how many there were.
///
/// # Errors
/// `Area`, `Media`.
pub(crate) fn reap_all(
    area: &mut Area,
    copy: &mut impl Visit,
    inodes: &[InodeNumber],
    items_max: usize,
    version: Sequence,
) -> Result<u64, Error> {
    let (mut reaped, mut left) = (0, inodes);
    while !left.is_empty() {
        let done = reap_step(area, copy, left, items_max, version)?;
        reaped += done as u64;
        left = &left[done..];
    }
    Ok(reaped)
}

/// One commit that removes inodes without a name, the first ones; gives how many of them are gone.
///
/// # Errors
/// `Area`, `Media`.
pub(crate) fn reap_step(
    area: &mut Area,
    copy: &mut impl Visit,
    inodes: &[InodeNumber],
    items_max: usize,
    version: Sequence,
) -> Result<usize, Error> {
    let beside = copy.visit(|copy| copy.changes_beside());
    contain_changes(area, copy, beside)?;
    let mut batch = area.begin()?;
    let (changes, place) = copy.visit(|copy| {
        let changes = copy.put_changes(&mut batch, 0, beside)?;
        Ok::<_, AreaError>((changes, copy.ledger.place_after(changes)))
    })?;
    let mut done = 0;
    for inode in inodes {
        match batch.reap(*inode, items_max) {
            Ok(true) => done += 1,
            Ok(false) => break,
            // It was removed before, or never lost its name.
            Err(AreaError::Refused(_)) => done += 1,
            Err(AreaError::BatchFull) => break,
            Err(error) => return Err(error.into()),
        }
    }
    batch.set_ledger(&place);
    let version = version.max(batch.version());
    let committed = batch.commit(version)?;
    copy.visit(|copy| copy.after_commit(area, &committed, changes))?;
    Ok(done)
}
