//! A table of slots: a memfd and its mapping in this process.
//!
//! It is as large as the process's limit on file sizes allows (whole pages). If that allows no page, the table is
//! anonymous memory, which a child shares but the next program after an exec does not. Callers of this module hold
//! [`LOCK`](super::LOCK).

use super::{CURRENT, SLOTS_MAX, SlotData, TABLES, TAKEN_AT, lock, unlock};
use crate::descriptors::{Internal, move_up};
use crate::identity::{Users, status};
use crate::limits;
use crate::local::local;
use crate::mount::Errno;
use crate::raw;
use ipc::{Host, SystemHost};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

const PAGE: u64 = 4096;
const BYTES_MAX: u64 = (SLOTS_MAX * size_of::<SlotData>()) as u64;

/// The users of the processes that share the tables; null before the first table.
static SHARED_BY: AtomicPtr<Users> = AtomicPtr::new(std::ptr::null_mut());

/// A table in one process.
pub(super) struct SlotTable {
    /// Null if there is no such table. It is set last, and cleared first.
    start: AtomicPtr<SlotData>,
    bytes: AtomicU64,
    /// Slot of its memfd among the internal descriptors, plus one.
    kept: AtomicU32,
    /// The number of a memfd that only a child in borrowed memory has, plus one.
    borrowed: AtomicI32,
    /// The inode of the memfd, which identifies it; 0 for memory without one.
    inode: AtomicU64,
    /// Number of its slots that the process has.
    pub held: AtomicU32,
    /// The slot at which the search for a free one begins.
    pub next: AtomicU32,
}

impl SlotTable {
    pub const fn none() -> Self {
        Self {
            start: AtomicPtr::new(std::ptr::null_mut()),
            bytes: AtomicU64::new(0),
            kept: AtomicU32::new(0),
            borrowed: AtomicI32::new(0),
            inode: AtomicU64::new(0),
            held: AtomicU32::new(0),
            next: AtomicU32::new(0),
        }
    }

    /// Its slots.
    #[inline]
    pub fn slots(&self) -> &'static [SlotData] {
        let start = NonNull::new(self.start.load(Ordering::Acquire)).expect("a slot is in a table");
        let count = self.bytes.load(Ordering::Relaxed) as usize / size_of::<SlotData>();
        // SAFETY: mapped for this number of slots, and unmapped only when the process has no slot in it. A slot
        // consists of atomics, so shared writing is defined.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), count) }
    }

    /// Its memfd, for a call that follows at once.
    pub fn memfd(&self) -> Option<i32> {
        let kept = self.kept.load(Ordering::Relaxed).checked_sub(1);
        let kept = kept.map(|slot| Internal::from_slot(slot).number());
        kept.or(self.borrowed.load(Ordering::Relaxed).checked_sub(1).filter(|fd| *fd >= 0))
    }

    /// Removes the table, in which the process has no file any more.
    pub fn end(&self) {
        let start = self.start.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if let Some(slot) = self.kept.swap(0, Ordering::Relaxed).checked_sub(1) {
            Internal::from_slot(slot).close();
        }
        self.borrowed.store(0, Ordering::Relaxed);
        self.inode.store(0, Ordering::Relaxed);
        // SAFETY: the table's own mapping, in which no slot is used any more.
        let _ =
            unsafe { raw::try_call(libc::SYS_munmap, &[start as u64, self.bytes.load(Ordering::Relaxed)]) };
    }

    /// Replaces the table by a copy with the process's slots. Holds the words of these slots meanwhile, so that each
    /// thread of this process sees either the old or the new table.
    fn replace(&self, number: usize) {
        let (start, bytes) = (self.start.load(Ordering::Relaxed) as u64, self.bytes.load(Ordering::Relaxed));
        let (mut memfd, mut copied) = fresh(bytes);
        if copied != bytes {
            // The limit on file sizes is lower by now.
            memfd.take().into_iter().for_each(raw::close);
            copied = bytes;
        }
        let fresh = map(memfd, copied).expect("there is memory for what a process has open");
        let moves = libc::MREMAP_MAYMOVE as u64;
        // SAFETY: a second mapping of the table, which touches no other memory.
        let before = unsafe { raw::try_call(libc::SYS_mremap, &[start, 0, bytes, moves]) };
        let before = before.expect("there is room for what a process has open");
        let (from, to) = (slots_at(before, bytes), slots_at(fresh, bytes));
        let mine = |index: &usize| TAKEN_AT[number * SLOTS_MAX + index].load(Ordering::Relaxed) != 0;
        let slots: Vec<usize> = (1..from.len()).filter(mine).collect();
        for index in &slots {
            lock(&from[*index]);
            copy(from, to, *index);
        }
        let moves = moves | libc::MREMAP_FIXED as u64;
        // SAFETY: both are mappings of the library, of the same size. A thread that uses the old one has a slot in it,
        // whose word is held here.
        let moved = unsafe { raw::try_call(libc::SYS_mremap, &[fresh, bytes, bytes, moves, start]) };
        slots.iter().for_each(|index| unlock(&from[*index]));
        unmap(before, bytes);
        moved.expect("a mapping takes another one's slot");
        if let Some(slot) = self.kept.swap(0, Ordering::Relaxed).checked_sub(1) {
            Internal::from_slot(slot).close();
        }
        // Without a descriptor, children share the table, and an exec is refused.
        let _ = self.keep(memfd);
    }

    /// Keeps the memfd. In a child in borrowed memory it is not an internal descriptor, because the parent's table of
    /// descriptors does not have it.
    fn keep(&self, memfd: Option<i32>) -> Result<(), Errno> {
        self.inode.store(memfd.map_or(0, inode_of), Ordering::Relaxed);
        match memfd {
            Some(memfd) if local().borrowed().is_some() => {
                let moved = move_up(memfd, true);
                raw::close(memfd);
                self.borrowed.store(moved? + 1, Ordering::Relaxed);
            }
            Some(memfd) => self.kept.store(Internal::keep(memfd)?.slot() + 1, Ordering::Relaxed),
            None => {}
        }
        Ok(())
    }
}

