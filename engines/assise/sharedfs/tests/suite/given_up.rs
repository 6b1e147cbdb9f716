//! A copy whose pool has no room for its own tree and that of the head together: it gives up its own, if that counts for nothing,
//! and never leads before it has that of the head.

use crate::client::{Client, DIRECTORY, FILE, ROOT, user};
use crate::crash::{Run, check_pool, limits, prove_on_both};
use crate::join::{assert_equal, fill, go_round};
use crate::pair::{COPY, HEAD, Pair, config, format_for, sync, term};
use crate::second_copy::items;
use crate::still::{StillHost, drive_by};
use format::NodeId;
use mirror::Error::{ImportRoom, PoolRoom, TreeGivenUp};
use pmem::crash::{Limits, Point, crash_recorded};
use pmem::{Medium, Recorder};
use sharedfs::{Config, Daemon, Error, Standby};
use std::cell::Cell;
use std::sync::Arc;

/// Blocks of a pool with room for one of the trees below, and not for two.
const BLOCKS: u64 = 230;
/// Blocks of the files of a tree.
const FILES: std::ops::Range<u32> = 0..5;
const FILE_BYTES: usize = 100_000;

pub fn small(blocks: u64) -> Config {
    let config = config(COPY);
    Config { area: area::Limits { capacity_blocks: blocks, ..config.area }, ..config }
}

/// A copy that counts, with a pool of so many blocks and most of them in use.
fn pair_of(recorders: &[Recorder; 2], blocks: u64) -> Pair {
    pair_with(recorders, small(blocks))
}

pub fn pair_with(recorders: &[Recorder; 2], of_copy: Config) -> Pair {
    format_for(&recorders[0].medium(), HEAD);
    format_for(&recorders[1].medium(), COPY);
    let pair = Pair::apart(StillHost::first(), &recorders[0], &recorders[1], of_copy);
    pair.daemon.add_copy(pair.connect()).unwrap();
    fill(&pair, FILES, FILE_BYTES);
    pair.quiesce();
    pair
}

/// All files are replaced while the copy is away, and the head keeps no more what it lacks.
fn replace_all(pair: &Pair) {
    pair.daemon.remove_copy(NodeId::new(COPY));
    let mut one = pair.attach();
    one.write_lease(ROOT);
    for name in FILES {
        let name = format!("file-{name}");
        let file = one.walk(&name).unwrap().inode;
        one.write_lease(file);
        assert!(one.unlink(ROOT, name.as_bytes(), file, 0));
        one.digest(true).unwrap();
    }
    pair.daemon.end(one.session);
    fill(pair, FILES, FILE_BYTES);
    go_round(pair, 300);
}

/// The view says that this node may replace the tree of the copy.
pub fn let_replace(pair: &Pair, by: u32) {
    pair.follows.borrow().standby.set_replaceable(Some(NodeId::new(by)));
}

/// An attempt to make it a copy; returns the reason for which the copy ended it.
pub fn fail_to_add(pair: &Pair) -> mirror::Error {
    let added = pair.daemon.add_copy(pair.connect());
    assert!(matches!(added, Err(Error::Copy(..))), "{added:?}");
    assert!(pair.daemon.copies().is_empty());
    let end = pair.follows.borrow_mut().link_end.take();
    end.unwrap()
}

fn has_given_up(pair: &Pair) -> bool {
    pair.follows.borrow().standby.has_given_up()
}

#[test]
fn a_copy_without_room_for_both_trees_gives_up_its_own_and_joins() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = pair_of(&recorders, BLOCKS);
    replace_all(&pair);
    let before = items(&recorders[1].medium(), false);
    // The node may be in sync, or another one leads: its tree may be the last one.
    for by in [None, Some(COPY), Some(9)] {
        by.into_iter().for_each(|by| let_replace(&pair, by));
        assert_eq!(fail_to_add(&pair), ImportRoom);
        assert!(!has_given_up(&pair) && before == items(&recorders[1].medium(), false));
    }
    let_replace(&pair, HEAD);
    assert_eq!(fail_to_add(&pair), TreeGivenUp);
    assert!(has_given_up(&pair));
    assert_eq!(items(&recorders[1].medium(), false).1.len(), 1, "the root directory is left");
    pair.daemon.add_copy(pair.connect()).unwrap();
    assert!(!has_given_up(&pair));
    pair.quiesce();
    assert_equal([&recorders[0], &recorders[1]]);
    let (daemon, _) = pair.take_over();
    assert!(Client::attach(&daemon, user(0)).walk("file-3").is_ok());
}

