//! The node's tree as the mount of this crate: [`Vfs`] over a [`LibFs`] that attaches at the first call that
//! concerns it.
//!
//! A forked child is a new client: it attaches by itself and opens anew, by the path it was opened by, what its
//! parent had open; so does the next program after exec. What they share is the offset, the flags and the number of
//! the description's locks ([`crate::openings`]). A file that lost that name since cannot be opened anew: ESTALE.
//!
//! **Locks.** None here: what a fork may find half done is either swapped in whole or left behind.

use crate::descriptors;
use crate::local::local;
use crate::mount::{Change, Entry, Errno, Handle, Lock, Mount, New, Place, Result, Target};
use crate::openings;
use format::InodeNumber;
use format::record::FileType;
use ipc::{Host, SystemHost};
use libfs::socket::SocketConnector;
use libfs::{LibFs, Limits};
use std::io::{IoSlice, IoSliceMut};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::task::Waker;
use vfs::engine::{Attributes, Engine, LockKind, LockOwner, Space, Step, Target as NodeTarget};
use vfs::errno;
use vfs::file::OpenState;
use vfs::vfs::{AccessIds, LockRequest, Owner, Patience, Pause, RangeKind, TimeToSet};
use vfs::{Base, Caller, File, Stop, Subject, Vfs};

/// What `f_type` of `statfs` says: `HRTH`.
const FILE_SYSTEM_TYPE: i64 = 0x4854_5248;
/// Minor number of the device that the tree's files seem to lie on; the major number is 0, that of no device.
const DEVICE_MINOR: u32 = 0x4854;
/// Bytes of a block, for `st_blksize`.
const BLOCK_BYTES: u32 = 4096;
/// Bytes of directory records read at once.
const RECORDS_BYTES: usize = 16 << 10;
/// Flags that an opening anew leaves out: they were for the first time.
const ONLY_ONCE: i32 = libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC;

/// The tree of one node.
pub struct Tree {
    socket: PathBuf,
    client: AtomicPtr<Client>,
    /// Counts the forks between the first program and this process: a [`Current`] of another era is a parent's.
    era: AtomicU32,
}

/// What the process is to its node, once attached. Never freed: a fork may leave it to a child.
struct Client {
    vfs: Vfs<LibFs>,
}

/// An open file description, behind a [`Handle`].
struct Open {
    current: AtomicPtr<Current>,
    /// By which it is opened anew: from the root of the tree.
    path: Vec<u8>,
    flags: i32,
    place: Option<openings::Place>,
}

/// The file in one process.
struct Current {
    era: u32,
    file: File,
}

/// Descriptors that the LibFS keeps open stand out of the program's reach.
fn keep(fd: i32) {
    descriptors::guard(fd);
}

impl Tree {
    /// The tree behind a socket. Nothing is attached yet.
    pub fn new(socket: PathBuf) -> Self {
        Self { socket, client: AtomicPtr::default(), era: AtomicU32::new(0) }
    }

    fn client(&self) -> Result<&Vfs<LibFs>> {
        // SAFETY: a client is never freed. Acquire pairs with the Release below.
        if let Some(client) = unsafe { self.client.load(Ordering::Acquire).as_ref() } {
            return Ok(&client.vfs);
        }
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        let version = env!("CARGO_PKG_VERSION");
        let connector = Arc::new(SocketConnector::new(host.clone(), self.socket.clone(), version, 0, keep));
        let libfs = LibFs::new(host, connector, Limits::default()).map_err(|_| Errno(libc::EIO))?;
        let owner = LockOwner::Process { id: SystemHost.random(), pid: crate::raw::process().unsigned_abs() };
        let vfs = Vfs::new(Arc::new(libfs), credential(), owner).map_err(errno_of)?;
        vfs.umask(0);
        let client = Box::into_raw(Box::new(Client { vfs }));
        match self.client.compare_exchange(std::ptr::null_mut(), client, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: published just now, never freed.
            Ok(_) => Ok(unsafe { &(*client).vfs }),
            Err(other) => {
                // SAFETY: made here, known to nobody; the other one is never freed.
                drop(unsafe { Box::from_raw(client) });
                Ok(unsafe { &(*other).vfs })
            }
        }
    }

    fn era(&self) -> u32 {
        self.era.load(Ordering::Relaxed)
    }

    /// The file behind a handle, in this process.
    fn file<'a>(&self, handle: &'a Handle) -> Result<&'a File> {
        let open = open_of(handle);
        // Acquire pairs with the Release of whoever set it. SAFETY: freed only at the close, which comes last.
        match unsafe { open.current.load(Ordering::Acquire).as_ref() } {
            Some(current) if current.era == self.era() => Ok(&current.file),
            inherited => self.open_anew(open, std::ptr::from_ref(inherited.map_or(&NOTHING, |_| &NOTHING))),
        }
    }

    /// Opens what the process inherited.
    fn open_anew<'a>(&self, open: &'a Open, _: *const ()) -> Result<&'a File> {
        let vfs = self.client()?;
        let place = vfs::Place { base: Base::Root, path: &open.path };
        let file = vfs.open(place, open.flags & !ONLY_ONCE, 0).map_err(|_| Errno(libc::ESTALE))?;
        let file = match open.place {
            Some(place) => adopt(file, place),
            None => file,
        };
        let fresh = Box::into_raw(Box::new(Current { era: self.era(), file }));
        let before = open.current.load(Ordering::Acquire);
        // SAFETY: what is there belongs to this era or to a parent; neither is freed before the close.
        let stale = unsafe { before.as_ref() }.is_none_or(|current| current.era != self.era());
        let replaced = stale
            && open.current.compare_exchange(before, fresh, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if !replaced {
            // SAFETY: made here, known to nobody.
            let mine = unsafe { Box::from_raw(fresh) };
            vfs.close(&mine.file, true);
        }
        // SAFETY: set, and freed only at the close.
        Ok(unsafe { &(*open.current.load(Ordering::Acquire)).file })
    }

    /// The place of a call, for the tree.
    fn place<'a>(&self, place: &'a Place<'_>) -> Result<vfs::Place<'a>> {
        let base = match &place.dir {
            Some(dir) => Base::At(self.file(dir)?),
            None => Base::Root,
        };
        Ok(vfs::Place { base, path: if place.path.is_empty() { b"." } else { place.path } })
    }

    /// Runs a call on what it is about.
    fn on<T>(&self, target: Target<'_>, act: impl FnOnce(&Vfs<LibFs>, Subject<'_>) -> vfs::Outcome<T>) -> Result<T> {
        let vfs = self.client()?;
        let subject = match &target {
            Target::Open(handle) => Subject::Node(self.file(handle)?.inode()),
            Target::Named(place, true) => Subject::Path(self.place(place)?),
            Target::Named(place, false) => Subject::Link(self.place(place)?),
        };
        act(vfs, subject).map_err(stop_of)
    }
}
