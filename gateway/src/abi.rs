//! Messages of the kernel's FUSE module, version 7, in the layout of `include/uapi/linux/fuse.h`: a header, fixed
//! fields in the machine's byte order, then names or bytes. They never leave the machine and are defined by Linux, so
//! they are here and not in `format`.
//!
//! Decoding copies the fixed fields out and is total: a message that is too short gives an error.

use vfs::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Major version of the protocol.
pub(crate) const MAJOR: u32 = 7;
/// The newest minor version that the gateway supports.
pub(crate) const MINOR: u32 = 45;
/// The oldest supported version: longer start-up messages, and the newer fields that the gateway uses.
pub(crate) const MINOR_MIN: u32 = 31;
/// The first version that can invalidate all names at once, and in which shared mappings have no copies in transit
/// (Linux 6.16): only with it the gateway can take back the data that the kernel caches.
pub(crate) const MINOR_CACHED: u32 = 44;
/// The first version in which the kernel can be asked to forget inodes (Linux 6.18).
pub(crate) const MINOR_FORGETS: u32 = 45;

/// The operations that the gateway serves.
pub(crate) mod opcode {
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const READLINK: u32 = 5;
    pub(crate) const SYMLINK: u32 = 6;
    pub(crate) const MKNOD: u32 = 8;
    pub(crate) const MKDIR: u32 = 9;
    pub(crate) const UNLINK: u32 = 10;
    pub(crate) const RMDIR: u32 = 11;
    pub(crate) const RENAME: u32 = 12;
    pub(crate) const LINK: u32 = 13;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const SETXATTR: u32 = 21;
    pub(crate) const GETXATTR: u32 = 22;
    pub(crate) const LISTXATTR: u32 = 23;
    pub(crate) const REMOVEXATTR: u32 = 24;
    pub(crate) const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const OPENDIR: u32 = 27;
    pub(crate) const READDIR: u32 = 28;
    pub(crate) const RELEASEDIR: u32 = 29;
    pub(crate) const FSYNCDIR: u32 = 30;
    pub(crate) const GETLK: u32 = 31;
    pub(crate) const SETLK: u32 = 32;
    pub(crate) const SETLKW: u32 = 33;
    pub(crate) const ACCESS: u32 = 34;
    pub(crate) const CREATE: u32 = 35;
    pub(crate) const INTERRUPT: u32 = 36;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const RENAME2: u32 = 45;
    pub(crate) const LSEEK: u32 = 46;
    pub(crate) const COPY_FILE_RANGE: u32 = 47;
    pub(crate) const TMPFILE: u32 = 51;
    pub(crate) const STATX: u32 = 52;
}

/// Flags that both sides agree on at the start.
pub(crate) mod init {
    /// Reads of one file may be concurrent.
    pub(crate) const ASYNC_READ: u64 = 1 << 0;
    /// The gateway decides about `fcntl` locks.
    pub(crate) const POSIX_LOCKS: u64 = 1 << 1;
    /// `.` and `..` can be looked up.
    pub(crate) const EXPORT: u64 = 1 << 4;
    /// Writes may be larger than a page.
    pub(crate) const BIG_WRITES: u64 = 1 << 5;
    /// The gateway decides about `flock` locks.
    pub(crate) const FLOCK_LOCKS: u64 = 1 << 10;
    /// Cached pages are dropped when size or time of a file changed.
    pub(crate) const INVALIDATE_DATA: u64 = 1 << 12;
    /// Lookups in one directory may be concurrent.
    pub(crate) const PARALLEL_LOOKUPS: u64 = 1 << 18;
    /// The gateway clears set-id bits.
    pub(crate) const HANDLE_KILLPRIV: u64 = 1 << 19;
    /// The reply contains the maximum number of pages in a message.
    pub(crate) const MAX_PAGES: u64 = 1 << 22;
    /// Pages are dropped only by notifications, and not because the size changed.
    pub(crate) const EXPLICIT_INVALIDATE_DATA: u64 = 1 << 25;
    /// The gateway clears set-id bits and capabilities, so that the kernel does not check for them before each write.
    pub(crate) const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    /// There is a second word of flags.
    pub(crate) const EXTENDED: u64 = 1 << 30;
    /// Files opened for direct IO can be mapped, also shared.
    pub(crate) const DIRECT_IO_MMAP: u64 = 1 << 36;
}

