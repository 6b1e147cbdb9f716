//! Decides which paths lead into the mount. The mount appears at a prefix, which needs no mount in the kernel. The
//! kernel resolves paths that never touch the mount, the mount resolves paths that stay in it, and this module resolves
//! paths that cross between the two.
//!
//! - An absolute path is compared with the prefix byte by byte, without a copy. All other absolute paths go directly to
//!   the kernel. If the kernel does not find such a path (ENOENT, ENOTDIR), it is checked again: this finds
//!   `/usr/../PREFIX/x`, a symbolic link of the kernel's into the mount, and a relative path from a folder above the
//!   prefix. So the prefix must not exist in the kernel's tree, or must be a mount of the same files; the folder above
//!   it must exist. Calls that create a name equal to the last component of the prefix are checked first, because the
//!   kernel would create it beside the mount.
//! - A relative path is ours if the working directory or the directory descriptor is ours. It is also ours if it leads
//!   down into the mount from a working directory or a descriptor above the prefix (`mkdir -p` and `rsync` go down step
//!   by step). Otherwise the kernel would open the same files at the node's mount, where each call is a message.
//! - If the kernel's working directory is in the node's mount (a shell without the library was there, or a link leads
//!   there), the first relative path makes it ours.
//! - The mount refuses a path that leaves it (`Errno::LEAVES`). This module then walks it one component at a time from
//!   `/`, reads links on both sides, and gets an absolute path without links, which the mount or the kernel serves.
//! - `/proc/self/fd/N`, `/dev/fd/N`, `/dev/stdin` and similar paths stand for the file of descriptor N, if it is ours.
//!
//! While the working directory is ours, the kernel's is a folder of `/proc` in which no file can be created, so that a
//! relative path which misses the library gives an error.

use crate::descriptors::{self, DescriptionRef};
use crate::dispatch::{Answer, Call, Refusal};
use crate::kernel_links;
use crate::memory;
use crate::mount::{Errno, MountPath, Target};
use crate::raw;
use crate::start::{Site, site};
use crate::table::PathArgument;
use crate::walk::{Walked, walk, walk_by};
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Linux's PATH_MAX, with its NUL.
pub const PATH_BYTES_MAX: usize = 4096;
/// The kernel's working directory while that of the process is ours.
const UNWRITABLE_FOLDER: &CStr = c"/proc/self/fdinfo";

/// The kernel's working directory is a folder above the prefix.
static CWD_IS_ABOVE_PREFIX: AtomicBool = AtomicBool::new(false);
/// The kernel's working directory is at the prefix or below: in the node's mount.
static CWD_IS_IN_MOUNT: AtomicBool = AtomicBool::new(false);
/// The process has changed its root, and the prefix is a path outside of the mount there.
static HAS_OTHER_ROOT: AtomicBool = AtomicBool::new(false);
static UMASK: AtomicU32 = AtomicU32::new(0o022);

/// The result of resolving a path of a call.
pub enum ResolvedPath {
    /// A path in the mount, from an open directory or (`None`) from the root.
    Mount(Option<DescriptionRef>, Vec<u8>),
    /// The open file itself (`AT_EMPTY_PATH`, `/proc/self/fd/N`).
    Open(DescriptionRef),
    /// The kernel resolves the path, unchanged.
    Kernel,
}

impl ResolvedPath {
    /// The path from the root of the mount, or `Some(None)` for a path of the kernel's; `None` for one that starts elsewhere.
    fn whole_path(&self) -> Option<Option<&[u8]>> {
        match self {
            Self::Mount(None, path) => Some(Some(path)),
            Self::Kernel => Some(None),
            Self::Mount(Some(_), _) | Self::Open(_) => None,
        }
    }
}

/// Asks the kernel for the umask, before the program has threads.
pub fn learn_umask() {
    // SAFETY: takes a number, cannot fail.
    unsafe {
        let mask = raw::try_call(libc::SYS_umask, &[0]).unwrap_or(0o022);
        let _ = raw::try_call(libc::SYS_umask, &[mask]);
        UMASK.store(mask as u32, Ordering::Relaxed);
    }
}

