//! Entries of the ledger, the log that only SharedFS writes. The ledger is the script of the head of a chain: it
//! records which logs began and ended, which log had which rights, and which records were digested when (Assise §3.3,
//! "SharedFS logs and replicates each lease transfer"). A copy with the update logs that executes the entries in
//! order arrives at the same tree.
//!
//! Sequence numbers continue over all lives of the chain, so the number of an entry is a position in the chain's
//! history. Pointers in the tree carry it as their version.

use crate::DecodeError;
use crate::checksum::Salt;
use crate::envelope::{Envelope, HEADER_BYTES};
use crate::ids::{Epoch, Incarnation, InodeNumber, LeaseVersion, Life, LogUid, NodeId, Sequence};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Limit of supplementary groups in an `OpenLog`: the limit that Linux has for a process.
pub const GROUPS_MAX: usize = 65_536;

/// Limit of inodes in one `Reap`.
pub const REAP_MAX: usize = 4096;

/// Right of a grant: the inode may be changed.
pub const RIGHT_WRITE: u32 = 1;
/// Right of a grant: the contents may be written independent of the mode, because the inode was opened for writing.
pub const RIGHT_CONTENTS: u32 = 2;

/// The salt of a ledger's checksums in one life. No update log has the same salt.
pub fn salt_of(life: Life) -> Salt {
    Salt::of_log(LogUid::new(u64::MAX), Incarnation::new(life.get()))
}

/// Kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Fills the ring up to its end.
    Pad = 1,
    /// A log begins. Payload: [`OpenLogBody`], then the supplementary groups.
    OpenLog = 2,
    /// A log may change a unit from now on: records after `record` may use the grant. `detail`: [`GrantDetail`].
    Grant = 3,
    /// The grant with this version ends, after the log's records up to `record` were digested. `detail`:
    /// [`GrantDetail`].
    End = 4,
    /// The log ends with `record`, and is never written again.
    CloseLog = 5,
    /// Records of the log up to `record` are digested, with the rights of the entries before this one. `detail`: hash
    /// of their bytes since the last such entry, with the key of the life ([`crate::hash`]); 0 if the daemon serves a
    /// single node.
    Digest = 6,
    /// Inodes without a name that no process has open are removed. Payload: their numbers.
    Reap = 7,
    /// A daemon begins to lead. Payload: [`LifeBody`]. This entry is the first one with the salt of the new life.
    Life = 8,
}

impl Kind {
    /// The kind with this number.
    ///
    /// # Errors
    /// `Kind`.
    pub fn from_raw(raw: u8) -> Result<Self, DecodeError> {
        Ok(match raw {
            1 => Self::Pad,
            2 => Self::OpenLog,
            3 => Self::Grant,
            4 => Self::End,
            5 => Self::CloseLog,
            6 => Self::Digest,
            7 => Self::Reap,
            8 => Self::Life,
            _ => return Err(DecodeError::Kind),
        })
    }

    /// True if entries of this kind refer to one log.
    fn names_log(self) -> bool {
        !matches!(self, Self::Pad | Self::Reap | Self::Life)
    }
}

/// Kind of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum UnitKind {
    /// An inode.
    Inode = 1,
    /// The right to rename directories between directories; there is one such unit.
    Rename = 2,
    /// The file locks of an inode.
    Locks = 3,
    /// A directory and everything below it.
    Subtree = 4,
}

impl UnitKind {
    /// The kind with this number.
    ///
    /// # Errors
    /// `Field`.
    pub fn from_raw(raw: u8) -> Result<Self, DecodeError> {
        Ok(match raw {
            1 => Self::Inode,
            2 => Self::Rename,
            3 => Self::Locks,
            4 => Self::Subtree,
            _ => return Err(DecodeError::Field("unit")),
        })
    }
}

/// A unit of leases, the object of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Unit {
    /// Its kind.
    pub kind: UnitKind,
    /// Its inode; [`InodeNumber::NONE`] for a rename.
    pub inode: InodeNumber,
}

