//! Crashes of a copy that reports in the middle of an entry: the head's program writes over the records that are reported, and
//! the new ones arrive at the copy over the old ones while it executes the rest of the entry. One thread plays both nodes; the
//! program and the messages come before each persist, fence and sync that the copy makes while it executes.
//!
//! The oracle is that of `pair`: the pool that the copy leaves opens and executes its ledger to the end as a copy, and as a head
//! it has a prefix of the operations, with all that an fsync acknowledged.

use crate::client::{Client, DIRECTORY, FILE, ROOT};
use crate::crash::{Opened, Run, SYNCED, judge, prove_on_both, recover};
use crate::pair::{COPY, HEAD, Pair, config, format_for, sync};
use crate::still::{StillHost, drive_by};
use format::Sequence;
use pmem::crash::{Counts, Limits, crash_recorded};
use pmem::{Medium, Recorder};
use sharedfs::{Config, Standby};
use std::cell::RefCell;
use std::rc::Rc;

/// A log of so few bytes holds eleven operations.
const LOG_BYTES: u64 = 16 << 10;
/// The most that an operation takes of a log, with the end of the ring that it does not fit.
const OPERATION_BYTES: u64 = 2 << 10;
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
    /// The other thread has one turn in so many persists, fences and syncs of the copy.
    turn: u64,
}

fn paces() -> Vec<Pace> {
    let all = |batches: &[usize], turns: &[u64]| {
        let of =
            |batch: &usize| turns.iter().map(|turn| Pace { batch: *batch, turn: *turn }).collect::<Vec<_>>();
        batches.iter().flat_map(of).collect()
    };
    if is_in_full() { all(&[1, 2, 4, 7], &[1, 2, 5]) } else { all(&[4], &[1, 3]) }
}

fn limits() -> Limits {
    if is_in_full() {
        return Limits {
            complete_max: 256,
            near_max: 64,
            sampled: 32,
            recovery_images: 4,
            recovery_every: 16,
            seed: 31,
        };
    }
    Limits { complete_max: 4, near_max: 2, sampled: 2, recovery_images: 0, recovery_every: 1, seed: 31 }
}

thread_local! {
    /// What the copy's recorder does meanwhile on this thread.
    static HISTORY: RefCell<Option<Rc<RefCell<History>>>> = const { RefCell::new(None) };
}

/// Both nodes and a program at the head.
struct History {
    pair: Pair,
    client: Client,
    run: Run,
    /// The last operation that an fsync acknowledged.
    synced: u64,
    turn: u64,
    /// Persists, fences and syncs of the copy.
    calls: u64,
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
        let mut history =
            Self { pair, client, run, synced: 0, turn: pace.turn, calls: 0, last, in_the_middle: 0 };
        history.run.operate(&mut history.client);
        history.sync();
        history.client.digest(true).unwrap();
        history.pair.quiesce();
        history.client.release();
        history
    }

    fn has_room(&self) -> bool {
        self.client.ring.free_bytes() >= OPERATION_BYTES
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

    /// A turn of the head and of the copy's receiving thread.
    fn take_turn(&mut self) {
        self.calls += 1;
        if !self.calls.is_multiple_of(self.turn) {
            return;
        }
        self.pair.daemon.feed_copies().unwrap();
        let arrived = self.pair.follows.borrow_mut().step();
        if arrived {
            return;
        }
        self.pair.daemon.hear_copies();
        if self.synced < self.run.done {
            self.sync();
            self.in_the_middle += u64::from(self.client.view.digested().sequence < self.last);
            return;
        }
        self.client.release();
        if self.has_room() {
            self.run.operate(&mut self.client);
        }
    }
}

fn of_copy(pace: Pace) -> Config {
    Config { batch_records: pace.batch, ..config(COPY) }
}

/// The copy's records from the moment at which it has the first entry; they end when both have the same.
fn reports_in_the_middle(recorders: [&Recorder; 2], pace: Pace) {
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
            history.inspect(|history| history.borrow_mut().take_turn()).is_some()
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
    recover(medium)
}

fn prove(pace: Pace, limits: &Limits) -> Counts {
    let recorders = [Recorder::new(), Recorder::new()];
    reports_in_the_middle([&recorders[0], &recorders[1]], pace);
    drive_by(Box::new(|| false));
    prove_on_both(
        |model| format!("sharedfs, reports, {pace:?}, {model:?}, {limits:?}"),
        |model| {
            let recover = |medium: &Medium| recover_copy(medium, pace);
            crash_recorded(&recorders[1], model, limits, recover, |opened, medium, point| {
                judge(opened, medium, point, false)
            })
        },
    )
}

#[test]
fn a_crash_of_a_copy_whose_reported_records_are_overwritten_loses_nothing() {
    let mut total = Counts::default();
    for pace in paces() {
        total += prove(pace, &limits());
    }
    println!("sharedfs, reports in the middle of an entry: {total}");
    assert!(total.images > 1_000, "{total}");
}
