//! Open files that go from process to process: to a child when it is made, to the next program at an exec.
//!
//! Before a fork, with a file of the tree open, the process gives its open files to whoever comes for them by a
//! number, and gets a lifeline (`libfs::share`), of which the child has a copy: by its end the daemon knows that
//! nobody will come. A child that never uses the tree does not attach; what it closes it says over the lifeline. At an
//! exec the number goes to the next program, and the lifeline stays open. A process that attaches comes for everything
//! at once. One that has not, and makes a child itself, attaches first.
//!
//! **Locks.** None: numbers of descriptors are single words. Lifelines of other threads' children that a child has
//! copies of are closed there.

use super::{Open, Tree, open_of};
use crate::descriptors::{self, CWD, Held, Internal};
use crate::limits;
use crate::local::local;
use crate::mount::{Handle, Passage, Result};
use crate::raw;
use format::InodeNumber;
use ipc::Descriptor;
use libfs::LibFs;
use libfs::share::{Given, Lifeline};
use std::mem::ManuallyDrop;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use vfs::Vfs;
use vfs::engine::{Access, LockOwner};

/// Bytes of what the next program is told before the files whose locks end: the number, the lifeline, the owner of the
/// process's locks.
const TOKEN_BYTES: usize = 20;
/// Children that may be made at once by different threads.
const PENDING_MAX: usize = 64;

/// Slots of lifelines, plus one, whose children are being made.
static PENDING: [AtomicU32; PENDING_MAX] = [const { AtomicU32::new(0) }; PENDING_MAX];

/// What this process was given and has not come for.
#[derive(Debug, Default)]
pub(super) struct Gift {
    number: AtomicU64,
    /// Slot of the lifeline, plus one.
    lifeline: AtomicU32,
}

impl Gift {
    /// The number to come with; 0 for nothing.
    pub fn number(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }

    fn lifeline(&self) -> Option<Internal> {
        self.lifeline.load(Ordering::Relaxed).checked_sub(1).map(Internal::from_slot)
    }

    fn set(&self, number: u64, lifeline: u32) {
        self.number.store(number, Ordering::Relaxed);
        self.lifeline.store(lifeline, Ordering::Relaxed);
    }

    /// It was come for, or is somebody else's.
    pub fn end(&self) {
        self.number.store(0, Ordering::Relaxed);
        if let Some(slot) = self.lifeline.swap(0, Ordering::Relaxed).checked_sub(1) {
            Internal::from_slot(slot).close();
        }
    }
}

/// What an open file may be used for, by the flags that it was opened with.
pub(super) fn access_of(flags: i32) -> Access {
    if flags & libc::O_PATH != 0 {
        return Access::default();
    }
    match flags & libc::O_ACCMODE {
        libc::O_RDONLY => Access { read: true, write: false },
        libc::O_WRONLY => Access { read: false, write: true },
        _ => Access { read: true, write: true },
    }
}

/// An open file as it is given away.
pub(super) fn given(open: &Open) -> Given {
    let owner = Some(LockOwner::Description(open.place.owner()));
    Given { inode: open.inode, access: access_of(open.flags), owner }
}

/// Each description of the process once.
pub(super) fn open_files() -> Vec<Held> {
    let mut found: Vec<Held> = Vec::new();
    for fd in descriptors::ours().into_iter().chain([CWD]) {
        if let Ok(held) = descriptors::get(fd)
            && !found.iter().any(|other| other.same(&held))
        {
            found.push(held);
        }
    }
    found
}

/// Runs something on a lifeline, whose descriptor stays whose it is.
fn on_lifeline(number: u64, fd: i32, act: impl FnOnce(&Lifeline)) {
    // SAFETY: the descriptor is open; what would close it is not dropped.
    let descriptor = unsafe { Descriptor::from_raw(fd) };
    act(&ManuallyDrop::new(Lifeline::from_descriptor(number, descriptor)));
}

