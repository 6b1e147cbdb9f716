//! Calls beside a batch: while it reads, and while its commit waits for the medium.

use crate::client::{Client, DIRECTORY, FILE, ROOT, fresh, new_pool, open, tiny, user};
use crate::door::eventually;
use crate::locks;
use format::call::{CallKind, DigestRequest, LOCK_EXCLUSIVE, LockResponse, Status, TicketRequest, split};
use format::{InodeNumber, Sequence};
use ipc::ring::{Call, Link, RingClient};
use ipc::{Host, SystemHost};
use pmem::Recorder;
use pmem::recorded::{HeldCall, Verb};
use sharedfs::{Config, Daemon, log_file};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

/// Longer than anything here takes that is not held up.
pub const LONG: Duration = Duration::from_secs(20);

/// Does something in a thread of its own; the result comes when it is done.
pub fn beside<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (done, result) = channel();
    // A test that does not wait for it any more has failed already.
    SystemHost.spawn("beside", Box::new(move || drop(done.send(act())))).unwrap();
    result
}

/// Two clients of root, each with the lease on a directory of its own, and a log that is ready for a third.
fn two() -> (Recorder, Arc<Daemon>, [(Client, InodeNumber); 2]) {
    let (recorder, daemon) = fresh();
    let mut one = Client::attach(&daemon, user(0));
    let mut two = Client::attach_as(&daemon, user(0), 2);
    one.write_lease(ROOT);
    let [(first, _), (second, _)] =
        [b"first".as_slice(), b"second"].map(|name| one.create(ROOT, name, DIRECTORY | 0o777));
    one.digest(true).unwrap();
    two.walk("second").unwrap();
    two.write_lease(second);
    assert!(two.create(second, b"before", FILE | 0o644).1);
    two.digest(true).unwrap();
    daemon.make_ready_logs();
    (recorder, daemon, [(one, first), (two, second)])
}

#[test]
fn walks_leases_and_starts_go_on_while_a_commit_waits_for_the_medium() {
    let (recorder, daemon, [(mut one, first), (mut two, second)]) = two();
    assert!(one.create(first, b"file", FILE | 0o644).1);
    let hold = recorder.hold(HeldCall::Sync);
    let digest = beside(move || one.digest(true));
    eventually("the commit waits", || hold.waiting() == 1);
    let another = daemon.clone();
    let others = beside(move || {
        let three = Client::attach_as(&another, user(5), 3);
        let before = three.walk("second/before").unwrap().inode;
        three.open(before, 1, 1).unwrap();
        three.call(CallKind::Statfs, &[]).unwrap();
        let held = two.write_lease(second);
        assert!(two.under(&[held], |two| two.create(second, b"after", FILE | 0o644).1));
        two.walk("second").unwrap();
    });
    others.recv_timeout(LONG).expect("nothing of this waits for the commit");
    drop(hold);
    digest.recv_timeout(LONG).unwrap().unwrap();
    let mut three = Client::attach_as(&daemon, user(0), 4);
    three.walk("first/file").unwrap();
    three.release();
}

#[test]
fn what_the_ledger_notes_beside_a_batch_is_in_its_commit() {
    let (recorder, daemon, [(mut one, first), (mut two, second)]) = two();
    assert!(one.create(first, b"file", FILE | 0o644).1);
    let hold =
        recorder.hold(HeldCall::Read(log_file(one.attached.welcome.log, one.attached.welcome.incarnation)));
    let commits = daemon.commit();
    let digest = beside(move || {
        one.digest(true).unwrap();
        one
    });
    eventually("the batch reads", || hold.waiting() == 1);
    // A log, and a right of another one: both are in the ledger alone.
    let mut three = Client::attach_as(&daemon, user(0), 3);
    three.walk("second").unwrap();
    two.release();
    three.write_lease(second);
    assert!(three.create(second, b"by three", FILE | 0o644).1);
    assert_eq!(daemon.commit(), commits);
    drop(hold);
    let one = digest.recv_timeout(LONG).unwrap();
    assert!(daemon.commit() > commits);
    // The medium as a crash of the machine leaves it.
    let image = recorder.image();
    drop((one, two, three));
    let (daemon, recovered) = open(&Recorder::of_image(image).medium());
    assert_eq!(recovered.cuts, []);
    let after = Client::attach(&daemon, user(0));
    after.walk("first/file").unwrap();
    after.walk("second/by three").unwrap();
}

