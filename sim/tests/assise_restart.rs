//! The daemon dies at every step of an operation, in the program or in the daemon itself, and is started again: the
//! operation is done exactly once, its answer is that of a daemon that never died, and what the program had open and
//! locked it still has. The same with a second death in the recovery; and with a program that stood still meanwhile,
//! while another one went on with the new daemon.
//!
//! A step is an access to a shared word: this test counts them with a hook of its own, on the one thread that runs
//! everything. `HEARTH_PROVE` takes every step, otherwise some.

mod assise_local;
mod assise_mortal;

use assise_local::operations::{CREATE, Case, EXCLUSIVE, cases, open, read, stat, write};
use assise_local::trees::{at, process};
use assise_local::{Machine, Node, tiny};
use assise_mortal::{
    AGAIN, DEATHS, DIES_AT_DOOR, IS_OTHER, LEFT, LIVES_ON, MEANWHILE, NODE, OTHER_THREAD, STUCK, library,
    program, step,
};
use ipc::{Host, Join, Time, Waited, Word};
use pmem::Medium;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use vfs::Model;
use vfs::conformance::{Actor, Answer, Call};

/// The value with which another thread unwinds that finds a lock held, by the one thread that there is.
struct Blocked;

/// The host of a program whose other thread is tried at steps of its first.
struct OneThread(Arc<dyn Host>);

impl Host for OneThread {
    fn now(&self) -> Time {
        self.0.now()
    }

    fn wall(&self) -> i64 {
        self.0.wall()
    }

    fn random(&self) -> u64 {
        self.0.random()
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, ipc::Error> {
        self.0.spawn(name, body)
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        if IS_OTHER.get() && until.is_none() {
            resume_unwind(Box::new(Blocked));
        }
        self.0.wait(word, expected, until)
    }

    fn wake(&self, word: &Word, count: u32) {
        self.0.wake(word, count);
    }
}

/// Answers of the operation, of the other program, of the looks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Outcome {
    operation: Answer,
    meanwhile: Vec<Answer>,
    own: Vec<Answer>,
    others: Vec<Answer>,
}

/// The calls of the second program.
fn others_look() -> Vec<Call> {
    vec![
        Call::List(at("d")),
        stat("d/f"),
        open(5, "d/f", 0),
        read(5),
        Call::Flock { slot: 5, kind: 1 },
        Call::Close(5),
    ]
}

/// Removes everything, so that the next round begins with nothing.
fn clear(player: &mut dyn Actor) {
    (0..6).for_each(|slot| drop(player.call(&Call::Close(slot))));
    for name in ["f", "g", "l", "n"] {
        player.call(&Call::Unlink(at(&format!("d/{name}"))));
    }
    for name in ["d/n", "d/other", "d"] {
        player.call(&Call::Rmdir(at(name)));
    }
}

fn set_up(player: &mut dyn Actor, case: &Case) {
    assert_eq!(player.call(&Call::Mkdir { path: at("d"), mode: 0o755 }), Answer::Done, "{}", case.name);
    for call in &case.setup {
        let answer = player.call(call);
        assert!(!matches!(answer, Answer::Failed(_)), "{}: {answer}, asked for {call:.100?}", case.name);
    }
}

/// The model's outcome; `first`: the other program's operation comes before.
fn expected(case: &Case, meanwhile: Option<bool>) -> Outcome {
    let model = Arc::new(Model::new(Arc::new(|| 0), vfs::model::Limits::default()));
    let (mut one, mut two) = (process(model.clone(), 1), process(model, 2));
    set_up(&mut one, case);
    let mut told = Vec::new();
    if meanwhile == Some(true) {
        told.extend(case.meanwhile.iter().map(|call| two.call(call)));
    }
    let operation = one.call(&case.operation);
    if meanwhile == Some(false) {
        told.extend(case.meanwhile.iter().map(|call| two.call(call)));
    }
    let own = case.look.iter().map(|call| one.call(call)).collect();
    let others = others_look().iter().map(|call| two.call(call)).collect();
    Outcome { operation, meanwhile: told, own, others }
}

/// How a round goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Round {
    /// One program alone, one death.
    Alone,
    /// Another program has leases on the same things.
    Shared,
    /// A second death so many steps after the first.
    Twice(u64),
    /// The program stands still at its step, while another one goes on with a new daemon.
    Stopped,
    /// It stands still inside of its words, its log is sealed, and the daemon dies before the session is over.
    Sealed,
    /// The same, and the daemon dies while it seals.
    Sealing,
    /// It is sealed, which takes some steps of the program after the cut was read; the daemon lives.
    SealedSlowly,
    /// It stands still inside of its words, at a step of those it does there, and is shut out for what another one
    /// wants; the daemon dies so many steps later.
    ShutOut(u64),
}

