//! The encoding of answers.

use crate::abi::OutHeader;
use crate::units::Stay;
use zerocopy::{Immutable, IntoBytes};

/// An answer that is being built. Its memory is reused, and grows with the answers.
pub(crate) struct Reply {
    buffer: Vec<u8>,
    bytes_max: usize,
    used: usize,
    /// Units that are held until the answer was sent.
    until_sent: Vec<Stay>,
}

const HEADER_BYTES: usize = size_of::<OutHeader>();
/// Most answers have at most this number of bytes.
const SHORT_BYTES: usize = 16 << 10;

impl Reply {
    /// An answer of at most so many bytes beside the header.
    pub(crate) fn new(bytes_max: usize) -> Self {
        let buffer = vec![0; HEADER_BYTES + bytes_max.min(SHORT_BYTES)];
        Self { buffer, bytes_max: HEADER_BYTES + bytes_max, used: HEADER_BYTES, until_sent: Vec::new() }
    }

    /// Whether a former answer was longer than most.
    pub(crate) fn is_long(&self) -> bool {
        self.buffer.len() > HEADER_BYTES + SHORT_BYTES
    }

    /// Makes space for so many bytes in all.
    fn reach(&mut self, bytes: usize) {
        if bytes > self.buffer.len() {
            assert!(bytes <= self.bytes_max, "an answer is no longer than it may be");
            self.buffer.resize(bytes.next_power_of_two().min(self.bytes_max), 0);
        }
    }

    /// Begins an empty answer.
    pub(crate) fn clear(&mut self) {
        self.used = HEADER_BYTES;
    }

    /// Holds a unit until the answer was sent.
    pub(crate) fn stays(&mut self, stay: Stay) {
        self.until_sent.push(stay);
    }

    /// The answer was sent, or there is none: releases the units.
    pub(crate) fn sent(&mut self) {
        self.until_sent.clear();
    }

    /// Appends bytes.
    pub(crate) fn put_bytes(&mut self, bytes: &[u8]) {
        self.reach(self.used + bytes.len());
        self.buffer[self.used..self.used + bytes.len()].copy_from_slice(bytes);
        self.used += bytes.len();
    }

    /// Appends fields.
    pub(crate) fn put<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.put_bytes(value.as_bytes());
    }

    /// Bytes to be filled in place; [`Self::extend`] appends those that were filled.
    pub(crate) fn spare(&mut self, bytes: usize) -> &mut [u8] {
        let end = self.bytes_max.min(self.used + bytes);
        self.reach(end);
        &mut self.buffer[self.used..end]
    }

    /// Appends bytes that were filled in place.
    pub(crate) fn extend(&mut self, bytes: usize) {
        self.used += bytes;
        assert!(self.used <= self.buffer.len(), "only what was spare is filled");
    }

    /// Number of bytes after the header.
    pub(crate) fn bytes(&self) -> usize {
        self.used - HEADER_BYTES
    }

    /// Completes the message: the answer, or an error instead of it.
    pub(crate) fn finish(&mut self, unique: u64, result: Result<(), i32>) -> &[u8] {
        if result.is_err() {
            self.clear();
        }
        let error = result.err().map_or(0, |errno| -errno);
        let header = OutHeader { bytes: self.used as u32, error, unique };
        self.buffer[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        &self.buffer[..self.used]
    }
}
