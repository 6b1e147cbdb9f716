//! `hearth cluster accept-pool`: an operator says that the pool of a node is the last copy of its tree, though the manager does not
//! know the generation in which the node has joined with it. The manager knows a copy by its pool and by a random number of its last
//! start, so this is needed after a start with another manager, or after the pool's identity was lost.
//!
//! Guarantee: only a pool that the manager has recorded as the last copy is accepted, and only while no node leads. The operator
//! answers for one thing: that the pool's folder was not replaced by an older copy of itself.

use super::{AcceptPool, Aim, refused, soon};
use crate::error::{Error, Result};
use crate::say::{self, quoted};
use ::cluster::{Change, Path, Placement, Refusal, Subtree, View};
use format::NodeId;
use ipc::{Host, SystemHost};
use serde::Serialize;
use std::process::ExitCode;

#[derive(Serialize)]
struct Accepted {
    node: u32,
    path: String,
}

pub(super) fn run(arguments: &AcceptPool) -> Result<ExitCode> {
    let (asked, node) = (&arguments.asked, NodeId::new(arguments.node));
    let manager = asked.connect(Aim::Read)?;
    let end = soon();
    let mut is_proposed = false;
    while SystemHost.now() < end {
        let view = asked.view(&*manager)?;
        let subtree = match last_copy(&view, node) {
            Ok(subtree) => subtree,
            // Made, though the answer was lost or another change came between.
            Err(_) if is_proposed && leads(&view, node) => return accepted(arguments),
            Err(why) => return Ok(refused(format_args!("{why}; nothing was changed"))),
        };
        if !arguments.yes {
            return warn(arguments);
        }
        let placed = |replica: &::cluster::Replica| Placement { node: replica.node, hot: replica.hot };
        let change = Change::SetSubtree {
            path: Path::root(),
            version: subtree.version,
            chain: subtree.chain.iter().map(placed).collect(),
            copies_min: subtree.copies_min,
            founder: Some(view.members[&node].pool.uid),
        };
        match manager.propose(&change, soon()) {
            Ok(_) => return accepted(arguments),
            Err(::cluster::Error::Refused(Refusal::StaleVersion(_)) | ::cluster::Error::Unknown) => {
                is_proposed = true;
            }
            Err(why) => return Err(asked.failed(why)),
        }
    }
    Err(Error::new(format!("the pool of node {node} could not be accepted in time: is the manager well?")))
}

fn leads(view: &View, node: NodeId) -> bool {
    view.subtrees.get(&Path::root()).is_some_and(|subtree| subtree.manager == Some(node))
}

/// The tree whose last copy the pool of this node is, in a generation that the manager does not know; or why there is none.
fn last_copy(view: &View, node: NodeId) -> std::result::Result<&Subtree, String> {
    if view.set_back.is_some() {
        return Err("the manager was set back: put the newest copy of its folder back first".to_owned());
    }
    let Some(subtree) = view.subtrees.get(&Path::root()) else {
        return Err("the cluster has no tree yet".to_owned());
    };
    if let Some(leader) = subtree.manager {
        return Err(format!("node {leader} leads, so no pool has to be accepted"));
    }
    let Some(replica) = subtree.chain.iter().find(|replica| replica.in_sync && replica.node == node) else {
        let last: Vec<String> = subtree.in_sync().map(|node| node.to_string()).collect();
        return Err(format!("node {} has the last copy, not node {node}", last.join(", ")));
    };
    match view.members.get(&node) {
        None => Err(format!("node {node} is not up: hearth start --node {node} comes first")),
        Some(member) if member.pool.uid != replica.pool.uid => Err(format!(
            "node {node} is up with another pool than the last copy: put that one back in its place"
        )),
        Some(_) => Ok(subtree),
    }
}

/// Says what the operator has to know, and changes nothing.
fn warn(arguments: &AcceptPool) -> Result<ExitCode> {
    let (node, dir) = (arguments.node, quoted(&arguments.asked.place.dir()?));
    say::line(format_args!(
        "Node {node} is up with the pool that is the last copy, and the manager does not know it in its present state."
    ));
    say::line(format_args!(
        "RISK: if the folder of this pool was replaced by an older copy of itself, all data that fsyncs acknowledged since that \
         copy was made is lost for good: the other nodes get the older tree. Neither the pool nor the manager can tell this."
    ));
    say::line(format_args!(
        "Accept the pool only if its folder was moved or started in a wrong place, but never replaced by an older copy."
    ));
    Ok(refused(format_args!(
        "nothing was changed: hearth cluster accept-pool {node} --yes --dir {dir} accepts the pool"
    )))
}

fn accepted(arguments: &AcceptPool) -> Result<ExitCode> {
    let told = Accepted { node: arguments.node, path: Path::root().to_string() };
    arguments.asked.tell(&told, |told| {
        say::line(format_args!(
            "the pool of node {} is accepted as the last copy: the node leads",
            told.node
        ));
    })?;
    Ok(ExitCode::SUCCESS)
}
