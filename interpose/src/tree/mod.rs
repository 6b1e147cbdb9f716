//! The node's tree as the mount of this crate: a [`Vfs`] over a [`LibFs`], which attaches at the first call that
//! concerns it.
//!
//! A forked child is a new client: it attaches by itself, and claims the open files of its parent; so does the next
//! program after an exec (`given`). They share the offset, the flags and the number of the description's locks
//! (`crate::slots`). A child that was created without the library's knowledge opens these files anew, by the paths
//! with which they were opened. If a file does not have that name any more, its calls fail with ESTALE.
//!
//! **Locks.** One lock, held by the thread that attaches; it is free in a forked child. All other state that a fork may
//! interrupt is either replaced as a whole or left behind in the parent.

mod answers;
mod calls;
mod given;
mod joined;
mod locks;
mod mounted;
mod paths;
mod user;

use crate::descriptors::{self, Internal};
use crate::limits;
use crate::local::local;
use crate::mount::{Errno, Handle, MountPath, Result, Target};
use crate::protections::protections;
use crate::slots;
use answers::{errno_of, stop_of};
use format::InodeNumber;
use format::message::ROLE_PROGRAM;
use given::InheritedFiles;
use ipc::{Descriptor, Host, Keeper, SystemHost, Time, WAKE_ALL, Word};
use libfs::share::Given;
use libfs::socket::SocketConnector;
use libfs::{Attachment, Connector, FIRST_WAIT, LibFs, Limits};
use locks::RangeLocks;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use vfs::engine::LockOwner;
use vfs::{Base, File, Subject, Vfs};

/// Flags that apply only to the first opening of a file.
const ONLY_ONCE: i32 = libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC;

/// Bytes of an exported file's token before the path: slot, memfd, flags, inode.
const TOKEN_NUMBERS: usize = 20;

/// Number of the credentials of a file that the program before the exec had opened.
const INHERITED: u32 = 0;

/// The tree of one node.
pub struct Tree {
    socket: PathBuf,
    /// The mount point of the node's mount, if there is one.
    mounted: Option<mounted::MountPoint>,
    /// The client of every call; null before the first call, and after a change of the user until a call has checked
    /// it.
    client: AtomicPtr<Client>,
    /// The client of this process; null before the first call.
    attached: AtomicPtr<Client>,
    /// Counts changes of the user.
    users: AtomicU32,
    /// Number of the credentials of this process: another one after each fork and after each change of the user.
    credentials: AtomicU32,
    /// Counts the forks between the first program and this process: a [`Current`] of another era belongs to a parent.
    era: AtomicU32,
    /// The files that this process has inherited.
    inherited: InheritedFiles,
    /// Number of the owner of the process's own locks, which stay over an exec; 0 before the first attachment.
    owner: AtomicU64,
    /// The process's own locks.
    ranges: RangeLocks,
    /// 1 while a thread attaches, so that inherited files are claimed once.
    attaching: Word,
}

/// The client of the node. Never freed: a fork may leave it to a child.
struct Client {
    vfs: Vfs<LibFs>,
    /// The owner of the process's own locks, if it may have locks from before an exec.
    owner: Option<LockOwner>,
}

/// A connector whose first attachment continues the session that shared the inherited files.
struct SuccessorConnector {
    inner: SocketConnector,
    number: AtomicU64,
    socket: PathBuf,
    /// From then on the first attachment fails if the daemon has ended in order.
    until: Time,
}

impl SuccessorConnector {
    /// A daemon that ends in order removes its socket; one that was killed leaves it.
    fn has_ended_in_order(&self) -> bool {
        SystemHost.now() >= self.until && !self.socket.exists()
    }
}

impl Connector for SuccessorConnector {
    fn attach(&self, former: u64) -> std::result::Result<Attachment, libfs::Error> {
        let number = self.number.load(Ordering::Relaxed);
        let attached = match self.inner.attach(if former == 0 { number } else { former }) {
            Err(libfs::Error::Disconnected) if former == 0 && self.has_ended_in_order() => {
                return Err(libfs::Error::Refused);
            }
            attached => attached?,
        };
        self.number.store(0, Ordering::Relaxed);
        Ok(attached)
    }
}

/// The lock for attaching.
struct AttachLock<'a>(&'a Word);

impl<'a> AttachLock<'a> {
    fn take(word: &'a Word) -> Self {
        // Acquire pairs with the Release below.
        while word.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            SystemHost.wait(word, 1, None);
        }
        Self(word)
    }
}

impl Drop for AttachLock<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
        SystemHost.wake(self.0, WAKE_ALL);
    }
}

/// An open file description, behind a [`Handle`].
struct Open {
    current: AtomicPtr<Current>,
    /// The path from the root of the tree, by which the file is opened anew.
    path: Vec<u8>,
    /// The inode to which the path led: if another file has the name now, the opening fails.
    inode: InodeNumber,
    flags: i32,
    /// Number of the credentials with which it was opened, or [`INHERITED`].
    credentials: u32,
    slot: slots::FileSlot,
    twin: mounted::Twin,
}

