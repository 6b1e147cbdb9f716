//! The seam between POSIX and what stores files: some thirty operations on inodes and open files.
//!
//! Every operation takes effect at one instant between call and return, and decides permission by
//! [`crate::access`] in that same instant, for the [`Caller`] that it is given. What is the same for each engine
//! stands above, in [`crate::Vfs`]: paths, symbolic links, descriptors, offsets, flags, the umask. Nothing here
//! knows of leases, logs or metadata servers.
//!
//! **Capability.** An inode number alone opens nothing. A number is good from the moment [`Engine::root`],
//! [`Engine::walk`], [`Engine::create`] or [`Engine::link`] returned it (each return *pins* it once) until
//! [`Engine::forget`] has taken back every pin. A pinned inode goes on existing when its last name is removed, and
//! so does an open one. Numbers are not used twice. An engine answers `Stale` to a number that is not pinned.
//!
//! **Waiting.** An operation may wait for another process or node; if a signal is to end that, the engine
//! answers `Interrupted` and nothing happened. Locks do not wait inside the engine: see [`Engine::lock`].

use crate::access::Caller;
pub use crate::changes::{Changes, SetTime};
use crate::error::Error;
use format::pass::PassName;
use format::record::FileType;
use format::{Cookie, InodeNumber, Name};
use std::io::{IoSlice, IoSliceMut};
use std::task::Waker;

/// What an engine answers.
pub type Result<T> = std::result::Result<T, Error>;

/// Attributes of an inode. Times are nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attributes {
    /// Its number.
    pub inode: InodeNumber,
    /// Type.
    pub file_type: FileType,
    /// Permission bits, set-id bits and sticky bit: the lower twelve bits of `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Names; for a directory 2 and one for each directory in it; 0 when the last name is removed.
    pub links: u32,
    /// Bytes of a file or of a link's target; for a directory whatever the engine likes.
    pub size: u64,
    /// Storage that it uses, in units of 512 bytes.
    pub blocks: u64,
    /// Device number of a device, else 0.
    pub rdev: u64,
    /// Last access. Reading does not change it: a tree behaves as if mounted with `noatime`.
    pub atime_ns: i64,
    /// Last change of the contents.
    pub mtime_ns: i64,
    /// Last change of anything.
    pub ctime_ns: i64,
    /// Creation.
    pub btime_ns: i64,
    /// For a directory: the directory that holds it (the root holds itself); else none.
    pub parent: InodeNumber,
}

/// One step of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// To an entry of the directory.
    Child(Name<'a>),
    /// To the directory above (`..`).
    Parent,
}

/// An open file, as the engine knows it. Valid from the call that returned it until [`Engine::close`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(u64);

impl Handle {
    /// Made by an engine.
    pub const fn new(raw: u64) -> Self {
        Self(raw)
    }

    /// The engine's number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// What an open file may be used for. It is checked when it is opened and never again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Access {
    /// Contents or entries may be read.
    pub read: bool,
    /// Contents may be changed.
    pub write: bool,
}

/// Which inode an operation is about, and by which right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A pinned inode: the caller's permissions decide.
    Node(InodeNumber),
    /// An open file: for a change of size, the right to write fixed at its opening decides.
    Open(Handle),
}

/// What to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewType<'a> {
    /// A file, opened with these rights in the same instant if given: a new file may be written by who made it
    /// whatever its mode says.
    Regular(Option<Access>),
    /// A directory.
    Directory,
    /// A symbolic link with this target: 1 to [`format::record::SYMLINK_BYTES_MAX`] bytes.
    Symlink(&'a [u8]),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device.
    CharacterDevice(u64),
    /// A block device.
    BlockDevice(u64),
}

impl NewType<'_> {
    /// Its type.
    pub const fn file_type(&self) -> FileType {
        match self {
            Self::Regular(_) => FileType::Regular,
            Self::Directory => FileType::Directory,
            Self::Symlink(_) => FileType::Symlink,
            Self::Fifo => FileType::Fifo,
            Self::Socket => FileType::Socket,
            Self::CharacterDevice(_) => FileType::CharacterDevice,
            Self::BlockDevice(_) => FileType::BlockDevice,
        }
    }
}

/// What to create, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct New<'a> {
    /// Type.
    pub kind: NewType<'a>,
    /// Permission bits (twelve), the umask already taken off.
    pub mode: u32,
    /// A name that exists is an error, `Exists`. Else it is answered, whatever it is and whether or not the
    /// caller may write to the directory.
    pub exclusive: bool,
}

