//! Signals for threads that are inside.
//!
//! The kernel delivers a signal to a thread in a system call when the call is over, and so does the library. In the
//! kernel, the library's handler replaces each handler of the program. It calls the program's handler at once if the
//! thread is outside. If the thread is inside, it stores the signal's `siginfo_t`, blocks all further signals in the
//! interrupted context (so it never stores more than one), and returns. When the thread leaves, it queues the signal
//! again for itself and restores the mask, and the kernel delivers the signal with a real frame on the right stack.
//! Being inside costs two stores and one load.
//!
//! A wait that has to end at a signal uses [`wait_until_signal`]: it returns for a signal at any instant before the end
//! of the wait, without a window between the check and the sleep.
//!
//! The kernel never sees SA_RESETHAND: it would remove the library's handler at the first signal, even if that signal
//! is only deferred or is a fault with a landing. Instead, the action becomes the default one when the program's
//! handler is called. A thread calls the handler only after it has exchanged the handler's word in the table, so of
//! several threads one calls it, and the others take the default action. After that the library tells the kernel.
//!
//! For a SIGSEGV or SIGBUS at an instruction of `memory`, execution continues at its *landing*, the address for faults.
//! All other faults belong to the program. A thread that has blocked SIGSEGV and then passes a bad buffer is killed, as
//! the kernel does for every fault whose signal is blocked.
//!
//! The C library ends a cancelled thread by a signal whose handler unwinds the stack below it. Frames of Rust functions
//! do not survive that. If the signal interrupts the library, the handler is called in a frame at which the unwinder
//! stops: the cleanup functions run, and the thread ends.
//!
//! On architectures without patching, handlers stay as they are, and run inside, on top of the library's frames.

use crate::local::{Local, SIGINFO_BYTES, local};
use crate::mount::Errno;
use crate::raw;
use std::sync::atomic::{AtomicU64, Ordering};

/// The highest signal number, plus one.
const SIGNALS: usize = 65;
/// The signal by which the C library cancels a thread.
const SIGCANCEL: i32 = 32;
const SA_RESTORER: u64 = 0x0400_0000;
const SA_RESETHAND: u64 = 0x8000_0000;
const DEFAULT: u64 = libc::SIG_DFL as u64;
const IGNORE: u64 = libc::SIG_IGN as u64;

/// Signals for faults of instructions: if one of them occurs while it is blocked, the process is killed.
const FAULTS: u64 = 1 << (libc::SIGSEGV - 1)
    | 1 << (libc::SIGBUS - 1)
    | 1 << (libc::SIGFPE - 1)
    | 1 << (libc::SIGILL - 1)
    | 1 << (libc::SIGTRAP - 1);

/// Signals that are ignored by default.
const IGNORED_BY_DEFAULT: u64 =
    1 << (libc::SIGCHLD - 1) | 1 << (libc::SIGCONT - 1) | 1 << (libc::SIGURG - 1) | 1 << (libc::SIGWINCH - 1);

/// The kernel's `struct sigaction` of x86-64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Action {
    /// The function, `SIG_DFL` or `SIG_IGN`.
    pub handler: u64,
    /// `SA_*`.
    pub flags: u64,
    /// The function to which the handler returns.
    pub restorer: u64,
    /// Signals blocked while it runs.
    pub mask: u64,
}

/// The program's action for a signal. It is not read atomically as a whole: while it may change, only the function and
/// the flags are used, and each of them is one word.
struct Wanted {
    handler: AtomicU64,
    flags: AtomicU64,
    restorer: AtomicU64,
    mask: AtomicU64,
}

static WANTED: [Wanted; SIGNALS] = [const {
    Wanted {
        handler: AtomicU64::new(0),
        flags: AtomicU64::new(0),
        restorer: AtomicU64::new(0),
        mask: AtomicU64::new(0),
    }
}; SIGNALS];

