//! Atomic words shared by threads or processes: the only atomics that the protocols of this project use.
//!
//! Every access first passes [`step`], which is a preemption point under the simulator (it installs a hook there)
//! and costs one load and one branch otherwise. So the simulator runs the code that ships. The loom tests compile
//! the same protocols over a `sync` module of their own.

use crate::alone;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64};

pub use std::sync::atomic::{Ordering, fence};

static STEP: OnceLock<fn()> = OnceLock::new();

/// Makes `hook` run before every access to a shared word in this process, from now on. For the simulator. Only the
/// first hook is installed.
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

/// Tells the processor that this thread is polling.
#[inline]
pub fn relax() {
    std::hint::spin_loop();
}

/// The compiler moves no access across this; the revoker orders the accesses of the processor (see
/// [`crate::Host::fence_others`]).
#[inline]
pub fn hold_compiler_back() {
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
}

/// A 32-bit atomic that may lie in memory shared between processes, and that [`crate::Host`] can wait on.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Word(AtomicU32);

impl Word {
    /// Makes a word in private memory.
    pub const fn new(value: u32) -> Self {
        Self(AtomicU32::new(value))
    }

    /// Address of the word, by which the kernel's futex calls and the simulator identify it.
    pub fn address(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Loads the value.
    #[inline]
    pub fn load(&self, order: Ordering) -> u32 {
        step();
        self.0.load(order)
    }

    /// Stores a value.
    #[inline]
    pub fn store(&self, value: u32, order: Ordering) {
        step();
        self.0.store(value, order);
    }

    /// Stores a value and returns the previous one.
    #[inline]
    pub fn swap(&self, value: u32, order: Ordering) -> u32 {
        step();
        self.0.swap(value, order)
    }

    /// Stores `new` if the word holds `current`.
    ///
    /// # Errors
    /// The value that the word holds instead.
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
    /// The value that the word holds instead.
    #[inline]
    pub fn compare_exchange_here(&self, current: u32, new: u32) -> Result<u32, u32> {
        step();
        alone::compare_exchange(&self.0, current, new)
    }

    /// Adds with wrap-around and returns the previous value.
    #[inline]
    pub fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        step();
        self.0.fetch_add(value, order)
    }

    /// Sets bits and returns the previous value.
    #[inline]
    pub fn fetch_or(&self, bits: u32, order: Ordering) -> u32 {
        step();
        self.0.fetch_or(bits, order)
    }
}

/// A 64-bit atomic that may lie in memory shared between processes.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct LongWord(AtomicU64);

impl LongWord {
    /// Makes a word in private memory.
    pub const fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    /// Loads the value.
    #[inline]
    pub fn load(&self, order: Ordering) -> u64 {
        step();
        self.0.load(order)
    }

    /// Stores a value.
    #[inline]
    pub fn store(&self, value: u64, order: Ordering) {
        step();
        self.0.store(value, order);
    }

    /// Stores a value and returns the previous one.
    #[inline]
    pub fn swap(&self, value: u64, order: Ordering) -> u64 {
        step();
        self.0.swap(value, order)
    }

    /// Stores a value with Release ordering. The compiler moves no later load before the store; the caller must
    /// arrange that the processor does not either (see [`crate::Host::fence_others`]).
    #[inline]
    pub fn store_before_look(&self, value: u64) {
        step();
        self.0.store(value, Ordering::Release);
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    }

    /// Stores a value by a locked exchange that is also a full fence: no later load is executed before the store is
    /// visible.
    #[inline]
    pub fn exchange_full(&self, value: u64) -> u64 {
        step();
        let before = self.0.swap(value, Ordering::SeqCst);
        full_fence_after_exchange();
        before
    }

    /// Stores `new` if the word holds `current`.
    ///
    /// # Errors
    /// The value that the word holds instead.
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

    /// Adds with wrap-around and returns the previous value.
    #[inline]
    pub fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        step();
        self.0.fetch_add(value, order)
    }

    /// Adds with wrap-around; a full fence like [`Self::exchange_full`].
    #[inline]
    pub fn fetch_add_full(&self, value: u64) -> u64 {
        step();
        let before = self.0.fetch_add(value, Ordering::SeqCst);
        full_fence_after_exchange();
        before
    }

    /// Sets bits and returns the previous value.
    #[inline]
    pub fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
        step();
        self.0.fetch_or(bits, order)
    }

    /// Clears the bits that are clear in `bits` and returns the previous value.
    #[inline]
    pub fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
        step();
        self.0.fetch_and(bits, order)
    }
}

/// On x86-64 a locked instruction is a full fence by itself, and only the compiler must be restrained; other
/// machines need a fence instruction.
#[inline(always)]
fn full_fence_after_exchange() {
    if cfg!(target_arch = "x86_64") {
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}
