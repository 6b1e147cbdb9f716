//! Rights to open a file once, which a program passes to the mount.

use crate::client::{Client, DIRECTORY, FILE, ROOT, fresh, user};
use format::InodeNumber;
use format::call::{CallKind, LEASE_READ, OpenRequest, PassResponse, Status, split};
use format::pass::TOKEN_BYTES;
use zerocopy::IntoBytes;

const ALICE: u32 = 1000;
const BOB: u32 = 1001;
const READ: u8 = 1;
const WRITE: u8 = 2;

fn pass(client: &Client, inode: InodeNumber, access: u8) -> Result<[u8; TOKEN_BYTES], Status> {
    let request = OpenRequest { inode, access, mode: 0, reserved: [0; 6] };
    Ok(split::<PassResponse>(&client.call(CallKind::Pass, &[request.as_bytes()])?).unwrap().0.token)
}

fn open_by(client: &Client, inode: InodeNumber, access: u8, token: &[u8]) -> Result<(), Status> {
    let request = OpenRequest { inode, access, mode: LEASE_READ, reserved: [0; 6] };
    client.call(CallKind::Open, &[request.as_bytes(), token]).map(drop)
}

/// A folder for all, a file of Alice's in it, and two sessions: the mount's, and hers.
fn scene() -> (std::sync::Arc<sharedfs::Daemon>, Client, Client, InodeNumber) {
    let (_, daemon) = fresh();
    let mut gateway = Client::attach(&daemon, user(0));
    gateway.write_lease(ROOT);
    let (common, file) = (gateway.new_inode(), gateway.new_inode());
    assert!(gateway.create_as(common, ROOT, b"common", DIRECTORY | 0o777, 0));
    assert!(gateway.create_as(file, ROOT, b"hers", FILE | 0o400, ALICE));
    let alice = Client::attach(&daemon, user(ALICE));
    assert_eq!(alice.walk("hers").unwrap().inode, file);
    (daemon, gateway, alice, file)
}

#[test]
fn a_right_is_good_once_for_its_file_and_its_use_and_only_at_the_mount() {
    let (daemon, gateway, alice, file) = scene();
    let token = pass(&alice, file, READ).unwrap();
    assert_ne!(token, pass(&alice, file, READ).unwrap());
    let bob = Client::attach(&daemon, user(BOB));
    bob.walk("hers").unwrap();
    assert_eq!(open_by(&bob, file, READ, &token), Err(Status::Access), "it is not the mount");
    assert_eq!(open_by(&gateway, file, READ | WRITE, &token), Err(Status::Access), "it is for reading");
    assert_eq!(open_by(&gateway, ROOT, READ, &token), Err(Status::Access), "it is for another inode");
    assert_eq!(open_by(&gateway, file, READ, &token[1..]), Err(Status::Invalid));
    assert_eq!(open_by(&gateway, file, READ, &token), Ok(()));
    assert_eq!(open_by(&gateway, file, READ, &token), Err(Status::Access), "it was used");
}

#[test]
fn nobody_passes_more_than_is_his_and_nothing_after_his_end() {
    let (daemon, gateway, alice, file) = scene();
    assert_eq!(pass(&alice, file, WRITE), Err(Status::Access), "the mode forbids it");
    assert_eq!(pass(&alice, InodeNumber::new(1 << 40), READ), Err(Status::Invalid), "she never met it");
    assert_eq!(pass(&alice, file, 4), Err(Status::Invalid));
    let bob = Client::attach(&daemon, user(BOB));
    bob.walk("hers").unwrap();
    assert_eq!(pass(&bob, file, READ), Err(Status::Access));
    let token = pass(&alice, file, READ).unwrap();
    daemon.end(alice.session);
    assert_eq!(open_by(&gateway, file, READ, &token), Err(Status::Access), "her session is over");
}

#[test]
fn what_only_its_makers_log_has_is_passed_too() {
    let (_daemon, gateway, mut alice, _) = scene();
    let common = alice.walk("common").unwrap().inode;
    alice.write_lease(common);
    let file = alice.new_inode();
    assert!(alice.create_as(file, common, b"new", FILE | 0o400, ALICE));
    let token = pass(&alice, file, READ | WRITE).unwrap();
    assert_eq!(open_by(&gateway, file, READ | WRITE, &token), Ok(()));
}

#[test]
fn rights_that_nobody_uses_are_bounded() {
    let (_daemon, gateway, alice, file) = scene();
    let first = pass(&alice, file, READ).unwrap();
    let mut last = first;
    for _ in 0..100 {
        last = pass(&alice, file, READ).unwrap();
    }
    assert_eq!(open_by(&gateway, file, READ, &first), Err(Status::Access));
    assert_eq!(open_by(&gateway, file, READ, &last), Ok(()));
}
