//! The manager's log in its folder: a snapshot, then a record for each change, which is durable before it is published.
//!
//! A log is one file, `manager-N`: an append ring that is filled once and never wraps. Every start, and every full log,
//! begins the next file with a snapshot; when the snapshot is synced, the older files are removed. So no frame is ever
//! appended behind a torn frame, and after a crash there is the older log, or a complete newer one, or both. The names
//! of finished logs are never used again, and the frames of a file are salted with its number.
//!
//! A crash may tear frames that were not synced yet, but no older ones. The snapshot has its own sync, and no other
//! sync covers more than `BATCH_MAX` records. So an invalid frame is the end of the log only if no frame follows that
//! was written after the sync of this one; otherwise the medium has lost acknowledged data, and the log is damaged.
//! Losses at the end of the log cannot be detected.
//!
//! Once the first log is durable, the file `BEGUN` exists. Without this file, a first log without a valid snapshot
//! comes from a crashed start, of which no client has seen anything. With this file, a folder without a valid log has
//! lost acknowledged data, and no cluster begins in it.
//!
//! A failed sync, or a file that is not in its folder any more, ends the store: the contents of the medium are unknown
//! then, and no request is answered any more.

use crate::change::Record;
use crate::codec::{decode_view, encode_record, encode_view, take_record};
use crate::core::HISTORY_MAX;
use crate::error::Error;
use crate::rules::Rules;
use crate::view::View;
use format::checksum::Salt;
use format::cluster::{ClusterFrame, ClusterFrameHead};
use format::envelope::FRAME_ALIGN;
use format::{DecodeError, Envelope, HEADER_BYTES, Incarnation, LogUid, Sequence};
use pmem::copy::Source;
use pmem::ring::{AppendError, AppendRing, RingPosition, scan};
use pmem::{MediaError, Medium, PoolLock, Region};
use rustix::io::Errno;
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// Bytes of a log: enough for the largest snapshot, and for thousands of records.
pub const LOG_BYTES: u64 = 4 << 20;

/// Limit of records in one sync. The lower it is, the nearer to its end damage of a log can be distinguished from a
/// crash.
const BATCH_MAX: usize = 4;

/// Bytes that are searched in one step.
const PIECE_BYTES: usize = 64 * FRAME_ALIGN;

/// Limit of bytes of records in a snapshot; older records are left out.
const HISTORY_BYTES_MAX: usize = 1 << 20;

/// The errors of opening a folder, a pipe or a link as a log.
const NO_FILE: [Errno; 3] = [Errno::NODEV, Errno::ISDIR, Errno::LOOP];

/// Name of the file that exists once a cluster has begun in the folder.
const BEGUN: &str = "begun";

const OTHER_VERSION: Error =
    Error::Damaged("its log is of another version of this program, or its first bytes were overwritten");

const FIRST: RingPosition = RingPosition { position: 0, sequence: Sequence::new(1) };

/// The open log of a manager.
pub struct Store {
    medium: Medium,
    number: u64,
    ring: AppendRing,
    begun: Region,
    cluster: u64,
    failed: bool,
    _lock: PoolLock,
}

/// The state of a store when it was opened.
#[derive(Clone, Debug)]
pub struct StoredState {
    /// The view with all changes that are durable.
    pub view: View,
    /// The last changes.
    pub history: VecDeque<Record>,
}

impl Store {
    /// Opens the manager's folder; a folder without logs becomes that of a new cluster with this number and these
    /// rules.
    ///
    /// # Errors
    /// `Media` (`Locked`: another manager runs on it), `Damaged`.
    pub fn open(medium: Medium, cluster: u64, rules: Rules) -> Result<(Self, StoredState), Error> {
        let lock = medium.lock()?;
        Self::open_locked(medium, lock, cluster, rules)
    }

