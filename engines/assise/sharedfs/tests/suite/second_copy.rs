//! A second copy of a pool that is fed the bytes of the update logs and of the ledger, and nothing else, becomes the same
//! tree, item by item: whatever the head decided stands in the ledger. The copy has other batch limits, and puts its
//! blocks elsewhere.

use crate::operations::{World, config, make_pool};
use crate::still::StillHost;
use crate::support::{Draws, Op, Step, cases, file, unlink};
use area::Area;
use format::node::{InodeItem, ItemKind, Key};
use pmem::{Medium, Recorder};
use sharedfs::{Config, Executed, execute_ledger};
use std::collections::{BTreeMap, BTreeSet};
use zerocopy::FromBytes;

/// Six writes of so many bytes fit the log.
const WRITE_BYTES_MAX: usize = 64 << 10;

/// Histories of a run; `make prove-properties` asks for more.
fn histories() -> u64 {
    std::env::var("HEARTH_HISTORIES").ok().and_then(|count| count.parse().ok()).unwrap_or(120)
}

/// Limits of the copy: each batch ends elsewhere, and each segment, and removals take more steps.
fn other_config(draws: &mut Draws) -> Config {
    let config = config();
    let area = area::Limits {
        segment_blocks: 300,
        reap_items_max: 1,
        batch_blocks_max: 2,
        cached_nodes: 16,
        ..config.area
    };
    Config {
        batch_records: 1 + draws.below(7) as usize,
        batch_bytes: 1 + draws.below(20_000) as usize,
        batch_changes: 1 + draws.below(9) as usize,
        reap_items: 1 + draws.below(3) as usize,
        area,
        ..config
    }
}

/// Copies the bytes of all logs, then those of the ledger.
fn copy_logs(from: &Medium, to: &Medium) {
    let names = from.list().unwrap();
    let logs = names.iter().filter(|name| name.starts_with("log-"));
    for name in logs.chain(names.iter().filter(|name| *name == "ledger")) {
        let source = from.open(name).unwrap();
        let target = match to.open(name) {
            Ok(target) if target.bytes() == source.bytes() => target,
            _ => to.create(name, source.bytes()).unwrap(),
        };
        let mut bytes = vec![0; source.bytes() as usize];
        source.read(0, &mut bytes).unwrap();
        target.write(0, &bytes);
    }
}

/// The items of a tree but those that are each copy's own: where blocks lie. Of extents what they make of a file is
/// compared, and how many blocks there are. Before the end of a history the table in the tree may be older than the
/// ledger, and of inodes without a name a part may be gone already.
pub fn items(medium: &Medium, at_end: bool) -> (BTreeMap<Key, Vec<u8>>, BTreeMap<u64, Vec<u8>>) {
    let area = Area::open(medium, config().area).unwrap();
    let (mut items, mut contents) = (BTreeMap::new(), BTreeMap::new());
    let orphans = area.orphans(format::InodeNumber::NONE, usize::MAX).unwrap();
    for (key, value) in area.range(None, usize::MAX).unwrap() {
        if !at_end && orphans.iter().any(|inode| inode.get() == key.object()) {
            continue;
        }
        match key.kind().unwrap() {
            ItemKind::Extent | ItemKind::Segment => continue,
            ItemKind::Log | ItemKind::Life => {}
            ItemKind::Grant | ItemKind::RenameGrant | ItemKind::LocksGrant | ItemKind::SubtreeGrant => {}
            ItemKind::Inode => {
                let item = InodeItem::read_from_bytes(&value).unwrap();
                let mut bytes = vec![0; item.size.get().min(1 << 20) as usize];
                let inode = format::InodeNumber::new(key.object());
                let there = area.read(inode, 0, &mut bytes).unwrap();
                bytes.truncate(there);
                contents.insert(key.object(), bytes);
            }
            ItemKind::Symlink | ItemKind::Xattr | ItemKind::Entry | ItemKind::Orphan => {}
        }
        let of_table = matches!(
            key.kind().unwrap(),
            ItemKind::Log
                | ItemKind::Life
                | ItemKind::Grant
                | ItemKind::RenameGrant
                | ItemKind::LocksGrant
                | ItemKind::SubtreeGrant
        );
        if at_end || !of_table {
            items.insert(key, value.to_vec());
        }
    }
    (items, contents)
}

fn execute(head: &Medium, copy: &Medium, config: &Config) -> Executed {
    copy_logs(head, copy);
    let executed = execute_ledger(&*StillHost::again(), copy, config).unwrap();
    assert_eq!(executed.damaged, []);
    executed
}

