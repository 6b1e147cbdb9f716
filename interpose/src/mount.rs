//! The interface to the storage of the files: one method for each family of calls, on paths and open files.
//!
//! The caller passes the implementation to [`crate::start::serve`]. Its methods are called on the program's threads,
//! inside (signals wait, and its own system calls go directly to the kernel), from several threads at once. After a
//! fork they are called in a copy of its memory in which only the calling thread continues; there,
//! [`Mount::after_fork_child`] comes before any other call.

use std::io::{IoSlice, IoSliceMut};

/// An error number of Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

impl Errno {
    /// The path leads out of the mount, by an absolute symbolic link or by `..` at the root. `paths` then walks it step
    /// by step. Not a number that the kernel uses.
    pub const LEAVES: Self = Self(4096);
    /// The operation needs a mount in the kernel, and there is none. Not a number that the kernel uses either.
    pub const UNMOUNTED: Self = Self(4097);
    /// The file is a pipe, a socket or a device, which the kernel has to open. Not a number that the kernel uses
    /// either.
    pub const SPECIAL: Self = Self(4098);
}

/// The result of a call of the mount.
pub type Result<T> = std::result::Result<T, Errno>;

/// An open file description of the mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle(pub u64);

/// A path in the mount.
#[derive(Clone, Copy, Debug)]
pub struct MountPath<'a> {
    /// The open directory from which the path starts; `None` is the root.
    pub dir: Option<Handle>,
    /// Path without a leading slash; empty for the directory itself. A slash at its end requires a directory.
    pub path: &'a [u8],
}

/// The object of a call.
#[derive(Clone, Copy, Debug)]
pub enum Target<'a> {
    /// An open file.
    Open(Handle),
    /// A path, and whether a symbolic link at its end is followed.
    Named(MountPath<'a>, bool),
}

/// A change of attributes.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// `chmod`: permission bits.
    Mode(u32),
    /// `chown`: owner and group; `u32::MAX` leaves it.
    Owner(u32, u32),
    /// `utimensat`: access and modification, with `UTIME_NOW` and `UTIME_OMIT` in the nanoseconds.
    Times([libc::timespec; 2]),
    /// `ftruncate` of an open file, `truncate` of a path: size in bytes.
    Size(i64),
    /// `truncate`, also of an open file that a path leads to (`/proc/self/fd/N`), whatever it is open for.
    SizeByPath(i64),
}

/// The object to create.
#[derive(Clone, Copy, Debug)]
pub enum New<'a> {
    /// A directory with this mode.
    Directory(u32),
    /// A file, device, pipe or socket, as for `mknod`: mode with type, device.
    Node(u32, u64),
    /// A symbolic link with this target.
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

/// A request for a lock.
pub enum Lock<'a> {
    /// `flock`, with its operation.
    Whole(i32),
    /// `fcntl`: the command (`F_SETLK`, `F_OFD_GETLK`, ...) and its argument, into which a query stores its answer.
    Range(i32, &'a mut libc::flock),
}

/// Descriptors that files need in the next program, each once however many files need it. They are closed if the exec
/// fails, and in the next program when all files are taken over.
#[derive(Debug, Default)]
pub struct PassedDescriptors(Vec<(u64, i32)>);

impl PassedDescriptors {
    /// The number of the descriptor with this key, which the first request makes.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn once(&mut self, key: u64, make: impl FnOnce() -> Result<i32>) -> Result<i32> {
        if let Some((_, fd)) = self.0.iter().find(|(other, _)| *other == key) {
            return Ok(*fd);
        }
        let fd = make()?;
        self.0.push((key, fd));
        Ok(fd)
    }

    /// All numbers.
    pub fn numbers(&self) -> impl Iterator<Item = i32> {
        self.0.iter().map(|(_, fd)| *fd)
    }
}

/// State for the next program, in addition to its files.
#[derive(Debug, Default)]
pub struct ExecHandover {
    /// For [`Mount::after_exec`].
    pub token: Vec<u8>,
    /// A descriptor that the next program inherits; closed if the exec fails.
    pub descriptor: Option<i32>,
}

