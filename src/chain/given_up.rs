//! Whether the tree of this node's pool counts, as the view of the cluster says, and what the node says of a tree that it gave up.
//!
//! A pool that is not in sync never leads before a head has brought it up: the manager gives no other node the lead, and only
//! the lease manager lets a pool enter the in-sync set. So its tree counts for nothing, and the pool gives it up where there is no
//! room for it beside the tree of the node that leads.

use super::member::Member;
use cluster::{Party, Subtree, View};
use format::NodeId;

impl Member {
    /// Tells the standby which node may replace its tree where there is no room for both: the node that leads in a view of the
    /// present life, in which this pool is not in sync.
    pub(super) fn note_worth(&self, party: Party, view: &View, subtree: Option<&Subtree>) {
        let is_of_this_life = view.members.get(&party.node).is_some_and(|member| member.life == party.life);
        let leader = subtree.filter(|_| is_of_this_life).and_then(|subtree| {
            let in_sync = |node: NodeId| subtree.in_sync().any(|other| other == node);
            subtree.manager.filter(|leader| in_sync(*leader) && !in_sync(party.node))
        });
        self.begun.standby.set_replaceable(leader);
    }

    /// The reason why this node has no tree of its own, if it gave that up.
    pub(super) fn lack_of_tree(&self, subtree: &Subtree) -> Option<String> {
        let of: Vec<String> = subtree.in_sync().map(|node| node.to_string()).collect();
        let of = of.join(", ");
        self.begun.standby.has_given_up().then(|| {
            format!("it gave up its own tree to make room for that of node {of}, and cannot lead before it has that")
        })
    }
}
