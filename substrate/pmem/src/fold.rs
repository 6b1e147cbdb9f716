//! Frames whose payload is one long piece of memory (see `ring`): copied, checksummed and stored in one pass.
//!
//! The speed of a long write is limited by the rate at which lines leave the processor past its caches, so the
//! checksum is computed from the same registers meanwhile. A checksum of a second copy would be delayed: its loads
//! would wait behind stores that wait behind those lines.
//!
//! The checksum is computed by folding. Registers of 128 bytes together (four of half a line; or two of a line
//! where the processor has them, which need half as many entries of the store queue) advance along the payload in
//! strides of [`STRIDE`] bytes. In each step every register is multiplied by the power of x for one stride, modulo
//! the polynomial, and added to the next bytes. The final 128 bytes have the checksum of the whole (Gopal et al.,
//! "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", 2009).

use crate::LINE_BYTES;
use crate::copy::{Fault, Source};
use crate::primitives::Summer;
use crate::region::Region;
use crate::short::put_header;
use format::checksum::{Salt, of_register};
use format::{HEADER_BYTES, Sequence};
use std::mem::MaybeUninit;

/// Bytes of one step.
pub(crate) const STRIDE: usize = 128;

const WORD_BYTES: usize = size_of::<u64>();
const LINE_WORDS: usize = LINE_BYTES / WORD_BYTES;
const HEADER_WORDS: usize = HEADER_BYTES / WORD_BYTES;
const STRIDE_WORDS: usize = STRIDE / WORD_BYTES;

/// FoldState of the folding before and after the pass: the 128 bytes of the registers.
#[derive(Clone)]
#[repr(C, align(64))]
pub(crate) struct FoldState(pub [u64; STRIDE_WORDS]);

/// Multipliers of 16 bytes for one stride, one for each half.
#[cfg(target_arch = "x86_64")]
pub(crate) mod multipliers {
    /// Twice, for a register of a line half. The halves of 16 bytes stand 64 and 0 powers before their end; a
    /// product of two reflected words is one power short.
    pub static MULTIPLIERS: [u64; 4] = {
        let bits = super::STRIDE as u32 * u8::BITS;
        let (low, high) = (power_of_x(bits + u64::BITS - 1), power_of_x(bits - 1));
        [low, high, low, high]
    };

    /// x to the power, modulo the polynomial of CRC-32C, reflected as a word: the lowest bit is the highest power.
    const fn power_of_x(power: u32) -> u64 {
        const POLYNOMIAL: u32 = 0x1edc_6f41;
        let mut value: u32 = 1;
        let mut done = 0;
        while done < power {
            let carry = value >> (u32::BITS - 1) != 0;
            value <<= 1;
            if carry {
                value ^= POLYNOMIAL;
            }
            done += 1;
        }
        (value.reverse_bits() as u64) << u32::BITS
    }
}

/// Proof that the processor has the instructions for folding and for the checksum.
#[derive(Clone, Copy)]
pub(crate) struct Folder(Summer);

impl Folder {
    /// Returns the proof, if the processor has them.
    #[inline]
    pub fn get() -> Option<Self> {
        Summer::get().filter(|_| crate::copy::folds()).map(Self)
    }
}

/// Stores a frame with its sequence and checksum; it is durable after the next fence. The payload has at least
/// [`STRIDE`] bytes.
///
/// # Errors
/// `Fault`; the stored bytes are not a valid frame then.
///
/// # Panics
/// If the payload is shorter, or the envelope's length is not that of the payload.
#[inline]
pub(crate) fn write(
    folder: Folder,
    region: &Region,
    (salt, sequence, position): (Salt, Sequence, u64),
    header: &[u8; HEADER_BYTES],
    mut payload: Source<'_>,
) -> Result<(), Fault> {
    let (bytes, summer) = (payload.bytes(), folder.0);
    let mut head = [MaybeUninit::uninit(); HEADER_WORDS];
    let [first, lengths] = put_header(&mut head, header, sequence);
    assert!(lengths as u32 as usize == bytes, "a header that fits its payload");
    // SAFETY: `put_header` filled all of it.
    let mut head = head.map(|word| unsafe { word.assume_init() });
    let begun = summer.begin(salt, (first >> u32::BITS) as u32, &head[1..]);

    let (folded, rest) = (bytes / STRIDE * STRIDE, bytes % STRIDE);
    assert!(folded > 0, "a payload for folding is long");
    let mut words = FoldState([0; STRIDE_WORDS]);
    words.0[0] = u64::from(begun);
    let at = position + HEADER_BYTES as u64;
    region.write_folded(folder, at, (&mut payload, folded), &mut words)?;
    let sum = if rest == 0 {
        summer.go_on(0, &words.0, STRIDE)
    } else {
        // The rest follows the folded bytes, with zeros to the end of its last line.
        let mut both = [0; 2 * STRIDE_WORDS];
        both[..STRIDE_WORDS].copy_from_slice(&words.0);
        let end = STRIDE_WORDS + rest.div_ceil(LINE_BYTES) * LINE_WORDS;
        // SAFETY: the words behind the folded ones are exclusive to this call, and have space for a stride.
        unsafe { payload.take_raw(both.as_mut_ptr().add(STRIDE_WORDS).cast(), rest)? };
        region.write_words(at + folded as u64, &both[STRIDE_WORDS..end]);
        summer.go_on(0, &both, STRIDE + rest)
    };
    head[0] = first | u64::from(of_register(sum));
    region.write_words(position, &head);
    Ok(())
}

