//! More inodes than a session has lease words: leases go back before they run out, those of inodes that are open or that a
//! kernel holds on to as well, and no operation fails for it.

mod assise_local;

use assise_local::trees::{at, process, whole_tree};
use assise_local::{Local, Node, tiny};
use format::call::{CallKind, Status};
use format::{InodeNumber, Name, SegmentId};
use ipc::sync::Ordering;
use ipc::{Host, SystemHost, Word};
use libfs::{Attachment, Connector, Error, LibFs, Limits, Link};
use pmem::ReadMapping;
use sharedfs::Config;
use std::io::IoSliceMut;
use std::sync::Arc;
use vfs::conformance::{Actor, Answer, Call, Player};
use vfs::engine::{Access, Step};
use vfs::{CacheLeases, Caller, Engine, Recalled};

const FOLDERS: usize = 5;
const FILES: usize = 60;

/// Far fewer words than there are inodes, and few inodes that the daemon remembers of a session.
fn few_words() -> Config {
    Config { lease_words: 40, known_max: 64, ..tiny() }
}

fn folder(number: usize) -> String {
    format!("d{number}")
}

fn file(folder: usize, number: usize) -> String {
    format!("d{folder}/f{number:02}")
}

fn all_files() -> impl Iterator<Item = (usize, usize)> {
    (0..FOLDERS).flat_map(|folder| (0..FILES).map(move |number| (folder, number)))
}

fn done(actor: &mut dyn Actor, call: &Call) -> Answer {
    let answer = actor.call(call);
    assert!(!matches!(answer, Answer::Failed(_)), "{call:?}: {answer:?}");
    answer
}

/// A process of this user.
fn process_of(libfs: Arc<LibFs>, id: u64, caller: &Caller) -> Player<LibFs> {
    let mut process = process(libfs, id);
    let Caller { uid, gid, groups } = caller.clone();
    process.call(&Call::User { uid, gid, groups });
    process
}

/// Files of a program that has ended, of this user.
fn made_by_another(node: &Arc<Node>, caller: &Caller) {
    let (libfs, local) = node.attach(caller.clone(), Limits::default());
    let mut maker = process_of(Arc::new(libfs), 1, caller);
    for number in 0..FOLDERS {
        done(&mut maker, &Call::Mkdir { path: at(&folder(number)), mode: 0o777 });
    }
    for (number, name) in all_files() {
        done(&mut maker, &Call::Open { slot: 0, path: at(&file(number, name)), flags: 0o102, mode: 0o666 });
        done(&mut maker, &Call::Pwrite { slot: 0, offset: 0, data: vec![name as u8; 100] });
        done(&mut maker, &Call::Close(0));
    }
    drop(maker);
    if let Some(daemon) = node.daemon() {
        daemon.end(local.session());
    }
}

/// Walks to every file and never forgets it, as a kernel does that caches names.
fn pin_all(libfs: &LibFs, caller: &Caller) -> Vec<InodeNumber> {
    let root = libfs.root().expect("there is a root").inode;
    let mut pinned = Vec::new();
    for (number, name) in all_files() {
        let (folder, name) = (folder(number), format!("f{name:02}"));
        let [folder, name] = [&folder, &name].map(|part| Name::new(part.as_bytes()).expect("a good name"));
        let mut found = Vec::new();
        let steps = [Step::Child(folder), Step::Child(name)];
        libfs.walk(caller, root, &steps, &mut found).expect("it is there");
        pinned.push(found.last().expect("two were met").inode);
    }
    pinned
}

