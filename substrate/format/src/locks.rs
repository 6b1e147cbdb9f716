//! The lock table of a session: the locks that a program decides on under lock leases. SharedFS reads the table
//! without the program's help, and so does the next daemon after one that died.
//!
//! The table is a file of the pool. It has a slot for each lock lease that the session may hold, and a slot has two
//! lists of the locks on one inode. A change writes a complete list over the older one. Until the last byte is
//! stored, the checksum of that list is wrong, and the other list is valid; of two valid lists the one with the
//! higher sequence counts. So a program that is stopped or killed at any instruction leaves the locks as of before or
//! after the change. The table is never synced, because stored bytes survive the death of a process.

use crate::DecodeError;
use crate::checksum::{self, Salt};
use crate::ids::{InodeNumber, Sequence};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Limit of lock leases that one session holds.
pub const LOCK_SLOTS: usize = 64;
/// Limit of locks in one list; a file with more locks is decided by calls.
pub const LOCK_LIST_MAX: usize = 15;
/// Bytes of a list.
pub const LOCK_LIST_BYTES: usize = size_of::<LockListHead>() + LOCK_LIST_MAX * size_of::<HeldLock>();
/// Bytes of a slot: its two lists.
pub const LOCK_SLOT_BYTES: usize = 2 * LOCK_LIST_BYTES;
/// Bytes of the table.
pub const LOCK_TABLE_BYTES: usize = LOCK_SLOTS * LOCK_SLOT_BYTES;

/// Head of a list; `count` locks follow.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct LockListHead {
    /// CRC-32C of the head with this field zero and of the locks.
    pub checksum: U32,
    /// Number of locks, at most `LOCK_LIST_MAX`.
    pub count: U32,
    /// The file; never 0.
    pub inode: InodeNumber,
    /// Number of the change, from 1. Odd changes are in the second list of the slot.
    pub sequence: Sequence,
    /// Zero.
    pub reserved: U64,
}

const _: () = assert!(size_of::<LockListHead>() == 32);

/// A lock in a list.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct HeldLock {
    /// Number of the owner.
    pub owner: U64,
    /// First byte.
    pub first: U64,
    /// Last byte; all ones is the end of the file.
    pub last: U64,
    /// Process of an owner that is one.
    pub pid: U32,
    /// `OWNER_*`.
    pub owner_kind: u8,
    /// `FAMILY_*`.
    pub family: u8,
    /// `LOCK_*`.
    pub kind: u8,
    /// Zero.
    pub reserved: u8,
}

const _: () = assert!(size_of::<HeldLock>() == 32);

/// A decoded list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockList {
    /// The file.
    pub inode: InodeNumber,
    /// Number of the change.
    pub sequence: Sequence,
    /// The locks.
    pub locks: Vec<HeldLock>,
}

fn checksum_of(head: &LockListHead, locks: &[HeldLock]) -> u32 {
    let mut running = checksum::Running::new(Salt::NONE);
    running.update(LockListHead { checksum: U32::new(0), ..*head }.as_bytes());
    running.update(locks.as_bytes());
    running.finish()
}

/// Offset of the list of a change in its slot.
pub fn list_offset(sequence: Sequence) -> usize {
    (sequence.get() % 2) as usize * LOCK_LIST_BYTES
}

impl LockList {
    /// Encodes the list, to be stored at [`list_offset`]; fewer than [`LOCK_LIST_BYTES`] bytes if the list is short.
    ///
    /// # Panics
    /// If there are more than [`LOCK_LIST_MAX`] locks.
    pub fn encode(&self, bytes: &mut [u8; LOCK_LIST_BYTES]) -> usize {
        assert!(self.locks.len() <= LOCK_LIST_MAX, "the caller keeps lists short");
        let mut head = LockListHead {
            checksum: U32::new(0),
            count: U32::new(self.locks.len() as u32),
            inode: self.inode,
            sequence: self.sequence,
            reserved: U64::new(0),
        };
        head.checksum = U32::new(checksum_of(&head, &self.locks));
        let (first, rest) = bytes.split_at_mut(size_of::<LockListHead>());
        first.copy_from_slice(head.as_bytes());
        let locks = self.locks.as_bytes();
        rest[..locks.len()].copy_from_slice(locks);
        first.len() + locks.len()
    }

