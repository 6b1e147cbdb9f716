//! Contents of files: reading, writing, offsets, sizes, durability.

use super::{Vfs, failed};
use crate::copy::copy_pieces;
use crate::engine::{At, Changes, Engine, Extent, Handle, Sync, Target};
use crate::error::Error;
use crate::file::File;
use crate::path::Outcome;
use crate::ranges::allocations;
use crate::vfs::Subject;
use format::record::{FILE_BYTES_MAX, FileType};
use libc::c_int;
use std::io::{IoSlice, IoSliceMut};

/// Largest number of bytes that one call reads or writes, as in Linux: 2 GiB less a page.
pub const IO_BYTES_MAX: usize = 0x7fff_f000;

/// Supported flags of `preadv2` and `pwritev2`. The last three request what holds anyway, or higher speed.
const IO_FLAGS: c_int = libc::RWF_APPEND
    | libc::RWF_NOAPPEND
    | libc::RWF_DSYNC
    | libc::RWF_SYNC
    | libc::RWF_NOWAIT
    | libc::RWF_HIPRI;

/// Modes of `fallocate` that only Linux supports: their other errors are detected first.
const LINUX_ALLOCATES: [c_int; 4] = [
    libc::FALLOC_FL_COLLAPSE_RANGE,
    libc::FALLOC_FL_INSERT_RANGE,
    libc::FALLOC_FL_UNSHARE_RANGE,
    libc::FALLOC_FL_UNSHARE_RANGE | libc::FALLOC_FL_KEEP_SIZE,
];

