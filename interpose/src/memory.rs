//! Access to the program's memory. An address from the program may be invalid, and must then give EFAULT instead of a
//! signal.
//!
//! Every access is one instruction between two labels. For a fault at such an instruction, `signals` continues
//! execution at the landing, which returns "fault".

use crate::mount::Errno;
use std::io::{IoSlice, IoSliceMut};

/// EFAULT.
pub const FAULT: Errno = Errno(libc::EFAULT);

/// Limit of bytes of one read or write: Linux's MAX_RW_COUNT.
pub const TRANSFER_BYTES_MAX: usize = 0x7fff_f000;

/// Limit of buffers of one vectored call: Linux's UIO_MAXIOV.
pub const VECTORS_MAX: usize = 1024;

const PAGE: usize = 4096;

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".text",
    ".globl hearth_copy",
    ".hidden hearth_copy",
    ".type hearth_copy, @function",
    ".globl hearth_touch",
    ".hidden hearth_touch",
    ".type hearth_touch, @function",
    ".globl hearth_peek",
    ".hidden hearth_peek",
    ".type hearth_peek, @function",
    ".globl hearth_guarded_begin",
    ".hidden hearth_guarded_begin",
    ".globl hearth_guarded_end",
    ".hidden hearth_guarded_end",
    ".globl hearth_landing",
    ".hidden hearth_landing",
    "hearth_guarded_begin:",
    // hearth_copy(to, from, bytes) -> bytes not copied
    "hearth_copy:",
    "mov rcx, rdx",
    "rep movsb",
    "mov rax, rcx",
    "ret",
    // hearth_touch(address) -> 0: a write that changes nothing, also for other threads
    "hearth_touch:",
    "mov ecx, 1",
    "lock or byte ptr [rdi], 0",
    "xor eax, eax",
    "ret",
    // hearth_peek(address) -> byte, or -1
    "hearth_peek:",
    "mov rcx, -1",
    "movzx eax, byte ptr [rdi]",
    "ret",
    "hearth_guarded_end:",
    "hearth_landing:",
    "mov rax, rcx",
    "ret",
);

#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    fn hearth_copy(to: *mut u8, from: *const u8, bytes: usize) -> usize;
    fn hearth_touch(address: *mut u8) -> usize;
    fn hearth_peek(address: *const u8) -> i64;
    fn hearth_guarded_begin();
    fn hearth_guarded_end();
    fn hearth_landing();
}

/// The address at which execution continues after a fault at this instruction; `None` if it is not one of the guarded
/// instructions.
#[cfg(target_arch = "x86_64")]
pub fn landing(instruction: u64) -> Option<u64> {
    let guarded = hearth_guarded_begin as *const () as u64..hearth_guarded_end as *const () as u64;
    guarded.contains(&instruction).then_some(hearth_landing as *const () as u64)
}

/// Copies memory, with a landing for faults; returns the bytes not copied.
///
/// # Safety
/// One side is valid memory of the library for `bytes`; the other may be any address from the program.
#[cfg(target_arch = "x86_64")]
unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) -> usize {
    // SAFETY: as the caller guarantees; faults on the program's side have a landing.
    unsafe { hearth_copy(to, from, bytes) }
}

#[cfg(target_arch = "x86_64")]
fn touch(address: *mut u8) -> bool {
    // SAFETY: the instruction changes nothing, and a fault has a landing.
    unsafe { hearth_touch(address) == 0 }
}

#[cfg(target_arch = "x86_64")]
fn peek(address: *const u8) -> Option<u8> {
    // SAFETY: one byte is read, and a fault has a landing.
    u8::try_from(unsafe { hearth_peek(address) }).ok()
}

