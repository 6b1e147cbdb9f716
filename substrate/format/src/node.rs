//! Nodes of the shared area's tree: keys, values, and the page that contains them.
//!
//! One tree contains all metadata: inodes, directory entries, extents, the table of logs. A key is (object, kind,
//! sub), so all items of one inode are adjacent.

use crate::checksum::{self, Salt};
use crate::ids::{
    Block, Epoch, Incarnation, InodeNumber, LeaseVersion, LogUid, NodeId, SegmentId, Sequence, Stamp,
};
use crate::root::NodePointer;
use crate::{BLOCK_BYTES, DecodeError};
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `HN`, read as a little-endian number.
pub const NODE_MAGIC: u16 = 0x4e48;

/// Bytes of the largest value: a node has space for four.
pub const VALUE_BYTES_MAX: usize = 960;

/// Limit of blocks in one written extent. It bounds the value, which has a checksum for each block.
pub const EXTENT_BLOCKS_MAX: u32 = 128;

/// Limit of blocks in a block list: a node has space for five lists.
pub const LISTED_BLOCKS_MAX: u32 = 64;

/// Limit of supplementary groups of a log's process in one item.
pub const LOG_GROUPS_PIECE: usize = VALUE_BYTES_MAX / 4;

/// Kind of an item: the meaning of its key and value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum ItemKind {
    /// object: inode; sub: 0. Value: [`InodeItem`].
    Inode = 1,
    /// object: inode; sub: number of the piece. Value: up to [`VALUE_BYTES_MAX`] bytes of a link's target.
    Symlink = 2,
    /// object: inode; sub: [`xattr_sub`]. Value: [`XattrItem`] and bytes.
    Xattr = 3,
    /// object: directory; sub: cookie. Value: [`EntryItem`], name.
    Entry = 4,
    /// object: inode; sub: first block of the file that it covers. Value: [`ExtentItem`], checksums or [`ListedBlock`]s.
    Extent = 5,
    /// object: 0; sub: inode without a name that a process has open. No value.
    Orphan = 6,
    /// object: 0; sub: log uid. Value: [`LogItem`]. And object: log uid; sub: number of the piece. Value: up to
    /// [`LOG_GROUPS_PIECE`] supplementary groups, four bytes each.
    Log = 7,
    /// object: log uid; sub: inode. Value: [`GrantItem`]: a current grant on an inode.
    Grant = 8,
    /// object: 0; sub: segment id. Value: [`SegmentItem`].
    Segment = 9,
    /// object: 0; sub: life. Value: [`LifeItem`]. The list of lives distinguishes histories that two copies have
    /// written.
    Life = 10,
    /// object: log uid; sub: 0. Value: [`GrantItem`]: the grant of the unit of renames of directories.
    RenameGrant = 11,
    /// object: log uid; sub: inode. Value: [`GrantItem`]: a grant on the file locks of an inode.
    LocksGrant = 12,
    /// object: log uid; sub: inode. Value: [`GrantItem`]: a grant on everything below a directory.
    SubtreeGrant = 13,
}

impl ItemKind {
    /// The kind with this number.
    ///
    /// # Errors
    /// `Kind`.
    pub fn from_raw(raw: u8) -> Result<Self, DecodeError> {
        Ok(match raw {
            1 => Self::Inode,
            2 => Self::Symlink,
            3 => Self::Xattr,
            4 => Self::Entry,
            5 => Self::Extent,
            6 => Self::Orphan,
            7 => Self::Log,
            8 => Self::Grant,
            9 => Self::Segment,
            10 => Self::Life,
            11 => Self::RenameGrant,
            12 => Self::LocksGrant,
            13 => Self::SubtreeGrant,
            _ => return Err(DecodeError::Kind),
        })
    }
}

/// A key. Ordered by object, then kind, then sub.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Key {
    object: U64,
    sub: U64,
    kind: u8,
    reserved: [u8; 3],
}

const _: () = assert!(size_of::<Key>() == 20);

impl Key {
    /// Creates a key.
    pub const fn new(object: u64, kind: ItemKind, sub: u64) -> Self {
        Self { object: U64::new(object), sub: U64::new(sub), kind: kind as u8, reserved: [0; 3] }
    }

    /// First part: an inode number, a log uid or 0.
    pub const fn object(&self) -> u64 {
        self.object.get()
    }

    /// Last part.
    pub const fn sub(&self) -> u64 {
        self.sub.get()
    }

    /// The kind of the item.
    ///
    /// # Errors
    /// `Kind`, for a key that was read from a medium.
    pub fn kind(&self) -> Result<ItemKind, DecodeError> {
        ItemKind::from_raw(self.kind)
    }
}