/// The file in one process.
struct Current {
    era: u32,
    file: File,
}

/// The descriptors that the LibFS keeps open are internal descriptors.
static KEEPER: Keeper =
    Keeper { number: |slot| Internal::from_slot(slot).number(), close: descriptors::close_clients };

fn keep(descriptor: Descriptor) -> Option<Descriptor> {
    let kept = descriptors::keep_for_client(OwnedFd::from(descriptor).into_raw_fd()).ok()?;
    Some(Descriptor::kept(kept.slot(), &KEEPER))
}

impl Tree {
    /// The tree behind a socket, and its possible mount point. Attaches nothing yet.
    pub fn new(socket: PathBuf, mounted: Option<&Path>) -> Self {
        Self {
            socket,
            mounted: mounted.and_then(mounted::MountPoint::new),
            client: AtomicPtr::default(),
            attached: AtomicPtr::default(),
            users: AtomicU32::new(0),
            credentials: AtomicU32::new(INHERITED + 1),
            era: AtomicU32::new(0),
            inherited: InheritedFiles::default(),
            owner: AtomicU64::new(0),
            ranges: RangeLocks::default(),
            attaching: Word::new(0),
        }
    }

    fn client(&self) -> Result<&Vfs<LibFs>> {
        // SAFETY: a client is never freed. Acquire pairs with the Release below.
        if let Some(client) = unsafe { self.client.load(Ordering::Acquire).as_ref() } {
            return Ok(&client.vfs);
        }
        self.attach()
    }

    /// The same for a call that may create a file: with the umask of the process now.
    fn client_that_creates(&self) -> Result<&Vfs<LibFs>> {
        let client = self.client()?;
        client.set_umask(crate::paths::umask());
        Ok(client)
    }

    /// Attaches and opens all inherited files; or continues as another user. One thread at a time does this.
    #[cold]
    fn attach(&self) -> Result<&Vfs<LibFs>> {
        // Dropped after the lock.
        let mut held = Vec::new();
        let lock = AttachLock::take(&self.attaching);
        loop {
            // SAFETY: as in `client`.
            if let Some(client) = unsafe { self.client.load(Ordering::Acquire).as_ref() } {
                return Ok(&client.vfs);
            }
            // Acquire: pairs with the Release of `note_user`.
            let users = self.users.load(Ordering::Acquire);
            // SAFETY: a client is never freed. Only the thread with the lock stores it.
            let known = unsafe { self.attached.load(Ordering::Acquire).as_ref() };
            let client = match known {
                Some(client) => {
                    self.become_user(client, &mut held)?;
                    std::ptr::from_ref(client).cast_mut()
                }
                None => Box::into_raw(Box::new(self.new_client()?)),
            };
            self.attached.store(client, Ordering::Release);
            // Pairs with the Acquire of `client`.
            self.client.store(client, Ordering::Release);
            if self.users.load(Ordering::Acquire) != users {
                // The user has changed again, and `note_user` may have run before the store.
                self.client.store(std::ptr::null_mut(), Ordering::Release);
            }
            if known.is_none() {
                drop(lock);
                self.inherited.end();
                for held in given::open_files() {
                    // If a file cannot be opened now, its calls report the error.
                    let _ = self.file(&held.handle());
                }
                // SAFETY: never freed.
                return Ok(unsafe { &(*client).vfs });
            }
        }
    }

    fn new_client(&self) -> Result<Client> {
        let host: Arc<dyn Host> = Arc::new(SystemHost);
        let version = env!("CARGO_PKG_VERSION");
        let inner = SocketConnector::new(host.clone(), self.socket.clone(), version, ROLE_PROGRAM, keep);
        let until = host.now().after(FIRST_WAIT);
        let number = AtomicU64::new(self.inherited.number());
        let connector = Arc::new(SuccessorConnector { inner, number, socket: self.socket.clone(), until });
        // A process with inherited files or an inherited working directory goes on with them, so it waits for the restart of a
        // daemon as long as the process that had opened them.
        let limits = match given::open_files().is_empty() {
            true => Limits::default(),
            false => Limits { first_wait: Limits::default().wait, ..Limits::default() },
        };
        let libfs = limits::with_room(|_| LibFs::new(host, connector, limits));
        let libfs = libfs.map_err(|why| match why {
            libfs::Error::Descriptors => Errno(libc::EMFILE),
            libfs::Error::Full => Errno(libc::ENFILE),
            libfs::Error::Memory => {
                answers::tell_of_memory();
                Errno(libc::ENOMEM)
            }
            libfs::Error::NoSpace => Errno(libc::ENOSPC),
            libfs::Error::Build(_) => Errno(libc::EPROTO),
            _ => Errno(libc::EIO),
        })?;
        let inherited = self.owner.load(Ordering::Relaxed);
        let id = if inherited == 0 { SystemHost.random() } else { inherited };
        self.owner.store(id, Ordering::Relaxed);
        let owner = LockOwner::Process { id, pid: local().process().unsigned_abs() };
        let now = user::credentials();
        let vfs = Vfs::new(Arc::new(libfs), now.0.clone(), owner).map_err(errno_of)?;
        let vfs = vfs.protected_by(protections);
        user::tell_real(&vfs, now);
        Ok(Client { vfs, owner: (inherited != 0).then_some(owner) })
    }

