//! Sees to it that a copy whose pool was removed says so at once, and does not count until a program writes what it would need
//! the pool for: meanwhile it would be believed to have all that was acknowledged, and could not be opened after its end.
//!
//! The pool of a node that leads is watched by [`crate::commands::daemon::watch_pool`].

use super::member::Member;
use crate::commands::daemon::{POOL_LOOK, pool_files, removed, spawn};
use crate::error::Result;
use ipc::{Host, SystemHost, Word};
use std::sync::Arc;

/// Starts the thread that looks.
///
/// # Errors
/// The pool is gone, or no thread is left.
pub fn begin(member: &Arc<Member>) -> Result<()> {
    let mut pool = pool_files(&member.begun.node)?;
    // A tree that is taken in has a ledger of its own.
    pool.truncate(2);
    let member = member.clone();
    spawn("copy-pool", move || {
        loop {
            if let Some(why) = removed(&pool).filter(|_| member.now.lock().head.is_none()) {
                return member.begun.standby.give_up(&why);
            }
            SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(POOL_LOOK)));
        }
    })
}
