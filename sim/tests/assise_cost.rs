//! Costs of LibFS's operations in steady state: fences, bytes of log, allocations, calls. Never time.

mod assise_local;

use assise_local::{Node, sharedfs_area, tiny};
use format::call::CallKind;
use format::{InodeNumber, Name};
use libfs::{LibFs, Limits};
use sharedfs::Config;
use std::io::{IoSlice, IoSliceMut};
use vfs::engine::{Access, At, Created, Handle, New, NewType, Removal, RenameMode};
use vfs::{Caller, Engine};

const BOTH: Access = Access { read: true, write: true };

fn name(bytes: &[u8]) -> Name<'_> {
    Name::new(bytes).expect("a good name")
}

fn create(libfs: &LibFs, parent: InodeNumber, bytes: &[u8]) -> (InodeNumber, Handle) {
    let new = New { kind: NewType::Regular(Some(BOTH)), mode: 0o644, umask: 0, exclusive: true };
    match libfs.create(&Caller::ROOT, parent, name(bytes), &new) {
        Ok(Created::New(attributes, Some(handle))) => (attributes.inode, handle),
        other => panic!("a new name is created: {other:?}"),
    }
}

fn folder(libfs: &LibFs, bytes: &[u8]) -> InodeNumber {
    let root = libfs.root().expect("there is a root").inode;
    let new = New { kind: NewType::Directory, mode: 0o755, umask: 0, exclusive: true };
    match libfs.create(&Caller::ROOT, root, name(bytes), &new) {
        Ok(Created::New(attributes, None)) => attributes.inode,
        other => panic!("a new name is created: {other:?}"),
    }
}

fn write(libfs: &LibFs, handle: Handle, at: At, bytes: &[u8]) {
    let written = libfs.write(&Caller::ROOT, handle, at, &[IoSlice::new(bytes)]);
    assert_eq!(written.map(|written| written.bytes), Ok(bytes.len()));
}

/// Logs that do not fill up during a measurement.
fn roomy() -> Config {
    Config { log_bytes: 8 << 20, log_bytes_max: 8 << 20, room_blocks: 1 << 13, ..tiny() }
}

#[test]
fn a_small_write_is_one_fence_and_three_lines() {
    let node = Node::new(roomy());
    let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
    let root = libfs.root().expect("there is a root").inode;
    let (_, handle) = create(&libfs, root, b"file");
    let bytes = [7; 128];
    // At one place: the log index replaces its piece.
    let overwrite = || write(&libfs, handle, At::Offset(4096), &bytes);
    (0..100).for_each(|_| overwrite());
    let (before, calls) = (local.log().counters(), local.counts.all());
    let allocated = allocation_counter::measure(|| (0..1000).for_each(|_| overwrite()));
    let cost = local.log().counters().since(&before);
    assert_eq!((cost.fences, cost.bytes), (1000, 1000 * 192), "fences and bytes of log");
    assert_eq!(allocated.count_total, 0, "allocations");
    assert_eq!(local.counts.all(), calls, "calls");
}

#[test]
fn a_growing_file_allocates_nothing_after_the_first_round_of_the_log() {
    let node = Node::new(Config { log_bytes: 64 << 10, log_bytes_max: 64 << 10, ..roomy() });
    let limits = Limits { log_bytes_max: 64 << 10, ..Limits::default() };
    let (libfs, local) = node.attach(Caller::ROOT, limits);
    let root = libfs.root().expect("there is a root").inode;
    let (_, handle) = create(&libfs, root, b"file");
    let bytes = [7; 128];
    let append = || write(&libfs, handle, At::End, &bytes);
    // Two rounds of the log, so that the index has seen its largest size.
    (0..700).for_each(|_| append());
    let mut silent = 0;
    for _ in 0..1000 {
        let calls = local.counts.all();
        let allocated = allocation_counter::measure(append);
        if local.counts.all() == calls {
            assert_eq!(allocated.count_total, 0, "a write without a call allocates nothing");
            silent += 1;
        }
    }
    // Calls are for digest and room: a few in each round of 340 writes.
    assert!(silent > 950, "{silent} of 1000 writes made no call");
}

