//! What a daemon does before it serves: brings the pool to where its ledger and logs say it was (Assise §3.4).
//!
//! Every update log that lives in the table is read to its end and digested under the entitlements that the ledger
//! gives it; then all logs are closed, the ledger begins a new life, and inodes without a name go. Entitlements that
//! the ledger still gives at its end belong to one log an inode, and whatever ended before was digested before it
//! ended: so the logs can be taken one after the other, in any order.
//!
//! Guarantees: recovery that is interrupted at any point is done again to the same end. Until the flip that moves
//! the ledger on, a log that is done is marked by incarnation 0, so that neither a record is judged twice nor an
//! entitlement revived.

use crate::config::Config;
use crate::damage::{Kept, LedgerEnd, anchor_of, life_of, table_of, unaccounted};
use crate::digest::{CutReason, Halt, apply_record};
use crate::error::Error;
use crate::ledger::{Anchor, Ledger, names_version};
use crate::locks::Locks;
use crate::logs::{BEGINNING, LogFile, TORN, is_log_file};
use crate::register::{Register, Remembered};
use crate::state::Numbers;
use crate::table::{OpenLog, Table};
use area::{Area, AreaError, Counters};
use format::ledger::{Event, OpenLogBody};
use format::record::{Operation, Record};
use format::{Epoch, Incarnation, InodeNumber, LeaseVersion, LogUid, Sequence};
use ipc::Digested;
use pmem::Medium;
use std::collections::{BTreeMap, BTreeSet};

/// A log that is digested to its end has this life until it is removed.
const CLOSED: Incarnation = Incarnation::new(0);

/// What a recovery found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Logs that lived, and the last record that counted of each.
    pub logs: Vec<(LogUid, Sequence)>,
    /// Records that were digested, pads included.
    pub records: u64,
    /// Logs that ended with something else than nothing, and why it did not count.
    pub cuts: Vec<(LogUid, CutReason)>,
    /// Logs that did not end where reading them did: the record after this one is damaged, and those behind it are lost.
    pub damaged: Vec<(LogUid, Sequence)>,
    /// The ledger's entry after this one is damaged, and logs could not be judged by it: what is kept of them in the pool.
    pub kept: Option<(Sequence, Vec<String>)>,
    /// Inodes without a name that were removed.
    pub orphans: u64,
}

/// A pool brought up to date, and where its counters go on.
pub(crate) struct Ready {
    pub area: Area,
    pub ledger: Ledger,
    pub numbers: Numbers,
    pub next_version: LeaseVersion,
    pub recovered: Recovered,
    /// Inodes without a name that are kept for programs that live.
    pub kept: Vec<InodeNumber>,
}

/// Recovery on its way.
struct Recovery<'a> {
    medium: &'a Medium,
    config: &'a Config,
    area: Area,
    epoch: Epoch,
    table: Table,
    progress: BTreeMap<LogUid, Digested>,
    numbers: Numbers,
    next_version: LeaseVersion,
    recovered: Recovered,
    /// How the ledger ended, and where logs go that it says too little of.
    ledger_end: LedgerEnd,
    unjudged: Kept<'a>,
}

/// What the daemon before left behind beside the pool's contents.
pub(crate) struct Left<'a> {
    pub register: &'a mut Register,
    pub remembered: &'a mut Remembered,
    pub locks: &'a Locks,
}

/// Brings a pool up to date. The caller holds its lock.
pub(crate) fn recover(
    area: Area,
    medium: &Medium,
    config: &Config,
    left: &mut Left<'_>,
) -> Result<Ready, Error> {
    let (counters, epoch) = (area.counters(), area.epoch());
    let mut recovery = Recovery {
        medium,
        config,
        area,
        epoch,
        table: Table::default(),
        progress: BTreeMap::new(),
        numbers: Numbers { next_inode: counters.next_inode, next_log: counters.next_log },
        next_version: counters.next_lease_version,
        recovered: Recovered::default(),
        ledger_end: LedgerEnd::Whole,
        unjudged: Kept::new(medium, config, Incarnation::new(counters.ledger_incarnation)),
    };
    // All that was promised is there as long as nothing shared becomes anybody's own.
    recovery.area.keep(u64::MAX, 0);
    recovery.restore_table()?;
    let last = recovery.replay_ledger(&counters)?;
    recovery.digest_logs()?;
    recovery.finish_kept(last)?;
    let anchor = Ledger::anchor_after(last, Incarnation::new(counters.ledger_incarnation).next());
    recovery.move_ledger(&anchor)?;
    recovery.tell_programs(left)?;
    recovery.remove_logs()?;
    let kept = recovery.reap_orphans(left.remembered)?;
    let pool = recovery.area.pool();
    let ledger = Ledger::begin(medium, pool, anchor)?;
    let Recovery { area, numbers, next_version, recovered, .. } = recovery;
    Ok(Ready { area, ledger, numbers, next_version, recovered, kept })
}

