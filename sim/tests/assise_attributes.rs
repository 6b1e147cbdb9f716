//! A LibFS shows its own records before they are digested exactly as the area does afterwards: every attribute, times
//! too, for every kind of record.

mod assise_local;

use assise_local::trees::{at, process};
use assise_local::{Node, tiny};
use format::Name;
use format::call::CallKind;
use libfs::{LibFs, Limits};
use std::io::IoSlice;
use std::sync::Arc;
use vfs::conformance::{Actor, Answer, Call};
use vfs::engine::{
    Access, Allocate, At, Attributes, Changes, Created, Extent, New, NewType, Removal, Step, Target,
};
use vfs::{Caller, Engine, Error};

const PATHS: [&str; 7] = ["", "d", "e", "d/a", "d/b", "b", "e/d"];

/// All attributes at a path, but the blocks: which the area will use is known only to it.
fn look(libfs: &LibFs, path: &str) -> Result<Attributes, Error> {
    let root = libfs.root()?;
    let steps: Vec<Step<'_>> = path
        .split('/')
        .filter(|part| !part.is_empty())
        .map(|part| Step::Child(Name::new(part.as_bytes()).expect("a good name")))
        .collect();
    let mut found = Vec::new();
    let walked = libfs.walk(&Caller::ROOT, root.inode, &steps, &mut found);
    let nodes: Vec<_> = found.iter().map(|attributes| attributes.inode).chain([root.inode]).collect();
    libfs.forget(&nodes);
    walked?;
    let last = found.last().copied().unwrap_or(root);
    Ok(Attributes { blocks: 0, ..last })
}

/// One of every kind of record, with users and bits that the rules are about.
fn calls() -> Vec<Call> {
    let rename = |from: &str, to: &str, flags| Call::Rename { from: at(from), to: at(to), flags };
    let open = |slot, path: &str| Call::Open { slot, path: at(path), flags: 0o102, mode: 0o644 };
    let user = |uid| Call::User { uid, gid: uid, groups: vec![500] };
    let chmod = |path: &str, mode| Call::Chmod { path: at(path), mode };
    vec![
        Call::Mkdir { path: at("d"), mode: 0o777 },
        chmod("d", 0o2777),
        open(0, "d/a"),
        Call::Pwrite { slot: 0, offset: 100, data: vec![1; 5000] },
        Call::Ftruncate { slot: 0, size: 300 },
        Call::Ftruncate { slot: 0, size: 300 },
        Call::Truncate { path: at("d/a"), size: 300 },
        Call::Fallocate { slot: 0, mode: 0, offset: 0, bytes: 9000 },
        Call::Fallocate { slot: 0, mode: 3, offset: 10, bytes: 5000 },
        chmod("d/a", 0o6777),
        user(101),
        open(1, "d/a"),
        // Clears the set-id bits, and by another than the log's user.
        Call::Pwrite { slot: 1, offset: 0, data: vec![2; 10] },
        user(0),
        chmod("d/a", 0o6777),
        user(101),
        Call::Ftruncate { slot: 1, size: 5 },
        user(0),
        chmod("d/a", 0o6777),
        Call::Chown { path: at("d/a"), uid: Some(101), gid: Some(500), follow: true },
        Call::Utimens { path: at("d/a"), atime: (5, 6), mtime: (7, 8), follow: true },
        Call::SetXattr { path: at("d/a"), name: "user.x".to_owned(), value: vec![3; 10], flags: 0 },
        Call::RemoveXattr { path: at("d/a"), name: "user.x".to_owned() },
        Call::Link { from: at("d/a"), to: at("d/b"), follow: false },
        Call::Unlink(at("d/a")),
        Call::Symlink { target: "target".to_owned(), path: at("b") },
        rename("b", "d/b", 2),
        Call::Mkdir { path: at("e"), mode: 0o700 },
        rename("d", "e/d", 0),
        rename("b", "e/d/b", 0),
        Call::Mkdir { path: at("d"), mode: 0o700 },
        rename("d", "e", 2),
        Call::Mknod { path: at("b"), mode: 0o020_600, device: 259 },
        Call::Unlink(at("b")),
        Call::Rmdir(at("e")),
    ]
}

