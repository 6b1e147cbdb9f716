//! Changes of the cluster, the conditions of each, and the reasons for refusals.

use crate::view::{Address, Path, Placement, PoolCopy};
use format::{BeatVersion, ChangeNumber, Epoch, NodeId, PoolGeneration, PoolUid};

/// A member in one of its lives. Each join begins a new life, which is named by the epoch that it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Party {
    /// The node.
    pub node: NodeId,
    /// The epoch in which it joined.
    pub life: Epoch,
}

/// The state of a pool when its node joins. The default is that of a node without a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolReport {
    /// The cluster in which it is a copy; `None` if it has never been in one.
    pub cluster: Option<u64>,
    /// The pool, and the generation that was synced in it before the join.
    pub copy: PoolCopy,
    /// The former generation, if the pool knows that its node has joined with it.
    pub former: PoolGeneration,
    /// The newest change that it has seen.
    pub newest: ChangeNumber,
}

impl PoolReport {
    /// True if this pool is the recorded copy, as its last life has left it: an older copy of its folder does not know
    /// the last generation. If the answer to a join was lost, the record already has the current generation.
    pub fn continues(&self, recorded: &PoolCopy) -> bool {
        let knows = [self.former, self.copy.generation].contains(&recorded.generation);
        self.copy.uid == recorded.uid && self.copy.uid != PoolUid::NONE && knows
    }
}

/// A change of the view. Each has its conditions, so that a late change is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The manager's process started: all earlier heartbeats are outdated.
    Start,
    /// A node becomes a member, in a new life.
    Join {
        /// The node.
        node: NodeId,
        /// A random number of the process: a second request with the same number gets the same life.
        instance: u64,
        /// The former life, if the process is its successor on the same pool, and so knows that it has ended.
        replaces: Option<Epoch>,
        /// The medium of its pool: a `pmem::Class` as a number, which the cluster only passes on.
        medium: u8,
        /// The state of its pool.
        pool: PoolReport,
        /// The address at which it listens.
        address: Address,
    },
    /// A member leaves; it has stopped serving.
    Leave {
        /// The member.
        party: Party,
    },
    /// A member is removed because its heartbeat did not change for the time that the rules require.
    Expel {
        /// The member.
        party: Party,
        /// The version of the heartbeat during that time.
        beat: BeatVersion,
        /// The epoch.
        epoch: Epoch,
    },
    /// `by` gets no acknowledgement from `about`, along the chain of `path`: the heartbeats of one of the two are
    /// refused from now on.
    Complain {
        /// The member that complains.
        by: Party,
        /// The member that does not acknowledge.
        about: NodeId,
        /// The subtree whose chain contains both.
        path: Path,
        /// The epoch.
        epoch: Epoch,
    },
    /// A subtree gets this chain; replicas that stay keep their copies. One pool founds a new subtree, and is its only
    /// copy until others have joined. An operator may accept the pool of the last copy in a generation that the manager
    /// does not know, if no lease manager is there: it founds the subtree again.
    SetSubtree {
        /// Its path.
        path: Path,
        /// Its version; 0 if the subtree does not exist.
        version: ChangeNumber,
        /// The replicas, in order.
        chain: Vec<Placement>,
        /// An fsync waits while there are fewer copies than this.
        copies_min: u8,
        /// For a new subtree, the pool that founds it, which belongs to a member in the chain. For an existing one,
        /// the pool of the last copy if that is accepted in the generation in which its node has joined. Otherwise none.
        founder: Option<PoolUid>,
    },
    /// A subtree becomes a part of the one above it.
    RemoveSubtree {
        /// Its path.
        path: Path,
        /// Its version.
        version: ChangeNumber,
        /// Its lease manager; `None` if none is alive.
        by: Option<Party>,
    },
    /// A replica enters the in-sync set or leaves it.
    SetSync {
        /// The subtree.
        path: Path,
        /// Its version.
        version: ChangeNumber,
        /// The lease manager; to leave, also the replica itself.
        by: Party,
        /// The node of the replica.
        node: NodeId,
        /// True to enter, false to leave.
        in_sync: bool,
    },
    /// Lease management moves. The old lease manager stops serving before it sends the change.
    SetManager {
        /// The subtree.
        path: Path,
        /// Its version.
        version: ChangeNumber,
        /// The lease manager.
        by: Party,
        /// The next lease manager. A request for itself makes sure that no earlier change of its own is made any more.
        to: NodeId,
    },
}

