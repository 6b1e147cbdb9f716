//! Crashes of a copy that reports in the middle of an entry: the head's program writes over the records that are reported, and
//! the new ones arrive at the copy over the old ones while it executes the rest of the entry. One thread plays both nodes; the
//! program acts and messages arrive before each persist, fence and sync that the copy makes while it executes.
//!
//! The oracle is that of `pair`: the pool that the copy leaves opens and executes its ledger to the end as a copy, and as a head
//! it has a prefix of the operations, with all that an fsync acknowledged.

use crate::client::{Client, DIRECTORY, FILE, ROOT};
use crate::crash::{Opened, Run, SYNCED, judge, prove_on_both};
use crate::pair::{COPY, HEAD, Pair, config, format_for, recover_node, sync};
use crate::still::{StillHost, drive_by};
use format::Sequence;
use pmem::crash::{Counts, Limits, crash_recorded};
use pmem::{Medium, Recorder};
use sharedfs::{Config, RING_START, Standby};
use std::cell::RefCell;
use std::rc::Rc;

/// A log of so few bytes holds twelve operations.
const LOG_BYTES: u64 = 16 << 10;
/// The frames of an operation.
const FRAMES: [u64; 3] = [128, 128, 768];
/// An operation comes in several messages.
const MESSAGE_BYTES: u32 = 512;
/// Entries that are executed while the log is written over.
const ENTRIES: usize = 2;

fn is_in_full() -> bool {
    std::env::var_os("HEARTH_PROVE").is_some_and(|value| value == "1")
}

/// How a history goes.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// Records that the copy executes in one batch.
    batch: usize,
    /// The most steps of the others before each persist, fence and sync of the thread that executes.
    steps: u64,
}

/// Steps until there is no more to do: a reported record is written over, and synced, at once.
const AT_ONCE: u64 = u64::MAX;

fn paces() -> Vec<Pace> {
    let all = |batches: &[usize], steps: &[u64]| {
        let of = |batch: &usize| {
            steps.iter().map(|steps| Pace { batch: *batch, steps: *steps }).collect::<Vec<_>>()
        };
        batches.iter().flat_map(of).collect()
    };
    if is_in_full() { all(&[1, 2, 3, 4, 7], &[1, 3, AT_ONCE]) } else { all(&[3, 4], &[1, AT_ONCE]) }
}

fn limits() -> Limits {
    if is_in_full() {
        return Limits {
            complete_max: 32,
            near_max: 16,
            sampled: 8,
            recovery_images: 0,
            recovery_every: 1,
            seed: 31,
        };
    }
    Limits { complete_max: 4, near_max: 2, sampled: 2, recovery_images: 0, recovery_every: 1, seed: 31 }
}

thread_local! {
    /// The work that the copy's recorder does meanwhile on this thread.
    static HISTORY: RefCell<Option<Rc<RefCell<History>>>> = const { RefCell::new(None) };
}

/// Both nodes and a program at the head.
struct History {
    pair: Pair,
    client: Client,
    run: Run,
    /// The last operation that an fsync acknowledged.
    synced: u64,
    steps: u64,
    /// The last record of the entry that the copy executes.
    last: Sequence,
    /// Operations that were acknowledged while the head knew the copy to be in the middle of an entry. There was no room for any of
    /// them when that entry began.
    in_the_middle: u64,
}

impl History {
    fn new(recorders: [&Recorder; 2], pace: Pace) -> Self {
        let host = StillHost::first();
        format_for(&recorders[0].medium(), HEAD);
        format_for(&recorders[1].medium(), COPY);
        let of_head = Config { log_bytes: LOG_BYTES, batch_records: 1 << 10, ..config(HEAD) };
        let pair = Pair::apart_with(host, recorders, [of_head, of_copy(pace)], MESSAGE_BYTES);
        pair.daemon.add_copy(pair.connect()).unwrap();
        let mut client = pair.attach();
        client.write_lease(ROOT);
        let (folder, _) = client.create(ROOT, b"folder", DIRECTORY | 0o755);
        let (shared, _) = client.create(folder, b"shared", FILE | 0o644);
        let run = Run { recorders: recorders.map(Recorder::clone).to_vec(), folder, shared, done: 0 };
        let last = Sequence::default();
        let mut history = Self { pair, client, run, synced: 0, steps: pace.steps, last, in_the_middle: 0 };
        history.run.operate(&mut history.client);
        history.sync();
        history.client.digest(true).unwrap();
        history.pair.quiesce();
        history.client.release();
        history
    }

    /// Whether the log has room for an operation, with the rest of the ring that a frame does not fit.
    fn has_room(&self) -> bool {
        let ring = &self.client.ring;
        let (start, end) = (RING_START, RING_START + ring.bytes());
        let (mut at, mut bytes) = (ring.tail().position, 0);
        for frame in FRAMES {
            if at + frame > end {
                (bytes, at) = (bytes + end - at, start);
            }
            (bytes, at) = (bytes + frame, at + frame);
        }
        bytes <= ring.free_bytes()
    }

