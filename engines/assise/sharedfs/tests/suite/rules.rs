//! Single promises of SharedFS, one test each.

use crate::client::{Client, DIRECTORY, FILE, ROOT, fresh, new_pool, open, tiny, user};
use crate::door::eventually;
use format::call::{
    CallKind, EXTENT_BY_CALL, ExtentReply, ExtentsResponse, InodeRequest, LEASE_READ, LEASE_WRITE,
    RangeRequest, RefillRequest, RefillResponse, StatfsResponse, Status, split,
};
use format::record::{CreateBody, Operation, SYMLINK_BYTES_MAX, room_blocks};
use format::session::ENDED_MAX;
use format::{Cookie, InodeNumber, Name, SegmentId};
use ipc::SystemHost;
use ipc::sync::Ordering;
use ipc::words::Seal;
use pmem::Recorder;
use pmem::recorded::Verb;
use sharedfs::{Config, CutReason, Daemon, Refusal};
use std::sync::Arc;
use zerocopy::{FromZeros, IntoBytes};

fn extents(client: &Client, inode: InodeNumber) -> Result<(ExtentsResponse, Vec<ExtentReply>), Status> {
    let request = RangeRequest { inode, offset: 0.into(), length: 100.into() };
    let body = client.call(CallKind::Extents, &[request.as_bytes()])?;
    let (head, rest) = split::<ExtentsResponse>(&body).unwrap();
    Ok((head, rest.chunks_exact(size_of::<ExtentReply>()).map(|chunk| split(chunk).unwrap().0).collect()))
}

/// A log whose lease is over writes on. Its records do not count, neither for the daemon that took the lease nor for
/// the one that finds the log after a crash.
#[test]
fn a_record_after_the_end_of_its_lease_does_not_count_even_after_a_crash() {
    let (recorder, daemon) = fresh();
    let mut one = Client::attach_as(&daemon, user(0), 1);
    one.write_lease(ROOT);
    let (file, _) = one.create(ROOT, b"file", FILE | 0o644);
    let (other, _) = one.create(ROOT, b"other", FILE | 0o644);
    assert!(one.write(file, 0, b"one"));
    let mut two = Client::attach_as(&daemon, user(0), 2);
    two.walk("file").unwrap();
    let held = two.write_lease(file);
    assert!(two.under(&[held], |two| two.write(file, 0, b"two")));
    // Without a look at its lease, as no LibFS does.
    assert!(
        one.write(other, 0, b"counts") && one.write(file, 0, b"too late") && one.write(other, 0, b"behind")
    );
    let restarted = Recorder::of_image(recorder.image());
    let (daemon, recovered) = open(&restarted.medium());
    let refused = CutReason::Refused(Refusal::NotHeld(file));
    assert_eq!(recovered.cuts, [(one.attached.welcome.log, refused)]);
    let three = Client::attach(&daemon, user(0));
    three.walk("file").unwrap();
    three.walk("other").unwrap();
    assert_eq!(three.read(file, 0, 9).unwrap(), b"two");
    assert_eq!(three.read(other, 0, 9).unwrap(), b"counts");
}

#[test]
fn a_grant_that_lives_is_known_after_a_crash() {
    let (recorder, daemon) = fresh();
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let (folder, _) = one.create(ROOT, b"folder", DIRECTORY | 0o755);
    // Many grants and ends, over many commits, some of them in the tree and some only in the ledger.
    let mut two = Client::attach(&daemon, user(0));
    for round in 0..30u32 {
        let client = if round % 2 == 0 { &mut two } else { &mut one };
        client.walk("folder").unwrap();
        client.write_lease(folder);
        let (_, made) = client.create(folder, format!("{round}").as_bytes(), FILE | 0o644);
        assert!(made);
    }
    let restarted = Recorder::of_image(recorder.image());
    let (daemon, recovered) = open(&restarted.medium());
    assert_eq!(recovered.cuts, []);
    assert_eq!(Client::attach(&daemon, user(0)).walk("folder").unwrap().item.size.get(), 30);
}

