//! Frames of the ledger: its ring goes on from life to life, and the frames of each life have a salt of their own.

use format::ledger::{Entry, Event, salt_of};
use format::mirror::LedgerMark;
use format::{BLOCK_BYTES, DecodeError, Life, Sequence};
use ipc::Digested;
use pmem::ring::{RingPosition, scan};
use pmem::{MediaError, Region};
use zerocopy::little_endian::{U32, U64};

/// Where the ring of the ledger begins in its file.
pub const LEDGER_START: u64 = BLOCK_BYTES as u64;

/// A place in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerPosition {
    /// An entry.
    pub sequence: Sequence,
    /// Where in the file the entry after it begins.
    pub position: u64,
    /// The life of the chain that wrote it.
    pub life: Life,
}

impl LedgerPosition {
    /// As a part of a message.
    pub fn to_mark(self) -> LedgerMark {
        let Self { sequence, position, life } = self;
        LedgerMark { sequence, position: U64::new(position), life, reserved: U32::new(0) }
    }

    /// From a part of a message; the caller judges it.
    pub fn of_mark(mark: &LedgerMark) -> Self {
        Self { sequence: mark.sequence, position: mark.position.get(), life: mark.life }
    }

    /// The place of its ring.
    pub fn ring_place(&self) -> RingPosition {
        RingPosition { position: self.position, sequence: self.sequence.next() }
    }

    /// The same without the life.
    pub fn place(&self) -> Digested {
        Digested { sequence: self.sequence, position: self.position }
    }
}

/// An entry that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerFrame {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// The ledger up to and with this entry.
    pub after: LedgerPosition,
}

/// Why no entry was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LedgerError {
    /// The medium failed.
    Media(MediaError),
    /// A frame with the right checksum was written by a daemon of another make.
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

/// The entry behind a place; `None` where the ledger ends.
///
/// # Errors
/// [`LedgerError`].
pub fn next_entry(region: &Region, at: &LedgerPosition) -> Result<Option<LedgerFrame>, LedgerError> {
    // The frames of a life have its salt; the first of another life begins it.
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
            // Of a new life only the pad may stand before its first entry.
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