/// One death at a step. How many there were, none if the operation has no such step; and whether another program did something meanwhile.
fn death((machine, node): (&Machine, &Arc<Node>), case: &Case, round: Round, at_step: u64) -> (u64, bool) {
    let ((mut one, first), (mut two, second_local)) = (program(node, 1), program(node, 2));
    set_up(&mut one, case);
    if round != Round::Alone {
        two.call(&Call::List(at("d")));
        two.call(&stat("d/f"));
    }
    if matches!(case.operation, Call::Pread { .. }) {
        // By another daemon, so that the data is in the area, and its location there is known.
        node.kill();
        one.call(&case.operation);
    }
    let answer = std::rc::Rc::new(RefCell::new(Vec::new()));
    let told = answer.clone();
    let second = std::rc::Rc::new(RefCell::new(two));
    if matches!(round, Round::Stopped | Round::ShutOut(_)) {
        let (second, calls, node) = (second.clone(), case.meanwhile.clone(), node.clone());
        MEANWHILE.set(Some(Box::new(move || {
            let answers = calls.iter().map(|call| second.borrow_mut().call(call));
            told.borrow_mut().extend(answers);
            if let Some(daemon) = node.daemon() {
                daemon.tidy();
            }
        })));
    }
    let sealed = matches!(round, Round::Sealed | Round::Sealing | Round::SealedSlowly);
    if sealed {
        let local = first.clone();
        MEANWHILE.set(Some(Box::new(move || {
            DIES_AT_DOOR.set(round != Round::SealedSlowly);
            match round {
                Round::Sealed => local.seal(),
                Round::SealedSlowly => {
                    let (mut sealing, mut steps) = (Some(local.begin_to_seal()), 0);
                    OTHER_THREAD.set(Some(Box::new(move || {
                        steps += 1;
                        if steps == SEALING_STEPS
                            && let Some(sealing) = sealing.take()
                        {
                            sealing.end();
                        }
                        steps >= SEALING_STEPS
                    })));
                }
                _ => {
                    local.begin_to_seal();
                    STUCK.set(true);
                }
            }
        })));
    }
    AGAIN.set(if let Round::Twice(steps) | Round::ShutOut(steps) = round { steps } else { 0 });
    LIVES_ON.set((sealed || matches!(round, Round::ShutOut(_))).then(|| first.clone()));
    NODE.set(Some(node.clone()));
    LEFT.set(at_step);
    let operation = one.call(&case.operation);
    let deaths = DEATHS.take();
    LEFT.set(0);
    while let Some(mut other) = OTHER_THREAD.take() {
        if !other() {
            OTHER_THREAD.set(Some(other));
        }
    }
    if round == Round::Sealing && deaths < 2 {
        // The operation was over before: a daemon that stopped in the middle is dead.
        node.kill();
    }
    AGAIN.set(0);
    LIVES_ON.set(None);
    DIES_AT_DOOR.set(false);
    STUCK.set(false);
    drop(MEANWHILE.take());
    let own = case.look.iter().map(|call| one.call(call)).collect();
    let others = others_look().iter().map(|call| second.borrow_mut().call(call)).collect();
    let found = Outcome { operation, meanwhile: answer.take(), own, others };
    let wanted: Vec<Outcome> = match found.meanwhile[..] {
        [] => vec![expected(case, None)],
        _ => [true, false].map(|first| expected(case, Some(first))).to_vec(),
    };
    assert!(
        wanted.contains(&found),
        "{}, {round:?}, a death at step {at_step}:\n  found  {found:.300?}\n  wanted {wanted:.300?}",
        case.name
    );
    clear(&mut one);
    machine.bury(first.pid());
    machine.bury(second_local.pid());
    // Reservations of the processes are given back.
    node.kill();
    (deaths, !found.meanwhile.is_empty())
}

/// Steps of a program while its log is sealed slowly: an operation has a few more behind its commit.
const SEALING_STEPS: u32 = 12;

/// Steps between two deaths that are tried, without `HEARTH_PROVE`.
const STRIDE: u64 = 7;
/// No operation has more steps than this.
const STEPS_MAX: u64 = 100_000;

