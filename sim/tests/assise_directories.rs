//! Directories that another program made: how many calls it costs to work in them, and how much of them is kept.

mod assise_local;

use assise_local::trees::{at, process};
use assise_local::{Local, Node, sharedfs_area, tiny};
use format::Name;
use format::call::CallKind;
use libfs::Limits;
use sharedfs::Config;
use std::sync::Arc;
use vfs::conformance::{Actor, Answer, Call};
use vfs::engine::{Access, Removal, Step, Target};
use vfs::{Caller, Engine, Error};

const USER: u32 = 7;

fn roomy() -> Config {
    let area = sharedfs_area(1 << 16);
    Config { log_bytes: 4 << 20, log_bytes_max: 4 << 20, lease_words: 4096, area, ..tiny() }
}

fn done(actor: &mut dyn Actor, call: &Call) -> Answer {
    let answer = actor.call(call);
    assert!(!matches!(answer, Answer::Failed(_)), "{call:?}: {answer:?}");
    answer
}

fn make(actor: &mut dyn Actor, path: &str) {
    done(actor, &Call::Open { slot: 0, path: at(path), flags: 0o102, mode: 0o666 });
    done(actor, &Call::Close(0));
}

fn user() -> Caller {
    Caller { uid: USER, gid: USER, groups: vec![] }
}

fn become_user(actor: &mut dyn Actor) {
    done(actor, &Call::User { uid: USER, gid: USER, groups: vec![] });
}

/// Folders of that mode with files, made by a program of the user that has ended.
fn made_by_another(node: &Arc<Node>, folders: usize, files: usize, mode: u32) {
    let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
    done(&mut process(Arc::new(libfs), 8), &Call::Chmod { path: at("."), mode: 0o777 });
    let (libfs, local) = node.attach(user(), Limits::default());
    let mut maker = process(Arc::new(libfs), 9);
    become_user(&mut maker);
    for folder in 0..folders {
        done(&mut maker, &Call::Mkdir { path: at(&format!("d{folder}")), mode: 0o777 });
        for file in 0..files {
            make(&mut maker, &format!("d{folder}/f{file:04}"));
        }
        done(&mut maker, &Call::Chmod { path: at(&format!("d{folder}")), mode });
    }
    drop(maker);
    if let Some(daemon) = node.daemon() {
        daemon.end(local.session());
    }
}

/// The names in a folder.
fn names(actor: &mut dyn Actor, folder: &str) -> Vec<String> {
    let answer = done(actor, &Call::List(at(folder)));
    let Answer::Names(names) = answer else { panic!("{answer:?} is no listing") };
    names.into_iter().filter(|name| !name.starts_with('.')).collect()
}

fn lookups(local: &Local) -> u64 {
    [CallKind::Walk, CallKind::Entries, CallKind::Lease].iter().map(|kind| local.counts.of(*kind)).sum()
}

/// Making, renaming and removing in a folder that another program made.
#[test]
fn new_names_in_a_folder_of_another_program_cost_no_call_each() {
    const OLD: usize = 1500;
    const NEW: usize = 600;
    let node = Node::new(roomy());
    made_by_another(&node, 1, OLD, 0o777);
    let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
    let mut program = process(Arc::new(libfs), 1);
    done(&mut program, &Call::Stat { path: at("d0"), follow: true });
    let before = lookups(&local);
    for file in 0..NEW {
        make(&mut program, &format!("d0/n{file}"));
        done(
            &mut program,
            &Call::Rename { from: at(&format!("d0/n{file}")), to: at(&format!("d0/m{file}")), flags: 0 },
        );
    }
    for file in (0..NEW).step_by(2) {
        done(&mut program, &Call::Unlink(at(&format!("d0/m{file}"))));
    }
    let calls = lookups(&local) - before;
    assert!(calls <= NEW as u64 / 64, "{calls} calls for {NEW} files");
    assert_eq!(names(&mut program, "d0").len(), OLD + NEW / 2);
    node.tidy();
}

