//! The error type of this crate, and the reasons for which a connection ends.

use format::wire::RefusalReason;
use format::{DecodeError, Epoch};

/// The reason for which a connection has ended. The first reason is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ended {
    /// Closed on this side.
    ClosedHere,
    /// The peer has sent a goodbye.
    ClosedThere,
    /// The connection broke: the peer, its machine or the network has failed.
    Lost,
    /// No sign of life has come from the peer for the time that the settings allow.
    Silent,
    /// The peer has violated the protocol, in this way.
    Broke(&'static str),
    /// A one-sided operation accessed memory without the right to it.
    Forbidden,
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::ClosedHere => write!(f, "closed on this side"),
            Self::ClosedThere => write!(f, "closed by the peer"),
            Self::Lost => write!(f, "the connection broke"),
            Self::Silent => write!(f, "the peer is silent"),
            Self::Broke(what) => write!(f, "the peer broke the protocol: {what}"),
            Self::Forbidden => write!(f, "no right to that memory"),
        }
    }
}

/// The reason for which an operation between two nodes failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The connection has ended.
    Ended(Ended),
    /// One side refused the handshake.
    Refused {
        /// The reason.
        reason: RefusalReason,
        /// True if the peer refused, false if this side did.
        there: bool,
        /// The peer's epoch, if the epoch is the reason.
        epoch: Epoch,
    },
    /// The deadline passed.
    TimedOut,
    /// A signal arrived while waiting.
    Interrupted,
    /// More bytes than the limit.
    TooLarge {
        /// Number of bytes of the call.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A range outside of the memory.
    Range,
    /// The memory cannot be registered, for this reason.
    Memory(&'static str),
    /// Memory that was registered at another endpoint.
    Foreign,
    /// Not an address of this provider.
    Address(String),
    /// The address is in use, or no process listens there, or the limit of connections is reached.
    Unavailable(&'static str),
    /// A message that does not conform to the protocol.
    Message(DecodeError),
    /// A call of the provider failed.
    Provider {
        /// Name of the call.
        call: &'static str,
        /// Its errno, or a code of the provider above those.
        code: i32,
    },
    /// This machine has no libfabric, or libfabric has no such provider.
    NoProvider(String),
    /// A system call of this machine failed.
    Host(ipc::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ended(why) => write!(f, "{why}"),
            Self::Refused { reason, there, .. } => {
                let who = if *there { "refused by the peer" } else { "the peer was refused" };
                write!(f, "{who}: {}", refusal_text(*reason))
            }
            Self::TimedOut => write!(f, "timed out"),
            Self::Interrupted => write!(f, "interrupted by a signal"),
            Self::TooLarge { bytes, limit } => write!(f, "{bytes} bytes where {limit} fit"),
            Self::Range => write!(f, "outside the memory named"),
            Self::Memory(why) => write!(f, "memory cannot be registered: {why}"),
            Self::Foreign => write!(f, "memory of another endpoint"),
            Self::Address(what) => write!(f, "no address: {what}"),
            Self::Unavailable(what) => write!(f, "{what}"),
            Self::Message(error) => write!(f, "message refused: {error}"),
            Self::Provider { call, code } => {
                write!(f, "{call}: {} ({code})", std::io::Error::from_raw_os_error(*code))
            }
            Self::NoProvider(what) => write!(f, "{what}"),
            Self::Host(error) => write!(f, "{error}"),
        }
    }
}

/// The text of a refusal for the operator.
fn refusal_text(reason: RefusalReason) -> &'static str {
    match reason {
        RefusalReason::Malformed => "not the protocol",
        RefusalReason::Version => "no common version of the protocol",
        RefusalReason::Cluster => "another cluster",
        RefusalReason::Key => "another key",
        RefusalReason::OldEpoch => "its epoch is over",
        RefusalReason::NewEpoch => "its epoch has not begun here",
        RefusalReason::Node => "another node was wanted",
        RefusalReason::NotMember => "not a member",
        RefusalReason::Full => "no room",
        RefusalReason::Late => "the handshake took too long",
        RefusalReason::Failed => "it cannot take connections, and its log says why",
    }
}

impl std::error::Error for Error {}

impl From<Ended> for Error {
    fn from(why: Ended) -> Self {
        Self::Ended(why)
    }
}

impl From<DecodeError> for Error {
    fn from(error: DecodeError) -> Self {
        Self::Message(error)
    }
}

impl From<ipc::Error> for Error {
    fn from(error: ipc::Error) -> Self {
        match error {
            ipc::Error::TimedOut => Self::TimedOut,
            ipc::Error::Interrupted => Self::Interrupted,
            other => Self::Host(other),
        }
    }
}