/// The head dies while its tree is sent into the empty pool, and no other node is left: this one waits, however often it is
/// started, and gets the tree when the head is back.
#[test]
fn a_copy_that_gave_up_its_tree_never_leads_before_it_has_another() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = pair_of(&recorders, BLOCKS);
    replace_all(&pair);
    let_replace(&pair, HEAD);
    assert_eq!(fail_to_add(&pair), TreeGivenUp);
    let refuses = |standby: &Standby| {
        let led = standby.lead(term(COPY, 9), Vec::new()).map(drop);
        assert!(matches!(led, Err(Error::TreeGivenUp)), "{led:?}");
        assert!(standby.has_given_up());
    };
    for round in [0, 1, 20] {
        let connection = pair.connect();
        let cut = connection.clone();
        pair.follows.borrow_mut().meanwhile = Some((1 + round, Box::new(move || cut.close())));
        assert!(pair.daemon.add_copy(connection).is_err());
        let before = pair.follows.borrow().standby.clone();
        before.stop();
        let opened = Daemon::open(StillHost::again(), &recorders[1].medium(), small(BLOCKS));
        assert!(matches!(opened.map(drop), Err(Error::TreeGivenUp)));
        let standby = Standby::open(StillHost::again(), &recorders[1].medium(), small(BLOCKS)).unwrap();
        pair.follows.borrow_mut().standby = standby.clone();
        if round == 1 {
            refuses(&standby);
            standby.stop();
            let again = Standby::open(StillHost::again(), &recorders[1].medium(), small(BLOCKS)).unwrap();
            pair.follows.borrow_mut().standby = again;
        }
    }
    pair.daemon.add_copy(pair.connect()).unwrap();
    assert!(!has_given_up(&pair));
    pair.quiesce();
    assert_equal([&recorders[0], &recorders[1]]);
}

/// A pool that holds nothing else, and has no room all the same, says so.
#[test]
fn an_empty_pool_without_room_says_so() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = pair_of(&recorders, BLOCKS);
    replace_all(&pair);
    fill(&pair, 10..12, FILE_BYTES * 2);
    let_replace(&pair, HEAD);
    assert_eq!(fail_to_add(&pair), TreeGivenUp);
    for _ in 0..2 {
        assert_eq!(fail_to_add(&pair), PoolRoom);
        assert!(has_given_up(&pair));
    }
    let mut one = pair.attach();
    one.write_lease(ROOT);
    for name in ["file-10", "file-11"] {
        let file = one.walk(name).unwrap().inode;
        one.write_lease(file);
        assert!(one.unlink(ROOT, name.as_bytes(), file, 0));
        one.digest(true).unwrap();
    }
    pair.daemon.end(one.session);
    pair.daemon.tidy();
    pair.daemon.add_copy(pair.connect()).unwrap();
    pair.quiesce();
    assert_equal([&recorders[0], &recorders[1]]);
}

/// Marks of the recorder: the copy is away; it has given up its tree; it counts again.
const AWAY: u64 = 900;
const EMPTY: u64 = 901;
const JOINED: u64 = 902;

