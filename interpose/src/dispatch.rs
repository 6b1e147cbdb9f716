//! The one place where every call ends, from a symbol or from a patched instruction: `dispatch(number, arguments)`.
//!
//! First, the dispatcher decides outside whether the call concerns the library, by the bit of a descriptor or the first
//! bytes of a path. If it does not, nothing has been touched. Otherwise the function of the row runs inside. It
//! answers, or it says that the kernel has to serve the call, perhaps with another path. The dispatcher delivers
//! signals that arrived meanwhile when the thread leaves; it makes a call again that a signal has interrupted, if the
//! signal's handler has SA_RESTART. A panic poisons the mount: one line on stderr, and EIO from then on.
//!
//! Numbers are those of x86-64 on every architecture: they only name the calls, and only `raw` calls the kernel.

use crate::local::local;
use crate::mount::Errno;
use crate::raw::{self, Arguments};
use crate::table::{PathArgument, ROWS, Treatment};
use crate::{descriptors, fork, paths, real, regions, signals, tell};
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

/// Numbers that [`KINDS`] covers; no call with a higher number concerns the library.
pub const KINDS_COUNT: usize = 512;

/// For the entry code: 0 if the call never concerns the library, 1 if it does only when its first argument is a
/// descriptor of ours, 2 if the dispatcher decides.
pub static KINDS: [u8; KINDS_COUNT] = kinds();

const fn kinds() -> [u8; KINDS_COUNT] {
    let mut kinds = [0; KINDS_COUNT];
    let mut index = 0;
    while index < ROWS.len() {
        let row = &ROWS[index];
        kinds[row.number] = match row.treatment {
            Treatment::Passes(_) => 0,
            Treatment::File(0, _) => 1,
            Treatment::File(..)
            | Treatment::Files(..)
            | Treatment::Paths(..)
            | Treatment::Memory(_)
            | Treatment::Always(_) => 2,
        };
        index += 1;
    }
    kinds
}

/// Row of each number, plus one.
static INDEX: [u16; KINDS_COUNT] = index();

const fn index() -> [u16; KINDS_COUNT] {
    let mut rows = [0; KINDS_COUNT];
    let mut index = 0;
    while index < ROWS.len() {
        rows[ROWS[index].number] = index as u16 + 1;
        index += 1;
    }
    rows
}

/// The reason for which a row's function gives no result of its own.
#[derive(Debug)]
pub enum Refusal {
    /// The call failed.
    Errno(Errno),
    /// The kernel serves the call, unchanged.
    Pass,
    /// The kernel serves the call, with other paths.
    OtherPaths(Vec<(PathArgument, CString)>),
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

/// The answer of a row's function.
pub type Answer = Result<u64, Refusal>;

/// A call in progress.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Its number.
    pub number: usize,
    /// Its arguments.
    pub arguments: Arguments,
}

impl Call {
    /// An argument that the kernel takes as an int.
    #[inline]
    pub fn int(&self, argument: usize) -> i32 {
        self.arguments[argument] as u32 as i32
    }

    /// The open file description behind a descriptor argument.
    ///
    /// # Errors
    /// EBADF.
    #[inline]
    pub fn file(&self, argument: usize) -> Result<descriptors::DescriptionRef, Errno> {
        descriptors::get(self.int(argument))
    }

    /// The same for an open file; a description that was opened with `O_PATH` is an error.
    ///
    /// # Errors
    /// EBADF.
    pub fn open_file(&self, argument: usize) -> Result<descriptors::DescriptionRef, Errno> {
        let held = self.file(argument)?;
        if is_path(&held) { Err(Errno(libc::EBADF)) } else { Ok(held) }
    }

    /// The call with other, absolute paths.
    fn redirected(&self, paths: &[(PathArgument, CString)]) -> Self {
        let mut call = *self;
        for (argument, path) in paths {
            if let Some(dir) = argument.dir {
                call.arguments[usize::from(dir)] = raw::number(libc::AT_FDCWD);
            }
            call.arguments[usize::from(argument.path)] = path.as_ptr() as u64;
        }
        call
    }

