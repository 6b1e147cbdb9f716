//! Calls on descriptors: duplicating, closing, flags, locks.

use super::copies;
use super::data::mount;
use crate::descriptors::{self, DescriptionRef};
use crate::dispatch::{Answer, Call, Refusal, is_path};
use crate::memory;
use crate::mount::{Errno, Lock};
use crate::raw;

const FIONREAD: u64 = 0x541b;
const FIONBIO: u64 = 0x5421;
const FIOASYNC: u64 = 0x5452;
const FIONCLEX: u64 = 0x5450;
const FIOCLEX: u64 = 0x5451;
const FIGETBSZ: u64 = 2;
const FIEMAP: u64 = 0xc020_660b;
const FIOQSIZE: u64 = 0x5460;
const FIDEDUPERANGE: u64 = 0xc018_9436;
const FICLONE: u64 = 0x4004_9409;
const FICLONERANGE: u64 = 0x4020_940d;
/// Locks that Linux had until 5.17: it ignores requests for them.
const LOCK_MAND: i32 = 32;
const F_DUPFD_QUERY: i32 = 1027;
const F_CREATED_QUERY: i32 = 1028;

fn bad() -> Errno {
    Errno(libc::EBADF)
}

/// `close`. The number is released before the kernel may reuse it.
pub fn close(call: &Call) -> Answer {
    let held = descriptors::take(call.int(0)).ok_or_else(bad)?;
    raw::close(call.int(0));
    held.close();
    Ok(0)
}

/// Makes the number of a duplicated placeholder stand for the same file.
fn duplicated(fd: u64, held: DescriptionRef) -> Answer {
    if fd == descriptors::CWD as u64 {
        raw::close(fd as i32);
        return Err(Errno(libc::EMFILE).into());
    }
    descriptors::put(fd as i32, held).inspect_err(|_| raw::close(fd as i32))?;
    Ok(fd)
}

/// `dup`
pub fn dup(call: &Call) -> Answer {
    let held = call.file(0)?;
    // SAFETY: takes no memory.
    duplicated(unsafe { raw::try_call(libc::SYS_dup, &[raw::number(call.int(0))]) }?, held)
}

/// `dup2`, for any pair of descriptors, ours or the kernel's.
pub fn dup2(call: &Call) -> Answer {
    // With equal numbers the call only checks that the descriptor exists.
    if call.int(0) == call.int(1) { Err(Refusal::Pass) } else { duplicate_onto(call, 0) }
}

/// `dup3`
pub fn dup3(call: &Call) -> Answer {
    if call.int(0) == call.int(1) { Err(Refusal::Pass) } else { duplicate_onto(call, call.arguments[2]) }
}

fn duplicate_onto(call: &Call, flags: u64) -> Answer {
    let (from, to) = (call.int(0), call.int(1));
    if let Some(internal) = descriptors::internal(to) {
        internal.free_number()?;
    }
    let held = if descriptors::is_ours(from) { Some(call.file(0)?) } else { None };
    // SAFETY: takes no memory.
    let fd = unsafe { raw::try_call(libc::SYS_dup3, &[raw::number(from), raw::number(to), flags]) }?;
    match held {
        Some(held) => duplicated(fd, held),
        None => {
            if let Some(held) = descriptors::take(to) {
                held.close();
            }
            Ok(fd)
        }
    }
}

/// `close_range`: closes all descriptors but the library's own.
pub fn close_range(call: &Call) -> Answer {
    let (first, last, flags) = (call.arguments[0] as u32, call.arguments[1] as u32, call.arguments[2] as u32);
    if first > last {
        return Err(Refusal::Pass);
    }
    let closes = flags & libc::CLOSE_RANGE_CLOEXEC == 0;
    let within = |fd: i32| u32::try_from(fd).is_ok_and(|fd| (first..=last).contains(&fd));
    let mut held = Vec::new();
    if closes {
        held.extend(descriptors::ours().into_iter().filter(|fd| within(*fd)).filter_map(descriptors::take));
    }
    let mut from = first;
    let mut pieces = Vec::new();
    for kept in descriptors::internal_numbers().into_iter().filter(|fd| within(*fd)) {
        let kept = kept as u32;
        if kept > from {
            pieces.push((from, kept - 1));
        }
        from = kept + 1;
    }
    if from <= last {
        pieces.push((from, last));
    }
    for (from, to) in pieces {
        // SAFETY: the program's own call on a part of its range.
        let closed = unsafe {
            raw::try_call(libc::SYS_close_range, &[u64::from(from), u64::from(to), u64::from(flags)])
        };
        if let Err(errno) = closed {
            return Err(errno.into());
        }
    }
    held.into_iter().for_each(DescriptionRef::close);
    Ok(0)
}

