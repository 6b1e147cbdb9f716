//! Calls on the process itself: exec, umask, users, limits, signal handlers.

use crate::dispatch::{Answer, Call, Refusal};
use crate::local::local;
use crate::{exec, fork, limits, memory, paths, raw, signals, start};

/// `umask`: the kernel keeps it, and we remember it.
pub fn umask(call: &Call) -> Answer {
    paths::set_umask(call.arguments[0] as u32);
    Err(Refusal::Pass)
}

/// `setuid` and similar calls: the kernel decides, then the mount is informed. A child in its parent's memory changes
/// only its own user, and the program that it executes attaches by itself.
pub fn set_user(call: &Call) -> Answer {
    let Some(site) = start::site().filter(|_| local().borrowed().is_none()) else {
        return Err(Refusal::Pass);
    };
    // SAFETY: the program's own call.
    let result = unsafe { raw::call(call.number as u64, &call.arguments) };
    let done = raw::outcome(result)?;
    site.mount.user_changed();
    Ok(done)
}

/// `setrlimit` and `prlimit64`: the kernel keeps the limits. A child in its parent's memory changes only its own
/// limits.
pub fn set_limit(call: &Call) -> Answer {
    const SETRLIMIT: usize = 160;
    // SAFETY: the program's own call.
    let done = raw::outcome(unsafe { raw::call(call.number as u64, &call.arguments) })?;
    let (process, resource) =
        if call.number == SETRLIMIT { (0, call.int(0)) } else { (call.int(0), call.int(1)) };
    let own = (process == 0 || process == raw::process()) && local().borrowed().is_none();
    if own && resource.cast_unsigned() == libc::RLIMIT_FSIZE {
        limits::learn_file_bytes();
    }
    if own {
        limits::heed_memory(resource.cast_unsigned());
    }
    Ok(done)
}

/// `mprotect` and `pkey_mprotect`: the library has not checked memory that a program makes executable by itself.
pub fn protect(call: &Call) -> Answer {
    if call.arguments[2] & libc::PROT_EXEC as u64 != 0 {
        fork::note_unseen();
    }
    Err(Refusal::Pass)
}

/// `execve`
pub fn execve(call: &Call) -> Answer {
    let [path, arguments, environment, ..] = call.arguments;
    exec::exec(libc::AT_FDCWD, path, arguments, environment, 0)
}

/// `execveat`
pub fn execveat(call: &Call) -> Answer {
    let [_, path, arguments, environment, flags, _] = call.arguments;
    exec::exec(call.int(0), path, arguments, environment, flags)
}

/// `rt_sigaction`
pub fn rt_sigaction(call: &Call) -> Answer {
    let [signal, new, old, mask_bytes, ..] = call.arguments;
    if mask_bytes != 8 || !signals::can_be_handled(signal) {
        return Err(Refusal::Pass);
    }
    let new = if new == 0 { None } else { Some(memory::read_value::<signals::Action>(new)?) };
    let before = signals::set(signal as usize, new.as_ref())?;
    if old != 0 {
        memory::write_value(old, &before)?;
    }
    Ok(0)
}
