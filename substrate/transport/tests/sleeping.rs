//! Threads that sleep until a message arrives: the message wakes its own thread and no other, and each thread that waits
//! gets its message, also if another thread drove the connection before.

#![allow(clippy::unwrap_used, reason = "everything here is a test; clippy knows tests by their attribute")]

mod support;

use format::Epoch;
use ipc::host::{Join, Waited};
use ipc::sync::{Ordering, Word};
use ipc::{Host, SystemHost, Time};
use std::fs;
use std::sync::Arc;
use support::{Bed, LIMIT, in_ms, message, patient, sleeps_of_progress_threads, soon, spawn};
use transport::{Error, Event, Fabric, Settings};

/// Messages in each direction.
const ROUNDS: u64 = 500;

/// Waits until the thread with this name sleeps.
fn await_sleep(name: &str) {
    let until = soon();
    let sleeps = || {
        let threads = fs::read_dir("/proc/self/task").unwrap();
        // A thread may end between the calls.
        threads.flatten().filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok()).any(
            |stat| {
                let (head, state) = stat.rsplit_once(") ").unwrap();
                head.ends_with(&format!("({name}")) && state.starts_with('S')
            },
        )
    };
    while !sleeps() {
        assert!(SystemHost.now() < until, "{name} does not sleep");
        SystemHost.wait(&Word::new(0), 0, Some(in_ms(1)));
    }
}

/// Threads that wait do not poll.
fn sleepy() -> Settings {
    Settings { spin_ns: 0, ..patient() }
}

#[test]
fn a_message_for_a_sleeping_thread_wakes_no_other() {
    let support::Pair { one: _one, two: _two, here, there } = support::Pair::new(&Bed::Tcp, &sleepy());
    let (start, before) = (SystemHost.now(), sleeps_of_progress_threads());
    let answering = spawn("answers", move || {
        for _ in 0..ROUNDS {
            let heard = message(&there);
            there.send(&heard, Some(soon())).unwrap();
        }
        there
    });
    for round in 0..ROUNDS {
        here.send(&round.to_le_bytes(), Some(soon())).unwrap();
        assert_eq!(message(&here), round.to_le_bytes());
    }
    let sleeps = sleeps_of_progress_threads() - before;
    drop(answering.join());
    // A progress thread that is woken for each message sleeps as often. Otherwise each looks 20 times a second.
    let looks = u64::try_from(SystemHost.now().since(start).as_millis()).unwrap() / 10;
    assert!(
        sleeps < ROUNDS / 2 + looks,
        "{sleeps} sleeps of progress threads for {ROUNDS} messages each way"
    );
}

#[test]
fn a_thread_that_gives_up_leaves_the_connection_to_the_next_one() {
    // The progress threads do not help.
    let settings = Settings { look_again: LIMIT * 10, silence: None, ..sleepy() };
    let support::Pair { one: _one, two: _two, here, there } = support::Pair::new(&Bed::Tcp, &settings);
    let here = Arc::new(here);
    // From here on the connection is left to its threads.
    for _ in 0..2 {
        there.send(b"first", Some(soon())).unwrap();
        assert_eq!(message(&here), b"first");
    }
    let until = in_ms(1000);
    let first = here.clone();
    let gives_up = spawn("gives up", move || first.take(Some(until)).map(drop));
    await_sleep("gives up");
    let second = here.clone();
    let stays = spawn("stays", move || second.take(Some(soon())));
    await_sleep("stays");
    assert!(matches!(gives_up.join(), Err(Error::TimedOut)));
    let sent = SystemHost.now();
    there.send(b"second", Some(soon())).unwrap();
    let Ok(Event::Message(heard)) = stays.join() else { panic!("no message") };
    assert_eq!(heard, b"second");
    // At its deadline each thread takes what has arrived.
    assert!(SystemHost.now().since(sent) < LIMIT / 2, "it slept until its deadline");
}

#[test]
fn a_thread_whose_deadline_is_over_does_not_poll() {
    let settings = Settings { spin_ns: u32::MAX, ..patient() };
    let support::Pair { one: _one, two: _two, here, there } = support::Pair::new(&Bed::Tcp, &settings);
    let before = SystemHost.now();
    for _ in 0..5 {
        assert!(matches!(here.take(Some(before)), Err(Error::TimedOut)));
    }
    // Each would poll for four seconds.
    assert!(SystemHost.now().since(before) < LIMIT / 2, "it polled");
    // It takes what has arrived.
    there.send(b"arrived", Some(soon())).unwrap();
    let arrived = || here.take(Some(before)).ok();
    let until = soon();
    let heard = std::iter::repeat_with(arrived).take_while(|_| SystemHost.now() < until).flatten().next();
    assert!(matches!(heard, Some(Event::Message(message)) if message == b"arrived"));
}

/// The machine, which counts the yields.
struct Yields(Word);

impl Host for Yields {
    fn now(&self) -> Time {
        SystemHost.now()
    }

    fn wall(&self) -> i64 {
        SystemHost.wall()
    }

    fn random(&self) -> u64 {
        SystemHost.random()
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, ipc::Error> {
        SystemHost.spawn(name, body)
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        SystemHost.wait(word, expected, until)
    }

    fn wake(&self, word: &Word, count: u32) {
        SystemHost.wake(word, count);
    }

    fn yield_now(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_thread_that_has_sent_yields_before_it_looks_for_the_answer() {
    let host = Arc::new(Yields(Word::new(0)));
    let fabric = Fabric::tcp("127.0.0.1");
    let one = fabric.endpoint(host.clone(), support::identity(1), Epoch::new(1), sleepy()).unwrap();
    let two = Bed::Tcp.endpoint(2, &sleepy());
    let (here, there) = support::join(&Bed::Tcp, &one, &two);
    let answering = spawn("answers", move || {
        for _ in 0..ROUNDS {
            let heard = message(&there);
            there.send(&heard, Some(soon())).unwrap();
        }
        there
    });
    let before = host.0.load(Ordering::Relaxed);
    for round in 0..ROUNDS {
        here.send(&round.to_le_bytes(), Some(soon())).unwrap();
        assert_eq!(message(&here), round.to_le_bytes());
    }
    let yields = u64::from(host.0.load(Ordering::Relaxed) - before);
    drop(answering.join());
    // Of its own message it finds at first that it was sent. A progress thread may find it.
    assert!(yields > ROUNDS / 2, "{yields} yields for {ROUNDS} messages each way");
}
