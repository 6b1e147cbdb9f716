//! Sockets and pipes in the tree, which the kernel finds at the node's mount.

use super::data::mount;
use crate::descriptors;
use crate::dispatch::{Answer, Call, Refusal};
use crate::local::local;
use crate::memory;
use crate::mount::Errno;
use crate::paths::{self, ResolvedPath};
use crate::table;
use crate::{raw, tell};
use std::ffi::CString;

/// Bytes of an address before its path, and limit of bytes of an address.
const HEAD_BYTES: usize = 2;
const ADDRESS_BYTES: usize = 110;

/// The path at the node's mount of a resolved path in the tree.
///
/// # Errors
/// `Errno::UNMOUNTED`.
pub fn at_mount(resolved: &ResolvedPath) -> Result<Option<CString>, Errno> {
    let (dir, rest) = match resolved {
        ResolvedPath::Mount(dir, rest) => (dir.as_ref(), rest.as_slice()),
        ResolvedPath::Open(held) => (Some(held), &b""[..]),
        ResolvedPath::Kernel => return Ok(None),
    };
    let root = mount().kernel_path().filter(|_| mount().is_mounted()).ok_or(Errno::UNMOUNTED)?;
    let mut path = root.to_bytes().to_vec();
    let base = dir.map(|held| mount().path(held.handle())).transpose()?;
    for part in [base.as_deref().unwrap_or_default(), rest].into_iter().filter(|part| !part.is_empty()) {
        path.push(b'/');
        path.extend_from_slice(part);
    }
    CString::new(path).map(Some).map_err(|_| Errno(libc::EINVAL))
}

/// `bind` and `connect`: an address in the tree is replaced by that at the node's mount.
pub fn name_socket(call: &Call) -> Answer {
    if descriptors::is_ours(call.int(0)) {
        call.open_file(0)?;
        return Err(Errno(libc::ENOTSOCK).into());
    }
    let length = call.arguments[2] as u32 as usize;
    if !(HEAD_BYTES + 1..=ADDRESS_BYTES).contains(&length) {
        return Err(Refusal::Pass);
    }
    let mut address = [0; ADDRESS_BYTES];
    if memory::read_bytes(call.arguments[1], &mut address[..length]).is_err()
        || address[..HEAD_BYTES] != (libc::AF_UNIX as u16).to_ne_bytes()
    {
        return Err(Refusal::Pass);
    }
    let path = address[HEAD_BYTES..length].split(|byte| *byte == 0).next().unwrap_or_default();
    // An empty path is an abstract or missing name.
    let path = CString::new(path).unwrap_or_default();
    let named = Call { number: call.number, arguments: [0, path.as_ptr() as u64, 0, 0, 0, 0] };
    let argument = table::path(1);
    if path.is_empty() || !paths::concern(&named, argument) {
        return Err(Refusal::Pass);
    }
    match at_mount(&paths::resolve(&named, argument)?) {
        Ok(Some(path)) => name_at(call, path.to_bytes()),
        Ok(None) => Err(Refusal::Pass),
        Err(_) => {
            tell::needs_mount("a socket in the tree cannot be used");
            Err(Refusal::Pass)
        }
    }
}

/// Makes the call with a path that may be too long for an address.
fn name_at(call: &Call, path: &[u8]) -> Answer {
    if HEAD_BYTES + path.len() < ADDRESS_BYTES {
        return with_path(call, path);
    }
    let end = path.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let folder = CString::new(&path[..end]).map_err(|_| Errno(libc::EINVAL))?;
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let folder = raw::open_at(libc::AT_FDCWD, &folder, flags, 0)?;
    let short = [b"/proc/self/fd/", folder.to_string().as_bytes(), b"/", &path[end..]].concat();
    let done = if HEAD_BYTES + short.len() < ADDRESS_BYTES {
        with_path(call, &short)
    } else {
        Err(Errno(libc::ENAMETOOLONG).into())
    };
    raw::close(folder);
    done
}

fn with_path(call: &Call, path: &[u8]) -> Answer {
    let mut address = [0u8; ADDRESS_BYTES];
    address[..HEAD_BYTES].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
    address[HEAD_BYTES..HEAD_BYTES + path.len()].copy_from_slice(path);
    let mut arguments = call.arguments;
    arguments[1] = address.as_ptr() as u64;
    arguments[2] = (HEAD_BYTES + path.len() + 1) as u64;
    // The call may wait, and be interrupted.
    // SAFETY: the program's own call, with an address of ours that lives across it.
    let result = local().outside(|| unsafe { raw::call(call.number as u64, &arguments) });
    Ok(raw::outcome(result)?)
}
