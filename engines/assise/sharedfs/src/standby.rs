//! A copy that does not lead: it takes what the head sends, makes it durable, and executes the ledger (Assise §3.2.1, digest
//! on replicas; §3.4).
//!
//! A standby holds the pool's lock, begins no life and serves no session. [`Standby::follow`] receives from one head;
//! another thread executes the entries that are synced, with the records that they name, by the same `replay` that the
//! head digests with. [`Standby::lead`] ends both, and makes a daemon: for it, a standby's pool is a pool whose daemon
//! has just died.
//!
//! Guarantees: the head is told that data is synced only after it is; only synced entries are executed. Of several
//! heads, only the one with the newest version of the subtree is accepted: once its greeting is answered, nothing that
//! came over an earlier link is written any more. A copy never skips an entry: if it cannot execute one, it stops, and
//! reports the reason.
//!
//! Locks: the import's, then the contents', the receiver's, the link's. None is held across a wait for a message.

mod comparing;
mod contents;
mod joining;
mod leading;
mod space;
mod touching;

use self::contents::{Contents, mark_of, open_contents, remove_files};
use self::joining::Joining;
use self::touching::Untouched;
use crate::config::Config;
use crate::daemon::lock_pool;
use crate::error::Error;
use crate::ledger::position_of;
use crate::pool_space::{Holding, PoolSpace};
use crate::replay::copy::{LocalCopy, contain_changes};
use crate::replay::script::Script;
use format::mirror::{LogMark, MirrorMessage, MirrorRefusal};
use format::{Epoch, LogUid, NodeId, Sequence};
use ipc::host::{Host, WAKE_ALL};
use ipc::lock::Lock;
use ipc::sync::{LongWord, Ordering, Word};
use mirror::ledger::LedgerPosition;
use mirror::{
    HeadTerms, Receiver, Stepped, asks_for_records, is_compare, refuse, say_executed, say_progress,
    take_message,
};
use pmem::{Medium, PoolLock};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use transport::{Connection, Event};

mod asked;

pub use asked::StandbyState;

/// Entries that are executed before the head is told how far the copy is.
const ENTRIES_AT_ONCE: usize = 64;
/// Records of a batch, and their bytes.
const STEP_RECORDS: usize = 1024;
const STEP_BYTES: usize = 4 << 20;
/// After so long without new entries, a copy commits its tree.
const IDLE: Duration = Duration::from_millis(20);
/// How long a head may take to greet, or to take the answer.
const GREETING: Duration = Duration::from_secs(2);
/// How long one wait for a message is.
const LOOK: Duration = Duration::from_millis(100);

/// The term in which a node leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// The node.
    pub node: NodeId,
    /// Epoch of the cluster.
    pub epoch: Epoch,
    /// Version of the subtree in whose view it leads: it grows whenever another node may lead.
    pub version: u64,
}

/// The receiving side.
struct Receiving {
    /// None once the standby leads or has stopped.
    receiver: Option<Receiver>,
    /// The number of the link that counts.
    link: u64,
}

/// The connection to the head.
#[derive(Default)]
struct HeadLink {
    connection: Option<Connection>,
    /// The newest version of the subtree that is known.
    version: u64,
}

/// A standby; see the module. Clones are the same standby.
#[derive(Clone)]
pub struct Standby(Arc<Inner>);

struct Inner {
    host: Arc<dyn Host>,
    medium: Medium,
    config: Config,
    /// The same with short batches, so that their ends are never waited for long.
    steps: Config,
    pool: Lock<Option<PoolLock>>,
    contents: Lock<Option<Contents>>,
    /// How full the contents' area is, and at which commit, for status reports. Its lock comes after that of the contents.
    usage: Lock<asked::NotedUsage>,
    /// The tree of a head, on its way into this pool. Meanwhile there are neither contents nor a receiver.
    import: Lock<Option<Joining>>,
    /// The node whose tree may replace the pool's own where there is no room for both.
    replaceable_by: Lock<Option<NodeId>>,
    /// 1 if the pool gave up its own tree and has not got that of a head since.
    given_up: Word,
    receiving: Lock<Receiving>,
    head: Lock<HeadLink>,
    /// The connection over which the tree is compared with that of a head.
    comparing: Lock<Option<Connection>>,
    failure: Lock<Option<String>>,
    /// How the pool holds space. The lock comes after that of the contents.
    space: PoolSpace,
    holding: Lock<Holding>,
    /// Blocks of the tree's last commit that have space; see [`area::Area::provided_blocks`].
    provided: Arc<LongWord>,
    /// 1 once it refused a head for lack of space, until there is some.
    left_for_space: Word,
    untouched: Untouched,
    /// The last entry that is synced.
    synced: LongWord,
    /// The last entry that was executed, and the life of the chain there.
    executed: LongWord,
    life: Word,
    /// Grows when there is more to execute, and when the standby ends.
    arrived: Word,
    /// 1 when it ends.
    ending: Word,
    /// Number of threads that execute.
    threads: Word,
}