impl Recovery<'_> {
    /// Takes the logs and grants that the last flip holds.
    fn restore_table(&mut self) -> Result<(), Error> {
        (self.table, self.progress) = table_of(&self.area)?;
        Ok(())
    }

    /// Takes what the ledger said since; gives its last entry.
    fn replay_ledger(&mut self, counters: &Counters) -> Result<Sequence, Error> {
        let (anchor, pool) = (anchor_of(counters), self.area.pool());
        let mut named = BTreeSet::new();
        let (numbers, next_version) = (&mut self.numbers, &mut self.next_version);
        let replayed = Ledger::replay(self.medium, pool, anchor, &mut self.table, |entry, version| {
            named.insert(entry.log);
            if names_version(&entry.event) {
                *next_version = (*next_version).max(version.next());
            }
            if let Event::OpenLog { body, .. } = entry.event {
                numbers.next_log = numbers.next_log.max(entry.log.next());
                numbers.next_inode = numbers.next_inode.max(range_end(&body));
            }
        })?;
        self.ledger_end = replayed.end;
        if replayed.end != LedgerEnd::Whole {
            let known = |uid| self.table.log(uid).is_some() || named.contains(&uid);
            for log in unaccounted(self.medium, self.config.log_bytes_max, known)? {
                self.unjudged.keep(&log.name)?;
                let uid = life_of(&log.name).map(|(uid, _)| uid.next());
                self.numbers.next_log = self.numbers.next_log.max(uid.unwrap_or_default());
            }
        }
        Ok(Sequence::new(replayed.next.sequence.get() - 1))
    }

    /// Before the ledger moves on: what is kept because of its end.
    fn finish_kept(&mut self, last: Sequence) -> Result<(), Error> {
        let names = self.unjudged.finish()?;
        self.recovered.kept = (!names.is_empty()).then_some((last, names));
        Ok(())
    }

    /// The counters of a flip that leaves the ledger where it is.
    fn counters(&self) -> Counters {
        Counters {
            next_inode: self.numbers.next_inode,
            next_log: self.numbers.next_log,
            next_lease_version: self.next_version,
            ..self.area.counters()
        }
    }

    fn digest_logs(&mut self) -> Result<(), Error> {
        let logs: Vec<(LogUid, OpenLog)> = self.table.logs().map(|(uid, open)| (uid, open.clone())).collect();
        for (uid, open) in logs {
            if open.incarnation != CLOSED {
                self.digest_log(uid, &open)?;
            }
        }
        Ok(())
    }

    fn digest_log(&mut self, uid: LogUid, open: &OpenLog) -> Result<(), Error> {
        let mut at = self.progress.get(&uid).copied().unwrap_or(BEGINNING);
        let life = (uid, open.incarnation);
        let Some(file) = LogFile::open(self.medium, life, self.config.log_bytes_max)? else {
            // Its owner made something else of it: nothing more of it counts.
            self.recovered.cuts.push((uid, CutReason::Decode(TORN)));
            return self.close_log(uid, open, at);
        };
        let mut records_max = self.config.batch_records;
        loop {
            match self.digest_batch(uid, open, &file, at, records_max) {
                Ok((next, End::More)) => at = next,
                Ok((next, End::Log(reason))) => {
                    at = next;
                    if reason.is_none() && file.goes_on_behind(at)? {
                        self.recovered.damaged.push((uid, at.sequence));
                    }
                    if self.ledger_end != LedgerEnd::Whole && reason.is_some_and(CutReason::is_of_the_ledger)
                    {
                        self.unjudged.keep(&file.name)?;
                    }
                    self.recovered.cuts.extend(reason.map(|reason| (uid, reason)));
                    return self.close_log(uid, open, at);
                }
                // The batch had no place left for the note of how far it came: half of it has.
                Err(Error::Area(AreaError::BatchFull)) if records_max > 1 => records_max /= 2,
                Err(error) => return Err(error),
            }
        }
    }

    /// Notes in the tree that a log is digested to its end.
    fn close_log(&mut self, uid: LogUid, open: &OpenLog, at: Digested) -> Result<(), Error> {
        self.recovered.logs.push((uid, at.sequence));
        // Done: nothing of it is read again, whatever happens before it is removed.
        let mut closed = open.clone();
        closed.incarnation = CLOSED;
        let counters = self.counters();
        let mut batch = self.area.begin(self.epoch)?;
        batch.put_log(uid, &closed.item(at.sequence, at.position))?;
        batch.set_counters(&counters);
        let committed = batch.commit()?;
        Ok(self.area.release(committed.flip)?)
    }

    /// One flip of records of one log.
    fn digest_batch(
        &mut self,
        uid: LogUid,
        open: &OpenLog,
        file: &LogFile,
        from: Digested,
        records_max: usize,
    ) -> Result<(Digested, End), Error> {
        let counters = self.counters();
        let mut batch = self.area.begin(self.epoch)?;
        let mut frames = file.frames(from);
        let (mut at, mut records, mut bytes) = (from, 0, 0);
        let end = loop {
            if records >= records_max || bytes >= self.config.batch_bytes {
                break End::More;
            }
            let Some(frame) = frames.next()? else { break End::Log(None) };
            let record = match Record::decode(&frame.bytes) {
                Ok(record) => record,
                Err(error) => break End::Log(Some(CutReason::Decode(error))),
            };
            if record.operation != Operation::Pad {
                // Room was promised for what an honest process appended. What lost its last name may still be written
                // to by later records of a process that had it open: it goes when all logs are done.
                match apply_record(&mut batch, (uid, open), &record, || true, &mut |_, _| true) {
                    Ok(_) => {}
                    Err(Halt::Full) if records > 0 => break End::More,
                    Err(Halt::Full) => break End::Log(Some(CutReason::NoRoom)),
                    Err(Halt::Cut(reason)) => break End::Log(Some(reason)),
                    Err(Halt::Failed(error)) => return Err(error.into()),
                }
            }
            at = frame.after;
            records += 1;
            bytes += frame.bytes.len();
        };
        batch.put_log(uid, &open.item(at.sequence, at.position))?;
        batch.set_counters(&counters);
        let committed = batch.commit()?;
        self.area.release(committed.flip)?;
        self.recovered.records += records as u64;
        Ok((at, end))
    }

    /// From here on the ledger says nothing of what was: all logs are done.
    fn move_ledger(&mut self, anchor: &Anchor) -> Result<(), Error> {
        let counters = Counters {
            ledger_sequence: Sequence::new(anchor.next.sequence.get() - 1),
            ledger_position: anchor.next.position,
            ledger_incarnation: anchor.incarnation.get(),
            ..self.counters()
        };
        let mut batch = self.area.begin(self.epoch)?;
        batch.set_counters(&counters);
        let committed = batch.commit()?;
        Ok(self.area.release(committed.flip)?)
    }

    /// Says for programs that live how far their logs counted, before the logs are gone that say it, and begins this
    /// daemon's register.
    fn tell_programs(&self, left: &mut Left<'_>) -> Result<(), Error> {
        for (uid, _) in self.table.logs() {
            // Of one that an interrupted recovery was done with the tree says it.
            let in_tree = self.progress.get(&uid).map_or(Sequence::default(), |digested| digested.sequence);
            let found = self.recovered.logs.iter().find(|(log, _)| *log == uid);
            left.remembered.note_recovered(uid.get(), found.map_or(in_tree, |(_, last)| *last));
        }
        left.register.rewrite(&left.remembered.entries(left.locks))
    }

    /// Takes all logs out of the tree, and their files, and those that nobody knows of.
    fn remove_logs(&mut self) -> Result<(), Error> {
        for (uid, _) in self.area.logs()? {
            let mut batch = self.area.begin(self.epoch)?;
            batch.remove_log(uid)?;
            let committed = batch.commit()?;
            self.area.release(committed.flip)?;
        }
        for name in self.medium.list()?.iter().filter(|name| is_log_file(name)) {
            self.medium.remove(name)?;
        }
        Ok(())
    }

    /// Removes inodes without a name, but those that a program which lives may have open.
    fn reap_orphans(&mut self, remembered: &Remembered) -> Result<Vec<InodeNumber>, Error> {
        let (mut kept, mut after) = (Vec::new(), InodeNumber::NONE);
        while let Some(inode) = self.area.orphans(after, 1)?.first().copied() {
            if remembered.may_be_open(inode) {
                kept.push(inode);
                after = inode;
                continue;
            }
            let mut batch = self.area.begin(self.epoch)?;
            if batch.reap(inode, self.config.reap_items)? {
                self.recovered.orphans += 1;
            }
            let committed = batch.commit()?;
            self.area.release(committed.flip)?;
        }
        Ok(kept)
    }
}

/// How a batch ended.
enum End {
    More,
    /// The log ends here, with nothing or with what does not count.
    Log(Option<CutReason>),
}

/// The first number behind a log's own range.
fn range_end(body: &OpenLogBody) -> InodeNumber {
    InodeNumber::new(body.first_inode.get().saturating_add(body.inodes.get()))
}
