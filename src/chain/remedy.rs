//! The remedies that an operator is told for a node that does not begin, or does not get the tree. Only a pool that is damaged or gone
//! may be replaced by an empty one, and only beside a node that leads: with any other cause this pool may be the last one with all
//! acknowledged data.

use crate::cluster::{Cluster, MediumKind, Node};
use crate::error::Error;
use crate::process::with_lock;
use crate::say::quoted;
use pmem::MediaError;
use rustix::fs::statvfs;
use rustix::io::Errno;
use std::net::IpAddr;

/// An error with its remedy, if it has one.
pub fn with(remedy: impl Into<Option<String>>) -> impl FnOnce(Error) -> Error {
    let remedy = remedy.into();
    move |why| match remedy {
        Some(remedy) => Error::new(format!("{why} ({remedy})")),
        None => why,
    }
}

/// The remedy for a pool that cannot be opened.
pub fn of_pool(cluster: &Cluster, node: &Node, why: &sharedfs::Error) -> Option<String> {
    let pool = quoted(&node.pool);
    if why.is_damage() {
        cluster.settings.chain.as_ref()?;
        let check = format!("hearth check {pool} tells what is damaged there");
        return Some(format!("{check}; {}", beside_a_leader(cluster, node)));
    }
    if why.is_no_space() {
        let free = statvfs(&node.pool).map_or(0, |disk| disk.f_bavail.saturating_mul(disk.f_frsize));
        return Some(format!("{} MiB are free for its files in {pool}", free >> 20));
    }
    match why.media()? {
        MediaError::Locked => {
            let lock = node.pool.canonicalize().map(|pool| pool.join("lock"));
            let holder = lock.ok().and_then(|lock| with_lock(&lock).into_iter().next());
            let holder = holder.map_or_else(String::new, |holder| format!(" (process {})", holder.pid()));
            Some(format!(
                "the process{holder} that has {pool} open may be of another node with this pool in hearth.toml"
            ))
        }
        MediaError::Os(errno) if is_forbidden(errno) => {
            let user = rustix::process::geteuid().as_raw();
            Some(format!(
                "user {user} may not use all files in {pool}: the user whose they are has to start the node"
            ))
        }
        _ => None,
    }
}

fn is_forbidden(errno: i32) -> bool {
    [Errno::ACCESS, Errno::PERM, Errno::ROFS].iter().any(|forbidden| forbidden.raw_os_error() == errno)
}

/// The remedy for a key that is no key.
pub fn of_key() -> String {
    "every node and the manager have this key: put it back from a copy; the pool is as it was".to_owned()
}

/// The remedy for an address at which the node cannot listen.
pub fn of_address(address: IpAddr) -> String {
    format!(
        "address = \"{address}\" in [chain] of hearth.toml has to be an address of this machine; the pool is as it was"
    )
}

/// The remedy for a pool that is damaged or gone.
pub fn beside_a_leader(cluster: &Cluster, node: &Node) -> String {
    format!(
        "if hearth status --dir {} shows that another node leads, that node has all that was acknowledged, and this pool may be \
         replaced: {}; while no node leads, remove nothing",
        quoted(&cluster.dir),
        with_empty_pool(cluster, node)
    )
}

/// The remedy of a pool without room for its former tree and that of the node that leads.
pub fn without_room(cluster: &Cluster, node: &Node) -> String {
    format!("remove files at the node that leads, or {}", with_empty_pool(cluster, node))
}

/// The way to an empty pool, which gets the tree of the node that leads.
fn with_empty_pool(cluster: &Cluster, node: &Node) -> String {
    let (number, dir, pool) = (node.number, quoted(&cluster.dir), quoted(&node.pool));
    // Of a pool in memory the daemon sees by itself that it is lost.
    let mark = match cluster.settings.medium {
        MediumKind::Memory => String::new(),
        MediumKind::File => format!(", and the file {}", quoted(&cluster.pool_made_file(node))),
    };
    format!(
        "hearth down --node {number} --dir {dir}, remove all files in {pool}{mark}, and hearth start --node {number} --dir {dir} makes \
         an empty pool, which gets the tree"
    )
}
