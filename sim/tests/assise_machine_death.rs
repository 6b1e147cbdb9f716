//! The machine dies under two programs and their daemon: seeded histories of the real LibFS and SharedFS under the
//! stepped host, on the recorded medium, cut where something becomes certain, under both models of the medium. After
//! recovery, which is crashed as well, everything is there that was promised, and the rest is a prefix: of each
//! program's changes, and of all changes that concern each other ([semantics](../../docs/semantics.md): programs,
//! synced, the shared area). On persistent memory (lines) all that had returned is promised, on a mapped file (pages)
//! what was synced: a program's own changes, and whatever was done before to the inode that it named.
//!
//! `HEARTH_PROVE=1` runs a thousand histories, `HEARTH_SEED=N` one.

mod assise_local;

use assise_local::histories::{
    Event, FOLDERS, Impossible, Program, ProgramChange, Touched, Trace, in_order, make_folders, replay,
};
use assise_local::stamped::Stamped;
use assise_local::trees::{Tree, process, whole_tree};
use assise_local::{Local, Node, tiny};
use format::InodeNumber;
use format::call::CallKind;
use ipc::{Host, SystemHost, Word};
use libfs::Limits;
use pmem::crash::{Counts, Limits as CrashLimits, Model, Point, Sample, sample};
use pmem::recorded::Verb;
use pmem::{Image, Medium, Recorder, skipped};
use sharedfs::Config;
use sharedfs::{CutReason, Refusal};
use sim::{SimHost, Simulation};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use vfs::conformance::{Actor, Answer, Call};
use vfs::{Caller, Engine};

/// Things that each program does.
const OPERATIONS: usize = 45;
/// How often a thread is stopped inside in every fourth history.
const STOPS: usize = 12;
/// How long a daemon waits for it.
const GRACE_NS: u64 = 20_000;
const SEEDS: u64 = 40;
const SEEDS_PROVED: u64 = 1_000;

fn proves() -> bool {
    std::env::var_os("HEARTH_PROVE").is_some_and(|value| value == "1")
}

fn config() -> Config {
    // A grant stays long enough for one operation, or no process would make progress.
    Config {
        log_bytes: 8 << 10,
        log_bytes_max: 64 << 10,
        hold_min: Duration::from_micros(50),
        idle_digest: Duration::from_millis(1),
        area: assise_local::sharedfs_area(1 << 10),
        ..tiny()
    }
}

/// A pool with the folders in which everything happens, and their numbers, the root's first.
fn beginning() -> &'static (Image, Vec<InodeNumber>) {
    static BEGINNING: OnceLock<(Image, Vec<InodeNumber>)> = OnceLock::new();
    BEGINNING.get_or_init(|| {
        let recorder = Recorder::new();
        let node = Node::on(Arc::new(SystemHost), recorder.medium(), config(), None);
        let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
        let mut folders = vec![libfs.root().expect("there is a root").inode];
        folders.extend(make_folders(&libfs));
        node.daemon().expect("it runs").end(local.session());
        node.kill();
        (recorder.image(), folders)
    })
}

/// The events of one history.
struct History {
    recorder: Recorder,
    events: Vec<Event>,
    changes: Vec<ProgramChange>,
    /// The inodes and names that each of the changes touched.
    touched: Vec<Touched>,
    programs: Vec<Arc<Local>>,
    terminations: usize,
}

fn disturbed(seed: u64) -> bool {
    seed % 4 == 3
}

/// Leaves a thread of a program inside now and then, so that its daemon shuts the session out when it wants a lease.
fn disturb(host: &Arc<SimHost>, programs: &[Arc<Local>], random: &mut sim::random::Random) {
    let never = Word::new(0);
    let mut stopped = vec![0; programs.len()];
    for _ in 0..STOPS {
        let until = host.now().after(Duration::from_nanos(random.below(5 * GRACE_NS)));
        while host.now() < until {
            host.wait(&never, 0, Some(until));
        }
        let who = random.below(programs.len() as u64) as usize;
        let session = programs[who].session();
        if stopped[who] != session {
            stopped[who] = session;
            programs[who].stop_inside();
        }
    }
}