impl Standby {
    /// Takes the pool, and executes its ledger to the end. No thread runs yet.
    ///
    /// # Errors
    /// `Settings`; `Media` (`Locked`: a daemon has it); `Area`; `File`.
    pub fn open(host: Arc<dyn Host>, medium: &Medium, config: Config) -> Result<Self, Error> {
        config.check()?;
        let medium = medium.guarded()?;
        let pool = lock_pool(&*host, &medium, &config)?;
        medium.open_held()?;
        let (contents, receiver) = open_contents(&*host, &medium, &config)?;
        let synced = LongWord::new(receiver.synced().get());
        let place = contents.copy.ledger.place();
        let receiving = Receiving { receiver: None, link: 0 };
        let standby = Self(Arc::new(Inner {
            pool: Lock::new(host.clone(), Some(pool)),
            usage: Lock::new(host.clone(), Some((contents.area.usage(), contents.area.commit()))),
            import: Lock::new(host.clone(), None),
            replaceable_by: Lock::new(host.clone(), None),
            given_up: Word::new(contents.area.is_given_up().into()),
            contents: Lock::new(host.clone(), None),
            receiving: Lock::new(host.clone(), receiving),
            head: Lock::new(host.clone(), HeadLink::default()),
            comparing: Lock::new(host.clone(), None),
            failure: Lock::new(host.clone(), None),
            space: PoolSpace::of(&medium, &config),
            holding: Lock::new(host.clone(), Holding::default()),
            provided: Arc::default(),
            left_for_space: Word::new(0),
            untouched: Untouched::new(Lock::new(host.clone(), Vec::new())),
            synced,
            executed: LongWord::new(place.sequence.get()),
            life: Word::new(place.life.get()),
            arrived: Word::new(0),
            ending: Word::new(0),
            threads: Word::new(0),
            medium,
            steps: Config {
                batch_records: config.batch_records.min(STEP_RECORDS),
                batch_bytes: config.batch_bytes.min(STEP_BYTES),
                ..config
            },
            config,
            host,
        }));
        standby.0.begin_to_receive(contents, receiver);
        Ok(standby)
    }

    /// Starts the threads that execute what arrives, and that touch the memory of new logs.
    ///
    /// # Errors
    /// `Ipc`.
    pub fn start(&self) -> Result<(), Error> {
        if self.0.touches() {
            self.spawn("touch", Inner::touch_all)?;
        }
        self.spawn("execute", Inner::execute_all)
    }

    /// Starts a thread for whose end [`Self::end_following`] waits.
    fn spawn(&self, name: &str, run: fn(&Inner)) -> Result<(), Error> {
        let inner = self.0.clone();
        inner.threads.fetch_add(1, Ordering::Relaxed);
        let body = move || {
            run(&inner);
            inner.thread_ended();
        };
        let spawned = self.0.host.spawn(name, Box::new(body));
        if spawned.is_err() {
            self.0.thread_ended();
        }
        spawned?;
        Ok(())
    }

    /// Serves a head over a connection that was accepted from it: receives from it until the connection ends or a later head
    /// comes, or compares this copy with its tree.
    ///
    /// # Errors
    /// `Copy`, with the reason. Receiving always ends with one.
    pub fn follow(&self, connection: &Connection) -> Result<(), Error> {
        let of_head = |error| Error::Copy(connection.node(), error);
        let close = |_: &mirror::Error| connection.close();
        let first = self.first_message(connection).inspect_err(close).map_err(of_head)?;
        if is_compare(&first) {
            // The head closes the connection when it has received everything.
            return self.0.compare(connection, &first).inspect_err(close).map_err(of_head);
        }
        let link = self.answer(connection, &first).inspect_err(close).map_err(of_head)?;
        loop {
            let until = self.0.host.now().after(LOOK);
            let stepped = self.receive(connection, link, until);
            if let Err(error) = stepped {
                connection.close();
                self.0.give_up_import(Some(link));
                return Err(of_head(error));
            }
        }
    }

