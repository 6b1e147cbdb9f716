//! Locks between processes: exclusion, waiting, signals, death.

use crate::child::{Process, whole_file};
use crate::{Mount, errno, pause};
use gateway::Options;
use nix::fcntl::{FcntlArg, fcntl};
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;
use std::fs::File;
use std::time::Duration;

/// Long enough for a waiting request to reach the gateway.
const A_WHILE: Duration = Duration::from_millis(30);

fn tries_range(file: &File) -> i32 {
    fcntl(file, FcntlArg::F_SETLK(&whole_file())).err().map_or(0, |error| error as i32)
}

fn tries_flock(file: &File) -> i32 {
    errno(flock(file, FlockOperation::NonBlockingLockExclusive).map_err(Into::into))
}

fn file(mount: &Mount) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(mount.path("file")).unwrap()
}

#[test]
fn a_lock_keeps_others_out_until_its_holder_unlocks_closes_or_dies() {
    let Some(mount) = Mount::new() else { return };
    for (task, tries) in [("range-lock", tries_range as fn(&File) -> i32), ("flock", tries_flock)] {
        let file = file(&mount);
        for ends_well in [true, false] {
            let mut holder = Process::start(task, &mount.path("file"));
            holder.said("has it");
            assert_eq!(tries(&file), libc::EAGAIN, "{task}");
            if ends_well {
                holder.finish();
            } else {
                holder.killed_by(Signal::KILL);
            }
            // A closed file is released a moment later.
            crate::eventually("the lock is free", || tries(&file) == 0);
            drop(file.try_clone().unwrap());
            flock(&file, FlockOperation::Unlock).unwrap();
        }
    }
}

#[test]
fn the_two_families_do_not_exclude_each_other() {
    let Some(mount) = Mount::new() else { return };
    let file = file(&mount);
    let mut holder = Process::start("flock", &mount.path("file"));
    holder.said("has it");
    assert_eq!(tries_range(&file), 0);
    assert_eq!(tries_flock(&file), libc::EAGAIN);
    holder.finish();
}

#[test]
fn who_is_in_the_way_is_told() {
    let Some(mount) = Mount::new() else { return };
    let file = file(&mount);
    let mut holder = Process::start("range-lock", &mount.path("file"));
    holder.said("has it");
    let mut answer = whole_file();
    fcntl(&file, FcntlArg::F_GETLK(&mut answer)).unwrap();
    assert_eq!((answer.l_type, answer.l_pid as u32), (libc::F_WRLCK as i16, holder.id()));
    assert_eq!((answer.l_start, answer.l_len), (0, 0));
    holder.finish();
    fcntl(&file, FcntlArg::F_GETLK(&mut answer)).unwrap();
    assert_eq!(answer.l_type, libc::F_UNLCK as i16);
}

#[test]
fn who_waits_is_served_when_its_turn_comes_and_ends_by_a_signal() {
    let Some(mount) = Mount::new() else { return };
    for (task, tries) in [("range-lock", tries_range as fn(&File) -> i32), ("flock", tries_flock)] {
        let file = file(&mount);
        assert_eq!(tries(&file), 0);
        let mut killed = Process::start(task, &mount.path("file"));
        killed.said("asks");
        pause(A_WHILE);
        let mut waits = Process::start(task, &mount.path("file"));
        waits.said("asks");
        pause(A_WHILE);
        // Without the interrupt of the kernel it would continue to wait, and could not be killed.
        killed.killed_by(Signal::TERM);
        drop(file);
        waits.said("has it");
        waits.finish();
    }
}

#[test]
fn more_waiters_than_threads_starve_nobody() {
    let options = Options { threads: 2, ..Options::default() };
    let Some(mount) = Mount::with(&options) else { return };
    let file = file(&mount);
    assert_eq!(tries_range(&file), 0);
    let mut waiters: Vec<_> = (0..6).map(|_| Process::start("range-lock", &mount.path("file"))).collect();
    waiters.iter_mut().for_each(|waiter| waiter.said("asks"));
    pause(A_WHILE);
    std::fs::write(mount.path("other"), b"served").unwrap();
    assert_eq!(std::fs::read(mount.path("other")).unwrap(), b"served");
    for waiter in &mut waiters {
        waiter.let_go();
    }
    drop(file);
    // Each has the lock in turn, releases it and ends, because its input is closed.
    for mut waiter in waiters {
        assert!(waiter.ends());
    }
}

#[test]
fn a_mount_that_ends_ends_who_waits() {
    let Some(mount) = Mount::new() else { return };
    let file = file(&mount);
    assert_eq!(tries_range(&file), 0);
    let mut waiter = Process::start("range-lock", &mount.path("file"));
    waiter.said("asks");
    pause(A_WHILE);
    mount.mounted.unmount().unwrap();
    mount.mounted.wait().unwrap();
    assert!(!waiter.ends(), "the lock was refused");
    assert_eq!(mount.inodes(), 2);
}
