//! What this crate needs from whatever stores the files: one method a family of calls, on places and open files.
//!
//! The implementation is given to [`crate::start::serve`]. It is called on the program's threads, inside (signals
//! wait, its own system calls go straight), from several at once, and after a fork in a copy of its memory in which
//! only the calling thread goes on: [`Mount::after_fork_child`] comes before any other call there.

use std::io::{IoSlice, IoSliceMut};

/// An error number of Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

impl Errno {
    /// The path leads out of the mount, by an absolute symbolic link or by `..` at the root: `paths` walks it
    /// step by step. Not a number that the kernel uses.
    pub const LEAVES: Self = Self(4096);
    /// The file would have to be on a mount of the kernel's, and there is none. Not a number that the kernel uses either.
    pub const UNMOUNTED: Self = Self(4097);
    /// It is a pipe, a socket or a device, which the kernel opens. Not a number that the kernel uses either.
    pub const SPECIAL: Self = Self(4098);
}

/// What a call of the mount answers.
pub type Result<T> = std::result::Result<T, Errno>;

/// An open file description of the mount's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle(pub u64);

/// A name in the mount.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Open directory that the path starts from; none is the root.
    pub dir: Option<Handle>,
    /// Path without a leading slash; empty is the directory itself. A slash at its end asks for a directory.
    pub path: &'a [u8],
}

/// What a call is about.
#[derive(Clone, Copy, Debug)]
pub enum Target<'a> {
    /// An open file.
    Open(Handle),
    /// A name, and whether a symbolic link at its end is followed.
    Named(Place<'a>, bool),
}

/// A change of attributes.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// `chmod`: permission bits.
    Mode(u32),
    /// `chown`: owner and group; `u32::MAX` leaves it.
    Owner(u32, u32),
    /// `utimensat`: access and modification; as there, `UTIME_NOW` and `UTIME_OMIT` in the nanoseconds.
    Times([libc::timespec; 2]),
    /// `truncate`: size in bytes.
    Size(i64),
}

/// What to make.
#[derive(Clone, Copy, Debug)]
pub enum New<'a> {
    /// A directory with this mode.
    Directory(u32),
    /// What `mknod` makes: mode with type, device.
    Node(u32, u64),
    /// A symbolic link to this.
    Link(&'a [u8]),
}

/// An entry of a directory.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// Inode number.
    pub inode: u64,
    /// Position after it, for `lseek`.
    pub next: u64,
    /// `DT_*`.
    pub kind: u8,
    /// Name.
    pub name: &'a [u8],
}

/// A lock asked for.
pub enum Lock<'a> {
    /// `flock`, with its operation.
    Whole(i32),
    /// `fcntl`: the command (`F_SETLK`, `F_OFD_GETLK`, ...) and its argument, which a query answers in.
    Range(i32, &'a mut libc::flock),
}

/// What the next program is told, beside its files.
#[derive(Debug, Default)]
pub struct Passage {
    /// For [`Mount::after_exec`].
    pub token: Vec<u8>,
    /// A descriptor that it inherits; closed if there is no next program.
    pub descriptor: Option<i32>,
}

