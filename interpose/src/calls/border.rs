//! What a call about two names answers if one lies in the tree and the other does not: Linux finds what is wrong with
//! either path before it finds that they lie on different file systems.

use super::data::mount;
use crate::dispatch::{Call, Refusal};
use crate::memory;
use crate::mount::Errno;
use crate::paths::{self, PATH_BYTES_MAX};
use crate::raw;
use crate::table::Spot;
use std::ffi::CString;

const BORDER: Errno = Errno(libc::EXDEV);

/// The error of `link`: there has to be something, and the new name must be free.
pub fn link(call: &Call, from: Spot, to: Spot) -> Errno {
    if let Err(errno) = exists(call, from) {
        return errno;
    }
    match exists(call, to) {
        Ok(()) => Errno(libc::EEXIST),
        Err(Errno(libc::ENOENT)) => parent_exists(call, to).err().unwrap_or(BORDER),
        Err(errno) => errno,
    }
}

/// The error of `rename`: both directories have to be there.
pub fn rename(call: &Call, from: Spot, to: Spot) -> Errno {
    parent_exists(call, from).and_then(|()| parent_exists(call, to)).err().unwrap_or(BORDER)
}

/// Whether there is something at a spot, in the tree or outside.
fn exists(call: &Call, at: Spot) -> Result<(), Errno> {
    match paths::serve(call, at, |target| mount().attributes(target).map(|_| 0)) {
        Ok(_) => Ok(()),
        Err(Refusal::Errno(errno)) => Err(errno),
        Err(Refusal::Pass) => {
            let dir = at.dir.map_or(raw::number(libc::AT_FDCWD), |dir| call.arguments[usize::from(dir)]);
            exists_in_kernel(dir, call.arguments[usize::from(at.path)], at)
        }
        Err(Refusal::Elsewhere(paths)) => {
            let path = paths.first().map_or(0, |(_, path)| path.as_ptr() as u64);
            exists_in_kernel(raw::number(libc::AT_FDCWD), path, at)
        }
    }
}

fn exists_in_kernel(dir: u64, path: u64, at: Spot) -> Result<(), Errno> {
    let flags = if at.follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW }
        | if at.empty { libc::AT_EMPTY_PATH } else { 0 };
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    let arguments = [dir, path, status.as_mut_ptr() as u64, flags as u64];
    // SAFETY: the path is the program's, which the kernel checks, or one of ours; the structure lives across the call.
    unsafe { raw::try_call(libc::SYS_newfstatat, &arguments) }.map(|_| ())
}

/// Whether the directory is there that holds, or would hold, the name at a spot.
fn parent_exists(call: &Call, at: Spot) -> Result<(), Errno> {
    let path = memory::read_string(call.arguments[usize::from(at.path)], PATH_BYTES_MAX)?;
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    let name = path[..end].iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let above = if name == 0 { b".".as_slice() } else { &path[..name] };
    let above = CString::new(above).map_err(|_| Errno(libc::EINVAL))?;
    let mut call = *call;
    call.arguments[usize::from(at.path)] = above.as_ptr() as u64;
    exists(&call, Spot { follow: true, empty: false, ..at })
}
