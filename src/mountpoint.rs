//! `DIR/nK`, where a node's tree is seen: a folder of the kernel's for as long as the tree is mounted there, and
//! nothing at all otherwise. Without a mount only the library serves the path. A program that reaches it in a way that
//! the library does not see (another spelling, a static program, no library) must get the error that there is nothing,
//! and must not find a folder into which it writes beside the tree.

use crate::cluster::{Cluster, Node};
use crate::cluster_lock::ClusterLock;
use crate::error::{Error, Result};
use crate::process::{Process, with_lock};
use crate::say::quoted;
use ipc::{Host, SystemHost};
use rustix::fs::{AtFlags, CWD, FlockOperation, Statx, StatxAttributes, StatxFlags, flock, statx};
use rustix::io::Errno;
use rustix::process::Signal;
use serde::Serialize;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a gateway that is about to end may take for that: longer than its guard waits for it.
const ENDING: Duration = Duration::from_secs(20);
/// Interval at which such a gateway is looked at.
const LOOK: Duration = Duration::from_millis(20);
/// How long the guard of a gateway that was killed may take until the kernel has nothing of the mount.
const DROPPING: Duration = Duration::from_secs(20);
/// The kernel frees the memory of a killed process.
const KILLED: Duration = Duration::from_secs(30);

/// The kernel's view of the path at which a node's tree is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stand {
    /// Nothing.
    Nothing,
    /// The tree.
    Tree,
    /// A mount whose gateway is gone: every call on it fails.
    DeadMount,
    /// Something that is not the tree.
    Other,
}

/// Says which process the gateway is.
pub fn gateway_file(cluster: &Cluster, node: &Node) -> PathBuf {
    cluster.folder(node).join("gateway.pid")
}

/// Names the gateway from the moment in which it begins to end. It has its mount for as long as it takes to give back what it
/// has of the daemon, which is seconds if the daemon is gone.
pub fn ends_file(cluster: &Cluster, node: &Node) -> PathBuf {
    cluster.folder(node).join("gateway.ends")
}

/// Locked, by its open file description, for as long as the kernel may have something of a node's mount that it keeps under
/// leases.
pub fn caches_file(cluster: &Cluster, node: &Node) -> PathBuf {
    cluster.folder(node).join("mount.lock")
}

/// Locks that file, when the kernel has nothing of a mount of before.
///
/// # Errors
/// It cannot be made or locked.
pub fn lock_caches(file: &Path) -> Result<File> {
    let made = File::options().create(true).write(true).truncate(false).open(file);
    let lock = made.map_err(Error::at("open", file))?;
    flock(&lock, FlockOperation::LockExclusive).map_err(Error::at("lock", file))?;
    Ok(lock)
}

/// Whether the kernel may have something of a node's mount.
pub fn has_caches(file: &Path) -> bool {
    let locked = File::open(file).map(|file| flock(&file, FlockOperation::NonBlockingLockShared));
    locked.is_ok_and(|locked| locked == Err(Errno::WOULDBLOCK))
}

/// The gateway, if there is one.
pub fn gateway(cluster: &Cluster, node: &Node) -> Option<Process> {
    Process::load(&gateway_file(cluster, node))
}

/// The gateway, if there is one that continues to serve, for a caller who wants to mount. A gateway that is about to end is
/// waited for.
///
/// # Errors
/// It has not ended in time.
pub fn gateway_that_stays(cluster: &Cluster, node: &Node) -> Result<Option<Process>> {
    let begun = SystemHost.now();
    while let Some(process) = gateway(cluster, node) {
        if !is_about_to_end(cluster, node, &process) {
            return Ok(Some(process));
        }
        if SystemHost.now().since(begun) > ENDING {
            return Err(Error::new(format!(
                "node {} is not mounted: process {}, which served its last mount, has not ended within {} s",
                node.number,
                process.pid(),
                ENDING.as_secs()
            )));
        }
        process.wait_until_gone(LOOK);
    }
    Ok(None)
}

/// Whether a gateway was killed or told to end, or its mount is gone. One that has not mounted yet counts, too: it does so
/// within [`ENDING`].
fn is_about_to_end(cluster: &Cluster, node: &Node, process: &Process) -> bool {
    process.is_ending()
        || Process::load(&ends_file(cluster, node)).as_ref() == Some(process)
        || process.has_mounts_of_this() && is_unmounted(&cluster.tree(node))
}

/// Whether the kernel says that no mount with a gateway is at a path.
fn is_unmounted(tree: &Path) -> bool {
    match look(tree) {
        Ok(found) => !is_mount(tree, &found),
        Err(why) => matches!(why, Errno::NOENT | Errno::NOTCONN),
    }
}

