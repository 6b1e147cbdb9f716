//! Complete schedules of membership, with a manager in its own process, members with pools, and links between them: the
//! manager is away for a moment, and for three leases; two nodes are both alone; a third member joins and leaves.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

#[path = "support/process.rs"]
mod process;
#[path = "support/relay.rs"]
mod relay;

use cluster::{
    Address, Change, Manager, Membership, Party, Path, Placement, PoolCopy, PoolIdentity, PoolReport, Remote,
    Rules, View,
};
use format::{ChangeNumber, NodeId, PoolGeneration, PoolUid};
use ipc::{Host, SystemHost, Time, Word};
use pmem::recorded::Recorder;
use process::ManagerProcess;
use relay::{Direction, Relay};
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;
use transport::{ClusterKey, Connection, Endpoint, Event, Identity, Network, Settings};

const FIRST: NodeId = NodeId::new(1);
const SECOND: NodeId = NodeId::new(2);
const THIRD: NodeId = NodeId::new(3);

fn soon() -> Time {
    SystemHost.now().after(Duration::from_secs(30))
}

fn pause(duration: Duration) {
    let _ = SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(duration)));
}

fn until(what: impl Fn() -> bool) {
    let end = soon();
    while !what() {
        assert!(SystemHost.now() < end, "the condition never held");
        pause(Duration::from_millis(5));
    }
}

/// A node with a pool, as a member.
struct Node {
    id: NodeId,
    recorder: Recorder,
    manager: Arc<Remote>,
    member: Arc<Membership>,
}

impl Node {
    fn join(id: NodeId, manager: &FilePath) -> Self {
        let recorder = Recorder::new();
        let manager = Arc::new(Remote::new(Arc::new(SystemHost), manager));
        let member = join(id, &recorder, &manager);
        Self { id, recorder, manager, member }
    }

    /// The successor process: the former membership has ended.
    fn join_again(&mut self) {
        self.member.stop();
        self.member = join(self.id, &self.recorder, &self.manager);
    }

    fn serves(&self) -> bool {
        self.member.may_serve(&Path::root())
    }

    fn copies(&self) -> Vec<NodeId> {
        let view = self.member.view().unwrap();
        view.subtrees[&Path::root()].in_sync().collect()
    }
}

fn pool_of(node: NodeId) -> PoolUid {
    PoolUid::new(100 + u64::from(node.get()))
}

fn join(node: NodeId, recorder: &Recorder, manager: &Arc<Remote>) -> Arc<Membership> {
    let identity = PoolIdentity::open(&recorder.medium(), pool_of(node), node).unwrap();
    Membership::join_pool(Arc::new(SystemHost), manager.clone(), identity, (2, Address::default()), soon())
        .unwrap()
}

/// Node 1 founds the tree, and lets node 2 join it.
fn found(first: &Node, second: &Node) {
    let chain = vec![Placement { node: FIRST, hot: true }, Placement { node: SECOND, hot: true }];
    let (path, version, founder) = (Path::root(), ChangeNumber::new(0), Some(pool_of(FIRST)));
    let change = Change::SetSubtree { path: path.clone(), version, chain, copies_min: 1, founder };
    let version = first.manager.propose(&change, soon()).unwrap().number;
    let by = first.member.party().unwrap();
    let change = Change::SetSync { path, version, by, node: SECOND, in_sync: true };
    let number = first.manager.propose(&change, soon()).unwrap().number;
    let has = |node: &Node| node.member.view().is_some_and(|view| view.number >= number);
    until(|| first.serves() && has(first) && has(second) && second.member.valid_until().is_some());
}

fn start(lease: Duration) -> ManagerProcess {
    let manager = ManagerProcess::new(Rules::new(lease, 1000).unwrap());
    drop(manager.serving());
    manager
}

/// The state that must not change while the manager is away.
fn agreed(node: &Node) -> (Option<Party>, format::Epoch, Vec<NodeId>, ChangeNumber) {
    let view = node.member.view().unwrap();
    (node.member.party(), view.epoch, node.copies(), view.subtrees[&Path::root()].version)
}

#[test]
fn a_manager_killed_for_a_moment_interrupts_nothing() {
    let lease = Duration::from_secs(6);
    let mut manager = start(lease);
    let (first, second) = (Node::join(FIRST, &manager.socket()), Node::join(SECOND, &manager.socket()));
    found(&first, &second);
    let before = (agreed(&first), agreed(&second));
    manager.kill();
    let held = [&first, &second].map(|node| node.member.valid_until().unwrap());
    manager.start();
    // Until heartbeats of both were written after that.
    let extended = |(node, held): (&Node, Time)| node.member.valid_until().unwrap() > held.after(lease / 2);
    until(|| {
        assert!(first.serves(), "the head stopped");
        extended((&first, held[0])) && extended((&second, held[1]))
    });
    assert_eq!((agreed(&first), agreed(&second)), before);
    [&first, &second].iter().for_each(|node| node.member.stop());
}

#[test]
fn members_stop_without_a_manager_for_three_leases_and_then_continue() {
    let lease = Duration::from_secs(2);
    let mut manager = start(lease);
    let (first, second) = (Node::join(FIRST, &manager.socket()), Node::join(SECOND, &manager.socket()));
    found(&first, &second);
    let before = (agreed(&first), agreed(&second));
    manager.kill();
    let back = SystemHost.now().after(lease * 3);
    let ends = first.member.valid_until().unwrap();
    assert!(ends < back);
    until(|| !first.serves());
    assert!(SystemHost.now() >= ends, "it stopped although its membership was still valid");
    while SystemHost.now() < back {
        assert!(!first.serves() && !second.serves(), "a node serves without a manager");
        pause(Duration::from_millis(5));
    }
    manager.start();
    until(|| first.serves());
    assert_eq!((agreed(&first), agreed(&second)), before, "something was lost");
    assert!(!second.serves());
    [&first, &second].iter().for_each(|node| node.member.stop());
}

