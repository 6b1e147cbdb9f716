//! Messages between nodes: the handshake on the control channel, the connect token of a connection, the head of every
//! frame, and the head of a remote call. `docs/protocol.md` describes their order and meaning.
//!
//! All of these come from another machine: lengths and values are checked, and no message decides how much is
//! allocated. Request and refusal are the same in each version of the protocol, so that two nodes without a common
//! version can tell each other the reason.

use crate::DecodeError;
use crate::ids::{Epoch, NodeId};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of every message on a control channel, and of a request, a connect token and a refusal.
pub const WIRE_MAGIC: [u8; 4] = *b"HRTW";

/// Newest version of the protocol between nodes that this program speaks.
pub const WIRE_VERSION: u8 = 2;

/// Oldest version that it speaks: that of the previous release, so that a cluster can be upgraded node by node; without
/// a previous release, the newest.
pub const WIRE_VERSION_MIN: u8 = 2;

/// Bytes of the proof in a request.
pub const REQUEST_PROOF_BYTES: usize = 16;

/// Bytes of a proof in the handshake.
pub const PROOF_BYTES: usize = 32;

/// Bytes of a nonce in the handshake.
pub const NONCE_BYTES: usize = 32;

/// Bytes of a cluster's identity.
pub const CLUSTER_BYTES: usize = 16;

/// The version that two neighbours use: the newest that both speak.
pub const fn common_version(theirs_min: u8, theirs_max: u8) -> Option<u8> {
    let newest = if theirs_max < WIRE_VERSION { theirs_max } else { WIRE_VERSION };
    let fits = theirs_min <= theirs_max && newest >= theirs_min && newest >= WIRE_VERSION_MIN;
    if fits { Some(newest) } else { None }
}

/// Kind of a message on a control channel. Each kind has one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum ControlKind {
    /// Initiator, first: [`WireRequest`].
    Request = 1,
    /// Initiator, with it: [`WireHello`].
    Hello = 2,
    /// Acceptor: [`WireChallenge`].
    Challenge = 3,
    /// Initiator: [`WireProof`].
    Proof = 4,
    /// Acceptor, last: [`WireWelcome`].
    Welcome = 5,
    /// Either, instead of its next message: [`WireRefusal`].
    Refusal = 6,
}

impl ControlKind {
    fn from_raw(raw: u16) -> Result<Self, DecodeError> {
        Ok(match raw {
            1 => Self::Request,
            2 => Self::Hello,
            3 => Self::Challenge,
            4 => Self::Proof,
            5 => Self::Welcome,
            6 => Self::Refusal,
            _ => return Err(DecodeError::Kind),
        })
    }

    /// Bytes of its body.
    pub const fn body_bytes(self) -> usize {
        match self {
            Self::Request => size_of::<WireRequest>(),
            Self::Hello => size_of::<WireHello>(),
            Self::Challenge => size_of::<WireChallenge>(),
            Self::Proof => size_of::<WireProof>(),
            Self::Welcome => size_of::<WireWelcome>(),
            Self::Refusal => size_of::<WireRefusal>(),
        }
    }
}

/// Bytes of the longest message on a control channel, with its head.
pub const CONTROL_MESSAGE_MAX: usize = size_of::<ControlHead>() + size_of::<WireChallenge>();

/// Head of every message on a control channel, which is a stream of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ControlHead {
    /// [`WIRE_MAGIC`].
    pub magic: [u8; 4],
    /// A [`ControlKind`].
    pub kind: U16,
    /// Bytes of the body: the length of its kind.
    pub bytes: U16,
}

const _: () = assert!(size_of::<ControlHead>() == 8);

impl ControlHead {
    /// The head of a message.
    pub fn new(kind: ControlKind) -> Self {
        let bytes = U16::new(kind.body_bytes() as u16);
        Self { magic: WIRE_MAGIC, kind: U16::new(kind as u16), bytes }
    }