impl Wanted {
    fn store(&self, action: &Action) {
        self.flags.store(action.flags, Ordering::Relaxed);
        self.restorer.store(action.restorer, Ordering::Relaxed);
        self.mask.store(action.mask, Ordering::Relaxed);
        // Pairs with the Acquire in `load`.
        self.handler.store(action.handler, Ordering::Release);
    }

    fn load(&self) -> Action {
        Action {
            handler: self.handler.load(Ordering::Acquire),
            flags: self.flags.load(Ordering::Relaxed),
            restorer: self.restorer.load(Ordering::Relaxed),
            mask: self.mask.load(Ordering::Relaxed),
        }
    }
}

/// True for the signals whose handlers are wrapped: all that can have one.
pub fn can_be_handled(signal: u64) -> bool {
    (1..SIGNALS as u64).contains(&signal) && signal != libc::SIGKILL as u64 && signal != libc::SIGSTOP as u64
}

fn is_fault(signal: usize) -> bool {
    signal == libc::SIGSEGV as usize || signal == libc::SIGBUS as usize
}

fn is_ignored_by_default(signal: usize) -> bool {
    IGNORED_BY_DEFAULT >> (signal - 1) & 1 == 1
}

/// `rt_sigaction` of the kernel.
fn kernel_action(signal: usize, new: Option<&Action>) -> Result<Action, Errno> {
    let mut old = Action::default();
    let new = new.map_or(0, |new| std::ptr::from_ref(new) as u64);
    let arguments = [signal as u64, new, (&raw mut old) as u64, 8];
    // SAFETY: both structures belong to the library, and live across the call.
    unsafe { raw::try_call(libc::SYS_rt_sigaction, &arguments) }?;
    Ok(old)
}

fn ours() -> u64 {
    on_signal as *const () as u64
}

/// Sets or returns the program's action for a signal; the result is the former action.
///
/// # Errors
/// The kernel's.
pub fn set(signal: usize, new: Option<&Action>) -> Result<Action, Errno> {
    let borrowed = local().borrowed().is_some();
    let wanted = &WANTED[signal];
    let before = wanted.load();
    let there = match new {
        None => kernel_action(signal, None)?,
        // A child between vfork and exec has handlers of its own in the kernel, but shares our table.
        Some(new) if borrowed => kernel_action(signal, Some(new))?,
        Some(new) => {
            // The table comes first: the library's handler must find the program's function when it runs.
            wanted.store(new);
            kernel_action(signal, Some(&in_kernel(signal, new))).inspect_err(|_| wanted.store(&before))?
        }
    };
    Ok(if there.handler == ours() { before } else { there })
}

/// The kernel's action for an action of the program: the library's handler, if the program has a handler or the signal
/// is a fault.
fn in_kernel(signal: usize, wanted: &Action) -> Action {
    if matches!(wanted.handler, DEFAULT | IGNORE) && !is_fault(signal) {
        return *wanted;
    }
    let (restorer, restores) = restorer_of(wanted);
    let flags = wanted.flags & !SA_RESETHAND | libc::SA_SIGINFO as u64 | restores;
    Action { handler: ours(), flags, restorer, mask: wanted.mask }
}

/// Makes the kernel's action match the table, also if another thread sets it meanwhile. That thread stores into the
/// table before it tells the kernel: either its call to the kernel is later than the one here, or this loop sees its
/// store and repeats.
fn tell_kernel(signal: usize) {
    loop {
        let wanted = WANTED[signal].load();
        let told = kernel_action(signal, Some(&in_kernel(signal, &wanted)));
        if told.is_err() || WANTED[signal].load() == wanted {
            return;
        }
    }
}

