//! Frames for the tests, encoded as a writer encodes them.

use format::Sequence;
use format::checksum::Salt;
use format::envelope::{Envelope, HEADER_BYTES, checksum_header};
use zerocopy::IntoBytes;

/// Header and payload with the right length, sequence and checksum, without the padding to the next cache line.
pub fn frame(salt: Salt, sequence: Sequence, header: &[u8; HEADER_BYTES], payload: &[u8]) -> Vec<u8> {
    let mut frame = header.to_vec();
    frame.extend_from_slice(payload);
    let mut envelope = Envelope::decode(header).expect("a header begins with an envelope");
    envelope.payload_bytes = u32::try_from(payload.len()).expect("a payload fits a frame").into();
    envelope.sequence = sequence;
    frame[..size_of::<Envelope>()].copy_from_slice(envelope.as_bytes());
    let mut running = checksum_header(salt, frame.first_chunk().expect("a frame has a header"));
    running.update(payload);
    envelope.checksum = running.finish().into();
    frame[..size_of::<Envelope>()].copy_from_slice(envelope.as_bytes());
    frame
}
