//! What a daemon says of itself, and how it is asked: whoever connects to the control socket gets one JSON document.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Longest answer.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

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
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
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
    /// What an fsync guarantees now: the largest failure that it survives: `process` (of programs and the daemon) or `power`.
    pub survives: String,
    /// Blocks of 4096 bytes for data.
    pub blocks: u64,
    /// Of these, free.
    pub blocks_free: u64,
    /// Inodes in use.
    pub inodes: u64,
    /// Root flips since the pool was made.
    pub flips: u64,
    /// What is attached.
    pub programs: Vec<ProgramStatus>,
    /// What is kept for processes that may come for it: open files that were given to a child or over an exec, or that
    /// a session left which ended by force.
    #[serde(default)]
    pub estates: u64,
    /// Open files that are referred to by call.
    #[serde(default)]
    pub references: u64,
    /// Sessions that were ended by force since the daemon started, the oldest forgotten: the user, and why.
    #[serde(default)]
    pub forced_ends: Vec<String>,
    /// What the recovery at the daemon's start found damaged in logs and in the ledger: acknowledged, and lost.
    #[serde(default)]
    pub losses: Vec<String>,
    /// Why nothing is done any more, or why the daemon before this one ended of itself.
    #[serde(default)]
    pub failure: Option<String>,
    /// Daemons of the node that died and were replaced by their keeper, since the keeper started.
    #[serde(default)]
    pub restarts: u64,
}

/// Asks the daemon behind a control socket.
///
/// # Errors
/// Nobody answers there.
pub fn ask(control: &Path) -> Result<NodeStatus> {
    let stream = UnixStream::connect(control).map_err(Error::at("reach", control))?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).map_err(Error::at("reach", control))?;
    let mut answer = String::new();
    stream.take(ANSWER_BYTES_MAX).read_to_string(&mut answer).map_err(Error::at("hear", control))?;
    serde_json::from_str(&answer).map_err(Error::at("understand", control))
}
