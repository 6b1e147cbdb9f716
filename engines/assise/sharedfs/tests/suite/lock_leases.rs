//! Lock leases: SharedFS reads the locks that a session decided from its lock table, whatever the table contains, and
//! whether or not the session still lives, or the daemon that gave the lease.

use crate::client::{Client, FILE, ROOT, new_pool, tiny, user};
use crate::locks::request;
use ccnvm::LockLimits;
use format::call::{
    CallKind, FAMILY_WHOLE, LOCK_EXCLUSIVE, LOCK_LEASE, LOCK_SHARED, LOCK_WAITS, LockRequest, LockResponse,
    OWNER_PROCESS, Status, TicketRequest, split,
};
use format::locks::{
    HeldLock, LOCK_LIST_BYTES, LOCK_LIST_MAX, LOCK_SLOT_BYTES, LOCK_SLOTS, LOCK_TABLE_BYTES, LockList,
    list_offset,
};
use format::record::UNLINK_OPEN;
use format::{InodeNumber, Sequence};
use ipc::words::{FenceBy, LeaseState};
use ipc::{Host, SystemHost};
use pmem::{Medium, Region};
use sharedfs::{Config, Daemon};
use std::sync::Arc;
use zerocopy::IntoBytes;

const OTHER: InodeNumber = InodeNumber::new(1 << 40);

/// No quiet time, unless a test wants one.
fn config() -> Config {
    let lock_limits = LockLimits { quiet_ns: 0, ..LockLimits::default() };
    Config { locks_max: 1000, lock_limits, ..tiny() }
}

fn open(medium: &Medium, config: Config) -> Arc<Daemon> {
    Arc::new(Daemon::open(Arc::new(SystemHost), medium, config).unwrap().0)
}

fn fresh(config: Config) -> (tempfile::TempDir, Medium, Arc<Daemon>) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let medium = Medium::memory(folder.path()).unwrap();
    new_pool(&medium);
    let daemon = open(&medium, config);
    (folder, medium, daemon)
}

/// A process of this user that lives: this one.
fn attach(daemon: &Arc<Daemon>, uid: u32) -> Client {
    Client::attach_as(daemon, user(uid), std::process::id())
}

/// A session that decides locks: its lease, and the table behind it.
struct Holder {
    table: Region,
    slot: u32,
    expected: u32,
    inode: InodeNumber,
    sequence: u64,
}

fn held(owner: u64, kind: u8, first: u64, last: u64) -> HeldLock {
    HeldLock {
        owner: owner.into(),
        first: first.into(),
        last: last.into(),
        pid: (owner as u32).into(),
        owner_kind: OWNER_PROCESS,
        family: format::call::FAMILY_RANGES,
        kind,
        reserved: 0,
    }
}

impl Holder {
    fn holds(&self, client: &Client) -> bool {
        let lease = client.view.lock_lease(self.slot);
        lease.state == LeaseState::Write && lease.generation as u32 == self.expected
    }

    fn write(&mut self, locks: &[HeldLock]) {
        self.sequence += 1;
        let sequence = Sequence::new(self.sequence);
        let list = LockList { inode: self.inode, sequence, locks: locks.to_vec() };
        let mut bytes = [0; LOCK_LIST_BYTES];
        let length = list.encode(&mut bytes);
        let at = self.slot as usize * LOCK_SLOT_BYTES + list_offset(sequence);
        self.table.store(at as u64, &bytes[..length]);
    }

    fn list(&self) -> LockList {
        let mut bytes = [0; LOCK_SLOT_BYTES];
        self.table.read(u64::from(self.slot) * LOCK_SLOT_BYTES as u64, &mut bytes).unwrap();
        LockList::of_slot(&bytes).unwrap()
    }
}

fn lock(client: &Client, request: LockRequest) -> Result<LockResponse, Status> {
    let body = client.call(CallKind::Lock, &[request.as_bytes()])?;
    Ok(split::<LockResponse>(&body).unwrap().0)
}

/// Requests a lock by a call that asks for the lease; returns the lease, if it was granted.
fn lease(client: &Client, request: LockRequest) -> Option<Holder> {
    let request = LockRequest { flags: request.flags | LOCK_LEASE, ..request };
    holder_of(client, request.inode, lock(client, request).unwrap())
}

