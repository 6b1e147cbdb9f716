//! libhearth.so: routes a process's file calls to a mount (`ARCHITECTURE.md` §10).
//!
//! A preloaded library with two ways in, interposed symbols (`symbols`) and patched `syscall` instructions
//! (`patch`, `entry`), and one `dispatch`. What is not ours costs one bitmap load or a look at a path's first
//! bytes. What is ours is decoded (`calls`, by the `table` of all system calls) and answered by the [`mount`].
//!
//! Inside somebody's program it never exits, panics, prints, or uses the program's malloc: memory is its own
//! (`alloc`), system calls are its own (`raw`), signals wait until a thread is outside again (`signals`).
//!
//! **Locks.** None here: descriptor table, allocator and signal state are words changed by single instructions, so
//! a fork, a signal and a child between vfork and exec find them whole at any time.
//!
//! This crate holds the only statics of the project: a process has one descriptor table and one working directory.

#![allow(
    clippy::cast_possible_truncation,
    reason = "system calls are words that each call reads in its own way"
)]

// The unwinder from the archive: every program that is preloaded with us would else load libgcc_s.
#[cfg(target_arch = "x86_64")]
#[link(name = "gcc_eh", kind = "static", modifiers = "-bundle")]
unsafe extern "C" {}

mod alloc;
mod calls;
mod costs;
pub mod descriptors;
mod dispatch;
#[cfg(target_arch = "x86_64")]
mod entry;
mod exec;
mod fork;
mod local;
mod memory;
pub mod mount;
mod openings;
#[cfg(target_arch = "x86_64")]
mod patch;
mod paths;
mod preload;
pub mod raw;
mod signals;
pub mod start;
mod symbols;
mod table;
pub mod tree;

#[cfg(target_arch = "x86_64")]
pub use signals::wait_until_signal;
