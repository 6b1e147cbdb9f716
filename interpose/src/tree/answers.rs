//! Answers of the tree as numbers and structures of the kernel.

use crate::mount::Errno;
use crate::tell;
use vfs::engine::{Attributes, Space};
use vfs::{Stop, errno};

/// The value of `f_type` in `statfs`: `HRTH`.
const FILE_SYSTEM_TYPE: i64 = 0x4854_5248;
/// Minor number of the device of the tree's files; the major number is 0, which no real device has.
pub(super) const DEVICE_MINOR: u32 = 0x4854;
/// Bytes of a block, for `st_blksize`.
const BLOCK_BYTES: u32 = 4096;

/// Prints that a limit of the process leaves no address space.
#[cold]
pub fn tell_of_memory() {
    tell::refused("a limit leaves no address space for the update log of the tree (ulimit -v)");
}

pub fn errno_of(error: vfs::Error) -> Errno {
    if error == vfs::Error::NoMemory {
        tell_of_memory();
    }
    Errno(errno::number(error))
}

pub fn stop_of(stop: Stop) -> Errno {
    match stop {
        Stop::Failed(error) => errno_of(error),
        Stop::Leaves(_) => Errno::LEAVES,
        Stop::Special(_) => Errno::SPECIAL,
    }
}

pub fn status_of(attributes: &Attributes) -> libc::statx {
    // SAFETY: a structure of integers.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    let time = |ns: i64| {
        // SAFETY: a structure of integers.
        let mut time: libc::statx_timestamp = unsafe { std::mem::zeroed() };
        time.tv_sec = ns.div_euclid(1_000_000_000);
        time.tv_nsec = ns.rem_euclid(1_000_000_000) as u32;
        time
    };
    status.stx_mask = libc::STATX_BASIC_STATS | libc::STATX_BTIME;
    status.stx_blksize = BLOCK_BYTES;
    status.stx_nlink = attributes.links;
    status.stx_uid = attributes.uid;
    status.stx_gid = attributes.gid;
    status.stx_mode = (attributes.file_type.mode_bits() | attributes.mode) as u16;
    status.stx_ino = attributes.inode.get();
    status.stx_size = attributes.size;
    status.stx_blocks = attributes.blocks;
    status.stx_atime = time(attributes.atime_ns);
    status.stx_mtime = time(attributes.mtime_ns);
    status.stx_ctime = time(attributes.ctime_ns);
    status.stx_btime = time(attributes.btime_ns);
    status.stx_rdev_major = libc::major(attributes.rdev);
    status.stx_rdev_minor = libc::minor(attributes.rdev);
    status.stx_dev_minor = DEVICE_MINOR;
    status
}

pub fn space_of(space: &Space) -> libc::statfs {
    // SAFETY: a structure of integers.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    found.f_type = FILE_SYSTEM_TYPE;
    found.f_bsize = space.block_bytes as i64;
    found.f_frsize = space.block_bytes as i64;
    found.f_blocks = space.blocks;
    found.f_bfree = space.blocks_free;
    found.f_bavail = space.blocks_available;
    found.f_files = space.inodes;
    found.f_ffree = space.inodes_free;
    found.f_namelen = format::name::NAME_BYTES_MAX as i64;
    found
}