/// The valid fields of [`SetattrIn`].
pub(crate) mod fattr {
    pub(crate) const MODE: u32 = 1 << 0;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const ATIME: u32 = 1 << 4;
    pub(crate) const MTIME: u32 = 1 << 5;
    pub(crate) const HANDLE: u32 = 1 << 6;
    pub(crate) const ATIME_NOW: u32 = 1 << 7;
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
    pub(crate) const CTIME: u32 = 1 << 10;
}

/// [`OpenOut::flags`]: reads and writes bypass the page cache.
pub(crate) const OPEN_DIRECT_IO: u32 = 1 << 0;
/// [`OpenOut::flags`]: pages that are already cached are valid.
pub(crate) const OPEN_KEEP_CACHE: u32 = 1 << 1;
/// [`WriteIn::write_flags`]: pages of a mapping, at their own offset.
pub(crate) const WRITE_FROM_CACHE: u32 = 1 << 0;
/// [`GetattrIn::flags`]: the request is about an open file.
pub(crate) const GETATTR_HANDLE: u32 = 1 << 0;
/// [`FsyncIn::flags`]: `fdatasync`.
pub(crate) const FSYNC_DATA: u32 = 1 << 0;
/// [`LockIn::flags`]: a `flock` lock.
pub(crate) const LOCK_FLOCK: u32 = 1 << 0;
/// A flag of `open`: the file is opened to be executed. It is internal to the kernel and in no header.
pub(crate) const OPEN_TO_EXECUTE: u32 = 0x20;

/// The header of every message from the kernel.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InHeader {
    pub(crate) bytes: u32,
    pub(crate) opcode: u32,
    pub(crate) unique: u64,
    pub(crate) node: u64,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) pid: u32,
    pub(crate) extension: u32,
}

/// The header of every message to the kernel.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct OutHeader {
    pub(crate) bytes: u32,
    /// Zero, or a negative errno.
    pub(crate) error: i32,
    pub(crate) unique: u64,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InitIn {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) readahead_bytes_max: u32,
    pub(crate) flags: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InitOut {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) readahead_bytes_max: u32,
    pub(crate) flags: u32,
    pub(crate) background_max: u16,
    pub(crate) congestion_threshold: u16,
    pub(crate) write_bytes_max: u32,
    pub(crate) time_granularity_ns: u32,
    pub(crate) pages_max: u16,
    pub(crate) map_alignment: u16,
    pub(crate) flags_high: u32,
    pub(crate) stack_depth_max: u32,
    pub(crate) unused: [u32; 6],
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Attr {
    pub(crate) inode: u64,
    pub(crate) size: u64,
    pub(crate) blocks: u64,
    pub(crate) atime: i64,
    pub(crate) mtime: i64,
    pub(crate) ctime: i64,
    pub(crate) atime_ns: u32,
    pub(crate) mtime_ns: u32,
    pub(crate) ctime_ns: u32,
    pub(crate) mode: u32,
    pub(crate) links: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) rdev: u32,
    pub(crate) block_bytes: u32,
    pub(crate) flags: u32,
}

