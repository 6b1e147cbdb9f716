//! The copies of this pool on other nodes, as the head knows them: the positions up to which each was sent the streams,
//! has synced them, and has them in its tree (Assise §3.2.1, §3.3; rules in `docs/replication.md`).
//!
//! A thread that waits for a copy drives it: it sends the missing records; then one of the waiting threads receives the
//! copy's messages and the others sleep until it has. A message is a position, and positions only grow, so the order in
//! which threads process messages makes no difference.
//!
//! Guarantees: a copy counts from [`Copies::add`](crate::counted_copies::Copies::add) until
//! [`Copies::remove`](crate::counted_copies::Copies::remove), even when its connection ends. Its positions are those
//! that it has reported itself, after it synced the data.
//!
//! Locks: of a sender or of a connection, then of positions; the state's may be held when positions are locked, and never the other way
//! round. None is held across a wait.

pub(crate) mod fetching;

pub use crate::copy_positions::CopyState;
use crate::copy_positions::{CopiedLog, Positions};
use crate::error::Error;
use crate::ledger::{LEDGER_FILE, place_of, position_of};
use area::LedgerPlace;
use format::mirror::LogEnds;
use format::superblock::OWNER_DAEMON;
use format::{Incarnation, LogUid, NodeId, Sequence};
use ipc::host::{Host, Time};
use ipc::lock::Lock;
use ipc::sync::{Ordering, Word};
use ipc::{Digested, EventCounter};
use mirror::ledger::LedgerPosition;
use mirror::logs::{BEGINNING, LogFile, RING_START};
use mirror::{CopyEnds, CopyReport, LogPush, Sender};
use pmem::Region;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use transport::{Connection, Event};

/// Only messages that are there now.
const NOW: Time = Time::from_ns(0);

/// How long the thread in the background listens at once.
const TURN: Duration = Duration::from_millis(1);

/// One copy.
pub(crate) struct Copy {
    pub node: NodeId,
    host: Arc<dyn Host>,
    /// None: there is no connection.
    sender: Lock<Option<Sender>>,
    connection: Lock<Option<Connection>>,
    /// Whose turn it is to take what the copy says.
    reading: Lock<()>,
    positions: Lock<Positions>,
    /// Counts when a position moved, when the connection changed, and when the copy does not count any more: for the
    /// callers that wait for the copy.
    moved: Arc<EventCounter>,
    /// The same without the positions: for the thread in the background, which fsyncs do not wake.
    changed: Arc<EventCounter>,
    /// 1 when it does not.
    removed: Word,
    /// 1 while it lacks records that entries name which are to be sent: nothing is sent but those.
    lacks_records: Word,
    /// The logs that these are of, and up to where.
    lacking: Lock<Vec<(LogUid, Sequence)>>,
}

/// A log that is to be sent.
#[derive(Clone)]
pub(crate) struct LogToSend {
    pub log: LogUid,
    pub incarnation: Incarnation,
    pub file: Arc<LogFile>,
    /// The record before the first that the file held, if it is known.
    pub before: Option<Sequence>,
    pub owner: u32,
    pub up_to: Sequence,
    /// How far the own tree contains it.
    pub digested: Sequence,
}

/// The ledger that is to be sent.
#[derive(Clone)]
pub(crate) struct LedgerToSend {
    pub region: Region,
    pub end: LedgerPosition,
}

/// How much a copy has of a log, and of the ledger that gave it its rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Has {
    /// All that was asked for.
    All,
    /// All that there is: the log ends here.
    Until(Sequence),
    /// Not all.
    Less,
}

/// The result of listening to a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listened {
    Nothing,
    /// It has synced something.
    Synced,
    /// Its tree is further.
    Executed,
    /// It gave bytes that it was asked for.
    Fetched,
}

impl Copy {
    /// A copy that has said what it has, as [`Sender::greet`] heard it.
    pub fn new(host: Arc<dyn Host>, sender: Sender, ends: &CopyEnds) -> Arc<Self> {
        let node = sender.connection().node();
        Self::of(host, node, Some(sender), ends)
    }

