//! Open files that a process passes on to a child, or to its next program over an exec: the messages of
//! [`crate::call::CallKind::Share`], and the notes on the *liveness socket*. SharedFS creates this socket for the
//! files of one request; its end means that no process is left that could take them over.

use crate::DecodeError;
use crate::ids::InodeNumber;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Limit of open files in one request.
pub const SHARE_FILES_MAX: usize = 4096;

/// Limit of open files in one [`LivenessNote`].
pub const NOTE_FILES_MAX: usize = 128;

/// Bit that is set in the random numbers of passed-on files; numbers of sessions are small.
pub const SHARE_BIT: u64 = 1 << 63;

/// Passes on open files: `count` [`SharedFile`]s follow. The sender keeps them too.
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
    /// The open inode; 0 for an owner of locks without a file.
    pub inode: InodeNumber,
    /// Number of the lock owner.
    pub owner: U64,
    /// Process id, for information, if the owner is a process.
    pub pid: U32,
    /// Kind of the lock owner: `OWNER_*`; 0 if there is none.
    pub owner_kind: u8,
    /// Bits: 1 read, 2 write.
    pub access: u8,
    /// Zero.
    pub reserved: [u8; 2],
}

const _: () = assert!(size_of::<SharedFile>() == 24);

/// Number of the passed-on files, which a new process presents in its Hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ShareResponse {
    /// Random, with [`SHARE_BIT`].
    pub number: U64,
}

const _: () = assert!(size_of::<ShareResponse>() == 8);

/// [`LivenessNote::kind`]: the child process was created.
pub const NOTE_PROCESS: u32 = 1;
/// [`LivenessNote::kind`]: files that were closed in the child; `count` [`SharedFile`]s follow.
pub const NOTE_CLOSED: u32 = 2;

/// A note on the liveness socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LivenessNote {
    /// A `NOTE_*`.
    pub kind: U32,
    /// With `NOTE_PROCESS`: the process id of the child, as the parent's kernel shows it.
    pub process: U32,
    /// Number of files that follow, at most [`NOTE_FILES_MAX`].
    pub count: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<LivenessNote>() == 16);

impl LivenessNote {
    /// Splits a note into its head and its files.
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
    /// Splits a request into its head and its files.
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
    fn a_note_has_as_many_files_as_its_count() {
        let file = SharedFile {
            inode: InodeNumber::new(7),
            owner: U64::new(9),
            pid: U32::new(0),
            owner_kind: 2,
            access: 3,
            reserved: [0; 2],
        };
        let note = LivenessNote {
            kind: U32::new(NOTE_CLOSED),
            process: U32::new(0),
            count: U32::new(2),
            reserved: U32::new(0),
        };
        let body = [note.as_bytes(), file.as_bytes(), file.as_bytes()].concat();
        assert_eq!(LivenessNote::decode(&body), Ok((note, vec![file, file])));
        assert!(LivenessNote::decode(&body[..body.len() - 1]).is_err());
        assert!(LivenessNote::decode(&[&body[..], &[0]].concat()).is_err());
        let long = LivenessNote { count: U32::new(NOTE_FILES_MAX as u32 + 1), ..note };
        assert!(LivenessNote::decode(long.as_bytes()).is_err());
        assert_eq!(LivenessNote::decode(&[0; 16]), Err(DecodeError::Kind));
        let request = ShareRequest { count: U32::new(1), own: U32::new(1) };
        let body = [request.as_bytes(), file.as_bytes()].concat();
        assert_eq!(ShareRequest::decode(&body), Ok((request, vec![file])));
        assert!(ShareRequest::decode(request.as_bytes()).is_err());
    }
}
