//! Messages between a client of the embedded manager and the manager: one message for a request, one for its answer.

use crate::change::{Change, Done, Party, Record, Refusal};
use crate::codec;
use crate::view::View;
use format::cluster::{
    ClusterKind, DoneReply, HeartbeatReply, HeartbeatRequest, HistoryRequest, RefusalReply, WatchRequest,
};
use format::{BeatVersion, ChangeNumber, DecodeError};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Asks for the view, once it is newer, or after this number of milliseconds.
    Watch {
        /// The number of the known view.
        after: ChangeNumber,
        /// The time for which the manager may wait.
        wait_ms: u32,
    },
    /// A change.
    Propose(Change),
    /// A heartbeat.
    Beat(Party),
    /// Asks for the current heartbeat.
    BeatOf(Party),
    /// Asks for records of the audit trail.
    History {
        /// The first wanted record.
        from: ChangeNumber,
        /// Limit of records.
        count: u32,
    },
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The view.
    View(View),
    /// The change is made.
    Done(Done),
    /// The version of the heartbeat.
    Beaten(BeatVersion),
    /// The changes.
    Records(Vec<Record>),
    /// Nothing was changed.
    Refused(Refusal),
    /// The manager cannot serve.
    Failed,
}

fn whole<T: FromBytes + KnownLayout + Immutable>(body: &[u8]) -> Result<T, DecodeError> {
    T::read_from_bytes(body).map_err(|_| DecodeError::Truncated)
}

impl Request {
    /// Encodes kind and body of its message.
    pub fn encode(&self) -> (ClusterKind, Vec<u8>) {
        let zero = U32::new(0);
        match self {
            Self::Watch { after, wait_ms } => {
                let body = WatchRequest { after: *after, wait_ms: U32::new(*wait_ms), reserved: zero };
                (ClusterKind::Watch, body.as_bytes().to_vec())
            }
            Self::Propose(change) => (ClusterKind::Propose, codec::encode_change(change)),
            Self::Beat(party) => (ClusterKind::Beat, beat_request(*party)),
            Self::BeatOf(party) => (ClusterKind::BeatOf, beat_request(*party)),
            Self::History { from, count } => {
                let body = HistoryRequest { from: *from, count: U32::new(*count), reserved: zero };
                (ClusterKind::History, body.as_bytes().to_vec())
            }
        }
    }

    /// Decodes kind and body of a message.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Field`.
    pub fn decode(kind: ClusterKind, body: &[u8]) -> Result<Self, DecodeError> {
        Ok(match kind {
            ClusterKind::Watch => {
                let request: WatchRequest = whole(body)?;
                Self::Watch { after: request.after, wait_ms: request.wait_ms.get() }
            }
            ClusterKind::Propose => Self::Propose(codec::decode_change(body)?),
            ClusterKind::Beat => Self::Beat(party(body)?),
            ClusterKind::BeatOf => Self::BeatOf(party(body)?),
            ClusterKind::History => {
                let request: HistoryRequest = whole(body)?;
                Self::History { from: request.from, count: request.count.get() }
            }
            _ => return Err(DecodeError::Kind),
        })
    }
}

fn beat_request(party: Party) -> Vec<u8> {
    HeartbeatRequest { node: party.node, life: party.life }.as_bytes().to_vec()
}

fn party(body: &[u8]) -> Result<Party, DecodeError> {
    let request: HeartbeatRequest = whole(body)?;
    Ok(Party { node: request.node, life: request.life })
}

impl Reply {
    /// Encodes kind and body of its message.
    pub fn encode(&self) -> (ClusterKind, Vec<u8>) {
        match self {
            Self::View(view) => (ClusterKind::View, codec::encode_view(view)),
            Self::Done(done) => (ClusterKind::Done, codec::encode_done(*done).as_bytes().to_vec()),
            Self::Beaten(beat) => {
                (ClusterKind::Beaten, HeartbeatReply { version: *beat }.as_bytes().to_vec())
            }
            Self::Records(records) => {
                (ClusterKind::Records, records.iter().flat_map(codec::encode_record).collect())
            }
            Self::Refused(refusal) => {
                (ClusterKind::Refused, codec::encode_refusal(*refusal).as_bytes().to_vec())
            }
            Self::Failed => (ClusterKind::Failed, Vec::new()),
        }
    }

    /// Decodes kind and body of a message.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Field`.
    pub fn decode(kind: ClusterKind, body: &[u8]) -> Result<Self, DecodeError> {
        Ok(match kind {
            ClusterKind::View => Self::View(codec::decode_view(body)?),
            ClusterKind::Done => {
                let reply: DoneReply = whole(body)?;
                Self::Done(Done { number: reply.number, epoch: reply.epoch })
            }
            ClusterKind::Beaten => Self::Beaten(whole::<HeartbeatReply>(body)?.version),
            ClusterKind::Records => Self::Records(codec::decode_records(body)?),
            ClusterKind::Refused => Self::Refused(codec::decode_refusal(&whole::<RefusalReply>(body)?)?),
            ClusterKind::Failed if body.is_empty() => Self::Failed,
            _ => return Err(DecodeError::Kind),
        })
    }
}