/// A program that lost the folder to another one asks for single names again, and reads it whole again only if it goes on.
#[test]
fn two_programs_in_one_folder_see_what_the_other_made() {
    const FILES: usize = 200;
    let node = Node::new(roomy());
    made_by_another(&node, 1, FILES, 0o777);
    let mut programs: Vec<_> =
        (0..2).map(|id| process(Arc::new(node.attach(Caller::ROOT, Limits::default()).0), id)).collect();
    for round in 0..40 {
        for (id, program) in programs.iter_mut().enumerate() {
            for file in 0..=round % 4 {
                make(program, &format!("d0/of-{id}-{round}-{file}"));
            }
            let theirs = at(&format!("d0/of-{}-{round}-0", 1 - id));
            let found = program.call(&Call::Stat { path: theirs, follow: true });
            assert_eq!(matches!(found, Answer::Failed(_)), id == 0, "round {round}: {found:?}");
        }
    }
    let made: usize = (0..40).map(|round| 2 * (round % 4 + 1)).sum();
    assert_eq!(names(&mut programs[0], "d0").len(), FILES + made);
    node.tidy();
}

/// Its own change of the mode is not in the area yet when the program lists the folder.
#[test]
fn a_folder_that_was_just_made_readable_shows_its_entries() {
    let node = Node::new(roomy());
    made_by_another(&node, 1, 10, 0o300);
    let (libfs, _) = node.attach(user(), Limits::default());
    let mut program = process(Arc::new(libfs), 1);
    become_user(&mut program);
    make(&mut program, "d0/new");
    make(&mut program, "d0/newer");
    assert!(matches!(program.call(&Call::List(at("d0"))), Answer::Failed(_)));
    done(&mut program, &Call::Chmod { path: at("d0"), mode: 0o700 });
    make(&mut program, "d0/newest");
    assert_eq!(names(&mut program, "d0").len(), 13);
    node.tidy();
}

/// The cached entries of folders that are not in use are bounded, and forgotten ones are requested again.
#[test]
fn entries_beyond_the_cache_are_forgotten_and_read_again() {
    const FOLDERS: usize = 20;
    const FILES: usize = 50;
    let node = Node::new(roomy());
    made_by_another(&node, FOLDERS, FILES, 0o777);
    for (entries, again) in [(1 << 16, false), (FILES * 4, true)] {
        let (libfs, local) = node.attach(Caller::ROOT, Limits { entries, ..Limits::default() });
        let mut program = process(Arc::new(libfs), 1);
        let all = |program: &mut dyn Actor| {
            (0..FOLDERS).for_each(|folder| assert_eq!(names(program, &format!("d{folder}")).len(), FILES));
        };
        all(&mut program);
        let first = local.counts.of(CallKind::Entries);
        all(&mut program);
        let second = local.counts.of(CallKind::Entries) - first;
        assert_eq!(second > 0, again, "{second} calls for entries that were read before");
    }
    node.tidy();
}

/// Calls of a kind that looks something up, for what was done.
fn lookups_for(local: &Local, act: impl FnOnce()) -> u64 {
    let before = lookups(local);
    act();
    lookups(local) - before
}

/// A program that goes through a folder of another one: `stat` or `unlink` of all, in the order of the entries or another.
#[test]
fn going_through_a_folder_costs_a_call_for_many_entries() {
    const FILES: usize = 1024;
    let node = Node::new(roomy());
    made_by_another(&node, 4, FILES, 0o777);
    for (folder, (sorted, stats, removes)) in
        [(false, true, false), (true, true, true), (false, false, true), (true, false, true)]
            .into_iter()
            .enumerate()
    {
        let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
        let mut program = process(Arc::new(libfs), 1);
        let folder = format!("d{folder}");
        let calls = lookups_for(&local, || {
            let mut found = names(&mut program, &folder);
            if sorted {
                found.sort();
            }
            let path = |name: &String| at(&format!("{folder}/{}", name.split(':').next().unwrap_or(name)));
            for name in found.iter().filter(|_| stats) {
                done(&mut program, &Call::Stat { path: path(name), follow: false });
            }
            for name in found.iter().filter(|_| removes) {
                done(&mut program, &Call::Unlink(path(name)));
            }
        });
        let passes = u64::from(stats) + u64::from(removes);
        let calls_max = passes * FILES as u64 / 64;
        assert!(calls <= calls_max, "{calls} calls where {calls_max} are enough, sorted {sorted}");
        assert_eq!(names(&mut program, &folder).len(), if removes { 0 } else { FILES });
    }
    node.tidy();
}

