//! Data of the cluster manager, and messages to and from it: the view of the cluster, changes of the view, the
//! records of the manager's log, and the messages between a member and the manager (Assise §3.1).
//!
//! This module has the fixed heads and the limits; `cluster::codec` encodes and decodes the lists behind the heads.

use crate::DecodeError;
use crate::checksum::{Running, Salt};
use crate::envelope::{Envelope, HEADER_BYTES};
use crate::ids::{BeatVersion, ChangeNumber, Epoch, NodeId, PoolGeneration, PoolUid};
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of every message to and from the manager.
pub const CLUSTER_MAGIC: [u8; 4] = *b"HCLU";

/// Version of the formats in this module.
pub const CLUSTER_VERSION: u16 = 3;

/// Limit of body bytes in one message.
pub const CLUSTER_BODY_MAX: usize = 1 << 20;

/// Limit of members of a cluster.
pub const MEMBERS_MAX: usize = 128;

/// Limit of subtrees with a chain of their own.
pub const SUBTREES_MAX: usize = 256;

/// Limit of replicas of a subtree.
pub const CHAIN_MAX: usize = 16;

/// Limit of bytes in a subtree's path.
pub const SUBTREE_PATH_MAX: usize = 1023;

/// Limit of records in one answer to [`HistoryRequest`].
pub const HISTORY_COUNT_MAX: u32 = 256;

/// Limit of bytes in a member's address.
pub const ADDRESS_BYTES: usize = 64;

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum ClusterKind {
    /// A [`WatchRequest`], which is answered when there is a newer view.
    Watch = 1,
    /// A [`ChangeBody`] with its lists.
    Propose = 2,
    /// A [`HeartbeatRequest`].
    Beat = 3,
    /// A [`HistoryRequest`].
    History = 4,
    /// A [`HeartbeatRequest`]: asks for the current heartbeat of this member.
    BeatOf = 5,
    /// Answer to `Watch`: a [`ViewHead`] with its lists.
    View = 129,
    /// Answer to `Propose`: a [`DoneReply`].
    Done = 130,
    /// Answer to `Beat` and `BeatOf`: a [`HeartbeatReply`].
    Beaten = 131,
    /// Answer to `History`: [`RecordHead`]s, each with its change.
    Records = 132,
    /// Answer to `Propose` and `Beat`: a [`RefusalReply`]. No change was made.
    Refused = 133,
    /// Answer to every request while the manager cannot serve; no body.
    Failed = 134,
}

impl ClusterKind {
    /// The kind with this number.
    ///
    /// # Errors
    /// `Kind`.
    pub fn from_raw(raw: u16) -> Result<Self, DecodeError> {
        Ok(match raw {
            1 => Self::Watch,
            2 => Self::Propose,
            3 => Self::Beat,
            4 => Self::History,
            5 => Self::BeatOf,
            129 => Self::View,
            130 => Self::Done,
            131 => Self::Beaten,
            132 => Self::Records,
            133 => Self::Refused,
            134 => Self::Failed,
            _ => return Err(DecodeError::Kind),
        })
    }
}

/// Head of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ClusterHead {
    /// [`CLUSTER_MAGIC`].
    pub magic: [u8; 4],
    /// CRC-32C over the head after this field and the body.
    pub checksum: U32,
    /// [`CLUSTER_VERSION`].
    pub version: U16,
    /// A [`ClusterKind`].
    pub kind: U16,
    /// Bytes of the body that follows.
    pub body_bytes: U32,
    /// Number of the request, repeated in its answer.
    pub id: U64,
    /// Cluster of the sender; 0 if the sender does not know it yet.
    pub cluster: U64,
}

const _: () = assert!(size_of::<ClusterHead>() == 32);

impl ClusterHead {
    /// Encodes a message: head and body in one buffer.
    ///
    /// # Panics
    /// If the body is longer than [`CLUSTER_BODY_MAX`].
    pub fn encode(kind: ClusterKind, id: u64, cluster: u64, body: &[u8]) -> Vec<u8> {
        assert!(body.len() <= CLUSTER_BODY_MAX, "a body of {} bytes is too long for a message", body.len());
        let mut head = Self {
            magic: CLUSTER_MAGIC,
            checksum: U32::new(0),
            version: U16::new(CLUSTER_VERSION),
            kind: U16::new(kind as u16),
            body_bytes: U32::new(body.len() as u32),
            id: U64::new(id),
            cluster: U64::new(cluster),
        };
        head.checksum = U32::new(head.sum(body));
        [head.as_bytes(), body].concat()
    }

