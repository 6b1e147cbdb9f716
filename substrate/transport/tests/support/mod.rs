//! The beds on which the cases run: the same endpoints in process, over tcp on the loopback, over tcp between network
//! namespaces, and over verbs if [`VERBS_IP`] names an address of an RDMA device (`scripts/verbs`). Every wait has a
//! limit, and every port is a free one.

#![allow(dead_code, reason = "each test binary uses a part")]

use format::{Epoch, NodeId};
use ipc::{Host, SystemHost, Time};
use std::fs;
use std::sync::Arc;
use std::time::Duration;
use transport::{ClusterKey, Connection, Endpoint, Event, Fabric, Identity, Network, Settings};

pub mod namespaces;
pub mod relay;

/// Limit of a single wait.
pub const LIMIT: Duration = Duration::from_secs(20);

/// Settings for cases that do not depend on time: no peer is given up because the machine is busy.
pub fn patient() -> Settings {
    Settings { handshake: LIMIT, silence: Some(LIMIT), ..Settings::default() }
}

pub fn host() -> Arc<dyn Host> {
    Arc::new(SystemHost)
}

pub fn soon() -> Time {
    SystemHost.now().after(LIMIT)
}

pub fn in_ms(ms: u64) -> Time {
    SystemHost.now().after(Duration::from_millis(ms))
}

pub fn identity(node: u32) -> Identity {
    Identity { cluster: [1; 16], key: ClusterKey::new([42; 32]), node: NodeId::new(node) }
}

pub fn id(node: u32) -> NodeId {
    NodeId::new(node)
}

/// Environment variable with the address of an RDMA device of this machine.
pub const VERBS_IP: &str = "HEARTH_VERBS_IP";

/// An environment in which nodes reach each other.
pub enum Bed {
    Local(Network),
    Tcp,
    /// All nodes use this address.
    Verbs(String),
    Namespaces(namespaces::Namespaces),
}

impl Bed {
    pub fn local() -> Self {
        Self::Local(Network::new(host()))
    }

    /// Over verbs, if the machine has a device.
    pub fn verbs() -> Option<Self> {
        std::env::var(VERBS_IP).ok().map(Self::Verbs)
    }

    pub fn name(&self) -> &'static str {
        match self {
            Self::Local(_) => "in-process",
            Self::Tcp => "tcp-loopback",
            Self::Verbs(_) => "verbs",
            Self::Namespaces(_) => "tcp-namespaces",
        }
    }

    /// Creates the endpoint of a node; nodes are numbered from 1.
    pub fn endpoint_of(&self, identity: Identity, epoch: u32, settings: Settings) -> Endpoint {
        let epoch = Epoch::new(epoch);
        let node = identity.node.get();
        match self {
            Self::Local(network) => network.endpoint(&format!("n{node}"), identity, epoch, settings).unwrap(),
            Self::Tcp => Fabric::tcp("127.0.0.1").endpoint(host(), identity, epoch, settings).unwrap(),
            Self::Verbs(ip) => {
                let fabric = Fabric { provider: "verbs".to_string(), ip: ip.clone() };
                fabric.endpoint(host(), identity, epoch, settings).unwrap()
            }
            Self::Namespaces(namespaces) => namespaces.inside(node, || {
                Fabric::tcp(&namespaces.ip(node)).endpoint(host(), identity, epoch, settings).unwrap()
            }),
        }
    }

    pub fn endpoint(&self, node: u32, settings: &Settings) -> Endpoint {
        self.endpoint_of(identity(node), 1, settings.clone())
    }

    /// Runs a function as a node: the namespace in which a socket is created matters.
    pub fn inside<R: Send>(&self, node: u32, body: impl FnOnce() -> R + Send) -> R {
        match self {
            Self::Namespaces(namespaces) => namespaces.inside(node, body),
            _ => body(),
        }
    }

    /// Returns the first action of a thread of a node: see [`Self::inside`].
    pub fn entering(&self, node: u32) -> impl FnOnce() + Send + 'static {
        let entrance = match self {
            Self::Namespaces(namespaces) => Some(namespaces.entrance(node)),
            _ => None,
        };
        move || entrance.iter().for_each(|entrance| namespaces::enter(entrance))
    }

    /// Cuts the connection between two nodes.
    pub fn cut(&self, one: u32, other: u32) {
        match self {
            Self::Local(network) => {
                network.cut(&format!("n{one}"), &format!("n{other}"));
                network.cut(&format!("n{other}"), &format!("n{one}"));
            }
            Self::Tcp | Self::Verbs(_) => panic!("the loopback cannot be cut"),
            Self::Namespaces(namespaces) => namespaces.link(other, false),
        }
    }

    pub fn heal(&self, one: u32, other: u32) {
        match self {
            Self::Local(network) => {
                network.heal(&format!("n{one}"), &format!("n{other}"));
                network.heal(&format!("n{other}"), &format!("n{one}"));
            }
            Self::Tcp | Self::Verbs(_) => {}
            Self::Namespaces(namespaces) => namespaces.link(other, true),
        }
    }
}