    /// Answers the greeting of a head; returns the number of the link.
    ///
    /// # Errors
    /// `Refused`, `Connection`, `Message`, `Broken`, `Media`.
    pub fn greet(&self, connection: &Connection) -> Result<u64, mirror::Error> {
        self.answer(connection, &self.first_message(connection)?)
    }

    fn first_message(&self, connection: &Connection) -> Result<Vec<u8>, mirror::Error> {
        take_message(connection, self.0.host.now().after(GREETING))
    }

    fn answer(&self, connection: &Connection, first: &[u8]) -> Result<u64, mirror::Error> {
        let inner = &self.0;
        let until = inner.host.now().after(GREETING);
        let MirrorMessage::Hello(hello) = MirrorMessage::decode(first)? else {
            return Err(mirror::Error::Broken("a head says hello first"));
        };
        let (former, known, newer) = {
            let mut head = inner.head.lock();
            let known = head.version;
            let newer = hello.version.get() >= known;
            (newer.then(|| head.connection.take()).flatten(), known, newer)
        };
        // When this returns nothing of the former head arrives any more.
        if let Some(former) = former {
            former.close();
        }
        if newer {
            inner.receiving.lock().link += 1;
            inner.give_up_import(None);
        }
        let mut receiving = inner.receiving.lock();
        let Some(receiver) = receiving.receiver.as_mut() else {
            refuse(connection, MirrorRefusal::Closed, until)?;
            return Err(mirror::Error::Refused(MirrorRefusal::Closed));
        };
        if inner.refuses_for_space(receiver) {
            refuse(connection, MirrorRefusal::Space, until)?;
            return Err(mirror::Error::Refused(MirrorRefusal::Space));
        }
        receiver.greet(connection, &hello, &HeadTerms { version: known }, until)?;
        inner.announce(receiver);
        // A message that a thread has received over the former link, and has not written, is not written any more.
        receiving.link += 1;
        let mut head = inner.head.lock();
        // A fence that was set meanwhile found no link of this head to close: the head is rejected here.
        if hello.version.get() < head.version {
            return Err(mirror::Error::Refused(MirrorRefusal::Version));
        }
        head.version = hello.version.get();
        head.connection = Some(connection.clone());
        Ok(receiving.link)
    }

    /// Processes one message over a link, if one arrives before the deadline.
    ///
    /// # Errors
    /// As [`Self::greet`]: the link is over.
    pub fn receive(
        &self,
        connection: &Connection,
        link: u64,
        until: ipc::Time,
    ) -> Result<Stepped, mirror::Error> {
        let inner = &self.0;
        let came = match connection.take(Some(until)) {
            Ok(Event::Message(came)) => came,
            Ok(Event::Immediate(_)) => return Err(mirror::Error::Broken("an immediate")),
            Ok(Event::Ended(why)) => return Err(transport::Error::Ended(why).into()),
            Err(transport::Error::TimedOut | transport::Error::Interrupted) => return Ok(Stepped::Nothing),
            Err(error) => return Err(error.into()),
        };
        if mirror::is_of_import(&came) {
            return inner.take_import(connection, link, &came);
        }
        let mut receiving = inner.receiving.lock();
        if receiving.link != link {
            return Err(mirror::Error::Broken("a later head leads"));
        }
        let Some(receiver) = receiving.receiver.as_mut() else {
            return Err(mirror::Error::Refused(MirrorRefusal::Closed));
        };
        let stepped = if asks_for_records(&came) {
            receiver.answer_records(connection, &came).map(|()| Stepped::Taken)
        } else {
            receiver.take(&came, |answer| {
                connection.send(answer, None)?;
                Ok(())
            })
        };
        if let Ok(Stepped::Synced) = &stepped {
            inner.announce(receiver);
        }
        let new_parts = receiver.take_new_parts();
        drop(receiving);
        inner.touch_later(new_parts);
        let stepped = inner.refuse_for_space(stepped);
        if let Err(mirror::Error::Media(error)) = &stepped {
            inner.fail(&Error::Media(*error));
        }
        stepped
    }

    /// From now on heads of earlier versions of the subtree are refused. If one is linked, its link is closed when this
    /// returns.
    pub fn fence(&self, version: u64) {
        self.fence_but(version, NodeId::NONE);
    }

