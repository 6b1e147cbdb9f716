//! One operation of each kind, with what comes before and after it.

use super::trees::at;
use vfs::conformance::Call;

/// One operation of one program, and what surrounds it. `D` stands for a folder.
pub struct Case {
    pub name: &'static str,
    pub setup: Vec<Call>,
    pub operation: Call,
    /// The calls of the program afterwards.
    pub look: Vec<Call>,
    /// The calls of the other program meanwhile, where there are any.
    pub meanwhile: Vec<Call>,
}

pub const CREATE: i32 = 0o102;
pub const EXCLUSIVE: i32 = 0o302;
pub const APPEND: i32 = 0o2002;
/// `O_TMPFILE` and `O_RDWR`.
pub const UNNAMED: i32 = 0o20_200_002;

/// A call.
pub fn open(slot: usize, path: &str, flags: i32) -> Call {
    Call::Open { slot, path: at(path), flags, mode: 0o644 }
}

/// A call.
pub fn write(slot: usize, byte: u8, bytes: usize) -> Call {
    Call::Write { slot, pieces: vec![vec![byte; bytes]] }
}

/// A call.
pub fn read(slot: usize) -> Call {
    Call::Pread { slot, offset: 0, bytes: 1 << 16 }
}

/// A call.
pub fn stat(path: &str) -> Call {
    Call::Stat { path: at(path), follow: false }
}

/// A call.
pub fn mkdir(path: &str, mode: u32) -> Call {
    Call::Mkdir { path: at(path), mode }
}

/// A call.
pub fn rename(from: &str, to: &str, flags: u32) -> Call {
    Call::Rename { from: at(from), to: at(to), flags }
}

/// Operations of each kind.
pub fn cases() -> Vec<Case> {
    let file = || vec![open(0, "d/f", CREATE), write(0, 1, 5000)];
    let with = |more: Vec<Call>| file().into_iter().chain(more).collect::<Vec<_>>();
    let case = |name, setup, operation, look, meanwhile| Case { name, setup, operation, look, meanwhile };
    let list = || Call::List(at("d"));
    let other = || vec![mkdir("d/other", 0o755)];
    let cut = |size| vec![Call::Truncate { path: at("d/f"), size }];
    vec![
        case(
            "create",
            vec![],
            open(1, "d/n", EXCLUSIVE),
            vec![list(), Call::Fstat(1), write(1, 3, 9)],
            other(),
        ),
        case("mkdir", vec![], mkdir("d/n", 0o700), vec![list(), stat("d/n")], other()),
        case(
            "symlink",
            vec![],
            Call::Symlink { target: "f".to_owned(), path: at("d/n") },
            vec![list(), Call::Readlink(at("d/n"))],
            other(),
        ),
        case(
            "append",
            with(vec![open(1, "d/f", APPEND)]),
            write(1, 2, 700),
            vec![read(0), stat("d/f")],
            cut(100),
        ),
        case(
            "append beside another's",
            with(vec![open(1, "d/f", APPEND)]),
            write(1, 2, 700),
            vec![read(0), stat("d/f")],
            vec![open(4, "d/f", APPEND), write(4, 7, 50), Call::Close(4)],
        ),
        case(
            "write",
            file(),
            Call::Pwrite { slot: 0, offset: 3000, data: vec![2; 3000] },
            vec![read(0), stat("d/f")],
            cut(3500),
        ),
        case(
            "a write longer than a record",
            file(),
            Call::Pwrite { slot: 0, offset: 100, data: vec![2; 60_000] },
            vec![read(0)],
            other(),
        ),
        case("truncate", file(), Call::Ftruncate { slot: 0, size: 10 }, vec![read(0)], other()),
        case(
            "open and truncate",
            file(),
            open(1, "d/f", CREATE | 0o1000),
            vec![read(1), Call::Close(1), read(0)],
            other(),
        ),
        case(
            "rename",
            with(vec![open(1, "d/g", CREATE)]),
            rename("d/f", "d/g", 0),
            vec![list(), read(0)],
            other(),
        ),
        case(
            "exchange",
            with(vec![open(1, "d/g", CREATE)]),
            rename("d/f", "d/g", 2),
            vec![list(), stat("d/f")],
            other(),
        ),
        case(
            "link",
            file(),
            Call::Link { from: at("d/f"), to: at("d/l"), follow: false },
            vec![list(), stat("d/f")],
            other(),
        ),
        case(
            "rename with a whiteout",
            with(vec![open(1, "d/g", CREATE)]),
            rename("d/f", "d/g", 4),
            vec![list(), stat("d/f"), read(0)],
            other(),
        ),
        case(
            "create without a name",
            vec![],
            open(1, "d", UNNAMED),
            vec![list(), write(1, 3, 9), Call::LinkFile { slot: 1, to: at("d/n") }, stat("d/n")],
            other(),
        ),
        case(
            "link of a file without a name",
            vec![open(0, "d", UNNAMED), write(0, 1, 5000)],
            Call::LinkFile { slot: 0, to: at("d/n") },
            vec![list(), read(0), stat("d/n")],
            other(),
        ),
        case("unlink", file(), Call::Unlink(at("d/f")), vec![list(), read(0), Call::Fstat(0)], other()),
        case("rmdir", vec![mkdir("d/n", 0o755)], Call::Rmdir(at("d/n")), vec![list()], other()),
        case("chmod", file(), Call::Chmod { path: at("d/f"), mode: 0o600 }, vec![stat("d/f")], other()),
        case(
            "an attribute",
            file(),
            Call::SetXattr { path: at("d/f"), name: "user.x".to_owned(), value: vec![4; 300], flags: 1 },
            vec![Call::GetXattr { path: at("d/f"), name: "user.x".to_owned() }],
            other(),
        ),
        case("fsync", file(), Call::Fsync(0), vec![read(0)], other()),
        case("read", file(), read(0), vec![stat("d/f")], cut(100)),
        case("stat", file(), stat("d/f"), vec![read(0)], cut(100)),
        case(
            "read of blocks that are used again",
            file(),
            read(0),
            vec![stat("d/f")],
            vec![
                Call::Truncate { path: at("d/f"), size: 0 },
                open(4, "d/g", CREATE),
                write(4, 9, 15_000),
                write(4, 9, 15_000),
                Call::Close(4),
            ],
        ),
        case("list", file(), list(), vec![read(0)], other()),
        case(
            "a file without a name",
            with(vec![Call::Unlink(at("d/f"))]),
            write(0, 2, 100),
            vec![read(0), Call::Fstat(0), list()],
            other(),
        ),
    ]
    .into_iter()
    .chain(lock_cases())
    .collect()
}

