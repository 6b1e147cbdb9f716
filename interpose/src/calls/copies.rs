//! Copies between descriptors. Within the tree the mount copies; between the tree and files of the kernel the library
//! reads and writes.

use super::data::mount;
use super::sizes;
use crate::descriptors::{self, DescriptionRef};
use crate::dispatch::{Answer, Call, is_path};
use crate::memory;
use crate::mount::{Errno, Target};
use crate::raw;
use std::io::{IoSlice, IoSliceMut};

/// Bytes that are copied in one step through the library's memory.
const PIECE_BYTES: usize = 128 << 10;

/// A side of a copy: a file of ours, or the kernel's by its descriptor.
enum Side {
    Ours(DescriptionRef),
    Kernel(i32),
}

impl Side {
    /// # Errors
    /// EBADF, also for a description that is only a path.
    fn of(fd: i32) -> Result<Self, Errno> {
        if descriptors::is_ours(fd) {
            let held = descriptors::get(fd)?;
            return if is_path(&held) { Err(Errno(libc::EBADF)) } else { Ok(Self::Ours(held)) };
        }
        match raw::fcntl(fd, libc::F_GETFL, 0)? as i32 & libc::O_PATH {
            0 => Ok(Self::Kernel(fd)),
            _ => Err(Errno(libc::EBADF)),
        }
    }

    fn flags(&self) -> Result<i32, Errno> {
        match self {
            Self::Ours(held) => Ok(mount().flags(held.handle())),
            Self::Kernel(fd) => raw::fcntl(*fd, libc::F_GETFL, 0).map(|flags| flags as i32),
        }
    }

    fn reads(&self) -> Result<bool, Errno> {
        Ok(self.flags()? & libc::O_ACCMODE != libc::O_WRONLY)
    }

    fn writes(&self) -> Result<bool, Errno> {
        Ok(self.flags()? & libc::O_ACCMODE != libc::O_RDONLY)
    }

    /// The type bits of its mode.
    fn kind(&self) -> Result<u32, Errno> {
        let mode = match self {
            Self::Ours(held) => u32::from(mount().attributes(Target::Open(held.handle()))?.stx_mode),
            Self::Kernel(fd) => {
                let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
                let arguments = [raw::number(*fd), status.as_mut_ptr() as u64];
                // SAFETY: the structure lives across the call.
                unsafe { raw::try_call(libc::SYS_fstat, &arguments) }?;
                // SAFETY: zeroed, and plain numbers.
                unsafe { status.assume_init() }.st_mode
            }
        };
        Ok(mode & libc::S_IFMT)
    }

    fn position(&self) -> Result<i64, Errno> {
        match self {
            Self::Ours(held) => mount().seek(held.handle(), 0, libc::SEEK_CUR).map(|at| at as i64),
            Self::Kernel(fd) => seek(*fd, 0, libc::SEEK_CUR),
        }
    }

    fn set_position(&self, at: i64) -> Result<(), Errno> {
        match self {
            Self::Ours(held) => mount().seek(held.handle(), at, libc::SEEK_SET).map(|_| ()),
            Self::Kernel(fd) => seek(*fd, at, libc::SEEK_SET).map(|_| ()),
        }
    }

    fn read_at(&self, at: i64, into: &mut [u8]) -> Result<usize, Errno> {
        match self {
            Self::Ours(held) => mount().read(held.handle(), Some(at as u64), &mut [IoSliceMut::new(into)]),
            Self::Kernel(fd) => raw::read_at(*fd, into, at as u64),
        }
    }

    /// Writes at the file's position, which moves.
    fn write(&self, bytes: &[u8]) -> Result<usize, Errno> {
        match self {
            Self::Ours(held) => {
                let room = sizes::room(held.handle(), None, bytes.len())?;
                mount().write(held.handle(), None, &[IoSlice::new(&bytes[..room])], 0)
            }
            Self::Kernel(fd) => raw::write(*fd, bytes),
        }
    }
}

fn seek(fd: i32, by: i64, whence: i32) -> Result<i64, Errno> {
    // SAFETY: takes no memory.
    let moved = unsafe { raw::try_call(libc::SYS_lseek, &[raw::number(fd), by as u64, whence as u64]) };
    moved.map(|at| at as i64)
}

/// The offset at an address of the program, if the address is not null.
fn given(address: u64) -> Result<Option<i64>, Errno> {
    if address == 0 { Ok(None) } else { memory::read_value(address).map(Some) }
}

/// Checks that data can be copied from one file to the other.
fn check_files(from: &Side, to: &Side) -> Result<(), Errno> {
    let kinds = [from.kind()?, to.kind()?];
    if kinds.contains(&libc::S_IFDIR) {
        return Err(Errno(libc::EISDIR));
    }
    if kinds != [libc::S_IFREG; 2] {
        return Err(Errno(libc::EINVAL));
    }
    let open = from.reads()? && to.writes()? && to.flags()? & libc::O_APPEND == 0;
    if open { Ok(()) } else { Err(Errno(libc::EBADF)) }
}