/// Both are cut off from the manager, so they stop, and both are expelled. The copy that was expelled last has all
/// data, and it alone may lead when they come back, in any order.
#[test]
fn the_last_copy_leads_after_two_nodes_were_both_alone() {
    let manager = start(Duration::from_secs(2));
    let relays = [Relay::start(&manager.socket()), Relay::start(&manager.socket())];
    let (mut first, mut second) =
        (Node::join(FIRST, relays[0].socket()), Node::join(SECOND, relays[1].socket()));
    found(&first, &second);
    let both = [Direction::Requests, Direction::Answers];
    relays.iter().for_each(|relay| relay.cut(&both));
    let outside = manager.client();
    let view = || outside.watch(ChangeNumber::new(0), soon()).unwrap();
    until(|| view().members.is_empty());
    assert!(!first.serves() && !second.serves(), "a node that was expelled serves");
    let alone: Vec<NodeId> = view().subtrees[&Path::root()].in_sync().collect();
    let [last] = alone[..] else { panic!("several last copies: {alone:?}") };
    relays.iter().for_each(|relay| relay.cut(&[]));
    until(|| first.member.party().is_none() && second.member.party().is_none());
    let (leads, follows) = if last == FIRST { (&mut first, &mut second) } else { (&mut second, &mut first) };
    // The other node comes first: it does not get the free role.
    follows.join_again();
    until(|| follows.member.view().is_some());
    assert_eq!(head(&view()), None, "a pool leads that lacks data of the last copy");
    leads.join_again();
    until(|| leads.serves());
    assert_eq!((leads.copies(), head(&view())), (vec![last], Some(last)));
    assert!(!follows.serves());
    [&first, &second].iter().for_each(|node| node.member.stop());
    relays.into_iter().for_each(Relay::stop);
}

fn head(view: &View) -> Option<NodeId> {
    view.subtrees[&Path::root()].manager
}

/// Node 3 joins and leaves again and again; the two other nodes advance with every view, and their link stays.
#[test]
fn a_member_that_comes_and_goes_interrupts_no_link() {
    let manager = start(Duration::from_secs(60));
    let (first, second) = (Node::join(FIRST, &manager.socket()), Node::join(SECOND, &manager.socket()));
    found(&first, &second);
    let network = Network::new(Arc::new(SystemHost));
    let ends = [&first, &second].map(|node| endpoint(&network, node));
    let (here, there) = connect(&ends);
    let outside = manager.client();
    let copy = PoolCopy { uid: pool_of(THIRD), generation: PoolGeneration::new(1) };
    let pool = PoolReport { copy, ..PoolReport::default() };
    for round in 0..20u8 {
        let (instance, replaces, address) = (u64::from(round) + 1, None, Address::default());
        let change = Change::Join { node: THIRD, instance, replaces, medium: 2, pool, address };
        let joined = outside.propose(&change, soon()).unwrap();
        follow(&ends, [&first, &second], joined.number);
        let party = Party { node: THIRD, life: joined.epoch };
        let left = outside.propose(&Change::Leave { party }, soon()).unwrap();
        follow(&ends, [&first, &second], left.number);
        here.send(&[round], Some(soon())).unwrap();
        assert!(matches!(there.take(Some(soon())), Ok(Event::Message(message)) if message[..] == [round]));
    }
    assert_eq!((here.ended(), there.ended()), (None, None));
    // A new life of its own ends the link: messages of the former life do not arrive any more.
    let mut second = second;
    second.join_again();
    until(|| {
        first.member.view().unwrap().lives()
            == second.member.view().map(|view| view.lives()).unwrap_or_default()
    });
    let view = first.member.view().unwrap();
    ends[0].advance(view.epoch, Some(view.lives()));
    assert!(here.ended().is_some());
    [&first, &second].iter().for_each(|node| node.member.stop());
}

/// Each end advances to the view with this change, or a later one.
fn follow(ends: &[Endpoint; 2], nodes: [&Node; 2], number: ChangeNumber) {
    for (end, node) in ends.iter().zip(nodes) {
        until(|| node.member.view().is_some_and(|view| view.number >= number));
        let view = node.member.view().unwrap();
        end.advance(view.epoch, Some(view.lives()));
    }
}

fn endpoint(network: &Network, node: &Node) -> Endpoint {
    let identity = Identity { cluster: [7; 16], key: ClusterKey::new([5; 32]), node: node.id };
    let view = node.member.view().unwrap();
    let end = network.endpoint(&node.id.to_string(), identity, view.epoch, Settings::default()).unwrap();
    end.advance(view.epoch, Some(view.lives()));
    end
}

/// A link from the first end to the second.
fn connect([one, two]: &[Endpoint; 2]) -> (Connection, Connection) {
    let listener = two.listen("").unwrap();
    let (one, address) = (one.clone(), listener.address());
    let (sender, made) = std::sync::mpsc::channel();
    let body = move || sender.send(one.connect(&address, SECOND, soon()).unwrap()).unwrap();
    let connecting = SystemHost.spawn("connects", Box::new(body)).unwrap();
    let there = listener.accept(Some(soon())).unwrap();
    connecting.join().unwrap();
    (made.recv().unwrap(), there)
}

/// The manager's process: this test binary again, started with the environment of a manager.
#[test]
fn manager_process() {
    process::serve_if_requested();
}