fn run(seed: u64) -> Result<History, String> {
    let (image, folders) = beginning();
    let limits = sim::Limits { steps_max: 20_000_000, ..sim::Limits::default() };
    let simulation = Simulation::new(seed, limits);
    let outside = simulation.process("daemon");
    let programs = [simulation.process("first"), simulation.process("second")];
    let recorder = Recorder::of_image(image.clone());
    let told = recorder.clone();
    let trace = Trace::new(move |index| told.returned(index as u64));
    let result = Arc::new(Mutex::new((Vec::new(), 0)));
    let (host, medium, theirs, shown) = (outside.clone(), recorder.medium(), trace.clone(), result.clone());
    let body = move || {
        let mut random = sim::random::Random::new(!seed);
        let grace = if disturbed(seed) { Duration::from_nanos(GRACE_NS) } else { Duration::from_secs(3600) };
        let node = Node::of_pool(host.clone(), medium, Config { grace, ..config() }, None);
        node.start();
        let daemon = node.daemon().expect("it runs");
        daemon.start().expect("a thread for the daemon");
        let mut threads = Vec::new();
        for (who, program) in programs.iter().enumerate() {
            let stamped = Stamped::new(program.clone());
            let limits =
                Limits { refill_blocks: 64, nodes: 12, entries: 4, purge_steps: 2, ..Limits::default() };
            let (libfs, local) = node.attach_on(stamped.clone(), Caller::ROOT, limits);
            shown.lock().expect("nobody panicked").0.push(local.clone());
            let program_of = Program::new((Arc::new(libfs), local), stamped, theirs.clone(), seed, who);
            let body = Box::new(move || program_of.run(OPERATIONS));
            threads.push(program.spawn("worker", body).expect("a thread"));
        }
        if disturbed(seed) {
            let locals = shown.lock().expect("nobody panicked").0.clone();
            disturb(&host, &locals, &mut random);
        }
        threads.into_iter().for_each(|thread| thread.join().expect("no worker failed"));
        let terminations = daemon.terminations();
        assert!(terminations.iter().all(|one| one.reason == "Grace"), "{terminations:?}");
        assert!(disturbed(seed) || terminations.is_empty(), "{terminations:?}");
        shown.lock().expect("nobody panicked").1 = terminations.len();
        daemon.stop();
    };
    drop(outside.spawn("main", Box::new(body)).expect("a thread"));
    simulation.run().map_err(|stuck| stuck.to_string())?;
    let events = trace.events();
    let changes = in_order(&events);
    let (_, touched) =
        replay(folders, changes.iter()).map_err(|error| format!("even without a crash: {error}"))?;
    let (programs, terminations) = std::mem::take(&mut *result.lock().expect("nobody panicked"));
    Ok(History { recorder, events, changes, touched, programs, terminations })
}

/// How many changes of each program.
type Cut = [usize; 2];

impl History {
    /// For each change, by program and number, how many of the other program's it depends on.
    fn dependencies(&self) -> [Vec<usize>; 2] {
        let mut last: BTreeMap<InodeNumber, Cut> = BTreeMap::new();
        let mut needed: [Vec<usize>; 2] = [vec![0], vec![0]];
        for (done, touched) in self.changes.iter().zip(&self.touched) {
            let other = 1 - done.who;
            let touched_last = touched.iter().filter_map(|inode| last.get(inode)).map(|cut| cut[other]);
            let before = *needed[done.who].last().expect("it begins with none");
            let needs = touched_last.max().unwrap_or(0).max(done.saw).max(before);
            needed[done.who].push(needs);
            for inode in touched {
                last.entry(*inode).or_default()[done.who] = done.number;
            }
        }
        needed
    }

    /// The changes that were promised after so many events.
    fn promised(&self, model: Model, events: usize) -> Cut {
        let mut returned = [0; 2];
        let mut promised = [0; 2];
        for event in &self.events[..events] {
            match event {
                Event::Begun(_) | Event::Refused { .. } => {}
                Event::Done(done) => returned[done.who] = done.number,
                Event::Synced { who, inode, begin } => {
                    let before = &self.events[..*begin];
                    for (program, promised) in promised.iter_mut().enumerate() {
                        let all = program == *who || inode.is_none();
                        let counts = |done: &ProgramChange| {
                            done.who == program
                                && (all || inode.is_some_and(|inode| self.touches(done, inode)))
                        };
                        let last = before.iter().rev().find_map(|event| match event {
                            Event::Done(done) if counts(done) => Some(done.number),
                            _ => None,
                        });
                        *promised = (*promised).max(last.unwrap_or(0));
                    }
                }
            }
        }
        if model == Model::Lines { returned } else { promised }
    }