#[test]
fn before_and_after_the_digest_all_attributes_are_the_same() {
    let node = Node::new(tiny());
    let own = Arc::new(node.attach(Caller::ROOT, Limits::default()).0);
    let other = node.attach(Caller::ROOT, Limits::default()).0;
    let mut player = process(own.clone(), 1);
    for call in calls() {
        let answer = player.call(&call);
        assert!(!matches!(answer, Answer::Failed(_)), "{call:?} answered {answer}");
        let cached: Vec<_> = PATHS.iter().map(|path| look(&own, path)).collect();
        // The other's leases make SharedFS digest what this one did.
        let digested: Vec<_> = PATHS.iter().map(|path| look(&other, path)).collect();
        for ((path, cached), digested) in PATHS.iter().zip(cached).zip(digested) {
            assert_eq!(cached, digested, "{path:?} after {call:?}");
        }
    }
    node.tidy();
}

/// A program that copies only what is not a hole (`tar -S`, `cp --sparse`) goes by the number of blocks.
#[test]
fn after_the_digest_the_blocks_of_a_file_are_those_that_it_has() {
    let node = Node::new(tiny());
    let own = node.attach(Caller::ROOT, Limits::default()).0;
    let root = own.root().unwrap().inode;
    let both = Access { read: true, write: true };
    let new = New { kind: NewType::Regular(Some(both)), mode: 0o600, umask: 0, exclusive: true };
    let name = Name::new(b"sparse").unwrap();
    let Created::New(file, Some(handle)) = own.create(&Caller::ROOT, root, name, &new).unwrap() else {
        panic!("it was to be made and opened");
    };
    let write = |offset, bytes| {
        let data = vec![1; bytes];
        own.write(&Caller::ROOT, handle, At::Offset(offset), &[IoSlice::new(&data)]).unwrap();
    };
    let blocks = || {
        // Where data is only the area knows: this digests, and takes no lease away.
        own.extents(handle, 0, Extent::Data).unwrap();
        let known = own.getattr(Target::Node(file.inode)).unwrap().blocks;
        let mut found = Vec::new();
        own.walk(&Caller::ROOT, root, &[Step::Child(name)], &mut found).unwrap();
        own.forget(&[file.inode]);
        assert_eq!(found[0].blocks, known);
        known
    };
    write(0, 10);
    assert_eq!(blocks(), 8);
    write(1 << 20, 5000);
    assert_eq!(blocks(), 8 + 16);
    write(1 << 20, 5000);
    assert_eq!(blocks(), 8 + 16);
    own.allocate(&Caller::ROOT, handle, Allocate::PunchHole, 0, 4096).unwrap();
    assert_eq!(blocks(), 16);
    // Blocks that are reserved beyond the end do not stay after a truncation, also of one to the size that the file has.
    let size = Some((1 << 20) + 5000);
    own.allocate(&Caller::ROOT, handle, Allocate::KeepSize, 2 << 20, 8192).unwrap();
    assert_eq!(blocks(), 32);
    own.setattr(&Caller::ROOT, Target::Open(handle), &Changes { size, ..Changes::default() }).unwrap();
    assert_eq!(blocks(), 16);
    own.close(handle);
    own.forget(&[file.inode, root]);
    drop(own);
    node.tidy();
}

