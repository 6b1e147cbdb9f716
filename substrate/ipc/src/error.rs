//! The error type of this crate.

use format::DecodeError;

/// Failure of a communication between two processes of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A system call failed.
    System {
        /// Name of the system call.
        call: &'static str,
        /// The errno.
        errno: i32,
    },
    /// Shared memory has the wrong seals, size, alignment or access; the text says which.
    Memory(&'static str),
    /// Impossible limits (zero slots, more bytes than a ring can address); the text says which.
    Limits(&'static str),
    /// The other side sent bytes that are not a valid message.
    Message(DecodeError),
    /// Descriptors that came with a message are lost: this process may open no more, or the message carried too
    /// many.
    DescriptorsLost,
    /// The other side refused the handshake: a `REFUSED_*` code, and the reason for the user.
    Refused(u32, String),
    /// The other side is gone; the client must attach again.
    Disconnected,
    /// The deadline passed.
    TimedOut,
    /// A signal arrived while waiting.
    Interrupted,
    /// A message has more bytes than fit.
    TooLarge {
        /// Bytes of the message.
        bytes: usize,
        /// Largest number of bytes that fits.
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
