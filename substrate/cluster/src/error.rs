//! The one error type of this crate.

use crate::change::Refusal;
use format::DecodeError;
use pmem::MediaError;

/// Why a manager did not do what it was asked, or why nobody knows whether it did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// It does not fit what it was conditional on; nothing was changed.
    Refused(Refusal),
    /// The manager could not be reached in time; nothing was changed.
    Unreachable,
    /// The request went out and no answer came: it was done, or is done later, or never.
    Unknown,
    /// The manager does not speak with this node, and why: it has another key, or is of another cluster.
    NotLetIn(transport::Error),
    /// The manager answers, and cannot serve: its medium failed, or it stops.
    Failed,
    /// The manager is one of another cluster; its number.
    OtherCluster(u64),
    /// What the other side said is no message.
    Message(DecodeError),
    /// The manager's medium.
    Media(MediaError),
    /// The medium of the pool that joins, which can note nothing of the cluster.
    Pool(MediaError),
    /// What lies on the manager's medium does not fit together: a record that cannot follow those before it.
    Damaged(&'static str),
    /// This is not where the manager left it: whoever looks for it finds nothing, or something else.
    Displaced(&'static str),
    /// The manager's folder is another user's, or others may use it.
    Open,
    /// The machine: threads, sockets.
    System {
        /// What was wanted of it.
        call: &'static str,
        /// Its errno; 0 if it gave none.
        errno: i32,
    },
}

impl Error {
    /// What the machine said.
    pub fn of_host(error: ipc::Error) -> Self {
        match error {
            ipc::Error::System { call, errno } => Self::System { call, errno },
            _ => Self::System { call: "spawn", errno: 0 },
        }
    }

    /// What the operating system said to `call`.
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
