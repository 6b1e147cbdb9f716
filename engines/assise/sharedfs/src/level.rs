//! Brings a copy level with this pool: the positions that it reports are judged against this pool's history, the
//! records that it lacks are sent, and the ledger keeps the entries that its tree does not contain.
//!
//! Guarantees: a copy is fed only if it is a prefix of the own history and all that it lacks is here; else it is refused
//! before anything is sent to it.

use crate::copies::{Copy, Has, LogToSend, ledger_to_send};
use crate::counted_copies::Copies;
use crate::error::Error;
use crate::ledger::place_of;
use crate::replay::copy::LocalCopy;
use area::Area;
use format::ledger::Event;
use format::mirror::LogEnds;
use format::node::LifeItem;
use format::{Life, LogUid, NodeId, Sequence};
use ipc::Digested;
use ipc::host::{Host, Time};
use mirror::logs::{RING_START, bytes_between};
use mirror::{CopyEnds, Sender};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;
use transport::Connection;

/// How long a copy may take to answer a greeting, and to come up to the pool before a life begins.
pub(crate) const LEVEL_PATIENCE: Duration = Duration::from_secs(10);
/// How long one wait for a copy is.
pub(crate) const LOOK: Duration = Duration::from_millis(20);
/// Bytes of a log that are sent at once.
pub(crate) const TURN_BYTES: usize = 256 << 10;

/// The key of its life that a pool reports which needs the whole tree of a head, because it gave its own up or has no block for an
/// entry: no life has it. However long its ledger is, such a pool is not ahead of any other.
pub(crate) const KEY_OF_NO_LIFE: [u8; 16] = [u8::MAX; 16];

/// Greets a copy over a connection that was made to it.
///
/// # Errors
/// `Copy`.
pub(crate) fn greet(
    host: &Arc<dyn Host>,
    connection: Connection,
    version: u64,
    ledger_bytes: u64,
) -> Result<(Sender, CopyEnds), Error> {
    let node = connection.node();
    let until = host.now().after(LEVEL_PATIENCE);
    Sender::greet(connection, (version, ledger_bytes), until).map_err(|error| Error::Copy(node, error))
}

/// Judges what a copy has, and begins to count it: the ledger keeps what its tree lacks from here on.
///
/// # Errors
/// `CopyIsAhead`, `NeedsImport`; `Media`, `File` of the own pool.
pub(crate) fn begin_copy(
    host: &Arc<dyn Host>,
    local: &mut LocalCopy,
    lives: &BTreeMap<Life, [u8; 16]>,
    (sender, ends): (Sender, CopyEnds),
) -> Result<Arc<Copy>, Error> {
    let node = sender.connection().node();
    judge_history(local, lives, &ends, node)?;
    let logs = judge_logs(local, &ends, node)?;
    let copy = Copy::new(host.clone(), sender, &ends);
    for ends in logs {
        copy.resume_log(&ends);
    }
    Ok(copy)
}

/// All lives of the own history.
///
/// # Errors
/// `Area`.
pub(crate) fn lives_of(area: &Area, local: &LocalCopy) -> Result<BTreeMap<Life, LifeItem>, Error> {
    let mut lives: BTreeMap<Life, LifeItem> = area.lives()?.into_iter().collect();
    for pending in local.ledger.pending() {
        if let crate::replay::table::Change::Life(life, item) = &pending.change {
            lives.insert(*life, *item);
        }
    }
    Ok(lives)
}

/// The keys of all lives of the own history.
///
/// # Errors
/// `Area`.
pub(crate) fn keys_of_lives(area: &Area, local: &LocalCopy) -> Result<BTreeMap<Life, [u8; 16]>, Error> {
    Ok(lives_of(area, local)?.into_iter().map(|(life, item)| (life, item.key)).collect())
}

/// The first entry of the ledger that the tree of a member does not have in common with this history, whose last entry is
/// `last`; `None` if the member's last life is not one of it. The entries of a life are the same wherever they are, so the
/// member's last life is common up to the entry before the next life here.
pub(crate) fn first_other_entry(
    lives: &BTreeMap<Life, LifeItem>,
    last: Sequence,
    ends: &CopyEnds,
) -> Option<Sequence> {
    let life = ends.contained.life;
    let is_known = life == ends.end.life && lives.get(&life).is_some_and(|own| own.key == ends.key);
    let next = lives.range((Bound::Excluded(life), Bound::Unbounded)).next();
    let end = next.map_or(last.next(), |(_, next)| next.first);
    is_known.then(|| ends.contained.sequence.next().min(end))
}

/// A copy's ledger is a beginning of the own one.
///
/// # Errors
/// `CopyIsAhead`, `NeedsImport`.
pub(crate) fn judge_history(
    local: &LocalCopy,
    lives: &BTreeMap<Life, [u8; 16]>,
    ends: &CopyEnds,
    node: NodeId,
) -> Result<(), Error> {
    if ends.key == KEY_OF_NO_LIFE {
        return Err(Error::NeedsImport(node));
    }
    let own = local.ledger.place();
    if ends.end.sequence > own.sequence || ends.end.life > own.life {
        return Err(Error::CopyIsAhead(node));
    }
    let key = lives.get(&ends.end.life).copied().unwrap_or_default();
    let same = key == ends.key && (ends.end.life == Life::new(0)) == (ends.key == [0; 16]);
    // That its end is a place between two entries of ours is seen when they are read from there.
    let reaches = same && local.ledger.entries_from(&place_of(&ends.end))?.is_some();
    if reaches { Ok(()) } else { Err(Error::NeedsImport(node)) }
}

