//! Every single operation with its edges: one table, for the tests that crash each of them and compare it with the
//! model.

use super::{
    At, COLLIDING, Op, Step, allocate, at, create, directory, exchange, file, link, punch, rename,
    rename_with_whiteout, rmdir, set_attr, set_xattr, step, symlink, truncate, unlink, unnamed, write,
    write_apart,
};
use format::record::{FileType, SET_ALL, SET_ATIME, SET_GID, SET_MODE, SET_MTIME, SET_UID};

/// One row: the steps before, and the batch that is crashed.
pub struct Case {
    pub name: &'static str,
    /// Batches before it, after those of [`base`].
    pub before: Vec<Vec<Step>>,
    pub batch: Vec<Step>,
    /// The batches gather writes.
    pub gathers: bool,
}

/// The tree at the start of every case: /f with 10,000 bytes and an attribute, /h with a second name /h2, /s a link, /d
/// with the directory e and the file g, /empty.
pub fn base() -> Vec<Step> {
    vec![
        file(10, 1, "f"),
        write(10, 0, 1, 10_000),
        set_xattr(10, "user.a", 3, 100),
        file(11, 1, "h"),
        link(11, 1, "h2"),
        symlink(12, 1, "s", b"target"),
        directory(20, 1, "d"),
        directory(21, 20, "e"),
        file(22, 20, "g"),
        write(22, 0, 9, 100),
        directory(30, 1, "empty"),
    ]
}

fn case(name: &'static str, batch: Vec<Step>) -> Case {
    Case { name, before: Vec::new(), batch, gathers: false }
}

fn after(name: &'static str, before: Vec<Step>, batch: Vec<Step>) -> Case {
    Case { name, before: vec![before], batch, gathers: false }
}

fn unlink_open(inode: u64, parent: u64, name: &str) -> Step {
    step(inode, Op::Unlink { at: at(parent, name), directory: false, keep_open: true })
}

fn in_slot(slot: u64, parent: u64, name: &[u8]) -> At {
    At { slot, ..at(parent, name) }
}

fn many(first: u64, count: u64, parent: u64) -> Vec<Step> {
    (first..first + count).map(|inode| file(inode, parent, format!("many-{inode:04}"))).collect()
}

fn many_gone(first: u64, count: u64, parent: u64) -> Vec<Step> {
    (first..first + count).map(|inode| unlink(inode, parent, format!("many-{inode:04}"))).collect()
}

fn remove_xattr(inode: u64, name: &str) -> Step {
    step(inode, Op::RemoveXattr { name: name.into() })
}

/// All rows.
pub fn all() -> Vec<Case> {
    [contents(), lengths(), ranges(), lists(), creations(), removals(), renames(), attributes(), shapes()]
        .into_iter()
        .flatten()
        .collect()
}

fn contents() -> Vec<Case> {
    vec![
        case("write: first bytes of an empty file", vec![write(11, 0, 7, 100)]),
        case("write: one byte in a block", vec![write(10, 5001, 7, 1)]),
        case("write: not a multiple of eight", vec![write(10, 3, 7, 13)]),
        case("write: across a block's edge", vec![write(10, 4090, 7, 12)]),
        case("write: up to a block's edge", vec![write(10, 4000, 7, 96)]),
        case("write: a whole block over one", vec![write(10, 4096, 7, 4096)]),
        case("write: head, whole blocks, tail", vec![write(10, 4000, 7, 8300)]),
        case("write: append", vec![write(10, 10_000, 7, 200)]),
        case("write: append into a new block", vec![write(10, 10_000, 7, 5000)]),
        case("write: far past the end", vec![write(10, 50_000, 7, 10)]),
        case("write: 32 small ones to one block", {
            (0..32).map(|index| write(11, index * 128, index as u8, 128)).collect()
        }),
        case("write: the same block twice, whole and in part", {
            vec![write(10, 0, 7, 4096), write(10, 10, 8, 10), write(10, 0, 9, 4096), write(10, 1, 5, 2)]
        }),
        case("write: more partly written blocks than are kept", {
            (0..6).map(|index| write(11, index * 4096, 7, 10)).collect()
        }),
    ]
}