    /// The same for a caller that has locked the folder.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_locked(
        medium: Medium,
        lock: PoolLock,
        cluster: u64,
        rules: Rules,
    ) -> Result<(Self, StoredState), Error> {
        let mut logs = logs(&medium)?;
        let kept = match newest(&medium, &logs)? {
            Some(kept) => kept,
            // A start that crashed before the cluster had begun. Its successor is a first log again, so that another
            // crash is the same case.
            None => {
                logs.drain(..).try_for_each(|number| medium.remove(&name(number)))?;
                StoredState { view: View::new(cluster, rules), history: VecDeque::new() }
            }
        };
        let number = logs.last().map_or(Some(1), |last| last.checked_add(1));
        let number = number.ok_or(Error::Damaged("no number is left for another log"))?;
        let begun = has_begun(&medium)?.then(|| medium.open_read_only(BEGUN)).transpose()?;
        let ring = begin(&medium, number, &kept.view, &kept.history)?;
        let cluster = kept.view.cluster;
        remove_older(&medium, number)?;
        let begun = begun.map_or_else(|| medium.create(BEGUN, 1), Ok)?;
        Ok((Self { medium, number, ring, begun, cluster, failed: false, _lock: lock }, kept))
    }

    /// The rules of the cluster of a manager's folder; `None` if it has no valid log. Changes nothing.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn rules(medium: &Medium) -> Result<Option<Rules>, Error> {
        let _lock = medium.lock()?;
        Ok(newest(medium, &logs(medium)?)?.map(|kept| kept.view.rules))
    }

    /// Makes records durable. `view` and `history` include them: a new log begins with these.
    ///
    /// # Errors
    /// `Media`; after that no record is ever durable here again.
    pub fn append(
        &mut self,
        records: &[Record],
        view: &View,
        history: &VecDeque<Record>,
    ) -> Result<(), Error> {
        if self.failed {
            return Err(Error::Media(MediaError::Poisoned));
        }
        self.failed = true;
        for batch in records.chunks(BATCH_MAX) {
            match self.write(batch) {
                Ok(()) => self.ring.region().sync()?,
                Err(AppendError::Full) => {
                    // The snapshot contains all records, also those before this batch.
                    self.rotate(view, history)?;
                    break;
                }
                Err(AppendError::Fault) => unreachable!("bytes of our own are there"),
            }
        }
        self.check_place()?;
        self.failed = false;
        Ok(())
    }

    /// Checks that a start would find this log, and the file that says that a cluster has begun.
    ///
    /// # Errors
    /// `Displaced`: it would not find one of them; `Media`.
    pub fn check_place(&self) -> Result<(), Error> {
        if !self.medium.holds(self.ring.region())? {
            return Err(Error::Displaced("its log or its folder"));
        }
        let is_there = self.medium.holds(&self.begun)?;
        is_there.then_some(()).ok_or(Error::Displaced("the file begun in its folder"))
    }

    /// Appends records, which are not durable yet.
    fn write(&mut self, records: &[Record]) -> Result<(), AppendError> {
        for record in records {
            let bytes = encode_record(record);
            let head = head(ClusterFrame::Record, self.cluster, bytes.len(), 0);
            self.ring.append(head, &[Source::from(&bytes[..])])?;
        }
        Ok(())
    }

    fn rotate(&mut self, view: &View, history: &VecDeque<Record>) -> Result<(), Error> {
        let number = self.number + 1;
        self.ring = begin(&self.medium, number, view, history)?;
        self.number = number;
        remove_older(&self.medium, number)
    }
}

/// Removes the logs before this one.
fn remove_older(medium: &Medium, newest: u64) -> Result<(), Error> {
    let mut older = logs(medium)?.into_iter().filter(|number| *number < newest);
    older.try_for_each(|number| medium.remove(&name(number)).map_err(Error::from))
}

fn name(number: u64) -> String {
    format!("manager-{number}")
}

