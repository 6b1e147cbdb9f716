//! Identifiers, positions and versions. Each is a type of its own, because mixing them is where off-by-one lives;
//! each is eight or four little-endian bytes, so that it can stand in a structure as it is.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Declares one identifier: a macro, because a function cannot declare a type, and many copies would drift.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $raw:ident, $native:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
        #[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(transparent)]
        pub struct $name($raw);

        impl $name {
            /// Wraps a number.
            #[inline]
            pub const fn new(value: $native) -> Self {
                Self($raw::new(value))
            }

            /// The number.
            #[inline]
            pub const fn get(self) -> $native {
                self.0.get()
            }

            /// The one after this; a counter that runs out is a broken invariant.
            #[must_use]
            #[inline]
            pub const fn next(self) -> Self {
                Self::new(self.0.get().checked_add(1).expect("an identifier counter never runs out"))
            }
        }

        impl Ord for $name {
            fn cmp(&self, other: &Self) -> std::cmp::Ordering {
                self.get().cmp(&other.get())
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
                Some(self.cmp(other))
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.get())
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{}", self.get())
            }
        }
    };
}

id!(
    /// An inode. The upper [`LIFE_BITS`] bits are the life of the chain in which the number was given out; 0 is no
    /// inode, 1 is the root of the tree.
    InodeNumber, U64, u64
);
id!(
    /// An update log. Never reused: the upper [`LIFE_BITS`] bits are the life of the chain in which it was given out.
    LogUid, U64, u64
);
id!(
    /// Number of a log's file: always 1, because a log keeps its file. A part of the name of the file, and of the salt of its
    /// checksums.
    Incarnation, U32, u32
);
id!(
    /// Position of a frame in the order of its log. The first frame has 1; 0 stands before it.
    Sequence, U64, u64
);
id!(
    /// Version of a lease, from one counter a life of the chain; the upper [`LIFE_BITS`] bits are that life.
    LeaseVersion, U64, u64
);
id!(
    /// A life of a chain: the time in which one daemon leads it without an interruption. It grows by one each time a
    /// daemon begins to lead. The life that made the pool is 0.
    Life, U32, u32
);
id!(
    /// A chain: the copies of one subtree. Each pool is a copy of one chain.
    ChainNumber, U32, u32
);
id!(
    /// Epoch of the cluster: it grows by one at each change of its members.
    Epoch, U32, u32
);
id!(
    /// A node of the cluster, by the number its operator gave it; 0 is no node.
    NodeId, U32, u32
);
id!(
    /// Position of a change in the order of all changes of the cluster; the first one has 1.
    ChangeNumber, U64, u64
);
id!(
    /// Version of a member's heartbeat. It grows with each heartbeat, and never repeats within one life of the member.
    BeatVersion, U64, u64
);
id!(
    /// Number of a commit of the shared area's root. The first commit has 1.
    CommitNumber, U64, u64
);
id!(
    /// A data segment, by the number in its file's name.
    SegmentId, U32, u32
);
id!(
    /// A block of [`crate::BLOCK_BYTES`] bytes within one pool file.
    Block, U32, u32
);
id!(
    /// A pool: all its files carry it, so that files of two pools are never mixed. 0 is no pool.
    PoolUid, U64, u64
);
id!(
    /// A generation of a pool in its cluster: a random number that is synced in the pool before its node asks to join. An
    /// older copy of the pool's folder lacks the last one. 0 is none.
    PoolGeneration, U64, u64
);

/// Bits of a number that say in which life of the chain it was given out. A number that no ledger names, because its
/// daemon died first, is therefore never given out again, and no counter has to be kept.
pub const LIFE_BITS: u32 = 20;

/// Bits of a number within its life.
const COUNT_BITS: u32 = u64::BITS - LIFE_BITS;

impl Life {
    /// The last life that numbers can name.
    pub const LAST: Self = Self::new((1 << LIFE_BITS) - 1);

    /// The first number that this life gives out.
    fn first_number(self) -> u64 {
        assert!(self <= Self::LAST, "a life after the last one is refused before it begins");
        (u64::from(self.get()) << COUNT_BITS) + 1
    }
}

impl LogUid {
    /// The first log of a life.
    pub fn first_of(life: Life) -> Self {
        Self::new(life.first_number())
    }
}

impl LeaseVersion {
    /// The first version that a life gives out.
    pub fn first_of(life: Life) -> Self {
        Self::new(life.first_number())
    }
}

impl ChainNumber {
    /// The chain of a node that serves one subtree, the whole tree.
    pub const ONLY: Self = Self::new(1);
}

impl PoolGeneration {
    /// None.
    pub const NONE: Self = Self::new(0);
}

impl PoolUid {
    /// No pool.
    pub const NONE: Self = Self::new(0);
}

impl NodeId {
    /// The id of the cluster's manager as the target of a connection.
    pub const MANAGER: Self = Self::new(u32::MAX);

    /// The id of an operator who sends requests to the manager.
    pub const OPERATOR: Self = Self::new(u32::MAX - 1);

    /// No node.
    pub const NONE: Self = Self::new(0);
}

impl InodeNumber {
    /// No inode.
    pub const NONE: Self = Self::new(0);
    /// The root of the tree.
    pub const ROOT: Self = Self::new(1);

    /// The first number that a life gives out.
    pub fn first_of(life: Life) -> Self {
        Self::new(life.first_number())
    }
}

/// The last change of an inode: the version of its lease, and the record (CC-NVM's order between logs). Compared by
/// (version, sequence); a record is applied if its stamp is newer.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Stamp {
    /// Version of the write lease.
    pub version: LeaseVersion,
    /// The log that holds the record.
    pub log: LogUid,
    /// The record.
    pub sequence: Sequence,
}

const _: () = assert!(size_of::<Stamp>() == 24);

impl Stamp {
    /// True if a change with this stamp comes after everything `other` has seen.
    pub fn is_newer_than(&self, other: &Self) -> bool {
        (self.version, self.sequence) > (other.version, other.sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_two_lives_differ() {
        let [zero, one, last] = [0, 1, Life::LAST.get()].map(|life| InodeNumber::first_of(Life::new(life)));
        assert_eq!((zero, one.get()), (InodeNumber::ROOT, (1 << 44) + 1));
        assert_eq!(last.get() >> 44, (1 << 20) - 1);
        assert!(LeaseVersion::first_of(Life::new(2)) > LeaseVersion::new(one.get() + (1 << 44) - 2));
    }

    #[test]
    fn stamps_order_by_version_before_sequence() {
        let stamp = |version, sequence| Stamp {
            version: LeaseVersion::new(version),
            log: LogUid::new(7),
            sequence: Sequence::new(sequence),
        };
        assert!(stamp(2, 1).is_newer_than(&stamp(1, 900)));
        assert!(stamp(2, 2).is_newer_than(&stamp(2, 1)));
        assert!(!stamp(2, 2).is_newer_than(&stamp(2, 2)));
    }
}