/// Notes that the program has set the umask, or a child that shares the memory of the program has set its own.
pub fn set_umask(mask: u32) {
    if !descriptors::note_own_umask(mask & 0o777) {
        UMASK.store(mask & 0o777, Ordering::Relaxed);
    }
}

/// Bits that are removed from the mode of a new file.
pub fn umask() -> u32 {
    descriptors::own_umask().unwrap_or_else(|| UMASK.load(Ordering::Relaxed))
}

/// The path without `.`, doubled slashes and a slash at its end; `None` if it is not absolute or contains `..`.
pub fn normal(path: &[u8]) -> Option<Vec<u8>> {
    if path.first() != Some(&b'/') {
        return None;
    }
    let mut normal = Vec::new();
    for part in components(path) {
        if part == b".." {
            return None;
        }
        normal.push(b'/');
        normal.extend_from_slice(part);
    }
    Some(normal)
}

pub fn components(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".")
}

/// The part of an absolute path after the prefix, without its leading slashes.
pub fn below<'a>(site: &Site, path: &'a [u8]) -> Option<&'a [u8]> {
    if HAS_OTHER_ROOT.load(Ordering::Relaxed) {
        return None;
    }
    let rest = path.strip_prefix(site.prefix.as_slice())?;
    match rest.first() {
        None => Some(rest),
        Some(b'/') => Some(&rest[rest.iter().take_while(|byte| **byte == b'/').count()..]),
        Some(_) => None,
    }
}

/// Whether this path of the call concerns the library. Runs outside, without a copy; only a positive answer may be
/// wrong.
pub fn concern(call: &Call, argument: PathArgument) -> bool {
    let address = call.arguments[usize::from(argument.path)];
    let dir = argument.dir.map_or(libc::AT_FDCWD, |dir| call.int(usize::from(dir)));
    let dir_ours = || match dir {
        libc::AT_FDCWD => is_cwd_ours() || may_lead_below_prefix(),
        dir => descriptors::is_ours(dir) || site().is_some_and(|site| may_pass_prefix(site, call, address)),
    };
    match memory::byte(address) {
        None => address == 0 && dir != libc::AT_FDCWD && descriptors::is_ours(dir),
        Some(b'/') => site().is_some_and(|site| {
            begins(address, &site.prefix)
                || may_make_prefix(site, address, argument)
                || (call.number as i64 == libc::SYS_openat2 && dir_ours())
                || ((begins(address, b"/proc") || begins(address, b"/dev")) && descriptors::any())
        }),
        Some(_) => dir_ours() || site().is_some_and(|site| may_make_prefix(site, address, argument)),
    }
}

/// Whether this path of the call leads into the mount as it is written, without links and `..`.
pub fn names_mount(call: &Call, argument: PathArgument) -> bool {
    let address = call.arguments[usize::from(argument.path)];
    let dir = argument.dir.map_or(libc::AT_FDCWD, |dir| call.int(usize::from(dir)));
    match memory::byte(address) {
        Some(b'/') => site().is_some_and(|site| begins(address, &site.prefix)),
        _ if dir == libc::AT_FDCWD => is_cwd_ours(),
        _ => descriptors::is_ours(dir),
    }
}

/// Whether a path relative to a descriptor of the kernel's has a component equal to the last one of the prefix: only such a
/// path can lead down into the mount. Runs outside, without a copy. The restrictions of `openat2` are the kernel's to check
/// at its own descriptors.
fn may_pass_prefix(site: &Site, call: &Call, address: u64) -> bool {
    if call.number as i64 == libc::SYS_openat2 {
        return false;
    }
    let name = last_component(site);
    // Bytes of the component that are equal so far; none once one differs.
    let mut equal = Some(0);
    for index in 0..PATH_BYTES_MAX {
        match memory::byte(address.wrapping_add(index as u64)) {
            None => return false,
            Some(0) => return equal == Some(name.len()),
            Some(b'/') if equal == Some(name.len()) => return true,
            Some(b'/') => equal = Some(0),
            Some(byte) => equal = equal.filter(|at| name.get(*at) == Some(&byte)).map(|at| at + 1),
        }
    }
    false
}

