//! Leases that are asked for together.

use crate::client::{Client, FILE, ROOT, new_pool, tiny, user};
use format::call::LEASE_WRITE;
use ipc::words::FenceBy;
use ipc::{Host, SystemHost, Word};
use pmem::recorded::Recorder;
use sharedfs::{Config, Daemon};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Pause between two looks.
const LOOK: Duration = Duration::from_millis(1);
/// How long a request is given to come.
const MOMENT: Duration = Duration::from_millis(50);
/// How long a lease stays at least: its holder has noticed it by then.
const HOLD: Duration = Duration::from_millis(500);

fn pause(span: Duration) {
    SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(span)));
}

#[test]
fn what_is_held_stays_while_what_is_asked_for_with_it_is_waited_for() {
    let recorder = Recorder::new();
    new_pool(&recorder.medium());
    let config = Config { grace: Duration::from_secs(30), hold_min: HOLD, ..tiny() };
    let daemon = Arc::new(Daemon::open(Arc::new(SystemHost), &recorder.medium(), config).unwrap().0);
    let mut one = Client::attach(&daemon, user(0));
    let (two, three) = (Client::attach_as(&daemon, user(0), 2), Client::attach_as(&daemon, user(0), 3));
    one.write_lease(ROOT);
    let [(first, _), (second, _)] =
        [b"first".as_slice(), b"second"].map(|name| one.create(ROOT, name, FILE | 0o644));
    one.digest(true).unwrap();
    for name in ["first", "second"] {
        two.walk(name).unwrap();
        three.walk(name).unwrap();
    }
    // Taken once by another, so that the table knows of both.
    let other = three.lease(&[(first, LEASE_WRITE), (second, LEASE_WRITE)]).unwrap()[1];
    let held = one.write_lease(first);
    let inside = three.pages.inside().enter(Some(1), FenceBy::Operation);
    pause(HOLD);
    let came = Arc::new(AtomicBool::new(false));
    let (told, wants) = (came.clone(), [(first, LEASE_WRITE), (second, LEASE_WRITE)]);
    let asks = SystemHost.spawn(
        "asks",
        Box::new(move || {
            let replies = one.lease(&wants).unwrap();
            assert_eq!(replies[0].version, held.version, "it was never anybody else's");
            told.store(true, Ordering::SeqCst);
        }),
    );
    // From here on the request is in the table.
    while three.still_holds(&other) {
        pause(LOOK);
    }
    let takes =
        SystemHost.spawn("takes", Box::new(move || drop(two.lease(&[(first, LEASE_WRITE)]).unwrap())));
    pause(MOMENT);
    assert!(!came.load(Ordering::SeqCst), "who is inside is waited for");
    three.pages.inside().leave(inside);
    asks.unwrap().join().unwrap();
    takes.unwrap().join().unwrap();
}
