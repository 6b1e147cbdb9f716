//! A session that ends while others ask for what it made.

use crate::client::{Client, FILE, ROOT, new_pool, tiny, user};
use format::call::LEASE_WRITE;
use ipc::words::Seal;
use ipc::{Host, SystemHost, Word};
use pmem::recorded::Recorder;
use sharedfs::{Config, Daemon};
use std::sync::Arc;
use std::time::Duration;

/// Records that the session leaves; each is a commit of its own, so that its end takes a while.
const RECORDS: u64 = 400;
/// Ends that are met: on a busy machine this thread may come when one is over.
const ROUNDS: usize = 10;
/// Pause between two looks.
const LOOK: Duration = Duration::from_micros(20);

/// A session that made a file, which others know, and wrote to it since without any call; and another one.
fn left_behind(daemon: &Arc<Daemon>) -> (Client, Client, format::InodeNumber) {
    let mut one = Client::attach(daemon, user(0));
    one.write_lease(ROOT);
    let (file, _) = one.create(ROOT, b"file", FILE | 0o644);
    one.digest(true).unwrap();
    let two = Client::attach_as(daemon, user(0), 2);
    // The folder is nobody's in particular, and the table of leases knows nothing of the file.
    two.lease(&[(ROOT, LEASE_WRITE)]).unwrap();
    for at in 0..RECORDS {
        assert!(one.write(file, at * 64, &[7; 64]));
    }
    (one, two, file)
}

fn slow_daemon() -> Arc<Daemon> {
    let recorder = Recorder::new();
    new_pool(&recorder.medium());
    let config = Config { batch_records: 1, log_bytes: 128 << 10, ..tiny() };
    Arc::new(Daemon::open(Arc::new(SystemHost), &recorder.medium(), config).unwrap().0)
}

/// Ends the session in a thread of its own; returns when its log is sealed and its records are still to be digested.
fn begin_end(daemon: &Arc<Daemon>, one: &Client) -> Box<dyn ipc::Join> {
    let (theirs, session) = (daemon.clone(), one.session);
    let ends = SystemHost.spawn("ends", Box::new(move || theirs.end(session))).unwrap();
    while one.view.seal() == Seal::Open {
        SystemHost.wait(&Word::new(0), 0, Some(SystemHost.now().after(LOOK)));
    }
    ends
}

#[test]
fn who_asks_for_a_file_of_a_session_that_ends_sees_all_that_it_wrote() {
    for _ in 0..ROUNDS {
        let daemon = slow_daemon();
        let (one, two, file) = left_behind(&daemon);
        let ends = begin_end(&daemon, &one);
        let found = two.walk("file").unwrap();
        assert_eq!(found.inode, file);
        assert_eq!(found.item.size.get(), RECORDS * 64);
        ends.join().unwrap();
    }
}
