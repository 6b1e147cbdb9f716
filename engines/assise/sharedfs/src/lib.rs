//! The daemon half of Assise: ledger, leases, digest, recovery (Assise §3.2 to §3.4).
//!
//! SharedFS owns the shared area of a node and decides who may change what: it hands out leases and takes them back,
//! keeps the ledger that says so, and turns the update logs of processes, which it does not trust, into the area,
//! record by record, as far as ledger and permissions allow. After a crash it does the same with the logs it finds.
//!
//! Guarantees: the records that a LibFS committed before its log was sealed are in the area, in order, up to the first
//! one for which it lacked the lease or the permission; the changes that one session made under a lease are in the area
//! before another session gets the lease; no bytes that a process writes into memory, log or ring make the daemon panic
//! or change data that its user may not change.
//!
//! Locks: the area's, then the state's (`state` says more). The state's is never held across a wait or a commit.

#![forbid(unsafe_code)]

mod abandon;
mod accept;
mod attach;
mod background;

mod commits;
mod compare;
mod config;
mod contents;
mod copies;
mod copy_positions;
mod counted_copies;
mod daemon;
mod damage;
mod detached;
mod digest;
mod error;
mod fair;
mod generations;
mod import;
mod imported;
mod large_pages;
mod leases;
mod ledger;
mod level;
mod live_repair;
mod lock_leases;
mod lock_questions;
mod lock_requests;
mod locks;
mod notes;
mod pace;
mod passes;
mod pinned;
mod pool_space;
mod programs;
mod ready;
mod recalls;
mod references;
mod register;
mod repair;
mod replay;
mod replicate;
mod room;
mod serve;
mod session;
mod session_end;
mod share;
mod short;
mod standby;
mod state;
mod step_down;
mod sums;
mod sync;
mod take_over;
mod upkeep;
mod walk;

pub use accept::{ListenerSettings, reject_all, reject_all_on_standby};
pub use compare::{Compared, Difference, Unequal};
pub use config::Config;
pub use copies::CopyState;
pub use daemon::{Attached, Daemon, Format, format_of, format_pool, is_pool};
pub use damage::check;
pub use error::Error;
pub use import::TreeSent;
pub use mirror::logs::{RING_START, log_file};
pub use programs::Program;
pub use repair::Repaired;
pub use replay::apply::CutReason;
pub use replay::authorize::Refusal;
pub use replay::script::{Executed, execute_ledger};
pub use serve::Answer;
pub use standby::{Standby, StandbyState, Term};
pub use state::{CacheWatch, Termination};
pub use take_over::Recovered;
