//! Signals and threads that are inside.
//!
//! The kernel delivers a signal to a thread in a system call when the call is over. So do we: each handler of the
//! program's is installed behind ours, which runs it at once if the thread is outside. If it is inside, ours keeps
//! what the kernel said about the signal, blocks every further one in the interrupted context (so one is kept,
//! not more), and returns; on the way out the signal is queued anew for the thread and the mask put back, and the
//! kernel delivers it with a real frame, on the right stack. Being inside costs two stores and one load.
//!
//! A wait that is to end at a signal goes through [`wait_until_signal`]: a signal that comes at any instant before
//! the wait ends makes it return, without a window between the look and the sleep.
//!
//! SA_RESETHAND is kept from the kernel, which would take our handler away at the first signal, also one that only waits
//! or lands. The action becomes the default one when the program's function is called: whoever exchanges its word in the
//! table calls it, so one of several threads does, and for the others the default action is taken. Then the kernel is told.
//!
//! A SIGSEGV or SIGBUS whose instruction is one of `memory`'s goes on at its landing; every other one is the
//! program's. A thread that has blocked SIGSEGV and then passes a bad buffer is killed, as the kernel does to
//! every fault of a blocked signal.
//!
//! The C library's signal of a cancelled thread unwinds the stack below its handler. If functions of Rust's are there,
//! which that would not survive, the handler is called where the unwinder finds nothing more: the cleanup functions
//! run, and the thread ends.
//!
//! Where nothing is patched (other architectures) handlers stay as they are and run inside, on top of us.

use crate::local::{Local, SIGINFO_BYTES, local};
use crate::mount::Errno;
use crate::raw;
use std::sync::atomic::{AtomicU64, Ordering};

/// Highest signal number, plus one.
const SIGNALS: usize = 65;
/// By which the C library tells a thread that it is cancelled.
const SIGCANCEL: i32 = 32;
const SA_RESTORER: u64 = 0x0400_0000;
const SA_RESETHAND: u64 = 0x8000_0000;
const DEFAULT: u64 = libc::SIG_DFL as u64;
const IGNORE: u64 = libc::SIG_IGN as u64;

/// Signals of instructions: blocking them kills.
const FAULTS: u64 = 1 << (libc::SIGSEGV - 1)
    | 1 << (libc::SIGBUS - 1)
    | 1 << (libc::SIGFPE - 1)
    | 1 << (libc::SIGILL - 1)
    | 1 << (libc::SIGTRAP - 1);

/// Signals whose default action is nothing.
const IGNORED_BY_DEFAULT: u64 =
    1 << (libc::SIGCHLD - 1) | 1 << (libc::SIGCONT - 1) | 1 << (libc::SIGURG - 1) | 1 << (libc::SIGWINCH - 1);

/// The kernel's `struct sigaction` of x86-64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Action {
    /// Function, or default or ignore.
    pub handler: u64,
    /// `SA_*`.
    pub flags: u64,
    /// Where the handler returns to.
    pub restorer: u64,
    /// Signals blocked while it runs.
    pub mask: u64,
}

/// What the program set for a signal. A seqlock would be needed to read it whole; only function and flags are ever
/// read while it may change, and each alone is one word.
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
    // SAFETY: both structures are ours and live across the call.
    unsafe { raw::try_call(libc::SYS_rt_sigaction, &arguments) }?;
    Ok(old)
}

fn ours() -> u64 {
    on_signal as *const () as u64
}

/// Sets or asks what the program wants for a signal; what it wanted before.
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
            // First the table: the handler must find the program's function when it runs.
            wanted.store(new);
            kernel_action(signal, Some(&in_kernel(signal, new))).inspect_err(|_| wanted.store(&before))?
        }
    };
    Ok(if there.handler == ours() { before } else { there })
}

/// What the kernel has for what the program wants: our handler, where there is one of the program's or faults land.
fn in_kernel(signal: usize, wanted: &Action) -> Action {
    if matches!(wanted.handler, DEFAULT | IGNORE) && !is_fault(signal) {
        return *wanted;
    }
    let (restorer, restores) = restorer_of(wanted);
    let flags = wanted.flags & !SA_RESETHAND | libc::SA_SIGINFO as u64 | restores;
    Action { handler: ours(), flags, restorer, mask: wanted.mask }
}

