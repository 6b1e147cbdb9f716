//! Damage in the files that a recovery reads: how it is told from the end of a file's records, which data is kept, and
//! what `hearth check` reports.
//!
//! Guarantees: damaged records are never discarded as if they had not been written. If the ledger is damaged, the logs
//! whose records can no longer be judged stay in the pool, with the ledger, under names that nothing else uses.

use crate::config::Config;
use crate::error::Error;
use crate::ledger::{LEDGER_FILE, Ledger};
use crate::replay::copy::{key_of_life, table_of};
use area::Area;
use format::checksum::Salt;
use format::envelope::FRAME_ALIGN;
use format::ledger::{Entry, Event, Kind};
use format::{Envelope, Epoch, HEADER_BYTES, Incarnation, Life, LogUid, Sequence};
use ipc::Digested;
use mirror::logs::{BEGINNING, LOG_BYTES_MAX, LogFile, is_log_file, log_file};
use pmem::ring::{RingPosition, scan};
use pmem::{MediaError, Medium, Region};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use zerocopy::FromBytes;

/// Bytes that are read or copied at once.
const WINDOW_BYTES: u64 = 64 << 10;

/// How a ledger ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LedgerEnd {
    /// There is no entry where the next one would stand.
    Whole,
    /// There are bytes that are nearly the next entry: it was never finished, or is damaged.
    NotWhole,
    /// A whole entry of this life stands behind: the one that is missing was lost. A crash can cause that for entries
    /// that were not synced, where pages reach the medium one by one.
    GoesOn,
}