/// The function to which the handler returns, which every action needs: the program's, or the library's if the program
/// gave none.
fn restorer_of(action: &Action) -> (u64, u64) {
    if action.flags & SA_RESTORER != 0 {
        (action.restorer, 0)
    } else {
        (hearth_restorer as *const () as u64, SA_RESTORER)
    }
}

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".text",
    ".globl hearth_restorer",
    ".hidden hearth_restorer",
    ".type hearth_restorer, @function",
    "nop",
    "hearth_restorer:",
    "mov eax, 15",
    "syscall",
    // hearth_wait(word, operation, expected, timeout, pending, number) -> the kernel's result, or -EINTR
    ".globl hearth_wait",
    ".hidden hearth_wait",
    ".type hearth_wait, @function",
    ".globl hearth_wait_begin",
    ".hidden hearth_wait_begin",
    ".globl hearth_wait_call",
    ".hidden hearth_wait_call",
    ".globl hearth_wait_end",
    ".hidden hearth_wait_end",
    "hearth_wait:",
    "mov r10, rcx",
    "mov rax, r9",
    "hearth_wait_begin:",
    "cmp dword ptr [r8], 0",
    "jne hearth_wait_end",
    "xor r8d, r8d",
    "mov r9d, -1",
    "hearth_wait_call:",
    "syscall",
    "ret",
    "hearth_wait_end:",
    "mov rax, -4",
    "ret",
    // hearth_last_frame(signal, info, context, handler): has no unwind information, so the unwinder stops here
    ".globl hearth_last_frame",
    ".hidden hearth_last_frame",
    ".type hearth_last_frame, @function",
    "hearth_last_frame:",
    "push rbp",
    "mov rbp, rsp",
    "call rcx",
    "pop rbp",
    "ret",
);

#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    fn hearth_restorer();
    fn hearth_wait(word: u64, operation: u64, expected: u64, timeout: u64, pending: u64, number: u64) -> i64;
    fn hearth_wait_begin();
    fn hearth_wait_call();
    fn hearth_wait_end();
    fn hearth_last_frame(
        signal: i32,
        info: *mut libc::siginfo_t,
        context: *mut libc::ucontext_t,
        handler: u64,
    );
    /// The first byte of the library, and the one after its code, as the linker names them.
    static __ehdr_start: u8;
    static etext: u8;
}

/// True for an instruction of the library.
#[cfg(target_arch = "x86_64")]
fn is_of_library(instruction: u64) -> bool {
    ((&raw const __ehdr_start) as u64..(&raw const etext) as u64).contains(&instruction)
}

#[cfg(not(target_arch = "x86_64"))]
extern "C" fn hearth_restorer() {}

/// Sleeps while the word has the expected value, at most until a point in time (CLOCK_MONOTONIC in nanoseconds; futexes
/// have no CLOCK_BOOTTIME), or until a signal is deferred.
///
/// # Errors
/// EAGAIN (the word has another value); ETIMEDOUT; EINTR: the caller has to leave, so that the signal is delivered; if
/// the handler has SA_RESTART, the same call is made again.
///
/// # Safety
/// The word stays mapped until this returns.
#[cfg(target_arch = "x86_64")]
pub unsafe fn wait_until_signal(word: *const u32, expected: u32, until_ns: Option<u64>) -> Result<(), Errno> {
    let local = local();
    let until = until_ns.map(|ns| [ns / 1_000_000_000, ns % 1_000_000_000]);
    let timeout = until.as_ref().map_or(0, |until| until.as_ptr() as u64);
    let operation = libc::FUTEX_WAIT_BITSET as u64;
    let pending = (&raw const local.deferred) as u64;
    let number = libc::SYS_futex as u64;
    // SAFETY: the word is the caller's; everything else belongs to the library and lives across the call.
    let result = unsafe { hearth_wait(word as u64, operation, expected.into(), timeout, pending, number) };
    if result == -i64::from(libc::EINTR) {
        local.interrupted.store(1, Ordering::Relaxed);
    }
    raw::outcome(result).map(|_| ())
}

/// Installs the handler of faults, whatever the program's action is: it must be there before the library first touches
/// the program's memory.
pub fn catch_faults() {
    for signal in [libc::SIGSEGV as usize, libc::SIGBUS as usize] {
        let Ok(before) = kernel_action(signal, None) else { continue };
        let _ = set(signal, Some(&Action { flags: before.flags & !(libc::SA_SIGINFO as u64), ..before }));
    }
}

