//! The interface between POSIX semantics and the storage of files: about thirty operations on inodes and open
//! files.
//!
//! Every operation takes effect at one instant between call and return, and checks permission by [`crate::access`]
//! at that same instant, for the [`Caller`] that it is given. [`crate::Vfs`] above handles everything that is the
//! same for each engine: paths, symbolic links, descriptors, offsets, flags, the umask. The interface is
//! independent of leases, logs and metadata servers.
//!
//! **Capability.** An inode number alone opens nothing. A number is valid from the moment [`Engine::root`],
//! [`Engine::walk`], [`Engine::create`] or [`Engine::link`] returned it (each return *pins* it once) until
//! [`Engine::forget`] has taken back every pin. A pinned inode continues to exist when its last name is removed,
//! and so does an open one. Numbers are never reused. An engine returns `Stale` for a number that is not pinned.
//!
//! **Waiting.** An operation may wait for another process or node. If a signal must end the wait, the engine
//! returns `Interrupted`, and the operation has no effect. Locks do not wait inside the engine: see
//! [`Engine::lock`].

use crate::access::Caller;
use crate::cache_leases::CacheLeases;
pub use crate::changes::{Changes, SetTime, SetXattr};
pub use crate::creation::{Created, New, NewType, NewUnnamed};
use crate::error::Error;
use format::pass::PassName;
use format::record::FileType;
use format::{Cookie, InodeNumber, Name};
use std::io::{IoSlice, IoSliceMut};
use std::task::Waker;

/// Result of an engine operation.
pub type Result<T> = std::result::Result<T, Error>;

/// Attributes of an inode. Times are nanoseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attributes {
    /// Inode number.
    pub inode: InodeNumber,
    /// Type of the inode.
    pub file_type: FileType,
    /// Permission bits, set-id bits and sticky bit: the lower twelve bits of `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of names; for a directory 2 plus the number of its subdirectories; 0 once the last name is removed.
    pub links: u32,
    /// Bytes of a file or of a link's target; an engine chooses the value for a directory.
    pub size: u64,
    /// Storage in use, in units of 512 bytes.
    pub blocks: u64,
    /// Device number of a device, 0 otherwise.
    pub rdev: u64,
    /// Time of the last access. Reading does not change it: a tree behaves as if mounted with `noatime`.
    pub atime_ns: i64,
    /// Time of the last change of the contents.
    pub mtime_ns: i64,
    /// Time of the last change of contents or attributes.
    pub ctime_ns: i64,
    /// Time of creation.
    pub btime_ns: i64,
    /// For a directory its parent (the root is its own parent). For a file that was created without a name and may get one:
    /// the directory that it was created in. For other inodes no inode.
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

/// An open file of an engine. Valid from the call that returned it until [`Engine::close`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(u64);

impl Handle {
    /// Makes a handle; for engines.
    pub const fn new(raw: u64) -> Self {
        Self(raw)
    }

    /// The engine's number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Rights of an open file. They are checked when the file is opened, and never again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Access {
    /// Contents or entries may be read.
    pub read: bool,
    /// Contents may be changed.
    pub write: bool,
}

/// The inode that an operation is about, and the right by which it acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A pinned inode: the caller's permissions decide.
    Node(InodeNumber),
    /// An open file: for a change of size the right to write, fixed at its opening, decides.
    Open(Handle),
}

/// Kind of inode that [`Engine::unlink`] may remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Anything but a directory.
    File,
    /// A directory, if it is empty.
    Directory,
}

/// Treatment of an existing new name by [`Engine::rename`]. With `whiteout` the old name stays, and refers to a new
/// character device with number 0 and no permission bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RenameMode {
    /// Removes it, if the rules allow that.
    Replace {
        /// A device takes the old name.
        whiteout: bool,
    },
    /// Fails: `Exists`.
    NoReplace {
        /// A device takes the old name.
        whiteout: bool,
    },
    /// Swaps the two names; the new one must exist.
    Exchange,
}

