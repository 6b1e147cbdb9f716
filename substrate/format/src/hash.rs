//! Keyed hashes of update records. A `Digest` entry of the ledger contains the hash of the records that the head digested,
//! so each copy compares its own records with them before it applies them (Assise §3.2.1, digest on replicas).
//!
//! Guarantees: a process that does not know the key cannot make two records with the same hash, except with probability
//! 2^-64. A checksum has no such guarantee: the owner of a log knows its salt.

use aegis::aegis128x2::Aegis128X2Mac;

/// Separates these hashes from any other use of a life's key.
const DOMAIN: &[u8; 16] = b"hearth: records.";

/// Bytes of the algorithm's result, of which a hash is the first half.
const TAG_BYTES: usize = 16;

/// Key of the hashes of one life of a chain.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct HashKey([u8; 16]);

impl HashKey {
    /// The key of a life, as its `Life` entry contains it.
    pub fn of_life(key: &[u8; 16]) -> Self {
        Self(*key)
    }

    /// Hash of one record: its frame without the padding. The frame contains the number of the record.
    pub fn of_record(&self, frame: &[u8]) -> RecordsHash {
        let mut mac = Aegis128X2Mac::<TAG_BYTES>::new_with_nonce(&self.0, DOMAIN);
        mac.update(frame);
        RecordsHash(u128::from_le_bytes(mac.finalize()) as u64)
    }
}

impl std::fmt::Debug for HashKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HashKey(..)")
    }
}

/// Hash of consecutive records of a log: the sum of their hashes. So the hash of a range needs no state from the records
/// before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordsHash(u64);

impl RecordsHash {
    /// Adds the records after these.
    pub fn add(&mut self, other: Self) {
        self.0 = self.0.wrapping_add(other.0);
    }

    /// The bytes in a `Digest` entry. Zeros stand for "no hash"; the probability that records have this hash is 2^-64.
    pub fn to_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    /// The hash in a `Digest` entry; `None` if the entry has no hash.
    pub fn from_bytes(bytes: [u8; 8]) -> Option<Self> {
        (bytes != [0; 8]).then(|| Self(u64::from_le_bytes(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_depends_on_each_byte_and_on_the_key() {
        let key = HashKey::of_life(&[7; 16]);
        let frame: Vec<u8> = (0..=255).collect();
        let hash = key.of_record(&frame);
        assert_eq!(hash, key.of_record(&frame));
        for index in 0..frame.len() {
            let mut other = frame.clone();
            other[index] ^= 1;
            assert_ne!(key.of_record(&other), hash, "byte {index}");
        }
        assert_ne!(key.of_record(&frame[..255]), hash);
        for index in 0..16 {
            let mut other = [7; 16];
            other[index] ^= 0x80;
            assert_ne!(HashKey::of_life(&other).of_record(&frame), hash, "byte {index} of the key");
        }
    }

    /// A change of the algorithm makes the entries of earlier daemons wrong.
    #[test]
    fn the_hash_stays_the_same() {
        let key = HashKey::of_life(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        let mut sum = key.of_record(b"one");
        sum.add(key.of_record(b"two"));
        assert_eq!(u64::from_le_bytes(sum.to_bytes()), 11_841_118_665_416_561_640);
        assert_eq!(RecordsHash::from_bytes([0; 8]), None);
        assert_eq!(RecordsHash::from_bytes(sum.to_bytes()), Some(sum));
    }
}
