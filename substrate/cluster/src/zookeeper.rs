//! The manager over a ZooKeeper ensemble: ZooKeeper stores the view, and the client that makes a change applies the
//! rules (Assise §3.1 uses ZooKeeper as its cluster manager).
//!
//! Under the root are: `view`, the whole view as bytes; `beats/NODE-LIFE`, one for each member whose heartbeats are
//! accepted, which its heartbeats write; `beats/NODE-LIFE-refused`, one for each member whose heartbeats are refused,
//! which is never written; `history/NUMBER`, the record of each change. A change is one transaction: the view at the
//! version from which it was computed, its record, and the nodes of `beats` that are created or deleted. An expulsion
//! deletes the heartbeat at the version that the expeller has seen for the whole time.
//!
//! The version of a heartbeat is the transaction that wrote it (`mzxid`). ZooKeeper's own version of a node begins anew
//! when the heartbeats of a refused member are accepted again; an expeller that slept meanwhile would mistake the new
//! heartbeat for one that it has seen for a long time.
//!
//! Sessions have no meaning here: they may expire, move or be lost. Every member is an expeller, with a [`Detector`] of
//! its own. The reads of a change begin with a sync, so that a follower that lags behind causes no wrong refusal.

use crate::change::{Change, Done, Party, Record, Refusal};
use crate::codec;
use crate::detector::Detector;
use crate::error::Error;
use crate::manager::Manager;
use crate::rules::Rules;
use crate::view::{Member, View};
use format::cluster::HISTORY_COUNT_MAX;
use format::{BeatVersion, ChangeNumber, NodeId};
use ipc::sync::Ordering;
use ipc::{Host, Join, Lock, Time, WAKE_ALL, Word};
use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use zookeeper_client::{Acls, Client, CreateMode, CreateOptions, Error as ZooError, Stat};

/// Timeout of a session; nothing depends on it.
const SESSION: Duration = Duration::from_secs(6);

/// Pause between failed attempts.
const PAUSE: Duration = Duration::from_millis(10);

const PERSISTENT: CreateOptions<'static> = CreateMode::Persistent.with_acls(Acls::anyone_all());

/// A client of the ensemble.
pub struct ZooKeeper {
    host: Arc<dyn Host>,
    ensemble: String,
    root: String,
    runtime: Runtime,
    client: Lock<Option<Client>>,
    detector: Lock<Detector>,
    newest: Lock<ChangeNumber>,
    stopping: Word,
    stop_driver: tokio::sync::Notify,
    threads: Lock<Vec<Box<dyn Join>>>,
}

/// The outcome of a failed attempt.
enum Attempt {
    /// Another client was faster, or nothing was sent: try again.
    Again,
    /// It may have been executed.
    Unknown,
    /// Permanent.
    Final(Error),
}

impl From<ZooError> for Attempt {
    fn from(error: ZooError) -> Self {
        match error {
            ZooError::BadVersion | ZooError::NoNode | ZooError::NodeExists | ZooError::Throttled => {
                Self::Again
            }
            ZooError::NoAuth | ZooError::AuthFailed | ZooError::InvalidAcl => Self::Final(Error::Failed),
            _ => Self::Unknown,
        }
    }
}

impl ZooKeeper {
    /// A client of an ensemble (`host:port,host:port`), for the cluster under `root` (`/hearth`), which is created with
    /// these rules if it does not exist. It expels no member until [`Self::start_expeller`].
    ///
    /// # Errors
    /// `Unreachable`, `Failed`, `System`.
    pub fn connect(
        host: Arc<dyn Host>,
        ensemble: &str,
        root: &str,
        rules: Rules,
        until: Time,
    ) -> Result<Arc<Self>, Error> {
        let zoo = Self::start(host, ensemble, root)?;
        zoo.or_stop(zoo.make(rules, until))
    }

    /// A client of an ensemble for the existing cluster under `root`; creates nothing.
    ///
    /// # Errors
    /// `Unreachable`, also if there is no cluster; `Failed`, `System`, `Message`.
    pub fn open(host: Arc<dyn Host>, ensemble: &str, root: &str, until: Time) -> Result<Arc<Self>, Error> {
        let zoo = Self::start(host, ensemble, root)?;
        let seen = zoo.repeat(until, true, |client| {
            let zoo = zoo.clone();
            async move { zoo.read(&client).await.map(|_| ()) }
        });
        zoo.or_stop(seen)
    }

    /// Returns the client, or stops its threads and returns the error.
    fn or_stop(self: &Arc<Self>, result: Result<(), Error>) -> Result<Arc<Self>, Error> {
        match result {
            Ok(()) => Ok(self.clone()),
            Err(error) => {
                self.stop();
                Err(error)
            }
        }
    }

