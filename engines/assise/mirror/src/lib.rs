//! Copies of update logs and of the ledger on other nodes (Assise §3.2.1, §3.4): byte copies under the same names and at
//! the same positions, so that a copy's pool is a pool whose daemon has just died.
//!
//! A [`Sender`] at the head feeds one copy: bytes of logs, and the ledger. A [`Receiver`] at the copy writes them, settles
//! them, and says how far each stream is settled. Neither has a thread, knows a session or a lease, or decides anything.
//! The protocol, and why it is right, stands in `docs/replication.md`.
//!
//! Guarantees: what a receiver says is settled is on its medium, as whole frames without a gap, in each stream; what a
//! sender sends are whole frames with the right checksum, none of them onto a place that the copy's tree still needs.

#![forbid(unsafe_code)]

mod error;
pub mod ledger;
pub mod logs;
mod receiver;
mod sender;
mod stream;

pub use error::Error;
pub use receiver::{HeadTerms, Receiver, Stepped, refuse, say_executed};
pub use sender::{CopyEnds, Heard, LogPush, Sender};

use std::time::Duration;
use transport::Settings;

/// Bytes of the longest message.
const MESSAGE_BYTES: u32 = 64 << 10;

/// Messages under way in each direction.
const WINDOW: u32 = 32;

/// Settings of the endpoints between which copies are kept.
pub fn settings() -> Settings {
    Settings {
        message_bytes: MESSAGE_BYTES,
        window: WINDOW,
        silence: Some(Duration::from_secs(1)),
        ..Settings::default()
    }
}
