//! Locks by call: between sessions, owners that belong to a user, and what ends with a session. And what a process
//! goes on with that was shut out and comes back.

use crate::client::{Client, FILE, ROOT, fresh, tiny, user};
use format::InodeNumber;
use format::call::{
    CallKind, FAMILY_RANGES, LEASE_READ, LEASE_WRITE, LOCK_EXCLUSIVE, LOCK_SHARED, LockRequest, LockResponse,
    OWNER_PROCESS, Status, TicketRequest, split,
};
use ipc::sync::Ordering;
use ipc::words::FenceBy;
use zerocopy::IntoBytes;

pub fn request(inode: InodeNumber, owner: u64, kind: u8, wait: u8) -> LockRequest {
    LockRequest {
        inode,
        owner: owner.into(),
        pid: (owner as u32).into(),
        owner_kind: OWNER_PROCESS,
        family: FAMILY_RANGES,
        kind,
        flags: wait,
        first: 0.into(),
        last: u64::MAX.into(),
    }
}

pub fn lock(client: &Client, request: LockRequest) -> Result<u64, Status> {
    let body = client.call(CallKind::Lock, &[request.as_bytes()])?;
    Ok(split::<LockResponse>(&body).unwrap().0.ticket.get())
}

pub fn redeem(client: &Client, ticket: u64) -> Result<u64, Status> {
    let request = TicketRequest { ticket: ticket.into(), wait_ms: 1.into(), reserved: 0.into() };
    let body = client.call(CallKind::RedeemLock, &[request.as_bytes()])?;
    Ok(split::<LockResponse>(&body).unwrap().0.ticket.get())
}

#[test]
fn a_lock_excludes_others_until_its_session_ends() {
    let (_recorder, daemon) = fresh();
    let (one, two) = (Client::attach(&daemon, user(1)), Client::attach(&daemon, user(1)));
    assert_eq!(lock(&one, request(ROOT, 11, LOCK_EXCLUSIVE, 0)), Ok(0));
    assert_eq!(lock(&two, request(ROOT, 22, LOCK_SHARED, 0)), Err(Status::WouldBlock));
    let ticket = lock(&two, request(ROOT, 22, LOCK_SHARED, 1)).unwrap();
    assert_eq!(redeem(&two, ticket), Ok(ticket));
    assert_eq!(redeem(&one, ticket), Err(Status::Invalid), "another's ticket");
    let found = two.call(CallKind::TestLock, &[request(ROOT, 22, LOCK_SHARED, 0).as_bytes()]).unwrap();
    assert_eq!(split::<LockRequest>(&found).unwrap().0.owner.get(), 11);
    daemon.end(one.session);
    assert_eq!(redeem(&two, ticket), Ok(0));
    assert_eq!(redeem(&two, ticket), Err(Status::Invalid), "a ticket is good once");
}

#[test]
fn all_owners_of_a_session_end_with_it_also_those_of_one_number() {
    let (_recorder, daemon) = fresh();
    let two = Client::attach(&daemon, user(1));
    for _ in 0..2 * tiny().locks_max {
        let one = Client::attach(&daemon, user(1));
        for pid in 1..=2 {
            let request = LockRequest { pid: pid.into(), ..request(ROOT, 11, LOCK_SHARED, 0) };
            assert_eq!(lock(&one, request), Ok(0));
        }
        daemon.end(one.session);
        assert_eq!(lock(&two, request(ROOT, 22, LOCK_EXCLUSIVE, 0)), Ok(0));
        two.call(CallKind::Unlock, &[request(ROOT, 22, LOCK_SHARED, 0).as_bytes()]).unwrap();
    }
}

#[test]
fn a_user_who_takes_all_he_can_leaves_sessions_and_owners_of_locks_to_others() {
    let (_recorder, daemon) = fresh();
    let mut crowd = Vec::new();
    while let Ok(client) = Client::try_attach_as(&daemon, user(1), crowd.len() as u32 + 1) {
        crowd.push(client);
    }
    assert_eq!(crowd.len(), tiny().sessions_max / 2);
    let (two, root) = (Client::attach_as(&daemon, user(2), 91), Client::attach_as(&daemon, user(0), 92));
    let mut owners = 0;
    while lock(&crowd[0], request(ROOT, 1 + owners, LOCK_SHARED, 0)).is_ok() {
        owners += 1;
    }
    assert_eq!(owners, tiny().locks_max as u64 / 2);
    assert_eq!(lock(&crowd[1], request(ROOT, 100, LOCK_SHARED, 0)), Err(Status::Limit));
    assert_eq!(lock(&two, request(ROOT, 101, LOCK_SHARED, 0)), Ok(0));
    assert_eq!(lock(&root, request(ROOT, 102, LOCK_SHARED, 0)), Ok(0));
    // The locks of an ended session leave room for its user's next ones.
    daemon.end(crowd.remove(0).session);
    assert_eq!(lock(&crowd[0], request(ROOT, 100, LOCK_SHARED, 0)), Ok(0));
}

#[test]
fn nobody_speaks_for_another_users_owner() {
    let (_recorder, daemon) = fresh();
    let (one, two) = (Client::attach(&daemon, user(1)), Client::attach(&daemon, user(2)));
    assert_eq!(lock(&one, request(ROOT, 11, LOCK_EXCLUSIVE, 0)), Ok(0));
    assert_eq!(lock(&two, request(ROOT, 11, LOCK_SHARED, 0)), Err(Status::Invalid));
    for kind in [CallKind::Unlock, CallKind::ReleaseLocks] {
        two.call(kind, &[request(ROOT, 11, LOCK_SHARED, 0).as_bytes()]).unwrap();
    }
    assert_eq!(lock(&two, request(ROOT, 22, LOCK_SHARED, 0)), Err(Status::WouldBlock));
}

#[test]
fn who_was_shut_out_comes_back_to_what_it_had_open() {
    let (_recorder, daemon) = fresh();
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let (file, _) = one.create(ROOT, b"file", FILE | 0o644);
    assert!(one.write(file, 0, b"kept"));
    one.pages.open()[0].store(file.get(), Ordering::Release);
    let stuck = one.pages.inside().enter(Some(1), FenceBy::Operation);
    let mut two = Client::attach_as(&daemon, user(0), 2);
    two.walk("file").unwrap();
    one.pages.inside().leave(stuck);
    two.lease(&[(ROOT, LEASE_WRITE), (file, LEASE_WRITE)]).unwrap();
    assert!(two.unlink(ROOT, b"file", file, 0));
    two.digest(true).unwrap();
    daemon.tidy();
    let stranger = Client::attach_as(&daemon, user(9), 3);
    assert_eq!(stranger.lease(&[(file, LEASE_READ)]).map(|_| ()), Err(Status::Invalid));
    let again = Client::attach(&daemon, user(0));
    assert_eq!(again.read_lease(file).item.links.get(), 0);
    assert_eq!(again.read(file, 0, 9).unwrap(), b"kept");
    again.close(file, 1);
    daemon.tidy();
    assert_eq!(daemon.usage().inodes, 1);
}