/// The owner of the `fcntl` locks of a child between vfork and exec, which has its parent's memory and none of its locks.
#[derive(Clone, Copy, Debug)]
pub struct ChildLocks {
    /// A random number.
    pub owner: u64,
    /// The child, as it sees itself.
    pub process: u32,
}

/// The storage of the files. Each method has the result of the system call in its comment. Methods that take a path may
/// return `Errno::LEAVES`.
pub trait Mount: Sync {
    /// `openat2`: flags as there (also `O_PATH`), mode before the umask, which the mount applies as the kernel would, here
    /// and in `reopen` and `make`. Of the restrictions, only
    /// `RESOLVE_NO_SYMLINKS`, `RESOLVE_BENEATH` and `RESOLVE_IN_ROOT` are passed; with one of the last two the walk
    /// never leaves the mount.
    fn open(&self, place: MountPath<'_>, flags: i32, mode: u32, resolve: u64) -> Result<Handle>;
    /// The same for the inode of an open file, whatever names it has (`/proc/self/fd/N`). Of the flags, `O_EXCL` applies
    /// only to `O_TMPFILE`.
    fn reopen(&self, file: Handle, flags: i32, mode: u32) -> Result<Handle>;
    /// Ends an open file. Also called in a child between vfork and exec.
    fn close(&self, file: Handle);
    /// A descriptor of the file was closed, and others may be left: the process's own `fcntl` locks on the file end. In a
    /// child between vfork and exec these are the child's.
    fn descriptor_closed(&self, file: Handle);
    /// `readv`, `preadv` at an offset.
    fn read(&self, file: Handle, at: Option<u64>, into: &mut [IoSliceMut<'_>]) -> Result<usize>;
    /// `writev`, `pwritev` at an offset; `pwritev2` with the flags `RWF_APPEND` or `RWF_NOAPPEND`.
    fn write(&self, file: Handle, at: Option<u64>, from: &[IoSlice<'_>], flags: i32) -> Result<usize>;
    /// `copy_file_range`: at the given offsets, or at the files' own, which move.
    fn copy(&self, from: (Handle, Option<i64>), to: (Handle, Option<i64>), bytes: usize) -> Result<usize>;
    /// `lseek`.
    fn seek(&self, file: Handle, offset: i64, whence: i32) -> Result<u64>;
    /// `getdents64`: entries from the file's position on, until `sink` returns false; that entry is listed again later.
    fn list(&self, file: Handle, sink: &mut dyn FnMut(&Entry<'_>) -> bool) -> Result<()>;
    /// `fsync`; `fdatasync` if `data_only`.
    fn sync(&self, file: Handle, data_only: bool) -> Result<()>;
    /// `sync_file_range`.
    fn sync_range(&self, file: Handle, offset: i64, bytes: i64, flags: u32) -> Result<()>;
    /// The part of `msync` that the kernel does not know of: all earlier calls of the process.
    fn sync_calls(&self) -> Result<()>;
    /// `syncfs`; `sync` if the program gets no answer (`untold`).
    fn sync_all(&self, untold: bool) -> Result<()>;
    /// `fallocate`.
    fn allocate(&self, file: Handle, mode: i32, offset: i64, bytes: i64) -> Result<()>;
    /// `flock` and `fcntl` locks; may wait for the lock. A child between vfork and exec is an owner of its own.
    fn lock(&self, file: Handle, lock: Lock<'_>) -> Result<()>;
    /// `F_GETFL`.
    fn flags(&self, file: Handle) -> i32;
    /// `F_SETFL`.
    fn set_flags(&self, file: Handle, flags: i32) -> Result<()>;
    /// `statx` with all attributes.
    fn attributes(&self, target: Target<'_>) -> Result<libc::statx>;
    /// `chmod`, `chown`, `utimensat`, `truncate`.
    fn change(&self, target: Target<'_>, change: Change) -> Result<()>;
    /// `faccessat2`: `R_OK` and so on, and `AT_EACCESS`.
    fn access(&self, target: Target<'_>, mode: i32, flags: i32) -> Result<()>;
    /// `mkdirat`, `mknodat`, `symlinkat`.
    fn make(&self, place: MountPath<'_>, new: New<'_>) -> Result<()>;
    /// Whether the process opened the file itself and has the same credentials since then, or is root: the kernel
    /// requires it of a descriptor that `linkat` gets instead of a path.
    fn is_opened_by_caller(&self, file: Handle) -> Result<bool> {
        let _ = file;
        Ok(true)
    }
    /// `linkat`.
    fn link(&self, from: Target<'_>, to: MountPath<'_>) -> Result<()>;
    /// `unlinkat`; `rmdir` if `directory`.
    fn remove(&self, place: MountPath<'_>, directory: bool) -> Result<()>;
    /// `renameat2`.
    fn rename(&self, from: MountPath<'_>, to: MountPath<'_>, flags: u32) -> Result<()>;
    /// `readlinkat`; an empty path reads the link that is open, and is ENOENT if the file is no link.
    fn readlink(&self, place: MountPath<'_>) -> Result<Vec<u8>>;
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
    /// A token by which the next program of this process, after exec, takes over an open file.
    fn export(&self, file: Handle, passed: &mut PassedDescriptors) -> Result<Vec<u8>>;
    /// Takes over an open file by its token.
    fn import(&self, token: &[u8]) -> Result<Handle>;
    /// Opens a kernel descriptor of the file on the node's mount, with the file's flags and offset; the caller closes
    /// it. `Errno::UNMOUNTED` if there is no mount in the kernel.
    fn kernel_file(&self, file: Handle) -> Result<i32>;
    /// The same for a shared mapping: the kernel has the file's current size, and no older page of it.
    fn file_to_map(&self, file: Handle) -> Result<i32> {
        let _ = file;
        Err(Errno::UNMOUNTED)
    }
    /// A kernel descriptor that the mount keeps as long as the file is open, for a call that follows at once. Through
    /// it, calls on the file's contents go to the node's mount while `crate::regions` contains the file.
    /// `Errno::UNMOUNTED` as above; also for a file that is not regular, and in a child between vfork and exec.
    fn mapped_file(&self, file: Handle) -> Result<i32> {
        let _ = file;
        Err(Errno::UNMOUNTED)
    }
    /// Whether the node's tree is mounted in the kernel now.
    fn is_mounted(&self) -> bool {
        false
    }
    /// The process is about to change its root: the mount keeps everything of the kernel's mount that it will need.
    fn before_root_change(&self) {}
    /// The mount point of the node's tree, whether it is mounted or not.
    fn kernel_path(&self) -> Option<&std::ffi::CStr> {
        None
    }
    /// Fences of the update log and bytes written to it, if the mount has one.
    fn log_costs(&self) -> (u64, u64) {
        (0, 0)
    }
    /// Called before an exec. The files `staying` stay open, and are also exported; the exec closes descriptors of the
    /// files `closing`, which may be the same ones.
    fn before_exec(&self, staying: &[Handle], closing: &[Handle]) -> ExecHandover {
        let _ = (staying, closing);
        ExecHandover::default()
    }
    /// Takes over the token of [`Mount::before_exec`], before the files are imported.
    fn after_exec(&self, token: &[u8]) {
        let _ = token;
    }
    /// Called after all files were imported.
    fn after_import(&self) {}
    /// Called before a child is created, while files are open.
    fn before_fork(&self) {}
    /// Called in the parent after the child was created; `None` if that failed.
    fn after_fork(&self, child: Option<u32>) {
        let _ = child;
    }
    /// Called in the parent after a child has left its memory that had locks, or has connected the client of the mount: the
    /// locks end, unless the child goes on with them in another program, and the parent connects itself.
    fn child_left(&self, locks: Option<ChildLocks>, has_connected: bool) {
        let _ = (locks, has_connected);
    }
    /// The process may act as another user from now on.
    fn user_changed(&self) {}
    /// The process is a forked child: from now on a new client, which shares its parent's open files.
    fn after_fork_child(&self);
}