/// What serves the files. Each method answers what the system call of its name does; `Errno::LEAVES` from those
/// that take a place.
pub trait Mount: Sync {
    /// `openat2`: flags as there (`O_PATH` too), mode less the umask. Of what restricts the walk only
    /// `RESOLVE_NO_SYMLINKS`, `RESOLVE_BENEATH` and `RESOLVE_IN_ROOT` count; with one of the last two it does not leave.
    fn open(&self, place: Place<'_>, flags: i32, mode: u32, resolve: u64) -> Result<Handle>;
    /// Ends an open file. Also called in a child between vfork and exec.
    fn close(&self, file: Handle);
    /// A descriptor of the file was closed while others may be left: the process's own `fcntl` locks on it end. Not called
    /// in a child between vfork and exec, which has none.
    fn descriptor_closed(&self, file: Handle);
    /// `readv`, `preadv` at an offset.
    fn read(&self, file: Handle, at: Option<u64>, into: &mut [IoSliceMut<'_>]) -> Result<usize>;
    /// `writev`, `pwritev` at an offset.
    fn write(&self, file: Handle, at: Option<u64>, from: &[IoSlice<'_>]) -> Result<usize>;
    /// `copy_file_range`: at offsets, or at the files' own, which move.
    fn copy(&self, from: (Handle, Option<i64>), to: (Handle, Option<i64>), bytes: usize) -> Result<usize>;
    /// `lseek`.
    fn seek(&self, file: Handle, offset: i64, whence: i32) -> Result<u64>;
    /// `getdents64`: entries from the file's position on, until `sink` answers false (that one comes again).
    fn list(&self, file: Handle, sink: &mut dyn FnMut(&Entry<'_>) -> bool) -> Result<()>;
    /// `fsync`; `fdatasync` if `data_only`.
    fn sync(&self, file: Handle, data_only: bool) -> Result<()>;
    /// `sync_file_range`.
    fn sync_range(&self, file: Handle, offset: i64, bytes: i64, flags: u32) -> Result<()>;
    /// `sync`, `syncfs`.
    fn sync_all(&self) -> Result<()>;
    /// `fallocate`.
    fn allocate(&self, file: Handle, mode: i32, offset: i64, bytes: i64) -> Result<()>;
    /// `flock` and `fcntl` locks; may wait.
    fn lock(&self, file: Handle, lock: Lock<'_>) -> Result<()>;
    /// `F_GETFL`.
    fn flags(&self, file: Handle) -> i32;
    /// `F_SETFL`.
    fn set_flags(&self, file: Handle, flags: i32) -> Result<()>;
    /// `statx` with everything.
    fn attributes(&self, target: Target<'_>) -> Result<libc::statx>;
    /// `chmod`, `chown`, `utimensat`, `truncate`.
    fn change(&self, target: Target<'_>, change: Change) -> Result<()>;
    /// `faccessat2`: `R_OK` and so on, and `AT_EACCESS`, `AT_SYMLINK_NOFOLLOW`.
    fn access(&self, place: Place<'_>, mode: i32, flags: i32) -> Result<()>;
    /// `mkdirat`, `mknodat`, `symlinkat`.
    fn make(&self, place: Place<'_>, new: New<'_>) -> Result<()>;
    /// `linkat`.
    fn link(&self, from: Target<'_>, to: Place<'_>) -> Result<()>;
    /// `unlinkat`; `rmdir` if `directory`.
    fn remove(&self, place: Place<'_>, directory: bool) -> Result<()>;
    /// `renameat2`.
    fn rename(&self, from: Place<'_>, to: Place<'_>, flags: u32) -> Result<()>;
    /// `readlinkat`; an empty path reads the link that is open, and is ENOENT for what is no link.
    fn readlink(&self, place: Place<'_>) -> Result<Vec<u8>>;
    /// `statfs`.
    fn space(&self) -> Result<libc::statfs>;
    /// `getxattr`.
    fn xattr(&self, target: Target<'_>, name: &[u8]) -> Result<Vec<u8>>;
    /// `setxattr` with its flags.
    fn set_xattr(&self, target: Target<'_>, name: &[u8], value: &[u8], flags: i32) -> Result<()>;
    /// `listxattr`.
    fn list_xattrs(&self, target: Target<'_>) -> Result<Vec<u8>>;
    /// `removexattr`.
    fn remove_xattr(&self, target: Target<'_>, name: &[u8]) -> Result<()>;
    /// Path of an open file from the mount's root, without a leading slash; empty for the root.
    fn path(&self, file: Handle) -> Result<Vec<u8>>;
    /// What the next program of this process, after exec, takes an open file over by.
    fn export(&self, file: Handle) -> Result<Vec<u8>>;
    /// The other side of it.
    fn import(&self, token: &[u8]) -> Result<Handle>;
    /// A new kernel descriptor of the file on a mount of the kernel's, with the file's flags and offset; the caller closes
    /// it. `Errno::UNMOUNTED` if there is no such mount.
    fn kernel_file(&self, file: Handle) -> Result<i32>;
    /// The same for a shared mapping: with the file's size as it is now, and no page of it from before.
    fn file_to_map(&self, file: Handle) -> Result<i32> {
        let _ = file;
        Err(Errno::UNMOUNTED)
    }
    /// One that the mount keeps as long as the file is open, for a call made at once: by it calls on the file's contents go
    /// through the mount while [`crate::regions`] has the file. `Errno::UNMOUNTED` as above; also for what is no file of
    /// contents, and in a child between vfork and exec.
    fn mapped_file(&self, file: Handle) -> Result<i32> {
        let _ = file;
        Err(Errno::UNMOUNTED)
    }
    /// Whether there is a mount of the kernel's now.
    fn is_mounted(&self) -> bool {
        false
    }
    /// The process is about to have another root: what is needed of the mount of the kernel's is kept.
    fn before_root_change(&self) {}
    /// Where the mount of the kernel's stands, or would stand.
    fn kernel_path(&self) -> Option<&std::ffi::CStr> {
        None
    }
    /// Fences of the update log and bytes written to it, as far as the mount has one.
    fn log_costs(&self) -> (u64, u64) {
        (0, 0)
    }
    /// Before an exec over which some files stay open, which are also exported, and that closes descriptors of others or
    /// of the same.
    fn before_exec(&self, staying: &[Handle], closing: &[Handle]) -> Passage {
        let _ = (staying, closing);
        Passage::default()
    }
    /// The other side of it, before the files are imported.
    fn after_exec(&self, token: &[u8]) {
        let _ = token;
    }
    /// All files were imported.
    fn after_import(&self) {}
    /// A child is about to be made, while files are open.
    fn before_fork(&self) {}
    /// It was made, or was not; in the parent.
    fn after_fork(&self, child: Option<u32>) {
        let _ = child;
    }
    /// The process may act as another user from now on.
    fn user_changed(&self) {}
    /// The process is a forked child: a new client that shares its parent's open files.
    fn after_fork_child(&self);
}