    fn touches(&self, done: &ProgramChange, inode: InodeNumber) -> bool {
        let index = self.changes.binary_search_by_key(&done.stamp, |done| done.stamp);
        self.touched[index.expect("every change has its place")].contains(&inode)
    }

    /// The tree after a choice of changes, with one behind them that was under way.
    fn tree(&self, cut: Cut, last: Option<&ProgramChange>) -> Result<Tree, Impossible> {
        let chosen = self.changes.iter().filter(|done| done.number <= cut[done.who]);
        replay(&beginning().1, chosen.chain(last)).map(|(tree, _)| tree)
    }

    /// The change that a program was about. If its session was shut out, what it did there at last may be there, though
    /// it was done again, and perhaps not the same, in the next.
    fn under_way(&self, who: usize, events: usize) -> Option<&ProgramChange> {
        if self.terminations == 0 {
            return None;
        }
        let of_program = |event: &&Event| match event {
            Event::Begun(done) | Event::Done(done) => done.who == who,
            Event::Refused { who: other } => *other == who,
            Event::Synced { .. } => false,
        };
        let last = self.events[..events].iter().rev().find(of_program);
        let next = self.events[events..].iter().find(of_program);
        match (last, next) {
            (Some(Event::Begun(done)), _) | (_, Some(Event::Begun(done))) => Some(done),
            _ => None,
        }
    }

    /// Crashes it under both models.
    fn crash(&self, few: &Sample) -> Result<Counts, String> {
        let mut total = Counts::default();
        for model in [Model::Lines, Model::Pages] {
            let judge = |node: Arc<Node>, medium: &Medium, point: &Point| check(self, &node, medium, point);
            let counts = sample(&self.recorder, model, few, |medium| recover(model, medium), judge);
            total += counts.map_err(|violation| violation.to_string())?;
        }
        Ok(total)
    }

    /// Looks for the prefix that a tree is.
    fn judge(&self, found: &Tree, point: &Point) -> Result<(), String> {
        let events = point.returned.last().map_or(0, |index| *index as usize + 1);
        let low = self.promised(point.model, events);
        let returned = self.promised(Model::Lines, events);
        let needed = self.dependencies();
        // One more of each may have been under way.
        let high = [0, 1].map(|who: usize| (returned[who] + 1).min(needed[who].len() - 1));
        let mut near: Option<(usize, String)> = None;
        for sum in (low[0] + low[1]..=high[0] + high[1]).rev() {
            for first in low[0]..=high[0].min(sum) {
                let cut = [first, sum - first];
                if !(low[1]..=high[1]).contains(&cut[1]) {
                    continue;
                }
                let closed = needed[0][cut[0]] <= cut[1] && needed[1][cut[1]] <= cut[0];
                let under_way = [0, 1]
                    .map(|who| if cut[who] == returned[who] { self.under_way(who, events) } else { None });
                for last in [None].into_iter().chain(under_way.into_iter().flatten().map(Some)) {
                    let tree = match self.tree(cut, last) {
                        Ok(tree) => tree,
                        Err(error) if closed && last.is_none() => {
                            return Err(format!("the oracle is wrong at {cut:?}: {error}"));
                        }
                        Err(_) => continue,
                    };
                    let lost = differences(&tree, found);
                    if lost.is_empty() && closed {
                        return Ok(());
                    } else if lost.is_empty() {
                        near = Some((0, format!("{cut:?} is there without what it depends on")));
                    } else if near.as_ref().is_none_or(|(count, _)| lost.len() < *count) {
                        near = Some((lost.len(), format!("nearest to {cut:?}: {}", lost.join("; "))));
                    }
                }
            }
        }
        let (_, near) = near.unwrap_or_default();
        Err(format!("neither all that was promised, {low:?}, nor a prefix of {high:?}; {near}"))
    }
}

