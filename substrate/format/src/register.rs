//! The register: what a daemon remembers of its programs beyond its own death, but not beyond the machine's. Who is
//! attached, what it met, what it has open, which locks it holds.
//!
//! The file is a superblock, whose `id` numbers the daemon's registers and whose `geometry` is the machine's number for
//! this run, and entries of 64 bytes one after the other. The superblock is written when the entries that a new
//! register begins with are there. Nothing of it is ever settled: a process's death leaves what was stored.

use crate::DecodeError;
use crate::checksum::{self, Salt};
use crate::ids::{Incarnation, InodeNumber, LogUid, Sequence};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RegisterKind {
    /// A session began: `inode` and `first` are its own range, `last` is when its process started, `owner` its user
    /// and, in the upper half, its group.
    Attach = 1,
    /// Log `last`, its own or that of a session it goes on from, was digested to its end: record `first`.
    Recovered = 2,
    /// It met inodes: `inode`, `first`, `last`, `owner`, those of them that are not 0; of which by `detail` it may
    /// read the first, second, third, fourth.
    Known = 3,
    /// It refers to `inode`; `detail`: 1 to read it, 2 to write it.
    Open = 4,
    /// It does not any more.
    Close = 5,
    /// `owner` got a lock on `inode` from `first` to `last`.
    Lock = 6,
    /// It gave up what it held there.
    Unlock = 7,
    /// It gave up all that it held on `inode`, or everywhere if that is 0.
    Release = 8,
    /// Everything of session `first` is this session's now.
    Inherit = 9,
    /// The session is over, with all that it had.
    End = 10,
    /// `first` inodes from `inode` on were the own range of a session that it goes on from.
    Range = 11,
    /// It speaks for `owner` of locks, a `detail`, together with others.
    Speak = 12,
    /// It does not any more; if nobody does, the owner's locks end.
    Silent = 13,
    /// It holds a lock lease on `inode`: the locks there are no more those noted before, but those in slot `first` of its
    /// lock table ([`crate::locks`]).
    LockLease = 14,
    /// It does not any more: the locks on `inode` were noted before this.
    LockLeaseEnd = 15,
}

impl RegisterKind {
    /// The kind with this number.
    ///
    /// # Errors
    /// `Kind`.
    pub fn from_raw(raw: u8) -> Result<Self, DecodeError> {
        Ok(match raw {
            1 => Self::Attach,
            2 => Self::Recovered,
            3 => Self::Known,
            4 => Self::Open,
            5 => Self::Close,
            6 => Self::Lock,
            7 => Self::Unlock,
            8 => Self::Release,
            9 => Self::Inherit,
            10 => Self::End,
            11 => Self::Range,
            12 => Self::Speak,
            13 => Self::Silent,
            14 => Self::LockLease,
            15 => Self::LockLeaseEnd,
            _ => return Err(DecodeError::Kind),
        })
    }
}

/// One entry. What its kind does not use is zero.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct RegisterEntry {
    /// CRC-32C of the entry with this field zero, salted with the register's number.
    pub checksum: U32,
    /// A [`RegisterKind`].
    pub kind: u8,
    /// By kind; of a lock whose it is: `OWNER_*`.
    pub detail: u8,
    /// Of a lock: `FAMILY_*`.
    pub family: u8,
    /// Of a lock: `LOCK_*`.
    pub lock: u8,
    /// The session, by the number of its log.
    pub session: U64,
    /// The inode.
    pub inode: InodeNumber,
    /// By kind.
    pub first: U64,
    /// By kind.
    pub last: U64,
    /// By kind; of a lock its owner's number.
    pub owner: U64,
    /// Process of a session or of a lock's owner, as the kernel numbers it.
    pub pid: U32,
    /// Zero.
    pub reserved: U32,
    /// Place in the order, from 1; it says that the entry is there.
    pub sequence: Sequence,
}