/// A program that knows the names, and looks them up in an order of its own, without listing the folder: those that are there,
/// and those that are not.
#[test]
fn looking_up_many_names_costs_a_call_for_many() {
    const FILES: usize = 1024;
    let node = Node::new(roomy());
    made_by_another(&node, 1, FILES, 0o777);
    let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
    let mut program = process(Arc::new(libfs), 1);
    let calls = lookups_for(&local, || {
        for file in 0..FILES {
            let path = at(&format!("d0/f{:04}", file * 389 % FILES));
            done(&mut program, &Call::Stat { path, follow: false });
            let absent = at(&format!("d0/absent-{file}"));
            let answer = program.call(&Call::Stat { path: absent, follow: false });
            assert!(matches!(answer, Answer::Failed(_)), "{answer:?}");
        }
    });
    let names = 2 * FILES as u64;
    assert!(calls <= names / 64, "{calls} calls for {names} names");
    node.tidy();
}

/// A program reads small files that it has written itself, in an order of its own, after they were digested.
#[test]
fn small_files_that_a_program_wrote_itself_cost_a_call_for_many() {
    const FILES: usize = 512;
    let node = Node::new(roomy());
    let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
    let mut program = process(Arc::new(libfs), 1);
    let path = |file: usize| at(&format!("d{}/f{file}", file % 16));
    let data = |file: usize| vec![file as u8; 1 + file % 7 * 3000];
    for folder in 0..16 {
        done(&mut program, &Call::Mkdir { path: at(&format!("d{folder}")), mode: 0o777 });
    }
    for file in 0..FILES {
        done(&mut program, &Call::Open { slot: 0, path: path(file), flags: 0o102, mode: 0o666 });
        done(&mut program, &Call::Pwrite { slot: 0, offset: 0, data: data(file) });
        done(&mut program, &Call::Close(0));
    }
    node.tidy();
    let before = local.counts.of(CallKind::Extents);
    for file in 0..FILES {
        let file = file * 389 % FILES;
        done(&mut program, &Call::Open { slot: 0, path: path(file), flags: 0, mode: 0 });
        let read = done(&mut program, &Call::Pread { slot: 0, offset: 0, bytes: 1 << 16 });
        assert_eq!(read, Answer::Bytes(data(file)), "{file}");
        done(&mut program, &Call::Close(0));
    }
    let calls = local.counts.of(CallKind::Extents) - before;
    assert!(calls > 0, "nothing was digested");
    assert!(calls <= FILES as u64 / 4, "{calls} calls for {FILES} files");
    node.tidy();
}

/// One name of each of many folders is looked up by one call.
#[test]
fn a_single_name_of_a_folder_does_not_make_it_be_read() {
    const FOLDERS: usize = 30;
    let node = Node::new(roomy());
    made_by_another(&node, FOLDERS, 20, 0o777);
    let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
    let mut program = process(Arc::new(libfs), 1);
    for folder in 0..FOLDERS {
        let path = at(&format!("d{folder}/f0007"));
        done(&mut program, &Call::Stat { path, follow: false });
    }
    assert!(local.counts.of(CallKind::Entries) <= 1, "the folder of the folders");
    node.tidy();
}

