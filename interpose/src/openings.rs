//! What processes share of an open file after fork and exec: offset, flags, and who uses the offset now.
//!
//! It lies in places of *sheets*, memfds that the processes which share a file map: a child has the mapping from its
//! parent, the next program after exec is given the memfds of the files that stay open. A place is given away again
//! only by the process that took it and has not forked or passed it on since: otherwise nobody knows who is the last. Nor
//! does anybody where forks may come by nobody.
//! A sheet that has none left is followed by another, and goes with the last process that has a file in it. So what
//! was killed leaves nothing behind for good, and there are always places as long as there is memory. No two users share
//! a sheet: a process that becomes another one takes copies.
//!
//! **Locks.** [`TURN`] is held where places are taken and given back and sheets come and go. The offset's word in a place
//! holds the process that uses it; it comes after the turn. If that process dies, whoever waits takes the word over; the
//! offset is then what it was before, or what the dead process made of it last.

use crate::descriptors::move_up;
use crate::identity::Users;
use crate::local::local;
use crate::mount::Errno;
use crate::raw;
use ipc::{Host, SystemHost, WAKE_ALL, Word};
use sheet::Sheet;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use vfs::file::OpenState;

mod sheet;

/// Most places of a sheet. The first one is no file's.
const PLACES: usize = 1024;
/// Most sheets of a process.
const SHEETS: usize = 1024;
/// Somebody sleeps until the word is free. Above every process number.
const WAITED_FOR: u32 = 1 << 31;
/// A waiter looks this often whether the process that it waits for is alive.
const LOOK: Duration = Duration::from_millis(20);
/// In [`MINE`]: another process may have it too.
const OTHERS_TOO: u32 = u32::MAX;

/// One open file description.
#[repr(C)]
struct Opening {
    taken: AtomicU32,
    flags: AtomicI32,
    offset: AtomicU64,
    /// The process that uses the offset, 0 for none; with [`WAITED_FOR`] if somebody waits.
    user: Word,
    filling: u32,
    /// In the first place: what tells the locks of the sheet's files from those of others.
    sheet: AtomicU64,
}

const _: () = assert!(size_of::<Opening>() == 32);

/// The process's sheets.
static TABLE: [Sheet; SHEETS] = [const { Sheet::none() }; SHEETS];
/// For each place how often the process had forked when it took it; [`OTHERS_TOO`], or 0 for one that it has not.
static MINE: [AtomicU32; SHEETS * PLACES] = [const { AtomicU32::new(0) }; SHEETS * PLACES];
/// The sheet that places are taken from, plus one.
static CURRENT: AtomicU32 = AtomicU32::new(0);
/// Counts forks, before and after each, from one on.
static FORKS: AtomicU32 = AtomicU32::new(1);
/// Forks may come by nobody: no place is given away again.
static UNSEEN: AtomicBool = AtomicBool::new(false);
/// 1 while a thread changes the above.
static TURN: Word = Word::new(0);
/// This process, once it was asked for.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// The right to change the table.
struct Turn;

impl Turn {
    fn take() -> Self {
        // Acquire pairs with the Release below.
        while TURN.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            SystemHost.wait(&TURN, 1, Some(SystemHost.now().after(LOOK)));
        }
        Self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        TURN.store(0, Ordering::Release);
        SystemHost.wake(&TURN, WAKE_ALL);
    }
}

/// Before and after a fork: what the process has now, another one may have too.
pub fn note_fork() {
    // SeqCst, with the load in `give_back`: a place that was taken before or between the two is never given back.
    FORKS.fetch_add(1, Ordering::SeqCst);
}

/// From now on there may be forks that nobody notes: whatever is open, another process may have.
pub fn note_unseen() {
    UNSEEN.store(true, Ordering::SeqCst);
}

/// This process is such another one.
pub fn note_child() {
    note_fork();
    PROCESS.store(0, Ordering::Relaxed);
    TURN.store(0, Ordering::Relaxed);
}

