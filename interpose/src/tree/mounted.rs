//! Files of the tree on the node's mount, for operations of the kernel on their contents: files that are mapped shared,
//! and from then on all calls on their contents. The process opens the file on the mount by a right from SharedFS for a
//! file that it has open ([`format::pass`]), so the result is independent of names, modes and the process's root. The
//! kernel's descriptor of a file on the mount is called the *twin* of the open file. No thread of this process serves
//! the mount.
//!
//! A reader at the mount also sees data that is still in this process's update log, as any other process does, because
//! the gateway reads under a lease. Locks stay in the library, and so do the offset and the flags, which other
//! processes share.

use super::answers::{DEVICE_MINOR, errno_of};
use super::{Open, Tree, given, open_of};
use crate::calls::sizes;
use crate::descriptors::Internal;
use crate::limits;
use crate::local::local;
use crate::memory::TRANSFER_BYTES_MAX;
use crate::mount::{Errno, Handle, Mount, Result, Target};
use crate::{raw, real, regions, slots};
use format::pass::{FOLDER, Opening, PassName};
use format::record::FileType;
use std::ffi::{CStr, CString};
use std::io::{IoSlice, IoSliceMut};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use vfs::file::OpenState;

/// Flags of an open file that its twin also has.
const KEPT_FLAGS: i32 = libc::O_ACCMODE | libc::O_APPEND | libc::O_SYNC | libc::O_DSYNC | libc::O_DIRECT;
/// Limit of requests for a right: a right ends when its daemon dies.
const TRIES: u32 = 3;

/// Bytes that are copied in one step.
const PIECE_BYTES: usize = 128 << 10;

/// The mount point of the node's tree.
pub(super) struct MountPoint {
    root: CString,
    folder: CString,
    /// Slot of a descriptor of the folder, plus one, for a process that has changed its root; 0 for none.
    kept: AtomicU32,
}

impl MountPoint {
    pub fn new(root: &Path) -> Option<Self> {
        let root = root.as_os_str().as_bytes();
        let folder = CString::new([root, b"/", FOLDER].concat()).ok()?;
        Some(Self { root: CString::new(root).ok()?, folder, kept: AtomicU32::new(0) })
    }

    fn open(&self) -> Result<i32> {
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        limits::with_room(|_| raw::open_at(libc::AT_FDCWD, &self.folder, flags, 0))
    }

    /// Whether the tree is mounted now.
    pub fn is_there(&self) -> bool {
        let kept = self.kept.load(Ordering::Relaxed) != 0;
        kept || self.open().map(raw::close).is_ok()
    }

    /// Keeps a descriptor of the folder, because the path leads elsewhere after a change of the root.
    pub fn keep(&self) {
        if self.kept.load(Ordering::Relaxed) != 0 || local().borrowed().is_some() {
            return;
        }
        let Ok(kept) = self.open().and_then(Internal::keep) else { return };
        let slot = kept.slot() + 1;
        if self.kept.compare_exchange(0, slot, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            kept.close();
        }
    }

    /// Opens the file for a name in the folder.
    fn open_at(&self, name: &str, flags: i32) -> Result<i32> {
        let kept = self.kept.load(Ordering::Relaxed).checked_sub(1).map(Internal::from_slot);
        let path = match kept {
            Some(_) => CString::new(name),
            None => CString::new([self.folder.to_bytes(), b"/", name.as_bytes()].concat()),
        };
        let path = path.map_err(|_| Errno::UNMOUNTED)?;
        let folder = kept.map_or(libc::AT_FDCWD, Internal::number);
        limits::with_room(|_| raw::open_at(folder, &path, flags, 0))
    }

    pub fn root(&self) -> &CStr {
        &self.root
    }
}

/// The twin of an open file.
#[derive(Default)]
pub(super) struct Twin {
    /// Slot of its descriptor, plus one; 0 before the first use.
    slot: AtomicU32,
    /// The mount is gone, so the calls go through the library.
    lost: AtomicBool,
    /// Twice the generation of the regions for which the use was determined, plus one if calls go through the twin.
    found: AtomicU64,
}

impl Twin {
    fn number(&self) -> Option<i32> {
        // Acquire pairs with the Release of [`Tree::twin`].
        self.slot.load(Ordering::Acquire).checked_sub(1).map(|slot| Internal::from_slot(slot).number())
    }

    /// Closes the twin with the file.
    pub fn end(&self) {
        if let Some(slot) = self.slot.swap(0, Ordering::AcqRel).checked_sub(1) {
            Internal::from_slot(slot).close();
        }
    }

    /// Whether the file is mapped.
    fn is_in_use(&self, inode: u64) -> bool {
        let generation = regions::generation();
        if generation == 0 {
            return false;
        }
        let found = self.found.load(Ordering::Relaxed);
        if found >> 1 == generation {
            return found & 1 == 1;
        }
        let mapped = regions::has(inode);
        self.found.store(generation << 1 | u64::from(mapped), Ordering::Relaxed);
        mapped
    }
}

