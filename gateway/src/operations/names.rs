//! Names: lookup, creation, removal, renaming. The kernel has already applied the umask, after it judged the set-group-id
//! bit by the mode before (Linux 6.0 and later; earlier kernels judge by the mode after it, on all file systems).

use crate::abi::{BatchForgetIn, Body, ForgetOne, InHeader, MkdirIn, MknodIn, Rename2In};
use crate::callers::caller;
use crate::gateway::{Answer, Gateway, name, node};
use crate::reply::Reply;
use format::InodeNumber;
use format::record::{FileType, SYMLINK_BYTES_MAX};
use std::sync::Arc;
use vfs::engine::{Access, Attributes, Created, New, NewType, Removal, RenameMode, Step};
use vfs::{Caller, Error};

/// Limit of repeated lookups for one message: the inode that was found may be removed each time.
const STEPS_MAX: u32 = 1000;

impl Gateway {
    /// One step of a path. `.` and `..` come from programs that open files by handle.
    pub(crate) fn lookup(
        self: &Arc<Self>,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let (mut directory, retries) = (None, self.retries.has(header.pid));
        let attributes = match body.string()? {
            b"." => self.step(header, &[])?,
            b".." => self.step(header, &[Step::Parent])?,
            child => {
                let child = name(child)?;
                directory = self.stamp(node(header)).filter(|_| !retries);
                let steps = [Step::Child(child)];
                let met =
                    if retries { self.step_and_keep(header, &steps) } else { self.step(header, &steps) };
                match met {
                    Err(Error::NotFound) if directory.is_some() => return self.tell_absent(directory, reply),
                    met => met?,
                }
            }
        };
        // The parent of the root is the root.
        let attributes = attributes.map_or_else(|| self.engine.root(), Ok)?;
        self.tell(&attributes, directory, true, reply);
        if retries {
            // The inode was opened.
            self.nodes.opened(attributes.inode);
            self.nodes.closed(attributes.inode);
        }
        Ok(Answer::Ready)
    }

    fn step(&self, header: &InHeader, steps: &[Step<'_>]) -> Result<Option<Attributes>, Error> {
        let mut found = Vec::with_capacity(1);
        self.engine.walk(&caller(header), node(header), steps, &mut found)?;
        Ok(found.pop())
    }

    /// The same for a thread whose call met a removed inode: the inode found now is kept open until its next call.
    fn step_and_keep(&self, header: &InHeader, steps: &[Step<'_>]) -> Result<Option<Attributes>, Error> {
        for _ in 0..STEPS_MAX {
            let Some(found) = self.step(header, steps)? else { return Ok(None) };
            match self.engine.open(&Caller::ROOT, found.inode, Access::default(), false) {
                Ok((handle, attributes)) => {
                    if let Some(before) = self.retries.keep(header.pid, handle) {
                        self.engine.close(before);
                    }
                    return Ok(Some(attributes));
                }
                // The inode was removed again.
                Err(Error::Stale | Error::NotFound) => self.engine.forget(&[found.inode]),
                // The mount has no room for another open file.
                Err(_) => return Ok(Some(found)),
            }
        }
        Err(Error::Stale)
    }

    pub(crate) fn forget(&self, header: &InHeader, body: &mut Body<'_>) -> Result<Answer, Error> {
        self.forget_node(node(header), body.take::<u64>()?);
        Ok(Answer::None)
    }

    pub(crate) fn batch_forget(&self, body: &mut Body<'_>) -> Result<Answer, Error> {
        let batch: BatchForgetIn = body.take()?;
        for _ in 0..batch.count {
            let one: ForgetOne = body.take()?;
            self.forget_node(InodeNumber::new(one.node), one.lookups);
        }
        Ok(Answer::None)
    }

    fn forget_node(&self, node: InodeNumber, lookups: u64) {
        if self.nodes.forget(&*self.engine, node, lookups) && self.caches {
            self.ends.end_at(node, 0);
            self.units.forget(&self.nodes, node);
        }
    }

    pub(crate) fn symlink(
        self: &Arc<Self>,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let (name, target) = (body.string()?, body.string()?);
        match target.len() {
            0 => Err(Error::NotFound),
            1..=SYMLINK_BYTES_MAX => self.make(header, name, NewType::Symlink(target), 0o777, reply),
            _ => Err(Error::NameTooLong),
        }
    }

    pub(crate) fn mknod(
        self: &Arc<Self>,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: MknodIn = body.take()?;
        // The kernel's 32 bits of a device number are the low half of `dev_t`.
        let device = u64::from(fields.rdev);
        let kind = match FileType::of_mode(fields.mode) {
            Some(FileType::Regular) => NewType::Regular(None),
            Some(FileType::Fifo) => NewType::Fifo,
            Some(FileType::Socket) => NewType::Socket,
            Some(FileType::CharacterDevice) => NewType::CharacterDevice(device),
            Some(FileType::BlockDevice) => NewType::BlockDevice(device),
            Some(FileType::Directory | FileType::Symlink) | None => return Err(Error::Invalid),
        };
        self.make(header, body.string()?, kind, fields.mode, reply)
    }

    pub(crate) fn mkdir(
        self: &Arc<Self>,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: MkdirIn = body.take()?;
        self.make(header, body.string()?, NewType::Directory, fields.mode, reply)
    }

    fn make(
        self: &Arc<Self>,
        header: &InHeader,
        bytes: &[u8],
        kind: NewType<'_>,
        mode: u32,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let new = New { kind, mode: mode & 0o7777, umask: 0, exclusive: true };
        let directory = self.stamp(node(header));
        match self.engine.create(&caller(header), node(header), name(bytes)?, &new)? {
            Created::New(attributes, _) => {
                self.tell(&attributes, directory, true, reply);
                Ok(Answer::Ready)
            }
            Created::Existing(_) => unreachable!("it was to be new: an engine answers `Exists`"),
        }
    }

    pub(crate) fn link(
        self: &Arc<Self>,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let inode = InodeNumber::new(body.take::<u64>()?);
        let name = name(body.string()?)?;
        let directory = self.stamp(node(header));
        let attributes = self.engine.link(&caller(header), inode, node(header), name)?;
        self.tell(&attributes, directory, false, reply);
        Ok(Answer::Ready)
    }

    pub(crate) fn unlink(
        &self,
        header: &InHeader,
        body: &mut Body<'_>,
        removal: Removal,
    ) -> Result<Answer, Error> {
        self.engine.unlink(&caller(header), node(header), name(body.string()?)?, removal)?;
        self.list_own_orphans();
        Ok(Answer::Ready)
    }

    pub(crate) fn rename(
        &self,
        header: &InHeader,
        body: &mut Body<'_>,
        has_flags: bool,
    ) -> Result<Answer, Error> {
        let (to, flags) = if has_flags {
            let fields: Rename2In = body.take()?;
            (fields.to, fields.flags)
        } else {
            (body.take::<u64>()?, 0)
        };
        let mode = RenameMode::of_flags(flags)?;
        let (old, new) = (name(body.string()?)?, name(body.string()?)?);
        self.engine.rename(&caller(header), (node(header), old), (InodeNumber::new(to), new), mode)?;
        self.list_own_orphans();
        Ok(Answer::Ready)
    }

    pub(crate) fn readlink(&self, header: &InHeader, reply: &mut Reply) -> Result<Answer, Error> {
        reply.put_bytes(&self.engine.readlink(node(header))?);
        Ok(Answer::Ready)
    }
}
