//! Runs the real parts under one seed, crashes them, judges; never shipped.
//!
//! [`Simulation`] is the machine: simulated processes whose threads are real threads of which exactly one runs. They
//! switch where the code under test reaches a seam or touches a shared word, and nowhere else. The next thread, the
//! clock and the values of `random` come from the seed, so a seed is a schedule that can be run again. Idea: neon's
//! `desim`.
//!
//! It cannot show reorderings of memory accesses within one processor: `ipc`'s loom tests do that.

#![forbid(unsafe_code)]

pub mod host;
pub mod place;
pub mod random;
pub mod step;
pub mod world;

pub use host::{SimHost, Simulation, elsewhere};
pub use step::{Ended, Limits, Stuck, ThreadReport};