impl<E: Engine> Vfs<E> {
    /// `read`, `readv`: reads at the offset, which moves.
    ///
    /// # Errors
    /// `BadDescriptor`, `IsDirectory`; those of [`Engine::read`].
    pub fn read(&self, file: &File, into: &mut [IoSliceMut<'_>]) -> Result<usize, Error> {
        let handle = file.readable()?;
        let asked = into.iter().map(|slice| slice.len()).sum();
        file.with_offset(|offset| {
            let start = start_of(offset.cast_signed(), asked)?;
            refuse_directory(file)?;
            let bytes = self.read_at(handle, start, into)?;
            *offset += bytes as u64;
            Ok(bytes)
        })
    }

    /// `pread`, `preadv`, `preadv2`. (With the offset -1 the latter is [`Vfs::read`].)
    ///
    /// # Errors
    /// `Invalid` for a negative offset, `NotSupported` for flags; as [`Vfs::read`].
    pub fn pread(
        &self,
        file: &File,
        offset: i64,
        into: &mut [IoSliceMut<'_>],
        flags: c_int,
    ) -> Result<usize, Error> {
        let handle = file.readable()?;
        if flags & !IO_FLAGS != 0 || flags & libc::RWF_APPEND != 0 {
            return Err(Error::NotSupported);
        }
        let all = into.iter().map(|slice| slice.len()).sum();
        let start = start_of(offset, all)?;
        refuse_directory(file)?;
        self.read_at(handle, start, into)
    }

    /// `write`, `writev`: writes at the offset, or with `O_APPEND` at the end; the offset moves behind the written
    /// bytes.
    ///
    /// # Errors
    /// `BadDescriptor`; `Invalid` if the range ends beyond the largest offset; those of [`Engine::write`].
    #[inline]
    pub fn write(&self, file: &File, from: &[IoSlice<'_>]) -> Result<usize, Error> {
        self.write_with(file, from, 0)
    }

    /// `pwritev2` with the offset -1: [`Vfs::write`] with the flags of that call.
    ///
    /// # Errors
    /// `NotSupported` for flags; as [`Vfs::write`].
    #[inline]
    pub fn write_with(&self, file: &File, from: &[IoSlice<'_>], flags: c_int) -> Result<usize, Error> {
        let handle = file.writable()?;
        if flags & !IO_FLAGS != 0 {
            return Err(Error::NotSupported);
        }
        let asked = from.iter().map(|slice| slice.len()).sum();
        file.with_offset(|offset| {
            let (status, start) = (file.flags(), start_of(offset.cast_signed(), asked)?);
            let at = if appends(status, flags) { At::End } else { At::Offset(start) };
            let (bytes, end) = self.write_at((file, handle), at, from, (status, flags))?;
            if bytes > 0 {
                *offset = end;
            }
            Ok(bytes)
        })
    }

    /// `pwrite`, `pwritev`, `pwritev2`. With `O_APPEND` they write at the end nonetheless, as in Linux, unless the flags have
    /// `RWF_NOAPPEND`.
    ///
    /// # Errors
    /// `Invalid` for a negative offset, `NotSupported` for flags; as [`Vfs::write`].
    pub fn pwrite(
        &self,
        file: &File,
        offset: i64,
        from: &[IoSlice<'_>],
        flags: c_int,
    ) -> Result<usize, Error> {
        let handle = file.writable()?;
        let offset = start_of(offset, from.iter().map(|slice| slice.len()).sum())?;
        if flags & !IO_FLAGS != 0 {
            return Err(Error::NotSupported);
        }
        let status = file.flags();
        let at = if appends(status, flags) { At::End } else { At::Offset(offset) };
        self.write_at((file, handle), at, from, (status, flags)).map(|(bytes, _)| bytes)
    }

    /// `lseek`
    ///
    /// # Errors
    /// `Invalid`; `NoDevice` if there is no data or hole.
    pub fn lseek(&self, file: &File, by: i64, whence: c_int) -> Result<u64, Error> {
        let handle = file.handle()?;
        let directory = file.file_type == FileType::Directory;
        file.with_offset(|offset| {
            let new = match whence {
                libc::SEEK_SET => Some(by),
                libc::SEEK_CUR => by.checked_add(*offset as i64),
                _ if directory => return Err(Error::Invalid),
                libc::SEEK_END => by.checked_add(self.engine.getattr(Target::Open(handle))?.size as i64),
                libc::SEEK_DATA | libc::SEEK_HOLE => {
                    let start = u64::try_from(by).map_err(|_| Error::NoDevice)?;
                    let what = if whence == libc::SEEK_DATA { Extent::Data } else { Extent::Hole };
                    Some(self.engine.extents(handle, start, what)? as i64)
                }
                _ => return Err(Error::Invalid),
            };
            *offset = new.and_then(|new| u64::try_from(new).ok()).ok_or(Error::Invalid)?;
            Ok(*offset)
        })
    }

    /// `truncate`
    ///
    /// # Errors
    /// `Invalid` for a negative length; those of paths and of [`Engine::setattr`].
    pub fn truncate(&self, subject: Subject<'_>, size: i64) -> Outcome<()> {
        let Ok(size) = u64::try_from(size) else { return failed(Error::Invalid) };
        self.subject(subject, |caller, node| {
            let changes = Changes { size: Some(size), ..Changes::default() };
            self.engine.setattr(caller, Target::Node(node), &changes)?;
            Ok(())
        })
    }

    /// `ftruncate`
    ///
    /// # Errors
    /// `BadDescriptor`; `Invalid` for a negative length, or a file that is not open for writing.
    pub fn ftruncate(&self, file: &File, size: i64) -> Result<(), Error> {
        let size = u64::try_from(size).map_err(|_| Error::Invalid)?;
        let handle = file.handle()?;
        if file.file_type != FileType::Regular || !file.access.write {
            return Err(Error::Invalid);
        }
        let changes = Changes { size: Some(size), ..Changes::default() };
        self.engine.setattr(&self.caller(), Target::Open(handle), &changes)?;
        Ok(())
    }

    /// `fallocate` with the modes of [`allocations`]; each operation of a mode takes effect by itself.
    ///
    /// # Errors
    /// `Invalid`, `NotSupported`, `BadDescriptor`, `FileTooBig`; those of [`Engine::allocate`].
    pub fn fallocate(&self, file: &File, mode: c_int, offset: i64, bytes: i64) -> Result<(), Error> {
        file.handle()?;
        let (Ok(offset), Ok(bytes @ 1..)) = (u64::try_from(offset), u64::try_from(bytes)) else {
            return Err(Error::Invalid);
        };
        let operations = allocations(mode);
        if operations.is_none() && !LINUX_ALLOCATES.contains(&mode) {
            return Err(Error::NotSupported);
        }
        let handle = file.writable()?;
        if offset + bytes > FILE_BYTES_MAX {
            return Err(Error::FileTooBig);
        }
        let (operations, caller) = (operations.ok_or(Error::NotSupported)?, self.caller());
        operations.iter().try_for_each(|what| self.engine.allocate(&caller, handle, *what, offset, bytes))
    }

    /// `fsync`, of a file or a directory.
    ///
    /// # Errors
    /// Those of [`Engine::sync`].
    pub fn fsync(&self, file: &File) -> Result<(), Error> {
        file.handle()?;
        self.engine.sync(Sync::File(file.inode))
    }

    /// `fdatasync`
    ///
    /// # Errors
    /// Those of [`Engine::sync`].
    pub fn fdatasync(&self, file: &File) -> Result<(), Error> {
        file.handle()?;
        self.engine.sync(Sync::Data(file.inode))
    }

    /// The part of `fsync` that is left for a file whose contents another engine has synced: this process's changes.
    ///
    /// # Errors
    /// Those of [`Engine::sync`].
    pub fn sync_own_beside(&self, file: &File) -> Result<(), Error> {
        file.handle()?;
        self.engine.sync(Sync::OwnBeside(file.inode))
    }

    /// `sync_file_range`: does the same as `fdatasync` for every range, which is more than the call demands.
    ///
    /// # Errors
    /// `Invalid` for unknown flags or an impossible range; those of [`Engine::sync`].
    pub fn sync_file_range(&self, file: &File, offset: i64, bytes: i64, flags: u32) -> Result<(), Error> {
        const KNOWN: u32 = libc::SYNC_FILE_RANGE_WAIT_BEFORE
            | libc::SYNC_FILE_RANGE_WRITE
            | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        file.handle()?;
        if flags & !KNOWN != 0 || offset < 0 || bytes < 0 || offset.checked_add(bytes).is_none() {
            return Err(Error::Invalid);
        }
        if flags == 0 { Ok(()) } else { self.fdatasync(file) }
    }

    /// `copy_file_range`: copies up to `bytes`, as far as the source extends. Each file is accessed at the given
    /// offset or, without one, at its own, which then moves.
    ///
    /// # Errors
    /// In this order: `IsDirectory`, `Invalid` for an inode that is no file, `BadDescriptor` (also for a target
    /// with `O_APPEND`), `Overflow`, `FileTooBig` for a target at the largest offset,
    /// `Invalid` for overlapping ranges of one file and for a negative offset; those
    /// of reading and writing, if nothing was copied.
    pub fn copy(
        &self,
        (from, from_offset): (&File, Option<i64>),
        (to, to_offset): (&File, Option<i64>),
        bytes: usize,
    ) -> Result<usize, Error> {
        // A description with `O_PATH` is no open file, whatever its inode is.
        let (source, target) = (from.handle()?, to.handle()?);
        if [from, to].iter().any(|file| file.file_type == FileType::Directory) {
            return Err(Error::IsDirectory);
        }
        if !from.access.read || !to.access.write || to.flags() & libc::O_APPEND != 0 {
            return Err(Error::BadDescriptor);
        }
        let start = from_offset.unwrap_or_else(|| from.with_offset(|offset| *offset as i64));
        let end = to_offset.unwrap_or_else(|| to.with_offset(|offset| *offset as i64));
        // Linux treats the offset as unsigned here: a negative one is too large.
        if [start, end].iter().any(|offset| (*offset as u64).checked_add(bytes as u64).is_none()) {
            return Err(Error::Overflow);
        }
        let size = self.engine.getattr(Target::Open(source))?.size;
        let left = i64::try_from(size).unwrap_or(i64::MAX).saturating_sub(start).max(0);
        if u64::try_from(end).is_ok_and(|end| end >= FILE_BYTES_MAX) {
            return Err(Error::FileTooBig);
        }
        let bytes = bytes.min(IO_BYTES_MAX).min(usize::try_from(left).unwrap_or(usize::MAX));
        if from.inode == to.inode && start.abs_diff(end) < bytes as u64 {
            return Err(Error::Invalid);
        }
        let (start, end) = (start_of(start, 0)?, start_of(end, 0)?);
        let status = (to.flags(), 0);
        let copied = copy_pieces(
            bytes,
            |at, into| self.engine.read(source, start + at, &mut [IoSliceMut::new(into)]),
            |at, bytes| {
                let (written, _) =
                    self.write_at((to, target), At::Offset(end + at), &[IoSlice::new(bytes)], status)?;
                Ok(written)
            },
        )?;
        if from_offset.is_none() {
            from.with_offset(|offset| *offset = start + copied as u64);
        }
        if to_offset.is_none() {
            to.with_offset(|offset| *offset = end + copied as u64);
        }
        Ok(copied)
    }

    fn read_at(&self, handle: Handle, offset: u64, into: &mut [IoSliceMut<'_>]) -> Result<usize, Error> {
        let asked: usize = into.iter().map(|slice| slice.len()).sum();
        if asked <= IO_BYTES_MAX {
            return self.engine.read(handle, offset, into);
        }
        let mut left = IO_BYTES_MAX;
        let mut cut = Vec::with_capacity(into.len());
        for slice in into {
            let count = slice.len().min(left);
            left -= count;
            cut.push(IoSliceMut::new(&mut slice[..count]));
        }
        self.engine.read(handle, offset, &mut cut)
    }

    /// Writes, and makes the bytes durable if the file's status flags or the call's own flags demand that.
    #[inline]
    fn write_at(
        &self,
        (file, handle): (&File, Handle),
        at: At,
        from: &[IoSlice<'_>],
        (status, flags): (c_int, c_int),
    ) -> Result<(usize, u64), Error> {
        let asked = match from {
            [slice] => slice.len(),
            slices => slices.iter().map(|slice| slice.len()).sum(),
        };
        let cut;
        let from = if asked <= IO_BYTES_MAX {
            from
        } else {
            cut = first_of(from, IO_BYTES_MAX);
            &cut
        };
        let written = self.with_caller(|caller| self.engine.write(caller, handle, at, from))?;
        let all = status & libc::O_SYNC == libc::O_SYNC || flags & libc::RWF_SYNC != 0;
        let data = status & libc::O_DSYNC != 0 || flags & libc::RWF_DSYNC != 0;
        if written.bytes > 0 && (all || data) {
            self.engine.sync(if all { Sync::File(file.inode) } else { Sync::Data(file.inode) })?;
        }
        Ok((written.bytes, written.end))
    }
}

/// Whether a write with these flags, to a file with these status flags, appends.
fn appends(status: c_int, flags: c_int) -> bool {
    flags & libc::RWF_NOAPPEND == 0 && (status & libc::O_APPEND != 0 || flags & libc::RWF_APPEND != 0)
}

fn refuse_directory(file: &File) -> Result<(), Error> {
    if file.file_type == FileType::Directory { Err(Error::IsDirectory) } else { Ok(()) }
}

/// Where a range of so many bytes begins; it may not end beyond the largest offset.
fn start_of(offset: i64, bytes: usize) -> Result<u64, Error> {
    let start = u64::try_from(offset).map_err(|_| Error::Invalid)?;
    let ends = i64::try_from(bytes).is_ok_and(|bytes| offset.checked_add(bytes).is_some());
    if ends { Ok(start) } else { Err(Error::Invalid) }
}

/// The first `left` bytes of the slices.
#[cold]
fn first_of<'a>(from: &'a [IoSlice<'_>], mut left: usize) -> Vec<IoSlice<'a>> {
    from.iter()
        .map(|slice| {
            let count = slice.len().min(left);
            left -= count;
            IoSlice::new(&slice[..count])
        })
        .collect()
}
