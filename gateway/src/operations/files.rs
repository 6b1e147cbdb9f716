//! Open files: open, contents, close.

use crate::abi::{
    Body, CopyFileRangeIn, CreateIn, FSYNC_DATA, FallocateIn, FlushIn, FsyncIn, InHeader, LseekIn,
    OPEN_DIRECT_IO, OPEN_KEEP_CACHE, OPEN_TO_EXECUTE, OpenIn, OpenOut, ReadIn, ReleaseIn, SizeOut,
    WRITE_FROM_CACHE, WriteIn,
};
use crate::callers::{caller, caller_of_file};
use crate::files::OpenFile;
use crate::gateway::{Answer, Gateway, name, node};
use crate::pages::{PAGE_BYTES, PageRange};
use crate::recalls::Repair;
use crate::reply::Reply;
use format::InodeNumber;
use format::record::{FILE_BYTES_MAX, FileType};
use ipc::sync::Ordering;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use vfs::copy::copy_pieces;
use vfs::engine::{
    Access, At, Attributes, Created, Extent, Handle, New, NewType, NewUnnamed, Sync, Target, Written,
};
use vfs::ranges::allocations;
use vfs::{Caller, Error, LeaseMode, access};

/// Limit of bytes that one message copies, because other messages wait meanwhile.
const COPY_BYTES_MAX: usize = 16 << 20;

fn has(flags: u32, flag: i32) -> bool {
    flags & flag as u32 != 0
}

/// The access that the flags of `open` request. The fourth access mode, which Linux has only for `ioctl`, requests
/// both.
pub(crate) fn access_of(flags: u32) -> Access {
    match (flags as i32) & libc::O_ACCMODE {
        libc::O_RDONLY => Access { read: true, write: false },
        libc::O_WRONLY => Access { read: false, write: true },
        _ => Access { read: true, write: true },
    }
}

/// Number of bytes of a write in its last page, if it does not fill that page. The kernel keeps this page locked until
/// the answer, unless the page was complete before; then it may have to be repaired, as all others.
fn bytes_in_last_part(start: u64, end: u64) -> usize {
    let page = (end - 1) / PAGE_BYTES * PAGE_BYTES;
    if start <= page && end.is_multiple_of(PAGE_BYTES) { 0 } else { (end - start.max(page)) as usize }
}

