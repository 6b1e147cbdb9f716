//! A pool that gives its tree up to make room for an import: a crash leaves the former tree or the marked empty one, and an import
//! into the empty one has all the room.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod support;

use area::{Area, AreaError, Import, LedgerPlace, segment_file};
use format::node::ItemKind;
use format::{InodeNumber, Life, Sequence};
use pmem::crash::{Limits, Model, Point};
use pmem::{Medium, Recorder};
use support::{cases, commit, file, findings, pool, state_of, text, write};

/// Where the ledger of a new pool begins.
const BEGINNING: LedgerPlace = LedgerPlace { sequence: Sequence::new(0), position: 4096, life: Life::new(0) };

fn place(sequence: u64) -> LedgerPlace {
    LedgerPlace { sequence: Sequence::new(sequence), position: 4096, life: Life::new(3) }
}

/// More than half of the blocks of an area with these limits.
fn fill(area: &mut Area, inode: u64, byte: u8) {
    let blocks = support::tiny().capacity_blocks * 5 / 8;
    commit(area, &[file(inode, 1, format!("large-{inode}"))], 1000).unwrap();
    for block in (0..blocks).step_by(4) {
        commit(area, &[write(inode, block * 4096, byte, 4 * 4096)], 1001 + block).unwrap();
    }
}

fn import_of(from: &Area, to: Area) -> Result<Area, AreaError> {
    let mut import = Import::begin(to)?;
    import.begin_round(from.version())?;
    import.begin_range(from.whole())?;
    for (key, value) in from.range(None, usize::MAX)? {
        match key.kind().unwrap() {
            ItemKind::Segment => {}
            ItemKind::Extent => {
                let (extents, owner) = from.extents_of(&key, &value)?;
                import.put(key, &value, owner)?;
                for extent in extents.iter().filter(|extent| extent.checksums.is_some()) {
                    for block in extent.first..extent.end() {
                        let (bytes, is_whole) = from.block_as_is(extent, block)?;
                        import.put_block(&bytes, !is_whole)?;
                    }
                }
            }
            _ => import.put(key, &value, 0)?,
        }
    }
    import.sync()?;
    import.finish(&place(9), from.totals())
}

/// Only the root directory is there, and no file of a segment that a tree names.
fn is_empty(area: &Area) -> Result<(), String> {
    let inodes = state_of(area).map_err(text)?;
    let root = area.inode(InodeNumber::ROOT).map_err(text)?.unwrap();
    let (free, all) = (area.usage().blocks_free, area.usage().blocks);
    let is_empty = inodes.len() == 1 && (root.links.get(), root.size.get()) == (2, 0) && free == all;
    if is_empty { Ok(()) } else { Err(format!("{} inodes, {free} of {all} blocks free", inodes.len())) }
}

#[test]
fn a_tree_that_is_given_up_leaves_room_for_one_that_had_none() {
    let (source, own) = (Recorder::new(), Recorder::new());
    let mut from = pool(&source.medium(), 256, support::tiny());
    fill(&mut from, 40, 7);
    let mut area = pool(&own.medium(), 256, support::tiny());
    commit(&mut area, &cases::base(), 1).unwrap();
    fill(&mut area, 50, 8);
    assert!(matches!(import_of(&from, area), Err(AreaError::NoSpace)));
    let area = Area::open(&own.medium(), support::tiny()).unwrap();
    assert!(!area.is_given_up());
    let own_files: Vec<String> = area.segments().unwrap().iter().map(|(id, _)| segment_file(*id)).collect();
    let area = area.give_up_tree(&BEGINNING).unwrap();
    assert!(area.is_given_up() && area.is_imported() && area.ledger() == BEGINNING);
    is_empty(&area).unwrap();
    let files = own.medium().list().unwrap();
    assert!(own_files.len() > 2 && own_files.iter().all(|file| !files.contains(file)), "{files:?}");
    drop(area);
    let area = Area::open(&own.medium(), support::tiny()).unwrap();
    assert!(area.is_given_up());
    let joined = import_of(&from, area).unwrap();
    assert!(joined.is_imported() && !joined.is_given_up());
    assert!(state_of(&from).unwrap() == state_of(&joined).unwrap());
    findings(&own.medium()).unwrap();
    // A process may know a segment by its number.
    let files = own.medium().list().unwrap();
    assert!(own_files.iter().all(|file| !files.contains(file)), "{files:?}");
}

/// From each image, crashes included, the pool can get the tree for which it made room.
#[test]
fn a_crash_leaves_the_former_tree_or_none() {
    let source = Recorder::new();
    let mut from = pool(&source.medium(), 256, support::tiny());
    fill(&mut from, 40, 7);
    let after = state_of(&from).unwrap();
    let mut images = 0;
    for model in [Model::Lines, Model::Pages] {
        let recorder = Recorder::new();
        let mut own = pool(&recorder.medium(), 256, support::tiny());
        commit(&mut own, &cases::base(), 1).unwrap();
        fill(&mut own, 50, 8);
        let before = state_of(&own).unwrap();
        recorder.returned(1);
        let own = own.give_up_tree(&BEGINNING).unwrap();
        recorder.returned(2);
        drop(import_of(&from, own).unwrap());
        recorder.returned(3);
        let recover = |medium: &Medium| match Area::open(medium, support::tiny()) {
            Err(AreaError::Missing) => Ok(None),
            opened => Ok(Some(opened.map_err(text)?)),
        };
        let judge = |opened: Option<Area>, medium: &Medium, point: &Point| {
            let last = point.returned.last().copied().unwrap_or(0);
            let Some(area) = opened else { return if last == 0 { Ok(()) } else { Err("lost".to_owned()) } };
            findings(medium)?;
            match (area.is_given_up(), area.is_imported(), last) {
                (true, _, 1 | 2) => {
                    is_empty(&area)?;
                    let joined = import_of(&from, area).map_err(text)?;
                    let is_whole = state_of(&joined).map_err(text)? == after;
                    findings(medium)?;
                    if is_whole { Ok(()) } else { Err("another tree".to_owned()) }
                }
                (false, true, 2 | 3) if state_of(&area).map_err(text)? == after => Ok(()),
                (false, false, 1) if state_of(&area).map_err(text)? != before => {
                    Err("not what it was".to_owned())
                }
                (false, false, 0 | 1) => Ok(()),
                found => Err(format!("given up, imported, returned: {found:?}")),
            }
        };
        let counts = pmem::crash::crash_recorded(&recorder, model, &Limits::quick(), recover, judge);
        images += counts.unwrap_or_else(|violation| panic!("{violation}")).images;
    }
    assert!(images > 100, "{images}");
}
