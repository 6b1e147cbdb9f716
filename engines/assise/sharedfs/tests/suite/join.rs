//! Return and first join on the one-thread bed of `pair`: the head sends its tree to a member that lacks what the head keeps no
//! more, while programs go on.

use crate::client::{Client, DIRECTORY, FILE, ROOT, tiny, user};
use crate::crash::{Opened, Run, check_pool, grow, limits, prove_on_both};
use crate::pair::{COPY, HEAD, Pair, config, format_for, recover_node, sync};
use crate::second_copy::{difference, items};
use crate::still::{StillHost, drive_by};
use format::mirror::{MirrorHead, MirrorKind, MirrorMessage};
use format::{InodeNumber, NodeId};
use pmem::crash::{Counts, Limits, Point, crash_recorded};
use pmem::{Medium, Recorder};
use sharedfs::{Config, Daemon, Error, Standby};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// All that can be compared is equal, and both pools are sound.
pub fn assert_equal(recorders: [&Recorder; 2]) {
    let (ours, theirs) = (items(&recorders[0].medium(), false), items(&recorders[1].medium(), false));
    assert!(ours == theirs, "{:#?}", difference(&ours.0, &theirs.0));
    assert!(ours.0.len() > 3);
    for recorder in recorders {
        assert_eq!(area::check::check(&recorder.medium()).unwrap().findings, Vec::<String>::new());
    }
}

/// Fills what a standby would have to execute over and over: ledger and logs go round.
pub fn go_round(pair: &Pair, rounds: u64) -> InodeNumber {
    let mut one = pair.attach();
    let mut two = Client::attach_as(&pair.daemon, user(0), 2);
    one.write_lease(ROOT);
    let (file, _) = one.create(ROOT, b"round", FILE | 0o644);
    two.walk("round").unwrap();
    for round in 0..rounds {
        let client = if round % 2 == 0 { &mut one } else { &mut two };
        client.write_lease(file);
        assert!(client.write(file, round * 800, &vec![round as u8; 3_000]), "round {round}");
    }
    pair.daemon.end(one.session);
    pair.daemon.end(two.session);
    file
}

#[test]
fn a_member_that_was_away_for_long_returns() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let mut one = pair.attach();
    one.write_lease(ROOT);
    let (gone, _) = one.create(ROOT, b"gone", FILE | 0o644);
    assert!(one.write(gone, 0, &[5; 30_000]));
    sync(&one, &[(gone, 1)]).unwrap();
    pair.quiesce();
    pair.daemon.remove_copy(NodeId::new(COPY));
    assert!(one.unlink(ROOT, b"gone", gone, 0));
    go_round(&pair, 400);
    pair.daemon.add_copy(pair.connect()).unwrap();
    assert!(pair.daemon.copies()[0].level);
    // Records from here on are on both nodes when they are synced.
    let mut two = pair.attach();
    two.write_lease(ROOT);
    let (late, _) = two.create(ROOT, b"late", FILE | 0o644);
    assert!(two.write(late, 0, b"after the return"));
    sync(&two, &[(late, 1)]).unwrap();
    for id in pair.daemon.sessions() {
        pair.daemon.end(id);
    }
    pair.quiesce();
    assert_equal([&recorders[0], &recorders[1]]);
    let (daemon, _) = pair.take_over();
    let client = Client::attach(&daemon, user(0));
    let late = client.walk("late").unwrap().inode;
    assert_eq!(client.read(late, 0, 100).unwrap(), b"after the return");
    assert!(client.walk("gone").is_err());
}

