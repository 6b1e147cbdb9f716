//! The invariants of every world, one file each. The numbers are those of `docs/replication.md`.

pub mod equal;
pub mod one_head;
pub mod prefix;
pub mod synced;

use super::node::Life;
use ipc::Time;
use std::sync::{Arc, Mutex};

/// Whether a node believes, at a true time, that it may serve.
pub type Believes = Box<dyn Fn(Time) -> bool + Send + Sync>;

/// The recorded events on which the invariants are judged.
#[derive(Default)]
pub struct Invariants {
    pub(crate) one_head: one_head::OneHead,
    /// The operations of each program.
    pub(crate) histories: Mutex<[History; 2]>,
}

impl Invariants {
    /// Nothing happened yet.
    pub(crate) fn new() -> Self {
        Self::default()
    }
}

/// A head of the past or the present.
pub(crate) struct HeadLife {
    pub life: Arc<Life>,
    pub version: u64,
    pub believes: Believes,
}

/// The operations of one program, numbered from 1, over all its lives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// The last one that returned.
    pub done: usize,
    /// All up to this one were there when an fsync returned, or at a take-over.
    pub synced: usize,
    /// For each operation that began, how much of the other program it had seen before.
    pub seen: Vec<usize>,
}
