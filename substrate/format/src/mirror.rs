//! Messages between a head and its copies, over a connection. `docs/replication.md` describes their order and meaning.
//!
//! All of these come from another machine: lengths and values are checked, and no message decides how much is allocated.

use crate::envelope::FRAME_ALIGN;
use crate::ids::{ChainNumber, Incarnation, InodeNumber, Life, LogUid, Sequence};
use crate::node::Key;
use crate::{BLOCK_BYTES, DecodeError};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use crate::mirror_lists::{DataParts, Items};

/// Version of the rules by which records are checked and applied. A copy with other rules would get another tree.
pub const RULES: u32 = 8;

/// The number that stands for the ledger where a message names a log. No log has this number.
pub const LEDGER_STREAM: LogUid = LogUid::new(u64::MAX);

/// Flag of `Data`: the copy syncs everything it has received and reports it. Of `Ends` and `Changed`: another one follows. Of `Range`:
/// the range reaches to the end of the tree. Of `Blocks`: these blocks are damaged at the head. Of `RoundEnd`: the import is
/// complete. Of `Sums`: no more follow.
pub const MIRROR_FLAG: u8 = 1;

/// Flag of a [`MirrorSum`]: a block of the file differs from its own checksum at the copy.
pub const SUM_DAMAGED: u32 = 1;

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MirrorKind {
    /// Head to copy, the first message: [`MirrorHello`].
    Hello = 1,
    /// Copy to head, the answer to `Hello`: [`MirrorEnds`], then [`MirrorHead::count`] times [`LogEnds`]. With
    /// [`MIRROR_FLAG`] another `Ends` follows.
    Ends = 2,
    /// Head to copy: [`MirrorOpen`]; the copy creates the file of a log.
    Open = 3,
    /// Head to copy: parts, each a [`DataPart`] and its bytes, which are whole frames or a piece of one frame. Copy to head:
    /// one part, the answer to `Fetch`.
    Data = 4,
    /// Copy to head: [`SyncedMark`]s, one for each stream of which the copy has synced more.
    Synced = 5,
    /// Copy to head: [`LedgerMark`], then [`LogMark`]s: how far the copy has executed the ledger and the logs in its synced
    /// tree.
    Executed = 6,
    /// Head to copy: [`MirrorRound`]; a round of an import begins.
    Round = 7,
    /// Head to copy: [`MirrorRange`]; the `Items` that follow replace all items of the import in this range of keys.
    Range = 8,
    /// Head to copy: items of the tree in the order of their keys, each a [`MirrorItem`] and its value.
    Items = 9,
    /// Head to copy: [`MirrorHead::count`] blocks, in order: the contents of the written extents in the `Items` before.
    Blocks = 10,
    /// Head to copy: [`MirrorRoundEnd`]; the copy answers when it has synced everything that it has received. With
    /// [`MIRROR_FLAG`] the import becomes the tree of the copy, and the answer is that to a `Hello`.
    RoundEnd = 11,
    /// Copy to head: [`MirrorImported`]: the copy has synced a round.
    Imported = 12,
    /// Head to copy, the first message of a connection of its own: [`MirrorHello`]; the copy is to execute no further entry of
    /// the ledger until it is told where the trees are compared.
    Compare = 13,
    /// Copy to head, the answer to `Compare`: [`LedgerMark`], the last entry that the copy has executed.
    Held = 14,
    /// Head to copy: [`LedgerMark`]; the copy compares its tree as of this entry.
    CompareAt = 15,
    /// Copy to head: [`MirrorSum`]s of its inodes, in the order of their numbers. With [`MIRROR_FLAG`] no more follow.
    Sums = 16,
    /// Head to copy, before a life begins: a key, then [`MirrorHead::count`] times [`RecordsOfLog`].
    CheckRecords = 17,
    /// Copy to head, the answer to `CheckRecords`: a [`LogMark`] for each range in which the copy has other or more records,
    /// its last one.
    Checked = 18,
    /// Head to copy: [`DataPart`]; the copy answers with as many of these bytes of its file as one message holds.
    Fetch = 19,
    /// Copy to head, the answer to a `Round` that begins with the tree of the copy: [`MirrorSpan`]s, the keys that changed in
    /// that tree since. With [`MIRROR_FLAG`] another `Changed` follows.
    Changed = 20,
}

