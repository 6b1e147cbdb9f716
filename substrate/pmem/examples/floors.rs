//! Compares the time of an append with two lower bounds: non-temporal copy, checksum and fence of the same bytes; and the
//! same with the checksum stored in a line of its own before the fence, which is the least that a frame needs. (In the
//! first one no store depends on the checksum, so the processor computes it while the previous fence still waits.)
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
    let (bare, summed, framed, log) = (region("bare"), region("summed"), region("framed"), region("log"));
    // Written before the measurement, so that it contains no page faults.
    for region in [&bare, &summed, &framed, &log] {
        (0..REGION_BYTES / 4096).for_each(|page| region.write(page * 4096, &[0; 64]));
    }
    println!("nanoseconds, median (lowest); the append as a ratio of each");
    println!("   bytes      copy+fence  copy+crc+fence     with its sum         append  to crc  to sum");
    for bytes in [128, 1024, 4096, 65_536, 1 << 20] {
        measure(bytes, [&bare, &summed, &framed, &log]);
    }
    std::fs::remove_dir_all(&folder).expect("the folder can be removed");
}

fn measure(bytes: usize, [bare, summed, framed, log]: [&Region; 4]) {
    let source: Vec<u8> = (0..bytes).map(|index| index as u8).collect();
    let calls = (1 << 20) / bytes.max(1024);
    let mut ring = AppendRing::empty(log.clone(), 0, Salt::NONE, Sequence::new(1));
    let mut times: [Vec<f64>; 4] = Default::default();
    let (mut bare_at, mut summed_at, mut framed_at) = (0, 0, 0);
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
        times[2].push(timed(calls, || {
            framed_at = next(framed_at, bytes);
            framed.write(framed_at + HEADER_BYTES as u64, &source);
            let mut line = [0; HEADER_BYTES];
            line[..4].copy_from_slice(&checksum::of(Salt::NONE, &source).to_le_bytes());
            framed.write(framed_at, &line);
            framed.fence();
        }));
        times[3].push(timed(calls, || append(&mut ring, &source)));
    }
    std::hint::black_box(kept);
    let times = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        (times[ROUNDS / 2], times[0])
    });
    print!("{bytes:>8}");
    times.iter().for_each(|(median, lowest)| print!(" {median:>7.0} {:>7}", format!("({lowest:.0})")));
    println!("    {:.2}    {:.2}", times[3].0 / times[1].0, times[3].0 / times[2].0);
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

/// Offset of the next bytes, so that all variants advance through their region alike.
fn next(at: u64, bytes: usize) -> u64 {
    let next = at + (bytes + HEADER_BYTES).next_multiple_of(64) as u64;
    if next + (bytes + HEADER_BYTES) as u64 > REGION_BYTES { 0 } else { next }
}

/// Nanoseconds for each call.
#[expect(clippy::disallowed_methods, reason = "a measurement reads the clock of the machine")]
fn timed(calls: usize, mut call: impl FnMut()) -> f64 {
    let start = std::time::Instant::now();
    for _ in 0..calls {
        call();
    }
    start.elapsed().as_nanos() as f64 / calls as f64
}
