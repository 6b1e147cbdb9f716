//! Reading and changing attributes.

use crate::abi::{
    AccessIn, Attr, Body, GETATTR_HANDLE, GetattrIn, InHeader, SetattrIn, StatfsOut, StatxOut, StatxTime,
    fattr,
};
use crate::callers::caller;
use crate::files::OpenFile;
use crate::gateway::{Answer, Gateway, node};
use crate::reply::Reply;
use format::name::NAME_BYTES_MAX;
use format::record::FileType;
use std::sync::Arc;
use vfs::engine::{Attributes, Changes, SetTime, Target};
use vfs::{Error, LeaseMode, access};

const NS: i64 = 1_000_000_000;

/// The preferred IO size that `stat` reports.
pub(crate) const BLOCK_BYTES: u32 = 4096;

fn parts(time_ns: i64) -> (i64, u32) {
    (time_ns.div_euclid(NS), time_ns.rem_euclid(NS) as u32)
}

/// Converts a time of the kernel's. Times beyond the 584 years that nanoseconds can represent are clamped.
fn joined(seconds: i64, ns: u32) -> SetTime {
    SetTime::To(seconds.saturating_mul(NS).saturating_add(ns.into()))
}

/// Attributes in the layout of the kernel.
pub(crate) fn attr(attributes: &Attributes) -> Attr {
    let (atime, atime_ns) = parts(attributes.atime_ns);
    let (mtime, mtime_ns) = parts(attributes.mtime_ns);
    let (ctime, ctime_ns) = parts(attributes.ctime_ns);
    Attr {
        inode: attributes.inode.get(),
        size: attributes.size,
        blocks: attributes.blocks,
        atime,
        mtime,
        ctime,
        atime_ns,
        mtime_ns,
        ctime_ns,
        mode: attributes.file_type.mode_bits() | attributes.mode,
        links: attributes.links,
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: attributes.rdev as u32,
        block_bytes: BLOCK_BYTES,
        flags: 0,
    }
}

impl Gateway {
    pub(crate) fn getattr(
        &self,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: GetattrIn = body.take()?;
        let node = node(header);
        let mut stamp = self.stamp(node);
        let mut attributes = self.engine.getattr(Target::Node(node))?;
        if let Some(file) = self.file_to_tell_end(&fields, &attributes)? {
            // The attributes are read again, under a lease that is held until the answer was sent.
            reply.stays(self.units.enter_pages(node, LeaseMode::Read)?);
            stamp = self.stamp(node);
            attributes = self.engine.getattr(Target::Node(node))?;
            let stored = self.store_end(node, file.handle, attributes.size);
            // Another file than that of the call may be closed meanwhile.
            if fields.flags & GETATTR_HANDLE != 0 {
                stored?;
            }
        }
        Ok(self.tell_attributes(&attributes, stamp, reply))
    }

    /// The open file by which the kernel is to be told the end of a file before it gets the size: that of the call which asks for
    /// the end, or any, since a program may map the file up to the size that it is told.
    fn file_to_tell_end(
        &self,
        fields: &GetattrIn,
        Attributes { inode, size, file_type, .. }: &Attributes,
    ) -> Result<Option<Arc<OpenFile>>, Error> {
        if !self.caches || *file_type != FileType::Regular {
            return Ok(None);
        }
        match self.ends.reaches(*inode, *size) {
            true => Ok(None),
            false if fields.flags & GETATTR_HANDLE != 0 => self.files.get(fields.handle).map(Some),
            false => Ok(self.files.any_of(*inode)),
        }
    }

    /// Attributes with the time of creation.
    pub(crate) fn statx(&self, header: &InHeader, reply: &mut Reply) -> Result<Answer, Error> {
        let found = self.engine.getattr(Target::Node(node(header)))?;
        let time = |time_ns| {
            let (seconds, ns) = parts(time_ns);
            StatxTime { seconds, ns, unused: 0 }
        };
        reply.put(&StatxOut {
            mask: libc::STATX_BASIC_STATS | libc::STATX_BTIME,
            block_bytes: BLOCK_BYTES,
            links: found.links,
            uid: found.uid,
            gid: found.gid,
            mode: (found.file_type.mode_bits() | found.mode) as u16,
            inode: found.inode.get(),
            size: found.size,
            blocks: found.blocks,
            atime: time(found.atime_ns),
            btime: time(found.btime_ns),
            ctime: time(found.ctime_ns),
            mtime: time(found.mtime_ns),
            rdev_major: libc::major(found.rdev),
            rdev_minor: libc::minor(found.rdev),
            ..StatxOut::default()
        });
        Ok(Answer::Ready)
    }

