//! Random calls: few names, few users and few slots, so that calls meet.

use libc::c_int;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use vfs::conformance::{Call, Path};

const SLOTS: usize = 4;

fn slot() -> impl Strategy<Value = usize> {
    0..SLOTS
}

/// A path of few components, with all that paths may have in them.
fn path() -> impl Strategy<Value = Path> {
    let plain = || select(vec!["a", "b", "c"]);
    let odd = select(vec![".", "..", "a/", "b/", "a//b", "./c", "b/.", "c/..", "a/..", "l", "m", ""]);
    let component = prop_oneof![8 => plain().prop_map(str::to_string), 1 => odd.prop_map(str::to_string)];
    let path = prop_oneof![
        6 => plain().prop_map(str::to_string),
        8 => vec(component, 1..4).prop_map(|parts| parts.join("/")),
        1 => Just(format!("a/{}", "n".repeat(255))),
        1 => Just("n".repeat(256)),
        1 => Just(format!("a/{}", "n".repeat(256))),
    ];
    let base = prop_oneof![8 => Just(None), 1 => slot().prop_map(Some)];
    // A path that begins with a slash begins elsewhere for the kernel.
    (base, path).prop_map(|(base, path)| Path { base, path: path.trim_start_matches('/').to_string() })
}

/// A path from the root, for calls without a form for directories.
fn root_path() -> impl Strategy<Value = Path> {
    path().prop_map(|path| Path { base: None, ..path }).prop_filter("not empty", |path| !path.path.is_empty())
}

fn mode() -> impl Strategy<Value = u32> {
    prop_oneof![3 => Just(0o755), 2 => Just(0o644), 1 => Just(0o777), 3 => 0..0o10000_u32]
}

fn open_flags() -> impl Strategy<Value = c_int> {
    let access = select(vec![libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR, libc::O_RDWR]);
    let more = vec![
        (libc::O_CREAT, 0.6),
        (libc::O_EXCL, 0.15),
        (libc::O_TRUNC, 0.2),
        (libc::O_APPEND, 0.2),
        (libc::O_DIRECTORY, 0.15),
        (libc::O_NOFOLLOW, 0.15),
        (libc::O_PATH, 0.08),
        (libc::O_NOATIME, 0.05),
        (libc::O_SYNC, 0.05),
        (libc::O_TMPFILE, 0.15),
    ];
    let flags: Vec<_> = more
        .into_iter()
        .map(|(flag, weight)| proptest::bool::weighted(weight).prop_map(move |on| if on { flag } else { 0 }))
        .collect();
    (access, flags).prop_map(|(access, flags)| flags.into_iter().fold(access, |all, flag| all | flag))
}

fn open() -> impl Strategy<Value = Call> {
    (slot(), path(), open_flags(), mode()).prop_map(|(slot, path, flags, mode)| Call::Open {
        slot,
        path,
        flags,
        mode,
    })
}

fn make() -> impl Strategy<Value = Call> {
    let types =
        [libc::S_IFREG, libc::S_IFREG, 0, libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFCHR, libc::S_IFDIR];
    prop_oneof![
        4 => (path(), mode()).prop_map(|(path, mode)| Call::Mkdir { path, mode }),
        2 => (path(), mode(), select(types.to_vec())).prop_map(|(path, mode, kind)| Call::Mknod {
            path,
            mode: mode | kind,
            // Device 0 is a whiteout.
            device: if kind == libc::S_IFCHR && mode & 1 == 0 { 0x103 } else { 0 },
        }),
        2 => (select(vec!["a", "b", "c", "a/b", "l", "m", "../a", ".", "a/", "none", "/outside", ""]), path())
            .prop_map(|(target, path)| Call::Symlink { target: target.to_string(), path }),
        2 => (select(vec!["a", "b", "c/a", "m", "a/b/"]), select(vec!["l", "m", "a/l"])).prop_map(
            |(target, path)| Call::Symlink {
                target: target.to_string(),
                path: Path { base: None, path: path.to_string() }
            }
        ),
    ]
}

