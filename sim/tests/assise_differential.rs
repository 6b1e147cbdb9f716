//! Random calls, made by processes at LibFS over SharedFS and at `vfs`'s model: every answer is the same, and so
//! are the trees at the end, also after the daemon was killed and recovered from its pool. Logs are tiny, so that
//! they wrap, are digested and grow all the time. The processes are root's, acting for users as a mount does, or each is
//! another user's, and the daemon dies in between.
//!
//! `ASSISE_CASES` sets the number of histories.

mod assise_local;

use assise_local::trees::{process, whole_tree};
use assise_local::{Node, tiny};
use libfs::{LibFs, Limits};
use proptest::prelude::*;
use proptest::test_runner::{Config as ProptestConfig, TestRunner};
use sharedfs::Config;
use std::sync::Arc;
use vfs::conformance::{Actor, Call, Path};
use vfs::{Caller, Model};

/// One step of a history.
#[derive(Clone, Debug)]
enum Step {
    /// A call of one of the two processes.
    Call(usize, Call),
    /// The daemon digests everything and removes what has no name.
    Tidy,
    /// The daemon dies, and another one takes its place.
    Restart,
}

const O_TMPFILE: i32 = 0o20_200_000;

const NAMES: [&str; 4] = ["a", "b", "c", "dd"];

fn path() -> impl Strategy<Value = Path> {
    let name = prop::sample::select(&NAMES[..]);
    let parts = prop::collection::vec(name, 1..4).prop_map(|parts| parts.join("/"));
    let odd = prop::sample::select(&["a/..", "a/.", "/", "b/../a", "c/"][..]).prop_map(str::to_owned);
    let base = prop_oneof![9 => Just(None), 1 => (0..3usize).prop_map(Some)];
    (base, prop_oneof![12 => parts, 1 => odd]).prop_map(|(base, path)| Path { base, path })
}

fn data() -> impl Strategy<Value = Vec<u8>> {
    let bytes = prop_oneof![4 => 1..200usize, 3 => 3000..9000usize, 1 => 15_000..40_000usize];
    (bytes, any::<u8>())
        .prop_map(|(bytes, seed)| (0..bytes).map(|at| (at as u8).wrapping_mul(7) ^ seed).collect())
}

fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0..300u64, 3 => 0..20_000u64, 1 => 60_000..70_000u64]
}

fn flags() -> impl Strategy<Value = i32> {
    // O_RDONLY, O_WRONLY, O_RDWR with O_CREAT 0o100, O_EXCL 0o200, O_TRUNC 0o1000, O_APPEND 0o2000.
    let access = prop::sample::select(&[0, 1, 2, 2, 2][..]);
    let create = prop::sample::select(&[0, 0o100, 0o100, 0o300][..]);
    let more = prop::sample::select(&[0, 0, 0o1000, 0o2000][..]);
    (access, create, more).prop_map(|(access, create, more)| access | create | more)
}

fn on_files() -> impl Strategy<Value = Call> {
    let slot = 0..3usize;
    prop_oneof![
        1 => (slot.clone(), path(), prop::sample::select(&[2, 0o202][..])).prop_map(|(slot, path, flags)| Call::Open {
            slot,
            path: Path { path: path.path.trim_end_matches(|last| last != '/').to_owned() + ".", ..path },
            flags: O_TMPFILE | flags,
            mode: 0o640,
        }),
        4 => (slot.clone(), path(), flags()).prop_map(|(slot, path, flags)| Call::Open { slot, path, flags, mode: 0o666 }),
        1 => slot.clone().prop_map(Call::Close),
        3 => (slot.clone(), data()).prop_map(|(slot, data)| Call::Write { slot, pieces: vec![data.clone(), data] }),
        5 => (slot.clone(), offset(), data()).prop_map(|(slot, offset, data)| Call::Pwrite { slot, offset, data }),
        5 => (slot.clone(), offset(), 1..30_000usize).prop_map(|(slot, offset, bytes)| Call::Pread { slot, offset, bytes }),
        2 => (slot.clone(), -10..30_000i64).prop_map(|(slot, size)| Call::Ftruncate { slot, size }),
        1 => (path(), 0..30_000i64).prop_map(|(path, size)| Call::Truncate { path, size }),
        1 => (slot.clone(), prop::sample::select(&[0, 1, 3][..]), offset(), 1..20_000u64)
            .prop_map(|(slot, mode, offset, bytes)| Call::Fallocate { slot, mode, offset, bytes }),
        1 => slot.clone().prop_map(Call::Fsync),
        2 => slot.clone().prop_map(Call::Fstat),
        1 => (slot, -100..100i64, 0..3).prop_map(|(slot, by, whence)| Call::Lseek { slot, by, whence }),
    ]
}

