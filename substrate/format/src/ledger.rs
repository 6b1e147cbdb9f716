//! Entries of the ledger: the log that only SharedFS writes, for who was entitled to what and in which order
//! (Assise §3.3, "SharedFS logs and replicates each lease transfer").

use crate::DecodeError;
use crate::envelope::{Envelope, HEADER_BYTES};
use crate::ids::{InodeNumber, LeaseVersion, LogUid, Sequence, Stamp};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Supplementary groups that an `OpenLog` can carry; Linux allows as many to a process.
pub const GROUPS_MAX: usize = 65_536;

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Fills the ring up to its end.
    Pad = 1,
    /// A log begins. Payload: [`OpenLogBody`], then the supplementary groups.
    OpenLog = 2,
    /// A log may change `inode` from now on. Payload: [`GrantBody`].
    Grant = 3,
    /// The grant with this version ends; of the log, records up to `cut` count.
    End = 4,
    /// Records of the log up to `cut` are void for `inode`: no replica could apply them.
    Void = 5,
    /// Take-over: of the log, records up to `cut` count.
    Cut = 6,
    /// The log's last record is `cut`; it will never be written again.
    CloseLog = 7,
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
            5 => Self::Void,
            6 => Self::Cut,
            7 => Self::CloseLog,
            _ => return Err(DecodeError::Kind),
        })
    }
}

/// First 64 bytes of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EntryHeader {
    /// Kind, length, order, checksum.
    pub envelope: Envelope,
    /// The log it is about.
    pub log: LogUid,
    /// The unit it is about: an inode; 0 if none.
    pub inode: InodeNumber,
    /// Version of the grant; 0 if none.
    pub version: LeaseVersion,
    /// Last record that counts; 0 if none.
    pub cut: Sequence,
    /// Zero.
    pub reserved: U64,
}

const _: () = assert!(size_of::<EntryHeader>() == HEADER_BYTES);

/// Payload of an `OpenLog`, before the groups (four bytes each).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct OpenLogBody {
    /// User of the process, as the kernel vouched for it.
    pub uid: U32,
    /// Its group.
    pub gid: U32,
    /// Number of supplementary groups that follow.
    pub groups: U32,
    /// Process id, for people to read.
    pub pid: U32,
    /// First inode number of the log's own range.
    pub first_inode: InodeNumber,
    /// Numbers in the range.
    pub inodes: U64,
}

const _: () = assert!(size_of::<OpenLogBody>() == 32);

/// Payload of a `Grant`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct GrantBody {
    /// Records of the log after this one may use the grant.
    pub from: Sequence,
    /// What the unit has seen before: no record counts until its area has this.
    pub follow: Stamp,
    /// Bits of the right: 1 write, 2 (also) keep a reference open for writing.
    pub rights: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<GrantBody>() == 40);

/// An entry whose checksum was found right, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Place in the order.
    pub sequence: Sequence,
    /// The log it is about.
    pub log: LogUid,
    /// The unit, version and cut, and what the kind adds.
    pub event: Event<'a>,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of the entry header and bodies above")]
pub enum Event<'a> {
    Pad,
    OpenLog { body: OpenLogBody, groups: &'a [U32] },
    Grant { inode: InodeNumber, version: LeaseVersion, body: GrantBody },
    End { inode: InodeNumber, version: LeaseVersion, cut: Sequence },
    Void { inode: InodeNumber, cut: Sequence },
    Cut { cut: Sequence },
    CloseLog { cut: Sequence },
}

impl<'a> Entry<'a> {
    /// Takes a frame apart; its checksum was checked before.
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
        if kind != Kind::Pad && header.log == LogUid::default() {
            return Err(DecodeError::Field("log"));
        }
        let (inode, version, cut) = (header.inode, header.version, header.cut);
        let event = match kind {
            Kind::Pad => Event::Pad,
            Kind::OpenLog => {
                let (body, rest) =
                    OpenLogBody::read_from_prefix(payload).map_err(|_| DecodeError::Truncated)?;
                let groups = <[U32]>::ref_from_bytes(rest).map_err(|_| DecodeError::Truncated)?;
                if groups.len() as u64 != u64::from(body.groups.get()) || groups.len() > GROUPS_MAX {
                    return Err(DecodeError::Field("groups"));
                }
                Event::OpenLog { body, groups }
            }
            Kind::Grant => {
                let body = GrantBody::read_from_bytes(payload).map_err(|_| DecodeError::Truncated)?;
                Event::Grant { inode, version, body }
            }
            Kind::End => Event::End { inode, version, cut },
            Kind::Void => Event::Void { inode, cut },
            Kind::Cut => Event::Cut { cut },
            Kind::CloseLog => Event::CloseLog { cut },
        };
        let bodiless = matches!(kind, Kind::End | Kind::Void | Kind::Cut | Kind::CloseLog);
        if bodiless && !payload.is_empty() {
            return Err(DecodeError::Field("payload_bytes"));
        }
        Ok(Self { sequence: envelope.sequence, log: header.log, event })
    }
}
