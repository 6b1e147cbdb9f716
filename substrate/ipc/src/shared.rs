//! Memory shared between processes: sealed memfds, mapped for writing or for reading only.
//!
//! Guarantees. A mapping has the agreed size for ever: the size is sealed before another process gets the
//! descriptor and checked before the memory is mapped, so no other process can cause a SIGBUS. Memory that another
//! process may write is never a `&[u8]` or `&T`: this module gives access to it as words (atomics), or by copying
//! it out once. A forked child does not inherit the mappings.

use crate::alive::AliveWord;
use crate::error::Error;
use crate::host::{Host, Time, Waited};
use crate::sync::{LongWord, Word, step};
use crate::sys::{Descriptor, argument, check, syscall};
use crate::words::{CommitWord, Generation, LeaseWord, Overflow, SealWord, Slot, ValidUntil};
use std::ptr::NonNull;
use std::sync::Arc;

/// Size of a page; sizes of shared memory are multiples of it.
pub const PAGE_BYTES: usize = 4096;

const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// Creates shared memory of `bytes` (rounded up to pages): all zero, its size sealed, its pages allocated, so that
/// a machine without memory fails here and not by SIGBUS later. `name` appears in /proc/PID/maps.
///
/// Only the user of the creating process can open it again for writing through /proc: see [`read_only`].
///
/// # Errors
/// `System`.
pub fn create(name: &std::ffi::CStr, bytes: usize) -> Result<Descriptor, Error> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: `name` is a string that ends with a zero byte; the kernel only reads it.
    let result =
        unsafe { syscall(libc::SYS_memfd_create, [name.as_ptr() as usize, flags as usize, 0, 0, 0, 0]) };
    let memory = Descriptor::from_call("memfd_create", result)?;
    let bytes = bytes.next_multiple_of(PAGE_BYTES);
    // SAFETY: fallocate uses no memory of ours.
    check("fallocate", unsafe { syscall(libc::SYS_fallocate, [memory.argument(), 0, 0, bytes, 0, 0]) })?;
    // SAFETY: fchmod uses no memory of ours.
    check("fchmod", unsafe { syscall(libc::SYS_fchmod, [memory.argument(), 0o600, 0, 0, 0, 0]) })?;
    let seal = [memory.argument(), libc::F_ADD_SEALS as usize, SEALS as usize, 0, 0, 0];
    // SAFETY: fcntl(F_ADD_SEALS) uses no memory of ours.
    check("fcntl", unsafe { syscall(libc::SYS_fcntl, seal) })?;
    Ok(memory)
}

/// Opens the same memory read-only: LibFS gets such a descriptor of the pages that SharedFS writes.
///
/// # Errors
/// `System`: also when /proc is not mounted.
pub fn read_only(memory: &Descriptor) -> Result<Descriptor, Error> {
    let path = std::ffi::CString::new(format!("/proc/self/fd/{}", memory.raw())).expect("no zero in digits");
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: `path` is a string that ends with a zero byte.
    let result = unsafe {
        syscall(libc::SYS_openat, [argument(libc::AT_FDCWD), path.as_ptr() as usize, flags as usize, 0, 0, 0])
    };
    Descriptor::from_call("openat", result)
}

/// Access rights of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Loads only; a store would be a SIGSEGV, and the types of this module allow none.
    Read,
    /// Loads and stores.
    Write,
}

/// A type that consists of words only: every bit pattern is valid, and other processes may change it at any time.
///
/// # Safety
/// The type consists of atomics, has no padding that is read, is valid for every bit pattern, and needs no drop.
pub unsafe trait Shared: Sized {
    /// Result of a read.
    type Value;

    /// Reads the value, with the ordering that the type's protocol needs.
    fn read(&self) -> Self::Value;
}

// SAFETY: a transparent atomic.
unsafe impl Shared for Word {
    type Value = u32;
    #[inline]
    fn read(&self) -> u32 {
        // Acquire: pairs with the store that published the data to which the word refers.
        self.load(crate::sync::Ordering::Acquire)
    }
}

// SAFETY: a transparent atomic.
unsafe impl Shared for LongWord {
    type Value = u64;
    #[inline]
    fn read(&self) -> u64 {
        // Acquire: as for `Word`.
        self.load(crate::sync::Ordering::Acquire)
    }
}

