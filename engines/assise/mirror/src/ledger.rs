//! Reads the frames of the ledger. Its ring continues from life to life, and each life has its own salt.

use format::ledger::{Entry, Event, salt_of};
use format::mirror::LedgerMark;
use format::{BLOCK_BYTES, DecodeError, Life, Sequence};
use ipc::Digested;
use pmem::ring::{RingPosition, scan};
use pmem::{MediaError, Region};
use zerocopy::little_endian::{U32, U64};

/// Start of the ring in the ledger's file.
pub const LEDGER_START: u64 = BLOCK_BYTES as u64;

/// A position in the ledger, behind an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerPosition {
    /// Sequence of the entry before the position.
    pub sequence: Sequence,
    /// Offset in the file at which the next entry begins.
    pub position: u64,
    /// The life of the chain that wrote the entry.
    pub life: Life,
}

impl LedgerPosition {
    /// The position as a part of a message.
    pub fn to_mark(self) -> LedgerMark {
        let Self { sequence, position, life } = self;
        LedgerMark { sequence, position: U64::new(position), life, reserved: U32::new(0) }
    }

    /// The position from a part of a message, unchecked.
    pub fn of_mark(mark: &LedgerMark) -> Self {
        Self { sequence: mark.sequence, position: mark.position.get(), life: mark.life }
    }

    /// The position of the next frame in the ring.
    pub fn ring_place(&self) -> RingPosition {
        RingPosition { position: self.position, sequence: self.sequence.next() }
    }

    /// The position without the life.
    pub fn place(&self) -> Digested {
        Digested { sequence: self.sequence, position: self.position }
    }
}

/// An entry read from the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerFrame {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// The ledger position after this entry.
    pub after: LedgerPosition,
}

/// The reason for which no entry was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LedgerError {
    /// The medium failed.
    Media(MediaError),
    /// A frame with the right checksum contains an entry of another version.
    Entry(DecodeError),
}

impl From<MediaError> for LedgerError {
    fn from(error: MediaError) -> Self {
        Self::Media(error)
    }
}

/// The end of the ring in the ledger's file.
pub fn ledger_ring_end(region: &Region) -> u64 {
    region.bytes() / format::FRAME_ALIGN as u64 * format::FRAME_ALIGN as u64
}

/// Reads the entry at a position; `None` at the end of the ledger.
///
/// # Errors
/// [`LedgerError`].
pub fn next_entry(region: &Region, at: &LedgerPosition) -> Result<Option<LedgerFrame>, LedgerError> {
    // The frames of a life have its salt. The next life starts with frames of the next salt.
    for life in [at.life, at.life.next()] {
        let begins = life != at.life;
        let mut frames = scan(region, LEDGER_START, salt_of(life), at.ring_place(), region.bytes());
        let Some(frame) = frames.next().transpose()? else { continue };
        let after = frames.place();
        let sequence = Sequence::new(after.sequence.get() - 1);
        let mut after = LedgerPosition { sequence, position: after.position, life };
        let entry = Entry::decode(&frame.bytes).map_err(LedgerError::Entry)?;
        let counts = match entry.event {
            Event::Life { body } => begins && body.life == life,
            // Before the first entry of a new life only a pad may come.
            Event::Pad => {
                after.life = at.life;
                true
            }
            _ => !begins,
        };
        if counts {
            return Ok(Some(LedgerFrame { bytes: frame.bytes, after }));
        }
    }
    Ok(None)
}
