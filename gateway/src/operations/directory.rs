//! Reading directories. The offsets of entries are the engine's cookies, so a listing continues at its position
//! although entries are added or removed meanwhile. Entries have no attributes: the gateway does not offer READDIRPLUS
//! (`docs/mount.md`).

use crate::abi::{Body, Dirent, ReadIn};
use crate::gateway::{Answer, Gateway};
use crate::reply::Reply;
use format::name::COOKIE_SLOTS;
use format::record::FileType;
use format::{Cookie, InodeNumber};
use vfs::Error;
use vfs::engine::Target;

/// Offset after `.`.
const AFTER_DOT: u64 = 1;
/// Offset after `..`.
const AFTER_DOT_DOT: u64 = 2;

/// Appends one entry; false if it does not fit.
fn put(
    reply: &mut Reply,
    bytes_max: usize,
    inode: InodeNumber,
    offset: u64,
    file_type: FileType,
    name: &[u8],
) -> bool {
    let bytes = (size_of::<Dirent>() + name.len()).next_multiple_of(8);
    if reply.bytes() + bytes > bytes_max {
        return false;
    }
    let padding = bytes - size_of::<Dirent>() - name.len();
    let name_bytes = name.len() as u32;
    reply.put(&Dirent { inode: inode.get(), offset, name_bytes, file_type: file_type as u32 });
    reply.put_bytes(name);
    reply.put_bytes(&[0; 8][..padding]);
    true
}

impl Gateway {
    pub(crate) fn readdir(&self, body: &mut Body<'_>, reply: &mut Reply) -> Result<Answer, Error> {
        let fields: ReadIn = body.take()?;
        let handle = self.files.get(fields.handle)?.handle;
        let bytes_max = fields.bytes as usize;
        let directory = self.engine.getattr(Target::Open(handle))?;
        let mut fits = true;
        if fields.offset < AFTER_DOT {
            fits = put(reply, bytes_max, directory.inode, AFTER_DOT, FileType::Directory, b".");
        }
        if fits && fields.offset < AFTER_DOT_DOT {
            fits = put(reply, bytes_max, directory.parent, AFTER_DOT_DOT, FileType::Directory, b"..");
        }
        if !fits {
            return Ok(Answer::Ready);
        }
        let after = (fields.offset >= COOKIE_SLOTS).then(|| Cookie::from_raw(fields.offset));
        self.engine.readdir(handle, after, &mut |entry| {
            put(reply, bytes_max, entry.inode, entry.cookie.get(), entry.file_type, entry.name.bytes())
        })?;
        Ok(Answer::Ready)
    }
}
