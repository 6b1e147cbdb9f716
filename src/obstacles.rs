//! Obstacles outside of Hearth that keep the processes of a node from starting: limits of this process, which they inherit, and
//! a full disk. Their errors name a call that failed, and not the limit. One is told before: pools that may hold more than their
//! file system has for them.

use crate::cluster::{Cluster, Node};
use crate::error::{Error, Result};
use rustix::fs::{stat, statvfs};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A limit on file sizes below which the kernel may kill this process where it writes settings, and the daemon cannot write its
/// log. A pool that exists needs only the size of a program's log.
const FILE_BYTES_MIN: u64 = 64 << 10;
/// Descriptors and address space that a daemon of some programs needs.
const DESCRIPTORS: u64 = 256;
const ADDRESS_BYTES: u64 = 16 << 30;
/// Address space of a daemon that serves some programs, beside that for its pool.
const ADDRESS_BYTES_MIN: u64 = 4 << 30;
/// The start of a node whose pool holds no space, and a program that removes files afterwards, need so much at most.
const DISK_BYTES: u64 = 16 << 20;
/// The same with the log of the cluster manager.
const DISK_BYTES_OF_SEVERAL: u64 = 18 << 20;

/// Raises the limits of this process that the processes of a node inherit, as far as it may, and refuses to begin under limits that
/// are too small for a node whose pool may hold so much.
///
/// # Errors
/// The limit, and the remedy.
pub fn check_limits(capacity_bytes: u64) -> Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(bytes) if bytes < FILE_BYTES_MIN => {
            return Err(Error::new(format!(
                "the limit on file sizes of this process is {bytes} bytes, and the daemon would inherit it: raise it (ulimit -f)"
            )));
        }
        _ => {}
    }
    if let Some(count) = raised(Resource::Nofile).filter(|count| *count < DESCRIPTORS) {
        return Err(Error::new(format!(
            "the limits of this process, which a daemon would inherit, are too small: {count} descriptors (ulimit -n), and it needs \
             {DESCRIPTORS} to serve some programs. Raise the hard limit (ulimit -Hn {DESCRIPTORS} or more, by root; LimitNOFILE= of a \
             service)"
        )));
    }
    let needed = ADDRESS_BYTES_MIN.saturating_add(capacity_bytes / 4 * 5);
    if let Some(bytes) = raised(Resource::As).filter(|bytes| *bytes < needed) {
        return Err(Error::new(format!(
            "the limits of this process, which a daemon would inherit, are too small: {} KiB of address space (ulimit -v), and it \
             needs {} for a pool of {} MiB. Raise the hard limit (ulimit -Hv unlimited, by root; LimitAS= of a service)",
            bytes >> 10,
            needed >> 10,
            capacity_bytes >> 20
        )));
    }
    Ok(())
}

/// Raises a limit to the hard one, and gives what it is then.
fn raised(resource: Resource) -> Option<u64> {
    let limit = getrlimit(resource);
    // If it is refused, the limit stays.
    let _ = setrlimit(resource, Rlimit { current: limit.maximum, ..limit });
    getrlimit(resource).current
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
    of_folders(cluster, &[cluster.folder(node), node.pool.clone()])
}

/// The same for the cluster manager.
pub fn of_manager(cluster: &Cluster) -> String {
    of_folders(cluster, std::slice::from_ref(&cluster.dir))
}

fn of_folders(cluster: &Cluster, folders: &[PathBuf]) -> String {
    let needed = if cluster.settings.chain.is_some() { DISK_BYTES_OF_SEVERAL } else { DISK_BYTES };
    let full = folders.iter().find(|folder| {
        statvfs(folder.as_path()).is_ok_and(|disk| disk.f_bavail.saturating_mul(disk.f_frsize) < needed)
    });
    let disk = full.map(|folder| {
        format!(
            "; the disk of {} is full: with {} MiB free there the node starts, and programs can remove files of the tree",
            folder.display(),
            needed >> 20
        )
    });
    format!("{}{}", disk.unwrap_or_default(), limits())
}

/// A sentence for each file system whose pools may hold more than it has for them. It ends no command: a pool takes space as it
/// needs it, and its owner may know that there will be more.
pub fn small_media(cluster: &Cluster) -> Vec<String> {
    let mut pools: BTreeMap<u64, Vec<&Node>> = BTreeMap::new();
    for node in &cluster.settings.nodes {
        if let Ok(pool) = stat(&node.pool) {
            pools.entry(pool.st_dev).or_default().push(node);
        }
    }
    let capacity = cluster.settings.capacity_bytes;
    pools.into_values().filter_map(|nodes| small_medium(&nodes, capacity)).collect()
}

fn small_medium(nodes: &[&Node], capacity: u64) -> Option<String> {
    let medium = statvfs(&nodes.first()?.pool).ok()?;
    let used: u64 = nodes.iter().map(|node| used_bytes(&node.pool)).sum();
    let (count, room) =
        (nodes.len() as u64, used.saturating_add(medium.f_bavail.saturating_mul(medium.f_frsize)));
    let wanted = capacity.saturating_mul(count);
    (room < wanted).then(|| {
        let paths: Vec<_> = nodes.iter().map(|node| node.pool.display().to_string()).collect();
        format!(
            "{} may hold {} MiB of data{} (--capacity), and {} file system has {} MiB for it: when that is full, writes that need new \
             space get ENOSPC",
            paths.join(" and "),
            capacity >> 20,
            if count > 1 { " each" } else { "" },
            if count > 1 { "their" } else { "its" },
            room >> 20
        )
    })
}

/// Bytes that the files of a folder take on their disk.
pub fn used_bytes(folder: &Path) -> u64 {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    files.filter_map(|file| Some(file.metadata().ok()?.blocks() * 512)).sum()
}