/// The process may be another user from now on: what that one may write decides about nobody else's files. So it goes on
/// with sheets of its own, before it runs anything as that user, unless it can become again whom it shares them with.
pub fn note_user() {
    let _turn = Turn::take();
    let now = Users::now();
    if sheet::is_somebody_else(now) {
        sheet::leave(now);
    }
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

/// The state of an open file description, for as long as any process has it open: its number in this process.
#[derive(Clone, Copy, Debug)]
pub struct Place(u32);

impl Place {
    fn new(sheet: usize, index: usize) -> Self {
        Self((sheet * PLACES + index) as u32)
    }

    /// Takes a free place.
    ///
    /// # Errors
    /// EMFILE: neither a place nor a further sheet can be had.
    pub fn take() -> Result<Self, Errno> {
        let _turn = Turn::take();
        let sheet = match CURRENT.load(Ordering::Relaxed).checked_sub(1) {
            Some(current) => {
                if let Some(place) = Self::take_of(current as usize) {
                    return Ok(place);
                }
                // Others may find its free places; here the next one comes.
                let next = sheet::make()?;
                release(current as usize, next);
                next
            }
            None => sheet::make()?,
        };
        if local().borrowed().is_none() {
            CURRENT.store(sheet as u32 + 1, Ordering::Relaxed);
        }
        Self::take_of(sheet).ok_or(Errno(libc::EMFILE))
    }

    fn take_of(sheet: usize) -> Option<Self> {
        let places = TABLE[sheet].places();
        let start = TABLE[sheet].next.fetch_add(1, Ordering::Relaxed) as usize;
        (0..places.len() - 1).map(|step| 1 + (start + step) % (places.len() - 1)).find_map(|index| {
            let place = &places[index];
            // Acquire pairs with the Release of `give_back`.
            place.taken.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).ok()?;
            place.offset.store(0, Ordering::Relaxed);
            place.flags.store(0, Ordering::Relaxed);
            let taken = Self::new(sheet, index);
            taken.hold(FORKS.load(Ordering::SeqCst));
            Some(taken)
        })
    }

    /// It is this process's from now on.
    fn hold(self, how: u32) {
        if MINE[self.0 as usize].swap(how, Ordering::Relaxed) == 0 {
            self.sheet().held.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The process has it no more. If nobody else can have it, another file may.
    pub fn give_back(self) {
        let _turn = Turn::take();
        let taken = MINE[self.0 as usize].swap(0, Ordering::Relaxed);
        if taken == FORKS.load(Ordering::SeqCst) && !UNSEEN.load(Ordering::SeqCst) {
            // Release pairs with the Acquire of `take_of`.
            self.opening().taken.store(0, Ordering::Release);
        }
        let sheet = self.0 as usize / PLACES;
        let last = self.sheet().held.fetch_sub(1, Ordering::Relaxed) == 1;
        // What a child on borrowed memory closes, its parent has still mapped.
        if last && local().borrowed().is_none() && CURRENT.load(Ordering::Relaxed) != sheet as u32 + 1 {
            TABLE[sheet].end();
        }
    }

    /// Its number in its sheet, and a descriptor of that for the next program: inherited by exec, to be closed there.
    ///
    /// # Errors
    /// EMFILE.
    pub fn pass_on(self) -> Result<(u32, i32), Errno> {
        let _turn = Turn::take();
        MINE[self.0 as usize].store(OTHERS_TOO, Ordering::Relaxed);
        let index = self.0 % PLACES as u32;
        let next = Users::after_exec();
        if sheet::is_somebody_else(next) {
            if local().borrowed().is_some() {
                // The memory is the parent's, who stays who it is.
                return Ok((index, sheet::copy_of_one(self.sheet(), index as usize)?));
            }
            sheet::leave(next);
        }
        let memfd = self.sheet().memfd().ok_or(Errno(libc::EMFILE))?;
        Ok((index, move_up(memfd, false)?))
    }

    /// The other side of it. Takes the descriptor.
    pub fn adopt(number: u32, memfd: i32) -> Option<Self> {
        let _turn = Turn::take();
        let sheet = sheet::adopt(memfd)?;
        let index = number as usize;
        let known = (1..TABLE[sheet].places().len()).contains(&index);
        let place = known.then(|| Self::new(sheet, index))?;
        place.hold(OTHERS_TOO);
        Some(place)
    }

    /// A number for the locks of this description, the same in all processes that have it.
    pub fn owner(self) -> u64 {
        let sheet = self.sheet().places()[0].sheet.load(Ordering::Relaxed);
        (sheet << 16) | u64::from(self.0 % PLACES as u32)
    }

    #[inline]
    fn sheet(self) -> &'static Sheet {
        &TABLE[self.0 as usize / PLACES]
    }

    #[inline]
    fn opening(self) -> &'static Opening {
        &self.sheet().places()[self.0 as usize % PLACES]
    }
}

/// Ends a sheet that nothing is taken from any more, if the process has no file in it. The turn is the caller's.
fn release(sheet: usize, next: usize) {
    let unused = TABLE[sheet].held.load(Ordering::Relaxed) == 0;
    if unused && sheet != next && local().borrowed().is_none() {
        TABLE[sheet].end();
    }
}

impl OpenState for Place {
    fn with_offset(&self, change: &mut dyn FnMut(&mut u64)) {
        lock(self.opening());
        let opening = self.opening();
        let mut offset = opening.offset.load(Ordering::Relaxed);
        change(&mut offset);
        opening.offset.store(offset, Ordering::Relaxed);
        unlock(opening);
    }

    fn flags(&self) -> i32 {
        self.opening().flags.load(Ordering::Relaxed)
    }

    fn set_flags(&self, flags: i32) {
        // With the word: who copies the place meanwhile has it.
        self.with_offset(&mut |_| self.opening().flags.store(flags, Ordering::Relaxed));
    }
}

/// Takes the word of a place.
fn lock(opening: &Opening) {
    let mut mark = 0;
    loop {
        // Acquire pairs with the Release of `unlock`: the offset is what the last user left.
        match opening.user.compare_exchange(0, process() | mark, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => break,
            Err(other) => mark = wait_for(opening, other),
        }
    }
}

fn unlock(opening: &Opening) {
    // Release pairs with the Acquire of `lock`.
    if opening.user.swap(0, Ordering::Release) & WAITED_FOR != 0 {
        SystemHost.wake(&opening.user, WAKE_ALL);
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