/// A program that unpacks many files and looks at each again makes no call for any of them.
#[test]
fn a_file_that_was_written_as_a_whole_has_its_blocks_without_a_question() {
    let node = Node::new(tiny());
    let (own, local) = node.attach(Caller::ROOT, Limits::default());
    let root = own.root().unwrap().inode;
    let both = Access { read: true, write: true };
    let new = New { kind: NewType::Regular(Some(both)), mode: 0o600, umask: 0, exclusive: true };
    /// Offsets and bytes of the writes, a size at the end, and whether the area has to be asked.
    type Written<'a> = (&'a [(u64, usize)], Option<u64>, bool);
    let files: [Written<'_>; 8] = [
        (&[], None, false),
        (&[(0, 1)], None, false),
        (&[(0, 4096), (4096, 4096)], None, false),
        (&[(0, 5000), (5000, 5000), (100, 300)], None, false),
        (&[(0, 9000)], Some(5000), false),
        (&[(8192, 100)], None, true),
        (&[(0, 100)], Some(9000), true),
        (&[(0, 9000)], Some(0), false),
    ];
    let mut made = Vec::new();
    for (number, (writes, size, asked)) in files.into_iter().enumerate() {
        let name = format!("f{number}");
        let created = own.create(&Caller::ROOT, root, Name::new(name.as_bytes()).unwrap(), &new).unwrap();
        let Created::New(file, Some(handle)) = created else { panic!("it was to be made and opened") };
        for (offset, bytes) in writes {
            let data = vec![1; *bytes];
            own.write(&Caller::ROOT, handle, At::Offset(*offset), &[IoSlice::new(&data)]).unwrap();
        }
        if size.is_some() {
            let changes = Changes { size, ..Changes::default() };
            own.setattr(&Caller::ROOT, Target::Open(handle), &changes).unwrap();
        }
        made.push((name, file.inode, handle, asked));
    }
    // This digests; of the last file with data, since the answer brings what is known of those behind it.
    own.extents(made[6].2, 0, Extent::Data).unwrap();
    let mut known = Vec::new();
    for (name, inode, _, asked) in &made {
        let before = local.counts.of(CallKind::Lease);
        known.push(own.getattr(Target::Node(*inode)).unwrap().blocks);
        let calls = local.counts.of(CallKind::Lease) - before;
        assert_eq!(calls, u64::from(*asked), "{name}");
    }
    for (_, inode, handle, _) in &made {
        own.close(*handle);
        own.forget(&[*inode]);
    }
    own.forget(&[root]);
    drop(own);
    let other = node.attach(Caller::ROOT, Limits::default()).0;
    let root = other.root().unwrap().inode;
    for ((name, ..), known) in made.iter().zip(known) {
        let mut found = Vec::new();
        let step = Step::Child(Name::new(name.as_bytes()).unwrap());
        other.walk(&Caller::ROOT, root, &[step], &mut found).unwrap();
        assert_eq!(found[0].blocks, known, "{name}");
        other.forget(&[found[0].inode]);
    }
    other.forget(&[root]);
    drop(other);
    node.tidy();
}

/// A writer drops digested records from the caches in parts. Between two parts, some files have records that the area has
/// too.
#[test]
fn data_is_found_while_digested_records_are_dropped_in_parts() {
    const FILES: usize = 150;
    let node = Node::new(tiny());
    let own = node.attach(Caller::ROOT, Limits { purge_steps: 2, ..Limits::default() }).0;
    let root = own.root().unwrap().inode;
    let both = Access { read: true, write: true };
    let new = New { kind: NewType::Regular(Some(both)), mode: 0o600, umask: 0, exclusive: true };
    for round in 0..10 {
        let name = |number| format!("{round}-{number}");
        let mut made = Vec::new();
        for number in 0..FILES {
            if number == FILES - 1 {
                // The area has all records now. After the next record, some are dropped.
                node.tidy();
            }
            let name = name(number);
            let created = own.create(&Caller::ROOT, root, Name::new(name.as_bytes()).unwrap(), &new).unwrap();
            let Created::New(file, Some(handle)) = created else { panic!("it was to be made and opened") };
            own.write(&Caller::ROOT, handle, At::Offset(0), &[IoSlice::new(&[1; 100])]).unwrap();
            made.push((file.inode, handle));
        }
        for (number, (inode, handle)) in made.into_iter().enumerate() {
            assert_eq!(own.extents(handle, 0, Extent::Data), Ok(0), "round {round}, file {number}");
            own.close(handle);
            own.forget(&[inode]);
            own.unlink(&Caller::ROOT, root, Name::new(name(number).as_bytes()).unwrap(), Removal::File)
                .unwrap();
        }
    }
    own.forget(&[root]);
    drop(own);
    node.tidy();
}
