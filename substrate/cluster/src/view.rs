//! The view: the agreed state of the cluster, without heartbeats. [`crate::apply`] has the rules for its changes; this
//! module has its structure and its invariants.

use crate::change::Party;
use crate::rules::Rules;
use format::cluster::{ADDRESS_BYTES, CHAIN_MAX, MEMBERS_MAX, SUBTREE_PATH_MAX, SUBTREES_MAX};
use format::{ChangeNumber, Epoch, NodeId, PoolGeneration, PoolUid};
use std::collections::BTreeMap;

/// The address at which a member listens, as text for the transport.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(String);

impl Address {
    /// An address of at most [`ADDRESS_BYTES`] visible ASCII characters; it may be empty.
    pub fn new(text: &str) -> Option<Self> {
        let right = text.len() <= ADDRESS_BYTES && text.bytes().all(|byte| byte.is_ascii_graphic());
        right.then(|| Self(text.to_owned()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The path of a subtree from the root of the tree: `/` or `/a/b`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Path(Vec<u8>);

impl Path {
    /// A path of at most [`SUBTREE_PATH_MAX`] bytes that begins with a slash, and has no empty, `.` or `..` component
    /// and no zero byte.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let plain = |part: &[u8]| !part.is_empty() && part != b"." && part != b".." && !part.contains(&0);
        let rest = bytes.strip_prefix(b"/")?;
        let right = bytes.len() <= SUBTREE_PATH_MAX
            && (rest.is_empty() || rest.split(|byte| *byte == b'/').all(plain));
        right.then(|| Self(bytes.to_owned()))
    }

    /// The whole tree.
    pub fn root() -> Self {
        Self(b"/".to_vec())
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Display for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

/// A pool in one of its generations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCopy {
    /// The pool; [`PoolUid::NONE`] is no pool.
    pub uid: PoolUid,
    /// Its generation.
    pub generation: PoolGeneration,
}

/// A member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The epoch in which it joined.
    pub life: Epoch,
    /// The random number of its process.
    pub instance: u64,
    /// The medium of its pool.
    pub medium: u8,
    /// The pool with which it joined.
    pub pool: PoolCopy,
    /// Its heartbeats are refused: it will be expelled.
    pub refused: bool,
    /// The address at which it listens.
    pub address: Address,
}

/// A replica, as an operator defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The node.
    pub node: NodeId,
    /// Hot or warm.
    pub hot: bool,
}

/// A replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    /// The node.
    pub node: NodeId,
    /// Hot or warm.
    pub hot: bool,
    /// A pool of this node has all acknowledged data. A living replica that is not in sync is *joining*.
    pub in_sync: bool,
    /// That pool, if the replica is in sync. The node may be a member with another pool, which then is no copy.
    pub pool: PoolCopy,
}

impl Replica {
    /// True if it is in sync, and its node is a member with the same pool.
    pub fn lives(&self, members: &BTreeMap<NodeId, Member>) -> bool {
        self.in_sync && members.get(&self.node).is_some_and(|member| member.pool == self.pool)
    }
}

/// A subtree with a chain of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subtree {
    /// The last change that touched it.
    pub version: ChangeNumber,
    /// The replicas, in order.
    pub chain: Vec<Replica>,
    /// An fsync waits while there are fewer copies than this.
    pub copies_min: u8,
    /// Its lease manager: a member that is in sync; `None` if no replica in sync is alive.
    pub manager: Option<NodeId>,
}

impl Subtree {
    /// The replica on this node.
    pub fn replica(&self, node: NodeId) -> Option<&Replica> {
        self.chain.iter().find(|replica| replica.node == node)
    }

    /// Position of a node in the chain's order.
    pub fn index_of(&self, node: NodeId) -> Option<usize> {
        self.chain.iter().position(|replica| replica.node == node)
    }

    /// The living replicas that are in sync, in the chain's order.
    pub fn living<'a>(
        &'a self,
        members: &'a BTreeMap<NodeId, Member>,
    ) -> impl Iterator<Item = &'a Replica> + 'a {
        self.chain.iter().filter(|replica| replica.lives(members))
    }

    /// The nodes with a replica in sync, in the chain's order.
    pub fn in_sync(&self) -> impl Iterator<Item = NodeId> {
        self.chain.iter().filter(|replica| replica.in_sync).map(|replica| replica.node)
    }
}

/// The agreed state. Equal sequences of changes give equal views.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The cluster: a random number from its creation.
    pub cluster: u64,
    /// Lease and drift bound.
    pub rules: Rules,
    /// The last change.
    pub number: ChangeNumber,
    /// Grows with every change of the members.
    pub epoch: Epoch,
    /// The members.
    pub members: BTreeMap<NodeId, Member>,
    /// The subtrees with a chain of their own.
    pub subtrees: BTreeMap<Path, Subtree>,
    /// The greatest change that a pool has seen and this view does not have: the manager was set back to an older
    /// state. From then on it appoints no lease manager.
    pub set_back: Option<ChangeNumber>,
}

