//! The behaviour of every `Manager`, for all backends. Each case uses a fresh cluster.

use cluster::{
    Address, Change, Error, Joining, Manager, Membership, Party, Path, Placement, PoolCopy, PoolReport,
    Refusal, Rules, View,
};
use format::{ChangeNumber, Epoch, NodeId, PoolGeneration, PoolUid};
use ipc::{Host, SystemHost, Time};
use std::sync::Arc;
use std::time::Duration;

/// A backend under test, with one cluster.
pub trait Backend {
    /// A client of the manager, independent of the earlier ones.
    fn client(&self) -> Arc<dyn Manager>;

    /// Ends the manager as abruptly as the backend can, and starts it again on the durable state.
    fn restart(&mut self);
}

/// Rules with this lease.
pub fn rules(lease_ms: u64) -> Rules {
    Rules::new(Duration::from_millis(lease_ms), 1000).unwrap()
}

/// A lease for cases in which no member may be expelled, however slow the machine is.
const LONG_MS: u64 = 60_000;

/// A lease for cases that wait for an expulsion.
const SHORT_MS: u64 = 3000;

/// A case: its name, the lease of its cluster, and its function.
pub type Case = (&'static str, u64, fn(&mut dyn Backend));

pub const CASES: [Case; 14] = [
    ("a_new_cluster_is_empty", LONG_MS, a_new_cluster_is_empty),
    ("members_come_and_go", LONG_MS, members_come_and_go),
    ("a_join_asked_again_gives_the_same_life", LONG_MS, a_join_asked_again_gives_the_same_life),
    ("a_successor_ends_the_life_before", LONG_MS, a_successor_ends_the_life_before),
    ("changes_are_conditional", LONG_MS, changes_are_conditional),
    ("a_watcher_is_woken", LONG_MS, a_watcher_is_woken),
    ("heartbeats_keep_a_member", SHORT_MS, heartbeats_keep_a_member),
    ("a_silent_member_is_expelled_after_its_time", SHORT_MS, a_silent_member_is_expelled_after_its_time),
    ("who_is_later_in_the_chain_is_refused", SHORT_MS, who_is_later_in_the_chain_is_refused),
    ("a_heartbeat_s_version_never_comes_twice", LONG_MS, a_heartbeat_s_version_never_comes_twice),
    ("a_role_that_nobody_took_is_served_again", LONG_MS, a_role_that_nobody_took_is_served_again),
    ("the_history_tells_everything", LONG_MS, the_history_tells_everything),
    ("nothing_is_lost_by_a_restart", LONG_MS, nothing_is_lost_by_a_restart),
    ("many_at_once_lose_no_change", LONG_MS, many_at_once_lose_no_change),
];

fn now() -> Time {
    SystemHost.now()
}

fn soon() -> Time {
    now().after(Duration::from_secs(20))
}

fn node(number: u32) -> NodeId {
    NodeId::new(number)
}

fn view(manager: &dyn Manager) -> Arc<View> {
    let until = soon();
    loop {
        match manager.watch(ChangeNumber::new(0), now()) {
            // It has only just been started.
            Err(Error::Unreachable) if now() < until => {}
            view => return view.unwrap(),
        }
    }
}

/// The pool of a node, always in the same generation.
fn pool(number: u32) -> PoolReport {
    let generation = PoolGeneration::new(1);
    let copy = PoolCopy { uid: PoolUid::new(number.into()), generation };
    PoolReport { copy, ..PoolReport::default() }
}

fn join(manager: &dyn Manager, number: u32) -> Party {
    let address = Address::new(&format!("127.0.0.1:{}", 7000 + number)).unwrap();
    let instance = SystemHost.random();
    let pool = pool(number);
    let change = Change::Join { node: node(number), instance, replaces: None, medium: 2, pool, address };
    Party { node: node(number), life: manager.propose(&change, soon()).unwrap().epoch }
}

fn place(manager: &dyn Manager, path: &Path, nodes: &[u32]) -> Result<ChangeNumber, Error> {
    let before = view(manager);
    let known = before.subtrees.get(path);
    let version = known.map_or(ChangeNumber::new(0), |subtree| subtree.version);
    let chain = nodes.iter().map(|number| Placement { node: node(*number), hot: true }).collect();
    let founder = known.is_none().then(|| PoolUid::new(nodes[0].into()));
    let change = Change::SetSubtree { path: path.clone(), version, chain, copies_min: 1, founder };
    let mut version = manager.propose(&change, soon())?.number;
    // The others join it.
    for other in nodes.iter().skip(1).filter(|_| known.is_none()) {
        let by = Party { node: node(nodes[0]), life: before.members[&node(nodes[0])].life };
        let sync = Change::SetSync { path: path.clone(), version, by, node: node(*other), in_sync: true };
        version = manager.propose(&sync, soon())?.number;
    }
    Ok(version)
}

/// Waits until a view satisfies the condition.
fn wait_for(manager: &dyn Manager, fits: impl Fn(&View) -> bool) -> Arc<View> {
    let (until, mut after) = (soon(), ChangeNumber::new(0));
    loop {
        let view = manager.watch(after, until).unwrap();
        if fits(&view) {
            return view;
        }
        assert!(now() < until, "no view satisfied the condition: {view:?}");
        after = view.number;
    }
}

fn a_new_cluster_is_empty(backend: &mut dyn Backend) {
    let view = view(&*backend.client());
    assert!(view.members.is_empty() && view.subtrees.is_empty() && view.cluster != 0);
    assert_eq!((view.epoch, view.rules), (Epoch::new(0), rules(LONG_MS)));
}

fn members_come_and_go(backend: &mut dyn Backend) {
    let manager = backend.client();
    let (one, two) = (join(&*manager, 1), join(&*manager, 2));
    assert!(one.life < two.life);
    let seen = view(&*backend.client());
    assert_eq!(seen.members[&node(2)].address.as_str(), "127.0.0.1:7002");
    assert_eq!((seen.epoch, seen.members.len()), (two.life, 2));
    let done = manager.propose(&Change::Leave { party: one }, soon()).unwrap();
    assert_eq!(done.epoch, two.life.next());
    assert_eq!(manager.propose(&Change::Leave { party: one }, soon()), Err(Refusal::NotMember.into()));
    assert_eq!(manager.beat(one, soon()), Err(Refusal::NotMember.into()));
    assert_eq!(manager.beat_of(one, soon()), Err(Refusal::NotMember.into()));
    assert!(!view(&*manager).members.contains_key(&node(1)));
}

fn a_join_asked_again_gives_the_same_life(backend: &mut dyn Backend) {
    let manager = backend.client();
    let (instance, address) = (99, Address::default());
    let pool = pool(1);
    let change = Change::Join { node: node(1), instance, replaces: None, medium: 1, pool, address };
    let first = manager.propose(&change, soon()).unwrap();
    let again = manager.propose(&change, soon()).unwrap();
    assert_eq!(first.epoch, again.epoch);
    assert_eq!(view(&*manager).epoch, first.epoch, "two requests, one change");
}

fn a_successor_ends_the_life_before(backend: &mut dyn Backend) {
    let manager = backend.client();
    let party = join(&*manager, 1);
    let change = |instance, replaces| {
        let address = Address::default();
        Change::Join { node: node(1), instance, replaces, medium: 1, pool: pool(1), address }
    };
    let stranger = manager.propose(&change(5, None), soon());
    assert_eq!(stranger, Err(Refusal::AlreadyMember(party.life).into()));
    let next = manager.propose(&change(6, Some(party.life)), soon()).unwrap();
    assert!(next.epoch > party.life);
    assert_eq!(manager.beat(party, soon()), Err(Refusal::NotMember.into()));
    manager.beat(Party { life: next.epoch, ..party }, soon()).unwrap();
}

fn changes_are_conditional(backend: &mut dyn Backend) {
    let (manager, other) = (backend.client(), backend.client());
    let (one, path) = (join(&*manager, 1), Path::new(b"/mail").unwrap());
    join(&*manager, 2);
    let version = place(&*manager, &path, &[1, 2]).unwrap();
    assert_eq!(view(&*other).subtrees[&path].manager, Some(node(1)));
    let give = |by| Change::SetManager { path: path.clone(), version, by, to: node(2) };
    let wrong = Party { life: one.life.next(), ..one };
    assert_eq!(other.propose(&give(wrong), soon()), Err(Refusal::NotMember.into()));
    let done = manager.propose(&give(one), soon()).unwrap();
    assert_eq!(other.propose(&give(one), soon()), Err(Refusal::StaleVersion(done.number).into()));
    let seen = view(&*other);
    assert_eq!((seen.subtrees[&path].manager, seen.subtrees[&path].version), (Some(node(2)), done.number));
    assert_eq!(place(&*manager, &path, &[1]), Err(Refusal::StillManager(node(2)).into()));
    assert_eq!(place(&*manager, &path, &[2, 2]), Err(Refusal::Field("chain").into()));
}

fn a_watcher_is_woken(backend: &mut dyn Backend) {
    let (manager, watcher) = (backend.client(), backend.client());
    let before = view(&*manager);
    let until = now().after(Duration::from_millis(30));
    assert_eq!(watcher.watch(before.number, until).unwrap().number, before.number);
    assert!(now() >= until, "there was no newer view");
    let seen = Arc::new(ipc::LongWord::new(0));
    let theirs = seen.clone();
    let after = before.number;
    let body = move || {
        let view = watcher.watch(after, soon()).unwrap();
        theirs.store(view.members.len() as u64, ipc::sync::Ordering::Release);
    };
    let thread = SystemHost.spawn("watcher", Box::new(body)).unwrap();
    join(&*manager, 3);
    thread.join().unwrap();
    assert_eq!(seen.load(ipc::sync::Ordering::Acquire), 1);
}

fn member(backend: &dyn Backend, number: u32) -> Arc<Membership> {
    let (pool, address) = (pool(number), Address::default());
    let joining = Joining { node: node(number), replaces: None, medium: 2, pool, address };
    Membership::join(Arc::new(SystemHost), backend.client(), &joining, soon()).unwrap()
}

/// Waits until a membership satisfies the condition.
fn wait_until(member: &Membership, fits: impl Fn(&Membership) -> bool) {
    let until = soon();
    loop {
        let seen = member.news().load(ipc::sync::Ordering::Acquire);
        if fits(member) {
            return;
        }
        assert!(now() < until, "the condition never held: {:?}", member.view());
        // The passing of time alone may make the condition true.
        let slice = now().after(Duration::from_millis(20));
        let _ = SystemHost.wait(member.news(), seen, Some(slice));
    }
}

fn heartbeats_keep_a_member(backend: &mut dyn Backend) {
    let (one, two) = (member(backend, 1), member(backend, 2));
    let manager = backend.client();
    place(&*manager, &Path::root(), &[1, 2]).unwrap();
    wait_until(&one, |one| one.may_serve(&Path::root()));
    assert!(!two.may_serve(&Path::root()));
    let first = one.valid_until().unwrap();
    wait_until(&one, |one| one.valid_until().unwrap() > first.after(one.rules().lease() * 3));
    assert_eq!(view(&*manager).members.len(), 2, "nobody was expelled who was heard");
    // One member gives the role away, and stops serving at the instant in which it sends the request.
    let version = view(&*manager).subtrees[&Path::root()].version;
    let change = Change::SetManager { path: Path::root(), version, by: one.party().unwrap(), to: node(2) };
    one.give(&Path::root(), version, &change, soon()).unwrap();
    assert!(!one.may_serve(&Path::root()));
    wait_until(&two, |two| two.may_serve(&Path::root()));
    one.leave(soon()).unwrap();
    assert!(!view(&*manager).members.contains_key(&node(1)));
    two.stop();
}

fn a_silent_member_is_expelled_after_its_time(backend: &mut dyn Backend) {
    let (one, two) = (member(backend, 1), member(backend, 2));
    let manager = backend.client();
    place(&*manager, &Path::root(), &[1, 2]).unwrap();
    wait_until(&one, |one| one.may_serve(&Path::root()));
    let party = one.party().unwrap();
    let beat = manager.beat_of(party, soon()).unwrap();
    let early = Change::Expel { party, beat, epoch: view(&*manager).epoch };
    let refused = manager.propose(&early, soon());
    assert!(matches!(refused, Err(Error::Refused(Refusal::TooEarly | Refusal::StaleBeat(_)))), "{refused:?}");
    let valid_until = one.valid_until().unwrap();
    // Like a process that dies: its membership stays valid until its time ends.
    one.stop();
    wait_until(&two, |two| two.may_serve(&Path::root()));
    assert!(now() >= valid_until, "the other one served while the first one still may have served");
    let seen = view(&*manager);
    assert_eq!(seen.subtrees[&Path::root()].in_sync().collect::<Vec<_>>(), [node(2)]);
    assert_eq!(manager.beat(party, soon()), Err(Refusal::NotMember.into()));
    two.stop();
}

fn who_is_later_in_the_chain_is_refused(backend: &mut dyn Backend) {
    let (one, two) = (member(backend, 1), member(backend, 2));
    let manager = backend.client();
    place(&*manager, &Path::root(), &[1, 2]).unwrap();
    let (by, epoch) = (two.party().unwrap(), view(&*manager).epoch);
    let complaint = Change::Complain { by, about: node(1), path: Path::root(), epoch };
    manager.propose(&complaint, soon()).unwrap();
    assert_eq!(manager.beat(by, soon()), Err(Refusal::HeartbeatRefused.into()));
    wait_for(&*manager, |view| !view.members.contains_key(&node(2)));
    wait_until(&two, |two| two.party().is_none());
    wait_until(&one, |one| one.may_serve(&Path::root()));
    // The other member stays, as the audit trail shows.
    let records = manager.history(ChangeNumber::new(1), 100, soon()).unwrap();
    let complaint = records.iter().find(|record| matches!(record.change, Change::Complain { .. })).unwrap();
    let expulsion = records.iter().find(|record| matches!(record.change, Change::Expel { .. })).unwrap();
    assert_eq!((complaint.refused, expulsion.refused), (Some(node(2)), Some(node(2))));
    one.stop();
    two.stop();
}

/// An expeller that slept mistakes no new heartbeat for one that it has seen for a long time: neither when the
/// heartbeats of a refused member are accepted again, nor when they are refused again.
fn a_heartbeat_s_version_never_comes_twice(backend: &mut dyn Backend) {
    let manager = backend.client();
    let (one, two) = (join(&*manager, 1), join(&*manager, 2));
    place(&*manager, &Path::root(), &[1, 2]).unwrap();
    let complain = |by: Party| {
        let epoch = view(&*manager).epoch;
        let complaint = Change::Complain { by, about: node(2), path: Path::root(), epoch };
        manager.propose(&complaint, soon()).unwrap();
        assert_eq!(manager.beat(two, soon()), Err(Refusal::HeartbeatRefused.into()));
        manager.beat_of(two, soon()).unwrap()
    };
    let mut last = manager.beat_of(two, soon()).unwrap();
    for _ in 0..3 {
        let next = manager.beat(two, soon()).unwrap();
        assert!(next > last, "{next} after {last}");
        last = next;
    }
    let refused = complain(one);
    assert!(refused >= last);
    // No other node has a copy now, so the heartbeats of node 2 are accepted again.
    manager.propose(&Change::Leave { party: one }, soon()).unwrap();
    assert!(manager.beat_of(two, soon()).unwrap() >= refused);
    let heard = manager.beat(two, soon()).unwrap();
    assert!(heard > refused, "{heard} after {refused}");
    let one = join(&*manager, 1);
    let version = view(&*manager).subtrees[&Path::root()].version;
    let back = Change::SetSync { path: Path::root(), version, by: two, node: node(1), in_sync: true };
    let version = manager.propose(&back, soon()).unwrap().number;
    let give = Change::SetManager { path: Path::root(), version, by: two, to: node(1) };
    manager.propose(&give, soon()).unwrap();
    assert!(complain(one) >= heard);
}

/// A member whose change to give a role away was not made keeps the role.
fn a_role_that_nobody_took_is_served_again(backend: &mut dyn Backend) {
    let one = member(backend, 1);
    let manager = backend.client();
    let version = place(&*manager, &Path::root(), &[1]).unwrap();
    wait_until(&one, |one| one.may_serve(&Path::root()));
    let by = one.party().unwrap();
    let nobody = Change::SetManager { path: Path::root(), version, by, to: node(7) };
    let given = one.give(&Path::root(), version, &nobody, soon());
    assert_eq!(given, Err(Refusal::NotReplica(node(7)).into()));
    wait_until(&one, |one| one.may_serve(&Path::root()));
    assert!(view(&*manager).subtrees[&Path::root()].version > version, "it requested the role for itself");
    one.stop();
}

fn the_history_tells_everything(backend: &mut dyn Backend) {
    let manager = backend.client();
    join(&*manager, 1);
    place(&*manager, &Path::root(), &[1]).unwrap();
    let records = manager.history(ChangeNumber::new(1), 100, soon()).unwrap();
    let mut replayed = View::new(view(&*manager).cluster, rules(LONG_MS));
    for record in &records {
        let done = replayed.apply(&record.change).unwrap();
        assert_eq!((done.number, replayed.epoch), (record.number, record.epoch));
        assert!(record.wall_ns > 0);
    }
    assert_eq!(replayed, *view(&*manager));
    let last = manager.history(replayed.number, 100, soon()).unwrap();
    assert_eq!(last, records[records.len() - 1..]);
    assert_eq!(manager.history(ChangeNumber::new(1), 1, soon()).unwrap(), records[..1]);
}

fn nothing_is_lost_by_a_restart(backend: &mut dyn Backend) {
    let manager = backend.client();
    let party = join(&*manager, 1);
    place(&*manager, &Path::root(), &[1]).unwrap();
    let beat = manager.beat(party, soon()).unwrap();
    let before = view(&*manager);
    backend.restart();
    let after = view(&*backend.client());
    assert_eq!((&after.members, &after.subtrees), (&before.members, &before.subtrees));
    assert!(after.epoch == before.epoch && after.number >= before.number && after.cluster == before.cluster);
    let manager = backend.client();
    assert!(manager.beat(party, soon()).unwrap() > beat, "a heartbeat seen before is never the present one");
    assert!(manager.history(before.number, 1, soon()).unwrap()[0].number == before.number);
}

fn many_at_once_lose_no_change(backend: &mut dyn Backend) {
    const THREADS: u32 = 4;
    const JOINS: u32 = 8;
    let mut threads = Vec::new();
    let before = view(&*backend.client()).number;
    for thread in 0..THREADS {
        let manager = backend.client();
        let body = move || {
            for turn in 0..JOINS {
                let party = join(&*manager, 1 + thread * JOINS + turn);
                manager.beat(party, soon()).unwrap();
                if turn % 2 == 0 {
                    manager.propose(&Change::Leave { party }, soon()).unwrap();
                }
            }
        };
        threads.push(SystemHost.spawn("joiner", Box::new(body)).unwrap());
    }
    for thread in threads {
        thread.join().unwrap();
    }
    let records = backend.client().history(before.next(), 256, soon()).unwrap();
    let count =
        |fits: fn(&Change) -> bool| records.iter().filter(|record| fits(&record.change)).count() as u32;
    assert_eq!(count(|change| matches!(change, Change::Join { .. })), THREADS * JOINS);
    assert_eq!(count(|change| matches!(change, Change::Leave { .. })), THREADS * JOINS / 2);
    assert!(records.windows(2).all(|pair| pair[1].number == pair[0].number.next()));
}
