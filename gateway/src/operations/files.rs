//! Open files: opening, contents, closing.

use crate::abi::{
    Body, CopyFileRangeIn, CreateIn, FSYNC_DATA, FallocateIn, FlushIn, FsyncIn, InHeader, LseekIn,
    OPEN_DIRECT_IO, OPEN_TO_EXECUTE, OpenIn, OpenOut, ReadIn, ReleaseIn, Reply, SizeOut, WRITE_FROM_CACHE,
    WriteIn,
};
use crate::callers::{caller, caller_of_file};
use crate::files::OpenFile;
use crate::gateway::{Answer, Gateway, name, node};
use format::record::{FILE_BYTES_MAX, FileType};
use std::io::{IoSlice, IoSliceMut};
use vfs::copy::copy_pieces;
use vfs::engine::{Access, At, Attributes, Created, Extent, Handle, New, NewType, Sync};
use vfs::ranges::allocations;
use vfs::{Caller, Error, access};

/// Bytes that one message copies at most: others wait meanwhile.
const COPY_BYTES_MAX: usize = 16 << 20;

fn has(flags: u32, flag: i32) -> bool {
    flags & flag as u32 != 0
}

/// What flags of `open` ask for. The fourth access mode, which Linux has for `ioctl` only, asks for both.
pub(crate) fn access_of(flags: u32) -> Access {
    match (flags as i32) & libc::O_ACCMODE {
        libc::O_RDONLY => Access { read: true, write: false },
        libc::O_WRONLY => Access { read: false, write: true },
        _ => Access { read: true, write: true },
    }
}

impl Gateway {
    /// Opens a file or directory.
    pub(crate) fn open(
        &self,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: OpenIn = body.take()?;
        let caller = caller(header);
        let (handle, attributes) = if fields.flags & OPEN_TO_EXECUTE != 0 {
            self.open_to_execute(&caller, header)?
        } else {
            let truncate = has(fields.flags, libc::O_TRUNC);
            self.engine.open(&caller, node(header), access_of(fields.flags), truncate)?
        };
        self.opened(handle, &attributes, caller, reply);
        Ok(Answer::Ready)
    }

    /// A program may be run by who may execute it, even if he may not read it: the kernel reads it for him. Opening
    /// comes first, so that permissions are those of one instant.
    fn open_to_execute(&self, caller: &Caller, header: &InHeader) -> Result<(Handle, Attributes), Error> {
        let read = Access { read: true, write: false };
        let (handle, attributes) = self.engine.open(&Caller::ROOT, node(header), read, false)?;
        if let Err(error) = access::check(caller, &attributes, access::EXECUTE) {
            self.engine.close(handle);
            return Err(error);
        }
        Ok((handle, attributes))
    }

    pub(crate) fn opened(&self, handle: Handle, attributes: &Attributes, opener: Caller, reply: &mut Reply) {
        self.files.add(OpenFile { handle, inode: attributes.inode, opener });
        let direct = attributes.file_type == FileType::Regular;
        let flags = if direct { OPEN_DIRECT_IO } else { 0 };
        reply.put(&OpenOut { handle: handle.get(), flags, unused: 0 });
    }

    /// Creates and opens in one instant; what somebody else has just made is opened.
    pub(crate) fn create(
        &self,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: CreateIn = body.take()?;
        let name = name(body.string()?)?;
        let caller = caller(header);
        let access = access_of(fields.flags);
        let new = New {
            kind: NewType::Regular(Some(access)),
            mode: fields.mode & 0o7777,
            exclusive: has(fields.flags, libc::O_EXCL),
        };
        let (handle, attributes) = match self.engine.create(&caller, node(header), name, &new)? {
            Created::New(attributes, handle) => {
                (handle.expect("a file that is to be opened is opened"), attributes)
            }
            Created::Existing(found) => {
                let opened = if found.file_type == FileType::Regular {
                    self.engine.open(&caller, found.inode, access, has(fields.flags, libc::O_TRUNC))
                } else {
                    // Makes the kernel walk once more, and find what it is.
                    Err(Error::Stale)
                };
                opened.inspect_err(|_| self.engine.forget(&[found.inode]))?
            }
        };
        self.tell(&attributes, reply);
        self.opened(handle, &attributes, caller, reply);
        Ok(Answer::Ready)
    }

    pub(crate) fn read(&self, body: &mut Body<'_>, reply: &mut Reply) -> Result<Answer, Error> {
        let fields: ReadIn = body.take()?;
        let handle = self.files.get(fields.handle)?.handle;
        let mut into = [IoSliceMut::new(reply.spare(fields.bytes as usize))];
        let bytes = self.engine.read(handle, fields.offset, &mut into)?;
        reply.extend(bytes);
        Ok(Answer::Ready)
    }

