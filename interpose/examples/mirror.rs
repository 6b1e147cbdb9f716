//! The library of the tests: the shipped crate over a mount that mirrors a folder of the kernel's,
//! `HEARTH_MIRROR_ROOT`, at `HEARTH_AT`. Open files are kernel descriptors of the library, so processes really share
//! them after fork, vfork and exec, and the tests can compare the results of programs with the folder itself.

use hearth::descriptors::Internal;
use hearth::mount::{
    Change, Entry, Errno, Handle, Lock, Mount, MountPath, New, PassedDescriptors, Result, Target,
};
use hearth::raw;
use std::ffi::CString;
use std::io::{IoSlice, IoSliceMut};
use std::os::unix::ffi::OsStringExt;
use std::sync::OnceLock;

struct Mirror {
    root: Internal,
    path: Vec<u8>,
}

/// The attribute by which a program asks whether it counts as single-threaded.
const ALONE: &[u8] = b"user.hearth.alone";

static MIRROR: OnceLock<Mirror> = OnceLock::new();

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    let (Some(at), Some(root)) = (std::env::var_os("HEARTH_AT"), std::env::var_os("HEARTH_MIRROR_ROOT"))
    else {
        return;
    };
    let root = root.into_vec();
    let path = CString::new(root.clone()).expect("an environment variable has no NUL");
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let Ok(fd) = raw::open_at(libc::AT_FDCWD, &path, flags, 0) else { return };
    let Ok(kept) = Internal::keep(fd) else { return };
    let mirror = MIRROR.get_or_init(|| Mirror { root: kept, path: root });
    hearth::start::serve(mirror, &at.into_vec()).expect("the test gives a good path");
}

/// A kernel descriptor for the length of a call.
struct Temporary(i32);

impl Drop for Temporary {
    fn drop(&mut self) {
        raw::close(self.0);
    }
}

fn number(handle: Handle) -> u64 {
    raw::number(descriptor(handle))
}

fn descriptor(handle: Handle) -> i32 {
    Internal::from_slot(handle.0 as u32).number()
}

fn text(bytes: &[u8]) -> Result<CString> {
    CString::new(bytes).map_err(|_| Errno(libc::EINVAL))
}

/// A system call whose pointers refer to memory of functions in this file.
fn kernel(call: i64, arguments: &[u64]) -> Result<u64> {
    // SAFETY: every caller here passes pointers to memory that lives across the call.
    unsafe { raw::try_call(call, arguments) }
}

fn proc_path(fd: i32) -> CString {
    CString::new(format!("/proc/self/fd/{fd}")).expect("digits have no NUL")
}

impl Mirror {
    fn dir(&self, place: &MountPath<'_>) -> i32 {
        place.dir.map_or(self.root.number(), descriptor)
    }

    /// Opens a file below the root; `LEAVES` if the path leaves it.
    fn open_beneath(&self, dir: i32, path: &[u8], flags: i32, mode: u32) -> Result<i32> {
        self.open_within(dir, path, (flags, mode), 0)
    }

    /// The same, by a walk with further restrictions.
    fn open_within(&self, dir: i32, path: &[u8], (flags, mode): (i32, u32), resolve: u64) -> Result<i32> {
        let path = text(if path.is_empty() { b"." } else { path })?;
        let flags = (flags | libc::O_CLOEXEC) as u32;
        let confined = resolve & (libc::RESOLVE_BENEATH | libc::RESOLVE_IN_ROOT) != 0;
        let how = [u64::from(flags), mode.into(), resolve | if confined { 0 } else { libc::RESOLVE_BENEATH }];
        let arguments =
            [raw::number(dir), path.as_ptr() as u64, how.as_ptr() as u64, size_of_val(&how) as u64];
        match kernel(libc::SYS_openat2, &arguments) {
            Err(Errno(libc::EXDEV)) if !confined => Err(Errno::LEAVES),
            other => other.map(|fd| fd as i32),
        }
    }

