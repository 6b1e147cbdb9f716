//! A sheet of places: a memfd and its mapping in this process.
//!
//! It is as large as the process's limit on files allows (whole pages); where that allows none it is memory that a child
//! shares and the next program after an exec does not. Who calls here has the turn.

use super::{CURRENT, MINE, Opening, PLACES, TABLE, lock, unlock};
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
const BYTES_MAX: u64 = (PLACES * size_of::<Opening>()) as u64;

/// Who the processes are that share the sheets; none before the first one.
static SHARED_BY: AtomicPtr<Users> = AtomicPtr::new(std::ptr::null_mut());

/// A sheet as one process has it.
pub(super) struct Sheet {
    /// None if there is no such sheet. It is set last, and unset first.
    start: AtomicPtr<Opening>,
    bytes: AtomicU64,
    /// Slot of the memfd among the internal descriptors, plus one.
    kept: AtomicU32,
    /// The number of a memfd that only a child on borrowed memory has, plus one.
    borrowed: AtomicI32,
    /// What tells the memfd from others; 0 for memory without one.
    inode: AtomicU64,
    /// How many of its places the process has.
    pub held: AtomicU32,
    /// Where the search for a free place begins.
    pub next: AtomicU32,
}

impl Sheet {
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

    /// Its places.
    #[inline]
    pub fn places(&self) -> &'static [Opening] {
        let start = NonNull::new(self.start.load(Ordering::Acquire)).expect("a place is in a sheet");
        let count = self.bytes.load(Ordering::Relaxed) as usize / size_of::<Opening>();
        // SAFETY: mapped for so many openings, and unmapped only when the process has no place in it; made of atomics,
        // so shared writing is defined.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), count) }
    }

    /// Its memfd, for a call made at once.
    pub fn memfd(&self) -> Option<i32> {
        let kept = self.kept.load(Ordering::Relaxed).checked_sub(1);
        let kept = kept.map(|slot| Internal::from_slot(slot).number());
        kept.or(self.borrowed.load(Ordering::Relaxed).checked_sub(1).filter(|fd| *fd >= 0))
    }

    /// The process has no file in it: it goes.
    pub fn end(&self) {
        let start = self.start.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if let Some(slot) = self.kept.swap(0, Ordering::Relaxed).checked_sub(1) {
            Internal::from_slot(slot).close();
        }
        self.borrowed.store(0, Ordering::Relaxed);
        self.inode.store(0, Ordering::Relaxed);
        // SAFETY: the sheet's own mapping, in which no place is used any more.
        let _ =
            unsafe { raw::try_call(libc::SYS_munmap, &[start as u64, self.bytes.load(Ordering::Relaxed)]) };
    }

    /// Puts a copy with the process's places where the sheet is. Whoever uses one meanwhile is waited for, so that threads of
    /// this process see one sheet or the other.
    fn replace(&self, number: usize) {
        let (start, bytes) = (self.start.load(Ordering::Relaxed) as u64, self.bytes.load(Ordering::Relaxed));
        let (mut memfd, mut copied) = fresh(bytes);
        if copied != bytes {
            // The limit on files is lower by now.
            memfd.take().into_iter().for_each(raw::close);
            copied = bytes;
        }
        let fresh = map(memfd, copied).expect("there is memory for what a process has open");
        let moves = libc::MREMAP_MAYMOVE as u64;
        // SAFETY: a second mapping of the sheet, which touches no other memory.
        let before = unsafe { raw::try_call(libc::SYS_mremap, &[start, 0, bytes, moves]) };
        let before = before.expect("there is room for what a process has open");
        let (from, to) = (openings_at(before, bytes), openings_at(fresh, bytes));
        let mine = |index: &usize| MINE[number * PLACES + index].load(Ordering::Relaxed) != 0;
        let places: Vec<usize> = (1..from.len()).filter(mine).collect();
        for index in &places {
            lock(&from[*index]);
            copy(from, to, *index);
        }
        let moves = moves | libc::MREMAP_FIXED as u64;
        // SAFETY: both are mappings of ours of the same size. Whoever uses the old one has a place in it, whose word is held.
        let moved = unsafe { raw::try_call(libc::SYS_mremap, &[fresh, bytes, bytes, moves, start]) };
        places.iter().for_each(|index| unlock(&from[*index]));
        unmap(before, bytes);
        moved.expect("a mapping takes another one's place");
        if let Some(slot) = self.kept.swap(0, Ordering::Relaxed).checked_sub(1) {
            Internal::from_slot(slot).close();
        }
        // Without a number for it a child shares it, and an exec is refused.
        let _ = self.keep(memfd);
    }

    /// Keeps a memfd of its own. In a child on borrowed memory, whose descriptors the parent has not, as long as it lives.
    fn keep(&self, memfd: Option<i32>) -> Result<(), Errno> {
        self.inode.store(memfd.map_or(0, inode_of), Ordering::Relaxed);
        match memfd {
            Some(memfd) if local().borrowed().is_some() => self.borrowed.store(memfd + 1, Ordering::Relaxed),
            Some(memfd) => self.kept.store(Internal::keep(memfd)?.slot() + 1, Ordering::Relaxed),
            None => {}
        }
        Ok(())
    }
}

/// Takes over the sheet of a memfd, and the descriptor: its number in this process.
pub(super) fn adopt(memfd: i32) -> Option<usize> {
    let inode = inode_of(memfd);
    let known = |sheet: &Sheet| {
        !sheet.start.load(Ordering::Relaxed).is_null() && sheet.inode.load(Ordering::Relaxed) == inode
    };
    if let Some(found) = TABLE.iter().position(known) {
        raw::close(memfd);
        return Some(found);
    }
    let bytes = status(memfd).map_or(0, |status| status.st_size as u64).min(BYTES_MAX) & !(PAGE - 1);
    if bytes == 0 {
        raw::close(memfd);
        return None;
    }
    let adopted = install(Some(memfd), bytes).ok()?;
    note_users();
    Some(adopted)
}