const _: () = assert!(size_of::<RegisterEntry>() == 64);

/// Bytes of an entry.
pub const REGISTER_ENTRY_BYTES: usize = size_of::<RegisterEntry>();

/// Inodes that one entry names as known.
pub const REGISTER_KNOWN_MAX: usize = 4;

impl RegisterEntry {
    /// An entry about a session, everything else to be filled in.
    pub fn new(kind: RegisterKind, session: u64) -> Self {
        Self { kind: kind as u8, session: U64::new(session), ..Self::default() }
    }

    /// The entry as it stands in register `register` at this place of the order.
    #[must_use]
    pub fn seal(mut self, register: u64, sequence: Sequence) -> Self {
        self.sequence = sequence;
        self.checksum = U32::new(0);
        self.checksum = U32::new(checksum::of(salt(register), self.as_bytes()));
        self
    }

    /// Takes what stands at a place of the order.
    ///
    /// # Errors
    /// `Truncated`; `Field` if it is no entry of that place; `Checksum`; `Kind`.
    pub fn decode(
        bytes: &[u8],
        register: u64,
        sequence: Sequence,
    ) -> Result<(RegisterKind, Self), DecodeError> {
        let entry = Self::read_from_bytes(bytes).map_err(|_| DecodeError::Truncated)?;
        if entry.sequence != sequence {
            return Err(DecodeError::Field("sequence"));
        }
        let unsummed = Self { checksum: U32::new(0), ..entry };
        if checksum::of(salt(register), unsummed.as_bytes()) != entry.checksum.get() {
            return Err(DecodeError::Checksum);
        }
        Ok((RegisterKind::from_raw(entry.kind)?, entry))
    }

    /// The inodes of a `Known` entry, and which of them may be read.
    pub fn known(&self) -> impl Iterator<Item = (InodeNumber, bool)> {
        let numbers = [self.inode.get(), self.first.get(), self.last.get(), self.owner.get()];
        let readable = self.detail;
        let named = numbers.into_iter().enumerate().filter(|(_, number)| *number != 0);
        named.map(move |(place, number)| (InodeNumber::new(number), readable >> place & 1 == 1))
    }

    /// A `Known` entry of at most [`REGISTER_KNOWN_MAX`] inodes.
    pub fn of_known(session: u64, known: &[(InodeNumber, bool)]) -> Self {
        let number = |place: usize| known.get(place).map_or(0, |(inode, _)| inode.get());
        let readable = known.iter().take(REGISTER_KNOWN_MAX).enumerate();
        Self {
            inode: InodeNumber::new(number(0)),
            first: U64::new(number(1)),
            last: U64::new(number(2)),
            owner: U64::new(number(3)),
            detail: readable.map(|(place, (_, readable))| u8::from(*readable) << place).sum(),
            ..Self::new(RegisterKind::Known, session)
        }
    }
}

/// Another register's entries never look valid.
fn salt(register: u64) -> Salt {
    Salt::of_log(LogUid::new(register), Incarnation::new(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_of_one_register_and_one_place() {
        let known =
            [(7, true), (8, false), (9, true)].map(|(inode, readable)| (InodeNumber::new(inode), readable));
        let entry = RegisterEntry::of_known(3, &known).seal(5, Sequence::new(2));
        let bytes = entry.as_bytes();
        let (kind, found) = RegisterEntry::decode(bytes, 5, Sequence::new(2)).unwrap();
        assert_eq!((kind, found), (RegisterKind::Known, entry));
        assert!(found.known().eq(known));
        assert!(RegisterEntry::decode(bytes, 6, Sequence::new(2)).is_err());
        assert!(RegisterEntry::decode(bytes, 5, Sequence::new(3)).is_err());
        assert!(RegisterEntry::decode(&bytes[1..], 5, Sequence::new(2)).is_err());
        assert!(RegisterEntry::decode(&[0; 64], 5, Sequence::new(1)).is_err());
    }
}