/// Those of some files that are not among others, for their lifeline.
fn closed(files: &[Given], left: &[Given]) -> Vec<Given> {
    let mut closed: Vec<Given> = files.iter().filter(|file| !left.contains(file)).copied().collect();
    for index in 0..closed.len() {
        let inode = closed[index].inode;
        let open_still = left.iter().any(|other| other.inode == inode);
        if open_still || closed[..index].iter().any(|other| other.inode == inode) {
            closed[index].inode = InodeNumber::NONE;
        }
    }
    closed
}

fn shared(vfs: &Vfs<LibFs>, files: &[Given], own: bool) -> Result<Lifeline> {
    limits::with_room(|_| vfs.engine().share(files, own)).map_err(super::errno_of)
}

fn number_of(lifeline: Lifeline) -> i32 {
    OwnedFd::from(lifeline.into_descriptor()).into_raw_fd()
}

impl Tree {
    /// Gives a child that is about to be made the open files.
    pub(super) fn give_to_child(&self) {
        let files: Vec<Given> = open_files().iter().map(|held| given(open_of(&held.handle()))).collect();
        if files.is_empty() {
            return;
        }
        // Without it the child opens them anew by their paths.
        let Ok(lifeline) = self.client().and_then(|vfs| shared(vfs, &files, false)) else {
            return;
        };
        let number = lifeline.number;
        let Ok(kept) = Internal::keep(number_of(lifeline)) else { return };
        let slot = kept.slot() + 1;
        let free =
            |entry: &AtomicU32| entry.compare_exchange(0, slot, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !PENDING.iter().any(free) {
            return kept.close();
        }
        local().given.store(number, Ordering::Relaxed);
        local().lifeline.store(slot, Ordering::Relaxed);
    }

    /// The child was made, or was not: only its copy of the lifeline stays.
    pub(super) fn let_child_go(child: Option<u32>) {
        let number = local().given.swap(0, Ordering::Relaxed);
        let slot = local().lifeline.swap(0, Ordering::Relaxed);
        let Some(lifeline) = slot.checked_sub(1).map(Internal::from_slot) else { return };
        if let Some(child) = child {
            on_lifeline(number, lifeline.number(), |lifeline| lifeline.name(child));
        }
        for entry in &PENDING {
            let _ = entry.compare_exchange(slot, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
        lifeline.close();
    }

    /// In the child: what it was given is its own, and nothing of what its parent was.
    pub(super) fn take_as_child(&self) {
        let number = local().given.swap(0, Ordering::Relaxed);
        let slot = local().lifeline.swap(0, Ordering::Relaxed);
        for entry in &PENDING {
            let other = entry.swap(0, Ordering::Relaxed);
            if other != slot
                && let Some(other) = other.checked_sub(1)
            {
                Internal::from_slot(other).close();
            }
        }
        self.gift.end();
        self.gift.set(number, slot);
        self.owner.store(0, Ordering::Relaxed);
        self.ranges.forget();
    }

    /// A file was closed that this process was given and has not come for.
    pub(super) fn say_closed(&self, open: &Open) {
        let Some(lifeline) = self.gift.lifeline() else { return };
        let left: Vec<Given> = open_files().iter().map(|held| given(open_of(&held.handle()))).collect();
        let files = closed(&[given(open)], &left);
        on_lifeline(self.gift.number(), lifeline.number(), |lifeline| lifeline.closed(&files));
    }

    /// Before an exec that these files stay open over, and others or the same are closed by: what the next program needs.
    pub(super) fn pass_on(&self, staying: &[Handle], closing: &[Handle]) -> Passage {
        let left: Vec<Given> = staying.iter().map(|handle| given(open_of(handle))).collect();
        let attached = !self.attached.load(Ordering::Acquire).is_null();
        let (number, lifeline) = match local().borrowed() {
            // SAFETY: only this child uses the overlay until its exec.
            Some(overlay) => self.pass_on_gift(
                local().given.load(Ordering::Relaxed),
                local().lifeline.load(Ordering::Relaxed).checked_sub(1).map(Internal::from_slot),
                unsafe { &(*overlay).given },
                &left,
            ),
            None if attached => self.give_to_next_program(&left),
            None => self.pass_on_gift(self.gift.number(), self.gift.lifeline(), &open_files(), &left),
        };
        let owner = if local().borrowed().is_some() { 0 } else { self.owner.load(Ordering::Relaxed) };
        let mut token = Vec::with_capacity(TOKEN_BYTES);
        token.extend_from_slice(&number.to_le_bytes());
        token.extend_from_slice(&lifeline.unwrap_or(-1).to_le_bytes());
        token.extend_from_slice(&owner.to_le_bytes());
        self.locks_that_end(closing, &mut token);
        Passage { token, descriptor: lifeline }
    }

    /// What was given goes on to the next program, less what is closed at the exec.
    fn pass_on_gift(
        &self,
        number: u64,
        lifeline: Option<Internal>,
        all: &[Held],
        left: &[Given],
    ) -> (u64, Option<i32>) {
        let Some(lifeline) = lifeline.filter(|_| !left.is_empty()) else { return (0, None) };
        let all: Vec<Given> = all.iter().map(|held| given(open_of(&held.handle()))).collect();
        let files = closed(&all, left);
        if !files.is_empty() {
            on_lifeline(number, lifeline.number(), |lifeline| lifeline.closed(&files));
        }
        match descriptors::move_up(lifeline.number(), false) {
            Ok(fd) => (number, Some(fd)),
            Err(_) => (0, None),
        }
    }

    fn give_to_next_program(&self, left: &[Given]) -> (u64, Option<i32>) {
        if left.is_empty() {
            return (0, None);
        }
        let mut files = left.to_vec();
        let id = self.owner.load(Ordering::Relaxed);
        if id != 0 {
            let owner = Some(LockOwner::Process { id, pid: raw::process().unsigned_abs() });
            files.push(Given { inode: InodeNumber::NONE, access: Access::default(), owner });
        }
        let shared = self.client().and_then(|vfs| shared(vfs, &files, true));
        let Ok(lifeline) = shared else { return (0, None) };
        let number = lifeline.number;
        let fd = number_of(lifeline);
        let passed = descriptors::move_up(fd, false);
        raw::close(fd);
        match passed {
            Ok(fd) => (number, Some(fd)),
            Err(_) => (0, None),
        }
    }

    /// The other side of [`Self::pass_on`].
    pub(super) fn come_after(&self, token: &[u8]) {
        let Some((token, ended)) = token.split_first_chunk::<TOKEN_BYTES>() else { return };
        let eight = |at: usize| u64::from_le_bytes(token[at..at + 8].try_into().expect("eight bytes"));
        let fd = i32::from_le_bytes(token[8..12].try_into().expect("four bytes"));
        self.owner.store(eight(12), Ordering::Relaxed);
        self.locks_ended(ended);
        if fd >= 0
            && let Ok(kept) = Internal::keep(fd)
        {
            self.gift.set(eight(0), kept.slot() + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_given_back_with_its_last_file() {
        let file = |inode: u64, owner: u64| Given {
            inode: InodeNumber::new(inode),
            access: Access { read: true, write: false },
            owner: Some(LockOwner::Description(owner)),
        };
        let nameless = |owner: u64| Given { inode: InodeNumber::NONE, ..file(0, owner) };
        let all = [file(5, 1), file(5, 2), file(6, 3), file(6, 4), file(7, 5)];
        assert_eq!(closed(&all, &[file(5, 2), file(7, 5)]), [nameless(1), file(6, 3), nameless(4)]);
        assert_eq!(closed(&all, &all), []);
    }

    #[test]
    fn rights_are_those_of_the_opening() {
        assert_eq!(access_of(libc::O_WRONLY | libc::O_APPEND), Access { read: false, write: true });
        assert_eq!(access_of(libc::O_RDONLY | libc::O_DIRECTORY), Access { read: true, write: false });
        assert_eq!(access_of(libc::O_RDWR | libc::O_PATH), Access::default());
    }
}
