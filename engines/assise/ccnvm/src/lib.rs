//! The decisions of the cache-coherence protocol CC-NVM (Assise §3.3): which session may hold which lease, which holder
//! must give one up, and in which order.
//!
//! The tables are pure state machines, `step(now, event) -> effects`, without IO, clock or randomness. The caller
//! (`sharedfs`, the simulator) executes the effects and reports the results as further events.
//!
//! Guarantees for any sequence of events: a unit has one writer or any number of readers; a request is granted as a
//! whole or not at all; requests for a unit are granted in the order of their arrival; each grant has a new, higher
//! version; a new lease is not revoked before its minimum hold. The locks on a file are decided in one place at a
//! time: in one session, or by the lease manager.

#![forbid(unsafe_code)]

#[cfg(test)]
mod explore;
mod leases;
mod lock_leases;

pub use leases::{Effect, Event, Leases, Limits, Mode, Nanoseconds, SessionId, Ticket, Want};
pub use lock_leases::{Asked, LockLeases, LockLimits};
