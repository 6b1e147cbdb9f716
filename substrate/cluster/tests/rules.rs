//! The rules against the invariants after any changes in any order, and all encodings against their values.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

use cluster::codec::{
    decode_change, decode_refusal, decode_view, encode_change, encode_record, encode_refusal, encode_view,
    take_record,
};
use cluster::{
    Address, Answer, Change, Event, Expeller, ManagerCore, Party, Path, Placement, PoolCopy, PoolReport,
    Record, Refusal, Rules, Subtree, View,
};
use format::{BeatVersion, ChangeNumber, Epoch, NodeId, PoolGeneration, PoolUid};
use ipc::Time;
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

const NODES: u32 = 4;

fn rules() -> Rules {
    Rules::new(Duration::from_secs(1), 500).unwrap()
}

fn node(number: u32) -> NodeId {
    NodeId::new(number)
}

fn path(index: usize) -> Path {
    Path::new([&b"/"[..], b"/mail"][index]).unwrap()
}

/// A change that may be valid: its conditions are those of the view, or those of an earlier view.
#[derive(Clone, Debug)]
struct Draft {
    kind: u8,
    who: u32,
    other: u32,
    path: usize,
    stale: bool,
    flag: bool,
    chain: Vec<(u32, bool)>,
    pool: PoolDraft,
}

/// The pool with which a node joins.
#[derive(Clone, Copy, Debug)]
enum PoolDraft {
    /// Its own pool, in a new generation.
    Own,
    /// An older copy of its own pool.
    Older,
    /// Another pool, or an empty one.
    Foreign,
    /// No pool.
    None,
    /// A pool of another cluster.
    OfOtherCluster,
    /// Its own pool, which has seen a change that the manager does not have.
    Ahead,
}

fn pool_draft() -> impl Strategy<Value = PoolDraft> {
    prop_oneof![
        150 => Just(PoolDraft::Own),
        15 => Just(PoolDraft::Older),
        15 => Just(PoolDraft::Foreign),
        5 => Just(PoolDraft::None),
        5 => Just(PoolDraft::OfOtherCluster),
        1 => Just(PoolDraft::Ahead),
    ]
}

/// The state of a node's pool. Its former life is the one in the view, if there is one.
fn pool(view: &View, number: u32, draft: PoolDraft) -> PoolReport {
    let newer = 1000 + view.number.get();
    let replicas = view.subtrees.values().filter_map(|subtree| subtree.replica(node(number)));
    let recorded = replicas.map(|replica| replica.pool.generation).max().unwrap_or_default();
    let copy = |uid: u64, generation| PoolCopy {
        uid: PoolUid::new(uid),
        generation: PoolGeneration::new(generation),
    };
    let own = u64::from(number);
    let report =
        |copy| PoolReport { cluster: Some(view.cluster), copy, former: recorded, newest: view.number };
    match draft {
        PoolDraft::Own => report(copy(own, newer)),
        PoolDraft::Older => PoolReport { former: PoolGeneration::new(7), ..report(copy(own, newer)) },
        PoolDraft::Foreign => PoolReport { copy: copy(own + 100, newer), ..PoolReport::default() },
        PoolDraft::None => PoolReport::default(),
        PoolDraft::OfOtherCluster => {
            PoolReport { cluster: Some(view.cluster + 1), ..report(copy(own, newer)) }
        }
        PoolDraft::Ahead => {
            PoolReport { newest: ChangeNumber::new(view.number.get() + 1), ..report(copy(own, newer)) }
        }
    }
}

fn draft() -> impl Strategy<Value = Draft> {
    let chain = proptest::collection::vec((1..=NODES, any::<bool>()), 0..5);
    let kind = (0u8..9, 1..=NODES, 1..=NODES, 0usize..2);
    let rest = (proptest::bool::weighted(0.1), any::<bool>(), chain, pool_draft());
    (kind, rest).prop_map(|((kind, who, other, path), (stale, flag, chain, pool))| Draft {
        kind,
        who,
        other,
        path,
        stale,
        flag,
        chain,
        pool,
    })
}

