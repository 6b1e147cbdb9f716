//! The first way into the library: functions of the C library, by name.
//!
//! A call that does not concern the library continues in the next library's function of that name, so that it stays a
//! cancellation point and other preloaded libraries see it. Calls that do concern it end in `dispatch`, and set
//! `errno`. On x86-64 all other calls of libc arrive by the patched instructions. On other architectures there are only
//! these names: calls that libc makes by itself miss the library, and get EBADF from a placeholder.
//!
//! **Cancellation.** A thread ends in the way of the C library, which unwinds the stack from where it is. For the
//! cancellation points of POSIX, the library checks for cancellation before it serves the call, while its only frames
//! on the stack are functions without destructors. If the library itself calls one of these names while it is inside,
//! the call goes directly to the kernel, which does not check for cancellation. A wait for a lock goes through libc,
//! which can cancel it.

use crate::descriptors;
use crate::dispatch::{self, Call, KINDS, Routed};
use crate::local::local;
use crate::raw::{self, Arguments};
use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A function with a name of the C library.
struct Symbol {
    name: &'static CStr,
    next: AtomicUsize,
    cancels: bool,
}

impl Symbol {
    const fn new(name: &'static CStr, number: usize) -> Self {
        Self { name, next: AtomicUsize::new(0), cancels: is_cancellation_point(number) }
    }

    /// Ends the thread here if it was cancelled and the function is a cancellation point.
    #[inline]
    fn point(&self) {
        if self.cancels && !local().is_inside() {
            // SAFETY: takes no arguments. The frames that it unwinds have no destructors: `answer` and the function of
            // this name.
            unsafe { pthread_testcancel() };
        }
    }

    /// Makes the library's own call, which is no cancellation point; returns its result.
    fn call_kernel(&self, call: &Call) -> Option<i64> {
        let own = cfg!(target_arch = "x86_64") && self.cancels && local().is_inside();
        // SAFETY: the caller's own call of a function that only makes a system call.
        own.then(|| returned(unsafe { raw::call(call.number as u64, &call.arguments) }))
    }

    /// The next library's function.
    fn next(&self) -> usize {
        let known = self.next.load(Ordering::Relaxed);
        if known != 0 {
            return known;
        }
        // SAFETY: the name is a string; the answer is an address or null.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) } as usize;
        self.next.store(found, Ordering::Relaxed);
        found
    }

    /// Calls the next library's function with the original arguments.
    ///
    /// # Safety
    /// They are the arguments of a function of this name.
    unsafe fn call_next(&self, a: &Arguments) -> i64 {
        let next = self.next();
        if next == 0 {
            return fail(libc::ENOSYS);
        }
        // SAFETY: every function here takes words in registers, and ignores those beyond its own.
        unsafe {
            let next: unsafe extern "C-unwind" fn(u64, u64, u64, u64, u64, u64) -> i64 =
                std::mem::transmute(next);
            next(a[0], a[1], a[2], a[3], a[4], a[5])
        }
    }
}

unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

/// Whether a function that makes this call is a cancellation point: all kinds of open, close, read and write, and
/// fsync, fdatasync, fallocate.
const fn is_cancellation_point(number: usize) -> bool {
    const OPENS: [usize; 3] = [2, 85, 257];
    const MOVES: [usize; 11] = [0, 1, 17, 18, 19, 20, 295, 296, 326, 327, 328];
    const OTHERS: [usize; 4] = [3, 74, 75, 285];
    contains(&OPENS, number) || contains(&MOVES, number) || contains(&OTHERS, number)
}

const FCNTL: usize = 72;

fn waits_for_lock(call: &Call) -> bool {
    matches!(call.int(1), libc::F_SETLKW | libc::F_OFD_SETLKW) && !local().is_inside()
}

const fn contains(numbers: &[usize], number: usize) -> bool {
    let mut index = 0;
    while index < numbers.len() {
        if numbers[index] == number {
            return true;
        }
        index += 1;
    }
    false
}

fn fail(number: i32) -> i64 {
    // SAFETY: the C library's own thread-local word.
    unsafe { *libc::__errno_location() = number };
    -1
}

fn failed_to_find() -> bool {
    // SAFETY: the C library's own thread-local word.
    matches!(unsafe { *libc::__errno_location() }, libc::ENOENT | libc::ENOTDIR)
}

/// The positions of a system call's arguments in those of the function. A number from 10 on is a constant: the number
/// less 10.
type Order = [u8; 6];
const SAME: Order = [0, 1, 2, 3, 4, 5];
/// The constant zero.
const ZERO: u8 = 10;