/// Examines the bytes where reading a ledger ended, and those behind. `earlier` are salts of its earlier lives.
pub(crate) fn ledger_end(
    region: &Region,
    start: u64,
    salt: Salt,
    end: RingPosition,
    mut earlier: impl Iterator<Item = Salt>,
) -> Result<LedgerEnd, MediaError> {
    let bytes = region.bytes();
    let goes_on = visit_headers(region, start, |position, envelope| {
        let there = RingPosition { position, sequence: envelope.sequence };
        let is_later = envelope.sequence > end.sequence
            && scan(region, start, salt, there, bytes).next().transpose()?.is_some();
        Ok(if is_later { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    if goes_on.is_break() {
        return Ok(LedgerEnd::GoesOn);
    }
    let mut header = [0; HEADER_BYTES];
    region.read(end.position, &mut header)?;
    let (found, _) = Envelope::read_from_prefix(&header).expect("a header begins with an envelope");
    // The damaged bit may be one of the sequence number's.
    let near = (found.sequence.get() ^ end.sequence.get()).count_ones() <= 1;
    if !near || header == [0; HEADER_BYTES] {
        return Ok(LedgerEnd::Whole);
    }
    // An earlier life may have left an entry here.
    let there = RingPosition { sequence: found.sequence, ..end };
    let of_earlier =
        earlier.any(|salt| matches!(scan(region, start, salt, there, bytes).next(), Some(Ok(_))));
    Ok(if of_earlier { LedgerEnd::Whole } else { LedgerEnd::NotWhole })
}

/// Visits all bytes of a ring that can be the header of a frame, until `visit` breaks.
fn visit_headers(
    region: &Region,
    start: u64,
    mut visit: impl FnMut(u64, &Envelope) -> Result<ControlFlow<()>, MediaError>,
) -> Result<ControlFlow<()>, MediaError> {
    let bytes = region.bytes() / FRAME_ALIGN as u64 * FRAME_ALIGN as u64;
    let mut window = Vec::new();
    for window_at in (start..bytes).step_by(WINDOW_BYTES as usize) {
        window.resize(WINDOW_BYTES.min(bytes - window_at) as usize, 0);
        region.read(window_at, &mut window)?;
        for (header, index) in window.chunks_exact(FRAME_ALIGN).zip(0..) {
            let Ok(envelope) = Envelope::decode(header) else { continue };
            if visit(window_at + index * FRAME_ALIGN as u64, &envelope)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Logs whose ends stand in the ledger, whether a commit contains them or not: all of their records that count are in the
/// tree, and only their files were still to be removed. `lives` are the salts of the ledger's lives, the newest first.
pub(crate) fn closed_logs(
    region: &Region,
    start: u64,
    end: RingPosition,
    lives: impl Iterator<Item = Salt> + Clone,
) -> Result<BTreeSet<LogUid>, MediaError> {
    let mut closed = BTreeSet::new();
    let _ = visit_headers(region, start, |position, envelope| {
        if envelope.kind != Kind::CloseLog as u8 || envelope.sequence >= end.sequence {
            return Ok(ControlFlow::Continue(()));
        }
        let there = RingPosition { position, sequence: envelope.sequence };
        for salt in lives.clone() {
            if let Some(frame) = scan(region, start, salt, there, region.bytes()).next().transpose()? {
                closed.extend(Entry::decode(&frame.bytes).map(|entry| entry.log));
                break;
            }
        }
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(closed)
}

/// Logs in the pool with records that neither the table nor the ledger accounts for.
pub(crate) fn unaccounted(
    medium: &Medium,
    ledger: &Ledger,
    known: impl Fn(LogUid) -> bool,
) -> Result<Vec<LogFile>, Error> {
    let mut found = Vec::new();
    let mut closed = None;
    for name in medium.list()?.iter().filter(|name| is_log_file(name)) {
        let Some((uid, incarnation)) = life_of(name).filter(|(uid, _)| !known(*uid)) else { continue };
        let closed = match &mut closed {
            Some(closed) => closed,
            none => none.insert(ledger.closed_logs()?),
        };
        if closed.contains(&uid) {
            continue;
        }
        let Some(log) = LogFile::open(medium, (uid, incarnation), LOG_BYTES_MAX)? else { continue };
        if log.frames(BEGINNING).next()?.is_some() || log.goes_on_behind(BEGINNING)? {
            found.push(log);
        }
    }
    Ok(found)
}

/// The log that a file's name denotes.
pub(crate) fn life_of(name: &str) -> Option<(LogUid, Incarnation)> {
    let (uid, incarnation) = name.strip_prefix("log-")?.split_once('-')?;
    Some((LogUid::new(uid.parse().ok()?), Incarnation::new(incarnation.parse().ok()?)))
}

/// Prefix of copies that a take-over makes before it knows which of them are needed.
const UNJUDGED: &str = "unjudged-";

/// Files that may not be judged by the ledger, because a part of it is damaged: all are copied before the ledger goes on,
/// and those that were needed stay in the pool under names that nothing else uses.
pub(crate) struct Unjudged {
    medium: Medium,
    bytes_max: u64,
    /// Copies that exist, with the name of the file each was made from.
    copies: Vec<(String, String)>,
    /// Names of the files whose copies are kept.
    needed: BTreeSet<String>,
}

impl Unjudged {
    /// Copies that an interrupted take-over left. If a log was closed then, or is not in the table, the next take-over
    /// does not judge it: its copy is kept.
    pub fn left_in(medium: &Medium, config: &Config, known: impl Fn(LogUid) -> bool) -> Result<Self, Error> {
        // The length of a log's file is under the control of its user.
        let bytes_max = LOG_BYTES_MAX.max(config.ledger_bytes);
        let mut left =
            Self { medium: medium.clone(), bytes_max, copies: Vec::new(), needed: BTreeSet::new() };
        for copy in medium.list()?.into_iter().filter(|name| name.starts_with(UNJUDGED)) {
            let Some((_, name)) = copy[UNJUDGED.len()..].split_once('-') else { continue };
            let name = name.to_owned();
            if life_of(&name).is_some_and(|(uid, _)| !known(uid)) {
                left.needed.insert(name.clone());
            }
            left.copies.push((copy, name));
        }
        Ok(left)
    }

    /// Copies a file. `life` is the ledger's, so that a later accident has other names.
    pub fn copy(&mut self, life: Life, name: &str) -> Result<(), Error> {
        let copy = format!("{UNJUDGED}{life}-{name}");
        self.copy_file(name, &copy)?;
        self.copies.retain(|(other, _)| *other != copy);
        self.copies.push((copy, name.to_owned()));
        Ok(())
    }

    /// Copies the ledger.
    pub fn copy_ledger(&mut self, life: Life) -> Result<(), Error> {
        self.copy(life, LEDGER_FILE)
    }

    /// A file was not judged: its copy must be kept.
    pub fn keep(&mut self, name: &str) {
        self.needed.insert(name.to_owned());
    }

    /// Keeps the copies that are needed, with the ledger if there are any, and removes the others; gives the names of
    /// those kept.
    pub fn finish(&mut self) -> Result<Vec<String>, Error> {
        let needs = |name: &String| self.needed.contains(name);
        let any = self.copies.iter().any(|(_, name)| needs(name));
        let mut kept = Vec::new();
        for (copy, name) in &self.copies {
            if needs(name) || (any && name == LEDGER_FILE) {
                let target = format!("kept-{}", &copy[UNJUDGED.len()..]);
                self.copy_file(copy, &target)?;
                kept.push(target);
            }
        }
        for (copy, _) in self.copies.drain(..) {
            match self.medium.remove(&copy) {
                Ok(()) | Err(MediaError::NotFound) => {}
                Err(error) => return Err(error.into()),
            }
        }
        kept.sort();
        Ok(kept)
    }

    /// Copies a file. Durable when this returns.
    fn copy_file(&self, name: &str, target: &str) -> Result<(), Error> {
        match self.medium.remove(target) {
            Ok(()) | Err(MediaError::NotFound) => {}
            Err(error) => return Err(error.into()),
        }
        let source = match self.medium.open_at_most(name, self.bytes_max) {
            // Its user changed the file since it was read.
            Err(MediaError::Length | MediaError::NotFound) => return Ok(()),
            source => source?,
        };
        let bytes = source.bytes();
        // Most of a log's file may have no space; the copy has none there either.
        let target = self.medium.create_in_steps(target, bytes, bytes.min(WINDOW_BYTES))?;
        let mut window = Vec::new();
        for at in (0..bytes).step_by(WINDOW_BYTES as usize) {
            let end = bytes.min(at + WINDOW_BYTES);
            if source.next_written(at) >= end {
                continue;
            }
            window.resize((end - at) as usize, 0);
            source.read(at, &mut window)?;
            target.reserve(at..end)?;
            target.write(at, &window);
        }
        Ok(target.sync()?)
    }
}

/// True if records of a log may be gone with its file, or with a part of it: it is missing, or shorter than the log was made,
/// or another file and `has_records` behind those that are digested is false.
pub(crate) fn is_incomplete(
    file: Option<&LogFile>,
    life: (LogUid, Incarnation),
    file_bytes: u64,
    has_records: bool,
) -> Result<bool, Error> {
    let Some(file) = file else { return Ok(true) };
    let is_short = file.region().bytes() < file_bytes;
    Ok(is_short || (!has_records && !file.is_as_made(life, file_bytes)?))
}

/// The last record of a log behind those that are digested.
fn last_record(log: Option<&LogFile>, digested: Digested) -> Result<Digested, Error> {
    let (Some(log), mut end) = (log, digested) else { return Ok(digested) };
    let mut frames = log.frames(digested);
    while let Some(frame) = frames.next()? {
        end = frame.after;
    }
    Ok(end)
}

/// A sentence for a log that ends before a record that the ledger names: log or tree are from another time.
fn lacking((uid, incarnation): (LogUid, Incarnation), end: Digested, up_to: Sequence) -> Option<String> {
    (end.sequence < up_to).then(|| {
        let (name, last) = (log_file(uid, incarnation), end.sequence);
        format!("file {name}: the records after {last} are missing, and the ledger names those up to {up_to}")
    })
}

/// Describes the damage in the ledger and in the logs of a pool that no daemon serves, one sentence each. Changes
/// nothing.
///
/// # Errors
/// `Area`, `Media`, `File`: failures with which a daemon could not begin either.
pub fn check(medium: &Medium) -> Result<Vec<String>, Error> {
    let area = Area::open(medium, area::Limits::default())?;
    let pool = area.pool();
    let (table, progress) = table_of(&area)?;
    let mut ledger =
        Ledger::open(medium, pool, (area.ledger(), key_of_life(&area, area.ledger().life)?), table)?;
    let lives = area.lives()?;
    let of_cluster = |epoch: Epoch| epoch != Epoch::default();
    let life = area.ledger().life;
    let mut has_copies = lives.iter().any(|(other, item)| *other == life && of_cluster(item.epoch));
    let digested = |uid: &LogUid| progress.get(uid).copied().unwrap_or(BEGINNING);
    let (mut findings, mut named) = (Vec::new(), BTreeSet::new());
    // The last records that entries name. A crash may leave the last entry without them.
    let (mut digests, mut last_digest) = (BTreeMap::new(), None);
    while let Some(read) = ledger.next_entry()? {
        let entry = read.entry()?;
        named.insert(entry.log);
        if !matches!(entry.event, Event::Reap { .. } | Event::Pad) {
            digests.extend(last_digest.take());
        }
        match entry.event {
            Event::Life { body } => has_copies = of_cluster(body.epoch),
            Event::Digest { up_to, .. } => last_digest = Some((entry.log, up_to)),
            Event::CloseLog { .. } => {
                if let (Some(up_to), Some(open)) = (digests.remove(&entry.log), ledger.table().log(entry.log))
                {
                    let life = (entry.log, open.incarnation);
                    let log = LogFile::open(medium, life, open.file_bytes)?;
                    let end = last_record(log.as_ref(), digested(&entry.log))?;
                    findings.extend(lacking(life, end, up_to));
                }
            }
            _ => {}
        }
        ledger.note(&read)?;
    }
    let table = ledger.table();
    let known = |uid| table.log(uid).is_some() || named.contains(&uid);
    let mut undigested = !unaccounted(medium, &ledger, known)?.is_empty();
    for (uid, open) in table.logs() {
        let from = digested(&uid);
        let life = (uid, open.incarnation);
        let log = LogFile::open(medium, life, open.file_bytes)?;
        let end = last_record(log.as_ref(), from)?;
        undigested |= end != from;
        let (name, last) = (log_file(uid, open.incarnation), end.sequence);
        // A copy may have got no file of a log that another node made.
        if !has_copies && is_incomplete(log.as_ref(), life, open.file_bytes, end != from)? {
            findings.push(format!(
                "file {name} is missing, or not as it was made: records after {last} are lost, if there were any"
            ));
        } else if let Some(log) = log
            && log.goes_on_behind(end)?
        {
            undigested = true;
            findings.push(format!("file {name}: the record after {last} is damaged"));
        } else if let Some(up_to) = digests.get(&uid) {
            findings.extend(lacking(life, end, *up_to));
        }
    }
    let said =
        format!("file {LEDGER_FILE}: the entry after {} is damaged, or was not finished", ledger.last());
    match ledger.look_behind_end()? {
        LedgerEnd::GoesOn => findings.push(said + ", and others stand behind it"),
        // If no log has undigested records, a ledger that is not whole loses nothing.
        LedgerEnd::NotWhole if undigested => findings.push(said),
        LedgerEnd::NotWhole | LedgerEnd::Whole => {}
    }
    Ok(findings)
}