    fn of(host: Arc<dyn Host>, node: NodeId, sender: Option<Sender>, ends: &CopyEnds) -> Arc<Self> {
        let connection = sender.as_ref().map(|sender| sender.connection().clone());
        let positions = Positions {
            ledger_sent: ends.end.sequence,
            ledger: ends.end.sequence,
            contained: ends.contained,
            logs: BTreeMap::new(),
            executed_bytes: 0,
            moved_at: host.now(),
            lost: false,
            level: false,
            fetches: BTreeMap::new(),
        };
        Arc::new(Self {
            node,
            sender: Lock::new(host.clone(), sender),
            connection: Lock::new(host.clone(), connection),
            reading: Lock::new(host.clone(), ()),
            positions: Lock::new(host.clone(), positions),
            moved: EventCounter::new(None),
            changed: EventCounter::new(None),
            removed: Word::new(0),
            lacks_records: Word::new(0),
            lacking: Lock::new(host.clone(), Vec::new()),
            host,
        })
    }

    /// A copy that is about to have this, and to which there is no connection yet.
    pub fn to_come(host: Arc<dyn Host>, node: NodeId, ends: &CopyEnds) -> Arc<Self> {
        Self::of(host, node, None, ends)
    }

    /// The copy has a file of a log that goes on.
    pub fn resume_log(&self, ends: &LogEnds) {
        let end = Digested { sequence: ends.end, position: ends.end_position.get() };
        let executed = Digested { sequence: ends.executed, position: ends.executed_position.get() };
        if let Some(sender) = self.sender.lock().as_mut() {
            sender.resume_log(ends.log, ends.incarnation, end);
        }
        let log = CopiedLog::new(ends.incarnation, end, executed);
        self.positions.lock().logs.insert(ends.log, log);
    }

    /// A log is over, digested to its end.
    pub fn forget_log(&self, log: LogUid) {
        if let Some(sender) = self.sender.lock().as_mut() {
            sender.forget_log(log);
        }
        self.positions.lock().logs.remove(&log);
    }

    /// Sends all of the ledger, then of a log, at most about so many bytes, and asks for both. Bytes that the connection does
    /// not accept now are sent by the next push.
    ///
    /// # Errors
    /// `Media`, `File`: the own pool cannot be read. A failure of the connection ends the connection, and is no error here.
    pub fn push(
        &self,
        log: Option<&LogToSend>,
        ledger: &LedgerToSend,
        bytes_max: usize,
    ) -> Result<(), Error> {
        // Acquire: pairs with the Release of `set_lacks_nothing`.
        if self.lacks_records.load(Ordering::Acquire) == 0 {
            return self.push_both(log, Some(ledger), bytes_max);
        }
        Ok(())
    }