/// Serves a function of the C library.
///
/// # Safety
/// The arguments are those of a function of this name.
unsafe fn answer(symbol: &Symbol, order: Order, given: &Call) -> i64 {
    let reordered;
    let call = if order == SAME {
        given
    } else {
        reordered = Call { arguments: ordered(order, &given.arguments), ..*given };
        &reordered
    };
    let routed = if KINDS[call.number] != 1 {
        symbol.point();
        dispatch::dispatch(call)
    } else if descriptors::is_ours(call.int(0)) {
        symbol.point();
        if cfg!(target_arch = "x86_64") && call.number == FCNTL && waits_for_lock(call) {
            // SAFETY: as the caller guarantees. The call comes back by the patched instruction.
            return unsafe { symbol.call_next(&given.arguments) };
        }
        dispatch::dispatch_ours(call)
    } else {
        // SAFETY: as the caller guarantees.
        return symbol.call_kernel(call).unwrap_or_else(|| unsafe { symbol.call_next(&given.arguments) });
    };
    match routed {
        Routed::Answered(result) => returned(result),
        // SAFETY: as the caller guarantees.
        routed => unsafe { go_on(symbol, order, (&given.arguments, call), routed) },
    }
}

/// Continues in the next library's function, with other paths if the dispatcher has replaced them.
///
/// # Safety
/// As [`answer`].
#[inline(never)]
unsafe fn go_on(symbol: &Symbol, order: Order, (given, call): (&Arguments, &Call), routed: Routed) -> i64 {
    if let Some(result) = symbol.call_kernel(call) {
        return result;
    }
    // Not dropped automatically, because a thread may end in the call: no part of this frame may have a destructor, not
    // even one that has nothing to do.
    let routed = ManuallyDrop::new(routed);
    let mut given = *given;
    if let Routed::OtherPaths(call, _) = &*routed {
        for (from, argument) in order.into_iter().zip(call.arguments).filter(|(from, _)| *from < ZERO) {
            given[usize::from(from)] = argument;
        }
    }
    // SAFETY: as the caller guarantees; a path that was replaced lives in `routed`.
    let result = unsafe { symbol.call_next(&given) };
    drop(ManuallyDrop::into_inner(routed));
    if result as i32 == -1 && failed_to_find() {
        return dispatch::retry_in_mount(call.number, &call.arguments).map_or(result, returned);
    }
    result
}

/// The arguments of the system call, from those of the function.
fn ordered(order: Order, given: &Arguments) -> Arguments {
    order.map(|from| if from < ZERO { given[usize::from(from)] } else { u64::from(from - ZERO) })
}

fn returned(result: i64) -> i64 {
    if (-4095..0).contains(&result) { fail(-result as i32) } else { result }
}

/// Finds the next functions while the process has one thread.
pub fn resolve() {
    for symbol in [&exported::READ, &exported::WRITE, &exported::OPEN, &exported::CLOSE] {
        symbol.next();
    }
}

/// The functions. A macro, because each is an item with its own name, and nothing else about them differs.
mod exported {
    use super::{Call, Order, SAME, Symbol, ZERO, answer};

