//! Return and first join on the one-thread bed of `pair`: the head sends its tree to a member that lacks what the head keeps no
//! more, while programs go on.

use crate::client::{Client, DIRECTORY, FILE, ROOT, user};
use crate::crash::{Run, check_pool, grow};
use crate::pair::{COPY, Pair, sync};
use crate::second_copy::{difference, items};
use format::{InodeNumber, NodeId};
use pmem::Recorder;
use std::sync::Arc;

/// All that can be compared is equal, and both pools are sound.
fn assert_equal(recorders: [&Recorder; 2]) {
    let (ours, theirs) = (items(&recorders[0].medium(), false), items(&recorders[1].medium(), false));
    assert!(ours == theirs, "{:#?}", difference(&ours.0, &theirs.0));
    assert!(ours.0.len() > 3);
    for recorder in recorders {
        assert_eq!(area::check::check(&recorder.medium()).unwrap().findings, Vec::<String>::new());
    }
}

/// Fills what a standby would have to execute over and over: ledger and logs go round.
fn go_round(pair: &Pair, rounds: u64) -> InodeNumber {
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
    pair.settle_down();
    pair.daemon.remove_copy(NodeId::new(COPY));
    assert!(one.unlink(ROOT, b"gone", gone, 0));
    go_round(&pair, 400);
    pair.daemon.add_copy(pair.connect()).unwrap();
    assert!(pair.daemon.copies()[0].level);
    // What is written from here on is on both when it is synced.
    let mut two = pair.attach();
    two.write_lease(ROOT);
    let (late, _) = two.create(ROOT, b"late", FILE | 0o644);
    assert!(two.write(late, 0, b"after the return"));
    sync(&two, &[(late, 1)]).unwrap();
    for id in pair.daemon.sessions() {
        pair.daemon.end(id);
    }
    pair.settle_down();
    assert_equal([&recorders[0], &recorders[1]]);
    let (daemon, _) = pair.take_over();
    let client = Client::attach(&daemon, user(0));
    let late = client.walk("late").unwrap().inode;
    assert_eq!(client.read(late, 0, 100).unwrap(), b"after the return");
    assert!(client.walk("gone").is_err());
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
    let mut run = Run { recorders: recorders.iter().collect(), folder, shared, done: 0 };
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