/// Copies through the kernel, which knows the mappings; returns the bytes not copied.
///
/// # Safety
/// One side is valid memory of the library for `bytes`; the other may be any address from the program.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) -> usize {
    let local = [to as u64, bytes as u64];
    let remote = [from as u64, bytes as u64];
    let process = crate::raw::number(crate::raw::process());
    let arguments = [process, local.as_ptr() as u64, 1, remote.as_ptr() as u64, 1, 0];
    // SAFETY: the kernel checks both sides of a copy within this process.
    match unsafe { crate::raw::try_call(libc::SYS_process_vm_readv, &arguments) } {
        Ok(copied) => bytes - (copied as usize).min(bytes),
        Err(_) => bytes,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn touch(address: *mut u8) -> bool {
    // The kernel writes the same byte again, and refuses if the program may not write there.
    // SAFETY: a byte of the library, and the program's address checked by the kernel.
    peek(address).is_some_and(|byte| unsafe { copy(address, &byte, 1) } == 0)
}

#[cfg(not(target_arch = "x86_64"))]
fn peek(address: *const u8) -> Option<u8> {
    let mut byte = 0;
    // SAFETY: a byte of the library, and the program's address checked by the kernel.
    (unsafe { copy(&mut byte, address, 1) } == 0).then_some(byte)
}

/// Reads a plain value at an address in the program's memory.
///
/// # Errors
/// EFAULT.
pub fn read_value<T: Copy>(address: u64) -> Result<T, Errno> {
    let mut value = std::mem::MaybeUninit::<T>::uninit();
    // SAFETY: the destination belongs to the library. The value is used only if every byte was copied, and every type
    // with which this is called (integers and structs of them) is valid for any bytes.
    unsafe {
        let left = copy(value.as_mut_ptr().cast(), address as *const u8, size_of::<T>());
        if left == 0 { Ok(value.assume_init()) } else { Err(FAULT) }
    }
}

/// Stores a plain value at an address in the program's memory.
///
/// # Errors
/// EFAULT; a part of the value may be stored.
pub fn write_value<T: Copy>(address: u64, value: &T) -> Result<(), Errno> {
    // SAFETY: the source belongs to the library; the program asked for the bytes at that address.
    let left = unsafe { copy(address as *mut u8, std::ptr::from_ref(value).cast(), size_of::<T>()) };
    if left == 0 { Ok(()) } else { Err(FAULT) }
}

/// Stores bytes at an address in the program's memory.
///
/// # Errors
/// EFAULT; a part of the bytes may be stored.
pub fn write_bytes(address: u64, bytes: &[u8]) -> Result<(), Errno> {
    // SAFETY: the source belongs to the library; the program asked for the bytes at that address.
    let left = unsafe { copy(address as *mut u8, bytes.as_ptr(), bytes.len()) };
    if left == 0 { Ok(()) } else { Err(FAULT) }
}

/// Copies bytes from the program's memory.
///
/// # Errors
/// EFAULT.
pub fn read_bytes(address: u64, into: &mut [u8]) -> Result<(), Errno> {
    // SAFETY: the destination belongs to the library.
    let left = unsafe { copy(into.as_mut_ptr(), address as *const u8, into.len()) };
    if left == 0 { Ok(()) } else { Err(FAULT) }
}

/// Copies a string from the program's memory without its NUL. Never reads beyond the page that contains the NUL.
///
/// # Errors
/// EFAULT, ENAMETOOLONG when there is no NUL in `limit` bytes.
pub fn read_string(address: u64, limit: usize) -> Result<Vec<u8>, Errno> {
    let mut text = Vec::new();
    while text.len() < limit {
        let at = address.wrapping_add(text.len() as u64);
        let page_left = PAGE - (at as usize % PAGE);
        let mut part = [0u8; 256];
        let bytes = page_left.min(part.len()).min(limit - text.len());
        read_bytes(at, &mut part[..bytes])?;
        if let Some(end) = part[..bytes].iter().position(|byte| *byte == 0) {
            text.extend_from_slice(&part[..end]);
            return Ok(text);
        }
        text.extend_from_slice(&part[..bytes]);
    }
    Err(Errno(libc::ENAMETOOLONG))
}

/// The byte at an address, if it can be read.
pub fn byte(address: u64) -> Option<u8> {
    peek(address as *const u8)
}

/// End of the address space of programs: with five levels of page tables, and with four.
const MEMORY_END: u64 = 1 << 56;
const MEMORY_END_USUAL: u64 = 1 << 47;

/// Whether a range is within the address space of programs, mapped or not.
#[inline]
pub fn is_of_programs(address: u64, bytes: u64) -> bool {
    let end = if address < MEMORY_END_USUAL { MEMORY_END_USUAL } else { MEMORY_END };
    address.checked_add(bytes).is_some_and(|behind| behind <= end)
}

/// The number of bytes in the buffers of an `iovec` array; `None` if the array cannot be read, or a buffer is not within the
/// address space.
#[cold]
pub fn bytes_of_vector(address: u64, count: u64) -> Option<usize> {
    let mut sum = 0usize;
    for index in 0..u64::from(count as u32) {
        let [base, bytes] = read_value::<[u64; 2]>(address + 16 * index).ok()?;
        if !is_of_programs(base, bytes) {
            return None;
        }
        sum = sum.saturating_add(bytes as usize).min(TRANSFER_BYTES_MAX);
    }
    Some(sum)
}

/// The direction in which a buffer of the program is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Its bytes are written to a file.
    Source,
    /// It receives bytes of a file.
    Target,
}

