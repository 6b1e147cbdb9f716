//! The one error type of this crate.

use crate::change::Refusal;
use format::{DecodeError, NodeId};
use pmem::MediaError;

/// The reason for which a manager did not execute a request, or for which the outcome is unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The conditions of the change do not hold; nothing was changed.
    Refused(Refusal),
    /// The manager could not be reached in time; nothing was changed.
    Unreachable,
    /// The request was sent and no answer arrived: it was executed, or is executed later, or never.
    Unknown,
    /// The manager rejects this node, with the reason: it has another key, or belongs to another cluster.
    NotLetIn(transport::Error),
    /// The manager answers, but cannot serve: its medium failed, or it stops.
    Failed,
    /// The manager belongs to another cluster; its number.
    OtherCluster(u64),
    /// A message of the other side could not be decoded.
    Message(DecodeError),
    /// An error of the manager's medium.
    Media(MediaError),
    /// An error of the medium of the joining pool, which cannot store its identity.
    Pool(MediaError),
    /// The pool belongs to this other node.
    OtherNode(NodeId),
    /// The log of the manager is inconsistent: a record cannot follow the ones before it.
    Damaged(&'static str),
    /// The manager's files are not in their place any more: a start would find none, or other ones.
    Displaced(&'static str),
    /// The manager's folder belongs to another user, or other users may use it.
    Open,
    /// The operating system: threads, sockets.
    System {
        /// The call that failed.
        call: &'static str,
        /// Its errno; 0 if it gave none.
        errno: i32,
    },
}

impl Error {
    /// An error of the host.
    pub fn of_host(error: ipc::Error) -> Self {
        match error {
            ipc::Error::System { call, errno } => Self::System { call, errno },
            _ => Self::System { call: "spawn", errno: 0 },
        }
    }

    /// An error of the operating system in `call`.
    pub fn of_io(call: &'static str, error: &std::io::Error) -> Self {
        Self::System { call, errno: error.raw_os_error().unwrap_or(0) }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(refusal) => write!(f, "refused: {refusal}"),
            Self::Unreachable => write!(f, "the cluster manager cannot be reached"),
            Self::Unknown => write!(f, "the cluster manager did not answer: the change may have been made"),
            Self::NotLetIn(why) => write!(f, "the cluster manager does not let us in: {why}"),
            Self::Failed => write!(f, "the cluster manager cannot serve"),
            Self::OtherCluster(cluster) => write!(f, "the manager of another cluster: {cluster:016x}"),
            Self::Message(error) => write!(f, "no message of a cluster manager: {error}"),
            Self::Media(error) => write!(f, "the manager's medium: {error}"),
            Self::Pool(error) => write!(f, "the pool's place in the cluster: {error}"),
            Self::OtherNode(node) => write!(f, "the pool belongs to node {node}"),
            Self::Damaged(what) => write!(f, "the manager's medium is damaged: {what}"),
            Self::Displaced(what) => write!(f, "{what} was removed, moved or replaced"),
            Self::Open => {
                write!(f, "the manager's folder is another user's, or open to others: it is to have mode 700")
            }
            Self::System { call, errno } => {
                write!(f, "{call}: {}", std::io::Error::from_raw_os_error(*errno))
            }
        }
    }
}

impl std::error::Error for Error {}

impl From<MediaError> for Error {
    fn from(error: MediaError) -> Self {
        Self::Media(error)
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}
