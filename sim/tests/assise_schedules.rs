//! Two processes with two threads each append to one file and move names about, under many schedules: the real LibFS
//! and SharedFS, switched wherever they touch a shared word. A lease that ends between the check of it and the record
//! made under it is rare in the machine's own schedules, and happens here in every other seed.
//!
//! `HEARTH_SEEDS` multiplies the number of seeds.

mod assise_local;

use assise_local::{Node, tiny};
use format::{InodeNumber, Name};
use ipc::Host;
use libfs::{LibFs, Limits};
use pmem::Medium;
use sharedfs::Config;
use sim::{SimHost, Simulation};
use std::collections::BTreeSet;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vfs::engine::{Access, At, Created, Handle, New, NewType, RenameMode};
use vfs::{Caller, Engine, Error};

const EACH: usize = 4;
const RECORD: usize = 32;
/// Renames of each process.
const CROSSINGS: usize = 20;

fn record(process: usize, thread: usize, number: usize) -> [u8; RECORD] {
    let mut bytes = [(process * 16 + thread * 4 + number) as u8; RECORD];
    bytes[..3].copy_from_slice(&[process as u8, thread as u8, number as u8]);
    bytes
}

fn open(libfs: &LibFs, parent: InodeNumber, name: &[u8]) -> Handle {
    let access = Access { read: true, write: true };
    let new = New { kind: NewType::Regular(Some(access)), mode: 0o644, umask: 0, exclusive: false };
    let name = Name::new(name).expect("a good name");
    match libfs.create(&Caller::ROOT, parent, name, &new).expect("it is made or there") {
        Created::New(_, handle) => handle.expect("it was asked for"),
        Created::Existing(found) => {
            libfs.open(&Caller::ROOT, found.inode, access, false).expect("root may open it").0
        }
    }
}

/// One thread of a process.
fn work(libfs: &LibFs, process: usize, thread: usize) {
    let root = libfs.root().expect("there is a root").inode;
    let handle = open(libfs, root, b"log");
    let names = [&b"one"[..], b"two"].map(|name| Name::new(name).expect("a good name"));
    for number in 0..EACH {
        let bytes = record(process, thread, number);
        let written = libfs.write(&Caller::ROOT, handle, At::End, &[IoSlice::new(&bytes)]);
        let mut own = [0; RECORD];
        let at = written.expect("there is room").end - RECORD as u64;
        assert_eq!(libfs.read(handle, at, &mut [IoSliceMut::new(&mut own)]), Ok(RECORD));
        assert_eq!(own, bytes, "a process sees what it wrote");
        let (from, to) = (names[number % 2], names[(number + thread + 1) % 2]);
        match libfs.rename(&Caller::ROOT, (root, from), (root, to), RenameMode::NoReplace { whiteout: false })
        {
            Ok(()) | Err(Error::NotFound | Error::Exists) => {}
            Err(error) => panic!("a rename failed: {error}"),
        }
    }
    libfs.close(handle);
}

fn check(node: &Arc<Node>, host: Arc<SimHost>) {
    let daemon = node.daemon().expect("it runs");
    assert!(daemon.terminations().is_empty(), "an honest LibFS was cut: {:?}", daemon.terminations());
    let (libfs, _) = node.attach_on(host, Caller::ROOT, Limits::default());
    let root = libfs.root().expect("there is a root").inode;
    let handle = open(&libfs, root, b"log");
    let mut bytes = vec![0; 1 << 16];
    let count = libfs.read(handle, 0, &mut [IoSliceMut::new(&mut bytes)]).expect("it can be read");
    let seen: BTreeSet<&[u8]> = bytes[..count].chunks(RECORD).collect();
    assert_eq!((count, seen.len()), (4 * EACH * RECORD, 4 * EACH), "each record once and whole");
    let mut names = 0;
    let access = Access { read: true, write: false };
    let (handle, _) = libfs.open(&Caller::ROOT, root, access, false).expect("root may read it");
    let mut sink = |entry: vfs::engine::Entry<'_>| {
        names += usize::from(entry.name.bytes() != b"log");
        true
    };
    libfs.readdir(handle, None, &mut sink).expect("it can be listed");
    assert_eq!(names, 1, "what is moved about is at one place");
}

