//! Replaces the `syscall` instructions of libc and ld.so by jumps to trampolines. In this way the library also sees
//! calls that libc makes by itself (stdio, `opendir`, `posix_spawn`).
//!
//! - `image` finds the two libraries in memory, by the dynamic linker's own list, with their build-ids.
//! - `plan` decodes their code and decides, once for each build of a library, which instructions move into a
//!   trampoline.
//! - `cache` keeps plans in files, so that a start need not decode.
//! - `apply` applies a plan: it writes trampolines within reach, then jumps.
//! - `others` checks whether all other code leaves system calls to these two libraries; `searched` remembers the
//!   result for each program.
//! - `rings` patches the calls of other code that create an `io_uring`: liburing of several distributions makes its calls
//!   itself.
//!
//! Instructions whose call can never concern a file are not patched, and neither is `rt_sigreturn`. Any failure (no
//! memory in reach, a policy against it) leaves the library unchanged; the symbols still work.
//!
//! Idea: the windows of syscall_intercept.

mod apply;
mod cache;
mod image;
mod others;
mod plan;
mod rings;
mod searched;

use crate::memory::{Buffer, Use};
use apply::Outcome;

/// Patches everything that can be patched, before the program has threads. False if some code may make calls, including
/// clones, that the library does not see.
pub fn install() -> bool {
    let patches = patch();
    let others = others::any_calls();
    patches.patched != 0 && patches.left == 0 && !others
}

/// Patches code that has just been mapped executable, of which nothing has run yet. True if it may make calls that the
/// library does not see. If it is writable, or is not a private mapping of a file, its future contents are unknown, so it
/// may.
pub fn calls_come_with(start: u64, bytes: u64, protection: u64, is_file: bool) -> bool {
    const CODE: u64 = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    if protection & CODE != CODE || protection & libc::PROT_WRITE as u64 != 0 || !is_file {
        return true;
    }
    // Memory that cannot be read cannot be executed.
    Buffer::new(start, bytes, Use::Source).is_ok_and(|code| {
        code.with_source(|pieces| {
            let with_calls = pieces.iter().filter(|piece| others::has_call(piece));
            // SAFETY: no thread knows the new mapping.
            with_calls.map(|piece| unsafe { rings::patch(piece) }).count() > 0
        })
    })
}

fn patch() -> Outcome {
    let mut total = Outcome::default();
    if threads() != Some(1) {
        return total;
    }
    let libraries = image::libraries();
    if libraries.len() < image::COUNT {
        // A library without a build id was not found, so nothing is known about its code.
        total.left += 1;
    }
    for library in libraries {
        let mut contents = Vec::new();
        let plan = cache::load(&library, &mut contents).unwrap_or_else(|| plan_anew(&library));
        let outcome = apply::apply(&library, &plan);
        total.patched += outcome.patched;
        total.left += outcome.left;
    }
    total
}

fn plan_anew(library: &image::Library) -> plan::Plan<'static> {
    let plan = plan::Plan::of(library);
    cache::store(library, &plan);
    plan
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
    // The link count of the folder is two, plus one for each thread.
    u64::from(status.stx_nlink).checked_sub(2)
}