    /// The first message of a stream of which `stream` has arrived: its kind and body. None: more bytes are needed,
    /// of [`CONTROL_MESSAGE_MAX`] at most.
    ///
    /// # Errors
    /// `Kind`: another magic or kind. `Field`: another length than its kind has.
    pub fn decode(stream: &[u8]) -> Result<Option<(ControlKind, &[u8])>, DecodeError> {
        let known = stream.len().min(WIRE_MAGIC.len());
        if stream[..known] != WIRE_MAGIC[..known] {
            return Err(DecodeError::Kind);
        }
        let Ok((head, rest)) = Self::read_from_prefix(stream) else { return Ok(None) };
        let kind = ControlKind::from_raw(head.kind.get())?;
        if usize::from(head.bytes.get()) != kind.body_bytes() {
            return Err(DecodeError::Field("bytes"));
        }
        Ok(rest.get(..kind.body_bytes()).map(|body| (kind, body)))
    }
}

/// The first message of a handshake. A program without the cluster's key cannot create one, and is refused at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireRequest {
    /// [`WIRE_MAGIC`].
    pub magic: [u8; 4],
    /// Oldest version of the protocol that the initiator speaks.
    pub version_min: u8,
    /// Newest version.
    pub version_max: u8,
    /// Identity of its cluster.
    pub cluster: [u8; CLUSTER_BYTES],
    /// Random.
    pub nonce: [u8; 16],
    /// Proves that the initiator has the cluster's key. The rest of the handshake detects a replayed request.
    pub proof: [u8; REQUEST_PROOF_BYTES],
}

const _: () = assert!(size_of::<WireRequest>() == 54);

impl WireRequest {
    /// Decodes a request, without a check of its versions.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Field`: bytes too many.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let request: Self = check_body(bytes)?;
        if request.magic != WIRE_MAGIC {
            return Err(DecodeError::Kind);
        }
        Ok(request)
    }

    /// The bytes that the proof covers.
    pub fn claim(&self) -> &[u8] {
        &self.as_bytes()[..size_of::<Self>() - REQUEST_PROOF_BYTES]
    }
}

/// The reason of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum RefusalReason {
    /// A message does not conform to the protocol.
    Malformed = 1,
    /// No common version.
    Version = 2,
    /// The cluster is another one.
    Cluster = 3,
    /// The proof does not match the key.
    Key = 4,
    /// The initiator's epoch is over.
    OldEpoch = 5,
    /// The initiator's epoch has not begun here.
    NewEpoch = 6,
    /// The Hello asks for another node.
    Node = 7,
    /// The initiator is not a member, or was expelled.
    NotMember = 8,
    /// A limit of connections is reached.
    Full = 9,
    /// The handshake took too long.
    Late = 10,
    /// The refusing side cannot take the connection, because a call of its own failed.
    Failed = 11,
}

impl RefusalReason {
    fn from_raw(raw: u16) -> Result<Self, DecodeError> {
        Ok(match raw {
            1 => Self::Malformed,
            2 => Self::Version,
            3 => Self::Cluster,
            4 => Self::Key,
            5 => Self::OldEpoch,
            6 => Self::NewEpoch,
            7 => Self::Node,
            8 => Self::NotMember,
            9 => Self::Full,
            10 => Self::Late,
            11 => Self::Failed,
            _ => return Err(DecodeError::Field("reason")),
        })
    }
}

/// Tells the reason for a refusal, on a control channel or instead of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireRefusal {
    /// [`WIRE_MAGIC`].
    pub magic: [u8; 4],
    /// Oldest version of the protocol that the refusing side speaks.
    pub version_min: u8,
    /// Newest version.
    pub version_max: u8,
    /// A [`RefusalReason`].
    pub reason: U16,
    /// Epoch of the refusing side if the epoch is the reason, otherwise 0.
    pub epoch: Epoch,
}

const _: () = assert!(size_of::<WireRefusal>() == 12);

impl WireRefusal {
    /// Creates a refusal; `epoch` is revealed only to a peer that has proved the key.
    pub fn new(reason: RefusalReason, epoch: Epoch) -> Self {
        Self {
            magic: WIRE_MAGIC,
            version_min: WIRE_VERSION_MIN,
            version_max: WIRE_VERSION,
            reason: U16::new(reason as u16),
            epoch,
        }
    }

