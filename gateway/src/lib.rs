//! The FUSE mount: a thin adapter from the kernel's messages to an [`vfs::Engine`], for static programs, containers,
//! `mmap`, and whatever else needs the kernel to see the files (Assise has only a library; the kernel's protocol is
//! the source here).
//!
//! It guarantees: each request is one operation of the engine, made for the user whom the request names, so that what
//! it sees and does is what the engine says, at once, whichever door others come through. What the kernel keeps of pages,
//! attributes and names it keeps under leases of the engine, and is told to drop it before they go to others ([`units`],
//! `docs/mount.md`). With an engine that has no leases to give, or a kernel before 6.16, it keeps nothing but pages of files
//! that are mapped. A request that waits for a lock keeps no other from being served, and ends when a signal comes. A panic
//! answers `EIO` to one request.
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
mod mounted;
mod nodes;
mod notices;
mod operations;
mod options;
mod recalls;
mod reply;
mod retries;
#[cfg(test)]
mod schedules;
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