fn change(view: &View, beats: &BTreeMap<NodeId, BeatVersion>, draft: &Draft) -> Change {
    let stale = u64::from(draft.stale);
    let life_of = |number| view.members.get(&node(number)).map_or(Epoch::default(), |member| member.life);
    let by =
        Party { node: node(draft.who), life: Epoch::new(life_of(draft.who).get() + u32::from(draft.stale)) };
    let epoch = Epoch::new(view.epoch.get() + u32::from(draft.stale));
    let path = path(draft.path);
    let version = view.subtrees.get(&path).map_or(0, |subtree| subtree.version.get());
    let version = ChangeNumber::new(version + stale);
    let other = node(draft.other);
    match draft.kind {
        0 | 1 => Change::Join {
            node: node(draft.who),
            instance: view.number.get(),
            replaces: (draft.flag && by.life != Epoch::default()).then_some(by.life),
            medium: 2,
            pool: pool(view, draft.who, draft.pool),
            address: Address::new("127.0.0.1:7").unwrap(),
        },
        2 => Change::Leave { party: by },
        3 => {
            let beat = beats.get(&by.node).map_or(0, |beat| beat.get());
            Change::Expel { party: by, beat: BeatVersion::new(beat + stale), epoch }
        }
        4 => Change::Complain { by, about: other, path, epoch },
        5 => {
            let chain = draft
                .chain
                .iter()
                .map(|(number, hot)| Placement { node: node(*number), hot: *hot })
                .collect();
            let pool_of = |(number, _): &(u32, bool)| Some(view.members.get(&node(*number))?.pool.uid);
            let first = draft.chain.iter().filter_map(pool_of).find(|pool| *pool != PoolUid::NONE);
            let founder = first.filter(|_| view.subtrees.contains_key(&path) == draft.stale);
            Change::SetSubtree { path, version, chain, copies_min: 1 + u8::from(draft.flag), founder }
        }
        6 => Change::RemoveSubtree { path, version, by: draft.flag.then_some(by) },
        7 => Change::SetSync { path, version, by, node: other, in_sync: draft.flag },
        _ => Change::SetManager { path, version, by, to: other },
    }
}

/// True if the change is one by which this member gives away its role itself.
fn gives(change: &Change, who: NodeId) -> bool {
    match change {
        Change::Leave { party } | Change::Expel { party, .. } => party.node == who,
        Change::SetManager { by, .. } | Change::SetSync { by, .. } => by.node == who,
        Change::RemoveSubtree { by, .. } => by.is_some_and(|by| by.node == who),
        Change::Join { node, .. } => *node == who,
        _ => false,
    }
}

/// The invariants between a view, a change that was made, and the view after it.
fn check(before: &View, change: &Change, after: &View) {
    assert_eq!(after.number, before.number.next());
    let grown = if change.begins_epoch() { before.epoch.next() } else { before.epoch };
    assert_eq!(after.epoch, grown);
    let unknown = |path: &Path| -> Option<&Subtree> { after.subtrees.get(path) };
    for (path, subtree) in &before.subtrees {
        let now = unknown(path);
        assert!(
            now.is_none_or(|now| now == subtree || now.version == after.number),
            "a change without a version"
        );
        if let Some(manager) = subtree.manager {
            let kept = now.is_some_and(|now| now.manager == Some(manager));
            assert!(kept || gives(change, manager), "{manager} lost {path} by {change:?}");
        }
        // The lease manager decides which pool enters the in-sync set. A pool that is in it stays the same, and only a
        // join of its node changes its generation.
        for replica in now.iter().flat_map(|now| &now.chain).filter(|replica| replica.in_sync) {
            let was = subtree.replica(replica.node).filter(|replica| replica.in_sync);
            let said = matches!(change, Change::SetSync { in_sync: true, node, .. } if *node == replica.node);
            let joined = matches!(change, Change::Join { node, pool, .. }
                if *node == replica.node && pool.copy == replica.pool);
            let stayed = was
                .is_some_and(|was| was.pool == replica.pool || (joined && replica.pool.uid == was.pool.uid));
            assert!(stayed || said, "{} came in sync by {change:?}", replica.node);
        }
    }
    for (path, subtree) in after.subtrees.iter().filter(|(path, _)| !before.subtrees.contains_key(path)) {
        assert_eq!(subtree.in_sync().count(), 1, "{path} was founded by one pool");
    }
    for subtree in after.subtrees.values() {
        let nodes = |subtree: &Subtree, view: &View| -> Vec<NodeId> {
            subtree.living(&view.members).map(|replica| replica.node).collect()
        };
        let living = nodes(subtree, after);
        let heard = living.iter().any(|node| !after.members[node].refused);
        let expelled_all = before
            .subtrees
            .values()
            .any(|old| nodes(old, before).iter().all(|node| before.members[node].refused));
        assert!(living.is_empty() || heard || expelled_all, "the last copy is refused by {change:?}");
    }
}

