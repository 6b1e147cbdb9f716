//! Orders that a command gives to a node of several: one order a connection, as a line of JSON; the answer is lines of
//! JSON, of which the last has the result. Every user who may connect to the socket may give orders: its owner and
//! root.

use super::comparison::TreesCompared;
use crate::cluster::{Cluster, Node};
use crate::commands::daemon::spawn;
use crate::error::{Error, Result};
use crate::status::reach;
use ipc::{Host, SystemHost, Word};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;

/// Longest order.
const ORDER_BYTES_MAX: u64 = 64 << 10;
/// Longest answer, all lines together.
const ANSWER_BYTES_MAX: u64 = 256 << 20;
/// How long a command may take to say its order.
const ORDER: Duration = Duration::from_secs(2);
/// How long an order may take, beside what it allows itself to wait.
const ANSWER: Duration = Duration::from_secs(20);
/// How long a comparison may take until it is told how far it is: a large file takes long. A node that dies ends the connection.
const COMPARISON: Duration = Duration::from_secs(3600);
/// No connection is taken for so long when one could not be.
const PAUSE: Duration = Duration::from_millis(50);

/// An order to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    Move(MoveOrder),
    /// Compare the tree with that of this node.
    Compare(u32),
}

/// Give the lead to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveOrder {
    /// The node that leads then.
    pub to: u32,
    /// Programs that are still attached then are ended; else the order is refused.
    pub force: bool,
    /// How long programs may take to end by themselves, in ms.
    pub grace_ms: u64,
}

/// A line of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// So many inodes of so many were compared.
    Progress(u64, u64),
    Moved,
    Compared(TreesCompared),
    /// Why it was not done.
    Refused(String),
}

/// Does what is ordered, or says why not.
pub trait Obey: Send + Sync + 'static {
    /// Gives the lead to another node.
    ///
    /// # Errors
    /// Why not.
    fn move_to(&self, order: &MoveOrder) -> std::result::Result<(), String>;

    /// Compares the tree with that of another node; tells how many inodes of how many were compared.
    ///
    /// # Errors
    /// Why not.
    fn compare(
        &self,
        with: u32,
        told: &mut dyn FnMut(u64, u64),
    ) -> std::result::Result<TreesCompared, String>;
}

/// The socket of a node.
///
/// # Errors
/// It cannot be made.
pub fn listen(cluster: &Cluster, node: &Node) -> Result<UnixListener> {
    let socket = cluster.orders(node);
    let _ = fs::remove_file(&socket);
    UnixListener::bind(&socket).map_err(Error::at("listen at", &socket))
}

/// Starts the thread that takes orders, one after the other. A comparison, which takes long, holds up no other order.
///
/// # Errors
/// No thread is left.
pub fn obey(listener: UnixListener, obeys: Arc<impl Obey>) -> Result<()> {
    let body = move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else {
                SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(PAUSE)));
                continue;
            };
            let Ok(order) = read_line::<Order>(&mut reader(&stream, ORDER_BYTES_MAX), ORDER) else {
                continue;
            };
            // A command that went away after its order is not an error.
            match order {
                Order::Move(order) => {
                    let done = obeys.move_to(&order);
                    let _ = write_line(&mut stream, &done.map_or_else(Answer::Refused, |()| Answer::Moved));
                }
                Order::Compare(with) => {
                    let obeys = obeys.clone();
                    let compare = move || {
                        let told = &mut |done, total| {
                            let _ = write_line(&mut &stream, &Answer::Progress(done, total));
                        };
                        let compared = obeys.compare(with, told);
                        let answer = compared.map_or_else(Answer::Refused, Answer::Compared);
                        let _ = write_line(&mut &stream, &answer);
                    };
                    if let Err(why) = spawn("compare", compare) {
                        warn!(%why, "trees are not compared");
                    }
                }
            }
        }
    };
    spawn("orders", body)
}

/// Tells the daemon of a node to give the lead away, and waits until it has.
///
/// # Errors
/// It was refused, or cannot be told: why.
pub fn order_move(cluster: &Cluster, node: &Node, order: &MoveOrder) -> Result<()> {
    let patience = Duration::from_millis(order.grace_ms).saturating_add(ANSWER);
    match give(cluster, node, &Order::Move(*order), patience, &mut |_, _| {})? {
        Answer::Moved => Ok(()),
        _ => Err(not_an_answer(node)),
    }
}

/// Tells the daemon of a node to compare its tree with that of another one, and waits for what it finds.
///
/// # Errors
/// As [`order_move`].
pub fn order_comparison(
    cluster: &Cluster,
    node: &Node,
    with: u32,
    told: &mut dyn FnMut(u64, u64),
) -> Result<TreesCompared> {
    match give(cluster, node, &Order::Compare(with), COMPARISON, told)? {
        Answer::Compared(compared) => Ok(compared),
        _ => Err(not_an_answer(node)),
    }
}