/// Makes a sheet: its number.
#[cold]
pub(super) fn make() -> Result<usize, Errno> {
    let (memfd, bytes) = fresh(BYTES_MAX);
    let made = install(memfd, bytes)?;
    note_users();
    TABLE[made].places()[0].sheet.store(SystemHost.random() >> 16, Ordering::Relaxed);
    Ok(made)
}

/// A memfd as large as is wanted, or as the limits allow; and how large it is.
fn fresh(wanted: u64) -> (Option<i32>, u64) {
    // What is longer than the limit costs the program a signal that ends it.
    let bytes = limits::of(libc::RLIMIT_FSIZE).map_or(wanted, |limit| limit[0].min(wanted) & !(PAGE - 1));
    if bytes == 0 {
        return (None, wanted);
    }
    let arguments = [c"hearth-openings".as_ptr() as u64, libc::MFD_CLOEXEC as u64];
    // SAFETY: a name, and no memory of ours is written.
    let Ok(memfd) = limits::with_room(|_| unsafe { raw::try_call(libc::SYS_memfd_create, &arguments) })
    else {
        return (None, wanted);
    };
    let memfd = memfd as i32;
    // SAFETY: the descriptor is ours.
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

/// Maps a memfd as one more sheet. Takes the descriptor.
fn install(memfd: Option<i32>, bytes: u64) -> Result<usize, Errno> {
    let free = |(index, sheet): &(usize, &Sheet)| {
        sheet.start.load(Ordering::Relaxed).is_null() && CURRENT.load(Ordering::Relaxed) != *index as u32 + 1
    };
    let Some((number, sheet)) = TABLE.iter().enumerate().find(free) else {
        memfd.into_iter().for_each(raw::close);
        return Err(Errno(libc::EMFILE));
    };
    let start = map(memfd, bytes).map_err(|_| {
        memfd.into_iter().for_each(raw::close);
        Errno(libc::EMFILE)
    })?;
    sheet.keep(memfd).inspect_err(|_| {
        unmap(start, bytes);
    })?;
    sheet.bytes.store(bytes, Ordering::Relaxed);
    sheet.held.store(0, Ordering::Relaxed);
    sheet.next.store(0, Ordering::Relaxed);
    sheet.start.store(start as *mut Opening, Ordering::Release);
    Ok(number)
}

/// Who shares the sheets, from the first one on.
fn note_users() {
    if SHARED_BY.load(Ordering::Relaxed).is_null() {
        set_users(Users::now());
    }
}

fn set_users(users: Users) {
    // A few bytes, for each time that the process becomes somebody else for good; a fork may leave them to a child.
    SHARED_BY.store(Box::into_raw(Box::new(users)), Ordering::Release);
}

/// Whether these may not share the process's sheets with those that it has them from and gave them to.
pub(super) fn is_somebody_else(now: Users) -> bool {
    // SAFETY: never freed. Acquire pairs with the Release of `set_users`.
    let users = unsafe { SHARED_BY.load(Ordering::Acquire).as_ref() };
    users.is_some_and(|users| !users.may_share_with(now))
}

/// Goes on with sheets of its own, where the process's places are as they were. Nothing more is taken from these: a
/// number is no other description's that has it elsewhere.
pub(super) fn leave(users: Users) {
    CURRENT.store(0, Ordering::Relaxed);
    for (number, sheet) in TABLE.iter().enumerate() {
        if sheet.start.load(Ordering::Relaxed).is_null() {
            continue;
        }
        if sheet.held.load(Ordering::Relaxed) == 0 {
            sheet.end();
        } else {
            sheet.replace(number);
        }
    }
    set_users(users);
}

/// A copy of a sheet, with one place alone, for the next program after an exec: its descriptor.
pub(super) fn copy_of_one(sheet: &Sheet, index: usize) -> Result<i32, Errno> {
    let (memfd, bytes) = fresh(sheet.bytes.load(Ordering::Relaxed));
    let memfd = memfd.ok_or(Errno(libc::EMFILE))?;
    let copied = map(Some(memfd), bytes).map(|start| {
        let (from, to) = (sheet.places(), openings_at(start, bytes));
        lock(&from[index]);
        copy(from, to, index);
        unlock(&from[index]);
        unmap(start, bytes);
    });
    let passed = copied.and_then(|()| move_up(memfd, false));
    raw::close(memfd);
    passed
}

/// Copies what a place is, and the sheet's number.
fn copy(from: &[Opening], to: &[Opening], index: usize) {
    to[0].sheet.store(from[0].sheet.load(Ordering::Relaxed), Ordering::Relaxed);
    to[index].taken.store(1, Ordering::Relaxed);
    to[index].flags.store(from[index].flags.load(Ordering::Relaxed), Ordering::Relaxed);
    to[index].offset.store(from[index].offset.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// A mapping of ours as openings.
fn openings_at(start: u64, bytes: u64) -> &'static [Opening] {
    // SAFETY: whoever calls mapped it, and uses it no more once it is unmapped.
    unsafe { std::slice::from_raw_parts(start as *const Opening, bytes as usize / size_of::<Opening>()) }
}

fn unmap(start: u64, bytes: u64) {
    // SAFETY: a mapping of ours, in which nothing is used any more.
    let _ = unsafe { raw::try_call(libc::SYS_munmap, &[start, bytes]) };
}

fn inode_of(fd: i32) -> u64 {
    status(fd).map_or(0, |status| status.st_ino)
}
