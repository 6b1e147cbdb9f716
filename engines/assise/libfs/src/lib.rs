//! The client half of Assise, inside the program that uses the file system: its update log, the index of undigested
//! data, caches, and the leases under which they are valid (Assise §3.2, §3.3).
//!
//! It gives the program the guarantees of `vfs::Engine`: every operation takes effect atomically at one instant, and an
//! operation that has returned survives the program. It starts no thread and prints nothing. In steady state a write
//! allocates no memory and makes no call.

#![forbid(unsafe_code)]

pub mod engine;
mod entry_cache;
pub mod error;
pub mod session;
pub mod share;
pub mod socket;

mod allocate;
mod apply;
mod attributes;
mod calls;
mod directory;
mod doubt;
mod extents;
mod facade;
mod files;
mod files_ahead;
mod lease_cache;
mod local_locks;
mod locks;
mod log_memory;
mod lookup;
mod losses;
mod names;
mod need;
mod nodes;
mod outside;
mod overlay;
mod purging;
mod read;
mod records;
mod releases;
mod room;
mod state;
mod words;
mod write;

pub use engine::{FIRST_WAIT, LibFs, Limits};
pub use error::Error;
pub use session::{Attachment, Connector, Link};
