//! The cases that every provider must pass, run on each bed. An argument with the name of a bed selects that one.

#![allow(clippy::unwrap_used, reason = "everything here is a test; clippy knows tests by their attribute")]

mod support;
#[path = "conformance/waits.rs"]
mod waits;

use format::wire::{RefusalReason, WireRegion};
use format::{Epoch, NodeId};
use ipc::{Host, SystemHost};
use pmem::Region;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::{Bed, Pair, host, id, identity, immediate, in_ms, join, message, soon, spawn};
use transport::{
    Bytes, ClusterKey, Ended, Endpoint, Error, Event, INLINE_BYTES_MAX, Identity, Listener, Rights, Settings,
    dram,
};
use zerocopy::little_endian::U64;

type Case = (&'static str, fn(&Bed));

const CUT: &str = "a cut link is found";

const CASES: &[Case] = &[
    ("messages come whole and in order", messages_in_order),
    ("messages of every length up to the limit", lengths),
    ("a written byte is where it belongs, and nothing beside it", writes),
    ("an immediate comes after its bytes", immediates_after_data),
    ("messages and immediates keep their order", mixed_order),
    ("a read gives what is there", reads),
    ("inline is short", inline_is_short),
    ("outside of what was granted is forbidden", outside_is_forbidden),
    ("a key of a connection that is closed is worth nothing", foreign_keys),
    ("a right to read is none to write", read_only),
    ("memory of another endpoint is refused", foreign_memory),
    ("a window more and the sender waits", window),
    ("an optional message takes no place that another one needs", optional),
    ("more than the window of immediates goes on for ever", long_run),
    ("a close is heard with its reason, once", close_is_heard),
    ("a closed connection refuses everything", closed_refuses),
    ("what was sent before a close arrives", sent_before_close),
    ("a dropped connection is heard", dropped_is_heard),
    ("a refusal for each thing that does not fit", refusals),
    ("who is no member is refused", members),
    ("an epoch without a list of members closes what was before", advance_closes),
    ("a connection of two lives that go on stays when others come and go", advance_keeps),
    ("a connection of a life that ended is closed", advance_closes_a_life_that_ended),
    (CUT, cut_is_found),
    ("waits end by their time", waits::waits_end),
    ("a sleeper is woken", waits::sleepers_wake),
    ("a sleeper gets a long message without a second look", waits::long_messages_wake),
    ("many connections", many_connections),
    ("both ways at once", both_ways),
    ("one connection breaks, the others go on", others_go_on),
    ("a recorded or persistent region", pool_regions),
];

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let mut passed = 0;
    let mut failed = 0;
    for name in ["in-process", "tcp-loopback", "tcp-namespaces", "verbs"] {
        if !wanted.is_empty() && !wanted.iter().any(|word| name.contains(word.as_str())) {
            continue;
        }
        let bed = match name {
            "in-process" => Some(Bed::local()),
            "tcp-loopback" => Some(Bed::Tcp),
            "verbs" => Bed::verbs(),
            _ => support::namespaces::Namespaces::new(2).map(Bed::Namespaces),
        };
        let Some(bed) = bed else {
            let what = if name == "verbs" { "an RDMA device: scripts/verbs" } else { "root" };
            println!("{name}: skipped: needs {what}");
            continue;
        };
        for (case, body) in CASES {
            if *case == CUT && matches!(bed, Bed::Tcp | Bed::Verbs(_)) {
                println!("{name}: {case}: skipped: the loopback cannot be cut");
                continue;
            }
            let start = SystemHost.now();
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(&bed)));
            let took = SystemHost.now().since(start).as_millis();
            match result {
                Ok(()) => passed += 1,
                Err(_) => failed += 1,
            }
            println!("{name}: {case}: {} ({took} ms)", if result.is_ok() { "ok" } else { "FAILED" });
        }
    }
    println!("{passed} passed, {failed} failed");
    std::process::exit(i32::from(failed > 0 || passed == 0));
}

