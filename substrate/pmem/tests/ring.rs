//! The append ring against a naive model, against any bytes, and against sources that change.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use format::checksum::Salt;
use format::{Envelope, HEADER_BYTES, Sequence};
use pmem::ring::{self, AppendError, AppendRing, PAD_KIND, RingPosition};
use pmem::{Recorder, Region, Source};
use proptest::prelude::*;
use std::collections::VecDeque;
use zerocopy::IntoBytes;

const START: u64 = 128;
const LINE: usize = 64;

fn region(lines: usize) -> Region {
    Recorder::new().medium().create("log", START + (lines * LINE) as u64).unwrap()
}

fn header(payload_bytes: usize) -> [u8; HEADER_BYTES] {
    let mut header = [0x5a; HEADER_BYTES];
    let envelope = Envelope::new(2, 3, payload_bytes as u32);
    header[..size_of::<Envelope>()].copy_from_slice(envelope.as_bytes());
    header
}

fn append(ring: &mut AppendRing, payload: &[u8]) -> Result<ring::Appended, AppendError> {
    ring.append(header(payload.len()), &[Source::from(payload)])
}

#[derive(Clone, Debug)]
enum Step {
    Append(usize),
    Release(usize),
    /// So many lines more are used.
    Use(usize),
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0usize..500).prop_map(Step::Append),
        3 => (1usize..4).prop_map(Step::Release),
        1 => (1usize..4).prop_map(Step::Use),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 1..80)
}

/// Which lines of the ring belong to live frames, and the frames in order.
struct Model {
    live_lines: Vec<bool>,
    /// Lines of the part that is used, with the one for a pad behind it.
    used: usize,
    tail: usize,
    sequence: u64,
    /// First line, lines, payload (`None`: a pad).
    frames: VecDeque<(usize, usize, Option<Vec<u8>>)>,
}

impl Model {
    /// The line behind the last that a frame may have.
    fn frames_end(&self) -> usize {
        if self.used < self.live_lines.len() { self.used - 1 } else { self.used }
    }

    fn is_free(&self, first: usize, end: usize) -> bool {
        !self.live_lines[first..end].contains(&true)
    }

    fn put(&mut self, first: usize, lines: usize, payload: Option<Vec<u8>>) {
        self.live_lines[first..first + lines].fill(true);
        self.frames.push_back((first, lines, payload));
        self.tail = (first + lines) % self.live_lines.len();
        self.sequence += 1;
    }

    /// Appends a frame, and returns its first line; `None` if the ring has no space for it.
    fn append(&mut self, payload: &[u8]) -> Option<usize> {
        let (lines, all) = (1 + payload.len().div_ceil(LINE), self.live_lines.len());
        let first = self.tail;
        if first + lines <= self.frames_end() {
            self.is_free(first, first + lines).then(|| self.put(first, lines, Some(payload.to_vec())))?;
            return Some(first);
        }
        if lines > first || !self.is_free(first, all) || !self.is_free(0, lines) {
            return None;
        }
        self.put(first, all - first, None);
        self.put(0, lines, Some(payload.to_vec()));
        Some(0)
    }

    fn release(&mut self) {
        if let Some((first, lines, _)) = self.frames.pop_front() {
            self.live_lines[first..first + lines].fill(false);
        }
    }

    fn head(&self) -> RingPosition {
        let line = self.frames.front().map_or(self.tail, |(first, ..)| *first);
        let sequence = Sequence::new(self.sequence - self.frames.len() as u64);
        RingPosition { position: START + (line * LINE) as u64, sequence }
    }
}

