//! Sessions that are asked for their leases, and answer, or do not.

use crate::beside::{LONG, Served, beside};
use crate::client::{Client, FILE, ROOT, new_pool, tiny, user};
use crate::door::eventually;
use crate::locks::{lock, redeem, request};
use format::InodeNumber;
use format::call::{
    CallKind, LEASE_WRITE, LOCK_EXCLUSIVE, LOCK_SHARED, LeaseRequest, LeaseUnit, RecallsRequest, Status,
};
use ipc::ring::RingLimits;
use ipc::sync::Ordering;
use ipc::{Host, SystemHost, Word};
use pmem::Recorder;
use sharedfs::{Config, Daemon};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// A daemon that runs, with room for calls that wait, which ends sessions that give no sign for so long.
fn daemon(recall_patience: Duration) -> Arc<Daemon> {
    let recorder = Recorder::new();
    new_pool(&recorder.medium());
    let ring = RingLimits { slots: 8, ..tiny().ring };
    let config = Config { recall_patience, ring, ..tiny() };
    let (daemon, _) = Daemon::open(Arc::new(SystemHost), &recorder.medium(), config).unwrap();
    let daemon = Arc::new(daemon);
    daemon.start().unwrap();
    daemon
}

fn question(wait: u32) -> Vec<u8> {
    RecallsRequest { wait: wait.into(), dropped: 0.into() }.as_bytes().to_vec()
}

/// Lets time go by.
fn pause(span: Duration) {
    SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(span)));
}

/// A session of root that has said that it must answer.
fn answering(daemon: &Arc<Daemon>, pid: u32) -> Served {
    let served = Served::new(daemon, pid);
    assert_eq!(served.called(CallKind::Recalls, &question(0)), (Status::Ok, Vec::new()));
    served
}

fn units(body: &[u8]) -> Vec<InodeNumber> {
    body.as_chunks::<8>().0.iter().map(|bytes| InodeNumber::new(u64::from_le_bytes(*bytes))).collect()
}

fn wants(inode: InodeNumber) -> Vec<u8> {
    let head = LeaseRequest { count: 1.into(), reserved: 0.into() };
    let unit = LeaseUnit { inode, mode: LEASE_WRITE, reserved: [0; 7] };
    [head.as_bytes(), unit.as_bytes()].concat()
}

/// A directory's file, made by a program that has ended.
fn file_of_another(daemon: &Arc<Daemon>) -> InodeNumber {
    let mut maker = Client::attach_as(daemon, user(0), 9);
    maker.write_lease(ROOT);
    let (file, _) = maker.create(ROOT, b"file", FILE | 0o644);
    maker.digest(true).unwrap();
    daemon.end(maker.session);
    file
}

#[test]
fn a_session_that_must_answer_holds_its_lease_until_it_gives_it_back() {
    let daemon = daemon(LONG);
    let file = file_of_another(&daemon);
    let (mount, other) = (answering(&daemon, 1), Client::attach_as(&daemon, user(0), 2));
    let told = mount.call(CallKind::Recalls, &question(1));
    mount.client.walk("file").unwrap();
    let held = mount.client.write_lease(file);
    let waits = beside(move || other.write_lease(file).inode);
    assert_eq!(told.recv_timeout(LONG).unwrap(), (Status::Ok, file.get().to_le_bytes().to_vec()));
    // It goes on under the lease, and nothing is asked twice.
    let again = mount.call(CallKind::Recalls, &question(1));
    pause(Duration::from_millis(30));
    assert!(mount.client.still_holds(&held) && waits.try_recv().is_err() && again.try_recv().is_err());
    assert_eq!(mount.called(CallKind::Release, file.as_bytes()).0, Status::Ok);
    assert!(!mount.client.still_holds(&held));
    assert_eq!(waits.recv_timeout(LONG).unwrap(), file);
    // A question without patience lets the other one go.
    assert_eq!(units(&mount.called(CallKind::Recalls, &question(0)).1), []);
    assert_eq!(again.recv_timeout(LONG).unwrap(), (Status::Ok, Vec::new()));
    daemon.stop();
}

