//! A ledger of which the medium damaged a bit, when a daemon died that had digested nothing: all is there, or `check` said
//! before that it would not be, and recovery says so, and keeps the log that it could not judge.

use crate::client::{Client, DIRECTORY, FILE, ROOT, new_pool, tiny, user};
use ipc::SystemHost;
use pmem::Medium;
use sharedfs::{Daemon, RING_START, Recovered, log_file};
use std::fs;
use std::path::Path;
use std::sync::Arc;

fn open(folder: &Path) -> (Arc<Daemon>, Recovered) {
    let medium = Medium::file(folder).unwrap();
    let (daemon, recovered) = Daemon::open(Arc::new(SystemHost), &medium, tiny()).unwrap();
    (Arc::new(daemon), recovered)
}

fn check(folder: &Path) -> Vec<String> {
    sharedfs::check(&Medium::file(folder).unwrap()).unwrap()
}

/// A pool whose daemon died, with files in two directories that only a log knows; gives that log's name.
fn left_by_a_daemon(folder: &Path) -> String {
    new_pool(&Medium::file(folder).unwrap());
    let daemon = open(folder).0;
    let mut maker = Client::attach(&daemon, user(0));
    maker.write_lease(ROOT);
    let (inside, made) = maker.create(ROOT, b"inside", DIRECTORY | 0o755);
    assert!(made);
    daemon.end(maker.session);
    let mut client = Client::attach(&daemon, user(0));
    client.walk("inside").unwrap();
    for directory in [ROOT, inside] {
        client.write_lease(directory);
        for name in [b"1", b"2", b"3"] {
            let (file, made) = client.create(directory, name, FILE | 0o644);
            assert!(made && client.write(file, 0, b"kept"));
        }
    }
    log_file(client.attached.welcome.log, client.attached.welcome.incarnation)
}

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

fn all_there(daemon: &Arc<Daemon>) -> bool {
    let client = Client::attach(daemon, user(0));
    let there = |name: &&str| {
        let file = client.walk(name);
        file.is_ok_and(|file| client.read(file.inode, 0, 10).is_ok_and(|bytes| bytes == b"kept"))
    };
    ["1", "2", "3", "inside/1", "inside/2", "inside/3"].iter().all(there)
}

#[test]
fn a_damaged_ledger_loses_nothing_silently() {
    let whole = tempfile::tempdir_in("/dev/shm").unwrap();
    let log = left_by_a_daemon(whole.path());
    assert_eq!(check(whole.path()), [] as [String; 0]);
    let ledger = fs::read(whole.path().join("ledger")).unwrap();
    let written = ledger.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    let (mut behind, mut lost) = (0, 0);
    for at in RING_START as usize..written {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        copy(whole.path(), folder.path());
        let mut bytes = ledger.clone();
        bytes[at] ^= 1 << (at % 8);
        fs::write(folder.path().join("ledger"), &bytes).unwrap();
        let found = check(folder.path());
        let (daemon, recovered) = open(folder.path());
        if all_there(&daemon) {
            assert_eq!(recovered.kept, None, "byte {at}");
            continue;
        }
        lost += 1;
        assert!(found.len() == 1 && found[0].contains("ledger"), "byte {at}: {found:?}");
        behind += u64::from(found[0].contains("behind"));
        let (_, names) = recovered.kept.clone().unwrap_or_else(|| panic!("byte {at}: {recovered:?}"));
        let same = |name: &String, file: &str| {
            let kept = fs::read(folder.path().join(name)).unwrap();
            name.ends_with(file) && kept == fs::read(whole.path().join(file)).unwrap()
        };
        assert!(names.iter().any(|name| same(name, &log)), "byte {at}: {names:?}");
        assert!(names.iter().any(|name| name.ends_with("ledger")), "byte {at}: {names:?}");
        // Later starts leave it where it is, and say nothing of it again.
        drop(daemon);
        assert_eq!((open(folder.path()).1.kept, check(folder.path()).len()), (None, 0), "byte {at}");
        assert!(names.iter().all(|name| folder.path().join(name).exists()), "byte {at}");
    }
    assert!(behind > 100 && lost > behind, "{lost} lost something, {behind} had an entry behind");
}

/// A log that is damaged where it is not the last: `check` says what recovery will say.
#[test]
fn a_damaged_log_is_found_by_check() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let log = left_by_a_daemon(folder.path());
    let path = folder.path().join(&log);
    let mut bytes = fs::read(&path).unwrap();
    bytes[RING_START as usize + 70] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let found = check(folder.path());
    assert!(found.len() == 1 && found[0].contains(&log), "{found:?}");
    let (daemon, recovered) = open(folder.path());
    assert_eq!((recovered.damaged.len(), recovered.kept), (1, None));
    drop(daemon);
    assert_eq!(check(folder.path()), [] as [String; 0]);
}