    /// The directory of a path, and the name in it.
    fn parent(&self, place: &MountPath<'_>) -> Result<(Temporary, CString)> {
        let trimmed = place.path.iter().rposition(|byte| *byte != b'/').map_or(0, |end| end + 1);
        let start = place.path[..trimmed].iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
        let name = if trimmed == 0 { b"." } else { &place.path[start..] };
        if name.strip_suffix(b"/").unwrap_or(name) == b".." {
            return Err(Errno::LEAVES);
        }
        let flags = libc::O_PATH | libc::O_DIRECTORY;
        Ok((Temporary(self.open_beneath(self.dir(place), &place.path[..start], flags, 0)?), text(name)?))
    }

    /// The inode of a target.
    fn node(&self, target: Target<'_>) -> Result<Temporary> {
        match target {
            Target::Open(file) => {
                Ok(Temporary(raw::fcntl(descriptor(file), libc::F_DUPFD_CLOEXEC, 3)? as i32))
            }
            Target::Named(place, follow) => {
                let itself = if follow { 0 } else { libc::O_NOFOLLOW };
                self.open_beneath(self.dir(&place), place.path, libc::O_PATH | itself, 0).map(Temporary)
            }
        }
    }

    fn keep(fd: i32) -> Result<Handle> {
        Ok(Handle(Internal::keep(fd)?.slot().into()))
    }
}

const BOTH: u64 = libc::AT_EMPTY_PATH as u64;

/// The empty path: the descriptor itself.
fn nothing() -> u64 {
    c"".as_ptr() as u64
}

impl Mount for Mirror {
    fn open(&self, place: MountPath<'_>, flags: i32, mode: u32, resolve: u64) -> Result<Handle> {
        // A descriptor of the mirror needs two numbers until it is at its final place. Without them, nothing is
        // created.
        let root = self.root.number();
        let kept = hearth::descriptors::move_up(root, true)?;
        let opened = raw::fcntl(root, libc::F_DUPFD_CLOEXEC, 3);
        raw::close(kept);
        raw::close(opened? as i32);
        Self::keep(self.open_within(self.dir(&place), place.path, (flags, mode), resolve)?)
    }

    fn reopen(&self, file: Handle, flags: i32, mode: u32) -> Result<Handle> {
        let path =
            CString::new(format!("/proc/self/fd/{}", descriptor(file))).map_err(|_| Errno(libc::EINVAL))?;
        Self::keep(raw::open_at(libc::AT_FDCWD, &path, flags | libc::O_CLOEXEC, mode)?)
    }

    fn close(&self, file: Handle) {
        Internal::from_slot(file.0 as u32).close();
    }

    fn descriptor_closed(&self, file: Handle) {
        if let Ok(copy) = raw::fcntl(descriptor(file), libc::F_DUPFD_CLOEXEC, 3) {
            raw::close(copy as i32);
        }
    }