/// Leases ahead are taken from nobody: another program goes on with what it holds, and writes.
#[test]
fn looking_ahead_takes_nothing_from_another_program() {
    const FILES: usize = 200;
    let node = Node::new(roomy());
    made_by_another(&node, 1, FILES, 0o777);
    let (libfs, other) = node.attach(Caller::ROOT, Limits::default());
    let mut writer = process(Arc::new(libfs), 1);
    for file in (0..FILES).step_by(2) {
        let path = at(&format!("d0/f{file:04}"));
        done(&mut writer, &Call::Open { slot: 0, path, flags: 2, mode: 0 });
        done(&mut writer, &Call::Pwrite { slot: 0, offset: 0, data: vec![1; 10] });
        done(&mut writer, &Call::Close(0));
    }
    let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
    let mut reader = process(Arc::new(libfs), 2);
    for name in names(&mut reader, "d0").iter().take(20) {
        let name = name.split(':').next().unwrap_or(name);
        let number: usize = name[1..].parse().expect("a number");
        if number % 2 == 1 {
            done(&mut reader, &Call::Stat { path: at(&format!("d0/{name}")), follow: false });
        }
    }
    let leases = lookups_for(&other, || {
        for file in (0..FILES).step_by(2) {
            let path = at(&format!("d0/f{file:04}"));
            done(&mut writer, &Call::Chmod { path, mode: 0o600 });
        }
    });
    // The folder itself is read by both.
    assert!(leases <= 2, "{leases} calls for leases that nobody had to take");
    node.tidy();
}

/// A program that needs what another one holds, file after file, takes many at once: files that the other one made, and
/// files that it wrote to.
#[test]
fn what_another_program_holds_is_taken_for_many_entries_at_once() {
    const FILES: usize = 256;
    let node = Node::new(roomy());
    made_by_another(&node, 1, FILES, 0o777);
    let mut maker = process(Arc::new(node.attach(Caller::ROOT, Limits::default()).0), 1);
    done(&mut maker, &Call::Mkdir { path: at("d1"), mode: 0o777 });
    for file in 0..FILES {
        make(&mut maker, &format!("d1/f{file:04}"));
        let path = at(&format!("d0/f{file:04}"));
        done(&mut maker, &Call::Chmod { path, mode: 0o600 });
    }
    for folder in ["d0", "d1"] {
        let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
        let mut program = process(Arc::new(libfs), 2);
        let calls = lookups_for(&local, || {
            for name in names(&mut program, folder) {
                let name = name.split(':').next().unwrap_or(&name);
                let path = at(&format!("{folder}/{name}"));
                let before = done(&mut program, &Call::Stat { path: path.clone(), follow: false });
                done(&mut program, &Call::Unlink(path));
                assert!(!matches!(before, Answer::Failed(_)));
            }
        });
        let calls_max = 2 * FILES as u64 / 16;
        assert!(calls <= calls_max, "{calls} calls for {FILES} files in {folder}");
        assert_eq!(names(&mut maker, folder), [""; 0]);
    }
    node.tidy();
}

/// So does one that changes such files, in the order of the folder or another.
#[test]
fn what_another_program_holds_is_changed_with_few_calls() {
    const FILES: usize = 256;
    let node = Node::new(roomy());
    made_by_another(&node, 2, FILES, 0o777);
    let mut holder = process(Arc::new(node.attach(Caller::ROOT, Limits::default()).0), 1);
    let path = |folder: &str, name: &str| at(&format!("{folder}/{}", name.split(':').next().unwrap_or(name)));
    for (folder, sorted) in [("d0", false), ("d1", true)] {
        for name in names(&mut holder, folder) {
            done(&mut holder, &Call::Stat { path: path(folder, &name), follow: false });
        }
        let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
        let mut program = process(Arc::new(libfs), 2);
        let calls = lookups_for(&local, || {
            let mut found = names(&mut program, folder);
            if sorted {
                found.sort();
            }
            for name in found {
                done(&mut program, &Call::Chmod { path: path(folder, &name), mode: 0o600 });
            }
        });
        let calls_max = 2 * FILES as u64 / 16;
        assert!(calls <= calls_max, "{calls} calls for {FILES} files, sorted {sorted}");
    }
    node.tidy();
}