fn deaths(stride: u64, round: impl Fn(u64) -> Round) -> u32 {
    ipc::sync::install_step(step);
    let stride = if std::env::var_os("HEARTH_PROVE").is_some() { 1 } else { stride };
    let (mut all, mut meanwhile) = (0, 0);
    for (number, case) in cases().iter().enumerate() {
        let (machine, folder) = (Arc::new(Machine::default()), assise_local::folder());
        let medium = Medium::memory(folder.path()).expect("the folder is there");
        let node = Node::on(machine.clone(), medium, tiny(), Some(folder));
        let mut at_step = 1 + number as u64 % stride;
        loop {
            let (deaths, others) = death((&machine, &node), case, round(at_step), at_step);
            if deaths == 0 {
                break;
            }
            at_step += stride;
            all += deaths;
            meanwhile += u32::from(others);
            assert!(at_step < STEPS_MAX, "{} does not end", case.name);
        }
    }
    println!("{all} deaths, another program went on after {meanwhile}");
    assert!(all > 100, "the daemon dies in the middle of operations: {all}");
    meanwhile
}

#[test]
fn a_death_at_any_step_is_not_seen_by_a_program_alone() {
    deaths(2, |_| Round::Alone);
}

#[test]
fn a_death_at_any_step_is_not_seen_by_two_programs() {
    deaths(STRIDE, |_| Round::Shared);
}

#[test]
fn a_second_death_at_any_step_of_the_recovery_is_not_seen() {
    deaths(STRIDE, |step| Round::Twice(1 + step * 7919 % 400));
}

#[test]
fn what_others_did_while_a_program_stood_still_is_seen_by_it() {
    assert!(deaths(STRIDE, |_| Round::Stopped) > 100);
}

#[test]
fn who_was_shut_out_does_nothing_twice_whenever_the_daemon_dies_over_it() {
    ipc::sync::install_step(step);
    let all = std::env::var_os("HEARTH_PROVE").is_some();
    // The interesting part comes soon after the log is sealed.
    let next = |later: u64| match all {
        true => later + 1 + later.saturating_sub(300) / 16,
        false => later + STRIDE.max(later / 8),
    };
    let (mut rounds, mut shut_out) = (0, 0);
    for case in cases() {
        let (machine, folder) = (Arc::new(Machine::default()), assise_local::folder());
        let medium = Medium::memory(folder.path()).expect("the folder is there");
        let hasty = sharedfs::Config { grace: std::time::Duration::ZERO, ..tiny() };
        let node = Node::on(machine.clone(), medium, hasty, Some(folder));
        for at_step in 1.. {
            // Begun elsewhere at each step, so that together they meet what is short.
            let mut later = 1 + at_step * if all { 1 } else { 37 } % if all { STRIDE } else { 60 };
            // Up to a death that comes after all is over.
            let stops = loop {
                let (stops, others) = death((&machine, &node), &case, Round::ShutOut(later), at_step);
                rounds += 1;
                shut_out += u32::from(others);
                later = next(later);
                assert!(later < STEPS_MAX, "{} does not end", case.name);
                if stops < 2 {
                    break stops;
                }
            };
            if stops == 0 {
                break;
            }
        }
    }
    println!("{rounds} rounds, another program went on in {shut_out}");
    assert!(shut_out > 100);
}

#[test]
fn who_finds_its_log_sealed_does_nothing_twice() {
    deaths(1, |_| Round::Sealed);
}

#[test]
fn who_finds_its_log_being_sealed_is_told_whether_its_record_counts() {
    deaths(1, |_| Round::Sealing);
}

#[test]
fn who_finds_its_log_being_sealed_waits_for_the_cut() {
    deaths(1, |_| Round::SealedSlowly);
}

#[test]
fn an_attempt_that_did_not_count_gives_back_nothing_of_another_threads() {
    ipc::sync::install_step(step);
    let mut opened = 0;
    for at_step in 1.. {
        let node = Node::new(tiny());
        let (libfs, _) = library(&node, Arc::new(OneThread(node.host.clone())));
        let (mut one, two) = (process(libfs.clone(), 1), process(libfs, 2));
        one.call(&open(0, "f", CREATE));
        one.call(&write(0, 1, 100));
        let wanted = one.call(&read(0));
        let two = std::rc::Rc::new(RefCell::new(two));
        let (other, next) = (two.clone(), node.clone());
        MEANWHILE.set(Some(Box::new(move || {
            // It recovers the log before the first thread's record is there: that does not count.
            if next.daemon().is_none() {
                next.start();
            }
            OTHER_THREAD.set(Some(Box::new(move || {
                IS_OTHER.set(true);
                let call = AssertUnwindSafe(|| other.borrow_mut().call(&open(4, "f", 0)));
                let done = catch_unwind(call);
                IS_OTHER.set(false);
                match done {
                    Ok(answer) => assert!(!matches!(answer, Answer::Failed(_)), "{answer}"),
                    Err(payload) if payload.is::<Blocked>() => return false,
                    Err(payload) => resume_unwind(payload),
                }
                true
            })));
        })));
        NODE.set(Some(node.clone()));
        LEFT.set(at_step);
        let created = one.call(&open(1, "n", EXCLUSIVE));
        LEFT.set(0);
        let is_open = MEANWHILE.take().is_none() && OTHER_THREAD.take().is_none();
        assert!(!matches!(created, Answer::Failed(_)), "death at step {at_step}: {created}");
        if is_open {
            opened += 1;
            let found = two.borrow_mut().call(&read(4));
            assert_eq!(found, wanted, "death at step {at_step}: the other thread's file");
        }
        let answer = one.call(&write(1, 2, 10));
        assert!(!matches!(answer, Answer::Failed(_)), "death at step {at_step}: {answer}");
        if DEATHS.take() == 0 {
            break;
        }
    }
    assert!(opened > 10, "the other thread opens its file in the middle: {opened}");
}

