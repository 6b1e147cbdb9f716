//! Reservation of a range of a file. A record of it needs a space reservation for all of its blocks, and each reserved
//! block stands for a share of the tree's nodes, of which a pool has far fewer. So a large range is reserved by several
//! records, and the digest of the first ones frees the nodes that the next ones need.

use crate::engine::LibFs;
use crate::need::Step;
use crate::state::State;
use format::BLOCK_BYTES;
use format::call::LEASE_WRITE;
use std::ops::Range;
use vfs::engine::{Allocate, Engine, Handle, Result, Target};
use vfs::{Caller, Error};

/// Most bytes that one record reserves.
const PIECE_BYTES_MAX: u64 = 4 << 20;

/// Where the piece ends that begins at `from`: at a border of blocks, except for the last one.
fn end_of_piece(from: u64, end: u64) -> u64 {
    let border = from.saturating_add(PIECE_BYTES_MAX) / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
    border.min(end)
}

impl LibFs {
    /// Reserves, clears or frees a range. A range beyond [`PIECE_BYTES_MAX`] is reserved by several records, of which only
    /// the last one changes the size.
    ///
    /// # Errors
    /// Those of [`Engine::allocate`]. After `NoSpace` the file is as before, except that holes of it may be reserved, and that
    /// no block of the range beyond its end is.
    pub(crate) fn allocate_range(
        &self,
        caller: &Caller,
        handle: Handle,
        what: Allocate,
        range: Range<u64>,
    ) -> Result<()> {
        let one = |what, range: Range<u64>| {
            let range = (range.start, range.end - range.start);
            match self.run(|state| state.allocate(caller, handle, what, range, false)) {
                // All own records are digested now, so that it is known which blocks the file has.
                Err(Error::NoSpace) if matches!(what, Allocate::Extend | Allocate::KeepSize) => {
                    self.run(|state| state.allocate(caller, handle, what, range, true))
                }
                done => done,
            }
        };
        if what == Allocate::PunchHole || range.end - range.start <= PIECE_BYTES_MAX {
            return one(what, range);
        }
        self.check_space(handle, &range)?;
        let mut from = range.start;
        loop {
            let to = end_of_piece(from, range.end);
            let is_last = to == range.end;
            match one(if is_last || what != Allocate::Extend { what } else { Allocate::KeepSize }, from..to) {
                Ok(()) if is_last => return Ok(()),
                Ok(()) => from = to,
                Err(error) => {
                    // A failure leaves the blocks reserved, as a crash does.
                    let _ = self.run(|state| state.free_beyond_end(caller, handle, range.start..from));
                    return Err(error);
                }
            }
        }
    }

    /// Fails before anything is reserved if the pool has not so much space.
    fn check_space(&self, handle: Handle, range: &Range<u64>) -> Result<()> {
        let own = self.state().session.as_ref().map_or(0, |session| session.room);
        let free_bytes =
            self.statfs()?.blocks_available.saturating_add(own).saturating_mul(BLOCK_BYTES as u64);
        let in_file_bytes = self.getattr(Target::Open(handle))?.blocks.saturating_mul(512);
        let fits = range.end - range.start <= free_bytes.saturating_add(in_file_bytes);
        if fits { Ok(()) } else { Err(Error::NoSpace) }
    }
}

impl State {
    /// Frees the blocks of a range that are beyond the end of the file. The end is read in the same attempt, under the same
    /// write lease, so bytes that others have written there meanwhile stay.
    fn free_beyond_end(&mut self, caller: &Caller, handle: Handle, range: Range<u64>) -> Step<()> {
        let index = self.writable(handle)?;
        self.hold(index, LEASE_WRITE)?;
        let start = range.start.max(self.attributes(index).size);
        if start >= range.end {
            return Ok(());
        }
        self.allocate(caller, handle, Allocate::PunchHole, (start, range.end - start), false)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test ends where something unexpected is")]
    use super::*;

    #[test]
    fn pieces_end_at_borders_of_blocks() {
        let end = 3 * PIECE_BYTES_MAX + 1;
        let mut ends = vec![5];
        while *ends.last().unwrap() < end {
            ends.push(end_of_piece(*ends.last().unwrap(), end));
        }
        assert_eq!(ends, [5, PIECE_BYTES_MAX, 2 * PIECE_BYTES_MAX, 3 * PIECE_BYTES_MAX, end]);
    }
}
