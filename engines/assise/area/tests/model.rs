//! The area against the naive model: every case of the table, and random sequences with reopening.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod support;

use area::{Area, AreaError};
use format::record::{FileType, SET_ALL};
use pmem::recorded::Recorder;
use support::model::Contradiction;
use support::{
    AreaState, At, COLLIDING, COLLIDING_TOO, Draws, Op, Step, VERSION, at, cases, findings, model, pool,
    proving, state_of, step, tiny,
};

#[test]
fn every_case_does_what_the_model_does() {
    let cases = cases::all();
    assert!(cases.len() >= 40, "{} cases", cases.len());
    for case in &cases {
        let recorder = Recorder::new();
        let medium = recorder.medium();
        let mut area = pool(&medium, 256, tiny());
        let mut expected = model::new();
        let mut sequence = 1;
        let base = [cases::base()];
        for steps in base.iter().chain(&case.before).chain([&case.batch]) {
            support::commit_in(&mut area, steps, sequence, case.gathers)
                .unwrap_or_else(|error| panic!("{}: {error}", case.name));
            for step in steps {
                model::apply(&mut expected, step, sequence)
                    .unwrap_or_else(|_| panic!("{}: model", case.name));
                sequence += 1;
            }
            assert_eq!(state_of(&area).unwrap(), expected, "{}", case.name);
            findings(&medium).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        }
        let again = Area::open(&medium, tiny()).unwrap();
        assert_eq!(state_of(&again).unwrap(), expected, "{}, opened again", case.name);
    }
    println!("{} cases", cases.len());
}

/// Draws an operation. Most are possible; some contradict the state in every way that there is.
fn draw(draws: &mut Draws, state: &AreaState, next_inode: &mut u64) -> Step {
    let inodes: Vec<u64> = state.keys().copied().collect();
    let directories: Vec<u64> = inodes.iter().copied().filter(|inode| state[inode].mode >> 12 == 4).collect();
    let any = *draws.of(&inodes);
    match draws.below(20) {
        0..=5 => {
            let files: Vec<u64> = inodes.into_iter().filter(|inode| state[inode].mode >> 12 == 8).collect();
            let file = if files.is_empty() || draws.chance(3) { any } else { *draws.of(&files) };
            draw_contents(draws, file)
        }
        6 if draws.chance(40) => {
            let inode = if draws.chance(97) { *next_inode } else { any };
            *next_inode += 1;
            let parent = if draws.chance(95) { *draws.of(&directories) } else { any };
            step(inode, Op::CreateUnnamed { parent, linkable: draws.chance(70) })
        }
        6..=9 => {
            let parent = if draws.chance(95) { *draws.of(&directories) } else { any };
            let types = [
                FileType::Regular,
                FileType::Regular,
                FileType::Directory,
                FileType::Symlink,
                FileType::Fifo,
            ];
            let file_type = *draws.of(&types);
            let inode = if draws.chance(97) { *next_inode } else { any };
            *next_inode += 1;
            let target = if file_type == FileType::Symlink {
                vec![b't'; 1 + draws.below(3000) as usize]
            } else {
                vec![]
            };
            let at = draw_place(draws, parent);
            step(inode, Op::Create { at, file_type, target })
        }
        10 => step(
            match state.iter().find(|(_, inode)| inode.orphan && inode.parent != 0) {
                Some((unnamed, _)) if draws.chance(50) => *unnamed,
                _ => any,
            },
            Op::Link {
                at: {
                    let parent = *draws.of(&directories);
                    draw_place(draws, parent)
                },
            },
        ),
        11..=13 => {
            let (at, inode) = draw_entry(draws, state, &directories);
            let is_directory = state.get(&inode).is_some_and(|found| found.mode >> 12 == 4);
            let directory = is_directory != draws.chance(5);
            step(inode, Op::Unlink { at, directory, keep_open: draws.chance(20) })
        }
        14..=16 => {
            let (old, inode) = draw_entry(draws, state, &directories);
            let (new, replaced) = if draws.chance(50) {
                draw_entry(draws, state, &directories)
            } else {
                let parent = *draws.of(&directories);
                (draw_place(draws, parent), 0)
            };
            let keep_open = draws.chance(10);
            let exchange = draws.chance(30);
            let whiteout = match !exchange && draws.chance(30) {
                true if draws.chance(95) => *next_inode,
                true => any,
                false => 0,
            };
            *next_inode += u64::from(whiteout != 0);
            step(inode, Op::Rename { old, new, replaced, exchange, keep_open, whiteout })
        }
        17 => step(
            any,
            Op::SetAttr {
                mask: draws.below(u64::from(SET_ALL) + 1) as u32,
                mode: draws.below(0o10000) as u32,
                uid: draws.below(9) as u32,
                gid: draws.below(9) as u32,
                atime_ns: draws.below(1000) as i64 - 500,
                mtime_ns: draws.below(1000) as i64,
            },
        ),
        18 => {
            let name = format!("user.{}", draws.below(4)).into_bytes();
            if draws.chance(30) {
                return step(any, Op::RemoveXattr { name });
            }
            let length_max = if draws.chance(5) { 20_000 } else { 1500 };
            let length = draws.below(length_max);
            step(any, Op::SetXattr { name, value: vec![draws.below(256) as u8; length as usize] })
        }
        _ => step(any, Op::Reap { items_max: 3 }),
    }
}