    /// A message without changes is a `chown` that changes neither user nor group, which clears set-id bits; or it comes
    /// before a write that clears them. Every other call without changes ends in the kernel.
    pub(crate) fn setattr(
        &self,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: SetattrIn = body.take()?;
        let has = |bit: u32| fields.valid & bit != 0;
        let what = fattr::MODE | fattr::SIZE | fattr::ATIME | fattr::MTIME | fattr::CTIME;
        let time = |given, now, (seconds, ns)| {
            has(given).then(|| if has(now) { SetTime::Now } else { joined(seconds, ns) })
        };
        let changes = Changes {
            mode: has(fattr::MODE).then_some(fields.mode & 0o7777),
            chown: has(fattr::UID) || has(fattr::GID) || !has(what),
            uid: has(fattr::UID).then_some(fields.uid),
            gid: has(fattr::GID).then_some(fields.gid),
            size: has(fattr::SIZE).then_some(fields.size),
            atime: time(fattr::ATIME, fattr::ATIME_NOW, (fields.atime, fields.atime_ns)),
            mtime: time(fattr::MTIME, fattr::MTIME_NOW, (fields.mtime, fields.mtime_ns)),
        };
        let target = if has(fattr::HANDLE) {
            Target::Open(self.files.get(fields.handle)?.handle)
        } else {
            Target::Node(node(header))
        };
        let caller = caller(header);
        if fields.valid & (what | fattr::UID | fattr::GID) == 0 {
            let attributes = self.engine.getattr(target)?;
            let loses_set_ids = access::after_write(&caller, &attributes) != attributes.mode;
            if loses_set_ids && !caller.owns(&attributes) {
                if self.caches && self.units.writers(attributes.inode) == 0 {
                    // No program of the mount has the file open for writing, so it is a `chown`.
                    return Err(Error::NotPermitted);
                }
                // The write itself clears them.
                return Ok(self.tell_attributes(&attributes, None, reply));
            }
        }
        let attributes = self.engine.setattr(&caller, target, &changes)?;
        if let Some(size) = changes.size {
            self.is_cut(attributes.inode, size);
            self.wait_for_creations(attributes.inode);
            if self.caches {
                self.ends.known(attributes.inode, size, self.ends.cuts());
            }
        }
        // Not cacheable: the kernel accepts it even if it was told meanwhile to drop the inode.
        Ok(self.tell_attributes(&attributes, None, reply))
    }

    pub(crate) fn access(&self, header: &InHeader, body: &mut Body<'_>) -> Result<Answer, Error> {
        let fields: AccessIn = body.take()?;
        let attributes = self.engine.getattr(Target::Node(node(header)))?;
        access::check(&caller(header), &attributes, fields.mask & 7)?;
        Ok(Answer::Ready)
    }

    pub(crate) fn statfs(&self, reply: &mut Reply) -> Result<Answer, Error> {
        let space = self.engine.statfs()?;
        let block_bytes = u32::try_from(space.block_bytes).map_err(|_| Error::Overflow)?;
        reply.put(&StatfsOut {
            blocks: space.blocks,
            blocks_free: space.blocks_free,
            blocks_available: space.blocks_available,
            inodes: space.inodes,
            inodes_free: space.inodes_free,
            block_bytes,
            name_bytes_max: NAME_BYTES_MAX as u32,
            fragment_bytes: block_bytes,
            unused: [0; 7],
        });
        Ok(Answer::Ready)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_go_there_and_back() {
        for time_ns in [-1, -NS, -NS - 1, 0, 1, NS, i64::MIN, i64::MAX] {
            let (seconds, ns) = parts(time_ns);
            assert!(i64::from(ns) < NS);
            if time_ns != i64::MIN {
                assert_eq!(joined(seconds, ns), SetTime::To(time_ns));
            }
        }
        assert_eq!(joined(i64::MAX, 5), SetTime::To(i64::MAX));
    }
}
