//! Open files that are given away: kept until a process claims them, or until no process is left that could.

use crate::client::{ROOT, tiny};
use crate::door::{Guest, daemon_of, eventually, knock, knock_for};
use ccnvm::LockLimits;
use format::InodeNumber;
use format::call::{
    CallKind, FAMILY_RANGES, FAMILY_WHOLE, InodeRequest, LOCK_EXCLUSIVE, LOCK_LEASE, LockRequest,
    OWNER_DESCRIPTION, OWNER_PROCESS, Status, split,
};
use format::message::MessageKind;
use format::share::{
    LivenessNote, NOTE_CLOSED, NOTE_PROCESS, SHARE_BIT, ShareRequest, ShareResponse, SharedFile,
};
use ipc::socket::Connection;
use ipc::{Host, SystemHost};
use sharedfs::Config;
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

const MINE: u64 = 7;
const OTHER: u64 = 8;

fn lock(guest: &Guest, kind: CallKind, owner: u64) -> Status {
    let request = LockRequest {
        inode: ROOT,
        owner: U64::new(owner),
        pid: U32::new(0),
        owner_kind: OWNER_DESCRIPTION,
        family: FAMILY_WHOLE,
        kind: LOCK_EXCLUSIVE,
        flags: 0,
        first: U64::new(0),
        last: U64::new(u64::MAX),
    };
    guest.call(kind, request.as_bytes()).0
}

fn file(inode: InodeNumber) -> SharedFile {
    SharedFile {
        inode,
        owner: U64::new(MINE),
        pid: U32::new(0),
        owner_kind: OWNER_DESCRIPTION,
        access: 1,
        reserved: [0; 2],
    }
}

fn owned_by(owner: u64) -> SharedFile {
    SharedFile { owner: U64::new(owner), ..file(ROOT) }
}

/// Gives the root away; returns the number and the liveness socket.
fn give(guest: &Guest) -> (u64, Connection) {
    give_files(guest, &[file(ROOT)])
}

fn give_files(guest: &Guest, files: &[SharedFile]) -> (u64, Connection) {
    let head = ShareRequest { count: U32::new(files.len() as u32), own: U32::new(0) };
    let (status, body) = guest.call(CallKind::Share, &[head.as_bytes(), files.as_bytes()].concat());
    assert_eq!(status, Status::Ok);
    let (response, _) = split::<ShareResponse>(&body).unwrap();
    let until = SystemHost.now().after(Duration::from_secs(10));
    let parcel = guest.connection.receive_until(&SystemHost, Some(until)).unwrap();
    assert_eq!(parcel.kind, MessageKind::Parcel);
    let [descriptor]: [ipc::Descriptor; 1] = parcel.descriptors.try_into().unwrap();
    (response.number.get(), Connection::from_descriptor(descriptor))
}

fn say(lifeline: &Connection, kind: u32, files: &[SharedFile]) {
    let note = LivenessNote {
        kind: U32::new(kind),
        process: U32::new(std::process::id()),
        count: U32::new(files.len() as u32),
        reserved: U32::new(0),
    };
    lifeline.send(MessageKind::Note, &[note.as_bytes(), files.as_bytes()], &[]).unwrap();
}