fn last_component(site: &Site) -> &[u8] {
    components(&site.prefix).next_back().unwrap_or_default()
}

/// Whether the call may create a name equal to the last component of the prefix. Runs outside, without a copy.
fn may_make_prefix(site: &Site, address: u64, argument: PathArgument) -> bool {
    if !argument.makes {
        return false;
    }
    let at = |index: usize| memory::byte(address.wrapping_add(index as u64));
    let (mut begin, mut end) = (0, 0);
    for index in 0..PATH_BYTES_MAX {
        match at(index) {
            None => return false,
            Some(0) => break,
            Some(b'/') => {}
            Some(_) => {
                if end < index {
                    begin = index;
                }
                end = index + 1;
            }
        }
    }
    let name = last_component(site);
    end - begin == name.len() && (begin..end).map(at).eq(name.iter().copied().map(Some))
}

/// The path in the mount, if the kernel would create this name beside the mount.
fn path_of_created_prefix(site: &Site, call: &Call, at: PathArgument) -> Option<Vec<u8>> {
    if !may_make_prefix(site, call.arguments[usize::from(at.path)], at) {
        return None;
    }
    let path = path_into_mount(site, call, at)?.into_bytes();
    below(site, &path).map(<[u8]>::to_vec)
}

/// True if the string at the address begins with these bytes, followed by the end of a component.
fn begins(address: u64, with: &[u8]) -> bool {
    let at = |index: usize| memory::byte(address.wrapping_add(index as u64));
    (1..with.len()).all(|index| at(index) == Some(with[index])) && matches!(at(with.len()), Some(0 | b'/'))
}

fn is_cwd_ours() -> bool {
    descriptors::is_ours(descriptors::CWD)
}

/// The working directory, if it is ours.
pub fn cwd() -> Option<DescriptionRef> {
    if is_cwd_ours() { descriptors::get(descriptors::CWD).ok() } else { None }
}

/// Makes a directory of ours the working directory.
///
/// # Errors
/// Only if the table of descriptors has no entry for the working directory, which never happens.
pub fn set_cwd(held: DescriptionRef) -> Result<(), Errno> {
    // SAFETY: the string is static. If the call fails, the kernel's working directory stays the same.
    let _ = unsafe { raw::try_call(libc::SYS_chdir, &[UNWRITABLE_FOLDER.as_ptr() as u64]) };
    descriptors::put(descriptors::CWD, held)
}

/// Notes that the kernel's working directory is that of the process again, and has changed.
pub fn clear_cwd() {
    drop(descriptors::take(descriptors::CWD));
    if crate::local::local().borrowed().is_some() {
        return;
    }
    let here = kernel_directory(libc::AT_FDCWD).unwrap_or_default();
    let (above, within) = site().map_or((false, false), |site| {
        let up = here.strip_suffix(b"/").unwrap_or(&here);
        let rest = site.prefix.strip_prefix(up);
        (rest.is_some_and(|rest| rest.first() == Some(&b'/')), below(site, &here).is_some())
    });
    CWD_IS_ABOVE_PREFIX.store(above, Ordering::Relaxed);
    CWD_IS_IN_MOUNT.store(within, Ordering::Relaxed);
}

/// The working directory, if it is ours, or the kernel's is in the node's mount and becomes ours by this.
pub fn entered_cwd() -> Option<DescriptionRef> {
    if is_cwd_ours() || !CWD_IS_IN_MOUNT.load(Ordering::Relaxed) || crate::local::local().borrowed().is_some()
    {
        return cwd();
    }
    let site = site()?;
    let here = kernel_directory(libc::AT_FDCWD)?;
    let place = MountPath { dir: None, path: below(site, &here)? };
    let handle = site.mount.open(place, libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC, 0, 0).ok()?;
    let held = DescriptionRef::new(handle).inspect_err(|_| site.mount.close(handle)).ok()?;
    set_cwd(held).ok()?;
    cwd()
}

