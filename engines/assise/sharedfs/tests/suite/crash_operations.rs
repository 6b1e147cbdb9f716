//! Crashes around each operation as a record: appended to a log, synced, digested. The cases are every row of the
//! area's table, and every ordered pair of one representative a kind; the work of daemons beside records (a sync, a
//! digest, a log that grows, a lease that goes to another session, a session that ends) counts as kinds too.
//!
//! The oracle: the tree is the one that the naive model has after some number of the operations, at least those that
//! were promised: on persistent memory (lines) all that returned, on a mapped file (pages) all that was synced. It is
//! sound, and a new session can use it. A slice is made unless HEARTH_PROVE=1.

use crate::client::{Client, FILE, ROOT, user};
use crate::operations::{SYNCED, World, config, named, tree};
use crate::still::StillHost;
use crate::support::{
    AreaState, Op, Step, allocate, at, cases, create, directory, exchange, file, link, punch, rename,
    rename_with_whiteout, rmdir, set_attr, set_xattr, step, symlink, truncate, unlink, unnamed, write,
};
use format::record::{FileType, SET_ATIME, SET_MODE, SET_MTIME, SET_UID};
use pmem::Medium;
use pmem::crash::{Counts, Limits, Model, Point, Violation, crash_recorded};
use pmem::progress;
use pmem::recorded::Verb;
use sharedfs::Daemon;
use std::sync::Arc;

fn proving() -> bool {
    std::env::var_os("HEARTH_PROVE").is_some_and(|value| value == "1")
}

/// Images of one operation.
fn limits_of_one() -> Limits {
    if proving() {
        // Each image of a torn record of many lines has to be judged: of those that differ in two lines of it, a part.
        return Limits { near_max: 40_000, recovery_every: 16, seed: 21, ..Limits::default() };
    }
    Limits { complete_max: 2, near_max: 1, sampled: 1, recovery_images: 2, recovery_every: 1, seed: 21 }
}

/// Images of two: at most 64 at a point.
fn limits_of_two() -> Limits {
    if proving() {
        return Limits {
            complete_max: 64,
            near_max: 30,
            sampled: 32,
            recovery_images: 4,
            recovery_every: 16,
            seed: 22,
        };
    }
    Limits { complete_max: 1, near_max: 1, sampled: 1, recovery_images: 0, recovery_every: 1, seed: 22 }
}

/// Opens what a crash left and judges it by the states that may be there.
fn crash(world: &World, model: Model, limits: &Limits) -> Result<Counts, Box<Violation>> {
    let states: Vec<AreaState> = world.states.iter().map(named).collect();
    crash_recorded(&world.recorder, model, limits, recover, |daemon, medium, point| {
        judge(&states, &daemon, medium, point)
    })
}

fn recover(medium: &Medium) -> Result<Arc<Daemon>, String> {
    let opened = Daemon::open(StillHost::again(), medium, config()).map_err(|error| error.to_string());
    opened.map(|(daemon, _)| Arc::new(daemon))
}

fn judge(states: &[AreaState], daemon: &Arc<Daemon>, medium: &Medium, point: &Point) -> Result<(), String> {
    let returned = point.returned.iter().map(|mark| mark % SYNCED).max().unwrap_or(0);
    let promised = match point.model {
        Model::Lines => returned,
        Model::Pages => point.returned.iter().filter_map(|mark| mark.checked_sub(SYNCED)).max().unwrap_or(0),
    };
    let found = tree(medium)?;
    let last = states.len() as u64 - 1;
    let may_be = promised..=(returned + 1).min(last);
    if !may_be.clone().any(|number| states[number as usize] == found) {
        let other = states.iter().position(|state| *state == found);
        return Err(format!("the tree is that after {other:?} operations, not after {may_be:?}"));
    }
    crate::support::findings(medium)?;
    let mut client = Client::attach_as(daemon, user(0), 9);
    client.write_lease(ROOT);
    let (after, made) = client.create(ROOT, b"after", FILE | 0o600);
    if !made || !client.write(after, 0, b"goes on") || client.digest(true).is_err() {
        return Err(format!("what was recovered cannot be used: {:?}", daemon.terminations()));
    }
    crate::support::findings(medium)
}

/// Rows that no log holds: a reap is no record.
fn is_record(case: &cases::Case) -> bool {
    !case.batch.iter().any(|step| matches!(step.op, Op::Reap { .. }))
}

/// Does one row of the table; its records are crashed.
fn world_of(case: &cases::Case) -> World {
    let base = cases::base();
    let mut world = World::new(base.iter().chain(case.before.iter().flatten()));
    world.record();
    for step in &case.batch {
        world.step(step);
    }
    world.sync();
    world.digest();
    world.finish();
    world.agrees();
    world
}

