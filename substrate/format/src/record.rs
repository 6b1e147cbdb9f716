//! Records of the update log: one for each operation that changes the tree (Assise §3.2.1), with a header of 64 bytes
//! and the payload as the program gave it.
//!
//! A record contains everything that a replica needs to apply it: numbers that the log's owner has chosen (inode,
//! cookie), the time, and the names. It does not contain rights or an order relative to other logs: these follow from
//! the ledger, because an untrusted process writes the log.

use crate::envelope::{Envelope, HEADER_BYTES};
use crate::ids::{InodeNumber, Sequence};
use crate::name::{Cookie, Name};
use crate::node::{PERMISSION_BITS, VALUE_BYTES_MAX};
use crate::{BLOCK_BYTES, DecodeError};
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Longest target of a symbolic link, in bytes.
pub const SYMLINK_BYTES_MAX: usize = 4095;

/// Longest value of an extended attribute, in bytes.
pub const XATTR_BYTES_MAX: usize = 65_536;

/// Kind of a record. The comment names the header fields that the kind uses in addition to `inode` and `time_ns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Fills the ring up to its end; no operation.
    Pad = 1,
    /// Payload: the bytes; `offset`: their position in the file.
    Write = 2,
    /// `offset`: the new size.
    Truncate = 3,
    /// `offset`, `extra`: start and length of the range; flags: `ALLOCATE_*`.
    Allocate = 4,
    /// Payload: [`CreateBody`], name, target of a symbolic link; `parent`, `extra`: directory and cookie.
    Create = 5,
    /// Payload: name; `parent`, `extra`: directory and cookie.
    Link = 6,
    /// Payload: name; `parent`, `extra`: directory and cookie; flags: [`UNLINK_DIRECTORY`], [`UNLINK_OPEN`].
    Unlink = 7,
    /// Payload: [`RenameBody`], old name, new name, with [`RENAME_WHITEOUT`] a [`WhiteoutBody`]; `inode`: the moved
    /// inode; flags: `RENAME_*`.
    Rename = 8,
    /// Payload: [`SetAttrBody`].
    SetAttr = 9,
    /// Payload: name, then value; `offset`: bytes of the name.
    SetXattr = 10,
    /// Payload: name.
    RemoveXattr = 11,
    /// Payload: [`CreateBody`]; `parent`: the directory whose rights and group apply; flags: [`UNNAMED_LINKABLE`]. The new
    /// file has no name, and the log's owner has it open.
    CreateUnnamed = 12,
}

impl Kind {
    /// The kind with this number.
    ///
    /// # Errors
    /// `Kind`.
    pub fn from_raw(raw: u8) -> Result<Self, DecodeError> {
        Ok(match raw {
            1 => Self::Pad,
            2 => Self::Write,
            3 => Self::Truncate,
            4 => Self::Allocate,
            5 => Self::Create,
            6 => Self::Link,
            7 => Self::Unlink,
            8 => Self::Rename,
            9 => Self::SetAttr,
            10 => Self::SetXattr,
            11 => Self::RemoveXattr,
            12 => Self::CreateUnnamed,
            _ => return Err(DecodeError::Kind),
        })
    }
}

/// Allocate: the size of the file does not change.
pub const ALLOCATE_KEEP_SIZE: u8 = 1;
/// Allocate: the range becomes a hole instead.
pub const ALLOCATE_PUNCH_HOLE: u8 = 2;
/// Unlink: the entry is a directory (rmdir).
pub const UNLINK_DIRECTORY: u8 = 1;
/// Unlink: the log's owner has the inode open, and keeps a reference to it if this was the last name.
pub const UNLINK_OPEN: u8 = 2;
/// Rename: both names exist and change places.
pub const RENAME_EXCHANGE: u8 = 1;
/// Rename: same as [`UNLINK_OPEN`] for the replaced inode.
pub const RENAME_REPLACED_OPEN: u8 = 2;
/// Rename: a new character device with number 0 gets the old name.
pub const RENAME_WHITEOUT: u8 = 4;
/// CreateUnnamed: a link may give the file a name.
pub const UNNAMED_LINKABLE: u8 = 1;

