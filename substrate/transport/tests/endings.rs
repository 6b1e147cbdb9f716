//! Cases in which a connection must end or must not: a pause of this machine, and two concurrent epoch changes.

#![allow(clippy::unwrap_used, reason = "everything here is a test; clippy knows tests by their attribute")]

mod support;

use format::Epoch;
use ipc::{Host, SystemHost, Word};
use std::time::Duration;
use support::{Bed, Pair, host, in_ms, join, patient, spawn};
use transport::{Error, Network, Settings};

fn pause(span: Duration) {
    let _ = SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(span)));
}

#[test]
fn who_was_paused_asks_before_it_gives_its_peer_up() {
    let silence = Duration::from_secs(2);
    let network = Network::new(host());
    let bed = Bed::Local(network.clone());
    let settings = Settings { spin_ns: 1000, silence: Some(silence), ..patient() };
    let pair = Pair::new(&bed, &settings);
    // In process only waiting threads drive a link, so this is a pause of both nodes.
    pause(silence + Duration::from_millis(50));
    let way = Duration::from_millis(20);
    network.delay("n1", "n2", way, way);
    network.delay("n2", "n1", way, way);
    // The ping leaves long before its answer arrives.
    assert_eq!(pair.here.take(Some(in_ms(200))), Err(Error::TimedOut));
    assert_eq!(pair.here.ended(), None);
}

#[test]
fn no_epoch_begins_before_the_connections_of_those_before_are_closed() {
    for bed in [Bed::local(), Bed::Tcp] {
        for _ in 0..20 {
            let (one, two) = (bed.endpoint(1, &patient()), bed.endpoint(2, &patient()));
            let pairs: Vec<_> = (0..4).map(|_| join(&bed, &one, &two)).collect();
            let threads: Vec<_> = [2, 3]
                .map(|epoch| {
                    let two = two.clone();
                    let theirs: Vec<_> = pairs.iter().map(|(_, there)| there.clone()).collect();
                    spawn("advances", move || {
                        two.advance(Epoch::new(epoch), None);
                        theirs.iter().filter(|there| there.ended().is_none()).count()
                    })
                })
                .into();
            for thread in threads {
                assert_eq!(thread.join(), 0, "{}: open when the epoch had begun", bed.name());
            }
            assert_eq!((two.epoch(), two.connections()), (Epoch::new(3), 0));
            two.advance(Epoch::new(1), None);
            assert_eq!(two.epoch(), Epoch::new(3));
        }
    }
}
