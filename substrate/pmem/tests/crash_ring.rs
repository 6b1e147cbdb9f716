//! The append ring, crashed at every moment: recovery finds a prefix of the appended frames, which contains at least the
//! frames that were reported as durable.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod owner;

use format::checksum::{self, Salt};
use format::{Envelope, HEADER_BYTES, Incarnation, LogUid, Sequence};
use owner::{Root, RootPair};
use pmem::crash::{self, Counts, Limits, Model, Point, Violation};
use pmem::progress;
use pmem::recorded::Verb;
use pmem::ring::{self, AppendRing, PAD_KIND, RingPosition};
use pmem::{Medium, Recorder, Region, Source};
use std::cell::RefCell;
use zerocopy::{FromBytes, IntoBytes};

const FILE: &str = "log";
const KIND: u8 = 2;

/// Sizes and payloads of a workload, and its planted bug.
#[derive(Clone)]
struct Plan {
    model: Model,
    slot_bytes: u64,
    ring_bytes: u64,
    payloads: Vec<usize>,
    /// Frames that stay live when the owner digests.
    keep: usize,
    bug: Bug,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Bug {
    None,
    LeftOut(Verb, u64),
    IgnoredFrameChecksum,
    IgnoredRootChecksum,
    ReleaseBeforeSync,
    SameIncarnation,
}

impl Plan {
    /// Tiny: frames of one to four lines in a ring of nine, so that each lap has another shape.
    fn lines() -> Self {
        let payloads = vec![40, 128, 0, 100, 64, 192, 8, 150, 60, 130, 1];
        Self { model: Model::Lines, slot_bytes: 64, ring_bytes: 9 * 64, payloads, keep: 1, bug: Bug::None }
    }

    /// Payloads longer than those of `short`: frames of one to nine lines in a ring of twenty-four.
    fn long_lines() -> Self {
        let payloads = vec![300, 40, 512, 257, 0, 400, 64, 511];
        Self { ring_bytes: 24 * 64, payloads, ..Self::lines() }
    }

    /// Frames of up to a page and more in a ring of three pages.
    fn pages() -> Self {
        let payloads = vec![3000, 500, 2500, 4500, 100, 2000, 300, 3900, 1200, 700, 20, 2600];
        Self {
            model: Model::Pages,
            slot_bytes: 4096,
            ring_bytes: 3 * 4096,
            payloads,
            keep: 1,
            bug: Bug::None,
        }
    }

    fn start(&self) -> u64 {
        2 * self.slot_bytes
    }
}

fn payload(number: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (number * 37 + index * 11 + 1) as u8).collect()
}

fn digest_of(before: u64, payload: &[u8]) -> u64 {
    let mut bytes = before.to_le_bytes().to_vec();
    bytes.extend_from_slice(payload);
    u64::from(checksum::of(Salt::NONE, &bytes))
}

/// A log whose owner digests frames into a number: the root holds how many, and the number.
struct Log {
    region: Region,
    roots: RootPair,
    root: Root,
    ring: AppendRing,
    start: u64,
    /// There was no root before.
    is_new: bool,
    /// Live frames: the position behind each, and its payload unless it is a pad.
    live: Vec<(RingPosition, Option<Vec<u8>>)>,
}

// Words of the root: head position, head sequence, incarnation, frames digested, their digest.
const HEAD: usize = 0;
const SEQUENCE: usize = 1;
const INCARNATION: usize = 2;
const DIGESTED: usize = 3;
const DIGEST: usize = 4;

fn salt(incarnation: u64) -> Salt {
    Salt::of_log(LogUid::new(7), Incarnation::new(incarnation as u32))
}

