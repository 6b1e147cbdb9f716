//! The request ring over the real machine: many threads, large and small messages, hostile words, a server that goes
//! away. Its schedules are explored under the simulator; other processes are in `tests/processes.rs`.

#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

use ipc::shared::create;
use ipc::{
    Access, Call, Error, Host, Link, Mapping, RingClient, RingLimits, RingServer, SystemHost, Time, Waited,
    Word,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

const TINY: RingLimits = RingLimits { slots: 2, inline_bytes: 64, bulk_buffers: 1, bulk_bytes: 4096 };

struct Up(Arc<AtomicBool>);

impl Link for Up {
    fn is_up(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

struct Pair {
    client: Arc<RingClient>,
    server: Arc<RingServer>,
    up: Arc<AtomicBool>,
    memory: Arc<Mapping>,
}

fn pair(limits: RingLimits, spin_ns: u32) -> Pair {
    let bytes = limits.bytes().unwrap();
    let descriptor = create(c"ring", bytes).unwrap();
    let map = || Mapping::new(&descriptor, bytes, Access::Write).unwrap();
    let host = Arc::new(SystemHost);
    let up = Arc::new(AtomicBool::new(true));
    let memory = map();
    Pair {
        client: Arc::new(
            RingClient::new(host.clone(), Box::new(Up(up.clone())), map(), limits, spin_ns).unwrap(),
        ),
        server: Arc::new(RingServer::new(host, memory.clone(), limits, spin_ns).unwrap()),
        up,
        memory,
    }
}

fn call(id: u64, body: &[u8]) -> Call<'_> {
    Call { id, kind: 3, body, response_bytes_max: body.len() }
}

/// A thread that sends every body back, reversed, until the ring is closed.
fn echo(server: &Arc<RingServer>) -> Box<dyn ipc::Join> {
    let server = server.clone();
    let body = move || {
        loop {
            match server.next(None) {
                Ok(taken) => {
                    let body: Vec<u8> = taken.body.iter().rev().copied().collect();
                    let status = taken.kind;
                    server.respond(taken, status, &body).unwrap();
                }
                Err(Error::Disconnected) => return,
                Err(error) => panic!("{error}"),
            }
        }
    };
    SystemHost.spawn("server", Box::new(body)).unwrap()
}

/// The machine, as a thread on one processor sees it: counts its sleeps, and how often it reads the clock.
struct Placed {
    processor: u32,
    sleeps: AtomicU32,
    clock: AtomicU32,
}

impl Placed {
    fn new(processor: u32) -> Arc<Self> {
        Arc::new(Self { processor, sleeps: AtomicU32::new(0), clock: AtomicU32::new(0) })
    }

    /// Waits until one of its counts is not zero, for at most a span.
    fn wait_for(count: &AtomicU32, span: Duration) {
        let give_up = SystemHost.now().after(span);
        while count.load(Ordering::SeqCst) == 0 && SystemHost.now() < give_up {
            SystemHost.yield_now();
        }
    }

    fn sleeps(&self) -> u32 {
        self.sleeps.load(Ordering::SeqCst)
    }
}

impl Host for Placed {
    fn now(&self) -> Time {
        self.clock.fetch_add(1, Ordering::SeqCst);
        SystemHost.now()
    }

    fn wall(&self) -> i64 {
        SystemHost.wall()
    }

    fn random(&self) -> u64 {
        SystemHost.random()
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn ipc::Join>, Error> {
        SystemHost.spawn(name, body)
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        self.sleeps.fetch_add(1, Ordering::SeqCst);
        SystemHost.wait(word, expected, until)
    }

    fn yield_now(&self) {
        SystemHost.yield_now();
    }

    fn processor(&self) -> Option<u32> {
        Some(self.processor)
    }

    fn wake(&self, word: &Word, count: u32) {
        SystemHost.wake(word, count);
    }
}

/// The sleeps of client and server during a call, and while the server waits for the next one, if each is on the given processor
/// and would poll for a long time. A server that sleeps is on no known processor.
fn sleeps_on(client_at: u32, server_at: u32) -> (u32, u32) {
    const POLL_NS: u32 = 4_000_000_000;
    /// Place of the word with the server's processor in the ring's memory.
    const SERVER_PROCESSOR: usize = 3 * 64 + 4;
    let bytes = TINY.bytes().unwrap();
    let descriptor = create(c"ring", bytes).unwrap();
    let map = || Mapping::new(&descriptor, bytes, Access::Write).unwrap();
    let (client_host, server_host) = (Placed::new(client_at), Placed::new(server_at));
    let link = Box::new(Up(Arc::new(AtomicBool::new(true))));
    let client = RingClient::new(client_host.clone(), link, map(), TINY, POLL_NS).unwrap();
    let server = RingServer::new(server_host.clone(), map(), TINY, POLL_NS).unwrap();
    let after = |span| Some(SystemHost.now().after(span));
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let taken = server.next(after(Duration::from_secs(30))).unwrap();
            // The client sleeps at once, or polls for as long as this.
            Placed::wait_for(&client_host.sleeps, Duration::from_millis(200));
            server.respond(taken, 0, b"answered").unwrap();
            server.next(None).unwrap_err()
        });
        // The server polls: it has written down its processor before it reads the clock.
        Placed::wait_for(&server_host.clock, Duration::from_secs(30));
        assert_eq!(client.call(&call(1, b"question"), None).unwrap().body, b"answered");
        Placed::wait_for(&server_host.sleeps, Duration::from_millis(200));
        let processor = map().words::<Word>(SERVER_PROCESSOR, 1).unwrap()[0].load(Ordering::SeqCst);
        let known = if server_host.sleeps() > 0 { 0 } else { server_at + 1 };
        server.close();
        assert_eq!(serving.join().unwrap(), Error::Disconnected);
        assert_eq!(processor, known);
    });
    (client_host.sleeps(), server_host.sleeps())
}

