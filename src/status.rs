//! The report of a daemon about itself: every client that connects to the control socket gets one JSON document.

use crate::chain::told::ChainStatus;
use ipc::{Host, SystemHost};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Longest answer.
const ANSWER_BYTES_MAX: u64 = 16 << 20;
/// Bytes that are read at once.
const PIECE_BYTES: usize = 64 << 10;
/// The shortest wait for a piece: none at all would be no limit.
const WAIT_MIN: Duration = Duration::from_millis(1);

/// A program that is attached.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct ProgramStatus {
    /// Process.
    pub pid: u32,
    /// User.
    pub uid: u32,
    /// Update log.
    pub log: u64,
    /// Bytes of its update log.
    pub log_bytes: u64,
    /// Leases that it holds.
    pub leases: u64,
}

/// State of one node. The schema is stable: fields are added, never changed.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct NodeStatus {
    /// Number of the node.
    pub node: u32,
    /// Process of the daemon.
    pub pid: i32,
    /// Where its tree is seen.
    pub tree: String,
    /// Folder of the pool.
    pub pool: String,
    /// `file` or `memory`.
    pub medium: String,
    /// Copies of the data, this node's included.
    pub copies: u32,
    /// The present guarantee of an fsync: the largest failure that it survives: `process` (of programs and the daemon)
    /// or `power`.
    pub survives: String,
    /// Blocks of 4096 bytes for data.
    pub blocks: u64,
    /// Of these, free, the reserve for the daemon's own work included.
    pub blocks_free: u64,
    /// Of these, what programs of the daemon's user can still take: the figure of `df`.
    #[serde(default)]
    pub blocks_available: Option<u64>,
    /// The medium lacks space that the pool should hold: writes that need new space may get ENOSPC.
    #[serde(default)]
    pub medium_is_full: bool,
    /// Inodes in use.
    pub inodes: u64,
    /// Root commits since the pool was made.
    pub commits: u64,
    /// Requests of programs since the daemon started.
    #[serde(default)]
    pub requests: u64,
    /// The attached programs.
    pub programs: Vec<ProgramStatus>,
    /// Number of detached sessions, kept for processes that may come back: open files that were given to a child or
    /// over an exec, or the state of a session that was terminated.
    #[serde(default)]
    pub estates: u64,
    /// Open files that are referred to by call.
    #[serde(default)]
    pub references: u64,
    /// Sessions that were ended by force since the daemon started, the oldest forgotten: the user, and why.
    #[serde(default)]
    pub forced_ends: Vec<String>,
    /// Acknowledged data that is lost: damage that the recovery at the daemon's start found in logs and in the ledger,
    /// and damaged blocks of files of which programs wrote a part since.
    #[serde(default)]
    pub losses: Vec<String>,
    /// Why nothing is done any more, or why the daemon before this one ended of itself.
    #[serde(default)]
    pub failure: Option<String>,
    /// Whether nothing is done any more, for the reason that `failure` says.
    #[serde(default)]
    pub stopped: bool,
    /// For so long an operation on the disk of the pool has not returned, in ms, if that is two seconds or longer.
    #[serde(default)]
    pub disk_stalled_ms: Option<u64>,
    /// Whether a keeper started the daemon, and starts another when it dies, if it lives.
    #[serde(default = "is_kept")]
    pub kept: bool,
    /// Daemons of the node that died and were replaced by their keeper, since the keeper started.
    #[serde(default)]
    pub restarts: u64,
    /// Of a cluster of several nodes: its part in the chain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chain: Option<ChainStatus>,
}

impl NodeStatus {
    /// The part that every user may know.
    pub fn for_all_users(self) -> Self {
        let chain = self.chain.map(ChainStatus::for_all_users);
        Self {
            node: self.node,
            tree: self.tree,
            copies: self.copies,
            kept: self.kept,
            chain,
            ..Self::default()
        }
    }
}

/// The default for daemons of earlier versions, which do not report it.
fn is_kept() -> bool {
    true
}

/// Why a daemon did not answer.
#[derive(Debug)]
pub enum Unanswered {
    /// This user may not ask.
    Forbidden(String),
    /// A daemon holds the socket, and did not answer in time.
    Silent,
    /// No daemon listens, or it went away while it was asked.
    Absent(String),
}

impl std::fmt::Display for Unanswered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Silent => f.write_str("the daemon does not answer"),
            Self::Forbidden(why) | Self::Absent(why) => f.write_str(why),
        }
    }
}

/// Connects to a control socket without waiting. `WouldBlock` if as many wait there already as may: the daemon takes
/// none of them.
///
/// # Errors
/// Those of `connect`.
pub fn reach(control: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(control)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Asks the daemon behind a control socket, which may take so long to answer.
///
/// # Errors
/// There is no answer.
pub fn ask(control: &Path, patience: Duration) -> Result<NodeStatus, Unanswered> {
    let until = SystemHost.now().after(patience);
    let unanswered = |why: io::Error| match why.kind() {
        ErrorKind::PermissionDenied => {
            Unanswered::Forbidden(format!("cannot reach {}: {why}", control.display()))
        }
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Unanswered::Silent,
        _ => Unanswered::Absent(format!("cannot reach {}: {why}", control.display())),
    };
    let stream = reach(control).map_err(unanswered)?;
    let mut answer = Vec::new();
    let mut limited = (&stream).take(ANSWER_BYTES_MAX);
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let left = until.since(SystemHost.now()).max(WAIT_MIN);
        stream.set_read_timeout(Some(left)).map_err(unanswered)?;
        match limited.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => answer.extend_from_slice(&piece[..count]),
            Err(why) if why.kind() == ErrorKind::Interrupted => {}
            Err(why) => return Err(unanswered(why)),
        }
    }
    let gone = |why| Unanswered::Absent(format!("cannot understand {}: {why}", control.display()));
    serde_json::from_slice(&answer).map_err(gone)
}