// SAFETY: a transparent LongWord.
unsafe impl Shared for CommitWord {
    type Value = format::Sequence;
    #[inline]
    fn read(&self) -> format::Sequence {
        self.load()
    }
}

// SAFETY: a transparent LongWord.
unsafe impl Shared for SealWord {
    type Value = crate::words::Seal;
    #[inline]
    fn read(&self) -> crate::words::Seal {
        self.load()
    }
}

// SAFETY: a transparent LongWord.
unsafe impl Shared for LeaseWord {
    type Value = crate::words::Lease;
    #[inline]
    fn read(&self) -> crate::words::Lease {
        self.load()
    }
}

// SAFETY: a transparent LongWord.
unsafe impl Shared for ValidUntil {
    type Value = u64;
    #[inline]
    fn read(&self) -> u64 {
        self.load_ns()
    }
}

// SAFETY: a transparent LongWord.
unsafe impl Shared for Generation {
    type Value = u64;
    #[inline]
    fn read(&self) -> u64 {
        self.before_copy()
    }
}

// SAFETY: a transparent Word.
unsafe impl Shared for AliveWord {
    type Value = crate::alive::Life;
    #[inline]
    fn read(&self) -> crate::alive::Life {
        self.load()
    }
}

// SAFETY: a LongWord on a line of its own; the rest of the line is never read.
unsafe impl Shared for Slot {
    type Value = ();
    #[inline]
    fn read(&self) {}
}

// SAFETY: LongWords, each on a line of its own; the rest of the lines is never read.
unsafe impl Shared for Overflow {
    type Value = ();
    #[inline]
    fn read(&self) {}
}

/// Mapped shared memory, unmapped with the last view of it. A forked child does not have the mapping, and must
/// forget its copies of this value instead of dropping them: something else may be mapped there by then.
#[derive(Debug)]
pub struct Mapping {
    address: NonNull<u8>,
    bytes: usize,
    access: Access,
}

// SAFETY: the mapping is plain memory that every thread may use; it is accessed only through atomics and raw
// copies.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` of shared memory that any process created. Fails unless the memory is exactly that long
    /// (rounded up to pages) and its size is sealed.
    ///
    /// # Errors
    /// `Memory`, `System`.
    pub fn new(memory: &Descriptor, bytes: usize, access: Access) -> Result<Arc<Self>, Error> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        if bytes == 0 || i64::try_from(bytes).is_err() {
            return Err(Error::Memory("impossible size"));
        }
        check_memory(memory, bytes)?;
        let protection = match access {
            Access::Read => libc::PROT_READ,
            Access::Write => libc::PROT_READ | libc::PROT_WRITE,
        };
        let arguments = [0, bytes, protection as usize, libc::MAP_SHARED as usize, memory.argument(), 0];
        // SAFETY: the kernel chooses an unused address; no existing mapping is replaced.
        let address = check("mmap", unsafe { syscall(libc::SYS_mmap, arguments) })?;
        let address = NonNull::new(address as *mut u8).expect("mmap without MAP_FIXED never gives page 0");
        let mapping = Self { address, bytes, access };
        let arguments = [address.as_ptr() as usize, bytes, libc::MADV_DONTFORK as usize, 0, 0, 0];
        // SAFETY: the range is the mapping made above.
        check("madvise", unsafe { syscall(libc::SYS_madvise, arguments) })?;
        Ok(Arc::new(mapping))
    }

    /// Length in bytes, a multiple of [`PAGE_BYTES`].
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Writable view of `count` values at `offset`.
    ///
    /// # Errors
    /// `Memory`: outside the mapping, not aligned, or mapped for reading only.
    pub fn words<T: Shared>(self: &Arc<Self>, offset: usize, count: usize) -> Result<Words<T>, Error> {
        if self.access != Access::Write {
            return Err(Error::Memory("mapped for reading only"));
        }
        let first = self.locate::<T>(offset, count)?;
        Ok(Words { mapping: self.clone(), first, count })
    }

    /// Read-only view of `count` values at `offset`.
    ///
    /// # Errors
    /// `Memory`: outside the mapping or not aligned.
    pub fn reads<T: Shared>(self: &Arc<Self>, offset: usize, count: usize) -> Result<Reads<T>, Error> {
        let first = self.locate::<T>(offset, count)?;
        Ok(Reads { mapping: self.clone(), first, count })
    }

    fn locate<T: Shared>(&self, offset: usize, count: usize) -> Result<NonNull<T>, Error> {
        if !offset.is_multiple_of(align_of::<T>()) {
            return Err(Error::Memory("a view that is not aligned"));
        }
        let bytes = count.checked_mul(size_of::<T>()).ok_or(OUTSIDE)?;
        Ok(self.range(offset, bytes)?.cast())
    }

    /// Address of `bytes` bytes at `offset`, if they lie inside the mapping.
    fn range(&self, offset: usize, bytes: usize) -> Result<NonNull<u8>, Error> {
        let end = offset.checked_add(bytes).ok_or(OUTSIDE)?;
        if end > self.bytes {
            return Err(OUTSIDE);
        }
        // SAFETY: `offset` was checked to lie inside the mapping, or at its end with no bytes.
        Ok(unsafe { self.address.add(offset) })
    }

    /// Copies bytes out and reads each once. Concurrent writes of other processes may be seen in parts.
    ///
    /// # Errors
    /// `Memory`: outside the mapping.
    pub fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result<(), Error> {
        let from = self.range(offset, to.len())?.as_ptr().cast_const();
        let (first, second) = to.split_at_mut(to.len() / 2);
        // SAFETY: `from` has as many bytes as `to`, which this thread alone can access.
        unsafe {
            read_bytes(from, first);
            // The simulator may change the source in the middle of a copy, as another process may.
            step();
            read_bytes(from.add(first.len()), second);
        }
        Ok(())
    }

    /// Copies bytes in. Other processes may see them in parts until a store with Release publishes them.
    ///
    /// # Errors
    /// `Memory`: outside the mapping, or mapped for reading only.
    pub fn copy_in(&self, offset: usize, from: &[u8]) -> Result<(), Error> {
        if self.access != Access::Write {
            return Err(Error::Memory("mapped for reading only"));
        }
        let to = self.range(offset, from.len())?.as_ptr();
        let (first, second) = from.split_at(from.len() / 2);
        // SAFETY: `to` has as many bytes as `from` and is mapped for writing.
        unsafe {
            write_bytes(first, to);
            step();
            write_bytes(second, to.add(first.len()));
        }
        Ok(())
    }
}