    fn start(host: Arc<dyn Host>, ensemble: &str, root: &str) -> Result<Arc<Self>, Error> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Error::of_io("epoll_create", &error))?;
        let zoo = Arc::new(Self {
            ensemble: ensemble.to_owned(),
            root: root.to_owned(),
            runtime,
            client: Lock::new(host.clone(), None),
            detector: Lock::new(host.clone(), Detector::default()),
            newest: Lock::new(host.clone(), ChangeNumber::new(0)),
            threads: Lock::new(host.clone(), Vec::new()),
            host,
            stopping: Word::new(0),
            stop_driver: tokio::sync::Notify::new(),
        });
        // Keeps the session alive between calls.
        zoo.spawn("zookeeper", |zoo| zoo.runtime.block_on(zoo.stop_driver.notified()))?;
        Ok(zoo)
    }

    /// Creates the cluster if it does not exist.
    fn make(self: &Arc<Self>, rules: Rules, until: Time) -> Result<(), Error> {
        let view = View::new(self.host.random() | 1, rules);
        self.repeat(until, true, |client| {
            let (zoo, bytes) = (self.clone(), codec::encode_view(&view));
            async move {
                for path in [zoo.root.clone(), zoo.path("beats"), zoo.path("history")] {
                    client.mkdir(&path, &PERSISTENT).await?;
                }
                match client.create(&zoo.path("view"), &bytes, &PERSISTENT).await {
                    Ok(_) | Err(ZooError::NodeExists) => Ok(()),
                    Err(error) => Err(error.into()),
                }
            }
        })
    }

    /// Starts the thread that reads all heartbeats and expels silent members.
    ///
    /// # Errors
    /// `System`.
    pub fn start_expeller(self: &Arc<Self>) -> Result<(), Error> {
        self.spawn("zookeeper-expeller", Self::run_expeller)
    }

    /// Ends its threads.
    pub fn stop(&self) {
        // Release: pairs with the Acquire of the expeller.
        self.stopping.store(1, Ordering::Release);
        self.host.wake(&self.stopping, WAKE_ALL);
        self.stop_driver.notify_one();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // A thread that panicked has ended as well.
            let _ = thread.join();
        }
    }

    fn spawn(self: &Arc<Self>, name: &str, body: fn(&Self)) -> Result<(), Error> {
        let theirs = self.clone();
        let thread = self.host.spawn(name, Box::new(move || body(&theirs)));
        self.threads.lock().push(thread.map_err(Error::of_host)?);
        Ok(())
    }

    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.root)
    }

    fn beat_path(&self, party: Party, refused: bool) -> String {
        let mark = if refused { "-refused" } else { "" };
        format!("{}/beats/{}-{}{mark}", self.root, party.node, party.life)
    }

    /// A client with a live session.
    fn client(&self, until: Time) -> Result<Client, Attempt> {
        let known = self.client.lock().clone();
        if let Some(client) = known.filter(|client| !client.state().is_terminated()) {
            return Ok(client);
        }
        let left = until.since(self.host.now());
        let connector = Client::connector()
            .with_session_timeout(SESSION)
            .with_connection_timeout(left.min(SESSION / 3))
            .with_fail_eagerly();
        let connected =
            self.runtime.block_on(connector.connect(&self.ensemble)).map_err(|_| Attempt::Again)?;
        *self.client.lock() = Some(connected.clone());
        Ok(connected)
    }

    /// Tries until an attempt succeeds or fails permanently. An attempt that may have been executed is repeated only if
    /// that does no harm.
    fn repeat<T, F: Future<Output = Result<T, Attempt>>>(
        &self,
        until: Time,
        repeats: bool,
        attempt: impl Fn(Client) -> F,
    ) -> Result<T, Error> {
        let never = Word::new(0);
        loop {
            let result = self.client(until).and_then(|client| {
                let left = until.since(self.host.now());
                let limited = async { tokio::time::timeout(left, attempt(client)).await };
                self.runtime.block_on(limited).unwrap_or(Err(Attempt::Unknown))
            });
            match result {
                Ok(value) => return Ok(value),
                Err(Attempt::Final(error)) => return Err(error),
                Err(Attempt::Unknown) if !repeats => return Err(Error::Unknown),
                Err(_) if self.host.now().after(PAUSE) >= until => return Err(Error::Unreachable),
                Err(_) => {
                    let _ = self.host.wait(&never, 0, Some(self.host.now().after(PAUSE)));
                }
            }
        }
    }

    /// The view with its version in ZooKeeper.
    async fn read(&self, client: &Client) -> Result<(View, i32), Attempt> {
        client.sync(&self.root).await.map_err(|_| Attempt::Again)?;
        let (bytes, stat) = client.get_data(&self.path("view")).await.map_err(|_| Attempt::Again)?;
        let view = codec::decode_view(&bytes).map_err(|error| Attempt::Final(Error::Message(error)))?;
        Ok((view, stat.version))
    }

    /// A read may take at least this long, even for a caller that does not want to wait.
    fn patient(&self, until: Time) -> Time {
        until.max(self.host.now().after(SESSION / 3))
    }

    async fn change(
        &self,
        client: &Client,
        change: &Change,
        now: Time,
        wall_ns: i64,
    ) -> Result<Done, Attempt> {
        let refuse = |refusal: Refusal| Attempt::Final(refusal.into());
        let (before, version) = self.read(client).await?;
        let mut after = before.clone();
        let mut deleted_at = None;
        if *change == Change::Start {
            return Err(refuse(Refusal::Internal));
        }
        if let Change::Expel { party, beat, .. } = change {
            let (present, at) = self.present(client, &before, *party).await?;
            if present != *beat {
                return Err(refuse(Refusal::StaleBeat(present)));
            }
            if !self.detector.lock().may_expel(now, &before.rules, *party, *beat) {
                return Err(refuse(Refusal::TooEarly));
            }
            deleted_at = Some(at);
        }
        let done = after.apply(change).map_err(refuse)?;
        if after.number == before.number {
            return Ok(done);
        }
        let refused = before.refused_by(change);
        let record =
            Record { number: after.number, wall_ns, epoch: after.epoch, change: change.clone(), refused };
        let (old, new) = (self.beat_nodes(&before), self.beat_nodes(&after));
        let expelled = match change {
            Change::Expel { party, .. } => Some(self.beat_path(*party, before.members[&party.node].refused)),
            _ => None,
        };
        let mut writer = client.new_multi_writer();
        writer.add_set_data(&self.path("view"), &codec::encode_view(&after), Some(version))?;
        let history = format!("{}/history/{:010}", self.root, after.number.get());
        writer.add_create(&history, &codec::encode_record(&record), &PERSISTENT)?;
        for path in old.difference(&new) {
            writer.add_delete(path, deleted_at.filter(|_| expelled.as_ref() == Some(path)))?;
        }
        for path in new.difference(&old) {
            writer.add_create(path, &[], &PERSISTENT)?;
        }
        writer.commit().await.map_err(ZooError::from)?;
        Ok(done)
    }

    /// The current heartbeat of a member, and the version of its node in ZooKeeper.
    async fn present(
        &self,
        client: &Client,
        view: &View,
        party: Party,
    ) -> Result<(BeatVersion, i32), Attempt> {
        if !view.is_member(party) {
            return Err(Attempt::Final(Refusal::NotMember.into()));
        }
        let path = self.beat_path(party, view.members[&party.node].refused);
        let stat = client.check_stat(&path).await.map_err(|_| Attempt::Again)?;
        // The member was expelled, refused or accepted again since the view was read.
        let stat = stat.ok_or(Attempt::Again)?;
        Ok((beat_version(&stat), stat.version))
    }

    /// The nodes of `beats` that belong to a view.
    fn beat_nodes(&self, view: &View) -> BTreeSet<String> {
        let members = view.members.iter();
        let path = |(node, member): (&NodeId, &Member)| {
            self.beat_path(Party { node: *node, life: member.life }, member.refused)
        };
        members.map(path).collect()
    }

    fn run_expeller(&self) {
        // Acquire: pairs with the Release of `stop`.
        while self.stopping.load(Ordering::Acquire) == 0 {
            let until = self.host.now().after(SESSION / 3);
            let pause = match self.look(until) {
                Ok(view) => {
                    self.expel_silent(&view, until);
                    view.rules.lease() / 10
                }
                Err(_) => PAUSE,
            };
            let _ = self.host.wait(&self.stopping, 0, Some(self.host.now().after(pause)));
        }
    }

    /// Reads all heartbeats. They were written before the clock is read.
    fn look(&self, until: Time) -> Result<View, Error> {
        let (view, beats) = self.repeat(until, true, |client| async move {
            let (view, _) = self.read(&client).await?;
            let mut beats = Vec::new();
            for (node, member) in &view.members {
                let party = Party { node: *node, life: member.life };
                beats.push((party, self.present(&client, &view, party).await?.0));
            }
            Ok((view, beats))
        })?;
        let now = self.host.now();
        let mut detector = self.detector.lock();
        detector.retain(|party| view.is_member(party));
        beats.iter().for_each(|(party, beat)| detector.see(now, *party, *beat));
        Ok(view)
    }

    fn expel_silent(&self, view: &View, until: Time) {
        let silent = self.detector.lock().silent(self.host.now(), &view.rules);
        let mut epoch = view.epoch;
        for (party, beat) in silent {
            // Another expeller may be faster; after a refusal the next round reads again.
            if let Ok(done) = self.propose(&Change::Expel { party, beat, epoch }, until) {
                epoch = done.epoch;
            }
        }
    }
}