/// Records that were not digested are lost with the file of their log, or with a part of it: `check` and recovery say so.
#[test]
fn a_log_whose_file_is_gone_or_another_one_is_found() {
    type Damage = fn(&Path, u64);
    fn set_len(path: &Path, bytes: u64) {
        fs::File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
    }
    let damages: [(&str, Damage); 5] = [
        ("removed", |path, _| fs::remove_file(path).unwrap()),
        ("emptied", |path, _| set_len(path, 0)),
        ("emptied, and as long as before", |path, bytes| {
            set_len(path, 0);
            set_len(path, bytes);
        }),
        ("cut to nearly nothing", |path, _| set_len(path, RING_START + 64)),
        ("cut behind its records", |path, bytes| set_len(path, bytes - 4096)),
    ];
    for (name, damage) in damages {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let log = left_by_a_daemon(folder.path());
        let path = folder.path().join(&log);
        damage(&path, path.metadata().unwrap().len());
        let found = check(folder.path());
        assert!(found.len() == 1 && found[0].contains(&log), "{name}: {found:?}");
        let (daemon, recovered) = open(folder.path());
        assert_eq!((recovered.damaged.len(), recovered.incomplete.len()), (0, 1), "{name}");
        assert_eq!(all_there(&daemon), name == "cut behind its records", "{name}");
        drop(daemon);
        assert_eq!(check(folder.path()), [] as [String; 0], "{name}");
        assert_eq!(open(folder.path()).1.incomplete, [], "{name}");
    }
    // Nothing is lost with what was appended.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join(left_by_a_daemon(folder.path()));
    set_len(&path, 1 << 40);
    assert_eq!(check(folder.path()), [] as [String; 0]);
    let (daemon, recovered) = open(folder.path());
    assert!(recovered.incomplete.is_empty() && all_there(&daemon));
}

/// An older copy of the tree lacks what was digested since, and the log was written over, or is closed: `check` says what
/// recovery will say.
#[test]
fn an_older_tree_is_found_by_check() {
    for closes in [false, true] {
        let (folder, older) =
            (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
        new_pool(&Medium::file(folder.path()).unwrap());
        let daemon = open(folder.path()).0;
        let mut client = Client::attach(&daemon, user(0));
        client.write_lease(ROOT);
        let mut make = |names: std::ops::Range<u32>| {
            for number in names {
                assert!(client.create(ROOT, format!("{number:0200}").as_bytes(), FILE | 0o644).1);
            }
            client.digest(true).unwrap();
        };
        make(0..10);
        fs::copy(folder.path().join("tree"), older.path().join("tree")).unwrap();
        (1..=10).for_each(|round| make(round * 100..round * 100 + 50));
        if closes {
            daemon.end(client.session);
        }
        drop((client, daemon));
        assert_eq!(check(folder.path()), [] as [String; 0]);
        fs::copy(older.path().join("tree"), folder.path().join("tree")).unwrap();
        let found = check(folder.path());
        let said = if closes { "the ledger names those up to" } else { "the record after 10 is damaged" };
        assert!(found.len() == 1 && found[0].contains(said), "{found:?}");
        assert_eq!(open(folder.path()).1.damaged.len(), 1);
    }
}

/// A machine that dies right after a log was closed leaves the log's file, and perhaps an entry that was not finished: that is
/// no damage.
#[test]
fn a_closed_log_whose_file_is_still_there_is_no_damage() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    new_pool(&Medium::file(folder.path()).unwrap());
    let daemon = open(folder.path()).0;
    let mut maker = Client::attach(&daemon, user(0));
    maker.write_lease(ROOT);
    assert!(maker.create(ROOT, b"made", FILE | 0o644).1);
    let path = folder.path().join(log_file(maker.attached.welcome.log, maker.attached.welcome.incarnation));
    let log = fs::read(&path).unwrap();
    daemon.end(maker.session);
    assert!(!path.exists());
    drop(Client::attach(&daemon, user(0)));
    drop((maker, daemon));
    fs::write(&path, log).unwrap();
    let mut ledger = fs::read(folder.path().join("ledger")).unwrap();
    let last = ledger.iter().rposition(|byte| *byte != 0).unwrap();
    ledger[last] ^= 1;
    fs::write(folder.path().join("ledger"), ledger).unwrap();
    assert_eq!(check(folder.path()), [] as [String; 0]);
    let (daemon, recovered) = open(folder.path());
    assert_eq!(recovered.kept, None);
    assert!(!path.exists() && Client::attach(&daemon, user(0)).walk("made").is_ok());
}
