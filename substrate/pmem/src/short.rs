//! Frames with a short payload (see `ring`): most of the cost of a small write is in the work around its bytes.
//!
//! Header and payload are assembled on the stack in whole words, checksummed there by the processor's own
//! instruction, and stored past the caches at once. Words are used because a load that covers several recent
//! smaller stores stalls. Longer frames are faster by the other methods (see `ring`).

use crate::LINE_BYTES;
use crate::copy::{Fault, Source};
use crate::primitives::Summer;
use crate::region::Region;
use format::checksum::Salt;
use format::envelope::FRAME_VERSION;
use format::{HEADER_BYTES, Sequence};
use std::mem::MaybeUninit;

/// Longest payload of a short frame.
pub(crate) const PAYLOAD_BYTES_MAX: usize = 256;

const WORD_BYTES: usize = size_of::<u64>();
const LINE_WORDS: usize = LINE_BYTES / WORD_BYTES;
const HEADER_WORDS: usize = HEADER_BYTES / WORD_BYTES;
const WORDS: usize = HEADER_WORDS + PAYLOAD_BYTES_MAX / WORD_BYTES;

/// Buffer for a frame on the stack, not cleared.
#[repr(align(64))]
struct Words([MaybeUninit<u64>; WORDS]);

/// Stores a frame with its sequence and checksum; it is durable after the next fence. The payload has at most
/// [`PAYLOAD_BYTES_MAX`] bytes.
///
/// # Errors
/// `Fault`; nothing was stored then.
///
/// # Panics
/// If the envelope's length is not that of the payload.
#[inline]
pub(crate) fn write(
    summer: Summer,
    region: &Region,
    (salt, sequence, position): (Salt, Sequence, u64),
    header: &[u8; HEADER_BYTES],
    (payload, payload_bytes): (&[Source<'_>], usize),
) -> Result<(), Fault> {
    let lines = payload_bytes.div_ceil(LINE_BYTES);
    let words = HEADER_WORDS + lines * LINE_WORDS;
    let mut frame = Words([MaybeUninit::uninit(); WORDS]);
    let (head, body) = frame.0[..words].split_at_mut(HEADER_WORDS);
    // The end of the last line is zeros.
    if let Some(last) = body.last_chunk_mut::<LINE_WORDS>() {
        last.fill(MaybeUninit::new(0));
    }
    let mut filled = 0;
    for source in payload {
        let (mut source, bytes) = (*source, source.bytes());
        assert!(filled + bytes <= payload_bytes, "the sources are as long as was said");
        // SAFETY: the words of the payload are exclusive to this call, and have space for all of its bytes.
        unsafe { source.take_raw(body.as_mut_ptr().cast::<u8>().add(filled), bytes)? };
        filled += bytes;
    }
    assert!(filled == payload_bytes, "the sources are as long as was said");
    let [first, lengths] = put_header(head, header, sequence);
    assert!(lengths as u32 as usize == payload_bytes, "a header that fits its payload");
    // SAFETY: header and payload were filled above, and before the payload the rest of its last line.
    let frame = unsafe { frame.0[..words].assume_init_mut() };
    let sum =
        summer.sum(salt, (first >> u32::BITS) as u32, &frame[1..], HEADER_BYTES - WORD_BYTES + payload_bytes);
    frame[0] = first | u64::from(sum);
    region.write_words(position, frame);
    Ok(())
}

/// Writes a header with its sequence as words; returns the first two, the first without a checksum.
#[inline]
pub(crate) fn put_header(
    head: &mut [MaybeUninit<u64>],
    header: &[u8; HEADER_BYTES],
    sequence: Sequence,
) -> [u64; 2] {
    for (word, bytes) in head.iter_mut().zip(header.as_chunks::<WORD_BYTES>().0) {
        word.write(u64::from_le_bytes(*bytes));
    }
    // The envelope: checksum, kind, version, flags and a reserved byte; length and reserved bytes; sequence.
    const VERSION_SHIFT: u32 = 40;
    let word = |index: usize| {
        let bytes = header.as_chunks::<WORD_BYTES>().0[index];
        u64::from_le_bytes(bytes)
    };
    let others = !(0xff << VERSION_SHIFT | u64::from(u32::MAX));
    let first = word(0) & others | u64::from(FRAME_VERSION) << VERSION_SHIFT;
    head[0].write(first);
    head[2].write(sequence.get());
    [first, word(1)]
}
