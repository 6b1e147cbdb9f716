//! The one error type of this crate.

use format::DecodeError;

/// Why something between two processes of a node did not work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A system call failed: which, and its errno.
    System {
        /// Name of the call.
        call: &'static str,
        /// The errno.
        errno: i32,
    },
    /// Shared memory is not what it has to be (seals, size, alignment, access); what is wrong.
    Memory(&'static str),
    /// Limits that cannot be (zero slots, more bytes than a ring can address); which.
    Limits(&'static str),
    /// Bytes from the other side that are no message.
    Message(DecodeError),
    /// Descriptors that came with a message are lost: this process may have no more, or there were too many.
    DescriptorsLost,
    /// The other side refused the handshake: a `REFUSED_*`, and the reason for the user.
    Refused(u32, String),
    /// The other side is gone: attach anew.
    Disconnected,
    /// The deadline passed.
    TimedOut,
    /// A signal arrived while waiting.
    Interrupted,
    /// More bytes than fit.
    TooLarge {
        /// Bytes that were to be sent.
        bytes: usize,
        /// Bytes that fit.
        limit: usize,
    },
    /// A thread ended by a panic.
    Panicked,
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::System { call, errno } => {
                write!(f, "{call}: {}", std::io::Error::from_raw_os_error(*errno))
            }
            Self::Memory(what) => write!(f, "shared memory refused: {what}"),
            Self::Limits(what) => write!(f, "impossible limits: {what}"),
            Self::Message(error) => write!(f, "message refused: {error}"),
            Self::DescriptorsLost => write!(f, "descriptors that came with a message are lost"),
            Self::Refused(_, reason) => write!(f, "refused by the other side: {reason}"),
            Self::Disconnected => write!(f, "the other side is gone"),
            Self::TimedOut => write!(f, "timed out"),
            Self::Interrupted => write!(f, "interrupted by a signal"),
            Self::TooLarge { bytes, limit } => write!(f, "{bytes} bytes where {limit} fit"),
            Self::Panicked => write!(f, "a thread panicked"),
        }
    }
}

impl std::error::Error for Error {}

impl From<DecodeError> for Error {
    fn from(error: DecodeError) -> Self {
        Self::Message(error)
    }
}