/// First 64 bytes of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RecordHeader {
    /// Kind, length, order, checksum.
    pub envelope: Envelope,
    /// The inode that is changed, created or moved.
    pub inode: InodeNumber,
    /// The directory whose entry is changed.
    pub parent: InodeNumber,
    /// See [`Kind`].
    pub offset: U64,
    /// See [`Kind`].
    pub extra: U64,
    /// Time of the operation, in nanoseconds since 1970, by the clock of the node.
    pub time_ns: I64,
}

const _: () = assert!(size_of::<RecordHeader>() == HEADER_BYTES);

/// Fixed part of a create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CreateBody {
    /// File type and permissions as in `st_mode`.
    pub mode: U32,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Bytes of the name that follows.
    pub name_bytes: U16,
    /// Bytes of the link's target that follows the name; 0 for other types.
    pub target_bytes: U16,
    /// Device number of a character or block device.
    pub rdev: U64,
}

const _: () = assert!(size_of::<CreateBody>() == 24);

/// Fixed part of a rename.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RenameBody {
    /// Directory of the old name.
    pub old_parent: InodeNumber,
    /// Directory of the new name.
    pub new_parent: InodeNumber,
    /// Cookie of the old name.
    pub old_cookie: U64,
    /// Cookie of the new name.
    pub new_cookie: U64,
    /// The previous inode of the new name, which is removed or (exchange) moved to the old name; 0 if there was none.
    pub replaced: InodeNumber,
    /// Bytes of the old name that follows.
    pub old_name_bytes: U16,
    /// Bytes of the new name that follows it.
    pub new_name_bytes: U16,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<RenameBody>() == 48);

/// The character device that a rename leaves under the old name. It has no permission bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WhiteoutBody {
    /// Its inode number.
    pub inode: InodeNumber,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
}

const _: () = assert!(size_of::<WhiteoutBody>() == 16);

/// Sets mode: permission bits only, without the type.
pub const SET_MODE: u32 = 1;
/// Sets the owner.
pub const SET_UID: u32 = 2;
/// Sets the group.
pub const SET_GID: u32 = 4;
/// Sets the time of last access.
pub const SET_ATIME: u32 = 8;
/// Sets the time of last change of the contents.
pub const SET_MTIME: u32 = 16;
/// All of them.
pub const SET_ALL: u32 = 31;

/// Payload of a change of attributes. The time of the change of status is the record's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SetAttrBody {
    /// Which of the following are set: `SET_*`.
    pub mask: U32,
    /// Permission bits.
    pub mode: U32,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Nanoseconds since 1970.
    pub atime_ns: I64,
    /// Nanoseconds since 1970.
    pub mtime_ns: I64,
}

const _: () = assert!(size_of::<SetAttrBody>() == 32);

/// A decoded record: its checksum was checked before, its lengths, names and flags are valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Sequence in the log.
    pub sequence: Sequence,
    /// The inode that is changed, created or moved; no inode for a pad.
    pub inode: InodeNumber,
    /// Nanoseconds since 1970.
    pub time_ns: i64,
    /// The operation with its operands.
    pub operation: Operation<'a>,
}