fn check(region: &Region, ring: &AppendRing, model: &Model, salt: Salt) {
    assert_eq!(ring.head(), model.head());
    let used = &model.live_lines[..model.frames_end()];
    let live = used.iter().filter(|live| **live).count();
    assert_eq!(ring.live_bytes(), (live * LINE) as u64);
    assert_eq!(ring.free_bytes(), ((used.len() - live) * LINE) as u64);
    let mut scan = ring::scan(region, START, salt, model.head(), u64::MAX);
    for (number, (first, _, payload)) in model.frames.iter().enumerate() {
        let frame = scan.next().expect("a live frame").unwrap();
        assert_eq!(frame.position, START + (first * LINE) as u64);
        assert_eq!(frame.envelope.sequence.get(), model.head().sequence.get() + number as u64);
        match payload {
            Some(payload) => {
                assert_eq!(&frame.bytes[HEADER_BYTES..], payload);
                assert_eq!(
                    frame.bytes[24..HEADER_BYTES],
                    [0x5a; 40],
                    "the rest of the header is the caller's"
                );
            }
            None => assert_eq!(frame.envelope.kind, PAD_KIND),
        }
    }
    assert_eq!(scan.place(), ring.tail());
    assert_eq!(scan.next(), None, "behind the live frames nothing is valid");
}

proptest! {
    #[test]
    fn a_ring_holds_what_the_model_holds(lines in 1usize..24, part in 2usize..24, steps in steps()) {
        let region = region(lines);
        let salt = Salt::of_log(format::LogUid::new(1), format::Incarnation::new(1));
        let mut ring = AppendRing::empty(region.clone(), START, salt, Sequence::new(1));
        let live_lines = vec![false; lines];
        let use_up_to = |ring: &mut AppendRing, used: usize| ring.use_up_to(START + (used * LINE) as u64);
        let used = part.min(lines);
        use_up_to(&mut ring, used);
        let mut model = Model { live_lines, used, tail: 0, sequence: 1, frames: VecDeque::new() };
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Append(bytes) => {
                    let payload: Vec<u8> = (0..bytes).map(|index| (index * 7 + number) as u8).collect();
                    let expected = model.append(&payload).map(|line| START + (line * LINE) as u64);
                    let before = region.counters();
                    let found = append(&mut ring, &payload);
                    prop_assert_eq!(found.ok().map(|appended| appended.position), expected);
                    prop_assert_eq!(region.counters().since(&before).fences, u64::from(found.is_ok()));
                }
                Step::Release(count) => {
                    (0..count).for_each(|_| model.release());
                    ring.release_to(model.head());
                }
                Step::Use(more) => {
                    model.used = (model.used + more).min(lines);
                    use_up_to(&mut ring, model.used);
                }
                Step::Reopen => {
                    ring = AppendRing::new(region.clone(), START, salt, ring.head(), ring.tail());
                    use_up_to(&mut ring, model.used);
                }
            }
            check(&region, &ring, &model, salt);
        }
    }

    #[test]
    fn a_scan_of_any_bytes_ends(bytes in prop::collection::vec(any::<u8>(), 640), commits in prop::collection::vec((0usize..640, any::<u8>()), 0..6), real: bool) {
        let region = region(10);
        region.write(START, &bytes);
        if real {
            // Valid frames with some changed bytes reach more of the code.
            let mut ring = AppendRing::empty(region.clone(), START, Salt::NONE, Sequence::new(1));
            for payload in [&bytes[..100], &bytes[..3], &bytes[..64]] {
                append(&mut ring, payload).unwrap();
            }
            for (at, value) in commits {
                region.write(START + at as u64, &[value]);
            }
        }
        let from = RingPosition { position: START, sequence: Sequence::new(1) };
        let frames = ring::scan(&region, START, Salt::NONE, from, 192).collect::<Vec<_>>();
        prop_assert!(frames.len() <= 10);
        prop_assert!(frames.iter().flatten().all(|frame| frame.bytes.len() <= 192));
    }
}

#[test]
fn a_frame_above_the_limit_ends_the_scan() {
    let region = region(20);
    let mut ring = AppendRing::empty(region.clone(), START, Salt::NONE, Sequence::new(1));
    append(&mut ring, &[1; 64]).unwrap();
    append(&mut ring, &[2; 65]).unwrap();
    let from = RingPosition { position: START, sequence: Sequence::new(1) };
    assert_eq!(ring::scan(&region, START, Salt::NONE, from, 192).count(), 2);
    assert_eq!(ring::scan(&region, START, Salt::NONE, from, 191).count(), 1);
    assert_eq!(
        ring::scan(
            &region,
            START,
            Salt::of_log(format::LogUid::new(1), format::Incarnation::new(1)),
            from,
            192
        )
        .count(),
        0
    );
}