/// The head believes the first message of a copy to be its ends.
#[test]
fn a_standby_says_nothing_before_it_has_executed_something() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let mut one = pair.attach();
    one.write_lease(ROOT);
    one.create(ROOT, b"file", FILE | 0o644);
    sync(&one, &[(ROOT, 1)]).unwrap();
    pair.quiesce();
    pair.daemon.remove_copy(NodeId::new(COPY));
    pair.follows.borrow().standby.stop();
    let standby = Standby::open(StillHost::again(), &recorders[1].medium(), config(COPY)).unwrap();
    pair.follows.borrow_mut().standby = standby.clone();
    let ever = ipc::Time::from_ns(u64::MAX / 2);
    let greeted = mirror::Sender::greet(pair.connect(), (1, tiny().ledger_bytes), ever);
    let (sender, ends) = greeted.unwrap();
    assert!(ends.contained.sequence.get() > 0 && !standby.execute().unwrap());
    let said = sender.connection().take(Some(ipc::Time::from_ns(0)));
    assert!(matches!(said, Err(transport::Error::TimedOut)), "{said:?}");
}

/// The operations of the crash proofs, of which the last ones are in logs when the member joins.
#[test]
fn what_only_logs_hold_is_there_after_a_join() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    pair.daemon.remove_copy(NodeId::new(COPY));
    let mut one = pair.attach();
    one.write_lease(ROOT);
    let (folder, _) = one.create(ROOT, b"folder", DIRECTORY | 0o755);
    let (shared, _) = one.create(folder, b"shared", FILE | 0o644);
    let mut run = Run { recorders: recorders.to_vec(), folder, shared, done: 0 };
    run.operate(&mut one);
    go_round(&pair, 300);
    grow(&mut one);
    let mut two = pair.attach();
    two.walk("folder/shared").unwrap();
    run.operate(&mut two);
    run.operate(&mut one);
    pair.daemon.add_copy(pair.connect()).unwrap();
    run.operate(&mut one);
    run.operate(&mut two);
    sync(&two, &[(folder, 1), (shared, 1)]).unwrap();
    let (daemon, copy) = pair.take_over();
    assert_eq!(check_pool(&daemon, &copy.medium()).unwrap(), 5);
    drop(Arc::try_unwrap(daemon).ok());
}

/// The copy leads at once, and nothing was synced since it was added: it has all that was synced before, on the head alone.
#[test]
fn a_member_is_level_when_it_is_added() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    pair.daemon.remove_copy(NodeId::new(COPY));
    go_round(&pair, 300);
    let mut one = pair.attach();
    one.write_lease(ROOT);
    let (file, _) = one.create(ROOT, b"synced", FILE | 0o644);
    assert!(one.write(file, 0, b"on the head"));
    sync(&one, &[(file, 1)]).unwrap();
    pair.daemon.add_copy(pair.connect()).unwrap();
    let (daemon, _) = pair.take_over();
    let client = Client::attach(&daemon, user(0));
    let file = client.walk("synced").unwrap().inode;
    assert_eq!(client.read(file, 0, 100).unwrap(), b"on the head");
}

/// Programs of a head that goes on with files of their own while its tree is sent.
pub fn fill(pair: &Pair, names: std::ops::Range<u32>, bytes: usize) {
    let mut one = pair.attach();
    one.write_lease(ROOT);
    for name in names {
        let (file, _) = one.create(ROOT, format!("file-{name}").as_bytes(), FILE | 0o644);
        for at in (0..bytes).step_by(20_000) {
            let length = 20_000.min(bytes - at);
            if !one.write(file, at as u64, &vec![name as u8; length]) {
                one.digest(true).unwrap();
                assert!(one.write(file, at as u64, &vec![name as u8; length]));
            }
        }
    }
    pair.daemon.end(one.session);
}