/// Takes over the table of a memfd; returns the table's number in this process.
pub(super) fn adopt(memfd: i32) -> Option<usize> {
    let inode = inode_of(memfd);
    let known = |table: &SlotTable| {
        !table.start.load(Ordering::Relaxed).is_null() && table.inode.load(Ordering::Relaxed) == inode
    };
    if let Some(found) = TABLES.iter().position(known) {
        return Some(found);
    }
    let bytes = status(memfd).map_or(0, |status| status.st_size as u64).min(BYTES_MAX) & !(PAGE - 1);
    if bytes == 0 {
        return None;
    }
    let adopted = install(Some(move_up(memfd, true).ok()?), bytes).ok()?;
    note_users();
    Some(adopted)
}

/// Creates a table, and returns its number.
#[cold]
pub(super) fn make() -> Result<usize, Errno> {
    let (memfd, bytes) = fresh(BYTES_MAX);
    let made = install(memfd, bytes)?;
    note_users();
    TABLES[made].slots()[0].table.store(SystemHost.random() >> 16, Ordering::Relaxed);
    Ok(made)
}

/// A memfd of the wanted size, or of the size that the limits allow; and its size.
fn fresh(wanted: u64) -> (Option<i32>, u64) {
    // Extending the file beyond the limit would send a signal that ends the program.
    let bytes = limits::of(libc::RLIMIT_FSIZE).map_or(wanted, |limit| limit[0].min(wanted) & !(PAGE - 1));
    if bytes == 0 {
        return (None, wanted);
    }
    let arguments = [c"hearth-openings".as_ptr() as u64, libc::MFD_CLOEXEC as u64];
    // SAFETY: the argument is a string, and the call writes no memory.
    let Ok(memfd) = limits::with_room(|_| unsafe { raw::try_call(libc::SYS_memfd_create, &arguments) })
    else {
        return (None, wanted);
    };
    let memfd = memfd as i32;
    // SAFETY: the descriptor was created just now.
    match unsafe { raw::try_call(libc::SYS_ftruncate, &[raw::number(memfd), bytes]) } {
        Ok(_) => (Some(memfd), bytes),
        Err(_) => {
            raw::close(memfd);
            (None, wanted)
        }
    }
}

fn map(memfd: Option<i32>, bytes: u64) -> Result<u64, Errno> {
    let rights = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let anonymous = if memfd.is_none() { libc::MAP_ANONYMOUS } else { 0 };
    let flags = (libc::MAP_SHARED | anonymous) as u64;
    let memfd = memfd.map_or(u64::MAX, raw::number);
    // SAFETY: the new mapping touches no other memory.
    unsafe { raw::try_call(libc::SYS_mmap, &[0, bytes, rights, flags, memfd, 0]) }
}

