//! The processors of the processes of a measurement. Processes that are compared get the same ones in the same run: on a
//! machine with two processors, program, head and copy share them in one way or another, which changes a time by half.

use crate::error::{Error, Result};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::fs;

/// A processor for each process of an fsync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    pub program: usize,
    pub head: usize,
    pub copy: usize,
}

impl Placement {
    /// The placements to measure on the processors that this process may use: each process on its own, where there are
    /// three of them; otherwise all in which no processor is idle.
    ///
    /// # Errors
    /// The kernel does not tell them.
    pub fn all() -> Result<Vec<Self>> {
        let allowed = sched_getaffinity(None).map_err(|why| Error::new(format!("processors: {why}")))?;
        let processors: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
        let of = |[program, head, copy]: [usize; 3]| Self {
            program: processors[program],
            head: processors[head],
            copy: processors[copy],
        };
        Ok(match processors.len() {
            0 | 1 => vec![of([0, 0, 0])],
            2 => [[0, 1, 0], [1, 0, 0], [1, 1, 0]].map(of).to_vec(),
            _ => vec![of([0, 1, 2])],
        })
    }
}

/// Keeps all threads of a process on a processor; with none, this process's own threads.
///
/// # Errors
/// The process is gone, or the kernel refuses.
pub fn hold(process: Option<Pid>, processor: usize) -> Result<()> {
    let failed = |why: &dyn std::fmt::Display| Error::new(format!("cannot choose a processor: {why}"));
    let mut set = CpuSet::new();
    set.set(processor);
    let name = process.map_or("self".to_owned(), |pid| pid.as_raw_nonzero().to_string());
    let mut held = Vec::new();
    // A thread that begins meanwhile has the processor of the thread that began it: the list is read until it says nothing new.
    loop {
        let threads = fs::read_dir(format!("/proc/{name}/task")).map_err(|why| failed(&why))?;
        let threads: Vec<i32> =
            threads.flatten().filter_map(|thread| thread.file_name().to_str()?.parse().ok()).collect();
        let new: Vec<i32> = threads.into_iter().filter(|thread| !held.contains(thread)).collect();
        if new.is_empty() {
            return Ok(());
        }
        for thread in new {
            match sched_setaffinity(Pid::from_raw(thread), &set) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => held.push(thread),
                Err(why) => return Err(failed(&why)),
            }
        }
    }
}