/// The record contains the member that a complaint has refused, and whether this is the reason of an expulsion.
fn check_refused(before: &View, record: &Record, after: &View) {
    let refused = |view: &View, node| view.members.get(&node).is_some_and(|member| member.refused);
    let told = match &record.change {
        Change::Complain { .. } => {
            let newly = |node: &&NodeId| refused(after, **node) && !refused(before, **node);
            after.members.keys().find(newly).copied()
        }
        Change::Expel { party, .. } => refused(before, party.node).then_some(party.node),
        _ => None,
    };
    assert_eq!(record.refused, told, "{:?}", record.change);
    let bytes = encode_record(record);
    assert_eq!(take_record(&mut &bytes[..]).as_ref(), Ok(record));
}

fn config() -> ProptestConfig {
    let cases = if std::env::var_os("HEARTH_PROVE").is_some() { 20_000 } else { 1000 };
    let rng_seed = proptest::test_runner::RngSeed::Fixed(20);
    ProptestConfig { cases, failure_persistence: None, rng_seed, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_changes_keep_the_rules(drafts in proptest::collection::vec(draft(), 1..120)) {
        let (mut core, start) = ManagerCore::start(View::new(7, rules()), VecDeque::new(), Expeller::Member, Time::from_ns(1), 0);
        let mut replayed = View::new(7, rules());
        replayed.apply(&start.change).unwrap();
        let (mut made, mut earlier) = (1, start.change);
        for (turn, draft) in drafts.iter().enumerate() {
            let before = core.view().clone();
            let wanted = change(&before, core.beats(), draft);
            prop_assert_eq!(decode_change(&encode_change(&wanted)), Ok(wanted.clone()));
            let now = Time::from_ns(turn as u64);
            let effects = core.step(now, Event::Propose { change: wanted.clone(), wall_ns: 5 });
            match effects.answer {
                Answer::Done(done) => {
                    prop_assert_eq!(effects.records.len(), 1);
                    prop_assert_eq!(done.number, core.view().number);
                    check(&before, &wanted, core.view());
                    check_refused(&before, &effects.records[0], core.view());
                    prop_assert_eq!(replayed.apply(&effects.records[0].change), Ok(done));
                    made += 1;
                    earlier = wanted;
                }
                Answer::Refused(refusal) => {
                    prop_assert_eq!(&before, core.view());
                    prop_assert!(effects.records.is_empty());
                    prop_assert_eq!(decode_refusal(&encode_refusal(refusal)), Ok(refusal));
                }
                other => panic!("{other:?}"),
            }
            prop_assert_eq!(&replayed, core.view());
            prop_assert_eq!(decode_view(&encode_view(core.view())), Ok(core.view().clone()));
            for (node, member) in &core.view().members.clone() {
                let answer = core.step(now, Event::Beat(Party { node: *node, life: member.life })).answer;
                let refused = answer == Answer::Refused(Refusal::HeartbeatRefused);
                prop_assert_eq!(refused, member.refused);
                prop_assert!(refused || matches!(answer, Answer::Beaten(_)));
            }
        }
        prop_assert_eq!(core.history().len(), made);
        // A second request is refused for every change that was made, except a join, which gets the same life again.
        let before = core.view().clone();
        let again = core.step(Time::from_ns(999), Event::Propose { change: earlier.clone(), wall_ns: 5 });
        if !matches!(earlier, Change::Start) {
            let joined = matches!((&earlier, again.answer), (Change::Join { .. }, Answer::Done(_)));
            prop_assert!(joined || matches!(again.answer, Answer::Refused(_)), "{:?} twice", earlier);
            prop_assert_eq!(&before, core.view());
        }
    }

    #[test]
    fn any_bytes_are_a_view_a_change_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = decode_view(&bytes);
        if let Ok(change) = decode_change(&bytes) {
            prop_assert_eq!(encode_change(&change), bytes);
        }
    }
}