    /// Sends records of a log that is digested to there, before the entries that name them.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn push_digested(&self, log: &LogToSend, bytes_max: usize) -> Result<(), Error> {
        self.push_both(Some(log), None, bytes_max)
    }

    /// It begins to count: up to where each log is digested. Nothing else is sent until that is there.
    pub fn set_lacking(&self, digested: Vec<(LogUid, Sequence)>) {
        *self.lacking.lock() = digested;
        // Release: pairs with the Acquire of `push`.
        self.lacks_records.store(1, Ordering::Release);
    }

    /// The positions that were passed to [`Self::set_lacking`].
    pub fn lacking(&self) -> Vec<(LogUid, Sequence)> {
        self.lacking.lock().clone()
    }

    /// It has that.
    pub fn set_lacks_nothing(&self) {
        // Release: pairs with the Acquire of `push`.
        self.lacks_records.store(0, Ordering::Release);
    }

    fn push_both(
        &self,
        log: Option<&LogToSend>,
        ledger: Option<&LedgerToSend>,
        bytes_max: usize,
    ) -> Result<(), Error> {
        let pushed = {
            let mut guard = self.sender.lock();
            let Some(sender) = guard.as_mut() else { return Ok(()) };
            self.push_by(sender, log, ledger, bytes_max)
        };
        match pushed {
            Ok(()) => {}
            // The copy is not to blame, and keeps its connection.
            Err(mirror::Error::Media(error)) => return Err(error.into()),
            Err(mirror::Error::Message(error)) => return Err(Error::File(LEDGER_FILE.to_owned(), error)),
            Err(error) => self.lose(&error),
        }
        Ok(())
    }

    fn push_by(
        &self,
        sender: &mut Sender,
        log: Option<&LogToSend>,
        ledger: Option<&LedgerToSend>,
        bytes_max: usize,
    ) -> Result<(), mirror::Error> {
        if !sender.pump()? {
            return Ok(());
        }
        // Rights before the records that rest on them, as they were written here. An entry that rests on records is written
        // when the copies have those.
        if let Some(ledger) = ledger {
            sender.push_ledger(&ledger.region, &ledger.end)?;
        }
        if let Some(item) = log {
            self.push_log(sender, item, bytes_max)?;
        }
        {
            let mut positions = self.positions.lock();
            if !positions.waits() && !positions.lost {
                positions.moved_at = self.host.now();
            }
            positions.ledger_sent = sender.ledger().sequence;
            let sent = log.and_then(|item| Some((item.log, sender.sent(item.log, item.incarnation)?)));
            if let Some((log, sent)) = sent
                && let Some(copied) = positions.logs.get_mut(&log)
            {
                copied.note_sent(sent);
            }
        }
        sender.ask();
        sender.pump()?;
        Ok(())
    }

    fn push_log(&self, sender: &mut Sender, item: &LogToSend, bytes_max: usize) -> Result<(), mirror::Error> {
        let key = (item.log, item.incarnation);
        if sender.sent(key.0, key.1).is_none() {
            let before = item.before.ok_or(mirror::Error::Broken("a log of which the copy has no file"))?;
            self.open_log(sender, key, before, (&item.file, item.owner));
        }
        let executed = self.positions.lock().logs.get(&item.log).map(|log| log.executed);
        let executed = executed.ok_or(mirror::Error::Broken("a log that was not begun"))?;
        let places = (executed, item.digested);
        let pushed = sender.push_log((item.log, &item.file), item.up_to, places, bytes_max)?;
        if let Some(log) = self.positions.lock().logs.get_mut(&item.log) {
            log.ends = match pushed {
                LogPush::Ends(at) => Some((at.sequence, item.up_to)),
                LogPush::Done(_) | LogPush::More(_) => None,
            };
        }
        Ok(())
    }

    /// Has the copy make the file of a log that is not begun yet, so that its first fsync need not.
    pub fn prepare_log(&self, log: LogUid, file: &LogFile) {
        let prepared = {
            let mut guard = self.sender.lock();
            let Some(sender) = guard.as_mut() else { return };
            self.open_log(sender, (log, Incarnation::new(1)), BEGINNING.sequence, (file, OWNER_DAEMON));
            sender.pump()
        };
        if let Err(error) = prepared {
            self.lose(&error);
        }
    }

    /// Has the copy make a log's file, if it has none.
    fn open_log(
        &self,
        sender: &mut Sender,
        (log, incarnation): (LogUid, Incarnation),
        before: Sequence,
        (file, owner): (&LogFile, u32),
    ) {
        if sender.sent(log, incarnation).is_some() {
            return;
        }
        sender.open_log((log, incarnation), before, file.region().bytes(), owner);
        let begin = Digested { sequence: before, position: RING_START };
        let mut positions = self.positions.lock();
        let synced = positions.logs.get(&log).map_or(before, |log| log.synced.max(before));
        let mut copied = CopiedLog::new(incarnation, begin, begin);
        copied.synced = synced;
        positions.logs.insert(log, copied);
    }

    /// Whether the copy has a log up to a record, and the ledger up to an entry.
    pub fn has(&self, log: LogUid, up_to: Sequence, entry: Sequence) -> Has {
        let positions = self.positions.lock();
        if positions.ledger < entry {
            return Has::Less;
        }
        match positions.logs.get(&log) {
            Some(log) if log.synced >= up_to => Has::All,
            Some(log) if log.ends.is_some_and(|(at, asked)| asked >= up_to && log.synced >= at) => {
                Has::Until(log.synced)
            }
            _ if up_to == Sequence::new(0) => Has::All,
            _ => Has::Less,
        }
    }

    /// Whether the copy has the ledger up to an entry.
    pub fn has_ledger(&self, entry: Sequence) -> bool {
        self.positions.lock().ledger >= entry
    }

    /// The last record of a log that the copy has together with the ledger up to an entry; none if it lacks that.
    pub fn synced(&self, log: LogUid, entry: Sequence) -> Option<Sequence> {
        let positions = self.positions.lock();
        let synced = positions.logs.get(&log).map_or(Sequence::new(0), |log| log.synced);
        (positions.ledger >= entry).then_some(synced)
    }

    /// How far the copy's tree contains a log's file; `None` if it has nothing of that file.
    pub fn executed(&self, log: LogUid, incarnation: Incarnation) -> Option<Digested> {
        let positions = self.positions.lock();
        let log = positions.logs.get(&log).filter(|log| log.incarnation == incarnation)?;
        Some(log.executed)
    }

    /// The position of the ledger that its tree contains.
    pub fn contained(&self) -> LedgerPlace {
        place_of(&self.positions.lock().contained)
    }

    /// All that counts when it is added is there.
    pub fn set_level(&self) {
        let mut positions = self.positions.lock();
        positions.level = true;
        positions.hear(self.host.now());
    }

    /// Waits until then for what the copy says, or for another thread that takes it; the connection is driven meanwhile.
    /// `seen` is what [`Self::look`] gave before the caller looked at the positions.
    pub fn listen(&self, seen: u32, until: Time) -> Listened {
        self.try_listen(seen, until).unwrap_or_else(|| {
            self.moved.wait(&*self.host, seen, Some(until));
            Listened::Nothing
        })
    }

    /// [`Self::listen`]; `None` at once if another thread listens, or if there is no connection.
    fn try_listen(&self, seen: u32, until: Time) -> Option<Listened> {
        let reading = self.reading.try_lock()?;
        let connection = self.connection.lock().clone()?;
        // A position may have moved between the look and the turn.
        if self.moved.value() != seen {
            drop(reading);
            // Another thread may have found the turn taken, and sleeps until it is over.
            self.moved.notify(&*self.host);
            return Some(Listened::Nothing);
        }
        let heard = match connection.take(Some(until)) {
            Ok(Event::Message(message)) => Sender::hear(&message),
            Ok(Event::Immediate(_)) => Err(mirror::Error::Broken("an immediate")),
            Ok(Event::Ended(why)) => Err(transport::Error::Ended(why).into()),
            Err(transport::Error::TimedOut | transport::Error::Interrupted) => {
                drop(reading);
                // Another thread may sleep until this turn is over.
                self.moved.notify(&*self.host);
                return Some(Listened::Nothing);
            }
            Err(error) => Err(error.into()),
        };
        let heard = heard.and_then(|heard| self.take_in(heard));
        drop(reading);
        Some(match heard {
            Ok(listened) => {
                self.moved.notify(&*self.host);
                listened
            }
            Err(error) => {
                self.lose_if(&connection, &error);
                Listened::Nothing
            }
        })
    }

    /// [`Self::listen`] for the thread that feeds the copy in the background: calls that wait for the copy take what it
    /// says themselves, and neither wake this thread nor wait for it.
    pub fn listen_behind(&self, until: Time) -> Listened {
        let changed = self.changed.value();
        let waits = || self.positions.lock().waits();
        if waits() {
            let heard = self.try_listen(self.look(), self.host.now().after(TURN));
            if let Some(heard) = heard {
                return heard;
            }
        }
        self.changed.wait(&*self.host, changed, Some(until));
        self.try_listen(self.look(), NOW).unwrap_or(Listened::Nothing)
    }

    /// All threads that wait look again.
    pub fn wake(&self) {
        self.announce();
    }

    /// To be read before positions are looked at, for [`Self::listen`].
    pub fn look(&self) -> u32 {
        self.moved.value()
    }

    fn announce(&self) {
        self.moved.notify(&*self.host);
        self.changed.notify(&*self.host);
    }

    fn take_in(&self, heard: CopyReport) -> Result<Listened, mirror::Error> {
        let mut positions = self.positions.lock();
        positions.hear(self.host.now());
        match heard {
            CopyReport::Synced(marks) => {
                marks.iter().try_for_each(|mark| positions.take_synced(mark))?;
                Ok(Listened::Synced)
            }
            CopyReport::Executed(ledger, logs) => {
                positions.take_executed(ledger, &logs)?;
                Ok(Listened::Executed)
            }
            CopyReport::Fetched(fetched) => {
                positions.take_fetched(fetched)?;
                Ok(Listened::Fetched)
            }
        }
    }

    /// The connection is over. The copy counts as before.
    fn lose(&self, error: &mirror::Error) {
        let connection = self.connection.lock().clone();
        if let Some(connection) = connection {
            self.lose_if(&connection, error);
        }
    }

    /// The same, if it is this one still.
    fn lose_if(&self, connection: &Connection, _error: &mirror::Error) {
        {
            let mut current = self.connection.lock();
            let same = current.as_ref().is_some_and(|current| current.is_same(connection));
            if !same {
                return;
            }
            self.positions.lock().lose(self.host.now());
            *current = None;
        }
        self.sender.lock().take();
        connection.close();
        self.announce();
    }

    /// Another connection takes the place of the one it had.
    pub fn reconnect(&self, from: &Copy) {
        let former = self.connection.lock().take();
        if let Some(former) = former {
            former.close();
        }
        *self.sender.lock() = from.sender.lock().take();
        {
            let mut theirs = from.positions.lock();
            let mut ours = self.positions.lock();
            ours.ledger_sent = theirs.ledger_sent;
            ours.ledger = theirs.ledger;
            ours.contained = theirs.contained;
            ours.logs = std::mem::take(&mut theirs.logs);
            ours.fetches.clear();
            // One that counted before kept programs waiting meanwhile.
            if !ours.level {
                ours.hear(self.host.now());
            }
        }
        *self.connection.lock() = from.connection.lock().take();
        if self.is_removed() {
            self.remove();
        }
        self.announce();
    }

    /// It does not count any more.
    pub fn remove(&self) {
        // Release: pairs with the Acquire of `is_removed`.
        self.removed.store(1, Ordering::Release);
        let connection = self.connection.lock().take();
        self.sender.lock().take();
        // Nothing is asked without a sender.
        self.positions.lock().fetches.clear();
        if let Some(connection) = connection {
            connection.close();
        }
        self.announce();
    }

    /// Whether it counts no more.
    pub fn is_removed(&self) -> bool {
        // Acquire: pairs with the Release of `remove`.
        self.removed.load(Ordering::Acquire) != 0
    }

    /// Whether there is a connection.
    pub fn is_connected(&self) -> bool {
        self.connection.lock().is_some()
    }

    /// How it is.
    pub fn state(&self) -> CopyState {
        let connected = self.is_connected();
        let positions = self.positions.lock();
        let behind = |log: &CopiedLog| {
            let from = Digested { sequence: log.synced, position: log.executed.position };
            log.bytes_between(from, log.sent)
        };
        let stalled = (positions.waits() || positions.lost || !connected)
            .then(|| self.host.now().since(positions.moved_at));
        CopyState {
            node: self.node,
            connected,
            level: positions.level,
            stalled,
            behind_bytes: positions.logs.values().map(behind).sum(),
            executed_bytes: positions.executed_bytes,
            ledger: positions.ledger,
            executed: positions.contained.sequence,
        }
    }
}

/// All of a ledger.
pub(crate) fn ledger_to_send(ledger: &crate::ledger::Ledger) -> LedgerToSend {
    LedgerToSend { region: ledger.region().clone(), end: position_of(&ledger.place()) }
}
