//! A manager in this process: a [`ManagerCore`], its [`Store`], and the threads of its callers. The embedded manager is
//! this code behind a socket; the simulated one is this code on a recorded medium and a simulated host.
//!
//! A change is decided under the lock `state`, made durable under the lock `store`, and only then published: views,
//! history, and answers, including refusals, always show durable state. A thread that waited for `store` while another
//! one synced finds its own records written together with other records. After a failed sync the contents of the medium
//! are unknown, and the answer says so.
//!
//! Heartbeats take only `state`, so that a slow medium does not cause expulsions. So the answer to a heartbeat may
//! depend on a change that is not durable, and that a crash may undo. A heartbeat that was written then counts for a
//! life that does not exist: no view will ever show it as a lease manager. A heartbeat that was refused ends a life,
//! and a node may end its life at any time.
//!
//! Lock order: `store` before `state`. A sync is not a wait: it ends by itself, or fails.

use crate::change::{Change, Done, Party, Record, Refusal};
use crate::core::{Answer, Event, Expeller, ManagerCore};
use crate::error::Error;
use crate::manager::Manager;
use crate::store::{Store, StoredState};
use crate::view::View;
use format::cluster::HISTORY_COUNT_MAX;
use format::{BeatVersion, ChangeNumber};
use ipc::sync::Ordering;
use ipc::{Host, Join, Lock, Time, WAKE_ALL, Word};
use std::collections::VecDeque;
use std::sync::Arc;

struct ServiceState {
    core: ManagerCore,
    /// Records that are decided, and not yet durable.
    pending: Vec<Record>,
    /// The last durable view.
    shown: Arc<View>,
    /// The reason for which no request is answered any more.
    failed: Option<Error>,
}

/// A manager in this process.
pub struct Service {
    host: Arc<dyn Host>,
    store: Lock<Store>,
    state: Lock<ServiceState>,
    /// Changes, and wakes, with every published view, and at the end.
    news: Word,
    /// 1 when it stops.
    stopping: Word,
}

impl Service {
    /// Starts a manager on an opened store. It expels no member until [`Self::start_clock`].
    ///
    /// # Errors
    /// `Media`: the start could not be made durable.
    pub fn new(
        host: Arc<dyn Host>,
        mut store: Store,
        kept: StoredState,
        expeller: Expeller,
    ) -> Result<Arc<Self>, Error> {
        let (core, record) = ManagerCore::start(kept.view, kept.history, expeller, host.now(), host.wall());
        store.append(&[record], core.view(), core.history())?;
        let shown = Arc::new(core.view().clone());
        let state = ServiceState { core, pending: Vec::new(), shown, failed: None };
        Ok(Arc::new(Self {
            store: Lock::new(host.clone(), store),
            state: Lock::new(host.clone(), state),
            host,
            news: Word::new(0),
            stopping: Word::new(0),
        }))
    }

    /// Starts the thread that expels silent members.
    ///
    /// # Errors
    /// `System`.
    pub fn start_clock(self: &Arc<Self>) -> Result<Box<dyn Join>, Error> {
        let service = self.clone();
        let body = Box::new(move || service.run_clock(&|| Ok(())));
        self.host.spawn("cluster-clock", body).map_err(Error::of_host)
    }

    /// Ends the thread and every wait; calls fail from now on.
    pub fn stop(&self) {
        self.fail(Error::Failed);
        // Release: pairs with the Acquire of the clock.
        self.stopping.store(1, Ordering::Release);
        self.host.wake(&self.stopping, WAKE_ALL);
    }

    /// The reason for which no request is answered any more: `Failed` after [`Self::stop`], otherwise the error of the
    /// medium.
    pub fn failure(&self) -> Option<Error> {
        self.state.lock().failed.clone()
    }

    /// The number of the cluster.
    pub fn cluster(&self) -> u64 {
        self.state.lock().shown.cluster
    }