#[test]
fn who_opened_for_writing_goes_on_after_a_chmod_and_over_a_crash() {
    let (recorder, daemon) = fresh();
    let mut root = Client::attach_as(&daemon, user(0), 1);
    root.write_lease(ROOT);
    let (file, _) = root.create(ROOT, b"file", FILE | 0o666);
    let mut bob = Client::attach_as(&daemon, user(5), 2);
    bob.walk("file").unwrap();
    let opened = bob.open(file, 2, LEASE_WRITE).unwrap();
    assert_eq!((opened.writable, opened.mode), (1, LEASE_WRITE));
    assert!(bob.write(file, 0, b"before"));
    root.write_lease(file);
    assert!(root.set_mode(file, 0o600));
    let again = bob.write_lease(file);
    assert_eq!((again.writable, again.item.mode.get()), (1, FILE | 0o600));
    assert!(bob.write(file, 6, b" after"));
    let restarted = Recorder::of_image(recorder.image());
    let (daemon, recovered) = open(&restarted.medium());
    assert_eq!(recovered.cuts, []);
    let root = Client::attach(&daemon, user(0));
    root.walk("file").unwrap();
    assert_eq!(root.read(file, 0, 99).unwrap(), b"before after");
    assert_eq!(Client::attach(&daemon, user(5)).walk("file").map(|_| ()), Ok(()));
}

#[test]
fn who_could_read_when_it_took_a_lease_reads_on_after_a_chmod() {
    let (_recorder, daemon) = fresh();
    let mut root = Client::attach(&daemon, user(0));
    root.write_lease(ROOT);
    let (file, _) = root.create(ROOT, b"file", FILE | 0o644);
    assert!(root.write(file, 0, b"open"));
    let (bob, carol) = (Client::attach(&daemon, user(5)), Client::attach(&daemon, user(6)));
    bob.walk("file").unwrap();
    root.write_lease(file);
    assert!(root.set_mode(file, 0o600));
    carol.walk("file").unwrap();
    assert_eq!(carol.read(file, 0, 9), Err(Status::Access));
    bob.read_lease(file);
    assert_eq!(bob.read(file, 0, 9).unwrap(), b"open");
}

#[test]
fn blocks_are_mapped_by_their_owner_only_and_told_before_they_are_reused() {
    let (_recorder, daemon) = fresh();
    let mut root = Client::attach(&daemon, user(0));
    root.write_lease(ROOT);
    let folder = root.new_inode();
    assert!(root.create_as(folder, ROOT, b"folder", DIRECTORY | 0o777, 0));
    let mut bob = Client::attach(&daemon, user(5));
    bob.walk("folder").unwrap();
    bob.write_lease(folder);
    let (file, _) = bob.create(folder, b"file", FILE | 0o644);
    assert!(bob.write(file, 0, &[1; 9_000]));
    bob.digest(true).unwrap();
    let (before, mapped) = extents(&bob, file).unwrap();
    assert!(!mapped.is_empty() && mapped.iter().all(|extent| extent.flags.get() & EXTENT_BY_CALL == 0));
    let segment = |id: SegmentId| {
        let request = InodeRequest { inode: InodeNumber::new(id.get().into()), flags: 0.into() };
        request.as_bytes().to_vec()
    };
    let id = mapped[0].segment;
    let region = daemon.segment(bob.session, &segment(id)).unwrap();
    let mut block = [0; 4096];
    region.read(u64::from(mapped[0].block.get()) * 4096, &mut block).unwrap();
    assert_eq!(block, [1; 4096]);
    let carol = Client::attach(&daemon, user(6));
    carol.walk("folder/file").unwrap();
    let (_, by_call) = extents(&carol, file).unwrap();
    assert!(by_call.iter().all(|extent| extent.flags.get() & EXTENT_BY_CALL != 0));
    assert_eq!(daemon.segment(carol.session, &segment(id)).map(|_| ()), Err(Status::Access));
    assert_eq!(carol.read(file, 8_990, 99).unwrap(), [1; 10]);
    // Overwritten: the old blocks are free from here on.
    bob.write_lease(file);
    assert!(bob.write(file, 0, &[2; 9_000]));
    bob.digest(true).unwrap();
    let (after, _) = extents(&bob, file).unwrap();
    assert_ne!(before.generation, after.generation);
    assert!(before.digested < after.digested);
}