#[test]
fn more_inodes_than_lease_words_are_pinned_opened_renamed_and_removed() {
    for caller in [Caller::ROOT, Caller { uid: 7, gid: 7, groups: vec![] }] {
        let node = Node::new(Config { known_max: 1 << 12, ..few_words() });
        let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
        let mut root = process(Arc::new(libfs), 9);
        done(&mut root, &Call::Chmod { path: at("."), mode: 0o777 });
        drop(root);
        made_by_another(&node, &caller);
        let (libfs, local) = node.attach(caller.clone(), Limits::default());
        let libfs = Arc::new(libfs);
        let pinned = pin_all(&libfs, &caller);
        // Pinned inodes are valid whether their lease ended or not.
        for inode in &pinned {
            libfs.getattr(vfs::engine::Target::Node(*inode)).expect("a pinned inode is there");
        }
        let mut user = process_of(libfs.clone(), 2, &caller);
        // More files open than there are words, too.
        for (slot, (number, name)) in all_files().step_by(6).enumerate() {
            done(&mut user, &Call::Open { slot, path: at(&file(number, name)), flags: 2, mode: 0 });
        }
        for (number, name) in all_files() {
            done(&mut user, &Call::Stat { path: at(&file(number, name)), follow: true });
        }
        for (slot, (_, name)) in all_files().step_by(6).enumerate() {
            let read = done(&mut user, &Call::Pread { slot, offset: 0, bytes: 200 });
            assert_eq!(read, Answer::Bytes(vec![name as u8; 100]));
            done(&mut user, &Call::Pwrite { slot, offset: 50, data: vec![0xee; 100] });
        }
        for (number, name) in all_files().step_by(3) {
            let to = format!("d{}/moved-{number}-{name}", (number + 1) % FOLDERS);
            done(&mut user, &Call::Rename { from: at(&file(number, name)), to: at(&to), flags: 0 });
        }
        let calls = local.counts.of(CallKind::Release);
        assert!(calls > 10, "{calls} calls gave leases back");
        for (slot, _) in all_files().step_by(6).enumerate() {
            done(&mut user, &Call::Close(slot));
        }
        for (number, name) in all_files() {
            let path = match (number * FILES + name) % 3 {
                0 => format!("d{}/moved-{number}-{name}", (number + 1) % FOLDERS),
                _ => file(number, name),
            };
            done(&mut user, &Call::Unlink(at(&path)));
        }
        for number in 0..FOLDERS {
            done(&mut user, &Call::Rmdir(at(&folder(number))));
        }
        node.tidy();
    }
}

/// One of two programs: its eight bytes in each file, three times.
fn write_three_times(libfs: Arc<LibFs>, id: u64) {
    pin_all(&libfs, &Caller::ROOT);
    let mut user = process(libfs, 10 + id);
    for round in 0..3u8 {
        for (number, name) in all_files() {
            let path = at(&file(number, name));
            done(&mut user, &Call::Open { slot: 0, path, flags: 2, mode: 0 });
            let data = vec![round; 8];
            done(&mut user, &Call::Pwrite { slot: 0, offset: 8 * id, data });
            done(&mut user, &Call::Pread { slot: 0, offset: 0, bytes: 16 });
            done(&mut user, &Call::Close(0));
        }
    }
}

/// Two programs with few words at the same files, each of which wants what the other has.
#[test]
fn two_programs_with_few_words_meet_at_the_same_files() {
    let node = Node::new(few_words());
    made_by_another(&node, &Caller::ROOT);
    std::thread::scope(|threads| {
        for id in 0..2u64 {
            let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
            threads.spawn(move || write_three_times(Arc::new(libfs), id));
        }
    });
    let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
    let mut reader = process(Arc::new(libfs), 3);
    let tree = whole_tree(&mut reader);
    for (number, name) in all_files() {
        let answers = &tree[&file(number, name)];
        let written = |answer: &Answer| matches!(answer, Answer::Bytes(bytes) if bytes[..16] == [2; 16]);
        assert!(answers.iter().any(written), "{}: {answers:?}", file(number, name));
    }
    node.tidy();
}

/// Reads files of a folder through an engine, in the order of its listing, and gives their names and contents; `between` is called
/// after the first ones.
fn read_in_order(libfs: &LibFs, folder: &str, between: impl FnOnce()) -> Vec<(String, Vec<u8>)> {
    let root = libfs.root().expect("there is a root").inode;
    let read = Access { read: true, write: false };
    let name = |text: &str| text.as_bytes().to_vec();
    let step = |from, text: &str| {
        let (mut found, bytes) = (Vec::new(), name(text));
        let steps = [Step::Child(Name::new(&bytes).expect("a good name"))];
        libfs.walk(&Caller::ROOT, from, &steps, &mut found).expect("it is there");
        found.pop().expect("one was met").inode
    };
    let directory = step(root, folder);
    let (handle, _) = libfs.open(&Caller::ROOT, directory, read, false).expect("it opens");
    let (mut names, mut read_bytes, mut between) = (Vec::new(), Vec::new(), Some(between));
    let list = &mut |entry: vfs::engine::Entry<'_>| {
        names.push(String::from_utf8_lossy(entry.name.bytes()).into_owned());
        true
    };
    libfs.readdir(handle, None, list).expect("it is listed");
    for (number, name) in names.into_iter().enumerate() {
        if number == 3 {
            between.take().into_iter().for_each(|between| between());
        }
        let inode = step(directory, &name);
        let (file, _) = libfs.open(&Caller::ROOT, inode, read, false).expect("it opens");
        let mut bytes = [0; 300];
        let count = libfs.read(file, 0, &mut [IoSliceMut::new(&mut bytes)]).expect("it is read");
        libfs.close(file);
        libfs.forget(&[inode]);
        read_bytes.push((name, bytes[..count].to_vec()));
    }
    read_bytes
}