fn on_names() -> impl Strategy<Value = Call> {
    let rename_flags = prop::sample::select(&[0, 0, 0, 1, 2, 4, 5][..]);
    prop_oneof![
        4 => (path(), prop::sample::select(&[0o755, 0o777, 0o1777, 0o2775][..])).prop_map(|(path, mode)| Call::Mkdir { path, mode }),
        1 => path().prop_map(Call::Rmdir),
        3 => path().prop_map(Call::Unlink),
        5 => (path(), path(), rename_flags).prop_map(|(from, to, flags)| Call::Rename { from, to, flags }),
        2 => (path(), path()).prop_map(|(from, to)| Call::Link { from, to, follow: false }),
        2 => (0..3usize, path()).prop_map(|(slot, to)| Call::LinkFile { slot, to }),
        1 => (path(), path()).prop_map(|(target, path)| Call::Symlink { target: target.path, path }),
        1 => path().prop_map(Call::Readlink),
        4 => (path(), any::<bool>()).prop_map(|(path, follow)| Call::Stat { path, follow }),
        2 => path().prop_map(Call::List),
    ]
}

fn on_attributes() -> impl Strategy<Value = Call> {
    let id = prop::option::of(prop::sample::select(&[0u32, 101, 102][..]));
    let name = prop::sample::select(&["user.a", "user.b", "trusted.c"][..]).prop_map(str::to_owned);
    let user = prop::sample::select(&[0u32, 0, 101, 102][..]);
    prop_oneof![
        3 => (path(), prop::sample::select(&[0o600, 0o644, 0o4755, 0o2771, 0o777, 0][..]))
            .prop_map(|(path, mode)| Call::Chmod { path, mode }),
        1 => (path(), id.clone(), id).prop_map(|(path, uid, gid)| Call::Chown { path, uid, gid, follow: false }),
        2 => (path(), name.clone(), prop::collection::vec(any::<u8>(), 0..3000), 0..3)
            .prop_map(|(path, name, value, flags)| Call::SetXattr { path, name, value, flags }),
        2 => (path(), name.clone()).prop_map(|(path, name)| Call::GetXattr { path, name }),
        1 => (path(), name).prop_map(|(path, name)| Call::RemoveXattr { path, name }),
        1 => path().prop_map(Call::ListXattrs),
        2 => user.prop_map(|uid| Call::User { uid, gid: uid, groups: vec![500] }),
    ]
}

fn steps(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let call = prop_oneof![6 => on_files(), 5 => on_names(), 2 => on_attributes()];
    let step = prop_oneof![
        30 => (0..2usize, call).prop_map(|(who, call)| Step::Call(who, call)),
        1 => Just(Step::Tidy),
    ];
    prop::collection::vec(step, 1..length)
}

fn limits() -> Limits {
    Limits {
        refill_blocks: 256,
        refill_inodes: 64,
        nodes: 4,
        entries: 4,
        purge_steps: 2,
        ..Limits::default()
    }
}

/// Plays a history with so many sessions (1 or 2) for its two processes.
fn play(history: &[Step], sessions: usize) -> Result<(), TestCaseError> {
    play_on(&Node::new(tiny()), history, sessions)
}

fn play_on(node: &Arc<Node>, history: &[Step], sessions: usize) -> Result<(), TestCaseError> {
    let engines: Vec<Arc<LibFs>> =
        (0..sessions).map(|_| Arc::new(node.attach(Caller::ROOT, limits()).0)).collect();
    play_by(node, history, [0, sessions - 1].map(|session| engines[session].clone()).to_vec(), &[])
}