fn lengths() -> Vec<Case> {
    vec![
        case("truncate: to nothing", vec![truncate(10, 0)]),
        case("truncate: down to a block's edge", vec![truncate(10, 8192)]),
        case("truncate: down within a block", vec![truncate(10, 4100)]),
        case("truncate: down and up again", vec![truncate(10, 4100), truncate(10, 9000)]),
        case("truncate: up", vec![truncate(10, 30_000)]),
        case("truncate: up from nothing", vec![truncate(11, 12_345)]),
        case("truncate: to its size", vec![truncate(10, 10_000)]),
        after(
            "truncate: up over what was cut off before",
            vec![truncate(10, 5001)],
            vec![truncate(10, 9999)],
        ),
    ]
}

fn ranges() -> Vec<Case> {
    vec![
        case("allocate: behind the end", vec![allocate(10, 20_000, 5000, false)]),
        case("allocate: behind the end, size kept", vec![allocate(10, 20_000, 5000, true)]),
        case("allocate: over what is there", vec![allocate(10, 0, 20_000, false)]),
        after(
            "write: into allocated blocks",
            vec![allocate(11, 0, 20_000, true)],
            vec![write(11, 5000, 7, 4000)],
        ),
        after(
            "truncate: allocated blocks behind the end",
            vec![allocate(10, 10_000, 20_000, true)],
            vec![truncate(10, 9000)],
        ),
        after(
            "write: behind the end, then all that was allocated",
            vec![allocate(11, 0, 16_384, false)],
            vec![write(11, 8192, 7, 4096), write(11, 0, 8, 16_384)],
        ),
        case("punch: whole blocks", vec![punch(10, 4096, 4096)]),
        case("punch: within a block", vec![punch(10, 100, 50)]),
        case("punch: across edges", vec![punch(10, 4000, 4300)]),
        case("punch: over the end", vec![punch(10, 9000, 50_000)]),
        after("punch: allocated blocks", vec![allocate(11, 0, 20_000, true)], vec![punch(11, 4096, 8192)]),
    ]
}

/// /h with 20 blocks in a block list.
fn listed(name: &'static str, batch: Vec<Step>) -> Case {
    let before = vec![vec![write(11, 0, 7, 20 * 4096)], write_apart(11, (0..20).step_by(2), 8)];
    Case { name, before, batch, gathers: true }
}

fn lists() -> Vec<Case> {
    vec![
        Case {
            name: "list: made",
            before: vec![vec![write(11, 0, 7, 20 * 4096)]],
            batch: write_apart(11, (0..20).step_by(2), 8),
            gathers: true,
        },
        listed("list: blocks replaced", write_apart(11, [3, 4, 19], 9)),
        listed("list: blocks replaced in part", vec![write(11, 9 * 4096 - 100, 9, 200)]),
        listed("list: goes on behind", vec![write(11, 20 * 4096, 9, 5000)]),
        listed("list: all of it replaced", write_apart(11, 0..20, 9)),
        listed("list: cut in the middle", vec![punch(11, 7 * 4096, 3 * 4096)]),
        listed("list: cut off within a block", vec![truncate(11, 11 * 4096 + 100)]),
        listed("list: a long write over it", vec![write(11, 4096, 9, 18 * 4096)]),
        listed("list: its file goes", vec![unlink(11, 1, "h"), unlink(11, 1, "h2")]),
    ]
}