/// An operation with its operands, as the digest uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of the record header and bodies above")]
pub enum Operation<'a> {
    Pad,
    Write {
        offset: u64,
        bytes: &'a [u8],
    },
    Truncate {
        size: u64,
    },
    Allocate {
        offset: u64,
        bytes: u64,
        keep_size: bool,
        punch_hole: bool,
    },
    Create {
        parent: InodeNumber,
        cookie: Cookie,
        name: Name<'a>,
        body: CreateBody,
        target: &'a [u8],
    },
    Link {
        parent: InodeNumber,
        cookie: Cookie,
        name: Name<'a>,
    },
    Unlink {
        parent: InodeNumber,
        cookie: Cookie,
        name: Name<'a>,
        directory: bool,
    },
    Rename {
        body: RenameBody,
        old_name: Name<'a>,
        new_name: Name<'a>,
        exchange: bool,
        whiteout: Option<WhiteoutBody>,
    },
    SetAttr {
        body: SetAttrBody,
    },
    SetXattr {
        name: &'a [u8],
        value: &'a [u8],
    },
    RemoveXattr {
        name: &'a [u8],
    },
    CreateUnnamed {
        parent: InodeNumber,
        body: CreateBody,
        linkable: bool,
    },
}

/// Largest file: offsets fit a signed 64-bit number, like `off_t`.
pub const FILE_BYTES_MAX: u64 = i64::MAX as u64;

impl<'a> Record<'a> {
    /// Decodes a frame. The caller has checked its checksum ([`crate::envelope::check_frame`]) and passes exactly
    /// header and payload. Everything else is checked here, because the writer is not trusted.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Version`, `Field`.
    pub fn decode(frame: &'a [u8]) -> Result<Self, DecodeError> {
        let (header, payload) = RecordHeader::read_from_prefix(frame).map_err(|_| DecodeError::Truncated)?;
        let envelope = Envelope::decode(frame)?;
        if payload.len() as u64 != u64::from(envelope.payload_bytes.get()) {
            return Err(DecodeError::Truncated);
        }
        let kind = Kind::from_raw(envelope.kind)?;
        if kind != Kind::Pad && header.inode == InodeNumber::NONE {
            return Err(DecodeError::Field("inode"));
        }
        Ok(Self {
            sequence: envelope.sequence,
            inode: header.inode,
            time_ns: header.time_ns.get(),
            operation: Operation::decode(kind, &header, payload)?,
        })
    }
}

impl<'a> Operation<'a> {
    fn decode(kind: Kind, header: &RecordHeader, payload: &'a [u8]) -> Result<Self, DecodeError> {
        let flags = header.envelope.flags;
        let flags_allowed = match kind {
            Kind::Allocate => ALLOCATE_KEEP_SIZE | ALLOCATE_PUNCH_HOLE,
            Kind::Unlink => UNLINK_DIRECTORY | UNLINK_OPEN,
            Kind::Rename => RENAME_EXCHANGE | RENAME_REPLACED_OPEN | RENAME_WHITEOUT,
            Kind::CreateUnnamed => UNNAMED_LINKABLE,
            _ => 0,
        };
        if flags & !flags_allowed != 0 {
            return Err(DecodeError::Field("flags"));
        }
        let parent = header.parent;
        let cookie = Cookie::from_raw(header.extra.get());
        match kind {
            Kind::Pad => Ok(Self::Pad),
            Kind::Write => {
                let offset = header.offset.get();
                check_range(offset, payload.len() as u64)?;
                Ok(Self::Write { offset, bytes: payload })
            }
            Kind::Truncate => {
                check_range(header.offset.get(), 0)?;
                no_payload(payload)?;
                Ok(Self::Truncate { size: header.offset.get() })
            }
            Kind::Allocate => {
                let (offset, bytes) = (header.offset.get(), header.extra.get());
                check_range(offset, bytes)?;
                no_payload(payload)?;
                let (keep_size, punch_hole) =
                    (flags & ALLOCATE_KEEP_SIZE != 0, flags & ALLOCATE_PUNCH_HOLE != 0);
                if bytes == 0 || (punch_hole && !keep_size) {
                    return Err(DecodeError::Field("extra"));
                }
                Ok(Self::Allocate { offset, bytes, keep_size, punch_hole })
            }
            Kind::Create => Self::decode_create(parent, cookie, payload),
            Kind::Link => Ok(Self::Link { parent: directory(parent)?, cookie, name: name(payload)? }),
            Kind::Unlink => Ok(Self::Unlink {
                parent: directory(parent)?,
                cookie,
                name: name(payload)?,
                directory: flags & UNLINK_DIRECTORY != 0,
            }),
            Kind::Rename => Self::decode_rename(payload, flags),
            Kind::SetAttr => {
                let body = SetAttrBody::read_from_bytes(payload).map_err(|_| DecodeError::Truncated)?;
                if body.mask.get() & !SET_ALL != 0 || body.mode.get() & !PERMISSION_BITS != 0 {
                    return Err(DecodeError::Field("mask"));
                }
                Ok(Self::SetAttr { body })
            }
            Kind::SetXattr => {
                let name_bytes = usize::try_from(header.offset.get()).map_err(|_| DecodeError::Truncated)?;
                let (name, value) = payload.split_at_checked(name_bytes).ok_or(DecodeError::Truncated)?;
                if value.len() > XATTR_BYTES_MAX {
                    return Err(DecodeError::Field("payload_bytes"));
                }
                Ok(Self::SetXattr { name: xattr_name(name)?, value })
            }
            Kind::RemoveXattr => Ok(Self::RemoveXattr { name: xattr_name(payload)? }),
            Kind::CreateUnnamed => {
                let body = CreateBody::read_from_bytes(payload).map_err(|_| DecodeError::Truncated)?;
                if FileType::of_mode(body.mode.get()) != Some(FileType::Regular) {
                    return Err(DecodeError::Field("mode"));
                }
                if body.name_bytes.get() != 0 || body.target_bytes.get() != 0 {
                    return Err(DecodeError::Field("name_bytes"));
                }
                let linkable = flags & UNNAMED_LINKABLE != 0;
                Ok(Self::CreateUnnamed { parent: directory(parent)?, body, linkable })
            }
        }
    }

