//! Files of a pool on every medium: creation, reopening, locks, and failures as error values.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use pmem::{Class, Counters, MediaError, Medium, ReadMapping, Recorder, Region, Sink};
use std::os::unix::fs::PermissionsExt;

/// Runs a test on each medium.
fn on_each(test: impl Fn(&Medium)) {
    let folder = tempfile::tempdir().unwrap();
    test(&Medium::file(folder.path()).unwrap());
    let folder = tempfile::tempdir().unwrap();
    test(&Medium::memory(folder.path()).unwrap());
    test(&Recorder::new().medium());
}

#[test]
fn files_come_and_go() {
    on_each(|medium| {
        assert_eq!(medium.list().unwrap(), Vec::<String>::new());
        let region = medium.create("tree", 10_000).unwrap();
        assert_eq!((region.bytes(), region.name()), (10_000, "tree"));
        let mut bytes = [1; 100];
        region.read(9_900, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 100]);
        region.write(37, b"hello");
        region.fence();
        region.sync().unwrap();
        medium.create("log-1", 4096).unwrap();
        assert_eq!(medium.create("tree", 5).unwrap_err(), MediaError::Exists);
        assert_eq!(medium.list().unwrap(), ["log-1", "tree"]);
        let again = medium.open("tree").unwrap();
        let mut bytes = [0; 7];
        again.read(36, &mut bytes).unwrap();
        assert_eq!(&bytes, b"\0hello\0");
        medium.remove("tree").unwrap();
        assert_eq!(medium.remove("tree").unwrap_err(), MediaError::NotFound);
        assert_eq!(medium.open("tree").unwrap_err(), MediaError::NotFound);
        assert_eq!(medium.list().unwrap(), ["log-1"]);
    });
}

#[test]
fn names_and_lengths_that_cannot_be_are_refused() {
    on_each(|medium| {
        for name in ["", ".", "..", ".hidden", "a/b", "lock", "a\0b", &"x".repeat(201)] {
            assert_eq!(medium.create(name, 1).unwrap_err(), MediaError::Name, "{name:?}");
            assert_eq!(medium.open(name).unwrap_err(), MediaError::Name, "{name:?}");
        }
        assert_eq!(medium.create("empty", 0).unwrap_err(), MediaError::Length);
        assert_eq!(medium.create("huge", u64::MAX).unwrap_err(), MediaError::Length);
    });
}

#[test]
fn one_process_holds_the_pool() {
    on_each(|medium| {
        let lock = medium.lock().unwrap();
        assert_eq!(medium.lock().unwrap_err(), MediaError::Locked);
        drop(lock);
        medium.lock().unwrap();
    });
}

#[test]
fn every_length_and_place_is_stored_exactly() {
    on_each(|medium| {
        let region = medium.create("file", 1024).unwrap();
        let mut expected = vec![0; 1024];
        for (number, (offset, bytes)) in [
            (0, 1),
            (1, 63),
            (63, 2),
            (64, 64),
            (60, 200),
            (128, 512),
            (1000, 24),
            (3, 9),
            (511, 130),
            (7, 0),
        ]
        .into_iter()
        .enumerate()
        {
            let source: Vec<u8> = (0..bytes).map(|index| (index + number * 50 + 1) as u8).collect();
            region.write(offset as u64, &source);
            expected[offset..offset + bytes].copy_from_slice(&source);
            let mut found = vec![0; 1024];
            region.read(0, &mut found).unwrap();
            assert_eq!(found, expected, "{bytes} bytes at {offset}");
        }
        region.store(100, &[7; 50]);
        region.persist(100..150);
        let expected = Counters {
            writes: 11,
            bytes: 1 + 63 + 2 + 64 + 200 + 512 + 24 + 9 + 130 + 50,
            persists: 1,
            ..region.counters()
        };
        assert_eq!(region.counters(), expected);
    });
}

#[test]
fn a_read_only_region_is_that() {
    on_each(|medium| {
        medium.create("file", 4096).unwrap().write(0, b"read me");
        let region = medium.open_read_only("file").unwrap();
        let stored = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| region.write(0, b"x")));
        assert!(stored.is_err());
        let mapping = match region.descriptor() {
            Some(file) => {
                let file = file.try_clone_to_owned().unwrap();
                assert!(
                    Region::from_fd(file.try_clone().unwrap(), Class::File).is_err(),
                    "mapped for writing"
                );
                ReadMapping::from_fd(file).unwrap()
            }
            None => ReadMapping::from_region(region),
        };
        let mut bytes = [0; 7];
        mapping.copy_to(0, &mut Sink::from(&mut bytes[..]), 7).unwrap();
        assert_eq!((&bytes, mapping.bytes()), (b"read me", 4096));
    });
}

