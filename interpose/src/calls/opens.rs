//! All calls that open files.

use super::data::mount;
use super::special;
use crate::descriptors::{self, DescriptionRef};
use crate::dispatch::{Answer, Call, Refusal};
use crate::local::local;
use crate::memory;
use crate::mount::{Errno, Handle, MountPath, Target};
use crate::paths;
use crate::table::{PathArgument, at, path};
use crate::{raw, real, tell};

/// Flags that `openat2` knows. `O_LARGEFILE` is the kernel's own; in the C library it is 0.
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
/// Flags that `O_PATH` allows.
const PATH_FLAGS: u64 = (libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC) as u64;
const CONFINED: u64 = libc::RESOLVE_BENEATH | libc::RESOLVE_IN_ROOT;
const KNOWN_RESTRICTIONS: u64 = CONFINED
    | libc::RESOLVE_NO_SYMLINKS
    | libc::RESOLVE_NO_MAGICLINKS
    | libc::RESOLVE_NO_XDEV
    | libc::RESOLVE_CACHED;
/// Bytes of the structure of `openat2`: of its first version, and at most.
const HOW_BYTES: usize = 24;
const HOW_BYTES_MAX: u64 = 4096;

/// The request: the structure of `openat2`.
#[derive(Clone, Copy)]
struct How {
    flags: i32,
    mode: u32,
    resolve: u64,
}

impl How {
    /// The request of a call without the structure: the kernel ignores flags that it does not know, and in a program of 64
    /// bits all files are large.
    fn of(flags: i32, mode: u64) -> Self {
        let flags = match flags & libc::O_PATH {
            0 => flags & KNOWN_FLAGS as i32 | KERNEL_LARGE_FILE,
            _ => flags & PATH_FLAGS as i32,
        };
        Self { flags, mode: mode as u32, resolve: 0 }
    }

    /// Checks the combination of the flags, as Linux does before it reads the path.
    fn check(&self) -> Result<(), Errno> {
        let unnamed = self.flags & libc::O_TMPFILE & !libc::O_DIRECTORY != 0;
        let reads = self.flags & libc::O_ACCMODE == libc::O_RDONLY;
        let invalid =
            self.has(libc::O_CREAT | libc::O_DIRECTORY) || unnamed && (reads || !self.has(libc::O_DIRECTORY));
        if invalid { Err(Errno(libc::EINVAL)) } else { Ok(()) }
    }

    /// The path argument of the call, with the link at its end followed or not.
    fn argument(&self, argument: PathArgument) -> PathArgument {
        let follow = !self.has(libc::O_NOFOLLOW) && !self.has(libc::O_CREAT | libc::O_EXCL);
        PathArgument { follow, ..argument }
    }

    fn has(&self, flag: i32) -> bool {
        self.flags & flag == flag
    }
}

