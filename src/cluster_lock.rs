//! The lock of a cluster's folder (`flock`): a command that starts nodes, one that ends them all, and the process of a mount
//! while it makes the mount, hold it, so that each of them finds the nodes as the one before left them. The kernel releases
//! it at the end of its holder.

use crate::error::{Error, Result};
use crate::process::{Process, with_lock};
use crate::say;
use ipc::{Host, SystemHost, Word};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

/// How often a holder is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// The lock, held.
#[derive(Debug)]
pub struct ClusterLock {
    _folder: File,
}

impl ClusterLock {
    /// Waits for it without a limit, and says so.
    ///
    /// # Errors
    /// The folder cannot be opened or locked.
    pub fn wait(dir: &Path) -> Result<Self> {
        let folder = File::open(dir).map_err(Error::at("open", dir))?;
        if flock(&folder, FlockOperation::NonBlockingLockExclusive).is_err() {
            say::aside(format_args!(
                "hearth: waiting for {}, which starts or ends nodes of this cluster",
                holder(dir)
            ));
            flock(&folder, FlockOperation::LockExclusive).map_err(Error::at("lock", dir))?;
        }
        Ok(Self { _folder: folder })
    }

    /// Waits for it so long at most; calls `tell` if it is not free after `soon`. None if it is held for longer.
    ///
    /// # Errors
    /// The folder cannot be opened or locked.
    pub fn within(
        dir: &Path,
        (soon, limit): (Duration, Duration),
        tell: impl FnOnce(),
    ) -> Result<Option<Self>> {
        let folder = File::open(dir).map_err(Error::at("open", dir))?;
        let begun = SystemHost.now();
        let mut tell = Some(tell);
        loop {
            match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(Self { _folder: folder })),
                Err(Errno::WOULDBLOCK) => {}
                Err(why) => return Err(Error::at("lock", dir)(why)),
            }
            let waited = SystemHost.now().since(begun);
            if waited >= limit {
                return Ok(None);
            }
            if waited >= soon
                && let Some(tell) = tell.take()
            {
                tell();
            }
            SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK)));
        }
    }
}

/// The processes that hold it, of which this user may know.
pub fn holders(dir: &Path) -> Vec<Process> {
    dir.canonicalize().map(|dir| with_lock(&dir)).unwrap_or_default()
}

/// The process that holds it, for a message.
pub fn holder(dir: &Path) -> String {
    match holders(dir).first() {
        Some(process) => format!("process {}", process.pid()),
        None => "another hearth".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_the_lock_has_its_limit_and_names_the_holder() {
        let dir = tempfile::tempdir().unwrap();
        let (soon, limit) = (Duration::ZERO, Duration::from_millis(50));
        let lock = ClusterLock::within(dir.path(), (soon, limit), || panic!("it is free")).unwrap();
        let mut is_told = false;
        assert!(ClusterLock::within(dir.path(), (soon, limit), || is_told = true).unwrap().is_none());
        assert!(is_told);
        assert_eq!(holder(dir.path()), format!("process {}", std::process::id()));
        drop(lock);
        assert!(ClusterLock::within(dir.path(), (limit, limit), || ()).unwrap().is_some());
        assert!(ClusterLock::wait(dir.path()).is_ok() && holders(dir.path()).is_empty());
    }
}