impl Gateway {
    /// Opens a file or directory. The kernel truncates it by a request of its own, after it has checked that the file is
    /// not being executed.
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
            self.engine.open(&caller, node(header), access_of(fields.flags), false)?
        };
        let is_writer = self.count_writer(handle, &attributes, access_of(fields.flags))?;
        // The file may be mapped. An open by a token waits for no creation where its name is looked up: it holds the
        // directory.
        self.wait_for_creations(attributes.inode);
        self.tell_end(handle, &attributes, reply);
        self.opened(handle, &attributes, (caller, is_writer), reply)
    }

    /// Opens a program to be executed. A user who may execute it need not be able to read it, because the kernel reads
    /// it for them. The file is opened first, so that the permissions are those of one instant.
    fn open_to_execute(&self, caller: &Caller, header: &InHeader) -> Result<(Handle, Attributes), Error> {
        let read = Access { read: true, write: false };
        let (handle, attributes) = self.engine.open(&Caller::ROOT, node(header), read, false)?;
        if let Err(error) = access::check(caller, &attributes, access::EXECUTE) {
            self.engine.close(handle);
            return Err(error);
        }
        Ok((handle, attributes))
    }

    /// Counts an open file that may write; returns whether it is one. Its unit is held for writing before the kernel
    /// knows that the file is open, because a page of a mapping becomes dirty without a message. The answer must not
    /// contain cacheable data before this call: a recall waits until such an answer was sent, and this call waits for a
    /// recall.
    pub(crate) fn count_writer(
        &self,
        handle: Handle,
        attributes: &Attributes,
        access: Access,
    ) -> Result<bool, Error> {
        let is_writer = self.caches && attributes.file_type == FileType::Regular && access.write;
        if is_writer {
            self.units.open_writer(attributes.inode).inspect_err(|_| self.engine.close(handle))?;
        }
        Ok(is_writer)
    }

    /// Completes an answer that opens a file. Pages in the kernel's cache are valid, because the kernel drops them with
    /// their lease.
    pub(crate) fn opened(
        &self,
        handle: Handle,
        attributes: &Attributes,
        (opener, is_writer): (Caller, bool),
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let inode = attributes.inode;
        let is_regular = attributes.file_type == FileType::Regular;
        self.files.add(OpenFile { handle, inode, opener, is_writer });
        self.nodes.opened(inode);
        let flags = match (is_regular, self.caches) {
            (true, true) => OPEN_KEEP_CACHE,
            (true, false) => OPEN_DIRECT_IO,
            (false, _) => 0,
        };
        reply.put(&OpenOut { handle: handle.get(), flags, unused: 0 });
        Ok(Answer::Ready)
    }

    /// Creates and opens atomically; if another process has just created the file, opens it. The kernel then considers
    /// the file new, and neither truncates it nor drops its pages.
    pub(crate) fn create(
        self: &Arc<Self>,
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
            umask: 0,
            exclusive: has(fields.flags, libc::O_EXCL),
        };
        let directory = self.stamp(node(header));
        let mut is_new = false;
        let (handle, attributes) = match self.engine.create(&caller, node(header), name, &new)? {
            Created::New(attributes, handle) => {
                is_new = true;
                (handle.expect("a file that is to be opened is opened"), attributes)
            }
            Created::Existing(found) => {
                let opened = if found.file_type == FileType::Regular {
                    self.engine.open(&caller, found.inode, access, has(fields.flags, libc::O_TRUNC))
                } else {
                    // The kernel repeats the lookup after this error, and finds the type of the file.
                    Err(Error::Stale)
                };
                opened.inspect_err(|_| self.engine.forget(&[found.inode]))?
            }
        };
        if has(fields.flags, libc::O_TRUNC) && !is_new {
            self.is_cut(attributes.inode, 0);
            if self.caches {
                self.repair(Repair::Moved { node: attributes.inode, from: 0, last: None });
            }
        }
        let is_writer = self
            .count_writer(handle, &attributes, access)
            .inspect_err(|_| self.engine.forget(&[attributes.inode]))?;
        let attributes = match is_new {
            true => attributes,
            false => self.attributes_for_creation(node(header), name.bytes(), (handle, attributes)),
        };
        if !is_new {
            // While a program of the mount extends the file, the kernel ignores the size in this answer too.
            self.tell_end(handle, &attributes, reply);
        }
        // The kernel would accept the attributes of an existing file even if it was told meanwhile to drop them.
        self.tell(&attributes, directory, is_new, reply);
        self.opened(handle, &attributes, (caller, is_writer), reply)
    }

    /// The attributes of an existing file, for an answer to CREATE.
    pub(crate) fn attributes_for_creation(
        &self,
        directory: InodeNumber,
        name: &[u8],
        (handle, before): (Handle, Attributes),
    ) -> Attributes {
        if self.caches {
            self.hold_size(directory, name, before.inode);
        }
        self.engine.getattr(Target::Open(handle)).unwrap_or(before)
    }

    /// Creates and opens a file without a name. The kernel refuses a later link to it if it was opened with `O_EXCL`.
    pub(crate) fn create_unnamed(
        self: &Arc<Self>,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: CreateIn = body.take()?;
        let (caller, access) = (caller(header), access_of(fields.flags));
        let linkable = !has(fields.flags, libc::O_EXCL);
        let new = NewUnnamed { access, mode: fields.mode & 0o7777, umask: 0, linkable };
        let (attributes, handle) = self.engine.create_unnamed(&caller, node(header), &new)?;
        let is_writer = self
            .count_writer(handle, &attributes, access)
            .inspect_err(|_| self.engine.forget(&[attributes.inode]))?;
        self.tell(&attributes, None, true, reply);
        self.opened(handle, &attributes, (caller, is_writer), reply)
    }

    pub(crate) fn read(
        &self,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: ReadIn = body.take()?;
        let handle = self.files.get(fields.handle)?.handle;
        if self.caches {
            let range = PageRange::of(fields.offset, fields.bytes.into());
            reply.stays(self.units.enter_read(node(header), range)?);
        }
        // Acquire: pairs with the Release of `give_up_pages`. A READ that entered its unit before is waited for there.
        if self.removing.load(Ordering::Acquire) != 0 {
            return Err(Error::Io);
        }
        let mut into = [IoSliceMut::new(reply.spare(fields.bytes as usize))];
        let bytes = self.engine.read(handle, fields.offset, &mut into)?;
        reply.extend(bytes);
        if bytes < fields.bytes as usize {
            self.ends.end_at(node(header), fields.offset + bytes as u64);
        }
        Ok(Answer::Ready)
    }

    /// The engine finds the end of a file that is opened for appending. The kernel does not know it, because programs
    /// may append through the library. Pages of a mapping have their own offset.
    pub(crate) fn write(
        &self,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: WriteIn = body.take()?;
        let file = self.files.get(fields.handle)?;
        let bytes = body.bytes(fields.bytes)?;
        let from = [IoSlice::new(bytes)];
        if fields.write_flags & WRITE_FROM_CACHE != 0 && self.caches {
            return self.write_back(&file, (fields.offset, &from), reply);
        }
        let appends = has(fields.flags, libc::O_APPEND) && fields.write_flags & WRITE_FROM_CACHE == 0;
        let at = if appends { At::End } else { At::Offset(fields.offset) };
        let caller = caller_of_file(header, &file.opener);
        if self.caches {
            reply.stays(self.units.enter_pages(file.inode, LeaseMode::Write)?);
        }
        let cuts = self.ends.cuts();
        let written = self.engine.write(&caller, file.handle, at, &from)?;
        if self.caches {
            if appends {
                self.units.append_ends(file.inode, fields.offset + written.bytes as u64);
            }
            // A repair waits for pages that a read may hold, and this read must not wait for the repair. Nor for the thread
            // that sent CREATE, which may wait for such a page.
            self.writes.served(file.inode, header.unique);
            self.wait_for_creations(file.inode);
            self.ends.known(file.inode, fields.offset + written.bytes as u64, cuts);
            self.repair_after(&file, fields.offset, (bytes, &written));
        }
        let bytes = u32::try_from(written.bytes).expect("no more is written than was given");
        reply.put(&SizeOut { bytes, unused: 0 });
        Ok(Answer::Ready)
    }

    /// Writes pages of a mapping back. The process that stored to them had the right to, independent of the file's
    /// present mode. They never extend the file: a file that was truncated meanwhile stays so.
    fn write_back(
        &self,
        file: &OpenFile,
        (offset, from): (u64, &[IoSlice<'_>]),
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        self.units.note_write_back(file.inode);
        self.engine.write(&Caller::ROOT, file.handle, At::Within(offset), from)?;
        let bytes = u32::try_from(from.iter().map(|slice| slice.len()).sum::<usize>());
        reply.put(&SizeOut { bytes: bytes.expect("a message is short"), unused: 0 });
        Ok(Answer::Ready)
    }

    /// The kernel put the bytes of a write into its pages before it sent the WRITE. The pages differ from the engine's
    /// data if the end of the file was at another offset than the kernel expected, or if the kernel dropped pages
    /// meanwhile and read one of them again before the write took effect.
    fn repair_after(&self, file: &OpenFile, offset: u64, (bytes, written): (&[u8], &Written)) {
        let Some(bytes) = bytes.get(..written.bytes) else { return };
        let Some(&last) = bytes.last() else { return };
        let start = written.end - written.bytes as u64;
        let node = file.inode;
        if start != offset {
            let from = start.min(offset);
            let last = (start > offset).then(|| (written.end - 1, last));
            self.repair(Repair::Moved { node, from: from - from % PAGE_BYTES, last });
        } else if let Some(read) = self.units.read_before_write(node) {
            let (whole, rest) = bytes.split_at(bytes.len() - bytes_in_last_part(start, written.end));
            for (bytes, may_be_locked) in [(whole, false), (rest, true)] {
                let offset = if may_be_locked { written.end - bytes.len() as u64 } else { start };
                if !bytes.is_empty() && read.overlaps(PageRange::of(offset, bytes.len() as u64)) {
                    self.repair(Repair::Overtaken { node, offset, bytes: bytes.to_vec(), may_be_locked });
                }
            }
        }
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
        self.wait_for_creations(file.inode);
        Ok(Answer::Ready)
    }

    /// Copies within the engine. Copies less than requested if the whole would take long; programs then repeat the
    /// call.
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
        self.wait_for_creations(to.inode);
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

    /// A descriptor was closed: its owner has no `fcntl` locks on the file any more.
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