/// Makes the kernel's action what the table says, also if another thread sets it meanwhile: who sets stores into the
/// table before it tells the kernel, so either that comes after all of ours, or we see it here and go round again.
fn tell_kernel(signal: usize) {
    loop {
        let wanted = WANTED[signal].load();
        let told = kernel_action(signal, Some(&in_kernel(signal, &wanted)));
        if told.is_err() || WANTED[signal].load() == wanted {
            return;
        }
    }
}

/// Every action needs a way back; the program's, or ours where it gave none.
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
    // hearth_last_frame(signal, info, context, handler): the unwinder does not know it, and ends here
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
    /// The library's first byte, and the one after its code: the linker's names.
    static __ehdr_start: u8;
    static etext: u8;
}

/// True of an instruction of the library's.
#[cfg(target_arch = "x86_64")]
fn is_of_library(instruction: u64) -> bool {
    ((&raw const __ehdr_start) as u64..(&raw const etext) as u64).contains(&instruction)
}

#[cfg(not(target_arch = "x86_64"))]
extern "C" fn hearth_restorer() {}

/// Sleeps while the word is what is expected, at most until the point in time (CLOCK_BOOTTIME does not exist for
/// futexes: it is CLOCK_MONOTONIC, in nanoseconds), or until a signal waits for the way out.
///
/// # Errors
/// EAGAIN (the word is another), ETIMEDOUT, EINTR: leave, so that the signal is delivered; a handler that says
/// SA_RESTART brings the same call back.
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
    // SAFETY: the caller's word; the rest is ours and lives across the call.
    let result = unsafe { hearth_wait(word as u64, operation, expected.into(), timeout, pending, number) };
    if result == -i64::from(libc::EINTR) {
        local.interrupted.store(1, Ordering::Relaxed);
    }
    raw::outcome(result).map(|_| ())
}

/// Installs the handler of faults, whatever the program wants for them: it has to be there before the program's
/// memory is first touched.
pub fn catch_faults() {
    for signal in [libc::SIGSEGV as usize, libc::SIGBUS as usize] {
        let Ok(before) = kernel_action(signal, None) else { continue };
        let _ = set(signal, Some(&Action { flags: before.flags & !(libc::SA_SIGINFO as u64), ..before }));
    }
}

/// Signals whose kernel action is ours although the program ignores them: before exec they have to be ignored in
/// the kernel too, because that is what the next program inherits.
pub fn before_exec() {
    for signal in [libc::SIGSEGV as usize, libc::SIGBUS as usize] {
        if WANTED[signal].load().handler == IGNORE && local().borrowed().is_none() {
            let _ = kernel_action(signal, Some(&Action { handler: IGNORE, ..Action::default() }));
        }
    }
}

/// The other way round, after an exec that failed.
pub fn after_failed_exec() {
    for signal in [libc::SIGSEGV as usize, libc::SIGBUS as usize] {
        let wanted = WANTED[signal].load();
        if wanted.handler == IGNORE && local().borrowed().is_none() {
            let _ = set(signal, Some(&wanted));
        }
    }
}

/// Blocks every signal of the thread that is not a fault; its mask from before.
pub fn block() -> u64 {
    change_mask(libc::SIG_BLOCK, Some(!FAULTS))
}

/// The thread's mask.
pub fn mask() -> u64 {
    change_mask(libc::SIG_BLOCK, None)
}

/// Puts back a mask.
pub fn set_mask(mask: u64) {
    change_mask(libc::SIG_SETMASK, Some(mask));
}

fn change_mask(how: i32, new: Option<u64>) -> u64 {
    let mut before = 0u64;
    let new = new.as_ref().map_or(0, |new| std::ptr::from_ref(new) as u64);
    let arguments = [how as u64, new, (&raw mut before) as u64, 8];
    // SAFETY: both words are ours and live across the call.
    let _ = unsafe { raw::try_call(libc::SYS_rt_sigprocmask, &arguments) };
    before
}

/// On the way out: delivers what waited. True if a wait was ended for it and its handler says that the call is to
/// be made again.
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
    // SAFETY: queues a signal for this very thread with what the kernel said about it; the structure is ours.
    let _ = unsafe { raw::try_call(libc::SYS_rt_tgsigqueueinfo, &arguments) };
    set_mask(mask);
    restart
}

