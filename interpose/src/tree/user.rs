//! A process that becomes another user: the kernel tells SharedFS who a session is of when it begins, so the process goes on
//! in another session. What it has open it gives away and comes for, as a program does over an exec ([`super::given`]).
//!
//! A user is the process's, as in POSIX: of threads that act as different users (by bare system calls; the C library
//! changes all of them together), the last one that changed counts.

use super::given::{given, open_files};
use super::{Client, Tree, errno_of, open_of};
use crate::mount::Result;
use format::InodeNumber;
use libfs::LibFs;
use libfs::share::Given;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use vfs::engine::{Access, LockOwner};
use vfs::{Caller, Vfs};

/// What a change of the user leaves to the next call on the tree.
#[derive(Debug)]
pub(super) struct Users<T> {
    /// The client as it was; none if nothing is to be done.
    former: AtomicPtr<T>,
    changes: AtomicU32,
}

impl<T> Default for Users<T> {
    fn default() -> Self {
        Self { former: AtomicPtr::default(), changes: AtomicU32::new(0) }
    }
}

impl<T> Users<T> {
    /// Changes so far; one more may make what was found out since untrue.
    pub fn changes(&self) -> u32 {
        // Acquire: pairs with the Release in `note`.
        self.changes.load(Ordering::Acquire)
    }

    /// A change; what every call uses is taken away until somebody has looked.
    pub fn note(&self, client: &AtomicPtr<T>) {
        self.changes.fetch_add(1, Ordering::Release);
        // Acquire and Release: pairs with the loads and stores of the client elsewhere.
        let former = client.swap(ptr::null_mut(), Ordering::AcqRel);
        if !former.is_null() {
            self.former.store(former, Ordering::Release);
        }
    }

    /// The client that a change took away.
    pub fn take(&self) -> *mut T {
        self.former.swap(ptr::null_mut(), Ordering::AcqRel)
    }

    /// Nothing came of it yet.
    pub fn put_back(&self, former: *mut T) {
        self.former.store(former, Ordering::Release);
    }

    /// Whether a client waits for somebody to look.
    pub fn is_unsettled(&self) -> bool {
        // Acquire: pairs with the stores above.
        !self.former.load(Ordering::Acquire).is_null()
    }
}

/// The user that this process acts as on files, and the one by which `access` asks.
pub(super) fn credentials() -> (Caller, Caller) {
    let id = |number: i64| {
        // SAFETY: calls without pointers.
        unsafe { crate::raw::try_call(number, &[]) }.unwrap_or(u64::from(u32::MAX)) as u32
    };
    let mut groups = [0u32; 1024];
    // SAFETY: the kernel writes at most so many numbers.
    let count = unsafe { crate::raw::try_call(libc::SYS_getgroups, &[1024, groups.as_mut_ptr() as u64]) };
    let groups = groups[..count.unwrap_or(0) as usize].to_vec();
    let real = Caller { uid: id(libc::SYS_getuid), gid: id(libc::SYS_getgid), groups: groups.clone() };
    (Caller { uid: id(libc::SYS_geteuid), gid: id(libc::SYS_getegid), groups }, real)
}

/// Tells the tree who the process is.
pub(super) fn tell(vfs: &Vfs<LibFs>, (caller, real): (Caller, Caller)) {
    if *vfs.caller() != caller || caller != real {
        vfs.set_caller(caller, real);
    }
}

impl Tree {
    /// Goes on as the user who the process is now. The turn to attach is the caller's.
    pub(super) fn become_user(&self, client: &Client) -> Result<()> {
        let now = credentials();
        if *client.vfs.caller() == now.0 {
            tell(&client.vfs, now);
            return Ok(());
        }
        let engine = client.vfs.engine();
        let mut files: Vec<Given> = open_files().iter().map(|held| given(open_of(&held.handle()))).collect();
        let id = self.owner.load(Ordering::Relaxed);
        let owner = Some(LockOwner::Process { id, pid: crate::raw::process().unsigned_abs() });
        files.push(Given { inode: InodeNumber::NONE, access: Access::default(), owner });
        let lifeline = engine.share(&files, true).map_err(errno_of)?;
        engine.begin_anew(lifeline.number).map_err(errno_of)?;
        tell(&client.vfs, now);
        Ok(())
    }
}