    /// Makes the call in the kernel.
    fn raw(&self) -> i64 {
        // SAFETY: the program's own call, or the same with a path of the library's that lives across it.
        unsafe { raw::call(self.number as u64, &self.arguments) }
    }
}

/// Whether a description is only a path (`O_PATH`).
pub fn is_path(held: &descriptors::DescriptionRef) -> bool {
    crate::start::site().is_some_and(|site| site.mount.flags(held.handle()) & libc::O_PATH != 0)
}

/// Number of `mmap`.
const MMAP: usize = 9;

/// Set by the first panic; no call is served after it.
static POISONED: AtomicBool = AtomicBool::new(false);

/// Serves a call, or passes it to the kernel.
pub fn system_call(number: u64, arguments: &Arguments) -> i64 {
    let call = Call { number: number as usize, arguments: *arguments };
    let (call, paths) = match dispatch(&call) {
        Routed::Answered(result) => return result,
        Routed::Kernel => (call, Vec::new()),
        Routed::OtherPaths(call, paths) => (call, paths),
    };
    let result = call.raw();
    drop(paths);
    if call.number == MMAP && call.arguments[2] & libc::PROT_EXEC as u64 != 0 && result >= 0 && serves() {
        new_code(&call, result.cast_unsigned());
    }
    if result == -i64::from(libc::ENOENT) || result == -i64::from(libc::ENOTDIR) {
        return retry_in_mount(call.number, &call.arguments).unwrap_or(result);
    }
    result
}

/// Called when the kernel has mapped code, of which nothing has run yet.
#[cold]
fn new_code(call: &Call, start: u64) {
    let [_, length, protection, flags, _, offset] = call.arguments;
    // SAFETY: a structure of integers, which the kernel fills.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    let arguments = [call.arguments[4], (&raw mut status) as u64];
    // There is nothing to read beyond the end of the file.
    // SAFETY: the structure lives across the call.
    let bytes = unsafe { raw::try_call(libc::SYS_fstat, &arguments) }
        .map_or(0, |_| length.min(status.st_size.cast_unsigned().saturating_sub(offset)));
    let kind = (libc::MAP_TYPE | libc::MAP_ANONYMOUS) as u64;
    let is_file = flags & kind == libc::MAP_PRIVATE as u64;
    #[cfg(target_arch = "x86_64")]
    if crate::patch::calls_come_with(start, bytes, protection, is_file) {
        fork::note_unseen();
    }
}

/// The outcome of the dispatch of a call.
pub enum Routed {
    /// A result of the library, in the form of a kernel result.
    Answered(i64),
    /// The call does not concern the library.
    Kernel,
    /// The kernel has to serve the call, with paths of the library's, which have to live until then.
    OtherPaths(Call, Vec<(PathArgument, CString)>),
}

/// [`dispatch`] for a call of kind 1 (see [`KINDS`]) whose first argument is a descriptor of ours.
#[inline]
pub fn dispatch_ours(call: &Call) -> Routed {
    if fork::is_beside() {
        return refuse_beside(call);
    }
    let row = &ROWS[usize::from(INDEX[call.number]) - 1];
    match row.treatment {
        Treatment::File(argument, _) if real::is_on() && !is_unchanged(call, argument) => Routed::Kernel,
        Treatment::File(_, function) if serves() => serve(call, row.name, function),
        _ => Routed::Kernel,
    }
}

/// Whether calls are served now: there is a mount, and the thread is not inside already.
#[inline]
fn serves() -> bool {
    !local().is_inside() && crate::start::site().is_some()
}

