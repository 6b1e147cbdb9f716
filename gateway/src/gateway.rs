//! The parts of serving a message that are the same for every kind of message. The kinds are in `operations`.

use crate::abi::{self, AttrOut, Body, EntryOut, InHeader, opcode};
use crate::arrivals::Arrivals;
use crate::ends::Ends;
use crate::files::Files;
use crate::guard::Guarded;
use crate::handshake::Agreed;
use crate::late_sync::LateSync;
use crate::nodes::Nodes;
use crate::notices::{Notices, SendNotice};
use crate::operations::attr;
use crate::options::Options;
use crate::orphans::Orphans;
use crate::recalls::{self, Queue, Task};
use crate::reply::Reply;
use crate::retries::Retries;
use crate::size_holds::SizeHolds;
use crate::tally::Tally;
use crate::units::{Stamp, Stay, Units, VALID_SECONDS};
use crate::waits::Waits;
use crate::write_order::WriteOrder;
use format::{InodeNumber, Name, name::NameError};
use ipc::sync::Ordering;
use ipc::{Host, Word};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use vfs::engine::{Attributes, Target};
use vfs::{Engine, Error, LeaseMode};

/// The outcome of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The reply is to be sent.
    Ready,
    /// Another thread sends the reply later.
    Later,
    /// The kernel expects no reply.
    None,
    /// The operation is not supported; the kernel works without it.
    Unknown,
}

/// Sends an answer that comes later.
pub(crate) type Send = Box<dyn Fn(&[u8]) + std::marker::Send + Sync>;

/// The state of a mount. Lock order: the locks of the tables are leaves, and not held during calls of the engine.
pub(crate) struct Gateway {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) host: Arc<dyn Host>,
    pub(crate) nodes: Nodes,
    pub(crate) files: Files,
    pub(crate) waits: Waits,
    pub(crate) arrivals: Arrivals,
    pub(crate) writes: WriteOrder,
    pub(crate) retries: Retries,
    pub(crate) tally: Tally,
    pub(crate) send: Send,
    /// The kernel caches data under leases.
    pub(crate) caches: bool,
    /// The kernel can be asked to forget inodes.
    pub(crate) forgets: bool,
    pub(crate) orphans: Orphans,
    pub(crate) units: Arc<Units>,
    pub(crate) ends: Ends,
    pub(crate) size_holds: SizeHolds,
    pub(crate) late_sync: LateSync,
    /// Another process makes the kernel drop its data if this one dies.
    pub(crate) guarded: Option<Arc<Guarded>>,
    pub(crate) notices: Notices,
    /// Recalls of inodes that may have pages in the kernel, and of others.
    pub(crate) page_recalls: Queue<Task>,
    pub(crate) plain_recalls: Queue<InodeNumber>,
    pub(crate) repairs: Queue<Task>,
    /// Number of threads for these.
    pub(crate) threads: Word,
    /// 1 once the mount is being removed by force: no page is read any more.
    pub(crate) removing: Word,
}

impl Gateway {
    pub(crate) fn new(
        engine: Arc<dyn Engine>,
        host: Arc<dyn Host>,
        options: &Options,
        (send, notify): (Send, SendNotice),
        agreed: &Agreed,
        guarded: Option<Arc<Guarded>>,
    ) -> Self {
        let kernel_has = guarded.as_ref().map(|guarded| guarded.kernel_has.clone());
        Self {
            caches: agreed.caches,
            forgets: agreed.forgets,
            guarded,
            orphans: Orphans::new(host.clone()),
            ends: Ends::new(host.clone()),
            size_holds: SizeHolds::new(host.clone()),
            late_sync: LateSync::new(host.clone()),
            units: Arc::new(Units::new(host.clone(), engine.clone(), kernel_has)),
            notices: Notices::new(notify),
            page_recalls: Queue::new(host.clone()),
            plain_recalls: Queue::new(host.clone()),
            repairs: Queue::new(host.clone()),
            threads: Word::new(0),
            removing: Word::new(0),
            nodes: Nodes::new(host.clone(), options.inodes_max),
            files: Files::new(host.clone()),
            waits: Waits::new(host.clone(), options.waits_max),
            arrivals: Arrivals::new(host.clone()),
            writes: WriteOrder::new(host.clone()),
            retries: Retries::new(host.clone()),
            tally: Tally::new(),
            engine,
            host,
            send,
        }
    }

