//! A reservation is enough for records of each kind: a session appends as many of one kind as
//! `format::record::room_blocks` allows, in a pool of which all that can be reserved is reserved. None is cut, and they
//! take at most as many data blocks and nodes of the tree as were reserved for them.

use crate::client::{Client, DIRECTORY, FILE, ROOT, tiny, user};
use crate::support::Draws;
use format::InodeNumber;
use format::record::{
    ALLOCATE_KEEP_SIZE, ALLOCATE_PUNCH_HOLE, Kind, RENAME_WHITEOUT, RenameBody, SYMLINK_BYTES_MAX,
    WhiteoutBody, XATTR_BYTES_MAX,
};
use pmem::Recorder;
use sharedfs::{Config, Daemon, Format, format_pool};
use std::sync::Arc;
use zerocopy::{FromZeros, IntoBytes};

pub const BLOCK: u64 = 4096;

/// Space that is never promised: enough for the copies of the paths that one record changes.
pub const RESERVE: u64 = 200;

/// Space that is promised only for what replaces blocks.
pub const REPLACE_RESERVE: u64 = 64;

/// A pool with some files, and the client that uses its reservation up.
pub struct Bench {
    pub recorder: Recorder,
    pub daemon: Arc<Daemon>,
    pub one: Client,
    pub random: Draws,
    /// Directories and files that were made before, and files that were made since.
    pub folders: [InodeNumber; 2],
    pub files: Vec<InodeNumber>,
}

/// Records of one kind.
struct Records {
    name: &'static str,
    prepare: fn(&mut Bench),
    /// Appends the record with this number; false if the reservation is not enough.
    append: fn(&mut Bench, u64) -> bool,
}

/// The size of a pool.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub nodes: u32,
    pub blocks: u64,
}

/// Nodes are scarce, or blocks.
pub const SIZES: [Size; 2] = [Size { nodes: 2048, blocks: 16 << 10 }, Size { nodes: 16 << 10, blocks: 1536 }];

/// The settings of a daemon over a pool of a size.
pub fn settings(size: Size) -> Config {
    let mut config = Config {
        own_range: 100_000,
        room_blocks: 0,
        room_reserve: RESERVE,
        replace_reserve_max: REPLACE_RESERVE,
        log_bytes: 1 << 20,
        log_bytes_max: 1 << 20,
        batch_records: 256,
        batch_bytes: 1 << 20,
        ..tiny()
    };
    config.area.capacity_blocks = size.blocks;
    config.area.segment_blocks = 128;
    config
}

impl Bench {
    pub fn new(size: Size, seed: u64, foreign: bool) -> Self {
        let recorder = Recorder::new();
        let new = Format {
            pool: format::PoolUid::new(77),
            tree_nodes_max: size.nodes,
            root_mode: 0o777,
            root_uid: 0,
            root_gid: 0,
            time_ns: 1,
            ledger_bytes: tiny().ledger_bytes,
        };
        format_pool(&recorder.medium(), &new).unwrap();
        let config = settings(size);
        let daemon = Daemon::open(Arc::new(ipc::SystemHost), &recorder.medium(), config).unwrap().0;
        let daemon = Arc::new(daemon);
        let (owner, writer) = if foreign { (0, 5) } else { (5, 5) };
        let mut maker = Client::attach(&daemon, user(owner));
        maker.write_lease(ROOT);
        let folders = [b"a", b"b"].map(|name| maker.create(ROOT, name, DIRECTORY | 0o777).0);
        let files: Vec<_> = (0..4)
            .map(|index| maker.create(folders[0], format!("{index}").as_bytes(), FILE | 0o666).0)
            .collect();
        maker.digest(true).unwrap();
        daemon.end(maker.session);
        let one = Client::attach(&daemon, user(writer));
        // Its inodes are behind those of the session that is measured.
        let mut last = Client::attach(&daemon, user(writer));
        last.walk("b").unwrap();
        last.write_lease(folders[1]);
        assert!(last.create(folders[1], b"last", FILE | 0o644).1);
        last.digest(true).unwrap();
        daemon.end(last.session);
        for path in ["a/0", "a/1", "a/2", "a/3", "b"] {
            one.walk(path).unwrap();
        }
        for inode in folders.iter().chain(&files) {
            one.write_lease(*inode);
        }
        let random = Draws(seed);
        Self { recorder, daemon, one, random, folders, files }
    }