#[test]
fn a_close_that_meets_a_death_gives_back_a_file_without_a_name() {
    ipc::sync::install_step(step);
    for at_step in 1.. {
        let node = Node::new(tiny());
        let (mut one, _) = program(&node, 1);
        let inodes = node.daemon().expect("it serves").usage().inodes;
        one.call(&open(0, "f", CREATE));
        one.call(&write(0, 1, LONG));
        one.call(&Call::Unlink(at("f")));
        node.tidy();
        assert_eq!(node.daemon().expect("it serves").usage().inodes, inodes + 1, "it is open");
        NODE.set(Some(node.clone()));
        LEFT.set(at_step);
        one.call(&Call::Close(0));
        LEFT.set(0);
        let over = DEATHS.take() == 0;
        // It has come to the daemon that serves now.
        one.call(&Call::List(at(".")));
        node.tidy();
        let left = node.daemon().expect("it serves").usage().inodes;
        assert_eq!(left, inodes, "death at step {at_step}: nobody has it open");
        if over {
            return assert!(at_step > 10, "a close has steps: {at_step}");
        }
    }
}

#[test]
fn a_file_that_another_removed_goes_when_it_is_closed() {
    let node = Node::new(tiny());
    let ((mut one, _), (mut two, _)) = (program(&node, 1), program(&node, 2));
    let inodes = node.daemon().expect("it serves").usage().inodes;
    for reads_after in [false, true] {
        one.call(&open(0, "f", CREATE));
        one.call(&write(0, 1, LONG));
        two.call(&Call::Unlink(at("f")));
        node.tidy();
        assert_eq!(node.daemon().expect("it serves").usage().inodes, inodes + 1, "it is open");
        if reads_after {
            one.call(&read(0));
        }
        one.call(&Call::Close(0));
        one.call(&Call::List(at(".")));
        node.tidy();
        assert_eq!(node.daemon().expect("it serves").usage().inodes, inodes, "nobody has it open");
    }
}

/// Bytes that are read without the lock of the state.
const LONG: usize = 15_000;

#[test]
fn blocks_that_were_used_again_while_a_reader_stood_still_are_not_what_it_gives() {
    ipc::sync::install_step(step);
    let mut again = 0;
    for at_step in 1..200 {
        let config =
            sharedfs::Config { area: assise_local::sharedfs_area(1 << 9), room_reserve: 16, ..tiny() };
        let node = Node::new(config);
        let ((mut one, _), (mut two, _)) = (program(&node, 1), program(&node, 2));
        one.call(&open(0, "f", CREATE));
        one.call(&write(0, 1, LONG));
        // Digested by a daemon that lives, so that it lies where its user maps it: a recovery gives nobody a segment.
        node.daemon().expect("it serves").tidy();
        node.kill();
        let before = one.call(&read(0));
        assert_eq!(one.call(&read(0)), before);
        let other = node.clone();
        MEANWHILE.set(Some(Box::new(move || {
            two.call(&Call::Truncate { path: at("f"), size: 0 });
            two.call(&open(4, "g", CREATE));
            // Every block that is free has other contents then, except a few unreserved ones.
            for _ in 0..200 {
                two.call(&write(4, 9, LONG));
                let daemon = other.daemon().expect("it was started for the first write");
                daemon.tidy();
            }
        })));
        NODE.set(Some(node.clone()));
        LEFT.set(at_step);
        let found = one.call(&read(0));
        LEFT.set(0);
        let over = DEATHS.take() == 0;
        drop(MEANWHILE.take());
        let nines = format!("{found:?}").contains("9, 9, 9");
        assert!(!nines, "death at step {at_step}: the reader is given what another wrote");
        if over {
            break;
        }
        again += u32::from(found != before);
    }
    assert!(again > 2, "the reader stood still in the middle of what it read: {again}");
}
