//! Attributes: `stat` and similar calls, permissions, owners, times, sizes, extended attributes.

use super::data::mount;
use super::sizes;
use crate::dispatch::{Answer, Call};
use crate::memory;
use crate::mount::{Change, Errno, Target};
use crate::paths;
use crate::table::{self, PathArgument, path};

/// Linux's XATTR_SIZE_MAX and XATTR_NAME_MAX with a NUL.
const XATTR_BYTES_MAX: u64 = 65536;
const XATTR_NAME_BYTES_MAX: usize = 256;

/// An argument whose flags decide about links and an empty path.
fn at(dir: u8, path: u8, flags: i32) -> PathArgument {
    let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
    PathArgument { follow, empty: flags & libc::AT_EMPTY_PATH != 0, ..table::at(dir, path) }
}

fn only(flags: i32, known: i32) -> Result<(), Errno> {
    if flags & !known == 0 { Ok(()) } else { Err(Errno(libc::EINVAL)) }
}

/// The same attributes in the form of `stat`.
fn as_stat(from: &libc::statx) -> libc::stat {
    // SAFETY: a structure of integers.
    let mut to: libc::stat = unsafe { std::mem::zeroed() };
    to.st_dev = libc::makedev(from.stx_dev_major, from.stx_dev_minor);
    to.st_ino = from.stx_ino;
    to.st_nlink = from.stx_nlink.into();
    to.st_mode = from.stx_mode.into();
    to.st_uid = from.stx_uid;
    to.st_gid = from.stx_gid;
    to.st_rdev = libc::makedev(from.stx_rdev_major, from.stx_rdev_minor);
    to.st_size = from.stx_size.cast_signed();
    to.st_blksize = from.stx_blksize.into();
    to.st_blocks = from.stx_blocks.cast_signed();
    to.st_atime = from.stx_atime.tv_sec;
    to.st_atime_nsec = from.stx_atime.tv_nsec.into();
    to.st_mtime = from.stx_mtime.tv_sec;
    to.st_mtime_nsec = from.stx_mtime.tv_nsec.into();
    to.st_ctime = from.stx_ctime.tv_sec;
    to.st_ctime_nsec = from.stx_ctime.tv_nsec.into();
    to
}

fn stat_path(call: &Call, argument: PathArgument, buffer: u64) -> Answer {
    paths::serve(call, argument, |target| {
        memory::write_value(buffer, &as_stat(&mount().attributes(target)?)).map(|()| 0)
    })
}

/// `stat`
pub fn stat(call: &Call) -> Answer {
    stat_path(call, path(0), call.arguments[1])
}

/// `lstat`
pub fn lstat(call: &Call) -> Answer {
    stat_path(call, path(0).itself(), call.arguments[1])
}

/// `fstat`
pub fn fstat(call: &Call) -> Answer {
    let status = mount().attributes(Target::Open(call.file(0)?.handle()))?;
    memory::write_value(call.arguments[1], &as_stat(&status))?;
    Ok(0)
}

/// `newfstatat`
pub fn newfstatat(call: &Call) -> Answer {
    let flags = call.int(3);
    only(flags, libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH | libc::AT_NO_AUTOMOUNT)?;
    stat_path(call, at(0, 1, flags).or_null(), call.arguments[2])
}

/// Bits of the mask of `statx` that Linux reserves.
const STATX_RESERVED: u32 = 0x8000_0000;

/// `statx`: always stores all attributes.
pub fn statx(call: &Call) -> Answer {
    const SYNC: i32 = libc::AT_STATX_FORCE_SYNC | libc::AT_STATX_DONT_SYNC;
    let flags = call.int(2);
    only(flags, libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT | libc::AT_EMPTY_PATH | SYNC)?;
    if flags & SYNC == SYNC || call.arguments[3] as u32 & STATX_RESERVED != 0 {
        return Err(Errno(libc::EINVAL).into());
    }
    paths::serve(call, at(0, 1, call.int(2)).or_null(), |target| {
        memory::write_value(call.arguments[4], &mount().attributes(target)?).map(|()| 0)
    })
}

