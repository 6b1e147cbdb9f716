//! Take-over: the steps of a daemon before it serves (Assise §3.4). It brings its copy to the end of the ledger, then
//! begins a life of the chain, digests the records that the logs hold beyond, and closes the logs.
//!
//! The first half is [`crate::replay::script`]: it repeats earlier decisions, and writes nothing but commits. The
//! second half is for the daemon that leads from now on. Each of its steps is an entry of the ledger: the tail of each
//! log is digested with the rights that the log has at the ledger's end; then logs are closed, and inodes without a
//! name are removed. No two logs have a right to the same inode at that point, and records under a right that ended
//! were digested before it ended, so the logs can be digested one after the other, in any order.
//!
//! Guarantees: a take-over that is interrupted at any point is done again, by the next life, to the same end; a program
//! that lives learns how far its log counted before the log is gone.

use crate::config::Config;
use crate::copies::fetching::NotFetched;
use crate::counted_copies::Copies;
use crate::damage::{LedgerEnd, Unjudged, is_incomplete, unaccounted};
use crate::error::Error;
use crate::level::{LEVEL_PATIENCE, begin_copy, keys_of_lives, level, lives_of, send_ledger, wait};
use crate::locks::Locks;
use crate::register::{Register, Remembered};
use crate::repair::{GreetedCopies, Repaired, made_again};
use crate::replay::apply::CutReason;
use crate::replay::batch::{BatchLimits, Decisions, End, NO_FRAME, Role, digest_batch};
use crate::replay::copy::{LocalCopy, contain_changes};
use crate::replay::script::{RepairLog, Script, reap_all};
use crate::standby::Term;
use area::Area;
use format::hash::HashKey;
use format::ledger::LifeBody;
use format::{InodeNumber, Life, LogUid, Sequence};
use ipc::host::Host;
use mirror::logs::{LogFile, is_log_file};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use transport::Connection;
use zerocopy::little_endian::U32;

/// The results of a take-over.
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
    /// Logs whose files are missing, or are not as they were made: records behind this one are lost, if there were any.
    pub incomplete: Vec<(LogUid, Sequence)>,
    /// The ledger's entry after this one is damaged, and logs could not be judged by it: the files that are kept of
    /// them in the pool.
    pub kept: Option<(Sequence, Vec<String>)>,
    /// Logs of which a copy had other records.
    pub repaired: Vec<Repaired>,
    /// Inodes without a name that were removed.
    pub orphans: u64,
}

/// A copy that leads.
pub(crate) struct LeadingCopy {
    pub copy: LocalCopy,
    pub recovered: Recovered,
    /// Inodes without a name that are kept for programs that live.
    pub kept: Vec<InodeNumber>,
    /// The copies that were brought along.
    pub copies: Copies,
}

/// Data of the former daemon beside the contents of the pool.
pub(crate) struct FormerDaemon<'a> {
    pub register: &'a mut Register,
    pub remembered: &'a mut Remembered,
    pub locks: &'a Locks,
}

/// How often the tail of a log is fetched: once, since no program has the file with the fetched records.
const FETCHES_MAX: usize = 1;

/// A take-over on its way.
struct TakeOver<'a> {
    host: &'a Arc<dyn Host>,
    area: &'a mut Area,
    copy: LocalCopy,
    config: &'a Config,
    recovered: Recovered,
    unjudged: Unjudged,
    copies: Copies,
    /// How far copies have each log; there are none if it has none.
    ends: BTreeMap<LogUid, Sequence>,
    term: Term,
    /// Key of the new life.
    key: [u8; 16],
}

