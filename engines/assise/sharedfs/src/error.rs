//! The one error type of this crate.

use area::AreaError;
use format::{DecodeError, LogUid, NodeId, Sequence};
use pmem::MediaError;

/// Why SharedFS refused or failed an operation.
#[derive(Debug)]
pub enum Error {
    /// The medium failed.
    Media(MediaError),
    /// The shared area failed, or is damaged.
    Area(AreaError),
    /// Shared memory, a thread or a socket was not available.
    Ipc(ipc::Error),
    /// A pool file is not valid: its name, and the reason.
    File(String, DecodeError),
    /// The settings cannot work, with the reason.
    Settings(&'static str),
    /// The limit of sessions is reached.
    Sessions,
    /// A daemon began to lead as often as numbers can tell: the pool can only be copied into a new one.
    LivesUsedUp,
    /// The ledger has no room although everything before was digested.
    LedgerFull,
    /// A file of the pool was cut, or its medium failed, while it was read or written: its name.
    Lost(String),
    /// A file or a folder of the pool was removed while the daemon used it: its path.
    Removed(String),
    /// An operation on the medium of the pool has not returned for so many seconds.
    NoAnswer(u64),
    /// A log ends before a record that the ledger says was digested: the log, and the last record that was found.
    Short(LogUid, Sequence),
    /// The records of a log behind this one are not those that the head digested.
    Differs(LogUid, Sequence),
    /// Sending to a copy failed: its node, and the reason.
    Copy(NodeId, mirror::Error),
    /// A copy has more than this pool, which therefore must not lead: the copy's node.
    CopyIsAhead(NodeId),
    /// A pool lacks records that are no longer here, or is of another history: its node. It has to be made anew from
    /// this one.
    NeedsImport(NodeId),
    /// The tree could not be kept for as long as it was sent to a node, or compared with its tree, because space became
    /// short: that node.
    NoRoomToSend(NodeId),
    /// The pool gave its tree up for that of a head, and has not got all of that: it must not lead.
    TreeGivenUp,
    /// An earlier failure of the medium stopped this daemon: only a restart shows the state of the pool.
    Stopped,
}

impl Error {
    /// The medium of the pool has no space.
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::Media(MediaError::NoSpace) | Self::Area(AreaError::Medium(MediaError::NoSpace)))
    }

    /// The error of the pool's medium, if the medium refused something.
    pub fn media(&self) -> Option<MediaError> {
        match self {
            Self::Media(error) | Self::Area(AreaError::Medium(error)) => Some(*error),
            _ => None,
        }
    }

    /// The files of the pool are not what was written: one is missing, cut or damaged. Every other error of opening a pool says
    /// nothing about its contents.
    pub fn is_damage(&self) -> bool {
        use AreaError::{Data, Item, Map, Missing, Node, OtherMap, Roots, Superblock};
        match self {
            Self::Media(error) | Self::Area(AreaError::Medium(error)) => match error {
                MediaError::NotFound | MediaError::Length | MediaError::Unreadable => true,
                MediaError::Damaged(_) | MediaError::Lost => true,
                MediaError::Os(errno) => *errno == libc::EIO,
                MediaError::Exists | MediaError::NoSpace | MediaError::Name => false,
                MediaError::Locked | MediaError::Poisoned => false,
            },
            Self::Area(Missing | Superblock(..) | Roots(..) | Map(_) | OtherMap(_)) => true,
            Self::Area(Node(..) | Item(..) | Data { .. }) => true,
            Self::File(..) | Self::Short(..) | Self::Differs(..) | Self::Lost(_) | Self::Removed(_) => true,
            _ => false,
        }
    }

    /// The pool failed, which neither waiting nor fewer sessions would mend.
    pub(crate) fn is_failure(&self) -> bool {
        match self {
            Self::Media(_) | Self::Area(_) => !self.is_shortage(),
            Self::File(..)
            | Self::Short(..)
            | Self::Differs(..)
            | Self::Lost(_)
            | Self::Removed(_)
            | Self::NoAnswer(_)
            | Self::Stopped => true,
            Self::Ipc(_) | Self::Settings(_) | Self::Sessions | Self::LivesUsedUp | Self::LedgerFull => false,
            Self::Copy(..) | Self::CopyIsAhead(_) | Self::NeedsImport(_) | Self::NoRoomToSend(_) => false,
            Self::TreeGivenUp => false,
        }
    }

    /// The medium of the pool has no space, though the pool has some, or no descriptor was free for one of its files.
    pub(crate) fn is_shortage(&self) -> bool {
        match self {
            Self::Media(error) | Self::Area(AreaError::Medium(error)) => error.is_shortage(),
            _ => false,
        }
    }
}

