//! The `syscall` instructions of libc and ld.so become jumps to trampolines: that is how the calls which libc makes
//! inside itself (stdio, `opendir`, `posix_spawn`) reach us.
//!
//! - `image` finds the two libraries in memory, by the dynamic linker's own list, with their build-ids.
//! - `plan` decodes their code and decides, once for each build of a library, which instructions move where.
//! - `cache` keeps plans in files, so that a start does not decode.
//! - `place` puts a plan into effect: trampolines within reach, then jumps.
//! - `others` looks whether all other code leaves system calls to those two.
//!
//! Instructions whose call can never concern a file are left alone, and `rt_sigreturn` always. Whatever fails (no
//! memory in reach, a policy against it) leaves the library as it was: the symbols still work.
//!
//! Idea: `SUBSTRATE.md` §3 (e2); syscall_intercept's windows.

mod cache;
mod image;
mod others;
mod place;
mod plan;

use crate::memory::{Buffer, Use};
use place::Outcome;

/// Patches what can be patched; to be called before the program has threads. False if somebody makes calls, clones among
/// them, that come by nobody.
pub fn install() -> bool {
    let patches = patch();
    patches.patched != 0 && patches.left == 0 && !others::any_calls()
}

/// Whether code that is there from now on, in executable memory, may make calls that come by nobody: if it can be
/// changed or is no file's, nobody knows what it will be.
pub fn calls_come_with(start: u64, bytes: u64, protection: u64, is_file: bool) -> bool {
    const CODE: u64 = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    if protection & CODE != CODE || protection & libc::PROT_WRITE as u64 != 0 || !is_file {
        return true;
    }
    // What of it cannot be read cannot be run.
    Buffer::new(start, bytes, Use::Source)
        .is_ok_and(|code| code.with_source(|pieces| pieces.iter().any(|piece| others::has_call(piece))))
}

fn patch() -> Outcome {
    let mut total = Outcome::default();
    if threads() != Some(1) {
        return total;
    }
    let libraries = image::libraries();
    if libraries.len() < image::COUNT {
        // One that cannot be told from others: of what it holds nothing is known.
        total.left += 1;
    }
    for library in libraries {
        let Some(plan) = cache::load(&library).or_else(|| plan_anew(&library)) else { continue };
        let outcome = place::apply(&library, &plan);
        total.patched += outcome.patched;
        total.left += outcome.left;
    }
    total
}

fn plan_anew(library: &image::Library) -> Option<plan::Plan> {
    let plan = plan::Plan::of(library);
    cache::store(library, &plan);
    Some(plan)
}

/// How many threads the process has.
fn threads() -> Option<u64> {
    // SAFETY: a structure of integers.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    let path = c"/proc/self/task".as_ptr() as u64;
    let buffer = (&raw mut status) as u64;
    let dir = crate::raw::number(libc::AT_FDCWD);
    // SAFETY: path and structure live across the call.
    unsafe { crate::raw::try_call(libc::SYS_statx, &[dir, path, 0, libc::STATX_NLINK.into(), buffer]) }
        .ok()?;
    // The folder's own two names, and one for each thread.
    u64::from(status.stx_nlink).checked_sub(2)
}
