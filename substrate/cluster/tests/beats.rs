//! Slow and lost heartbeats: a member whose manager is alive and reachable keeps its membership, whatever happens to
//! one connection, and however long an answer takes within the lease.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

#[path = "support/relay.rs"]
mod relay;

use cluster::{
    Address, Change, Done, Embedded, Error, Joining, Limits, Manager, Membership, Party, PoolReport, Record,
    Remote, Rules, View,
};
use format::{BeatVersion, ChangeNumber, NodeId};
use ipc::sync::Ordering;
use ipc::{Host, SystemHost, Time, Word};
use relay::Relay;
use std::sync::Arc;
use std::time::Duration;

/// If nothing goes wrong, a sixth of the lease is left: a busy machine may delay a thread by this time.
const LEASE: Duration = Duration::from_secs(4);

fn soon() -> Time {
    SystemHost.now().after(Duration::from_secs(20))
}

fn start(folder: &tempfile::TempDir) -> Embedded {
    let rules = Rules::new(LEASE, 1000).unwrap();
    Embedded::start(Arc::new(SystemHost), &folder.path().join("manager"), rules, Limits::default(), None)
        .unwrap()
}

/// Joins, and waits until the membership holds.
fn join(manager: Arc<dyn Manager>) -> Arc<Membership> {
    let (pool, address) = (PoolReport::default(), Address::default());
    let joining = Joining { node: NodeId::new(1), replaces: None, medium: 2, pool, address };
    let member = Membership::join(Arc::new(SystemHost), manager, &joining, soon()).unwrap();
    let until = soon();
    while member.valid_until().is_none() {
        assert!(SystemHost.now() < until, "no heartbeat was answered");
        let seen = member.news().load(Ordering::Acquire);
        let _ = SystemHost.wait(member.news(), seen, Some(SystemHost.now().after(Duration::from_millis(5))));
    }
    member
}

/// Checks for two leases that the membership stays valid.
fn holds(member: &Membership) {
    let never = Word::new(0);
    let (end, mut least) = (SystemHost.now().after(LEASE * 2), LEASE);
    while SystemHost.now() < end {
        let until = member.valid_until().expect("it is a member");
        let now = SystemHost.now();
        assert!(now < until, "the membership has ended");
        least = least.min(until.since(now));
        let _ = SystemHost.wait(&never, 0, Some(now.after(Duration::from_millis(5))));
    }
    println!("a lease of {LEASE:?}, of which {least:?} was left at least");
}

#[test]
fn dead_connections_cost_no_member_its_lease() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let embedded = start(&folder);
    let relay = Relay::start(embedded.socket());
    let remote = Arc::new(Remote::new(Arc::new(SystemHost), relay.socket()));
    let member = join(remote.clone());
    // As many connections as a client keeps idle; they die together with the one that the heartbeats use.
    let watches = (0..4).map(|_| {
        let remote = remote.clone();
        let until = SystemHost.now().after(Duration::from_millis(200));
        let body = move || drop(remote.watch(ChangeNumber::new(u64::MAX), until));
        SystemHost.spawn("watch", Box::new(body)).unwrap()
    });
    watches.collect::<Vec<_>>().into_iter().for_each(|watch| watch.join().unwrap());
    relay.lose_connections();
    holds(&member);
    member.stop();
    relay.stop();
    embedded.stop();
}

/// A manager whose answers to heartbeats take half a lease.
struct Slow(Remote);

impl Manager for Slow {
    fn watch(&self, after: ChangeNumber, until: Time) -> Result<Arc<View>, Error> {
        self.0.watch(after, until)
    }

    fn propose(&self, change: &Change, until: Time) -> Result<Done, Error> {
        self.0.propose(change, until)
    }

    fn beat(&self, party: Party, until: Time) -> Result<BeatVersion, Error> {
        let answer = self.0.beat(party, until);
        let _ = SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LEASE / 2)));
        answer
    }

    fn beat_of(&self, party: Party, until: Time) -> Result<BeatVersion, Error> {
        self.0.beat_of(party, until)
    }

    fn history(&self, from: ChangeNumber, count: u32, until: Time) -> Result<Vec<Record>, Error> {
        self.0.history(from, count, until)
    }
}

#[test]
fn late_answers_count() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let embedded = start(&folder);
    let member = join(Arc::new(Slow(Remote::new(Arc::new(SystemHost), embedded.socket()))));
    holds(&member);
    member.stop();
    embedded.stop();
}
