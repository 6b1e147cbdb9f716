//! Open files that a process gives to a child, or to the program after an exec: what [`crate::call::CallKind::Share`]
//! carries, and what is said over the *lifeline*, a socket that SharedFS gives for them and that tells by its end
//! that nobody is left who could come for them.

use crate::DecodeError;
use crate::ids::InodeNumber;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Open files that one request gives.
pub const SHARE_FILES_MAX: usize = 4096;

/// Open files that one [`LifelineNote`] names.
pub const NOTE_FILES_MAX: usize = 128;

/// Bit of the numbers of what was given, which are random; sessions have small numbers.
pub const SHARE_BIT: u64 = 1 << 63;

/// Gives open files away: `count` [`SharedFile`]s follow. The giver keeps them, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ShareRequest {
    /// Number of [`SharedFile`]s.
    pub count: U32,
    /// 1 if they are for the process's own next program.
    pub own: U32,
}

const _: () = assert!(size_of::<ShareRequest>() == 8);

/// An open file description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SharedFile {
    /// What is open; 0 for an owner of locks alone.
    pub inode: InodeNumber,
    /// Number of the owner of its locks.
    pub owner: U64,
    /// Process of an owner that is one, for people to read.
    pub pid: U32,
    /// What the owner is: `OWNER_*`; 0 if there is none.
    pub owner_kind: u8,
    /// Bits: 1 read, 2 write.
    pub access: u8,
    /// Zero.
    pub reserved: [u8; 2],
}

const _: () = assert!(size_of::<SharedFile>() == 24);

/// What was given: its number, by which somebody says at his greeting that he comes for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ShareResponse {
    /// Random, with [`SHARE_BIT`].
    pub number: U64,
}

const _: () = assert!(size_of::<ShareResponse>() == 8);

/// [`LifelineNote::kind`]: the process that was made.
pub const NOTE_PROCESS: u32 = 1;
/// [`LifelineNote::kind`]: files that were closed there; `count` [`SharedFile`]s follow.
pub const NOTE_CLOSED: u32 = 2;

/// What is said over a lifeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LifelineNote {
    /// A `NOTE_*`.
    pub kind: U32,
    /// Of `NOTE_PROCESS`: its number, as the giver's kernel says it.
    pub process: U32,
    /// Files that follow, at most [`NOTE_FILES_MAX`].
    pub count: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<LifelineNote>() == 16);

impl LifelineNote {
    /// Splits a note into its head and the files that it names.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Field`.
    pub fn decode(body: &[u8]) -> Result<(Self, Vec<SharedFile>), DecodeError> {
        let (note, rest) = Self::read_from_prefix(body).map_err(|_| DecodeError::Truncated)?;
        if !matches!(note.kind.get(), NOTE_PROCESS | NOTE_CLOSED) {
            return Err(DecodeError::Kind);
        }
        Ok((note, files(rest, note.count.get(), NOTE_FILES_MAX)?))
    }
}

impl ShareRequest {
    /// Splits a request into its head and the files that it names.
    ///
    /// # Errors
    /// `Truncated`, `Field`.
    pub fn decode(body: &[u8]) -> Result<(Self, Vec<SharedFile>), DecodeError> {
        let (request, rest) = Self::read_from_prefix(body).map_err(|_| DecodeError::Truncated)?;
        Ok((request, files(rest, request.count.get(), SHARE_FILES_MAX)?))
    }
}

fn files(bytes: &[u8], count: u32, count_max: usize) -> Result<Vec<SharedFile>, DecodeError> {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    if count > count_max || bytes.len() != count * size_of::<SharedFile>() {
        return Err(DecodeError::Field("count"));
    }
    let each = bytes.chunks_exact(size_of::<SharedFile>());
    each.map(|one| SharedFile::read_from_bytes(one).map_err(|_| DecodeError::Truncated)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_names_as_many_files_as_it_says() {
        let file = SharedFile {
            inode: InodeNumber::new(7),
            owner: U64::new(9),
            pid: U32::new(0),
            owner_kind: 2,
            access: 3,
            reserved: [0; 2],
        };
        let note = LifelineNote {
            kind: U32::new(NOTE_CLOSED),
            process: U32::new(0),
            count: U32::new(2),
            reserved: U32::new(0),
        };
        let body = [note.as_bytes(), file.as_bytes(), file.as_bytes()].concat();
        assert_eq!(LifelineNote::decode(&body), Ok((note, vec![file, file])));
        assert!(LifelineNote::decode(&body[..body.len() - 1]).is_err());
        assert!(LifelineNote::decode(&[&body[..], &[0]].concat()).is_err());
        let long = LifelineNote { count: U32::new(NOTE_FILES_MAX as u32 + 1), ..note };
        assert!(LifelineNote::decode(long.as_bytes()).is_err());
        assert_eq!(LifelineNote::decode(&[0; 16]), Err(DecodeError::Kind));
        let request = ShareRequest { count: U32::new(1), own: U32::new(1) };
        let body = [request.as_bytes(), file.as_bytes()].concat();
        assert_eq!(ShareRequest::decode(&body), Ok((request, vec![file])));
        assert!(ShareRequest::decode(request.as_bytes()).is_err());
    }
}