#[test]
fn who_comes_for_it_has_the_files_and_speaks_for_their_locks() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let daemon = daemon_of(folder.path(), tiny());
    let (giver, stranger) = (knock(folder.path()), knock(folder.path()));
    stranger.root();
    assert_eq!(lock(&giver, CallKind::Lock, MINE), Status::Ok);
    let (number, lifeline) = give(&giver);
    assert!(number & SHARE_BIT != 0);
    say(&lifeline, NOTE_PROCESS, &[]);
    // The giver ends: the files stay, only for the process that has the number.
    drop(giver);
    eventually("the giver's session ends", || daemon.sessions().len() == 1);
    assert_eq!((daemon.detached_sessions(), daemon.references()), (1, 1));
    assert_eq!(lock(&stranger, CallKind::Lock, OTHER), Status::WouldBlock);
    let guesser = knock_for(folder.path(), number ^ 1);
    assert_eq!(daemon.detached_sessions(), 0, "the note named this very process: it inherits by what it is");
    // Without a call, its session would be kept: its process might not have received the welcome.
    guesser.root();
    drop(guesser);
    eventually("with its last holder the lock ends", || lock(&stranger, CallKind::Lock, OTHER) == Status::Ok);
    assert_eq!(lock(&stranger, CallKind::ReleaseLocks, OTHER), Status::Ok);
    drop(lifeline);

    let giver = knock(folder.path());
    let (number, lifeline) = give(&giver);
    drop(knock_for(folder.path(), number ^ 1));
    drop(knock_for(folder.path(), number & !SHARE_BIT));
    assert_eq!(daemon.detached_sessions(), 1, "others do not get it");
    let heir = knock_for(folder.path(), number);
    assert_eq!((daemon.detached_sessions(), daemon.references()), (0, 1));
    drop(lifeline);
    // The successor locks, and ends: the giver still has the description open.
    assert_eq!(lock(&heir, CallKind::Lock, MINE), Status::Ok);
    drop(heir);
    eventually("the heir's session ends", || daemon.references() == 0);
    assert_eq!(lock(&stranger, CallKind::Lock, OTHER), Status::WouldBlock);
    assert_eq!(lock(&giver, CallKind::ReleaseLocks, MINE), Status::Ok);
    assert_eq!(lock(&stranger, CallKind::Lock, OTHER), Status::Ok);
    daemon.stop();
}

#[test]
fn it_ends_with_its_lifeline_and_by_what_is_said_there() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let daemon = daemon_of(folder.path(), tiny());
    let (giver, stranger) = (knock(folder.path()), knock(folder.path()));
    stranger.root();
    let (_, lifeline) = give(&giver);
    assert_eq!(lock(&giver, CallKind::Lock, MINE), Status::Ok);
    assert_eq!(lock(&giver, CallKind::ReleaseLocks, MINE), Status::Ok);
    assert_eq!(lock(&stranger, CallKind::Lock, OTHER), Status::WouldBlock, "it is open there still");
    // The last holder closes the file: the daemon reads that with the next call.
    say(&lifeline, NOTE_CLOSED, &[file(ROOT)]);
    assert_eq!(lock(&stranger, CallKind::Lock, OTHER), Status::Ok);
    assert_eq!((daemon.detached_sessions(), daemon.references()), (1, 0));
    drop(lifeline);
    eventually("nobody is left", || daemon.detached_sessions() == 0);
    // A malformed message ends the given files, too.
    let (_, lifeline) = give(&giver);
    lifeline.send(MessageKind::Note, &[&[7; 40]], &[]).unwrap();
    eventually("it says what cannot be", || daemon.detached_sessions() == 0 && daemon.references() == 0);
    daemon.stop();
}

/// A call about the locks that a process itself has on an inode.
fn of_process(guest: &Guest, kind: CallKind, owner: u64, inode: InodeNumber, flags: u8) -> Status {
    let request = LockRequest {
        inode,
        owner: U64::new(owner),
        pid: U32::new(1),
        owner_kind: OWNER_PROCESS,
        family: FAMILY_RANGES,
        kind: LOCK_EXCLUSIVE,
        flags,
        first: U64::new(0),
        last: U64::new(9),
    };
    guest.call(kind, request.as_bytes()).0
}

/// As a child between vfork and exec does, whose parent goes on with the session. With a lease, the session decides the
/// lock itself.
#[test]
fn locks_of_a_process_that_goes_on_elsewhere_stay() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let lock_limits = LockLimits { quiet_ns: 0, ..LockLimits::default() };
    let daemon = daemon_of(folder.path(), Config { locks_max: 1000, lock_limits, ..tiny() });
    let stranger = knock(folder.path());
    stranger.root();
    for flags in [0, LOCK_LEASE] {
        let giver = knock(folder.path());
        giver.root();
        assert_eq!(of_process(&giver, CallKind::Lock, MINE, ROOT, flags), Status::Ok);
        let owner =
            SharedFile { owner_kind: OWNER_PROCESS, pid: U32::new(1), access: 0, ..file(InodeNumber::NONE) };
        let (number, lifeline) = give_files(&giver, &[owner, file(ROOT)]);
        let heir = knock_for(folder.path(), number);
        heir.root();
        // Its lock on another file ends: the owner is not idle, although its giver had decided the lock that stays.
        let other = InodeNumber::new(1 << 40);
        assert_eq!(of_process(&heir, CallKind::ReleaseLocks, MINE, other, 0), Status::Ok);
        assert_eq!(of_process(&giver, CallKind::ReleaseLocks, MINE, InodeNumber::NONE, 0), Status::Ok);
        assert_eq!(of_process(&stranger, CallKind::Lock, OTHER, ROOT, 0), Status::WouldBlock, "{flags}");
        drop(giver);
        eventually("the giver's session ends", || daemon.sessions().len() == 2);
        drop(lifeline);
        assert_eq!(of_process(&stranger, CallKind::Lock, OTHER, ROOT, 0), Status::WouldBlock, "{flags}");
        assert_eq!(of_process(&heir, CallKind::ReleaseLocks, MINE, ROOT, 0), Status::Ok);
        assert_eq!(of_process(&stranger, CallKind::Lock, OTHER, ROOT, 0), Status::Ok, "{flags}");
        assert_eq!(of_process(&stranger, CallKind::ReleaseLocks, OTHER, InodeNumber::NONE, 0), Status::Ok);
        drop(heir);
        eventually("the heir's session ends", || daemon.sessions().len() == 1);
    }
    daemon.stop();
}