/// Before an exec: makes the kernel ignore the faults that the program ignores, as the next program inherits ignored
/// signals.
pub fn before_exec() {
    for signal in [libc::SIGSEGV as usize, libc::SIGBUS as usize] {
        if WANTED[signal].load().handler == IGNORE && local().borrowed().is_none() {
            let _ = kernel_action(signal, Some(&Action { handler: IGNORE, ..Action::default() }));
        }
    }
}

/// Restores these actions after a failed exec.
pub fn after_failed_exec() {
    for signal in [libc::SIGSEGV as usize, libc::SIGBUS as usize] {
        let wanted = WANTED[signal].load();
        if wanted.handler == IGNORE && local().borrowed().is_none() {
            let _ = set(signal, Some(&wanted));
        }
    }
}

/// Blocks every signal of the thread that is not a fault; returns the former mask.
pub fn block() -> u64 {
    change_mask(libc::SIG_BLOCK, !FAULTS)
}

/// Restores a mask.
pub fn set_mask(mask: u64) {
    change_mask(libc::SIG_SETMASK, mask);
}

fn change_mask(how: i32, new: u64) -> u64 {
    let mut before = 0u64;
    let arguments = [how as u64, (&raw const new) as u64, (&raw mut before) as u64, 8];
    // SAFETY: both words belong to the library, and live across the call.
    let _ = unsafe { raw::try_call(libc::SYS_rt_sigprocmask, &arguments) };
    before
}

/// Delivers the deferred signal when the thread leaves. True if a wait ended for it and its handler has SA_RESTART, so
/// that the call has to be made again.
#[inline]
pub fn deliver(local: &Local) -> bool {
    let signal = local.deferred.load(Ordering::Relaxed);
    signal != 0 && deliver_signal(local, signal)
}

#[cold]
fn deliver_signal(local: &Local, signal: u32) -> bool {
    let interrupted = local.interrupted.swap(0, Ordering::Relaxed) != 0;
    let restart = interrupted && WANTED[signal as usize].load().flags & libc::SA_RESTART as u64 != 0;
    let info: [u64; SIGINFO_BYTES / 8] =
        std::array::from_fn(|index| local.info[index].load(Ordering::Relaxed));
    let mask = local.mask.load(Ordering::Relaxed);
    local.deferred.store(0, Ordering::Relaxed);
    let (process, thread) = (raw::number(raw::process()), raw::number(raw::thread()));
    let arguments = [process, thread, u64::from(signal), info.as_ptr() as u64];
    // SAFETY: queues a signal for this thread with the stored `siginfo_t`; the structure belongs to the library.
    let _ = unsafe { raw::try_call(libc::SYS_rt_tgsigqueueinfo, &arguments) };
    set_mask(mask);
    restart
}

/// Index of the instruction pointer in the interrupted context.
#[cfg(target_arch = "x86_64")]
const RIP: usize = libc::REG_RIP as usize;

/// The library's handler, which the kernel calls in place of the program's handlers.
#[cfg(target_arch = "x86_64")]
unsafe extern "C" fn on_signal(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    // SAFETY: the kernel passes valid pointers, which live while the handler runs.
    let (code, instruction) = unsafe { ((*info).si_code, (*context).uc_mcontext.gregs[RIP] as u64) };
    let sync = code > 0 && is_fault(signal as usize);
    let of_copy = || pmem::copy::landing_of(instruction as usize).map(|landing| landing as u64);
    if sync && let Some(landing) = crate::memory::landing(instruction).or_else(of_copy) {
        // SAFETY: as above; the landing is in the function that faulted.
        unsafe { (*context).uc_mcontext.gregs[RIP] = landing.cast_signed() };
        return;
    }
    let local = local();
    let wanted = WANTED[signal as usize].load().handler;
    if !sync && is_nothing(signal as usize, wanted) {
        return;
    }
    if local.is_inside() && !sync {
        // SAFETY: as above.
        unsafe { defer(local, signal, info, context) };
        return;
    }
    if signal == SIGCANCEL && !matches!(wanted, DEFAULT | IGNORE) && is_of_library(instruction) {
        // SAFETY: the C library's own handler, with the kernel's arguments. It leaves nothing of the library on the
        // stack.
        unsafe { hearth_last_frame(signal, info, context, wanted) };
        return;
    }
    // SAFETY: as above; the program's handler runs as if the kernel had called it.
    unsafe { pass_on(signal, info, context, sync) };
}