fn access_path(call: &Call, argument: PathArgument, mode: i32, flags: i32) -> Answer {
    only(mode, libc::R_OK | libc::W_OK | libc::X_OK)?;
    paths::serve(call, argument, |target| mount().access(target, mode, flags).map(|()| 0))
}

/// `access`
pub fn access(call: &Call) -> Answer {
    access_path(call, path(0), call.int(1), 0)
}

/// `faccessat`, which has no flags in the kernel.
pub fn faccessat(call: &Call) -> Answer {
    access_path(call, at(0, 1, 0), call.int(2), 0)
}

/// `faccessat2`
pub fn faccessat2(call: &Call) -> Answer {
    let flags = call.int(3);
    only(flags, libc::AT_EACCESS | libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH)?;
    access_path(call, at(0, 1, flags), call.int(2), flags)
}

fn change_path(call: &Call, argument: PathArgument, change: Change) -> Answer {
    paths::serve(call, argument, |target| mount().change(target, change).map(|()| 0))
}

fn mode(argument: u64) -> Change {
    Change::Mode(argument as u32 & 0o7777)
}

fn owner(uid: u64, gid: u64) -> Change {
    Change::Owner(uid as u32, gid as u32)
}

/// `chmod`
pub fn chmod(call: &Call) -> Answer {
    change_path(call, path(0), mode(call.arguments[1]))
}

/// `fchmod`
pub fn fchmod(call: &Call) -> Answer {
    mount().change(Target::Open(call.open_file(0)?.handle()), mode(call.arguments[1]))?;
    Ok(0)
}

/// `fchmodat`, which has no flags in the kernel.
pub fn fchmodat(call: &Call) -> Answer {
    change_path(call, at(0, 1, 0), mode(call.arguments[2]))
}

/// `fchmodat2`
pub fn fchmodat2(call: &Call) -> Answer {
    let flags = call.int(3);
    only(flags, libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH)?;
    change_path(call, at(0, 1, flags), mode(call.arguments[2]))
}

/// `chown`
pub fn chown(call: &Call) -> Answer {
    change_path(call, path(0), owner(call.arguments[1], call.arguments[2]))
}

/// `lchown`
pub fn lchown(call: &Call) -> Answer {
    change_path(call, path(0).itself(), owner(call.arguments[1], call.arguments[2]))
}

/// `fchown`
pub fn fchown(call: &Call) -> Answer {
    let change = owner(call.arguments[1], call.arguments[2]);
    mount().change(Target::Open(call.open_file(0)?.handle()), change)?;
    Ok(0)
}

/// `fchownat`
pub fn fchownat(call: &Call) -> Answer {
    let flags = call.int(4);
    only(flags, libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH)?;
    change_path(call, at(0, 1, flags), owner(call.arguments[2], call.arguments[3]))
}

const NOW: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_NOW };

/// Two times at an address, as they are; a null address means now.
fn times_at(address: u64) -> Result<[libc::timespec; 2], Errno> {
    if address == 0 { Ok([NOW; 2]) } else { memory::read_value(address) }
}

/// Two times in microseconds at an address; a null address means now.
fn times_in_us(address: u64) -> Result<[libc::timespec; 2], Errno> {
    let mut times = times_at(address)?;
    for time in times.iter_mut().filter(|_| address != 0) {
        if !(0..1_000_000).contains(&time.tv_nsec) {
            return Err(Errno(libc::EINVAL));
        }
        time.tv_nsec *= 1000;
    }
    Ok(times)
}