fn settings() -> Settings {
    Settings { message_bytes: 1024, ..support::patient() }
}

fn filled(region: &Region, offset: u64, bytes: usize) -> Vec<u8> {
    let mut found = vec![0; bytes];
    region.read(offset, &mut found).unwrap();
    found
}

fn messages_in_order(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    assert_eq!((pair.here.node(), pair.there.node()), (id(2), id(1)));
    for number in 0..500u32 {
        pair.here.send(&number.to_le_bytes(), Some(soon())).unwrap();
        if number % 7 == 6 {
            for expected in number - 6..=number {
                assert_eq!(message(&pair.there), expected.to_le_bytes());
            }
        }
    }
}

fn lengths(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    for bytes in [0, 1, 55, 56, 57, 63, 64, 65, 120, 128, 129, 500, 1023, 1024] {
        let sent: Vec<u8> = (0..bytes).map(|at| (at * 7 + bytes) as u8).collect();
        pair.here.send(&sent, Some(soon())).unwrap();
        assert_eq!(message(&pair.there), sent);
    }
    let long = pair.here.send(&[0; 1025], Some(soon()));
    assert_eq!(long, Err(Error::TooLarge { bytes: 1025, limit: 1024 }));
}

/// A region of the second node, granted to the first.
fn granted(pair: &Pair, bytes: u64, rights: Rights) -> (Region, WireRegion) {
    let region = dram(bytes).unwrap();
    let remote = pair.there.grant(&region, 0..bytes, rights).unwrap();
    (region, remote)
}

fn writes(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let region = dram(64 << 10).unwrap();
    let remote = pair.there.grant(&region, 4096..36 << 10, Rights::Write).unwrap();
    let source = dram(64 << 10).unwrap();
    let local = pair.one.register(&source).unwrap();
    let mut expected = vec![0u8; 64 << 10];
    let mut at = 1u64;
    for (round, bytes) in [1u64, 8, 64, 65, 128, 129, 1000, 4096, 9999].into_iter().enumerate() {
        let fill: Vec<u8> = (0..bytes).map(|byte| (byte as u8).wrapping_add(round as u8 + 1)).collect();
        source.store(at, &fill);
        let from = Bytes::Registered(&local, at..at + bytes);
        pair.here.write(from, &remote, at, Some(round as u32), Some(soon())).unwrap();
        assert_eq!(immediate(&pair.there), round as u32);
        expected[4096 + at as usize..][..bytes as usize].copy_from_slice(&fill);
        at += bytes + 3;
    }
    assert!(filled(&region, 0, 64 << 10) == expected, "bytes stand where they were not written");
}

fn immediates_after_data(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let bytes = 32u64 << 10;
    let (region, remote) = granted(&pair, bytes, Rights::Write);
    let source = dram(bytes).unwrap();
    let local = pair.one.register(&source).unwrap();
    for round in 1..100u8 {
        source.store(0, &vec![round; bytes as usize]);
        let from = Bytes::Registered(&local, 0..bytes);
        let ticket = pair.here.write(from, &remote, 0, Some(round.into()), Some(soon())).unwrap();
        assert_eq!(immediate(&pair.there), u32::from(round));
        let found = filled(&region, 0, bytes as usize);
        assert!(found.iter().all(|byte| *byte == round), "the immediate came before its bytes");
        pair.here.wait(ticket, Some(soon())).unwrap();
    }
}