/// The version of a heartbeat's node.
fn beat_version(stat: &Stat) -> BeatVersion {
    // Positive numbers that also grow over elections.
    BeatVersion::new(stat.mzxid.cast_unsigned())
}

impl Manager for ZooKeeper {
    fn watch(&self, after: ChangeNumber, until: Time) -> Result<Arc<View>, Error> {
        let least = *self.newest.lock();
        let patient = self.patient(until);
        let view = self.repeat(patient, true, |client| async move {
            loop {
                client.sync(&self.root).await?;
                let (bytes, _, watcher) = client.get_and_watch_data(&self.path("view")).await?;
                let view =
                    codec::decode_view(&bytes).map_err(|error| Attempt::Final(Error::Message(error)))?;
                let left = until.since(self.host.now());
                if view.number > after || left.is_zero() {
                    // This server may not have a change yet that was seen through another one.
                    return if view.number >= least { Ok(view) } else { Err(Attempt::Again) };
                }
                // Whatever ends the wait, the view is read again.
                let _ = tokio::time::timeout(left, watcher.changed()).await;
            }
        })?;
        let mut newest = self.newest.lock();
        *newest = view.number.max(*newest);
        Ok(Arc::new(view))
    }

    fn propose(&self, change: &Change, until: Time) -> Result<Done, Error> {
        let (now, wall_ns) = (self.host.now(), self.host.wall());
        let done = self
            .repeat(until, false, |client| async move { self.change(&client, change, now, wall_ns).await })?;
        let mut newest = self.newest.lock();
        *newest = done.number.max(*newest);
        Ok(done)
    }