#[test]
fn more_own_inodes_than_can_be_told_of_end_the_session_and_lose_nothing() {
    let (_recorder, daemon) = fresh();
    let mut one = Client::attach_as(&daemon, user(0), 1);
    let two = Client::attach_as(&daemon, user(0), 2);
    one.write_lease(ROOT);
    let (folder, _) = one.create(ROOT, b"folder", DIRECTORY | 0o755);
    let (file, _) = one.create(folder, b"file", FILE | 0o644);
    two.walk("folder/file").unwrap();
    // As if so many had been taken before.
    let count = ipc::DaemonPages::new(&one.attached.leases, 1).unwrap();
    for _ in 0..ENDED_MAX {
        count.push_ended(file);
    }
    one.write_lease(folder);
    let (last, made) = one.create(folder, b"last", FILE | 0o644);
    assert!(made && one.write(last, 0, b"there"));
    two.walk("folder/last").unwrap();
    assert_eq!(two.read(last, 0, 9).unwrap(), b"there");
    assert_eq!(daemon.terminations().len(), 1);
}

fn refill(client: &Client, blocks: u64) -> Result<u64, Status> {
    let request =
        RefillRequest { inodes: 0.into(), room_blocks: blocks.into(), shared: 0.into(), replaces: 0.into() };
    let body = client.call(CallKind::Refill, &[request.as_bytes()])?;
    Ok(split::<RefillResponse>(&body).unwrap().0.room_blocks.get())
}

#[test]
fn room_is_promised_until_there_is_none() {
    let (_recorder, daemon) = fresh();
    let one = Client::attach(&daemon, user(0));
    let statfs = |client: &Client| {
        split::<StatfsResponse>(&client.call(CallKind::Statfs, &[]).unwrap()).unwrap().0.blocks_free.get()
    };
    let before = statfs(&one);
    let refill = |blocks: u64| refill(&one, blocks);
    assert_eq!(refill(100), Ok(100));
    assert_eq!(statfs(&one), before - 100);
    let share = refill(u64::MAX).unwrap();
    assert!(share <= (before - 100) / 8, "a share is for others: {share} of {before}");
    while refill(u64::MAX).is_ok() {}
    // Here it is the share of the tree that is used up.
    assert_eq!(refill(1), Err(Status::NoSpace));
    daemon.end(one.session);
    let two = Client::attach(&daemon, user(0));
    assert_eq!(statfs(&two), before);
}

/// A target stands in the tree, and a long one fills a node there.
#[test]
fn a_reservation_is_enough_for_links_with_the_longest_targets() {
    let recorder = Recorder::new();
    new_pool(&recorder.medium());
    let config = Config { own_range: 10_000, ..tiny() };
    let (daemon, _) = Daemon::open(Arc::new(SystemHost), &recorder.medium(), config).unwrap();
    let daemon = Arc::new(daemon);
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let mut reserved = one.attached.welcome.room_blocks.get();
    while let Ok(more) = refill(&one, u64::MAX) {
        reserved += more;
    }
    let target = [b't'; SYMLINK_BYTES_MAX];
    let mut made = 0;
    loop {
        let bytes = format!("{made}").into_bytes();
        let name = Name::new(&bytes).unwrap();
        let cost = room_blocks(&Operation::Create {
            parent: ROOT,
            cookie: Cookie::of_name(name),
            name,
            body: CreateBody::new_zeroed(),
            target: &target,
        });
        if reserved < cost {
            break;
        }
        reserved -= cost;
        assert!(one.symlink(ROOT, &bytes, &target), "link {made}: {:?}", daemon.terminations());
        made += 1;
    }
    one.digest(true).unwrap();
    assert!(daemon.terminations().is_empty(), "{:?}", daemon.terminations());
    assert!(made > 100, "{made}");
    assert_eq!(one.walk("").unwrap().item.size.get(), made);
}

