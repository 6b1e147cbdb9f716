//! Names: opening, making, linking, renaming, removing.

use super::data::mount;
use crate::descriptors::{self, Held};
use crate::dispatch::{Answer, Call, Refusal};
use crate::memory;
use crate::mount::{Errno, New, Place, Target};
use crate::paths::{self, PATH_BYTES_MAX};
use crate::raw;
use crate::table::Spot;

const fn path(path: u8) -> Spot {
    Spot { dir: None, path, follow: true, empty: false }
}

const fn at(dir: u8, path: u8) -> Spot {
    Spot { dir: Some(dir), path, follow: true, empty: false }
}

fn no_file() -> Errno {
    Errno(libc::ENOENT)
}

/// Opens what a spot names. The number comes first: where none is free, nothing is created.
fn open_spot(call: &Call, spot: Spot, flags: i32, mode: u32) -> Answer {
    let exclusive = libc::O_CREAT | libc::O_EXCL;
    let itself = flags & libc::O_NOFOLLOW != 0 || flags & exclusive == exclusive;
    let spot = Spot { follow: !itself, ..spot };
    let creates = flags & libc::O_CREAT != 0 || flags & libc::O_TMPFILE == libc::O_TMPFILE;
    let mode = if creates { mode & 0o7777 & !paths::umask() } else { 0 };
    let fd = descriptors::placeholder(flags & libc::O_CLOEXEC != 0)?;
    let opened = paths::serve(call, spot, |target| {
        let handle = match target {
            Target::Named(place, _) => mount().open(place, flags, mode)?,
            Target::Open(file) => {
                let path = mount().path(file)?;
                mount().open(Place { dir: None, path: &path }, flags & !exclusive, 0)?
            }
        };
        let held = Held::new(handle).inspect_err(|_| mount().close(handle))?;
        descriptors::put(fd, held)?;
        Ok(raw::number(fd))
    });
    if opened.is_err() {
        raw::close(fd);
    }
    opened
}

/// `open`
pub fn open(call: &Call) -> Answer {
    open_spot(call, path(0), call.int(1), call.arguments[2] as u32)
}

/// `creat`
pub fn creat(call: &Call) -> Answer {
    let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
    open_spot(call, path(0), flags, call.arguments[1] as u32)
}

/// `openat`
pub fn openat(call: &Call) -> Answer {
    open_spot(call, at(0, 1), call.int(2), call.arguments[3] as u32)
}

/// `openat2`: like a kernel that does not have it where the walk is to be restricted.
pub fn openat2(call: &Call) -> Answer {
    if call.arguments[3] < 24 {
        return Err(Errno(libc::EINVAL).into());
    }
    let [flags, mode, resolve] = memory::read_value::<[u64; 3]>(call.arguments[2])?;
    if let paths::Spotted::Kernel = paths::spot(call, at(0, 1))? {
        return Err(Refusal::Pass);
    }
    if resolve != 0 {
        return Err(Errno(libc::ENOSYS).into());
    }
    let flags = i32::try_from(flags).map_err(|_| Errno(libc::EINVAL))?;
    open_spot(call, at(0, 1), flags, mode as u32)
}

/// Makes something at a spot.
fn make(call: &Call, spot: Spot, new: New<'_>) -> Answer {
    paths::serve(call, spot.itself(), |target| {
        let Target::Named(place, _) = target else { return Err(Errno(libc::EEXIST)) };
        mount().make(place, new).map(|()| 0)
    })
}

fn less_umask(mode: u64) -> u32 {
    mode as u32 & !paths::umask()
}

/// `mkdir`
pub fn mkdir(call: &Call) -> Answer {
    make(call, path(0), New::Directory(less_umask(call.arguments[1])))
}

/// `mkdirat`
pub fn mkdirat(call: &Call) -> Answer {
    make(call, at(0, 1), New::Directory(less_umask(call.arguments[2])))
}

/// `mknod`
pub fn mknod(call: &Call) -> Answer {
    make(call, path(0), New::Node(less_umask(call.arguments[1]), call.arguments[2]))
}

/// `mknodat`
pub fn mknodat(call: &Call) -> Answer {
    make(call, at(0, 1), New::Node(less_umask(call.arguments[2]), call.arguments[3]))
}

fn symlink_to(call: &Call, target: u64, spot: Spot) -> Answer {
    let target = memory::read_string(target, PATH_BYTES_MAX)?;
    if target.is_empty() {
        return Err(no_file().into());
    }
    make(call, spot, New::Link(&target))
}

/// `symlink`
pub fn symlink(call: &Call) -> Answer {
    symlink_to(call, call.arguments[0], path(1))
}

/// `symlinkat`
pub fn symlinkat(call: &Call) -> Answer {
    symlink_to(call, call.arguments[0], at(1, 2))
}

fn link_spots(call: &Call, from: Spot, to: Spot) -> Answer {
    paths::serve_two(call, from, to.itself(), |from, to| mount().link(from, to).map(|()| 0))
}

/// `link`
pub fn link(call: &Call) -> Answer {
    link_spots(call, path(0).itself(), path(1))
}

/// `linkat`
pub fn linkat(call: &Call) -> Answer {
    let flags = call.int(4);
    if flags & !(libc::AT_SYMLINK_FOLLOW | libc::AT_EMPTY_PATH) != 0 {
        return Err(Errno(libc::EINVAL).into());
    }
    let follow = flags & libc::AT_SYMLINK_FOLLOW != 0;
    let from = Spot { follow, empty: flags & libc::AT_EMPTY_PATH != 0, ..at(0, 1) };
    link_spots(call, from, at(2, 3))
}

fn rename_spots(call: &Call, from: Spot, to: Spot, flags: u32) -> Answer {
    paths::serve_two(call, from.itself(), to.itself(), |from, to| {
        let Target::Named(from, _) = from else { return Err(Errno(libc::EBUSY)) };
        mount().rename(from, to, flags).map(|()| 0)
    })
}

/// `rename`
pub fn rename(call: &Call) -> Answer {
    rename_spots(call, path(0), path(1), 0)
}

/// `renameat`
pub fn renameat(call: &Call) -> Answer {
    rename_spots(call, at(0, 1), at(2, 3), 0)
}

/// `renameat2`
pub fn renameat2(call: &Call) -> Answer {
    rename_spots(call, at(0, 1), at(2, 3), call.arguments[4] as u32)
}

fn remove(call: &Call, spot: Spot, directory: bool) -> Answer {
    paths::serve(call, spot.itself(), |target| {
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
fn read_link(call: &Call, spot: Spot, buffer: u64, room: u64) -> Answer {
    if room as i32 <= 0 {
        return Err(Errno(libc::EINVAL).into());
    }
    let store = |target: &[u8]| {
        let bytes = target.len().min(room as usize);
        memory::write_bytes(buffer, &target[..bytes]).map(|()| bytes as u64)
    };
    let path = call.arguments[usize::from(spot.path)];
    if path == 0 {
        return Err(memory::FAULT.into());
    }
    if let paths::Spotted::Open(held) = paths::spot(call, Spot { follow: true, empty: true, ..spot })? {
        if memory::byte(path) == Some(0) {
            let itself = Place { dir: Some(held.handle()), path: b"" };
            return Ok(store(&mount().readlink(itself)?)?);
        }
        return Ok(store(&paths::shown(&held)?)?);
    }
    paths::serve(call, spot.itself(), |target| {
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