/// The number of bytes from `address` on, at most `bytes`, that can be used in this direction; each page is tried.
///
/// If the program unmaps its buffer during the call, it gets a signal.
#[inline]
fn usable(address: u64, bytes: usize, purpose: Use) -> usize {
    let mut good = 0;
    while good < bytes {
        let at = address.wrapping_add(good as u64);
        let fine = match purpose {
            Use::Source => peek(at as *const u8).is_some(),
            Use::Target => touch(at as *mut u8),
        };
        if !fine {
            break;
        }
        good += PAGE - (at as usize % PAGE);
    }
    good.min(bytes)
}

/// The buffer of a call with one buffer, cut where it stops being usable.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    address: u64,
    bytes: usize,
}

impl Buffer {
    /// The usable part of the memory at an address.
    ///
    /// # Errors
    /// EFAULT if no byte of it is usable, or if it reaches beyond the address space: a length of -1 is an error, and
    /// not a short write.
    #[inline]
    pub fn new(address: u64, bytes: u64, purpose: Use) -> Result<Self, Errno> {
        if !is_of_programs(address, bytes) {
            return Err(FAULT);
        }
        let wanted = usize::try_from(bytes).unwrap_or(usize::MAX).min(TRANSFER_BYTES_MAX);
        let good = usable(address, wanted, purpose);
        if good > 0 || wanted == 0 { Ok(Self { address, bytes: good }) } else { Err(FAULT) }
    }

    /// Its bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Runs a function on the buffer as a slice to read from.
    #[inline]
    pub fn with_source<R>(&self, run: impl FnOnce(&[IoSlice<'_>]) -> R) -> R {
        if self.bytes == 0 {
            return run(&[]);
        }
        // SAFETY: found readable; the program lends it for the length of its call. If other threads of the program
        // change it meanwhile, that only changes which bytes are seen.
        let slice = unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) };
        run(&[IoSlice::new(slice)])
    }

    /// Runs a function on the buffer as a slice to write to.
    #[inline]
    pub fn with_target<R>(&self, run: impl FnOnce(&mut [IoSliceMut<'_>]) -> R) -> R {
        if self.bytes == 0 {
            return run(&mut []);
        }
        // SAFETY: found writable, and the program lends it for the length of its call.
        let slice = unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.bytes) };
        run(&mut [IoSliceMut::new(slice)])
    }
}

/// Number of buffers of a call that need no allocation; more of them are in a list.
const PARTS_ON_STACK: usize = 8;

/// The buffers of a vectored call, cut where they stop being usable: they end before the first bad page, as the
/// kernel's copies do.
pub struct Buffers {
    few: [(u64, usize); PARTS_ON_STACK],
    /// All of them, if there are more than fit into `few`.
    many: Vec<(u64, usize)>,
    count: usize,
    bytes: usize,
}