/// `FICLONE` and `FICLONERANGE`: files of the tree share no blocks. The errors of the two files come first.
pub fn clone_range(from: i32, to: &DescriptionRef) -> Answer {
    let from = Side::of(from)?;
    if let Side::Kernel(_) = from {
        return Err(Errno(libc::EXDEV).into());
    }
    check_files(&from, &Side::Ours(to.clone()))?;
    Err(Errno(libc::EOPNOTSUPP).into())
}

/// `FIDEDUPERANGE`: likewise.
pub fn share_same(from: &DescriptionRef, address: u64) -> Answer {
    /// Bytes of the request, and of each range in it.
    const HEAD: usize = 24;
    const RANGE: usize = 32;
    /// The request is at most a page.
    const REQUEST_BYTES_MAX: usize = 4096;
    let count: u16 = memory::read_value(address + 16)?;
    let bytes = HEAD + RANGE * usize::from(count);
    if bytes > REQUEST_BYTES_MAX {
        return Err(Errno(libc::ENOMEM).into());
    }
    let mut request = vec![0; bytes];
    memory::read_bytes(address, &mut request)?;
    let from = Side::Ours(from.clone());
    if !from.reads()? || request[18..HEAD].iter().any(|byte| *byte != 0) {
        return Err(Errno(libc::EINVAL).into());
    }
    match from.kind()? {
        libc::S_IFDIR => Err(Errno(libc::EISDIR).into()),
        libc::S_IFREG => Err(Errno(libc::EOPNOTSUPP).into()),
        _ => Err(Errno(libc::EINVAL).into()),
    }
}

/// `copy_file_range`: between the tree and other files it fails as between file systems, and programs copy by
/// themselves.
pub fn copy_file_range(call: &Call) -> Answer {
    let [_, from_address, _, to_address, bytes, flags] = call.arguments;
    let (from, to) = (Side::of(call.int(0))?, Side::of(call.int(2))?);
    let (from_offset, to_offset) = (given(from_address)?, given(to_address)?);
    if flags as u32 != 0 {
        return Err(Errno(libc::EINVAL).into());
    }
    check_files(&from, &to)?;
    let (Side::Ours(from), Side::Ours(to)) = (&from, &to) else { return Err(Errno(libc::EXDEV).into()) };
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let room = sizes::room(to.handle(), to_offset.map(|offset| offset as u64), bytes)?;
    let copied = mount().copy((from.handle(), from_offset), (to.handle(), to_offset), room)?;
    for (address, offset) in [(from_address, from_offset), (to_address, to_offset)] {
        if let Some(offset) = offset.filter(|_| copied > 0) {
            memory::write_value(address, &(offset + copied as i64))?;
        }
    }
    Ok(copied as u64)
}

/// `sendfile`: copies the contents of a file to the position of the other descriptor.
pub fn sendfile(call: &Call) -> Answer {
    let [_, _, address, bytes, ..] = call.arguments;
    let offset = given(address)?;
    let from = Side::of(call.int(1))?;
    if !from.reads()? {
        return Err(Errno(libc::EBADF).into());
    }
    let kind = from.kind()?;
    let seekable = matches!(kind, libc::S_IFREG | libc::S_IFBLK);
    if offset.is_some() && matches!(kind, libc::S_IFIFO | libc::S_IFSOCK) {
        return Err(Errno(libc::ESPIPE).into());
    }
    let begin = match offset {
        Some(offset) => offset,
        None if seekable => from.position()?,
        None => 0,
    };
    if begin < 0 || i64::try_from(bytes).ok().and_then(|bytes| begin.checked_add(bytes)).is_none() {
        return Err(Errno(libc::EINVAL).into());
    }
    let to = Side::of(call.int(0))?;
    if !to.writes()? {
        return Err(Errno(libc::EBADF).into());
    }
    let is_empty = kind == libc::S_IFDIR && bytes == 0;
    if !(seekable || is_empty) || to.flags()? & libc::O_APPEND != 0 || to.kind()? == libc::S_IFDIR {
        return Err(Errno(libc::EINVAL).into());
    }
    if is_empty {
        // Linux asks no directory for bytes before it needs some.
        return Ok(0);
    }
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).min(memory::TRANSFER_BYTES_MAX);
    let sent = send(&from, begin, &to, bytes)?;
    let end = begin + sent as i64;
    match offset {
        Some(_) => memory::write_value(address, &end)?,
        None => from.set_position(end)?,
    }
    Ok(sent as u64)
}

/// Sends this number of bytes, or fewer at the end of the file.
fn send(from: &Side, begin: i64, to: &Side, bytes: usize) -> Result<usize, Errno> {
    let mut buffer = vec![0; bytes.min(PIECE_BYTES)];
    let mut sent = 0;
    while sent < bytes {
        let piece = buffer.len().min(bytes - sent);
        let moved = from.read_at(begin + sent as i64, &mut buffer[..piece]).and_then(|read| {
            let written = if read > 0 { to.write(&buffer[..read])? } else { 0 };
            Ok((read, written))
        });
        match moved {
            Ok((read, written)) => {
                sent += written;
                if read == 0 || written < read {
                    break;
                }
            }
            Err(errno) if sent == 0 => return Err(errno),
            Err(_) => break,
        }
    }
    Ok(sent)
}