/// Operations on locks: a call, or decided by the program.
fn lock_cases() -> Vec<Case> {
    let file = || vec![open(0, "d/f", CREATE), write(0, 1, 5000)];
    let with = |more: Vec<Call>| file().into_iter().chain(more).collect::<Vec<_>>();
    let case = |name, setup, operation, look, meanwhile| Case { name, setup, operation, look, meanwhile };
    let other = || vec![mkdir("d/other", 0o755)];
    vec![
        case(
            "a lock",
            file(),
            Call::Flock { slot: 0, kind: 2 },
            vec![open(2, "d/f", CREATE), Call::Flock { slot: 2, kind: 1 }],
            other(),
        ),
        case(
            "a lock that is held",
            with(vec![Call::Flock { slot: 0, kind: 2 }]),
            write(0, 2, 100),
            vec![open(2, "d/f", CREATE), Call::Flock { slot: 2, kind: 1 }],
            other(),
        ),
        case(
            "an unlock",
            with(vec![Call::Flock { slot: 0, kind: 2 }]),
            Call::Flock { slot: 0, kind: 0 },
            vec![open(2, "d/f", CREATE), Call::Flock { slot: 2, kind: 1 }],
            other(),
        ),
        // From the second lock on the process decides by itself.
        case(
            "a lock that another one takes",
            with(vec![Call::Flock { slot: 0, kind: 2 }, Call::Flock { slot: 0, kind: 0 }]),
            Call::Flock { slot: 0, kind: 2 },
            vec![open(2, "d/f", CREATE), Call::Flock { slot: 2, kind: 1 }, Call::Flock { slot: 0, kind: 1 }],
            vec![open(4, "d/f", CREATE), Call::Flock { slot: 4, kind: 2 }],
        ),
        case(
            "an unlock that another one waits for",
            with(vec![Call::Flock { slot: 0, kind: 1 }, Call::Flock { slot: 0, kind: 2 }]),
            Call::Flock { slot: 0, kind: 0 },
            vec![Call::Flock { slot: 0, kind: 1 }],
            vec![open(4, "d/f", CREATE), Call::Flock { slot: 4, kind: 2 }],
        ),
        case(
            "a lock cut in two",
            with(vec![range(0, 2, 0, 50), range(0, 2, 50, 50)]),
            range(0, 0, 40, 20),
            vec![open(2, "d/f", CREATE), range(2, 2, 40, 20), range(2, 1, 39, 1), range(2, 1, 60, 1)],
            vec![open(4, "d/f", CREATE), range(4, 2, 45, 1), range(4, 1, 0, 1)],
        ),
        case(
            "a close that ends a lock",
            with(vec![open(1, "d/f", CREATE), range(1, 2, 0, 0), range(1, 1, 0, 10)]),
            Call::Close(1),
            vec![range(0, 2, 0, 0)],
            vec![open(4, "d/f", CREATE), range(4, 2, 5, 1)],
        ),
    ]
}

/// A call: a lock of the description's, of a kind, from an offset on.
fn range(slot: usize, kind: u8, start: i64, bytes: i64) -> Call {
    Call::OfdLock { slot, kind, start, bytes }
}
