//! Symbolic links and directories in the kernel's tree, on the way of a path into the tree of a node.

use crate::mount::Errno;
use crate::paths::PATH_BYTES_MAX;
use crate::raw;
use std::ffi::CString;

/// The target of a link in the kernel's tree.
pub fn target(path: &[u8]) -> Result<Vec<u8>, Errno> {
    let path = CString::new(path).map_err(|_| Errno(libc::EINVAL))?;
    let mut target = vec![0u8; PATH_BYTES_MAX];
    let dir = raw::number(libc::AT_FDCWD);
    let arguments = [dir, path.as_ptr() as u64, target.as_mut_ptr() as u64, target.len() as u64];
    // SAFETY: the kernel writes at most the length given.
    let bytes = unsafe { raw::try_call(libc::SYS_readlinkat, &arguments) }?;
    target.truncate(bytes as usize);
    Ok(target)
}

/// Whether the kernel finds a file at a path.
pub fn exists(path: Vec<u8>) -> Result<(), Errno> {
    let path = CString::new(path).map_err(|_| Errno(libc::EINVAL))?;
    let arguments =
        [raw::number(libc::AT_FDCWD), path.as_ptr() as u64, libc::F_OK as u64, libc::AT_EACCESS as u64];
    // SAFETY: the path lives across the call.
    unsafe { raw::try_call(libc::SYS_faccessat2, &arguments) }.map(|_| ())
}

/// Asks the kernel whether it follows a link at the end of a path, which its settings about links of other users may
/// refuse. A target that it does not find may be in the tree.
pub fn may_follow(link: &[u8]) -> Result<(), Errno> {
    let link = CString::new(link).map_err(|_| Errno(libc::EINVAL))?;
    let arguments =
        [raw::number(libc::AT_FDCWD), link.as_ptr() as u64, libc::F_OK as u64, libc::AT_EACCESS as u64];
    // SAFETY: the path lives across the call.
    let followed = unsafe { raw::try_call(libc::SYS_faccessat2, &arguments) };
    if followed == Err(Errno(libc::EACCES)) { Err(Errno(libc::EACCES)) } else { Ok(()) }
}