fn mixed_order(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let (region, remote) = granted(&pair, 4096, Rights::Write);
    for round in 0..200u32 {
        let silent = Bytes::Inline(&[round as u8; 16]);
        pair.here.write(silent, &remote, u64::from(round % 64) * 32, None, Some(soon())).unwrap();
        if round % 3 == 0 {
            pair.here.send(&round.to_le_bytes(), Some(soon())).unwrap();
            assert_eq!(message(&pair.there), round.to_le_bytes());
        } else {
            let told = Bytes::Inline(&[0xee; 4]);
            pair.here.write(told, &remote, 4000, Some(round), Some(soon())).unwrap();
            assert_eq!(immediate(&pair.there), round);
        }
        assert_eq!(filled(&region, u64::from(round % 64) * 32, 16), [round as u8; 16]);
    }
}

fn reads(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let (region, remote) = granted(&pair, 64 << 10, Rights::Read);
    let target = dram(64 << 10).unwrap();
    let local = pair.one.register(&target).unwrap();
    let content: Vec<u8> = (0..64u32 << 10).map(|at| ((at * 31) >> 3) as u8).collect();
    region.store(0, &content);
    for (at, bytes) in [(0u64, 1u64), (5, 64), (100, 4096), (7000, 50_000), (65_535, 1)] {
        let ticket = pair.here.read(&local, 10..10 + bytes, &remote, at, Some(soon()));
        let fits = 10 + bytes <= 64 << 10;
        assert!(fits);
        pair.here.wait(ticket.unwrap(), Some(soon())).unwrap();
        assert_eq!(filled(&target, 10, bytes as usize), &content[at as usize..][..bytes as usize]);
    }
}

fn inline_is_short(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let (_, remote) = granted(&pair, 4096, Rights::Write);
    let long = [1; INLINE_BYTES_MAX + 1];
    let result = pair.here.write(Bytes::Inline(&long), &remote, 0, None, Some(soon()));
    assert_eq!(result, Err(Error::TooLarge { bytes: 65, limit: 64 }));
    pair.here.write(Bytes::Inline(&long[1..]), &remote, 0, Some(1), Some(soon())).unwrap();
    assert_eq!(immediate(&pair.there), 1);
}

/// Waits for the end of a connection, skipping other events.
fn end(connection: &transport::Connection) -> Ended {
    loop {
        if let Event::Ended(why) = connection.take(Some(soon())).unwrap() {
            return why;
        }
    }
}

fn outside_is_forbidden(bed: &Bed) {
    let tries: [(u64, u64, bool); 4] =
        [(4096, 0, false), (4095, 2, false), (0, 0, true), (u64::MAX - 4095, 4096, false)];
    for (offset, bytes, other_key) in tries {
        let pair = Pair::new(bed, &settings());
        let region = dram(16 << 10).unwrap();
        region.store(0, &[7; 16 << 10]);
        let remote = pair.there.grant(&region, 4096..8192, Rights::Both).unwrap();
        let bytes = bytes.clamp(1, 64) as usize;
        let result =
            pair.here.write(Bytes::Inline(&[9; 64][..bytes]), &remote, offset, Some(1), Some(soon()));
        if !other_key {
            assert_eq!(result.unwrap_err(), Error::Range);
        }
        // A hostile peer is not restricted by its own library.
        let forged = WireRegion {
            key: U64::new(if other_key { remote.key.get() ^ 1 } else { remote.key.get() }),
            base: U64::new(remote.base.get().wrapping_add(offset)),
            bytes: U64::new(64),
        };
        let _ = pair.here.write(Bytes::Inline(&[9; 64][..bytes]), &forged, 0, Some(1), Some(soon()));
        assert!(
            matches!(end(&pair.here), Ended::Forbidden | Ended::Lost),
            "a forbidden write went unnoticed"
        );
        if !other_key {
            assert!(filled(&region, 0, 16 << 10).iter().all(|byte| *byte == 7), "a forbidden write landed");
        }
    }
}

fn foreign_keys(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let (region, remote) = granted(&pair, 4096, Rights::Write);
    pair.there.close();
    let (here, there) = join(bed, &pair.one, &pair.two);
    let _ = here.write(Bytes::Inline(&[9; 8]), &remote, 0, Some(1), Some(soon()));
    assert!(matches!(end(&here), Ended::Forbidden | Ended::Lost));
    assert!(there.take(Some(soon())).is_ok_and(|event| matches!(event, Event::Ended(_))));
    assert_eq!(filled(&region, 0, 4096), vec![0; 4096]);
}

