//! Inherited files: open files that a process shares with a child when it is created, or with the next program at an
//! exec.
//!
//! Before a fork, a process with open files of the tree shares them with the daemon under a random number
//! (`libfs::share`), and gets a liveness socket, of which the child has a copy. When all copies are closed, the daemon
//! knows that no process can claim the files any more. A child that never uses the tree does not attach; it reports
//! over the liveness socket which files it closes. At an exec the number goes to the next program, and the liveness
//! socket stays open. A process that attaches claims all files at once. If a process has not attached and creates a
//! child itself, it attaches first.
//!
//! **Locks.** None: numbers of descriptors are single words. A child closes its copies of the liveness sockets of other
//! threads' children.

use super::{Open, Tree, locks, open_of};
use crate::descriptors::{self, CWD, DescriptionRef, Internal, Overlay};
use crate::limits;
use crate::local::local;
use crate::mount::{ExecHandover, Handle, Result};
use crate::raw;
use format::InodeNumber;
use ipc::Descriptor;
use libfs::LibFs;
use libfs::share::{Given, LivenessSocket};
use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use vfs::Vfs;
use vfs::engine::{Access, LockOwner};

/// Bytes of the token for the next program before the files whose locks end: the number, the liveness socket, the owner
/// of the process's locks.
const TOKEN_BYTES: usize = 20;
/// Limit of children that different threads create at the same time.
const PENDING_MAX: usize = 64;

/// Slots of liveness sockets, plus one, of children that are being created.
static PENDING: [AtomicU32; PENDING_MAX] = [const { AtomicU32::new(0) }; PENDING_MAX];

/// The files that this process has inherited and not claimed yet.
#[derive(Debug, Default)]
pub(super) struct InheritedFiles {
    number: AtomicU64,
    /// Slot of the liveness socket, plus one.
    liveness: AtomicU32,
}

impl InheritedFiles {
    /// The number with which to claim them; 0 for none.
    pub fn number(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }

    fn liveness(&self) -> Option<Internal> {
        self.liveness.load(Ordering::Relaxed).checked_sub(1).map(Internal::from_slot)
    }

    fn set(&self, number: u64, liveness: u32) {
        self.number.store(number, Ordering::Relaxed);
        self.liveness.store(liveness, Ordering::Relaxed);
    }

    /// Ends the claim: the files were claimed, or belong to another process now.
    pub fn end(&self) {
        self.number.store(0, Ordering::Relaxed);
        if let Some(slot) = self.liveness.swap(0, Ordering::Relaxed).checked_sub(1) {
            Internal::from_slot(slot).close();
        }
    }
}

/// The access that the flags of an open file allow.
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

/// An open file, as it is shared.
pub(super) fn given(open: &Open) -> Given {
    let owner = Some(LockOwner::Description(open.slot.owner()));
    Given { inode: open.inode, access: access_of(open.flags), owner }
}

/// Each open file description of the process once.
pub(super) fn open_files() -> Vec<DescriptionRef> {
    let mut found: Vec<DescriptionRef> = Vec::new();
    for fd in descriptors::ours().into_iter().chain([CWD]) {
        if let Ok(held) = descriptors::get(fd)
            && !found.iter().any(|other| other.same(&held))
        {
            found.push(held);
        }
    }
    found
}

/// Runs a function on a liveness socket, whose descriptor stays with its owner.
fn on_liveness_socket<T>(number: u64, fd: i32, act: impl FnOnce(&LivenessSocket) -> T) -> T {
    // SAFETY: the descriptor is open, and the value that would close it is never dropped.
    let descriptor = unsafe { Descriptor::from_raw(fd) };
    act(&ManuallyDrop::new(LivenessSocket::from_descriptor(number, descriptor)))
}

/// The files that are not in `left`, as the liveness socket reports them. The inode is 0 if another file of the inode
/// is left.
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

fn shared(vfs: &Vfs<LibFs>, files: &[Given], own: bool) -> Result<LivenessSocket> {
    limits::with_room(|_| vfs.engine().share(files, own)).map_err(super::errno_of)
}

fn number_of(liveness: LivenessSocket) -> i32 {
    OwnedFd::from(liveness.into_descriptor()).into_raw_fd()
}