impl RenameMode {
    /// The mode that the flags of `renameat2` ask for.
    ///
    /// # Errors
    /// `Invalid` for flags that do not exist, or that exclude each other.
    pub fn of_flags(flags: u32) -> Result<Self> {
        const KNOWN: u32 = libc::RENAME_NOREPLACE | libc::RENAME_WHITEOUT;
        let whiteout = flags & libc::RENAME_WHITEOUT != 0;
        match flags {
            libc::RENAME_EXCHANGE => Ok(Self::Exchange),
            _ if flags & !KNOWN != 0 => Err(Error::Invalid),
            _ if flags & libc::RENAME_NOREPLACE != 0 => Ok(Self::NoReplace { whiteout }),
            _ => Ok(Self::Replace { whiteout }),
        }
    }

    /// Whether a device takes the old name.
    pub const fn leaves_whiteout(self) -> bool {
        matches!(self, Self::Replace { whiteout: true } | Self::NoReplace { whiteout: true })
    }
}

/// Position of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// At this offset.
    Offset(u64),
    /// At the end of the file, which is determined and extended at one instant.
    End,
    /// There, as far as the file reaches.
    Within(u64),
}

/// Result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Written {
    /// Number of bytes written; less than requested only if space or the file size ran out.
    pub bytes: usize,
    /// Offset after the last byte written.
    pub end: u64,
}

/// Effect of [`Engine::allocate`] on a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Allocate {
    /// Reserves space, and extends the file to the end of the range.
    Extend,
    /// Reserves space; the size stays.
    KeepSize,
    /// The same, before the range becomes a hole and is reserved again: fails also if the file has all blocks of the range, and
    /// there is no space for as many others.
    KeepSizeAndReplace,
    /// Makes the range a hole that reads as zeros; the size stays.
    PunchHole,
}

/// Kind of range that [`Engine::extents`] searches for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// Written bytes.
    Data,
    /// Bytes that were never written, or the end of the file.
    Hole,
}

/// An entry of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Name of the entry.
    pub name: Name<'a>,
    /// Inode that the name refers to. Not pinned.
    pub inode: InodeNumber,
    /// Type of that inode.
    pub file_type: FileType,
    /// Position of the entry: [`Engine::readdir`] with this cookie continues after it.
    pub cookie: Cookie,
}

/// Numbers for `statfs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Space {
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Total number of blocks.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks for users other than root.
    pub blocks_available: u64,
    /// Total number of inodes.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
    /// Identifies the tree.
    pub id: u64,
}

/// Scope of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sync {
    /// The contents of an inode, and those of its attributes that are needed to read them.
    Data(InodeNumber),
    /// An inode with its contents, attributes and names.
    File(InodeNumber),
    /// All earlier changes of the tree.
    Everything,
    /// The same, for a program that gets no answer: a loss is told by its next sync.
    EverythingUntold,
    /// All earlier changes of this process.
    Process,
    /// The same, for no program that asks: a loss is told by the next sync of a program.
    Own,
    /// All earlier changes of this process, for a program that syncs an inode whose contents another engine has synced
    /// just now: a loss of the inode is told.
    OwnBeside(InodeNumber),
}

/// Owner of a lock. The front end assigns the numbers, unique among all users of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LockOwner {
    /// A process: traditional `fcntl` locks.
    Process {
        /// Number of the owner.
        id: u64,
        /// Process number that `F_GETLK` returns.
        pid: u32,
    },
    /// An open file description: `flock` and `F_OFD_*` locks.
    Description(u64),
}

/// Family of locks; locks of different families never conflict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LockFamily {
    /// `fcntl` locks, of both kinds of owner.
    Ranges,
    /// `flock` locks: the range is the whole file.
    Whole,
}

/// Strength of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LockKind {
    /// Compatible with other shared locks.
    Shared,
    /// Compatible with no other lock.
    Exclusive,
}

/// A lock on a range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lock {
    /// Family of the lock.
    pub family: LockFamily,
    /// Strength of the lock.
    pub kind: LockKind,
    /// First byte.
    pub first: u64,
    /// Last byte; `u64::MAX` means the end of the file, wherever it moves.
    pub last: u64,
}

/// Number of a lock request that waits in the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

impl Ticket {
    /// Makes a ticket; for engines.
    pub const fn new(raw: u64) -> Self {
        Self(raw)
    }

    /// The engine's number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// State of a lock request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Locked {
    /// The owner holds the lock.
    Granted,
    /// The request waits; [`Engine::redeem`] or [`Engine::cancel`] ends it.
    Queued(Ticket),
}

