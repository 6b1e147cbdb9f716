//! Members with a pool: the changes that the pool stores, and the roles that a successor process on the same pool
//! keeps.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

use cluster::{
    Address, Change, Embedded, Error, Limits, Manager, Membership, Path, Placement, PoolIdentity, Remote,
    Rules, View,
};
use format::{ChangeNumber, NodeId, PoolUid};
use ipc::sync::Ordering;
use ipc::{Host, SystemHost, Time};
use pmem::recorded::Recorder;
use pmem::{MediaError, Medium};
use std::sync::Arc;
use std::time::Duration;

/// A long lease, so that no member is expelled.
const LEASE: Duration = Duration::from_secs(60);

const POOL: PoolUid = PoolUid::new(7);
const NODE: NodeId = NodeId::new(1);

fn soon() -> Time {
    SystemHost.now().after(Duration::from_secs(20))
}

struct Bed {
    embedded: Embedded,
    remote: Arc<Remote>,
    _folder: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let (rules, limits) = (Rules::new(LEASE, 1000).unwrap(), Limits::default());
        let host = Arc::new(SystemHost);
        let embedded =
            Embedded::start(host.clone(), &folder.path().join("manager"), rules, limits, None).unwrap();
        let remote = Arc::new(Remote::new(host, embedded.socket()));
        Self { embedded, remote, _folder: folder }
    }

    fn try_to_join(&self, medium: &Medium) -> Result<Arc<Membership>, Error> {
        let identity = PoolIdentity::open(medium, POOL, NODE).unwrap();
        let at = (2, Address::default());
        Membership::join_pool(Arc::new(SystemHost), self.remote.clone(), identity, at, soon())
    }

    fn join(&self, medium: &Medium) -> Arc<Membership> {
        self.try_to_join(medium).unwrap()
    }

    /// The pool of node 1 founds the tree.
    fn found(&self) {
        let chain = vec![Placement { node: NODE, hot: true }, Placement { node: NodeId::new(2), hot: true }];
        let (path, version, founder) = (Path::root(), ChangeNumber::new(0), Some(POOL));
        let change = Change::SetSubtree { path, version, chain, copies_min: 1, founder };
        self.remote.propose(&change, soon()).unwrap();
    }

    fn view(&self) -> Arc<View> {
        self.remote.watch(ChangeNumber::new(0), soon()).unwrap()
    }

    fn head(&self) -> Option<NodeId> {
        self.view().subtrees[&Path::root()].manager
    }
}

/// Waits until a condition holds for the membership.
fn until(member: &Membership, what: impl Fn(&Membership) -> bool) {
    let end = soon();
    loop {
        let seen = member.news().load(Ordering::Acquire);
        if what(member) {
            return;
        }
        assert!(SystemHost.now() < end, "the condition never held");
        let _ = SystemHost.wait(member.news(), seen, Some(SystemHost.now().after(Duration::from_millis(20))));
    }
}

/// The newest change in the pool's identity.
fn noted(medium: &Medium) -> ChangeNumber {
    PoolIdentity::open(medium, POOL, NODE).unwrap().newest()
}

#[test]
fn a_process_that_follows_another_on_its_pool_keeps_copy_and_role() {
    let (bed, recorder) = (Bed::new(), Recorder::new());
    let first = bed.join(&recorder.medium());
    bed.found();
    until(&first, |member| member.may_serve(&Path::root()));
    // Like a killed process: the manager gets no message about it.
    first.stop();
    let second = bed.join(&recorder.medium());
    until(&second, |member| member.may_serve(&Path::root()));
    assert_eq!(bed.head(), Some(NODE));
    second.leave(soon()).unwrap();
    assert_eq!(bed.head(), None);
    let third = bed.join(&recorder.medium());
    until(&third, |member| member.may_serve(&Path::root()));
    third.stop();
    bed.embedded.stop();
}

#[test]
fn an_older_copy_of_the_pool_is_no_copy() {
    let (bed, recorder) = (Bed::new(), Recorder::new());
    let first = bed.join(&recorder.medium());
    bed.found();
    first.leave(soon()).unwrap();
    let older = copy_of(&recorder.medium());
    bed.join(&recorder.medium()).leave(soon()).unwrap();
    let member = bed.join(&older.medium());
    until(&member, |member| member.view().is_some());
    assert_eq!(bed.head(), None, "a pool that does not know its own last life leads");
    member.leave(soon()).unwrap();
    let member = bed.join(&recorder.medium());
    until(&member, |member| member.may_serve(&Path::root()));
    member.stop();
    bed.embedded.stop();
}