    /// Makes files with names of a few bytes.
    pub fn make_files(&mut self, count: u64) {
        for index in 0..count {
            let (file, made) =
                self.one.create(self.folders[0], format!("old-{index}").as_bytes(), FILE | 0o644);
            assert!(made);
            self.files.push(file);
        }
    }

    /// A name of so many bytes that was not given before.
    pub fn name(&mut self, number: u64, bytes: usize) -> Vec<u8> {
        let mut name = format!("{:x}-{number}", self.random.below(1 << 20)).into_bytes();
        name.resize(name.len().max(bytes), b'n');
        name
    }

    pub fn usage(&self) -> (u64, u64) {
        let report = area::check::check(&self.recorder.medium()).unwrap();
        assert!(report.is_clean(), "{:?}", report.findings);
        (report.nodes, report.data_blocks)
    }
}

/// Sets an attribute of the user; its name is cut to the longest one.
fn xattr(bench: &mut Bench, inode: InodeNumber, name: &[u8], bytes: usize) -> bool {
    let name = &[b"user.", &name[..name.len().min(250)]].concat()[..];
    let mut header = bench.one.header(Kind::SetXattr, inode);
    header.offset.set(name.len() as u64);
    bench.one.append(header, &[name, &vec![b'v'; bytes]])
}

pub fn truncate(bench: &mut Bench, inode: InodeNumber, size: u64) -> bool {
    let mut header = bench.one.header(Kind::Truncate, inode);
    header.offset.set(size);
    bench.one.append(header, &[])
}

fn allocate(bench: &mut Bench, inode: InodeNumber, (offset, bytes): (u64, u64), flags: u8) -> bool {
    let mut header = bench.one.header(Kind::Allocate, inode);
    header.envelope.flags = flags;
    header.offset.set(offset);
    header.extra.set(bytes);
    bench.one.append(header, &[])
}

fn link(bench: &mut Bench, inode: InodeNumber, parent: InodeNumber, name: &[u8]) -> bool {
    let mut header = bench.one.header(Kind::Link, inode);
    header.parent = parent;
    header.extra.set(crate::client::cookie(name));
    bench.one.append(header, &[name])
}

pub fn create(bench: &mut Bench, parent: InodeNumber, name: &[u8], mode: u32) -> bool {
    let (inode, made) = bench.one.create(parent, name, mode);
    bench.files.extend(made.then_some(inode));
    made
}

/// Writes the first blocks of a file in one piece.
fn write_in_order(bench: &mut Bench) {
    let file = bench.files[0];
    for chunk in 0..8 {
        assert!(bench.one.write(file, chunk * 32 * BLOCK, &vec![1; 32 * BLOCK as usize]));
    }
}

/// Directories with a file each, and only then all of their second names: the leaves were filled in order.
fn make_full_leaves(bench: &mut Bench) {
    for index in 0..8000 {
        let (folder, made) =
            bench.one.create(bench.folders[0], format!("d{index}").as_bytes(), DIRECTORY | 0o755);
        assert!(made && bench.one.create(folder, b"first", FILE | 0o644).1);
        bench.files.push(folder);
    }
}

const NOTHING: fn(&mut Bench) = |_| {};

