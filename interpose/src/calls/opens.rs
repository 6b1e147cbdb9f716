//! Opening, by each of its calls.

use super::data::mount;
use super::special;
use crate::descriptors::{self, Held};
use crate::dispatch::{Answer, Call, Refusal};
use crate::memory;
use crate::mount::{Errno, Handle, Place, Target};
use crate::paths;
use crate::table::Spot;
use crate::{raw, real, tell};

/// Flags that `openat2` knows; `O_LARGEFILE`, which the C library has as 0, is the kernel's own.
const KNOWN_FLAGS: u64 = (libc::O_ACCMODE
    | libc::O_CREAT
    | libc::O_EXCL
    | libc::O_NOCTTY
    | libc::O_TRUNC
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_SYNC
    | libc::O_ASYNC
    | libc::O_DIRECT
    | KERNEL_LARGE_FILE
    | libc::O_TMPFILE
    | libc::O_NOFOLLOW
    | libc::O_NOATIME
    | libc::O_CLOEXEC
    | libc::O_PATH) as u64;
#[cfg(target_arch = "x86_64")]
const KERNEL_LARGE_FILE: i32 = 0o100_000;
#[cfg(not(target_arch = "x86_64"))]
const KERNEL_LARGE_FILE: i32 = libc::O_LARGEFILE;
/// Flags that a path can be opened with.
const PATH_FLAGS: u64 = (libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC) as u64;
const CONFINED: u64 = libc::RESOLVE_BENEATH | libc::RESOLVE_IN_ROOT;
const KNOWN_RESTRICTIONS: u64 = CONFINED
    | libc::RESOLVE_NO_SYMLINKS
    | libc::RESOLVE_NO_MAGICLINKS
    | libc::RESOLVE_NO_XDEV
    | libc::RESOLVE_CACHED;
/// Bytes of the structure that `openat2` takes: as it was at first, and at most.
const HOW_BYTES: usize = 24;
const HOW_BYTES_MAX: u64 = 4096;

const fn path(path: u8) -> Spot {
    Spot { dir: None, path, follow: true, empty: false }
}

const fn at(dir: u8, path: u8) -> Spot {
    Spot { dir: Some(dir), path, follow: true, empty: false }
}

/// What is asked for: the structure of `openat2`.
#[derive(Clone, Copy)]
struct How {
    flags: i32,
    mode: u32,
    resolve: u64,
}

impl How {
    fn has(&self, flag: i32) -> bool {
        self.flags & flag == flag
    }
}

/// Gives what is opened a number. The number comes first: where none is free, nothing is created.
fn numbered(how: &How, open: impl FnOnce(&dyn Fn(Handle) -> Result<u64, Errno>) -> Answer) -> Answer {
    let fd = descriptors::placeholder(how.has(libc::O_CLOEXEC))?;
    let opened = open(&|handle| {
        let held = Held::new(handle).inspect_err(|_| mount().close(handle))?;
        descriptors::put(fd, held)?;
        if real::is_on() {
            real::make(fd);
        }
        Ok(raw::number(fd))
    });
    if opened.is_err() {
        raw::close(fd);
    }
    opened
}

/// Opens what a spot names.
fn open_spot(call: &Call, spot: Spot, how: How) -> Answer {
    let exclusive = libc::O_CREAT | libc::O_EXCL;
    let spot = Spot { follow: !how.has(libc::O_NOFOLLOW) && !how.has(exclusive), ..spot };
    let creates = how.has(libc::O_CREAT) || how.has(libc::O_TMPFILE);
    let mode = if creates { how.mode & 0o7777 & !paths::umask() } else { 0 };
    let opened = numbered(&how, |number| {
        paths::serve(call, spot, |target| {
            let handle = match target {
                Target::Named(place, _) => mount()
                    .open(place, how.flags, mode, how.resolve)
                    .map_err(|errno| left(errno, how.resolve))?,
                // Only `/proc/self/fd/N` and its kin stand for a file that is open.
                Target::Open(_)
                    if how.resolve & (libc::RESOLVE_NO_MAGICLINKS | libc::RESOLVE_NO_SYMLINKS) != 0 =>
                {
                    return Err(Errno(libc::ELOOP));
                }
                Target::Open(file) => {
                    let path = mount().path(file)?;
                    mount().open(Place { dir: None, path: &path }, how.flags & !exclusive, 0, 0)?
                }
            };
            number(handle)
        })
    });
    match opened {
        // A pipe is opened by the kernel, at the mount.
        Err(Refusal::Errno(Errno::SPECIAL)) => {
            let path = paths::spot(call, spot).and_then(|spotted| special::at_mount(&spotted));
            match path {
                Ok(Some(path)) => Err(Refusal::Elsewhere(vec![(spot, path)])),
                _ => {
                    tell::needs_mount("a pipe or a device in the tree cannot be opened");
                    Err(Errno(libc::EOPNOTSUPP).into())
                }
            }
        }
        opened => opened,
    }
}