/// The lease that an answer grants, if any.
fn holder_of(client: &Client, inode: InodeNumber, answer: LockResponse) -> Option<Holder> {
    assert_eq!(answer.ticket.get(), 0);
    let slot = answer.slot.get().checked_sub(1)?;
    let table = client.daemon.lock_table(client.session).unwrap();
    assert_eq!(table.bytes(), LOCK_TABLE_BYTES as u64);
    let expected = answer.expected.get();
    let mut holder = Holder { table, slot, expected, inode, sequence: 0 };
    holder.sequence = holder.list().sequence.get();
    Some(holder)
}

fn in_the_way(client: &Client, request: LockRequest) -> Option<LockRequest> {
    let found = client.call(CallKind::TestLock, &[request.as_bytes()]).unwrap();
    (!found.is_empty()).then(|| split::<LockRequest>(&found).unwrap().0)
}

#[test]
fn whoever_asks_next_finds_what_the_table_says_and_the_lease_is_over() {
    let (_folder, _medium, daemon) = fresh(config());
    let (one, two) = (attach(&daemon, 1), attach(&daemon, 1));
    assert!(lock(&one, request(ROOT, 11, LOCK_SHARED, 0)).unwrap().slot.get() == 0, "it was not asked for");
    let mut holder = lease(&one, request(ROOT, 11, LOCK_EXCLUSIVE, 0)).unwrap();
    assert!(holder.holds(&one));
    assert_eq!(holder.list().locks, [held(11, LOCK_EXCLUSIVE, 0, u64::MAX)]);
    holder.write(&[held(11, LOCK_EXCLUSIVE, 0, 9), held(12, LOCK_SHARED, 20, 29)]);
    let tested = request(ROOT, 22, LOCK_EXCLUSIVE, 0);
    let part = |first: u64, last: u64| LockRequest { first: first.into(), last: last.into(), ..tested };
    assert_eq!(in_the_way(&two, part(5, 5)).unwrap().owner.get(), 11);
    assert!(!holder.holds(&one));
    assert_eq!(in_the_way(&two, part(10, 19)), None);
    assert_eq!(in_the_way(&two, part(25, 99)).unwrap().owner.get(), 12);
    // Locks that are written now are lost.
    holder.write(&[]);
    assert_eq!(lock(&two, part(5, 5)).map(|_| ()), Err(Status::WouldBlock));
    let unlocked = LockRequest { kind: LOCK_SHARED, ..request(ROOT, 11, LOCK_SHARED, 0) };
    one.call(CallKind::Unlock, &[unlocked.as_bytes()]).unwrap();
    assert!(lease(&two, part(5, 5)).is_none(), "another's lock is there");
    one.call(CallKind::ReleaseLocks, &[request(ROOT, 12, 1, 0).as_bytes()]).unwrap();
    assert!(lease(&two, part(5, 5)).is_some());
}

#[test]
fn a_test_that_finds_no_lock_grants_the_lease_and_one_that_finds_a_lock_does_not() {
    let (_folder, _medium, daemon) = fresh(config());
    let (one, two) = (attach(&daemon, 1), attach(&daemon, 1));
    let tested = LockRequest { flags: LOCK_LEASE, ..request(ROOT, 11, LOCK_EXCLUSIVE, 0) };
    let test = || one.call(CallKind::TestLock, &[tested.as_bytes()]).unwrap();
    let answer = split::<LockResponse>(&test()).unwrap().0;
    let mut holder = holder_of(&one, ROOT, answer).unwrap();
    assert!(holder.holds(&one) && holder.list().locks.is_empty());
    holder.write(&[held(11, LOCK_SHARED, 0, 9)]);
    assert_eq!(in_the_way(&two, request(ROOT, 22, LOCK_EXCLUSIVE, 0)).unwrap().owner.get(), 11);
    assert!(!holder.holds(&one));
    lock(&two, request(ROOT, 22, LOCK_SHARED, 0)).unwrap();
    assert_eq!(split::<LockRequest>(&test()).unwrap().0.owner.get(), 22);
    two.call(CallKind::Unlock, &[request(ROOT, 22, LOCK_SHARED, 0).as_bytes()]).unwrap();
    let plain = LockRequest { flags: 0, ..tested };
    assert_eq!(in_the_way(&one, plain), None, "an answer without the flag is empty");
}