#[test]
fn a_digest_that_is_not_waited_for_is_done_in_the_background() {
    let (_recorder, daemon) = fresh();
    daemon.start().unwrap();
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let (_, made) = one.create(ROOT, b"file", FILE | 0o644);
    assert!(made);
    one.digest(false).unwrap();
    let last = one.pages.commit().load();
    eventually("it is digested", || one.view.digested().sequence == last);
    daemon.stop();
    assert!(one.view.seal() != Seal::Open);
}

#[test]
fn a_session_remembers_a_bounded_number_of_inodes() {
    let (_recorder, daemon) = fresh();
    let mut one = Client::attach(&daemon, user(0));
    one.write_lease(ROOT);
    let names: Vec<String> = (0..150).map(|index| format!("{index}")).collect();
    let inodes: Vec<_> = names.iter().map(|name| one.create(ROOT, name.as_bytes(), FILE | 0o644).0).collect();
    let two = Client::attach(&daemon, user(9));
    for (name, inode) in names.iter().zip(&inodes) {
        two.walk(name).unwrap();
        two.close(*inode, 1);
    }
    assert_eq!(two.lease(&[(inodes[0], LEASE_READ)]).map(|_| ()), Err(Status::Invalid));
    assert!(two.walk("0").is_ok() && two.lease(&[(inodes[0], LEASE_READ)]).is_ok());
    assert_eq!(two.pages.open()[0].load(Ordering::Relaxed), 0);
    // A session may use the files that it has open, whatever it has met since; and root may use all files, which it
    // could read anyway.
    two.walk("1").unwrap();
    two.pages.open()[0].store(inodes[1].get(), Ordering::Release);
    for (name, inode) in names.iter().zip(&inodes).skip(2) {
        two.walk(name).unwrap();
        two.close(*inode, u64::from(*inode != inodes[1]));
    }
    two.close(inodes[1], 1);
    assert!(two.lease(&[(inodes[1], LEASE_READ)]).is_ok());
    let root = Client::attach(&daemon, user(0));
    assert!(root.lease(&[(inodes[140], LEASE_READ)]).is_ok());
    assert_eq!(root.lease(&[(InodeNumber::new(1 << 40), LEASE_READ)]).map(|_| ()), Err(Status::NotFound));
}

/// A batch that has room for a few nodes only: many records, of which each touches its own leaves, and the notes of
/// the digest itself must find their way.
#[test]
fn batches_of_any_size_get_on() {
    for batch_nodes_max in [8, 12, 20, 40] {
        let recorder = Recorder::new();
        new_pool(&recorder.medium());
        let mut config = tiny();
        config.area.batch_nodes_max = batch_nodes_max;
        let (daemon, _) = Daemon::open(Arc::new(SystemHost), &recorder.medium(), config).unwrap();
        let daemon = Arc::new(daemon);
        let mut one = Client::attach(&daemon, user(0));
        one.write_lease(ROOT);
        for index in 0..150u32 {
            let (file, made) = one.create(ROOT, format!("{index}").as_bytes(), FILE | 0o644);
            assert!(made && one.write(file, 0, &[1; 100]), "{batch_nodes_max}");
        }
        assert!(one.digest(true).is_ok(), "{batch_nodes_max}: {:?}", daemon.terminations());
        one.release();
        for index in 150..200u32 {
            let (file, made) = one.create(ROOT, format!("{index}").as_bytes(), FILE | 0o644);
            assert!(made && one.write(file, 0, &[1; 100]), "{batch_nodes_max}");
        }
        let restarted = Recorder::of_image(recorder.image());
        let (daemon, recovered) = Daemon::open(Arc::new(SystemHost), &restarted.medium(), config).unwrap();
        assert_eq!(recovered.cuts, []);
        let two = Client::attach(&Arc::new(daemon), user(0));
        assert_eq!(two.walk("").unwrap().item.size.get(), 200);
    }
}