    /// Decodes a refusal and its reason.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Field`.
    pub fn decode(bytes: &[u8]) -> Result<(Self, RefusalReason), DecodeError> {
        // Some fabrics append padding.
        let (refusal, _) = Self::read_from_prefix(bytes).map_err(|_| DecodeError::Truncated)?;
        if refusal.magic != WIRE_MAGIC {
            return Err(DecodeError::Kind);
        }
        let reason = RefusalReason::from_raw(refusal.reason.get())?;
        Ok((refusal, reason))
    }
}

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum FrameKind {
    /// A message of the connection's user.
    Message = 1,
    /// Only the head, for its count.
    Taken = 2,
    /// Asks for a pong. Only the head.
    Ping = 3,
    /// Answers a ping. Only the head.
    Pong = 4,
    /// The sender closes the connection. Only the head.
    Goodbye = 5,
}

impl FrameKind {
    fn from_raw(raw: u16) -> Result<Self, DecodeError> {
        Ok(match raw {
            1 => Self::Message,
            2 => Self::Taken,
            3 => Self::Ping,
            4 => Self::Pong,
            5 => Self::Goodbye,
            _ => return Err(DecodeError::Kind),
        })
    }

    /// True for the kinds without a body.
    pub const fn is_bare(self) -> bool {
        matches!(self, Self::Taken | Self::Ping | Self::Pong | Self::Goodbye)
    }
}

/// Head of a frame, the unit of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct FrameHead {
    /// A [`FrameKind`].
    pub kind: U16,
    /// Zero.
    pub reserved: U16,
    /// Number of messages and immediates of the other side that were taken so far, modulo 2^32. The other side may
    /// have one window beyond it in progress.
    pub taken: U32,
}

const _: () = assert!(size_of::<FrameHead>() == 8);

impl FrameHead {
    /// Creates a head.
    pub fn new(kind: FrameKind, taken: u32) -> Self {
        Self { kind: U16::new(kind as u16), reserved: U16::new(0), taken: U32::new(taken) }
    }

    /// Splits a frame into kind, count, and body.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Field`: a body of a kind that has none.
    pub fn decode(frame: &[u8]) -> Result<(FrameKind, u32, &[u8]), DecodeError> {
        let (head, body) = Self::read_from_prefix(frame).map_err(|_| DecodeError::Truncated)?;
        let kind = FrameKind::from_raw(head.kind.get())?;
        if kind.is_bare() && !body.is_empty() {
            return Err(DecodeError::Field("body"));
        }
        Ok((kind, head.taken.get(), body))
    }
}

/// Follows the request: identity and limits of the initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireHello {
    /// Oldest version of the protocol that the initiator speaks.
    pub version_min: u8,
    /// Newest version.
    pub version_max: u8,
    /// Zero.
    pub reserved: U16,
    /// Its epoch.
    pub epoch: Epoch,
    /// Id of the sending node.
    pub from: NodeId,
    /// Id of the node to which it wants to connect.
    pub to: NodeId,
    /// Identity of its cluster.
    pub cluster: [u8; CLUSTER_BYTES],
    /// Random, never used before.
    pub nonce: [u8; NONCE_BYTES],
    /// Bytes of the longest message that it accepts.
    pub message_bytes: U32,
    /// Window: messages and immediates to it that may be in progress.
    pub window: U32,
}

const _: () = assert!(size_of::<WireHello>() == 72);

/// The acceptor's answer to the Hello: its identity and limits, and a proof that it has the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireChallenge {
    /// The version that both sides use.
    pub version: u8,
    /// Zero.
    pub reserved: u8,
    /// Zero.
    pub reserved2: U16,
    /// Its epoch.
    pub epoch: Epoch,
    /// Id of the sending node.
    pub from: NodeId,
    /// Bytes of the longest message that it accepts.
    pub message_bytes: U32,
    /// Window: messages and immediates to it that may be in progress.
    pub window: U32,
    /// Random, never used before.
    pub nonce: [u8; NONCE_BYTES],
    /// MAC with the cluster's key over the Hello and all fields above.
    pub proof: [u8; PROOF_BYTES],
}