/// Brings a copy to its end, and lets it lead. The caller holds the pool's lock. Copies at other nodes, to which there are
/// these connections, have what this one has before anything is decided, and all that was decided when this returns.
///
/// # Errors
/// `TreeGivenUp`; `Area`, `Media`, `File`; `LivesUsedUp`; `Copy`, `CopyIsAhead`, `NeedsImport`: nothing was decided, or not all of what was
/// is at the copies.
pub(crate) fn take_over(
    area: &mut Area,
    mut copy: LocalCopy,
    config: &Config,
    host: &Arc<dyn Host>,
    left: &mut FormerDaemon<'_>,
    (term, connections): (Term, Vec<Connection>),
) -> Result<LeadingCopy, Error> {
    if area.is_given_up() {
        return Err(Error::TreeGivenUp);
    }
    let mut named = BTreeSet::new();
    let key = random_key(&**host);
    let terms = (term.version, copy.ledger.region().bytes());
    let mut greeted = GreetedCopies::greet(host, connections, terms, (area.pool(), key))?;
    let other = greeted.first_node();
    // A node that leads in a view of the cluster may get copies later.
    if term.version > 0 || other.is_some() {
        copy.keep_hashes(HashKey::of_life(&key));
    }
    let mut repair = |copy: &mut LocalCopy, log| greeted.repair_log(copy, log);
    let repair = other.map(|_| &mut repair as &mut RepairLog<'_>);
    let executed = Script::new(area, &mut copy, config).run(repair, &mut |entry| {
        named.insert(entry.log);
    });
    let executed = executed.map_err(|error| match (error, other) {
        // An entry is written when all copies have its records.
        (Error::Short(..) | Error::Differs(..), Some(node)) => Error::CopyIsAhead(node),
        (error, _) => error,
    })?;
    let lives = keys_of_lives(area, &copy)?;
    greeted.repair_all(&mut copy, &lives)?;
    let recovered = Recovered {
        records: executed.records,
        orphans: executed.reaped,
        damaged: executed.damaged,
        repaired: std::mem::take(&mut greeted.repaired),
        ..Recovered::default()
    };
    let copies = Copies::new(host, Vec::new(), term.version);
    for greeted in greeted.into_copies() {
        copies.add(begin_copy(host, &mut copy, &lives, greeted)?);
    }
    copy.ledger.sync()?;
    let ends = if copies.any() { level(host, &copies, &mut copy)? } else { BTreeMap::new() };
    let table = copy.ledger.table();
    let unjudged = Unjudged::left_in(&copy.medium, config, |uid| table.log(uid).is_some())?;
    let mut taking = TakeOver { host, area, copy, config, recovered, unjudged, copies, ends, term, key };
    let end = taking.copy.ledger.last();
    taking.keep_unjudged(&named)?;
    taking.begin_life()?;
    taking.digest_tails()?;
    let kept = taking.unjudged.finish()?;
    taking.recovered.kept = (!kept.is_empty()).then_some((end, kept));
    taking.tell_programs(left)?;
    taking.close_logs()?;
    let kept = taking.reap_orphans(left.remembered)?;
    let TakeOver { mut copy, recovered, copies, .. } = taking;
    send_ledger(host, &copies, &copy)?;
    copy.ledger.hold(copies.contained());
    copies.all().iter().for_each(|copy| copy.set_level());
    Ok(LeadingCopy { copy, recovered, kept, copies })
}

fn random_key(host: &dyn Host) -> [u8; 16] {
    let mut key = [0; 16];
    for half in key.chunks_exact_mut(8) {
        half.copy_from_slice(&host.random().to_le_bytes());
    }
    key
}

impl TakeOver<'_> {
    /// If the ledger does not end as it was left: copies all that might be judged by what is lost, before anything is
    /// written where that stood.
    fn keep_unjudged(&mut self, named: &BTreeSet<LogUid>) -> Result<(), Error> {
        if self.copy.ledger.look_behind_end()? == LedgerEnd::Whole {
            return Ok(());
        }
        let life = self.copy.ledger.life();
        let known = |uid| self.copy.ledger.table().log(uid).is_some() || named.contains(&uid);
        for log in unaccounted(&self.copy.medium, &self.copy.ledger, known)? {
            self.unjudged.copy(life, &log.name)?;
            self.unjudged.keep(&log.name);
        }
        let logs: Vec<LogUid> = self.copy.logs.keys().copied().collect();
        for uid in logs {
            if let Some(file) = self.copy.file(uid)? {
                self.unjudged.copy(life, &file.name)?;
            }
        }
        self.unjudged.copy_ledger(life)
    }

    /// From here on what is decided stands in the ledger as this life's.
    fn begin_life(&mut self) -> Result<(), Error> {
        contain_changes(self.area, &mut self.copy, 0)?;
        let life = self.copy.ledger.life();
        if life == Life::LAST {
            return Err(Error::LivesUsedUp);
        }
        let after = self.copy.ledger.last();
        let (node, epoch, reserved) = (self.term.node, self.term.epoch, U32::new(0));
        let key = self.key;
        self.copy.ledger.begin_life(LifeBody { life: life.next(), node, epoch, reserved, after, key })?;
        Ok(())
    }

    fn digest_tails(&mut self) -> Result<(), Error> {
        let logs: Vec<LogUid> = self.copy.logs.keys().copied().collect();
        for uid in logs {
            self.digest_tail(uid)?;
        }
        Ok(())
    }

    /// Digests the records of a log beyond the script. An inode that loses its last name may still be written to by
    /// later records of a process that had it open: it is removed when all logs are done.
    fn digest_tail(&mut self, uid: LogUid) -> Result<(), Error> {
        let limits = BatchLimits::of(self.config);
        let all = self.ends.get(&uid).copied().unwrap_or(Sequence::new(u64::MAX));
        let before = self.copy.digested(uid);
        let mut fetches = 0;
        let cut = loop {
            let mut decisions = Decisions::REPEATED;
            let digest =
                digest_batch(self.area, &mut self.copy, (uid, all), limits, &mut decisions, Role::Head)?;
            self.recovered.records += digest.records as u64;
            let cut = match digest.end {
                End::More => continue,
                End::Done | End::NoFrame => None,
                End::Cut(reason) => Some(reason),
                End::Differs => Some(CutReason::Changed),
            };
            let is_of_the_file = cut.is_none_or(CutReason::is_of_the_file);
            if is_of_the_file && fetches < FETCHES_MAX && self.fetch_tail(uid)? {
                fetches += 1;
                continue;
            }
            break cut;
        };
        let at = self.copy.digested(uid);
        let file = self.copy.file(uid)?;
        // Its owner made something else of it: nothing more of it counts.
        let cut = if file.is_none() { Some(NO_FRAME) } else { cut };
        let noted = self.recovered.damaged.iter().any(|(damaged, _)| *damaged == uid);
        if !noted && self.is_incomplete(uid, file.as_deref(), at != before)? {
            self.recovered.incomplete.push((uid, at.sequence));
        } else if let (None, false, Some(file)) = (cut, noted, &file)
            && file.goes_on_behind(at)?
        {
            self.recovered.damaged.push((uid, at.sequence));
        }
        if let Some(file) = file.filter(|_| cut.is_some_and(CutReason::is_of_the_ledger)) {
            self.unjudged.keep(&file.name);
        }
        self.recovered.logs.push((uid, at.sequence));
        self.recovered.cuts.extend(cut.map(|reason| (uid, reason)));
        Ok(())
    }

    /// Where the file of a log ends before the records of the copies, although it had them when the copies were compared with it:
    /// gets them, in a new file. The program has the former one, and may still change it. True if they were fetched.
    fn fetch_tail(&mut self, uid: LogUid) -> Result<bool, Error> {
        let digested = self.copy.digested(uid);
        // Records that only some copies have were not acknowledged.
        if self.ends.get(&uid).is_none_or(|end| *end <= digested.sequence) {
            return Ok(false);
        }
        let open = self.copy.ledger.table().log(uid).expect("each log of a copy is in the table");
        let (life, size) = ((uid, open.incarnation), (open.file_bytes, open.caller.uid));
        let copies = self.copies.all().into_iter();
        let having = copies.filter_map(|copy| copy.records_of(life.0, life.1).map(|records| (copy, records)));
        let Some((copy, records)) = having.max_by_key(|(_, records)| records.synced) else {
            return Ok(false);
        };
        let file = made_again(&self.copy.medium, self.area.pool(), life, size)?;
        let until = self.host.now().after(LEVEL_PATIENCE);
        let fetched =
            copy.fetch(&file, life, (digested, records.sent), |seen| wait(self.host, &copy, seen, until));
        fetched.map_err(|why| match why {
            NotFetched::Lost => Error::Copy(copy.node, transport::Error::TimedOut.into()),
            NotFetched::Stopped(error) => error,
            NotFetched::Medium(error) => error.into(),
        })?;
        self.copy.replace_file(uid, Arc::new(file));
        let (log, node, after) = (uid, copy.node, digested.sequence);
        self.recovered.repaired.push(Repaired { log, node, after, up_to: records.synced });
        Ok(true)
    }

    /// True if records of a log may be gone with a part of its file, or with all of it. Only the node that made the log has
    /// its file for certain; and where a copy was brought along, records that count are there, too.
    fn is_incomplete(&self, uid: LogUid, file: Option<&LogFile>, has_records: bool) -> Result<bool, Error> {
        let log = self.copy.ledger.table().log(uid).expect("each log of a copy is in the table");
        if self.copies.any() || !is_incomplete(file, (uid, log.incarnation), log.file_bytes, has_records)? {
            return Ok(false);
        }
        let lives = lives_of(self.area, &self.copy)?;
        let life = lives.iter().rev().find(|(life, _)| LogUid::first_of(**life) <= uid);
        Ok(life.is_some_and(|(_, life)| life.node == self.term.node))
    }

    /// Says for programs that live how far their logs counted, before the logs are gone that say it, and begins this
    /// daemon's register.
    fn tell_programs(&self, left: &mut FormerDaemon<'_>) -> Result<(), Error> {
        for (uid, last) in &self.recovered.logs {
            left.remembered.note_recovered(uid.get(), *last);
        }
        left.register.rewrite(&left.remembered.entries(left.locks))
    }

    /// Takes all logs out of the table and the tree, and removes their files, and those that nothing names.
    fn close_logs(&mut self) -> Result<(), Error> {
        while let Some((uid, log)) = self.copy.logs.pop_first() {
            if self.copy.ledger.wants_commit(self.config.batch_changes) {
                contain_changes(self.area, &mut self.copy, 0)?;
            }
            self.copy.ledger.close_log(uid, log.digested.sequence)?;
        }
        contain_changes(self.area, &mut self.copy, 0)?;
        for name in self.copy.medium.list()?.iter().filter(|name| is_log_file(name)) {
            self.copy.medium.remove(name)?;
        }
        Ok(())
    }

    /// Removes inodes without a name, but those that a program which lives may have open.
    fn reap_orphans(&mut self, remembered: &Remembered) -> Result<Vec<InodeNumber>, Error> {
        let (mut kept, mut after) = (Vec::new(), InodeNumber::NONE);
        loop {
            let mut found = self.area.orphans(after, self.copy.ledger.reap_max())?;
            let Some(last) = found.last().copied() else { break };
            after = last;
            found.retain(|inode| {
                let open = remembered.may_be_open(*inode);
                if open {
                    kept.push(*inode);
                }
                !open
            });
            if !found.is_empty() {
                contain_changes(self.area, &mut self.copy, 0)?;
                let entry = self.copy.ledger.reap(&found)?;
                let items_max = self.config.reap_items;
                self.recovered.orphans += reap_all(self.area, &mut self.copy, &found, items_max, entry)?;
            }
        }
        contain_changes(self.area, &mut self.copy, 0)?;
        Ok(kept)
    }
}
