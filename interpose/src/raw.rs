//! The library's own system calls: a private `syscall` instruction, which is never patched. The library never calls
//! libc's functions for them.
//!
//! Results are the kernel's: negative numbers from -4095 on are errnos.

use crate::mount::Errno;

/// The six arguments of a system call.
pub type Arguments = [u64; 6];

/// Makes a system call.
///
/// # Safety
/// The effect of the call on the process's memory and descriptors has to be what the caller wants.
#[cfg(target_arch = "x86_64")]
pub unsafe fn call(number: u64, arguments: &Arguments) -> i64 {
    let result: i64;
    // SAFETY: the kernel preserves everything but rax, rcx and r11; the caller guarantees the rest.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number.cast_signed() => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            in("r9") arguments[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Makes a system call.
///
/// # Safety
/// The effect of the call on the process's memory and descriptors has to be what the caller wants.
#[cfg(target_arch = "aarch64")]
pub unsafe fn call(number: u64, arguments: &Arguments) -> i64 {
    let result: i64;
    // SAFETY: the kernel preserves everything but x0; the caller guarantees the rest.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") arguments[0].cast_signed() => result,
            in("x1") arguments[1],
            in("x2") arguments[2],
            in("x3") arguments[3],
            in("x4") arguments[4],
            in("x5") arguments[5],
            options(nostack),
        );
    }
    result
}

/// A kernel result as a value or an errno.
pub fn outcome(result: i64) -> Result<u64, Errno> {
    match u64::try_from(result) {
        Ok(value) => Ok(value),
        Err(_) => Err(Errno(i32::try_from(-result).unwrap_or(libc::EIO))),
    }
}

/// A call whose arguments are numbers, and pointers to memory of the library that outlives it.
///
/// # Errors
/// The kernel's errno.
///
/// # Safety
/// As for [`call`].
pub unsafe fn try_call(number: i64, arguments: &[u64]) -> Result<u64, Errno> {
    let mut all = [0; 6];
    all[..arguments.len()].copy_from_slice(arguments);
    // SAFETY: as the caller guarantees.
    outcome(unsafe { call(number.cast_unsigned(), &all) })
}

/// A descriptor as the kernel takes it in a register.
pub fn number(fd: i32) -> u64 {
    u64::from(fd.cast_unsigned())
}

/// Closes a kernel descriptor, and ignores errors.
pub fn close(fd: i32) {
    // SAFETY: closing takes no memory; the caller owns the descriptor.
    let _ = unsafe { try_call(libc::SYS_close, &[number(fd)]) };
}

/// `fcntl` with a number as its argument.
///
/// # Errors
/// The kernel's errno.
pub fn fcntl(fd: i32, command: i32, argument: u64) -> Result<u64, Errno> {
    // SAFETY: only commands without a pointer are used in this crate.
    unsafe { try_call(libc::SYS_fcntl, &[number(fd), u64::from(command.cast_unsigned()), argument]) }
}

/// `openat` of a path that ends in NUL.
///
/// # Errors
/// The kernel's errno.
pub fn open_at(dir: i32, path: &std::ffi::CStr, flags: i32, mode: u32) -> Result<i32, Errno> {
    let flags = u64::from(flags.cast_unsigned());
    let arguments = [number(dir), path.as_ptr() as u64, flags, u64::from(mode)];
    // SAFETY: the path is a NUL-terminated string that lives across the call.
    let fd = unsafe { try_call(libc::SYS_openat, &arguments) }?;
    Ok(i32::try_from(fd).expect("the kernel's descriptors are ints"))
}

/// `pread64` into memory of the library.
///
/// # Errors
/// The kernel's errno.
pub fn read_at(fd: i32, into: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let arguments = [number(fd), into.as_mut_ptr() as u64, into.len() as u64, offset];
    // SAFETY: the kernel writes only within the slice.
    let got = unsafe { try_call(libc::SYS_pread64, &arguments) }?;
    Ok(usize::try_from(got).expect("at most the slice's length"))
}

/// `write` from memory of the library.
///
/// # Errors
/// The kernel's errno.
pub fn write(fd: i32, from: &[u8]) -> Result<usize, Errno> {
    let arguments = [number(fd), from.as_ptr() as u64, from.len() as u64];
    // SAFETY: the kernel only reads the slice.
    let put = unsafe { try_call(libc::SYS_write, &arguments) }?;
    Ok(usize::try_from(put).expect("at most the slice's length"))
}

/// Private anonymous memory; `None` if there is none.
pub fn map_anonymous(bytes: usize) -> Option<*mut u8> {
    let protection = u64::from((libc::PROT_READ | libc::PROT_WRITE).cast_unsigned());
    let flags = u64::from((libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).cast_unsigned());
    let arguments = [0, bytes as u64, protection, flags, u64::MAX, 0];
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let address = unsafe { try_call(libc::SYS_mmap, &arguments) }.ok()?;
    Some(address as *mut u8)
}

/// Process id of the caller, asked from the kernel.
pub fn process() -> i32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { call(libc::SYS_getpid.cast_unsigned(), &[0; 6]) as i32 }
}

/// Thread id of the caller, asked from the kernel.
pub fn thread() -> i32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { call(libc::SYS_gettid.cast_unsigned(), &[0; 6]) as i32 }
}