/// Plays a history of processes each of which has a session of its own, as its user.
fn play_as(users: &[Caller], history: &[Step]) -> Result<(), TestCaseError> {
    let node = Node::new(tiny());
    let engines = users.iter().map(|user| Arc::new(node.attach(user.clone(), limits()).0)).collect();
    play_by(&node, history, engines, users)
}

fn restart(node: &Arc<Node>) {
    let ended = node.daemon().expect("it runs").terminations();
    assert!(ended.is_empty(), "an honest LibFS was cut: {ended:?}");
    node.kill();
    node.start();
}

fn play_by(
    node: &Arc<Node>,
    history: &[Step],
    engines: Vec<Arc<LibFs>>,
    users: &[Caller],
) -> Result<(), TestCaseError> {
    let clock = node.host.clone();
    let model = Arc::new(Model::new(Arc::new(move || clock.wall()), vfs::model::Limits::default()));
    let mut expected: Vec<_> = (1..).take(engines.len()).map(|id| process(model.clone(), id)).collect();
    let mut real: Vec<_> = (1..).zip(&engines).map(|(id, engine)| process(engine.clone(), id)).collect();
    if !users.is_empty() {
        let open_to_all = Call::Chmod { path: Path { base: None, path: ".".to_owned() }, mode: 0o777 };
        prop_assert_eq!(real[0].call(&open_to_all), expected[0].call(&open_to_all));
    }
    for (user, who) in users.iter().zip(0..) {
        let Caller { uid, gid, groups } = user.clone();
        let user = Call::User { uid, gid, groups };
        prop_assert_eq!(real[who].call(&user), expected[who].call(&user));
    }
    // With open files from the start, most calls have something to do.
    let opened = (0..6usize).map(|number| {
        let path = Path { base: None, path: NAMES[number % 3].to_owned() };
        Step::Call(number / 3, Call::Open { slot: number % 3, path, flags: 0o102, mode: 0o666 })
    });
    let opened: Vec<Step> = opened.collect();
    for (number, step) in opened.iter().chain(history).enumerate() {
        match step {
            Step::Call(who, call) => {
                let (wanted, found) = (expected[*who].call(call), real[*who].call(call));
                let told = format!("step {number}, process {who}: {call:?}");
                prop_assert_eq!(&found, &wanted, "{}", told);
            }
            Step::Tidy => node.tidy(),
            Step::Restart => restart(node),
        }
    }
    node.tidy();
    let wanted = whole_tree(&mut expected[0]);
    for real in real.iter_mut().filter(|_| users.is_empty()) {
        prop_assert_eq!(&whole_tree(real), &wanted);
    }
    // Whatever was done is there after a crash of the daemon and all its processes.
    drop(real);
    node.kill();
    drop(engines);
    node.start();
    let (libfs, _) = node.attach(Caller::ROOT, limits());
    let recovered = whole_tree(&mut process(Arc::new(libfs), 3));
    prop_assert_eq!(&recovered, &wanted, "after recovery");
    Ok(())
}

/// Few files, so that users meet.
fn file() -> impl Strategy<Value = Path> {
    prop::sample::select(&["a", "b", "c"][..]).prop_map(|path| Path { base: None, path: path.to_owned() })
}

/// Calls of users at each other's files.
fn on_rights() -> impl Strategy<Value = Call> {
    let mode = || prop::sample::select(&[0o600, 0o644, 0o666, 0o660, 0o444, 0o400, 0][..]);
    let slot = 0..3usize;
    prop_oneof![
        4 => (slot.clone(), file(), flags(), mode())
            .prop_map(|(slot, path, flags, mode)| Call::Open { slot, path, flags, mode }),
        2 => (file(), mode()).prop_map(|(path, mode)| Call::Chmod { path, mode }),
        1 => (slot.clone(), mode()).prop_map(|(slot, mode)| Call::Fchmod { slot, mode }),
        2 => (slot.clone(), data()).prop_map(|(slot, data)| Call::Write { slot, pieces: vec![data] }),
        2 => (slot, offset(), 1..30_000usize).prop_map(|(slot, offset, bytes)| Call::Pread { slot, offset, bytes }),
        1 => (file(), 0..8).prop_map(|(path, wanted)| Call::Access { path, wanted }),
    ]
}