/// The storage of a tree. The module head states the rules for every method.
pub trait Engine: Send + std::marker::Sync {
    /// The root directory, pinned.
    ///
    /// # Errors
    /// `Io`.
    fn root(&self) -> Result<Attributes>;

    /// Takes steps from the directory `start`. Appends to `found` the inode that each step leads to, pinned, also
    /// for the steps before an error. Before each step the walk must be in a directory (`NotDirectory`) that the
    /// caller may search (`Denied`). The walk ends early without an error in two cases: it came to a symbolic link
    /// (the last in `found`), or the next step leads from the root to its parent. A removed directory has no
    /// entries. Without steps the call appends `start`.
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

    /// Takes back one pin of each inode, for each time it is listed.
    fn forget(&self, nodes: &[InodeNumber]);

    /// Opens a file or directory, if the caller is permitted. `truncate`, which needs the right to write, empties a
    /// file at the same instant. An open file needs no pin.
    ///
    /// # Errors
    /// `Denied`; `IsDirectory` for writing to a directory; `NoDevice` for an inode that is neither file nor
    /// directory; `Loop` for a symbolic link; `TooManyFiles`.
    fn open(
        &self,
        caller: &Caller,
        node: InodeNumber,
        access: Access,
        truncate: bool,
    ) -> Result<(Handle, Attributes)>;

    /// Opens a file that a program of the node has open, by a right that the program passed on ([`format::pass`]). A
    /// right is valid once, and independent of the file's names and mode. The call pins the inode, as a walk does.
    ///
    /// # Errors
    /// `Denied`: the right does not exist, or does not include `access`; `Stale`; `TooManyFiles`; `NotSupported` by an
    /// engine without programs.
    fn open_passed(&self, pass: &PassName, access: Access) -> Result<(Handle, Attributes)> {
        let _ = (pass, access);
        Err(Error::NotSupported)
    }

    /// Closes an open file; the last close of a file without a name frees the file.
    fn close(&self, handle: Handle);

    /// Attributes of an inode.
    ///
    /// # Errors
    /// `Stale`.
    fn getattr(&self, target: Target) -> Result<Attributes>;

    /// Changes attributes, all or none, if [`crate::access::change`] allows.
    ///
    /// # Errors
    /// `NotPermitted`, `Denied`; for the size `IsDirectory`, `Invalid`, `FileTooBig`, `NoSpace`.
    fn setattr(&self, caller: &Caller, target: Target, changes: &Changes) -> Result<Attributes>;

    /// Creates an entry with a new inode, which is pinned (an existing one too). [`crate::access::inherit`]
    /// determines group and set-group-id bit.
    ///
    /// # Errors
    /// In this order: `NotDirectory`, `Denied` (search), `Exists`, `NotFound` (the directory was removed),
    /// `Denied`, `NotPermitted` (devices, for users other than root), `NoSpace`.
    fn create(&self, caller: &Caller, parent: InodeNumber, name: Name<'_>, new: &New<'_>) -> Result<Created>;

    /// Creates and opens a file without a name, which is pinned. The directory gives the rights and the group as for a file
    /// that gets a name in it, and does not change. The file ends with its last pin and open file, unless
    /// [`Engine::link`] has given it a name, which it can if the file is `linkable`.
    ///
    /// # Errors
    /// `NotDirectory`, `Denied`, `TooManyFiles`, `NoSpace`.
    fn create_unnamed(
        &self,
        caller: &Caller,
        parent: InodeNumber,
        new: &NewUnnamed,
    ) -> Result<(Attributes, Handle)>;

    /// Adds a name to an inode, and pins the inode once more.
    ///
    /// # Errors
    /// As [`Engine::create`]; then `NotPermitted` for a directory, `NotFound` for an inode that has lost its last name or
    /// may not get one, `TooManyLinks`.
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

    /// Renames an entry; `from` and `to` are directories and names. If both names refer to one inode, the call has
    /// no effect.
    ///
    /// # Errors
    /// In this order: `NotFound`, `Exists`, `Invalid` (a directory into itself), `NotEmpty` (onto a directory that
    /// contains the source), `Denied`, `NotPermitted`, `NotDirectory`, `IsDirectory`, `NotEmpty`; `CrossDevice`.
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
    /// `Invalid` for any other inode.
    fn readlink(&self, node: InodeNumber) -> Result<Vec<u8>>;