/// Runs two processes beside a daemon: a body, given the node and both, which joins all that it begins.
fn simulate(
    seed: u64,
    limits: sim::Limits,
    body: impl FnOnce(&Arc<Node>, Arc<SimHost>, [Arc<SimHost>; 2]) + Send + 'static,
) {
    let simulation = Simulation::new(seed, limits);
    let outside = simulation.process("daemon");
    let processes = [simulation.process("first"), simulation.process("second")];
    let host = outside.clone();
    let good = Arc::new(AtomicBool::new(false));
    let theirs = good.clone();
    let main = move || {
        let folder = assise_local::folder();
        let medium = Medium::memory(folder.path()).expect("the folder is there");
        // A grant stays long enough for one operation, or no process would make progress.
        let hold_min = Config::default().hold_min;
        let config = Config { grace: std::time::Duration::from_secs(3600), hold_min, ..tiny() };
        let node = Node::on(host.clone(), medium, config, Some(folder));
        body(&node, host, processes);
        theirs.store(true, Ordering::SeqCst);
    };
    drop(outside.spawn("main", Box::new(main)).expect("a thread"));
    if let Err(stuck) = simulation.run() {
        panic!("seed {seed}: {stuck}");
    }
    assert!(good.load(Ordering::SeqCst), "seed {seed} ended by the panic above");
}

fn schedule(seed: u64) {
    simulate(seed, sim::Limits::default(), |node, host, processes| {
        let (libfs, _) = node.attach_on(host.clone(), Caller::ROOT, Limits::default());
        let root = libfs.root().expect("there is a root").inode;
        libfs.close(open(&libfs, root, b"one"));
        let mut threads = Vec::new();
        for (number, process) in processes.iter().enumerate() {
            let libfs = node.attach_on(process.clone(), Caller::ROOT, Limits::default()).0;
            let libfs = Arc::new(libfs);
            for thread in 0..2 {
                let libfs = libfs.clone();
                let body = Box::new(move || work(&libfs, number, thread));
                threads.push(process.spawn("worker", body).expect("a thread"));
            }
        }
        threads.into_iter().for_each(|thread| thread.join().expect("no worker failed"));
        check(node, host);
    });
}

/// A folder in the root, which is made if it is not there.
fn folder(libfs: &LibFs, name: &[u8]) -> InodeNumber {
    let root = libfs.root().expect("there is a root").inode;
    let new = New { kind: NewType::Directory, mode: 0o755, umask: 0, exclusive: false };
    let made = libfs.create(&Caller::ROOT, root, Name::new(name).expect("a good name"), &new);
    match made.expect("it is made or there") {
        Created::New(attributes, _) | Created::Existing(attributes) => attributes.inode,
    }
}

/// Moves a file of its own, and then a folder, to and fro between two folders, which the other process does the other
/// way round. A move of a folder needs a third lease, that of all moves of folders.
fn cross(libfs: &LibFs, process: usize) {
    let mut folders = [folder(libfs, b"left"), folder(libfs, b"right")];
    folders.rotate_left(process);
    let names = [[&b"mine"[..], b"my folder"], [b"theirs", b"their folder"]][process];
    let [file, moved] = names.map(|name| Name::new(name).expect("a good name"));
    libfs.close(open(libfs, folders[0], file.bytes()));
    let new = New { kind: NewType::Directory, mode: 0o755, umask: 0, exclusive: true };
    libfs.create(&Caller::ROOT, folders[0], moved, &new).expect("it is new");
    for name in [file, moved] {
        for _ in 0..CROSSINGS {
            let [from, to] = folders;
            let renamed = libfs.rename(
                &Caller::ROOT,
                (from, name),
                (to, name),
                RenameMode::Replace { whiteout: false },
            );
            assert_eq!(renamed, Ok(()), "what nobody else touches can be moved");
            folders.reverse();
        }
    }
}

/// Two processes that want the same two leases, on a machine so slow that both may always be taken back: a process that
/// requested only the lease that it lacks would lose the one that it has, and exchange it with the other process
/// without end.
fn crossing(seed: u64) {
    let slow = sim::Limits { step_ns_max: 4_000, ..sim::Limits::default() };
    simulate(seed, slow, |node, _, processes| {
        let mut threads = Vec::new();
        for (number, process) in processes.iter().enumerate() {
            let libfs = node.attach_on(process.clone(), Caller::ROOT, Limits::default()).0;
            let body = Box::new(move || cross(&libfs, number));
            threads.push(process.spawn("worker", body).expect("a thread"));
        }
        threads.into_iter().for_each(|thread| thread.join().expect("no worker failed"));
    });
}

#[test]
fn what_many_append_is_whole_under_every_schedule() {
    let times: u64 = std::env::var("HEARTH_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    (0..20 * times).for_each(schedule);
}

#[test]
fn who_wants_the_same_two_folders_gets_both_at_once() {
    let times: u64 = std::env::var("HEARTH_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    (0..20 * times).for_each(crossing);
}
