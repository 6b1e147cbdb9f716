//! One session end to end: attach, walk, leases, records, digest, reads by call, end, recovery.

use crate::client::{Client, DIRECTORY, FILE, ROOT, fresh, new_pool, open, tiny, user};
use format::call::{LEASE_READ, LEASE_WRITE, Status};
use format::record::{UNLINK_DIRECTORY, UNLINK_OPEN};
use format::session::OPEN_TABLE;
use ipc::SystemHost;
use pmem::Recorder;
use sharedfs::{Config, Daemon};
use std::sync::Arc;

#[test]
fn what_is_written_is_read_after_digest_and_after_restart() {
    let (recorder, daemon) = fresh();
    let mut one = Client::attach(&daemon, user(0));
    let root = one.write_lease(ROOT);
    let (folder, made) = one.create(ROOT, b"folder", DIRECTORY | 0o755);
    assert!(made && one.still_holds(&root));
    let (file, made) = one.create(folder, b"file", FILE | 0o644);
    let text = vec![7u8; 10_000];
    assert!(made && one.write(file, 100, &text));
    // A session knows its own undigested changes from its log; SharedFS answers from the area.
    assert_eq!(one.walk("folder").unwrap_err(), Status::NotFound);
    // But what it made itself it can ask for.
    assert_eq!(one.read_lease(file).item.size.get(), 10_100);
    assert_eq!(one.walk("folder/file").unwrap().item.size.get(), 10_100);
    assert_eq!(one.read(file, 90, 20).unwrap(), [vec![0; 10], vec![7; 10]].concat());
    assert_eq!(one.entries(ROOT).unwrap(), [(b"folder".to_vec(), folder)]);
    assert_eq!(one.walk("folder/none").unwrap_err(), Status::NotFound);
    assert_eq!(one.walk("folder/file/x").unwrap_err(), Status::NotDirectory);
    assert!(one.write(file, 0, b"later"));
    daemon.end(one.session);
    assert!(!one.write(file, 0, b"too late"), "the log is sealed");
    assert_eq!(one.digest(true), Err(Status::Sealed));
    drop((one, daemon));
    let (daemon, recovered) = open(&recorder.medium());
    assert_eq!(recovered.logs, []);
    let two = Client::attach(&daemon, user(0));
    let found = two.walk("folder/file").unwrap();
    assert_eq!((found.inode, found.item.size.get()), (file, 10_100));
    assert_eq!(two.read(file, 0, 6).unwrap(), b"later\0");
}

/// A write that was judged says nothing of the next one if the mode changes between them: the set-id bits go.
#[test]
fn a_write_behind_a_change_of_mode_is_judged_again() {
    let (_, daemon) = fresh();
    let mut root = Client::attach(&daemon, user(0));
    root.write_lease(ROOT);
    let (folder, made) = root.create(ROOT, b"folder", DIRECTORY | 0o777);
    assert!(made);
    root.digest(true).unwrap();
    let mut alice = Client::attach_as(&daemon, user(5), 2);
    alice.walk("folder").unwrap();
    alice.write_lease(folder);
    let (file, made) = alice.create(folder, b"file", FILE | 0o755);
    assert!(made && alice.write(file, 0, b"one") && alice.write(file, 3, b"two"));
    assert!(alice.set_mode(file, 0o4755) && alice.write(file, 6, b"three"));
    alice.digest(true).unwrap();
    let found = alice.walk("folder/file").unwrap().item;
    assert_eq!((found.size.get(), found.mode.get()), (11, FILE | 0o755));
}

#[test]
fn a_killed_daemon_finds_every_committed_record() {
    let (recorder, daemon) = fresh();
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    for index in 0..40u32 {
        let name = index.to_string();
        let (file, made) = one.create(ROOT, name.as_bytes(), FILE | 0o644);
        assert!(made && one.write(file, 0, name.as_bytes()));
    }
    let last = one.pages.commit().load();
    let image = recorder.image();
    let restarted = pmem::Recorder::of_image(image);
    let (daemon, recovered) = open(&restarted.medium());
    assert_eq!(recovered.logs, [(one.attached.welcome.log, last)]);
    assert_eq!(recovered.cuts, []);
    let two = Client::attach(&daemon, user(0));
    assert_eq!(two.walk("39").unwrap().item.size.get(), 2);
    two.read_lease(ROOT);
    assert_eq!(two.entries(ROOT).unwrap().len(), 40);
    let logs: Vec<_> = restarted.medium().list().unwrap();
    assert_eq!(logs.iter().filter(|name| name.starts_with("log-")).count(), 1, "{logs:?}");
}

#[test]
fn a_log_is_used_round_after_round_and_grows() {
    let (_recorder, daemon) = fresh();
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let (file, made) = one.create(ROOT, b"file", FILE | 0o644);
    assert!(made);
    for round in 0..60u64 {
        assert!(one.write(file, round * 5_000, &[round as u8; 5_000]), "round {round}");
    }
    one.digest(true).unwrap();
    assert_eq!(one.walk("file").unwrap().item.size.get(), 300_000);
    for round in 0..60u64 {
        assert_eq!(one.read(file, round * 5_000, 5_000).unwrap(), [round as u8; 5_000]);
    }
}