#[test]
fn a_log_comes_as_a_descriptor() {
    let folder = tempfile::tempdir().unwrap();
    let medium = Medium::file(folder.path()).unwrap();
    let region = medium.create("log", 4096).unwrap();
    let file = region.descriptor().unwrap().try_clone_to_owned().unwrap();
    let other = Region::from_fd(file, Class::File).unwrap();
    other.write(64, b"from the other side");
    let mut bytes = [0; 19];
    region.read(64, &mut bytes).unwrap();
    assert_eq!(&bytes, b"from the other side");
    assert!(other.descriptor().is_none(), "nothing is left that a program could close");
    other.sync().unwrap();
}

/// Kilobytes of a file's mapping in this process that `/proc/self/smaps` tells under these names.
fn mapped_kib(file: &std::path::Path, names: &[&str]) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut within = false;
    let mut kib = 0;
    for line in maps.lines() {
        if line.as_bytes()[0].is_ascii_uppercase() {
            let counts = within && names.iter().any(|name| line.starts_with(name));
            kib += if counts { line.split_whitespace().nth(1).unwrap().parse().unwrap() } else { 0 };
        } else {
            within = line.ends_with(file.to_str().unwrap());
        }
    }
    kib
}

/// Kilobytes of a file that are mapped in this process and differ from the medium.
fn dirty_kib(file: &std::path::Path) -> u64 {
    mapped_kib(file, &["Shared_Dirty:", "Private_Dirty:"])
}

#[test]
fn the_memory_of_a_log_is_mapped_piece_by_piece() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("log");
    Medium::file(folder.path()).unwrap().create("log", 5 << 20).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let log = Region::from_fd(file.into(), Class::Memory).unwrap();
    for (range, kib) in [(0..2 << 20, 2048), (2 << 20..4 << 20, 4096), (4 << 20..5 << 20, 5120)] {
        log.touch(range.clone());
        assert_eq!(mapped_kib(&path, &["Rss:"]), kib, "{range:?}");
    }
}

#[test]
fn a_file_gets_its_space_in_steps() {
    let folder = tempfile::tempdir().unwrap();
    // A file on a disk gets whole large pages of the page cache, in which a part without space would fail on a full disk.
    for (medium, steps) in [
        (Medium::memory(folder.path()).unwrap(), [1 << 20, 3 << 20]),
        (Medium::file(folder.path()).unwrap(), [2 << 20, 4 << 20]),
    ] {
        let space = || {
            std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(folder.path().join("log")).unwrap())
                * 512
        };
        let log = medium.create_in_steps("log", 5 << 20, 1 << 20).unwrap();
        assert_eq!((log.bytes(), space()), (5 << 20, steps[0]));
        log.write(4096, &[7; 4096]);
        log.reserve(1 << 20..3 << 20).unwrap();
        assert_eq!(space(), steps[1]);
        log.reserve(0..5 << 20).unwrap();
        assert_eq!(space(), 5 << 20);
        let mut found = [0; 4096];
        log.read(4096, &mut found).unwrap();
        assert_eq!(found, [7; 4096], "what was there stays");
        log.give_back((1 << 20) + 4096..5 << 20).unwrap();
        assert!(space() < 5 << 20 && space() >= 1 << 20, "{}", space());
        assert_eq!(medium.create_in_steps("no", 4096, 8192).unwrap_err(), MediaError::Length);
        medium.remove("log").unwrap();
    }
    let medium = Medium::file(folder.path()).unwrap();
    let log = medium.create_in_steps("log", 1 << 60, 4096);
    // Where a file may have this length, the space is missing later.
    assert!(log.map_or_else(Err, |log| log.reserve(0..1 << 60)).is_err());
}

#[test]
fn a_log_that_came_as_a_descriptor_is_synced_without_it() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let medium = Medium::file(folder.path()).unwrap();
    let region = medium.create("log", 1 << 20).unwrap();
    let file = region.descriptor().unwrap().try_clone_to_owned().unwrap();
    drop(region);
    let log = Region::from_fd(file, Class::File).unwrap();
    let path = folder.path().join("log");
    assert_eq!(dirty_kib(&path), 0);
    log.write(1 << 19, b"to the medium");
    assert_eq!(dirty_kib(&path), 4);
    log.sync().unwrap();
    assert_eq!(dirty_kib(&path), 0);
}

#[test]
fn a_file_takes_its_space_at_once_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let medium = Medium::file(folder.path()).unwrap();
    assert_eq!(medium.create("file", 1 << 60).unwrap_err(), MediaError::NoSpace);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing stays behind");
    medium.create("file", 1 << 20).unwrap();
    let found = std::fs::metadata(folder.path().join("file")).unwrap();
    assert_eq!((found.permissions().mode() & 0o7777, found.len()), (0o600, 1 << 20));
    assert!(std::os::unix::fs::MetadataExt::blocks(&found) * 512 >= 1 << 20);
}