/// A call that came while it was to be removed would not find it.
#[test]
fn what_has_a_name_is_not_removed_with_its_last_reference() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let daemon = daemon_of(folder.path(), tiny());
    let (giver, stranger) = (knock(folder.path()), knock(folder.path()));
    stranger.root();
    let (_, lifeline) = give(&giver);
    daemon.tidy();
    let commit = daemon.commit();
    say(&lifeline, NOTE_CLOSED, &[file(ROOT)]);
    eventually("the note is read", || {
        stranger.root();
        daemon.references() == 0
    });
    daemon.tidy();
    assert_eq!(daemon.commit(), commit, "nothing is to be removed");
    daemon.stop();
}

#[test]
fn what_could_not_be_given_away_as_a_whole_leaves_nothing_behind() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let daemon = daemon_of(folder.path(), tiny());
    let stranger = knock(folder.path());
    stranger.root();
    let no_kind = SharedFile { owner_kind: 7, ..file(ROOT) };
    for bad in [vec![no_kind], (100..100 + tiny().locks_max as u64).map(owned_by).collect()] {
        let giver = knock(folder.path());
        giver.root();
        assert_eq!(lock(&giver, CallKind::Lock, MINE), Status::Ok);
        let files = [vec![file(ROOT)], bad].concat();
        let head = ShareRequest { count: U32::new(files.len() as u32), own: U32::new(0) };
        let (status, _) = giver.call(CallKind::Share, &[head.as_bytes(), files.as_bytes()].concat());
        assert_ne!(status, Status::Ok);
        drop(giver);
        eventually("the lock ends with the giver", || lock(&stranger, CallKind::Lock, OTHER) == Status::Ok);
        assert_eq!(lock(&stranger, CallKind::ReleaseLocks, OTHER), Status::Ok);
        assert_eq!((daemon.detached_sessions(), daemon.references()), (0, 0));
    }
    daemon.stop();
}

#[test]
fn nobody_gives_what_he_never_met_or_more_than_there_may_be() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let daemon = daemon_of(folder.path(), tiny());
    let giver = knock(folder.path());
    let head = ShareRequest { count: U32::new(1), own: U32::new(0) };
    let strange = file(InodeNumber::new(1 << 40));
    let (status, _) = giver.call(CallKind::Share, &[head.as_bytes(), strange.as_bytes()].concat());
    assert_eq!(status, Status::Invalid);
    assert_eq!(giver.call(CallKind::Share, head.as_bytes()).0, Status::Invalid);
    let request = InodeRequest { inode: ROOT, flags: U64::new(0) };
    assert_eq!(giver.call(CallKind::Share, request.as_bytes()).0, Status::Invalid);
    let mut lifelines = Vec::new();
    let none = ShareRequest { count: U32::new(0), own: U32::new(0) };
    while giver.call(CallKind::Share, none.as_bytes()).0 == Status::Ok {
        let until = SystemHost.now().after(Duration::from_secs(10));
        lifelines.push(giver.connection.receive_until(&SystemHost, Some(until)).unwrap());
    }
    assert_eq!(lifelines.len(), tiny().sessions_max);
    drop(lifelines);
    eventually("they end", || daemon.detached_sessions() == 0);
    daemon.stop();
}