impl From<MediaError> for Error {
    fn from(error: MediaError) -> Self {
        Self::Media(error)
    }
}

impl From<AreaError> for Error {
    fn from(error: AreaError) -> Self {
        Self::Area(error)
    }
}

impl From<ipc::Error> for Error {
    fn from(error: ipc::Error) -> Self {
        Self::Ipc(error)
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Media(error) => write!(f, "medium: {error}"),
            Self::Area(error) => write!(f, "area: {error}"),
            Self::Ipc(error) => write!(f, "{error}"),
            Self::File(name, error) => write!(f, "file {name}: {error}"),
            Self::Settings(what) => write!(f, "impossible setting: {what}"),
            Self::Sessions => write!(f, "no more sessions"),
            Self::LivesUsedUp => {
                write!(
                    f,
                    "daemons began on this pool as often as its numbers can tell: copy its files to a new one"
                )
            }
            Self::LedgerFull => write!(f, "the ledger is full"),
            Self::Lost(name) => {
                write!(
                    f,
                    "file {name} of the pool was cut, or its medium failed, where it was read or written"
                )
            }
            Self::Removed(path) => write!(f, "{path} was removed while the daemon used it"),
            Self::NoAnswer(seconds) => write!(f, "the disk of its pool has not answered for {seconds} s"),
            Self::Short(log, last) => {
                write!(f, "log {log} ends after record {last}, and the ledger says that more was digested")
            }
            Self::Differs(log, last) => {
                write!(
                    f,
                    "the records of log {log} behind record {last} are not those that the head digested"
                )
            }
            Self::Copy(node, error) => write!(f, "copy at node {node}: {error}"),
            Self::CopyIsAhead(node) => write!(f, "node {node} has more than this pool, which cannot lead"),
            Self::NeedsImport(node) => {
                write!(
                    f,
                    "the pool of node {node} lacks records that are no longer here, or is of another history"
                )
            }
            Self::NoRoomToSend(node) => {
                write!(
                    f,
                    "there is too little room to keep the tree while it is sent to, or compared with, node {node}"
                )
            }
            Self::TreeGivenUp => write!(
                f,
                "this pool gave up its tree to make room for that of the node that led, and did not get all of that: it cannot lead \
                 before it has it"
            ),
            Self::Stopped => write!(f, "stopped by an earlier failure of the medium"),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_damaged_files_are_damage_of_the_pool() {
        let of = |error: MediaError| Error::from(error).is_damage();
        let os = |errno: i32| of(MediaError::Os(errno));
        assert!(os(libc::EIO) && of(MediaError::NotFound) && of(MediaError::Unreadable));
        assert!(of(MediaError::Damaged(DecodeError::Truncated)) && of(MediaError::Lost));
        assert!(Error::from(AreaError::Missing).is_damage() && Error::Lost(String::new()).is_damage());
        assert!(Error::from(AreaError::Medium(MediaError::Unreadable)).is_damage());
        assert!([libc::EACCES, libc::EPERM, libc::EMFILE, libc::ENFILE].iter().all(|errno| !os(*errno)));
        assert!(!of(MediaError::Locked) && !of(MediaError::NoSpace) && !Error::Settings("").is_damage());
        assert!(!Error::from(AreaError::Geometry("")).is_damage());
    }
}
