//! The state of open files that processes share after fork and exec: offset, flags, and the current user of the offset.
//!
//! The state of an open file is a *slot* of a *table* of slots (the shared open-file table). A table is a memfd, which
//! all processes that share a file map: a child has the mapping from its parent, and the next program after an exec
//! receives the memfds of the files that stay open. A slot is reused only if the process that took it gives it back,
//! and has neither forked nor passed it on since: otherwise no process knows whether it is the last user. If the
//! process may fork without the library's knowledge, no slot is reused. When a table has no free slot left, another
//! table follows. A table ends with the last process that has a file in it, so a killed process leaves nothing behind
//! permanently, and there are slots as long as there is memory. Two users never share a table: a process that becomes
//! another user takes copies.
//!
//! **Locks.** [`LOCK`] protects taking and returning slots, and adding and removing tables. The `user` word of a slot
//! is a lock that contains the process which uses the offset; it comes after [`LOCK`]. If that process dies, a waiting
//! process takes the word over. The offset is then either the former one or the last one that the dead process has
//! stored.

use crate::descriptors::move_up;
use crate::identity::Users;
use crate::local::local;
use crate::mount::{Errno, PassedDescriptors};
use crate::process_lock::ProcessLock;
use crate::raw;
use ipc::{Host, SystemHost, WAKE_ALL, Word};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use table::SlotTable;
use vfs::file::OpenState;

mod table;

/// Limit of slots of a table. The first slot belongs to no file.
const SLOTS_MAX: usize = 1024;
/// Limit of tables of a process.
const TABLES_MAX: usize = 1024;
/// Flag of the `user` word: a process sleeps until the word is free. It is above every process number.
const WAITED_FOR: u32 = 1 << 31;
/// Interval in which a waiter checks that the process for which it waits is alive.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// In [`TAKEN_AT`]: another process may have the slot too.
const OTHERS_TOO: u32 = u32::MAX;

/// The state of one open file description.
#[repr(C)]
struct SlotData {
    taken: AtomicU32,
    flags: AtomicI32,
    offset: AtomicU64,
    /// The process that uses the offset, 0 for none; with [`WAITED_FOR`] if a process waits.
    user: Word,
    filling: u32,
    /// In the first slot: a number that distinguishes the locks of this table's files from those of other tables.
    table: AtomicU64,
}

const _: () = assert!(size_of::<SlotData>() == 32);

/// The tables of the process.
static TABLES: [SlotTable; TABLES_MAX] = [const { SlotTable::none() }; TABLES_MAX];
/// For each slot, the value of [`FORKS`] when the process took it; [`OTHERS_TOO`], or 0 if the process does not have
/// it.
static TAKEN_AT: [AtomicU32; TABLES_MAX * SLOTS_MAX] = [const { AtomicU32::new(0) }; TABLES_MAX * SLOTS_MAX];
/// The table from which slots are taken, plus one.
static CURRENT: AtomicU32 = AtomicU32::new(0);
/// Counts forks, before and after each of them, from one on.
static FORKS: AtomicU32 = AtomicU32::new(1);
/// The process may fork without the library's knowledge, so no slot is reused.
static UNSEEN: AtomicBool = AtomicBool::new(false);
/// Held while a thread changes the above.
static LOCK: ProcessLock = ProcessLock::new();
/// The number of this process; 0 before the first use.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Before and after a fork: from now on, another process may have the slots of this one.
pub fn note_fork() {
    // SeqCst, as the load in `give_back`: a slot that was taken before or between the two calls is never reused.
    FORKS.fetch_add(1, Ordering::SeqCst);
}

/// From now on, forks may happen without the library's knowledge, so another process may have each open file.
pub fn note_unseen() {
    UNSEEN.store(true, Ordering::SeqCst);
}

/// This process is a forked child.
pub fn note_child() {
    note_fork();
    PROCESS.store(0, Ordering::Relaxed);
    LOCK.free_in_child();
}

