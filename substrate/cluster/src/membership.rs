//! Keeps a node's membership alive: an [`Agent`] with threads that write heartbeats, and one that watches the view. The
//! same for every backend.
//!
//! A heartbeat is sent every L/3, also while earlier ones have no answer yet: a heartbeat that waits on a dead
//! connection delays no other one, and a late answer still counts, from the sending of its heartbeat.
//!
//! A node that serves a subtree calls [`Membership::may_serve`] before and after its work, or compares its clock with
//! [`Membership::valid_until`]; work that ends later is an error, never a success. A membership that has ended stays
//! ended: its owner decides about joining again, after it has dealt with everything that happened meanwhile.

use crate::agent::Agent;
use crate::change::{Change, Done, Party, PoolReport, Refusal};
use crate::error::Error;
use crate::identity::PoolIdentity;
use crate::manager::Manager;
use crate::rules::Rules;
use crate::view::{Address, Path, View};
use format::{ChangeNumber, Epoch, NodeId};
use ipc::sync::Ordering;
use ipc::{Host, Join, Lock, LongWord, Time, WAKE_ALL, Word};
use pmem::MediaError;
use std::sync::Arc;
use std::time::Duration;

/// Pause between two failed attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Limit of one wait for a view, and so of the time that the end of the threads takes.
const WATCH: Duration = Duration::from_millis(500);

/// Threads that write heartbeats. Each heartbeat is waited for at most L, so with four threads one is always free.
const BEATS: usize = 4;

/// The arguments of a join.
#[derive(Clone, Debug)]
pub struct Joining {
    /// The node.
    pub node: NodeId,
    /// Its last life, as its pool has it. Only the process that holds the pool's lock knows that this life has ended.
    pub replaces: Option<Epoch>,
    /// The medium of its pool.
    pub medium: u8,
    /// The state of its pool, with a generation that is synced there and was never used before.
    pub pool: PoolReport,
    /// The address at which it listens.
    pub address: Address,
}

/// A membership that is kept alive until it ends.
pub struct Membership {
    host: Arc<dyn Host>,
    manager: Arc<dyn Manager>,
    rules: Rules,
    agent: Lock<Agent>,
    /// The time until which it is valid, in nanoseconds of the host's clock; 0 if it is not.
    valid_until: LongWord,
    /// Changes, and wakes, with every view, every heartbeat that was written, and the end.
    news: Word,
    /// 1 when the threads have to end.
    stopping: Word,
    threads: Lock<Vec<Box<dyn Join>>>,
    /// Subtrees whose management is being given away now.
    giving: Lock<Vec<Path>>,
    /// The error of the pool's medium when the pool could not store a view: the membership has ended then.
    pool_failure: Lock<Option<MediaError>>,
}

impl Membership {
    /// Joins, with attempts until `until`, and keeps the membership alive from then on. If the node has a former life
    /// that may not have ended, it waits for its end.
    ///
    /// # Errors
    /// `Refused`, `Unreachable`, `Failed`, `OtherCluster`, `System`.
    pub fn join(
        host: Arc<dyn Host>,
        manager: Arc<dyn Manager>,
        joining: &Joining,
        until: Time,
    ) -> Result<Arc<Self>, Error> {
        let rules = Self::ask_for_view(&*host, &*manager, until)?.rules;
        let done = Self::ask_to_join(&*host, &*manager, joining, until)?;
        Self::begin(host, manager, joining.node, rules, done).start(None, until)
    }