    /// Decodes the head of a message whose body has not arrived yet.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Version`, `Field`.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let (head, _) = Self::read_from_prefix(bytes).map_err(|_| DecodeError::Truncated)?;
        if head.magic != CLUSTER_MAGIC {
            return Err(DecodeError::Kind);
        }
        if head.version.get() != CLUSTER_VERSION {
            return Err(DecodeError::Version(head.version.get()));
        }
        ClusterKind::from_raw(head.kind.get())?;
        if head.body_bytes.get() as usize > CLUSTER_BODY_MAX {
            return Err(DecodeError::Field("body_bytes"));
        }
        Ok(head)
    }

    /// Checks the body that follows this head.
    ///
    /// # Errors
    /// `Truncated`, `Checksum`.
    pub fn check_body(&self, body: &[u8]) -> Result<(), DecodeError> {
        if body.len() != self.body_bytes.get() as usize {
            return Err(DecodeError::Truncated);
        }
        if self.sum(body) != self.checksum.get() {
            return Err(DecodeError::Checksum);
        }
        Ok(())
    }

    fn sum(&self, body: &[u8]) -> u32 {
        let mut running = Running::new(Salt::NONE);
        running.update(&self.as_bytes()[8..]);
        running.update(body);
        running.finish()
    }
}

/// Asks for the view if it is newer than a known one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WatchRequest {
    /// The last change that the sender knows.
    pub after: ChangeNumber,
    /// Milliseconds for which the manager may wait for a newer view; after that it answers with the current one.
    pub wait_ms: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<WatchRequest>() == 16);

/// A heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct HeartbeatRequest {
    /// Id of the member.
    pub node: NodeId,
    /// The epoch in which the member joined.
    pub life: Epoch,
}

const _: () = assert!(size_of::<HeartbeatRequest>() == 8);

/// Confirms a heartbeat, or reports the current one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct HeartbeatReply {
    /// Version of the heartbeat.
    pub version: BeatVersion,
}

const _: () = assert!(size_of::<HeartbeatReply>() == 8);

/// Asks for records of the audit trail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct HistoryRequest {
    /// The first wanted record.
    pub from: ChangeNumber,
    /// Limit of records in the answer, at most [`HISTORY_COUNT_MAX`].
    pub count: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<HistoryRequest>() == 16);

/// Confirms a change that is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DoneReply {
    /// Number of the change.
    pub number: ChangeNumber,
    /// The epoch after the change; for a join, the life of the member.
    pub epoch: Epoch,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<DoneReply>() == 16);

/// Refuses a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RefusalReply {
    /// The reason, as `cluster::Refusal` numbers it.
    pub reason: U32,
    /// Zero.
    pub reserved: U32,
    /// A value for the reason: an epoch, a life, a version; otherwise 0.
    pub detail: U64,
}

const _: () = assert!(size_of::<RefusalReply>() == 16);

/// The view of the cluster; [`MemberBody`]s and [`SubtreeHead`]s with their lists follow, each in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ViewHead {
    /// Identity of the cluster.
    pub cluster: U64,
    /// The last change that the view contains.
    pub number: ChangeNumber,
    /// Time for which a heartbeat is valid, in nanoseconds of true time.
    pub lease_ns: U64,
    /// Limit of the rate error of a clock, in parts per million.
    pub drift_ppm: U32,
    /// The epoch.
    pub epoch: Epoch,
    /// Number of members.
    pub members: U32,
    /// Number of subtrees.
    pub subtrees: U32,
    /// The greatest change that a pool has seen and this view lacks since the manager was set back; 0 if it was not
    /// set back.
    pub set_back: ChangeNumber,
}

const _: () = assert!(size_of::<ViewHead>() == 48);

/// A member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MemberBody {
    /// Id of the member.
    pub node: NodeId,
    /// The epoch in which it joined.
    pub life: Epoch,
    /// A unique number that the process has chosen before it joined.
    pub instance: U64,
    /// Medium of its pool.
    pub medium: U32,
    /// 1 if its heartbeats are refused.
    pub refused: U32,
    /// Its pool; 0 if it has none.
    pub pool: PoolUid,
    /// The generation of the pool at the join.
    pub generation: PoolGeneration,
    /// The address at which it listens, as text padded with zeros.
    pub address: [u8; ADDRESS_BYTES],
}

