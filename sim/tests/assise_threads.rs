//! Several processes with several threads each, at the same files and folders at once, on the real clock: no data is
//! lost or torn, and no thread waits for ever. The schedules are the machine's; the simulator tries its own.

mod assise_local;

use assise_local::{Node, tiny};
use format::{InodeNumber, Name};
use libfs::{LibFs, Limits};
use sharedfs::Config;
use std::collections::BTreeSet;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use vfs::engine::{Access, At, Created, Handle, New, NewType, Removal, RenameMode, Step};
use vfs::{Caller, Engine, Error};

const BOTH: Access = Access { read: true, write: true };
const PROCESSES: usize = 3;
const THREADS: usize = 2;

/// Runs a body in each thread of each process, and passes on a panic.
fn run(node: &Arc<Node>, body: impl Fn(&LibFs, usize, usize) + Send + Sync + 'static) {
    let body = Arc::new(body);
    let limits = Limits { refill_blocks: 128, nodes: 8, entries: 4, purge_steps: 2, ..Limits::default() };
    let mut threads = Vec::new();
    for process in 0..PROCESSES {
        let libfs = Arc::new(node.attach(Caller::ROOT, limits).0);
        for thread in 0..THREADS {
            let (libfs, body) = (libfs.clone(), body.clone());
            let work = Box::new(move || body(&libfs, process, thread));
            threads.push(node.host.spawn("worker", work).expect("a thread"));
        }
    }
    threads.into_iter().for_each(|thread| thread.join().expect("no worker failed"));
    let daemon = node.daemon().expect("it runs");
    assert!(daemon.terminations().is_empty(), "an honest LibFS was cut: {:?}", daemon.terminations());
}

fn node() -> Arc<Node> {
    // The grace is long: on a busy machine a thread may be off the processor for a while.
    let config = Config { grace: std::time::Duration::from_secs(20), ..tiny() };
    let node = Node::new(config);
    node.daemon().expect("it runs").start().expect("a thread for the daemon");
    node
}

fn create(libfs: &LibFs, parent: InodeNumber, name: &[u8], exclusive: bool) -> Result<Created, Error> {
    let new = New { kind: NewType::Regular(Some(BOTH)), mode: 0o644, umask: 0, exclusive };
    libfs.create(&Caller::ROOT, parent, Name::new(name).expect("a good name"), &new)
}

/// Opens a file that exists or makes it.
fn open(libfs: &LibFs, parent: InodeNumber, name: &[u8]) -> (InodeNumber, Handle) {
    match create(libfs, parent, name, false).expect("it is made or there") {
        Created::New(attributes, handle) => (attributes.inode, handle.expect("it was asked for")),
        Created::Existing(attributes) => {
            let (handle, _) =
                libfs.open(&Caller::ROOT, attributes.inode, BOTH, false).expect("root may open it");
            (attributes.inode, handle)
        }
    }
}

const RECORD: usize = 96;

fn record(process: usize, thread: usize, number: usize) -> [u8; RECORD] {
    let mut bytes = [0; RECORD];
    bytes[..3].copy_from_slice(&[process as u8 + 1, thread as u8 + 1, number as u8]);
    bytes[3..].fill((process * 31 + thread * 7 + number) as u8);
    bytes
}

fn read_all(libfs: &LibFs, handle: Handle) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 20];
    let count = libfs.read(handle, 0, &mut [IoSliceMut::new(&mut bytes)]).expect("it can be read");
    bytes.truncate(count);
    bytes
}

fn check_records(bytes: &[u8]) -> BTreeSet<[u8; RECORD]> {
    assert!(bytes.len().is_multiple_of(RECORD), "whole records");
    let records = bytes.chunks_exact(RECORD).map(|chunk| chunk.try_into().expect("of this length"));
    let seen: BTreeSet<[u8; RECORD]> = records.collect();
    assert_eq!(seen.len() * RECORD, bytes.len(), "each record once");
    for bytes in &seen {
        let (process, thread) = (bytes[0] as usize - 1, bytes[1] as usize - 1);
        assert_eq!(*bytes, record(process, thread, bytes[2] as usize), "no record is torn");
    }
    seen
}

#[test]
fn what_many_append_is_there_once_and_whole() {
    const EACH: usize = 60;
    let node = node();
    run(&node, |libfs, process, thread| {
        let root = libfs.root().expect("there is a root").inode;
        let (_, handle) = open(libfs, root, b"log");
        for number in 0..EACH {
            let bytes = record(process, thread, number);
            // In two pieces: one write all the same.
            let pieces = [IoSlice::new(&bytes[..10]), IoSlice::new(&bytes[10..])];
            let written = libfs.write(&Caller::ROOT, handle, At::End, &pieces).expect("there is room");
            let mut own = [0; RECORD];
            let at = written.end - RECORD as u64;
            libfs.read(handle, at, &mut [IoSliceMut::new(&mut own)]).expect("it can be read");
            assert_eq!(own, bytes, "a process sees what it wrote");
            if number % 16 == 0 {
                check_records(&read_all(libfs, handle));
            }
        }
        libfs.close(handle);
    });
    let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
    let root = libfs.root().expect("there is a root").inode;
    let (_, handle) = open(&libfs, root, b"log");
    assert_eq!(check_records(&read_all(&libfs, handle)).len(), PROCESSES * THREADS * EACH);
}