#[test]
fn where_small_files_lie_is_asked_for_many_at_once() {
    let node = Node::new(Config { known_max: 1 << 12, ..tiny() });
    made_by_another(&node, &Caller::ROOT);
    let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
    for number in 0..FOLDERS {
        // Another program changes some that were asked for with the first ones.
        let (other, _) = node.attach(Caller::ROOT, Limits::default());
        let mut writer = process(Arc::new(other), 7);
        let mut change = || {
            for name in 0..FILES {
                done(&mut writer, &Call::Open { slot: 0, path: at(&file(number, name)), flags: 1, mode: 0 });
                done(&mut writer, &Call::Pwrite { slot: 0, offset: 100, data: vec![0xee; 50] });
                done(&mut writer, &Call::Close(0));
            }
        };
        let (changes, before) = (number == 0, local.counts.of(CallKind::Extents));
        let found = read_in_order(&libfs, &folder(number), || {
            if changes {
                change()
            }
        });
        assert_eq!(found.len(), FILES);
        for (at, (name, bytes)) in found.iter().enumerate() {
            let name: u8 = name[1..].parse().expect("a number");
            let expected =
                if changes && at >= 3 { [vec![name; 100], vec![0xee; 50]].concat() } else { vec![name; 100] };
            assert_eq!(*bytes, expected, "folder {number}, file {name}");
        }
        let calls = local.counts.of(CallKind::Extents) - before;
        assert!(changes || calls <= 8, "{calls} calls for {FILES} files of folder {number}");
    }
}

/// A way to SharedFS on which the first question after recalls that waits is overtaken by the next call.
struct Overtaken {
    link: Arc<dyn Link>,
    /// 1 while that question is on its way, 2 when it was overtaken.
    state: Arc<Word>,
}

impl Link for Overtaken {
    fn call(&self, kind: CallKind, request: &[&[u8]], response: &mut Vec<u8>) -> Result<Status, Error> {
        let waits = kind == CallKind::Recalls && request.concat()[0] == 1;
        if waits && self.state.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            SystemHost.wake(&self.state, ipc::WAKE_ALL);
            wait_for(&self.state, 2);
        }
        let called = self.link.call(kind, request, response);
        if !waits && self.state.compare_exchange(1, 2, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            SystemHost.wake(&self.state, ipc::WAKE_ALL);
        }
        called
    }

    fn segment(&self, segment: SegmentId) -> Result<ReadMapping, Error> {
        self.link.segment(segment)
    }
}

/// Attaches by such a way.
struct Overtaking(Local, Arc<Word>);

impl Connector for Overtaking {
    fn attach(&self, former: u64) -> Result<Attachment, Error> {
        let attached = self.0.attach(former)?;
        let link = Arc::new(Overtaken { link: attached.link.clone(), state: self.1.clone() });
        Ok(Attachment { link, ..attached })
    }
}

/// Waits until a word has a value, not for ever.
fn wait_for(word: &Word, wanted: u32) {
    let until = SystemHost.now().after(std::time::Duration::from_secs(60));
    loop {
        match word.load(Ordering::SeqCst) {
            value if value == wanted => return,
            value => {
                assert!(SystemHost.now() < until, "{wanted} does not come, it is {value}");
                SystemHost.wait(word, value, Some(until));
            }
        }
    }
}

#[test]
fn a_wait_for_recalls_ends_if_it_was_told_to_before_its_question_came() {
    let (node, state) = (Node::new(tiny()), Arc::new(Word::new(0)));
    let connector = Arc::new(Overtaking(Local::new(node.clone(), Caller::ROOT), state.clone()));
    let libfs = Arc::new(LibFs::new(node.host.clone(), connector, Limits::default()).expect("it runs"));
    let leases = libfs.cache_leases().expect("it has leases to give");
    leases.begin().expect("nothing is kept anywhere");
    let (ended, theirs, word) = (Arc::new(Word::new(0)), libfs.clone(), Arc::new(Word::new(0)));
    let told = ended.clone();
    let hear = Box::new(move || {
        let recalled = theirs.cache_leases().map(CacheLeases::recalls);
        told.store(if recalled == Some(Recalled::Ended) { 1 } else { 2 }, Ordering::SeqCst);
        SystemHost.wake(&told, ipc::WAKE_ALL);
    });
    let hears = SystemHost.spawn("hears", hear).expect("a thread");
    wait_for(&state, 1);
    let theirs = libfs.clone();
    let over = word.clone();
    let end = Box::new(move || {
        theirs.cache_leases().into_iter().for_each(CacheLeases::end_recalls);
        over.store(1, Ordering::SeqCst);
        SystemHost.wake(&over, ipc::WAKE_ALL);
    });
    let ends = SystemHost.spawn("ends", end).expect("a thread");
    wait_for(&ended, 1);
    wait_for(&word, 1);
    for thread in [hears, ends] {
        thread.join().expect("it ends");
    }
}