impl Unit {
    /// An inode.
    pub const fn inode(inode: InodeNumber) -> Self {
        Self { kind: UnitKind::Inode, inode }
    }

    /// The unit of renames of directories between directories.
    pub const RENAME: Self = Self { kind: UnitKind::Rename, inode: InodeNumber::NONE };
}

/// Mode of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum GrantMode {
    /// Other logs may read too.
    Read = 1,
    /// No other log may use the unit.
    Write = 2,
}

impl GrantMode {
    /// The mode with this number.
    ///
    /// # Errors
    /// `Field`.
    pub fn from_raw(raw: u8) -> Result<Self, DecodeError> {
        match raw {
            1 => Ok(Self::Read),
            2 => Ok(Self::Write),
            _ => Err(DecodeError::Field("mode")),
        }
    }
}

/// Kind of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum LogKind {
    /// The update log of one process.
    Update = 1,
}

impl LogKind {
    /// The kind with this number.
    ///
    /// # Errors
    /// `Field`.
    pub fn from_raw(raw: u32) -> Result<Self, DecodeError> {
        if raw == Self::Update as u32 { Ok(Self::Update) } else { Err(DecodeError::Field("kind")) }
    }
}

/// First 64 bytes of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EntryHeader {
    /// Kind, length, order, checksum.
    pub envelope: Envelope,
    /// The log that it refers to; 0 if none.
    pub log: LogUid,
    /// The inode of the unit that it refers to; 0 if none.
    pub inode: InodeNumber,
    /// Version of the grant, or of a log's preallocated inode range; 0 if none.
    pub version: LeaseVersion,
    /// A record of the log; its meaning depends on the kind.
    pub record: Sequence,
    /// Depends on the kind: [`GrantDetail`], a hash, or 0.
    pub detail: [u8; 8],
}

const _: () = assert!(size_of::<EntryHeader>() == HEADER_BYTES);

/// `detail` of a `Grant` or an `End`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct GrantDetail {
    /// Bits of the right: 1 write; 2 write the contents independent of the mode. 0 for an `End`.
    pub rights: U32,
    /// A [`UnitKind`].
    pub unit: u8,
    /// A [`GrantMode`].
    pub mode: u8,
    /// Zero.
    pub reserved: [u8; 2],
}

const _: () = assert!(size_of::<GrantDetail>() == 8);

/// Payload of an `OpenLog`, before the groups (four bytes each).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OpenLogBody {
    /// User of the process, as the kernel has reported it.
    pub uid: U32,
    /// Its group.
    pub gid: U32,
    /// Number of supplementary groups that follow.
    pub groups: U32,
    /// Process id, for information.
    pub pid: U32,
    /// First number of the log's preallocated inode range.
    pub first_inode: InodeNumber,
    /// Numbers in the range.
    pub inodes: U64,
    /// Bytes of the log's file.
    pub file_bytes: U64,
    /// Incarnation of the log: the number of its file.
    pub incarnation: Incarnation,
    /// The node on which the process runs.
    pub node: NodeId,
    /// A [`LogKind`].
    pub kind: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<OpenLogBody>() == 56);

/// Payload of a `Life`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LifeBody {
    /// The new life: the one after the last.
    pub life: Life,
    /// The leading node.
    pub node: NodeId,
    /// Epoch of the cluster.
    pub epoch: Epoch,
    /// Zero.
    pub reserved: U32,
    /// The last entry of the history that this life continues.
    pub after: Sequence,
    /// Key of the hashes in its `Digest` entries, which no process knows.
    pub key: [u8; 16],
}

const _: () = assert!(size_of::<LifeBody>() == 40);

/// A decoded entry, whose checksum was checked before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Sequence in the ledger.
    pub sequence: Sequence,
    /// The log that it refers to; 0 if none.
    pub log: LogUid,
    /// The event.
    pub event: Event<'a>,
}