struct Bench {
    core: ManagerCore,
    now: Time,
}

impl Bench {
    fn new(expeller: Expeller, nodes: u32) -> Self {
        let now = Time::from_ns(1_000_000_000);
        let (core, _) = ManagerCore::start(View::new(7, rules()), VecDeque::new(), expeller, now, 0);
        let mut bench = Self { core, now };
        for number in 1..=nodes {
            bench.join(number).unwrap();
        }
        bench
    }

    fn propose(&mut self, change: Change) -> Result<Epoch, Refusal> {
        match self.core.step(self.now, Event::Propose { change, wall_ns: 0 }).answer {
            Answer::Done(done) => Ok(done.epoch),
            Answer::Refused(refusal) => Err(refusal),
            other => panic!("{other:?}"),
        }
    }

    fn join(&mut self, number: u32) -> Result<Epoch, Refusal> {
        self.join_with(number, PoolDraft::Own)
    }

    fn join_with(&mut self, number: u32, draft: PoolDraft) -> Result<Epoch, Refusal> {
        let (instance, address) = (self.core.view().number.get() + 77, Address::default());
        let replaces = self.core.view().members.get(&node(number)).map(|member| member.life);
        let pool = pool(self.core.view(), number, draft);
        self.propose(Change::Join { node: node(number), instance, replaces, medium: 1, pool, address })
    }

    fn set_sync(&mut self, by: u32, number: u32, in_sync: bool) -> Result<Epoch, Refusal> {
        let (version, by) = (self.subtree().version, self.party(by));
        self.propose(Change::SetSync { path: path(0), version, by, node: node(number), in_sync })
    }

    fn give(&mut self, by: u32, to: u32) -> Result<Epoch, Refusal> {
        let (version, by) = (self.subtree().version, self.party(by));
        self.propose(Change::SetManager { path: path(0), version, by, to: node(to) })
    }

    fn in_sync(&self) -> Vec<u32> {
        self.subtree().in_sync().map(NodeId::get).collect()
    }

    fn manager(&self) -> Option<u32> {
        self.subtree().manager.map(NodeId::get)
    }

    fn party(&self, number: u32) -> Party {
        Party { node: node(number), life: self.core.view().members[&node(number)].life }
    }

    fn subtree(&self) -> &Subtree {
        &self.core.view().subtrees[&path(0)]
    }

    /// Places the subtree; the first node of the chain founds a new one, and the others join it.
    fn place(&mut self, chain: &[u32]) -> Result<Epoch, Refusal> {
        let known = self.core.view().subtrees.get(&path(0));
        let version = known.map_or(ChangeNumber::new(0), |found| found.version);
        let founder = known.is_none().then(|| PoolUid::new(chain[0].into()));
        let placed = chain.iter().map(|number| Placement { node: node(*number), hot: true }).collect();
        let done = self.propose(Change::SetSubtree {
            path: path(0),
            version,
            chain: placed,
            copies_min: 1,
            founder,
        })?;
        for number in chain.iter().skip(1).filter(|_| founder.is_some()) {
            self.set_sync(chain[0], *number, true)?;
        }
        Ok(done)
    }