/// Whether a relative path may lead into the mount from the kernel's working directory, above or in it. A child between vfork and
/// exec has its own working directory, which the library does not store.
fn may_lead_below_prefix() -> bool {
    let (above, within) = (&CWD_IS_ABOVE_PREFIX, &CWD_IS_IN_MOUNT);
    let leads = above.load(Ordering::Relaxed) || within.load(Ordering::Relaxed);
    leads || crate::local::local().borrowed().is_some()
}

/// The part after the prefix of a relative path that leads down into the mount from a directory of the kernel's.
fn path_below_prefix(site: &Site, dir: i32, path: &[u8]) -> Option<Vec<u8>> {
    let here = kernel_directory(dir)?;
    let whole = [here.as_slice(), b"/", path].concat();
    let directory: &[u8] = match path {
        [.., b'/'] => b"/",
        [.., b'/', b'.'] => b"/.",
        _ => b"",
    };
    Some([below(site, &normal(&whole)?)?, directory].concat())
}

/// The path of a directory that the kernel has open, or of its working directory.
fn kernel_directory(dir: i32) -> Option<Vec<u8>> {
    let link = if dir == libc::AT_FDCWD { "/proc/self/cwd".into() } else { format!("/proc/self/fd/{dir}") };
    kernel_links::target(link.as_bytes()).ok().filter(|path| path.first() == Some(&b'/'))
}

/// Whether a descriptor of the kernel's is one of a directory, as the working directory is. The path of another file says
/// nothing: that of a pipe may have another name after it.
fn is_directory(dir: i32) -> bool {
    let arguments = [raw::number(dir), c".".as_ptr() as u64, libc::F_OK as u64];
    // SAFETY: the path lives across the call.
    let found = unsafe { raw::try_call(libc::SYS_faccessat, &arguments) };
    found != Err(Errno(libc::ENOTDIR))
}

/// Device and inode of the folder above the prefix, as this process sees it.
fn above() -> Option<(u32, u32, u64)> {
    let prefix = &site()?.prefix;
    let end = prefix.iter().rposition(|byte| *byte == b'/')?;
    let path = CString::new(&prefix[..end.max(1)]).ok()?;
    let mut status = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let asked = u64::from(libc::STATX_INO);
    let arguments = [raw::number(libc::AT_FDCWD), path.as_ptr() as u64, 0, asked, status.as_mut_ptr() as u64];
    // SAFETY: the path and the structure live across the call.
    unsafe { raw::try_call(libc::SYS_statx, &arguments) }.ok()?;
    // SAFETY: zeroed, and plain numbers.
    let status = unsafe { status.assume_init() };
    Some((status.stx_dev_major, status.stx_dev_minor, status.stx_ino))
}

/// Changes the root by this call. If the prefix is another path afterwards, only open files lead to the mount.
///
/// # Errors
/// Those of the call.
pub fn change_root(change: impl FnOnce() -> Result<u64, Errno>) -> Result<u64, Errno> {
    let before = above();
    if let Some(site) = site() {
        site.mount.before_root_change();
    }
    let changed = change()?;
    if before.is_none() || above() != before {
        // A child between vfork and exec shares this flag with its parent, whose root stays the same.
        HAS_OTHER_ROOT.fetch_or(crate::local::local().borrowed().is_none(), Ordering::Relaxed);
    }
    Ok(changed)
}

/// The working directory's path as the program sees it, if it is ours.
///
/// # Errors
/// ENOENT: it was removed.
pub fn cwd_path() -> Result<Option<Vec<u8>>, Errno> {
    cwd().map(|held| path_of(&held)).transpose()
}

/// Path of an open file as the program sees it.
///
/// # Errors
/// ENOENT: it has no name any more.
pub fn path_of(held: &DescriptionRef) -> Result<Vec<u8>, Errno> {
    let site = site().ok_or(Errno(libc::EIO))?;
    let rest = site.mount.path(held.handle())?;
    let mut path = site.prefix.clone();
    if !rest.is_empty() {
        path.push(b'/');
        path.extend_from_slice(&rest);
    }
    Ok(path)
}

