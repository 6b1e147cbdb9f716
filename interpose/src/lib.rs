//! libhearth.so: routes a process's file calls to a mount (`ARCHITECTURE.md`, "The packages").
//!
//! A preloaded library with two ways in, interposed symbols (`symbols`) and patched `syscall` instructions
//! (`patch`, `entry`), and one `dispatch`. What is not ours costs one bitmap load or a look at a path's first
//! bytes. What is ours is decoded (`calls`, by the `table` of all system calls) and answered by the [`mount`].
//!
//! Inside somebody's program it never exits, never lets a panic out, and never uses the program's malloc: memory is its
//! own (`alloc`), system calls are its own (`raw`), signals wait until a thread is outside again (`signals`). It prints
//! three lines, on stderr, each at most once: that the program does not see the tree (`preload`), that no file of the
//! mount works any more, after a panic (`dispatch`), and that a call needs a mount of the kernel's (`tell`).
//!
//! **Locks.** Descriptor table, allocator and signal state have none: they are words changed by single instructions, so a
//! fork, a signal and a child between vfork and exec find them whole at any time. Two there are: the turn to
//! attach, which is waited for, comes before all locks of the LibFS, and is free in a forked child (`tree`); and that on
//! the reason of a panic, which is only tried, by whoever has which locks (`dispatch`).
//!
//! The state of a mount in a process lies in statics of this crate: there is one descriptor table and one working
//! directory. Other crates have statics for what knows of no mount: the handler of faults, what the processor can and a
//! page of zeros (`pmem`), the simulator's hook (`ipc`).

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
mod identity;
mod limits;
mod local;
mod memory;
pub mod mount;
mod openings;
#[cfg(target_arch = "x86_64")]
mod patch;
mod paths;
mod preload;
pub mod raw;
mod real;
mod regions;
mod signals;
pub mod start;
mod symbols;
mod table;
mod tell;
pub mod tree;

#[cfg(target_arch = "x86_64")]
pub use signals::wait_until_signal;