/// A new pool joins a head with data, in several rounds while that changes, with segments so small that extents lie in
/// pieces.
#[test]
fn a_new_member_joins_a_head_that_goes_on() {
    let recorders = [Recorder::new(), Recorder::new()];
    let host = StillHost::first();
    format_for(&recorders[0].medium(), HEAD);
    format_for(&recorders[1].medium(), COPY);
    let small = config(COPY);
    let small = Config { area: area::Limits { segment_blocks: 40, ..small.area }, ..small };
    let pair = Rc::new(Pair::apart(host, &recorders[0], &recorders[1], small));
    fill(&pair, 0..12, 300_000);
    let changed = Rc::new(Cell::new(0));
    let connection = pair.connect();
    let (weak, count) = (Rc::downgrade(&pair), changed.clone());
    let act = move || {
        let pair = weak.upgrade().unwrap();
        let sent = pair.daemon.tree_sent().unwrap();
        assert_eq!(sent.node, NodeId::new(COPY));
        assert!(0 < sent.sent_bytes && sent.sent_bytes < sent.bytes, "{sent:?}");
        assert!((3_600_000..4_500_000).contains(&sent.bytes), "{sent:?}");
        fill(&pair, 20..28, 100_000);
        let mut one = Client::attach_as(&pair.daemon, user(0), 7);
        let file = one.walk("file-3").unwrap().inode;
        one.write_lease(file);
        assert!(one.write(file, 5_000, &[99; 9_000]));
        let gone = one.walk("file-4").unwrap().inode;
        one.write_lease(ROOT);
        one.write_lease(gone);
        assert!(one.unlink(ROOT, b"file-4", gone, 0));
        pair.daemon.end(one.session);
        pair.daemon.tidy();
        count.set(count.get() + 1);
    };
    pair.follows.borrow_mut().meanwhile = Some((150, Box::new(act)));
    pair.daemon.add_copy(connection).unwrap();
    assert_eq!(changed.get(), 1, "the head changed while its tree was sent");
    assert_eq!(pair.daemon.tree_sent(), None);
    pair.quiesce();
    assert_equal([&recorders[0], &recorders[1]]);
    let segments = |recorder: &Recorder| {
        recorder.medium().list().unwrap().iter().filter(|name| name.starts_with("segment-")).count()
    };
    assert!(segments(&recorders[1]) > 2 * segments(&recorders[0]));
}

/// A pool that led by itself loses its data when it joins a head of another history.
#[test]
fn a_pool_of_another_history_is_replaced() {
    for ahead in [false, true] {
        let recorders = [Recorder::new(), Recorder::new()];
        let host = StillHost::first();
        format_for(&recorders[0].medium(), HEAD);
        format_for(&recorders[1].medium(), COPY);
        let rounds = if ahead { 30 } else { 1 };
        for _ in 0..rounds {
            let daemon =
                Arc::new(Daemon::open(host.clone(), &recorders[1].medium(), config(COPY)).unwrap().0);
            let mut own = Client::attach(&daemon, user(0));
            own.write_lease(ROOT);
            own.create(ROOT, b"of another history", FILE | 0o644);
            assert!(ahead || own.digest(true).is_ok());
        }
        let pair = Pair::apart(host, &recorders[0], &recorders[1], config(COPY));
        fill(&pair, 0..3, 30_000);
        pair.daemon.add_copy(pair.connect()).unwrap();
        pair.quiesce();
        assert_equal([&recorders[0], &recorders[1]]);
        let (daemon, _) = pair.take_over();
        let client = Client::attach(&daemon, user(0));
        assert!(client.walk("of another history").is_err() && client.walk("file-2").is_ok());
    }
}

/// Operations of a copy, then of the head alone; the copy is away for long, and joins again with some in logs only.
/// Gives how many it had, and how many the tree contains that it gets. With `whole` a first attempt fails, so it gets the whole
/// tree.
fn away_and_back(recorders: [&Recorder; 2], whole: bool) -> (u64, u64) {
    let pair = Pair::on(recorders[0], recorders[1]);
    let mut one = pair.attach();
    one.write_lease(ROOT);
    let (folder, _) = one.create(ROOT, b"folder", DIRECTORY | 0o755);
    let (shared, _) = one.create(folder, b"shared", FILE | 0o644);
    let mut run = Run { recorders: recorders.map(Recorder::clone).to_vec(), folder, shared, done: 0 };
    run.operate(&mut one);
    run.operate(&mut one);
    sync(&one, &[(folder, 1), (shared, 1)]).unwrap();
    pair.quiesce();
    let had = run.done;
    recorders[1].returned(AWAY);
    pair.daemon.remove_copy(NodeId::new(COPY));
    run.operate(&mut one);
    one.digest(true).unwrap();
    let sent = run.done;
    go_round(&pair, 200);
    // These are of logs when the tree is sent.
    run.operate(&mut one);
    sync(&one, &[(folder, 1), (shared, 1)]).unwrap();
    if whole {
        let connection = pair.connect();
        let cut = connection.clone();
        pair.follows.borrow_mut().meanwhile = Some((1, Box::new(move || cut.close())));
        assert!(pair.daemon.add_copy(connection).is_err());
    }
    pair.daemon.add_copy(pair.connect()).unwrap();
    recorders[1].returned(JOINED);
    run.operate(&mut one);
    (had, sent)
}

