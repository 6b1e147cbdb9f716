//! The FUSE mount: a thin adapter from the kernel's messages to an [`vfs::Engine`], for static programs, containers,
//! `mmap`, and whatever else needs the kernel to see the files (Assise has only a library; the kernel's protocol is
//! the source here).
//!
//! It guarantees: each request is one operation of the engine, made for the user whom the request names, so that what
//! it sees and does is what the engine says, at once, whichever door others come through: the kernel keeps no data
//! (direct IO), no names and no attributes (times of zero). A request that waits for a lock keeps no other from being
//! served, and ends when a signal comes. A panic answers `EIO` to one request.
//!
//! What the kernel does keep is pages of files that are mapped. On one machine they agree with `read` and `write`
//! through the mount; what comes in through another door is seen when the page is read anew: when the file is
//! opened, or when the kernel asks for its attributes and finds size or time changed.
//!
//! The message loop is our own: see `docs/decisions/0006-own-fuse-message-loop.md`.

#![forbid(unsafe_code)]

mod abi;
mod arrivals;
mod callers;
mod device;
mod error;
mod files;
mod gateway;
mod mounted;
mod nodes;
mod operations;
mod options;
mod retries;
mod turn;
mod waits;

pub use device::{detach, unmount};
pub use error::Error;
pub use mounted::{Mounted, serve};
pub use options::Options;
pub use turn::sharing;