fn read_only(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let (region, remote) = granted(&pair, 4096, Rights::Read);
    let _ = pair.here.write(Bytes::Inline(&[9; 8]), &remote, 0, Some(1), Some(soon()));
    assert!(matches!(end(&pair.here), Ended::Forbidden | Ended::Lost));
    assert_eq!(filled(&region, 0, 4096), vec![0; 4096]);
    let pair = Pair::new(bed, &settings());
    let (_, remote) = granted(&pair, 4096, Rights::Write);
    let local = pair.one.register(&dram(4096).unwrap()).unwrap();
    let ticket = pair.here.read(&local, 0..64, &remote, 0, Some(soon())).unwrap();
    assert!(matches!(pair.here.wait(ticket, Some(soon())), Err(Error::Ended(_))));
}

fn foreign_memory(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let (_, remote) = granted(&pair, 4096, Rights::Both);
    let theirs = pair.two.register(&dram(4096).unwrap()).unwrap();
    let result = pair.here.write(Bytes::Registered(&theirs, 0..8), &remote, 0, None, Some(soon()));
    assert_eq!(result, Err(Error::Foreign));
    let own = pair.one.register(&dram(4096).unwrap()).unwrap();
    let result = pair.here.write(Bytes::Registered(&own, 4090..4099), &remote, 0, None, Some(soon()));
    assert_eq!(result, Err(Error::Range));
    assert_eq!(pair.there.grant(&dram(4096).unwrap(), 1..4097, Rights::Read), Err(Error::Range));
}

fn window(bed: &Bed) {
    let small = Settings { window: 4, ..settings() };
    let pair = Pair::with(bed, &settings(), &small);
    for number in 0..4u8 {
        pair.here.send(&[number], Some(soon())).unwrap();
    }
    assert_eq!(pair.here.send(&[4], Some(in_ms(30))), Err(Error::TimedOut));
    assert_eq!(message(&pair.there), [0]);
    assert_eq!(message(&pair.there), [1]);
    pair.here.send(&[4], Some(soon())).unwrap();
    for number in 2..5u8 {
        assert_eq!(message(&pair.there), [number]);
    }
}

fn optional(bed: &Bed) {
    let pair = Pair::with(bed, &settings(), &Settings { window: 4, ..settings() });
    assert_eq!([0u8, 1, 2].map(|number| pair.here.send_optional(&[number]).unwrap()), [true, true, false]);
    pair.here.send(&[4], Some(soon())).unwrap();
    pair.here.send(&[5], Some(soon())).unwrap();
    [0, 1, 4, 5].iter().for_each(|number| assert_eq!(message(&pair.there), [*number]));
}

fn long_run(bed: &Bed) {
    let small = Settings { window: 4, depth: 4, spin_ns: 2_000, ..settings() };
    let pair = Pair::new(bed, &small);
    let (_, remote) = granted(&pair, 4096, Rights::Write);
    let there = pair.there.clone();
    let count = 3_000u32;
    let taker = spawn("takes", move || (0..count).for_each(|number| assert_eq!(immediate(&there), number)));
    for number in 0..count {
        pair.here
            .write(Bytes::Inline(&number.to_le_bytes()), &remote, 0, Some(number), Some(soon()))
            .unwrap();
    }
    taker.join();
}

fn close_is_heard(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    pair.here.close();
    assert_eq!(pair.there.take(Some(soon())), Ok(Event::Ended(Ended::ClosedThere)));
    assert_eq!(pair.there.take(Some(soon())), Err(Error::Ended(Ended::ClosedThere)));
    assert_eq!(pair.here.take(Some(soon())), Ok(Event::Ended(Ended::ClosedHere)));
    assert_eq!(pair.here.take(Some(soon())), Err(Error::Ended(Ended::ClosedHere)));
    pair.here.close();
    assert_eq!((pair.one.connections(), pair.two.connections()), (0, 0));
}