    fn decode_create(parent: InodeNumber, cookie: Cookie, payload: &'a [u8]) -> Result<Self, DecodeError> {
        let (body, rest) = CreateBody::read_from_prefix(payload).map_err(|_| DecodeError::Truncated)?;
        let (name_part, target) =
            rest.split_at_checked(usize::from(body.name_bytes.get())).ok_or(DecodeError::Truncated)?;
        if target.len() != usize::from(body.target_bytes.get()) {
            return Err(DecodeError::Truncated);
        }
        let file_type = FileType::of_mode(body.mode.get()).ok_or(DecodeError::Field("mode"))?;
        let target_fits = match file_type {
            FileType::Symlink => (1..=SYMLINK_BYTES_MAX).contains(&target.len()) && !target.contains(&0),
            _ => target.is_empty(),
        };
        if !target_fits {
            return Err(DecodeError::Field("target_bytes"));
        }
        Ok(Self::Create { parent: directory(parent)?, cookie, name: name(name_part)?, body, target })
    }

    fn decode_rename(payload: &'a [u8], flags: u8) -> Result<Self, DecodeError> {
        let (body, rest) = RenameBody::read_from_prefix(payload).map_err(|_| DecodeError::Truncated)?;
        let (old_name, rest) =
            rest.split_at_checked(usize::from(body.old_name_bytes.get())).ok_or(DecodeError::Truncated)?;
        let (new_name, rest) =
            rest.split_at_checked(usize::from(body.new_name_bytes.get())).ok_or(DecodeError::Truncated)?;
        let (exchange, leaves_whiteout) = (flags & RENAME_EXCHANGE != 0, flags & RENAME_WHITEOUT != 0);
        let whiteout = match leaves_whiteout {
            true => Some(WhiteoutBody::read_from_bytes(rest).map_err(|_| DecodeError::Truncated)?),
            false if rest.is_empty() => None,
            false => return Err(DecodeError::Truncated),
        };
        if whiteout.is_some_and(|whiteout| exchange || whiteout.inode == InodeNumber::NONE) {
            return Err(DecodeError::Field("whiteout"));
        }
        directory(body.old_parent)?;
        directory(body.new_parent)?;
        if exchange && body.replaced == InodeNumber::NONE {
            return Err(DecodeError::Field("replaced"));
        }
        Ok(Self::Rename { body, old_name: name(old_name)?, new_name: name(new_name)?, exchange, whiteout })
    }
}