impl MirrorKind {
    fn from_raw(raw: u8) -> Result<Self, DecodeError> {
        Ok(match raw {
            1 => Self::Hello,
            2 => Self::Ends,
            3 => Self::Open,
            4 => Self::Data,
            5 => Self::Synced,
            6 => Self::Executed,
            7 => Self::Round,
            8 => Self::Range,
            9 => Self::Items,
            10 => Self::Blocks,
            11 => Self::RoundEnd,
            12 => Self::Imported,
            13 => Self::Compare,
            14 => Self::Held,
            15 => Self::CompareAt,
            16 => Self::Sums,
            17 => Self::CheckRecords,
            18 => Self::Checked,
            19 => Self::Fetch,
            20 => Self::Changed,
            _ => return Err(DecodeError::Kind),
        })
    }
}

/// The reason for which a copy refuses a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MirrorRefusal {
    /// The copy does not refuse.
    None = 0,
    /// The copy knows a later version of the subtree.
    Version = 1,
    /// The copy belongs to another chain.
    Chain = 2,
    /// The copy has other rules.
    Rules = 3,
    /// The ledger of the copy has another length.
    Ledger = 4,
    /// The copy leads, or its pool failed.
    Closed = 5,
    /// The copy could not import the head's tree.
    Import = 6,
    /// The copy could not keep its tree as of the entry, or compares it already.
    Compare = 7,
    /// The medium of the copy has no space for what it would receive.
    Space = 8,
}

impl MirrorRefusal {
    /// The refusal with this number.
    ///
    /// # Errors
    /// `Field`.
    pub fn from_raw(raw: u32) -> Result<Self, DecodeError> {
        Ok(match raw {
            0 => Self::None,
            1 => Self::Version,
            2 => Self::Chain,
            3 => Self::Rules,
            4 => Self::Ledger,
            5 => Self::Closed,
            6 => Self::Import,
            7 => Self::Compare,
            8 => Self::Space,
            _ => return Err(DecodeError::Field("refusal")),
        })
    }
}

/// First bytes of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MirrorHead {
    /// A [`MirrorKind`].
    pub kind: u8,
    /// 0 or [`MIRROR_FLAG`].
    pub flags: u8,
    /// Number of the parts or marks that follow.
    pub count: U16,
}

const _: () = assert!(size_of::<MirrorHead>() == 4);

/// The first message of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MirrorHello {
    /// Version of the subtree in the view that makes the sender the head.
    pub version: U64,
    /// Bytes of the ledger's file.
    pub ledger_bytes: U64,
    /// The chain.
    pub chain: ChainNumber,
    /// [`RULES`].
    pub rules: U32,
}

const _: () = assert!(size_of::<MirrorHello>() == 24);

/// A position in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LedgerMark {
    /// An entry.
    pub sequence: Sequence,
    /// Offset in the file of the entry after it.
    pub position: U64,
    /// The life of the chain in which it was written.
    pub life: Life,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<LedgerMark>() == 24);

/// A position in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LogMark {
    /// The log.
    pub log: LogUid,
    /// A record.
    pub sequence: Sequence,
    /// Offset in the file of the record after it.
    pub position: U64,
    /// Incarnation of the log: the number of its file.
    pub incarnation: Incarnation,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<LogMark>() == 32);

/// How much a copy has of the file of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LogEnds {
    /// The log.
    pub log: LogUid,
    /// The last record that the copy has synced.
    pub end: Sequence,
    /// Offset in the file of the record after `end`.
    pub end_position: U64,
    /// The last record that the copy's tree contains.
    pub executed: Sequence,
    /// Offset in the file of the record after `executed`.
    pub executed_position: U64,
    /// Incarnation of the log: the number of its file.
    pub incarnation: Incarnation,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<LogEnds>() == 48);

/// Records that a head has of the file of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RecordsOfLog {
    /// The log.
    pub log: LogUid,
    /// The record before the first of the range.
    pub from: Sequence,
    /// Offset in the file of the first record.
    pub from_position: U64,
    /// The last record that the head has, at most the last that the copy has reported.
    pub end: Sequence,
    /// [`RecordsHash`](crate::hash::RecordsHash) of the records in between, under the key of the message.
    pub hash: [u8; 8],
    /// Incarnation of the log: the number of its file.
    pub incarnation: Incarnation,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<RecordsOfLog>() == 48);

/// How much a copy has of the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MirrorEnds {
    /// The last entry that the copy has synced.
    pub end: LedgerMark,
    /// The last entry that its synced tree contains.
    pub contained: LedgerMark,
    /// Key of the life at the end of its ledger, which distinguishes histories; zeros before the first life.
    pub key: [u8; 16],
    /// A [`MirrorRefusal`]. After a refusal all other fields are meaningless.
    pub refusal: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<MirrorEnds>() == 72);