impl Log {
    fn header(bytes: usize) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        let envelope = Envelope::new(KIND, 0, bytes as u32);
        header[..size_of::<Envelope>()].copy_from_slice(envelope.as_bytes());
        header
    }

    fn format(medium: &Medium, plan: &Plan) -> Result<Self, String> {
        let region = match medium.open(FILE) {
            Err(pmem::MediaError::NotFound) => medium.create(FILE, plan.start() + plan.ring_bytes),
            opened => opened,
        };
        let region = region.map_err(|error| error.to_string())?;
        let roots = RootPair::new(region.clone(), plan.slot_bytes, plan.bug == Bug::IgnoredRootChecksum);
        let found = roots.read()?;
        let root = match found {
            Some(root) => root,
            None => {
                let root = Root { commit: 1, words: [plan.start(), 1, 1, 0, 0, 0] };
                roots.write(&root);
                region.sync().map_err(|error| error.to_string())?;
                root
            }
        };
        let next = Sequence::new(root.words[SEQUENCE]);
        let place = RingPosition { position: root.words[HEAD], sequence: next };
        let ring = AppendRing::new(region.clone(), plan.start(), salt(root.words[INCARNATION]), place, place);
        let (start, is_new) = (plan.start(), found.is_none());
        Ok(Self { region, roots, root, ring, start, is_new, live: Vec::new() })
    }

    fn append(&mut self, payload: &[u8]) -> bool {
        let before = self.ring.tail();
        let (first, second) = payload.split_at(payload.len() / 3);
        // Whole and in parts, by turns: longer ones are stored by other ways.
        let (whole, parts) = ([Source::from(payload)], [Source::from(first), Source::from(second)]);
        let sources: &[_] = if before.sequence.get().is_multiple_of(2) { &whole } else { &parts };
        let Ok(appended) = self.ring.append(Self::header(payload.len()), sources) else { return false };
        if appended.sequence != before.sequence {
            let behind_pad = RingPosition { position: self.start, sequence: appended.sequence };
            self.live.push((behind_pad, None));
        }
        self.live.push((self.ring.tail(), Some(payload.to_vec())));
        true
    }

    fn commit(&mut self, plan: &Plan, count: usize) {
        let mut words = self.root.words;
        let mut place = self.ring.head();
        for (after, payload) in self.live.drain(..count) {
            if let Some(payload) = payload {
                words[DIGESTED] += 1;
                words[DIGEST] = digest_of(words[DIGEST], &payload);
            }
            place = after;
        }
        words[HEAD] = place.position;
        words[SEQUENCE] = place.sequence.get();
        self.root = Root { commit: self.root.commit + 1, words };
        if plan.bug == Bug::ReleaseBeforeSync {
            self.ring.release_to(place);
            return;
        }
        // The root holds the digest itself, so no other write must be durable before it.
        self.write_root();
        self.ring.release_to(place);
    }

    fn write_root(&mut self) {
        self.roots.write(&self.root);
        self.region.sync().unwrap();
    }
}

/// The effects that must survive once a call has returned: a root, and a number of frames from the first on.
#[derive(Clone, Copy, Default)]
struct Promise {
    formatted: bool,
    frames: u64,
}

fn workload(recorder: &Recorder, plan: &Plan, promises: &RefCell<Vec<Promise>>) {
    if let Bug::LeftOut(verb, call) = plan.bug {
        recorder.leave_out(verb, call);
    }
    let mut promise = Promise { formatted: true, frames: 0 };
    let returned = |promise: Promise| {
        recorder.returned(promises.borrow().len() as u64);
        promises.borrow_mut().push(promise);
    };
    let mut log = Log::format(&recorder.medium(), plan).unwrap();
    returned(promise);
    for (number, bytes) in plan.payloads.iter().enumerate() {
        let payload = payload(number, *bytes);
        let mut early = false;
        if !log.append(&payload) {
            let count = log.live.len() - plan.keep;
            log.commit(plan, count);
            early = plan.bug == Bug::ReleaseBeforeSync;
            if !early {
                promise.frames = promise.frames.max(number as u64);
                returned(promise);
            }
            if !log.append(&payload) {
                let count = log.live.len();
                log.commit(plan, count);
                assert!(log.append(&payload), "a payload of {bytes} bytes never fits");
            }
        }
        if early {
            log.write_root();
        }
        // Where a fence is enough, an append is durable at once; elsewhere every fourth one is synced.
        if plan.model == Model::Pages && number % 4 == 3 {
            log.region.sync().unwrap();
        }
        if plan.model == Model::Lines || number % 4 == 3 {
            promise.frames = number as u64 + 1;
        }
        returned(promise);
    }
}

struct Recovered {
    log: Log,
    /// There was a root.
    formatted: bool,
}

