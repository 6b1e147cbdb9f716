//! The envelope at the start of every frame of an append ring, both of an update log and of the ledger: kind, length,
//! sequence, and a checksum over the whole frame.

use crate::checksum::{self, Running, Salt};
use crate::ids::Sequence;
use crate::{BLOCK_BYTES, DecodeError};
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
    /// payload (without the padding up to the next cache line).
    pub checksum: U32,
    /// Kind of the frame: a `record::Kind` or a `ledger::Kind`.
    pub kind: u8,
    /// [`FRAME_VERSION`].
    pub version: u8,
    /// Depends on the kind.
    pub flags: u8,
    /// Zero.
    pub reserved: u8,
    /// Bytes of payload after the header.
    pub payload_bytes: U32,
    /// Zero.
    pub reserved2: U32,
    /// Sequence in the log.
    pub sequence: Sequence,
}

const _: () = assert!(size_of::<Envelope>() == 24);

impl Envelope {
    /// Creates an envelope. Sequence and checksum are filled in when the frame is appended.
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

    /// Decodes the envelope at the start of a frame, without a check of the payload.
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

    /// Bytes of the whole frame in its ring.
    pub fn frame_bytes(&self) -> u64 {
        frame_bytes(u64::from(self.payload_bytes.get()))
    }
}

/// Bytes of a frame with this payload in its ring.
pub const fn frame_bytes(payload_bytes: u64) -> u64 {
    (HEADER_BYTES as u64 + payload_bytes).next_multiple_of(FRAME_ALIGN as u64)
}

/// Starts a frame's checksum with the header; the caller adds the payload.
pub fn checksum_header(salt: Salt, header: &[u8; HEADER_BYTES]) -> Running {
    let mut running = Running::new(salt);
    running.update(&header[size_of::<U32>()..]);
    running
}

/// Checks a complete frame against its envelope: length and checksum.
///
/// # Errors
/// `Truncated`, `Version`, `Checksum`.
pub fn check_frame(salt: Salt, frame: &[u8]) -> Result<Envelope, DecodeError> {
    check_and_sum(salt, frame).map(|(envelope, _)| envelope)
}

/// The same; also gives the checksum of a payload that is one block, as a block of a file has it.
///
/// # Errors
/// As [`check_frame`].
pub fn check_and_sum(salt: Salt, frame: &[u8]) -> Result<(Envelope, Option<u32>), DecodeError> {
    let envelope = Envelope::decode(frame)?;
    let payload_bytes = usize::try_from(envelope.payload_bytes.get()).map_err(|_| DecodeError::Truncated)?;
    let (header, rest) = frame.split_first_chunk::<HEADER_BYTES>().ok_or(DecodeError::Truncated)?;
    let payload = rest.get(..payload_bytes).ok_or(DecodeError::Truncated)?;
    let mut running = checksum_header(salt, header);
    let before = (payload_bytes == BLOCK_BYTES).then(|| running.finish());
    running.update(payload);
    let whole = running.finish();
    if whole != envelope.checksum.get() {
        return Err(DecodeError::Checksum);
    }
    Ok((envelope, before.map(|before| checksum::of_block_behind(before, whole))))
}
