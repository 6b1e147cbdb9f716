//! A commit that is kept while others follow: the blocks that they free are not used again, so that a reader of that
//! commit's tree finds it whole, however long it takes.
//!
//! Blocks that a pin keeps are not available to other users of the area, so the pin gives way: when little is free it
//! is lost, before any block that it kept is used again. Its holder checks after each read whether it still has the
//! pin, before it relies on the data.

use crate::area::Area;
use crate::snapshot::Snapshot;
use format::CommitNumber;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One part of so many of all nodes has to be free while something is kept, and as much of the blocks.
pub const FREE_PART: u64 = 16;

/// A commit that is kept until this is dropped, or lost.
#[derive(Debug)]
pub struct Pin(Arc<PinState>);

#[derive(Debug)]
struct PinState {
    commit: CommitNumber,
    lost: AtomicBool,
}

impl Pin {
    /// Whether all that was read until now is of the commit.
    pub fn is_held(&self) -> bool {
        // Acquire: blocks that were given up are written only after this flag is set.
        !self.0.lost.load(Ordering::Acquire)
    }
}

/// All pins of an area.
#[derive(Default)]
pub(crate) struct Pins(Vec<Arc<PinState>>);

impl Area {
    /// The last commit, to be read while others follow.
    pub fn pin(&mut self) -> (Snapshot, Pin) {
        let pin = Arc::new(PinState { commit: self.last.commit(), lost: AtomicBool::new(false) });
        self.pins.0.push(pin.clone());
        (self.snapshot(), Pin(pin))
    }

    /// Up to which commit what was freed may be used again, if `commit` were it without pins.
    pub(crate) fn bound_by_pins(&mut self, commit: CommitNumber) -> CommitNumber {
        self.pins.0.retain(|pin| Arc::strong_count(pin) > 1);
        if !self.pins.0.is_empty() && self.is_short() {
            // Release: pairs with the Acquire of `is_held`.
            self.pins.0.drain(..).for_each(|pin| pin.lost.store(true, Ordering::Release));
        }
        self.pins.0.iter().map(|pin| pin.commit).min().map_or(commit, |pinned| pinned.min(commit))
    }

    /// Whether little is free.
    fn is_short(&self) -> bool {
        let usage = self.usage();
        u64::from(usage.nodes_free) < u64::from(usage.nodes) / FREE_PART
            || usage.blocks_free < usage.blocks / FREE_PART
    }
}