/// The event of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of the entry header and bodies above")]
pub enum Event<'a> {
    Pad,
    OpenLog { version: LeaseVersion, body: OpenLogBody, groups: &'a [U32] },
    Grant { unit: Unit, version: LeaseVersion, from: Sequence, mode: GrantMode, rights: u32 },
    End { unit: Unit, version: LeaseVersion, digested: Sequence },
    CloseLog { last: Sequence },
    Digest { up_to: Sequence, hash: [u8; 8] },
    Reap { inodes: &'a [InodeNumber] },
    Life { body: LifeBody },
}

impl<'a> Entry<'a> {
    /// Decodes a frame, whose checksum was checked before.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Version`, `Field`.
    pub fn decode(frame: &'a [u8]) -> Result<Self, DecodeError> {
        let (header, payload) = EntryHeader::read_from_prefix(frame).map_err(|_| DecodeError::Truncated)?;
        let envelope = Envelope::decode(frame)?;
        if payload.len() as u64 != u64::from(envelope.payload_bytes.get()) {
            return Err(DecodeError::Truncated);
        }
        let kind = Kind::from_raw(envelope.kind)?;
        if kind.names_log() != (header.log != LogUid::default()) {
            return Err(DecodeError::Field("log"));
        }
        let event = Self::event(kind, &header, payload)?;
        Ok(Self { sequence: envelope.sequence, log: header.log, event })
    }

    fn event(kind: Kind, header: &EntryHeader, payload: &'a [u8]) -> Result<Event<'a>, DecodeError> {
        let (version, record) = (header.version, header.record);
        let bodiless = matches!(kind, Kind::Grant | Kind::End | Kind::CloseLog | Kind::Digest);
        if bodiless && !payload.is_empty() {
            return Err(DecodeError::Field("payload_bytes"));
        }
        Ok(match kind {
            Kind::Pad => Event::Pad,
            Kind::OpenLog => {
                let (body, groups) = open_log(payload)?;
                Event::OpenLog { version, body, groups }
            }
            Kind::Grant => {
                let (unit, detail) = unit_of(header)?;
                let mode = GrantMode::from_raw(detail.mode)?;
                Event::Grant { unit, version, from: record, mode, rights: detail.rights.get() }
            }
            Kind::End => Event::End { unit: unit_of(header)?.0, version, digested: record },
            Kind::CloseLog => Event::CloseLog { last: record },
            Kind::Digest => Event::Digest { up_to: record, hash: header.detail },
            Kind::Reap => {
                let inodes = <[InodeNumber]>::ref_from_bytes(payload).map_err(|_| DecodeError::Truncated)?;
                if inodes.is_empty() || inodes.len() > REAP_MAX {
                    return Err(DecodeError::Field("payload_bytes"));
                }
                Event::Reap { inodes }
            }
            Kind::Life => {
                let body = LifeBody::read_from_bytes(payload).map_err(|_| DecodeError::Truncated)?;
                if body.life > Life::LAST {
                    return Err(DecodeError::Field("life"));
                }
                Event::Life { body }
            }
        })
    }
}

fn open_log(payload: &[u8]) -> Result<(OpenLogBody, &[U32]), DecodeError> {
    let (body, rest) = OpenLogBody::read_from_prefix(payload).map_err(|_| DecodeError::Truncated)?;
    let groups = <[U32]>::ref_from_bytes(rest).map_err(|_| DecodeError::Truncated)?;
    if groups.len() as u64 != u64::from(body.groups.get()) || groups.len() > GROUPS_MAX {
        return Err(DecodeError::Field("groups"));
    }
    LogKind::from_raw(body.kind.get())?;
    Ok((body, groups))
}

fn unit_of(header: &EntryHeader) -> Result<(Unit, GrantDetail), DecodeError> {
    let detail: GrantDetail = zerocopy::transmute!(header.detail);
    let unit = Unit { kind: UnitKind::from_raw(detail.unit)?, inode: header.inode };
    if (unit.kind == UnitKind::Rename) != (unit.inode == InodeNumber::NONE) {
        return Err(DecodeError::Field("inode"));
    }
    Ok((unit, detail))
}