/// Decides whether a call concerns a file of ours, and if so serves it.
pub fn dispatch(call: &Call) -> Routed {
    if call.number >= KINDS_COUNT || KINDS[call.number] == 0 {
        return Routed::Kernel;
    }
    // Before the thread's own state, which is that of a thread of the parent.
    if fork::is_beside() {
        return refuse_beside(call);
    }
    if !serves() {
        return Routed::Kernel;
    }
    let row = &ROWS[usize::from(INDEX[call.number]) - 1];
    let (concerned, function) = match row.treatment {
        Treatment::Passes(_) => return Routed::Kernel,
        Treatment::File(argument, function) => (is_ours(call, argument), function),
        Treatment::Files(one, two, function) => {
            let ours = |argument: u8| is_ours(call, argument);
            (ours(one) || ours(two), function)
        }
        Treatment::Paths(path_arguments, function) => {
            (path_arguments.iter().any(|argument| paths::concern(call, *argument)), function)
        }
        Treatment::Memory(function) => (regions::any(), function),
        Treatment::Always(function) => (true, function),
    };
    if !concerned {
        return Routed::Kernel;
    }
    serve(call, row.name, function)
}

/// Whether a descriptor argument is ours.
#[inline]
fn is_ours(call: &Call, argument: u8) -> bool {
    descriptors::is_ours(call.int(usize::from(argument))) && (!real::is_on() || is_unchanged(call, argument))
}

#[cold]
fn is_unchanged(call: &Call, argument: u8) -> bool {
    local().is_inside() || local().inside(|| real::is_unchanged(call.int(usize::from(argument))))
}

/// Limit of restarts of a call because the process becomes another user meanwhile.
const RESTARTS_MAX: u32 = 1 << 16;

/// Limit of restarts of a call because another process changes its path into one that leaves the mount meanwhile.
const WALKS_MAX: u32 = 40;

/// Runs a row's function inside, until its answer is not due to a signal.
fn serve(call: &Call, name: &str, function: fn(&Call) -> Answer) -> Routed {
    let local = local();
    let (mut restarts, mut walks) = (RESTARTS_MAX, WALKS_MAX);
    loop {
        let answer = local.inside(|| {
            fork::notice();
            if poisoned() && !about_numbers(call.number) {
                return Err(Refusal::Errno(Errno(libc::EIO)));
            }
            catch_unwind(AssertUnwindSafe(|| function(call))).unwrap_or_else(|_| {
                poison(name);
                Err(Refusal::Errno(Errno(libc::EIO)))
            })
        });
        let restart = signals::deliver(local);
        return match answer {
            Ok(value) => Routed::Answered(value.cast_signed()),
            Err(Refusal::Errno(Errno(libc::EINTR))) if restart => continue,
            Err(Refusal::Errno(Errno(libc::ERESTART))) if restarts > 0 => {
                restarts -= 1;
                continue;
            }
            // The walk of `paths` gave a path that does not leave the mount.
            Err(Refusal::Errno(Errno::LEAVES)) if walks > 0 => {
                walks -= 1;
                continue;
            }
            Err(Refusal::Errno(Errno::LEAVES)) => Routed::Answered(-i64::from(libc::ELOOP)),
            Err(Refusal::Errno(Errno::SPECIAL | Errno::UNMOUNTED)) => {
                Routed::Answered(-i64::from(libc::EOPNOTSUPP))
            }
            Err(Refusal::Errno(Errno(libc::ERESTART))) => Routed::Answered(-i64::from(libc::EACCES)),
            Err(Refusal::Errno(errno)) => Routed::Answered(-i64::from(errno.0)),
            Err(Refusal::Pass) => Routed::Kernel,
            Err(Refusal::OtherPaths(paths)) => Routed::OtherPaths(call.redirected(&paths), paths),
        };
    }
}