/// Rows of the table under one model.
fn prove_ones(model: Model) {
    let rows = cases::all().into_iter().filter(is_record).enumerate();
    // The slice takes turns: each row under one of the models.
    let turn = |index: usize| proving() || index.is_multiple_of(2) == (model == Model::Lines);
    let rows: Vec<_> = rows.filter(|(index, _)| turn(*index)).collect();
    let name = |(_, case): &(usize, cases::Case)| format!("sharedfs, one, {model:?}, {}", case.name);
    let proved = progress::cases(&rows, name, |(index, case)| {
        let mut limits = limits_of_one();
        if !proving() && index % 16 >= 2 {
            limits.recovery_images = 0;
        }
        crash(&world_of(case), model, &limits)
    });
    let total = proved.unwrap_or_else(|violation| panic!("{violation}"));
    println!("sharedfs, single operations, {model:?}: {total}");
    assert!(total.images > 500 && total.recovery_images > 500, "{total}");
}

#[test]
fn every_operation_survives_a_crash_in_persistent_memory() {
    prove_ones(Model::Lines);
}

#[test]
fn every_operation_survives_a_crash_in_a_file() {
    prove_ones(Model::Pages);
}

/// One representative of a kind: applied to the first of these inodes that fits.
enum Deed {
    Record(Vec<Step>),
    Sync,
    Digest,
    Grow,
    HandOver,
    EndOther,
}

/// All kinds.
fn kinds() -> Vec<(&'static str, Deed)> {
    [contents(), names(), attributes(), beside()].into_iter().flatten().collect()
}

fn contents() -> Vec<(&'static str, Deed)> {
    use Deed::Record;
    vec![
        ("write", Record(vec![write(10, 4090, 7, 4200), write(22, 10, 7, 5)])),
        ("append", Record(vec![write(10, 10_000, 8, 5000), write(22, 100, 8, 40)])),
        ("truncate down", Record(vec![truncate(10, 4100), truncate(22, 50)])),
        ("truncate up", Record(vec![truncate(10, 30_000), truncate(22, 9_000)])),
        ("allocate", Record(vec![allocate(10, 9_000, 9_000, false), allocate(22, 0, 9_000, true)])),
        ("punch", Record(vec![punch(10, 4000, 4300), punch(22, 10, 20)])),
    ]
}

fn names() -> Vec<(&'static str, Deed)> {
    use Deed::Record;
    let open = |inode, parent, name: &str| {
        step(inode, Op::Unlink { at: at(parent, name), directory: false, keep_open: true })
    };
    let pipe = |inode, name: &str| create(inode, at(20, name), FileType::Fifo);
    vec![
        ("create", Record(vec![file(40, 20, "new"), file(41, 20, "newer")])),
        ("mkdir", Record(vec![directory(42, 20, "folder"), directory(43, 1, "another folder")])),
        ("symlink", Record(vec![symlink(44, 20, "symlink", b"t"), symlink(45, 1, "symlink", b"t")])),
        ("mknod", Record(vec![pipe(46, "pipe"), pipe(47, "another pipe")])),
        ("link", Record(vec![link(10, 20, "again"), link(22, 1, "again"), link(10, 20, "and again")])),
        ("unlink the last name", Record(vec![unlink(22, 20, "g"), unlink(10, 1, "f"), unlink(10, 20, "g")])),
        ("unlink one of two names", Record(vec![unlink(11, 1, "h"), unlink(11, 1, "h2")])),
        (
            "unlink an open file",
            Record(vec![open(10, 1, "f"), open(22, 20, "g"), open(22, 1, "f"), open(10, 20, "g")]),
        ),
        ("rmdir", Record(vec![rmdir(30, 1, "empty"), rmdir(21, 20, "e"), rmdir(21, 1, "moved")])),
        (
            "rename",
            Record(vec![
                rename(22, at(20, "g"), at(20, "g2"), 0),
                rename(10, at(1, "f"), at(20, "g2"), 0),
                rename(11, at(1, "h"), at(20, "g3"), 0),
            ]),
        ),
        (
            "rename onto a file",
            Record(vec![
                rename(10, at(1, "f"), at(20, "g"), 22),
                rename(12, at(1, "s"), at(1, "h2"), 11),
                rename(12, at(1, "s"), at(1, "h"), 11),
                rename(11, at(1, "h"), at(1, "s"), 12),
                rename(11, at(1, "s"), at(1, "h2"), 11),
            ]),
        ),
        (
            "rename a directory",
            Record(vec![
                rename(21, at(20, "e"), at(1, "moved"), 0),
                rename(30, at(1, "empty"), at(20, "m"), 0),
            ]),
        ),
        (
            "rename with a whiteout",
            Record(vec![
                rename_with_whiteout(22, at(20, "g"), at(1, "new"), 0, 48),
                rename_with_whiteout(10, at(1, "f"), at(20, "new"), 0, 49),
                rename_with_whiteout(11, at(1, "h"), at(20, "new"), 0, 49),
            ]),
        ),
        ("create without a name", Record(vec![unnamed(50, 20, true), link(50, 1, "named")])),
        (
            "exchange",
            Record(vec![
                exchange(10, at(1, "f"), at(20, "g"), 22),
                exchange(22, at(1, "f"), at(20, "g"), 10),
                exchange(11, at(1, "h2"), at(1, "s"), 12),
                exchange(12, at(1, "h2"), at(1, "s"), 11),
            ]),
        ),
    ]
}