const _: () = assert!(size_of::<WireChallenge>() == 84);

impl WireChallenge {
    /// The bytes that the proof covers, after those of the Hello.
    pub fn claim(&self) -> &[u8] {
        &self.as_bytes()[..size_of::<Self>() - PROOF_BYTES]
    }
}

/// Proves that the initiator has the key, and names the port of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireProof {
    /// The local port from which the initiator will connect; 0 if the fabric has no ports.
    pub port: U16,
    /// Zero.
    pub reserved: U16,
    /// MAC with the cluster's key over Hello, Challenge and all fields above.
    pub proof: [u8; PROOF_BYTES],
}

const _: () = assert!(size_of::<WireProof>() == 36);

impl WireProof {
    /// The bytes that the proof covers, after those of Hello and Challenge.
    pub fn claim(&self) -> &[u8] {
        &self.as_bytes()[..size_of::<Self>() - PROOF_BYTES]
    }
}

/// Tells the initiator where the acceptor listens for its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireWelcome {
    /// The port at which the acceptor listens, at the address of its control listener.
    pub port: U16,
    /// Zero.
    pub reserved: U16,
    /// MAC with the cluster's key over Hello, Challenge, Proof and all fields above.
    pub proof: [u8; PROOF_BYTES],
}

const _: () = assert!(size_of::<WireWelcome>() == 36);

impl WireWelcome {
    /// The bytes that the proof covers, after those of Hello, Challenge and Proof.
    pub fn claim(&self) -> &[u8] {
        &self.as_bytes()[..size_of::<Self>() - PROOF_BYTES]
    }
}

/// Accompanies a connection request, and proves that the connection is the one that a Welcome expects. It fits into the
/// private data of every fabric (verbs: 55 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireConnectToken {
    /// [`WIRE_MAGIC`].
    pub magic: [u8; 4],
    /// MAC with the cluster's key over Hello, Challenge, Proof and Welcome.
    pub proof: [u8; PROOF_BYTES],
}

const _: () = assert!(size_of::<WireConnectToken>() == 36);

impl WireConnectToken {
    /// Decodes a connect token, without a check of its proof.
    ///
    /// # Errors
    /// `Truncated`, `Kind`.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        // Some fabrics append padding.
        let (entry, _) = Self::read_from_prefix(bytes).map_err(|_| DecodeError::Truncated)?;
        if entry.magic != WIRE_MAGIC {
            return Err(DecodeError::Kind);
        }
        Ok(entry)
    }
}

/// Decodes a body that consists of one structure.
///
/// # Errors
/// `Truncated`, `Field`: bytes too many.
pub fn check_body<T: FromBytes + KnownLayout + Immutable>(body: &[u8]) -> Result<T, DecodeError> {
    let (value, rest) = T::read_from_prefix(body).map_err(|_| DecodeError::Truncated)?;
    if !rest.is_empty() {
        return Err(DecodeError::Field("body"));
    }
    Ok(value)
}

/// Description of granted memory, which its owner sends to the peer in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireRegion {
    /// Key that authorizes the access.
    pub key: U64,
    /// Address or offset of the first byte, as the fabric defines it.
    pub base: U64,
    /// Length in bytes.
    pub bytes: U64,
}

const _: () = assert!(size_of::<WireRegion>() == 24);

/// Kind of a message of remote calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum RemoteKind {
    /// A request; the body holds its arguments.
    Request = 1,
    /// The answer to a request.
    Response = 2,
    /// The caller no longer waits for the answer. The answer is sent nevertheless.
    Cancel = 3,
}

/// Head of a message of remote calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RemoteHead {
    /// Number of the call, which the caller uses once in the life of the connection.
    pub id: U64,
    /// A [`RemoteKind`].
    pub kind: U16,
    /// Request: number of the operation. Response: 0 if it was executed, otherwise a code. Cancel: 0.
    pub code: U16,
    /// Request: milliseconds for which the caller waits, 0 for no limit. Otherwise 0.
    pub within_ms: U32,
}

const _: () = assert!(size_of::<RemoteHead>() == 16);