const OF_NAMES: [Records; 12] = [
    Records {
        name: "create",
        prepare: NOTHING,
        append: |bench, number| {
            let name = bench.name(number, 1);
            create(bench, bench.folders[0], &name, FILE | 0o644)
        },
    },
    Records {
        name: "create with the longest names",
        prepare: NOTHING,
        append: |bench, number| {
            let name = bench.name(number, 255);
            create(bench, bench.folders[0], &name, FILE | 0o644)
        },
    },
    Records {
        name: "mkdir, each in another one",
        prepare: NOTHING,
        append: |bench, number| {
            let parents: Vec<_> = bench.files[4..].iter().chain(&bench.folders).copied().collect();
            let parent = *bench.random.of(&parents);
            let name = bench.name(number, 1 + (number % 255) as usize);
            create(bench, parent, &name, DIRECTORY | 0o755)
        },
    },
    Records {
        name: "symlink with the longest target",
        prepare: NOTHING,
        append: |bench, number| {
            let name = bench.name(number, 255);
            bench.one.symlink(bench.folders[0], &name, &[b't'; SYMLINK_BYTES_MAX])
        },
    },
    Records {
        name: "symlink with a target of any length",
        prepare: NOTHING,
        append: |bench, number| {
            let (name, bytes) = (bench.name(number, 1), 1 + bench.random.below(SYMLINK_BYTES_MAX as u64));
            bench.one.symlink(bench.folders[0], &name, &vec![b't'; bytes as usize])
        },
    },
    Records {
        name: "link",
        prepare: NOTHING,
        append: |bench, number| {
            let name = bench.name(number, 255);
            link(bench, bench.files[0], bench.folders[1], &name)
        },
    },
    Records {
        name: "rename to a longer name",
        prepare: |bench| bench.make_files(9000),
        append: |bench, number| {
            let new = bench.name(number, 255);
            let (file, [from, to]) = (bench.files[4 + number as usize], bench.folders);
            bench.one.rename(file, (from, format!("old-{number}").as_bytes()), (to, &new), InodeNumber::NONE)
        },
    },
    Records {
        name: "rename over a file",
        prepare: |bench| bench.make_files(18_000),
        append: |bench, number| {
            let ([from, _], victim) = (bench.folders, number + 9000);
            let (file, replaced) = (bench.files[4 + number as usize], bench.files[4 + victim as usize]);
            let (old, new) = (format!("old-{number}"), format!("old-{victim}"));
            bench.one.rename(file, (from, old.as_bytes()), (from, new.as_bytes()), replaced)
        },
    },
    Records {
        name: "rename that leaves a whiteout, to a longer name",
        prepare: |bench| bench.make_files(9000),
        append: |bench, number| {
            let (new, file) = (bench.name(number, 255), bench.files[4 + number as usize]);
            rename_with_whiteout(bench, file, format!("old-{number}").as_bytes(), &new)
        },
    },
    Records {
        name: "files without a name",
        prepare: NOTHING,
        append: |bench, _| bench.one.create_unnamed(bench.folders[0]).1,
    },
    Records {
        name: "files that get a name later",
        prepare: NOTHING,
        append: |bench, number| {
            let name = bench.name(number, 255);
            let (inode, made) = bench.one.create_unnamed(bench.folders[0]);
            made && link(bench, inode, bench.folders[0], &name)
        },
    },
    Records {
        name: "create where all leaves are full",
        prepare: make_full_leaves,
        append: |bench, number| {
            // One for each leaf that there is, at first.
            let (step, folders) = (11, bench.files.len() as u64 - 4);
            let at = number * step % folders + number * step / folders;
            let folder = bench.files[4 + (at % folders) as usize];
            let name = bench.name(number, 1);
            bench.one.create(folder, &name, FILE | 0o644).1
        },
    },
];

