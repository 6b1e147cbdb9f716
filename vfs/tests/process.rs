//! Behaviour that a single process on tmpfs cannot show: waiting for locks, deadlock, death, paths that leave the
//! tree, lack of space, and independent clones.
#![allow(clippy::unwrap_used, reason = "all of this is a test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};
use vfs::conformance::{Actor, Call, Path, Player, parse, play};
use vfs::engine::{Engine, Lock, LockFamily, LockKind, LockOwner, Locked};
use vfs::model::Limits;
use vfs::vfs::{LockRequest, Patience, Pause, RangeKind};
use vfs::{Caller, Error, Leaves, Model, Place, Stop, Subject, Vfs};

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn model(limits: Limits) -> Arc<Model> {
    Arc::new(Model::new(Arc::new(|| 7), limits))
}

fn process(engine: &Arc<Model>, id: u64) -> Vfs<Model> {
    Vfs::new(engine.clone(), Caller::ROOT, LockOwner::Process { id, pid: id as u32 }).unwrap()
}

fn exclusive(start: i64, bytes: i64) -> LockRequest {
    LockRequest { kind: Some(LockKind::Exclusive), whence: libc::SEEK_SET, start, bytes }
}

#[test]
fn a_waiter_gets_the_lock_when_its_holder_dies() {
    let engine = model(Limits::default());
    let (holder, waiter) = (process(&engine, 1), process(&engine, 2));
    let flags = libc::O_RDWR | libc::O_CREAT;
    let held = holder.open(Place::cwd(b"f"), flags, 0o644).unwrap();
    let wanted = waiter.open(Place::cwd(b"f"), flags, 0o644).unwrap();
    holder.set_range(&held, RangeKind::Process, &exclusive(0, 10), None).unwrap();
    let refused = waiter.set_range(&wanted, RangeKind::Process, &exclusive(5, 1), None);
    assert_eq!(refused, Err(Error::WouldBlock));
    let seen = waiter.get_range(&wanted, RangeKind::Process, &exclusive(5, 1)).unwrap().unwrap();
    assert_eq!((seen.start, seen.bytes, seen.pid), (0, 10, 1));

    let (count, mut holder, mut pauses) = (Arc::new(Count::default()), Some(holder), 0);
    let waker = Waker::from(count.clone());
    let mut pause = || {
        pauses += 1;
        if pauses == 2 {
            let holder = holder.take().unwrap();
            holder.close(&held, true);
            holder.end();
        }
        Pause::Over
    };
    let patience = Patience { waker: &waker, pause: &mut pause };
    waiter.set_range(&wanted, RangeKind::Process, &exclusive(5, 1), Some(patience)).unwrap();
    assert_eq!((pauses, count.0.load(Ordering::SeqCst)), (2, 1));
}

#[test]
fn a_signal_ends_the_waiting_and_leaves_nothing() {
    let engine = model(Limits::default());
    let (holder, waiter) = (process(&engine, 1), process(&engine, 2));
    let flags = libc::O_RDWR | libc::O_CREAT;
    let held = holder.open(Place::cwd(b"f"), flags, 0o644).unwrap();
    let wanted = waiter.open(Place::cwd(b"f"), flags, 0o644).unwrap();
    holder.flock(&held, Some(LockKind::Exclusive), None).unwrap();
    let waker = Waker::from(Arc::new(Count::default()));
    let patience = Patience { waker: &waker, pause: &mut || Pause::Interrupted };
    let answer = waiter.flock(&wanted, Some(LockKind::Shared), Some(patience));
    assert_eq!(answer, Err(Error::Interrupted));
    // No request waits any more: the lock that the holder gives up stays free for the holder.
    holder.flock(&held, None, None).unwrap();
    holder.flock(&held, Some(LockKind::Exclusive), None).unwrap();
}

#[test]
fn two_who_wait_for_each_other_are_told() {
    let engine = model(Limits::default());
    let (one, two) = (process(&engine, 1), process(&engine, 2));
    let flags = libc::O_RDWR | libc::O_CREAT;
    let ones = one.open(Place::cwd(b"f"), flags, 0o644).unwrap();
    let twos = two.open(Place::cwd(b"f"), flags, 0o644).unwrap();
    one.set_range(&ones, RangeKind::Process, &exclusive(0, 1), None).unwrap();
    two.set_range(&twos, RangeKind::Process, &exclusive(1, 1), None).unwrap();
    let waker = Waker::from(Arc::new(Count::default()));
    let mut looked = false;
    let mut pause = || {
        // The first process waits for the second, and the second requests a lock of the first.
        let mut never = || Pause::Interrupted;
        let patience = Patience { waker: &waker, pause: &mut never };
        let answer = two.set_range(&twos, RangeKind::Process, &exclusive(0, 1), Some(patience));
        assert_eq!(answer, Err(Error::Deadlock));
        looked = true;
        Pause::Interrupted
    };
    let patience = Patience { waker: &waker, pause: &mut pause };
    let answer = one.set_range(&ones, RangeKind::Process, &exclusive(1, 1), Some(patience));
    assert_eq!((answer, looked), (Err(Error::Interrupted), true));
}

