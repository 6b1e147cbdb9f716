//! The register: state of attached programs that survives the daemon, but not the machine: the sessions, the inodes
//! that they know, the files that they have open, and the locks that they hold.
//!
//! The file is a superblock, followed by entries of 64 bytes. The superblock's `id` is the number of the register
//! among those of all daemons, and its `geometry` identifies the current boot of the machine. It is written after the
//! first entries of a new register. The register is never synced, because stored bytes survive the death of a
//! process.

use crate::DecodeError;
use crate::checksum::{self, Salt};
use crate::ids::{Incarnation, InodeNumber, LogUid, Sequence};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RegisterKind {
    /// A session began: `inode` and `first` are its preallocated inode range, `last` is the start time of its
    /// process, `owner` its user and, in the upper half, its group.
    Attach = 1,
    /// Log `last`, of the session or of one that it continues, was digested to its end: record `first`.
    Recovered = 2,
    /// The session knows these inodes: `inode`, `first`, `last` and `owner`, as far as they are not 0; the lower four bits
    /// of `detail` say which of them it may read, the upper four which it made and may use whatever their modes say.
    Known = 3,
    /// The session has a reference to `inode`; `detail`: 1 to read it, 2 to write it.
    Open = 4,
    /// The reference has ended.
    Close = 5,
    /// `owner` got a lock on `inode` from `first` to `last`.
    Lock = 6,
    /// `owner` released its locks in this range.
    Unlock = 7,
    /// `owner` released all its locks on `inode`, or on all inodes if that is 0.
    Release = 8,
    /// The state of session `first` belongs to this session now.
    Inherit = 9,
    /// The session has ended, and all its state with it.
    End = 10,
    /// `first` inodes from `inode` on were the preallocated range of a session that this one continues.
    Range = 11,
    /// The session uses the lock owner `owner`, of kind `detail`, together with other sessions.
    Speak = 12,
    /// The session no longer uses it; the locks of an owner that no session uses end.
    Silent = 13,
    /// The session holds a lock lease on `inode`: its locks are those in slot `first` of the session's lock table
    /// ([`crate::locks`]), not the earlier entries.
    LockLease = 14,
    /// The lock lease has ended: the locks on `inode` are those of the entries before this one.
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

/// An entry. Fields that its kind does not use are zero.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct RegisterEntry {
    /// CRC-32C of the entry with this field zero, salted with the register's number.
    pub checksum: U32,
    /// A [`RegisterKind`].
    pub kind: u8,
    /// Depends on the kind; for a lock the kind of its owner, `OWNER_*`.
    pub detail: u8,
    /// Of a lock: `FAMILY_*`.
    pub family: u8,
    /// Of a lock: `LOCK_*`.
    pub lock: u8,
    /// The session, identified by its log.
    pub session: U64,
    /// The inode.
    pub inode: InodeNumber,
    /// Depends on the kind.
    pub first: U64,
    /// Depends on the kind.
    pub last: U64,
    /// Depends on the kind; for a lock the number of its owner.
    pub owner: U64,
    /// Process id of a session or of a lock's owner.
    pub pid: U32,
    /// Zero.
    pub reserved: U32,
    /// Sequence of the entry, from 1; it is the last field that is written.
    pub sequence: Sequence,
}

const _: () = assert!(size_of::<RegisterEntry>() == 64);

/// Bytes of an entry.
pub const REGISTER_ENTRY_BYTES: usize = size_of::<RegisterEntry>();

/// Number of inodes in one entry of kind `Known`.
pub const REGISTER_KNOWN_MAX: usize = 4;
/// Bit of an inode that [`RegisterEntry::known`] gives: the session may read it.
pub const KNOWN_READABLE: u8 = 1;
/// Bit of an inode that [`RegisterEntry::known`] gives: the session made it.
pub const KNOWN_MADE: u8 = 2;

impl RegisterEntry {
    /// An entry about a session; the caller sets all other fields.
    pub fn new(kind: RegisterKind, session: u64) -> Self {
        Self { kind: kind as u8, session: U64::new(session), ..Self::default() }
    }

    /// Encodes the entry for register `register`, at this sequence.
    #[must_use]
    pub fn seal(mut self, register: u64, sequence: Sequence) -> Self {
        self.sequence = sequence;
        self.checksum = U32::new(0);
        self.checksum = U32::new(checksum::of(salt(register), self.as_bytes()));
        self
    }

    /// Decodes the entry with this sequence.
    ///
    /// # Errors
    /// `Truncated`; `Field` for an entry with another sequence; `Checksum`; `Kind`.
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

    /// The inodes of a `Known` entry, and the `KNOWN_*` bits of each.
    pub fn known(&self) -> impl Iterator<Item = (InodeNumber, u8)> {
        let numbers = [self.inode.get(), self.first.get(), self.last.get(), self.owner.get()];
        let (readable, made) = (self.detail & 0xf, self.detail >> REGISTER_KNOWN_MAX);
        let named = numbers.into_iter().enumerate().filter(|(_, number)| *number != 0);
        named.map(move |(place, number)| {
            (InodeNumber::new(number), (readable >> place & 1) | ((made >> place & 1) << 1))
        })
    }

    /// Creates a `Known` entry of at most [`REGISTER_KNOWN_MAX`] inodes, each with its `KNOWN_*` bits.
    pub fn of_known(session: u64, known: &[(InodeNumber, u8)]) -> Self {
        let number = |place: usize| known.get(place).map_or(0, |(inode, _)| inode.get());
        let bits = known.iter().take(REGISTER_KNOWN_MAX).enumerate();
        let in_halves =
            |bits: u8| (bits & KNOWN_READABLE) | ((bits & KNOWN_MADE) << (REGISTER_KNOWN_MAX - 1));
        Self {
            inode: InodeNumber::new(number(0)),
            first: U64::new(number(1)),
            last: U64::new(number(2)),
            owner: U64::new(number(3)),
            detail: bits.map(|(place, (_, bits))| in_halves(*bits) << place).sum(),
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
    fn an_entry_is_valid_only_in_its_register_at_its_sequence() {
        let known = [(7, KNOWN_READABLE), (8, 0), (9, KNOWN_READABLE | KNOWN_MADE), (10, KNOWN_MADE)]
            .map(|(inode, bits)| (InodeNumber::new(inode), bits));
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