/// A rename that leaves a whiteout.
fn rename_with_whiteout(bench: &mut Bench, inode: InodeNumber, old: &[u8], new: &[u8]) -> bool {
    let ([old_parent, new_parent], uid) = (bench.folders, bench.one.attached.caller.uid.into());
    let body = RenameBody {
        old_parent,
        new_parent,
        old_cookie: crate::client::cookie(old).into(),
        new_cookie: crate::client::cookie(new).into(),
        old_name_bytes: (old.len() as u16).into(),
        new_name_bytes: (new.len() as u16).into(),
        ..RenameBody::new_zeroed()
    };
    let whiteout = WhiteoutBody { inode: bench.one.new_inode(), uid, gid: uid };
    let mut header = bench.one.header(Kind::Rename, inode);
    header.envelope.flags = RENAME_WHITEOUT;
    bench.one.append(header, &[body.as_bytes(), old, new, whiteout.as_bytes()])
}

const OF_ATTRIBUTES: [Records; 7] = [
    Records {
        name: "change of mode",
        prepare: |bench| bench.make_files(4000),
        append: |bench, number| {
            let file = *bench.random.of(&bench.files);
            bench.one.set_mode(file, 0o600 + (number as u32 & 7))
        },
    },
    Records {
        name: "small attributes of one file",
        prepare: NOTHING,
        append: |bench, number| {
            let (name, bytes) = (bench.name(number, 255), bench.random.below(2) as usize * 100);
            xattr(bench, bench.files[0], &name, bytes)
        },
    },
    Records {
        name: "empty attributes, each of another file",
        prepare: |bench| bench.make_files(18_000),
        append: |bench, number| {
            let at = number * 31 % 18_000 + number * 31 / 18_000;
            let name = bench.name(number, 255);
            xattr(bench, bench.files[4 + at as usize], &name, 0)
        },
    },
    Records {
        name: "the largest attribute of a file",
        prepare: |bench| bench.make_files(1000),
        append: |bench, number| xattr(bench, bench.files[4 + number as usize], b"a", XATTR_BYTES_MAX),
    },
    Records {
        name: "attributes that grow",
        prepare: NOTHING,
        append: |bench, number| {
            let name = format!("{}", number % 97);
            xattr(bench, bench.files[0], name.as_bytes(), (number / 97 * 500) as usize)
        },
    },
    Records {
        name: "attributes of any size, again and again",
        prepare: |bench| bench.make_files(20),
        append: |bench, number| {
            let (file, name) = (*bench.random.of(&bench.files), format!("{}", bench.random.below(9)));
            let bytes = bench.random.below(XATTR_BYTES_MAX as u64 + 1) >> bench.random.below(12);
            let _ = number;
            xattr(bench, file, name.as_bytes(), bytes as usize)
        },
    },
    Records {
        name: "attributes of a block and a byte, each of another file",
        prepare: |bench| bench.make_files(4000),
        append: |bench, number| {
            let name = bench.name(number, 255);
            xattr(bench, bench.files[4 + number as usize], &name, 1)
        },
    },
];