    /// The body of that thread. It also runs `place` each time, which checks the manager's files, and ends at an error.
    pub(crate) fn run_clock(&self, place: &dyn Fn() -> Result<(), Error>) {
        loop {
            let (next, rules) = {
                let state = self.state.lock();
                (state.core.next_tick(), state.shown.rules)
            };
            // A member that joins meanwhile has all this time.
            let latest = self.host.now().after(rules.expel_after());
            let next = next.map_or(latest, |next| next.min(latest));
            let _ = self.host.wait(&self.stopping, 0, Some(next));
            // Acquire: pairs with the Release of `stop`.
            if self.stopping.load(Ordering::Acquire) != 0 {
                return;
            }
            let now = self.host.now();
            let wall_ns = self.host.wall();
            let due = {
                let mut state = self.state.lock();
                if state.failed.is_some() {
                    return;
                }
                let effects = state.core.step(now, Event::Tick { wall_ns });
                state.pending.extend(effects.records);
                !state.pending.is_empty()
            };
            if due && self.commit().is_err() {
                return;
            }
            // A thread that holds the store checks this itself.
            let log = self.store.try_lock().map_or(Ok(()), |store| store.check_place());
            if let Err(error) = log.and_then(|()| place()) {
                return self.fail(error);
            }
        }
    }

    /// Makes all decided records durable, and publishes their view.
    fn commit(&self) -> Result<(), Error> {
        let mut store = self.store.lock();
        let (records, view, history) = {
            let mut state = self.state.lock();
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            let records = std::mem::take(&mut state.pending);
            if records.is_empty() {
                return Ok(());
            }
            (records, Arc::new(state.core.view().clone()), state.core.history().clone())
        };
        if let Err(error) = store.append(&records, &view, &history) {
            self.fail(error.clone());
            return Err(error);
        }
        let mut state = self.state.lock();
        assert!(state.shown.epoch <= view.epoch && state.shown.number < view.number, "a view went back");
        state.shown = view;
        drop(state);
        self.notify();
        Ok(())
    }

    fn fail(&self, error: Error) {
        self.state.lock().failed.get_or_insert(error);
        self.notify();
    }

    fn notify(&self) {
        // Release: pairs with the Acquire of the watchers; the view is under the lock.
        self.news.fetch_add(1, Ordering::Release);
        self.host.wake(&self.news, WAKE_ALL);
    }

    fn checked(&self) -> Result<ipc::Guard<'_, ServiceState>, Error> {
        let state = self.state.lock();
        match &state.failed {
            None => Ok(state),
            Some(_) => Err(Error::Failed),
        }
    }
}

impl Manager for Service {
    fn watch(&self, after: ChangeNumber, until: Time) -> Result<Arc<View>, Error> {
        loop {
            // Acquire: pairs with the Release of `notify`: a view shown later changes the word again.
            let news = self.news.load(Ordering::Acquire);
            let shown = self.checked()?.shown.clone();
            if shown.number > after || self.host.now() >= until {
                return Ok(shown);
            }
            let _ = self.host.wait(&self.news, news, Some(until));
        }
    }

    fn propose(&self, change: &Change, _until: Time) -> Result<Done, Error> {
        let (now, wall_ns) = (self.host.now(), self.host.wall());
        let effects = {
            let mut state = self.checked()?;
            let effects = state.core.step(now, Event::Propose { change: change.clone(), wall_ns });
            state.pending.extend(effects.records.iter().cloned());
            effects
        };
        // Also without records of its own, because the answer may depend on records that are not durable yet.
        let durable = self.commit();
        match effects.answer {
            // The next start may find the change on the medium.
            Answer::Done(done) => durable.map(|()| done).map_err(|_| Error::Unknown),
            Answer::Refused(refusal) => Err(durable.map_or(Error::Failed, |()| refusal.into())),
            Answer::Nothing | Answer::Beaten(_) => unreachable!("a change is made or refused"),
        }
    }