/// Where a tree is another than it should be.
fn differences(wanted: &Tree, found: &Tree) -> Vec<String> {
    let paths: std::collections::BTreeSet<&String> = wanted.keys().chain(found.keys()).collect();
    let differs = |path: &&&String| wanted.get(**path) != found.get(**path);
    let show = |answers: Option<&Vec<Answer>>| {
        let texts = answers.map(|answers| answers.iter().map(ToString::to_string).collect::<Vec<_>>());
        texts.map_or_else(|| "nothing".to_owned(), |texts| texts.join(" "))
    };
    let differing = paths.iter().filter(differs);
    differing
        .map(|path| format!("{path} is {} instead of {}", show(found.get(*path)), show(wanted.get(*path))))
        .collect()
}

fn recover(model: Model, medium: &Medium) -> Result<Arc<Node>, String> {
    let node = Node::of_pool(Arc::new(SystemHost), medium.clone(), config(), None);
    let recovered = node.try_start().map_err(|error| error.to_string())?;
    // On a mapped file a record that was not synced may be there without the grant that it rests on: it does not count.
    let unfounded =
        |reason| matches!(reason, CutReason::Refused(Refusal::NotHeld(_) | Refusal::RenameNotHeld));
    let allowed = |reason| model == Model::Pages && unfounded(reason);
    if recovered.cuts.iter().all(|(_, reason)| allowed(*reason)) {
        Ok(node)
    } else {
        Err(format!("an honest log was cut: {:?}", recovered.cuts))
    }
}

fn is_clean(medium: &Medium) -> Result<(), String> {
    let report = area::check::check(medium).map_err(|error| error.to_string())?;
    if report.is_clean() && report.orphans == 0 {
        Ok(())
    } else {
        Err(format!("the pool is not clean: {report:?}"))
    }
}

fn check(history: &History, node: &Arc<Node>, medium: &Medium, point: &Point) -> Result<(), String> {
    is_clean(medium)?;
    let (libfs, local) = node.attach(Caller::ROOT, Limits::default());
    let mut player = process(Arc::new(libfs), 1);
    history.judge(&whole_tree(&mut player), point)?;
    // It goes on.
    let open = Call::Open { slot: 0, path: assise_local::trees::at("after"), flags: 0o102, mode: 0o644 };
    for call in [open, Call::Pwrite { slot: 0, offset: 0, data: vec![1; 5000] }, Call::Fsync(0)] {
        let answer = player.call(&call);
        if matches!(answer, Answer::Failed(_)) {
            return Err(format!("after recovery {call:?} answered {answer}"));
        }
    }
    let daemon = node.daemon().expect("it runs");
    daemon.end(local.session());
    if !daemon.terminations().is_empty() {
        return Err(format!("after recovery {:?}", daemon.terminations()));
    }
    is_clean(medium)
}

/// Sums over all histories.
#[derive(Default)]
struct Totals {
    counts: Counts,
    changes: usize,
    syncs: usize,
    leases: u64,
    grown: u64,
    digests: u64,
    terminations: usize,
}

fn one(seed: u64, totals: &mut Totals) -> Result<(), String> {
    let history = run(seed)?;
    totals.changes += history.changes.len();
    totals.syncs += history.events.iter().filter(|event| matches!(event, Event::Synced { .. })).count();
    totals.terminations += history.terminations;
    let calls = |kind| history.programs.iter().map(|local| local.counts.of(kind)).sum::<u64>();
    totals.leases += calls(CallKind::Lease);
    totals.grown += calls(CallKind::GrowLog);
    totals.digests += calls(CallKind::Digest);
    let recovery_images = if seed.is_multiple_of(3) { 2 } else { 0 };
    let few = Sample { moments: 2, images: 2, recovery_images, seed };
    totals.counts += history.crash(&few)?;
    Ok(())
}

