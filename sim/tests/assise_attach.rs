//! A process that attaches again goes on with the state of its earlier session, whichever side ended that, and
//! whichever side has not learned of the new one.

mod assise_local;

use assise_local::operations::{CREATE, open, read, write};
use assise_local::trees::{at, process};
use assise_local::{Local, Node, tiny};
use format::Name;
use ipc::{Host, Join, Time, Waited, Word};
use libfs::{Attachment, Connector, Error, FIRST_WAIT, LibFs, Limits};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use vfs::Caller;
use vfs::conformance::{Actor, Answer, Call};
use vfs::engine::{Access, Engine, Step};

/// A program that does not hear the answers to its first greetings of another daemon.
struct Deaf {
    local: Arc<Local>,
    node: Arc<Node>,
    left: std::sync::atomic::AtomicU32,
}

impl Connector for Deaf {
    fn attach(&self, former: u64) -> Result<Attachment, Error> {
        if self.node.daemon().is_none() {
            self.node.start();
        }
        let attachment = self.local.attach(former)?;
        let left = self.left.load(Ordering::SeqCst);
        if former == 0 || left == 0 {
            return Ok(attachment);
        }
        self.left.store(left - 1, Ordering::SeqCst);
        if left.is_multiple_of(2) {
            // The listener may have noticed already that the process is gone, or not yet.
            self.node.daemon().expect("it was just started").end(self.local.session());
        }
        Err(Error::TimedOut)
    }
}

#[test]
fn a_greeting_that_nobody_heard_takes_nothing_from_the_program() {
    for deaf in 0..5 {
        let node = Node::new(tiny());
        let local = Arc::new(Local::new(node.clone(), Caller::ROOT));
        let connector = Arc::new(Deaf { local, node: node.clone(), left: deaf.into() });
        let libfs = LibFs::new(node.host.clone(), connector, Limits::default()).expect("the daemon runs");
        let mut one = process(Arc::new(libfs), 1);
        assert!(!matches!(one.call(&open(0, "f", CREATE)), Answer::Failed(_)));
        one.call(&write(0, 1, 5000));
        one.call(&Call::Flock { slot: 0, kind: 2 });
        one.call(&Call::Unlink(at("f")));
        node.kill();
        let answer = one.call(&write(0, 2, 100));
        assert!(!matches!(answer, Answer::Failed(_)), "{deaf} greetings not heard: {answer}");
        let contents = one.call(&read(0));
        assert!(
            matches!(&contents, Answer::Bytes(bytes) if bytes.len() == 5100),
            "{deaf} greetings not heard"
        );
    }
}

/// A host whose time passes only while a thread waits.
struct Slow {
    host: Arc<dyn Host>,
    passed_ns: AtomicU64,
}

impl Host for Slow {
    fn now(&self) -> Time {
        Time::from_ns(self.passed_ns.load(Ordering::SeqCst))
    }

    fn wall(&self) -> i64 {
        self.host.wall()
    }