/// All records that the entries name which the copy's tree lacks are at the copy, or here. Gives the files that go on.
fn judge_logs(local: &mut LocalCopy, ends: &CopyEnds, node: NodeId) -> Result<Vec<LogEnds>, Error> {
    let entries = local.ledger.entries_from(&place_of(&ends.contained))?;
    let entries = entries.ok_or(Error::NeedsImport(node))?;
    let mut there: BTreeMap<LogUid, Sequence> = BTreeMap::new();
    for log in &ends.logs {
        let end = there.entry(log.log).or_default();
        *end = log.end.max(*end);
    }
    let mut goes_on = Vec::new();
    let logs: Vec<LogUid> = local.logs.keys().copied().collect();
    for uid in logs {
        let open = local.ledger.table().log(uid).expect("each log of a copy is in the table");
        let incarnation = open.incarnation;
        let digested = local.digested(uid);
        let Some(file) = local.file(uid)? else { continue };
        let known = ends.logs.iter().find(|log| (log.log, log.incarnation) == (uid, incarnation));
        let from = match known {
            Some(log) => {
                goes_on.push(*log);
                let executed = Digested { sequence: log.executed, position: log.executed_position.get() };
                let ring = (RING_START, RING_START + file.ring_bytes());
                let end = Digested { sequence: log.end, position: log.end_position.get() };
                // It gets what is digested here before the entries by which it would make room for that.
                let more = bytes_between(ring, end, digested);
                if bytes_between(ring, executed, end) + more > file.ring_bytes() {
                    return Err(Error::NeedsImport(node));
                }
                end
            }
            None => match local.logs.get(&uid).and_then(|log| log.before) {
                Some(before) => Digested { sequence: before, ..mirror::logs::BEGINNING },
                None => return Err(Error::NeedsImport(node)),
            },
        };
        // Records that are digested here are still in the log, from where the copy's file ends.
        let (mut frames, mut at) = (file.frames(from), from);
        while at.sequence < digested.sequence {
            let Some(frame) = frames.next()? else { return Err(Error::NeedsImport(node)) };
            at = frame.after;
        }
        let end = there.entry(uid).or_default();
        *end = digested.sequence.max(*end);
    }
    for read in &entries {
        let entry = read.entry()?;
        if let Event::Digest { up_to, .. } = entry.event
            && there.get(&entry.log).is_none_or(|end| *end < up_to)
        {
            return Err(Error::NeedsImport(node));
        }
    }
    Ok(goes_on)
}

/// The message for a log of a copy, up to a record.
///
/// # Errors
/// `Media`.
pub(crate) fn log_to_send(
    local: &mut LocalCopy,
    uid: LogUid,
    up_to: Sequence,
) -> Result<Option<LogToSend>, Error> {
    let Some(open) = local.ledger.table().log(uid) else { return Ok(None) };
    let (incarnation, owner) = (open.incarnation, open.caller.uid);
    let Some(file) = local.file(uid)? else { return Ok(None) };
    let before = local.logs.get(&uid).and_then(|log| log.before);
    let digested = local.digested(uid).sequence;
    Ok(Some(LogToSend { log: uid, incarnation, file, before, owner, up_to, digested }))
}

/// Before a life begins: every copy gets what the logs hold and all of the ledger, and its tree contains that, so that all of
/// the ledger's ring is free. Gives how far each log goes.
///
/// # Errors
/// `Copy`: it did not come up in time, or its connection is over. `Media`, `File`: the own pool cannot be read.
pub(crate) fn level(
    host: &Arc<dyn Host>,
    copies: &Copies,
    local: &mut LocalCopy,
) -> Result<BTreeMap<LogUid, Sequence>, Error> {
    let until = host.now().after(LEVEL_PATIENCE);
    let mut ends = BTreeMap::new();
    let logs: Vec<LogUid> = local.logs.keys().copied().collect();
    for uid in logs {
        let Some(item) = log_to_send(local, uid, Sequence::new(u64::MAX))? else { continue };
        let ledger = ledger_to_send(&local.ledger);
        let mut end = Sequence::new(u64::MAX);
        for copy in copies.all() {
            loop {
                let seen = copy.look();
                match copy.has(uid, item.up_to, Sequence::new(0)) {
                    Has::All => break,
                    Has::Until(at) => {
                        end = end.min(at);
                        break;
                    }
                    Has::Less => {}
                }
                copy.push(Some(&item), &ledger, TURN_BYTES)?;
                wait(host, &copy, seen, until)?;
            }
        }
        ends.insert(uid, end);
    }
    let last = local.ledger.last();
    for copy in copies.all() {
        loop {
            let seen = copy.look();
            if copy.contained().sequence >= last {
                break;
            }
            copy.push(None, &ledger_to_send(&local.ledger), TURN_BYTES)?;
            wait(host, &copy, seen, until)?;
        }
    }
    local.ledger.hold(copies.contained());
    Ok(ends)
}

/// All copies have the whole ledger.
///
/// # Errors
/// As [`level`].
pub(crate) fn send_ledger(host: &Arc<dyn Host>, copies: &Copies, local: &LocalCopy) -> Result<(), Error> {
    let until = host.now().after(LEVEL_PATIENCE);
    for copy in copies.all() {
        loop {
            let seen = copy.look();
            if copy.has_ledger(local.ledger.last()) {
                break;
            }
            copy.push(None, &ledger_to_send(&local.ledger), TURN_BYTES)?;
            wait(host, &copy, seen, until)?;
        }
    }
    Ok(())
}

pub(crate) fn wait(host: &Arc<dyn Host>, copy: &Copy, seen: u32, until: Time) -> Result<(), Error> {
    let now = host.now();
    if !copy.is_connected() || now >= until {
        return Err(Error::Copy(copy.node, transport::Error::TimedOut.into()));
    }
    copy.listen(seen, now.after(LOOK).min(until));
    Ok(())
}