#[test]
fn no_lease_is_given_where_somebody_waits_or_asked_a_moment_ago() {
    let lock_limits = LockLimits { quiet_ns: u64::MAX / 2, ..LockLimits::default() };
    let (_folder, _medium, daemon) = fresh(Config { lock_limits, ..config() });
    let (one, two) = (attach(&daemon, 1), attach(&daemon, 1));
    let holder = lease(&one, request(ROOT, 11, LOCK_EXCLUSIVE, 0)).unwrap();
    let waits = lock(&two, request(ROOT, 22, LOCK_EXCLUSIVE, LOCK_WAITS)).unwrap();
    assert!(waits.ticket.get() != 0 && !holder.holds(&one));
    assert!(lease(&one, request(ROOT, 11, LOCK_SHARED, 0)).is_none());
    one.call(CallKind::Unlock, &[request(ROOT, 11, LOCK_SHARED, 0).as_bytes()]).unwrap();
    let redeem = TicketRequest { ticket: waits.ticket, wait_ms: 1.into(), reserved: 0.into() };
    let answer = two.call(CallKind::RedeemLock, &[redeem.as_bytes()]).unwrap();
    assert_eq!(split::<LockResponse>(&answer).unwrap().0.ticket.get(), 0);
    two.call(CallKind::Unlock, &[request(ROOT, 22, LOCK_SHARED, 0).as_bytes()]).unwrap();
    assert!(lease(&two, request(ROOT, 22, LOCK_SHARED, 0)).is_none(), "two took turns");
}

#[test]
fn a_holder_that_does_not_leave_is_shut_out_and_keeps_its_locks() {
    let (_folder, _medium, daemon) = fresh(config());
    let (one, two) = (attach(&daemon, 1), attach(&daemon, 2));
    let mut holder = lease(&one, request(ROOT, 11, LOCK_SHARED, 0)).unwrap();
    let _stopped = one.pages.inside().enter(Some(1), FenceBy::Operation);
    holder.write(&[held(11, LOCK_EXCLUSIVE, 0, 9)]);
    assert_eq!(lock(&two, request(ROOT, 22, LOCK_SHARED, 0)).map(|_| ()), Err(Status::WouldBlock));
    assert_eq!((daemon.terminations().len(), daemon.sessions().len()), (1, 1));
    // Its process comes back to them.
    let again = attach(&daemon, 1);
    again.call(CallKind::Unlock, &[request(ROOT, 11, LOCK_SHARED, 0).as_bytes()]).unwrap();
    assert_eq!(lock(&two, request(ROOT, 22, LOCK_SHARED, 0)).map(|_| ()), Ok(()));
}

#[test]
fn a_dead_session_has_no_locks_and_leaves_no_table() {
    let (_folder, medium, daemon) = fresh(config());
    let (one, two) = (attach(&daemon, 1), attach(&daemon, 1));
    let mut holder = lease(&one, request(ROOT, 11, LOCK_EXCLUSIVE, 0)).unwrap();
    holder.write(&[held(11, LOCK_EXCLUSIVE, 0, 9), held(13, LOCK_SHARED, 10, 19)]);
    let waits = lock(&two, request(ROOT, 22, LOCK_EXCLUSIVE, LOCK_WAITS)).unwrap();
    daemon.end(one.session);
    let redeem = TicketRequest { ticket: waits.ticket, wait_ms: 1.into(), reserved: 0.into() };
    let answer = two.call(CallKind::RedeemLock, &[redeem.as_bytes()]).unwrap();
    assert_eq!(split::<LockResponse>(&answer).unwrap().0.ticket.get(), 0);
    assert!(!medium.list().unwrap().iter().any(|name| name.ends_with("-locks")));
    daemon.stop();
}

#[test]
fn a_daemon_that_comes_after_finds_the_locks_of_whoever_lives_and_does_not_say_a_word() {
    for calls_before in 0..4 {
        let (_folder, medium, daemon) = fresh(config());
        let (one, two) = (attach(&daemon, 1), Client::attach_as(&daemon, user(2), u32::MAX - 1));
        let mut holder = lease(&one, request(ROOT, 11, LOCK_EXCLUSIVE, 0)).unwrap();
        for _ in 0..calls_before {
            // The lease comes and goes, and is noted each time.
            in_the_way(&two, request(ROOT, 22, LOCK_SHARED, 0));
            holder = lease(&one, request(ROOT, 11, LOCK_EXCLUSIVE, 0)).unwrap();
        }
        holder.write(&[held(11, LOCK_EXCLUSIVE, 0, 9), held(14, LOCK_SHARED, 20, 20)]);
        drop(daemon);
        drop((one, two));
        let daemon = open(&medium, config());
        let other = Client::attach_as(&daemon, user(3), u32::MAX - 2);
        let part = |at: u64| LockRequest { first: at.into(), last: at.into(), ..request(ROOT, 33, 2, 0) };
        assert_eq!(in_the_way(&other, part(9)).unwrap().owner.get(), 11);
        assert_eq!(in_the_way(&other, part(20)).unwrap().owner.get(), 14);
        assert_eq!(in_the_way(&other, part(15)), None, "the lock of the call is the table's matter");
        assert!(
            !medium.list().unwrap().iter().any(|name| name.ends_with("-locks")),
            "it is the register's now"
        );
        // And the daemon after that.
        drop((other, daemon));
        let daemon = open(&medium, config());
        let other = Client::attach_as(&daemon, user(3), u32::MAX - 2);
        assert_eq!(in_the_way(&other, part(9)).unwrap().owner.get(), 11);
        let again = attach(&daemon, 1);
        again.call(CallKind::ReleaseLocks, &[request(ROOT, 11, 1, 0).as_bytes()]).unwrap();
        assert_eq!(in_the_way(&other, part(9)), None);
    }
}