/// Waits until the kernel has nothing of a mount whose gateway was killed; then its guard has ended. A guard that is stopped
/// continues, and one that takes too long is killed.
///
/// # Errors
/// It does not end.
pub fn end_guard(cluster: &Cluster, node: &Node) -> Result<()> {
    let file = caches_file(cluster, node);
    if !has_caches(&file) {
        return Ok(());
    }
    for guard in with_lock(&file) {
        if guard.end(Signal::CONT, DROPPING).is_err() {
            guard.end(Signal::KILL, KILLED)?;
        }
    }
    Ok(())
}

/// The kernel's view of it now.
pub fn stand(cluster: &Cluster, node: &Node) -> Stand {
    match look(&cluster.tree(node)) {
        Err(Errno::NOENT) => Stand::Nothing,
        Err(Errno::NOTCONN) => Stand::DeadMount,
        Ok(found) if is_mount(&cluster.tree(node), &found) => match gateway(cluster, node) {
            Some(_) => Stand::Tree,
            None => Stand::DeadMount,
        },
        Ok(_) | Err(_) => Stand::Other,
    }
}

/// Makes the folder, for a mount.
///
/// # Errors
/// It cannot be made.
pub fn make(cluster: &Cluster, node: &Node) -> Result<()> {
    let tree = cluster.tree(node);
    match fs::create_dir(&tree) {
        Err(why) if why.kind() != ErrorKind::AlreadyExists => Err(Error::at("make", &tree)(why)),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Removes the folder, if it is empty, no mount and the cluster's own: one of a mount that was killed, or of an earlier
/// cluster. The caller keeps others from mounting meanwhile.
pub fn remove(cluster: &Cluster, node: &Node) {
    let tree = cluster.tree(node);
    // A process in another mount namespace may see a mount there: removing the folder would take it away.
    if gateway(cluster, node).is_some() {
        return;
    }
    let own = |found: &fs::Metadata| {
        found.is_dir() && fs::metadata(&cluster.dir).is_ok_and(|dir| dir.uid() == found.uid())
    };
    if fs::symlink_metadata(&tree).is_ok_and(|found| own(&found)) {
        // A folder that is in use or not empty stays; another check reports it.
        let _ = fs::remove_dir(&tree);
    }
}

/// [`remove`], unless another command starts or mounts a node of the cluster now.
pub fn tidy(cluster: &Cluster, node: &Node) {
    if stand(cluster, node) != Stand::Other {
        return;
    }
    let at_once = (Duration::ZERO, Duration::ZERO);
    if let Ok(Some(_alone)) = ClusterLock::within(&cluster.dir, at_once, || ()) {
        remove(cluster, node);
    }
}

/// The same for a caller that holds the cluster's lock.
pub fn tidy_locked(cluster: &Cluster, node: &Node, _alone: &ClusterLock) {
    if stand(cluster, node) == Stand::Other {
        remove(cluster, node);
    }
}

/// The command that mounts a node.
pub fn mount_command(cluster: &Cluster, node: &Node) -> String {
    format!("hearth mount --node {} --dir {}", node.number, quoted(&cluster.dir))
}

/// The warning for a user who expects the tree there, in a line.
pub fn warning(cluster: &Cluster, node: &Node) -> Option<String> {
    let tree = cluster.tree(node);
    let tree = tree.display();
    match stand(cluster, node) {
        Stand::Nothing | Stand::Tree => None,
        Stand::DeadMount => Some(format!(
            "a mount whose gateway is gone stands at {tree}: {} makes it anew, and hearth umount --node {} --dir {} takes it away",
            mount_command(cluster, node),
            node.number,
            quoted(&cluster.dir)
        )),
        Stand::Other if fs::read_dir(cluster.tree(node)).is_ok_and(|mut names| names.next().is_none()) => {
            Some(format!(
                "{tree} is a plain folder here: the tree is just being mounted, or in another mount namespace only (programs \
                 without the library, or that reach it by another spelling, see that folder)"
            ))
        }
        Stand::Other => Some(format!(
            "the files in {tree} are not in the tree, and a mount hides them: move them away (programs without the \
             library, or that reach it by another spelling, see it)"
        )),
    }
}

/// The same for another path at which programs are to see the tree.
pub fn warning_at(cluster: &Cluster, node: &Node, at: &Path) -> Option<String> {
    let tree = cluster.tree(node);
    if at == tree {
        return warning(cluster, node);
    }
    let found = look(at).ok()?;
    let place = |found: &Statx| (found.stx_dev_major, found.stx_dev_minor, found.stx_ino);
    let is_tree =
        stand(cluster, node) == Stand::Tree && look(&tree).is_ok_and(|other| place(&other) == place(&found));
    (!is_tree).then(|| {
        format!(
            "{} exists outside of the tree: programs without the library, or that reach it by another spelling \
             (a link, .., a relative path), see that and not the tree",
            at.display()
        )
    })
}

/// Types of file systems by which the kernel shows itself, its devices and its settings.
const KERNEL_TYPES: [&str; 22] = [
    "autofs",
    "binder",
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "efivarfs",
    "fusectl",
    "hugetlbfs",
    "mqueue",
    "nfsd",
    "nsfs",
    "proc",
    "pstore",
    "rpc_pipefs",
    "securityfs",
    "sysfs",
    "tracefs",
];

/// The file system of the kernel that a tree seen at a path would hide or stand in, and its type.
pub fn of_the_kernel(at: &Path) -> Option<(PathBuf, String)> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let canonical = at.canonicalize().unwrap_or_else(|_| at.to_owned());
    [at, &canonical].into_iter().find_map(|at| of_the_kernel_among(&mounts, at))
}

/// The same of the lines of a `mountinfo` file.
fn of_the_kernel_among(mounts: &str, at: &Path) -> Option<(PathBuf, String)> {
    let mounts: Vec<(PathBuf, &str)> = mounts.lines().filter_map(mount_of).collect();
    let is_of_kernel = |kind: &str| KERNEL_TYPES.contains(&kind);
    // Of several at one point the last hides the others.
    let around = mounts.iter().filter(|(point, _)| at.starts_with(point)).rev();
    let around = around.max_by_key(|(point, _)| point.components().count());
    let found = around
        .filter(|(_, kind)| is_of_kernel(kind))
        .or_else(|| mounts.iter().find(|(point, kind)| point.starts_with(at) && is_of_kernel(kind)));
    found.map(|(point, kind)| (point.clone(), (*kind).to_owned()))
}

/// Where a line of a `mountinfo` file says that something is mounted, and of which type it is.
fn mount_of(line: &str) -> Option<(PathBuf, &str)> {
    let (own, rest) = line.split_once(" - ")?;
    let point = own.split(' ').nth(4)?;
    let point = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(point.to_owned(), |point, (code, letter)| point.replace(code, letter));
    Some((point.into(), rest.split(' ').next()?))
}

/// The kernel's attributes of a path, without a request to the process that serves it.
fn look(path: &Path) -> std::result::Result<Statx, Errno> {
    statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO)
}