/// The process may be another user from now on, whose writes must not affect the files of the former user. So it
/// continues with its own copies of the tables before it runs anything as that user, unless it can return to the users
/// with which it shares them.
pub fn note_user() {
    let _lock = LOCK.take();
    let now = Users::now();
    if table::is_somebody_else(now) {
        table::leave(now);
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

/// A slot: the state of an open file description, as long as any process has it open. The value is its number in this
/// process.
#[derive(Clone, Copy, Debug)]
pub struct FileSlot(u32);

/// Makes the table for files that a child between vfork and exec opens first: otherwise the child would have a table of its own
/// for each file, and a descriptor of it at a number that its program may use.
pub fn prepare_for_child() {
    let _lock = LOCK.take();
    if CURRENT.load(Ordering::Relaxed) == 0
        && let Ok(table) = table::make()
    {
        CURRENT.store(table as u32 + 1, Ordering::Relaxed);
    }
}

impl FileSlot {
    fn new(table: usize, index: usize) -> Self {
        Self((table * SLOTS_MAX + index) as u32)
    }

    /// Takes a free slot.
    ///
    /// # Errors
    /// EMFILE: there is no free slot, and no further table can be created.
    pub fn take() -> Result<Self, Errno> {
        let _lock = LOCK.take();
        let table = match CURRENT.load(Ordering::Relaxed).checked_sub(1) {
            Some(current) => {
                if let Some(slot) = Self::take_in(current as usize) {
                    return Ok(slot);
                }
                // Other processes may reuse free slots of this table; this process continues with the next one.
                let next = table::make()?;
                release(current as usize, next);
                next
            }
            None => table::make()?,
        };
        if local().borrowed().is_none() {
            CURRENT.store(table as u32 + 1, Ordering::Relaxed);
        }
        Self::take_in(table).ok_or(Errno(libc::EMFILE))
    }

    fn take_in(table: usize) -> Option<Self> {
        let slots = TABLES[table].slots();
        let start = TABLES[table].next.fetch_add(1, Ordering::Relaxed) as usize;
        (0..slots.len() - 1).map(|step| 1 + (start + step) % (slots.len() - 1)).find_map(|index| {
            let slot = &slots[index];
            // Acquire pairs with the Release of `give_back`.
            slot.taken.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).ok()?;
            slot.offset.store(0, Ordering::Relaxed);
            slot.flags.store(0, Ordering::Relaxed);
            let taken = Self::new(table, index);
            taken.hold(FORKS.load(Ordering::SeqCst));
            Some(taken)
        })
    }

    /// Notes that this process has the slot.
    fn hold(self, how: u32) {
        if TAKEN_AT[self.0 as usize].swap(how, Ordering::Relaxed) == 0 {
            self.table().held.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the slot. If no other process can have it, it is reused for another file.
    pub fn give_back(self) {
        let _lock = LOCK.take();
        let taken = TAKEN_AT[self.0 as usize].swap(0, Ordering::Relaxed);
        if taken == FORKS.load(Ordering::SeqCst) && !UNSEEN.load(Ordering::SeqCst) {
            // Release pairs with the Acquire of `take_in`.
            self.data().taken.store(0, Ordering::Release);
        }
        let table = self.0 as usize / SLOTS_MAX;
        let last = self.table().held.fetch_sub(1, Ordering::Relaxed) == 1;
        // The parent of a child in borrowed memory still has mapped what the child closes.
        if last && local().borrowed().is_none() && CURRENT.load(Ordering::Relaxed) != table as u32 + 1 {
            TABLES[table].end();
        }
    }

    /// The number of the slot in its table, and a descriptor of the table, which the next program inherits.
    ///
    /// # Errors
    /// EMFILE.
    pub fn pass_on(self, passed: &mut PassedDescriptors) -> Result<(u32, i32), Errno> {
        let _lock = LOCK.take();
        TAKEN_AT[self.0 as usize].store(OTHERS_TOO, Ordering::Relaxed);
        let index = self.0 % SLOTS_MAX as u32;
        let (table, own) = (self.0 as usize / SLOTS_MAX, u64::from(self.0) | 1 << 32);
        let next = Users::after_exec();
        if table::is_somebody_else(next) {
            if local().borrowed().is_some() {
                // The memory belongs to the parent, whose user does not change.
                let copy = || table::copy_of_one(self.table(), index as usize);
                return Ok((index, passed.once(own, copy)?));
            }
            table::leave(next);
        }
        let memfd = self.table().memfd().ok_or(Errno(libc::EMFILE))?;
        Ok((index, passed.once(table as u64, || move_up(memfd, false))?))
    }

    /// Takes over a slot that [`Self::pass_on`] has passed on. The caller closes the descriptor, in which other slots may be.
    pub fn adopt(number: u32, memfd: i32) -> Option<Self> {
        let _lock = LOCK.take();
        let table = table::adopt(memfd)?;
        let index = number as usize;
        let known = (1..TABLES[table].slots().len()).contains(&index);
        let slot = known.then(|| Self::new(table, index))?;
        slot.hold(OTHERS_TOO);
        Some(slot)
    }

    /// A number for the locks of this description, which is the same in all processes that have it.
    pub fn owner(self) -> u64 {
        let table = self.table().slots()[0].table.load(Ordering::Relaxed);
        (table << 16) | u64::from(self.0 % SLOTS_MAX as u32)
    }

    #[inline]
    fn table(self) -> &'static SlotTable {
        &TABLES[self.0 as usize / SLOTS_MAX]
    }

    #[inline]
    fn data(self) -> &'static SlotData {
        &self.table().slots()[self.0 as usize % SLOTS_MAX]
    }
}

/// Removes a table from which no slot is taken any more, if the process has no file in it. The caller holds [`LOCK`].
fn release(table: usize, next: usize) {
    let unused = TABLES[table].held.load(Ordering::Relaxed) == 0;
    if unused && table != next && local().borrowed().is_none() {
        TABLES[table].end();
    }
}

impl OpenState for FileSlot {
    fn with_offset(&self, change: &mut dyn FnMut(&mut u64)) {
        lock(self.data());
        let data = self.data();
        let mut offset = data.offset.load(Ordering::Relaxed);
        change(&mut offset);
        data.offset.store(offset, Ordering::Relaxed);
        unlock(data);
    }

    fn flags(&self) -> i32 {
        self.data().flags.load(Ordering::Relaxed)
    }

    fn set_flags(&self, flags: i32) {
        // Under the word of the slot, as a process that copies the slot holds it meanwhile.
        self.with_offset(&mut |_| self.data().flags.store(flags, Ordering::Relaxed));
    }
}

/// Takes the `user` word of a slot.
fn lock(data: &SlotData) {
    let mut mark = 0;
    loop {
        // Acquire pairs with the Release of `unlock`: the offset is that of the last user.
        match data.user.compare_exchange(0, process() | mark, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => break,
            Err(other) => mark = wait_for(data, other),
        }
    }
}

fn unlock(data: &SlotData) {
    // Release pairs with the Acquire of `lock`.
    if data.user.swap(0, Ordering::Release) & WAITED_FOR != 0 {
        SystemHost.wake(&data.user, WAKE_ALL);
    }
}

/// Waits until the word changes, or releases it if its process is dead. A process that has waited sets the mark when it
/// takes the word, because others may still wait.
fn wait_for(data: &SlotData, user: u32) -> u32 {
    let waited = user | WAITED_FOR;
    let marked = user == waited
        || data.user.compare_exchange(user, waited, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    if marked {
        let until = SystemHost.now().after(CHECK_INTERVAL);
        SystemHost.wait(&data.user, waited, Some(until));
        if has_ended(user & !WAITED_FOR) {
            let _ = data.user.compare_exchange(waited, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
    WAITED_FOR
}

/// Whether a process has ended: it is gone, or it is a zombie, perhaps a child of this process.
fn has_ended(user: u32) -> bool {
    // SAFETY: signal 0 is not delivered; the kernel only checks that the process exists.
    let found = unsafe { raw::try_call(libc::SYS_kill, &[u64::from(user), 0]) };
    // Without /proc no process has a start time, including this one.
    found == Err(Errno(libc::ESRCH))
        || (SystemHost.started(user).is_none() && SystemHost.started(process()).is_some())
}