const OUTSIDE: Error = Error::Memory("a range outside the mapping");

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: every view holds the mapping, so no view is left.
        let _ =
            unsafe { syscall(libc::SYS_munmap, [self.address.as_ptr() as usize, self.bytes, 0, 0, 0, 0]) };
    }
}

/// Refuses memory whose size can change or differs from `bytes`.
fn check_memory(memory: &Descriptor, bytes: usize) -> Result<(), Error> {
    // SAFETY: fcntl(F_GET_SEALS) uses no memory.
    let result =
        unsafe { syscall(libc::SYS_fcntl, [memory.argument(), libc::F_GET_SEALS as usize, 0, 0, 0, 0]) };
    let seals = check("fcntl", result).map_err(|_| Error::Memory("not a memfd"))?;
    let wanted = (libc::F_SEAL_SHRINK | libc::F_SEAL_GROW) as usize;
    if seals & wanted != wanted {
        return Err(Error::Memory("size not sealed"));
    }
    // SAFETY: stat is plain numbers, for which zero is a value.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one stat structure there.
    let result = unsafe { syscall(libc::SYS_fstat, [memory.argument(), &raw mut stat as usize, 0, 0, 0, 0]) };
    check("fstat", result)?;
    if usize::try_from(stat.st_size) != Ok(bytes) {
        return Err(Error::Memory("another size than agreed"));
    }
    Ok(())
}

/// Reads each byte once, in the largest pieces the addresses allow.
///
/// # Safety
/// `from` is readable for `to.len()` bytes.
unsafe fn read_bytes(from: *const u8, to: &mut [u8]) {
    let mut at = 0;
    if from.addr().is_multiple_of(size_of::<u64>()) {
        for piece in to.chunks_exact_mut(size_of::<u64>()) {
            // SAFETY: `at` + 8 is at most `to.len()`, and `from` + `at` is aligned. Volatile: read exactly once.
            let value = unsafe { from.add(at).cast::<u64>().read_volatile() };
            piece.copy_from_slice(&value.to_ne_bytes());
            at += size_of::<u64>();
        }
    }
    for byte in &mut to[at..] {
        // SAFETY: `at` is below `to.len()`.
        *byte = unsafe { from.add(at).read_volatile() };
        at += 1;
    }
}