/// The program asks for one digest. Records that it adds before the batch is done, more than a quarter of its log, follow without
/// another call.
#[test]
fn a_log_that_fills_up_beside_a_batch_is_digested_on() {
    let recorder = Recorder::new();
    new_pool(&recorder.medium());
    let config = Config { idle_digest: 10 * LONG, ..tiny() };
    let (daemon, _) = Daemon::open(Arc::new(SystemHost), &recorder.medium(), config).unwrap();
    let daemon = Arc::new(daemon);
    daemon.start().unwrap();
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let (file, made) = one.create(ROOT, b"file", FILE | 0o644);
    let write = |one: &mut Client, blocks: std::ops::Range<u64>| {
        blocks.for_each(|block| assert!(one.write(file, block * 4096, &[7; 4096])));
    };
    write(&mut one, 0..4);
    let hold =
        recorder.hold(HeldCall::Read(log_file(one.attached.welcome.log, one.attached.welcome.incarnation)));
    one.digest(false).unwrap();
    eventually("the batch reads", || hold.waiting() == 1);
    write(&mut one, 4..10);
    drop(hold);
    let last = one.pages.commit().load();
    eventually("all is digested", || one.view.digested().sequence == last);
    assert!(made);
    daemon.stop();
}

/// The background digests all of a log when a call begins to wait for the first of its records: the batch ends with those.
#[test]
fn a_batch_ends_with_the_record_that_a_call_waits_for() {
    let recorder = Recorder::new();
    new_pool(&recorder.medium());
    let config = Config { idle_digest: 10 * LONG, ..tiny() };
    let (daemon, _) = Daemon::open(Arc::new(SystemHost), &recorder.medium(), config).unwrap();
    let daemon = Arc::new(daemon);
    daemon.start().unwrap();
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let (file, made) = one.create(ROOT, b"file", FILE | 0o644);
    assert!(made);
    one.digest(true).unwrap();
    let first = one.pages.commit().load().next();
    (0..4).for_each(|block| assert!(one.write(file, block * 4096, &[7; 4096])));
    let last = one.pages.commit().load();
    let hold =
        recorder.hold(HeldCall::Read(log_file(one.attached.welcome.log, one.attached.welcome.incarnation)));
    let commits = daemon.commit().get();
    one.digest(false).unwrap();
    eventually("the batch reads", || hold.waiting() == 1);
    let (session, caller) = (one.session, daemon.clone());
    let waits = beside(move || {
        let request = DigestRequest { up_to: first, wait: U32::new(1), reserved: U32::new(0) };
        caller.call(session, CallKind::Digest as u16, request.as_bytes(), 256).0
    });
    eventually("a call waits for the digest", || daemon.is_digest_awaited(session));
    drop(hold);
    assert_eq!(waits.recv_timeout(LONG).unwrap(), Status::Ok);
    eventually("all is digested", || one.view.digested().sequence == last);
    assert!(!daemon.is_digest_awaited(session));
    // One for the record that the call waited for, one for the rest.
    assert_eq!(daemon.commit().get(), commits + 2);
    daemon.stop();
}

#[test]
fn one_sync_of_the_ledger_is_good_for_all_that_wait() {
    let (recorder, daemon, [(one, first), (two, second)]) = two();
    let leases = [one.write_lease(first), two.write_lease(second)];
    let clients = (3..7).map(|pid| Client::attach_as(&daemon, user(pid), pid));
    let clients: Vec<Client> = clients.chain([one, two]).collect();
    let watch = Client::attach_as(&daemon, user(8), 8);
    let is_synced = || watch.view.synced().get() >= watch.attached.welcome.ledger.get();
    let hold = recorder.hold(HeldCall::Sync);
    let before = recorder.calls(Verb::Sync);
    let sync = |client: Client| {
        let up_to = client.attached.welcome.ledger.get();
        beside(move || {
            let request = DigestRequest {
                up_to: format::Sequence::new(up_to),
                wait: U32::new(0),
                reserved: U32::new(0),
            };
            client.call(CallKind::SyncLedger, &[request.as_bytes()]).unwrap();
            assert!(client.view.synced().get() >= up_to);
        })
    };
    let all: Vec<_> = clients.into_iter().map(sync).collect();
    eventually("the first one syncs", || hold.waiting() == 1);
    assert!(!is_synced(), "nothing is told before it is so");
    drop(hold);
    for one in all {
        one.recv_timeout(LONG).unwrap();
    }
    assert_eq!((recorder.calls(Verb::Sync) - before, is_synced()), (1, true));
    assert!(leases.iter().all(|lease| lease.version.get() > 0));
}