impl Buffers {
    const fn none() -> Self {
        Self { few: [(0, 0); PARTS_ON_STACK], many: Vec::new(), count: 0, bytes: 0 }
    }

    /// The buffers of an `iovec` array.
    ///
    /// # Errors
    /// EFAULT; EINVAL (too many buffers, or an impossible length).
    pub fn vector(address: u64, count: u64, purpose: Use) -> Result<Self, Errno> {
        // The kernel takes 32 bits of the number.
        let count = Some(count as u32 as usize).filter(|count| *count <= VECTORS_MAX);
        let count = count.ok_or(Errno(libc::EINVAL))?;
        let (mut buffers, mut good) = (Self::none(), true);
        for index in 0..count {
            let [base, bytes] = read_value::<[u64; 2]>(address + 16 * index as u64)?;
            if bytes > i64::MAX.cast_unsigned() {
                return Err(Errno(libc::EINVAL));
            }
            if !is_of_programs(base, bytes) {
                return Err(FAULT);
            }
            // After the first bad page, only the lengths are checked.
            good = good && buffers.add(base, bytes, purpose);
        }
        if good || buffers.bytes > 0 { Ok(buffers) } else { Err(FAULT) }
    }

    /// Whether there is no byte in them.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Adds the usable part of a buffer; false if that is not the whole buffer.
    #[inline]
    fn add(&mut self, address: u64, wanted: u64, purpose: Use) -> bool {
        let room = TRANSFER_BYTES_MAX - self.bytes;
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX).min(room);
        let good = usable(address, wanted, purpose);
        if good > 0 {
            self.push((address, good));
            self.bytes += good;
        }
        good == wanted
    }

    #[inline]
    fn push(&mut self, part: (u64, usize)) {
        if self.count < PARTS_ON_STACK {
            self.few[self.count] = part;
        } else {
            if self.many.is_empty() {
                self.many.extend_from_slice(&self.few);
            }
            self.many.push(part);
        }
        self.count += 1;
    }

    #[inline]
    fn parts(&self) -> &[(u64, usize)] {
        if self.count <= PARTS_ON_STACK { &self.few[..self.count] } else { &self.many }
    }

    /// Runs a function on the buffers as slices to read from.
    #[inline]
    pub fn with_sources<R>(&self, run: impl FnOnce(&[IoSlice<'_>]) -> R) -> R {
        // SAFETY: each part was found readable; the program lends it for the length of its call. If other threads of
        // the program change it meanwhile, that only changes which bytes are seen.
        let slice =
            |&(at, bytes): &(u64, usize)| unsafe { std::slice::from_raw_parts(at as *const u8, bytes) };
        let parts = self.parts();
        if parts.len() > PARTS_ON_STACK {
            let slices: Vec<_> = parts.iter().map(|part| IoSlice::new(slice(part))).collect();
            return run(&slices);
        }
        let mut slices = [IoSlice::new(&[]); PARTS_ON_STACK];
        for (place, part) in slices.iter_mut().zip(parts) {
            *place = IoSlice::new(slice(part));
        }
        run(&slices[..parts.len()])
    }

    /// Runs a function on the buffers as slices to write to.
    #[inline]
    pub fn with_targets<R>(&mut self, run: impl FnOnce(&mut [IoSliceMut<'_>]) -> R) -> R {
        // SAFETY: each part was found writable, and the program lends it for the length of its call. Parts that overlap
        // are only stored to, one after the other.
        let slice =
            |&(at, bytes): &(u64, usize)| unsafe { std::slice::from_raw_parts_mut(at as *mut u8, bytes) };
        let parts = self.parts();
        if parts.len() > PARTS_ON_STACK {
            let mut slices: Vec<_> = parts.iter().map(|part| IoSliceMut::new(slice(part))).collect();
            return run(&mut slices);
        }
        let mut slices: [_; PARTS_ON_STACK] = std::array::from_fn(|_| IoSliceMut::new(&mut []));
        for (place, part) in slices.iter_mut().zip(parts) {
            *place = IoSliceMut::new(slice(part));
        }
        run(&mut slices[..parts.len()])
    }
}
