//! The memory of the own log is made ready a piece ahead of its use, because the first store to a page waits for the kernel
//! about as long as a small write takes.
//!
//! In its first rounds through the log a writer gets pages as the kernel has them. Large pages let programs that overwrite without
//! a pause write a quarter more, but the kernel forms one of 2 MB in 0.7 ms, or in 5 ms of memory that a virtual machine has given
//! back to its host: longer than a short program takes to write as much. So large pages are formed once they pay.

use pmem::Region;
use pmem::region::READY_PIECE_BYTES;
use std::ops::Range;

/// Bytes that are made ready for a session that begins: most programs write little or nothing, and a page that the machine has
/// not used before takes microseconds.
const FIRST_BYTES: u64 = 64 << 10;
/// Large pages are formed from this round through the log on.
const ROUNDS: u32 = 4;

/// How much of a log's memory is ready.
pub(crate) struct LogMemory {
    /// The memory before this position is mapped.
    mapped: u64,
    /// The memory before this position is mapped by large pages, where the kernel can form them.
    large: u64,
    /// The memory before this position was used often enough for large pages.
    used: u64,
    /// Rounds through the log since a part was mapped last.
    rounds: u32,
    /// Nothing is due while the last record ends here.
    quiet: Range<u64>,
}

/// A part that is due.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// It will be used for the first time.
    New(Range<u64>),
    /// It was used in some rounds.
    Used(Range<u64>),
}

impl Part {
    pub fn make_ready(self, log: &Region) {
        match self {
            Self::New(part) => log.touch(part),
            Self::Used(part) => log.make_part_ready(part),
        }
    }
}

impl LogMemory {
    /// That of a log that is empty and has so many bytes, whose first part is made ready.
    pub fn begin(log: &Region, log_bytes: u64) -> Self {
        let mapped = log_bytes.min(FIRST_BYTES);
        log.touch(0..mapped);
        Self::new(mapped, log_bytes)
    }

    fn new(mapped: u64, log_bytes: u64) -> Self {
        let mut memory = Self { mapped, large: 0, used: 0, rounds: 0, quiet: 0..u64::MAX };
        memory.has_more(log_bytes);
        memory
    }

    /// Whether there is something to do behind a record that ends at `tail`.
    #[inline]
    pub fn is_due(&self, tail: u64) -> bool {
        !self.quiet.contains(&tail)
    }

    /// The log has so many bytes now.
    pub fn has_more(&mut self, log_bytes: u64) {
        self.quiet.end = self.next_at(self.quiet.start, log_bytes);
    }

    /// The part that is due behind a record that ends at `tail`; it counts as ready from now on.
    pub fn next(&mut self, tail: u64, log_bytes: u64) -> Option<Part> {
        if tail < self.quiet.start {
            self.rounds += 1;
            if self.rounds >= ROUNDS {
                self.used = self.whole_pieces();
            }
        }
        let part = if tail >= self.map_at(log_bytes) {
            let part = self.mapped..log_bytes.min(mapped_end(self.mapped.max(tail)));
            (self.mapped, self.rounds) = (part.end, 0);
            Some(Part::New(part))
        } else if tail >= self.merge_at() {
            let part = self.large..self.large + READY_PIECE_BYTES;
            self.large = part.end;
            Some(Part::Used(part))
        } else {
            None
        };
        // A record that ends before this one begins another round.
        self.quiet = tail..self.next_at(tail, log_bytes);
        part
    }

    fn whole_pieces(&self) -> u64 {
        self.mapped / READY_PIECE_BYTES * READY_PIECE_BYTES
    }

    fn next_at(&self, tail: u64, log_bytes: u64) -> u64 {
        // A place behind the start, so that the next round is noticed where it begins.
        let middle = self.mapped / 2;
        let counts = self.large < self.whole_pieces() && tail < middle;
        self.map_at(log_bytes).min(self.merge_at()).min(if counts { middle } else { u64::MAX })
    }

    /// Where a record ends behind which the next part is mapped. Until that part is a piece, the part that is mapped is doubled
    /// when half of it is used; later the next piece is mapped when a record ends in the one before it.
    fn map_at(&self, log_bytes: u64) -> u64 {
        let ahead = (self.mapped / 2).min(READY_PIECE_BYTES);
        if self.mapped < log_bytes { self.mapped - ahead } else { u64::MAX }
    }

