//! The lock that tells that standby programs run at a node (`hearth run --standby`).
//!
//! The parent of each such program holds it, shared, from before it starts the program until the program and its descendants
//! have ended. A daemon that gives the lead away takes it alone, so it waits for all of these programs, also for those that have
//! not used the tree and have no session; and no parent starts a program until the lead has moved. The kernel holds the lock for
//! as long as the parent lives: a daemon that starts again has nothing to learn, and a parent that is killed leaves nothing behind.

use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use crate::process::{Process, with_lock};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The lock as a daemon has it, not taken.
#[derive(Debug)]
pub struct StandbyLock {
    file: File,
    path: PathBuf,
}

/// While it lives, no standby program runs at the node.
#[derive(Debug)]
pub struct NoStandbyPrograms<'a>(&'a File);

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
        Ok(Self { file: opened.map_err(Error::at("open", &path))?, path })
    }

    /// Takes it alone; none while a standby program runs.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn take(&self) -> Result<Option<NoStandbyPrograms<'_>>> {
        let taken = try_lock(&self.file, FlockOperation::NonBlockingLockExclusive, &self.path)?;
        Ok(taken.then_some(NoStandbyPrograms(&self.file)))
    }

    /// The parents of standby programs, as far as this user may know.
    pub fn parents(&self) -> Vec<Process> {
        with_lock(&self.path)
    }
}

impl Drop for NoStandbyPrograms<'_> {
    fn drop(&mut self) {
        // Else it is free at the end of this process.
        let _ = flock(self.0, FlockOperation::Unlock);
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
