//! Pool files that are cut under the daemon: a log by the process that it belongs to, at any time and to any length;
//! a segment, the ledger, the register or the tree by somebody who may, between two daemons and under one that works.
//! A log and a register that are cut stop nobody; of another file the daemon says which it is, if it does not go on. The
//! process that it is in is this test's.

use crate::client::{Client, DIRECTORY, FILE, ROOT, new_pool, tiny, user};
use crate::rounds::rounds;
use crate::support::Draws;
use format::InodeNumber;
use format::call::LEASE_WRITE;
use ipc::SystemHost;
use ipc::host::Host;
use ipc::sync::{Ordering, Word};
use pmem::Medium;
use sharedfs::{Daemon, log_file};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

const ALICE: u32 = 1000;
const BOB: u32 = 1001;
const CAROL: u32 = 1002;

fn open(folder: &Path) -> Result<Arc<Daemon>, String> {
    let medium = Medium::file(folder).map_err(|error| error.to_string())?;
    let opened = Daemon::open(Arc::new(SystemHost), &medium, tiny()).map_err(|error| error.to_string())?;
    Ok(Arc::new(opened.0))
}

fn cut(path: &Path, bytes: u64) {
    File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

/// A length that leaves something out, or adds, up to more than can be mapped.
fn length(draws: &mut Draws, bytes: u64) -> u64 {
    match draws.below(8) {
        6 => 1 << 40,
        7 => 1 << 62,
        0 => 0,
        1 => 1 + draws.below(4096),
        2 => bytes / 2 / 4096 * 4096,
        3 => bytes + draws.below(100_000),
        _ => draws.below(bytes + 1),
    }
}

/// A pool with a file of Alice's, and a session of Bob's that has written something.
fn scene(folder: &Path, draws: &mut Draws) -> (Arc<Daemon>, Client) {
    new_pool(&Medium::file(folder).unwrap());
    let daemon = open(folder).unwrap();
    let mut root = Client::attach(&daemon, user(0));
    root.write_lease(ROOT);
    let (common, file) = (root.new_inode(), root.new_inode());
    assert!(root.create_as(common, ROOT, b"common", DIRECTORY | 0o777, 0));
    assert!(root.create_as(file, ROOT, b"hers", FILE | 0o600, ALICE) && root.write(file, 0, &[7; 9000]));
    daemon.end(root.session);
    let mut bob = Client::attach_as(&daemon, user(BOB), 2);
    bob.walk("common").unwrap();
    bob.write_lease(common);
    for number in 0..draws.below(8) as u8 {
        let (file, made) = bob.create(common, &[b'b', b'a' + number], FILE | 0o644);
        assert!(made && bob.write(file, 0, &vec![number; draws.below(3000) as usize]));
        if draws.chance(20) {
            bob.digest(true).unwrap();
        }
    }
    (daemon, bob)
}

fn alice_is_as_before(daemon: &Arc<Daemon>) {
    let alice = Client::attach_as(daemon, user(ALICE), 1);
    let file = alice.walk("hers").unwrap().inode;
    assert_eq!(alice.read(file, 0, 10_000).unwrap(), [7; 9000]);
    daemon.end(alice.session);
}

fn log_round(draws: &mut Draws) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let (daemon, bob) = scene(folder.path(), draws);
    let welcome = &bob.attached.welcome;
    let path = folder.path().join(log_file(welcome.log, welcome.incarnation));
    for _ in 0..1 + draws.below(3) {
        if !path.exists() {
            // Its session was ended, and the log with it.
            break;
        }
        cut(&path, length(draws, bob.attached.log.bytes()));
        match draws.below(4) {
            0 => drop(bob.digest(true)),
            // Its lease is taken away.
            1 => drop(Client::attach_as(&daemon, user(ALICE), 1).walk("common/ba")),
            2 => alice_is_as_before(&daemon),
            _ => {}
        }
    }
    if draws.chance(50) {
        daemon.end(bob.session);
        alice_is_as_before(&daemon);
    }
    // A client keeps the daemon: both go, in whatever state the log is.
    drop((bob, daemon));
    let daemon = open(folder.path()).unwrap();
    alice_is_as_before(&daemon);
    drop(daemon);
    crate::support::findings(&Medium::file(folder.path()).unwrap()).unwrap();
}

#[test]
fn a_log_may_be_cut_at_any_time() {
    rounds("cut logs", 12, log_round);
}

/// A log of a length that no log was made with damages only its user's data, and that is told: the pool opens, other users'
/// files are unchanged, and the digested records of its user stay. Of a longer one nothing is lost.
#[test]
fn a_log_of_any_length_stops_no_start() {
    for bytes in [0, 1, 4096, (256 << 10) + 1, 16 << 40, 1 << 62] {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let (daemon, mut bob) = scene(folder.path(), &mut Draws(3));
        let before = bob.walk("common").unwrap();
        let file = bob.create(before.inode, b"digested", FILE | 0o644).0;
        assert!(bob.write(file, 0, &[9; 100]));
        bob.digest(true).unwrap();
        assert!(bob.write(file, 0, &[8; 50]));
        let (welcome, made_with) = (&bob.attached.welcome, bob.attached.log.bytes());
        cut(&folder.path().join(log_file(welcome.log, welcome.incarnation)), bytes);
        let log = welcome.log;
        drop((bob, daemon));
        let medium = Medium::file(folder.path()).unwrap();
        let (daemon, recovered) = Daemon::open(Arc::new(SystemHost), &medium, tiny()).unwrap();
        let incomplete: Vec<_> = recovered.incomplete.iter().map(|(log, _)| *log).collect();
        assert_eq!(incomplete, if bytes < made_with { vec![log] } else { vec![] }, "{bytes}");
        let daemon = Arc::new(daemon);
        alice_is_as_before(&daemon);
        let bob = Client::attach_as(&daemon, user(BOB), 2);
        let file = bob.walk("common/digested").unwrap().inode;
        let half = if bytes < made_with { 9 } else { 8 };
        assert_eq!(bob.read(file, 0, 200).unwrap(), [[half; 50], [9; 50]].concat());
    }
}