/// The way to a daemon in the same process.
struct Up;

impl Link for Up {
    fn is_up(&self) -> bool {
        true
    }
}

/// A client whose ring is served, for calls from several threads.
pub struct Served {
    pub client: Client,
    ring: Arc<RingClient>,
}

impl Served {
    pub fn new(daemon: &Arc<Daemon>, pid: u32) -> Self {
        let client = Client::attach_as(daemon, user(0), pid);
        daemon.serve(client.session).unwrap();
        let (memory, limits) = (client.attached.ring.clone(), client.attached.ring_limits);
        let ring = RingClient::new(Arc::new(SystemHost), Box::new(Up), memory, limits, 0).unwrap();
        Self { client, ring: Arc::new(ring) }
    }

    pub fn call(&self, kind: CallKind, body: &[u8]) -> Receiver<(Status, Vec<u8>)> {
        let (ring, body) = (self.ring.clone(), body.to_vec());
        beside(move || {
            let call = Call { id: 1, kind: kind as u16, body: &body, response_bytes_max: 256 };
            let response = ring.call(&call, Some(SystemHost.now().after(LONG))).unwrap();
            (Status::from_raw(response.status), response.body)
        })
    }

    pub fn called(&self, kind: CallKind, body: &[u8]) -> (Status, Vec<u8>) {
        self.call(kind, body).recv_timeout(LONG).expect("nothing holds it up")
    }
}

#[test]
fn the_other_calls_of_a_session_go_on_while_one_waits_for_the_medium() {
    let (recorder, daemon) = fresh();
    daemon.start().unwrap();
    let served = Served::new(&daemon, 1);
    eventually("a log is ready for the next program", || recorder.medium().list().unwrap().len() > 3);
    let hold = recorder.hold(HeldCall::Sync);
    let up_to = Sequence::new(served.client.attached.welcome.ledger.get());
    let request = DigestRequest { up_to, wait: U32::new(0), reserved: U32::new(0) };
    let sync = served.call(CallKind::SyncLedger, request.as_bytes());
    eventually("the ledger is being synced", || hold.waiting() > 0);
    assert_eq!(served.called(CallKind::Statfs, &[]).0, Status::Ok);
    assert!(sync.try_recv().is_err(), "no answer before it is synced");
    drop(hold);
    assert_eq!(sync.recv_timeout(LONG).unwrap().0, Status::Ok);
    assert_eq!(served.called(CallKind::SyncAll, &[]).0, Status::Ok);
    daemon.stop();
}

#[test]
fn the_other_calls_of_a_session_go_on_while_one_waits_for_a_lock() {
    let (_recorder, daemon) = fresh();
    daemon.start().unwrap();
    let (one, two) = (Client::attach_as(&daemon, user(0), 1), Served::new(&daemon, 2));
    let request = |owner, wait| locks::request(ROOT, owner, LOCK_EXCLUSIVE, wait);
    let ticket_in = |(status, body): (Status, Vec<u8>)| {
        assert_eq!(status, Status::Ok);
        split::<LockResponse>(&body).unwrap().0.ticket
    };
    one.call(CallKind::Lock, &[request(11, 0).as_bytes()]).unwrap();
    let ticket = ticket_in(two.called(CallKind::Lock, request(22, 1).as_bytes()));
    let question = TicketRequest { ticket, wait_ms: 1000.into(), reserved: 0.into() };
    // A question waits for a second: where the machine stands still for so long it is asked again.
    let ask = || two.call(CallKind::RedeemLock, question.as_bytes());
    let waits = (0..5).find_map(|_| {
        let asked = ask();
        (0..10).for_each(|_| assert_eq!(two.called(CallKind::Statfs, &[]).0, Status::Ok));
        asked.try_recv().is_err().then_some(asked)
    });
    let mut asked = waits.expect("other calls are answered while it waits");
    one.call(CallKind::Unlock, &[request(11, 0).as_bytes()]).unwrap();
    while ticket_in(asked.recv_timeout(LONG).unwrap()).get() != 0 {
        asked = ask();
    }
    // The daemon's end leaves nothing unanswered.
    let ticket = one.call(CallKind::Lock, &[request(11, 1).as_bytes()]).unwrap();
    assert_ne!(split::<LockResponse>(&ticket).unwrap().0.ticket.get(), 0);
    daemon.stop();
}
