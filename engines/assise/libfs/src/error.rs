//! The errors of sessions. They are mapped to `vfs::Error` in one place.

use format::message::{REFUSED_FULL, REFUSED_SPACE, REFUSED_VERSION};
use pmem::MediaError;

const EMFILE: i32 = rustix::io::Errno::MFILE.raw_os_error();
const ENOMEM: i32 = rustix::io::Errno::NOMEM.raw_os_error();
const ENFILE: i32 = rustix::io::Errno::NFILE.raw_os_error();

/// Why a call or an attachment failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// SharedFS has ended.
    Disconnected,
    /// SharedFS did not accept the session, or did not send a requested descriptor.
    Refused,
    /// No answer within the time limit.
    TimedOut,
    /// A signal interrupted a wait; there is no effect.
    Interrupted,
    /// A file of the pool cannot be mapped.
    Media(MediaError),
    /// The process has no free descriptors.
    Descriptors,
    /// The process has no address space for the log, the segments and the shared memory.
    Memory,
    /// SharedFS accepts no further session.
    Full,
    /// The medium has no space for the session's log.
    NoSpace,
    /// SharedFS is of another build, with an incompatible protocol.
    Build(String),
    /// An answer of SharedFS cannot be decoded.
    Response,
    /// Shared memory or a ring is invalid.
    Ipc(ipc::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Disconnected => write!(f, "the daemon is gone"),
            Self::Refused => write!(f, "the daemon refused"),
            Self::TimedOut => write!(f, "the daemon does not answer"),
            Self::Interrupted => write!(f, "interrupted by a signal"),
            Self::Descriptors => write!(f, "no descriptor is left for the log, the segments and the daemon"),
            Self::Memory => write!(f, "no address space is left for the log and the segments"),
            Self::Full => write!(f, "the daemon has no room for another session"),
            Self::NoSpace => write!(f, "the medium of the pool has no space for an update log"),
            Self::Build(why) => write!(f, "the daemon is of another build: {why}"),
            Self::Media(error) => write!(f, "a pool file cannot be used: {error}"),
            Self::Response => write!(f, "an impossible answer of the daemon"),
            Self::Ipc(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<MediaError> for Error {
    fn from(error: MediaError) -> Self {
        match error {
            MediaError::Os(EMFILE | ENFILE) => Self::Descriptors,
            MediaError::Os(ENOMEM) => Self::Memory,
            other => Self::Media(other),
        }
    }
}

impl From<ipc::Error> for Error {
    fn from(error: ipc::Error) -> Self {
        match error {
            ipc::Error::Disconnected => Self::Disconnected,
            ipc::Error::TimedOut => Self::TimedOut,
            ipc::Error::Interrupted => Self::Interrupted,
            ipc::Error::System { errno: EMFILE | ENFILE, .. } => Self::Descriptors,
            ipc::Error::System { errno: ENOMEM, .. } => Self::Memory,
            // SharedFS never sends more descriptors than fit one message, so the process had no free ones.
            ipc::Error::DescriptorsLost => Self::Descriptors,
            ipc::Error::Refused(REFUSED_FULL, _) => Self::Full,
            ipc::Error::Refused(REFUSED_SPACE, _) => Self::NoSpace,
            ipc::Error::Refused(REFUSED_VERSION, why) => Self::Build(why),
            other => Self::Ipc(other),
        }
    }
}

impl From<Error> for vfs::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Interrupted => Self::Interrupted,
            Error::Descriptors => Self::NoDescriptors,
            Error::Memory => Self::NoMemory,
            Error::Full => Self::TooManyFiles,
            Error::NoSpace => Self::NoSpace,
            _ => Self::Io,
        }
    }
}