    fn sync(&mut self) {
        sync(&self.client, &[(self.run.folder, 1), (self.run.shared, 1)]).unwrap();
        self.synced = self.run.done;
        self.run.mark_synced();
    }

    /// The log becomes full, and the copy has all of it, and one entry more, which it has not executed.
    fn fill(&mut self) {
        self.pair.follows.borrow_mut().paused = u32::MAX;
        while self.has_room() {
            self.run.operate(&mut self.client);
        }
        self.sync();
        self.last = self.client.pages.commit().load();
        let before = self.pair.follows.borrow().standby.state().ledger;
        self.pair.daemon.tidy();
        self.pair.quiesce();
        let state = self.pair.follows.borrow().standby.state();
        assert_eq!((state.ledger, state.executed), (before.next(), before), "one entry");
    }

    /// A step of the head, its program and the copy's receiving thread; false if there was nothing to do.
    fn step(&mut self) -> bool {
        self.pair.daemon.feed_copies().unwrap();
        let arrived = self.pair.follows.borrow_mut().step();
        if arrived || self.pair.daemon.hear_copies() {
            return true;
        }
        if self.synced < self.run.done {
            self.sync();
            self.in_the_middle += u64::from(self.client.view.digested().sequence < self.last);
            return true;
        }
        self.client.release();
        let has_room = self.has_room();
        if has_room {
            self.run.operate(&mut self.client);
        }
        has_room
    }

    fn take_steps(&mut self) {
        let mut left = self.steps;
        while left > 0 && self.step() {
            left -= 1;
        }
    }
}

fn of_copy(pace: Pace) -> Config {
    Config { batch_records: pace.batch, ..config(COPY) }
}

/// Entries that a copy executes meanwhile; its recorder begins when it has the first one. Gives the operations that were
/// acknowledged in the middle of one.
fn execute_meanwhile(recorders: [&Recorder; 2], pace: Pace) -> u64 {
    let history = Rc::new(RefCell::new(History::new(recorders, pace)));
    let copy = recorders[1];
    HISTORY.set(Some(history.clone()));
    for entry in 0..ENTRIES {
        history.borrow_mut().fill();
        if entry == 0 {
            copy.begin_here();
            copy.returned(SYNCED + history.borrow().synced);
        }
        let standby = history.borrow().pair.follows.borrow().standby.clone();
        let before = history.borrow().in_the_middle;
        copy.meanwhile(|| {
            let history = HISTORY.with_borrow(Clone::clone);
            history.inspect(|history| history.borrow_mut().take_steps()).is_some()
        });
        while standby.execute().unwrap() {}
        copy.meanwhile(|| false);
        assert!(history.borrow().in_the_middle > before + 2, "entry {entry} of {pace:?}");
        history.borrow().pair.quiesce();
        history.borrow_mut().client.release();
    }
    HISTORY.set(None);
    let history = &mut *history.borrow_mut();
    history.pair.follows.borrow_mut().paused = 0;
    history.run.operate(&mut history.client);
    history.sync();
    history.pair.quiesce();
    assert_eq!(history.pair.daemon.terminations(), []);
    history.in_the_middle
}

/// The copy is started again, and executes what it has; then it leads.
fn recover_copy(medium: &Medium, pace: Pace) -> Result<Opened, String> {
    let standby =
        Standby::open(StillHost::again(), medium, of_copy(pace)).map_err(|error| error.to_string())?;
    let state = standby.state();
    standby.stop();
    if state.executed != state.ledger {
        return Err(format!("it does not execute its ledger to the end: {state:?}"));
    }
    crate::support::findings(medium)?;
    recover_node(1)(medium)
}

/// Gives the operations that were acknowledged in the middle of an entry, too.
fn prove(pace: Pace, limits: &Limits) -> (u64, Counts) {
    let recorders = [Recorder::new(), Recorder::new()];
    let in_the_middle = execute_meanwhile([&recorders[0], &recorders[1]], pace);
    drive_by(Box::new(|| false));
    let counts = prove_on_both(
        |model| format!("sharedfs, reports, {pace:?}, {model:?}, {limits:?}"),
        |model| {
            let recover = |medium: &Medium| recover_copy(medium, pace);
            crash_recorded(&recorders[1], model, limits, recover, |opened, medium, point| {
                judge(opened, medium, point, false)
            })
        },
    );
    (in_the_middle, counts)
}

#[test]
fn a_crash_of_a_copy_whose_reported_records_are_overwritten_loses_nothing() {
    let (mut operations, mut total) = (0, Counts::default());
    for pace in paces() {
        let (in_the_middle, counts) = prove(pace, &limits());
        operations += in_the_middle;
        total += counts;
    }
    println!("sharedfs, {operations} operations synced in the middle of an entry: {total}");
    assert!(total.images > 1_000, "{total}");
}