fn attributes() -> Vec<(&'static str, Deed)> {
    use Deed::Record;
    let remove = |inode, name: &str| step(inode, Op::RemoveXattr { name: name.into() });
    let times = SET_ATIME | SET_MTIME;
    vec![
        ("mode", Record(vec![set_attr(10, SET_MODE), set_attr(20, SET_MODE)])),
        ("owner", Record(vec![set_attr(10, SET_UID), set_attr(20, SET_UID)])),
        ("times", Record(vec![set_attr(10, times), set_attr(20, times)])),
        ("small attribute", Record(vec![set_xattr(10, "user.b", 3, 20), set_xattr(20, "user.b", 3, 20)])),
        (
            "large attribute",
            Record(vec![set_xattr(10, "user.c", 4, 9_000), set_xattr(20, "user.c", 4, 9_000)]),
        ),
        ("remove an attribute", Record(vec![remove(10, "user.a"), remove(20, "user.a")])),
    ]
}

fn beside() -> Vec<(&'static str, Deed)> {
    vec![
        ("sync", Deed::Sync),
        ("digest", Deed::Digest),
        ("grow", Deed::Grow),
        ("hand over", Deed::HandOver),
        ("end of another", Deed::EndOther),
    ]
}

impl Deed {
    fn act(&self, world: &mut World) {
        match self {
            Self::Record(steps) => {
                let step = steps.iter().find(|step| world.fits(step));
                let step = step.unwrap_or_else(|| panic!("none of {steps:?} fits"));
                world.step(step);
            }
            Self::Sync => world.sync(),
            Self::Digest => world.digest(),
            Self::Grow => world.grow(),
            Self::HandOver => world.hand_over(),
            Self::EndOther => world.end_other(),
        }
    }
}

/// The work of daemons beside records, with the edge cases of each: logs that are allocated, grow and go among them.
fn beside_records() -> Vec<(&'static str, Vec<Deed>)> {
    use Deed::{Digest, EndOther, Grow, HandOver, Record, Sync};
    let record = |number: u64| Record(vec![file(40 + number, 20, format!("new-{number}"))]);
    vec![
        ("sync: nothing", vec![Sync]),
        ("sync: one record", vec![record(0), Sync]),
        ("digest: nothing", vec![Digest]),
        ("digest: twice", vec![record(0), Digest, record(1), Digest]),
        ("log: the first of a session", vec![HandOver]),
        ("log: one more beside records", vec![record(0), HandOver]),
        ("log: a lease goes and comes back", vec![HandOver, record(0)]),
        ("log: its end", vec![EndOther]),
        ("log: one more after an end", vec![EndOther, HandOver]),
        ("grow: an empty log", vec![Grow]),
        ("grow: with records", vec![record(0), record(1), Grow]),
        ("grow: and records behind it", vec![Grow, record(0)]),
        ("grow: up to the largest", vec![record(0), Grow, Grow, Grow, record(1)]),
        ("grow: beside another log", vec![HandOver, Grow]),
    ]
}

#[test]
fn what_is_done_beside_records_survives_a_crash() {
    for model in [Model::Lines, Model::Pages] {
        let name = |(name, _): &(&str, Vec<Deed>)| format!("sharedfs, beside records, {model:?}, {name}");
        let proved = progress::cases(&beside_records(), name, |(_, deeds)| {
            let mut world = World::new(&cases::base());
            world.record();
            deeds.iter().for_each(|deed| deed.act(&mut world));
            world.finish();
            world.agrees();
            crash(&world, model, &limits_of_one())
        });
        let total = proved.unwrap_or_else(|violation| panic!("{violation}"));
        println!("sharedfs, beside records, {model:?}: {total}");
        assert!(total.images > 100 && total.recovery_images > 100, "{total}");
    }
}

