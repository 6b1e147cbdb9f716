//! The simulator itself: equal seeds give equal runs, time passes only when no thread can run, kills and pauses work
//! like real ones, and hanging threads are reported.

#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

use ipc::sync::Ordering;
use ipc::{Host, Lock, Spin, Time, WAKE_ALL, Waited, Word, wait_until};
use sim::{Ended, Limits, SimHost, Simulation, Stuck};
use std::sync::Arc;
use std::time::Duration;

fn start(host: &Arc<SimHost>, name: &str, body: impl FnOnce() + Send + 'static) {
    drop(host.spawn(name, Box::new(body)).unwrap());
}

/// Four threads that add to a word, with waits between; gives the order in which they did.
fn busy(seed: u64) -> (Ended, Vec<u64>) {
    let simulation = Simulation::new(seed, Limits::default());
    let host = simulation.process("adder");
    let order = Arc::new(Lock::new(host.clone(), Vec::new()));
    let word = Arc::new(Word::new(0));
    for thread in 0..4u64 {
        let (host, order, word) = (host.clone(), order.clone(), word.clone());
        start(&host.clone(), &format!("{thread}"), move || {
            for turn in 0..10 {
                let seen = word.fetch_add(1, Ordering::Relaxed) + 1;
                host.wake(&word, WAKE_ALL);
                if turn % 3 == 0 {
                    let until = host.now().after(Duration::from_micros(host.random() % 20));
                    let _ = host.wait(&word, seen, Some(until));
                }
                order.lock().push(thread);
            }
        });
    }
    let ended = simulation.run().unwrap();
    let order = order.lock().clone();
    (ended, order)
}

#[test]
fn equal_seeds_give_equal_runs_and_others_do_not() {
    let mut traces = std::collections::BTreeSet::new();
    for seed in 0..40 {
        let first = busy(seed);
        assert_eq!(first, busy(seed), "seed {seed}");
        assert_eq!(first.1.len(), 40);
        traces.insert(first.0.trace);
    }
    assert_eq!(traces.len(), 40);
}

#[test]
fn time_jumps_to_the_end_of_a_wait() {
    let simulation = Simulation::new(1, Limits { spurious_one_in: 0, ..Limits::default() });
    let host = simulation.process("sleeper");
    let theirs = host.clone();
    start(&host, "sleeper", move || {
        let word = Word::new(0);
        let until = theirs.now().after(Duration::from_secs(3600));
        assert_eq!(theirs.wait(&word, 0, Some(until)), Waited::TimedOut);
        assert!(theirs.now() >= until);
        assert_eq!(theirs.wait(&word, 1, None), Waited::Woken);
    });
    assert!(simulation.run().unwrap().now >= Time::from_ns(3_600_000_000_000));
}

fn wait_for_ever(host: &SimHost, word: &Word) {
    let _ = wait_until(host, word, &Spin::new(0), None, |value| value != 0);
}

#[test]
fn a_deadlock_is_told_with_where_everybody_stands() {
    for seed in 0..20 {
        let simulation = Simulation::new(seed, Limits::default());
        let host = simulation.process("hangs");
        for name in ["one", "two"] {
            let theirs = host.clone();
            start(&host, name, move || wait_for_ever(&theirs, &Word::new(0)));
        }
        let Err(Stuck::Deadlock(threads)) = simulation.run() else { panic!("seed {seed} ended") };
        let names: Vec<_> = threads.iter().map(|thread| thread.name.as_str()).collect();
        assert_eq!(names, ["hangs/one", "hangs/two"]);
        for thread in threads {
            assert!(thread.state.starts_with("waiting for the word at"), "{thread:?}");
            assert!(thread.calls.iter().any(|call| call.contains("wait_for_ever")), "{thread:?}");
        }
    }
}