    /// Joins as the node of this pool, like [`Self::join`]. The new life replaces the pool's last one, so that a
    /// process that follows a dead one keeps its copy and its roles. The new life is durable in the pool when this
    /// returns, and so is each later view soon after. The caller holds the pool's lock.
    ///
    /// If the manager belongs to another cluster, or was set back to an older state, nothing is written in the pool: a
    /// generation that only the wrong manager knew would make the pool unknown to the right one.
    ///
    /// # Errors
    /// As [`Self::join`]; `Refused(SetBack)`: the manager was set back; `Pool`: the pool cannot store the life, and the
    /// node is not a member.
    pub fn join_pool(
        host: Arc<dyn Host>,
        manager: Arc<dyn Manager>,
        mut identity: PoolIdentity,
        (medium, address): (u8, Address),
        until: Time,
    ) -> Result<Arc<Self>, Error> {
        let view = Self::ask_for_view(&*host, &*manager, until)?;
        if let Some(other) = identity.cluster().filter(|cluster| *cluster != view.cluster) {
            return Err(Error::Refused(Refusal::ForeignPool(other)));
        }
        if let Some(number) = view.set_back {
            return Err(Error::Refused(Refusal::SetBack(number)));
        }
        if identity.newest() > view.number {
            let (node, replaces, pool) = (identity.node(), identity.last_life(), identity.report());
            let joining = Joining { node, replaces, medium, pool, address };
            Self::report_set_back(&*host, &*manager, &joining, until);
            return Err(Error::Refused(Refusal::SetBack(identity.newest())));
        }
        let pool = identity.ask(host.random()).map_err(Error::Pool)?;
        let (node, replaces) = (identity.node(), identity.last_life());
        let joining = Joining { node, replaces, medium, pool, address };
        let done = Self::ask_to_join(&*host, &*manager, &joining, until)?;
        let membership = Self::begin(host, manager, node, view.rules, done);
        if let Err(error) = identity.joined(view.cluster, done) {
            let _ = membership.leave(until);
            return Err(Error::Pool(error));
        }
        membership.start(Some(identity), until)
    }

    /// A membership that has begun, without the threads that keep it alive.
    fn begin(
        host: Arc<dyn Host>,
        manager: Arc<dyn Manager>,
        node: NodeId,
        rules: Rules,
        done: Done,
    ) -> Arc<Self> {
        let mut agent = Agent::new(node, rules);
        assert!(agent.joined(done), "a new agent had no life before");
        Arc::new(Self {
            agent: Lock::new(host.clone(), agent),
            threads: Lock::new(host.clone(), Vec::new()),
            giving: Lock::new(host.clone(), Vec::new()),
            pool_failure: Lock::new(host.clone(), None),
            host,
            manager,
            rules,
            valid_until: LongWord::new(0),
            news: Word::new(0),
            stopping: Word::new(0),
        })
    }

    /// Starts the threads. If that fails, the membership ends: the threads that were started would keep a member alive
    /// that no caller owns.
    fn start(self: Arc<Self>, identity: Option<PoolIdentity>, until: Time) -> Result<Arc<Self>, Error> {
        match self.start_threads(identity) {
            Ok(()) => Ok(self),
            Err(error) => {
                let _ = self.leave(until);
                Err(error)
            }
        }
    }

    fn start_threads(self: &Arc<Self>, identity: Option<PoolIdentity>) -> Result<(), Error> {
        (0..BEATS).try_for_each(|_| self.spawn("cluster-beats", Self::run_beats))?;
        self.spawn("cluster-watch", Self::run_watch)?;
        match identity {
            Some(identity) => self.spawn("cluster-notes", |theirs| theirs.run_notes(identity)),
            None => Ok(()),
        }
    }

