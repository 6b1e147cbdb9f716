//! Obstacles outside of Hearth that keep the processes of a node from starting: limits of this process, which they inherit, and
//! a full disk. Their errors name a call that failed, and not the limit.

use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use rustix::fs::statvfs;
use rustix::process::{Resource, getrlimit};

/// A limit on file sizes below which the kernel may kill this process where it writes settings, and the daemon cannot write its
/// log. A pool that exists needs only the size of a program's log.
const FILE_BYTES_MIN: u64 = 64 << 10;
/// Descriptors and address space that a daemon of some programs needs.
const DESCRIPTORS: u64 = 256;
const ADDRESS_BYTES: u64 = 16 << 30;
/// The start of a node, and a program that removes files afterwards, need so much space at most.
const DISK_BYTES: u64 = 4 << 20;

/// Refuses to begin under a limit on file sizes that is too small for any process of a node.
///
/// # Errors
/// The limit.
pub fn check_file_limit() -> Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(bytes) if bytes < FILE_BYTES_MIN => Err(Error::new(format!(
            "the limit on file sizes of this process is {bytes} bytes, and the daemon would inherit it: raise it (ulimit -f)"
        ))),
        _ => Ok(()),
    }
}

/// Limits of this process that may be why a process of a node did not start, as the end of a sentence; empty without one.
pub fn limits() -> String {
    let finite = |resource, below: u64| getrlimit(resource).current.filter(|limit| *limit < below);
    let mut limits = Vec::new();
    if let Some(bytes) = finite(Resource::Fsize, u64::MAX) {
        limits.push(format!("{} KiB for a file (ulimit -f)", bytes >> 10));
    }
    // A daemon raises its limit to the hard one.
    if let Some(count) = getrlimit(Resource::Nofile).maximum.filter(|count| *count < DESCRIPTORS) {
        limits.push(format!("{count} descriptors (ulimit -n)"));
    }
    if let Some(bytes) = finite(Resource::As, ADDRESS_BYTES) {
        limits.push(format!("{} KiB of address space (ulimit -v)", bytes >> 10));
    }
    if limits.is_empty() {
        return String::new();
    }
    format!("; the limits of this process may be the reason: {}", limits.join(", "))
}

/// All such obstacles for a node that did not start, as the end of a sentence.
pub fn of_node(cluster: &Cluster, node: &Node) -> String {
    let folders = [cluster.folder(node), node.pool.clone()];
    let full = folders.iter().find(|folder| {
        statvfs(folder.as_path()).is_ok_and(|disk| disk.f_bavail.saturating_mul(disk.f_frsize) < DISK_BYTES)
    });
    let disk = full.map(|folder| {
        format!(
            "; the disk of {} is full: with {} MiB free there the node starts, and programs can remove files of the tree",
            folder.display(),
            DISK_BYTES >> 20
        )
    });
    format!("{}{}", disk.unwrap_or_default(), limits())
}