#[test]
fn a_pool_notes_the_newest_view() {
    let (bed, recorder) = (Bed::new(), Recorder::new());
    let member = bed.join(&recorder.medium());
    bed.found();
    let newest = bed.view().number;
    let medium = recorder.medium();
    until(&member, |_| noted(&medium) >= newest);
    member.stop();
    bed.embedded.stop();
}

/// A pool has seen a change that the manager does not have: the manager stores this, and the pool stays as it is, so that
/// the right manager knows it.
#[test]
fn a_pool_stays_as_it_is_if_the_manager_was_set_back() {
    let (bed, recorder) = (Bed::new(), Recorder::new());
    let member = bed.join(&recorder.medium());
    bed.found();
    member.leave(soon()).unwrap();
    let contents = |medium: &Medium| {
        let region = medium.open("identity").unwrap();
        let mut bytes = vec![0; usize::try_from(region.bytes()).unwrap()];
        region.read(0, &mut bytes).unwrap();
        bytes
    };
    let newest = ChangeNumber::new(bed.view().number.get() + 100);
    PoolIdentity::open(&recorder.medium(), POOL, NODE).unwrap().saw(newest).unwrap();
    let before = contents(&recorder.medium());
    let set_back = Err(Error::Refused(cluster::Refusal::SetBack(newest)));
    for _ in 0..2 {
        assert_eq!(bed.try_to_join(&recorder.medium()).map(drop), set_back);
        let view = bed.view();
        assert_eq!((view.set_back, view.members.len(), bed.head()), (Some(newest), 0, None));
    }
    assert!(contents(&recorder.medium()) == before, "the pool was changed");
    // A pool that has seen no later change is not told another generation either.
    let other = Recorder::new();
    assert_eq!(bed.try_to_join(&other.medium()).map(drop), set_back);
    bed.embedded.stop();
}

#[test]
fn a_pool_of_another_cluster_is_refused() {
    let recorder = Recorder::new();
    let bed = Bed::new();
    bed.join(&recorder.medium()).leave(soon()).unwrap();
    bed.embedded.stop();
    let other = Bed::new();
    let refused = other.try_to_join(&recorder.medium()).map(|_| ());
    assert!(matches!(refused, Err(Error::Refused(cluster::Refusal::ForeignPool(_)))), "{refused:?}");
    other.embedded.stop();
}

#[test]
fn a_pool_that_cannot_store_its_identity_joins_no_cluster() {
    let (bed, recorder) = (Bed::new(), Recorder::new());
    // The first sync is that of the generation, the second that of the life, the third that of a later view.
    recorder.fail_sync(0);
    assert_eq!(bed.try_to_join(&recorder.medium()).map(|_| ()), Err(Error::Pool(failure())));
    assert!(bed.view().members.is_empty(), "it joined with a generation that its pool may not know");

    let recorder = Recorder::new();
    recorder.fail_sync(1);
    assert_eq!(bed.try_to_join(&recorder.medium()).map(|_| ()), Err(Error::Pool(failure())));
    assert!(bed.view().members.is_empty(), "it is a member without a pool that knows it");

    let recorder = Recorder::new();
    recorder.fail_sync(2);
    let member = bed.join(&recorder.medium());
    bed.found();
    until(&member, |member| member.party().is_none());
    assert_eq!(member.pool_failure(), Some(failure()));
    member.stop();
    bed.embedded.stop();
}

/// A copy of the pool's folder.
fn copy_of(medium: &Medium) -> Recorder {
    let copy = Recorder::new();
    for name in medium.list().unwrap() {
        let region = medium.open(&name).unwrap();
        let mut bytes = vec![0; region.bytes() as usize];
        region.read(0, &mut bytes).unwrap();
        let copied = copy.medium().create(&name, region.bytes()).unwrap();
        copied.write(0, &bytes);
        copied.sync().unwrap();
    }
    copy
}

/// The error of a failed sync.
fn failure() -> MediaError {
    let recorder = Recorder::new();
    recorder.fail_sync(0);
    let region = recorder.medium().create("any", 4096).unwrap();
    region.write(0, &[1]);
    region.sync().unwrap_err()
}