fn move_or_remove() -> impl Strategy<Value = Call> {
    let flags = select(vec![0, 0, 0, 0, 1_u32, 2, 3, 4, 4, 5, 6]);
    prop_oneof![
        5 => (path(), path(), flags).prop_map(|(from, to, flags)| Call::Rename { from, to, flags }),
        2 => (path(), path(), any::<bool>()).prop_map(|(from, to, follow)| Call::Link { from, to, follow }),
        2 => (slot(), path()).prop_map(|(slot, to)| Call::LinkFile { slot, to }),
        2 => path().prop_map(Call::Unlink),
        2 => path().prop_map(Call::Rmdir),
    ]
}

fn look() -> impl Strategy<Value = Call> {
    prop_oneof![
        (path(), any::<bool>()).prop_map(|(path, follow)| Call::Stat { path, follow }),
        slot().prop_map(Call::Fstat),
        path().prop_map(Call::List),
        path().prop_map(Call::Readlink),
        (path(), 0..8).prop_map(|(path, wanted)| Call::Access { path, wanted }),
    ]
}

fn descriptors() -> impl Strategy<Value = Call> {
    prop_oneof![
        slot().prop_map(Call::Close),
        (slot(), slot()).prop_map(|(from, to)| Call::Dup { from, to }),
        slot().prop_map(Call::Fsync),
    ]
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0..100_u64,
        3 => 4000..4200_u64,
        2 => 0..40_000_u64,
        1 => select(vec![4096, 8192, 12_288, 1 << 20])
    ]
}

fn data() -> impl Strategy<Value = Vec<u8>> {
    let count = prop_oneof![4 => 0..20_usize, 2 => 4000..4200_usize, 1 => 0..20_000_usize];
    (count, any::<u8>()).prop_map(|(count, first)| (0..count).map(|i| first.wrapping_add(i as u8)).collect())
}

fn contents() -> impl Strategy<Value = Call> {
    let seeks = [libc::SEEK_SET, libc::SEEK_CUR, libc::SEEK_END, libc::SEEK_DATA, libc::SEEK_HOLE];
    let allocations =
        [0, libc::FALLOC_FL_KEEP_SIZE, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 2, 8];
    prop_oneof![
        2 => (slot(), 0..9000_usize).prop_map(|(slot, bytes)| Call::Read { slot, bytes }),
        2 => (slot(), size(), 0..9000_usize)
            .prop_map(|(slot, offset, bytes)| Call::Pread { slot, offset, bytes }),
        4 => (slot(), vec(data(), 0..3)).prop_map(|(slot, pieces)| Call::Write { slot, pieces }),
        3 => (slot(), size(), data()).prop_map(|(slot, offset, data)| Call::Pwrite { slot, offset, data }),
        3 => (slot(), -50..20_000_i64, select(seeks.to_vec()))
            .prop_map(|(slot, by, whence)| Call::Lseek { slot, by, whence }),
        1 => (root_path(), size()).prop_map(|(path, size)| Call::Truncate { path, size: size as i64 }),
        1 => (root_path(), Just(-1)).prop_map(|(path, size)| Call::Truncate { path, size }),
        2 => (slot(), size()).prop_map(|(slot, size)| Call::Ftruncate { slot, size: size as i64 }),
        3 => (slot(), select(allocations.to_vec()), size(), size()).prop_map(|(slot, mode, offset, bytes)| {
            Call::Fallocate { slot, mode, offset, bytes }
        }),
    ]
}

fn user() -> impl Strategy<Value = Call> {
    let users = vec![
        (0, 0, vec![]),
        (0, 0, vec![]),
        (101, 201, vec![]),
        (101, 201, vec![202, 203]),
        (102, 202, vec![]),
        (102, 202, vec![201]),
        (103, 203, vec![]),
    ];
    select(users).prop_map(|(uid, gid, groups)| Call::User { uid, gid, groups })
}

fn id() -> impl Strategy<Value = Option<u32>> {
    select(vec![None, Some(0), Some(101), Some(102), Some(201), Some(202), Some(203)])
}

fn time() -> impl Strategy<Value = (i64, i64)> {
    select(vec![
        (0, libc::UTIME_NOW),
        (0, libc::UTIME_OMIT),
        (5, 6),
        (77, 999_999_999),
        (-3, 5),
        (0, 1_000_000_000),
    ])
}