#[test]
fn closing_any_descriptor_ends_the_locks_of_the_process() {
    let engine = model(Limits::default());
    let (one, two) = (process(&engine, 1), process(&engine, 2));
    let flags = libc::O_RDWR | libc::O_CREAT;
    let first = one.open(Place::cwd(b"f"), flags, 0o644).unwrap();
    let second = one.open(Place::cwd(b"f"), flags, 0o644).unwrap();
    let other = two.open(Place::cwd(b"f"), flags, 0o644).unwrap();
    one.set_range(&first, RangeKind::Process, &exclusive(0, 0), None).unwrap();
    one.close(&second, true);
    two.set_range(&other, RangeKind::Process, &exclusive(0, 0), None).unwrap();
}

#[test]
fn requests_are_granted_in_the_order_of_their_coming() {
    let mut table = vfs::locks::LockTable::new(100);
    let inode = format::InodeNumber::ROOT;
    let lock = |kind| Lock { family: LockFamily::Ranges, kind, first: 0, last: 9 };
    let waker = Waker::from(Arc::new(Count::default()));
    let owner = LockOwner::Description;
    assert_eq!(table.lock(inode, owner(1), lock(LockKind::Exclusive), None), Ok(Locked::Granted));
    let ticket = |table: &mut vfs::locks::LockTable, id| match table.lock(
        inode,
        owner(id),
        lock(LockKind::Exclusive),
        Some(&waker),
    ) {
        Ok(Locked::Queued(ticket)) => ticket,
        other => panic!("{other:?}"),
    };
    let (second, third) = (ticket(&mut table, 2), ticket(&mut table, 3));
    table.release(owner(1), None);
    assert_eq!(table.redeem(third), Ok(Locked::Queued(third)));
    assert_eq!(table.redeem(second), Ok(Locked::Granted));
    assert!(table.cancel(third));
    assert_eq!(table.redeem(third), Err(Error::Stale));
}

#[test]
fn paths_that_leave_the_tree_say_what_is_left() {
    let engine = model(Limits::default());
    let mut player = Player::new(engine.clone()).unwrap();
    play(&mut player, "mkdir d 755\nsymlink ../../x/ d/up\nsymlink /abs/y d/abs\nmkdir d/e 755").unwrap();
    let vfs = process(&engine, 2);
    let stat = |path: &[u8]| vfs.stat(Subject::Path(Place::cwd(path)));
    let leaves = |argument, rest: &[u8]| Stop::Leaves(Leaves { argument, rest: rest.to_vec() });
    assert_eq!(stat(b"d/../../z/"), Err(leaves(0, b"../z/")));
    assert_eq!(stat(b"d/up/more"), Err(leaves(0, b"../x//more")));
    assert_eq!(stat(b"d/abs/more/"), Err(leaves(0, b"/abs/y/more/")));
    assert!(stat(b"d/e/../../d/e/.").is_ok());
    assert_eq!(vfs.rename(Place::cwd(b"d"), Place::cwd(b"../d"), 0), Err(leaves(1, b"../d")));
    // 40 links are followed, 41 are not.
    play(&mut player, "create l0 644").unwrap();
    for i in 1..=41 {
        play(&mut player, &format!("symlink l{} l{i}", i - 1)).unwrap();
    }
    assert!(stat(b"l40").is_ok());
    assert_eq!(stat(b"l41"), Err(Stop::Failed(Error::Loop)));
}

#[test]
fn a_full_tree_takes_what_fits_and_gives_it_back() {
    let engine = model(Limits { blocks: 2, ..Limits::default() });
    let mut player = Player::new(engine.clone()).unwrap();
    let script = "
        open 0 f O_RDWR|O_CREAT 644
        write 0 x*10000 = 8192
        write 0 x = ENOSPC
        fallocate 0 EXTEND 0 8193 = ENOSPC
        unlink f
        open 1 g O_RDWR|O_CREAT 644
        write 1 x = ENOSPC
        close 0
        write 1 x = 1
    ";
    play(&mut player, script).unwrap();
    assert_eq!(engine.statfs().unwrap().blocks_free, 1);
}

#[test]
fn a_clone_goes_its_own_way() {
    let engine = model(Limits::default());
    let clone = Arc::new(Model::clone(&engine));
    Player::new(clone.clone())
        .unwrap()
        .call(&Call::Mkdir { path: Path { base: None, path: "d".into() }, mode: 0o755 });
    let there = |engine: &Arc<Model>| process(engine, 1).stat(Subject::Path(Place::cwd(b"d"))).is_ok();
    assert_eq!((there(&engine), there(&clone)), (false, true));
}

#[test]
fn a_line_that_is_none_is_refused() {
    assert!(parse("mkdir d").is_err());
    assert!(parse("mkdir d 755 more").is_err());
    assert!(play(&mut Player::new(model(Limits::default())).unwrap(), "rmdir x = ok").is_err());
}