impl View {
    /// A cluster without members and subtrees.
    pub fn new(cluster: u64, rules: Rules) -> Self {
        Self {
            cluster,
            rules,
            number: ChangeNumber::new(0),
            epoch: Epoch::new(0),
            members: BTreeMap::new(),
            subtrees: BTreeMap::new(),
            set_back: None,
        }
    }

    /// The members, each with the epoch in which it joined, for [`transport::Endpoint::advance`].
    pub fn lives(&self) -> BTreeMap<NodeId, Epoch> {
        self.members.iter().map(|(node, member)| (*node, member.life)).collect()
    }

    /// True if this node is a member in this life.
    pub fn is_member(&self, party: Party) -> bool {
        self.members.get(&party.node).is_some_and(|member| member.life == party.life)
    }

    /// Number of living replicas of a subtree that are in sync.
    pub fn copies(&self, subtree: &Subtree) -> usize {
        subtree.living(&self.members).count()
    }

    /// The violated invariant; `None` for every view that the rules have made.
    pub fn fault(&self) -> Option<&'static str> {
        let newest = self.members.values().map(|member| member.life).max();
        if newest > Some(self.epoch) {
            return Some("a member has joined in an epoch to come");
        }
        if self.members.len() > MEMBERS_MAX || self.subtrees.len() > SUBTREES_MAX {
            return Some("too many members or subtrees");
        }
        if self.set_back == Some(ChangeNumber::new(0)) {
            return Some("set back behind no change");
        }
        if self.members.contains_key(&NodeId::NONE) {
            return Some("no node is a member");
        }
        self.subtrees.values().find_map(|subtree| self.subtree_fault(subtree))
    }

    fn subtree_fault(&self, subtree: &Subtree) -> Option<&'static str> {
        let chain = &subtree.chain;
        let twice = |(index, replica): (usize, &Replica)| {
            chain[..index].iter().any(|earlier| earlier.node == replica.node)
        };
        if chain.is_empty() || chain.len() > CHAIN_MAX || chain.iter().enumerate().any(twice) {
            return Some("a chain is empty, too long, or has a node twice");
        }
        if chain.iter().any(|replica| replica.node == NodeId::NONE) {
            return Some("no node is a replica");
        }
        if subtree.version > self.number || subtree.version == ChangeNumber::new(0) {
            return Some("a subtree was changed by no change");
        }
        if subtree.copies_min == 0 || usize::from(subtree.copies_min) > chain.len() {
            return Some("a minimum of copies that no chain has");
        }
        let is_odd = |replica: &Replica| match replica.in_sync {
            true => replica.pool.uid == PoolUid::NONE,
            false => replica.pool != PoolCopy::default(),
        };
        if chain.iter().any(is_odd) {
            return Some("a replica in sync without a pool, or the other way round");
        }
        let (copies, in_sync) = (self.copies(subtree), subtree.in_sync().count());
        if in_sync == 0 {
            return Some("a subtree without a copy");
        }
        // The last copy stays in sync until its node comes back, because only it has the data that it acknowledged
        // alone.
        if copies == 0 && in_sync > 1 {
            return Some("several last copies");
        }
        if copies > 0 && copies < in_sync {
            return Some("a copy that no member has is in sync beside others");
        }
        match subtree.manager {
            None if copies > 0 && self.set_back.is_none() => Some("a living copy and no lease manager"),
            Some(node) if !self.members.contains_key(&node) => Some("a lease manager that is no member"),
            Some(node) if !subtree.living(&self.members).any(|replica| replica.node == node) => {
                Some("a lease manager that is not in sync")
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_plain() {
        for right in [&b"/"[..], b"/a", b"/a/b c", b"/..."] {
            assert!(Path::new(right).is_some(), "{}", right.escape_ascii());
        }
        for wrong in [&b""[..], b"a", b"//", b"/a/", b"/a//b", b"/.", b"/a/..", b"/a\0"] {
            assert!(Path::new(wrong).is_none(), "{}", wrong.escape_ascii());
        }
        assert!(Path::new(&[b'/'; 1]).is_some());
        assert!(Path::new(&[&b"/"[..], &[b'a'; SUBTREE_PATH_MAX]].concat()).is_none());
    }

    #[test]
    fn addresses_are_visible() {
        assert!(Address::new("10.0.0.1:7000").is_some());
        assert!(Address::new("a b").is_none());
        assert!(Address::new(&"a".repeat(ADDRESS_BYTES + 1)).is_none());
    }
}
