//! What nodes say to each other: the handshake at the door, the entry that comes with a connection, the head of every
//! frame, and the head of a remote call. `docs/protocol.md` says in which order they come and what they mean.
//!
//! Everything here comes from another machine: lengths and values are checked, and nothing is allocated by what it
//! says. Each version of the protocol keeps the knock and the refusal as they are, so that neighbours of any two
//! versions understand why they do not.

use crate::DecodeError;
use crate::ids::{Epoch, NodeId};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of every message at the door, of a knock, an entry and a refusal.
pub const WIRE_MAGIC: [u8; 4] = *b"HRTW";

/// Newest version of the protocol between nodes that this program speaks.
pub const WIRE_VERSION: u8 = 2;

/// Oldest version that it speaks: that of the release before, so that a cluster can be renewed node by node; as long as
/// there was no release before, the newest.
pub const WIRE_VERSION_MIN: u8 = 2;

/// Bytes of the proof in a knock.
pub const KNOCK_PROOF_BYTES: usize = 16;

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

/// What a message at the door is. Each has one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum DoorKind {
    /// Initiator, first: [`Knock`].
    Knock = 1,
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

impl DoorKind {
    fn from_raw(raw: u16) -> Result<Self, DecodeError> {
        Ok(match raw {
            1 => Self::Knock,
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
            Self::Knock => size_of::<Knock>(),
            Self::Hello => size_of::<WireHello>(),
            Self::Challenge => size_of::<WireChallenge>(),
            Self::Proof => size_of::<WireProof>(),
            Self::Welcome => size_of::<WireWelcome>(),
            Self::Refusal => size_of::<WireRefusal>(),
        }
    }
}

/// Bytes of the longest message at the door, with its head.
pub const DOOR_MESSAGE_MAX: usize = size_of::<DoorHead>() + size_of::<WireChallenge>();

/// Head of every message at the door, where bytes come as a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DoorHead {
    /// [`WIRE_MAGIC`].
    pub magic: [u8; 4],
    /// A [`DoorKind`].
    pub kind: U16,
    /// Bytes of the body: those of its kind.
    pub bytes: U16,
}

const _: () = assert!(size_of::<DoorHead>() == 8);

impl DoorHead {
    /// The head of a message.
    pub fn new(kind: DoorKind) -> Self {
        let bytes = U16::new(kind.body_bytes() as u16);
        Self { magic: WIRE_MAGIC, kind: U16::new(kind as u16), bytes }
    }

    /// The first message of a stream of which `stream` has arrived: its kind and body. None: more bytes are needed,
    /// of [`DOOR_MESSAGE_MAX`] at most.
    ///
    /// # Errors
    /// `Kind`: another magic or kind. `Field`: another length than its kind has.
    pub fn decode(stream: &[u8]) -> Result<Option<(DoorKind, &[u8])>, DecodeError> {
        let known = stream.len().min(WIRE_MAGIC.len());
        if stream[..known] != WIRE_MAGIC[..known] {
            return Err(DecodeError::Kind);
        }
        let Ok((head, rest)) = Self::read_from_prefix(stream) else { return Ok(None) };
        let kind = DoorKind::from_raw(head.kind.get())?;
        if usize::from(head.bytes.get()) != kind.body_bytes() {
            return Err(DecodeError::Field("bytes"));
        }
        Ok(rest.get(..kind.body_bytes()).map(|body| (kind, body)))
    }
}

/// What comes first at the door: who cannot make one is refused before it costs anything more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Knock {
    /// [`WIRE_MAGIC`].
    pub magic: [u8; 4],
    /// Oldest version of the protocol that the initiator speaks.
    pub version_min: u8,
    /// Newest version.
    pub version_max: u8,
    /// The cluster it belongs to.
    pub cluster: [u8; CLUSTER_BYTES],
    /// Random.
    pub nonce: [u8; 16],
    /// Shows that the initiator once had the cluster's key. Who repeats another's knock is found by the handshake.
    pub proof: [u8; KNOCK_PROOF_BYTES],
}

const _: () = assert!(size_of::<Knock>() == 54);

impl Knock {
    /// Reads a knock. Versions are not judged.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Field`: bytes too many.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let knock: Self = check_body(bytes)?;
        if knock.magic != WIRE_MAGIC {
            return Err(DecodeError::Kind);
        }
        Ok(knock)
    }

    /// The bytes that the proof is about.
    pub fn claim(&self) -> &[u8] {
        &self.as_bytes()[..size_of::<Self>() - KNOCK_PROOF_BYTES]
    }
}

/// Why a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum RefusalReason {
    /// What was said is no part of the protocol.
    Malformed = 1,
    /// No common version.
    Version = 2,
    /// Another cluster.
    Cluster = 3,
    /// The proof does not fit the key.
    Key = 4,
    /// The initiator's epoch is over.
    OldEpoch = 5,
    /// The initiator's epoch has not begun here.
    NewEpoch = 6,
    /// Another node was wanted.
    Node = 7,
    /// The initiator is not welcome: no member, or expelled.
    NotMember = 8,
    /// No room.
    Full = 9,
    /// The handshake took too long.
    Late = 10,
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
            _ => return Err(DecodeError::Field("reason")),
        })
    }
}