#[cfg(not(target_arch = "x86_64"))]
unsafe extern "C" fn on_signal(_: i32, _: *mut libc::siginfo_t, _: *mut libc::ucontext_t) {}

/// Defers the signal until the thread leaves, and blocks all others until then; ends a wait that is in progress.
#[cfg(target_arch = "x86_64")]
unsafe fn defer(local: &Local, signal: i32, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    for (index, word) in local.info.iter().enumerate() {
        // SAFETY: the kernel's structure has this many bytes.
        word.store(unsafe { info.cast::<u64>().add(index).read() }, Ordering::Relaxed);
    }
    // SAFETY: the kernel's mask is the first word of the context's.
    unsafe {
        let mask = (&raw mut (*context).uc_sigmask).cast::<u64>();
        local.mask.store(*mask, Ordering::Relaxed);
        *mask |= !FAULTS;
        let at = (*context).uc_mcontext.gregs[RIP] as u64;
        let (begin, call) = (hearth_wait_begin as *const () as u64, hearth_wait_call as *const () as u64);
        if (begin..=call).contains(&at) {
            (*context).uc_mcontext.gregs[RIP] = (hearth_wait_end as *const () as u64).cast_signed();
        }
    }
    local.deferred.store(signal as u32, Ordering::Relaxed);
}

/// Whether the action is to ignore the signal. The kernel drops such signals itself, except for faults, and after a
/// handler with SA_RESETHAND (see [`take_only_call`]).
fn is_nothing(signal: usize, wanted: u64) -> bool {
    wanted == IGNORE || (wanted == DEFAULT && is_ignored_by_default(signal))
}

/// The action of a signal that is being delivered. If its handler may be called only once, the caller must make this
/// call.
fn take(signal: usize) -> Action {
    loop {
        let wanted = WANTED[signal].load();
        let any = matches!(wanted.handler, DEFAULT | IGNORE) || wanted.flags & SA_RESETHAND == 0;
        if any || take_only_call(signal, &wanted) {
            return wanted;
        }
    }
}

/// Makes the action the default one, with its former flags and mask, as the kernel does for SA_RESETHAND. False if
/// another thread has done so before, or the program has set another action.
fn take_only_call(signal: usize, wanted: &Action) -> bool {
    if local().borrowed().is_some() {
        // The child has its own actions in the kernel, but the table belongs to its parent. It has one thread.
        let _ = kernel_action(signal, Some(&Action { handler: DEFAULT, ..*wanted }));
        return true;
    }
    let handler = &WANTED[signal].handler;
    // AcqRel: pairs with the Acquire of `load` in the threads that come too late.
    if handler.compare_exchange(wanted.handler, DEFAULT, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return false;
    }
    // The kernel keeps the library's handler for faults because of the landings. It also keeps it for a signal that is
    // ignored by default: if the kernel ignored the signal, it would discard pending ones, and the handler may set
    // itself again before it returns.
    if !is_fault(signal) && !is_ignored_by_default(signal) {
        tell_kernel(signal);
    }
    true
}

