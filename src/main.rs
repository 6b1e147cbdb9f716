//! The program `hearth`: bring a cluster on this machine up and down, run programs on it, look at it, verify it.

#![forbid(unsafe_code)]
// They panic when the output has no reader: `say` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod chain;
mod cluster;
mod cluster_lock;
mod commands;
mod daemon_lock;
mod disk;
mod error;
mod floor;
mod found;
mod health;
mod key;
mod limits;
mod log_file;
mod making;
mod mapped;
mod measure;
mod mountpoint;
mod obstacles;
mod operations;
mod placement;
mod pool_files;
mod pool_space;
mod presence;
mod process;
mod program;
mod programs;
mod say;
mod settings;
mod spare;
mod standby_lock;
mod status;
mod sustained;
mod syncs;

use clap::Parser;
use mimalloc::MiMalloc;
use std::process::ExitCode;

/// A daemon frees in one thread what it allocated in another, for months.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    // While there is one thread: a mount writes without waiting for itself.
    let _ = ipc::barrier::accept();
    commands::run(commands::Arguments::parse())
}
