//! Hashes of the records of one log, as they were when the head first read them (`docs/replication.md`, C6).
//!
//! The head reads a record several times: once for each copy to which it sends the record, and once for the digest. The
//! owner of the log could change the record in between. [`RecordHashes`] finds that, so all copies and the head's own
//! tree get the same record.
//!
//! Guarantees: of two readings of a record that both pass, the bytes are the same. The memory is proportional to the
//! number of records in the log's ring.

use format::Sequence;
use format::hash::{HashKey, RecordsHash};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The records that the ring contains, or contained until they were overwritten last.
pub struct RecordHashes {
    key: HashKey,
    ring_bytes: u64,
    /// Locked for one comparison at a time; nothing waits while it is locked.
    seen: Mutex<SeenRecords>,
}

#[derive(Default)]
struct SeenRecords {
    first: Sequence,
    records: VecDeque<SeenRecord>,
    /// Bytes of these records in the ring.
    bytes: u64,
    /// Records before this one were overwritten in the ring. A reading that finds one finds another record in its place.
    overwritten: Sequence,
    /// True once a record was found that had changed.
    changed: bool,
}

struct SeenRecord {
    hash: RecordsHash,
    bytes: u32,
}

impl RecordHashes {
    /// Knows no record yet of a log with a ring of this size.
    pub fn new(key: HashKey, ring_bytes: u64) -> Self {
        Self { key, ring_bytes, seen: Mutex::default() }
    }

    /// The hash of a record that was read, and takes `bytes` of the ring; `None` if an earlier reading gave other bytes.
    pub fn compare(&self, sequence: Sequence, frame: &[u8], bytes: u64) -> Option<RecordsHash> {
        let hash = self.key.of_record(frame);
        let mut seen = self.seen();
        let index =
            sequence.get().checked_sub(seen.first.get()).and_then(|index| usize::try_from(index).ok());
        match index {
            // A record that was digested in an earlier life, which the copy compares with that life's entry.
            None if sequence >= seen.overwritten => return Some(hash),
            None => {
                seen.changed = true;
                return None;
            }
            Some(index) if index < seen.records.len() => {
                let same = seen.records[index].hash == hash;
                seen.changed |= !same;
                return same.then_some(hash);
            }
            Some(index) if index > seen.records.len() || seen.records.is_empty() => {
                let SeenRecords { overwritten, changed, .. } = *seen;
                *seen = SeenRecords { first: sequence, overwritten, changed, ..SeenRecords::default() };
            }
            Some(_) => {}
        }
        seen.push(SeenRecord { hash, bytes: u32::try_from(bytes).unwrap_or(u32::MAX) });
        seen.forget_overwritten(self.ring_bytes);
        Some(hash)
    }

    /// True if a record was found that had changed.
    pub fn found_change(&self) -> bool {
        self.seen().changed
    }

    fn seen(&self) -> MutexGuard<'_, SeenRecords> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SeenRecords {
    fn push(&mut self, record: SeenRecord) {
        self.bytes += u64::from(record.bytes);
        self.records.push_back(record);
    }

    /// Forgets the records that the newest ones have overwritten in the ring.
    fn forget_overwritten(&mut self, ring_bytes: u64) {
        while self.bytes > ring_bytes
            && let Some(record) = self.records.pop_front()
        {
            self.bytes -= u64::from(record.bytes);
            self.first = self.first.next();
            self.overwritten = self.first;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes() -> RecordHashes {
        RecordHashes::new(HashKey::of_life(&[3; 16]), 1024)
    }

    #[test]
    fn a_record_that_changed_is_found_until_it_is_overwritten() {
        let hashes = hashes();
        let compare = |sequence, byte: u8| hashes.compare(Sequence::new(sequence), &[byte; 128], 128);
        for sequence in 5..13 {
            assert!(compare(sequence, 1).is_some());
        }
        for sequence in 5..13 {
            assert!(compare(sequence, 1).is_some(), "record {sequence}");
        }
        // One more than the ring has space for.
        assert!(compare(13, 1).is_some());
        assert!(!hashes.found_change());
        assert!(compare(5, 1).is_none(), "another record stands there");
        for sequence in 6..14 {
            assert!(compare(sequence, 2).is_none() && compare(sequence, 1).is_some(), "record {sequence}");
        }
        assert!(hashes.found_change());
        assert!(hashes.seen.lock().unwrap().records.len() <= 8);
    }

    /// A log whose first records were read without hashes, or that continues behind a gap.
    #[test]
    fn readings_may_begin_anywhere() {
        let hashes = hashes();
        let compare = |sequence, byte: u8| hashes.compare(Sequence::new(sequence), &[byte; 64], 64);
        assert!(compare(100, 1).is_some() && compare(99, 1).is_some() && compare(100, 2).is_none());
        assert!(compare(102, 1).is_some() && compare(102, 2).is_none() && compare(103, 1).is_some());
    }
}
