//! The one place where every call ends, from a symbol or from a patched instruction: `dispatch(number, arguments)`.
//!
//! First, outside: does the call concern us? A descriptor's bit, a path's first bytes. If not, nothing was touched.
//! Then, inside: the row's function answers, or says that the kernel is to be asked after all, perhaps about another
//! path. Signals that came meanwhile are delivered on the way out; a call that one of them interrupted is made
//! again if its handler says SA_RESTART. A panic poisons the mount: one line on stderr, EIO from then on.
//!
//! Numbers are those of x86-64 on every architecture: they name the calls, and only `raw` speaks to the kernel.

use crate::local::local;
use crate::mount::Errno;
use crate::raw::{self, Arguments};
use crate::table::{ROWS, Spot, Treatment};
use crate::{descriptors, fork, paths, real, regions, signals};
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

/// Numbers that [`KINDS`] covers; above it nothing is ours.
pub const KINDS_COUNT: usize = 512;

/// For the entry code: 0 never concerns us, 1 only if the first argument is a descriptor of ours, 2 ask.
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

/// Why a row's function gives no result of its own.
#[derive(Debug)]
pub enum Refusal {
    /// It failed.
    Errno(Errno),
    /// It is the kernel's call, as it stands.
    Pass,
    /// It is the kernel's call, with other paths.
    Elsewhere(Vec<(Spot, CString)>),
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

/// What a row's function answers.
pub type Answer = Result<u64, Refusal>;

/// A call under way.
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

    /// The description behind a descriptor argument.
    ///
    /// # Errors
    /// EBADF.
    #[inline]
    pub fn file(&self, argument: usize) -> Result<descriptors::Held, Errno> {
        descriptors::get(self.int(argument))
    }

    /// The same, if it is an open file: what was opened with `O_PATH` is none.
    ///
    /// # Errors
    /// EBADF.
    pub fn open_file(&self, argument: usize) -> Result<descriptors::Held, Errno> {
        let held = self.file(argument)?;
        if is_path(&held) { Err(Errno(libc::EBADF)) } else { Ok(held) }
    }

    /// The call with other paths, absolute ones.
    fn redirected(&self, paths: &[(Spot, CString)]) -> Self {
        let mut call = *self;
        for (spot, path) in paths {
            if let Some(dir) = spot.dir {
                call.arguments[usize::from(dir)] = raw::number(libc::AT_FDCWD);
            }
            call.arguments[usize::from(spot.path)] = path.as_ptr() as u64;
        }
        call
    }

    /// Makes the call in the kernel.
    fn raw(&self) -> i64 {
        // SAFETY: the program's own call, or the same with a path of ours that lives across it.
        unsafe { raw::call(self.number as u64, &self.arguments) }
    }
}

/// Whether a description is only a path (`O_PATH`).
pub fn is_path(held: &descriptors::Held) -> bool {
    crate::start::site().is_some_and(|site| site.mount.flags(held.handle()) & libc::O_PATH != 0)
}

/// Number of `mmap`.
const MMAP: usize = 9;

/// Set by the first panic; nothing is served any more.
static POISONED: AtomicBool = AtomicBool::new(false);

/// Serves a call, or makes it.
pub fn system_call(number: u64, arguments: &Arguments) -> i64 {
    let call = Call { number: number as usize, arguments: *arguments };
    let (call, paths) = match dispatch(&call) {
        Routed::Answered(result) => return result,
        Routed::Kernel => (call, Vec::new()),
        Routed::Elsewhere(call, paths) => (call, paths),
    };
    let result = call.raw();
    drop(paths);
    if call.number == MMAP && call.arguments[2] & libc::PROT_EXEC as u64 != 0 && result >= 0 && serves() {
        new_code(&call, result.cast_unsigned());
    }
    if result == -i64::from(libc::ENOENT) || result == -i64::from(libc::ENOTDIR) {
        return second_look(call.number, &call.arguments).unwrap_or(result);
    }
    result
}

