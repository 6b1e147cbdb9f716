//! The node to which a pool belongs, as its identity says.
//!
//! Guarantee: a daemon never opens the pool of another node of its cluster. The manager knows each copy by the identity in its pool, and
//! a start at another node would replace this identity, so that the pool would be no copy any more when it is back in its place.

use crate::cluster::{Cluster, MediumKind, Node};
use crate::error::{Error, Result};
use crate::say::quoted;
use cluster::PoolIdentity;
use format::NodeId;
use pmem::Medium;
use std::path::Path;

/// Checks that the pool in the place of this node is not that of another node. Changes nothing in any pool.
///
/// # Errors
/// It is; the sentence names the pool, its node, and the next step.
pub(super) fn check(cluster: &Cluster, node: &Node) -> Result<()> {
    let own = NodeId::new(node.number);
    let Some(owner) = owner(cluster, &node.pool).filter(|owner| *owner != own) else { return Ok(()) };
    let dir = quoted(&cluster.dir);
    let is_ours = |other: &&Node| self::owner(cluster, &other.pool) == Some(own);
    let found = cluster.settings.nodes.iter().find(is_ours);
    let found = found.map(|other| format!("; that of node {own} is {} now", quoted(&other.pool)));
    Err(Error::new(format!(
        "the pool {} belongs to node {owner}, so node {own} does not start, and nothing was changed in it{}: put each pool back in \
         its place (or the lines pool = of {}), and hearth up --dir {dir}",
        quoted(&node.pool),
        found.unwrap_or_default(),
        quoted(&cluster.dir.join("hearth.toml"))
    )))
}

/// The node of the pool in a folder, if it has been in a cluster. Of a folder that cannot be read nothing is known here: the daemon
/// that opens it reports why.
fn owner(cluster: &Cluster, pool: &Path) -> Option<NodeId> {
    if !pool.is_dir() {
        return None;
    }
    let medium = match cluster.settings.medium {
        MediumKind::File => Medium::file(pool),
        MediumKind::Memory => Medium::memory(pool),
    };
    let medium = medium.ok()?;
    let (uid, node) = PoolIdentity::owner(&medium).ok()??;
    // The file may remain of an earlier pool, which was removed.
    let is_current = sharedfs::format_of(&medium).is_ok_and(|format| format.pool == uid);
    is_current.then_some(node)
}
