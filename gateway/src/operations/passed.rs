//! Descriptors for files that a program has open through the library. The program opens them here, in a folder of the
//! root that no listing contains, by a name that contains a token ([`format::pass`]). Names and modes of the file do
//! not matter, as for any open file that is passed on.
//!
//! The program opens with `O_CREAT`, and the kernel sends CREATE: it does not check the mode of a file that counts as
//! just created, and sends only one message.

use super::attr;
use super::files::access_of;
use crate::abi::{AttrOut, Body, CreateIn, EntryOut, InHeader, opcode};
use crate::callers::caller;
use crate::gateway::{Answer, Gateway};
use crate::reply::Reply;
use crate::units::VALID_SECONDS;
use format::InodeNumber;
use format::pass::{FOLDER, PassName};
use format::record::FileType;
use std::sync::Arc;
use vfs::Error;
use vfs::engine::Attributes;

/// The folder's node. No inode has this number.
const FOLDER_NODE: InodeNumber = InodeNumber::new(u64::MAX - 1);
/// The folder's attributes. They and its name never change, so the kernel caches them without a lease. All users may
/// open a name in the folder, but none may list it.
const FOLDER_ATTRIBUTES: Attributes = Attributes {
    inode: FOLDER_NODE,
    file_type: FileType::Directory,
    mode: 0o333,
    uid: 0,
    gid: 0,
    links: 2,
    size: 0,
    blocks: 0,
    rdev: 0,
    atime_ns: 0,
    mtime_ns: 0,
    ctime_ns: 0,
    btime_ns: 0,
    parent: InodeNumber::ROOT,
};

impl Gateway {
    /// Serves a message about the folder; none for all others.
    pub(crate) fn passed(
        self: &Arc<Self>,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Option<Result<Answer, Error>> {
        if header.node == FOLDER_NODE.get() {
            return Some(self.in_folder(header, body, reply));
        }
        let mut name = *body;
        let is_folder = header.opcode == opcode::LOOKUP
            && header.node == InodeNumber::ROOT.get()
            && name.string() == Ok(FOLDER);
        is_folder.then(|| {
            reply.put(&EntryOut {
                node: FOLDER_NODE.get(),
                attr: attr(&FOLDER_ATTRIBUTES),
                attr_valid: VALID_SECONDS,
                entry_valid: VALID_SECONDS,
                ..EntryOut::default()
            });
            Ok(Answer::Ready)
        })
    }

    fn in_folder(
        self: &Arc<Self>,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        match header.opcode {
            opcode::FORGET => Ok(Answer::None),
            opcode::GETATTR => {
                let attr = attr(&FOLDER_ATTRIBUTES);
                reply.put(&AttrOut { attr, valid: VALID_SECONDS, ..AttrOut::default() });
                Ok(Answer::Ready)
            }
            opcode::STATX => Ok(Answer::Unknown),
            opcode::LOOKUP => Err(Error::NotFound),
            opcode::CREATE => self.open_passed(header, body, reply),
            _ => Err(Error::Denied),
        }
    }

    fn open_passed(
        self: &Arc<Self>,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: CreateIn = body.take()?;
        let pass = PassName::decode(body.string()?).map_err(|_| Error::Denied)?;
        let (handle, attributes) = self.engine.open_passed(&pass, access_of(fields.flags))?;
        if attributes.file_type != FileType::Regular {
            self.engine.close(handle);
            self.engine.forget(&[attributes.inode]);
            return Err(Error::Denied);
        }
        let is_writer = self
            .count_writer(handle, &attributes, access_of(fields.flags))
            .inspect_err(|_| self.engine.forget(&[attributes.inode]))?;
        self.tell(&attributes, None, false, reply);
        self.opened(handle, &attributes, (caller(header), is_writer), reply)
    }
}