/// True if a decoded frame keeps the inode open whose last name it removes ([`UNLINK_OPEN`],
/// [`RENAME_REPLACED_OPEN`]), or that it creates without one.
pub fn keeps_open(frame: &[u8]) -> bool {
    let Ok(envelope) = Envelope::decode(frame) else { return false };
    match Kind::from_raw(envelope.kind) {
        Ok(Kind::Unlink) => envelope.flags & UNLINK_OPEN != 0,
        Ok(Kind::Rename) => envelope.flags & RENAME_REPLACED_OPEN != 0,
        Ok(Kind::CreateUnnamed) => true,
        _ => false,
    }
}

/// A record's share of the tree, in blocks.
pub const ROOM_OF_TREE: u64 = 1;

/// [`room_blocks`] of a rename that leaves a whiteout.
pub const ROOM_OF_RENAME_WITH_WHITEOUT: u64 = 2 * ROOM_OF_TREE;

/// [`room_blocks`] of a record that fills a range of a file.
#[inline]
pub const fn room_of_range(offset: u64, bytes: u64) -> u64 {
    (offset + bytes).div_ceil(BLOCK_BYTES as u64) - offset / BLOCK_BYTES as u64 + ROOM_OF_TREE
}

/// [`room_blocks`] of a record whose value is stored in the tree, in pieces of at most [`VALUE_BYTES_MAX`] bytes. A node
/// has space for four pieces, but one that was split in the middle of the tree may contain only two.
#[inline]
pub const fn room_of_value(bytes: usize) -> u64 {
    bytes.div_ceil(2 * VALUE_BYTES_MAX) as u64 + ROOM_OF_TREE
}

/// [`room_blocks`] of a record that sets the size of a file. The block with the new end is written again, unless the end
/// is at a border of blocks: then the record only shortens or removes items of the tree, and uses the reserve.
#[inline]
pub const fn room_of_size(size: u64) -> u64 {
    if size.is_multiple_of(BLOCK_BYTES as u64) { 0 } else { 1 + ROOM_OF_TREE }
}

/// Upper bound of the pool blocks that a record may cost when it is digested: the data blocks that it touches, each
/// written to a new block, and a share of the tree. Both sides of a session subtract this from the space reservation.
/// Records that only remove data cost nothing, because they use the reserve.
pub fn room_blocks(operation: &Operation<'_>) -> u64 {
    match operation {
        Operation::Pad | Operation::Unlink { .. } | Operation::RemoveXattr { .. } => 0,
        Operation::Write { offset, bytes } => room_of_range(*offset, bytes.len() as u64),
        Operation::Truncate { size } => room_of_size(*size),
        // Also at borders of blocks: the items around the hole may be more than there were.
        Operation::Allocate { punch_hole: true, .. } => 2 + ROOM_OF_TREE,
        Operation::Allocate { offset, bytes, .. } => room_of_range(*offset, *bytes),
        Operation::SetXattr { value, .. } => room_of_value(value.len()),
        Operation::Create { target, .. } => room_of_value(target.len()),
        Operation::Rename { whiteout: Some(_), .. } => ROOM_OF_RENAME_WITH_WHITEOUT,
        Operation::CreateUnnamed { .. }
        | Operation::Link { .. }
        | Operation::Rename { .. }
        | Operation::SetAttr { .. } => ROOM_OF_TREE,
    }
}