/// Says why not: at the door, or instead of a connection.
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
    /// Epoch of the refusing side, where the epoch is the reason; else 0.
    pub epoch: Epoch,
}

const _: () = assert!(size_of::<WireRefusal>() == 12);

impl WireRefusal {
    /// A refusal; `epoch` is only told to who has shown the key.
    pub fn new(reason: RefusalReason, epoch: Epoch) -> Self {
        Self {
            magic: WIRE_MAGIC,
            version_min: WIRE_VERSION_MIN,
            version_max: WIRE_VERSION,
            reason: U16::new(reason as u16),
            epoch,
        }
    }

    /// Reads a refusal and its reason.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Field`.
    pub fn decode(bytes: &[u8]) -> Result<(Self, RefusalReason), DecodeError> {
        // Some fabrics fill up what they carry.
        let (refusal, _) = Self::read_from_prefix(bytes).map_err(|_| DecodeError::Truncated)?;
        if refusal.magic != WIRE_MAGIC {
            return Err(DecodeError::Kind);
        }
        let reason = RefusalReason::from_raw(refusal.reason.get())?;
        Ok((refusal, reason))
    }
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum FrameKind {
    /// A message of whoever uses the connection.
    Message = 1,
    /// Only the head: how much was taken.
    Taken = 2,
    /// Asks for a sign of life. Only the head.
    Ping = 3,
    /// Answers a ping. Only the head.
    Pong = 4,
    /// The other side closes. Only the head.
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

    /// True for the kinds that are nothing but a head.
    pub const fn is_bare(self) -> bool {
        matches!(self, Self::Taken | Self::Ping | Self::Pong | Self::Goodbye)
    }
}

/// Head of every frame: what one send carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct FrameHead {
    /// A [`FrameKind`].
    pub kind: U16,
    /// Zero.
    pub reserved: U16,
    /// Messages and immediates of the other side that were taken so far, modulo 2^32: it may have a window more
    /// under way.
    pub taken: U32,
}

const _: () = assert!(size_of::<FrameHead>() == 8);

impl FrameHead {
    /// A head.
    pub fn new(kind: FrameKind, taken: u32) -> Self {
        Self { kind: U16::new(kind as u16), reserved: U16::new(0), taken: U32::new(taken) }
    }

    /// Splits a frame into kind, count of what was taken, and body.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Field`: a body where there is none.
    pub fn decode(frame: &[u8]) -> Result<(FrameKind, u32, &[u8]), DecodeError> {
        let (head, body) = Self::read_from_prefix(frame).map_err(|_| DecodeError::Truncated)?;
        let kind = FrameKind::from_raw(head.kind.get())?;
        if kind.is_bare() && !body.is_empty() {
            return Err(DecodeError::Field("body"));
        }
        Ok((kind, head.taken.get(), body))
    }
}

/// What the initiator of a connection says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireHello {
    /// Oldest version of the protocol that it speaks.
    pub version_min: u8,
    /// Newest version.
    pub version_max: u8,
    /// Zero.
    pub reserved: U16,
    /// Its epoch.
    pub epoch: Epoch,
    /// Who it is.
    pub from: NodeId,
    /// Whom it wants.
    pub to: NodeId,
    /// The cluster it belongs to.
    pub cluster: [u8; CLUSTER_BYTES],
    /// Random, never used before.
    pub nonce: [u8; NONCE_BYTES],
    /// Bytes of the longest message that it takes.
    pub message_bytes: U32,
    /// Messages and immediates that may be under way to it.
    pub window: U32,
}

const _: () = assert!(size_of::<WireHello>() == 72);

/// What the acceptor answers: who it is, and that it has the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireChallenge {
    /// The version that is spoken from here on.
    pub version: u8,
    /// Zero.
    pub reserved: u8,
    /// Zero.
    pub reserved2: U16,
    /// Its epoch.
    pub epoch: Epoch,
    /// Who it is.
    pub from: NodeId,
    /// Bytes of the longest message that it takes.
    pub message_bytes: U32,
    /// Messages and immediates that may be under way to it.
    pub window: U32,
    /// Random, never used before.
    pub nonce: [u8; NONCE_BYTES],
    /// Over the Hello and this up to here, with the cluster's key.
    pub proof: [u8; PROOF_BYTES],
}

const _: () = assert!(size_of::<WireChallenge>() == 84);

impl WireChallenge {
    /// The bytes that the proof is about, after those of the Hello.
    pub fn claim(&self) -> &[u8] {
        &self.as_bytes()[..size_of::<Self>() - PROOF_BYTES]
    }
}

/// The initiator has the key too, and says where its connection will come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireProof {
    /// The port of its address from which it will connect; 0 where the fabric knows of none.
    pub port: U16,
    /// Zero.
    pub reserved: U16,
    /// Over Hello, Challenge and this up to here, with the cluster's key.
    pub proof: [u8; PROOF_BYTES],
}