    fn expel(&mut self, number: u32) -> Result<Epoch, Refusal> {
        let (party, epoch) = (self.party(number), self.core.view().epoch);
        let beat = self.core.beats()[&party.node];
        self.propose(Change::Expel { party, beat, epoch })
    }

    fn complain(&mut self, by: u32, about: u32) -> Result<Epoch, Refusal> {
        let (by, epoch) = (self.party(by), self.core.view().epoch);
        self.propose(Change::Complain { by, about: node(about), path: path(0), epoch })
    }

    fn refused(&self) -> Vec<u32> {
        let members = self.core.view().members.iter();
        members.filter(|(_, member)| member.refused).map(|(node, _)| node.get()).collect()
    }
}

/// Two nodes: the second dies, the first dies, the second comes back. It must not be taken for a copy.
#[test]
fn a_node_without_the_newest_data_never_heads_a_subtree() {
    let mut bench = Bench::new(Expeller::Member, 2);
    bench.place(&[1, 2]).unwrap();
    bench.expel(2).unwrap();
    assert_eq!(bench.subtree().in_sync().collect::<Vec<_>>(), [node(1)]);
    bench.expel(1).unwrap();
    assert_eq!((bench.subtree().manager, bench.subtree().in_sync().count()), (None, 1));
    bench.join(2).unwrap();
    assert_eq!(bench.subtree().manager, None, "node 2 lacks what node 1 acknowledged alone");
    assert_eq!(bench.place(&[2]), Err(Refusal::LastCopy));
    bench.join(1).unwrap();
    assert_eq!(bench.subtree().manager, Some(node(1)));
}

#[test]
fn the_member_later_in_the_chain_is_refused() {
    let mut bench = Bench::new(Expeller::Member, 3);
    bench.place(&[3, 1, 2]).unwrap();
    bench.complain(2, 3).unwrap();
    assert_eq!(bench.refused(), [2]);
    assert_eq!(bench.complain(3, 2), Err(Refusal::HeartbeatRefused));
    bench.complain(3, 1).unwrap();
    assert_eq!(bench.refused(), [1, 2]);
    let party = bench.party(2);
    let answer = bench.core.step(bench.now, Event::Beat(party)).answer;
    assert_eq!(answer, Answer::Refused(Refusal::HeartbeatRefused));
    bench.expel(2).unwrap();
    bench.join(2).unwrap();
    assert_eq!(bench.refused(), [1], "a new life is heard again");
}

#[test]
fn the_last_copy_is_never_refused() {
    let mut bench = Bench::new(Expeller::Member, 2);
    bench.place(&[1, 2]).unwrap();
    bench.give(1, 2).unwrap();
    bench.set_sync(2, 1, false).unwrap();
    bench.complain(1, 2).unwrap();
    assert_eq!(bench.refused(), [1], "node 2 is later in the chain, but the only copy");
    let mut bench = Bench::new(Expeller::Member, 2);
    bench.place(&[1, 2]).unwrap();
    bench.complain(1, 2).unwrap();
    bench.expel(1).unwrap();
    assert_eq!(bench.refused(), [0u32; 0], "the other node died, so the refused one is needed");
}

/// A replica with a slow disk that is before the head in the chain: the head keeps its role.
#[test]
fn a_complaint_never_costs_the_lease_manager_its_role() {
    for (by, about) in [(1, 2), (2, 1)] {
        let mut bench = Bench::new(Expeller::Member, 2);
        bench.place(&[1, 2]).unwrap();
        bench.give(1, 2).unwrap();
        bench.complain(by, about).unwrap();
        assert_eq!(bench.refused(), [1], "node {by} complained about node {about}");
    }
}