/// Changes the times, in nanoseconds, of a file that was found.
fn change_times(target: Target<'_>, times: [libc::timespec; 2]) -> Result<u64, Errno> {
    let special = |time: &libc::timespec| matches!(time.tv_nsec, libc::UTIME_NOW | libc::UTIME_OMIT);
    if times.iter().any(|time| !special(time) && !(0..1_000_000_000).contains(&time.tv_nsec)) {
        // An error of the path comes first.
        mount().attributes(target)?;
        return Err(Errno(libc::EINVAL));
    }
    mount().change(target, Change::Times(times)).map(|()| 0)
}

/// `utime`
pub fn utime(call: &Call) -> Answer {
    let times = if call.arguments[1] == 0 {
        [NOW; 2]
    } else {
        memory::read_value::<[i64; 2]>(call.arguments[1])?
            .map(|seconds| libc::timespec { tv_sec: seconds, tv_nsec: 0 })
    };
    change_path(call, path(0), Change::Times(times))
}

/// `utimes`
pub fn utimes(call: &Call) -> Answer {
    change_path(call, path(0), Change::Times(times_in_us(call.arguments[1])?))
}

/// Changes the times of the open file, for calls with a null path.
fn change_times_of_file(call: &Call, times: [libc::timespec; 2]) -> Answer {
    Ok(change_times(Target::Open(call.open_file(0)?.handle()), times)?)
}

/// `futimesat`; a null path means the descriptor.
pub fn futimesat(call: &Call) -> Answer {
    let times = times_in_us(call.arguments[2])?;
    if call.arguments[1] == 0 && call.int(0) != libc::AT_FDCWD {
        return change_times_of_file(call, times);
    }
    change_path(call, at(0, 1, 0), Change::Times(times))
}

/// `utimensat`; a null path means the descriptor, and allows no flags.
pub fn utimensat(call: &Call) -> Answer {
    let (flags, times) = (call.int(3), times_at(call.arguments[2])?);
    if times.iter().all(|time| time.tv_nsec == libc::UTIME_OMIT) {
        return Ok(0);
    }
    if call.arguments[1] == 0 && call.int(0) != libc::AT_FDCWD {
        only(flags, 0)?;
        return change_times_of_file(call, times);
    }
    only(flags, libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH)?;
    paths::serve(call, at(0, 1, flags), |target| change_times(target, times))
}

/// `truncate`
pub fn truncate(call: &Call) -> Answer {
    let size = call.arguments[1].cast_signed();
    if size < 0 {
        return Err(Errno(libc::EINVAL).into());
    }
    paths::serve(call, path(0), |target| {
        sizes::check(target, size)?;
        mount().change(target, Change::SizeByPath(size)).map(|()| 0)
    })
}

/// `statfs`
pub fn statfs(call: &Call) -> Answer {
    paths::serve(call, path(0), |target| {
        // The path has to exist.
        mount().attributes(target)?;
        memory::write_value(call.arguments[1], &mount().space()?).map(|()| 0)
    })
}

/// `fstatfs`
pub fn fstatfs(call: &Call) -> Answer {
    call.file(0)?;
    memory::write_value(call.arguments[1], &mount().space()?)?;
    Ok(0)
}

/// The name of an attribute, of which Linux checks the length before it looks for the file.
fn xattr_name(address: u64) -> Result<Vec<u8>, Errno> {
    match memory::read_string(address, XATTR_NAME_BYTES_MAX) {
        Ok(name) if !name.is_empty() => Ok(name),
        Ok(_) | Err(Errno(libc::ENAMETOOLONG)) => Err(Errno(libc::ERANGE)),
        Err(errno) => Err(errno),
    }
}

/// Stores a value; returns only its length if the buffer has no bytes.
fn give(value: &[u8], buffer: u64, room: u64) -> Result<u64, Errno> {
    if room > 0 {
        if value.len() as u64 > room {
            return Err(Errno(libc::ERANGE));
        }
        memory::write_bytes(buffer, value)?;
    }
    Ok(value.len() as u64)
}

/// An attribute to be set.
struct NewXattr {
    name: Vec<u8>,
    value: Vec<u8>,
    flags: i32,
}

