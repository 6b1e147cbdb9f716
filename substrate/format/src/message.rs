//! Messages between a LibFS and its SharedFS: the header of every packet on their socket, the first message in each
//! direction, and the heads of requests and responses in the ring (their bodies are in [`crate::call`]).
//!
//! Both sides run on the same machine and, after the handshake, have the same version of the program. Nevertheless
//! each side checks every byte of the other.

use crate::DecodeError;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of every message on the socket.
pub const MESSAGE_MAGIC: [u8; 4] = *b"HRTH";

/// Version of all state that LibFS and SharedFS share. A program with another version is rejected.
pub const PROTOCOL_VERSION: u16 = 10;

/// Limit of body bytes in one message on the socket.
pub const MESSAGE_BODY_MAX: usize = 4096;

/// Limit of descriptors in one message on the socket.
pub const MESSAGE_DESCRIPTORS_MAX: usize = 16;

/// Kind of a message on the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum MessageKind {
    /// The first message of a LibFS: [`Hello`].
    Hello = 1,
    /// SharedFS accepts it: [`RingShape`], then the Welcome of the session; descriptors.
    Welcome = 2,
    /// SharedFS rejects it: [`Refusal`], then a text for the user.
    Refusal = 3,
    /// Descriptors for a request: a [`Parcel`].
    Parcel = 4,
    /// On a liveness socket: a [`crate::share::LivenessNote`].
    Note = 5,
}

/// Header of a message on the socket. A message is one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MessageHeader {
    /// [`MESSAGE_MAGIC`].
    pub magic: [u8; 4],
    /// [`PROTOCOL_VERSION`].
    pub protocol: U16,
    /// A [`MessageKind`].
    pub kind: U16,
    /// Bytes after this header, to the packet's end.
    pub body_bytes: U32,
    /// Number of descriptors of the packet.
    pub descriptors: U32,
}

const _: () = assert!(size_of::<MessageHeader>() == 16);

impl MessageHeader {
    /// Creates a header.
    pub fn new(kind: MessageKind, body_bytes: u32, descriptors: u32) -> Self {
        Self {
            magic: MESSAGE_MAGIC,
            protocol: U16::new(PROTOCOL_VERSION),
            kind: U16::new(kind as u16),
            body_bytes: U32::new(body_bytes),
            descriptors: U32::new(descriptors),
        }
    }

    /// Splits a packet into kind, announced number of descriptors, and body.
    ///
    /// # Errors
    /// `Truncated`, `Kind`, `Version`, `Field`.
    pub fn decode(packet: &[u8]) -> Result<(MessageKind, usize, &[u8]), DecodeError> {
        let (header, body) = Self::read_from_prefix(packet).map_err(|_| DecodeError::Truncated)?;
        if header.magic != MESSAGE_MAGIC {
            return Err(DecodeError::Kind);
        }
        if header.protocol.get() != PROTOCOL_VERSION {
            return Err(DecodeError::Version(header.protocol.get()));
        }
        if usize::try_from(header.body_bytes.get()) != Ok(body.len()) || body.len() > MESSAGE_BODY_MAX {
            return Err(DecodeError::Field("body_bytes"));
        }
        let descriptors = usize::try_from(header.descriptors.get()).unwrap_or(usize::MAX);
        if descriptors > MESSAGE_DESCRIPTORS_MAX {
            return Err(DecodeError::Field("descriptors"));
        }
        let kind = match header.kind.get() {
            1 => MessageKind::Hello,
            2 => MessageKind::Welcome,
            3 => MessageKind::Refusal,
            4 => MessageKind::Parcel,
            5 => MessageKind::Note,
            _ => return Err(DecodeError::Kind),
        };
        Ok((kind, descriptors, body))
    }
}

/// [`Hello::role`] of a program, which acts as its own user.
pub const ROLE_PROGRAM: u32 = 0;
/// [`Hello::role`] of the gateway, which acts for all users. Its user must be the daemon's user or root.
pub const ROLE_GATEWAY: u32 = 1;

/// The first message of a LibFS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Hello {
    /// Version of the library, as text padded with zeros. It must be that of the daemon.
    pub library: [u8; 32],
    /// Session that this one continues after a restart of the daemon or a seal; 0 for none.
    pub session: U64,
    /// [`ROLE_PROGRAM`] or [`ROLE_GATEWAY`].
    pub role: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<Hello>() == 48);

