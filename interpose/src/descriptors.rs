//! The table of the process's descriptors that are ours, with the open file description of each.
//!
//! Each of them is a real kernel descriptor, a *placeholder*: a duplicate of a harmless one that was opened with
//! O_PATH. So numbers never collide, limits, CLOEXEC and `/proc/self/fd` behave as usual, and a call that misses the
//! library gets EBADF. A bitmap says which numbers are ours (its load is the only cost for all other calls), and a
//! table holds the description of each.
//!
//! **Close against read.** A call takes a reference on the description, and then checks again that the number still
//! stands for it. The drop of the last reference closes the file. There are no locks, so a fork, a signal handler and a
//! child between vfork and exec find the table consistent.
//!
//! **Between vfork and exec** the child has its own table in the kernel but shares this memory. Its changes go into its
//! [`Overlay`], which its parent drops when it continues.
//!
//! **The library's own descriptors** ([`Internal`]) have high numbers, are marked as ours without a description, and
//! move if the program wants their number. So their users ask for the number again for each call.

use crate::limits;
use crate::local::local;
use crate::mount::{ChildLocks, Errno, Handle};
use crate::{raw, real};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Descriptors from this number on are never ours.
pub const NUMBERS: usize = 1 << 20;
/// The entry of the table for the working directory, if it is ours. No descriptor has this number.
pub const CWD: i32 = NUMBERS as i32 - 1;
/// Limit of open file descriptions in a process.
const DESCRIPTIONS: usize = 1 << 16;
/// Value of `references` while the file is being closed, after the last reference was dropped.
const CLOSING: u32 = u32::MAX;

/// One bit for each number: set if the number is ours.
pub static BITMAP: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];
/// Description of each number, plus one; 0 for none.
static TABLE: [AtomicU32; NUMBERS] = [const { AtomicU32::new(0) }; NUMBERS];
static FILES: [Description; DESCRIPTIONS] = [const { Description::new() }; DESCRIPTIONS];
/// The index at which the search for a free description begins.
static HINT: AtomicU32 = AtomicU32::new(0);
/// Number of descriptors that are ours.
static COUNT: AtomicU32 = AtomicU32::new(0);
/// Limit of descriptors of the library itself.
const INTERNALS: usize = 4096;
/// Lowest number of the library's own descriptors if no high number is free: above those of the standard files.
const LEAST: u64 = 3;
/// Number of an internal descriptor that the calling process does not have: only a child between vfork and exec has it,
/// or the child has closed its own. The kernel opens none with this number.
const NOT_HERE: i32 = i32::MAX - 1;
/// Numbers of the library's own descriptors, plus one; 0 for a free slot.
static INTERNAL: [AtomicI32; INTERNALS] = [const { AtomicI32::new(0) }; INTERNALS];
/// Slots of the internal descriptors that belong to the client of the mount, plus one; 0 for a free entry.
static CLIENTS: [AtomicU32; 64] = [const { AtomicU32::new(0) }; 64];
/// Slot of the O_PATH descriptor of which placeholders are duplicates, plus one; 0 before the first use.
static BASE: AtomicU32 = AtomicU32::new(0);

/// An open file description, with a reference for each number and for each call in progress.
struct Description {
    references: AtomicU32,
    handle: AtomicU64,
}

impl Description {
    const fn new() -> Self {
        Self { references: AtomicU32::new(0), handle: AtomicU64::new(0) }
    }
}

/// A descriptor of the library itself or of the mount. The program cannot close it: it has a high number, and moves if
/// the program wants just that number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Internal(u32);