/// Operations of a copy, then of the head alone; the copy gives up its tree and joins. Returns how many operations it had, and how
/// many the tree contains that it gets.
fn away_and_back(recorders: &[Recorder; 2]) -> (u64, u64) {
    let pair = pair_of(recorders, BLOCKS);
    let mut one = pair.attach();
    one.write_lease(ROOT);
    let (folder, _) = one.create(ROOT, b"folder", DIRECTORY | 0o755);
    let (shared, _) = one.create(folder, b"shared", FILE | 0o644);
    let mut run = Run { recorders: recorders.to_vec(), folder, shared, done: 0 };
    run.operate(&mut one);
    run.operate(&mut one);
    sync(&one, &[(folder, 1), (shared, 1)]).unwrap();
    pair.quiesce();
    let had = run.done;
    recorders[1].returned(AWAY);
    pair.daemon.remove_copy(NodeId::new(COPY));
    run.operate(&mut one);
    one.digest(true).unwrap();
    let sent = run.done;
    one.release();
    replace_all(&pair);
    let_replace(&pair, HEAD);
    assert_eq!(fail_to_add(&pair), TreeGivenUp);
    recorders[1].returned(EMPTY);
    pair.daemon.add_copy(pair.connect()).unwrap();
    recorders[1].returned(JOINED);
    (had, sent)
}

/// How an image of the copy's pool opens.
enum Reopened {
    Leads(Arc<Daemon>),
    GivenUp,
    NoPool,
}

/// The node is started with this image: as a daemon that leads, or if it cannot, as a standby.
fn reopen(medium: &Medium) -> Result<Reopened, String> {
    match Daemon::open(StillHost::again(), medium, small(BLOCKS)) {
        Ok((daemon, _)) => Ok(Reopened::Leads(Arc::new(daemon))),
        Err(Error::Area(area::AreaError::Missing)) => Ok(Reopened::NoPool),
        Err(Error::TreeGivenUp) => {
            let standby =
                Standby::open(StillHost::again(), medium, small(BLOCKS)).map_err(|why| why.to_string())?;
            let gave_up = standby.has_given_up();
            let leads = standby.lead(term(COPY, 9), Vec::new()).map(drop);
            standby.stop();
            match (gave_up, leads) {
                (true, Err(Error::TreeGivenUp)) => Ok(Reopened::GivenUp),
                (gave_up, leads) => Err(format!("it gave up its tree: {gave_up}, and leads: {leads:?}")),
            }
        }
        Err(error) => Err(error.to_string()),
    }
}

fn prove(limits: &Limits) -> pmem::crash::Counts {
    let recorders = [Recorder::new(), Recorder::new()];
    let (had, sent) = away_and_back(&recorders);
    drive_by(Box::new(|| false));
    let given_up = Cell::new(0);
    let judge = |reopened: Reopened, medium: &Medium, point: &Point| {
        let is_past = |mark| point.returned.contains(&mark);
        let daemon = match reopened {
            Reopened::Leads(daemon) => daemon,
            Reopened::GivenUp if is_past(AWAY) && !is_past(JOINED) => {
                given_up.set(given_up.get() + 1);
                let report = area::check::check(medium).map_err(|error| error.to_string())?;
                return if report.is_clean() { Ok(()) } else { Err(format!("{:?}", report.findings)) };
            }
            Reopened::NoPool if point.returned.is_empty() => return Ok(()),
            Reopened::GivenUp | Reopened::NoPool => return Err("the pool has no tree".to_owned()),
        };
        let found = check_pool(&daemon, medium)?;
        let is_right = match (is_past(AWAY), is_past(EMPTY)) {
            (false, _) => found <= had,
            (true, false) => found == had,
            (true, true) => found >= sent,
        };
        if is_right { Ok(()) } else { Err(format!("{found} operations, of {had} and {sent}")) }
    };
    let counts = prove_on_both(
        |model| format!("sharedfs, tree given up, {model:?}, {limits:?}"),
        |model| crash_recorded(&recorders[1], model, limits, reopen, &judge),
    );
    assert!(given_up.get() > 10, "{} images without a tree", given_up.get());
    counts
}

#[test]
fn a_crash_leaves_the_former_tree_or_none_or_that_of_the_head() {
    assert!(prove(&limits()).images > 300);
}

#[test]
fn a_crash_of_what_a_crash_left_of_a_tree_is_survived() {
    let few =
        Limits { complete_max: 2, near_max: 0, sampled: 1, recovery_images: 2, recovery_every: 4, seed: 16 };
    assert!(prove(&few).recovery_images > 100);
}
