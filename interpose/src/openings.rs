//! What processes share of an open file after fork and exec: offset, flags, and who uses the offset now.
//!
//! It lies in a memfd that a family of processes maps: a child has the mapping from its parent, the next program
//! after exec is given the memfd. A place is given away again only by a process that never forked while it had it,
//! and never passed it on by exec: otherwise nobody knows who is the last. There are 65,536 places; who finds none
//! left has an open file whose offset is not shared after a fork.
//!
//! **Lock.** The offset's word holds the process that uses it. If that process dies, whoever waits takes the word
//! over; the offset is then what it was before, or what the dead process made of it last.

use crate::descriptors::{Internal, move_up};
use crate::mount::Errno;
use crate::raw;
use ipc::{Host, SystemHost, WAKE_ALL, Word};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use vfs::file::OpenState;

/// Places of a family.
const PLACES: usize = 1 << 16;
/// Somebody sleeps until the word is free. Above every process number.
const WAITED_FOR: u32 = 1 << 31;
/// A waiter looks this often whether the process that it waits for is alive.
const LOOK: Duration = Duration::from_millis(20);

/// One open file description.
#[repr(C)]
struct Opening {
    taken: AtomicU32,
    flags: AtomicI32,
    offset: AtomicU64,
    /// The process that uses the offset, 0 for none; with [`WAITED_FOR`] if somebody waits.
    user: Word,
    passed_on: AtomicBool,
    filling: [u8; 3],
    /// In the last place, which no open file takes: what tells the family's locks from those of others.
    family: AtomicU64,
}

const _: () = assert!(size_of::<Opening>() == 32);

/// The family's table in this process: never unmapped.
static TABLE: AtomicPtr<Opening> = AtomicPtr::new(std::ptr::null_mut());
/// Slot of the memfd among the internal descriptors, plus one.
static MEMFD: AtomicU32 = AtomicU32::new(0);
/// Where the search for a free place begins.
static NEXT: AtomicU32 = AtomicU32::new(0);
/// This process has made another one that has all its places too.
static FORKED: AtomicBool = AtomicBool::new(false);

/// This process, once it was asked for.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// From now on another process has this one's places.
pub fn note_fork() {
    FORKED.store(true, Ordering::Relaxed);
}

/// This process is such another one.
pub fn note_child() {
    note_fork();
    PROCESS.store(0, Ordering::Relaxed);
}

fn process() -> u32 {
    let known = PROCESS.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let process = raw::process().unsigned_abs();
    PROCESS.store(process, Ordering::Relaxed);
    process
}

/// The state of an open file description, for as long as any process has it open.
#[derive(Clone, Copy, Debug)]
pub struct Place(u32);

impl Place {
    /// Takes a free place; none if the table cannot be had or is full.
    pub fn take() -> Option<Self> {
        let table = table()?;
        let start = NEXT.fetch_add(1, Ordering::Relaxed) as usize;
        (0..PLACES - 1).map(|step| (start + step) % (PLACES - 1)).find_map(|index| {
            let place = &table[index];
            // Acquire pairs with the Release of `give_back`.
            place.taken.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).ok()?;
            place.offset.store(0, Ordering::Relaxed);
            place.flags.store(0, Ordering::Relaxed);
            place.passed_on.store(false, Ordering::Relaxed);
            Some(Self(index as u32))
        })
    }

    /// Gives it back, if nobody else can have it.
    pub fn give_back(self) {
        if !FORKED.load(Ordering::Relaxed) && !self.opening().passed_on.load(Ordering::Relaxed) {
            // Release pairs with the Acquire of `take`.
            self.opening().taken.store(0, Ordering::Release);
        }
    }

    /// Its number, and a descriptor of the table for the next program: inherited by exec, to be closed there.
    ///
    /// # Errors
    /// EMFILE.
    pub fn pass_on(self) -> Result<(u32, i32), Errno> {
        self.opening().passed_on.store(true, Ordering::Relaxed);
        let memfd = Internal::from_slot(MEMFD.load(Ordering::Acquire) - 1);
        Ok((self.0, move_up(memfd.number(), false)?))
    }

    /// The other side of it. Takes the descriptor.
    pub fn adopt(number: u32, memfd: i32) -> Option<Self> {
        if TABLE.load(Ordering::Acquire).is_null() {
            install(memfd)?;
        } else {
            raw::close(memfd);
        }
        let place = ((number as usize) < PLACES).then_some(Self(number))?;
        place.opening().passed_on.store(true, Ordering::Relaxed);
        Some(place)
    }

    /// A number for the locks of this description, the same in all processes of the family.
    pub fn owner(self) -> u64 {
        (family() << 16) | u64::from(self.0)
    }

    #[inline]
    fn opening(self) -> &'static Opening {
        &table().expect("a place was taken from the table")[self.0 as usize]
    }
}