fn not_an_answer(node: &Node) -> Error {
    Error::new(format!("the answer of node {} is to another order", node.number))
}

/// Gives an order, and waits for the last line of its answer, which is no refusal. No line may take longer than `patience`.
fn give(
    cluster: &Cluster,
    node: &Node,
    order: &Order,
    patience: Duration,
    told: &mut dyn FnMut(u64, u64),
) -> Result<Answer> {
    let number = node.number;
    let cannot = |why: std::io::Error| match why.kind() {
        ErrorKind::PermissionDenied => {
            Error::new(format!("only the user of node {number} and root may tell it what to do: {why}"))
        }
        _ => Error::new(format!("cannot tell node {number} what to do: {why}")),
    };
    let mut stream = reach(&cluster.orders(node)).map_err(cannot)?;
    write_line(&mut stream, order).map_err(cannot)?;
    let mut lines = reader(&stream, ANSWER_BYTES_MAX);
    loop {
        match read_line(&mut lines, patience).map_err(cannot)? {
            Answer::Progress(done, total) => told(done, total),
            Answer::Refused(why) => return Err(Error::new(why)),
            answer => return Ok(answer),
        }
    }
}

type Lines<'a> = BufReader<std::io::Take<&'a UnixStream>>;

fn reader(stream: &UnixStream, bytes_max: u64) -> Lines<'_> {
    BufReader::new(stream.take(bytes_max))
}

fn write_line(stream: &mut impl Write, said: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(said)?;
    line.push(b'\n');
    stream.write_all(&line)
}

fn read_line<T: for<'a> Deserialize<'a>>(lines: &mut Lines<'_>, patience: Duration) -> std::io::Result<T> {
    lines.get_ref().get_ref().set_read_timeout(Some(patience))?;
    let mut line = String::new();
    lines.read_line(&mut line)?;
    if line.is_empty() {
        return Err(std::io::Error::new(ErrorKind::UnexpectedEof, "it said nothing"));
    }
    Ok(serde_json::from_str(&line)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn node(dir: &std::path::Path) -> (Cluster, Node) {
        let settings = crate::cluster::Settings {
            medium: crate::cluster::MediumKind::Memory,
            capacity_bytes: 0,
            mount: false,
            limits: Default::default(),
            chain: None,
            nodes: Vec::new(),
        };
        let node = Node { number: 1, pool: PathBuf::new(), socket: dir.join("socket") };
        (Cluster { dir: dir.to_owned(), settings }, node)
    }

    struct Obedient;

    impl Obey for Obedient {
        fn move_to(&self, order: &MoveOrder) -> std::result::Result<(), String> {
            (order.to == 2).then_some(()).ok_or_else(|| "no such node".to_owned())
        }

        fn compare(
            &self,
            with: u32,
            told: &mut dyn FnMut(u64, u64),
        ) -> std::result::Result<TreesCompared, String> {
            (1..=3).for_each(|done| told(done, 3));
            if with == 2 {
                Ok(TreesCompared { inodes: 3, ..TreesCompared::default() })
            } else {
                Err("no".to_owned())
            }
        }
    }

    #[test]
    fn an_order_is_answered_and_what_is_none_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (cluster, node) = node(dir.path());
        let order = MoveOrder { to: 2, force: false, grace_ms: 0 };
        let cannot = order_move(&cluster, &node, &order).unwrap_err().to_string();
        assert!(cannot.starts_with("cannot tell node 1 what to do"), "{cannot}");
        obey(listen(&cluster, &node).unwrap(), Arc::new(Obedient)).unwrap();
        let mut stranger = reach(&cluster.orders(&node)).unwrap();
        stranger.write_all(b"{\"to\": -1}\n").unwrap();
        assert_eq!(stranger.read(&mut [0]).unwrap(), 0);
        order_move(&cluster, &node, &order).unwrap();
        let refused = order_move(&cluster, &node, &MoveOrder { to: 3, ..order }).unwrap_err();
        assert_eq!(refused.to_string(), "no such node");
        let mut progress = Vec::new();
        let compared = order_comparison(&cluster, &node, 2, &mut |done, total| progress.push((done, total)));
        assert_eq!((compared.unwrap().inodes, progress), (3, vec![(1, 3), (2, 3), (3, 3)]));
        assert_eq!(order_comparison(&cluster, &node, 3, &mut |_, _| {}).unwrap_err().to_string(), "no");
    }
}
