//! Places that are written for the first time, and again.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(target_os = "linux")]

use pmem::{Medium, Recorder, Region};

const PAGE: usize = 4096;
const PAGES: usize = 1200;

/// Page faults of this thread for which nothing was read.
fn faults() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let behind_name = text.rsplit_once(')').unwrap().1;
    behind_name.split_ascii_whitespace().nth(7).unwrap().parse().unwrap()
}

fn check(region: &Region) {
    // Not at the start of a page, and over the edge of a piece.
    let places = [0, 3, 511, 512, 1023, 1199].map(|page| page * PAGE);
    for (round, write) in [Region::fill, Region::overwrite, Region::fill].into_iter().enumerate() {
        for place in places {
            let bytes: Vec<u8> = (0..PAGE - 100).map(|index| (index + place + round) as u8).collect();
            write(region, place as u64 + 50, &bytes);
            let mut found = vec![0; PAGE];
            region.read(place as u64, &mut found).unwrap();
            assert_eq!(found, [&[0; 50][..], &bytes, &[0; 50]].concat());
        }
    }
    region.sync().unwrap();
    let counters = region.counters();
    assert_eq!((counters.writes, counters.bytes), (18, 18 * (PAGE as u64 - 100)));
}

#[test]
fn both_store_what_a_write_stores() {
    let bytes = (PAGES * PAGE) as u64;
    let (in_memory, on_disk) = (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir().unwrap());
    check(&Medium::memory(in_memory.path()).unwrap().guarded().unwrap().create("file", bytes).unwrap());
    check(&Medium::file(on_disk.path()).unwrap().guarded().unwrap().create("file", bytes).unwrap());
    check(&Recorder::new().medium().create("file", bytes).unwrap());
}

#[test]
fn neither_waits_for_a_fault_at_each_page() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let region = Medium::memory(folder.path()).unwrap().create("file", (PAGES * PAGE) as u64).unwrap();
    let faults_of = |write: fn(&Region, u64, &[u8]), pages: &[usize]| {
        let before = faults();
        pages.iter().for_each(|page| write(&region, (page * PAGE) as u64, &[7; PAGE]));
        faults() - before
    };
    let all: Vec<usize> = (0..PAGES).collect();
    assert!(faults_of(Region::fill, &all) < 50);
    // The pages of a piece are mapped together, which counts as a fault of each.
    assert!(faults_of(Region::overwrite, &[7, 600, 1100]) >= PAGES as u64);
    assert!(faults_of(Region::overwrite, &all) < 50);
}
