//! The FUSE mount: a thin adapter from the kernel's messages to a [`vfs::Engine`], for static programs, containers,
//! `mmap`, and other uses in which the kernel must see the files (Assise has only a library; the source here is the
//! kernel's protocol).
//!
//! Guarantees: each request is one operation of the engine, in the name of the user in the request, so its effects are
//! immediately those of the engine, also for programs that use the library. The kernel caches pages, attributes and
//! names only under leases of the engine, and is told to drop them before another session gets the leases (`units`,
//! `docs/mount.md`). If the engine has no leases, or the kernel is older than 6.16, it caches only pages of mapped
//! files. A request that waits for a lock does not block others, and ends when a signal arrives. A panic answers `EIO`
//! to one request.
//!
//! The message loop is our own: see `docs/decisions/0006-own-fuse-message-loop.md`.

#![forbid(unsafe_code)]

mod abi;
mod arrivals;
mod buffers;
mod callers;
mod device;
mod drops;
mod ends;
mod error;
mod files;
mod gateway;
mod guard;
mod handshake;
mod late_sync;
mod mounted;
mod nodes;
mod notices;
mod operations;
mod options;
mod orphans;
mod pages;
mod recalls;
mod reply;
mod retries;
#[cfg(test)]
mod schedules;
mod size_holds;
mod tally;
mod turn;
mod units;
mod waits;
mod write_order;

pub use device::{detach, unmount};
pub use error::Error;
pub use guard::{Ended, Guarding, guard};
pub use mounted::{Mounted, serve, serve_guarded};
pub use options::Options;
pub use turn::sharing;