/// The answer to a process that runs in the memory of another one at the same time: it has no files of the mount. It may
/// close the placeholders that it has inherited, unless they are its parent's too.
#[cold]
fn refuse_beside(call: &Call) -> Routed {
    const CLOSE: usize = 3;
    const CLOSE_RANGE: usize = 436;
    let treatment = ROWS[usize::from(INDEX[call.number]) - 1].treatment;
    // In its own table, the number may be another file's by now.
    let is_placeholder = |argument: u8| {
        let flags = raw::fcntl(call.int(usize::from(argument)), libc::F_GETFL, 0);
        descriptors::is_ours(call.int(usize::from(argument)))
            && flags.is_ok_and(|flags| flags & libc::O_PATH as u64 != 0)
    };
    let passes = match treatment {
        _ if matches!(call.number, CLOSE | CLOSE_RANGE) => !fork::shares_numbers(),
        Treatment::Paths(arguments, _) => !arguments.iter().any(|one| paths::names_mount(call, *one)),
        Treatment::File(one, _) => !is_placeholder(one),
        Treatment::Files(one, two, _) => {
            let is_target = fork::shares_numbers() && is_placeholder(two);
            !is_target && !is_placeholder(one)
        }
        Treatment::Always(_) | Treatment::Memory(_) | Treatment::Passes(_) => true,
    };
    if passes {
        return Routed::Kernel;
    }
    tell::refused("a process that shares the memory of its running parent cannot use the tree");
    Routed::Answered(-i64::from(libc::EOPNOTSUPP))
}

/// Called when the kernel did not find a path of the program's: the path may lead into the mount by a symbolic link or
/// by `..`.
pub fn retry_in_mount(number: usize, arguments: &Arguments) -> Option<i64> {
    let call = &Call { number, arguments: *arguments };
    let row = &ROWS[usize::from(*INDEX.get(call.number)?).checked_sub(1)?];
    let Treatment::Paths(path_arguments, function) = row.treatment else { return None };
    if local().is_inside() || fork::is_beside() {
        return None;
    }
    let site = crate::start::site()?;
    let found = local().inside(|| {
        let lead = |argument: &PathArgument| {
            paths::path_into_mount(site, call, *argument).map(|path| (*argument, path))
        };
        path_arguments.iter().filter_map(lead).collect::<Vec<_>>()
    });
    signals::deliver(local());
    if found.is_empty() {
        return None;
    }
    let call = call.redirected(&found);
    match serve(&call, row.name, function) {
        Routed::Answered(result) => Some(result),
        Routed::Kernel => Some(call.raw()),
        Routed::OtherPaths(call, _paths) => Some(call.raw()),
    }
}

/// The place and message of the panic, for the line on stderr.
static REASON: std::sync::Mutex<Option<String>> = std::sync::Mutex::new(None);

/// True after the first panic.
pub fn poisoned() -> bool {
    POISONED.load(Ordering::Relaxed)
}

/// Calls that a program needs to get rid of a file that fails: a shell restores its standard output by `dup2`.
fn about_numbers(number: usize) -> bool {
    const CLOSE: usize = 3;
    const DUP: usize = 32;
    const DUP2: usize = 33;
    const FCNTL: usize = 72;
    const DUP3: usize = 292;
    let treatment = ROWS[usize::from(INDEX[number]) - 1].treatment;
    let always = matches!(treatment, Treatment::Always(_) | Treatment::Memory(_));
    always || matches!(number, CLOSE | DUP | DUP2 | FCNTL | DUP3)
}

/// Keeps the reason of a panic instead of printing it.
pub fn quiet_panics() {
    std::panic::set_hook(Box::new(|panic| {
        if let Ok(mut reason) = REASON.try_lock() {
            *reason = Some(panic.to_string().replace('\n', " "));
        }
    }));
}

fn poison(name: &str) {
    if POISONED.swap(true, Ordering::Relaxed) {
        return;
    }
    let reason = REASON.try_lock().ok().and_then(|mut reason| reason.take()).unwrap_or_default();
    let line = format!(
        "hearth: process {}: no file of the mount works any more: {name}: {reason}\n",
        raw::process()
    );
    let _ = raw::write(libc::STDERR_FILENO, line.as_bytes());
}
