//! Shared memory of a hostile process, written by it while the daemon reads: the ring of requests, the commit word,
//! the places inside, the table of open inodes. Meanwhile others go on, and at the end the daemon ends in order, the
//! tree is sound, and what is not the hostile user's is as it was.

use crate::client::{Client, DIRECTORY, FILE, ROOT, fresh, tiny, user};
use crate::rounds::rounds;
use crate::support::Draws;
use format::InodeNumber;
use format::call::{LEASE_READ, LEASE_WRITE, Status};
use format::message::RequestHeader;
use format::session::{OPEN_TABLE, OPEN_TABLE_OFFSET, SESSION_BYTES, SLOTS, SLOTS_OFFSET};
use ipc::SystemHost;
use ipc::host::{Host, WAKE_ALL};
use ipc::ring::RingLimits;
use ipc::shared::{Mapping, Words};
use ipc::sync::{LongWord, Ordering, Word};
use pmem::Recorder;
use sharedfs::Daemon;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

const ALICE: u32 = 1000;
const BOB: u32 = 1001;

/// A running daemon, a folder of Alice's that is hers alone, and one for all.
struct Scene {
    recorder: Recorder,
    daemon: Arc<Daemon>,
    common: InodeNumber,
    hers: InodeNumber,
}

impl Scene {
    fn new() -> Self {
        let (recorder, daemon) = fresh();
        daemon.start().unwrap();
        let mut root = Client::attach(&daemon, user(0));
        root.write_lease(ROOT);
        let (common, hers) = (root.new_inode(), root.new_inode());
        assert!(root.create_as(common, ROOT, b"common", DIRECTORY | 0o777, 0));
        assert!(root.create_as(hers, ROOT, b"hers", DIRECTORY | 0o700, ALICE));
        daemon.end(root.session);
        Self { recorder, daemon, common, hers }
    }

    /// Alice works: in her own folder, and in the one where Bob is. Each of her calls is answered. Gives how many files
    /// she made in her folder; fewer than three only if she was inside an operation for longer than she may, because
    /// the machine had no time for her.
    fn alice_works(&self, draws: &mut Draws) -> usize {
        let mut alice = Alice::attach(self);
        let mut made = 0;
        for number in 0..3 + draws.below(6) as u8 {
            if alice.makes(number).is_none() {
                return made;
            }
            made += 1;
        }
        self.daemon.end(alice.client.session);
        made
    }

    /// Conditions that must hold whatever Bob did, when Alice made so many files.
    fn check(&self, made: usize) {
        let alice = Client::attach_as(&self.daemon, user(ALICE), 8);
        alice.walk("hers").unwrap();
        let mut entries = alice.entries(self.hers).unwrap();
        entries.sort();
        for (name, inode) in &entries[..made] {
            alice.walk(&format!("hers/{}", String::from_utf8_lossy(name))).unwrap();
            assert_eq!(alice.read(*inode, 0, 1000).unwrap(), [name[0] - b'a'; 500]);
        }
        assert!(entries.len() <= made + 1, "{entries:?}");
        self.daemon.stop();
        crate::support::findings(&self.recorder.medium()).unwrap();
    }
}

/// Alice as an honest LibFS: each of her actions happens inside an operation, under leases that she still holds there.
struct Alice<'a> {
    scene: &'a Scene,
    client: Client,
    /// The longest that she was inside an operation.
    inside: Duration,
}

impl<'a> Alice<'a> {
    fn attach(scene: &'a Scene) -> Self {
        let client = Client::attach_as(&scene.daemon, user(ALICE), 7);
        client.walk("hers").unwrap();
        client.walk("common").unwrap();
        Self { scene, client, inside: Duration::ZERO }
    }

    /// A file in her folder, and one in the common one. `None` if she was ended for her own slowness, which is no
    /// fault of the daemon; for anything else this panics.
    fn makes(&mut self, number: u8) -> Option<()> {
        let (hers, common) = (self.scene.hers, self.scene.common);
        let mut file = InodeNumber::NONE;
        self.under(hers, |alice| {
            let (inode, made) = alice.create(hers, &[b'a' + number], FILE | 0o600);
            file = inode;
            made && alice.write(inode, 0, &[number; 500])
        })?;
        // A call reads digested data, and a digest that others asked for may have come between the two records.
        self.tries(|alice| alice.digest(true))?;
        let read =
            self.tries(|alice| alice.lease(&[(file, LEASE_READ)]).and_then(|_| alice.read(file, 0, 1000)))?;
        assert_eq!(read, [number; 500]);
        self.under(common, |alice| alice.create(common, &[b'A', b'a' + number], FILE | 0o600).1)?;
        self.tries(|alice| alice.digest(true)).map(|_| ())
    }

