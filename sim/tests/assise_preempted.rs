//! One process is stopped at every seam of an operation, in turn, and another does the whole of an operation that wants
//! the same leases, before the first goes on: each instant at which a lease can go between two looks at it is tried,
//! and not left to chance. The answers and the final tree are those of one order of the two; no session is terminated
//! except the one that was stopped inside.
//!
//! `HEARTH_PROVE=1` tries every pair of operations.

mod assise_local;

use assise_local::trees::{Tree, at, process, whole_tree};
use assise_local::{Node, tiny};
use ipc::Host;
use libfs::{LibFs, Limits};
use pmem::Recorder;
use sharedfs::{Config, Daemon};
use sim::{SimHost, Simulation};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vfs::conformance::{Actor, Answer, Call, Player};
use vfs::{Caller, Model};

fn open(slot: usize, path: &str, flags: i32) -> Call {
    Call::Open { slot, path: at(path), flags, mode: 0o644 }
}

fn rename(from: &str, to: &str) -> Call {
    Call::Rename { from: at(from), to: at(to), flags: 0 }
}

/// The tree before.
fn tree() -> Vec<Call> {
    let mut calls = vec![Call::Mkdir { path: at("d"), mode: 0o755 }];
    for (slot, path) in ["d/f", "d/g", "d/h"].into_iter().enumerate() {
        calls.push(open(slot, path, 0o102));
        calls.push(Call::Pwrite { slot, offset: 0, data: vec![slot as u8 + 1; 600] });
    }
    calls
}

/// The files that both have open: 3 is written at its end, 4 where one likes.
fn opened() -> Vec<Call> {
    vec![open(3, "d/f", 0o2002), open(4, "d/f", 0o2)]
}

/// Gets every lease that an operation wants, for writing.
fn warmed() -> Vec<Call> {
    let chmod = |path: &str| Call::Chmod { path: at(path), mode: 0o640 };
    let made = Call::Mkdir { path: at("d/once"), mode: 0o755 };
    vec![chmod("d"), chmod("d/f"), chmod("d/g"), chmod("d/h"), made, Call::Rmdir(at("d/once"))]
}

/// The operations of the first process, one record each.
fn firsts() -> Vec<Call> {
    vec![
        Call::Write { slot: 3, pieces: vec![vec![11; 40]] },
        Call::Pwrite { slot: 4, offset: 500, data: vec![12; 300] },
        Call::Ftruncate { slot: 4, size: 10 },
        open(5, "d/n", 0o302),
        Call::Unlink(at("d/g")),
        rename("d/g", "d/h"),
        Call::Link { from: at("d/g"), to: at("d/n"), follow: false },
        Call::Mkdir { path: at("d/n"), mode: 0o755 },
        Call::Chmod { path: at("d/f"), mode: 0o600 },
        Call::SetXattr { path: at("d/f"), name: "user.x".to_owned(), value: vec![1; 20], flags: 0 },
        Call::Symlink { target: "f".to_owned(), path: at("d/n") },
        open(5, "d/g", 0o1002),
    ]
}

/// The calls of the first process with its open files, after the second one is through.
fn afterwards() -> Vec<Call> {
    vec![
        Call::Pwrite { slot: 5, offset: 3, data: vec![31; 50] },
        Call::Pread { slot: 5, offset: 0, bytes: 100 },
    ]
}

/// The operations of the second process: one of these conflicts with each of the first one's.
fn seconds() -> Vec<Call> {
    vec![
        Call::Write { slot: 3, pieces: vec![vec![21; 70]] },
        open(5, "d/n", 0o302),
        rename("d/g", "d/k"),
        Call::Chmod { path: at("d/g"), mode: 0o604 },
        Call::Unlink(at("d/n")),
        Call::Unlink(at("d/g")),
    ]
}

/// Of each first, by its place, the seconds that want its file or folder.
const CHOSEN: [&[usize]; 12] = [&[0], &[0], &[0], &[1, 4], &[2], &[3], &[2], &[1], &[0], &[0], &[1], &[5]];

/// Answers of the first, then of the second, and the tree in the end.
type Outcome = (Vec<Answer>, Answer, Tree);

fn play(actor: &mut dyn Actor, calls: &[Call]) {
    for call in calls {
        let answer = actor.call(call);
        assert!(!matches!(answer, Answer::Failed(_)), "{call:?} answered {answer}");
    }
}

/// The model's outcome if one comes after the other.
fn expected(first: &Call, second: &Call, second_first: bool) -> Outcome {
    let model = Arc::new(Model::new(Arc::new(|| 0), vfs::model::Limits::default()));
    let [mut one, mut two] = [1, 2].map(|id| process(model.clone(), id));
    play(&mut one, &tree());
    play(&mut two, &opened());
    play(&mut one, &opened());
    play(&mut one, &warmed());
    let (first, second) = if second_first {
        let second = two.call(second);
        (one.call(first), second)
    } else {
        (one.call(first), two.call(second))
    };
    let first = [first].into_iter().chain(afterwards().iter().map(|call| one.call(call))).collect();
    (first, second, whole_tree(&mut process(model, 3)))
}

