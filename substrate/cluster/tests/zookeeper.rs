//! The suite of `Manager` on ZooKeeper: ensembles of one and three, ended by SIGKILL where a case asks for a restart. It
//! needs Java and Debian's `libzookeeper-java`, and the feature `zookeeper`; without the packages it says that it was skipped.

#![cfg(feature = "zookeeper")]
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

#[path = "conformance/suite.rs"]
mod suite;

use cluster::zookeeper::ZooKeeper;
use cluster::{Address, Change, Error, Joining, Manager, Membership, Party, Refusal, Rules};
use format::{ChangeNumber, NodeId};
use ipc::{Host, SystemHost};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use suite::{Backend, CASES, rules};

const JAR: &str = "/usr/share/java/zookeeper.jar";

/// An ensemble of servers, each with a folder and a process of its own.
struct Ensemble {
    folder: tempfile::TempDir,
    /// Of each server: for clients, for its followers, for elections.
    ports: Vec<[u16; 3]>,
    children: Vec<Option<Child>>,
}

impl Ensemble {
    fn new(servers: usize) -> Self {
        // Ports that are free now, all held until each is known.
        let held: Vec<[TcpListener; 3]> = (0..servers)
            .map(|_| std::array::from_fn(|_| TcpListener::bind("127.0.0.1:0").unwrap()))
            .collect();
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let ports = held.iter().map(|three| three.each_ref().map(port)).collect();
        drop(held);
        let children = (0..servers).map(|_| None).collect();
        let mut ensemble = Self { folder: tempfile::tempdir().unwrap(), ports, children };
        (0..servers).for_each(|server| ensemble.start(server));
        ensemble
    }

    fn addresses(&self) -> String {
        let addresses: Vec<String> =
            self.ports.iter().map(|ports| format!("127.0.0.1:{}", ports[0])).collect();
        addresses.join(",")
    }

    fn start(&mut self, server: usize) {
        let folder = self.folder.path().join(server.to_string());
        std::fs::create_dir_all(folder.join("data")).unwrap();
        std::fs::write(folder.join("data/myid"), (server + 1).to_string()).unwrap();
        let mut settings = format!(
            "tickTime=100\ninitLimit=50\nsyncLimit=20\ndataDir={}\nclientPort={}\nclientPortAddress=127.0.0.1\n\
             admin.enableServer=false\nmaxClientCnxns=0\n",
            folder.join("data").display(),
            self.ports[server][0]
        );
        if self.ports.len() > 1 {
            for (index, ports) in self.ports.iter().enumerate() {
                settings += &format!("server.{}=127.0.0.1:{}:{}\n", index + 1, ports[1], ports[2]);
            }
        }
        std::fs::write(folder.join("zoo.cfg"), settings).unwrap();
        let log = std::fs::File::create(folder.join("log")).unwrap();
        let child = Command::new("java")
            .args(["-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", JAR])
            .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
            .arg(folder.join("zoo.cfg"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn();
        self.children[server] = Some(child.unwrap());
    }

    fn kill(&mut self, server: usize) {
        if let Some(mut child) = self.children[server].take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Drop for Ensemble {
    fn drop(&mut self) {
        (0..self.children.len()).for_each(|server| self.kill(server));
    }
}

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

fn is_there() -> bool {
    let there = Path::new(JAR).exists() && Command::new("java").arg("-version").output().is_ok();
    if !there {
        println!("zookeeper: skipped: needs zookeeper");
    }
    there
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

/// Each of three servers is killed in turn, so the leader too: what was acknowledged stays, changes go on, and a member
/// stays one without anybody's help.
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
            address: Address::default(),
        };
        // Nobody knows how it ended whose answer was lost: a join that is asked again gives the same life.
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