impl NewXattr {
    /// Checks the arguments in the order of Linux's checks, all of which come before those of the file.
    fn of(call: &Call) -> Result<Self, Errno> {
        let [_, name, value, bytes, flags, _] = call.arguments;
        let flags = flags as i32;
        only(flags, libc::XATTR_CREATE | libc::XATTR_REPLACE)?;
        let name = xattr_name(name)?;
        if bytes > XATTR_BYTES_MAX {
            return Err(Errno(libc::E2BIG));
        }
        let mut bytes = vec![0; bytes as usize];
        memory::read_bytes(value, &mut bytes)?;
        Ok(Self { name, value: bytes, flags })
    }

    fn set(&self, target: Target<'_>) -> Result<u64, Errno> {
        mount().set_xattr(target, &self.name, &self.value, self.flags).map(|()| 0)
    }
}

fn get_xattr_of(call: &Call, target: Target<'_>, name: &[u8]) -> Result<u64, Errno> {
    let value = mount().xattr(target, name)?;
    give(&value, call.arguments[2], call.arguments[3])
}

fn list_xattrs_of(call: &Call, target: Target<'_>) -> Result<u64, Errno> {
    give(&mount().list_xattrs(target)?, call.arguments[1], call.arguments[2])
}

fn remove_xattr_of(target: Target<'_>, name: &[u8]) -> Result<u64, Errno> {
    mount().remove_xattr(target, name).map(|()| 0)
}

/// `setxattr`
pub fn setxattr(call: &Call) -> Answer {
    let new = NewXattr::of(call)?;
    paths::serve(call, path(0), |target| new.set(target))
}

/// `lsetxattr`
pub fn lsetxattr(call: &Call) -> Answer {
    let new = NewXattr::of(call)?;
    paths::serve(call, path(0).itself(), |target| new.set(target))
}

/// `fsetxattr`
pub fn fsetxattr(call: &Call) -> Answer {
    let new = NewXattr::of(call)?;
    Ok(new.set(Target::Open(call.open_file(0)?.handle()))?)
}

/// `getxattr`
pub fn getxattr(call: &Call) -> Answer {
    let name = xattr_name(call.arguments[1])?;
    paths::serve(call, path(0), |target| get_xattr_of(call, target, &name))
}

/// `lgetxattr`
pub fn lgetxattr(call: &Call) -> Answer {
    let name = xattr_name(call.arguments[1])?;
    paths::serve(call, path(0).itself(), |target| get_xattr_of(call, target, &name))
}

/// `fgetxattr`
pub fn fgetxattr(call: &Call) -> Answer {
    let name = xattr_name(call.arguments[1])?;
    Ok(get_xattr_of(call, Target::Open(call.open_file(0)?.handle()), &name)?)
}

/// `listxattr`
pub fn listxattr(call: &Call) -> Answer {
    paths::serve(call, path(0), |target| list_xattrs_of(call, target))
}

/// `llistxattr`
pub fn llistxattr(call: &Call) -> Answer {
    paths::serve(call, path(0).itself(), |target| list_xattrs_of(call, target))
}

/// `flistxattr`
pub fn flistxattr(call: &Call) -> Answer {
    Ok(list_xattrs_of(call, Target::Open(call.open_file(0)?.handle()))?)
}

/// `removexattr`
pub fn removexattr(call: &Call) -> Answer {
    let name = xattr_name(call.arguments[1])?;
    paths::serve(call, path(0), |target| remove_xattr_of(target, &name))
}

/// `lremovexattr`
pub fn lremovexattr(call: &Call) -> Answer {
    let name = xattr_name(call.arguments[1])?;
    paths::serve(call, path(0).itself(), |target| remove_xattr_of(target, &name))
}

/// `fremovexattr`
pub fn fremovexattr(call: &Call) -> Answer {
    let name = xattr_name(call.arguments[1])?;
    Ok(remove_xattr_of(Target::Open(call.open_file(0)?.handle()), &name)?)
}
