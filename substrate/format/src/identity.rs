//! The identity of a pool in a cluster: the cluster, and the generation in which the pool was a copy there.
//!
//! Blocks 0 and 1 of the file are two slots. Write N goes to slot N mod 2, so the other slot always contains a complete
//! identity. The valid slot with the larger number is the current one.

use crate::DecodeError;
use crate::checksum::{self, Salt};
use crate::ids::{ChainNumber, ChangeNumber, Epoch, NodeId, PoolGeneration, PoolUid};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `HIDENT`, read as bytes.
pub const IDENTITY_MAGIC: [u8; 8] = *b"HIDENT\0\0";

/// Version of this module.
pub const IDENTITY_VERSION: u32 = 1;

/// A slot.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct IdentitySlot {
    /// [`IDENTITY_MAGIC`].
    pub magic: [u8; 8],
    /// CRC-32C of this structure with this field zero.
    pub checksum: U32,
    /// [`IDENTITY_VERSION`].
    pub version: U32,
    /// Number of this write.
    pub number: U64,
    /// The pool.
    pub pool: PoolUid,
    /// The cluster; 0 if it has never joined one.
    pub cluster: U64,
    /// The newest change of the cluster that it has seen.
    pub newest: ChangeNumber,
    /// The last generation with which its node has joined, as far as it knows; 0 if none.
    pub joined: PoolGeneration,
    /// The generation with which its node asks to join; 0 if it does not.
    pub asked: PoolGeneration,
    /// Its node.
    pub node: NodeId,
    /// The chain that it holds.
    pub chain: ChainNumber,
    /// The epoch in which its node joined last; 0 if it has not.
    pub life: Epoch,
    /// Zero.
    pub reserved: [u8; 20],
}

const _: () = assert!(size_of::<IdentitySlot>() == 96);

impl IdentitySlot {
    /// The bytes with magic, version and checksum, ready to be written into a slot.
    pub fn encode(mut self) -> [u8; size_of::<IdentitySlot>()] {
        (self.magic, self.version, self.checksum) = (IDENTITY_MAGIC, U32::new(IDENTITY_VERSION), U32::new(0));
        self.checksum = U32::new(checksum::of(Salt::NONE, self.as_bytes()));
        zerocopy::transmute!(self)
    }

    /// Reads and checks a slot.
    ///
    /// # Errors
    /// `Truncated`, `Kind` (an empty slot), `Checksum`, `Version`, `Field("reserved")`.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let (found, _) = Self::read_from_prefix(bytes).map_err(|_| DecodeError::Truncated)?;
        if found.magic != IDENTITY_MAGIC {
            return Err(DecodeError::Kind);
        }
        let unsummed = Self { checksum: U32::new(0), ..found };
        if checksum::of(Salt::NONE, unsummed.as_bytes()) != found.checksum.get() {
            return Err(DecodeError::Checksum);
        }
        if found.version.get() != IDENTITY_VERSION {
            return Err(DecodeError::Version(u16::try_from(found.version.get()).unwrap_or(u16::MAX)));
        }
        if found.reserved.iter().any(|byte| *byte != 0) {
            return Err(DecodeError::Field("reserved"));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_bytes_of_a_slot() {
        let slot = IdentitySlot {
            number: U64::new(0x11),
            pool: PoolUid::new(0x21),
            cluster: U64::new(0x31),
            newest: ChangeNumber::new(0x41),
            joined: PoolGeneration::new(0x51),
            asked: PoolGeneration::new(0x61),
            node: NodeId::new(0x71),
            chain: ChainNumber::new(0x81),
            life: Epoch::new(0x91),
            ..IdentitySlot::default()
        };
        let bytes = slot.encode();
        assert_eq!(&bytes[..8], b"HIDENT\0\0");
        let fields: Vec<u8> = bytes.iter().copied().filter(|byte| byte & 0x0f == 1 && *byte > 1).collect();
        assert!(fields.ends_with(&[0x11, 0x21, 0x31, 0x41, 0x51, 0x61, 0x71, 0x81, 0x91]), "{fields:x?}");
        assert_eq!((bytes[12], bytes[16], bytes[64], bytes[72]), (1, 0x11, 0x71, 0x91));
        assert_eq!(IdentitySlot::decode(&bytes), Ok(IdentitySlot::read_from_bytes(&bytes).unwrap()));
        let mut rotten = bytes;
        rotten[24] ^= 1;
        assert_eq!(IdentitySlot::decode(&rotten), Err(DecodeError::Checksum));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..160)) {
            let _ = IdentitySlot::decode(&bytes);
        }
    }
}