    /// Acts under a lease, which is taken again whenever another took it.
    fn under(&mut self, unit: InodeNumber, mut act: impl FnMut(&mut Client) -> bool) -> Option<()> {
        for _ in 0..TRIES {
            let held = self.tries(|alice| alice.lease(&[(unit, LEASE_WRITE)]))?;
            let begun = SystemHost.now();
            let mut acted = false;
            let done = self.client.under(&held, |alice| {
                acted = true;
                act(alice)
            });
            self.inside = self.inside.max(SystemHost.now().since(begun));
            match (done, acted) {
                (true, _) => return Some(()),
                // The lease was gone.
                (false, false) => {}
                (false, true) => return self.late("the log is sealed"),
            }
        }
        panic!("Alice got the lease {TRIES} times, and never for long enough to enter");
    }

    /// A call; `Invalid` says that the lease which it needs was taken.
    fn tries<T>(&mut self, mut call: impl FnMut(&mut Client) -> Result<T, Status>) -> Option<T> {
        for _ in 0..TRIES {
            match call(&mut self.client) {
                Ok(answer) => return Some(answer),
                Err(Status::Invalid) => {}
                Err(status) => return self.late(&format!("{status:?}")),
            }
        }
        panic!("Alice's call was refused {TRIES} times");
    }

    /// She is refused: only if she was ended because an operation of hers took longer than the grace period may she be.
    fn late<T>(&self, refused: &str) -> Option<T> {
        let ends = self.scene.daemon.terminations();
        let end = ends.iter().find(|end| end.session == self.client.session);
        let slow = end.is_some_and(|end| end.reason == "Grace") && self.inside >= tiny().grace;
        assert!(slow, "{refused}: {end:?}, at most {:?} inside", self.inside);
        None
    }
}

/// How often a lease may be lost between its grant and its use: Bob wants it all the time.
const TRIES: u32 = 10_000;

/// Writes on in a thread of its own until it is told to end.
struct Scribbler {
    end: Arc<Word>,
    thread: Option<Box<dyn ipc::host::Join>>,
}

impl Scribbler {
    fn begin(seed: u64, mut scribble: impl FnMut(&mut Draws) + Send + 'static) -> Self {
        let end = Arc::new(Word::new(0));
        let seen = end.clone();
        let body = move || {
            let mut draws = Draws(seed);
            // Acquire: nothing is published with it.
            while seen.load(Ordering::Acquire) == 0 {
                scribble(&mut draws);
            }
        };
        let thread = SystemHost.spawn("scribbler", Box::new(body)).unwrap();
        Self { end, thread: Some(thread) }
    }
}