#[test]
fn an_inode_of_the_own_range_is_asked_for_too() {
    let daemon = daemon(LONG);
    let mut mount = answering(&daemon, 1);
    let told = mount.call(CallKind::Recalls, &question(1));
    mount.client.write_lease(ROOT);
    let (file, _) = mount.client.create(ROOT, b"file", FILE | 0o644);
    mount.client.digest(true).unwrap();
    let other = Client::attach_as(&daemon, user(0), 2);
    let waits = beside(move || other.write_lease(file).inode);
    assert_eq!(units(&told.recv_timeout(LONG).unwrap().1), [file]);
    // Leases that no other session wants stay.
    assert_eq!(mount.called(CallKind::Release, file.as_bytes()).0, Status::Ok);
    assert_eq!(waits.recv_timeout(LONG).unwrap(), file);
    daemon.stop();
}

/// Two that must answer, each holding what the other waits for: their answers are not behind their own requests.
#[test]
fn a_session_answers_while_its_own_request_waits() {
    let daemon = daemon(LONG);
    let file = file_of_another(&daemon);
    let (one, two) = (answering(&daemon, 1), answering(&daemon, 2));
    let told = [&one, &two].map(|mount| mount.call(CallKind::Recalls, &question(1)));
    one.client.write_lease(file);
    let two_s = two.client.write_lease(ROOT);
    let waiting = [one.call(CallKind::Lease, &wants(ROOT)), two.call(CallKind::Lease, &wants(file))];
    let [first, second] = told;
    assert_eq!(units(&first.recv_timeout(LONG).unwrap().1), [file]);
    assert_eq!(units(&second.recv_timeout(LONG).unwrap().1), [ROOT]);
    assert!(two.client.still_holds(&two_s));
    assert_eq!(one.called(CallKind::Release, file.as_bytes()).0, Status::Ok);
    assert_eq!(two.called(CallKind::Release, ROOT.as_bytes()).0, Status::Ok);
    for granted in waiting {
        assert_eq!(granted.recv_timeout(LONG).unwrap().0, Status::Ok);
    }
    daemon.stop();
}

#[test]
fn one_that_gives_no_sign_is_ended() {
    let daemon = daemon(Duration::from_millis(300));
    let mut mount = answering(&daemon, 1);
    mount.client.write_lease(ROOT);
    let other = Client::attach_as(&daemon, user(0), 2);
    let waits = beside(move || other.write_lease(ROOT));
    // Records in its log are signs.
    for number in 0..10u8 {
        pause(Duration::from_millis(60));
        mount.client.create(ROOT, &[b'a' + number], FILE | 0o644);
        assert!(waits.try_recv().is_err(), "it is about it");
    }
    assert_eq!(waits.recv_timeout(LONG).unwrap().inode, ROOT);
    let ended = daemon.terminations();
    assert_eq!(ended.iter().map(|one| one.reason.as_str()).collect::<Vec<_>>(), ["Silent"]);
    eventually("its log is digested", || daemon.sessions().len() == 1);
    daemon.stop();
}

/// A daemon whose caches elsewhere may be there still for as long as the word is 1.
fn watching(there: u32) -> (Arc<Daemon>, Arc<Word>) {
    let (daemon, word) = (daemon(LONG), Arc::new(Word::new(there)));
    let watched = word.clone();
    daemon.watch_caches(Box::new(move || watched.load(Ordering::SeqCst) == 1));
    (daemon, word)
}

