//! The memory of the own log is mapped a piece ahead of its use, because the first store to a page waits for the kernel
//! about as long as a small write takes. SharedFS gives it large pages if the log is written through several times.

use pmem::Region;
use std::ops::Range;

/// Bytes that are mapped for a session that begins: most programs write little or nothing, and a page that the machine has
/// not used before takes microseconds.
const FIRST_BYTES: u64 = 64 << 10;

/// Bytes that are mapped at a time later: about half a millisecond where the machine has not used the memory before.
const PIECE_BYTES: u64 = 512 << 10;

/// How much of a log's memory is mapped.
pub(crate) struct LogMemory {
    /// The memory before this position is mapped.
    mapped: u64,
    /// Nothing is due while the last record ends before this position.
    due_at: u64,
}

impl LogMemory {
    /// That of a log that is empty and has so many bytes, whose first part is mapped.
    pub fn begin(log: &Region, log_bytes: u64) -> Self {
        let mapped = log_bytes.min(FIRST_BYTES);
        log.touch(0..mapped);
        Self::new(mapped, log_bytes)
    }

    fn new(mapped: u64, log_bytes: u64) -> Self {
        Self { mapped, due_at: map_at(mapped, log_bytes) }
    }

    /// Whether a part is to be mapped behind a record that ends at `tail`.
    #[inline]
    pub fn is_due(&self, tail: u64) -> bool {
        tail >= self.due_at
    }

    /// The log has so many bytes now.
    pub fn has_more(&mut self, log_bytes: u64) {
        self.due_at = map_at(self.mapped, log_bytes);
    }

    /// The part that is due behind a record that ends at `tail`; it counts as mapped from now on.
    pub fn next(&mut self, tail: u64, log_bytes: u64) -> Option<Range<u64>> {
        let part = (tail >= map_at(self.mapped, log_bytes))
            .then(|| self.mapped..log_bytes.min(mapped_end(self.mapped.max(tail))));
        *self = Self::new(part.as_ref().map_or(self.mapped, |part| part.end), log_bytes);
        part
    }
}

/// Where a record ends behind which the next part is mapped, if so many bytes are. Until that part is a piece, the part that is
/// mapped is doubled when half of it is used; later the next piece is mapped when a record ends in the one before it.
fn map_at(mapped: u64, log_bytes: u64) -> u64 {
    let ahead = (mapped / 2).min(PIECE_BYTES);
    if mapped < log_bytes { mapped - ahead } else { u64::MAX }
}

/// Where the memory that is mapped ends when that up to a position is mapped or in use.
fn mapped_end(up_to: u64) -> u64 {
    if up_to < PIECE_BYTES {
        (2 * up_to).next_power_of_two().min(PIECE_BYTES)
    } else {
        (up_to / PIECE_BYTES + 1) * PIECE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const START: u64 = 4096;

    /// The parts that are due while records of so many bytes fill the log: where they end, in KiB.
    fn round(memory: &mut LogMemory, log_bytes: u64, record: usize) -> Vec<u64> {
        let mut parts = Vec::new();
        for tail in (START..log_bytes).step_by(record) {
            if memory.is_due(tail) {
                parts.extend(memory.next(tail, log_bytes).map(|part| part.end >> 10));
            }
            assert!(tail <= memory.mapped);
        }
        parts
    }

    #[test]
    fn each_piece_is_mapped_once_before_it_is_written() {
        let mut memory = LogMemory::new(FIRST_BYTES, 3 * MIB);
        let parts = [128, 256, 512, 1024, 1536, 2048, 2560, 3072];
        assert_eq!(round(&mut memory, 3 * MIB, 4160), parts);
        assert_eq!(round(&mut memory, 3 * MIB, 4160), []);
        memory.has_more(4 * MIB + MIB / 4);
        assert_eq!(round(&mut memory, 4 * MIB + MIB / 4, 4160), [3584, 4096, 4352]);
        assert!(!memory.is_due(START) && !memory.is_due(5 * MIB));
    }

    #[test]
    fn a_long_record_maps_all_that_it_needs() {
        let after = |tail, log_bytes| LogMemory::new(FIRST_BYTES, log_bytes).next(tail, log_bytes);
        assert_eq!(after(200 << 10, 9 * MIB), Some(64 << 10..MIB / 2));
        assert_eq!(after(5 * MIB, 9 * MIB), Some(64 << 10..5 * MIB + MIB / 2));
        let (due_at, end) = (MIB + MIB / 2, 2 * MIB + MIB / 4);
        let mut memory = LogMemory::new(2 * MIB, end);
        assert!(!memory.is_due(due_at - 1) && memory.is_due(due_at));
        assert_eq!(memory.next(due_at, end), Some(2 * MIB..end));
        assert_eq!(LogMemory::new(2 * MIB, 2 * MIB).next(due_at, 2 * MIB), None);
    }
}