    /// The same, except that the link of the node that leads in the view of this version goes on.
    pub fn fence_but(&self, version: u64, leader: NodeId) {
        let former = {
            let mut head = self.0.head.lock();
            if version <= head.version {
                return;
            }
            head.version = version;
            head.connection.take_if(|linked| linked.node() != leader)
        };
        if let Some(former) = former {
            former.close();
            self.0.receiving.lock().link += 1;
        }
    }

    /// Why the standby stopped; `None` while it runs.
    pub fn failure(&self) -> Option<String> {
        self.0.failure.lock().clone()
    }

    /// Stops receiving and executing, for a reason that the caller found.
    pub fn give_up(&self, why: &Error) {
        self.0.fail(why);
    }

    /// Executes some entries that are synced, or, if there are none, commits the tree of the executed ones; false if
    /// there was nothing to do. For callers that run no thread for it.
    ///
    /// # Errors
    /// `Area`, `Media`, `File`, `Short`: it executes no more.
    pub fn execute(&self) -> Result<bool, Error> {
        let done = self.0.execute_some(true);
        if let Err(error) = &done {
            self.0.fail(error);
        }
        done
    }

    /// Gives up the pool: no head is followed any more, and the thread ends.
    pub fn stop(&self) {
        self.end_following();
        self.0.import.lock().take();
        self.0.contents.lock().take();
        self.0.pool.lock().take();
    }

    /// Ends the link and the thread; no head is accepted any more.
    fn end_following(&self) {
        {
            let mut receiving = self.0.receiving.lock();
            receiving.receiver.take();
            receiving.link += 1;
        }
        let former = self.0.head.lock().connection.take();
        let compared = self.0.comparing.lock().take();
        former.into_iter().chain(compared).for_each(|connection| connection.close());
        // Release: pairs with the Acquire of the thread.
        self.0.ending.store(1, Ordering::Release);
        self.0.wake();
        self.0.wake_toucher();
        loop {
            // Acquire: pairs with the Release of the thread's end.
            let running = self.0.threads.load(Ordering::Acquire);
            if running == 0 {
                return;
            }
            self.0.host.wait(&self.0.threads, running, None);
        }
    }
}

impl Inner {
    /// The contents and the receiver of a pool that was opened.
    fn begin_to_receive(&self, contents: Contents, mut receiver: Receiver) {
        self.watch_space(&contents, &mut receiver);
        *self.contents.lock() = Some(contents);
        self.receiving.lock().receiver = Some(receiver);
    }

    /// Tells the executing thread how far it may execute. Records of a log alone give it no work: the ledger's entries
    /// do.
    fn announce(&self, receiver: &Receiver) {
        let synced = receiver.synced().get();
        // AcqRel: Release pairs with the Acquire of the thread.
        if self.synced.swap(synced, Ordering::AcqRel) != synced {
            self.wake();
        }
    }

    fn wake(&self) {
        // Release: as above.
        self.arrived.fetch_add(1, Ordering::Release);
        self.host.wake(&self.arrived, WAKE_ALL);
    }

    fn fail(&self, error: &Error) {
        self.failure.lock().get_or_insert_with(|| error.to_string());
        // A copy that does nothing must not keep the head waiting.
        let link = self.head.lock().connection.take();
        self.receiving.lock().receiver.take();
        if let Some(link) = link {
            link.close();
        }
    }

    /// The thread that executes.
    fn execute_all(&self) {
        let mut idle = false;
        loop {
            // Acquire: pairs with the Release of `wake`.
            let seen = self.arrived.load(Ordering::Acquire);
            if self.ending.load(Ordering::Acquire) != 0 {
                break;
            }
            match self.execute_some(idle) {
                Ok(true) => drop(self.hold_step(false)),
                Ok(false) => {
                    if self.hold_step(idle) {
                        continue;
                    }
                    let until = self.host.now().after(if idle { LOOK } else { IDLE });
                    idle = self.host.wait(&self.arrived, seen, Some(until)) == ipc::Waited::TimedOut;
                }
                Err(error) if error.is_no_space() => {
                    self.leave_for_space();
                    // It is tried again.
                    self.hold_step(false);
                    self.host.wait(&self.arrived, seen, Some(self.host.now().after(LOOK)));
                }
                Err(error) => {
                    self.fail(&error);
                    break;
                }
            }
        }
    }