    /// Reads into the slices in order, as one operation; short only at the end of the file.
    ///
    /// # Errors
    /// `BadDescriptor` if not open for reading, `IsDirectory`, `BadAddress`, `Io`.
    fn read(&self, handle: Handle, offset: u64, into: &mut [IoSliceMut<'_>]) -> Result<usize>;

    /// Writes the slices in order, as one operation. A write of no bytes changes nothing, not even the times.
    /// [`crate::access::after_write`] determines which set-id bits are cleared.
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

    /// The first offset of data or of a hole, at or after `offset`.
    ///
    /// # Errors
    /// `NoDevice` at or beyond the end of the file, or if no data follows.
    fn extents(&self, handle: Handle, offset: u64, what: Extent) -> Result<u64>;

    /// Passes the entries after `after` (`None`: from the first) to `sink`, in the order of their cookies, until
    /// `sink` returns false; the entry that it rejected does not count as passed. `.` and `..` are not included. An
    /// entry that exists throughout is passed exactly once.
    ///
    /// # Errors
    /// `BadDescriptor` if not open for reading, `NotDirectory`, `NotFound` if the directory was removed.
    fn readdir(
        &self,
        handle: Handle,
        after: Option<Cookie>,
        sink: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Result<()>;

    /// Capacity and free space of the tree.
    ///
    /// # Errors
    /// `Io`.
    fn statfs(&self) -> Result<Space>;

    /// Makes changes durable; see [`Sync`]. Every writer gets a failure reported once.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `Interrupted`.
    fn sync(&self, what: Sync) -> Result<()>;

    /// Value of an extended attribute.
    ///
    /// # Errors
    /// As [`crate::access::read_xattr`]; `NoData`.
    fn get_xattr(&self, caller: &Caller, node: InodeNumber, name: &[u8]) -> Result<Vec<u8>>;

    /// Sets an extended attribute.
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

    /// Names of all extended attributes that the caller may list, each followed by a zero byte.
    ///
    /// # Errors
    /// `Io`.
    fn list_xattrs(&self, caller: &Caller, node: InodeNumber) -> Result<Vec<u8>>;

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// As [`crate::access::write_xattr`]; `NoData`.
    fn remove_xattr(&self, caller: &Caller, node: InodeNumber, name: &[u8]) -> Result<()>;

    /// Locks a range, replacing the owner's locks of this family there. If a lock of another owner conflicts:
    /// without a waker the call fails with `WouldBlock`; with a waker the request is queued, and the engine wakes
    /// the waker when [`Engine::redeem`] may succeed. The caller chooses how to wait, because a process with
    /// signals, a FUSE gateway and a simulator wait in different ways.
    ///
    /// # Errors
    /// `WouldBlock`, `Deadlock` (range locks of processes only), `NoLocks`, `BadDescriptor`.
    fn lock(&self, handle: Handle, owner: LockOwner, lock: Lock, waker: Option<&Waker>) -> Result<Locked>;

    /// State of a queued request. A granted request ends its ticket; the waker of a request that still waits stays
    /// registered.
    ///
    /// # Errors
    /// `Deadlock`, `Io`, `Stale` for a ticket that has ended; each ends the ticket.
    fn redeem(&self, ticket: Ticket) -> Result<Locked>;

    /// Cancels a request and ends its ticket; false if the request was granted before.
    fn cancel(&self, ticket: Ticket) -> bool;

    /// Unlocks a range of the owner's locks of one family.
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

    /// A conflicting lock of another owner, and that owner.
    ///
    /// # Errors
    /// `BadDescriptor`.
    fn conflict(&self, handle: Handle, owner: LockOwner, lock: Lock) -> Result<Option<(Lock, LockOwner)>>;

    /// Ends all locks and requests of an owner, on one inode or (at the owner's death) on all.
    fn release(&self, owner: LockOwner, node: Option<InodeNumber>);

    /// Leases for a cache outside of the engine; none if it has none to give: nothing may be kept.
    fn cache_leases(&self) -> Option<&dyn CacheLeases> {
        None
    }
}
