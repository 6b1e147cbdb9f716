//! Greetings that take long: whatever they wait for, other clients are served meanwhile, and their ends are noticed.

use crate::client::{Client, FILE, ROOT, new_pool, tiny, user};
use crate::door::{Guest, LIBRARY, daemon_of, eventually, knock, knock_for};
use format::call::{LEASE_WRITE, NodeReply};
use format::message::MessageKind;
use ipc::host::{Host, Join};
use ipc::socket::{Connection, hello};
use ipc::words::{Entered, FenceBy};
use ipc::{SystemHost, Word};
use pmem::Medium;
use sharedfs::{Config, Daemon};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vfs::Caller;
use zerocopy::IntoBytes;

/// Names the folder of the daemon for a test that is run as another process.
const FOLDER: &str = "HEARTH_TEST_GREETINGS";

/// The user of this process.
fn me() -> Caller {
    let of = std::fs::metadata("/proc/self").unwrap();
    Caller { uid: of.uid(), gid: of.gid(), groups: Vec::new() }
}

/// Runs a closure in another thread; returns the thread and its result.
fn apart<T: Send + 'static>(
    act: impl FnOnce() -> T + Send + 'static,
) -> (Box<dyn Join>, Arc<Mutex<Option<T>>>) {
    let given = Arc::new(Mutex::new(None));
    let gives = given.clone();
    let body = move || {
        let made = act();
        *gives.lock().unwrap() = Some(made);
    };
    (SystemHost.spawn("apart", Box::new(body)).unwrap(), given)
}

fn joined<T>((thread, given): (Box<dyn Join>, Arc<Mutex<Option<T>>>)) -> T {
    thread.join().unwrap();
    given.lock().unwrap().take().unwrap()
}

/// Holders that stay inside, so that a thread that takes leases from them waits.
struct Holders {
    folder: tempfile::TempDir,
    daemon: Arc<Daemon>,
    stuck: Vec<(Client, NodeReply, Entered)>,
    asks: (Box<dyn Join>, Arc<Mutex<Option<()>>>),
    /// A session of this process, from which it may go on: to end it, a lease of the second holder must be taken.
    former: Client,
}

impl Holders {
    fn new(config: Config) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let config = Config { grace: Duration::from_secs(60), sessions_max: 64, ..config };
        let daemon = Arc::new(daemon_of(folder.path(), config));
        let mut one = Client::attach_as(&daemon, user(0), 1);
        one.write_lease(ROOT);
        let files = [b"first".as_slice(), b"second"].map(|name| one.create(ROOT, name, FILE | 0o644).0);
        one.digest(true).unwrap();
        let mut stuck = Vec::new();
        for (name, file) in ["first", "second"].into_iter().zip(files) {
            let holder = Client::attach_as(&daemon, user(0), 2);
            holder.walk(name).unwrap();
            let held = holder.write_lease(file);
            let inside = holder.pages.inside().enter(Some(1), FenceBy::Operation);
            stuck.push((holder, held, inside));
        }
        let former = Client::attach_as(&daemon, me(), std::process::id());
        // Both are asked for: one thread waits for the first holder, and the next one that finds work for the second.
        let wants = files.map(|file| (file, LEASE_WRITE));
        let asks = apart(move || drop(one.lease(&wants)));
        eventually("the first is waited for", || !stuck[0].0.still_holds(&stuck[0].1));
        assert!(stuck[1].0.still_holds(&stuck[1].1));
        Self { folder, daemon, stuck, asks, former }
    }

    fn folder(&self) -> PathBuf {
        self.folder.path().to_owned()
    }

    /// A greeting of this process waits for the second holder, or for the greeting before it.
    fn greets(&self) -> Connection {
        let connection = Connection::connect(&self.folder.path().join("socket")).unwrap();
        let greeting = hello(LIBRARY, self.former.session, 0);
        connection.send(MessageKind::Hello, &[greeting.as_bytes()], &[]).unwrap();
        let (holder, held, _) = &self.stuck[1];
        eventually("the second is waited for", || !holder.still_holds(held));
        connection
    }

    /// They leave; those who waited go on.
    fn let_go(self) -> (tempfile::TempDir, Arc<Daemon>) {
        for (holder, _, inside) in self.stuck {
            holder.pages.inside().leave(inside);
        }
        joined(self.asks);
        (self.folder, self.daemon)
    }
}

/// Lets another process connect, be served, and end.
fn another(folder: &Path) {
    let program = std::env::current_exe().unwrap();
    let test = "greetings::knocks_as_another_process";
    let done = Command::new(program).args(["--exact", test]).env(FOLDER, folder).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
}

/// Tests nothing by itself: [`another`] runs it.
#[test]
fn knocks_as_another_process() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return println!("no test: what a child process runs");
    };
    knock(Path::new(&folder)).root();
}