/// Maps a memfd as one more table, and takes over the descriptor.
fn install(memfd: Option<i32>, bytes: u64) -> Result<usize, Errno> {
    let free = |(index, table): &(usize, &SlotTable)| {
        table.start.load(Ordering::Relaxed).is_null() && CURRENT.load(Ordering::Relaxed) != *index as u32 + 1
    };
    let Some((number, table)) = TABLES.iter().enumerate().find(free) else {
        memfd.into_iter().for_each(raw::close);
        return Err(Errno(libc::EMFILE));
    };
    // Without memory ENOMEM, which an open may give: a program that closed files for EMFILE would not be helped.
    let start = map(memfd, bytes).inspect_err(|_| memfd.into_iter().for_each(raw::close))?;
    table.keep(memfd).inspect_err(|_| {
        unmap(start, bytes);
    })?;
    table.bytes.store(bytes, Ordering::Relaxed);
    table.held.store(0, Ordering::Relaxed);
    table.next.store(0, Ordering::Relaxed);
    table.start.store(start as *mut SlotData, Ordering::Release);
    Ok(number)
}

/// Notes the users that share the tables, when the first table appears.
fn note_users() {
    if SHARED_BY.load(Ordering::Relaxed).is_null() {
        set_users(Users::now());
    }
}

fn set_users(users: Users) {
    // Leaks a few bytes each time the process changes its user for good; after a fork, a child may still use them.
    SHARED_BY.store(Box::into_raw(Box::new(users)), Ordering::Release);
}

/// Whether these users may not share the tables with the current ones.
pub(super) fn is_somebody_else(now: Users) -> bool {
    // SAFETY: never freed. Acquire pairs with the Release of `set_users`.
    let users = unsafe { SHARED_BY.load(Ordering::Acquire).as_ref() };
    users.is_some_and(|users| !users.may_share_with(now))
}

/// Continues with copies of the tables in which the process has slots. No slot is taken in them any more: another
/// process may take the same slot in the original.
pub(super) fn leave(users: Users) {
    CURRENT.store(0, Ordering::Relaxed);
    for (number, table) in TABLES.iter().enumerate() {
        if table.start.load(Ordering::Relaxed).is_null() {
            continue;
        }
        if table.held.load(Ordering::Relaxed) == 0 {
            table.end();
        } else {
            table.replace(number);
        }
    }
    set_users(users);
}

/// A copy of a table with one slot only, for the next program after an exec: its descriptor.
pub(super) fn copy_of_one(table: &SlotTable, index: usize) -> Result<i32, Errno> {
    let (memfd, bytes) = fresh(table.bytes.load(Ordering::Relaxed));
    let memfd = memfd.ok_or(Errno(libc::EMFILE))?;
    let copied = map(Some(memfd), bytes).map(|start| {
        let (from, to) = (table.slots(), slots_at(start, bytes));
        lock(&from[index]);
        copy(from, to, index);
        unlock(&from[index]);
        unmap(start, bytes);
    });
    let passed = copied.and_then(|()| move_up(memfd, false));
    raw::close(memfd);
    passed
}

/// Copies a slot, and the table's number for locks.
fn copy(from: &[SlotData], to: &[SlotData], index: usize) {
    to[0].table.store(from[0].table.load(Ordering::Relaxed), Ordering::Relaxed);
    to[index].taken.store(1, Ordering::Relaxed);
    to[index].flags.store(from[index].flags.load(Ordering::Relaxed), Ordering::Relaxed);
    to[index].offset.store(from[index].offset.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// A mapping of the library as slots.
fn slots_at(start: u64, bytes: u64) -> &'static [SlotData] {
    // SAFETY: the caller has mapped it, and does not use it after it is unmapped.
    unsafe { std::slice::from_raw_parts(start as *const SlotData, bytes as usize / size_of::<SlotData>()) }
}

fn unmap(start: u64, bytes: u64) {
    // SAFETY: a mapping of the library, in which no slot is used any more.
    let _ = unsafe { raw::try_call(libc::SYS_munmap, &[start, bytes]) };
}

fn inode_of(fd: i32) -> u64 {
    status(fd).map_or(0, |status| status.st_ino)
}
