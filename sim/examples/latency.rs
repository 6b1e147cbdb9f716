//! Latencies of LibFS's operations beside their floors, in this process, on a pool in memory: writes beside the bare
//! append of the same bytes (non-temporal copy, checksum, fence), read hits beside memcpy.
//!
//! `cargo run --release -p sim --example latency`. The machine is shared: compare within one run only.

#[path = "../tests/assise_local/mod.rs"]
mod assise_local;

use assise_local::{Node, sharedfs_area};
use format::checksum::Salt;
use format::record::{Kind, RecordHeader};
use format::{Envelope, InodeNumber, Name, Sequence};
use ipc::{Host, SystemHost};
use libfs::{LibFs, Limits};
use pmem::ring::AppendRing;
use pmem::{Medium, Source};
use sharedfs::Config;
use std::hint::black_box;
use std::io::{IoSlice, IoSliceMut};
use vfs::engine::{Access, At, Created, Handle, New, NewType, RenameMode};
use vfs::{Caller, Engine};
use zerocopy::little_endian::{I64, U64};

/// Middle and best of many times, in nanoseconds.
struct Times {
    middle: u64,
    best: u64,
}

fn time(rounds: usize, mut operation: impl FnMut(usize)) -> Times {
    let host = SystemHost;
    let mut times: Vec<u64> = (0..rounds)
        .map(|round| {
            let start = host.now();
            operation(round);
            u64::try_from(host.now().since(start).as_nanos()).unwrap_or(u64::MAX)
        })
        .collect();
    times.sort_unstable();
    Times { middle: times[rounds / 2], best: times[0] }
}

fn show(what: &str, ours: &Times, floor: &Times) {
    let ratio = ours.middle as f64 / floor.middle.max(1) as f64;
    println!(
        "{what:<22} {:>9} ns (best {:>8})   floor {:>9} ns (best {:>8})   {ratio:.2}x",
        ours.middle, ours.best, floor.middle, floor.best
    );
}

const LOG_BYTES: u64 = 64 << 20;

/// Appends of so many bytes to a ring of the same size, as no file system could do better.
fn floor_of_write(bytes: usize, rounds: usize) -> Times {
    let folder = assise_local::folder();
    let medium = Medium::memory(folder.path()).expect("the folder is there");
    let region = medium.create("floor", LOG_BYTES).expect("there is memory");
    touch(&region);
    let mut ring = AppendRing::empty(region.clone(), 4096, Salt::NONE, Sequence::new(1));
    let payload = vec![7; bytes];
    time(rounds, |_| {
        let header = RecordHeader {
            envelope: Envelope::new(Kind::Write as u8, 0, bytes as u32),
            inode: InodeNumber::ROOT,
            parent: InodeNumber::NONE,
            offset: U64::new(0),
            extra: U64::new(0),
            time_ns: I64::new(0),
        };
        let source = [Source::from(payload.as_slice())];
        if ring.append(zerocopy::transmute!(header), &source).is_err() {
            let tail = ring.tail();
            ring.release_to(tail);
            ring.append(zerocopy::transmute!(header), &source).expect("an empty ring has room");
        }
    })
}

/// Makes the kernel provide every page before the clock runs.
fn touch(region: &pmem::Region) {
    let zeros = vec![0; 1 << 20];
    for at in (0..region.bytes()).step_by(1 << 20) {
        region.write(at, &zeros[..(region.bytes() - at).min(1 << 20) as usize]);
    }
}

fn create(libfs: &LibFs, parent: InodeNumber, name: &str) -> (InodeNumber, Handle) {
    let access = Access { read: true, write: true };
    let new = New { kind: NewType::Regular(Some(access)), mode: 0o644, umask: 0, exclusive: true };
    let name = Name::new(name.as_bytes()).expect("a good name");
    match libfs.create(&Caller::ROOT, parent, name, &new) {
        Ok(Created::New(attributes, Some(handle))) => (attributes.inode, handle),
        other => panic!("a new name is created: {other:?}"),
    }
}

fn main() {
    let config = Config {
        log_bytes: LOG_BYTES,
        log_bytes_max: LOG_BYTES,
        room_blocks: 1 << 17,
        area: sharedfs_area(1 << 18),
        ..Config::default()
    };
    let node = Node::new(config);
    let daemon = node.daemon().expect("it was started");
    daemon.start().expect("a thread for the daemon");
    let (libfs, local) = node.attach(Caller::ROOT, Limits { refill_blocks: 1 << 16, ..Limits::default() });
    touch_log(&local.log());
    let root = libfs.root().expect("there is a root").inode;
    let (_, handle) = create(&libfs, root, "file");
    println!("machine shared with others; in process, pool in memory; middle of each run");
    for (what, bytes, rounds) in
        [("write 128 B", 128, 200_000), ("write 4 KB", 4096, 20_000), ("write 1 MB", 1 << 20, 200)]
    {
        let payload = vec![7; bytes];
        let floor = floor_of_write(bytes, rounds);
        let ours = time(rounds, |round| {
            let at = At::Offset((round * bytes % (8 << 20)) as u64);
            libfs.write(&Caller::ROOT, handle, at, &[IoSlice::new(&payload)]).expect("there is room");
        });
        show(what, &ours, &floor);
    }
    for (what, bytes, rounds) in [("read hit 4 KB", 4096, 100_000), ("read hit 1 MB", 1 << 20, 500)] {
        // The data to be read is in the area: everything before was digested.
        daemon.tidy();
        for _ in 0..80 {
            let filler = vec![1; 1 << 20];
            let at = At::Offset(32 << 20);
            libfs.write(&Caller::ROOT, handle, at, &[IoSlice::new(&filler)]).expect("there is room");
        }
        daemon.tidy();
        let source = vec![3u8; 8 << 20];
        let mut into = vec![0u8; bytes];
        let floor = time(rounds, |round| {
            let at = round * bytes % (8 << 20);
            black_box(&mut into[..]).copy_from_slice(black_box(&source[at..at + bytes]));
        });
        let ours = time(rounds, |round| {
            let at = (round * bytes % (8 << 20)) as u64;
            libfs.read(handle, at, &mut [IoSliceMut::new(&mut into)]).expect("it is there");
        });
        show(what, &ours, &floor);
    }
    let floor = floor_of_write(4096, 20_000);
    let payload = vec![7; 4096];
    let ours = time(5_000, |round| {
        let (temporary, last) = (format!("t{round}"), format!("f{round}"));
        let (inode, handle) = create(&libfs, root, &temporary);
        libfs.write(&Caller::ROOT, handle, At::End, &[IoSlice::new(&payload)]).expect("there is room");
        libfs.close(handle);
        libfs.forget(&[inode]);
        let from = Name::new(temporary.as_bytes()).expect("a good name");
        let to = Name::new(last.as_bytes()).expect("a good name");
        libfs
            .rename(&Caller::ROOT, (root, from), (root, to), RenameMode::Replace { whiteout: false })
            .expect("it exists");
    });
    show("create+write+rename", &ours, &floor);
}

fn touch_log(log: &pmem::Region) {
    // Reading is enough for pages of a file that was allocated.
    let mut page = vec![0; 1 << 20];
    for at in (0..log.bytes()).step_by(1 << 20) {
        let bytes = (log.bytes() - at).min(1 << 20) as usize;
        log.read(at, &mut page[..bytes]).expect("memory can be read");
    }
}