/// One pair, and where the first is stopped.
struct Case {
    first: Call,
    second: Call,
    /// The first made the tree: its leases are those of its own range.
    own: bool,
    seams: u64,
}

/// Runs a case; gives what came of it, and whether the first was stopped at all.
fn run(case: Case) -> (Outcome, bool) {
    let simulation = Simulation::new(case.seams, sim::Limits::default());
    let outside = simulation.process("daemon");
    let hosts = [simulation.process("first"), simulation.process("second")];
    let result = Arc::new(Mutex::new(None));
    let (host, theirs) = (outside.clone(), result.clone());
    let body = move || {
        let config = Config { grace: Duration::from_millis(1), ..tiny() };
        let node = Node::on(host.clone(), Recorder::new().medium(), config, None);
        let attach = |host: &Arc<SimHost>, id| {
            process(Arc::new(node.attach_on(host.clone(), Caller::ROOT, Limits::default()).0), id)
        };
        let (mut one, mut two) = (attach(&hosts[0], 1), attach(&hosts[1], 2));
        if case.own {
            play(&mut one, &tree());
        } else {
            play(&mut attach(&host, 3), &tree());
            node.tidy();
        }
        play(&mut two, &opened());
        play(&mut one, &opened());
        play(&mut one, &warmed());
        let daemon = node.daemon().expect("it runs");
        let (answers, stopped) = together(&daemon, &hosts, (one, case.first), (two, case.second), case.seams);
        daemon.tidy();
        let terminations = daemon.terminations();
        assert!(terminations.iter().all(|one| one.reason == "Grace"), "{terminations:?}");
        let tree = whole_tree(&mut attach(&host, 4));
        *theirs.lock().expect("nobody panicked") = Some(((answers.0, answers.1, tree), stopped));
    };
    drop(outside.spawn("main", Box::new(body)).expect("a thread"));
    simulation.run().unwrap_or_else(|stuck| panic!("{stuck}"));
    result.lock().expect("nobody panicked").take().expect("it came to its end")
}

/// Lets the first go as far as it is to go, the second to its end and into the area, and the first on.
fn together(
    daemon: &Arc<Daemon>,
    hosts: &[Arc<SimHost>; 2],
    (mut one, first): (Player<LibFs>, Call),
    (mut two, second): (Player<LibFs>, Call),
    seams: u64,
) -> ((Vec<Answer>, Answer), bool) {
    let first_host = hosts[0].clone();
    let answered = Arc::new(Mutex::new(None));
    let (shown, seen) = (answered.clone(), answered.clone());
    let theirs = first_host.clone();
    let body = move || {
        theirs.pause_at(seams);
        let answer = one.call(&first);
        theirs.resume();
        *shown.lock().expect("nobody panicked") = Some((one, answer));
    };
    let thread = first_host.spawn("worker", Box::new(body)).expect("a thread");
    let both = Arc::new(Mutex::new(None));
    let (told, host, daemon) = (both.clone(), hosts[1].clone(), daemon.clone());
    let body = move || {
        while !first_host.is_paused() && seen.lock().expect("nobody panicked").is_none() {
            host.step();
        }
        let stopped = first_host.is_paused();
        let answer = two.call(&second);
        daemon.tidy();
        first_host.resume();
        *told.lock().expect("nobody panicked") = Some((two, answer, stopped));
    };
    let other = hosts[1].spawn("worker", Box::new(body)).expect("a thread");
    [thread, other].into_iter().for_each(|thread| thread.join().expect("it did not fail"));
    let (mut one, first) = answered.lock().expect("nobody panicked").take().expect("it answered");
    let (_two, second, stopped) = both.lock().expect("nobody panicked").take().expect("it answered");
    let first = [first].into_iter().chain(afterwards().iter().map(|call| one.call(call))).collect();
    ((first, second), stopped)
}

/// Every seam of one pair; gives how many there were.
fn each_seam(first: &Call, second: &Call, own: bool) -> u64 {
    let orders = [false, true].map(|second_first| expected(first, second, second_first));
    for seams in 0.. {
        let case = Case { first: first.clone(), second: second.clone(), own, seams };
        let (outcome, stopped) = run(case);
        assert!(
            orders.contains(&outcome),
            "{first:?} stopped at {seams} for {second:?}, own range {own}: {:?} and {}, {:?}; not {orders:?}",
            outcome.0,
            outcome.1,
            outcome.2,
        );
        if !stopped {
            return seams;
        }
        assert!(seams < 5_000, "{first:?} never ends");
    }
    unreachable!("the first ends")
}

#[test]
fn whoever_is_stopped_anywhere_goes_on_under_leases_of_now() {
    let proves = std::env::var_os("HEARTH_PROVE").is_some_and(|value| value == "1");
    let (mut pairs, mut instants) = (0, 0);
    for (number, first) in firsts().iter().enumerate() {
        for (other, second) in seconds().iter().enumerate() {
            for own in [false, true] {
                let chosen = CHOSEN[number].contains(&other) && own == (number % 3 == 2);
                if proves || chosen {
                    pairs += 1;
                    instants += each_seam(first, second, own);
                }
            }
        }
    }
    println!("preempted: {pairs} pairs of operations, {instants} instants");
    assert!(instants > 100);
}
