//! The one error type of this crate, and why a connection is over.

use format::wire::RefusalReason;
use format::{DecodeError, Epoch};

/// Why a connection is over. The first reason counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ended {
    /// Closed on this side.
    ClosedHere,
    /// The peer said goodbye.
    ClosedThere,
    /// The connection broke: the peer, its machine or the way to it.
    Lost,
    /// Nothing was heard from the peer for as long as the settings allow.
    Silent,
    /// The peer did not keep to the protocol; what it did.
    Broke(&'static str),
    /// A one-sided operation went where it had no right to.
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

/// Why something between two nodes did not work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The connection is over.
    Ended(Ended),
    /// One side refused the handshake.
    Refused {
        /// Why.
        reason: RefusalReason,
        /// True if it was the peer that refused.
        there: bool,
        /// The peer's epoch, if the epoch is the reason.
        epoch: Epoch,
    },
    /// The deadline passed.
    TimedOut,
    /// A signal arrived while waiting.
    Interrupted,
    /// More bytes than fit.
    TooLarge {
        /// Bytes that were to be sent.
        bytes: u64,
        /// Bytes that fit.
        limit: u64,
    },
    /// Not within the memory named.
    Range,
    /// Memory that cannot be registered; why.
    Memory(&'static str),
    /// Memory that was registered at another endpoint.
    Foreign,
    /// No address, or none that this provider knows.
    Address(String),
    /// The address is taken, or nobody listens there, or no more connections are allowed; which.
    Unavailable(&'static str),
    /// Bytes that are none of the protocol's.
    Message(DecodeError),
    /// A call of the provider failed: which, and its code.
    Provider {
        /// Name of the call.
        call: &'static str,
        /// Its errno, or its own code above those.
        code: i32,
    },
    /// No libfabric on this machine, or no such provider in it.
    NoProvider(String),
    /// The machine could not do it.
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

/// A refusal in words for the operator.
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