/// A batch ends where its nodes are used up, and what it has done until then counts: each block is written once.
#[test]
fn a_batch_whose_nodes_are_used_up_is_not_made_again() {
    let recorder = Recorder::new();
    new_pool(&recorder.medium());
    let mut config = Config { batch_records: 1000, batch_bytes: 1 << 20, ..tiny() };
    config.area.batch_nodes_max = 12;
    let (daemon, _) = Daemon::open(Arc::new(SystemHost), &recorder.medium(), config).unwrap();
    let mut one = Client::attach(&Arc::new(daemon), user(0));
    one.write_lease(ROOT);
    let (files, mut writes) = (200, 0);
    for part in 0..10 {
        for index in 0..files / 10 {
            let (file, made) = one.create(ROOT, format!("{part}-{index:0>100}").as_bytes(), FILE | 0o644);
            assert!(made);
            // Shorter than a block, so that each is written when the batch is about to end.
            assert!(one.write(file, 0, &[1; 100]));
        }
        let before = recorder.calls(Verb::Persist);
        one.digest(true).unwrap();
        writes += recorder.calls(Verb::Persist) - before;
    }
    // A block for each file, and less than that for the nodes, the maps and the roots of all commits.
    assert!(writes < 2 * files, "{writes}");
}

#[test]
fn a_write_by_another_clears_set_id_bits() {
    let (_recorder, daemon) = fresh();
    let mut root = Client::attach(&daemon, user(0));
    root.write_lease(ROOT);
    let (file, _) = root.create(ROOT, b"file", FILE | 0o4777);
    let mut bob = Client::attach(&daemon, user(5));
    bob.walk("file").unwrap();
    bob.write_lease(file);
    assert!(bob.write(file, 0, b"x"));
    bob.digest(true).unwrap();
    assert_eq!(bob.walk("file").unwrap().item.mode.get(), FILE | 0o777);
    root.walk("file").unwrap();
    root.write_lease(file);
    assert!(root.set_mode(file, 0o4755) && root.write(file, 0, b"y"));
    root.digest(true).unwrap();
    assert_eq!(root.walk("file").unwrap().item.mode.get(), FILE | 0o4755, "root may");
}

#[test]
fn more_users_than_segments_lose_nothing() {
    let (recorder, daemon) = fresh();
    let mut root = Client::attach(&daemon, user(0));
    root.write_lease(ROOT);
    let (common, _) = root.create(ROOT, b"common", DIRECTORY | 0o777);
    daemon.end(root.session);
    // Some stay, with what they were promised.
    let mut users = Vec::new();
    for uid in 1000..1040 {
        let mut one = Client::attach(&daemon, user(uid));
        one.walk("common").unwrap();
        one.write_lease(common);
        let name = format!("of-{uid}");
        let (file, made) = one.create(common, name.as_bytes(), FILE | 0o644);
        assert!(made && one.write(file, 0, &[uid as u8; 5000]), "user {uid}");
        one.digest(true)
            .unwrap_or_else(|status| panic!("user {uid}: {status:?}, {:?}", daemon.terminations()));
        users.push((uid, file, one));
        if users.len() > 5 {
            let (.., gone) = users.remove(0);
            daemon.end(gone.session);
        }
    }
    assert_eq!(daemon.terminations(), []);
    for (uid, file, one) in &users {
        assert_eq!(one.read(*file, 0, 6000).unwrap(), [*uid as u8; 5000]);
    }
    assert!(area::check::check(&recorder.medium()).unwrap().is_clean());
}
