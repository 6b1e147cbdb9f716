//! The working directory.

use super::data::mount;
use crate::dispatch::{Answer, Call, Refusal};
use crate::memory;
use crate::mount::{Errno, Target};
use crate::paths::{self, ResolvedPath};
use crate::raw;
use crate::start::site;
use crate::table::{self, PathArgument};
use crate::{descriptors, descriptors::DescriptionRef};

const HERE: PathArgument = table::path(0);

/// `getcwd`
pub fn getcwd(call: &Call) -> Answer {
    let Some(mut path) = paths::cwd_path()? else { return Err(Refusal::Pass) };
    path.push(0);
    if path.len() as u64 > call.arguments[1] {
        return Err(Errno(libc::ERANGE).into());
    }
    memory::write_bytes(call.arguments[0], &path)?;
    Ok(path.len() as u64)
}

/// `chdir`, into the mount, within it, or out of it.
pub fn chdir(call: &Call) -> Answer {
    if !paths::concern(call, HERE) {
        return chdir_in_kernel(call);
    }
    match paths::serve(call, HERE, set_working_directory) {
        Err(Refusal::Pass) => chdir_in_kernel(call),
        Err(Refusal::OtherPaths(redirect)) => {
            let path = redirect.first().map_or(0, |(_, path)| path.as_ptr() as u64);
            chdir_out(path)
        }
        other => other,
    }
}

/// Makes a directory of the kernel's the working directory, by a path of the library's.
fn chdir_out(path: u64) -> Answer {
    // SAFETY: the path lives across the call.
    let changed = unsafe { raw::try_call(libc::SYS_chdir, &[path]) }?;
    paths::clear_cwd();
    Ok(changed)
}

fn chdir_in_kernel(call: &Call) -> Answer {
    // SAFETY: the program's own call.
    match raw::outcome(unsafe { raw::call(libc::SYS_chdir as u64, &call.arguments) }) {
        Ok(changed) => {
            paths::clear_cwd();
            Ok(changed)
        }
        Err(Errno(libc::ENOENT | libc::ENOTDIR)) => {
            let lead = site().and_then(|site| paths::path_into_mount(site, call, HERE));
            let Some(path) = lead else { return Err(Errno(libc::ENOENT).into()) };
            let call = Call { number: call.number, arguments: [path.as_ptr() as u64, 0, 0, 0, 0, 0] };
            match paths::serve(&call, HERE, set_working_directory) {
                Err(Refusal::Pass) => chdir_out(call.arguments[0]),
                changed => changed,
            }
        }
        Err(errno) => Err(errno.into()),
    }
}

/// Makes a directory of the mount the working directory, if it may be searched.
fn set_working_directory(target: Target<'_>) -> Result<u64, Errno> {
    const FLAGS: i32 = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let handle = match target {
        Target::Named(place, _) => mount().open(place, FLAGS, 0, 0)?,
        Target::Open(file) => mount().reopen(file, FLAGS, 0)?,
    };
    let held = DescriptionRef::new(handle).inspect_err(|_| mount().close(handle))?;
    mount().access(Target::Open(handle), libc::X_OK, libc::AT_EACCESS)?;
    paths::set_cwd(held).map(|()| 0)
}

/// `fchdir`
pub fn fchdir(call: &Call) -> Answer {
    if descriptors::is_ours(call.int(0)) {
        let held = call.file(0)?;
        let status = mount().attributes(Target::Open(held.handle()))?;
        if u32::from(status.stx_mode) & libc::S_IFMT != libc::S_IFDIR {
            return Err(Errno(libc::ENOTDIR).into());
        }
        mount().access(Target::Open(held.handle()), libc::X_OK, libc::AT_EACCESS)?;
        return Ok(paths::set_cwd(held).map(|()| 0)?);
    }
    // SAFETY: the program's own call, which takes no memory.
    let changed = raw::outcome(unsafe { raw::call(libc::SYS_fchdir as u64, &call.arguments) })?;
    paths::clear_cwd();
    Ok(changed)
}

/// `chroot`: never into the mount, which does not exist for the kernel.
pub fn chroot(call: &Call) -> Answer {
    if paths::concern(call, HERE) && !matches!(paths::resolve(call, HERE)?, ResolvedPath::Kernel) {
        return Err(Errno(libc::EPERM).into());
    }
    // SAFETY: the program's own call.
    let change = || raw::outcome(unsafe { raw::call(libc::SYS_chroot as u64, &call.arguments) });
    Ok(paths::change_root(change)?)
}