/// Runs the program's action for a signal.
unsafe fn pass_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t, sync: bool) {
    let number = signal as usize;
    match take(number).handler {
        wanted @ (DEFAULT | IGNORE) => {
            if !sync && is_nothing(number, wanted) {
                return;
            }
            // Repeats the signal with the default action: the instruction faults again, or the signal is sent again.
            if is_fault(number) || local().borrowed().is_some() {
                let _ = kernel_action(number, Some(&Action::default()));
            } else {
                tell_kernel(number);
            }
            if !sync {
                let (process, thread) = (raw::number(raw::process()), raw::number(raw::thread()));
                let arguments = [process, thread, signal as u64, info as u64];
                // SAFETY: the kernel's own structure, for this thread.
                let _ = unsafe { raw::try_call(libc::SYS_rt_tgsigqueueinfo, &arguments) };
            }
        }
        function => {
            type Handler = unsafe extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::ucontext_t);
            // SAFETY: the program gave this address as its handler; one that takes only the number ignores
            // the other two registers.
            unsafe { std::mem::transmute::<usize, Handler>(function as usize)(signal, info, context) };
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    static HITS: AtomicU32 = AtomicU32::new(0);

    extern "C" fn count(_: i32) {
        HITS.fetch_add(1, Ordering::SeqCst);
    }

    fn send(signal: i32, thread: i32) {
        let arguments = [raw::number(raw::process()), raw::number(thread), signal as u64];
        // SAFETY: takes numbers only.
        let sent = unsafe { raw::try_call(libc::SYS_tgkill, &arguments) };
        assert_eq!(sent, Ok(0));
    }

    /// A time in ten seconds, so that a missed signal fails the test instead of blocking it.
    fn soon() -> u64 {
        let mut now = [0u64; 2];
        let arguments = [libc::CLOCK_MONOTONIC as u64, now.as_mut_ptr() as u64];
        // SAFETY: the kernel fills the two words.
        assert_eq!(unsafe { raw::try_call(libc::SYS_clock_gettime, &arguments) }, Ok(0));
        (now[0] + 10) * 1_000_000_000
    }

    /// Waits for a word that never changes, with a signal before the wait, and with one during it.
    #[test]
    fn a_signal_ends_a_wait_and_is_delivered_on_the_way_out() {
        let signal = libc::SIGUSR2;
        let handler = count as *const () as u64;
        for (flags, restart) in [(0, false), (libc::SA_RESTART as u64, true)] {
            set(signal as usize, Some(&Action { handler, flags, ..Action::default() })).unwrap();
            for early in [true, false] {
                let before = HITS.load(Ordering::SeqCst);
                let (local, thread, word) = (local(), raw::thread(), AtomicU32::new(7));
                let inside = Arc::new(AtomicU32::new(0));
                let seen = inside.clone();
                #[allow(clippy::disallowed_methods, reason = "a signal from a real thread")]
                let sender = (!early).then(|| {
                    std::thread::spawn(move || {
                        while seen.load(Ordering::SeqCst) == 0 {
                            std::thread::sleep(std::time::Duration::from_millis(1));
                        }
                        std::thread::sleep(std::time::Duration::from_millis(50));
                        send(signal, thread);
                    })
                });
                local.inside(|| {
                    inside.store(1, Ordering::SeqCst);
                    if early {
                        send(signal, thread);
                    }
                    // SAFETY: the word outlives the wait.
                    let waited = unsafe { wait_until_signal(word.as_ptr(), 7, Some(soon())) };
                    assert_eq!(waited, Err(Errno(libc::EINTR)));
                    assert_eq!(HITS.load(Ordering::SeqCst), before, "no handler runs inside");
                });
                assert_eq!(deliver(local), restart);
                assert_eq!(HITS.load(Ordering::SeqCst), before + 1);
                assert!(!deliver(local), "once");
                if let Some(sender) = sender {
                    sender.join().unwrap();
                }
            }
        }
        assert_eq!(set(signal as usize, None).unwrap().handler, handler);
    }

    #[test]
    fn a_wait_ends_when_the_word_differs_and_at_its_time() {
        let word = AtomicU32::new(7);
        // SAFETY: the word outlives the waits.
        unsafe {
            assert_eq!(wait_until_signal(word.as_ptr(), 8, None), Err(Errno(libc::EAGAIN)));
            assert_eq!(wait_until_signal(word.as_ptr(), 7, Some(1)), Err(Errno(libc::ETIMEDOUT)));
        }
    }
}