fn recover(medium: &Medium, plan: &Plan) -> Result<Recovered, String> {
    let mut log = Log::format(medium, plan)?;
    let formatted = !log.is_new;
    let frames = match plan.bug {
        Bug::IgnoredFrameChecksum => careless_scan(&log),
        _ => careful_scan(&log),
    };
    let mut words = log.root.words;
    for (after, payload) in frames {
        if let Some(payload) = payload {
            words[DIGESTED] += 1;
            words[DIGEST] = digest_of(words[DIGEST], &payload);
        }
        words[HEAD] = after.position;
        words[SEQUENCE] = after.sequence.get();
    }
    if plan.bug != Bug::SameIncarnation {
        words[INCARNATION] += 1;
    }
    log.root = Root { commit: log.root.commit + 1, words };
    log.write_root();
    let place = RingPosition { position: words[HEAD], sequence: Sequence::new(words[SEQUENCE]) };
    log.ring = AppendRing::new(log.region.clone(), log.start, salt(words[INCARNATION]), place, place);
    Ok(Recovered { log, formatted })
}

fn careful_scan(log: &Log) -> Vec<(RingPosition, Option<Vec<u8>>)> {
    let mut scan =
        ring::scan(&log.region, log.start, salt(log.root.words[INCARNATION]), log.ring.head(), u64::MAX);
    let mut frames = Vec::new();
    while let Some(frame) = scan.next() {
        let frame = frame.unwrap();
        let payload = (frame.envelope.kind != PAD_KIND).then(|| frame.bytes[HEADER_BYTES..].to_vec());
        frames.push((scan.place(), payload));
    }
    frames
}

/// The planted bug: accepts a frame with the right sequence and a wrong checksum.
fn careless_scan(log: &Log) -> Vec<(RingPosition, Option<Vec<u8>>)> {
    let (mut place, mut frames) = (log.ring.head(), Vec::new());
    let end = log.region.bytes();
    loop {
        let mut header = [0; HEADER_BYTES];
        log.region.read(place.position, &mut header).unwrap();
        let (envelope, _) = Envelope::read_from_prefix(&header).unwrap();
        let fits = place.position + envelope.frame_bytes() <= end;
        if envelope.sequence != place.sequence || !fits || frames.len() > 100 {
            return frames;
        }
        let mut payload = vec![0; envelope.payload_bytes.get() as usize];
        log.region.read(place.position + HEADER_BYTES as u64, &mut payload).unwrap();
        let pad = envelope.kind == PAD_KIND;
        let after = if pad { end } else { place.position + envelope.frame_bytes() };
        place.position = if after == end { log.start } else { after };
        place.sequence = place.sequence.next();
        frames.push((place, (!pad).then_some(payload)));
    }
}

fn check(recovered: Recovered, plan: &Plan, promise: Promise) -> Result<(), String> {
    let Recovered { mut log, formatted } = recovered;
    if promise.formatted && !formatted {
        return Err("the log was formatted, and is not".to_owned());
    }
    let (frames, digest) = (log.root.words[DIGESTED], log.root.words[DIGEST]);
    if frames < promise.frames {
        return Err(format!("{frames} frames came back, {} were promised", promise.frames));
    }
    let expected = plan.payloads.iter().take(frames as usize).enumerate();
    let expected = expected.fold(0, |digest, (number, bytes)| digest_of(digest, &payload(number, *bytes)));
    if digest != expected || frames as usize > plan.payloads.len() {
        return Err(format!("{frames} frames came back, but not those that were appended"));
    }
    // New appends succeed, and no frame of the earlier incarnation appears behind them. The new frames are as long as the
    // lost ones, so that an intact old frame behind a torn one lies exactly where a scan continues.
    for bytes in plan.payloads.iter().skip(frames as usize).take(2) {
        if !log.append(&vec![0xee; *bytes]) {
            return Ok(());
        }
        let found: Vec<_> = careful_scan(&log).into_iter().filter_map(|(_, payload)| payload).collect();
        let live: Vec<_> = log.live.iter().filter_map(|(_, payload)| payload.clone()).collect();
        if found != live {
            return Err(format!("{} frames were appended after recovery, {} found", live.len(), found.len()));
        }
    }
    Ok(())
}

