//! Messages of members of a cluster to its manager, for tests that act as members.

use cluster::{Address, Change, Path, Placement, PoolCopy, PoolReport};
use format::{ChangeNumber, NodeId, PoolGeneration, PoolUid};

/// The pool of a node, as a new one says it of itself.
pub fn pool_of(node: u32) -> PoolReport {
    let copy = PoolCopy { uid: PoolUid::new(node.into()), generation: PoolGeneration::new(1) };
    PoolReport { copy, ..PoolReport::default() }
}

/// Node 1 joins, as this process.
pub fn join(instance: u64) -> Change {
    let (node, pool, address) = (NodeId::new(1), pool_of(1), Address::default());
    Change::Join { node, instance, replaces: None, medium: 0, pool, address }
}

/// A new subtree on these nodes, founded by the pool of node 1.
pub fn place(path: Path, nodes: &[u32]) -> Change {
    let chain = nodes.iter().map(|node| Placement { node: NodeId::new(*node), hot: true }).collect();
    let (version, founder) = (ChangeNumber::new(0), Some(pool_of(1).copy.uid));
    Change::SetSubtree { path, version, chain, copies_min: 1, founder }
}
