//! CC-NVM's decisions: who may hold which lease, who must give one up, in which order (Assise §3.3).
//!
//! Pure: `step(now, event) -> effects`; no IO, no clock, no randomness. Whoever runs it (`sharedfs`, the
//! simulator) carries the effects out and reports back with further events.
//!
//! Guarantees, whatever the events: a unit has one writer or any number of readers; a request is granted whole or
//! not at all; requests for a unit are granted in the order in which they came; a version is never given twice and
//! a later grant has a later version; a lease just granted is not asked back before its minimum hold. The locks on a file
//! are decided in one place: by one session, or by the lease manager.

#![forbid(unsafe_code)]

#[cfg(test)]
mod explore;
mod leases;
mod lock_leases;

pub use leases::{Effect, Event, Leases, Limits, Mode, Nanoseconds, SessionId, Ticket, Want};
pub use lock_leases::{Asked, LockLeases, LockLimits};
