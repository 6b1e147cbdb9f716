//! A head and the other nodes of its chain, with requests to the manager and views that come late or never: the head always
//! counts each node that the manager calls in sync, so no fsync is acknowledged without it (`docs/replication.md`, C8).

#![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]

use cluster::{
    Address, Answer, Change, CopyFacts, Event, Expeller, LagBound, ManagerCore, Party, Path, PeerFacts,
    PeerStep, Peers, Placement, PoolCopy, PoolReport, Rules, View,
};
use format::{NodeId, PoolGeneration, PoolUid};
use ipc::Time;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

const HEAD: NodeId = NodeId::new(1);
const OTHERS: [NodeId; 2] = [NodeId::new(2), NodeId::new(3)];
const PATIENCE: Duration = Duration::from_millis(250);
const LAG: LagBound = LagBound { bytes: 1 << 20, time: Duration::from_secs(1) };

/// SplitMix64.
struct Draws(u64);

impl Draws {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (value ^ value >> 31) % bound
    }

    fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }
}

fn join(core: &mut ManagerCore, node: NodeId, instance: u64) -> Party {
    let copy =
        PoolCopy { uid: PoolUid::new(u64::from(node.get())), generation: PoolGeneration::new(instance) };
    let former = core.view().members.get(&node).map(|member| member.pool.generation).unwrap_or_default();
    let replaces = core.view().members.get(&node).map(|member| member.life);
    let pool = PoolReport { copy, former, ..PoolReport::default() };
    let address = Address::default();
    let change = Change::Join { node, instance, replaces, medium: 0, pool, address };
    let effects = core.step(Time::from_ns(1), Event::Propose { change, wall_ns: 0 });
    let Answer::Done(done) = effects.answer else { panic!("{effects:?}") };
    Party { node, life: done.epoch }
}

/// A chain of three of which the first founds the tree.
fn begin() -> (ManagerCore, Party) {
    let rules = Rules::new(Duration::from_secs(1), 0).unwrap();
    let (mut core, _) =
        ManagerCore::start(View::new(1, rules), VecDeque::new(), Expeller::Core, Time::from_ns(1), 0);
    let head = join(&mut core, HEAD, 1);
    for node in OTHERS {
        let _ = join(&mut core, node, 1);
    }
    let chain = [HEAD].iter().chain(&OTHERS).map(|node| Placement { node: *node, hot: true }).collect();
    let (path, version, founder) = (Path::root(), Default::default(), Some(PoolUid::new(1)));
    let change = Change::SetSubtree { path, version, chain, copies_min: 1, founder };
    core.step(Time::from_ns(1), Event::Propose { change, wall_ns: 0 });
    (core, head)
}

/// How often each of the interesting things happened.
#[derive(Debug, Default)]
struct Events {
    in_sync: u64,
    lost: u64,
    asked_anew: u64,
    forgotten: u64,
}

fn walk(seed: u64, seen: &mut Events) {
    let mut draws = Draws(seed);
    let (mut core, head) = begin();
    let mut peers = Peers::new(PATIENCE, LAG, PATIENCE);
    let mut view = core.view().clone();
    // Copies that the daemon counts, requests on their way, and nodes that are being connected.
    let mut counted: BTreeMap<NodeId, CopyFacts> = BTreeMap::new();
    let mut requests: Vec<Change> = Vec::new();
    let mut adding: Vec<NodeId> = Vec::new();
    let (mut now, mut instance) = (Time::from_ns(1), 2);
    for _ in 0..400 {
        now = now.after(Duration::from_millis(draws.below(200)));
        match draws.below(8) {
            0 | 1 => view = core.view().clone(),
            2 if !requests.is_empty() => {
                let change = requests.swap_remove(draws.below(requests.len() as u64) as usize);
                core.step(now, Event::Propose { change, wall_ns: 0 });
            }
            // It never arrives.
            3 if draws.one_in(3) => drop(requests.pop()),
            4 => {
                let node = OTHERS[draws.below(2) as usize];
                if draws.one_in(2) {
                    instance += 1;
                    join(&mut core, node, instance);
                } else if let Some(member) = core.view().members.get(&node) {
                    let party = Party { node, life: member.life };
                    core.step(now, Event::Propose { change: Change::Leave { party }, wall_ns: 0 });
                }
            }
            5 => {
                for facts in counted.values_mut() {
                    facts.connected = !draws.one_in(3);
                    facts.stalled = draws.one_in(3).then_some(PATIENCE * 2);
                    facts.behind_bytes = draws.below(2) * LAG.bytes * 2;
                }
            }
            6 if !adding.is_empty() => {
                let node = adding.pop().unwrap();
                if draws.one_in(3) {
                    peers.added(now, node, Err(("no".to_owned(), None)));
                } else {
                    let well = CopyFacts {
                        connected: true,
                        level: true,
                        stalled: None,
                        behind_bytes: 0,
                        executed_bytes: 0,
                    };
                    counted.insert(node, well);
                    peers.added(now, node, Ok(()));
                }
            }
            _ => {
                let subtree = &view.subtrees[&Path::root()];
                let version = subtree.version;
                for replica in subtree.chain.iter().filter(|replica| replica.node != HEAD) {
                    let node = replica.node;
                    let life = view.members.get(&node).map(|member| member.life);
                    let copy = counted.get(&node).copied();
                    let facts = PeerFacts { life, in_sync: replica.in_sync, version, copy };
                    let path = Path::root();
                    match peers.step(now, node, &facts) {
                        PeerStep::Nothing => {}
                        PeerStep::Add => adding.push(node),
                        PeerStep::Forget => {
                            counted.remove(&node);
                            seen.forgotten += 1;
                        }
                        PeerStep::AskAnew => {
                            seen.asked_anew += 1;
                            requests.push(Change::SetManager { path, version, by: head, to: HEAD });
                        }
                        step => {
                            let in_sync = step == PeerStep::SaySync;
                            seen.lost += u64::from(!in_sync);
                            requests.push(Change::SetSync { path, version, by: head, node, in_sync });
                        }
                    }
                }
            }
        }
        for node in core.view().subtrees[&Path::root()].in_sync().filter(|node| *node != HEAD) {
            seen.in_sync += 1;
            assert!(counted.contains_key(&node), "seed {seed}: node {node} is in sync and does not count");
        }
    }
}

#[test]
fn what_the_manager_calls_in_sync_counts_at_the_head_whatever_is_late_or_lost() {
    let mut seen = Events::default();
    for seed in 0..2_000 {
        walk(seed, &mut seen);
    }
    println!("{seen:?}");
    let Events { in_sync, lost, asked_anew, forgotten } = seen;
    assert!(in_sync.min(lost).min(asked_anew).min(forgotten) > 500);
}