    /// The same for the next large page.
    fn merge_at(&self) -> u64 {
        if self.large < self.used { self.large.saturating_sub(READY_PIECE_BYTES) } else { u64::MAX }
    }
}

/// Where the memory that is mapped ends when that up to a position is mapped or in use.
fn mapped_end(up_to: u64) -> u64 {
    if up_to < READY_PIECE_BYTES {
        (2 * up_to).next_power_of_two().min(READY_PIECE_BYTES)
    } else {
        (up_to / READY_PIECE_BYTES + 1) * READY_PIECE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const START: u64 = 4096;

    /// The parts that are due while records of so many bytes fill the log: where they end, in KiB, and whether they were used.
    fn round(memory: &mut LogMemory, log_bytes: u64, record: usize) -> Vec<(u64, bool)> {
        let mut parts = Vec::new();
        for tail in (START..log_bytes).step_by(record) {
            if memory.is_due(tail) {
                match memory.next(tail, log_bytes) {
                    Some(Part::New(part)) => parts.push((part.end >> 10, false)),
                    Some(Part::Used(part)) => {
                        assert_eq!(part.end - part.start, READY_PIECE_BYTES);
                        parts.push((part.end >> 10, true));
                    }
                    None => {}
                }
            }
            assert!(tail <= memory.mapped);
        }
        parts
    }

    /// Rounds in which nothing is due, until pieces become large.
    fn few_rounds(memory: &mut LogMemory, log_bytes: u64) {
        for _ in 1..ROUNDS {
            assert_eq!(round(memory, log_bytes, 4160), []);
        }
    }

    #[test]
    fn each_piece_is_mapped_before_it_is_written_and_large_after_some_rounds() {
        let mut memory = LogMemory::new(FIRST_BYTES, 9 * MIB);
        let new = [128, 256, 512, 1024, 2048, 4096, 6144, 8192, 9216].map(|end| (end, false));
        assert_eq!(round(&mut memory, 9 * MIB, 4160), new);
        few_rounds(&mut memory, 9 * MIB);
        let used = [2048, 4096, 6144, 8192].map(|end| (end, true));
        assert_eq!(round(&mut memory, 9 * MIB, 4160), used);
        assert_eq!(round(&mut memory, 9 * MIB, 4160), []);
        assert!(!memory.is_due(START) && !memory.is_due(9 * MIB));
    }

    #[test]
    fn a_log_that_grows_after_some_rounds_gets_pages_again_and_large_ones_later() {
        let mut memory = LogMemory::new(FIRST_BYTES, 4 * MIB);
        round(&mut memory, 4 * MIB, 4160);
        few_rounds(&mut memory, 4 * MIB);
        assert_eq!(round(&mut memory, 4 * MIB, 4160), [(2048, true), (4096, true)]);
        memory.has_more(8 * MIB);
        assert_eq!(round(&mut memory, 8 * MIB, 4160), [(6144, false), (8192, false)]);
        few_rounds(&mut memory, 8 * MIB);
        assert_eq!(round(&mut memory, 8 * MIB, 4160), [(6144, true), (8192, true)]);
        assert_eq!(round(&mut memory, 8 * MIB, 4160), []);
    }

    #[test]
    fn a_long_record_makes_all_ready_that_it_needs() {
        let after = |tail, log_bytes| LogMemory::new(FIRST_BYTES, log_bytes).next(tail, log_bytes);
        assert_eq!(after(300 << 10, 9 * MIB), Some(Part::New(64 << 10..MIB)));
        assert_eq!(after(5 * MIB, 9 * MIB), Some(Part::New(64 << 10..6 * MIB)));
        let mut memory = LogMemory::new(2 * MIB, 3 * MIB);
        assert!(!memory.is_due(MIB - 1) && memory.is_due(MIB));
        assert_eq!(memory.next(MIB, 3 * MIB), Some(Part::New(2 * MIB..3 * MIB)));
        assert_eq!(LogMemory::new(2 * MIB, 2 * MIB).next(MIB, 2 * MIB), None);
    }
}