    /// Where a file opened for appending ends is for the engine to find, not for the kernel, which does not see what
    /// others append through the other door; but pages of a mapping have their place.
    pub(crate) fn write(
        &self,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: WriteIn = body.take()?;
        let file = self.files.get(fields.handle)?;
        let bytes = body.bytes(fields.bytes)?;
        let mapped = fields.write_flags & WRITE_FROM_CACHE != 0;
        let appends = has(fields.flags, libc::O_APPEND) && !mapped;
        let at = if appends { At::End } else { At::Offset(fields.offset) };
        let caller = caller_of_file(header, &file.opener);
        let written = self.engine.write(&caller, file.handle, at, &[IoSlice::new(bytes)])?;
        let bytes = u32::try_from(written.bytes).expect("no more is written than was given");
        reply.put(&SizeOut { bytes, unused: 0 });
        Ok(Answer::Ready)
    }

    pub(crate) fn fallocate(&self, header: &InHeader, body: &mut Body<'_>) -> Result<Answer, Error> {
        let fields: FallocateIn = body.take()?;
        let operations = allocations(fields.mode).ok_or(Error::NotSupported)?;
        if fields.bytes == 0 {
            return Err(Error::Invalid);
        }
        let end = fields.offset.checked_add(fields.bytes);
        if end.is_none_or(|end| end > FILE_BYTES_MAX) {
            return Err(Error::FileTooBig);
        }
        let file = self.files.get(fields.handle)?;
        let caller = caller_of_file(header, &file.opener);
        for what in operations {
            self.engine.allocate(&caller, file.handle, *what, fields.offset, fields.bytes)?;
        }
        Ok(Answer::Ready)
    }

    /// Copies within the engine, less than asked if that would take long: programs ask on.
    pub(crate) fn copy_file_range(
        &self,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: CopyFileRangeIn = body.take()?;
        let (from, to) = (self.files.get(fields.from_handle)?, self.files.get(fields.to_handle)?);
        let bytes = usize::try_from(fields.bytes).map_or(COPY_BYTES_MAX, |bytes| bytes.min(COPY_BYTES_MAX));
        let caller = caller_of_file(header, &to.opener);
        let copied = copy_pieces(
            bytes,
            |at, into| self.engine.read(from.handle, fields.from_offset + at, &mut [IoSliceMut::new(into)]),
            |at, bytes| {
                let at = At::Offset(fields.to_offset + at);
                Ok(self.engine.write(&caller, to.handle, at, &[IoSlice::new(bytes)])?.bytes)
            },
        )?;
        let bytes = u32::try_from(copied).expect("no more is copied than was asked for");
        reply.put(&SizeOut { bytes, unused: 0 });
        Ok(Answer::Ready)
    }

    pub(crate) fn lseek(&self, body: &mut Body<'_>, reply: &mut Reply) -> Result<Answer, Error> {
        let fields: LseekIn = body.take()?;
        let what = match fields.whence {
            libc::SEEK_DATA => Extent::Data,
            libc::SEEK_HOLE => Extent::Hole,
            _ => return Err(Error::Invalid),
        };
        let handle = self.files.get(fields.handle)?.handle;
        reply.put(&self.engine.extents(handle, fields.offset, what)?);
        Ok(Answer::Ready)
    }

    pub(crate) fn fsync(&self, header: &InHeader, body: &mut Body<'_>) -> Result<Answer, Error> {
        let fields: FsyncIn = body.take()?;
        let inode = node(header);
        let data = fields.flags & FSYNC_DATA != 0;
        self.engine.sync(if data { Sync::Data(inode) } else { Sync::File(inode) })?;
        Ok(Answer::Ready)
    }

    /// A descriptor was closed: whose it was has no `fcntl` locks on the file any more.
    pub(crate) fn flush(&self, body: &mut Body<'_>) -> Result<Answer, Error> {
        let fields: FlushIn = body.take()?;
        let file = self.files.get(fields.handle)?;
        if let Some(owner) = self.files.closed_by(&file, fields.lock_owner) {
            self.engine.release(owner, Some(file.inode));
        }
        Ok(Answer::Ready)
    }

    pub(crate) fn release(&self, body: &mut Body<'_>) -> Result<Answer, Error> {
        let fields: ReleaseIn = body.take()?;
        self.close(fields.handle);
        Ok(Answer::Ready)
    }
}
