//! Calls on names: creating, linking, renaming, removing.

use super::data::mount;
use super::{special, two_paths};
use crate::descriptors;
use crate::dispatch::{Answer, Call, Refusal};
use crate::memory;
use crate::mount::{Errno, MountPath, New, Target};
use crate::paths::{self, PATH_BYTES_MAX, ResolvedPath};
use crate::table::{PathArgument, at, path};
use std::ffi::CString;

fn no_file() -> Errno {
    Errno(libc::ENOENT)
}

/// Creates an object at a path of the call.
fn make(call: &Call, argument: PathArgument, new: New<'_>) -> Answer {
    paths::serve(call, argument.entry().makes(), |target| {
        let Target::Named(place, _) = target else { return Err(Errno(libc::EEXIST)) };
        mount().make(place, new).map(|()| 0)
    })
}

/// `mkdir`
pub fn mkdir(call: &Call) -> Answer {
    make(call, path(0), New::Directory(call.arguments[1] as u32))
}

/// `mkdirat`
pub fn mkdirat(call: &Call) -> Answer {
    make(call, at(0, 1), New::Directory(call.arguments[2] as u32))
}

/// Creates a node. Linux checks the type before it reads the path.
fn make_node(call: &Call, argument: PathArgument, mode: u64, device: u64) -> Answer {
    match mode as u32 & libc::S_IFMT {
        0 | libc::S_IFREG | libc::S_IFCHR | libc::S_IFBLK | libc::S_IFIFO | libc::S_IFSOCK => {
            make(call, argument, New::Node(mode as u32, device))
        }
        libc::S_IFDIR => Err(Errno(libc::EPERM).into()),
        _ => Err(Errno(libc::EINVAL).into()),
    }
}

/// `mknod`
pub fn mknod(call: &Call) -> Answer {
    make_node(call, path(0), call.arguments[1], call.arguments[2])
}

/// `mknodat`
pub fn mknodat(call: &Call) -> Answer {
    make_node(call, at(0, 1), call.arguments[2], call.arguments[3])
}

fn symlink_to(call: &Call, target: u64, argument: PathArgument) -> Answer {
    let target = memory::read_string(target, PATH_BYTES_MAX)?;
    if target.is_empty() {
        return Err(no_file().into());
    }
    make(call, argument, New::Link(&target))
}

/// `symlink`
pub fn symlink(call: &Call) -> Answer {
    symlink_to(call, call.arguments[0], path(1))
}

/// `symlinkat`
pub fn symlinkat(call: &Call) -> Answer {
    symlink_to(call, call.arguments[0], at(1, 2))
}

fn link_paths(call: &Call, from: PathArgument, to: PathArgument) -> Answer {
    let (from, to) = (from.makes(), to.entry().makes());
    match paths::serve_two(call, from, to, |from, to| mount().link(from, to).map(|()| 0)) {
        Err(Refusal::Errno(errno)) => {
            let error = two_paths::link_error(call, from, to, errno);
            match name_at_mount(call, from, to) {
                // The kernel has the file open, at the node's mount or elsewhere.
                Some(path) if error == Errno(libc::EXDEV) => Err(Refusal::OtherPaths(vec![(to, path)])),
                _ => Err(error.into()),
            }
        }
        linked => linked,
    }
}

/// The path at the node's mount of a new name in the tree, for a file that the kernel finds: an open FIFO of the tree is one.
fn name_at_mount(call: &Call, from: PathArgument, to: PathArgument) -> Option<CString> {
    let (from, to) = (paths::resolve(call, from).ok()?, paths::resolve(call, to).ok()?);
    match from {
        ResolvedPath::Kernel => special::at_mount(&to).ok().flatten(),
        _ => None,
    }
}

/// `link`
pub fn link(call: &Call) -> Answer {
    link_paths(call, path(0).itself(), path(1))
}

/// `linkat`
pub fn linkat(call: &Call) -> Answer {
    let flags = call.int(4);
    if flags & !(libc::AT_SYMLINK_FOLLOW | libc::AT_EMPTY_PATH) != 0 {
        return Err(Errno(libc::EINVAL).into());
    }
    let follow = flags & libc::AT_SYMLINK_FOLLOW != 0;
    let empty = flags & libc::AT_EMPTY_PATH != 0;
    // The path itself may not be missing.
    let path = memory::read_string(call.arguments[1], PATH_BYTES_MAX)?;
    if empty && path.first() != Some(&b'/') && descriptors::is_ours(call.int(0)) {
        let held = descriptors::get(call.int(0))?;
        if !mount().is_opened_by_caller(held.handle())? {
            return Err(no_file().into());
        }
    }
    let from = PathArgument { follow, empty, ..at(0, 1) };
    link_paths(call, from, at(2, 3))
}