/// What [`Engine::create`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Created {
    /// Made it; opened if that was asked for.
    New(Attributes, Option<Handle>),
    /// There was one; nothing happened.
    Existing(Attributes),
}

/// What [`Engine::unlink`] may remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Anything but a directory.
    File,
    /// A directory, if it is empty.
    Directory,
}

/// What [`Engine::rename`] does with a new name that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RenameMode {
    /// Removes it, if the rules allow.
    Replace,
    /// Fails: `Exists`.
    NoReplace,
    /// Gives it the old name; it has to exist.
    Exchange,
}

/// Where to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// There.
    Offset(u64),
    /// At the end, found and extended in one instant.
    End,
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Written {
    /// How much; less than asked only when space or file size ran out.
    pub bytes: usize,
    /// The offset after the last byte written.
    pub end: u64,
}

/// What [`Engine::allocate`] does with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Allocate {
    /// Reserves space, and extends the file to the range's end.
    Extend,
    /// Reserves space; the size stays.
    KeepSize,
    /// Makes it a hole that reads as zeros; the size stays.
    PunchHole,
}

/// What [`Engine::extents`] looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// Bytes that were written.
    Data,
    /// Bytes that never were, or the end of the file.
    Hole,
}

/// An entry of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Its name.
    pub name: Name<'a>,
    /// What it stands for. Not pinned.
    pub inode: InodeNumber,
    /// The type of that.
    pub file_type: FileType,
    /// Its place: pass it to [`Engine::readdir`] to go on after it.
    pub cookie: Cookie,
}

/// Numbers for `statfs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Space {
    /// Bytes of a block.
    pub block_bytes: u64,
    /// All blocks.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks for those who are not root.
    pub blocks_available: u64,
    /// All inodes.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
    /// Tells this tree from others.
    pub id: u64,
}

/// What to make durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sync {
    /// An inode's contents, and of its attributes what is needed to read them.
    Data(InodeNumber),
    /// An inode with everything: contents, attributes, names.
    File(InodeNumber),
    /// All that was done in the tree before.
    Everything,
}

/// How [`Engine::set_xattr`] treats a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SetXattr {
    /// Whether it exists or not.
    Any,
    /// Only if it does not exist.
    Create,
    /// Only if it exists.
    Replace,
}

/// Who holds a lock. Numbers are given by the front end and are unique among all who use the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LockOwner {
    /// A process: `fcntl` locks of the old kind.
    Process {
        /// The owner.
        id: u64,
        /// What `F_GETLK` says of it.
        pid: u32,
    },
    /// An open file description: `flock` and `F_OFD_*`.
    Description(u64),
}

/// Which locks exclude each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LockFamily {
    /// `fcntl`, of both kinds of owner.
    Ranges,
    /// `flock`: the range is the whole file.
    Whole,
}

/// Strength of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LockKind {
    /// Many may hold it.
    Shared,
    /// One may.
    Exclusive,
}

/// A lock on a range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lock {
    /// Against which others.
    pub family: LockFamily,
    /// How strong.
    pub kind: LockKind,
    /// First byte.
    pub first: u64,
    /// Last byte; `u64::MAX` is the end of the file, wherever it comes to be.
    pub last: u64,
}

/// A request for a lock that waits in the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

impl Ticket {
    /// Made by an engine.
    pub const fn new(raw: u64) -> Self {
        Self(raw)
    }

    /// The engine's number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// What became of a request for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Locked {
    /// The owner has it.
    Granted,
    /// It waits; end it by [`Engine::redeem`] or [`Engine::cancel`].
    Queued(Ticket),
}

/// What stores the files of a tree. See the head of this module for what holds of every method.
pub trait Engine: Send + std::marker::Sync {
    /// The root directory, pinned.
    ///
    /// # Errors
    /// `Io`.
    fn root(&self) -> Result<Attributes>;