/// Does two kinds, one after the other; every second pair is digested once, the others are synced between.
fn world_of_two(first: &Deed, second: &Deed, synced: bool) -> World {
    let mut base = cases::base();
    base.push(set_xattr(20, "user.a", 1, 10));
    let mut world = World::new(&base);
    world.record();
    first.act(&mut world);
    if synced {
        world.sync();
    }
    second.act(&mut world);
    world.digest();
    world.finish();
    world.agrees();
    world
}

/// Of the pairs one in so many, under one model.
fn prove_twos(model: Model, one_in: usize) {
    let kinds = kinds();
    assert!(kinds.len() <= 32, "{} kinds", kinds.len());
    type Kind = (&'static str, Deed);
    let all = kinds.iter().flat_map(|first| kinds.iter().map(move |second| (first, second))).enumerate();
    let chosen: Vec<(usize, (&Kind, &Kind))> = all.filter(|(index, _)| index % one_in == 0).collect();
    let pairs = chosen.len() as u64;
    let name = |(_, (first, second)): &(usize, (&Kind, &Kind))| {
        format!("sharedfs, two, {model:?}, {} and {}", first.0, second.0)
    };
    let proved = progress::cases(&chosen, name, |(index, (first, second))| {
        crash(&world_of_two(&first.1, &second.1, index % 2 == 1), model, &limits_of_two())
    });
    let total = proved.unwrap_or_else(|violation| panic!("{violation}"));
    println!("sharedfs, {pairs} pairs of {} kinds, {model:?}: {total}", kinds.len());
    assert!(total.images > 10 * pairs, "{total}");
}

#[test]
fn pairs_of_operations_survive_a_crash_in_persistent_memory() {
    prove_twos(Model::Lines, if proving() { 1 } else { 23 });
}

#[test]
fn pairs_of_operations_survive_a_crash_in_a_file() {
    prove_twos(Model::Pages, if proving() { 1 } else { 19 });
}

/// A ledger as small as it may be, over which a lease goes to and fro until it has come round.
#[test]
fn a_ledger_that_comes_round_survives_a_crash() {
    const LEDGER_BYTES: u64 = 2 * format::BLOCK_BYTES as u64;
    let run = || {
        let mut world = World::with_ledger(LEDGER_BYTES, []);
        world.record();
        for number in 0..40 {
            world.hand_over();
            world.step(&file(100 + number, 1, format!("ours-{number}")));
        }
        world.finish();
        world.agrees();
        world
    };
    let mut limits = limits_of_two();
    if proving() {
        limits.recovery_images = 2;
    }
    let mut total = Counts::default();
    for model in [Model::Lines, Model::Pages] {
        let name = format!("sharedfs, the ledger, {model:?}");
        let proved = progress::case(&name, || crash(&run(), model, &limits));
        total += proved.unwrap_or_else(|violation| panic!("{name}: {violation}"));
    }
    println!("sharedfs, the ledger comes round: {total}");
    assert!(total.images > 500, "{total}");
}

/// The proof can fail: of the syncs and persists of an operation that is synced and digested, those that are left
/// out where it matters are found.
#[test]
fn what_is_left_out_of_an_operation_is_found() {
    let case = cases::all().into_iter().find(|case| case.name == "rename: onto a file").expect("a row");
    let base = cases::base();
    let lying = |verb: Verb, call: Option<u64>| {
        let mut world = World::new(base.iter());
        world.record();
        let before = world.recorder.calls(verb);
        if let Some(call) = call {
            world.recorder.leave_out(verb, before + call);
        }
        case.batch.iter().for_each(|step| world.step(step));
        world.sync();
        world.digest();
        let calls = world.recorder.calls(verb) - before;
        (world, calls)
    };
    let few = Limits {
        complete_max: 16,
        near_max: 32,
        sampled: 8,
        recovery_images: 0,
        recovery_every: 1,
        seed: 23,
    };
    for verb in [Verb::Sync, Verb::Persist] {
        let calls = lying(verb, None).1;
        let found = (0..calls).filter(|call| {
            let world = lying(verb, Some(*call)).0;
            [Model::Lines, Model::Pages].into_iter().any(|model| crash(&world, model, &few).is_err())
        });
        let found = found.count();
        println!("{verb:?}: {calls} left out, {found} found");
        assert!(found >= 2, "{found} of {calls} calls of {verb:?} matter");
    }
}