#[test]
fn two_sides_on_one_processor_do_not_poll() {
    let (client, server) = sleeps_on(3, 3);
    assert!(client > 0 && server > 0, "{client} sleeps of the client, {server} of the server");
    assert_eq!(sleeps_on(3, 4), (0, 0));
}

#[test]
fn every_call_gets_its_own_answer() {
    for spin_ns in [0, 20_000] {
        let pair = pair(TINY, spin_ns);
        let servers = [echo(&pair.server), echo(&pair.server)];
        let threads: Vec<_> = (0..4u64)
            .map(|thread| {
                let client = pair.client.clone();
                let body = move || {
                    for turn in 0..500u64 {
                        let length = (turn * 37 % 4080) as usize * usize::from(turn % 5 == 0) + 16;
                        let mut body = vec![turn as u8; length.min(4080)];
                        body[..8].copy_from_slice(&(thread << 32 | turn).to_le_bytes());
                        let response = client.call(&call(thread << 32 | turn, &body), None).unwrap();
                        body.reverse();
                        assert_eq!(response.status, 3);
                        assert!(response.body == body, "thread {thread}, turn {turn}");
                    }
                };
                SystemHost.spawn("client", Box::new(body)).unwrap()
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        pair.server.close();
        for server in servers {
            server.join().unwrap();
        }
        assert_eq!(pair.client.call(&call(1, b"late"), None), Err(Error::Disconnected));
    }
}

#[test]
fn an_abandoned_call_gives_its_slot_back_when_it_is_answered() {
    let pair = pair(TINY, 0);
    let soon = || Some(SystemHost.now().after(Duration::from_millis(1)));
    for id in 0..2 {
        assert_eq!(pair.client.call(&call(id, b"nobody there"), soon()), Err(Error::TimedOut));
    }
    assert_eq!(pair.client.call(&call(2, b"no slot"), soon()), Err(Error::TimedOut));
    for _ in 0..2 {
        let taken = pair.server.next(soon()).unwrap();
        assert_eq!(taken.body, b"nobody there");
        pair.server.respond(taken, 0, b"late").unwrap();
    }
    let server = echo(&pair.server);
    assert_eq!(pair.client.call(&call(3, b"ab"), None).unwrap().body, b"ba");
    pair.server.close();
    server.join().unwrap();
}

#[test]
fn a_server_that_has_gone_is_told_and_a_slow_one_is_waited_for() {
    let pair = pair(TINY, 0);
    let client = pair.client.clone();
    let caller = SystemHost
        .spawn(
            "caller",
            Box::new(move || assert_eq!(client.call(&call(1, b"x"), None), Err(Error::Disconnected))),
        )
        .unwrap();
    let taken = pair.server.next(None).unwrap();
    pair.up.store(false, Ordering::Relaxed);
    caller.join().unwrap();
    drop(taken);
}

#[test]
fn what_does_not_fit_is_refused_on_both_sides() {
    let pair = pair(TINY, 0);
    let limit = 4096 - 16;
    let body = vec![0; limit + 1];
    let error = pair.client.call(&call(1, &body), None).unwrap_err();
    assert_eq!(error, Error::TooLarge { bytes: limit + 1, limit });
    let server = pair.server.clone();
    let thread = SystemHost.spawn(
        "server",
        Box::new(move || {
            let taken = server.next(None).unwrap();
            let error = server.respond(taken, 0, &[0; 100]).unwrap_err();
            assert_eq!(error, Error::TooLarge { bytes: 100, limit: 48 });
        }),
    );
    assert!(matches!(pair.client.call(&call(2, b"small"), None), Err(Error::TooLarge { .. })));
    thread.unwrap().join().unwrap();
}

#[test]
fn hostile_words_never_panic_the_server() {
    let limits = TINY;
    let until = || Some(SystemHost.now());
    // Words of slot 0: state, request bytes, response bytes, buffer.
    for (bytes, bulk, head) in [
        (u32::MAX, 0, 0u8),
        (65, 0, 0),
        (4097, 1, 0),
        (16, 2, 0),
        (16, u32::MAX, 0),
        (0, 0, 0),
        (15, 0, 0),
        (64, 1, 0xff),
        (4096, 1, 0xff),
    ] {
        let pair = pair(limits, 0);
        let words = pair.memory.words::<Word>(256, 4).unwrap();
        pair.memory.copy_in(256 + 64, &[head; 64]).unwrap();
        words[1].store(bytes, Ordering::Relaxed);
        words[3].store(bulk, Ordering::Relaxed);
        words[0].store(1, Ordering::Release);
        assert!(matches!(pair.server.next(until()), Err(Error::Message(_))), "{bytes} {bulk}");
        // Submitted again while it is being served: taken once.
        words[0].store(1, Ordering::Release);
        assert_eq!(pair.server.next(until()).unwrap_err(), Error::TimedOut);
    }
}

#[test]
fn impossible_limits_are_refused() {
    let refused = |limits: RingLimits| assert!(matches!(limits.bytes(), Err(Error::Limits(_))), "{limits:?}");
    refused(RingLimits { slots: 0, ..TINY });
    refused(RingLimits { slots: u32::MAX, ..TINY });
    refused(RingLimits { inline_bytes: 65, ..TINY });
    refused(RingLimits { inline_bytes: 1 << 31, ..TINY });
    refused(RingLimits { bulk_bytes: 4095, ..TINY });
    refused(RingLimits { bulk_bytes: 0, ..TINY });
    refused(RingLimits { bulk_buffers: 5000, ..TINY });
}

proptest::proptest! {
    /// A client may write anything anywhere in the ring, also between two looks of the server.
    #[test]
    fn whatever_lies_in_the_ring_the_server_gives_a_request_or_an_error(
        garbage in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..600),
        small in proptest::collection::vec(0u32..70, 8),
        headed in proptest::prelude::any::<bool>(),
    ) {
        let pair = pair(TINY, 0);
        let slot_bytes = 64 + 2 * 64;
        pair.memory.copy_in(256, &garbage).unwrap();
        for (slot, words) in small.chunks_exact(4).enumerate() {
            let view = pair.memory.words::<Word>(256 + slot * slot_bytes, 4).unwrap();
            view[0].store(1, Ordering::Relaxed);
            view[1].store(words[1], Ordering::Relaxed);
            view[3].store(words[3] % 3, Ordering::Relaxed);
            if headed {
                let bytes = words[1].saturating_sub(16).to_le_bytes();
                pair.memory.copy_in(256 + slot * slot_bytes + 64 + 12, &bytes).unwrap();
            }
        }
        for _ in 0..3 {
            match pair.server.next(Some(SystemHost.now())) {
                Ok(taken) => {
                    proptest::prop_assert!(taken.body.len() <= 4096);
                    let _ = pair.server.respond(taken, 0, &[7; 60]);
                }
                Err(Error::TimedOut | Error::Message(_)) => {}
                Err(error) => return Err(proptest::test_runner::TestCaseError::fail(error.to_string())),
            }
        }
    }
}