    /// Takes steps from the directory `start`, and appends to `found`, for each step taken, what it led to,
    /// pinned: also those before an error. Before each step it checks that it stands in a directory
    /// (`NotDirectory`) which the caller may search (`Denied`). It takes fewer steps than asked, without an error,
    /// in two cases: it came to a symbolic link (the last in `found`), or the next step leads from the root to its
    /// parent. In a directory that was removed it finds nothing. Without steps it appends `start`.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `Denied`, `Stale`.
    fn walk(
        &self,
        caller: &Caller,
        start: InodeNumber,
        steps: &[Step<'_>],
        found: &mut Vec<Attributes>,
    ) -> Result<()>;

    /// Takes back one pin of each of these, as often as it is named.
    fn forget(&self, nodes: &[InodeNumber]);

    /// Opens a file or directory, if the caller may; with `truncate`, which asks for the right to write, a file
    /// becomes empty in the same instant. The open file does not need the pin.
    ///
    /// # Errors
    /// `Denied`; `IsDirectory` for writing to one; `NoDevice` for what is neither file nor directory; `Loop` for
    /// a symbolic link; `TooManyFiles`.
    fn open(
        &self,
        caller: &Caller,
        node: InodeNumber,
        access: Access,
        truncate: bool,
    ) -> Result<(Handle, Attributes)>;

    /// Opens a file that a program of the node has open, by a right that was given for it ([`format::pass`]) and is good
    /// once, whatever became of names and mode. The inode is pinned, as by a walk.
    ///
    /// # Errors
    /// `Denied`: it is not given, or not for this; `Stale`; `TooManyFiles`; `NotSupported` by an engine without programs.
    fn open_passed(&self, pass: &PassName, access: Access) -> Result<(Handle, Attributes)> {
        let _ = (pass, access);
        Err(Error::NotSupported)
    }

    /// Ends an open file; the last use of one without a name frees it.
    fn close(&self, handle: Handle);

    /// Attributes.
    ///
    /// # Errors
    /// `Stale`.
    fn getattr(&self, target: Target) -> Result<Attributes>;

    /// Changes attributes, all or none, if [`crate::access::change`] allows.
    ///
    /// # Errors
    /// `NotPermitted`, `Denied`; for the size `IsDirectory`, `Invalid`, `FileTooBig`, `NoSpace`.
    fn setattr(&self, caller: &Caller, target: Target, changes: &Changes) -> Result<Attributes>;

    /// Creates an entry with a new inode, which is pinned (an existing one too). Owner, group and set-group-id come
    /// from [`crate::access::inherit`].
    ///
    /// # Errors
    /// In this order: `NotDirectory`, `Denied` (search), `Exists`, `NotFound` (the directory was removed), `Denied`,
    /// `NotPermitted` (devices, for those who are not root), `NoSpace`.
    fn create(&self, caller: &Caller, parent: InodeNumber, name: Name<'_>, new: &New<'_>) -> Result<Created>;

    /// Gives an inode another name. Pins it once more.
    ///
    /// # Errors
    /// As [`Engine::create`]; then `NotPermitted` for a directory, `NotFound` for an inode without a name,
    /// `TooManyLinks`.
    fn link(
        &self,
        caller: &Caller,
        node: InodeNumber,
        parent: InodeNumber,
        name: Name<'_>,
    ) -> Result<Attributes>;

    /// Removes an entry.
    ///
    /// # Errors
    /// In this order: `Denied` (search), `NotFound`, `Denied`, `NotPermitted` (sticky), `IsDirectory` or
    /// `NotDirectory`, `NotEmpty`.
    fn unlink(&self, caller: &Caller, parent: InodeNumber, name: Name<'_>, removal: Removal) -> Result<()>;

    /// Moves an entry; `from` and `to` are directories and names. If both names stand for one inode, nothing
    /// happens.
    ///
    /// # Errors
    /// In this order: `NotFound`, `Exists`, `Invalid` (a directory into itself), `NotEmpty` (onto one that holds
    /// it), `Denied`, `NotPermitted`, `NotDirectory`, `IsDirectory`, `NotEmpty`; `CrossDevice`.
    fn rename(
        &self,
        caller: &Caller,
        from: (InodeNumber, Name<'_>),
        to: (InodeNumber, Name<'_>),
        mode: RenameMode,
    ) -> Result<()>;

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// `Invalid` if it is none.
    fn readlink(&self, node: InodeNumber) -> Result<Vec<u8>>;

    /// Reads into the slices in order, as one operation; short only at the end of the file.
    ///
    /// # Errors
    /// `BadDescriptor` if not open for reading, `IsDirectory`, `BadAddress`, `Io`.
    fn read(&self, handle: Handle, offset: u64, into: &mut [IoSliceMut<'_>]) -> Result<usize>;

    /// Writes the slices in order, as one operation. Of no bytes it does nothing, not even to the times. Clears
    /// set-id bits by [`crate::access::after_write`].
    ///
    /// # Errors
    /// `BadDescriptor` if not open for writing, `FileTooBig`, `NoSpace`, `BadAddress`, `Io`.
    fn write(&self, caller: &Caller, handle: Handle, at: At, from: &[IoSlice<'_>]) -> Result<Written>;

    /// Reserves, clears or frees a range of at least one byte that ends within the largest file.
    ///
    /// # Errors
    /// `BadDescriptor` if not open for writing, `NoSpace`, `NotSupported`.
    fn allocate(
        &self,
        caller: &Caller,
        handle: Handle,
        what: Allocate,
        offset: u64,
        bytes: u64,
    ) -> Result<()>;

    /// The first offset, at or after this one, of data or of a hole.
    ///
    /// # Errors
    /// `NoDevice` at or beyond the end of the file, or if no data follows.
    fn extents(&self, handle: Handle, offset: u64, what: Extent) -> Result<u64>;

    /// Shows the entries after `after` (none: from the first), in the order of their cookies, until
    /// `sink` answers false; that one is not counted as shown. `.` and `..` are not among them. An entry that
    /// stays throughout is shown exactly once.
    ///
    /// # Errors
    /// `BadDescriptor` if not open for reading, `NotDirectory`, `NotFound` if the directory was removed.
    fn readdir(
        &self,
        handle: Handle,
        after: Option<Cookie>,
        sink: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Result<()>;

    /// Room that there is.
    ///
    /// # Errors
    /// `Io`.
    fn statfs(&self) -> Result<Space>;

    /// Makes durable; see [`Sync`]. A failure is told to everyone who had written, once.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `Interrupted`.
    fn sync(&self, what: Sync) -> Result<()>;

    /// Value of an extended attribute.
    ///
    /// # Errors
    /// As [`crate::access::read_xattr`]; `NoData`.
    fn get_xattr(&self, caller: &Caller, node: InodeNumber, name: &[u8]) -> Result<Vec<u8>>;

    /// Sets one.
    ///
    /// # Errors
    /// As [`crate::access::write_xattr`]; `Exists`, `NoData`, `NoSpace`.
    fn set_xattr(
        &self,
        caller: &Caller,
        node: InodeNumber,
        name: &[u8],
        value: &[u8],
        how: SetXattr,
    ) -> Result<()>;

    /// Names of all that the caller may know of, each followed by a zero byte.
    ///
    /// # Errors
    /// `Io`.
    fn list_xattrs(&self, caller: &Caller, node: InodeNumber) -> Result<Vec<u8>>;

    /// Removes one.
    ///
    /// # Errors
    /// As [`crate::access::write_xattr`]; `NoData`.
    fn remove_xattr(&self, caller: &Caller, node: InodeNumber, name: &[u8]) -> Result<()>;

    /// Locks a range; what the owner held there in this family is replaced. If another's lock is in the way:
    /// without a waker `WouldBlock`; with one the request is queued, and the engine wakes the waker when it is
    /// worth calling [`Engine::redeem`]. How to wait is the caller's affair, so that a process with signals, a
    /// FUSE gateway and a simulator each can in its own way.
    ///
    /// # Errors
    /// `WouldBlock`, `Deadlock` (ranges of processes only), `NoLocks`, `BadDescriptor`.
    fn lock(&self, handle: Handle, owner: LockOwner, lock: Lock, waker: Option<&Waker>) -> Result<Locked>;

    /// Whether a queued request was granted, which ends its ticket; if not yet, the waker stays.
    ///
    /// # Errors
    /// `Deadlock`, `Io`, `Stale` for a ticket that has ended; each ends it.
    fn redeem(&self, ticket: Ticket) -> Result<Locked>;

    /// Takes a request back and ends its ticket; false if it was granted before.
    fn cancel(&self, ticket: Ticket) -> bool;

    /// Unlocks a range of the owner's, in one family.
    ///
    /// # Errors
    /// `NoLocks`, `BadDescriptor`.
    fn unlock(
        &self,
        handle: Handle,
        owner: LockOwner,
        family: LockFamily,
        first: u64,
        last: u64,
    ) -> Result<()>;

    /// A lock of somebody else that is in the way of this one, if any, and whose it is.
    ///
    /// # Errors
    /// `BadDescriptor`.
    fn conflict(&self, handle: Handle, owner: LockOwner, lock: Lock) -> Result<Option<(Lock, LockOwner)>>;

    /// Ends all locks and requests of an owner, on one inode or everywhere (its death).
    fn release(&self, owner: LockOwner, node: Option<InodeNumber>);
}