fn on_owners() -> impl Strategy<Value = Call> {
    let id = || prop::option::of(prop::sample::select(&[0u32, 101, 102][..]));
    (file(), id(), id()).prop_map(|(path, uid, gid)| Call::Chown { path, uid, gid, follow: false })
}

fn steps_of_users(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let call =
        prop_oneof![12 => on_rights(), 2 => on_files(), 2 => on_names(), 1 => file().prop_map(Call::Unlink)];
    let step = prop_oneof![
        30 => (0..3usize, call).prop_map(|(who, call)| Step::Call(who, call)),
        4 => on_owners().prop_map(|call| Step::Call(0, call)),
        1 => Just(Step::Tidy),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec(step, 1..length)
}

fn cases(standard: u32) -> u32 {
    std::env::var("ASSISE_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(standard)
}

fn compare(sessions: usize) {
    let config = ProptestConfig { cases: cases(60), failure_persistence: None, ..ProptestConfig::default() };
    let result = TestRunner::new(config).run(&steps(120), |history| play(&history, sessions));
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

#[test]
fn one_session_is_like_the_model() {
    compare(1);
}

#[test]
fn two_sessions_are_like_the_model() {
    compare(2);
}

#[test]
fn sessions_of_three_users_are_like_the_model_whenever_the_daemon_dies() {
    let user = |uid: u32| Caller { uid, gid: uid, groups: vec![500] };
    let users = [Caller::ROOT, user(101), user(102)];
    let config = ProptestConfig { cases: cases(60), failure_persistence: None, ..ProptestConfig::default() };
    let result = TestRunner::new(config).run(&steps_of_users(120), |history| play_as(&users, &history));
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

/// The process made the file in its former session, and opened it again when it was not its own any more.
#[test]
fn a_file_of_a_former_session_stays_open_when_its_name_goes() {
    let path = |path: &str| Path { base: None, path: path.to_owned() };
    let open = |slot, name: &str, flags| Call::Open { slot, path: path(name), flags, mode: 0o644 };
    let history = vec![
        Step::Call(1, open(2, "made", 0o100)),
        Step::Call(0, Call::Chown { path: path("made"), uid: None, gid: None, follow: false }),
        Step::Call(1, open(2, "other", 0o101)),
        Step::Call(1, open(0, "made", 0)),
        Step::Restart,
        Step::Call(0, open(0, "b", 0)),
        Step::Call(1, Call::Ftruncate { slot: 2, size: 0 }),
        Step::Call(0, Call::Unlink(path("made"))),
        Step::Tidy,
        Step::Call(1, Call::Fchmod { slot: 0, mode: 0o600 }),
        Step::Call(1, Call::Fstat(0)),
    ];
    play_as(&[Caller::ROOT, Caller { uid: 101, gid: 101, groups: Vec::new() }], &history).unwrap();
}

/// A listing tells numbers of inodes that the process has no lease on; the next call takes one by the name.
#[test]
fn what_was_only_listed_is_removed_and_renamed() {
    let path = |path: &str| Path { base: None, path: path.to_owned() };
    let mut history = vec![Call::Mkdir { path: path("a"), mode: 0o777 }];
    for name in ["a/a", "a/b", "a/c", "a/dd"] {
        history.push(Call::Mkdir { path: path(name), mode: 0o777 });
    }
    let mut history: Vec<_> = history.into_iter().map(|call| Step::Call(0, call)).collect();
    let listed = [
        Call::List(path("a")),
        Call::Rmdir(path("a/a")),
        Call::Rename { from: path("a/b"), to: path("a/c"), flags: 0 },
        Call::Open { slot: 0, path: path("a/dd"), flags: 0o100, mode: 0o666 },
        Call::List(path("a")),
    ];
    history.extend(listed.map(|call| Step::Call(1, call)));
    // Inodes that the listing met are forgotten at once.
    let node = Node::new(Config { known_max: 1, ..tiny() });
    play_on(&node, &history, 2).unwrap();
}
