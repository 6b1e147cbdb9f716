//! Locks of several programs, decided by them under lock leases or by the daemon: whatever dies in between, each call answers
//! as that of a model in which nothing dies but programs. So no two have locks that exclude each other, what a program
//! locked it has until it unlocks or dies, and what a dead one had is free.
//!
//! A daemon dies at a step of a call, which may be its own (see `assise_mortal`), and is started again; a program is killed
//! between two calls, or is stopped inside of its words and shut out. `ASSISE_CASES` says how many histories there are.

mod assise_local;
mod assise_mortal;

use assise_local::trees::{at, process};
use assise_local::{Local, Machine, Node, tiny};
use assise_mortal::{DEATHS, LEFT, NODE, library, step};
use format::call::CallKind;
use libfs::{LibFs, Limits};
use pmem::Medium;
use sharedfs::Config;
use sim::random::Random;
use std::sync::Arc;
use std::time::Duration;
use vfs::conformance::{Actor, Answer, Call, Player};
use vfs::{Caller, Model};

const PROGRAMS: usize = 3;
const SLOTS: u64 = 3;
const CALLS: u64 = 120;

fn config() -> Config {
    let mut config = Config { grace: Duration::from_millis(2), ..tiny() };
    // A lease is given as soon as no other process has a lock there.
    config.lock_limits.quiet_ns = 0;
    config
}

struct Pair {
    real: Player<LibFs>,
    local: Arc<Local>,
    model: Player<Model>,
}

impl Pair {
    fn new(node: &Arc<Node>, model: &Arc<Model>, id: u64) -> Self {
        let (libfs, local) = library(node, node.host.clone());
        Self {
            real: numbered(process(libfs, id), id),
            local,
            model: numbered(process(model.clone(), id), id),
        }
    }
}

/// A program whose descriptions have other numbers than those of the programs before: owners of locks are told apart by them.
fn numbered<E: vfs::Engine>(mut player: Player<E>, id: u64) -> Player<E> {
    for _ in 0..id * CALLS {
        player.call(&Call::Open { slot: 0, path: at("numbers"), flags: 0o102, mode: 0o644 });
    }
    player.call(&Call::Close(0));
    player
}

fn draw(random: &mut Random) -> Call {
    let slot = random.below(SLOTS) as usize;
    let kind = random.below(4).min(2) as u8;
    match random.below(10) {
        0 => Call::Close(slot),
        1 | 2 => {
            let path = at(["a", "b"][random.below(2) as usize]);
            Call::Open { slot, path, flags: 0o102, mode: 0o644 }
        }
        3..=5 => Call::Flock { slot, kind },
        _ => {
            let (start, bytes) = (random.below(12) as i64, random.below(6) as i64);
            Call::OfdLock { slot, kind, start, bytes }
        }
    }
}

/// One history; deaths of daemons and of programs, and programs that were shut out.
fn history(seed: u64) -> (u64, u64, usize) {
    let mut random = Random::new(seed);
    let (machine, folder) = (Arc::new(Machine::default()), assise_local::folder());
    let medium = Medium::memory(folder.path()).expect("the folder is there");
    let node = Node::on(machine.clone(), medium, config(), Some(folder));
    let model = Arc::new(Model::new(Arc::new(|| 0), vfs::model::Limits::default()));
    let mut ids = 0;
    let mut new_id = || {
        ids += 1;
        ids
    };
    let mut programs: Vec<Pair> = (0..PROGRAMS).map(|_| Pair::new(&node, &model, new_id())).collect();
    NODE.set(Some(node.clone()));
    let (mut killed, mut shut_out) = (0, 0);
    for number in 0..CALLS {
        let who = random.below(PROGRAMS as u64) as usize;
        match random.below(24) {
            0 => {
                let id = new_id();
                let dead = std::mem::replace(&mut programs[who], Pair::new(&node, &model, id));
                machine.bury(dead.local.pid());
                if let Some(daemon) = node.daemon() {
                    daemon.end(dead.local.session());
                }
                dead.model.end();
                killed += 1;
                continue;
            }
            1 if !programs[who].local.is_inside() => programs[who].local.stop_inside(),
            2..8 => LEFT.set(1 + random.below(120)),
            _ => {}
        }
        let call = draw(&mut random);
        let found = programs[who].real.call(&call);
        LEFT.set(0);
        let wanted = programs[who].model.call(&call);
        assert_eq!(found, wanted, "seed {seed}, call {number} of program {who}: {call:?}");
        shut_out += node.daemon().map_or(0, |daemon| daemon.terminations().len());
    }
    NODE.set(None);
    node.kill();
    (DEATHS.take(), killed, shut_out)
}

#[test]
fn locks_are_those_of_a_world_in_which_only_programs_die() {
    ipc::sync::install_step(step);
    let cases = std::env::var("ASSISE_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(60);
    let all =
        (0..cases).map(history).fold((0, 0, 0), |all, one| (all.0 + one.0, all.1 + one.1, all.2 + one.2));
    println!(
        "{cases} histories: {} daemons died, {} programs, {} looks at those shut out",
        all.0, all.1, all.2
    );
    assert!(all.0 > cases && all.1 > cases && all.2 > 0, "{all:?}");
}

/// Locks of one program alone cost calls for the first one only; locks that two programs take in turns cost calls.
#[test]
fn a_lock_that_nobody_else_wants_makes_no_call() {
    let node = Node::new(tiny());
    let attach = |id| {
        let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
        (numbered(process(Arc::new(libfs), id), id), local)
    };
    let ((mut one, counts), (mut two, _)) = (attach(1), attach(2));
    let done = |player: &mut Player<LibFs>, call: Call| {
        let answer = player.call(&call);
        assert_eq!(answer, Answer::Done, "{call:?}");
    };
    let open = |slot| Call::Open { slot, path: at("f"), flags: 0o102, mode: 0o644 };
    let range = |kind, start| Call::OfdLock { slot: 0, kind, start, bytes: 5 };
    [open(0), Call::Flock { slot: 0, kind: 2 }, range(2, 0)]
        .into_iter()
        .for_each(|call| done(&mut one, call));
    let before = counts.counts.all();
    for round in 0..50 {
        done(&mut one, Call::Flock { slot: 0, kind: (round % 3) as u8 });
        done(&mut one, range((round % 3) as u8, round % 7));
        // Another description, opened and closed, whose lock is gone with it.
        done(&mut one, open(1));
        assert!(matches!(one.call(&Call::OfdLock { slot: 1, kind: 2, start: 90, bytes: 1 }), Answer::Done));
        done(&mut one, Call::Close(1));
    }
    assert_eq!(counts.counts.all(), before, "{:?}", counts.counts.kinds());
    done(&mut one, Call::Flock { slot: 0, kind: 2 });
    done(&mut two, open(0));
    assert!(matches!(two.call(&Call::Flock { slot: 0, kind: 1 }), Answer::Failed(_)));
    done(&mut one, Call::Flock { slot: 0, kind: 0 });
    done(&mut two, Call::Flock { slot: 0, kind: 1 });
    assert_eq!(counts.counts.of(CallKind::Unlock), 1, "the lease was taken back");
}