/// `fcntl`
pub fn fcntl(call: &Call) -> Answer {
    let held = call.file(0)?;
    let file = held.handle();
    let command = call.int(1);
    match command {
        libc::F_DUPFD
        | libc::F_DUPFD_CLOEXEC
        | libc::F_GETFD
        | libc::F_SETFD
        | libc::F_GETFL
        | F_DUPFD_QUERY
        | F_CREATED_QUERY => {}
        _ if is_path(&held) => return Err(bad().into()),
        _ => {}
    }
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
            duplicated(raw::fcntl(call.int(0), command, call.arguments[2])?, held)
        }
        libc::F_GETFD | libc::F_SETFD | F_DUPFD_QUERY | F_CREATED_QUERY => Err(Refusal::Pass),
        libc::F_GETFL => Ok(u64::from(mount().flags(file) as u32)),
        libc::F_SETFL => {
            mount().set_flags(file, call.int(2))?;
            Ok(0)
        }
        libc::F_GETLK
        | libc::F_SETLK
        | libc::F_SETLKW
        | libc::F_OFD_GETLK
        | libc::F_OFD_SETLK
        | libc::F_OFD_SETLKW => {
            let mut range = memory::read_value::<libc::flock>(call.arguments[2])?;
            mount().lock(file, Lock::Range(command, &mut range))?;
            if matches!(command, libc::F_GETLK | libc::F_OFD_GETLK) {
                memory::write_value(call.arguments[2], &range)?;
            }
            Ok(0)
        }
        // A regular file never sends these signals.
        libc::F_SETOWN => check_owner(call.int(2)),
        libc::F_GETOWN => Ok(0),
        libc::F_GETLEASE => Ok(libc::F_UNLCK as u64),
        libc::F_SETLEASE if !(libc::F_RDLCK..=libc::F_UNLCK).contains(&call.int(2)) => {
            Err(Errno(libc::EINVAL).into())
        }
        libc::F_SETPIPE_SZ | libc::F_GETPIPE_SZ => Err(bad().into()),
        libc::F_SETLEASE => Err(Errno(libc::EAGAIN).into()),
        _ => Err(Errno(libc::EINVAL).into()),
    }
}

/// Checks the process, or the negated process group, that is to own a file.
fn check_owner(owner: i32) -> Answer {
    let number = owner.checked_abs().ok_or(Errno(libc::EINVAL))?;
    let exists = |whom: i32| {
        // SAFETY: takes no memory, and signal 0 is only a question.
        let asked = unsafe { raw::try_call(libc::SYS_kill, &[raw::number(whom), 0]) };
        asked != Err(Errno(libc::ESRCH))
    };
    // The kernel looks for the number among processes and groups.
    if number == 0 || exists(number) || exists(-number) { Ok(0) } else { Err(Errno(libc::ESRCH).into()) }
}

/// `flock`
pub fn flock(call: &Call) -> Answer {
    if call.int(1) & LOCK_MAND != 0 {
        return Ok(0);
    }
    mount().lock(call.file(0)?.handle(), Lock::Whole(call.int(1)))?;
    Ok(0)
}

/// `ioctl`: the requests that the kernel serves for every file; for all others, the error of a file that is no
/// terminal.
pub fn ioctl(call: &Call) -> Answer {
    let held = call.open_file(0)?;
    let file = held.handle();
    match call.arguments[1] & 0xffff_ffff {
        FIOCLEX => Ok(raw::fcntl(call.int(0), libc::F_SETFD, libc::FD_CLOEXEC as u64)?),
        FIONCLEX => Ok(raw::fcntl(call.int(0), libc::F_SETFD, 0)?),
        FIONBIO => {
            let on = memory::read_value::<i32>(call.arguments[2])? != 0;
            let others = mount().flags(file) & !libc::O_NONBLOCK;
            mount().set_flags(file, others | if on { libc::O_NONBLOCK } else { 0 })?;
            Ok(0)
        }
        FIOASYNC => {
            let on = memory::read_value::<i32>(call.arguments[2])? != 0;
            let changes = on != (mount().flags(file) & libc::O_ASYNC != 0);
            if changes { Err(Errno(libc::ENOTTY).into()) } else { Ok(0) }
        }
        FIGETBSZ => {
            memory::write_value(call.arguments[2], &(mount().space()?.f_bsize as i32))?;
            Ok(0)
        }
        FIONREAD => {
            let status = mount().attributes(crate::mount::Target::Open(file))?;
            if u32::from(status.stx_mode) & libc::S_IFMT != libc::S_IFREG {
                return Err(Errno(libc::ENOTTY).into());
            }
            let at = mount().seek(file, 0, libc::SEEK_CUR)?;
            let left = i32::try_from(status.stx_size.saturating_sub(at)).unwrap_or(i32::MAX);
            memory::write_value(call.arguments[2], &left)?;
            Ok(0)
        }
        FIOQSIZE => {
            let status = mount().attributes(crate::mount::Target::Open(file))?;
            let kind = u32::from(status.stx_mode) & libc::S_IFMT;
            if !matches!(kind, libc::S_IFREG | libc::S_IFDIR) {
                return Err(Errno(libc::ENOTTY).into());
            }
            memory::write_value(call.arguments[2], &(status.stx_blocks * 512))?;
            Ok(0)
        }
        FICLONE => copies::clone_range(call.arguments[2] as i32, &held),
        FICLONERANGE => {
            let [from, ..] = memory::read_value::<[i64; 4]>(call.arguments[2])?;
            copies::clone_range(from as i32, &held)
        }
        FIDEDUPERANGE => copies::share_same(&held, call.arguments[2]),
        FIEMAP => Err(Errno(libc::EOPNOTSUPP).into()),
        _ => Err(Errno(libc::ENOTTY).into()),
    }
}
