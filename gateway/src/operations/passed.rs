//! Descriptors for files that a program has open through the library. The program opens them here, in a folder of the
//! root that no listing contains, by a name that contains a token ([`format::pass`]). Names and modes of the file do
//! not matter, as for any open file that is passed on.
//!
//! The kernel looks the name up, checks the mode of the file, and opens it. If the mode forbids that, the program opens
//! another name with `O_CREAT`: the kernel sends CREATE, and does not check the mode of a file that counts as just
//! created. This is not the usual way, because answers to CREATE hold up others ([`crate::size_holds`]).

use super::attr;
use super::files::access_of;
use crate::abi::{AttrOut, Body, CreateIn, EntryOut, InHeader, opcode};
use crate::callers::caller;
use crate::gateway::{Answer, Gateway};
use crate::reply::Reply;
use crate::units::VALID_SECONDS;
use format::InodeNumber;
use format::pass::{FOLDER, Opening, PassName};
use format::record::FileType;
use std::sync::Arc;
use vfs::Error;
use vfs::engine::{Access, Attributes, Handle};

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
            opcode::LOOKUP => self.find_passed(header, body, reply),
            opcode::CREATE => self.create_passed(header, body, reply),
            _ => Err(Error::Denied),
        }
    }

    /// Finds the file, and keeps it open for this thread until its next call: OPEN, if the mode permits it.
    fn find_passed(
        self: &Arc<Self>,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let pass = PassName::decode(body.string()?).map_err(|_| Error::NotFound)?;
        let (read, write) = match pass.opening {
            Opening::Read => (true, false),
            Opening::Write => (false, true),
            Opening::Both => (true, true),
            Opening::Create => return Err(Error::NotFound),
        };
        let (handle, attributes) = self.open_regular(&pass, Access { read, write })?;
        let over = self.retries.begin(header.pid);
        over.into_iter()
            .chain(self.retries.keep(header.pid, handle))
            .for_each(|over| self.engine.close(over));
        self.tell_end(handle, &attributes, reply);
        self.tell(&attributes, None, true, reply);
        self.nodes.opened(attributes.inode);
        self.nodes.closed(attributes.inode);
        Ok(Answer::Ready)
    }

    fn create_passed(
        self: &Arc<Self>,
        header: &InHeader,
        body: &mut Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let fields: CreateIn = body.take()?;
        let name = body.string()?;
        let pass = PassName::decode(name)
            .ok()
            .filter(|pass| pass.opening == Opening::Create)
            .ok_or(Error::Denied)?;
        let access = access_of(fields.flags);
        let (handle, attributes) = self.open_regular(&pass, access)?;
        let is_writer = self
            .count_writer(handle, &attributes, access)
            .inspect_err(|_| self.engine.forget(&[attributes.inode]))?;
        self.tell_end(handle, &attributes, reply);
        let attributes = self.attributes_for_creation(FOLDER_NODE, name, (handle, attributes));
        self.tell(&attributes, None, false, reply);
        self.opened(handle, &attributes, (caller(header), is_writer), reply)
    }

    fn open_regular(&self, pass: &PassName, access: Access) -> Result<(Handle, Attributes), Error> {
        let (handle, attributes) = self.engine.open_passed(pass, access)?;
        if attributes.file_type != FileType::Regular {
            self.engine.close(handle);
            self.engine.forget(&[attributes.inode]);
            return Err(Error::Denied);
        }
        Ok((handle, attributes))
    }
}
