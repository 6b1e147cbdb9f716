//! The suite of `Manager` on ZooKeeper: ensembles of one and three servers, ended by SIGKILL where a case needs a
//! restart. It needs Java, Debian's `libzookeeper-java` and the feature `zookeeper`; without the packages it prints
//! that it was skipped. Servers that are cut off from each other run in network namespaces, which need root.

#![cfg(feature = "zookeeper")]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

#[path = "support/ensemble.rs"]
mod ensemble;
#[path = "../../transport/tests/support/namespaces.rs"]
mod namespaces;
#[path = "conformance/suite.rs"]
mod suite;

use cluster::zookeeper::ZooKeeper;
use cluster::{
    Address, Change, Error, Joining, Manager, Membership, Party, Path, Placement, PoolCopy, PoolReport,
    Refusal, Rules,
};
use ensemble::{Ensemble, is_there};
use format::{ChangeNumber, NodeId, PoolGeneration, PoolUid};
use ipc::{Host, SystemHost, Time};
use namespaces::Namespaces;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use suite::{Backend, CASES, rules};

/// One cluster on the ensemble, under a root of its own.
struct Zoo<'a> {
    ensemble: &'a Mutex<Ensemble>,
    root: String,
    rules: Rules,
    clients: Mutex<Vec<Arc<ZooKeeper>>>,
}

impl<'a> Zoo<'a> {
    fn new(ensemble: &'a Mutex<Ensemble>, root: &str, rules: Rules) -> Self {
        Self { ensemble, root: format!("/{root}"), rules, clients: Mutex::default() }
    }
}

impl Backend for Zoo<'_> {
    fn client(&self) -> Arc<dyn Manager> {
        let addresses = self.ensemble.lock().unwrap().addresses();
        let until = SystemHost.now().after(Duration::from_secs(60));
        let client =
            ZooKeeper::connect(Arc::new(SystemHost), &addresses, &self.root, self.rules, until).unwrap();
        client.start_expeller().unwrap();
        self.clients.lock().unwrap().push(client.clone());
        client
    }

    fn restart(&mut self) {
        let mut ensemble = self.ensemble.lock().unwrap();
        let servers = ensemble.children.len();
        (0..servers).for_each(|server| ensemble.kill(server));
        (0..servers).for_each(|server| ensemble.start(server));
    }
}

impl Drop for Zoo<'_> {
    fn drop(&mut self) {
        self.clients.lock().unwrap().drain(..).for_each(|client| client.stop());
    }
}

fn run(servers: usize) {
    if !is_there() {
        return;
    }
    let ensemble = Mutex::new(Ensemble::new(servers));
    for (case, lease_ms, body) in CASES {
        let began = SystemHost.now();
        body(&mut Zoo::new(&ensemble, case, rules(lease_ms)));
        println!("zookeeper x{servers}: {case}: ok, {} ms", SystemHost.now().since(began).as_millis());
    }
    println!("zookeeper x{servers}: {} cases", CASES.len());
}

#[test]
fn zookeeper_with_one_server() {
    run(1);
}

#[test]
fn zookeeper_with_three_servers() {
    run(3);
}

/// Each of three servers is killed in turn, including the leader: acknowledged changes are durable, new changes are
/// made, and a member keeps its membership without help.
#[test]
fn zookeeper_loses_its_servers_one_by_one() {
    if !is_there() {
        return;
    }
    let rounds = if std::env::var_os("HEARTH_PROVE").is_some() { 50 } else { 3 };
    let ensemble = Mutex::new(Ensemble::new(3));
    // Long enough for an election on a busy machine.
    let zoo = Zoo::new(&ensemble, "kills", rules(30_000));
    let (judge, other) = (zoo.client(), zoo.client());
    let soon = || SystemHost.now().after(Duration::from_secs(60));
    let joining = |number| Joining {
        node: NodeId::new(number),
        replaces: None,
        medium: 2,
        pool: PoolReport::default(),
        address: Address::default(),
    };
    let member = Membership::join(Arc::new(SystemHost), judge.clone(), &joining(1), soon()).unwrap();
    let party = member.party().unwrap();
    let mut last = judge.watch(ChangeNumber::new(0), SystemHost.now()).unwrap();
    for round in 0..rounds {
        let server = round % 3;
        ensemble.lock().unwrap().kill(server);
        let change = Change::Join {
            node: NodeId::new(2),
            instance: SystemHost.random(),
            replaces: None,
            medium: 2,
            pool: PoolReport::default(),
            address: Address::default(),
        };
        // If the answer to a join was lost, a repeated request gets the same life.
        let until = soon();
        let done = loop {
            match other.propose(&change, soon()) {
                Err(Error::Unknown) if SystemHost.now() < until => {}
                done => break done.unwrap(),
            }
        };
        ensemble.lock().unwrap().start(server);
        let joined = Party { node: NodeId::new(2), life: done.epoch };
        let view = judge.watch(ChangeNumber::new(done.number.get() - 1), soon()).unwrap();
        assert!(view.is_member(joined) && view.number > last.number && view.epoch > last.epoch);
        last = view;
        loop {
            match other.propose(&Change::Leave { party: joined }, soon()) {
                Err(Error::Unknown) if SystemHost.now() < until => {}
                Ok(_) | Err(Error::Refused(Refusal::NotMember)) => break,
                Err(error) => panic!("{error}"),
            }
        }
        judge.beat(party, soon()).unwrap();
        assert_eq!(member.party(), Some(party));
    }
    member.stop();
    println!("zookeeper x3: {rounds} servers killed in turn, at number {} epoch {}", last.number, last.epoch);
}