fn closed_refuses(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let (region, remote) = granted(&pair, 4096, Rights::Both);
    let local = pair.one.register(&dram(4096).unwrap()).unwrap();
    pair.here.close();
    let over = Error::Ended(Ended::ClosedHere);
    assert_eq!(pair.here.send(b"x", Some(soon())).unwrap_err(), over);
    assert_eq!(pair.here.write(Bytes::Inline(b"x"), &remote, 0, None, Some(soon())).unwrap_err(), over);
    assert_eq!(pair.here.read(&local, 0..8, &remote, 0, Some(soon())).unwrap_err(), over);
    assert!(matches!(pair.here.grant(&region, 0..8, Rights::Read), Err(Error::Ended(_))));
}

fn sent_before_close(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    for number in 0..20u8 {
        pair.here.send(&[number; 300], Some(soon())).unwrap();
    }
    pair.here.close();
    for number in 0..20u8 {
        assert_eq!(message(&pair.there), [number; 300]);
    }
    assert_eq!(end(&pair.there), Ended::ClosedThere);
}

fn dropped_is_heard(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let Pair { here, there, one, .. } = pair;
    drop(here);
    drop(one);
    assert_eq!(end(&there), Ended::Lost);
}

/// The error of a connection attempt that must fail.
fn refused(bed: &Bed, one: &Endpoint, to: NodeId, two: &Endpoint) -> Error {
    let listener = bed.inside(2, || two.listen("").unwrap());
    let address = listener.address();
    let (enter, refused) = (bed.entering(2), Arc::new(AtomicBool::new(false)));
    let told = refused.clone();
    let listening = spawn("listens", move || {
        enter();
        serve_nobody(&listener, &told)
    });
    let error = bed.inside(1, || one.connect(&address, to, soon()).unwrap_err());
    refused.store(true, Ordering::Release);
    assert_eq!(listening.join(), 0, "somebody was let in who was refused");
    assert_eq!((one.connections(), two.connections()), (0, 0));
    error
}

/// Accepts until a peer was refused, and a little longer; returns the number of accepted connections.
fn serve_nobody(listener: &Listener, refused: &AtomicBool) -> usize {
    let mut admit = 0;
    let mut over = false;
    while !over {
        over = refused.load(Ordering::Acquire);
        admit += usize::from(listener.accept(Some(in_ms(50))).is_ok());
    }
    admit
}

fn refusals(bed: &Bed) {
    let make = |identity: Identity, epoch| bed.endpoint_of(identity, epoch, settings());
    let reason = |error: Error| match error {
        Error::Refused { reason, there, epoch } => (reason, there, epoch.get()),
        other => panic!("refused with {other}"),
    };
    let two = make(identity(2), 5);
    let other_key = Identity { key: ClusterKey::new([43; 32]), ..identity(1) };
    let found = reason(refused(bed, &make(other_key, 5), id(2), &two));
    assert_eq!(found, (RefusalReason::Key, true, 0));
    let other_cluster = Identity { cluster: [2; 16], ..identity(1) };
    let found = reason(refused(bed, &make(other_cluster, 5), id(2), &two));
    assert_eq!(found, (RefusalReason::Cluster, true, 0));
    let found = reason(refused(bed, &make(identity(1), 5), id(3), &two));
    assert_eq!(found, (RefusalReason::Node, true, 0));
    let found = reason(refused(bed, &make(identity(1), 4), id(2), &two));
    assert_eq!(found, (RefusalReason::NewEpoch, false, 5));
    let found = reason(refused(bed, &make(identity(1), 6), id(2), &two));
    assert_eq!(found, (RefusalReason::OldEpoch, false, 5));
}