    fn thread_ended(&self) {
        // Release: pairs with the Acquire of the thread that waits for the end.
        self.threads.fetch_add(u32::MAX, Ordering::Release);
        self.host.wake(&self.threads, WAKE_ALL);
    }

    /// Executes some of the entries that are synced; if there are none and `contain` is set, commits the tree.
    fn execute_some(&self, contain: bool) -> Result<bool, Error> {
        let mut guard = self.contents.lock();
        let Some(contents) = guard.as_mut().filter(|contents| !contents.needs_tree) else { return Ok(false) };
        // Acquire: pairs with the Release of `announce`.
        let synced = Sequence::new(self.synced.load(Ordering::Acquire));
        if !self.has_lacking_records(contents) {
            return Ok(false);
        }
        let synced = contents.executable(synced, self.host.now());
        let mut moved = false;
        for _ in 0..ENTRIES_AT_ONCE {
            let Contents { area, copy, told, over, .. } = &mut *contents;
            let mut batch_done = |copy: &LocalCopy, log| self.report_batch(copy, log, told);
            let (more, files) = Script::new(area, copy, &self.steps).run_one(synced, &mut batch_done)?;
            over.extend(files);
            if !more {
                break;
            }
            moved = true;
        }
        let place = contents.copy.ledger.place();
        // Relaxed: only for status reports.
        self.executed.store(place.sequence.get(), Ordering::Relaxed);
        self.life.store(place.life.get(), Ordering::Relaxed);
        if !moved && contain && contents.copy.ledger.pending().next().is_some() {
            contain_changes(&mut contents.area, &mut contents.copy, 0)?;
            moved = true;
        }
        self.note_usage(Some(contents));
        self.note_provided(contents);
        if let Some((contained, marks)) = self.note_executed(contents)? {
            let link = self.head.lock().connection.clone();
            if let Some(link) = link {
                // The contents stay locked: an import over the same link may replace them, and no report of the former ones
                // may follow it. A head that has stopped is silent, which ends the link.
                // If the link is over, the thread that follows it finds out, and the next head asks by itself.
                let _ = say_executed(&link, &contained, &marks);
            }
        }
        Ok(moved)
    }

    /// Tells the head how far a log is after a batch in the middle of an entry, so that its space is used again before all of a long entry, and all
    /// entries that are there, are executed. No wait for the head, because the contents are locked: a report may be left out,
    /// since the next one says more.
    fn report_batch(&self, copy: &LocalCopy, log: LogUid, told: &mut BTreeMap<LogUid, Sequence>) {
        let contained = position_of(&copy.ledger.last_commit());
        let Some(mark) = mark_of(copy, log) else { return };
        {
            // It is held while received data is synced and confirmed.
            let Some(mut receiving) = self.receiving.try_lock() else { return };
            let Some(receiver) = receiving.receiver.as_mut() else { return };
            receiver.note_executed(contained, &[mark]);
        }
        let link = self.head.lock().connection.clone();
        if link.is_some_and(|link| say_progress(&link, &contained, &mark)) {
            told.insert(log, mark.sequence);
        }
    }

    /// True if the records are there that were missing or wrong when the pool was opened, or if there were none.
    fn has_lacking_records(&self, contents: &mut Contents) -> bool {
        if let Some((log, incarnation, up_to)) = contents.lacks {
            let receiving = self.receiving.lock();
            let synced =
                receiving.receiver.as_ref().and_then(|receiver| receiver.synced_record(log, incarnation));
            if synced.is_none_or(|synced| synced < up_to) {
                return false;
            }
            contents.lacks = None;
        }
        true
    }

    /// Notes how far the tree is; returns the message for the head, if it is further.
    fn note_executed(
        &self,
        contents: &mut Contents,
    ) -> Result<Option<(LedgerPosition, Vec<LogMark>)>, Error> {
        let contained = contents.contained();
        let marks = contents.marks(false);
        if marks.is_empty() && contained.sequence == contents.told_ledger {
            return Ok(None);
        }
        contents.told_ledger = contained.sequence;
        let mut receiving = self.receiving.lock();
        let Some(receiver) = receiving.receiver.as_mut() else { return Ok(None) };
        receiver.note_executed(contained, &marks);
        // A log's file is removed once the tree does not name it any more.
        if contents.copy.ledger.pending().next().is_none() {
            remove_files(&self.medium, receiver, &mut contents.over)?;
        }
        Ok(Some((contained, marks)))
    }
}