/// A member that reaches only one server, which runs in the same namespace.
struct Cut {
    zoo: Arc<ZooKeeper>,
    member: Arc<Membership>,
}

fn join_at(
    namespaces: &Namespaces,
    address: &str,
    node: u32,
    server: usize,
    root: &str,
    rules: Rules,
) -> Cut {
    let soon = SystemHost.now().after(Duration::from_secs(60));
    // Threads and sockets that are created in here belong to the namespace.
    namespaces.inside(server as u32 + 1, || {
        let zoo = ZooKeeper::connect(Arc::new(SystemHost), address, root, rules, soon).unwrap();
        zoo.start_expeller().unwrap();
        let copy = PoolCopy { uid: PoolUid::new(node.into()), generation: PoolGeneration::new(1) };
        let (pool, address) = (PoolReport { copy, ..PoolReport::default() }, Address::default());
        let joining = Joining { node: NodeId::new(node), replaces: None, medium: 2, pool, address };
        let member = Membership::join(Arc::new(SystemHost), zoo.clone(), &joining, soon).unwrap();
        Cut { zoo, member }
    })
}

fn wait_for(what: &str, mut there: impl FnMut() -> bool) -> Time {
    let limit = SystemHost.now().after(Duration::from_secs(90));
    while !there() {
        assert!(SystemHost.now() < limit, "{what} never came");
        let pause = SystemHost.now().after(Duration::from_millis(2));
        let _ = SystemHost.wait(&ipc::Word::new(0), 0, Some(pause));
    }
    SystemHost.now()
}

/// A server is cut off together with a member in its namespace: a follower from its leader, and a leader from its
/// followers. The member has stopped before the other one serves.
#[test]
fn zookeeper_cut_in_two_fences_the_member_on_the_smaller_side() {
    let Some(namespaces) = Some(3).filter(|_| is_there()).and_then(Namespaces::new) else {
        return println!("zookeeper: skipped: needs zookeeper, root, ip");
    };
    let rounds = if std::env::var_os("HEARTH_PROVE").is_some() { 10 } else { 2 };
    let rules = rules(5000);
    // Server 0 is in namespace 1.
    let mut ensemble = Ensemble::at((1..=3).map(|node| namespaces.ip(node)));
    for server in 0..3 {
        namespaces.inside(server as u32 + 1, || ensemble.start(server));
    }
    let leads = |server: usize| namespaces.inside(server as u32 + 1, || ensemble.leads(server));
    for round in 0..rounds {
        let mut leader = 0;
        wait_for("a leader", || (0..3).find(|server| leads(*server)).map(|server| leader = server).is_some());
        let (cut, other) =
            if round % 2 == 0 { ((leader + 1) % 3, leader) } else { (leader, (leader + 1) % 3) };
        let root = format!("/cut{round}");
        let first = join_at(&namespaces, &ensemble.address(cut), 1, cut, &root, rules);
        let second = join_at(&namespaces, &ensemble.address(other), 2, other, &root, rules);
        let path = Path::root();
        let chain = [1, 2].map(|node| Placement { node: NodeId::new(node), hot: true }).to_vec();
        let (version, founder) = (ChangeNumber::new(0), Some(PoolUid::new(1)));
        let place = Change::SetSubtree { path: path.clone(), version, chain, copies_min: 1, founder };
        let soon = || SystemHost.now().after(Duration::from_secs(60));
        namespaces.inside(other as u32 + 1, || {
            let version = second.zoo.propose(&place, soon()).unwrap().number;
            let (path, by) = (path.clone(), first.member.party().unwrap());
            let join = Change::SetSync { path, version, by, node: NodeId::new(2), in_sync: true };
            second.zoo.propose(&join, soon()).unwrap()
        });
        wait_for("the first lease manager", || first.member.may_serve(&path));
        namespaces.link(cut as u32 + 1, false);
        let at = SystemHost.now();
        let mut valid_until = at;
        let out = wait_for("the next lease manager", || {
            valid_until = first.member.valid_until().map_or(valid_until, |until| until.max(valid_until));
            assert!(!(first.member.may_serve(&path) && second.member.may_serve(&path)), "two serve");
            second.member.may_serve(&path)
        });
        println!(
            "zookeeper, round {round}, {} cut off: valid until {} us, the other serves {} us, {} ms after the cut",
            if cut == leader { "the leader" } else { "a follower" },
            valid_until.as_ns() / 1000,
            out.as_ns() / 1000,
            out.since(at).as_millis()
        );
        assert!(valid_until < out, "the member could still have served");
        namespaces.link(cut as u32 + 1, true);
        wait_for("the end of the membership", || first.member.party().is_none());
        for side in [first, second] {
            side.member.stop();
            side.zoo.stop();
        }
    }
    println!("zookeeper x3: {rounds} cuts, the member on the smaller side had stopped every time");
}