impl Internal {
    /// Keeps a descriptor: moves it to a high number, and closes the old number.
    ///
    /// # Errors
    /// EMFILE: no number or no slot is left; the descriptor is closed.
    pub fn keep(fd: i32) -> Result<Self, Errno> {
        let moved = move_up(fd, true);
        raw::close(fd);
        let moved = moved?;
        // A child between vfork and exec has a table of its own, which ends with it.
        let overlay = overlay();
        let number = if overlay.is_some() { NOT_HERE } else { moved };
        let free = |slot: &AtomicI32| {
            slot.compare_exchange(0, number + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let Some(slot) = INTERNAL.iter().position(free) else {
            raw::close(moved);
            return Err(Errno(libc::EMFILE));
        };
        if let Some(overlay) = overlay {
            overlay.internals.retain(|(other, _)| *other != slot as u32);
            overlay.internals.push((slot as u32, moved));
            return Ok(Self(slot as u32));
        }
        // Marked as ours without a description, so every call of the program with this number fails with EBADF.
        mark(moved, true);
        Ok(Self(slot as u32))
    }

    /// The internal descriptor in a slot, as [`Self::slot`] has returned it.
    pub fn from_slot(slot: u32) -> Self {
        assert!((slot as usize) < INTERNALS, "no such slot");
        Self(slot)
    }

    /// Its slot.
    pub fn slot(self) -> u32 {
        self.0
    }

    /// Its number, for a system call that follows at once.
    pub fn number(self) -> i32 {
        if let Some(overlay) = overlay() {
            let found = overlay.internals.iter().find(|(slot, _)| *slot == self.0);
            // Its parent has others since then.
            return found.map_or(NOT_HERE, |(_, number)| *number);
        }
        INTERNAL[self.0 as usize].load(Ordering::Acquire) - 1
    }

    /// Closes it. A child between vfork and exec closes it in its own table, and its parent does so when it continues.
    pub fn close(self) {
        let Some(overlay) = overlay() else {
            let fd = INTERNAL[self.0 as usize].swap(0, Ordering::AcqRel) - 1;
            mark(fd, false);
            return raw::close(fd);
        };
        raw::close(self.number());
        overlay.internals.retain(|(slot, _)| *slot != self.0);
        overlay.internals.push((self.0, NOT_HERE));
        overlay.closed.push(self);
    }

    /// Frees its number for the program, and moves the descriptor to another one.
    ///
    /// # Errors
    /// EMFILE.
    pub fn free_number(self) -> Result<(), Errno> {
        let before = self.number();
        let moved = move_up(before, true)?;
        if let Some(overlay) = overlay() {
            overlay.internals.retain(|(slot, _)| *slot != self.0);
            overlay.internals.push((self.0, moved));
            raw::close(before);
            return Ok(());
        }
        mark(moved, true);
        INTERNAL[self.0 as usize].store(moved + 1, Ordering::Release);
        mark(before, false);
        raw::close(before);
        Ok(())
    }
}

/// Sets or clears a number's bit.
fn mark(fd: i32, ours: bool) {
    let Some(word) = usize::try_from(fd).ok().and_then(|fd| BITMAP.get(fd / 64)) else { return };
    let bit = 1 << (fd % 64);
    if ours {
        word.fetch_or(bit, Ordering::Relaxed);
    } else {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Keeps a descriptor of the mount's client, until [`close_clients`].
///
/// # Errors
/// EMFILE; the descriptor is closed.
pub fn keep_for_client(fd: i32) -> Result<Internal, Errno> {
    let kept = Internal::keep(fd)?;
    let slot = kept.0 + 1;
    let free =
        |entry: &AtomicU32| entry.compare_exchange(0, slot, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    if CLIENTS.iter().any(free) {
        return Ok(kept);
    }
    kept.close();
    Err(Errno(libc::EMFILE))
}

/// Closes a descriptor of the mount's client, by its slot.
pub fn close_clients(slot: u32) {
    for entry in &CLIENTS {
        let _ = entry.compare_exchange(slot + 1, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
    Internal(slot).close();
}

/// In a forked child: closes all descriptors of the parent's client.
pub fn close_all_of_client() {
    for entry in &CLIENTS {
        if let Some(slot) = entry.swap(0, Ordering::Relaxed).checked_sub(1) {
            Internal(slot).close();
        }
    }
}

/// Duplicates a descriptor to a high number: above the limit on descriptors if that limit is low, else below it. If no
/// high number is free, to any number that is not a standard file's.
///
/// # Errors
/// EMFILE.
pub fn move_up(fd: i32, close_on_exec: bool) -> Result<i32, Errno> {
    let limit = limits::of(libc::RLIMIT_NOFILE)?[0].min(NUMBERS as u64 - 1);
    let below = limit - (limit / 4).min(INTERNALS as u64);
    let command = if close_on_exec { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD };
    limits::with_room(|above| {
        let moved = raw::fcntl(fd, command, above.unwrap_or(below));
        Ok(moved.or_else(|_| raw::fcntl(fd, command, LEAST))? as i32)
    })
}

/// The internal descriptor with this number, if it is one.
pub fn internal(fd: i32) -> Option<Internal> {
    if fd == NOT_HERE {
        return None;
    }
    if let Some(overlay) = overlay() {
        let found = overlay.internals.iter().find(|(_, number)| *number == fd);
        return found.map(|(slot, _)| Internal(*slot));
    }
    let index = usize::try_from(fd).ok()?;
    if BITMAP.get(index / 64)?.load(Ordering::Relaxed) >> (index % 64) & 1 == 0 {
        return None;
    }
    INTERNAL.iter().position(|slot| slot.load(Ordering::Relaxed) == fd + 1).map(|slot| Internal(slot as u32))
}

/// Numbers of all internal descriptors, lowest first.
pub fn internal_numbers() -> Vec<i32> {
    let used = (0..INTERNALS).filter(|slot| INTERNAL[*slot].load(Ordering::Relaxed) != 0);
    let numbers = used.map(|slot| Internal(slot as u32).number());
    let mut numbers: Vec<i32> = numbers.filter(|number| *number != NOT_HERE).collect();
    numbers.sort_unstable();
    numbers
}

/// A reference on an open file description. A call or a descriptor owns it.
#[derive(Debug)]
pub struct DescriptionRef(u32);

impl DescriptionRef {
    /// Creates a description, and returns its first reference.
    ///
    /// # Errors
    /// ENFILE.
    pub fn new(handle: Handle) -> Result<Self, Errno> {
        let start = HINT.load(Ordering::Relaxed) as usize;
        for step in 0..DESCRIPTIONS {
            let index = (start + step) % DESCRIPTIONS;
            let file = &FILES[index];
            // Acquire pairs with the Release in `drop` that freed the slot.
            let free = file.references.load(Ordering::Relaxed) == 0;
            if free
                && file.references.compare_exchange(0, CLOSING, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                file.handle.store(handle.0, Ordering::Relaxed);
                // Pairs with the Acquire of `of_index`.
                file.references.store(1, Ordering::Release);
                HINT.store((index + 1) as u32, Ordering::Relaxed);
                return Ok(Self(index as u32));
            }
        }
        Err(Errno(libc::ENFILE))
    }

    /// Takes a reference on a description if it is alive.
    #[inline]
    fn of_index(index: u32) -> Option<Self> {
        let references = &FILES[index as usize].references;
        let mut seen = references.load(Ordering::Relaxed);
        loop {
            if seen == 0 || seen == CLOSING {
                return None;
            }
            match ipc::alone::compare_exchange(references, seen, seen + 1) {
                Ok(_) => return Some(Self(index)),
                Err(now) => seen = now,
            }
        }
    }

    /// The mount's handle.
    #[inline]
    pub fn handle(&self) -> Handle {
        Handle(FILES[self.0 as usize].handle.load(Ordering::Relaxed))
    }

    /// Drops the reference of a number that was closed. The process's own locks on the file end with any of its
    /// descriptors; the last reference ends everything anyway.
    pub fn close(self) {
        if FILES[self.0 as usize].references.load(Ordering::Relaxed) > 1
            && let Some(site) = crate::start::site().filter(|_| !crate::dispatch::poisoned())
        {
            site.mount.descriptor_closed(self.handle());
        }
    }

    /// Closes the file after the last reference was dropped.
    #[cold]
    fn end(&self) {
        if let Some(site) = crate::start::site().filter(|_| !crate::dispatch::poisoned()) {
            site.mount.close(self.handle());
        }
        // Pairs with the Acquire of `new`.
        FILES[self.0 as usize].references.store(0, Ordering::Release);
    }

    /// True if both are the same open file description.
    pub fn same(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Clone for DescriptionRef {
    fn clone(&self) -> Self {
        Self::of_index(self.0).expect("a description with a reference is alive")
    }
}

impl Drop for DescriptionRef {
    #[inline]
    fn drop(&mut self) {
        let file = &FILES[self.0 as usize];
        let mut seen = file.references.load(Ordering::Relaxed);
        loop {
            let after = if seen == 1 { CLOSING } else { seen - 1 };
            match ipc::alone::compare_exchange(&file.references, seen, after) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        if seen == 1 {
            self.end();
        }
    }
}

/// The state of a child between vfork and exec: all its descriptors that are ours, and the memory of its exec.
#[derive(Default)]
pub struct Overlay {
    files: Vec<(i32, DescriptionRef)>,
    /// The internal descriptors in the child's table: slots and numbers. It begins as a copy of the parent's table. Later
    /// ones of the parent are not there, and those of the child are not in the parent's table ([`NOT_HERE`]).
    internals: Vec<(u32, i32)>,
    /// Internal descriptors that the child has closed.
    closed: Vec<Internal>,
    /// The descriptions at the start of the child.
    pub given: Vec<DescriptionRef>,
    /// Memory of an exec that succeeded; the parent frees it with the overlay.
    pub exec: Option<crate::exec::Image>,
    /// The owner of the child's own `fcntl` locks, after the first request for one.
    pub locks: Option<ChildLocks>,
    /// The umask that the child has set. The kernel keeps the parent's.
    umask: Option<u32>,
}

impl Overlay {
    /// A copy of the process's current descriptors.
    pub fn snapshot() -> Self {
        let found = ours().into_iter().chain([CWD]).filter_map(|fd| Some((fd, of_number(fd)?)));
        let files: Vec<(i32, DescriptionRef)> = found.collect();
        let given = files.iter().map(|(_, held)| held.clone()).collect();
        let internals = (0..INTERNALS as u32).zip(&INTERNAL);
        let numbers = internals.map(|(slot, number)| (slot, number.load(Ordering::Relaxed) - 1));
        let internals = numbers.filter(|(_, number)| *number >= 0).collect();
        Self { files, internals, closed: Vec::new(), given, exec: None, locks: None, umask: None }
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        self.closed.drain(..).for_each(Internal::close);
    }
}

/// Whether the child has made a connection of the mount's client, which its parent does not have.
pub fn has_connected(overlay: &Overlay) -> bool {
    let is_only_there = |slot: u32| INTERNAL[slot as usize].load(Ordering::Relaxed) == NOT_HERE + 1;
    let is_clients = |slot: u32| CLIENTS.iter().any(|entry| entry.load(Ordering::Relaxed) == slot + 1);
    overlay.internals.iter().any(|(slot, _)| is_only_there(*slot) && is_clients(*slot))
}

/// The calling thread's overlay.
#[inline]
fn overlay() -> Option<&'static mut Overlay> {
    // SAFETY: the parent sets it while it sleeps in vfork; meanwhile only the child, which has one thread, uses it.
    local().borrowed().map(|overlay| unsafe { &mut *overlay })
}

/// The umask that the calling thread has set, if it is a child between vfork and exec.
pub fn own_umask() -> Option<u32> {
    overlay().and_then(|overlay| overlay.umask)
}

/// Notes the umask of a child between vfork and exec; false if the calling thread is none.
pub fn note_own_umask(mask: u32) -> bool {
    overlay().map(|overlay| overlay.umask = Some(mask)).is_some()
}

/// True if the number is ours.
#[inline]
pub fn is_ours(fd: i32) -> bool {
    if let Some(overlay) = overlay() {
        return overlay.files.iter().any(|(number, _)| *number == fd) || internal(fd).is_some();
    }
    let Ok(index) = usize::try_from(fd) else { return false };
    index < NUMBERS && BITMAP[index / 64].load(Ordering::Relaxed) >> (index % 64) & 1 == 1
}

/// True if any number is ours.
pub fn any() -> bool {
    COUNT.load(Ordering::Relaxed) > 0 || overlay().is_some_and(|overlay| !overlay.files.is_empty())
}

#[inline]
fn of_number(fd: i32) -> Option<DescriptionRef> {
    let entry = TABLE.get(usize::try_from(fd).ok()?)?;
    loop {
        // Acquire pairs with the Release of `put`.
        let index = entry.load(Ordering::Acquire).checked_sub(1)?;
        let held = DescriptionRef::of_index(index);
        // Checked again: the number may have been closed and used for another file in between.
        if entry.load(Ordering::Acquire) == index + 1 {
            return held;
        }
    }
}

/// The description that a number stands for.
///
/// # Errors
/// EBADF: the number is not ours, or not any more.
#[inline]
pub fn get(fd: i32) -> Result<DescriptionRef, Errno> {
    let held = match overlay() {
        Some(overlay) => overlay.files.iter().find(|(number, _)| *number == fd).map(|(_, held)| held.clone()),
        None => of_number(fd),
    };
    held.ok_or(Errno(libc::EBADF))
}

/// Makes a number that the kernel has assigned stand for a description; releases its former description.
///
/// # Errors
/// EMFILE if the number is beyond those that can be ours.
pub fn put(fd: i32, held: DescriptionRef) -> Result<(), Errno> {
    if let Some(overlay) = overlay() {
        overlay.files.retain(|(number, _)| *number != fd);
        overlay.files.push((fd, held));
        return Ok(());
    }
    let index = usize::try_from(fd).ok().filter(|index| *index < NUMBERS).ok_or(Errno(libc::EMFILE))?;
    let description = held.0 + 1;
    std::mem::forget(held);
    real::forget(fd);
    // Pairs with the Acquire of `of_number`.
    let before = TABLE[index].swap(description, Ordering::AcqRel);
    mark(fd, true);
    match before {
        0 => {
            COUNT.fetch_add(1, Ordering::Relaxed);
        }
        // The working directory is not a descriptor, so no locks end with it.
        other if fd == CWD => drop(DescriptionRef(other - 1)),
        other => DescriptionRef(other - 1).close(),
    }
    Ok(())
}

/// Makes a number not ours; returns its description if it had one.
pub fn take(fd: i32) -> Option<DescriptionRef> {
    if let Some(overlay) = overlay() {
        let at = overlay.files.iter().position(|(number, _)| *number == fd)?;
        return Some(overlay.files.swap_remove(at).1);
    }
    let index = usize::try_from(fd).ok().filter(|index| *index < NUMBERS)?;
    let before = TABLE[index].swap(0, Ordering::AcqRel);
    if before == 0 {
        return None;
    }
    real::forget(fd);
    mark(fd, false);
    COUNT.fetch_sub(1, Ordering::Relaxed);
    Some(DescriptionRef(before - 1))
}

/// All descriptors that are ours, lowest first.
pub fn ours() -> Vec<i32> {
    if let Some(overlay) = overlay() {
        let numbers = overlay.files.iter().map(|(number, _)| *number);
        let mut numbers: Vec<i32> = numbers.filter(|number| *number != CWD).collect();
        numbers.sort_unstable();
        return numbers;
    }
    let mut numbers = Vec::new();
    let mut left = COUNT.load(Ordering::Relaxed);
    for (index, word) in BITMAP.iter().enumerate() {
        if left == 0 {
            break;
        }
        let mut bits = word.load(Ordering::Relaxed);
        while bits != 0 {
            let number = (index * 64 + bits.trailing_zeros() as usize) as i32;
            bits &= bits - 1;
            if TABLE[number as usize].load(Ordering::Relaxed) != 0 {
                left = left.saturating_sub(1);
                if number != CWD {
                    numbers.push(number);
                }
            }
        }
    }
    numbers
}

/// The descriptor of which placeholders are duplicates: a folder in which no file can be created. Another process that
/// opens a placeholder without the library (`/proc/PID/fd/N`) can neither read nor write there, and gets an error.
fn base() -> Result<i32, Errno> {
    if let Some(slot) = BASE.load(Ordering::Acquire).checked_sub(1) {
        return Ok(Internal(slot).number());
    }
    // That of a child between vfork and exec would be unknown to its parent.
    if overlay().is_some() {
        return Err(Errno(libc::EMFILE));
    }
    let open = |path| raw::open_at(libc::AT_FDCWD, path, libc::O_PATH | libc::O_CLOEXEC, 0);
    let opened = || open(c"/proc/self/fdinfo").or_else(|_| open(c"/dev/null")).or_else(|_| open(c"/"));
    let kept = limits::with_room(|_| Internal::keep(opened()?))?;
    match BASE.compare_exchange(0, kept.0 + 1, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(kept.number()),
        Err(other) => {
            kept.close();
            Ok(Internal(other - 1).number())
        }
    }
}

/// Makes what a child between vfork and exec needs to open files, before the child exists. If that fails, its calls
/// report that there are too many descriptors.
pub fn prepare_for_child() {
    let _ = base();
}

/// Makes a number a placeholder again, after a failed exec.
pub fn replace(fd: i32) {
    if let Ok(base) = base() {
        // SAFETY: takes no memory; the number is one of ours.
        let _ = unsafe { raw::try_call(libc::SYS_dup3, &[raw::number(base), raw::number(fd), 0]) };
    }
    if real::is_on() {
        real::make(fd);
    }
}

/// Creates a kernel descriptor that only occupies a number.
///
/// # Errors
/// EMFILE.
pub fn placeholder(close_on_exec: bool) -> Result<i32, Errno> {
    let base = base()?;
    let command = if close_on_exec { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD };
    Ok(raw::fcntl(base, command, 0)? as i32)
}

/// Gives a description its first number.
///
/// # Errors
/// EMFILE.
pub fn install(held: DescriptionRef, close_on_exec: bool) -> Result<i32, Errno> {
    let fd = placeholder(close_on_exec)?;
    let put = if fd == CWD { Err(Errno(libc::EMFILE)) } else { put(fd, held) };
    put.inspect_err(|_| raw::close(fd))?;
    Ok(fd)
}
