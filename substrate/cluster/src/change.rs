//! What can be changed in a cluster, what each change is conditional on, and why one is refused.

use crate::view::{Address, Path, Placement, PoolCopy};
use format::{BeatVersion, ChangeNumber, Epoch, NodeId, PoolGeneration, PoolUid};

/// A member in one of its lives: every joining begins a new one, named by the epoch that it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Party {
    /// Who.
    pub node: NodeId,
    /// The epoch in which it joined.
    pub life: Epoch,
}

/// What a pool says of itself when its node joins. The default is what a node without a pool says: it holds nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolReport {
    /// The cluster in which it is a copy; none if it has never been in one.
    pub cluster: Option<u64>,
    /// Which pool, and the generation that it settled before it asked.
    pub copy: PoolCopy,
    /// The generation before, as far as the pool knows that its node has joined with it.
    pub former: PoolGeneration,
    /// The newest change that it has seen.
    pub newest: ChangeNumber,
}

impl PoolReport {
    /// True if this is the pool that was a copy, as that life of it has left it: an older copy of its folder does not know
    /// the last generation. The present one is known already where the answer to a join was lost.
    pub fn continues(&self, recorded: &PoolCopy) -> bool {
        let knows = [self.former, self.copy.generation].contains(&recorded.generation);
        self.copy.uid == recorded.uid && self.copy.uid != PoolUid::NONE && knows
    }
}

/// A change of the view. Each carries what it is conditional on, so that one that comes late is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The manager's process started: all heartbeats before it are of the past.
    Start,
    /// A node becomes a member, in a new life.
    Join {
        /// Who.
        node: NodeId,
        /// A random number of the process: asked again with the same, the manager gives the same life.
        instance: u64,
        /// The life before, if the process is its successor on the same pool, and so knows that it has ended.
        replaces: Option<Epoch>,
        /// What its pool lies on: a `pmem::Class` as a number; the cluster only passes it on.
        medium: u8,
        /// What its pool says of itself.
        pool: PoolReport,
        /// Where it listens.
        address: Address,
    },
    /// A member goes; it has stopped serving.
    Leave {
        /// Which.
        party: Party,
    },
    /// A member is removed because its heartbeat did not change for as long as the rules ask.
    Expel {
        /// Which.
        party: Party,
        /// The heartbeat that the expeller has seen for all that time.
        beat: BeatVersion,
        /// The epoch.
        epoch: Epoch,
    },
    /// `by` gets no acknowledgement from `about`, along the chain of `path`: the heartbeats of one of them are refused
    /// from now on.
    Complain {
        /// Who complains.
        by: Party,
        /// About whom.
        about: NodeId,
        /// The subtree whose chain both are in.
        path: Path,
        /// The epoch.
        epoch: Epoch,
    },
    /// A subtree gets this chain; replicas that stay keep what they are in sync with. One pool founds a new subtree, and
    /// is its only copy until others have joined.
    SetSubtree {
        /// Its path.
        path: Path,
        /// Its version; 0: there is none.
        version: ChangeNumber,
        /// The replicas, in order.
        chain: Vec<Placement>,
        /// Below so many copies an fsync waits.
        copies_min: u8,
        /// Of a new subtree: the pool that founds it, of a member in the chain. None otherwise.
        founder: Option<PoolUid>,
    },
    /// A subtree becomes a part of the one above it.
    RemoveSubtree {
        /// Its path.
        path: Path,
        /// Its version.
        version: ChangeNumber,
        /// Its lease manager; nobody if none is alive.
        by: Option<Party>,
    },
    /// A replica comes into the in-sync set or leaves it.
    SetSync {
        /// The subtree.
        path: Path,
        /// Its version.
        version: ChangeNumber,
        /// Its lease manager, or, to leave, the replica itself.
        by: Party,
        /// Which replica.
        node: NodeId,
        /// Comes or goes.
        in_sync: bool,
    },
    /// Lease management moves. Who gives it stops serving before it asks.
    SetManager {
        /// The subtree.
        path: Path,
        /// Its version.
        version: ChangeNumber,
        /// The lease manager.
        by: Party,
        /// The next one; itself, to make sure that nothing it sent before still counts.
        to: NodeId,
    },
}

impl Change {
    /// The subtree it is about.
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
    /// Its place in the order.
    pub number: ChangeNumber,
    /// When, by the manager's wall clock: nanoseconds since 1970, for people to read.
    pub wall_ns: i64,
    /// The epoch after it.
    pub epoch: Epoch,
    /// What.
    pub change: Change,
    /// Of a complaint: whose heartbeats are refused from now on. Of an expulsion: who is expelled, if that is why.
    pub refused: Option<NodeId>,
}

/// That a change was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Its number, or for a join that was asked again one not before it.
    pub number: ChangeNumber,
    /// The epoch after it; to a join, the life that it gave.
    pub epoch: Epoch,
}

/// Why nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The party is no member, or another life of it is.
    NotMember,
    /// Its heartbeats are refused after a complaint: it will be expelled.
    HeartbeatRefused,
    /// The node is a member in this life, which has to end first.
    AlreadyMember(Epoch),
    /// The epoch is this one.
    StaleEpoch(Epoch),
    /// The subtree is at this version; 0: there is none.
    StaleVersion(ChangeNumber),
    /// The member's heartbeat is at this version.
    StaleBeat(BeatVersion),
    /// The heartbeat has not been seen for as long as the rules ask.
    TooEarly,
    /// Only the lease manager of the subtree may do that.
    NotManager,
    /// The subtree's lease manager would lose it without having given it.
    StillManager(NodeId),
    /// The node is not in the chain, not in sync, or not a member, as the change needs it.
    NotReplica(NodeId),
    /// No living copy would be left.
    LastCopy,
    /// A field has a value that no change may have: its name.
    Field(&'static str),
    /// No room for another member or subtree.
    Full,
    /// Only the manager itself may make this change.
    Internal,
    /// The pool of who joins is a copy in this other cluster.
    ForeignPool(u64),
    /// A pool has seen this change, which the manager does not have: it was set back to an older state.
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