/// A read of more pieces than are looked at together, beside a thread of the same process that never stops writing.
#[test]
fn a_long_read_ends_beside_a_writer() {
    const PIECES: u64 = 500;
    // Large enough for all, so that the digested data is one piece.
    let node = Node::new(Config { log_bytes: 64 << 20, log_bytes_max: 64 << 20, ..tiny() });
    let libfs = Arc::new(node.attach(Caller::ROOT, Limits { attempts: 24, ..Limits::default() }).0);
    let root = libfs.root().expect("there is a root").inode;
    let (_, handle) = open(&libfs, root, b"tail");
    let piece = |number: u64| [number as u8; RECORD];
    let write = move |libfs: &LibFs, number: u64| {
        let at = At::Offset(number * RECORD as u64);
        libfs.write(&Caller::ROOT, handle, at, &[IoSlice::new(&piece(number))]).expect("there is room")
    };
    for number in 0..=PIECES {
        write(&libfs, number);
    }
    let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (theirs, told) = (libfs.clone(), done.clone());
    let writes = Box::new(move || {
        while !told.load(std::sync::atomic::Ordering::SeqCst) {
            write(&theirs, PIECES);
        }
    });
    let thread = node.host.spawn("writes", writes).expect("a thread");
    let mut bytes = vec![0; PIECES as usize * RECORD];
    let mut reads = || {
        libfs.read(handle, 0, &mut [IoSliceMut::new(&mut bytes)])?;
        let whole = bytes.chunks_exact(RECORD).zip(0..).all(|(chunk, number)| chunk == piece(number));
        assert!(whole, "each piece is what was written");
        Ok::<_, Error>(())
    };
    let read = (0..400).try_for_each(|_| reads());
    done.store(true, std::sync::atomic::Ordering::SeqCst);
    thread.join().expect("it wrote");
    read.expect("it can be read");
}

#[test]
fn names_are_taken_by_one_and_none_is_lost() {
    const NAMES: usize = 40;
    let node = node();
    let winners = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let won = winners.clone();
    run(&node, move |libfs, process, thread| {
        let root = libfs.root().expect("there is a root").inode;
        for number in 0..NAMES {
            match create(libfs, root, format!("shared{number}").as_bytes(), true) {
                Ok(Created::New(attributes, handle)) => {
                    won.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    libfs.close(handle.expect("it was asked for"));
                    libfs.forget(&[attributes.inode]);
                }
                other => assert_eq!(other.err(), Some(Error::Exists)),
            }
            let own = format!("own{process}.{thread}.{number}");
            let (inode, handle) = open(libfs, root, own.as_bytes());
            libfs.close(handle);
            libfs.forget(&[inode]);
        }
    });
    assert_eq!(winners.load(std::sync::atomic::Ordering::SeqCst), NAMES, "one creator a name");
    let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
    let root = libfs.root().expect("there is a root").inode;
    let access = Access { read: true, write: false };
    let (handle, _) = libfs.open(&Caller::ROOT, root, access, false).expect("root may read it");
    let mut names = BTreeSet::new();
    let mut sink = |entry: vfs::engine::Entry<'_>| names.insert(entry.name.bytes().to_vec());
    libfs.readdir(handle, None, &mut sink).expect("it can be listed");
    assert_eq!(names.len(), NAMES + PROCESSES * THREADS * NAMES);
}

#[test]
fn one_file_moved_about_by_many_is_always_somewhere() {
    const MOVES: usize = 60;
    let node = node();
    let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
    let root = libfs.root().expect("there is a root").inode;
    for name in [&b"x"[..], b"y"] {
        let new = New { kind: NewType::Directory, mode: 0o755, umask: 0, exclusive: true };
        libfs.create(&Caller::ROOT, root, Name::new(name).expect("a good name"), &new).expect("it is new");
    }
    let (inode, handle) = open(&libfs, root, b"ball");
    libfs.write(&Caller::ROOT, handle, At::End, &[IoSlice::new(b"ball")]).expect("there is room");
    libfs.close(handle);
    run(&node, move |libfs, process, thread| {
        let caller = Caller::ROOT;
        let root = libfs.root().expect("there is a root").inode;
        let mut found = Vec::new();
        let name = |bytes: &'static [u8]| Name::new(bytes).expect("a good name");
        for folder in [name(b"x"), name(b"y")] {
            libfs.walk(&caller, root, &[Step::Child(folder)], &mut found).expect("it is there");
        }
        let folders = [root, found[0].inode, found[1].inode];
        let ball = name(b"ball");
        for number in 0..MOVES {
            let (from, to) = (folders[(process + number) % 3], folders[(thread + number * 2 + 1) % 3]);
            match libfs.rename(&caller, (from, ball), (to, ball), RenameMode::NoReplace { whiteout: false }) {
                Ok(()) | Err(Error::NotFound | Error::Exists) => {}
                Err(error) => panic!("a rename failed: {error}"),
            }
        }
        assert_eq!(libfs.unlink(&caller, root, name(b"nothing"), Removal::File), Err(Error::NotFound));
    });
    let mut places = 0;
    for steps in [&[&b"ball"[..]][..], &[b"x", b"ball"], &[b"y", b"ball"]] {
        let steps: Vec<_> =
            steps.iter().map(|name| Step::Child(Name::new(name).expect("a good name"))).collect();
        let mut found = Vec::new();
        if libfs.walk(&Caller::ROOT, root, &steps, &mut found).is_ok() {
            places += 1;
            let last = found.last().expect("it was found");
            assert_eq!((last.inode, last.links, last.size), (inode, 1, 4));
        }
    }
    assert_eq!(places, 1, "it is at one place");
}
