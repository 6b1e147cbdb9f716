//! A node that leads compares its tree with that of a copy, for `hearth check --against`.

use super::member::Member;
use cluster::Path;
use format::NodeId;
use ipc::{Host, SystemHost};
use serde::{Deserialize, Serialize};
use sharedfs::{Compared, Unequal};
use std::time::Duration;
use tracing::info;

/// How long an attempt to connect is.
const CONNECT: Duration = Duration::from_secs(2);

/// The result of a comparison. The schema is stable: fields are added, never changed.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct TreesCompared {
    /// The node that leads.
    pub leader: u32,
    /// The node with which it was compared.
    pub copy: u32,
    /// The entry of the ledger as of which the trees were compared.
    pub entry: u64,
    /// Inodes that were compared.
    pub inodes: u64,
    /// Inodes that differ.
    pub different: u64,
    /// The first of these.
    pub differences: Vec<TreeDifference>,
}

/// An inode that differs.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct TreeDifference {
    /// The inode.
    pub inode: u64,
    /// One of its paths below the root of the tree, at the node that leads; none if that does not have it.
    pub path: Option<String>,
    /// The kinds of difference.
    pub what: Vec<Differs>,
}

/// In which way an inode differs.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "as of sharedfs")]
pub enum Differs {
    OnlyAtLeader,
    OnlyAtCopy,
    Attributes,
    Contents,
    Xattrs,
    DamagedAtLeader,
    DamagedAtCopy,
}

impl From<Unequal> for Differs {
    fn from(unequal: Unequal) -> Self {
        match unequal {
            Unequal::OnlyAtHead => Self::OnlyAtLeader,
            Unequal::OnlyAtCopy => Self::OnlyAtCopy,
            Unequal::Attributes => Self::Attributes,
            Unequal::Contents => Self::Contents,
            Unequal::Xattrs => Self::Xattrs,
            Unequal::DamagedAtHead => Self::DamagedAtLeader,
            Unequal::DamagedAtCopy => Self::DamagedAtCopy,
        }
    }
}

impl Member {
    /// Compares the tree with that of a copy in sync, while both go on; tells how many inodes of how many were compared.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn compare_with(
        &self,
        with: u32,
        told: &mut dyn FnMut(u64, u64),
    ) -> Result<TreesCompared, String> {
        let (head, membership) = {
            let now = self.now.lock();
            (now.head.clone(), now.membership.clone())
        };
        let (Some(head), Some(view)) = (head, membership.and_then(|membership| membership.view())) else {
            return Err("this node does not lead".to_owned());
        };
        let node = NodeId::new(with);
        let is_copy =
            head.daemon.copies().iter().any(|copy| copy.node == node && copy.connected && copy.level);
        let subtree = view.subtrees.get(&Path::root());
        if !is_copy || !subtree.is_some_and(|subtree| subtree.in_sync().any(|other| other == node)) {
            return Err(format!("node {with} is not in sync"));
        }
        let connected = self.links.connect(&view, node, SystemHost.now().after(CONNECT));
        let connection = connected.map_err(|why| format!("cannot connect to node {with}: {why}"))?;
        let begun = SystemHost.now();
        let compared = head.daemon.compare(connection, told).map_err(|why| why.to_string())?;
        let took_ms = SystemHost.now().since(begun).as_millis() as u64;
        info!(
            node = with,
            inodes = compared.inodes,
            unequal = compared.unequal,
            took_ms,
            "compared its tree"
        );
        let Compared { entry, inodes, unequal, differences } = compared;
        let differences = differences.into_iter().map(|difference| TreeDifference {
            inode: difference.inode.get(),
            path: difference.path.map(|path| path.to_string_lossy().into_owned()),
            what: difference.unequal.into_iter().map(Differs::from).collect(),
        });
        Ok(TreesCompared {
            leader: self.begun.node.number,
            copy: with,
            entry: entry.get(),
            inodes,
            different: unequal,
            differences: differences.collect(),
        })
    }
}