    fn era(&self) -> u32 {
        self.era.load(Ordering::Relaxed)
    }

    /// The file behind a handle, in this process.
    fn file<'a>(&self, handle: &'a Handle) -> Result<&'a File> {
        let open = open_of(handle);
        // Acquire pairs with the Release of `open_anew`. SAFETY: freed only at the close, which comes last.
        match unsafe { open.current.load(Ordering::Acquire).as_ref() } {
            Some(current) if current.era == self.era() => Ok(&current.file),
            _ => self.open_anew(open),
        }
    }

    /// Opens an inherited file. If several threads try, the file of the first one is used.
    fn open_anew<'a>(&self, open: &'a Open) -> Result<&'a File> {
        let vfs = self.client()?;
        // A process that has just attached has opened all its files.
        // Acquire pairs with the Release below. SAFETY: freed only at the close, which comes last.
        if let Some(current) = unsafe { open.current.load(Ordering::Acquire).as_ref() }
            && current.era == self.era()
        {
            return Ok(&current.file);
        }
        let file = match self.adopt(vfs, open) {
            Ok(file) => file,
            Err(_) => open_by_path(vfs, open)?,
        };
        let file = joined::joined_with(file, open.slot);
        let fresh = Box::into_raw(Box::new(Current { era: self.era(), file }));
        let before = open.current.load(Ordering::Acquire);
        // SAFETY: the pointer belongs to this era or to a parent's; neither is freed before the close.
        let stale = unsafe { before.as_ref() }.is_none_or(|current| current.era != self.era());
        let replaced = stale
            && open.current.compare_exchange(before, fresh, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if !replaced {
            // SAFETY: made here, and known to no other thread.
            let mine = unsafe { Box::from_raw(fresh) };
            vfs.discard(&mine.file);
        }
        // SAFETY: set by now, and freed only at the close.
        Ok(unsafe { &(*open.current.load(Ordering::Acquire)).file })
    }

    /// Opens an inherited file by its inode.
    fn adopt(&self, vfs: &Vfs<LibFs>, open: &Open) -> std::result::Result<File, vfs::Error> {
        let (handle, attributes) = vfs.engine().adopt(open.inode, given::access_of(open.flags))?;
        let given = given::given(open);
        vfs.engine().speaks_for(&given);
        // SAFETY: a client is never freed.
        let client = unsafe { self.attached.load(Ordering::Acquire).as_ref() };
        if let Some(owner) = client.and_then(|client| client.owner) {
            vfs.engine().speaks_for(&Given { owner: Some(owner), ..given });
        }
        vfs.adopt(&attributes, handle, open.flags & !ONLY_ONCE)
    }

    /// The path of a call, for the tree.
    fn place<'a>(&self, place: &'a MountPath<'_>) -> Result<vfs::Place<'a>> {
        let base = match &place.dir {
            Some(dir) => Base::At(self.file(dir)?),
            None => Base::Root,
        };
        Ok(vfs::Place { base, path: if place.path.is_empty() { b"." } else { place.path } })
    }

    /// Runs a call on its target.
    fn on<T>(
        &self,
        target: Target<'_>,
        act: impl FnOnce(&Vfs<LibFs>, Subject<'_>) -> vfs::Outcome<T>,
    ) -> Result<T> {
        let vfs = self.client()?;
        let subject = match &target {
            Target::Open(handle) => Subject::Node(self.file(handle)?.inode()),
            Target::Named(place, true) => Subject::Path(self.place(place)?),
            Target::Named(place, false) => Subject::Link(self.place(place)?),
        };
        act(vfs, subject).map_err(stop_of)
    }
}

/// Opens an inherited file by the path with which it was opened, if that path still leads to it.
fn open_by_path(vfs: &Vfs<LibFs>, open: &Open) -> Result<File> {
    // The root's own path has no name in it.
    let path = if open.path.is_empty() { b"." } else { open.path.as_slice() };
    let place = vfs::Place { base: Base::Root, path };
    let file = vfs.open(place, open.flags & !ONLY_ONCE, 0).map_err(|_| Errno(libc::ESTALE))?;
    if file.inode() != open.inode {
        vfs.discard(&file);
        return Err(Errno(libc::ESTALE));
    }
    Ok(file)
}

/// The file behind a handle.
fn open_of(handle: &Handle) -> &Open {
    // SAFETY: a handle is the address of an `Open` from `handle_of`; it is used only until its close.
    unsafe { &*(handle.0 as *const Open) }
}

fn handle_of(open: Open) -> Handle {
    Handle(Box::into_raw(Box::new(open)) as u64)
}
