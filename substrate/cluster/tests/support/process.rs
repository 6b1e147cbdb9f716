//! The embedded manager in its own process: the test binary starts itself with a test that becomes the manager if the
//! environment requests it. The process ends by SIGKILL, or by itself when its parent is gone.

use cluster::line::{EPOCH, settings};
use cluster::{Embedded, Limits, Manager, Place, Remote, Rules};
use format::{ChangeNumber, NodeId};
use ipc::{Host, Join, SystemHost, Time, Waited, Word};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use transport::{ClusterKey, Endpoint, Fabric, Identity};

const FOLDER: &str = "HEARTH_TEST_MANAGER_FOLDER";
const LEASE_MS: &str = "HEARTH_TEST_MANAGER_LEASE_MS";
const PORT: &str = "HEARTH_TEST_MANAGER_PORT";

/// The line by which the process reports its address.
const LISTENS: &str = "listens at 127.0.0.1:";

/// The machine, with one clock for everything: the times in the manager's history can be compared with deadlines, even
/// if the machine's calendar changes meanwhile.
struct OneClock;

impl Host for OneClock {
    fn now(&self) -> Time {
        SystemHost.now()
    }

    fn wall(&self) -> i64 {
        i64::try_from(SystemHost.now().as_ns()).unwrap()
    }

    fn random(&self) -> u64 {
        SystemHost.random()
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, ipc::Error> {
        SystemHost.spawn(name, body)
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        SystemHost.wait(word, expected, until)
    }

    fn wake(&self, word: &Word, count: u32) {
        SystemHost.wake(word, count);
    }
}

/// An endpoint for connections between a manager and others.
fn endpoint(node: NodeId) -> Endpoint {
    let identity = Identity { cluster: [7; 16], key: ClusterKey::new([5; 32]), node };
    Fabric::tcp("127.0.0.1").endpoint(Arc::new(SystemHost), identity, EPOCH, settings()).unwrap()
}

/// The folder of a manager, with its process.
pub struct ManagerProcess {
    folder: tempfile::TempDir,
    rules: Rules,
    /// The port at which it listens for nodes too; 0 before it has chosen one.
    port: Option<u16>,
    child: Option<Child>,
}

impl ManagerProcess {
    /// A new cluster.
    pub fn new(rules: Rules) -> Self {
        Self::with(rules, None)
    }

    /// A new cluster whose manager listens for nodes too.
    #[allow(dead_code, reason = "not every test asks over the network")]
    pub fn listening(rules: Rules) -> Self {
        Self::with(rules, Some(0))
    }

    fn with(rules: Rules, port: Option<u16>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut process = Self { folder, rules, port, child: None };
        process.start();
        process
    }

    /// A client, over the socket or the network, as the manager was started.
    #[allow(dead_code, reason = "not every test asks over the network")]
    pub fn client(&self) -> Remote {
        let host = Arc::new(SystemHost);
        match self.port {
            None => Remote::new(host, &self.socket()),
            Some(port) => {
                let address = format!("127.0.0.1:{port}");
                Remote::at(host, Place::Node { endpoint: endpoint(NodeId::new(99)), address })
            }
        }
    }

    /// A client of the manager, to which it has already answered.
    #[allow(dead_code, reason = "not every test needs it at once")]
    pub fn serving(&self) -> Remote {
        let client = self.client();
        let until = SystemHost.now().after(Duration::from_secs(30));
        // It has only just been started.
        while let Err(error) = client.watch(ChangeNumber::new(0), SystemHost.now()) {
            assert!(SystemHost.now() < until, "the manager does not start: {error}");
        }
        client
    }

    /// The path of the socket for clients.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("manager").join(cluster::SOCKET_NAME)
    }

    /// Starts it; clients try until it listens.
    pub fn start(&mut self) {
        let chooses = self.port == Some(0);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "manager_process", "--nocapture", "--test-threads=1"])
            .env(FOLDER, self.folder.path().join("manager"))
            .env(LEASE_MS, self.rules.lease().as_millis().to_string())
            .envs(self.port.map(|port| (PORT, port.to_string())))
            .stdin(Stdio::piped())
            .stdout(if chooses { Stdio::piped() } else { Stdio::null() })
            .spawn()
            .unwrap();
        if chooses {
            let said = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
            let port =
                said.filter_map(|line| line.split_once(LISTENS).map(|(_, port)| port.parse().unwrap()));
            self.port = Some(port.take(1).next().expect("it says where it listens"));
        }
        self.child = Some(child);
    }

    /// Sends SIGKILL, and waits until the process is gone.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Drop for ManagerProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The manager, if this process was started as one: until its parent closes its standard input, or dies.
pub fn serve_if_requested() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return println!("no test: what a child process runs");
    };
    let lease_ms = std::env::var(LEASE_MS).unwrap().parse().unwrap();
    let rules = Rules::new(Duration::from_millis(lease_ms), 1000).unwrap();
    let host = Arc::new(OneClock);
    let until = host.now().after(Duration::from_secs(10));
    let never = Word::new(0);
    // Held as long as the manager: its thread drives the connections.
    let nodes = std::env::var(PORT).ok().map(|port| (endpoint(NodeId::MANAGER), port));
    let listen = |(endpoint, port): &(Endpoint, String)| endpoint.listen(port).unwrap();
    let manager = loop {
        let listener = nodes.as_ref().map(listen);
        let address = listener.as_ref().map(transport::Listener::address);
        match Embedded::start(host.clone(), folder.as_ref(), rules, Limits::default(), listener) {
            Ok(manager) => {
                if let Some(address) = address {
                    println!("\n{LISTENS}{}", address.rsplit_once(':').unwrap().1);
                }
                break manager;
            }
            // The kernel has not yet released the lock and the address of the killed process.
            Err(_) if host.now() < until => {
                let _ = host.wait(&never, 0, Some(host.now().after(Duration::from_millis(5))));
            }
            Err(error) => panic!("{error}"),
        }
    };
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    manager.stop();
    drop(nodes);
}