impl OpenState for Place {
    fn with_offset(&self, change: &mut dyn FnMut(&mut u64)) {
        let opening = self.opening();
        let mut mark = 0;
        loop {
            // Acquire pairs with the Release below: the offset is what the last user left.
            match opening.user.compare_exchange(0, process() | mark, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                Err(other) => mark = wait_for(opening, other),
            }
        }
        let mut offset = opening.offset.load(Ordering::Relaxed);
        change(&mut offset);
        opening.offset.store(offset, Ordering::Relaxed);
        if opening.user.swap(0, Ordering::Release) & WAITED_FOR != 0 {
            SystemHost.wake(&opening.user, WAKE_ALL);
        }
    }

    fn flags(&self) -> i32 {
        self.opening().flags.load(Ordering::Relaxed)
    }

    fn set_flags(&self, flags: i32) {
        self.opening().flags.store(flags, Ordering::Relaxed);
    }
}

/// Waits until the word is another, or takes it from a dead process. Whoever waited takes the word with the mark,
/// because others may sleep behind it.
fn wait_for(opening: &Opening, user: u32) -> u32 {
    let waited = user | WAITED_FOR;
    let marked = user == waited
        || opening.user.compare_exchange(user, waited, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    if marked {
        let until = SystemHost.now().after(LOOK);
        SystemHost.wait(&opening.user, waited, Some(until));
        if has_ended(user & !WAITED_FOR) {
            let _ = opening.user.compare_exchange(waited, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
    WAITED_FOR
}

/// Whether a process uses nothing any more: it is gone, or only waits to be reaped, perhaps by this very one.
fn has_ended(user: u32) -> bool {
    // SAFETY: signal 0 is sent to nobody; the kernel only looks.
    let found = unsafe { raw::try_call(libc::SYS_kill, &[u64::from(user), 0]) };
    // Without /proc nobody seems to have started, this process included.
    found == Err(Errno(libc::ESRCH))
        || (SystemHost.started(user).is_none() && SystemHost.started(process()).is_some())
}

/// The family's number.
fn family() -> u64 {
    let Some(table) = table() else { return 0 };
    let fresh = SystemHost.random() >> 16;
    match table[PLACES - 1].family.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => fresh,
        Err(known) => known,
    }
}

#[inline]
fn table() -> Option<&'static [Opening]> {
    let mut start = TABLE.load(Ordering::Acquire);
    if start.is_null() {
        make()?;
        start = TABLE.load(Ordering::Acquire);
    }
    // SAFETY: mapped for `PLACES` openings, never unmapped; made of atomics, so shared writing is defined.
    Some(unsafe { std::slice::from_raw_parts(NonNull::new(start)?.as_ptr(), PLACES) })
}

/// Makes a family's table.
#[cold]
fn make() -> Option<()> {
    // SAFETY: a name, and no memory of ours is written.
    let memfd = unsafe {
        raw::try_call(libc::SYS_memfd_create, &[c"hearth-openings".as_ptr() as u64, libc::MFD_CLOEXEC as u64])
    };
    install(memfd.ok()? as i32)
}

/// Maps a memfd as this process's table and keeps it; closes it if another thread was faster.
fn install(memfd: i32) -> Option<()> {
    let bytes = PLACES * size_of::<Opening>();
    // SAFETY: the descriptor is ours; the new mapping touches no other memory.
    let mapped = unsafe {
        raw::try_call(libc::SYS_ftruncate, &[raw::number(memfd), bytes as u64]).ok()?;
        let rights = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        raw::try_call(
            libc::SYS_mmap,
            &[0, bytes as u64, rights, libc::MAP_SHARED as u64, raw::number(memfd), 0],
        )
        .ok()?
    };
    let start = mapped as *mut Opening;
    if TABLE.compare_exchange(std::ptr::null_mut(), start, Ordering::AcqRel, Ordering::Acquire).is_err() {
        raw::close(memfd);
        // SAFETY: mapped just now, and known to nobody.
        unsafe { raw::try_call(libc::SYS_munmap, &[mapped, bytes as u64]).ok()? };
        return Some(());
    }
    let kept = Internal::keep(memfd).ok()?;
    MEMFD.store(kept.slot() + 1, Ordering::Release);
    Some(())
}