#[test]
fn what_a_session_kept_elsewhere_goes_before_its_leases_do() {
    let (daemon, there) = watching(0);
    let file = file_of_another(&daemon);
    let mount = answering(&daemon, 1);
    mount.client.walk("file").unwrap();
    mount.client.write_lease(file);
    let other = Client::attach_as(&daemon, user(0), 2);
    let waits = beside(move || other.write_lease(file).inode);
    there.store(1, Ordering::SeqCst);
    daemon.end(mount.client.session);
    pause(Duration::from_millis(50));
    assert!(waits.try_recv().is_err(), "the kernel may have its pages still");
    // The next session of the kind writes back the data that it left, under the same lease.
    let after = answering(&daemon, 3);
    after.client.walk("file").unwrap();
    after.client.write_lease(file);
    assert_eq!(after.called(CallKind::Release, file.as_bytes()).0, Status::Ok);
    pause(Duration::from_millis(50));
    assert!(waits.try_recv().is_err(), "not all is written back");
    let dropped = RecallsRequest { wait: 0.into(), dropped: 1.into() };
    assert_eq!(after.called(CallKind::Recalls, dropped.as_bytes()).0, Status::Ok);
    assert_eq!(waits.recv_timeout(LONG).unwrap(), file);
    daemon.stop();
}

/// Programs that read the cached data hold locks of the session, as a program that reads a database does.
#[test]
fn the_locks_of_a_session_that_kept_data_elsewhere_end_when_the_data_is_gone() {
    let (daemon, there) = watching(0);
    let mount = answering(&daemon, 1);
    let other = Client::attach_as(&daemon, user(0), 2);
    assert_eq!(lock(&mount.client, request(ROOT, 11, LOCK_EXCLUSIVE, 0)), Ok(0));
    there.store(1, Ordering::SeqCst);
    daemon.end(mount.client.session);
    assert_eq!(lock(&other, request(ROOT, 22, LOCK_SHARED, 0)), Err(Status::WouldBlock));
    let ticket = lock(&other, request(ROOT, 22, LOCK_SHARED, 1)).unwrap();
    assert_eq!(redeem(&other, ticket), Ok(ticket), "it waits");
    there.store(0, Ordering::SeqCst);
    eventually("the lock is granted", || redeem(&other, ticket) == Ok(0));
    daemon.stop();
}

#[test]
fn a_session_says_that_it_must_answer_while_its_own_request_waits_for_that() {
    let (daemon, _there) = watching(1);
    let mount = Served::new(&daemon, 1);
    let granted = mount.call(CallKind::Lease, &wants(ROOT));
    pause(Duration::from_millis(30));
    assert!(granted.try_recv().is_err());
    assert_eq!(mount.called(CallKind::Recalls, &question(0)), (Status::Ok, Vec::new()));
    assert_eq!(granted.recv_timeout(LONG).unwrap().0, Status::Ok);
    daemon.stop();
}

#[test]
fn leases_are_not_withheld_for_a_mount_that_is_gone() {
    // As after the death of a daemon: the data that its mount has cached is unknown.
    let (daemon, there) = watching(1);
    let other = Client::attach_as(&daemon, user(0), 2);
    let waits = beside(move || other.write_lease(ROOT).inode);
    pause(Duration::from_millis(50));
    assert!(waits.try_recv().is_err());
    there.store(0, Ordering::SeqCst);
    assert_eq!(waits.recv_timeout(LONG).unwrap(), ROOT);
    let mut mount = answering(&daemon, 1);
    mount.client.write_lease(ROOT);
    mount.client.create(ROOT, b"file", FILE | 0o644);
    daemon.end(mount.client.session);
    let other = Client::attach_as(&daemon, user(0), 4);
    assert_eq!(beside(move || other.write_lease(ROOT).inode).recv_timeout(LONG).unwrap(), ROOT);
    daemon.stop();
}

#[test]
fn only_root_and_the_daemons_user_may_keep_others_waiting() {
    let daemon = daemon(LONG);
    let stranger = Client::attach(&daemon, user(7));
    assert_eq!(stranger.call(CallKind::Recalls, &[&question(0)]), Err(Status::Access));
    let root = Client::attach(&daemon, user(0));
    assert_eq!(root.call(CallKind::Recalls, &[&question(0)]), Ok(Vec::new()));
    assert_eq!(root.call(CallKind::Recalls, &[b"short"]), Err(Status::Invalid));
}