    /// Serves a message; returns the bytes to be sent, if any. A panic in an operation becomes an `EIO`, so that one
    /// request that meets a broken invariant does not end the mount.
    pub(crate) fn answer<'a>(self: &Arc<Self>, message: &[u8], reply: &'a mut Reply) -> Option<&'a [u8]> {
        reply.clear();
        let (header, body) = abi::split(message).ok()?;
        self.tally.count(header.opcode);
        let served = catch_unwind(AssertUnwindSafe(|| self.serve(&header, body, reply)));
        if let Ok(served) = &served {
            self.note_retry(&header, served.as_ref().err());
        }
        self.late_sync.note(header.opcode);
        let silent = matches!(header.opcode, opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT);
        let result = match served {
            Ok(Ok(Answer::Later | Answer::None)) => return None,
            _ if silent => return None,
            Ok(Ok(Answer::Ready)) => Ok(()),
            Ok(Ok(Answer::Unknown)) => Err(libc::ENOSYS),
            Ok(Err(error)) => Err(vfs::errno::number(error)),
            Err(_) => Err(vfs::errno::number(Error::Io)),
        };
        Some(reply.finish(header.unique, result))
    }

    /// Remembers a thread whose call met a removed inode, until the call is served.
    fn note_retry(&self, header: &InHeader, error: Option<&Error>) {
        let asks = matches!(
            header.opcode,
            opcode::LOOKUP
                | opcode::ACCESS
                | opcode::GETATTR
                | opcode::STATX
                | opcode::GETXATTR
                | opcode::READLINK
        );
        let over = match (error, header.opcode) {
            // The kernel sends these messages in the name of any thread.
            (_, opcode::FORGET | opcode::BATCH_FORGET | opcode::RELEASE | opcode::RELEASEDIR) => return,
            (Some(Error::Stale), _) => self.retries.begin(header.pid),
            _ if self.retries.has(header.pid) => self.retries.served(header.pid, !asks),
            _ => return,
        };
        over.into_iter().for_each(|handle| self.engine.close(handle));
    }

    fn serve(
        self: &Arc<Self>,
        header: &InHeader,
        mut body: Body<'_>,
        reply: &mut Reply,
    ) -> Result<Answer, Error> {
        let body = &mut body;
        if let Some(answer) = self.passed(header, body, reply) {
            return answer;
        }
        match header.opcode {
            opcode::LOOKUP => self.lookup(header, body, reply),
            opcode::FORGET => self.forget(header, body),
            opcode::BATCH_FORGET => self.batch_forget(body),
            opcode::GETATTR => self.getattr(header, body, reply),
            opcode::STATX => self.statx(header, reply),
            opcode::SETATTR => self.setattr(header, body, reply),
            opcode::ACCESS => self.access(header, body),
            opcode::READLINK => self.readlink(header, reply),
            opcode::SYMLINK => self.symlink(header, body, reply),
            opcode::MKNOD => self.mknod(header, body, reply),
            opcode::MKDIR => self.mkdir(header, body, reply),
            opcode::UNLINK => self.unlink(header, body, vfs::engine::Removal::File),
            opcode::RMDIR => self.unlink(header, body, vfs::engine::Removal::Directory),
            opcode::RENAME => self.rename(header, body, false),
            opcode::RENAME2 => self.rename(header, body, true),
            opcode::LINK => self.link(header, body, reply),
            opcode::OPEN | opcode::OPENDIR => self.open(header, body, reply),
            opcode::CREATE => self.create(header, body, reply),
            opcode::TMPFILE => self.create_unnamed(header, body, reply),
            opcode::READ => self.read(header, body, reply),
            opcode::WRITE => self.write(header, body, reply),
            opcode::FALLOCATE => self.fallocate(header, body),
            opcode::LSEEK => self.lseek(body, reply),
            opcode::COPY_FILE_RANGE => self.copy_file_range(header, body, reply),
            opcode::FSYNC | opcode::FSYNCDIR => self.fsync(header, body),
            opcode::FLUSH => self.flush(body),
            opcode::RELEASE | opcode::RELEASEDIR => self.release(body),
            opcode::READDIR => self.readdir(body, reply),
            opcode::STATFS => self.statfs(reply),
            opcode::GETXATTR => self.get_xattr(header, body, reply),
            opcode::LISTXATTR => self.list_xattrs(header, body, reply),
            opcode::SETXATTR => self.set_xattr(header, body),
            opcode::REMOVEXATTR => self.remove_xattr(header, body),
            opcode::GETLK => self.get_lock(body, reply),
            opcode::SETLK => self.set_lock(header, body, false),
            opcode::SETLKW => self.set_lock(header, body, true),
            opcode::INTERRUPT => self.interrupt(body),
            opcode::DESTROY => Ok(Answer::Ready),
            _ => Ok(Answer::Unknown),
        }
    }

    /// The kernel has ended the connection: gives all of its resources back to the engine.
    pub(crate) fn end(&self) {
        self.waits.end();
        self.units.end_connection();
        if self.caches {
            self.units.drop_at_end(&self.notices);
        }
        for number in self.files.numbers() {
            self.close(number);
        }
        self.retries.end().into_iter().for_each(|handle| self.engine.close(handle));
        self.end_recalls();
        self.nodes.forget_all(&*self.engine);
    }

    /// Called before the mount is removed by force: makes the kernel write back and drop all pages. An access to a mapping
    /// reads none again, so there is no store that succeeds and is lost with the connection.
    pub(crate) fn give_up_pages(&self) {
        // Release: pairs with the Acquire in `read`.
        self.removing.store(1, Ordering::Release);
        if self.caches {
            self.units.lose_all(&self.nodes, &self.notices, None);
        }
    }

    /// Closes an open file, if there is one with this number, and ends the locks that end with it.
    pub(crate) fn close(&self, number: u64) {
        if let Ok((file, owners)) = self.files.remove(number) {
            for owner in owners {
                self.engine.release(owner, Some(file.inode));
            }
            if file.is_writer {
                self.units.close_writer(file.inode);
            }
            self.engine.close(file.handle);
            self.nodes.closed(file.inode);
            if self.may_be_orphan(file.inode) {
                self.list_orphan(file.inode);
            }
        }
    }

    /// Whether an inode that the kernel knows is not open, and may have no name. Makes no call to the daemon.
    pub(crate) fn may_be_orphan(&self, inode: InodeNumber) -> bool {
        let has_lease = || self.caches && self.units.is_held(inode);
        self.nodes.is_closed(inode) && (!has_lease() || self.units.leases().is_nameless(inode))
    }

    /// The kernel is to be asked to forget an inode, if that is possible.
    pub(crate) fn list_orphan(&self, inode: InodeNumber) {
        if self.forgets && inode != InodeNumber::ROOT {
            self.orphans.list(inode);
        }
    }

    /// An operation of the mount has removed names. Usually the kernel forgets the inodes by itself; but it may have other
    /// names for them, which are no longer valid, or by which the library opened them.
    pub(crate) fn list_own_orphans(&self) {
        if self.caches {
            self.units.leases().take_orphans().into_iter().for_each(|inode| self.list_orphan(inode));
        }
    }

    /// Starts the threads that tell the kernel to drop and to forget data, and the one that persists changes.
    ///
    /// # Errors
    /// A thread could not be started.
    pub(crate) fn start_recalls(self: &Arc<Self>) -> Result<(), ipc::Error> {
        recalls::start_late_sync(self)?;
        if self.forgets {
            recalls::start_forgetting(self)?;
        }
        if self.caches { recalls::start(self) } else { Ok(()) }
    }

    /// Makes sure that a lease is held under which the kernel may cache the next answer about an inode; none if it may
    /// not. If the engine fails to get the lease, the operation itself gets that error too.
    pub(crate) fn stamp(&self, node: InodeNumber) -> Option<Stamp> {
        if self.caches { self.units.hold(node, LeaseMode::Read).ok().flatten() } else { None }
    }

    /// How long the kernel may cache an answer: for long, if the unit is held until the answer was sent.
    fn valid(stay: Option<Stay>, reply: &mut Reply) -> u64 {
        let Some(stay) = stay else { return 0 };
        reply.stays(stay);
        VALID_SECONDS
    }

    /// Sends an inode that was just pinned to the kernel. The kernel may cache its attributes if `is_asked`; otherwise
    /// it would accept them even if it was told meanwhile to drop the inode. It may cache the name if that was true
    /// under this stamp of the directory.
    pub(crate) fn tell(
        self: &Arc<Self>,
        attributes: &Attributes,
        directory: Option<Stamp>,
        is_asked: bool,
        reply: &mut Reply,
    ) {
        let inode = attributes.inode;
        let cuts = self.ends.cuts();
        let is_new = self.nodes.tell(&*self.engine, inode);
        let stamp = if self.caches && is_asked { self.units.hold_at_once(inode) } else { None };
        // The attributes are read again, under the lease that is held now.
        let held = stamp.and_then(|stamp| {
            let fresh = self.engine.getattr(Target::Node(inode)).ok()?;
            Some((fresh, self.units.tell_attributes(Some(stamp))?))
        });
        let (attributes, stay) = held.map_or((*attributes, None), |(fresh, stay)| (fresh, Some(stay)));
        self.ends.end_at(inode, attributes.size);
        if is_new && self.caches {
            self.ends.known(inode, attributes.size, cuts);
        } else {
            self.keep_from_growing(&attributes);
        }
        let attr_valid = Self::valid(stay, reply);
        let entry_valid = Self::valid(self.units.tell_name(directory), reply);
        let attr = attr(&attributes);
        reply.put(&EntryOut { node: inode.get(), attr, attr_valid, entry_valid, ..EntryOut::default() });
    }

    /// Tells the kernel that a name does not exist, which it may cache.
    pub(crate) fn tell_absent(&self, directory: Option<Stamp>, reply: &mut Reply) -> Result<Answer, Error> {
        let stay = self.units.tell_name(directory).ok_or(Error::NotFound)?;
        reply.stays(stay);
        reply.put(&EntryOut { entry_valid: VALID_SECONDS, ..EntryOut::default() });
        Ok(Answer::Ready)
    }

    /// Attributes that the kernel may cache if they were read under this stamp.
    pub(crate) fn tell_attributes(
        &self,
        attributes: &Attributes,
        stamp: Option<Stamp>,
        reply: &mut Reply,
    ) -> Answer {
        self.ends.end_at(attributes.inode, attributes.size);
        let valid = Self::valid(self.units.tell_attributes(stamp), reply);
        reply.put(&AttrOut { attr: attr(attributes), valid, ..AttrOut::default() });
        Answer::Ready
    }

    fn interrupt(&self, body: &mut Body<'_>) -> Result<Answer, Error> {
        self.waits.interrupt(body.take::<u64>()?);
        Ok(Answer::None)
    }
}

/// The node of a message.
pub(crate) fn node(header: &InHeader) -> InodeNumber {
    InodeNumber::new(header.node)
}

/// A name in the form of `vfs`.
pub(crate) fn name(bytes: &[u8]) -> Result<Name<'_>, Error> {
    Name::new(bytes).map_err(|error| match error {
        NameError::TooLong => Error::NameTooLong,
        NameError::Invalid => Error::Invalid,
    })
}
