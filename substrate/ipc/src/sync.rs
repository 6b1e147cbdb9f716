//! Words that several threads or processes share: the only atomics that protocols of this project use.
//!
//! Every access first passes [`step`]: under the simulator, which installs a hook, it is a point where threads may
//! switch; everywhere else it costs one load and one branch that is never taken. The code that is simulated is the
//! code that ships. The loom tests compile the same protocols over a `sync` module of their own.

use crate::alone;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64};

pub use std::sync::atomic::{Ordering, fence};

static STEP: OnceLock<fn()> = OnceLock::new();

/// Makes `hook` run before every access to a shared word, in this process, from now on. For the simulator. Only the
/// first hook counts.
pub fn install_step(hook: fn()) {
    let _ = STEP.set(hook);
}

/// A point where the simulator may switch threads.
#[inline(always)]
pub fn step() {
    if let Some(hook) = STEP.get() {
        call(*hook);
    }
}

#[cold]
fn call(hook: fn()) {
    hook();
}

/// Tells the processor that this thread only waits for another.
#[inline]
pub fn relax() {
    std::hint::spin_loop();
}

/// 32 bits that may lie in memory shared between processes, and that [`crate::Host`] can wait for.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Word(AtomicU32);

impl Word {
    /// A word of this process.
    pub const fn new(value: u32) -> Self {
        Self(AtomicU32::new(value))
    }

    /// Where it lies: what the kernel's futex calls and the simulator know it by.
    pub fn address(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Reads.
    #[inline]
    pub fn load(&self, order: Ordering) -> u32 {
        step();
        self.0.load(order)
    }

    /// Writes.
    #[inline]
    pub fn store(&self, value: u32, order: Ordering) {
        step();
        self.0.store(value, order);
    }

    /// Writes, and gives what was there.
    #[inline]
    pub fn swap(&self, value: u32, order: Ordering) -> u32 {
        step();
        self.0.swap(value, order)
    }

    /// Writes `new` if `current` is there.
    ///
    /// # Errors
    /// What is there instead.
    #[inline]
    pub fn compare_exchange(
        &self,
        current: u32,
        new: u32,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u32, u32> {
        step();
        self.0.compare_exchange(current, new, success, failure)
    }

    /// [`Self::compare_exchange`] for a word that only threads of this process reach: see [`crate::alone`].
    ///
    /// # Errors
    /// What is there instead.
    #[inline]
    pub fn compare_exchange_here(&self, current: u32, new: u32) -> Result<u32, u32> {
        step();
        alone::compare_exchange(&self.0, current, new)
    }

    /// Adds, wrapping, and gives what was there.
    #[inline]
    pub fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        step();
        self.0.fetch_add(value, order)
    }

    /// Sets bits, and gives what was there.
    #[inline]
    pub fn fetch_or(&self, bits: u32, order: Ordering) -> u32 {
        step();
        self.0.fetch_or(bits, order)
    }
}

/// 64 bits that may lie in memory shared between processes.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct LongWord(AtomicU64);

impl LongWord {
    /// A word of this process.
    pub const fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    /// Reads.
    #[inline]
    pub fn load(&self, order: Ordering) -> u64 {
        step();
        self.0.load(order)
    }

    /// Writes.
    #[inline]
    pub fn store(&self, value: u64, order: Ordering) {
        step();
        self.0.store(value, order);
    }

    /// Writes, with Release. The compiler does no later load before it; that the processor does none either is for
    /// others to see to (see [`crate::Host::fence_others`]).
    #[inline]
    pub fn store_before_look(&self, value: u64) {
        step();
        self.0.store(value, Ordering::Release);
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    }

    /// Writes by a locked exchange that is also a full fence: no later load is done before the write is seen.
    #[inline]
    pub fn exchange_full(&self, value: u64) -> u64 {
        step();
        let before = self.0.swap(value, Ordering::SeqCst);
        full_fence_after_exchange();
        before
    }

    /// Writes `new` if `current` is there.
    ///
    /// # Errors
    /// What is there instead.
    #[inline]
    pub fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        step();
        self.0.compare_exchange(current, new, success, failure)
    }

    /// Adds, wrapping, and gives what was there.
    #[inline]
    pub fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        step();
        self.0.fetch_add(value, order)
    }

    /// Adds, wrapping; a full fence like [`Self::exchange_full`].
    #[inline]
    pub fn fetch_add_full(&self, value: u64) -> u64 {
        step();
        let before = self.0.fetch_add(value, Ordering::SeqCst);
        full_fence_after_exchange();
        before
    }

    /// Sets bits, and gives what was there.
    #[inline]
    pub fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
        step();
        self.0.fetch_or(bits, order)
    }

    /// Keeps only the bits that are set in `bits`, and gives what was there.
    #[inline]
    pub fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
        step();
        self.0.fetch_and(bits, order)
    }
}

/// On x86-64 a locked instruction is a full fence by itself, and only the compiler has to be held back; elsewhere
/// the fence is an instruction of its own.
#[inline(always)]
fn full_fence_after_exchange() {
    if cfg!(target_arch = "x86_64") {
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}
