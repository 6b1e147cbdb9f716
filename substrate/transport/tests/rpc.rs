//! Remote calls: many at once, late, abandoned, too many, and with a peer that violates the protocol.

#![allow(clippy::unwrap_used, reason = "everything here is a test; clippy knows tests by their attribute")]

mod support;

use format::wire::{RemoteHead, RemoteKind};
use support::{Bed, Pair, host, in_ms, soon, spawn};
use transport::rpc::{Answer, Rpc};
use transport::{Ended, Error, Settings};
use zerocopy::IntoBytes;

fn beds() -> impl Iterator<Item = Bed> {
    [Bed::local(), Bed::Tcp].into_iter().chain(Bed::verbs())
}

fn rpcs(pair: &Pair) -> (Rpc, Rpc) {
    (Rpc::new(host(), pair.here.clone()), Rpc::new(host(), pair.there.clone()))
}

#[test]
fn many_threads_call_both_ways() {
    for bed in beds() {
        let pair = Pair::new(&bed, &Settings { window: 12, ..support::patient() });
        let (here, there) = rpcs(&pair);
        assert_eq!((here.calls_max(), there.calls_max()), (4, 4));
        let calls = 60u32;
        let serve = |rpc: Rpc| {
            move || {
                for _ in 0..calls * 3 {
                    let request = rpc.next(Some(soon())).unwrap();
                    let mut body = request.body().to_vec();
                    body.reverse();
                    request.respond(request.code() + 1, &body, Some(soon())).unwrap();
                }
            }
        };
        let call = |rpc: Rpc, thread: u32| {
            move || {
                for number in 0..calls {
                    let mut body = (thread << 16 | number).to_le_bytes().to_vec();
                    let answer = rpc.call(7, &body, Some(soon())).unwrap();
                    body.reverse();
                    assert_eq!(answer, Answer { code: 8, body });
                }
            }
        };
        let mut threads = vec![spawn("serves", serve(here.clone())), spawn("serves", serve(there.clone()))];
        for thread in 0..3 {
            threads.push(spawn("calls", call(here.clone(), thread)));
            threads.push(spawn("calls", call(there.clone(), thread)));
        }
        threads.into_iter().for_each(support::Running::join);
    }
}

#[test]
fn a_late_answer_is_not_waited_for_and_harms_nobody() {
    for bed in beds() {
        let pair = Pair::new(&bed, &Settings { window: 6, ..support::patient() });
        let (here, there) = rpcs(&pair);
        assert_eq!(here.calls_max(), 2);
        for round in 0..5u16 {
            let late = here.start(round, b"late", Some(in_ms(30))).unwrap();
            assert_eq!(late.wait(Some(in_ms(30))), Err(Error::TimedOut));
            let request = there.next(Some(soon())).unwrap();
            // The cancellation follows it; the span in the request has the same effect.
            while !request.is_cancelled() {
                let _ = there.next(Some(in_ms(1)));
            }
            request.give_up(Some(soon())).unwrap();
            let asking = here.start(100, b"in time", Some(soon())).unwrap();
            let request = there.next(Some(soon())).unwrap();
            assert_eq!((request.code(), request.is_cancelled()), (100, false));
            request.respond(0, b"answer", Some(soon())).unwrap();
            assert_eq!(asking.wait(Some(soon())).unwrap().body, b"answer");
        }
    }
}

#[test]
fn no_more_calls_than_agreed() {
    for bed in beds() {
        let pair = Pair::new(&bed, &Settings { window: 6, ..support::patient() });
        let (here, there) = rpcs(&pair);
        let pending = [here.start(1, b"", None).unwrap(), here.start(2, b"", None).unwrap()];
        assert!(matches!(here.start(3, b"", Some(in_ms(30))), Err(Error::TimedOut)));
        // An abandoned call keeps its slot until it is answered.
        let [first, second] = pending;
        first.cancel();
        assert!(matches!(here.start(3, b"", Some(in_ms(30))), Err(Error::TimedOut)));
        there.next(Some(soon())).unwrap().respond(0, b"", Some(soon())).unwrap();
        let third = here.start(3, b"", Some(soon())).unwrap();
        for _ in 0..2 {
            let request = there.next(Some(soon())).unwrap();
            request.respond(request.code(), b"", Some(soon())).unwrap();
        }
        assert_eq!(third.wait(Some(soon())).unwrap().code, 3);
        assert_eq!(second.wait(Some(soon())).unwrap().code, 2);
    }
}

#[test]
fn who_does_not_keep_to_the_rules_is_cut_off() {
    let too_many = [1u64, 2, 3].map(|id| RemoteHead::new(RemoteKind::Request, id, 0, 0)).to_vec();
    let twice = [1u64, 1].map(|id| RemoteHead::new(RemoteKind::Request, id, 0, 0)).to_vec();
    let unasked = vec![RemoteHead::new(RemoteKind::Response, 77, 0, 0)];
    for (messages, what) in [
        (too_many, "more calls than it may"),
        (twice, "more calls than it may"),
        (unasked, "an answer to nothing"),
    ] {
        let pair = Pair::new(&Bed::local(), &Settings { window: 6, ..support::patient() });
        let there = Rpc::new(host(), pair.there.clone());
        for head in messages {
            pair.here.send(head.as_bytes(), Some(soon())).unwrap();
        }
        let mut kept = Vec::new();
        let error = loop {
            match there.next(Some(soon())) {
                Ok(request) => kept.push(request),
                Err(error) => break error,
            }
        };
        assert_eq!(error, Error::Ended(Ended::Broke(what)));
    }
}

#[test]
fn the_end_of_the_connection_ends_every_call() {
    for bed in beds() {
        let pair = Pair::new(&bed, &support::patient());
        let (here, _there) = rpcs(&pair);
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let rpc = here.clone();
                spawn("calls", move || rpc.call(1, b"", Some(soon())))
            })
            .collect();
        let request = Rpc::new(host(), pair.there.clone()).next(Some(soon())).unwrap();
        assert_eq!(request.body(), b"");
        pair.there.close();
        for thread in threads {
            assert!(matches!(thread.join(), Err(Error::Ended(_))));
        }
    }
}
