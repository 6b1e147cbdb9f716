//! Repair of the own update logs from the copies, before a life begins (`docs/replication.md`, C13).
//!
//! Where a copy has a record, the copy's record counts: see [`mirror::records_of`]. The bytes are written over the own ones
//! in their place in the file, so an interrupted repair leaves the records before the first wrong one as they were, and is
//! done again by the next life.
//!
//! Guarantees: a range of records is fetched only from a copy of the same history. A record of the own file behind those of
//! the copies stays.

use crate::error::Error;
use crate::level::{LEVEL_PATIENCE, greet, judge_history};
use crate::replay::copy::LocalCopy;
use format::mirror::RecordsOfLog;
use format::{Envelope, HEADER_BYTES, Incarnation, Life, LogUid, NodeId, PoolUid, Sequence};
use ipc::Digested;
use ipc::host::{Host, Time};
use mirror::logs::{FIRST_SPACE, LogFile, LogSize, RING_START, bytes_between, log_file};
use mirror::{CopyEnds, Sender, records_of};
use pmem::ring::PAD_KIND;
use pmem::{MediaError, Medium};
use std::collections::BTreeMap;
use std::sync::Arc;
use transport::Connection;

/// A log whose records were replaced by those of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repaired {
    /// The log.
    pub log: LogUid,
    /// The copy.
    pub node: NodeId,
    /// The last record that was correct here, or digested.
    pub after: Sequence,
    /// The last record that was fetched.
    pub up_to: Sequence,
}

/// Copies that answered a greeting, and are not fed yet.
pub(crate) struct GreetedCopies<'a> {
    host: &'a Arc<dyn Host>,
    pool: PoolUid,
    /// Key of the hashes by which records are compared.
    key: [u8; 16],
    copies: Vec<(Sender, CopyEnds)>,
    pub repaired: Vec<Repaired>,
}

impl<'a> GreetedCopies<'a> {
    /// Greets the copies at the other ends of these connections.
    ///
    /// # Errors
    /// `Copy`.
    pub fn greet(
        host: &'a Arc<dyn Host>,
        connections: Vec<Connection>,
        (version, ledger_bytes): (u64, u64),
        (pool, key): (PoolUid, [u8; 16]),
    ) -> Result<Self, Error> {
        let greet = |connection| greet(host, connection, version, ledger_bytes);
        let copies = connections.into_iter().map(greet).collect::<Result<_, _>>()?;
        Ok(Self { host, pool, key, copies, repaired: Vec::new() })
    }

    /// The first of them.
    pub fn first_node(&self) -> Option<NodeId> {
        self.copies.first().map(|(sender, _)| sender.connection().node())
    }

    /// The copies, to be fed from now on.
    pub fn into_copies(self) -> Vec<(Sender, CopyEnds)> {
        self.copies
    }

    /// Repairs a log while the ledger is executed; true if records were fetched. A copy that is in another life may be of
    /// another history, and is not asked.
    ///
    /// # Errors
    /// `Copy`; `Media`: also if the repaired file cannot be read.
    pub fn repair_log(&mut self, local: &mut LocalCopy, uid: LogUid) -> Result<bool, Error> {
        let mut fetched = false;
        for index in 0..self.copies.len() {
            let ends = &self.copies[index].1;
            // One head wrote all entries of a life.
            if (ends.end.life, ends.key) == local.ledger.life_and_key() {
                fetched |= self.repair_from(index, local, &[uid])?;
            }
        }
        Ok(fetched)
    }

    /// Repairs all logs, when the ledger is executed.
    ///
    /// # Errors
    /// `CopyIsAhead`, `NeedsImport`: the history of a copy is not a beginning of the own one. As [`Self::repair_log`].
    pub fn repair_all(
        &mut self,
        local: &mut LocalCopy,
        lives: &BTreeMap<Life, [u8; 16]>,
    ) -> Result<(), Error> {
        for (sender, ends) in &self.copies {
            judge_history(local, lives, ends, sender.connection().node())?;
        }
        let logs: Vec<LogUid> = local.logs.keys().copied().collect();
        for index in 0..self.copies.len() {
            self.repair_from(index, local, &logs)?;
        }
        Ok(())
    }