impl Tree {
    /// Opens the file on the mount again. The kernel checks the file's present mode when it opens a file that it has
    /// looked up; it does not if it is asked to create the file.
    pub(super) fn open_twin(&self, handle: &Handle) -> Result<i32> {
        let place = self.mounted.as_ref().ok_or(Errno::UNMOUNTED)?;
        let (open, flags) = (open_of(handle), self.file(handle)?.flags());
        let flags = flags & KEPT_FLAGS | libc::O_CLOEXEC | libc::O_NOFOLLOW;
        let mut refused = false;
        for _ in 0..TRIES {
            let access = given::access_of(open.flags);
            let pass = self.client()?.engine().pass(open.inode, access).map_err(errno_of)?;
            let opening = if refused { Opening::Create } else { pass.opening };
            let create = if refused { libc::O_CREAT } else { 0 };
            match place.open_at(&PassName { opening, ..pass }.to_string(), flags | create) {
                Ok(fd) => return Ok(fd),
                // The mode does not permit the user to open the file, the daemon that has issued the right is gone, or
                // another process has used up the right.
                Err(Errno(libc::EACCES | libc::ESTALE)) => refused = true,
                Err(Errno(libc::ENOENT | libc::ENOTDIR | libc::ENOTCONN | libc::ECONNABORTED)) => {
                    return Err(Errno::UNMOUNTED);
                }
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno(libc::EACCES))
    }

    /// The descriptor of the twin, which the first call opens.
    pub(super) fn twin(&self, handle: &Handle) -> Result<i32> {
        let open = open_of(handle);
        if open.twin.lost.load(Ordering::Relaxed) {
            return Err(Errno::UNMOUNTED);
        }
        if let Some(number) = open.twin.number() {
            return Ok(number);
        }
        if self.file(handle)?.file_type() != FileType::Regular || open.flags & libc::O_PATH != 0 {
            return Err(Errno::UNMOUNTED);
        }
        // A child in borrowed memory has its own descriptors, but the memory of its parent.
        if local().borrowed().is_some() {
            return Err(Errno::UNMOUNTED);
        }
        let fresh = Internal::keep(self.open_twin(handle)?)?;
        match open.twin.slot.compare_exchange(0, fresh.slot() + 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(fresh.number()),
            Err(other) => {
                fresh.close();
                Ok(Internal::from_slot(other - 1).number())
            }
        }
    }

    /// The twin's descriptor, if calls on the file's contents go through it. If the mount is gone, they go through the
    /// library.
    #[inline]
    pub(super) fn through_mount(&self, handle: &Handle) -> Option<i32> {
        let open = open_of(handle);
        if real::is_on() || open.twin.is_in_use(open.inode.get()) { self.used_twin(handle) } else { None }
    }

    #[cold]
    fn used_twin(&self, handle: &Handle) -> Option<i32> {
        self.twin(handle).ok()
    }

    /// Makes a call through the mount if it has to go there; `None` if the library has to serve it.
    #[inline]
    pub(super) fn by_twin<T>(
        &self,
        handle: &Handle,
        act: impl FnOnce(i32) -> Result<T>,
    ) -> Option<Result<T>> {
        let fd = self.through_mount(handle)?;
        match act(fd) {
            Err(Errno(libc::ENOTCONN | libc::ECONNABORTED)) => {
                open_of(handle).twin.lost.store(true, Ordering::Relaxed);
                None
            }
            done => Some(done),
        }
    }

    /// `readv`, `preadv`.
    #[cold]
    pub(super) fn read_twin(
        &self,
        file: &Handle,
        fd: i32,
        at: Option<u64>,
        into: &mut [IoSliceMut<'_>],
    ) -> Result<usize> {
        let vector = (into.as_mut_ptr() as u64, into.len() as u64);
        at_offset(open_of(file), at, |offset| transfer(libc::SYS_preadv, fd, vector, offset))
    }

    /// `copy_file_range` where one of the files goes through the mount.
    #[cold]
    pub(super) fn copy_by_pieces(
        &self,
        from: (Handle, Option<i64>),
        to: (Handle, Option<i64>),
        bytes: usize,
    ) -> Result<usize> {
        let bytes = self.bytes_to_copy(from, to, bytes)?;
        let mut buffer = vec![0; bytes.min(PIECE_BYTES)];
        let at = |offset: Option<i64>, done: usize| offset.map(|offset| offset as u64 + done as u64);
        let mut done = 0;
        while done < bytes {
            let piece = buffer.len().min(bytes - done);
            let read = self.read(from.0, at(from.1, done), &mut [IoSliceMut::new(&mut buffer[..piece])]);
            let written = match &read {
                Ok(read) => self.write(to.0, at(to.1, done), &[IoSlice::new(&buffer[..*read])], 0),
                Err(errno) => Err(*errno),
            };
            let left = read.unwrap_or(0) - written.unwrap_or(0);
            if left > 0 && from.1.is_none() {
                self.seek(from.0, -(left as i64), libc::SEEK_CUR)?;
            }
            match written {
                Err(errno) if done == 0 => return Err(errno),
                written => done += written.unwrap_or(0),
            }
            let is_over = read.is_ok_and(|read| read < piece);
            if is_over || left > 0 || written.is_ok_and(|written| written == 0) || written.is_err() {
                break;
            }
        }
        Ok(done)
    }

    /// How much such a copy copies: up to where the source ends now, also if the copy extends it because both are one file.
    fn bytes_to_copy(
        &self,
        from: (Handle, Option<i64>),
        to: (Handle, Option<i64>),
        bytes: usize,
    ) -> Result<usize> {
        let (source, target) = (self.file(&from.0)?, self.file(&to.0)?);
        let reads = source.flags() & libc::O_ACCMODE != libc::O_WRONLY;
        let writes = target.flags() & libc::O_ACCMODE != libc::O_RDONLY;
        if !reads || !writes || target.flags() & libc::O_APPEND != 0 {
            return Err(Errno(libc::EBADF));
        }
        let place = |(file, offset): (Handle, Option<i64>)| match offset {
            Some(offset) => Ok(offset as u64),
            None => self.seek(file, 0, libc::SEEK_CUR),
        };
        let (start, end) = (place(from)?, place(to)?);
        if [start, end].iter().any(|place| place.checked_add(bytes as u64).is_none()) {
            return Err(Errno(libc::EOVERFLOW));
        }
        let left = self.attributes(Target::Open(from.0))?.stx_size.saturating_sub(start);
        let bytes = bytes.min(TRANSFER_BYTES_MAX).min(usize::try_from(left).unwrap_or(usize::MAX));
        if source.inode() == target.inode() && start.abs_diff(end) < bytes as u64 {
            return Err(Errno(libc::EINVAL));
        }
        Ok(bytes)
    }

    /// `writev`, `pwritev`; at the end of the file if it has `O_APPEND`, or as the flags of `pwritev2` say.
    #[cold]
    pub(super) fn write_twin(
        &self,
        file: &Handle,
        fd: i32,
        at: Option<u64>,
        from: &[IoSlice<'_>],
        write_flags: i32,
    ) -> Result<usize> {
        let appends = sizes::appends(self.file(file)?.flags(), write_flags);
        let appends = if appends { libc::O_APPEND } else { 0 };
        let flags = raw::fcntl(fd, libc::F_GETFL, 0)? as i32;
        if flags & libc::O_APPEND != appends {
            raw::fcntl(fd, libc::F_SETFL, (flags & !libc::O_APPEND | appends) as u64)?;
        }
        let vector = (from.as_ptr() as u64, from.len() as u64);
        let write = |offset| transfer(libc::SYS_pwritev, fd, vector, offset);
        if appends == 0 || at.is_some() {
            return at_offset(open_of(file), at, write);
        }
        let mut written = Ok(0);
        open_of(file).slot.with_offset(&mut |offset| {
            written = write(*offset);
            if let (Ok(_), Ok(status)) = (&written, status_of_twin(fd)) {
                *offset = status.stx_size;
            }
        });
        written
    }
}

/// Reads or writes at the given offset, or at the file's own, which moves.
fn at_offset(open: &Open, at: Option<u64>, act: impl Fn(u64) -> Result<usize>) -> Result<usize> {
    if let Some(offset) = at {
        return act(offset);
    }
    let mut done = Ok(0);
    open.slot.with_offset(&mut |offset| {
        done = act(*offset);
        *offset += done.unwrap_or(0) as u64;
    });
    done
}

fn transfer(call: i64, fd: i32, (vector, count): (u64, u64), offset: u64) -> Result<usize> {
    // SAFETY: the slices are valid memory, and writable if the call reads into them; the kernel checks them too.
    unsafe { raw::try_call(call, &[raw::number(fd), vector, count, offset, 0]) }.map(|bytes| bytes as usize)
}

/// `lseek` to a position that depends on the contents.
#[cold]
pub(super) fn seek_twin(place: &slots::FileSlot, fd: i32, offset: i64, whence: i32) -> Result<u64> {
    let mut moved = Ok(0);
    place.with_offset(&mut |own| {
        moved = on_twin(libc::SYS_lseek, fd, &[offset as u64, whence as u64]);
        *own = moved.unwrap_or(*own);
    });
    moved
}

/// A call on a twin whose arguments are numbers.
pub(super) fn on_twin(call: i64, fd: i32, arguments: &[u64]) -> Result<u64> {
    let mut all = [0; 6];
    all[0] = raw::number(fd);
    all[1..=arguments.len()].copy_from_slice(arguments);
    // SAFETY: none of the arguments is a pointer.
    unsafe { raw::try_call(call, &all) }
}

/// Attributes with the same device number as the library gives.
pub(super) fn status_of_twin(fd: i32) -> Result<libc::statx> {
    // SAFETY: a structure of integers.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    let mask = u64::from(libc::STATX_BASIC_STATS | libc::STATX_BTIME);
    let flags = libc::AT_EMPTY_PATH as u64;
    let arguments = [raw::number(fd), c"".as_ptr() as u64, flags, mask, (&raw mut status) as u64];
    // SAFETY: path and structure live across the call.
    unsafe { raw::try_call(libc::SYS_statx, &arguments) }?;
    (status.stx_dev_major, status.stx_dev_minor) = (0, DEVICE_MINOR);
    Ok(status)
}