    /// Decodes a list.
    ///
    /// # Errors
    /// `Truncated`, `Checksum`, `Field`.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let (head, rest) = LockListHead::read_from_prefix(bytes).map_err(|_| DecodeError::Truncated)?;
        let count = head.count.get() as usize;
        if count > LOCK_LIST_MAX {
            return Err(DecodeError::Field("count"));
        }
        let locks = rest.get(..count * size_of::<HeldLock>()).ok_or(DecodeError::Truncated)?;
        let locks = <[HeldLock]>::ref_from_bytes(locks).map_err(|_| DecodeError::Truncated)?;
        if head.checksum.get() != checksum_of(&head, locks) {
            return Err(DecodeError::Checksum);
        }
        if head.inode == InodeNumber::NONE || head.sequence == Sequence::new(0) {
            return Err(DecodeError::Field("inode"));
        }
        Ok(Self { inode: head.inode, sequence: head.sequence, locks: locks.to_vec() })
    }

    /// The current list of a slot; `None` if neither list is valid and in its place.
    pub fn of_slot(slot: &[u8]) -> Option<Self> {
        let list = |parity: u64| {
            let bytes = slot.get(list_offset(Sequence::new(parity))..)?;
            Self::decode(bytes).ok().filter(|list| list.sequence.get() % 2 == parity)
        };
        [list(0), list(1)].into_iter().flatten().max_by_key(|list| list.sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(sequence: u64, count: u64) -> LockList {
        let lock = |number: u64| HeldLock { owner: U64::new(sequence * 100 + number), ..HeldLock::default() };
        LockList {
            inode: InodeNumber::new(7),
            sequence: Sequence::new(sequence),
            locks: (0..count).map(lock).collect(),
        }
    }

    fn store(slot: &mut [u8], list: &LockList) -> Vec<u8> {
        let mut bytes = [0; LOCK_LIST_BYTES];
        let length = list.encode(&mut bytes);
        slot[list_offset(list.sequence)..][..length].copy_from_slice(&bytes[..length]);
        bytes[..length].to_vec()
    }

    #[test]
    fn an_empty_slot_holds_no_list() {
        assert_eq!(LockList::of_slot(&[0; LOCK_SLOT_BYTES]), None);
        assert_eq!(LockList::of_slot(&[]), None);
    }

    #[test]
    fn a_partly_stored_change_gives_the_locks_before_it_or_after_it() {
        let mut slot = vec![0; LOCK_SLOT_BYTES];
        let counts = [0, 3, 1, LOCK_LIST_MAX as u64, 2, 2, 0, 5];
        let mut before = list(1, 1);
        store(&mut slot, &before);
        for (sequence, count) in (2..).zip(counts) {
            let (old, after) = (slot.clone(), list(sequence, count));
            let bytes = store(&mut slot, &after);
            let at = list_offset(after.sequence);
            for word in 0..=bytes.len() / 8 {
                // Only the first words are stored, or all words but one.
                let mut cut = old.clone();
                cut[at..at + 8 * word].copy_from_slice(&bytes[..8 * word]);
                let mut most = slot.clone();
                if let Some(left) =
                    most.get_mut(at + 8 * word..at + 8 * word + 8).filter(|_| 8 * word < bytes.len())
                {
                    left.copy_from_slice(&old[at + 8 * word..][..8]);
                }
                for part in [cut, most] {
                    let found = LockList::of_slot(&part).expect("one list is always whole");
                    assert!(
                        found == before || found == after,
                        "change {sequence} after {word} words: {found:?}"
                    );
                    assert!(part != slot || found == after);
                }
            }
            before = after;
        }
    }
}
