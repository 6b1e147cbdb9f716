//! Errors of calls with two paths, one in the tree and one outside: Linux reports all errors of either path before it
//! reports that they are on different file systems.

use super::data::mount;
use crate::dispatch::{Call, Refusal};
use crate::memory;
use crate::mount::Errno;
use crate::paths::{self, PATH_BYTES_MAX};
use crate::raw;
use crate::table::PathArgument;
use std::ffi::CString;

const CROSS_DEVICE: Errno = Errno(libc::EXDEV);

/// The error of `link`: the source has to exist, and the new name must be free.
pub fn link(call: &Call, from: PathArgument, to: PathArgument) -> Errno {
    if let Err(errno) = exists(call, from) {
        return errno;
    }
    match exists(call, to) {
        Ok(()) => Errno(libc::EEXIST),
        Err(Errno(libc::ENOENT)) => parent_exists(call, to).err().unwrap_or(CROSS_DEVICE),
        Err(errno) => errno,
    }
}

/// The error of `rename`: both directories have to exist.
pub fn rename(call: &Call, from: PathArgument, to: PathArgument) -> Errno {
    parent_exists(call, from).and_then(|()| parent_exists(call, to)).err().unwrap_or(CROSS_DEVICE)
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
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    let name = path[..end].iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let above = if name == 0 { b".".as_slice() } else { &path[..name] };
    let above = CString::new(above).map_err(|_| Errno(libc::EINVAL))?;
    let mut call = *call;
    call.arguments[usize::from(at.path)] = above.as_ptr() as u64;
    exists(&call, PathArgument { follow: true, empty: false, ..at })
}