impl Change {
    /// The subtree that it changes.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Start | Self::Join { .. } | Self::Leave { .. } | Self::Expel { .. } => None,
            Self::Complain { path, .. }
            | Self::SetSubtree { path, .. }
            | Self::RemoveSubtree { path, .. }
            | Self::SetSync { path, .. }
            | Self::SetManager { path, .. } => Some(path),
        }
    }

    /// True if it begins an epoch.
    pub fn begins_epoch(&self) -> bool {
        matches!(self, Self::Join { .. } | Self::Leave { .. } | Self::Expel { .. })
    }
}

/// A change that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its position in the order of changes.
    pub number: ChangeNumber,
    /// Time of the manager's wall clock, in nanoseconds since 1970, for information.
    pub wall_ns: i64,
    /// The epoch after it.
    pub epoch: Epoch,
    /// The change itself.
    pub change: Change,
    /// For a complaint, the member whose heartbeats are refused from now on. For an expulsion, the expelled member if
    /// its heartbeats were refused.
    pub refused: Option<NodeId>,
}

/// The answer to a change that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The number of the change; for a repeated join, the current number.
    pub number: ChangeNumber,
    /// The epoch after it; for a join, the life of the member.
    pub epoch: Epoch,
}

/// The reason for which nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The node is not a member, or has another life.
    NotMember,
    /// Its heartbeats are refused after a complaint: it will be expelled.
    HeartbeatRefused,
    /// The node is a member in this life, which has to end first.
    AlreadyMember(Epoch),
    /// The current epoch is this one.
    StaleEpoch(Epoch),
    /// The subtree has this version; 0 if it does not exist.
    StaleVersion(ChangeNumber),
    /// The member's heartbeat has this version.
    StaleBeat(BeatVersion),
    /// The heartbeat has not been unchanged for the time that the rules require.
    TooEarly,
    /// Only the lease manager of the subtree may make this change.
    NotManager,
    /// The subtree's lease manager would lose its role without having given it away.
    StillManager(NodeId),
    /// The node is not in the chain, not in sync, or not a member, although the change needs this.
    NotReplica(NodeId),
    /// No living copy would be left.
    LastCopy,
    /// The name of a field with a value that no change may have.
    Field(&'static str),
    /// The limit of members or subtrees is reached.
    Full,
    /// Only the manager itself may make this change.
    Internal,
    /// The pool of the joining node is a copy in this other cluster.
    ForeignPool(u64),
    /// A pool has seen this change, which the manager does not have: the manager was set back to an older state.
    SetBack(ChangeNumber),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotMember => write!(f, "not a member in this life"),
            Self::HeartbeatRefused => write!(f, "its heartbeats are refused after a complaint"),
            Self::AlreadyMember(life) => write!(f, "already a member, since epoch {life}"),
            Self::StaleEpoch(epoch) => write!(f, "the epoch is {epoch}"),
            Self::StaleVersion(version) => write!(f, "the subtree is at version {version}"),
            Self::StaleBeat(beat) => write!(f, "the heartbeat is at version {beat}"),
            Self::TooEarly => write!(f, "the heartbeat may still be valid"),
            Self::NotManager => write!(f, "only the lease manager of the subtree may do that"),
            Self::StillManager(node) => {
                write!(f, "node {node} is its lease manager and has to give it first")
            }
            Self::NotReplica(node) => write!(f, "node {node} is no replica that can do that"),
            Self::LastCopy => write!(f, "no living copy would be left"),
            Self::Field(name) => write!(f, "impossible value in field {name}"),
            Self::Full => write!(f, "no room for another one"),
            Self::Internal => write!(f, "only the manager itself makes this change"),
            Self::ForeignPool(cluster) => write!(f, "the pool belongs to another cluster, {cluster:016x}"),
            Self::SetBack(number) => write!(
                f,
                "the cluster manager was set back: a pool has seen change {number}, which it does not have"
            ),
        }
    }
}

impl std::error::Error for Refusal {}
