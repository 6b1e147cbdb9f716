//! libhearth.so: routes a process's file calls to a mount (`ARCHITECTURE.md`, "The packages").
//!
//! A preloaded library. Calls reach it in two ways, through interposed symbols (`symbols`) and through patched
//! `syscall` instructions (`patch`, `entry`), and both end in `dispatch`. A call that does not concern the mount costs
//! one load from a bitmap or a comparison of the first bytes of a path. For the other calls, the `table` of all system
//! calls names a function that decodes the arguments (`calls`) and asks the [`mount`].
//!
//! In this crate, a descriptor, path or file is *ours* if the mount serves it, and a thread is *inside* while it runs
//! code of the library.
//!
//! The library runs in a process that belongs to another program. So it never exits, never lets a panic out, and never
//! uses the program's malloc: it has its own memory (`alloc`) and its own system calls (`raw`), and signals wait until
//! a thread is outside again (`signals`). It prints three lines, on stderr, each at most once: that the program does
//! not see the tree (`preload`), that no file of the mount works any more after a panic (`dispatch`), and that a call
//! needs a mount in the kernel (`tell`).
//!
//! **Locks.** The descriptor table, the allocator and the state of signals have no locks: they consist of words that
//! single instructions change, so a fork, a signal handler and a child between vfork and exec find them consistent at
//! any time. The lock for attaching comes before all locks of the LibFS, and is free in a forked child (`tree`). The
//! lock on the reason of a panic is only tried, because the panicking thread may hold any other lock (`dispatch`).
//! `slots` and `regions` describe their own locks.
//!
//! The state of a mount in a process is in statics of this crate: there is one descriptor table and one working
//! directory. Other crates have statics only for state that is independent of a mount: the handler of faults, the
//! features of the processor and a page of zeros (`pmem`), the simulator's hook (`ipc`).

#![allow(
    clippy::cast_possible_truncation,
    reason = "system calls are words whose meaning depends on the call"
)]

// The unwinder is linked statically: otherwise every program with this library would also load libgcc_s.
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
mod kernel_links;
mod limits;
mod local;
mod memory;
pub mod mount;
#[cfg(target_arch = "x86_64")]
mod patch;
mod paths;
mod preload;
mod process_lock;
mod protections;
pub mod raw;
mod real;
mod regions;
mod signals;
mod slots;
pub mod start;
mod symbols;
mod table;
mod tell;
pub mod tree;
mod walk;

#[cfg(target_arch = "x86_64")]
pub use signals::wait_until_signal;
