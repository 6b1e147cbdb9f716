//! Replicates update logs and the ledger to other nodes (Assise §3.2.1, §3.4). The copies are byte copies with the
//! same file names and positions, so the pool of a copy looks like that of a node whose daemon has just died.
//!
//! A [`Sender`] at the head sends the bytes of logs and of the ledger to one copy. A [`Receiver`] at the copy writes
//! them, syncs them, and reports how far each stream is synced. Neither has a thread, knows sessions or leases, or
//! makes decisions. `docs/replication.md` describes the protocol and the reasons for its correctness.
//!
//! Guarantees: everything that a receiver reports as synced is on its medium, as complete frames without a gap, in
//! each stream. A sender sends only complete frames with the right checksum, and never overwrites a part of a log
//! that the copy's tree still needs.

#![forbid(unsafe_code)]

mod arriving;
mod compare;
mod error;
mod greeting;
mod hashes;
mod import;
pub mod ledger;
pub mod logs;
mod receiver;
mod records;
mod sender;
mod stream;
mod unexecuted;

pub use compare::{Comparison, is_compare, say_held, say_sums, sums_max};
pub use error::Error;
pub use greeting::{judge_terms, take_message};
pub use import::{TreeSender, is_of_import, say_changed, say_imported};
pub use receiver::{HeadTerms, Receiver, SpaceFor, Stepped, refuse, say_executed, say_progress};
pub use records::{FetchedBytes, asks_for_records, no_records, part_of, records_of};
pub use sender::{CopyEnds, CopyReport, LogPush, Sender};

use std::time::Duration;
use transport::Settings;

/// Bytes of the longest message: a record with 64 KB of data fits into one.
const MESSAGE_BYTES: u32 = 68 << 10;

/// Limit of messages in progress in each direction.
const WINDOW: u32 = 32;

/// Longest time for which a head or a copy polls for a message before it sleeps: longer than an fsync takes from one
/// message to the next, while a program syncs without a pause.
const SPIN_NS: u32 = 100_000;

/// Settings of the endpoints between which copies are kept.
pub fn settings() -> Settings {
    Settings {
        message_bytes: MESSAGE_BYTES,
        window: WINDOW,
        spin_ns: SPIN_NS,
        silence: Some(Duration::from_secs(1)),
        ..Settings::default()
    }
}
