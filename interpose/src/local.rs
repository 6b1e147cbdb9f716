//! State of the library for each thread. It is in the static TLS block (initial-exec), so that an access takes two
//! instructions and never allocates: signal handlers and children between vfork and exec use it.
//!
//! Only its own thread and signal handlers on that thread use it. The words are atomics so that the compiler neither
//! caches nor splits them, and `Relaxed` is enough within one thread.

use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence};

/// The thread is inside: its own system calls go directly to the kernel, and signals wait.
pub const INSIDE: u32 = 1;
/// The thread is a child between vfork and exec: it shares memory with its parent, but not descriptors.
pub const BORROWED: u32 = 2;

/// Bytes of the kernel's `siginfo_t`.
pub const SIGINFO_BYTES: usize = 128;

/// State of one thread. The entry code knows that `mode` comes first.
#[repr(C)]
pub struct Local {
    /// [`INSIDE`] and [`BORROWED`].
    pub mode: AtomicU32,
    /// The kind of process that the clone in progress creates (see `fork`); 0 for none.
    pub cloning: AtomicU32,
    /// The signal that waits until the thread leaves; 0 for none.
    pub deferred: AtomicU32,
    /// Set when a wait ended early because of the deferred signal.
    pub interrupted: AtomicU32,
    /// The thread's signal mask before the deferral.
    pub mask: AtomicU64,
    /// Descriptors of a child between vfork and exec.
    pub overlay: AtomicPtr<crate::descriptors::Overlay>,
    /// The kernel's `siginfo_t` of the deferred signal.
    pub info: [AtomicU64; SIGINFO_BYTES / 8],
    /// The files that are shared with a child which is being created (see `tree`): their number.
    pub given: AtomicU64,
    /// Slot of the liveness socket of these files, plus one.
    pub liveness: AtomicU32,
    /// The process that made the overlay.
    pub maker: AtomicU32,
    /// The signal mask of that process, while a child runs in this thread's memory (see `fork`).
    pub maker_mask: AtomicU64,
}

/// Bytes for [`Local`] in the TLS block.
const LOCAL_BYTES: usize = 192;
const _: () = assert!(size_of::<Local>() <= LOCAL_BYTES);

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".section .tbss.hearth_local,\"awT\",@nobits",
    ".globl hearth_local",
    ".hidden hearth_local",
    ".type hearth_local, @object",
    ".size hearth_local, {bytes}",
    ".balign 16",
    "hearth_local:",
    ".zero {bytes}",
    ".text",
    bytes = const LOCAL_BYTES,
);

/// The calling thread's state.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn local() -> &'static Local {
    let address: *const Local;
    // SAFETY: reads the thread pointer, and the offset that the dynamic linker has filled in.
    unsafe {
        std::arch::asm!(
            "mov {0}, qword ptr [rip + hearth_local@GOTTPOFF]",
            "add {0}, qword ptr fs:[0]",
            out(reg) address,
            options(nostack, readonly),
        );
    }
    // SAFETY: the block is zero-filled, large enough (asserted above), aligned, and lives as long as its thread,
    // which cannot give the reference to another one (its users are functions of this crate that do not).
    unsafe { &*address }
}

/// The calling thread's state.
#[cfg(not(target_arch = "x86_64"))]
pub fn local() -> &'static Local {
    std::thread_local! {
        static LOCAL: Local = const { Local::new() };
    }
    // SAFETY: constant initialisation and no destructor: the block lives as long as its thread.
    LOCAL.with(|local| unsafe { &*std::ptr::from_ref(local) })
}

impl Local {
    /// A thread that is outside.
    #[cfg(not(target_arch = "x86_64"))]
    const fn new() -> Self {
        Self {
            mode: AtomicU32::new(0),
            cloning: AtomicU32::new(0),
            deferred: AtomicU32::new(0),
            interrupted: AtomicU32::new(0),
            mask: AtomicU64::new(0),
            overlay: AtomicPtr::new(std::ptr::null_mut()),
            info: [const { AtomicU64::new(0) }; SIGINFO_BYTES / 8],
            given: AtomicU64::new(0),
            liveness: AtomicU32::new(0),
            maker: AtomicU32::new(0),
            maker_mask: AtomicU64::new(0),
        }
    }

    /// True while the thread is inside.
    #[inline]
    pub fn is_inside(&self) -> bool {
        self.mode.load(Ordering::Relaxed) & INSIDE != 0
    }

    /// Runs a function inside. Calls nest: only the outermost one leaves.
    #[inline]
    pub fn inside<R>(&self, work: impl FnOnce() -> R) -> R {
        let before = self.mode.load(Ordering::Relaxed);
        self.mode.store(before | INSIDE, Ordering::Relaxed);
        // Pairs with the handler's load of `mode` on this thread: the accesses of `work` stay between the stores.
        compiler_fence(Ordering::SeqCst);
        let result = work();
        compiler_fence(Ordering::SeqCst);
        self.mode.store(before, Ordering::Relaxed);
        result
    }

    /// Runs a function as if outside, within code that runs inside: the program gets its signals.
    pub fn outside<R>(&self, work: impl FnOnce() -> R) -> R {
        let before = self.mode.load(Ordering::Relaxed);
        self.mode.store(before & !INSIDE, Ordering::Relaxed);
        // Pairs as in `inside`: the accesses of `work` stay between the stores.
        compiler_fence(Ordering::SeqCst);
        let result = work();
        compiler_fence(Ordering::SeqCst);
        self.mode.store(before, Ordering::Relaxed);
        result
    }

    /// The overlay, if the thread is a child between vfork and exec.
    #[inline]
    pub fn borrowed(&self) -> Option<*mut crate::descriptors::Overlay> {
        let borrowed = self.mode.load(Ordering::Relaxed) & BORROWED != 0;
        borrowed.then(|| self.overlay.load(Ordering::Relaxed)).filter(|overlay| !overlay.is_null())
    }

    /// Whether the thread acts for a child between vfork and exec: it is the child, or its parent that closes the child's files.
    pub fn acts_for_child(&self) -> bool {
        self.borrowed().is_some() || self.cloning.load(Ordering::Relaxed) == crate::fork::ENDING
    }

    /// The process that has this memory: that of the calling thread, or its parent if it is a child between vfork and
    /// exec.
    pub fn process(&self) -> i32 {
        match self.borrowed() {
            Some(_) => self.maker.load(Ordering::Relaxed).cast_signed(),
            None => crate::raw::process(),
        }
    }
}
