//! `hearth remove`: take a cluster that is down away, with all its files.
//!
//! A pool in memory lies outside the cluster's folder, so that `rm -r` of the folder leaves the pool, and the memory that it
//! takes, behind. Of the folder only what Hearth made is removed. The settings go last: a removal that was interrupted is
//! done again by the same command.

use super::Remove;
use super::serve::alone;
use crate::chain;
use crate::cluster::{Cluster, Node};
use crate::daemon_lock::{self, DaemonLock};
use crate::error::{Error, Result};
use crate::mountpoint::{Stand, stand};
use crate::process::Process;
use crate::say::{self, count, quoted};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;

/// Exit code of a command that was refused and changed nothing.
const REFUSED: u8 = 1;

pub(super) fn run(arguments: &Remove) -> Result<ExitCode> {
    let cluster = arguments.place.cluster()?;
    let dir = quoted(&cluster.dir);
    if let Some(runs) = what_runs(&cluster) {
        say::aside(format_args!("hearth: {runs}: hearth down --dir {dir} comes first; nothing was removed"));
        return Ok(ExitCode::from(REFUSED));
    }
    // No keeper begins while its lock is held.
    let nodes = &cluster.settings.nodes;
    let folders = nodes.iter().filter(|node| cluster.folder(node).exists());
    let _alone = folders.map(|node| alone(&cluster, node)).collect::<Result<Vec<_>>>()?;
    let bytes: u64 = nodes.iter().map(Node::pool_bytes).sum();
    let (what, mib) = (count(nodes.len() as u64, "node"), bytes >> 20);
    if !arguments.yes {
        say::line(format_args!("the cluster in {dir} has {what}, whose pools take {mib} MiB:"));
        for node in nodes {
            let mib = node.pool_bytes() >> 20;
            say::line(format_args!("  node {}: {} ({mib} MiB)", node.number, node.pool.display()));
        }
        say::aside(format_args!(
            "hearth: nothing was removed: hearth remove --yes --dir {dir} removes the cluster with all files in it"
        ));
        return Ok(ExitCode::from(REFUSED));
    }
    let mut locks = Vec::new();
    for node in nodes.iter().filter(|node| cluster.folder(node).exists()) {
        let lock = DaemonLock::take(&cluster, node)?;
        locks.push(lock.ok_or_else(|| Error::new(format!("node {} has a daemon", node.number)))?);
    }
    remove(&cluster)?;
    say::line(format_args!("the cluster in {dir} is removed: {what}, {mib} MiB"));
    match fs::remove_dir(&cluster.dir) {
        Err(why) if why.kind() == ErrorKind::DirectoryNotEmpty => {
            say::line(format_args!("{dir} stays, as it holds files that are not Hearth's"));
        }
        // An empty folder that may not be removed harms nobody.
        _ => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// The processes of a cluster that run, or that use it.
fn what_runs(cluster: &Cluster) -> Option<String> {
    for node in &cluster.settings.nodes {
        let number = node.number;
        let files = [cluster.keeper_pid_file(node), cluster.pid_file(node)];
        let named = files.iter().find_map(|file| Process::load(file));
        if let Some(process) = named.or_else(|| daemon_lock::holders(cluster, node).into_iter().next()) {
            return Some(format!("node {number} is up (process {})", process.pid()));
        }
        if matches!(stand(cluster, node), Stand::Tree | Stand::DeadMount) {
            let tree = quoted(&cluster.tree(node));
            return Some(format!("the tree of node {number} is mounted at {tree}"));
        }
    }
    chain::manager::runs(cluster).then(|| "the cluster manager runs".to_owned())
}

/// Removes the pools first, for which the node's folders say where they are, and the settings last.
fn remove(cluster: &Cluster) -> Result<()> {
    let nodes = &cluster.settings.nodes;
    for node in nodes {
        gone(&node.pool)?;
        cluster.remove_socket_folder(node);
    }
    for node in nodes {
        gone(&cluster.folder(node))?;
        // The folder of a mount that a killed command left; never what stands in it.
        let _ = fs::remove_dir(cluster.tree(node));
    }
    for path in chain::files(&cluster.dir) {
        gone(&path)?;
    }
    gone(&cluster.dir.join("hearth.toml.new"))?;
    gone(&cluster.dir.join("hearth.toml"))
}

/// Removes a file, or a folder with all that is in it; it may be gone already.
fn gone(path: &Path) -> Result<()> {
    let is_folder = fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    let removed = if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(why) if why.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(Error::at("remove", path)),
    }
}