/// One pool founds a subtree: a node in the chain with an empty pool has no copy of it.
#[test]
fn one_pool_founds_a_subtree() {
    let mut bench = Bench::new(Expeller::Member, 2);
    let place = |founder: Option<u64>| Change::SetSubtree {
        path: path(0),
        version: ChangeNumber::new(0),
        chain: [1, 2].map(|number| Placement { node: node(number), hot: true }).to_vec(),
        copies_min: 1,
        founder: founder.map(PoolUid::new),
    };
    for wrong in [None, Some(0), Some(3)] {
        assert_eq!(bench.propose(place(wrong)), Err(Refusal::Field("founder")));
    }
    bench.propose(place(Some(2))).unwrap();
    assert_eq!((bench.in_sync(), bench.manager()), (vec![2], Some(2)));
    bench.expel(2).unwrap();
    assert_eq!(bench.manager(), None, "node 1 holds nothing");
    bench.join(2).unwrap();
    assert_eq!(bench.manager(), Some(2));
}

/// The last copy comes back with another pool, with none, or with an older copy of its own: the subtree waits for the
/// pool that has all data.
#[test]
fn a_node_with_another_pool_is_no_copy() {
    for wrong in [PoolDraft::Foreign, PoolDraft::None, PoolDraft::Older] {
        let mut bench = Bench::new(Expeller::Member, 2);
        bench.place(&[1, 2]).unwrap();
        bench.expel(2).unwrap();
        bench.expel(1).unwrap();
        bench.join_with(1, wrong).unwrap();
        assert_eq!((bench.in_sync(), bench.manager()), (vec![1], None), "{wrong:?}");
        assert_eq!(bench.core.view().copies(bench.subtree()), 0);
        // Neither another node nor the node itself can change that.
        bench.join(2).unwrap();
        assert_eq!(bench.set_sync(2, 2, true), Err(Refusal::NotManager));
        assert_eq!(bench.set_sync(1, 1, false), Err(Refusal::LastCopy));
        bench.join(1).unwrap();
        assert_eq!(bench.manager(), Some(1), "its own pool is back after {wrong:?}");
    }
}

/// The same while other copies are alive: the pool loses its place in the set, and its node the role.
#[test]
fn a_restart_with_another_pool_loses_the_role() {
    for wrong in [PoolDraft::Foreign, PoolDraft::None, PoolDraft::Older] {
        let mut bench = Bench::new(Expeller::Member, 2);
        bench.place(&[1, 2]).unwrap();
        bench.join_with(1, wrong).unwrap();
        assert_eq!((bench.in_sync(), bench.manager()), (vec![2], Some(2)), "{wrong:?}");
        let mut bench = Bench::new(Expeller::Member, 2);
        bench.place(&[1, 2]).unwrap();
        bench.join_with(2, wrong).unwrap();
        assert_eq!((bench.in_sync(), bench.manager()), (vec![1], Some(1)), "{wrong:?}");
    }
    let mut bench = Bench::new(Expeller::Member, 2);
    bench.place(&[1, 2]).unwrap();
    bench.join(1).unwrap();
    assert_eq!((bench.in_sync(), bench.manager()), (vec![1, 2], Some(1)), "its own pool keeps both");
}

/// A pool of another cluster is refused; one that has seen a change that the manager lacks shows that the manager was
/// set back.
#[test]
fn a_manager_that_was_set_back_appoints_no_lease_manager() {
    let mut bench = Bench::new(Expeller::Member, 3);
    bench.place(&[1, 2]).unwrap();
    let other = bench.core.view().cluster + 1;
    assert_eq!(bench.join_with(3, PoolDraft::OfOtherCluster), Err(Refusal::ForeignPool(other)));
    let number = bench.core.view().number.next();
    bench.join_with(3, PoolDraft::Ahead).unwrap();
    assert_eq!(bench.core.view().set_back, Some(number));
    assert_eq!(bench.manager(), Some(1), "a member keeps the role");
    bench.expel(1).unwrap();
    assert_eq!(bench.manager(), None, "node 2 may have been taken out since");
    bench.join(1).unwrap();
    assert_eq!(bench.manager(), None);
    assert_eq!(bench.place(&[1, 2, 3]), Err(Refusal::SetBack(number)));
}