    fn random(&self) -> u64 {
        self.host.random()
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Join>, ipc::Error> {
        self.host.spawn(name, body)
    }

    fn wait(&self, word: &Word, expected: u32, until: Option<Time>) -> Waited {
        let Some(until) = until else { return self.host.wait(word, expected, until) };
        self.passed_ns.store(until.as_ns(), Ordering::SeqCst);
        Waited::TimedOut
    }

    fn wake(&self, word: &Word, count: u32) {
        self.host.wake(word, count);
    }
}

/// A node that is not served before a point in time, and how that is met.
struct Late {
    local: Arc<Local>,
    host: Arc<Slow>,
    from: Time,
    until_then: Error,
}

impl Connector for Late {
    fn attach(&self, former: u64) -> Result<Attachment, Error> {
        if self.host.now() < self.from { Err(self.until_then.clone()) } else { self.local.attach(former) }
    }
}

#[test]
fn a_program_that_comes_while_nobody_serves_waits_as_long_as_it_is_told() {
    let node = Node::new(tiny());
    let pause = Duration::from_millis(100);
    let times = [(FIRST_WAIT - pause, true), (FIRST_WAIT + pause, false)];
    // The process is gone; or it is there, and does not answer.
    for until_then in [Error::Disconnected, Error::TimedOut] {
        for (serves_after, is_in) in times {
            let host = Arc::new(Slow { host: node.host.clone(), passed_ns: AtomicU64::new(0) });
            let local = Arc::new(Local::new(node.clone(), Caller::ROOT));
            let (from, until_then) = (host.now().after(serves_after), until_then.clone());
            let expected = if is_in { Ok(()) } else { Err(until_then.clone()) };
            let late = Late { local, host: host.clone(), from, until_then };
            let come = LibFs::new(host.clone(), Arc::new(late), Limits::default()).map(drop);
            assert_eq!(come, expected);
            let waited = host.now().since(Time::from_ns(0));
            assert!(waited >= serves_after.min(FIRST_WAIT) && waited < FIRST_WAIT + pause, "{waited:?}");
        }
    }
}

#[test]
fn a_session_that_used_up_its_numbers_hands_over_files_and_locks() {
    let node = Node::new(sharedfs::Config { own_range: 16, ..tiny() });
    let [mut one, mut two] =
        [1, 2].map(|id| process(Arc::new(node.attach(Caller::ROOT, Limits::default()).0), id));
    assert!(!matches!(one.call(&open(0, "f", CREATE)), Answer::Failed(_)));
    one.call(&write(0, 1, 5000));
    assert!(!matches!(one.call(&open(1, "lock", CREATE)), Answer::Failed(_)));
    assert_eq!(one.call(&Call::Flock { slot: 1, kind: 2 }), Answer::Done);
    assert_eq!(one.call(&Call::Unlink(at("f"))), Answer::Done);
    let before = one.call(&read(0));
    two.call(&open(0, "lock", CREATE));
    for number in 0..100 {
        let path = at(&format!("n{number}"));
        assert_eq!(one.call(&Call::Mkdir { path, mode: 0o755 }), Answer::Done, "{number}");
        if number % 10 == 0 {
            let busy = two.call(&Call::Flock { slot: 0, kind: 2 });
            assert!(matches!(busy, Answer::Failed(_)), "the lock is held: {busy}, {number}");
            assert_eq!(one.call(&read(0)), before, "{number}");
        }
    }
    assert_eq!(one.call(&Call::Flock { slot: 1, kind: 0 }), Answer::Done);
    assert_eq!(two.call(&Call::Flock { slot: 0, kind: 2 }), Answer::Done);
}

/// A thread whose call began before the process became another user.
#[test]
fn a_file_is_not_opened_for_writing_by_the_right_of_a_user_that_the_session_is_not_of() {
    let node = Node::new(tiny());
    let user = Caller { uid: 1002, gid: 1002, groups: Vec::new() };
    let of = |caller: &Caller| {
        let local = Arc::new(Local::new(node.clone(), caller.clone()));
        Arc::new(LibFs::new(node.host.clone(), local, Limits::default()).expect("the daemon runs"))
    };
    let made = process(of(&Caller::ROOT), 1).call(&open(0, "f", CREATE));
    assert!(!matches!(made, Answer::Failed(_)), "{made}");
    let libfs = of(&user);
    let root = libfs.root().expect("everybody may").inode;
    let name = Name::new(b"f").expect("a name");
    let mut found = Vec::new();
    libfs.walk(&user, root, &[Step::Child(name)], &mut found).expect("everybody may search");
    let inode = found.last().expect("it is there").inode;
    let (read, write) = (Access { read: true, write: false }, Access { read: true, write: true });
    assert!(matches!(libfs.open(&user, inode, write, false), Err(vfs::Error::Denied)));
    for (access, truncate) in [(write, false), (read, true)] {
        let opened = libfs.open(&Caller::ROOT, inode, access, truncate);
        assert!(matches!(opened, Err(vfs::Error::Restart)), "{opened:?}");
    }
}