/// The times for which the kernel may cache an answer are zero, except under a lease (see [`crate::units`]).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct EntryOut {
    pub(crate) node: u64,
    pub(crate) generation: u64,
    pub(crate) entry_valid: u64,
    pub(crate) attr_valid: u64,
    pub(crate) entry_valid_ns: u32,
    pub(crate) attr_valid_ns: u32,
    pub(crate) attr: Attr,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct AttrOut {
    pub(crate) valid: u64,
    pub(crate) valid_ns: u32,
    pub(crate) unused: u32,
    pub(crate) attr: Attr,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct StatxTime {
    pub(crate) seconds: i64,
    pub(crate) ns: u32,
    pub(crate) unused: i32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct StatxOut {
    pub(crate) valid: u64,
    pub(crate) valid_ns: u32,
    pub(crate) flags: u32,
    pub(crate) unused: [u64; 2],
    pub(crate) mask: u32,
    pub(crate) block_bytes: u32,
    pub(crate) attributes: u64,
    pub(crate) links: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mode: u16,
    pub(crate) unused_mode: u16,
    pub(crate) inode: u64,
    pub(crate) size: u64,
    pub(crate) blocks: u64,
    pub(crate) attributes_mask: u64,
    pub(crate) atime: StatxTime,
    pub(crate) btime: StatxTime,
    pub(crate) ctime: StatxTime,
    pub(crate) mtime: StatxTime,
    pub(crate) rdev_major: u32,
    pub(crate) rdev_minor: u32,
    pub(crate) dev_major: u32,
    pub(crate) dev_minor: u32,
    pub(crate) spare: [u64; 14],
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct GetattrIn {
    pub(crate) flags: u32,
    pub(crate) unused: u32,
    pub(crate) handle: u64,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct SetattrIn {
    pub(crate) valid: u32,
    pub(crate) unused: u32,
    pub(crate) handle: u64,
    pub(crate) size: u64,
    pub(crate) lock_owner: u64,
    pub(crate) atime: i64,
    pub(crate) mtime: i64,
    pub(crate) ctime: i64,
    pub(crate) atime_ns: u32,
    pub(crate) mtime_ns: u32,
    pub(crate) ctime_ns: u32,
    pub(crate) mode: u32,
    pub(crate) unused_mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) unused_end: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct MknodIn {
    pub(crate) mode: u32,
    pub(crate) rdev: u32,
    pub(crate) umask: u32,
    pub(crate) unused: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct MkdirIn {
    pub(crate) mode: u32,
    pub(crate) umask: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Rename2In {
    pub(crate) to: u64,
    pub(crate) flags: u32,
    pub(crate) unused: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct OpenIn {
    pub(crate) flags: u32,
    pub(crate) open_flags: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct CreateIn {
    pub(crate) flags: u32,
    pub(crate) mode: u32,
    pub(crate) umask: u32,
    pub(crate) open_flags: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct OpenOut {
    pub(crate) handle: u64,
    pub(crate) flags: u32,
    pub(crate) unused: u32,
}

/// Also for `readdir`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ReadIn {
    pub(crate) handle: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: u32,
    pub(crate) read_flags: u32,
    pub(crate) lock_owner: u64,
    pub(crate) flags: u32,
    pub(crate) unused: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct WriteIn {
    pub(crate) handle: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: u32,
    pub(crate) write_flags: u32,
    pub(crate) lock_owner: u64,
    pub(crate) flags: u32,
    pub(crate) unused: u32,
}

/// Also for `getxattr` and `listxattr`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct SizeOut {
    pub(crate) bytes: u32,
    pub(crate) unused: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ReleaseIn {
    pub(crate) handle: u64,
    pub(crate) flags: u32,
    pub(crate) release_flags: u32,
    pub(crate) lock_owner: u64,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct FlushIn {
    pub(crate) handle: u64,
    pub(crate) unused: [u32; 2],
    pub(crate) lock_owner: u64,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct FsyncIn {
    pub(crate) handle: u64,
    pub(crate) flags: u32,
    pub(crate) unused: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct StatfsOut {
    pub(crate) blocks: u64,
    pub(crate) blocks_free: u64,
    pub(crate) blocks_available: u64,
    pub(crate) inodes: u64,
    pub(crate) inodes_free: u64,
    pub(crate) block_bytes: u32,
    pub(crate) name_bytes_max: u32,
    pub(crate) fragment_bytes: u32,
    pub(crate) unused: [u32; 7],
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct SetxattrIn {
    pub(crate) bytes: u32,
    pub(crate) flags: i32,
}

/// Also for `listxattr`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct GetxattrIn {
    pub(crate) bytes: u32,
    pub(crate) unused: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct LockIn {
    pub(crate) handle: u64,
    pub(crate) owner: u64,
    pub(crate) lock: FileLock,
    pub(crate) flags: u32,
    pub(crate) unused: u32,
}

/// Also the answer to `getlk`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct FileLock {
    pub(crate) first: u64,
    pub(crate) last: u64,
    pub(crate) kind: i32,
    pub(crate) pid: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct AccessIn {
    pub(crate) mask: u32,
    pub(crate) unused: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ForgetOne {
    pub(crate) node: u64,
    pub(crate) lookups: u64,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct BatchForgetIn {
    pub(crate) count: u32,
    pub(crate) unused: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct FallocateIn {
    pub(crate) handle: u64,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) mode: i32,
    pub(crate) unused: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct LseekIn {
    pub(crate) handle: u64,
    pub(crate) offset: u64,
    pub(crate) whence: i32,
    pub(crate) unused: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct CopyFileRangeIn {
    pub(crate) from_handle: u64,
    pub(crate) from_offset: u64,
    pub(crate) to_node: u64,
    pub(crate) to_handle: u64,
    pub(crate) to_offset: u64,
    pub(crate) bytes: u64,
    pub(crate) flags: u64,
}

/// The header of an entry of `readdir`; the name follows, then zeros up to a multiple of eight bytes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Dirent {
    pub(crate) inode: u64,
    pub(crate) offset: u64,
    pub(crate) name_bytes: u32,
    pub(crate) file_type: u32,
}

// The sizes in the kernel's header; detects an additional field or a wrong width.
const _: () = {
    assert!(size_of::<InHeader>() == 40 && size_of::<OutHeader>() == 16);
    assert!(size_of::<InitOut>() == 64 && size_of::<Attr>() == 88 && size_of::<EntryOut>() == 128);
    assert!(size_of::<AttrOut>() == 104 && size_of::<StatxOut>() == 32 + 256 && size_of::<SetattrIn>() == 88);
    assert!(size_of::<ReadIn>() == 40 && size_of::<WriteIn>() == 40 && size_of::<LockIn>() == 48);
    assert!(size_of::<StatfsOut>() == 80 && size_of::<FallocateIn>() == 32 && size_of::<Dirent>() == 24);
    assert!(size_of::<CopyFileRangeIn>() == 56);
};

/// The rest of a message after its header, decoded from the front.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Body<'a>(&'a [u8]);

/// Splits a message into header and body.
///
/// # Errors
/// `Invalid`: too short.
pub(crate) fn split(message: &[u8]) -> Result<(InHeader, Body<'_>), Error> {
    let (header, rest) = InHeader::read_from_prefix(message).map_err(|_| Error::Invalid)?;
    Ok((header, Body(rest)))
}

impl<'a> Body<'a> {
    /// Takes fixed fields.
    ///
    /// # Errors
    /// `Invalid`: too short.
    pub(crate) fn take<T: FromBytes>(&mut self) -> Result<T, Error> {
        let (value, rest) = T::read_from_prefix(self.0).map_err(|_| Error::Invalid)?;
        self.0 = rest;
        Ok(value)
    }

    /// Takes the bytes before a zero byte, and skips the zero.
    ///
    /// # Errors
    /// `Invalid`: there is none.
    pub(crate) fn string(&mut self) -> Result<&'a [u8], Error> {
        let end = self.0.iter().position(|byte| *byte == 0).ok_or(Error::Invalid)?;
        let string = &self.0[..end];
        self.0 = &self.0[end + 1..];
        Ok(string)
    }

    /// Takes `count` bytes.
    ///
    /// # Errors
    /// `Invalid`: there are fewer.
    pub(crate) fn bytes(&mut self, count: u32) -> Result<&'a [u8], Error> {
        let (bytes, rest) = self.0.split_at_checked(count as usize).ok_or(Error::Invalid)?;
        self.0 = rest;
        Ok(bytes)
    }
}