/// What a restricted walk that leaves the tree is told. Where it would go on among links of the kernel's that it may not
/// follow, it is told what a kernel without `openat2` says.
fn left(errno: Errno, resolve: u64) -> Errno {
    match errno {
        Errno::LEAVES if resolve & libc::RESOLVE_NO_XDEV != 0 => Errno(libc::EXDEV),
        Errno::LEAVES if resolve & libc::RESOLVE_NO_SYMLINKS != 0 => Errno(libc::ENOSYS),
        other => other,
    }
}

/// `open`
pub fn open(call: &Call) -> Answer {
    let how = How { flags: call.int(1), mode: call.arguments[2] as u32, resolve: 0 };
    open_spot(call, path(0), how)
}

/// `creat`
pub fn creat(call: &Call) -> Answer {
    let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
    open_spot(call, path(0), How { flags, mode: call.arguments[1] as u32, resolve: 0 })
}

/// `openat`
pub fn openat(call: &Call) -> Answer {
    let how = How { flags: call.int(2), mode: call.arguments[3] as u32, resolve: 0 };
    open_spot(call, at(0, 1), how)
}

/// The structure at an address.
fn how_at(address: u64, bytes: u64) -> Result<How, Errno> {
    let invalid = Err(Errno(libc::EINVAL));
    match bytes {
        0..24 => return invalid,
        HOW_BYTES_MAX.. if bytes > HOW_BYTES_MAX => return Err(Errno(libc::E2BIG)),
        _ => {}
    }
    let mut all = vec![0; bytes as usize];
    memory::read_bytes(address, &mut all)?;
    if all[HOW_BYTES..].iter().any(|byte| *byte != 0) {
        return Err(Errno(libc::E2BIG));
    }
    let word = |at: usize| u64::from_ne_bytes(all[at..at + 8].try_into().expect("eight bytes"));
    let (flags, mode, resolve) = (word(0), word(8), word(16));
    if flags & !KNOWN_FLAGS != 0 || resolve & !KNOWN_RESTRICTIONS != 0 || resolve & CONFINED == CONFINED {
        return invalid;
    }
    let how = How { flags: flags as i32, mode: mode as u32, resolve };
    let creates = how.has(libc::O_CREAT) || how.has(libc::O_TMPFILE);
    if mode & !(if creates { 0o7777 } else { 0 }) != 0 {
        return invalid;
    }
    if how.has(libc::O_PATH) && flags & !PATH_FLAGS != 0 {
        return invalid;
    }
    let changes = libc::O_TRUNC | libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY);
    if resolve & libc::RESOLVE_CACHED != 0 && how.flags & changes != 0 {
        return Err(Errno(libc::EAGAIN));
    }
    Ok(how)
}

/// `openat2`: a walk that is confined to a directory of ours never leaves the tree. One from a directory of the kernel's
/// into the tree is told what a kernel without the call says.
pub fn openat2(call: &Call) -> Answer {
    let how = how_at(call.arguments[2], call.arguments[3]);
    let confined = how.as_ref().is_ok_and(|how| how.resolve & CONFINED != 0);
    let base = match call.int(0) {
        _ if !confined => None,
        libc::AT_FDCWD => paths::cwd(),
        dir if descriptors::is_ours(dir) => Some(descriptors::get(dir)?),
        _ => None,
    };
    let Some(base) = base else {
        let spotted = paths::spot(call, at(0, 1));
        if let Ok(paths::Spotted::Kernel) = spotted {
            return Err(Refusal::Pass);
        }
        // What is wrong with the structure comes before what is wrong with the path.
        let how = how?;
        spotted?;
        return if confined { Err(Errno(libc::ENOSYS).into()) } else { open_spot(call, at(0, 1), how) };
    };
    let how = how?;
    let path = memory::read_string(call.arguments[1], paths::PATH_BYTES_MAX)?;
    if path.is_empty() {
        return Err(Errno(libc::ENOENT).into());
    }
    let creates = how.has(libc::O_CREAT) || how.has(libc::O_TMPFILE);
    let mode = if creates { how.mode & 0o7777 & !paths::umask() } else { 0 };
    numbered(&how, |number| {
        let place = Place { dir: Some(base.handle()), path: &path };
        Ok(number(mount().open(place, how.flags, mode, how.resolve)?)?)
    })
}
