//! The lock that tells that standby programs run at a node (`hearth run --standby`).
//!
//! The parent of each such program holds it, shared, from before it starts the program until the program and its descendants
//! have ended. A daemon that gives the lead away takes it alone, so it waits for all of these programs, also for those that have
//! not used the tree and have no session; and no parent starts a program until the lead has moved. The kernel holds the lock for
//! as long as the parent lives: a daemon that starts again has nothing to learn, and a parent that is killed leaves nothing behind.

use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use crate::process::{Process, descendants, subcommand, with_lock};
use ipc::sync::Ordering;
use ipc::{Host, SystemHost, Word};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Signal, kill_process};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often killed programs are looked at, and how often at most.
const KILLED_LOOK: Duration = Duration::from_millis(5);
const KILLED_LOOKS: u32 = 200;

/// The lock as a daemon has it, not taken.
#[derive(Debug)]
pub struct StandbyLock {
    file: File,
    path: PathBuf,
    /// A thread has it. The kernel knows one holder for all threads.
    taken: Word,
}

/// While it lives, no standby program runs at the node.
#[derive(Debug)]
pub struct NoStandbyPrograms<'a>(&'a StandbyLock);

/// While it lives, a standby program may run at the node. For the parent of one.
#[derive(Debug)]
pub struct StandbyProgramLock {
    _file: File,
}

impl StandbyLock {
    /// Opens it, and makes its file. For the daemon of the node, which does this before parents may take it: one that root
    /// started would make a file that the node's user cannot open.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn open(cluster: &Cluster, node: &Node) -> Result<Self> {
        let path = path(cluster, node);
        // Other users must not hold it.
        let opened = File::options().create(true).write(true).truncate(false).mode(0o600).open(&path);
        Ok(Self { file: opened.map_err(Error::at("open", &path))?, path, taken: Word::new(0) })
    }

    /// Takes it alone; none while a standby program runs, or another thread has it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn take(&self) -> Result<Option<NoStandbyPrograms<'_>>> {
        // Acquire: pairs with the Release of the thread that had it.
        if self.taken.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Ok(None);
        }
        match try_lock(&self.file, FlockOperation::NonBlockingLockExclusive, &self.path) {
            Ok(true) => Ok(Some(NoStandbyPrograms(self))),
            refused => {
                self.taken.store(0, Ordering::Release);
                refused.map(|_| None)
            }
        }
    }

    /// Kills the standby programs whose parents have not ended them, and these parents: they may be stopped. Those of other users
    /// go on if this one may not kill them.
    pub fn kill_programs(&self) {
        for parent in self.parents().iter().filter(|parent| is_parent(parent)) {
            // It starts nothing from now on.
            let _ = kill_process(parent.raw(), Signal::STOP);
            for _ in 0..KILLED_LOOKS {
                let mut rest = descendants(&[parent.raw()]);
                rest.retain(|process| {
                    !process.is_ending() && kill_process(process.raw(), Signal::KILL) != Err(Errno::PERM)
                });
                if rest.is_empty() {
                    break;
                }
                SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(KILLED_LOOK)));
            }
            let _ = kill_process(parent.raw(), Signal::KILL);
        }
    }

    /// The parents of standby programs, as far as this user may know.
    pub fn parents(&self) -> Vec<Process> {
        with_lock(&self.path)
    }
}

impl Drop for NoStandbyPrograms<'_> {
    fn drop(&mut self) {
        // Else it is free at the end of this process.
        let _ = flock(&self.0.file, FlockOperation::Unlock);
        self.0.taken.store(0, Ordering::Release);
    }
}

impl StandbyProgramLock {
    /// Takes it; none while the lead moves.
    ///
    /// # Errors
    /// The file is missing or cannot be locked.
    pub fn take(cluster: &Cluster, node: &Node) -> Result<Option<Self>> {
        let path = path(cluster, node);
        let file = File::open(&path).map_err(Error::at("open", &path))?;
        let taken = try_lock(&file, FlockOperation::NonBlockingLockShared, &path)?;
        Ok(taken.then_some(Self { _file: file }))
    }
}

/// Whether a standby program runs at a node now.
///
/// # Errors
/// The lock cannot be looked at.
pub fn is_any_running(cluster: &Cluster, node: &Node) -> Result<bool> {
    let path = path(cluster, node);
    match File::open(&path) {
        Ok(file) => Ok(!try_lock(&file, FlockOperation::NonBlockingLockExclusive, &path)?),
        // No daemon has served since the node was made.
        Err(why) if why.kind() == ErrorKind::NotFound => Ok(false),
        Err(why) => Err(Error::at("open", &path)(why)),
    }
}

/// Whether a process that holds the lock is the parent of a standby program. Others may have opened the file.
fn is_parent(process: &Process) -> bool {
    subcommand(process.raw()).is_some_and(|subcommand| subcommand == "run")
}

fn try_lock(file: &File, how: FlockOperation, path: &Path) -> Result<bool> {
    match flock(file, how) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(why) => Err(Error::at("lock", path)(why)),
    }
}

fn path(cluster: &Cluster, node: &Node) -> PathBuf {
    cluster.folder(node).join("standby.lock")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A move and an order to end are carried out by two threads of the daemon: the lock that one gives back is not the other one's.
    #[test]
    fn one_thread_at_a_time_has_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("standby.lock");
        let lock =
            StandbyLock { file: File::create(&path).unwrap(), path: path.clone(), taken: Word::new(0) };
        let parent = File::open(&path).unwrap();
        let run = || try_lock(&parent, FlockOperation::NonBlockingLockShared, &path).unwrap();
        let held = lock.take().unwrap().unwrap();
        assert!(lock.take().unwrap().is_none() && !run());
        drop(held);
        let held = lock.take().unwrap().unwrap();
        assert!(!run());
        drop(held);
        assert!(run() && lock.take().unwrap().is_none());
        flock(&parent, FlockOperation::Unlock).unwrap();
        assert!(lock.take().unwrap().is_some());
    }
}