const OF_CONTENTS: [Records; 9] = [
    Records {
        name: "single blocks of a large file, anywhere",
        prepare: NOTHING,
        append: |bench, _| {
            let block = bench.random.below(1 << 40);
            bench.one.write(bench.files[0], block * BLOCK, &[1; BLOCK as usize])
        },
    },
    Records {
        name: "single bytes, anywhere",
        prepare: NOTHING,
        append: |bench, _| {
            let at = bench.random.below(1 << 50);
            bench.one.write(bench.files[0], at, b"1")
        },
    },
    Records {
        name: "single bytes, one after the other",
        prepare: NOTHING,
        append: |bench, number| bench.one.write(bench.files[0], number, b"1"),
    },
    Records {
        name: "blocks within extents",
        prepare: write_in_order,
        append: |bench, _| {
            let block = bench.random.below(128) * 2;
            bench.one.write(bench.files[0], block * BLOCK, &[2; BLOCK as usize])
        },
    },
    Records {
        name: "ranges within extents",
        prepare: write_in_order,
        append: |bench, _| {
            let (at, bytes) = (bench.random.below(300 * BLOCK), 1 + bench.random.below(20 * BLOCK));
            bench.one.write(bench.files[0], at, &vec![3; bytes as usize])
        },
    },
    Records {
        name: "a long range",
        prepare: NOTHING,
        append: |bench, number| {
            bench.one.write(bench.files[0], number * 65 * BLOCK, &[4; 64 * BLOCK as usize])
        },
    },
    Records {
        name: "truncate within a block",
        prepare: write_in_order,
        append: |bench, number| {
            let size = 256 * BLOCK - number * 1000;
            truncate(bench, bench.files[0], if number % 3 == 2 { (1 << 40) + 1 } else { size | 1 })
        },
    },
    Records {
        name: "allocate",
        prepare: NOTHING,
        append: |bench, _| {
            let (at, bytes) = (bench.random.below(4000 * BLOCK), 1 + bench.random.below(30 * BLOCK));
            let flags = bench.random.below(2) as u8 * ALLOCATE_KEEP_SIZE;
            allocate(bench, bench.files[0], (at, bytes), flags)
        },
    },
    Records {
        name: "holes, and what fills them",
        prepare: write_in_order,
        append: |bench, number| {
            let (at, bytes) = (bench.random.below(256 * BLOCK), 1 + bench.random.below(3 * BLOCK));
            match number % 2 {
                0 => {
                    let flags = ALLOCATE_KEEP_SIZE | ALLOCATE_PUNCH_HOLE;
                    allocate(bench, bench.files[0], (at, bytes), flags)
                }
                _ => bench.one.write(bench.files[0], at, &vec![5; bytes as usize]),
            }
        },
    },
];

/// Uses up all that can be reserved.
fn use_up(records: &Records, size: Size, seed: u64, foreign: bool) {
    let mut bench = Bench::new(size, seed, foreign);
    let about = |bench: &Bench| {
        format!(
            "{}, {size:?}, seed {seed}, foreign: {foreign}: {:?}",
            records.name,
            bench.daemon.terminations()
        )
    };
    (records.prepare)(&mut bench);
    bench.one.digest(true).unwrap_or_else(|status| panic!("{status:?}: {}", about(&bench)));
    let (nodes, blocks) = bench.usage();
    let mut reserved = 0;
    while let Ok(more) = bench.one.refill(u64::MAX, foreign) {
        reserved += more;
    }
    bench.one.room = Some(reserved);
    let mut count = 0;
    while (records.append)(&mut bench, count) {
        count += 1;
    }
    assert!(bench.one.is_out_of_room, "record {count}: {}", about(&bench));
    assert!(
        bench.one.digest(true).is_ok() && bench.daemon.terminations().is_empty(),
        "after {count}: {}",
        about(&bench)
    );
    let (nodes_now, blocks_now) = bench.usage();
    let taken = (nodes_now.saturating_sub(nodes), blocks_now.saturating_sub(blocks));
    let used = reserved - bench.one.room.unwrap();
    eprintln!(
        "{:60} {:5} nodes {:5} blocks: {count:6} records, reserved {used:6}, nodes {:6}, blocks {:6} {foreign} {:.3}",
        records.name,
        size.nodes,
        size.blocks,
        taken.0,
        taken.1,
        taken.0 as f64 / used as f64
    );
    assert!(taken.0.max(taken.1) <= used, "{used} for {count} records, taken {taken:?}: {}", about(&bench));
}

#[test]
fn for_records_of_names() {
    for records in &OF_NAMES {
        for size in SIZES {
            use_up(records, size, 1, false);
        }
    }
}
#[test]
fn for_records_of_attributes() {
    for records in &OF_ATTRIBUTES {
        for size in SIZES {
            use_up(records, size, 1, false);
        }
    }
}
#[test]
fn for_records_of_contents() {
    for records in &OF_CONTENTS {
        for size in SIZES {
            for foreign in [false, true] {
                use_up(records, size, 1, foreign);
            }
        }
    }
}
