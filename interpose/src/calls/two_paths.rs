//! Errors of calls with two paths: Linux reports all errors of the first path before it looks at the second one, and all
//! errors of either path before it reports that they are on different file systems.

use super::data::mount;
use crate::dispatch::{Call, Refusal};
use crate::memory;
use crate::mount::Errno;
use crate::paths::{self, PATH_BYTES_MAX};
use crate::raw;
use crate::table::PathArgument;
use std::ffi::CString;

const CROSS_DEVICE: Errno = Errno(libc::EXDEV);

/// The error of a `link` that has failed with `errno`: the source has to exist, and then the new name must be free.
pub fn link_error(call: &Call, from: PathArgument, to: PathArgument, errno: Errno) -> Errno {
    if paths::resolve(call, to).is_err() {
        return exists(call, from).err().unwrap_or(errno);
    }
    if errno != CROSS_DEVICE {
        return errno;
    }
    exists(call, from).and_then(|()| is_free(call, to)).err().unwrap_or(CROSS_DEVICE)
}

/// The error of a `rename` that has failed with `errno`: both directories have to exist.
pub fn rename_error(call: &Call, from: PathArgument, to: PathArgument, errno: Errno) -> Errno {
    if paths::resolve(call, to).is_err() {
        return parent_exists(call, from).err().unwrap_or(errno);
    }
    if errno != CROSS_DEVICE {
        return errno;
    }
    parent_exists(call, from).and_then(|()| parent_exists(call, to)).err().unwrap_or(CROSS_DEVICE)
}

/// Whether a new name of a file could be created at a path of the call. Slashes after the name do not matter if the name
/// exists.
fn is_free(call: &Call, at: PathArgument) -> Result<(), Errno> {
    let path = memory::read_string(call.arguments[usize::from(at.path)], PATH_BYTES_MAX)?;
    let slashes =
        path.iter().rev().take_while(|byte| **byte == b'/').count().min(path.len().saturating_sub(1));
    let name = CString::new(&path[..path.len() - slashes]).map_err(|_| Errno(libc::EINVAL))?;
    let mut call = *call;
    call.arguments[usize::from(at.path)] = name.as_ptr() as u64;
    match exists(&call, at) {
        Ok(()) => Err(Errno(libc::EEXIST)),
        Err(Errno(libc::ENOENT)) => {
            parent_exists(&call, at)?;
            if slashes == 0 { Ok(()) } else { Err(Errno(libc::ENOENT)) }
        }
        Err(errno) => Err(errno),
    }
}

/// Whether a file exists at a path of the call, in the tree or outside.
fn exists(call: &Call, at: PathArgument) -> Result<(), Errno> {
    match paths::serve(call, at, |target| mount().attributes(target).map(|_| 0)) {
        Ok(_) => Ok(()),
        Err(Refusal::Errno(errno)) => Err(errno),
        Err(Refusal::Pass) => {
            let dir = at.dir.map_or(raw::number(libc::AT_FDCWD), |dir| call.arguments[usize::from(dir)]);
            exists_in_kernel(dir, call.arguments[usize::from(at.path)], at)
        }
        Err(Refusal::OtherPaths(paths)) => {
            let path = paths.first().map_or(0, |(_, path)| path.as_ptr() as u64);
            exists_in_kernel(raw::number(libc::AT_FDCWD), path, at)
        }
    }
}

fn exists_in_kernel(dir: u64, path: u64, at: PathArgument) -> Result<(), Errno> {
    let flags = if at.follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW }
        | if at.empty { libc::AT_EMPTY_PATH } else { 0 };
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    let arguments = [dir, path, status.as_mut_ptr() as u64, flags as u64];
    // SAFETY: the path is the program's, which the kernel checks, or the library's; the structure lives across the
    // call.
    unsafe { raw::try_call(libc::SYS_newfstatat, &arguments) }.map(|_| ())
}

/// Whether the directory of a path exists.
fn parent_exists(call: &Call, at: PathArgument) -> Result<(), Errno> {
    let path = memory::read_string(call.arguments[usize::from(at.path)], PATH_BYTES_MAX)?;
    if path.is_empty() {
        return Err(Errno(libc::ENOENT));
    }
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    let name = path[..end].iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let above = if name == 0 { b".".as_slice() } else { &path[..name] };
    let above = CString::new(above).map_err(|_| Errno(libc::EINVAL))?;
    let mut call = *call;
    call.arguments[usize::from(at.path)] = above.as_ptr() as u64;
    exists(&call, PathArgument { follow: true, empty: false, entry: false, ..at })
}