/// Marks of the recorder: the copy is away; it counts again.
const AWAY: u64 = 900;
const JOINED: u64 = 901;

fn prove(limits: &Limits, whole: bool) -> Counts {
    let recorders = [Recorder::new(), Recorder::new()];
    let (had, sent) = away_and_back([&recorders[0], &recorders[1]], whole);
    drive_by(Box::new(|| false));
    let judge = |opened: Opened, medium: &Medium, point: &Point| {
        let is_past = |mark| point.returned.contains(&mark);
        let Some((daemon, _)) = opened else {
            return if point.returned.is_empty() { Ok(()) } else { Err("the pool is lost".to_owned()) };
        };
        let found = check_pool(&daemon, medium)?;
        let is_right = match (is_past(AWAY), is_past(JOINED)) {
            (false, _) => found <= had,
            // The former tree, or the one that the head sent, with as much as the stream has brought since.
            (true, false) => found == had || found >= sent,
            (true, true) => found > sent,
        };
        if is_right { Ok(()) } else { Err(format!("{found} operations, of {had} and {sent}")) }
    };
    prove_on_both(
        |model| format!("sharedfs, join, whole tree: {whole}, {model:?}, {limits:?}"),
        |model| crash_recorded(&recorders[1], model, limits, recover_node(1), judge),
    )
}

#[test]
fn a_crash_of_the_joiner_leaves_what_it_was_or_what_came() {
    for whole in [false, true] {
        assert!(prove(&limits(), whole).images > 300);
    }
}

#[test]
fn a_crash_of_what_a_crash_of_the_joiner_left_is_survived() {
    let few =
        Limits { complete_max: 2, near_max: 0, sampled: 1, recovery_images: 2, recovery_every: 4, seed: 15 };
    for whole in [false, true] {
        assert!(prove(&few, whole).recovery_images > 100);
    }
}

/// An import that ends in the middle leaves the member what it was, which leads or joins again.
#[test]
fn an_import_that_ends_early_changes_nothing() {
    for messages in [1, 4, 9, 14] {
        let recorders = [Recorder::new(), Recorder::new()];
        let pair = Rc::new(Pair::on(&recorders[0], &recorders[1]));
        fill(&pair, 0..2, 20_000);
        pair.quiesce();
        pair.daemon.remove_copy(NodeId::new(COPY));
        fill(&pair, 2..8, 60_000);
        go_round(&pair, 300);
        let before = items(&recorders[1].medium(), false);
        let connection = pair.connect();
        let cut = connection.clone();
        pair.follows.borrow_mut().meanwhile = Some((messages, Box::new(move || cut.close())));
        let added = pair.daemon.add_copy(connection);
        assert!(matches!(added, Err(Error::Copy(..))), "{added:?}");
        assert!(pair.daemon.copies().is_empty());
        assert!(before == items(&recorders[1].medium(), false), "after {messages} messages");
        pair.daemon.add_copy(pair.connect()).unwrap();
        pair.quiesce();
        assert_equal([&recorders[0], &recorders[1]]);
    }
}

