//! The lock that tells that a node has a daemon, or a keeper that starts one.
//!
//! A daemon says in its pid file which process it is only when it serves. Until then a keeper that begins, or `hearth down
//! --hard`, could take the node for one without a daemon: the keeper would make a socket in place of the daemon's and start
//! a second one, which fails at the pool. So a keeper takes this lock before it makes the socket, and each of its daemons
//! gets the descriptor, too. The kernel holds the lock for as long as any process has that descriptor: it outlives the
//! keeper with its daemon, and nothing has to be written down in time.

use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use crate::process::{Process, with_lock};
use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// The lock, held.
#[derive(Debug)]
pub struct DaemonLock(File);

impl DaemonLock {
    /// Takes it; none if another keeper has it, or a daemon.
    ///
    /// # Errors
    /// The file cannot be made or locked.
    pub fn take(cluster: &Cluster, node: &Node) -> Result<Option<Self>> {
        let path = path(cluster, node);
        // Other users must not hold it.
        let opened = File::options().create(true).write(true).truncate(false).mode(0o600).open(&path);
        let file = opened.map_err(Error::at("open", &path))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self(file))),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(why) => Err(Error::at("lock", &path)(why)),
        }
    }

    /// Starts a process that holds it, too. No other process is started meanwhile.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn with_child<T>(&self, start: impl FnOnce() -> T) -> Result<T> {
        let set = |flags: FdFlags| {
            let set = fcntl_setfd(&self.0, flags);
            set.map_err(|why| Error::new(format!("cannot pass the daemon's lock on: {why}")))
        };
        set(FdFlags::empty())?;
        let started = start();
        set(FdFlags::CLOEXEC)?;
        Ok(started)
    }
}

impl AsFd for DaemonLock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The processes that hold it: the daemon, from its start on, and its keeper.
pub fn holders(cluster: &Cluster, node: &Node) -> Vec<Process> {
    with_lock(&path(cluster, node))
}

fn path(cluster: &Cluster, node: &Node) -> PathBuf {
    cluster.folder(node).join("serve.lock")
}
