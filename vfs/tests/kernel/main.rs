//! The model engine against the kernel's tmpfs: the same calls by the same users must give the same results, error
//! numbers included, leave the same trees and change the same times.
//!
//! `VFS_DIFFERENTIAL_CASES` sets the number of random sequences (default 200).

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

mod actor;
mod calls;

use actor::{Kernel, Times};
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use vfs::conformance::{Actor, Answer, CASES, Call, Path, Player, play};
use vfs::engine::LockOwner;
use vfs::model::Limits;
use vfs::{Model, Place, Subject};

/// The umask and the credentials belong to the process and its threads: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn model() -> Arc<Model> {
    // Each read of the clock gives a later time, like the kernel's clock after each stat.
    let clock = AtomicI64::new(2_000_000_000_000_000_000);
    Arc::new(Model::new(Arc::new(move || clock.fetch_add(1, Ordering::Relaxed)), Limits::default()))
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: needs root");
    }
    root
}

#[test]
fn the_table_is_what_the_kernel_does() {
    if !is_root() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut wrong = Vec::new();
    for (name, text) in CASES {
        let mut kernel = Kernel::new();
        if let Err(why) = play(&mut kernel, text) {
            wrong.push(format!("{name}: {why}"));
        }
        kernel.end();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("{} cases", CASES.len());
}

#[test]
fn the_model_passes_the_table() {
    let failures = vfs::conformance::run(&mut model);
    assert!(failures.is_empty(), "{failures:#?}");
}

/// All paths of a tree with their contents, seen by root.
fn tree(actor: &mut dyn Actor, holes: bool) -> BTreeMap<String, Vec<String>> {
    let mut all = BTreeMap::new();
    let mut next = vec![".".to_string()];
    while let Some(name) = next.pop() {
        let path = Path { base: None, path: name.clone() };
        let mut told = vec![actor.call(&Call::Stat { path: path.clone(), follow: false })];
        let Answer::Stat(seen) = told[0] else { panic!("{name}: {}", told[0]) };
        match seen.mode & libc::S_IFMT {
            libc::S_IFDIR => {
                let names = actor.call(&Call::List(path.clone()));
                if let Answer::Names(names) = &names {
                    let names = names.iter().filter_map(|entry| entry.rsplit_once(':')).map(|(name, _)| name);
                    next.extend(names.filter(|x| *x != "." && *x != "..").map(|x| format!("{name}/{x}")));
                }
                told.push(names);
            }
            libc::S_IFLNK => told.push(actor.call(&Call::Readlink(path.clone()))),
            libc::S_IFREG => {
                let (slot, size) = (1000, seen.size as usize);
                actor.call(&Call::Open { slot, path: path.clone(), flags: libc::O_RDONLY, mode: 0 });
                told.push(actor.call(&Call::Pread { slot, offset: 0, bytes: size }));
                for whence in [libc::SEEK_DATA, libc::SEEK_HOLE].into_iter().filter(|_| holes) {
                    told.push(actor.call(&Call::Lseek { slot, by: 0, whence }));
                }
                actor.call(&Call::Close(slot));
            }
            _ => {}
        }
        if seen.mode & libc::S_IFMT != libc::S_IFLNK {
            told.push(actor.call(&Call::ListXattrs(path)));
        }
        // Contents are compared as a whole, and shown in short form.
        let text = |answer: &Answer| match answer {
            Answer::Bytes(bytes) => format!("{answer} {:x}", checksum(bytes)),
            other => format!("{other}"),
        };
        all.insert(name, told.iter().map(text).collect());
    }
    all
}

fn checksum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Both sides of a comparison.
struct Pair {
    kernel: Kernel,
    player: Player<Model>,
    outside: Player<Model>,
    before: BTreeMap<String, (Times, Times)>,
    /// Waits for the kernel's coarse clock to advance before each call, so that every change of a time is visible.
    slow: bool,
    /// Set once space was reserved: tmpfs then counts a range that was reserved twice as data, so holes are not
    /// compared.
    reserved: bool,
}

impl Pair {
    fn new(slow: bool) -> Self {
        let engine = model();
        let player = Player::new(engine.clone()).unwrap();
        let outside = Player::with_owner(engine, LockOwner::Process { id: 2, pid: 2 }).unwrap();
        let mut pair =
            Self { kernel: Kernel::new(), player, outside, before: BTreeMap::new(), slow, reserved: false };
        pair.before = pair.times();
        pair
    }

    /// Times of everything, at the kernel and in the model.
    fn times(&mut self) -> BTreeMap<String, (Times, Times)> {
        let mut all = BTreeMap::new();
        let mut next = vec![".".to_string()];
        while let Some(name) = next.pop() {
            let attributes = self.outside.vfs().stat(Subject::Link(Place::cwd(name.as_bytes()))).unwrap();
            let model = Times {
                inode: attributes.inode.get(),
                mtime_ns: attributes.mtime_ns,
                ctime_ns: attributes.ctime_ns,
            };
            all.insert(name.clone(), (self.kernel.times(&name), model));
            if attributes.file_type == format::record::FileType::Directory {
                let path = Path { base: None, path: name.clone() };
                let Answer::Names(names) = self.outside.call(&Call::List(path)) else { panic!("{name}") };
                let names = names.iter().filter_map(|entry| entry.rsplit_once(':')).map(|(name, _)| name);
                next.extend(names.filter(|x| *x != "." && *x != "..").map(|x| format!("{name}/{x}")));
            }
        }
        all
    }

    /// Plays a call on both sides and compares.
    fn step(&mut self, call: &Call) -> Result<(), String> {
        // A kernel setting forbids links to files of other users, independently of the file system.
        let linked = match call {
            Call::Link { from, follow, .. } => self.kernel.owner(from, *follow),
            Call::LinkFile { slot, .. } => self.kernel.owner_of(*slot),
            _ => None,
        };
        if linked.is_some_and(|owner| ![0, owner].contains(&self.kernel.uid())) {
            return Ok(());
        }
        if let Call::Open { path, flags, .. } = call
            && flags & libc::O_CREAT != 0
            && self.kernel.is_protected(path)
        {
            return Ok(());
        }
        if let Call::Fallocate { mode: 0 | libc::FALLOC_FL_KEEP_SIZE, .. } = call {
            self.reserved = true;
        }
        if let Call::Lseek { whence: libc::SEEK_DATA | libc::SEEK_HOLE, .. } = call
            && self.reserved
        {
            return Ok(());
        }
        let ours = self.player.call(call);
        if ours == Answer::Elsewhere {
            return Ok(());
        }
        if self.slow {
            tick();
        }
        let theirs = self.kernel.call(call);
        if ours != theirs && !is_policy(call, &theirs, &ours) {
            return Err(format!("{call:?} as {}: kernel {theirs}, model {ours}", self.kernel.uid()));
        }
        self.compare_times(call)
    }

    fn compare_times(&mut self, call: &Call) -> Result<(), String> {
        let after = self.times();
        for (name, (kernel, model)) in &after {
            let Some((kernel_before, model_before)) = self.before.get(name) else { continue };
            if kernel.inode != kernel_before.inode || matches!(call, Call::Fallocate { .. }) {
                continue;
            }
            let changed = |new: &Times, old: &Times| {
                (new.inode != old.inode, new.mtime_ns != old.mtime_ns, new.ctime_ns != old.ctime_ns)
            };
            let (theirs, ours) = (changed(kernel, kernel_before), changed(model, model_before));
            let missed = (ours.1 && !theirs.1) || (ours.2 && !theirs.2);
            let only_missed = ours.0 == theirs.0 && ours.1 >= theirs.1 && ours.2 >= theirs.2 && missed;
            if theirs != ours && (self.slow || !only_missed) {
                let what = "(inode, mtime, ctime) changed";
                return Err(format!("{call:?}: {name}: {what}: kernel {theirs:?}, model {ours:?}"));
            }
            // Times that were set to a point long ago.
            let set = kernel.mtime_ns < 1_000_000_000_000_000_000;
            if set && kernel.mtime_ns != model.mtime_ns {
                return Err(format!("{call:?}: {name}: mtime {} and {}", kernel.mtime_ns, model.mtime_ns));
            }
        }
        self.before = after;
        Ok(())
    }

    fn end(mut self, compare: bool) -> Result<(), String> {
        let root = Call::User { uid: 0, gid: 0, groups: Vec::new() };
        self.kernel.call(&root);
        let holes = !self.reserved;
        let trees = (tree(&mut self.kernel, holes), tree(&mut self.outside, holes));
        self.kernel.end();
        self.player.end();
        self.outside.end();
        if !compare || trees.0 == trees.1 {
            return Ok(());
        }
        let differs = trees.0.iter().find(|(name, told)| trees.1.get(*name) != Some(told));
        Err(format!(
            "trees differ: kernel {differs:?}, model {:?}",
            differs.map(|(name, _)| trees.1.get(name))
        ))
    }
}

/// With `fs.protected_symlinks` the kernel does not follow another user's link in a sticky folder, even where the
/// call would not follow it.
fn is_policy(call: &Call, kernel: &Answer, model: &Answer) -> bool {
    let failed = |answer: &Answer, error| *answer == Answer::Failed(error);
    let creates = matches!(call, Call::Open { flags, .. } if flags & libc::O_CREAT != 0);
    creates && failed(kernel, libc::EACCES) && failed(model, libc::ELOOP)
}

/// Waits until the kernel's coarse clock shows another time.
fn tick() {
    let coarse = rustix::time::ClockId::RealtimeCoarse;
    let (tick, before) = (rustix::time::clock_getres(coarse), rustix::time::clock_gettime(coarse));
    while rustix::time::clock_gettime(coarse) == before {
        let rest = rustix::thread::nanosleep(&tick);
        debug_assert!(
            matches!(rest, rustix::thread::NanosleepRelativeResult::Ok),
            "nobody sends signals here"
        );
    }
}

fn compare(calls: &[Call]) -> Result<(), String> {
    let mut pair = Pair::new(calls.len() <= 12 || calls.len().is_multiple_of(10));
    let result = calls.iter().try_for_each(|call| pair.step(call));
    let end = pair.end(result.is_ok());
    result.and(end)
}

fn cases() -> u32 {
    std::env::var("VFS_DIFFERENTIAL_CASES").ok().and_then(|count| count.parse().ok()).unwrap_or(200)
}

fn differential(calls: impl proptest::strategy::Strategy<Value = Vec<Call>>) {
    if !is_root() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let config =
        Config { cases: cases(), failure_persistence: None, max_shrink_iters: 4000, ..Config::default() };
    let mut runner = TestRunner::new(config);
    let result =
        runner.run(&calls, |calls| compare(&calls).map_err(|why| TestCaseError::fail(why.to_string())));
    if let Err(error) = result {
        panic!("{error}");
    }
    println!("{} sequences", cases());
}

#[test]
fn names_like_the_kernel() {
    differential(calls::about_names());
}

#[test]
fn contents_like_the_kernel() {
    differential(calls::about_contents());
}

#[test]
fn rights_like_the_kernel() {
    differential(calls::about_rights());
}

#[test]
fn locks_like_the_kernel() {
    differential(calls::about_locks());
}
