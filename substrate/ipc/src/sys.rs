//! Direct system calls, and a descriptor type that closes itself through them.
//!
//! Guarantees: the calls leave `errno` of the calling thread unchanged, allocate nothing, and call no libc symbol
//! that a preloaded library (such as libhearth.so) may have replaced.

use crate::error::Error;

/// Makes system call `number` with up to six arguments and returns the kernel's result: `-errno` on failure.
///
/// # Safety
/// The call must be sound with these arguments: every pointer must be valid for the kernel's use of it.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn syscall(number: libc::c_long, arguments: [usize; 6]) -> isize {
    let result: isize;
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the kernel's calling convention: these registers in, rax out, rcx and r11 lost; the caller guarantees
    // that the call uses memory soundly.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Makes system call `number` with up to six arguments and returns the kernel's result: `-errno` on failure.
///
/// # Safety
/// The call must be sound with these arguments: every pointer must be valid for the kernel's use of it.
#[cfg(target_arch = "aarch64")]
pub(crate) unsafe fn syscall(number: libc::c_long, arguments: [usize; 6]) -> isize {
    let result: isize;
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the kernel's calling convention: x8 and x0 to x5 in, x0 out; the caller guarantees that the call uses
    // memory soundly.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    result
}

/// Converts the kernel's result to a value, or to an error that names the call.
pub(crate) fn check(call: &'static str, result: isize) -> Result<usize, Error> {
    usize::try_from(result)
        .map_err(|_| Error::System { call, errno: i32::try_from(-result).unwrap_or(libc::EINVAL) })
}

/// An owned descriptor, closed on drop.
#[derive(Debug)]
pub struct Descriptor(Number);

#[derive(Debug)]
enum Number {
    Own(i32),
    Kept(u32, &'static Keeper),
}

/// Table of descriptors whose numbers may have to change while they are open: `interpose` moves them when the
/// program wants their numbers. A slot of the table names each of them.
#[derive(Debug)]
pub struct Keeper {
    /// Current number of a slot, for a system call made at once.
    pub number: fn(u32) -> i32,
    /// Closes the descriptor of a slot.
    pub close: fn(u32),
}

impl PartialEq for Descriptor {
    fn eq(&self, other: &Self) -> bool {
        self.raw() == other.raw()
    }
}

impl Descriptor {
    /// Takes ownership of a descriptor number.
    ///
    /// # Safety
    /// `raw` is open, and nothing else closes it.
    pub unsafe fn from_raw(raw: i32) -> Self {
        Self(Number::Own(raw))
    }

    /// A descriptor in a slot of a keeper. The slot belongs to this value until the value is dropped, which tells
    /// the keeper to close it.
    pub fn kept(slot: u32, keeper: &'static Keeper) -> Self {
        Self(Number::Kept(slot, keeper))
    }

    /// Wraps the result of a system call that creates a descriptor.
    pub(crate) fn from_call(call: &'static str, result: isize) -> Result<Self, Error> {
        let raw = check(call, result)?;
        Ok(Self(Number::Own(i32::try_from(raw).expect("the kernel's descriptors are ints"))))
    }

    /// The number. The number of a descriptor in a keeper's slot is valid only for the next system call.
    pub fn raw(&self) -> i32 {
        match self.0 {
            Number::Own(raw) => raw,
            Number::Kept(slot, keeper) => (keeper.number)(slot),
        }
    }

    /// The number as a system call argument.
    pub(crate) fn argument(&self) -> usize {
        argument(self.raw())
    }

    /// Makes a second descriptor of the same open file, close-on-exec, numbered `least` or above.
    ///
    /// # Errors
    /// `System`: no number free.
    pub fn duplicate(&self, least: i32) -> Result<Self, Error> {
        // SAFETY: fcntl(F_DUPFD_CLOEXEC) uses no memory.
        let result = unsafe {
            syscall(
                libc::SYS_fcntl,
                [self.argument(), libc::F_DUPFD_CLOEXEC as usize, argument(least), 0, 0, 0],
            )
        };
        Self::from_call("fcntl", result)
    }
}

impl From<std::os::fd::OwnedFd> for Descriptor {
    fn from(descriptor: std::os::fd::OwnedFd) -> Self {
        use std::os::fd::IntoRawFd;
        Self(Number::Own(descriptor.into_raw_fd()))
    }
}

impl From<Descriptor> for std::os::fd::OwnedFd {
    fn from(descriptor: Descriptor) -> Self {
        use std::os::fd::FromRawFd;
        assert!(matches!(descriptor.0, Number::Own(_)), "a keeper's descriptor stays his");
        let raw = std::mem::ManuallyDrop::new(descriptor).raw();
        // SAFETY: this value alone owned the descriptor, and `ManuallyDrop` keeps it open.
        unsafe { Self::from_raw_fd(raw) }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        match self.0 {
            Number::Kept(slot, keeper) => (keeper.close)(slot),
            Number::Own(raw) => {
                // SAFETY: the caller of `from_raw` gave the descriptor away. A failed close releases the number
                // too.
                let _ = unsafe { syscall(libc::SYS_close, [argument(raw), 0, 0, 0, 0, 0]) };
            }
        }
    }
}

/// Descriptors that this process inherited, except the standard ones, are not inherited by the programs that it starts
/// from now on. No effect before Linux 5.11.
pub fn pass_no_descriptors_on() {
    const BEHIND_STANDARD: usize = 3;
    let arguments = [BEHIND_STANDARD, u32::MAX as usize, libc::CLOSE_RANGE_CLOEXEC as usize, 0, 0, 0];
    // SAFETY: close_range uses no memory, and with this flag closes nothing.
    let _ = unsafe { syscall(libc::SYS_close_range, arguments) };
}

/// An int as a system call argument: sign-extended, as the kernel reads it.
pub(crate) fn argument(value: i32) -> usize {
    value as isize as usize
}

/// Binds the calling thread, and all threads that it starts later, to the first processor that it may run on. For
/// the simulator, which runs one thread at a time: a thread switch on one core is several times cheaper than one
/// between two cores.
///
/// # Errors
/// `System`.
pub fn pin_to_one_core() -> Result<(), Error> {
    let mut mask = [0u8; 128];
    // SAFETY: the kernel writes at most `mask.len()` bytes there.
    let result =
        unsafe { syscall(libc::SYS_sched_getaffinity, [0, mask.len(), mask.as_mut_ptr() as usize, 0, 0, 0]) };
    let filled = check("sched_getaffinity", result)?;
    let first =
        mask[..filled].iter().position(|byte| *byte != 0).expect("a running thread may run somewhere");
    let bit = mask[first] & mask[first].wrapping_neg();
    mask = [0u8; 128];
    mask[first] = bit;
    // SAFETY: the kernel reads `mask.len()` bytes there.
    let result =
        unsafe { syscall(libc::SYS_sched_setaffinity, [0, mask.len(), mask.as_ptr() as usize, 0, 0, 0]) };
    check("sched_setaffinity", result).map(|_| ())
}