/// The pool of the last copy comes back in a generation that the manager does not know: an operator may accept it, and
/// no other pool, and only while no node leads.
#[test]
fn only_the_pool_of_the_last_copy_is_accepted_in_another_generation() {
    let mut bench = Bench::new(Expeller::Member, 2);
    bench.place(&[1, 2]).unwrap();
    bench.expel(2).unwrap();
    bench.expel(1).unwrap();
    bench.join(2).unwrap();
    let accept = |bench: &mut Bench, founder: u64| {
        let chain = [1, 2].map(|number| Placement { node: node(number), hot: true }).to_vec();
        let (version, founder) = (bench.subtree().version, Some(PoolUid::new(founder)));
        bench.propose(Change::SetSubtree { path: path(0), version, chain, copies_min: 1, founder }).map(drop)
    };
    assert_eq!(accept(&mut bench, 1), Err(Refusal::Field("founder")), "node 1 is no member");
    assert_eq!(accept(&mut bench, 2), Err(Refusal::Field("founder")), "node 2 had left before node 1");
    bench.join_with(1, PoolDraft::Foreign).unwrap();
    assert_eq!(accept(&mut bench, 101), Err(Refusal::Field("founder")), "another pool of node 1");
    bench.expel(1).unwrap();
    bench.join_with(1, PoolDraft::Older).unwrap();
    assert_eq!((bench.in_sync(), bench.manager()), (vec![1], None));
    accept(&mut bench, 1).unwrap();
    assert_eq!((bench.in_sync(), bench.manager()), (vec![1], Some(1)));
    bench.set_sync(1, 2, true).unwrap();
    assert_eq!(accept(&mut bench, 1), Err(Refusal::StillManager(node(1))), "a node leads");
    assert_eq!(bench.in_sync(), [1, 2]);
}

#[test]
fn no_member_is_expelled_too_early() {
    let mut bench = Bench::new(Expeller::Core, 2);
    let wait = rules().expel_after();
    assert_eq!(bench.core.next_tick(), Some(bench.now.after(wait)));
    bench.now = bench.now.after(wait - Duration::from_nanos(1));
    assert_eq!(bench.expel(1), Err(Refusal::TooEarly));
    assert!(bench.core.step(bench.now, Event::Tick { wall_ns: 0 }).records.is_empty());
    let party = bench.party(1);
    assert!(matches!(bench.core.step(bench.now, Event::Beat(party)).answer, Answer::Beaten(_)));
    bench.now = bench.now.after(Duration::from_nanos(1));
    let records = bench.core.step(bench.now, Event::Tick { wall_ns: 0 }).records;
    assert_eq!(records.len(), 1, "the heartbeats of node 1 arrived, those of node 2 did not");
    assert!(matches!(records[0].change, Change::Expel { party, .. } if party.node == node(2)));
    let answer = bench.core.step(bench.now, Event::Propose { change: Change::Start, wall_ns: 0 }).answer;
    assert_eq!(answer, Answer::Refused(Refusal::Internal));
}

/// A heartbeat that an expeller saw before the manager restarted is never the current one afterwards.
#[test]
fn a_heartbeat_version_never_repeats() {
    let mut bench = Bench::new(Expeller::Member, 1);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..3 {
        for _ in 0..5 {
            let party = bench.party(1);
            let Answer::Beaten(beat) = bench.core.step(bench.now, Event::Beat(party)).answer else {
                panic!("refused")
            };
            assert!(seen.insert(beat) && seen.last() == Some(&beat));
        }
        let view = bench.core.view().clone();
        let history = bench.core.history().clone();
        (bench.core, _) = ManagerCore::start(view, history, Expeller::Member, bench.now, 0);
    }
}
