//! The users of a process, as far as they decide with which processes it may share memory.

use crate::raw;

/// The real, the effective and the saved user: the users that the process is or can become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Users([u32; 3]);

impl Users {
    /// The users of this process.
    pub fn now() -> Self {
        let mut users = [0u32; 3];
        let [real, effective, saved] = users.each_mut().map(|user| std::ptr::from_mut(user) as u64);
        // SAFETY: the kernel fills the three numbers, and cannot fail to.
        let _ = unsafe { raw::try_call(libc::SYS_getresuid, &[real, effective, saved]) };
        Self(users)
    }

    /// The users after an exec: the next program can only return to the real user.
    pub fn after_exec() -> Self {
        let Self([real, effective, _]) = Self::now();
        Self([real, effective, effective])
    }

    /// Whether processes with these users may continue to share memory with one whose users are `later`: it can still
    /// become each of them, and has not become root.
    pub fn may_share_with(self, later: Self) -> bool {
        let root = |users: Self| users.0.contains(&0);
        self.0.iter().all(|user| later.0.contains(user)) && (root(self) || !root(later))
    }
}

/// Whether an exec of this program file changes the user or group: the dynamic linker preloads no library then, and a
/// descriptor that is passed on would stay open in that program.
pub fn is_changed_by(program: i32) -> bool {
    let Some(status) = status(program) else { return false };
    // SAFETY: calls without pointers.
    let id = |call: i64| unsafe { raw::try_call(call, &[]) }.unwrap_or_default() as u32;
    let set = |bit: u32| status.st_mode & bit != 0;
    // SAFETY: a call without pointers.
    let kept = unsafe { raw::try_call(libc::SYS_prctl, &[libc::PR_GET_NO_NEW_PRIVS as u64, 0, 0, 0, 0]) };
    if kept == Ok(1) {
        return false;
    }
    (set(libc::S_ISUID) && status.st_uid != id(libc::SYS_geteuid))
        || (set(libc::S_ISGID) && set(libc::S_IXGRP) && status.st_gid != id(libc::SYS_getegid))
}

/// The status of a descriptor in the kernel.
pub fn status(fd: i32) -> Option<libc::stat> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the kernel fills the structure, of which all bits zero are a value too.
    unsafe {
        raw::try_call(libc::SYS_fstat, &[raw::number(fd), status.as_mut_ptr() as u64]).ok()?;
        Some(status.assume_init())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_changed_its_user_for_good_shares_no_memory() {
        let share = |before: [u32; 3], after: [u32; 3]| Users(before).may_share_with(Users(after));
        assert!(share([0, 0, 0], [0, 7, 0]) && share([0, 0, 0], [0, 0, 0]), "the saved user is still root");
        assert!(share([7, 7, 7], [7, 7, 7]));
        assert!(!share([0, 0, 0], [7, 7, 7]) && !share([0, 7, 0], [7, 7, 7]), "for good");
        assert!(
            !share([7, 7, 7], [7, 0, 0]) && !share([7, 7, 7], [0, 0, 0]),
            "root shares memory with no other user"
        );
        assert!(!share([7, 7, 7], [8, 8, 8]) && share([7, 7, 7], [7, 8, 7]));
    }
}
