//! What a node of several is told to do by a command: one order a connection, a line of JSON, and a line of JSON as the answer.
//! Who may connect to the socket may order: its owner and root.

use crate::cluster::{Cluster, Node};
use crate::commands::daemon::spawn;
use crate::error::{Error, Result};
use crate::status::reach;
use ipc::{Host, SystemHost, Word};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

/// Longest line.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// How long a command may take to say its order.
const ORDER: Duration = Duration::from_secs(2);
/// How long an order may take, beside what it allows itself to wait.
const ANSWER: Duration = Duration::from_secs(20);
/// No connection is taken for so long when one could not be.
const PAUSE: Duration = Duration::from_millis(50);

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

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderAnswer {
    /// Why it was not done; none if it was.
    pub refused: Option<String>,
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

/// Starts the thread that takes orders, one after the other.
///
/// # Errors
/// No thread is left.
pub fn obey(
    listener: UnixListener,
    act: impl Fn(&MoveOrder) -> std::result::Result<(), String> + Send + 'static,
) -> Result<()> {
    let body = move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else {
                SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(PAUSE)));
                continue;
            };
            let Ok(order) = read_line::<MoveOrder>(&stream, ORDER) else { continue };
            let answer = OrderAnswer { refused: act(&order).err() };
            // Whoever gave the order and went away is not missed.
            let _ = write_line(&mut stream, &answer);
        }
    };
    spawn("orders", body)
}

/// Gives an order to the daemon of a node, and waits for what comes of it.
///
/// # Errors
/// It was refused, or cannot be given: why.
pub fn give(cluster: &Cluster, node: &Node, order: &MoveOrder) -> Result<()> {
    let number = node.number;
    let cannot = |why: std::io::Error| match why.kind() {
        ErrorKind::PermissionDenied => {
            Error::new(format!("only the user of node {number} and root may tell it what to do: {why}"))
        }
        _ => Error::new(format!("cannot tell node {number} what to do: {why}")),
    };
    let mut stream = reach(&cluster.orders(node)).map_err(cannot)?;
    write_line(&mut stream, order).map_err(cannot)?;
    let patience = Duration::from_millis(order.grace_ms).saturating_add(ANSWER);
    let answer: OrderAnswer = read_line(&stream, patience).map_err(cannot)?;
    answer.refused.map_or(Ok(()), |why| Err(Error::new(why)))
}

fn write_line(stream: &mut UnixStream, said: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(said)?;
    line.push(b'\n');
    stream.write_all(&line)
}

fn read_line<T: for<'a> Deserialize<'a>>(stream: &UnixStream, patience: Duration) -> std::io::Result<T> {
    stream.set_read_timeout(Some(patience))?;
    let mut line = String::new();
    BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut line)?;
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

    #[test]
    fn an_order_is_answered_and_what_is_none_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (cluster, node) = node(dir.path());
        let order = MoveOrder { to: 2, force: false, grace_ms: 0 };
        let cannot = give(&cluster, &node, &order).unwrap_err().to_string();
        assert!(cannot.starts_with("cannot tell node 1 what to do"), "{cannot}");
        let act = |order: &MoveOrder| (order.to == 2).then_some(()).ok_or_else(|| "no such node".to_owned());
        obey(listen(&cluster, &node).unwrap(), act).unwrap();
        let mut stranger = reach(&cluster.orders(&node)).unwrap();
        stranger.write_all(b"{\"to\": -1}\n").unwrap();
        assert_eq!(stranger.read(&mut [0]).unwrap(), 0);
        give(&cluster, &node, &order).unwrap();
        let refused = give(&cluster, &node, &MoveOrder { to: 3, ..order }).unwrap_err();
        assert_eq!(refused.to_string(), "no such node");
    }
}
