//! The space that a pool holds, as a command uses it: on a full disk, the first files of a start get theirs from there.

use crate::cluster::{Cluster, Node};
use pmem::Medium;
use rustix::fs::{stat, statvfs};

/// The notes of a keeper and of a daemon take less.
const NOTES_BYTES: u64 = 256 << 10;

/// Leaves space for the files in the node's folder that a start writes, if its pool is on the same full disk. Nothing if a daemon has the
/// pool: then there is nothing to start.
pub fn make_way(cluster: &Cluster, node: &Node) {
    // Looked at before the pool is locked: a daemon that begins meanwhile would find it in use.
    if !is_short(cluster, node) || !node.pool.join(pmem::held::HELD_FILE).exists() {
        return;
    }
    let Ok(medium) = Medium::file(&node.pool) else { return };
    if let Ok(_locked) = medium.lock()
        && medium.open_held().is_ok()
    {
        give_up_some(&medium);
    }
}

/// The same for the daemon of the pool, before it writes its own files: its pool may have taken the space that was free.
pub fn leave(cluster: &Cluster, node: &Node, medium: &Medium) {
    if is_short(cluster, node) {
        give_up_some(medium);
    }
}

/// Whether the disk of a node's folder lacks space for the notes, and has the pool.
fn is_short(cluster: &Cluster, node: &Node) -> bool {
    let folder = cluster.folder(node);
    let is_same = match (stat(&folder), stat(&node.pool)) {
        (Ok(folder), Ok(pool)) => folder.st_dev == pool.st_dev,
        _ => false,
    };
    let free = statvfs(&folder).map_or(u64::MAX, |disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    is_same && free < NOTES_BYTES
}

fn give_up_some(medium: &Medium) {
    let left = medium.held_bytes().unwrap_or(0).saturating_sub(NOTES_BYTES);
    // Without it the start says that the disk is full.
    let _ = medium.hold_at_most(left);
}