impl Ord for Key {
    #[inline]
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let parts = |key: &Self| (key.object.get(), key.kind, key.sub.get());
        parts(self).cmp(&parts(other))
    }
}

impl PartialOrd for Key {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Head of a node. `count` [`Slot`]s in the order of their keys follow; the values are at the end of the node. The
/// pointer to the node contains its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NodeHeader {
    /// [`NODE_MAGIC`].
    pub magic: U16,
    /// 0 for a leaf; a child has a level one lower.
    pub level: u8,
    /// Zero.
    pub reserved: u8,
    /// Number of slots.
    pub count: U16,
    /// Bytes of all values.
    pub value_bytes: U16,
    /// The block of the node. A node found in another block is invalid.
    pub block: Block,
    /// Zero.
    pub reserved2: U32,
    /// Ledger entry of the commit that wrote the node.
    pub version: Sequence,
}

const _: () = assert!(size_of::<NodeHeader>() == 24);

/// A key, and the position of its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Slot {
    /// In an inner node: the lower bound of the keys in the child.
    pub key: Key,
    /// Offset of the value in the node.
    pub offset: U16,
    /// Length of the value. In an inner node the value is a [`NodePointer`].
    pub bytes: U16,
}

const _: () = assert!(size_of::<Slot>() == 24);

/// Permission bits of a mode, set-id bits and the sticky bit among them.
pub const PERMISSION_BITS: u32 = 0o7777;

/// An inode in the area.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct InodeItem {
    /// Type and permissions, as in `st_mode`.
    pub mode: U32,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Number of names; for a directory 2 and one for each subdirectory; 0 for an orphan.
    pub links: U32,
    /// Bytes of a file or of a link's target; for a directory the number of its entries.
    pub size: U64,
    /// Number of data blocks in segments.
    pub blocks: U64,
    /// Last access, nanoseconds since 1970.
    pub atime_ns: I64,
    /// Last change of the contents.
    pub mtime_ns: I64,
    /// Last change of anything.
    pub ctime_ns: I64,
    /// Creation.
    pub btime_ns: I64,
    /// Device number of a device.
    pub rdev: U64,
    /// The last change that it contains.
    pub stamp: Stamp,
    /// For a directory: its parent directory. For an orphan that a link may give a name: the directory that it was created
    /// in.
    pub parent: InodeNumber,
}

const _: () = assert!(size_of::<InodeItem>() == 104);

/// A directory entry; the name follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EntryItem {
    /// The inode of the name.
    pub inode: InodeNumber,
    /// Its type: a `FileType`.
    pub file_type: u8,
    /// Bytes of the name that follows.
    pub name_bytes: u8,
    /// Zero.
    pub reserved: [u8; 6],
}

const _: () = assert!(size_of::<EntryItem>() == 16);

/// The extent is allocated but not written: it reads as zeros, and no checksums follow.
pub const EXTENT_UNWRITTEN: u32 = 1;

/// The blocks lie apart: the item is a block list. A [`ListedBlock`] for each block follows, and no checksums.
pub const EXTENT_LISTED: u32 = 2;

/// Adjacent blocks of a file in a segment. A CRC-32C (four bytes) for each block follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ExtentItem {
    /// The segment; in a block list 0.
    pub segment: SegmentId,
    /// First block in it; in a block list 0.
    pub block: Block,
    /// Number of blocks.
    pub blocks: U32,
    /// `EXTENT_*`.
    pub flags: U32,
}

const _: () = assert!(size_of::<ExtentItem>() == 16);
const _: () = assert!(size_of::<ExtentItem>() + 4 * EXTENT_BLOCKS_MAX as usize <= VALUE_BYTES_MAX);

/// A block of a file in a block list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ListedBlock {
    /// The segment.
    pub segment: SegmentId,
    /// The block in it.
    pub block: Block,
    /// CRC-32C of the block.
    pub checksum: U32,
}

const _: () = assert!(size_of::<ListedBlock>() == 12);
const _: () = assert!(
    5 * (size_of::<Slot>() + size_of::<ExtentItem>() + LISTED_BLOCKS_MAX as usize * size_of::<ListedBlock>())
        <= BLOCK_BYTES - size_of::<NodeHeader>()
);

/// The last part of the key of a piece of an attribute: 32 bits of a hash of its name, a slot that distinguishes
/// names with equal hashes, and the number of the piece.
pub fn xattr_sub(name: &[u8], slot: u8, piece: u16) -> u64 {
    let hash = u64::from(checksum::of(Salt::NONE, name));
    (hash << 32) | (u64::from(slot) << 16) | u64::from(piece)
}