#[test]
fn a_table_may_say_anything() {
    let (_folder, _medium, daemon) = fresh(config());
    let (one, two) = (attach(&daemon, 1), attach(&daemon, 2));
    assert!(lock(&two, request(ROOT, 22, LOCK_SHARED, 0)).is_ok());
    two.call(CallKind::Unlock, &[request(ROOT, 22, LOCK_SHARED, 0).as_bytes()]).unwrap();
    let mine = request(ROOT, 11, LOCK_EXCLUSIVE, 0);
    let told = |holder: &mut Holder, locks: &[HeldLock]| holder.write(locks);
    let worst = held(22, LOCK_EXCLUSIVE, 0, 9);
    let lies: [Vec<HeldLock>; 5] = [
        vec![worst],
        vec![HeldLock { owner_kind: 9, ..worst }, HeldLock { kind: 0, ..worst }],
        vec![HeldLock { family: FAMILY_WHOLE + 1, ..worst }, held(11, LOCK_SHARED, 9, 3)],
        (0..LOCK_LIST_MAX as u64).map(|number| held(100 + number, LOCK_EXCLUSIVE, 0, 9)).collect(),
        vec![],
    ];
    for locks in lies {
        let mut holder = lease(&one, mine).unwrap();
        told(&mut holder, &locks);
        let found = in_the_way(&two, request(ROOT, 23, LOCK_EXCLUSIVE, 0));
        // One of its own owners may have the lock; another user's owner never does.
        assert!(found.is_none_or(|found| found.owner.get() != 22), "{found:?}");
        for owner in 100..100 + LOCK_LIST_MAX as u64 {
            one.call(CallKind::ReleaseLocks, &[request(ROOT, owner, 1, 0).as_bytes()]).unwrap();
        }
    }
    let mut holder = lease(&one, mine).unwrap();
    holder.inode = OTHER;
    told(&mut holder, &[worst]);
    assert_eq!(in_the_way(&two, request(ROOT, 23, LOCK_EXCLUSIVE, 0)), None, "of another file");
    let holder = lease(&one, mine).unwrap();
    holder.table.store(0, &vec![0xff; LOCK_TABLE_BYTES]);
    assert_eq!(in_the_way(&two, request(ROOT, 23, LOCK_EXCLUSIVE, 0)), None, "no list at all");
    let holder = lease(&one, mine).unwrap();
    let file = std::fs::File::from(holder.table.descriptor().unwrap().try_clone_to_owned().unwrap());
    file.set_len(0).unwrap();
    assert_eq!(in_the_way(&two, request(ROOT, 23, LOCK_EXCLUSIVE, 0)), None, "no file");
    assert_eq!(daemon.failure(), None, "the table is its user's to cut");
}

#[test]
fn leases_are_bounded_and_those_of_a_user_leave_others_theirs() {
    let (_folder, _medium, daemon) = fresh(Config { locks_max: 10 * LOCK_LIST_MAX, ..config() });
    let (one, two) = (attach(&daemon, 1), attach(&daemon, 2));
    let known = |client: &Client, number: u64| InodeNumber::new(client.next_inode + number);
    let mut leases = 0;
    while lease(&one, request(known(&one, leases), 11, LOCK_SHARED, 0)).is_some() {
        leases += 1;
    }
    assert!((2..=5).contains(&leases), "half of what there may be: {leases}");
    assert!(lease(&two, request(known(&two, 0), 22, LOCK_SHARED, 0)).is_some());
    // With owners enough, as many as there are slots; one that is back is free for another.
    let (_folder, _medium, daemon) = fresh(Config { locks_max: 1 << 14, ..config() });
    let (one, two) = (attach(&daemon, 0), attach(&daemon, 0));
    two.walk_from(ROOT, &[], (1, 1)).unwrap();
    let mut leases = 0;
    while lease(&one, request(known(&one, leases), 11, LOCK_SHARED, 0)).is_some() {
        leases += 1;
    }
    assert_eq!(leases, LOCK_SLOTS as u64);
    one.call(CallKind::ReleaseLocks, &[request(InodeNumber::NONE, 11, 1, 0).as_bytes()]).unwrap();
    assert!(lease(&one, request(known(&one, 999), 11, LOCK_SHARED, 0)).is_some());
}