/// A program changes the files that it has open, also in a folder that it may not search any more.
#[test]
fn open_files_are_changed_in_a_folder_that_was_closed() {
    const FILES: usize = 3;
    let node = Node::new(roomy());
    made_by_another(&node, 1, FILES, 0o777);
    let mut program = process(Arc::new(node.attach(user(), Limits::default()).0), 1);
    become_user(&mut program);
    let mut holder = process(Arc::new(node.attach(Caller::ROOT, Limits::default()).0), 2);
    let path = |file: usize| at(&format!("d0/f{file:04}"));
    for file in 0..FILES {
        done(&mut holder, &Call::Open { slot: file, path: path(file), flags: 2, mode: 0 });
    }
    names(&mut program, "d0");
    for file in 0..FILES {
        done(&mut program, &Call::Open { slot: file, path: path(file), flags: 2, mode: 0 });
    }
    done(&mut program, &Call::Chmod { path: at("d0"), mode: 0 });
    node.tidy();
    for file in 0..FILES {
        done(&mut holder, &Call::Ftruncate { slot: file, size: 3 });
    }
    for file in 0..FILES {
        done(&mut program, &Call::Ftruncate { slot: file, size: 7 });
    }
    node.tidy();
}

/// A mount's kernel asks by number for what it has met before, after another program has changed all of it.
#[test]
fn what_was_met_before_is_read_again_with_few_calls() {
    const FILES: usize = 256;
    let node = Node::new(roomy());
    made_by_another(&node, 1, FILES, 0o777);
    let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
    let libfs = Arc::new(libfs);
    let listed = names(&mut process(Arc::clone(&libfs), 1), "d0");
    let listed: Vec<&str> = listed.iter().map(|name| name.split(':').next().unwrap_or(name)).collect();
    let root = libfs.root().unwrap().inode;
    let met = listed.iter().map(|name| {
        let names = [b"d0", name.as_bytes()].map(|name| Step::Child(Name::new(name).unwrap()));
        let mut found = Vec::new();
        libfs.walk(&Caller::ROOT, root, &names, &mut found).unwrap();
        found[1].inode
    });
    let met: Vec<_> = met.collect();
    let mut other = process(Arc::new(node.attach(Caller::ROOT, Limits::default()).0), 2);
    for name in &listed {
        done(&mut other, &Call::Chmod { path: at(&format!("d0/{name}")), mode: 0o640 });
    }
    let calls = lookups_for(&local, || {
        for inode in &met {
            assert_eq!(libfs.getattr(Target::Node(*inode)).unwrap().mode & 0o777, 0o640);
        }
    });
    let calls_max = FILES as u64 / 16;
    assert!(calls <= calls_max, "{calls} calls for {FILES} files");
    node.tidy();
}