#[test]
fn a_thread_that_never_ends_and_one_that_panics_are_told() {
    let simulation = Simulation::new(3, Limits { steps_max: 1000, ..Limits::default() });
    let host = simulation.process("spins");
    start(&host, "spins", || {
        let word = Word::new(0);
        while word.load(Ordering::Relaxed) == 0 {}
    });
    assert!(matches!(simulation.run(), Err(Stuck::Endless(_))));

    let simulation = Simulation::new(3, Limits::default());
    let host = simulation.process("broken");
    start(&host, "broken", || panic!("as it should"));
    let expected = Stuck::Panicked("broken/broken".to_owned(), "as it should".to_owned());
    assert_eq!(simulation.run(), Err(expected));
}

#[test]
fn a_thread_that_blocks_outside_of_the_seams_is_told() {
    let limits = Limits { silence_max: Duration::from_millis(20), ..Limits::default() };
    let simulation = Simulation::new(3, limits);
    let host = simulation.process("blocks");
    let (end, blocked) = std::sync::mpsc::channel::<()>();
    start(&host, "blocks", move || assert!(blocked.recv().is_err()));
    assert_eq!(simulation.run(), Err(Stuck::Silent("blocks/blocks".to_owned())));
    drop(end);
}

#[test]
fn a_wake_that_nobody_sends_is_missed_and_one_that_is_sent_is_not() {
    let run = |seed, wakes: bool| {
        let simulation = Simulation::new(seed, Limits { spurious_one_in: 0, ..Limits::default() });
        let host = simulation.process("pair");
        let word = Arc::new(Word::new(0));
        let (waiter, theirs) = (host.clone(), word.clone());
        start(&host, "waiter", move || wait_for_ever(&waiter, &theirs));
        let changer = host.clone();
        start(&host, "changer", move || {
            word.store(1, Ordering::Release);
            if wakes {
                changer.wake(&word, WAKE_ALL);
            }
        });
        simulation.run().is_ok()
    };
    assert!((0..200).all(|seed| run(seed, true)));
    assert!((0..200).any(|seed| !run(seed, false)), "a forgotten wake is found");
    assert!((0..200).any(|seed| run(seed, false)), "though not by every schedule");
}

#[test]
fn a_killed_process_does_nothing_more_and_a_paused_one_nothing_until_it_is_resumed() {
    for seed in 0..300 {
        let simulation = Simulation::new(seed, Limits::default());
        let (host, other) = (simulation.process("victim"), simulation.process("other"));
        let count = Arc::new(Word::new(0));
        for name in ["one", "two"] {
            let count = count.clone();
            start(&host, name, move || {
                for _ in 0..50 {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let (theirs, watcher) = (host.clone(), other.clone());
        start(&other, "mischief", move || {
            let still = |steps| {
                let before = count.load(Ordering::Relaxed);
                (0..steps).for_each(|_| watcher.step());
                assert_eq!(count.load(Ordering::Relaxed), before);
            };
            let early = watcher.random() % 60;
            (0..early).for_each(|_| watcher.step());
            theirs.pause();
            still(30);
            theirs.resume();
            if early % 2 == 0 {
                theirs.kill();
                assert!(!theirs.is_alive());
                still(30);
            }
        });
        let ended = simulation.run();
        assert!(ended.is_ok(), "seed {seed}: {ended:?}");
    }
}

#[test]
fn a_process_is_paused_at_the_seam_that_was_named() {
    for seams in 0..12 {
        let simulation = Simulation::new(seams, Limits::default());
        let (host, other) = (simulation.process("victim"), simulation.process("other"));
        let (count, theirs, victim) = (Arc::new(Word::new(0)), Arc::new(Word::new(0)), host.clone());
        let counted = count.clone();
        start(&host, "counts", move || {
            victim.pause_at(seams);
            sim::elsewhere(|| (0..5).for_each(|_| _ = theirs.load(Ordering::Relaxed)));
            (0..10).for_each(|_| _ = counted.fetch_add(1, Ordering::Relaxed));
            victim.resume();
        });
        let watcher = other.clone();
        start(&other, "looks", move || {
            while !host.is_paused() && count.load(Ordering::Relaxed) < 10 {
                watcher.step();
            }
            (0..30).for_each(|_| watcher.step());
            assert_eq!(u64::from(count.load(Ordering::Relaxed)), seams.min(10));
            host.resume();
        });
        simulation.run().unwrap();
    }
}
