//! Starts the routing of a process's calls, once.

use crate::local::local;
use crate::mount::Mount;
use crate::{alloc, descriptors, exec, fork, limits, paths, signals};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The library's memory.
#[global_allocator]
static MEMORY: alloc::Arena = alloc::Arena::new();

/// Gives back address space of the library that is not used yet (see [`alloc::Arena::cut`]).
pub fn give_back_memory(limit: u64, mapped: u64) {
    MEMORY.cut(limit, mapped);
}

/// The mount that this process sees, and its path.
pub struct Site {
    /// The implementation.
    pub mount: &'static dyn Mount,
    /// Absolute path of its root, without `.`, `..`, doubled slashes and a slash at the end.
    pub prefix: Vec<u8>,
}

static SITE: AtomicPtr<Site> = AtomicPtr::new(std::ptr::null_mut());

/// The mount, if this process has one.
#[inline]
pub fn site() -> Option<&'static Site> {
    // Acquire pairs with the Release of `serve`. SAFETY: set once, to a leaked box.
    unsafe { SITE.load(Ordering::Acquire).as_ref() }
}

/// The reason for which no call is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The prefix is not an absolute path below `/`.
    Prefix,
    /// The process has a mount already.
    Twice,
    /// The kernel lacks a necessary feature: its error number.
    Kernel(i32),
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Prefix => write!(f, "the mount's path is not an absolute path below /"),
            Self::Twice => write!(f, "the process has a mount already"),
            Self::Kernel(number) => write!(f, "the kernel refused with error {number}"),
        }
    }
}

impl std::error::Error for Refused {}

/// Routes the process's file calls below `prefix` to `mount` from now on. For a constructor of the preloaded
/// library, before the program has threads.
///
/// # Errors
/// The reason for which no call is served; the process is then unchanged.
pub fn serve(mount: &'static dyn Mount, prefix: &[u8]) -> Result<(), Refused> {
    local().inside(|| {
        let prefix = paths::normal(prefix).filter(|prefix| prefix.len() > 1).ok_or(Refused::Prefix)?;
        if site().is_some() {
            return Err(Refused::Twice);
        }
        // Now, because it takes long in a process with several threads. If it fails, operations execute their fences themselves.
        let _ = ipc::barrier::accept();
        fork::watch().map_err(|errno| Refused::Kernel(errno.0))?;
        crate::dispatch::quiet_panics();
        let site = Box::into_raw(Box::new(Site { mount, prefix }));
        // Pairs with the Acquire of `site`.
        SITE.store(site, Ordering::Release);
        paths::learn_umask();
        limits::learn_file_bytes();
        paths::clear_cwd();
        crate::symbols::resolve();
        #[cfg(target_arch = "x86_64")]
        let seen = {
            signals::catch_faults();
            crate::patch::install()
        };
        #[cfg(not(target_arch = "x86_64"))]
        let seen = false;
        if !seen {
            fork::note_unseen();
        }
        exec::inherit();
        debug_assert!(descriptors::internal_numbers().iter().all(|fd| *fd > 2));
        Ok(())
    })
}