const _: () = assert!(size_of::<MemberBody>() == 104);

/// A subtree; its [`ReplicaBody`]s and its path follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SubtreeHead {
    /// The last change of the subtree.
    pub version: ChangeNumber,
    /// Its lease manager; 0 if none.
    pub manager: NodeId,
    /// An fsync waits while fewer copies than this are in sync.
    pub copies_min: u8,
    /// Number of replicas.
    pub chain: u8,
    /// Bytes of the path.
    pub path_bytes: U16,
}

const _: () = assert!(size_of::<SubtreeHead>() == 16);

/// A replica of a subtree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ReplicaBody {
    /// Id of the member.
    pub node: NodeId,
    /// 1 hot, 0 warm.
    pub hot: u8,
    /// 1 if it has all acknowledged data.
    pub in_sync: u8,
    /// Zero.
    pub reserved: U16,
    /// The pool that has all acknowledged data; 0 if `in_sync` is 0.
    pub pool: PoolUid,
    /// The generation of that pool; 0 if `in_sync` is 0.
    pub generation: PoolGeneration,
}

const _: () = assert!(size_of::<ReplicaBody>() == 24);

/// A change; its [`ReplicaBody`]s and its path follow. Fields that its kind does not use are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ChangeBody {
    /// A [`ChangeKind`].
    pub kind: U16,
    /// Bytes of the path.
    pub path_bytes: U16,
    /// Number of replicas.
    pub chain: u8,
    /// Minimum of copies of a subtree.
    pub copies_min: u8,
    /// 1 to enter the in-sync set, 0 to leave it.
    pub in_sync: u8,
    /// Medium of a joining node's pool.
    pub medium: u8,
    /// Id of the member that makes the change; 0 for an operator.
    pub by: NodeId,
    /// Life of that member.
    pub life: Epoch,
    /// Id of the member that the change is about.
    pub node: NodeId,
    /// The epoch on which the change is conditional, or the life that a join replaces.
    pub epoch: Epoch,
    /// The version of the subtree on which the change is conditional; 0: the subtree must not exist.
    pub version: ChangeNumber,
    /// The heartbeat on which an expulsion is conditional.
    pub beat: BeatVersion,
    /// The unique number of a joining process.
    pub instance: U64,
    /// The pool of a joining node, or the one that founds a new subtree; 0 if none.
    pub pool: PoolUid,
    /// The generation of a joining node's pool.
    pub generation: PoolGeneration,
    /// The cluster of a joining node's pool; 0 if the pool has never been in one.
    pub pool_cluster: U64,
    /// The previous generation of a joining node's pool, if it is known to have joined; 0 if none.
    pub former: PoolGeneration,
    /// The newest change that a joining node's pool has seen.
    pub newest: ChangeNumber,
    /// The address at which it listens.
    pub address: [u8; ADDRESS_BYTES],
}

const _: () = assert!(size_of::<ChangeBody>() == 152);

/// Kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum ChangeKind {
    /// The manager started again.
    Start = 1,
    /// A node becomes a member.
    Join = 2,
    /// A member leaves.
    Leave = 3,
    /// A member is expelled.
    Expel = 4,
    /// A member complains about another.
    Complain = 5,
    /// A subtree gets a chain of its own.
    SetSubtree = 6,
    /// A subtree loses its own chain.
    RemoveSubtree = 7,
    /// A replica enters or leaves the in-sync set.
    SetSync = 8,
    /// Lease management moves to another node.
    SetManager = 9,
}

impl ChangeKind {
    /// The kind with this number.
    ///
    /// # Errors
    /// `Kind`.
    pub fn from_raw(raw: u16) -> Result<Self, DecodeError> {
        Ok(match raw {
            1 => Self::Start,
            2 => Self::Join,
            3 => Self::Leave,
            4 => Self::Expel,
            5 => Self::Complain,
            6 => Self::SetSubtree,
            7 => Self::RemoveSubtree,
            8 => Self::SetSync,
            9 => Self::SetManager,
            _ => return Err(DecodeError::Kind),
        })
    }
}

