//! The pool of a standby: the tree, the ledger with its table, and the logs, executed to their end.

use super::comparing::Hold;
use crate::config::Config;
use crate::error::Error;
use crate::generations::Generations;
use crate::imported::make_files_anew;
use crate::ledger::position_of;
use crate::level::KEY_OF_NO_LIFE;
use crate::replay::copy::{LocalCopy, contain_changes, key_of_life};
use crate::replay::script::Script;
use area::{Area, AreaError};
use format::ledger::Event;
use format::mirror::LogMark;
use format::{Incarnation, LogUid, Sequence};
use ipc::Digested;
use ipc::host::Host;
use mirror::Receiver;
use mirror::ledger::LedgerPosition;
use mirror::logs::{BEGINNING, log_file};
use pmem::{MediaError, Medium};
use std::collections::BTreeMap;
use std::sync::Arc;
use zerocopy::little_endian::{U32, U64};

/// The parts of the pool that a standby executes.
pub(super) struct Contents {
    pub area: Area,
    pub copy: LocalCopy,
    /// The position of each log when the head was told last.
    pub told: BTreeMap<LogUid, Sequence>,
    pub told_ledger: Sequence,
    /// Files of ended logs, which are removed with the next commit.
    pub over: Vec<(LogUid, Incarnation)>,
    /// Where a comparison makes execution stop.
    pub hold: Option<Hold>,
    /// The next entry names records of this file of a log, up to this one, that were missing or wrong when the pool was
    /// opened.
    pub lacks: Option<(LogUid, Incarnation, Sequence)>,
    /// The area has no block for what the next entry names: nothing is executed before the tree of a head is here.
    pub needs_tree: bool,
}

/// Opens a pool, executes it to its end, and makes the receiver for the rest. If the area has no block for what an entry
/// names, the pool is opened as it is, to get the tree of a head.
pub(super) fn open_contents(
    host: &dyn Host,
    medium: &Medium,
    config: &Config,
) -> Result<(Contents, Receiver), Error> {
    match open_up_to(host, (medium, config), Sequence::new(u64::MAX)) {
        Err(Error::Area(AreaError::NoSpace)) => open_up_to(host, (medium, config), Sequence::new(0)),
        opened => opened,
    }
}

/// The same, with entries of the ledger up to this one; with less than all of them it is a pool that needs the tree of a head.
fn open_up_to(
    host: &dyn Host,
    (medium, config): (&Medium, &Config),
    up_to: Sequence,
) -> Result<(Contents, Receiver), Error> {
    let needs_tree = up_to < Sequence::new(u64::MAX);
    let mut area = Area::open(medium, config.area)?;
    make_files_anew(medium, &mut area)?;
    let generations = Arc::new(Generations::new(host)?);
    let mut copy = LocalCopy::open(&area, medium, config, generations)?;
    // Entries in the ledger may never have been synced: they are synced before they are executed.
    let region = copy.ledger.region().clone();
    let contained = position_of(&copy.ledger.place());
    let logs = logs_of(medium, &copy)?;
    let key =
        if area.is_given_up() || needs_tree { KEY_OF_NO_LIFE } else { key_of_life(&area, contained.life)? };
    let opened = Receiver::open(medium, area.pool(), (region, contained, key), logs.into_iter());
    let mut receiver = opened.map_err(|error| match error {
        mirror::Error::Media(error) => Error::Media(error),
        mirror::Error::Message(error) => Error::File(crate::ledger::LEDGER_FILE.to_owned(), error),
        _ => Error::Stopped,
    })?;
    let (mut over, mut lacks) = (Vec::new(), None);
    loop {
        let up_to = receiver.synced().min(up_to);
        match Script::new(&mut area, &mut copy, config).run_one(up_to, &mut |_, _| ()) {
            Ok((true, files)) => over.extend(files),
            Ok((false, files)) => {
                over.extend(files);
                break;
            }
            // The head sends them, or this node does not lead.
            Err(Error::Short(log, _) | Error::Differs(log, _)) => {
                lacks = lacking_records(&copy, log)?;
                break;
            }
            Err(error) => return Err(error),
        }
    }
    contain_changes(&mut area, &mut copy, 0)?;
    remove_files(medium, &mut receiver, &mut over)?;
    let mut contents = Contents {
        area,
        copy,
        told: BTreeMap::new(),
        told_ledger: Sequence::default(),
        over,
        hold: None,
        lacks,
        needs_tree,
    };
    let marks = contents.marks(true);
    let contained = contents.contained();
    receiver.note_executed(contained, &marks);
    if let Some((log, incarnation, _)) = lacks {
        receiver.rewind_log(log, incarnation);
    }
    // The head is told this much with the ends, and nothing before them.
    contents.told_ledger = contained.sequence;
    Ok((contents, receiver))
}

/// The records that the next entry names, of a log that lacks them.
fn lacking_records(copy: &LocalCopy, log: LogUid) -> Result<Option<(LogUid, Incarnation, Sequence)>, Error> {
    let open = copy.ledger.table().log(log);
    let (Some(read), Some(open)) = (copy.ledger.next_entry()?, open) else { return Ok(None) };
    Ok(match read.entry()?.event {
        Event::Digest { up_to, .. } => Some((log, open.incarnation, up_to)),
        _ => None,
    })
}

/// The files of logs in a pool, and the position up to which the tree contains each.
fn logs_of(medium: &Medium, copy: &LocalCopy) -> Result<Vec<(LogUid, Incarnation, Digested)>, Error> {
    let table = copy.ledger.table();
    let names = medium.list()?;
    let files = names.iter().filter_map(|name| crate::damage::life_of(name));
    let from = |(uid, incarnation): (LogUid, Incarnation)| {
        let open = table.log(uid).filter(|open| open.incarnation == incarnation);
        (uid, incarnation, open.map_or(BEGINNING, |_| copy.digested(uid)))
    };
    Ok(files.map(from).collect())
}

pub(super) fn remove_files(
    medium: &Medium,
    receiver: &mut Receiver,
    over: &mut Vec<(LogUid, Incarnation)>,
) -> Result<(), Error> {
    for (log, incarnation) in over.drain(..) {
        receiver.remove_log(log, incarnation);
        match medium.remove(&log_file(log, incarnation)) {
            Ok(()) | Err(MediaError::NotFound) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

impl Contents {
    pub fn contained(&self) -> LedgerPosition {
        position_of(&self.copy.ledger.last_commit())
    }

    /// The positions of logs in the tree: of those that moved since the last time, or of all.
    pub fn marks(&mut self, all: bool) -> Vec<LogMark> {
        let mut marks = Vec::new();
        let table = self.copy.ledger.table();
        self.told.retain(|uid, _| table.log(*uid).is_some());
        for mark in self.copy.logs.keys().filter_map(|log| mark_of(&self.copy, *log)) {
            if self.told.insert(mark.log, mark.sequence) != Some(mark.sequence) || all {
                marks.push(mark);
            }
        }
        marks
    }
}

/// The position of a log in the tree; none if the log is over.
pub(super) fn mark_of(copy: &LocalCopy, log: LogUid) -> Option<LogMark> {
    let incarnation = copy.ledger.table().log(log)?.incarnation;
    let Digested { sequence, position } = copy.digested(log);
    Some(LogMark { log, sequence, position: U64::new(position), incarnation, reserved: U32::new(0) })
}