fn rename_paths(call: &Call, from: PathArgument, to: PathArgument, flags: u32) -> Answer {
    const KNOWN: u32 = libc::RENAME_NOREPLACE | libc::RENAME_EXCHANGE | libc::RENAME_WHITEOUT;
    let exchanges = flags & libc::RENAME_EXCHANGE != 0;
    if flags & !KNOWN != 0 || exchanges && flags & !libc::RENAME_EXCHANGE != 0 {
        return Err(Errno(libc::EINVAL).into());
    }
    let (from, to) = (from.entry().makes(), to.entry().makes());
    let renamed = paths::serve_two(call, from, to, |from, to| {
        let Target::Named(from, _) = from else { return Err(Errno(libc::EBUSY)) };
        mount().rename(from, to, flags).map(|()| 0)
    });
    match renamed {
        Err(Refusal::Errno(errno)) => Err(two_paths::rename_error(call, from, to, errno).into()),
        renamed => renamed,
    }
}

/// `rename`
pub fn rename(call: &Call) -> Answer {
    rename_paths(call, path(0), path(1), 0)
}

/// `renameat`
pub fn renameat(call: &Call) -> Answer {
    rename_paths(call, at(0, 1), at(2, 3), 0)
}

/// `renameat2`
pub fn renameat2(call: &Call) -> Answer {
    rename_paths(call, at(0, 1), at(2, 3), call.arguments[4] as u32)
}

fn remove(call: &Call, argument: PathArgument, directory: bool) -> Answer {
    paths::serve(call, argument.entry(), |target| {
        let Target::Named(place, _) = target else { return Err(no_file()) };
        if place.dir.is_none() && place.path.is_empty() {
            return Err(Errno(if directory { libc::EBUSY } else { libc::EISDIR }));
        }
        mount().remove(place, directory).map(|()| 0)
    })
}

/// `unlink`
pub fn unlink(call: &Call) -> Answer {
    remove(call, path(0), false)
}

/// `rmdir`
pub fn rmdir(call: &Call) -> Answer {
    remove(call, path(0), true)
}

/// `unlinkat`
pub fn unlinkat(call: &Call) -> Answer {
    let flags = call.int(2);
    if flags & !libc::AT_REMOVEDIR != 0 {
        return Err(Errno(libc::EINVAL).into());
    }
    remove(call, at(0, 1), flags != 0)
}

/// The target of a link, or of `/proc/self/fd/N` for a descriptor of ours. An empty path reads the link that is open.
fn read_link(call: &Call, argument: PathArgument, buffer: u64, room: u64) -> Answer {
    if room as i32 <= 0 {
        return Err(Errno(libc::EINVAL).into());
    }
    let store = |target: &[u8]| {
        let bytes = target.len().min(room as usize);
        memory::write_bytes(buffer, &target[..bytes]).map(|()| bytes as u64)
    };
    let path = call.arguments[usize::from(argument.path)];
    if path == 0 {
        return Err(memory::FAULT.into());
    }
    if let paths::ResolvedPath::Open(held) =
        paths::resolve(call, PathArgument { follow: true, empty: true, ..argument })?
    {
        if memory::byte(path) == Some(0) {
            let itself = MountPath { dir: Some(held.handle()), path: b"" };
            return Ok(store(&mount().readlink(itself)?)?);
        }
        // With slashes after its name the link is followed, and what it leads to is none.
        if memory::read_string(path, PATH_BYTES_MAX)?.ends_with(b"/") {
            return Err(Errno(libc::EINVAL).into());
        }
        return Ok(store(&paths::path_of(&held)?)?);
    }
    paths::serve(call, argument.itself(), |target| {
        let Target::Named(place, _) = target else { return Err(Errno(libc::EINVAL)) };
        store(&mount().readlink(place)?)
    })
}

/// `readlink`
pub fn readlink(call: &Call) -> Answer {
    read_link(call, path(0), call.arguments[1], call.arguments[2])
}

/// `readlinkat`
pub fn readlinkat(call: &Call) -> Answer {
    read_link(call, at(0, 1), call.arguments[2], call.arguments[3])
}