fn enumerate(plan: &Plan, limits: &Limits) -> Result<Counts, Box<Violation>> {
    let promises = RefCell::new(Vec::new());
    crash::enumerate(
        plan.model,
        limits,
        |recorder| workload(recorder, plan, &promises),
        |medium| recover(medium, plan),
        |recovered, _, point: &Point| {
            let last = point.returned.last();
            let promise = last.map_or(Promise::default(), |last| promises.borrow()[*last as usize]);
            check(recovered, plan, promise)
        },
    )
}

fn calls(plan: &Plan, verb: Verb) -> u64 {
    let recorder = Recorder::new();
    workload(&recorder, plan, &RefCell::new(Vec::new()));
    recorder.calls(verb)
}

fn limits() -> Limits {
    match std::env::var("HEARTH_PROVE") {
        Ok(_) => Limits::default(),
        Err(_) => Limits { complete_max: 1024, sampled: 100, recovery_images: 4, ..Limits::default() },
    }
}

#[test]
fn lines() {
    let counts = progress::case("ring, lines", || enumerate(&Plan::lines(), &limits()));
    let counts = counts.unwrap_or_else(|violation| panic!("{violation}"));
    println!("ring, lines: {counts}");
    assert!(counts.images > 1000 && counts.recovery_images > 1000, "{counts}");
}

#[test]
fn long_lines() {
    let counts = progress::case("ring, long lines", || enumerate(&Plan::long_lines(), &limits()));
    let counts = counts.unwrap_or_else(|violation| panic!("{violation}"));
    println!("ring, long lines: {counts}");
    assert!(counts.images > 1000 && counts.recovery_images > 500, "{counts}");
}

#[test]
fn pages() {
    let counts = progress::case("ring, pages", || enumerate(&Plan::pages(), &limits()));
    let counts = counts.unwrap_or_else(|violation| panic!("{violation}"));
    println!("ring, pages: {counts}");
    assert!(counts.images > 100, "{counts}");
}

/// The calls of a verb that can be skipped without a violation in any crash.
fn left_out_unnoticed(plan: &Plan, verb: Verb) -> Vec<u64> {
    let limits = Limits { recovery_images: 0, ..limits() };
    let goes_unnoticed =
        |call: &u64| enumerate(&Plan { bug: Bug::LeftOut(verb, *call), ..plan.clone() }, &limits).is_ok();
    (0..calls(plan, verb)).filter(goes_unnoticed).collect()
}

#[test]
fn every_persist_fence_and_sync_that_is_left_out_is_found() {
    let none: Vec<u64> = Vec::new();
    assert!(calls(&Plan::lines(), Verb::Fence) >= 11 && calls(&Plan::lines(), Verb::Persist) >= 19);
    assert_eq!(left_out_unnoticed(&Plan::lines(), Verb::Persist), none);
    assert_eq!(left_out_unnoticed(&Plan::lines(), Verb::Fence), none);
    assert_eq!(left_out_unnoticed(&Plan::lines(), Verb::Sync), none);
    assert_eq!(left_out_unnoticed(&Plan::pages(), Verb::Sync), none);
}

#[test]
fn planted_bugs_are_found() {
    // Where pages are the unit, a root of one line cannot be torn. Where lines are the unit, every append has a fence, so
    // no intact frame follows a torn one.
    for (name, bug, models) in [
        ("frame checksum ignored", Bug::IgnoredFrameChecksum, vec![Plan::lines(), Plan::pages()]),
        ("root checksum ignored", Bug::IgnoredRootChecksum, vec![Plan::lines()]),
        ("release before sync", Bug::ReleaseBeforeSync, vec![Plan::lines(), Plan::pages()]),
        ("same incarnation after a cut", Bug::SameIncarnation, vec![Plan::pages()]),
    ] {
        for plan in models {
            let found = enumerate(&Plan { bug, ..plan.clone() }, &limits());
            println!(
                "{name}, {:?}: {:?}",
                plan.model,
                found.as_ref().map_err(|violation| &violation.message)
            );
            assert!(found.is_err(), "{name} is not found under {:?}", plan.model);
        }
    }
}