const _: () = assert!(size_of::<WireProof>() == 36);

impl WireProof {
    /// The bytes that the proof is about, after those of Hello and Challenge.
    pub fn claim(&self) -> &[u8] {
        &self.as_bytes()[..size_of::<Self>() - PROOF_BYTES]
    }
}

/// The acceptor waits for the initiator's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireWelcome {
    /// The port, at the address of the door, where it waits.
    pub port: U16,
    /// Zero.
    pub reserved: U16,
    /// Over Hello, Challenge, Proof and this up to here, with the cluster's key.
    pub proof: [u8; PROOF_BYTES],
}

const _: () = assert!(size_of::<WireWelcome>() == 36);

impl WireWelcome {
    /// The bytes that the proof is about, after those of Hello, Challenge and Proof.
    pub fn claim(&self) -> &[u8] {
        &self.as_bytes()[..size_of::<Self>() - PROOF_BYTES]
    }
}

/// What comes with the wish for a connection: that it is the one which a Welcome waits for. It fits into what every
/// fabric carries there (verbs: 55 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireEntry {
    /// [`WIRE_MAGIC`].
    pub magic: [u8; 4],
    /// Over Hello, Challenge, Proof and Welcome, with the cluster's key.
    pub proof: [u8; PROOF_BYTES],
}

const _: () = assert!(size_of::<WireEntry>() == 36);

impl WireEntry {
    /// Reads an entry. Its proof is not judged.
    ///
    /// # Errors
    /// `Truncated`, `Kind`.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        // Some fabrics fill up what they carry.
        let (entry, _) = Self::read_from_prefix(bytes).map_err(|_| DecodeError::Truncated)?;
        if entry.magic != WIRE_MAGIC {
            return Err(DecodeError::Kind);
        }
        Ok(entry)
    }
}

/// Reads a body that is one structure, no byte more or less.
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

/// Memory that its owner lets a peer write or read, as one tells the other in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireRegion {
    /// Proves the right to it, on this connection.
    pub key: U64,
    /// Address of its first byte, in the way in which the fabric counts.
    pub base: U64,
    /// Bytes of it.
    pub bytes: U64,
}

const _: () = assert!(size_of::<WireRegion>() == 24);

/// What a message of remote calls is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum RemoteKind {
    /// Asks. The body is the request.
    Request = 1,
    /// Answers. The body is the answer.
    Response = 2,
    /// Who asked does not want the answer any more; one comes all the same.
    Cancel = 3,
}

/// Head of a message of remote calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RemoteHead {
    /// The call: given once in the life of a connection by the side that asks.
    pub id: U64,
    /// A [`RemoteKind`].
    pub kind: U16,
    /// Request: which call. Response: how it ended, 0 if it was carried out. Cancel: 0.
    pub code: U16,
    /// Request: milliseconds that the asking side waits at most, 0 for no limit. Else 0.
    pub within_ms: U32,
}

const _: () = assert!(size_of::<RemoteHead>() == 16);

/// [`RemoteHead::code`] of a response: it was cancelled, or its time was over, before it was carried out.
pub const REMOTE_CANCELLED: u16 = u16::MAX;

impl RemoteHead {
    /// A head.
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
    fn frames_split_into_what_they_were_made_of() {
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
    fn messages_of_a_stream_are_found_and_none_chooses_its_length() {
        let kinds =
            [DoorKind::Knock, DoorKind::Hello, DoorKind::Challenge, DoorKind::Proof, DoorKind::Welcome];
        for kind in kinds.into_iter().chain([DoorKind::Refusal]) {
            let mut stream = DoorHead::new(kind).as_bytes().to_vec();
            stream.resize(stream.len() + kind.body_bytes(), 7);
            assert!(stream.len() <= DOOR_MESSAGE_MAX);
            for cut in 0..stream.len() {
                assert_eq!(DoorHead::decode(&stream[..cut]), Ok(None));
            }
            stream.push(9);
            assert_eq!(DoorHead::decode(&stream), Ok(Some((kind, &vec![7; kind.body_bytes()][..]))));
            let changed = |at: usize| {
                let mut changed = stream.clone();
                changed[at] ^= 0x40;
                DoorHead::decode(&changed).map(|_| ())
            };
            assert_eq!(changed(0), Err(DecodeError::Kind));
            assert_eq!(changed(5), Err(DecodeError::Kind));
            assert_eq!(changed(6), Err(DecodeError::Field("bytes")));
            assert_eq!(DoorHead::decode(b"G"), Err(DecodeError::Kind), "the first byte tells");
        }
    }

    #[test]
    fn every_reason_is_read_as_it_was_said() {
        for raw in 0..20 {
            let Ok(reason) = RefusalReason::from_raw(raw) else { continue };
            let refusal = WireRefusal::new(reason, Epoch::new(3));
            assert_eq!(WireRefusal::decode(refusal.as_bytes()), Ok((refusal, reason)));
        }
    }
}