fn any_step(draws: &mut Draws, steps: &[Step]) -> Step {
    steps[draws.below(steps.len() as u64) as usize].clone()
}

fn history(seed: u64) -> Executed {
    let mut draws = Draws(seed);
    let steps: Vec<Step> = cases::base()
        .into_iter()
        .chain(cases::all().into_iter().flat_map(|case| case.before.into_iter().flatten().chain(case.batch)))
        .filter(|step| !matches!(&step.op, Op::Reap { .. }))
        .filter(|step| !matches!(&step.op, Op::Write { bytes, .. } if bytes.len() > WRITE_BYTES_MAX))
        .collect();
    let mut world = World::new([]);
    let head = world.recorder.medium();
    let copy = Recorder::new().medium();
    make_pool(&copy, config().ledger_bytes);
    let other = other_config(&mut draws);
    let (mut made, mut grown) = (BTreeSet::new(), 0);
    for step in cases::base() {
        made.insert(step.inode);
        world.step(&step);
    }
    execute(&head, &copy, &other);
    for round in 0..60 {
        if round % 6 == 5 {
            // Room for the next ones: the log comes round only over what the copy has executed.
            world.digest_alone();
            execute(&head, &copy, &other);
        }
        match draws.below(20) {
            0..=11 => {
                let step = any_step(&mut draws, &steps);
                // A LibFS gives a number out once.
                let created = match step.op {
                    Op::Create { .. } | Op::CreateUnnamed { .. } => step.inode,
                    Op::Rename { whiteout, .. } => whiteout,
                    _ => 0,
                };
                let is_new = created == 0 || made.insert(created);
                if is_new && world.fits(&step) {
                    world.step(&step);
                }
            }
            12 | 13 => world.digest_alone(),
            14 => world.finish(),
            15 => world.hand_over(),
            16 => {
                world.hand_over();
                copy_logs(&head, &copy);
                world.end_two();
            }
            17 if grown < 2 && draws.chance(30) => {
                world.grow();
                grown += 1;
            }
            _ => {
                execute(&head, &copy, &other);
                let (ours, theirs) = (items(&head, false), items(&copy, false));
                assert!(ours == theirs, "seed {seed}: {:#?}", difference(&ours.0, &theirs.0));
            }
        }
        // Before the head writes over what the copy has not executed.
        execute(&head, &copy, &other);
    }
    // The next daemon's entries name what the logs hold now.
    copy_logs(&head, &copy);
    world.take_over();
    let executed = execute(&head, &copy, &other);
    let (ours, theirs) = (items(&head, true), items(&copy, true));
    assert!(ours == theirs, "seed {seed}, at the end: {:#?}", difference(&ours.0, &theirs.0));
    for medium in [&head, &copy] {
        assert_eq!(area::check::check(medium).unwrap().findings, Vec::<String>::new(), "seed {seed}");
    }
    executed
}

pub type Items = BTreeMap<Key, Vec<u8>>;

/// The items that only one of two trees has.
pub fn difference(one: &Items, two: &Items) -> Vec<String> {
    let only = |name: &str, here: &Items, there: &Items| {
        let here = here.iter().filter(|(key, value)| there.get(key) != Some(*value));
        here.map(|(key, value)| format!("{name}: {}", area::inspect::line(key, value))).collect::<Vec<_>>()
    };
    [only("head", one, two), only("copy", two, one)].concat()
}

#[test]
fn a_copy_that_executes_the_ledger_has_the_same_tree() {
    let (mut records, mut reaped) = (0, 0);
    for seed in 0..histories() {
        let executed = history(seed);
        records += executed.records;
        reaped += executed.reaped;
    }
    println!("{} histories, at their ends {records} records and {reaped} removals", histories());
}

/// A log that removes an inode and makes one of the same number, at once: the head removes it with the record, a copy only
/// by the entry behind, so the two are never in one batch.
#[test]
fn a_number_that_is_given_out_twice_makes_no_difference() {
    let mut world = World::new([]);
    let head = world.recorder.medium();
    let copy = Recorder::new().medium();
    make_pool(&copy, config().ledger_bytes);
    for step in [file(10, 1, "a"), unlink(10, 1, "a"), file(10, 1, "b")] {
        world.step(&step);
    }
    copy_logs(&head, &copy);
    world.digest_alone();
    execute(&head, &copy, &other_config(&mut Draws(1)));
    let (ours, theirs) = (items(&head, false), items(&copy, false));
    assert!(ours == theirs, "{:#?}", difference(&ours.0, &theirs.0));
    assert!(ours.0.values().any(|value| value.ends_with(b"b")), "the second file is there");
}
