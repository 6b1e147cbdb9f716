//! A root that a crash cut in two, and another batch that writes the same nodes: no crash of that one makes the first
//! root whole again. The root takes two cache lines, and the second is often the same in both.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod support;

use area::Area;
use format::root::Root;
use pmem::Recorder;
use pmem::crash::{Failure, Limits, Model, each_image};
use support::{commit, directory, file, findings, pool, state_of, text, tiny};

const LINE: usize = 64;

#[test]
fn a_torn_root_stays_dead() {
    let first = Recorder::new();
    let mut area = pool(&first.medium(), 256, tiny());
    commit(&mut area, &[directory(10, 1, "folder")], 1).unwrap();
    let before = state_of(&area).unwrap();
    let slot = (1 + area.commit().next().get() % 2) * format::BLOCK_BYTES as u64;
    let older = first.image();
    commit(&mut area, &[file(11, 10, "one"), file(12, 10, "two")], 100).unwrap();
    let newer = first.image();
    for torn_line in [0, 1] {
        // The crash: everything but one line of the root is on the medium.
        let mut torn = newer.clone();
        let mut line = [0; LINE];
        let at = slot + (torn_line * LINE) as u64;
        older.read(area::TREE_FILE, at, &mut line);
        torn.write(area::TREE_FILE, at, &line);
        let recorder = Recorder::of_image(torn);
        let mut again = Area::open(&recorder.medium(), tiny()).unwrap();
        assert_eq!(state_of(&again).unwrap(), before);
        // As many inodes and nodes, so that the roots have the same second line, but not the same first one.
        commit(&mut again, &[file(21, 10, "ten"), file(22, 10, "six")], 200).unwrap();
        let after = state_of(&again).unwrap();
        let mut roots = [[0; size_of::<Root>()]; 2];
        newer.read(area::TREE_FILE, slot, &mut roots[0]);
        recorder.image().read(area::TREE_FILE, slot, &mut roots[1]);
        assert_eq!(roots[0][LINE..], roots[1][LINE..], "the case that is meant");
        assert_ne!(roots[0][..LINE], roots[1][..LINE]);
        let limits = Limits { sampled: 16, recovery_images: 0, ..Limits::quick() };
        let judged = each_image(&recorder, Model::Lines, &limits, |_, image| {
            let recorder = Recorder::of_image(image);
            let judge = || {
                let area = Area::open(&recorder.medium(), tiny()).map_err(text)?;
                let state = state_of(&area).map_err(text)?;
                findings(&recorder.medium())?;
                if state == before || state == after { Ok(()) } else { Err("neither state".to_owned()) }
            };
            judge().map_err(Failure::from)
        });
        judged.unwrap_or_else(|violation| panic!("line {torn_line}: {violation}"));
    }
}