/// Tells a copy to create the file of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MirrorOpen {
    /// The log.
    pub log: LogUid,
    /// The record before the first one in the file.
    pub before: Sequence,
    /// Bytes of the file.
    pub file_bytes: U64,
    /// Incarnation of the log: the number of its file.
    pub incarnation: Incarnation,
    /// The user who owns the log, for information.
    pub owner: U32,
}

const _: () = assert!(size_of::<MirrorOpen>() == 32);

/// Head of a part of a file; the bytes follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DataPart {
    /// The log, or [`LEDGER_STREAM`].
    pub log: LogUid,
    /// Incarnation of the log: the number of its file; 0 for the ledger.
    pub incarnation: Incarnation,
    /// Offset of the part in the file, in lines of `FRAME_ALIGN` bytes.
    pub line: U32,
    /// Length of the part in bytes: a multiple of `FRAME_ALIGN`.
    pub bytes: U32,
}

const _: () = assert!(size_of::<DataPart>() == 20);

impl DataPart {
    /// Offset of the part in the file, in bytes.
    pub fn position(&self) -> u64 {
        u64::from(self.line.get()) * FRAME_ALIGN as u64
    }

    /// Gives its length, if it is one.
    pub(crate) fn check(&self) -> Result<usize, DecodeError> {
        let bytes = usize::try_from(self.bytes.get()).map_err(|_| DecodeError::Field("bytes"))?;
        let is_whole = bytes > 0 && bytes.is_multiple_of(FRAME_ALIGN);
        if is_whole { Ok(bytes) } else { Err(DecodeError::Field("bytes")) }
    }
}

/// How far a copy has synced a stream: a log or the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SyncedMark {
    /// The log, or [`LEDGER_STREAM`].
    pub log: LogUid,
    /// The last record or entry that is synced.
    pub sequence: Sequence,
}

const _: () = assert!(size_of::<SyncedMark>() == 16);

/// A round of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MirrorRound {
    /// Entry of the ledger that last changed the head's tree.
    pub version: Sequence,
    /// In the first round: the first entry of the ledger that the tree of the copy does not have in common with that of the
    /// head; the import begins with the tree of the copy. 0: it begins with an empty tree.
    pub since: Sequence,
    /// 0 begins an import. Each later round transfers the changes since the round before.
    pub number: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<MirrorRound>() == 24);

/// A range of keys of the tree. If a bound lies inside a file, the range also has a range of blocks of that file, because one
/// extent of the head may be several extents at the copy. The copy keeps the extents that belong to an extent of the head
/// before the range, and removes those that belong to an extent in the range, even if they begin behind its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MirrorRange {
    /// The first key.
    pub first: Key,
    /// The key after the last one.
    pub end: Key,
    /// If `first` is the key of an extent: the first block of the file that no extent before the range covers.
    pub blocks_from: U64,
    /// If `end` is the key of an extent: the first block of the file at or after it that an extent after the range covers.
    pub blocks_to: U64,
}

const _: () = assert!(size_of::<MirrorRange>() == 56);

/// Keys that changed in the tree of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MirrorSpan {
    /// The first key.
    pub first: Key,
    /// The key after the last one; if the span reaches to the end of the tree, the first key.
    pub end: Key,
    /// 1: it reaches to the end of the tree.
    pub to_end: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<MirrorSpan>() == 48);

impl MirrorSpan {
    fn check(&self) -> Result<(), DecodeError> {
        self.first.kind()?;
        self.end.kind()?;
        let is_right = match self.to_end.get() {
            0 => self.first < self.end,
            1 => self.first == self.end,
            _ => false,
        };
        if is_right { Ok(()) } else { Err(DecodeError::Field("end")) }
    }
}

/// Head of an item of the tree; the value follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MirrorItem {
    /// Its key.
    pub key: Key,
    /// For an extent: the owner of the segment that contains it at the head. Otherwise 0.
    pub owner: U32,
    /// Bytes of the value.
    pub bytes: U16,
    /// Zero.
    pub reserved: U16,
}

const _: () = assert!(size_of::<MirrorItem>() == 28);

/// The end of a round of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MirrorRoundEnd {
    /// The last entry of the ledger that the transferred tree contains.
    pub ledger: LedgerMark,
    /// Inodes in the tree, orphans included.
    pub inodes: U64,
    /// Blocks of data in the tree.
    pub data_blocks: U64,
}

