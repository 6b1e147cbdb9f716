//! Calls on contents: reading, writing, positions, durability, entries of directories.

use super::sizes;
use crate::descriptors::DescriptionRef;
use crate::dispatch::{Answer, Call, Refusal};
use crate::memory::{self, Buffer, Buffers, Use};
use crate::mount::{Errno, Handle, Mount, Target};
use crate::start::site;
use std::io::IoSlice;

/// Limit of bytes of directory entries in one call.
const LIST_BYTES_MAX: usize = 1 << 20;
/// Bytes before the name in a `linux_dirent64`.
const ENTRY_HEAD: usize = 19;

/// The mount, which exists when a row's function runs.
pub fn mount() -> &'static dyn Mount {
    site().expect("calls are only served for a mount").mount
}

/// Checks that a file is open for reading, or for writing.
#[cold]
fn check_open_for(file: Handle, purpose: Use) -> Result<(), Errno> {
    let flags = mount().flags(file);
    let refusing = if purpose == Use::Target { libc::O_WRONLY } else { libc::O_RDONLY };
    let open = flags & libc::O_PATH == 0 && flags & libc::O_ACCMODE != refusing;
    if open { Ok(()) } else { Err(Errno(libc::EBADF)) }
}

/// The one buffer of a call. That the file is not open for the call is an error that comes before those of the buffer.
#[inline]
fn buffer(file: Handle, call: &Call, purpose: Use) -> Result<Buffer, Errno> {
    Buffer::new(call.arguments[1], call.arguments[2], purpose)
        .or_else(|errno| check_open_for(file, purpose).and(Err(errno)))
}

/// The buffers of a vectored call, likewise.
#[inline]
fn buffers(file: Handle, call: &Call, purpose: Use) -> Result<Buffers, Errno> {
    Buffers::vector(call.arguments[1], call.arguments[2], purpose)
        .or_else(|errno| check_open_for(file, purpose).and(Err(errno)))
}

#[inline]
fn receive(file: Handle, at: Option<u64>, call: &Call) -> Answer {
    let mut buffers = buffers(file, call, Use::Target)?;
    if buffers.is_empty() {
        // Also from a directory.
        check_open_for(file, Use::Target)?;
        return Ok(0);
    }
    Ok(buffers.with_targets(|slices| mount().read(file, at, slices))? as u64)
}

#[inline]
fn send(file: Handle, at: Option<u64>, call: &Call, flags: i32) -> Answer {
    let write = |slices: &[IoSlice<'_>]| {
        let asked = slices.iter().map(|slice| slice.len()).sum();
        match sizes::room_with(file, at, asked, flags)? {
            room if room == asked => mount().write(file, at, slices, flags),
            room => mount().write(file, at, &first_of(slices, room), flags),
        }
    };
    let buffers = buffers(file, call, Use::Source).map_err(|errno| match errno {
        memory::FAULT => match memory::bytes_of_vector(call.arguments[1], call.arguments[2]) {
            Some(asked) => without_data(file, at, asked, flags),
            None => errno,
        },
        _ => errno,
    })?;
    Ok(buffers.with_sources(write)? as u64)
}

/// The error of a write of so many bytes to an open file, none of which can be read. As in the kernel, it comes after those of the
/// range, and after the change of the times and the set-id bits.
#[cold]
fn without_data(file: Handle, at: Option<u64>, asked: usize, flags: i32) -> Errno {
    const BEHIND_ALL_FILES: i64 = i64::MAX - 1;
    let in_range = || {
        let begin = at.map_or_else(|| mount().seek(file, 0, libc::SEEK_CUR), Ok)?;
        let end = begin.checked_add(asked as u64).filter(|end| *end <= i64::MAX as u64);
        end.ok_or(Errno(libc::EINVAL))?;
        sizes::room_with(file, at, asked, flags)
    };
    if let Err(errno) = in_range() {
        return errno;
    }
    // A hole there has no other effect. The write fails in any case.
    let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let _ = mount().allocate(file, hole, BEHIND_ALL_FILES, 1);
    memory::FAULT
}