/// The descriptor that a path names by `/proc/self/fd/N` or a similar path, if it is ours, and the rest of the path.
pub fn magic(path: &[u8]) -> Option<(i32, &[u8])> {
    let standard = [(&b"/dev/stdin"[..], 0), (b"/dev/stdout", 1), (b"/dev/stderr", 2)];
    if let Some((_, fd)) = standard.into_iter().find(|(name, _)| *name == path) {
        return descriptors::is_ours(fd).then_some((fd, &[]));
    }
    let rest = path.strip_prefix(b"/dev/fd/").or_else(|| {
        let rest = path.strip_prefix(b"/proc/")?;
        let end = rest.iter().position(|byte| *byte == b'/')?;
        let (process, rest) = rest.split_at(end);
        let ours = process == b"self" || process == b"thread-self" || number(process) == Some(raw::process());
        ours.then_some(rest)?.strip_prefix(b"/fd/")
    })?;
    let end = rest.iter().position(|byte| *byte == b'/').unwrap_or(rest.len());
    let fd = number(&rest[..end])?;
    descriptors::is_ours(fd).then_some((fd, &rest[end..]))
}

fn number(digits: &[u8]) -> Option<i32> {
    let plain = digits.first().is_some_and(u8::is_ascii_digit);
    plain.then(|| std::str::from_utf8(digits).ok()?.parse().ok()).flatten()
}

/// An open file, which has to be a directory because slashes follow its name.
fn as_directory(held: DescriptionRef) -> Result<DescriptionRef, Errno> {
    let site = site().ok_or(Errno(libc::EIO))?;
    let mode = site.mount.attributes(Target::Open(held.handle()))?.stx_mode;
    let is_directory = u32::from(mode) & libc::S_IFMT == libc::S_IFDIR;
    if is_directory { Ok(held) } else { Err(Errno(libc::ENOTDIR)) }
}

/// Resolves a path of a call.
///
/// # Errors
/// EFAULT, ENAMETOOLONG, ENOENT (empty), ENOTDIR.
pub fn resolve(call: &Call, argument: PathArgument) -> Result<ResolvedPath, Errno> {
    let site = site().ok_or(Errno(libc::EIO))?;
    let dir = argument.dir.map_or(libc::AT_FDCWD, |dir| call.int(usize::from(dir)));
    let address = call.arguments[usize::from(argument.path)];
    if address == 0 && argument.empty && argument.null && dir != libc::AT_FDCWD {
        return descriptors::get(dir).map(ResolvedPath::Open);
    }
    let path = memory::read_string(address, PATH_BYTES_MAX)?;
    if path.first() == Some(&b'/') {
        if let Some(rest) = below(site, &path) {
            return Ok(ResolvedPath::Mount(None, rest.to_vec()));
        }
        return match magic(&path) {
            Some((fd, rest)) if rest.is_empty() && argument.follow => {
                descriptors::get(fd).map(ResolvedPath::Open)
            }
            Some((fd, rest)) if !rest.is_empty() => {
                let slashes = rest.iter().take_while(|byte| **byte == b'/').count();
                match &rest[slashes..] {
                    // The name is one of the kernel's.
                    [] if argument.entry => Ok(ResolvedPath::Kernel),
                    [] => as_directory(descriptors::get(fd)?).map(ResolvedPath::Open),
                    rest => Ok(ResolvedPath::Mount(Some(descriptors::get(fd)?), rest.to_vec())),
                }
            }
            _ => Ok(path_of_created_prefix(site, call, argument)
                .map_or(ResolvedPath::Kernel, |rest| ResolvedPath::Mount(None, rest))),
        };
    }
    let held = if dir == libc::AT_FDCWD {
        entered_cwd()
    } else if descriptors::is_ours(dir) {
        Some(descriptors::get(dir)?)
    } else {
        None
    };
    let Some(held) = held else {
        let may_lead_down = match dir {
            libc::AT_FDCWD => may_lead_below_prefix(),
            _ => components(&path).any(|part| part == last_component(site)),
        };
        let down = if may_lead_down { path_below_prefix(site, dir, &path) } else { None };
        let rest = down.or_else(|| path_of_created_prefix(site, call, argument));
        return Ok(rest.map_or(ResolvedPath::Kernel, |rest| ResolvedPath::Mount(None, rest)));
    };
    if path.is_empty() {
        return if argument.empty { Ok(ResolvedPath::Open(held)) } else { Err(Errno(libc::ENOENT)) };
    }
    Ok(ResolvedPath::Mount(Some(held), path))
}

