//! A process dies at every record of its log, and so does its daemon: operations that had returned are there, others
//! are not, and nothing lies in between.

mod assise_local;

use assise_local::trees::{Tree, at, process, whole_tree};
use assise_local::{Node, tiny};
use libfs::{LibFs, Limits};
use sharedfs::Config;
use std::sync::Arc;
use std::time::Duration;
use vfs::conformance::{Actor, Answer, Call, Player};
use vfs::{Caller, Model};

/// Calls of which each is at most one record.
fn history() -> Vec<Call> {
    let open = |slot, path: &str, flags| Call::Open { slot, path: at(path), flags, mode: 0o644 };
    let rename = |from: &str, to: &str, flags| Call::Rename { from: at(from), to: at(to), flags };
    let pwrite = |slot, offset, byte: u8, bytes| Call::Pwrite { slot, offset, data: vec![byte; bytes] };
    vec![
        Call::Mkdir { path: at("d"), mode: 0o755 },
        open(0, "d/a", 0o102),
        pwrite(0, 0, 1, 5000),
        pwrite(0, 3000, 2, 3000),
        Call::Ftruncate { slot: 0, size: 4500 },
        open(1, "b", 0o102),
        pwrite(1, 100, 3, 200),
        rename("b", "d/b", 0),
        rename("d/a", "d/b", 2),
        Call::Link { from: at("d/a"), to: at("l"), follow: false },
        Call::Unlink(at("d/a")),
        Call::Symlink { target: "d/b".to_owned(), path: at("s") },
        Call::SetXattr { path: at("l"), name: "user.x".to_owned(), value: vec![4; 300], flags: 0 },
        Call::Mkdir { path: at("e"), mode: 0o700 },
        rename("d", "e/d", 0),
        pwrite(0, 9000, 5, 100),
        Call::Unlink(at("e/d/b")),
        pwrite(0, 0, 6, 100),
        Call::Chmod { path: at("e"), mode: 0o711 },
        rename("l", "s", 0),
        Call::Rmdir(at("e/d")),
    ]
}

/// The tree after so many calls.
fn expected(calls: &[Call]) -> Tree {
    let model = Model::new(Arc::new(|| 0), vfs::model::Limits::default());
    let mut player = process(Arc::new(model), 1);
    for call in calls {
        let answer = player.call(call);
        assert!(!matches!(answer, Answer::Failed(_)), "{call:?} answered {answer}");
    }
    whole_tree(&mut player)
}

/// Makes the first calls, and digests after one of them, if at all.
fn run(node: &Arc<Node>, calls: &[Call], digest_after: Option<usize>) -> (Player<LibFs>, u64) {
    let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
    let mut player = process(Arc::new(libfs), 1);
    for (number, call) in calls.iter().enumerate() {
        let answer = player.call(call);
        assert!(!matches!(answer, Answer::Failed(_)), "{call:?} answered {answer}");
        if digest_after == Some(number) {
            node.tidy();
        }
    }
    (player, local.session())
}

fn check(node: &Arc<Node>, calls: &[Call], told: &str) {
    let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
    let found = whole_tree(&mut process(Arc::new(libfs), 1));
    assert_eq!(found, expected(calls), "{told}, after {} calls", calls.len());
}

#[test]
fn a_dead_process_leaves_all_that_had_returned() {
    let all = history();
    for cut in 0..=all.len() {
        for digest_after in [None, Some(cut / 2), Some(cut.saturating_sub(1))] {
            let node = Node::new(tiny());
            let (player, session) = run(&node, &all[..cut], digest_after);
            // The process is gone without a message: the kernel tells the daemon by the pidfd.
            node.daemon().expect("it runs").end(session);
            check(&node, &all[..cut], &format!("the process died, digested after {digest_after:?}"));
            drop(player);
        }
    }
}

#[test]
fn a_dead_daemon_finds_all_that_had_returned() {
    let all = history();
    for cut in 0..=all.len() {
        for digest_after in [None, Some(cut / 2), Some(cut.saturating_sub(1))] {
            let node = Node::new(tiny());
            let (player, _) = run(&node, &all[..cut], digest_after);
            node.kill();
            drop(player);
            node.start();
            check(&node, &all[..cut], &format!("the daemon died, digested after {digest_after:?}"));
        }
    }
}

#[test]
fn a_session_that_was_shut_out_goes_on_in_a_new_one() {
    let all = history();
    let wanted = expected(&all);
    for cut in 1..all.len() {
        let node = Node::new(Config { grace: Duration::from_millis(2), ..tiny() });
        let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
        let mut player = process(Arc::new(libfs), 1);
        let mut other = process(Arc::new(node.attach(Caller::ROOT, Limits::default()).0), 2);
        for (number, call) in all.iter().enumerate() {
            if number == cut {
                // The other wants what a thread that is stopped inside holds: by force after the grace.
                local.stop_inside();
                let before = local.session();
                let answer = other.call(&Call::Mkdir { path: at("other"), mode: 0o755 });
                assert_eq!(answer, Answer::Done, "cut before {cut}");
                assert_eq!(other.call(&Call::Rmdir(at("other"))), Answer::Done);
                let ejected = node.daemon().expect("it runs").terminations().len();
                assert_eq!((ejected, local.session()), (1, before), "shut out, and not yet aware of it");
            }
            let answer = player.call(call);
            assert!(!matches!(answer, Answer::Failed(_)), "cut before {cut}: {call:?} answered {answer}");
        }
        assert_eq!(whole_tree(&mut player), wanted, "cut before {cut}");
        assert_eq!(whole_tree(&mut other), wanted, "cut before {cut}");
    }
}

#[test]
fn a_file_without_a_name_stays_until_what_was_written_to_it_is_digested() {
    let node = Node::new(Config { idle_digest: Duration::from_millis(100), ..tiny() });
    let daemon = node.daemon().expect("it runs");
    let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
    let libfs = Arc::new(libfs);
    let mut player = process(libfs.clone(), 1);
    let mut done = |call: Call| {
        let answer = player.call(&call);
        assert!(!matches!(answer, Answer::Failed(_)), "{call:?} answered {answer}");
    };
    done(Call::Open { slot: 0, path: at("f"), flags: 0o102, mode: 0o644 });
    done(Call::Unlink(at("f")));
    node.tidy();
    daemon.start().expect("a thread can be had");
    // Its last record is behind the one that took its name; the closing ends the last reference.
    done(Call::Pwrite { slot: 0, offset: 0, data: vec![1; 100] });
    done(Call::Close(0));
    done(Call::Mkdir { path: at("after"), mode: 0o755 });
    let begin = node.host.now();
    let all_digested = || libfs.progress().is_some_and(|(last, digested)| last == digested);
    let never = ipc::Word::new(0);
    while daemon.terminations().is_empty() && !all_digested() {
        assert!(node.host.now().since(begin) < Duration::from_secs(30), "it is digested when it lies idle");
        node.host.wait(&never, 0, Some(node.host.now().after(Duration::from_millis(1))));
    }
    assert_eq!(daemon.terminations(), [], "the log was not cut");
    assert_eq!(whole_tree(&mut player).len(), 2, "the root, and what came after it");
    daemon.stop();
}