fn draw_contents(draws: &mut Draws, inode: u64) -> Step {
    let edges = [0, 1, 7, 100, 4095, 4096, 4097, 8192, 12_288];
    let mut offset = *draws.of(&edges) + 4096 * draws.below(8);
    let length = if draws.chance(40) { *draws.of(&edges) } else { draws.below(9000) };
    if draws.chance(30) {
        offset += draws.below(5000);
    }
    match draws.below(10) {
        0..=5 => support::write(inode, offset, draws.below(256) as u8, length as usize),
        6 => support::truncate(inode, offset),
        7 => support::allocate(inode, offset, length + 1, draws.chance(50)),
        _ => support::punch(inode, offset, length + 1),
    }
}

fn draw_place(draws: &mut Draws, parent: u64) -> At {
    let slot = draws.below(2);
    match draws.below(10) {
        0 => At { slot, ..at(parent, *draws.of(&COLLIDING)) },
        1 => At { slot, ..at(parent, *draws.of(&COLLIDING_TOO)) },
        2 => at(parent, "n".repeat(200 + draws.below(55) as usize)),
        _ => at(parent, format!("name-{}", draws.below(30))),
    }
}

fn draw_entry(draws: &mut Draws, state: &AreaState, directories: &[u64]) -> (At, u64) {
    let full: Vec<u64> =
        directories.iter().copied().filter(|inode| !state[inode].entries.is_empty()).collect();
    if full.is_empty() || draws.chance(3) {
        let parent = *draws.of(directories);
        return (draw_place(draws, parent), 1);
    }
    let parent = *draws.of(&full);
    let entries: Vec<_> = state[&parent].entries.iter().collect();
    let (name, (inode, cookie, _)) = *draws.of(&entries);
    let mut found = at(parent, name);
    found.slot = cookie - found.cookie().get();
    (found, *inode)
}

/// Runs batches of random steps; gives how many steps were applied and how many refused.
fn run(seed: u64, batches: u64) -> (u64, u64) {
    let mut draws = Draws(seed);
    let recorder = Recorder::new();
    let medium = recorder.medium();
    let limits = area::Limits { capacity_blocks: 400, segment_blocks: 60, ..tiny() };
    let mut area = pool(&medium, 600, limits);
    let mut expected = model::new();
    let (mut sequence, mut next_inode, mut applied, mut refused) = (1, 2, 0, 0);
    for number in 0..batches {
        let mut planned = expected.clone();
        let mut batch = area.begin().unwrap();
        // Every other batch gathers its writes: the tree is the same afterwards.
        if draws.chance(50) {
            batch.gather_writes();
        }
        let (mut full, mut dropped) = (false, false);
        for _ in 0..1 + draws.below(12) {
            let step = draw(&mut draws, &planned, &mut next_inode);
            let mut next = planned.clone();
            let wanted = model::apply(&mut next, &step, sequence);
            match step.apply(&mut batch, sequence) {
                Ok(area::Applied::Orphaned(inode)) if !next.contains_key(&inode.get()) => {
                    while !batch.reap(inode, 64).unwrap() {}
                    planned = next;
                }
                Ok(_) => {
                    assert_eq!(wanted, Ok(()), "seed {seed}: {step:?}");
                    planned = next;
                }
                Err(AreaError::Refused(why)) => {
                    assert_eq!(wanted, Err(Contradiction), "seed {seed}: {why}: {step:?}");
                    refused += 1;
                    continue;
                }
                Err(AreaError::NoSpace | AreaError::BatchFull) => {
                    full = true;
                    break;
                }
                Err(AreaError::Overfull) => {
                    (full, dropped) = (true, true);
                    break;
                }
                Err(error) => panic!("seed {seed}: {error}: {step:?}"),
            }
            applied += 1;
            sequence += 1;
        }
        if draws.chance(10) || dropped {
            drop(batch);
        } else {
            match batch.commit(VERSION) {
                Ok(committed) => {
                    if draws.chance(80) || full {
                        area.release(committed.commit).unwrap();
                    }
                    expected = planned;
                }
                Err(AreaError::Overfull) => full = true,
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
        if number % 8 == 0 || number + 1 == batches {
            assert_eq!(state_of(&area).unwrap(), expected, "seed {seed}, batch {number}");
            findings(&medium).unwrap_or_else(|error| panic!("seed {seed}, batch {number}: {error}"));
        }
        if draws.chance(10) {
            area = Area::open(&medium, limits).unwrap();
            assert_eq!(state_of(&area).unwrap(), expected, "seed {seed}, opened after batch {number}");
        }
        if full {
            shrink(&mut area, &mut expected, &mut sequence);
        }
    }
    (applied, refused)
}

/// Makes room: cuts every file, which must always be possible.
fn shrink(area: &mut Area, expected: &mut AreaState, sequence: &mut u64) {
    let files: Vec<u64> = expected.keys().copied().filter(|inode| expected[inode].mode >> 12 == 8).collect();
    for inode in files {
        let cut = support::truncate(inode, 0);
        support::commit(area, std::slice::from_ref(&cut), *sequence).unwrap();
        model::apply(expected, &cut, *sequence).unwrap();
        *sequence += 1;
    }
}

#[test]
fn random_sequences_agree_with_the_model() {
    let (seeds, batches) = if proving() { (20_000, 120) } else { (200, 80) };
    let (mut applied, mut refused) = (0, 0);
    for seed in 1..=seeds {
        let (more_applied, more_refused) = run(seed, batches);
        applied += more_applied;
        refused += more_refused;
    }
    println!("{seeds} sequences, {applied} operations applied, {refused} refused");
    assert!(applied > refused && refused > 100, "{applied} applied, {refused} refused");
}