    fn repair_from(&mut self, index: usize, local: &mut LocalCopy, logs: &[LogUid]) -> Result<bool, Error> {
        let mut ranges = Vec::new();
        for uid in logs {
            ranges.extend(own_records(local, *uid, &self.copies[index].1, &self.key)?);
        }
        let others = self.ask(index, &ranges)?;
        for (range, end) in &others {
            self.fetch(index, local, range, *end)?;
        }
        Ok(!others.is_empty())
    }

    fn until(&self) -> Time {
        self.host.now().after(LEVEL_PATIENCE)
    }

    /// The ranges in which a copy has other or more records.
    fn ask(&mut self, index: usize, ranges: &[RecordsOfLog]) -> Result<Vec<(RecordsOfLog, Digested)>, Error> {
        let host = self.host;
        let until = || host.now().after(LEVEL_PATIENCE);
        let (sender, ends) = &mut self.copies[index];
        let node = sender.connection().node();
        sender.check_records(ends, &self.key, ranges, until).map_err(|error| Error::Copy(node, error))
    }

    /// Writes the records of a copy over the own ones.
    fn fetch(
        &mut self,
        index: usize,
        local: &mut LocalCopy,
        range: &RecordsOfLog,
        end: Digested,
    ) -> Result<(), Error> {
        let file = writable(local, range.log, self.pool)?;
        let from = Digested { sequence: range.from, position: range.from_position.get() };
        let mut fetched = FetchedRange::new(&file, from, end);
        while let Some(part) = fetched.next() {
            let until = self.until();
            let (sender, ends) = &mut self.copies[index];
            let node = sender.connection().node();
            let bytes = sender.fetch(ends, (range.log, range.incarnation), part, until);
            fetched.put(&bytes.map_err(|error| Error::Copy(node, error))?)?;
        }
        file.sync()?;
        // The hashes of the former bytes are forgotten with the file.
        local.reopen(range.log);
        self.read_again(local, range, end)?;
        let (log, node) = (range.log, self.copies[index].0.connection().node());
        self.repaired.push(Repaired { log, node, after: range.end, up_to: end.sequence });
        Ok(())
    }

    /// Reads the repaired records. If they end early, the program changes its file still, and its log ends there.
    fn read_again(&self, local: &mut LocalCopy, range: &RecordsOfLog, end: Digested) -> Result<(), Error> {
        let Some(file) = local.file(range.log)? else { return Ok(()) };
        let from = Digested { sequence: range.from, position: range.from_position.get() };
        let mut frames = file.frames(from);
        while let Some(frame) = frames.next()? {
            if frame.after.sequence >= end.sequence {
                break;
            }
        }
        Ok(())
    }
}

/// The undigested records of a log that a copy has too, as they are here; `None` if the copy has no more than the tree.
fn own_records(
    local: &mut LocalCopy,
    uid: LogUid,
    ends: &CopyEnds,
    key: &[u8; 16],
) -> Result<Option<RecordsOfLog>, Error> {
    let Some(open) = local.ledger.table().log(uid) else { return Ok(None) };
    let id = (uid, open.incarnation);
    let from = local.digested(uid);
    let there = ends.logs.iter().find(|log| (log.log, log.incarnation) == id).map(|log| log.end);
    let Some(up_to) = there.filter(|end| *end > from.sequence) else { return Ok(None) };
    let file = local.file(uid)?;
    Ok(Some(match file {
        Some(file) => records_of(&file, id, from, up_to, key).0,
        None => mirror::no_records(id, from),
    }))
}

/// A range of a log that is fetched from a copy and put into a file, part after part.
pub(crate) struct FetchedRange<'a> {
    file: &'a LogFile,
    at: u64,
    left: u64,
    frames: FetchedFrames,
}

impl<'a> FetchedRange<'a> {
    /// The records between two places.
    pub fn new(file: &'a LogFile, from: Digested, end: Digested) -> Self {
        let left = bytes_between((RING_START, file.ring_end()), from, end).min(file.ring_bytes());
        Self { file, at: from.position, left, frames: FetchedFrames { next: from.position } }
    }

    /// The position of the next part, and at most how many bytes it has; `None` at the end.
    pub fn next(&self) -> Option<(u64, u64)> {
        (self.left > 0).then(|| (self.at, self.left.min(self.file.ring_end() - self.at)))
    }

