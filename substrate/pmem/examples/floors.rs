//! What an append costs beside its floor: non-temporal copy, checksum and fence of the same bytes.
//!
//! `cargo run --release -p pmem --example floors [FOLDER]`; the folder should be on tmpfs (default /dev/shm). Prints
//! the lowest and the median time of each, taken in turns in one run, and the ratio of the medians.

use format::checksum::{self, Salt};
use format::{Envelope, HEADER_BYTES, Sequence};
use pmem::ring::AppendRing;
use pmem::{Medium, Region, Source};
use std::path::PathBuf;
use zerocopy::IntoBytes;

const REGION_BYTES: u64 = 64 << 20;
const ROUNDS: usize = 200;

fn main() {
    let folder = std::env::args().nth(1).map_or_else(|| PathBuf::from("/dev/shm"), PathBuf::from);
    let folder = folder.join(format!("hearth-floors-{}", std::process::id()));
    std::fs::create_dir(&folder).expect("the folder can be made");
    let medium = Medium::memory(&folder).expect("the folder opens");
    let region = |name| medium.create(name, REGION_BYTES).expect("the medium has room");
    let (bare, summed, log) = (region("bare"), region("summed"), region("log"));
    // Touched before, so that nobody pays for the first page faults.
    for region in [&bare, &summed, &log] {
        (0..REGION_BYTES / 4096).for_each(|page| region.write(page * 4096, &[0; 64]));
    }
    println!("bytes      copy+fence   copy+crc+fence   append  (ns: median, lowest)  append/floor");
    for bytes in [128, 1024, 4096, 65_536, 1 << 20] {
        measure(bytes, &bare, &summed, &log);
    }
    std::fs::remove_dir_all(&folder).expect("the folder can be removed");
}

fn measure(bytes: usize, bare: &Region, summed: &Region, log: &Region) {
    let source: Vec<u8> = (0..bytes).map(|index| index as u8).collect();
    let calls = (1 << 20) / bytes.max(1024);
    let mut ring = AppendRing::empty(log.clone(), 0, Salt::NONE, Sequence::new(1));
    let mut times: [Vec<f64>; 3] = Default::default();
    let (mut bare_at, mut summed_at) = (0, 0);
    let mut kept = 0;
    for _ in 0..ROUNDS {
        times[0].push(timed(calls, || {
            bare_at = next(bare_at, bytes);
            bare.write(bare_at, &source);
            bare.fence();
        }));
        times[1].push(timed(calls, || {
            summed_at = next(summed_at, bytes);
            kept ^= checksum::of(Salt::NONE, &source);
            summed.write(summed_at, &source);
            summed.fence();
        }));
        times[2].push(timed(calls, || append(&mut ring, &source)));
    }
    std::hint::black_box(kept);
    let [bare, floor, append] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        (times[ROUNDS / 2], times[0])
    });
    println!(
        "{bytes:>8} {:>7.0} {:>6.0} {:>7.0} {:>7.0} {:>7.0} {:>7.0}      {:.2}",
        bare.0,
        bare.1,
        floor.0,
        floor.1,
        append.0,
        append.1,
        append.0 / floor.0
    );
}

fn append(ring: &mut AppendRing, source: &[u8]) {
    let mut header = [0; HEADER_BYTES];
    let envelope = Envelope::new(2, 0, source.len() as u32);
    header[..size_of::<Envelope>()].copy_from_slice(envelope.as_bytes());
    if ring.append(header, &[Source::from(source)]).is_err() {
        ring.release_to(ring.tail());
        ring.append(header, &[Source::from(source)]).expect("an empty ring has room");
    }
}

/// Where the next bytes go, so that all three walk through their region alike.
fn next(at: u64, bytes: usize) -> u64 {
    let next = at + (bytes + HEADER_BYTES).next_multiple_of(64) as u64;
    if next + bytes as u64 > REGION_BYTES { 0 } else { next }
}

/// Nanoseconds a call.
#[expect(clippy::disallowed_methods, reason = "a measurement reads the clock of the machine")]
fn timed(calls: usize, mut call: impl FnMut()) -> f64 {
    let start = std::time::Instant::now();
    for _ in 0..calls {
        call();
    }
    start.elapsed().as_nanos() as f64 / calls as f64
}