/// Sizes of a request ring, chosen by SharedFS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RingShape {
    /// Limit of concurrent requests.
    pub slots: U32,
    /// Bytes of a request, and of a response, in the slot itself.
    pub inline_bytes: U32,
    /// Number of buffers for larger ones.
    pub bulk_buffers: U32,
    /// Bytes of such a buffer.
    pub bulk_bytes: U32,
}

const _: () = assert!(size_of::<RingShape>() == 16);

/// The reason for which a LibFS is rejected; a text for the user follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Refusal {
    /// A `REFUSED_*`.
    pub reason: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<Refusal>() == 8);

/// The program has another version.
pub const REFUSED_VERSION: u32 = 1;
/// The limit of sessions is reached.
pub const REFUSED_FULL: u32 = 2;
/// The credentials may not use this node.
pub const REFUSED_CREDENTIALS: u32 = 3;
/// The message could not be decoded.
pub const REFUSED_MALFORMED: u32 = 4;
/// The medium has no space for the session's log.
pub const REFUSED_SPACE: u32 = 5;
/// The pool failed. A daemon that has stopped accepts no session.
pub const REFUSED_MEDIUM: u32 = 6;
/// Another node leads: programs have their sessions there.
pub const REFUSED_STANDBY: u32 = 7;

/// Descriptors for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Parcel {
    /// Id of the request.
    pub request: U64,
    /// Identifies the descriptor, as the kind of the request defines it.
    pub what: U64,
    /// Bytes to map.
    pub bytes: U64,
}

const _: () = assert!(size_of::<Parcel>() == 24);

/// Head of a request in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RequestHeader {
    /// Unique in the life of a LibFS. A request that is sent again after a new attachment keeps its id.
    pub id: U64,
    /// A [`crate::call::CallKind`].
    pub kind: U16,
    /// Zero.
    pub reserved: U16,
    /// Bytes of the body that follows.
    pub body_bytes: U32,
}

const _: () = assert!(size_of::<RequestHeader>() == 16);

/// Head of a response in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ResponseHeader {
    /// Id of the request.
    pub id: U64,
    /// A [`crate::call::Status`], or [`STATUS_NO_ROOM`].
    pub status: U16,
    /// Zero.
    pub reserved: U16,
    /// Bytes of the body that follows.
    pub body_bytes: U32,
}

const _: () = assert!(size_of::<ResponseHeader>() == 16);

/// The response is longer than the space that the request has reserved for it.
pub const STATUS_NO_ROOM: u16 = u16::MAX;

impl RequestHeader {
    /// Splits a message copied out of the ring into head and body.
    ///
    /// # Errors
    /// `Truncated`, `Field`.
    pub fn decode(message: &[u8]) -> Result<(Self, &[u8]), DecodeError> {
        let (head, body) = Self::read_from_prefix(message).map_err(|_| DecodeError::Truncated)?;
        check_body(head.body_bytes, body)?;
        Ok((head, body))
    }
}

impl ResponseHeader {
    /// Splits a message copied out of the ring into head and body.
    ///
    /// # Errors
    /// `Truncated`, `Field`.
    pub fn decode(message: &[u8]) -> Result<(Self, &[u8]), DecodeError> {
        let (head, body) = Self::read_from_prefix(message).map_err(|_| DecodeError::Truncated)?;
        check_body(head.body_bytes, body)?;
        Ok((head, body))
    }
}

fn check_body(announced: U32, body: &[u8]) -> Result<(), DecodeError> {
    if usize::try_from(announced.get()) != Ok(body.len()) {
        return Err(DecodeError::Field("body_bytes"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_message_is_decoded_as_it_was_encoded() {
        let mut packet = MessageHeader::new(MessageKind::Parcel, 3, 2).as_bytes().to_vec();
        packet.extend_from_slice(b"abc");
        assert_eq!(MessageHeader::decode(&packet), Ok((MessageKind::Parcel, 2, &b"abc"[..])));
        packet.push(0);
        assert_eq!(MessageHeader::decode(&packet), Err(DecodeError::Field("body_bytes")));
    }

    #[test]
    fn the_error_for_another_version_contains_the_version() {
        let mut header = MessageHeader::new(MessageKind::Hello, 0, 0);
        header.protocol = U16::new(77);
        assert_eq!(MessageHeader::decode(header.as_bytes()), Err(DecodeError::Version(77)));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = MessageHeader::decode(&bytes);
            if let Ok((head, body)) = RequestHeader::decode(&bytes) {
                prop_assert_eq!(head.body_bytes.get() as usize, body.len());
            }
            let _ = ResponseHeader::decode(&bytes);
        }
    }
}