/// Writes each byte once, in the largest pieces the addresses allow.
///
/// # Safety
/// `to` is writable for `from.len()` bytes.
unsafe fn write_bytes(from: &[u8], to: *mut u8) {
    let mut at = 0;
    if to.addr().is_multiple_of(size_of::<u64>()) {
        for piece in from.chunks_exact(size_of::<u64>()) {
            let value = u64::from_ne_bytes(piece.try_into().expect("chunks of eight bytes"));
            // SAFETY: `at` + 8 is at most `from.len()`, and `to` + `at` is aligned.
            unsafe { to.add(at).cast::<u64>().write_volatile(value) };
            at += size_of::<u64>();
        }
    }
    for byte in &from[at..] {
        // SAFETY: `at` is below `from.len()`.
        unsafe { to.add(at).write_volatile(*byte) };
        at += 1;
    }
}

/// Writable view of words in a mapping.
#[derive(Debug)]
pub struct Words<T> {
    mapping: Arc<Mapping>,
    first: NonNull<T>,
    count: usize,
}

// SAFETY: a view of atomics in a mapping that is Send and Sync itself.
unsafe impl<T: Shared + Sync> Send for Words<T> {}
// SAFETY: as above.
unsafe impl<T: Shared + Sync> Sync for Words<T> {}

impl<T> Words<T> {
    /// The mapping in which the words lie.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}

impl<T: Shared> std::ops::Deref for Words<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: range and alignment were checked, the view holds the writable mapping, and `T` consists of
        // atomics.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
    }
}

/// Read-only view of words in a mapping.
#[derive(Debug)]
pub struct Reads<T> {
    mapping: Arc<Mapping>,
    first: NonNull<T>,
    count: usize,
}

// SAFETY: a view of atomics in a mapping that is Send and Sync itself.
unsafe impl<T: Shared + Sync> Send for Reads<T> {}
// SAFETY: as above.
unsafe impl<T: Shared + Sync> Sync for Reads<T> {}

impl<T: Shared> Reads<T> {
    /// Reads the value at `index`, which must be below the count.
    #[inline]
    pub fn read(&self, index: usize) -> T::Value {
        assert!(index < self.count, "an index that the caller checked");
        // SAFETY: inside the view, which holds the mapping; `read` only loads, so a read-only mapping suffices.
        unsafe { self.first.add(index).as_ref() }.read()
    }

    /// Number of words.
    #[inline]
    pub fn count(&self) -> usize {
        self.count
    }

