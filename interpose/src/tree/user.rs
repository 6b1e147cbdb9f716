//! A process that becomes another user: the kernel tells SharedFS who a session is of when it begins, so the process goes on
//! in another session. What it has open it gives away and comes for, as a program does over an exec ([`super::given`]).
//!
//! A user is the process's, as in POSIX: of threads that act as different users (by bare system calls; the C library
//! changes all of them together), the last one that changed counts.

use super::given::{given, open_files};
use super::{Client, Tree, errno_of, open_of};
use crate::descriptors::Held;
use crate::mount::Result;
use format::InodeNumber;
use libfs::LibFs;
use libfs::share::Given;
use std::sync::atomic::Ordering;
use vfs::engine::{Access, LockOwner};
use vfs::{Caller, Vfs};

/// Supplementary groups of a process, at most (NGROUPS_MAX).
const GROUPS_MAX: usize = 1 << 16;

/// The user that this process acts as on files, and the one by which `access` asks.
pub(super) fn credentials() -> (Caller, Caller) {
    let id = |number: i64| {
        // SAFETY: calls without pointers.
        unsafe { crate::raw::try_call(number, &[]) }.unwrap_or(u64::from(u32::MAX)) as u32
    };
    let groups = groups();
    let real = Caller { uid: id(libc::SYS_getuid), gid: id(libc::SYS_getgid), groups: groups.clone() };
    (Caller { uid: id(libc::SYS_geteuid), gid: id(libc::SYS_getegid), groups }, real)
}

/// The process's supplementary groups, as many as there are.
fn groups() -> Vec<u32> {
    let into = |groups: &mut [u32]| {
        let arguments = [groups.len() as u64, groups.as_mut_ptr() as u64];
        // SAFETY: the kernel writes at most so many numbers, and none if it is asked for their count by a zero.
        unsafe { crate::raw::try_call(libc::SYS_getgroups, &arguments) }.map(|count| count as usize)
    };
    let mut groups = vec![0; into(&mut []).unwrap_or(0)];
    let count = into(&mut groups).or_else(|_| {
        // They became more meanwhile.
        groups.resize(GROUPS_MAX, 0);
        into(&mut groups)
    });
    // None where a sandbox refuses the call: no right comes from a group then.
    groups.truncate(count.unwrap_or(0));
    groups
}

/// Tells a tree that was just attached who the process is, if it is not one user alone.
pub(super) fn tell_real(vfs: &Vfs<LibFs>, (caller, real): (Caller, Caller)) {
    if caller != real {
        vfs.set_caller(caller, real);
    }
}

impl Tree {
    /// The user may be another one from now on: what every call uses is taken away until somebody has looked.
    pub(super) fn note_user(&self) {
        // Release: pairs with the Acquire of whoever looks; it comes first, so that who looks now looks once more.
        self.users.fetch_add(1, Ordering::Release);
        self.client.store(std::ptr::null_mut(), Ordering::Release);
    }

    /// Goes on as the user who the process is now. The turn to attach is the caller's, who drops `held` without it: the last
    /// use of a file ends it, which is a call of its own.
    pub(super) fn become_user(&self, client: &Client, held: &mut Vec<Held>) -> Result<()> {
        let now = credentials();
        if *client.vfs.caller() == now.0 {
            client.vfs.set_caller(now.0, now.1);
            return Ok(());
        }
        let engine = client.vfs.engine();
        let from = held.len();
        held.extend(open_files());
        let id = self.owner.load(Ordering::Relaxed);
        let owner = Some(LockOwner::Process { id, pid: crate::raw::process().unsigned_abs() });
        let mut files = vec![Given { inode: InodeNumber::NONE, access: Access::default(), owner }];
        files.extend(held[from..].iter().map(|held| given(open_of(&held.handle()))));
        match engine.share(&files, true) {
            Ok(lifeline) => engine.begin_anew(lifeline.number, &files).map_err(errno_of)?,
            // What was not had any more cannot be given: each file is opened anew, by its path, when it is used.
            Err(_) => {
                engine.begin_anew(0, &[]).map_err(errno_of)?;
                self.era.fetch_add(1, Ordering::Relaxed);
            }
        }
        client.vfs.set_caller(now.0, now.1);
        Ok(())
    }
}
