//! Space that a pool holds, and gives to its files where the medium has none.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use pmem::held::HELD_FILE;
use pmem::{MediaError, Medium, Recorder};
use std::cell::Cell;
use std::os::unix::fs::MetadataExt;

const MIB: u64 = 1 << 20;

/// Length of the file of the held space, and the bytes for which it has space.
fn file(folder: &std::path::Path) -> (u64, u64) {
    let found = std::fs::metadata(folder.join(HELD_FILE)).unwrap();
    (found.len(), found.blocks() * 512)
}

#[test]
fn what_is_held_has_space_and_is_found_again() {
    for parent in ["/dev/shm", "/tmp"] {
        let folder = tempfile::tempdir_in(parent).unwrap();
        let medium = Medium::file(folder.path()).unwrap();
        medium.open_held().unwrap();
        assert_eq!(medium.held_bytes(), Some(0));
        medium.hold(3 * MIB).unwrap();
        medium.hold(MIB).unwrap();
        assert_eq!(medium.guarded().unwrap().held_bytes(), Some(4 * MIB));
        let (length, space) = file(folder.path());
        assert!(length == 4 * MIB && space >= 4 * MIB, "{length} {space}");
        medium.hold_at_most(2 * MIB).unwrap();
        medium.hold_at_most(3 * MIB).unwrap();
        let (length, space) = file(folder.path());
        assert!(length == 2 * MIB && (2 * MIB..3 * MIB).contains(&space), "{length} {space}");
        drop(medium);
        // The space of a copied file is provided, or its length does not count.
        let held = std::fs::File::options().write(true).open(folder.path().join(HELD_FILE)).unwrap();
        held.set_len(0).unwrap();
        held.set_len(2 * MIB).unwrap();
        let medium = Medium::file(folder.path()).unwrap();
        medium.open_held().unwrap();
        assert_eq!(medium.held_bytes(), Some(2 * MIB));
        assert!(file(folder.path()).1 >= 2 * MIB);
    }
}

/// The operation finds no space until enough is given up, and another program takes the space once.
#[test]
fn space_is_given_up_until_the_operation_has_enough() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let medium = Medium::memory(folder.path()).unwrap();
    medium.hold(4 * MIB).unwrap();
    let needs = |left: u64| {
        let tries = Cell::new(0);
        let done = medium.with_held(MIB, || {
            tries.set(tries.get() + 1);
            if medium.held_bytes() <= Some(left) { Ok(()) } else { Err(MediaError::NoSpace) }
        });
        (done, tries.get())
    };
    assert_eq!(needs(4 * MIB), (Ok(()), 1));
    assert_eq!(needs(2 * MIB), (Ok(()), 3));
    assert_eq!(medium.held_bytes(), Some(2 * MIB));
    let never = medium.with_held(MIB, || Err::<(), _>(MediaError::NoSpace));
    assert_eq!((never, medium.held_bytes()), (Err(MediaError::NoSpace), Some(0)));
    let other = medium.with_held(MIB, || Err::<(), _>(MediaError::Os(5)));
    assert_eq!(other, Err(MediaError::Os(5)));
}

#[test]
fn a_test_medium_counts_its_space() {
    let recorder = Recorder::new();
    let medium = recorder.medium();
    assert_eq!(medium.held_bytes(), None);
    recorder.limit_space(10 * 4096);
    let region = medium.create_in_steps("file", 100 * 4096, 4096).unwrap();
    medium.hold(6 * 4096).unwrap();
    region.reserve(0..4 * 4096).unwrap();
    assert_eq!((recorder.space_left(), medium.held_bytes()), (Some(0), Some(6 * 4096)));
    assert_eq!(region.reserve(4 * 4096..5 * 4096), Err(MediaError::NoSpace));
    assert_eq!(medium.hold(1), Err(MediaError::NoSpace));
    medium.with_held(2 * 4096, || region.reserve(4 * 4096..6 * 4096)).unwrap();
    assert_eq!((recorder.space_left(), medium.held_bytes()), (Some(0), Some(4 * 4096)));
    region.give_back(4096..3 * 4096).unwrap();
    assert_eq!(recorder.space_left(), Some(2 * 4096));
    medium.remove("file").unwrap();
    assert_eq!(recorder.space_left(), Some(6 * 4096));
}

/// A store to a part without space ends a real program on a full medium.
#[test]
#[should_panic(expected = "a store where file file has no space")]
fn a_store_without_space_is_found() {
    let recorder = Recorder::new();
    recorder.limit_space(10 * 4096);
    let region = recorder.medium().create_in_steps("file", 100 * 4096, 4096).unwrap();
    region.write(0, &[1; 4096]);
    region.write(4096, &[1]);
}