    fn beat(&self, party: Party, _until: Time) -> Result<BeatVersion, Error> {
        let now = self.host.now();
        match self.checked()?.core.step(now, Event::Beat(party)).answer {
            Answer::Beaten(beat) => Ok(beat),
            Answer::Refused(refusal) => Err(refusal.into()),
            Answer::Nothing | Answer::Done(_) => unreachable!("a heartbeat is written or refused"),
        }
    }

    fn beat_of(&self, party: Party, _until: Time) -> Result<BeatVersion, Error> {
        let known = {
            let state = self.checked()?;
            state.core.beats().get(&party.node).filter(|_| state.core.view().is_member(party)).copied()
        };
        // Its membership may not be durable yet.
        self.commit().map_err(|_| Error::Failed)?;
        known.ok_or(Error::Refused(Refusal::NotMember))
    }

    fn history(&self, from: ChangeNumber, count: u32, _until: Time) -> Result<Vec<Record>, Error> {
        let state = self.checked()?;
        let wanted = |record: &&Record| record.number >= from && record.number <= state.shown.number;
        let history: &VecDeque<Record> = state.core.history();
        let count = count.min(HISTORY_COUNT_MAX) as usize;
        Ok(history.iter().filter(wanted).take(count).cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::change::PoolReport;
    use crate::rules::Rules;
    use crate::view::Address;
    use format::NodeId;
    use ipc::SystemHost;
    use pmem::recorded::{Recorder, Verb};
    use std::time::Duration;

    const NODE: NodeId = NodeId::new(1);

    fn join() -> Change {
        let address = Address::default();
        Change::Join {
            node: NODE,
            instance: 5,
            replaces: None,
            medium: 0,
            pool: PoolReport::default(),
            address,
        }
    }

    fn start(recorder: &Recorder) -> Arc<Service> {
        let rules = Rules::new(Duration::from_secs(60), 1000).unwrap();
        let (store, kept) = Store::open(recorder.medium(), 7, rules).unwrap();
        Service::new(Arc::new(SystemHost), store, kept, Expeller::Core).unwrap()
    }

    #[test]
    fn the_outcome_of_a_change_whose_sync_failed_is_unknown() {
        let recorder = Recorder::new();
        let service = start(&recorder);
        recorder.fail_sync(recorder.calls(Verb::Sync));
        assert_eq!(service.propose(&join(), Time::from_ns(0)), Err(Error::Unknown));
        assert_eq!(service.propose(&join(), Time::from_ns(0)), Err(Error::Failed), "it was never decided");
        // The next start finds it.
        let service = start(&Recorder::of_image(recorder.image()));
        let view = service.watch(ChangeNumber::new(0), Time::from_ns(0)).unwrap();
        assert!(view.members.contains_key(&NODE));
    }

    #[test]
    fn a_refusal_is_not_undone_by_a_crash() {
        let asks: [fn(&Service, Party) -> Error; 2] = [
            |service, party| service.beat_of(party, Time::from_ns(0)).unwrap_err(),
            |service, party| service.propose(&Change::Leave { party }, Time::from_ns(0)).unwrap_err(),
        ];
        for ask in asks {
            let recorder = Recorder::new();
            let service = start(&recorder);
            let done = service.propose(&join(), Time::from_ns(0)).unwrap();
            let party = Party { node: NODE, life: done.epoch };
            {
                // Another thread has decided this change, and not synced it yet.
                let mut state = service.state.lock();
                let leave = Event::Propose { change: Change::Leave { party }, wall_ns: 0 };
                let records = state.core.step(Time::from_ns(0), leave).records;
                state.pending.extend(records);
            }
            assert_eq!(ask(&service, party), Error::Refused(Refusal::NotMember));
            let again = start(&Recorder::of_image(recorder.image()));
            let view = again.watch(ChangeNumber::new(0), Time::from_ns(0)).unwrap();
            assert!(!view.is_member(party), "the refused member is one again");
        }
    }
}
