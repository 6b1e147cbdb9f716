//! Cases of threads that wait for a connection.

use super::support::{Bed, Pair, immediate, in_ms, message, soon, spawn};
use super::{granted, settings};
use ipc::{Host, SystemHost};
use std::time::Duration;
use transport::{Bytes, Error, Rights, Settings};

pub fn waits_end(bed: &Bed) {
    let pair = Pair::new(bed, &settings());
    let start = SystemHost.now();
    assert_eq!(pair.here.take(Some(in_ms(50))), Err(Error::TimedOut));
    assert!(SystemHost.now().since(start) >= Duration::from_millis(50));
    let listener = bed.inside(1, || pair.one.listen("").unwrap());
    assert!(matches!(listener.accept(Some(in_ms(20))), Err(Error::TimedOut)));
}

pub fn sleepers_wake(bed: &Bed) {
    let slow = Settings { spin_ns: 0, ..settings() };
    let pair = Pair::new(bed, &slow);
    let (_, remote) = granted(&pair, 4096, Rights::Write);
    for round in 0..50u32 {
        let there = pair.there.clone();
        let sleeper = spawn("sleeps", move || immediate(&there));
        pair.here.write(Bytes::Inline(&[1; 8]), &remote, 0, Some(round), Some(soon())).unwrap();
        assert_eq!(sleeper.join(), round);
    }
}

/// The first bytes of a long message are an event, and complete nothing.
pub fn long_messages_wake(bed: &Bed) {
    let hour = Duration::from_secs(3600);
    let rare = Settings {
        message_bytes: 1 << 20,
        window: 4,
        spin_ns: 0,
        silence: None,
        look_again: hour,
        ..settings()
    };
    let pair = Pair::new(bed, &rare);
    let there = pair.there.clone();
    let rounds = 100;
    let other = spawn("answers", move || {
        for _ in 0..rounds {
            let answer = message(&there)[0];
            there.send(&[answer], Some(soon())).unwrap();
        }
    });
    for round in 0..rounds {
        pair.here.send(&vec![round as u8; 1_000_000], Some(soon())).unwrap();
        assert_eq!(message(&pair.here), [round as u8]);
    }
    other.join();
}