fn members(bed: &Bed) {
    let (one, two) = (bed.endpoint(1, &settings()), bed.endpoint(2, &settings()));
    two.advance(Epoch::new(1), lives(&[(2, 1), (3, 1)]));
    match refused(bed, &one, id(2), &two) {
        Error::Refused { reason: RefusalReason::NotMember, there: true, epoch } => assert_eq!(epoch.get(), 1),
        other => panic!("refused with {other}"),
    }
    two.advance(Epoch::new(1), lives(&[(1, 1), (2, 1)]));
    join(bed, &one, &two);
}

fn advance_closes(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let (_, remote) = granted(&pair, 4096, Rights::Write);
    pair.two.advance(Epoch::new(2), None);
    assert_eq!(end(&pair.there), Ended::ClosedHere);
    assert_eq!(end(&pair.here), Ended::ClosedThere);
    assert!(pair.here.write(Bytes::Inline(b"late"), &remote, 0, None, Some(soon())).is_err());
    pair.one.advance(Epoch::new(2), None);
    let (here, _there) = join(bed, &pair.one, &pair.two);
    assert_eq!(here.epoch(), Epoch::new(2));
}

/// Members, each with the epoch in which it joined.
fn lives(members: &[(u32, u32)]) -> Option<BTreeMap<NodeId, Epoch>> {
    Some(members.iter().map(|(node, joined)| (id(*node), Epoch::new(*joined))).collect())
}

fn advance_keeps(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let (memory, remote) = granted(&pair, 4096, Rights::Write);
    let write = |number: u32| {
        let bytes = [number as u8; 8];
        pair.here.write(Bytes::Inline(&bytes), &remote, 0, Some(number), Some(soon())).unwrap();
        assert_eq!(immediate(&pair.there), number);
        let mut found = [0; 8];
        memory.read(0, &mut found).unwrap();
        assert_eq!(found, bytes);
    };
    // Node 3 joins and is expelled, again and again; the two ends hear of it at different times.
    for epoch in 2..20 {
        let third = (epoch % 2 == 0).then_some((3, epoch));
        let members: Vec<_> = [(1, 1), (2, 1)].into_iter().chain(third).collect();
        pair.two.advance(Epoch::new(epoch), lives(&members));
        write(epoch);
        pair.one.advance(Epoch::new(epoch), lives(&members));
        write(epoch + 100);
    }
    assert_eq!((pair.one.connections(), pair.two.connections()), (1, 1));
    assert_eq!((pair.here.ended(), pair.there.ended()), (None, None));
}

fn advance_closes_a_life_that_ended(bed: &Bed) {
    // Node 1 has joined anew; node 2 itself has; node 1 is expelled; node 2 itself is.
    for members in [&[(1, 3), (2, 1)][..], &[(1, 1), (2, 2)], &[(2, 1), (3, 1)], &[(1, 1), (3, 1)]] {
        let pair = Pair::new(bed, &settings());
        let (_, remote) = granted(&pair, 4096, Rights::Write);
        pair.two.advance(Epoch::new(3), lives(members));
        assert_eq!((pair.there.ended(), pair.two.connections()), (Some(Ended::ClosedHere), 0), "{members:?}");
        assert_eq!(end(&pair.here), Ended::ClosedThere);
        assert!(pair.here.write(Bytes::Inline(b"late"), &remote, 0, None, Some(soon())).is_err());
    }
}

fn cut_is_found(bed: &Bed) {
    let quick = Settings { silence: Some(Duration::from_secs(1)), ..settings() };
    let pair = Pair::new(bed, &quick);
    bed.cut(1, 2);
    let start = SystemHost.now();
    assert_eq!(end(&pair.here), Ended::Silent);
    assert_eq!(end(&pair.there), Ended::Silent);
    assert!(SystemHost.now().since(start) < Duration::from_secs(5), "a silent peer was found too late");
    bed.heal(1, 2);
    let (here, there) = join(bed, &pair.one, &pair.two);
    here.send(b"again", Some(soon())).unwrap();
    assert_eq!(message(&there), b"again");
}

