//! Which pool is the last copy of a tree that no node leads, where it is, and the next step of an operator; and the failures of a
//! node to join its cluster.

use super::member::Member;
use crate::cluster::Cluster;
use crate::commands::manager::folder;
use crate::say::quoted;
use cluster::{Refusal, Subtree, View};
use format::{ChangeNumber, NodeId};

/// Why a node has not joined.
pub(super) enum JoinFailure {
    /// The next attempt may succeed.
    Passing(String),
    /// The next attempt succeeds after an operator has repaired the cluster. The daemon remains and reports this.
    UntilRepaired(String),
    /// The daemon ends.
    Final(String),
}

impl JoinFailure {
    pub(super) fn of(cluster: &Cluster, why: &cluster::Error) -> Self {
        use cluster::Error::{NotLetIn, OtherCluster, OtherNode, Pool, Refused};
        let text = format!("it cannot join the cluster: {why}");
        match why {
            Refused(Refusal::SetBack(number)) => {
                let set_back = set_back(cluster, *number);
                Self::UntilRepaired(format!(
                    "it does not join the cluster, and its pool is unchanged: {set_back}"
                ))
            }
            Refused(Refusal::AlreadyMember(_) | Refusal::Full) => Self::Passing(text),
            Refused(_) | NotLetIn(_) | OtherCluster(_) | Pool(_) | OtherNode(_) => Self::Final(text),
            _ => Self::Passing(text),
        }
    }
}

impl Member {
    /// Reports why no node leads.
    pub(super) fn wait_for_last_copy(&self, view: &View, subtree: &Subtree) {
        let (why, needs_operator) = lack_of_head(&self.begun.cluster, view, subtree);
        let lack = self.lack_of_tree(subtree).map(|why| format!("; {why}")).unwrap_or_default();
        self.set_waits_for(Some(format!("{why}{lack}")), needs_operator);
    }
}

/// The manager is an older copy of itself.
fn set_back(cluster: &Cluster, number: ChangeNumber) -> String {
    let (dir, manager) = (quoted(&cluster.dir), quoted(&folder(&cluster.dir)));
    format!(
        "the cluster manager was set back to an older state, as a pool has seen change {number}, which it does not have: \
         hearth down --dir {dir}, put the newest copy of the folder {manager} back, and hearth up --dir {dir}"
    )
}

/// Why no node leads in this view, and whether that needs an operator.
fn lack_of_head(cluster: &Cluster, view: &View, subtree: &Subtree) -> (String, bool) {
    if let Some(number) = view.set_back {
        return (set_back(cluster, number), true);
    }
    let dir = quoted(&cluster.dir);
    let last = subtree.chain.iter().find(|replica| replica.in_sync);
    let last = last.expect("one replica of a subtree is in sync at any time");
    let (node, uid) = (last.node, last.pool.uid);
    let place = match cluster.node(node.get()) {
        Ok(node) => format!(" ({})", quoted(&node.pool)),
        Err(_) => String::new(),
    };
    let Some(member) = view.members.get(&node) else {
        return (
            format!(
                "only node {node} has all acknowledged data, and it is not up: hearth start --node {node} --dir {dir}"
            ),
            false,
        );
    };
    if member.pool.uid == uid {
        return (
            format!(
                "only the pool of node {node}{place} has all acknowledged data. The node is up with this pool, but the cluster \
                 manager does not know it in its present state: its folder is an older copy, or the node was started with another \
                 manager, or the pool at another node. If its folder is an older copy, put the newest one back; otherwise hearth \
                 cluster accept-pool {node} --dir {dir} says what to consider"
            ),
            true,
        );
    }
    let found = view.members.iter().find(|(_, member)| member.pool.uid == uid).map(|(other, _)| *other);
    (other_pool(&dir, node, &place, found), true)
}

/// The node of the last copy is up with another pool.
fn other_pool(dir: &str, node: NodeId, place: &str, found: Option<NodeId>) -> String {
    let steps = match found {
        // Only a version that let a pool start at another node leaves this: the pool names that node since.
        Some(other) => format!(
            "put the pools of nodes {node} and {other} back in their places, remove the file identity from both, as an older version has \
             started them in wrong places"
        ),
        None => format!("put the pool of node {node} back in its place"),
    };
    let found = found.map(|other| format!(", which is at node {other} now")).unwrap_or_default();
    format!(
        "only the pool that node {node} had has all acknowledged data{found}, and node {node} is up with another one{place}: \
         hearth down --dir {dir}, {steps}, and hearth up --dir {dir}"
    )
}