fn creations() -> Vec<Case> {
    let long = "n".repeat(255);
    vec![
        case("create: a file", vec![file(40, 20, "new")]),
        case("create: a directory", vec![directory(40, 20, "new")]),
        case("create: a link", vec![symlink(40, 1, "new", b"../somewhere")]),
        case("create: a link with the longest target", vec![symlink(40, 1, "new", &[b'x'; 4095])]),
        case("create: a pipe", vec![create(40, at(1, "new"), FileType::Fifo)]),
        case("create: a socket", vec![create(40, at(1, "new"), FileType::Socket)]),
        case("create: a character device", vec![create(40, at(1, "new"), FileType::CharacterDevice)]),
        case("create: a block device", vec![create(40, at(1, "new"), FileType::BlockDevice)]),
        case("create: the longest name", vec![file(40, 1, long)]),
        after("create: a name of an equal hash", vec![file(40, 1, COLLIDING[0])], {
            vec![create(41, in_slot(1, 1, COLLIDING[1]), FileType::Regular)]
        }),
        case("create: write and name, in one batch", {
            vec![
                file(40, 20, "new.tmp"),
                write(40, 0, 7, 4096),
                rename(40, at(20, "new.tmp"), at(20, "g"), 22),
            ]
        }),
        case("unnamed: a file, written", vec![unnamed(40, 20, true), write(40, 0, 7, 9000)]),
        case("unnamed: never to be linked", vec![unnamed(40, 20, false)]),
        case("unnamed: created and linked", {
            vec![unnamed(40, 20, true), write(40, 0, 7, 5000), link(40, 1, "named")]
        }),
        after("unnamed: linked later", vec![unnamed(40, 20, true), write(40, 0, 7, 100)], {
            vec![link(40, 20, "named")]
        }),
        after("unnamed: linked, and removed again", vec![unnamed(40, 20, true)], {
            vec![link(40, 20, "named"), unlink(40, 20, "named")]
        }),
        after("unnamed: reaped", vec![unnamed(40, 20, true), write(40, 0, 7, 9000)], {
            vec![step(40, Op::Reap { items_max: 1 })]
        }),
        case("link: a second name", vec![link(10, 20, "again")]),
        case("link: a link", vec![link(12, 20, "again")]),
    ]
}

fn removals() -> Vec<Case> {
    vec![
        case("unlink: the last name", vec![unlink(10, 1, "f")]),
        case("unlink: one of two names", vec![unlink(11, 1, "h")]),
        case("unlink: the last name of an open file", vec![unlink_open(10, 1, "f")]),
        after(
            "write: to a file without a name",
            vec![unlink_open(10, 1, "f")],
            vec![write(10, 100, 7, 9000)],
        ),
        after(
            "reap: a file without a name",
            vec![unlink_open(10, 1, "f")],
            vec![{ step(10, Op::Reap { items_max: 1 }) }],
        ),
        case("unlink: a link", vec![unlink(12, 1, "s")]),
        case("rmdir", vec![rmdir(30, 1, "empty")]),
        case("rmdir: open", {
            vec![step(30, Op::Unlink { at: at(1, "empty"), directory: true, keep_open: true })]
        }),
        case("unlink and create the same name", vec![unlink(10, 1, "f"), file(40, 1, "f")]),
    ]
}

fn renames() -> Vec<Case> {
    vec![
        case("rename: in a directory", vec![rename(10, at(1, "f"), at(1, "new"), 0)]),
        case("rename: to another directory", vec![rename(10, at(1, "f"), at(21, "new"), 0)]),
        case("rename: onto a file", vec![rename(10, at(1, "f"), at(20, "g"), 22)]),
        case("rename: onto one of two names", vec![rename(10, at(1, "f"), at(1, "h"), 11)]),
        case(
            "rename: onto an open file",
            vec![{
                let (old, new) = (at(1, "f"), at(20, "g"));
                step(10, Op::Rename { old, new, replaced: 22, exchange: false, keep_open: true, whiteout: 0 })
            }],
        ),
        case("rename: a directory to another one", vec![rename(21, at(20, "e"), at(1, "moved"), 0)]),
        case("rename: a directory onto an empty one", vec![rename(20, at(1, "d"), at(1, "empty"), 30)]),
        case("rename: onto a name of itself", vec![rename(11, at(1, "h"), at(1, "h2"), 11)]),
        case("rename: onto its own name", vec![rename(11, at(1, "h"), at(1, "h"), 11)]),
        case("whiteout: a rename leaves one", {
            vec![rename_with_whiteout(10, at(1, "f"), at(1, "new"), 0, 40)]
        }),
        case("whiteout: in another directory, onto a file", {
            vec![rename_with_whiteout(10, at(1, "f"), at(20, "g"), 22, 40)]
        }),
        case("whiteout: of a directory", vec![rename_with_whiteout(21, at(20, "e"), at(1, "moved"), 0, 40)]),
        case("exchange: two files", vec![exchange(10, at(1, "f"), at(20, "g"), 22)]),
        case("exchange: a file and a directory", vec![exchange(10, at(1, "f"), at(20, "e"), 21)]),
        case("exchange: two directories", vec![exchange(21, at(20, "e"), at(1, "empty"), 30)]),
        case("exchange: in one directory", vec![exchange(10, at(1, "f"), at(1, "d"), 20)]),
        after("rename: to a name of an equal hash", vec![file(40, 1, COLLIDING[0])], {
            vec![rename(10, at(1, "f"), in_slot(1, 1, COLLIDING[1]), 0)]
        }),
    ]
}