/// The data blocks among those of [`room_blocks`], at most, by the header of a record alone. They need space on the medium; the tree
/// has its own. Of bytes that are no record of a known kind it is nothing, because they are not digested.
pub fn data_blocks_of_header(header: &[u8; HEADER_BYTES]) -> u64 {
    let Ok(header) = RecordHeader::read_from_bytes(header) else { return 0 };
    let envelope = &header.envelope;
    let of_range =
        |bytes: u64| match header.offset.get().checked_add(bytes).filter(|end| *end <= FILE_BYTES_MAX) {
            Some(_) => room_of_range(header.offset.get(), bytes) - ROOM_OF_TREE,
            None => 0,
        };
    match Kind::from_raw(envelope.kind) {
        Ok(Kind::Write) => of_range(envelope.payload_bytes.get().into()),
        Ok(Kind::Truncate) => room_of_size(header.offset.get()).min(1),
        Ok(Kind::Allocate) if envelope.flags & ALLOCATE_PUNCH_HOLE != 0 => 2,
        Ok(Kind::Allocate) => of_range(header.extra.get()),
        _ => 0,
    }
}

/// True if a record needs data blocks, in addition to its share of the tree.
pub fn takes_blocks(operation: &Operation<'_>) -> bool {
    match operation {
        Operation::Write { .. } | Operation::Allocate { .. } => true,
        Operation::Truncate { size } => room_of_size(*size) > 0,
        _ => false,
    }
}

/// True if data blocks that a user writes to a file of this owner belong to the user. Otherwise they belong to the
/// daemon, and the session informs SharedFS before the first one.
pub fn is_own_file(user: u32, owner: u32) -> bool {
    user == owner || user == 0
}

fn check_range(offset: u64, bytes: u64) -> Result<(), DecodeError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= FILE_BYTES_MAX => Ok(()),
        _ => Err(DecodeError::Field("offset")),
    }
}

fn no_payload(payload: &[u8]) -> Result<(), DecodeError> {
    if payload.is_empty() { Ok(()) } else { Err(DecodeError::Field("payload_bytes")) }
}

fn directory(inode: InodeNumber) -> Result<InodeNumber, DecodeError> {
    if inode == InodeNumber::NONE { Err(DecodeError::Field("parent")) } else { Ok(inode) }
}

fn name(bytes: &[u8]) -> Result<Name<'_>, DecodeError> {
    Name::new(bytes).map_err(|_| DecodeError::Field("name"))
}

fn xattr_name(bytes: &[u8]) -> Result<&[u8], DecodeError> {
    let fits = (1..=crate::name::NAME_BYTES_MAX).contains(&bytes.len()) && !bytes.contains(&0);
    if fits { Ok(bytes) } else { Err(DecodeError::Field("name")) }
}

/// Type of a file, as the upper bits of `st_mode` say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FileType {
    /// `S_IFIFO`
    Fifo = 1,
    /// `S_IFCHR`
    CharacterDevice = 2,
    /// `S_IFDIR`
    Directory = 4,
    /// `S_IFBLK`
    BlockDevice = 6,
    /// `S_IFREG`
    Regular = 8,
    /// `S_IFLNK`
    Symlink = 10,
    /// `S_IFSOCK`
    Socket = 12,
}

impl FileType {
    /// The type in a mode; `None` without a valid type, or if the mode has unknown bits.
    pub const fn of_mode(mode: u32) -> Option<Self> {
        if mode > 0o177_777 { None } else { Self::from_raw((mode >> 12) as u8) }
    }

    /// The type with this number: `st_mode >> 12`, which is also `d_type`.
    pub const fn from_raw(raw: u8) -> Option<Self> {
        Some(match raw {
            1 => Self::Fifo,
            2 => Self::CharacterDevice,
            4 => Self::Directory,
            6 => Self::BlockDevice,
            8 => Self::Regular,
            10 => Self::Symlink,
            12 => Self::Socket,
            _ => return None,
        })
    }

    /// The bits of `st_mode`.
    pub const fn mode_bits(self) -> u32 {
        (self as u32) << 12
    }
}