/// Numbers of the logs in the folder, in order.
fn logs(medium: &Medium) -> Result<Vec<u64>, Error> {
    let names = medium.list()?;
    let number = |text: &String| text.strip_prefix("manager-").and_then(|number| number.parse().ok());
    // The manager never creates files of other names.
    let ours = |text: &&String| number(text).is_some_and(|number| name(number) == **text);
    let mut numbers: Vec<u64> = names.iter().filter(ours).filter_map(number).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

fn salt(number: u64) -> Salt {
    Salt::of_log(LogUid::new(number), Incarnation::new(0))
}

fn head(kind: ClusterFrame, cluster: u64, payload: usize, records: usize) -> [u8; HEADER_BYTES] {
    let bytes = |count| u32::try_from(count).expect("views, changes and histories have bounds");
    let head = ClusterFrameHead::new(kind, cluster, bytes(payload), bytes(records));
    head.as_bytes().try_into().expect("the head of a frame is that long")
}

/// Creates a log, whose snapshot is durable when this returns.
fn begin(medium: &Medium, number: u64, view: &View, history: &VecDeque<Record>) -> Result<AppendRing, Error> {
    let region = medium.create(&name(number), LOG_BYTES)?;
    let mut ring = AppendRing::new(region, 0, salt(number), FIRST, FIRST);
    let view_bytes = encode_view(view);
    let mut records: Vec<Vec<u8>> = Vec::new();
    let mut total = 0;
    for record in history.iter().rev().take(HISTORY_MAX) {
        let bytes = encode_record(record);
        total += bytes.len();
        if total > HISTORY_BYTES_MAX {
            break;
        }
        records.push(bytes);
    }
    records.reverse();
    let records = records.concat();
    let payload = view_bytes.len() + records.len();
    let head = head(ClusterFrame::Snapshot, view.cluster, payload, records.len());
    ring.append(head, &[Source::from(&view_bytes[..]), Source::from(&records[..])])
        .expect("a new log has room for the largest snapshot");
    ring.region().sync()?;
    Ok(ring)
}

fn has_begun(medium: &Medium) -> Result<bool, Error> {
    Ok(medium.list()?.iter().any(|name| name == BEGUN))
}

/// The state of the newest log with a valid snapshot; `None` if no cluster has begun here.
fn newest(medium: &Medium, logs: &[u64]) -> Result<Option<StoredState>, Error> {
    for number in logs.iter().rev() {
        if let Some(kept) = read(medium, *number)? {
            return Ok(Some(kept));
        }
    }
    if has_begun(medium)? {
        return Err(Error::Damaged("the log is gone"));
    }
    match logs.iter().all(|number| *number == 1) {
        true => Ok(None),
        false => Err(Error::Damaged("no log begins with a whole snapshot")),
    }
}

/// The state of a log; `None` if its snapshot is invalid.
fn read(medium: &Medium, number: u64) -> Result<Option<StoredState>, Error> {
    // A log has its full length before it has its name.
    let region = match medium.open_read_only(&name(number)) {
        Ok(region) if region.bytes() == LOG_BYTES => region,
        Ok(_) | Err(MediaError::Length) => return Err(Error::Damaged("a log has not the length of one")),
        Err(MediaError::Os(errno)) if NO_FILE.map(Errno::raw_os_error).contains(&errno) => {
            return Err(Error::Damaged("what has the name of a log is no file"));
        }
        Err(error) => return Err(error.into()),
    };
    let mut frames = scan(&region, 0, salt(number), FIRST, LOG_BYTES);
    let Some(first) = frames.next().transpose()? else {
        let mut header = [0; FRAME_ALIGN];
        region.read(FIRST.position, &mut header)?;
        // Bytes that were never written are zero.
        if Envelope::decode(&header).is_err_and(|why| matches!(why, DecodeError::Version(1..))) {
            return Err(OTHER_VERSION);
        }
        check_end(&region, number, FIRST, 1)?;
        return Ok(None);
    };
    let mut kept = read_snapshot(&first.bytes)?;
    for frame in frames.by_ref() {
        let frame = frame?;
        let (kind, _, payload) = ClusterFrameHead::split(&frame.bytes).map_err(of_decoding)?;
        match kind {
            ClusterFrame::Pad => continue,
            ClusterFrame::Snapshot => return Err(Error::Damaged("a second snapshot in one log")),
            ClusterFrame::Record => {}
        }
        let record = take_record(&mut &payload[..]).map_err(of_decoding)?;
        let refused = kept.view.refused_by(&record.change);
        let done =
            kept.view.apply(&record.change).map_err(|_| Error::Damaged("a change that does not fit"))?;
        if (done.number, kept.view.epoch, refused) != (record.number, record.epoch, record.refused) {
            return Err(Error::Damaged("a change out of order"));
        }
        kept.history.push_back(record);
        if kept.history.len() > HISTORY_MAX {
            kept.history.pop_front();
        }
    }
    check_end(&region, number, frames.place(), BATCH_MAX as u64)?;
    Ok(Some(kept))
}

/// Checks that the log really ends at an invalid frame. A valid frame that is `apart` or more frames later was written
/// after the frame here was durable, so the log is damaged.
fn check_end(region: &Region, number: u64, end: RingPosition, apart: u64) -> Result<(), Error> {
    let line = FRAME_ALIGN as u64;
    let mut bytes = [0; PIECE_BYTES];
    for start in (end.position + line..LOG_BYTES).step_by(PIECE_BYTES) {
        let piece = &mut bytes[..PIECE_BYTES.min((LOG_BYTES - start) as usize)];
        region.read(start, piece)?;
        for (index, header) in piece.chunks(FRAME_ALIGN).enumerate() {
            let Ok(Envelope { sequence, .. }) = Envelope::decode(header) else { continue };
            let position = start + index as u64 * line;
            // A frame has at least one line.
            let later = apart..=(position - end.position) / line;
            let place = RingPosition { position, sequence };
            if later.contains(&sequence.get().saturating_sub(end.sequence.get()))
                && scan(region, 0, salt(number), place, LOG_BYTES).next().transpose()?.is_some()
            {
                return Err(Error::Damaged("a record was lost that others followed"));
            }
        }
    }
    Ok(())
}

fn of_decoding(error: DecodeError) -> Error {
    match error {
        DecodeError::Version(_) => OTHER_VERSION,
        error => Error::Message(error),
    }
}

fn read_snapshot(frame: &[u8]) -> Result<StoredState, Error> {
    let (kind, head, payload) = ClusterFrameHead::split(frame).map_err(of_decoding)?;
    if kind != ClusterFrame::Snapshot {
        return Err(Error::Damaged("a log that does not begin with a snapshot"));
    }
    let view_bytes = payload.len().checked_sub(head.records.get() as usize);
    let (view, mut records) = payload.split_at(view_bytes.ok_or(Error::Damaged("a snapshot of no view"))?);
    let view = decode_view(view).map_err(Error::Message)?;
    let mut history = VecDeque::new();
    while !records.is_empty() {
        history.push_back(take_record(&mut records).map_err(of_decoding)?);
    }
    Ok(StoredState { view, history })
}