/// Whether something is mounted at a path.
fn is_mount(path: &Path, found: &Statx) -> bool {
    if found.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) {
        return found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    }
    // Kernels before 5.8 do not say it.
    let device = |found: &Statx| (found.stx_dev_major, found.stx_dev_minor);
    path.parent().is_some_and(|above| look(above).is_ok_and(|above| device(&above) != device(found)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_are_there_while_anybody_has_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("lock");
        assert!(!has_caches(&file));
        let lock = lock_caches(&file).unwrap();
        let other = lock.try_clone().unwrap();
        drop(lock);
        assert!(has_caches(&file), "another process may have it");
        drop(other);
        assert!(!has_caches(&file) && lock_caches(&file).is_ok());
    }

    #[test]
    fn a_place_in_or_above_a_file_system_of_the_kernel_is_found() {
        let mounts = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:2 / /proc rw shared:1 - proc proc rw\n\
                      3 1 0:3 / /dev rw - tmpfs none rw\n4 3 0:4 / /dev/pts rw - devpts none rw\n\
                      5 3 0:5 / /dev/shm rw - tmpfs none rw\n6 1 0:6 / /a\\040b/sys rw - sysfs none rw\n\
                      7 2 0:7 / /proc/there rw - tmpfs none rw\n";
        let of = |at: &str| {
            of_the_kernel_among(mounts, Path::new(at)).map(|(point, _)| point.display().to_string())
        };
        for (at, point) in
            [("/proc", "/proc"), ("/proc/1/x", "/proc"), ("/dev", "/dev/pts"), ("/a b", "/a b/sys")]
        {
            assert_eq!(of(at).as_deref(), Some(point), "{at}");
        }
        for at in ["/dev/shm/x", "/processes", "/proc/there/x", "/a b/other"] {
            assert_eq!(of(at), None, "{at}");
        }
    }
}