/// Serves a call with one path. `work` gets the open file, or the path and whether a link at its end is followed; it
/// may be called a second time with another path.
///
/// # Errors
/// Those of `work`; or that the kernel has to serve the call.
pub fn serve(call: &Call, at: PathArgument, work: impl Fn(Target<'_>) -> Result<u64, Errno>) -> Answer {
    let (dir, path) = match resolve(call, at)? {
        ResolvedPath::Kernel => return Err(Refusal::Pass),
        ResolvedPath::Open(held) => return Ok(work(Target::Open(held.handle()))?),
        ResolvedPath::Mount(dir, path) => (dir, path),
    };
    let place = MountPath { dir: dir.as_ref().map(DescriptionRef::handle), path: &path };
    match work(Target::Named(place, at.follow)) {
        Err(Errno::LEAVES) => match walk(&absolute(dir.as_ref(), &path)?, at.end())? {
            Walked::Mount(path) => Ok(work(Target::Named(MountPath { dir: None, path: &path }, false))?),
            Walked::Kernel(path) => Err(Refusal::OtherPaths(vec![(at, path)])),
        },
        result => Ok(result?),
    }
}

/// Serves a call with two paths, which both have to be in the mount.
///
/// # Errors
/// Those of `work`; EXDEV if one path is in the mount and the other is not; or that the kernel has to serve the call.
pub fn serve_two(
    call: &Call,
    one: PathArgument,
    two: PathArgument,
    work: impl Fn(Target<'_>, MountPath<'_>) -> Result<u64, Errno>,
) -> Answer {
    let (from, to) = (resolve(call, one)?, resolve(call, two)?);
    let cross_device = Refusal::Errno(Errno(libc::EXDEV));
    if one.entry {
        let (from, to) = (from.whole_path(), to.whole_path());
        if let (Some(from), Some(to)) = (from, to) {
            refuse_root(from, to)?;
        }
    }
    let (from_dir, from_path, to_dir, to_path) = match (from, to) {
        (ResolvedPath::Kernel, ResolvedPath::Kernel) => return Err(Refusal::Pass),
        (ResolvedPath::Open(from), ResolvedPath::Mount(dir, path)) => {
            let from = Target::Open(from.handle());
            let place = MountPath { dir: dir.as_ref().map(DescriptionRef::handle), path: &path };
            return match work(from, place) {
                Err(Errno::LEAVES) => match walk(&absolute(dir.as_ref(), &path)?, two.end())? {
                    Walked::Mount(path) => Ok(work(from, MountPath { dir: None, path: &path })?),
                    Walked::Kernel(_) => Err(cross_device),
                },
                result => Ok(result?),
            };
        }
        (ResolvedPath::Mount(from_dir, from_path), ResolvedPath::Mount(to_dir, to_path)) => {
            (from_dir, from_path, to_dir, to_path)
        }
        _ => return Err(cross_device),
    };
    let from = MountPath { dir: from_dir.as_ref().map(DescriptionRef::handle), path: &from_path };
    let to = MountPath { dir: to_dir.as_ref().map(DescriptionRef::handle), path: &to_path };
    match work(Target::Named(from, one.follow), to) {
        Err(Errno::LEAVES) => {}
        result => return Ok(result?),
    }
    let from = walk(&absolute(from_dir.as_ref(), &from_path)?, one.end())?;
    let to = walk(&absolute(to_dir.as_ref(), &to_path)?, two.end())?;
    if one.entry {
        refuse_root(from.in_mount(), to.in_mount())?;
    }
    match (from, to) {
        (Walked::Mount(from), Walked::Mount(to)) => {
            let from = Target::Named(MountPath { dir: None, path: &from }, false);
            Ok(work(from, MountPath { dir: None, path: &to })?)
        }
        (Walked::Kernel(from), Walked::Kernel(to)) => Err(Refusal::OtherPaths(vec![(one, from), (two, to)])),
        _ => Err(cross_device),
    }
}

/// Refuses to rename the root of the mount by its name in the kernel's tree, or another name over it. `None` is a path of the
/// kernel's.
///
/// # Errors
/// EBUSY, as for a mount point; EXDEV if the other name is within the mount.
fn refuse_root(from: Option<&[u8]>, to: Option<&[u8]>) -> Result<(), Errno> {
    let is_root = |path: Option<&[u8]>| path.is_some_and(|path| path.iter().all(|byte| *byte == b'/'));
    match (is_root(from), is_root(to)) {
        (true, false) | (false, true) if from.is_some() && to.is_some() => Err(Errno(libc::EXDEV)),
        (false, false) => Ok(()),
        _ => Err(Errno(libc::EBUSY)),
    }
}

/// The path from `/`, for a path that starts at a directory of ours.
fn absolute(dir: Option<&DescriptionRef>, path: &[u8]) -> Result<Vec<u8>, Errno> {
    let mut whole = match dir {
        Some(held) => path_of(held)?,
        None => site().ok_or(Errno(libc::EIO))?.prefix.clone(),
    };
    whole.push(b'/');
    whole.extend_from_slice(path);
    Ok(whole)
}

/// Called if the kernel did not find a path: the path in the mount to which it leads, if any, or the kernel's path to which
/// it leads through the mount.
pub fn path_into_mount(site: &Site, call: &Call, at: PathArgument) -> Option<CString> {
    let path = memory::read_string(call.arguments[usize::from(at.path)], PATH_BYTES_MAX).ok()?;
    let dir = at.dir.map_or(libc::AT_FDCWD, |dir| call.int(usize::from(dir)));
    let mut whole = Vec::new();
    if path.first()? != &b'/' {
        if !is_directory(dir) {
            return None;
        }
        whole = kernel_directory(dir)?;
        whole.push(b'/');
    }
    whole.extend_from_slice(&path);
    // Without `..` and without a link of the kernel's, the text of the path alone decides.
    let by_text = normal(&whole).map(|whole| below(site, &whole).is_some());
    if by_text == Some(false) && !meets_link(dir, path) {
        return None;
    }
    match walk_by(&whole, at.end_in(call)).ok()? {
        (Walked::Mount(rest), _) => CString::new([site.prefix.as_slice(), b"/", &rest].concat()).ok(),
        // A path without links and `..` does not meet the restrictions of `openat2` any more.
        (Walked::Kernel(path), true) if call.number as i64 != libc::SYS_openat2 => Some(path),
        (Walked::Kernel(_), _) => None,
    }
}

/// Whether the path contains a symbolic link of the kernel's.
fn meets_link(dir: i32, path: Vec<u8>) -> bool {
    let Ok(path) = CString::new(path) else { return false };
    let how = [(libc::O_PATH | libc::O_CLOEXEC) as u64, 0, libc::RESOLVE_NO_SYMLINKS];
    let arguments = [raw::number(dir), path.as_ptr() as u64, how.as_ptr() as u64, size_of_val(&how) as u64];
    // SAFETY: path and structure live across the call.
    match unsafe { raw::try_call(libc::SYS_openat2, &arguments) } {
        Ok(fd) => {
            raw::close(fd as i32);
            false
        }
        // A kernel without openat2 gives no answer.
        Err(errno) => matches!(errno, Errno(libc::ELOOP | libc::ENOSYS)),
    }
}
