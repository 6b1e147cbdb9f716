//! CRC-32C over one or several pieces, starting from a salt.

use crate::ids::{Incarnation, LogUid};
use crc_fast::{CrcAlgorithm, Digest};

/// Start value of a checksum. The salt of a log's frames depends on its uid and incarnation, so a frame of another
/// log or of an earlier incarnation never looks valid: two start values give two checksums for any bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Salt(u32);

impl Salt {
    /// For structures that are found through a checked pointer and need no salt.
    pub const NONE: Self = Self(0xffff_ffff);

    /// The salt of one incarnation of a log.
    pub fn of_log(uid: LogUid, incarnation: Incarnation) -> Self {
        let mut running = Running::new(Self::NONE);
        running.update(&uid.get().to_le_bytes());
        running.update(&incarnation.get().to_le_bytes());
        Self(running.finish())
    }
}

impl Salt {
    /// The 32-bit register with which a checksum starts, for code that uses the processor's instruction.
    #[inline]
    pub const fn register(self) -> u32 {
        self.0
    }
}

/// The checksum of a final register.
#[inline]
pub const fn of_register(register: u32) -> u32 {
    !register
}

/// A checksum in progress. A clone continues independently, and is cheaper than a new start from the salt.
#[derive(Clone)]
pub struct Running(Digest);

impl Running {
    /// Starts a checksum.
    pub fn new(salt: Salt) -> Self {
        Self(Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(salt.0)))
    }

    /// Adds bytes at the end.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of everything added.
    pub fn finish(&self) -> u32 {
        u32::try_from(self.0.finalize()).expect("a CRC-32 has 32 bits")
    }
}

/// The checksum of one piece.
pub fn of(salt: Salt, bytes: &[u8]) -> u32 {
    let mut running = Running::new(salt);
    running.update(bytes);
    running.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_crc32c() {
        assert_eq!(of(Salt::NONE, b"123456789"), 0xe306_9283);
    }

    #[test]
    fn pieces_give_the_checksum_of_the_whole() {
        let bytes: Vec<u8> = (0..1000u32).map(|i| i as u8).collect();
        for cut in [0, 1, 7, 64, 333, 1000] {
            let mut running = Running::new(Salt::NONE);
            running.update(&bytes[..cut]);
            running.update(&bytes[cut..]);
            assert_eq!(running.finish(), of(Salt::NONE, &bytes));
        }
    }

    #[test]
    fn another_incarnation_is_another_salt() {
        let salt = |uid, incarnation| Salt::of_log(LogUid::new(uid), Incarnation::new(incarnation));
        assert_ne!(of(salt(1, 1), b"frame"), of(salt(1, 2), b"frame"));
        assert_ne!(of(salt(1, 1), b"frame"), of(salt(2, 1), b"frame"));
    }
}