#[test]
fn while_one_greeting_waits_others_are_let_in_and_seen_to_go() {
    let held = Holders::new(tiny());
    // It makes no call, whose thread would find the work that the greeting is to find.
    let mortal = knock(held.folder.path());
    let before = held.daemon.sessions();
    let _slow = held.greets();
    let without_former = || held.daemon.sessions().iter().filter(|id| **id != held.former.session).count();
    assert!(!held.daemon.sessions().contains(&held.former.session), "it has ended");
    another(held.folder.path());
    eventually("its end is seen", || without_former() == before.len() - 1);
    drop(mortal);
    eventually("and the end of who was there", || without_former() == before.len() - 2);
    let (_folder, daemon) = held.let_go();
    daemon.stop();
}

#[test]
fn who_gave_up_a_greeting_and_greets_again_is_let_in_after_it() {
    let held = Holders::new(tiny());
    let before = held.daemon.sessions().len() - 1;
    let gives_up = held.greets();
    let (folder, former) = (held.folder(), held.former.session);
    drop(gives_up);
    let again = held.greets();
    // A later greeting is served first: this one has to wait until the first one's work is done.
    another(held.folder.path());
    assert!(matches!(again.receive(), Ok(None)), "it is not let in beside the first");
    eventually("the other has gone", || held.daemon.sessions().len() == before);
    let (_folder, daemon) = held.let_go();
    let until = Some(SystemHost.now().after(Duration::from_secs(10)));
    let welcome = again.receive_until(&SystemHost, until).unwrap();
    assert_eq!(welcome.kind, MessageKind::Welcome);
    assert_eq!(daemon.detached_sessions(), 0, "it has what the former session left");
    drop(again);
    let guest: Guest = knock_for(&folder, former);
    guest.root();
    assert_eq!((daemon.sessions().len(), daemon.detached_sessions()), (before + 1, 0));
    daemon.stop();
}

#[test]
fn who_finds_no_place_is_let_in_when_there_is_one() {
    let held = Holders::new(Config { greetings_max: 1, ..tiny() });
    let slow = held.greets();
    let folder = held.folder();
    let waits = apart(move || another(&folder));
    let (_folder, daemon) = held.let_go();
    joined(waits);
    drop(slow);
    daemon.stop();
}

#[test]
fn nobody_is_let_in_behind_an_orderly_end() {
    let held = Holders::new(tiny());
    let greetings = [held.greets(), held.greets()];
    let ending = held.daemon.clone();
    let ends = apart(move || ending.stop());
    eventually("it ends", || held.daemon.attach(user(0), 3).is_err());
    let (folder, daemon) = held.let_go();
    joined(ends);
    assert_eq!(daemon.sessions(), []);
    for greeting in greetings {
        let until = Some(SystemHost.now().after(Duration::from_secs(10)));
        let said = greeting.receive_until(&SystemHost, until).map(|message| message.kind);
        assert!(!matches!(said, Ok(MessageKind::Welcome)), "{said:?}");
    }
    drop(daemon);
    let left = Medium::file(folder.path()).unwrap().list().unwrap();
    assert!(!left.iter().any(|name| name.starts_with("log-")), "{left:?}");
}

#[test]
fn who_come_at_once_are_not_more_than_there_may_be() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let medium = Medium::file(folder.path()).unwrap();
    new_pool(&medium);
    let max = 4;
    let config = Config { sessions_max: max, ..tiny() };
    let daemon = Arc::new(Daemon::open(Arc::new(SystemHost), &medium, config).unwrap().0);
    for _ in 0..10 {
        let (begins, ready) = (Arc::new(Word::new(0)), Arc::new(Word::new(0)));
        let come = |pid| {
            let (daemon, begins, ready) = (daemon.clone(), begins.clone(), ready.clone());
            apart(move || {
                ready.fetch_add(1, ipc::sync::Ordering::SeqCst);
                while begins.load(ipc::sync::Ordering::SeqCst) == 0 {
                    SystemHost.wait(&begins, 0, None);
                }
                daemon.attach(user(0), pid).is_ok()
            })
        };
        let threads: Vec<_> = (1..=3 * max as u32).map(come).collect();
        eventually("all are there", || ready.load(ipc::sync::Ordering::SeqCst) == 3 * max as u32);
        begins.store(1, ipc::sync::Ordering::SeqCst);
        SystemHost.wake(&begins, ipc::host::WAKE_ALL);
        let come = threads.into_iter().map(joined).filter(|is_in| *is_in).count();
        assert_eq!((come, daemon.sessions().len()), (max, max));
        daemon.sessions().into_iter().for_each(|session| daemon.end(session));
    }
}