/// Opens a file and gives it a number. The number comes first: if none is free, no file is created.
fn numbered(how: &How, open: impl FnOnce(&dyn Fn(Handle) -> Result<u64, Errno>) -> Answer) -> Answer {
    let fd = descriptors::placeholder(how.has(libc::O_CLOEXEC))?;
    let opened = open(&|handle| {
        let held = DescriptionRef::new(handle).inspect_err(|_| mount().close(handle))?;
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

/// Opens the file at a path of the call.
fn open_path(call: &Call, argument: PathArgument, how: How) -> Answer {
    how.check()?;
    let argument = how.argument(argument);
    let creates = how.has(libc::O_CREAT) || how.has(libc::O_TMPFILE);
    let mode = if creates { how.mode & 0o7777 } else { 0 };
    let opened = numbered(&how, |number| {
        paths::serve(call, argument, |target| {
            let handle = match target {
                Target::Named(place, _) => mount()
                    .open(place, how.flags, mode, how.resolve)
                    .map_err(|errno| error_of_leaving(errno, how.resolve))?,
                // Only `/proc/self/fd/N` and similar paths lead to a file that is open.
                Target::Open(_)
                    if how.resolve & (libc::RESOLVE_NO_MAGICLINKS | libc::RESOLVE_NO_SYMLINKS) != 0 =>
                {
                    return Err(Errno(libc::ELOOP));
                }
                Target::Open(file) => mount().reopen(file, how.flags, mode)?,
            };
            number(handle)
        })
    });
    match opened {
        // The kernel opens a pipe, at the node's mount.
        Err(Refusal::Errno(Errno::SPECIAL)) => {
            let path = paths::resolve(call, argument).and_then(|resolved| special::at_mount(&resolved));
            match path {
                Ok(Some(path)) => Err(Refusal::OtherPaths(vec![(argument, path)])),
                _ => {
                    tell::needs_mount("a pipe or a device in the tree cannot be opened");
                    Err(Errno(libc::EOPNOTSUPP).into())
                }
            }
        }
        opened => opened,
    }
}

/// The error of a restricted walk that leaves the tree. If it would have to continue in the kernel's tree without
/// following links, the error is that of a kernel without `openat2`.
fn error_of_leaving(errno: Errno, resolve: u64) -> Errno {
    match errno {
        Errno::LEAVES if resolve & libc::RESOLVE_NO_XDEV != 0 => Errno(libc::EXDEV),
        Errno::LEAVES if resolve & libc::RESOLVE_NO_SYMLINKS != 0 => Errno(libc::ENOSYS),
        other => other,
    }
}

/// `open`
pub fn open(call: &Call) -> Answer {
    open_path(call, path(0), How::of(call.int(1), call.arguments[2]))
}

/// `creat`
pub fn creat(call: &Call) -> Answer {
    let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
    open_path(call, path(0), How::of(flags, call.arguments[1]))
}

/// `openat`
pub fn openat(call: &Call) -> Answer {
    open_path(call, at(0, 1), How::of(call.int(2), call.arguments[3]))
}

/// Reads and checks the structure at an address.
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
    let large = if flags & libc::O_PATH as u64 == 0 { KERNEL_LARGE_FILE } else { 0 };
    let how = How { flags: flags as i32 | large, mode: mode as u32, resolve };
    let creates = how.has(libc::O_CREAT) || how.has(libc::O_TMPFILE);
    if mode & !(if creates { 0o7777 } else { 0 }) != 0 {
        return invalid;
    }
    how.check()?;
    if how.has(libc::O_PATH) && flags & !PATH_FLAGS != 0 {
        return invalid;
    }
    let changes = libc::O_TRUNC | libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY);
    if resolve & libc::RESOLVE_CACHED != 0 && how.flags & changes != 0 {
        return Err(Errno(libc::EAGAIN));
    }
    Ok(how)
}

/// Whether the restrictions of a walk from outside the tree allow the way on which it came into the tree. The kernel has
/// checked the part of the walk that it does itself.
fn may_enter(call: &Call, resolved: &paths::ResolvedPath, resolve: u64) -> Result<(), Errno> {
    let path = memory::read_string(call.arguments[1], paths::PATH_BYTES_MAX)?;
    if path.first() != Some(&b'/') {
        return Ok(());
    }
    let by_magic_link = match resolved {
        paths::ResolvedPath::Mount(dir, _) => dir.is_some(),
        paths::ResolvedPath::Open(_) => true,
        paths::ResolvedPath::Kernel => false,
    };
    if resolve & (libc::RESOLVE_NO_MAGICLINKS | libc::RESOLVE_NO_SYMLINKS) != 0 && by_magic_link {
        return Err(Errno(libc::ELOOP));
    }
    // From the file system of `/` to the tree.
    if resolve & libc::RESOLVE_NO_XDEV != 0 { Err(Errno(libc::EXDEV)) } else { Ok(()) }
}

/// `openat2`: a walk that is confined to a directory of ours never leaves the tree. A confined walk from a directory of
/// the kernel into the tree fails as on a kernel without the call.
pub fn openat2(call: &Call) -> Answer {
    let how = how_at(call.arguments[2], call.arguments[3]);
    let confined = how.as_ref().is_ok_and(|how| how.resolve & CONFINED != 0);
    let base = match call.int(0) {
        _ if !confined => None,
        libc::AT_FDCWD => paths::entered_cwd(),
        dir if descriptors::is_ours(dir) => Some(descriptors::get(dir)?),
        _ => None,
    };
    let Some(base) = base else {
        let argument = how.as_ref().map_or(at(0, 1), |how| how.argument(at(0, 1)));
        let resolved = paths::resolve(call, argument);
        if let Ok(paths::ResolvedPath::Kernel) = resolved {
            return Err(Refusal::Pass);
        }
        // Errors of the structure come before errors of the path.
        let how = how?;
        may_enter(call, &resolved?, how.resolve)?;
        return if confined { Err(Errno(libc::ENOSYS).into()) } else { open_path(call, at(0, 1), how) };
    };
    let how = how?;
    let path = memory::read_string(call.arguments[1], paths::PATH_BYTES_MAX)?;
    if path.is_empty() {
        return Err(Errno(libc::ENOENT).into());
    }
    let creates = how.has(libc::O_CREAT) || how.has(libc::O_TMPFILE);
    let mode = if creates { how.mode & 0o7777 } else { 0 };
    let opened = numbered(&how, |number| {
        let place = MountPath { dir: Some(base.handle()), path: &path };
        Ok(number(mount().open(place, how.flags, mode, how.resolve)?)?)
    });
    match opened {
        Err(Refusal::Errno(Errno::SPECIAL)) => open_special_within(call, base),
        opened => opened,
    }
}

/// Opens a pipe or a device on a walk that is confined to a directory: the kernel walks at the node's mount.
fn open_special_within(call: &Call, base: DescriptionRef) -> Answer {
    let Ok(Some(path)) = special::at_mount(&paths::ResolvedPath::Open(base)) else {
        tell::needs_mount("a pipe or a device in the tree cannot be opened");
        return Err(Errno(libc::EOPNOTSUPP).into());
    };
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let directory = raw::open_at(libc::AT_FDCWD, &path, flags, 0)?;
    // The program gets the lowest free number.
    let moved = descriptors::move_up(directory, true);
    raw::close(directory);
    let directory = moved?;
    let mut arguments = call.arguments;
    arguments[0] = raw::number(directory);
    // The call may wait for the other end of a pipe, and be interrupted.
    // SAFETY: the program's own call, with another directory.
    let result = local().outside(|| unsafe { raw::call(call.number as u64, &arguments) });
    raw::close(directory);
    Ok(raw::outcome(result)?)
}