fn pool_round(draws: &mut Draws) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let (daemon, bob) = scene(folder.path(), draws);
    drop((bob, daemon));
    let mut files: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let path = draws.of(&files);
    let bytes = path.metadata().unwrap().len();
    let left = length(draws, bytes);
    cut(path, left);
    let name = path.file_name().unwrap().to_str().unwrap();
    opens_or_names_the_file(folder.path(), name, left);
}

/// Everything is as it was, but what stood in a log alone; or an error that says which file is not.
fn opens_or_names_the_file(folder: &Path, name: &str, left: u64) {
    let cut = format!("{name} cut to {left}");
    let stops_nobody = ["log-", "register-", "lock"].iter().any(|kind| name.starts_with(kind));
    match open(folder) {
        Err(error) => assert!(!stops_nobody && error.contains(name), "{cut}: {error}"),
        Ok(daemon) if stops_nobody => alice_is_as_before(&daemon),
        Ok(daemon) => reads_right_or_not_at_all(&daemon, &cut),
    }
    let _ = area::check::check(&Medium::file(folder).unwrap());
}

fn reads_right_or_not_at_all(daemon: &Arc<Daemon>, cut: &str) {
    let Ok(alice) = Client::try_attach_as(daemon, user(ALICE), 1) else { return };
    let read = alice.walk("hers").and_then(|file| alice.read(file.inode, 0, 10_000));
    assert!(read.is_err() || read.unwrap() == [7; 9000], "{cut}: other bytes");
    daemon.end(alice.session);
}

/// Works on in a thread of its own, as an honest LibFS, until it is refused or told to end.
fn write_on(mut client: Client, common: InodeNumber, end: Arc<Word>) -> Box<dyn ipc::host::Join> {
    let body = move || {
        let mut number = 0u32;
        // Acquire: nothing is published with it.
        while end.load(Ordering::Acquire) == 0 {
            let Ok(held) = client.lease(&[(common, LEASE_WRITE)]) else { return };
            let name = format!("{}-{number}", client.session);
            client.under(&held, |client| {
                let (file, made) = client.create(common, name.as_bytes(), FILE | 0o600);
                made && client.write(file, 0, &[number as u8; 3000])
            });
            number += 1;
            if number.is_multiple_of(4) && client.digest(true).is_err() {
                return;
            }
        }
    };
    SystemHost.spawn("writer", Box::new(body)).unwrap()
}

/// A file of the pool, of each kind, is cut while sessions write. The daemon goes on, if it never meets the hole, or it
/// stops and says which file it lost; nothing that it answers is a zero page's.
fn live_round(draws: &mut Draws) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let (daemon, bob) = scene(folder.path(), draws);
    daemon.start().unwrap();
    let common = bob.walk("common").unwrap().inode;
    let carol = Client::attach_as(&daemon, user(CAROL), 4);
    carol.walk("common").unwrap();
    let end = Arc::new(Word::new(0));
    let writers = [bob, carol].map(|client| write_on(client, common, end.clone()));
    for _ in 0..draws.below(20) {
        alice_is_as_before(&daemon);
    }
    let kind = *draws.of(&["tree", "ledger", "register-", "segment-", "log-"]);
    let mut files = Medium::file(folder.path()).unwrap().list().unwrap();
    // There is no segment before the first digest, and no log without a session.
    let there = files.iter().any(|name| name.starts_with(kind));
    files.retain(|name| !there || name.starts_with(kind));
    let name = draws.of(&files);
    let path = folder.path().join(name);
    let left = length(draws, path.metadata().map_or(0, |found| found.len()));
    let said = format!("{name} cut to {left}");
    // A log may be gone with its session meanwhile.
    if path.exists() {
        cut(&path, left);
    }
    for _ in 0..1 + draws.below(10) {
        reads_right_or_not_at_all(&daemon, &said);
    }
    // An entry in the ledger, and a commit.
    if let Ok(attached) = daemon.attach(user(0), 5) {
        daemon.end(attached.welcome.session.get());
    }
    end.store(1, Ordering::Release);
    for writer in writers {
        assert!(writer.join().is_ok(), "{said}");
    }
    let lost = daemon.lost();
    if let Some(lost) = &lost {
        assert_eq!(lost, name, "{said}");
        assert!(daemon.failure().unwrap().contains(name.as_str()), "{said}");
        assert!(daemon.attach(user(0), 6).is_err(), "{said}");
    }
    assert!(!name.starts_with("log-") || lost.is_none(), "{said}: a log is its user's to cut");
    let surely = left == 0 && (name == "tree" || name == "ledger");
    assert!(!surely || lost.is_some(), "{said}: a commit, and an entry, were taken for written");
    daemon.stop();
    drop(daemon);
    opens_or_names_the_file(folder.path(), name, left);
}

#[test]
fn a_daemon_says_what_was_cut_of_its_pool() {
    rounds("cut pools", 30, |draws| {
        pool_round(draws);
        live_round(draws);
    });
}