#[test]
fn a_slot_without_locks_is_for_another_file() {
    let (_folder, _medium, daemon) = fresh(config());
    let one = attach(&daemon, 0);
    let known = |number: u64| InodeNumber::new(one.next_inode + number);
    let mut all: Vec<Holder> = (0..LOCK_SLOTS as u64)
        .map(|number| lease(&one, request(known(number), 11, LOCK_SHARED, 0)).expect("there is a slot"))
        .collect();
    all[7].write(&[]);
    all[9].write(&[]);
    for (number, free) in [7, 9].into_iter().enumerate() {
        let file = known(1000 + number as u64);
        // Not at once after a slot was made free.
        let until = SystemHost.now().after(std::time::Duration::from_secs(20));
        let holder = std::iter::repeat_with(|| lease(&one, request(file, 11, LOCK_SHARED, 0)))
            .find(|holder| holder.is_some() || SystemHost.now() > until);
        let holder = holder.flatten().expect("there is a slot that nobody needs");
        assert_eq!(holder.slot, all[free].slot);
        assert!(holder.holds(&one) && !all[free].holds(&one));
    }
    let held = all.iter().filter(|holder| holder.holds(&one)).count();
    assert_eq!(held, LOCK_SLOTS - 2, "the others have locks");
    assert!(lease(&one, request(known(2000), 11, LOCK_SHARED, 0)).is_none());
}

/// A program that creates, opens, locks and removes one file after the other decides the locks on each, however fast it
/// is.
#[test]
fn slots_of_removed_files_are_for_others_at_once() {
    let (_folder, _medium, daemon) = fresh(config());
    let mut one = attach(&daemon, 0);
    one.write_lease(ROOT);
    for number in 0..4 * LOCK_SLOTS {
        let (file, _) = one.create(ROOT, b"file", FILE | 0o644);
        let mut holder = lease(&one, request(file, 11, LOCK_EXCLUSIVE, 0));
        holder.as_mut().unwrap_or_else(|| panic!("file {number} has no slot")).write(&[]);
        assert!(one.unlink(ROOT, b"file", file, UNLINK_OPEN));
        one.digest(true).unwrap();
        one.close(file, 0);
    }
    // Not those of removed files that are still locked.
    let (file, _) = one.create(ROOT, b"file", FILE | 0o644);
    let holder = lease(&one, request(file, 11, LOCK_EXCLUSIVE, 0)).expect("there is a slot");
    assert!(one.unlink(ROOT, b"file", file, UNLINK_OPEN));
    one.digest(true).unwrap();
    for number in 0..2 * LOCK_SLOTS {
        let (other, _) = one.create(ROOT, number.to_string().as_bytes(), FILE | 0o644);
        lease(&one, request(other, 11, LOCK_EXCLUSIVE, 0));
    }
    assert!(holder.holds(&one));
}

#[test]
fn a_session_that_asks_for_many_processes_is_not_out_of_them_when_these_have_ended() {
    let (_folder, _medium, daemon) = fresh(Config { locks_max: 4 * LOCK_LIST_MAX, ..config() });
    let (one, two) = (attach(&daemon, 0), attach(&daemon, 0));
    for owner in 100..100 + 10 * LOCK_LIST_MAX as u64 {
        // By calls, and under a lease that was offered with a lock of the process.
        assert!(lock(&one, request(ROOT, owner, LOCK_SHARED, 0)).is_ok(), "{owner} by calls");
        one.call(CallKind::ReleaseLocks, &[request(ROOT, owner, 1, 0).as_bytes()]).unwrap();
        let mut holder = lease(&one, request(ROOT, owner, LOCK_EXCLUSIVE, 0)).expect("nobody has locks");
        holder.write(&[]);
        assert_eq!(in_the_way(&two, request(ROOT, 22, LOCK_EXCLUSIVE, 0)), None);
    }
}