    fn read(&self, file: Handle, at: Option<u64>, into: &mut [IoSliceMut<'_>]) -> Result<usize> {
        let vector = [number(file), into.as_mut_ptr() as u64, into.len() as u64, at.unwrap_or(0), 0];
        let call = if at.is_some() { libc::SYS_preadv } else { libc::SYS_readv };
        kernel(call, &vector).map(|bytes| bytes as usize)
    }

    fn write(&self, file: Handle, at: Option<u64>, from: &[IoSlice<'_>], flags: i32) -> Result<usize> {
        assert!(std::env::var_os("HEARTH_MIRROR_PANIC").is_none(), "a panic that the test asked for");
        let at = at.unwrap_or(u64::MAX);
        let vector = [number(file), from.as_ptr() as u64, from.len() as u64, at, 0, flags as u64];
        kernel(libc::SYS_pwritev2, &vector).map(|bytes| bytes as usize)
    }

    fn copy(&self, from: (Handle, Option<i64>), to: (Handle, Option<i64>), bytes: usize) -> Result<usize> {
        let (mut from_offset, mut to_offset) = (from.1, to.1);
        let at =
            |offset: &mut Option<i64>| offset.as_mut().map_or(0, |offset| std::ptr::from_mut(offset) as u64);
        let (read, write) = (at(&mut from_offset), at(&mut to_offset));
        let arguments = [number(from.0), read, number(to.0), write, bytes as u64, 0];
        kernel(libc::SYS_copy_file_range, &arguments).map(|bytes| bytes as usize)
    }

    fn seek(&self, file: Handle, offset: i64, whence: i32) -> Result<u64> {
        kernel(libc::SYS_lseek, &[number(file), offset as u64, whence as u64])
    }

    fn list(&self, file: Handle, sink: &mut dyn FnMut(&Entry<'_>) -> bool) -> Result<()> {
        let mut buffer = vec![0u8; 16384];
        loop {
            let mut position = self.seek(file, 0, libc::SEEK_CUR)?;
            let arguments = [number(file), buffer.as_mut_ptr() as u64, buffer.len() as u64];
            let bytes = kernel(libc::SYS_getdents64, &arguments)? as usize;
            if bytes == 0 {
                return Ok(());
            }
            let mut rest = &buffer[..bytes];
            while !rest.is_empty() {
                let word = |at: usize| u64::from_ne_bytes(rest[at..at + 8].try_into().expect("eight bytes"));
                let length = usize::from(u16::from_ne_bytes([rest[16], rest[17]]));
                let name = rest[19..length].split(|byte| *byte == 0).next().unwrap_or_default();
                let entry = Entry { inode: word(0), next: word(8), kind: rest[18], name };
                if !sink(&entry) {
                    return self.seek(file, position as i64, libc::SEEK_SET).map(|_| ());
                }
                position = entry.next;
                rest = &rest[length..];
            }
        }
    }

    fn sync(&self, file: Handle, data_only: bool) -> Result<()> {
        let call = if data_only { libc::SYS_fdatasync } else { libc::SYS_fsync };
        kernel(call, &[number(file)]).map(|_| ())
    }

    fn sync_range(&self, file: Handle, offset: i64, bytes: i64, flags: u32) -> Result<()> {
        let arguments = [number(file), offset as u64, bytes as u64, flags.into()];
        kernel(libc::SYS_sync_file_range, &arguments).map(|_| ())
    }

    fn sync_calls(&self) -> Result<()> {
        Ok(())
    }

    fn sync_all(&self, _untold: bool) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, file: Handle, mode: i32, offset: i64, bytes: i64) -> Result<()> {
        kernel(libc::SYS_fallocate, &[number(file), mode as u64, offset as u64, bytes as u64]).map(|_| ())
    }

    fn lock(&self, file: Handle, lock: Lock<'_>) -> Result<()> {
        match lock {
            Lock::Whole(operation) => kernel(libc::SYS_flock, &[number(file), operation as u64]),
            Lock::Range(command, range) => {
                kernel(libc::SYS_fcntl, &[number(file), command as u64, std::ptr::from_mut(range) as u64])
            }
        }
        .map(|_| ())
    }

    fn flags(&self, file: Handle) -> i32 {
        raw::fcntl(descriptor(file), libc::F_GETFL, 0).map_or(0, |flags| flags as i32)
    }

    fn set_flags(&self, file: Handle, flags: i32) -> Result<()> {
        raw::fcntl(descriptor(file), libc::F_SETFL, flags as u64).map(|_| ())
    }

    fn attributes(&self, target: Target<'_>) -> Result<libc::statx> {
        // SAFETY: a structure of integers.
        let mut status: libc::statx = unsafe { std::mem::zeroed() };
        let node = self.node(target)?;
        let mask = u64::from(libc::STATX_BASIC_STATS | libc::STATX_BTIME);
        kernel(libc::SYS_statx, &[raw::number(node.0), nothing(), BOTH, mask, (&raw mut status) as u64])?;
        Ok(status)
    }

    fn change(&self, target: Target<'_>, change: Change) -> Result<()> {
        if let (Target::Open(file), Change::Size(size)) = (target, change) {
            return kernel(libc::SYS_ftruncate, &[number(file), size as u64]).map(|_| ());
        }
        let node = self.node(target)?;
        let path = proc_path(node.0);
        let here = raw::number(libc::AT_FDCWD);
        match change {
            Change::Mode(mode) => kernel(libc::SYS_fchmodat, &[here, path.as_ptr() as u64, mode.into()]),
            Change::Owner(uid, gid) => {
                kernel(libc::SYS_fchownat, &[raw::number(node.0), nothing(), uid.into(), gid.into(), BOTH])
            }
            Change::Times(times) => {
                kernel(libc::SYS_utimensat, &[raw::number(node.0), nothing(), times.as_ptr() as u64, BOTH])
            }
            Change::Size(size) | Change::SizeByPath(size) => {
                kernel(libc::SYS_truncate, &[path.as_ptr() as u64, size as u64])
            }
        }
        .map(|_| ())
    }

    fn access(&self, target: Target<'_>, mode: i32, flags: i32) -> Result<()> {
        let node = self.node(target)?;
        let flags = (flags & libc::AT_EACCESS) as u64 | BOTH;
        kernel(libc::SYS_faccessat2, &[raw::number(node.0), nothing(), mode as u64, flags]).map(|_| ())
    }

    fn make(&self, place: MountPath<'_>, new: New<'_>) -> Result<()> {
        let (dir, name) = self.parent(&place)?;
        let (dir, name) = (raw::number(dir.0), name.as_ptr() as u64);
        match new {
            New::Directory(mode) => kernel(libc::SYS_mkdirat, &[dir, name, mode.into()]),
            New::Node(mode, device) => kernel(libc::SYS_mknodat, &[dir, name, mode.into(), device]),
            New::Link(target) => kernel(libc::SYS_symlinkat, &[text(target)?.as_ptr() as u64, dir, name]),
        }
        .map(|_| ())
    }

    fn link(&self, from: Target<'_>, to: MountPath<'_>) -> Result<()> {
        let node = self.node(from)?;
        let (dir, name) = self.parent(&to)?;
        let path = proc_path(node.0);
        let here = raw::number(libc::AT_FDCWD);
        let follow = libc::AT_SYMLINK_FOLLOW as u64;
        let arguments = [here, path.as_ptr() as u64, raw::number(dir.0), name.as_ptr() as u64, follow];
        kernel(libc::SYS_linkat, &arguments).map(|_| ())
    }

    fn remove(&self, place: MountPath<'_>, directory: bool) -> Result<()> {
        let (dir, name) = self.parent(&place)?;
        let flags = if directory { libc::AT_REMOVEDIR as u64 } else { 0 };
        kernel(libc::SYS_unlinkat, &[raw::number(dir.0), name.as_ptr() as u64, flags]).map(|_| ())
    }

    fn rename(&self, from: MountPath<'_>, to: MountPath<'_>, flags: u32) -> Result<()> {
        let (from_dir, from) = self.parent(&from)?;
        let (to_dir, to) = self.parent(&to)?;
        let (from_dir, to_dir) = (raw::number(from_dir.0), raw::number(to_dir.0));
        let arguments = [from_dir, from.as_ptr() as u64, to_dir, to.as_ptr() as u64, flags.into()];
        kernel(libc::SYS_renameat2, &arguments).map(|_| ())
    }

    fn readlink(&self, place: MountPath<'_>) -> Result<Vec<u8>> {
        let (dir, name) = match place.dir {
            Some(link) if place.path.is_empty() => (self.node(Target::Open(link))?, text(b"")?),
            _ => self.parent(&place)?,
        };
        let mut target = vec![0u8; 4096];
        let arguments = [raw::number(dir.0), name.as_ptr() as u64, target.as_mut_ptr() as u64, 4096];
        let bytes = kernel(libc::SYS_readlinkat, &arguments)?;
        target.truncate(bytes as usize);
        Ok(target)
    }

    fn space(&self) -> Result<libc::statfs> {
        // SAFETY: a structure of integers.
        let mut space: libc::statfs = unsafe { std::mem::zeroed() };
        kernel(libc::SYS_fstatfs, &[raw::number(self.root.number()), (&raw mut space) as u64])?;
        Ok(space)
    }

    fn xattr(&self, target: Target<'_>, name: &[u8]) -> Result<Vec<u8>> {
        if name == ALONE {
            return Ok(vec![b'0' + u8::from(ipc::is_alone())]);
        }
        let (node, name) = (self.node(target)?, text(name)?);
        let path = proc_path(node.0);
        let mut value = vec![0u8; 65536];
        let arguments = [path.as_ptr() as u64, name.as_ptr() as u64, value.as_mut_ptr() as u64, 65536];
        let bytes = kernel(libc::SYS_getxattr, &arguments)?;
        value.truncate(bytes as usize);
        Ok(value)
    }

    fn set_xattr(&self, target: Target<'_>, name: &[u8], value: &[u8], flags: i32) -> Result<()> {
        let (node, name) = (self.node(target)?, text(name)?);
        let path = proc_path(node.0);
        let (path, name) = (path.as_ptr() as u64, name.as_ptr() as u64);
        let arguments = [path, name, value.as_ptr() as u64, value.len() as u64, flags as u64];
        kernel(libc::SYS_setxattr, &arguments).map(|_| ())
    }

    fn list_xattrs(&self, target: Target<'_>) -> Result<Vec<u8>> {
        let node = self.node(target)?;
        let path = proc_path(node.0);
        let mut names = vec![0u8; 65536];
        let arguments = [path.as_ptr() as u64, names.as_mut_ptr() as u64, 65536];
        let bytes = kernel(libc::SYS_listxattr, &arguments)?;
        names.truncate(bytes as usize);
        Ok(names)
    }

    fn remove_xattr(&self, target: Target<'_>, name: &[u8]) -> Result<()> {
        let (node, name) = (self.node(target)?, text(name)?);
        let path = proc_path(node.0);
        kernel(libc::SYS_removexattr, &[path.as_ptr() as u64, name.as_ptr() as u64]).map(|_| ())
    }

    fn path(&self, file: Handle) -> Result<Vec<u8>> {
        let mut target = vec![0u8; 4096];
        let link = proc_path(descriptor(file));
        let here = raw::number(libc::AT_FDCWD);
        let arguments = [here, link.as_ptr() as u64, target.as_mut_ptr() as u64, 4096];
        let bytes = kernel(libc::SYS_readlinkat, &arguments)?;
        target.truncate(bytes as usize);
        let rest = target.strip_prefix(self.path.as_slice()).ok_or(Errno(libc::ENOENT))?;
        if rest.ends_with(b" (deleted)") {
            return Err(Errno(libc::ENOENT));
        }
        Ok(rest.strip_prefix(b"/").unwrap_or(rest).to_vec())
    }

    fn export(&self, file: Handle, _: &mut PassedDescriptors) -> Result<Vec<u8>> {
        let copy = hearth::descriptors::move_up(descriptor(file), false)?;
        Ok(copy.to_le_bytes().to_vec())
    }

    fn import(&self, token: &[u8]) -> Result<Handle> {
        let copy = token.try_into().map(i32::from_le_bytes).map_err(|_| Errno(libc::EINVAL))?;
        Self::keep(copy)
    }

    fn kernel_file(&self, file: Handle) -> Result<i32> {
        raw::fcntl(descriptor(file), libc::F_DUPFD_CLOEXEC, 3).map(|fd| fd as i32)
    }

    fn after_fork_child(&self) {}
}
