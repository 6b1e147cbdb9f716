//! Damage in what a recovery reads: how it is told from an end, what is kept of it, and what `hearth check` says of it.
//!
//! Guarantees: what is damaged is never thrown away as if it had not been. Of a ledger that is damaged, the logs whose
//! records can no longer be judged stay in the pool, with the ledger, under names that nobody else uses.

use crate::config::Config;
use crate::error::Error;
use crate::ledger::{Anchor, LEDGER_FILE, Ledger};
use crate::logs::{BEGINNING, LogFile, RING_START, is_log_file};
use crate::table::Table;
use area::{Area, Counters};
use format::checksum::Salt;
use format::envelope::FRAME_ALIGN;
use format::{Envelope, HEADER_BYTES, Incarnation, LogUid, Sequence};
use ipc::Digested;
use pmem::ring::{Place, scan};
use pmem::{MediaError, Medium, Region};
use std::collections::BTreeMap;
use zerocopy::FromBytes;

/// Bytes that are looked at, or copied, at once.
const WINDOW_BYTES: u64 = 64 << 10;

/// How a ledger ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LedgerEnd {
    /// Nothing stands where the next entry would.
    Whole,
    /// Something stands there that is nearly the next entry: it was never finished, or is damaged.
    NotWhole,
    /// A whole entry of this life stands behind: the one that is missing was lost. A crash can do that to entries
    /// that nobody had waited for, where pages reach the medium one by one.
    GoesOn,
}

/// Looks at what stands where reading a ledger ended, and behind. `earlier` are salts of its lives before.
pub(crate) fn ledger_end(
    region: &Region,
    start: u64,
    salt: Salt,
    end: Place,
    mut earlier: impl Iterator<Item = Salt>,
) -> Result<LedgerEnd, MediaError> {
    let bytes = region.bytes() / FRAME_ALIGN as u64 * FRAME_ALIGN as u64;
    let mut window = Vec::new();
    for window_at in (start..bytes).step_by(WINDOW_BYTES as usize) {
        window.resize(WINDOW_BYTES.min(bytes - window_at) as usize, 0);
        region.read(window_at, &mut window)?;
        for (header, index) in window.chunks_exact(FRAME_ALIGN).zip(0..) {
            let found = Envelope::decode(header).ok().map(|envelope| envelope.sequence);
            let Some(sequence) = found.filter(|sequence| *sequence > end.sequence) else { continue };
            let position = window_at + index * FRAME_ALIGN as u64;
            let later = scan(region, start, salt, Place { position, sequence }, bytes).next();
            if later.transpose()?.is_some() {
                return Ok(LedgerEnd::GoesOn);
            }
        }
    }
    let mut header = [0; HEADER_BYTES];
    region.read(end.position, &mut header)?;
    let (found, _) = Envelope::read_from_prefix(&header).expect("a header begins with an envelope");
    // The bit that is damaged may be one of the number's.
    let near = (found.sequence.get() ^ end.sequence.get()).count_ones() <= 1;
    if !near || header == [0; HEADER_BYTES] {
        return Ok(LedgerEnd::Whole);
    }
    // A life before may have left an entry here.
    let there = Place { sequence: found.sequence, ..end };
    let of_earlier =
        earlier.any(|salt| matches!(scan(region, start, salt, there, bytes).next(), Some(Ok(_))));
    Ok(if of_earlier { LedgerEnd::Whole } else { LedgerEnd::NotWhole })
}

/// The logs and grants that the tree's last flip holds.
pub(crate) fn table_of(area: &Area) -> Result<(Table, BTreeMap<LogUid, Digested>), Error> {
    let (mut table, mut progress) = (Table::default(), BTreeMap::new());
    for (uid, item) in area.logs()? {
        let (groups, grants) = (area.groups(uid)?, area.grants(uid)?);
        progress.insert(uid, Digested { sequence: item.digested, position: item.position.get() });
        table.restore(uid, &item, groups, &grants);
    }
    Ok((table, progress))
}

/// Where the tree's last flip says that the ledger goes on.
pub(crate) fn anchor_of(counters: &Counters) -> Anchor {
    let next = Place { position: counters.ledger_position, sequence: counters.ledger_sequence.next() };
    Anchor { next, incarnation: Incarnation::new(counters.ledger_incarnation) }
}

/// Logs in the pool, of at most so many bytes, with records that the table knows nothing of.
pub(crate) fn unaccounted(
    medium: &Medium,
    log_bytes_max: u64,
    known: impl Fn(LogUid) -> bool,
) -> Result<Vec<LogFile>, Error> {
    let mut found = Vec::new();
    for name in medium.list()?.iter().filter(|name| is_log_file(name)) {
        let Some((uid, incarnation)) = life_of(name).filter(|(uid, _)| !known(*uid)) else { continue };
        let Some(log) = LogFile::open(medium, (uid, incarnation), log_bytes_max)? else { continue };
        if log.frames(BEGINNING).next()?.is_some() || log.goes_on_behind(BEGINNING)? {
            found.push(log);
        }
    }
    Ok(found)
}

