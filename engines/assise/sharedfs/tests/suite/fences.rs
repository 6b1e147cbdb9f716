//! A program's operations leave the full fence to SharedFS: it asks the machine for one before it believes what their
//! words say.

use crate::client::{Client, FILE, ROOT, new_pool, tiny, user};
use format::call::LEASE_WRITE;
use ipc::host::{Host, Join, Time, Waited};
use ipc::words::FenceBy;
use ipc::{Error, SystemHost, Word};
use pmem::recorded::Recorder;
use sharedfs::Daemon;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The machine, which counts the fences, or has none.
#[derive(Default)]
struct Fencing {
    fences: AtomicU32,
    lacks: AtomicBool,
    pauses: AtomicU32,
}

impl Host for Fencing {
    fn now(&self) -> Time {
        SystemHost.now()
    }

    fn wall(&self) -> i64 {
        SystemHost.wall()
    }

    fn random(&self) -> u64 {
        SystemHost.random()
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, Error> {
        SystemHost.spawn(name, body)
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        self.pauses.fetch_add(1, Ordering::Relaxed);
        SystemHost.wait(word, expected, until)
    }

    fn wake(&self, word: &Word, count: u32) {
        SystemHost.wake(word, count);
    }

    fn fence_others(&self) -> bool {
        self.fences.fetch_add(1, Ordering::SeqCst);
        !self.lacks.load(Ordering::SeqCst)
    }
}

impl Fencing {
    /// Fences since it was asked last.
    fn taken(&self) -> u32 {
        self.fences.swap(0, Ordering::SeqCst)
    }
}

fn daemon_on(host: &Arc<Fencing>, recorder: &Recorder) -> Arc<Daemon> {
    Arc::new(Daemon::open(host.clone(), &recorder.medium(), tiny()).unwrap().0)
}

#[test]
fn others_are_fenced_before_a_log_is_read_a_scan_begins_or_a_cut_is_made() {
    let (host, recorder) = (Arc::new(Fencing::default()), Recorder::new());
    new_pool(&recorder.medium());
    let daemon = daemon_on(&host, &recorder);
    assert_eq!(host.taken(), 1, "before what the former daemon's programs wrote is read");
    let mut one = Client::attach(&daemon, user(0));
    assert_eq!(one.attached.welcome.fences.get(), 1);
    one.write_lease(ROOT);
    let (file, _) = one.create(ROOT, b"file", FILE | 0o644);
    let two = Client::attach_as(&daemon, user(0), 2);
    assert_eq!(host.taken(), 0, "nobody was asked for anything");
    two.lease(&[(ROOT, LEASE_WRITE)]).unwrap();
    assert_eq!(host.taken(), 1, "before it is seen who is inside");
    let _stuck = one.pages.inside().enter(Some(1), FenceBy::Operation);
    two.walk("file").unwrap();
    two.lease(&[(file, LEASE_WRITE)]).unwrap();
    assert_eq!(host.taken(), 2, "before the look, and before the cut of who stays inside");
    daemon.end(two.session);
    assert_eq!(host.taken(), 1);
}

#[test]
fn on_a_machine_without_fences_every_operation_fences_for_itself() {
    let (host, recorder) = (Arc::new(Fencing::default()), Recorder::new());
    new_pool(&recorder.medium());
    host.lacks.store(true, Ordering::SeqCst);
    let daemon = daemon_on(&host, &recorder);
    assert_eq!(host.taken(), 1);
    assert!(host.pauses.load(Ordering::Relaxed) > 0, "it pauses instead");
    let one = Client::attach(&daemon, user(0));
    assert_eq!(one.attached.welcome.fences.get(), 0);
    daemon.end(one.session);
    assert_eq!(host.taken(), 0);
}