fn rights() -> impl Strategy<Value = Call> {
    let names = ["user.x", "user.y", "user.", "trusted.x", "other.x", "system.x"];
    let name = || select(names.to_vec()).prop_map(str::to_string);
    prop_oneof![
        6 => user(),
        4 => (path(), mode()).prop_map(|(path, mode)| Call::Chmod { path, mode }),
        1 => (slot(), mode()).prop_map(|(slot, mode)| Call::Fchmod { slot, mode }),
        4 => (path(), id(), id(), any::<bool>())
            .prop_map(|(path, uid, gid, follow)| Call::Chown { path, uid, gid, follow }),
        2 => (path(), time(), time(), any::<bool>())
            .prop_map(|(path, atime, mtime, follow)| Call::Utimens { path, atime, mtime, follow }),
        1 => (0..0o1000_u32).prop_map(Call::Umask),
        1 => (root_path(), name(), 0..3).prop_map(|(path, name, flags)| Call::SetXattr {
            path,
            name,
            value: b"value".to_vec(),
            flags
        }),
        1 => (root_path(), name()).prop_map(|(path, name)| Call::GetXattr { path, name }),
        1 => (root_path(), name()).prop_map(|(path, name)| Call::RemoveXattr { path, name }),
        1 => root_path().prop_map(Call::ListXattrs),
    ]
}

/// A root directory that every user may write, with some entries.
fn shared_root() -> Vec<Call> {
    let path = |path: &str| Path { base: None, path: path.to_string() };
    vec![
        Call::Chmod { path: path("."), mode: 0o1777 },
        Call::User { uid: 101, gid: 201, groups: vec![] },
        Call::Mkdir { path: path("a"), mode: 0o777 },
        Call::Chmod { path: path("a"), mode: 0o777 },
        Call::User { uid: 102, gid: 202, groups: vec![] },
        Call::Mkdir { path: path("b"), mode: 0o755 },
    ]
}

pub fn about_names() -> impl Strategy<Value = Vec<Call>> {
    let call = prop_oneof![3 => open(), 5 => make(), 6 => move_or_remove(), 3 => look(), 1 => descriptors()];
    vec(call, 1..60)
}

pub fn about_contents() -> impl Strategy<Value = Vec<Call>> {
    let file = select(vec!["a", "b"]).prop_map(|name| Path { base: None, path: name.to_string() });
    let open_file = (slot(), file, open_flags()).prop_map(|(slot, path, flags)| Call::Open {
        slot,
        path,
        flags: flags & !(libc::O_DIRECTORY | libc::O_PATH | libc::O_EXCL),
        mode: 0o644,
    });
    let call = prop_oneof![4 => open_file, 1 => open(), 14 => contents(), 2 => look(), 1 => descriptors()];
    vec(call, 1..60)
}

pub fn about_rights() -> impl Strategy<Value = Vec<Call>> {
    let call = prop_oneof![
        4 => open(),
        4 => make(),
        5 => move_or_remove(),
        3 => look(),
        8 => rights(),
        2 => contents(),
        1 => descriptors()
    ];
    (any::<bool>(), vec(call, 1..60)).prop_map(|(shared, calls)| {
        let mut all = if shared { shared_root() } else { Vec::new() };
        all.extend(calls);
        all
    })
}

pub fn about_locks() -> impl Strategy<Value = Vec<Call>> {
    let open = (slot(), select(vec!["a", "b"]), select(vec![libc::O_RDWR, libc::O_RDWR, libc::O_RDONLY]));
    let call = prop_oneof![
        3 => open.prop_map(|(slot, name, flags)| Call::Open {
            slot,
            path: Path { base: None, path: name.to_string() },
            flags: flags | libc::O_CREAT,
            mode: 0o644
        }),
        3 => (slot(), 0..3_u8).prop_map(|(slot, kind)| Call::Flock { slot, kind }),
        8 => (slot(), 0..3_u8, -3..20_i64, -5..20_i64)
            .prop_map(|(slot, kind, start, bytes)| Call::OfdLock { slot, kind, start, bytes }),
        1 => descriptors(),
    ];
    vec(call, 1..60)
}
