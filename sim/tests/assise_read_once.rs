//! A digest reads what a process can still write once, and judges and takes what it read: a log whose bytes change as
//! soon as they were read is digested as it was, by a daemon that runs and by one that recovers.

mod assise_local;

use assise_local::trees::{at, process, whole_tree};
use assise_local::{Node, tiny};
use ipc::SystemHost;
use libfs::Limits;
use pmem::Recorder;
use std::sync::Arc;
use vfs::conformance::{Actor, Answer, Call};
use vfs::{Caller, Model};

fn calls() -> Vec<Call> {
    let open = |slot, path: &str| Call::Open { slot, path: at(path), flags: 0o102, mode: 0o644 };
    vec![
        Call::Mkdir { path: at("d"), mode: 0o755 },
        open(0, "d/a"),
        Call::Pwrite { slot: 0, offset: 10, data: vec![1; 700] },
        open(1, "b"),
        Call::Pwrite { slot: 1, offset: 0, data: vec![2; 90] },
        Call::Ftruncate { slot: 0, size: 300 },
        Call::Rename { from: at("b"), to: at("d/c"), flags: 0 },
    ]
}

fn play(actor: &mut dyn Actor) {
    for call in calls() {
        let answer = actor.call(&call);
        assert!(!matches!(answer, Answer::Failed(_)), "{call:?} answered {answer}");
    }
}

fn digested(daemon_dies: bool) {
    let recorder = Recorder::new();
    let node = Node::on(Arc::new(SystemHost), recorder.medium(), tiny(), None);
    let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
    let mut player = process(Arc::new(libfs), 1);
    play(&mut player);
    let logs: Vec<String> = recorder.medium().list().expect("it can be listed");
    let logs = logs.iter().filter(|name| name.starts_with("log-"));
    logs.for_each(|name| recorder.change_after_reads(name));
    if daemon_dies {
        node.kill();
        drop(player);
        let recovered = node.start();
        assert_eq!(recovered.cuts, []);
    } else {
        node.tidy();
    }
    let model = Arc::new(Model::new(Arc::new(|| 0), vfs::model::Limits::default()));
    play(&mut process(model.clone(), 1));
    let (libfs, _) = node.attach(Caller::ROOT, Limits::default());
    assert_eq!(whole_tree(&mut process(Arc::new(libfs), 2)), whole_tree(&mut process(model, 1)));
}

#[test]
fn a_log_that_changes_behind_the_digest_is_taken_as_it_was_read() {
    digested(false);
    digested(true);
}