#[test]
fn what_a_crashed_creation_left_goes_with_the_next_lock() {
    let folder = tempfile::tempdir().unwrap();
    let medium = Medium::file(folder.path()).unwrap();
    std::fs::write(folder.path().join(".new-tree"), b"half").unwrap();
    assert_eq!(medium.list().unwrap(), Vec::<String>::new());
    medium.create("tree", 4096).unwrap();
    std::fs::write(folder.path().join(".new-log"), b"half").unwrap();
    let _lock = medium.lock().unwrap();
    assert!(!folder.path().join(".new-log").exists());
    assert_eq!(medium.list().unwrap(), ["tree"]);
}

#[test]
fn a_lock_whose_file_was_removed_is_a_lock() {
    let folder = tempfile::tempdir().unwrap();
    let (medium, other) = (Medium::file(folder.path()).unwrap(), Medium::file(folder.path()).unwrap());
    let held = medium.lock().unwrap();
    std::fs::remove_file(folder.path().join("lock")).unwrap();
    assert_eq!(other.lock().unwrap_err(), MediaError::Locked);
    drop(held);
    drop(other.lock().unwrap());
}

#[test]
fn a_pipe_is_no_file_and_nobody_waits_at_it() {
    let folder = tempfile::tempdir().unwrap();
    let name = std::ffi::CString::new(folder.path().join("tree").to_str().unwrap()).unwrap();
    // SAFETY: the name ends with zero.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let medium = Medium::file(folder.path()).unwrap();
    assert!(medium.open_read_only("tree").is_err());
    assert!(medium.open("tree").is_err());
}

#[test]
fn a_failed_sync_poisons_the_region() {
    let recorder = Recorder::new();
    let medium = recorder.medium();
    let region = medium.create("file", 4096).unwrap();
    region.sync().unwrap();
    recorder.fail_sync(1);
    assert_eq!(region.sync(), Err(MediaError::Os(libc::EIO)));
    assert_eq!(region.sync(), Err(MediaError::Poisoned));
    assert_eq!(region.clone().sync(), Err(MediaError::Poisoned));
}

#[test]
fn reads_of_a_bad_range_fail() {
    let recorder = Recorder::new();
    let region = recorder.medium().create("file", 4096).unwrap();
    recorder.fail_reads("file", 100..101);
    let mut bytes = [0; 50];
    assert_eq!(region.read(60, &mut bytes), Err(MediaError::Unreadable));
    assert_eq!(region.read(100, &mut bytes), Err(MediaError::Unreadable));
    assert_eq!(region.read(50, &mut bytes), Ok(()));
    assert_eq!(region.read(101, &mut bytes), Ok(()));
}

#[test]
fn what_is_done_meanwhile_comes_before_each_call_until_it_ends() {
    let recorder = Recorder::new();
    let medium = recorder.medium();
    let (region, other) = (medium.create("file", 4096).unwrap(), medium.create("other", 4096).unwrap());
    let mut turn = 0;
    recorder.meanwhile(move || {
        turn += 1;
        // A persist of its own: not within itself.
        other.write(turn, &[turn as u8]);
        turn < 3
    });
    let done = |recorder: &Recorder| {
        let mut bytes = [0; 5];
        recorder.image().read("other", 0, &mut bytes);
        bytes
    };
    region.write(0, &[9]);
    assert_eq!(done(&recorder), [0, 1, 0, 0, 0]);
    region.fence();
    assert_eq!(done(&recorder), [0, 1, 2, 0, 0]);
    region.sync().unwrap();
    assert_eq!(done(&recorder), [0, 1, 2, 3, 0]);
    region.sync().unwrap();
    assert_eq!(done(&recorder), [0, 1, 2, 3, 0]);
}

/// True if a forked child inherits the only mapping of a file in this process (flag `dc`: not copied on fork).
fn is_for_children(file: &std::path::Path) -> bool {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (_, of_file) = maps.split_once(file.to_str().unwrap()).unwrap();
    let flags = of_file.lines().find(|line| line.starts_with("VmFlags:")).unwrap();
    !flags.split_whitespace().any(|flag| flag == "dc")
}

#[test]
fn what_came_as_a_descriptor_is_not_for_children() {
    let folder = tempfile::tempdir().unwrap();
    let medium = Medium::file(folder.path()).unwrap();
    let (log, segment) = (folder.path().join("log"), folder.path().join("segment"));
    let descriptor = |name| {
        let region = medium.create(name, 1 << 20).unwrap();
        region.descriptor().unwrap().try_clone_to_owned().unwrap()
    };
    let _log = Region::from_fd(descriptor("log"), Class::File).unwrap();
    let _segment = ReadMapping::from_fd(descriptor("segment")).unwrap();
    assert!(!is_for_children(&log) && !is_for_children(&segment));
    let other = folder.path().join("other");
    let _other = medium.create("other", 1 << 20).unwrap();
    assert!(is_for_children(&other), "the flags are read");
}