/// A piece of an extended attribute; in the first piece the name follows, then bytes of the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct XattrItem {
    /// Bytes of the whole value.
    pub value_bytes: U32,
    /// Bytes of the name in this piece; 0 in later pieces.
    pub name_bytes: U16,
    /// Bytes of the value in this piece.
    pub piece_bytes: U16,
}

const _: () = assert!(size_of::<XattrItem>() == 8);

/// A live log, and how far the tree contains it; its supplementary groups follow in further items.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LogItem {
    /// The last record that the tree contains.
    pub digested: Sequence,
    /// Offset in the ring of the record after it.
    pub position: U64,
    /// The log's incarnation.
    pub incarnation: Incarnation,
    /// User of its process.
    pub uid: U32,
    /// Its group.
    pub gid: U32,
    /// Number of supplementary groups.
    pub groups: U32,
    /// First number of its preallocated inode range.
    pub first_inode: InodeNumber,
    /// Numbers in the range.
    pub inodes: U64,
    /// Version under which the log holds its preallocated range.
    pub version: LeaseVersion,
    /// Bytes of its file.
    pub file_bytes: U64,
    /// The node on which its process runs.
    pub node: NodeId,
    /// A [`crate::ledger::LogKind`].
    pub kind: U32,
}

const _: () = assert!(size_of::<LogItem>() == 72);

/// A current grant, so that the ledger before the root's position is not needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct GrantItem {
    /// Its version.
    pub version: LeaseVersion,
    /// Records after this one may use the grant.
    pub from: Sequence,
    /// Rights, as in the ledger.
    pub rights: U32,
    /// A [`crate::ledger::GrantMode`].
    pub mode: u8,
    /// Zero.
    pub reserved: [u8; 3],
}

const _: () = assert!(size_of::<GrantItem>() == 24);

/// A life of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LifeItem {
    /// The ledger entry that began it.
    pub first: Sequence,
    /// The leading node.
    pub node: NodeId,
    /// Epoch of the cluster in which it began.
    pub epoch: Epoch,
    /// Key of the hashes in its `Digest` entries.
    pub key: [u8; 16],
}

const _: () = assert!(size_of::<LifeItem>() == 32);

/// A data segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SegmentItem {
    /// The user who owns the files in it, or the daemon.
    pub owner: U32,
    /// Blocks in use.
    pub used: U32,
    /// Number of blocks.
    pub blocks: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<SegmentItem>() == 16);

/// A checked node: magic, bounds and order of the keys are valid.
#[derive(Clone, Copy)]
pub struct NodeView<'a> {
    header: &'a NodeHeader,
    slots: &'a [Slot],
    bytes: &'a [u8; BLOCK_BYTES],
}

impl<'a> NodeView<'a> {
    /// Checks a node that was read from `block`. The caller has checked its checksum.
    ///
    /// # Errors
    /// `Kind`, `Field`.
    pub fn decode(bytes: &'a [u8; BLOCK_BYTES], block: Block) -> Result<Self, DecodeError> {
        let (header, rest) = NodeHeader::ref_from_prefix(&bytes[..]).map_err(|_| DecodeError::Truncated)?;
        if header.magic.get() != NODE_MAGIC {
            return Err(DecodeError::Kind);
        }
        if header.block != block {
            return Err(DecodeError::Field("block"));
        }
        let count = usize::from(header.count.get());
        let (slots, _) =
            <[Slot]>::ref_from_prefix_with_elems(rest, count).map_err(|_| DecodeError::Field("count"))?;
        let values_from = size_of::<NodeHeader>() + count * size_of::<Slot>();
        for (index, slot) in slots.iter().enumerate() {
            slot.key.kind()?;
            let (start, length) = (usize::from(slot.offset.get()), usize::from(slot.bytes.get()));
            if start < values_from || start + length > BLOCK_BYTES || length > VALUE_BYTES_MAX {
                return Err(DecodeError::Field("offset"));
            }
            if header.level > 0 && length != size_of::<NodePointer>() {
                return Err(DecodeError::Field("bytes"));
            }
            if index > 0 && slots[index - 1].key >= slot.key {
                return Err(DecodeError::Field("key"));
            }
        }
        Ok(Self { header, slots, bytes })
    }

    /// The header.
    pub fn header(&self) -> &'a NodeHeader {
        self.header
    }

    /// The keys, with the positions of their values.
    pub fn slots(&self) -> &'a [Slot] {
        self.slots
    }

    /// The value of a slot.
    pub fn value(&self, slot: &Slot) -> &'a [u8] {
        let start = usize::from(slot.offset.get());
        &self.bytes[start..start + usize::from(slot.bytes.get())]
    }
}

/// The log uid of a key of kind [`ItemKind::Log`].
pub fn log_of(key: &Key) -> LogUid {
    LogUid::new(key.sub())
}