/// A member that counts is never replaced: records that it has beyond this pool may have been acknowledged.
#[test]
fn a_copy_that_counts_is_not_replaced() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    fill(&pair, 0..2, 20_000);
    pair.quiesce();
    let other = Recorder::new();
    format_for(&other.medium(), COPY);
    {
        let host = StillHost::again();
        let daemon = Arc::new(Daemon::open(host, &other.medium(), config(COPY)).unwrap().0);
        let mut own = Client::attach(&daemon, user(0));
        own.write_lease(ROOT);
        own.create(ROOT, b"of another history", FILE | 0o644);
        own.digest(true).unwrap();
    }
    // The node is there again, with another pool.
    let former = pair.follows.borrow().standby.clone();
    let stranger = Standby::open(StillHost::again(), &other.medium(), config(COPY)).unwrap();
    pair.follows.borrow_mut().standby = stranger;
    former.stop();
    let before = items(&other.medium(), false);
    let added = pair.daemon.add_copy(pair.connect());
    assert!(matches!(added, Err(Error::NeedsImport(_) | Error::CopyIsAhead(_))), "{added:?}");
    assert!(before == items(&other.medium(), false));
    assert_eq!(pair.daemon.copies().len(), 1);
    pair.daemon.remove_copy(NodeId::new(COPY));
}

/// Messages of an import that no head sends are refused, and the member is what it was.
#[test]
fn an_import_out_of_order_is_refused() {
    use zerocopy::IntoBytes;
    let head =
        |kind: MirrorKind, flags, count: u16| MirrorHead { kind: kind as u8, flags, count: count.into() };
    let message = |head: MirrorHead, body: &[u8]| [head.as_bytes(), body].concat();
    let round = message(head(MirrorKind::Round, 0, 0), &[0; 24]);
    // It begins with an entry that the member does not have.
    let mut too_new = round.clone();
    too_new[4 + 8 + 4] = 1;
    let mut range = vec![0; 56];
    (range[16], range[36]) = (1, 1);
    let whole = message(head(MirrorKind::Range, 1, 0), &range);
    let end = message(head(MirrorKind::RoundEnd, 1, 0), &[0; 40]);
    let block = message(head(MirrorKind::Blocks, 0, 1), &[0; 4096]);
    let hello = message(head(MirrorKind::Hello, 0, 0), &[0; 24]);
    let data = message(head(MirrorKind::Data, 1, 0), &[]);
    let cases: Vec<Vec<&[u8]>> = vec![
        vec![&whole],
        vec![&end],
        vec![&round, &block],
        vec![&round, &whole, &block],
        vec![&round, &whole, &end],
        vec![&round, &hello],
        vec![&round, &whole, &data],
        vec![&round, &whole, &whole[..40]],
        vec![&round, &round[..10]],
        vec![&too_new],
    ];
    for case in cases {
        let recorders = [Recorder::new(), Recorder::new()];
        let pair = Pair::on(&recorders[0], &recorders[1]);
        fill(&pair, 0..2, 20_000);
        pair.quiesce();
        let before = items(&recorders[1].medium(), false);
        pair.daemon.remove_copy(NodeId::new(COPY));
        let connection = pair.connect();
        // The greeting of a head that means harm.
        let hello = format::mirror::MirrorHello {
            version: 9.into(),
            ledger_bytes: tiny().ledger_bytes.into(),
            chain: format::ChainNumber::ONLY,
            rules: format::mirror::RULES.into(),
        };
        let until = |seconds: u64| Some(ipc::Time::from_ns(seconds * 1_000_000_000));
        let first = message(head(MirrorKind::Hello, 0, 0), hello.as_bytes());
        connection.send(&first, until(1_000)).unwrap();
        for part in &case {
            // It may hang up before the last part.
            let _ = connection.send(part, until(2_000));
        }
        let mut refused = false;
        while let Ok(transport::Event::Message(said)) = connection.take(until(3_000)) {
            refused |= matches!(
                MirrorMessage::decode(&said),
                Ok(MirrorMessage::Ends { refusal: format::mirror::MirrorRefusal::Import, .. })
            );
        }
        assert!(connection.ended().is_some(), "{case:?}");
        assert!(refused || case.last().is_some_and(|last| last[0] < MirrorKind::Round as u8));
        assert!(before == items(&recorders[1].medium(), false));
    }
}