    /// The first request: the manager may be starting just now.
    fn ask_for_view(host: &dyn Host, manager: &dyn Manager, until: Time) -> Result<Arc<View>, Error> {
        let never = Word::new(0);
        loop {
            match manager.watch(ChangeNumber::new(0), host.now()) {
                Ok(view) => return Ok(view),
                Err(Error::Unreachable) if host.now() < until => {
                    let _ = host.wait(&never, 0, Some(host.now().after(PAUSE)));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Lets a manager store that it was set back: its number grows with each of its starts, so that it could not notice
    /// this later. The node is a member for a moment, with the generation that its pool has already, and gets no role.
    fn report_set_back(host: &dyn Host, manager: &dyn Manager, joining: &Joining, until: Time) {
        // If this fails, the next attempt to join repeats it.
        if let Ok(done) = Self::ask_to_join(host, manager, joining, until) {
            let party = Party { node: joining.node, life: done.epoch };
            let _ = manager.propose(&Change::Leave { party }, until);
        }
    }

    fn ask_to_join(
        host: &dyn Host,
        manager: &dyn Manager,
        joining: &Joining,
        until: Time,
    ) -> Result<Done, Error> {
        let never = Word::new(0);
        let change = Change::Join {
            node: joining.node,
            instance: host.random(),
            replaces: joining.replaces,
            medium: joining.medium,
            pool: joining.pool,
            address: joining.address.clone(),
        };
        loop {
            match manager.propose(&change, until) {
                // A repeated request with the same instance gets the same life.
                Err(Error::Unknown | Error::Refused(Refusal::AlreadyMember(_))) if host.now() < until => {
                    let _ = host.wait(&never, 0, Some(host.now().after(PAUSE)));
                }
                result => return result,
            }
        }
    }

    fn spawn(self: &Arc<Self>, name: &str, body: impl FnOnce(&Self) + Send + 'static) -> Result<(), Error> {
        let theirs = self.clone();
        let thread = self.host.spawn(name, Box::new(move || body(&theirs)));
        let thread = thread.map_err(Error::of_host)?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// Its current life, if it has one.
    pub fn party(&self) -> Option<Party> {
        self.agent.lock().party()
    }

    /// The newest view.
    pub fn view(&self) -> Option<Arc<View>> {
        self.agent.lock().view().cloned()
    }

    /// Lease and drift bound.
    pub fn rules(&self) -> Rules {
        self.rules
    }

    /// The time until which it is valid: L less the drift after the sending of the last heartbeat that was written. One
    /// load.
    pub fn valid_until(&self) -> Option<Time> {
        // Acquire: pairs with the Release of `show`; the work after the load is in the time for which it is valid.
        let until = self.valid_until.load(Ordering::Acquire);
        (until != 0).then(|| Time::from_ns(until))
    }

    /// True if this node is the lease manager of the subtree, and no other node can be now.
    pub fn may_serve(&self, path: &Path) -> bool {
        let agent = self.agent.lock();
        agent.may_serve(self.host.now(), path)
    }

    /// The error for which the pool could not store a view: the membership has ended then.
    pub fn pool_failure(&self) -> Option<MediaError> {
        *self.pool_failure.lock()
    }

    /// A word that changes, and wakes, whenever the state here changes.
    pub fn news(&self) -> &Word {
        &self.news
    }

    /// Proposes a change by which this member gives away the management of a subtree. It stops serving the subtree
    /// before it sends the change, and serves it again only if a view shows that it is the lease manager again. If the
    /// change was refused, or its outcome is unknown, it requests the role for itself, until a view shows the lease
    /// manager.
    ///
    /// # Errors
    /// Those of [`Manager::propose`].
    pub fn give(
        &self,
        path: &Path,
        version: ChangeNumber,
        change: &Change,
        until: Time,
    ) -> Result<Done, Error> {
        self.giving.lock().push(path.clone());
        self.agent.lock().give(path, version);
        let done = self.manager.propose(change, until);
        let mut giving = self.giving.lock();
        let own = giving.iter().position(|given| given == path).expect("it was just put there");
        giving.swap_remove(own);
        done
    }

    /// Requests the roles for itself that it gave away without knowing the outcome.
    fn request_given_roles(&self) {
        let (party, undecided_roles) = {
            let agent = self.agent.lock();
            let Some(party) = agent.party() else { return };
            (party, agent.undecided_roles())
        };
        for (path, version) in undecided_roles {
            if !self.giving.lock().contains(&path) {
                let change = Change::SetManager { path, version, by: party, to: party.node };
                // Made or refused, a newer view shows the outcome; otherwise the request is repeated.
                let _ = self.manager.propose(&change, self.host.now().after(self.rules.lease()));
            }
        }
    }

    /// Stops serving, reports this to the manager, and ends the threads.
    ///
    /// # Errors
    /// Those of [`Manager::propose`]; the membership has ended here in any case.
    pub fn leave(&self, until: Time) -> Result<(), Error> {
        let said = match self.end() {
            Some(party) => self.manager.propose(&Change::Leave { party }, until).map(|_| ()),
            None => Ok(()),
        };
        self.stop();
        said
    }

    /// Ends the threads without a report, like the end of the process: the other nodes notice its silence. Takes as
    /// long as the calls in progress.
    pub fn stop(&self) {
        self.end();
        // Release: pairs with the Acquire of the threads.
        self.stopping.store(1, Ordering::Release);
        self.host.wake(&self.stopping, WAKE_ALL);
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // A thread that panicked has ended as well.
            let _ = thread.join();
        }
    }

    /// Ends the membership in this process.
    fn end(&self) -> Option<Party> {
        let mut agent = self.agent.lock();
        let party = agent.party();
        agent.leave();
        self.show(&agent);
        party
    }

    /// Publishes the state of the agent, under its lock, so that an older state never overwrites a newer one.
    fn show(&self, agent: &Agent) {
        let until = agent.valid_until().map_or(0, Time::as_ns);
        // Release: pairs with the Acquire of `valid_until`.
        self.valid_until.store(until, Ordering::Release);
        self.news.fetch_add(1, Ordering::Release);
        self.host.wake(&self.news, WAKE_ALL);
    }

    fn is_stopping(&self) -> bool {
        // Acquire: pairs with the Release of `stop`.
        self.stopping.load(Ordering::Acquire) != 0
    }

    fn pause_until(&self, until: Time) {
        let _ = self.host.wait(&self.stopping, 0, Some(until));
    }

    fn run_beats(&self) {
        while !self.is_stopping() {
            // Read before the heartbeat is sent, because it counts from here.
            let now = self.host.now();
            let (ticket, party) = {
                let mut agent = self.agent.lock();
                if agent.party().is_none() {
                    return;
                }
                let next = agent.next_beat().filter(|next| now < *next);
                let unwanted = (!agent.wants_beat(now)).then(|| now.after(self.rules.beat_every()));
                match next.or(unwanted) {
                    None => agent.send_beat(now),
                    Some(next) => {
                        drop(agent);
                        self.pause_until(next);
                        continue;
                    }
                }
            };
            // After a whole lease an answer is useless.
            let result = self.manager.beat(party, now.after(self.rules.lease()));
            let mut agent = self.agent.lock();
            match result {
                Ok(_) => agent.beaten(ticket),
                Err(Error::Refused(Refusal::NotMember)) => {
                    agent.not_member(party);
                }
                Err(Error::Refused(_)) => agent.heard(),
                // The membership stays valid until its time ends.
                Err(_) => {}
            }
            self.show(&agent);
        }
    }

    fn run_watch(&self) {
        while !self.is_stopping() {
            let after = {
                let agent = self.agent.lock();
                if agent.party().is_none() {
                    return;
                }
                agent.view().map_or(ChangeNumber::new(0), |view| view.number)
            };
            let now = self.host.now();
            match self.manager.watch(after, now.after(self.rules.lease().min(WATCH))) {
                Ok(view) => {
                    let mut agent = self.agent.lock();
                    agent.heard();
                    if agent.see(view) {
                        self.show(&agent);
                    }
                    drop(agent);
                    self.request_given_roles();
                }
                // No other node may know this member's last view any more.
                Err(Error::Damaged(_) | Error::OtherCluster(_)) => {
                    self.end();
                }
                Err(_) => self.pause_until(now.after(PAUSE)),
            }
        }
    }

    /// Stores the newest view in the pool, on a thread of its own, so that a slow medium delays no view.
    fn run_notes(&self, mut identity: PoolIdentity) {
        loop {
            // Acquire: pairs with the Release of `show`. Read before the view: a later one wakes the wait below.
            let seen = self.news.load(Ordering::Acquire);
            let newest = self.view().map(|view| view.number);
            if let Err(error) = newest.map_or(Ok(()), |newest| identity.saw(newest)) {
                *self.pool_failure.lock() = Some(error);
                self.end();
                return;
            }
            if self.is_stopping() || self.party().is_none() {
                return;
            }
            let _ = self.host.wait(&self.news, seen, Some(self.host.now().after(WATCH)));
        }
    }
}