/// `ls -l` asks each file for extended attributes: those without any are told with the file.
#[test]
fn files_without_extended_attributes_cost_no_call_for_them() {
    const FILES: usize = 50;
    let node = Node::new(roomy());
    made_by_another(&node, 1, FILES, 0o777);
    let xattrs = |program: &mut dyn Actor, file: &str| {
        let name = "user.b".to_string();
        let answers = [
            program.call(&Call::ListXattrs(at(file))),
            program.call(&Call::GetXattr { path: at(file), name }),
        ];
        answers.map(|answer| format!("{answer:?}"))
    };
    let set = |program: &mut dyn Actor, file: &str, name: &str| {
        let (path, name, value) = (at(file), name.to_string(), b"value".to_vec());
        done(program, &Call::SetXattr { path, name, value, flags: 0 });
    };
    let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
    let mut program = process(Arc::new(libfs), 1);
    let other = node.attach(Caller::ROOT, Limits::default()).0;
    let mut other = process(Arc::new(other), 2);
    names(&mut program, "d0");
    let asked = || local.counts.of(CallKind::ListXattr) + local.counts.of(CallKind::GetXattr);
    let none = xattrs(&mut program, "d0/f0000");
    for file in 0..FILES {
        assert_eq!(xattrs(&mut program, &format!("d0/f{file:04}")), none);
    }
    assert_eq!(asked(), 0, "calls for files without extended attributes");
    // One that another program sets is seen, and so are own ones, before and after their digest.
    set(&mut other, "d0/f0001", "user.b");
    let theirs = xattrs(&mut program, "d0/f0001");
    assert!(theirs[0].contains("user.b") && theirs[1] != none[1], "{theirs:?}");
    for (file, new) in [("d0/f0002", false), ("d0/new", true)] {
        if new {
            make(&mut program, file);
        }
        set(&mut program, file, "user.b");
        let own = xattrs(&mut program, file);
        assert_eq!(own, theirs, "{file}");
        node.tidy();
        // A digest is noticed by one that changes something.
        make(&mut program, &format!("{file}-more"));
        assert_eq!(xattrs(&mut program, file), theirs, "{file}, digested");
        assert_eq!(xattrs(&mut other, file), theirs, "{file}, of the other program");
        let (path, name) = (at(file), "user.b".to_string());
        done(&mut other, &Call::RemoveXattr { path, name });
        assert_eq!(xattrs(&mut program, file), none, "{file}, removed");
    }
    node.tidy();
}

/// The kernel of a mount keeps all inodes that it has met, many more than LibFS wants to know anything of: each is found by its
/// number as long as it is kept, also after its name went, and after that no more.
#[test]
fn what_a_mounts_kernel_keeps_is_found_by_its_number() {
    const FILES: usize = 600;
    let node = Node::new(roomy());
    made_by_another(&node, 1, FILES, 0o777);
    let (libfs, _) = node.attach(Caller::ROOT, Limits { nodes: 64, ..Limits::default() });
    let root = libfs.root().unwrap().inode;
    let name = |file: usize| format!("f{file:04}");
    let walk = |file: usize| {
        let (folder, name) = (Name::new(b"d0").unwrap(), name(file));
        let steps = [Step::Child(folder), Step::Child(Name::new(name.as_bytes()).unwrap())];
        let mut found = Vec::new();
        libfs.walk(&Caller::ROOT, root, &steps, &mut found).unwrap();
        (found[0].inode, found[1].inode)
    };
    let met: Vec<_> = (0..FILES).map(walk).collect();
    let folder = met[0].0;
    let links = |inode| libfs.getattr(Target::Node(inode)).map(|attributes| attributes.links);
    assert!(met.iter().all(|(_, file)| links(*file) == Ok(1)));
    // By its number too: a change, an opening, an end of its name.
    let (_, first) = met[0];
    let (handle, _) = libfs.open(&Caller::ROOT, first, Access { read: true, write: true }, false).unwrap();
    libfs.unlink(&Caller::ROOT, folder, Name::new(name(0).as_bytes()).unwrap(), Removal::File).unwrap();
    met.iter().skip(1).for_each(|(_, file)| assert_eq!(links(*file), Ok(1)));
    assert_eq!(links(first), Ok(0), "it is open");
    libfs.close(handle);
    // As often as it was met, and once more for the folder of each.
    assert_eq!(walk(7).1, met[7].1);
    let folders: Vec<_> = met.iter().map(|(folder, _)| *folder).collect();
    libfs.forget(&folders);
    for (index, (_, file)) in met.iter().enumerate().skip(1) {
        libfs.forget(&[*file]);
        assert_eq!(links(*file), if index == 7 { Ok(1) } else { Err(Error::Stale) }, "{index}");
    }
    libfs.forget(&[met[7].1, folder]);
    assert_eq!((links(met[7].1), links(folder)), (Err(Error::Stale), Err(Error::Stale)));
    drop(libfs);
    node.tidy();
}