/// The first `left` bytes of the slices.
#[cold]
fn first_of<'a>(slices: &'a [IoSlice<'_>], mut left: usize) -> Vec<IoSlice<'a>> {
    let cut = slices.iter().map(|slice| {
        let count = slice.len().min(left);
        left -= count;
        IoSlice::new(&slice[..count])
    });
    cut.collect()
}

/// Serves a call that reads into one buffer.
#[inline]
fn receive_one(file: Handle, at: Option<u64>, call: &Call) -> Answer {
    let buffer = buffer(file, call, Use::Target)?;
    Ok(buffer.with_target(|slices| mount().read(file, at, slices))? as u64)
}

/// Serves a call that writes from one buffer.
#[inline]
fn send_one(file: Handle, at: Option<u64>, call: &Call) -> Answer {
    let buffer = buffer(file, call, Use::Source).map_err(|errno| {
        let (address, bytes) = (call.arguments[1], call.arguments[2]);
        match memory::is_of_programs(address, bytes) {
            true if errno == memory::FAULT => without_data(file, at, bytes as usize, 0),
            _ => errno,
        }
    })?;
    let buffer = match sizes::room(file, at, buffer.bytes())? {
        room if room == buffer.bytes() => buffer,
        room => Buffer::new(call.arguments[1], room as u64, Use::Source)?,
    };
    Ok(buffer.with_source(|slices| mount().write(file, at, slices, 0))? as u64)
}

/// An offset argument.
#[inline]
fn offset(call: &Call, argument: usize) -> Result<Option<u64>, Errno> {
    let offset = call.arguments[argument];
    if offset > i64::MAX as u64 { Err(Errno(libc::EINVAL)) } else { Ok(Some(offset)) }
}

/// `read`
pub fn read(call: &Call) -> Answer {
    let file = call.file(0)?;
    receive_one(file.handle(), None, call)
}

/// `write`
pub fn write(call: &Call) -> Answer {
    let file = call.file(0)?;
    send_one(file.handle(), None, call)
}

/// `pread64`
pub fn pread64(call: &Call) -> Answer {
    let (file, at) = (call.file(0)?, offset(call, 3)?);
    receive_one(file.handle(), at, call)
}

/// `pwrite64`
pub fn pwrite64(call: &Call) -> Answer {
    let (file, at) = (call.file(0)?, offset(call, 3)?);
    send_one(file.handle(), at, call)
}

/// `readv`
pub fn readv(call: &Call) -> Answer {
    let file = call.file(0)?;
    receive(file.handle(), None, call)
}

/// `writev`
pub fn writev(call: &Call) -> Answer {
    let file = call.file(0)?;
    send(file.handle(), None, call, 0)
}

/// `preadv`
pub fn preadv(call: &Call) -> Answer {
    let (file, at) = (call.file(0)?, offset(call, 3)?);
    receive(file.handle(), at, call)
}

/// `pwritev`
pub fn pwritev(call: &Call) -> Answer {
    let (file, at) = (call.file(0)?, offset(call, 3)?);
    send(file.handle(), at, call, 0)
}

/// Flags of `preadv2` and `pwritev2` that are served. The first and the last need nothing: there is no queue to poll, and
/// no file of the tree raises SIGPIPE.
const IO_FLAGS: i32 =
    libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_APPEND | libc::RWF_NOAPPEND | RWF_NOSIGNAL;
const RWF_NOSIGNAL: i32 = 0x100;

/// Checks all arguments of `preadv2` and `pwritev2` but the buffers, in the kernel's order. An offset of all ones is the
/// file's position; `None` means that no byte is asked for.
fn flagged(call: &Call, purpose: Use) -> Result<Option<(DescriptionRef, Option<u64>)>, Errno> {
    const APPENDS: i32 = libc::RWF_APPEND | libc::RWF_NOAPPEND;
    let at = if call.arguments[3] == u64::MAX { None } else { offset(call, 3)? };
    let file = call.open_file(0)?;
    check_open_for(file.handle(), purpose)?;
    match buffers(file.handle(), call, purpose) {
        Ok(buffers) if buffers.is_empty() => return Ok(None),
        Ok(_) => {}
        // That no byte can be used is an error that comes after those of the flags.
        Err(memory::FAULT) if memory::bytes_of_vector(call.arguments[1], call.arguments[2]).is_some() => {}
        Err(errno) => return Err(errno),
    }
    match call.int(5) {
        flags if flags & !IO_FLAGS != 0 => Err(Errno(libc::EOPNOTSUPP)),
        flags if flags & APPENDS == APPENDS => Err(Errno(libc::EINVAL)),
        _ => Ok(Some((file, at))),
    }
}

/// `preadv2`
pub fn preadv2(call: &Call) -> Answer {
    match flagged(call, Use::Target)? {
        Some((file, at)) => receive(file.handle(), at, call),
        None => Ok(0),
    }
}

/// `pwritev2`
pub fn pwritev2(call: &Call) -> Answer {
    let Some((file, at)) = flagged(call, Use::Source)? else { return Ok(0) };
    let flags = call.int(5);
    let bytes = send(file.handle(), at, call, flags & (libc::RWF_APPEND | libc::RWF_NOAPPEND))?;
    if flags & (libc::RWF_DSYNC | libc::RWF_SYNC) != 0 {
        mount().sync(file.handle(), flags & libc::RWF_SYNC == 0)?;
    }
    Ok(bytes)
}

/// `lseek`
pub fn lseek(call: &Call) -> Answer {
    let file = call.file(0)?;
    Ok(mount().seek(file.handle(), call.arguments[1].cast_signed(), call.int(2))?)
}

/// `fsync`
pub fn fsync(call: &Call) -> Answer {
    mount().sync(call.file(0)?.handle(), false)?;
    Ok(0)
}

/// `fdatasync`
pub fn fdatasync(call: &Call) -> Answer {
    mount().sync(call.file(0)?.handle(), true)?;
    Ok(0)
}

/// `sync_file_range`
pub fn sync_file_range(call: &Call) -> Answer {
    let file = call.file(0)?;
    let (offset, bytes) = (call.arguments[1].cast_signed(), call.arguments[2].cast_signed());
    mount().sync_range(file.handle(), offset, bytes, call.arguments[3] as u32)?;
    Ok(0)
}

/// `sync`: of the mount, then of the kernel.
pub fn sync(_call: &Call) -> Answer {
    mount().sync_all(true)?;
    Err(Refusal::Pass)
}

/// `syncfs`
pub fn syncfs(call: &Call) -> Answer {
    call.open_file(0)?;
    mount().sync_all(false)?;
    Ok(0)
}

/// `ftruncate`
pub fn ftruncate(call: &Call) -> Answer {
    let file = call.file(0)?;
    let size = call.arguments[1].cast_signed();
    if size < 0 {
        return Err(Errno(libc::EINVAL).into());
    }
    sizes::check(Target::Open(file.handle()), size)?;
    mount().change(Target::Open(file.handle()), crate::mount::Change::Size(size))?;
    Ok(0)
}

/// Whether an open file is a regular one.
fn is_regular(file: Handle) -> Result<bool, Errno> {
    let mode = mount().attributes(Target::Open(file))?.stx_mode;
    Ok(u32::from(mode) & libc::S_IFMT == libc::S_IFREG)
}

/// `readahead`: advice.
pub fn readahead(call: &Call) -> Answer {
    let file = call.open_file(0)?;
    if mount().flags(file.handle()) & libc::O_ACCMODE == libc::O_WRONLY {
        return Err(Errno(libc::EBADF).into());
    }
    let is_range = call.arguments[2].cast_signed() >= 0;
    if is_range && is_regular(file.handle())? { Ok(0) } else { Err(Errno(libc::EINVAL).into()) }
}

/// `fadvise64`: advice.
pub fn fadvise64(call: &Call) -> Answer {
    call.open_file(0)?;
    let known = (0..=5).contains(&call.int(3)) && call.arguments[2].cast_signed() >= 0;
    if known { Ok(0) } else { Err(Errno(libc::EINVAL).into()) }
}

/// `fallocate`
pub fn fallocate(call: &Call) -> Answer {
    let file = call.file(0)?;
    let (offset, bytes) = (call.arguments[2].cast_signed(), call.arguments[3].cast_signed());
    let grows = call.int(1) & libc::FALLOC_FL_KEEP_SIZE == 0 && offset >= 0 && bytes > 0;
    if let Some(end) = offset.checked_add(bytes).filter(|_| grows) {
        sizes::check(Target::Open(file.handle()), end)?;
    }
    mount().allocate(file.handle(), call.int(1), offset, bytes)?;
    Ok(0)
}

/// `getdents64`
pub fn getdents64(call: &Call) -> Answer {
    let file = call.file(0)?;
    let room = usize::try_from(call.arguments[2] as u32).unwrap_or(0).min(LIST_BYTES_MAX);
    // Checked before, so that no entry is lost when the copy fails.
    Buffer::new(call.arguments[1], room as u64, Use::Target)
        .and_then(|buffer| if buffer.bytes() == room { Ok(()) } else { Err(memory::FAULT) })
        // An error of the file comes first.
        .or_else(|errno| mount().list(file.handle(), &mut |_| false).and(Err(errno)))?;
    let mut bytes = Vec::with_capacity(room);
    let mut refused = false;
    mount().list(file.handle(), &mut |entry| {
        let length = (ENTRY_HEAD + entry.name.len() + 1).next_multiple_of(8);
        if bytes.len() + length > room {
            refused = true;
            return false;
        }
        let end = bytes.len() + length;
        bytes.extend_from_slice(&entry.inode.to_ne_bytes());
        bytes.extend_from_slice(&entry.next.to_ne_bytes());
        bytes.extend_from_slice(&(length as u16).to_ne_bytes());
        bytes.push(entry.kind);
        bytes.extend_from_slice(entry.name);
        bytes.resize(end, 0);
        true
    })?;
    if bytes.is_empty() && refused {
        return Err(Errno(libc::EINVAL).into());
    }
    memory::write_bytes(call.arguments[1], &bytes)?;
    Ok(bytes.len() as u64)
}
