//! A client of the embedded manager. It connects when necessary, also again, and reports when the outcome of a change
//! is unknown.

use crate::change::{Change, Done, Party, Record};
use crate::error::Error;
use crate::line::{ManagerConnection, Place};
use crate::manager::Manager;
use crate::view::View;
use crate::wire::{Reply, Request};
use format::cluster::{ClusterHead, HISTORY_COUNT_MAX};
use format::{BeatVersion, ChangeNumber};
use ipc::sync::Ordering;
use ipc::{Host, Lock, LongWord, Time, Word};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Limit of idle connections that are kept for the next call, in addition to the connection of the watcher.
pub(crate) const IDLE_MAX: usize = 2;

/// Pause before the first new attempt to connect; it doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(2);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// Limit of the wait for which one message of a watcher asks.
const WATCH_SLICE_MS: u32 = 5000;

/// Time for an answer to arrive, even for a caller that does not want to wait.
const ANSWER: Duration = Duration::from_secs(2);

/// A client of the manager at one place.
pub struct Remote {
    host: Arc<dyn Host>,
    place: Place,
    idle: Lock<Vec<ManagerConnection>>,
    next_id: LongWord,
    /// The cluster that has answered first; 0 before that.
    cluster: LongWord,
    /// The number of the newest view that the client has seen.
    newest: LongWord,
    /// Number of heartbeats that wait for their answer.
    beats: Word,
    /// Never woken: a word for pauses.
    never: Word,
}

impl Remote {
    /// A client of the manager that listens, or will listen, behind the socket at this path.
    pub fn new(host: Arc<dyn Host>, socket: &Path) -> Self {
        Self::at(host, Place::Socket(socket.to_owned()))
    }

    /// A client of the manager at this place.
    pub fn at(host: Arc<dyn Host>, place: Place) -> Self {
        Self {
            idle: Lock::new(host.clone(), Vec::new()),
            host,
            place,
            next_id: LongWord::new(1),
            cluster: LongWord::new(0),
            newest: LongWord::new(0),
            beats: Word::new(0),
            never: Word::new(0),
        }
    }

    /// One request and its answer. A request that does no harm twice is sent again until it is answered; another
    /// request is sent again only if it was not sent completely.
    fn call(&self, request: &Request, until: Time) -> Result<Reply, Error> {
        self.call_by(ConnectionChoice::Idle, request, until)
    }

    fn call_by(&self, choice: ConnectionChoice, request: &Request, until: Time) -> Result<Reply, Error> {
        let repeats = !matches!(request, Request::Propose(_));
        let mut pause = PAUSE_MIN;
        loop {
            match self.attempt(choice, request, until) {
                Ok(Reply::Failed) => return Err(Error::Failed),
                Ok(Reply::Refused(refusal)) => return Err(refusal.into()),
                Ok(reply) => return Ok(reply),
                Err(Error::Unknown) if !repeats => return Err(Error::Unknown),
                Err(Error::Unknown | Error::Unreachable) => {}
                Err(error) => return Err(error),
            }
            let now = self.host.now();
            if now.after(pause) >= until {
                return Err(Error::Unreachable);
            }
            let _ = self.host.wait(&self.never, 0, Some(now.after(pause)));
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    fn attempt(&self, choice: ConnectionChoice, request: &Request, until: Time) -> Result<Reply, Error> {
        let idle = match choice {
            ConnectionChoice::Idle => self.idle.lock().pop(),
            ConnectionChoice::New => None,
        };
        let mut line = match idle.filter(|line| !line.is_over()) {
            Some(line) => line,
            None => ManagerConnection::connect(self.host.clone(), &self.place, until)?,
        };
        // Relaxed: the number only has to be different each time.
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        // Relaxed, like its store below: the number is independent of other memory.
        let known = self.cluster.load(Ordering::Relaxed);
        let (kind, body) = request.encode();
        line.send(&ClusterHead::encode(kind, id, known, &body), until).map_err(|_| Error::Unreachable)?;
        let first = line.first_byte(until).ok().flatten().ok_or(Error::Unknown)?;
        let (head, kind, body) = line.receive(first, until).map_err(|_| Error::Unknown)?;
        let cluster = head.cluster.get();
        if known != 0 && known != cluster {
            return Err(Error::OtherCluster(cluster));
        }
        if head.id.get() != id {
            return Err(Error::Unknown);
        }
        let reply = Reply::decode(kind, &body).map_err(Error::Message)?;
        self.cluster.store(cluster, Ordering::Relaxed);
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_MAX {
            idle.push(line);
        }
        Ok(reply)
    }

    /// Notes a view: a later call accepts nothing older.
    fn saw(&self, number: ChangeNumber) {
        // Relaxed: the number is independent of other memory.
        let mut newest = self.newest.load(Ordering::Relaxed);
        while newest < number.get() {
            match self.newest.compare_exchange(newest, number.get(), Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return,
                Err(present) => newest = present,
            }
        }
    }
}

/// The choice of the connection for a request.
#[derive(Clone, Copy)]
enum ConnectionChoice {
    /// An idle one, if there is any.
    Idle,
    /// A new one, because idle ones may be dead without an error.
    New,
}

/// An answer of the wrong kind.
const OTHER: Error = Error::Message(format::DecodeError::Kind);

impl Manager for Remote {
    fn watch(&self, after: ChangeNumber, until: Time) -> Result<Arc<View>, Error> {
        let before = self.newest.load(Ordering::Relaxed);
        loop {
            let left = until.since(self.host.now()).as_millis();
            let wait_ms = u32::try_from(left).unwrap_or(u32::MAX).min(WATCH_SLICE_MS);
            let answered = until.after(ANSWER);
            match self.call(&Request::Watch { after, wait_ms }, answered)? {
                Reply::View(view) => {
                    if view.number.get() < before {
                        return Err(Error::Damaged("the manager has lost changes"));
                    }
                    self.saw(view.number);
                    if view.number > after || self.host.now() >= until {
                        return Ok(Arc::new(view));
                    }
                }
                _ => return Err(OTHER),
            }
        }
    }

    fn propose(&self, change: &Change, until: Time) -> Result<Done, Error> {
        match self.call(&Request::Propose(change.clone()), until)? {
            Reply::Done(done) => {
                self.saw(done.number);
                Ok(done)
            }
            _ => Err(OTHER),
        }
    }

    fn beat(&self, party: Party, until: Time) -> Result<BeatVersion, Error> {
        // Relaxed, both: the number is independent of other memory.
        let unanswered = self.beats.fetch_add(1, Ordering::Relaxed);
        // The next heartbeat comes L/3 after this one; if this one has no answer by then, its connection was silent for
        // that time.
        let choice = if unanswered == 0 { ConnectionChoice::Idle } else { ConnectionChoice::New };
        let answer = self.call_by(choice, &Request::Beat(party), until);
        self.beats.fetch_add(u32::MAX, Ordering::Relaxed);
        match answer? {
            Reply::Beaten(beat) => Ok(beat),
            _ => Err(OTHER),
        }
    }

    fn beat_of(&self, party: Party, until: Time) -> Result<BeatVersion, Error> {
        match self.call(&Request::BeatOf(party), until)? {
            Reply::Beaten(beat) => Ok(beat),
            _ => Err(OTHER),
        }
    }

    fn history(&self, from: ChangeNumber, count: u32, until: Time) -> Result<Vec<Record>, Error> {
        let count = count.min(HISTORY_COUNT_MAX);
        match self.call(&Request::History { from, count }, until.max(self.host.now().after(ANSWER)))? {
            Reply::Records(records) => Ok(records),
            _ => Err(OTHER),
        }
    }
}