/// Two nodes, and a connection from the first to the second.
pub struct Pair {
    pub one: Endpoint,
    pub two: Endpoint,
    pub here: Connection,
    pub there: Connection,
}

impl Pair {
    pub fn new(bed: &Bed, settings: &Settings) -> Self {
        Self::with(bed, settings, settings)
    }

    pub fn with(bed: &Bed, first: &Settings, second: &Settings) -> Self {
        let one = bed.endpoint(1, first);
        let two = bed.endpoint(2, second);
        let (here, there) = join(bed, &one, &two);
        Self { one, two, here, there }
    }
}

/// Connects node 1 to node 2.
pub fn join(bed: &Bed, one: &Endpoint, two: &Endpoint) -> (Connection, Connection) {
    let listener = bed.inside(2, || two.listen("").unwrap());
    let address = listener.address();
    let enter = bed.entering(2);
    let accepting = spawn("accepts", move || {
        enter();
        listener.accept(Some(soon())).unwrap()
    });
    let here = bed.inside(1, || one.connect(&address, id(2), soon()).unwrap());
    (here, accepting.join())
}

/// Number of times the progress threads of this process went to sleep.
pub fn sleeps_of_progress_threads() -> u64 {
    let mut sum = 0;
    for thread in fs::read_dir("/proc/self/task").unwrap() {
        let folder = thread.unwrap().path();
        // A thread may end between the two calls.
        let Ok(name) = fs::read_to_string(folder.join("comm")) else { continue };
        let Ok(status) = fs::read_to_string(folder.join("status")) else { continue };
        if name.trim() == "transport" {
            let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).unwrap();
            sum += line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
        }
    }
    sum
}

/// A thread with a result.
pub struct Running<T> {
    thread: Box<dyn ipc::Join>,
    result: Arc<std::sync::Mutex<Option<T>>>,
}

pub fn spawn<T: Send + 'static>(name: &str, body: impl FnOnce() -> T + Send + 'static) -> Running<T> {
    let result = Arc::new(std::sync::Mutex::new(None));
    let theirs = result.clone();
    let body = move || *theirs.lock().unwrap() = Some(body());
    Running { thread: SystemHost.spawn(name, Box::new(body)).unwrap(), result }
}

impl<T> Running<T> {
    pub fn join(self) -> T {
        self.thread.join().unwrap();
        let result = self.result.lock().unwrap().take();
        result.expect("a thread that ended well left its result")
    }
}

pub fn message(connection: &Connection) -> Vec<u8> {
    match connection.take(Some(soon())).unwrap() {
        Event::Message(message) => message,
        other => panic!("a message was expected, not {other:?}"),
    }
}

pub fn immediate(connection: &Connection) -> u32 {
    match connection.take(Some(soon())).unwrap() {
        Event::Immediate(value) => value,
        other => panic!("an immediate was expected, not {other:?}"),
    }
}