    fn beat(&self, party: Party, until: Time) -> Result<BeatVersion, Error> {
        self.repeat(until, true, |client| async move {
            match client.set_data(&self.beat_path(party, false), &[], None).await {
                Ok(stat) => Ok(beat_version(&stat)),
                Err(ZooError::NoNode) => {
                    let (view, _) = self.read(&client).await?;
                    match view.members.get(&party.node) {
                        Some(member) if member.life == party.life && member.refused => {
                            Err(Attempt::Final(Refusal::HeartbeatRefused.into()))
                        }
                        // Its heartbeats were accepted again between the two reads.
                        Some(member) if member.life == party.life => Err(Attempt::Again),
                        _ => Err(Attempt::Final(Refusal::NotMember.into())),
                    }
                }
                Err(_) => Err(Attempt::Again),
            }
        })
    }

    fn beat_of(&self, party: Party, until: Time) -> Result<BeatVersion, Error> {
        self.repeat(until, true, |client| async move {
            let (view, _) = self.read(&client).await?;
            self.present(&client, &view, party).await.map(|(beat, _)| beat)
        })
    }

    fn history(&self, from: ChangeNumber, count: u32, until: Time) -> Result<Vec<Record>, Error> {
        let count = u64::from(count.min(HISTORY_COUNT_MAX));
        self.repeat(self.patient(until), true, |client| async move {
            let (view, _) = self.read(&client).await?;
            let mut records = Vec::new();
            let last = view.number.get();
            let mut number = from.get().max(1);
            let mut looked = false;
            while number <= last && (records.len() as u64) < count {
                let path = format!("{}/history/{number:010}", self.root);
                match client.get_data(&path).await {
                    Ok((bytes, _)) => {
                        let record = codec::take_record(&mut &bytes[..]);
                        records.push(record.map_err(|error| Attempt::Final(Error::Message(error)))?);
                        number += 1;
                    }
                    // An operator may have removed the oldest ones.
                    Err(ZooError::NoNode) if !std::mem::replace(&mut looked, true) => {
                        let kept = client.list_children(&self.path("history")).await?;
                        let oldest = kept.iter().filter_map(|name| name.parse().ok()).min();
                        number = number.max(oldest.unwrap_or(u64::MAX));
                    }
                    Err(_) => return Err(Attempt::Again),
                }
            }
            Ok(records)
        })
    }
}