#[test]
fn removed_means_gone_and_open_means_kept() {
    let (_recorder, daemon) = fresh();
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let (folder, _) = one.create(ROOT, b"folder", DIRECTORY | 0o755);
    let (kept, _) = one.create(folder, b"kept", FILE | 0o644);
    let (gone, _) = one.create(folder, b"gone", FILE | 0o644);
    assert!(one.write(kept, 0, b"still here"));
    one.open(kept, 1, LEASE_WRITE).unwrap();
    assert!(one.unlink(folder, b"kept", kept, 0) && one.unlink(folder, b"gone", gone, 0));
    assert!(one.unlink(ROOT, b"folder", folder, UNLINK_DIRECTORY));
    one.digest(true).unwrap();
    assert_eq!(one.walk("folder").unwrap_err(), Status::NotFound);
    assert_eq!(one.read(kept, 0, 100).unwrap(), b"still here");
    assert_eq!(one.read(gone, 0, 100), Err(Status::NotFound));
    let inodes = daemon.usage().inodes;
    one.close(kept, 0);
    daemon.tidy();
    assert_eq!(daemon.usage().inodes, inodes - 1);
    assert_eq!(one.read(kept, 0, 100), Err(Status::NotFound));
    assert_eq!(one.lease(&[(kept, LEASE_READ)]).map(|_| ()), Err(Status::NotFound));
    assert!(daemon.terminations().is_empty());
}

/// A process removes the name of a file that it has open and goes on writing to it; the daemon dies before any of
/// that is digested. Every later record counts, and the file is gone.
#[test]
fn records_after_one_to_a_file_without_a_name_are_not_lost() {
    let (recorder, daemon) = fresh();
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let (file, _) = one.create(ROOT, b"file", FILE | 0o644);
    assert!(one.unlink(ROOT, b"file", file, UNLINK_OPEN) && one.write(file, 0, &[1; 5_000]));
    let (_, made) = one.create(ROOT, b"later", FILE | 0o644);
    assert!(made);
    let restarted = pmem::Recorder::of_image(recorder.image());
    let (daemon, recovered) = open(&restarted.medium());
    assert_eq!((recovered.cuts, recovered.orphans), (vec![], 1));
    let two = Client::attach(&daemon, user(0));
    assert!(two.walk("later").is_ok());
    assert_eq!(daemon.usage().inodes, 2);
}

/// A session has no more references than `references_max`; one that it releases makes place for another.
#[test]
fn a_session_has_a_limited_number_of_references() {
    let (_recorder, daemon) = fresh();
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let files: Vec<_> = (0..=tiny().references_max)
        .map(|number| one.create(ROOT, number.to_string().as_bytes(), FILE | 0o644).0)
        .collect();
    one.digest(true).unwrap();
    let (last, others) = files.split_last().unwrap();
    for file in others {
        one.open(*file, 1, LEASE_READ).unwrap();
    }
    assert_eq!(one.open(*last, 1, LEASE_READ).map(|_| ()), Err(Status::Limit));
    one.open(others[0], 2, LEASE_READ).expect("another right to a file that is open");
    one.close(others[0], 0);
    one.open(*last, 1, LEASE_READ).unwrap();
    assert_eq!(daemon.references(), others.len());
    assert!(daemon.terminations().is_empty());
}

/// More files without a name than the open table has places, and than `references_max`: all of them are kept.
#[test]
fn open_files_without_a_name_are_kept_however_many() {
    let recorder = Recorder::new();
    new_pool(&recorder.medium());
    let config = Config { own_range: 10_000, ..tiny() };
    let daemon = Arc::new(Daemon::open(Arc::new(SystemHost), &recorder.medium(), config).unwrap().0);
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let files: Vec<_> = (0..OPEN_TABLE + 20)
        .map(|_| {
            let (file, made) = one.create_unnamed(ROOT);
            assert!(made);
            file
        })
        .collect();
    one.digest(true).unwrap();
    daemon.tidy();
    for file in [files[0], files[files.len() - 1]] {
        assert!(one.write(file, 0, b"kept"));
        one.digest(true).unwrap();
        assert_eq!(one.read(file, 0, 4).unwrap(), b"kept");
    }
}

/// An operator lowers the limit of logs while one of an earlier daemon has records.
#[test]
fn a_lower_limit_of_logs_loses_no_record() {
    let recorder = Recorder::new();
    new_pool(&recorder.medium());
    let daemon = open(&recorder.medium()).0;
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let (file, _) = one.create(ROOT, b"file", FILE | 0o644);
    assert!(one.write(file, 0, b"synced"));
    drop((one, daemon));
    let config = Config { log_bytes_max: tiny().log_bytes, ..tiny() };
    let daemon = Arc::new(Daemon::open(Arc::new(SystemHost), &recorder.medium(), config).unwrap().0);
    let other = Client::attach(&daemon, user(0));
    let file = other.walk("file").unwrap().inode;
    assert_eq!(other.read(file, 0, 100).unwrap(), b"synced");
}
