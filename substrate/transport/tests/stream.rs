//! A user that posts and polls handles its completions itself. The progress threads of both ends only check now and
//! then whether it still polls, and are not woken for each completion, which would halve the rate of a stream over
//! tcp.

#![allow(clippy::unwrap_used, reason = "everything here is a test; clippy knows tests by their attribute")]

mod support;

use format::wire::WireRegion;
use ipc::{Host, SystemHost};
use support::{Bed, join, patient, sleeps_of_progress_threads, soon};
use transport::{Bytes, Event, Rights, Settings, dram};
use zerocopy::{FromBytes, IntoBytes};

const BYTES: u64 = 65_536;
const WRITES: u64 = 8000;

/// Number of writes for each write with an immediate.
const TOLD: u64 = 16;

#[test]
fn a_stream_leaves_the_progress_threads_alone() {
    let bed = Bed::Tcp;
    let settings = Settings { spin_ns: 4_000_000_000, ..patient() };
    let (one, two) = (bed.endpoint(1, &settings), bed.endpoint(2, &settings));
    let (here, there) = join(&bed, &one, &two);
    let region = dram(BYTES).unwrap();
    let granted = there.grant(&region, 0..BYTES, Rights::Write).unwrap();
    there.send(granted.as_bytes(), Some(soon())).unwrap();
    let Event::Message(told) = here.take(Some(soon())).unwrap() else { panic!("another event") };
    let to = WireRegion::read_from_bytes(&told).unwrap();
    let (start, before) = (SystemHost.now(), sleeps_of_progress_threads());
    let taker = SystemHost.spawn(
        "takes",
        Box::new(move || {
            for _ in 0..WRITES / TOLD {
                assert!(matches!(there.take(Some(soon())).unwrap(), Event::Immediate(_)));
            }
            there.send(b"all", Some(soon())).unwrap();
            assert!(matches!(there.take(Some(soon())).unwrap(), Event::Ended(_)));
        }),
    );
    let local = one.register(&dram(BYTES).unwrap()).unwrap();
    for number in 1..=WRITES {
        let told = (number % TOLD == 0).then_some(0);
        here.write(Bytes::Registered(&local, 0..BYTES), &to, 0, told, Some(soon())).unwrap();
    }
    assert!(matches!(here.take(Some(soon())).unwrap(), Event::Message(_)));
    let ms = u64::try_from(SystemHost.now().since(start).as_millis()).unwrap();
    let sleeps = sleeps_of_progress_threads() - before;
    here.close();
    taker.unwrap().join().unwrap();
    println!("{WRITES} writes in {ms} ms, the progress threads slept {sleeps} times");
    // Each thread checks once a millisecond at most. If the threads handled completions too, a third of all writes
    // would wake them.
    assert!(sleeps < 4 * ms + WRITES / 20, "{sleeps} in {ms} ms");
}