/// Computes the state that [`Source::take_folded`] leaves by checksums alone: for a recorded region.
pub(crate) fn fold(Folder(summer): Folder, state: &mut FoldState, bytes: &[u8]) {
    let words: Vec<u64> =
        bytes.as_chunks::<WORD_BYTES>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    // The checksum of the last stride, started with that of the others, is the checksum of all.
    let (others, last) = words.split_at(words.len() - STRIDE_WORDS);
    let register = summer.go_on(state.0[0] as u32, others, size_of_val(others));
    state.0.copy_from_slice(last);
    state.0[0] ^= u64::from(register);
}

#[cfg(test)]
mod tests {
    use super::*;
    use format::{Incarnation, LogUid};
    use proptest::prelude::*;

    fn begun(salt: Salt) -> FoldState {
        let mut state = FoldState([0; STRIDE_WORDS]);
        state.0[0] = u64::from(salt.register());
        state
    }

    proptest! {
        #[test]
        fn a_folded_copy_is_the_copy_and_has_its_sum(
            source in proptest::collection::vec(any::<u8>(), STRIDE..40 * STRIDE),
            uid: u64,
            shift in 0..STRIDE,
        ) {
            let Some(folder) = Folder::get() else {
                println!("skipped: needs a processor that folds");
                return Ok(());
            };
            let source = &source[shift.min(source.len() - STRIDE)..];
            let bytes = source.len() / STRIDE * STRIDE;
            let salt = Salt::of_log(LogUid::new(uid), Incarnation::new(1));
            let expected = format::checksum::of(salt, &source[..bytes]);
            let sum = |state: &FoldState| of_register(folder.0.go_on(0, &state.0, STRIDE));

            let mut state = begun(salt);
            fold(folder, &mut state, &source[..bytes]);
            prop_assert_eq!(sum(&state), expected);

            for by_lines in [false, crate::copy::folds_by_lines()] {
                let mut target = vec![FoldState([0; STRIDE_WORDS]); bytes / STRIDE];
                let (mut state, mut from) = (begun(salt), Source::from(source));
                // SAFETY: the target is ours, as long as is said and aligned to a line; the processor was asked.
                unsafe { from.take_folded(&mut state, target.as_mut_ptr().cast(), bytes, by_lines) }.unwrap();
                prop_assert_eq!((sum(&state), from.bytes()), (expected, source.len() - bytes));
                let copied: Vec<u8> =
                    target.iter().flat_map(|part| part.0).flat_map(u64::to_le_bytes).collect();
                prop_assert_eq!(copied.as_slice(), &source[..bytes]);
            }
        }

        #[test]
        fn a_frame_is_as_others_write_it(
            payload in proptest::collection::vec(any::<u8>(), STRIDE..20 * STRIDE),
            pieces in 2usize..5,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let medium = crate::Medium::memory(folder.path()).unwrap();
            let ring = |name| {
                let region = medium.create(name, 1 << 16).unwrap();
                crate::ring::AppendRing::empty(region, 0, Salt::NONE, Sequence::new(7))
            };
            let (mut whole, mut parts) = (ring("whole"), ring("parts"));
            let mut header = [0; HEADER_BYTES];
            let envelope = format::Envelope::new(2, 0, payload.len() as u32);
            header[..size_of::<format::Envelope>()].copy_from_slice(zerocopy::IntoBytes::as_bytes(&envelope));
            header[HEADER_BYTES - 1] = 9;
            whole.append(header, &[Source::from(payload.as_slice())]).unwrap();
            // Several sources are put together by pieces.
            let sources: Vec<Source<'_>> =
                payload.chunks(payload.len().div_ceil(pieces)).map(Source::from).collect();
            parts.append(header, &sources).unwrap();
            let mut images = [vec![0; 1 << 16], vec![0; 1 << 16]];
            whole.region().read(0, &mut images[0]).unwrap();
            parts.region().read(0, &mut images[1]).unwrap();
            prop_assert!(images[0] == images[1]);
        }
    }
}