impl Tree {
    /// Shares the open files with a child that is about to be created.
    pub(super) fn give_to_child(&self) {
        let files: Vec<Given> = open_files().iter().map(|held| given(open_of(&held.handle()))).collect();
        if files.is_empty() {
            return;
        }
        // If this fails, the child opens them anew by their paths.
        let Ok(liveness) = self.client().and_then(|vfs| shared(vfs, &files, false)) else {
            return;
        };
        let number = liveness.number;
        let Ok(kept) = Internal::keep(number_of(liveness)) else { return };
        let slot = kept.slot() + 1;
        let free =
            |entry: &AtomicU32| entry.compare_exchange(0, slot, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !PENDING.iter().any(free) {
            return kept.close();
        }
        local().given.store(number, Ordering::Relaxed);
        local().liveness.store(slot, Ordering::Relaxed);
    }

    /// The child was created, or was not: the parent closes its copy of the liveness socket.
    pub(super) fn release_child(child: Option<u32>) {
        let number = local().given.swap(0, Ordering::Relaxed);
        let slot = local().liveness.swap(0, Ordering::Relaxed);
        let Some(liveness) = slot.checked_sub(1).map(Internal::from_slot) else { return };
        if let Some(child) = child {
            on_liveness_socket(number, liveness.number(), |liveness| liveness.name(child));
        }
        for entry in &PENDING {
            let _ = entry.compare_exchange(slot, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
        liveness.close();
    }

    /// In the child: takes over the shared files, and forgets the state of the parent.
    pub(super) fn take_as_child(&self) {
        let number = local().given.swap(0, Ordering::Relaxed);
        let slot = local().liveness.swap(0, Ordering::Relaxed);
        for entry in &PENDING {
            let other = entry.swap(0, Ordering::Relaxed);
            if other != slot
                && let Some(other) = other.checked_sub(1)
            {
                Internal::from_slot(other).close();
            }
        }
        self.inherited.end();
        self.inherited.set(number, slot);
        self.owner.store(0, Ordering::Relaxed);
        self.ranges.forget();
        if let Some(overlay) = local().borrowed() {
            // SAFETY: the child has its own copy of the memory, and one thread.
            unsafe { (*overlay).locks = None };
        }
    }

    /// Reports that an inherited file was closed before it was claimed.
    pub(super) fn report_closed(&self, open: &Open) {
        let Some(liveness) = self.inherited.liveness() else { return };
        let left: Vec<Given> = open_files().iter().map(|held| given(open_of(&held.handle()))).collect();
        let files = closed(&[given(open)], &left);
        on_liveness_socket(self.inherited.number(), liveness.number(), |liveness| liveness.closed(&files));
    }

    /// Before an exec over which the `staying` files stay open, and which closes descriptors of the `closing` ones: the
    /// token for the next program.
    pub(super) fn pass_on(&self, staying: &[Handle], closing: &[Handle]) -> ExecHandover {
        let left: Vec<Given> = staying.iter().map(|handle| given(open_of(handle))).collect();
        let attached = !self.attached.load(Ordering::Acquire).is_null();
        // SAFETY: only this child uses the overlay until its exec.
        let child = local().borrowed().map(|overlay| unsafe { &*overlay });
        let owner = match child {
            Some(child) => child.locks.map_or(0, |locks| locks.owner),
            None => self.owner.load(Ordering::Relaxed),
        };
        let (number, liveness) = match child {
            Some(child) => self.pass_on_as_child(child, staying),
            None if attached => {
                let owner = (owner != 0)
                    .then(|| LockOwner::Process { id: owner, pid: raw::process().unsigned_abs() });
                self.give_to_next_program(&left, owner, true).unwrap_or_default()
            }
            None => self.pass_on_inherited(
                self.inherited.number(),
                self.inherited.liveness(),
                &open_files(),
                &left,
            ),
        };
        let mut token = Vec::with_capacity(TOKEN_BYTES);
        token.extend_from_slice(&number.to_le_bytes());
        token.extend_from_slice(&liveness.unwrap_or(-1).to_le_bytes());
        token.extend_from_slice(&owner.to_le_bytes());
        self.locks_that_end(closing, &mut token);
        ExecHandover { token, descriptor: liveness }
    }

    /// Passes the inherited files on to the next program, without those that the exec closes.
    fn pass_on_inherited(
        &self,
        number: u64,
        liveness: Option<Internal>,
        all: &[DescriptionRef],
        left: &[Given],
    ) -> (u64, Option<i32>) {
        let Some(liveness) = liveness.filter(|_| !left.is_empty()) else { return (0, None) };
        let all: Vec<Given> = all.iter().map(|held| given(open_of(&held.handle()))).collect();
        let files = closed(&all, left);
        if !files.is_empty() {
            on_liveness_socket(number, liveness.number(), |liveness| liveness.closed(&files));
        }
        match descriptors::move_up(liveness.number(), false) {
            Ok(fd) => (number, Some(fd)),
            Err(_) => (0, None),
        }
    }

    /// The same in a child between vfork and exec. The files of its parent are passed on as they were shared with the
    /// child. If the child has opened files or may have locks, or if the daemon has ended since, everything is shared anew.
    fn pass_on_as_child(&self, child: &Overlay, staying: &[Handle]) -> (u64, Option<i32>) {
        let number = local().given.load(Ordering::Relaxed);
        let liveness = local().liveness.load(Ordering::Relaxed).checked_sub(1).map(Internal::from_slot);
        let is_up = |socket: Internal| on_liveness_socket(number, socket.number(), LivenessSocket::is_up);
        let parents: BTreeSet<u64> = child.given.iter().map(|held| held.handle().0).collect();
        let (parents, own): (Vec<&Handle>, Vec<_>) =
            staying.iter().partition(|handle| parents.contains(&handle.0));
        // Its own come first, because a request has a limit.
        let left: Vec<Given> = own.iter().chain(&parents).map(|handle| given(open_of(handle))).collect();
        if child.locks.is_some() || !own.is_empty() || !liveness.is_some_and(is_up) {
            let passed = self.give_to_next_program(&left, child.locks.map(locks::owner_of), false);
            if let Some(passed) = passed {
                return passed;
            }
        }
        self.pass_on_inherited(number, liveness, &child.given, &left)
    }

    /// Shares the files with the next program, and the owner of the process's locks. `own`: the next program is this
    /// process's, and not that of a child.
    fn give_to_next_program(
        &self,
        left: &[Given],
        owner: Option<LockOwner>,
        own: bool,
    ) -> Option<(u64, Option<i32>)> {
        if left.is_empty() {
            return None;
        }
        let owner = owner.map(|_| Given { inode: InodeNumber::NONE, access: Access::default(), owner });
        let files: Vec<Given> = owner.into_iter().chain(left.iter().copied()).collect();
        let liveness = self.client().and_then(|vfs| shared(vfs, &files, own)).ok()?;
        if !own {
            liveness.name(raw::process().unsigned_abs());
        }
        let number = liveness.number;
        let fd = number_of(liveness);
        let passed = descriptors::move_up(fd, false);
        raw::close(fd);
        Some((number, Some(passed.ok()?)))
    }

    /// In the next program: takes over the token of [`Self::pass_on`].
    pub(super) fn take_from_previous_program(&self, token: &[u8]) {
        let Some((token, ended)) = token.split_first_chunk::<TOKEN_BYTES>() else { return };
        let eight = |at: usize| u64::from_le_bytes(token[at..at + 8].try_into().expect("eight bytes"));
        let fd = i32::from_le_bytes(token[8..12].try_into().expect("four bytes"));
        self.owner.store(eight(12), Ordering::Relaxed);
        self.locks_ended(ended);
        if fd >= 0
            && let Ok(kept) = Internal::keep(fd)
        {
            self.inherited.set(eight(0), kept.slot() + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_reported_with_its_last_file() {
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
    fn the_access_follows_from_the_flags() {
        assert_eq!(access_of(libc::O_WRONLY | libc::O_APPEND), Access { read: false, write: true });
        assert_eq!(access_of(libc::O_RDONLY | libc::O_DIRECTORY), Access { read: true, write: false });
        assert_eq!(access_of(libc::O_RDWR | libc::O_PATH), Access::default());
    }
}
