//! CRC-32C over one or several pieces, starting from a salt.

use crate::BLOCK_BYTES;
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

/// CRC-64 (NVME) of bytes that are added piece by piece: compares contents of two nodes, among which 32 bits would not do.
#[derive(Clone)]
pub struct Sum64(Digest);

impl Default for Sum64 {
    fn default() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc64Nvme))
    }
}

impl Sum64 {
    /// Adds bytes at the end.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of everything added.
    pub fn finish(&self) -> u64 {
        self.0.finalize()
    }
}

/// The unsalted checksum of one block, computed from two checksums with the same salt: that of the bytes before the block,
/// and that of these bytes together with the block. A block that was summed as a part of a frame is not summed again.
#[inline]
pub fn of_block_behind(before: u32, both: u32) -> u32 {
    let moved = before
        .to_le_bytes()
        .iter()
        .zip(&BEHIND_BLOCK)
        .fold(0, |sum, (byte, table)| sum ^ table[*byte as usize]);
    both ^ moved
}

/// For each byte of a register, the register after [`BLOCK_BYTES`] zero bytes. A CRC is linear, so the register after the zero
/// bytes is the exclusive-or of the entries for its four bytes.
static BEHIND_BLOCK: [[u32; 256]; 4] = behind_block();

/// CRC-32C's polynomial, lowest bit first.
const POLYNOMIAL: u32 = 0x82f6_3b78;

const fn behind_block() -> [[u32; 256]; 4] {
    let mut columns = [0; 32];
    let mut bit = 0;
    while bit < 32 {
        // The register after one zero byte.
        let (mut register, mut step) = (1 << bit, 0);
        while step < 8 {
            register = register >> 1 ^ if register & 1 != 0 { POLYNOMIAL } else { 0 };
            step += 1;
        }
        columns[bit] = register;
        bit += 1;
    }
    // Each round doubles the number of zero bytes.
    let mut bytes = 1;
    while bytes < BLOCK_BYTES {
        let (mut twice, mut bit) = ([0; 32], 0);
        while bit < 32 {
            twice[bit] = times(&columns, columns[bit]);
            bit += 1;
        }
        columns = twice;
        bytes *= 2;
    }
    let mut tables = [[0; 256]; 4];
    let mut at = 0;
    while at < 4 * 256 {
        tables[at / 256][at % 256] = times(&columns, ((at % 256) as u32) << (at / 256 * 8));
        at += 1;
    }
    tables
}

/// The product of a matrix over bits, given by its columns, and a register.
const fn times(columns: &[u32; 32], register: u32) -> u32 {
    let (mut product, mut bit) = (0, 0);
    while bit < 32 {
        if register >> bit & 1 != 0 {
            product ^= columns[bit];
        }
        bit += 1;
    }
    product
}

const _: () = assert!(BLOCK_BYTES.is_power_of_two());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_a_block_is_computed_from_the_sum_of_the_frame() {
        let block: Vec<u8> = (0..BLOCK_BYTES).map(|i| (i * i / 7) as u8).collect();
        for (before, salt) in [(&b""[..], Salt::NONE), (b"header", Salt::NONE), (&[9; 60], Salt(77))] {
            let both = [before, &block].concat();
            assert_eq!(of_block_behind(of(salt, before), of(salt, &both)), of(Salt::NONE, &block));
        }
    }

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
    fn the_sum_of_64_bits_is_that_of_nvme() {
        // The check value of the catalogue of CRCs.
        let mut sum = Sum64::default();
        sum.update(b"1234");
        sum.update(b"56789");
        assert_eq!(sum.finish(), 0xae8b_1486_0a79_9888);
    }

    #[test]
    fn another_incarnation_is_another_salt() {
        let salt = |uid, incarnation| Salt::of_log(LogUid::new(uid), Incarnation::new(incarnation));
        assert_ne!(of(salt(1, 1), b"frame"), of(salt(1, 2), b"frame"));
        assert_ne!(of(salt(1, 1), b"frame"), of(salt(2, 1), b"frame"));
    }
}