/// [`RemoteHead::code`] of a response to a call that was cancelled or timed out before it was executed.
pub const REMOTE_CANCELLED: u16 = u16::MAX;

impl RemoteHead {
    /// Creates a head.
    pub fn new(kind: RemoteKind, id: u64, code: u16, within_ms: u32) -> Self {
        Self {
            id: U64::new(id),
            kind: U16::new(kind as u16),
            code: U16::new(code),
            within_ms: U32::new(within_ms),
        }
    }

    /// Splits a message into head, kind, and body.
    ///
    /// # Errors
    /// `Truncated`, `Kind`.
    pub fn decode(message: &[u8]) -> Result<(Self, RemoteKind, &[u8]), DecodeError> {
        let (head, body) = Self::read_from_prefix(message).map_err(|_| DecodeError::Truncated)?;
        let kind = match head.kind.get() {
            1 => RemoteKind::Request,
            2 => RemoteKind::Response,
            3 => RemoteKind::Cancel,
            _ => return Err(DecodeError::Kind),
        };
        Ok((head, kind, body))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_use_the_newest_version_that_both_speak() {
        assert_eq!(common_version(WIRE_VERSION, WIRE_VERSION), Some(WIRE_VERSION));
        assert_eq!(common_version(WIRE_VERSION_MIN, WIRE_VERSION + 5), Some(WIRE_VERSION));
        assert_eq!(common_version(WIRE_VERSION + 1, WIRE_VERSION + 2), None);
        assert_eq!(common_version(0, WIRE_VERSION_MIN - 1), None);
        assert_eq!(common_version(WIRE_VERSION, 0), None);
    }

    #[test]
    fn a_frame_is_split_into_kind_count_and_body() {
        let mut frame = FrameHead::new(FrameKind::Message, 7).as_bytes().to_vec();
        frame.extend_from_slice(b"abc");
        assert_eq!(FrameHead::decode(&frame), Ok((FrameKind::Message, 7, &b"abc"[..])));
        frame[0] = FrameKind::Ping as u8;
        assert_eq!(FrameHead::decode(&frame), Err(DecodeError::Field("body")));
        frame[0] = 9;
        assert_eq!(FrameHead::decode(&frame), Err(DecodeError::Kind));
        assert_eq!(FrameHead::decode(&frame[..7]), Err(DecodeError::Truncated));
    }

    #[test]
    fn messages_of_a_stream_are_split_by_the_length_of_their_kind() {
        let kinds = [
            ControlKind::Request,
            ControlKind::Hello,
            ControlKind::Challenge,
            ControlKind::Proof,
            ControlKind::Welcome,
        ];
        for kind in kinds.into_iter().chain([ControlKind::Refusal]) {
            let mut stream = ControlHead::new(kind).as_bytes().to_vec();
            stream.resize(stream.len() + kind.body_bytes(), 7);
            assert!(stream.len() <= CONTROL_MESSAGE_MAX);
            for cut in 0..stream.len() {
                assert_eq!(ControlHead::decode(&stream[..cut]), Ok(None));
            }
            stream.push(9);
            assert_eq!(ControlHead::decode(&stream), Ok(Some((kind, &vec![7; kind.body_bytes()][..]))));
            let changed = |at: usize| {
                let mut changed = stream.clone();
                changed[at] ^= 0x40;
                ControlHead::decode(&changed).map(|_| ())
            };
            assert_eq!(changed(0), Err(DecodeError::Kind));
            assert_eq!(changed(5), Err(DecodeError::Kind));
            assert_eq!(changed(6), Err(DecodeError::Field("bytes")));
            assert_eq!(ControlHead::decode(b"G"), Err(DecodeError::Kind), "the first byte is enough");
        }
    }

    #[test]
    fn every_reason_is_decoded_as_it_was_encoded() {
        for raw in 0..20 {
            let Ok(reason) = RefusalReason::from_raw(raw) else { continue };
            let refusal = WireRefusal::new(reason, Epoch::new(3));
            assert_eq!(WireRefusal::decode(refusal.as_bytes()), Ok((refusal, reason)));
        }
    }
}
