//! `hearth up --nodes N` on a cluster that exists and has fewer nodes: the others are added, and get all files from the node
//! that leads.
//!
//! A cluster of one node becomes one of several: its pool is the one that all others are copies of, as it is, and theirs are
//! made like it. Its daemon has to be down meanwhile, because a daemon of one node is no member of a cluster. Nodes that come
//! to several are started beside them: the node that leads places the tree on each new member.
//!
//! Guarantees: everything but the last step leaves the cluster what it was, and can be done again; the last one is the
//! writing of `hearth.toml`. From there on the cluster has the new number of nodes, and each `hearth up` goes on with it.

use super::links::Links;
use super::make_files;
use super::settings::{ChainSettings, PoolShape};
use crate::cluster::{Cluster, Node};
use crate::commands::daemon::medium;
use crate::commands::manager::key_file;
use crate::error::{Error, Result};
use crate::health::{self, NodeHealth};
use crate::key;
use crate::making::CreatedFiles;
use crate::process::Process;
use crate::say::{self, quoted};
use pmem::MediaError;
use rustix::fs::statvfs;
use std::fs;

/// Adds nodes to a cluster, up to so many, with these times if it had one node. The caller keeps others from starting nodes.
///
/// # Errors
/// Nothing was changed: why.
pub fn grow(cluster: &mut Cluster, nodes: u32, (lease, patience): (Option<u64>, Option<u64>)) -> Result<()> {
    let before = cluster.settings.nodes.len();
    let none = |why: Error| {
        Error::new(format!("the cluster in {} stays one of --nodes {before}: {why}", cluster.dir.display()))
    };
    let chain = match cluster.settings.chain {
        Some(chain) => chain,
        None => of_one_node(cluster).and_then(|chain| chain.with_times(lease, patience)).map_err(none)?,
    };
    let (mut grown, mut made) = (cluster.clone(), CreatedFiles::default());
    grown.settings.chain = Some(chain);
    if let Err(why) = make_nodes(&mut grown, nodes, &chain, &mut made) {
        made.take_away();
        return Err(none(why));
    }
    // Last: until then it is what it was, and `up` begins again.
    grown.save().map_err(none)?;
    *cluster = grown;
    say::line(format_args!("the cluster has {nodes} nodes now, and had {before}"));
    Ok(())
}

/// The settings that nodes share when they are added to a cluster of one.
fn of_one_node(cluster: &Cluster) -> Result<ChainSettings> {
    let node = cluster.node(1)?;
    is_down(cluster, node)?;
    if !cluster.pool_made_file(node).exists()
        && fs::read_dir(&node.pool).is_ok_and(|files| files.count() == 0)
    {
        // It was never started.
        return Ok(ChainSettings::new(PoolShape::new(cluster.settings.capacity_bytes)?));
    }
    let medium = medium(cluster, node)?;
    let pool = node.pool.display();
    let lock = medium.lock().map_err(|why| match why {
        MediaError::Locked => Error::new(format!("another process uses its pool {pool}")),
        why => Error::at("lock", &node.pool)(why),
    })?;
    let shape = PoolShape::of_pool(&medium).map_err(Error::at("read", &node.pool))?;
    drop(lock);
    Ok(ChainSettings::new(shape))
}

/// Refuses a node whose daemon runs, or is being started.
fn is_down(cluster: &Cluster, node: &Node) -> Result<()> {
    let dir = quoted(&cluster.dir);
    match health::look(cluster, node) {
        NodeHealth::Down if Process::load(&cluster.keeper_pid_file(node)).is_none() => Ok(()),
        NodeHealth::Unknown(why) => Err(Error::new(why)),
        _ => Err(Error::new(format!(
            "its node runs, and cannot become one of several meanwhile: end its programs and hearth down --dir {dir}, then \
             give this command again"
        ))),
    }
}

fn make_nodes(grown: &mut Cluster, nodes: u32, chain: &ChainSettings, made: &mut CreatedFiles) -> Result<()> {
    let first = grown.settings.nodes.len();
    grown.add_nodes(nodes, made)?;
    make_files(&grown.dir, made)?;
    Links::try_to_listen(chain.address, &key::read(&key_file(&grown.dir))?)?;
    let full = grown.settings.nodes.iter().take(first).map(Node::pool_bytes).max().unwrap_or(0);
    grown.settings.nodes.iter().skip(first).try_for_each(|node| has_room(node, full))
}

/// Refuses a place for a pool that could not hold what it is to be a copy of.
fn has_room(node: &Node, bytes: u64) -> Result<()> {
    let medium = statvfs(&node.pool).map_err(|why| Error::at("look at", &node.pool)(why))?;
    let free = medium.f_bavail * medium.f_frsize;
    if free < bytes {
        return Err(Error::new(format!(
            "the pool of node {} would lie in {}, where {} MiB are free, and the files take {} MiB",
            node.number,
            node.pool.display(),
            free >> 20,
            bytes >> 20
        )));
    }
    Ok(())
}