fn many_connections(bed: &Bed) {
    let small = Settings { window: 4, depth: 4, message_bytes: 128, ..settings() };
    let (one, two) = (bed.endpoint(1, &small), bed.endpoint(2, &small));
    let listener = bed.inside(2, || two.listen("").unwrap());
    let address = listener.address();
    let count = if std::env::var_os("HEARTH_PROVE").is_some() { 200 } else { 40 };
    let enter = bed.entering(2);
    let accepting = spawn("accepts", move || {
        enter();
        (0..count).map(|_| listener.accept(Some(soon())).unwrap()).collect::<Vec<_>>()
    });
    let here: Vec<_> =
        bed.inside(1, || (0..count).map(|_| one.connect(&address, id(2), soon()).unwrap()).collect());
    let there = accepting.join();
    assert_eq!((one.connections(), two.connections()), (count, count));
    for (number, connection) in here.iter().enumerate() {
        connection.send(&number.to_le_bytes(), Some(soon())).unwrap();
    }
    // Handshakes run concurrently, so the order of the two lists may differ.
    let mut heard: Vec<_> = there.iter().map(message).collect();
    heard.sort_by_key(|bytes| usize::from_le_bytes(bytes[..8].try_into().unwrap()));
    for (number, bytes) in heard.iter().enumerate() {
        assert_eq!(*bytes, number.to_le_bytes());
    }
}

fn both_ways(bed: &Bed) {
    let pair = Pair::new(bed, &Settings { window: 8, depth: 8, ..settings() });
    let talk = |connection: transport::Connection| {
        move || {
            for number in 0..400u32 {
                connection.send(&[number as u8; 200], Some(soon())).unwrap();
                assert_eq!(message(&connection), [number as u8; 200]);
            }
        }
    };
    let other = spawn("other way", talk(pair.there.clone()));
    talk(pair.here.clone())();
    other.join();
}

fn others_go_on(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let (here, there) = join(bed, &pair.one, &pair.two);
    let forged = WireRegion { key: U64::new(1), base: U64::new(2), bytes: U64::new(64) };
    let _ = here.write(Bytes::Inline(b"nowhere"), &forged, 0, None, Some(soon()));
    end(&here);
    end(&there);
    pair.here.send(b"still here", Some(soon())).unwrap();
    assert_eq!(message(&pair.there), b"still here");
}

fn pool_regions(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let recorder = pmem::Recorder::new();
    let recorded = recorder.medium().create("mirror", 64 << 10).unwrap();
    match pair.there.grant(&recorded, 0..4096, Rights::Write) {
        // In process, even the recorded medium of the crash tests can be the target.
        Ok(remote) => {
            pair.here.write(Bytes::Inline(b"record"), &remote, 8, Some(1), Some(soon())).unwrap();
            assert_eq!(immediate(&pair.there), 1);
            assert_eq!(filled(&recorded, 8, 6), b"record");
        }
        Err(error) => assert!(matches!(error, Error::Memory(_)), "{error}"),
    }
    let folder = tempfile::tempdir().unwrap();
    let medium = pmem::Medium::file(folder.path()).unwrap();
    let region = medium.create("mirror", 64 << 10).unwrap();
    let remote = pair.there.grant(&region, 4096..8192, Rights::Write).unwrap();
    pair.here.write(Bytes::Inline(b"record"), &remote, 0, Some(2), Some(soon())).unwrap();
    assert_eq!(immediate(&pair.there), 2);
    assert_eq!(filled(&region, 4096, 6), b"record");
    region.persist(4096..4102);
    region.sync().unwrap();
    let _ = host();
}