/// A pool in which a share of what is free is as much as a program asks for, as in one that `hearth up` makes; its log
/// is not half full at the end.
#[test]
fn a_private_folder_needs_no_call_but_refills() {
    const ROUNDS: u64 = 3000;
    let config = Config {
        log_bytes: 32 << 20,
        log_bytes_max: 32 << 20,
        room_blocks: Config::default().room_blocks,
        area: sharedfs_area(1 << 16),
        ..tiny()
    };
    let node = Node::with_nodes(config, 3 << 14);
    let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
    let folder = folder(&libfs, b"private");
    let before = local.counts.kinds();
    let bytes = [9; 4096];
    for number in 0..ROUNDS {
        let (temporary, last) = (format!("t{number}"), format!("f{number}"));
        let (inode, handle) = create(&libfs, folder, temporary.as_bytes());
        write(&libfs, handle, At::Offset(0), &bytes);
        libfs.close(handle);
        libfs.forget(&[inode]);
        let (from, to) = ((folder, name(temporary.as_bytes())), (folder, name(last.as_bytes())));
        assert_eq!(libfs.rename(&Caller::ROOT, from, to, RenameMode::Replace { whiteout: false }), Ok(()));
    }
    let mut after = local.counts.kinds();
    after.retain(|made| !before.contains(made));
    let refills = local.counts.of(CallKind::Refill);
    assert_eq!(after, [(CallKind::Refill, refills)], "calls, beside {before:?}");
    assert!(refills <= ROUNDS / 1000, "{refills} refills in {ROUNDS} rounds");
}

/// A program that looks small files up and removes them, as a mount does for its kernel, releases many in one call; a
/// large one it releases with the next close.
#[test]
fn references_to_small_files_are_released_together_and_one_to_a_large_file_at_once() {
    const FILES: u64 = 600;
    let node = Node::new(roomy());
    let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
    let folder = folder(&libfs, b"folder");
    let remove_one = |bytes: usize| {
        let (inode, handle) = create(&libfs, folder, b"file");
        write(&libfs, handle, At::Offset(0), &vec![7; bytes]);
        libfs.close(handle);
        assert_eq!(libfs.unlink(&Caller::ROOT, folder, name(b"file"), Removal::File), Ok(()));
        libfs.forget(&[inode]);
        // Each record is digested before the next close.
        node.daemon().expect("it runs").tidy();
    };
    (0..FILES).for_each(|_| remove_one(100));
    let small = local.counts.of(CallKind::Close);
    assert!((1..=FILES / 60).contains(&small), "{small} calls for {FILES} small files");
    remove_one(1 << 20);
    remove_one(100);
    assert_eq!(local.counts.of(CallKind::Close), small + 1, "the large one and all before it");
    assert!(node.daemon().expect("it runs").references() <= 1);
}

#[test]
fn a_read_hit_is_neither_call_nor_allocation() {
    let node = Node::new(roomy());
    let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
    let root = libfs.root().expect("there is a root").inode;
    let (_, handle) = create(&libfs, root, b"file");
    write(&libfs, handle, At::Offset(0), &[5; 16 << 10]);
    let mut into = [0; 4096];
    let mut read = || {
        let read = libfs.read(handle, 8192, &mut [IoSliceMut::new(&mut into)]);
        assert_eq!((read, into[4095]), (Ok(4096), 5));
    };
    read();
    for from in ["the log", "the area"] {
        let calls = local.counts.all();
        let allocated = allocation_counter::measure(|| (0..100).for_each(|_| read()));
        assert_eq!((allocated.count_total, local.counts.all()), (0, calls), "read from {from}");
        // Now out of the log: digested records are dropped from the index when the log's space is needed.
        node.daemon().expect("it runs").tidy();
        (0..30).for_each(|_| write(&libfs, handle, At::Offset(1 << 20), &[1; 256 << 10]));
        read();
    }
}