/// Registers of the interrupted context, as the C library names them.
#[cfg(target_arch = "x86_64")]
const RIP: usize = libc::REG_RIP as usize;

/// Our handler, in front of every one of the program's.
#[cfg(target_arch = "x86_64")]
unsafe extern "C" fn on_signal(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    // SAFETY: the kernel gave both, for the time the handler runs.
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
        // SAFETY: the C library's own handler, with what the kernel gave. What it leaves on the stack is outside.
        unsafe { hearth_last_frame(signal, info, context, wanted) };
        return;
    }
    // SAFETY: as above; it is the program's turn.
    unsafe { pass_on(signal, info, context, sync) };
}

#[cfg(not(target_arch = "x86_64"))]
unsafe extern "C" fn on_signal(_: i32, _: *mut libc::siginfo_t, _: *mut libc::ucontext_t) {}

/// Keeps the signal for the way out and blocks all others until then; a wait under way ends.
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

/// Whether the action is to do nothing. The kernel leaves out such signals by itself, but for those of faults, and after a
/// handler with SA_RESETHAND (see [`take_only_call`]).
fn is_nothing(signal: usize, wanted: u64) -> bool {
    wanted == IGNORE || (wanted == DEFAULT && is_ignored_by_default(signal))
}

/// The action of a signal that is being delivered. If its handler is to be called once, it is this caller's call.
fn take(signal: usize) -> Action {
    loop {
        let wanted = WANTED[signal].load();
        let any = matches!(wanted.handler, DEFAULT | IGNORE) || wanted.flags & SA_RESETHAND == 0;
        if any || take_only_call(signal, &wanted) {
            return wanted;
        }
    }
}

/// Makes the action the default one, with the flags and the mask that it had, as the kernel does for SA_RESETHAND. False
/// if another thread did so first, or the program has set another one.
fn take_only_call(signal: usize, wanted: &Action) -> bool {
    if local().borrowed().is_some() {
        // The child's actions in the kernel are its own, the table is its parent's. It has one thread.
        let _ = kernel_action(signal, Some(&Action { handler: DEFAULT, ..*wanted }));
        return true;
    }
    let handler = &WANTED[signal].handler;
    // AcqRel: pairs with the Acquire of `load` in the threads that come too late.
    if handler.compare_exchange(wanted.handler, DEFAULT, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return false;
    }
    // Faults go on landing. And a signal that the default action ignores: being told so, the kernel would throw away
    // those that wait until the handler returns, which it may have set anew by then.
    if !is_fault(signal) && !is_ignored_by_default(signal) {
        tell_kernel(signal);
    }
    true
}

/// Does what the program wants for a signal.
unsafe fn pass_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t, sync: bool) {
    let number = signal as usize;
    match take(number).handler {
        wanted @ (DEFAULT | IGNORE) => {
            if !sync && is_nothing(number, wanted) {
                return;
            }
            // Once more, with the default action: the instruction faults again, or the signal is sent again.
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

    /// Ten seconds from now, so that a signal that is missed fails the test instead of stopping it.
    fn soon() -> u64 {
        let mut now = [0u64; 2];
        let arguments = [libc::CLOCK_MONOTONIC as u64, now.as_mut_ptr() as u64];
        // SAFETY: the kernel fills the two words.
        assert_eq!(unsafe { raw::try_call(libc::SYS_clock_gettime, &arguments) }, Ok(0));
        (now[0] + 10) * 1_000_000_000
    }

    /// Waits for a word that never changes, with a signal before the wait, and with one in the middle of it.
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
                    assert_eq!(HITS.load(Ordering::SeqCst), before, "not inside");
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
    fn a_wait_ends_by_its_word_and_by_its_time() {
        let word = AtomicU32::new(7);
        // SAFETY: the word outlives the waits.
        unsafe {
            assert_eq!(wait_until_signal(word.as_ptr(), 8, None), Err(Errno(libc::EAGAIN)));
            assert_eq!(wait_until_signal(word.as_ptr(), 7, Some(1)), Err(Errno(libc::ETIMEDOUT)));
        }
    }
}