/// The log that a file's name says.
pub(crate) fn life_of(name: &str) -> Option<(LogUid, Incarnation)> {
    let (uid, incarnation) = name.strip_prefix("log-")?.split_once('-')?;
    Some((LogUid::new(uid.parse().ok()?), Incarnation::new(incarnation.parse().ok()?)))
}

/// Where files go that cannot be judged by the ledger of this life.
pub(crate) struct Kept<'a> {
    medium: &'a Medium,
    prefix: String,
    bytes_max: u64,
}

impl<'a> Kept<'a> {
    /// `incarnation` is the ledger's, so that a later accident has other names.
    pub fn new(medium: &'a Medium, config: &Config, incarnation: Incarnation) -> Self {
        // How long a log's file is, is its user's to say.
        let bytes_max = RING_START + config.log_bytes_max.max(config.log_bytes).max(config.ledger_bytes);
        Self { medium, prefix: format!("kept-{incarnation}-"), bytes_max }
    }

    /// Copies a file. Durable when this returns.
    pub fn keep(&self, name: &str) -> Result<(), Error> {
        let kept = format!("{}{name}", self.prefix);
        match self.medium.remove(&kept) {
            Ok(()) | Err(MediaError::NotFound) => {}
            Err(error) => return Err(error.into()),
        }
        let source = match self.medium.open_at_most(name, self.bytes_max) {
            // Its user made something else of it since it was read.
            Err(MediaError::Length | MediaError::NotFound) => return Ok(()),
            source => source?,
        };
        let bytes = source.bytes();
        let target = self.medium.create(&kept, bytes)?;
        let mut window = Vec::new();
        for at in (0..bytes).step_by(WINDOW_BYTES as usize) {
            window.resize(WINDOW_BYTES.min(bytes - at) as usize, 0);
            source.read(at, &mut window)?;
            target.write(at, &window);
        }
        Ok(target.settle()?)
    }

    /// What is kept, by a recovery before this one that was interrupted too; with the ledger, if there is anything.
    pub fn finish(&self) -> Result<Vec<String>, Error> {
        let is_kept = |name: &String| name.starts_with(&self.prefix);
        if self.medium.list()?.iter().any(is_kept) {
            self.keep(LEDGER_FILE)?;
        }
        let mut names: Vec<String> = self.medium.list()?.into_iter().filter(is_kept).collect();
        names.sort();
        Ok(names)
    }
}

/// What is damaged in the ledger and in the logs of a pool that nobody serves, a sentence each. Changes nothing.
///
/// # Errors
/// `Area`, `Media`, `File`: what recovery could not begin with either.
pub fn check(medium: &Medium) -> Result<Vec<String>, Error> {
    let area = Area::open(medium, area::Limits::default())?;
    let (mut table, progress) = table_of(&area)?;
    let mut ended = Vec::new();
    let anchor = anchor_of(&area.counters());
    let replayed = Ledger::replay(medium, area.pool(), anchor, &mut table, |entry, _| ended.push(entry.log))?;
    let log_bytes_max = Config::default().log_bytes_max;
    let mut findings = Vec::new();
    let mut undigested =
        !unaccounted(medium, log_bytes_max, |uid| table.log(uid).is_some() || ended.contains(&uid))?
            .is_empty();
    for (uid, open) in table.logs() {
        let from = progress.get(&uid).copied().unwrap_or(BEGINNING);
        // One that an interrupted recovery was done with is not read again, and has no file of this life.
        let Some(log) = LogFile::open(medium, (uid, open.incarnation), log_bytes_max)? else { continue };
        let (mut frames, mut end) = (log.frames(from), from);
        while let Some(frame) = frames.next()? {
            end = frame.after;
        }
        undigested |= end != from;
        if log.goes_on_behind(end)? {
            undigested = true;
            findings.push(format!("file {}: the record after {} is damaged", log.name, end.sequence));
        }
    }
    let last = Sequence::new(replayed.next.sequence.get() - 1);
    let said = format!("file {LEDGER_FILE}: the entry after {last} is damaged, or was not finished");
    match replayed.end {
        LedgerEnd::GoesOn => findings.push(said + ", and others stand behind it"),
        // With nothing left to judge it makes no difference.
        LedgerEnd::NotWhole if undigested => findings.push(said),
        LedgerEnd::NotWhole | LedgerEnd::Whole => {}
    }
    Ok(findings)
}