#[test]
fn a_dead_machine_leaves_what_was_promised_and_else_a_prefix() {
    let only: Option<u64> = std::env::var("HEARTH_SEED").ok().and_then(|text| text.parse().ok());
    let seeds = only.map_or(0..if proves() { SEEDS_PROVED } else { SEEDS }, |seed| seed..seed + 1);
    let (mut totals, mut failed) = (Totals::default(), 0);
    for seed in seeds.clone() {
        if let Err(message) = one(seed, &mut totals) {
            failed += 1;
            println!("seed {seed}: {message}");
            println!("again: HEARTH_SEED={seed} cargo test -p sim --test assise_machine_death");
        }
    }
    let Totals { counts, changes, syncs, leases, grown, digests, terminations } = totals;
    println!(
        "machine death: {} histories of {FOLDERS:?}, {changes} changes, {syncs} syncs, {leases} leases asked for, {grown} \
         logs grown, {digests} digests asked for, {terminations} sessions shut out; {} moments, {} images, {} of crashed \
         recoveries; {failed} histories failed",
        seeds.end - seeds.start,
        counts.capped,
        counts.images,
        counts.recovery_images,
    );
    assert_eq!(failed, 0, "see above");
}

/// Limit of calls that are skipped in one history, for each kind of file.
const SKIPPED: usize = 12;

/// For each kind of file: how many skipped calls a crash has shown, and how many were skipped.
type Tally = BTreeMap<&'static str, [usize; 2]>;

/// Skips calls of one verb, spread evenly over a history and one at a time.
fn skip(history: &History, (model, verb): (Model, Verb), seed: u64, tally: &mut Tally) {
    let calls = skipped::calls(&history.recorder, model, verb);
    // The images with none and with all of the pending stores, and two random ones. With none, every store that a later
    // call made durable is there and the stores of the skipped call are lost, which is the worst case.
    let few = CrashLimits {
        complete_max: 0,
        near_max: 0,
        sampled: 2,
        recovery_images: 0,
        seed,
        ..CrashLimits::quick()
    };
    for kind in ["log", "ledger", "tree", "segment"] {
        let of_kind: Vec<_> = calls.iter().filter(|call| call.file.starts_with(kind)).collect();
        let every = of_kind.len().div_ceil(SKIPPED).max(1);
        for call in of_kind.into_iter().skip(seed as usize % every).step_by(every) {
            let judge =
                |node: Arc<Node>, medium: &Medium, point: &Point| check(history, &node, medium, point);
            let recovered = |medium: &Medium| recover(model, medium);
            let shown = skipped::crash_without(&history.recorder, (model, call), &few, recovered, judge);
            let row = tally.entry(kind).or_default();
            row[0] += usize::from(shown.is_err());
            row[1] += 1;
        }
    }
}

/// The proof can fail: crashes show most fences of the update logs, and most syncs of tree and segments, that are skipped.
///
/// The fence of a ledger entry is shown less often. A thread's next fence of the ledger covers its earlier entries too, so
/// a lost entry only matters if another thread relies on it before: a record under a grant, or a later entry of that
/// thread, which recovery does not reach behind the lost one. An end of a lease and the grant after it come from the same
/// thread, for example. The fence of each entry is needed all the same, because the writer of an entry does not know what
/// other threads do next, and a fence of another thread does not cover its stores. A sync of
/// a log is shown only if an fsync has returned because of it, and the crash comes before the next sync of the log.
#[test]
fn what_is_not_made_durable_is_missed() {
    let (mut fences, mut syncs) = (Tally::new(), Tally::new());
    for seed in 0..if proves() { 40 } else { 2 } {
        let history = run(seed).expect("the history is a good one");
        skip(&history, (Model::Lines, Verb::Fence), seed, &mut fences);
        skip(&history, (Model::Pages, Verb::Sync), seed, &mut syncs);
    }
    println!("shown of skipped fences {fences:?}, of skipped syncs {syncs:?}");
    // Far below the measured shares, because each change of the daemon shifts the histories.
    let half = |[shown, skipped]: [usize; 2]| 2 * shown >= skipped && skipped > 10;
    assert!(half(fences["log"]) && half(syncs["segment"]), "{fences:?}, {syncs:?}");
    assert!(4 * syncs["tree"][0] >= syncs["tree"][1], "{syncs:?}");
    assert!(fences["ledger"][0] + syncs["ledger"][0] > 0 && syncs["log"][0] > 0, "{fences:?}, {syncs:?}");
}
