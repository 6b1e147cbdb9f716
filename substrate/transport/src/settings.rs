//! The limits of an endpoint: plain data, so that a test can make them tiny.

use crate::error::Error;
use std::time::Duration;

/// Limits of an endpoint and of each of its connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bytes of the longest message taken from a peer.
    pub message_bytes: u32,
    /// Messages and immediates that a peer may have under way to here and not yet taken; each has a posted receive.
    pub window: u32,
    /// Operations of this side that may be under way on a connection.
    pub depth: u32,
    /// Nanoseconds that a waiter polls at most before it sleeps; see [`ipc::Spin`].
    pub spin_ns: u32,
    /// What a handshake may take.
    pub handshake: Duration,
    /// Connections whose handshake is not done; of those who have shown least the oldest makes room for the next.
    pub half_open_max: usize,
    /// Connections at once.
    pub connections_max: usize,
    /// A peer that gives no sign of life for so long, though it was asked for one, is gone. None: only a broken
    /// connection counts.
    pub silence: Option<Duration>,
    /// What a close waits at most for its goodbye to leave.
    pub goodbye: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            message_bytes: 4096,
            window: 32,
            depth: 64,
            spin_ns: 2 * ipc::host::SPIN_NS_MAX,
            handshake: Duration::from_secs(2),
            half_open_max: 64,
            connections_max: 1024,
            silence: Some(Duration::from_secs(1)),
            goodbye: Duration::from_millis(20),
        }
    }
}

/// A message holds at least the head of a call and something with it.
pub(crate) const MESSAGE_BYTES_MIN: u32 = 128;

/// One call takes three places: a request or an answer each way, and a cancellation.
pub(crate) const WINDOW_MIN: u32 = 3;

/// Receives beyond the window, for frames without a place in it: at most two counts of what was taken, a ping, a pong
/// and a goodbye can be under way.
const CONTROL_RECEIVES: u32 = 8;

impl Settings {
    /// Looks for limits that cannot be.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let right = (MESSAGE_BYTES_MIN..=1 << 20).contains(&self.message_bytes)
            && (WINDOW_MIN..=4096).contains(&self.window)
            && (2..=4096).contains(&self.depth)
            && self.half_open_max > 0
            && self.connections_max > 0;
        if right { Ok(()) } else { Err(Error::Unavailable("impossible limits")) }
    }

    pub(crate) fn shape(&self) -> crate::link::Shape {
        crate::link::Shape {
            frame_bytes: self.message_bytes as usize + size_of::<format::wire::FrameHead>(),
            receives: self.window + CONTROL_RECEIVES,
            depth: self.depth + CONTROL_RECEIVES,
        }
    }

    pub(crate) fn own_window(&self) -> crate::handshake::Window {
        crate::handshake::Window { message_bytes: self.message_bytes, window: self.window }
    }
}
