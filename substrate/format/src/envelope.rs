//! The head that every frame of an append ring carries, be it a record of an update log or an entry of a ledger:
//! what it is, how long, where in the order, and a checksum over all of it.

use crate::DecodeError;
use crate::checksum::{Running, Salt};
use crate::ids::Sequence;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a frame's header: the envelope and the operands of its kind.
pub const HEADER_BYTES: usize = 64;

/// Frames begin and end on a cache line: a 128-byte write takes 192 bytes of log.
pub const FRAME_ALIGN: usize = 64;

/// Version of the frame formats (records and ledger entries).
pub const FRAME_VERSION: u8 = 1;

/// First 24 bytes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Envelope {
    /// CRC-32C, salted with the log, over the frame's bytes after this field: the rest of the header, then the
    /// payload (not the filling up to the next cache line).
    pub checksum: U32,
    /// What the frame is: a `record::Kind` or a `ledger::Kind`.
    pub kind: u8,
    /// [`FRAME_VERSION`].
    pub version: u8,
    /// Meaning given by the kind.
    pub flags: u8,
    /// Zero.
    pub reserved: u8,
    /// Bytes of payload after the header.
    pub payload_bytes: U32,
    /// Zero.
    pub reserved2: U32,
    /// Position in the log's order.
    pub sequence: Sequence,
}

const _: () = assert!(size_of::<Envelope>() == 24);

impl Envelope {
    /// An envelope whose sequence and checksum are filled in when the frame is appended.
    pub fn new(kind: u8, flags: u8, payload_bytes: u32) -> Self {
        Self {
            checksum: U32::new(0),
            kind,
            version: FRAME_VERSION,
            flags,
            reserved: 0,
            payload_bytes: U32::new(payload_bytes),
            reserved2: U32::new(0),
            sequence: Sequence::new(0),
        }
    }

    /// Reads the envelope at the start of a frame; nothing about the payload is checked.
    ///
    /// # Errors
    /// `Truncated`, `Version`.
    pub fn decode(frame: &[u8]) -> Result<Self, DecodeError> {
        let (envelope, _) = Self::read_from_prefix(frame).map_err(|_| DecodeError::Truncated)?;
        if envelope.version != FRAME_VERSION {
            return Err(DecodeError::Version(u16::from(envelope.version)));
        }
        Ok(envelope)
    }

    /// Bytes that the whole frame takes in its ring.
    pub fn frame_bytes(&self) -> u64 {
        frame_bytes(u64::from(self.payload_bytes.get()))
    }
}

/// Bytes that a frame with this payload takes in its ring.
pub const fn frame_bytes(payload_bytes: u64) -> u64 {
    (HEADER_BYTES as u64 + payload_bytes).next_multiple_of(FRAME_ALIGN as u64)
}

/// A frame's checksum in the making: started with the header, then fed the payload.
pub fn checksum_header(salt: Salt, header: &[u8; HEADER_BYTES]) -> Running {
    let mut running = Running::new(salt);
    running.update(&header[size_of::<U32>()..]);
    running
}

/// Checks a whole frame against its envelope: length and checksum.
///
/// # Errors
/// `Truncated`, `Version`, `Checksum`.
pub fn check_frame(salt: Salt, frame: &[u8]) -> Result<Envelope, DecodeError> {
    let envelope = Envelope::decode(frame)?;
    let payload_bytes = usize::try_from(envelope.payload_bytes.get()).map_err(|_| DecodeError::Truncated)?;
    let (header, rest) = frame.split_first_chunk::<HEADER_BYTES>().ok_or(DecodeError::Truncated)?;
    let payload = rest.get(..payload_bytes).ok_or(DecodeError::Truncated)?;
    let mut running = checksum_header(salt, header);
    running.update(payload);
    if running.finish() != envelope.checksum.get() {
        return Err(DecodeError::Checksum);
    }
    Ok(envelope)
}