#[test]
fn many_sources_are_one_payload_and_the_last_line_is_filled_with_zeros() {
    let region = region(200);
    region.write(START, &[0xff; 200 * LINE]);
    let mut ring = AppendRing::empty(region.clone(), START, Salt::NONE, Sequence::new(5));
    let payload: Vec<u8> = (0..9_001).map(|index| index as u8).collect();
    let (first, rest) = payload.split_at(1);
    let (second, third) = rest.split_at(4_500);
    let sources = [first, &[], second, third].map(Source::from);
    let appended = ring.append(header(payload.len()), &sources).unwrap();
    let from = RingPosition { position: START, sequence: Sequence::new(5) };
    let frame = ring::scan(&region, START, Salt::NONE, from, u64::MAX).next().unwrap().unwrap();
    assert_eq!((&frame.bytes[HEADER_BYTES..], frame.position), (&payload[..], appended.position));
    let mut fill = [1; 23];
    region.read(START + 64 + 9_001, &mut fill).unwrap();
    assert_eq!(fill, [0; 23]);
}

#[test]
fn a_source_that_changes_meanwhile_still_gives_a_whole_frame() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    let folder = tempfile::tempdir().unwrap();
    let medium = pmem::Medium::memory(folder.path()).unwrap();
    let region = medium.create("log", START + (1 << 20)).unwrap();
    let shared: Vec<AtomicU64> = (0..1201).map(AtomicU64::new).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0.. {
                shared.iter().for_each(|word| word.store(round, Ordering::Relaxed));
                if done.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let mut ring = AppendRing::empty(region.clone(), START, Salt::NONE, Sequence::new(1));
        let mut torn = 0;
        let mut appends = 0;
        // Until enough appends have met enough changes.
        while appends < 2000 || shared[0].load(Ordering::Relaxed) < 5000 {
            appends += 1;
            // SAFETY: the words live as long as the scope, and any change of them is what is tested.
            let source = unsafe { Source::from_raw(shared.as_ptr().cast(), shared.len() * 8) };
            let before = ring.tail();
            // As the only source, and as one of two, which takes another path.
            let (whole, two) = ([source], [Source::from(b""), source]);
            let sources: &[_] = if appends % 2 == 0 { &whole } else { &two };
            if ring.append(header(source.bytes()), sources).is_err() {
                ring.release_to(before);
                continue;
            }
            let from = RingPosition {
                position: ring.tail().position - 9_728,
                sequence: Sequence::new(ring.tail().sequence.get() - 1),
            };
            torn += usize::from(ring::scan(&region, START, Salt::NONE, from, u64::MAX).next().is_none());
            ring.release_to(ring.tail());
        }
        done.store(true, Ordering::Relaxed);
        assert_eq!(torn, 0, "frames whose checksum is of other bytes than were stored");
    });
}

#[test]
fn lengths_that_lie_end_the_scan() {
    // Lengths beyond the end of the ring, and a pad with a payload.
    for (kind, payload_bytes) in
        [(2, 65), (2, 300), (2, u32::MAX), (2, u32::MAX - 63), (PAD_KIND, 1), (PAD_KIND, 65)]
    {
        let region = region(4);
        let mut ring = AppendRing::empty(region.clone(), START, Salt::NONE, Sequence::new(1));
        append(&mut ring, &[1; 64]).unwrap();
        let mut lie = Envelope::new(kind, 0, payload_bytes);
        lie.sequence = Sequence::new(2);
        let mut header = [0; HEADER_BYTES];
        header[..size_of::<Envelope>()].copy_from_slice(lie.as_bytes());
        // A hostile writer would compute a matching checksum, if the payload lies within the ring.
        let mut running = format::envelope::checksum_header(Salt::NONE, &header);
        running.update(&vec![0; payload_bytes.min(64) as usize]);
        header[..4].copy_from_slice(&running.finish().to_le_bytes());
        region.write(START + 128, &header);
        let from = RingPosition { position: START, sequence: Sequence::new(1) };
        assert_eq!(
            ring::scan(&region, START, Salt::NONE, from, u64::MAX).count(),
            1,
            "{kind} {payload_bytes}"
        );
    }
}