fn attributes() -> Vec<Case> {
    let collide = ["user.5a142a5546", "user.5f9e54009d"];
    vec![
        case("attributes: mode", vec![set_attr(10, SET_MODE)]),
        case("attributes: owner", vec![set_attr(10, SET_UID)]),
        case("attributes: group", vec![set_attr(10, SET_GID)]),
        case("attributes: time of access", vec![set_attr(10, SET_ATIME)]),
        case("attributes: time of change", vec![set_attr(10, SET_MTIME)]),
        case("attributes: all, of a directory", vec![set_attr(20, SET_ALL)]),
        case("attributes: none", vec![set_attr(10, 0)]),
        case("xattr: small", vec![set_xattr(22, "user.b", 7, 20)]),
        case("xattr: empty", vec![set_xattr(22, "user.b", 7, 0)]),
        case("xattr: the largest", vec![set_xattr(22, "user.b", 7, 65_536)]),
        case("xattr: replace", vec![set_xattr(10, "user.a", 7, 5000)]),
        after("xattr: a large one by a small one", vec![set_xattr(10, "user.a", 7, 30_000)], {
            vec![set_xattr(10, "user.a", 8, 3)]
        }),
        case("xattr: remove", vec![remove_xattr(10, "user.a")]),
        after("xattr: names of an equal hash", vec![set_xattr(10, collide[0], 1, 1000)], {
            vec![set_xattr(10, collide[1], 2, 1000), remove_xattr(10, collide[0])]
        }),
        after("unlink: a file with large attributes", vec![set_xattr(22, "user.b", 7, 20_000)], {
            vec![unlink(22, 20, "g")]
        }),
    ]
}

fn shapes() -> Vec<Case> {
    vec![
        case("tree: one level more", many(100, 40, 20)),
        after("tree: a node splits in the middle", many(100, 60, 20), many(200, 20, 20)),
        case("tree: names given and taken in one batch", {
            many(100, 40, 20).into_iter().chain(many_gone(100, 20, 20)).collect()
        }),
        after("tree: nodes join, one level less", many(100, 60, 20), many_gone(100, 60, 20)),
        after(
            "segment: one more",
            vec![write(11, 0, 7, 15 * 4096)],
            vec![write(11, 15 * 4096, 8, 10 * 4096)],
        ),
        case("segment: blocks given back and wanted in one batch", {
            vec![truncate(10, 0), write(11, 0, 7, 8192), unlink(22, 20, "g"), write(11, 8192, 8, 8192)]
        }),
        after("segment: all of it given back", vec![write(11, 0, 7, 18 * 4096)], vec![truncate(11, 0)]),
        Case {
            name: "segment: emptied by one user, wanted by another",
            before: vec![vec![write(11, 0, 7, 80 * 4096), file(9000, 1, "his")], vec![truncate(11, 4096)]],
            batch: vec![write(9000, 0, 8, 30 * 4096)],
            gathers: false,
        },
        Case {
            name: "segment: holes left by others are filled",
            before: vec![
                (0..8).map(|index| write(11, index * 2 * 4096, 7, 4096)).collect(),
                (0..4).map(|index| punch(11, index * 4 * 4096, 4096)).collect(),
            ],
            batch: vec![write(22, 0, 8, 8 * 4096)],
            gathers: false,
        },
    ]
}