/// Head of a record: a change that was made; the change follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RecordHead {
    /// Number of the record.
    pub number: ChangeNumber,
    /// Time of the manager's wall clock, in nanoseconds since 1970, for information.
    pub wall_ns: I64,
    /// The epoch after the change.
    pub epoch: Epoch,
    /// Bytes of the change.
    pub change_bytes: U32,
    /// Id of the member whose heartbeats a complaint has refused: the named member, or an earlier one that is now
    /// expelled; 0 if none.
    pub refused: NodeId,
    /// [`CLUSTER_VERSION`].
    pub version: U32,
}

const _: () = assert!(size_of::<RecordHead>() == 32);

impl RecordHead {
    /// Checks that this program knows the version of the following change.
    ///
    /// # Errors
    /// `Version`.
    pub fn check(&self) -> Result<(), DecodeError> {
        check_version(self.version)
    }
}

fn check_version(found: U32) -> Result<(), DecodeError> {
    match u16::try_from(found.get()).unwrap_or(u16::MAX) {
        CLUSTER_VERSION => Ok(()),
        other => Err(DecodeError::Version(other)),
    }
}

/// Kind of a frame of the manager's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ClusterFrame {
    /// Fills the ring up to its end.
    Pad = 1,
    /// The first frame of a log. Payload: a [`ViewHead`] with its lists, then the last records,
    /// [`ClusterFrameHead::records`] bytes of them.
    Snapshot = 2,
    /// Payload: a [`RecordHead`] and its change.
    Record = 3,
}

/// First 64 bytes of a frame of the manager's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ClusterFrameHead {
    /// Kind, length, order, checksum.
    pub envelope: Envelope,
    /// The cluster.
    pub cluster: U64,
    /// For a snapshot: the bytes of records at the end of the payload.
    pub records: U32,
    /// [`CLUSTER_VERSION`].
    pub version: U32,
    /// Zero.
    pub reserved: [u8; 24],
}

const _: () = assert!(size_of::<ClusterFrameHead>() == HEADER_BYTES);

impl ClusterFrameHead {
    /// Creates the head of a frame with this number of payload bytes, of which `records` are records of a snapshot.
    pub fn new(kind: ClusterFrame, cluster: u64, payload_bytes: u32, records: u32) -> Self {
        Self {
            envelope: Envelope::new(kind as u8, 0, payload_bytes),
            cluster: U64::new(cluster),
            records: U32::new(records),
            version: U32::new(CLUSTER_VERSION.into()),
            reserved: [0; 24],
        }
    }

    /// Decodes a frame whose checksum was checked: its kind, head and payload.
    ///
    /// # Errors
    /// `Truncated`, `Version`, `Kind`.
    pub fn split(frame: &[u8]) -> Result<(ClusterFrame, Self, &[u8]), DecodeError> {
        let (head, payload) = Self::read_from_prefix(frame).map_err(|_| DecodeError::Truncated)?;
        let envelope = Envelope::decode(frame)?;
        if payload.len() as u64 != u64::from(envelope.payload_bytes.get()) {
            return Err(DecodeError::Truncated);
        }
        let kind = match envelope.kind {
            // Pads are the ring's own frames, and contain nothing.
            1 => return Ok((ClusterFrame::Pad, head, payload)),
            2 => ClusterFrame::Snapshot,
            3 => ClusterFrame::Record,
            _ => return Err(DecodeError::Kind),
        };
        check_version(head.version)?;
        Ok((kind, head, payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_message_is_decoded_as_it_was_encoded() {
        let message = ClusterHead::encode(ClusterKind::Beat, 7, 9, b"body");
        let head = ClusterHead::decode(&message).unwrap();
        assert_eq!((head.id.get(), head.cluster.get(), head.kind.get()), (7, 9, ClusterKind::Beat as u16));
        assert_eq!(head.check_body(b"body"), Ok(()));
        assert_eq!(head.check_body(b"bodx"), Err(DecodeError::Checksum));
        assert_eq!(head.check_body(b"bod"), Err(DecodeError::Truncated));
        let mut other = message.clone();
        other[8] += 1;
        assert_eq!(ClusterHead::decode(&other), Err(DecodeError::Version(CLUSTER_VERSION + 1)));
        let mut other = message;
        other[16] ^= 1;
        assert_eq!(ClusterHead::decode(&other).unwrap().check_body(b"body"), Err(DecodeError::Checksum));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..160)) {
            let _ = ClusterHead::decode(&bytes);
            let _ = ClusterFrameHead::split(&bytes);
        }
    }
}
