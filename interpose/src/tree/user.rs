//! A process that changes its user. The kernel tells SharedFS the user of a session when the session begins, so the
//! process continues with another session. It shares its open files with the new session, as a program does over an
//! exec ([`super::given`]).
//!
//! The user belongs to the process, as in POSIX. If threads act as different users (by bare system calls; the C library
//! changes all threads together), the last change counts.

use super::given::{given, open_files};
use super::{Client, Tree, errno_of, open_of};
use crate::descriptors::DescriptionRef;
use crate::mount::Result;
use format::InodeNumber;
use libfs::LibFs;
use libfs::share::Given;
use std::sync::atomic::Ordering;
use vfs::engine::{Access, LockOwner};
use vfs::{Caller, Vfs};

/// Limit of supplementary groups of a process (NGROUPS_MAX).
const GROUPS_MAX: usize = 1 << 16;

/// The user as whom this process acts on files, and the user for whom `access` asks.
pub(super) fn credentials() -> (Caller, Caller) {
    let id = |number: i64| {
        // SAFETY: calls without pointers.
        unsafe { crate::raw::try_call(number, &[]) }.unwrap_or(u64::from(u32::MAX)) as u32
    };
    let groups = groups();
    let real = Caller { uid: id(libc::SYS_getuid), gid: id(libc::SYS_getgid), groups: groups.clone() };
    (Caller { uid: id(libc::SYS_geteuid), gid: id(libc::SYS_getegid), groups }, real)
}

/// All supplementary groups of the process.
fn groups() -> Vec<u32> {
    let into = |groups: &mut [u32]| {
        let arguments = [groups.len() as u64, groups.as_mut_ptr() as u64];
        // SAFETY: the kernel writes at most this many numbers, and none if the count is zero.
        unsafe { crate::raw::try_call(libc::SYS_getgroups, &arguments) }.map(|count| count as usize)
    };
    let mut groups = vec![0; into(&mut []).unwrap_or(0)];
    let count = into(&mut groups).or_else(|_| {
        // The number of groups has grown meanwhile.
        groups.resize(GROUPS_MAX, 0);
        into(&mut groups)
    });
    // No groups if a sandbox refuses the call: no right comes from a group then.
    groups.truncate(count.unwrap_or(0));
    groups
}

/// Sets the caller of a tree that was just attached, if the real user of the process is another one.
pub(super) fn tell_real(vfs: &Vfs<LibFs>, (caller, real): (Caller, Caller)) {
    if caller != real {
        vfs.set_caller(caller, real);
    }
}

impl Tree {
    /// The user may be another one from now on: takes away the client of the calls, until a call has checked the user.
    pub(super) fn note_user(&self) {
        // Release: pairs with the Acquire in `attach`. It comes first, so that a thread that is checking now checks
        // once more.
        self.users.fetch_add(1, Ordering::Release);
        self.client.store(std::ptr::null_mut(), Ordering::Release);
    }

    /// Continues as the current user of the process. The caller holds the lock for attaching, and drops `held` without
    /// it: the drop of the last reference closes the file, which is a call of its own.
    pub(super) fn become_user(&self, client: &Client, held: &mut Vec<DescriptionRef>) -> Result<()> {
        let now = credentials();
        if *client.vfs.caller() == now.0 {
            client.vfs.set_caller(now.0, now.1);
            return Ok(());
        }
        self.credentials.fetch_add(1, Ordering::Relaxed);
        let id = self.owner.load(Ordering::Relaxed);
        let owner = Some(LockOwner::Process { id, pid: crate::raw::process().unsigned_abs() });
        let mut listed = || {
            let from = held.len();
            held.extend(open_files());
            let mut files = vec![Given { inode: InodeNumber::NONE, access: Access::default(), owner }];
            files.extend(held[from..].iter().map(|held| given(open_of(&held.handle()))));
            files
        };
        if !client.vfs.engine().become_user(&mut listed).map_err(errno_of)? {
            // The daemon does not know these files any more: each is opened anew by its path when it is used.
            self.era.fetch_add(1, Ordering::Relaxed);
        }
        client.vfs.set_caller(now.0, now.1);
        Ok(())
    }
}
