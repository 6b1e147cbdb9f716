//! The limits of an endpoint. They are plain data, so that tests can make them small.

use crate::error::Error;
use std::time::Duration;

/// Limits of an endpoint and of each of its connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bytes of the longest message that is accepted from a peer.
    pub message_bytes: u32,
    /// Limit of messages and immediates from a peer that are not yet taken; each has a posted receive.
    pub window: u32,
    /// Limit of operations of this side in progress on a connection.
    pub depth: u32,
    /// Longest time for which a waiting thread polls before it sleeps, in nanoseconds; see [`ipc::Spin`].
    pub spin_ns: u32,
    /// A connection for which a thread waits is left to that thread. The progress thread looks at it again after this time, and
    /// takes it back if no thread polls it any more. With few processors a look costs the waiting thread tens of microseconds.
    pub look_again: Duration,
    /// Time limit of a handshake.
    pub handshake: Duration,
    /// Limit of connections with an unfinished handshake. A new one replaces the oldest of those with the least
    /// progress.
    pub half_open_max: usize,
    /// Limit of connections.
    pub connections_max: usize,
    /// The connection of a peer ends if the peer gives no sign of life for this time although it was asked for one.
    /// `None`: it ends only if it breaks.
    pub silence: Option<Duration>,
    /// Longest time for which a close waits for its goodbye to leave.
    pub goodbye: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            message_bytes: 4096,
            window: 32,
            depth: 64,
            spin_ns: 2 * ipc::host::SPIN_NS_MAX,
            look_again: Duration::from_millis(1),
            handshake: Duration::from_secs(2),
            half_open_max: 64,
            connections_max: 1024,
            silence: Some(Duration::from_secs(1)),
            goodbye: Duration::from_millis(20),
        }
    }
}

/// A message must at least have space for the head of a call and a body.
pub(crate) const MESSAGE_BYTES_MIN: u32 = 128;

/// One call takes three slots: a request or an answer in each direction, and a cancellation.
pub(crate) const WINDOW_MIN: u32 = 3;

/// Receives beyond the window, for frames without a slot in it: at most two counts, a ping, a pong and a goodbye can
/// be in progress.
const CONTROL_RECEIVES: u32 = 8;

impl Settings {
    /// Checks for impossible limits.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let right = (MESSAGE_BYTES_MIN..=1 << 20).contains(&self.message_bytes)
            && (WINDOW_MIN..=4096).contains(&self.window)
            && (2..=4096).contains(&self.depth)
            && self.half_open_max > 0
            && self.connections_max > 0;
        if right { Ok(()) } else { Err(Error::Unavailable("impossible limits")) }
    }

    pub(crate) fn shape(&self) -> crate::link::LinkShape {
        crate::link::LinkShape {
            frame_bytes: self.message_bytes as usize + size_of::<format::wire::FrameHead>(),
            receives: self.window + CONTROL_RECEIVES,
            depth: self.depth + CONTROL_RECEIVES,
        }
    }

    pub(crate) fn own_window(&self) -> crate::handshake::Window {
        crate::handshake::Window { message_bytes: self.message_bytes, window: self.window }
    }
}