    /// Puts the next part into the file, or the beginning of it.
    ///
    /// # Errors
    /// The error of the medium.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), MediaError> {
        let pad = self.frames.pad_in(self.at, bytes);
        // The part that a pad skips may have no space.
        self.file.put(self.at, &bytes[..pad.unwrap_or(bytes.len())])?;
        let ring_end = self.file.ring_end();
        let taken = if pad.is_some() { ring_end - self.at } else { bytes.len() as u64 };
        self.left = self.left.saturating_sub(taken);
        self.at += taken;
        if self.at >= ring_end {
            (self.at, self.frames.next) = (RING_START, RING_START);
        }
        Ok(())
    }
}

/// The frames in the fetched bytes of a log.
struct FetchedFrames {
    /// Where the next one begins.
    next: u64,
}

impl FetchedFrames {
    /// Where the header of a pad ends in these bytes, which were fetched from a position on.
    fn pad_in(&mut self, position: u64, bytes: &[u8]) -> Option<usize> {
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        while let Some(offset) = self.next.checked_sub(position).map(size)
            && let Some(header) = bytes.get(offset..).and_then(|rest| rest.get(..HEADER_BYTES))
            && let Ok(envelope) = Envelope::decode(header)
        {
            if envelope.kind == PAD_KIND {
                return Some(offset + HEADER_BYTES);
            }
            self.next += envelope.frame_bytes();
        }
        None
    }
}

/// The file of a log, made again if its owner has changed its length or removed it.
fn writable(local: &mut LocalCopy, uid: LogUid, pool: PoolUid) -> Result<Arc<LogFile>, Error> {
    let file = local.file(uid)?;
    let open = local.ledger.table().log(uid).ok_or(Error::Stopped)?;
    let (incarnation, bytes, owner) = (open.incarnation, open.file_bytes, open.caller.uid);
    if let Some(file) = file.filter(|file| file.region().bytes() == bytes) {
        return Ok(file);
    }
    Ok(Arc::new(made_again(&local.medium, pool, (uid, incarnation), (bytes, owner))?))
}

/// An empty file of a log, in the place of the one that there is.
///
/// # Errors
/// The error of the medium.
pub(crate) fn made_again(
    medium: &Medium,
    pool: PoolUid,
    life: (LogUid, Incarnation),
    (file_bytes, owner): (u64, u32),
) -> Result<LogFile, MediaError> {
    match medium.remove(&log_file(life.0, life.1)) {
        Ok(()) | Err(MediaError::NotFound) => {}
        Err(error) => return Err(error),
    }
    let size = LogSize { file_bytes, space: FIRST_SPACE };
    medium.with_held(FIRST_SPACE, || LogFile::create(medium, pool, life, size, owner))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmem::Recorder;
    use pmem::ring::AppendRing;
    use zerocopy::IntoBytes;

    fn append(ring: &mut AppendRing, bytes: usize) {
        let mut header = [0; HEADER_BYTES];
        let envelope = Envelope::new(format::record::Kind::Write as u8, 0, bytes as u32);
        header[..size_of::<Envelope>()].copy_from_slice(envelope.as_bytes());
        ring.append(header, &[vec![7; bytes].as_slice().into()]).unwrap();
    }

    /// However the bytes are fetched, the pad is found.
    #[test]
    fn a_pad_is_found_in_fetched_frames() {
        const FILE_BYTES: usize = 32 << 10;
        let region = Recorder::new().medium().create("log", FILE_BYTES as u64).unwrap();
        let mut ring = AppendRing::empty(region.clone(), 0, format::checksum::Salt::NONE, Sequence::new(1));
        ring.use_up_to(8192);
        append(&mut ring, 100);
        append(&mut ring, 6000);
        let pad = ring.tail();
        ring.release_to(pad);
        append(&mut ring, 4000);
        assert_eq!(ring.tail().sequence, Sequence::new(5), "a pad stands before the last");
        let mut all = vec![0; FILE_BYTES];
        region.read(0, &mut all).unwrap();
        for (from, piece) in [(4096, 64), (4096, 192), (4096, 4096), (0, FILE_BYTES)] {
            // The frame of 4,000 bytes stands over the first ones.
            let mut frames = FetchedFrames { next: if from == 0 { 0 } else { pad.position } };
            let mut position = from as u64;
            let found = all[from..].chunks(piece).find_map(|part| {
                let found = frames.pad_in(position, part).map(|end| position + end as u64);
                position += part.len() as u64;
                found
            });
            let expected = if from == 0 { None } else { Some(pad.position + HEADER_BYTES as u64) };
            assert_eq!(found, expected, "pieces of {piece}");
        }
    }
}