    /// The mapping in which the words lie.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}

impl Reads<Word> {
    /// [`Host::wait`] on the word at `index`.
    pub fn wait(&self, host: &dyn Host, index: usize, expected: u32, until: Option<Time>) -> Waited {
        assert!(index < self.count, "an index that the caller checked");
        // SAFETY: as in `read`; a wait only loads.
        host.wait(unsafe { self.first.add(index).as_ref() }, expected, until)
    }
}

impl Reads<Generation> {
    /// [`Generation::still`] of the word at `index`.
    #[inline]
    pub fn still(&self, index: usize, before: u64) -> bool {
        assert!(index < self.count, "an index that the caller checked");
        // SAFETY: as in `read`; `still` only loads.
        unsafe { self.first.add(index).as_ref() }.still(before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::SystemHost;
    use crate::sync::Ordering;
    use crate::words::LeaseState;

    fn raw(number: libc::c_long, arguments: [usize; 6]) -> isize {
        // SAFETY: tests pass plain numbers to calls that use no memory.
        unsafe { syscall(number, arguments) }
    }

    #[test]
    fn two_mappings_show_the_same_words_and_bytes() {
        let memory = create(c"test", 5000).unwrap();
        let ours = Mapping::new(&memory, 5000, Access::Write).unwrap();
        let theirs = Mapping::new(&read_only(&memory).unwrap(), 5000, Access::Read).unwrap();
        assert_eq!(ours.bytes(), 8192);
        let lease = ours.words::<LeaseWord>(64, 2).unwrap();
        let granted = lease[1].grant(LeaseState::Write);
        assert_eq!(theirs.reads::<LeaseWord>(64, 2).unwrap().read(1), granted);
        for (offset, length) in [(100, 0), (101, 1), (104, 4000), (4095, 37), (8191, 1)] {
            let bytes: Vec<u8> = (0..length).map(|index| (index * 7 + offset) as u8).collect();
            ours.copy_in(offset, &bytes).unwrap();
            let mut seen = vec![0; length];
            theirs.copy_out(offset, &mut seen).unwrap();
            assert_eq!(seen, bytes);
        }
    }

    #[test]
    fn views_outside_or_for_writing_what_is_read_only_are_refused() {
        let memory = create(c"test", 4096).unwrap();
        let ours = Mapping::new(&memory, 4096, Access::Write).unwrap();
        let theirs = Mapping::new(&memory, 4096, Access::Read).unwrap();
        assert!(theirs.words::<Word>(0, 1).is_err());
        assert!(theirs.copy_in(0, &[1]).is_err());
        assert!(ours.words::<Word>(2, 1).is_err());
        assert!(ours.words::<Word>(4093, 1).is_err());
        assert!(ours.words::<Word>(0, 1025).is_err());
        assert!(ours.words::<Word>(4096, usize::MAX / 2).is_err());
        assert!(ours.copy_out(4000, &mut [0; 97]).is_err());
        assert!(ours.copy_out(usize::MAX, &mut [0; 2]).is_err());
        assert_eq!(ours.words::<Word>(4092, 1).unwrap()[0].load(Ordering::Relaxed), 0);
    }

    #[test]
    fn memory_that_could_shrink_or_has_another_size_is_refused() {
        let memory = create(c"test", 8192).unwrap();
        let refused = |error| Mapping::new(&memory, error, Access::Read).unwrap_err();
        assert_eq!(refused(4096), Error::Memory("another size than agreed"));
        assert_eq!(refused(0), Error::Memory("impossible size"));
        let truncate = [memory.argument(), 0, 0, 0, 0, 0];
        assert_eq!(raw(libc::SYS_ftruncate, truncate), -(libc::EPERM as isize));
        let name = c"unsealed";
        let result = raw(
            libc::SYS_memfd_create,
            [name.as_ptr() as usize, libc::MFD_ALLOW_SEALING as usize, 0, 0, 0, 0],
        );
        let unsealed = Descriptor::from_call("memfd_create", result).unwrap();
        assert_eq!(raw(libc::SYS_ftruncate, [unsealed.argument(), 4096, 0, 0, 0, 0]), 0);
        let error = Mapping::new(&unsealed, 4096, Access::Read).unwrap_err();
        assert_eq!(error, Error::Memory("size not sealed"));
    }

    #[test]
    fn a_word_mapped_for_reading_can_be_waited_for() {
        let memory = create(c"test", 4096).unwrap();
        let ours = Mapping::new(&memory, 4096, Access::Write).unwrap().words::<Word>(0, 1).unwrap();
        let theirs = Mapping::new(&read_only(&memory).unwrap(), 4096, Access::Read).unwrap();
        let theirs = theirs.reads::<Word>(0, 1).unwrap();
        let waiter = SystemHost.spawn(
            "waiter",
            Box::new(move || {
                while theirs.read(0) == 0 {
                    assert_eq!(theirs.wait(&SystemHost, 0, 0, None), Waited::Woken);
                }
            }),
        );
        ours[0].store(1, Ordering::Release);
        SystemHost.wake(&ours[0], 1);
        waiter.unwrap().join().unwrap();
        let late = Some(SystemHost.now());
        let theirs = Mapping::new(&read_only(&memory).unwrap(), 4096, Access::Read).unwrap();
        assert_eq!(theirs.reads::<Word>(0, 1).unwrap().wait(&SystemHost, 0, 1, late), Waited::TimedOut);
    }

    #[test]
    fn a_read_only_descriptor_cannot_be_mapped_for_writing() {
        let memory = create(c"test", 4096).unwrap();
        let theirs = read_only(&memory).unwrap();
        let error = Mapping::new(&theirs, 4096, Access::Write).unwrap_err();
        assert_eq!(error, Error::System { call: "mmap", errno: libc::EACCES });
    }
}
