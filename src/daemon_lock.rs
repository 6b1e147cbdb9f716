//! The lock that tells that a node has a daemon, from before the process is one until it has ended.
//!
//! A daemon says in its pid file which process it is only when it serves. Until then a keeper that begins, or `hearth down
//! --hard`, could take the node for one without a daemon: the keeper would make a socket in place of the daemon's and start
//! a second one, which fails at the pool. So a keeper takes this lock before it makes the socket, and each of its daemons
//! inherits the descriptor. The kernel holds the lock for as long as any process has that descriptor: it outlives the
//! keeper with its daemon, and nothing has to be written down in time.

use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use crate::process::{Process, with_open};
use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// The lock, held.
#[derive(Debug)]
pub struct DaemonLock(File);

impl DaemonLock {
    /// Takes it; none if another keeper's daemon has it.
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

    /// Lets the processes that this one starts from now on hold it, too.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn bequeath(&self) -> Result<()> {
        let set = fcntl_setfd(&self.0, FdFlags::empty());
        set.map_err(|why| Error::new(format!("cannot pass the daemon's lock on: {why}")))
    }
}

/// The processes that have it: the daemon, from its start on, its keeper, and spares.
pub fn holders(cluster: &Cluster, node: &Node) -> Vec<Process> {
    with_open(&path(cluster, node))
}

fn path(cluster: &Cluster, node: &Node) -> PathBuf {
    cluster.folder(node).join("serve.lock")
}