/// The kernel has mapped code: nothing of it has run yet.
#[cold]
fn new_code(call: &Call, start: u64) {
    let [_, length, protection, flags, _, offset] = call.arguments;
    // SAFETY: a structure of integers, which the kernel fills.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    let arguments = [call.arguments[4], (&raw mut status) as u64];
    // Behind the file's end there is nothing to read.
    // SAFETY: the structure lives across the call.
    let bytes = unsafe { raw::try_call(libc::SYS_fstat, &arguments) }
        .map_or(0, |_| length.min(status.st_size.cast_unsigned().saturating_sub(offset)));
    let is_file = flags & libc::MAP_ANONYMOUS as u64 == 0;
    #[cfg(target_arch = "x86_64")]
    if crate::patch::calls_come_with(start, bytes, protection, is_file) {
        fork::note_unseen();
    }
}

/// What became of a call.
pub enum Routed {
    /// The kernel's result, or one like it.
    Answered(i64),
    /// Not ours.
    Kernel,
    /// The kernel's, with paths of ours, which have to live until it is made.
    Elsewhere(Call, Vec<(Spot, CString)>),
}

/// [`dispatch`] of a call that concerns us by its first argument alone, which is ours.
#[inline]
pub fn dispatch_ours(call: &Call) -> Routed {
    let row = &ROWS[usize::from(INDEX[call.number]) - 1];
    match row.treatment {
        Treatment::File(argument, _) if real::is_on() && !is_still(call, argument) => Routed::Kernel,
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
    if call.number >= KINDS_COUNT || KINDS[call.number] == 0 || !serves() {
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
        Treatment::Paths(spots, function) => (spots.iter().any(|spot| paths::concern(call, *spot)), function),
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
    descriptors::is_ours(call.int(usize::from(argument))) && (!real::is_on() || is_still(call, argument))
}

#[cold]
fn is_still(call: &Call, argument: u8) -> bool {
    local().is_inside() || local().inside(|| real::is_still(call.int(usize::from(argument))))
}

/// How often a call is asked again because the process becomes another user meanwhile.
const RESTARTS_MAX: u32 = 1 << 16;

/// Runs a row's function inside, until it has an answer that no signal interrupted.
fn serve(call: &Call, name: &str, function: fn(&Call) -> Answer) -> Routed {
    let local = local();
    let mut restarts = RESTARTS_MAX;
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
            Err(Refusal::Errno(Errno::SPECIAL)) => Routed::Answered(-i64::from(libc::EOPNOTSUPP)),
            Err(Refusal::Errno(Errno(libc::ERESTART))) => Routed::Answered(-i64::from(libc::EACCES)),
            Err(Refusal::Errno(errno)) => Routed::Answered(-i64::from(errno.0)),
            Err(Refusal::Pass) => Routed::Kernel,
            Err(Refusal::Elsewhere(paths)) => Routed::Elsewhere(call.redirected(&paths), paths),
        };
    }
}

/// The kernel did not find a path of the program's: it may lead into the mount by a symbolic link or by `..`.
pub fn second_look(number: usize, arguments: &Arguments) -> Option<i64> {
    let call = &Call { number, arguments: *arguments };
    let row = &ROWS[usize::from(*INDEX.get(call.number)?).checked_sub(1)?];
    let Treatment::Paths(spots, function) = row.treatment else { return None };
    if local().is_inside() {
        return None;
    }
    let site = crate::start::site()?;
    let found = local().inside(|| {
        let lead = |spot: &Spot| paths::leads_in(site, call, *spot).map(|path| (*spot, path));
        spots.iter().filter_map(lead).collect::<Vec<_>>()
    });
    signals::deliver(local());
    if found.is_empty() {
        return None;
    }
    match serve(&call.redirected(&found), row.name, function) {
        Routed::Answered(result) => Some(result),
        Routed::Kernel | Routed::Elsewhere(..) => None,
    }
}

/// Where the panic was, for the line that says so.
static REASON: std::sync::Mutex<Option<String>> = std::sync::Mutex::new(None);

/// True after the first panic.
pub fn poisoned() -> bool {
    POISONED.load(Ordering::Relaxed)
}

/// Calls that a program needs to get rid of a file which fails: a shell puts back its standard output by `dup2`.
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

/// Nothing is printed by a panic itself; its reason is kept.
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