    macro_rules! functions {
        ($($function:ident $symbol:ident $number:literal $order:expr;)*) => {
            $(
                pub(super) static $symbol: Symbol = Symbol::new(
                    match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($function), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("a name has no NUL inside"),
                    },
                    $number,
                );
                #[unsafe(no_mangle)]
                unsafe extern "C-unwind" fn $function(a: u64, b: u64, c: u64, d: u64, e: u64, f: u64) -> i64 {
                    const ORDER: Order = $order;
                    // SAFETY: the program calls a function of this name.
                    unsafe { answer(&$symbol, ORDER, &Call { number: $number, arguments: [a, b, c, d, e, f] }) }
                }
            )*
        };
    }

    /// The first argument is the version of a structure.
    const AFTER_VERSION: Order = [1, 2, 3, 4, 5, ZERO];
    /// An offset, then flags: in the kernel's call, the upper half of the offset is between the two.
    const OFFSET_FLAGS: Order = [0, 1, 2, 3, ZERO, 4];
    /// `futimens`: no path.
    const NO_PATH: Order = [0, ZERO, 1, ZERO, ZERO, ZERO];

    functions! {
        read READ 0 SAME;
        write WRITE 1 SAME;
        open OPEN 2 SAME;
        open64 OPEN64 2 SAME;
        close CLOSE 3 SAME;
        stat STAT 4 SAME;
        stat64 STAT64 4 SAME;
        fstat FSTAT 5 SAME;
        fstat64 FSTAT64 5 SAME;
        lstat LSTAT 6 SAME;
        lstat64 LSTAT64 6 SAME;
        __xstat XSTAT 4 AFTER_VERSION;
        __xstat64 XSTAT64 4 AFTER_VERSION;
        __fxstat FXSTAT 5 AFTER_VERSION;
        __fxstat64 FXSTAT64 5 AFTER_VERSION;
        __lxstat LXSTAT 6 AFTER_VERSION;
        __lxstat64 LXSTAT64 6 AFTER_VERSION;
        __fxstatat FXSTATAT 262 AFTER_VERSION;
        __fxstatat64 FXSTATAT64 262 AFTER_VERSION;
        fstatat FSTATAT 262 SAME;
        fstatat64 FSTATAT64 262 SAME;
        statx STATX 332 SAME;
        lseek LSEEK 8 SAME;
        lseek64 LSEEK64 8 SAME;
        mmap MMAP 9 SAME;
        mmap64 MMAP64 9 SAME;
        ioctl IOCTL 16 SAME;
        pread PREAD 17 SAME;
        pread64 PREAD64 17 SAME;
        pwrite PWRITE 18 SAME;
        pwrite64 PWRITE64 18 SAME;
        readv READV 19 SAME;
        writev WRITEV 20 SAME;
        preadv PREADV 295 SAME;
        preadv64 PREADV64 295 SAME;
        pwritev PWRITEV 296 SAME;
        pwritev64 PWRITEV64 296 SAME;
        preadv2 PREADV2 327 OFFSET_FLAGS;
        preadv64v2 PREADV64V2 327 OFFSET_FLAGS;
        pwritev2 PWRITEV2 328 OFFSET_FLAGS;
        pwritev64v2 PWRITEV64V2 328 OFFSET_FLAGS;
        access ACCESS 21 SAME;
        faccessat FACCESSAT 439 SAME;
        dup DUP 32 SAME;
        dup2 DUP2 33 SAME;
        dup3 DUP3 292 SAME;
        sendfile SENDFILE 40 SAME;
        sendfile64 SENDFILE64 40 SAME;
        fcntl FCNTL 72 SAME;
        fcntl64 FCNTL64 72 SAME;
        flock FLOCK 73 SAME;
        fsync FSYNC 74 SAME;
        fdatasync FDATASYNC 75 SAME;
        truncate TRUNCATE 76 SAME;
        truncate64 TRUNCATE64 76 SAME;
        ftruncate FTRUNCATE 77 SAME;
        ftruncate64 FTRUNCATE64 77 SAME;
        chdir CHDIR 80 SAME;
        fchdir FCHDIR 81 SAME;
        rename RENAME 82 SAME;
        mkdir MKDIR 83 SAME;
        rmdir RMDIR 84 SAME;
        creat CREAT 85 SAME;
        creat64 CREAT64 85 SAME;
        link LINK 86 SAME;
        unlink UNLINK 87 SAME;
        symlink SYMLINK 88 SAME;
        readlink READLINK 89 SAME;
        chmod CHMOD 90 SAME;
        fchmod FCHMOD 91 SAME;
        chown CHOWN 92 SAME;
        fchown FCHOWN 93 SAME;
        lchown LCHOWN 94 SAME;
        utime UTIME 132 SAME;
        statfs STATFS 137 SAME;
        statfs64 STATFS64 137 SAME;
        fstatfs FSTATFS 138 SAME;
        fstatfs64 FSTATFS64 138 SAME;
        setxattr SETXATTR 188 SAME;
        lsetxattr LSETXATTR 189 SAME;
        fsetxattr FSETXATTR 190 SAME;
        getxattr GETXATTR 191 SAME;
        lgetxattr LGETXATTR 192 SAME;
        fgetxattr FGETXATTR 193 SAME;
        listxattr LISTXATTR 194 SAME;
        llistxattr LLISTXATTR 195 SAME;
        flistxattr FLISTXATTR 196 SAME;
        removexattr REMOVEXATTR 197 SAME;
        lremovexattr LREMOVEXATTR 198 SAME;
        fremovexattr FREMOVEXATTR 199 SAME;
        getdents64 GETDENTS64 217 SAME;
        utimes UTIMES 235 SAME;
        openat OPENAT 257 SAME;
        openat64 OPENAT64 257 SAME;
        mkdirat MKDIRAT 258 SAME;
        mknodat MKNODAT 259 SAME;
        fchownat FCHOWNAT 260 SAME;
        unlinkat UNLINKAT 263 SAME;
        renameat RENAMEAT 264 SAME;
        linkat LINKAT 265 SAME;
        symlinkat SYMLINKAT 266 SAME;
        readlinkat READLINKAT 267 SAME;
        fchmodat FCHMODAT 452 SAME;
        utimensat UTIMENSAT 280 SAME;
        futimens FUTIMENS 280 NO_PATH;
        fallocate FALLOCATE 285 SAME;
        fallocate64 FALLOCATE64 285 SAME;
        syncfs SYNCFS 306 SAME;
        renameat2 RENAMEAT2 316 SAME;
        copy_file_range COPY_FILE_RANGE 326 SAME;
        execve EXECVE 59 SAME;
        close_range CLOSE_RANGE 436 SAME;
    }
}