impl Drop for Scribbler {
    fn drop(&mut self) {
        self.end.store(1, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The ring as `ipc` lays it out: doorbell, sleeping and closed flags, then slots.
const SLOTS_AT: usize = 256;
const SLOT_HEAD_BYTES: usize = 64;
const SUBMITTED: u32 = 1;

fn lie(draws: &mut Draws) -> u32 {
    match draws.below(4) {
        0 => draws.below(8) as u32,
        1 => *draws.of(&[u32::MAX, 1 << 31, i32::MAX as u32, 511, 512, 513, 65_536]),
        2 => draws.below(5000) as u32,
        _ => draws.below(1 << 32) as u32,
    }
}

/// Submits a request that is right, or nearly, or writes anywhere.
fn scribble_ring(draws: &mut Draws, ring: &Arc<Mapping>, words: &Words<Word>, limits: RingLimits) {
    let slot_bytes = SLOT_HEAD_BYTES + 2 * limits.inline_bytes as usize;
    let slot = SLOTS_AT + draws.below(limits.slots.into()) as usize * slot_bytes;
    if draws.chance(20) {
        let at = draws.below((SLOTS_AT + limits.slots as usize * slot_bytes) as u64 / 4) as usize;
        words[at].store(lie(draws), Ordering::Release);
    } else {
        let body: Vec<u8> = (0..draws.below(14)).flat_map(|_| u64::from(lie(draws)).to_le_bytes()).collect();
        let head = RequestHeader {
            id: draws.below(9).into(),
            kind: (draws.below(26) as u16).into(),
            body_bytes: (if draws.chance(90) { body.len() as u32 } else { lie(draws) }).into(),
            ..zerocopy::FromZeros::new_zeroed()
        };
        let request = [head.as_bytes(), &body].concat();
        ring.copy_in(slot + SLOT_HEAD_BYTES, &request).unwrap();
        let bytes = if draws.chance(80) { request.len() as u32 } else { lie(draws) };
        let answer = if draws.chance(80) { limits.inline_bytes } else { lie(draws) };
        let bulk = if draws.chance(80) { 0 } else { lie(draws) };
        for (index, value) in [(1, bytes), (2, answer), (3, bulk), (0, SUBMITTED)] {
            words[slot / 4 + index].store(value, Ordering::Release);
        }
        if draws.chance(20) {
            // Changed again, at once or while it is read.
            ring.copy_in(slot + SLOT_HEAD_BYTES + draws.below(48) as usize, &lie(draws).to_le_bytes())
                .unwrap();
        }
    }
    words[0].store(lie(draws), Ordering::Release);
    SystemHost.wake(&words[0], WAKE_ALL);
}

fn ring_round(draws: &mut Draws) {
    let scene = Scene::new();
    let mut scribblers = Vec::new();
    for pid in 0..2 {
        let attached = scene.daemon.attach(user(BOB), pid).unwrap();
        scene.daemon.serve(attached.welcome.session.get()).unwrap();
        let (ring, limits) = (attached.ring.clone(), attached.ring_limits);
        for _ in 0..2 {
            let (ring, words) = (ring.clone(), ring.words::<Word>(0, limits.bytes().unwrap() / 4).unwrap());
            let scribble = move |draws: &mut Draws| scribble_ring(draws, &ring, &words, limits);
            scribblers.push(Scribbler::begin(draws.below(u64::MAX), scribble));
        }
    }
    let made = scene.alice_works(draws);
    drop(scribblers);
    scene.check(made);
}

#[test]
fn rings_may_hold_anything_at_any_time() {
    rounds("hostile rings", 12, ring_round);
}

/// Writes one of the shared words.
fn scribble_word(draws: &mut Draws, words: &Words<LongWord>) {
    let value = match draws.below(6) {
        0 => draws.below(40),
        1 => 1 << draws.below(64),
        2 => (1 << 63) | draws.below(40),
        3 => *draws.of(&[u64::MAX, i64::MAX as u64, 0]),
        _ => draws.below(1 << 40),
    };
    let place = match draws.below(10) {
        0..4 => 0,
        4..7 => SLOTS_OFFSET / 8 + draws.below(SLOTS as u64 * 8) as usize,
        7..9 => OPEN_TABLE_OFFSET / 8 + draws.below(OPEN_TABLE as u64) as usize,
        _ => draws.below(SESSION_BYTES as u64 / 8) as usize,
    };
    words[place].store(value, Ordering::Release);
}

fn words_round(draws: &mut Draws) {
    let scene = Scene::new();
    let mut bob = Client::attach_as(&scene.daemon, user(BOB), 3);
    bob.walk("common").unwrap();
    let words = bob.attached.session.words::<LongWord>(0, SESSION_BYTES / 8).unwrap();
    let calm = draws.chance(30);
    let scribble = move |draws: &mut Draws| {
        scribble_word(draws, &words);
        if calm {
            // Rare enough for records to count now and then.
            let never = Word::new(0);
            SystemHost.wait(&never, 0, Some(SystemHost.now().after(std::time::Duration::from_micros(300))));
        }
    };
    let scribbler = Scribbler::begin(draws.below(u64::MAX), scribble);
    let common = scene.common;
    let work = move |draws: &mut Draws| {
        // Sealed, or its lease is gone: whatever is refused, it tries again.
        if bob.lease(&[(common, LEASE_WRITE)]).is_err() {
            return;
        }
        let (file, _) = bob.create(common, &[b'b', draws.below(200) as u8 | 128], FILE | 0o644);
        bob.write(file, 0, &[1; 900]);
        if draws.chance(30) {
            let ended = bob.digest(true);
            assert!(!matches!(ended, Err(Status::Media)), "{ended:?}");
        }
    };
    let worker = Scribbler::begin(draws.below(u64::MAX), work);
    let made = scene.alice_works(draws);
    drop((scribbler, worker));
    scene.check(made);
}

#[test]
fn shared_words_may_say_anything_at_any_time() {
    rounds("hostile words", 12, words_round);
}