const _: () = assert!(size_of::<MirrorRoundEnd>() == 40);

/// Reports that a round of an import is synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MirrorImported {
    /// Number of the round.
    pub number: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<MirrorImported>() == 8);

/// Checksums of an inode with a name, which are equal in equal trees. They do not depend on where a node stores the contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MirrorSum {
    /// The inode.
    pub inode: InodeNumber,
    /// CRC-64 of its attributes.
    pub attributes: U64,
    /// CRC-64 of the entries of a directory, the target of a symbolic link, or of the blocks of a file that are not all zeros.
    pub contents: U64,
    /// CRC-64 of its extended attributes.
    pub xattrs: U64,
    /// 0 or [`SUM_DAMAGED`].
    pub flags: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<MirrorSum>() == 40);

/// A decoded message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of the structures above")]
pub enum MirrorMessage<'a> {
    Hello(MirrorHello),
    Ends { ends: MirrorEnds, refusal: MirrorRefusal, logs: &'a [LogEnds], more: bool },
    Open(MirrorOpen),
    Data { parts: DataParts<'a>, sync: bool },
    Synced(&'a [SyncedMark]),
    Executed { ledger: LedgerMark, logs: &'a [LogMark] },
    Round(MirrorRound),
    Range { range: MirrorRange, to_end: bool },
    Items(Items<'a>),
    Blocks { blocks: &'a [[u8; BLOCK_BYTES]], damaged: bool },
    RoundEnd { end: MirrorRoundEnd, whole: bool },
    Imported(MirrorImported),
    Compare(MirrorHello),
    Held(LedgerMark),
    CompareAt(LedgerMark),
    Sums { sums: &'a [MirrorSum], last: bool },
    CheckRecords { key: [u8; 16], logs: &'a [RecordsOfLog] },
    Checked(&'a [LogMark]),
    Fetch(DataPart),
    Changed { spans: &'a [MirrorSpan], more: bool },
}

impl<'a> MirrorMessage<'a> {
    /// Decodes a message.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Field`.
    pub fn decode(message: &'a [u8]) -> Result<Self, DecodeError> {
        let (head, body) = MirrorHead::ref_from_prefix(message).map_err(|_| DecodeError::Truncated)?;
        let kind = MirrorKind::from_raw(head.kind)?;
        let may_have_flag = matches!(
            kind,
            MirrorKind::Ends
                | MirrorKind::Data
                | MirrorKind::Range
                | MirrorKind::Blocks
                | MirrorKind::RoundEnd
                | MirrorKind::Sums
                | MirrorKind::Changed
        );
        if head.flags > MIRROR_FLAG || (head.flags != 0 && !may_have_flag) {
            return Err(DecodeError::Field("flags"));
        }
        let (count, flag) = (usize::from(head.count.get()), head.flags != 0);
        Ok(match kind {
            MirrorKind::Hello => Self::Hello(alone(body, count)?),
            MirrorKind::Open => {
                let open: MirrorOpen = alone(body, count)?;
                if open.log == LEDGER_STREAM {
                    return Err(DecodeError::Field("log"));
                }
                Self::Open(open)
            }
            MirrorKind::Ends => {
                let (ends, rest) = MirrorEnds::read_from_prefix(body).map_err(|_| DecodeError::Truncated)?;
                let refusal = MirrorRefusal::from_raw(ends.refusal.get())?;
                Self::Ends { ends, refusal, logs: marks(rest, count)?, more: flag }
            }
            MirrorKind::Data => Self::Data { parts: DataParts::check(body, count)?, sync: flag },
            MirrorKind::Synced => Self::Synced(marks(body, count)?),
            MirrorKind::Executed => {
                let (ledger, rest) =
                    LedgerMark::read_from_prefix(body).map_err(|_| DecodeError::Truncated)?;
                Self::Executed { ledger, logs: marks(rest, count)? }
            }
            MirrorKind::Round => Self::Round(alone(body, count)?),
            MirrorKind::Range => {
                let range: MirrorRange = alone(body, count)?;
                range.first.kind()?;
                range.end.kind()?;
                if !flag && range.first >= range.end {
                    return Err(DecodeError::Field("end"));
                }
                Self::Range { range, to_end: flag }
            }
            MirrorKind::Items => Self::Items(Items::check(body, count)?),
            MirrorKind::Blocks => Self::Blocks { blocks: marks(body, count)?, damaged: flag },
            MirrorKind::RoundEnd => Self::RoundEnd { end: alone(body, count)?, whole: flag },
            MirrorKind::Imported => Self::Imported(alone(body, count)?),
            MirrorKind::Compare => Self::Compare(alone(body, count)?),
            MirrorKind::Held => Self::Held(alone(body, count)?),
            MirrorKind::CompareAt => Self::CompareAt(alone(body, count)?),
            MirrorKind::Sums => Self::Sums { sums: marks(body, count)?, last: flag },
            MirrorKind::CheckRecords => {
                let (key, rest) = <[u8; 16]>::read_from_prefix(body).map_err(|_| DecodeError::Truncated)?;
                Self::CheckRecords { key, logs: marks(rest, count)? }
            }
            MirrorKind::Checked => Self::Checked(marks(body, count)?),
            MirrorKind::Changed => {
                let spans: &[MirrorSpan] = marks(body, count)?;
                spans.iter().try_for_each(MirrorSpan::check)?;
                Self::Changed { spans, more: flag }
            }
            MirrorKind::Fetch => {
                let part: DataPart = alone(body, count)?;
                part.check()?;
                Self::Fetch(part)
            }
        })
    }
}

/// Decodes a body that has no list.
fn alone<T: FromBytes + KnownLayout + Immutable>(body: &[u8], count: usize) -> Result<T, DecodeError> {
    if count != 0 {
        return Err(DecodeError::Field("count"));
    }
    T::read_from_bytes(body).map_err(|_| DecodeError::Truncated)
}

/// Decodes a list of `count` structures that fills the rest of the message.
fn marks<T: FromBytes + Immutable + KnownLayout + Unaligned>(
    bytes: &[u8],
    count: usize,
) -> Result<&[T], DecodeError> {
    let marks = <[T]>::ref_from_bytes(bytes).map_err(|_| DecodeError::Truncated)?;
    if marks.len() == count { Ok(marks) } else { Err(DecodeError::Field("count")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: MirrorKind, flags: u8, count: u16, body: &[u8]) -> Vec<u8> {
        let head = MirrorHead { kind: kind as u8, flags, count: U16::new(count) };
        [head.as_bytes(), body].concat()
    }

    fn part(bytes: u32) -> DataPart {
        DataPart {
            log: LogUid::new(7),
            incarnation: Incarnation::new(1),
            line: U32::new(64),
            bytes: U32::new(bytes),
        }
    }

    #[test]
    fn parts_of_data_are_decoded() {
        let body = [part(64).as_bytes(), &[1; 64], part(128).as_bytes(), &[2; 128]].concat();
        let bytes = message(MirrorKind::Data, MIRROR_FLAG, 2, &body);
        let Ok(MirrorMessage::Data { mut parts, sync: true }) = MirrorMessage::decode(&bytes) else {
            panic!("no data")
        };
        assert_eq!(parts.next(), Some((part(64), &[1; 64][..])));
        assert_eq!(parts.next(), Some((part(128), &[2; 128][..])));
        assert_eq!((parts.next(), part(64).position()), (None, 4096));
    }

    fn item(sub: u64, bytes: u16) -> MirrorItem {
        let key = Key::new(7, crate::node::ItemKind::Entry, sub);
        MirrorItem { key, owner: U32::new(0), bytes: U16::new(bytes), reserved: U16::new(0) }
    }

    #[test]
    fn items_are_decoded() {
        let body = [item(1, 3).as_bytes(), b"abc", item(2, 0).as_bytes()].concat();
        let bytes = message(MirrorKind::Items, 0, 2, &body);
        let Ok(MirrorMessage::Items(mut items)) = MirrorMessage::decode(&bytes) else { panic!("no items") };
        assert_eq!(items.next(), Some((item(1, 3), &b"abc"[..])));
        assert_eq!(items.next(), Some((item(2, 0), &b""[..])));
        assert_eq!(items.next(), None);
        let disordered = [item(2, 0).as_bytes(), item(2, 0).as_bytes()].concat();
        let mut unknown = body.clone();
        unknown[16] = 99;
        for (count, body) in [
            (1, &body[..]),
            (2, &body[..body.len() - 1]),
            (2, &disordered[..]),
            (2, &unknown[..]),
            (1, &[item(1, 961).as_bytes(), &[0; 961]].concat()[..]),
        ] {
            assert!(MirrorMessage::decode(&message(MirrorKind::Items, 0, count, body)).is_err());
        }
    }

    #[test]
    fn ranges_and_blocks_are_checked() {
        let key = |sub| Key::new(7, crate::node::ItemKind::Extent, sub);
        let range = |first, end| MirrorRange {
            first: key(first),
            end: key(end),
            blocks_from: U64::new(0),
            blocks_to: U64::new(0),
        };
        let decode = |flags, range: MirrorRange| {
            MirrorMessage::decode(&message(MirrorKind::Range, flags, 0, range.as_bytes())).is_ok()
        };
        assert!(decode(0, range(1, 2)) && decode(1, range(2, 1)) && !decode(0, range(2, 2)));
        for (count, bytes) in [(1, 4095), (1, 4097), (2, 4096), (0, 4096)] {
            let bytes = vec![0; bytes];
            assert!(MirrorMessage::decode(&message(MirrorKind::Blocks, 0, count, &bytes)).is_err());
        }
        let bytes = message(MirrorKind::Blocks, 1, 2, &[5; 8192]);
        let Ok(MirrorMessage::Blocks { blocks, damaged: true }) = MirrorMessage::decode(&bytes) else {
            panic!("no blocks")
        };
        assert_eq!(blocks.len(), 2);
    }

    #[test]
    fn lengths_and_counts_are_checked() {
        let one = [part(64).as_bytes(), &[1; 64]].concat();
        let bad = [
            message(MirrorKind::Data, 0, 2, &one),
            message(MirrorKind::Data, 2, 1, &one),
            message(MirrorKind::Data, 0, 1, &one[..one.len() - 1]),
            message(MirrorKind::Data, 0, 1, &[part(65).as_bytes(), &[1; 65]].concat()),
            message(MirrorKind::Data, 0, 1, part(0).as_bytes()),
            message(MirrorKind::Synced, 0, 2, &[0; 16]),
            message(MirrorKind::Synced, 0, 1, &[0; 15]),
            message(MirrorKind::Synced, 1, 1, &[0; 16]),
            message(MirrorKind::Hello, 0, 1, &[0; 24]),
            message(MirrorKind::Hello, 0, 0, &[0; 25]),
            message(MirrorKind::Open, 0, 0, &[0xff; 32]),
            message(MirrorKind::Ends, 0, 1, &[0; 72]),
            message(MirrorKind::Sums, 0, 2, &[0; 40]),
            message(MirrorKind::Sums, 0, 1, &[0; 39]),
            message(MirrorKind::Sums, 2, 1, &[0; 40]),
            message(MirrorKind::CompareAt, 1, 0, &[0; 24]),
            message(MirrorKind::CheckRecords, 0, 1, &[0; 16]),
            message(MirrorKind::CheckRecords, 1, 0, &[0; 16]),
            message(MirrorKind::CheckRecords, 0, 0, &[0; 15]),
            message(MirrorKind::Checked, 0, 1, &[0; 31]),
            message(MirrorKind::Fetch, 0, 0, &[0; 20]),
            message(MirrorKind::Changed, 0, 2, &[1; 48]),
            message(MirrorKind::Changed, 0, 1, &[0; 48]),
            message(MirrorKind::Changed, 2, 0, &[]),
            vec![21, 0, 0, 0],
            vec![4, 0, 0],
        ];
        for bytes in bad {
            assert!(MirrorMessage::decode(&bytes).is_err(), "{bytes:?}");
        }
        assert!(MirrorMessage::decode(&message(MirrorKind::Ends, 1, 1, &[0; 120])).is_ok());
        assert!(MirrorMessage::decode(&message(MirrorKind::Executed, 0, 0, &[0; 24])).is_ok());
        let key = Key::new(7, crate::node::ItemKind::Extent, 1);
        let span = |end: Key, to_end: u32| {
            let span = MirrorSpan { first: key, end, to_end: U32::new(to_end), reserved: U32::new(0) };
            message(MirrorKind::Changed, 0, 1, span.as_bytes())
        };
        let later = Key::new(8, crate::node::ItemKind::Inode, 0);
        for (end, to_end, is_right) in
            [(later, 0, true), (key, 1, true), (key, 0, false), (later, 1, false), (later, 2, false)]
        {
            assert_eq!(MirrorMessage::decode(&span(end, to_end)).is_ok(), is_right, "{end:?}, {to_end}");
        }
        let sums = message(MirrorKind::Sums, MIRROR_FLAG, 2, &[0; 80]);
        let Ok(MirrorMessage::Sums { sums, last: true }) = MirrorMessage::decode(&sums) else {
            panic!("no sums")
        };
        assert_eq!(sums.len(), 2);
    }
}
